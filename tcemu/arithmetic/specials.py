"""Rule 8 of `dot_add`: what Inf and NaN among the products of a step make of its result.

A step meets them seldom, so they stand apart from its arithmetic: they are put into the accumulator, from which the step then carries them
on. Which products are special is counted by the machine's f32 dot: small counts, exact in any order and any precision mode.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tcemu.arithmetic.multiplicands import SPECIAL_EXPONENT, ZERO_EXPONENT, Operand
from tcemu.formats import Format, Number

PLUS, MINUS, NAN = 1, 2, 4  # what a step met: +Inf, -Inf, NaN; any sum above MINUS makes a NaN


def flags_of_number(x: Number) -> Array:
    """int32: PLUS, MINUS, NAN or 0."""
    return jnp.where(x.nan, NAN, jnp.where(x.infinite, jnp.where(x.negative, MINUS, PLUS), 0))


def flags_of_products(a: Operand, b: Operand) -> Array:
    """int32 [..., M, N], the sum of PLUS, MINUS and NAN over the products of a, [..., M, terms], and b, [..., terms, N].

    A NaN counts as infinite without a sign, so that it shows in `plus` and in `minus`; a product with it is then a NaN.
    """
    x, y = _counted(a), _counted(b)
    rows = jnp.stack([_beside(x.infinity, x.sign, -1), _beside(x.special, 1 - x.zero, -1), _beside(x.special, x.zero, -1)], axis=-3)
    columns = jnp.stack([_beside(y.sign, y.infinity, -2), _beside(1 - y.zero, y.special, -2), _beside(y.zero, y.special, -2)], axis=-3)
    rows, columns = (v.astype(jnp.float32) for v in (rows, columns))
    counts = jnp.matmul(rows, columns, precision=lax.Precision.HIGHEST).astype(jnp.int32)
    difference, infinite, invalid = (counts[..., kind, :, :] for kind in range(3))
    plus, minus = jnp.where(infinite + difference > 0, PLUS, 0), jnp.where(infinite - difference > 0, MINUS, 0)
    return plus | minus | jnp.where(invalid > 0, NAN, 0)


def overruled(result: Format, code: Array, flags: Array) -> Array:
    """The code, uint32; where there are flags, what rule 8 makes of them."""
    sign = jnp.where(flags == MINUS, jnp.uint32(1 << (result.bits - 1)), 0)
    code = jnp.where(flags == 0, code, sign | result.infinity)
    return jnp.where(flags > MINUS, result.nan, code)


class _Counted(NamedTuple):
    """What of an operand decides about specials, int32 of its shape."""

    infinity: Array  # +1, -1, or 0 for what is not infinite
    sign: Array  # +1, -1, or 0 for zero
    special: Array  # 1 for Inf and NaN
    zero: Array  # 1 for zero


def _counted(x: Operand) -> _Counted:
    special, zero = x.exponent == SPECIAL_EXPONENT, x.exponent == ZERO_EXPONENT
    negative, nan = x.significand < 0, x.significand == 0
    sign = jnp.where(zero, 0, jnp.where(negative, -1, 1))
    return _Counted(jnp.where(special & ~nan, sign, 0), sign, special.astype(jnp.int32), zero.astype(jnp.int32))


def _beside(x: Array, y: Array, axis: int) -> Array:
    return jnp.concatenate([x, y], axis)
