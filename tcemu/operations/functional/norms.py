"""`rms_norm` and `layer_norm` as kernels compute them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from tcemu.base.compilation import jit_wide_vectors
from tcemu.engine.arithmetic.f32_arithmetic import add_f32, f32_code, fma_f32, subtract_f32
from tcemu.engine.backends.quotients import multiply
from tcemu.engine.formats.coding import recode
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.functional.float_interface import (
    array_format,
    check_dtype,
    compute_on_codes,
    f32_codes,
    float_result,
    kernel_array,
    widen,
)
from tcemu.operations.functional.kernel_table import kernel_value
from tcemu.operations.functional.kernel_values import LayerNormKernel, RmsNormKernel
from tcemu.operations.functional.special_choices import divide_and_add, divide_f32, reciprocal_root


def rms_norm(
    x: ArrayLike, weight: ArrayLike, *, eps: float, kernel: RmsNormKernel | str, offset: float = 0.0, dtype: DTypeLike | None = None
) -> Array:
    """Compute x / sqrt(mean(x^2) + eps) * (offset + weight) along the last axis as a kernel does, bit for bit.

    The gradient is that of the same formula in f32.

    Args:
        x: float32, float16 or bfloat16 [..., columns].
        weight: The same dtypes, [columns].
        eps: Number that is added to the mean of the squares, rounded to f32.
        kernel: An `RmsNormKernel`, or the name of a row of `functional.KERNELS`, such as "liger".
        offset: Number that is added to the weight, as 1 in Gemma.
        dtype: float32, float16 or bfloat16, the dtype of the result; None: x's.

    Returns:
        Array of x's shape.

    Raises:
        TypeError: An argument has another dtype.
        ValueError: The shapes do not fit, or the kernel is unknown.
    """
    array, gain = kernel_array("x", x), kernel_array("weight", weight)
    _check_shapes(array, weight=gain)
    value = kernel_value("rms_norm", RmsNormKernel, kernel, array.shape[-1], array.dtype)
    out = check_dtype(array.dtype if dtype is None else dtype, "dtype")
    if offset != 0 and not value.add_offset:
        raise ValueError(f"offset={offset!r}: the kernel has no offset; give RmsNormKernel(add_offset=True)")
    numbers = _number("eps", eps), _number("offset", offset)

    def smooth(x: Array, gain: Array) -> Array:
        x, gain = widen(x), widen(gain)
        root = jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + numbers[0])
        return (x / root * (numbers[1] + gain)).astype(out)

    return compute_on_codes(partial(_rms_norm_bits, value, out, numbers), smooth, (array, gain))


@jit_wide_vectors(0, 1, 2)
def _rms_norm_bits(kernel: RmsNormKernel, dtype: np.dtype, numbers: tuple[float, float], x: Array, weight: Array) -> Array:
    codes, gain = f32_codes(x), f32_codes(weight)
    eps, offset = (f32_code(number) for number in numbers)
    scale = _root_of_mean(kernel, kernel.sums.sum_squares(codes), codes.shape[-1], eps)
    normed = multiply(codes, scale, F32)
    if kernel.round_before_weight:
        own = array_format(x)
        normed = recode(own, F32, recode(F32, own, normed))
    if kernel.add_offset:
        gain = add_f32(gain, jnp.full_like(gain, offset))
    return float_result(multiply(normed, gain, F32), F32, dtype)


def layer_norm(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike, *, eps: float, kernel: LayerNormKernel | str, dtype: DTypeLike | None = None
) -> Array:
    """Compute (x - mean) / sqrt(variance + eps) * weight + bias along the last axis as a kernel does, bit for bit.

    The gradient is that of the same formula in f32.

    Args:
        x: float32, float16 or bfloat16 [..., columns].
        weight: The same dtypes, [columns].
        bias: The same dtypes, [columns].
        eps: Number that is added to the variance, rounded to f32.
        kernel: A `LayerNormKernel`, or the name of a row of `functional.KERNELS`, such as "triton".
        dtype: float32, float16 or bfloat16, the dtype of the result; None: x's.

    Returns:
        Array of x's shape.

    Raises:
        TypeError: An argument has another dtype.
        ValueError: The shapes do not fit, or the kernel is unknown.
    """
    array, gain, shift = kernel_array("x", x), kernel_array("weight", weight), kernel_array("bias", bias)
    _check_shapes(array, weight=gain, bias=shift)
    value = kernel_value("layer_norm", LayerNormKernel, kernel, array.shape[-1], array.dtype)
    out = check_dtype(array.dtype if dtype is None else dtype, "dtype")
    number = _number("eps", eps)

    def smooth(x: Array, gain: Array, shift: Array) -> Array:
        x, gain, shift = (widen(v) for v in (x, gain, shift))
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        root = jnp.sqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + number)
        return (centred / root * gain + shift).astype(out)

    return compute_on_codes(partial(_layer_norm_bits, value, out, number), smooth, (array, gain, shift))


@jit_wide_vectors(0, 1, 2)
def _layer_norm_bits(kernel: LayerNormKernel, dtype: np.dtype, eps: float, x: Array, weight: Array, bias: Array) -> Array:
    codes, gain, shift = f32_codes(x), f32_codes(weight), f32_codes(bias)
    columns = codes.shape[-1]
    if kernel.moments == "welford":
        mean, squares = kernel.sums.moments(codes)
        centred = subtract_f32(codes, mean)
    else:
        total = kernel.sums.sum(codes)
        mean = divide_f32(total, jnp.full_like(total, f32_code(columns)), kernel.division)
        centred = subtract_f32(codes, mean)  # in another basic block, so that ptxas does not fuse them
        squares = kernel.sums.sum_squares(centred)
    scale = _root_of_mean(kernel, squares, columns, f32_code(eps))
    normed = multiply(centred, scale, F32)
    gain, shift = jnp.broadcast_to(gain, normed.shape), jnp.broadcast_to(shift, normed.shape)
    out = fma_f32(normed, gain, shift) if kernel.fused else add_f32(multiply(normed, gain, F32), shift)
    return float_result(out, F32, dtype)


def _root_of_mean(kernel: RmsNormKernel | LayerNormKernel, total: Array, columns: int, eps: np.uint32) -> Array:
    """Compute 1 / sqrt(total / columns + eps)."""
    return reciprocal_root(divide_and_add(total, columns, jnp.full_like(total, eps), kernel.division), kernel.root, kernel.division)


def _check_shapes(x: Array, **others: Array) -> None:
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"x: got shape {list(x.shape)}; expected [..., columns] with a column or more")
    for name, other in others.items():
        if other.shape != x.shape[-1:]:
            raise ValueError(f"{name}: got shape {list(other.shape)}; expected [columns] = {list(x.shape[-1:])}, as x is {list(x.shape)}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name}={value!r}: expected a number, known before tracing")
    return float(np.float32(value))
