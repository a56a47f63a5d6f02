"""Instructions that the manual describes by an error: `.approx` and `.full` (PTX ISA 9.7.3.7, 9.7.3.13 to 9.7.3.22, 9.7.4.9, 9.7.4.10).

They are computed in f64 and rounded once, nearer to the exact value than the manual asks. A GPU takes tables that are in no manual, so its
bits differ: `Operation.exact` is False.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from tcemu.ptx.context import Operation
from tcemu.ptx.scalar import floats
from tcemu.ptx.scalar.float_core import NOWHERE, Parts, normal, pack, unpack
from tcemu.ptx.scalar.lanes import paired
from tcemu.ptx.scalar.number_codes import code, flushed, is_nan, magnitude, sign
from tcemu.ptx.scalar.syntax import Qualifiers


def inexact(operation: Operation) -> Operation:
    """The same, flagged."""
    return operation._replace(exact=False)


def correctly_rounded(build: Callable[[Qualifiers], Operation]) -> Callable[[Qualifiers], Operation]:
    """The approximation by the instruction that rounds to nearest: as near as can be."""
    return lambda qualifiers: inexact(build(qualifiers))


def by_f64(compute: Callable[[Array], Array]) -> Callable[[Qualifiers], Operation]:
    """An operation of one float by a function of f64 numbers, rounded once. Subnormals of f64, which XLA:CPU flushes, count as 0."""

    def build(qualifiers: Qualifiers) -> Operation:
        kind = qualifiers.type
        single = kind.removesuffix("x2")

        def one(x: Array) -> Array:
            x = flushed(x, single) if "ftz" in qualifiers else x
            wide = x if single == "f64" else pack(unpack(x, single), "f64")
            result = lax.bitcast_convert_type(compute(lax.bitcast_convert_type(wide, jnp.float64)), jnp.uint64)
            result = pack(unpack(result, "f64"), single)
            return flushed(result, single) if "ftz" in qualifiers else result

        whole = paired(one) if single != kind else one
        return inexact(Operation((kind,), (kind,), lambda x: (whole(x),)))

    return build


def rsqrt(qualifiers: Qualifiers) -> Operation:
    """1 / sqrt(x): of a significand between 1 and 4, so that subnormals of f64 count."""
    kind = qualifiers.type

    def compute(x: Array) -> tuple[Array]:
        parts = unpack(flushed(x, kind) if "ftz" in qualifiers else x, kind)
        u = normal(parts, 52)
        odd = u.exponent & 1
        value = (u.significand << odd.astype(jnp.uint64)).astype(jnp.float64) * 2.0**-52
        inverse = unpack(lax.bitcast_convert_type(1 / jnp.sqrt(value), jnp.uint64), "f64")
        exponent = jnp.where(parts.infinite, NOWHERE, inverse.exponent - ((u.exponent + 52 - odd) >> 1))
        significand = jnp.where(parts.infinite, 0, inverse.significand)
        nan = parts.nan | (parts.negative & ~parts.zero)
        result = pack(Parts(parts.negative, significand, exponent, nan, parts.zero), kind)
        return (floats.first_nan(result, x) if kind == "f64" else result,)

    return inexact(Operation((kind,), (kind,), compute))


sine, cosine, hyperbolic_tangent = by_f64(jnp.sin), by_f64(jnp.cos), by_f64(jnp.tanh)
exponential = by_f64(jnp.exp2)
logarithm = by_f64(jnp.log2)


def divide(qualifiers: Qualifiers) -> Operation:
    """div.approx: a finite number over one above 2^126 gives 0, and Inf over it NaN (9.7.3.7)."""
    exact = floats.divide(qualifiers)

    def compute(a: Array, b: Array) -> tuple[Array]:
        (result,) = exact.compute(a, b)
        size = magnitude(b, "f32")
        far = (size > code("f32").one + (126 << 23)) & (size < code("f32").infinity)
        zero = sign(a ^ b, "f32")
        beyond = jnp.where(magnitude(a, "f32") == code("f32").infinity, jnp.uint32(0x7FFFFFFF), zero)
        return (jnp.where(far & ~is_nan(a, "f32"), beyond, result),)

    return inexact(exact._replace(compute=compute))


def upper_word(build: Callable[[Qualifiers], Operation]) -> Callable[[Qualifiers], Operation]:
    """rcp, rsqrt `.approx.ftz.f64`: of operand and result only the upper 32 bits count, the others are 0 (9.7.3.14, 9.7.3.17)."""

    def whole(qualifiers: Qualifiers) -> Operation:
        operation = build(qualifiers)

        def upper(x: Array) -> Array:
            return x & jnp.uint64(0xFFFFFFFF00000000)

        def compute(x: Array) -> tuple[Array]:
            (result,) = operation.compute(upper(x))
            return (jnp.where(is_nan(result, "f64"), jnp.uint64(0x7FFFFFFF00000000), upper(result)),)

        return inexact(operation._replace(compute=compute))

    return whole
