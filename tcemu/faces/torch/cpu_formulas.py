"""Operators that only a GPU has, fused attention and the gradients of RMS norm, computed by their formulas in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tcemu.base.errors import NotModelled
from tcemu.faces.torch.exact_operations import arguments_by_name


def empty_results(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """Return empty tensors like the results, with the strides that PyTorch gives them. The operands are not read."""
    meta = lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    given = pytree.tree_map_only(torch.Tensor, meta, (args, kwargs))
    try:
        found = func(*given[0], **given[1])
    except NotImplementedError as error:
        raise NotModelled(f"PyTorch does not say which shapes {func} gives") from error
    leaves = list(found) if isinstance(found, list | tuple) else [found]
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves]


def rms_norm_gradients(
    grad: torch.Tensor, x: torch.Tensor, shape: Sequence[int], inverse: torch.Tensor, weight: torch.Tensor | None, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Compute the gradients of RMS norm by their formula in float32: a CPU has no such operator."""
    scaled, axes = x.float() * inverse.float(), tuple(range(-len(shape), 0))
    inner = grad.float() * (1.0 if weight is None else weight.float())
    of_x = (inner - scaled * (inner * scaled).mean(axes, keepdim=True)) * inverse.float()
    of_weight = None if weight is None else (grad.float() * scaled).reshape(-1, *weight.shape).sum(0).to(weight.dtype)
    return (of_x.to(x.dtype) if wanted[0] else None), (of_weight if wanted[1] else None)


def attention_by_formula(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Compute a fused attention that is not known, or its gradients, by its formula in float32. Dropout is left out."""
    given = arguments_by_name(func, args, kwargs)
    query, key, value = (given[name].float() for name in ("query", "key", "value"))
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if given.get("scale") is None else given["scale"]
    scores = query @ keys.mT * scale
    if given.get("attn_bias") is not None:
        scores = scores + given["attn_bias"].float()
    if given.get("is_causal", False):
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    sums = scores.logsumexp(-1, keepdim=True)
    weights = torch.nan_to_num((scores - sums).exp())
    if "logsumexp" not in given:
        empty = empty_results(func, args, kwargs)
        for out, found in zip(empty, (weights @ values, sums), strict=False):
            if isinstance(out, torch.Tensor) and out.numel() == found.numel():
                out.copy_(found.reshape(out.shape))
        return tuple(x.zero_() if i > 1 and isinstance(x, torch.Tensor) else x for i, x in enumerate(empty))
    grad, out = (given["grad_out_" if "grad_out_" in given else "grad_out"].float(), given["out"].float())
    of_scores = weights * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) * scale
    heads = lambda x, to: x.unflatten(1, (to.shape[1], -1)).sum(2).to(given["query"].dtype)
    found = ((of_scores @ keys).to(given["query"].dtype), heads(of_scores.mT @ query, key), heads(weights.mT @ grad, value))
    return found if len(func._schema.returns) == 3 else (*found, None)
