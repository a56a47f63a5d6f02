"""Factors kept as f32 beside their exponents, for formats whose products are exact in f32: `forms.keeps_floats`.

A product is multiplied by the power of two that makes it a number of units, below 2^30, and the conversion to an integer truncates it.
That is exact too; what f32 cannot hold of a number below one unit is truncated in any case. Where exponents may leave f32's, both factors
are moved first.

Exponents count from -`exponent_offset`, and a zero's is far below those of all other factors, so that a sum of two that are not zero is
greater than every other sum. The exponent of a step is kept where the upper word of an f64 has it.

f32 knows Inf and NaN as rule 8 has them. So where a step has any, the f32 sum of its products tells what becomes of it, when ones stand
for what is finite (`finite_as_one`).
"""

from __future__ import annotations

from typing import Generic, NamedTuple

from tcemu.engine.arithmetic.step.anchored import UPPER, upper_word
from tcemu.engine.arithmetic.step.decoding import (
    BIAS,
    FRACTION,
    SIGN,
    convert_magnitude,
    decode,
    decode_accumulator,
    mark_magnitude,
    special_word,
    value_word,
    with_sign_bit,
)
from tcemu.engine.arithmetic.step.forms import IntegerForm
from tcemu.engine.arithmetic.step.general import power_of_two
from tcemu.engine.arithmetic.step.specials import INFINITY, MAGNITUDE
from tcemu.engine.arithmetic.step.values import V
from tcemu.engine.formats.number_formats import F32 as BINARY32
from tcemu.engine.formats.number_formats import F64, Format

NOT_ZERO = 1 << 9  # what the exponent of a factor that is not zero has besides
NO_PRODUCT = -300  # the exponent of two factors that are not zero is above it, that of others below
FIELDS = (2 * F64.bias + 1) << UPPER
FAR_BELOW, FAR_ABOVE, MOVED = -64, 100, 64  # exponents of steps from which factors are moved; binades


class FloatFactor(NamedTuple, Generic[V]):
    word: V  # code of the f32
    exponent: V  # with `exponent_offset`; at most 0 for a zero


def exponent_offset(stored: Format) -> int:
    """What is added to the exponents of factors that are not zero."""
    return NOT_ZERO + (15 if stored.bits <= 8 else 1 - stored.min_exponent)  # of others, the fields of exponents are what they are


def keep_float(stored: Format, fmt: Format, code: V) -> FloatFactor[V]:
    """A code as a factor.

    Args:
        stored: Format of the code.
        fmt: Format in which it is multiplied, whose exponent counts.
        code: i32.
    """
    x = decode(stored, code)
    if stored.bits == BINARY32.bits and stored == fmt:  # the code is an f32's but for its unused bits
        field = x.magnitude >> FRACTION
        return FloatFactor(with_sign_bit(x.magnitude, x.negative), x.magnitude.min(1) * NOT_ZERO + field.max(1))
    word, other = value_word(stored, x), convert_magnitude(stored, fmt, mark_magnitude(stored, code))
    exponent = x.zero.select(0, other.exponent + exponent_offset(stored))
    if x.special is not None:
        infinite = x.zero.never() if x.infinite is None else x.infinite
        word = x.special.select(special_word(infinite), word)
        exponent = x.special.select(NOT_ZERO, exponent)
    return FloatFactor(with_sign_bit(word, x.negative), exponent)


def own_word(form: IntegerForm, code: V) -> V:
    """The exponent of an accumulator, where the upper word of an f64 has it; what lies below means nothing. 0 for a zero."""
    if form.products_are_normal and form.ends_in_f64:
        return upper_word(code.as_float().widen()) & MAGNITUDE
    own = decode_accumulator(form.result, code)
    return (own.significand == 0).select(0, (own.exponent + F64.bias) << UPPER)


def least_alignment(form: IntegerForm) -> int:
    """The least exponent that a step aligns to.

    As an f64, a subnormal f32 has an exponent of its own. It should have the least one, which is far below those of products.
    """
    floor = form.numbers.floor
    return max(floor, BINARY32.min_exponent) if form.products_are_normal and form.ends_in_f64 else floor


def align_word(form: IntegerForm, products: V, own: V) -> V:
    """Rule 3, on words. products: the max exponent of the products; own: the accumulator's."""
    return products.max(own).max((least_alignment(form) + F64.bias) << UPPER) & FIELDS


def scale_of_word(form: IntegerForm, word: V) -> V:
    """2^(fraction_bits - exponent), f32, of a word. Where it is no f32, this is anything: every product is 0, or factors are moved."""
    return (((form.numbers.fraction_bits + BIAS + F64.bias) << FRACTION) - (word << (FRACTION - UPPER))).as_float()


def is_far(form: IntegerForm, products: V, word: V) -> V:
    """Whether a step's factors are to be moved. products: see `align_word`, which gave `word`."""
    if form.products_are_normal:
        return word.never()
    low = (products > (NO_PRODUCT + F64.bias) << UPPER) & (word < (form.numbers.fraction_bits - 125 + F64.bias) << UPPER)
    return (products >= (126 + F64.bias) << UPPER) | low


class Moved(NamedTuple, Generic[V]):
    """What factors and products are multiplied by, where factors are moved: f32."""

    factor: V  # both
    product: V


def move(form: IntegerForm, word: V) -> Moved[V]:
    """How the factors of a step are moved.

    Below 2^-64 no factor of a product that is not zero reaches 2^62; above 2^100 what becomes too small is far below a unit. A factor
    whose product is zero may become Inf. Inf x 0 is a NaN, and a GPU converts a NaN to the integer 0.
    """
    top = (word >> UPPER) - F64.bias
    up = (top < FAR_BELOW).select(MOVED, (top > FAR_ABOVE).select(top.constant(-MOVED), 0))
    return Moved(power_of_two(up), power_of_two(form.numbers.fraction_bits - top - up * 2))


def finite_as_one(form: IntegerForm, word: V) -> V:
    """1 with its sign for a factor that is finite and not zero; the factor itself otherwise, or where finite products cannot overflow."""
    if form.products_are_normal:
        return word.as_float()
    size = word & MAGNITUDE
    itself = (size == 0) | (size >= INFINITY)
    return itself.select(word, (word & SIGN) | (BIAS << FRACTION)).as_float()
