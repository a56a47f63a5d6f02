"""Powers of two in f32 on integers: the exponential of a softmax, the same bits on every device.

GPUs compute it by `ex2.approx`, whose table is in no manual, and XLA's own differs between devices. This one is nearer to the exact value
than either: what is seen of a kernel's sums is then not its exponential.
"""

import jax.numpy as jnp
from jax import Array, lax

from tcemu import bits
from tcemu.compilation import compiled_once
from tcemu.formats import F32, Number, encode

FARTHEST = 160.0  # 2^-160 rounds to 0 and 2^160 to Inf
FRACTION, UNIT = 31, 30  # bits behind the point of r, and of the polynomial's values
# ln(2)^k / k! in units of 2^-30: the terms of 2^r. With |r| <= 1/2 the first that is left out is below 2^-31
TERMS = (1073741824, 744261118, 257941248, 59597083, 10327387, 1431680, 165394, 16377, 1419)


@compiled_once()
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
