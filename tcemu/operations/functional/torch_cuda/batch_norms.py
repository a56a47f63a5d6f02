"""PyTorch's batch norm and its gradients as its own CUDA kernels compute them, which `native_batch_norm` calls.

A block takes a channel of contiguous images: its threads in x take neighbouring elements, those in y images. An operand [N, channels] lies
with its channels innermost: there the threads in y, and blocks, share a channel, and each thread has four chains.

`torch.nn.functional.batch_norm` calls cuDNN instead for float32 operands with axes behind the channels, whose order is not known.

Source: PyTorch 2.11.0, aten/src/ATen/native/cuda/Normalization.cuh, Normalization.cu, block_reduce.cuh; native/Normalization.cpp
(`_batch_norm_impl_index`). Held to words of PyTorch 2.11.0 on an H200: `tests/operations/functional/torch_rows_census.py`.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.engine.arithmetic.sum_tree import EMPTY, Chain, Join, Node
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.operations.functional.torch_cuda.device_functions import Value, as_value, fma, rsqrt
from tcemu.operations.functional.torch_cuda.reduce_plans import WARP, strided_places, thread_tree
from tcemu.operations.functional.torch_cuda.reductions import (
    BATCH_NORM,
    CHANNELS_LAST,
    reduce_tree_values,
    tree_moments,
)
from tcemu.operations.functional.torch_cuda.rows import operand_codes, result_array

THREADS = (32, 64, 128, 256, 512)  # threads in x: the least number that takes all neighbouring elements
CHAINS = 4  # of a thread, where channels are innermost
LAST_THREADS, LAST_ROWS, LAST_BLOCKS = 512, 16, 128  # of a block, rows of a thread to which blocks are fitted, and most blocks of a channel


class Channels(NamedTuple):
    """An operand by channels: f32 values [images * inner, channels], its format and shape, and the elements behind the channels."""

    values: Value
    fmt: Format
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, x: ArrayLike) -> Channels:
        fmt, codes = operand_codes(name, x)
        wide = convert(fmt, F32, codes)
        return cls(Value(jnp.moveaxis(wide.reshape(*wide.shape[:2], -1), 1, 2).reshape(-1, wide.shape[1])), fmt, codes.shape)

    @property
    def inner(self) -> int:
        """The number of elements behind the channels."""
        return int(np.prod(self.shape[2:], dtype=int))

    def result(self, found: Value) -> Array:
        """Return values [images * inner, channels] in the operand's dtype and shape."""
        images, channels = self.shape[:2]
        codes = jnp.moveaxis(found.codes.reshape(images, self.inner, channels), 2, 1)
        return result_array(Value(codes), self.fmt).reshape(self.shape)


