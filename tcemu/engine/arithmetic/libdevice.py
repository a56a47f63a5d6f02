"""Functions of NVIDIA's libdevice in f32: the natural logarithm, erf and tanh, as kernels that flush subnormals have them in PTX.

Each is a chain of fused multiply-adds (`fma.rn.ftz.f32`) around instructions of the special function unit. Codes in and out, any shape.
Source: PTX that Triton 3.9.0 makes of libdevice's `__nv_logf`, `__nv_erff` and `__nv_tanhf`. Their products and sums without `.ftz` have
no subnormal operand or result that reaches the result, except where the code keeps it.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.engine.arithmetic.f32_arithmetic import add_f32, f32_code, flush_f32, fma_f32, less_f32, subtract_f32
from tcemu.engine.arithmetic.special_functions import INFINITY, MAGNITUDE, NAN, SIGN, ex2, multiply_f32, rcp

ONE, MINUS_ONE, TWO_TO_23, LEAST_NORMAL = (f32_code(x) for x in (1.0, -1.0, 2.0**23, 2.0**-126))

# logf: coefficients of the polynomial in m - 1, the highest power first; m lies in [LOG_BASE, 2 * LOG_BASE)
LOG_COEFFICIENTS = (
    0xBE055027, 0x3E1039F6, 0xBDF8CDCC, 0x3E0F2955, 0xBE2AD8B9, 0x3E4CED0B, 0xBE7FFF22, 0x3EAAAA78, 0xBF000000,
)  # fmt: skip
LOG_BASE, EXPONENT_BITS, LN_2 = np.uint32(0x3F2AAAAB), np.uint32(0xFF800000), np.uint32(0x3F317218)

# erff: the highest power first, for |x| below ERF_BOUND in x * x, above it in |x|
ERF_BOUND = np.uint32(0x3F8060FE)
ERF_SMALL = (0x38B1E96A, 0xBA574D20, 0x3BAAD5EA, 0xBCDC1BE7, 0x3DE718AF, 0xBEC093AC, 0x3E0375D3)
ERF_LARGE = (0x38EB4C3A, 0xBAAE005B, 0x3C09919F, 0xBD24D99A, 0x3E235519, 0x3F69B4F9, 0x3F210A14)

# tanhf: for |x| below TANH_BOUND a polynomial in x * x, above it 1 - 2 / (2^(2 x log2 e) + 1), from TANH_ONE on 1
TANH_BOUND, TANH_ONE = np.uint32(0x3F19999A), np.uint32(0x41102CB4)
TANH_COEFFICIENTS = (0x3C80F082, 0xBD563CAE, 0x3E085941, 0xBEAAA9ED, 0x00000000)
TWO_LOG2_E, MINUS_TWO = np.uint32(0x4038AA3B), f32_code(-2.0)


def _fma_flush(x: Array, y: Array, z: Array) -> Array:
    """Return x * y + z as `fma.rn.ftz.f32` does.

    A result just below 2^-126 that rounds up to it is kept here. The functions of this file have none.
    """
    return flush_f32(fma_f32(*jnp.broadcast_arrays(*(flush_f32(v) for v in (x, y, z)))))


def _polynomial(coefficients: Array, x: Array) -> Array:
    """Return a polynomial by Horner's rule. coefficients: [degree + 1, ...], the highest power first."""
    coefficients = jnp.broadcast_to(coefficients, (coefficients.shape[0], *x.shape))
    return lax.scan(lambda value, coefficient: (_fma_flush(value, x, coefficient), None), coefficients[0], coefficients[1:])[0]


def _column(coefficients: tuple[int, ...], x: Array) -> Array:
    return jnp.asarray(coefficients, jnp.uint32).reshape(-1, *(1,) * x.ndim)


def log_f32(codes: Array) -> Array:
    """Compute the natural logarithm as libdevice's `__nv_logf` does.

    Args:
        codes: f32 codes. Subnormals are scaled, not flushed. A negative number gives NaN; zeros give -Inf.
    """
    small = less_f32(codes, jnp.full_like(codes, LEAST_NORMAL))
    x = jnp.where(small, multiply_f32(codes, jnp.full_like(codes, TWO_TO_23)), codes)
    exponent_bits = (x - LOG_BASE) & EXPONENT_BITS
    # the exponent is a small integer, so that its conversion and the sum with -23 are exact in f32
    exponent = (exponent_bits.astype(jnp.int32) >> 23) + jnp.where(small, -23, 0)
    rest = add_f32(x - exponent_bits, jnp.full_like(codes, MINUS_ONE))
    square = multiply_f32(rest, _polynomial(_column(LOG_COEFFICIENTS, codes), rest))
    result = _fma_flush(
        lax.bitcast_convert_type(exponent.astype(jnp.float32), jnp.uint32), jnp.full_like(codes, LN_2), _fma_flush(square, rest, rest)
    )
    result = jnp.where(x >= INFINITY, jnp.where(x == INFINITY, INFINITY, NAN), result)
    return jnp.where(x & MAGNITUDE == 0, SIGN | INFINITY, result)


def erf_f32(codes: Array) -> Array:
    """Compute the error function as libdevice's `__nv_erff` does; f32 codes."""
    size = flush_f32(codes & MAGNITUDE)
    large = (size >= ERF_BOUND) & (size <= INFINITY)
    argument = jnp.where(large, size, multiply_f32(codes, codes))
    value = _polynomial(jnp.where(large, _column(ERF_LARGE, codes), _column(ERF_SMALL, codes)), argument)
    factor = jnp.where(large, argument ^ SIGN, codes)
    value = _fma_flush(value, factor, factor)
    far = subtract_f32(jnp.full_like(codes, ONE), ex2(value, True)) | (codes & SIGN)
    return jnp.where(large, far, value)


def tanh_f32(codes: Array) -> Array:
    """Compute the hyperbolic tangent as libdevice's `__nv_tanhf` does, by ex2 and rcp; f32 codes. It is not `tanh.approx`."""
    size = flush_f32(codes & MAGNITUDE)
    power = ex2(multiply_f32(size, jnp.full_like(codes, TWO_LOG2_E)), True)
    far = _fma_flush(rcp(add_f32(power, jnp.full_like(codes, ONE)), True), jnp.full_like(codes, MINUS_TWO), jnp.full_like(codes, ONE))
    nan = size > INFINITY
    far = jnp.where((size >= TANH_ONE) & ~nan, ONE, far) | (codes & SIGN)
    near = _fma_flush(_polynomial(_column(TANH_COEFFICIENTS, codes), multiply_f32(codes, codes)), codes, codes)
    return jnp.where((size >= TANH_BOUND) & ~nan, far, near)
