"""A program (jaxpr) evaluated with its matrix products computed by a policy, and its functions by another one.

The programs inside jit, scan, cond and the like are rewritten. Each such primitive has a rule that binds it with the rewritten programs and
with its other parameters unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
from jax import Array, lax
from jax import Array as PRNGKey
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import name_p
from jax.sharding import PartitionSpec

from tcemu.base.jax_internals import ZeroCotangent, jvp_rule, replace_jvp_rule, replace_vjp_rules, split_scan_operands, vjp_rules
from tcemu.operations.products.dot_general import DotGeneral
from tcemu.uses.emulation.decisions import Policy, decide
from tcemu.uses.emulation.function_choices import FunctionDecision, FunctionPolicy, compute_function, decide_function
from tcemu.uses.emulation.function_patterns import FunctionMatch, function_paths, skipped_equations
from tcemu.uses.emulation.origins import DATA, GRADIENT, Origin
from tcemu.uses.emulation.primitives import (
    CUSTOM_DERIVATIVES,
    OPAQUE,
    PRODUCT_PRIMITIVES,
    DotGeneralLike,
    bind_equation,
    callee_name,
    equation_context,
    equation_name,
    equation_path,
    has_products,
    inner_programs,
    is_package_program,
)
from tcemu.uses.emulation.random_keys import fold_in_device, fold_in_iteration, fold_in_location
from tcemu.uses.emulation.report import Entry
from tcemu.uses.emulation.survey import Function, Product, Survey, SurveyScope, make_product


@dataclass(frozen=True)
class Scope:
    """The surroundings of an equation."""

    path: str = ""  # names around it
    repeats: int | None = 1  # number of times that the loops around it run it, None if unknown
    in_function: bool = False  # whether it is a part of a function that is found around it
    saved_products: dict[str, tuple] | None = None  # in a checkpoint with a policy: emulated products by the names of their results
    key: PRNGKey | None = None  # key of this iteration of the loops around it
    location: tuple[str, ...] = ()  # identity of the equation's surroundings; two of them may share a path
    rule_function: tuple[str, tuple[str, ...]] | None = None  # name and location of the function of a derivative rule that calls it

    def enter_program(self, word: str = "", iterations: int | None = 1) -> Scope:
        """Return the scope of a program in an equation. iterations: number of times that the equation runs it, None if unknown."""
        path, location = (f"{self.path}/{word}", (*self.location, word)) if word else (self.path, self.location)
        repeats = None if self.repeats is None or iterations is None else self.repeats * iterations
        return replace(self, path=path, location=location, repeats=repeats)

    def enter_equation(self, equation: JaxprEqn, index: int = 0) -> Scope:
        """Return the scope of an equation. index: number of earlier equations of the same name."""
        location = (*self.location, f"{equation_name(equation)}#{index}")
        if self.rule_function is not None and index == 0 and _calls_function(equation, self.rule_function[0]):
            location = self.rule_function[1]
        return replace(self, path=equation_path(self.path, equation, index), location=location, rule_function=None)

    def enter_rule(self, word: str, rule: Jaxpr, name: str) -> Scope:
        """Return the scope of a derivative rule of the function `name`.

        The rule takes the function's location, so that its products draw the bits that they draw without differentiation. If the rule calls
        the function, the call has that location, and the rule's other equations have locations of their own.
        """
        within = self.enter_program(word)
        if any(_calls_function(equation, name) for equation in rule.eqns):
            return replace(within, rule_function=(name, self.location))
        return replace(within, location=self.location)


def _calls_function(equation: JaxprEqn, name: str) -> bool:
    return equation.primitive.name in CUSTOM_DERIVATIVES and callee_name(equation) == name


@dataclass(frozen=True, eq=False)
class RewrittenProgram:
    """A rewritten program."""

    jaxpr: ClosedJaxpr
    uses_key: bool  # whether it draws random bits
    leading_operands: list[Any]  # operands before the original ones; the key is the first of them if random bits are drawn

    def __call__(self, *operands: Any, iteration: Any = None) -> list[Any]:
        """Evaluate the program. iteration: number of the iteration of the loop that it is the body of."""
        leading = self.leading_operands
        if iteration is not None and self.uses_key:
            leading = [fold_in_iteration(leading[0], iteration), *leading[1:]]
        return eval_jaxpr(self.jaxpr.jaxpr, self.jaxpr.consts, *leading, *operands)


# ---- the rewriting

ProgramCache = WeakKeyDictionary[ClosedJaxpr, dict[Any, tuple[ClosedJaxpr, bool, tuple[Entry, ...]]]]


@dataclass
class Rewriter:
    """One walk through a program that replaces its products."""

    policy: Policy
    convolutions: bool
    survey: Survey  # survey of the same program
    cache: ProgramCache = field(default_factory=WeakKeyDictionary)  # rewritten programs
    products: dict[Any, Callable[..., Any]] = field(default_factory=dict)  # functions that are traced once, by choice and equation
    entries: list[Entry] = field(default_factory=list)  # one for each product met, in the order of the program
    after_product: Callable[[], None] | None = None  # function that is called after each replaced product or function
    functions: FunctionPolicy = None  # policy for functions
    # instead of the policy's kernels: function of a function, the decision, the operands and the result as it is, to the result that counts
    around_function: Callable[[Function, FunctionDecision, Sequence[Any], Any], Any] | None = None

    def __post_init__(self) -> None:
        # stands for the products and functions that the policies know
        self.products_hash = hash((*self.survey.products.values(), *self.survey.functions.values()))

    def evaluate(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], scope: Scope) -> list[Any]:
        """Evaluate a program with its products replaced."""
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        names: Counter[str] = Counter()
        matches = {} if scope.in_function else self.survey.find_functions(jaxpr)
        decided = self._decide_functions(jaxpr, matches, scope)
        interior = {i for match in matches.values() for i in match.interior}
        replaced = {number for number, (_, decision) in decided.items() if decision.kernel is not None and self.around_function is None}
        skipped = skipped_equations(jaxpr, [matches[number] for number in replaced], has_products)
        for number, equation in enumerate(jaxpr.eqns):
            if number in skipped:
                continue
            if number in decided:
                self.entries.append(_function_entry(*decided[number]))
            value_of = lambda v: v.val if isinstance(v, Literal) else env[v]
            values = [] if number in replaced else list(map(value_of, equation.invars))
            operands = [None if v is None else value_of(v) for v in matches[number].operands] if number in decided else []
            with equation_context(equation):
                if number in replaced:
                    results = [self._evaluate_function(*decided[number], operands)]
                else:
                    around = replace(scope, in_function=True) if number in interior else scope
                    results = self._evaluate_equation(equation, values, around, names)
                if number in decided and self.around_function is not None:
                    results = [self.around_function(*decided[number], operands, results[0])]
            env.update(zip(equation.outvars, results, strict=True))
        return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    def _decide_functions(
        self, jaxpr: Jaxpr, matches: dict[int, FunctionMatch], scope: Scope
    ) -> dict[int, tuple[Function, FunctionDecision]]:
        """Return the functions of a program with the policy's decisions, by the number of their equation."""
        functions = {number: self.survey.functions[path] for number, path in function_paths(scope.path, jaxpr, matches).items()}
        return {number: (function, decide_function(self.functions, function)) for number, function in functions.items()}

    def _evaluate_function(self, function: Function, decision: FunctionDecision, operands: Sequence[Any]) -> Any:
        result = compute_function(function, decision.kernel, *operands)
        if self.after_product is not None:
            self.after_product()
        return result

    def _evaluate_equation(self, equation: JaxprEqn, values: Sequence[Any], scope: Scope, names: Counter[str]) -> list[Any]:
        kind, rewritten = equation.primitive.name, None
        if has_products(equation) or (not scope.in_function and self.survey.has_functions(equation)):
            name = equation_name(equation)
            index, names[name] = names[name], names[name] + 1
            inner = scope.enter_equation(equation, index)
            if kind in PRODUCT_PRIMITIVES:
                return [self._evaluate_product(equation, values, inner)]
            if kind in OPAQUE:
                self.entries.append(Entry(inner.path, None, False, OPAQUE[kind]))
            elif is_package_program(equation):
                self.entries.append(Entry(inner.path, None, False, "it is emulated already"))
            elif kind in CONTAINER_RULES:
                rewritten = CONTAINER_RULES[kind](self, equation, values, inner)
            else:
                self.entries += _hidden_entries(equation, inner)
        if isinstance(rewritten, list):
            return rewritten
        return bind_equation(equation, values) if rewritten is None else bind_equation(equation, rewritten.operands, rewritten.params)

    def _evaluate_product(self, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> Any:
        product, key = self.survey.products[scope.path], scope.key
        random = None if key is None else lambda: fold_in_device(fold_in_location(key, scope.location), *values[:2])
        decision = decide(self.policy, product, self.convolutions, random)
        self.entries.append(
            Entry(product.name, product, decision.dot_general is not None, decision.reason, decision.undecided, decision.choice)
        )
        if decision.dot_general is None:
            result = equation.primitive.bind(*values, **equation.params)
        else:
            result = _convert_result(product, self._compute_product(equation, decision.dot_general, values))
        if self.after_product is not None:
            self.after_product()
        if scope.saved_products is None:
            return result
        label = f"tcemu: {product.name}"
        scope.saved_products[label] = ([v.aval for v in equation.invars], equation.primitive, equation.params)
        return checkpoint_name(result, label)

    def _compute_product(self, equation: JaxprEqn, dot_general: DotGeneralLike, values: Sequence[Any]) -> Any:
        """Compute a product by a choice. What a recipe computes is traced once for equal operands, as a model's layers have them."""
        primitive, params = equation.primitive, equation.params
        compute: Callable[..., Any] = lambda *operands: PRODUCT_PRIMITIVES[primitive.name].compute(dot_general, operands, dict(params))
        # another choice may be any function, and a key or a traced recipe belongs to one product
        is_fixed = (
            isinstance(dot_general, DotGeneral)
            and dot_general.key is None
            and not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(dot_general.recipe))
        )
        if is_fixed and all(isinstance(v, Array) for v in values) and any(isinstance(v, Tracer) for v in values):
            with suppress(TypeError):  # a recipe with an array does not hash
                compute = self.products.setdefault((dot_general, primitive, tuple(params.items())), jax.jit(compute, inline=True))
        return compute(*values)

    def rewrite(self, jaxpr: ClosedJaxpr, scope: Scope) -> RewrittenProgram:
        """Rewrite a program. Its leading operands are the key, if it draws random bits, and the tracers that choices brought in."""
        known = self.cache.setdefault(jaxpr, {}) if scope.saved_products is None else {}
        where = replace(scope, key=None, saved_products=None), scope.key is None, self.products_hash
        if where in known:
            program, draws, entries = known[where]
            self.entries += entries
            return RewrittenProgram(program, draws, [scope.key] if draws else [])
        before = len(self.entries)
        rewritten = self.rewrite_uncached(jaxpr.jaxpr, jaxpr.consts, scope, lambda c: isinstance(c, Tracer))
        if len(rewritten.leading_operands) == rewritten.uses_key:
            known[where] = rewritten.jaxpr, rewritten.uses_key, tuple(self.entries[before:])
        return rewritten

    def rewrite_uncached(self, jaxpr: Jaxpr, consts: Sequence[Any], scope: Scope, hoist: Callable[[Any], bool]) -> RewrittenProgram:
        """Rewrite a program with these constants. hoist: whether a constant of the rewritten program becomes a leading operand."""
        program = self.trace(jaxpr, consts, scope)
        keys = [] if scope.key is None else [scope.key]
        uses_key = bool(keys) and _reads_variable(program.jaxpr, program.jaxpr.invars[0])
        is_hoisted = [hoist(c) for c in program.consts]
        hoisted = [c for c, moves in zip(program.consts, is_hoisted, strict=True) if moves]
        if not hoisted and uses_key == bool(keys):
            return RewrittenProgram(program, uses_key, keys)
        leading = [*keys[:uses_key], *hoisted]

        def evaluate(*args):
            arguments = iter(args)
            key = [next(arguments)] if uses_key else keys  # an unused key is not read
            consts = [next(arguments) if moves else c for c, moves in zip(program.consts, is_hoisted, strict=True)]
            return eval_jaxpr(program.jaxpr, consts, *key, *arguments)

        jaxpr_with_leading = jax.make_jaxpr(evaluate)(*map(jax.typeof, leading), *program.in_avals[len(keys) :])
        return RewrittenProgram(jaxpr_with_leading, uses_key, leading)

    def trace(self, jaxpr: Jaxpr, consts: Sequence[Any], scope: Scope) -> ClosedJaxpr:
        """Trace a program with its products replaced. Its first argument is the key, if the scope has one."""
        avals = [v.aval for v in jaxpr.invars]
        if scope.key is None:
            return jax.make_jaxpr(lambda *args: self.evaluate(jaxpr, consts, args, scope))(*avals)
        run = lambda key, *args: self.evaluate(jaxpr, consts, args, replace(scope, key=key))
        return jax.make_jaxpr(run)(jax.typeof(scope.key), *avals)

    def extend_survey(self, jaxpr: Jaxpr, origins: Sequence[Origin], scope: Scope, other_origin: Origin = DATA) -> list[Origin]:
        """Survey a program that appears while another one is rewritten.

        Args:
            jaxpr: The program.
            origins: Origins of its first arguments.
            scope: Its scope.
            other_origin: Origin of its other arguments.

        Returns:
            The origins of its results.
        """
        args = [*origins, *[other_origin] * len(jaxpr.invars)][: len(jaxpr.invars)]
        place = SurveyScope(scope.path, scope.repeats, other_origin.gradient, scope.in_function)
        return self.survey.walk(jaxpr, args, place)

    def rewrite_function(self, call: Callable[..., Any], scope: Scope, residuals: Sequence[Origin]) -> Callable[..., Any]:
        """Rewrite a backward rule. Arguments and leaves of results that are no arrays pass through unchanged.

        Args:
            call: The rule.
            scope: Its scope.
            residuals: Origins of its first arguments. The others are cotangents.
        """

        def rewritten(*args):
            arrays, merge = _split_arrays(args)
            rebuild: list[Callable] = []

            def evaluate_flat(*arrays):
                leaves, tree = jax.tree.flatten(call(*merge(arrays)))
                results, merge_results = _split_arrays(leaves)
                rebuild.append(lambda results: jax.tree.unflatten(tree, merge_results(results)))
                return results

            program = jax.make_jaxpr(evaluate_flat)(*map(jax.typeof, arrays))
            self.extend_survey(program.jaxpr, residuals, scope, other_origin=GRADIENT)
            return rebuild[-1](self.evaluate(program.jaxpr, program.consts, arrays, scope))

        return rewritten


