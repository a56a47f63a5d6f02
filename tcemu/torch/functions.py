"""Which functions of torch are products, and each of them as one: what a mode does in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tcemu.torch.attention import multi_head_attention_forward, plainly, scaled_dot_product_attention
from tcemu.torch.einsums import einsum, tensordot

SECOND = ("other", "mat2", "vec", "tensor")  # what torch calls the right operand
Handler = Callable[[Any, Callable, tuple, dict], Any]  # (mode, the function, its arguments)


def _given(names: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments by their names; None where there are others, as out=."""
    listed = names.split()
    if len(args) > len(listed) or not set(kwargs) <= set(listed):
        return None
    return dict(zip(listed, args, strict=False)) | kwargs


def linear(mode: Any, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """x · weightᵀ + bias."""
    given = _given("input weight bias", args, kwargs)
    if given is None:
        return plainly(func, *args, **kwargs)
    x, weight = given["input"], given["weight"]
    if weight.ndim != 2:
        return plainly(func, *args, **kwargs)
    d = mode.dot_general("linear", (x, weight), (((x.ndim - 1,), (1,)), ((), ())), given.get("bias"))
    return plainly(func, *args, **kwargs) if d is None else d


def product(mode: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """`torch.matmul`, whatever the axes; None where the policy leaves it."""
    if a.ndim == 0 or b.ndim == 0:
        return None
    if b.ndim == 1:
        return mode.dot_general("matmul", (a, b), (((a.ndim - 1,), (0,)), ((), ())), bias)
    if b.ndim == 2:
        return mode.dot_general("matmul", (a, b), (((a.ndim - 1,), (0,)), ((), ())), bias)
    if a.ndim == 1:
        d = product(mode, a.unsqueeze(0), b)
        return None if d is None else d.squeeze(-2)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    axes = tuple(range(len(batch)))
    return mode.dot_general("matmul", (a, b), (((a.ndim - 1,), (b.ndim - 2,)), (axes, axes)))


def matmul(mode: Any, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """matmul, mm, bmm, mv, dot and the operator @."""
    values = [*args, *(kwargs[name] for name in ("input", "self", *SECOND) if name in kwargs)]
    tensors = len(values) == 2 == len(args) + len(kwargs) and all(isinstance(value, torch.Tensor) for value in values)
    d = product(mode, *(values[::-1] if func is torch.Tensor.__rmatmul__ else values)) if tensors else None
    return plainly(func, *args, **kwargs) if d is None else d


def _adding(names: str, sums_batch: bool = False) -> Handler:
    """beta · input + alpha · the product."""

    def handler(mode: Any, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = _given(f"input {names}", args, kwargs)
        if given is None:
            return plainly(func, *args, **kwargs)
        beta, alpha = given.get("beta", 1), given.get("alpha", 1)
        first, second = names.split()[:2]
        a, b, bias = given[first], given[second], given["input"]
        if sums_batch:
            d = mode.dot_general("addbmm", (a, b), (((0, 2), (0, 1)), ((), ())))
        elif beta == alpha == 1 and b.ndim == 2 and a.ndim == 2:
            d = product(mode, a, b, bias)
            return plainly(func, *args, **kwargs) if d is None else d
        else:
            d = product(mode, a, b)
        if d is None:
            return plainly(func, *args, **kwargs)
        d = d if alpha == 1 else alpha * d
        return d if beta == 0 else d + (bias if beta == 1 else beta * bias).to(d.dtype)

    return handler


def _convolution(ndim: int) -> Handler:
    def handler(mode: Any, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = _given("input weight bias stride padding dilation groups", args, kwargs)
        if given is None:
            return plainly(func, *args, **kwargs)
        x, weight = given["input"], given["weight"]
        stride, dilation = (_each(given.get(name, 1), ndim) for name in ("stride", "dilation"))
        batched = x.ndim == ndim + 2
        padding = _padding(given.get("padding", 0), weight.shape[2:], dilation)
        d = mode.convolution((x if batched else x.unsqueeze(0), weight), (stride, padding, dilation, given.get("groups", 1)))
        if d is None:
            return plainly(func, *args, **kwargs)
        bias = given.get("bias")
        d = d if bias is None else d + bias.to(d.dtype).reshape(-1, *(1,) * ndim)
        return d if batched else d.squeeze(0)

    return handler


def _each(value: Any, ndim: int) -> tuple[int, ...]:
    """One number for each axis."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * ndim if len(values) == 1 else values


def _padding(padding: Any, window: Any, dilation: tuple[int, ...]) -> tuple[int, ...]:
    """Low and high of each axis."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [(size - 1) * step for size, step in zip(window, dilation, strict=True)]
        return tuple(side for total in totals for side in (total // 2, total - total // 2))
    return tuple(side for side in _each(padding, len(window)) for _ in range(2))


def _names(name: str) -> list[Any]:
    """A function of torch, and the method of a tensor by the same name."""
    return [found for owner in (torch, torch.Tensor) if (found := getattr(owner, name, None)) is not None]


TAKEN: dict[Any, Handler] = {
    F.linear: linear,
    **{func: matmul for name in ("matmul", "mm", "bmm", "mv", "dot", "__matmul__", "__rmatmul__") for func in _names(name)},
    **{func: _adding("mat1 mat2 beta alpha") for func in _names("addmm")},
    **{func: _adding("mat vec beta alpha") for func in _names("addmv")},
    **{func: _adding("batch1 batch2 beta alpha") for func in _names("baddbmm")},
    **{func: _adding("batch1 batch2 beta alpha", sums_batch=True) for func in _names("addbmm")},
    torch.linalg.matmul: matmul,
    torch.functional.einsum: einsum,
    torch.functional.tensordot: tensordot,
    F.conv1d: _convolution(1),
    F.conv2d: _convolution(2),
    F.conv3d: _convolution(3),
    **{getattr(torch, f"conv{ndim}d"): _convolution(ndim) for ndim in (1, 2, 3)},
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.multi_head_attention_forward: multi_head_attention_forward,
}
