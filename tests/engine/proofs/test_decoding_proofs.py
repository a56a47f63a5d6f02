"""Proofs of `arithmetic.step.decoding` and `specials`: every code of every format, against the reference of Python integers."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np
import pytest
from oracles import reference
from proof_records import ENUMERATION, SOLVER, proves
from proving import prove
from smt_values import SmtValue, Trace
from support.numpy_values import NumpyValue

from tcemu.engine.arithmetic.step import decoding, specials
from tcemu.formats import F16, F32, FORMATS, TF32, UE8M0, Format

FLOATS = [fmt for fmt in FORMATS.values() if not fmt.is_integer and fmt.bits <= 32]
SHORT = [fmt for fmt in FLOATS if fmt.bits <= 16]
SCALED = [fmt for fmt in SHORT if fmt.bits <= 8 and fmt.signed]


def every_code(fmt: Format) -> NumpyValue:
    """All codes, with ones above the format's width, which mean nothing."""
    codes = np.arange(1 << fmt.bits, dtype=np.int32)
    return NumpyValue(codes | np.where(codes % 3 == 0, -1 << fmt.bits, 0).astype(np.int32) if fmt.bits < 32 else codes)


@lru_cache(maxsize=2)
def expected(fmt: Format) -> dict[str, np.ndarray]:
    """What the reference says of all codes of a format."""
    rows = [reference.parts(fmt.name, int(code)) for code in range(1 << fmt.bits)]
    kind, sign, size, exponent = (np.array(column) for column in zip(*rows, strict=True))
    return {"nan": kind == "nan", "infinite": kind == "inf", "negative": sign == 1, "size": size, "exponent": exponent}


def check_decoding(fmt: Format, codes: NumpyValue) -> None:
    wanted = expected(fmt)
    x = decoding.decode(fmt, codes)
    special = wanted["nan"] | wanted["infinite"]
    finite, never = ~special, np.zeros(len(special), bool)
    assert ((x.special.array if x.special is not None else never) == special).all()
    assert ((x.infinite.array if x.infinite is not None else never) == wanted["infinite"]).all()
    assert (x.zero.array == (finite & (wanted["size"] == 0))).all()
    if x.negative is None:
        assert not wanted["negative"].any()
    else:
        assert (x.negative.array == -wanted["negative"].astype(np.int32)).all()
    assert (x.exponent.array[finite] - decoding.BIAS == wanted["exponent"][finite]).all()
    assert (decoding.significand(fmt, x).array[finite] == wanted["size"][finite]).all()
    value = np.ldexp(wanted["size"].astype(np.float64), wanted["exponent"] - fmt.mantissa_bits)
    is_fnuz_zero = never if fmt.specials != "fnuz" else wanted["nan"] | (wanted["size"] == 0)
    counts = finite & ~is_fnuz_zero & ((value == 0) | (value >= 2.0**-126))
    word = decoding.value_word(fmt, x).array.view(np.float32)
    assert (word[counts] == value[counts]).all()
    fraction = decoding.fraction_bits(fmt, x).array.view(np.float32).astype(np.float64)
    nonzero = finite & (value != 0)
    assert (np.ldexp(fraction, wanted["exponent"])[nonzero] == value[nonzero]).all()
    assert ((fraction[nonzero] < 2) & (fraction[nonzero] >= 2.0**-126)).all()


DECODED = ("decoding.decode", "decoding.sign_mask", "decoding.value_word", "decoding.significand", "decoding.fraction_bits")


@proves(*DECODED, by=ENUMERATION, domain="every code of every format of at most 16 bits, with any bits above")
@pytest.mark.parametrize("fmt", SHORT, ids=str)
def test_every_code_is_decoded(fmt):
    check_decoding(fmt, every_code(fmt))


@proves(*DECODED, by=SOLVER, domain="all 2^32 codes of tf32 and f32")
@pytest.mark.parametrize("fmt", [TF32, F32], ids=str)
def test_every_word_is_decoded(fmt):
    trace = Trace()
    code = trace.variable(decoding.I32, "code")
    x = decoding.decode(fmt, code)
    assert x.negative is not None and x.special is not None and x.infinite is not None
    field, fraction = (code >> 23) & 0xFF, (code & 0x7FFFFF) >> fmt.unused_bits
    size = (field == 0).select(fraction, fraction | 1 << fmt.mantissa_bits)
    claim = (x.special ^ (field != 255)) & (x.infinite ^ ~((field == 255) & (fraction == 0)))
    claim = claim & (x.zero ^ ~((field == 0) & (fraction == 0))) & (x.negative == (code < 0).resize(decoding.I32))
    is_value = decoding.value_word(fmt, x) == (field << 23) | (fraction << fmt.unused_bits)
    is_fraction = decoding.fraction_bits(fmt, x).as_float() * 2.0**fmt.mantissa_bits == size.to_float()
    is_number = (x.exponent == field.max(1)) & (decoding.significand(fmt, x) == size) & is_fraction
    prove(trace, claim & ((field == 255) | (is_number & (is_value | (field == 0) & (fraction != 0)))))


