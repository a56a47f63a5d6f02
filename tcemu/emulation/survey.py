"""A walk through a program (jaxpr) that computes nothing: which products it has, and where their operands come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from tcemu.emulation.origins import CONSTANT, GRADIENT, Origin, together
from tcemu.emulation.products import Product, as_product
from tcemu.emulation.programs import PRODUCTS, has_products, is_ours, name_of, parts_of_scan, path_of, programs

UPDATES = ("add", "add_any", "sub", "select_n")  # that make the next parameters from the last and a gradient


@dataclass(frozen=True)
class Place:
    """Where an equation stands. path: the names around it; repeats: how often loops run it, None where that is not known; transposed: in
    the backward pass."""

    path: str = ""
    repeats: int | None = 1
    transposed: bool = False


@dataclass
class Survey:
    """What a walk found, by name. products: in the order of the program. operands: origins, of other equations that have products."""

    products: dict[str, Product] = field(default_factory=dict)
    operands: dict[str, list[Origin]] = field(default_factory=dict)

    def walk(self, jaxpr: Jaxpr, args: Sequence[Origin], place: Place, consts: Sequence[Origin] = ()) -> list[Origin]:
        """The origins of a program's results. consts: of its constants, where something is known of them."""
        env: dict[Any, Origin] = dict.fromkeys(jaxpr.constvars, CONSTANT) | dict(zip(jaxpr.constvars, consts, strict=False))
        env |= zip(jaxpr.invars, args, strict=True)
        names: Counter[str] = Counter()
        for equation in jaxpr.eqns:
            origins = [CONSTANT if isinstance(v, Literal) else env[v] for v in equation.invars]
            env.update(zip(equation.outvars, self._equation(equation, origins, place, names), strict=True))
        return [CONSTANT if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    def _equation(self, equation: JaxprEqn, origins: list[Origin], place: Place, names: Counter[str]) -> list[Origin]:
        kind = equation.primitive.name
        begins = "transpose(" in str(equation.source_info.name_stack)  # the backward pass, of which inner programs do not say so
        inner = Place(place.path, place.repeats, place.transposed or begins)
        if has_products(equation):
            name = name_of(equation)
            index, names[name] = names[name], names[name] + 1
            path = path_of(place.path, equation, index)
            inner = Place(path, place.repeats, inner.transposed)
            if kind in PRODUCTS:
                self.products[path] = as_product(equation, path, index, place.repeats, origins)
            else:
                self.operands[path] = origins
        rule = WALKS.get(kind)
        if rule is not None and not is_ours(equation):
            return rule(self, equation, origins, inner)
        if kind == "select_n":
            origins = [CONSTANT, *origins[1:]]  # what is selected from counts, not by what
        result = together(origins)
        if not inner.transposed:
            result = _updated(equation, origins) or result
        elif begins and _begins_reverse_mode(equation):
            result = GRADIENT
        return [result] * len(equation.outvars)


def _begins_reverse_mode(equation: JaxprEqn) -> bool:
    """The cotangent 1 of a loss is a literal: it is spread at once, or multiplied as a scalar first."""
    literals = [isinstance(v, Literal) for v in equation.invars]
    out: Any = equation.outvars[0].aval
    return any(literals) and (all(literals) or out.shape == ()) and jnp.issubdtype(out.dtype, jnp.floating)


def _updated(equation: JaxprEqn, origins: Sequence[Origin]) -> Origin | None:
    """A parameter with a gradient added is the same parameter, as in a training step inside the program."""
    if equation.primitive.name not in UPDATES or not any(o.gradient for o in origins):
        return None
    avals: list[Any] = [v.aval for v in (*equation.invars, *equation.outvars)]
    shapes = [aval.shape for aval in avals]
    old = [o for o, shape in zip(origins, shapes[:-1], strict=True) if o.role == "weight" and shape == shapes[-1]]
    return together(old) if old else None


# ---- what holds programs


def _one(survey: Survey, equation: JaxprEqn, origins: list[Origin], place: Place) -> list[Origin]:
    (program,) = programs(equation.params)
    return survey.walk(program, origins, place)


def _scan(survey: Survey, equation: JaxprEqn, origins: list[Origin], place: Place) -> list[Origin]:
    params = equation.params
    (program,) = programs(params)
    place = Place(place.path, None if place.repeats is None else place.repeats * params["length"], place.transposed)
    consts, init, xs = parts_of_scan(params, origins)
    state, results = _until_settled(lambda state: survey.walk(program, [*consts, *state, *xs], place), init)
    return [*state, *results[len(init) :]]


def _while(survey: Survey, equation: JaxprEqn, origins: list[Origin], place: Place) -> list[Origin]:
    params = equation.params
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    condition, body = (Place(f"{place.path}/{part}", None, place.transposed) for part in ("cond", "body"))
    program = params["body_jaxpr"].jaxpr
    state, _ = _until_settled(lambda state: survey.walk(program, [*origins[first:second], *state], body), origins[second:])
    survey.walk(params["cond_jaxpr"].jaxpr, [*origins[:first], *state], condition)
    return state


def _until_settled(turn: Callable[[list[Origin]], list[Origin]], state: list[Origin]) -> tuple[list[Origin], list[Origin]]:
    """The origins of a loop's carry, which only grow, and the results of its last turn."""
    while True:
        results = turn(state)
        grown = [together(pair) for pair in zip(state, results[: len(state)], strict=True)]
        if grown == state:
            return state, results
        state = grown


def _cond(survey: Survey, equation: JaxprEqn, origins: list[Origin], place: Place) -> list[Origin]:
    branches = [
        survey.walk(branch, origins[1:], Place(f"{place.path}/{number}", place.repeats, place.transposed))
        for number, branch in enumerate(programs(equation.params["branches"]))
    ]
    return [together(results) for results in zip(*branches, strict=True)]


WALKS: dict[str, Callable[[Survey, JaxprEqn, list[Origin], Place], list[Origin]]] = {
    "jit": _one,
    "pjit": _one,
    "closed_call": _one,
    "core_closed_call": _one,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "remat2": _one,
    "checkpoint": _one,
    "shard_map": _one,
    "custom_jvp_call": _one,
    "custom_vjp_call": _one,
}
