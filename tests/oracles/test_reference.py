"""The reference itself, against what was made in another way: other libraries, a search over codes, Python's floats."""

import bisect
import math
import random
import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from support.sampling import sample_cases

from oracles import reference
from oracles.other_formats import CAST_BY_ML_DTYPES, DTYPES
from oracles.reference import FORMATS, MODES, decode, encode

FLOATS = [name for name, spec in FORMATS.items() if spec.exponent]
INTEGERS = [name for name, spec in FORMATS.items() if not spec.exponent]


def same_as_float(name: str, code: int, value: float) -> bool:
    """Whether the reference decodes a code to this float, a zero's sign included."""
    got = decode(name, code)
    if math.isnan(value):
        return got == "nan"
    if math.isinf(value):
        return got == ("inf", int(value < 0))
    return got == Fraction(value) and (value != 0 or reference.sign_bit(name, code) == int(math.copysign(1, value) < 0))


@pytest.mark.parametrize("name", [name for name in DTYPES if FORMATS[name].bits <= 16])
def test_every_code_means_what_other_libraries_say(name):
    bits = FORMATS[name].bits
    codes = np.arange(1 << bits, dtype=np.uint16 if bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):  # widening a signalling NaN
        values = codes.view(DTYPES[name]).astype(np.float64)
    assert [hex(code) for code in codes.tolist() if not same_as_float(name, code, float(values[code]))] == []


@pytest.mark.parametrize("name, code, value", [("f32", "I", "f"), ("f64", "Q", "d")])
def test_wide_codes_mean_what_struct_says(name, code, value):
    rng = random.Random(1)
    edges = [field << FORMATS[name].fraction for field in range(1 << 9)] + [1, (1 << FORMATS[name].bits - 1) - 1]
    words = [word ^ flip for word in edges for flip in (0, 1, 1 << FORMATS[name].bits - 1)]
    words += [rng.getrandbits(FORMATS[name].bits) for _ in range(20000)]
    assert [hex(w) for w in words if not same_as_float(name, w, struct.unpack(value, struct.pack(code, w))[0])] == []


def test_ignored_bits_change_nothing():
    rng = random.Random(2)
    for _ in range(2000):
        word = rng.getrandbits(32)
        assert decode("tf32", word) == decode("tf32", word & ~0x1FFF) == decode("f32", word & ~0x1FFF)
        assert decode("ue4m3", word & 0xFF) == decode("ue4m3", word & 0x7F)


# ---- encode, by looking for the neighbours among all codes


def search_code(name: str, value: Fraction, mode: str, saturate: bool) -> int:
    """What `encode` has to give for a value that is not zero, found by bisection over the magnitudes' codes and comparing distances."""
    spec = FORMATS[name]
    sign, size = int(value < 0), abs(value)
    if sign and not spec.signed:
        return 0 if saturate else (1 << spec.bits) - 1

    def at(magnitude: int) -> Fraction:
        if magnitude > spec.greatest:  # the value that the next code would have if it were not special
            last, before = at(spec.greatest), at(spec.greatest - 1)
            return 2 * last if name == "ue8m0" else 2 * last - before
        return decode(name, magnitude << spec.ignored)

    low = bisect.bisect_right(range(spec.greatest + 1), size, key=at) - 1
    if low < 0:  # below ue8m0's smallest
        return 0
    below, above = size - at(low), at(low + 1) - size
    away = {"RN": below > above or (below == above and low % 2 == 1), "RZ": False, "RM": sign == 1, "RP": sign == 0}[mode]
    found = low + (away and below != 0)
    if spec.top == "fnuz" and (found == 0 or (found > spec.greatest and not saturate)):
        return 0 if found == 0 else 1 << spec.bits - 1
    negative = sign << spec.bits - 1
    if found <= spec.greatest:
        return found << spec.ignored | negative
    if saturate or name in ("e3m2", "e2m3", "e2m1"):
        return spec.greatest << spec.ignored | negative
    special = spec.greatest + 1 if spec.top == "ieee" else (1 << spec.exponent + spec.fraction) - 1
    return special << spec.ignored | negative


def interesting(name: str, count: int, rng: random.Random) -> list[Fraction]:
    """Values at, between and just off the format's own, among them the two ends; some that no binary format holds; some far out."""
    spec = FORMATS[name]
    found = []
    magnitudes = [0, 1, 2, 1 << spec.fraction, spec.greatest - 1, spec.greatest] + [rng.randrange(spec.greatest + 1) for _ in range(count)]
    if spec.greatest < 256:
        magnitudes = list(range(spec.greatest + 1))
    for magnitude in magnitudes:
        low = decode(name, magnitude << spec.ignored)
        if magnitude < spec.greatest:
            step = decode(name, magnitude + 1 << spec.ignored) - low
        else:
            step = low if name == "ue8m0" else low - decode(name, magnitude - 1 << spec.ignored)
        found += [
            low + step * Fraction(*part)
            for part in ((0, 1), (1, 4), (1, 2), (3, 4), (1, 3), ((1 << 70) + 1, 1 << 71), ((1 << 70) - 1, 1 << 71))
        ]
    largest, smallest = decode(name, spec.greatest << spec.ignored), decode(name, 1 << spec.ignored)
    found += [largest * 2, largest * 1000, smallest / 2, smallest / 1000, smallest * Fraction(1, 3), Fraction(1, 3), Fraction(22, 7)]
    return [value for value in found if value]


