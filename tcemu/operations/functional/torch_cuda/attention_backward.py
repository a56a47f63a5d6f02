"""The backward of FlashAttention 2, cuDNN and CUTLASS's fused attention on codes: gradients of queries, keys and values.

In FlashAttention 2 a block of keys adds over all queries in one accumulator, from the last block of queries to the first, so that its
products are chains over the queries in that order. The gradient of the queries is added in memory by atomics, one addition a block of keys:
of up to two blocks the order is no matter, of more it is open. cuDNN, whose source is closed, does the same by other tiles, in ascending
order. In CUTLASS's kernel a lock guards these additions, each of which continues a chain, so that the order counts from two blocks of keys
on. Each block of keys begins at another block of queries: blocks that run at the same pace, in lockstep, come to a query one after the
other. That order gave the words of an H200 in all 12 cases of the census with several blocks.

Source: FlashAttention 2, csrc/flash_attn/src/flash_bwd_kernel.h, flash_bwd_preprocess_kernel.h and flash_bwd_launch_template.h; PyTorch
2.11.0, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd; PyTorch, mem_eff_attention/kernel_backward.h. Held to
words of PyTorch 2.11.0 on an H200: `tests/operations/functional/torch_census.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import e, log2
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base.errors import NotModelled
from tcemu.engine.arithmetic.f32_arithmetic import add_f32, fma_f32
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes, to_float
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.operations.functional.torch_cuda.device_functions import Value, as_value, ex2, expf, fma, where
from tcemu.operations.functional.torch_cuda.elementwise import given_dtype
from tcemu.operations.functional.torch_cuda.fused_attention import (
    INFINITY,
    LARGEST_HEAD,
    MINUS_INFINITY,
    Factors,
    by_rows,
    multiply_codes_by_rows,
    rescale,
    softmax_factors,
)
from tcemu.operations.functional.torch_cuda.rows import reduce

DEPTH = 16  # K of the mma instruction
VECTOR = 8  # elements that a thread loads at a time


class BackwardTiles(NamedTuple):
    """Blocks of the kernel of a head size on sm_90: rows of queries and of keys."""

    queries: int
    keys: int


TILES = {  # head size up to which a kernel serves
    32: BackwardTiles(128, 128),
    64: BackwardTiles(128, 128),
    96: BackwardTiles(64, 128),
    128: BackwardTiles(64, 128),
    192: BackwardTiles(64, 64),
    256: BackwardTiles(64, 64),
}


CUDNN_TILES = BackwardTiles(64, 128)  # keys that one chain adds: found by words of head sizes 64, 128 and 160


class BackwardOperands(NamedTuple):
    """Operands of the backward, codes of their format, except for the log-sum-exps."""

    grad: Array  # [batch, heads, queries, size]
    q: Array
    k: Array  # [batch, key heads, keys, size]
    v: Array
    out: Array  # [batch, heads, queries, size]
    logsumexp: Array  # f32 codes [batch, heads, queries]


class BlockGradients(NamedTuple):
    """P and dS of a block of keys, codes of the operands' format [rows, keys]."""

    p: Array
    ds: Array


