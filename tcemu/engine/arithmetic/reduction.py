"""The portable reduction over K: every step, in the order that `order` gives, as plain JAX operations on any device.

There are four kinds of step: fused dot-adds, fused dot-adds over groups (both in `fused_dot_add`), fused multiply-adds (`fma`), and the
steps of other makers' units (`other_steps`). For each kind the multiplicands are brought to one form, with the steps as the leading axis,
and one function computes a step.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.base.bits import Limbs
from tcemu.base.compilation import call_by_platform, compile_once
from tcemu.base.meshes import match_varying_axes
from tcemu.engine.arithmetic.bounded_steps import BoundedOperand, are_bounded, decode_bounded, reduce_bounded, reduce_narrow
from tcemu.engine.arithmetic.fma import add_limbs, fma_limbs
from tcemu.engine.arithmetic.fused_dot_add import (
    Groups,
    absorb_specials,
    add_chain,
    deal_groups,
    decode_in_units,
    fused_dot_add,
    grouped_dot_add,
)
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.multiplicands import (
    SPECIAL_EXPONENT,
    ZERO_EXPONENT,
    DecodedScales,
    EncodedMultiplicand,
    ExponentRange,
    Multiplicand,
    decode_multiplicand,
    exponent_range,
    spread_scales,
)
from tcemu.engine.arithmetic.order import Order
from tcemu.engine.arithmetic.other_steps import complement_sum, exact_sum, floored_sum, flush_subnormals, joined_dot_add, pairwise_sum
from tcemu.engine.arithmetic.product_spec import ProductSpec, Scales
from tcemu.engine.arithmetic.step.forms import BoundedForm, bounded_form
from tcemu.engine.formats.coding import codes_to_limbs, convert, limbs_to_codes
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.engine.formats.rounding import ROUNDINGS

COLUMNS = 128  # columns of D in a block: a step's part of B then stays in the first-level cache
ELEMENTS = 1 << 17  # elements of D in a block
FEWEST_STEPS, FEWEST_PRODUCTS = 4, 1 << 24  # a smaller product is not worth compiling two kinds of step


Advance = Callable[[Limbs, Any], Limbs]  # (running value, one step's products) -> the next running value


@compile_once(1)
def reduce_k(model: Model, spec: ProductSpec, a: Array, b: Array, c: Array, scales: Scales | None) -> Array:
    """Computes D = A·B + C by all steps and returns codes of `spec.d`.

    a, b: codes in the formats that are multiplied; c: codes in the format of the steps' results.
    """
    d = _reduce(model, spec, a, b, c, scales)
    if model.nan is None:
        return d
    return jnp.where((d & jnp.uint32(F32.nan)) > F32.infinity, jnp.uint32(model.nan), d)


def _reduce(model: Model, spec: ProductSpec, a: Array, b: Array, c: Array, scales: Scales | None) -> Array:
    words = spec.a.words - 1
    a_scales = b_scales = None
    if scales is not None:
        scale = spec.require_scale()
        rank = max(map(jnp.ndim, (a, b, *scales)))  # one rank for all: the products, and groups of them, become a leading axis
        a, b, a_codes, b_codes = (v.reshape((1,) * (rank - v.ndim) + v.shape) for v in map(jnp.asarray, (a, b, *scales)))
        (a, a_scales), (b, b_scales) = spread_scales(scale, a, a_codes, -1), spread_scales(scale, b, b_codes, -2)
    order = Order.from_model(model, spec.k)
    of_codes = model.fraction_bits is None or model.step_kind in ("complement", "floored")
    if not of_codes and model.summed is None:
        rank = max(a.ndim, b.ndim)  # one rank for both: the steps become a leading axis
        a, b = (v.reshape((1,) * (rank - v.ndim) + v.shape) for v in (a, b))
        sides = ((EncodedMultiplicand(a, a_scales), -1), (EncodedMultiplicand(b, b_scales), -2))
        x, y = (_split_steps(order, spec, side, axis) for side, axis in sides)
        form = bounded_form(model, spec, terms := x.codes.shape[-1])
        steps = partial(_reduce_fused, model, spec, order)
        if form is not None and (form.is_narrow or _is_worth_two_programs(*c.shape, x.codes.shape[0], terms)):
            decode_x, decode_y = partial(decode_bounded, form, spec.a, spec.b), partial(decode_bounded, form, spec.b, spec.a)
            reduce = reduce_narrow if form.is_narrow else partial(_reduce_bounded_or_any, steps)
            return reduce_in_blocks(partial(reduce, form), c, x, y, decode_x, decode_y)
        steps = _rounded_per_instruction(steps, model, spec, order.steps_per_instruction(spec.k))
        return reduce_in_blocks(steps, c, x, y, partial(_decode_steps, spec.a, spec.b), partial(_decode_steps, spec.b, spec.a))
    k_first = lambda v, axis: order.deal(jnp.moveaxis(v, axis, 0), spec.k)
    sides = ((a, -1 - words), (b, -2 - words), (a_scales, -1), (b_scales, -2))
    products = tuple(jax.tree.map(partial(k_first, axis=axis), side) for side, axis in sides if side is not None)
    if of_codes or model.summed is None:
        steps = partial(_reduce_exact, model, spec, order)
    else:
        steps = partial(_reduce_grouped, model, spec, order, model.summed)
    return _rounded_per_instruction(steps, model, spec, spec.k)(c, *products)


def _rounded_per_instruction(steps: Callable[..., Array], model: Model, spec: ProductSpec, length: int) -> Callable[..., Array]:
    """Returns the steps. Where D has another format than their results, each instruction's sum is rounded to it, and the next one starts
    from the rounded sum.

    length: entries of one instruction along the leading axis of the products.
    """
    if spec.d == model.result:
        return steps

    def instructions(c: Array, *products: Any) -> Array:
        def instruction(running: Array, products: tuple) -> tuple[Array, None]:
            d = convert(model.result, spec.d, steps(running, *products))
            return convert(spec.d, model.result, d), None

        products = jax.tree.map(lambda v: v.reshape(-1, length, *v.shape[1:]), products)
        return convert(model.result, spec.d, lax.scan(instruction, c, products)[0])

    return instructions


# ---- fused dot-adds


class StepOperand(NamedTuple):
    """One multiplicand's part in the steps. Leading axis: the steps."""

    operand: Multiplicand  # [steps, ..., M, terms] or [steps, ..., terms, N]
    exponents: ExponentRange  # of each step, [steps, ..., 1, 1]

    @property
    def special(self) -> Array:
        """Bool [steps, ..., 1, 1]: there is an Inf or NaN in the step."""
        return self.exponents.high == SPECIAL_EXPONENT


