"""The special function unit (MUFU) in integers: ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh, and the divisions by a reciprocal.

Codes in, codes out, any shape, under `jit` and `vmap`. A significand's fraction is split into an index of a row of three coefficients and
the rest l. The unit adds c0, c1 * l and c2 * Q(l) and truncates the sum. Q(l) is the square of l without the partial products whose weight
is below 2^19; it is a multiple of 2^19, so that 32-bit words suffice for every term.

The unit itself takes subnormal operands as zeros and gives zeros for subnormal results. Without `.ftz` the assembler scales the operand and
the result by powers of two, except in sin and cos. Every NaN is the canonical NaN.

Source: `tcemu.engine.arithmetic.special_function_tables` for the unit; machine code of ptxas 13.0 for sm_90 for what surrounds it. The
evidence of each target: `tcemu.engine.architectures.special_function_rows`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base import bits
from tcemu.base.compilation import compile_once
from tcemu.base.jax_internals import traced_by_name
from tcemu.engine.arithmetic.special_function_tables import TABLES, TANH

NAN, INFINITY, SIGN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x80000000)
MAGNITUDE, FRACTION, ONE = np.uint32(0x7FFFFFFF), np.uint32(0x7FFFFF), np.uint32(0x3F800000)
FRACTION_BITS, BIAS = 23, 127
SQUARE_BITS, SQUARE_UNIT = 17, 19  # bits of the number that is squared; the least weight of a partial product that the unit adds
FAR = np.uint32((BIAS + 126) << FRACTION_BITS)  # 2^126, above which a reciprocal is subnormal
HALF_TWO_PI = np.uint32(0x3E22F983)  # 1 / (2 pi) in f32, by which the assembler multiplies the operand of sin and cos


class _Polynomial(NamedTuple):
    """A table's sum s in 32-bit words: s = (top << (unit + rest_bits)) + (rest << unit)."""

    high: np.ndarray  # c0 of each row
    low: np.ndarray  # c1 * 4096 + c2 of each row
    index_bits: int
    signs: tuple[int, int]
    shifts: tuple[int, int]  # left shifts of c1 * l and of c2 * (Q >> 19), in units of s
    bias: int
    rest_bits: int
    one: int  # bit of top that stands for one
    doubled: bool

    def __call__(self, row: Array, low: Array) -> tuple[Array, Array]:
        """Return top, int32, and rest, uint32, for rows and the lower bits of fractions, both uint32."""
        c0, packed = (jnp.asarray(column).at[row].get(mode="promise_in_bounds") for column in (self.high, self.low))
        c1, c2 = packed >> 12, packed & 0xFFF
        square = _square(low << 1 if self.doubled else low)
        upper, lower = (_signed(self.signs[0], (c1 * part) << self.shifts[0]) for part in (low >> 3, low & 7))
        small = lower + _signed(self.signs[1], (c2 * square) << self.shifts[1]) + self.bias
        total = upper + (small >> 3)  # the sum without c0, in units of 8
        kept = self.rest_bits - 3
        rest = ((total & ((1 << kept) - 1)) << 3) | (small & 7)
        return c0.astype(jnp.int32) + (total >> kept), rest.astype(jnp.uint32)

    def fraction(self, top: Array, extra: int = 0) -> Array:
        """Return the 23 bits below the bit that stands for one, or those `extra` places further down."""
        return (top.astype(jnp.uint32) >> (self.one - FRACTION_BITS - extra)) & FRACTION


def _signed(sign: int, x: Array) -> Array:
    x = x.astype(jnp.int32)
    return x if sign > 0 else -x


def _square(x: Array) -> Array:
    """Return the square of a 17-bit number, uint32, without the partial products below 2^19, in units of 2^19."""
    upper = x >> 9  # all products of two lower bits are below 2^19, and so is the square of bit 9
    total = (upper * upper - (upper & 1)) >> 1
    for i in range(2, 9):  # twice bit i times the higher bits j with i + j + 1 >= 19
        total = total + ((x >> i) & 1) * (x >> (18 - i))
    return total


