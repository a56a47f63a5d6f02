"""PyTorch's layer norm, RMS norm and group norm, and their gradients, as its CUDA kernels compute them.

Where nvcc contracts a product and a sum, the formulas have `fma`; a product that is used twice is rounded. The contractions are those of
machine code that nvcc and ptxas 13.0 make of the same expressions for sm_90.

Source: PyTorch 2.11.0, aten/src/ATen/native/cuda: layer_norm_kernel.cu, group_norm_kernel.cu, block_reduce.cuh. Held to words of PyTorch
2.11.0 on an H200: `tests/operations/functional/test_torch_cuda.py`.
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
from tcemu.engine.arithmetic.sum_tree import Chain, Join, Node
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.operations.functional.torch_cuda.device_functions import Value, as_value, fma, rsqrt
from tcemu.operations.functional.torch_cuda.elementwise import round_value
from tcemu.operations.functional.torch_cuda.reduce_plans import (
    GPUS,
    MAX_THREADS,
    NORM_THREADS,
    NORM_VECTOR,
    WARP,
    is_vectorised_norm,
    strided_places,
    thread_tree,
)
from tcemu.operations.functional.torch_cuda.reductions import VECTORISED, WELFORD_OPS, reduce_tree_values, tree_moments
from tcemu.operations.functional.torch_cuda.rows import operand_codes, reduce, result_array

# (rows below which it is taken, threads in y that share a column, rows of a block in turn): LaunchGammaBetaBackwardCUDAKernel
WEIGHT_BLOCKS = ((64, 1, 8), (128, 8, 64), (256, 16, 128), (None, 32, 256))
MANY_ROWS, ROWS_OF_BLOCK, MAX_BLOCKS = 64 << 10, 32, 32 << 10  # rows from which blocks share a column, their rows, blocks
GROUP_TILE, FEW_IMAGES = 32, 128  # threads in y of group norm's gradients of weights, and images up to which one thread takes all


class Rows(NamedTuple):
    """An operand as rows: f32 values [columns, rows], and its format and shape."""

    values: Value
    fmt: Format
    shape: tuple[int, ...]

    def result(self, found: Value) -> Array:
        """Return values [columns, rows] in the operand's dtype and shape."""
        return result_array(Value(found.codes.T), self.fmt).reshape(self.shape)

    def of_rows(self, found: Value) -> Array:
        """Return values [rows] as f32 [..., 1]."""
        return result_array(found, F32).reshape(*self.shape[:-1], 1)


def _rows(name: str, x: ArrayLike) -> Rows:
    fmt, codes = operand_codes(name, x)
    columns = codes.shape[-1]
    return Rows(Value(convert(fmt, F32, codes).reshape(-1, columns).T), fmt, codes.shape)


def _values(name: str, x: ArrayLike) -> Value:
    fmt, codes = operand_codes(name, x)
    return Value(convert(fmt, F32, codes).reshape(-1))


def _column(name: str, x: ArrayLike | None) -> Value | None:
    return None if x is None else Value(_values(name, x).codes[:, None])


@lru_cache(maxsize=64)
def block_tree(length: int, threads: int, vector: int = 1) -> Node:
    """Return the sum of a row by places in it, as threads of a block take it, which load vectors."""
    return thread_tree(strided_places(length, threads, vector).astype(np.int32))


def norm_tree(columns: int) -> Node:
    """Return the sum of a row by places in it, as layer and RMS norm take it: by 128 threads that load vectors, or by 512 threads."""
    return block_tree(columns, NORM_THREADS, NORM_VECTOR) if is_vectorised_norm(columns) else block_tree(columns, MAX_THREADS)


@partial(jax.jit, static_argnames=("eps",))
def layer_norm(
    x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, eps: float = 1e-5
) -> tuple[Array, Array, Array]:
    """Normalise the last axis as PyTorch's `native_layer_norm` on a GPU does.

    Args:
        x: bfloat16, float16 or float32 [..., N].
        weight: [N] of x's dtype, or None.
        bias: [N] of x's dtype, or None.
        eps: Added to the variance.

    Returns:
        The result in x's dtype, and mean and 1 / sqrt(variance + eps) of each row, f32 [..., 1].

    Raises:
        NotModelled: The dtype is another one.
    """
    rows = _rows("layer_norm", x)
    w, b = (_column("layer_norm", v) for v in (weight, bias))
    values, columns = rows.values, rows.shape[-1]
    vectorised = is_vectorised_norm(columns)
    mean, squares, _ = tree_moments(VECTORISED if vectorised else WELFORD_OPS, norm_tree(columns), values.codes)
    scale = rsqrt(squares / float(columns) + eps)
    found = scale * (values - mean)
    if vectorised and w is None:
        found = found if b is None else fma(scale, values - mean, b)
    elif b is None:
        found = found * (as_value(1.0) if w is None else w)
    else:
        found = fma(found, as_value(1.0) if w is None else w, b)
    return rows.result(found), rows.of_rows(mean), rows.of_rows(scale)


