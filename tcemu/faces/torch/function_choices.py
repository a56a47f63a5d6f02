"""The decisions that PyTorch takes before its dispatcher: `emulate(model, gpu=...)` takes them as for tensors on a GPU.

Functions that PyTorch decomposes in another way on a CPU than on a GPU are taken by a function mode: dropout, RMS norm, attention,
recurrent layers. Autocast, optimizers, fused layers and seeds ask functions that are answered as on a GPU.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tcemu.base.errors import NotModelled
from tcemu.faces.torch.exchange import NUMPY_DTYPES
from tcemu.operations.functional.torch_cuda.attention import CHOICES, CUDNN_HIDDEN, AttentionCall
from tcemu.operations.functional.torch_cuda.random_numbers import GpuGenerator

if TYPE_CHECKING:
    from tcemu.faces.torch.gpu_emulation import GpuEmulation


class GpuDefaults:
    """A context in which PyTorch decides, before its dispatcher, as it does for tensors on a GPU without this mode. It is of one thread.

    Seeds of GPUs reach the generators of the thread's blocks. Optimizers and `clip_grad_norm_` take their foreach forms by default.
    Multi-head attention and transformer layers take their fused forms where no gradient is needed, and these have no rule:
    `has_torch_function` would tell them that a mode is open.
    """

    _lock, _originals = threading.Lock(), list[tuple[Any, str, Any]]()  # of all blocks
    _open: ClassVar = defaultdict[int, list[GpuGenerator]](list)  # generators of the open blocks, by threads

    def __init__(self, generator: GpuGenerator) -> None:
        self._generator = generator

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        with self._lock:
            if not self._open:
                for name, attribute, answer in DEFAULTS:
                    module = importlib.import_module(name)
                    self._originals.append((module, attribute, original := getattr(module, attribute)))
                    setattr(module, attribute, partial(self._answer, original, answer))
            self._open[self._thread].append(self._generator)

    def _answer(self, original: Callable, answer: Callable, *args: Any) -> Any:
        return answer(original, *args) if threading.get_ident() in self._open else original(*args)

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._open[self._thread].pop()
            if not self._open[self._thread]:
                del self._open[self._thread]
            while not self._open and self._originals:
                setattr(*self._originals.pop())


def _foreach_devices(original: Callable[[], list[str]]) -> list[str]:
    return [*original(), "cpu"]


def _seed_generators(original: Callable[[int], None], seed: int) -> None:
    for generator in GpuDefaults._open[threading.get_ident()]:
        generator.manual_seed(seed)
    original(seed)


def _keeps_from_fused_form(original: Callable, operands: Sequence[Any]) -> bool:
    if torch.is_autocast_enabled("cpu"):  # on a GPU too it keeps layers from their fused forms
        return original(operands)
    return any(hasattr(type(x), "__torch_function__") and type(x) not in (torch.Tensor, torch.nn.Parameter) for x in operands)


DEFAULTS = (
    ("torch.utils._foreach_utils", "_get_foreach_kernels_supported_devices", _foreach_devices),
    ("torch.optim.optimizer", "_get_foreach_kernels_supported_devices", _foreach_devices),
    ("torch.overrides", "has_torch_function", _keeps_from_fused_form),  # as torch.nn's modules call it
    ("torch.cuda", "manual_seed", _seed_generators),
    ("torch.cuda", "manual_seed_all", _seed_generators),  # as torch.manual_seed calls it
)

# Functions that autocast computes in float32 on a GPU. Source: PyTorch 2.11.0, aten/src/ATen/autocast_mode.h (AT_FORALL_FP32 and others).
FLOAT32_UNDER_AUTOCAST = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan", "pow",
    "softplus", "layer_norm", "native_layer_norm", "group_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss",
    "nll_loss", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "soft_margin_loss", "triplet_margin_loss", "binary_cross_entropy_with_logits", "cross_entropy", "dist", "pdist", "cdist",
    "renorm", "logsumexp", "prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum", "norm", "__pow__", "__rpow__", "rms_norm",
}  # fmt: skip
LOW_PRECISION = (torch.bfloat16, torch.float16)
# Functions that are one kernel on a GPU, while a CPU calls products and activations. Source: PyTorch 2.11.0, aten/src/ATen/native/RNN.cpp;
# tests/gpu_runs/torch_dispatched.py on an H200.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")


class FunctionChoices(TorchFunctionMode):
    """Takes the functions that PyTorch decomposes in another way on a CPU than on a GPU, and autocast's list of a GPU."""

    def __init__(self, emulation: GpuEmulation) -> None:
        super().__init__()
        self.emulation = emulation
        self._open: list[Callable] = []  # functions whose bodies run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return scaled_dot_product_attention(self.emulation, *args, **kwargs)
        if func in (torch.nn.functional.rms_norm, torch.rms_norm):
            return rms_norm(self.emulation, func, *args, **kwargs)
        name = getattr(func, "__name__", "")
        if func is torch.dropout:
            return dropout(func, *args, **kwargs)
        if name in RECURRENT:
            return self.emulation.leave_function(func, args, kwargs)
        if torch.is_autocast_enabled("cpu") and name in FLOAT32_UNDER_AUTOCAST:
            widen = lambda x: x.float() if x.dtype in LOW_PRECISION else x
            with torch.autocast("cpu", enabled=False):
                args, kwargs = pytree.tree_map_only(torch.Tensor, widen, (args, kwargs))
                return func(*args, **kwargs)
        if func in self._open or (body := _python_body(func)) is None:  # a body may hand its function to a mode by another one
            return func(*args, **kwargs)
        self._open.append(func)
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self._open.pop()


