"""The backward pass of attention, as in FlashAttention: block of keys by block of keys, with the scores computed again.

Source: arXiv 2307.08691, algorithm 2. The scores come from the forward recipe, to the bit. The four products of the gradients, dP = g·Vᵀ,
dV = Pᵀ·g, dQ = dS·K and dK = dSᵀ·Q, are computed by the recipes' gradient recipes or in plain f32, as `backward` says; the rest is f32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base.gradients import no_gradient, reverse_mode_only
from tcemu.base.meshes import match_varying_axes
from tcemu.operations.products.attention.attention_forward import (
    AttentionResult,
    attention_result,
    block_scores,
    exponent_factor,
    exponentials,
    probability_key,
)
from tcemu.operations.products.attention.flash_blocks import (
    AttentionOperands,
    AttentionSettings,
    KeyBlock,
    probability_scheme,
    quantize_blocks,
    split_rows,
)
from tcemu.operations.products.matmul import matmul
from tcemu.operations.products.recipes import Recipe
from tcemu.operations.quantize.quantizer import QuantizedOperand, dequantize, quantize

GRADIENTS = ("dP", "dV", "dQ", "dK")  # of P·V and of Q·Kᵀ: dA and dB
NO_FORWARD_MODE = (
    "tcemu.attention: forward mode (jax.jvp, jax.jacfwd, jax.hessian) has no rule, since the backward pass computes the scores again, as "
    "FlashAttention does. Take jax.jacrev, jax.vjp or jax.grad; or write softmax(Q·Kᵀ)·V with tcemu.matmul and recipes with "
    'backward="exact", which have forward mode'
)
NO_SECOND_DERIVATIVE = "tcemu.attention: its gradients have no derivatives of their own; jax.lax.stop_gradient says that none are expected"


Gradients = tuple[Array, Array, Array, Array | None]


def attention_with_residual(settings: AttentionSettings, operands: AttentionOperands) -> tuple[Array, Array]:
    """Computes the result [B, K, R, H of V] in its dtype, and ln of each row's sum of exp(scores), f32 [B, K, R]; -Inf without keys.

    Differentiable once, in reverse mode.
    """
    return _attention(settings, reverse_mode_only(operands, NO_FORWARD_MODE))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings: AttentionSettings, operands: AttentionOperands) -> tuple[Array, Array]:
    return _output_and_residual(settings, operands, _result(settings, operands))


def _result(settings: AttentionSettings, operands: AttentionOperands) -> AttentionResult:
    """One program serves all kinds of gradients."""
    qk, pv = (recipe.replace(backward="exact") for recipe in (operands.qk, operands.pv))
    return attention_result(settings, operands._replace(qk=qk, pv=pv))


def _forward_rule(
    settings: AttentionSettings, operands: AttentionOperands
) -> tuple[tuple[Array, Array], tuple[AttentionOperands, AttentionResult]]:
    operands = _forbid_second_derivative(operands)
    result = _result(settings, operands)
    return _output_and_residual(settings, operands, result), (operands, result)


def _forbid_second_derivative(operands: AttentionOperands) -> AttentionOperands:
    """Marks the operands of a derivative rule, whose values go through bits: differentiating them again raises TypeError."""
    q, k, v = (no_gradient(x, NO_SECOND_DERIVATIVE) for x in (operands.q, operands.k, operands.v))
    return operands._replace(q=q, k=k, v=v, bias=None if operands.bias is None else no_gradient(operands.bias, NO_SECOND_DERIVATIVE))


def _output_and_residual(settings: AttentionSettings, operands: AttentionOperands, result: AttentionResult) -> tuple[Array, Array]:
    scale = settings.scale if operands.bias is None else 1
    residual = jnp.where(result.inverse_sum == 0, -jnp.inf, result.max_score * np.float32(scale) - jnp.log(result.inverse_sum))
    return lax.bitcast_convert_type(result.out, settings.dtype), residual[..., 0]


def _backward_rule(
    settings: AttentionSettings, kept: tuple[AttentionOperands, AttentionResult], cotangents: tuple[Array, Array]
) -> tuple[AttentionOperands]:
    operands, result = kept
    operands = _forbid_second_derivative(operands)
    q, k, v = operands.q, operands.k, operands.v
    dq, dk, dv, dbias = _gradients(settings, operands, result, jax.tree.map(lambda g: no_gradient(g, NO_SECOND_DERIVATIVE), cotangents))
    nothing: Any = None  # no derivative
    return (
        AttentionOperands(
            qk=nothing, pv=nothing, q=dq.astype(q.dtype), k=dk.astype(k.dtype), v=dv.astype(v.dtype), bias=dbias,
            mask=nothing, lengths=nothing, key=nothing,
        ),
    )  # fmt: skip


_attention.defvjp(_forward_rule, _backward_rule)


@partial(jax.jit, static_argnums=0)
def _gradients(
    settings: AttentionSettings, operands: AttentionOperands, result: AttentionResult, cotangents: tuple[Array, Array]
) -> Gradients:
    """Computes the gradients of q, k, v and bias, f32."""
    if operands.k.size == 0 or operands.q.size == 0:
        q, k, v = (jnp.zeros(x.shape, jnp.float32) for x in (operands.q, operands.k, operands.v))
        return q, k, v, None if operands.bias is None else jnp.zeros_like(operands.bias)
    g, of_residual = cotangents[0].astype(jnp.float32), cotangents[1][..., None]
    out = lax.bitcast_convert_type(result.out, settings.dtype).astype(jnp.float32)
    towards = jnp.sum(g * out, axis=-1, keepdims=True) - of_residual
    q, blocks = quantize_blocks(settings, operands)
    times = exponent_factor(settings, operands)
    product = partial(_gradient_product, operands)
    of_q = _gradient_operand(operands.qk, 0, operands.q, q)

    def step(dq: Array, part: tuple[KeyBlock, Array, Array]) -> tuple[Array, tuple[Array, Array, Array | None]]:
        block, k, v = part
        of_k, of_v = (
            _gradient_operand(operands.qk, 1, k, block.k),
            _gradient_operand(operands.pv, 1, jnp.swapaxes(v, -1, -2), block.v),
        )  # of_v: Vᵀ
        scored = block_scores(settings, operands, q, block)
        exponential = lax.bitcast_convert_type(exponentials(scored, result.max_score, times, settings.exp2), jnp.float32)
        p = exponential * result.inverse_sum
        of_p = (
            _gradient_probabilities(settings, operands, exponential, block) * result.inverse_sum if operands.pv.backward == "exact" else p
        )
        ds = p * (product("dP", g, of_v, block) - towards)
        dv = product("dV", jnp.swapaxes(of_p, -1, -2), g, block)
        of_scores = ds * np.float32(settings.scale)
        dq = dq + product("dQ", of_scores, of_k, block)
        dk = product("dK", jnp.swapaxes(of_q, -1, -2), of_scores, block)  # of Kᵀ
        return dq, (jnp.swapaxes(dk, -1, -2), dv, None if operands.bias is None else ds)

    size, count = settings.block_k, settings.blocks
    turns: Any = blocks, *(jnp.moveaxis(split_rows(x, size, count), 2, 0) for x in (operands.k, operands.v))
    start, *_ = match_varying_axes(jnp.zeros(operands.q.shape, jnp.float32), *jax.tree.leaves((operands, result, cotangents)))
    dq, (dk, dv, ds) = lax.scan(step, start, turns)
    dk, dv = (_join_key_blocks(x, settings.keys, 2) for x in (dk, dv))
    return dq, dk, dv, None if ds is None or operands.bias is None else _bias_gradient(settings, operands.bias, ds)


def _gradient_operand(recipe: Recipe, side: int, x: Array, q: QuantizedOperand) -> Array:
    """Returns an operand of a gradient's product, f32: as given, or for "exact" as quantised."""
    return dequantize(recipe.schemes[side], q, x.shape[-1]) if recipe.backward == "exact" else x.astype(jnp.float32)


