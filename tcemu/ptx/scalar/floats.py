"""Floating-point arithmetic with one rounding (PTX ISA 9.7.3 to 9.7.5): add, sub, mul, fma, mad, div, rcp, sqrt, min, max, abs, neg.

NaN words, and what the manual leaves open: as an NVIDIA H200 gives them (tests/golden, ptx_scalars).
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from tcemu.errors import Unsupported
from tcemu.ptx.context import Operation
from tcemu.ptx.scalar.float_core import Parts, fused, pack, product, quotient, root, total, unpack
from tcemu.ptx.scalar.lanes import paired
from tcemu.ptx.scalar.number_codes import CANONICAL, code, flushed, is_nan, magnitude, sign
from tcemu.ptx.scalar.syntax import Qualifiers, Shape
from tcemu.ptx.values import dtype

QUIET = 1 << 51  # the bit of an f64 NaN that makes it quiet
OUT_OF_BOUNDS = 0x7FF7  # without its sign; of f16 and of bf16
Exact = Callable[..., Parts]


def negated(x: Array, kind: str) -> Array:
    """The sign's bit turned."""
    return x ^ x.dtype.type(code(kind).sign)


def clamped(x: Array, kind: str) -> Array:
    """`.sat`: to [+0, 1]; NaN becomes +0."""
    one = x.dtype.type(code(kind).one)
    inside = jnp.minimum(x, one)  # codes of numbers above one, and of positive NaNs, are above its code
    return jnp.where((sign(x, kind) != 0) | is_nan(x, kind), 0, inside).astype(x.dtype)


def rectified(x: Array, kind: str) -> Array:
    """`.relu`: a negative number becomes +0; NaN the canonical one."""
    size = jnp.where(sign(x, kind) != 0, x.dtype.type(0), x)
    return jnp.where(is_nan(x, kind), x.dtype.type(CANONICAL[kind]), size)


def finished(x: Array, kind: str, qualifiers: Qualifiers) -> Array:
    """What the qualifiers do to a rounded result: `.sat`, `.relu`."""
    x = clamped(x, kind) if "sat" in qualifiers else x
    return rectified(x, kind) if "relu" in qualifiers else x


def first_nan(result: Array, *operands: Array) -> Array:
    """f64: a NaN result is the first of the operands that is NaN, made quiet."""
    for x in reversed(operands):
        result = jnp.where(is_nan(x, "f64"), x | jnp.uint64(QUIET), result)
    return result


def rounded_once(exact: Callable[[str, str], Exact], count: int, order: tuple[int, ...] = ()) -> Callable[[Qualifiers], Operation]:
    """An operation of `count` floats of one type.

    exact: from the type and the rounding a function of parts. order: of f64, whose NaN comes first.
    """

    def build(qualifiers: Qualifiers) -> Operation:
        kind = qualifiers.types[0]
        single, rounding = kind.removesuffix("x2"), qualifiers.rounding
        compute = exact(single, rounding)

        def one(*values: Array) -> Array:
            values = tuple(flushed(x, single) for x in values) if "ftz" in qualifiers else values
            result = pack(compute(*(unpack(x, single) for x in values)), single, rounding, "ftz" in qualifiers)
            result = first_nan(result, *(values[i] for i in order)) if kind == "f64" else result
            result = finished(result, single, qualifiers)
            return out_of_bounds(result, values, single) if "oob" in qualifiers else result

        whole = one if single == kind else paired(one) if single != "f32" else paired_words(one)
        return Operation((kind,), (kind,) * count, lambda *values: (whole(*values),))

    return build


def paired_words(compute: Callable[..., Array]) -> Callable[..., Array]:
    """A function of f32 values, on both halves of f32x2."""

    def whole(*values: Array) -> Array:
        both = compute(*(jnp.stack([x.astype(jnp.uint32), (x >> 32).astype(jnp.uint32)]) for x in values)).astype(jnp.uint64)
        return both[0] | (both[1] << 32)

    return whole


def out_of_bounds(result: Array, values: tuple[Array, ...], kind: str) -> Array:
    """`.oob`: +0 where a factor is the NaN that stands for out of bounds, as an H200 has it (9.7.4.4)."""
    marked = (magnitude(values[0], kind) == OUT_OF_BOUNDS) | (magnitude(values[1], kind) == OUT_OF_BOUNDS)
    return jnp.where(marked, 0, result).astype(result.dtype)


def opposite(x: Parts) -> Parts:
    """-x."""
    return x._replace(negative=~x.negative)


