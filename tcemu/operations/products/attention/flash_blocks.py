"""`Flash`, FlashAttention's blocks, scales and sums as a value; and the operands of attention in quantised blocks.

All arrays have the axes [batch, heads of the keys, rows, ...]. Rows are the queries of all heads that share a key head, head by head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from math import isfinite, prod
from operator import and_
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array

from tcemu.base.records import Record
from tcemu.operations.products.recipes import Recipe
from tcemu.operations.quantize.quantizer import QuantizedOperand, Quantizer, Scheme, amax_codes, quantize
from tcemu.operations.quantize.scale_groups import repeat_scales

SCALE_SCOPES = ("tensor", "head", "block")
EXPONENTIALS = ("ex2.approx", "polynomial", "exact")
DIVISIONS = ("rcp.approx", "div.full", "rn")
TILE_COLUMNS = 8  # columns of an accumulator's tile, which the four lanes of a row share; blocks of keys are whole tiles


@dataclass(frozen=True)
class Flash(Record):
    """The blocks, scales and sums of FlashAttention 2 (arXiv 2307.08691) and 3 (arXiv 2407.08608).

    Attributes:
        block_q: Queries per block; matters to scales="block" only.
        block_k: Keys per block. All queries of a head take the keys block by block, in ascending order.
        p_scale: P = exp(S - m) is multiplied by it before its cast, inside the exponential, and the row's sum too, so that it cancels in
            the result. The paper of FlashAttention 3 has 1, its FP8 kernels have 256 (arXiv 2606.06521). It replaces the scale that a
            recipe would find for P.
        scales: Extent of a recipe's "tensor" scale. "tensor": all of Q, of K, of V; "head": a head of the keys, with the queries that share
            it; "block": a block of block_q queries, or block_k keys, of one head (FlashAttention 3, section 3.3).
        hadamard: Q and K are multiplied by a Hadamard matrix with random signs, over sqrt(H), which leaves Q·Kᵀ unchanged ("incoherent
            processing", FlashAttention 3, section 3.3). H must be a power of two.
        promote: Keys, a multiple of block_k, after which the accumulator of P·V is added to an f32 sum and restarts (two-level sums). None:
            one accumulator over all keys. A recipe that promotes or splits K does so within each block, whose sum is then added in f32.
        exp2: How P = 2^x is computed. "ex2.approx": by the special function unit, `ex2.approx.ftz.f32`, as FlashAttention 2 and 3 do.
            "polynomial": the cubic polynomial that FlashAttention 4 uses for a part of P, here for all of P; the sums are still rescaled by
            `ex2.approx`. "exact": within 0.53 ulp, as no GPU does.
        division: How the sums of P·V are divided by the row's sum. "rcp.approx": multiplied by `rcp.approx.ftz.f32`, as
            FlashAttention 2 and 3 do; "div.full": divided, as Triton kernels do; "rn": multiplied by the correctly rounded reciprocal.

    Raises:
        ValueError: a field has another value.
    """

    block_q: int = 128
    block_k: int = 128
    p_scale: float = 1.0
    scales: str = "tensor"
    hadamard: bool = False
    promote: int | None = None
    exp2: str = "ex2.approx"
    division: str = "rcp.approx"

    def __post_init__(self) -> None:
        choices = {"scales": SCALE_SCOPES, "exp2": EXPONENTIALS, "division": DIVISIONS}
        self.check_fields(flags="hadamard", counts="block_q block_k", optional_counts="promote", **choices)
        if self.block_k % TILE_COLUMNS:
            raise ValueError(f"Flash(block_k={self.block_k}): expected a multiple of {TILE_COLUMNS}, the columns of an accumulator's tile")
        if isinstance(self.p_scale, bool) or not isinstance(self.p_scale, int | float | np.number):
            raise ValueError(f"Flash(p_scale={self.p_scale!r}): expected a number, as 256")
        object.__setattr__(self, "p_scale", float(self.p_scale))
        if not (isfinite(self.p_scale) and self.p_scale > 0):
            raise ValueError(f"Flash(p_scale={self.p_scale!r}): expected a positive number, as 256")
        if self.promote is not None and self.promote % self.block_k:
            raise ValueError(
                f"Flash(promote={self.promote!r}): expected a multiple of block_k={self.block_k}, in keys, or None; a smaller interval is "
                "a field of the recipe, in instructions: recipe.replace(promote=...)"
            )

    def check_recipes(self, qk: Recipe, pv: Recipe) -> None:
        """Raise ValueError where blocks do not fit the recipes of Q·Kᵀ and P·V."""
        if self.block_k % pv.op.k:
            raise ValueError(f"Flash(block_k={self.block_k}): {pv.op} takes {pv.op.k} keys; expected a multiple of that")
        for name, block in (("queries", qk.a.block), ("rows of P", pv.a.block)):
            if block is not None and block[0] != 1:
                raise ValueError(f"recipe: scales of {block[0]} {name} together; in attention a block of scales is of one row, (1, ...)")
        for name, keys in (("K", qk.b.block and qk.b.block[0]), ("P", pv.a.block and pv.a.block[1]), ("V", pv.b.block and pv.b.block[1])):
            if keys is not None and self.block_k % keys:
                raise ValueError(f"Flash(block_k={self.block_k}): the recipe's scales of {name} are of {keys} keys; expected a multiple")
        if self.promote not in (None, self.block_k) and sums_blocks_apart(pv):
            raise ValueError(
                f"Flash(promote={self.promote}): the recipe of P·V promotes, or splits K, within a block, so that nothing is chained "
                f"from block to block; give promote=None or {self.block_k}, or a recipe with promote=None and split_k=1"
            )

    def chained_blocks(self, pv: Recipe) -> int | None:
        """Return the number of blocks of keys that are added in one accumulator; None: all."""
        if sums_blocks_apart(pv):
            return 1
        return None if self.promote is None else self.promote // self.block_k


def sums_blocks_apart(pv: Recipe) -> bool:
    """Returns True if the recipe's sum of a block is not a single chain of instructions, which the next block could continue."""
    return pv.promote is not None or pv.split_k > 1


# ---- operands in blocks


class AttentionOperands(NamedTuple):
    """The traced part of a call."""

    qk: Recipe
    pv: Recipe
    q: Array  # [B, K, G * T, H]
    k: Array  # [B, K, S, H]
    v: Array  # [B, K, S, H of V]
    bias: Array | None  # [B or 1, K or 1, G or 1, T or 1, S], f32
    mask: Array | None  # the same, bool
    lengths: tuple[Array | None, Array | None]  # numbers of valid queries and keys, int32 [B]
    key: PRNGKey | None


@dataclass(frozen=True)
class AttentionSettings:
    """The static part of a call."""

    flash: Flash | None  # None: the plain form, whole rows of scores
    scale: float
    causal: bool
    window: tuple[int, int] | None  # keys that a query sees to its left and right
    queries: int  # T
    keys: int  # S
    dtype: np.dtype

    @property
    def block_k(self) -> int:
        """Keys per block; in the plain form all keys, padded to whole tiles."""
        return -(-self.keys // 8) * 8 if self.flash is None else self.flash.block_k

    @property
    def exp2(self) -> str:
        """The computation of 2^x, one of EXPONENTIALS; the plain form uses the special function unit."""
        return EXPONENTIALS[0] if self.flash is None else self.flash.exp2

    @property
    def blocks(self) -> int:
        return -(-self.keys // self.block_k)


class KeyBlock(NamedTuple):
    """One block of keys: the input of one iteration."""

    number: Array  # int32
    k: QuantizedOperand  # [B, K, block, H]
    v: QuantizedOperand  # [B, K, H of V, block]
    bias: Array | None  # [..., block]
    mask: Array | None


def probability_scheme(pv: Recipe, flash: Flash | None) -> Scheme:
    """Returns the quantisation of P. In blocks its scale is p_scale, since a kernel never has all of P to find one."""
    scheme = pv.schemes[0]
    if flash is None or scheme.quantizer.scaling == "block":
        return scheme
    quantizer = Quantizer(rounding=scheme.quantizer.rounding, saturate=scheme.quantizer.saturate)
    return Scheme(scheme.format, quantizer, scheme.scale_format, scheme.unit_block)


def quantize_blocks(settings: AttentionSettings, operands: AttentionOperands) -> tuple[QuantizedOperand, KeyBlock]:
    """Quantises Q, and all blocks of keys, which are a new first axis."""
    keys = (None,) * 3 if operands.key is None else tuple(jax.random.split(operands.key, 4)[:3])
    (of_q, of_k), of_v = operands.qk.schemes, operands.pv.schemes[1]
    size, count = settings.block_k, settings.blocks
    k, v = (split_rows(x, size, count) for x in (operands.k, operands.v))  # [B, K, blocks, block, H]
    v = jnp.swapaxes(v, -1, -2)
    if settings.flash is None:  # as `matmul` does it: one scale for all
        q = quantize(of_q, operands.q, key=keys[0])
        parts = quantize(of_k, k[:, :, 0], key=keys[1]), quantize(of_v, v[:, :, 0], key=keys[2])
        blocks = jax.tree.map(lambda x: x[None], parts)
    else:
        q = _quantize_queries(settings, settings.flash, of_q, operands, keys[0])
        scope = settings.flash.scales
        parts = _quantize_parts(of_k, k, scope, keys[1]), _quantize_parts(of_v, v, scope, keys[2], along_depth=True)
        blocks = tuple(jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), part) for part in parts)
    split = lambda x, fill: None if x is None else jnp.moveaxis(_split_keys(x, size, count, fill), -2, 0)
    numbers = jnp.arange(count, dtype=jnp.int32)
    return q, KeyBlock(numbers, blocks[0], blocks[1], split(operands.bias, 0), split(operands.mask, False))


def split_rows(x: Array, size: int, count: int) -> Array:
    """Splits [..., rows, H] into [..., count, size, H], padded with zeros."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, size * count - x.shape[-2]), (0, 0)])
    return x.reshape(*x.shape[:-2], count, size, x.shape[-1])


def _split_keys(x: Array, size: int, count: int, fill: float | bool) -> Array:
    """Splits [..., S] into [..., count, size]."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size * count - x.shape[-1])], constant_values=fill)
    return x.reshape(*x.shape[:-1], count, size)


def _quantize_queries(
    settings: AttentionSettings, flash: Flash, scheme: Scheme, operands: AttentionOperands, key: PRNGKey | None
) -> QuantizedOperand:
    batch, heads, rows, width = operands.q.shape
    groups, size = rows // settings.queries, flash.block_q
    q = operands.q.reshape(batch, heads, groups, settings.queries, width)
    q = split_rows(q, size, -(-settings.queries // size))  # [B, K, G, blocks, block_q, H]
    parts = _quantize_parts(scheme, q, flash.scales, key)

    def joined(x: Array) -> Array:
        """Joins the blocks to rows, with a scale for each row, also where a block shares one."""
        x = repeat_scales(x, size, size, -2) if x.shape[-2] == 1 else x
        return x.reshape(batch, heads, groups, -1, x.shape[-1])[..., : settings.queries, :].reshape(batch, heads, rows, x.shape[-1])

    return jax.tree.map(joined, parts)


def _quantize_parts(scheme: Scheme, x: Array, scope: str, key: PRNGKey | None, along_depth: bool = False) -> QuantizedOperand:
    """Quantises parts [B, K, ..., blocks, R, depth] of an operand, each with the scale of the parts that share it.

    scope: as `Flash.scales`. along_depth: the blocks are split along the axis that is summed. A tensor's scale has the shape [..., 1, 1].
    """
    lead = x.shape[:-2]
    flat = x.reshape(-1, *x.shape[-2:])
    amax = jax.vmap(partial(amax_codes, scheme))(flat)
    amax = amax.reshape(*lead, *amax.shape[1:])
    if scope != "block":
        first = 0 if scope == "tensor" else 2
        of_rows = (len(lead) - 1,) if scheme.spans_depth and along_depth else ()
        axes = tuple(range(first, len(lead))) if scheme.spans_rows else of_rows
        amax = jnp.broadcast_to(jnp.max(amax, axis=axes, keepdims=True, initial=0), amax.shape)
    keys = None if key is None else jax.random.split(key, prod(lead))
    one = lambda part, amax, key: quantize(scheme, part, amax=amax, key=key)
    parts = jax.vmap(one, in_axes=(0, 0, None if keys is None else 0))(flat, amax.reshape(-1, *amax.shape[len(lead) :]), keys)
    parts = jax.tree.map(lambda part: part.reshape(*lead, *part.shape[1:]), parts)
    return parts._replace(tensor_scale=None if parts.tensor_scale is None else parts.tensor_scale[..., None, None])


def visibility_mask(settings: AttentionSettings, operands: AttentionOperands, block: KeyBlock) -> Array | None:
    """Returns the mask of a block of keys, bool, which broadcasts to [B, K, G, T, block]; None: every row sees all keys."""
    query = jnp.arange(settings.queries)[:, None]
    key = block.number * settings.block_k + jnp.arange(settings.block_k)
    seen: list[Array] = [] if settings.keys % settings.block_k == 0 else [key < settings.keys]
    if settings.causal:
        seen.append(key <= query)
    if settings.window is not None:
        left, right = settings.window
        seen.append((query <= key + left) & (query >= key - right))
    over_batch: Callable[[Array], Array] = lambda lengths: lengths[:, None, None, None, None]
    queries, keys = operands.lengths
    seen += [] if queries is None else [query < over_batch(queries)]
    seen += [] if keys is None else [key < over_batch(keys)]
    seen += [] if block.mask is None else [block.mask]
    return None if not seen else jnp.broadcast_to(reduce(and_, seen), jnp.broadcast_shapes((1, 1, 1, 1, 1), *(s.shape for s in seen)))


def broadcast_to_rows(settings: AttentionSettings, x: Array, shape: tuple[int, ...]) -> Array:
    """Broadcasts an array to [B, K, G, T, block] and reshapes it to the scores' shape, [B, K, G * T, block]."""
    batch, heads, rows, size = shape
    return jnp.broadcast_to(x, (batch, heads, rows // settings.queries, settings.queries, size)).reshape(shape)
