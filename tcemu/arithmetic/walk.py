"""The portable engine: every step along K, in the order that `order` gives, as plain JAX operations on any device.

Three kinds of step: fused dot-adds (`dot_add`), the same over groups (`grouped`), and fused multiply-adds (`fma`). For each kind the
multiplicands are brought to one form, with the steps as the leading axis, and one function makes a step of it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.arithmetic.blocks import in_blocks
from tcemu.arithmetic.dot_add import dot_add
from tcemu.arithmetic.fma import add_limbs, fma_limbs
from tcemu.arithmetic.grouped import Groups, deal, grouped_dot_add, values
from tcemu.arithmetic.model import Model, Scales, Signature
from tcemu.arithmetic.multiplicands import ZERO_EXPONENT, Operand, Scale, has_special, operand, spread
from tcemu.arithmetic.order import Order
from tcemu.arithmetic.specials import with_specials
from tcemu.bits import Limbs
from tcemu.compilation import compiled_once
from tcemu.formats import ROUNDINGS, Format, code_limbs, convert, limbs_code
from tcemu.meshes import alike

Advance = Callable[[Limbs, Any], Limbs]  # (running value, one step's products) -> the next running value


@compiled_once(1)
def walk(model: Model, signature: Signature, a: Array, b: Array, c: Array, scales: Scales | None) -> Array:
    """D = A·B + C by all steps, as codes of `signature.d`.

    a, b: codes in the formats that are multiplied; c: codes in that of the steps' results.
    """
    words = signature.a.words - 1
    a_scales = b_scales = None
    if scales is not None:
        assert signature.scale is not None
        rank = max(map(jnp.ndim, (a, b, *scales)))  # one for all: the products, and groups of them, become a leading axis
        a, b, a_codes, b_codes = (v.reshape((1,) * (rank - v.ndim) + v.shape) for v in map(jnp.asarray, (a, b, *scales)))
        (a, a_scales), (b, b_scales) = spread(signature.scale, a, a_codes, -1), spread(signature.scale, b, b_codes, -2)
    order = Order.of(model, signature.k)
    if model.fraction_bits is not None and model.summed is None:
        x = _in_steps(order, signature, operand(signature.a, a, signature.b, a_scales), -1)
        y = _in_steps(order, signature, operand(signature.b, b, signature.a, b_scales), -2)
        steps = partial(_fused, model, signature, order)
        return in_blocks(_by_instruction(steps, model, signature, order.steps_of_instruction(signature.k)), c, x, y)
    k_first = lambda v, axis: order.dealt(jnp.moveaxis(v, axis, 0), signature.k)  # noqa: E731
    sides = ((a, -1 - words), (b, -2 - words), (a_scales, -1), (b_scales, -2))
    products = tuple(jax.tree.map(partial(k_first, axis=axis), side) for side, axis in sides if side is not None)
    steps = partial(_exact if model.fraction_bits is None else _grouped, model, signature, order)
    return _by_instruction(steps, model, signature, signature.k)(c, *products)


def _by_instruction(steps: Callable[..., Array], model: Model, signature: Signature, length: int) -> Callable[..., Array]:
    """The steps; where D has another format than they, what one instruction leaves is rounded to it, and the next one starts from that.

    length: of one instruction, along the leading axis of the products.
    """
    if signature.d == model.result:
        return steps

    def instructions(c: Array, *products: Any) -> Array:
        def instruction(running: Array, products: tuple) -> tuple[Array, None]:
            d = convert(model.result, signature.d, steps(running, *products))
            return convert(signature.d, model.result, d), None

        products = jax.tree.map(lambda v: v.reshape(-1, length, *v.shape[1:]), products)
        return convert(model.result, signature.d, lax.scan(instruction, c, products)[0])

    return instructions


# ---- fused dot-adds


class StepOperand(NamedTuple):
    """One multiplicand's part in the steps. Leading axis: the steps."""

    operand: Operand  # [steps, ..., M, terms] or [steps, ..., terms, N]
    special: Array  # bool [steps, ..., 1, 1]


