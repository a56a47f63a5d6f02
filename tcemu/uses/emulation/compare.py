"""`compare`: every product of a function under several policies, beside the exact product of the same operands, and its functions too.

With `sensitivity` it also measures the error that each product alone causes in the function's results. One program runs the function with
one product emulated at a time.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product as cross_product
from math import erf, pi, sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.base.compilation import compile_clock
from tcemu.base.progress import interactive_line
from tcemu.base.provenance import describe_arrays, function_name
from tcemu.engine.formats.number_formats import ARRAY_FORMATS
from tcemu.operations.products.dot_general import DimensionNumbers
from tcemu.operations.products.matmul import parse_recipe
from tcemu.operations.products.recipe_facts import model_changes
from tcemu.operations.products.recipe_kinds import AnyRecipe, find_kind
from tcemu.operations.products.recipes import Recipe
from tcemu.uses.emulation.decisions import Choice, Decision, DotGeneralLike, Policy, as_policy, decide, plan_policy
from tcemu.uses.emulation.emulate import TracedCall, check_function, trace_call
from tcemu.uses.emulation.function_choices import FunctionDecision, FunctionPolicy, as_function_policy, compute_function
from tcemu.uses.emulation.origins import Parameters
from tcemu.uses.emulation.product_errors import CapturedRun, Comparison, ErrorSums, ProductErrors, WorstElement, measure_errors
from tcemu.uses.emulation.random_keys import as_typed_key, fold_in_location
from tcemu.uses.emulation.rewriting import Rewriter, Scope
from tcemu.uses.emulation.survey import Function, Product
from tcemu.uses.study.accuracy import ErrorTally

log = logging.getLogger("tcemu")
Operands = tuple[np.ndarray | None, ...]  # of a function: x, and for a norm the weight and the bias, or None


def compare(
    fn: Callable,
    policies: AnyRecipe | str | Mapping[str, Policy] | Sequence[AnyRecipe | str],
    inputs: Sequence[Any] | Callable[[int], Sequence[Any]],
    *,
    convolutions: bool = False,
    results: bool = True,
    sensitivity: bool = False,
    parameters: Parameters = None,
    key: PRNGKey | None = None,
    seeds: int | Iterable[int] | None = None,
    functions: FunctionPolicy = None,
) -> Comparison:
    """Compare every product of fn(*inputs) under several policies with the exact product of the same operands.

    The function runs once unchanged. The operands of its products are kept in memory and multiplied by each policy's choice, so that errors
    of one product do not reach the next. A policy that leaves a product has no row for it. The exact product is of the operands as the
    function has them, of any real float dtype. It is computed in float64 by NumPy, with an error below the bound of
    `study.accuracy.Reference`; for the worst element it is rational. With a recipe the exact product of the quantised operands divides the
    error into `ProductErrors.operand_error` and `ProductErrors.sum_error`.

    The logger "tcemu" reports progress and the time of compilations as INFO: `logging.basicConfig(level="INFO")` shows it. A
    terminal or a notebook also shows a line of progress.

    Args:
        fn: Function as `emulate` takes it.
        policies: Policies by name; or recipes of any kind or their names, as ["bf16 on A100", "bf16x6 on A100"]. Target, arithmetic and
            promotion distinguish recipes with equal names ("bf16 on sm_80").
        inputs: Arguments of the function, as a tuple or list. With `seeds`, a function of a seed that returns them, as
            `lambda seed: (params, draw(seed))` or `lambda i: (params, batches[i])`.
        convolutions: Whether convolutions are products too, as in `emulate`.
        results: Whether to run the function under each policy too, to see the errors together. This compiles it once for each policy.
        sensitivity: Whether to run the function with each product emulated alone too, for `ProductErrors.output_error`. All these runs of
            a policy, and that of `results`, are one compiled program, which runs once for each product and twice more.
        parameters: Parameters as in `emulate`.
        key: A jax.random key as in `emulate`. All runs of a product draw the same random bits. Each seed draws others.
        seeds: Number of seeds, counted from 0, or the seeds themselves: everything is compared anew for each. The table then has means,
            with their 95 % intervals by Student's t distribution, and `summary()` has them as numbers. With a key, `inputs` may be the
            arguments themselves: then only the random bits differ.
        functions: Policy for softmaxes, norms and activations, as in `emulate`, under every policy. Each function that it replaces has a
            row too, with its error against the exact function of the same operands. None: functions stay as they are.

    Returns:
        A `Comparison`: it prints as a table, has one `ProductErrors` for each product and policy and for each function, and its method
        `plot` draws it.

    Raises:
        TypeError: Policies or inputs of another kind, and as `emulate`.
        ValueError: As `emulate`; there are no seeds; or two seeds give other products.

    Example:
        >>> import tcemu
        >>> import numpy as np
        >>> x = np.ones((2, 32), np.float32)
        >>> found = tcemu.compare(lambda x: x @ x.T, ["f16 on A100"], (x,), results=False)
        >>> [row.product.name for row in found.rows]
        ['dot_general']
    """
    check_function("compare", fn, policies)
    compare_inputs = partial(_compare_inputs, fn, policies, convolutions, results, sensitivity, parameters, as_function_policy(functions))
    if seeds is None:
        if callable(inputs):
            raise TypeError(f"inputs: got the function {function_name(inputs)}; expected the arguments of fn, or give seeds= too")
        return compare_inputs(inputs, as_typed_key(key))
    chosen = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not chosen or len(set(chosen)) < len(chosen) or not all(isinstance(seed, int) for seed in chosen):
        raise ValueError(f"seeds: got {seeds!r}; expected a number of seeds, 1 or more, or different integers")
    if not callable(inputs) and key is None:
        raise TypeError("seeds: without a key the same inputs give the same errors; give inputs= a function of a seed, or key=")
    compared, random = {}, as_typed_key(key)
    for seed in chosen:
        arguments = inputs(seed) if callable(inputs) else inputs
        compared[seed] = compare_inputs(arguments, None if random is None else jax.random.fold_in(random, seed))
    law = f"{function_name(inputs)}(seed)" if callable(inputs) else compared[chosen[0]].provenance.inputs
    digests = ", ".join(f"{seed}: {one.provenance.inputs}" for seed, one in compared.items())
    return Comparison.from_seeds(compared, f"{law}; {digests}" if callable(inputs) else law)


def _compare_inputs(
    fn: Callable,
    policies: AnyRecipe | str | Mapping[str, Policy] | Sequence[AnyRecipe | str],
    convolutions: bool,
    results: bool,
    sensitivity: bool,
    parameters: Parameters,
    functions: FunctionPolicy,
    inputs: Sequence[Any],
    key: PRNGKey | None,
) -> Comparison:
    """Compare for one set of inputs, with the arguments of `compare`."""
    if not isinstance(inputs, tuple | list):
        given: Any = inputs
        got = f"{given.dtype}{list(given.shape)}" if hasattr(given, "shape") else type(given).__name__
        raise TypeError(f"inputs: got {got}; expected the arguments of fn as a tuple, such as (weights, x)")
    call, random = trace_call(fn, tuple(inputs), {}, parameters, functions=functions is not None), key
    policies_by_name = {name: plan_policy(policy, call.survey.products.values()) for name, policy in name_policies(policies).items()}
    captured: dict[Product, list[CapturedRun]] = {}
    captured_functions: dict[Function, CapturedFunction] = {}

    def decide_product(policy: Policy, product: Product) -> Decision:
        return decide(policy, product, convolutions, None if random is None else partial(fold_in_location, random, (product.name,)))

    def is_replaced(product: Product) -> bool:
        return product.is_float and any(decide_product(policy, product).dot_general is not None for policy in policies_by_name.values())

    clock = compile_clock()
    began, compiled = time.perf_counter(), clock.seconds
    log.info("compare: runs the function as it is, with %d products", len(call.survey.products))
    capture = partial(_capture_function, captured_functions)
    plain = float_results(call, partial(_capture_product, captured, is_replaced), convolutions, None, functions, capture)
    log.info("compare: %d of them by %s, then the whole function", len(captured), ", ".join(policies_by_name))
    line, rows = interactive_line(len(captured) * len(policies_by_name)), []
    for count, (product, (name, policy)) in enumerate(cross_product(captured, policies_by_name.items())):
        if line is not None:
            line.count("compare", count, "products by their policies")
        if (decision := decide_product(policy, product)).dot_general is not None:
            rows.append(measure_errors(product, name, decision, captured[product]))
    if line is not None:
        line.clear()
    rows += [measure_function_errors(function, one.decision, one.runs) for function, one in captured_functions.items()]
    if not sensitivity:
        run = lambda policy: float_results(call, policy, convolutions, random, functions)
        whole = {name: relative_distance(run(policy), plain) for name, policy in policies_by_name.items()} if results else {}
    else:
        sensitivities = {
            name: measure_sensitivity(call, partial(decide_product, policy), convolutions, name, functions)
            for name, policy in policies_by_name.items()
        }
        first = next(iter(sensitivities))  # a function alone is the same under every policy
        policy_of = lambda row: first if isinstance(row.product, Function) else row.policy
        rows = [replace(row, output_error=sensitivities[policy_of(row)].single_errors[row.product]) for row in rows]
        whole = {name: one.total_error for name, one in sensitivities.items()} if results else {}
    compared = Comparison.from_rows(rows, whole, describe_arrays(call.arrays))
    compiled = clock.seconds - compiled
    log.info("compare: compiled for %.1f s, ran for %.1f s", compiled, time.perf_counter() - began - compiled)
    return compared


def _capture_product(captured: dict[Product, list[CapturedRun]], is_replaced: Callable[[Product], bool], product: Product) -> Choice:
    """Decide on a product as a policy that computes replaced products unchanged and captures their operands."""
    if not is_replaced(product):
        return None
    runs = captured.setdefault(product, [])

    def capture_and_multiply(lhs: Array, rhs: Array, dimension_numbers: DimensionNumbers, **kwargs: Any) -> Array:
        jax.debug.callback(lambda a, b: runs.append(CapturedRun(np.asarray(a), np.asarray(b), dimension_numbers, kwargs)), lhs, rhs)
        return lax.dot_general(lhs, rhs, dimension_numbers, **kwargs)

    return capture_and_multiply


class CapturedFunction(NamedTuple):
    """The runs of a function that a kernel replaces."""

    decision: FunctionDecision
    runs: list[Operands]


def _capture_function(
    captured: dict[Function, CapturedFunction], function: Function, decision: FunctionDecision, operands: Sequence[Any], result: Array
) -> Array:
    """Capture the operands of a function that is replaced, and return its result as it is."""
    if decision.kernel is None:
        return result
    runs = captured.setdefault(function, CapturedFunction(decision, [])).runs
    is_given = [operand is not None for operand in operands]

    def capture(*given: Any) -> None:
        remaining = iter(given)
        runs.append(tuple(np.asarray(next(remaining)) if given else None for given in is_given))

    jax.debug.callback(capture, *(operand for operand in operands if operand is not None))
    return result


def name_policies(policies: AnyRecipe | str | Mapping[str, Policy] | Sequence[AnyRecipe | str]) -> dict[str, Policy]:
    """Return policies by name. Recipes with equal names are distinguished by target, arithmetic and promotion."""
    if isinstance(policies, Sequence | Mapping) and not policies:
        raise ValueError(f"policies: got {policies!r}; expected at least one recipe, such as 'bf16 on H100'")
    if isinstance(policies, Mapping):
        return {str(name): as_policy(policy) for name, policy in policies.items()}
    recipes_or_names: Any = [policies] if _is_recipe_or_name(policies) else policies
    if not isinstance(recipes_or_names, Sequence) or not all(map(_is_recipe_or_name, recipes_or_names)):
        raise TypeError(f"policies: got {policies!r}; expected a dict from names to policies, or recipes")
    recipes = [parse_recipe(recipe) if isinstance(recipe, str) else recipe for recipe in recipes_or_names]
    names = [getattr(recipe, "name", "") or f"recipe {number}" for number, recipe in enumerate(recipes)]
    for further in (_target_suffix, _changes_suffix):
        often = Counter(names)
        names = [name + further(recipe) if often[name] > 1 else name for name, recipe in zip(names, recipes, strict=True)]
    if len(set(names)) < len(names):
        raise TypeError(f"policies: the recipes' names, {', '.join(names)}, do not tell them apart; give a dict from names to policies")
    return {name: recipe if isinstance(recipe, Recipe) else as_policy(recipe) for name, recipe in zip(names, recipes, strict=True)}


def _is_recipe_or_name(value: object) -> bool:
    return isinstance(value, str) or ((kind := find_kind(value)) is not None and kind.any_shape)


def _target_suffix(recipe: Any) -> str:
    return f" on {recipe.target}"


def _changes_suffix(recipe: Any) -> str:
    """Return the promotion and the fields that a recipe changes in its target's arithmetic, as a suffix of its name."""
    if not isinstance(recipe, Recipe):
        return ""
    changes = [] if recipe.promote is None else [f"promote={recipe.promote}"]
    changes += filter(None, [model_changes(recipe)])
    return f", {', '.join(changes)}" if changes else ""


