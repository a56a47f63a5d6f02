"""`emulate`: any JAX function, its matrix products by a policy."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from tcemu.emulation.policy import Policy, Report, checked, unused
from tcemu.emulation.rewriting import Cache, Rewriter, Scope
from tcemu.emulation.state import WHAT_WORKS, check_arrays, check_not_kept, check_unchanged

P = ParamSpec("P")
R = TypeVar("R")


class Emulated(Generic[P, R]):
    """What `emulate` returns: a function like the one given, and `report`."""

    def __init__(self, fn: Callable[P, R], policy: Policy, convolutions: bool):
        self.fn, self.policy, self.convolutions = fn, checked(policy), convolutions
        self._cache: Cache = WeakKeyDictionary()
        update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        call = traced(self.fn, args, kwargs)
        rewriter = self._rewriter()
        results = rewriter.evaluate(call.program.jaxpr, call.program.consts, call.arrays, Scope())
        for line in unused(self.policy, rewriter.entries):
            warnings.warn(f"emulate({getattr(self.fn, '__name__', type(self.fn).__name__)}): {line}", stacklevel=2)
        return call.rebuilt(results)

    def report(self, *args: P.args, **kwargs: P.kwargs) -> Report:
        """What is replaced and what is left in a call with these arguments, arrays or `jax.ShapeDtypeStruct`; nothing is computed.

        The products of fn itself. Those of its gradient: `emulate(jax.grad(fn), policy).report(...)`.
        """
        program = traced(self.fn, args, kwargs).program
        rewriter = self._rewriter()
        rewriter.trace(program.jaxpr, program.consts, Scope())
        return Report(tuple(rewriter.entries))

    def _rewriter(self) -> Rewriter:
        return Rewriter(self.policy, self.convolutions, self._cache)

    def __repr__(self) -> str:
        return f"emulate({getattr(self.fn, '__name__', self.fn)}, {self.policy})"


class TracedCall(NamedTuple):
    """A call of a function as a program."""

    program: ClosedJaxpr
    arrays: list[Any]  # that it takes
    rebuilt: Callable[[list[Any]], Any]  # the program's results -> the function's


def traced(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> TracedCall:
    """The program of a call. fn may be a pytree with arrays itself.

    Raises TypeError for arrays that are not JAX's, which no program shows, and for state that the call changed, which would be lost.
    """
    leaves, tree = jax.tree.flatten((fn, args, kwargs))
    check_arrays("an argument", leaves)
    is_array = [_is_array(leaf) for leaf in leaves]
    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
    kept: list[Any] = []
    traces: list[Any] = []

    def flat(*arrays):
        first: Any = arrays[0] if arrays else jnp.zeros(())
        traces.append(weakref.ref(first._trace))
        call = jax.tree.unflatten(tree, _merged(leaves, is_array, arrays))
        results, out_tree = jax.tree.flatten(call[0](*call[1], **call[2]))
        check_unchanged(call, arrays, results)
        check_arrays("a result", results)
        which = [_is_array(leaf) for leaf in results]
        kept[:] = out_tree, which, [None if array else leaf for leaf, array in zip(results, which, strict=True)]
        return [leaf for leaf, array in zip(results, which, strict=True) if array]

    try:
        program = jax.make_jaxpr(flat)(*arrays)
    except Exception as error:
        if type(error).__name__ == "TraceContextError":  # flax nnx refuses by itself to change what a traced function closes over
            raise TypeError(f"emulate: the call would change what it closes over: {error}. {WHAT_WORKS}") from error
        raise
    check_not_kept((fn, args, kwargs), traces[-1]())

    def rebuilt(results: list[Any]) -> Any:
        out_tree, which, others = kept
        return jax.tree.unflatten(out_tree, _merged(others, which, results))

    return TracedCall(program=program, arrays=arrays, rebuilt=rebuilt)


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
    policy: one of three. A `Recipe` for every product. A list of (pattern, choice): the first pattern that fits the product's name counts,
    and "*" stands for anything (`fnmatch`). A function that takes a `Product` and returns the choice. A choice is a `Recipe`, a callable
    with the signature of `jax.lax.dot_general`, or None, which leaves the product. The first two leave products of other than real floats,
    and what sums nothing, as einsum("btd,btd->btd"), whose elements are only multiplied.
    convolutions: whether the policy's choice holds for convolutions too; without it they are left. Each is then one product of patches
    (im2col) with the kernel, whose K runs over the places of the window, and within a place over the input features. Where a recipe's
    patches are more than 2^22 elements they are multiplied in pieces, with the same bits.
    A ragged product, as `jax.lax.ragged_dot` of a mixture of experts, is one for each group: see `tcemu.ragged_dot`. A choice that is no
    Recipe is called in a loop over the groups, each time with whole arrays in which all other groups' members are 0.

    The result works under jit, vmap, grad, jvp and shard_map as fn does, as far as the choices do. Products are found through jit, scan,
    while, cond, checkpoint, custom_jvp, custom_vjp, closed_call and shard_map. `report(*args)` of the result lists what is replaced, and
    what is left and why, also inside primitives that are not entered.
    Functions with derivative rules of their own keep them; the products in these rules go by the policy too, named ".../jvp/...",
    ".../fwd/..." and ".../bwd/...". A checkpoint keeps its own policy, which sees an emulated product as the product that it stands for.
    A result in another dtype than the product's is converted to that.
    The gradient of `emulate(fn, policy)` has the backward products of each choice. In `emulate(jax.grad(fn), policy)` they are products
    like others, named "transpose(...)", and the policy chooses.
    fn must be pure, as for `jax.jit`: state that it changes, in its arguments or in what it closes over, is refused (flax nnx: split the
    model before, merge it in fn, and return the new state). Arrays must be JAX's or NumPy's.
    A policy that replaces nothing, and a rule that fits no product, are said in a warning.
    Raises TypeError for a policy or choice of another kind, arrays that are not JAX's, and state; ValueError for a choice that returns
    another shape.
    """
    return Emulated(fn, policy, convolutions)
