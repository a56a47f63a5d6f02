"""Proofs of `tcemu.engine.arithmetic.step.bounded`: truncation, alignment, sums, and whole steps for every accumulator."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add, and_
from typing import NamedTuple

import pytest
import rules
from proof_records import INTERVALS, SOLVER, proves
from proving import Refuted, prove
from rules import between, widen
from smt_values import SmtValue, Trace
from step_rows import bounded_forms

from tcemu.engine.arithmetic.step import bounded
from tcemu.engine.arithmetic.step.decoding import BIAS, SIGN
from tcemu.engine.arithmetic.step.forms import BoundedForm, largest_product
from tcemu.engine.arithmetic.step.values import BOOL, I32, Lane
from tcemu.formats import F32, FORMATS

MOST_FRACTION = 10  # of a format that is multiplied
TOTAL = Lane("int", 44)  # holds every sum of this file
FORMS = sorted({form for form in bounded_forms().values()}, key=repr)


def significand_of(word: SmtValue) -> SmtValue:
    """The integer significand of an f32, without sign."""
    fraction = word & 0x7FFFFF
    return ((word >> 23) & 0xFF == 0).select(fraction, fraction | 1 << 23)


def exponent_of(word: SmtValue) -> SmtValue:
    """The exponent of an f32 with its bias, that of a subnormal one as rule 2 counts."""
    return ((word >> 23) & 0xFF).max(1)


def shift(size: SmtValue, left: SmtValue) -> SmtValue:
    """size * 2^left, truncated, in the lane of the size. left: i32, at most the width."""
    bits = size.lane.bits
    up, down = rules.clamp(left, 0, bits - 1).resize(size.lane), rules.clamp(0 - left, 0, bits - 1).resize(size.lane)
    return (left >= 0).select(size << up, size >> down)


def is_finite(word: SmtValue) -> SmtValue:
    return (word >> 23) & 0xFF != 255


# ---- products


@proves("bounded: products of factors", by=SOLVER, domain="all factors of up to 11 bits, in every format, whose product is a normal f32")
def test_a_product_of_two_factors_is_exact():
    """A format with fewer bits has a part of these factors; none has more."""
    assert max(fmt.mantissa_bits for fmt in FORMATS.values() if not fmt.is_integer and fmt.bits <= 32 and fmt != F32) <= 13
    assert {form.a.mantissa_bits for form in FORMS} | {form.b.mantissa_bits for form in FORMS} <= set(range(MOST_FRACTION + 1))
    trace = Trace(flushes=True)
    x, y = (trace.variable(I32, name) & -(1 << (23 - MOST_FRACTION)) for name in "xy")
    field = exponent_of(x) + exponent_of(y) - 127
    assumed = [between((word >> 23) & 0xFF, 1, 254) for word in (x, y)]
    size = (significand_of(x) >> (23 - MOST_FRACTION)) * (significand_of(y) >> (23 - MOST_FRACTION))  # from 2^20, below 2^22
    at = (size >= 1 << 21).select(size.constant(21), 20)
    exact = ((field + at - 20) << 23) | ((size << (23 - at)) & 0x7FFFFF) | ((x ^ y) & SIGN)
    prove(trace, (x.as_float() * y.as_float()).bits() == exact, *assumed, between(field, 1, 253))


@proves(
    "bounded.truncate_by_conversion",
    by=SOLVER,
    domain="all f32 numbers and all units whose inverse is normal; also where subnormals are flushed",
)
def test_truncation_by_conversion_is_a_shift():
    trace = Trace(flushes=True)
    word, unit = trace.variable(I32, "product"), trace.variable(I32, "unit")
    truncated = bounded.truncate_by_conversion(word.as_float(), ((2 * BIAS - unit) << 23).as_float())
    size = shift(widen(significand_of(word), 44), exponent_of(word) - unit - 23)
    exact = (word < 0).select(0 - size, size)
    prove(trace, widen(truncated, 44, signed=True) == exact, between(unit, 1, 253), is_finite(word), exponent_of(word) - unit <= 30)


BY_ADDITION = sorted({(f.fraction_bits, f.a.mantissa_bits, f.b.mantissa_bits) for f in FORMS if f.truncates_by_addition})


@proves(
    "bounded.truncate_by_addition",
    "bounded.anchor",
    by=SOLVER,
    domain="every form that uses it: all factors and units; with the product rounded and not",
)
@pytest.mark.parametrize(
    "fraction_bits, of_x, of_y",
    [pytest.param(*sizes, marks=[] if sizes[1] == sizes[2] == 3 else pytest.mark.full) for sizes in BY_ADDITION],
)
def test_truncation_by_addition_is_a_shift(fraction_bits, of_x, of_y):
    trace, spare = Trace(flushes=True), 23 - fraction_bits - 2
    assert spare >= of_x + of_y + 2
    x, y = (trace.variable(I32, name) & -(1 << (23 - bits)) for name, bits in (("x", of_x), ("y", of_y)))
    unit, sign = trace.variable(I32, "unit"), trace.variable(BOOL, "negative").resize(I32)
    field = exponent_of(x) + exponent_of(y) - 127
    is_zero = (x == 0) | (y == 0)
    size = (significand_of(x) >> (23 - of_x)) * (significand_of(y) >> (23 - of_y))
    exact = is_zero.select(0, shift(size, field - unit - of_x - of_y))
    assumed = [(word == 0) | between(word >> 23, 1, 254) for word in (x, y)]
    assumed += [is_zero | (between(field, 1, 253) & (field - unit <= fraction_bits)), between(unit, 1, 254 - fraction_bits - 2)]
    got = bounded.truncate_by_addition(x.as_float(), y.as_float(), sign, unit << 23, fraction_bits, spare)
    prove(trace, (got == (exact << spare) ^ sign) & (exact < 4 << fraction_bits), *assumed)


@proves("bounded.sum_complements", by=SOLVER, domain="every form that uses it: all sums")
@pytest.mark.parametrize("spare, terms", sorted({(f.spare_bits, f.terms) for f in FORMS if f.truncates_by_addition}))
def test_complements_are_summed(spare, terms):
    """A complement is less by 1 than the negative. So a sum of terms is the sum, shifted, less the number of negative terms."""
    assert terms < 1 << spare
    trace = Trace()
    size, sign = trace.variable(I32, "size"), trace.variable(BOOL, "negative").resize(I32)
    negative = (sign != 0).resize(I32, signed=False)
    prove(trace, (size << spare) ^ sign == (((size ^ sign) - sign) << spare) - negative, between(size, 0, (1 << (23 - spare)) - 1))
    trace = Trace()
    total, count = trace.variable(I32, "total"), trace.variable(I32, "count")
    most = terms << (23 - spare)
    assert most << spare < 1 << 31
    prove(trace, bounded.sum_complements([(total << spare) - count], spare) == total, between(total, -most, most), between(count, 0, terms))


@proves(
    "bounded.float_sum_start",
    "bounded.add_truncated",
    "bounded.float_sums_difference",
    by=SOLVER,
    domain="one addition to every sum, and by induction all; all units",
)
@pytest.mark.full
def test_a_sum_of_floats_is_a_sum_of_truncated_products():
    """The sum is 2^23 units and the truncated products so far. It has 2^23 units more at most: see `BoundedForm.adds_floats`."""
    trace = Trace(flushes=True)
    bits = MOST_FRACTION // 3 + 1  # no format of these forms has more than three
    x, y = (trace.variable(I32, name) & -(1 << (23 - bits)) for name in "xy")
    unit, before = trace.variable(I32, "unit"), trace.variable(I32, "before")
    field = exponent_of(x) + exponent_of(y) - 127
    is_zero = (x == 0) | (y == 0)
    size = (significand_of(x) >> (23 - bits)) * (significand_of(y) >> (23 - bits))
    product = is_zero.select(0, shift(size, field - unit - 2 * bits))
    assumed = [(word == 0) | between(word >> 23, 1, 254) for word in (x, y)]
    assumed += [is_zero | (between(field, 1, 253) & (field - unit <= 20)), between(unit, 1, 230), between(before, 0, (1 << 23) - 1)]
    start = bounded.float_sum_start(unit << 23)
    total = (start.bits() + before).as_float()
    after = bounded.add_truncated(total, x.as_float(), y.as_float())
    difference = bounded.float_sums_difference(after, start)
    prove(trace, difference == before + product, *assumed, before + product < 1 << 23)
    assert (
        max(f.a.mantissa_bits + 0 for f in FORMS if f.adds_floats) <= bits
        and max(f.b.mantissa_bits for f in FORMS if f.adds_floats) <= bits
    )


# ---- alignment and sums


@proves(
    "bounded.align",
    "bounded.exponent_field",
    by=SOLVER,
    domain="every fraction_bits from 1 to 30, all exponents from fraction_bits + 1 to 253",
)
def test_unit_and_scale_are_normal_and_inverse():
    for fraction_bits in range(1, 31):
        trace = Trace(flushes=True)
        top, code, least = (trace.variable(I32, name) for name in ("top", "code", "least"))
        exponent = top.max((code >> 23) & 0xFF)
        for with_least in (False, True):
            aligned = bounded.align(top, code, least if with_least else None, fraction_bits)  # type: ignore[arg-type]
            own = exponent.max(least) if with_least else exponent
            unit, scale = aligned.unit, aligned.scale.bits()
            claim = between(unit >> 23, 1, 254) & between(scale >> 23, 1, 254) & (unit & 0x7FFFFF == 0) & (scale & 0x7FFFFF == 0)
            claim = claim & ((unit >> 23) + (scale >> 23) == 254) & ((unit >> 23) + fraction_bits == own)
            prove(trace, claim, between(own, fraction_bits + 1, 253), is_finite(code))


def total_of(addends: list[SmtValue]) -> tuple[SmtValue, SmtValue]:
    """The exact magnitude of a sum and whether it is negative."""
    total = widen(addends[0], TOTAL.bits, signed=True)
    for addend in addends[1:]:
        total = total + widen(addend, TOTAL.bits, signed=True)
    return (total < 0).select(0 - total, total), total < 0


@proves(
    "bounded.round_sum",
    "bounded.add_addends",
    by=SOLVER,
    domain="two i32 addends whose sum fits, two and three others; all normal results, kept bits 23 and 13",
)
@pytest.mark.parametrize("kept", [pytest.param(23, marks=pytest.mark.full), 13])
@pytest.mark.parametrize(
    "count, fits", [(2, True), pytest.param(2, False, marks=pytest.mark.full), pytest.param(3, False, marks=pytest.mark.full)]
)
def test_sums_are_rounded(count, fits, kept):
    trace = Trace(flushes=True)
    addends = [trace.variable(I32, f"addend{at}") for at in range(count)]
    unit, leading = trace.variable(I32, "unit"), trace.variable(I32, "leading")
    size, negative = total_of(addends)
    of_kept = unit.constant(kept)
    exact = (size == 0).select(0, rules.encode_size(F32, size, leading, negative, unit - BIAS, of_kept, "RZ"))
    assumed = [
        between(unit, 1, 254),
        unit + leading <= 254,
        between(leading, 0, 40),
        (size == 0) | (size >> widen(leading, TOTAL.bits) == 1),
    ]
    assumed += [addend != -(1 << 31) for addend in addends]
    if fits:
        assumed.append(size < 1 << 31)
    prove(trace, bounded.round_sum(addends, unit << 23, fits, kept) == exact, *assumed)


# ---- steps


class StepKind(NamedTuple):
    """What a proof of a whole step knows of its form. The least exponent and the largest accumulator are any that the guards allow."""

    fraction_bits: int
    kept: int
    sums: int
    fits: bool
    nan: int


def kind_of(form: BoundedForm) -> StepKind:
    return StepKind(form.fraction_bits, form.kept, form.sums, form.fits, form.nan)


def largest_sum(kind: StepKind, forms: Iterable[BoundedForm]) -> int:
    """A bound of each sum of products, in units."""
    return max(-(-f.terms // f.sums) * largest_product(f.a, f.b, f.fraction_bits) for f in forms if kind_of(f) == kind)


class StepTerms(NamedTuple):
    """A step whose accumulator and products are variables."""

    code: SmtValue  # the accumulator, any word
    products: list[SmtValue]  # sums of the products, truncated to the step's unit
    has_product: SmtValue  # condition: a product is not zero
    top: SmtValue  # the max exponent of the products, with bias
    least: SmtValue  # the least exponent to which a step aligns, with bias
    leading: SmtValue  # the leading bit of the sum


def rule_of_step(kind: StepKind, step: StepTerms, is_kept: SmtValue) -> tuple[SmtValue, SmtValue, SmtValue]:
    """The word of a step by rules 3 to 8, its max exponent with bias, and a condition.

    The condition is that `leading` is the leading bit of the sum, and that products which are all below a unit are truncated to zero, but
    where `is_kept`: there, `select_unreached` keeps the accumulator, so that nothing is known of the products.
    """
    code, has_product, top = step.code, step.has_product, step.top
    size, exponent = significand_of(code), exponent_of(code)
    own = has_product.select((size == 0).select(top, exponent.max(top)), exponent)
    aligned = shift(widen(size, TOTAL.bits), exponent - own + kind.fraction_bits - 23)
    total = (code < 0).select(0 - aligned, aligned)
    is_reached = has_product & (own - kind.fraction_bits < top + 2)  # a product is below 2^(top + 2)
    for product in step.products:
        total = total + is_reached.select(widen(product, TOTAL.bits, signed=True), 0)
    magnitude = (total < 0).select(0 - total, total)
    word = rules.encode_size(F32, magnitude, step.leading, total < 0, own - kind.fraction_bits - BIAS, top.constant(kind.kept), "RZ")
    word = (magnitude == 0).select(0, word)
    is_nan = (code & 0x7F800000 == 0x7F800000) & (code & 0x7FFFFF != 0)
    word = is_finite(code).select(word, is_nan.select(kind.nan, code))
    condition = (magnitude == 0) | ~is_finite(code) | (magnitude >> widen(step.leading, TOTAL.bits) == 1)
    for product in step.products:
        condition = condition & (is_reached | (product == 0) | is_kept)
    return word, own, between(step.leading, 0, 40) & condition


def is_admissible(word: SmtValue, last: SmtValue) -> SmtValue:
    """Whether an accumulator is zero, or a normal number that is a multiple of a power of two. last: its exponent, with bias."""
    below = last - (exponent_of(word) - 23)  # bits of the significand below that power
    size = widen(significand_of(word), 44)
    is_multiple = (below <= 0) | ((below < 24) & (shift(shift(size, 0 - below), below) == size))
    return (word << 1 == 0) | (between((word >> 23) & 0xFF, 1, 254) & is_multiple)


def start_step(trace: Trace, kind: StepKind) -> tuple[StepTerms, SmtValue, list[SmtValue]]:
    """A step, what it aligns to where there is no product, and what holds of them: see `test_guard_proofs.py`."""
    code, top, least, of_zeros, leading = (trace.variable(I32, name) for name in ("code", "top", "least", "of_zeros", "leading"))
    products, has_product = [trace.variable(I32, f"products{at}") for at in range(kind.sums)], trace.variable(BOOL, "has_product")
    most = largest_sum(kind, FORMS)
    assumed = [between(product, -most, most) & (has_product | (product == 0)) for product in products]
    assumed += [of_zeros <= least, between(least, kind.fraction_bits + 1, 251), between(top, least, 251)]
    return StepTerms(code, products, has_product, top, least, leading), of_zeros, assumed


def bounded_word(kind: StepKind, step: StepTerms, of_zeros: SmtValue, usable: SmtValue) -> tuple[SmtValue, SmtValue]:
    """The word of a bounded step, and its max exponent with bias."""
    top = step.has_product.select(step.top, of_zeros).max(step.least)
    aligned = bounded.align(top, usable, None, kind.fraction_bits)
    own = bounded.truncate_by_conversion(usable.as_float(), aligned.scale)
    return bounded.round_sum([*step.products, own], aligned.unit, kind.fits, kind.kept), (aligned.unit >> 23) + kind.fraction_bits


def prove_narrow_step(kind: StepKind, drops_small: bool = False) -> None:
    """The step of narrow formats for every accumulator. drops_small: with the fault of issue 56, to see that it is found."""
    trace = Trace(flushes=True)
    step, of_zeros, assumed = start_step(trace, kind)
    most = trace.variable(I32, "most")
    usable = bounded.usable_accumulator(step.code, most)  # type: ignore[arg-type]
    if drops_small:
        usable = (bounded.exponent_field(step.code) < step.least).select(0, usable)
    is_kept = bounded.exponent_field(step.code) > most + BIAS
    word, top = bounded_word(kind, step, of_zeros, usable)
    exact, exponent, condition = rule_of_step(kind, step, is_kept)
    word = bounded.select_unreached(step.code, word, step.has_product, most, kind.fraction_bits, kind.kept, kind.nan)  # type: ignore[arg-type]
    claim = (word == exact) & ((top == exponent) | ~step.has_product | is_kept)
    # products beside an accumulator above `most` are all below a unit; nothing comes near 2^127
    assumed += [most + 1 + BIAS - kind.fraction_bits >= step.top + 2, between(most, -126, 124), step.top < 220, step.top > step.least]
    prove(trace, claim, *assumed, condition)


def prove_bounded_step(kind: StepKind) -> None:
    """The step of any formats for accumulators from the least exponent on, and for those that steps leave; which it leaves again."""
    trace = Trace(flushes=True)
    step, of_zeros, assumed = start_step(trace, kind)
    last = step.least - kind.fraction_bits
    word, top = bounded_word(kind, step, of_zeros, step.code)
    exact, exponent, condition = rule_of_step(kind, step, step.has_product.never())
    assumed += [is_admissible(step.code, last) | (bounded.exponent_field(step.code) >= step.least), step.code & 0x7FFFFFFF < 0x7F000000]
    assumed.append(exact & 0x7FFFFFFF < 0x7F000000)  # which the guard implies, too
    claim = (word == exact) & ((top == exponent) | ~step.has_product) & is_admissible(word, last)
    prove(trace, claim, *assumed, condition)


KINDS = sorted({kind_of(form) for form in FORMS})
NARROW_KINDS = sorted({kind_of(form) for form in FORMS if form.is_narrow})
name_kind = lambda kind: f"{kind.fraction_bits} bits, {kind.kept} kept, {kind.sums} sums{', fits' if kind.fits else ''}"
FULL = pytest.mark.full


@proves(
    "bounded.usable_accumulator", "bounded.truncated_accumulator", "bounded.select_unreached", by=SOLVER,
    domain="every narrow form: all 2^32 accumulators; all sums and exponents of products, and none; also where subnormals are flushed",
)  # fmt: skip
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind.fraction_bits == 24 else FULL, id=name_kind(kind)) for kind in NARROW_KINDS]
)
def test_a_narrow_step_is_right_for_every_accumulator(kind):
    prove_narrow_step(kind)


@proves(
    "bounded: whole steps", by=SOLVER,
    domain="every form: all accumulators that the guard passes and that steps leave, which they leave again; all products, and none",
)  # fmt: skip
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=FULL, id=name_kind(kind)) for kind in KINDS])
def test_a_step_is_right_for_every_bounded_accumulator(kind):
    prove_bounded_step(kind)


def test_a_step_that_drops_a_small_accumulator_is_refuted():
    """The fault of issue 56."""
    with pytest.raises(Refuted, match="has_product = true"):
        prove_narrow_step(next(kind for kind in NARROW_KINDS if kind.fraction_bits == 23), drops_small=True)


@proves("bounded.add_terms", by=INTERVALS, domain="the parts of every form have the sizes that the sums are proved for")
def test_terms_are_added_in_halves():
    for form in FORMS:
        trace = Trace()
        terms = [trace.variable(I32, f"term{at}") for at in range(form.terms)]
        sums = bounded.add_terms(terms, form.sums)
        halves = [terms] if form.sums == 1 else [terms[: -(-form.terms // 2)], terms[-(-form.terms // 2) :]]
        assert len(sums) == form.sums
        prove(trace, reduce(and_, (one == reduce(add, half) for one, half in zip(sums, halves, strict=True))))
