"""Attention forward: scores, the online softmax, and the sums of P·V, block of keys by block of keys. f32 codes all the way.

Source: arXiv 2307.08691, algorithm 1; arXiv 2407.08608, algorithm 1; csrc/flash_attn/src/softmax.h and hopper/softmax.h of
https://github.com/Dao-AILab/flash-attention for the order of the operations. Each is rounded to nearest even.
"""

from __future__ import annotations

from functools import partial
from math import e, log2
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.arithmetic.exponential import exp2
from tcemu.arithmetic.fma import add, fma
from tcemu.arithmetic.program import multiply_add
from tcemu.arithmetic.quotient import divide, multiply
from tcemu.compilation import wide_vectors
from tcemu.formats import ARRAY_FORMATS, F32
from tcemu.formats.coding import recoded
from tcemu.linalg.attention_blocks import KeyBlock, Operands, Settings, allowed, by_rows, quantized, scheme_of_p, signature
from tcemu.linalg.matmul import rounded_result, scales_at_promotion, sum_of_quantized
from tcemu.linalg.recipes import Recipe
from tcemu.meshes import alike
from tcemu.quantize.operands import ONE, Quantized, quantize

LANES = 4  # that share a row of an accumulator's tile, each with the columns 8i + 2t and 8i + 2t + 1
SIGN, MINUS_INFINITY = np.uint32(1 << 31), np.uint32(0xFF800000)


class State(NamedTuple):
    """What goes from block to block. Codes but for the two of the softmax, which are f32."""

    largest: Array  # of the row's scores, [B, K, R, 1]
    weights: Array  # their exponentials, added by each lane for itself, [B, K, R, lanes]
    total: Array  # the f32 sum of P·V, [B, K, R, H]
    running: Array  # the instruction's accumulator, in its own format
    unit: Array  # what one of the running sum stands for, broadcasts to it


class Result(NamedTuple):
    """What the backward pass needs besides the operands."""

    out: Array  # codes of the result's dtype, [B, K, R, H of V]
    largest: Array  # f32 [B, K, R, 1]: the row's largest score, 0 where it sees no key
    inverse: Array  # f32 [B, K, R, 1]: 1 over the sum of its exponentials, of exponent 0 at the largest; 0 where it sees no key


def _number(codes: Array) -> Array:
    return lax.bitcast_convert_type(codes, jnp.float32)


def _codes(numbers: Array) -> Array:
    return lax.bitcast_convert_type(numbers, jnp.uint32)


def scores(settings: Settings, operands: Operands, q: Quantized, block: KeyBlock) -> Array:
    """Q·Kᵀ of a block of keys by the recipe, -Inf where nothing is seen: f32 codes [B, K, R, block]. With a bias: times scale, plus it."""
    recipe = operands.qk
    total = sum_of_quantized(recipe, q, block.k)
    total = recoded(recipe.out, F32, recoded(F32, recipe.out, total))
    if block.bias is not None:
        total = fma(np.float32(settings.scale).view(np.uint32), total, _codes(by_rows(settings, block.bias, total.shape)), F32)
    seen = allowed(settings, operands, block)
    return total if seen is None else jnp.where(by_rows(settings, seen, total.shape), total, MINUS_INFINITY)


def factor(settings: Settings, operands: Operands) -> np.uint32:
    """What a score is multiplied by to be an exponent of 2, an f32 code: log2 e, and scale where `scores` has not taken it."""
    scale = np.float32(settings.scale if operands.bias is None else 1)
    return np.float32(float(scale) * log2(e)).view(np.uint32)


def exponentials(scored: Array, largest: Array, times: np.uint32, offset: float = 0.0) -> Array:
    """2^(score * times - (largest * times - offset)), two fused multiply-adds as the kernels have them; f32 codes."""
    shift = fma(_codes(largest), times ^ SIGN, np.float32(offset).view(np.uint32), F32)
    return exp2(fma(scored, times, shift, F32))


def finite(largest: Array) -> Array:
    """A row's largest score, 0 where it sees no key."""
    return jnp.where(largest == -jnp.inf, 0, largest)


def lane_sums(start: Array, p: Array) -> Array:
    """Each lane's sum of its columns of P, from `start` [..., R, lanes] on, in ascending order. p: f32 [..., R, block].

    Plain f32 additions, each exact but for its rounding; a subnormal may be flushed, which cannot be seen beside the largest exponential.
    """
    tiles = p.reshape(*p.shape[:-1], -1, LANES, 2)
    columns = jnp.moveaxis(jnp.swapaxes(tiles, -1, -2).reshape(*p.shape[:-1], -1, LANES), -2, 0)
    start, columns = alike(start, columns)
    return lax.scan(lambda total, column: (total + column, None), start, columns)[0]


