"""State in a traced call: changes that would be lost are refused, and changes in objects of flax nnx are written back.

Arrays of other libraries are refused too, because no program shows their products.

Objects of nnx go into the program as arrays, and the arrays that the call changes come out and are written back. nnx's own transforms do
the same by the same calls. This module does not import flax: as long as nothing else has imported it, there are no such objects.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from tcemu.base.jax_internals import find_trace

FOREIGN_ATTRIBUTES = ("__dlpack__", "__array__", "__array_interface__", "__matmul__")  # attributes of other libraries' arrays
ADVICE = (
    "emulate takes pure functions: return what changes. A flax nnx model is changed where it is the function or an argument, as in "
    "tcemu.emulate(lambda m, x: m(x), policy)(model, x), and nowhere else; or, after graph, state = nnx.split(model):\n"
    "    def pure(state, x): m = nnx.merge(graph, state); return m(x), nnx.state(m)\n"
    "    y, state = tcemu.emulate(pure, policy)(state, x); nnx.update(model, state)"
)


def check_arrays(owner: str, leaves: Sequence[Any]) -> None:
    """Raise TypeError for a leaf that is an array of another library, or an array of objects: no JAX program shows its products."""
    for leaf in leaves:
        if isinstance(leaf, np.ndarray | np.generic):
            is_foreign = leaf.dtype == object
        else:
            is_known = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | type) or hasattr(leaf, "__jax_array__")
            is_foreign = not is_known and any(hasattr(leaf, name) for name in FOREIGN_ATTRIBUTES)
        if is_foreign:
            kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}" + (" of objects" if isinstance(leaf, np.ndarray) else "")
            raise TypeError(
                f"emulate: {owner} is {kind}, whose products no JAX program shows, so that none would be emulated; give JAX's or NumPy's "
                "arrays of numbers (jax.numpy.asarray takes most others)"
            )


@contextmanager
def refuse_closure_updates() -> Iterator[None]:
    """Turn nnx's refusal to change an object that a traced function closes over into a TypeError that says what works."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            raise TypeError(f"emulate: the call would change what it closes over: {error}. {ADVICE}") from error
        raise


