"""Functions of torch that are products, and the handler that runs in the place of each.

A handler is a function of (mode, function, arguments) that returns the result, or None where the policy leaves its products; the mode then
calls the original function. The mode is a `ProductMode` of `module_emulation`, which imports this module.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from tcemu.faces.torch.module_emulation import ProductMode


def call_original(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function of a product that is left, hidden from the modes of the modules around."""
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


def _without_dispatch(func: Callable) -> Callable:
    """Return a copy of a function that never dispatches to a mode as a whole, so that the mode sees the functions that it calls."""
    if not isinstance(func, types.FunctionType):  # a mock: the documentation is built without torch
        return func
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    opened = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


OPEN_MULTI_HEAD_ATTENTION = _without_dispatch(
    F.multi_head_attention_forward
)  # once; of functions that remember what they returned torch.compile warns


def multi_head_attention_forward(mode: ProductMode, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run multi-head attention part by part: its projections and products are handled one by one."""
    mode.is_decomposing = True
    with mode:
        return OPEN_MULTI_HEAD_ATTENTION(*args, **kwargs)


def scaled_dot_product_attention(mode: ProductMode, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run attention as torch's math backend does, as two products with a softmax between them.

    q and k are each multiplied by the root of the scale, the mask is added, then softmax and dropout follow, all in the dtype of the
    operands. The original function runs if the policies leave both products and the softmax.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    q, k, v = arguments["query"], arguments["key"], arguments["value"]
    if arguments.get("enable_gqa", False):
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
    axes, last = tuple(range(len(batch))), len(batch) + 1
    score_axes, value_axes = (((last,), (last,)), (axes, axes)), (((last,), (last - 1,)), (axes, axes))
    weights = q[..., :1].expand(*batch, q.shape[-2], k.shape[-2])  # placeholder with the shape and dtype of the softmax
    score_replacement = mode.find_replacement("scores", (q, k), score_axes)
    softmax = mode.find_softmax(weights)
    value_replacement = mode.find_replacement("values", (weights, v), value_axes)
    if score_replacement is None and softmax is None and value_replacement is None:
        return None
    factor = arguments.get("scale")
    root = math.sqrt(1 / math.sqrt(q.shape[-1]) if factor is None else factor)
    q, k = q * root, k * root
    if score_replacement is None:
        scores = call_original(torch.matmul, q, k.mT)
    else:
        scores = mode.apply_replacement(score_replacement, (q, k), score_axes)
    mask, causal, dropout = arguments.get("attn_mask"), arguments.get("is_causal", False), arguments.get("dropout_p", 0.0)
    weights = _attention_weights(partial(mode.compute_softmax, softmax), scores, mask, causal, dropout)
    if value_replacement is None:
        return call_original(torch.matmul, weights, v)
    return mode.apply_replacement(value_replacement, (weights, v), value_axes)


def _attention_weights(
    softmax: Callable[[torch.Tensor], torch.Tensor], scores: torch.Tensor, mask: torch.Tensor | None, causal: bool, dropout: float
) -> torch.Tensor:
    """Return the softmax of the scores under a mask. A row that is masked as a whole has weights 0."""
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    weights = softmax(scores)
    if mask is not None:
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    return F.dropout(weights, dropout) if dropout else weights


# ---- einsum and tensordot


def tensordot(mode: ProductMode, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Contract the last axes of a with the first axes of b, or the listed axes."""
    arguments = dict(zip(("a", "b", "dims"), args, strict=False)) | kwargs
    a, b, dims = arguments["a"], arguments["b"], arguments.get("dims", 2)
    if arguments.get("out") is not None or isinstance(dims, torch.Tensor):
        return None
    left, right = (range(a.ndim - dims, a.ndim), range(dims)) if isinstance(dims, int) else dims
    left, right = ([axis % x.ndim for axis in axes] for axes, x in ((left, a), (right, b)))
    return mode.dot_general("tensordot", (a, b), ((tuple(left), tuple(right)), ((), ())))


def einsum(mode: ProductMode, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Contract operands from left to right, two at a time. An einsum with one operand, or with an axis twice in an operand, is left."""
    if kwargs or not isinstance(args[0], str):
        return None
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], tuple | list) else list(args[1:])
    terms, result = _parse_equation(args[0], [x.ndim for x in operands])
    if len(operands) < 2 or any(len(set(term)) < len(term) for term in terms):
        return None
    value, names = operands[0], terms[0]
    for number, (x, term) in enumerate(zip(operands[1:], terms[1:], strict=True), 1):
        remaining = {*result, *(name for later in terms[number + 1 :] for name in later)}
        contracted = _contract(mode, (value, x), (names, term), remaining)
        if contracted is None and number == 1:
            return None
        if contracted is None:  # the policy leaves this product, but not all of them
            names_after = [name for name in dict.fromkeys([*names, *term]) if name in remaining]
            contracted = call_original(torch.einsum, f"{_letters(names)},{_letters(term)}->{_letters(names_after)}", value, x), names_after
        value, names = contracted
    extra = [axis for axis, name in enumerate(names) if name not in result]
    value = value.sum(extra) if extra else value
    names = [name for name in names if name in result]
    return value.permute([names.index(name) for name in result])


def _parse_equation(equation: str, ndims: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Return the names of all axes; those of "..." are numbers, counted from the last."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")

    def name_axes(term: str, ndim: int) -> list[str]:
        before, dots, after = term.partition("...")
        more = ndim - len(before) - len(after) if dots else 0
        return [*before, *(str(number) for number in range(more - 1, -1, -1)), *after]

    input_names = [name_axes(term, ndim) for term, ndim in zip(terms, ndims, strict=True)]
    ellipsis_names = sorted({name for term in input_names for name in term if name.isdigit()}, key=int, reverse=True)
    if arrow:
        before, dots, after = right.partition("...")
        return input_names, [*before, *(ellipsis_names if dots else ()), *after]
    letters = [name for term in input_names for name in term if not name.isdigit()]
    return input_names, [*ellipsis_names, *sorted(name for name in letters if letters.count(name) == 1)]


def _letters(names: Sequence[str]) -> str:
    """Return axis names as one letter each. Those of "..." become capitals, which equations here do not use."""
    return "".join(chr(ord("A") + int(name)) if name.isdigit() else name for name in names)


def _contract(mode: ProductMode, operands: tuple[Any, Any], terms: tuple[list[str], list[str]], kept: set[str]) -> Any:
    """Contract two operands and return the result with the names of its axes; None if the policy leaves it or nothing is summed."""
    (a, b), (left, right) = operands, terms
    for side, own, other in ((0, left, right), (1, right, left)):  # axes of one operand alone that are not in the result are summed first
        alone = [axis for axis, name in enumerate(own) if name not in kept and name not in other]
        if alone:
            operands = tuple(x.sum(alone) if at == side else x for at, x in enumerate(operands))  # type: ignore[assignment]
            terms = tuple([n for axis, n in enumerate(t) if axis not in alone] if at == side else t for at, t in enumerate(terms))  # type: ignore[assignment]
            return _contract(mode, operands, terms, kept)
    shared = [name for name in left if name in right]
    sizes = {name: (a.shape[left.index(name)], b.shape[right.index(name)]) for name in shared}
    if any(x != y for x, y in sizes.values()):  # one of them is 1, and is broadcast
        return None
    batch, summed = [n for n in shared if n in kept], [n for n in shared if n not in kept]
    if not summed:
        return None
    axes = [tuple(term.index(name) for name in names) for names in (summed, batch) for term in (left, right)]
    d = mode.dot_general("einsum", (a, b), ((axes[0], axes[1]), (axes[2], axes[3])))
    return None if d is None else (d, [*batch, *(n for n in left if n not in shared), *(n for n in right if n not in shared)])


# ---- linear, matmul and convolutions

RIGHT_OPERAND_NAMES = ("other", "mat2", "vec", "tensor")  # torch's names of the right operand
Handler = Callable[[Any, Callable, tuple, dict], Any]  # (mode, the function, its arguments) -> its result, or None: it is left


def bind_arguments(names: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return arguments by name, or None if there are others, such as out=."""
    listed = names.split()
    if len(args) > len(listed) or not set(kwargs) <= set(listed):
        return None
    return dict(zip(listed, args, strict=False)) | kwargs


def linear(mode: ProductMode, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Handle x · weightᵀ + bias."""
    arguments = bind_arguments("input weight bias", args, kwargs)
    if arguments is None or arguments["weight"].ndim != 2:
        return None
    x, weight = arguments["input"], arguments["weight"]
    return mode.dot_general("linear", (x, weight), (((x.ndim - 1,), (1,)), ((), ())), arguments.get("bias"))


def multiply_tensors(mode: ProductMode, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """Compute `torch.matmul` of any axes, or return None if the policy leaves it."""
    if a.ndim == 0 or b.ndim == 0:
        return None
    if b.ndim <= 2:
        return mode.dot_general("matmul", (a, b), (((a.ndim - 1,), (0,)), ((), ())), bias)
    if a.ndim == 1:
        d = multiply_tensors(mode, a.unsqueeze(0), b)
        return None if d is None else d.squeeze(-2)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    axes = tuple(range(len(batch)))
    return mode.dot_general("matmul", (a, b), (((a.ndim - 1,), (b.ndim - 2,)), (axes, axes)))


def matmul(mode: ProductMode, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Handle matmul, mm, bmm, mv, dot and the operator @."""
    values = [*args, *(kwargs[name] for name in ("input", "self", *RIGHT_OPERAND_NAMES) if name in kwargs)]
    tensors = len(values) == 2 == len(args) + len(kwargs) and all(isinstance(value, torch.Tensor) for value in values)
    return multiply_tensors(mode, *(values[::-1] if func is torch.Tensor.__rmatmul__ else values)) if tensors else None


def _make_addition(names: str, sums_batch: bool = False) -> Handler:
    """Make the handler of beta · input + alpha · product."""

    def handler(mode: ProductMode, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        arguments = bind_arguments(f"input {names}", args, kwargs)
        if arguments is None:
            return None
        beta, alpha = arguments.get("beta", 1), arguments.get("alpha", 1)
        first, second = names.split()[:2]
        a, b, bias = arguments[first], arguments[second], arguments["input"]
        if sums_batch:
            d = mode.dot_general("addbmm", (a, b), (((0, 2), (0, 1)), ((), ())))
        elif beta == alpha == 1 and b.ndim == 2 and a.ndim == 2:
            return multiply_tensors(mode, a, b, bias)
        else:
            d = multiply_tensors(mode, a, b)
        if d is None:
            return None
        d = d if alpha == 1 else alpha * d
        return d if beta == 0 else d + (bias if beta == 1 else beta * bias).to(d.dtype)

    return handler


def _make_convolution(ndim: int) -> Handler:
    def handler(mode: ProductMode, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        arguments = bind_arguments("input weight bias stride padding dilation groups", args, kwargs)
        if arguments is None:
            return None
        x, weight = arguments["input"], arguments["weight"]
        stride, dilation = (_per_axis(arguments.get(name, 1), ndim) for name in ("stride", "dilation"))
        batched = x.ndim == ndim + 2
        padding = _padding(arguments.get("padding", 0), weight.shape[2:], dilation)
        d = mode.convolution((x if batched else x.unsqueeze(0), weight), (stride, padding, dilation, arguments.get("groups", 1)))
        if d is None:
            return None
        bias = arguments.get("bias")
        d = d if bias is None else d + bias.to(d.dtype).reshape(-1, *(1,) * ndim)
        return d if batched else d.squeeze(0)

    return handler


def _per_axis(value: Any, ndim: int) -> tuple[int, ...]:
    """Return a number for each axis."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * ndim if len(values) == 1 else values


def _padding(padding: Any, window: Any, dilation: tuple[int, ...]) -> tuple[int, ...]:
    """Return the low and high padding of each axis."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [(size - 1) * step for size, step in zip(window, dilation, strict=True)]
        return tuple(side for total in totals for side in (total // 2, total - total // 2))
    return tuple(side for side in _per_axis(padding, len(window)) for _ in range(2))


def _torch_overloads(name: str) -> list[Any]:
    """Return a function of torch and the method of a tensor by the same name."""
    return [function for owner in (torch, torch.Tensor) if (function := getattr(owner, name, None)) is not None]


HANDLERS: dict[Any, Handler] = {
    F.linear: linear,
    **{func: matmul for name in ("matmul", "mm", "bmm", "mv", "dot", "__matmul__", "__rmatmul__") for func in _torch_overloads(name)},
    **{func: _make_addition("mat1 mat2 beta alpha") for func in _torch_overloads("addmm")},
    **{func: _make_addition("mat vec beta alpha") for func in _torch_overloads("addmv")},
    **{func: _make_addition("batch1 batch2 beta alpha") for func in _torch_overloads("baddbmm")},
    **{func: _make_addition("batch1 batch2 beta alpha", sums_batch=True) for func in _torch_overloads("addbmm")},
    torch.linalg.matmul: matmul,
    torch.functional.einsum: einsum,
    torch.functional.tensordot: tensordot,
    F.conv1d: _make_convolution(1),
    F.conv2d: _make_convolution(2),
    F.conv3d: _make_convolution(3),
    **{getattr(torch, f"conv{ndim}d"): _make_convolution(ndim) for ndim in (1, 2, 3)},
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.multi_head_attention_forward: multi_head_attention_forward,
}
