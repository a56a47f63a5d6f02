"""A program (jaxpr) evaluated with its matrix products by a policy: the programs inside jit, scan, cond and the like are rewritten, and the
primitive that holds them is bound with all its other parameters as they were."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import name_p
from jax.extend.linear_util import wrap_init
from jax.extend.source_info_util import current_name_stack, user_context

from tcemu.emulation.convolution import through_patches
from tcemu.emulation.policy import Entry, Policy, Product, decide
from tcemu.emulation.programs import OPAQUE, PRODUCTS, called, has_products, is_ours, programs

Cache = WeakKeyDictionary[ClosedJaxpr, dict[str, tuple[ClosedJaxpr, tuple[Entry, ...]]]]


@dataclass(frozen=True)
class Scope:
    """Where an equation stands. path: the names around it; repeats: of the loops; saved: of a checkpoint with a policy, what its products
    were, by the name that their results carry."""

    path: str = ""
    repeats: int | None = 1
    saved: dict[str, tuple] | None = None

    def at(self, path: str, times: int | None = 1) -> "Scope":
        return replace(self, path=path, repeats=None if self.repeats is None or times is None else self.repeats * times)


@dataclass
class Rewriter:
    """One walk through a program. found: an entry for each product met, in the order of the program."""

    policy: Policy
    convolutions: bool
    cache: Cache = field(default_factory=WeakKeyDictionary)
    found: list[Entry] = field(default_factory=list)

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
                found = self._equation(equation, values, scope, names)
            env.update(zip(equation.outvars, found, strict=True))
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
                self.found.append(Entry(inner.path, None, False, OPAQUE[kind]))
            elif is_ours(equation):
                self.found.append(Entry(inner.path, None, False, "it is emulated already"))
            elif kind in RULES:
                rewritten = RULES[kind](self, equation, values, inner)
            else:
                self.found += _hidden(equation, inner)
        if isinstance(rewritten, list):
            return rewritten
        values, params = rewritten or (values, equation.params)
        found = primitive.bind(*values, **primitive.get_bind_params(params))
        return list(found) if primitive.multiple_results else [found]

    def _product(self, equation: JaxprEqn, values: Sequence[Any], scope: Scope, index: int) -> Any:
        product = _seen(equation, scope, index)
        decision = decide(self.policy, product, self.convolutions)
        self.found.append(Entry(product.name, product, decision.run is not None, decision.why))
        if decision.run is None:
            found = equation.primitive.bind(*values, **equation.params)
        else:
            found = _fitting(product, _run(decision.run, equation, values))
        if scope.saved is None:
            return found
        label = f"tcemu: {product.name}"
        scope.saved[label] = ([v.aval for v in equation.invars], equation.primitive, equation.params)
        return checkpoint_name(found, label)

    def closed(self, jaxpr: ClosedJaxpr, scope: Scope) -> tuple[ClosedJaxpr, list[Any]]:
        """The program rewritten, and the tracers that the policy's choices brought in, which it takes as its first arguments."""
        known = self.cache.setdefault(jaxpr, {}) if scope.saved is None else {}
        key = f"{scope.path} {scope.repeats}"
        if key in known:
            self.found += known[key][1]
            return known[key][0], []
        before = len(self.found)
        found, hoisted = self.open(jaxpr.jaxpr, jaxpr.consts, scope, lambda c: isinstance(c, Tracer))
        if not hoisted:
            known[key] = found, tuple(self.found[before:])
        return found, hoisted

    def open(self, jaxpr: Jaxpr, consts: Sequence[Any], scope: Scope, hoist: Callable[[Any], bool]) -> tuple[ClosedJaxpr, list[Any]]:
        """`closed` for a program and its constants; hoist: which constants of the rewritten one come as arguments."""
        found = self.trace(jaxpr, consts, scope)
        moved = [hoist(c) for c in found.consts]
        if not any(moved):
            return found, []
        hoisted = [c for c, moves in zip(found.consts, moved, strict=True) if moves]

        def with_constants(*args):
            given = iter(args[: len(hoisted)])
            consts = [next(given) if moves else c for c, moves in zip(found.consts, moved, strict=True)]
            return eval_jaxpr(found.jaxpr, consts, *args[len(hoisted) :])

        return jax.make_jaxpr(with_constants)(*map(jax.typeof, hoisted), *found.in_avals), hoisted

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
                found, back = _arrays(leaves)
                kept.append(lambda results: jax.tree.unflatten(tree, back(results)))
                return found

            program = jax.make_jaxpr(traced)(*map(jax.typeof, arrays))
            return kept[-1](self.evaluate(program.jaxpr, program.consts, arrays, scope))

        return run


