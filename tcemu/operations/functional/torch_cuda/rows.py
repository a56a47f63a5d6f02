"""PyTorch's reductions as its CUDA kernels compute them: `ROW_OPERATORS` has a row an operator.

A row says which launch reduces (`ReduceCall`), how a term is taken, and what is computed before and after. Operands of bf16 and f16 are
widened to f32, and the result is rounded once.

Source: PyTorch 2.13.0, aten/src/ATen/native/cuda/Reduce.cuh; PyTorch 2.11.0, ReduceSumProdKernel.cu, ReduceMomentKernel.cu,
ReduceNormKernel.cu, ReduceMaxValuesKernel.cu. Held to words of PyTorch 2.11.0 on an H200: `tests/operations/functional/test_torch_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.base.errors import NotModelled
from tcemu.engine.arithmetic.sum_tree import EMPTY, Chain, Join, Node
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes, to_float
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.operations.functional.torch_cuda.device_functions import Value, sqrt, where
from tcemu.operations.functional.torch_cuda.elementwise import FORMATS, given_dtype
from tcemu.operations.functional.torch_cuda.reduce_plans import WARP, ReduceCall, reduce_tree
from tcemu.operations.functional.torch_cuda.reductions import WELFORD_OPS, reduce_tree_values, tree_moments

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
    """Reduce a contiguous array along an axis, or all of it, as PyTorch's CUDA kernel does.

    Args:
        name: A key of ROW_OPERATORS: "sum", "mean", "norm", "prod" or "amax".
        x: bfloat16, float16 or float32.
        axis: The axis; None: all elements.
        gpu: "H100" or "H200": the launch depends on the number of multiprocessors.

    Returns:
        An array of x's dtype without the axis.

    Raises:
        NotModelled: The operator has no row, or the GPU is another one.
    """
    if name not in ROW_OPERATORS:
        raise NotModelled(f"{name}: no order is known of it; known are {', '.join(ROW_OPERATORS)} (torch_cuda/rows.py, ROW_OPERATORS)")
    row, (fmt, codes) = ROW_OPERATORS[name], operand_codes(name, x)
    shape = codes.shape
    rank = len(shape)
    place = None if axis is None else axis % max(rank, 1)
    is_last = place is not None and place == rank - 1
    kept = () if place is None else shape[:place] + shape[place + 1 :]
    outputs = int(np.prod(kept, dtype=int))
    vector = 4 if fmt == F32 else row.narrow_vector
    inner = None if not place or is_last else int(np.prod(shape[place + 1 :], dtype=int))
    call = ReduceCall(codes.size // max(outputs, 1), outputs, axis is None or is_last, 4, vector, gpu, inner)
    total = Value(reduce_tree_values(row.kind, reduce_tree(call), convert(fmt, F32, codes).reshape(-1)))
    return result_array(row.finish(total, outputs, codes.size), fmt).reshape(kept)


NORM_CHUNK, NORM_VALUES, NORM_BLOCK = 1 << 16, 4, 512  # elements of a block, accumulators of a thread, threads


@lru_cache(maxsize=64)
def foreach_norm_tree(count: int) -> Node:
    """Return the sum of `_foreach_norm`: blocks of 65,536 elements, whose threads have 4 accumulators, and then the sums of blocks.

    Source: PyTorch 2.11.0, aten/src/ATen/native/cuda/ForeachReduceOp.cu (`LpNormFunctor`, `lpnorm_cleanup`) and block_reduce.cuh.
    """
    used = max(-(-count // NORM_CHUNK), 1)
    if used > NORM_BLOCK:
        raise NotModelled(f"_foreach_norm: {count} elements; known are {NORM_BLOCK * NORM_CHUNK} (torch_cuda/rows.py)")
    blocks = used if used <= WARP else -(-used // WARP) * WARP
    turns = NORM_CHUNK // (NORM_VALUES * NORM_BLOCK)
    numbers = np.arange(blocks * NORM_CHUNK).reshape(blocks, turns, NORM_VALUES * NORM_BLOCK)
    vectors = numbers.reshape(blocks, turns, NORM_BLOCK, NORM_VALUES)
    single = numbers.reshape(blocks, turns, NORM_VALUES, NORM_BLOCK).swapaxes(2, 3)
    last = (count - 1) % NORM_CHUNK + 1 if count else 0
    whole = np.array([last % NORM_VALUES == 0 or block != used - 1 for block in range(blocks)])
    places = np.where(whole[:, None, None, None], vectors, single)
    places = np.where(places < count, places, EMPTY).astype(np.int32).transpose(1, 0, 2, 3)  # [turns, blocks, threads, accumulators]
    places = places[: max(-(-min(count, NORM_CHUNK) // (NORM_VALUES * NORM_BLOCK)), 1)]
    places = places.reshape(len(places), -1, min(blocks, WARP), NORM_BLOCK // WARP, WARP, NORM_VALUES)  # the blocks as warps of the last sum
    within = Join(Join(Join(Chain(places), from_zero=True), "folded"), "folded")
    return Join(Join(within, "folded"), "folded")


def foreach_norm(x: ArrayLike) -> Array:
    """Return the norm of all elements of an array as PyTorch's `_foreach_norm` on a GPU does.

    Args:
        x: bfloat16, float16 or float32, dense in memory.

    Returns:
        The norm in x's dtype.

    Raises:
        NotModelled: The dtype is another one, or x has more than 33,554,432 elements.
    """
    fmt, codes = operand_codes("_foreach_norm", x)
    total = reduce_tree_values("squares", foreach_norm_tree(codes.size), convert(fmt, F32, codes).reshape(-1))
    return result_array(sqrt(Value(total)), fmt)


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
    fmt, codes = operand_codes("var", x)
    if fmt != F32 or (axis is not None and axis % codes.ndim != codes.ndim - 1):
        raise NotModelled(f"var: got {fmt} and axis {axis}; known are f32 and the last axis, or None (torch_cuda/rows.py)")
    kept = () if axis is None else codes.shape[:-1]
    outputs = int(np.prod(kept, dtype=int))
    call = ReduceCall(codes.size // max(outputs, 1), outputs, True, 2, 2, gpu)
    _, squares, count = tree_moments(WELFORD_OPS, reduce_tree(call), codes.reshape(-1))
    divisor = count - float(correction)
    return result_array(squares / where(divisor > 0.0, divisor, 0.0), fmt).reshape(kept)


def row_values(name: str, x: ArrayLike) -> tuple[Format, Value]:
    fmt, codes = operand_codes(name, x)
    return fmt, Value(convert(fmt, F32, codes).reshape(-1, codes.shape[-1]))


def operand_codes(name: str, x: ArrayLike) -> tuple[Format, Array]:
    fmt, codes = array_codes(jnp.asarray(x))
    if fmt not in FORMATS:
        raise NotModelled(f"{name}: got {fmt}; expected bf16, f16 or f32 (torch_cuda/elementwise.py, FORMATS)")
    return fmt, codes


def result_array(value: Value, fmt: Format) -> Array:
    return to_float(fmt, convert(F32, fmt, value.codes), given_dtype(fmt))