@lru_cache(maxsize=64)
def channel_places(images: int, inner: int) -> np.ndarray:
    """Return the elements of a channel, image by image, that each thread of its block takes [T, threads]."""
    across = next((threads for threads in THREADS if inner <= threads), THREADS[-1])
    down = max(THREADS[-1] // across, 1)
    image, x = strided_places(images, down)[:, None, :, None], strided_places(inner, across)[None, :, None, :]
    return np.where((image >= 0) & (x >= 0), image * inner + x, EMPTY).reshape(-1, down * across).astype(np.int32)


class LastLaunch(NamedTuple):
    """The launch where channels are innermost: threads in y and blocks that share a channel."""

    threads: int
    blocks: int


def last_launch(rows: int, channels: int) -> LastLaunch:
    """Return the launch for [rows, channels]. Source: `flexible_launch_configs`."""
    power = lambda n: 1 << (max(n, 1).bit_length() - 1)
    across = min(power(channels), WARP)
    down = min(power(-(-rows // LAST_ROWS)), LAST_THREADS // across)
    if across * down != LAST_THREADS:
        across = min(power(channels), LAST_THREADS // down)
    blocks = min(-(-rows // (down * LAST_ROWS)), LAST_BLOCKS)
    return LastLaunch(down, 1 if blocks < 8 else blocks)


@lru_cache(maxsize=64)
def last_tree(rows: int, channels: int) -> Node:
    """Return the sum of a channel that is innermost: four chains of a thread, in turn; threads in halves; blocks by threads, in halves."""
    launch = last_launch(rows, channels)
    step = launch.threads * launch.blocks
    turns = -(-rows // (step * CHAINS))
    numbers = np.arange(turns * CHAINS * step).reshape(turns, CHAINS, launch.blocks, launch.threads)
    numbers = np.where(numbers < rows, numbers, EMPTY).transpose(0, 2, 3, 1).astype(np.int32)  # [T, blocks, threads, chains]
    node: Node = Join(Chain(numbers[:, 0] if launch.blocks == 1 else _blocks_by_threads(numbers, launch)))
    node = Join(node, "folded")
    return node if launch.blocks == 1 else Join(Join(node, from_zero=True), "folded")


def _blocks_by_threads(numbers: np.ndarray, launch: LastLaunch) -> np.ndarray:
    """Return elements [T, threads, rounds, threads, chains]: a thread of the last block takes the sums of some blocks in turn."""
    rounds = -(-launch.blocks // launch.threads)
    missing = rounds * launch.threads - launch.blocks
    numbers = np.pad(numbers, [(0, 0), (0, missing), (0, 0), (0, 0)], constant_values=EMPTY)
    return numbers.reshape(len(numbers), rounds, launch.threads, *numbers.shape[2:]).swapaxes(1, 2)


def _row(name: str, x: ArrayLike | None) -> Value | None:
    if x is None:
        return None
    fmt, codes = operand_codes(name, x)
    return Value(convert(fmt, F32, codes).reshape(1, -1))


@partial(jax.jit, static_argnames=("training", "momentum", "eps"))
def batch_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    running_mean: ArrayLike | None = None,
    running_var: ArrayLike | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Normalise each channel as PyTorch's `native_batch_norm` on a GPU does.

    Args:
        x: bfloat16, float16 or float32 [images, channels, ...], contiguous.
        weight: [channels] of x's dtype, or None.
        bias: [channels] of x's dtype, or None.
        running_mean: [channels] of x's dtype, or None.
        running_var: [channels] of x's dtype, or None.
        training: Moments are those of x; else the running ones.
        momentum: Share of x's moments in the new running ones.
        eps: Added to the variance.

    Returns:
        The result in x's dtype; mean and 1 / sqrt(variance + eps) of each channel, float32; and the new running mean and variance, None where
        there is none.

    Raises:
        NotModelled: The dtype is another one.
    """
    given = Channels.of("batch_norm", x)
    w, b, means, variances = (_row("batch_norm", v) for v in (weight, bias, running_mean, running_var))
    values, fmt = given.values, given.fmt
    count = values.codes.shape[0]
    if training:
        if len(given.shape) > 2:
            mean, squares, _ = tree_moments(BATCH_NORM, _channel_tree(*_sizes(given)), values.codes)
        else:
            mean, squares, _ = tree_moments(CHANNELS_LAST, last_tree(*values.codes.shape), values.codes)
        mean, variance = (Value(v.codes.reshape(1, -1)) for v in (mean, squares / float(count)))
        scale = rsqrt(variance + eps)
        share = float(np.float32(momentum))
        rest = float(np.float32(1) - np.float32(momentum))
        unbiased = variance * float(np.float32(count / (count - 1))) if count > 1 else variance * float("inf")
        means = None if means is None else fma(mean, share, means * rest)
        variances = None if variances is None else fma(unbiased, share, variances * rest)
    else:
        if means is None or variances is None:
            raise ValueError("batch_norm: without training, expected running_mean and running_var")
        mean, scale = means, rsqrt(variances + eps)
    stored = [result_array(Value(v.codes[0]), F32) for v in (mean, scale)]
    centred = values - mean
    weighted = centred if w is None else w * centred
    found = fma(weighted, scale, as_value(0.0) if b is None else b)
    running = [None if v is None else result_array(Value(v.codes[0]), fmt) for v in (means, variances)]
    return given.result(found), stored[0], stored[1], running[0], running[1]


def _sizes(given: Channels) -> tuple[int, int]:
    return given.shape[0], given.inner


@lru_cache(maxsize=64)
def _channel_tree(images: int, inner: int) -> Node:
    """Return the moments of a channel: lanes and warps are joined neighbours first."""
    return thread_tree(channel_places(images, inner), far=False, least_warps=WARP)


@partial(jax.jit, static_argnames=("training",))
def batch_norm_backward(
    grad: ArrayLike, x: ArrayLike, weight: ArrayLike | None, mean: ArrayLike, rstd: ArrayLike, training: bool = True
) -> tuple[Array, Array, Array]:
    """Compute the gradients of `batch_norm` as PyTorch's `native_batch_norm_backward` on a GPU does.

    Args:
        grad: Gradient of the result, of x's dtype and shape.
        x: The operand.
        weight: The weight, or None.
        mean: The second result of `batch_norm`.
        rstd: The third one.
        training: As in `batch_norm`.

    Returns:
        The gradients of x, of the weight and of the bias, in x's dtype.

    Raises:
        NotModelled: The dtype is another one.
    """
    given, grads = Channels.of("batch_norm_backward", x), Channels.of("batch_norm_backward", grad)
    w, mean_, scale = (_row("batch_norm_backward", v) for v in (weight, mean, rstd))
    assert mean_ is not None and scale is not None
    centred, count = given.values - mean_, given.values.codes.shape[0]
    is_last = len(given.shape) == 2
    tree = last_tree(*centred.codes.shape) if is_last else thread_tree(channel_places(*_sizes(given)))
    total = Value(reduce_tree_values("sum", tree, grads.values.codes).reshape(1, -1))
    dot = Value(reduce_tree_values("products", tree, grads.values.codes, centred.codes).reshape(1, -1))
    norm = as_value(1.0) / float(count)
    factor = scale if w is None else scale * w
    if not training:
        found = grads.values * factor
    elif is_last:
        slope = dot * norm * scale * scale
        found = (grads.values - total * norm - centred * slope) * factor
    else:
        slope = dot * norm * scale * scale
        found = (fma(-centred, slope, grads.values) - total * norm) * factor
    of_weight, of_bias = (result_array(Value(v.codes[0]), given.fmt) for v in (dot * scale, total))
    return given.result(found), of_weight, of_bias
