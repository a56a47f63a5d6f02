"""The grid of a sweep: what the name of an axis means, which values a compiled program takes as they come, and each point's recipe."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import numpy as np

from tcemu.arithmetic.model import LIMITS, MODES, ROUNDED, Model
from tcemu.formats import F32
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import Instruction
from tcemu.linalg.recipes import Recipe, as_recipe, recipe
from tcemu.quantize.operands import Quantizer

TRACED = (*LIMITS, "promote")  # what a recipe takes as an array
OF_MODEL = tuple(field.name for field in fields(Model))
OF_RECIPE = ("a", "b", "unit", "split_k", "reduction", "out")  # what `Recipe.replace` changes besides
CHOSEN = ("recipe", "op", "target")
GIVEN = ("recipe", "op", "target", "model", "key")  # what a function may ask for by the names of its parameters
TARGET = "sm_90a"


@dataclass(frozen=True)
class Point:
    """One point of a grid: the number of each axis's value, and the values as they were given."""

    place: tuple[int, ...]
    values: dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Points that one compiled program computes.

    base: the recipe that they share, without what is swept. known: fields that they share; traced: for each field that the program takes,
    a value for each point, int32. own: the values of the user's own axes.
    """

    base: Recipe
    known: dict[str, Any]
    traced: dict[str, np.ndarray]
    own: dict[str, Any]
    points: tuple[Point, ...]


def axes_of(over: Mapping[str, Iterable[Any] | Any]) -> dict[str, tuple[Any, ...]]:
    """The axes, each with its values. Raises ValueError for one without values, or for no axis."""
    single = (str, bytes, int, float, Recipe, Instruction)
    axes = {name: (values,) if isinstance(values, single) or values is None else tuple(values) for name, values in over.items()}
    if empty := [name for name, values in axes.items() if not values]:
        raise ValueError(f"over: {empty[0]} has no values")
    if not axes:
        raise ValueError("over: got no axes; give a dict from names to values, as {'fraction_bits': range(8, 24)}")
    plain = lambda value: value.item() if isinstance(value, np.generic) or getattr(value, "ndim", None) == 0 else value  # noqa: E731
    return {name: tuple(plain(value) for value in values) for name, values in axes.items()}


def check_axes(axes: Mapping[str, Any], takes: frozenset[str], own: frozenset[str]) -> None:
    """Raises TypeError for an axis that is nobody's, or that the function would not see.

    takes: of GIVEN, what the function asks for; own: the parameters of the function that draws operands.
    """
    if not takes & {"recipe", "op", "target", "model"}:
        raise TypeError("fn: it takes none of recipe=, op=, target= and model=, by which a sweep tells it what to compute")
    for name in axes:
        wants = ("recipe",) if name in (*OF_RECIPE, "promote", "recipe") else ("recipe", "model") if name in OF_MODEL else ()
        wants = ("recipe", name) if name in ("op", "target") else wants
        if wants and not takes & set(wants):
            raise TypeError(f"over: {name} would not reach fn, which does not take {'= or '.join(wants)}=")
        if not wants and name not in own:
            known = ", ".join((*CHOSEN, *OF_MODEL, "promote", *OF_RECIPE))
            raise TypeError(f"over: {name!r} is neither one of {known}, nor a parameter of operands")


def check_reach(base: Recipe, takes: frozenset[str]) -> None:
    """Raises TypeError where a function that takes no recipe would not do what this one does besides an instruction's sums."""
    plain = base.a == base.b == Quantizer() and base.promote is None and base.split_k == 1 and base.out in (F32, base.op.d)
    if "recipe" not in takes and not plain:
        raise TypeError(
            f"recipe: {base.name or base.op} scales operands, promotes sums or rounds results, and fn does not take recipe=; give fn the "
            "recipe, or an axis 'op'"
        )


def groups(axes: Mapping[str, tuple[Any, ...]], given: Recipe | str | None) -> Iterator[Group]:
    """The points in the order of the grid, those together that one program computes.

    Raises as `Recipe` and `recipe`, for the first point that cannot be.
    """
    several = {name for name, values in axes.items() if name in TRACED and len(set(values) - {None}) > 1}
    collected: dict[tuple, list[Point]] = {}
    for place in product(*(range(len(values)) for values in axes.values())):
        point = Point(place, {name: values[i] for i, (name, values) in zip(place, axes.items(), strict=True)})
        swept = tuple(name for name in axes if name in several and point.values[name] is not None)
        fixed = tuple(i for i, name in zip(place, axes, strict=True) if name not in swept)
        collected.setdefault((swept, fixed), []).append(point)
    for (swept, _), points in collected.items():
        static = {name: value for name, value in points[0].values.items() if name not in swept}
        base = _base(static, given)
        known = {name: value for name, value in static.items() if name in (*OF_MODEL, "promote")}
        for point in points:
            base.what_if(**known, **{name: point.values[name] for name in swept})  # says now what cannot be, and not by NaN
        traced = {name: np.array([_number(name, point.values[name]) for point in points], np.int32) for name in swept}
        own = {name: value for name, value in static.items() if name not in (*CHOSEN, *OF_MODEL, "promote", *OF_RECIPE)}
        yield Group(base, known, traced, own, tuple(points))


def _number(name: str, value: Any) -> int:
    """A rounding by its number."""
    return MODES.index(value) if name in ROUNDED and isinstance(value, str) else value


def _base(static: Mapping[str, Any], given: Recipe | str | None) -> Recipe:
    """The recipe of some points before their arithmetic is changed."""
    target = static.get("target")
    if "op" in static:
        base = Recipe(parse(static["op"]), target or TARGET, name=str(static["op"]))
    else:
        chosen = static.get("recipe", given)
        if isinstance(chosen, str) and target is not None:
            base = recipe(chosen, target)
        else:
            base = as_recipe(chosen)
            base = base if target is None else base.replace(target=target)
    changes = {name: static[name] for name in OF_RECIPE if name in static}
    return base.replace(**changes) if changes else base


def label(value: Any) -> Any:
    """A value of an axis as tables show it."""
    if isinstance(value, Recipe):
        return value.name or str(value.op)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def parameters(fn: Callable) -> frozenset[str]:
    """The names that a function can be given by keyword."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(name for name, one in inspect.signature(fn).parameters.items() if one.kind in kinds)
