"""Rule 8 of `dot_add` for what the products hold: their Inf and NaN go into the accumulator before the step.

An accumulator that is Inf or NaN stays so, whatever is added. So the step itself need not look for them among its products, and what it
makes of those beside such an accumulator is not used.
"""

import jax.numpy as jnp
from jax import Array, lax

from tcemu.arithmetic.multiplicands import SPECIAL_EXPONENT, ZERO_EXPONENT, Operand
from tcemu.bits import Limbs
from tcemu.formats import F32, Format, decode_limbs


def with_specials(result: Format, x: Operand, y: Operand, accumulator: Limbs) -> Limbs:
    """The accumulator, and Inf or NaN where the products of a step give that.

    x: [..., M, terms]; y: [..., terms, N]; accumulator: codes of `result` [..., M, N], as one limb.
    """
    # floats have rule 8 themselves; numbers count as 0, 1 and -1, so that nothing else becomes Inf and any order of the sum will do
    met = jnp.matmul(_as_floats(x), _as_floats(y), precision=lax.Precision.DEFAULT)
    word = lax.bitcast_convert_type(met, jnp.uint32)
    negative, magnitude = word >> 31 == 1, word & 0x7FFFFFFF
    c = decode_limbs(result, accumulator)
    none = (magnitude > F32.infinity) | c.nan | (c.infinite & (c.negative != negative))
    code = jnp.where(none, result.nan, infinity(result, negative))
    return (jnp.where(magnitude < F32.infinity, accumulator[0], code),)


def infinity(result: Format, negative: Array) -> Array:
    """uint32: the codes of Inf with these signs."""
    return jnp.where(negative, jnp.uint32(result.infinity | 1 << (result.bits - 1)), result.infinity)


def _as_floats(x: Operand) -> Array:
    """f32: Inf and NaN themselves, 0 for a zero, 1 and -1 for all other numbers."""
    zero, one, infinite, none = map(jnp.float32, (0, 1, jnp.inf, jnp.nan))  # not Python's, which are f64 under x64
    special = jnp.where(x.significand == 0, none, infinite)
    magnitude = jnp.where(x.exponent == SPECIAL_EXPONENT, special, jnp.where(x.exponent == ZERO_EXPONENT, zero, one))
    return jnp.where(x.significand < 0, -magnitude, magnitude)
