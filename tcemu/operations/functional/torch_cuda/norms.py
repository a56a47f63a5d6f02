"""PyTorch's norms as its CUDA kernels compute them."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tcemu.base.errors import NotModelled
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.functional.torch_cuda.device_functions import Value, fma, rsqrt
from tcemu.operations.functional.torch_cuda.reduce_plans import is_vectorised_norm, norm_tree
from tcemu.operations.functional.torch_cuda.reductions import VECTORISED, WELFORD_OPS, reduce_tree_values, tree_moments
from tcemu.operations.functional.torch_cuda.rows import operand_codes, result_array, row_values

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
    fmt, rows = row_values("layer_norm", x)
    w, b = (Value(convert(fmt, F32, operand_codes("layer_norm", v)[1])) for v in (weight, bias))
    count, columns = rows.codes.shape
    vectorised = is_vectorised_norm(columns)
    mean, squares, _ = tree_moments(VECTORISED if vectorised else WELFORD_OPS, norm_tree(count, columns), rows.codes.reshape(-1))
    scale = rsqrt(squares / float(columns) + eps)
    column = lambda value: Value(value.codes[:, None])
    centred = rows - column(mean)
    found = fma(w, column(scale) * centred, b) if vectorised else fma(centred * column(scale), w, b)
    shape = jnp.shape(x)
    of_rows = [result_array(value, F32).reshape(*shape[:-1], 1) for value in (mean, scale)]
    return result_array(found, fmt).reshape(shape), of_rows[0], of_rows[1]


def rms_norm(x: ArrayLike, weight: ArrayLike, eps: float) -> Array:
    """Normalise the last axis by its root mean square as PyTorch's fused kernel does; arguments and result as in `layer_norm`.

    Raises:
        NotModelled: The dtype is another one, or N is no multiple of 4, for which another kernel is taken.
    """
    fmt, rows = row_values("rms_norm", x)
    count, columns = rows.codes.shape
    if not is_vectorised_norm(columns):
        raise NotModelled(f"rms_norm: got {columns} columns; known is the kernel for multiples of 4 (torch_cuda/rows.py)")
    w = Value(convert(fmt, F32, operand_codes("rms_norm", weight)[1]))
    squares = Value(reduce_tree_values("squares", norm_tree(count, columns), rows.codes.reshape(-1)))
    scale = Value(rsqrt(squares / float(columns) + eps).codes[:, None])
    return result_array(w * (scale * rows), fmt).reshape(jnp.shape(x))