add = rounded_once(lambda kind, rounding: lambda x, y: total(x, y, rounding), 2, (1, 0))
subtract = rounded_once(lambda kind, rounding: lambda x, y: total(x, opposite(y), rounding), 2, (1, 0))
multiply = rounded_once(lambda kind, rounding: lambda x, y: product(x, y, kind), 2, (1, 0))
multiply_add = rounded_once(lambda kind, rounding: lambda x, y, z: fused(x, y, z, kind, rounding), 3, (1, 2, 0))
divide = rounded_once(lambda kind, rounding: lambda x, y: quotient(x, y, kind), 2, (0, 1))
square_root = rounded_once(lambda kind, rounding: root, 1, (0,))


def reciprocal(qualifiers: Qualifiers) -> Operation:
    """rcp: 1 / x."""
    kind = qualifiers.type

    def exact(x: Parts) -> Parts:
        return quotient(unpack(jnp.asarray(dtype(kind).type(code(kind).one)), kind), x, kind)

    return rounded_once(lambda *_: exact, 1, (0,))(qualifiers)


def mixed(exact: Callable[..., Parts], count: int) -> Callable[[Qualifiers], Operation]:
    """add, sub, fma with f32 sums of f16 or bf16 operands: `.f32.f16`; the last operand is f32 (9.7.5)."""

    def build(qualifiers: Qualifiers) -> Operation:
        narrow, rounding = qualifiers.type, qualifiers.rounding

        def compute(*values: Array) -> tuple[Array]:
            parts = (*(unpack(x, narrow) for x in values[:-1]), unpack(values[-1], "f32"))
            return (finished(pack(exact(*parts, rounding), "f32", rounding), "f32", qualifiers),)

        return Operation(("f32",), (narrow,) * (count - 1) + ("f32",), compute)

    return build


mixed_add = mixed(total, 2)
mixed_subtract = mixed(lambda x, y, rounding: total(x, opposite(y), rounding), 2)
mixed_multiply_add = mixed(lambda x, y, z, rounding: fused(x, y, z, "f32", rounding), 3)


# ---- signs and extrema


def of_codes(compute: Callable[[Array, str], Array]) -> Callable[[Qualifiers], Operation]:
    """An operation of one float by its bits; a NaN is the canonical one, but in f64 itself, made quiet."""

    def build(qualifiers: Qualifiers) -> Operation:
        kind = qualifiers.type
        single = kind.removesuffix("x2")

        def one(x: Array) -> Array:
            x = flushed(x, single) if "ftz" in qualifiers else x
            nan = x | jnp.uint64(QUIET) if single == "f64" else x.dtype.type(CANONICAL[single])
            return jnp.where(is_nan(x, single), nan, compute(x, single))

        whole = paired(one) if single != kind else one
        return Operation((kind,), (kind,), lambda x: (whole(x),))

    return build


absolute = of_codes(magnitude)
negate = of_codes(negated)


def extremum(qualifiers: Qualifiers, shape: Shape, least: bool) -> Operation:
    """min, max of two values, or of three f32: -0 is below +0; of a NaN and a number the number, or with `.NaN` the canonical NaN."""
    kind = qualifiers.type
    count = 3 if kind == "f32" and len(shape.sizes) == 4 else 2
    single = kind.removesuffix("x2")

    def key(x: Array) -> Array:
        size = magnitude(x, single).astype(jnp.int64 if single == "f64" else jnp.int32)
        return jnp.where(sign(x, single) != 0, ~size, size)

    def two(a: Array, b: Array) -> Array:
        chosen = jnp.where((key(a) < key(b)) == least, a, b)
        a_nan, b_nan = is_nan(a, single), is_nan(b, single)
        if "NaN" not in qualifiers:
            chosen = jnp.where(a_nan, b, jnp.where(b_nan, a, chosen))
        nan = (a_nan | b_nan) if "NaN" in qualifiers else (a_nan & b_nan)
        word = b | jnp.uint64(QUIET) if single == "f64" else a.dtype.type(CANONICAL[single])
        return jnp.where(nan, word, chosen)

    def one(*values: Array) -> Array:
        values = tuple(flushed(x, single) for x in values) if "ftz" in qualifiers else values
        sizes = tuple(magnitude(x, single) for x in values) if "abs" in qualifiers else values
        result = sizes[0]
        for x in sizes[1:]:
            result = two(result, x)
        if "xorsign" in qualifiers:
            signs = sign(values[0] ^ values[1], single)
            result = jnp.where(is_nan(result, single), result, result | signs)
        return result

    if "abs" in qualifiers and "xorsign" not in qualifiers and count == 2:
        raise Unsupported("min and max with .abs alone take three operands (PTX ISA 9.7.3.11)")
    whole = paired(one) if single != kind else one
    return Operation((kind,), (kind,) * count, lambda *values: (whole(*values),))
