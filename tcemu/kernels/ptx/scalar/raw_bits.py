"""Raw bits as integers and as floats: helpers of all scalar instructions. `tcemu.kernels.ptx.text.ptx_types` says how values are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tcemu.engine.formats.number_formats import BF16, F16, F32, F64, Format
from tcemu.kernels.ptx.instruction_interface import Operation
from tcemu.kernels.ptx.text.ptx_types import KINDS, storage_dtype

FLOAT_FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
CANONICAL_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0xFFF8000000000000}  # result of an invalid operation on an H200


def width(kind: str) -> int:
    """Return the bits of a type."""
    return KINDS[kind].bits


def ones(bits: int) -> int:
    """Return an integer whose lowest `bits` bits are set."""
    return (1 << bits) - 1


# ---- integers


def truncate(x: Array, kind: str) -> Array:
    """Return the lowest bits of any integers as values of a type."""
    bits, storage = width(kind), storage_dtype(kind)
    x = x.astype(storage)
    return x if bits == storage.itemsize * 8 else x & storage.type(ones(bits))


def as_signed(x: Array, kind: str) -> Array:
    """Interpret values of any type as signed integers: int32 for up to 32 bits, int64 for 64."""
    bits = width(kind)
    if bits == 64:
        return x.astype(jnp.int64)
    return (x.astype(jnp.int32) << (32 - bits)) >> (32 - bits) if bits < 32 else x.astype(jnp.int32)


def as_integer(x: Array, kind: str) -> Array:
    """Interpret values as integers, signed if the type is signed."""
    return as_signed(x, kind) if KINDS[kind].signed else x


def as_wide_integer(x: Array, kind: str) -> Array:
    """Interpret values of up to 32 bits as integers of 64 bits."""
    return as_integer(x, kind).astype(jnp.int64 if KINDS[kind].signed else jnp.uint64)


# ---- packed types


def split_halves(x: Array) -> Array:
    """Split packed pairs into [2, ...]: the lower and the upper 16 bits."""
    return jnp.stack([x & 0xFFFF, x >> 16])


def join_halves(x: Array) -> Array:
    """Join [2, ...] into packed pairs, the inverse of `split_halves`."""
    return x[0] | (x[1] << 16)


def apply_to_halves(compute: Callable[..., Array]) -> Callable[..., Array]:
    """Lift a function of 16-bit values to packed pairs."""
    return lambda *values: join_halves(compute(*map(split_halves, values)))


def apply_to_f32_pair(compute: Callable[..., Array]) -> Callable[..., Array]:
    """Lift a function of f32 values to f32x2."""

    def compute_pair(*values: Array) -> Array:
        both = compute(*(jnp.stack([x.astype(jnp.uint32), (x >> 32).astype(jnp.uint32)]) for x in values)).astype(jnp.uint64)
        return both[0] | (both[1] << 32)

    return compute_pair


def element_kind(kind: str) -> str:
    """Return the type of one element: "f16" for "f16x2", any other type for itself."""
    return kind.removesuffix("x2")


def elementwise_operation(kind: str, count: int, compute: Callable[..., Array]) -> Operation:
    """Build the operation of `count` values of one type from a function of single elements."""
    if kind == "f32x2":
        compute = apply_to_f32_pair(compute)
    elif kind != element_kind(kind):
        compute = apply_to_halves(compute)
    return Operation((kind,), (kind,) * count, lambda *values: (compute(*values),))


# ---- floats


class FormatConstants(NamedTuple):
    """Constants of a float format as codes."""

    sign: int  # sign bit
    magnitude: int  # mask of all bits but the sign
    infinity: int
    hidden_bit: int  # hidden bit of the significand, which is also the code of the smallest normal number
    one: int
    max_finite: int


def format_constants(kind: str) -> FormatConstants:
    """Return the constants of a float type."""
    fmt: Format = FLOAT_FORMATS[kind]
    sign = 1 << (fmt.bits - 1)
    return FormatConstants(sign, sign - 1, fmt.infinity, 1 << fmt.mantissa_bits, fmt.bias << fmt.mantissa_bits, fmt.max_magnitude)


def magnitude(x: Array, kind: str) -> Array:
    """Return all bits but the sign."""
    return x & x.dtype.type(format_constants(kind).magnitude)


def sign_bit(x: Array, kind: str) -> Array:
    """Return the sign bit in its position."""
    return x & x.dtype.type(format_constants(kind).sign)


def is_nan(x: Array, kind: str) -> Array:
    """Return a bool array, True for NaNs."""
    return magnitude(x, kind) > x.dtype.type(format_constants(kind).infinity)


def flush_subnormals(x: Array, kind: str) -> Array:
    """Replace subnormals by the zero of their sign, as `.ftz` does."""
    return jnp.where(magnitude(x, kind) < x.dtype.type(format_constants(kind).hidden_bit), sign_bit(x, kind), x)


def comparison_key(x: Array, kind: str) -> tuple[Array, Array]:
    """Return signed integers in the order of the numbers (0 for both zeros), and a bool array, True for NaNs."""
    size = as_signed(magnitude(x, kind), "s64" if kind == "f64" else "s32")
    return jnp.where(sign_bit(x, kind) != 0, -size, size), is_nan(x, kind)
