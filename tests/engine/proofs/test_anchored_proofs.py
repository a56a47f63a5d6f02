"""Proofs of parts of `arithmetic.step.anchored`, and of steps in integers. What anchored steps need of exponents is not proved."""

from __future__ import annotations

import numpy as np
import pytest
import rules
from proof_records import ENUMERATION, SOLVER, proves
from proving import prove
from rules import between, widen
from smt_values import SmtValue, Trace
from step_rows import numbers, step_rows
from support.numpy_values import NumpyValue

from tcemu.engine.arithmetic.step import anchored, general
from tcemu.engine.arithmetic.step.decoding import BIAS, FRACTION
from tcemu.engine.arithmetic.step.forms import REPEATS, AnchoredForm, IntegerForm, anchored_form
from tcemu.engine.arithmetic.step.values import BOOL, I32, I64
from tcemu.formats import F16
from tcemu.formats import F32 as BINARY32
from tcemu.formats import F64 as BINARY64

FULL = pytest.mark.full
WORDS = ("anchored.upper_word", "anchored.from_upper_word", "anchored.plus_units", "anchored.power_of_two")


def anchored_forms() -> dict[str, AnchoredForm]:
    found = {name: anchored_form(row.model, row.spec) for name, row in step_rows().items()}
    return {name: form for name, form in found.items() if form is not None}


@proves(
    "anchored.upper_word",
    "anchored.from_upper_word",
    "anchored.plus_units",
    "anchored.power_of_two",
    by=SOLVER,
    domain="all words, f32 and f64",
)
def test_upper_words():
    for wide in (False, True):
        trace = Trace()
        word, units = trace.variable(I32, "word"), trace.variable(I32, "units")
        bits = anchored.plus_units(wide, word, units).bits()
        exact = (word.resize(I64) << 32) + units.resize(I64, signed=False) if wide else word + units
        is_nan = (word & 0x7FFFFFFF) >= (0x7FF00000 if wide else 0x7F800000)
        back = anchored.upper_word(anchored.from_upper_word(wide, word))
        prove(trace, ((bits == exact) & (back == word)) | is_nan, *([] if wide else [units == 0]))
        exponent = trace.variable(I32, "exponent")
        bias = BINARY64.bias if wide else BIAS
        power = anchored.upper_word(anchored.power_of_two(wide, exponent))
        prove(trace, power == (exponent + bias) << (20 if wide else 23), between(exponent, 1 - bias, bias))


def number_of(word: SmtValue) -> tuple[SmtValue, SmtValue]:
    """The significand, and the exponent of its last place with the bias, of a float's word that is zero or normal."""
    stored, top = (52, 0x7FF) if word.lane == I64 else (23, 0xFF)
    field = ((word >> stored) & top).resize(I32)
    size = (field == 0).select(word.constant(0), (word & (1 << stored) - 1) | (1 << stored))
    return size, field - stored


def in_units(word: SmtValue, unit: SmtValue, bits: int = 120) -> SmtValue:
    """|float| / 2^unit, truncated. unit: with the bias."""
    size, last = number_of(word)
    wide, left = widen(size, bits), last - unit
    up, down = (rules.clamp(v, 0, bits - 1).resize(wide.lane) for v in (left, 0 - left))
    return (left >= 0).select(wide << up, wide >> down)


@proves("anchored.truncate", by=SOLVER, domain="f32 and f64: all normal values below half a binade of the anchor")
@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=FULL)])
def test_values_are_truncated_beside_the_anchor(wide):
    form = next(form for form in anchored_forms().values() if form.wide == wide)
    trace = Trace()
    word, field = trace.variable(I64 if wide else I32, "value"), trace.variable(I32, "anchor")
    stored, upper = (52, 20) if wide else (23, 23)
    anchor = (field << upper) | 1 << (upper - 1)
    got = anchored.truncate(form, word.as_float(), anchor).bits()
    unit = field - stored
    size = in_units(word, unit)
    got_size = in_units(got, unit)
    sign_kept = (size == 0) | ((got < 0) ^ (word >= 0))
    value_field = number_of(word)[1] + stored
    top = 0x7FE if wide else 0xFE
    assumed = [between(value_field, 1, top) | (word << 1 == 0), value_field <= field - 2, between(unit, 1, top - stored)]
    exact_units = number_of(got)[1] + stored
    claim = (got_size == size) & sign_kept & ((size == 0) | (exact_units >= unit)) & ((size != 0) | (got << 1 == 0))
    prove(trace, claim, *assumed)