def _gradient_probabilities(settings: AttentionSettings, operands: AttentionOperands, p: Array, block: KeyBlock) -> Array:
    """Returns P as rounded, but relative to the row's max score over all keys, not to the max so far."""
    times = np.float32(1 if settings.flash is None else settings.flash.p_scale)
    scheme = probability_scheme(operands.pv, settings.flash)
    return dequantize(scheme, quantize(scheme, p * times, key=probability_key(operands, block.number)), p.shape[-1]) / times


def _gradient_product(operands: AttentionOperands, gradient: str, a: Array, b: Array, block: KeyBlock) -> Array:
    """Multiplies by the recipe of a gradient, one of GRADIENTS; in plain f32 without a recipe."""
    place = GRADIENTS.index(gradient)
    of_product = (operands.pv if gradient in ("dP", "dV") else operands.qk).gradients
    if of_product is None:
        return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
    recipe, key = of_product[place % 2], None
    if recipe.is_stochastic and operands.key is not None:
        key = jax.random.fold_in(jax.random.fold_in(operands.key, place), block.number)
    return matmul(a, b, recipe=recipe, key=key)


def _join_key_blocks(x: Array, length: int, axis: int) -> Array:
    """Joins [blocks, ..., block, ...] to [..., length, ...] along `axis` of the result."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, length, axis=axis)


def _bias_gradient(settings: AttentionSettings, bias: Array, ds: Array) -> Array:
    """Sums dS [blocks, B, K, G * T, block] over the axes along which the bias was broadcast."""
    ds = _join_key_blocks(ds, settings.keys, 3)
    ds = ds.reshape(*ds.shape[:2], -1, settings.queries, settings.keys)
    return jnp.sum(ds, axis=tuple(at for at, size in enumerate(bias.shape) if size == 1), keepdims=True)
