"""A program (jaxpr) evaluated with its matrix products by a policy.

The programs inside jit, scan, cond and the like are rewritten; `containers` says how these are bound with them.
"""

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
from jax.extend.source_info_util import current_name_stack, user_context

from tcemu.emulation.containers import RULES, Binding, Program, Scope
from tcemu.emulation.keys import at_place, on_device
from tcemu.emulation.origins import DATA, GRADIENT, Origin
from tcemu.emulation.policy import Policy, decide
from tcemu.emulation.products import Product, as_product
from tcemu.emulation.programs import OPAQUE, PRODUCTS, has_products, is_ours, name_of, programs
from tcemu.emulation.report import Entry
from tcemu.emulation.survey import Place, Survey

Cache = WeakKeyDictionary[ClosedJaxpr, dict[Any, tuple[ClosedJaxpr, bool, tuple[Entry, ...]]]]


@dataclass
class Rewriter:
    """One walk through a program. survey: of the same program. entries: one for each product met, in the order of the program."""

    policy: Policy
    convolutions: bool
    survey: Survey
    cache: Cache = field(default_factory=WeakKeyDictionary)
    entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.told = hash(tuple(self.survey.products.values()))  # what the policy is told

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
            name = name_of(equation)
            index, names[name] = names[name], names[name] + 1
            inner = scope.of(equation, index)
            if kind in PRODUCTS:
                return [self._product(equation, values, inner)]
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

    def _product(self, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Any:
        product, key = self.survey.products[scope.path], scope.key
        random = None if key is None else lambda: on_device(at_place(key, scope.place), *values[:2])
        decision = decide(self.policy, product, self.convolutions, random)
        self.entries.append(Entry(product.name, product, decision.run is not None, decision.why, decision.undecided))
        if decision.run is None:
            result = equation.primitive.bind(*values, **equation.params)
        else:
            result = _fitting(product, PRODUCTS[product.primitive].through(decision.run, values, dict(equation.params)))
        if scope.saved is None:
            return result
        label = f"tcemu: {product.name}"
        scope.saved[label] = ([v.aval for v in equation.invars], equation.primitive, equation.params)
        return checkpoint_name(result, label)

    def closed(self, jaxpr: ClosedJaxpr, scope: Scope) -> Program:
        """The program rewritten. First among its arguments come the key, if it draws, and the tracers that choices brought in."""
        known = self.cache.setdefault(jaxpr, {}) if scope.saved is None else {}
        where = replace(scope, key=None, saved=None), scope.key is None, self.told
        if where in known:
            program, draws, entries = known[where]
            self.entries += entries
            return Program(program, draws, [scope.key] if draws else [])
        before = len(self.entries)
        rewritten = self.open(jaxpr.jaxpr, jaxpr.consts, scope, lambda c: isinstance(c, Tracer))
        if len(rewritten.first) == rewritten.draws:
            known[where] = rewritten.jaxpr, rewritten.draws, tuple(self.entries[before:])
        return rewritten

    def open(self, jaxpr: Jaxpr, consts: Sequence[Any], scope: Scope, hoist: Callable[[Any], bool]) -> Program:
        """`closed` for a program and its constants; hoist: which constants of the rewritten one come as arguments."""
        program = self.trace(jaxpr, consts, scope)
        given = [] if scope.key is None else [scope.key]
        draws = bool(given) and _reads(program.jaxpr, program.jaxpr.invars[0])
        moved = [hoist(c) for c in program.consts]
        hoisted = [c for c, moves in zip(program.consts, moved, strict=True) if moves]
        if not hoisted and draws == bool(given):
            return Program(program, draws, given)
        first = [*given[:draws], *hoisted]

        def run(*args):
            arguments = iter(args)
            key = [next(arguments)] if draws else given  # which is not read
            consts = [next(arguments) if moves else c for c, moves in zip(program.consts, moved, strict=True)]
            return eval_jaxpr(program.jaxpr, consts, *key, *arguments)

        return Program(jax.make_jaxpr(run)(*map(jax.typeof, first), *program.in_avals[len(given) :]), draws, first)

    def trace(self, jaxpr: Jaxpr, consts: Sequence[Any], scope: Scope) -> ClosedJaxpr:
        """The program rewritten, with constants of its own. Its first argument is the key, where the scope has one."""
        avals = [v.aval for v in jaxpr.invars]
        if scope.key is None:
            return jax.make_jaxpr(lambda *args: self.evaluate(jaxpr, consts, args, scope))(*avals)
        run = lambda key, *args: self.evaluate(jaxpr, consts, args, replace(scope, key=key))  # noqa: E731
        return jax.make_jaxpr(run)(jax.typeof(scope.key), *avals)

    def surveyed(self, jaxpr: Jaxpr, origins: Sequence[Origin], scope: Scope, rest: Origin = DATA) -> list[Origin]:
        """The survey of a program that comes to light while another is rewritten. origins: of its first arguments; rest: of the others."""
        args = [*origins, *[rest] * len(jaxpr.invars)][: len(jaxpr.invars)]
        return self.survey.walk(jaxpr, args, Place(scope.path, scope.repeats, transposed=rest.gradient))

    def function(self, call: Callable[..., Any], scope: Scope, residuals: Sequence[Origin]) -> Callable[..., Any]:
        """A backward rule with its products by the policy. What is no array among arguments and the leaves of results goes through as it
        is. residuals: the origins of its first arguments; the others are cotangents."""

        def run(*args):
            arrays, merge = _arrays(args)
            kept: list[Callable] = []

            def traced(*arrays):
                leaves, tree = jax.tree.flatten(call(*merge(arrays)))
                results, back = _arrays(leaves)
                kept.append(lambda results: jax.tree.unflatten(tree, back(results)))
                return results

            program = jax.make_jaxpr(traced)(*map(jax.typeof, arrays))
            self.surveyed(program.jaxpr, residuals, scope, rest=GRADIENT)
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


def _fitting(product: Product, result: Any) -> Array:
    """The result in the dtype that the program goes on with."""
    shape = jax.numpy.shape(result)
    if shape != product.shape:
        raise ValueError(f"policy: for {product} its choice returned shape {list(shape)}; wanted {list(product.shape)}")
    return result if result.dtype == product.dtype else lax.convert_element_type(result, product.dtype)


# ---- looking at programs


def _reads(jaxpr: Jaxpr, variable: Any) -> bool:
    return any(v is variable for equation in jaxpr.eqns for v in equation.invars) or any(v is variable for v in jaxpr.outvars)


def _hidden(equation: JaxprEqn, scope: Scope) -> Iterator[Entry]:
    """An entry for each product inside a primitive that is not entered."""
    for program in programs(equation.params):
        for inner in filter(has_products, program.eqns):
            kind = inner.primitive.name
            within = scope.of(inner)
            why = f"inside {equation.primitive.name}, which emulate does not enter"
            if kind in PRODUCTS:
                yield Entry(within.path, as_product(inner, within.path, 0, None), False, why)
            elif kind in OPAQUE:
                yield Entry(within.path, None, False, OPAQUE[kind])
            else:
                yield from _hidden(inner, within)
