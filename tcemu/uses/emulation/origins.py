"""The origin of each value, parameters or data, and the roles that the operands of a product follow from.

A product of data with a parameter is a layer's. `find_origins` decides which arrays of a call are parameters.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr, tree_leaves_with_path

CONSTANT_ROLES = {"activation": "weight", "weight": "activation", "gradient": "activation"}  # role of a constant, by the other operand's


@dataclass(frozen=True)
class Origin:
    """The inputs that a value depends on. A value without any of these origins is a constant."""

    parameters: tuple[str, ...] = ()  # paths of the parameters; empty if data or a gradient is an origin too: then it is no weight
    data: bool = False  # whether it depends on the data
    gradient: bool = False  # whether it depends on a cotangent of reverse mode
    layers: tuple[str, ...] = ()  # paths of the weights of the nearest products that the value comes from

    @property
    def role(self) -> str:
        """The role of a value of this origin: "gradient", "activation", "weight" or "constant"."""
        if self.gradient:
            return "gradient"
        return "activation" if self.data else "weight" if self.parameters else "constant"


CONSTANT, DATA, GRADIENT = Origin(), Origin(data=True), Origin(gradient=True)


def join_origins(origins: Iterable[Origin]) -> Origin:
    """Return the origin of a value that is computed from values of these origins."""
    origins = tuple(origins)
    data, gradient = any(o.data for o in origins), any(o.gradient for o in origins)
    parameters = () if data or gradient else tuple(dict.fromkeys(path for o in origins for path in o.parameters))
    layers = tuple(dict.fromkeys(path for o in origins for path in o.layers))
    return Origin(parameters, data, gradient, () if gradient else layers)


def operand_roles(lhs: Origin, rhs: Origin) -> tuple[str, str]:
    """Return the roles of a product's operands.

    A constant is a weight beside an activation. Beside a weight or a gradient it is data: a batch that the function closes over.
    """
    left, right = lhs.role, rhs.role
    lhs_role = CONSTANT_ROLES.get(right, left) if left == "constant" else left
    rhs_role = CONSTANT_ROLES.get(left, right) if right == "constant" else right
    return lhs_role, rhs_role


# ---- the arrays of a call that are parameters

Parameters = int | str | Sequence[int | str] | Callable[[str], bool] | None
Rows = int | str | Sequence[int | str] | None
PARAMETER_NAMES = ("params", "parameters", "variables", "weights", "model")  # arguments that are parameters in any position
WRAPPER_FIELDS = ("value", "raw_value")  # last part of the path of an array that a framework's variable wraps


class Leaf(NamedTuple):
    """An array of a call."""

    owner: str  # name of the argument that it is in, "" for the function itself
    position: int  # position of that argument, -1 for the function
    path: str  # path inside the argument, "" if the argument is the array

    @property
    def name(self) -> str:
        """Name in reports and rules."""
        return self.path or self.owner

    def matches(self, pattern: int | str) -> bool:
        """Return whether one element of `parameters` means this array: an argument's position or name, or a pattern for paths."""
        if isinstance(pattern, int):
            return self.position == pattern
        return pattern == self.owner or any(fnmatchcase(path, pattern) for path in (self.path, f"{self.owner}/{self.path}"))


class Origins(NamedTuple):
    """The origins of a call's arrays and of its program's constants."""

    arrays: list[Origin]
    constants: list[Origin]
    reason: str  # description of the arrays that count as parameters


def find_origins(
    fn: Callable, call: tuple[list[Any], tuple, dict[str, Any]], is_array: Sequence[bool], consts: Sequence[Any], parameters: Parameters
) -> Origins:
    """Find the origins of a call's arrays and of the constants of its program.

    Args:
        fn: Function that is called.
        call: Objects that fn is bound to, positional arguments, keyword arguments.
        is_array: Whether each leaf of `call` is an array.
        consts: Constants of the program.
        parameters: Parameters as `emulate` takes them.

    Raises:
        ValueError: `parameters` matches no array.
    """
    leaves = [leaf for leaf, array in zip(_list_leaves(fn, *call), is_array, strict=True) if array]
    closure = _closure_leaves(fn) if consts else {}
    constants = [closure.get(id(const), Leaf("", -1, "")) for const in consts]
    if parameters is None:
        chosen, reason = _default_parameters(leaves)
        return Origins(
            arrays=[Origin((leaf.name,)) if leaf in chosen else DATA for leaf in leaves],
            constants=[CONSTANT if chosen else Origin((leaf.name or "closed over",)) for leaf in constants],
            reason=reason if chosen or not constants else "the arrays that the function closes over",
        )
    if callable(parameters):
        accepts, reason = parameters, f"where {getattr(parameters, '__name__', parameters)} says so"
        is_parameter = lambda leaf: bool(accepts(leaf.name))
    else:
        words: tuple[Any, ...] = (parameters,) if isinstance(parameters, int | str) else tuple(parameters)
        reason = f"parameters={parameters!r}"
        is_parameter = lambda leaf: any(leaf.matches(word) for word in words)
        _check_words("parameters", words, (*leaves, *constants))
    return Origins(
        arrays=[Origin((leaf.name,)) if is_parameter(leaf) else DATA for leaf in leaves],
        constants=[Origin((leaf.name,)) if leaf.name and is_parameter(leaf) else CONSTANT for leaf in constants],
        reason=reason,
    )


