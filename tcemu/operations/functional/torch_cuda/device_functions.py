"""f32 values on codes with Python's operators, and CUDA's device functions on them, as nvcc 13.0 compiles them: subnormals are kept.

An expression of `Value` is one rounding an operation, and `fma` is written where nvcc contracts a product and a sum.

Source: the PTX that nvcc 13.0 makes of each function, since PyTorch 2.11.0+cu130 is built by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base import bits
from tcemu.base.jax_internals import traced_by_name
from tcemu.engine.arithmetic import fma as exact_fma
from tcemu.engine.arithmetic import special_functions
from tcemu.engine.arithmetic.f32_arithmetic import add_f32, f32_code, fma_f32, is_nan_f32, less_f32
from tcemu.engine.arithmetic.libdevice import ERF_LARGE, ERF_SMALL, LOG_COEFFICIENTS, TANH_COEFFICIENTS
from tcemu.engine.arithmetic.special_functions import INFINITY, MAGNITUDE, NAN, SIGN, product_f32
from tcemu.engine.backends.quotients import divide
from tcemu.engine.formats.coding import Number as ExactNumber
from tcemu.engine.formats.coding import convert, encode, limbs_to_codes
from tcemu.engine.formats.number_formats import F32, F64

_add_towards_zero = jax.jit(lambda x, y: exact_fma.add(x, y, F32, "RZ"))
_ex2, _rcp, _rsqrt = (jax.jit(getattr(special_functions, name)) for name in ("ex2", "rcp", "rsqrt"))
Number = float | int
ONE_CODE = np.uint32(0x3F800000)


@traced_by_name
@jax.jit
def divide_f32(x: Array, y: Array) -> Array:
    """Return x / y, rounded once; f32 codes of one shape."""
    return divide(x, y, F32)


class Value(NamedTuple):
    """f32 codes. Each operator rounds once to nearest even."""

    codes: Array

    def __add__(self, other: Value | Number) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Value(add_f32(*_codes(self, other)))

    def __radd__(self, other: Number) -> Value:
        return self + other

    def __sub__(self, other: Value | Number) -> Value:
        return self + (-as_value(other))

    def __rsub__(self, other: Number) -> Value:
        return -self + other

    def __mul__(self, other: Value | Number) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Value(product_f32(*_codes(self, other)))

    def __rmul__(self, other: Number) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self * other

    def __truediv__(self, other: Value | Number) -> Value:
        return Value(divide_f32(*_codes(self, other)))

    def __rtruediv__(self, other: Number) -> Value:
        return Value(divide_f32(*_codes(other, self)))

    def __neg__(self) -> Value:
        return Value(self.codes ^ SIGN)

    def __abs__(self) -> Value:
        return Value(self.codes & MAGNITUDE)

    def __lt__(self, other: Value | Number) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return less_f32(*_codes(self, other))

    def __gt__(self, other: Value | Number) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return less_f32(*_codes(other, self))


def as_value(x: Value | Number | np.uint32) -> Value:
    """Return a number, rounded to f32, or a code, as a value."""
    return x if isinstance(x, Value) else Value(jnp.asarray(f32_code(x) if isinstance(x, float | int) else x))


def _codes(*values: Value | Number | np.uint32) -> Sequence[Array]:
    return jnp.broadcast_arrays(*(as_value(x).codes for x in values))


def fma(x: Value | Number, y: Value | Number, z: Value | Number) -> Value:
    """Return x * y + z, rounded once."""
    return Value(fma_f32(*_codes(x, y, z)))


def where(mask: Array, x: Value | Number, y: Value | Number) -> Value:
    """Select by a mask."""
    return Value(jnp.where(mask, as_value(x).codes, as_value(y).codes))


def _constant(code: int) -> Value:
    return Value(jnp.uint32(code))


def _polynomial(value: Value, coefficients: tuple[int, ...], x: Value) -> Value:
    for code in coefficients:
        value = fma(value, x, _constant(code))
    return value


def ex2(x: Value) -> Value:
    """Return 2^x as `ex2.approx.f32`."""
    return Value(_ex2(x.codes))


def rcp(x: Value) -> Value:
    """Return 1 / x as `rcp.approx.ftz.f32` does for normal numbers."""
    return Value(_rcp(x.codes))


def rsqrt(x: Value) -> Value:
    """Return 1 / sqrt(x) as `rsqrt.approx.f32`, which CUDA's `rsqrtf` is."""
    return Value(_rsqrt(x.codes))


