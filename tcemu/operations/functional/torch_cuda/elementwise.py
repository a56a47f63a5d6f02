"""PyTorch's elementwise operators as its CUDA kernels compute them: `OPERATORS` has a formula an operator.

Operands of bf16 and f16 are widened to f32, and the result is rounded once. A row says which operators round in between. Where nvcc
contracts a product and a sum, the formula has `fma`; of a sum of two products, LLVM takes the left one. The formulas are held to words of
PyTorch 2.11.0 on an H200 (`tests/operations/functional/test_torch_cuda.py`).

Source: PyTorch 2.11.0, aten/src/ATen/native/cuda: UnaryOpsKernel, UnarySpecialOpsKernel, UnaryGeometricTanhKernel, ActivationGeluKernel,
ActivationSiluKernel, ActivationHardswishKernel, ActivationLeakyReluKernel, PowKernel, BinaryMiscBackwardOpsKernels, PointwiseOpsKernel,
Lerp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.base.errors import NotModelled
from tcemu.engine.arithmetic.special_functions import INFINITY, MAGNITUDE
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes, to_float
from tcemu.engine.formats.number_formats import BF16, F16, F32, Format
from tcemu.operations.functional.torch_cuda.device_functions import (
    Value,
    as_value,
    atan2f,
    cosf,
    erff,
    ex2,
    expf,
    expm1f,
    fma,
    fmodf,
    log1pf,
    log2f,
    logf,
    powf,
    rsqrt,
    sinf,
    sqrt,
    tanhf,
    where,
)

FORMATS = (BF16, F16, F32)


def _square(x: Value) -> Value:
    return x * x


def _sigmoid(x: Value) -> Value:
    return 1.0 / (1.0 + expf(-x))


def _silu_backward(grad: Value, x: Value) -> Value:
    gate = _sigmoid(x)
    return grad * gate * fma(x, 1.0 - gate, 1.0)


TANH_SLOPE, TANH_CUBE = math.sqrt(2) * (2 / math.sqrt(math.pi)) * 0.5, 0.044715
TRIPLE_CUBE = float(np.float32(3) * np.float32(TANH_CUBE))  # a product of two f32


def _tanh_gate(x: Value) -> Value:
    return tanhf(TANH_SLOPE * fma(TANH_CUBE, x * x * x, x))


def _gelu_tanh(x: Value) -> Value:
    return 0.5 * x * (1.0 + _tanh_gate(x))


def _gelu_backward(grad: Value, x: Value) -> Value:
    density = expf(-0.5 * x * x) * ((2 / math.sqrt(math.pi)) * math.sqrt(0.5) * 0.5)
    return grad * fma(0.5, 1.0 + erff(x * math.sqrt(0.5)), x * density)


def _gelu_tanh_backward(grad: Value, x: Value) -> Value:
    gate = _tanh_gate(x)
    inner = TANH_SLOPE * fma(TRIPLE_CUBE, x * x, 1.0)
    return grad * fma(0.5, 1.0 + gate, 0.5 * x * fma(-gate, gate, 1.0) * inner)


def _clip_to_6(x: Value) -> Value:
    return where(x < 0.0, 0.0, where(x > 6.0, 6.0, x))


def _mish_backward(grad: Value, x: Value) -> Value:
    slope = tanhf(log1pf(expf(x)))
    return grad * fma(x * _sigmoid(x), fma(-slope, slope, 1.0), slope)


def _softplus_backward(grad: Value, x: Value) -> Value:
    power = expf(x * 1.0)
    return where(x > 20.0, grad, grad * power / (power + 1.0))


def _log_sigmoid_backward(grad: Value, x: Value) -> Value:
    power = expf(-abs(x))
    share = power / (1.0 + power)
    return grad * where(x < 0.0, 1.0 - share, share)


def _hardswish_backward(grad: Value, x: Value) -> Value:
    between = grad * (x / 3.0 + 0.5)
    return where(x > -3.0, where(x < 3.0, between, grad), 0.0)


def _remainder(x: Value, y: Value) -> Value:
    rest = fmodf(x, y)
    nonzero = rest.codes & MAGNITUDE != 0
    return where(nonzero & ((y < 0.0) != (rest < 0.0)), rest + y, rest)


def _logaddexp(x: Value, y: Value) -> Value:
    larger = where(x < y, y, x)
    found = larger + log1pf(expf(-abs(x - y)))
    return where((x.codes & MAGNITUDE == INFINITY) & (x.codes == y.codes), x, found)


def _tanh_backward(grad: Value, y: Value, fmt: Format) -> Value:
    return grad * (fma(-y, y, 1.0) if fmt == F32 else round_value(1.0 - round_value(y * y, fmt), fmt))


OPERATORS: dict[str, Callable[..., Value]] = {
    "exp": expf, "log": logf, "exp2": ex2, "log2": log2f, "log1p": log1pf, "expm1": expm1f, "sqrt": sqrt, "rsqrt": rsqrt, "tanh": tanhf,
    "erf": erff, "sin": sinf, "cos": cosf, "pow": powf, "atan2": atan2f, "fmod": fmodf, "pow_half": sqrt, "pow_minus_half": rsqrt,
    "sigmoid": _sigmoid, "gelu_tanh": _gelu_tanh, "remainder": _remainder, "logaddexp": _logaddexp,
    "square": _square, "mish_backward": _mish_backward, "softplus_backward": _softplus_backward,
    "log_sigmoid_backward": _log_sigmoid_backward, "hardswish_backward": _hardswish_backward, "silu_backward": _silu_backward,
    "gelu_backward": _gelu_backward, "gelu_tanh_backward": _gelu_tanh_backward,
    "reciprocal": lambda x: 1.0 / x,
    "hardswish": lambda x: x * _clip_to_6(x + 3.0) * (1.0 / 6.0),
    "hardsigmoid": lambda x: _clip_to_6(x + 3.0) * (1.0 / 6.0),
    "silu": lambda x: x / (1.0 + expf(-x)),
    "gelu": lambda x: x * 0.5 * (1.0 + erff(x * math.sqrt(0.5))),
    "pow2": lambda x: x * x,
    "softplus": lambda x: where(x > 20.0, x, log1pf(expf(x)) / 1.0),
    "logsigmoid": lambda x: where(x > 0.0, 0.0, x) - log1pf(expf(-abs(x))),
    "mish": lambda x: x * tanhf(log1pf(expf(x))),
    "elu": lambda x: where(x > 0.0, x * 1.0, expm1f(x * 1.0) * 1.0),
    "leaky_relu": lambda x: where(x > 0.0, x, x * 0.01),
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "add": lambda x, y, alpha=1.0: fma(alpha, y, x),
    "addcmul": lambda x, y, z, value=1.0: fma(value, y * z, x),
    "addcdiv": lambda x, y, z, value=1.0: fma(value, y / z, x),
    "lerp": lambda x, y, weight: fma(weight, y - x, x) if abs(weight) < 0.5 else fma(x - y, 1.0 - as_value(weight), y),
    "glu": lambda x, gate: x * _sigmoid(gate),
    "l1_loss": lambda x, y: abs(x - y),
    "pow_minus_1": lambda x: 1.0 / x,
    "hardsigmoid_backward": lambda grad, x: where((x > -3.0) & (x < 3.0), grad * (1.0 / 6.0), 0.0),
    "threshold_backward": lambda grad, x: where((x < 0.0) | (x.codes & MAGNITUDE == 0), 0.0, grad),
    "leaky_relu_backward": lambda grad, x: where(x > 0.0, grad, grad * 0.01),
    "elu_backward": lambda grad, x: where(x > 0.0, grad * 1.0, grad * 1.0 * 1.0 * expf(x * 1.0)),
}  # fmt: skip
ROUNDED_BETWEEN: dict[str, Callable[..., Value]] = {  # formulas in the operands' own type, which they read: each operation is rounded to it
    "pow3": lambda x, fmt: round_value(x * x, fmt) * x,
    "pow_minus_2": lambda x, fmt: 1.0 / round_value(x * x, fmt),
    "mse_loss": lambda x, y, fmt: _square(round_value(x - y, fmt)),
    "mse_loss_backward": lambda grad, x, y, fmt, factor: (
        round_value(round_value(as_value(factor), fmt) * round_value(x - y, fmt), fmt) * grad
    ),
    "sigmoid_backward": lambda grad, y, fmt: round_value(grad * round_value(1.0 - y, fmt), fmt) * y,
    "tanh_backward": _tanh_backward,
}


def round_value(x: Value, fmt: Format) -> Value:
    """Round to a format and back."""
    return x if fmt == F32 else Value(convert(fmt, F32, convert(F32, fmt, x.codes)))


def elementwise(name: str, *operands: ArrayLike, **options: Any) -> Array:
    """Compute an elementwise operator of PyTorch as its CUDA kernel does.

    Args:
        name: A key of OPERATORS or of ROUNDED_BETWEEN.
        *operands: Arrays of one dtype, bfloat16, float16 or float32, and Python's numbers, which are rounded to f32.
        **options: Numbers that the formula takes, as `alpha` of "add".

    Returns:
        An array of the operands' dtype.

    Raises:
        NotModelled: The operator has no formula, or the dtype is another one.
    """
    if name not in OPERATORS and name not in ROUNDED_BETWEEN:
        known = ", ".join((*OPERATORS, *ROUNDED_BETWEEN))
        raise NotModelled(f"{name}: its device function is not known; known are {known} (torch_cuda/elementwise.py, OPERATORS)")
    if name == "div" and isinstance(operands[1], float | int):  # PyTorch multiplies by the reciprocal, which it rounds to f32 once
        with np.errstate(divide="ignore", invalid="ignore"):
            name, operands = "mul", (operands[0], float(np.divide(1.0, operands[1])))
    given = [x if isinstance(x, float | int) else array_codes(jnp.asarray(x)) for x in operands]
    formats = [x[0] for x in given if isinstance(x, tuple)]
    if len(set(formats)) != 1 or formats[0] not in FORMATS:
        raise NotModelled(f"{name}: got {', '.join(map(str, formats))}; expected operands of one of bf16, f16 and f32")
    fmt = formats[0]
    values = [Value(convert(fmt, F32, x[1])) if isinstance(x, tuple) else as_value(x) for x in given]
    found = ROUNDED_BETWEEN[name](*values, fmt, **options) if name in ROUNDED_BETWEEN else OPERATORS[name](*values, **options)
    return to_float(fmt, convert(F32, fmt, found.codes), given_dtype(fmt))


def given_dtype(fmt: Format) -> Any:
    """Return JAX's dtype of a format."""
    return {BF16: jnp.bfloat16, F16: jnp.float16, F32: jnp.float32}[fmt]
