"""PyTorch's reductions and softmax of the last axis as its CUDA kernels compute them: `ROW_OPERATORS` has a row an operator.

A row says which launch reduces (`ReduceCall`), how a term is taken, and what is computed before and after. Operands of bf16 and f16 are
widened to f32, and the result is rounded once.

Source: PyTorch 2.13.0, aten/src/ATen/native/cuda/Reduce.cuh and PersistentSoftmax.cuh; PyTorch 2.11.0, ReduceSumProdKernel.cu,
ReduceMomentKernel.cu, ReduceNormKernel.cu, ReduceMaxValuesKernel.cu, SoftMax.cu. Held to words of PyTorch 2.11.0 on an H200:
`tests/operations/functional/test_torch_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from tcemu.base.errors import NotModelled
from tcemu.engine.arithmetic.sum_tree import EMPTY, Chain, Join, Node
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes, to_float
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.operations.functional.torch_cuda.device_functions import Value, expf, fma, logf, rsqrt, sqrt, where
from tcemu.operations.functional.torch_cuda.elementwise import FORMATS, given_dtype, round_value
from tcemu.operations.functional.torch_cuda.reduce_plans import WARP, ReduceCall, is_vectorised_norm, norm_tree, reduce_tree
from tcemu.operations.functional.torch_cuda.reductions import VECTORISED, WELFORD_OPS, reduce_tree_values, tree_moments

MAX_WARP_ROW = 1024  # elements of a row that a warp of the softmax kernel holds in registers


class RowReduction(NamedTuple):
    """A reduction of rows.

    Attributes:
        kind: A key of `reductions.REDUCTIONS`.
        narrow_vector: Elements of a vector of 16-bit operands; of f32 a vector has 4.
        finish: Computes the result from the total, given the number of outputs and of all terms.
    """

    kind: str
    narrow_vector: int = 4
    finish: Callable[[Value, int, int], Value] = lambda total, outputs, terms: total


def _mean(total: Value, outputs: int, terms: int) -> Value:
    return total * float(np.float32(outputs) / np.float32(terms))


ROW_OPERATORS = {
    "sum": RowReduction("sum", 8),
    "mean": RowReduction("sum", finish=_mean),
    "norm": RowReduction("squares", finish=lambda total, outputs, terms: sqrt(total)),
    "prod": RowReduction("product"),
    "amax": RowReduction("largest"),
}


def reduce(name: str, x: ArrayLike, axis: int | None = -1, *, gpu: str = "H200") -> Array:
    """Reduce a contiguous array along its first or last axis, or all of it, as PyTorch's CUDA kernel does.

    Args:
        name: A key of ROW_OPERATORS: "sum", "mean", "norm", "prod" or "amax".
        x: bfloat16, float16 or float32.
        axis: The first or the last axis; None: all elements.
        gpu: "H100" or "H200": the launch depends on the number of multiprocessors.

    Returns:
        An array of x's dtype without the axis.

    Raises:
        NotModelled: The operator has no row, the axis lies between others, or the GPU is another one.
    """
    if name not in ROW_OPERATORS:
        raise NotModelled(f"{name}: no order is known of it; known are {', '.join(ROW_OPERATORS)} (torch_cuda/rows.py, ROW_OPERATORS)")
    row, (fmt, codes) = ROW_OPERATORS[name], _operand(name, x)
    shape = codes.shape
    rank = len(shape)
    if axis is not None and axis % max(rank, 1) not in (0, rank - 1):
        raise NotModelled(f"{name}: got axis {axis} of {rank}; expected the first or the last one, or None (torch_cuda/rows.py)")
    is_last = axis is not None and axis % rank == rank - 1
    kept = () if axis is None else shape[:-1] if is_last else shape[1:]
    outputs = int(np.prod(kept, dtype=int))
    vector = 4 if fmt == F32 else row.narrow_vector
    call = ReduceCall(codes.size // max(outputs, 1), outputs, axis is None or is_last, 4, vector, gpu)
    total = Value(reduce_tree_values(row.kind, reduce_tree(call), convert(fmt, F32, codes).reshape(-1)))
    return _result(row.finish(total, outputs, codes.size), fmt).reshape(kept)


def variance(x: ArrayLike, axis: int | None = -1, *, correction: int = 1, gpu: str = "H200") -> Array:
    """Return the variance of a contiguous f32 array along its last axis, or of all of it, as PyTorch's CUDA kernel computes it.

    Args:
        x: float32.
        axis: The last axis; None: all elements.
        correction: Subtracted from the number of elements in the divisor.
        gpu: As in `reduce`.

    Raises:
        NotModelled: The dtype, the axis or the GPU is another one.
    """
    fmt, codes = _operand("var", x)
    if fmt != F32 or (axis is not None and axis % codes.ndim != codes.ndim - 1):
        raise NotModelled(f"var: got {fmt} and axis {axis}; known are f32 and the last axis, or None (torch_cuda/rows.py)")
    kept = () if axis is None else codes.shape[:-1]
    outputs = int(np.prod(kept, dtype=int))
    call = ReduceCall(codes.size // max(outputs, 1), outputs, True, 2, 2, gpu)
    _, squares, count = tree_moments(WELFORD_OPS, reduce_tree(call), codes.reshape(-1))
    divisor = count - float(correction)
    return _result(squares / where(divisor > 0.0, divisor, 0.0), fmt).reshape(kept)


# ---- layer norm and RMS norm


def layer_norm(x: ArrayLike, weight: ArrayLike, bias: ArrayLike, eps: float) -> tuple[Array, Array, Array]:
    """Normalise the last axis as PyTorch's `native_layer_norm` on a GPU does.

    Args:
        x: bfloat16, float16 or float32 [..., N].
        weight: [N] of x's dtype.
        bias: [N] of x's dtype.
        eps: Added to the variance.

    Returns:
        The result in x's dtype, and mean and 1 / sqrt(variance + eps) of each row, f32 [..., 1].

    Raises:
        NotModelled: The dtype is another one.
    """
    fmt, rows = _rows("layer_norm", x)
    w, b = (Value(convert(fmt, F32, _operand("layer_norm", v)[1])) for v in (weight, bias))
    count, columns = rows.codes.shape
    vectorised = is_vectorised_norm(columns)
    mean, squares, _ = tree_moments(VECTORISED if vectorised else WELFORD_OPS, norm_tree(count, columns), rows.codes.reshape(-1))
    scale = rsqrt(squares / float(columns) + eps)
    column = lambda value: Value(value.codes[:, None])
    centred = rows - column(mean)
    found = fma(w, column(scale) * centred, b) if vectorised else fma(centred * column(scale), w, b)
    shape = jnp.shape(x)
    of_rows = [_result(value, F32).reshape(*shape[:-1], 1) for value in (mean, scale)]
    return _result(found, fmt).reshape(shape), of_rows[0], of_rows[1]


def rms_norm(x: ArrayLike, weight: ArrayLike, eps: float) -> Array:
    """Normalise the last axis by its root mean square as PyTorch's fused kernel does; arguments and result as in `layer_norm`.

    Raises:
        NotModelled: The dtype is another one, or N is no multiple of 4, for which another kernel is taken.
    """
    fmt, rows = _rows("rms_norm", x)
    count, columns = rows.codes.shape
    if not is_vectorised_norm(columns):
        raise NotModelled(f"rms_norm: got {columns} columns; known is the kernel for multiples of 4 (torch_cuda/rows.py)")
    w = Value(convert(fmt, F32, _operand("rms_norm", weight)[1]))
    squares = Value(reduce_tree_values("squares", norm_tree(count, columns), rows.codes.reshape(-1)))
    scale = Value(rsqrt(squares / float(columns) + eps).codes[:, None])
    return _result(w * (scale * rows), fmt).reshape(jnp.shape(x))


def _rows(name: str, x: ArrayLike) -> tuple[Format, Value]:
    fmt, codes = _operand(name, x)
    return fmt, Value(convert(fmt, F32, codes).reshape(-1, codes.shape[-1]))


def _operand(name: str, x: ArrayLike) -> tuple[Format, Array]:
    fmt, codes = array_codes(jnp.asarray(x))
    if fmt not in FORMATS:
        raise NotModelled(f"{name}: got {fmt}; expected bf16, f16 or f32 (torch_cuda/elementwise.py, FORMATS)")
    return fmt, codes


def _result(value: Value, fmt: Format) -> Array:
    return to_float(fmt, convert(F32, fmt, value.codes), given_dtype(fmt))


# ---- softmax of rows that a warp holds


@lru_cache(maxsize=64)
def warp_tree(rows: int, columns: int) -> Node:
    """Return the sums of rows, each by a warp whose lanes take every 32nd element in turn and are joined in halves."""
    width = min(WARP, 1 << max(columns - 1, 0).bit_length())
    turns = -(-columns // width)
    numbers = np.arange(turns * width).reshape(turns, 1, width)
    places = np.where(numbers < columns, numbers + np.arange(rows)[:, None] * columns, EMPTY)
    return Join(Chain(places.astype(np.int32)), "folded")


def _warp_rows(name: str, x: ArrayLike) -> tuple[Format, Value]:
    fmt, codes = _operand(name, x)
    if codes.ndim == 0 or codes.shape[-1] > MAX_WARP_ROW:
        raise NotModelled(
            f"{name}: got rows of {codes.shape[-1] if codes.ndim else 0} elements; known is the kernel of a warp, up to {MAX_WARP_ROW} "
            "(torch_cuda/rows.py)"
        )
    return fmt, Value(convert(fmt, F32, codes).reshape(-1, codes.shape[-1]))


def _warp_sum(x: Value) -> Value:
    return Value(reduce_tree_values("sum", warp_tree(*x.codes.shape), x.codes.reshape(-1))[:, None])


def softmax(x: ArrayLike, *, log: bool = False, dtype: DTypeLike | None = None) -> Array:
    """Compute the softmax of the last axis, or its logarithm, as PyTorch's kernel of a warp does.

    Args:
        x: bfloat16, float16 or float32, up to 1,024 elements a row.
        log: The logarithm.
        dtype: float32 for a result that is not rounded to x's dtype; None: x's dtype.

    Returns:
        An array of x's shape.

    Raises:
        NotModelled: A row is longer, or the dtype is another one.
    """
    fmt, rows = _warp_rows("log_softmax" if log else "softmax", x)
    largest = Value(reduce_tree_values("largest", warp_tree(*rows.codes.shape), rows.codes.reshape(-1))[:, None])
    shifted = rows - largest
    powers = expf(shifted)
    total = _warp_sum(powers)
    found = shifted - logf(total) if log else powers / total
    return _result(found, F32 if dtype is not None and np.dtype(dtype) == np.float32 else fmt).reshape(jnp.shape(x))


def softmax_backward(grad: ArrayLike, y: ArrayLike, *, log: bool = False) -> Array:
    """Compute the gradient of `softmax` from its result, as PyTorch's kernel of a warp does; arguments and errors as there."""
    name = "_log_softmax_backward_data" if log else "_softmax_backward_data"
    (fmt, grads), (_, results) = (_warp_rows(name, v) for v in (grad, y))
    if log:
        found = fma(-expf(results), _warp_sum(grads), grads)
    else:
        products = round_value(grads * results, fmt)  # PyTorch multiplies them before, as tensors
        found = fma(-results, _warp_sum(products), products)
    return _result(found, fmt).reshape(jnp.shape(y))
