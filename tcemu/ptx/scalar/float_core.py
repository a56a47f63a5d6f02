"""Floats as integers of 64 bits and back: exact sums, products, quotients and roots, each rounded once.

`tcemu.arithmetic` does the same on limbs of 32 bits, for programs without x64 mode; here that mode is on, and one limb holds nearly all.
Source: IEEE 754-2019, 5.4.1 and 6.3. XLA:CPU flushes subnormals and contracts a*b+c, so no float operation touches a value.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tcemu.ptx.scalar.integers import high_64
from tcemu.ptx.scalar.number_codes import CANONICAL, FLOATS, code, is_nan, magnitude, sign
from tcemu.ptx.values import dtype

NOWHERE = -100_000  # the exponent of a zero: below that of every other number


class Parts(NamedTuple):
    """(-1)^negative * significand * 2^exponent, unless nan or infinite. What a jam leaves in bit 0 stands for all that is below."""

    negative: Array  # bool
    significand: Array  # uint64
    exponent: Array  # int32: the weight of bit 0
    nan: Array  # bool
    infinite: Array  # bool

    @property
    def zero(self) -> Array:
        """bool: the number is 0. The significand of Inf is not 0."""
        return self.significand == 0


def unpack(x: Array, kind: str) -> Parts:
    """Raw bits of f16, bf16, f32 or f64 -> their parts."""
    fmt, size = FLOATS[kind], magnitude(x, kind)
    field = (size >> fmt.mantissa_bits).astype(jnp.int32)
    fraction = (size & x.dtype.type(code(kind).hidden - 1)).astype(jnp.uint64)
    significand = jnp.where(field > 0, fraction | jnp.uint64(code(kind).hidden), fraction)
    exponent = jnp.where(significand == 0, NOWHERE, jnp.maximum(field, 1) - (fmt.bias + fmt.mantissa_bits))
    return Parts(sign(x, kind) != 0, significand, exponent, is_nan(x, kind), size == x.dtype.type(code(kind).infinity))


def normal(x: Parts, top: int = 63) -> Parts:
    """The same number with its leading one at bit `top`."""
    shift = lax.clz(x.significand).astype(jnp.int32) - (63 - top)
    moved = x.significand << jnp.maximum(shift, 0).astype(jnp.uint64)
    return x._replace(significand=moved, exponent=x.exponent - shift)


def shifted_jam(x: Array, count: Array) -> Array:
    """x >> count, with bit 0 set if any bit was lost; uint64, count from 0."""
    count = jnp.minimum(count, 64).astype(jnp.uint64)
    moved = x >> count
    return moved | ((moved << count) != x).astype(jnp.uint64)


def shifted(x: Array, count: Array | int, negative: Array, rounding: str) -> Array:
    """x >> count, rounded ("rn", "rz", "rm", "rp", and "rna": ties away from zero); uint64, count from 1."""
    count = jnp.minimum(jnp.asarray(count), 65).astype(jnp.uint64)
    whole = x >> count
    half, rest = (x >> (count - 1)) & 1, (x << (65 - count)) != 0
    if rounding == "rn":
        return whole + (half & (whole | rest))
    if rounding == "rna":
        return whole + half
    if rounding == "rz":
        return whole
    away = negative if rounding == "rm" else ~negative
    return whole + (away & ((half == 1) | rest))


def pack(x: Parts, kind: str, rounding: str = "rn", ftz: bool = False) -> Array:
    """Parts -> raw bits, rounded once. Every NaN is the canonical one.

    ftz: what is below the least normal number when rounded with exponents without end becomes a zero of its sign, as on an H200.
    """
    fmt, is_64 = FLOATS[kind], kind == "f64"
    x, zero = normal(x), x.zero
    exponent, least = x.exponent + 63, fmt.least_exponent
    exponent = jnp.where(zero, NOWHERE, exponent)
    drop = (63 - fmt.mantissa_bits) + (0 if ftz else jnp.maximum(least - exponent, 0))
    whole = shifted(x.significand, drop, x.negative, rounding)
    # the hidden bit of `whole` adds one to the field, and a carry out of the fraction one more
    field = jnp.clip(exponent - least, 0, fmt.greatest_exponent - least + 1)
    size = (whole + (field.astype(jnp.uint64) << fmt.mantissa_bits)).astype(dtype(kind))
    infinity = size.dtype.type(code(kind).infinity)
    largest = infinity if rounding in ("rn", "rna") else infinity - 1
    if rounding in ("rm", "rp"):
        largest = jnp.where(x.negative == (rounding == "rm"), infinity, infinity - 1)
    size = jnp.where(size >= infinity, largest, size)
    if ftz:
        reaches = (exponent == least - 1) & (whole == 2 * code(kind).hidden)
        size = jnp.where(exponent < least, jnp.where(reaches, size.dtype.type(code(kind).hidden), 0), size).astype(size.dtype)
    size = jnp.where(x.infinite, infinity, size)
    signs = x.negative.astype(size.dtype) << (63 if is_64 else fmt.bits - 1)
    return jnp.where(x.nan, size.dtype.type(CANONICAL[kind]), size | signs)


# ---- sums


def total(x: Parts, y: Parts, rounding: str) -> Parts:
    """x + y, jammed: enough for one rounding to a format of at most 53 bits, if the operands have at most 53, or 48 and 24."""
    x, y = normal(x, 62), normal(y, 62)  # a bit is free for the carry
    exponent = jnp.maximum(x.exponent, y.exponent)
    a = shifted_jam(x.significand, exponent - x.exponent)
    b = shifted_jam(y.significand, exponent - y.exponent)
    same, smaller = x.negative == y.negative, a < b
    significand = jnp.where(same, a + b, jnp.where(smaller, b - a, a - b))
    negative = jnp.where(same | ~smaller, x.negative, y.negative)
    return _sum(x, y, Parts(negative, significand, exponent, x.nan, x.infinite), rounding)


def _sum(x: Parts, y: Parts, finite: Parts, rounding: str) -> Parts:
    """The finite sum, with the sign of an exact zero (6.3) and the special ones."""
    same = x.negative == y.negative
    zero = finite.significand == 0
    negative = jnp.where(zero & ~same, rounding == "rm", finite.negative)
    negative = jnp.where(x.infinite, x.negative, jnp.where(y.infinite, y.negative, negative))
    nan = x.nan | y.nan | (x.infinite & y.infinite & ~same)
    exponent = jnp.where(zero, NOWHERE, finite.exponent)
    return Parts(negative, finite.significand, exponent, nan, x.infinite | y.infinite)


# ---- products


def times(x: Parts, y: Parts, significand: Array, exponent: Array) -> Parts:
    """The product's sign and special values."""
    nan = x.nan | y.nan | (x.infinite & y.zero) | (y.infinite & x.zero)
    exponent = jnp.where(x.zero | y.zero, NOWHERE, exponent)
    return Parts(x.negative != y.negative, significand, exponent, nan, x.infinite | y.infinite)


