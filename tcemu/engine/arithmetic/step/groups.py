"""The bounded step of block-scaled groups: the products of a group are added exactly, then scaled, aligned and truncated as one term.

An aligned sum has up to `SUM_BITS` bits. It is divided into two parts, each of which is truncated by the conversion to an integer, and the
parts of all groups are added.
"""

from __future__ import annotations

from tcemu.engine.arithmetic.step.decoding import BIAS, FRACTION, SIGN
from tcemu.engine.arithmetic.step.forms import LOW_BITS
from tcemu.engine.arithmetic.step.rounding import cut
from tcemu.engine.arithmetic.step.values import V

LOW_MASK = (1 << LOW_BITS) - 1


def power(top: V, exponent: int) -> V:
    """f32 2^(exponent - top), where `top` has the bias of f32."""
    return (((exponent + 2 * BIAS) - top) << FRACTION).as_float()


def unit(top: V, fraction_bits: int) -> V:
    """The step's unit, f32. top: the exponent that it aligns to, with the bias of f32."""
    return ((top - fraction_bits) << FRACTION).as_float()


def parts(aligned: V) -> tuple[V, V]:
    """An aligned term, f32, truncated: its multiples of 2^LOW_BITS and the rest, i32, both of its sign."""
    high = (aligned * 2.0**-LOW_BITS).to_integer()
    return high, high.to_float().multiply_add_exact(-(2.0**LOW_BITS), aligned).to_integer()


def round_parts(high: V, low: V, unit: V, kept: int, adds_toward_zero: bool) -> V:
    """Rule 6: the f32 code of (high * 2^LOW_BITS + low) units, truncated to `kept` fraction bits.

    Args:
        high: Sum of upper parts, i32.
        low: Sum of lower parts, i32.
        unit: The step's unit, f32.
        kept: Fraction bits of a result.
        adds_toward_zero: The machine has a multiply-add that rounds toward zero.
    """
    if adds_toward_zero:
        carry = (low + (1 << (LOW_BITS - 1))).shift_right_signed(LOW_BITS)
        high, low = high + carry, low - (carry << LOW_BITS)
        return cut((high.to_float().multiply_add(2.0**LOW_BITS, low.to_float(), "RZ") * unit).bits(), kept)
    high, low = high + low.shift_right_signed(LOW_BITS), low & LOW_MASK
    sign = high.shift_right_signed(31)
    low = (low ^ (sign & LOW_MASK)) - sign
    size = ((high ^ sign) + (low >> LOW_BITS)).to_float()  # below 2^24
    low = low & LOW_MASK
    # the bits of the lower part that an f32 does not keep beside the upper part, or alone
    beside = ((size.bits() >> FRACTION) - (BIAS + FRACTION - LOW_BITS)).max(0)
    low = low & ~(low >> (FRACTION + 1)) & (low.constant(-1) << beside)
    return cut((size.multiply_add_exact(2.0**LOW_BITS, low.to_float()) * unit).bits() | (sign & SIGN), kept)
