"""Powers of two in f32 other than the GPU's `ex2.approx`: one nearer to the exact value, and FlashAttention 4's polynomial.

`tcemu.engine.arithmetic.special_functions.ex2` is the GPU's own. `exp2` is for what-if questions: differences of a kernel's sums are then
not due to the exponential. Both are the same bits on every device.
"""

import jax.numpy as jnp
from jax import Array, lax

from tcemu.base import bits
from tcemu.base.compilation import compile_once
from tcemu.engine.arithmetic.fma import add, fma
from tcemu.engine.formats.coding import Number, encode
from tcemu.engine.formats.number_formats import F32

FARTHEST = 160.0  # 2^-160 rounds to 0 and 2^160 to Inf
FRACTION, UNIT = 31, 30  # bits behind the point of r, and of the polynomial's values
# ln(2)^k / k! in units of 2^-30: the terms of 2^r. With |r| <= 1/2 the first that is left out is below 2^-31
TERMS = (1073741824, 744261118, 257941248, 59597083, 10327387, 1431680, 165394, 16377, 1419)


@compile_once()
def exp2(codes: Array) -> Array:
    """2^x: f32 codes in and out, within 0.53 ulp; whole x, Inf and results below 2^-150 are exact, NaN gives the canonical NaN.

    The two float operations are exact: x less its nearest integer, and a multiplication by 2^31. A subnormal x may be taken as 0.
    """
    x = lax.bitcast_convert_type(codes, jnp.float32)
    nan = jnp.isnan(x)
    x = jnp.clip(jnp.where(nan, 0, x), -FARTHEST, FARTHEST)
    whole = jnp.round(x)
    r = ((x - whole) * 2.0**FRACTION).astype(jnp.int32)
    below, size = r < 0, jnp.abs(r).astype(jnp.uint32)
    value = jnp.full(r.shape, TERMS[-1], jnp.uint32)
    for term in TERMS[-2::-1]:
        low, high = bits.multiply_words(value, size)
        moved = (high << (32 - FRACTION)) | (low >> FRACTION)
        value = jnp.where(below, term - moved, term + moved)
    return encode(F32, Number(jnp.zeros(r.shape, bool), (value,), whole.astype(jnp.int32) - UNIT, nan, jnp.zeros(r.shape, bool)))


# FlashAttention 4 (flash_attn/cute/utils.py of https://github.com/Dao-AILab/flash-attention, ex2_emulation): 2^r = 1 + r (C1 + r (C2 + r
# C3))
POLYNOMIAL = (0x3D9DF09D, 0x3E6906A4, 0x3F31F519, 0x3F800000)  # f32 codes of C3, C2, C1 and 1
LEAST, ROUNDER, SIGN = 0xC2FE0000, 0x4B400000, 0x80000000  # -127; 2^23 + 2^22, whose sum with x is an integer; the sign bit


@compile_once()
def exp2_polynomial(codes: Array) -> Array:
    """Compute 2^x as FlashAttention 4 does on the units for multiply-adds: a range reduction of Cody and Waite, and a cubic polynomial.

    Each operation rounds to f32. The integer part of x is added to the exponent field of the polynomial's value without regard to the
    range, so that x must lie below 128. Below -127, and for NaN, the result is 0.

    Args:
        codes: f32 codes. Subnormals are zeros, as with `.ftz`.
    """
    codes = jnp.where(codes & 0x7F800000 == 0, codes & jnp.uint32(SIGN), codes)
    x = lax.bitcast_convert_type(codes, jnp.float32)
    codes = jnp.where(x > -127.0, codes, jnp.uint32(LEAST))
    rounded = add(codes, jnp.uint32(ROUNDER), F32, "RM")
    rest = add(codes, add(rounded, jnp.uint32(ROUNDER | SIGN), F32) ^ jnp.uint32(SIGN), F32)
    value = jnp.uint32(POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        value = fma(value, rest, jnp.uint32(coefficient), F32)
    return value + (rounded << 23)
