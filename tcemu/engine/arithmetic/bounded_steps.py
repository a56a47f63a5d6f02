"""The portable reduction by bounded steps: where no value comes near the limits of f32, in half the operations.

The formulas and the reasons why they are right are in `arithmetic.step.bounded`; which models have such steps, and which operands are
bounded, is in `arithmetic.step.forms`. Narrow formats (f16 and below, without scales) are bounded but for Inf, NaN and some C, whose
results `reduce_narrow` replaces. For wide formats `are_bounded` looks at the operands.

The max exponent is found in lanes of 8 or 16 bits, by a loop of its own: the maximum of the next step is part of the scan's state, because
XLA would otherwise fuse it into the loop over f32, which has fewer and wider lanes.
"""

from collections.abc import Callable
from functools import partial, reduce
from operator import add, mul, xor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tcemu.engine.arithmetic.fused_dot_add import absorb_specials
from tcemu.engine.arithmetic.multiplicands import (
    SPECIAL_EXPONENT,
    ZERO_EXPONENT,
    EncodedMultiplicand,
    ExponentRange,
    Multiplicand,
    decode_multiplicand,
)
from tcemu.engine.arithmetic.step import bounded
from tcemu.engine.arithmetic.step.decoding import BIAS
from tcemu.engine.arithmetic.step.forms import BoundedForm, Lanes, accumulator_is_bounded, factors_are_bounded, is_compact
from tcemu.engine.arithmetic.step.general import power_of_two
from tcemu.engine.arithmetic.step.jax_values import codes_of, conditions, floats, integers
from tcemu.engine.arithmetic.step.specials import INFINITY, MAGNITUDE, special_code
from tcemu.engine.formats.number_formats import F32, Format

# XLA:CPU slices the operands of a step once if the step has at least this number of products. In a shorter step it would slice them again
# for each product, unless they are results of the step before.
SLICED_TERMS = 16
LANE_DTYPES = {8: jnp.int8, 16: jnp.int16}


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


def decode_bounded(form: BoundedForm, fmt: Format, other: Format, encoded: EncodedMultiplicand) -> BoundedOperand:
    """Decodes one multiplicand, whose partner has the format `other`: [steps, ..., M, terms] or [steps, ..., terms, N]."""
    x, lanes = decode_multiplicand(fmt, encoded.codes, other, encoded.scales), form.lanes
    value = x.significand
    if encoded.scales is not None or not is_compact(fmt, other):
        value = value * power_of_two(integers(x.exponent) - fmt.mantissa_bits).raw
    sign = None
    if form.truncates_by_addition:
        value, sign = jnp.abs(value), -(value < 0).astype(jnp.int32)
    exponent = jnp.where(x.exponent == SPECIAL_EXPONENT, lanes.special, x.exponent)
    exponent = jnp.where(x.exponent == ZERO_EXPONENT, lanes.zero, exponent).astype(LANE_DTYPES[lanes.bits])
    return BoundedOperand(encoded, Factors(value, sign), exponent, _range(lanes, exponent))


def _range(lanes: Lanes, exponent: Array) -> ExponentRange:
    """Returns the range of the exponents of each step.

    Two reductions, kept apart by a barrier, because XLA:CPU uses vectors for the first one only.
    """
    greatest = jnp.iinfo(exponent.dtype).max
    ends = jnp.where(exponent == lanes.zero, greatest, exponent).min(-2, keepdims=True), exponent.max(-2, keepdims=True)
    low, high = lax.optimization_barrier(ends)
    low, high = low.min(-1, keepdims=True).astype(jnp.int32), high.max(-1, keepdims=True).astype(jnp.int32)
    return ExponentRange(low, jnp.where(high == lanes.special, SPECIAL_EXPONENT, high))


# ---- the reduction


def reduce_narrow(form: BoundedForm, c: Array, x: BoundedOperand, y: BoundedOperand) -> Array:
    """Reduces K by fused steps, beginning at C. The formats are narrow, the operands are any.

    c: f32 codes [..., M, N]; x: [steps, ..., M, terms]; y: [steps, ..., terms, N].

    A product of Inf or NaN decides D, whatever else is added. A C below 2^least is what a step without nonzero products would truncate. So
    it is D itself where all products are zero. Where one is not, C decides no alignment, and the steps truncate it as they should; a
    subnormal one to zero. A C above 2^most is D itself too, because each product is truncated to zero beside it.
    """
    special = jnp.any(jnp.maximum(x.exponents.high, y.exponents.high) == SPECIAL_EXPONENT)
    unusual = special | ~_are_bounded_accumulators(form, c)
    return lax.cond(unusual, partial(_replace_unusual, form), lambda d, c, x, y: d, reduce_bounded(form, c, x, y), c, x.encoded, y.encoded)