def sum_of_lanes(weights: Array) -> Array:
    """The sum of a row [..., R, 1], as two shuffles add it: lanes two apart, then neighbours."""
    pairs = weights[..., :2] + weights[..., 2:]
    return pairs[..., :1] + pairs[..., 1:]


def inverse_of(weights: Array) -> Array:
    """1 over a row's sum, 0 where it is 0: codes."""
    return jnp.where(weights == 0, jnp.uint32(0), divide(ONE, _codes(weights), F32))


# ---- whole rows


def _plain(settings: Settings, operands: Operands) -> Result:
    """The whole softmax, P divided by its sum before its cast."""
    pv = operands.pv
    q, blocks = quantized(settings, operands)
    block = jax.tree.map(lambda x: x[0], blocks)
    scored = scores(settings, operands, q, block)
    largest = finite(jnp.max(_number(scored), axis=-1, keepdims=True))
    p = exponentials(scored, largest, factor(settings, operands))
    sums = sum_of_lanes(lane_sums(jnp.zeros((*p.shape[:-1], LANES), jnp.float32), _number(p)))
    inverse = inverse_of(sums)
    rounded = quantize(scheme_of_p(pv, None), _number(multiply(p, inverse, F32)), key=key_of_p(operands, block.number))
    out = rounded_result(pv, sum_of_quantized(pv, rounded, block.v), settings.dtype)
    return Result(out, largest, _number(inverse))


# ---- block by block


class Sums(NamedTuple):
    """How P·V is added, and what a sum is counted in."""

    recipe: Recipe
    chained: int | None  # blocks in one accumulator, None: all
    varies: bool  # the scales of V differ from block to block

    def scales(self, p: Quantized, v: Quantized) -> Array:
        """What a product of codes stands for; f32 codes that broadcast to [B, K, R, H]."""
        found = jnp.full((1, 1, 1, 1), ONE)
        if scales_at_promotion(self.recipe):
            return found
        given = (p.tensor_scale, v.tensor_scale, None if v.scales is None else jnp.swapaxes(v.scales, -1, -2))
        for scale in given:
            found = found if scale is None else multiply(scale, found, F32)
        return found

    def added(self, state: State, p: Quantized, block: KeyBlock, decay: Array, last: Array) -> State:
        """The state with P·V of a block, after its sums were multiplied by `decay` [B, K, R, 1]. last: there is no block after it."""
        unit = self.scales(p, block.v)
        if self.chained == 1:
            own = not scales_at_promotion(self.recipe)
            p, v = (x._replace(scales=None, tensor_scale=None) if own else x for x in (p, block.v))
            added = sum_of_quantized(self.recipe, p, v)
            added = multiply(added, unit, F32) if self.varies else added
            return state._replace(total=add(multiply(state.total, decay, F32), added, F32), unit=_like(unit, state.unit))
        change = multiply(decay, divide(state.unit, unit, F32), F32) if self.varies else decay
        running = self._running(state.running, p, block.v, change, self.chained is not None and block.number % self.chained == 0)
        if self.chained is None:
            return state._replace(running=running, unit=_like(unit, state.unit))
        own = recoded(signature(self.recipe).d, F32, running)
        total = multiply(state.total, decay, F32)
        due = (block.number % self.chained == self.chained - 1) | last
        with_own = add(total, multiply(own, unit, F32) if self.varies else own, F32)
        return state._replace(running=running, unit=_like(unit, state.unit), total=jnp.where(due, with_own, total))

    def _running(self, before: Array, p: Quantized, v: Quantized, change: Array, anew: bool | Array) -> Array:
        """The accumulator, times `change` or begun anew, with a block's products on top."""
        types = signature(self.recipe)
        kept = recoded(F32, types.c, multiply(recoded(types.c, F32, before), change, F32))
        start = jnp.where(anew, jnp.zeros_like(kept), kept)
        unit_scales = None
        if p.unit_scales is not None and v.unit_scales is not None:
            unit_scales = p.unit_scales, jnp.swapaxes(v.unit_scales, -1, -2)
        d = multiply_add(self.recipe.arithmetic, types, p.codes, jnp.swapaxes(v.codes, -1, -2), start, unit_scales)
        return recoded(types.d, types.c, d)

    def finished(self, state: State) -> Array:
        """The sums in f32."""
        types = signature(self.recipe)
        return recoded(types.c, F32, state.running) if self.chained is None else state.total

    def rest(self, state: State) -> Array | None:
        """What finished sums are still counted in."""
        return None if self.varies and self.chained is not None else state.unit


