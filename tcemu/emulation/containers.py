"""What holds programs: how jit, scan, cond and the like are bound with their programs rewritten. They keep their other parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import jax
from chex import PRNGKey
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core.primitives import name_p
from jax.extend.linear_util import wrap_init
from jax.interpreters.ad import Zero
from jax.sharding import PartitionSpec

from tcemu.emulation.keys import in_turn
from tcemu.emulation.origins import Origin
from tcemu.emulation.programs import RULED, called, name_of, parts_of_scan, path_of
from tcemu.emulation.survey import Survey


@dataclass(frozen=True)
class Scope:
    """Where an equation stands.

    path: the names around it. repeats: how often the loops around it run it; None if that is not known. saved: inside a checkpoint with a
    policy, the products that were emulated (their operands' types, primitive and parameters), by the names that their results carry.
    key: of this turn of the loops around it, or None. place: what tells it from every other place of the program, where two may share
    their path. own: inside a derivative rule that calls its function, the function's name and place.
    """

    path: str = ""
    repeats: int | None = 1
    saved: dict[str, tuple] | None = None
    key: PRNGKey | None = None
    place: tuple[str, ...] = ()
    own: tuple[str, tuple[str, ...]] | None = None

    def at(self, word: str = "", times: int | None = 1) -> Scope:
        """One of the programs that an equation here holds. times: how often it runs."""
        path, place = (f"{self.path}/{word}", (*self.place, word)) if word else (self.path, self.place)
        repeats = None if self.repeats is None or times is None else self.repeats * times
        return replace(self, path=path, place=place, repeats=repeats)

    def of(self, equation: JaxprEqn, index: int = 0) -> Scope:
        """An equation here. index: how many before it have its name."""
        place = (*self.place, f"{name_of(equation)}#{index}")
        if self.own is not None and index == 0 and _calls(equation, self.own[0]):
            place = self.own[1]
        return replace(self, path=path_of(self.path, equation, index), place=place, own=None)

    def in_rule(self, word: str, rule: Jaxpr, name: str) -> Scope:
        """A derivative rule of the function `name`, which stands here.

        The rule takes the function's place, so that its products draw the bits that they draw where nothing is differentiated. If it calls
        the function, that call has the place, and the others have one of their own.
        """
        within = self.at(word)
        if any(_calls(equation, name) for equation in rule.eqns):
            return replace(within, own=(name, self.place))
        return replace(within, place=self.place)


def _calls(equation: JaxprEqn, name: str) -> bool:
    return equation.primitive.name in RULED and called(equation) == name


@dataclass(frozen=True, eq=False)
class Program:
    """A program rewritten. first: what it takes before its own operands; if it draws random bits, a key is the first of these."""

    jaxpr: ClosedJaxpr
    draws: bool
    first: list[Any]

    def __call__(self, *operands: Any, turn: Any = None) -> list[Any]:
        """Its results. turn: of the loop whose program it is."""
        first = self.first if turn is None or not self.draws else [in_turn(self.first[0], turn), *self.first[1:]]
        return eval_jaxpr(self.jaxpr.jaxpr, self.jaxpr.consts, *first, *operands)


class ProgramRewriter(Protocol):
    """A `Rewriter`, whose methods say what these do."""

    survey: Survey

    def evaluate(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], scope: Scope) -> list[Any]: ...

    def closed(self, jaxpr: ClosedJaxpr, scope: Scope) -> Program: ...

    def open(self, jaxpr: Jaxpr, consts: Sequence[Any], scope: Scope, hoist: Callable[[Any], bool]) -> Program: ...

    def trace(self, jaxpr: Jaxpr, consts: Sequence[Any], scope: Scope) -> ClosedJaxpr: ...

    def surveyed(self, jaxpr: Jaxpr, origins: Sequence[Origin], scope: Scope) -> list[Origin]: ...

    def function(self, call: Callable[..., Any], scope: Scope, residuals: Sequence[Origin]) -> Callable[..., Any]: ...


class Binding(NamedTuple):
    """What a primitive is bound with."""

    operands: Sequence[Any]
    params: dict[str, Any]


Rewritten = Binding | list[Any]  # an equation to be bound, or its results


def _jit(rewriter: ProgramRewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params = dict(equation.params)
    program = rewriter.closed(params["jaxpr"], scope)
    params |= {name: (free,) * len(program.first) + tuple(params[name]) for name, free in _free_operand().items()}
    return Binding([*program.first, *values], {**params, "jaxpr": program.jaxpr})


@cache
def _free_operand() -> dict[str, Any]:
    """What the parameters of a jit that speak of each operand say of one of which nothing was asked."""
    (equation,) = jax.make_jaxpr(jax.jit(lambda x: x + 1))(0).eqns
    return {name: equation.params[name][0] for name in ("in_shardings", "in_layouts", "donated_invars")}


def _call(rewriter: ProgramRewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    program = rewriter.closed(equation.params["call_jaxpr"], scope)
    return Binding([*program.first, *values], {**equation.params, "call_jaxpr": program.jaxpr})


def _scan(rewriter: ProgramRewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params = equation.params
    program = rewriter.closed(params["jaxpr"], scope.at(times=params["length"]))
    if not program.first:
        return Binding(values, {**params, "jaxpr": program.jaxpr})
    consts, init, xs = parts_of_scan(params, values)

    def body(state, x):
        turn, x = x
        results = program(*consts, *state, *x, turn=turn)
        return results[: len(init)], results[len(init) :]

    turns = jax.numpy.arange(params["length"], dtype=jax.numpy.uint32) if program.draws else None
    state, ys = lax.scan(body, init, (turns, xs), params["length"], params["reverse"], params["unroll"])
    return [*state, *ys]


def _while(rewriter: ProgramRewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params = dict(equation.params)
    parts = {part: rewriter.closed(params[f"{part}_jaxpr"], scope.at(part, None)) for part in ("cond", "body")}
    consts, init = {}, values
    for part in parts:
        count = params[f"{part}_nconsts"]
        consts[part], init = init[:count], init[count:]
    if any(program.draws for program in parts.values()):
        more = lambda state: parts["cond"](*consts["cond"], *state[1:], turn=state[0])[0]  # noqa: E731
        step = lambda state: [state[0] + 1, *parts["body"](*consts["body"], *state[1:], turn=state[0])]  # noqa: E731
        return lax.while_loop(more, step, [jax.numpy.uint32(0), *init])[1:]
    for part, program in parts.items():
        params |= {f"{part}_jaxpr": program.jaxpr, f"{part}_nconsts": params[f"{part}_nconsts"] + len(program.first)}
    return Binding([*parts["cond"].first, *consts["cond"], *parts["body"].first, *consts["body"], *init], params)


def _cond(rewriter: ProgramRewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    index, *operands = values
    parts = [rewriter.closed(branch, scope.at(str(number))) for number, branch in enumerate(equation.params["branches"])]
    if not any(part.first for part in parts):
        return Binding(values, {**equation.params, "branches": tuple(part.jaxpr for part in parts)})
    return list(lax.switch(index, parts, *operands))


def _checkpoint(rewriter: ProgramRewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params = dict(equation.params)
    saved: dict[str, tuple] = {}
    if params["policy"] is not None:
        scope, params["policy"] = replace(scope, saved=saved), _saving(params["policy"], saved)
    program = rewriter.open(params["jaxpr"], (), scope, lambda c: True)
    params["jaxpr"] = program.jaxpr.jaxpr
    if isinstance(params["prevent_cse"], tuple):
        params["prevent_cse"] = (True,) * len(program.first) + params["prevent_cse"]
    return Binding([*program.first, *values], params)


def _saving(policy: Callable, saved: dict[str, tuple]) -> Callable:
    """A checkpoint's policy, asked of an emulated product's result as of the product that it stands for."""

    def asked(primitive, *avals, **params):
        if primitive is name_p and params["name"] in saved:
            avals, primitive, params = saved[params["name"]]
        return policy(primitive, *avals, **params)

    return asked


def _shard_map(rewriter: ProgramRewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params = equation.params
    body = params["jaxpr"]
    keys = [] if scope.key is None else [scope.key]

    def run(keys: list[PRNGKey], *args):
        return tuple(rewriter.evaluate(body, (), args, replace(scope, key=keys[0] if keys else None)))

    call = jax.shard_map(
        run,
        mesh=params["mesh"],
        in_specs=(PartitionSpec(), *params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return list(call(keys, *values))


def _custom_jvp(rewriter: ProgramRewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params, (rule, name) = dict(equation.params), (equation.params["jvp_jaxpr_fun"], called(equation))
    primals = rewriter.survey.operands[scope.path][params["num_consts"] :]
    params["call_jaxpr"], params["num_consts"], operands = _with_key(rewriter, params, values, scope)

    def rewritten(*zeros):
        *key_is_constant, zeros = (zeros[0], zeros[1:]) if scope.key is not None else (zeros,)
        jaxpr, consts, out_zeros = rule.call_wrapped(*zeros)
        rewriter.surveyed(jaxpr, primals, scope.at("jvp"))
        program = rewriter.trace(jaxpr, consts, scope.in_rule("jvp", jaxpr, name))
        if key_is_constant == [False]:  # its tangent comes along, before the others
            avals, count = program.in_avals, 1 + len(zeros)
            skipping = lambda *args: eval_jaxpr(program.jaxpr, program.consts, *args[:count], *args[count + 1 :])  # noqa: E731
            program = jax.make_jaxpr(skipping)(*avals[:count], avals[0].to_tangent_aval(), *avals[count:])
        return program.jaxpr, program.consts, out_zeros

    params["jvp_jaxpr_fun"] = wrap_init(rewritten, debug_info=rule.debug_info)
    return Binding(operands, params)


def _custom_vjp(rewriter: ProgramRewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params, name, keyed = dict(equation.params), called(equation), scope.key is not None
    params["call_jaxpr"], count, operands = _with_key(rewriter, params, values, scope)
    forward, backward, out_trees = params["fwd_jaxpr_thunk"], params["bwd"], params["out_trees"]
    primals, residuals, before = rewriter.survey.operands[scope.path], [], params["num_consts"]
    added = count - before
    params["num_consts"] = count

    def rewritten(*nonzeros):
        jaxpr, consts = forward.call_wrapped(*nonzeros[keyed:])
        computed = iter(rewriter.surveyed(jaxpr, primals[before:], scope.at("fwd")))
        residuals[:] = [next(computed) if n is None else primals[n] for n in out_trees()[2]]
        program = rewriter.trace(jaxpr, consts, scope.in_rule("fwd", jaxpr, name))
        return program.jaxpr, program.consts

    def trees():
        """Of the results and of what is kept for the backward pass; and which of the latter are operands, by their number."""
        results, kept, numbers = out_trees()
        numbers = [n if n is None else n + added + (keyed and n >= count - added) for n in numbers]
        kept = jax.tree.structure((0, jax.tree.unflatten(kept, [0] * len(numbers)))) if keyed else kept
        return results, kept, [count] * keyed + numbers

    def rewritten_backward(*args):
        within = replace(scope.at("bwd"), key=args[0]) if keyed else scope.at("bwd")
        nothing = [Zero(jax.typeof(args[0]).to_ct_aval())] if keyed else []
        return [*nothing, *rewriter.function(backward.call_wrapped, within, residuals)(*args[keyed:])]

    params["out_trees"] = trees
    params["fwd_jaxpr_thunk"] = wrap_init(rewritten, debug_info=forward.debug_info)
    params["bwd"] = wrap_init(rewritten_backward, debug_info=backward.debug_info)
    return Binding(operands, params)


def _with_key(
    rewriter: ProgramRewriter, params: dict[str, Any], values: Sequence[Any], scope: Scope
) -> tuple[ClosedJaxpr, int, Sequence[Any]]:
    """The program of a function with derivative rules, the number of its operands that these rules do not see, and all operands.

    The rules may draw where the function does not, so that the key, if there is one, is the first operand that they do see.
    """
    program, count = rewriter.closed(params["call_jaxpr"], scope), params["num_consts"]
    hoisted, consts, others = program.first[program.draws :], values[:count], values[count:]
    before = len(hoisted) + len(consts)
    if scope.key is None:
        return program.jaxpr, before, [*hoisted, *values]

    def run(*args):
        key = [args[before]] if program.draws else []
        return eval_jaxpr(program.jaxpr.jaxpr, program.jaxpr.consts, *key, *args[:before], *args[before + 1 :])

    operands = [*hoisted, *consts, scope.key, *others]
    avals = program.jaxpr.in_avals[program.draws :]
    return jax.make_jaxpr(run)(*avals[:before], jax.typeof(scope.key), *avals[before:]), before, operands


RULES: dict[str, Callable[[ProgramRewriter, JaxprEqn, Sequence[Any], Scope], Rewritten]] = {
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