@lru_cache(maxsize=1024)
def _python_body(func: Any) -> Callable | None:
    """Return a function that does not hand itself to a mode, which then sees what it calls; None for a function that calls no others.

    These are functions of torch.nn.functional, and backward passes, which may compute a forward again.
    """
    runs_backward = func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
    if not isinstance(func, FunctionType) or not (runs_backward or func.__module__ in ("torch.nn.functional", "torch.functional")):
        return None
    never = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False)
    body = FunctionType(func.__code__, func.__globals__ | never, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def dropout(func: Callable[..., torch.Tensor], input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Call the operator that PyTorch calls on a GPU.

    Source: PyTorch 2.11.0, aten/src/ATen/native/Dropout.cpp (`is_fused_kernel_acceptable`); the form that writes to its operand has none.
    """
    if train and 0 < p < 1 and input.numel():
        return torch.ops.aten.native_dropout(input, p, train)[0]
    return func(input, p, train)


def rms_norm(
    emulation: GpuEmulation,
    func: Callable[..., torch.Tensor],
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Call the operator that PyTorch calls on a GPU, unless it composes the norm there too.

    Source: PyTorch 2.11.0, aten/src/ATen/native/layer_norm.cpp (`rms_norm_symint`).
    """
    if not input.numel() or (weight is not None and weight.dtype != input.dtype):
        return func(input, normalized_shape, weight, eps)
    if len(normalized_shape) == 1 and input.dtype in (*LOW_PRECISION, torch.float32):
        return _RmsNorm.apply(emulation, input, list(normalized_shape), weight, eps)
    return emulation.compute_alone(torch.ops.aten._fused_rms_norm.default, input, list(normalized_shape), weight, eps)[0]


class _RmsNorm(torch.autograd.Function):
    """RMS norm and its gradients by operators that a CPU decomposes before a mode sees them."""

    @staticmethod
    def forward(
        ctx: Any, emulation: GpuEmulation, x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
    ) -> Any:
        out, inverse = emulation.compute_alone(torch.ops.aten._fused_rms_norm.default, x, shape, weight, eps)
        ctx.save_for_backward(x, inverse, weight)
        ctx.emulation, ctx.shape = emulation, shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, inverse, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
        run = torch.ops.aten._fused_rms_norm_backward.default
        found = ctx.emulation.compute_alone(run, grads[0], x, ctx.shape, inverse, weight, wanted)
        return None, found[0], None, found[1], None


def scaled_dot_product_attention(
    emulation: GpuEmulation,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call the operator that PyTorch calls on a GPU. Autograd knows its gradient, an operator too.

    Source: PyTorch 2.11.0, aten/src/ATen/native/transformers/attention.cpp (`scaled_dot_product_attention`).
    """
    if torch.is_autocast_enabled("cpu"):
        attn_mask, value, key, query = (_lower(x) for x in (attn_mask, value, key, query))  # in the order of the GPU's copies
    operands = (query, key, value)
    axes = 0 if attn_mask is None else attn_mask.ndim
    if (axes and is_causal) or axes > query.ndim or len({x.dtype for x in operands}) > 1:
        raise RuntimeError(
            f"scaled_dot_product_attention: got {', '.join(str(x.dtype) for x in operands)} with {query.ndim} axes, {is_causal=} and an "
            f"attn_mask with {axes} axes; PyTorch refuses dtypes that differ, a mask beside is_causal and one with more axes"
        )
    if any(x.is_nested for x in operands):
        raise NotModelled(
            "scaled_dot_product_attention: nested tensors, and variable lengths, have no rule; pad the sequences and give attn_mask "
            "(faces/torch/function_choices.py)"
        )
    needs_sums = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    call = facts_of_call(emulation, operands, attn_mask, dropout_p, is_causal, enable_gqa)
    backend = "math" if call is None else choose_backend(call)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = torch.scalar_tensor(CUDNN_HIDDEN if backend == "cudnn" else -math.inf, dtype=query.dtype)
        attn_mask = torch.where(attn_mask, torch.scalar_tensor(0.0, dtype=query.dtype), hidden)
    if backend == "math":
        run, given = torch.ops.aten._scaled_dot_product_attention_math, {"scale": scale, "enable_gqa": enable_gqa}
        if not dropout_p:
            return run(query, key, value, attn_mask, 0.0, is_causal, None, **given)[0]
        wide = [x.float() if x.dtype in LOW_PRECISION else x for x in (query, key, value)]
        weights = run(*wide[:2], wide[2][..., :0], attn_mask, 0.0, is_causal, None, **given)[1]  # of no values: the weights alone
        values = wide[2].repeat_interleave(query.shape[-3] // value.shape[-3], -3) if enable_gqa else wide[2]
        return (dropout(torch.dropout, weights, dropout_p, True) @ values).to(query.dtype)
    if backend == "cudnn":
        run = torch.ops.aten._scaled_dot_product_cudnn_attention
        return run(query, key, value, attn_mask, needs_sums, dropout_p, is_causal, False, scale=scale)[0]
    if backend == "efficient":
        run = torch.ops.aten._scaled_dot_product_efficient_attention
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        return run(query, key, value, attn_mask, needs_sums, dropout_p, is_causal, scale=scale)[0]
    size = query.shape[-1]
    padded = [torch.nn.functional.pad(x, (0, -size % 8)) if size % 8 else x for x in (query, key, value)]
    scale = size**-0.5 if scale is None else scale
    return torch.ops.aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0][..., :size]


def _lower(x: Any) -> Any:
    """Cast a float to autocast's dtype, as a GPU's autocast does before `scaled_dot_product_attention`."""
    if x is None or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype("cpu"))


def facts_of_call(
    emulation: GpuEmulation,
    operands: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    grouped: bool,
) -> AttentionCall | None:
    """Return the facts on which the choice of a backend depends; None for a dtype that only the math form takes."""
    query, key, value = operands
    if query.dtype not in NUMPY_DTYPES:
        return None
    strides = [x.stride(-1) == 1 or (query.shape[-1] == 1 and x is not mask) for x in (*operands, *([] if mask is None else [mask]))]
    return AttentionCall(
        *(tuple(x.shape) for x in operands),
        dtype=NUMPY_DTYPES[query.dtype] if query.dtype == key.dtype == value.dtype else None,
        causal=causal,
        mask=None if mask is None else tuple(mask.shape),
        mask_gradient=mask is not None and mask.requires_grad,
        dropout=dropout_p,
        grouped=grouped,
        is_dense=all(strides),
        deterministic=has_fixed_orders(),
        gpu=emulation.gpu,
    )


def has_fixed_orders() -> bool:
    """Return whether PyTorch takes deterministic algorithms alone."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def choose_backend(call: AttentionCall) -> str:
    """Return the backend that PyTorch takes on the GPU, of those that are switched on."""
    switches = torch.backends.cuda
    enabled = {
        "cudnn": switches.cudnn_sdp_enabled(), "flash": switches.flash_sdp_enabled(), "efficient": switches.mem_efficient_sdp_enabled(),
        "math": switches.math_sdp_enabled(),
    }  # fmt: skip
    found = [name for name, conditions in CHOICES.items() if enabled[name] and all(condition.holds(call) for condition in conditions)]
    if not found:
        raise RuntimeError(f"scaled_dot_product_attention: no backend that is switched on takes {call}")
    return found[0]
