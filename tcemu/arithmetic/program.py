"""The step program: how the products of one row and one column, and the accumulator, become one result.

A `Model` is data; `run` is the only place that reads it. Which model a target uses is a row of `models`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.arithmetic import integer
from tcemu.arithmetic.blocks import in_blocks
from tcemu.arithmetic.dot_add import ZERO_EXPONENT, Operand, Scale, dot_add, has_special, operand, scale
from tcemu.arithmetic.fma import add_limbs, fma_limbs
from tcemu.arithmetic.grouped import Groups, deal, grouped_dot_add, values
from tcemu.arithmetic.kernels.fused import FusedPlan
from tcemu.arithmetic.kernels.grouped import GroupedPlan
from tcemu.arithmetic.kernels.tile import capable, product
from tcemu.arithmetic.model import Model, Scales, Signature, fitted
from tcemu.arithmetic.order import Order
from tcemu.bits import Limbs
from tcemu.formats import F32, Format, code_limbs, convert, cuts, limbs_code

UNROLLED = 4  # fewer steps than this are no loop


def run(model: Model, signature: Signature, a: ArrayLike, b: ArrayLike, c: ArrayLike, scales: Scales | None = None) -> Array:
    """D = A·B + C on raw codes.

    a: [..., M, K]; b: [..., K, N]; c: [..., M, N]; leading axes broadcast; f64 codes have a trailing axis of two words.
    K is a multiple of `signature.k`, not 0 (any number but 0 for a model with fraction_bits=None and no chain).
    scales: codes of `signature.scale`, [..., M, S] for A and [..., S, N] for B, each for K / S products along K; None if there are none.
    Returns codes of `signature.d`, [..., M, N].
    """
    a, b, c = jnp.asarray(a), jnp.asarray(b), jnp.asarray(c)
    words = (2,) * (signature.a.words - 1)
    (*a_batch, m, _), (*b_batch, _, n), (*c_batch, _, _) = (v.shape[: v.ndim - len(words)] for v in (a, b, c))
    batch = jnp.broadcast_shapes(tuple(a_batch), tuple(b_batch), tuple(c_batch), *(jnp.shape(v)[:-2] for v in scales or ()))
    c = jnp.broadcast_to(c, (*batch, m, n, *words))
    if c.size == 0:
        return jnp.zeros(c.shape, signature.d.dtype)
    if model.result.is_integer:
        return _run_integer(signature, a, b, c)
    model = fitted(model, signature, None if scales is None else a.shape[-1] // jnp.shape(scales[0])[-1])
    if (common := model.common) is not None:
        a, b = (v if fmt == common else convert(v, fmt, common) for v, fmt in ((a, signature.a), (b, signature.b)))
        signature = signature._replace(a=common, b=common)
    c = c if signature.c == model.result else convert(c, signature.c, model.result)
    plan = kernel_plan(model, signature) if capable() else None
    if plan is None:
        return _walk_all(model, signature, a, b, c, scales)
    on_gpu, elsewhere = partial(_by_kernel, plan, signature), partial(_walk_all, model, signature)
    return lax.platform_dependent(a, b, c, scales, cuda=on_gpu, default=elsewhere)


def kernel_plan(model: Model, signature: Signature, *, assembly: bool = True) -> FusedPlan | GroupedPlan | None:
    """What `tile_kernel` needs to walk these steps; None where it cannot: fields are traced, sums too wide, results not cut to f32."""
    bits, floor, lost = model.fraction_bits, model.floor, F32.mantissa_bits if model.result_bits is None else model.result_bits
    if not (isinstance(model.terms, int) and isinstance(bits, int) and isinstance(floor, int) and isinstance(lost, int)):
        return None
    to_f32 = model.result == F32 and signature.d == F32 and cuts(model.rounding) and cuts(model.alignment)
    terms, lost = Order.of(model, signature.k).step_size(signature.k), F32.mantissa_bits - lost
    if not to_f32 or model.chain is not None or model.groups > 1 or signature.k % terms:
        return None
    if model.summed is None:
        plan = FusedPlan(signature.a, signature.b, terms, bits, floor, lost, signature.scale is not None, assembly)
    else:
        assert signature.scale is not None
        plan = GroupedPlan(signature.a, signature.b, terms, model.summed, signature.scale.mantissa_bits, bits, floor, lost, assembly)
    return plan if plan.possible else None


def _by_kernel(plan: FusedPlan | GroupedPlan, signature: Signature, a: Array, b: Array, c: Array, scales: Scales | None) -> Array:
    if scales is None or signature.scale is None:
        return product(plan, a, b, c)
    (a, a_scales), (b, b_scales) = (_spread(signature.scale, v, s, at) for v, s, at in ((a, scales[0], -1), (b, scales[1], -2)))
    return product(plan, a, b, c, (a_scales, b_scales))


def _walk_all(model: Model, signature: Signature, a: Array, b: Array, c: Array, scales: Scales | None) -> Array:
    """All steps, on any device; a and b in the formats that are multiplied, c in that of the results."""
    words = signature.a.words - 1
    a_scales = b_scales = None
    if scales is not None:
        assert signature.scale is not None
        rank = max(map(jnp.ndim, (a, b, *scales)))  # one for all: the products, and groups of them, become a leading axis
        a, b, a_codes, b_codes = (v.reshape((1,) * (rank - v.ndim) + v.shape) for v in map(jnp.asarray, (a, b, *scales)))
        (a, a_scales), (b, b_scales) = _spread(signature.scale, a, a_codes, -1), _spread(signature.scale, b, b_codes, -2)
    fused = model.fraction_bits is not None and model.summed is None
    if fused:
        products = _fused_steps(model, signature, a, b, a_scales, b_scales)
        walk, per_instruction = (
            partial(_walk_fused, model, signature, scales is not None),
            Order.of(model, signature.k).steps_of_instruction(signature.k),
        )
    else:
        sides = ((a, -1 - words), (b, -2 - words), (a_scales, -1), (b_scales, -2))
        order = Order.of(model, signature.k)
        first = lambda v, axis: order.dealt(jnp.moveaxis(v, axis, 0), signature.k)  # noqa: E731
        products = tuple(jax.tree.map(partial(first, axis=axis), side) for side, axis in sides if side is not None)
        walk, per_instruction = partial(_walk_exact if model.fraction_bits is None else _walk_grouped, model, signature), signature.k

    def instructions(c: Array, *products: Any) -> Array:
        """What one instruction leaves is rounded to D's format, and the next one starts from that."""

        def instruction(running: Array, products: tuple) -> tuple[Array, None]:
            d = convert(walk(running, *products), model.result, signature.d)
            return convert(d, signature.d, model.result), None

        products = jax.tree.map(lambda v: v.reshape(-1, per_instruction, *v.shape[1:]), products)
        return convert(lax.scan(instruction, c, products)[0], model.result, signature.d)

    whole = walk if signature.d == model.result else instructions
    return in_blocks(whole, c, *products) if fused else whole(c, *products)