def _in_steps(order: Order, signature: Signature, x: Operand, axis: int) -> StepOperand:
    """[..., K, ...], K at `axis` -> the steps. The last step of a group is filled with zeros, which take no part."""
    group, terms = signature.k // order.groups, order.step_size(signature.k)

    def cut(v: Array, nothing: float) -> Array:
        at = v.ndim + axis
        before, after = v.shape[:at], v.shape[at + 1 :]
        if order.groups > 1:
            v = jnp.moveaxis(order.dealt(jnp.moveaxis(v, at, 0), signature.k), 0, at)
        v = v.reshape(*before, -1, group, *after)
        v = jnp.pad(v, [(0, 0)] * (at + 1) + [(0, -group % terms)] + [(0, 0)] * len(after), constant_values=nothing)
        return jnp.moveaxis(v.reshape(*before, -1, terms, *after), at, 0)

    cut_operand = Operand(significand=cut(x.significand, 0), exponent=cut(x.exponent, ZERO_EXPONENT))
    return StepOperand(cut_operand, has_special(cut_operand))


def _fused(model: Model, signature: Signature, order: Order, c: Array, x: StepOperand, y: StepOperand) -> Array:
    """Steps of `dot_add` along K, from c on, [..., M, N] in `model.result`."""

    def step(accumulator: Limbs, products: tuple[StepOperand, StepOperand]) -> Limbs:
        x, y = products
        special = jnp.any(x.special) | jnp.any(y.special)
        start = lax.cond(special, partial(with_specials, model.result), lambda x, y, c: c, x.operand, y.operand, accumulator)
        return dot_add(model, signature, x.operand, y.operand, start)

    def only(chosen: Array, products: tuple[StepOperand, StepOperand]) -> tuple[StepOperand, StepOperand]:
        x, y = products
        return x._replace(operand=_only(chosen[None, :], x.operand)), y._replace(operand=_only(chosen[:, None], y.operand))

    number = jnp.arange(x.operand.exponent.shape[-1]) // model.terms
    advance = step if isinstance(model.terms, int) else _traced_terms(step, number, only)
    return limbs_code(model.result, _chained(advance, model.result, order, signature.k, (x, y), code_limbs(model.result, c)))


def _only(chosen: Array, x: Operand) -> Operand:
    """The chosen products; the others become zeros."""
    return Operand(jnp.where(chosen, x.significand, 0), jnp.where(chosen, x.exponent, ZERO_EXPONENT))


def _traced_terms(step: Advance, number: Array, only: Callable) -> Advance:
    """Steps whose size is traced: one of the largest size, walked as often as `number` says, which gives each term its step.

    only(chosen, products): the chosen terms; the others take no part.
    """

    def steps(accumulator: Limbs, products: tuple) -> Limbs:
        return lax.fori_loop(0, number[-1] + 1, lambda s, running: step(running, only(number == s, products)), accumulator)

    return steps


# ---- the same over groups


def _grouped(model: Model, signature: Signature, order: Order, c: Array, a: Array, b: Array, a_scales: Scale, b_scales: Scale) -> Array:
    """Steps of `grouped_dot_add` along K; a, b: codes with K in front, each with its scale; otherwise as `_fused`."""
    summed = model.summed
    assert summed is not None
    x = deal(values(signature.a, a), a_scales, summed, -1)
    y = deal(values(signature.b, b), b_scales, summed, -2)
    groups, room = signature.k // summed, order.step_size(signature.k) // summed  # of an instruction, of a step

    def cut(v: Array) -> Array:
        """[groups, ...] -> [steps, groups of a step, ...]. The last step of an instruction is filled with groups that take no part."""
        v = v.reshape(-1, groups, *v.shape[1:])
        v = jnp.pad(v, [(0, 0), (0, -groups % room)] + [(0, 0)] * (v.ndim - 2))
        return v.reshape(-1, room, *v.shape[2:])

    def step(accumulator: Limbs, products: tuple[Groups, Groups]) -> Limbs:
        return grouped_dot_add(model, signature, *products, accumulator)

    def only(chosen: Array, products: tuple[Groups, Groups]) -> tuple[Groups, Groups]:
        return jax.tree.map(lambda v: jnp.where(chosen.reshape(-1, *(1,) * (v.ndim - 1)), v, 0), products)

    number = jnp.arange(room) * summed // model.terms
    advance = step if isinstance(model.terms, int) else _traced_terms(step, number, only)
    products = jax.tree.map(cut, (x, y))
    return limbs_code(model.result, _chained(advance, model.result, order, signature.k, products, code_limbs(model.result, c)))