@jax.jit
def _row_products_in_pairs(grad: Array, out: Array) -> Array:
    """Return the sum of grad * out of each row as cuDNN adds it: each thread adds 8 elements pair by pair, and halves of threads join."""
    shape = (grad.shape[0], -1, VECTOR // 2, 2)
    x, y = (jnp.moveaxis(a.reshape(shape), 2, 0) for a in (grad, out))
    products = (Value(x) * Value(y)).codes
    pairs = add_f32(products[..., 0], products[..., 1])
    total = lax.scan(lambda total, pair: (add_f32(total, pair), None), pairs[0], pairs[1:])[0]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = add_f32(total[:, :half], total[:, half:])
    return total


@partial(jax.jit, static_argnums=0)
def _cudnn_gradients(
    fmt: Format, factors: Factors, scores: Array, products: Array, seen: Array, logsumexp: Array, row_sums: Array
) -> BlockGradients:
    """Compute P = 2^((s * scale - logsumexp) * log2 e), by an fma, and dS = P * (dO·Vᵀ - the row's sum) * scale."""
    visible = jnp.arange(scores.shape[-1])[None] < seen
    scale = Value(jnp.asarray(factors.scale))
    s = where(visible, fma(Value(scores), scale, -Value(logsumexp)), as_value(MINUS_INFINITY))
    p = ex2(s * as_value(log2(e)))
    ds = p * (Value(products) - Value(row_sums)) * scale
    return BlockGradients(*(convert(F32, fmt, x.codes) for x in (p, ds)))


@partial(jax.jit, static_argnums=(0, 1))
def _row_products(threads: int, halves: bool, grad: Array, out: Array) -> Array:
    """Return the sum of grad * out of each row, f32 codes [rows, 1]: threads take 8 elements at a time. halves: how they are joined."""
    shape = (grad.shape[0], -1, threads, VECTOR)
    x, y = (jnp.moveaxis(a.reshape(shape), (1, 3), (0, 1)).reshape(-1, grad.shape[0], threads) for a in (grad, out))
    first = (Value(x[0]) * Value(y[0])).codes
    total = lax.scan(lambda total, xy: (fma_f32(xy[0], xy[1], total), None), first, (x[1:], y[1:]))[0]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = add_f32(total[:, :half], total[:, half:]) if halves else add_f32(total[:, ::2], total[:, 1::2])
    return total


@partial(jax.jit, static_argnums=0)
def _block_gradients(
    fmt: Format, factors: Factors, scores: Array, products: Array, seen: Array, logsumexp: Array, row_sums: Array, kept: Array | None = None
) -> BlockGradients:
    """Compute P = 2^(s * factor - logsumexp * log2 e) and dS = P * (dO·Vᵀ - the row's sum), of a dropped weight -P * the row's sum."""
    visible = jnp.arange(scores.shape[-1])[None] < seen
    s = where(visible, Value(scores), as_value(MINUS_INFINITY))
    lse = Value(logsumexp)
    shift = where(logsumexp == MINUS_INFINITY, 0.0, lse * as_value(log2(e)))
    p = ex2(s * Value(jnp.asarray(factors.factor)) - shift)
    ds = p * (Value(products) - Value(row_sums))
    if kept is not None:
        p, ds = where(kept, p, 0.0), where(kept, ds, -p * Value(row_sums))
    return BlockGradients(*(convert(F32, fmt, x.codes) for x in (p, ds)))


def fused_backward(
    name: str,
    fmt: Format,
    operands: BackwardOperands,
    causal: bool,
    scale: float,
    *,
    in_lockstep: bool = False,
    dropped: tuple[np.ndarray, float, float] | None = None,
    visible: np.ndarray | None = None,
) -> tuple[Array, Array, Array]:
    """Compute the gradients of queries, keys and values as FlashAttention 2 or cuDNN does.

    Args:
        name: "flash" or "cudnn".
        fmt: The operands' format.
        operands: Their codes.
        causal: A query sees the keys up to its own number.
        scale: Factor of the scores.
        in_lockstep: More than two blocks of keys, which come to the same queries together, are added to their gradient in ascending order.
        dropped: FlashAttention 2's dropout: which weights are kept, [batch, heads, queries, keys], the factor of these in f32, and the
            probability to keep one.
        visible: Which keys a query sees, booleans [batch, heads, queries, keys]; None: those that `causal` says.

    Returns:
        Codes of `fmt`, of the shapes of q, k and v.

    Raises:
        NotModelled: The order of the additions is open, or the head size is another one.
    """
    grad, q, k, v, out, logsumexp = operands
    batch, heads, queries, size = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    if size > LARGEST_HEAD:
        raise NotModelled(f"{name}: got head size {size}; known are sizes up to {LARGEST_HEAD} (torch_cuda/attention_backward.py)")
    is_cudnn = name == "cudnn"
    tile_size, tiles = next((most, tiles) for most, tiles in TILES.items() if size <= most)
    if is_cudnn:  # a power of two of threads
        tile_size, tiles = VECTOR << (-(-size // VECTOR) - 1).bit_length(), CUDNN_TILES
    blocks = -(-keys // tiles.keys)
    if blocks > 2 and not in_lockstep:
        raise NotModelled(
            f"{name}: the order is open: {blocks} blocks of {tiles.keys} keys are added to the gradient of the queries by atomics, so that "
            "the GPU's own words differ from call to call; of two blocks they do not, and open_order='lockstep' gives one order "
            "(torch_cuda/attention_backward.py)"
        )
    rows = -(-queries // tiles.queries) * tiles.queries
    factors = softmax_factors(name, scale, has_bias=False)

    def padded(x: Array, length: int, fill: np.uint32 | int = 0) -> Array:
        return jnp.pad(x, [(0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)], constant_values=fill)

    flat = lambda x: x.reshape(-1, x.shape[-1])
    threads = (64 if tile_size % 64 == 0 else 32) // VECTOR
    wide = [flat(convert(fmt, F32, jnp.pad(x, [(0, 0)] * 3 + [(0, tile_size - size)]))) for x in (grad, out)]
    of_rows = _row_products_in_pairs if is_cudnn else partial(_row_products, threads, True)
    row_sums = by_rows(of_rows, *wide)
    of_scores: np.ndarray | None = None if is_cudnn else factors.scale
    of_values, kept = None, None
    if dropped is not None:
        kept, inverse, share = dropped
        kept = np.pad(kept, [(0, 0), (0, 0), (0, rows - queries), (0, blocks * tiles.keys - keys)]).reshape(batch * heads * rows, -1)
        row_sums = by_rows(lambda y: (Value(y) * share).codes, row_sums)
        of_scores, of_values = (np.array(np.float32(factor) * np.float32(inverse)).view(np.uint32) for factor in (scale, 1.0))
    row_sums = padded(jnp.asarray(row_sums).reshape(batch, heads, queries, 1), rows)
    lse = padded(logsumexp[..., None], rows, INFINITY)
    q, grad = padded(q, rows), padded(grad, rows)
    k, v = (padded(jnp.repeat(x, group, 1), blocks * tiles.keys) for x in (k, v))
    limits = np.minimum(np.arange(rows) + 1, keys) if causal else np.full(rows, keys)
    limits = np.tile(limits, batch * heads).astype(np.int32)
    if visible is not None:
        visible = np.pad(visible, [(0, 0), (0, 0), (0, rows - queries), (0, blocks * tiles.keys - keys)]).reshape(batch * heads * rows, -1)
    # FlashAttention 2 takes the blocks of queries from the last one, cuDNN from the first
    order = np.arange(rows) if is_cudnn else np.arange(rows).reshape(-1, tiles.queries)[::-1].reshape(-1)
    gradients = _cudnn_gradients if is_cudnn else _block_gradients
    by_query = lambda x: jnp.swapaxes(x[:, :, order], -1, -2)
    product = lambda a, b: multiply_codes_by_rows(fmt, DEPTH, a, b, jnp.zeros((*a.shape[:-1], b.shape[-2]), jnp.uint32))

    of_q, of_k, of_v = jnp.zeros((batch * heads * rows, size), jnp.uint32), [], []
    turned_grad, turned_q = by_query(grad), by_query(q)
    for start in range(0, blocks * tiles.keys, tiles.keys):
        own_k, own_v = (x[:, :, start : start + tiles.keys] for x in (k, v))
        seen = (limits - start)[:, None]
        if visible is not None:
            seen = np.where(visible[:, start : start + tiles.keys], np.int32(tiles.keys), np.int32(0))
        p, ds = by_rows(
            lambda *x: gradients(fmt, factors, *x),
            flat(product(q, own_k)), flat(product(grad, own_v)), seen, flat(lse), flat(row_sums),
            *(() if kept is None else (kept[:, start : start + tiles.keys],)),
        )  # fmt: skip
        p, ds = (jnp.asarray(x).reshape(batch, heads, rows, tiles.keys) for x in (p, ds))
        of_v.append(product(by_query(p), turned_grad))
        of_k.append(product(by_query(ds), turned_q))
        of_q = by_rows(add_f32, of_q, flat(product(ds, jnp.swapaxes(own_k, -1, -2))))

    def finished(x: Array, factor: np.ndarray | None) -> Array:
        """Multiply by the scale and round."""
        scaled = x if factor is None else by_rows(lambda y: rescale(y, jnp.full((y.shape[0], 1), jnp.uint32(factor))), x)
        return jnp.asarray(by_rows(lambda y: convert(F32, fmt, y), scaled))

    dq = finished(of_q, of_scores).reshape(batch, heads, rows, size)[:, :, :queries]
    dk, dv = (
        finished(flat(jnp.concatenate(parts, axis=2)), by).reshape(batch, heads, -1, size)[:, :, :keys]
        for parts, by in ((of_k, of_scores), (of_v, of_values))
    )
    return dq, _sum_of_groups(fmt, dk, group), _sum_of_groups(fmt, dv, group)


# ---- CUTLASS


CUTLASS_TILES = {64: BackwardTiles(64, 64), 128: BackwardTiles(128, 128)}  # head size up to which a kernel serves
CUTLASS_THREADS = {64: 2, 128: 4}  # that share a row of grad * out
CUTLASS_DEPTH = 8  # K of the mma instruction


@partial(jax.jit, static_argnums=0)
def _cutlass_gradients(
    fmt: Format, scale: np.ndarray, scores: Array, products: Array, seen: Array, bias: Array, logsumexp: Array, row_sums: Array
) -> BlockGradients:
    """Compute P = e^(s * scale + bias - logsumexp), rounded, and dS = (dO·Vᵀ - the row's sum) * P * scale."""
    visible = jnp.arange(scores.shape[-1])[None] < seen
    factor = Value(jnp.asarray(scale))
    s = where(visible, Value(scores) * factor + Value(bias), as_value(MINUS_INFINITY))
    p = convert(F32, fmt, expf(s - Value(logsumexp)).codes)
    ds = (Value(products) - Value(row_sums)) * Value(convert(fmt, F32, p)) * factor
    return BlockGradients(p, convert(F32, fmt, ds.codes))


def cutlass_backward(
    fmt: Format, operands: BackwardOperands, bias: Array | None, causal: bool, scale: float, *, in_lockstep: bool = False
) -> tuple[Array, Array, Array]:
    """Compute the gradients of queries, keys and values; arguments and result as in `fused_backward`.

    bias: f32 codes [batch, heads, queries, keys], or None.

    Raises:
        NotModelled: The order of the blocks of keys is open, or the head size is another one.
    """
    grad, q, k, v, out, logsumexp = operands
    batch, heads, queries, size = q.shape
    keys = k.shape[2]
    if size > max(CUTLASS_TILES) or v.shape[-1] != size:
        raise NotModelled(f"efficient: got head sizes {size} and {v.shape[-1]}; known are equal ones up to {max(CUTLASS_TILES)}")
    tile_size, tiles = next((most, tiles) for most, tiles in CUTLASS_TILES.items() if size <= most)
    blocks, turns = -(-keys // tiles.keys), -(-queries // tiles.queries)
    if blocks > 1 and not in_lockstep:
        raise NotModelled(
            f"efficient: the order is open: {keys} keys are several blocks of {tiles.keys}, and a lock decides which adds to the gradient "
            "of the queries first; one block is known, and open_order='lockstep' gives one order (torch_cuda/attention_backward.py)"
        )
    rows, columns = turns * tiles.queries, blocks * tiles.keys
    flat = lambda x: x.reshape(-1, x.shape[-1])

    def padded(x: Array, length: int, fill: np.uint32 | int = 0) -> Array:
        return jnp.pad(x, [(0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)], constant_values=fill)

    wide = [flat(convert(fmt, F32, jnp.pad(x, [(0, 0)] * 3 + [(0, tile_size - size)]))) for x in (out, grad)]
    row_sums = by_rows(partial(_row_products, CUTLASS_THREADS[tile_size], False), *wide)
    row_sums = padded(jnp.asarray(row_sums).reshape(batch, heads, queries, 1), rows)
    q, grad, lse = padded(q, rows), padded(grad, rows), padded(logsumexp[..., None], rows, INFINITY)
    k, v = padded(k, columns), padded(v, columns)
    limits = np.minimum(np.arange(rows) + 1, keys) if causal else np.full(rows, keys)
    limits = np.tile(limits, batch * heads).astype(np.int32)[:, None]
    added = jnp.zeros((batch, heads, queries, keys), jnp.uint32) if bias is None else bias
    added = jnp.pad(added, [(0, 0), (0, 0), (0, rows - queries), (0, columns - keys)])
    product = lambda a, b: multiply_codes_by_rows(fmt, CUTLASS_DEPTH, a, b, jnp.zeros((*a.shape[:-1], b.shape[-2]), jnp.uint32))
    factor = np.array(np.float32(scale).view(np.uint32))
    p, ds = by_rows(
        lambda *x: _cutlass_gradients(fmt, factor, *x),
        flat(product(q, k)), flat(product(grad, v)), limits, flat(added), flat(lse), flat(row_sums),
    )  # fmt: skip
    p, ds = (jnp.asarray(x).reshape(batch, heads, rows, columns) for x in (p, ds))
    turned = lambda x: jnp.swapaxes(x, -1, -2)
    visits = [_visits(block, tiles, turns, causal) for block in range(blocks)]
    of_q, of_k, of_v = [], [], []
    for block, visited in enumerate(visits):
        own, taken = slice(block * tiles.keys, (block + 1) * tiles.keys), _elements(visited, tiles.queries)
        of_k.append(product(turned(ds[:, :, taken, own]), turned(q[:, :, taken])))
        of_v.append(product(turned(p[:, :, taken, own]), turned(grad[:, :, taken])))
    for turn in range(turns):  # blocks of keys add in the order in which they come to these queries
        taken = _elements(sorted((b for b in range(blocks) if turn in visits[b]), key=lambda b: visits[b].index(turn)), tiles.keys)
        own = slice(turn * tiles.queries, (turn + 1) * tiles.queries)
        of_q.append(product(ds[:, :, own, taken], turned(k[:, :, taken])))
    found = ((of_q, queries), (of_k, keys), (of_v, keys))
    joined = [jnp.concatenate(parts, axis=2)[:, :, :length] for parts, length in found]
    dq, dk, dv = (jnp.asarray(by_rows(lambda y: convert(F32, fmt, y), flat(x))).reshape(x.shape) for x in joined)
    return dq, dk, dv


def _visits(block: int, tiles: BackwardTiles, turns: int, causal: bool) -> list[int]:
    """Return the blocks of queries of CUTLASS's kernel in the order in which a block of keys takes them.

    Source: kernel_backward.h, getQueryStart, getQueryStartShift and getSmallestQueryForKey.
    """
    if causal:
        return list(range(block * tiles.keys // tiles.queries, turns))
    first = block % turns
    return [*range(first, turns), *range(first)]


def _elements(blocks: Sequence[int], size: int) -> np.ndarray:
    """Return the numbers of the elements of blocks of a size."""
    return np.concatenate([np.arange(block * size, (block + 1) * size) for block in blocks] or [np.arange(0)])


def _sum_of_groups(fmt: Format, gradients: Array, group: int) -> Array:
    """Add the rounded gradients of the heads of a group, as PyTorch does after the kernel on [batch, keys, key heads, group, size]."""
    if group == 1:
        return gradients
    parts = gradients.reshape(gradients.shape[0], -1, group, *gradients.shape[2:]).transpose(0, 3, 1, 2, 4)
    total = array_codes(reduce("sum", to_float(fmt, parts, given_dtype(fmt)), 3))[1]
    return total.transpose(0, 2, 1, 3)