@partial(jax.jit, static_argnames=("eps",))
def rms_norm(x: ArrayLike, weight: ArrayLike | None = None, eps: float = 1e-6) -> tuple[Array, Array]:
    """Normalise the last axis by its root mean square as PyTorch's `_fused_rms_norm` does.

    Args:
        x: bfloat16, float16 or float32 [..., N].
        weight: [N] of x's dtype, or None.
        eps: Added to the mean square.

    Returns:
        The result in x's dtype, and 1 / sqrt(mean square + eps) of each row, f32 [..., 1].

    Raises:
        NotModelled: The dtype is another one.
    """
    rows = _rows("rms_norm", x)
    w = _column("rms_norm", weight)
    values, columns = rows.values, rows.shape[-1]
    tree = norm_tree(columns)
    if is_vectorised_norm(columns):
        mean_square = Value(reduce_tree_values("squares", tree, values.codes)) / float(columns)
    else:
        mean, squares, _ = tree_moments(WELFORD_OPS, tree, values.codes)
        mean_square = fma(mean, mean, squares / float(columns))
    scale = rsqrt(mean_square + eps)
    found = scale * values
    return rows.result(found if w is None else found * w), rows.of_rows(scale)


@partial(jax.jit, static_argnames=("gpu",))
def layer_norm_backward(
    grad: ArrayLike, x: ArrayLike, mean: ArrayLike, rstd: ArrayLike, weight: ArrayLike | None = None, *, gpu: str = "H200"
) -> tuple[Array, Array, Array]:
    """Compute the gradients of `layer_norm` as PyTorch's `native_layer_norm_backward` on a GPU does.

    Args:
        grad: Gradient of the result, of x's dtype and shape.
        x: The operand [..., N].
        mean: The second result of `layer_norm`.
        rstd: The third one.
        weight: The weight, or None.
        gpu: As in `rows.reduce`.

    Returns:
        The gradients of x, of the weight and of the bias, in x's dtype.

    Raises:
        NotModelled: The dtype or the GPU is another one.
    """
    return _norm_gradients("layer_norm_backward", grad, x, mean, rstd, weight, gpu)


@partial(jax.jit, static_argnames=("gpu",))
def rms_norm_backward(
    grad: ArrayLike, x: ArrayLike, rstd: ArrayLike, weight: ArrayLike | None = None, *, gpu: str = "H200"
) -> tuple[Array, Array]:
    """Compute the gradients of `rms_norm` as PyTorch's `_fused_rms_norm_backward` does.

    Args:
        grad: Gradient of the result, of x's dtype and shape.
        x: The operand [..., N].
        rstd: The second result of `rms_norm`.
        weight: The weight, or None.
        gpu: As in `rows.reduce`.

    Returns:
        The gradients of x and of the weight, in x's dtype.

    Raises:
        NotModelled: The dtype or the GPU is another one.
    """
    return _norm_gradients("rms_norm_backward", grad, x, None, rstd, weight, gpu)[:2]


def _norm_gradients(
    name: str, grad: ArrayLike, x: ArrayLike, mean: ArrayLike | None, rstd: ArrayLike, weight: ArrayLike | None, gpu: str
) -> tuple[Array, Array, Array]:
    """Return the gradients of x, of the weight and of the bias; without a mean, those of RMS norm."""
    rows, grads, scale, w = _rows(name, x), _rows(name, grad), _values(name, rstd), _column(name, weight)
    centred = rows.values if mean is None else rows.values - _values(name, mean)
    columns = rows.shape[-1]
    tree = block_tree(columns, NORM_THREADS, NORM_VECTOR)
    weighted = grads.values if w is None else grads.values * w
    dot = Value(reduce_tree_values("products", tree, (weighted * centred).codes, jnp.broadcast_to(scale.codes, weighted.codes.shape)))
    factor = as_value(float(columns)) if w is None else w * float(columns)
    found = fma(factor, grads.values, -(centred * scale * dot))
    found = found if mean is None else found - Value(reduce_tree_values("sum", tree, weighted.codes))
    found = found * (1.0 / as_value(float(columns)) * scale)
    return rows.result(found), *_weight_gradients(rows, grads, centred, scale, gpu)