SMALL = np.uint32(0x20000000)  # 2^-63


@traced_by_name
@jax.jit
def root_f32(codes: Array) -> Array:
    """Return the square root, rounded once: a guess of the device, which two exact comparisons correct."""
    subnormal = codes & INFINITY == 0
    fraction = lax.bitcast_convert_type((codes & np.uint32(0x7FFFFF)).astype(jnp.float32), jnp.uint32)
    shift = jnp.where(codes < SMALL, np.uint32(64 << 23), np.uint32(0))  # so that no difference below is subnormal
    x = jnp.where(subnormal, fraction + np.uint32(1 << 23), codes + shift)  # a subnormal number times 2^150
    x = jnp.where(x & MAGNITUDE == 0, np.uint32(0x3F800000), x)
    guess = lax.bitcast_convert_type(jnp.sqrt(lax.bitcast_convert_type(x, jnp.float32)), jnp.uint32)
    # Tuckerman's test: r is the rounded root of x if r (r - ulp) < x <= r (r + ulp)
    for step in (np.uint32(1), np.uint32(0xFFFFFFFF)):
        above = less_f32(jnp.zeros_like(x), fma_f32(guess ^ SIGN, guess + 1, x))
        below = ~less_f32(jnp.zeros_like(x), fma_f32(guess ^ SIGN, guess - 1, x))
        guess = jnp.where(above if step == 1 else below, guess + step, guess)
    root = jnp.where(subnormal, guess - np.uint32(75 << 23), guess - (shift >> 1))
    invalid = is_nan_f32(codes) | ((codes >= SIGN) & (codes & MAGNITUDE != 0))
    return jnp.where(invalid, NAN, jnp.where((codes & MAGNITUDE == 0) | (codes == INFINITY), codes, root))


def sqrt(x: Value) -> Value:
    """Return the square root, rounded once, as `sqrt.rn.f32`."""
    return Value(root_f32(x.codes))


def expf(x: Value) -> Value:
    """Return e^x as libdevice's `expf`: 2^i times ex2.approx of the rest, which two fma reduce."""
    share = fma(x, _constant(0x3BBB989D), 0.5)
    share = where(share > 0.0, where(share < 1.0, share, 1.0), 0.0)  # fma.sat; NaN gives 0
    share = where(is_nan_f32(x.codes), 0.0, share)
    # fma.rm(share, 252, 12582913) keeps the integer part: share * 252 is exact in 32 bits, so that truncation rounds down
    floor = jnp.floor(_as_float(_multiply_down(share))).astype(jnp.int32)
    i = floor + 1 - 127
    whole = Value(lax.bitcast_convert_type(i.astype(jnp.float32), jnp.uint32))
    rest = fma(x, _constant(0x32A57060), fma(x, _constant(0x3FB8AA3B), -whole))
    return ex2(rest) * Value(((i + 127) << 23).astype(jnp.uint32))


def _as_float(x: Value) -> Array:
    return lax.bitcast_convert_type(x.codes, jnp.float32)


def _multiply_down(share: Value) -> Value:
    """Return share * 252, rounded to nearest, and one unit lower where that is above the product."""
    product = share * 252.0
    excess = fma(share, 252.0, -product)
    return Value(product.codes - jnp.where(excess < 0.0, 1, 0).astype(jnp.uint32))


class Logarithm(NamedTuple):
    """Constants of a logarithm: k * scale + f + f^2 * p(f) in the form that the function has, for x = 2^k (1 + f)."""

    base: int  # code of the least 1 + f
    coefficients: tuple[int, ...]  # of p, the highest power first


NATURAL = Logarithm(0x3F2AAAAB, LOG_COEFFICIENTS)
BINARY = Logarithm(
    0x3F3504F3,
    (0x3DC6B27F, 0xBE2C7F30, 0x3E2FCF2A, 0xBE374E43, 0x3E520BF4, 0xBE763C8B, 0x3E93BF99, 0xBEB8AA49, 0x3EF6384A, 0xBF38AA3B),
)  # fmt: skip
LOG1P_COEFFICIENTS = (
    0xBD39BF78, 0x3DD80012, 0xBE0778E0, 0x3E146475, 0xBE2A68DD, 0x3E4CAF9E, 0xBE800042, 0x3EAAAAE6, 0xBF000000,
)  # fmt: skip
EXPM1_COEFFICIENTS = (0x3AB5EBE6, 0x3C095663, 0x3D2AABE3, 0x3E2AA9F6, 0x3EFFFFFE)
EXPONENT_BITS = np.uint32(0xFF800000)


