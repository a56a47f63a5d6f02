"""Codes and their exact values in plain Python integers and fractions, one at a time: an implementation independent of `tcemu.formats`."""

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache

from tcemu.engine.formats.number_formats import Format

Value = Fraction | str  # exact number, or one of SPECIALS
SPECIALS = NAN, INFINITY, MINUS_INFINITY = "nan", "+inf", "-inf"
MAX_DIGITS = 17  # decimal digits that distinguish any two values of f64


@dataclass(frozen=True)
class DecodedCode:
    """The meaning of a code."""

    value: Value
    exponent: int  # exponent of the significand's leading place; subnormals have that of the smallest normal number
    negative: bool

    @property
    def finite(self) -> bool:
        """True for a number, False for NaN and infinities."""
        return not isinstance(self.value, str)


def power_of_two(exponent: int) -> Fraction:
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def leading_exponent(value: Fraction) -> int:
    """Return the exponent of the highest bit of a nonzero value."""
    n, d = abs(value.numerator), value.denominator
    guess = n.bit_length() - d.bit_length()
    return guess if power_of_two(guess) <= abs(value) else guess - 1


@lru_cache(maxsize=1 << 16)
def decode(fmt: Format, code: int) -> DecodedCode:
    """Decode one code. Bits above the format's width and unused bits are ignored."""
    code &= (1 << fmt.bits) - 1
    if fmt.is_integer:
        negative = fmt.signed and bool(code >> (fmt.bits - 1))
        return DecodedCode(Fraction(code - (1 << fmt.bits) if negative else code), 0, negative)
    if fmt.specials == "fnuz" and code == fmt.nan:
        return DecodedCode(NAN, 0, True)
    negative = fmt.signed and bool(code >> (fmt.bits - 1))
    magnitude = code >> fmt.unused_bits & (1 << (fmt.exponent_bits + fmt.mantissa_bits)) - 1
    if magnitude > fmt.max_magnitude:
        infinite = fmt.specials == "ieee" and magnitude == fmt.infinity
        return DecodedCode(infinity(negative) if infinite else NAN, 0, negative)
    field, fraction = divmod(magnitude, 1 << fmt.mantissa_bits)
    subnormal = fmt.subnormals and field == 0
    exponent = fmt.min_exponent if subnormal else field - fmt.bias
    significand = fraction if subnormal else fraction + (1 << fmt.mantissa_bits)
    return DecodedCode((-1) ** negative * significand * power_of_two(exponent - fmt.mantissa_bits), exponent, negative)


def infinity(negative: bool) -> str:
    return MINUS_INFINITY if negative else INFINITY