def _weight_gradients(rows: Rows, grads: Rows, centred: Value, scale: Value, gpu: str) -> tuple[Array, Array]:
    """Return the sums of grad * centred * scale and of grad over the rows."""
    columns, count = centred.codes.shape
    by_row = lambda value: jnp.broadcast_to(value.codes, (columns, count)).T  # [rows, columns]
    products, scales, terms = by_row(grads.values * centred), by_row(scale), by_row(grads.values)
    if count > MANY_ROWS and columns // WARP < GPUS[gpu][0] // 2:  # each block takes 32 rows in turn, and rounds its sum
        blocks = min(MAX_BLOCKS // -(-columns // WARP), -(-count // ROWS_OF_BLOCK))
        tree = Chain(strided_places(count, blocks, ROWS_OF_BLOCK).astype(np.int32))
    else:
        blocks, tree = 1, weight_tree(count)
    found = (Value(reduce_tree_values("products", tree, products, scales)), Value(reduce_tree_values("sum", tree, terms)))
    results = tuple(result_array(each, rows.fmt) for each in found)
    of_weight, of_bias = results if blocks == 1 else (reduce("sum", each, 0, gpu=gpu) for each in results)
    return of_weight, of_bias


@lru_cache(maxsize=64)
def weight_tree(rows: int) -> Node:
    """Return the sum over rows of the gradients of weights: threads in y take some rows in turn, and are joined in halves."""
    _, threads, block = next(each for each in WEIGHT_BLOCKS if each[0] is None or rows < each[0])
    return Join(Chain(strided_places(rows, threads, block // threads).astype(np.int32)), "folded")


# ---- group norm


class Groups(NamedTuple):
    """The axes of group norm's operand: images, channels, groups, and elements of a channel."""

    images: int
    channels: int
    groups: int
    inner: int


def _groups(shape: tuple[int, ...], groups: int) -> Groups:
    return Groups(shape[0], shape[1], groups, int(np.prod(shape[2:], dtype=int)))


def group_tree(length: int) -> Node:
    """Return the sum of a group of group norm by places in it: by a warp if it is short."""
    return block_tree(length, WARP if length < MAX_THREADS else MAX_THREADS)


@partial(jax.jit, static_argnames=("groups", "eps"))
def group_norm(
    x: ArrayLike, groups: int, weight: ArrayLike | None = None, bias: ArrayLike | None = None, eps: float = 1e-5
) -> tuple[Array, Array, Array]:
    """Normalise groups of channels as PyTorch's `native_group_norm` on a GPU does.

    Args:
        x: bfloat16, float16 or float32 [images, channels, ...], contiguous.
        groups: Number of groups.
        weight: [channels] of x's dtype, or None.
        bias: [channels] of x's dtype, or None.
        eps: Added to the variance, rounded to x's dtype.

    Returns:
        The result, and mean and 1 / sqrt(variance + eps) of each group [images, groups], all in x's dtype.

    Raises:
        NotModelled: The dtype is another one.
    """
    fmt, codes = operand_codes("group_norm", x)
    axes = _groups(codes.shape, groups)
    each = axes.channels // groups  # channels of a group
    length = each * axes.inner
    values = Value(convert(fmt, F32, codes).reshape(axes.images * groups, length))
    mean, squares, _ = tree_moments(WELFORD_OPS, group_tree(length), values.codes.T)
    mean, scale = (round_value(v, fmt) for v in (mean, rsqrt(squares / float(length) + round_value(as_value(eps), fmt))))
    w, b = (None if v is None else _values("group_norm", v) for v in (weight, bias))
    of_channel = lambda value: Value(jnp.repeat(value.codes.reshape(axes.images, groups), each, axis=1))  # [images, channels]
    if axes.inner == 1 or (w is None and b is None):
        found = (values - Value(mean.codes[:, None])) * Value(scale.codes[:, None])
        found = Value(found.codes.reshape(axes.images, axes.channels, axes.inner))
        if w is not None and b is not None:
            found = fma(found, Value(w.codes[:, None]), Value(b.codes[:, None]))
        elif w is not None:
            found = found * Value(w.codes[:, None])
        elif b is not None:
            shifted = (values - Value(mean.codes[:, None])).codes.reshape(axes.images, axes.channels, axes.inner)
            found = fma(Value(shifted), Value(of_channel(scale).codes[..., None]), Value(b.codes[:, None]))
    else:
        factor = of_channel(scale) if w is None else of_channel(scale) * w
        shift = (0.0 if b is None else b) - factor * of_channel(mean)  # not contracted: the factor is stored
        spread = Value(values.codes.reshape(axes.images, axes.channels, axes.inner))
        found = fma(Value(factor.codes[..., None]), spread, Value(shift.codes[..., None]))
    of_groups = [result_array(value, fmt).reshape(axes.images, groups) for value in (mean, scale)]
    return result_array(found, fmt).reshape(codes.shape), of_groups[0], of_groups[1]


@partial(jax.jit, static_argnames=("groups",))
def group_norm_backward(
    grad: ArrayLike, x: ArrayLike, mean: ArrayLike, rstd: ArrayLike, groups: int, weight: ArrayLike | None = None
) -> tuple[Array, Array, Array]:
    """Compute the gradients of `group_norm` as PyTorch's `native_group_norm_backward` on a GPU does.

    Args:
        grad: Gradient of the result, of x's dtype and shape.
        x: The operand [images, channels, ...].
        mean: The second result of `group_norm`.
        rstd: The third one.
        groups: Number of groups.
        weight: The weight, or None.

    Returns:
        The gradients of x, of the weight and of the bias, in x's dtype.

    Raises:
        NotModelled: The dtype is another one, or 16-bit with no further axes.
    """
    fmt, codes = operand_codes("group_norm_backward", x)
    axes = _groups(codes.shape, groups)
    if axes.inner == 1 and fmt != F32:
        raise NotModelled(
            f"group_norm_backward: got {fmt} [images, channels]; known are f32, and operands with further axes (torch_cuda/norms.py)"
        )
    each = axes.channels // groups
    shape = (axes.images, axes.channels, axes.inner)
    values, grads = (Value(_values("group_norm_backward", v).codes.reshape(shape)) for v in (x, grad))
    centre, scale = (Value(_values("group_norm_backward", v).codes.reshape(axes.images, groups)) for v in (mean, rstd))
    w = Value(jnp.full(axes.channels, as_value(1.0).codes)) if weight is None else _values("group_norm_backward", weight)
    of_channel = lambda value: Value(jnp.repeat(value.codes, each, axis=1))  # [images, channels]
    if axes.inner == 1:
        x1, dy1 = Value(values.codes[..., 0]), Value(grads.codes[..., 0])
        firsts = ((dy1 * x1).codes, jnp.broadcast_to(w.codes, x1.codes.shape))
        seconds = (dy1.codes, firsts[1])
        of_dot = fma(dy1, x1, -(dy1 * of_channel(centre)))
        of_bias = dy1
    else:
        tree = group_tree(axes.inner)
        first = lambda value: jnp.moveaxis(value.codes, 2, 0)
        dot, total = (
            Value(reduce_tree_values("products", tree, first(grads), first(values))),
            Value(reduce_tree_values("sum", tree, first(grads))),
        )
        weights = jnp.broadcast_to(w.codes, dot.codes.shape)
        firsts, seconds = (dot.codes, weights), (total.codes, weights)
        of_dot, of_bias = fma(-total, of_channel(centre), dot), total
    tree = group_tree(each)
    grouped = lambda pair: tuple(jnp.moveaxis(v.reshape(axes.images, groups, each), 2, 0) for v in pair)
    sum1, sum2 = (Value(reduce_tree_values("products", tree, *grouped(pair))) for pair in (firsts, seconds))
    share = 1.0 / as_value(float(each * axes.inner))
    c2 = fma(sum2, centre, -sum1) * scale * scale * scale * share
    c3 = fma(-c2, centre, -(sum2 * scale * share))
    wide = lambda value: Value(of_channel(value).codes[..., None])
    c1 = Value((of_channel(scale) if weight is None else of_channel(scale) * w).codes[..., None])
    found = fma(c1, grads, wide(c2) * values) + wide(c3)
    scales = of_channel(scale)
    tree = _image_tree(axes.images)
    of_weight = Value(reduce_tree_values("products", tree, of_dot.codes, scales.codes))
    bias = Value(reduce_tree_values("sum", tree, of_bias.codes))
    return result_array(found, fmt).reshape(codes.shape), result_array(of_weight, fmt), result_array(bias, fmt)


@lru_cache(maxsize=64)
def _image_tree(images: int) -> Node:
    """Return the sum over images of group norm's gradients of weights."""
    if images <= FEW_IMAGES:
        return Chain(np.arange(images, dtype=np.int32))
    return Join(Chain(strided_places(images, GROUP_TILE).astype(np.int32)), "folded")
