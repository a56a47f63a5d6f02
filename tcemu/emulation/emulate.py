"""`emulate`: any JAX function, its matrix products by a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import jax
import numpy as np

from tcemu.emulation.policy import Policy, Report, checked
from tcemu.emulation.rewriting import Cache, Rewriter, Scope

P = ParamSpec("P")
R = TypeVar("R")


class Emulated(Generic[P, R]):
    """What `emulate` returns: a function like the one given, and `report`."""

    def __init__(self, fn: Callable[P, R], policy: Policy, convolutions: bool):
        self.fn, self.policy, self.convolutions = fn, checked(policy), convolutions
        self._cache: Cache = WeakKeyDictionary()
        update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        program, arrays, back = traced(self.fn, args, kwargs)
        return back(self._rewriter().evaluate(program.jaxpr, program.consts, arrays, Scope()))

    def report(self, *args: P.args, **kwargs: P.kwargs) -> Report:
        """What is replaced and what is left in a call with these arguments, arrays or `jax.ShapeDtypeStruct`; nothing is computed.

        The products of fn itself. Those of its gradient: `emulate(jax.grad(fn), policy).report(...)`.
        """
        program, _, _ = traced(self.fn, args, kwargs)
        rewriter = self._rewriter()
        rewriter.trace(program.jaxpr, program.consts, Scope())
        return Report(tuple(rewriter.entries))

    def _rewriter(self) -> Rewriter:
        return Rewriter(self.policy, self.convolutions, self._cache)

    def __repr__(self) -> str:
        return f"emulate({getattr(self.fn, '__name__', self.fn)}, {self.policy})"


def traced(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, list[Any], Callable[[list[Any]], Any]]:
    """The program of a call, the arrays it takes, and a function from the program's results to fn's. fn may be a pytree with arrays."""
    leaves, tree = jax.tree.flatten((fn, args, kwargs))
    is_array = [_is_array(leaf) for leaf in leaves]
    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
    kept: list[Any] = []

    def flat(*arrays):
        fn, args, kwargs = jax.tree.unflatten(tree, _merged(leaves, is_array, arrays))
        results, out_tree = jax.tree.flatten(fn(*args, **kwargs))
        which = [_is_array(leaf) for leaf in results]
        kept[:] = out_tree, which, [None if array else leaf for leaf, array in zip(results, which, strict=True)]
        return [leaf for leaf, array in zip(results, which, strict=True) if array]

    program = jax.make_jaxpr(flat)(*arrays)

    def back(results: list[Any]) -> Any:
        out_tree, which, others = kept
        return jax.tree.unflatten(out_tree, _merged(others, which, results))

    return program, arrays, back


def _merged(leaves: Sequence[Any], is_array: Sequence[bool], arrays: Sequence[Any]) -> list[Any]:
    """The leaves, those that are arrays replaced by these."""
    remaining = iter(arrays)
    return [next(remaining) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def emulate(fn: Callable[P, R], policy: Policy, *, convolutions: bool = False) -> Emulated[P, R]:
    """fn with every matrix product evaluated by the policy's choice, everything else as it was.

    fn: any JAX function, or a callable pytree such as an equinox module. It is traced at each call, as `jax.jit` traces it: arrays are
    traced, everything else among its arguments is as it is. Put `jax.jit` around the result, as around fn, to compile it once.
    policy: a `Recipe` for every product; or a list of (pattern, choice), of which the first whose pattern fits the product's name counts,
    "*" standing for anything (`fnmatch`); or a function that is given a `Product` and returns the choice. A choice is a `Recipe`, a
    callable with `jax.lax.dot_general`'s signature, or None, which leaves the product. The short forms leave products that are not of real
    floats.
    convolutions: whether the policy's choice holds for convolutions too, each one product of patches (im2col) with the kernel; K then runs
    over the places of the window, and within a place over the input features. Without it they are left.

    The result works under jit, vmap, grad, jvp and shard_map as fn does, as far as the choices do. Products are found through jit, scan,
    while, cond, checkpoint, custom_jvp, custom_vjp, closed_call and shard_map; `report(*args)` of the result lists what is replaced, what
    is left and why, also inside primitives that are not entered. Functions with rules of their own keep them: the products of the function
    and of its rules go by the policy, named ".../jvp/...", ".../fwd/..." and ".../bwd/...". A checkpoint keeps its policy, which sees an
    emulated product as the product that it stands for. A result in another dtype than the product's is converted to that.
    The gradient of `emulate(fn, policy)` has the backward products of each choice; in `emulate(jax.grad(fn), policy)` they are products
    like others, named "transpose(...)", and the policy chooses.
    Raises TypeError for a policy or choice of another kind, ValueError for a choice that returns another shape.
    """
    return Emulated(fn, policy, convolutions)
