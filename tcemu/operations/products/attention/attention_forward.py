"""The forward pass of attention on f32 codes: scores, the online softmax, and the sums of P·V, block of keys by block of keys.

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

from tcemu.base.compilation import jit_wide_vectors
from tcemu.base.meshes import match_varying_axes
from tcemu.engine.arithmetic.exponential import exp2, exp2_polynomial
from tcemu.engine.arithmetic.fma import add, fma
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.arithmetic.special_functions import divide_full, ex2, rcp
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.backends.quotients import divide, multiply
from tcemu.engine.formats.coding import recode
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, F32
from tcemu.operations.products.attention.flash_blocks import (
    AttentionOperands,
    AttentionSettings,
    KeyBlock,
    broadcast_to_rows,
    probability_scheme,
    quantize_blocks,
    visibility_mask,
)
from tcemu.operations.products.matmul import multiply_quantized, round_result, scales_chunks
from tcemu.operations.products.recipes import Recipe
from tcemu.operations.quantize.quantizer import QuantizedOperand, quantize
from tcemu.operations.quantize.scaled_elements import ONE

LANES = 4  # that share a row of an accumulator's tile, each with the columns 8i + 2t and 8i + 2t + 1
SIGN, MINUS_INFINITY = np.uint32(1 << 31), np.uint32(0xFF800000)


class SoftmaxState(NamedTuple):
    """The state between two blocks: codes, except for the two f32 arrays of the softmax."""

    max_score: Array  # of the row's scores, [B, K, R, 1]
    weights: Array  # their exponentials, added by each lane for itself, [B, K, R, lanes]
    total: Array  # the f32 sum of P·V, [B, K, R, H]
    running: Array  # the instruction's accumulator, in its own format
    unit: Array  # what one of the running sum stands for, broadcasts to it


class AttentionResult(NamedTuple):
    """The result, and what the backward pass needs besides the operands."""

    out: Array  # codes of the result's dtype, [B, K, R, H of V]
    max_score: Array  # f32 [B, K, R, 1]: the row's largest score, 0 where it sees no key
    inverse_sum: Array  # f32 [B, K, R, 1]: 1 over the sum of its exponentials, of exponent 0 at the largest; 0 where it sees no key


def _codes_to_f32(codes: Array) -> Array:
    return lax.bitcast_convert_type(codes, jnp.float32)


def _f32_to_codes(numbers: Array) -> Array:
    return lax.bitcast_convert_type(numbers, jnp.uint32)


def block_scores(settings: AttentionSettings, operands: AttentionOperands, q: QuantizedOperand, block: KeyBlock) -> Array:
    """Computes Q·Kᵀ of a block of keys by the recipe, -Inf where masked: f32 codes [B, K, R, block]. With a bias: scaled, plus bias."""
    recipe = operands.qk
    total = multiply_quantized(recipe, q, block.k)
    total = recode(recipe.dtype, F32, recode(F32, recipe.dtype, total))
    if block.bias is not None:
        total = fma(
            np.float32(settings.scale).view(np.uint32), total, _f32_to_codes(broadcast_to_rows(settings, block.bias, total.shape)), F32
        )
    seen = visibility_mask(settings, operands, block)
    return total if seen is None else jnp.where(broadcast_to_rows(settings, seen, total.shape), total, MINUS_INFINITY)


def exponent_factor(settings: AttentionSettings, operands: AttentionOperands) -> np.uint32:
    """Returns the factor that makes a score an exponent of 2, an f32 code: log2 e, times scale where `block_scores` has not applied it."""
    scale = np.float32(settings.scale if operands.bias is None else 1)
    return np.float32(float(scale) * log2(e)).view(np.uint32)


def _ex2_of_unit(codes: Array) -> Array:
    return ex2(codes, True)


POWERS = {"ex2.approx": _ex2_of_unit, "polynomial": exp2_polynomial, "exact": exp2}  # of P
DECAYS = {"ex2.approx": _ex2_of_unit, "polynomial": _ex2_of_unit, "exact": exp2}  # of the sums so far


def exponentials(scored: Array, largest: Array, times: np.uint32, form: str, offset: float = 0.0) -> Array:
    """Computes 2^(score * times - (largest * times - offset)) by two fused multiply-adds, as the kernels do; f32 codes. form: of POWERS."""
    shift = fma(_f32_to_codes(largest), times ^ SIGN, np.float32(offset).view(np.uint32), F32)
    return POWERS[form](fma(scored, times, shift, F32))


def finite_max(largest: Array) -> Array:
    """Returns a row's max score, 0 where the row sees no key."""
    return jnp.where(largest == -jnp.inf, 0, largest)


def lane_sums(start: Array, p: Array) -> Array:
    """Adds each lane's columns of P, f32 [..., R, block], to `start` [..., R, lanes], in ascending order.

    Plain f32 additions suffice: each is exact except for its rounding. A subnormal may be flushed, which is invisible beside the largest
    exponential.
    """
    tiles = p.reshape(*p.shape[:-1], -1, LANES, 2)
    columns = jnp.moveaxis(jnp.swapaxes(tiles, -1, -2).reshape(*p.shape[:-1], -1, LANES), -2, 0)
    start, columns = match_varying_axes(start, columns)
    return lax.scan(lambda total, column: (total + column, None), start, columns)[0]


