"""Codes and their exact values in plain Python integers and fractions, one at a time: the second implementation beside `formats`."""

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache

from tcemu.formats import Format

Value = Fraction | str  # an exact number, or one of SPECIALS
SPECIALS = NAN, INFINITY, MINUS_INFINITY = "nan", "+inf", "-inf"
DIGITS = 17  # tell any two values of f64 apart


@dataclass(frozen=True)
class Decoded:
    """What a code means. value: exact; exponent: that of the significand's leading place, which subnormals share with the least normal."""

    value: Value
    exponent: int
    negative: bool

    @property
    def finite(self) -> bool:
        return not isinstance(self.value, str)


def power(exponent: int) -> Fraction:
    """2^exponent."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def leading(value: Fraction) -> int:
    """The exponent of the highest bit of a value that is not zero."""
    n, d = abs(value.numerator), value.denominator
    guess = n.bit_length() - d.bit_length()
    return guess if power(guess) <= abs(value) else guess - 1


@lru_cache(maxsize=1 << 16)
def decode(fmt: Format, code: int) -> Decoded:
    """The meaning of a code; bits above the format's, and those that it does not use, are ignored."""
    code &= (1 << fmt.bits) - 1
    if fmt.is_integer:
        negative = fmt.signed and bool(code >> (fmt.bits - 1))
        return Decoded(Fraction(code - (1 << fmt.bits) if negative else code), 0, negative)
    negative = fmt.signed and bool(code >> (fmt.bits - 1))
    magnitude = code >> fmt.unused_bits & (1 << (fmt.exponent_bits + fmt.mantissa_bits)) - 1
    if magnitude > fmt.greatest_magnitude:
        infinite = fmt.specials == "ieee" and magnitude == fmt.infinity
        return Decoded(infinity(negative) if infinite else NAN, 0, negative)
    field, fraction = divmod(magnitude, 1 << fmt.mantissa_bits)
    subnormal = fmt.subnormals and field == 0
    exponent = fmt.least_exponent if subnormal else field - fmt.bias
    significand = fraction if subnormal else fraction + (1 << fmt.mantissa_bits)
    return Decoded((-1) ** negative * significand * power(exponent - fmt.mantissa_bits), exponent, negative)


def infinity(negative: bool) -> str:
    return MINUS_INFINITY if negative else INFINITY


