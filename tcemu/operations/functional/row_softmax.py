"""`softmax`, `log_softmax` and `cross_entropy` as kernels compute them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from tcemu.base.compilation import jit_wide_vectors
from tcemu.engine.arithmetic.f32_arithmetic import add_f32, f32_code, fma_f32, max_f32, maximum_f32, subtract_f32
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.functional.float_interface import (
    along_last,
    check_axis,
    check_dtype,
    compute_on_codes,
    f32_codes,
    float_result,
    kernel_array,
    widen,
)
from tcemu.operations.functional.kernel_table import kernel_value
from tcemu.operations.functional.kernel_values import SoftmaxKernel
from tcemu.operations.functional.special_choices import LOGARITHMS, divide_f32, exponential

MINUS_INFINITY = np.uint32(0xFF800000)


def softmax(x: ArrayLike, axis: int = -1, *, kernel: SoftmaxKernel | str, dtype: DTypeLike | None = None) -> Array:
    """Compute the softmax along an axis as a kernel does, bit for bit.

    The gradient is that of the softmax in f32.

    Args:
        x: float32, float16 or bfloat16 [...]. Masked elements are -Inf.
        axis: The axis of the rows.
        kernel: A `SoftmaxKernel`, or the name of a row of `functional.KERNELS`, such as "triton".
        dtype: float32, float16 or bfloat16, to which each quotient is rounded; None: x's.

    Returns:
        Array of x's shape. A row whose elements are all -Inf, or that has a NaN or +Inf, is NaN.

    Raises:
        TypeError: x or dtype is no such float.
        ValueError: The axis or the kernel is unknown.
    """
    return _softmax("softmax", x, axis, kernel, dtype)


def log_softmax(x: ArrayLike, axis: int = -1, *, kernel: SoftmaxKernel | str, dtype: DTypeLike | None = None) -> Array:
    """Compute the logarithm of the softmax along an axis as a kernel does: x - max - log(sum).

    Arguments, result, gradient and errors are those of `softmax`.
    """
    return _softmax("log_softmax", x, axis, kernel, dtype)


def _softmax(name: str, x: ArrayLike, axis: int, kernel: SoftmaxKernel | str, dtype: DTypeLike | None) -> Array:
    array = kernel_array("x", x)
    axis = check_axis(axis, array.ndim)
    value = kernel_value(name, SoftmaxKernel, kernel, array.shape[axis], array.dtype)
    out = check_dtype(array.dtype if dtype is None else dtype, "dtype")
    smooth = {"softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax}[name]
    return compute_on_codes(
        lambda x: along_last(partial(_softmax_bits, value, name, out), x, axis), lambda x: smooth(widen(x), axis=axis).astype(out), (array,)
    )


@jit_wide_vectors(0, 1, 2)
def _softmax_bits(kernel: SoftmaxKernel, name: str, dtype: np.dtype, x: Array) -> Array:
    codes = f32_codes(x)
    if codes.shape[-1] == 0:
        return x.astype(dtype)
    shifted = subtract_f32(codes, max_f32(codes))
    powers = exponential(shifted, kernel.power)
    total = kernel.sums.sum(powers)
    if name == "softmax":
        return float_result(divide_f32(powers, total, kernel.division), F32, dtype)
    return float_result(subtract_f32(shifted, LOGARITHMS[kernel.log](total)), F32, dtype)


def cross_entropy(logits: ArrayLike, labels: ArrayLike, *, kernel: SoftmaxKernel | str, count: int | None = None) -> Array:
    """Compute the cross entropy of each row as a kernel does: max + log(sum of exponentials) - logit of the label.

    The kernel takes the row in blocks of columns and rescales its sum whenever the maximum grows (the online softmax). The sum over rows is
    another kernel.

    Args:
        logits: float32, float16 or bfloat16 [..., columns].
        labels: Integers [...], from 0 to columns - 1.
        kernel: A `SoftmaxKernel`, or the name of a row of `functional.KERNELS`, such as "liger".
        count: Number by which each loss is divided, as by the number of rows for a mean; None: no division.

    Returns:
        float32 [...]. The gradient is that of the cross entropy in f32.

    Raises:
        TypeError: The logits are no such floats, or the labels no integers.
        ValueError: The shapes do not fit, or the kernel is unknown.
    """
    array, targets = kernel_array("logits", logits), jnp.asarray(labels)
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"labels: got {targets.dtype}{list(targets.shape)}; expected integers")
    if array.ndim < 1 or array.shape[-1] < 1 or targets.shape != array.shape[:-1]:
        raise ValueError(
            f"logits are {list(array.shape)} and labels {list(targets.shape)}: expected [..., columns] with a column or more, and [...]"
        )
    if count is not None and (isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1):
        raise ValueError(f"count={count!r}: expected a number of rows, 1 or more, or None")
    value = kernel_value("cross_entropy", SoftmaxKernel, kernel, array.shape[-1], array.dtype)
    divisor = None if count is None else int(count)

    def smooth(x: Array, targets: Array) -> Array:
        loss = -jnp.take_along_axis(jax.nn.log_softmax(widen(x)), targets[..., None], axis=-1)[..., 0]
        return loss if divisor is None else loss / divisor

    return compute_on_codes(partial(_cross_entropy_bits, value, divisor), smooth, (array, targets))


@jit_wide_vectors(0, 1)
def _cross_entropy_bits(kernel: SoftmaxKernel, count: int | None, x: Array, labels: Array) -> Array:
    codes = f32_codes(x)
    chosen = jnp.take_along_axis(codes, labels[..., None], axis=-1)
    columns, block = codes.shape[-1], kernel.block or codes.shape[-1]
    largest, total = jnp.full_like(chosen, MINUS_INFINITY), jnp.zeros_like(chosen)
    for start in range(0, columns, block):
        part = codes[..., start : start + block]
        part = jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, block - part.shape[-1])], constant_values=MINUS_INFINITY)
        larger = maximum_f32(largest, max_f32(part))
        decay = exponential(subtract_f32(largest, larger), kernel.power)
        total = fma_f32(total, decay, kernel.sums.sum(exponential(subtract_f32(part, larger), kernel.power)))
        largest = larger
    loss = subtract_f32(add_f32(largest, LOGARITHMS[kernel.log](total)), chosen)
    if count is not None:
        loss = divide_f32(loss, jnp.full_like(loss, f32_code(count)), kernel.division)
    return float_result(loss[..., 0], F32, np.dtype(np.float32))
