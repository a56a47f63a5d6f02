"""The forward of fused attention kernels on codes: blocks of keys, an online softmax, and P·V, for cuDNN, FlashAttention 2 and CUTLASS.

The three kernels differ in data: `KERNELS` says how each scales, adds a row's exponentials, rescales and divides, and `fused_kernel` the
block of keys and the instruction for a head size. The rows of a head are independent, so that blocks of queries do not matter.

Source: FlashAttention 2, csrc/flash_attn/src/flash_fwd_kernel.h, softmax.h and flash_fwd_launch_template.h, and PyTorch 2.11.0,
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (which defines UNFUSE_FMA: the exponent is a product and a difference);
PyTorch, mem_eff_attention/kernel_forward.h, gemm_kernel_utils.h and epilogue_rescale_output.h. cuDNN's source is closed: its rule was found
on head size 64 and at most 384 keys, and holds for all other recorded shapes (`tests/operations/functional/torch_census.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from math import e, log, log2
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from tcemu.base.errors import NotModelled
from tcemu.engine.arithmetic.f32_arithmetic import f32_code, max_f32, maximum_f32
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.arithmetic.special_functions import lg2
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.number_formats import BF16, F32, TF32, Format
from tcemu.operations.functional.torch_cuda.device_functions import Value, as_value, ex2, expf, fma, logf, rcp, where
from tcemu.operations.functional.torch_cuda.numpy_evaluation import evaluate_by_numpy
from tcemu.operations.functional.torch_cuda.reduce_plans import GPUS
from tcemu.operations.products.recipes import Recipe

MINUS_INFINITY, INFINITY, ONE = f32_code(-np.inf), f32_code(np.inf), f32_code(1.0)
LANES = 4  # threads that share a row of an accumulator's tile: each has the columns 8i + 2t and 8i + 2t + 1
WARP_COLUMNS = 32  # columns of a block that one warp of the CUTLASS kernel has
ROWS_PER_CALL = 256  # rows that a compiled step takes, so that a step is compiled once and not once a shape


class FusedKernel(NamedTuple):
    """One fused attention kernel.

    Attributes:
        name: A key of KERNELS.
        keys: Keys of a block.
        depth: K of the mma instruction.
        splits: Parts of the keys that are computed apart and combined; 1: none.
        in_memory: The output's sums are kept in memory and rescaled there, instead of in the accumulator of P·V.
    """

    name: str
    keys: int
    depth: int
    splits: int = 1
    in_memory: bool = False


class OnlineSoftmax(NamedTuple):
    """The form in which a kernel computes a row's softmax from block to block.

    Attributes:
        descending: The blocks are taken from the last one.
        scaled_first: A score is multiplied by the scale, then the bias is added; else both factors are one, and with a bias it is an fma.
        raw_decay: Sums are rescaled by 2^((old maximum - new maximum) * factor), of scores without the factor.
        sums: How a row's exponentials are added: "running": each lane adds to its sum of all blocks, rescaled by an fma; "block": each
            lane adds a block's, which an fma adds to the rescaled sum; "warps": the lanes of each warp are joined in each block.
        halves: The lanes are joined (0 + 2) + (1 + 3), else (0 + 1) + (2 + 3).
        approximate: The output is multiplied by `rcp.approx`, else by the rounded reciprocal.
        drops: When the weights that dropout keeps are multiplied by its factor: "first": before they are rounded; "rounded": after, by the
            rounded factor, and rounded again; "last": in the reciprocal of the row's sum.
    """

    descending: bool
    scaled_first: bool
    raw_decay: bool
    sums: str
    halves: bool
    approximate: bool
    drops: str


ONE_QUERY = "cudnn, one query"
KERNELS = {
    "cudnn": OnlineSoftmax(False, False, False, "block", halves=False, approximate=True, drops="first"),
    ONE_QUERY: OnlineSoftmax(False, True, False, "block", halves=False, approximate=True, drops="first"),
    "flash": OnlineSoftmax(True, False, True, "running", halves=True, approximate=False, drops="last"),
    "efficient": OnlineSoftmax(False, True, False, "warps", halves=False, approximate=False, drops="rounded"),
}
FLASH_KEYS = {32: 128, 64: 128, 96: 64, 128: 64, 192: 64, 256: 64}  # head size up to which a kernel serves: keys of a block
DROPOUT_KEYS = {32: 128, 64: 64, 96: 64, 128: 32, 192: 64, 256: 64}  # the same with dropout, which has no splits
SPLIT_KEYS = {64: 256, 128: 128, 256: 64}  # the same with splits
LARGEST_HEAD = 256
ONE_QUERY_KEYS = 256  # keys up to which cuDNN takes one query by sdpa_sm80_flash_fprop_wmma, 64 x 64, as far as its kernels were listed


def fused_kernel(name: str, shape: tuple[int, ...], keys: int, gpu: str, *, drops: bool = False, fmt: Format = BF16) -> FusedKernel:
    """Return the kernel that a backend launches.

    Args:
        name: A key of KERNELS.
        shape: Batch, heads, queries and head size, as the kernel sees them.
        keys: Number of keys.
        gpu: A key of `reduce_plans.GPUS`.
        drops: The call has dropout.
        fmt: The operands' format.

    Raises:
        NotModelled: The GPU or the head size is another one.
    """
    batch, heads, queries, size = shape
    if gpu not in GPUS:
        raise NotModelled(f"gpu={gpu!r}: fused attention is known on {', '.join(GPUS)} (torch_cuda/fused_attention.py)")
    if not 1 <= size <= LARGEST_HEAD:
        raise NotModelled(f"{name}: got head size {size}; known are sizes up to {LARGEST_HEAD} (torch_cuda/fused_attention.py)")
    if name == "flash" and drops:
        return FusedKernel(name, _block_keys(DROPOUT_KEYS, size), 16)
    if name == "flash":
        splits = split_count(batch * heads * -(-queries // 64), 2 * GPUS[gpu][0], -(-keys // _block_keys(SPLIT_KEYS, size)))
        return FusedKernel(name, _block_keys(SPLIT_KEYS if splits > 1 else FLASH_KEYS, size), 16, splits)
    if fmt == F32 and (drops or size % SPLIT_TILE):
        raise NotModelled(
            f"{name}: got float32, head size {size}{' and dropout' if drops else ''}; known are multiples of {SPLIT_TILE} without dropout "
            "(torch_cuda/fused_attention.py)"
        )
    if name == "efficient":
        if size % 8 or (size > 128 and size % 32):
            raise NotModelled(
                f"efficient: got head size {size}; known are multiples of 8 up to 128, and of 32 above (torch_cuda/fused_attention.py)"
            )
        return FusedKernel(name, 64 if size <= 64 else 128, 8, in_memory=size > 128)
    if queries == 1 and keys > ONE_QUERY_KEYS:
        raise NotModelled(
            f"cudnn: got 1 query and {keys} keys; known are up to {ONE_QUERY_KEYS}. From 257 keys on cuDNN takes a kernel whose four warps "
            "share a block of keys (sdpa_sm80_flash_fprop_wmma, 16 x 128) and add their sums in an order that is open: an H200's own words "
            "differ from call to call (torch_cuda/fused_attention.py)"
        )
    if queries == 1:
        return FusedKernel(ONE_QUERY, 64, 16)
    return FusedKernel(name, 128, 16)


def _block_keys(table: dict[int, int], size: int) -> int:
    return next(keys for most, keys in table.items() if size <= most)


def split_count(blocks: int, slots: int, key_blocks: int) -> int:
    """Return the number of splits of FlashAttention 2: the least of 85 % of the best use of the multiprocessors.

    Args:
        blocks: Blocks of queries of all heads and batches.
        slots: Blocks that run at a time.
        key_blocks: Blocks of keys.

    Source: flash_api.cpp, num_splits_heuristic.
    """
    if blocks >= np.float32(0.8) * np.float32(slots):
        return 1
    per_split = lambda splits: -(-key_blocks // splits)
    counts = [n for n in range(1, min(128, slots, key_blocks) + 1) if n == 1 or per_split(n) != per_split(n - 1)]
    waves = [np.float32(blocks * n) / np.float32(slots) for n in counts]
    use = [np.float32(w / np.ceil(w)) for w in waves]
    return next((n for n, u in zip(counts, use, strict=True) if float(u) >= 0.85 * float(max(use))), 1)


# ---- products


@lru_cache
def _recipe(fmt: Format, depth: int) -> Recipe:
    return Recipe(f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{fmt}.{fmt}.f32", "sm_90a")  # type: ignore[arg-type]


@partial(jax.jit, static_argnums=(0, 1))
def multiply_codes_by_rows(fmt: Format, depth: int, a: Array, b: Array, c: Array) -> Array:
    """Return A·Bᵀ + C by a chain of mma instructions: codes [..., M, K] and [..., N, K] of `fmt`, f32 codes [..., M, N].

    wgmma of 16-bit operands has the arithmetic of mma.sync on sm_90a, so that one serves cuDNN too.
    """
    recipe = _recipe(fmt, depth)
    a, b = (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % depth)]) for x in (a, b))
    return multiply_matrices(recipe.arithmetic, product_spec(recipe.op), a, jnp.swapaxes(b, -1, -2), c, by_columns=True)


SPLIT_TILE, TF32_STEP = 32, 8  # K of a tile in shared memory, and of the instruction


@partial(jax.jit, static_argnums=0)
def _multiply_steps(steps: int, a: tuple[Array, Array], b: tuple[Array, Array]) -> Array:
    """Return A·Bᵀ of split operands, high and low, by a chain of three instructions for each 8 products: the high parts' comes last."""
    by_steps = lambda x: x.reshape(*x.shape[:-1], steps, 1, TF32_STEP)
    left, right = (jnp.concatenate([by_steps(x) for x in parts], -2) for parts in ((a[1], a[0], a[0]), (b[0], b[1], b[0])))
    left, right = (x.reshape(*x.shape[:-3], -1) for x in (left, right))
    return multiply_codes_by_rows(TF32, TF32_STEP, left, right, jnp.zeros((*a[0].shape[:-1], b[0].shape[-2]), jnp.uint32))