@proves(
    "decoding.decode_factor",
    "decoding.special_word",
    "decoding.with_sign_bit",
    by=ENUMERATION,
    domain="every code of every format of at most 16 bits",
)
@pytest.mark.parametrize("fmt", SHORT, ids=str)
def test_every_factor_is_decoded(fmt):
    check_factor(fmt, every_code(fmt), None)


@proves("decoding.decode_factor", by=ENUMERATION, domain="every code of every format of at most 8 bits with all 256 scales of ue8m0")
@pytest.mark.parametrize("fmt", SCALED, ids=str)
def test_every_factor_with_every_scale_is_decoded(fmt):
    for scale in range(256):
        check_factor(fmt, every_code(fmt), scale)


def check_factor(fmt: Format, codes: NumpyValue, scale: int | None) -> None:
    wanted = expected(fmt)
    x = decoding.decode_factor(fmt, codes, None if scale is None else NumpyValue(np.full(len(codes.array), scale, np.int32)))
    nan = wanted["nan"] | (scale == 255)
    infinite = wanted["infinite"] & ~nan
    special = nan | infinite
    zero = ~special & (wanted["size"] == 0)
    fraction = x.fraction.array.astype(np.float64)
    assert (x.special.array == special).all()
    assert (np.isnan(fraction) == nan).all() and (np.isinf(fraction) == infinite).all()
    assert ((fraction[zero] == 0).all()) and (x.exponent.array[zero | special] == decoding.ZERO_EXPONENT).all()
    number = ~special & ~zero
    exponent = wanted["exponent"] + (0 if scale is None else int(reference.parts("ue8m0", scale)[3]))
    assert (x.exponent.array[number] == exponent[number]).all()
    size = np.ldexp(wanted["size"].astype(np.float64), -fmt.mantissa_bits)
    assert (np.abs(fraction[number]) == size[number]).all()
    signed = number | infinite
    assert (np.signbit(fraction[signed]) == wanted["negative"][signed]).all()


@proves("decoding.decode_accumulator", "decoding.exponent_field", by=SOLVER, domain="all codes of f16 and all 2^32 of f32")
@pytest.mark.parametrize("fmt", [F16, F32], ids=str)
def test_every_accumulator_is_decoded(fmt):
    trace = Trace()
    code = trace.variable(decoding.I32, "code")
    x = decoding.decode_accumulator(fmt, code)
    field, fraction, top = fields_of(fmt, code)
    size = (field == top).select(0, (field == 0).select(fraction, fraction | 1 << fmt.mantissa_bits))
    is_nan = (field == top) & (fraction != 0)
    is_negative = code & decoding.sign_bit(fmt) != 0
    claim = (x.significand == size) & (x.special ^ (field != top)) & (x.code == is_nan.select(fmt.nan, code))
    claim = claim & (is_nan | (x.negative == is_negative.resize(decoding.I32)))
    claim = claim & (x.exponent == (size == 0).select(decoding.ZERO_EXPONENT, field.max(1) - fmt.bias))
    prove(trace, claim, *([] if fmt == F32 else [code >= 0, code < 1 << 16]))


def fields_of(fmt: Format, code: SmtValue) -> tuple[SmtValue, SmtValue, int]:
    """The exponent field and the fraction of a code, and the largest field."""
    top = (1 << fmt.exponent_bits) - 1
    return (code >> fmt.mantissa_bits) & top, code & ((1 << fmt.mantissa_bits) - 1), top


# ---- rule 8

CLASSES = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan], np.float32)


def sum_class(numbers: tuple[float, ...]) -> str:
    """What rule 8 says of a sum: "nan", "inf", "-inf", or "finite"."""
    infinite = {x for x in numbers if np.isinf(x)}
    if any(np.isnan(x) for x in numbers) or len(infinite) == 2:
        return "nan"
    return "finite" if not infinite else "inf" if infinite == {np.float32(np.inf)} else "-inf"


