"""Codes of the number formats, taken apart: rules 1 and 2 of a step.

A code comes as i32, and bits above the format's width mean nothing. Exponents count as rule 2 does: a subnormal has the exponent of the
smallest normal number.
"""

from __future__ import annotations

from typing import Generic, NamedTuple

from tcemu.engine.arithmetic.step.values import I32, V
from tcemu.engine.formats.number_formats import F32 as BINARY32
from tcemu.engine.formats.number_formats import Format

BIAS, FRACTION = BINARY32.bias, BINARY32.mantissa_bits
SIGN = -(1 << 31)  # the sign bit of a word, as a signed integer
ZERO_EXPONENT = -(1 << 18)  # exponent of a term that takes no part in the alignment
SPECIAL_EXPONENT = 1 << 20  # exponent of Inf and NaN, where it is marked in the exponent


class Decoded(NamedTuple, Generic[V]):
    """A code taken apart: i32, and conditions."""

    magnitude: V  # the code without sign, and without unused bits
    negative: V | None  # -1 or 0; None: the format has no sign
    exponent: V  # with the bias of f32
    special: V | None  # Inf or NaN; None: the format has neither
    infinite: V | None
    zero: V


class Factor(NamedTuple, Generic[V]):
    """A factor that may be any code."""

    fraction: V  # f32, the value / 2^exponent; Inf and NaN themselves
    exponent: V  # ZERO_EXPONENT for zero, Inf and NaN
    special: V  # condition: Inf or NaN


def decode(fmt: Format, code: V) -> Decoded[V]:
    """Takes a code apart. The exponent of Inf, NaN and a zero without sign (fnuz) means nothing."""
    unsigned = code & ((1 << (fmt.bits - fmt.signed)) - 1 & ~((1 << fmt.unused_bits) - 1))
    negative = sign_mask(fmt, code) if fmt.signed else None
    field = unsigned >> (fmt.mantissa_bits + fmt.unused_bits)
    exponent = field + (BIAS - fmt.bias)
    if fmt.subnormals:
        exponent = (field == 0).select(BIAS + fmt.min_exponent, exponent)
    special = infinite = None
    zero = unsigned == 0 if fmt.subnormals else code.never()
    if fmt.specials == "ieee":
        special = field == (1 << fmt.exponent_bits) - 1
        infinite = unsigned == fmt.infinity << fmt.unused_bits
    elif fmt.specials == "nan":
        special = unsigned == fmt.nan
    elif fmt.specials == "fnuz":
        special = (code & ((1 << fmt.bits) - 1)) == fmt.nan
        zero = zero & ~special
    return Decoded(unsigned, negative, exponent, special, infinite, zero)


def sign_mask(fmt: Format, code: V) -> V:
    """-1 for negative codes, else 0."""
    return (code << (32 - fmt.bits)).shift_right_signed(31)


def sign_bit(fmt: Format) -> int:
    """The sign bit of a format's codes, as a signed integer of 32 bits."""
    return SIGN if fmt.bits == 32 else 1 << (fmt.bits - 1)


def exponent_field(fmt: Format, code: V) -> V:
    return (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)


def value_word(fmt: Format, x: Decoded[V]) -> V:
    """The bits of |value| as an f32, right where it is a number and zero or a normal f32."""
    stored = fmt.mantissa_bits + fmt.unused_bits
    word = x.magnitude << (FRACTION - stored) if stored <= FRACTION else x.magnitude
    if fmt.bias == BIAS and fmt.exponent_bits == BINARY32.exponent_bits:
        return word
    word = word + ((BIAS - fmt.bias) << FRACTION)
    if not fmt.subnormals:
        return word
    tiny = x.magnitude.to_float(signed=False) * 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    return (x.magnitude < 1 << stored).select(tiny.bits(), word)


def significand(fmt: Format, x: Decoded[V]) -> V:
    """The integer significand, without sign."""
    fraction = x.magnitude >> fmt.unused_bits
    stored = fraction & ((1 << fmt.mantissa_bits) - 1)
    if not fmt.subnormals:
        return stored | (1 << fmt.mantissa_bits)
    return (fraction < 1 << fmt.mantissa_bits).select(stored, stored | (1 << fmt.mantissa_bits))


def fraction_bits(fmt: Format, x: Decoded[V]) -> V:
    """The bits of |value| / 2^exponent as an f32: 0, or a number below 2, normal in f32."""
    stored = x.magnitude >> fmt.unused_bits
    fraction = stored & ((1 << fmt.mantissa_bits) - 1)
    word = fraction << (FRACTION - fmt.mantissa_bits) | (BIAS << FRACTION)
    if not fmt.subnormals:
        return word
    tiny = stored.to_float(signed=False) * 2.0**-fmt.mantissa_bits
    return (stored < 1 << fmt.mantissa_bits).select(tiny.bits(), word)


