"""What cvt gives, by fractions of Python's integers and, for formats of 8 bits and fewer, by ml_dtypes. It shares nothing with tcemu."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np

from oracles.ptx_float_reference import FIELDS, Value, decode, encode, flush_subnormal, round_to_integer, rounding_mode, saturate, width

INTEGERS = tuple(f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64))
TO_INTEGER = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}
NARROW = {
    "e4m3x2": (ml_dtypes.float8_e4m3fn, 8, 448.0), "e5m2x2": (ml_dtypes.float8_e5m2, 8, 57344.0),
    "e2m1x2": (ml_dtypes.float4_e2m1fn, 4, 6.0), "e2m3x2": (ml_dtypes.float6_e2m3fn, 8, 7.5), "e3m2x2": (ml_dtypes.float6_e3m2fn, 8, 28.0),
}  # fmt: skip
SINGLES = {"f32": (np.uint32, np.float32), "f16x2": (np.uint16, np.float16), "bf16x2": (np.uint16, ml_dtypes.bfloat16)}


def integer(x, kind):
    bits = int(kind[1:])
    return x - (1 << bits) if kind[0] == "s" and x >> (bits - 1) else x


def limits(kind):
    bits = int(kind[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def round_value_to_integer(value, mode):
    """A float rounded to an integer, still a float."""
    if value.size in ("nan", "inf"):
        return value
    return Value(value.negative, Fraction(round_to_integer(value.size, mode, value.negative)))


def nan_word(a, to, of, parts):
    """NaNs keep their upper bits in f64's conversions and where nothing is computed."""
    if not parts[:-2] and (to, of) in (("f32", "f32"), ("f64", "f64"), ("f32", "bf16")):
        return a << (width(to) - width(of))
    if "f64" not in (to, of):
        return encode(Value(False, "nan"), to)
    a = 0x7FFFFFFF if "ftz" in parts and of == "f32" else a
    of_bits, to_bits = FIELDS[of][1], FIELDS[to][1]
    fraction = (a & ((1 << of_bits) - 1)) << 64 >> of_bits << to_bits >> 64
    top = a >> (width(of) - 1) << (width(to) - 1)
    return top | ((1 << FIELDS[to][0]) - 1) << to_bits | fraction | 1 << (to_bits - 1)


def scalar(parts, a):
    to, of = parts[-2:]
    mode = next((part for part in parts if part in TO_INTEGER), None)
    if of in INTEGERS:
        value = integer(a, of)
        if to in INTEGERS:
            low, high = limits(to)
            return ((max(low, min(high, value)) if "sat" in parts else value) % (1 << int(to[1:])),)
        return (saturate(encode(Value(value < 0, Fraction(abs(value))), to, rounding_mode(parts)), to, parts),)
    a = flush_subnormal(a, of) if "ftz" in parts and of == "f32" and to != "f16" else a
    value = decode(a, of)
    if to in INTEGERS:
        low, high = limits(to)
        if value.nan:
            return ((1 << (int(to[1:]) - 1)) if to[1:] == "64" or of == "f64" else 0,)
        value = round_value_to_integer(value, TO_INTEGER[mode])
        found = (low if value.negative else high) if value.infinite else max(low, min(high, int(value.number)))
        return (found % (1 << int(to[1:])),)
    value = round_value_to_integer(value, TO_INTEGER[mode]) if mode else value
    code = nan_word(a, to, of, parts) if value.nan else encode(value, to, rounding_mode(parts), "ftz" in parts and to == "f32")
    return (finish_code(code, to, parts),)


def finish_code(code, kind, parts):
    value = decode(code, kind)
    if "satfinite" in parts and value.infinite:
        code -= 1
    return saturate(code, kind, parts)


def pair(parts, a, b):
    kind = parts[-2].removesuffix("x2")
    high, low = (finish_code(encode(decode(x, "f32"), kind, rounding_mode(parts)), kind, parts) for x in (a, b))
    return (low | high << 16,)