# ---- fused multiply-adds


def _exact(model: Model, signature: Signature, order: Order, c: Array, a: Array, b: Array) -> Array:
    """Fused multiply-adds along K, in the format of A, B and the result alike; a, b: codes with K in front; otherwise as `_fused`."""
    fmt = model.result
    x, y, start = (code_limbs(fmt, v) for v in (a, b, c))
    # -0 adds nothing at all; +0 where sums are rounded down, since there +0 and -0 add up to -0
    down = model.rounding == "RM" if isinstance(model.rounding, str) else model.rounding == ROUNDINGS.index("RM")
    high = jnp.where(jnp.asarray(model.from_zero) | down, 0, jnp.uint32(1 << (min(fmt.bits, 32) - 1)))
    nothing = code_limbs(fmt, (jnp.stack([jnp.zeros_like(high), high]) if fmt.words == 2 else high).astype(fmt.dtype))

    def step(accumulator: Limbs, products: tuple[Limbs, Limbs]) -> Limbs:
        rows, columns = tuple(v[..., :, None] for v in products[0]), tuple(v[..., None, :] for v in products[1])
        return fma_limbs(rows, columns, accumulator, fmt, model.rounding)

    return limbs_code(fmt, _chained(step, fmt, order, signature.k, (x, y), start, nothing))


# ---- one step after the other


def _chained(
    advance: Advance, fmt: Format, order: Order, k: int, products: tuple, c: Limbs, nothing: tuple[ArrayLike, ...] = (0,)
) -> Limbs:
    """All steps, one after the other or in chains, which are added to c in `fmt`.

    products: arrays with the steps in front. nothing: the code from which a chain starts, limb by limb.
    """
    length = order.steps_of_chain(k)
    if length is None:
        return _scan(advance, c, products)

    def chain(one: tuple) -> Limbs:
        start = tuple(alike(jnp.full(v.shape, code, v.dtype), v)[0] for v, code in zip(c, nothing, strict=True))
        return _scan(advance, start, one)

    def add_chain(accumulator: Limbs, one: tuple) -> Limbs:
        return add_limbs(accumulator, chain(one), fmt)

    def add_instruction(accumulator: Limbs, chains: tuple) -> Limbs:
        first, rest = jax.tree.map(lambda v: v[0], chains), jax.tree.map(lambda v: v[1:], chains)
        return add_limbs(accumulator, _scan(add_chain, chain(first), rest), fmt)

    steps, per_instruction = jax.tree.leaves(products)[0].shape[0], order.steps_of_instruction(k)
    whole = steps - steps % length
    chains = jax.tree.map(lambda v: v[:whole].reshape(-1, length, *v.shape[1:]), products)
    if order.together:
        return _scan(add_instruction, c, jax.tree.map(lambda v: v.reshape(-1, per_instruction // length, *v.shape[1:]), chains))
    c = _scan(add_chain, c, chains)
    return c if whole == steps else add_chain(c, jax.tree.map(lambda v: v[whole:], products))


def _scan(advance: Callable[[Limbs, Any], Limbs], start: Limbs, products: Any) -> Limbs:
    """advance(running, one) over the leading axis of `products`.

    The products of the next step are handed on as part of the loop's state, so that each step reads whole arrays. Otherwise XLA on CPU
    fuses the indexing along K into the loop over D, which then no longer vectorises. That holds for two steps too, so they are a loop.
    """

    def body(state: tuple, following: Array) -> tuple[tuple, None]:
        running, current = state
        return (advance(running, current), one(following)), None

    steps = jax.tree.leaves(products)[0].shape[0]
    one = lambda at: jax.tree.map(lambda v: v[at], products)  # noqa: E731
    if steps <= 1:
        return advance(start, one(0)) if steps else start
    return lax.scan(body, (start, one(0)), jnp.arange(1, steps + 1) % steps)[0][0]
