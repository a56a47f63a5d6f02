"""Codes of the number formats, taken apart by vectors of integers in LLVM IR."""

from typing import NamedTuple

from tcemu.arithmetic.fused_dot_add import SIGN
from tcemu.arithmetic.multiplicands import ZERO_EXPONENT
from tcemu.backends.llvm.values import F32, I32, Value
from tcemu.formats import F32 as RESULT
from tcemu.formats import Format

BIAS, FRACTION = RESULT.bias, RESULT.mantissa_bits


class Decoded(NamedTuple):
    """Codes taken apart: integers."""

    magnitude: Value  # the code without sign
    negative: Value | None  # -1 or 0
    exponent: Value  # rule 2, with the bias of f32, without scales
    special: Value | None  # Inf or NaN
    infinite: Value | None
    zero: Value


class AnyFactor(NamedTuple):
    """A factor that may be any code."""

    fraction: Value  # f32, the value / 2^exponent; Inf and NaN themselves
    exponent: Value  # rule 2; ZERO_EXPONENT for zero, Inf and NaN
    special: Value


def decode(fmt: Format, code: Value) -> Decoded:
    """code: integers of 32 bits."""
    unsigned = code & ((1 << (fmt.bits - fmt.signed)) - 1 & ~((1 << fmt.unused_bits) - 1))
    negative = ((code << (32 - fmt.bits)).shift_right_signed(31)) if fmt.signed else None
    field = unsigned >> (fmt.mantissa_bits + fmt.unused_bits)
    exponent = field + (BIAS - fmt.bias)
    if fmt.subnormals:
        exponent = (field == 0).select(BIAS + fmt.min_exponent, exponent)
    special = infinite = None
    zero = unsigned == 0
    if fmt.specials == "ieee":
        special = field == (1 << fmt.exponent_bits) - 1
        infinite = unsigned == fmt.infinity << fmt.unused_bits
    elif fmt.specials == "nan":
        special = unsigned == fmt.nan
    elif fmt.specials == "fnuz":
        special = (code & ((1 << fmt.bits) - 1)) == fmt.nan
        zero = (code & ((1 << fmt.bits) - 1)) == 0
    return Decoded(unsigned, negative, exponent, special, infinite, zero)


def value_word(fmt: Format, x: Decoded) -> Value:
    """The bits of |value| as an f32, right where it is a number and zero or a normal f32."""
    stored = fmt.mantissa_bits + fmt.unused_bits
    word = x.magnitude << (FRACTION - stored) if stored <= FRACTION else x.magnitude
    if fmt.bias == BIAS and fmt.exponent_bits == RESULT.exponent_bits:
        return word
    word = word + ((BIAS - fmt.bias) << FRACTION)
    if not fmt.subnormals:
        return word
    tiny = x.magnitude.cast("uitofp", F32) * 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    return (x.magnitude < 1 << stored).select(tiny.bits(), word)


def significand(fmt: Format, x: Decoded) -> Value:
    """The integer significand, without sign."""
    fraction = x.magnitude >> fmt.unused_bits
    stored = fraction & ((1 << fmt.mantissa_bits) - 1)
    if not fmt.subnormals:
        return stored | (1 << fmt.mantissa_bits)
    return (fraction < 1 << fmt.mantissa_bits).select(stored, stored | (1 << fmt.mantissa_bits))


def fraction_bits(fmt: Format, x: Decoded) -> Value:
    """The bits of |value| / 2^exponent as an f32: 0, or a number below 2, normal in f32."""
    stored = x.magnitude >> fmt.unused_bits
    fraction = stored & ((1 << fmt.mantissa_bits) - 1)
    word = fraction << (FRACTION - fmt.mantissa_bits) | (BIAS << FRACTION)
    if not fmt.subnormals:
        return word
    tiny = stored.cast("uitofp", F32) * 2.0**-fmt.mantissa_bits
    return (stored < 1 << fmt.mantissa_bits).select(tiny.bits(), word)


def decode_any(fmt: Format, codes: Value, scales: Value | None = None) -> AnyFactor:
    """codes, scales: integers of 32 bits; the scales are powers of two."""
    x = decode(fmt, codes)
    special = codes != codes if x.special is None else x.special
    infinite = codes != codes if x.infinite is None else x.infinite
    if scales is not None:
        special, infinite = special | (scales == 0xFF), infinite & (scales != 0xFF)
    word = special.select(infinite.select(RESULT.infinity, codes - codes + RESULT.nan), x.zero.select(0, fraction_bits(fmt, x)))
    if x.negative is not None:
        word = word | (x.negative & -SIGN)
    exponent = x.exponent - BIAS if scales is None else x.exponent + scales - 2 * BIAS
    return AnyFactor(word.as_float(), (x.zero | special).select(ZERO_EXPONENT, exponent), special)


def extend(codes: Value) -> Value:
    """Codes as integers of 32 bits."""
    return codes if codes.element == I32 else codes.cast("zext", I32)
