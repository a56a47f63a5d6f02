"""Floating-point arithmetic with one rounding (PTX ISA 9.7.3 to 9.7.5): add, sub, mul, fma, mad, div, rcp, sqrt, min, max, abs, neg.

NaN bits, and results that the manual leaves open, are those of an NVIDIA H200 (tests/golden, ptx_scalars).
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.kernels.ptx.instruction_interface import Operation
from tcemu.kernels.ptx.scalar.opcode_syntax import OperandShape, Qualifiers
from tcemu.kernels.ptx.scalar.raw_bits import (
    CANONICAL_NAN,
    element_kind,
    elementwise_operation,
    flush_subnormals,
    format_constants,
    is_nan,
    magnitude,
    sign_bit,
)
from tcemu.kernels.ptx.scalar.softfloat import (
    FloatParts,
    add_parts,
    decompose,
    divide_parts,
    fused_multiply_add,
    multiply_parts,
    round_to_bits,
    square_root_parts,
)
from tcemu.kernels.ptx.text.ptx_types import storage_dtype

F64_QUIET_BIT = 1 << 51  # bit of an f64 NaN that makes it quiet
OUT_OF_BOUNDS_NAN = 0x7FF7  # magnitude of the NaN of f16 and bf16 that marks an element out of bounds
ExactFunction = Callable[..., FloatParts]


def flip_sign(x: Array, kind: str) -> Array:
    """Return x with its sign bit inverted."""
    return x ^ x.dtype.type(format_constants(kind).sign)


def saturate_to_one(x: Array, kind: str) -> Array:
    """Clamp to [+0, 1], as `.sat` does; NaN becomes +0."""
    one = x.dtype.type(format_constants(kind).one)
    clamped = jnp.minimum(x, one)  # the codes of numbers above one and of positive NaNs are above the code of one
    return jnp.where((sign_bit(x, kind) != 0) | is_nan(x, kind), 0, clamped).astype(x.dtype)


def apply_relu(x: Array, kind: str) -> Array:
    """Replace negative numbers by +0 and NaNs by the canonical NaN, as `.relu` does."""
    result = jnp.where(sign_bit(x, kind) != 0, x.dtype.type(0), x)
    return jnp.where(is_nan(x, kind), x.dtype.type(CANONICAL_NAN[kind]), result)


def apply_qualifiers(x: Array, kind: str, qualifiers: Qualifiers) -> Array:
    """Apply `.satfinite` (which replaces Inf by the largest finite number), `.sat` and `.relu` to a rounded result."""
    if "satfinite" in qualifiers:
        constants = format_constants(kind)
        x = jnp.where(magnitude(x, kind) == constants.infinity, sign_bit(x, kind) | constants.max_finite, x).astype(x.dtype)
    x = saturate_to_one(x, kind) if "sat" in qualifiers else x
    return apply_relu(x, kind) if "relu" in qualifiers else x


def propagate_first_nan(result: Array, *operands: Array) -> Array:
    """Replace an f64 result by the first operand that is NaN, made quiet, if there is one."""
    for x in reversed(operands):
        result = jnp.where(is_nan(x, "f64"), x | jnp.uint64(F64_QUIET_BIT), result)
    return result


def rounded_operation(
    exact: Callable[[str, str], ExactFunction], count: int, order: tuple[int, ...] = ()
) -> Callable[[Qualifiers], Operation]:
    """Return the builder of an operation on `count` floats of one type.

    Args:
        exact: Function of the type and the rounding that returns an exact function of parts.
        count: Number of operands.
        order: Indices of the operands in the order in which f64 propagates their NaNs.
    """

    def build(qualifiers: Qualifiers) -> Operation:
        kind = qualifiers.types[0]
        element, rounding = element_kind(kind), qualifiers.rounding
        compute_exact = exact(element, rounding)

        def compute(*values: Array) -> Array:
            values = tuple(flush_subnormals(x, element) for x in values) if "ftz" in qualifiers else values
            result = round_to_bits(compute_exact(*(decompose(x, element) for x in values)), element, rounding, "ftz" in qualifiers)
            result = propagate_first_nan(result, *(values[i] for i in order)) if kind == "f64" else result
            result = apply_qualifiers(result, element, qualifiers)
            return apply_out_of_bounds(result, values, element) if "oob" in qualifiers else result

        return elementwise_operation(kind, count, compute)

    return build


def apply_out_of_bounds(result: Array, values: tuple[Array, ...], kind: str) -> Array:
    """Replace a result by +0 where a factor is the NaN that marks out of bounds, as `.oob` does on an H200 (9.7.4.4)."""
    marked = (magnitude(values[0], kind) == OUT_OF_BOUNDS_NAN) | (magnitude(values[1], kind) == OUT_OF_BOUNDS_NAN)
    return jnp.where(marked, 0, result).astype(result.dtype)


def negate_parts(x: FloatParts) -> FloatParts:
    """Return -x."""
    return x._replace(negative=~x.negative)


add = rounded_operation(lambda kind, rounding: lambda x, y: add_parts(x, y, rounding), 2, (1, 0))
subtract = rounded_operation(lambda kind, rounding: lambda x, y: add_parts(x, negate_parts(y), rounding), 2, (1, 0))
multiply = rounded_operation(lambda kind, rounding: lambda x, y: multiply_parts(x, y, kind), 2, (1, 0))
multiply_add = rounded_operation(lambda kind, rounding: lambda x, y, z: fused_multiply_add(x, y, z, kind, rounding), 3, (1, 2, 0))
divide = rounded_operation(lambda kind, rounding: lambda x, y: divide_parts(x, y, kind), 2, (0, 1))
square_root = rounded_operation(lambda kind, rounding: square_root_parts, 1, (0,))


def reciprocal(qualifiers: Qualifiers) -> Operation:
    """Build rcp: 1 / x."""
    kind = qualifiers.type

    def exact(x: FloatParts) -> FloatParts:
        return divide_parts(decompose(jnp.asarray(storage_dtype(kind).type(format_constants(kind).one)), kind), x, kind)

    return rounded_operation(lambda *_: exact, 1, (0,))(qualifiers)


def mixed_operation(exact: Callable[..., FloatParts], count: int) -> Callable[[Qualifiers], Operation]:
    """Return the builder of add, sub or fma with an f32 sum of f16 or bf16 operands, as `.f32.f16`; the last operand is f32 (9.7.5)."""

    def build(qualifiers: Qualifiers) -> Operation:
        narrow, rounding = qualifiers.type, qualifiers.rounding

        def compute(*values: Array) -> tuple[Array]:
            parts = (*(decompose(x, narrow) for x in values[:-1]), decompose(values[-1], "f32"))
            return (apply_qualifiers(round_to_bits(exact(*parts, rounding), "f32", rounding), "f32", qualifiers),)

        return Operation(("f32",), (narrow,) * (count - 1) + ("f32",), compute)

    return build


mixed_add = mixed_operation(add_parts, 2)
mixed_subtract = mixed_operation(lambda x, y, rounding: add_parts(x, negate_parts(y), rounding), 2)
mixed_multiply_add = mixed_operation(lambda x, y, z, rounding: fused_multiply_add(x, y, z, "f32", rounding), 3)


# ---- signs and extrema


def sign_operation(compute: Callable[[Array, str], Array]) -> Callable[[Qualifiers], Operation]:
    """Return the builder of an operation on the bits of one float.

    A NaN becomes the canonical NaN; an f64 NaN keeps its bits and becomes quiet.
    """

    def build(qualifiers: Qualifiers) -> Operation:
        kind = qualifiers.type
        element = element_kind(kind)

        def compute_bits(x: Array) -> Array:
            x = flush_subnormals(x, element) if "ftz" in qualifiers else x
            nan = x | jnp.uint64(F64_QUIET_BIT) if element == "f64" else x.dtype.type(CANONICAL_NAN[element])
            return jnp.where(is_nan(x, element), nan, compute(x, element))

        return elementwise_operation(kind, 1, compute_bits)

    return build


absolute = sign_operation(magnitude)
negate = sign_operation(flip_sign)


def extremum(qualifiers: Qualifiers, shape: OperandShape, minimum: bool) -> Operation:
    """Build min or max of two values, or of three f32.

    -0 is below +0. A NaN and a number give the number, or with `.NaN` the canonical NaN.
    """
    kind = qualifiers.type
    count = 3 if kind == "f32" and len(shape.sizes) == 4 else 2
    element = element_kind(kind)

    def key(x: Array) -> Array:
        size = magnitude(x, element).astype(jnp.int64 if element == "f64" else jnp.int32)
        return jnp.where(sign_bit(x, element) != 0, ~size, size)

    def choose(a: Array, b: Array) -> Array:
        result = jnp.where((key(a) < key(b)) == minimum, a, b)
        a_nan, b_nan = is_nan(a, element), is_nan(b, element)
        if "NaN" not in qualifiers:
            result = jnp.where(a_nan, b, jnp.where(b_nan, a, result))
        any_nan = (a_nan | b_nan) if "NaN" in qualifiers else (a_nan & b_nan)
        nan = b | jnp.uint64(F64_QUIET_BIT) if element == "f64" else a.dtype.type(CANONICAL_NAN[element])
        return jnp.where(any_nan, nan, result)

    def compute(*values: Array) -> Array:
        values = tuple(flush_subnormals(x, element) for x in values) if "ftz" in qualifiers else values
        candidates = tuple(magnitude(x, element) for x in values) if "abs" in qualifiers else values
        result = candidates[0]
        for x in candidates[1:]:
            result = choose(result, x)
        if "xorsign" in qualifiers:
            signs = sign_bit(values[0] ^ values[1], element)
            result = jnp.where(is_nan(result, element), result, result | signs)
        return result

    if "abs" in qualifiers and "xorsign" not in qualifiers and count == 2:
        raise Unsupported("min and max with .abs alone take three operands (PTX ISA 9.7.3.11)")
    return elementwise_operation(kind, count, compute)