def _replace_unusual(form: BoundedForm, d: Array, c: Array, x: EncodedMultiplicand, y: EncodedMultiplicand) -> Array:
    """Returns D with Inf and NaN where an operand decides it, and with C, truncated, where no product reaches it."""

    def step(state: tuple, factors: tuple[Multiplicand, Multiplicand]) -> tuple[tuple, None]:
        (special,), has_product = state
        nonzero = (jnp.where(v.exponent == ZERO_EXPONENT, 0, jnp.float32(1)) for v in factors)
        return (absorb_specials(F32, *factors, (special,)), has_product | (jnp.matmul(*nonzero) > 0)), None

    decoded = decode_multiplicand(form.a, x.codes, form.b), decode_multiplicand(form.b, y.codes, form.a)
    ((special,), has_product), _ = lax.scan(step, ((c,), jnp.zeros_like(c, bool)), decoded)
    return select_unusual(form, d, c, special, has_product)


def select_unusual(form: BoundedForm, d: Array, c: Array, special: Array, has_product: Array) -> Array:
    """Returns D with Inf and NaN where `special` is such a code, and with C, truncated, where no product reaches it."""
    code, of_special = integers(c), integers(special)
    word = bounded.select_unreached(code, integers(d), conditions(has_product), form.most, form.fraction_bits, form.kept, F32.nan)
    word = (of_special & MAGNITUDE >= INFINITY).select(special_code(of_special.as_float(), F32.nan), word)
    return codes_of(word)


def are_bounded(form: BoundedForm, x: ExponentRange, y: ExponentRange, c: Array) -> Array:
    """Returns whether the operands are bounded, a scalar bool. x, y: ranges of all steps; c: f32 codes."""
    product_bits = (x.low.shape[0] * form.terms).bit_length()
    factors = factors_are_bounded(form, x.low, x.high, y.low, y.high, product_bits)
    return jnp.all(factors) & _are_bounded_accumulators(form, c)


def _are_bounded_accumulators(form: BoundedForm, c: Array) -> Array:
    code = integers(c)
    return jnp.all(accumulator_is_bounded(code & MAGNITUDE, bounded.exponent_field(code), form.least, form.most).raw)


def reduce_bounded(form: BoundedForm, c: Array, x: BoundedOperand, y: BoundedOperand) -> Array:
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


def _pairs(x: Array, y: Array, combine: Callable) -> list[Any]:
    """Combines the factors of every product of a step. x: [..., M, terms]; y: [..., terms, N]."""
    return [combine(x[..., :, t, None], y[..., t, None, :]) for t in range(x.shape[-1])]


Pairing = Callable[[Array, Array, Callable], list[Any]]  # a function as `_pairs`, for factors whose axes have another order


def _max_exponent(x: Array, y: Array) -> Array:
    """Rule 3, for the products of a step."""
    return reduce(jnp.maximum, _pairs(x, y, add))


# ---- one step


def add_bounded_step(form: BoundedForm, x: Factors, y: Factors, max_exponent: Array, accumulator: Array, pairs: Pairing = _pairs) -> Array:
    """Computes one step. max_exponent: of the products; accumulator: f32, zero or normal."""
    own = floats(accumulator)
    unit, scale = bounded.align(integers(max_exponent.astype(jnp.int32)) + BIAS, own.bits(), form.least + BIAS, form.fraction_bits)
    if x.sign is None or y.sign is None:
        terms = [bounded.truncate_by_conversion(floats(product), scale) for product in pairs(x.value, y.value, mul)]
        sums = bounded.add_terms(terms, form.sums)
    else:
        truncate = partial(bounded.truncate_by_addition, unit=unit, fraction_bits=form.fraction_bits, spare_bits=form.spare_bits)
        factors = zip(pairs(x.value, y.value, lambda a, b: (floats(a), floats(b))), pairs(x.sign, y.sign, xor), strict=True)
        sums = [bounded.sum_complements([truncate(a, b, integers(sign)) for (a, b), sign in factors], form.spare_bits)]
    addends = [*sums, bounded.truncate_by_conversion(own, scale)]
    return bounded.round_sum(addends, unit, form.fits, form.kept).as_float().raw