@proves(
    "anchored.add_product",
    by=SOLVER,
    domain="f32: one product of two factors of 11 bits to every sum in the binade, and by induction all",
)
@pytest.mark.full
@pytest.mark.parametrize("wide", [False])
def test_a_product_is_added_rounded_down(wide):
    """The sum is M and some units, positive. It has `before` units more than M, and `floor(product)` more afterwards."""
    trace = Trace()
    lane, stored = (I64, 52) if wide else (I32, 23)
    top = 0x7FE if wide else 0xFE
    x, y = (trace.variable(lane, name) & ~((1 << (stored - 10)) - 1) for name in "xy")
    field, before = trace.variable(I32, "anchor"), trace.variable(lane, "before")
    start = (widen(field, 64).resize(lane) << stored) | 1 << (stored - 1)
    total = anchored.add_product((start + before).as_float(), x.as_float(), y.as_float()).bits()
    (size_x, last_x), (size_y, last_y) = number_of(x), number_of(y)
    bias, unit = BINARY64.bias if wide else BIAS, field - stored
    product = widen(size_x >> (stored - 10), 100) * widen(size_y >> (stored - 10), 100)
    left = last_x + last_y + 2 * (stored - 10) - bias - unit
    up, down = (rules.clamp(v, 0, 99).resize(product.lane) for v in (left, 0 - left))
    truncated = (left >= 0).select(product << up, product >> down)
    is_integer = (left >= 0) | (truncated << down == product)
    negative = (x ^ y) < 0
    floor = negative.select(0 - truncated - widen(~is_integer, 100), truncated)
    after = widen(before, 100, signed=True) + floor
    half = 1 << (stored - 1)
    assumed = [between(number_of(v)[1] + stored, 1, top) | (v << 1 == 0) for v in (x, y)]
    assumed += [between(unit, 1, top - stored - 1), between(before, -half, half - 1), between(after, -half, half - 1), left <= stored]
    prove(trace, widen(total, 100, signed=True) == widen(start, 100, signed=True) + after, *assumed)


def repeated_form() -> AnchoredForm:
    """The form whose products a tensor core truncates. Others differ in the formats, which do not matter here."""
    return next(form for form in anchored_forms().values() if form.can_repeat_products(OWN_BITS[-1]) and form.result == BINARY32)


OWN_BITS = range(FRACTION, FRACTION + REPEATS.bit_length())  # fraction bits of tensor cores


