"""Proofs of `tcemu.engine.arithmetic.step.general` and `groups`: alignment, sums of two words, codes outside a step."""

from __future__ import annotations

import pytest
import rules
from proof_records import SOLVER, proves
from proving import prove
from rules import between, widen
from smt_values import EXPONENT_BITS, Kind, SmtValue, Trace

from tcemu.engine.arithmetic.step import general, groups
from tcemu.engine.arithmetic.step.decoding import BIAS, SIGN, ZERO_EXPONENT
from tcemu.engine.arithmetic.step.forms import LOW_BITS, SUM_BITS
from tcemu.engine.arithmetic.step.quantizing import decode_number
from tcemu.engine.arithmetic.step.rounding import Magnitude, encode
from tcemu.engine.arithmetic.step.values import BOOL, F32, I32, I64, Lane
from tcemu.formats import F16, ROUNDINGS, Format
from tcemu.formats import F32 as BINARY32

MODES = ROUNDINGS[:-1]
UNITS = -(1 << 20), 1 << 20
FULL = pytest.mark.full
HALF = Lane("float", 16)


def to_format(x: SmtValue, lane: Lane, mode: str = "RN") -> SmtValue:
    """A float in another format, by IEEE 754."""
    trace = x.trace
    indices = [EXPONENT_BITS[lane.bits], lane.bits - EXPONENT_BITS[lane.bits]]
    return SmtValue(trace, lane, trace.make(Kind.FP_TO_FP_FROM_FP, trace.mode(mode), x.term, indices=indices))


def float_of(fmt: Format, code: SmtValue) -> SmtValue:
    """The float of a code, i32."""
    word = code if fmt.bits == 32 else code.resize(Lane("int", 16))
    lane = F32 if fmt.bits == 32 else HALF
    return SmtValue(code.trace, lane, code.trace.float_of_word(word.term, lane))


def is_same(x: SmtValue, y: SmtValue) -> SmtValue:
    """Whether two floats are the same: +0 is not -0, and a NaN is one."""
    return SmtValue(x.trace, BOOL, x.trace.make(Kind.EQUAL, x.term, y.term))


# ---- rules 3 to 5


@proves(
    "general.align_integer",
    by=SOLVER,
    domain="i32 and i64, terms with fewer and with more fraction bits than the model, all distances, four roundings",
)
@pytest.mark.parametrize("mode", ["RZ", *(pytest.param(mode, marks=FULL) for mode in MODES if mode != "RZ")])
@pytest.mark.parametrize(
    "lane, bits, stored, fraction_bits", [(I32, 24, 23, 28), (I32, 24, 23, 13), (I64, 24, 23, 40), (I64, 24, 20, 13), (I64, 31, 8, 35)]
)
def test_integers_are_aligned(lane, bits, stored, fraction_bits, mode):
    trace = Trace()
    size, distance, negative = trace.variable(I32, "size"), trace.variable(I32, "distance"), trace.variable(BOOL, "negative")
    aligned = general.align_integer(size, negative.resize(I32), stored, distance, fraction_bits, mode, lane)
    more = max(fraction_bits - stored, 0)
    exact_size = widen(size, 64) << more
    drop = (distance + (more - fraction_bits + stored)).min(63)
    rounded = rules.round_size(exact_size, widen(drop, 64), negative, mode)
    exact = negative.select(0 - rounded, rounded)
    prove(trace, widen(aligned, 64, signed=True) == exact, between(size, 0, (1 << bits) - 1), between(distance, 0, 1 << 20))


