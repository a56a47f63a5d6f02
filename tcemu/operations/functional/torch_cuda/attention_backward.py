"""The backward of FlashAttention 2, cuDNN and CUTLASS's fused attention on codes: gradients of queries, keys and values.

In FlashAttention 2 a block of keys adds over all queries in one accumulator, from the last block of queries to the first, so that its
products are chains over the queries in that order: the gradients of keys and values have one order. The gradient of the queries is added in
memory by atomics, one addition a block of keys: of up to two blocks the order is no matter, of more it is open. cuDNN, whose source is
closed, does the same by other tiles, in ascending order. In CUTLASS's kernel a lock guards these additions, each of which continues a
chain, so that the order counts from two thread blocks on. Each begins at another block of queries: thread blocks that run at the same pace,
in lockstep, come to a query one after the other. That order gave the words of an H200 in all 12 cases of the census with several blocks.

With `torch.use_deterministic_algorithms(True)` all orders are fixed: FlashAttention 2 gives each of its thread blocks some of the blocks of
keys and memory for their sum, and adds these sums in turn; one thread block of CUTLASS's kernel takes all keys of a head. PyTorch does not
take cuDNN then.

Source: FlashAttention 2, csrc/flash_attn/src/flash_bwd_kernel.h, flash_bwd_preprocess_kernel.h and flash_bwd_launch_template.h; PyTorch
2.11.0, aten/src/ATen/native/transformers/cuda/attention_backward.cu, flash_attn/flash_api.cpp (mha_bwd) and
mem_eff_attention/kernel_backward.h; cuDNN's frontend for the operations of its dropout, whose order was found by words. Held to words of
PyTorch 2.11.0 on an H200: `tests/operations/functional/torch_census.py` and `test_torch_attention.py`.
"""

from __future__ import annotations

import functools
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
    multiply_split_by_rows,
    rescale,
    softmax_factors,
)
from tcemu.operations.functional.torch_cuda.rows import reduce

DEPTH = 16  # K of the mma instruction
VECTOR, WARP = 8, 32  # elements that a thread loads at a time; threads of a warp


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


class BackwardDropout(NamedTuple):
    """The weights that dropout keeps."""

    kept: np.ndarray  # booleans [batch, heads, queries, keys]
    factor: float  # of those that are kept, in f32
    share: float  # the probability to keep one, in f32


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


@partial(jax.jit, static_argnums=(0, 1))
def _cudnn_gradients(
    fmt: Format,
    factor: float,
    factors: Factors,
    scores: Array,
    products: Array,
    seen: Array,
    logsumexp: Array,
    row_sums: Array,
    bias: Array | None = None,
    kept: Array | None = None,
) -> BlockGradients:
    """Compute P = 2^((s * scale + bias - logsumexp) * log2 e), by an fma, and dS = P * (dO·Vᵀ - the row's sum) * scale.

    A dropped weight has a product of 0, and a factor of kept ones multiplies P and dS.
    """
    visible = jnp.arange(scores.shape[-1])[None] < seen
    scale, lse = Value(jnp.asarray(factors.scale)), Value(logsumexp)
    s = fma(Value(scores), scale, -lse) if bias is None else fma(Value(scores), scale, Value(bias)) - lse
    p = ex2(where(visible, s, as_value(MINUS_INFINITY)) * as_value(log2(e)))
    ds = p * (Value(products if kept is None else jnp.where(kept, products, 0)) - Value(row_sums))
    if kept is not None:
        p, ds = where(kept, p * factor, 0.0), ds * factor
    return BlockGradients(*(convert(F32, fmt, x.codes) for x in (p, ds * scale)))


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


