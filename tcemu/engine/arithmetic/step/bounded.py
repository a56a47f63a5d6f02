"""The bounded step: rules 3 to 6 in half the operations, where no value comes near the limits of f32.

`forms` states what bounded operands are. Then the step needs no rule 7 or 8 and no subnormal result, for these reasons:

- Every factor and every product is zero or a normal f32, so values are multiplied as they are. The unit of a step,
  2^(max_exponent - fraction_bits), and its inverse are normal f32 too.
- Every accumulator after the first nonzero product is a multiple of 2^(least - fraction_bits), which is at least 2^-126. So it is zero or
  a normal f32. It is kept as an f32 and aligned like a product: a multiplication by a power of two, and a conversion that truncates.
- A step without nonzero products may align to `least` instead of the accumulator's lower exponent: such an accumulator is a multiple of
  the unit of `least`, so nothing is truncated. Hence a zero factor only needs an exponent that keeps every sum with it at or below `least`.
- The sum of the products fits an i32, or each half of them does, and so does the aligned accumulator.
- Truncated sums are no larger than exact ones: |C| + K * 2^(2 + the largest exponent of a product) bounds every accumulator.

Narrow formats (f16 and below, without scales) are bounded but for Inf, NaN and the accumulators that `select_unreached` replaces.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Generic, NamedTuple

from tcemu.engine.arithmetic.step.decoding import BIAS, FRACTION, SIGN
from tcemu.engine.arithmetic.step.rounding import Magnitude, add_two, add_wide, cut, take_sign
from tcemu.engine.arithmetic.step.values import V
from tcemu.engine.formats.number_formats import F32 as BINARY32


class Alignment(NamedTuple, Generic[V]):
    """What a bounded step aligns to."""

    unit: V  # code of the f32 2^(max_exponent - fraction_bits), of which aligned terms are multiples
    scale: V  # 1 / unit, f32


def exponent_field(code: V) -> V:
    """The exponent field of an f32 code: its exponent with the bias, 0 for zero and subnormal numbers."""
    return (code >> FRACTION) & 0xFF


def align(top: V, code: V, least: int | None, fraction_bits: int) -> Alignment[V]:
    """Rule 3. All exponents have the bias of f32.

    Args:
        top: Max exponent of the products, i32.
        code: The accumulator's f32 code.
        least: The least exponent that a step aligns to; None: `top` is no less.
        fraction_bits: Of the model.
    """
    top = top.max(exponent_field(code))
    if least is not None:
        top = top.max(least)
    unit = (top - fraction_bits) << FRACTION
    return Alignment(unit, (((2 * BIAS) << FRACTION) - unit).as_float())


# ---- rules 4 and 5


def truncate_by_conversion(product: V, scale: V) -> V:
    """A term, truncated to an integer multiple of the unit: i32."""
    return (product * scale).to_integer()


def add_terms(terms: list[V], sums: int) -> list[V]:
    """The sum of i32 terms, in one or two sums that fit an i32 each."""
    if sums == 1:
        return [reduce(add, terms)]
    half = -(-len(terms) // 2)
    return [reduce(add, terms[:half]), reduce(add, terms[half:])]


def truncate_by_addition(x: V, y: V, sign: V, unit: V, fraction_bits: int, spare_bits: int) -> V:
    """A product truncated without a conversion: its magnitude as i32 with `spare_bits` zeros below the unit, complemented where negative.

    A product, in units of the step, is below 2^(fraction_bits + 2). Added to 2^(fraction_bits + 2), its magnitude v stands in the fraction
    of an f32, in fixed point with `spare_bits` bits below the integer part. From 1/2 on, v is a multiple of 2^-spare_bits, because its
    significand has no more bits than that, and the addition is exact. Below 1/2 the sum is rounded to 1/2 at most. So the upper bits of the
    fraction are v truncated, whether or not the multiplication is contracted into the addition.

    Args:
        x: Magnitude of a factor, f32.
        y: Magnitude of the other one.
        sign: -1 where the product is negative, else 0.
        unit: Code of the step's unit.
        fraction_bits: Of the model.
        spare_bits: Bits of an f32's fraction below the integer part of an aligned product.
    """
    integer = ((1 << FRACTION) - 1) & ~((1 << spare_bits) - 1)
    return (x.multiply_add_exact(y, anchor(unit, fraction_bits)).bits() & integer) ^ sign


def anchor(unit: V, fraction_bits: int) -> V:
    """2^(fraction_bits + 2) units, f32."""
    return (unit + ((fraction_bits + 2) << FRACTION)).as_float()


def sum_complements(terms: list[V], spare_bits: int) -> V:
    """The sum of terms from `truncate_by_addition`, i32.

    A negative term is subtracted as its complement, which is less by 1 than the negative. There are fewer products than 2^spare_bits, so
    that the shift that rounds up restores the sum.
    """
    return (reduce(add, terms) + ((1 << spare_bits) - 1)).shift_right_signed(spare_bits)


def float_sum_start(unit: V) -> V:
    """Where the sums of `add_truncated` begin: 2^FRACTION units, f32. Its last place is the unit while it is below twice that."""
    return (unit + (FRACTION << FRACTION)).as_float()


def add_truncated(total: V, x: V, y: V) -> V:
    """A sum of floats that began at `float_sum_start`, and a product that is not negative: the product is truncated to the unit."""
    return x.multiply_add(y, total, "RZ")


def float_sums_difference(positive: V, negative: V) -> V:
    """The sum of a step's products, i32, from the float sums of the positive and of the negative ones."""
    return positive.bits() - negative.bits()


