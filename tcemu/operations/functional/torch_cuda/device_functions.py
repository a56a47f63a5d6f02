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

from tcemu.engine.arithmetic import fma as exact_fma
from tcemu.engine.arithmetic import special_functions
from tcemu.engine.arithmetic.f32_arithmetic import add_f32, f32_code, fma_f32, is_nan_f32, less_f32
from tcemu.engine.arithmetic.libdevice import ERF_LARGE, ERF_SMALL, LOG_COEFFICIENTS, TANH_COEFFICIENTS
from tcemu.engine.arithmetic.special_functions import INFINITY, MAGNITUDE, NAN, SIGN, multiply_f32
from tcemu.engine.backends.quotients import divide
from tcemu.engine.formats.number_formats import F32

multiply_codes = jax.jit(multiply_f32)
_divide = jax.jit(lambda x, y: divide(x, y, F32))
_add_towards_zero = jax.jit(lambda x, y: exact_fma.add(x, y, F32, "RZ"))
_ex2, _rcp, _rsqrt = (jax.jit(getattr(special_functions, name)) for name in ("ex2", "rcp", "rsqrt"))
Number = float | int


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
        return Value(multiply_codes(*_codes(self, other)))

    def __rmul__(self, other: Number) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self * other

    def __truediv__(self, other: Value | Number) -> Value:
        return Value(_divide(*_codes(self, other)))

    def __rtruediv__(self, other: Number) -> Value:
        return Value(_divide(*_codes(other, self)))

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


@jax.jit
def _root(codes: Array) -> Array:
    """Return the square root, rounded once: a guess of the device, which two exact comparisons correct."""
    subnormal = codes & INFINITY == 0
    fraction = lax.bitcast_convert_type((codes & np.uint32(0x7FFFFF)).astype(jnp.float32), jnp.uint32)
    x = jnp.where(subnormal, fraction + np.uint32(1 << 23), codes)  # times 2^150
    x = jnp.where(x & MAGNITUDE == 0, np.uint32(0x3F800000), x)
    guess = lax.bitcast_convert_type(jnp.sqrt(lax.bitcast_convert_type(x, jnp.float32)), jnp.uint32)
    # Tuckerman's test: r is the rounded root of x if r (r - ulp) < x <= r (r + ulp)
    for step in (np.uint32(1), np.uint32(0xFFFFFFFF)):
        above = less_f32(jnp.zeros_like(x), fma_f32(guess ^ SIGN, guess + 1, x))
        below = ~less_f32(jnp.zeros_like(x), fma_f32(guess ^ SIGN, guess - 1, x))
        guess = jnp.where(above if step == 1 else below, guess + step, guess)
    root = jnp.where(subnormal, guess - np.uint32(75 << 23), guess)
    invalid = is_nan_f32(codes) | ((codes >= SIGN) & (codes & MAGNITUDE != 0))
    return jnp.where(invalid, NAN, jnp.where((codes & MAGNITUDE == 0) | (codes == INFINITY), codes, root))


def sqrt(x: Value) -> Value:
    """Return the square root, rounded once, as `sqrt.rn.f32`."""
    return Value(_root(x.codes))


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
