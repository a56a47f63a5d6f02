"""PyTorch's sort and topk with the indices that its CUDA kernels give for equal elements.

Up to 32 elements are sorted by a bitonic network of 32, which is not stable; more by stable sorts. topk takes the elements beyond the k-th
in the order of their indices, then those that equal it, and sorts them so. Two zeros of unlike sign are equal for a sort, but not for the
choice of topk.

Source: PyTorch 2.11.0, aten/src/ATen/native/cuda/bitonicSort.cuh, Sort.cu, TensorTopK.cu, SortingRadixSelect.cuh. Held to words of PyTorch
2.11.0 on an H200: `tests/operations/functional/test_torch_cuda.py`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.engine.arithmetic.f32_arithmetic import is_nan_f32
from tcemu.engine.arithmetic.special_functions import MAGNITUDE, SIGN
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.functional.torch_cuda.rows import operand_codes

NETWORK = 32  # elements that the bitonic network sorts


@partial(jax.jit, static_argnames=("axis", "descending"))
def sort(x: ArrayLike, axis: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """Sort along an axis as PyTorch's `sort` on a GPU does.

    Args:
        x: bfloat16, float16 or float32.
        axis: The axis.
        descending: The largest element first. NaN is larger than every number.

    Returns:
        The sorted array, and the indices of its elements along the axis, int32.

    Raises:
        NotModelled: The dtype is another one.
    """
    x, keys = _rows("sort", x, axis)
    indices = jnp.broadcast_to(jnp.arange(keys.shape[-1]), keys.shape)
    order = _sorted(_equal_zeros(keys), indices, descending)
    return _take(x, order, axis)


@partial(jax.jit, static_argnames=("k", "axis", "largest"))
def topk(x: ArrayLike, k: int, axis: int = -1, largest: bool = True) -> tuple[Array, Array]:
    """Return the k largest or smallest elements along an axis, sorted, as PyTorch's `topk` on a GPU does.

    Args:
        x: bfloat16, float16 or float32.
        k: Number of elements, at most the length of the axis.
        axis: The axis.
        largest: The largest elements; else the smallest.

    Returns:
        The elements, and their indices along the axis, int32.

    Raises:
        NotModelled: The dtype is another one.
    """
    x, keys = _rows("topk", x, axis)
    length = keys.shape[-1]
    best = jnp.argsort(~keys if largest else keys, axis=-1, stable=True)[..., :k]
    chosen = jnp.take_along_axis(keys, best, -1)
    is_last = chosen == chosen[..., -1:]
    gathered = jnp.sort(jnp.where(is_last, best + length, best), axis=-1) % length
    return _take(x, _sorted(_equal_zeros(jnp.take_along_axis(keys, gathered, -1)), gathered, largest), axis)


def _rows(name: str, x: ArrayLike, axis: int) -> tuple[Array, Array]:
    """Return the array, and keys uint32 [..., length] that increase with its elements; -0 is below +0, NaN above all."""
    fmt, codes = operand_codes(name, x)
    wide = jnp.moveaxis(convert(fmt, F32, codes), axis, -1)
    keys = jnp.where(wide >= SIGN, ~wide, wide | SIGN)
    return jnp.asarray(x), jnp.where(is_nan_f32(wide), np.uint32(0xFFFFFFFF), keys)


def _equal_zeros(keys: Array) -> Array:
    return jnp.where(keys == MAGNITUDE, SIGN, keys)  # the key of -0 is MAGNITUDE, the key of +0 is SIGN


def _sorted(keys: Array, indices: Array, descending: bool) -> Array:
    """Return indices [..., n] in the order of their keys."""
    keys = ~keys if descending else keys
    if keys.shape[-1] > NETWORK:
        return jnp.take_along_axis(indices, jnp.argsort(keys, axis=-1, stable=True), -1)
    return _network(keys, indices)


def _network(keys: Array, indices: Array) -> Array:
    """Sort by Batcher's bitonic network, whose last stage exchanges equal elements. Missing elements come last."""
    length = keys.shape[-1]
    pad = [(0, 0)] * (keys.ndim - 1) + [(0, NETWORK - length)]
    state = (jnp.pad(keys, pad), jnp.pad(indices, pad), jnp.broadcast_to(jnp.arange(NETWORK) < length, (*keys.shape[:-1], NETWORK)))
    threads = np.arange(NETWORK // 2)
    sizes = [2**i for i in range(1, NETWORK.bit_length() - 1)]
    steps = [(stride, (threads & (size // 2)) != 0) for size in sizes for stride in _strides(size)]
    steps += [(stride, np.zeros(NETWORK // 2, bool)) for stride in _strides(NETWORK)]
    for stride, flag in steps:
        lower = 2 * threads - (threads & (stride - 1))
        upper = lower + stride
        a, b = (tuple(part[..., places] for part in state) for places in (lower, upper))
        exchange = (((a[0] < b[0]) & a[2]) | ~b[2]) == flag
        back = np.argsort(np.concatenate([lower, upper]))
        pick = lambda x, y, exchange=exchange: jnp.where(exchange, y, x)
        state = tuple(jnp.concatenate([pick(x, y), pick(y, x)], axis=-1)[..., back] for x, y in zip(a, b, strict=True))
    return state[1][..., :length]


def _strides(size: int) -> list[int]:
    return [size >> i for i in range(1, size.bit_length())]


def _take(x: Array, order: Array, axis: int) -> tuple[Array, Array]:
    order = jnp.moveaxis(order, -1, axis)
    return jnp.take_along_axis(x, order, axis), order.astype(jnp.int32)
