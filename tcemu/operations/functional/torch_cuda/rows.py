"""PyTorch's reductions as its CUDA kernels compute them: `ROW_OPERATORS` has a row an operator.

A row says which launch reduces (`ReduceCall`), how a term is taken, and what is computed before and after. Operands of bf16 and f16 are
widened to f32, and the result is rounded once.

Source: PyTorch 2.13.0, aten/src/ATen/native/cuda/Reduce.cuh; PyTorch 2.11.0, ReduceSumProdKernel.cu, ReduceMomentKernel.cu,
ReduceNormKernel.cu, ReduceMaxValuesKernel.cu. Held to words of PyTorch 2.11.0 on an H200: `tests/operations/functional/test_torch_cuda.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from tcemu.base.errors import NotModelled
from tcemu.engine.arithmetic.sum_tree import Node
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes, to_float
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.operations.functional.torch_cuda.device_functions import Value, as_value, powf, sqrt, where
from tcemu.operations.functional.torch_cuda.elementwise import FORMATS, given_dtype
from tcemu.operations.functional.torch_cuda.reduce_plans import ReduceCall, ReduceLayout, reduce_launch, reduce_layout, reduce_tree
from tcemu.operations.functional.torch_cuda.reductions import WELFORD_OPS, compute_by_shift, reduce_tree_values, tree_moments


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
    "norm1": RowReduction("sizes"),
    "norm_inf": RowReduction("largest size"),
    "amax": RowReduction("largest"),
}


@partial(jax.jit, static_argnames=("name", "axis", "dtype", "gpu"))
def reduce(name: str, x: ArrayLike, axis: int | tuple[int, ...] | None = -1, *, dtype: DTypeLike | None = None, gpu: str = "H200") -> Array:
    """Reduce a contiguous array along axes, or all of it, as PyTorch's CUDA kernel does.

    Args:
        name: A key of ROW_OPERATORS, such as "sum", "mean", "prod" or "amax".
        x: bfloat16, float16 or float32.
        axis: The axis, several axes, or None for all elements.
        dtype: float32 for a result that is not rounded to x's dtype; None: x's dtype.
        gpu: "H100" or "H200": the launch depends on the number of multiprocessors.

    Returns:
        An array without the axes.

    Raises:
        NotModelled: The operator has no row, the dtype or the GPU is another one, an axis of no elements is reduced.
    """
    if name not in ROW_OPERATORS:
        raise NotModelled(f"{name}: no order is known of it; known are {', '.join(ROW_OPERATORS)} (torch_cuda/rows.py, ROW_OPERATORS)")
    row, (fmt, codes) = ROW_OPERATORS[name], operand_codes(name, x)
    terms = Terms.split(codes, axis)
    total = terms.reduce(row.kind, convert(fmt, F32, terms.codes), 4, 4 if fmt == F32 else row.narrow_vector, gpu)
    found = row.finish(Value(total), terms.layout.outputs, codes.size)
    return result_array(found, F32 if dtype is not None and np.dtype(dtype) == np.float32 else fmt).reshape(terms.kept)


class Terms(NamedTuple):
    """The elements of an array as terms of sums: codes [terms, outputs], the layout, and the shape of the sums."""

    codes: Array
    layout: ReduceLayout
    kept: tuple[int, ...]

    @classmethod
    def split(cls, codes: Array, axis: int | tuple[int, ...] | None) -> Terms:
        """Return the terms of sums along axes."""
        rank = codes.ndim
        given = range(rank) if axis is None else (axis,) if isinstance(axis, int) else axis
        layout = reduce_layout(codes.shape, tuple(sorted({i % rank for i in given})) if rank else ())
        if not layout.terms:
            raise NotModelled(f"got an array of {codes.shape}; a reduction of no elements has no order (torch_cuda/rows.py)")
        order = (*layout.reduced, *layout.kept)
        return cls(codes.transpose(order).reshape(layout.terms, -1), layout, tuple(codes.shape[i] for i in layout.kept))

    def reduce(self, kind: str, codes: Array, unrolled: int, vector: int, gpu: str) -> Array:
        """Return f32 codes [outputs] of the sums of f32 codes."""
        return self._evaluate(lambda tree, codes: reduce_tree_values(kind, tree, codes), codes, unrolled, vector, gpu)

    def moments(self, codes: Array, gpu: str) -> tuple[Value, Value, Value]:
        """Return mean, sum of squared differences and count of f32 codes."""
        stacked = lambda tree, codes: jnp.stack([part.codes for part in tree_moments(WELFORD_OPS, tree, codes)], axis=-1)
        found = self._evaluate(stacked, codes, 2, 2, gpu)
        return Value(found[..., 0]), Value(found[..., 1]), Value(found[..., 2])

    def _evaluate(self, compute: Callable[[Node, Array], Array], codes: Array, unrolled: int, vector: int, gpu: str) -> Array:
        layout = self.layout
        call = ReduceCall(layout.terms, layout.outputs, layout.contiguous, unrolled, vector, gpu, layout.packed, layout.is_split)
        if not reduce_launch(call).vectorised:
            return compute(reduce_tree(call), codes)
        return compute_by_shift(lambda shift, codes: compute(reduce_tree(call, shift), codes), codes, vector)


@partial(jax.jit, static_argnames=("order", "axis", "dtype", "gpu"))
def vector_norm(
    x: ArrayLike, order: float = 2.0, axis: int | tuple[int, ...] | None = None, *, dtype: DTypeLike | None = None, gpu: str = "H200"
) -> Array:
    """Compute a vector norm along axes as PyTorch's `linalg_vector_norm` on a GPU does.

    Args:
        x: bfloat16, float16 or float32, contiguous.
        order: 2, 1, infinity, or another positive number.
        axis: As in `reduce`.
        dtype: As in `reduce`.
        gpu: As in `reduce`.

    Returns:
        An array without the axes.

    Raises:
        NotModelled: The order, the dtype or the GPU is another one.
    """
    known = {2.0: "norm", 1.0: "norm1", math.inf: "norm_inf"}
    if order in known:
        return reduce(known[order], x, axis, dtype=dtype, gpu=gpu)
    if not order > 0.0:
        raise NotModelled(f"vector_norm: got order {order}; known are 2, 1, infinity and other positive numbers (torch_cuda/rows.py)")
    fmt, codes = operand_codes("vector_norm", x)
    terms = Terms.split(codes, axis)
    powers = powf(abs(Value(convert(fmt, F32, terms.codes))), as_value(order))
    found = powf(Value(terms.reduce("sum", powers.codes, 4, 4, gpu)), 1.0 / as_value(order))
    return result_array(found, F32 if dtype is not None and np.dtype(dtype) == np.float32 else fmt).reshape(terms.kept)


@partial(jax.jit, static_argnames=("axis", "correction", "gpu"))
def var_mean(x: ArrayLike, axis: int | tuple[int, ...] | None = None, *, correction: float = 1, gpu: str = "H200") -> tuple[Array, Array]:
    """Return variance and mean along axes, or of all elements, as PyTorch's CUDA kernel computes them.

    Args:
        x: bfloat16, float16 or float32, contiguous.
        axis: As in `reduce`.
        correction: Subtracted from the number of elements in the divisor.
        gpu: As in `reduce`.

    Returns:
        Two arrays of x's dtype without the axes.

    Raises:
        NotModelled: The dtype or the GPU is another one.
    """
    fmt, mean, found, kept = _moments(x, axis, correction, gpu)
    return result_array(found, fmt).reshape(kept), result_array(mean, fmt).reshape(kept)


def variance(x: ArrayLike, axis: int | tuple[int, ...] | None = -1, *, correction: float = 1, gpu: str = "H200") -> Array:
    """Return the variance along axes as PyTorch's `var` on a GPU computes it; arguments and errors as in `var_mean`."""
    return var_mean(x, axis, correction=correction, gpu=gpu)[0]