def _horner(coefficients: tuple[int, ...], x: Value) -> Value:
    return _polynomial(_constant(coefficients[0]), coefficients[1:], x)


def _signed_float(bits: Array) -> Value:
    """Return the bits of an int32 as a float."""
    return Value(lax.bitcast_convert_type(lax.bitcast_convert_type(bits, jnp.int32).astype(jnp.float32), jnp.uint32))


def _split(x: Value, how: Logarithm) -> tuple[Value, Value, Value]:
    """Return k, f and x, scaled where it is small, for x = 2^k (1 + f)."""
    small = x < _constant(0x00800000)
    y = where(small, x * 2.0**23, x)
    bits = (y.codes - np.uint32(how.base)) & EXPONENT_BITS
    return fma(_signed_float(bits), _constant(0x34000000), where(small, -23.0, 0.0)), Value(y.codes - bits) - 1.0, y


def _finish_logarithm(found: Value, y: Value) -> Value:
    """Return Inf for Inf, -Inf for zeros, and NaN for NaN and negative numbers."""
    codes = jnp.where(y.codes >= INFINITY, jnp.where(y.codes == INFINITY, INFINITY, NAN), found.codes)
    return Value(jnp.where(y.codes & MAGNITUDE == 0, SIGN | INFINITY, codes))


def logf(x: Value) -> Value:
    """Return the natural logarithm as libdevice's `logf`."""
    k, f, y = _split(x, NATURAL)
    return _finish_logarithm(fma(k, _constant(0x3F317218), fma(f * _horner(NATURAL.coefficients, f), f, f)), y)


def log2f(x: Value) -> Value:
    """Return the binary logarithm as libdevice's `log2f`."""
    k, f, y = _split(x, BINARY)
    return _finish_logarithm(k + fma(f, _constant(0x3FB8AA3B), f * (f * _horner(BINARY.coefficients, f))), y)


def log1pf(x: Value) -> Value:
    """Return log(1 + x) as libdevice's `log1pf`."""
    bits = (_add_towards_zero(*_codes(x, 1.0)) - np.uint32(0x3F400000)) & EXPONENT_BITS
    scaled = fma(0.25, Value(np.uint32(0x40800000) - bits), -1.0)
    f = scaled + Value(x.codes - bits)
    k = _signed_float(bits) * _constant(0x34000000)
    found = fma(k, _constant(0x3F317218), fma(f * _horner(LOG1P_COEFFICIENTS, f), f, f)).codes
    special = x.codes >= INFINITY
    large = special & ((x.codes < SIGN) | (x.codes > np.uint32(0xBF800000)))  # Inf and NaN, and below -1
    found = jnp.where(large, fma(x, _constant(0x7F800000), _constant(0x7F800000)).codes, found)
    return Value(jnp.where(x.codes == SIGN, SIGN, found))


def expm1f(x: Value) -> Value:
    """Return e^x - 1 as libdevice's `expm1f`."""
    rounded = Value(lax.bitcast_convert_type(jnp.round(_as_float(x * _constant(0x3FB8AA3B))), jnp.uint32))
    i = where(abs(x) < _constant(0x3ED1EB85), 0.0, rounded)
    f = fma(-i, _constant(0x35BFBE8E), fma(-i, _constant(0x3F317200), x))
    top = i.codes == np.uint32(0x43000000)  # 128: 2^128 is computed as 2 * 2^127
    i = where(top, i - 1.0, i)
    power = ex2(i)
    found = fma(fma(f * _horner(EXPM1_COEFFICIENTS, f), f, f), power, power - 1.0)
    found = where(top, found + found, found)
    found = where(i > 128.0, _constant(0x7F800000), found)
    found = where(i < -25.0, -1.0, found)
    return where(x.codes & MAGNITUDE == 0, x + x, found)


def tanhf(x: Value) -> Value:
    """Return the hyperbolic tangent as libdevice's `tanhf`."""
    size, square = abs(x), x * x
    low = fma(_horner(TANH_COEFFICIENTS, square), x, x)
    high = fma(rcp(ex2(size * _constant(0x4038AA3B)) + 1.0), -2.0, 1.0)
    high = where(size < _constant(0x41102CB4), high, 1.0)
    high = Value(high.codes | (x.codes & SIGN))
    found = where(size < _constant(0x3F19999A), low, high)
    return Value(jnp.where(is_nan_f32(x.codes), NAN, found.codes))


