"""PyTorch's softmax, log-softmax and their gradients along any axis as its CUDA kernels compute them.

A row of the last axis is summed by a warp if it is short, else by a block: whose threads hold single elements in registers, vectors in
shared memory, or vectors of a row that may begin within one. Along another axis the threads of a block share a sum in y.

Source: PyTorch 2.11.0, aten/src/ATen/native/cuda/SoftMax.cu, PersistentSoftmax.cuh, block_reduce.cuh; aten/src/ATen/native/ReduceOps.cpp
(`logsumexp`). Held to words of PyTorch 2.11.0 on an H200: `tests/operations/functional/test_torch_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from tcemu.engine.arithmetic.special_functions import INFINITY, MAGNITUDE
from tcemu.engine.arithmetic.sum_tree import EMPTY, Chain, Join, Node
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.number_formats import F16, F32, Format
from tcemu.operations.functional.torch_cuda.device_functions import Value, expf, fma, logf, where
from tcemu.operations.functional.torch_cuda.elementwise import round_value
from tcemu.operations.functional.torch_cuda.reduce_plans import WARP, strided_places, thread_tree
from tcemu.operations.functional.torch_cuda.reductions import compute_by_shift, reduce_tree_values
from tcemu.operations.functional.torch_cuda.rows import operand_codes, reduce, result_array

VECTOR_BYTES = 16
MAX_THREADS = 1024
MAX_WARP_ROW = {True: 2048, False: 1024}  # elements of a row that a warp holds: forward, and backward or from f16 to f32
MAX_REGISTERS = 9  # elements of a row that a thread holds
SHARED_BYTES = 48 << 10  # shared memory of a block
SPATIAL_LANES, LEAST_SHARED_AXIS = 64, 64  # neighbours up to which, and length from which the threads in y share a sum


class RowKernel(NamedTuple):
    """The form in which a kernel reduces a row of the last axis.

    Attributes:
        vector: Elements of a vector; 1: single elements.
        threads: Threads of a block; 32 or fewer: a warp.
        is_shifted: A row may begin within a vector; its first elements are taken alone.
        ascending: Threads, and then warps, are added one after the other; else in halves.
    """

    vector: int
    threads: int
    is_shifted: bool = False
    ascending: bool = False


def forward_kernel(columns: int, fmt: Format, *, widens: bool = False) -> RowKernel:
    """Return the kernel of softmax for rows of the last axis. widens: f16 operands with an f32 result."""
    if columns <= MAX_WARP_ROW[not widens]:
        return _warp_kernel(columns)
    vector, size = VECTOR_BYTES * 8 // fmt.bits, fmt.bits // 8
    threads = min(columns, MAX_THREADS)
    threads = -(-threads // WARP) * WARP
    if not widens and -(-columns // threads) <= MAX_REGISTERS:
        return RowKernel(1, threads)
    fits = columns < (SHARED_BYTES - threads // WARP * 4) // size
    return RowKernel(vector, threads, not (fits and columns % vector == 0))


def backward_kernel(columns: int, fmt: Format) -> RowKernel:
    """Return the kernel of softmax's gradient for rows of the last axis."""
    if columns <= MAX_WARP_ROW[False]:
        return _warp_kernel(columns)
    vector, size = VECTOR_BYTES * 8 // fmt.bits, fmt.bits // 8
    threads = max(WARP, 1 << (min(columns // vector, MAX_THREADS) // 2 - 1).bit_length())
    fits = columns < (SHARED_BYTES - threads // WARP * 4) // size
    is_shifted = not (fits and columns % vector == 0)
    return RowKernel(vector, threads, is_shifted, ascending=is_shifted)


def _warp_kernel(columns: int) -> RowKernel:
    return RowKernel(1, min(WARP, 1 << max(columns - 1, 0).bit_length()))


@lru_cache(maxsize=64)
def kernel_tree(kernel: RowKernel, columns: int, shift: int = 0) -> Node:
    """Return the sum of a row by places in the row. shift: elements by which the row begins after a vector's boundary."""
    places = _shifted_places(kernel, columns, shift) if kernel.is_shifted else strided_places(columns, kernel.threads, kernel.vector)
    if kernel.ascending:
        warps = places.reshape(len(places), kernel.threads // WARP, WARP).astype(np.int32)
        return Join(Join(Chain(warps), from_zero=True), from_zero=True)
    return thread_tree(places.astype(np.int32))


def _shifted_places(kernel: RowKernel, columns: int, shift: int) -> np.ndarray:
    """Return the elements of each thread [T, threads]: up to one before the first whole vector, vectors, and single elements."""
    threads, vector = kernel.threads, kernel.vector
    head = threads - shift if shift else 0
    vectors = (columns - head) // (vector * threads) * threads * vector
    parts = []
    if shift:
        numbers = np.arange(threads) - shift
        parts.append(np.where(numbers >= 0, numbers, EMPTY)[None])
    for first, count, width in ((head, vectors, vector), (head + vectors, columns - head - vectors, 1)):
        places = strided_places(count, threads, width)
        parts.append(np.where(places == EMPTY, EMPTY, places + first))
    return np.concatenate(parts)


@lru_cache(maxsize=64)
def spatial_tree(length: int, inner: int) -> Node:
    """Return the sum along an axis that is not the last one. inner: number of elements of the axes behind it."""
    threads = 1
    if min(inner, MAX_THREADS) <= SPATIAL_LANES and length >= LEAST_SHARED_AXIS:
        while inner * threads * 2 <= MAX_THREADS and threads * 2 <= length:
            threads *= 2
    return Join(Chain(strided_places(length, threads).astype(np.int32)), "folded")


class Axis(NamedTuple):
    """An operand's elements along an axis, which comes first: [length, outer * inner]."""

    shape: tuple[int, ...]
    axis: int
    inner: int

    def split(self, codes: Array) -> Array:
        return jnp.moveaxis(codes, self.axis, 0).reshape(self.shape[self.axis], -1)

    def join(self, codes: Array) -> Array:
        rest = self.shape[: self.axis] + self.shape[self.axis + 1 :]
        return jnp.moveaxis(codes.reshape(self.shape[self.axis], *rest), 0, self.axis)


def _axis(shape: tuple[int, ...], axis: int) -> Axis:
    axis = axis % len(shape)
    return Axis(shape, axis, int(np.prod(shape[axis + 1 :], dtype=int)))


def _reduce_rows(kind: str, kernel: RowKernel, terms: Array) -> Array:
    """Reduce f32 codes [length, rows] along their first axis; the rows lie one after the other in memory."""
    compute = lambda shift, terms: reduce_tree_values(kind, kernel_tree(kernel, len(terms), shift), terms)
    return compute_by_shift(compute, terms, kernel.vector) if kernel.is_shifted else compute(0, terms)


def _reducer(along: Axis, kernel: Callable[[], RowKernel]) -> Callable[[str, Array], Value]:
    """Return the function that reduces f32 codes [length, outer * inner] along the axis, by the kind of the reduction."""
    length = along.shape[along.axis]
    if along.inner == 1:
        how = kernel()
        return lambda kind, terms: Value(_reduce_rows(kind, how, terms))
    tree = spatial_tree(length, along.inner)
    return lambda kind, terms: Value(reduce_tree_values(kind, tree, terms))


@partial(jax.jit, static_argnames=("axis", "log", "dtype"))
def softmax(x: ArrayLike, axis: int = -1, *, log: bool = False, dtype: DTypeLike | None = None) -> Array:
    """Compute the softmax along an axis, or its logarithm, as PyTorch's kernels do.

    Args:
        x: bfloat16, float16 or float32, contiguous in PyTorch.
        axis: The axis.
        log: The logarithm.
        dtype: float32 for a result that is not rounded to x's dtype; None: x's dtype.

    Returns:
        An array of x's shape.

    Raises:
        NotModelled: The dtype is another one.
    """
    fmt, codes = operand_codes("log_softmax" if log else "softmax", x)
    target = F32 if dtype is not None and np.dtype(dtype) == np.float32 else fmt
    widens = fmt == F16 and target == F32
    source = fmt if widens else target  # PyTorch converts bf16 to f32 before, and widens f16 within the kernel
    if codes.size == 0:
        return result_array(Value(convert(fmt, F32, codes)), target)
    along = _axis(codes.shape or (1,), axis)
    values = Value(along.split(convert(fmt, F32, codes).reshape(along.shape)))
    total_of = _reducer(along, lambda: forward_kernel(along.shape[along.axis], source, widens=widens))
    shifted = values - total_of("largest", values.codes)
    powers = expf(shifted)
    total = total_of("sum", powers.codes)
    found = shifted - logf(total) if log else powers / total
    return result_array(Value(along.join(found.codes)), target).reshape(codes.shape)


def log_softmax(x: ArrayLike, axis: int = -1, *, dtype: DTypeLike | None = None) -> Array:
    """Compute the logarithm of the softmax along an axis; arguments, result and errors as in `softmax`."""
    return softmax(x, axis, log=True, dtype=dtype)


@partial(jax.jit, static_argnames=("axis", "log", "dtype"))
def softmax_backward(grad: ArrayLike, y: ArrayLike, axis: int = -1, *, log: bool = False, dtype: DTypeLike | None = None) -> Array:
    """Compute the gradient of `softmax` from its result, as PyTorch's kernels do (`_softmax_backward_data`).

    Args:
        grad: Gradient of the result, of y's dtype.
        y: The result of `softmax`.
        axis: The axis.
        log: The logarithm.
        dtype: float16 if y is the float32 result of a float16 operand; None: y's dtype.

    Returns:
        The gradient of the operand.

    Raises:
        NotModelled: The dtype is another one.
    """
    name = "_log_softmax_backward_data" if log else "_softmax_backward_data"
    (fmt, grads), (_, results) = (operand_codes(name, v) for v in (grad, y))
    target = fmt if dtype is None else {2: F16, 4: F32}[np.dtype(dtype).itemsize] if fmt == F32 else fmt
    if results.size == 0:
        return result_array(Value(convert(fmt, F32, results)), target)
    along = _axis(results.shape or (1,), axis)
    values, output = (Value(along.split(convert(fmt, F32, v).reshape(along.shape))) for v in (grads, results))
    total_of = _reducer(along, partial(backward_kernel, along.shape[along.axis], fmt))
    if log:
        found = fma(-expf(output), total_of("sum", values.codes), values)
    else:
        products = round_value(values * output, fmt)  # PyTorch multiplies them before, as tensors
        found = fma(-output, total_of("sum", products.codes), products)
    return result_array(Value(along.join(found.codes)), target).reshape(results.shape)


def log_softmax_backward(grad: ArrayLike, y: ArrayLike, axis: int = -1, *, dtype: DTypeLike | None = None) -> Array:
    """Compute the gradient of `log_softmax` from its result; arguments, result and errors as in `softmax_backward`."""
    return softmax_backward(grad, y, axis, log=True, dtype=dtype)


@partial(jax.jit, static_argnames=("axis", "gpu"))
def logsumexp(x: ArrayLike, axis: int = -1, *, gpu: str = "H200") -> Array:
    """Compute the logarithm of the sum of powers along an axis, as PyTorch does: a maximum, a difference, powers, a sum.

    Args:
        x: bfloat16, float16 or float32. Each step is rounded to its dtype.
        axis: The axis.
        gpu: As in `rows.reduce`.

    Raises:
        NotModelled: The dtype or the GPU is another one.
    """
    fmt, codes = operand_codes("logsumexp", x)
    _, maximum = operand_codes("logsumexp", reduce("amax", x, axis, gpu=gpu))
    largest = Value(convert(fmt, F32, maximum))
    largest = where(largest.codes & MAGNITUDE == INFINITY, 0.0, largest)
    shifted = round_value(Value(convert(fmt, F32, codes)) - Value(jnp.expand_dims(largest.codes, axis)), fmt)
    powers = result_array(expf(shifted), fmt)
    _, total = operand_codes("logsumexp", reduce("sum", powers, axis, gpu=gpu))
    return result_array(round_value(logf(Value(convert(fmt, F32, total))), fmt) + largest, fmt)
