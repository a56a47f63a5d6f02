"""`compare`: every product of a function under several policies, beside the exact product of the same operands."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from chex import PRNGKey
from jax import Array, lax

from tcemu.architectures.lookup import applied
from tcemu.arithmetic.model import Model
from tcemu.compilation import compile_clock
from tcemu.emulation.comparison import Comparison
from tcemu.emulation.emulate import traced
from tcemu.emulation.keys import at_place, one_key
from tcemu.emulation.parameters import Parameters
from tcemu.emulation.policy import Choice, Decision, Policy, checked, decide, planned
from tcemu.emulation.product_errors import Run, errors_of
from tcemu.emulation.products import Product
from tcemu.emulation.sensitivity import distance, results_by, sensitivity_of
from tcemu.errors import NotModelled
from tcemu.linalg.dot_general import DimensionNumbers
from tcemu.linalg.recipes import Recipe, as_recipe

log = logging.getLogger("tcemu")


def compare(
    fn: Callable,
    policies: Recipe | str | Mapping[str, Policy] | Sequence[Recipe | str],
    inputs: Sequence[Any],
    *,
    convolutions: bool = False,
    results: bool = True,
    sensitivity: bool = False,
    parameters: Parameters = None,
    key: PRNGKey | None = None,
) -> Comparison:
    """How far every product of fn(*inputs) is from the exact one under each policy, and where that comes from.

    policies: by name, each as `emulate` takes it; or recipes, themselves or by name, as ["bf16 on A100", "bf16 on H100"], which are told
    apart by target, arithmetic and promotion where they are the same ("bf16 on sm_80"). inputs: fn's arguments. convolutions: as in
    `emulate`.
    results: whether to run fn under each policy too, to see what comes of the errors together; that compiles it once for each.
    sensitivity: whether to run fn with each product emulated alone too, to see what each costs at the end: `Errors.output_error`. All these
    runs of a policy, and that of `results`, are one compiled program; it runs once for each product, and twice more.
    parameters, key: as in `emulate`; all runs of a product draw the same random bits.
    fn runs once as it is. The operands of its products are kept in memory and multiplied by each policy's choice, so that errors of one
    product do not reach the next. A policy that leaves a product has no row for it.
    The exact product is of the operands as fn has them, of any real float dtype. It is computed in float64 by NumPy, off by no more than
    `study.accuracy.Reference` bounds; for the worst element it is rational. So is, for recipes, the exact product of the quantised
    operands, which splits the error in two: `Errors.operand_error`, `Errors.sum_error`.
    What it is doing, and how long it compiled, goes to the logger "tcemu" as INFO: `logging.basicConfig(level="INFO")` shows it.
    Returns a `Comparison`: a table when printed, one `Errors` for each product and policy, `tcemu.viz.plot` draws it.
    Raises TypeError for policies of another kind, and what `emulate` raises.
    """
    call, random = traced(fn, tuple(inputs), {}, parameters), one_key(key)
    named = {name: planned(policy, call.survey.products.values()) for name, policy in named_policies(policies).items()}
    captured: dict[Product, list[Run]] = {}

    def decided(policy: Policy, product: Product) -> Decision:
        return decide(policy, product, convolutions, None if random is None else partial(at_place, random, (product.name,)))

    def of_interest(product: Product) -> bool:
        return product.is_float and any(decided(policy, product).run is not None for policy in named.values())

    clock = compile_clock()
    began, compiled = time.perf_counter(), clock.seconds
    log.info("compare: runs the function as it is, with %d products", len(call.survey.products))
    plain = results_by(call, partial(_capturing, captured, of_interest), convolutions)
    log.info("compare: %d of them by %s, then the whole function", len(captured), ", ".join(named))
    rows = [
        errors_of(product, name, decision, runs)
        for product, runs in captured.items()
        for name, policy in named.items()
        if (decision := decided(policy, product)).run is not None
    ]
    if not sensitivity:
        whole = {name: distance(results_by(call, policy, convolutions, random), plain) for name, policy in named.items()} if results else {}
        compared = Comparison(tuple(rows), whole)
    else:
        found = {name: sensitivity_of(call, partial(decided, policy), convolutions) for name, policy in named.items()}
        rows = [replace(row, output_error=found[row.policy].alone[row.product]) for row in rows]
        compared = Comparison(tuple(rows), {name: one.together for name, one in found.items()} if results else {})
    compiled = clock.seconds - compiled
    log.info("compare: compiled for %.1f s, ran for %.1f s", compiled, time.perf_counter() - began - compiled)
    return compared


def _capturing(captured: dict[Product, list[Run]], of_interest: Callable[[Product], bool], product: Product) -> Choice:
    """A policy that computes the products of interest as they are, and keeps their operands."""
    if not of_interest(product):
        return None
    runs = captured.setdefault(product, [])

    def product_as_it_is(lhs: Array, rhs: Array, dimension_numbers: DimensionNumbers, **kwargs: Any) -> Array:
        jax.debug.callback(lambda a, b: runs.append(Run(np.asarray(a), np.asarray(b), dimension_numbers, kwargs)), lhs, rhs)
        return lax.dot_general(lhs, rhs, dimension_numbers, **kwargs)

    return product_as_it_is


def named_policies(policies: Recipe | str | Mapping[str, Policy] | Sequence[Recipe | str]) -> dict[str, Policy]:
    if isinstance(policies, Mapping):
        return {str(name): checked(policy) for name, policy in policies.items()}
    given = [policies] if isinstance(policies, Recipe | str) else policies
    if not isinstance(given, Sequence) or not all(isinstance(recipe, Recipe | str) for recipe in given):
        raise TypeError(f"policies: got {policies!r}; wanted a dict from names to policies, or recipes")
    recipes = [as_recipe(recipe) for recipe in given]
    names = [recipe.name or f"recipe {number}" for number, recipe in enumerate(recipes)]
    for further in (_on_target, _changes):
        often = Counter(names)
        names = [name + further(recipe) if often[name] > 1 else name for name, recipe in zip(names, recipes, strict=True)]
    if len(set(names)) < len(names):
        raise TypeError(f"policies: the recipes' names, {', '.join(names)}, do not tell them apart; give a dict from names to policies")
    return dict(zip(names, recipes, strict=True))


def _on_target(recipe: Recipe) -> str:
    return f" on {recipe.target}"


def _changes(recipe: Recipe) -> str:
    """The promotion, and what a recipe changes of its target's arithmetic."""
    said = [] if recipe.promote is None else [f"promote={recipe.promote}"]
    if recipe.model is not None:
        try:
            own = applied(recipe.op, recipe.target, unit=recipe.unit).model
        except NotModelled:
            own = None
        names = (f.name for f in fields(Model))
        said += [f"{name}={getattr(recipe.model, name)}" for name in names if own is None or _differ(name, recipe.model, own)]
    return f", {', '.join(said)}" if said else ""


def _differ(name: str, model: Model, other: Model) -> bool:
    mine, theirs = getattr(model, name), getattr(other, name)
    return type(mine) is not type(theirs) or mine != theirs