def product_of(x: float, y: float) -> float:
    """A product by rule 8, in Python."""
    if np.isnan(x) or np.isnan(y) or (np.isinf(x) and y == 0) or (np.isinf(y) and x == 0):
        return float("nan")
    return float(x) * float(y)


@proves(
    "specials.add_specials",
    "specials.own_special",
    "specials.sum_products",
    "specials.is_special",
    "specials.special_code",
    "specials.code_of_class",
    by=ENUMERATION,
    domain="every class of up to three products and of the accumulator, f16 and f32; with more by induction",
)
@pytest.mark.parametrize("count", [1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_sums_with_infinities_and_nan(count):
    """A sum of two sums has the class that rule 8 gives to all their terms, so three products stand for any number."""
    own = np.array([0.0, -0.0, 3.5, -1e30, np.inf, -np.inf, np.nan], np.float32)
    factors = list(product(range(7), repeat=2 * count + 1))
    index = np.array(factors).T
    code = NumpyValue(own[index[0]].view(np.int32))
    products = [NumpyValue(CLASSES[index[1 + 2 * at]]) * NumpyValue(CLASSES[index[2 + 2 * at]]) for at in range(count)]
    total = specials.add_specials(code, products)
    table = [[product_of(x, y) for y in CLASSES] for x in CLASSES]
    found = [sum_class((float(own[row[0]]), *(table[row[1 + 2 * at]][row[2 + 2 * at]] for at in range(count)))) for row in factors]
    wanted = np.array(found)
    assert (specials.is_special(total).array == (wanted != "finite")).all()
    special = wanted != "finite"
    for fmt in (F16, F32):
        codes = {"nan": fmt.nan, "inf": fmt.infinity, "-inf": fmt.infinity | 1 << (fmt.bits - 1)}
        exact = np.array([codes.get(name, 77) for name in wanted], np.int64)
        code = specials.code_of_class(fmt, total, total.constant(77, decoding.I32)).array.astype(np.int64)
        assert (code & (1 << fmt.bits) - 1 == exact).all()
    word = specials.special_code(total, F32.nan).array.astype(np.int64) & 0xFFFFFFFF
    assert (word[special] == exact[special]).all()


@proves("specials.factor_class", by=ENUMERATION, domain="every code of every format of at most 16 bits")
@pytest.mark.parametrize("fmt", SHORT, ids=str)
def test_classes_of_factors(fmt):
    codes, wanted = every_code(fmt), expected(fmt)
    x = decoding.decode(fmt, codes)
    special = codes.never() if x.special is None else x.special
    infinite = codes.never() if x.infinite is None else x.infinite
    value = specials.factor_class(special, infinite, x.zero, x.negative).array
    size = np.where(wanted["nan"], np.nan, np.where(wanted["infinite"], np.inf, np.where(wanted["size"] == 0, 0, 1)))
    assert np.array_equal(np.abs(value), size.astype(np.float32), equal_nan=True)
    signed = ~wanted["nan"]
    assert (np.signbit(value)[signed] == wanted["negative"][signed]).all()


@proves("specials.special_value", by=SOLVER, domain="all codes of f16 and all 2^32 of f32")
@pytest.mark.parametrize("fmt", [F16, F32], ids=str)
def test_special_values_of_results(fmt):
    trace = Trace()
    code = trace.variable(decoding.I32, "code")
    field, fraction, top = fields_of(fmt, code)
    word = specials.special_value(fmt, code).bits()
    sign = (code & decoding.sign_bit(fmt) != 0).select(code.constant(decoding.SIGN), 0)
    is_nan = word & 0x7FFFFFFF > F32.infinity
    exact = (field == top).select((fraction == 0).select(word == sign | F32.infinity, is_nan), word == 0)
    prove(trace, exact)


# ---- factors in integers


def marked(fmt: Format, codes: np.ndarray, with_sign: bool) -> tuple[np.ndarray, np.ndarray]:
    """Significands and exponents of all codes, specials marked."""
    wanted = expected(fmt)
    special = wanted["nan"] | wanted["infinite"]
    size = np.where(special, wanted["infinite"], wanted["size"])
    size = np.where(wanted["negative"] & with_sign, -size, size)
    zero = ~special & (wanted["size"] == 0)
    return size, np.where(special, decoding.SPECIAL_EXPONENT, np.where(zero, decoding.ZERO_EXPONENT, wanted["exponent"]))


@proves(
    "decoding.mark_magnitude",
    "decoding.mark_factor",
    "specials.marked_class",
    by=ENUMERATION,
    domain="every code of every format of at most 16 bits",
)
@pytest.mark.parametrize("fmt", SHORT, ids=str)
def test_every_factor_is_marked(fmt):
    codes = every_code(fmt)
    for with_sign, mark in ((False, decoding.mark_magnitude), (True, decoding.mark_factor)):
        x, (size, exponent) = mark(fmt, codes), marked(fmt, codes.array, with_sign)
        assert (x.significand.array == size).all() and (x.exponent.array == exponent).all()
    x, wanted = decoding.mark_factor(fmt, codes), expected(fmt)
    value = specials.marked_class(x).array
    size = np.where(wanted["nan"], np.nan, np.where(wanted["infinite"], np.inf, np.where(wanted["size"] == 0, 0, 1)))
    sign = np.where(wanted["negative"] & (size != 0), -1, 1)
    assert np.array_equal(value, (size * sign).astype(np.float32), equal_nan=True)


@proves(
    "decoding.convert_magnitude",
    by=ENUMERATION,
    domain="every code of every format that another one of at most 16 bits can represent, and f32",
)
@pytest.mark.parametrize("source", SHORT, ids=str)
def test_magnitudes_are_converted(source):
    codes = every_code(source)
    x = decoding.mark_magnitude(source, codes)
    for target in FLOATS:
        if not target.can_represent(source) or not source.subnormals:
            continue
        y = decoding.convert_magnitude(source, target, x)
        plain = (x.exponent.array != decoding.ZERO_EXPONENT) & (x.exponent.array != decoding.SPECIAL_EXPONENT)
        assert (y.exponent.array[~plain] == x.exponent.array[~plain]).all() and (
            y.significand.array[~plain] == x.significand.array[~plain]
        ).all()
        size, exponent = y.significand.array[plain].astype(np.int64), y.exponent.array[plain].astype(np.int64)
        before = x.significand.array[plain].astype(np.float64), x.exponent.array[plain] - source.mantissa_bits
        assert (np.ldexp(size.astype(np.float64), exponent - target.mantissa_bits) == np.ldexp(*before)).all()
        hidden = 1 << target.mantissa_bits
        assert ((size < 2 * hidden) & ((size >= hidden) | (exponent == target.min_exponent))).all()


@proves(
    "decoding.scale_factor",
    by=ENUMERATION,
    domain="e2m1 and the formats of 8 bits and fewer with every code of ue8m0, ue4m3 and ue5m3, summed in groups and not",
)
@pytest.mark.parametrize("fmt", SCALED, ids=str)
def test_every_factor_is_scaled(fmt):
    codes = every_code(fmt)
    x, (size, exponent) = decoding.mark_factor(fmt, codes), marked(fmt, codes.array, True)
    plain = (exponent != decoding.ZERO_EXPONENT) & (exponent != decoding.SPECIAL_EXPONENT)
    for scale, summed in ((UE8M0, False), *((name, True) for name in (UE8M0, FORMATS["ue4m3"], FORMATS["ue5m3"]) if fmt.bits <= 4)):
        of_size, of_exponent = marked(scale, np.arange(1 << scale.bits), False)
        for code in range(1 << scale.bits):
            y = decoding.scale_factor(fmt, scale, summed, x, NumpyValue(np.full(len(codes.array), code, np.int32)))
            special = of_exponent[code] == decoding.SPECIAL_EXPONENT
            if special:
                assert (y.exponent.array == decoding.SPECIAL_EXPONENT).all() and (y.significand.array == 0).all()
                continue
            more = np.where(plain, exponent - fmt.min_exponent, 0)
            wanted = np.where(plain, (size << more) * of_size[code], size) if summed else size
            assert (y.significand.array == wanted).all()
            assert (y.exponent.array == np.where(plain, of_exponent[code] + (0 if summed else exponent), exponent)).all()


@proves("specials.canonical_code", by=SOLVER, domain="all codes of f16 and all 2^32 of f32")
@pytest.mark.parametrize("fmt", [F16, F32], ids=str)
def test_every_nan_becomes_the_canonical_one(fmt):
    trace = Trace()
    code = trace.variable(decoding.I32, "code")
    field, fraction, top = fields_of(fmt, code)
    exact = ((field == top) & (fraction != 0)).select(fmt.nan, code)
    prove(trace, specials.canonical_code(fmt, code) == exact, *([] if fmt == F32 else [code >= 0, code < 1 << 16]))
