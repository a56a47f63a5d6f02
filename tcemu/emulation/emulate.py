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
from chex import PRNGKey
from jax.extend.core import ClosedJaxpr

from tcemu.emulation.keys import one_key
from tcemu.emulation.nnx_objects import Updates, states, updates
from tcemu.emulation.parameters import Parameters, origins
from tcemu.emulation.policy import Policy, checked, planned
from tcemu.emulation.report import Report, positional, unused
from tcemu.emulation.rewriting import Cache, Rewriter, Scope
from tcemu.emulation.state import check_arrays, check_not_kept, check_unchanged, refusing_what_is_closed_over
from tcemu.emulation.survey import Place, Survey

P = ParamSpec("P")
R = TypeVar("R")


class Emulated(Generic[P, R]):
    """What `emulate` returns: a function like the one given, and `report`."""

    def __init__(self, fn: Callable[P, R], policy: Policy, convolutions: bool, parameters: Parameters, key: PRNGKey | None):
        self.fn, self.policy, self.convolutions, self.parameters = fn, checked(policy), convolutions, parameters
        self.key = one_key(key)
        self._cache: Cache = WeakKeyDictionary()
        update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with updates() as objects:
            call = traced(self.fn, args, kwargs, self.parameters, objects)
            rewriter = self._rewriter(call)
            results = call.rebuilt(rewriter.evaluate(call.program.jaxpr, call.program.consts, call.arrays, Scope(key=self.key)))
        for line in unused(self.policy, rewriter.entries) + positional(rewriter.entries):
            warnings.warn(f"emulate({getattr(self.fn, '__name__', type(self.fn).__name__)}): {line}", stacklevel=2)
        return results

    def report(self, *args: P.args, **kwargs: P.kwargs) -> Report:
        """What is replaced and what is left in a call with these arguments, arrays or `jax.ShapeDtypeStruct`; nothing is computed.

        The products of fn itself. Those of its gradient: `emulate(jax.grad(fn), policy).report(...)`.
        """
        call = traced(self.fn, args, kwargs, self.parameters)
        rewriter = self._rewriter(call)
        rewriter.trace(call.program.jaxpr, call.program.consts, Scope(key=self.key))
        return Report(tuple(rewriter.entries), call.weights)

    def _rewriter(self, call: TracedCall) -> Rewriter:
        policy = planned(self.policy, call.survey.products.values())
        return Rewriter(policy, self.convolutions, call.survey, self._cache)

    def __repr__(self) -> str:
        return f"emulate({getattr(self.fn, '__name__', self.fn)}, {self.policy})"


class TracedCall(NamedTuple):
    """A call of a function as a program."""

    program: ClosedJaxpr
    survey: Survey
    weights: str  # what counts as parameters, in words
    arrays: list[Any]  # that it takes
    rebuilt: Callable[[list[Any]], Any]  # the program's results -> the function's; what the call changed in nnx objects is written back


def traced(fn: Callable, args: tuple, kwargs: dict[str, Any], parameters: Parameters = None, objects: Updates | None = None) -> TracedCall:
    """The program of a call. fn may be a pytree with arrays itself. parameters: as `emulate` takes them. objects: for results to be rebuilt
    where nnx objects are at work.

    Raises ValueError for parameters that fit no array, and TypeError for arrays that are not JAX's, which no program shows, and for state
    that the call changed, which would be lost.
    """
    if objects is None:
        with updates() as objects:
            return traced(fn, args, kwargs, parameters, objects)
    run, held = objects.opened(fn)
    split = objects.split((held, args, kwargs))
    leaves, tree = jax.tree.flatten(split)
    check_arrays("an argument", leaves)
    is_array = [_is_array(leaf) for leaf in leaves]
    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
    kept: list[Any] = []
    written: list[int] = []  # the numbers of the objects that are written back
    traces: list[Any] = []

    def flat(*arrays):
        first: Any = arrays[0] if arrays else jnp.zeros(())
        traces.append(weakref.ref(first._trace))
        call = objects.merged(jax.tree.unflatten(tree, _merged(leaves, is_array, arrays)), traced=True)
        inside = objects.among(call)
        changed = objects.watch(inside)
        results = run(call[0], *call[1], **call[2])
        written[:] = changed(results)
        results, out_tree = jax.tree.flatten(objects.split(([inside[number] for number in written], results)))
        check_unchanged(objects.others(call), arrays, results)
        check_arrays("a result", results)
        which = [_is_array(leaf) for leaf in results]
        kept[:] = out_tree, which, [None if array else leaf for leaf, array in zip(results, which, strict=True)]
        return [leaf for leaf, array in zip(results, which, strict=True) if array]

    with refusing_what_is_closed_over():
        program = jax.make_jaxpr(flat)(*arrays)
    check_not_kept((fn, args, kwargs), traces[-1]())

    def rebuilt(results: list[Any]) -> Any:
        out_tree, which, others = kept
        with refusing_what_is_closed_over():
            outside = objects.among((held, args, kwargs))
            objects.check_writable([outside[number] for number in written])
            return objects.merged(jax.tree.unflatten(out_tree, _merged(others, which, results)), traced=False)[1]

    found = origins(fn, states(split), is_array, program.consts, parameters)
    survey = Survey()
    survey.walk(program.jaxpr, found.arrays, Place(), found.constants)
    return TracedCall(program=program, survey=survey, weights=found.why, arrays=arrays, rebuilt=rebuilt)


