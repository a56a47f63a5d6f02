"""Steps of any numbers: rules 3 to 7 with subnormal results, overflow, every rounding and every result.

Terms are aligned in one of two ways. `align_integer` shifts significands, in any rounding. `align_fraction` multiplies the product of two
fractions by a power of two of its own and truncates by conversion; with `round_product` before the conversion it has the other roundings.
"""

from __future__ import annotations

from tcemu.arithmetic.step.decoding import BIAS, FRACTION, SIGN, ZERO_EXPONENT, decode_accumulator
from tcemu.arithmetic.step.rounding import encode, round_integer, with_sign
from tcemu.arithmetic.step.specials import code_of_class, special_value
from tcemu.arithmetic.step.values import I32, Lane, Value
from tcemu.formats import F32 as BINARY32
from tcemu.formats import Format

TINY = (BIAS - 30) << FRACTION  # the code of 2^-30


def power_of_two(exponent: Value) -> Value:
    """f32 2^exponent, made of its bits; 0 below the normal range. exponent: i32, at most 127."""
    return ((exponent + BIAS).max(0) << FRACTION).as_float()


# ---- rules 3 to 5


def align_integer(size: Value, sign: Value, stored: int, distance: Value, fraction_bits: int, alignment: str | Value, lane: Lane) -> Value:
    """A term in units of the step, with its sign.

    Args:
        size: Its significand, without sign.
        sign: -1 or 0.
        stored: Fraction bits of the significand.
        distance: Binades below the exponent that the step aligns to, i32, not negative.
        fraction_bits: Of the model.
        alignment: The rounding of the term.
        lane: Type of the result, which has room for the term.
    """
    size, negative = size.resize(lane, signed=False) << max(fraction_bits - stored, 0), sign.resize(lane)
    drop = (distance + max(stored - fraction_bits, 0)).min(lane.bits - 1).resize(lane)
    return with_sign(round_integer(size, drop, negative, alignment), negative)


def align_fraction(fraction: Value, exponent: Value, offset: Value) -> Value:
    """A term, truncated, in units of the step: i32.

    A power below the normal range becomes 0, as the term is then truncated to 0.

    Args:
        fraction: f32, below 4: the term / 2^exponent.
        exponent: i32, at most the one that the step aligns to.
        offset: fraction_bits - that exponent + the bias of f32.
    """
    power = (exponent + offset).max(0) << FRACTION
    return (fraction * power.as_float()).to_integer()


def round_product(aligned: Value, product: Value, alignment: str) -> Value:
    """An aligned product, f32, ready to be truncated to the integer to which it is rounded. One that underflowed is not zero."""
    if alignment == "RZ":
        return aligned
    if alignment != "RN":
        tiny = ((aligned.bits() & ~SIGN) < TINY) & (product != 0.0)
        aligned = tiny.select((product.bits() & SIGN) | TINY, aligned.bits()).as_float()
    return aligned.to_integral(alignment)


def own_fraction(code: Value) -> tuple[Value, Value, Value]:
    """An f32 accumulator as (fraction, exponent, special): what `align_fraction` takes, and whether it is Inf or NaN."""
    magnitude = code & ~SIGN
    field = magnitude >> FRACTION
    subnormal = field == 0
    takes_part = (magnitude != 0) & (field != 0xFF)
    exponent = takes_part.select(subnormal.select(1, field) - BIAS, ZERO_EXPONENT)
    tiny = magnitude.to_float(signed=False) * 2.0**-FRACTION
    fraction = subnormal.select(tiny.bits(), (code & (1 << FRACTION) - 1) | (BIAS << FRACTION)) | (code & SIGN)
    return fraction.as_float(), exponent, field == 0xFF


def add_jammed(x: Value, y: Value, unit: Value) -> tuple[Value, Value]:
    """x + y in units 2^unit, i32, and the unit: a sum that does not fit is halved, with a sticky last bit."""
    total = x + y
    wraps = ((x ^ total) & (y ^ total)) < 0
    half = x.shift_right_signed(1) + y.shift_right_signed(1) + (x & y & 1)
    return wraps.select(half | ((x ^ y) & 1), total), unit + wraps.resize(I32, signed=False)


# ---- sums outside a step


def add_codes(fmt: Format, x: Value, y: Value) -> Value:
    """x + y of codes of f16 or f32, rounded RN once. They are not both -0. Floats keep subnormals here."""
    if fmt == BINARY32:
        total = x.as_float() + y.as_float()
        return (total == total).select(total.bits(), fmt.nan)
    left, right = decode_accumulator(fmt, x), decode_accumulator(fmt, y)
    top = left.exponent.max(right.exponent)
    spare = 29 - fmt.mantissa_bits  # bits below a significand: a guard bit and a sticky bit at least
    total = x.constant(0)
    for v in (left, right):
        far = (top - v.exponent).min(31)
        size = v.significand << spare
        kept = size >> far
        kept = kept | (size != kept << far).resize(I32, signed=False)
        total = total + with_sign(kept, v.negative)
    code = encode(fmt, total, top - (fmt.mantissa_bits + spare), "RN", fmt.mantissa_bits)
    return code_of_class(fmt, special_value(fmt, x) + special_value(fmt, y), code)


def convert_code(source: Format, target: Format, code: Value) -> Value:
    """The code in another of f16 and f32, rounded RN. A zero keeps its sign."""
    v = decode_accumulator(source, code)
    total = with_sign(v.significand, v.negative)
    rounding = "RZ" if target.mantissa_bits >= source.mantissa_bits else "RN"  # to more bits it is exact
    other = encode(target, total, v.exponent - source.mantissa_bits, rounding, target.mantissa_bits)
    other = other | (v.negative & (SIGN if target.bits == 32 else 1 << (target.bits - 1)))
    return v.special.select(code_of_class(target, special_value(source, code), other), other)