def _split_steps(order: Order, spec: ProductSpec, operand: Any, axis: int) -> Any:
    """Splits codes and their scales [..., K, ...], K at `axis`, into steps, a new first axis. The last step of a group is filled with
    zeros, which take no part.
    """

    def cut(v: Array) -> Array:
        at, v = v.ndim + axis, order.arrange(v, spec.k, axis)
        return jnp.moveaxis(v.reshape(*v.shape[:at], -1, order.step_size(spec.k), *v.shape[at + 1 :]), at, 0)

    return jax.tree.map(cut, operand)


def _decode_steps(fmt: Format, other: Format, encoded: EncodedMultiplicand) -> StepOperand:
    decoded = decode_multiplicand(fmt, encoded.codes, other, encoded.scales)
    return StepOperand(decoded, exponent_range(decoded))


def _reduce_fused(model: Model, spec: ProductSpec, order: Order, c: Array, x: StepOperand, y: StepOperand) -> Array:
    """Reduces K by steps of `fused_dot_add`, beginning at c, [..., M, N] in `model.result`."""

    def step(accumulator: Limbs, products: tuple[StepOperand, StepOperand]) -> Limbs:
        x, y = products
        special = jnp.any(x.special) | jnp.any(y.special)
        start = lax.cond(special, partial(absorb_specials, model.result), lambda x, y, c: c, x.operand, y.operand, accumulator)
        dot_add = joined_dot_add if model.step_kind == "joined" else fused_dot_add
        return dot_add(model, spec, x.operand, y.operand, start)

    def only(chosen: Array, products: tuple[StepOperand, StepOperand]) -> tuple[StepOperand, StepOperand]:
        x, y = products
        return x._replace(operand=_select_products(chosen[None, :], x.operand)), y._replace(
            operand=_select_products(chosen[:, None], y.operand)
        )

    number = jnp.arange(x.operand.exponent.shape[-1]) // model.terms
    advance = step if isinstance(model.terms, int) else _step_of_traced_size(step, number, only)
    return limbs_to_codes(model.result, _reduce_chains(advance, model.result, order, spec.k, (x, y), codes_to_limbs(model.result, c)))


