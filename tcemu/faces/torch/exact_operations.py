"""Operations that need no rule of a GPU: `find_exact` says which of them every correct implementation computes to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.sorting import NETWORK
from tcemu.uses.replay.aten_operations import EXACT

RANDOM = (  # beginnings of the names of operators that draw random numbers
    "rand", "normal", "bernoulli", "native_dropout", "multinomial", "uniform", "exponential", "geometric", "cauchy", "log_normal",
    "binomial", "poisson", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise",
)  # fmt: skip
ROOTS_OF_COMPLEX = ("abs", "sgn")  # which take an operand of floats as it is


# ---- the arguments of a call


def is_inexact(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has floats or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def flat_tensors(*trees: Any) -> list[torch.Tensor]:
    """Return the tensors of nested arguments."""
    return [x for x in pytree.tree_leaves(trees) if isinstance(x, torch.Tensor)]


def arguments_by_name(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an operator by name."""
    return dict(zip([x.name for x in func._schema.arguments], args, strict=False)) | kwargs


# ---- what is exact


def find_exact(func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str] | None:
    """Return what computes an operation whose bits every correct implementation has, and why it has them; None for others."""
    if name.startswith(RANDOM):
        return None
    if name in SPECIAL:
        return SPECIAL[name](func, args, kwargs)
    tensors = flat_tensors(args, kwargs)
    if name in ROOTS_OF_COMPLEX and any(x.is_complex() for x in tensors):
        return None
    if name in EXACT:
        return func, EXACT[name]
    if any(is_inexact(x) and x.numel() for x in tensors):
        return None
    if any(map(is_inexact, tensors)):
        return func, "no elements"
    if func._schema.is_mutable:
        return func, "integers"
    found = func(*args, **kwargs)  # of integers, but a quotient or a root is a float
    exact = bool(flat_tensors(found)) and not any(map(is_inexact, flat_tensors(found)))
    return (lambda *_, **__: found, "integers") if exact else None


