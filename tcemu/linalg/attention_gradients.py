"""Gradients of attention, as FlashAttention's backward pass takes them: block of keys by block of keys, the scores computed again.

Source: arXiv 2307.08691, algorithm 2. The scores come from the forward recipe, to the bit. The four products of the gradients, dP = g·Vᵀ,
dV = Pᵀ·g, dQ = dS·K and dK = dSᵀ·Q, are by the recipes' own for gradients, or in plain f32 where these say so; the rest is f32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.gradients import no_gradient
from tcemu.linalg.attention_blocks import KeyBlock, Operands, Settings, quantized, scheme_of_p
from tcemu.linalg.attention_forward import Result, exponentials, factor, forward, key_of_p, scores
from tcemu.linalg.matmul import matmul
from tcemu.linalg.recipes import Recipe
from tcemu.meshes import alike
from tcemu.quantize.operands import Quantized, dequantized, quantize

GRADIENTS = ("dP", "dV", "dQ", "dK")  # of P·V and of Q·Kᵀ: dA and dB
SECOND = "tcemu.attention: its gradients have no derivatives of their own; jax.lax.stop_gradient says that none are wanted"


Gradients = tuple[Array, Array, Array, Array | None]


def out_and_residual(settings: Settings, operands: Operands) -> tuple[Array, Array]:
    """The result [B, K, R, H of V] in its dtype, and ln of each row's sum of exp(scores), f32 [B, K, R]; -Inf where it sees no key.

    Differentiable once, in reverse mode.
    """
    return _attention(settings, operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings: Settings, operands: Operands) -> tuple[Array, Array]:
    return _face(settings, operands, _result(settings, operands))


def _result(settings: Settings, operands: Operands) -> Result:
    """One program, whatever the gradients."""
    qk, pv = (recipe.replace(backward="exact") for recipe in (operands.qk, operands.pv))
    return forward(settings, operands._replace(qk=qk, pv=pv))


def _forward(settings: Settings, operands: Operands) -> tuple[tuple[Array, Array], tuple[Operands, Result]]:
    operands = _differentiated(operands)
    result = _result(settings, operands)
    return _face(settings, operands, result), (operands, result)


def _differentiated(operands: Operands) -> Operands:
    """The same, in a rule of differentiation, which is not differentiated again: its values go through bits."""
    q, k, v = (no_gradient(x, SECOND) for x in (operands.q, operands.k, operands.v))
    return operands._replace(q=q, k=k, v=v, bias=None if operands.bias is None else no_gradient(operands.bias, SECOND))


def _face(settings: Settings, operands: Operands, result: Result) -> tuple[Array, Array]:
    scale = settings.scale if operands.bias is None else 1
    residual = jnp.where(result.inverse == 0, -jnp.inf, result.largest * np.float32(scale) - jnp.log(result.inverse))
    return lax.bitcast_convert_type(result.out, settings.dtype), residual[..., 0]


def _backward(settings: Settings, kept: tuple[Operands, Result], cotangents: tuple[Array, Array]) -> tuple[Operands]:
    operands, result = kept
    operands = _differentiated(operands)
    q, k, v = operands.q, operands.k, operands.v
    dq, dk, dv, dbias = _gradients(settings, operands, result, jax.tree.map(lambda g: no_gradient(g, SECOND), cotangents))
    nothing: Any = None  # no derivative
    return (
        Operands(
            qk=nothing, pv=nothing, q=dq.astype(q.dtype), k=dk.astype(k.dtype), v=dv.astype(v.dtype), bias=dbias,
            mask=nothing, lengths=nothing, key=nothing,
        ),
    )  # fmt: skip


_attention.defvjp(_forward, _backward)


@partial(jax.jit, static_argnums=0)
def _gradients(settings: Settings, operands: Operands, result: Result, cotangents: tuple[Array, Array]) -> Gradients:
    """Those of q, k, v and bias, f32."""
    if operands.k.size == 0 or operands.q.size == 0:
        q, k, v = (jnp.zeros(x.shape, jnp.float32) for x in (operands.q, operands.k, operands.v))
        return q, k, v, None if operands.bias is None else jnp.zeros_like(operands.bias)
    g, of_residual = cotangents[0].astype(jnp.float32), cotangents[1][..., None]
    out = lax.bitcast_convert_type(result.out, settings.dtype).astype(jnp.float32)
    towards = jnp.sum(g * out, axis=-1, keepdims=True) - of_residual
    q, blocks = quantized(settings, operands)
    times = factor(settings, operands)
    product = partial(_product, operands)
    of_q = _taken(operands.qk, 0, operands.q, q)

    def step(dq: Array, turn: tuple[KeyBlock, Array, Array]) -> tuple[Array, tuple[Array, Array, Array | None]]:
        block, k, v = turn
        of_k, of_v = _taken(operands.qk, 1, k, block.k), _taken(operands.pv, 1, jnp.swapaxes(v, -1, -2), block.v)  # of_v: Vᵀ
        scored = scores(settings, operands, q, block)
        exponential = lax.bitcast_convert_type(exponentials(scored, result.largest, times), jnp.float32)
        p = exponential * result.inverse
        of_p = _taken_of_p(settings, operands, exponential, block) * result.inverse if operands.pv.backward == "exact" else p
        ds = p * (product("dP", g, of_v, block) - towards)
        dv = product("dV", jnp.swapaxes(of_p, -1, -2), g, block)
        of_scores = ds * np.float32(settings.scale)
        dq = dq + product("dQ", of_scores, of_k, block)
        dk = product("dK", jnp.swapaxes(of_q, -1, -2), of_scores, block)  # of Kᵀ
        return dq, (jnp.swapaxes(dk, -1, -2), dv, None if operands.bias is None else ds)

    size, count = settings.block_k, settings.blocks
    turns = blocks, _in_turn(operands.k, size, count), _in_turn(operands.v, size, count)
    start, *_ = alike(jnp.zeros(operands.q.shape, jnp.float32), *jax.tree.leaves((operands, result, cotangents)))
    dq, (dk, dv, ds) = lax.scan(step, start, turns)
    dk, dv = (_out_of_turn(x, settings.keys, 2) for x in (dk, dv))
    return dq, dk, dv, None if ds is None or operands.bias is None else _of_bias(settings, operands.bias, ds)


def _taken(recipe: Recipe, side: int, x: Array, q: Quantized) -> Array:
    """What a gradient's product takes of an operand, f32: as it came, or, where the recipe says "exact", as it was quantised."""
    return dequantized(recipe.schemes[side], q, x.shape[-1]) if recipe.backward == "exact" else x.astype(jnp.float32)