@partial(jax.jit, static_argnames=("axis", "correction", "gpu"))
def standard_deviation(x: ArrayLike, axis: int | tuple[int, ...] | None = -1, *, correction: float = 1, gpu: str = "H200") -> Array:
    """Return the standard deviation along axes as PyTorch's `std` on a GPU computes it; arguments and errors as in `var_mean`."""
    fmt, _, found, kept = _moments(x, axis, correction, gpu)
    return result_array(sqrt(found), fmt).reshape(kept)


def _moments(x: ArrayLike, axis: int | tuple[int, ...] | None, correction: float, gpu: str) -> tuple[Format, Value, Value, tuple[int, ...]]:
    fmt, codes = operand_codes("var", x)
    terms = Terms.split(codes, axis)
    mean, squares, count = terms.moments(convert(fmt, F32, terms.codes), gpu)
    divisor = count - float(correction)
    return fmt, mean, squares / where(divisor > 0.0, divisor, 0.0), terms.kept


def operand_codes(name: str, x: ArrayLike) -> tuple[Format, Array]:
    fmt, codes = array_codes(jnp.asarray(x))
    if fmt not in FORMATS:
        raise NotModelled(f"{name}: got {fmt}; expected bf16, f16 or f32 (torch_cuda/elementwise.py, FORMATS)")
    return fmt, codes


def operand_values(name: str, x: ArrayLike) -> tuple[Format, Value]:
    """Return an operand's format and its f32 values."""
    fmt, codes = operand_codes(name, x)
    return fmt, Value(convert(fmt, F32, codes))


def result_array(value: Value, fmt: Format) -> Array:
    return to_float(fmt, convert(F32, fmt, value.codes), given_dtype(fmt))
