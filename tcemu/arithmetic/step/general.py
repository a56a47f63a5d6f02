"""Steps of any numbers: rules 3 to 7 with subnormal results, overflow, every rounding and every result.

Terms are aligned in one of two ways. `align_integer` shifts significands, in any rounding. `align_fraction` multiplies the product of two
fractions by a power of two of its own and truncates by conversion; with `round_product` before the conversion it has the other roundings.
"""

from __future__ import annotations

from tcemu.arithmetic.step.decoding import BIAS, FRACTION, SIGN, ZERO_EXPONENT, decode_accumulator
from tcemu.arithmetic.step.forms import IntegerForm
from tcemu.arithmetic.step.quantizing import decode_number
from tcemu.arithmetic.step.rounding import Magnitude, encode, encode_magnitude, round_integer, take_sign, with_sign
from tcemu.arithmetic.step.specials import canonical_code, code_of_class, special_value
from tcemu.arithmetic.step.values import I32, I64, Lane, Value
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


def align_signed(term: Value, stored: int, distance: Value, fraction_bits: int, alignment: str, lane: Lane) -> Value:
    """`align_integer` of a signed term."""
    sign, size, _ = take_sign(term)
    return align_integer(size, sign, stored, distance, fraction_bits, alignment, lane)


def truncate_product(x: Value, y: Value, sign: Value, drop: Value) -> Value:
    """A term of an i32: the product of two magnitudes, below 2^32, truncated, with its sign.

    Args:
        x: Magnitude of a factor, in units of the step where that takes a shift to the left.
        y: Magnitude of the other one.
        sign: 1 or -1.
        drop: Bits below the unit, not negative.
    """
    return (x * y).shift_right_any(drop) * sign


def align_accumulator(fmt: Format, code: Value, top: Value, fraction_bits: int, alignment: str, lane: Lane) -> Value:
    """The accumulator, f16 or f32, in units of the step, with its sign. top: the exponent that the step aligns to."""
    own = decode_accumulator(fmt, code)
    return align_integer(own.significand, own.negative, fmt.mantissa_bits, top - own.exponent, fraction_bits, alignment, lane)


def end_step(form: IntegerForm, total: Value, code: Value, top: Value) -> Value:
    """Rules 4 to 7 for the accumulator and the sum of the products: the code of a result.

    Args:
        form: Of the step.
        total: The sum of products in units, i64.
        code: Of the accumulator; 0 for none.
        top: The exponent that the step aligns to, i32.
    """
    n = form.numbers
    lane = I32 if form.accumulator_fits else I64
    total = total + align_accumulator(form.result, code, top, n.fraction_bits, n.alignment, lane).resize(I64)
    sign, size, _ = take_sign(total)
    if form.sum_fits_word:
        sign, size = sign.resize(I32), size.resize(I32)
    return encode_magnitude(form.result, Magnitude(sign, size), top - n.fraction_bits, n.rounding, n.kept)


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


def add_promoted(result: Format, total: Value, code: Value, scale: Value | None) -> Value:
    """The f32 code of total + scale * sum, rounded RN once.

    Args:
        result: Format of the sum.
        total: Of the sums before, an f32 code.
        code: The sum.
        scale: f32, of the sum's block; None: there are none.
    """
    part = decode_number(result, code)
    total = total.as_float() + part if scale is None else scale.multiply_add(part, total.as_float())
    return canonical_code(BINARY32, total.bits())


def convert_code(source: Format, target: Format, code: Value) -> Value:
    """The code in another of f16 and f32, rounded RN. A zero keeps its sign."""
    v = decode_accumulator(source, code)
    total = with_sign(v.significand, v.negative)
    rounding = "RZ" if target.mantissa_bits >= source.mantissa_bits else "RN"  # to more bits it is exact
    other = encode(target, total, v.exponent - source.mantissa_bits, rounding, target.mantissa_bits)
    other = other | (v.negative & (SIGN if target.bits == 32 else 1 << (target.bits - 1)))
    return v.special.select(code_of_class(target, special_value(source, code), other), other)