def _function_entry(function: Function, decision: FunctionDecision) -> Entry:
    replaced = decision.kernel is not None
    return Entry(function.name, None, replaced, decision.reason, function=function, kernel=decision.kernel)


def _split_arrays(values: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Return the arrays among values, and a function that puts other arrays in their places."""
    is_array = [isinstance(v, jax.Array) or hasattr(v, "__array__") for v in values]

    def merge(arrays: Sequence[Any]) -> list[Any]:
        others = iter(arrays)
        return [next(others) if array else v for v, array in zip(values, is_array, strict=True)]

    return [v for v, array in zip(values, is_array, strict=True) if array], merge


def _convert_result(product: Product, result: Any) -> Array:
    """Check a choice's result and convert it to the product's dtype."""
    shape = jax.numpy.shape(result)
    if shape != product.shape:
        raise ValueError(f"policy: for {product} its choice returned shape {list(shape)}; expected {list(product.shape)}")
    return result if result.dtype == product.dtype else lax.convert_element_type(result, product.dtype)


def _reads_variable(jaxpr: Jaxpr, variable: Any) -> bool:
    return any(v is variable for equation in jaxpr.eqns for v in equation.invars) or any(v is variable for v in jaxpr.outvars)


def _hidden_entries(equation: JaxprEqn, scope: Scope) -> Iterator[Entry]:
    """Yield an entry for each product inside a primitive that is not entered."""
    for program in inner_programs(equation.params):
        for inner in filter(has_products, program.eqns):
            kind = inner.primitive.name
            within = scope.enter_equation(inner)
            reason = f"inside {equation.primitive.name}, which emulate does not enter"
            if kind in PRODUCT_PRIMITIVES:
                yield Entry(within.path, make_product(inner, within.path, 0, None), False, reason)
            elif kind in OPAQUE:
                yield Entry(within.path, None, False, OPAQUE[kind])
            else:
                yield from _hidden_entries(inner, within)


# ---- equations that contain programs


class Binding(NamedTuple):
    """The operands and parameters that a primitive is bound with."""

    operands: Sequence[Any]
    params: dict[str, Any]


RuleResult = Binding | list[Any]  # a binding for the equation, or its results


def _rewrite_jit(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> RuleResult:
    params = dict(equation.params)
    program = rewriter.rewrite(params["jaxpr"], scope)
    params |= {name: (free,) * len(program.leading_operands) + tuple(params[name]) for name, free in _unconstrained_jit_params().items()}
    return Binding([*program.leading_operands, *values], {**params, "jaxpr": program.jaxpr})


@cache
def _unconstrained_jit_params() -> dict[str, Any]:
    """Return the per-operand parameters of a jit for an operand without constraints."""
    (equation,) = jax.make_jaxpr(jax.jit(lambda x: x + 1))(0).eqns
    return {name: equation.params[name][0] for name in ("in_shardings", "in_layouts", "donated_invars")}


def _rewrite_call(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> RuleResult:
    program = rewriter.rewrite(equation.params["call_jaxpr"], scope)
    return Binding([*program.leading_operands, *values], {**equation.params, "call_jaxpr": program.jaxpr})


def _rewrite_scan(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> RuleResult:
    params = equation.params
    program = rewriter.rewrite(params["jaxpr"], scope.enter_program(iterations=params["length"]))
    if not program.leading_operands:
        return Binding(values, {**params, "jaxpr": program.jaxpr})
    consts, init, xs = split_scan_operands(params, values)

    def body(state, x):
        iteration, x = x
        results = program(*consts, *state, *x, iteration=iteration)
        return results[: len(init)], results[len(init) :]

    iterations = jax.numpy.arange(params["length"], dtype=jax.numpy.uint32) if program.uses_key else None
    state, ys = lax.scan(body, init, (iterations, xs), params["length"], params["reverse"], params["unroll"])
    return [*state, *ys]


def _rewrite_while(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> RuleResult:
    params = dict(equation.params)
    parts = {part: rewriter.rewrite(params[f"{part}_jaxpr"], scope.enter_program(part, None)) for part in ("cond", "body")}
    consts, init = {}, values
    for part in parts:
        count = params[f"{part}_nconsts"]
        consts[part], init = init[:count], init[count:]
    if any(program.uses_key for program in parts.values()):
        condition = lambda state: parts["cond"](*consts["cond"], *state[1:], iteration=state[0])[0]
        body = lambda state: [state[0] + 1, *parts["body"](*consts["body"], *state[1:], iteration=state[0])]
        return lax.while_loop(condition, body, [jax.numpy.uint32(0), *init])[1:]
    for part, program in parts.items():
        params |= {f"{part}_jaxpr": program.jaxpr, f"{part}_nconsts": params[f"{part}_nconsts"] + len(program.leading_operands)}
    return Binding([*parts["cond"].leading_operands, *consts["cond"], *parts["body"].leading_operands, *consts["body"], *init], params)


def _rewrite_cond(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> RuleResult:
    index, *operands = values
    parts = [rewriter.rewrite(branch, scope.enter_program(str(number))) for number, branch in enumerate(equation.params["branches"])]
    if not any(part.leading_operands for part in parts):
        return Binding(values, {**equation.params, "branches": tuple(part.jaxpr for part in parts)})
    return list(lax.switch(index, parts, *operands))


def _rewrite_checkpoint(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> RuleResult:
    params = dict(equation.params)
    saved: dict[str, tuple] = {}
    if params["policy"] is not None:
        scope, params["policy"] = replace(scope, saved_products=saved), _adapt_checkpoint_policy(params["policy"], saved)
    program = rewriter.rewrite_uncached(params["jaxpr"], (), scope, lambda c: True)
    params["jaxpr"] = program.jaxpr.jaxpr
    if isinstance(params["prevent_cse"], tuple):
        params["prevent_cse"] = (True,) * len(program.leading_operands) + params["prevent_cse"]
    return Binding([*program.leading_operands, *values], params)


def _adapt_checkpoint_policy(policy: Callable, saved: dict[str, tuple]) -> Callable:
    """Return a checkpoint's policy that treats an emulated product's result as the result of the product that it replaces."""

    def adapted(primitive, *avals, **params):
        if primitive is name_p and params["name"] in saved:
            avals, primitive, params = saved[params["name"]]
        return policy(primitive, *avals, **params)

    return adapted


def _rewrite_shard_map(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> RuleResult:
    params = equation.params
    body = params["jaxpr"]
    keys = [] if scope.key is None else [scope.key]

    def evaluate(keys: list[PRNGKey], *args):
        return tuple(rewriter.evaluate(body, (), args, replace(scope, key=keys[0] if keys else None)))

    call = jax.shard_map(
        evaluate,
        mesh=params["mesh"],
        in_specs=(PartitionSpec(), *params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return list(call(keys, *values))


def _rewrite_custom_jvp(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> RuleResult:
    params, rule, name = dict(equation.params), jvp_rule(equation.params), callee_name(equation)
    primals = rewriter.survey.operands[scope.path][params["num_consts"] :]
    params["call_jaxpr"], params["num_consts"], operands = _add_key_operand(rewriter, params, values, scope)

    def rewritten(*zeros):
        *key_is_constant, zeros = (zeros[0], zeros[1:]) if scope.key is not None else (zeros,)
        jaxpr, consts, out_zeros = rule.call(*zeros)
        rewriter.extend_survey(jaxpr, primals, scope.enter_program("jvp"))
        program = rewriter.trace(jaxpr, consts, scope.enter_rule("jvp", jaxpr, name))
        if key_is_constant == [False]:  # the key's tangent is an argument too, before the other tangents
            avals, count = program.in_avals, 1 + len(zeros)
            without_tangent = lambda *args: eval_jaxpr(program.jaxpr, program.consts, *args[:count], *args[count + 1 :])
            program = jax.make_jaxpr(without_tangent)(*avals[:count], avals[0].to_tangent_aval(), *avals[count:])
        return program.jaxpr, program.consts, out_zeros

    return Binding(operands, replace_jvp_rule(params, rewritten))


def _rewrite_custom_vjp(rewriter: Rewriter, equation: JaxprEqn, values: Sequence[Any], scope: Scope) -> RuleResult:
    params, name, keyed = dict(equation.params), callee_name(equation), scope.key is not None
    params["call_jaxpr"], count, operands = _add_key_operand(rewriter, params, values, scope)
    forward, backward, out_trees = vjp_rules(params)
    primals, residuals, before = rewriter.survey.operands[scope.path], [], params["num_consts"]
    added = count - before
    params["num_consts"] = count

    def rewritten(*nonzeros):
        jaxpr, consts = forward.call(*nonzeros[keyed:])
        computed = iter(rewriter.extend_survey(jaxpr, primals[before:], scope.enter_program("fwd")))
        residuals[:] = [next(computed) if n is None else primals[n] for n in out_trees()[2]]
        program = rewriter.trace(jaxpr, consts, scope.enter_rule("fwd", jaxpr, name))
        return program.jaxpr, program.consts

    def rewritten_trees():
        """Return the trees of the results and of the residuals, and for each residual the index of the operand that it is, or None."""
        results, residual_tree, numbers = out_trees()
        numbers = [n if n is None else n + added + (keyed and n >= count - added) for n in numbers]
        residual_tree = jax.tree.structure((0, jax.tree.unflatten(residual_tree, [0] * len(numbers)))) if keyed else residual_tree
        return results, residual_tree, [count] * keyed + numbers

    def rewritten_backward(*args):
        within = replace(scope.enter_program("bwd"), key=args[0]) if keyed else scope.enter_program("bwd")
        key_cotangent = [ZeroCotangent(jax.typeof(args[0]).to_ct_aval())] if keyed else []
        return [*key_cotangent, *rewriter.rewrite_function(backward.call, within, residuals)(*args[keyed:])]

    return Binding(operands, replace_vjp_rules(params, rewritten, rewritten_backward, rewritten_trees))


def _add_key_operand(
    rewriter: Rewriter, params: dict[str, Any], values: Sequence[Any], scope: Scope
) -> tuple[ClosedJaxpr, int, Sequence[Any]]:
    """Return the program of a function with derivative rules, the number of operands that these rules do not see, and all operands.

    The rules may draw random bits where the function does not. So the key, if there is one, is the first operand that the rules see.
    """
    program, count = rewriter.rewrite(params["call_jaxpr"], scope), params["num_consts"]
    hoisted, consts, others = program.leading_operands[program.uses_key :], values[:count], values[count:]
    before = len(hoisted) + len(consts)
    if scope.key is None:
        return program.jaxpr, before, [*hoisted, *values]

    def evaluate(*args):
        key = [args[before]] if program.uses_key else []
        return eval_jaxpr(program.jaxpr.jaxpr, program.jaxpr.consts, *key, *args[:before], *args[before + 1 :])

    operands = [*hoisted, *consts, scope.key, *others]
    avals = program.jaxpr.in_avals[program.uses_key :]
    return jax.make_jaxpr(evaluate)(*avals[:before], jax.typeof(scope.key), *avals[before:]), before, operands


CONTAINER_RULES: dict[str, Callable[[Rewriter, JaxprEqn, Sequence[Any], Scope], RuleResult]] = {
    "jit": _rewrite_jit,
    "pjit": _rewrite_jit,
    "closed_call": _rewrite_call,
    "core_closed_call": _rewrite_call,
    "scan": _rewrite_scan,
    "while": _rewrite_while,
    "cond": _rewrite_cond,
    "remat2": _rewrite_checkpoint,
    "checkpoint": _rewrite_checkpoint,
    "shard_map": _rewrite_shard_map,
    "custom_jvp_call": _rewrite_custom_jvp,
    "custom_vjp_call": _rewrite_custom_vjp,
}