def add_lane_sums(weights: Array) -> Array:
    """Adds the lanes' sums of a row, [..., R, 1], as two shuffles do: lanes two apart, then neighbours."""
    pairs = weights[..., :2] + weights[..., 2:]
    return pairs[..., :1] + pairs[..., 1:]


def reciprocal_sum(weights: Array, division: str = "rn") -> Array:
    """Returns 1 over a row's sum, 0 where the sum is 0: codes. division: as `Flash.division`."""
    codes = _f32_to_codes(weights)
    return jnp.where(weights == 0, jnp.uint32(0), rcp(codes, True) if division == "rcp.approx" else divide(ONE, codes, F32))


# ---- the plain form


def _whole_softmax(settings: AttentionSettings, operands: AttentionOperands) -> AttentionResult:
    """Computes the softmax of whole rows. P is divided by its sum before its cast."""
    pv = operands.pv
    q, blocks = quantize_blocks(settings, operands)
    block = jax.tree.map(lambda x: x[0], blocks)
    scored = block_scores(settings, operands, q, block)
    largest = finite_max(jnp.max(_codes_to_f32(scored), axis=-1, keepdims=True))
    p = exponentials(scored, largest, exponent_factor(settings, operands), settings.exp2)
    sums = add_lane_sums(lane_sums(jnp.zeros((*p.shape[:-1], LANES), jnp.float32), _codes_to_f32(p)))
    inverse = reciprocal_sum(sums)
    rounded = quantize(probability_scheme(pv, None), _codes_to_f32(multiply(p, inverse, F32)), key=probability_key(operands, block.number))
    out = round_result(pv, multiply_quantized(pv, rounded, block.v), settings.dtype)
    return AttentionResult(out, largest, _codes_to_f32(inverse))


# ---- block by block


class ValueAccumulation(NamedTuple):
    """The addition of P·V over blocks, and the scale in which its sums are counted."""

    recipe: Recipe
    chained: int | None  # blocks per accumulator; None: all
    varies: bool  # the scales of V differ from block to block

    def scales(self, p: QuantizedOperand, v: QuantizedOperand) -> Array:
        """Returns the scale of a product of codes, f32 codes that broadcast to [B, K, R, H]."""
        found = jnp.full((1, 1, 1, 1), ONE)
        if scales_chunks(self.recipe):
            return found
        given = (p.tensor_scale, v.tensor_scale, None if v.scales is None else jnp.swapaxes(v.scales, -1, -2))
        for scale in given:
            found = found if scale is None else multiply(scale, found, F32)
        return found

    def add_block(self, state: SoftmaxState, p: QuantizedOperand, block: KeyBlock, decay: Array, last: Array) -> SoftmaxState:
        """Multiplies the sums by `decay` [B, K, R, 1] and adds P·V of a block. last: no block follows."""
        unit = self.scales(p, block.v)
        if self.chained == 1:
            own = not scales_chunks(self.recipe)
            p, v = (x._replace(scales=None, tensor_scale=None) if own else x for x in (p, block.v))
            added = multiply_quantized(self.recipe, p, v)
            added = multiply(added, unit, F32) if self.varies else added
            return state._replace(total=add(multiply(state.total, decay, F32), added, F32), unit=_like(unit, state.unit))
        change = multiply(decay, divide(state.unit, unit, F32), F32) if self.varies else decay
        running = self._accumulate(state.running, p, block.v, change, self.chained is not None and block.number % self.chained == 0)
        if self.chained is None:
            return state._replace(running=running, unit=_like(unit, state.unit))
        own = recode(product_spec(self.recipe.op).d, F32, running)
        total = multiply(state.total, decay, F32)
        due = (block.number % self.chained == self.chained - 1) | last
        with_own = add(total, multiply(own, unit, F32) if self.varies else own, F32)
        return state._replace(running=running, unit=_like(unit, state.unit), total=jnp.where(due, with_own, total))

    def _accumulate(self, before: Array, p: QuantizedOperand, v: QuantizedOperand, change: Array, restart: bool | Array) -> Array:
        """Adds a block's products to the accumulator, which is multiplied by `change` or restarted first."""
        types = product_spec(self.recipe.op)
        kept = recode(F32, types.c, multiply(recode(types.c, F32, before), change, F32))
        start = jnp.where(restart, jnp.zeros_like(kept), kept)
        unit_scales = None
        if p.unit_scales is not None and v.unit_scales is not None:
            unit_scales = p.unit_scales, jnp.swapaxes(v.unit_scales, -1, -2)
        d = multiply_matrices(self.recipe.arithmetic, types, p.codes, jnp.swapaxes(v.codes, -1, -2), start, unit_scales, by_columns=True)
        return recode(types.d, types.c, d)

    def final_sum(self, state: SoftmaxState) -> Array:
        """Returns the sums in f32."""
        types = product_spec(self.recipe.op)
        return recode(types.c, F32, state.running) if self.chained is None else state.total

    def remaining_unit(self, state: SoftmaxState) -> Array | None:
        """Returns the scale in which the final sums are counted; None: 1."""
        return None if self.varies and self.chained is not None else state.unit


