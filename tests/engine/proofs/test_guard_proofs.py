"""Proofs that each guard of `tcemu.engine.arithmetic.step.forms` implies what the formulas of its form need, for every model and format.

A predicate that is known before tracing is checked with Python's integers. A guard that looks at exponents at run time is proved for all
exponents. The needs are those that the proofs of `bounded` and `groups` assume.
"""

from __future__ import annotations

from itertools import product

import pytest
from proof_records import INTERVALS, SOLVER, proves
from proving import prove
from rules import between
from smt_values import SmtValue, Trace
from step_rows import bounded_forms, grouped_forms, numbers, step_rows

from tcemu.engine.arithmetic.step import forms
from tcemu.engine.arithmetic.step.decoding import BIAS
from tcemu.engine.arithmetic.step.forms import MAX_ACCUMULATOR, NARROW_LANES, WIDE_LANES, BoundedForm, GroupedForm
from tcemu.engine.arithmetic.step.values import I32
from tcemu.engine.backends.llvm.bounded_lanes import KernelForm
from tcemu.formats import F32, FORMATS, Format

NORMAL = range(F32.min_exponent, F32.max_exponent + 1)  # exponents
MOST_PRODUCT_BITS = 63  # of the number of products along K, which machines count in 64 bits
NARROW = {name: form for name, form in bounded_forms().items() if form.is_narrow}
WIDE = {name: form for name, form in bounded_forms().items() if not form.is_narrow}
GROUPED = list(grouped_forms())
EXPONENTS = -(1 << 20), 1 << 20  # of factors; the guards' sentinels for no factor lie far outside


def largest_significand(fmt: Format) -> int:
    return (1 << (fmt.mantissa_bits + 1)) - 1


def largest_term(a: Format, b: Format, fraction_bits: int) -> int:
    """The largest product in units of a step, truncated, where the product decides the alignment."""
    size, shift = largest_significand(a) * largest_significand(b), fraction_bits - a.mantissa_bits - b.mantissa_bits
    return size * 2**shift if shift >= 0 else size // 2**-shift


def last_place(fmt: Format) -> int:
    """The exponent of the unit of all values."""
    return fmt.min_exponent - fmt.mantissa_bits


def test_forms_of_every_kind_are_proved():
    assert len(NARROW) >= 20 and len(WIDE) >= 25 and len(grouped_forms()) >= 6
    assert {form.truncates_by_addition for form in NARROW.values()} == {form.adds_floats for form in NARROW.values()} == {False, True}
    assert {form.sums for form in NARROW.values()} == {1, 2} and {form.has_narrow_scales for form in grouped_forms().values()} == {
        False,
        True,
    }


@proves("forms.is_compact", by=INTERVALS, domain="all pairs of formats: what `general.common_scale` needs")
def test_products_of_compact_formats_have_room():
    formats = [fmt for fmt in FORMATS.values() if not fmt.is_integer and fmt.bits <= 32]
    pairs = [(a, b) for a, b in product(formats, formats) if forms.is_compact(a, b)]
    assert len(pairs) > 50
    for a, b in pairs:
        assert last_place(a) + last_place(b) in NORMAL and a.max_exponent + b.max_exponent + 1 <= 124
        assert -99 <= a.min_exponent + b.min_exponent <= 127


# ---- sums


