"""cvt to and from formats of 8, 6 and 4 bits, in pairs (PTX ISA 9.7.9.21)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from tcemu.errors import Unsupported
from tcemu.formats import BF16, F16, F32, FORMATS, Format, decode, encode
from tcemu.ptx.context import Operation
from tcemu.ptx.scalar.lanes import halves
from tcemu.ptx.scalar.number_codes import code, is_nan, magnitude, sign
from tcemu.ptx.scalar.syntax import Qualifiers

LEAST_SCALE = 0x00400000  # 2^-127 as f32
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


def to_scale(qualifiers: Qualifiers) -> Operation:
    """Two f32, the first in the upper part, or a bf16x2 -> a pair of ue8m0, powers of two; signs are dropped.

    Source: what NVIDIA computes where a GPU has no such instruction, CUDA 13.0 cuda_fp8.hpp, __nv_cvt_bfloat16raw_to_e8m0.
    """
    of = qualifiers.types[1]

    def compute(*values: Array) -> tuple[Array]:
        x = jnp.stack(jnp.broadcast_arrays(*values[::-1])) if len(values) == 2 else halves(values[0]) << 16
        size = magnitude(x, "f32")
        field = size >> 23
        if "rp" in qualifiers:
            above = (size > LEAST_SCALE) & (size < code("f32").infinity) & (size & 0x7FFFFF != 0)
            field = field + above.astype(jnp.uint32)
        if "satfinite" in qualifiers:
            field = jnp.where((field == 0xFF) & ~is_nan(x, "f32"), jnp.uint32(0xFE), field)
        return (field[0] | (field[1] << 8),)

    return Operation(("ue8m0x2",), (of,) if of == "bf16x2" else (of, of), compute)


def stochastic(qualifiers: Qualifiers) -> Operation:
    """cvt.rs is refused: nobody has measured which random bits round which element. Raises Unsupported."""
    raise Unsupported(
        f"cvt.{'.'.join(qualifiers)} rounds by random bits, and no GPU that has it was measured: which of them round which element "
        "is not known to the bit. .rn is run, and .rz for f16x2 and bf16x2 (PTX ISA 9.7.9.21)"
    )


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
