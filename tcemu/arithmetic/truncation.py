"""A sum cut to f32 in a dozen vector operations: what `encode_limbs` does for this one rounding, without its count of leading zeros.

A machine converts integers to f32 in one instruction, but to nearest. `_truncating_convert` makes that the cut toward zero.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.formats import F32

SIGN = 1 << 31
KEPT = F32.mantissa_bits + 1
LEAST = F32.least_exponent - F32.mantissa_bits  # the weight of the last bit of a subnormal


def truncated_f32(negative: Array, magnitude: Array, unit: Array, result_bits: ArrayLike | None = None) -> Array:
    """The f32 code of (-1)^negative * magnitude * 2^unit, cut toward zero; +0 for all that becomes zero, Inf if it is 2^128 or more.

    negative: bool; magnitude: uint32; unit: int32 of at most 2^21; one shape. result_bits: fraction bits kept, may be traced; None: all.
    """
    significand, up = _truncating_convert(magnitude)
    shift = unit + up
    field = (significand >> F32.mantissa_bits) + shift
    code = significand + (shift << F32.mantissa_bits)
    below = LEAST - unit  # a subnormal result is the magnitude itself, in units of 2^LEAST
    subnormal = jnp.where(below >= 0, magnitude >> below.astype(jnp.uint32), magnitude << (-below).astype(jnp.uint32))
    code = jnp.where(field <= 0, subnormal.astype(jnp.int32), code)
    code = jnp.where(field > F32.greatest_exponent + F32.bias, F32.infinity, code)
    code = jnp.where(magnitude == 0, 0, code)
    if result_bits is not None:
        code = code & (jnp.int32(-1) << (F32.mantissa_bits - result_bits))
    sign = jnp.where(negative & (code != 0), jnp.uint32(SIGN), 0)
    return code.astype(jnp.uint32) | sign


def _truncating_convert(x: Array) -> tuple[Array, Array]:
    """(bits of an f32 as int32, up): x cut toward zero to 24 bits is that f32 times 2^up.

    Where bit i + 24 of x is set, bit i cannot be kept. Without those bits the first one below the last kept is 0: what is dropped is less
    than half a unit, so that rounding to nearest is a cut. From 2^31 on x is first shifted into the range of s32, by bits never kept.
    """
    large = x >= jnp.uint32(SIGN)
    x = jnp.where(large, x >> 8, x)
    x = x & ~(x >> KEPT)
    return lax.bitcast_convert_type(x.astype(jnp.int32).astype(jnp.float32), jnp.int32), jnp.where(large, 8, 0)