def erff(x: Value) -> Value:
    """Return the error function as libdevice's `erff`."""
    size = abs(x)
    large = ~(size < _constant(0x3F8060FE)) & ~is_nan_f32(x.codes)
    t = where(large, size, x * x)
    p = where(large, _constant(ERF_LARGE[0]), _constant(ERF_SMALL[0]))
    for high, low in zip(ERF_LARGE[1:], ERF_SMALL[1:], strict=True):
        p = fma(p, t, where(large, _constant(high), _constant(low)))
    q = where(large, -t, x)
    near = fma(p, q, q)
    far = Value((1.0 - ex2(near)).codes | (x.codes & SIGN))
    return where(large, far, near)


# ---- sine and cosine

SMALL_ANGLE = np.uint32(0x47CE4780)  # 105615: below it three fma reduce the angle
HALF_PI = (0xBFC90FDA, 0xB3A22168, 0xA7C234C5)  # -pi/2 in three parts
TWO_OVER_PI = (0x3C439041, 0xDB629599, 0xF534DDC0, 0xFC2757D1, 0x4E441529, 0xA2F9836E)  # __cudart_i2opi_f, the low word first
HALF_PI_SHARE = (0x54442D19, 0x3BF921FB)  # f64: pi/2 * 2^-64, the low word first
COSINE, SINE = (0x37CBAC00, 0xBAB607ED, 0x3D2AAABB, 0xBEFFFFFF), (0x00000000, 0xB94D4153, 0x3C0885E4, 0xBE2AAAA8)


@jax.jit
def _reduce_large_angle(codes: Array) -> tuple[Array, Array]:
    """Return the quadrant and the rest of an angle of at least 105615 by 192 bits of 2/pi (Payne and Hanek)."""
    power = ((codes >> 23) & np.uint32(0xFF)) - np.uint32(128)
    significand = (codes << 8) | SIGN
    words, carry = [], jnp.zeros_like(codes)
    for word in TWO_OVER_PI:
        low, high = bits.multiply_words(jnp.full_like(codes, np.uint32(word)), significand)
        low = low + carry
        carry = high + (low < carry).astype(jnp.uint32)
        words.append(low)
    words.append(carry)
    first, shift = (power >> 5) & np.uint32(3), power & np.uint32(31)
    pick = lambda back: jnp.select([first == i for i in range(4)], [words[back - i] for i in range(4)])
    upper, middle, lower = pick(6), pick(5), pick(4)
    beyond = lambda word: jnp.where(shift == 0, np.uint32(0), word >> ((32 - shift) & np.uint32(31)))
    upper, middle = (upper << shift) + beyond(middle), (middle << shift) + beyond(lower)
    high = (middle >> 30) | (upper << 2)
    above_half = high >> 31
    quadrant = (above_half + (upper >> 30)).astype(jnp.int32)
    flip = jnp.where(above_half == 1, np.uint32(0xFFFFFFFF), np.uint32(0))
    negative = codes >= SIGN
    false = jnp.zeros(codes.shape, bool)
    share = encode(F64, ExactNumber(false, ((middle << 2) ^ flip, high ^ flip), jnp.zeros(codes.shape, jnp.int32), false, false))
    half_pi = limbs_to_codes(F64, tuple(jnp.full_like(codes, np.uint32(word)) for word in HALF_PI_SHARE))
    rest = convert(F64, F32, exact_fma.fma(share, half_pi, jnp.zeros_like(share), F64))
    rest = rest ^ jnp.where(negative ^ (above_half == 1), SIGN, np.uint32(0))
    return jnp.where(negative, -quadrant, quadrant), rest


def _reduce_angle(x: Value) -> tuple[Array, Value]:
    """Return the quadrant, and the angle's distance from a multiple of pi/2."""
    nearest = jnp.round(_as_float(x * _constant(0x3F22F983)))
    small = jnp.abs(nearest) < 1 << 18
    quadrant = jnp.where(small, nearest, 0).astype(jnp.int32)
    turns = _signed_float(quadrant.astype(jnp.uint32))
    rest = x
    for part in HALF_PI:
        rest = fma(turns, _constant(part), rest)
    size = x.codes & MAGNITUDE
    large = (size >= SMALL_ANGLE) & (size < INFINITY)

    def with_large(_: None) -> tuple[Array, Array]:
        far_quadrant, far_rest = _reduce_large_angle(x.codes)
        return jnp.where(large, far_quadrant, quadrant), jnp.where(large, far_rest, rest.codes)

    quadrant, codes = lax.cond(large.any(), with_large, lambda _: (quadrant, rest.codes), None)
    return jnp.where(size >= INFINITY, 0, quadrant), Value(jnp.where(size >= INFINITY, NAN, codes))


