"""`silu`, `gelu` and their products with a second operand, as kernels compute them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from tcemu.base.compilation import jit_wide_vectors
from tcemu.engine.arithmetic import special_functions
from tcemu.engine.arithmetic.f32_arithmetic import add_f32, f32_code, fma_f32
from tcemu.engine.arithmetic.libdevice import erf_f32, tanh_f32
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
    own_codes,
)
from tcemu.operations.functional.kernel_table import kernel_value
from tcemu.operations.functional.kernel_values import GeluKernel, SiluKernel
from tcemu.operations.functional.special_choices import sigmoid

HALF, ONE, ROOT_HALF = (f32_code(x) for x in (0.5, 1.0, 0.7071067811865476))
CUBE_FACTOR, ROOT_TWO_OVER_PI, TWO = (f32_code(x) for x in (0.044715, 0.7978845608028654, 2.0))
ActivationKernel: TypeAlias = SiluKernel | GeluKernel


def silu(x: ArrayLike, *, kernel: SiluKernel | str, dtype: DTypeLike | None = None) -> Array:
    """Compute x / (1 + e^-x) as a kernel does, bit for bit. The gradient is that of `jax.nn.silu` in f32.

    Args:
        x: float32, float16 or bfloat16 [...].
        kernel: A `SiluKernel`, or the name of a row of `functional.KERNELS`, such as "liger".
        dtype: float32, float16 or bfloat16, the dtype of the result; None: x's.

    Returns:
        Array of x's shape.

    Raises:
        TypeError: x or dtype is no such float.
        ValueError: The kernel is unknown.
    """
    return _activation("silu", SiluKernel, x, None, kernel, dtype)


def silu_mul(gate: ArrayLike, up: ArrayLike, *, kernel: SiluKernel | str) -> Array:
    """Compute silu(gate) * up as a kernel does (SwiGLU): silu(gate) is rounded to up's dtype, and so is the product.

    Args:
        gate: float32, float16 or bfloat16 [...].
        up: The same dtypes; gate's shape.
        kernel: As in `silu`.

    Returns:
        Array of up's dtype.

    Raises:
        TypeError: An argument has another dtype.
        ValueError: The shapes differ, or the kernel is unknown.
    """
    return _activation("silu", SiluKernel, gate, up, kernel, None)


def gelu(x: ArrayLike, *, kernel: GeluKernel | str, dtype: DTypeLike | None = None) -> Array:
    """Compute GELU as a kernel does, bit for bit. The gradient is that of `jax.nn.gelu` in f32, of the same form.

    Arguments, result and errors are those of `silu`, with a `GeluKernel`.
    """
    return _activation("gelu", GeluKernel, x, None, kernel, dtype)


def gelu_mul(gate: ArrayLike, up: ArrayLike, *, kernel: GeluKernel | str) -> Array:
    """Compute gelu(gate) * up as a kernel does (GeGLU): gelu(gate) is rounded to up's dtype, and so is the product.

    Arguments, result and errors are those of `silu_mul`, with a `GeluKernel`.
    """
    return _activation("gelu", GeluKernel, gate, up, kernel, None)


def _activation(
    name: str,
    kind: type[SiluKernel] | type[GeluKernel],
    x: ArrayLike,
    factor: ArrayLike | None,
    kernel: ActivationKernel | str,
    dtype: DTypeLike | None,
) -> Array:
    array = kernel_array("x" if factor is None else "gate", x)
    value = kernel_value(name, kind, kernel, array.shape[-1] if array.ndim else 1, array.dtype)
    operands = (array,) if factor is None else (array, kernel_array("up", factor))
    if operands[0].shape != operands[-1].shape:
        raise ValueError(f"gate is {list(operands[0].shape)} and up {list(operands[-1].shape)}: expected one shape")
    out = check_dtype(operands[-1].dtype if dtype is None else dtype, "dtype")
    plain = jax.nn.silu if isinstance(value, SiluKernel) else partial(jax.nn.gelu, approximate=value.form != "erf")

    def smooth(x: Array, *factor: Array) -> Array:
        result = plain(x.astype(np.float32))
        return (result * factor[0].astype(np.float32) if factor else result).astype(out)

    return compute_on_codes(partial(_activation_bits, value, out), smooth, operands)


@jit_wide_vectors(0, 1)
def _activation_bits(kernel: ActivationKernel, dtype: np.dtype, x: Array, *factor: Array) -> Array:
    codes = f32_codes(x)
    if isinstance(kernel, SiluKernel):
        result = multiply(sigmoid(codes, kernel.power, kernel.division), codes, F32)
    else:
        result = FORMS[kernel.form](kernel, codes)
    if not factor:
        return float_result(result, F32, dtype)
    own = array_format(factor[0])
    return float_result(multiply(recode(F32, own, result), own_codes(factor[0]), own), own, dtype)


def _times(x: Array, constant: np.uint32) -> Array:
    return multiply(x, jnp.full_like(x, constant), F32)


def _erf_form(_: GeluKernel, x: Array) -> Array:
    return multiply(_times(x, HALF), add_f32(erf_f32(_times(x, ROOT_HALF)), jnp.full_like(x, ONE)), F32)


def _inner(x: Array) -> Array:
    """Compute u = sqrt(2 / pi) * (x + 0.044715 * x^3); the last product of the cube's term is fused."""
    cube = multiply(multiply(x, x, F32), x, F32)
    return _times(fma_f32(cube, jnp.full_like(x, CUBE_FACTOR), x), ROOT_TWO_OVER_PI)


def _tanh_form(kernel: GeluKernel, x: Array) -> Array:
    tanh = tanh_f32 if kernel.form == "tanh" else special_functions.tanh
    return multiply(_times(x, HALF), add_f32(tanh(_inner(x)), jnp.full_like(x, ONE)), F32)


def _sigmoid_form(kernel: GeluKernel, x: Array) -> Array:
    return multiply(sigmoid(_times(_inner(x), TWO), kernel.power, kernel.division), x, F32)


FORMS: dict[str, Callable[[GeluKernel, Array], Array]] = {
    "erf": _erf_form, "tanh": _tanh_form, "tanh.approx": _tanh_form, "sigmoid": _sigmoid_form,
}  # fmt: skip
