"""cvt to and from formats of 8, 6 and 4 bits, in pairs (PTX ISA 9.7.9.21)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from tcemu.formats import BF16, F16, F32, FORMATS, Format, decode, encode
from tcemu.ptx.context import Operation
from tcemu.ptx.scalar.lanes import halves
from tcemu.ptx.scalar.number_codes import is_nan, sign
from tcemu.ptx.scalar.syntax import Qualifiers

SOURCES = {"f16": F16, "bf16": BF16, "f32": F32}


def place(fmt: Format) -> int:
    """The distance of the two elements of a pair: formats of 6 bits take a byte each, those of 4 half a byte."""
    return 4 if fmt.bits == 4 else 8


def to_narrow(qualifiers: Qualifiers) -> Operation:
    """Two f32, the first in the upper part, or a packed pair -> a pair of a narrow format."""
    to, of = qualifiers.types
    fmt, source = FORMATS[to.removesuffix("x2")], of.removesuffix("x2")

    def codes(x: Array) -> Array:
        if "relu" in qualifiers:
            x = jnp.where((sign(x, source) != 0) & ~is_nan(x, source), 0, x).astype(x.dtype)
        finite = "saturate" if "satfinite" in qualifiers else "ieee"
        return encode(fmt, decode(SOURCES[source], x), qualifiers.rounding.upper(), overflow=finite).astype(jnp.uint32)

    def compute(*values: Array) -> tuple[Array]:
        x = jnp.stack(jnp.broadcast_arrays(*values[::-1])) if len(values) == 2 else halves(values[0])
        lower, upper = codes(x)
        return (lower | (upper << place(fmt)),)

    return Operation((to,), (of,) if of != source else (of, of), compute)


def from_narrow(qualifiers: Qualifiers) -> Operation:
    """A pair of a narrow format -> a packed pair of f16 or bf16, which hold every value."""
    to, of = qualifiers.types
    fmt, target = FORMATS[of.removesuffix("x2")], to.removesuffix("x2")

    def compute(x: Array) -> tuple[Array]:
        both = jnp.stack([x, x >> place(fmt)]) & ((1 << fmt.bits) - 1)
        codes = encode(SOURCES[target], decode(fmt, both)).astype(jnp.uint32)
        if "relu" in qualifiers:
            codes = jnp.where((sign(codes, target) != 0) & ~is_nan(codes, target), 0, codes).astype(jnp.uint32)
        return (codes[0] | (codes[1] << 16),)

    return Operation((to,), (of,), compute)