@proves("general.align_integer", by=SOLVER, domain="i64, a traced number of fraction bits from 1 to 40, four roundings")
@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_a_traced_number_of_fraction_bits_aligns_alike(mode):
    trace = Trace()
    size, distance, negative = trace.variable(I32, "size"), trace.variable(I32, "distance"), trace.variable(BOOL, "negative")
    fraction_bits, stored = trace.variable(I32, "fraction_bits"), 20
    aligned = general.align_integer(size, negative.resize(I32), stored, distance, fraction_bits, mode, I64)
    more = (fraction_bits - stored).max(0)
    drop = (distance + (stored - fraction_bits).max(0)).min(63)
    rounded = rules.round_size(widen(size, 64) << widen(more, 64), widen(drop, 64), negative, mode)
    exact = negative.select(0 - rounded, rounded)
    prove(trace, aligned == exact, between(size, 0, (1 << 24) - 1), between(distance, 0, 1 << 20), between(fraction_bits, 1, 40))


def exact_term(word: SmtValue, power: SmtValue, mode: str) -> SmtValue:
    """An f32 * 2^power, rounded to an integer, in 64 bits. word: zero or normal; the result is below 2^31."""
    field, fraction = (word >> 23) & 0xFF, word & 0x7FFFFF
    size = (field == 0).select(0, fraction | 1 << 23)
    left = field - BIAS - 23 + power
    wide = widen(size, 64) << widen(rules.clamp(left, 0, 31), 64)
    rounded = rules.round_size(wide, widen(rules.clamp(0 - left, 0, 63), 64), word < 0, mode)
    return (word < 0).select(0 - rounded, rounded)


def is_number(word: SmtValue) -> SmtValue:
    """Zero or a normal number below 4: a product of two fractions."""
    field = (word >> 23) & 0xFF
    return (word << 1 == 0) | between(field, 1, BIAS + 1)


@proves(
    "general.align_fraction",
    by=SOLVER,
    domain="all fractions below 4 and all exponents, 1 to 29 fraction bits; also where subnormals are flushed",
)
def test_fractions_are_aligned():
    trace = Trace(flushes=True)
    word, exponent, top, fraction_bits = (trace.variable(I32, name) for name in ("fraction", "exponent", "top", "fraction_bits"))
    aligned = general.align_fraction(word.as_float(), exponent, fraction_bits - top + BIAS)
    exact = exact_term(word, exponent - top + fraction_bits, "RZ")
    assumed = [
        is_number(word),
        between(fraction_bits, 1, 29),
        between(top, -1024, 1024),
        between(exponent, ZERO_EXPONENT, 1024),
        exponent <= top,
    ]
    prove(trace, widen(aligned, 64, signed=True) == exact, *assumed)


@proves(
    "general.round_product",
    "general.product_scale",
    "general.power_of_two",
    by=SOLVER,
    domain="all products of significands of up to 24 bits, all exponents, 1 to 28 fraction bits, four roundings",
)
@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_products_are_rounded(mode):
    trace = Trace(flushes=True)
    size, exponent, top, fraction_bits = (trace.variable(I32, name) for name in ("size", "exponent", "top", "fraction_bits"))
    mantissas = trace.variable(I32, "mantissas")
    product = size.to_float()
    scale = general.power_of_two(exponent - (top + (mantissas - fraction_bits)))
    rounded = general.round_product(product * scale, product, mode).to_integer()
    exact = exact_term(product.bits(), exponent - top + fraction_bits - mantissas, mode)
    # a product of significands is below 4 in units of its own exponent
    assumed = [
        between(size, -(1 << 24) + 1, (1 << 24) - 1),
        between(mantissas, 0, 22),
        between((size < 0).select(0 - size, size), 0, (1 << 24) - 1),
    ]
    assumed += [(size < 0).select(0 - size, size) < (trace.variable(I32).constant(4) << mantissas)]
    assumed += [between(fraction_bits, 1, 28), between(top, -1024, 1024), between(exponent, 2 * ZERO_EXPONENT, 1024), exponent <= top]
    prove(trace, widen(rounded, 64, signed=True) == exact, *assumed)