def product(x: Parts, y: Parts, kind: str) -> Parts:
    """x * y: exact; of f64 jammed to 64 bits."""
    if kind != "f64":
        return times(x, y, x.significand * y.significand, x.exponent + y.exponent)
    u, v = normal(x), normal(y)
    low, high = u.significand * v.significand, high_64(u.significand, v.significand, False)
    return times(x, y, high | (low != 0), u.exponent + v.exponent + 64)


def fused(x: Parts, y: Parts, z: Parts, kind: str, rounding: str) -> Parts:
    """x * y + z, jammed once."""
    return _fused_64(x, y, z, rounding) if kind == "f64" else total(product(x, y, kind), z, rounding)


def _fused_64(x: Parts, y: Parts, z: Parts, rounding: str) -> Parts:
    """The same in 128 bits, as pairs of uint64, upper one first."""
    u, v = normal(x, 62), normal(y, 62)
    p = times(x, y, u.significand, u.exponent + v.exponent)
    p_high, p_low = high_64(u.significand, v.significand, False), u.significand * v.significand  # its leading one: bit 124 or 125
    w = normal(z, 61)  # of the upper word: bit 125
    z_exponent = jnp.where(z.zero, NOWHERE, w.exponent - 64)
    exponent = jnp.maximum(p.exponent, z_exponent)
    a_high, a_low = _right_jam(p_high, p_low, exponent - p.exponent)
    b_high, b_low = _right_jam(w.significand, jnp.zeros_like(p_low), exponent - z_exponent)
    same = p.negative == z.negative
    smaller = (a_high < b_high) | ((a_high == b_high) & (a_low < b_low))
    sum_low = a_low + b_low
    sum_high = a_high + b_high + (sum_low < a_low)
    more_high, more_low = jnp.where(smaller, b_high, a_high), jnp.where(smaller, b_low, a_low)
    less_high, less_low = jnp.where(smaller, a_high, b_high), jnp.where(smaller, a_low, b_low)
    high = jnp.where(same, sum_high, more_high - less_high - (more_low < less_low))
    low = jnp.where(same, sum_low, more_low - less_low)
    shift = jnp.where(high == 0, 64 + lax.clz(low).astype(jnp.int32), lax.clz(high).astype(jnp.int32))  # leading one to the top, then cut
    moved = _left(high, low, shift)
    negative = jnp.where(same | ~smaller, p.negative, z.negative)
    finite = Parts(negative, moved[0] | (moved[1] != 0), exponent + 64 - shift, p.nan, p.infinite)
    return _sum(p, z, finite, rounding)


