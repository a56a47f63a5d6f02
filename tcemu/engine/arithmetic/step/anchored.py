"""The anchored step: sums that begin at a large power of two, so that a float addition truncates terms to the step's unit.

The anchor of a step of exponent E is M = 1.5 * 2^(E + up), f32 or f64: a float whose last place is the step's unit, 2^(E -
fraction_bits). What is added to M and stays in its binade is rounded to an integer number of units. `forms.anchored_form` sees to it that
a step's sum stays there: all terms together are below half a binade.

The exponent E is found by a product of matrices. Of the powers 2^(base e) of two factors, the sum of products lies between 2^(base E) and
2^(base E + base), so that its exponent field gives E, however it is rounded (`alignment_word`). Fields of exponents stand at their place
in a float's upper word: in all of an f32, and in the upper half of an f64.

Products are added to S, which begins at M, by one fused multiply-add rounded toward zero each. As S is positive, that adds a product
rounded DOWN. A negative product that is no integer number of units is then one unit too low. Exponents tell whether it is an integer:
those of the lowest bits of both factors reach the unit together. Bytes hold them, four to a word (`not_integers`), and the negative
products that are not integers are counted and added as units at the start (`begin_sum`). The step's result is S - M (`end_sum`).

So steps are exact for plain accumulators (`is_plain`), for max exponents of lines whose sum is at most `AnchoredForm.exponent_limit`,
and, where exponents are relative, from `least_tops` on and for products within NEAR binades of what both lines allow.

Products that are summed in groups are added exactly before, in f32, and each group's sum is truncated beside the anchor (`truncate`).

`end_in_f64` ends steps of other kinds in the same way: the accumulator is truncated beside an anchor in f64.
"""

from __future__ import annotations

from tcemu.engine.arithmetic.step.decoding import BIAS, FRACTION, SIGN, SPECIAL_EXPONENT, MarkedFactor, decode_accumulator
from tcemu.engine.arithmetic.step.forms import BYTE, NEAR, NO_TOP, REACH, REPEATS, AnchoredForm, IntegerForm
from tcemu.engine.arithmetic.step.specials import MAGNITUDE
from tcemu.engine.arithmetic.step.values import F32, F64, I32, I64, V
from tcemu.engine.formats.number_formats import BF16, Format
from tcemu.engine.formats.number_formats import F32 as BINARY32
from tcemu.engine.formats.number_formats import F64 as BINARY64

UPPER = BINARY64.mantissa_bits - 32  # where the exponent begins in the upper word of an f64
ONES = 0x01010101  # a one in each byte
BYTES = BYTE * ONES


# ---- words of floats


def upper_word(value: V) -> V:
    """The upper word of a float, i32: all of an f32."""
    return (value.bits() >> 32).resize(I32) if value.lane == F64 else value.bits()


def from_upper_word(wide: bool, word: V) -> V:
    """The float with this upper word and zeros below."""
    return (word.resize(I64) << 32).as_float() if wide else word.as_float()


def plus_units(wide: bool, word: V, units: V) -> V:
    """The float with this upper word, and some of its last places more. units: they fit its fraction."""
    return ((word.resize(I64) << 32) | units.resize(I64, signed=False)).as_float() if wide else (word + units).as_float()


# ---- what a step aligns to


def own_exponent(form: AnchoredForm, c: V) -> V:
    """An accumulator's exponent, at its place. A subnormal f16 has that of the least normal one, and as a float a smaller one."""
    word = upper_word(c) & MAGNITUDE
    if form.result == BINARY32:
        return word
    return (word == 0).select(word, word.max((form.result.min_exponent + form.bias) << form.field))


def base_of_lines(form: AnchoredForm, tops: V) -> V:
    """What is added to a sum of powers, so that it is the exponent of the anchor. tops: see `forms.AnchoredForm.relative`; else 0."""
    return tops + ((form.up + form.bias - form.offset) << form.field)


def alignment_word(form: AnchoredForm, powers: V, c: V, base: V, half: V) -> V:
    """The upper word of the anchor.

    Args:
        form: Of the step.
        powers: Bits of the sum of powers, f32.
        c: The accumulator, a float of the form's width.
        base: By `base_of_lines`.
        half: The bit of a half below an exponent field. Where a compiler does not know it, a mask and this bit are one instruction.
    """
    by_products = (powers >> (FRACTION - form.field + form.base.bit_length() - 1)) + base  # the field, divided by `base`
    both = by_products.max(own_exponent(form, c) + (form.up << form.field))
    if form.floor_counts:
        both = both.max((form.numbers.floor + form.up + form.bias) << form.field)
    return (both & form.fields) | half


