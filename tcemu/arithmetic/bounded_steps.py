"""Fused steps on bounded operands: the rules of `fused_dot_add` in half the operations, where no value comes near the limits of f32.

Operands are bounded if none of them is Inf or NaN, if the nonzero products of every step have exponents from `least` on, and if no sum can
reach 2^127. Then the steps need no rule 7 or 8 and no subnormal result, for these reasons:

- Every factor and every product is zero or a normal f32, so values are multiplied as they are. The unit of a step,
  2^(max_exponent - fraction_bits), and its inverse are normal f32 too.
- Every accumulator after the first nonzero product is a multiple of 2^(least - fraction_bits), which is at least 2^-126. So it is zero or
  a normal f32. It is kept as an f32 and aligned like a product: a multiplication by a power of two, and a conversion that truncates.
- A step without nonzero products may align to `least` instead of the accumulator's lower exponent: such an accumulator is a multiple of
  the unit of `least`, so nothing is cut. Hence the exponent of a zero factor only needs to keep every sum with it at or below `least`.
- The sum of the products fits an s32, or each half of them does, and so does the aligned accumulator.
- Truncated sums are no larger than exact ones: |C| + K * 2^(2 + the largest exponent of a product) bounds every accumulator.

Narrow formats (f16 and below, without scales) are bounded but for Inf, NaN and a C below 2^least, whose results `reduce_narrow` replaces.
For wide formats `are_bounded` looks at the operands.

The max exponent is found in lanes of 8 or 16 bits, by a loop of its own: the maximum of the next step is part of the scan's state, because
XLA would otherwise fuse it into the loop over f32, which has fewer and wider lanes.

Products of few bits (FP8 with 13 fraction bits) are truncated without a conversion, see `_truncate_by_addition`.
"""

from collections.abc import Callable
from functools import partial, reduce
from operator import add, mul
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tcemu.arithmetic.fused_dot_add import KEPT, SIGN, absorb_specials, add_signed_words, products_fit_one_limb
from tcemu.arithmetic.model import Model
from tcemu.arithmetic.multiplicands import (
    SPECIAL_EXPONENT,
    ZERO_EXPONENT,
    EncodedMultiplicand,
    ExponentRange,
    Multiplicand,
    decode_multiplicand,
    is_compact,
    power_of_two,
)
from tcemu.arithmetic.product_spec import ProductSpec
from tcemu.formats import F32, Format, truncates

MAX_ACCUMULATOR = F32.max_exponent - 2  # exponent of the largest C: with the products, sums stay below 2^127
# XLA:CPU slices the operands of a step once if the step has at least this number of products. In a shorter step it would slice them again
# for each product, unless they are results of the step before.
SLICED_TERMS = 16


class Lanes(NamedTuple):
    """Integers that hold the exponent of every factor, and the sum of two."""

    dtype: type
    zero: int  # exponent of a factor that is zero
    special: int  # exponent of Inf and NaN


NARROW_LANES = Lanes(jnp.int8, -64, 63)
WIDE_LANES = Lanes(jnp.int16, -1 << 13, 1 << 13)


class StepForm(NamedTuple):
    """The form of the steps of one product: what is known of them before tracing."""

    model: Model
    spec: ProductSpec
    terms: int  # products of a step
    lanes: Lanes

    @property
    def fraction_bits(self) -> int:
        assert isinstance(self.model.fraction_bits, int)
        return self.model.fraction_bits

    @property
    def is_narrow(self) -> bool:
        """True if the formats alone bound the products."""
        return self.lanes == NARROW_LANES

    @property
    def least(self) -> int:
        """The least exponent to which a step is aligned."""
        a, b = self.spec.a, self.spec.b
        if self.is_narrow:
            return self.lanes.zero + max(a.max_exponent, b.max_exponent)
        return max(self.fraction_bits, a.mantissa_bits + b.mantissa_bits) + F32.min_exponent

    @property
    def spare_bits(self) -> int:
        """Bits of an f32's fraction below the integer part of an aligned product."""
        return F32.mantissa_bits - (self.fraction_bits + 2)

    @property
    def truncates_by_addition(self) -> bool:
        product_bits = self.spec.a.mantissa_bits + self.spec.b.mantissa_bits + 2
        return self.is_narrow and self.spare_bits >= product_bits and self.terms < min(1 << self.spare_bits, 1 << 8)