def _left(high: Array, low: Array, count: Array) -> tuple[Array, Array]:
    n = (count & 63).astype(jnp.uint64)
    high, low = jnp.where(count >= 64, low, high), jnp.where(count >= 64, 0, low)
    return (high << n) | (low >> (64 - n)), low << n


def _right_jam(high: Array, low: Array, count: Array) -> tuple[Array, Array]:
    """Right by count, with bit 0 set if any bit was lost."""
    count = jnp.minimum(count, 128)
    n = (count & 63).astype(jnp.uint64)
    whole = count >= 64
    lost = jnp.where(whole, low != 0, False)
    high, low = jnp.where(whole, 0, high), jnp.where(whole, high, low)
    lost = lost | jnp.where(count == 128, low != 0, (low << (64 - n)) != 0)
    moved_low = jnp.where(count == 128, 0, (low >> n) | (high << (64 - n)))
    return high >> n, moved_low | lost


# ---- quotients and roots


def quotient(x: Parts, y: Parts, kind: str) -> Parts:
    """x / y, jammed; a finite value over zero is Inf, 0/0 and Inf/Inf are NaN."""
    digits, steps = (11, 5) if kind == "f64" else (30, 1)
    width = FLOATS[kind].mantissa_bits
    u, v = normal(x, width), normal(y, width)
    divisor = jnp.maximum(v.significand, 1)
    whole, rest = u.significand // divisor, u.significand % divisor
    for _ in range(steps):
        rest = rest << digits
        whole, rest = (whole << digits) | (rest // divisor), rest % divisor
    nan = x.nan | y.nan | (x.zero & y.zero) | (x.infinite & y.infinite)
    nothing = x.zero | y.infinite
    significand = jnp.where(nothing, 0, whole | (rest != 0))
    exponent = jnp.where(nothing, NOWHERE, u.exponent - v.exponent - digits * steps)
    return Parts(x.negative != y.negative, significand, exponent, nan, x.infinite | y.zero)


def root(x: Parts) -> Parts:
    """The square root, jammed; -0 gives -0, every other negative number NaN.

    The root of a 53-bit float is only where the search begins: what is left over says, in integers, by how much it is off.
    """
    u = normal(x, 52)
    odd = (u.exponent & 1) == 1
    number = jnp.where(odd, u.significand << 1, u.significand)
    start = jnp.sqrt(number.astype(jnp.float64) * 2.0**52)
    guess = start.astype(jnp.uint64)
    left = ((number << 52) - guess * guess).astype(jnp.int64)  # far below 2^63: its upper word is not needed
    low = left < 0
    guess, left = jnp.where(low, guess - 1, guess), jnp.where(low, left + 2 * guess.astype(jnp.int64) - 1, left)
    high = left > 2 * guess.astype(jnp.int64)
    guess, left = jnp.where(high, guess + 1, guess), jnp.where(high, left - 2 * guess.astype(jnp.int64) - 1, left)
    half = left > guess.astype(jnp.int64)
    significand = (guess << 2) | (half.astype(jnp.uint64) << 1) | (left != 0)
    exponent = jnp.where(x.zero, NOWHERE, ((u.exponent - odd - 52) >> 1) - 2)
    nan = x.nan | (x.negative & ~x.zero)
    return Parts(x.negative, jnp.where(x.zero, 0, significand), exponent, nan, x.infinite)


# ---- to integers


def integral(x: Parts, rounding: str) -> tuple[Array, Array]:
    """The magnitude rounded to an integer, uint64, and whether it is 2^64 or more, or Inf."""
    u = normal(x)
    exponent = u.exponent + 63
    drop = jnp.maximum(63 - exponent, 0)
    # by one less and one more, for the rounding takes one bit at least; 2^63 and above have none to lose
    whole = jnp.where(drop == 0, u.significand, shifted(u.significand, jnp.maximum(drop, 1), x.negative, rounding))
    return jnp.where(x.zero, 0, whole), (exponent > 63) | x.infinite