def truncate(form: AnchoredForm, value: V, word: V) -> V:
    """A float truncated to units: rounded toward zero beside the anchor, or beside its negative. word: of the anchor."""
    anchor = from_upper_word(form.wide, word | (upper_word(value) & SIGN))
    return value.add_toward_zero(anchor) - anchor


# ---- the sum


def reach(form: AnchoredForm, word: V, base: V) -> V:
    """What is added to four sums of two bytes of lowest bits, so that BYTE is reached where the product's lowest bit reaches the unit."""
    n = form.numbers
    if form.relative:
        unit = ((word - base).shift_right_signed(form.field) + (2 * form.depth - form.offset - n.fraction_bits)).min(2 * form.depth + 1)
    else:
        unit = word.shift_right_signed(form.field) - (form.up + form.bias + n.fraction_bits + form.low_bits_begin)
    return (0 - unit * ONES) + BYTES


def not_integers(x_low: V, y_low: V, x_sign: V, y_sign: V, reach: V) -> V:
    """BYTE in each byte of a negative product that is no integer number of units, else 0.

    Args:
        x_low: Bytes of lowest bits of four factors.
        y_low: Of the other four.
        x_sign: Bytes of signs, BYTE or 0.
        y_sign: Of the other four.
        reach: By `reach`. No byte overflows.
    """
    return ~(x_low + y_low + reach) & (x_sign ^ y_sign)


def begin_sum(form: AnchoredForm, c: V, word: V, count: V) -> V:
    """The sum of a step before its products. count: BYTE times the negative products that are no integers."""
    return truncate(form, c, word) + plus_units(form.wide, word, count >> (BYTE.bit_length() - 1))


def add_product(total: V, x: V, y: V) -> V:
    """The sum with a product, rounded down to units."""
    return x.multiply_add(y, total, "RZ")


def end_sum(form: AnchoredForm, total: V, half: V) -> V:
    """The accumulator after a step."""
    anchor = from_upper_word(form.wide, (upper_word(total) & form.fields) | half)
    return round_kept(form, total - anchor, half)


def round_kept(form: AnchoredForm, total: V, half: V) -> V:
    """Rule 6, where a sum may have more bits than a result keeps. What is left is truncated by the next step, or by `result_code`."""
    n = form.numbers
    more = (BINARY64 if form.wide else BINARY32).mantissa_bits - n.kept
    if n.rounding == "RN":  # beside a float whose last place is the result's
        field = (upper_word(total) & form.fields).max((form.result.min_exponent + form.bias) << form.field)
        anchor = from_upper_word(form.wide, ((field + (more << form.field)) & form.fields) | half)
        return (total + anchor) - anchor
    if n.kept >= n.fraction_bits:
        return total
    return (total.bits() & ~((1 << more) - 1)).as_float()


# ---- sums of a tensor core


def begin_repeated(form: AnchoredForm, c: V, word: V, own_bits: int) -> V:
    """The anchor of the tensor core, plus the truncated accumulator REPEATS times: the sum before any product.

    Args:
        form: Of the step.
        c: The accumulator.
        word: Of the step's anchor.
        own_bits: See `forms.AnchoredForm.can_repeat_products`.
    """
    anchor = word.as_float() * 2.0 ** (own_bits - FRACTION)
    return truncate(form, c, word).multiply_add_exact(float(REPEATS), anchor)


def end_repeated(form: AnchoredForm, total: V, half: V) -> V:
    """The accumulator after a step. half: see `alignment_word`."""
    anchor = from_upper_word(False, (total.bits() & form.fields) | half)
    return round_kept(form, (total - anchor) * (1.0 / REPEATS), half)


# ---- accumulators


def result_float(form: AnchoredForm, c: V) -> V:
    """The accumulator as an f32. An f16 is exact, or too large and becomes Inf."""
    return c.narrow("RZ") if form.wide else c


def result_code(form: AnchoredForm, c: V) -> V:
    """The f32 code of a result.

    Where `round_kept` has truncated what a result does not keep, nothing is left to truncate, except in a C that no step has seen, which
    stays. Elsewhere what is truncated here lies below every unit of the next step.
    """
    n, word = form.numbers, result_float(form, c).bits()
    if n.kept >= n.fraction_bits:
        word = word & (-1 << (FRACTION - n.kept))
    return (c == c).select(word, BINARY32.nan)


def is_plain(form: AnchoredForm, code: V) -> V:
    """Whether anchored steps may go on from an accumulator's code: 0, or a multiple of the least unit and below 2^most."""
    c = decode_accumulator(form.result, code)
    lowest = 31 - (c.significand & (0 - c.significand)).leading_zeros()
    inside = (c.exponent < form.most) & (c.exponent + lowest >= form.least_unit + form.result.mantissa_bits)
    return ~c.special & ((c.significand == 0) | inside)