@proves(
    "general.common_scale",
    by=SOLVER,
    domain="values whose products are normal f32 below 2^125: all alignments, 1 to 28 fraction bits, four roundings",
)
@pytest.mark.parametrize("mode", ["RN", *(pytest.param(mode, marks=FULL) for mode in MODES[1:])])
def test_products_of_values_are_rounded(mode):
    """least is the least exponent of a product that is not zero; below it, every product of the step is zero."""
    trace = Trace(flushes=True)
    word, top, fraction_bits, least = (trace.variable(I32, name) for name in ("product", "top", "fraction_bits", "least"))
    product, field = word.as_float(), (word >> 23) & 0xFF
    # `common_scale` takes `least` as a number; `max` takes a value too
    rounded = general.round_product(product * general.common_scale(top, least, fraction_bits), product, mode).to_integer()  # type: ignore[arg-type]
    exact = exact_term(word, fraction_bits - top, mode)
    assumed = [
        (word << 1 == 0) | (between(field, 1, 254) & (field <= BIAS + 124) & (field - BIAS <= top + 1) & (top >= least)),
        between(fraction_bits, 1, 28),
    ]
    prove(trace, widen(rounded, 64, signed=True) == exact, *assumed, between(least, -99, 127), between(top, -1024, 1024))


@proves("general.round_product", by=SOLVER, domain="a rounding that is a value")
def test_the_rounding_of_a_product_may_be_an_index():
    trace = Trace(flushes=False)
    aligned, product, index = trace.variable(F32, "aligned"), trace.variable(F32, "product"), trace.variable(I32, "index")
    chosen = general.round_product(aligned, product, index)
    claim = index == index
    for number, name in enumerate(MODES):
        claim = claim & ((index != number) | is_same(chosen, general.round_product(aligned, product, name)))
    prove(trace, claim, between(index, 0, 3))


@proves("general.own_fraction", by=SOLVER, domain="all 2^32 codes of f32")
def test_an_accumulator_is_a_fraction_and_an_exponent():
    trace = Trace(flushes=True)
    code = trace.variable(I32, "code")
    fraction, exponent, special = general.own_fraction(code)
    field, size = (code >> 23) & 0xFF, code & 0x7FFFFF
    word = fraction.bits()
    exact = (field == 0).select(size, size | 1 << 23)  # in units of 2^(exponent - 23), and the fraction in units of 2^-23
    is_fraction = exact_term(word, word.constant(23), "RZ") == widen(((code < 0).select(0 - exact, exact)), 64, signed=True)
    takes_part = (field != 0xFF) & (code << 1 != 0)
    is_exponent = exponent == takes_part.select(field.max(1) - BIAS, ZERO_EXPONENT)
    prove(trace, is_exponent & (is_fraction | (field == 0xFF)) & is_number(word) & (special ^ (field != 0xFF)))


@proves("general.split_term", "general.join_sums", by=SOLVER, domain="all f32 below 2^55; also where subnormals are flushed")
@pytest.mark.full
def test_terms_are_split():
    trace = Trace(flushes=True)
    word = trace.variable(I32, "aligned")
    high, low = general.split_term(word.as_float())
    field = (word >> 23) & 0xFF
    size = widen((field == 0).select(0, (word & 0x7FFFFF) | 1 << 23), 64)
    left = field - BIAS - 23
    exact = (size << widen(rules.clamp(left, 0, 39), 64)) >> widen(rules.clamp(0 - left, 0, 63), 64)
    exact = (word < 0).select(0 - exact, exact)
    assumed = field < BIAS + 31 + general.WIDE_BITS
    prove(trace, (general.join_sums(high, low) == exact) & between(low, -(1 << 24) + 1, (1 << 24) - 1), assumed)


