"""What can be said of a float by its bits alone: its fields, its order, whether it is a NaN. Values are raw bits, as everywhere here."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tcemu.formats import BF16, F16, F32, F64, Format
from tcemu.ptx.scalar.lanes import signed

FLOATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
CANONICAL = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0xFFF8000000000000}  # the NaN of an invalid operation, on an H200


class Code(NamedTuple):
    """Constants of one format, in its own width."""

    sign: int
    magnitude: int  # all but the sign
    infinity: int
    hidden: int  # the least normal number is hidden as a code too: 1 in the exponent field
    one: int
    greatest: int


def code(kind: str) -> Code:
    """The constants of a float type."""
    fmt: Format = FLOATS[kind]
    sign = 1 << (fmt.bits - 1)
    return Code(sign, sign - 1, fmt.infinity, 1 << fmt.mantissa_bits, fmt.bias << fmt.mantissa_bits, fmt.greatest_magnitude)


def magnitude(x: Array, kind: str) -> Array:
    """All bits but the sign."""
    return x & x.dtype.type(code(kind).magnitude)


def sign(x: Array, kind: str) -> Array:
    """The sign's bit, where it stands."""
    return x & x.dtype.type(code(kind).sign)


def is_nan(x: Array, kind: str) -> Array:
    """bool."""
    return magnitude(x, kind) > x.dtype.type(code(kind).infinity)


def flushed(x: Array, kind: str) -> Array:
    """`.ftz`: a subnormal as the zero of its sign."""
    return jnp.where(magnitude(x, kind) < x.dtype.type(code(kind).hidden), sign(x, kind), x)


def ordered(x: Array, kind: str) -> tuple[Array, Array]:
    """A signed integer in the order of the numbers, 0 for both zeros, and whether the value is a NaN."""
    size = signed(magnitude(x, kind), "s64" if kind == "f64" else "s32")
    return jnp.where(sign(x, kind) != 0, -size, size), is_nan(x, kind)
