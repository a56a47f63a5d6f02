"""One step of PyTorch's Adam, AdamW and SGD on a GPU in each form: single tensors, foreach, fused.

Single tensors and foreach round each operation of the step to the parameter's dtype. They differ in the quotient by a number, which is a
product with the rounded reciprocal for single tensors. The fused kernels compute in f32 and round the parameter and each state once.

Source: PyTorch 2.13.0, torch/optim/adam.py, sgd.py; aten/src/ATen/native/cuda/fused_adam_utils.cuh, ForeachFunctors.cuh; PyTorch 2.11.0,
FusedSgdKernel.cu. Held to words of PyTorch 2.11.0 on an H200: `tests/operations/functional/test_torch_cuda.py`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.base.errors import NotModelled
from tcemu.engine.arithmetic.f32_arithmetic import f32_code
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.operations.functional.torch_cuda.device_functions import Value, fma, powf, sqrt, where
from tcemu.operations.functional.torch_cuda.elementwise import OPERATORS, round_value
from tcemu.operations.functional.torch_cuda.rows import operand_values, result_array

FORMS = ("single", "foreach", "fused")
VECTOR = 4  # elements that a thread of a fused kernel takes at a time


class AdamState(NamedTuple):
    """The state of Adam, in the parameter's dtype.

    Attributes:
        exp_avg: Running mean of the gradient.
        exp_avg_sq: Running mean of its square.
        max_exp_avg_sq: Largest such mean so far, with AMSGrad; else None.
    """

    exp_avg: ArrayLike
    exp_avg_sq: ArrayLike
    max_exp_avg_sq: ArrayLike | None = None


def _check(form: str) -> None:
    if form not in FORMS:
        raise NotModelled(f"form={form!r}: expected one of {', '.join(FORMS)} (torch_cuda/optimizers.py, FORMS)")


_values = partial(operand_values, "an optimizer's step")


def adam_step(
    param: ArrayLike,
    grad: ArrayLike,
    state: AdamState,
    step: int,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
    decoupled: bool = False,
    form: str = "foreach",
) -> tuple[Array, AdamState]:
    """Return the parameter and the state after one step of PyTorch's Adam on a GPU.

    Args:
        param: The parameter, bfloat16, float16 or float32.
        grad: Its gradient, of the same dtype.
        state: The state before; zeros before the first step.
        step: Number of the step, from 1.
        lr: The learning rate.
        betas: Shares of the running means that are kept.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        maximize: The gradient is negated.
        decoupled: The decay of AdamW; else it is added to the gradient.
        form: "single", "foreach" or "fused".

    Returns:
        The parameter and the state, in the parameter's dtype.

    Raises:
        NotModelled: The dtype or the form is another one, or a fused step adds weight decay to a gradient whose size is no multiple of 4.
    """
    _check(form)
    beta1, beta2 = betas
    if form == "fused":
        numbers = (lr, beta1, beta2, eps, weight_decay, float(step))
    else:
        bias1, bias2 = 1 - beta1**step, 1 - beta2**step
        decay = 1 - lr * weight_decay if decoupled else weight_decay
        root2 = 1 / bias2**0.5 if form == "single" else bias2**0.5
        numbers = (1 - beta1, beta2, 1 - beta2, root2, eps, -(lr / bias1), decay)
    codes = jnp.asarray([f32_code(number) for number in numbers])
    if form == "fused" and weight_decay != 0 and not decoupled and int(np.size(param)) % VECTOR:
        raise NotModelled(
            f"adam_step: got {np.size(param)} elements, fused, with weight decay; known are multiples of {VECTOR}, or decoupled=True "
            "(torch_cuda/optimizers.py, VECTOR)"
        )
    decays = "none" if weight_decay == 0 else "decoupled" if decoupled else "added"
    return _adam(form, decays, maximize, codes, param, grad, state)


def adamw_step(param: ArrayLike, grad: ArrayLike, state: AdamState, step: int, **options) -> tuple[Array, AdamState]:
    """Return the parameter and the state after one step of PyTorch's AdamW on a GPU.

    Args:
        param: As in `adam_step`.
        grad: As in `adam_step`.
        state: As in `adam_step`.
        step: As in `adam_step`.
        **options: The keyword arguments of `adam_step`; weight_decay is 0.01 by default.

    Raises:
        NotModelled: As in `adam_step`.
    """
    return adam_step(param, grad, state, step, **{"weight_decay": 0.01, **options}, decoupled=True)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _adam(form: str, decays: str, maximize: bool, numbers: Array, param: ArrayLike, grad: ArrayLike, state: AdamState):
    fmt, p = _values(param)
    g, m, v = (_values(x)[1] for x in (grad, state.exp_avg, state.exp_avg_sq))
    largest = None if state.max_exp_avg_sq is None else _values(state.max_exp_avg_sq)[1]
    scalars = [Value(number) for number in numbers]
    g = -g if maximize else g
    compute = _fused_adam if form == "fused" else partial(_adam_by_operations, form, fmt)
    p, m, v, largest = compute(decays, scalars, p, g, m, v, largest)
    found = AdamState(result_array(m, fmt), result_array(v, fmt), None if largest is None else result_array(largest, fmt))
    return result_array(p, fmt), found


def _adam_by_operations(form: str, fmt: Format, decays: str, numbers: list[Value], p: Value, g: Value, m: Value, v: Value, largest):
    share1, beta2, share2, root2, eps, rate, decay = numbers
    op = lambda name, *operands, **options: round_value(OPERATORS[name](*operands, **options), fmt)
    if decays == "decoupled":
        p = op("mul", p, decay)
    elif decays == "added":
        g = op("add", g, p, alpha=decay)
    m = round_value(where(abs(share1) < 0.5, fma(share1, g - m, m), fma(m - g, 1.0 - share1, g)), fmt)
    v = op("addcmul", op("mul", v, beta2), g, g, value=share2)
    if largest is not None:
        largest = where(largest < v, v, largest)
    root = op("sqrt", v if largest is None else largest)
    root = op("mul" if form == "single" else "div", root, root2)
    return op("addcdiv", p, m, op("add", root, eps), value=rate), m, v, largest


def _fused_adam(decays: str, numbers: list[Value], p: Value, g: Value, m: Value, v: Value, largest):
    lr, beta1, beta2, eps, decay, step = numbers
    if decays == "decoupled":
        p = fma(-(lr * decay), p, p)
    elif decays == "added":  # the code of a thread's first element of four does not contract the product and the sum
        first = (jnp.arange(p.codes.size) % VECTOR == 0).reshape(p.codes.shape)
        g = where(first, g + p * decay, fma(p, decay, g))
    square = g * g
    m = fma(beta1, m, fma(-beta1, g, g))
    v = fma(beta2, v, fma(-beta2, square, square))
    rate = lr / (1.0 - powf(beta1, step))
    root2 = sqrt(1.0 - powf(beta2, step))
    if largest is not None:
        largest = where(largest < v, v, largest)
    root = sqrt(v if largest is None else largest) / root2 + eps
    return p - rate * m / root, m, v, largest


def sgd_step(
    param: ArrayLike,
    grad: ArrayLike,
    momentum_buffer: ArrayLike | None = None,
    *,
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    form: str = "foreach",
) -> tuple[Array, Array | None]:
    """Return the parameter and the momentum buffer after one step of PyTorch's SGD on a GPU.

    Args:
        param: The parameter, bfloat16, float16 or float32.
        grad: Its gradient, of the same dtype.
        momentum_buffer: The buffer before; None in the first step.
        lr: The learning rate.
        momentum: Share of the buffer that is kept.
        dampening: Share of the gradient that the buffer does not take.
        weight_decay: Weight decay, added to the gradient.
        nesterov: Nesterov's momentum.
        maximize: The gradient is negated.
        form: "single", "foreach" or "fused".

    Returns:
        The parameter, and the buffer or None without momentum, in the parameter's dtype.

    Raises:
        NotModelled: The dtype or the form is another one.
    """
    _check(form)
    numbers = jnp.asarray([f32_code(number) for number in (lr, momentum, 1 - dampening, weight_decay)])
    return _sgd(form == "fused", momentum != 0, weight_decay != 0, nesterov, maximize, numbers, param, grad, momentum_buffer)


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _sgd(
    is_fused: bool, has_momentum: bool, decays: bool, nesterov: bool, maximize: bool, numbers: Array, param, grad, momentum_buffer
) -> tuple[Array, Array | None]:
    fmt, p = _values(param)
    _, g = _values(grad)
    between = F32 if is_fused else fmt
    lr, momentum, share, decay = (Value(number) for number in numbers)
    g = -g if maximize else g
    if decays:
        g = round_value(fma(decay, p, g), between)
    buffer = None
    if has_momentum:
        if momentum_buffer is None:
            buffer = g
        elif is_fused:
            buffer = fma(share, g, momentum * _values(momentum_buffer)[1])
        else:
            buffer = round_value(fma(share, g, round_value(_values(momentum_buffer)[1] * momentum, fmt)), fmt)
        g = round_value(fma(momentum, buffer, g), between) if nesterov else buffer
    p = fma(-lr, g, p)
    return result_array(p, fmt), None if buffer is None else result_array(buffer, fmt)