@proves("general.add_jammed", by=SOLVER, domain="all pairs of i32, with `encode` in f16 and f32, four roundings")
@pytest.mark.parametrize(
    "fmt, mode", [pytest.param(fmt, mode, marks=[] if (fmt, mode) == (F16, "RZ") else [FULL]) for fmt in (F16, BINARY32) for mode in MODES]
)
def test_a_jammed_sum_has_the_code_of_the_exact_one(fmt, mode):
    """`encode` is proved for every sum, so the exact sum is encoded by it as an i64."""
    trace = Trace()
    x, y, unit, kept = (trace.variable(I32, name) for name in ("x", "y", "unit", "kept"))
    total, own = general.add_jammed(x, y, unit)
    wide = Lane("int", 40)
    exact = x.resize(wide) + y.resize(wide)
    size = (exact < 0).select(0 - exact, exact)
    jammed = total.resize(wide)
    jammed_size = (jammed < 0).select(0 - jammed, jammed)
    wraps = own != unit
    # the jammed sum is the exact one, or half of it with every bit that is lost in the last bit, above which there are 29 bits
    lost = size & 1
    claim = wraps.select(jammed_size == ((size >> 1) | lost), jammed == exact) & ((own == unit) | ((own == unit + 1) & (size >= 1 << 31)))
    prove(trace, claim & ((jammed < 0) ^ ~(exact < 0)), between(unit, *UNITS))
    trace = Trace()
    size, unit, kept, negative = (
        trace.variable(wide, "size"),
        trace.variable(I32, "unit"),
        trace.variable(I32, "kept"),
        trace.variable(BOOL, "negative"),
    )
    halved = (size >> 1) | (size & 1)
    one = encode(fmt, Magnitude(negative.resize(I64), widen(size, 64)), unit, mode, kept)
    other = encode(fmt, Magnitude(negative.resize(I32), halved.resize(I32)), unit + 1, mode, kept)
    prove(trace, one == other, between(size, 1 << 31, 1 << 32), between(unit, *UNITS), between(kept, 0, fmt.mantissa_bits))


# ---- sums outside a step


@proves(
    "general.add_codes", by=SOLVER, domain="f16, and f32 by floats: all pairs of codes that are not both -0, against IEEE 754's addition"
)
@pytest.mark.parametrize("fmt", [pytest.param(F16, marks=FULL), BINARY32], ids=str)
def test_codes_are_added(fmt):
    trace = Trace()
    x, y = trace.variable(I32, "x"), trace.variable(I32, "y")
    code = general.add_codes(fmt, x, y)
    total = float_of(fmt, x) + float_of(fmt, y)
    is_nan = SmtValue(trace, BOOL, trace.make(Kind.FP_IS_NAN, total.term))
    assumed = [] if fmt.bits == 32 else [between(x, 0, 0xFFFF), between(y, 0, 0xFFFF)]
    zero = 1 << 15 if fmt.bits == 16 else SIGN
    in_range = code == code if fmt.bits == 32 else between(code, 0, 0xFFFF)
    prove(trace, is_same(float_of(fmt, code), total) & (~is_nan | (code == fmt.nan)) & in_range, ~((x == zero) & (y == zero)), *assumed)


@proves("general.convert_code", by=SOLVER, domain="f32 to f16 and back: all codes, against IEEE 754's conversion")
@pytest.mark.parametrize("source, target", [(BINARY32, F16), (F16, BINARY32)], ids=str)
def test_codes_are_converted(source, target):
    trace = Trace()
    code = trace.variable(I32, "code")
    other = general.convert_code(source, target, code)
    exact = to_format(float_of(source, code), HALF if target == F16 else F32)
    is_nan = SmtValue(trace, BOOL, trace.make(Kind.FP_IS_NAN, exact.term))
    in_range = between(other, 0, 0xFFFF) if target == F16 else other == other
    assumed = [between(code, 0, 0xFFFF)] if source == F16 else [code == code]
    prove(trace, is_same(float_of(target, other), exact) & (~is_nan | (other == target.nan)) & in_range, *assumed)