def is_small(form: AnchoredForm, word: V) -> V:
    """Whether an accumulator with this upper word, without sign, is below the numbers that become Inf."""
    return word < (form.result.max_exponent + 1 + form.bias) << form.field


# ---- prepared factors


def takes_part(x: MarkedFactor[V]) -> V:
    """Whether a factor is a number other than 0."""
    return (x.significand != 0) & (x.exponent != SPECIAL_EXPONENT)


def factor_unit(form: AnchoredForm, fmt: Format, x: MarkedFactor[V]) -> V:
    """The exponent of a significand's last place."""
    of_group = fmt.min_exponent - form.scale.mantissa_bits if form.numbers.summed else 0
    return x.exponent + (of_group - fmt.mantissa_bits)


def power_of_two(wide: bool, exponent: V) -> V:
    """2^exponent, a normal f32 or f64."""
    return from_upper_word(wide, (exponent + (BINARY64.bias if wide else BIAS)) << (UPPER if wide else FRACTION))


def factor_value(form: AnchoredForm, fmt: Format, x: MarkedFactor[V]) -> V:
    """A factor as a float; 0 for Inf and NaN."""
    part = takes_part(x)
    size = part.select(x.significand, 0).to_float(F64 if form.wide else F32)
    return size * power_of_two(form.wide, part.select(factor_unit(form, fmt, x), 0))


def factor_bf16(form: AnchoredForm, fmt: Format, x: MarkedFactor[V]) -> V:
    """The bf16 code of a factor: exact, or subnormal and exact. A group's scale has an exponent up to MOST_OF_SCALE."""
    part = takes_part(x)
    value = x.significand.to_float(F64) * power_of_two(True, part.select(factor_unit(form, fmt, x), 0))
    return part.select(value.narrow("RN").bits() >> (FRACTION - BF16.mantissa_bits), 0)


def lowest_bit(form: AnchoredForm, fmt: Format, x: MarkedFactor[V], top: V) -> V:
    """The byte of a factor's lowest bit. top: max exponent of its line in the step."""
    size = x.significand
    low = factor_unit(form, fmt, x) + (31 - (size & (0 - size)).leading_zeros())
    low = (low - top).max(-form.depth) + form.depth if form.relative else low - (fmt.min_exponent - fmt.mantissa_bits)
    return takes_part(x).select(low, form.absent)


def sign_byte(x: MarkedFactor[V]) -> V:
    return (takes_part(x) & (x.significand < 0)).select(x.significand.constant(BYTE), 0)


def is_near(x: MarkedFactor[V], top: V) -> V:
    """Whether a factor is near the max exponent of its line. All factors of a line of zeros are."""
    return (top == NO_TOP) | (takes_part(x) & (x.exponent >= top - NEAR // 2))


def exponent_power(form: AnchoredForm, x: MarkedFactor[V], top: V, power_of_one: int) -> V:
    """The bf16 code of the power of a factor. Of a line of zeros, all powers are those of its max exponent, NO_TOP."""
    part, up = takes_part(x), x.exponent
    if form.relative:
        up = x.exponent - top
        part = part & (up >= -REACH)
    word = part.select((up * form.base + (power_of_one + BIAS)) << BF16.mantissa_bits, 0)
    return (top == NO_TOP).select((power_of_one + BIAS) << BF16.mantissa_bits, word) if form.relative else word


# ---- the end of other steps


def end_in_f64(form: IntegerForm, total: V, code: V, word: V) -> V:
    """Rules 4 to 7 for an f32 accumulator and the sum of the products: the f32 code of the result.

    Args:
        form: Of the step. `ends_in_f64`.
        total: The sum in units, i32 or i64.
        code: Of the accumulator; 0 for none.
        word: The exponent that terms were aligned to, where the upper word of an f64 has it.
    """
    n = form.numbers
    own, unit = code.as_float().widen(), from_upper_word(True, word - (n.fraction_bits << UPPER))
    above = ((BINARY64.mantissa_bits - n.fraction_bits) << UPPER) + (1 << (UPPER - 1))
    anchor = from_upper_word(True, (word + above) | (code & SIGN))
    total = total.to_float(F64).multiply_add(unit, own.add_toward_zero(anchor) - anchor)
    high = upper_word(total)
    result = total.narrow(n.rounding).bits() & (-1 << (FRACTION - n.kept))
    too_large = (high & MAGNITUDE) >= (BINARY32.max_exponent + 1 + BINARY64.bias) << UPPER
    result = too_large.select((high & SIGN) | BINARY32.infinity, result)
    return (result << 1 == 0).select(0, result)