def _like(x: Array, other: Array) -> Array:
    return jnp.broadcast_to(x, other.shape)


def _online_softmax(settings: AttentionSettings, operands: AttentionOperands) -> AttentionResult:
    flash, pv = settings.flash, operands.pv
    assert flash is not None
    q, blocks = quantize_blocks(settings, operands)
    varies = flash.scales == "block" and (blocks.v.scales is not None or blocks.v.tensor_scale is not None)
    sums = ValueAccumulation(pv, flash.chained_blocks(pv), varies and not scales_chunks(pv))
    times, offset = exponent_factor(settings, operands), log2(flash.p_scale)
    scheme = probability_scheme(pv, flash)

    def step(state: SoftmaxState, block: KeyBlock) -> tuple[SoftmaxState, None]:
        scored = block_scores(settings, operands, q, block)
        largest = jnp.maximum(state.max_score, jnp.max(_codes_to_f32(scored), axis=-1, keepdims=True))
        p = exponentials(scored, finite_max(largest), times, flash.exp2, offset)
        score_change = add(_f32_to_codes(state.max_score), _f32_to_codes(finite_max(largest)) ^ SIGN, F32)
        decay = DECAYS[flash.exp2](multiply(score_change, times, F32))
        weights = lane_sums(_codes_to_f32(multiply(_f32_to_codes(state.weights), decay, F32)), _codes_to_f32(p))
        amax = jnp.uint32(np.float32(flash.p_scale).view(np.uint32))  # P is no larger, so that a tensor's scale need not be found
        rounded = quantize(scheme, _codes_to_f32(p), key=probability_key(operands, block.number), amax=amax)
        state = sums.add_block(state, rounded, block, decay, block.number == settings.blocks - 1)
        return SoftmaxState(*match_varying_axes(*state._replace(max_score=largest, weights=weights))), None

    state = lax.scan(step, _initial_state(operands, blocks, sums), blocks)[0]
    weights = add_lane_sums(state.weights)
    inverse, unit = reciprocal_sum(weights, flash.division), sums.remaining_unit(state)
    final = sums.final_sum(state)
    if flash.division == "div.full":
        quotient = divide_full(final if unit is None else multiply(final, unit, F32), _f32_to_codes(weights))
        final = jnp.where(weights == 0, jnp.uint32(0), quotient)
    else:
        final = multiply(final, inverse if unit is None else multiply(inverse, unit, F32), F32)
    of_exponent_0 = _codes_to_f32(inverse) * np.float32(flash.p_scale)
    return AttentionResult(round_result(pv, final, settings.dtype), finite_max(state.max_score), of_exponent_0)


def _initial_state(operands: AttentionOperands, blocks: KeyBlock, sums: ValueAccumulation) -> SoftmaxState:
    """Returns the state before the first block."""
    shape, types = operands.q.shape[:-1], product_spec(sums.recipe.op)
    width = operands.v.shape[-1]
    first = jax.tree.map(lambda x: x[0], blocks.v)
    scales = jax.eval_shape(partial(sums.scales, QuantizedOperand(first.codes, tensor_scale=_scalar_if(first.tensor_scale))), first)
    state = SoftmaxState(
        max_score=jnp.full((*shape, 1), -jnp.inf, jnp.float32),
        weights=jnp.zeros((*shape, LANES), jnp.float32),
        total=jnp.zeros((*shape, width) if sums.chained is not None else (1, 1, 1, 1), jnp.uint32),
        running=jnp.zeros((*shape, width) if sums.chained != 1 else (1, 1, 1, 1), types.c.dtype),
        unit=jnp.full(scales.shape, ONE),
    )
    leaves = match_varying_axes(*state, *jax.tree.leaves((operands, blocks)))
    return SoftmaxState(*leaves[: len(state)])


def _scalar_if(scale: Array | None) -> Array | None:
    return None if scale is None else jnp.full((), ONE)


def probability_key(operands: AttentionOperands, number: Array) -> Array | None:
    """Returns the key of a block's P."""
    return None if operands.key is None else jax.random.fold_in(jax.random.split(operands.key, 4)[3], number)


@jit_wide_vectors(0)
def attention_result(settings: AttentionSettings, operands: AttentionOperands) -> AttentionResult:
    """Computes the codes of the result, and what the gradients need."""
    if 0 in (*operands.q.shape[:-1], *operands.v.shape):  # no rows, no keys or no features
        shape = (*operands.q.shape[:-1], operands.v.shape[-1])
        nothing = jnp.zeros((*shape[:-1], 1), jnp.float32)
        return AttentionResult(jnp.zeros(shape, ARRAY_FORMATS[settings.dtype].dtype), nothing, nothing)
    return (_whole_softmax if settings.flash is None else _online_softmax)(settings, operands)
