"""Objects of flax nnx in a traced call: what they hold goes in as arrays, what the call changes comes out and is written back.

nnx's own transforms do the same, by the same calls. flax is not imported here: while nobody has imported it, there are no such objects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import jax


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Part:
    """An object taken apart. state: its variables, a pytree; graphdef: all else."""

    graphdef: Any
    state: Any

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        return (self.state,), self.graphdef

    @classmethod
    def tree_unflatten(cls, graphdef: Any, children: Sequence[Any]) -> Part:
        return cls(graphdef, *children)


def states(tree: Any) -> Any:
    """The tree with its state for each `Part`: the same leaves, by the paths that they have in the object."""
    is_part = lambda x: isinstance(x, Part)  # noqa: E731
    return jax.tree.map(lambda x: x.state if is_part(x) else x, tree, is_leaf=is_part)


@contextmanager
def updates() -> Iterator[Updates]:
    """What one call needs, from before it is traced until what it changed is written back."""
    nnx = sys.modules.get("flax.nnx")
    tag = object()  # of this call alone
    if nnx is None:
        yield Updates(None, tag)
    else:
        with nnx.update_context(tag):
            yield Updates(nnx, tag)


@dataclass(frozen=True)
class Updates:
    """The objects of one call: models, variables, optimizers, random streams. What is reached twice stays one. nnx: the module, or None."""

    nnx: Any
    tag: object

    def is_object(self, value: Any) -> bool:
        return self.nnx is not None and isinstance(value, self.nnx.Variable | self.nnx.Pytree)

    def opened(self, fn: Callable) -> tuple[Callable, list[Any]]:
        """A function of what fn is bound to, as a list, and of its arguments; and that list: fn itself, if it is bound to no objects."""
        if isinstance(fn, MethodType) and self.is_object(fn.__self__):
            method = fn.__func__
            return lambda held, *args, **kwargs: method(*held, *args, **kwargs), [fn.__self__]
        if isinstance(fn, partial) and type(fn) is partial:
            leaves, tree = jax.tree.flatten((fn.args, fn.keywords), is_leaf=self.is_object)
            which = [self.is_object(leaf) for leaf in leaves]
            if any(which) or isinstance(fn.func, partial | MethodType):
                inner, of_inner = self.opened(fn.func)

                def run(held: list[Any], *args: Any, **kwargs: Any) -> Any:
                    given = iter(held[len(of_inner) :])
                    first, named = jax.tree.unflatten(tree, [next(given) if w else leaf for leaf, w in zip(leaves, which, strict=True)])
                    return inner(held[: len(of_inner)], *first, *args, **{**named, **kwargs})

                return run, [*of_inner, *(leaf for leaf, w in zip(leaves, which, strict=True) if w)]
        return lambda held, *args, **kwargs: held[0](*args, **kwargs), [fn]

    def among(self, tree: Any) -> list[Any]:
        """The tree's objects."""
        return [x for x in jax.tree.leaves(tree, is_leaf=self.is_object) if self.is_object(x)]

    def split(self, tree: Any) -> Any:
        """The tree with a `Part` for each object."""
        if self.nnx is None:
            return tree
        with self.nnx.split_context(self.tag) as context:
            return jax.tree.map(lambda x: Part(*context.split(x)) if self.is_object(x) else x, tree, is_leaf=self.is_object)

    def merged(self, tree: Any, *, traced: bool) -> Any:
        """The tree with an object for each `Part`: new ones while the call is traced; after it those that were split, as they are then."""
        is_part = lambda x: isinstance(x, Part)  # noqa: E731
        if not any(map(is_part, jax.tree.leaves(tree, is_leaf=is_part))):
            return tree
        with self.nnx.merge_context(self.tag, inner=traced) as context:
            return jax.tree.map(lambda x: context.merge(x.graphdef, x.state) if is_part(x) else x, tree, is_leaf=is_part)

    def others(self, tree: Any) -> Any:
        """The tree with None for each object."""
        return jax.tree.map(lambda x: None if self.is_object(x) else x, tree, is_leaf=self.is_object)

    def watch(self, objects: list[Any]) -> Callable[[Any], list[int]]:
        """Says later, given the call's results, which of the objects must be written back: those that changed, and those in the results."""
        before = [self._contents(x) for x in objects]

        def changed(results: Any) -> list[int]:
            returned = {id(part) for result in self.among(results) for part in self._parts(result)}
            return [
                number
                for number, (x, then) in enumerate(zip(objects, before, strict=True))
                if not _same(self._contents(x), then) or any(id(part) in returned for part in self._parts(x))
            ]

        return changed

    def check_writable(self, objects: Sequence[Any]) -> None:
        """Raises nnx's TraceContextError if another trace made one of them, before anything is written to any."""
        for part in [part for x in objects for part in self._parts(x)]:
            if isinstance(part, self.nnx.Variable):
                part.update_from_state(part)

    def _parts(self, value: Any) -> list[Any]:
        return [part for _, part in self.nnx.iter_graph(value) if self.is_object(part)]

    def _contents(self, value: Any) -> tuple[list[Any], Any]:
        with self.nnx.split_context() as context:
            return jax.tree.flatten(Part(*context.split(value)))


def _same(now: tuple[list[Any], Any], then: tuple[list[Any], Any]) -> bool:
    return now[1] == then[1] and all(a is b for a, b in zip(now[0], then[0], strict=True))
