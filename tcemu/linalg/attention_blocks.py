"""The operands of attention, cut into blocks and quantised, and which query sees which key.

Everything has the axes [batch, heads of the keys, rows, ...]: the rows are the queries of all heads that share a key head, head by head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array

from tcemu.arithmetic.model import Signature
from tcemu.linalg.flash import Flash
from tcemu.linalg.recipes import Recipe
from tcemu.operations.operands import signature_of
from tcemu.quantize.groups import repeated
from tcemu.quantize.operands import Quantized, Quantizer, Scheme, largest, quantize


class Operands(NamedTuple):
    """All that is traced in a call."""

    qk: Recipe
    pv: Recipe
    q: Array  # [B, K, G * T, H]
    k: Array  # [B, K, S, H]
    v: Array  # [B, K, S, H of V]
    bias: Array | None  # [B or 1, K or 1, G or 1, T or 1, S], f32
    mask: Array | None  # the same, bool
    lengths: tuple[Array | None, Array | None]  # of the queries and keys that count, int32 [B]
    key: PRNGKey | None


@dataclass(frozen=True)
class Settings:
    """All that is static in a call."""

    flash: Flash | None  # None: the plain form, whole rows of scores
    scale: float
    causal: bool
    window: tuple[int, int] | None  # how many keys to the left and to the right of a query it sees
    queries: int  # T
    keys: int  # S
    dtype: np.dtype

    @property
    def block_k(self) -> int:
        """Keys of a block; in the plain form all, filled up to whole tiles."""
        return -(-self.keys // 8) * 8 if self.flash is None else self.flash.block_k

    @property
    def blocks(self) -> int:
        return -(-self.keys // self.block_k)


class KeyBlock(NamedTuple):
    """One block of keys, as a turn of the loop takes it."""

    number: Array  # int32
    k: Quantized  # [B, K, block, H]
    v: Quantized  # [B, K, H of V, block]
    bias: Array | None  # [..., block]
    mask: Array | None


def signature(recipe: Recipe) -> Signature:
    """What the engine knows of a recipe's instruction."""
    return signature_of(recipe.op)


def scheme_of_p(pv: Recipe, flash: Flash | None) -> Scheme:
    """How P is rounded. In blocks its scale is p_scale, in place of one that is found from the whole of P, which nobody has."""
    scheme = pv.schemes[0]
    if flash is None or scheme.quantizer.scaling == "block":
        return scheme
    quantizer = Quantizer(rounding=scheme.quantizer.rounding, saturate=scheme.quantizer.saturate)
    return Scheme(scheme.format, quantizer, scheme.scale_format, scheme.unit_block)


def quantized(settings: Settings, operands: Operands) -> tuple[Quantized, KeyBlock]:
    """Q whole, and all blocks of keys with their number as the first axis."""
    keys = (None,) * 3 if operands.key is None else tuple(jax.random.split(operands.key, 4)[:3])
    (of_q, of_k), of_v = operands.qk.schemes, operands.pv.schemes[1]
    size, count = settings.block_k, settings.blocks
    k, v = (_in_blocks(x, size, count) for x in (operands.k, operands.v))  # [B, K, blocks, block, H]
    v = jnp.swapaxes(v, -1, -2)
    if settings.flash is None:  # as `matmul` does it: one scale for all
        q = quantize(of_q, operands.q, key=keys[0])
        parts = quantize(of_k, k[:, :, 0], key=keys[1]), quantize(of_v, v[:, :, 0], key=keys[2])
        blocks = jax.tree.map(lambda x: x[None], parts)
    else:
        q = _quantized_queries(settings, settings.flash, of_q, operands, keys[0])
        scope = settings.flash.scales
        parts = _quantized_parts(of_k, k, scope, keys[1]), _quantized_parts(of_v, v, scope, keys[2], along_depth=True)
        blocks = tuple(jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), part) for part in parts)
    cut = lambda x, fill: None if x is None else jnp.moveaxis(_along_keys(x, size, count, fill), -2, 0)  # noqa: E731
    numbers = jnp.arange(count, dtype=jnp.int32)
    return q, KeyBlock(numbers, blocks[0], blocks[1], cut(operands.bias, 0), cut(operands.mask, False))