def step_form(model: Model, spec: ProductSpec, terms: int) -> StepForm | None:
    """Returns the form of the steps, or None if this module has no steps for the model.

    terms: products of a step.
    """
    fixed = (
        model.result == F32 and model.step_kind is None and model.summed is None and model.chain is None and spec.d == F32
        and isinstance(model.fraction_bits, int) and isinstance(model.terms, int) and isinstance(model.floor, int)
        and (model.result_bits is None or isinstance(model.result_bits, int))
        and truncates(model.alignment) and truncates(model.rounding)
    )  # fmt: skip
    if not fixed or not products_fit_one_limb(model, spec, -(-terms // 2)):
        return None
    a, b = spec.a, spec.b
    most = max(a.max_exponent, b.max_exponent)
    is_narrow = spec.scale is None and NARROW_LANES.zero + most < a.min_exponent + b.min_exponent and most < NARROW_LANES.special
    form = StepForm(model, spec, terms, NARROW_LANES if is_narrow else WIDE_LANES)
    assert isinstance(model.floor, int)
    return form if model.floor <= F32.min_exponent else None


# ---- operands


class Factors(NamedTuple):
    """One multiplicand, decoded for steps on bounded operands. Arrays of the codes' shape."""

    value: Array  # f32; the magnitude where there are signs
    sign: Array | None  # int32, -1 for negative values and else 0; None: the value has its sign


class BoundedOperand(NamedTuple):
    """One multiplicand's part in the steps. Leading axis: the steps."""

    encoded: EncodedMultiplicand
    factors: Factors  # right for bounded operands only
    exponent: Array  # of each factor, in lanes
    exponents: ExponentRange  # of each step, [steps, ..., 1, 1]


def decode_bounded(form: StepForm, fmt: Format, other: Format, encoded: EncodedMultiplicand) -> BoundedOperand:
    """Decodes one multiplicand, whose partner has the format `other`: [steps, ..., M, terms] or [steps, ..., terms, N]."""
    x, lanes = decode_multiplicand(fmt, encoded.codes, other, encoded.scales), form.lanes
    value = x.significand
    if encoded.scales is not None or not is_compact(fmt, other):
        value = value * power_of_two(x.exponent - fmt.mantissa_bits)
    sign = None
    if form.truncates_by_addition:
        value, sign = jnp.abs(value), -(value < 0).astype(jnp.int32)
    exponent = jnp.where(x.exponent == SPECIAL_EXPONENT, lanes.special, x.exponent)
    exponent = jnp.where(x.exponent == ZERO_EXPONENT, lanes.zero, exponent).astype(lanes.dtype)
    return BoundedOperand(encoded, Factors(value, sign), exponent, _range(lanes, exponent))


def _range(lanes: Lanes, exponent: Array) -> ExponentRange:
    """Returns the range of the exponents of each step.

    Two reductions, kept apart by a barrier, because XLA:CPU uses vectors for the first one only.
    """
    greatest = jnp.iinfo(lanes.dtype).max
    ends = jnp.where(exponent == lanes.zero, greatest, exponent).min(-2, keepdims=True), exponent.max(-2, keepdims=True)
    low, high = lax.optimization_barrier(ends)
    low, high = low.min(-1, keepdims=True).astype(jnp.int32), high.max(-1, keepdims=True).astype(jnp.int32)
    return ExponentRange(low, jnp.where(high == lanes.special, SPECIAL_EXPONENT, high))


# ---- the reduction


def reduce_narrow(form: StepForm, c: Array, x: BoundedOperand, y: BoundedOperand) -> Array:
    """Reduces K by fused steps, beginning at C. The formats are narrow, the operands are any.

    c: f32 codes [..., M, N]; x: [steps, ..., M, terms]; y: [steps, ..., terms, N].

    A product of Inf or NaN decides D, whatever else is added. A C below 2^least is what a step without nonzero products would truncate. So
    it is D itself where all products are zero. Where one is not, C decides no alignment, and the steps truncate it as they should; a
    subnormal one to zero. A C of 2^126 or more is D itself too, because products are below 2^33 and each is truncated to zero.
    """
    special = jnp.any(jnp.maximum(x.exponents.high, y.exponents.high) == SPECIAL_EXPONENT)
    magnitude, exponent = c & (SIGN - 1), f32_exponent(c)
    unusual = special | jnp.any(((exponent < form.least) | (exponent > MAX_ACCUMULATOR)) & (magnitude > 0))
    return lax.cond(unusual, partial(_replace_unusual, form), lambda d, c, x, y: d, reduce_bounded(form, c, x, y), c, x.encoded, y.encoded)


def _replace_unusual(form: StepForm, d: Array, c: Array, x: EncodedMultiplicand, y: EncodedMultiplicand) -> Array:
    """Returns D with Inf and NaN where an operand decides it, and with C, truncated, where no product reaches it."""
    a, b = form.spec.a, form.spec.b

    def step(state: tuple, factors: tuple[Multiplicand, Multiplicand]) -> tuple[tuple, None]:
        (special,), has_product = state
        nonzero = (jnp.where(v.exponent == ZERO_EXPONENT, 0, jnp.float32(1)) for v in factors)
        return (absorb_specials(F32, *factors, (special,)), has_product | (jnp.matmul(*nonzero) > 0)), None

    decoded = decode_multiplicand(a, x.codes, b), decode_multiplicand(b, y.codes, a)
    ((special,), has_product), _ = lax.scan(step, ((c,), jnp.zeros_like(c, bool)), decoded)
    return select_unusual(form, d, c, special, has_product)


def select_unusual(form: StepForm, d: Array, c: Array, special: Array, has_product: Array) -> Array:
    """Returns D with Inf and NaN where `special` is such a code, and with C, truncated, where no product reaches it."""
    kept = min(form.fraction_bits, F32.mantissa_bits, F32.mantissa_bits if form.model.result_bits is None else form.model.result_bits)
    start = c & jnp.uint32(-1 << (F32.mantissa_bits - kept) & 0xFFFFFFFF)
    start = jnp.where(start & (SIGN - 1) == 0, 0, start)
    special = jnp.where((special & (SIGN - 1)) > F32.infinity, F32.nan, special)
    d = jnp.where(has_product & (f32_exponent(c) <= MAX_ACCUMULATOR), d, start)
    return jnp.where((special & (SIGN - 1)) >= F32.infinity, special, d)


def are_bounded(form: StepForm, x: ExponentRange, y: ExponentRange, c: Array) -> Array:
    """Returns whether the operands are bounded, a scalar bool. x, y: ranges of all steps; c: f32 codes."""
    a, b = form.spec.a, form.spec.b
    steps = x.low.shape[0]
    most = MAX_ACCUMULATOR - 1 - (steps * form.terms).bit_length()
    factors = (x.low >= F32.min_exponent + a.mantissa_bits) & (y.low >= F32.min_exponent + b.mantissa_bits)
    factors = factors & (x.high <= F32.max_exponent) & (y.high <= F32.max_exponent)
    products = (x.low + y.low >= form.least) & (x.high + y.high <= most)
    exponent = f32_exponent(c)
    accumulator = ((c << 1) == 0) | ((exponent >= form.least) & (exponent <= MAX_ACCUMULATOR))
    return jnp.all(factors & products) & jnp.all(accumulator)


def reduce_bounded(form: StepForm, c: Array, x: BoundedOperand, y: BoundedOperand) -> Array:
    """Reduces K by fused steps, beginning at C. The operands are bounded.

    c: f32 codes [..., M, N]; x: [steps, ..., M, terms]; y: [steps, ..., terms, N].
    """
    steps = x.factors.value.shape[0]
    at_step = lambda v, index: jax.tree.map(lambda v: v[index % steps], v)
    operands = lambda index: (at_step((x.factors, y.factors), index), at_step((x.exponent, y.exponent), index + 1))
    carry = operands if form.terms < SLICED_TERMS else lambda index: None

    def step(state: tuple, index: Array) -> tuple[tuple, None]:
        accumulator, max_exponent, carried = state
        (one_x, one_y), exponents = operands(index) if carried is None else carried
        accumulator = add_bounded_step(form, one_x, one_y, max_exponent, accumulator)
        return (accumulator, _max_exponent(*exponents), carry(index + 1)), None

    state = lax.bitcast_convert_type(c, jnp.float32), _max_exponent(*at_step((x.exponent, y.exponent), 0)), carry(0)
    return lax.bitcast_convert_type(lax.scan(step, state, jnp.arange(steps))[0][0], jnp.uint32)


def _pairs(x: Array, y: Array, combine: Callable) -> list[Array]:
    """Combines the factors of every product of a step. x: [..., M, terms]; y: [..., terms, N]."""
    return [combine(x[..., :, t, None], y[..., t, None, :]) for t in range(x.shape[-1])]


Pairing = Callable[[Array, Array, Callable], list[Array]]  # a function as `_pairs`, for factors whose axes have another order


def _max_exponent(x: Array, y: Array) -> Array:
    """Rule 3, for the products of a step."""
    return reduce(jnp.maximum, _pairs(x, y, add))


# ---- one step


def add_bounded_step(form: StepForm, x: Factors, y: Factors, max_exponent: Array, accumulator: Array, pairs: Pairing = _pairs) -> Array:
    """Computes one step. max_exponent: of the products; accumulator: f32, zero or normal."""
    code = lax.bitcast_convert_type(accumulator, jnp.uint32)
    max_exponent = jnp.maximum(jnp.maximum(max_exponent.astype(jnp.int32), f32_exponent(code)), form.least)
    scale = power_of_two_code(form.fraction_bits - max_exponent)
    unit = power_of_two_code(max_exponent - form.fraction_bits)
    truncate = partial(_truncate_by_conversion, form, x, y, scale) if x.sign is None else partial(_truncate_by_addition, form, x, y, unit)
    sums = truncate(pairs)
    return _round(form, (*sums, (accumulator * _as_float(scale)).astype(jnp.int32)), unit)


def _truncate_by_conversion(form: StepForm, x: Factors, y: Factors, scale: Array, pairs: Pairing) -> list[Array]:
    """Rules 4 and 5: sums of the products, each product truncated to an integer multiple of the unit; s32."""
    integers = [(product * _as_float(scale)).astype(jnp.int32) for product in pairs(x.value, y.value, mul)]
    if products_fit_one_limb(form.model, form.spec, form.terms):
        return [reduce(add, integers)]
    half = -(-form.terms // 2)
    return [reduce(add, integers[:half]), reduce(add, integers[half:])]


def _truncate_by_addition(form: StepForm, x: Factors, y: Factors, unit: Array, pairs: Pairing) -> list[Array]:
    """As `_truncate_by_conversion`, for products whose significands have at most `spare_bits` bits.

    A product, in units of the step, is below 2^(fraction_bits + 2). Added to 2^(fraction_bits + 2), its magnitude v stands in the fraction
    of an f32, in fixed point with `spare_bits` bits below the integer part. From 1/2 on, v is a multiple of 2^-spare_bits, because it has
    no more bits than that, and the addition is exact. Below 1/2 the sum is rounded to 1/2 at most. So the upper bits of the fraction are v
    truncated, whether or not the multiplication is contracted into the addition.

    A negative product is subtracted as its complement, which is less by 1 than the negative. There are fewer products than 2^spare_bits,
    so that the shift that rounds up restores the sum.
    """
    anchor = _as_float(unit + ((form.fraction_bits + 2) << F32.mantissa_bits))
    spare = (1 << form.spare_bits) - 1
    sums = [lax.bitcast_convert_type(v, jnp.int32) for v in pairs(x.value, y.value, lambda a, b: a * b + anchor)]
    assert x.sign is not None and y.sign is not None
    integer = ((1 << F32.mantissa_bits) - 1) & ~spare
    signs = pairs(x.sign, y.sign, lambda a, b: a ^ b)
    total = reduce(add, [(v & integer) ^ sign for v, sign in zip(sums, signs, strict=True)])
    return [(total + spare) >> form.spare_bits]


def _round(form: StepForm, addends: tuple[Array, ...], unit: Array) -> Array:
    """Rule 6: the sum of the addends, truncated to an f32. addends: s32, whose sum may not fit; unit: code of the power of two."""
    if len(addends) == 2:
        negative, magnitude = _add_two(*addends)
    else:
        is_negative, (low, high) = add_signed_words(addends)
        negative = -is_negative.astype(jnp.int32)
        magnitude = jnp.where(high == 0, low, high << 24 | low >> 8)  # high is 0 or 1: the lowest bits of such a sum are not kept
        unit = jnp.where(high == 0, unit, unit + (8 << F32.mantissa_bits))
    magnitude = magnitude & ~(magnitude >> KEPT)  # without the bits that cannot be kept, the conversion truncates: see `fused_dot_add`
    code = lax.bitcast_convert_type(magnitude.astype(jnp.float32) * _as_float(unit), jnp.int32)
    if form.model.result_bits is not None:
        code = code & (-1 << (F32.mantissa_bits - form.model.result_bits))
    return lax.bitcast_convert_type(code | (negative & jnp.int32(-SIGN)), jnp.float32)


def _add_two(x: Array, y: Array) -> tuple[Array, Array]:
    """Returns the sign of a sum of two s32, as -1 or 0, and its magnitude, below 2^32."""
    total, same_sign = x + y, ~(x ^ y)
    negative = ((x & same_sign) | (total & ~same_sign)) >> 31  # of two addends of one sign, the sum has that sign even where it wraps
    return negative, lax.bitcast_convert_type((total ^ negative) - negative, jnp.uint32)


def f32_exponent(code: Array) -> Array:
    """The exponent of a normal f32; less than every other exponent for zero. code: uint32."""
    return ((code >> F32.mantissa_bits) & 0xFF).astype(jnp.int32) - F32.bias


def power_of_two_code(exponent: Array) -> Array:
    """Returns the code of 2^exponent, which is a normal f32, as int32."""
    return (exponent + F32.bias) << F32.mantissa_bits


def _as_float(code: Array) -> Array:
    return lax.bitcast_convert_type(code, jnp.float32)