def check_unchanged(call: tuple, arrays: Sequence[Any], results: Sequence[Any]) -> None:
    """Raise TypeError if a traced call left values in its arguments that it does not return.

    The arguments are copies of the caller's, so that such values would be lost.
    """
    ours = {id(array) for array in (*arrays, *results)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(call):
        if isinstance(leaf, Tracer) and id(leaf) not in ours:
            part, *rest = path
            owner = ("the function", "an argument", "an argument")[getattr(part, "idx", 1)]
            raise TypeError(f"emulate: the call changed {owner}, at {jax.tree_util.keystr(tuple(rest))}, and that would be lost. {ADVICE}")


def check_no_leaked_tracers(call: tuple, trace: Any) -> None:
    """Raise TypeError if a call left tracers in objects that it closes over. trace: the call's trace, or None if it is gone already."""
    if trace is None:
        return
    for where, value in _reachable_values(call):
        if isinstance(value, Tracer) and find_trace(value) is trace:
            raise TypeError(f"emulate: the call left a traced value in {where}, where its number would be lost. {ADVICE}")


def _reachable_values(call: tuple) -> Iterator[tuple[str, Any]]:
    """Yield every value reachable from a function and its arguments through closures, named globals, attributes and containers."""
    visited: set[int] = set()
    waiting: list[tuple[str, Any]] = [("the call", call)]
    while waiting:
        where, value = waiting.pop()
        if id(value) in visited or isinstance(value, str | bytes | int | float | complex | np.ndarray | type | ModuleType | None):
            continue
        visited.add(id(value))
        yield where, value
        if not isinstance(value, jax.Array):
            waiting += _contained_values(where, value)


def _contained_values(where: str, value: Any) -> list[tuple[str, Any]]:
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
        globals_used = [(name, value.__globals__[name]) for name in value.__code__.co_names if name in value.__globals__]
        inner = [(name, cell.cell_contents) for name, cell in cells if gc.get_referents(cell)]
        return [*inner, *globals_used, (value.__name__, vars(value)), (value.__name__, value.__defaults__)]
    slots = [name for kind in type(value).__mro__ for name in _slot_names(kind) if hasattr(value, name)]
    parts = [(f"{type(value).__name__}.{name}", part) for name, part in getattr(value, "__dict__", {}).items()]
    return parts + [(f"{type(value).__name__}.{name}", getattr(value, name)) for name in slots]


def _slot_names(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


# ---- objects of flax nnx


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class SplitObject:
    """An nnx object, decomposed."""

    graphdef: Any  # everything but the variables
    state: Any  # the variables, a pytree

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        return (self.state,), self.graphdef

    @classmethod
    def tree_unflatten(cls, graphdef: Any, children: Sequence[Any]) -> SplitObject:
        return cls(graphdef, *children)


def object_states(tree: Any) -> Any:
    """Replace each `SplitObject` by its state, whose leaves have the paths that they have in the object."""
    is_split = lambda x: isinstance(x, SplitObject)
    return jax.tree.map(lambda x: x.state if is_split(x) else x, tree, is_leaf=is_split)


@contextmanager
def open_updates() -> Iterator[ObjectUpdates]:
    """Open the scope of one call, from before it is traced until its changes are written back."""
    nnx = sys.modules.get("flax.nnx")
    tag = object()  # names this call alone
    if nnx is None:
        yield ObjectUpdates(None, tag)
    else:
        with nnx.update_context(tag):
            yield ObjectUpdates(nnx, tag)


@dataclass(frozen=True)
class ObjectUpdates:
    """The nnx objects of one call: models, variables, optimizers, random streams. An object that is reached twice stays one."""

    nnx: Any  # the module flax.nnx, or None
    tag: object  # nnx's name for the call

    def is_object(self, value: Any) -> bool:
        return self.nnx is not None and isinstance(value, self.nnx.Variable | self.nnx.Pytree)

    def unbind(self, fn: Callable) -> tuple[Callable, list[Any]]:
        """Separate a function from the objects that it is bound to.

        Returns:
            A function of the list of bound objects and the call's arguments, and that list; the list is fn itself if it is bound to none.
        """
        if isinstance(fn, MethodType) and self.is_object(fn.__self__):
            method = fn.__func__
            return lambda bound, *args, **kwargs: method(*bound, *args, **kwargs), [fn.__self__]
        if isinstance(fn, partial) and type(fn) is partial:
            leaves, tree = jax.tree.flatten((fn.args, fn.keywords), is_leaf=self.is_object)
            is_object = [self.is_object(leaf) for leaf in leaves]
            if any(is_object) or isinstance(fn.func, partial | MethodType):
                inner, inner_bound = self.unbind(fn.func)

                def call_bound(bound: list[Any], *args: Any, **kwargs: Any) -> Any:
                    own = iter(bound[len(inner_bound) :])
                    first, keywords = jax.tree.unflatten(
                        tree, [next(own) if o else leaf for leaf, o in zip(leaves, is_object, strict=True)]
                    )
                    return inner(bound[: len(inner_bound)], *first, *args, **{**keywords, **kwargs})

                return call_bound, [*inner_bound, *(leaf for leaf, o in zip(leaves, is_object, strict=True) if o)]
        return lambda bound, *args, **kwargs: bound[0](*args, **kwargs), [fn]

    def list_objects(self, tree: Any) -> list[Any]:
        """List the objects of a tree."""
        return [x for x in jax.tree.leaves(tree, is_leaf=self.is_object) if self.is_object(x)]

    def split(self, tree: Any) -> Any:
        """Replace each object of a tree by a `SplitObject`."""
        if self.nnx is None:
            return tree
        with self.nnx.split_context(self.tag) as context:
            return jax.tree.map(lambda x: SplitObject(*context.split(x)) if self.is_object(x) else x, tree, is_leaf=self.is_object)

    def merge(self, tree: Any, *, traced: bool) -> Any:
        """Replace each `SplitObject` of a tree by an object.

        While the call is traced these are new objects. Afterwards they are the objects that were split, updated.
        """
        is_split = lambda x: isinstance(x, SplitObject)
        if not any(map(is_split, jax.tree.leaves(tree, is_leaf=is_split))):
            return tree
        with self.nnx.merge_context(self.tag, inner=traced) as context:
            return jax.tree.map(lambda x: context.merge(x.graphdef, x.state) if is_split(x) else x, tree, is_leaf=is_split)

    def without_objects(self, tree: Any) -> Any:
        """Replace each object of a tree by None."""
        return jax.tree.map(lambda x: None if self.is_object(x) else x, tree, is_leaf=self.is_object)

    def watch_changes(self, objects: list[Any]) -> Callable[[Any], list[int]]:
        """Return a function from the call's results to the indices of the objects that must be written back.

        These are the objects that have changed since, and those in the results.
        """
        before = [self._contents(x) for x in objects]

        def find_changed(results: Any) -> list[int]:
            returned = {id(part) for result in self.list_objects(results) for part in self._nested_objects(result)}
            return [
                number
                for number, (x, then) in enumerate(zip(objects, before, strict=True))
                if not _same_contents(self._contents(x), then) or any(id(part) in returned for part in self._nested_objects(x))
            ]

        return find_changed

    def check_writable(self, objects: Sequence[Any]) -> None:
        """Raise nnx's TraceContextError if another trace made one of the objects, before anything is written to any of them."""
        for part in [part for x in objects for part in self._nested_objects(x)]:
            if isinstance(part, self.nnx.Variable):
                part.update_from_state(part)

    def _nested_objects(self, value: Any) -> list[Any]:
        return [part for _, part in self.nnx.iter_graph(value) if self.is_object(part)]

    def _contents(self, value: Any) -> tuple[list[Any], Any]:
        with self.nnx.split_context() as context:
            return jax.tree.flatten(SplitObject(*context.split(value)))


def _same_contents(now: tuple[list[Any], Any], then: tuple[list[Any], Any]) -> bool:
    return now[1] == then[1] and all(a is b for a, b in zip(now[0], then[0], strict=True))
