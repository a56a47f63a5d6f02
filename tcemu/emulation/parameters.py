"""Which arrays of a call are parameters, whose products with data are a layer's."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from tcemu.emulation.origins import CONSTANT, DATA, Origin

Parameters = int | str | Sequence[int | str] | Callable[[str], bool] | None
NAMES = ("params", "parameters", "variables", "weights", "model")  # of the arguments that are parameters wherever they stand
WRAPPED = ("value", "raw_value")  # the last part of the path of an array that a framework's variable wraps


class Leaf(NamedTuple):
    """An array of a call. owner: the argument that holds it, "" for the function itself; position: that argument's, -1 for the function;
    path: inside it, "" where the argument is the array."""

    owner: str
    position: int
    path: str

    @property
    def name(self) -> str:
        """What it is called in reports and rules."""
        return self.path or self.owner

    def fits(self, wanted: int | str) -> bool:
        """It is what one word of `parameters` means: an argument's position or name, or a pattern for paths."""
        if isinstance(wanted, int):
            return self.position == wanted
        return wanted == self.owner or any(fnmatchcase(path, wanted) for path in (self.path, f"{self.owner}/{self.path}"))


class Origins(NamedTuple):
    """Where the arrays of a call and the constants of its program come from, and what was taken for parameters, in words."""

    arrays: list[Origin]
    constants: list[Origin]
    why: str


def origins(
    fn: Callable, call: tuple[list[Any], tuple, dict[str, Any]], is_array: Sequence[bool], consts: Sequence[Any], wanted: Parameters
) -> Origins:
    """Of the call of a function, with a program of these constants.

    call: what fn holds itself, its args and kwargs; is_array: which of their leaves are arrays. wanted: what `emulate` was given as
    `parameters`. Raises ValueError where it fits nothing.
    """
    leaves = [leaf for leaf, array in zip(_leaves(fn, *call), is_array, strict=True) if array]
    held = _closed_over(fn) if consts else {}
    closed = [held.get(id(const), Leaf("", -1, "")) for const in consts]
    if wanted is None:
        chosen, why = _usual(leaves)
        return Origins(
            arrays=[Origin((leaf.name,)) if leaf in chosen else DATA for leaf in leaves],
            constants=[CONSTANT if chosen else Origin((leaf.name or "closed over",)) for leaf in closed],
            why=why if chosen or not closed else "the arrays that the function closes over",
        )
    if callable(wanted):
        accepts, why = wanted, f"where {getattr(wanted, '__name__', wanted)} says so"
        is_parameter = lambda leaf: bool(accepts(leaf.name))  # noqa: E731
    else:
        words: tuple[Any, ...] = (wanted,) if isinstance(wanted, int | str) else tuple(wanted)
        why = f"parameters={wanted!r}"
        is_parameter = lambda leaf: any(leaf.fits(word) for word in words)  # noqa: E731
        for word in words:
            if not any(leaf.fits(word) for leaf in (*leaves, *closed)):
                names = ", ".join(dict.fromkeys(leaf.name for leaf in (*leaves, *closed)[:12] if leaf.name)) or "none"
                raise ValueError(f"emulate: parameters={word!r} fits no array of this call; they are {names}")
    return Origins(
        arrays=[Origin((leaf.name,)) if is_parameter(leaf) else DATA for leaf in leaves],
        constants=[Origin((leaf.name,)) if leaf.name and is_parameter(leaf) else CONSTANT for leaf in closed],
        why=why,
    )


def _usual(leaves: Sequence[Leaf]) -> tuple[set[Leaf], str]:
    """What counts as parameters where nobody says it."""
    of_function = {leaf for leaf in leaves if leaf.position < 0}
    if of_function:
        return of_function, "the arrays of the function itself"
    named = {leaf for leaf in leaves if leaf.owner in NAMES}
    if named:
        return named, f"the argument {min(named, key=lambda leaf: leaf.position).owner!r}, by its name"
    containers = [leaf for leaf in leaves if leaf.path]
    if containers:
        first = min(containers, key=lambda leaf: leaf.position)
        inside = {leaf for leaf in leaves if leaf.position == first.position}
        return inside, f"the argument {first.owner!r}, the first that is no plain array"
    return set(), "none found: every argument is a plain array; parameters= names them"


def _leaves(fn: Callable, held: list[Any], args: tuple, kwargs: dict[str, Any]) -> list[Leaf]:
    """The leaves of a call in the order of its pytree."""
    names = _names(fn, len(args))
    found = [Leaf("", -1, _path(path)) for part in held for path, _ in tree_leaves_with_path(part)]
    for position, arg in enumerate(args):
        found += [Leaf(names[position], position, _path(path)) for path, _ in tree_leaves_with_path(arg)]
    for number, name in enumerate(sorted(kwargs)):  # as the pytree of a dict has them
        found += [Leaf(name, len(args) + number, _path(path)) for path, _ in tree_leaves_with_path(kwargs[name])]
    return found


def _names(fn: Callable, count: int) -> list[str]:
    """What the first arguments are called."""
    try:
        found = [p for p in inspect.signature(fn).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):
        found = []
    return [p.name for p in found[:count]] + [f"argument {number}" for number in range(len(found[:count]), count)]


def _path(path: tuple) -> str:
    parts = keystr(path, simple=True, separator="/").split("/")
    return "/".join(parts[:-1] if len(parts) > 1 and parts[-1] in WRAPPED else parts)


def _closed_over(fn: Callable) -> dict[int, Leaf]:
    """The arrays that a function holds besides its arguments, by identity."""
    found = {}
    for owner, value in _held(fn).items():
        for path, leaf in tree_leaves_with_path(value):
            if isinstance(leaf, jax.Array):
                found[id(leaf)] = Leaf(owner, -1, _path(path))
    return found


def _held(fn: Any) -> dict[str, Any]:
    """What a function closes over, by name: its closure, the globals that it names, what it is a method of; or the callable itself."""
    if isinstance(fn, MethodType):
        return {**_held(fn.__func__), "self": fn.__self__}
    if isinstance(fn, partial):
        return {**_held(fn.func), **{f"argument {number}": value for number, value in enumerate(fn.args)}, **fn.keywords}
    if hasattr(fn, "__wrapped__"):
        return _held(fn.__wrapped__)
    if not isinstance(fn, FunctionType):
        return {type(fn).__name__: fn}
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    inner = {name: cell.cell_contents for name, cell in cells if gc.get_referents(cell)}
    return {name: fn.__globals__[name] for name in _names_in(fn.__code__) if name in fn.__globals__} | inner


def _names_in(code: CodeType) -> set[str]:
    """The names of globals and attributes in a function and in those defined inside it."""
    return set(code.co_names).union(*(_names_in(const) for const in code.co_consts if isinstance(const, CodeType)))