def _sine(x: Value, quarters: int) -> Value:
    """Return the sine of x + quarters * pi/2."""
    quadrant, rest = _reduce_angle(x)
    quadrant = quadrant + quarters
    is_cosine = (quadrant & 1) == 1
    square, start = rest * rest, where(is_cosine, 1.0, rest)
    terms = [where(is_cosine, _constant(cosine), _constant(sine)) for cosine, sine in zip(COSINE, SINE, strict=True)]
    p = where(is_cosine, fma(terms[0], square, terms[1]), terms[1])
    for term in terms[2:]:
        p = fma(p, square, term)
    found = fma(p, fma(square, start, 0.0), start)
    return where((quadrant & 2) == 2, fma(found, -1.0, 0.0), found)


def sinf(x: Value) -> Value:
    """Return the sine as libdevice's `sinf`."""
    return _sine(x, 0)


def cosf(x: Value) -> Value:
    """Return the cosine as libdevice's `cosf`."""
    return _sine(x, 1)


# ---- functions of two values

POW_LOGARITHM = (0x3A2C32E4, 0x3B52E7DB, 0x3C93BB73, 0x3DF6384F)
POW_EXPONENTIAL = (0x391FCB8E, 0x3AAF85ED, 0x3C1D9856, 0x3D6357BB, 0x3E75FDEC, 0x3F317218, 0x3F800000)
ATAN_COEFFICIENTS = (0x3B33710B, 0xBC807748, 0x3D2CDAB2, 0xBD992D10, 0x3DD9EA6C, 0xBE117CB1, 0x3E4CBCE0, 0xBEAAAA7D)
ATAN_HALF_PI = (0x3FD774EB, 0x3F6EE581)  # factors of pi/2; twice the second one for pi


def _round_even(x: Value) -> Value:
    return Value(lax.bitcast_convert_type(jnp.round(_as_float(x)), jnp.uint32))


def powf(x: Value, y: Value) -> Value:
    """Return x^y as libdevice's `powf`: 2^(y log2 x) with log2 x in two f32."""
    size = abs(x)
    k, m = _log2_parts(size)
    reciprocal = rcp(m + 2.0)
    double = m + m
    u = double * reciprocal
    square = u * u
    rest = m - u
    error = reciprocal * fma(-u, m, rest + rest)
    p = _horner(POW_LOGARITHM, square) * square
    log2_e = _constant(0x3FB8AA3B)
    high = fma(u, log2_e, k)
    low = fma(u, log2_e, k - high)
    low = fma(u, _constant(0x32A55E34), fma(error, log2_e, low))
    low = fma(p, u, fma(p * 3.0, error, low))
    total = high + low
    low = low - (total - high)
    power = total * y
    tail = fma(low, y, fma(total, y, -power))
    whole = _round_even(power)
    found = _horner(POW_EXPONENTIAL, tail + (power - whole))
    # whole lies within 152 of zero where it counts: 2^whole is the product of two powers
    steps = jnp.clip(_as_float(whole), -200.0, 200.0).astype(jnp.int32)
    steps = jnp.where(is_nan_f32(whole.codes), 0, steps)
    first = jnp.where(steps > 0, np.uint32(0x7F000000), np.uint32(0x7F000000 - 2097152000))
    second = (steps << 23).astype(jnp.uint32) - jnp.where(steps > 0, np.uint32(0), np.uint32(0x83000000))
    found = found * Value(first) * Value(second)
    found = where(abs(power) > 152.0, where(power < 0.0, 0.0, _constant(0x7F800000)), found)
    return _finish_power(x, y, found)


def _log2_parts(size: Value) -> tuple[Value, Value]:
    """Return k and m for size = 2^k (1 + m) as `powf` splits it."""
    small = size < _constant(0x00800000)
    scaled = where(small, size * 2.0**24, size)
    exponent = (scaled.codes - np.uint32(1060439283)) & EXPONENT_BITS
    return fma(_signed_float(exponent), _constant(0x34000000), where(small, -24.0, 0.0)), Value(scaled.codes - exponent) - 1.0