def _taken_of_p(settings: Settings, operands: Operands, p: Array, block: KeyBlock) -> Array:
    """P as it was rounded, but that it counts from the row's largest score of all, not from the largest so far."""
    times = np.float32(1 if settings.flash is None else settings.flash.p_scale)
    scheme = scheme_of_p(operands.pv, settings.flash)
    return dequantized(scheme, quantize(scheme, p * times, key=key_of_p(operands, block.number)), p.shape[-1]) / times


def _product(operands: Operands, gradient: str, a: Array, b: Array, block: KeyBlock) -> Array:
    """A·B by the recipe of a gradient, one of GRADIENTS; in plain f32 where there is none."""
    place = GRADIENTS.index(gradient)
    of_product = (operands.pv if gradient in ("dP", "dV") else operands.qk).gradients
    if of_product is None:
        return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
    recipe, key = of_product[place % 2], None
    if recipe.stochastic and operands.key is not None:
        key = jax.random.fold_in(jax.random.fold_in(operands.key, place), block.number)
    return matmul(a, b, recipe=recipe, key=key)


def _in_turn(x: Array, size: int, count: int) -> Array:
    """[B, K, S, H] -> [blocks, B, K, block, H], filled up with zeros."""
    x = jnp.pad(x, [(0, 0), (0, 0), (0, size * count - x.shape[2]), (0, 0)])
    return jnp.moveaxis(x.reshape(*x.shape[:2], count, size, x.shape[3]), 2, 0)


def _out_of_turn(x: Array, length: int, axis: int) -> Array:
    """[blocks, ..., block, ...] -> [..., length, ...], the blocks joined along `axis` of what comes out."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, length, axis=axis)


def _of_bias(settings: Settings, bias: Array, ds: Array) -> Array:
    """The sum of dS over what the bias was broadcast along. ds: [blocks, B, K, G * T, block]."""
    ds = _out_of_turn(ds, settings.keys, 3)
    ds = ds.reshape(*ds.shape[:2], -1, settings.queries, settings.keys)
    return jnp.sum(ds, axis=tuple(at for at, size in enumerate(bias.shape) if size == 1), keepdims=True)
