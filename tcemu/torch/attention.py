"""Attention in its math form: two products with a softmax between them."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def plainly(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """A product that is left, as it is: the modes of the modules around do not see it again."""
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


def _opened(func: Callable) -> Callable:
    """The same function, which does not ask a mode to take it as a whole, so that the mode sees what it calls."""
    if not isinstance(func, types.FunctionType):  # a stand-in, with which the documentation is built where torch is missing
        return func
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    opened = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


OPENED = _opened(F.multi_head_attention_forward)  # once; of functions that remember what they returned torch.compile warns


def multi_head_attention_forward(mode: Any, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Its projections and products, each by itself."""
    mode.opening = True
    with mode:
        return OPENED(*args, **kwargs)


def scaled_dot_product_attention(mode: Any, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """As torch's own math backend: q and k are each multiplied by the root of the scale, the mask is added, then softmax and dropout.

    All in the dtype of the operands. Left as it is where the policy leaves both products.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, args, strict=False)) | kwargs
    q, k, v = given["query"], given["key"], given["value"]
    if given.get("enable_gqa", False):
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
    axes, last = tuple(range(len(batch))), len(batch) + 1
    of_scores, of_values = (((last,), (last,)), (axes, axes)), (((last,), (last - 1,)), (axes, axes))
    shares = q[..., :1].expand(*batch, q.shape[-2], k.shape[-2])  # of the shape and dtype of what is to come
    taken = mode.take("scores", (q, k), of_scores), mode.take("values", (shares, v), of_values)
    if taken == (None, None):
        return plainly(func, *args, **kwargs)
    factor = given.get("scale")
    root = math.sqrt(1 / math.sqrt(q.shape[-1]) if factor is None else factor)
    q, k = q * root, k * root
    scores = plainly(torch.matmul, q, k.mT) if taken[0] is None else mode.run(taken[0], (q, k), of_scores)
    shares = _shares(scores, given.get("attn_mask"), given.get("is_causal", False), given.get("dropout_p", 0.0))
    return plainly(torch.matmul, shares, v) if taken[1] is None else mode.run(taken[1], (shares, v), of_values)


def _shares(scores: torch.Tensor, mask: torch.Tensor | None, causal: bool, dropout: float) -> torch.Tensor:
    """Softmax of the scores where the mask allows; a row that sees nothing has none."""
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    shares = torch.softmax(scores, -1)
    if mask is not None:
        shares = shares.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    return F.dropout(shares, dropout) if dropout else shares
