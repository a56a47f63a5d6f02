"""A program (jaxpr) evaluated with its matrix products by a policy.

The programs inside jit, scan, cond and the like are rewritten; the primitive that holds them keeps its other parameters.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import name_p
from jax.extend.linear_util import wrap_init
from jax.extend.source_info_util import current_name_stack, user_context

from tcemu.emulation.policy import Entry, Policy, Product, decide
from tcemu.emulation.programs import OPAQUE, PRODUCTS, called, has_products, is_ours, programs

Cache = WeakKeyDictionary[ClosedJaxpr, dict[str, tuple[ClosedJaxpr, tuple[Entry, ...]]]]


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


@dataclass
class Rewriter:
    """One walk through a program. entries: one for each product met, in the order of the program."""

    policy: Policy
    convolutions: bool
    cache: Cache = field(default_factory=WeakKeyDictionary)
    entries: list[Entry] = field(default_factory=list)

    def evaluate(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], scope: Scope) -> list[Any]:
        """The results of a program."""
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        names: Counter[str] = Counter()
        for equation in jaxpr.eqns:
            values = [v.val if isinstance(v, Literal) else env[v] for v in equation.invars]
            source = equation.source_info
            with ExitStack() as contexts:
                contexts.enter_context(user_context(source.traceback, name_stack=current_name_stack() + source.name_stack))
                contexts.enter_context(equation.ctx.manager)
                results = self._equation(equation, values, scope, names)
            env.update(zip(equation.outvars, results, strict=True))
        return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    def _equation(self, equation: JaxprEqn, values: Sequence[Any], scope: Scope, names: Counter[str]) -> list[Any]:
        kind, primitive = equation.primitive.name, equation.primitive
        rewritten = None
        if has_products(equation):
            path = _name(scope, equation, "dot_general" if kind == "dot_general" else called(equation))
            index, names[path] = names[path], names[path] + 1
            inner = scope.at(f"{path}.{index}" if index else path)
            if kind in PRODUCTS:
                return [self._product(equation, values, inner, index)]
            if kind in OPAQUE:
                self.entries.append(Entry(inner.path, None, False, OPAQUE[kind]))
            elif is_ours(equation):
                self.entries.append(Entry(inner.path, None, False, "it is emulated already"))
            elif kind in RULES:
                rewritten = RULES[kind](self, equation, values, inner)
            else:
                self.entries += _hidden(equation, inner)
        if isinstance(rewritten, list):
            return rewritten
        operands, params = rewritten or Binding(values, equation.params)
        results = primitive.bind(*operands, **primitive.get_bind_params(params))
        return list(results) if primitive.multiple_results else [results]

    def _product(self, equation: JaxprEqn, values: Sequence[Any], scope: Scope, index: int) -> Any:
        product = _as_product(equation, scope, index)
        decision = decide(self.policy, product, self.convolutions)
        self.entries.append(Entry(product.name, product, decision.run is not None, decision.why))
        if decision.run is None:
            result = equation.primitive.bind(*values, **equation.params)
        else:
            result = _fitting(product, PRODUCTS[product.primitive].through(decision.run, values, dict(equation.params)))
        if scope.saved is None:
            return result
        label = f"tcemu: {product.name}"
        scope.saved[label] = ([v.aval for v in equation.invars], equation.primitive, equation.params)
        return checkpoint_name(result, label)

    def closed(self, jaxpr: ClosedJaxpr, scope: Scope) -> tuple[ClosedJaxpr, list[Any]]:
        """The program rewritten, and the tracers that the policy's choices brought in, which it takes as its first arguments."""
        known = self.cache.setdefault(jaxpr, {}) if scope.saved is None else {}
        key = f"{scope.path} {scope.repeats}"
        if key in known:
            self.entries += known[key][1]
            return known[key][0], []
        before = len(self.entries)
        program, hoisted = self.open(jaxpr.jaxpr, jaxpr.consts, scope, lambda c: isinstance(c, Tracer))
        if not hoisted:
            known[key] = program, tuple(self.entries[before:])
        return program, hoisted

    def open(self, jaxpr: Jaxpr, consts: Sequence[Any], scope: Scope, hoist: Callable[[Any], bool]) -> tuple[ClosedJaxpr, list[Any]]:
        """`closed` for a program and its constants; hoist: which constants of the rewritten one come as arguments."""
        program = self.trace(jaxpr, consts, scope)
        moved = [hoist(c) for c in program.consts]
        if not any(moved):
            return program, []
        hoisted = [c for c, moves in zip(program.consts, moved, strict=True) if moves]

        def with_constants(*args):
            arguments = iter(args[: len(hoisted)])
            consts = [next(arguments) if moves else c for c, moves in zip(program.consts, moved, strict=True)]
            return eval_jaxpr(program.jaxpr, consts, *args[len(hoisted) :])

        return jax.make_jaxpr(with_constants)(*map(jax.typeof, hoisted), *program.in_avals), hoisted

    def trace(self, jaxpr: Jaxpr, consts: Sequence[Any], scope: Scope) -> ClosedJaxpr:
        """The program rewritten, with constants of its own."""
        return jax.make_jaxpr(lambda *args: self.evaluate(jaxpr, consts, args, scope))(*[v.aval for v in jaxpr.invars])

    def function(self, call: Callable[..., Any], scope: Scope) -> Callable[..., Any]:
        """A function with its products by the policy. What is no array among arguments and the leaves of results goes through as it is."""

        def run(*args):
            arrays, merge = _arrays(args)
            kept: list[Callable] = []

            def traced(*arrays):
                leaves, tree = jax.tree.flatten(call(*merge(arrays)))
                results, back = _arrays(leaves)
                kept.append(lambda results: jax.tree.unflatten(tree, back(results)))
                return results

            program = jax.make_jaxpr(traced)(*map(jax.typeof, arrays))
            return kept[-1](self.evaluate(program.jaxpr, program.consts, arrays, scope))

        return run


