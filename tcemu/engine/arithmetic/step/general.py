"""Steps of any numbers: rules 3 to 7 with subnormal results, overflow, every rounding and every result.

Terms are aligned in one of two ways. `align_integer` shifts significands, in any rounding. `align_fraction` multiplies the product of two
fractions by a power of two of its own and truncates by conversion; with `round_product` before the conversion it has the other roundings.
"""

from __future__ import annotations

from tcemu.engine.arithmetic.step.decoding import BIAS, FRACTION, SIGN, ZERO_EXPONENT, decode_accumulator, sign_bit
from tcemu.engine.arithmetic.step.forms import IntegerForm
from tcemu.engine.arithmetic.step.quantizing import decode_number
from tcemu.engine.arithmetic.step.rounding import Magnitude, encode, round_integer, take_sign, with_sign
from tcemu.engine.arithmetic.step.specials import canonical_code, code_of_class, special_value
from tcemu.engine.arithmetic.step.values import I32, I64, Lane, V
from tcemu.engine.formats.number_formats import F32 as BINARY32
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.formats.rounding import ROUNDINGS

TINY = (BIAS - 30) << FRACTION  # the code of 2^-30
WIDE_BITS = 24  # bits of the lower part of a term that is added in two parts


def power_of_two(exponent: V) -> V:
    """f32 2^exponent, made of its bits; 0 below the normal range. exponent: i32, at most 127."""
    return ((exponent + BIAS).max(0) << FRACTION).as_float()


# ---- rules 3 to 5


def align_integer(size: V, sign: V, stored: int, distance: V, fraction_bits: int | V, alignment: str | V, lane: Lane) -> V:
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
    more = distance.constant(fraction_bits - stored) if isinstance(fraction_bits, int) else fraction_bits - stored
    size, negative = size.resize(lane, signed=False) << more.max(0).resize(lane), sign.resize(lane)
    drop = (distance + (0 - more).max(0)).min(lane.bits - 1).resize(lane)
    return with_sign(round_integer(size, drop, negative, alignment), negative)


def align_signed(term: V, stored: int, distance: V, fraction_bits: int, alignment: str, lane: Lane) -> V:
    sign, size, _ = take_sign(term)
    return align_integer(size, sign, stored, distance, fraction_bits, alignment, lane)


def truncate_product(x: V, y: V, sign: V, drop: V) -> V:
    """A term of an i32: the product of two magnitudes, below 2^32, truncated, with its sign.

    Args:
        x: Magnitude of a factor, in units of the step where that takes a shift to the left.
        y: Magnitude of the other one.
        sign: 1 or -1.
        drop: Bits below the unit, not negative.
    """
    return (x * y).shift_right_any(drop) * sign


def align_accumulator(fmt: Format, code: V, top: V, fraction_bits: int, alignment: str, lane: Lane) -> V:
    """The accumulator, f16 or f32, in units of the step, with its sign. top: the exponent that the step aligns to."""
    own = decode_accumulator(fmt, code)
    return align_integer(own.significand, own.negative, fmt.mantissa_bits, top - own.exponent, fraction_bits, alignment, lane)


def end_step(form: IntegerForm, total: V, code: V, top: V) -> V:
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
    return encode(form.result, Magnitude(sign, size), top - n.fraction_bits, n.rounding, n.kept)


def common_scale(top: V, least: int, fraction_bits: int | V) -> V:
    """f32: what every product of values is multiplied by, so that it is in units of the step.

    Args:
        top: The exponent that the step aligns to, i32.
        least: The least exponent of a product: below it every product is 0, and the scale would overflow.
        fraction_bits: Of the model.
    """
    return power_of_two(fraction_bits - top.max(least))


def product_scale(exponent: V, top: V, mantissas: int, fraction_bits: int | V) -> V:
    """f32: what a product of significands is multiplied by, so that it is in units of the step.

    Args:
        exponent: Of the product, i32.
        top: The exponent that the step aligns to, i32.
        mantissas: Fraction bits of the product.
        fraction_bits: Of the model.
    """
    return power_of_two(exponent - (top + (mantissas - fraction_bits)))