def _finish_power(x: Value, y: Value, found: Value) -> Value:
    size, exponent = x.codes & MAGNITUDE, y.codes & MAGNITUDE
    half = y * 0.5
    truncated = Value(lax.bitcast_convert_type(jnp.trunc(_as_float(half)), jnp.uint32))
    is_odd = abs(y - (truncated + truncated)).codes == ONE_CODE
    is_integer = lax.bitcast_convert_type(jnp.floor(_as_float(y)), jnp.uint32) == y.codes
    is_integer |= exponent == 0
    negative = jnp.where(is_odd, found.codes ^ SIGN, found.codes)
    negative = jnp.where(is_integer, negative, NAN)
    code = jnp.where(x.codes >= SIGN, negative, found.codes)
    code = jnp.where((x.codes == SIGN | ONE_CODE) & (exponent == INFINITY), ONE_CODE, code)
    # a zero or an infinity: its own sign for an odd exponent, and the reciprocal for a negative one
    limit = (x + x).codes ^ jnp.where(y < 0.0, INFINITY, np.uint32(0))
    limit = jnp.where(is_odd, limit, limit & MAGNITUDE)
    code = jnp.where((size == 0) | (size == INFINITY), limit, code)
    code = jnp.where((size > INFINITY) | (exponent > INFINITY), NAN, code)
    return Value(jnp.where((x.codes == ONE_CODE) | (exponent == 0), ONE_CODE, code))


def atan2f(y: Value, x: Value) -> Value:
    """Return the angle of the point (x, y) as libdevice's `atan2f`."""
    width, height = abs(x), abs(y)
    steep = height > width
    larger, smaller = where(steep, height, width), where(steep, width, height)
    t = smaller / larger
    square = t * t
    angle = fma(square * _horner(ATAN_COEFFICIENTS, square), t, t)
    left = x.codes >= SIGN
    turn, quarter = (_constant(code) for code in ATAN_HALF_PI)
    upright = fma(quarter, turn, where(left, angle, -angle))
    angle = where(steep, upright, where(left, fma(_constant(0x3FEEE581), turn, -angle), angle))
    angle = where(width.codes == height.codes, where(left, _constant(0x4016CBE4), _constant(0x3F490FDB)), angle)
    angle = where(larger.codes == 0, where(left, _constant(0x40490FDB), 0.0), angle)
    total = width + height
    return Value(jnp.where(is_nan_f32(total.codes), NAN, (angle.codes & MAGNITUDE) | (y.codes & SIGN)))


@jax.jit
def _remainder_codes(x: Array, y: Array) -> Array:
    """Return the exact remainder of x / y with the sign of x; f32 codes of one shape."""
    u, v = x & MAGNITUDE, y & MAGNITUDE
    (a, i), (b, j) = (_integer_parts(part) for part in (u, v))
    rest = a % jnp.where(b == 0, 1, b)
    distance = jnp.maximum(i - j, 0)

    def shift(_: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
        value, left = state
        step = jnp.minimum(left, 8)
        return (value << step.astype(jnp.uint32)) % jnp.where(b == 0, 1, b), left - step

    rest, _ = lax.fori_loop(0, -(-254 // 8), shift, (rest, distance))
    up = lax.clz(jnp.where(rest == 0, 1, rest)).astype(jnp.int32) - 8
    up = jnp.minimum(up, j - 1)
    code = (rest << up.astype(jnp.uint32)) + ((j - up - 1).astype(jnp.uint32) << 23)
    code = jnp.where(rest == 0, 0, code)
    code = jnp.where(u < v, u, code)
    code = jnp.where((u >= INFINITY) | (v > INFINITY) | (v == 0), NAN, code | (x & SIGN))
    return code


def _integer_parts(size: Array) -> tuple[Array, Array]:
    """Return significand and exponent field of magnitudes, a subnormal one with field 1."""
    field = (size >> 23).astype(jnp.int32)
    return jnp.where(field == 0, size, (size & np.uint32(0x7FFFFF)) | np.uint32(1 << 23)), jnp.maximum(field, 1)


def fmodf(x: Value, y: Value) -> Value:
    """Return the remainder of x / y with the sign of x, which is exact, as libdevice's `fmodf`."""
    return Value(_remainder_codes(*_codes(x, y)))
