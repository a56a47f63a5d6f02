"""`emulate`: any JAX function with its matrix products computed by a policy.

A call is traced to a program (jaxpr), the program is surveyed for its products and the roles of their operands, and then evaluated with
each product replaced by the policy's choice. `survey`, `decisions` and `rewriting` do one part each.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial, update_wrapper
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax.extend.core import ClosedJaxpr

from tcemu.base.compilation import compile_clock
from tcemu.base.jax_internals import find_trace, is_tracing
from tcemu.operations.products.recipes import Recipe
from tcemu.uses.emulation.call_state import (
    ObjectUpdates,
    check_arrays,
    check_no_leaked_tracers,
    check_unchanged,
    object_states,
    open_updates,
    refuse_closure_updates,
)
from tcemu.uses.emulation.decisions import Policy, as_policy, plan_policy
from tcemu.uses.emulation.function_choices import FunctionPolicy, as_function_policy, unused_function_warnings
from tcemu.uses.emulation.origins import Parameters, Rows, find_origins, find_rows
from tcemu.uses.emulation.random_keys import as_typed_key
from tcemu.uses.emulation.report import Report, policy_warnings
from tcemu.uses.emulation.rewriting import ProgramCache, Rewriter, Scope
from tcemu.uses.emulation.row_programs import vectorize_rows
from tcemu.uses.emulation.survey import Survey, SurveyScope

log = logging.getLogger("tcemu")
EAGER_LIMIT = 10  # compilations of one call outside jit after which a log entry says so
P = ParamSpec("P")
R = TypeVar("R")


class EmulatedFunction(Generic[P, R]):
    """A function with emulated matrix products, as `emulate` returns it.

    It works under jit, vmap, grad, jvp and shard_map as the original function does, as far as the policy's choices do.

    - Products are found through jit, scan, while, cond, checkpoint, custom_jvp, custom_vjp, closed_call and shard_map. `report` also lists
      products inside primitives that are not entered.
    - Functions with derivative rules of their own keep these rules. The products in the rules go by the policy too, under the names
      ".../jvp/...", ".../fwd/..." and ".../bwd/...".
    - A checkpoint keeps its own policy, which sees an emulated product as the product that it replaces.
    - The gradient of `emulate(fn, policy)` has the backward products of each choice. In `emulate(jax.grad(fn), policy)` they are products
      of the program, named "transpose(...)", and the policy chooses for them too.
    - A result in another dtype than the product's is converted to the product's dtype.
    - A product of two NumPy arrays inside the function is computed by NumPy. No program shows it: it is neither emulated nor listed.
    """

    def __init__(
        self,
        fn: Callable[P, R],
        policy: Policy,
        convolutions: bool = False,
        parameters: Parameters = None,
        key: PRNGKey | None = None,
        rows: Rows = None,
        functions: FunctionPolicy = None,
    ):
        self.fn, self.policy, self.convolutions, self.parameters, self.rows = fn, as_policy(policy), convolutions, parameters, rows
        self.functions = as_function_policy(functions)
        self.key = as_typed_key(key)
        self._cache: ProgramCache = WeakKeyDictionary()
        update_wrapper(self, fn, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with open_updates() as objects:
            call = trace_call(self.fn, args, kwargs, self.parameters, objects, self.rows, self.functions is not None)
            rewriter = self._make_rewriter(call)
            rewriter.after_product = None if is_tracing() else partial(_check_compilations, compile_clock().programs)
            results = call.rebuild(rewriter.evaluate(call.program.jaxpr, call.program.consts, call.arrays, Scope(key=self.key)))
        lines = policy_warnings(self.policy, rewriter.entries)
        functions = [entry for entry in rewriter.entries if entry.function is not None]
        found = [entry.function for entry in functions if entry.function is not None]
        lines += unused_function_warnings(self.functions, found, sum(entry.replaced for entry in functions))
        left = [entry.name for entry in rewriter.entries if not entry.replaced and entry.function is None]
        if self.rows is not None and left:
            lines.append(
                f"{len(left)} products are left to XLA, as {left[0]}, whose bits may depend on the number of rows; a recipe for every "
                "product makes the results independent of it"
            )
        for line in lines:
            warnings.warn(f"emulate({getattr(self.fn, '__name__', type(self.fn).__name__)}): {line}", stacklevel=2)
        return results

    def report(self, *args: P.args, **kwargs: P.kwargs) -> Report:
        """List what is replaced and what is left unchanged in a call, without computing anything.

        The list has the products of the function itself; `emulate(jax.grad(fn), policy).report(...)` lists those of its gradient.

        Args:
            *args: Positional arguments of the function, arrays or `jax.ShapeDtypeStruct`.
            **kwargs: Keyword arguments of the function.

        Returns:
            A `Report`, which prints as a table.
        """
        call = trace_call(self.fn, args, kwargs, self.parameters, rows=self.rows, functions=self.functions is not None)
        rewriter = self._make_rewriter(call)
        rewriter.trace(call.program.jaxpr, call.program.consts, Scope(key=self.key))
        return Report.from_entries(rewriter.entries, call.weights)

    def _make_rewriter(self, call: TracedCall) -> Rewriter:
        policy = plan_policy(self.policy, call.survey.products.values())
        return Rewriter(policy, self.convolutions, call.survey, self._cache, functions=self.functions)

    def __repr__(self) -> str:
        functions = "" if self.functions is None else f", functions={self.functions}"
        return f"emulate({getattr(self.fn, '__name__', self.fn)}, {self.policy}{functions})"


def _check_compilations(before: int) -> None:
    """Warn once in a process if a call outside `jax.jit` has compiled many programs. before: number of programs when it began."""
    if compile_clock().programs - before >= EAGER_LIMIT:
        warn_of_compilations()


@cache
def warn_of_compilations() -> None:
    log.warning(
        "emulate: this call has compiled %d programs, one for each operation, and goes on. One program for all of them takes a fraction "
        "of the time: put jax.jit (nnx.jit) around the outermost function, a gradient included",
        EAGER_LIMIT,
    )


class TracedCall(NamedTuple):
    """A call of a function as a program."""

    program: ClosedJaxpr
    survey: Survey
    weights: str  # description of the arrays that count as parameters
    arrays: list[Any]  # operands of the program
    rebuild: Callable[[list[Any]], Any]  # function from the program's results to the call's; it also writes changes back into nnx objects


def trace_call(
    fn: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    parameters: Parameters = None,
    objects: ObjectUpdates | None = None,
    rows: Rows = None,
    functions: bool = False,
) -> TracedCall:
    """Trace a call to a program.

    Args:
        fn: Function, which may itself be a pytree with arrays.
        args: Positional arguments.
        kwargs: Keyword arguments.
        parameters: Parameters as `emulate` takes them.
        objects: Open scope for nnx objects; needed if the results are to be rebuilt.
        rows: Rows as `emulate` takes them.
        functions: Whether the survey lists softmaxes, norms and activations too.

    Raises:
        ValueError: `parameters` or `rows` matches no array, or a result that depends on the rows has no axis for them.
        TypeError: An array is not JAX's, so that no program would show its products, or the call changed state that would be lost.
    """
    if objects is None:
        with open_updates() as objects:
            return trace_call(fn, args, kwargs, parameters, objects, rows, functions)
    function, bound = objects.unbind(fn)
    split = objects.split((bound, args, kwargs))
    leaves, tree = jax.tree.flatten(split)
    check_arrays("an argument", leaves)
    is_array = [_is_array(leaf) for leaf in leaves]
    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
    output: list[Any] = []  # tree of the results, which of its leaves are arrays, and its other leaves
    changed: list[int] = []  # indices of the objects that are written back
    traces: list[Any] = []

    def flat(*arrays):
        first: Any = arrays[0] if arrays else jnp.zeros(())
        traces.append(weakref.ref(find_trace(first)))
        call = objects.merge(jax.tree.unflatten(tree, _replace_arrays(leaves, is_array, arrays)), traced=True)
        inside = objects.list_objects(call)
        find_changed = objects.watch_changes(inside)
        results = function(call[0], *call[1], **call[2])
        changed[:] = find_changed(results)
        results, out_tree = jax.tree.flatten(objects.split(([inside[number] for number in changed], results)))
        check_unchanged(objects.without_objects(call), arrays, results)
        check_arrays("a result", results)
        is_result_array = [_is_array(leaf) for leaf in results]
        others = [None if array else leaf for leaf, array in zip(results, is_result_array, strict=True)]
        output[:] = out_tree, is_result_array, others
        return [leaf for leaf, array in zip(results, is_result_array, strict=True) if array]

    row_count, is_row = find_rows(fn, object_states(split), is_array, arrays, rows)
    one_row = [
        jax.ShapeDtypeStruct((1, *array.shape[1:]), array.dtype) if row else array for array, row in zip(arrays, is_row, strict=True)
    ]
    with refuse_closure_updates():
        program_of_row = jax.make_jaxpr(flat)(*one_row) if row_count else None
        program = jax.make_jaxpr(flat)(*arrays)
    if program_of_row is not None:
        program = vectorize_rows(program_of_row, is_row, row_count, program.out_avals)
    check_no_leaked_tracers((fn, args, kwargs), traces[-1]())

    def rebuild(results: list[Any]) -> Any:
        out_tree, is_result_array, others = output
        with refuse_closure_updates():
            outside = objects.list_objects((bound, args, kwargs))
            objects.check_writable([outside[number] for number in changed])
            return objects.merge(jax.tree.unflatten(out_tree, _replace_arrays(others, is_result_array, results)), traced=False)[1]

    origins = find_origins(fn, object_states(split), is_array, program.consts, parameters)
    survey = Survey(with_functions=functions)
    survey.walk(program.jaxpr, origins.arrays, SurveyScope(), origins.constants)
    return TracedCall(program=program, survey=survey, weights=origins.reason, arrays=arrays, rebuild=rebuild)


def _replace_arrays(leaves: Sequence[Any], is_array: Sequence[bool], arrays: Sequence[Any]) -> list[Any]:
    """Put arrays in the places of the leaves that are arrays."""
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
    rows: Rows = None,
    functions: FunctionPolicy = None,
) -> EmulatedFunction[P, R]:
    """Return a function with every matrix product computed by a policy's choice, as `tcemu.emulate` describes it."""
    check_function("emulate", fn, policy)
    return EmulatedFunction(fn, policy, convolutions, parameters, key, rows, functions)


def check_function(caller: str, fn: Any, policy: Any) -> None:
    """Raise TypeError unless `fn` is a function; the message shows the right order if the arguments are swapped."""
    if callable(fn) and not isinstance(fn, Recipe):
        return
    if callable(policy):
        shown = fn.name or "recipe" if isinstance(fn, Recipe) else fn
        raise TypeError(f"{caller}({shown!r}, {policy!r}): the function comes first: {caller}(fn, {shown!r})")
    raise TypeError(f"fn: got {fn!r}; {caller} takes a JAX function, or a callable pytree such as a module, before the policy")
