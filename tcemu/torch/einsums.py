"""`torch.einsum` and `torch.tensordot` as products with named axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tcemu.torch.attention import plainly


def tensordot(mode: Any, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Over the last axes of a and the first of b, or those that are listed."""
    given = dict(zip(("a", "b", "dims"), args, strict=False)) | kwargs
    a, b, dims = given["a"], given["b"], given.get("dims", 2)
    if given.get("out") is not None or isinstance(dims, torch.Tensor):
        return plainly(func, *args, **kwargs)
    left, right = (range(a.ndim - dims, a.ndim), range(dims)) if isinstance(dims, int) else dims
    left, right = ([axis % x.ndim for axis in axes] for axes, x in ((left, a), (right, b)))
    d = mode.dot_general("tensordot", (a, b), ((tuple(left), tuple(right)), ((), ())))
    return plainly(func, *args, **kwargs) if d is None else d


def einsum(mode: Any, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Operands are contracted from left to right, two at a time. Left where it has one operand, or one axis of an operand twice."""
    if kwargs or not isinstance(args[0], str):
        return plainly(func, *args, **kwargs)
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], tuple | list) else list(args[1:])
    terms, result = _terms(args[0], [x.ndim for x in operands])
    if len(operands) < 2 or any(len(set(term)) < len(term) for term in terms):
        return plainly(func, *args, **kwargs)
    value, names = operands[0], terms[0]
    for number, (x, term) in enumerate(zip(operands[1:], terms[1:], strict=True), 1):
        kept = {*result, *(name for later in terms[number + 1 :] for name in later)}
        found = _contracted(mode, (value, x), (names, term), kept)
        if found is None and number == 1:
            return plainly(func, *args, **kwargs)
        if found is None:  # the policy leaves this one of several
            names_after = [name for name in dict.fromkeys([*names, *term]) if name in kept]
            found = plainly(torch.einsum, f"{_letters(names)},{_letters(term)}->{_letters(names_after)}", value, x), names_after
        value, names = found
    extra = [axis for axis, name in enumerate(names) if name not in result]
    value = value.sum(extra) if extra else value
    names = [name for name in names if name in result]
    return value.permute([names.index(name) for name in result])


def _terms(equation: str, ndims: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """The names of all axes, those of "..." as numbers, counted from the last."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")

    def named(term: str, ndim: int) -> list[str]:
        before, dots, after = term.partition("...")
        more = ndim - len(before) - len(after) if dots else 0
        return [*before, *(str(number) for number in range(more - 1, -1, -1)), *after]

    found = [named(term, ndim) for term, ndim in zip(terms, ndims, strict=True)]
    of_dots = sorted({name for term in found for name in term if name.isdigit()}, key=int, reverse=True)
    if arrow:
        before, dots, after = right.partition("...")
        return found, [*before, *(of_dots if dots else ()), *after]
    letters = [name for term in found for name in term if not name.isdigit()]
    return found, [*of_dots, *sorted(name for name in letters if letters.count(name) == 1)]


def _letters(names: Sequence[str]) -> str:
    """Names as one letter each: those of "..." become capitals that no equation of ours has."""
    return "".join(chr(ord("A") + int(name)) if name.isdigit() else name for name in names)


def _contracted(mode: Any, operands: tuple[Any, Any], terms: tuple[list[str], list[str]], kept: set[str]) -> Any:
    """Two operands contracted, with the names of the result's axes; None where the policy leaves it, and where nothing is summed."""
    (a, b), (left, right) = operands, terms
    for side, own, other in ((0, left, right), (1, right, left)):  # what one alone has, and nobody wants, is summed before
        alone = [axis for axis, name in enumerate(own) if name not in kept and name not in other]
        if alone:
            operands = tuple(x.sum(alone) if at == side else x for at, x in enumerate(operands))  # type: ignore[assignment]
            terms = tuple([n for axis, n in enumerate(t) if axis not in alone] if at == side else t for at, t in enumerate(terms))  # type: ignore[assignment]
            return _contracted(mode, operands, terms, kept)
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
