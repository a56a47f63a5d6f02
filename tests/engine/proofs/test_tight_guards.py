"""No guard of `tcemu.engine.arithmetic.step.forms` is stricter than it must be: one step further, what it bounds would not hold, or is not
meant.

`test_guard_proofs` shows that guards are strict enough. A guard that is too strict changes no bit, but a kernel becomes slow.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import get_type_hints

import pytest
from step_rows import bounded_forms, grouped_forms, numbers, step_rows

from tcemu.engine.arithmetic.step import forms
from tcemu.engine.arithmetic.step.forms import BoundedForm, GroupedForm, IntegerForm, StepNumbers
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


def test_other_models_have_no_bounded_step():
    model, spec = step_rows()["bf16 in steps of 16 by 25"]
    has = lambda **fields: forms.bounded_form(model.replace(**fields), spec, 16) is not None
    assert has() and has(result_bits=6) and has(floor=-126) and has(fraction_bits=26) and not has(fraction_bits=27)
    assert not has(floor=-125) and not has(result=F16) and not has(chain=16) and not has(summed=16)
    assert not has(rounding="RN") and not has(alignment="RN")
    assert forms.bounded_form(model, spec._replace(d=F16), 16) is None


@pytest.mark.parametrize("form", BOUNDED, ids=repr)
def test_sums_are_divided_only_where_they_must(form: BoundedForm):
    largest, own = largest_units(form.a, form.b, form.fraction_bits), 2 ** (form.fraction_bits + 1) - 1
    significands = (form.a.mantissa_bits + 1) + (form.b.mantissa_bits + 1)
    assert form.spare_bits == 21 - form.fraction_bits
    for terms in (form.terms, 255, *(1 << at for at in range(14))):
        one = form._replace(terms=terms)
        assert one.sums == (1 if terms * largest <= LARGEST_WORD else 2)
        assert one.fits == (terms * largest + own <= LARGEST_WORD)
        by_addition = form.is_narrow and form.spare_bits >= significands and terms < 2 ** min(form.spare_bits, 8)
        assert one.truncates_by_addition == by_addition
        assert one.adds_floats == (form.is_narrow and terms * 2 ** (form.fraction_bits + 2) <= 2**23)


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


@pytest.mark.parametrize("form", SCALED, ids=repr)
def test_the_ends_of_a_step_of_groups(form: GroupedForm):
    """Other numbers of fraction bits, and scales that reach just what they may, as no row has them."""
    n, scale = form.numbers, form.scale
    has = lambda **fields: forms.grouped_form(n._replace(**fields), form.a, form.b, scale, F32, F32) is not None
    assert has() and has(floor=-126) and not has(floor=-125)
    assert not has(rounding="RN") and not has(alignment="RN")
    for bits in range(1, 64):  # an aligned sum has at most 49 bits, and what a group's sum is multiplied by for its upper part is normal
        aligned = form.groups * sum_of(form) * Fraction(significands(scale)) ** 2 * Fraction(2) ** (bits - n.mantissas)
        assert has(fraction_bits=bits) == (aligned + 2 ** (bits + 1) < 2**49 and bits + form.unit - 25 - 127 >= -126)
    with_bits = lambda bits: form._replace(numbers=n._replace(fraction_bits=bits)).least
    assert [with_bits(bits) for bits in (0, 5, 6, 7)] == [-126 + max(bits, 2 * scale.mantissa_bits) for bits in (0, 5, 6, 7)]
    # 2^63 products of two scales stay below what a sum may be, and two least scales meet at the least exponent or above
    reaching = lambda low: form._replace(scale=Format("made", 8, 6, 2, 1 - low, signed=False)).has_narrow_scales
    top, least = (form.most - 63) // 2, -(-form._replace(scale=Format("made", 8, 6, 2, signed=False)).least // 2)
    assert reaching(top - 62) and not reaching(top - 61) and reaching(least) and not reaching(least - 1)


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


# ---- steps in integers, and on factors that are kept as floats


def integer_forms() -> list[IntegerForm]:
    """Every arithmetic with each number of fraction bits, each rounding of its terms, and other numbers of products."""
    every = [IntegerForm(numbers()[name], row.spec.a, row.spec.b, row.model.result) for name, row in step_rows().items()]
    found = {(form.numbers.terms, form.numbers.mantissas, form.numbers.summed, form.result): form for form in every}.values()
    changed = [
        {"fraction_bits": bits, "alignment": mode} | terms
        for bits in range(1, 46)
        for mode in ("RZ", "RN")
        for terms in ({}, {"terms": 1}, {"terms": 5}, {"terms": 17})
    ]
    return [form._replace(numbers=form.numbers._replace(**fields)) for form in found for fields in changed]


def significands(*fmts: Format) -> int:
    """The product of the largest significands."""
    size = 1
    for fmt in fmts:
        size *= 2 ** (fmt.mantissa_bits + 1) - 1
    return size


def test_words_hold_what_a_step_in_integers_has():
    seen = set()
    for form in integer_forms():
        n = form.numbers
        product = significands(form.a, form.b) * 2 ** max(0, n.fraction_bits - n.mantissas)
        own = significands(form.result) * 2 ** max(0, n.fraction_bits - form.result.mantissa_bits)
        in_words = n.alignment == "RZ" and n.summed == 0 and product < 2**31 and own < 2**31
        assert form.truncates_words == in_words
        most = LARGEST_WORD // product if in_words else n.terms
        assert form.terms_of_sum == min(n.terms, most)
        assert form.sum_fits_word == (in_words and n.terms * product + own < 2**32)  # a magnitude, of which all bits count
        assert form.accumulator_fits == (own < (2**31 if n.alignment == "RZ" else 2**30))  # `rounding.round_integer`
        # terms are below 2^(fraction_bits + 2), or rounded to it, and so are as many as the next power of two; a bit is to spare
        next_power = 1 << (n.terms - 1).bit_length()
        assert form.sum_fits_int == (n.summed == 0 and next_power * 2 ** (n.fraction_bits + 2) <= 2**29)
        seen.add((form.truncates_words, form.terms_of_sum < n.terms, form.sum_fits_word, form.accumulator_fits, form.sum_fits_int))
    assert len(seen) >= 6


def test_which_steps_end_in_f64():
    """The result is an f32, terms are truncated, and all bits of a sum whose unit is a normal f64 lie in its range."""
    n, form = numbers()["f16 in steps of 16 by 25"], IntegerForm(numbers()["f16 in steps of 16 by 25"], F16, F16, F32)
    ends = lambda **fields: form._replace(numbers=n._replace(**fields)).ends_in_f64
    assert ends() and ends(rounding="RN") and ends(kept=13) and not ends(rounding="RN", kept=13) and not ends(rounding="RP")
    assert not ends(alignment="RN") and not ends(summed=16) and not form._replace(result=F16).ends_in_f64
    assert [ends(floor=floor) for floor in (-900, -899, 899, 900)] == [False, True, True, False]
    assert all(-899 - f >= -1022 and 899 + 52 - f < 1023 for f in (1, 25, 45))


def test_products_are_normal_within_the_ends_of_f32():
    """With 126 binades above the least normal f32, every bit of a product is one; with 28 fraction bits a product of units is one too."""
    n = numbers()["bf16 in steps of 16 by 25"]
    fmt = lambda bias: Format("made", 16, 6, 9, bias)
    normal = lambda a, b: IntegerForm(n._replace(mantissas=18), fmt(a), fmt(b), F32).products_are_normal
    # the least product is 2^(2 - biases), and its last place 18 bits below; the largest ones are below 2^(126 - biases + 2)
    assert normal(51, 52) and 2 - 103 - 18 == -119 and not normal(52, 52)
    assert normal(13, 14) and 63 - 14 + 63 - 13 == 99 and not normal(13, 13)


def test_which_factors_are_kept_as_floats():
    n = numbers()["f16 in steps of 16 by 25"]
    kept = lambda stored=F16, fmt=F16, **fields: forms.keeps_floats(n._replace(**fields), (stored, F16), (fmt, F16))
    assert kept() and kept(TF32, TF32) and kept(BF16, BF16) and kept(E5M2, F16) and not kept(BF16, F16) and not kept(F32, F32)
    assert [kept(mantissas=bits) for bits in (22, 23)] == [True, False]  # a product of 24 bits is an f32
    assert [kept(fraction_bits=bits) for bits in (0, 1, 28, 29)] == [False, True, True, False]
    assert [kept(floor=floor) for floor in (-141, -140, 100, 101)] == [False, True, True, False]
    assert not kept(alignment="RN") and not kept(summed=16)


def test_numbers_of_a_step():
    """All stand in the texts of kernels, as numbers and truths."""
    for name, n in numbers().items():
        assert {field: type(v) for field, v in n._asdict().items()} == get_type_hints(StepNumbers)
        assert (n.promoted, n.block_scaled) == (0, False) and (n.chain > 0) == (step_rows()[name].model.chain is not None)
        assert n.of_instruction == step_rows()[name].spec.k == n.of_group * n.groups
