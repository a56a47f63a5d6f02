"""What floating-point instructions of PTX give, by fractions of Python's integers, one value at a time. It shares nothing with tcemu.

IEEE 754-2019 for the numbers; the words of NaNs, `.ftz` and what the manual leaves open as an H200 gives them. Each function takes the
parts of the opcode and one value for each source, raw bits; it returns a tuple of raw bits.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from oracles.reference import power_of_two

FIELDS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0xFFF8000000000000}
QUIET = 1 << 51
COMPARED = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}  # fmt: skip
COMBINED = {"and": lambda p, c: p and c, "or": lambda p, c: p or c, "xor": lambda p, c: p != c}


class Value(NamedTuple):
    """A float: its sign, and its magnitude, which may be "inf" or "nan"."""

    negative: bool
    size: Fraction | str

    @property
    def nan(self):
        return self.size == "nan"

    @property
    def infinite(self):
        return self.size == "inf"

    @property
    def zero(self):
        return self.size == 0

    @property
    def number(self):
        """Of a finite value."""
        return -self.size if self.negative else self.size

    @property
    def order(self):
        """As a Python float or fraction that compares as it should; not of a NaN."""
        size = math.inf if self.infinite else self.size
        return -size if self.negative else size


def width(kind):
    return 1 + sum(FIELDS[kind])


def decode(code, kind):
    exponent_bits, mantissa_bits = FIELDS[kind]
    negative = bool(code >> (width(kind) - 1))
    field, fraction = code >> mantissa_bits & ((1 << exponent_bits) - 1), code & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if field == (1 << exponent_bits) - 1:
        return Value(negative, "nan" if fraction else "inf")
    if field:
        fraction += 1 << mantissa_bits
    return Value(negative, Fraction(fraction) * power_of_two(max(field, 1) - bias - mantissa_bits))


def round_to_integer(x, mode, negative):
    """A fraction from 0 rounded to an integer."""
    n = x.numerator // x.denominator
    rest = x - n
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and n % 2 == 1), "rz": False, "rm": rest > 0 and negative,
        "rp": rest > 0 and not negative, "rna": rest >= Fraction(1, 2),
    }[mode]  # fmt: skip
    return n + up


def logarithm(x):
    """The exponent of a positive fraction's leading one."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if power_of_two(e) <= x else e - 1


def encode(value, kind, mode="rn", ftz=False):
    exponent_bits, mantissa_bits = FIELDS[kind]
    sign = int(value.negative) << (width(kind) - 1)
    infinity = ((1 << exponent_bits) - 1) << mantissa_bits
    if value.nan:
        return NAN[kind]
    if value.infinite:
        return sign | infinity
    if value.zero:
        return sign
    least = 2 - (1 << (exponent_bits - 1))
    exponent = logarithm(value.size)
    unit = power_of_two((exponent if ftz else max(exponent, least)) - mantissa_bits)
    rounded = round_to_integer(value.size / unit, mode, value.negative) * unit
    if ftz and rounded < power_of_two(least):
        return sign
    if rounded >= power_of_two(1 - least + 1):
        outward = mode in ("rn", "rna") or mode == ("rm" if value.negative else "rp")
        return sign | (infinity if outward else infinity - 1)
    if rounded < power_of_two(least):
        return sign | int(rounded / power_of_two(least - mantissa_bits))
    exponent = logarithm(rounded)
    return sign | ((exponent - least) << mantissa_bits) + int(rounded / power_of_two(exponent - mantissa_bits))


def flush_subnormal(code, kind):
    exponent_bits, mantissa_bits = FIELDS[kind]
    field = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    return code if field else code >> (width(kind) - 1) << (width(kind) - 1)


def rounding_mode(parts):
    return next((part for part in parts if part in ("rn", "rz", "rm", "rp")), "rn")


def saturate(code, kind, parts):
    value = decode(code, kind)
    one = encode(Value(False, Fraction(1)), kind)
    if "sat" in parts:
        return 0 if value.nan or value.negative else min(code, one)
    if "relu" in parts:
        return NAN[kind] if value.nan else 0 if value.negative else code
    return code


