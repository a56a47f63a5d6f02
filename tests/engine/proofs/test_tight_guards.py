"""No guard of `tcemu.engine.arithmetic.step.forms` is stricter than it must be: one step further, what it bounds would not hold, or is not
meant.

`test_guard_proofs` shows that guards are strict enough. A guard that is too strict changes no bit, but a kernel becomes slow.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from step_rows import bounded_forms, grouped_forms, numbers, step_rows

from tcemu.engine.arithmetic.step import forms
from tcemu.engine.arithmetic.step.forms import BoundedForm, GroupedForm
from tcemu.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, TF32, UE4M3, UE8M0, Format

MULTIPLIED = (F16, BF16, TF32, E4M3, E5M2, E2M3, E3M2, E2M1)
PAIRS = list(product(MULTIPLIED, MULTIPLIED))
LARGEST_WORD = 2**31 - 1
BOUNDED = sorted(set(bounded_forms().values()), key=repr)
SCALED = sorted(set(grouped_forms().values()), key=repr)


def largest_units(a: Format, b: Format, fraction_bits: int) -> int:
    """The largest product below 2^(e + 2) in units of 2^(e - fraction_bits), truncated, by exact fractions."""
    one = Fraction(1)
    return int((2 - one / 2**a.mantissa_bits) * (2 - one / 2**b.mantissa_bits) * 2**fraction_bits)


@pytest.mark.parametrize("a, b", PAIRS, ids=str)
def test_the_largest_product_of_two_formats(a, b):
    for fraction_bits in range(41):
        assert forms.largest_product(a, b, fraction_bits) == largest_units(a, b, fraction_bits)
        assert forms.largest_accumulator(fraction_bits) == 2 ** (fraction_bits + 1) - 1


@pytest.mark.parametrize("a, b", PAIRS, ids=str)
def test_as_many_products_as_a_word_can_hold_are_added_in_one(a, b):
    for fraction_bits in range(2, 31):
        most = LARGEST_WORD // largest_units(a, b, fraction_bits)
        assert [forms.products_fit_word(fraction_bits, a, b, terms) for terms in (most, most + 1)] == [True, False]
        sums = [forms.word_sums(fraction_bits, a, b, terms, "RZ") for terms in (most, most + 1, 2 * most, 2 * most + 1)]
        assert most == 0 or sums == [1, 2, 2, 0]
        assert forms.word_sums(fraction_bits, a, b, 1, "RN") == 0
    assert not forms.products_fit_word(31, a, b, 1) and not forms.products_fit_word(None, a, b, 1)


@pytest.mark.parametrize("a, b", PAIRS, ids=str)
def test_as_many_rounded_products_as_a_word_can_hold_are_added_in_one(a, b):
    for fraction_bits in range(2, 29):
        most = (LARGEST_WORD - 2 ** (fraction_bits + 1) - 1) // (largest_units(a, b, fraction_bits) + 1)
        counts = (most, most + 1, 2 * most, 2 * most + 1)
        assert most == 0 or [forms.float_sums(a, b, fraction_bits, terms) for terms in counts] == [1, 2, 2, 0]
    assert forms.float_sums(E2M1, E2M1, 28, 1) == 1 and forms.float_sums(E2M1, E2M1, 29, 1) == 0


def test_values_are_multiplied_as_they_are_up_to_the_ends_of_f32():
    small = [Format("small", 16, 6, 9, bias) for bias in (55, 56)]  # the least products are 2^-126 and, of both, 2^-127
    assert forms.is_compact(small[0], small[0]) and not forms.is_compact(*small)
    large = [Format("large", 16, 6, 9, bias) for bias in (1, 0)]  # up to 2^63 and 2^64
    assert forms.is_compact(*large) and not forms.is_compact(large[1], large[1])


# ---- bounded steps


def test_which_models_have_a_bounded_step():
    for name, (model, spec) in step_rows().items():
        n = numbers()[name]
        may = (model.result, spec.d) == (F32, F32) and not n.summed and not n.chain and n.floor <= -126
        may = (
            may
            and (n.rounding, n.alignment) == ("RZ", "RZ")
            and -(-n.terms // 2) * largest_units(spec.a, spec.b, n.fraction_bits) <= LARGEST_WORD
        )
        assert (name in bounded_forms()) == may, name


@pytest.mark.parametrize("form", BOUNDED, ids=repr)
def test_sums_are_divided_only_where_they_must(form: BoundedForm):
    largest, own = largest_units(form.a, form.b, form.fraction_bits), 2 ** (form.fraction_bits + 1) - 1
    assert form.sums == (1 if form.terms * largest <= LARGEST_WORD else 2)
    assert form.fits == (form.terms * largest + own <= LARGEST_WORD)
    assert form.spare_bits == 21 - form.fraction_bits
    significands = (form.a.mantissa_bits + 1) + (form.b.mantissa_bits + 1)
    by_addition = form.is_narrow and form.spare_bits >= significands and form.terms < 2 ** min(form.spare_bits, 8)
    assert form.truncates_by_addition == by_addition
    assert form.adds_floats == (form.is_narrow and form.terms * 2 ** (form.fraction_bits + 2) <= 2**23)


@pytest.mark.parametrize("form", BOUNDED, ids=repr)
def test_the_ends_of_a_bounded_step(form: BoundedForm):
    tops = form.a.max_exponent, form.b.max_exponent
    if form.is_narrow:
        assert form.lanes == (8, -64, 63) and form.least == max(tops) - 64 < form.a.min_exponent + form.b.min_exponent
        assert form.most == sum(tops) + 2 + form.fraction_bits + 1  # all products together are below 2^(most - fraction_bits + terms)
    else:
        assert form.lanes == (16, -8192, 8192) and form.most == 125
        assert form.least == -126 + max(form.fraction_bits, form.a.mantissa_bits + form.b.mantissa_bits)


def test_formats_are_narrow_where_they_can_be():
    narrow = {name for name, form in bounded_forms().items() if form.is_narrow}
    formats = {name: (form.a, form.b) for name, form in bounded_forms().items()}
    small = {F16, E4M3, E5M2, E2M3, E3M2, E2M1}
    assert narrow == {name for name, (a, b) in formats.items() if a in small and b in small and step_rows()[name].spec.scale is None}


@pytest.mark.parametrize("form", [form for form in BOUNDED if not form.is_narrow], ids=repr)
def test_a_guard_of_factors_holds_at_its_ends_and_not_beyond(form: BoundedForm):
    a, b = (-126 + fmt.mantissa_bits for fmt in (form.a, form.b))
    bits, least = 7, form.least
    holds = lambda xl, xh, yl, yh: bool(forms.factors_are_bounded(form, xl, xh, yl, yh, bits))
    far = max(least - a, b)
    assert holds(a, a, far, far) and not holds(a - 1, a, far + 1, far + 1)
    far = max(least - b, a)
    assert holds(far, far, b, b) and not holds(far + 1, far + 1, b - 1, b)
    assert holds(0, 127, b, 125 - 1 - bits - 127) == (least <= b) and not holds(0, 128, b, b) and not holds(a, a, 0, 128)
    middle = least // 2
    assert holds(middle, middle, least - middle, least - middle) and not holds(middle, middle, least - middle - 1, least - middle)
    assert holds(0, 60, 0, 125 - 1 - bits - 60) and not holds(0, 60, 0, 125 - bits - 60)
    assert holds(0, 127, 0, -10) and holds(0, -10, 0, 127)


@pytest.mark.parametrize("least, most", sorted({(form.least, form.most) for form in BOUNDED}))
def test_a_guard_of_accumulators_holds_at_its_ends_and_not_beyond(least, most):
    holds = lambda magnitude, exponent: bool(forms.accumulator_is_bounded(magnitude, exponent + 127, least, most))
    assert holds(1, least) and holds(1, most) and not holds(1, least - 1) and not holds(1, most + 1) and holds(0, -127)


# ---- groups


def test_which_models_have_a_bounded_step_of_groups():
    for name, (model, spec) in step_rows().items():
        n = numbers()[name]
        may = bool(n.summed) and spec.scale is not None and (model.result, spec.d) == (F32, F32) and not n.chain
        assert (name in grouped_forms()) == may, name
    assert {form.scale: form.has_narrow_scales for form in SCALED} == {UE4M3: True, UE8M0: False}


def sum_of(form: GroupedForm) -> int:
    """The largest sum of a group in units of its least product."""
    values = [(2 - Fraction(1) / 2**fmt.mantissa_bits) * Fraction(2) ** fmt.max_exponent for fmt in (form.a, form.b)]
    return int(form.numbers.summed * values[0] * values[1] / Fraction(2) ** form.unit)


@pytest.mark.parametrize("form", SCALED, ids=repr)
def test_a_guard_of_scales_holds_at_its_ends_and_not_beyond(form: GroupedForm):
    assert form.unit == sum(fmt.min_exponent - fmt.mantissa_bits for fmt in (form.a, form.b))
    assert form.groups == form.numbers.terms // form.numbers.summed
    low, high = -126 + form.scale.mantissa_bits, 127 - sum_of(form).bit_length()
    least = -126 + max(form.numbers.fraction_bits, 2 * form.scale.mantissa_bits)
    most = 126 - (form.a.max_exponent + form.b.max_exponent + 4) + form.unit
    assert (form.least_scale, form.most_scale, form.least, form.most) == (low, high, least, most)
    bits = 6
    holds = lambda xl, xh, yl, yh: bool(forms.scales_are_bounded(form, xl, xh, yl, yh, bits))
    assert holds(low, 0, least - low, 0) and not holds(low - 1, 0, least - low + 1, 0) and not holds(low, 0, least - low - 1, 0)
    assert holds(least - low, 0, low, 0) and not holds(least - low + 1, 0, low - 1, 0)
    assert holds(0, high, 0, most - bits - high) and not holds(0, high + 1, 0, most - bits - high - 1)
    assert holds(0, most - bits - high, 0, high) and not holds(0, most - bits - high - 1, 0, high + 1)
    assert not holds(0, high, 0, most - bits - high + 1)


def test_the_largest_value_of_a_format():
    for fmt in (*MULTIPLIED[:1], E4M3, E5M2, E2M3, E3M2, E2M1, UE4M3):
        value = (2 - Fraction(1) / 2**fmt.mantissa_bits) * Fraction(2) ** fmt.max_exponent
        assert forms.largest_value(fmt) == value / Fraction(2) ** (fmt.min_exponent - fmt.mantissa_bits)
