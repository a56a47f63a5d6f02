"""A quantiser's arithmetic: numbers of a format as f32, and f32 numbers rounded to the nearest number of a format."""

from __future__ import annotations

from tcemu.engine.arithmetic.step.decoding import BIAS, FRACTION, decode, value_word, with_sign_bit
from tcemu.engine.arithmetic.step.specials import MAGNITUDE
from tcemu.engine.arithmetic.step.values import V
from tcemu.engine.formats.coding import nan_code
from tcemu.engine.formats.number_formats import F32 as BINARY32
from tcemu.engine.formats.number_formats import Format


def decode_number(source: Format, codes: V) -> V:
    """The f32 value of codes, i32, of a format whose numbers f32 can represent. A NaN keeps no particular fraction."""
    if source == BINARY32:
        return codes.as_float()
    if source.bias == BIAS and not source.unused_bits:
        return (codes << (BINARY32.bits - source.bits)).as_float()
    x = decode(source, codes)
    word = value_word(source, x)
    if x.special is not None:
        word = x.special.select(word | BINARY32.infinity, word)
    return with_sign_bit(word, x.negative).as_float()


def decode_scale(scale: Format, codes: V) -> V:
    """The f32 value of codes of scales, i32, in f32 or ue8m0. 2^-127 is subnormal."""
    if scale == BINARY32:
        return codes.as_float()
    word = (codes == 0).select(1 << (FRACTION - 1), codes << FRACTION)
    return (codes == scale.nan).select(BINARY32.nan, word).as_float()


def round_value(target: Format, saturate: bool, value: V) -> V:
    """The codes, i32, of the numbers of the target that are nearest to f32 values: see `tcemu.engine.formats.coding.round_from_f32`."""
    word = value.bits()
    magnitude = word & MAGNITUDE
    is_nan = magnitude > BINARY32.infinity
    if target == BINARY32:
        return is_nan.select(BINARY32.nan, word)
    drop = FRACTION - target.mantissa_bits
    code = (magnitude + ((1 << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop
    if target.bias != BIAS:
        code = code - ((BIAS - target.bias) << target.mantissa_bits)
        # f32 numbers from 2^e to 2^(e + 1) are multiples of the target's smallest number, so that adding 2^e rounds to such
        e = target.min_exponent - target.mantissa_bits + FRACTION
        small = (magnitude.as_float() + 2.0**e).bits() - ((e + BIAS) << FRACTION)
        code = (magnitude < (target.min_exponent + BIAS) << FRACTION).select(small, code)
    limit = target.max_magnitude + (target.specials != "none" and not saturate)  # Inf or NaN follows the largest number
    sign = (word >> (BINARY32.bits - target.bits)) & (1 << (target.bits - 1))
    return is_nan.select(nan_code(target), (code.min(limit) << target.unused_bits) | sign)


def round_scale(magnitude: V, largest: int, least: int, power_of_two: bool) -> V:
    """The f32 code of the scale of a max magnitude, a code too.

    Args:
        magnitude: f32 code of the max magnitude, not negative.
        largest: f32 code of the number that the max magnitude becomes.
        least: f32 code of the least scale.
        power_of_two: The scale is rounded up to a power of two.
    """
    quotient = magnitude.as_float() / magnitude.constant(largest).as_float()
    code = (quotient == quotient).select(quotient.bits(), BINARY32.nan)  # a NaN may have either sign
    scale = (code > least).select(code, least)
    if power_of_two:
        below = (1 << FRACTION) - 1
        scale = (scale < BINARY32.infinity).select((scale + below) & ~below, scale)
    return (magnitude == 0).select(BIAS << FRACTION, scale)
