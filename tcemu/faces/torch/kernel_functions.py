"""Softmax, norms and activations of torch by kernels of `tcemu.functional`: the operator, and the handlers of torch's functions.

A handler is a function of (mode, function, arguments), as those of `function_handlers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from jax import Array

from tcemu.faces.torch.exchange import DTYPES
from tcemu.faces.torch.function_handlers import Handler, bind_arguments, call_original
from tcemu.faces.torch.operators import Operator, Static, find_by_name, register_name
from tcemu.operations.functional.kernel_values import KernelValue
from tcemu.uses.emulation.function_choices import compute_function
from tcemu.uses.emulation.function_patterns import FLOATS
from tcemu.uses.emulation.survey import Function

if TYPE_CHECKING:
    from tcemu.faces.torch.module_emulation import ProductMode

KERNEL_FLOATS = tuple(dtype for dtype, name in DTYPES.items() if name.name in FLOATS)
OPERATOR = "kernel_function"


class AppliedKernel(NamedTuple):
    """A function and the kernel that computes it, as the operator knows them."""

    function: Function
    kernel: KernelValue | str


def register_kernel(function: Function, kernel: KernelValue | str) -> str:
    """Return the name by which the operator knows a function and its kernel. It is one for all layers, so that they share a program."""
    return register_name(AppliedKernel(replace(function, name=function.kind, index=0, parameters=(), scope=""), kernel))


def _compute(arrays: Sequence[Any], _: Array | None, static: Static) -> Array:
    applied = find_by_name(static[0])
    return compute_function(applied.function, applied.kernel, *arrays)


kernel_function_op = Operator(
    OPERATOR,
    "Tensor x, Tensor? weight, Tensor? bias",
    "str by, ScalarType dtype",
    _compute,
    lambda tensors, static: (tensors[0].shape, static[-1]),
).register()


class FunctionCall(NamedTuple):
    """One call of a softmax, a norm or an activation.

    Attributes:
        kind: Kind of the function, as in `Function`.
        x: The operand. The rows of a norm are its last axis.
        original: torch's own function of x, with all other arguments.
        dtype: Dtype of the result, or None for that of x.
        axis: Axis of the rows, counted from the last.
        weight: Weight of a norm, a vector, or None.
        bias: Bias of a norm, a vector, or None.
        eps: Number that a norm adds.
        form: The formula of GELU.
        shape: Shape of the result, if it is not x's.
    """

    kind: str
    x: torch.Tensor
    original: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype | None = None
    axis: int = -1
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    eps: float | None = None
    form: str = ""
    shape: tuple[int, ...] | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The operand, the weight and the bias, without those that are None."""
        return tuple(tensor for tensor in (self.x, self.weight, self.bias) if tensor is not None)

    def widen(self) -> FunctionCall:
        """Return the call with its operands as float32, where autocast would widen them.

        The original function tells: it is called without any rows.
        """
        if not torch.is_autocast_enabled(self.x.device.type) or self.x.dtype not in KERNEL_FLOATS or self.dtype is not None:
            return self
        if self.original(self.x.new_empty((0, *self.x.shape))).dtype == self.x.dtype:
            return self
        weight, bias = (tensor if tensor is None else tensor.float() for tensor in (self.weight, self.bias))
        return self._replace(x=self.x.float(), weight=weight, bias=bias)


# ---- handlers

Parse = Callable[[Callable[..., torch.Tensor], dict[str, Any]], FunctionCall | None]  # torch's function and its arguments by name


def _softmax(kind: str, func: Callable, arguments: dict[str, Any]) -> FunctionCall | None:
    x, axis, dtype = arguments["input"], arguments.get("dim"), arguments.get("dtype")
    if not isinstance(axis, int) or x.ndim == 0 or not -x.ndim <= axis < x.ndim:
        return None
    axis = axis - x.ndim if axis >= 0 else axis
    original = partial(func, dim=axis, dtype=dtype)
    # torch rounds x first where the dtype is narrower; where it is wider, its kernel reads x as it is
    x = x if dtype is None or dtype == torch.float32 else x.to(dtype)
    return FunctionCall(kind, x, original, dtype, axis)


def _norm(kind: str, default_eps: float, func: Callable, arguments: dict[str, Any]) -> FunctionCall | None:
    x, shape = arguments["input"], tuple(arguments["normalized_shape"])
    weight, bias = arguments.get("weight"), arguments.get("bias")
    shapes = [tuple(value.shape) for value in (weight, bias) if value is not None]
    if not shape or any(found != shape for found in (tuple(x.shape[-len(shape) :]), *shapes)):
        return None  # torch says what is wrong
    eps = default_eps if arguments.get("eps") is None else arguments["eps"]

    def original(x: torch.Tensor) -> torch.Tensor:
        return func(x.unflatten(-1, shape) if len(shape) > 1 else x, **{n: v for n, v in arguments.items() if n != "input"})

    weight, bias = (value if value is None or value.ndim == 1 else value.reshape(-1) for value in (weight, bias))
    return FunctionCall(kind, x.flatten(x.ndim - len(shape)), original, weight=weight, bias=bias, eps=eps, shape=tuple(x.shape))


def _silu(func: Callable, arguments: dict[str, Any]) -> FunctionCall | None:
    return None if arguments.get("inplace", False) else FunctionCall("silu", arguments["input"], func)


def _gelu(func: Callable, arguments: dict[str, Any]) -> FunctionCall | None:
    approximate = arguments.get("approximate", "none")
    form = "tanh" if approximate == "tanh" else "erf"
    return FunctionCall("gelu", arguments["input"], partial(func, approximate=approximate), form=form)


def _make_handler(names: str, parse: Parse) -> Handler:
    """Make the handler of a function of torch with arguments of these names, in their order.

    parse: function from torch's function and its arguments by name to the call, or to None for a call that is left.
    """

    def handler(mode: ProductMode, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not mode.chooses_functions:
            return func(*args, **kwargs)
        arguments = bind_arguments(names, args, kwargs)
        call = None if arguments is None else parse(partial(call_original, func), arguments)
        chosen = None if call is None else mode.find_kernel(call)
        return None if call is None or chosen is None else mode.apply_kernel(call, chosen)

    return handler


# torch 2.13 takes float32's where eps is None, also for float16 and bfloat16
RMS_NORM_EPS, LAYER_NORM_EPS = torch.finfo(torch.float32).eps, 1e-5
RMS_NORM = _make_handler("input normalized_shape weight eps", partial(_norm, "rms_norm", RMS_NORM_EPS))
LAYER_NORM = _make_handler("input normalized_shape weight bias eps cudnn_enable", partial(_norm, "layer_norm", LAYER_NORM_EPS))
SOFTMAXES = ("softmax", "log_softmax")
KERNEL_HANDLERS: dict[Any, Handler] = {
    **{getattr(F, kind): _make_handler("input dim _stacklevel dtype", partial(_softmax, kind)) for kind in SOFTMAXES},
    **{
        getattr(owner, kind): _make_handler("input dim dtype", partial(_softmax, kind))
        for kind in SOFTMAXES
        for owner in (torch, torch.Tensor, torch.special)
    },
    **dict.fromkeys((F.rms_norm, torch.rms_norm), RMS_NORM),
    **dict.fromkeys((F.layer_norm, torch.layer_norm), LAYER_NORM),
    F.silu: _make_handler("input inplace", _silu),
    F.gelu: _make_handler("input approximate", _gelu),
}