def _split(x: Array) -> tuple[Array, Array]:
    """Return the high part of f32 codes, truncated to tf32, and the rest rounded to tf32 with ties away from zero."""
    high = x & jnp.uint32(0xFFFFE000)
    return high, (Value(x) - Value(high)).codes + jnp.uint32(0x1000)


@jax.jit
def multiply_split_by_rows(a: Array, b: Array, c: Array) -> Array:
    """Return A·Bᵀ + C of f32 codes as CUTLASS's OpMultiplyAddFastF32 does: three products in tf32 of split operands.

    The sums of the first 8 products, and then of every 32, are added to the accumulator.

    Source: CUTLASS, gemm/warp/mma_tensor_op_fast_f32.h; PyTorch, mem_eff_attention/gemm/custom_mma_multistage.h and mma_from_smem.h.
    """
    pad = -a.shape[-1] % SPLIT_TILE
    a, b = (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)]) for x in (a, b))
    (left, right), total = (_split(x) for x in (a, b)), Value(c)
    edges = [0, *range(TF32_STEP, a.shape[-1], SPLIT_TILE), a.shape[-1]]
    for start, end in pairwise(edges):
        parts = [tuple(x[..., start:end] for x in operand) for operand in (left, right)]
        total = total + Value(_multiply_steps((end - start) // TF32_STEP, *parts))
    return total.codes


# ---- one block's softmax, row by row


class Factors(NamedTuple):
    """f32 codes of a call: the scale, and the factor that makes a score an exponent of 2."""

    scale: np.ndarray
    factor: np.ndarray


def softmax_factors(name: str, scale: float, has_bias: bool) -> Factors:
    """Return the factors of a kernel. FlashAttention 2 rounds the product with log2 e once, from f64; the others multiply in f32."""
    once, log2_e = np.float32(scale), np.float32(log2(e))
    factor = np.float32(float(once) * log2(e)) if name == "flash" else once * log2_e
    factor = log2_e if KERNELS[name].scaled_first or has_bias else factor
    return Factors(np.array(once.view(np.uint32)), np.array(np.float32(factor).view(np.uint32)))


class RowState(NamedTuple):
    """A row's state between two blocks, f32 codes."""

    largest: Array  # [rows, 1]: of the scores, or of the exponents
    sums: Array  # [rows, lanes]


class BlockResult(NamedTuple):
    """The results of a block's softmax."""

    state: RowState
    p: Array  # [rows, keys], codes of the operands' format
    decay: Array  # f32 codes [rows, 1]: factor of the output's sums


class DroppedWeights(NamedTuple):
    """The weights that dropout keeps, and the f32 code of the factor of these."""

    kept: np.ndarray  # booleans [rows, keys]
    factor: np.ndarray


def _joined(lanes: Sequence[Value], halves: bool) -> Value:
    first, second = ((0, 2), (1, 3)) if halves else ((0, 1), (2, 3))
    return (lanes[first[0]] + lanes[first[1]]) + (lanes[second[0]] + lanes[second[1]])


def _columns(p: Value) -> list[Value]:
    """Return the exponentials in the order in which lanes add them, each [rows, lanes]."""
    tiles = p.codes.reshape(p.codes.shape[0], -1, LANES, 2)
    return [Value(tiles[:, i, :, j]) for i in range(tiles.shape[1]) for j in range(2)]


def _chain(start: Value, terms: Sequence[Value]) -> Value:
    """Add terms in turn by the device's addition: a subnormal sum that it flushes is invisible beside a row's largest exponential, 1."""
    if not terms:
        return start
    stack = lax.bitcast_convert_type(jnp.stack([t.codes for t in terms]), jnp.float32)
    total = lax.scan(lambda x, y: (x + y, None), lax.bitcast_convert_type(start.codes, jnp.float32), stack)[0]
    return Value(lax.bitcast_convert_type(total, jnp.uint32))


def _round_weights(kind: OnlineSoftmax, fmt: Format, p: Value, dropped: DroppedWeights | None) -> Array:
    """Return weights in the operands' format, 0 for dropped ones."""
    if dropped is None:
        return convert(F32, fmt, p.codes)
    factor = Value(jnp.asarray(dropped.factor))
    if kind.drops == "rounded":
        p, factor = (Value(convert(fmt, F32, convert(F32, fmt, x.codes))) for x in (p, factor))
    return jnp.where(dropped.kept, convert(F32, fmt, (p if kind.drops == "last" else p * factor).codes), 0)


@partial(jax.jit, static_argnums=(0, 1))
def block_softmax(
    kind: OnlineSoftmax,
    fmt: Format,
    factors: Factors,
    scores: Array,
    seen: Array,
    bias: Array | None,
    state: RowState,
    dropped: DroppedWeights | None = None,
) -> BlockResult:
    """Compute the exponentials of a block's scores, and update the state of each row.

    Args:
        kind: How the kernel computes.
        fmt: The format of P.
        factors: Scale and factor.
        scores: f32 codes [rows, keys].
        seen: Number of keys of the block that a row sees, from the first one, int32 [rows, 1].
        bias: f32 codes [rows, keys], or None.
        state: The rows' state.
        dropped: Dropout of the weights. The row's sum has the dropped ones too.
    """
    visible = jnp.arange(scores.shape[-1])[None] < seen
    s, factor = Value(scores), Value(jnp.asarray(factors.factor))
    scale = Value(jnp.asarray(factors.scale))
    if kind.scaled_first:
        s = s * scale if bias is None else s * scale + Value(bias)
    elif bias is not None:
        s = fma(s, scale, Value(bias))
    s = where(visible, s, as_value(MINUS_INFINITY))
    t = s * factor
    largest = maximum_f32(state.largest, max_f32((s if kind.raw_decay else t).codes))
    reached = Value(jnp.where(largest == MINUS_INFINITY, jnp.uint32(0), largest))  # 0 where a row has seen no key
    p = ex2(t - (reached * factor if kind.raw_decay else reached))
    p = where(visible, p, 0.0)
    change = Value(state.largest) - reached
    decay = ex2(change * factor if kind.raw_decay else change)
    before = Value(state.sums)
    if kind.sums == "running":
        first, *rest = _columns(p)
        sums = _chain(fma(before, decay, first), rest)
    elif kind.sums == "block":
        first, *rest = _columns(p)
        sums = fma(before, decay, _chain(first, rest))
    else:
        decay = where(state.largest == largest, 1.0, decay)
        sums = before * decay
        for start in range(0, scores.shape[-1], WARP_COLUMNS):
            first, *rest = _columns(Value(p.codes[:, start : start + WARP_COLUMNS]))
            lanes = _chain(first, rest).codes
            sums = sums + _joined([Value(lanes[:, i : i + 1]) for i in range(LANES)], kind.halves)
    return BlockResult(RowState(largest, sums.codes), _round_weights(kind, fmt, p, dropped), decay.codes)


@jax.jit
def rescale(sums: Array, decay: Array) -> Array:
    """Multiply a row's sums by its factor; f32 codes."""
    return (Value(sums) * Value(decay)).codes


@jax.jit
def _add_in_memory(stored: Array, added: Array, decay: Array, total: Array, flags: Array) -> Array:
    """Add a block's P·V to the output in memory. flags [rows, 3]: the block is a row's first one, its last one, or one of its blocks."""
    first, last, active = (flags[:, i : i + 1] != 0 for i in range(3))
    alpha = where(last, 1.0 / where(total == 0, 1.0, Value(total)), 1.0)
    x, y, beta = Value(added), Value(stored), Value(decay)
    # where alpha is the constant 1, nvcc contracts the other product
    both = where(last, fma(alpha, x, (alpha * beta) * y), fma(beta, y, x))
    return jnp.where(active, where(first, alpha * x, both).codes, stored)


# ---- the end of a row


class RowResult(NamedTuple):
    """The output before its rounding and the log-sum-exp, f32 codes [rows, size] and [rows, 1]."""

    out: Array
    logsumexp: Array


@partial(jax.jit, static_argnums=(0, 1, 2))
def finish_rows(
    name: str, is_split: bool, in_memory: bool, sums: Array, state: RowState, scale: np.ndarray, factor: np.ndarray | None = None
) -> RowResult:
    """Divide the output by the row's sum, and compute its log-sum-exp. factor: f32 code by which the reciprocal is multiplied first."""
    kind = KERNELS[name]
    total = Value(state.sums)
    if kind.sums != "warps":
        total = _joined([Value(state.sums[:, i : i + 1]) for i in range(LANES)], kind.halves)
    largest, empty, ln_2 = Value(state.largest), total.codes == 0, as_value(log(2))
    inverse = rcp(total) if kind.approximate else 1.0 / where(empty, 1.0, total)
    inverse = inverse if factor is None else inverse * Value(jnp.asarray(factor))
    found = sums if in_memory else (Value(sums) * inverse).codes
    if name == "efficient":
        lse = where(largest.codes == MINUS_INFINITY, 0.0, largest) / as_value(log2(e)) + logf(where(empty, 1.0, total))
    else:
        logarithm = Value(lg2(total.codes))
        if name == ONE_QUERY:
            lse = fma(logarithm, ln_2, largest * ln_2)
        else:
            lse = fma(largest, Value(jnp.asarray(scale)) if kind.raw_decay else ln_2, logarithm * ln_2)
        if name == "flash":
            lse = where(empty, as_value(MINUS_INFINITY if is_split else INFINITY), lse)
    return RowResult(found, lse.codes)


@partial(jax.jit, static_argnums=0)
def combine_splits(count: int, parts: tuple[RowResult, ...]) -> RowResult:
    """Combine the splits of FlashAttention 2 by their log-sum-exps, as `combine_attn_seqk_parallel` does."""
    logs = [Value(part.logsumexp) for part in parts]
    largest = logs[0].codes
    for each in logs[1:]:
        largest = maximum_f32(largest, each.codes)
    top = Value(jnp.where(largest == MINUS_INFINITY, jnp.uint32(0), largest))
    powers = [expf(each - top) for each in logs]
    powers += [Value(jnp.zeros_like(top.codes))] * ((1 << max(1, (count - 1).bit_length())) - count)
    while len(powers) > 1:  # lanes of a warp, joined in halves
        half = len(powers) // 2
        powers = [x + y for x, y in zip(powers[:half], powers[half:], strict=True)]
    lse = where(powers[0].codes == 0, as_value(INFINITY), logf(powers[0]) + top)
    out = Value(jnp.zeros_like(parts[0].out))
    for each, part in zip(logs, parts, strict=True):
        out = fma(expf(each - lse), Value(part.out), out)
    return RowResult(out.codes, lse.codes)


@lru_cache(maxsize=256)
def _of_leaves(function: Callable, fixed: tuple[Any, ...], tree: Any) -> Callable:
    """Return a function of the leaves of its operands; equal ones are one object."""
    return lambda *leaves: function(*fixed, *jax.tree.unflatten(tree, leaves))


def by_rows(function: Callable, *operands: Any, fixed: tuple[Any, ...] | None = None) -> Any:
    """Call a function of arrays [rows, ...] in parts of ROWS_PER_CALL rows; under a trace, once.

    Args:
        function: The function.
        *operands: Its operands. Those without axes go to every part.
        fixed: Static arguments before the operands. If they are given, NumPy computes, and nothing is compiled.
    """
    leaves, tree = jax.tree.flatten(operands)
    if any(isinstance(x, Tracer) for x in leaves):
        return function(*(fixed or ()), *operands)
    rows = next(x.shape[0] for x in leaves if np.ndim(x))
    pad = -rows % ROWS_PER_CALL
    given = [np.pad(np.asarray(x), [(0, pad)] + [(0, 0)] * (x.ndim - 1)) if np.ndim(x) else x for x in leaves]
    compute = lambda *x: function(*jax.tree.unflatten(tree, x))
    if fixed is not None:
        compute = partial(evaluate_by_numpy, _of_leaves(function, fixed, tree))
    parts = [
        jax.tree.map(np.asarray, compute(*(x[start : start + ROWS_PER_CALL] if np.ndim(x) else x for x in given)))
        for start in range(0, rows + pad, ROWS_PER_CALL)
    ]
    return jax.tree.map(lambda *x: np.concatenate(x)[:rows], *parts)


# ---- the whole forward


class FusedOperands(NamedTuple):
    """Operands of a fused kernel, as codes of their format: the queries of all heads that share a key head are one matrix, head by head."""

    q: Array  # [batch, key heads, heads of a group * queries, size]
    k: Array  # [batch, key heads, keys, size]
    v: Array  # [batch, key heads, keys, size of a value]
    bias: Array | None  # f32 codes [batch, key heads, heads of a group * queries, keys]


def fused_forward(
    kernel: FusedKernel,
    fmt: Format,
    operands: FusedOperands,
    queries: int,
    causal: bool,
    scale: float,
    dropped: DroppedWeights | None = None,
) -> RowResult:
    """Compute the forward of a fused kernel.

    Args:
        kernel: The kernel.
        fmt: The operands' format.
        operands: Their codes.
        queries: Queries of a head.
        causal: A query sees the keys up to its own number.
        scale: Factor of the scores.
        dropped: Dropout of the weights, or None.

    Returns:
        f32 codes [batch * key heads * rows, size] and [..., 1].
    """
    if not any(isinstance(x, Tracer) for x in operands):
        operands = FusedOperands(*(None if x is None else np.asarray(x) for x in operands))  # type: ignore[arg-type]
    keys = operands.k.shape[-2]
    rows = np.tile(np.arange(queries), operands.q.shape[-2] // queries)
    limits = np.minimum(rows + 1, keys) if causal else np.full(rows.size, keys)
    limits = np.tile(limits, operands.q.shape[0] * operands.q.shape[1]).astype(np.int32)
    blocks = -(-keys // kernel.keys)
    per_split = -(-blocks // kernel.splits)
    parts = []
    for first in range(0, per_split * kernel.splits, per_split):
        numbers = range(min(first, blocks), min(first + per_split, blocks))
        parts.append(_forward_blocks(kernel, fmt, operands, numbers, limits, scale, rows, causal, dropped))
    return parts[0] if kernel.splits == 1 else by_rows(combine_splits, tuple(parts), fixed=(kernel.splits,))


def _forward_blocks(
    kernel: FusedKernel,
    fmt: Format,
    operands: FusedOperands,
    numbers: range,
    limits: np.ndarray,
    scale: float,
    places: np.ndarray,
    causal: bool,
    dropped: DroppedWeights | None,
) -> RowResult:
    """Compute the forward over some blocks of keys. limits: keys that each row sees; places: its number among its head's queries."""
    kind, (q, k, v, bias) = KERNELS[kernel.name], operands
    lead, rows, width = q.shape[:-1], limits.size, v.shape[-1]
    xp: Any = np if isinstance(q, np.ndarray) else jnp  # what NumPy moves needs no program
    multiply = multiply_split_by_rows if fmt == F32 else partial(multiply_codes_by_rows, fmt, kernel.depth)
    product = lambda a, b, c: xp.asarray(multiply(a, b, c))
    factors = softmax_factors(kernel.name, scale, bias is not None)
    state = RowState(xp.full((rows, 1), MINUS_INFINITY), xp.zeros((rows, 1 if kind.sums == "warps" else LANES), np.uint32))
    sums: Array = xp.zeros((rows, width), np.uint32)
    # keys that the block of 32 queries with a row sees, by which the kernel that adds in memory knows its last block
    of_tile = np.minimum(np.tile(places // 32 * 32 + 32, rows // places.size), k.shape[-2]) if causal else limits
    for number in reversed(numbers) if kind.descending else numbers:
        start = number * kernel.keys
        pad = [(0, 0), (0, 0), (0, max(0, start + kernel.keys - k.shape[-2])), (0, 0)]
        own_k, own_v = (xp.pad(x[:, :, start : start + kernel.keys], pad) for x in (k, v))
        scores = product(q, own_k, xp.zeros((*lead, kernel.keys), np.uint32))
        own_bias = None
        if bias is not None:
            own_bias = xp.pad(bias[..., start : start + kernel.keys], [pad[0], pad[1], (0, 0), pad[2]]).reshape(rows, kernel.keys)
        seen = (limits - start)[:, None]
        own = None if dropped is None else DroppedWeights(np.pad(dropped.kept[:, start : start + kernel.keys], pad[1:3]), dropped.factor)
        state, p, decay = by_rows(block_softmax, factors, scores.reshape(rows, -1), seen, own_bias, state, own, fixed=(kind, fmt))
        running = xp.zeros_like(sums) if kernel.in_memory else by_rows(rescale, sums, decay, fixed=())
        found = product(p.reshape(*lead, kernel.keys), xp.swapaxes(own_v, -1, -2), running.reshape(*lead, width)).reshape(rows, width)
        if kernel.in_memory:
            flags = np.stack([np.full(rows, start == 0), of_tile <= start + kernel.keys, of_tile > start], axis=-1).astype(np.int32)
            found = by_rows(_add_in_memory, sums, found, decay, state.sums, flags, fixed=())
        sums = found
    factor = dropped.factor if dropped is not None and kind.drops == "last" else None
    return by_rows(finish_rows, sums, state, factors.scale, factor, fixed=(kernel.name, kernel.splits > 1, kernel.in_memory))
