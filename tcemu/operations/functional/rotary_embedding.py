"""`rotary`: rotary position embeddings as kernels compute them."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.base.compilation import compile_once, jit_wide_vectors
from tcemu.engine.arithmetic.fma import add, fma
from tcemu.engine.backends.quotients import multiply
from tcemu.engine.formats.coding import recode
from tcemu.engine.formats.number_formats import Format
from tcemu.operations.functional.float_interface import array_format, compute_on_codes, float_result, kernel_array, own_codes
from tcemu.operations.functional.kernel_table import kernel_value
from tcemu.operations.functional.kernel_values import RotaryKernel


def rotary(x: ArrayLike, cos: ArrayLike, sin: ArrayLike, *, kernel: RotaryKernel | str) -> Array:
    """Rotate pairs of x by angles as a kernel does, bit for bit: x1 cos - x2 sin and x2 cos + x1 sin.

    x is rounded to the dtype of the cosines, in which the kernel computes. The result is rounded to x's dtype. The gradient is that of the
    same formula in f32.

    Args:
        x: float32, float16 or bfloat16 [..., 2 * half].
        cos: The same dtypes; broadcasts to [..., half]. For heads on the axis before the last, give it an axis of size 1 there.
        sin: As cos, with its dtype.
        kernel: A `RotaryKernel`, or the name of a row of `functional.KERNELS`, such as "liger".

    Returns:
        Array of x's shape and dtype.

    Raises:
        TypeError: An argument has another dtype, or cos and sin have two.
        ValueError: The shapes do not fit, or the kernel is unknown.
    """
    array, cosines, sines = kernel_array("x", x), kernel_array("cos", cos), kernel_array("sin", sin)
    if cosines.dtype != sines.dtype:
        raise TypeError(f"cos is {cosines.dtype} and sin {sines.dtype}: expected one dtype, in which the kernel computes")
    if array.ndim < 1 or array.shape[-1] % 2:
        raise ValueError(f"x: got shape {list(array.shape)}; expected [..., 2 * half]")
    half = (*array.shape[:-1], array.shape[-1] // 2)
    for name, other in (("cos", cosines), ("sin", sines)):
        try:
            fits = jnp.broadcast_shapes(other.shape, half) == half
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"{name}: got shape {list(other.shape)}; expected one that broadcasts to [..., half] = {list(half)}")
    value = kernel_value("rotary", RotaryKernel, kernel, array.shape[-1], array.dtype)

    def smooth(x: Array, cos: Array, sin: Array) -> Array:
        first, second = split_pairs(x.astype(np.float32), value.pairing)
        cos, sin = cos.astype(np.float32), sin.astype(np.float32)
        return join_pairs(first * cos - second * sin, second * cos + first * sin, value.pairing).astype(x.dtype)

    return compute_on_codes(partial(_rotary_bits, value), smooth, (array, cosines, sines))


@jit_wide_vectors(0)
def _rotary_bits(kernel: RotaryKernel, x: Array, cos: Array, sin: Array) -> Array:
    fmt, own = array_format(cos), array_format(x)
    first, second = split_pairs(recode(own, fmt, own_codes(x)), kernel.pairing)
    cosines, sines = (jnp.broadcast_to(own_codes(v), first.shape) for v in (cos, sin))
    sign = cosines.dtype.type(1 << (fmt.bits - 1))
    rotated = (
        _sum_of_products(fmt, kernel.fused, first, cosines, multiply(second, sines, fmt) ^ sign),
        _sum_of_products(fmt, kernel.fused, first, sines, multiply(second, cosines, fmt)),
    )
    return float_result(join_pairs(*rotated, kernel.pairing), fmt, np.dtype(x.dtype))


def _sum_of_products(fmt: Format, fused: bool, x: Array, y: Array, addend: Array) -> Array:
    return _fma(fmt, x, y, addend) if fused else _add(fmt, multiply(x, y, fmt), addend)


@compile_once(0)
def _fma(fmt: Format, x: Array, y: Array, z: Array) -> Array:
    return fma(x, y, z, fmt)


@compile_once(0)
def _add(fmt: Format, x: Array, y: Array) -> Array:
    return add(x, y, fmt)


def split_pairs(x: Array, pairing: str) -> tuple[Array, Array]:
    """Split the last axis into the first and the second elements of pairs."""
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]) if pairing == "halves" else (x[..., 0::2], x[..., 1::2])


def join_pairs(first: Array, second: Array, pairing: str) -> Array:
    """Join what `split_pairs` splits."""
    if pairing == "halves":
        return jnp.concatenate([first, second], axis=-1)
    return jnp.stack([first, second], axis=-1).reshape(*first.shape[:-1], -1)
