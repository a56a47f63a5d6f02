"""Whole steps by the formulas that CUDA kernels render, on NumPy arrays as lane values: in seconds, without a compiler or a GPU.

The loops do what those of `backends/cuda/kernels` do for each element of D: `by_integers` what step.cu does, `by_anchors` what align.cu,
products.cu and groups.cu do, `by_floats` what floats.cu does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from support.llvm_products import Arithmetic
from support.numpy_values import NumpyValue
from support.step_lattice import Lattice
from tcemu.engine.arithmetic.fitting import specialize
from tcemu.engine.arithmetic.order import Order
from tcemu.engine.arithmetic.step import anchored, bounded, decoding, forms, general, kept_floats, specials
from tcemu.engine.arithmetic.step.decoding import SPECIAL_EXPONENT, ZERO_EXPONENT, MarkedFactor
from tcemu.engine.arithmetic.step.forms import AnchoredForm, IntegerForm, StepNumbers
from tcemu.engine.arithmetic.step.values import F32, F64, I32, I64
from tcemu.formats import F16, Format
from tcemu.formats import F64 as BINARY64

Array = Any


class Step(NamedTuple):
    """The factors of one step as codes [entry, row, 1, product] and [entry, 1, column, product], and their scales."""

    x: Array
    y: Array
    x_scale: Array | None
    y_scale: Array | None


class Case(NamedTuple):
    """One arithmetic whose steps follow each other from C on."""

    numbers: StepNumbers
    stored: tuple[Format, Format]
    multiplied: tuple[Format, Format]
    scale: Format | None
    result: Format
    anchored: AnchoredForm | None
    products: int  # along K
    steps: list[Step]
    start: Array  # codes of C

    @property
    def form(self) -> IntegerForm:
        return IntegerForm(self.numbers, *self.multiplied, self.result)


def case_of(arithmetic: Arithmetic, lattice: Lattice) -> Case | None:
    """The steps of a lattice; None where a kernel does more than one step after the other."""
    model, spec, block = arithmetic
    fitted = specialize(model, spec, block or None)
    numbers = forms.step_numbers(*fitted)
    if numbers is None or numbers.chain or spec.c != model.result or spec.d != model.result:
        return None
    order, k = Order.from_model(fitted[0], spec.k), lattice.a.shape[-1]
    steps = []
    for begin in range(0, k, spec.k):
        for products in order.steps(spec.k):
            at = begin + np.array(products)
            scales: list[Array | None] = [None, None]
            if lattice.scales is not None:
                scales = [lattice.scales[0][:, :, at // block][:, :, None], np.moveaxis(lattice.scales[1][:, at // block], 1, -1)[:, None]]
            steps.append(Step(lattice.a[:, :, at][:, :, None], np.moveaxis(lattice.b[:, at], 1, -1)[:, None], *scales))
    multiplied = fitted[1].a, fitted[1].b
    anchored_form = forms.anchored_form(*fitted)
    return Case(numbers, (spec.a, spec.b), multiplied, spec.scale, model.result, anchored_form, k, steps, lattice.c)


def value(codes: Array) -> NumpyValue:
    """Codes as i32."""
    return NumpyValue(np.asarray(codes).astype(np.uint32).view(np.int32))


def codes_of(fmt: Format, code: NumpyValue) -> Array:
    return code.array.astype(np.int64) & (1 << fmt.bits) - 1


def marked(case: Case, side: int, codes: Array, scales: Array | None) -> MarkedFactor[NumpyValue]:
    """Factors in integers."""
    stored, fmt, code = case.stored[side], case.multiplied[side], value(codes)
    x = decoding.mark_factor(stored, code)
    if stored != fmt:
        size, exponent = decoding.convert_magnitude(stored, fmt, decoding.mark_magnitude(stored, code))
        negative = decoding.sign_mask(stored, code)
        x = MarkedFactor((size ^ negative) - negative, exponent)
    if scales is not None:
        assert case.scale is not None
        x = decoding.scale_factor(fmt, case.scale, case.numbers.summed > 0, x, value(scales))
    return x


def all_products(x: NumpyValue, y: NumpyValue) -> Iterator[tuple[NumpyValue, NumpyValue]]:
    """The factors of each product of a step."""
    for t in range(x.array.shape[-1]):
        yield NumpyValue(x.array[..., t]), NumpyValue(y.array[..., t])


# ---- step.cu


def by_integers(case: Case) -> Array:
    """The codes of D."""
    code = value(case.start)
    for step in case.steps:
        code = step_in_integers(case, step, code)
    return codes_of(case.result, code)


def step_in_integers(case: Case, step: Step, code: NumpyValue) -> NumpyValue:
    n, form = case.numbers, case.form
    x, y = (marked(case, side, *operands) for side, operands in enumerate(((step.x, step.x_scale), (step.y, step.y_scale))))
    products = (x.exponent + y.exponent).array.max(-1)
    top = NumpyValue(products).max(decoding.mark_factor(case.result, code).exponent).max(n.floor)
    classes = [specials.marked_class(side) for side in (x, y)]
    total_class = specials.special_value(case.result, code)
    for one, other in all_products(*classes):
        total_class = total_class + one * other
    lane, of_term = I32 if form.sum_fits_int else I64, n.summed or 1
    product, exponent = (x.significand * y.significand).array, (x.exponent + y.exponent).array
    total: Any = 0
    for at in range(0, n.terms, of_term):
        term, own = NumpyValue(product[..., at : at + of_term].sum(-1, np.int32)), NumpyValue(exponent[..., at : at + of_term].max(-1))
        total = general.align_signed(term, n.mantissas, top - own, n.fraction_bits, n.alignment, lane) + total
    plain = general.end_step(form, total.resize(I64), code, top)
    special = specials.code_of_class(case.result, total_class, code.constant(0))
    return (top > SPECIAL_EXPONENT // 2).select(special, plain)


# ---- align.cu, products.cu and groups.cu


class Line(NamedTuple):
    """The factors of a step as the anchored step reads them."""

    factors: MarkedFactor[NumpyValue]
    top: NumpyValue  # the max exponent of each line
    powers: Array  # f32
    near: Array  # products near the max exponent


def prepare(case: Case, form: AnchoredForm, side: int, codes: Array, scales: Array | None) -> Line:
    x = marked(case, side, codes, scales)
    exponents = np.where(x.exponent.array == ZERO_EXPONENT, forms.NO_TOP, np.minimum(x.exponent.array, forms.SPECIAL_TOP))
    top = exponents.max(-1)
    if case.numbers.summed:
        top = np.where(top > forms.MOST_OF_SCALE, forms.SPECIAL_TOP, top)
    of_each = NumpyValue(top[..., None])
    power = anchored.exponent_power(form, x, of_each, (form.power_of_a, form.power_of_b)[side])
    return Line(x, NumpyValue(top), bf16_values(power), anchored.is_near(x, of_each).array.sum(-1))


def bf16_values(code: NumpyValue) -> Array:
    assert ((code.array & ~0xFFFF) == 0).all()
    return (code << 16).as_float().array


def packed(x: NumpyValue) -> NumpyValue:
    """Four bytes to a word."""
    assert ((x.array & ~0xFF) == 0).all()
    return NumpyValue(np.ascontiguousarray(x.array.astype(np.uint8)).view(np.int32))


def by_anchors(case: Case) -> tuple[Array, int]:
    """The codes of D, and how many of its steps were anchored ones. The others are in integers, as in the kernel."""
    form, code = case.anchored, value(case.start)
    assert form is not None
    lane = F64 if form.wide else F32
    plain, count = anchored.is_plain(form, code).array, 0
    c = _value_of(case, code, lane)
    for step in case.steps:
        x, y = prepare(case, form, 0, step.x, step.x_scale), prepare(case, form, 1, step.y, step.y_scale)
        sums = _sums_of_powers(form, x.powers * y.powers)
        fast = plain & (x.top.array + y.top.array <= form.exponent_limit(case.products))
        if form.relative:
            some = (x.top.array == forms.NO_TOP) | (y.top.array == forms.NO_TOP)
            fast &= some | (x.top.array + y.top.array >= form.least_tops)
            near = sums.view(np.int32) >> 30 != 0
            assert near[fast & (x.near + y.near > case.numbers.terms)].all()  # a kernel that sees the near ones does not look at powers
            fast &= near
        with np.errstate(all="ignore"):
            quick = _anchored_step(case, form, x, y, c, NumpyValue(sums).bits())
        slow = step_in_integers(case, step, _code_of(case, form, c))
        ends = np.where(fast, quick.array, _value_of(case, slow, lane).array)
        small = anchored.is_small(form, anchored.upper_word(quick) & specials.MAGNITUDE).array if case.result == F16 else True
        plain = np.where(fast, small, anchored.is_plain(form, slow).array)
        c, count = NumpyValue(ends), count + int(fast.sum())
    return codes_of(case.result, _code_of(case, form, c)), count


def _sums_of_powers(form: AnchoredForm, products: Array) -> Array:
    """By a tensor core: for base 8 at once, for base 4 the largest of sums of 8 products."""
    if form.base == 8:
        return products.sum(-1, np.float32)
    parts = [products[..., at : at + 8].sum(-1, np.float32) for at in range(0, products.shape[-1], 8)]
    return np.maximum.reduce(parts)


def _anchored_step(case: Case, form: AnchoredForm, x: Line, y: Line, c: NumpyValue, powers: NumpyValue) -> NumpyValue:
    half = c.constant(1 << (form.field - 1), I32)
    tops = (x.top + y.top) << form.field if form.relative else x.top.constant(0)
    base = anchored.base_of_lines(form, tops)
    word = anchored.alignment_word(form, powers, c, base, half)
    factors, fmts = (x.factors, y.factors), case.multiplied
    if case.numbers.summed:
        return _groups(case, form, c, word, half, [anchored.factor_bf16(form, fmt, v) for fmt, v in zip(fmts, factors, strict=True)])
    lows = [
        anchored.lowest_bit(form, fmt, v, NumpyValue(line.top.array[..., None])) for fmt, v, line in zip(fmts, factors, (x, y), strict=True)
    ]
    signs = [packed(anchored.sign_byte(v)) for v in factors]
    reach = NumpyValue(anchored.reach(form, word, base).array[..., None])
    flags = anchored.not_integers(packed(lows[0]), packed(lows[1]), signs[0], signs[1], reach)
    count = np.ascontiguousarray(flags.array).view(np.uint8).sum(-1, np.int32)
    total = anchored.begin_sum(form, c, word, NumpyValue(count))
    for one, other in all_products(*(anchored.factor_value(form, fmt, v) for fmt, v in zip(fmts, factors, strict=True))):
        total = anchored.add_product(total, one, other)
    return anchored.end_sum(form, total, half)


def _groups(case: Case, form: AnchoredForm, c: NumpyValue, word: NumpyValue, half: NumpyValue, factors: list[NumpyValue]) -> NumpyValue:
    n, (x, y) = case.numbers, (bf16_values(v).astype(np.float64) for v in factors)
    total = anchored.truncate(form, c, word)
    for at in range(0, n.terms, n.summed):
        own = (x[..., at : at + n.summed] * y[..., at : at + n.summed]).sum(-1).astype(np.float32)  # exact in a tensor core too
        total = total + anchored.truncate(form, NumpyValue(own).widen(), word)
    return anchored.round_kept(form, total, half)


def _code_of(case: Case, form: AnchoredForm, c: NumpyValue) -> NumpyValue:
    if case.result != F16:
        return anchored.result_code(form, c)
    with np.errstate(all="ignore"):
        return value(anchored.result_float(form, c).array.astype(np.float16).view(np.uint16))


def _value_of(case: Case, code: NumpyValue, lane: Any) -> NumpyValue:
    single = code.as_float() if case.result != F16 else NumpyValue(code.array.astype(np.uint16).view(np.float16).astype(np.float32))
    return single.widen() if lane == F64 else single


# ---- floats.cu


def by_floats(case: Case) -> tuple[Array, int]:
    """The codes of D, and how many steps were far, so that factors were moved."""
    code, count = value(case.start), 0
    for step in case.steps:
        code, far = _step_on_floats(case, step, code)
        count += far
    return codes_of(case.result, code), count


def _step_on_floats(case: Case, step: Step, code: NumpyValue) -> tuple[NumpyValue, int]:
    form, n = case.form, case.numbers
    x, y = (
        kept_floats.keep_float(stored, fmt, value(codes))
        for stored, fmt, codes in zip(case.stored, case.multiplied, (step.x, step.y), strict=True)
    )
    for side in (x, y):
        assert ((side.exponent.array >= 0) & (side.exponent.array < 1 << 14)).all()  # two lie in a word
    offsets = sum(map(kept_floats.exponent_offset, case.stored))
    tops = NumpyValue((x.exponent + y.exponent).array.max(-1)).max(0)
    products = (tops << anchored.UPPER) + ((BINARY64.bias - offsets) << anchored.UPPER)
    word = kept_floats.align_word(form, products, kept_floats.own_word(form, code))
    far = kept_floats.is_far(form, products, word).array
    one, other = x.word.as_float(), y.word.as_float()
    total = _sum_on_floats(form, one, other, kept_floats.scale_of_word(form, word))
    if not form.products_are_normal:  # where a neighbour is far, all are moved
        by = kept_floats.move(form, word)
        factor = NumpyValue(by.factor.array[..., None])
        moved = _sum_on_floats(form, one * factor, other * factor, by.product)
        finite = ~_has_special(case, step, code)
        assert (moved.array == total.array)[finite & ~far].all()
        total = NumpyValue(far).select(moved, total)
    if form.ends_in_f64:
        end = anchored.end_in_f64(form, total.resize(I32) if form.terms_of_sum == n.terms else total, code, word)
    else:
        end = general.end_step(form, total, code, (word >> anchored.UPPER) - BINARY64.bias)
    of_class = specials.special_value(case.result, code)
    for v, w in all_products(kept_floats.finite_as_one(form, x.word), kept_floats.finite_as_one(form, y.word)):
        of_class = of_class + v * w
    return specials.code_of_class(case.result, of_class, end), int(far.sum())


def _sum_on_floats(form: IntegerForm, x: NumpyValue, y: NumpyValue, scale: NumpyValue) -> NumpyValue:
    """The sum of a step's products in units, i64, added in as many i32 as it takes."""
    total, word = scale.constant(0, I64), scale.constant(0, I32)
    for t, (one, other) in enumerate(all_products(x, y)):
        with np.errstate(all="ignore"):
            word = word + bounded.truncate_by_conversion(one * other, scale)
        if t % form.terms_of_sum == form.terms_of_sum - 1:
            total, word = total + word.resize(I64), word.constant(0)
    return total + word.resize(I64)


def _has_special(case: Case, step: Step, code: NumpyValue) -> Array:
    """Whether a factor or the accumulator is Inf or NaN, of each element."""
    of = [(marked(case, side, codes, None).exponent == SPECIAL_EXPONENT).array.any(-1) for side, codes in enumerate((step.x, step.y))]
    return of[0] | of[1] | (decoding.decode_accumulator(case.result, code).special).array