def multiplied(x: Value, y: Value) -> Value:
    """The exact product. An infinity times 0 is NaN."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x * y
    if NAN in (x, y) or 0 in (x, y):
        return NAN
    return infinity(_is_negative(x) != _is_negative(y))


def _is_negative(x: Value) -> bool:
    return x == MINUS_INFINITY if isinstance(x, str) else x < 0


def total(values: Iterable[Value]) -> Value:
    """The exact sum. Infinities of both signs make a NaN."""
    values = list(values)
    specials = {v for v in values if isinstance(v, str)}
    if not specials:
        return sum((v for v in values if isinstance(v, Fraction)), Fraction(0))
    return specials.pop() if len(specials) == 1 else NAN


def special_code(fmt: Format, value: str, saturate: bool = False) -> int:
    """The code of NaN or an infinity: the canonical NaN; what has no NaN gives its largest value, an integer 0 (PTX ISA 9.7.9, cvt)."""
    if fmt.is_integer:
        return 0 if value == NAN else _integer_code(fmt, Fraction((-1) ** (value == MINUS_INFINITY) << fmt.bits), "RN")
    if value == NAN:
        magnitude = fmt.greatest_magnitude if fmt.specials == "none" else fmt.nan
        return magnitude << fmt.unused_bits | (1 << fmt.unused_bits) - 1
    if value == MINUS_INFINITY and not fmt.signed:
        return 0 if saturate else fmt.nan
    if saturate or fmt.specials == "none":
        return _signed(fmt, fmt.greatest_magnitude, value == MINUS_INFINITY)
    return _signed(fmt, fmt.infinity if fmt.specials == "ieee" else fmt.nan, value == MINUS_INFINITY)


def _signed(fmt: Format, magnitude: int, negative: bool) -> int:
    return magnitude << fmt.unused_bits | (negative << (fmt.bits - 1) if fmt.signed else 0)


def _rounded(value: Fraction, unit: Fraction, rounding: str, odd: int = 0) -> int:
    """|value| in units, as an integer; odd is added where a tie looks for the even one."""
    whole, rest = divmod(abs(value) / unit, 1)
    half = Fraction(1, 2)
    up = {
        "RN": rest > half or (rest == half and (whole + odd) % 2 == 1),
        "RZ": False,
        "RM": rest > 0 and value < 0,
        "RP": rest > 0 and value > 0,
    }
    return whole + up[rounding]


def _integer_code(fmt: Format, value: Fraction, rounding: str) -> int:
    whole = _rounded(value, Fraction(1), rounding) * (-1 if value < 0 else 1)
    least = -(1 << (fmt.bits - 1)) if fmt.signed else 0
    return min(max(whole, least), fmt.greatest_magnitude) & (1 << fmt.bits) - 1


def encode(
    fmt: Format,
    value: Value,
    rounding: str = "RN",
    *,
    overflow: str = "ieee",
    negative_zero: bool = False,
    fraction_bits: int | None = None,
) -> int:
    """The code of a value, rounded once: "RN", "RZ", "RM", "RP".

    overflow, beyond the largest magnitude: "ieee", to Inf (or NaN in a format that has only NaN) if the rounding leads there, else the
    largest; "infinity", always to Inf, as tensor cores do; "saturate", the largest. Integers always saturate. negative_zero: the sign of a
    value that is 0. fraction_bits: those kept of the format's. Unsigned floats have NaN for a negative value (saturate: 0), and for 0
    where they have none.
    """
    saturate = overflow == "saturate"
    if isinstance(value, str):
        return special_code(fmt, value, saturate)
    if fmt.is_integer:
        return _integer_code(fmt, value, rounding)
    if not fmt.signed and (value < 0 or (value == 0 and not fmt.subnormals)):
        return 0 if saturate else fmt.nan
    if value == 0:
        return _signed(fmt, 0, negative_zero)
    lost = 0 if fraction_bits is None else fmt.mantissa_bits - fraction_bits
    exponent, least = leading(value), fmt.least_exponent
    if fmt.subnormals:
        exponent = max(exponent, least)
        whole = _rounded(value, power(exponent - fmt.mantissa_bits + lost), rounding)
        magnitude = (whole << lost) + (exponent - least << fmt.mantissa_bits)  # a carry out of the significand is one of the exponent
    else:
        magnitude = max(exponent - least + _rounded(value, power(exponent), rounding, odd=exponent - least - 1) - 1, 0)
    if magnitude > fmt.greatest_magnitude:
        inward = rounding in ("RZ", "RP" if value < 0 else "RM")
        if saturate or (inward and overflow != "infinity"):
            return _signed(fmt, fmt.greatest_magnitude, value < 0)
        return special_code(fmt, infinity(value < 0))
    return _signed(fmt, magnitude, value < 0)


def convert(source: Format, target: Format, code: int) -> int:
    """One code in another format, to the nearest."""
    if source == target:
        return code
    meant = decode(source, code)
    return encode(target, meant.value, negative_zero=meant.negative)


def spacing(fmt: Format, value: Fraction) -> Fraction:
    """The distance of neighbouring values of a format around `value`: an ulp."""
    if fmt.is_integer:
        return Fraction(1)
    return power((fmt.least_exponent if value == 0 else max(leading(value), fmt.least_exponent)) - fmt.mantissa_bits)


# ---- as text


def decimal(value: Value, digits: int = 7) -> str:
    """A value in at most so many significant digits; an integer below 2^33 in all of them."""
    if isinstance(value, str):
        return value
    if value.denominator == 1 and abs(value) < 1 << 33:
        return str(value.numerator)
    context = Context(prec=digits, Emax=10**6, Emin=-(10**6))
    rounded = context.divide(Decimal(value.numerator), Decimal(value.denominator)).normalize(context)
    if not rounded:
        return "0"
    mantissa, _, exponent = f"{rounded:e}".partition("e")
    place = int(exponent)
    return f"{rounded:f}" if -5 < place < digits else f"{mantissa}e{place:+03d}"


def exact_decimal(value: Value, digits: int = 24) -> str:
    """All digits of a value, if there are not more, else so many and a mark."""
    short = decimal(value, digits)
    return short if isinstance(value, str) or Fraction(short) == value else "about " + short


def shortest(fmt: Format, code: int) -> str:
    """The value of a code, exactly if seven digits are enough, else the fewest digits that read as this code."""
    meant = decode(fmt, code)
    if isinstance(meant.value, str):
        return meant.value
    if meant.value == 0:
        return "-0" if meant.negative else "0"
    if Fraction(decimal(meant.value)) == meant.value:
        return decimal(meant.value)
    for digits in range(1, DIGITS):
        text = decimal(meant.value, digits)
        if decode(fmt, encode(fmt, Fraction(text))).value == meant.value:
            return decimal(Fraction(text), DIGITS)
    return decimal(meant.value, DIGITS)


def word(fmt: Format, code: int) -> str:
    """The code in hex, as many digits as its bits want."""
    return f"{code & (1 << fmt.bits) - 1:0{-(-fmt.bits // 4)}x}"


def fixed(value: Fraction, last: int, point: int, width: int, negative: bool) -> str:
    """Sign and bits, down to 2^last, of a multiple of it; the binary point at 2^point, `width` digits before it."""
    digits = f"{int(abs(value) / power(last)):0{width + point - last}b}"
    at = len(digits) - (point - last)
    return f"{'-' if negative else '+'}{digits[:at]}.{digits[at:]}"