@proves("repeated sums in a tensor core", by=SOLVER, domain="its steps of 23, 24 and 25 bits: every anchor, all sums in the binade")
@pytest.mark.parametrize("own_bits", OWN_BITS)
def test_a_tensor_core_loses_no_bit_of_repeated_sums(own_bits):
    """By rules 3 to 6 its step is the sum in its units, truncated to f32. C is the anchor and what products before have added.

    As C is the largest term, every product is truncated to the unit 2^(exponent of C - own_bits). So T, the sum of truncated products, is
    added to the word of C, four times, and nothing else.
    """
    trace, bits = Trace(), 40
    field, before, products = (trace.variable(I32, name) for name in ("field", "before", "products"))
    last_place = 1 << (own_bits - FRACTION)  # of C, in units
    anchor = (field << FRACTION) | 1 << (FRACTION - 1)
    size = (widen(before + products, bits, signed=True) * REPEATS) + (3 << (own_bits - 1))
    unit = field - BIAS - own_bits
    got = rules.encode_size(BINARY32, size, field.constant(own_bits), field.never(), unit, field.constant(FRACTION), "RZ")
    most = (1 << (own_bits - 1)) // REPEATS
    inside = [between(sum_, -most, most - 1) for sum_ in (before, products, before + products)]
    prove(trace, got == anchor + (before + products) * (REPEATS // last_place), between(field, 1, 254), *inside)


@proves(
    "anchored.begin_repeated",
    "anchored.end_repeated",
    by=ENUMERATION,
    domain="f32: all sums of a step, and all truncated accumulators with some sums, beside the first and the last anchor",
)
@pytest.mark.parametrize("own_bits", OWN_BITS[1:])
def test_repeated_sums_end(own_bits):
    form, rng = repeated_form(), np.random.default_rng(own_bits)
    n = form.numbers
    assert form.can_repeat_products(own_bits)
    most, most_own = n.terms << (n.fraction_bits + 2), (2 << n.fraction_bits) - 1
    products = np.append(np.arange(-most, most + 1), rng.integers(-most, most + 1, 2 * most_own + 1)).astype(np.int32)
    own = np.append(rng.integers(-most_own, most_own + 1, 2 * most + 1), np.arange(-most_own, most_own + 1)).astype(np.int32)
    for field in (FRACTION + 1, 254 - (own_bits - FRACTION)):
        word = NumpyValue(np.full_like(products, field << FRACTION | 1 << (FRACTION - 1)))
        unit = np.float32(2.0 ** (field - BIAS - FRACTION))
        begun = anchored.begin_repeated(form, NumpyValue((own * unit).astype(np.float32)), word, own_bits)
        total = begun.bits().array + products * (REPEATS >> (own_bits - FRACTION))
        got = anchored.end_repeated(form, NumpyValue(total).as_float(), word & (1 << (FRACTION - 1))).array
        assert got.dtype == np.float32 and (got.astype(np.float64) == (products + own).astype(np.float64) * unit).all()
        assert not np.signbit(got[products + own == 0]).any()


def exact_code(form: IntegerForm, total: SmtValue, code: SmtValue, top: SmtValue, leading: SmtValue) -> tuple[SmtValue, SmtValue]:
    """The code of a step by rules 4 to 7, for an accumulator that is a number, and whether `leading` is the leading bit of the sum."""
    bits = 62
    n, fmt = form.numbers, form.result
    field = (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    fraction = code & ((1 << fmt.mantissa_bits) - 1)
    size = widen((field == 0).select(fraction, fraction | 1 << fmt.mantissa_bits), bits)
    left = field.max(1) - fmt.bias - top + n.fraction_bits - fmt.mantissa_bits
    up, down = (rules.clamp(v, 0, bits - 1).resize(size.lane) for v in (left, 0 - left))
    own = (left >= 0).select(size << up, size >> down)
    negative = code & (1 << (fmt.bits - 1)) != 0
    whole = widen(total, bits, signed=True) + negative.select(0 - own, own)
    magnitude = (whole < 0).select(0 - whole, whole)
    word = rules.encode_size(fmt, magnitude, leading, whole < 0, top - n.fraction_bits, top.constant(n.kept), n.rounding)
    is_leading = between(leading, 0, bits - 2) & ((magnitude == 0) | (magnitude >> widen(leading, bits) == 1))
    return (magnitude == 0).select(0, word), is_leading


def integer_forms() -> dict[str, IntegerForm]:
    """One form for each end of a step."""
    key = lambda f: (
        f.numbers.fraction_bits,
        f.numbers.kept,
        f.numbers.rounding,
        f.result,
        f.accumulator_fits,
        f.sum_fits_word,
        f.ends_in_f64,
    )
    forms = {name: IntegerForm(numbers()[name], row.spec.a, row.spec.b, row.model.result) for name, row in step_rows().items()}
    return {name: form for name, form in {key(form): (name, form) for name, form in forms.items()}.values()}


ENDS = [pytest.param(form, id=name, marks=FULL) for name, form in integer_forms().items()]


@proves(
    "general.end_step",
    "general.align_accumulator",
    by=SOLVER,
    domain="every model: all accumulators that are numbers, all sums below 2^(fraction_bits + 10)",
)
@pytest.mark.parametrize("form", ENDS)
def test_a_step_in_integers_ends(form):
    trace = Trace()
    total, code, top, leading = trace.variable(I64, "total"), *(trace.variable(I32, name) for name in ("code", "top", "leading"))
    exact, is_leading = exact_code(form, total, code, top, leading)
    fmt, most = form.result, 1 << min(form.numbers.fraction_bits + 10, 31 if form.sum_fits_word else 50)
    field = (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    assumed = [
        field != (1 << fmt.exponent_bits) - 1,
        between(total, -most + (2 << form.numbers.fraction_bits), most - (2 << form.numbers.fraction_bits)),
    ]
    assumed += [between(code, 0, 0xFFFF)] if fmt == F16 else [code == code]
    assumed += [(code << (33 - fmt.bits) == 0) | (field.max(1) - fmt.bias <= top), between(top, -1024, 512), is_leading]
    prove(trace, general.end_step(form, total, code, top) == exact, *assumed)


@proves("general.align_signed", by=SOLVER, domain="i32 and i64, all terms but the least, against `align_integer`")
@pytest.mark.parametrize("lane", [I32, I64])
def test_signed_terms_are_aligned(lane):
    trace = Trace()
    size, distance, negative = trace.variable(I32, "size"), trace.variable(I32, "distance"), trace.variable(BOOL, "negative")
    sign = negative.resize(I32)
    one = general.align_signed((size ^ sign) - sign, 20, distance, 25, "RZ", lane)
    other = general.align_integer(size, sign, 20, distance, 25, "RZ", lane)
    prove(trace, one == other, between(size, 0, (1 << 24) - 1), between(distance, 0, 1 << 20))


@proves("general.truncate_product", by=SOLVER, domain="all magnitudes whose product is below 2^31, and all distances")
@pytest.mark.full
def test_products_of_words_are_truncated():
    trace = Trace()
    x, y, drop, negative = (*(trace.variable(I32, name) for name in ("x", "y", "drop")), trace.variable(BOOL, "negative"))
    got = general.truncate_product(x, y, negative.select(drop.constant(-1), 1), drop)
    product = widen(x, 44) * widen(y, 44)
    size = product >> widen(rules.clamp(drop, 0, 43), 44)
    assumed = [between(x, 0, (1 << 16) - 1), between(y, 0, (1 << 16) - 1), product < 1 << 31, drop >= 0]
    prove(trace, widen(got, 44, signed=True) == negative.select(0 - size, size), *assumed)