def find_open_order(name: str, shape: tuple[int, ...], keys: int, *, deterministic: bool = False, wide: bool = False) -> str:
    """Return why the order of the sums in the gradient of the queries is open; "" if it is fixed.

    Args:
        name: "cudnn", "flash" or "efficient".
        shape: Batch, heads, queries, and the larger one of the head sizes.
        keys: Number of keys.
        deterministic: `torch.use_deterministic_algorithms(True)`.
        wide: The operands are float32.
    """
    batch, heads, _, size = shape
    if name == "efficient":
        tiles = _of_size(FLOAT32_TILES if wide else CUTLASS_TILES, size)
        parts = cutlass_splits(batch * heads, -(-keys // tiles.keys), size, deterministic=deterministic)
        how = f"a lock decides which of {parts} thread blocks, which share the keys of a head, adds first"
        return how if parts > 1 and keys > tiles.keys else ""
    tiles = CUDNN_TILES if name == "cudnn" else _of_size(TILES, size)
    blocks = -(-keys // tiles.keys)
    how = f"{blocks} blocks of {tiles.keys} keys are added by atomics, so that the GPU's own words differ from call to call"
    return how if blocks > 2 and not deterministic else ""


def _pad_weights(x: Array | np.ndarray, rows: int, columns: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, 0), (0, rows - x.shape[2]), (0, columns - x.shape[3])])


def _of_size(table: dict[int, BackwardTiles], size: int) -> BackwardTiles:
    return next((tiles for most, tiles in table.items() if size <= most), BackwardTiles(1, 1))


def fused_backward(
    name: str,
    fmt: Format,
    operands: BackwardOperands,
    causal: bool,
    scale: float,
    *,
    bias: Array | None = None,
    splits: int = 0,
    dropped: BackwardDropout | None = None,
) -> tuple[Array, Array, Array]:
    """Compute the gradients of queries, keys and values as FlashAttention 2 or cuDNN does.

    Args:
        name: "flash" or "cudnn".
        fmt: The operands' format.
        operands: Their codes.
        causal: A query sees the keys up to its own number.
        scale: Factor of the scores.
        bias: f32 codes [batch, heads, queries, keys], of cuDNN.
        splits: Sums in memory to which the blocks of keys are added in turn, and which are added in turn. 0: one for all blocks, which are
            added in ascending order: one of the results of atomics.
        dropped: Dropout of the forward's weights.

    Returns:
        Codes of `fmt`, of the shapes of q, k and v.

    Raises:
        NotModelled: The head size is another one.
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
    of_values = None
    of_weights = [None if x is None else flat(_pad_weights(x, rows, blocks * tiles.keys)) for x in (bias, dropped and dropped.kept)]
    if dropped is not None:
        row_sums = by_rows(lambda y: (Value(y) * dropped.share).codes, row_sums)
        if not is_cudnn:
            of_scores, of_values = (np.array(np.float32(x) * np.float32(dropped.factor)).view(np.uint32) for x in (scale, 1.0))
    row_sums = padded(jnp.asarray(row_sums).reshape(batch, heads, queries, 1), rows)
    lse = padded(logsumexp[..., None], rows, INFINITY)
    q, grad = padded(q, rows), padded(grad, rows)
    k, v = (padded(jnp.repeat(x, group, 1), blocks * tiles.keys) for x in (k, v))
    limits = np.minimum(np.arange(rows) + 1, keys) if causal else np.full(rows, keys)
    limits = np.tile(limits, batch * heads).astype(np.int32)
    # FlashAttention 2 takes the blocks of queries from the last one, cuDNN from the first
    order = np.arange(rows) if is_cudnn else np.arange(rows).reshape(-1, tiles.queries)[::-1].reshape(-1)
    gradients = partial(_cudnn_gradients, fmt, 1.0 if dropped is None else dropped.factor) if is_cudnn else partial(_block_gradients, fmt)
    by_query = lambda x: jnp.swapaxes(x[:, :, order], -1, -2)
    product = lambda a, b: multiply_codes_by_rows(fmt, DEPTH, a, b, jnp.zeros((*a.shape[:-1], b.shape[-2]), jnp.uint32))

    of_q, of_k, of_v = [jnp.zeros((batch * heads * rows, size), jnp.uint32)] * min(splits or 1, blocks), [], []
    turned_grad, turned_q = by_query(grad), by_query(q)
    for number, start in enumerate(range(0, blocks * tiles.keys, tiles.keys)):
        own_k, own_v = (x[:, :, start : start + tiles.keys] for x in (k, v))
        p, ds = by_rows(
            lambda *x: gradients(factors, *x),
            flat(product(q, own_k)), flat(product(grad, own_v)), (limits - start)[:, None], flat(lse), flat(row_sums),
            *(x if x is None else x[:, start : start + tiles.keys] for x in (of_weights if is_cudnn else of_weights[1:])),
        )  # fmt: skip
        p, ds = (jnp.asarray(x).reshape(batch, heads, rows, tiles.keys) for x in (p, ds))
        of_v.append(product(by_query(p), turned_grad))
        of_k.append(product(by_query(ds), turned_q))
        part = number % len(of_q)
        of_q[part] = by_rows(add_f32, of_q[part], flat(product(ds, jnp.swapaxes(own_k, -1, -2))))

    def finished(x: Array, factor: np.ndarray | None) -> Array:
        """Multiply by the scale and round."""
        scaled = x if factor is None else by_rows(lambda y: rescale(y, jnp.full((y.shape[0], 1), jnp.uint32(factor))), x)
        return jnp.asarray(by_rows(lambda y: convert(F32, fmt, y), scaled))

    total = functools.reduce(partial(by_rows, add_f32), of_q)
    dq = finished(total, of_scores).reshape(batch, heads, rows, size)[:, :, :queries]
    dk, dv = (
        finished(flat(jnp.concatenate(parts, axis=2)), by).reshape(batch, heads, -1, size)[:, :, :keys]
        for parts, by in ((of_k, of_scores), (of_v, of_values))
    )
    return dq, _sum_of_groups(fmt, dk, group), _sum_of_groups(fmt, dv, group)


# ---- CUTLASS


CUTLASS_TILES = {64: BackwardTiles(64, 64), 128: BackwardTiles(128, 128), LARGEST_HEAD: BackwardTiles(128, 64)}  # head size up to which
CUTLASS_DEPTH = 8  # K of the mma instruction
FLOAT32_TILES = {64: BackwardTiles(64, 64), 128: BackwardTiles(128, 64)}  # the same in float32
MOST_SPLITS = 200  # thread blocks whose sums of keys and values lie in memory, as of head sizes above 128
ENOUGH_HEADS = 256  # from which a thread block takes two blocks of keys


def cutlass_splits(heads: int, blocks: int, size: int, *, deterministic: bool) -> int:
    """Return the number of thread blocks that share the blocks of keys of a head. heads: of all batches.

    Source: PyTorch 2.11.0, attention_backward.cu, _efficient_attention_backward.
    """
    if deterministic or (heads >= ENOUGH_HEADS and blocks <= 2):
        return 1
    return blocks if size <= 128 else max(min(blocks, MOST_SPLITS // heads), 1)


@partial(jax.jit, static_argnums=(0, 1))
def _cutlass_gradients(
    fmt: Format,
    factor: float,
    scale: np.ndarray,
    scores: Array,
    products: Array,
    seen: Array,
    bias: Array,
    logsumexp: Array,
    row_sums: Array,
    kept: Array | None = None,
) -> tuple[BlockGradients, Array]:
    """Compute P = e^(s * scale + bias - logsumexp), rounded, and dS = (dO·Vᵀ - the row's sum) * P * scale, and dS without the scale.

    A dropped weight has a product of 0; those of kept ones have a factor, as P in the gradient of values has, where both are rounded first.
    """
    visible = jnp.arange(scores.shape[-1])[None] < seen
    s = where(visible, Value(scores) * Value(jnp.asarray(scale)) + Value(bias), as_value(MINUS_INFINITY))
    p = convert(F32, fmt, expf(s - Value(logsumexp)).codes)
    inner = Value(products) if kept is None else where(kept, Value(products) * factor, 0.0)
    ds = (inner - Value(row_sums)) * Value(convert(fmt, F32, p))
    if kept is not None:
        rounded = Value(convert(fmt, F32, convert(F32, fmt, as_value(factor).codes)))
        p = jnp.where(kept, convert(F32, fmt, (Value(convert(fmt, F32, p)) * rounded).codes), 0)
    return BlockGradients(p, convert(F32, fmt, (ds * Value(jnp.asarray(scale))).codes)), convert(F32, fmt, ds.codes)


def cutlass_backward(
    fmt: Format,
    operands: BackwardOperands,
    bias: Array | None,
    causal: bool,
    scale: float,
    *,
    deterministic: bool = False,
    dropped: BackwardDropout | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Compute the gradients of queries, keys, values and bias; arguments as in `fused_backward`.

    Args:
        fmt: The operands' format.
        operands: Their codes.
        bias: f32 codes [batch, heads, queries, keys], or None.
        causal: A query sees the keys up to its own number.
        scale: Factor of the scores.
        deterministic: One thread block takes all keys of a head. Otherwise several add in lockstep, one of the orders of the GPU.
        dropped: Dropout of the forward's weights.

    Raises:
        NotModelled: The head size is another one.
    """
    grad, q, k, v, out, logsumexp = operands
    batch, heads, queries, size = q.shape
    keys = k.shape[2]
    table = FLOAT32_TILES if fmt == F32 else CUTLASS_TILES
    if size > max(table) or v.shape[-1] != size:
        raise NotModelled(f"efficient: got head sizes {size} and {v.shape[-1]} in {fmt}; known are equal ones up to {max(table)}")
    most, tiles = next((most, tiles) for most, tiles in table.items() if size <= most)
    blocks, turns = -(-keys // tiles.keys), -(-queries // tiles.queries)
    splits = cutlass_splits(batch * heads, blocks, size, deterministic=deterministic)
    rows, columns = turns * tiles.queries, blocks * tiles.keys
    flat = lambda x: x.reshape(-1, x.shape[-1])

    def padded(x: Array, length: int, fill: np.uint32 | int = 0) -> Array:
        return jnp.pad(x, [(0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)], constant_values=fill)

    threads = tiles.keys // WARP  # that share a row of grad * out
    wide = [flat(convert(fmt, F32, jnp.pad(x, [(0, 0)] * 3 + [(0, 0 if fmt == F32 else most - size)]))) for x in (out, grad)]
    if fmt == F32:  # PyTorch's own product and sum
        row_sums = array_codes(reduce("sum", to_float(F32, by_rows(rescale, *wide)).reshape(out.shape), 3))[1]
    else:
        row_sums = by_rows(partial(_row_products, threads, False), *wide)
    row_sums = padded(jnp.asarray(row_sums).reshape(batch, heads, queries, 1), rows)
    q, grad, lse = padded(q, rows), padded(grad, rows), padded(logsumexp[..., None], rows, INFINITY)
    k, v = padded(k, columns), padded(v, columns)
    limits = np.minimum(np.arange(rows) + 1, keys) if causal else np.full(rows, keys)
    limits = np.tile(limits, batch * heads).astype(np.int32)[:, None]
    of_tile = lambda x: _pad_weights(x, rows, columns)
    added = of_tile(jnp.zeros((batch, heads, queries, keys), jnp.uint32) if bias is None else bias)

    def product(a: Array, b: Array, tile: int, *, in_memory: bool = False) -> Array:
        """Return A·Bᵀ, in float32 by tiles of K: each continues the sum, or is added to it in memory."""
        zeros = total = jnp.zeros((*a.shape[:-1], b.shape[-2]), jnp.uint32)
        if fmt != F32:
            return multiply_codes_by_rows(fmt, CUTLASS_DEPTH, a, b, total)
        for start in range(0, a.shape[-1], tile):
            found = multiply_split_by_rows(a[..., start : start + tile], b[..., start : start + tile], zeros if in_memory else total)
            total = add_f32(total, found) if in_memory and start else found
        return total

    factor, turned = np.array(np.float32(scale).view(np.uint32)), lambda x: jnp.swapaxes(x, -1, -2)
    (p, ds), of_bias = by_rows(
        lambda *x: _cutlass_gradients(fmt, 1.0 if dropped is None else dropped.factor, factor, *x),
        flat(turned(product(k, q, size))), flat(product(grad, v, size)), limits, flat(added), flat(lse), flat(row_sums),
        *(() if dropped is None else (flat(of_tile(dropped.kept)),)),
    )  # fmt: skip
    p, ds, of_bias = (jnp.asarray(x).reshape(batch, heads, rows, columns) for x in (p, ds, of_bias))
    visits = [_visits(block, splits, tiles, turns, causal) for block in range(blocks)]
    of_q, of_k, of_v = [], [], []
    for block, visited in enumerate(visits):
        own, taken = slice(block * tiles.keys, (block + 1) * tiles.keys), _elements(visited, tiles.queries)
        of_k.append(product(turned(ds[:, :, taken, own]), turned(q[:, :, taken]), tiles.queries, in_memory=True))
        of_v.append(product(turned(p[:, :, taken, own]), turned(grad[:, :, taken]), tiles.queries, in_memory=True))
    begins = [sum(len(visits[b]) for b in range(block % splits, block, splits)) for block in range(blocks)]
    for turn in range(turns):  # blocks of keys add in the order in which they come to these queries
        when = {block: begins[block] + visited.index(turn) for block, visited in enumerate(visits) if turn in visited}
        taken = _elements(sorted(when, key=lambda block: when[block]), tiles.keys)
        own = slice(turn * tiles.queries, (turn + 1) * tiles.queries)
        of_q.append(product(ds[:, :, own, taken], turned(k[:, :, taken]), tiles.keys))
    found = ((of_q, queries), (of_k, keys), (of_v, keys))
    joined = [jnp.concatenate(parts, axis=2)[:, :, :length] for parts, length in found]
    dq, dk, dv = (jnp.asarray(by_rows(lambda y: convert(F32, fmt, y), flat(x))).reshape(x.shape) for x in joined)
    return dq, dk, dv, of_bias[:, :, :queries, :keys]


def _visits(block: int, splits: int, tiles: BackwardTiles, turns: int, causal: bool) -> list[int]:
    """Return the blocks of queries of CUTLASS's kernel in the order in which a block of keys takes them.

    Source: kernel_backward.h, getQueryStart, getQueryStartShift and getSmallestQueryForKey.
    """
    if causal:
        return list(range(block * tiles.keys // tiles.queries, turns))
    first = block % splits % turns if splits > 1 else 0
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