# ---- runs of the whole function

ALL, NONE = -1, -2  # selections of every product and of no product, in the place of a product's number


def float_results(
    call: TracedCall,
    policy: Policy,
    convolutions: bool,
    key: PRNGKey | None,
    functions: FunctionPolicy,
    around_function: Callable[..., Any] | None = None,
) -> list[np.ndarray]:
    """Return the float results of a call under a policy, as float64. The last two arguments are those of `Rewriter`."""
    rewriter = Rewriter(policy, convolutions, call.survey, functions=functions, around_function=around_function)
    scope = Scope(key=key)
    values = jax.jit(lambda *arrays: rewriter.evaluate(call.program.jaxpr, call.program.consts, arrays, scope))(*call.arrays)
    jax.effects_barrier()
    return _as_float64(values)


def relative_distance(results: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Return the norm of the differences over the norm of the reference, or the norm of the differences if the reference is all zero."""
    error = sum(float(((x - y) ** 2).sum()) for x, y in zip(results, reference, strict=True))
    size = sum(float((y**2).sum()) for y in reference)
    return float(np.sqrt(error / size)) if size else float(np.sqrt(error))


class Sensitivity(NamedTuple):
    """Relative errors of all results of a function."""

    single_errors: dict[Product | Function, float]  # errors with one product or function emulated
    total_error: float  # error with all of them emulated


def measure_sensitivity(
    call: TracedCall,
    decide_product: Callable[[Product], Decision],
    convolutions: bool,
    policy_name: str = "the policy",
    functions: FunctionPolicy = None,
) -> Sensitivity:
    """Measure the errors of a call's results with each product or function emulated alone and with all of them emulated.

    One program serves all runs; the number of the emulated product is its argument. The results are compared with those of the same program
    with no product emulated, so that nothing but the emulation differs.
    """
    numbers: dict[Product | Function, int] = {}

    @jax.jit
    def with_selected(selected: Array, arrays: Sequence[Any]) -> list[Any]:
        select = partial(_select_product, decide_product, selected, numbers)
        around = partial(_select_function, selected, numbers)
        rewriter = Rewriter(select, convolutions, call.survey, functions=functions, around_function=around)
        return rewriter.evaluate(call.program.jaxpr, call.program.consts, arrays, Scope())

    def compute_results(selected: int) -> list[np.ndarray]:
        return _as_float64(with_selected(jnp.int32(selected), call.arrays))

    line = interactive_line(len(call.survey.products) + len(call.survey.functions))

    def show(text: str, last: bool = False) -> None:
        log.info("compare: sensitivity under %s: %s", policy_name, text)
        if line is not None:
            line.update(f"compare: sensitivity under {policy_name}: {text}, {line.elapsed:.0f} s", last)

    show("compiles one program for all runs")
    plain = compute_results(NONE)
    alone = {}
    for count, (product, number) in enumerate(numbers.items(), 1):
        show(f"{'function' if isinstance(product, Function) else 'product'} {count} of {len(numbers)}")
        alone[product] = relative_distance(compute_results(number), plain)
    show("all of them", last=True)
    return Sensitivity(single_errors=alone, total_error=relative_distance(compute_results(ALL), plain))


def _select_product(
    decide_product: Callable[[Product], Decision], selected: Array, numbers: dict[Product | Function, int], product: Product
) -> DotGeneralLike | None:
    """Return a dot_general that emulates a product if it is selected and else computes it unchanged."""
    emulation = decide_product(product).dot_general
    if emulation is None:
        return None
    number = numbers.setdefault(product, len(numbers))

    def emulate_if_selected(lhs: Array, rhs: Array, dimension_numbers: Any, **kwargs: Any) -> Array:
        def compute(dot_general: DotGeneralLike, lhs: Array, rhs: Array) -> Array:
            return dot_general(lhs, rhs, dimension_numbers, **kwargs).astype(product.dtype)

        is_selected = (selected == number) | (selected == ALL)
        return lax.cond(is_selected, partial(compute, emulation), partial(compute, lax.dot_general), lhs, rhs)

    return emulate_if_selected


def _select_function(
    selected: Array,
    numbers: dict[Product | Function, int],
    function: Function,
    decision: FunctionDecision,
    operands: Sequence[Any],
    result: Array,
) -> Array:
    """Return a function's result by its kernel if it is selected, and else as it is."""
    if decision.kernel is None:
        return result
    number = numbers.setdefault(function, len(numbers))
    is_selected = (selected == number) | (selected == ALL)
    return lax.cond(is_selected, lambda: compute_function(function, decision.kernel, *operands), lambda: result)


def _as_float64(values: Sequence[Array]) -> list[np.ndarray]:
    return [np.asarray(v, np.float64) for v in values if jnp.issubdtype(v.dtype, jnp.floating)]


# ---- errors of functions, against the exact function of the same operands in float64


def measure_function_errors(function: Function, decision: FunctionDecision, runs: Sequence[Operands]) -> ProductErrors:
    """Measure the errors of a function over its runs by a kernel.

    Args:
        function: The function.
        decision: The decision to replace it.
        runs: Operands of each run: x, and for a norm the weight and the bias, or None.
    """
    sums = ErrorSums(ErrorTally(ARRAY_FORMATS[np.dtype(function.dtype)]))
    for number, operands in enumerate(runs):
        given = (None if operand is None else jnp.asarray(operand) for operand in operands)
        computed = _as_rows(function, compute_function(function, decision.kernel, *given))  # type: ignore[arg-type]
        exact = _as_rows(function, exact_function(function, *operands))
        index = sums.add(computed, exact)
        if index is not None:
            sums.worst = WorstElement(number, index, float(computed[index]), Fraction(float(exact[index])))
    return sums.summarise(function, "functions", decision.reason, decision.kernel, len(runs))


def _as_rows(function: Function, x: ArrayLike) -> np.ndarray:
    """Return an array as float64 [1, rows, columns]."""
    return np.moveaxis(np.asarray(x, np.float64), function.axis, -1).reshape(1, -1, max(function.columns, 1))


def exact_function(
    function: Function, x: np.ndarray | None, weight: np.ndarray | None = None, bias: np.ndarray | None = None
) -> np.ndarray:
    """Compute a function in float64, with an error of some units in the 52nd bit, which is 2^-20 of one in the last bit of f32."""
    operand = np.asarray(x, np.float64)
    with np.errstate(all="ignore"):
        return EXACT[function.kind](function, operand, *(None if v is None else np.asarray(v, np.float64) for v in (weight, bias)))


def _softmax(function: Function, x: np.ndarray, *_: None) -> np.ndarray:
    power = np.exp(x - x.max(axis=function.axis, keepdims=True))
    return power / power.sum(axis=function.axis, keepdims=True)


def _log_softmax(function: Function, x: np.ndarray, *_: None) -> np.ndarray:
    shifted = x - x.max(axis=function.axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=function.axis, keepdims=True))


def _rms_norm(function: Function, x: np.ndarray, weight: np.ndarray | None, _: np.ndarray | None) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + function.eps) * (1.0 if weight is None else weight)


def _layer_norm(function: Function, x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None) -> np.ndarray:
    return _rms_norm(function, x - x.mean(axis=-1, keepdims=True), weight, None) + (0.0 if bias is None else bias)


def _silu(_: Function, x: np.ndarray, *__: None) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _gelu(function: Function, x: np.ndarray, *_: None) -> np.ndarray:
    if function.form == "erf":
        return 0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x / sqrt(2)))
    return 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))


EXACT: dict[str, Callable[..., np.ndarray]] = {
    "softmax": _softmax, "log_softmax": _log_softmax, "rms_norm": _rms_norm, "layer_norm": _layer_norm, "silu": _silu, "gelu": _gelu,
}  # fmt: skip