def _polynomial(name: str) -> _Polynomial:
    table = TABLES[name]
    square_unit = SQUARE_UNIT - 2 * table.doubled
    bias = table.bias >> (64 - table.weight + FRACTION_BITS)
    unit = min(table.c1_shift, square_unit, (bias & -bias).bit_length() - 1 if bias else square_unit)
    rest_bits = table.c0_shift - unit
    rows = np.array(table.rows, np.uint32)
    return _Polynomial(
        high=rows[:, 0],
        low=rows[:, 1] * np.uint32(4096) + rows[:, 2],
        index_bits=table.index_bits,
        signs=table.signs,
        shifts=(table.c1_shift - unit, square_unit - unit),
        bias=bias >> unit,
        rest_bits=rest_bits,
        one=table.weight - unit - rest_bits,
        doubled=table.doubled,
    )


EX2, LG2, RCP, RSQRT, SQRT, SIN = (_polynomial(name) for name in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin"))


# ---- the unit: f32 codes, subnormals are zeros


def _row_and_rest(polynomial: _Polynomial, fraction: Array) -> tuple[Array, Array]:
    shift = FRACTION_BITS - polynomial.index_bits
    return fraction >> shift, fraction & ((1 << shift) - 1)


def _field(codes: Array) -> Array:
    return ((codes & MAGNITUDE) >> FRACTION_BITS).astype(jnp.int32)


def _is_nan(codes: Array) -> Array:
    return (codes & MAGNITUDE) > INFINITY


def _is_infinite(codes: Array) -> Array:
    return (codes & MAGNITUDE) == INFINITY


def _assemble(field: Array, fraction: Array) -> Array:
    """Return positive codes; a field below 1 gives 0, one above 254 Inf."""
    codes = (field.astype(jnp.uint32) << FRACTION_BITS) | fraction
    return jnp.where(field < 1, np.uint32(0), jnp.where(field > 2 * BIAS, INFINITY, codes))


def _mufu_ex2(codes: Array) -> Array:
    field, significand = _field(codes), (codes & FRACTION) | (FRACTION + 1)
    exponent = field - BIAS
    # |x| as a fixed-point number with 23 fraction bits; a number of 128 or more has no such form and is handled below
    fixed = jnp.where(exponent < 0, significand >> jnp.minimum(-exponent, 31).astype(jnp.uint32), 0)
    fixed = jnp.where(exponent < 0, fixed, significand << jnp.minimum(jnp.maximum(exponent, 0), 7).astype(jnp.uint32))
    fixed = jnp.where(field == 0, np.uint32(0), fixed)
    negative = codes >= SIGN
    reduced = jnp.where(negative, jnp.where((fixed & FRACTION) == 0, ~fixed + 1, ~fixed), fixed)
    top, _ = EX2(*_row_and_rest(EX2, reduced & FRACTION))
    result = _assemble((reduced.astype(jnp.int32) >> FRACTION_BITS) + BIAS, EX2.fraction(top))
    result = jnp.where(exponent >= 7, jnp.where(negative, np.uint32(0), INFINITY), result)
    return jnp.where(_is_nan(codes), NAN, result)


def _mufu_lg2(codes: Array) -> Array:
    field = _field(codes)
    top, rest = LG2(*_row_and_rest(LG2, codes & FRACTION))
    # exponent + s, in two words; a unit is 2^-(one + rest_bits)
    low = (top.astype(jnp.uint32) << LG2.rest_bits) | rest
    high = ((field - BIAS) << (LG2.one + LG2.rest_bits - 32)) + (top >> (32 - LG2.rest_bits))
    negative = high < 0
    low = jnp.where(negative, ~low + 1, low)
    high = jnp.where(negative, ~high + (low == 0), high).astype(jnp.uint32)
    result = _normalize_cut(high, low & np.uint32(0xFFFFFFF8), LG2.one + LG2.rest_bits) | _sign_where(negative)
    zero, below_zero = field == 0, codes >= SIGN
    result = jnp.where(_is_infinite(codes), INFINITY, result)
    result = jnp.where(codes == ONE, np.uint32(0), result)  # the sum itself is not zero there
    result = jnp.where(zero, SIGN | INFINITY, jnp.where(below_zero, NAN, result))
    return jnp.where(_is_nan(codes), NAN, result)


def _normalize_cut(high: Array, low: Array, one: int) -> Array:
    """Return the positive f32 code of a 64-bit integer whose bit `one` stands for one, truncated; 0 for 0."""
    zeros = bits.leading_zeros((low, high))
    _, shifted = bits.shift_left((low, high), zeros)
    codes = ((BIAS + 63 - one - zeros).astype(jnp.uint32) << FRACTION_BITS) | ((shifted >> 8) & FRACTION)
    return jnp.where(zeros == 64, np.uint32(0), codes)


def _sign_where(negative: Array) -> Array:
    return jnp.where(negative, SIGN, np.uint32(0))


def _mufu_rcp(codes: Array) -> Array:
    field = _field(codes)
    whole, fraction = _reciprocal_significand(codes & FRACTION)
    result = _assemble(2 * BIAS - field - jnp.where(whole, 0, 1), fraction)
    result = jnp.where(field == 0, INFINITY, jnp.where(_is_infinite(codes), np.uint32(0), result)) | (codes & SIGN)
    return jnp.where(_is_nan(codes), NAN, result)


def _reciprocal_significand(fraction: Array) -> tuple[Array, Array]:
    """Return for 1 / 1.fraction: True where it is 1 or more, and its fraction after normalisation."""
    top, _ = RCP(*_row_and_rest(RCP, fraction))
    whole = ((top >> RCP.one) & 1) == 1
    return whole, jnp.where(whole, RCP.fraction(top), RCP.fraction(top, 1))


def _even_exponent(codes: Array) -> tuple[Array, Array, Array]:
    """Return for a root: half the exponent, its parity as uint32, and the row's index with the lower bits packed as a fraction."""
    exponent = _field(codes) - BIAS
    return exponent >> 1, (exponent & 1).astype(jnp.uint32), codes & FRACTION


def _mufu_rsqrt(codes: Array) -> Array:
    half, odd, fraction = _even_exponent(codes)
    exact, root = _reciprocal_root_fraction(odd, fraction)
    result = jnp.where(exact, _assemble(BIAS - half, jnp.zeros_like(root)), _assemble(BIAS - 1 - half, root))
    zero = _field(codes) == 0
    result = jnp.where(_is_infinite(codes), np.uint32(0), result)
    result = jnp.where(zero, INFINITY | (codes & SIGN), jnp.where(codes >= SIGN, NAN, result))
    return jnp.where(_is_nan(codes), NAN, result)


def _reciprocal_root_fraction(odd: Array, fraction: Array) -> tuple[Array, Array]:
    """Return for 1 / sqrt(1.fraction * 2^odd): True where it is exactly one, and the fraction of the others, which lie in [1/2, 1)."""
    row, rest = _row_and_rest(RSQRT, fraction)
    top, _ = RSQRT(row + (odd << RSQRT.index_bits), rest)
    return (odd | fraction) == 0, RSQRT.fraction(top, 1)


def _mufu_sqrt(codes: Array) -> Array:
    half, odd, fraction = _even_exponent(codes)
    row, rest = _row_and_rest(SQRT, fraction)
    top, _ = SQRT(row + (odd << SQRT.index_bits), rest)
    result = _assemble(BIAS + half, SQRT.fraction(top))
    zero = _field(codes) == 0
    result = jnp.where(_is_infinite(codes), INFINITY, result)
    result = jnp.where(zero, codes & SIGN, jnp.where(codes >= SIGN, NAN, result))
    return jnp.where(_is_nan(codes), NAN, result)


def _quadrants(codes: Array, flush: bool) -> Array:
    """Return |x| times 2 / pi with 23 fraction bits, modulo 4: the product with f32's 1 / (2 pi), rounded toward zero to 24 bits."""
    field = _field(codes)
    significand = jnp.where(field == 0, 0 if flush else codes & FRACTION, (codes & FRACTION) | (FRACTION + 1))
    low, high = bits.multiply_words(significand, jnp.full_like(codes, (HALF_TWO_PI & FRACTION) | (FRACTION + 1)))
    carried = high >> 15 != 0  # a subnormal x, whose product is smaller, gives 0 either way
    product = (high << jnp.where(carried, np.uint32(8), np.uint32(9))) | (low >> jnp.where(carried, np.uint32(24), np.uint32(23)))
    exponent = field - BIAS - jnp.where(carried, 0, 1)
    below, above = (jnp.clip(shift, 0, 31).astype(jnp.uint32) for shift in (-exponent, exponent))
    return ((product >> below) << above) & np.uint32(0x1FFFFFF)


def _mufu_sine(codes: Array, quarter: int, flush: bool) -> Array:
    """Return the sine of x plus `quarter` quarter turns: sin for 0, cos for 1."""
    word = _quadrants(codes, flush)
    quadrant, fraction = (word >> FRACTION_BITS) + np.uint32(quarter), word & FRACTION
    falling = (quadrant & 1) == 1
    top, rest = SIN(*_row_and_rest(SIN, jnp.where(falling, ~fraction & FRACTION, fraction)))
    words = (top >> (32 - SIN.rest_bits)).astype(jnp.uint32), (top.astype(jnp.uint32) << SIN.rest_bits) | rest
    sign = _sign_where((quadrant & 2) == 2) ^ (codes & SIGN if quarter == 0 else np.uint32(0))
    result = _normalize_cut(*words, SIN.one + SIN.rest_bits) | sign
    return jnp.where((codes & MAGNITUDE) >= INFINITY, NAN, result)


TANH_BITS = np.array([len(rows).bit_length() - 1 for rows in TANH.values()], np.uint32)  # index bits of each exponent
TANH_FIRST = np.cumsum([0, *(len(rows) for rows in TANH.values())], dtype=np.uint32)[:-1]
TANH_ROWS = np.array([row for rows in TANH.values() for row in rows], np.uint32).T
TANH_ONE, TANH_C0_SHIFT, TANH_SQUARE_SHIFT = 39, 15, 1  # bit that stands for one; left shifts of c0 and of c2 * (Q >> 19)


def _mufu_tanh(codes: Array) -> Array:
    """Return tanh x: x itself below 2^-8, subnormals included, one from 8 on, and between them a row of each exponent's own."""
    least, most = min(TANH), max(TANH)
    size, exponent = codes & MAGNITUDE, _field(codes) - BIAS
    group = jnp.clip(exponent - least, 0, most - least)
    index_bits, first = (jnp.asarray(column).at[group].get(mode="promise_in_bounds") for column in (TANH_BITS, TANH_FIRST))
    shift = FRACTION_BITS - index_bits
    fraction = codes & FRACTION
    row = first + (fraction >> shift)
    low = (fraction & ((jnp.uint32(1) << shift) - 1)) >> (shift - SQUARE_BITS)
    c0, c1, c2 = (jnp.asarray(column).at[row].get(mode="promise_in_bounds") for column in TANH_ROWS)
    total = bits.add(bits.multiply_words(c1, low), (c0 << TANH_C0_SHIFT, c0 >> (32 - TANH_C0_SHIFT)))
    square = (c2 * _square(low)) << TANH_SQUARE_SHIFT
    lower, upper = bits.subtract(total, (square, jnp.zeros_like(square)))
    result = _normalize_cut(upper, lower, TANH_ONE)
    result = jnp.where(exponent < least, size, jnp.where(exponent > most, ONE, result)) | (codes & SIGN)
    return jnp.where(_is_nan(codes), NAN, result)


# ---- scaling and products in f32


def multiply_f32(a: Array, b: Array, flush: bool = False) -> Array:
    """Multiply f32 codes, rounded once to nearest even, as `product_f32` does.

    Args:
        a: uint32 codes.
        b: uint32 codes.
        flush: Subnormal operands and results are zeros, as with `.ftz`. A result is subnormal if it is below 2^-126 before the exponent
            is bounded.

    Returns:
        uint32 codes; every NaN is the canonical NaN.
    """
    a, b = jnp.broadcast_arrays(a, b)
    return _multiply(a, b, True) if flush else product_f32(a, b)


def _multiply(a: Array, b: Array, flush: bool) -> Array:
    (m, i), (n, j) = (_significand(x, flush) for x in (a, b))
    low, high = bits.multiply_words(m, n)
    word, sticky = (high << 16) | (low >> 16), (low & 0xFFFF) != 0  # the upper 32 bits of 48
    carried = word >> 31 != 0
    word = jnp.where(carried, word, (word << 1) | ((low >> 15) & 1))
    sticky = jnp.where(carried, sticky, (low & 0x7FFF) != 0)
    field = i + j - BIAS + jnp.where(carried, 1, 0)  # the exponent field of the product
    drop = jnp.full_like(word, 8) if flush else jnp.clip(9 - field, 8, 33).astype(jnp.uint32)
    kept, lost = word >> drop, word & ((jnp.uint32(1) << drop) - 1)
    half = jnp.uint32(1) << (drop - 1)
    up = ((lost > half) | ((lost == half) & (sticky | ((kept & 1) == 1)))) & (drop < 33)
    kept = kept + up.astype(jnp.uint32)
    # the hidden bit adds one to the field, and a carry out of the fraction one more
    code = (jnp.maximum(field - 1, 0).astype(jnp.uint32) << FRACTION_BITS) + kept
    if flush:
        code = jnp.where((field < 0) | ((field == 0) & (kept >> 24 == 0)), np.uint32(0), jnp.where(field == 0, FRACTION + 1, code))
    code = jnp.where((code >= INFINITY) | (field > 2 * BIAS), INFINITY, code)
    zero = (m == 0) | (n == 0)
    infinite = _is_infinite(a) | _is_infinite(b)
    code = jnp.where(infinite, INFINITY, jnp.where(zero, np.uint32(0), code)) | ((a ^ b) & SIGN)
    return jnp.where(_is_nan(a) | _is_nan(b) | (infinite & zero), NAN, code)


@traced_by_name
@jax.jit
def product_f32(a: Array, b: Array) -> Array:
    """Multiply f32 codes of one shape, subnormals included, rounded once to nearest even."""
    return _multiply(a, b, False)


def _significand(codes: Array, flush: bool) -> tuple[Array, Array]:
    """Return the significand with its leading one at bit 23, 0 for zeros, and the exponent field, below 1 for subnormals."""
    field, fraction = _field(codes), codes & FRACTION
    if flush:
        return jnp.where(field == 0, np.uint32(0), fraction | (FRACTION + 1)), field
    shift = jnp.where(field == 0, lax.clz(fraction).astype(jnp.int32) - 8, 0)
    significand = jnp.where(field == 0, fraction << jnp.minimum(shift, 31).astype(jnp.uint32), fraction | (FRACTION + 1))
    return significand, jnp.where(field == 0, 1 - shift, field)


def _power_of_two(exponent: int) -> np.uint32:
    return np.uint32((BIAS + exponent) << FRACTION_BITS)


def _is_subnormal(codes: Array) -> Array:
    """Return True for subnormals and zeros."""
    return _field(codes) == 0


def _scale(codes: Array, exponent: Array) -> Array:
    """Multiply by 2^exponent, int32 from -24 to 24, rounded once to nearest even; every NaN becomes the canonical NaN."""
    significand, field = _significand(codes, False)
    field = field + exponent
    drop = jnp.clip(1 - field, 0, 30).astype(jnp.uint32)  # bits that a subnormal result loses
    doubled = significand << 1  # so that nothing is shifted by -1 where no bit is lost
    kept = (doubled + ((jnp.uint32(1) << drop) - 1) + ((significand >> drop) & 1)) >> (drop + 1)
    code = jnp.minimum((jnp.maximum(field - 1, 0).astype(jnp.uint32) << FRACTION_BITS) + kept, INFINITY)
    special = _field(codes) == 255
    return jnp.where(_is_nan(codes), NAN, jnp.where(special, codes, code | (codes & SIGN)))


def _exponent_where(condition: Array, exponent: int) -> Array:
    """Return the exponent for `_scale` where the condition holds, and 0 elsewhere."""
    return jnp.where(condition, jnp.int32(exponent), 0)


def _range_exponent(divisor: Array) -> Array:
    """Return the exponent by which the assembler scales a divisor into the unit's range: 24 for subnormals, -2 above 2^126."""
    large = ((divisor & MAGNITUDE) > FAR) & (_field(divisor) != 255)
    return _exponent_where(_is_subnormal(divisor), 24) + _exponent_where(large, -2)


# ---- the instructions


@compile_once(1)
def ex2(codes: Array, flush: bool = False) -> Array:
    """Compute 2^x as `ex2.approx.f32` does; f32 codes in and out.

    Args:
        codes: uint32 codes.
        flush: True for `.ftz`: subnormal operands and results are zeros.
    """
    if flush:
        return _mufu_ex2(codes)
    small = (codes > SIGN | _power_of_two(6) + 0x7C0000) & ~_is_nan(codes)  # below -126: half of it, and the square of the result
    result = _mufu_ex2(jnp.where(small, codes - (FRACTION + 1), codes))  # a field less; of -Inf it is -2^127, and both give 0
    return jnp.where(small, multiply_f32(result, result), result)


@compile_once(1)
def lg2(codes: Array, flush: bool = False) -> Array:
    """Compute log2(x) as `lg2.approx.f32` does; arguments as in `ex2`."""
    if flush:
        return _mufu_lg2(codes)
    small = _is_subnormal(codes)
    result = _mufu_lg2(_scale(codes, _exponent_where(small, 24)))
    # the logarithm of a scaled subnormal lies between -126 and -102 and has at most 17 bits behind the point
    return jnp.where(small & ~_is_nan(result) & ~_is_infinite(result), _subtract_24(result), result)


def _subtract_24(codes: Array) -> Array:
    """Subtract 24 from numbers in (-128, -101], rounded to nearest even."""
    significand = (codes & FRACTION) | (FRACTION + 1)  # units of 2^-17
    total = significand + np.uint32(24 << 17)
    large = total >> 24 != 0  # 128 or more: the last bit is rounded
    rounded = (total + ((total >> 1) & 1)) >> 1
    return SIGN | jnp.where(large, _power_of_two(7) | (rounded & FRACTION), _power_of_two(6) | (total & FRACTION))


@compile_once(1)
def rcp(codes: Array, flush: bool = False) -> Array:
    """Compute 1 / x as `rcp.approx.f32` does; arguments as in `ex2`."""
    if flush:
        return _mufu_rcp(codes)
    exponent = _range_exponent(codes)
    return _scale(_mufu_rcp(_scale(codes, exponent)), exponent)


@compile_once(1)
def rsqrt(codes: Array, flush: bool = False) -> Array:
    """Compute 1 / sqrt(x) as `rsqrt.approx.f32` does; arguments as in `ex2`."""
    if flush:
        return _mufu_rsqrt(codes)
    small = _is_subnormal(codes)
    return _scale(_mufu_rsqrt(_scale(codes, _exponent_where(small, 24))), _exponent_where(small, 12))


@compile_once(1)
def sqrt(codes: Array, flush: bool = False) -> Array:
    """Compute sqrt(x) as `sqrt.approx.f32` does; arguments as in `ex2`."""
    if flush:
        return _mufu_sqrt(codes)
    small = _is_subnormal(codes)
    return _scale(_mufu_sqrt(_scale(codes, _exponent_where(small, 24))), _exponent_where(small, -12))


@compile_once(1)
def sin(codes: Array, flush: bool = False) -> Array:
    """Compute sin(x) as `sin.approx.f32` does; arguments as in `ex2`."""
    return _mufu_sine(codes, 0, flush)


@compile_once(1)
def cos(codes: Array, flush: bool = False) -> Array:
    """Compute cos(x) as `cos.approx.f32` does; arguments as in `ex2`."""
    return _mufu_sine(codes, 1, flush)


@compile_once(2)
def divide_approx(a: Array, b: Array, flush: bool = False) -> Array:
    """Compute a / b as `div.approx.f32` does: a times the reciprocal of b, both scaled where b is subnormal.

    Args:
        a: uint32 codes.
        b: uint32 codes.
        flush: True for `.ftz`: subnormal operands and results are zeros, and nothing is scaled.
    """
    if flush:
        return multiply_f32(a, _mufu_rcp(b), flush=True)
    exponent = _exponent_where(_is_subnormal(b), 24)
    return multiply_f32(_mufu_rcp(_scale(b, exponent)), _scale(a, exponent))


@compile_once(2)
def divide_full(a: Array, b: Array, flush: bool = False) -> Array:
    """Compute a / b as `div.full.f32` does: as `divide_approx`, and both are scaled where |b| is above 2^126; arguments as there."""
    if flush:
        large = (b & MAGNITUDE) > FAR
        quarter = jnp.full_like(b, _power_of_two(-2))
        a, b = (jnp.where(large, multiply_f32(x, quarter, flush=True), x) for x in (a, b))
        return multiply_f32(_mufu_rcp(b), a, flush=True)
    exponent = _range_exponent(b)
    return multiply_f32(_mufu_rcp(_scale(b, exponent)), _scale(a, exponent))


@compile_once()
def tanh(codes: Array) -> Array:
    """Compute tanh x as `tanh.approx.f32` does, which has no `.ftz`; f32 codes, uint32, in and out."""
    return _mufu_tanh(codes)


def _f16_by_f32(function: Callable[[Array], Array], codes: Array) -> Array:
    """Return a function of f16 codes: the f32 result truncated, subnormals included."""
    dtype, codes = codes.dtype, codes.astype(jnp.uint32)
    fraction = codes & 0x3FF
    shift = (lax.clz(fraction) - 21) * ((codes & 0x7C00) == 0)  # that makes a subnormal's leading one its hidden bit
    field = ((codes >> 10) & 31).astype(jnp.int32) + 112 + jnp.where((codes & 0x7C00) == 0, 1 - shift.astype(jnp.int32), 0)
    wide = (field.astype(jnp.uint32) << FRACTION_BITS) | (((fraction << jnp.minimum(shift, 31)) & 0x3FF) << 13)
    size = codes & 0x7FFF
    wide = jnp.where(size == 0, 0, jnp.where(size >= 0x7C00, INFINITY | (fraction << 13), wide)) | ((codes >> 15) << 31)
    result = function(wide)
    exponent = _field(result) - 112
    significand = (result & FRACTION) | (FRACTION + 1)
    normal = (exponent.astype(jnp.uint32) << 10) | ((result & FRACTION) >> 13)
    small = significand >> jnp.clip(14 - exponent, 0, 31).astype(jnp.uint32)
    code = jnp.where(exponent > 30, 0x7C00, jnp.where(exponent < 1, small, normal)) | ((result >> 31) << 15)
    return jnp.where(_is_nan(result), 0x7FFF, code).astype(dtype)


def _bf16_by_f32(function: Callable[[Array], Array], codes: Array) -> Array:
    """Return a function of bf16 codes: the f32 result truncated."""
    return (function(codes.astype(jnp.uint32) << 16) >> 16).astype(codes.dtype)


@compile_once(0, 1)
def _narrow(name: str, fmt: str, codes: Array) -> Array:
    function = {"ex2": _mufu_ex2, "tanh": _mufu_tanh}[name]
    return _f16_by_f32(function, codes) if fmt == "f16" else _bf16_by_f32(function, codes)


# ---- the upper words of f64 seeds


def rcp_upper(words: Array) -> Array:
    """Compute the upper word of `rcp.approx.ftz.f64` from the operand's upper word; the lower word of the result is 0."""
    field, fraction = ((words >> 20) & 0x7FF).astype(jnp.int32), words & 0xFFFFF
    whole, root = _reciprocal_significand(fraction << 3)
    result = _assemble_upper(2 * 1023 - field - jnp.where(whole, 0, 1), root >> 3)
    result = jnp.where(field == 0, np.uint32(0x7FF00000), jnp.where(field == 0x7FF, np.uint32(0), result)) | (words & SIGN)
    return jnp.where((field == 0x7FF) & (fraction != 0), NAN, result)


def rsqrt_upper(words: Array) -> Array:
    """Compute the upper word of `rsqrt.approx.ftz.f64` from the operand's upper word; the lower word of the result is 0."""
    field, fraction = ((words >> 20) & 0x7FF).astype(jnp.int32), words & 0xFFFFF
    exponent = field - 1023
    exact, root = _reciprocal_root_fraction((exponent & 1).astype(jnp.uint32), fraction << 3)
    half = exponent >> 1
    result = jnp.where(exact, _assemble_upper(1023 - half, jnp.zeros_like(root)), _assemble_upper(1022 - half, root >> 3))
    result = jnp.where(field == 0x7FF, np.uint32(0), result)
    result = jnp.where(field == 0, np.uint32(0x7FF00000) | (words & SIGN), jnp.where(words >= SIGN, NAN, result))
    return jnp.where((field == 0x7FF) & (fraction != 0), NAN, result)


def _assemble_upper(field: Array, fraction: Array) -> Array:
    return jnp.where(field < 1, np.uint32(0), (field.astype(jnp.uint32) << 20) | fraction)


UNARY: dict[str, Callable[[Array, bool], Array]] = {
    "ex2": ex2, "lg2": lg2, "rcp": rcp, "rsqrt": rsqrt, "sqrt": sqrt, "sin": sin, "cos": cos,
}  # fmt: skip
# 2^x and tanh x as ex2.approx.f16, ex2.approx.ftz.bf16, tanh.approx.f16 and tanh.approx.bf16 compute them: the f32 result truncated,
# subnormals included. Codes, uint16 or uint32, in and out
NARROW: dict[tuple[str, str], Callable[[Array], Array]] = {
    (name, fmt): partial(_narrow, name, fmt) for name in ("ex2", "tanh") for fmt in ("f16", "bf16")
}
DIVISIONS: dict[str, Callable[[Array, Array, bool], Array]] = {"div.approx": divide_approx, "div.full": divide_full}