def _is_worth_two_programs(*sizes: Any) -> bool:
    """Returns whether a product is so large that the steps of `bounded_steps` are compiled beside those for any operands.

    sizes: of D, the steps, and the products of a step.
    """
    return all(isinstance(size, int) for size in sizes) and sizes[-2] >= FEWEST_STEPS and math.prod(sizes) >= FEWEST_PRODUCTS


def _reduce_bounded_or_any(reduce_any: Callable[..., Array], form: BoundedForm, c: Array, x: BoundedOperand, y: BoundedOperand) -> Array:
    """Reduces K by the steps of `bounded_steps` where the operands are bounded, else by `reduce_any`, which takes them decoded."""
    a, b = form.a, form.b

    def decode_and_reduce(c: Array, x: BoundedOperand, y: BoundedOperand) -> Array:
        factors = decode_multiplicand(a, x.encoded.codes, b, x.encoded.scales), decode_multiplicand(b, y.encoded.codes, a, y.encoded.scales)
        return reduce_any(c, StepOperand(factors[0], x.exponents), StepOperand(factors[1], y.exponents))

    return lax.cond(are_bounded(form, x.exponents, y.exponents, c), partial(reduce_bounded, form), decode_and_reduce, c, x, y)


def _select_products(chosen: Array, x: Multiplicand) -> Multiplicand:
    """Keeps the chosen products; the others become zeros."""
    return Multiplicand(jnp.where(chosen, x.significand, 0), jnp.where(chosen, x.exponent, ZERO_EXPONENT))


def _step_of_traced_size(step: Advance, number: Array, only: Callable) -> Advance:
    """Returns a step of traced size: a loop over steps of the largest size, as many as `number` has, which gives each term its step.

    only(chosen, products): the chosen terms; the others take no part.
    """

    def steps(accumulator: Limbs, products: tuple) -> Limbs:
        return lax.fori_loop(0, number[-1] + 1, lambda s, running: step(running, only(number == s, products)), accumulator)

    return steps


# ---- fused dot-adds over groups


def _reduce_grouped(
    model: Model,
    spec: ProductSpec,
    order: Order,
    summed: int,
    c: Array,
    a: Array,
    b: Array,
    a_scales: DecodedScales,
    b_scales: DecodedScales,
) -> Array:
    """Reduces K by steps of `grouped_dot_add`. a, b: codes with K in front, each with its scale; otherwise as `_reduce_fused`."""
    x = deal_groups(decode_in_units(spec.a, a), a_scales, summed, -1)
    y = deal_groups(decode_in_units(spec.b, b), b_scales, summed, -2)
    groups, room = spec.k // summed, order.step_size(spec.k) // summed  # of an instruction, of a step

    def cut(v: Array) -> Array:
        """Cuts [groups, ...] into [steps, groups of a step, ...]. The last step of an instruction is filled with groups that take no
        part.
        """
        v = v.reshape(-1, groups, *v.shape[1:])
        v = jnp.pad(v, [(0, 0), (0, -groups % room)] + [(0, 0)] * (v.ndim - 2))
        return v.reshape(-1, room, *v.shape[2:])

    def step(accumulator: Limbs, products: tuple[Groups, Groups]) -> Limbs:
        return grouped_dot_add(model, spec, *products, accumulator)

    def only(chosen: Array, products: tuple[Groups, Groups]) -> tuple[Groups, Groups]:
        return jax.tree.map(lambda v: jnp.where(chosen.reshape(-1, *(1,) * (v.ndim - 1)), v, 0), products)

    number = jnp.arange(room) * summed // model.terms
    advance = step if isinstance(model.terms, int) else _step_of_traced_size(step, number, only)
    products = jax.tree.map(cut, (x, y))
    return limbs_to_codes(model.result, _reduce_chains(advance, model.result, order, spec.k, products, codes_to_limbs(model.result, c)))


