"""What holds programs: how jit, scan, cond and the like are bound with their programs rewritten. They keep their other parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core.primitives import name_p
from jax.extend.linear_util import wrap_init


@dataclass(frozen=True)
class Scope:
    """Where an equation stands.

    path: the names around it. repeats: how often the loops around it run it; None if that is not known. saved: inside a checkpoint with a
    policy, the products that were emulated (their operands' types, primitive and parameters), by the names that their results carry.
    """

    path: str = ""
    repeats: int | None = 1
    saved: dict[str, tuple] | None = None

    def at(self, path: str, times: int | None = 1) -> "Scope":
        return replace(self, path=path, repeats=None if self.repeats is None or times is None else self.repeats * times)


class Programs(Protocol):
    """What rewrites programs: a `Rewriter`, whose methods say what these do."""

    def evaluate(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], scope: Scope) -> list[Any]: ...

    def closed(self, jaxpr: ClosedJaxpr, scope: Scope) -> tuple[ClosedJaxpr, list[Any]]: ...

    def open(self, jaxpr: Jaxpr, consts: Sequence[Any], scope: Scope, hoist: Callable[[Any], bool]) -> tuple[ClosedJaxpr, list[Any]]: ...

    def trace(self, jaxpr: Jaxpr, consts: Sequence[Any], scope: Scope) -> ClosedJaxpr: ...

    def function(self, call: Callable[..., Any], scope: Scope) -> Callable[..., Any]: ...


class Binding(NamedTuple):
    """What a primitive is bound with."""

    operands: Sequence[Any]
    params: dict[str, Any]


Rewritten = Binding | list[Any]  # an equation to be bound, or its results


def _jit(rewriter: Programs, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    body = equation.params["jaxpr"]
    program, hoisted = rewriter.closed(body, scope)
    if hoisted:  # its shardings speak of the operands it had: evaluated in place
        return eval_jaxpr(program.jaxpr, program.consts, *hoisted, *values)
    return Binding(values, {**equation.params, "jaxpr": program})


def _call(rewriter: Programs, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    program, hoisted = rewriter.closed(equation.params["call_jaxpr"], scope)
    return Binding([*hoisted, *values], {**equation.params, "call_jaxpr": program})


def _scan(rewriter: Programs, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params = equation.params
    program, hoisted = rewriter.closed(params["jaxpr"], scope.at(scope.path, params["length"]))
    if not hoisted:
        return Binding(values, {**params, "jaxpr": program})
    consts, init, xs = _parts_of_scan(params, values)

    def body(state, x):
        results = eval_jaxpr(program.jaxpr, program.consts, *hoisted, *consts, *state, *x)
        return results[: len(init)], results[len(init) :]

    state, ys = lax.scan(body, init, xs, params["length"], params["reverse"], params["unroll"])
    return [*state, *ys]


def _parts_of_scan(params: dict[str, Any], values: Sequence[Any]) -> list[list[Any]]:
    """The operands of a scan: those alike in every turn, the carry's, and those cut along their first axis."""
    if "ft_in" in params:  # JAX 0.12 and later
        return [list(part) for part in params["ft_in"].update(values).unpack()]
    carry = params["num_consts"] + params["num_carry"]
    return [list(values[: params["num_consts"]]), list(values[params["num_consts"] : carry]), list(values[carry:])]


def _while(rewriter: Programs, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params, first = dict(equation.params), equation.params["cond_nconsts"]
    groups = [values[:first], values[first : first + params["body_nconsts"]]]
    for number, part in enumerate(("cond", "body")):
        params[f"{part}_jaxpr"], hoisted = rewriter.closed(params[f"{part}_jaxpr"], scope.at(f"{scope.path}/{part}", None))
        groups[number] = [*hoisted, *groups[number]]
        params[f"{part}_nconsts"] += len(hoisted)
    return Binding([*groups[0], *groups[1], *values[first + equation.params["body_nconsts"] :]], params)


def _cond(rewriter: Programs, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    index, *operands = values
    parts = [rewriter.closed(branch, scope.at(f"{scope.path}/{number}")) for number, branch in enumerate(equation.params["branches"])]
    if not any(hoisted for _, hoisted in parts):
        return Binding(values, {**equation.params, "branches": tuple(program for program, _ in parts)})
    branches = [
        lambda *args, program=program, hoisted=hoisted: eval_jaxpr(program.jaxpr, program.consts, *hoisted, *args)
        for program, hoisted in parts
    ]
    return list(lax.switch(index, branches, *operands))


def _checkpoint(rewriter: Programs, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params = dict(equation.params)
    saved: dict[str, tuple] = {}
    if params["policy"] is not None:
        scope, params["policy"] = replace(scope, saved=saved), _saving(params["policy"], saved)
    program, hoisted = rewriter.open(params["jaxpr"], (), scope, lambda c: True)
    params["jaxpr"] = program.jaxpr
    if isinstance(params["prevent_cse"], tuple):
        params["prevent_cse"] = (True,) * len(hoisted) + params["prevent_cse"]
    return Binding([*hoisted, *values], params)


def _saving(policy: Callable, saved: dict[str, tuple]) -> Callable:
    """A checkpoint's policy, asked of an emulated product's result as of the product that it stands for."""

    def asked(primitive, *avals, **params):
        if primitive is name_p and params["name"] in saved:
            avals, primitive, params = saved[params["name"]]
        return policy(primitive, *avals, **params)

    return asked


def _shard_map(rewriter: Programs, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params = equation.params
    body = params["jaxpr"]
    call = jax.shard_map(
        lambda *args: tuple(rewriter.evaluate(body, (), args, scope)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return list(call(*values))


def _custom_jvp(rewriter: Programs, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params = dict(equation.params)
    params["call_jaxpr"], hoisted = rewriter.closed(params["call_jaxpr"], scope)
    params["num_consts"] += len(hoisted)
    rule = params["jvp_jaxpr_fun"]

    def rewritten(*zeros):
        jaxpr, consts, out_zeros = rule.call_wrapped(*zeros)
        program = rewriter.trace(jaxpr, consts, scope.at(f"{scope.path}/jvp"))
        return program.jaxpr, program.consts, out_zeros

    params["jvp_jaxpr_fun"] = wrap_init(rewritten, debug_info=rule.debug_info)
    return Binding([*hoisted, *values], params)


def _custom_vjp(rewriter: Programs, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params = dict(equation.params)
    params["call_jaxpr"], hoisted = rewriter.closed(params["call_jaxpr"], scope)
    params["num_consts"] += len(hoisted)
    forward, backward = params["fwd_jaxpr_thunk"], params["bwd"]

    def rewritten(*nonzeros):
        jaxpr, consts = forward.call_wrapped(*nonzeros)
        program = rewriter.trace(jaxpr, consts, scope.at(f"{scope.path}/fwd"))
        return program.jaxpr, program.consts

    params["fwd_jaxpr_thunk"] = wrap_init(rewritten, debug_info=forward.debug_info)
    params["bwd"] = wrap_init(rewriter.function(backward.call_wrapped, scope.at(f"{scope.path}/bwd")), debug_info=backward.debug_info)
    return Binding([*hoisted, *values], params)


RULES: dict[str, Callable[[Programs, JaxprEqn, Sequence[Any], Scope], Rewritten]] = {
    "jit": _jit,
    "pjit": _jit,
    "closed_call": _call,
    "core_closed_call": _call,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "remat2": _checkpoint,
    "checkpoint": _checkpoint,
    "shard_map": _shard_map,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}
