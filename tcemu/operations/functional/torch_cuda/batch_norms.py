"""PyTorch's batch norm and its gradients as its own CUDA kernels compute them, which `native_batch_norm` calls.

A block takes a channel of contiguous images: its threads in x take neighbouring elements, those in y images. Where one element is behind
each channel, channels are innermost: there the threads in y share a channel, and each thread has four chains.

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

from tcemu.base.errors import NotModelled
from tcemu.engine.arithmetic.sum_tree import EMPTY, Chain, Join, Node
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.operations.functional.torch_cuda.device_functions import Value, as_value, fma, rsqrt
from tcemu.operations.functional.torch_cuda.elementwise import round_value
from tcemu.operations.functional.torch_cuda.reduce_plans import WARP, strided_places, thread_tree, unrolled_places
from tcemu.operations.functional.torch_cuda.reductions import (
    BATCH_NORM,
    CHANNELS_LAST,
    DEVICE,
    REDUCTIONS,
    Parts,
    reduce_tree_values,
    tree_moments,
)
from tcemu.operations.functional.torch_cuda.rows import operand_codes, result_array

THREADS = (32, 64, 128, 256, 512)  # threads in x: the least number that takes all neighbouring elements
CHAINS = 4  # of a thread, where channels are innermost
LAST_ROWS, MOST_BLOCKS = 16, 7  # rows of a thread to which a launch is fitted; up to as many blocks, one takes all rows


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

    @property
    def is_last(self) -> bool:
        """True if the channels are innermost in memory."""
        return self.inner == 1

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


@lru_cache(maxsize=64)
def last_tree(rows: int, channels: int) -> Node:
    """Return the sums of a channel that is innermost by threads: each joins four chains.

    Raises:
        NotModelled: Several blocks share a channel.

    Source: Normalization.cuh, flexible_launch_configs.
    """
    power = lambda n: 1 << (max(n, 1).bit_length() - 1)
    threads = min(power(-(-rows // LAST_ROWS)), THREADS[-1] // min(power(channels), WARP))
    if rows > MOST_BLOCKS * threads * LAST_ROWS:
        raise NotModelled(
            f"batch_norm: got {rows} rows of {channels} channels; known are rows that one block adds (torch_cuda/batch_norms.py)"
        )
    return Join(Chain(unrolled_places(rows, threads, CHAINS).astype(np.int32)))


def _last_moments(codes: Array) -> Parts:
    """Return the moments of channels that are innermost: of threads, and then of halves of threads."""
    parts = tree_moments(CHANNELS_LAST, last_tree(*codes.shape), codes)
    while parts[0].codes.shape[0] > 1:
        half = parts[0].codes.shape[0] // 2
        halves = [tuple(Value(v.codes[own]) for v in parts) for own in (slice(half), slice(half, None))]
        parts = BATCH_NORM.join(DEVICE, *halves)  # type: ignore[arg-type]
    return parts


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
        The result in x's dtype; mean and 1 / sqrt(variance + eps) of each channel, float32; and the new running mean and
        variance, each None if it was None.

    Raises:
        NotModelled: The dtype is another one, or several blocks share a channel.
    """
    given = Channels.of("batch_norm", x)
    w, b, means, variances = (_row("batch_norm", v) for v in (weight, bias, running_mean, running_var))
    values, fmt = given.values, given.fmt
    count = values.codes.shape[0]
    if training:
        if given.is_last:
            mean, squares, _ = _last_moments(values.codes)
        else:
            tree = thread_tree(channel_places(given.shape[0], given.inner), far=False, least_warps=WARP)
            mean, squares, _ = tree_moments(BATCH_NORM, tree, values.codes)
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


def _sum_of_pairs(fmt: Format, terms: Array, tree: Node) -> Value:
    """Add terms; a 16-bit operand's sums are rounded to its format on their way to another thread (`Float2` has such a constructor)."""
    plain = REDUCTIONS["sum"]
    rounded = plain._replace(join=lambda x, y: plain.join(x, round_value(Value(y), fmt).codes))
    how = plain if fmt == F32 else rounded
    return Value(reduce_tree_values(how, tree, terms).reshape(1, -1))


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
        NotModelled: The dtype is another one, or several blocks share a channel.
    """
    given, grads = Channels.of("batch_norm_backward", x), Channels.of("batch_norm_backward", grad)
    w, mean_, scale = (_row("batch_norm_backward", v) for v in (weight, mean, rstd))
    assert mean_ is not None and scale is not None
    centred, count = given.values - mean_, given.values.codes.shape[0]
    if given.is_last:
        tree = Join(last_tree(*centred.codes.shape), "folded")
        total = Value(reduce_tree_values("sum", tree, grads.values.codes).reshape(1, -1))
        dot = Value(reduce_tree_values("products", tree, grads.values.codes, centred.codes).reshape(1, -1))
    else:
        tree = thread_tree(channel_places(given.shape[0], given.inner))
        total = _sum_of_pairs(given.fmt, grads.values.codes, tree)
        if given.fmt == F32:
            dot = Value(reduce_tree_values("products", tree, grads.values.codes, centred.codes).reshape(1, -1))
        else:
            dot = _sum_of_pairs(given.fmt, round_value(grads.values * centred, given.fmt).codes, tree)
    norm = as_value(1.0) / float(count)
    factor = scale if w is None else scale * w
    if not training:
        found = grads.values * factor
    elif given.is_last:
        # the order of the products, and which are fused, were chosen by words of [700, 33]
        found = fma(-centred, scale * scale * dot * norm, fma(-total, norm, grads.values)) * factor
    else:
        slope = dot * norm * scale * scale
        found = (fma(-centred, slope, grads.values) - total * norm) * factor
    of_weight, of_bias = (result_array(Value(v.codes[0]), given.fmt) for v in (dot * scale, total))
    return given.result(found), of_weight, of_bias