def find_rows(
    fn: Callable, call: tuple[list[Any], tuple, dict[str, Any]], is_array: Sequence[bool], arrays: Sequence[Any], rows: Rows
) -> tuple[int, list[bool]]:
    """Find the arrays of a call whose first axis counts rows.

    Args:
        fn: Function that is called.
        call: Objects that fn is bound to, positional arguments, keyword arguments.
        is_array: Whether each leaf of `call` is an array.
        arrays: The arrays among the leaves.
        rows: Rows as `emulate` takes them.

    Returns:
        The number of rows, 0 without any, and whether each array has them.

    Raises:
        ValueError: `rows` matches no array, or the first axes differ.
    """
    if rows is None:
        return 0, [False] * len(arrays)
    leaves = [leaf for leaf, array in zip(_list_leaves(fn, *call), is_array, strict=True) if array]
    words: tuple[Any, ...] = (rows,) if isinstance(rows, int | str) else tuple(rows)
    _check_words("rows", words, leaves)
    is_row = [any(leaf.matches(word) for word in words) for leaf in leaves]
    shapes = {leaf.name: tuple(array.shape) for leaf, array, row in zip(leaves, arrays, is_row, strict=True) if row}
    counts = {shape[0] if shape else None for shape in shapes.values()}
    if len(counts) != 1 or None in counts:
        given = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"emulate: rows={rows!r} names {given}; expected arrays with the same number of rows on their first axis")
    return counts.pop() or 0, is_row


def _check_words(argument: str, words: Sequence[int | str], leaves: Sequence[Leaf]) -> None:
    """Raise ValueError if one element of an argument means no array of a call."""
    for word in words:
        if not any(leaf.matches(word) for leaf in leaves):
            names = ", ".join(dict.fromkeys(leaf.name for leaf in leaves[:12] if leaf.name)) or "none"
            raise ValueError(f"emulate: {argument}={word!r} matches no array of this call; its arrays are {names}")


def _default_parameters(leaves: Sequence[Leaf]) -> tuple[set[Leaf], str]:
    """Choose the parameters where the caller names none, and describe the choice."""
    bound = {leaf for leaf in leaves if leaf.position < 0}
    if bound:
        return bound, "the arrays of the function itself"
    by_name = {leaf for leaf in leaves if leaf.owner in PARAMETER_NAMES}
    if by_name:
        return by_name, f"the argument {min(by_name, key=lambda leaf: leaf.position).owner!r}, by its name"
    containers = [leaf for leaf in leaves if leaf.path]
    if containers:
        first = min(containers, key=lambda leaf: leaf.position)
        inside = {leaf for leaf in leaves if leaf.position == first.position}
        return inside, f"the argument {first.owner!r}, the first that is no plain array"
    return set(), "none found: every argument is a plain array; parameters= names them"


def _list_leaves(fn: Callable, held: list[Any], args: tuple, kwargs: dict[str, Any]) -> list[Leaf]:
    """List the leaves of a call in the order of its pytree."""
    names = _argument_names(fn, len(args))
    leaves = [Leaf("", -1, _format_path(path)) for part in held for path, _ in tree_leaves_with_path(part)]
    for position, arg in enumerate(args):
        leaves += [Leaf(names[position], position, _format_path(path)) for path, _ in tree_leaves_with_path(arg)]
    for number, name in enumerate(sorted(kwargs)):  # as the pytree of a dict has them
        leaves += [Leaf(name, len(args) + number, _format_path(path)) for path, _ in tree_leaves_with_path(kwargs[name])]
    return leaves


def _argument_names(fn: Callable, count: int) -> list[str]:
    """Return the names of the first `count` positional arguments."""
    try:
        positional = [p for p in inspect.signature(fn).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):
        positional = []
    return [p.name for p in positional[:count]] + [f"argument {number}" for number in range(len(positional[:count]), count)]


def _format_path(path: tuple) -> str:
    parts = keystr(path, simple=True, separator="/").split("/")
    return "/".join(parts[:-1] if len(parts) > 1 and parts[-1] in WRAPPER_FIELDS else parts)


def _closure_leaves(fn: Callable) -> dict[int, Leaf]:
    """Return the arrays that a function closes over, by their identity."""
    leaves = {}
    for owner, value in _closure_values(fn).items():
        for path, leaf in tree_leaves_with_path(value):
            if isinstance(leaf, jax.Array):
                leaves[id(leaf)] = Leaf(owner, -1, _format_path(path))
    return leaves


def _closure_values(fn: Any) -> dict[str, Any]:
    """Return the values that a function closes over, by name.

    These are its closure, the globals that it names and the object that it is a method of; or, for other callables, the callable itself.
    """
    if isinstance(fn, MethodType):
        return {**_closure_values(fn.__func__), "self": fn.__self__}
    if isinstance(fn, partial):
        return {**_closure_values(fn.func), **{f"argument {number}": value for number, value in enumerate(fn.args)}, **fn.keywords}
    if hasattr(fn, "__wrapped__"):
        return _closure_values(fn.__wrapped__)
    if not isinstance(fn, FunctionType):
        return {type(fn).__name__: fn}
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    inner = {name: cell.cell_contents for name, cell in cells if gc.get_referents(cell)}
    return {name: fn.__globals__[name] for name in _global_names(fn.__code__) if name in fn.__globals__} | inner


def _global_names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function and in the functions defined inside it."""
    return set(code.co_names).union(*(_global_names(const) for const in code.co_consts if isinstance(const, CodeType)))