# ---- rule 6


def add_addends(addends: list[V], fits: bool) -> Magnitude[V]:
    """The sum of i32 addends. fits: it is an i32."""
    if fits:
        return take_sign(reduce(add, addends))
    return add_two(*addends) if len(addends) == 2 else add_wide(addends)


def round_sum(addends: list[V], unit: V, fits: bool, kept: int) -> V:
    """The f32 code of the sum of the addends, truncated to `kept` fraction bits. unit: code of the step's unit; fits: the sum is an i32."""
    if fits and len(addends) == 2:
        total = reduce(add, addends)
        return cut((total.to_float(toward_zero=True) * unit.as_float()).bits(), kept)
    total = add_addends(addends, fits)
    unit = unit if total.up is None else unit + (total.up << FRACTION)
    code = (total.size.to_float(signed=False, toward_zero=True) * unit.as_float()).bits()
    return cut(code | (total.negative & SIGN), kept)


# ---- narrow formats: the accumulators that no bounded step takes


def usable_accumulator(code: V, most: int) -> V:
    """The accumulator of a bounded step of narrow formats, or 0 in place of one above 2^most, which `select_unreached` keeps.

    A small one stays: where products cancel, it is what is left of it that the step returns. It does not decide the alignment.
    """
    return (exponent_field(code) <= most + BIAS).select(code, 0)


def truncated_accumulator(code: V, fraction_bits: int, kept: int) -> V:
    """What a step returns that has no product but zeros, or whose products are all truncated to zero beside the accumulator."""
    start = code & (-1 << (FRACTION - min(fraction_bits, kept, FRACTION)))
    return (start << 1 == 0).select(0, start)


def select_unreached(code: V, word: V, has_product: V, most: int, fraction_bits: int, kept: int, nan: int | None) -> V:
    """The result of a bounded step, or the accumulator, truncated, where no product reaches it.

    Args:
        code: The accumulator before the step.
        word: The result of the bounded step.
        has_product: Condition: a product is not zero.
        most: Exponent of the largest accumulator of a bounded step.
        fraction_bits: Of the model.
        kept: Fraction bits of the result.
        nan: The code of every NaN; None: what becomes of an accumulator that is NaN is decided elsewhere.
    """
    start = truncated_accumulator(code, fraction_bits, kept)
    if nan is not None:
        start = (code & ~SIGN > BINARY32.infinity).select(nan, start)
    return (has_product & (exponent_field(code) <= most + BIAS)).select(word, start)
