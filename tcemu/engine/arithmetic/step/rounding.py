"""Rounding of integers and of sums, and the codes of what they become: rules 6 and 7 of a step.

There are two ways to the code of a sum. `encode` rounds in integers, in every mode. `encode_truncated` is for sums that are rounded toward
zero to f32: the machine's conversion does what leading zeros and shifts do in the other one. For sums that are far from the ends of f32,
`bounded.round_sum` needs neither.
"""

from __future__ import annotations

from typing import Generic, NamedTuple

from tcemu.engine.arithmetic.step.decoding import BIAS, FRACTION, SIGN, sign_bit
from tcemu.engine.arithmetic.step.values import I32, I64, V
from tcemu.engine.formats.number_formats import F32 as BINARY32
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.formats.rounding import ROUNDINGS


class Magnitude(NamedTuple, Generic[V]):
    """A number (-1)^negative * size * 2^up."""

    negative: V  # -1 or 0
    size: V  # without sign; of an i32 all 32 bits count
    up: V | None = None  # None: 0


def with_sign(size: V, sign: V) -> V:
    """A magnitude as a signed number. sign: -1 where it is negative, else 0."""
    return (size ^ sign) - sign


def take_sign(total: V) -> Magnitude[V]:
    sign = total.shift_right_signed(total.lane.bits - 1)
    return Magnitude(sign, with_sign(total, sign))


# ---- integers


def round_integer(size: V, drop: V, negative: V, rounding: str | V, drops: bool = False) -> V:
    """size / 2^drop, rounded to an integer.

    Args:
        size: Below 2^(W - 2), where all three values have W bits.
        drop: From 0 to W - 1.
        negative: -1 or 0.
        rounding: RN, RZ, RM or RP; or an i32, an index into `ROUNDINGS`.
        drops: No `drop` is 0.
    """
    integer = size >> drop
    if not isinstance(rounding, str):
        by_name = [round_integer(size, drop, negative, name) for name in ROUNDINGS[:-1]]
        chosen = by_name[0]
        for index, rounded in enumerate(by_name[1:], 1):
            chosen = (rounding == index).select(rounded, chosen)
        return chosen
    if rounding == "RZ":
        return integer
    if rounding == "RN" and drops:
        below_half = (drop.constant(1) << (drop - 1)) - 1
        return (size + below_half + (integer & 1)) >> drop
    rest = size - (integer << drop)
    if rounding == "RN":
        half = (drop.constant(1) << drop) >> 1  # 0 where nothing is dropped
        up = (rest > half) | ((rest == half) & (integer & 1 != 0) & (drop > 0))
    else:
        up = (rest != 0) & ((negative != 0) if rounding == "RM" else (negative == 0))
    return integer + up.resize(size.lane, signed=False)


# ---- codes of sums, in any rounding


def encode(fmt: Format, total: Magnitude[V], unit: V, rounding: str | V, kept: int | V) -> V:
    """The code of a sum * 2^unit, rounded to `kept` fraction bits; +0 for every zero; Inf for what is too large, in every rounding.

    Args:
        fmt: f16 or f32.
        total: The sum, without `up`; i32 or i64, of which all bits count.
        unit: i32.
        rounding: As in `round_integer`.
        kept: At most the fraction bits of the format.
    """
    sign, size, _ = total
    width = size.lane.bits
    zeros = size.leading_zeros()
    leading = width - 1 - zeros.resize(I32) + unit  # exponent of the leading bit
    shifted = size << (zeros & (width - 1))
    jammed = (shifted >> 2) | ((shifted | (shifted >> 1)) & 1)  # the leading bit is bit W - 3, and bit 0 is sticky
    below = (fmt.min_exponent - leading).max(0)
    drop = (below + (width - 3 - kept)).min(width - 1)
    integer = round_integer(jammed, drop.resize(size.lane), sign, rounding, drops=True).resize(I32)
    above = (leading - fmt.min_exponent).max(0).min(1 << fmt.exponent_bits)
    code = (integer << (fmt.mantissa_bits - kept)) + (above << fmt.mantissa_bits)  # the leading bit adds one to the field
    code = ((leading > fmt.max_exponent) | (code >= fmt.infinity)).select(fmt.infinity, code)
    code = code | (sign.resize(I32) & sign_bit(fmt))
    return ((size == 0) | (integer == 0)).select(0, code)


# ---- codes of sums in f32, truncated


def truncated_float(size: V) -> V:
    """A number below 2^32 as an f32, truncated, by a conversion that rounds to nearest. It is what "uitofp_rz" means on a machine that has
    no such instruction.
    """
    return _kept_bits(size).to_float(signed=False)


def _kept_bits(size: V) -> V:
    """A number below 2^32 without bits that an f32 cannot hold, so that a conversion to the nearest f32 truncates.

    Where bit i + 24 is set, bit i cannot be kept. Without those bits the first bit below the last kept one is 0: less than half a unit is
    dropped, so that rounding to nearest truncates.
    """
    return size & ~(size >> (FRACTION + 1))


def signed_truncated_float(total: V) -> V:
    """An i32 as an f32, truncated, likewise: "sitofp_rz". The magnitude 2^31 is -2^31 as an i32, which has the right sign."""
    negative, size, _ = take_sign(total)
    word = _kept_bits(size).to_float().bits() | (negative & SIGN)
    return word.as_float()


def cut(code: V, kept: int | V) -> V:
    """The code of an f32 without the fraction bits that the result does not keep."""
    if isinstance(kept, int):
        return code if kept == FRACTION else code & (-1 << (FRACTION - kept))
    return code & (code.constant(-1) << (FRACTION - kept))


def encode_truncated(sum_: Magnitude[V], unit: V, kept: int | V) -> V:
    """The code of a sum * 2^unit, truncated to an f32 that may be subnormal or Inf; +0 for every zero. Its size is below 2^32."""
    unit = unit if sum_.up is None else unit + sum_.up
    number = sum_.size.to_float(signed=False, toward_zero=True).bits()
    field = (number >> FRACTION) + unit
    below = (BINARY32.min_exponent - FRACTION) - unit  # bits of the magnitude below the last one of a subnormal
    small = (below >= 0).select(sum_.size >> (below & 31), sum_.size << ((0 - below) & 31))
    word = (field > 0).select(number + (unit << FRACTION), (below > 31).select(0, small))
    word = cut((field > BINARY32.max_exponent + BIAS).select(BINARY32.infinity, word), kept)
    word = (sum_.size == 0).select(0, word)
    return (word == 0).select(0, word | (sum_.negative & SIGN))


# ---- sums of words


def add_two(x: V, y: V) -> Magnitude[V]:
    """x + y, two i32 that are not both -2^31. Their sum may need 33 bits."""
    total = x + y
    same_sign = ~(x ^ y)  # of two addends of one sign, the sum has that sign even where it wraps
    negative = ((x & same_sign) | (total & ~same_sign)).shift_right_signed(31)
    return Magnitude(negative, with_sign(total, negative))


def add_wide(addends: list[V]) -> Magnitude[V]:
    """The sum of some i32, below 2^40: the bits that an f32 cannot keep of a large one are dropped."""
    total = addends[0].resize(I64)
    for addend in addends[1:]:
        total = total + addend.resize(I64)
    sign, size, _ = take_sign(total)
    large = size > 0xFFFFFFFF
    return Magnitude(sign.resize(I32), large.select(size >> 8, size).resize(I32), large.resize(I32, signed=False) << 3)
