"""Kernel recipes as JSON. Names and values that are not known here are rejected, never skipped."""

from __future__ import annotations

import json
from typing import Any

from tcemu.base.saved_files import check_saved, parse_json
from tcemu.operations.products.library.kernel_recipe import Conditions, Epilogue, KernelRecipe, Lanes, Merge, Slices, Steps
from tcemu.operations.products.recipe_json import construct, read_format, value_from_dict, value_to_dict

VERSION = 1
KIND = "tcemu kernel recipe"
UNITS = {"steps": Steps, "lanes": Lanes}
PARTS = {"slices": Slices, "merge": Merge, "epilogue": Epilogue, "conditions": Conditions}
LATER_FIELDS = {  # fields that files of this version may lack, and their defaults
    "lanes": {"product": None, "start": "zero"},
    "merge": {"atomic": False},
    "epilogue": {"scaling": "folded", "plus_zero": True, "between": None},
    "conditions": {"scales": None, "bias": None, "probability": None},
}


def to_dict(recipe: KernelRecipe) -> dict[str, Any]:
    """Convert a kernel recipe to a dict for JSON: formats by name, the instruction by its spelling."""
    (unit,) = (name for name, kind in UNITS.items() if isinstance(recipe.unit, kind))
    plain = {"kind": KIND, "version": VERSION, "a": str(recipe.a), "b": str(recipe.b), "out": str(recipe.dtype), "cast": recipe.cast}
    return plain | {"unit": {unit: value_to_dict(recipe.unit)}} | {name: value_to_dict(getattr(recipe, name)) for name in PARTS}


def from_dict(data: Any) -> KernelRecipe:
    """Convert a dict of `to_dict` to its kernel recipe.

    Raises:
        ValueError: another kind or version, or an unknown name or value.
    """
    data = check_saved("a kernel recipe", data, KIND, VERSION, ("a", "b", "out", "cast", "unit", *PARTS))
    unit = data["unit"]
    if not isinstance(unit, dict) or len(unit) != 1 or next(iter(unit)) not in UNITS:
        raise ValueError(f"unit: got {str(unit)[:80]}; expected one of {', '.join(UNITS)}")
    ((name, inner),) = unit.items()
    parts = {part: _part_from_dict(part, kind, data[part]) for part, kind in PARTS.items()}
    formats = {"a": read_format("a", data["a"]), "b": read_format("b", data["b"]), "dtype": read_format("out", data["out"])}
    return construct(
        "a kernel recipe", lambda: KernelRecipe(**formats, unit=_part_from_dict(name, UNITS[name], inner), cast=data["cast"], **parts)
    )


def _part_from_dict(name: str, kind: type, data: Any) -> Any:
    return value_from_dict(name, kind, data, LATER_FIELDS.get(name))


def dumps(recipe: KernelRecipe) -> str:
    """Convert a kernel recipe to JSON text.

    Args:
        recipe: A `KernelRecipe`. A `tcemu.Recipe` has `to_json()`, a policy `tcemu.policies.to_json`.

    Raises:
        TypeError: It is no kernel recipe.
    """
    if not isinstance(recipe, KernelRecipe):
        other = " A tcemu.Recipe has to_json() and Recipe.from_json(text)." if type(recipe).__name__ == "Recipe" else ""
        raise TypeError(f"recipe: got {type(recipe).__name__}; expected a tcemu.replay.KernelRecipe.{other}")
    return json.dumps(to_dict(recipe), indent=1) + "\n"


def loads(text: str) -> KernelRecipe:
    """Read the kernel recipe of `dumps`.

    Args:
        text: JSON text.

    Returns:
        The recipe.

    Raises:
        ValueError: The text is not JSON, has duplicate or unknown names, or is no kernel recipe of this version.
        TypeError: It is no text.
    """
    if not isinstance(text, str | bytes):
        raise TypeError(f"text: got {type(text).__name__}; expected the JSON text of tcemu.replay.dumps")
    return from_dict(parse_json(text))