def _in_blocks(x: Array, size: int, count: int) -> Array:
    """[..., rows, H] -> [..., count, size, H], filled up with zeros."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, size * count - x.shape[-2]), (0, 0)])
    return x.reshape(*x.shape[:-2], count, size, x.shape[-1])


def _along_keys(x: Array, size: int, count: int, fill: float | bool) -> Array:
    """[..., S] -> [..., count, size]."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size * count - x.shape[-1])], constant_values=fill)
    return x.reshape(*x.shape[:-1], count, size)


def _quantized_queries(settings: Settings, flash: Flash, scheme: Scheme, operands: Operands, key: PRNGKey | None) -> Quantized:
    batch, heads, rows, width = operands.q.shape
    groups, size = rows // settings.queries, flash.block_q
    q = operands.q.reshape(batch, heads, groups, settings.queries, width)
    q = _in_blocks(q, size, -(-settings.queries // size))  # [B, K, G, blocks, block_q, H]
    parts = _quantized_parts(scheme, q, flash.scales, key)

    def joined(x: Array) -> Array:
        """A row for each query, and so a scale for each, also where a block shares one."""
        x = repeated(x, size, size, -2) if x.shape[-2] == 1 else x
        return x.reshape(batch, heads, groups, -1, x.shape[-1])[..., : settings.queries, :].reshape(batch, heads, rows, x.shape[-1])

    return jax.tree.map(joined, parts)


def _quantized_parts(scheme: Scheme, x: Array, scope: str, key: PRNGKey | None, along_depth: bool = False) -> Quantized:
    """Parts [B, K, ..., blocks, R, depth] of an operand, each as if it were quantised with those that share a scale with it.

    scope: as `Flash.scales`. along_depth: the blocks are cut along the axis that is summed. A tensor's scale comes as [..., 1, 1].
    """
    lead = x.shape[:-2]
    flat = x.reshape(-1, *x.shape[-2:])
    amax = jax.vmap(partial(largest, scheme))(flat)
    amax = amax.reshape(*lead, *amax.shape[1:])
    if scope != "block":
        first = 0 if scope == "tensor" else 2
        of_rows = (len(lead) - 1,) if scheme.spans_depth and along_depth else ()
        axes = tuple(range(first, len(lead))) if scheme.spans_rows else of_rows
        amax = jnp.broadcast_to(jnp.max(amax, axis=axes, keepdims=True, initial=0), amax.shape)
    keys = None if key is None else jax.random.split(key, prod(lead))
    one = lambda part, amax, key: quantize(scheme, part, amax=amax, key=key)  # noqa: E731
    parts = jax.vmap(one, in_axes=(0, 0, None if keys is None else 0))(flat, amax.reshape(-1, *amax.shape[len(lead) :]), keys)
    parts = jax.tree.map(lambda part: part.reshape(*lead, *part.shape[1:]), parts)
    return parts._replace(tensor_scale=None if parts.tensor_scale is None else parts.tensor_scale[..., None, None])


def allowed(settings: Settings, operands: Operands, block: KeyBlock) -> Array | None:
    """Which row sees which key of a block, bool, broadcasts to [B, K, G, T, block]; None: every row sees all."""
    query = jnp.arange(settings.queries)[:, None]
    key = block.number * settings.block_k + jnp.arange(settings.block_k)
    seen: list[Array] = [] if settings.keys % settings.block_k == 0 else [key < settings.keys]
    if settings.causal:
        seen.append(key <= query)
    if settings.window is not None:
        left, right = settings.window
        seen.append((query <= key + left) & (query >= key - right))
    of_batch: Callable[[Array], Array] = lambda lengths: lengths[:, None, None, None, None]  # noqa: E731
    queries, keys = operands.lengths
    seen += [] if queries is None else [query < of_batch(queries)]
    seen += [] if keys is None else [key < of_batch(keys)]
    seen += [] if block.mask is None else [block.mask]
    return None if not seen else jnp.broadcast_to(together(seen), jnp.broadcast_shapes((1, 1, 1, 1, 1), *(s.shape for s in seen)))


def together(conditions: list[Array]) -> Array:
    """All of them."""
    total = conditions[0]
    for condition in conditions[1:]:
        total = total & condition
    return total


def by_rows(settings: Settings, x: Array, shape: tuple[int, ...]) -> Array:
    """What broadcasts to [B, K, G, T, block], as [B, K, G * T, block]. shape: of the scores, [B, K, G * T, block]."""
    batch, heads, rows, size = shape
    return jnp.broadcast_to(x, (batch, heads, rows // settings.queries, settings.queries, size)).reshape(shape)