def _sort(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    """A stable sort, and one of integers: CUDA's is stable for more than 32 elements, and a CPU's need not be."""
    given = arguments_by_name(func, args, kwargs)
    x, dim, is_stable = given["self"], given.get("dim", -1), bool(given.get("stable"))
    if not is_stable and x.ndim and x.shape[dim] <= NETWORK and bool((x.sort(dim=dim).values.diff(dim=dim) == 0).any()):
        raise NotModelled(f"sort: equal integers among {x.shape[dim]}: CUDA's network for up to {NETWORK} is not stable")
    options = {"stable": True, "dim": dim, "descending": given.get("descending", False)}
    return lambda *_, **__: torch.ops.aten.sort.stable(x, **options), "moves elements by a stable sort"


def _arange(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    numbers = [x for x in args if isinstance(x, bool | int | float)]
    dtype = kwargs.get("dtype")
    if any(float(x) != int(x) for x in numbers) or (dtype in (torch.bfloat16, torch.float16) and max(map(abs, numbers)) > 256):
        raise NotModelled(f"{func._schema.name}: steps that are no integers are rounded in an order that is not known")
    return func, "integers"


SATURATING = {torch.int64: torch.int64, torch.uint8: torch.int64} | dict.fromkeys((torch.int32, torch.int16, torch.int8), torch.int32)


def _saturate(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return floats as integers that the GPU's cvt gives, which saturates, where some lie beyond them. A CPU gives other ones of these.

    On an H200 27 numbers of each float dtype become these integers of each dtype.
    """
    wide = SATURATING.get(dtype) if x.is_floating_point() and dtype is not None else None
    if wide is None:
        return x
    info, number = torch.iinfo(wide), x.double()
    above, below = number >= 2.0 ** (info.bits - 1), number < -(2.0 ** (info.bits - 1))
    if not bool((above | below | number.isnan()).any()):
        return x
    of_nan = info.min if wide == torch.int64 else 0
    found = torch.where(above | below | number.isnan(), 0.0, number).to(wide)
    return found.masked_fill(above, info.max).masked_fill(below, info.min).masked_fill(number.isnan(), of_nan)


def _convert(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    return lambda x, *_, **__: func(_saturate(x, kwargs.get("dtype")), *args[1:], **kwargs), "moves elements"


def _copy(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    return lambda to, x, *_, **__: func(to, _saturate(x, to.dtype), *args[2:], **kwargs), "moves elements"


def _extreme_of_all(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    """The largest or the least of all elements: of zeros of both signs the order decides which one it is."""
    given = arguments_by_name(func, args, kwargs)
    x = given["self"]
    zeros = x[x == 0] if len(given) == 1 and x.is_floating_point() else x[:0]
    if zeros.numel() and bool(zeros.signbit().any()) and not bool(zeros.signbit().all()) and func(*args, **kwargs) == 0:
        raise NotModelled(f"{func._schema.name}: got zeros of both signs; amax and amin have a rule for them (replay/aten_operations.py)")
    return func, "takes one of its operands"


def _repeats(places: torch.Tensor) -> bool:
    """Return whether a column has an index twice."""
    return bool((places.sort(dim=0).values.diff(dim=0) == 0).any())


def _columns(index: torch.Tensor, dim: int) -> torch.Tensor:
    return index if index.ndim < 2 else index.movedim(dim, 0).flatten(1)


def _add_to_indices(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    """Additions at indices are exact IEEE operations if no index repeats; atomics add the others in any order."""
    given = arguments_by_name(func, args, kwargs)
    if not given["self"].is_floating_point():
        return func, "integers"
    if _repeats(_columns(given["index"], given["dim"])):
        raise NotModelled(f"{func._schema.name}: the order of additions at equal indices is open: CUDA adds them by atomics")
    return func, "one IEEE addition for each element: no index repeats"


def _scatter(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    """Moves to indices are exact if no index repeats; of others CUDA leaves open which element stays."""
    given = arguments_by_name(func, args, kwargs)
    if given.get("reduce") is not None and given["self"].is_floating_point():
        raise NotModelled(f"{func._schema.name}: reduce={given['reduce']!r}: CUDA reduces by atomics, in an order that is open")
    if given.get("reduce") is None and "src" in given and _repeats(_columns(given["index"], given["dim"])):
        raise NotModelled(f"{func._schema.name}: which element stays at equal indices is open on CUDA")
    return func, "moves elements"


def _index_put(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    given = arguments_by_name(func, args, kwargs)
    if given.get("accumulate", False):
        if given["self"].is_floating_point():
            raise NotModelled(f"{func._schema.name}: the order of additions at equal indices is not known")
        return func, "integers"
    if given["values"].numel() > 1:
        places = torch.arange(given["self"].numel()).reshape(given["self"].shape)
        if _repeats(torch.ops.aten.index(places, given["indices"]).flatten()):
            raise NotModelled(f"{func._schema.name}: which element stays at equal indices is open on CUDA")
    return func, "moves elements"


def _bincount(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    if arguments_by_name(func, args, kwargs).get("weights") is not None:
        raise NotModelled("bincount: the order in which weights are added is open: CUDA adds them by atomics")
    return func, "counts"


def _choose_element(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str] | None:
    """Operators that also give the index of what they take, of one of some equal elements."""
    given = arguments_by_name(func, args, kwargs)
    x = given["self"]
    if x.is_floating_point():
        return None
    if x.ndim and len(func._schema.returns) > 1 and _repeats(_columns(x, given.get("dim", -1))):
        raise NotModelled(f"{func._schema.name}: which of equal integers CUDA takes is not known")
    return func, "integers"


SPECIAL: dict[str, Callable[..., tuple[Callable, str] | None]] = {
    "sort": _sort,
    "arange": _arange,
    "_to_copy": _convert,
    "copy": _copy,
    **dict.fromkeys(("max", "min"), _extreme_of_all),
    "bincount": _bincount,
    "scatter": _scatter,
    **dict.fromkeys(("index_put", "_index_put_impl"), _index_put),
    **dict.fromkeys(("index_add", "scatter_add"), _add_to_indices),
    **dict.fromkeys(("topk", "kthvalue", "median", "nanmedian", "mode"), _choose_element),
}