def multiply_values(x: Value, y: Value) -> Value:
    """Return the exact product. An infinity times 0 is NaN."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x * y
    if NAN in (x, y) or 0 in (x, y):
        return NAN
    return infinity(_is_negative(x) != _is_negative(y))


def _is_negative(x: Value) -> bool:
    return x == MINUS_INFINITY if isinstance(x, str) else x < 0


def sum_values(values: Iterable[Value]) -> Value:
    """Return the exact sum. Infinities of both signs make a NaN."""
    values = list(values)
    specials = {v for v in values if isinstance(v, str)}
    if not specials:
        return sum((v for v in values if isinstance(v, Fraction)), Fraction(0))
    return specials.pop() if len(specials) == 1 else NAN


def special_code(fmt: Format, value: str, saturate: bool = False) -> int:
    """Return the code of NaN (the canonical one) or of an infinity.

    A float format without NaN gives its largest value for a NaN, an integer format 0 (PTX ISA 9.7.9, cvt).
    """
    if fmt.is_integer:
        return 0 if value == NAN else _integer_code(fmt, Fraction((-1) ** (value == MINUS_INFINITY) << fmt.bits), "RN")
    if value == NAN:
        magnitude = fmt.max_magnitude if fmt.specials == "none" else fmt.nan
        return magnitude << fmt.unused_bits | (1 << fmt.unused_bits) - 1
    if value == MINUS_INFINITY and not fmt.signed:
        return 0 if saturate else fmt.nan
    if saturate or fmt.specials == "none":
        return _signed_code(fmt, fmt.max_magnitude, value == MINUS_INFINITY)
    return _signed_code(fmt, fmt.infinity if fmt.specials == "ieee" else fmt.nan, value == MINUS_INFINITY)


def _signed_code(fmt: Format, magnitude: int, negative: bool) -> int:
    return magnitude << fmt.unused_bits | (negative << (fmt.bits - 1) if fmt.signed else 0)


def _round_magnitude(value: Fraction, unit: Fraction, rounding: str, odd: int = 0) -> int:
    """Round |value| / unit to an integer; `odd` is added before a tie looks for the even neighbour."""
    quotient, rest = divmod(abs(value) / unit, 1)
    half = Fraction(1, 2)
    up = {
        "RN": rest > half or (rest == half and (quotient + odd) % 2 == 1),
        "RZ": False,
        "RM": rest > 0 and value < 0,
        "RP": rest > 0 and value > 0,
        "RNA": rest >= half,
    }
    return quotient + up[rounding]


def _integer_code(fmt: Format, value: Fraction, rounding: str) -> int:
    integer = _round_magnitude(value, Fraction(1), rounding) * (-1 if value < 0 else 1)
    minimum = -(1 << (fmt.bits - 1)) if fmt.signed else 0
    return min(max(integer, minimum), fmt.max_magnitude) & (1 << fmt.bits) - 1


def encode(
    fmt: Format,
    value: Value,
    rounding: str = "RN",
    *,
    overflow: str = "ieee",
    negative_zero: bool = False,
    fraction_bits: int | None = None,
) -> int:
    """Encode a value, rounded once. Integers always saturate.

    An unsigned float format gives NaN for a negative value (0 if `overflow` is "saturate"), and NaN for 0 if it has no zero.

    Args:
        fmt: Format of the code.
        value: An exact number, or one of SPECIALS.
        rounding: "RN", "RZ", "RM", "RP" or "RNA".
        overflow: Result beyond the largest magnitude. "ieee": Inf (NaN in a format that has only NaN) if the rounding leads there, else the
            largest magnitude. "infinity": always Inf, as in tensor cores. "saturate": the largest magnitude.
        negative_zero: Sign of a value of 0.
        fraction_bits: Fraction bits of the result; None for all bits of the format.
    """
    saturate = overflow == "saturate"
    if isinstance(value, str):
        return special_code(fmt, value, saturate)
    if fmt.is_integer:
        return _integer_code(fmt, value, rounding)
    if not fmt.signed and (value < 0 or (value == 0 and not fmt.subnormals)):
        return 0 if saturate else fmt.nan
    if value == 0:
        return _signed_code(fmt, 0, negative_zero and fmt.specials != "fnuz")
    dropped = 0 if fraction_bits is None else fmt.mantissa_bits - fraction_bits
    exponent, least = leading_exponent(value), fmt.min_exponent
    if fmt.subnormals:
        exponent = max(exponent, least)
        significand = _round_magnitude(value, power_of_two(exponent - fmt.mantissa_bits + dropped), rounding)
        magnitude = (significand << dropped) + (
            exponent - least << fmt.mantissa_bits
        )  # a carry out of the significand increments the exponent
    else:
        magnitude = max(exponent - least + _round_magnitude(value, power_of_two(exponent), rounding, odd=exponent - least - 1) - 1, 0)
    if magnitude > fmt.max_magnitude:
        inward = rounding in ("RZ", "RP" if value < 0 else "RM")
        if saturate or (inward and overflow != "infinity"):
            return _signed_code(fmt, fmt.max_magnitude, value < 0)
        return special_code(fmt, infinity(value < 0))
    return _signed_code(fmt, magnitude, value < 0 and (magnitude > 0 or fmt.specials != "fnuz"))


def convert(source: Format, target: Format, code: int) -> int:
    """Convert one code to another format, rounded to nearest."""
    if source == target:
        return code
    decoded = decode(source, code)
    return encode(target, decoded.value, negative_zero=decoded.negative)


def flush(fmt: Format, code: int, how: str | None) -> int:
    """Return the code, or zero for a subnormal: with its sign if `how` is "signed". "positive" makes -0 +0 too; None changes nothing."""
    decoded = decode(fmt, code)
    small = isinstance(decoded.value, Fraction) and abs(decoded.value) < power_of_two(fmt.min_exponent)
    return _signed_code(fmt, 0, decoded.negative and how == "signed") if how is not None and small else code


def is_tiny(fmt: Format, value: Fraction, rounding: str) -> bool:
    """Return whether a value is below the smallest normal number when rounded to the significand with no bound on the exponent.

    Source: IEEE 754-2019, 7.5, tininess after rounding.
    """
    if value == 0:
        return True
    scale = power_of_two(leading_exponent(value))
    rounded = decode(fmt, encode(fmt, value / scale, rounding)).value  # of a number from 1 to 2
    return isinstance(rounded, Fraction) and abs(rounded) * scale < power_of_two(fmt.min_exponent)


def ulp(fmt: Format, value: Fraction) -> Fraction:
    """Return the unit in the last place: the distance of neighbouring values of a format around `value`."""
    if fmt.is_integer:
        return Fraction(1)
    return power_of_two((fmt.min_exponent if value == 0 else max(leading_exponent(value), fmt.min_exponent)) - fmt.mantissa_bits)


# ---- as text


def decimal_text(value: Value, digits: int = 7) -> str:
    """Format a value with at most `digits` significant digits. An integer below 2^33 is written with all its digits."""
    if isinstance(value, str):
        return value
    if value.denominator == 1 and abs(value) < 1 << 33:
        return str(value.numerator)
    context = Context(prec=digits, Emax=10**6, Emin=-(10**6))
    rounded = context.divide(Decimal(value.numerator), Decimal(value.denominator)).normalize(context)
    if not rounded:
        return "0"
    mantissa, _, exponent = f"{rounded:e}".partition("e")
    power = int(exponent)
    return f"{rounded:f}" if -5 < power < digits else f"{mantissa}e{power:+03d}"


def exact_decimal_text(value: Value, digits: int = 24) -> str:
    """Format a value exactly if `digits` digits are enough, else as "about ..."."""
    short = decimal_text(value, digits)
    return short if isinstance(value, str) or Fraction(short) == value else "about " + short


def shortest_text(fmt: Format, code: int) -> str:
    """Format the value of a code exactly if seven digits are enough, else with the fewest digits that read as this code."""
    decoded = decode(fmt, code)
    value = decoded.value
    if isinstance(value, str):
        return value
    if value == 0:
        return "-0" if decoded.negative else "0"
    if Fraction(decimal_text(value)) == value:
        return decimal_text(value)
    for digits in range(1, MAX_DIGITS):
        text = decimal_text(value, digits)
        if decode(fmt, encode(fmt, Fraction(text))).value == value:
            return decimal_text(Fraction(text), MAX_DIGITS)
    return decimal_text(value, MAX_DIGITS)


def hex_code(fmt: Format, code: int) -> str:
    """Format a code in hexadecimal, padded to the width of its format."""
    return f"{code & (1 << fmt.bits) - 1:0{-(-fmt.bits // 4)}x}"


def fixed_point_text(value: Fraction, last: int, point: int, width: int, negative: bool) -> str:
    """Format a multiple of 2^last as sign and bits, with the binary point at 2^point and `width` digits before it."""
    digits = f"{int(abs(value) / power_of_two(last)):0{width + point - last}b}"
    before = len(digits) - (point - last)
    return f"{'-' if negative else '+'}{digits[:before]}.{digits[before:]}"
