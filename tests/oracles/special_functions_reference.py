"""The special function unit a second time, in NumPy's int64 and f64, after the description of ptx-math; tanh after our table. It shares
the tables and no function.

Powers of two scale f64 numbers exactly, and NumPy neither flushes subnormals nor fuses operations, so that the only roundings are those
written here.
"""

from __future__ import annotations

import numpy as np

from tcemu.engine.arithmetic.special_function_tables import TABLES, TANH

CANONICAL = 0x7FFFFFFF
LEAST_NORMAL = 2.0**-126
SMALL, LARGE = 2.0**-126, 2.0**126


def omit_cheap_columns(number: np.ndarray) -> np.ndarray:
    """The square, less the partial products whose weight is below 2^19: bit by bit."""
    bit = [(number >> i) & 1 for i in range(18)]
    square = number * number
    for i in range(18):
        if 2 * i < 19:
            square = square - (bit[i] << (2 * i))
        for j in range(i + 1, 18):
            if i <= 8 and i + j + 1 < 19:
                square = square - ((bit[i] & bit[j]) << (i + j + 1))
    return square


def polynomial(name: str, row: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """The sum s of a table, int64."""
    table = TABLES[name]
    c0, c1, c2 = (np.array(column, np.int64)[row] for column in zip(*table.rows, strict=True))
    square = omit_cheap_columns(2 * rest) >> 2 if name == "rcp" else omit_cheap_columns(rest)
    first, second = {"ex2": (1, 1), "lg2": (1, -1), "rcp": (-1, 1), "rsqrt": (-1, 1), "sqrt": (1, -1), "sin": (1, -1)}[name]
    return (c0 << table.c0_shift) + first * ((c1 * rest) << table.c1_shift) + second * (c2 * square) + (table.bias >> (87 - table.weight))


def split_fraction(name: str, fraction: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rest_bits = 23 - TABLES[name].index_bits
    return fraction >> rest_bits, fraction & ((1 << rest_bits) - 1)


def fraction_of(name: str, total: np.ndarray) -> np.ndarray:
    """1.f as f64, from the 23 bits below the bit that stands for one."""
    return 1 + ((total >> (TABLES[name].weight - 23)) & 0x7FFFFF) * 2.0**-23


def as_floats(codes: np.ndarray, flush: bool) -> np.ndarray:
    """f64 numbers; with flush, subnormals are zeros of their sign."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        numbers = np.asarray(codes, np.uint32).view(np.float32).astype(np.float64)
    return np.where(np.abs(numbers) < LEAST_NORMAL, np.copysign(0.0, numbers), numbers) if flush else numbers


def as_codes(numbers: np.ndarray, flush: bool) -> np.ndarray:
    """f32 codes, rounded to nearest even, every NaN the canonical one; with flush, subnormals become zeros."""
    with np.errstate(over="ignore", under="ignore"):
        if flush:
            numbers = np.where(np.abs(numbers) < LEAST_NORMAL, np.copysign(0.0, numbers), numbers)
        rounded = numbers.astype(np.float32)
    return np.where(np.isnan(rounded), np.uint32(CANONICAL), rounded.view(np.uint32))


def significand_and_exponent(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 23 fraction bits and the exponent of positive finite numbers; 1 where there is none."""
    usable = np.isfinite(numbers) & (numbers > 0)
    mantissa, exponent = np.frexp(np.where(usable, numbers, 1.0))
    return ((mantissa * 2 - 1) * 2**23).astype(np.int64), exponent.astype(np.int64) - 1


def rcp_numbers(x: np.ndarray) -> np.ndarray:
    fraction, exponent = significand_and_exponent(np.abs(x))
    total = polynomial("rcp", *split_fraction("rcp", fraction))
    one = (total >> TABLES["rcp"].weight) & 1
    value = fraction_of("rcp", np.where(one == 1, total, total << 1))
    value = np.ldexp(value, (-exponent - (1 - one)).astype(np.int32))
    with np.errstate(divide="ignore"):
        special = np.where(np.isinf(x), 0.0, np.where(x == 0, np.inf, value))
    return np.where(np.isnan(x), np.nan, np.copysign(special, x))


def rsqrt_numbers(x: np.ndarray) -> np.ndarray:
    fraction, exponent = significand_and_exponent(x)
    row, rest = split_fraction("rsqrt", fraction)
    odd = exponent % 2
    total = polynomial("rsqrt", row + 64 * odd, rest)
    value = fraction_of("rsqrt", total << 1) / 2
    value = np.where((fraction == 0) & (odd == 0), 1.0, value)
    value = np.ldexp(value, (-(exponent - odd) // 2).astype(np.int32))
    value = np.where(x == np.inf, 0.0, np.where(x < 0, np.nan, value))
    return np.where(x == 0, np.copysign(np.inf, x), np.where(np.isnan(x), np.nan, value))


def sqrt_numbers(x: np.ndarray) -> np.ndarray:
    fraction, exponent = significand_and_exponent(x)
    row, rest = split_fraction("sqrt", fraction)
    odd = exponent % 2
    value = np.ldexp(fraction_of("sqrt", polynomial("sqrt", row + 64 * odd, rest)), ((exponent - odd) // 2).astype(np.int32))
    value = np.where(np.isinf(x), np.inf, value)
    return np.where(x == 0, x, np.where((x < 0) | np.isnan(x), np.nan, value))


def lg2_numbers(x: np.ndarray) -> np.ndarray:
    fraction, exponent = significand_and_exponent(x)
    total = (exponent << TABLES["lg2"].weight) + polynomial("lg2", *split_fraction("lg2", fraction))
    size = np.abs(total) >> 20 << 20
    _, length = np.frexp(size.astype(np.float64))
    # f64 rounds the conversion of more than 53 bits up to a power of two at most; the length is then one too large
    length = np.where(size >> np.maximum(length - 1, 0) == 0, length - 1, length)
    dropped = np.maximum(length - 24, 0)
    value = np.ldexp((size >> dropped).astype(np.float64), (dropped - TABLES["lg2"].weight).astype(np.int32))
    value = np.where(x == 1, 0.0, np.where(total < 0, -value, value))
    value = np.where(np.isinf(x), np.inf, value)
    return np.where(x == 0, -np.inf, np.where((x < 0) | np.isnan(x), np.nan, value))


def ex2_numbers(x: np.ndarray) -> np.ndarray:
    finite = np.isfinite(x) & (np.abs(x) < 200)
    size = np.where(finite, np.abs(x), 0.0)
    integer = np.floor(size).astype(np.int64)
    fraction = np.floor((size - integer) * 2**23).astype(np.int64)
    below = (x < 0) & (fraction != 0)
    integer = np.where(x < 0, -integer, integer) - below
    fraction = np.where(below, 0x7FFFFF - fraction, fraction)
    value = np.ldexp(fraction_of("ex2", polynomial("ex2", *split_fraction("ex2", fraction))), integer.astype(np.int32))
    value = np.where(x >= 128, np.inf, np.where(x <= -128, 0.0, value))
    return np.where(np.isnan(x), np.nan, np.where(value < LEAST_NORMAL, 0.0, value))


def sine_numbers(x: np.ndarray, cosine: bool) -> np.ndarray:
    finite = np.where(np.isfinite(x), x, 0.0)
    turns = np.abs(finite) * float(np.uint32(0x3E22F983).view(np.float32))  # 48 bits: exact
    mantissa, exponent = np.frexp(turns)
    turns = np.ldexp(np.floor(np.ldexp(mantissa, 24)), exponent - 24)  # rounded toward zero to f32
    quarters = np.fmod(turns, 1.0) * 4
    quadrant = np.floor(quarters).astype(np.int64)
    fraction = np.floor((quarters - quadrant) * 2**23).astype(np.int64)
    if cosine:
        fraction = np.where(quadrant % 2 == 0, 0x7FFFFF - fraction, fraction)
        negative = ((quadrant + 1) & 2) != 0
    else:
        fraction = np.where(quadrant % 2 == 1, 0x7FFFFF - fraction, fraction)
        negative = ((quadrant & 2) != 0) ^ np.signbit(x)
    total = polynomial("sin", *split_fraction("sin", fraction))
    _, length = np.frexp(total.astype(np.float64))
    dropped = np.maximum(length - 24, 0)
    value = np.ldexp((total >> dropped).astype(np.float64), dropped - TABLES["sin"].weight)
    return np.where(np.isfinite(x), np.where(negative, -value, value), np.nan)


def tanh_numbers(x: np.ndarray) -> np.ndarray:
    """tanh x, an exponent and a row at a time: below 2^-8 x itself, from 8 on one."""
    value = np.where(np.abs(x) < 2.0**-8, np.abs(x), 1.0)
    fraction, exponent = significand_and_exponent(np.abs(x))
    for group, rows in TANH.items():
        width = (1 << 23) // len(rows)  # significands of a row
        for index, (c0, c1, c2) in enumerate(rows):
            here = (exponent == group) & (fraction // width == index) & np.isfinite(x) & (x != 0)
            rest = fraction[here] % width * 2**17 // width
            exact = c0 * 2.0**-24 + c1 * rest * 2.0**-39 - c2 * omit_cheap_columns(rest) * 2.0**-57  # multiples of 2^-39: exact in f64
            mantissa, place = np.frexp(exact)
            value[here] = np.ldexp(np.floor(np.ldexp(mantissa, 24)), place - 24)
    return np.where(np.isnan(x), np.nan, np.copysign(value, x))


NUMBERS = {
    "tanh": tanh_numbers,
    "rcp": rcp_numbers,
    "rsqrt": rsqrt_numbers,
    "sqrt": sqrt_numbers,
    "sin": lambda x: sine_numbers(x, False),
    "cos": lambda x: sine_numbers(x, True),
}


def unary(name: str, codes: np.ndarray, flush: bool) -> np.ndarray:
    """The codes of one function of f32 codes."""
    x = as_floats(codes, flush)
    if name == "ex2":
        if flush:
            return as_codes(ex2_numbers(as_floats(codes, True)), True)
        small = x < -126
        # the unit takes a subnormal as zero, also without .ftz
        root = ex2_numbers(np.where(small, x / 2, as_floats(codes, True)))
        return as_codes(np.where(small, root * root, root), False)
    if name == "lg2":
        value = lg2_numbers(x)
        subnormal = (x > 0) & (x < LEAST_NORMAL)
        shifted = lg2_numbers(np.where(subnormal, x * 2.0**24, 1.0)) - 24  # exact in f64; rounded to f32 below
        return as_codes(np.where(subnormal, shifted, value), flush)
    return as_codes(NUMBERS[name](x), flush)


def divide(name: str, a: np.ndarray, b: np.ndarray, flush: bool) -> np.ndarray:
    """The codes of div.approx or div.full of f32 codes, each multiplication rounded to f32."""
    x, y = (as_floats(codes, flush).astype(np.float32) for codes in (a, b))
    size = np.abs(y)

    def multiply(p: np.ndarray, q: np.ndarray | np.floating) -> np.ndarray:
        with np.errstate(all="ignore"):
            product = p.astype(np.float64) * q.astype(np.float64)  # exact
            if flush:  # whether a result is subnormal is decided after rounding to 24 bits
                small = np.abs(product) < 1
                product = np.where(small, (product * 2.0**100).astype(np.float32) * 2.0**-100, product)
            return as_codes(product, flush).view(np.float32)

    if name == "div.full":
        quarter = np.float32(0.25)
        x, y = (np.where(size > np.float32(LARGE), multiply(v, quarter), v) for v in (x, y))
    if not flush:
        scale = np.float32(2.0**24)
        x, y = (np.where(size < np.float32(SMALL), multiply(v, scale), v) for v in (x, y))
    reciprocal = as_codes(rcp_numbers(as_floats(y.view(np.uint32), True)), True).view(np.float32)
    return as_codes(multiply(reciprocal, x).astype(np.float64), flush)