def _arrays(values: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """The arrays among values, and what puts others in their places."""
    which = [isinstance(v, jax.Array) or hasattr(v, "__array__") for v in values]

    def merge(arrays: Sequence[Any]) -> list[Any]:
        others = iter(arrays)
        return [next(others) if is_array else v for v, is_array in zip(values, which, strict=True)]

    return [v for v, is_array in zip(values, which, strict=True) if is_array], merge


# ---- one product


def _as_product(equation: JaxprEqn, scope: Scope, index: int) -> Product:
    """What a policy is told of an equation."""
    avals: list[Any] = [v.aval for v in (*equation.invars, *equation.outvars)]
    (lhs, rhs, *_, out), params = avals, equation.params
    return Product(
        name=scope.path,
        index=index,
        primitive=equation.primitive.name,
        lhs_shape=tuple(lhs.shape),
        lhs_dtype=lhs.dtype,
        rhs_shape=tuple(rhs.shape),
        rhs_dtype=rhs.dtype,
        dimension_numbers=params[PRODUCTS[equation.primitive.name].numbers],
        preferred_element_type=params["preferred_element_type"],
        shape=tuple(out.shape),
        dtype=out.dtype,
        repeats=scope.repeats,
    )


def _fitting(product: Product, result: Any) -> Array:
    """The result in the dtype that the program goes on with."""
    shape = jax.numpy.shape(result)
    if shape != product.shape:
        raise ValueError(f"policy: for {product} its choice returned shape {list(shape)}; wanted {list(product.shape)}")
    return result if result.dtype == product.dtype else lax.convert_element_type(result, product.dtype)


# ---- what holds programs


class Binding(NamedTuple):
    """What a primitive is bound with."""

    operands: Sequence[Any]
    params: dict[str, Any]


Rewritten = Binding | list[Any]  # an equation to be bound, or its results


def _jit(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    body = equation.params["jaxpr"]
    program, hoisted = rewriter.closed(body, scope)
    if hoisted:  # its shardings speak of the operands it had: evaluated in place
        return eval_jaxpr(program.jaxpr, program.consts, *hoisted, *values)
    return Binding(values, {**equation.params, "jaxpr": program})


def _call(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    program, hoisted = rewriter.closed(equation.params["call_jaxpr"], scope)
    return Binding([*hoisted, *values], {**equation.params, "call_jaxpr": program})


def _scan(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
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


def _while(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params, first = dict(equation.params), equation.params["cond_nconsts"]
    groups = [values[:first], values[first : first + params["body_nconsts"]]]
    for number, part in enumerate(("cond", "body")):
        params[f"{part}_jaxpr"], hoisted = rewriter.closed(params[f"{part}_jaxpr"], scope.at(f"{scope.path}/{part}", None))
        groups[number] = [*hoisted, *groups[number]]
        params[f"{part}_nconsts"] += len(hoisted)
    return Binding([*groups[0], *groups[1], *values[first + equation.params["body_nconsts"] :]], params)


def _cond(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    index, *operands = values
    parts = [rewriter.closed(branch, scope.at(f"{scope.path}/{number}")) for number, branch in enumerate(equation.params["branches"])]
    if not any(hoisted for _, hoisted in parts):
        return Binding(values, {**equation.params, "branches": tuple(program for program, _ in parts)})
    branches = [
        lambda *args, program=program, hoisted=hoisted: eval_jaxpr(program.jaxpr, program.consts, *hoisted, *args)
        for program, hoisted in parts
    ]
    return list(lax.switch(index, branches, *operands))


def _checkpoint(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
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


def _shard_map(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
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


def _custom_jvp(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
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


def _custom_vjp(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
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


RULES: dict[str, Callable[[Rewriter, JaxprEqn, Sequence[Any], Scope], Rewritten]] = {
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


# ---- looking at programs


def _name(scope: Scope, equation: JaxprEqn, last: str) -> str:
    return "/".join(part for part in (scope.path, str(equation.source_info.name_stack), last) if part)


def _hidden(equation: JaxprEqn, scope: Scope) -> Iterator[Entry]:
    """An entry for each product inside a primitive that is not entered."""
    for program in programs(equation.params):
        for inner in filter(has_products, program.eqns):
            kind = inner.primitive.name
            name = _name(scope, inner, called(inner))
            why = f"inside {equation.primitive.name}, which emulate does not enter"
            if kind in PRODUCTS:
                yield Entry(name, _as_product(inner, replace(scope, path=name, repeats=None), 0), False, why)
            elif kind in OPAQUE:
                yield Entry(name, None, False, OPAQUE[kind])
            else:
                yield from _hidden(inner, scope.at(name))