def decode_factor(fmt: Format, codes: V, scales: V | None = None) -> Factor[V]:
    """Decodes a factor that may be any code. scales: codes of ue8m0, which are powers of two."""
    x = decode(fmt, codes)
    special = codes.never() if x.special is None else x.special
    infinite = codes.never() if x.infinite is None else x.infinite
    if scales is not None:
        special, infinite = special | (scales == 0xFF), infinite & (scales != 0xFF)
    word = special.select(special_word(infinite), x.zero.select(0, fraction_bits(fmt, x)))
    exponent = x.exponent - BIAS if scales is None else x.exponent + scales - 2 * BIAS
    return Factor(with_sign_bit(word, x.negative).as_float(), (x.zero | special).select(ZERO_EXPONENT, exponent), special)


def special_word(infinite: V) -> V:
    """The bits of an f32 Inf where the condition holds, else those of the NaN."""
    return infinite.select(infinite.constant(BINARY32.infinity, I32), BINARY32.nan)


def with_sign_bit(word: V, negative: V | None) -> V:
    """The f32 bits with the sign of a mask, -1 or 0; None: without."""
    return word if negative is None else word | (negative & SIGN)


class Accumulator(NamedTuple, Generic[V]):
    """A code of a result taken apart, as rule 2 counts: i32."""

    code: V  # with the canonical NaN
    significand: V  # without sign; 0 for Inf and NaN
    negative: V  # -1 or 0
    exponent: V  # ZERO_EXPONENT for what takes no part in the alignment
    special: V  # condition: Inf or NaN


def decode_accumulator(fmt: Format, code: V) -> Accumulator[V]:
    """Takes a code of f16 or f32 apart."""
    field, fraction = exponent_field(fmt, code), code & ((1 << fmt.mantissa_bits) - 1)
    special = field == (1 << fmt.exponent_bits) - 1
    size = special.select(0, (field == 0).select(fraction, fraction | (1 << fmt.mantissa_bits)))
    exponent = (field == 0).select(1, field) - fmt.bias
    code = (special & (fraction != 0)).select(fmt.nan, code)
    return Accumulator(code, size, sign_mask(fmt, code), (size == 0).select(ZERO_EXPONENT, exponent), special)


# ---- factors in integers


class MarkedFactor(NamedTuple, Generic[V]):
    """A factor in integers, with its specials marked in the exponent: i32."""

    significand: V  # in units of the last place, with the sign where the factor has one; 1 for Inf, 0 for NaN
    exponent: V  # ZERO_EXPONENT for zero, SPECIAL_EXPONENT for Inf and NaN


def mark_magnitude(fmt: Format, code: V) -> MarkedFactor[V]:
    """Takes a code apart, without its sign."""
    x = decode(fmt, code)
    size, exponent = significand(fmt, x), x.zero.select(ZERO_EXPONENT, x.exponent - BIAS)
    if x.special is not None:
        infinite = 0 if x.infinite is None else x.infinite.resize(I32, signed=False)
        size, exponent = x.special.select(infinite, size), x.special.select(SPECIAL_EXPONENT, exponent)
    return MarkedFactor(size, exponent)


def mark_factor(fmt: Format, code: V) -> MarkedFactor[V]:
    """Takes a code apart, with its sign."""
    size, exponent = mark_magnitude(fmt, code)
    if not fmt.signed:
        return MarkedFactor(size, exponent)
    negative = sign_mask(fmt, code)
    return MarkedFactor((size ^ negative) - negative, exponent)


def convert_magnitude(source: Format, target: Format, x: MarkedFactor[V]) -> MarkedFactor[V]:
    """A magnitude in a format that holds all numbers of the source: what is subnormal in the source may be normal there."""
    leading = 31 - x.significand.leading_zeros()
    exponent = (x.exponent - source.mantissa_bits + leading).max(target.min_exponent)
    up = (x.exponent - source.mantissa_bits) - (exponent - target.mantissa_bits)
    size = (up >= 0).select(x.significand << (up & 31), x.significand >> ((0 - up) & 31))
    plain = (x.exponent != ZERO_EXPONENT) & (x.exponent != SPECIAL_EXPONENT)
    return MarkedFactor(plain.select(size, x.significand), plain.select(exponent, x.exponent))


def scale_factor(fmt: Format, scale: Format, summed: bool, x: MarkedFactor[V], code: V) -> MarkedFactor[V]:
    """A factor under its block scale.

    Where products are summed in groups, all factors of a group are integers, in units of 2^min_exponent and of the scale's last place, and
    have the scale's exponent: that is the group's, whatever its values are. Elsewhere scales are powers of two.

    Args:
        fmt: Of the factor.
        scale: Of the scale.
        summed: Products are summed in groups.
        x: The factor.
        code: The scale's code.
    """
    by = mark_factor(scale, code)
    plain = (x.exponent != ZERO_EXPONENT) & (x.exponent != SPECIAL_EXPONENT)
    if summed:
        size = (x.significand << ((x.exponent - fmt.min_exponent) & 31)) * by.significand
        size = plain.select(size, x.significand)
        exponent = plain.select(by.exponent, x.exponent)  # ZERO_EXPONENT with the size 0 where the scale is zero
    else:
        size, exponent = x.significand, plain.select(x.exponent + by.exponent, x.exponent)
    special = by.exponent == SPECIAL_EXPONENT
    return MarkedFactor(special.select(0, size), special.select(SPECIAL_EXPONENT, exponent))
