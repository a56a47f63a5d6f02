"""What a traced call must not have: arrays that are not JAX's, which no program shows, and state, whose changes a program does not keep."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

FOREIGN = (
    "__dlpack__",
    "__array__",
    "__array_interface__",
    "__matmul__",
)  # what an array of another library has, or what multiplies as one
WHAT_WORKS = (
    "emulate takes pure functions: return what changes. A flax nnx model is changed where it is the function or an argument, as in "
    "tcemu.emulate(lambda m, x: m(x), policy)(model, x), and nowhere else; or, after graph, state = nnx.split(model):\n"
    "    def pure(state, x): m = nnx.merge(graph, state); return m(x), nnx.state(m)\n"
    "    y, state = tcemu.emulate(pure, policy)(state, x); nnx.update(model, state)"
)


def check_arrays(what: str, leaves: Sequence[Any]) -> None:
    """Raises TypeError for a leaf that is an array of another library, or an array of objects: its products are in no JAX program."""
    for leaf in leaves:
        if isinstance(leaf, np.ndarray | np.generic):
            foreign = leaf.dtype == object
        else:
            known = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | type) or hasattr(leaf, "__jax_array__")
            foreign = not known and any(hasattr(leaf, name) for name in FOREIGN)
        if foreign:
            kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}" + (" of objects" if isinstance(leaf, np.ndarray) else "")
            raise TypeError(
                f"emulate: {what} is {kind}, whose products no JAX program shows, so that none would be emulated; give JAX's or NumPy's "
                "arrays of numbers (jax.numpy.asarray takes most others)"
            )


@contextmanager
def refusing_what_is_closed_over() -> Iterator[None]:
    """flax nnx refuses to change what a traced function closes over; here that is a TypeError that says what works."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            raise TypeError(f"emulate: the call would change what it closes over: {error}. {WHAT_WORKS}") from error
        raise


def check_unchanged(call: tuple, arrays: Sequence[Any], results: Sequence[Any]) -> None:
    """Raises TypeError if a traced call left values in its arguments that it does not return. The arguments are copies of the caller's, so
    that they would be lost."""
    ours = {id(array) for array in (*arrays, *results)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(call):
        if isinstance(leaf, Tracer) and id(leaf) not in ours:
            part, *rest = path
            owner = ("the function", "an argument", "an argument")[getattr(part, "idx", 1)]
            raise TypeError(
                f"emulate: the call changed {owner}, at {jax.tree_util.keystr(tuple(rest))}, and that would be lost. {WHAT_WORKS}"
            )


def check_not_kept(call: tuple, trace: Any) -> None:
    """Raises TypeError if a call left tracers in what it closes over. trace: that of the call, or None where nothing holds it any more."""
    if trace is None:
        return
    for where, value in _held(call):
        if isinstance(value, Tracer) and value._trace is trace:
            raise TypeError(f"emulate: the call left a traced value in {where}, where its number would be lost. {WHAT_WORKS}")


def _held(call: tuple) -> Iterator[tuple[str, Any]]:
    """What can be reached from a function and its arguments: closures, globals that it names, attributes and containers."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("the call", call)]
    while waiting:
        where, value = waiting.pop()
        if id(value) in seen or isinstance(value, str | bytes | int | float | complex | np.ndarray | type | ModuleType | None):
            continue
        seen.add(id(value))
        yield where, value
        if not isinstance(value, jax.Array):
            waiting += _parts(where, value)


def _parts(where: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{where}[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(where, part) for part in value]
    if isinstance(value, partial):
        return [(where, part) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, MethodType):
        return [(where, value.__func__), (type(value.__self__).__name__, value.__self__)]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        named = [(name, value.__globals__[name]) for name in value.__code__.co_names if name in value.__globals__]
        inner = [(name, cell.cell_contents) for name, cell in cells if gc.get_referents(cell)]
        return [*inner, *named, (value.__name__, vars(value)), (value.__name__, value.__defaults__)]
    slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
    parts = [(f"{type(value).__name__}.{name}", part) for name, part in getattr(value, "__dict__", {}).items()]
    return parts + [(f"{type(value).__name__}.{name}", getattr(value, name)) for name in slots]


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]