# ---- fused multiply-adds


def _reduce_exact(model: Model, spec: ProductSpec, order: Order, c: Array, a: Array, b: Array) -> Array:
    """Reduces K by fused multiply-adds in the one format of A, B and the result, or by sums of codes.

    a, b: codes with K in front; otherwise as `_reduce_fused`.
    """
    fmt, kind, summed = model.result, model.step_kind, model.step_kind is not None or model.is_exact_sum
    x, y, start = (codes_to_limbs(fmt, v) for v in (a, b, c))
    # -0 adds nothing at all; +0 where sums are rounded down, since there +0 and -0 add up to -0
    down = model.rounding == "RM" if isinstance(model.rounding, str) else model.rounding == ROUNDINGS.index("RM")
    high = jnp.where(jnp.asarray(model.from_zero) | down, 0, jnp.uint32(1 << (min(fmt.bits, 32) - 1)))
    nothing = codes_to_limbs(fmt, (jnp.stack([jnp.zeros_like(high), high]) if fmt.words == 2 else high).astype(fmt.dtype))

    def step(accumulator: Limbs, products: tuple[Limbs, Limbs, Array]) -> Limbs:
        rows, columns = tuple(v[..., :, None] for v in products[0]), tuple(v[..., None, :] for v in products[1])
        if model.flush is not None:  # each instruction flushes its C
            accumulator = (jnp.where(products[2], flush_subnormals(fmt, accumulator[0], model.flush), accumulator[0]),)
        if not summed:
            return fma_limbs(rows, columns, accumulator, fmt, model.rounding, flush=model.flush is not None)
        pairs = list(zip(rows[0], columns[0], strict=True))
        if kind == "pairwise":
            return (pairwise_sum(model, pairs, accumulator[0]),)
        add = {"complement": complement_sum, "floored": floored_sum}.get(kind or "", exact_sum)
        return (add(model, spec, pairs, accumulator[0]),)

    if summed:
        terms = order.step_size(spec.k)
        x, y = ((v.reshape(-1, terms, *v.shape[1:]),) for (v,) in (x, y))
    count = x[0].shape[0]
    first = jnp.arange(count) % order.steps_per_instruction(spec.k) == 0
    return limbs_to_codes(fmt, _reduce_chains(step, fmt, order, spec.k, (x, y, first), start, nothing, model.flush))


# ---- one step after the other