def align_fraction(fraction: V, exponent: V, offset: V) -> V:
    """A term, truncated, in units of the step: i32.

    A power below the normal range becomes 0, as the term is then truncated to 0.

    Args:
        fraction: f32, below 4: the term / 2^exponent.
        exponent: i32, at most the one that the step aligns to.
        offset: fraction_bits - that exponent + the bias of f32.
    """
    power = (exponent + offset).max(0) << FRACTION
    return (fraction * power.as_float()).to_integer()


def round_product(aligned: V, product: V, alignment: str | V) -> V:
    """An aligned product, f32, ready to be truncated to the integer to which it is rounded. One that underflowed is not zero.

    Args:
        aligned: The product in units of the step, where a small one may have become 0.
        product: Before it was aligned.
        alignment: The rounding; or an i32, an index into `ROUNDINGS`.
    """
    if not isinstance(alignment, str):
        chosen = round_product(aligned, product, ROUNDINGS[0])
        for index, name in enumerate(ROUNDINGS[1:-1], 1):
            chosen = (alignment == index).select(round_product(aligned, product, name), chosen)
        return chosen
    if alignment == "RZ":
        return aligned
    if alignment != "RN":
        tiny = ((aligned.bits() & ~SIGN) < TINY) & (product != 0.0)
        aligned = tiny.select((product.bits() & SIGN) | TINY, aligned.bits()).as_float()
    return aligned.to_integral(alignment)


def split_term(aligned: V) -> tuple[V, V]:
    """An aligned term, f32 below 2^(31 + `WIDE_BITS`), truncated: its multiples of 2^WIDE_BITS and the rest, i32, both of its sign."""
    high = (aligned * 2.0**-WIDE_BITS).to_integer()
    return high, (aligned - high.to_float() * 2.0**WIDE_BITS).to_integer()


def join_sums(high: V, low: V) -> V:
    """The sum, i64, of the sums of upper and of lower parts."""
    return (high.resize(I64) << WIDE_BITS) + low.resize(I64)


def own_fraction(code: V) -> tuple[V, V, V]:
    """An f32 accumulator as (fraction, exponent, special): what `align_fraction` takes, and whether it is Inf or NaN."""
    magnitude = code & ~SIGN
    field = magnitude >> FRACTION
    subnormal = field == 0
    takes_part = (magnitude != 0) & (field != 0xFF)
    exponent = takes_part.select(subnormal.select(1, field) - BIAS, ZERO_EXPONENT)
    tiny = magnitude.to_float(signed=False) * 2.0**-FRACTION
    fraction = subnormal.select(tiny.bits(), (code & (1 << FRACTION) - 1) | (BIAS << FRACTION)) | (code & SIGN)
    return fraction.as_float(), exponent, field == 0xFF


def add_jammed(x: V, y: V, unit: V) -> tuple[V, V]:
    """x + y in units 2^unit, i32, and the unit: a sum that does not fit is halved, with a sticky last bit."""
    total = x + y
    wraps = ((x ^ total) & (y ^ total)) < 0
    half = x.shift_right_signed(1) + y.shift_right_signed(1) + (x & y & 1)
    return wraps.select(half | ((x ^ y) & 1), total), unit + wraps.resize(I32, signed=False)


# ---- sums outside a step


def add_codes(fmt: Format, x: V, y: V) -> V:
    """x + y of codes of f16 or f32, rounded RN once. They are not both -0."""
    if fmt == BINARY32 and x.keeps_subnormals:
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
    code = encode(fmt, take_sign(total), top - (fmt.mantissa_bits + spare), "RN", fmt.mantissa_bits)
    return code_of_class(fmt, special_value(fmt, x) + special_value(fmt, y), code)


def add_promoted(result: Format, total: V, code: V, scale: V | None) -> V:
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


def convert_code(source: Format, target: Format, code: V) -> V:
    """The code in another of f16 and f32, rounded RN. A zero keeps its sign."""
    v = decode_accumulator(source, code)
    rounding = "RZ" if target.mantissa_bits >= source.mantissa_bits else "RN"  # to more bits it is exact
    other = encode(target, Magnitude(v.negative, v.significand), v.exponent - source.mantissa_bits, rounding, target.mantissa_bits)
    other = other | (v.negative & sign_bit(target))
    return v.special.select(code_of_class(target, special_value(source, code), other), other)
