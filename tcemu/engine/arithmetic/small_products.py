"""Fused steps of many small products, as instructions on thousands of warps: the batch is the minor axis and fills the vectors of a CPU.

`reduction` makes the columns of D the minor axis. An mma has eight, which fill half a vector of f32 and an eighth of a vector of exponents.
Here the minor axis is LANES products of the batch. K is one instruction, and its steps are unrolled.

The steps are those of `fused_dot_add` and `bounded_steps`. Only rule 8 is applied in another way, since nearly every block of random
operands has an Inf or a NaN: these are f32 Inf and NaN in the multiplicands, and the f32 sum of the products of a step shows them. Every
other such sum is finite, and float addition has rule 8 itself.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from operator import add, mul
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tcemu.base.bits import Limbs
from tcemu.base.compilation import compile_once
from tcemu.engine.arithmetic.bounded_steps import LANE_DTYPES, Factors, add_bounded_step, select_unusual
from tcemu.engine.arithmetic.fused_dot_add import Pair, Product, absorb_sum, add_chain, add_products
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.multiplicands import SPECIAL_EXPONENT, ZERO_EXPONENT, decode_multiplicand
from tcemu.engine.arithmetic.order import Order
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.arithmetic.step.bounded import exponent_field
from tcemu.engine.arithmetic.step.decoding import BIAS, decode, special_word, value_word, with_sign_bit
from tcemu.engine.arithmetic.step.forms import WIDE_LANES, BoundedForm, Lanes, bounded_form, is_compact
from tcemu.engine.arithmetic.step.jax_values import integers
from tcemu.engine.formats.coding import recode
from tcemu.engine.formats.number_formats import F32, Format

LANES = 64  # products of a block: one vector of the narrowest lanes; gathered from the batch they fit the first-level cache
MOST_OUTPUTS = 256  # elements of D in a small product
FEWEST_PRODUCTS = 2 * LANES
FEWEST_TERMS = 8  # of a step on operands that the formats do not bound


def are_small_products(model: Model, spec: ProductSpec, shape: tuple[Any, ...], k: Any) -> bool:
    """Returns whether this module serves products with D of this shape, [..., M, N].

    Where operands and accumulators are unbounded (see `bounded_steps`), steps of few products are faster in `reduction`.

    spec: with the formats that are multiplied; k: products along K.
    """
    if not all(isinstance(size, int) for size in (*shape, k)):
        return False
    *batch, m, n = shape
    fused = (
        isinstance(model.terms, int) and model.fraction_bits is not None and model.step_kind is None and model.summed is None
        and model.flush is None and not model.together and model.result == F32 and spec.scale is None and spec.a.words == 1
    )  # fmt: skip
    if not fused or k != spec.k or m * n > MOST_OUTPUTS or math.prod(batch) < FEWEST_PRODUCTS:
        return False
    # the sum of the products of a step is finite
    top = spec.a.max_exponent + spec.b.max_exponent + 2 + k.bit_length()
    if is_compact(spec.a, spec.b) and top > F32.max_exponent:
        return False
    return _narrow_form(model, spec) is not None or Order.from_model(model, k).step_size(k) >= FEWEST_TERMS


def reduce_small_products(model: Model, given: ProductSpec, spec: ProductSpec, a: Array, b: Array, c: Array) -> Array:
    """Computes D = A·B + C of one instruction for each product of a batch and returns codes of `spec.d`.

    given: with the formats of the codes; spec: with the formats that are multiplied. a: [..., M, K]; b: [..., K, N]; c: [..., M, N], with
    every batch axis.
    """
    batch = c.shape[:-2]

    def blocks(v: Array) -> Array:
        """Cuts the batch into blocks, the last of which is filled with zeros: [blocks, rows, columns, LANES]."""
        v = jnp.broadcast_to(v, (*batch, *v.shape[-2:])).reshape(-1, *v.shape[-2:])
        v = jnp.pad(v, ((0, -len(v) % LANES), (0, 0), (0, 0)))
        return v.reshape(-1, LANES, *v.shape[1:]).transpose(0, 2, 3, 1)

    d = _reduce_blocks(model, given._replace(family=""), spec, blocks(a), blocks(b), blocks(c))
    d = d.transpose(0, 3, 1, 2).reshape(-1, *c.shape[-2:])
    return d[: math.prod(batch)].reshape(c.shape)


@compile_once(1, 2)
def _reduce_blocks(model: Model, given: ProductSpec, spec: ProductSpec, a: Array, b: Array, c: Array) -> Array:
    """a: codes [blocks, M, K, LANES]; b: [blocks, K, N, LANES]; c: [blocks, M, N, LANES]. Returns codes of `spec.d`."""
    d = lax.map(lambda operands: _reduce_block(model, given, spec, *operands), (a, b, c))
    return d if model.nan is None else jnp.where((d & jnp.uint32(F32.nan)) > F32.infinity, jnp.uint32(model.nan), d)


def _narrow_form(model: Model, spec: ProductSpec) -> BoundedForm | None:
    """Returns the form of the steps if the formats alone bound the products. A chain has such steps too: it begins at zero."""
    form = bounded_form(model.replace(chain=None), spec._replace(d=model.result), Order.from_model(model, spec.k).step_size(spec.k))
    return form if form is not None and form.is_narrow else None


class LaneOperand(NamedTuple):
    """One multiplicand: [M, K, LANES] or [K, N, LANES]."""

    significand: Array  # f32, as in `Multiplicand`, but Inf and NaN themselves
    exponent: Array  # narrow integers, as in `Multiplicand`; for zero, Inf and NaN the exponent of a zero of these lanes


def _decode(lanes: Lanes, given: Format, fmt: Format, other: Format, codes: Array) -> LaneOperand:
    """Decodes codes of the format `given`, which are multiplied as codes of `fmt` by codes of `other`."""
    if is_compact(fmt, other):  # every value is a normal f32
        x = decode(given, integers(codes))
        never = x.zero.never()
        special, infinite = never if x.special is None else x.special, never if x.infinite is None else x.infinite
        word = special.select(special_word(infinite), x.zero.select(0, value_word(given, x)))
        significand = with_sign_bit(word, x.negative).as_float().raw
        # as `fmt` counts, of which a subnormal of `given` may be a normal number
        exponent = exponent_field(word).max(fmt.min_exponent + BIAS).raw - BIAS
        no_part = (x.zero | special).raw
    else:
        significand, exponent = decode_multiplicand(fmt, recode(given, fmt, codes), other)
        infinite = jnp.where(significand < 0, jnp.float32(-jnp.inf), jnp.float32(jnp.inf))
        special = exponent == SPECIAL_EXPONENT
        significand = jnp.where(special, jnp.where(significand == 0, jnp.float32(jnp.nan), infinite), significand)
        no_part = special | (exponent == ZERO_EXPONENT)
    return LaneOperand(significand, jnp.where(no_part, lanes.zero, exponent).astype(LANE_DTYPES[lanes.bits]))


def _pairs(x: Array, y: Array, combine: Callable) -> list[Any]:
    """Combines the factors of every product of a step. x: [M, terms, LANES]; y: [terms, N, LANES]."""
    return [combine(x[:, t, None], y[t]) for t in range(y.shape[0])]


def _reduce_block(model: Model, given: ProductSpec, spec: ProductSpec, a: Array, b: Array, c: Array) -> Array:
    """a: codes [M, K, LANES]; b: [K, N, LANES]; c: [M, N, LANES]. Returns codes of `spec.d`."""
    order, form = Order.from_model(model, spec.k), _narrow_form(model, spec)
    lanes = WIDE_LANES if form is None else form.lanes
    add_steps = partial(_add_steps, model, spec) if form is None else partial(_add_narrow_steps, form)
    a, b = order.deal(a.swapaxes(0, 1), spec.k).swapaxes(0, 1), order.deal(b, spec.k)
    x, y = _decode(lanes, given.a, spec.a, spec.b, a), _decode(lanes, given.b, spec.b, spec.a, b)
    d, end = recode(given.c, model.result, c), 0
    for chain in order.chains(spec.k):
        steps = []
        for step in chain:
            start, end = end, end + len(step)
            steps.append((LaneOperand(*(v[:, start:end] for v in x)), LaneOperand(*(v[start:end] for v in y))))
        if order.chain is None:
            d = add_steps(steps, d)
        else:
            (d,) = add_chain(model.result, (d,), (add_steps(steps, jnp.zeros_like(d)),))
    return recode(model.result, spec.d, d)


Steps = list[tuple[LaneOperand, LaneOperand]]


def _add_steps(model: Model, spec: ProductSpec, steps: Steps, c: Array) -> Array:
    """Adds the products of all steps to C, by the rules of `fused_dot_add`."""
    accumulator: Limbs = (c,)
    for x, y in steps:
        significands, exponents = (_pairs(v, w, Pair) for v, w in zip(x, y, strict=True))
        products = [Product(*pairs) for pairs in zip(significands, exponents, strict=True)]
        total = reduce(add, (pair.a * pair.b for pair in significands))
        accumulator = add_products(model, spec, products, absorb_sum(model.result, total, accumulator))
    return accumulator[0]


def _add_narrow_steps(form: BoundedForm, steps: Steps, c: Array) -> Array:
    """Adds the products of all steps to C, by the rules of `bounded_steps`, as `reduce_narrow` does."""
    accumulator = lax.bitcast_convert_type(c, jnp.float32)
    total = jnp.where(jnp.isfinite(accumulator), 0, accumulator)
    exponents = lax.optimization_barrier([reduce(jnp.maximum, _pairs(x.exponent, y.exponent, add)) for x, y in steps])
    least = form.a.min_exponent + form.b.min_exponent
    for (x, y), max_exponent in zip(steps, exponents, strict=True):
        total = total + reduce(add, _pairs(x.significand, y.significand, mul))
        factors = Factors(x.significand, None), Factors(y.significand, None)
        accumulator = add_bounded_step(form, *factors, max_exponent, accumulator, _pairs)
    d, special = (lax.bitcast_convert_type(v, jnp.uint32) for v in (accumulator, total))
    return select_unusual(form, d, c, special, reduce(jnp.maximum, exponents) >= least)
