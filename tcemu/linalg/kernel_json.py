"""Kernel recipes as JSON: written whole, read strictly. What is not known here is refused, never skipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from tcemu.arithmetic.model import Model
from tcemu.formats import FORMATS, Format
from tcemu.linalg.kernel_epilogue import Conditions, Epilogue
from tcemu.linalg.kernel_recipes import KernelRecipe, Lanes, Merge, Slices, Steps

VERSION = 1
KIND = "tcemu kernel recipe"
UNITS = {"steps": Steps, "lanes": Lanes}
PARTS = {"slices": Slices, "merge": Merge, "epilogue": Epilogue, "conditions": Conditions}
NAMES = FORMATS
IN_FORMATS = ("partial", "result", "multiplicand", "product", "between")  # fields of the parts that are formats
PAIRS = ("edges", "rule", "dealt")  # and those that are tuples
LATER = {  # fields that files of this version may be without, and what that means
    "lanes": {"product": None, "start": "zero"},
    "epilogue": {"scaling": "folded", "plus_zero": True, "between": None},
    "conditions": {"scales": None, "bias": None},
}


def to_dict(recipe: KernelRecipe) -> dict[str, Any]:
    """A kernel recipe as what JSON holds: formats by their names, the instruction by its spelling."""
    (unit,) = (name for name, kind in UNITS.items() if isinstance(recipe.unit, kind))
    plain = {"kind": KIND, "version": VERSION, "a": str(recipe.a), "b": str(recipe.b), "out": str(recipe.out), "cast": recipe.cast}
    return plain | {"unit": {unit: _plain(recipe.unit)}} | {name: _plain(getattr(recipe, name)) for name in PARTS}


def _plain(part: Any) -> dict[str, Any]:
    held: dict[str, Any] = {}
    for f in fields(part):
        value = getattr(part, f.name)
        if isinstance(value, Model):
            value = _plain(value)
        elif isinstance(value, tuple):
            value = list(value)
        elif value is not None and not isinstance(value, bool | int | float | str):
            value = str(value)
        held[f.name] = value
    return held


def from_dict(held: Any) -> KernelRecipe:
    """The kernel recipe of `to_dict`. Raises ValueError for another kind, another version, and names or values that are not known."""
    names = ("kind", "version", "a", "b", "out", "cast", "unit", *PARTS)
    held = _members("a kernel recipe", held, names)
    if held["kind"] != KIND or held["version"] != VERSION or isinstance(held["version"], bool):
        raise ValueError(f"this is {held['kind']!r}, version {held['version']!r}; wanted {KIND!r}, version {VERSION}")
    unit = held["unit"]
    if not isinstance(unit, dict) or len(unit) != 1 or next(iter(unit)) not in UNITS:
        raise ValueError(f"unit: got {str(unit)[:80]}; wanted one of {', '.join(UNITS)}")
    ((name, inner),) = unit.items()
    parts = {part: _part(part, kind, held[part]) for part, kind in PARTS.items()}
    formats = {part: _format(part, held[part]) for part in ("a", "b", "out")}
    return _made("a kernel recipe", lambda: KernelRecipe(**formats, unit=_part(name, UNITS[name], inner), cast=held["cast"], **parts))


def _part(name: str, kind: type, held: Any) -> Any:
    held = _members(name, LATER.get(name, {}) | held if isinstance(held, dict) else held, [f.name for f in fields(kind)])
    values: dict[str, Any] = {}
    for key, value in held.items():
        if key == "model" and value is not None:
            value = _part("model", Model, value)
        elif key in IN_FORMATS and value is not None:
            value = _format(key, value)
        elif key in PAIRS and value is not None:
            if not isinstance(value, list):
                raise ValueError(f"{name}.{key}: got {str(value)[:80]}; wanted a list of whole numbers")
            value = tuple(value)
        elif isinstance(value, list | dict):
            raise ValueError(f"{name}.{key}: got {str(value)[:80]}; wanted one value")
        values[key] = value
    return _made(name, lambda: kind(**values))


def _members(name: str, held: Any, wanted: Any) -> dict[str, Any]:
    if not isinstance(held, dict):
        raise ValueError(f"{name}: got {str(held)[:80]}; wanted an object with {', '.join(wanted)}")
    if set(held) != set(wanted):
        extra, missing = sorted(set(held) - set(wanted)), sorted(set(wanted) - set(held))
        raise ValueError(
            f"{name}: {f'unknown {extra}' if extra else ''}{' and ' if extra and missing else ''}{f'missing {missing}' if missing else ''}"
        )
    return held


def _format(name: str, value: Any) -> Format:
    if not isinstance(value, str) or value not in NAMES:
        raise ValueError(f"{name}: got {str(value)[:80]!r}; wanted a number format, one of {', '.join(NAMES)}")
    return NAMES[value]


def _made(name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{name}: {error}") from error


def dumps(recipe: KernelRecipe) -> str:
    """A kernel recipe as JSON text."""
    return json.dumps(to_dict(recipe), indent=1) + "\n"


def loads(text: str) -> KernelRecipe:
    """The kernel recipe of `dumps`. Raises ValueError for what is no such text: see `from_dict`."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError(f"a name stands twice among {', '.join(name for name, _ in pairs)}")
        return dict(pairs)

    def refused(text: str) -> Any:
        raise ValueError(f"{text} is no number of JSON")

    try:
        return from_dict(json.loads(text, object_pairs_hook=once, parse_constant=refused))
    except RecursionError:
        raise ValueError("the text is nested too deep for a kernel recipe") from None
