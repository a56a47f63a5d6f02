"""Recipes, and the values that they consist of, as JSON. A file is not trusted: unknown names and values are rejected, never skipped.

A value is a frozen dataclass. Its fields become a dict: formats by name, an instruction by its spelling, tuples as lists, and arrays of
integers as {"array": [...]}. The types of the fields decide how they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tcemu.base.saved_files import DamagedFile, check_members, check_saved
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.formats.number_formats import FORMATS, Format
from tcemu.engine.isa.families import Instruction
from tcemu.operations.quantize.quantizer import Quantizer

RECIPE_KIND, RECIPE_VERSION = "tcemu recipe", 1
MAX_NESTING = 16  # recipes of gradients within recipes
TEXTS = (Format, Instruction)  # dataclasses that are written by name
LATER_FIELDS: dict[type, dict[str, Any]] = {Model: {"clamp_step": None}, Quantizer: {"element": None}}  # values that older files lack
INT32_LIMITS = (-(2**31), 2**31 - 1)

# ---- values


@cache
def field_types(kind: type) -> dict[str, frozenset[Any]]:
    """Return the types that each field of a dataclass may have."""
    hints = get_type_hints(kind)
    return {field.name: frozenset(_union_members(hints[field.name])) for field in fields(kind)}


def _union_members(hint: Any) -> list[Any]:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return [member for part in get_args(hint) for member in _union_members(part)]
    return [str] if origin is Literal else [origin or hint]


def _is_value_type(kind: Any) -> bool:
    """Return whether fields of a type are values themselves."""
    return is_dataclass(kind) and isinstance(kind, type) and not issubclass(kind, TEXTS)


def value_to_dict(value: Any) -> dict[str, Any]:
    """Convert a value to a dict for JSON.

    Raises:
        TypeError: A field is traced, so that it has no number yet.
    """
    return {field.name: _plain_field(type(value).__name__, field.name, getattr(value, field.name)) for field in fields(value)}


def _plain_field(owner: str, name: str, value: Any) -> Any:
    if _is_value_type(type(value)):
        return value_to_dict(value)
    if isinstance(value, Tracer):
        raise TypeError(f"{owner}.{name} is traced by JAX and has no number yet; save the recipe outside jit and vmap")
    if isinstance(value, jax.Array | np.ndarray):
        return {"array": np.asarray(value).tolist()}
    if isinstance(value, tuple):
        return [_plain_field(owner, name, item) for item in value]
    if callable(value):
        raise TypeError(f"{owner}.{name} is a function, which a file cannot hold; save the recipe with a rule of tcemu.quantize.RULES")
    if isinstance(value, Format) and FORMATS.get(value.name) != value:
        raise TypeError(f"{owner}.{name} is {value}, a format of your own, which a file cannot hold; save one of {', '.join(FORMATS)}")
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def value_from_dict(name: str, kind: type, data: Any, defaults: Mapping[str, Any] | None = None, **readers: Callable[[Any], Any]) -> Any:
    """Convert a dict of `value_to_dict` to its value.

    Args:
        name: Name of the value in messages.
        kind: Type of the value.
        data: The dict.
        defaults: Values of fields that older files lack.
        **readers: What reads a field, in place of `read_field`.

    Raises:
        ValueError: `data` is no such dict, or the constructor rejects a field.
    """
    lacking = LATER_FIELDS.get(kind, {}) | dict(defaults or {})
    members = check_members(name, {**lacking, **data} if isinstance(data, dict) else data, [field.name for field in fields(kind)])
    types = field_types(kind)
    values = {
        field: readers[field](value) if field in readers else read_field(name, field, types[field], value)
        for field, value in members.items()
    }
    return construct(name, lambda: kind(**values))


def read_field(owner: str, name: str, types: frozenset[Any], value: Any) -> Any:
    """Convert a field of a dict by the types that the field may have. Raises ValueError for another kind of value."""
    nested = next(filter(_is_value_type, types), None)
    if nested is not None and (value is not None or types == {nested}):
        return value_from_dict(f"{owner}.{name}", nested, value)
    if Format in types and value is not None:
        return read_format(name, value)
    if tuple in types and value is not None:
        if not isinstance(value, list):
            raise DamagedFile(f"{owner}.{name}: got {str(value)[:80]}; expected a list")
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    if types == {str} and not isinstance(value, str):
        raise DamagedFile(f"{owner}.{name}: got {str(value)[:80]}; expected text")
    if jax.Array in types and isinstance(value, dict):
        return _read_array(f"{owner}.{name}", value)
    if isinstance(value, list | dict):
        raise DamagedFile(f"{owner}.{name}: got {str(value)[:80]}; expected one value")
    return value


def read_format(name: str, value: Any) -> Format:
    """Return the number format of a name. Raises ValueError."""
    if not isinstance(value, str) or value not in FORMATS:
        raise DamagedFile(f"{name}: got {str(value)[:80]!r}; expected a number format, one of {', '.join(FORMATS)}")
    return FORMATS[value]


def _read_array(name: str, value: dict[str, Any]) -> jax.Array:
    data = check_members(name, value, ("array",))["array"]
    least, greatest = INT32_LIMITS
    try:
        array = np.array(data, dtype=object)
    except ValueError as error:
        raise DamagedFile(f"{name}: {error}") from None
    if not all(type(x) is int and least <= x <= greatest for x in array.ravel()):
        raise DamagedFile(f"{name}: got {str(data)[:80]}; expected an array of integers of 32 bits")
    return jnp.asarray(array.astype(np.int32))


def construct(name: str, make: Callable[[], Any]) -> Any:
    """Return make(), with a ValueError for a field of a wrong type."""
    try:
        return make()
    except (TypeError, AttributeError, OverflowError) as error:
        raise DamagedFile(f"{name}: {error}") from error


# ---- recipes


def recipe_to_dict(recipe: Any) -> dict[str, Any]:
    """Convert a `Recipe` to a dict for JSON, with the recipes of its gradients.

    Raises:
        TypeError: A field is traced.
        ValueError: Recipes of gradients are nested deeper than MAX_NESTING.
    """
    return {"kind": RECIPE_KIND, "version": RECIPE_VERSION, **_recipe_fields(recipe, 0)}


def _recipe_fields(recipe: Any, depth: int) -> dict[str, Any]:
    _check_nesting(depth)
    data = {
        field.name: _plain_field("Recipe", field.name, getattr(recipe, field.name)) for field in fields(recipe) if field.name != "backward"
    }
    backward = recipe.backward
    if isinstance(backward, tuple):
        data["backward"] = {name: _recipe_fields(part, depth + 1) for name, part in zip(("dA", "dB"), backward, strict=True)}
    else:
        data["backward"] = backward if isinstance(backward, str) else {"both": _recipe_fields(backward, depth + 1)}
    return data


def recipe_from_dict(kind: type, data: Any) -> Any:
    """Convert a dict of `recipe_to_dict` to its recipe.

    Args:
        kind: The class `Recipe`.
        data: The dict.

    Raises:
        ValueError: It is no recipe of this version: an unknown name or value, or one that the constructor rejects.
    """
    names = [field.name for field in fields(kind)]
    members = check_saved("a recipe", data, RECIPE_KIND, RECIPE_VERSION, names)
    return _read_recipe("recipe", kind, {name: members[name] for name in names}, 0)


def _read_recipe(name: str, kind: type, data: Any, depth: int) -> Any:
    _check_nesting(depth)
    types = field_types(kind)
    members = check_members(name, data, types)
    for text in ("op", "target"):
        if not isinstance(members[text], str):
            raise DamagedFile(f"{name}.{text}: got {str(members[text])[:80]}; expected text")
    values = {field: read_field(name, field, types[field], value) for field, value in members.items() if field != "backward"}
    backward = members["backward"]
    if isinstance(backward, dict):
        both = "both" in backward
        parts = check_members(f"{name}.backward", backward, ("both",) if both else ("dA", "dB"))
        recipes = tuple(_read_recipe(f"{name}.backward.{part}", kind, value, depth + 1) for part, value in parts.items())
        values["backward"] = recipes[0] if both else tuple(recipes[list(parts).index(part)] for part in ("dA", "dB"))
    elif isinstance(backward, str):
        values["backward"] = backward
    else:
        raise DamagedFile(f"{name}.backward: got {str(backward)[:80]}; expected a word, or an object with both, or with dA and dB")
    return construct(name, lambda: kind(**values))


def _check_nesting(depth: int) -> None:
    if depth > MAX_NESTING:
        raise DamagedFile(f"recipe: recipes of gradients are nested {depth} deep; a file holds at most {MAX_NESTING}")
