"""Float arithmetic on 64-bit integers: exact sums, products, quotients and square roots, each rounded once.

`tcemu.arithmetic` does the same on limbs of 32 bits, for programs without x64 mode. Here that mode is on, and one limb is nearly always
enough. XLA:CPU flushes subnormals and contracts a*b+c, so no float operation touches a value. A jam, as in Berkeley SoftFloat, sets bit 0
if any bit below it was lost. Source: IEEE 754-2019, 5.4.1 and 6.3.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tcemu.kernels.ptx.scalar.integer_arithmetic import high_product_64
from tcemu.kernels.ptx.scalar.raw_bits import CANONICAL_NAN, FLOAT_FORMATS, format_constants, is_nan, magnitude, sign_bit
from tcemu.kernels.ptx.text.ptx_types import storage_dtype

ZERO_EXPONENT = -100_000  # exponent of a zero, below the exponent of every other number


class FloatParts(NamedTuple):
    """(-1)^negative * significand * 2^exponent, unless nan or infinite. After a jam, bit 0 also represents all lower bits."""

    negative: Array  # bool
    significand: Array  # uint64
    exponent: Array  # int32, weight of bit 0
    nan: Array  # bool
    infinite: Array  # bool

    @property
    def is_zero(self) -> Array:
        """A bool array, True for zeros. The significand of Inf is not 0."""
        return self.significand == 0


def decompose(x: Array, kind: str) -> FloatParts:
    """Split raw bits of f16, bf16, f32 or f64 into their parts."""
    fmt, size = FLOAT_FORMATS[kind], magnitude(x, kind)
    field = (size >> fmt.mantissa_bits).astype(jnp.int32)
    fraction = (size & x.dtype.type(format_constants(kind).hidden_bit - 1)).astype(jnp.uint64)
    significand = jnp.where(field > 0, fraction | jnp.uint64(format_constants(kind).hidden_bit), fraction)
    exponent = jnp.where(significand == 0, ZERO_EXPONENT, jnp.maximum(field, 1) - (fmt.bias + fmt.mantissa_bits))
    return FloatParts(sign_bit(x, kind) != 0, significand, exponent, is_nan(x, kind), size == x.dtype.type(format_constants(kind).infinity))


def normalize(x: FloatParts, top: int = 63) -> FloatParts:
    """Return the same number with its leading one at bit `top`."""
    shift = lax.clz(x.significand).astype(jnp.int32) - (63 - top)
    moved = x.significand << jnp.maximum(shift, 0).astype(jnp.uint64)
    return x._replace(significand=moved, exponent=x.exponent - shift)


def shift_right_jam(x: Array, count: Array) -> Array:
    """Return x >> count with a jam; uint64, count from 0."""
    count = jnp.minimum(count, 64).astype(jnp.uint64)
    moved = x >> count
    return moved | ((moved << count) != x).astype(jnp.uint64)


def shift_right_round(x: Array, count: Array | int, negative: Array, rounding: str) -> Array:
    """Return x >> count, rounded by "rn", "rz", "rm", "rp" or "rna" (ties away from zero); uint64, count from 1."""
    count = jnp.minimum(jnp.asarray(count), 65).astype(jnp.uint64)
    truncated = x >> count
    half, rest = (x >> (count - 1)) & 1, (x << (65 - count)) != 0
    if rounding == "rn":
        return truncated + (half & (truncated | rest))
    if rounding == "rna":
        return truncated + half
    if rounding == "rz":
        return truncated
    away = negative if rounding == "rm" else ~negative
    return truncated + (away & ((half == 1) | rest))


def round_to_bits(x: FloatParts, kind: str, rounding: str = "rn", ftz: bool = False) -> Array:
    """Round parts once and return raw bits. Every NaN becomes the canonical NaN.

    With `ftz`, a number whose rounding with an unbounded exponent is below the smallest normal number becomes a zero of its sign, as on an
    H200.
    """
    fmt = FLOAT_FORMATS[kind]
    x, zero = normalize(x), x.is_zero
    exponent, least = x.exponent + 63, fmt.min_exponent
    exponent = jnp.where(zero, ZERO_EXPONENT, exponent)
    drop = (63 - fmt.mantissa_bits) + (0 if ftz else jnp.maximum(least - exponent, 0))
    significand = shift_right_round(x.significand, drop, x.negative, rounding)
    # the hidden bit of the significand adds one to the field, and a carry out of the fraction adds one more
    field = jnp.clip(exponent - least, 0, fmt.max_exponent - least + 1)
    size = (significand + (field.astype(jnp.uint64) << fmt.mantissa_bits)).astype(storage_dtype(kind))
    infinity = size.dtype.type(format_constants(kind).infinity)
    overflow = infinity if rounding in ("rn", "rna") else infinity - 1
    if rounding in ("rm", "rp"):
        overflow = jnp.where(x.negative == (rounding == "rm"), infinity, infinity - 1)
    size = jnp.where(size >= infinity, overflow, size)
    if ftz:
        reaches = (exponent == least - 1) & (significand == 2 * format_constants(kind).hidden_bit)
        size = jnp.where(exponent < least, jnp.where(reaches, size.dtype.type(format_constants(kind).hidden_bit), 0), size).astype(
            size.dtype
        )
    size = jnp.where(x.infinite, infinity, size)
    signs = x.negative.astype(size.dtype) << (fmt.bits - 1)
    return jnp.where(x.nan, size.dtype.type(CANONICAL_NAN[kind]), size | signs)


# ---- sums


def add_parts(x: FloatParts, y: FloatParts, rounding: str) -> FloatParts:
    """Return x + y with a jam.

    The result has enough bits for one rounding to a format of at most 53 bits, if the operands have at most 53 bits each, or 48 and 24.
    """
    x, y = normalize(x, 62), normalize(y, 62)  # one bit is free for the carry
    exponent = jnp.maximum(x.exponent, y.exponent)
    a = shift_right_jam(x.significand, exponent - x.exponent)
    b = shift_right_jam(y.significand, exponent - y.exponent)
    same, smaller = x.negative == y.negative, a < b
    significand = jnp.where(same, a + b, jnp.where(smaller, b - a, a - b))
    negative = jnp.where(same | ~smaller, x.negative, y.negative)
    return _finish_sum(x, y, FloatParts(negative, significand, exponent, x.nan, x.infinite), rounding)


def _finish_sum(x: FloatParts, y: FloatParts, finite: FloatParts, rounding: str) -> FloatParts:
    """Add the sign of an exact zero (IEEE 754-2019, 6.3) and the special values to a finite sum."""
    same = x.negative == y.negative
    zero = finite.significand == 0
    negative = jnp.where(zero & ~same, rounding == "rm", finite.negative)
    negative = jnp.where(x.infinite, x.negative, jnp.where(y.infinite, y.negative, negative))
    nan = x.nan | y.nan | (x.infinite & y.infinite & ~same)
    exponent = jnp.where(zero, ZERO_EXPONENT, finite.exponent)
    return FloatParts(negative, finite.significand, exponent, nan, x.infinite | y.infinite)


# ---- products


def make_product(x: FloatParts, y: FloatParts, significand: Array, exponent: Array) -> FloatParts:
    """Add the sign and the special values of a product to its significand and exponent."""
    nan = x.nan | y.nan | (x.infinite & y.is_zero) | (y.infinite & x.is_zero)
    exponent = jnp.where(x.is_zero | y.is_zero, ZERO_EXPONENT, exponent)
    return FloatParts(x.negative != y.negative, significand, exponent, nan, x.infinite | y.infinite)


def multiply_parts(x: FloatParts, y: FloatParts, kind: str) -> FloatParts:
    """Return x * y: exact, but jammed to 64 bits for f64."""
    if kind != "f64":
        return make_product(x, y, x.significand * y.significand, x.exponent + y.exponent)
    u, v = normalize(x), normalize(y)
    low, high = u.significand * v.significand, high_product_64(u.significand, v.significand, False)
    return make_product(x, y, high | (low != 0), u.exponent + v.exponent + 64)


def fused_multiply_add(x: FloatParts, y: FloatParts, z: FloatParts, kind: str, rounding: str) -> FloatParts:
    """Return x * y + z, jammed once."""
    return _fused_multiply_add_f64(x, y, z, rounding) if kind == "f64" else add_parts(multiply_parts(x, y, kind), z, rounding)


def _fused_multiply_add_f64(x: FloatParts, y: FloatParts, z: FloatParts, rounding: str) -> FloatParts:
    """Return x * y + z of f64, computed in 128 bits: pairs of uint64, upper one first."""
    u, v = normalize(x, 62), normalize(y, 62)
    p = make_product(x, y, u.significand, u.exponent + v.exponent)
    p_high, p_low = high_product_64(u.significand, v.significand, False), u.significand * v.significand  # leading one at bit 124 or 125
    w = normalize(z, 61)  # as the upper word: leading one at bit 125
    z_exponent = jnp.where(z.is_zero, ZERO_EXPONENT, w.exponent - 64)
    exponent = jnp.maximum(p.exponent, z_exponent)
    a_high, a_low = _shift_right_jam_128(p_high, p_low, exponent - p.exponent)
    b_high, b_low = _shift_right_jam_128(w.significand, jnp.zeros_like(p_low), exponent - z_exponent)
    same = p.negative == z.negative
    smaller = (a_high < b_high) | ((a_high == b_high) & (a_low < b_low))
    sum_low = a_low + b_low
    sum_high = a_high + b_high + (sum_low < a_low)
    larger_high, larger_low = jnp.where(smaller, b_high, a_high), jnp.where(smaller, b_low, a_low)
    smaller_high, smaller_low = jnp.where(smaller, a_high, b_high), jnp.where(smaller, a_low, b_low)
    high = jnp.where(same, sum_high, larger_high - smaller_high - (larger_low < smaller_low))
    low = jnp.where(same, sum_low, larger_low - smaller_low)
    shift = jnp.where(high == 0, 64 + lax.clz(low).astype(jnp.int32), lax.clz(high).astype(jnp.int32))  # leading one to bit 127
    moved = _shift_left_128(high, low, shift)
    negative = jnp.where(same | ~smaller, p.negative, z.negative)
    finite = FloatParts(negative, moved[0] | (moved[1] != 0), exponent + 64 - shift, p.nan, p.infinite)
    return _finish_sum(p, z, finite, rounding)


def _shift_left_128(high: Array, low: Array, count: Array) -> tuple[Array, Array]:
    n = (count & 63).astype(jnp.uint64)
    high, low = jnp.where(count >= 64, low, high), jnp.where(count >= 64, 0, low)
    return (high << n) | (low >> (64 - n)), low << n


def _shift_right_jam_128(high: Array, low: Array, count: Array) -> tuple[Array, Array]:
    """Return the pair shifted right by count with a jam."""
    count = jnp.minimum(count, 128)
    n = (count & 63).astype(jnp.uint64)
    whole_word = count >= 64
    lost = jnp.where(whole_word, low != 0, False)
    high, low = jnp.where(whole_word, 0, high), jnp.where(whole_word, high, low)
    lost = lost | jnp.where(count == 128, low != 0, (low << (64 - n)) != 0)
    moved_low = jnp.where(count == 128, 0, (low >> n) | (high << (64 - n)))
    return high >> n, moved_low | lost


# ---- quotients and square roots


def divide_parts(x: FloatParts, y: FloatParts, kind: str) -> FloatParts:
    """Return x / y with a jam; a finite value over zero is Inf, 0/0 and Inf/Inf are NaN."""
    digits, steps = (11, 5) if kind == "f64" else (30, 1)
    width = FLOAT_FORMATS[kind].mantissa_bits
    u, v = normalize(x, width), normalize(y, width)
    divisor = jnp.maximum(v.significand, 1)
    quotient, rest = u.significand // divisor, u.significand % divisor
    for _ in range(steps):
        rest = rest << digits
        quotient, rest = (quotient << digits) | (rest // divisor), rest % divisor
    nan = x.nan | y.nan | (x.is_zero & y.is_zero) | (x.infinite & y.infinite)
    zero = x.is_zero | y.infinite
    significand = jnp.where(zero, 0, quotient | (rest != 0))
    exponent = jnp.where(zero, ZERO_EXPONENT, u.exponent - v.exponent - digits * steps)
    return FloatParts(x.negative != y.negative, significand, exponent, nan, x.infinite | y.is_zero)


def square_root_parts(x: FloatParts) -> FloatParts:
    """Return the square root with a jam; -0 gives -0, every other negative number NaN.

    The float square root is only the first guess. The integer remainder then shows by how much the guess is wrong.
    """
    u = normalize(x, 52)
    odd = (u.exponent & 1) == 1
    radicand = jnp.where(odd, u.significand << 1, u.significand)
    guess = jnp.sqrt(radicand.astype(jnp.float64) * 2.0**52).astype(jnp.uint64)
    rest = ((radicand << 52) - guess * guess).astype(jnp.int64)  # far below 2^63: the upper word is not needed
    high = rest < 0
    guess, rest = jnp.where(high, guess - 1, guess), jnp.where(high, rest + 2 * guess.astype(jnp.int64) - 1, rest)
    low = rest > 2 * guess.astype(jnp.int64)
    guess, rest = jnp.where(low, guess + 1, guess), jnp.where(low, rest - 2 * guess.astype(jnp.int64) - 1, rest)
    half = rest > guess.astype(jnp.int64)
    significand = (guess << 2) | (half.astype(jnp.uint64) << 1) | (rest != 0)
    exponent = jnp.where(x.is_zero, ZERO_EXPONENT, ((u.exponent - odd - 52) >> 1) - 2)
    nan = x.nan | (x.negative & ~x.is_zero)
    return FloatParts(x.negative, jnp.where(x.is_zero, 0, significand), exponent, nan, x.infinite)


# ---- conversion to integers


def round_to_integer(x: FloatParts, rounding: str) -> tuple[Array, Array]:
    """Return the magnitude rounded to an integer, uint64, and a bool array, True for 2^64 or more and for Inf."""
    u = normalize(x)
    exponent = u.exponent + 63
    drop = jnp.maximum(63 - exponent, 0)
    # the rounding drops at least one bit; numbers from 2^63 on have no bit to drop
    integer = jnp.where(drop == 0, u.significand, shift_right_round(u.significand, jnp.maximum(drop, 1), x.negative, rounding))
    return jnp.where(x.is_zero, 0, integer), (exponent > 63) | x.infinite