@pytest.mark.parametrize("name", sample_cases(FLOATS, [name for name in list(FLOATS)[::8] if name != "f64"]))
def test_encode_finds_the_right_neighbour(name):
    values = interesting(name, 100 if FORMATS[name].bits <= 16 else 30, random.Random(name))
    for value in values + [-value for value in values]:
        for mode in MODES:
            for saturate in (False, True):
                got, want = encode(name, value, mode, saturate), search_code(name, value, mode, saturate)
                assert got == want, f"{name} {value} {mode} saturate={saturate}: {got:#x}, not {want:#x}"


@pytest.mark.parametrize("name", sample_cases(FLOATS, 6))
def test_encode_gives_back_every_code(name):
    spec = FORMATS[name]
    magnitudes = range(spec.greatest + 1) if spec.bits <= 16 else random.Random(3).sample(range(spec.greatest + 1), 2000)
    for magnitude in magnitudes:
        for sign in (0, 1) if spec.signed and (magnitude or spec.top != "fnuz") else (0,):
            code = magnitude << spec.ignored | sign << spec.bits - 1
            assert {encode(name, decode(name, code), mode, zero_sign=sign) for mode in MODES} == {code}


def test_f64_to_nearest_is_python_s_division():
    rng = random.Random(4)
    for _ in range(5000):
        value = Fraction(rng.getrandbits(90) + 1, rng.getrandbits(80) + 1) * Fraction(2) ** rng.randint(-1100, 1000)
        try:
            word = struct.unpack("<Q", struct.pack("<d", float(value)))[0]
        except OverflowError:
            word = 0x7FF0 << 48
        assert encode("f64", value) == word


