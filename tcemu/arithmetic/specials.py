"""Rule 8 of `dot_add`: what Inf and NaN among the products of a step make of its result.

A step meets them seldom, so they stand apart from its arithmetic: they are put into the accumulator, from which the step then carries them
on.
"""

import jax.numpy as jnp
from jax import Array

from tcemu.arithmetic.multiplicands import SPECIAL_EXPONENT, ZERO_EXPONENT, Operand
from tcemu.formats import Format, Number

PLUS, MINUS, NAN = 1, 2, 4  # what a step met: +Inf, -Inf, NaN; any sum above MINUS makes a NaN

# the kinds of numbers: +Inf, -Inf, NaN, 0, positive, negative. For each: with which kinds its product is +Inf, -Inf, NaN
KINDS = 6
PARTNERS = tuple(
    sum(1 << (KINDS * place + kind) for place, kinds in enumerate(sets) for kind in kinds)
    for sets in (
        ((0, 4), (1, 5), (2, 3)),
        ((1, 5), (0, 4), (2, 3)),
        ((), (), range(KINDS)),
        ((), (), (0, 1, 2)),
        ((0,), (1,), (2,)),
        ((1,), (0,), (2,)),
    )
)


def flags_of_number(x: Number) -> Array:
    """int32: PLUS, MINUS, NAN or 0."""
    return jnp.where(x.nan, NAN, jnp.where(x.infinite, jnp.where(x.negative, MINUS, PLUS), 0))


def flags_of_products(a: Operand, b: Operand) -> Array:
    """int32 [..., M, N], the sum of PLUS, MINUS and NAN over the products of a, [..., M, terms], and b, [..., terms, N].

    Two operations a product: a number of a brings three sets, the kinds of partners that make +Inf, -Inf or NaN of it, in the bits of one
    word; a number of b brings its own kind, as a bit in each of the three places.
    """
    sets, kinds = jnp.select([_kind(a) == kind for kind in range(KINDS)], [jnp.int32(word) for word in PARTNERS]), _kind(b)
    own = jnp.int32(sum(1 << KINDS * place for place in range(3))) << kinds
    met = jnp.int32(0)
    for t in range(kinds.shape[-2]):
        met = met | (sets[..., :, t, None] & own[..., t, None, :])
    of = lambda place, flag: jnp.where(met & (((1 << KINDS) - 1) << KINDS * place) == 0, 0, flag)  # noqa: E731
    return of(0, PLUS) | of(1, MINUS) | of(2, NAN)


def overruled(result: Format, code: Array, flags: Array) -> Array:
    """The code, uint32; where there are flags, what rule 8 makes of them."""
    sign = jnp.where(flags == MINUS, jnp.uint32(1 << (result.bits - 1)), 0)
    code = jnp.where(flags == 0, code, sign | result.infinity)
    return jnp.where(flags > MINUS, result.nan, code)


def _kind(x: Operand) -> Array:
    """int32 of x's shape: the place of each number's kind in PARTNERS."""
    negative = (x.significand < 0).astype(jnp.int32)
    special = jnp.where(x.significand == 0, 2, negative)
    return jnp.where(x.exponent == SPECIAL_EXPONENT, special, jnp.where(x.exponent == ZERO_EXPONENT, 3, 4 + negative))