# ---- arithmetic


def add_values(x, y, mode):
    if x.nan or y.nan or (x.infinite and y.infinite and x.negative != y.negative):
        return Value(False, "nan")
    if x.infinite or y.infinite:
        return x if x.infinite else y
    total = x.number + y.number
    if total == 0:
        return Value(x.negative if x.negative == y.negative else mode == "rm", Fraction(0))
    return Value(total < 0, abs(total))


def multiply_values(x, y):
    negative = x.negative != y.negative
    if x.nan or y.nan or (x.infinite and y.zero) or (x.zero and y.infinite):
        return Value(False, "nan")
    return Value(negative, "inf" if x.infinite or y.infinite else x.size * y.size)


def divide(x, y):
    negative = x.negative != y.negative
    if x.nan or y.nan or (x.zero and y.zero) or (x.infinite and y.infinite):
        return Value(False, "nan")
    if x.infinite or y.zero:
        return Value(negative, "inf")
    return Value(negative, Fraction(0) if y.infinite else x.size / y.size)


def square_root(x):
    """A fraction near enough to the root for every rounding to 53 bits."""
    if x.nan or (x.negative and not x.zero):
        return Value(False, "nan")
    if x.infinite or x.zero:
        return x
    scale = 2 * (70 - logarithm(x.size) // 2)
    square = x.size * power_of_two(scale)
    assert square.denominator == 1
    near = math.isqrt(square.numerator)
    exact = near * near == square.numerator
    return Value(False, Fraction(2 * near + (not exact), 2) / power_of_two(scale // 2))


def negate(x):
    return x._replace(negative=not x.negative)


ARITHMETIC = {  # the exact value of the operands, and of f64 whose NaN comes first
    "add": (add_values, (1, 0)), "sub": (lambda x, y, mode: add_values(x, negate(y), mode), (1, 0)), "mul": (lambda x, y,
        mode: multiply_values(x, y), (1, 0)),
    "fma": (lambda x, y, z, mode: add_values(multiply_values(x, y), z, mode), (1, 2, 0)),
    "mad": (lambda x, y, z, mode: add_values(multiply_values(x, y), z, mode), (1, 2, 0)),
    "div": (lambda x, y, mode: divide(x, y), (0, 1)), "sqrt": (lambda x, mode: square_root(x), (0,)),
    "rcp": (lambda x, mode: divide(Value(False, Fraction(1)), x), (0,)),
}  # fmt: skip


def arithmetic(name, parts, codes, kind):
    exact, order = ARITHMETIC[name]
    mode, ftz = rounding_mode(parts), "ftz" in parts
    codes = [flush_subnormal(code, kind) for code in codes] if ftz else codes
    values = [decode(code, kind) for code in codes]
    if "oob" in parts and 0x7FF7 in (codes[0] & 0x7FFF, codes[1] & 0x7FFF):
        return 0
    result = encode(exact(*values, mode), kind, mode, ftz)
    nans = [codes[i] | QUIET for i in order if values[i].nan] if kind == "f64" else []
    return nans[0] if nans else saturate(result, kind, parts)


def mixed_arithmetic(name, parts, codes):
    """Narrow factors or terms, an f32 sum."""
    mode, narrow = rounding_mode(parts), parts[-1]
    values = [*(decode(code, narrow) for code in codes[:-1]), decode(codes[-1], "f32")]
    return saturate(encode(ARITHMETIC[name][0](*values, mode), "f32", mode), "f32", parts)


def signs(name, parts, code, kind):
    code = flush_subnormal(code, kind) if "ftz" in parts else code
    if decode(code, kind).nan:
        return code | QUIET if kind == "f64" else NAN[kind]
    top = 1 << (width(kind) - 1)
    return code & ~top if name == "abs" else code ^ top


def extremum(name, parts, codes, kind):
    top = 1 << (width(kind) - 1)
    codes = [flush_subnormal(code, kind) for code in codes] if "ftz" in parts else list(codes)
    sizes = [code & ~top for code in codes] if "abs" in parts else codes
    numbers = [code for code in sizes if not decode(code, kind).nan]
    if not numbers or ("NaN" in parts and len(numbers) < len(sizes)):
        return sizes[-1] | QUIET if kind == "f64" else NAN[kind]
    pick = min if name == "min" else max
    found = pick(numbers, key=lambda code: (decode(code, kind).order, not code & top))  # -0 is below +0
    return found | ((codes[0] ^ codes[1]) & top if "xorsign" in parts else 0)


# ---- comparisons


def compare_values(parts, codes, kind):
    codes = [flush_subnormal(code, kind) for code in codes] if "ftz" in parts else codes
    x, y = (decode(code, kind) for code in codes)
    name, nan = parts[0], x.nan or y.nan
    if name in ("num", "nan"):
        return nan == (name == "nan")
    if nan:
        return name not in COMPARED
    return COMPARED[name.removesuffix("u") if name not in COMPARED else name](x.order, y.order)


def boolean(parts, held, c):
    operator = next((part for part in parts if part in COMBINED), None)
    return held if operator is None else COMBINED[operator](held, bool(c[0]))


def setp(parts, a, b, *c):
    kind = parts[-1]
    if kind.endswith("x2"):
        halves = [compare_values(parts, [(x >> at) & 0xFFFF for x in (a, b)], kind[:-2]) for at in (0, 16)]
        return tuple(boolean(parts, held, c) for held in halves)
    held = compare_values(parts, [a, b], kind)
    both = (held,) if kind in ("f16", "bf16") else (held, not held)
    return tuple(boolean(parts, each, c) for each in both)


def set_(parts, a, b, *c):
    kind, result = parts[-1], parts[-2]
    ones = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C00, "bf16x2": 0x3F80, "u16": 0xFFFF, "s16": 0xFFFF}
    if kind.endswith("x2"):
        low, high = setp(parts, a, b, *c)
        one = ones.get(result, 0xFFFF)
        return ((one if low else 0) | (one if high else 0) << 16,)
    return (ones.get(result, 0xFFFFFFFF) if boolean(parts, compare_values(parts, [a, b], kind), c) else 0,)


def testp(parts, a):
    value, kind = decode(a, parts[-1]), parts[-1]
    subnormal = value.size not in ("inf", "nan") and not value.zero and flush_subnormal(a, kind) != a
    return ({
        "finite": value.size not in ("inf", "nan"), "infinite": value.infinite, "number": not value.nan, "notanumber": value.nan,
        "subnormal": subnormal, "normal": value.size not in ("inf", "nan") and not subnormal,
    }[parts[0]],)  # fmt: skip


def copysign(parts, a, b):
    top = 1 << (width(parts[-1]) - 1)
    return ((a & top) | (b & ~top),)


def slct(parts, a, b, c):
    value = decode(flush_subnormal(c, "f32") if "ftz" in parts else c, "f32")
    return (a if not value.nan and value.order >= 0 else b,)


# ---- an instruction


def single(name, parts, codes, kind):
    if name in ("abs", "neg"):
        return signs(name, parts, *codes, kind)
    if name in ("min", "max"):
        return extremum(name, parts, codes, kind)
    return arithmetic(name, parts, codes, kind)


def reference(opcode):
    name, *parts = opcode.split(".")
    others = {"setp": setp, "set": set_, "testp": testp, "copysign": copysign, "slct": slct}
    if name in others:
        return lambda *values: others[name](parts, *values)
    kinds = [part for part in parts if part.removesuffix("x2") in FIELDS]
    if len(kinds) == 2:
        return lambda *values: (mixed_arithmetic(name, parts, values),)
    kind = kinds[0].removesuffix("x2")
    if kind == kinds[0]:
        return lambda *values: (single(name, parts, values, kind),)

    def packed(*values):
        bits = width(kind)
        low, high = (single(name, parts, [(x >> at) & ((1 << bits) - 1) for x in values], kind) for at in (0, bits))
        return (low | high << bits,)

    return packed