@proves("general.add_promoted", by=SOLVER, domain="all words of f32, and sums in f16 and f32, with a scale and without")
@pytest.mark.parametrize("fmt", [F16, BINARY32], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_promoted_sums_are_added(fmt, scaled):
    trace = Trace()
    total, code, scale = (trace.variable(I32, name) for name in ("total", "code", "scale"))
    word = general.add_promoted(fmt, total, code, scale.as_float() if scaled else None)
    part = decode_number(fmt, code)  # every code is decoded in `test_quantizing_proofs.py`
    exact = scale.as_float().multiply_add(part, total.as_float()) if scaled else total.as_float() + part
    is_nan = SmtValue(trace, BOOL, trace.make(Kind.FP_IS_NAN, exact.term))
    assumed = [between(code, 0, 0xFFFF)] if fmt == F16 else []
    prove(trace, is_same(word.as_float(), exact) & (~is_nan | (word == BINARY32.nan)), *assumed)


# ---- groups


@proves("groups.parts", by=SOLVER, domain="all f32 below 2^49, with the product rounded and not; also where subnormals are flushed")
@pytest.mark.full
def test_terms_of_groups_are_split():
    trace = Trace(flushes=True)
    word = trace.variable(I32, "aligned")
    high, low = groups.parts(word.as_float())
    field = (word >> 23) & 0xFF
    size = widen((field == 0).select(0, (word & 0x7FFFFF) | 1 << 23), 64)
    left = field - BIAS - 23
    exact = (size << widen(rules.clamp(left, 0, 39), 64)) >> widen(rules.clamp(0 - left, 0, 63), 64)
    exact = (word < 0).select(0 - exact, exact)
    joined = (high.resize(I64) << LOW_BITS) + low.resize(I64)
    of_its_sign = ((high == 0) | ((high < 0) ^ (word >= 0))) & ((low == 0) | ((low < 0) ^ (word >= 0)))
    is_small = between(low, -(1 << LOW_BITS) + 1, (1 << LOW_BITS) - 1) & between(high, -(1 << 24) + 1, (1 << 24) - 1)
    prove(trace, (joined == exact) & of_its_sign & is_small, field < BIAS + SUM_BITS)


@proves(
    "groups.round_parts",
    "groups.unit",
    by=SOLVER,
    domain="all sums below 2^49 and all units with which they are normal; with and without a multiply-add toward zero",
)
@pytest.mark.full
@pytest.mark.parametrize("adds_toward_zero", [False, True])
@pytest.mark.parametrize("kept", [23])
def test_sums_of_parts_are_rounded(adds_toward_zero, kept):
    trace = Trace(flushes=True)
    high, low, top, leading = (trace.variable(I32, name) for name in ("high", "low", "top", "leading"))
    fraction_bits = 35
    code = groups.round_parts(high, low, groups.unit(top, fraction_bits), kept, adds_toward_zero)
    total = (widen(high, 64, signed=True) << LOW_BITS) + widen(low, 64, signed=True)
    size = (total < 0).select(0 - total, total)
    exact = rules.encode_size(BINARY32, size, leading, total < 0, top - fraction_bits - BIAS, top.constant(kept), "RZ")
    is_leading = between(leading, 0, SUM_BITS) & ((size == 0) | (size >> widen(leading, 64) == 1))
    unit = top - fraction_bits
    assumed = [size < 1 << SUM_BITS, between(unit, 1, 254), unit + leading <= 254, is_leading, between(low, -(1 << 30), (1 << 30) - 1)]
    prove(trace, code == (size == 0).select(0, exact), *assumed)


@proves("groups.power", by=SOLVER, domain="all exponents whose power is a normal f32")
def test_powers_of_groups():
    for exponent in (33, 35):
        trace = Trace()
        top = trace.variable(I32, "top")
        word = groups.power(top, exponent).bits()
        prove(trace, (word >> 23 == exponent + 2 * BIAS - top) & (word & 0x7FFFFF == 0), between(exponent + 2 * BIAS - top, 1, 254))