def _reduce_chains(
    advance: Advance,
    fmt: Format,
    order: Order,
    k: int,
    products: tuple,
    c: Limbs,
    nothing: tuple[ArrayLike, ...] = (),
    flush: str | None = None,
) -> Limbs:
    """Computes all steps, one after the other or in chains, which are added to c in `fmt`.

    products: arrays with the steps in front. nothing: the code from which a chain starts, limb by limb; none for fused steps, which
    start from 0 and whose sums are never -0. flush: as `Model.flush`.
    """
    length = order.steps_per_chain(k)
    if length is None:
        return _scan(advance, c, products)

    def chain(one: tuple) -> Limbs:
        start = tuple(match_varying_axes(jnp.full(v.shape, code, v.dtype), v)[0] for v, code in zip(c, nothing or (0,), strict=True))
        return _scan(advance, start, one)

    def add_up(accumulator: Limbs, total: Limbs) -> Limbs:
        if flush is None:
            return add_limbs(accumulator, total, fmt) if nothing else add_chain(fmt, accumulator, total)
        (d,) = add_limbs((flush_subnormals(fmt, accumulator[0], flush),), total, fmt)
        return (flush_subnormals(fmt, d, "signed"),)

    def advance_chain(accumulator: Limbs, one: tuple) -> Limbs:
        return add_up(accumulator, chain(one))

    def add_instruction(accumulator: Limbs, chains: tuple) -> Limbs:
        first, rest = jax.tree.map(lambda v: v[0], chains), jax.tree.map(lambda v: v[1:], chains)
        return add_up(accumulator, _scan(advance_chain, chain(first), rest))

    steps, per_instruction = jax.tree.leaves(products)[0].shape[0], order.steps_per_instruction(k)
    whole = steps - steps % length
    chains = jax.tree.map(lambda v: v[:whole].reshape(-1, length, *v.shape[1:]), products)
    if order.together:
        return _scan(add_instruction, c, jax.tree.map(lambda v: v.reshape(-1, per_instruction // length, *v.shape[1:]), chains))
    c = _scan(advance_chain, c, chains)
    return c if whole == steps else advance_chain(c, jax.tree.map(lambda v: v[whole:], products))


def _scan(advance: Callable[[Limbs, Any], Limbs], start: Limbs, products: Any) -> Limbs:
    """Scans advance(running, one) over the leading axis of `products`.

    The products of the next step are handed on as part of the loop's state, so that each step reads whole arrays. Otherwise XLA on CPU
    fuses the indexing along K into the loop over D, which then no longer vectorises. That holds for two steps too, so they are a loop.
    """

    def body(state: tuple, following: Array) -> tuple[tuple, None]:
        running, current = state
        return (advance(running, current), one(following)), None

    steps = jax.tree.leaves(products)[0].shape[0]
    one = lambda at: jax.tree.map(lambda v: v[at], products)
    if steps <= 1:
        return advance(start, one(0)) if steps else start
    return lax.scan(body, (start, one(0)), jnp.arange(1, steps + 1) % steps)[0][0]


# ---- D in blocks


def reduce_in_blocks(
    reduce: Callable[[Array, Any, Any], Array], c: Array, x: Any, y: Any, decode_x: Callable[[Any], Any], decode_y: Callable[[Any], Any]
) -> Array:
    """Calls reduce(c, decode_x(x), decode_y(y)), on a CPU in blocks of D that stay in the cache of a core while K is reduced.

    Only blocks of the operands are decoded at a time: decoded, they take several times the memory. Few rows or narrow blocks are reduced
    together, as a batch of blocks, so that each of XLA's loops is worth being shared by all cores.

    c: [..., M, N]; x: a pytree of [steps, ..., M, terms]; y: of [steps, ..., terms, N]; a leaf may have 1 in place of any of these sizes
    but the first. `reduce` may get its batch axes as one or two. On other devices, and where a size is a symbol of `jax.export`, all of D
    is one block.
    """
    *batch, m, n = c.shape
    whole = (math.prod(batch), m, n)
    if not all(isinstance(size, int) for size in whole) or (blocks := _blocks(*whole))[:3] == whole:
        return reduce(c, decode_x(x), decode_y(y))

    def flat(v: Array) -> Array:
        """Merges the batch axes, to size 1 if all are 1."""
        if v.size == v.shape[0] * v.shape[-2] * v.shape[-1]:
            return v.reshape(v.shape[0], 1, *v.shape[-2:])
        v = v.reshape(v.shape[0], *(1,) * (len(batch) + 3 - v.ndim), *v.shape[1:])
        return jnp.broadcast_to(v, (v.shape[0], *batch, *v.shape[-2:])).reshape(v.shape[0], -1, *v.shape[-2:])

    def blocked(c: Array, x: Any, y: Any) -> Array:
        d = _map_axis(0, blocks, BlockSteps(reduce, decode_x, decode_y), c.reshape(whole), *jax.tree.map(flat, (x, y)))
        return d.reshape(c.shape)

    return call_by_platform({"cpu": blocked}, lambda c, x, y: reduce(c, decode_x(x), decode_y(y)), c, x, y)


class BlockSteps(NamedTuple):
    """The functions that compute a block of D: see `reduce_in_blocks`."""

    reduce: Callable[[Array, Any, Any], Array]
    decode_x: Callable[[Any], Any]
    decode_y: Callable[[Any], Any]


class Blocks(NamedTuple):
    """The size of a block of D, and how many of them, side by side, are reduced together."""

    batch: int
    rows: int
    columns: int
    neighbours: int


def _blocks(b: int, m: int, n: int) -> Blocks:
    """Returns the blocks of D. There are whole vectors of a CPU in a row where there are several blocks side by side."""
    columns = n if n <= COLUMNS else -(-_even_tile(n, COLUMNS) // 8) * 8
    rows = _even_tile(m, ELEMENTS // columns)
    neighbours = _even_tile(-(-n // columns), max(1, ELEMENTS // (rows * columns)))
    return Blocks(_even_tile(b, max(1, ELEMENTS // (rows * columns * neighbours))), rows, columns, neighbours)


def _even_tile(size: int, most: int) -> int:
    """Returns the smallest tile that needs no more tiles than `most` does."""
    return -(-size // -(-size // most))


def _map_axis(axis: int, blocks: Blocks, steps: BlockSteps, c: Array, x: Any, y: Any) -> Array:
    """Reduces the blocks along one axis of c, [B, M, N], and along the later axes, one after the other."""
    if axis == 2:  # a block of rows is decoded once for all of its columns
        return _map_columns(blocks, steps, c, steps.decode_x(x), y)
    size, tile = c.shape[axis], blocks[axis]
    if size == tile:
        return _map_axis(axis + 1, blocks, steps, c, x, y)
    found = (axis, (1, 2)[axis], (1, None)[axis])  # x is [steps, B, M, terms], y is [steps, B, terms, N]

    def cut(v: Array, at: int | None) -> Array | None:
        return None if at is None or v.shape[at] == 1 else _split(v, at, tile)

    def block(moving: tuple) -> Array:
        whole = jax.tree.map(lambda part, all_of_it: all_of_it if part is None else part, moving, (c, x, y), is_leaf=lambda v: v is None)
        return _map_axis(axis + 1, blocks, steps, *whole)

    d = lax.map(block, tuple(jax.tree.map(partial(cut, at=at), side) for side, at in zip((c, x, y), found, strict=True)))
    d = jnp.moveaxis(d, 0, axis)
    return lax.slice_in_dim(d.reshape(*d.shape[:axis], -1, *d.shape[axis + 2 :]), 0, size, axis=axis)


def _split(v: Array, axis: int, tile: int) -> Array:
    """Cuts [..., size, ...] into [blocks, ..., tile, ...], the last block filled with zeros."""
    v = jnp.pad(v, [(0, -v.shape[axis] % tile if at == axis else 0) for at in range(v.ndim)])
    return jnp.moveaxis(v.reshape(*v.shape[:axis], -1, tile, *v.shape[axis + 1 :]), axis, 0)


def _map_columns(blocks: Blocks, steps: BlockSteps, c: Array, x: Any, y: Any) -> Array:
    """Reduces the blocks of columns of c, [B, M, N], groups of neighbours one after the other. x: decoded."""
    n, width = c.shape[-1], blocks.columns * blocks.neighbours
    if n == blocks.columns:
        return steps.reduce(c, x, steps.decode_y(y))

    def cut(v: Array) -> Array:
        """Cuts [steps, B, rows, N] into [groups, steps, neighbours, B, rows, columns], the last block filled with zeros."""
        v = jnp.broadcast_to(v, (*v.shape[:-1], n))
        v = jnp.pad(v, [(0, 0), (0, 0), (0, 0), (0, -n % width)])
        return v.reshape(*v.shape[:-1], -1, blocks.neighbours, blocks.columns).transpose(3, 0, 4, 1, 2, 5)

    def group(moving: tuple) -> Array:
        c, y = moving
        return steps.reduce(c[0], jax.tree.map(lambda v: v[:, None], x), steps.decode_y(y))

    groups = jax.tree.map(cut, (c[None], y))
    d = lax.map(group, groups) if n > width else group(jax.tree.map(lambda v: v[0], groups))[None]
    return d.transpose(2, 3, 0, 1, 4).reshape(*c.shape[:-1], -1)[..., :n]