@proves(
    "forms.BoundedForm.sums",
    "forms.BoundedForm.fits",
    "forms.largest_product",
    "forms.largest_accumulator",
    "forms.products_fit_word",
    "forms.word_sums",
    by=INTERVALS,
    domain="every bounded form",
)
@pytest.mark.parametrize("form", sorted(set(bounded_forms().values()), key=repr), ids=repr)
def test_no_sum_of_products_overflows(form):
    """Neither a term, nor a sum of terms, nor two of them where one i32 is to hold both; and no sum is -2^31."""
    term, own = largest_term(form.a, form.b, form.fraction_bits), 2 ** (form.fraction_bits + 1) - 1
    half = -(-form.terms // form.sums)
    assert half * term < 2**31 and own < 2**31
    if form.fits:
        assert form.sums == 1 and form.terms * term + own < 2**31
    assert form.terms * term + own < 2**40  # `rounding.add_wide`
    assert forms.largest_product(form.a, form.b, form.fraction_bits) == term
    assert forms.word_sums(form.fraction_bits, form.a, form.b, form.terms, "RZ") == form.sums


@proves("forms.float_sums", by=INTERVALS, domain="every model whose products are not summed in groups")
@pytest.mark.parametrize("name", [name for name, n in numbers().items() if not n.summed])
def test_no_sum_of_rounded_products_overflows(name):
    """Rounded away from zero, a term is larger by 1. The first sum holds the accumulator too."""
    n, spec = numbers()[name], step_rows()[name].spec
    sums = forms.float_sums(spec.a, spec.b, n.fraction_bits, n.terms)
    assert sums in (1, 2)
    assert -(-n.terms // sums) * (largest_term(spec.a, spec.b, n.fraction_bits) + 1) + 2 ** (n.fraction_bits + 1) + 1 < 2**31
    assert largest_significand(spec.a) * largest_significand(spec.b) < 2**24  # a product is an f32
    assert 4 * 2**n.fraction_bits <= 2**31  # `general.align_fraction`: a fraction is below 4
    assert largest_significand(F32) << max(n.fraction_bits - F32.mantissa_bits, 0) < 2**30  # `rounding.round_integer` of the accumulator


@proves("forms.step_numbers", by=INTERVALS, domain="every model of groups: sums of i64")
@pytest.mark.parametrize("name", [name for name, n in numbers().items() if n.summed])
def test_no_sum_of_groups_overflows(name):
    n, spec = numbers()[name], step_rows()[name].spec
    scale = spec.require_scale()
    largest = forms.largest_value(spec.a) * forms.largest_value(spec.b) * largest_significand(scale) ** 2
    assert n.summed * largest < 2**31  # a group's sum is an i32
    assert n.mantissas == 2 * scale.mantissa_bits - last_place(spec.a) - last_place(spec.b)
    term = n.summed * largest * 2 ** max(n.fraction_bits - n.mantissas, 0)
    assert term < 2**62 and (n.terms // n.summed) * term + 2 ** (n.fraction_bits + 1) < 2**63


# ---- narrow formats, which need no guard


@proves("forms.BoundedForm.is_narrow", "forms.BoundedForm.least", "forms.BoundedForm.most", by=INTERVALS, domain="every narrow form")
@pytest.mark.parametrize("form", sorted(set(NARROW.values()), key=repr), ids=repr)
def test_narrow_formats_bound_what_a_step_needs(form):
    a, b, f = form.a, form.b, form.fraction_bits
    low, high = a.min_exponent + b.min_exponent, a.max_exponent + b.max_exponent  # of products
    assert last_place(a) in NORMAL and last_place(b) in NORMAL and last_place(a) + last_place(b) in NORMAL and high + 1 in NORMAL
    for least in (form.least, kernel_form(form).least - BIAS):
        assert low > least  # a step with a product is not aligned to the least exponent
        assert least - f in NORMAL and f - least in NORMAL  # the least unit and its inverse
        assert f + 1 <= least + BIAS <= high + BIAS < 220 and form.most <= 124  # see `test_bounded_proofs.start_step`
    assert high + 2 <= (form.most + 1) - f  # beside an accumulator above `most`, each product is below a unit
    # every accumulator is below 2^most_of_all, also in kernels that look at C alone
    most_of_all = max(form.most + 1, MOST_PRODUCT_BITS + high + 2) + 1
    assert most_of_all <= MAX_ACCUMULATOR + 1
    largest_unit = most_of_all - f
    assert largest_unit in NORMAL and -largest_unit in NORMAL and largest_unit + f + 2 in NORMAL  # with `bounded.anchor`
    if form.adds_floats:
        assert largest_unit + F32.mantissa_bits in NORMAL  # `bounded.float_sum_start`
    assert all(row.model.floor <= F32.min_exponent for name, row in step_rows().items() if NARROW.get(name) == form)


@proves("forms.BoundedForm.truncates_by_addition", "forms.BoundedForm.adds_floats", by=INTERVALS, domain="every narrow form")
@pytest.mark.parametrize("form", sorted(set(NARROW.values()), key=repr), ids=repr)
def test_products_truncated_without_a_conversion_fit_a_fraction(form):
    most = 4 * 2**form.fraction_bits  # a truncated product is below it
    if form.truncates_by_addition:
        assert form.spare_bits >= form.a.mantissa_bits + form.b.mantissa_bits + 2 and most << form.spare_bits == 1 << F32.mantissa_bits
        assert form.terms < 1 << form.spare_bits and form.terms * (most << form.spare_bits) < 2**31
    if form.adds_floats:
        assert form.terms * (most - 1) < 1 << F32.mantissa_bits


def kernel_form(form: BoundedForm) -> KernelForm:
    return KernelForm(form, 0, 0, wide_registers=True)


@proves(
    "forms.NARROW_LANES", "llvm.bounded_lanes.KernelForm", by=INTERVALS, domain="every narrow form: lanes of 8 bits, with sign and without"
)
@pytest.mark.parametrize("form", sorted(set(NARROW.values()), key=repr), ids=repr)
def test_lanes_of_8_bits_do_not_wrap(form):
    a, b = ({fmt.min_exponent, fmt.max_exponent} for fmt in (form.a, form.b))
    signed = range(-128, 128)
    zero, special = NARROW_LANES.zero, NARROW_LANES.special
    every = [(x, y) for x in a | {zero, special} for y in b | {zero, special}]
    assert all(x in signed and y in signed and x + y in signed for x, y in every)
    assert all(x + y <= form.least for x, y in every if zero in (x, y) and special not in (x, y))
    assert min(a | b) > zero and max(a | b) < special and min(a) + min(b) > form.least
    kernel, unsigned = kernel_form(form), range(256)
    x_lanes, y_lanes = ({e + bias for e in side} for side, bias in zip((a, b), kernel.lane_biases, strict=True))
    assert sum(kernel.lane_biases) == BIAS and kernel.lane_zero == 0
    assert all(x in unsigned and y in unsigned and x + y in unsigned for x in x_lanes | {0} for y in y_lanes | {0})
    assert all(x + y <= kernel.least for x in x_lanes | {0} for y in y_lanes | {0} if 0 in (x, y))
    assert min(x_lanes) + min(y_lanes) > kernel.least and kernel.least in unsigned


# ---- wide formats


@proves("forms.WIDE_LANES", "llvm.bounded_lanes.KernelForm", by=INTERVALS, domain="every wide form: lanes of 16 bits")
@pytest.mark.parametrize("form", sorted(set(WIDE.values()), key=repr), ids=repr)
def test_lanes_of_16_bits_do_not_wrap(form):
    scaled = any(row.spec.scale is not None for name, row in step_rows().items() if WIDE.get(name) == form)
    ends = lambda fmt: {fmt.min_exponent - 127 * scaled, fmt.max_exponent + 128 * scaled}  # 128: the scale is NaN
    a, b, signed = ends(form.a), ends(form.b), range(-(1 << 15), 1 << 15)
    zero, special = WIDE_LANES.zero, WIDE_LANES.special
    kernel = kernel_form(form)
    for biases, of_zero in (((0, 0), zero), (kernel.lane_biases, kernel.lane_zero)):
        x_lanes, y_lanes = ({e + bias for e in side} for side, bias in zip((a, b), biases, strict=True))
        every = [(x, y) for x in x_lanes | {of_zero, special} for y in y_lanes | {of_zero, special}]
        assert all(x in signed and y in signed and x + y in signed for x, y in every)
        assert all(x + y <= form.least + sum(biases) for x, y in every if of_zero in (x, y) and special not in (x, y))
    assert max(a | b) < special


def exponent_ranges(trace: Trace) -> tuple[list[SmtValue], list[SmtValue], SmtValue, list[SmtValue]]:
    """The ranges that a guard sees, exponents within them, the bits of the number of products, and what holds of these."""
    ends = [trace.variable(I32, name) for name in ("x_low", "x_high", "y_low", "y_high")]
    x, y, bits = (trace.variable(I32, name) for name in ("x", "y", "bits"))
    x_low, x_high, y_low, y_high = ends
    inside = [(x >= x_low) & (x <= x_high), (y >= y_low) & (y <= y_high), between(bits, 1, MOST_PRODUCT_BITS)]
    return ends, [x, y], bits, inside + [between(end, *EXPONENTS) for end in ends]


def is_normal(exponent: SmtValue) -> SmtValue:
    return between(exponent, F32.min_exponent, F32.max_exponent)


@proves(
    "forms.factors_are_bounded", "forms.largest_exponent_sum", by=SOLVER, domain="every wide form: all exponents and numbers of products"
)
@pytest.mark.parametrize(
    "form", {(f.a.mantissa_bits, f.b.mantissa_bits, f.fraction_bits, f.most): f for f in WIDE.values()}.values(), ids=repr
)
def test_bounded_factors_are_what_a_step_needs(form):
    """x and y: exponents of two factors that are not zero, with their scales. A subnormal number has that of the smallest normal one.

    Of a format, a guard sees the fraction bits alone.
    """
    trace, f = Trace(), form.fraction_bits
    ends, (x, y), bits, inside = exponent_ranges(trace)
    own = trace.variable(I32, "own")  # exponent of an accumulator
    guard = forms.factors_are_bounded(form, *ends, bits)
    # a factor lies from 2^(x - mantissa_bits) to 2^(x + 1), a product to 2^(x + y + 2)
    claim = is_normal(x - form.a.mantissa_bits) & is_normal(x) & is_normal(y - form.b.mantissa_bits) & is_normal(y)
    claim = claim & is_normal(x + y - form.a.mantissa_bits - form.b.mantissa_bits) & is_normal(x + y + 1)
    # |C| < 2^(most + 1), and all products together are below 2^(bits + x + y + 2)
    claim = claim & (x + y + bits + 2 <= MAX_ACCUMULATOR + 1) & (form.most + 1 <= MAX_ACCUMULATOR + 1)
    top = (x + y).max(own).max(form.least)
    claim = claim & is_normal(top - f) & is_normal(f - top) & ((x + y) + BIAS <= 251)
    prove(trace, claim, guard, *inside, own <= MAX_ACCUMULATOR + 1)
    assert form.most == MAX_ACCUMULATOR and f + 1 <= form.least + BIAS <= 251


@proves("forms.accumulator_is_bounded", by=SOLVER, domain="every bounded form: all 2^32 codes")
@pytest.mark.parametrize("least, most", sorted({(form.least, form.most) for form in bounded_forms().values()}))
def test_bounded_accumulators_are_what_a_step_needs(least, most):
    trace = Trace()
    code = trace.variable(I32, "code")
    magnitude, field = code & 0x7FFFFFFF, (code >> 23) & 0xFF
    guard = forms.accumulator_is_bounded(magnitude, field, least, most)
    claim = (code << 1 == 0) | (between(field, 1, 254) & (field >= least + BIAS))
    prove(trace, claim & (magnitude < (most + 1 + BIAS) << 23) & (magnitude < 0x7F000000), guard)


# ---- groups


@proves(
    "forms.scales_are_bounded",
    "forms.GroupedForm",
    by=SOLVER,
    domain="every form of groups: all exponents of scales and numbers of products",
)
@pytest.mark.parametrize("name", GROUPED)
def test_bounded_scales_are_what_a_step_of_groups_needs(name):
    """x and y: exponents of two scales that meet. A group's sum is an integer in units of 2^unit times both scales."""
    form = grouped_forms()[name]
    n, bits_of_scale = form.numbers, form.scale.mantissa_bits
    sum_bits = (n.summed * forms.largest_value(form.a) * forms.largest_value(form.b)).bit_length()
    assert sum_bits + 2 * (bits_of_scale + 1) <= F32.mantissa_bits + 1  # the sum with its scales is exact
    trace = Trace()
    ends, (x, y), bits, inside = exponent_ranges(trace)
    own = trace.variable(I32, "own")
    guard = forms.scales_are_bounded(form, *ends, bits)
    claim = is_normal(x - bits_of_scale) & is_normal(x) & is_normal(y - bits_of_scale) & is_normal(y)  # scales
    for scale in (x, y):
        claim = claim & is_normal(scale + sum_bits)  # the sum, and every value, with one scale
    claim = claim & is_normal(x + y - 2 * bits_of_scale) & is_normal(x + y + sum_bits + 1)  # with both
    # all products together, in units of 2^unit, and the accumulator
    claim = claim & (bits + x + y + 4 + form.a.max_exponent + form.b.max_exponent - form.unit <= MAX_ACCUMULATOR + 1)
    top = (x + y).max(own).max(form.least)
    for exponent in (n.fraction_bits, n.fraction_bits + form.unit):  # `groups.power`
        claim = claim & is_normal(exponent - top)
    claim = claim & is_normal(top - n.fraction_bits)  # `groups.unit`
    prove(trace, claim, guard, *inside, own <= MAX_ACCUMULATOR + 1, bits >= n.terms.bit_length())


@proves("forms.grouped_form", by=INTERVALS, domain="every form of groups")
@pytest.mark.parametrize("name", GROUPED)
def test_aligned_sums_of_groups_fit_two_parts(name):
    form = grouped_forms()[name]
    n = form.numbers
    group = n.summed * forms.largest_value(form.a) * forms.largest_value(form.b) * largest_significand(form.scale) ** 2
    aligned = group * 2 ** (n.fraction_bits + form.unit - 2 * form.scale.mantissa_bits)  # where its scales decide the alignment
    assert form.groups * aligned + 2 ** (n.fraction_bits + 1) < 2**forms.SUM_BITS
    assert (form.groups + 1) * 2**forms.LOW_BITS < 2**31  # the sum of lower parts
    assert n.floor <= F32.min_exponent and (n.rounding, n.alignment) == ("RZ", "RZ") and n.fraction_bits >= n.kept


@proves("forms.GroupedForm.has_narrow_scales", by=SOLVER, domain="every form of groups whose scales need no guard")
@pytest.mark.parametrize("name", [name for name, form in grouped_forms().items() if form.has_narrow_scales])
def test_narrow_scales_pass_the_guard(name):
    form: GroupedForm = grouped_forms()[name]
    trace = Trace()
    ends, _, bits, _ = exponent_ranges(trace)
    within = [between(end, form.scale.min_exponent, form.scale.max_exponent) for end in ends]
    prove(trace, forms.scales_are_bounded(form, *ends, bits), *within, between(bits, 1, MOST_PRODUCT_BITS))