def tf32(parts, a):
    value, sign = decode(a, "f32"), a >> 31 << 31
    mode = next(part for part in parts if part in ("rna", "rn", "rz"))
    if value.nan and mode != "rna":
        return (0x7FFFE000,)
    size = a & 0x7FFFFFFF
    size = size if value.size in ("nan", "inf") else round_to_integer(Fraction(size, 1 << 13), mode, False) << 13
    size = size >> 13 << 13
    if "satfinite" in parts and size >= 0x7F800000:
        size -= 1 << 13
    return (0 if "relu" in parts and sign and not value.nan else sign | size,)


def narrow(parts, *codes):
    to, of = parts[-2:]
    if of != "f32":
        codes = (codes[0] >> 16, codes[0] & 0xFFFF)
    held, number = SINGLES[of]
    values = np.array(codes, held).view(number).astype(np.float32)
    if to == "ue8m0x2":
        high, low = (scale(parts, abs(float(x))) for x in values)
        return (low | high << 8,)
    dtype, step, greatest = NARROW[to]
    values = np.where((values < 0) | (values == 0) & np.signbit(values), np.float32(0), values) if "relu" in parts else values
    nan = np.isnan(values)
    codes = np.clip(np.where(nan, greatest, values), -greatest, greatest).astype(dtype).view(np.uint8)
    codes = np.where(nan & (dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)), 0x7F, codes)
    return (int(codes[1]) | int(codes[0]) << step,)


def scale(parts, x):
    """The exponent field of the power of two below, or above, a number from 0."""
    if x != x:
        return 0xFF
    if x == np.inf:
        return 0xFE if "satfinite" in parts else 0xFF
    field = 0
    while field < 0xFF and (Fraction(2) ** (field + 1 - 127) <= x or ("rp" in parts and Fraction(2) ** (field - 127) < x)):
        field += 1
    return min(field, 0xFE) if "satfinite" in parts else field


def wide(parts, a, scale=None):
    to, of = parts[-2:]
    if of == "s2f6x2":
        values = [Fraction(integer(a >> at & 255, "s8"), 64) for at in (0, 8)]
    else:
        dtype, step = (ml_dtypes.float8_e8m0fnu, 8) if of == "ue8m0x2" else NARROW[of][:2]
        bits = {"e2m1x2": 4, "e2m3x2": 6, "e3m2x2": 6}.get(of, 8)
        elements = np.array([a, a >> step], np.uint32) & ((1 << bits) - 1)
        values = [float(x) for x in elements.astype(np.uint8).view(dtype).astype(np.float32)]
    codes = []
    for at, x in enumerate(values):
        factor = 127 if scale is None else scale >> 8 * at & 255
        negative = str(x).startswith("-")
        size = "nan" if x != x or factor == 255 else "inf" if abs(x) == np.inf else Fraction(abs(x)) * Fraction(2) ** (factor - 127)
        kind = to.removesuffix("x2")
        codes.append(finish_code(encode(Value(negative and size != "nan", size), kind, "rn"), kind, parts))
    return (codes[0] | codes[1] << 16,)


def convert_packed(parts, a, b, *c):
    low, high = limits(parts[2])
    bits = int(parts[2][1:])
    upper, lower = (max(low, min(high, integer(x, "s32"))) % (1 << bits) for x in (a, b))
    return ((upper << bits | lower | (c[0] << 2 * bits if c else 0)) % (1 << 32),)


def reference(opcode):
    parts = opcode.split(".")[1:]
    if parts[0] == "pack":
        return lambda *values: convert_packed(parts, *values)
    to, of = parts[-2:]
    if to == "tf32":
        function = tf32
    elif of in NARROW or of in ("ue8m0x2", "s2f6x2"):
        function = wide
    elif to in NARROW or to == "ue8m0x2":
        function = narrow
    else:
        function = pair if to.endswith("x2") else scalar
    return lambda *values: function(parts, *values)