def _spread(fmt: Format, codes: Array, scales: ArrayLike, axis: int) -> tuple[Array, Scale]:
    """Codes [..., M, K] (axis -1) or [..., K, N] (axis -2) with the scales' batch axes, and a scale for each of them."""
    scales = jnp.asarray(scales)
    batch = jnp.broadcast_shapes(codes.shape[:-2], scales.shape[:-2])
    codes, scales = (jnp.broadcast_to(v, (*batch, *v.shape[-2:])) for v in (codes, scales))
    return codes, jax.tree.map(lambda v: jnp.repeat(v, codes.shape[axis] // scales.shape[axis], axis=axis), scale(fmt, scales))


class Step(NamedTuple):
    """One multiplicand's part in the steps. Leading axis: the steps."""

    operand: Operand  # [steps, ..., M, terms] or [steps, ..., terms, N]
    special: Array  # bool [steps, ..., 1, 1]


def _fused_steps(
    model: Model, signature: Signature, a: Array, b: Array, a_scales: Scale | None, b_scales: Scale | None
) -> tuple[Step, Step]:
    """Both multiplicands decoded and cut into steps."""
    x = _cut(model, signature.k, operand(signature.a, a, signature.b, a_scales), -1)
    y = _cut(model, signature.k, operand(signature.b, b, signature.a, b_scales), -2)
    return Step(x, has_special(x)), Step(y, has_special(y))


def _walk_fused(model: Model, signature: Signature, scaled: bool, c: Array, x: Step, y: Step) -> Array:
    """Steps of `dot_add` along K, from c on, [..., M, N] in `model.result`."""
    terms, fraction_bits = x.operand.exponent.shape[-1], model.fraction_bits
    assert fraction_bits is not None

    def step(accumulator: Limbs | None, products: tuple[Step, Step]) -> Limbs:
        def add(special: bool, *operands: Any) -> Limbs:
            return dot_add(
                *operands, special=special, a_format=signature.a, b_format=signature.b, scaled=scaled, result=model.result,
                rounding=model.rounding, fraction_bits=fraction_bits, floor=model.floor, result_bits=model.result_bits,
                alignment=model.alignment,
            )  # fmt: skip

        x, y = products
        special = jnp.any(x.special) | jnp.any(y.special)
        return lax.cond(special, partial(add, True), partial(add, False), x.operand, y.operand, accumulator)

    def only(chosen: Array, products: tuple[Step, Step]) -> tuple[Step, Step]:
        x, y = products
        return x._replace(operand=_only(chosen[None, :], x.operand)), y._replace(operand=_only(chosen[:, None], y.operand))

    advance = step if isinstance(model.terms, int) else _traced_terms(step, jnp.arange(terms) // model.terms, only, c.shape)
    return limbs_code(model.result, _walk(advance, model, signature.k, (x, y), code_limbs(model.result, c)))


def _traced_terms(step: Callable, number: Array, only: Callable, shape: tuple[int, ...]) -> Callable:
    """Steps whose size is traced: one of the largest size, walked as often as `number` says, which gives each term its step.

    only(chosen, products): the chosen terms; the others take no part.
    """

    def steps(accumulator: Limbs | None, products: tuple) -> Limbs:
        start = (jnp.zeros(shape, jnp.uint32),) if accumulator is None else accumulator
        return lax.fori_loop(0, number[-1] + 1, lambda s, running: step(running, only(number == s, products)), start)

    return steps


def _walk_grouped(
    model: Model, signature: Signature, c: Array, a: Array, b: Array, a_scales: Scale | None = None, b_scales: Scale | None = None
) -> Array:
    """Steps of `grouped_dot_add` along K; shapes as in `_walk_fused`."""
    summed, fraction_bits = model.summed, model.fraction_bits
    assert summed is not None and fraction_bits is not None
    assert a_scales is not None and b_scales is not None and signature.scale is not None
    x = deal(values(signature.a, a), a_scales, summed, -1)
    y = deal(values(signature.b, b), b_scales, summed, -2)
    groups, terms = signature.k // summed, Order.of(model, signature.k).step_size(signature.k)

    def cut(v: Array) -> Array:
        """[groups, ...] -> [steps, groups of a step, ...]. The last step of an instruction is filled with groups that take no part."""
        v = v.reshape(-1, groups, *v.shape[1:])
        v = jnp.pad(v, [(0, 0), (0, -groups % (terms // summed))] + [(0, 0)] * (v.ndim - 2))
        return v.reshape(-1, terms // summed, *v.shape[2:])

    scale_format = signature.scale

    def step(accumulator: Limbs | None, products: tuple[Groups, Groups]) -> Limbs:
        return grouped_dot_add(
            *products, accumulator, a_format=signature.a, b_format=signature.b, scale=scale_format, result=model.result,
            rounding=model.rounding, fraction_bits=fraction_bits, floor=model.floor, result_bits=model.result_bits,
            alignment=model.alignment,
        )  # fmt: skip

    def only(chosen: Array, products: tuple[Groups, Groups]) -> tuple[Groups, Groups]:
        return jax.tree.map(lambda v: jnp.where(chosen.reshape(-1, *(1,) * (v.ndim - 1)), v, 0), products)

    number = jnp.arange(terms // summed) * summed // model.terms
    advance = step if isinstance(model.terms, int) else _traced_terms(step, number, only, c.shape)
    return limbs_code(model.result, _walk(advance, model, signature.k, jax.tree.map(cut, (x, y)), code_limbs(model.result, c)))


def _walk_exact(model: Model, signature: Signature, c: Array, a: Array, b: Array) -> Array:
    """Fused multiply-adds along K, in the format of A, B and the result alike; shapes as in `_walk_fused`."""
    fmt = model.result
    x, y, start = (code_limbs(fmt, v) for v in (a, b, c))
    high = 0 if model.from_zero else 1 << (min(fmt.bits, 32) - 1)  # -0 adds nothing at all
    nothing = code_limbs(fmt, jnp.asarray([0, high] if fmt.words == 2 else high, fmt.dtype))

    def step(accumulator: Limbs | None, products: tuple[Limbs, Limbs]) -> Limbs:
        rows, columns = tuple(v[..., :, None] for v in products[0]), tuple(v[..., None, :] for v in products[1])
        return fma_limbs(rows, columns, accumulator or nothing, fmt, model.rounding)

    return limbs_code(fmt, _walk(step, model, signature.k, (x, y), start))


def _cut(model: Model, k: int, x: Operand, axis: int) -> Operand:
    """[..., K, ...], K at `axis` -> [steps, ..., terms, ...]. The last step of a group is filled with zeros, which take no part."""
    order = Order.of(model, k)
    group, terms = k // model.groups, order.step_size(k)

    def cut(v: Array, nothing: float) -> Array:
        at = v.ndim + axis
        before, after = v.shape[:at], v.shape[at + 1 :]
        if model.groups > 1:
            v = jnp.moveaxis(order.dealt(jnp.moveaxis(v, at, 0), k), 0, at)
        v = v.reshape(*before, -1, group, *after)
        v = jnp.pad(v, [(0, 0)] * (at + 1) + [(0, -group % terms)] + [(0, 0)] * len(after), constant_values=nothing)
        return jnp.moveaxis(v.reshape(*before, -1, terms, *after), at, 0)

    return Operand(cut(x.significand, 0), cut(x.exponent, ZERO_EXPONENT))


def _only(chosen: Array, x: Operand) -> Operand:
    """The chosen products; the others become zeros."""
    return Operand(jnp.where(chosen, x.significand, 0), jnp.where(chosen, x.exponent, ZERO_EXPONENT))


def _walk(step: Callable, model: Model, k: int, products: tuple, c: Limbs) -> Limbs:
    """All steps, one after the other or in chains. products: arrays with the steps in front; step(running value or None, one step's)."""

    if model.chain is None:
        return _scan(step, c, products)

    def chain(one: tuple) -> Limbs:
        first, rest = jax.tree.map(lambda v: v[0], one), jax.tree.map(lambda v: v[1:], one)
        return _scan(step, step(None, first), rest)

    def add_chain(accumulator: Limbs, one: tuple) -> Limbs:
        return add_limbs(accumulator, chain(one), model.result)

    def add_instruction(accumulator: Limbs, chains: tuple) -> Limbs:
        first, rest = jax.tree.map(lambda v: v[0], chains), jax.tree.map(lambda v: v[1:], chains)
        return add_limbs(accumulator, _scan(add_chain, chain(first), rest), model.result)

    steps = jax.tree.leaves(products)[0].shape[0]
    order = Order.of(model, k)
    per_instruction, length = order.steps_of_instruction(k), order.steps_of_chain(k)
    assert length is not None
    whole = steps - steps % length
    chains = jax.tree.map(lambda v: v[:whole].reshape(-1, length, *v.shape[1:]), products)
    if model.together:
        return _scan(add_instruction, c, jax.tree.map(lambda v: v.reshape(-1, per_instruction // length, *v.shape[1:]), chains))
    c = _scan(add_chain, c, chains)
    return c if whole == steps else add_chain(c, jax.tree.map(lambda v: v[whole:], products))


def _scan(step: Callable, start: Limbs, products: Any) -> Limbs:
    """step(running, one) over the leading axis of `products`.

    The products of the next step are handed on as part of the loop's state, so that each step reads whole arrays: XLA on CPU would fuse the
    indexing along K into the loop over D, which then no longer vectorises.
    """

    def body(state: tuple, following: Array) -> tuple[tuple, None]:
        running, current = state
        return (step(running, current), one(following)), None

    steps = jax.tree.leaves(products)[0].shape[0]
    one = lambda at: jax.tree.map(lambda v: v[at], products)  # noqa: E731
    if steps < UNROLLED:
        for at in range(steps):
            start = step(start, one(at))
        return start
    return lax.scan(body, (start, one(0)), jnp.arange(1, steps + 1) % steps)[0][0]


def _run_integer(signature: Signature, a: Array, b: Array, c: Array) -> Array:
    """Exact sums in s32, wrapped, or clamped once an instruction."""
    x, y = integer.values(signature.a, a), integer.values(signature.b, b)
    lowest = integer.lowest(signature.a), integer.lowest(signature.b)
    total = c.astype(jnp.int32)
    if signature.bit_op == "xor":
        return (total + integer.xor_popcount(x, y)).astype(jnp.uint32)
    if not signature.clamp:
        return (total + integer.dot(x, y, lowest)).astype(jnp.uint32)
    x = jnp.moveaxis(x.reshape(*x.shape[:-1], -1, signature.k), -2, 0)
    y = jnp.moveaxis(y.reshape(*y.shape[:-2], -1, signature.k, y.shape[-1]), -3, 0)
    step = lambda t, xy: (integer.clamping_add(t, integer.dot(xy[0], xy[1], lowest)), None)  # noqa: E731
    return lax.scan(step, total, (x, y))[0].astype(jnp.uint32)