def _like(x: Array, other: Array) -> Array:
    return jnp.broadcast_to(x, other.shape)


def _flash(settings: Settings, operands: Operands) -> Result:
    flash, pv = settings.flash, operands.pv
    assert flash is not None
    q, blocks = quantized(settings, operands)
    varies = flash.scales == "block" and (blocks.v.scales is not None or blocks.v.tensor_scale is not None)
    sums = Sums(pv, flash.blocks_chained(pv), varies and not scales_at_promotion(pv))
    times, offset = factor(settings, operands), log2(flash.p_scale)
    scheme = scheme_of_p(pv, flash)

    def step(state: State, block: KeyBlock) -> tuple[State, None]:
        scored = scores(settings, operands, q, block)
        largest = jnp.maximum(state.largest, jnp.max(_number(scored), axis=-1, keepdims=True))
        p = exponentials(scored, finite(largest), times, offset)
        fallen = add(_codes(state.largest), _codes(finite(largest)) ^ SIGN, F32)
        decay = exp2(multiply(fallen, times, F32))
        weights = lane_sums(_number(multiply(_codes(state.weights), decay, F32)), _number(p))
        amax = jnp.uint32(np.float32(flash.p_scale).view(np.uint32))  # P is no larger, so that a tensor's scale need not be found
        rounded = quantize(scheme, _number(p), key=key_of_p(operands, block.number), amax=amax)
        state = sums.added(state, rounded, block, decay, block.number == settings.blocks - 1)
        return State(*alike(*state._replace(largest=largest, weights=weights))), None

    state = lax.scan(step, _start(operands, blocks, sums), blocks)[0]
    weights = sum_of_lanes(state.weights)
    inverse, unit = inverse_of(weights), sums.rest(state)
    final = multiply(sums.finished(state), inverse if unit is None else multiply(inverse, unit, F32), F32)
    of_exponent_0 = _number(inverse) * np.float32(flash.p_scale)
    return Result(rounded_result(pv, final, settings.dtype), finite(state.largest), of_exponent_0)


def _start(operands: Operands, blocks: KeyBlock, sums: Sums) -> State:
    """Before the first block."""
    shape, types = operands.q.shape[:-1], signature(sums.recipe)
    width = operands.v.shape[-1]
    first = jax.tree.map(lambda x: x[0], blocks.v)
    scales = jax.eval_shape(partial(sums.scales, Quantized(first.codes, tensor_scale=_scalar_if(first.tensor_scale))), first)
    state = State(
        largest=jnp.full((*shape, 1), -jnp.inf, jnp.float32),
        weights=jnp.zeros((*shape, LANES), jnp.float32),
        total=jnp.zeros((*shape, width) if sums.chained is not None else (1, 1, 1, 1), jnp.uint32),
        running=jnp.zeros((*shape, width) if sums.chained != 1 else (1, 1, 1, 1), types.c.dtype),
        unit=jnp.full(scales.shape, ONE),
    )
    leaves = alike(*state, *jax.tree.leaves((operands, blocks)))
    return State(*leaves[: len(state)])


def _scalar_if(scale: Array | None) -> Array | None:
    return None if scale is None else jnp.full((), ONE)


def key_of_p(operands: Operands, number: Array) -> Array | None:
    """The random bits of a block's P."""
    return None if operands.key is None else jax.random.fold_in(jax.random.split(operands.key, 4)[3], number)


@wide_vectors(0)
def forward(settings: Settings, operands: Operands) -> Result:
    """The codes of the result, and what the gradients need."""
    if 0 in (*operands.q.shape[:-1], *operands.v.shape):  # no row, no key, or nothing to add
        shape = (*operands.q.shape[:-1], operands.v.shape[-1])
        nothing = jnp.zeros((*shape[:-1], 1), jnp.float32)
        return Result(jnp.zeros(shape, ARRAY_FORMATS[settings.dtype].dtype), nothing, nothing)
    return (_plain if settings.flash is None else _flash)(settings, operands)