def _arrays(values: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """The arrays among values, and what puts others in their places."""
    which = [isinstance(v, jax.Array) or hasattr(v, "__array__") for v in values]

    def merge(arrays: Sequence[Any]) -> list[Any]:
        given = iter(arrays)
        return [next(given) if array else v for v, array in zip(values, which, strict=True)]

    return [v for v, array in zip(values, which, strict=True) if array], merge


# ---- one product


def _seen(equation: JaxprEqn, scope: Scope, index: int) -> Product:
    avals: list[Any] = [v.aval for v in (*equation.invars, *equation.outvars)]
    (lhs, rhs, out), params = avals, equation.params
    return Product(
        scope.path,
        index,
        equation.primitive.name,
        tuple(lhs.shape),
        lhs.dtype,
        tuple(rhs.shape),
        rhs.dtype,
        params["dimension_numbers"],
        params["preferred_element_type"],
        tuple(out.shape),
        out.dtype,
        scope.repeats,
    )


def _run(run: Callable[..., Array], equation: JaxprEqn, values: Sequence[Any]) -> Array:
    lhs, rhs = values
    params = dict(equation.params)
    kept = {name: params.pop(name) for name in ("precision", "preferred_element_type")}
    kept["out_sharding"] = params.pop("out_sharding", None)
    if equation.primitive.name == "dot_general":
        return run(lhs, rhs, params["dimension_numbers"], **kept)
    return through_patches(lhs, rhs, lambda a, b, numbers: run(a, b, numbers, **kept), **params)


def _fitting(product: Product, found: Any) -> Array:
    """The result in the dtype that the program goes on with."""
    if jax.numpy.shape(found) != product.shape:
        raise ValueError(f"policy: for {product} its choice returned shape {list(jax.numpy.shape(found))}; wanted {list(product.shape)}")
    return found if found.dtype == product.dtype else lax.convert_element_type(found, product.dtype)


# ---- what holds programs


Rewritten = tuple[Sequence[Any], dict[str, Any]] | list[Any]  # operands and parameters, or the results


def _jit(self: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    body = equation.params["jaxpr"]
    found, hoisted = self.closed(body, scope)
    if hoisted:  # its shardings speak of the operands it had: evaluated in place
        return eval_jaxpr(found.jaxpr, found.consts, *hoisted, *values)
    return values, {**equation.params, "jaxpr": found}


def _call(self: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    found, hoisted = self.closed(equation.params["call_jaxpr"], scope)
    return [*hoisted, *values], {**equation.params, "call_jaxpr": found}


def _scan(self: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params = equation.params
    found, hoisted = self.closed(params["jaxpr"], scope.at(scope.path, params["length"]))
    if not hoisted:
        return values, {**params, "jaxpr": found}
    consts, init, xs = _parts_of_scan(params, values)

    def body(state, x):
        results = eval_jaxpr(found.jaxpr, found.consts, *hoisted, *consts, *state, *x)
        return results[: len(init)], results[len(init) :]

    state, ys = lax.scan(body, init, xs, params["length"], params["reverse"], params["unroll"])
    return [*state, *ys]


def _parts_of_scan(params: dict[str, Any], values: Sequence[Any]) -> list[list[Any]]:
    """The operands of a scan: those alike in every turn, the carry's, and those cut along their first axis."""
    if "ft_in" in params:  # JAX 0.12 and later
        return [list(part) for part in params["ft_in"].update(values).unpack()]
    carry = params["num_consts"] + params["num_carry"]
    return [list(values[: params["num_consts"]]), list(values[params["num_consts"] : carry]), list(values[carry:])]


def _while(self: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params, first = dict(equation.params), equation.params["cond_nconsts"]
    groups = [values[:first], values[first : first + params["body_nconsts"]]]
    for number, part in enumerate(("cond", "body")):
        params[f"{part}_jaxpr"], hoisted = self.closed(params[f"{part}_jaxpr"], scope.at(f"{scope.path}/{part}", None))
        groups[number] = [*hoisted, *groups[number]]
        params[f"{part}_nconsts"] += len(hoisted)
    return [*groups[0], *groups[1], *values[first + equation.params["body_nconsts"] :]], params


def _cond(self: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    index, *operands = values
    parts = [self.closed(branch, scope.at(f"{scope.path}/{number}")) for number, branch in enumerate(equation.params["branches"])]
    if not any(hoisted for _, hoisted in parts):
        return values, {**equation.params, "branches": tuple(found for found, _ in parts)}
    branches = [
        lambda *args, found=found, hoisted=hoisted: eval_jaxpr(found.jaxpr, found.consts, *hoisted, *args) for found, hoisted in parts
    ]
    return list(lax.switch(index, branches, *operands))


def _checkpoint(self: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params = dict(equation.params)
    saved: dict[str, tuple] = {}
    if params["policy"] is not None:
        scope, params["policy"] = replace(scope, saved=saved), _saving(params["policy"], saved)
    found, hoisted = self.open(params["jaxpr"], (), scope, lambda c: True)
    params["jaxpr"] = found.jaxpr
    if isinstance(params["prevent_cse"], tuple):
        params["prevent_cse"] = (True,) * len(hoisted) + params["prevent_cse"]
    return [*hoisted, *values], params


def _saving(policy: Callable, saved: dict[str, tuple]) -> Callable:
    """A checkpoint's policy, asked of an emulated product's result as of the product that it stands for."""

    def asked(primitive, *avals, **params):
        if primitive is name_p and params["name"] in saved:
            avals, primitive, params = saved[params["name"]]
        return policy(primitive, *avals, **params)

    return asked


def _shard_map(self: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params = equation.params
    body = params["jaxpr"]
    call = jax.shard_map(
        lambda *args: tuple(self.evaluate(body, (), args, scope)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return list(call(*values))


def _custom_jvp(self: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params = dict(equation.params)
    params["call_jaxpr"], hoisted = self.closed(params["call_jaxpr"], scope)
    params["num_consts"] += len(hoisted)
    rule = params["jvp_jaxpr_fun"]

    def rewritten(*zeros):
        jaxpr, consts, out_zeros = rule.call_wrapped(*zeros)
        found = self.trace(jaxpr, consts, scope.at(f"{scope.path}/jvp"))
        return found.jaxpr, found.consts, out_zeros

    params["jvp_jaxpr_fun"] = wrap_init(rewritten, debug_info=rule.debug_info)
    return [*hoisted, *values], params


def _custom_vjp(self: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Rewritten:
    params = dict(equation.params)
    params["call_jaxpr"], hoisted = self.closed(params["call_jaxpr"], scope)
    params["num_consts"] += len(hoisted)
    forward, backward = params["fwd_jaxpr_thunk"], params["bwd"]

    def rewritten(*nonzeros):
        jaxpr, consts = forward.call_wrapped(*nonzeros)
        found = self.trace(jaxpr, consts, scope.at(f"{scope.path}/fwd"))
        return found.jaxpr, found.consts

    params["fwd_jaxpr_thunk"] = wrap_init(rewritten, debug_info=forward.debug_info)
    params["bwd"] = wrap_init(self.function(backward.call_wrapped, scope.at(f"{scope.path}/bwd")), debug_info=backward.debug_info)
    return [*hoisted, *values], params


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
    """The products inside a primitive that is not entered."""
    for program in programs(equation.params):
        for inner in filter(has_products, program.eqns):
            kind = inner.primitive.name
            name = _name(scope, inner, called(inner))
            why = f"inside {equation.primitive.name}, which emulate does not enter"
            if kind in PRODUCTS:
                yield Entry(name, _seen(inner, replace(scope, path=name, repeats=None), 0), False, why)
            elif kind in OPAQUE:
                yield Entry(name, None, False, OPAQUE[kind])
            else:
                yield from _hidden(inner, scope.at(name))
