"""The anchored step's preconditions, from the numbers of its form: for every arithmetic, over the intervals of its exponents."""

import numpy as np
import pytest
from support.kernel_cases import CASES, signature
from support.llvm_products import arithmetics
from support.numpy_values import NumpyValue

from tcemu.engine.arithmetic.fitting import specialize
from tcemu.engine.arithmetic.step import anchored
from tcemu.engine.arithmetic.step.forms import (
    BYTE,
    MOST_OF_SCALE,
    NEAR,
    REACH,
    REPEATS,
    AnchoredForm,
    anchored_form,
    largest_value,
)
from tcemu.formats import BF16, F16, F32, F64

FORMS = {
    name: form
    for name, form in (
        *((name, anchored_form(*specialize(model, spec, block or None))) for name, (model, spec, block) in arithmetics().items()),
        *((f"case {name}", anchored_form(CASES[name][0], signature(name))) for name in CASES),
    )
    if form is not None
}
PRODUCTS = (1, 2, 3, 16, 1 << 14, 1 << 24)  # along K


def units_of_group(form: AnchoredForm) -> int:
    """The bits of a group's sum in units."""
    n, scales = form.numbers, (2 << form.scale.mantissa_bits) - 1
    largest = [largest_value(fmt) * scales for fmt in (form.a, form.b)]
    return (n.summed * largest[0] * largest[1] << max(n.fraction_bits - n.mantissas, 0)).bit_length()


