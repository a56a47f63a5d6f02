"""Rule 8: Inf and NaN among the operands of a step.

Float addition has rule 8 itself. So where a step may have specials, they stand for themselves in f32 and everything else for a finite
number, and the f32 sum of the products tells what becomes of the step. It is used only where it is Inf or NaN.
"""

from __future__ import annotations

from functools import reduce
from operator import add

from tcemu.engine.arithmetic.step.decoding import SIGN, SPECIAL_EXPONENT, MarkedFactor, exponent_field, sign_bit, sign_mask, special_word
from tcemu.engine.arithmetic.step.values import V
from tcemu.engine.formats.number_formats import F32 as BINARY32
from tcemu.engine.formats.number_formats import Format

MAGNITUDE = ~SIGN  # of a word
INFINITY = BINARY32.infinity


def special_value(fmt: Format, code: V) -> V:
    """f32: Inf and NaN of a result themselves, and 0 for numbers."""
    special = exponent_field(fmt, code) == (1 << fmt.exponent_bits) - 1
    infinite = code & ((1 << fmt.mantissa_bits) - 1) == 0
    word = special_word(infinite) | (sign_mask(fmt, code) & SIGN)
    return special.select(word, 0).as_float()


def factor_class(special: V, infinite: V, zero: V, negative: V | None) -> V:
    """f32: Inf and NaN themselves, 0 for a zero, 1 and -1 for other numbers, so that no sum of finite products becomes Inf."""
    one = 127 << BINARY32.mantissa_bits
    word = special.select(special_word(infinite), zero.select(0, special_word(infinite).constant(one)))
    return (word if negative is None else word | (negative & SIGN)).as_float()


def marked_class(x: MarkedFactor[V]) -> V:
    """The same of a factor in integers."""
    special, zero = x.exponent == SPECIAL_EXPONENT, x.significand == 0
    return factor_class(special, ~zero, zero, x.significand.shift_right_signed(31))


def add_specials(code: V, products: list[V]) -> V:
    """The f32 sum of products in which Inf and NaN stand for themselves, and of an f32 accumulator that is Inf or NaN."""
    return own_special(code) + sum_products(products)


def sum_products(products: list[V]) -> V:
    """The f32 sum of products in which Inf and NaN stand for themselves."""
    while len(products) > 1:
        products = [reduce(add, products[at : at + 2]) for at in range(0, len(products), 2)]
    return products[0]


def own_special(code: V) -> V:
    """An f32 accumulator that is Inf or NaN, else 0."""
    return ((code & INFINITY) == INFINITY).select(code, 0).as_float()


def is_special(total: V) -> V:
    """Whether an f32 sum is Inf or NaN."""
    return total.bits() & MAGNITUDE >= INFINITY


def special_code(total: V, nan: int) -> V:
    """The f32 code of a sum that is Inf or NaN."""
    return (total == total).select(total.bits(), nan)


def canonical_code(fmt: Format, code: V) -> V:
    """The code of a result, where every NaN is the canonical one."""
    return ((code & (sign_bit(fmt) - 1 & MAGNITUDE)) > fmt.infinity).select(fmt.nan, code)


def code_of_class(fmt: Format, total: V, otherwise: V) -> V:
    """The code, in a result's format, of an f32 sum that is Inf or NaN; else another code."""
    word = total.bits()
    size, negative = word & MAGNITUDE, word.shift_right_signed(31)
    code = (size == INFINITY).select((negative & sign_bit(fmt)) | fmt.infinity, otherwise)
    return (size > INFINITY).select(fmt.nan, code)