@pytest.mark.parametrize("name", sample_cases(CAST_BY_ML_DTYPES, 4))
def test_encode_is_ml_dtypes_cast(name):
    """From every bf16 that is not NaN; ml_dtypes rounds to nearest, ties to even."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = codes.view(ml_dtypes.bfloat16).astype(np.float32)
        narrow = wide.astype(DTYPES[name]).view(np.uint16 if FORMATS[name].bits == 16 else np.uint8)
    for code in codes[~np.isnan(wide)].tolist():
        assert reference.convert("bf16", name, code) == narrow[code], hex(code)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_round_and_saturate(name):
    spec = FORMATS[name]
    low, high = (-(1 << spec.bits - 1), (1 << spec.bits - 1) - 1) if spec.signed else (0, (1 << spec.bits) - 1)
    rounded = {"RN": round, "RZ": math.trunc, "RM": math.floor, "RP": math.ceil}  # Python's round is to even
    for whole in {low - 3, low, low + 1, -2, -1, 0, 1, 2, high - 1, high, high + 3}:
        for part in (Fraction(0), Fraction(1, 2), Fraction(1, 3), Fraction(2, 3)):
            for mode in MODES:
                want = min(max(rounded[mode](whole + part), low), high)
                assert decode(name, encode(name, whole + part, mode)) == want


def test_specials_convert():
    assert reference.convert("f32", "f16", 0x3F800000) == 0x3C00
    expected = {  # NaN, +Inf, -Inf, +Inf saturating, -0 from f32
        "f64": ((1 << 63) - 1, 0x7FF0 << 48, 0xFFF0 << 48, (0x7FF << 52) - 1, 1 << 63),
        "f16": (0x7FFF, 0x7C00, 0xFC00, 0x7BFF, 0x8000),
        "bf16": (0x7FFF, 0x7F80, 0xFF80, 0x7F7F, 0x8000),
        "tf32": (0x7FFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FE000, 0x80000000),
        "e5m2": (0x7F, 0x7C, 0xFC, 0x7B, 0x80),
        "e4m3": (0x7F, 0x7F, 0xFF, 0x7E, 0x80),
        "e3m2": (0x1F, 0x1F, 0x3F, 0x1F, 0x20),
        "e2m3": (0x1F, 0x1F, 0x3F, 0x1F, 0x20),
        "e2m1": (0x7, 0x7, 0xF, 0x7, 0x8),
        "ue8m0": (0xFF, 0xFF, 0xFF, 0xFE, 0xFF),
        "ue4m3": (0x7F, 0x7F, 0x7F, 0x7E, 0),
        "s8": (0, 0x7F, 0x80, 0x7F, 0),
        "u4": (0, 0xF, 0, 0xF, 0),
    }
    for name, (from_nan, plus, minus, saturated, zero) in expected.items():
        assert reference.convert("f32", name, 0x7FC12345) == from_nan
        assert reference.convert("f32", name, 0x7F800000) == plus
        assert reference.convert("f32", name, 0xFF800000) == minus
        assert reference.convert("f32", name, 0x7F800000, saturate=True) == saturated
        assert reference.convert("f32", name, 0x80000000) == zero


# ---- fma and add


def words(name: str, rng: random.Random) -> int:
    """A word near others in exponent, or from the ends of the range, or any."""
    spec = FORMATS[name]
    field = rng.choice([spec.bias + rng.randint(-3, 3), rng.randrange((1 << spec.exponent) - 1), rng.randrange(3), spec.bias // 2])
    return (
        rng.getrandbits(1) << spec.bits - 1 | field << spec.fraction | rng.getrandbits(spec.fraction) & -(1 << rng.randrange(spec.fraction))
    )


@pytest.mark.parametrize("name", ["f32", pytest.param("f64", marks=pytest.mark.full)])
def test_fma_and_add_round_the_exact_sum_once(name):
    rng = random.Random(5)
    for _ in range(300):
        a, b, c = (words(name, rng) for _ in range(3))
        if rng.random() < 0.3:  # cancel all but the last bits of the product
            c = encode(name, -decode(name, a) * decode(name, b)) ^ rng.getrandbits(2)
        if any(not isinstance(decode(name, x), Fraction) for x in (a, b, c)):
            continue
        for mode in MODES:
            total = decode(name, a) * decode(name, b) + decode(name, c)
            if total:
                assert reference.fma(a, b, c, name, mode) == search_code(name, total, mode, False)
            total = decode(name, a) + decode(name, c)
            if total:
                assert reference.add(a, c, name, mode) == search_code(name, total, mode, False)


def test_zeros_nans_and_infinities_of_fma():
    one, minus_one, zero, minus_zero, inf, minus_inf = 0x3FF << 52, 0xBFF << 52, 0, 1 << 63, 0x7FF << 52, 0xFFF << 52
    quiet, signalling, invalid = 0x7FF8000000000ABC, 0xFFF0000000000123, 0xFFF8 << 48
    for mode in MODES:
        cancelled = minus_zero if mode == "RM" else zero
        for a, b, c, want in [
            (one, one, minus_one, cancelled),
            (one, zero, zero, zero),
            (minus_one, zero, minus_zero, minus_zero),
            (one, zero, minus_zero, cancelled),
            (inf, one, one, inf),
            (inf, minus_one, one, minus_inf),
            (one, one, minus_inf, minus_inf),
            (inf, one, minus_inf, invalid),
            (inf, zero, one, invalid),
            (zero, minus_inf, one, invalid),
            (inf, zero, quiet, quiet),
            (signalling, one, one, signalling | 1 << 51),
            (quiet, signalling, one, signalling | 1 << 51),
            (signalling, quiet, signalling, quiet),
            (quiet, one, signalling, signalling | 1 << 51),
        ]:
            assert reference.fma(a, b, c, "f64", mode) == want
    assert reference.fma(0x7FC00001, 0x3F800000, 0, "f32") == 0x7FFFFFFF
    assert reference.fma(0x7F800000, 0, 0, "f32") == 0x7FFFFFFF


def test_zeros_nans_and_infinities_of_add():
    for mode in MODES:
        assert reference.add(0x8000, 0x8000, "f16", mode) == 0x8000
        assert reference.add(0x8000, 0x0000, "f16", mode) == (0x8000 if mode == "RM" else 0)
        assert reference.add(0x3C00, 0xBC00, "f16", mode) == (0x8000 if mode == "RM" else 0)
        assert reference.add(0x7C00, 0xFC00, "f16", mode) == reference.add(0x7C01, 0x3C00, "f16", mode) == 0x7FFF
        assert reference.add(0xFC00, 0x3C00, "f16", mode) == 0xFC00


@pytest.mark.parametrize("name", ["f16", "f32"])
def test_add_to_nearest_is_numpy_s(name):
    rng = random.Random(6)
    dtype, word = {"f16": (np.float16, np.uint16), "f32": (np.float32, np.uint32)}[name]
    pairs = np.array([[words(name, rng), words(name, rng)] for _ in range(5000)], word).view(dtype)
    with np.errstate(over="ignore"):
        sums = pairs[:, 0] + pairs[:, 1]
    for (x, y), want in zip(pairs.view(word).tolist(), sums.view(word).tolist(), strict=True):
        assert reference.add(x, y, name) == want