def units(form: AnchoredForm) -> int:
    """The bits of a step's sum in units: products, the accumulator, and a unit for each negative product."""
    n = form.numbers
    if n.summed:
        return ((n.terms // n.summed << units_of_group(form)) + (2 << n.fraction_bits)).bit_length()
    return (n.terms * ((4 << n.fraction_bits) + 1) + (2 << n.fraction_bits)).bit_length()


def sums_stay_in_half_a_binade(form, k):
    assert units(form) <= (F64 if form.wide else F32).mantissa_bits - 1


def exponents(form: AnchoredForm, k: int) -> tuple[int, int]:
    """The least and the greatest exponent that a fast step of k products aligns to, where exponents are absolute."""
    n, limit = form.numbers, form.exponent_limit(k)
    # an accumulator is below 2^most, or below 2^(max_exponent + 1) where it is an f16; each product is below 2^(limit + 2)
    largest = (2**form.most + k * 2.0 ** (limit + 2)) if form.result == F32 else 2.0 ** (form.result.max_exponent + 1)
    own = int(largest).bit_length() - 1 if form.result == F32 else form.result.max_exponent
    return -form.offset, max(own, limit, n.floor)


def anchors_are_normal_floats(form, k):
    fmt = F64 if form.wide else F32
    least, largest = exponents(form, k)
    assert fmt.min_exponent <= least + form.up and largest + form.up <= fmt.max_exponent


def the_field_of_a_sum_of_powers_is_the_max_exponent(form, k):
    """The powers are normal bf16, their products normal f32, and the products that are added are fewer than 2^base."""
    n, power = form.numbers, form.power_of_a + form.power_of_b
    added = min(max(n.terms, 8), 8 if form.base == 4 else 1 << 30)
    scale = form.scale if n.summed else None
    sides = [(fmt if scale is None else scale) for fmt in (form.a, form.b)]
    ranges = [(-REACH, 0) if form.relative else (fmt.min_exponent, fmt.max_exponent) for fmt in sides]
    for (low, high), one in zip(ranges, (form.power_of_a, form.power_of_b), strict=True):
        assert BF16.min_exponent <= form.base * low + one and form.base * high + one <= BF16.max_exponent
    low, high = (-NEAR, 0) if form.relative else map(sum, zip(*ranges, strict=True))
    assert added < 2**form.base
    assert F32.min_exponent <= form.base * low + power and form.base * (high + 1) + power <= F32.max_exponent + 1
    for e in range(low, high + 1):  # the field, divided by the base
        fields = {(form.base * e + power + more + F32.bias) // form.base for more in range(form.base)}
        assert fields == {e + form.offset}
    if form.relative:  # bit 30 of an f32 is the top bit of its field
        assert form.base * low + power + F32.bias >= BYTE > form.base * (low - 1) + form.base - 1 + power + F32.bias


def bytes_tell_integers_and_do_not_overflow(form, k):
    n = form.numbers
    if n.summed:
        return
    if form.relative:
        least, largest = 2 * form.depth - NEAR - n.fraction_bits, 2 * form.depth + 1
        low_bits = form.depth
        assert form.depth < least  # one that is cut off at the depth reaches no unit with any other
    else:
        low, high = exponents(form, k)
        least, largest = (e - n.fraction_bits - form.low_bits_begin for e in (low, high))
        low_bits = max(fmt.max_exponent - fmt.min_exponent + fmt.mantissa_bits for fmt in (form.a, form.b))
        assert form.low_bits_begin == sum(fmt.min_exponent - fmt.mantissa_bits for fmt in (form.a, form.b))
    assert form.absent >= largest  # a zero is an integer, whatever the other factor is
    most = max(form.absent, low_bits)
    assert BYTE - largest >= 0 and BYTE - least + most + form.absent <= 255 and BYTE - least + 2 * low_bits <= 255


def plain_accumulators_are_multiples_of_the_least_unit(form, k):
    """Results of a fast step are plain, and where products are all zero no plain accumulator is truncated."""
    n = form.numbers
    lowest = form.least_tops - NEAR if form.relative else -form.offset  # the least exponent of a step with products
    assert form.least_unit <= lowest - n.fraction_bits and (n.floor - n.fraction_bits <= form.least_unit or form.floor_counts)
    assert form.relative or form.least_unit == lowest - n.fraction_bits  # to which a step of zeros aligns too
    assert form.result == F16 or form.least_unit > F32.min_exponent or not form.relative  # normal f32, or exact ones


def accumulators_stay_finite(form, k):
    """Sums are f32 where the result is, those of groups too."""
    n, sides = form.numbers, (form.scale, form.scale) if form.numbers.summed else (form.a, form.b)
    limit = form.exponent_limit(k) if form.relative else min(form.exponent_limit(k), sum(fmt.max_exponent for fmt in sides))
    terms, above = (-(-k // n.summed), units_of_group(form) - n.fraction_bits) if n.summed else (k, 2)
    assert form.result == F16 or 2.0**form.most + terms * 2.0 ** (limit + above) < 2.0**F32.max_exponent


def groups_are_exact_in_bf16(form, k):
    if not form.numbers.summed:
        return
    scales = (2 << form.scale.mantissa_bits) - 1
    for fmt in (form.a, form.b):
        assert largest_value(fmt) * scales < 2 << BF16.mantissa_bits
        unit = form.scale.min_exponent + fmt.min_exponent - fmt.mantissa_bits - form.scale.mantissa_bits
        assert unit >= BF16.min_exponent - BF16.mantissa_bits
        assert MOST_OF_SCALE + fmt.max_exponent + 2 <= BF16.max_exponent


def repeated_sums_fit(form, k):
    """Sums of a tensor core stay in the anchor's binade, which is a normal f32, and are whole last places of it; results are an f32 too."""
    n, (least, largest) = form.numbers, exponents(form, k)
    for own_bits in OWN_BITS:
        if form.can_repeat_products(own_bits):
            products, last_place = n.terms * (4 << n.fraction_bits), 1 << (own_bits - F32.mantissa_bits)
            assert REPEATS * (products + (2 << n.fraction_bits)) <= 1 << (own_bits - 1) and REPEATS % last_place == 0
            up = own_bits - n.fraction_bits
            assert F32.min_exponent <= least + up - own_bits and largest + up <= F32.max_exponent and up > 1
            assert max(form.a.mantissa_bits, form.b.mantissa_bits) <= BF16.mantissa_bits and not (form.wide or form.relative or n.summed)


OWN_BITS = (23, 24, 25)  # fraction bits of tensor cores


def test_which_steps_a_tensor_core_truncates():
    """Those of FP8 that keep 13 bits, whatever else they have."""
    found = {name for name, form in FORMS.items() if form.can_repeat_products(25)}
    assert found == {name for name, form in FORMS.items() if form.numbers.fraction_bits == 13 and form.a.bits == 8}
    assert len(found) > 10 and not any(form.can_repeat_products(bits) for form in FORMS.values() for bits in (0, 22, 26))
    form = FORMS["case e4m3"]
    changed = lambda **fields: form._replace(numbers=form.numbers._replace(**fields))
    widest = {bits: max(b for b in range(1, 24) if changed(fraction_bits=b).can_repeat_products(bits)) for bits in OWN_BITS}
    assert widest == {23: 12, 24: 13, 25: 14}
    assert not changed(terms=8).can_repeat_products(25) and not form._replace(most=F32.max_exponent - 11).can_repeat_products(25)


CHECKS = (
    sums_stay_in_half_a_binade, anchors_are_normal_floats, the_field_of_a_sum_of_powers_is_the_max_exponent,
    bytes_tell_integers_and_do_not_overflow, plain_accumulators_are_multiples_of_the_least_unit,
    accumulators_stay_finite, groups_are_exact_in_bf16, repeated_sums_fit,
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_form(check):
    for name, form in FORMS.items():
        for k in PRODUCTS:
            try:
                check(form, k)
            except AssertionError as error:
                raise AssertionError(f"{name}, {k} products: {error}") from error


WRONG = {  # case -> changes of its form that are wrong
    "f16": (
        ("most", 1), ("least_unit", 1), ("least_unit", -1), ("absent", 1), ("absent", -2), ("offset", 1), ("offset", -1), ("power_of_a", 1),
        ("power_of_b", -1), ("low_bits_begin", 1), ("low_bits_begin", -1), ("base", 4), ("wide", -1),
    ),
    "bf16": (
        ("least_unit", 1), ("absent", 1), ("depth", -1), ("depth", 20), ("least_tops", -1), ("offset", 1), ("offset", -1),
        ("power_of_a", 1), ("power_of_b", -1), ("base", -4), ("wide", -1),
    ),
    "e4m3": (("most", 1), ("absent", 1), ("absent", -2), ("offset", 1), ("low_bits_begin", -1), ("power_of_b", -1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_bound_that_is_wrong_by_one_is_seen(name):
    form = FORMS[f"case {name}"]
    for field, change in WRONG[name]:
        wrong = form._replace(**{field: getattr(form, field) + change})
        with pytest.raises(AssertionError):
            for check in CHECKS:
                for k in PRODUCTS:
                    check(wrong, k)
            pytest.fail(f"{field} {change:+d} is not seen")


@pytest.mark.parametrize("name", ["f16", "bf16", "e4m3", "mxf8", "nvf4"])
def test_a_floor_above_the_accumulators_has_no_form(name):
    model, spec = CASES[name][0], signature(name)
    form = anchored_form(model, spec)
    assert form is not None
    assert anchored_form(model.replace(floor=form.most), spec) is not None
    assert anchored_form(model.replace(floor=form.most + 1), spec) is None


@pytest.mark.parametrize("name", ["f16", "bf16", "e4m3", "mxf8", "nvf4", "f16 results"])
def test_which_accumulators_anchored_steps_take(name):
    """All of f16, and of f32 one for each lowest and each highest bit: no more than may be, and no fewer."""
    form = FORMS[f"case {name}"]
    fmt, stored = form.result, form.result.mantissa_bits
    codes = np.arange(1 << 16)
    if fmt == F32:
        fractions = [0, *(1 << bit for bit in range(23)), (1 << 23) - 1]
        codes = np.array([sign << 31 | field << 23 | fraction for sign in (0, 1) for field in range(256) for fraction in fractions])
    code = NumpyValue(codes.astype(np.uint32).view(np.int32))
    fields, fractions = codes >> stored & (1 << fmt.exponent_bits) - 1, codes & (1 << stored) - 1
    sizes = np.where(fields == 0, fractions, fractions | 1 << stored)  # in units of 2^unit
    units, leading = np.maximum(fields, 1) - fmt.bias - stored, np.frexp(sizes)[1] - 1
    lowest = np.frexp(sizes & -sizes)[1] - 1
    # the exponent of a number is that of the least normal one, or larger
    inside = (np.maximum(units + leading, fmt.min_exponent) < form.most) & (units + lowest >= form.least_unit)
    finite = fields < (1 << fmt.exponent_bits) - 1
    assert (anchored.is_plain(form, code).array == (finite & (inside | (sizes == 0)))).all()
    single = code.as_float().array if fmt == F32 else codes.astype(np.uint16).view(np.float16).astype(np.float32)
    own = anchored.own_exponent(form, NumpyValue(single).widen() if form.wide else NumpyValue(single)).array
    assert ((own >> form.field) - form.bias == np.maximum(units + leading, fmt.min_exponent))[finite & inside & (sizes != 0)].all()
    assert (own[sizes == 0] == 0).all()
    words = np.arange(1, 2 * form.bias) << form.field
    small = anchored.is_small(form, NumpyValue(words.astype(np.int32))).array
    assert (small == ((words >> form.field) - form.bias <= fmt.max_exponent)).all()


# The numbers of fraction bits with an anchored step: all from the first to the last
FRACTION_BITS = {"f16": (13, 40), "bf16": (1, 29), "e4m3": (1, 40), "mxf8": (1, 29), "nvf4": (23, 37), "f16 results": (13, 40)}


@pytest.mark.parametrize("name", FRACTION_BITS)
def test_which_fraction_bits_have_a_form(name):
    """As many as keep a step's preconditions, and no fewer."""
    model, spec = CASES[name][0], signature(name)
    found = {bits: anchored_form(model.replace(fraction_bits=bits), spec) for bits in range(1, 41)}
    first, last = FRACTION_BITS[name]
    assert [bits for bits, form in found.items() if form is not None] == list(range(first, last + 1))
    for form in found.values():
        for check in CHECKS if form is not None else ():
            for k in PRODUCTS:
                check(form, k)


def test_what_is_not_known_has_no_form():
    model, spec = CASES["f16"][0], signature("f16")
    for fields in ({"nan": 0x7FFFFFFF}, {"rounding": "RN"}, {"fraction_bits": None}):
        assert anchored_form(model.replace(**fields), spec) is None
    relative = [form for form in FORMS.values() if form.relative]
    assert relative and all(form.least_unit == -125 for form in relative)  # what is a multiple of it is a normal f32
