"""The rules of a step for proofs, in integers that are wide enough to be exact: no formula of tcemu stands here."""

from __future__ import annotations

from smt_values import SmtValue

from tcemu.engine.arithmetic.step.values import I32, Lane
from tcemu.formats import Format


def between(x: SmtValue, low: int, high: int) -> SmtValue:
    """Whether a signed number lies from `low` to `high`."""
    return (x >= low) & (x <= high)


def clamp(x: SmtValue, low: int, high: int) -> SmtValue:
    """A signed number between two others."""
    return x.max(low).min(high)


def widen(x: SmtValue, bits: int, signed: bool = False) -> SmtValue:
    """A number with more bits."""
    return x.resize(Lane("int", bits), signed)


def round_size(size: SmtValue, drop: SmtValue, negative: SmtValue, rounding: str) -> SmtValue:
    """size / 2^drop, rounded to an integer.

    Args:
        size: Without sign.
        drop: Of the same width, and less than it.
        negative: Condition.
        rounding: RN, RZ, RM or RP.
    """
    bits = size.lane.bits + 2
    size, drop = widen(size, bits), widen(drop, bits)
    integer = size >> drop
    rest, half = (size - (integer << drop)) << 1, size.constant(1) << drop
    if rounding == "RN":
        up = (rest > half) | ((rest == half) & (integer & 1 == 1))
    else:
        up = {"RZ": negative & ~negative, "RM": (rest != 0) & negative, "RP": (rest != 0) & ~negative}[rounding]
    return (integer + widen(up, bits)).resize(Lane("int", bits - 2))


def encode_size(
    fmt: Format, size: SmtValue, leading: SmtValue, negative: SmtValue, unit: SmtValue, kept: SmtValue, rounding: str
) -> SmtValue:
    """The code of (-1)^negative * size * 2^unit by rules 6 and 7, i32. Subnormal numbers have the exponent of the smallest normal one.

    Args:
        fmt: Of the result.
        size: Without sign, not zero.
        leading: The number of its leading bit, i32.
        negative: Condition.
        unit: i32.
        kept: Fraction bits of the result, i32.
        rounding: RN, RZ, RM or RP.
    """
    spare = fmt.mantissa_bits + 2
    bits = size.lane.bits + spare + 2
    place = (leading + unit).max(fmt.min_exponent)  # exponent of the leading bit, if the number is normal
    drop = clamp(place - kept - unit + spare, 0, bits - 1)
    integer = round_size(widen(size, bits) << spare, widen(drop, bits), negative, rounding)
    code = (integer << widen(fmt.mantissa_bits - kept, bits)).resize(I32) + (clamp(place - fmt.min_exponent, 0, 256) << fmt.mantissa_bits)
    overflows = (leading + unit > fmt.max_exponent) | (widen(code, 64) >= fmt.infinity)
    code = overflows.select(fmt.infinity, code)
    return (integer == 0).select(0, negative.select(code | 1 << (fmt.bits - 1), code))