def _merged(leaves: Sequence[Any], is_array: Sequence[bool], arrays: Sequence[Any]) -> list[Any]:
    """The leaves, those that are arrays replaced by these."""
    remaining = iter(arrays)
    return [next(remaining) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def emulate(
    fn: Callable[P, R],
    policy: Policy,
    *,
    convolutions: bool = False,
    parameters: Parameters = None,
    key: PRNGKey | None = None,
) -> Emulated[P, R]:
    """fn with every matrix product evaluated by the policy's choice, everything else as it was.

    fn: any JAX function, or a callable pytree such as an equinox module. It is traced at each call, as `jax.jit` traces it: arrays are
    traced, everything else among its arguments is as it is. Put `jax.jit` around the result, as around fn, to compile it once.
    policy: one of four. A `Recipe`, or its name, for every product. Rules, a dict or a list of pairs from a pattern to a choice: the first
    that fits counts. A pattern is a string for the product's name or the path of a parameter, in which "*" stands for anything (`fnmatch`),
    a regular expression, or a function from a `Product` to a bool, as `tcemu.policies.Where`. A function that takes a `Product` and returns
    the choice. A policy of `tcemu.policies`. A choice is a `Recipe`, the name of one, as "bf16" or "fp8 on H100", a callable with the
    signature of `jax.lax.dot_general`, or None, which leaves the product. All but functions leave products of other than real floats,
    and what sums nothing, as einsum("btd,btd->btd"), whose elements are only multiplied.
    convolutions: whether the policy's choice holds for convolutions too; without it they are left. Each is then one product of patches
    (im2col) with the kernel, whose K runs over the places of the window, and within a place over the input features. Where a recipe's
    patches are more than 2^22 elements they are multiplied in pieces, with the same bits.
    A ragged product, as `jax.lax.ragged_dot` of a mixture of experts, is one for each group: see `tcemu.ragged_dot`. A choice that is no
    Recipe is called in a loop over the groups, each time with whole arrays in which all other groups' members are 0.

    parameters: which arrays are parameters, by which the roles of operands are told: positions or names of arguments, patterns for paths
    as "layers/0/*", or a function from a path to a bool. None: the arrays of fn itself; else the argument named params, parameters,
    variables, weights or model; else the first argument that is no plain array; else what fn closes over.
    key: a jax.random key, for recipes that round stochastically (rounding "SR"); it may be traced, and then a new one in each step of a
    compiled loop compiles nothing anew. No two executions of a product share random bits: a product's key comes from this one, its place in
    the program, the turns of the loops around it, and under shard_map the device, where the operands differ between devices. The products
    of its gradient have keys that come from it. The same key gives the same bits under jit, in a checkpoint that computes again, and where
    a function with a derivative rule is differentiated. `jax.vmap` around the result with one key: all members share its bits.

    A recipe's A is the activation and its B the weight, wherever they stand. An operand that depends on parameters and not on data is a
    weight; one that comes from a cotangent is a gradient, and its product is computed by the recipe's own for gradients, if it has some.
    Where the roles do not tell, lhs is A; a warning says so if it matters. A choice `tcemu.dot_general(recipe, a="rhs")` decides.

    The result works under jit, vmap, grad, jvp and shard_map as fn does, as far as the choices do. Products are found through jit, scan,
    while, cond, checkpoint, custom_jvp, custom_vjp, closed_call and shard_map. `report(*args)` of the result lists what is replaced, and
    what is left and why, also inside primitives that are not entered.
    Functions with derivative rules of their own keep them; the products in these rules go by the policy too, named ".../jvp/...",
    ".../fwd/..." and ".../bwd/...". A checkpoint keeps its own policy, which sees an emulated product as the product that it stands for.
    A result in another dtype than the product's is converted to that.
    The gradient of `emulate(fn, policy)` has the backward products of each choice. In `emulate(jax.grad(fn), policy)` they are products
    of the program, named "transpose(...)", and the policy chooses.
    Objects of flax nnx, as fn itself, what a method or partial function is bound to, or arguments, are updated as `nnx.jit` does it:
    batch statistics, counters and random streams are written back. Else fn must be pure, as for `jax.jit`: state that it changes in other
    arguments, or in what it closes over, is refused (flax nnx: give the model as an argument). Arrays must be JAX's or NumPy's. A product
    of NumPy arrays with each other inside fn is NumPy's own: no program shows it, so that it stays as it is and nothing can be said of it.
    A policy that replaces nothing, and a rule that fits no product, are said in a warning.
    Raises TypeError for a policy, choice or key of another kind, arrays that are not JAX's, and state; ValueError for a name that is no
    recipe's, a choice that returns another shape, parameters that fit no array, and a recipe that rounds stochastically without a key.
    """
    return Emulated(fn, policy, convolutions, parameters, key)
