"""The products, functions and choices of a result as JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import jax.numpy as jnp
from jax import lax

from tcemu.base.provenance import function_name
from tcemu.base.results import Table, check_type
from tcemu.base.saved_files import DamagedFile, check_members
from tcemu.operations.functional.kernel_values import KernelValue, kernel_from_dict, kernel_to_dict
from tcemu.uses.emulation.decisions import Choice
from tcemu.uses.emulation.function_choices import FunctionChoice
from tcemu.uses.emulation.function_patterns import FUNCTIONS
from tcemu.uses.emulation.policies import choice_from_dict, choice_to_dict
from tcemu.uses.emulation.survey import Function, Product

DTYPE_FIELDS = ("lhs_dtype", "rhs_dtype", "preferred_element_type", "dtype")
FUNCTION_DTYPES = ("operand_dtype", "dtype")


@dataclass(frozen=True)
class SavedFunction:
    """A function in a policy of a result that was read from a file, which has only its name.

    Attributes:
        name: Name of the function, with its module.
    """

    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise TypeError."""
        raise TypeError(f"{self.name}: the file that this result was read from has only the function's name")

    def __str__(self) -> str:
        return self.name


# ---- products


def product_to_dict(product: Product) -> dict[str, Any]:
    """Convert a product to plain values."""
    values = {field.name: getattr(product, field.name) for field in fields(product)}
    values |= {name: None if values[name] is None else jnp.dtype(values[name]).name for name in DTYPE_FIELDS}
    return values | {"dimension_numbers": _axes_to_dict(product.dimension_numbers)}


def _axes_to_dict(numbers: Any) -> dict[str, Any]:
    if isinstance(numbers, lax.ConvDimensionNumbers):
        return {"convolution": [list(spec) for spec in numbers]}
    if isinstance(numbers, lax.RaggedDotDimensionNumbers):
        axes = _nested_lists(numbers.dot_dimension_numbers)
        return {"dot": axes, "ragged": list(numbers.lhs_ragged_dimensions), "group": list(numbers.rhs_group_dimensions)}
    return {"dot": _nested_lists(numbers)}


def _nested_lists(value: Any) -> Any:
    return [_nested_lists(part) for part in value] if isinstance(value, tuple | list) else int(value)


def _nested_tuples(value: Any) -> Any:
    return tuple(map(_nested_tuples, value)) if isinstance(value, list) else value


def product_from_dict(data: Any) -> Product:
    """Convert the plain values of `product_to_dict` to their product. Raises ValueError, TypeError or LookupError."""
    values = {name: _nested_tuples(value) for name, value in check_members("product", data, [f.name for f in fields(Product)]).items()}
    for name in ("name", "primitive", "source"):
        check_type(f"product.{name}", values[name], str)
    for name in ("lhs_shape", "rhs_shape", "shape", "roles", "parameters"):
        for item in check_type(f"product.{name}", values[name], tuple):
            check_type(f"product.{name}", item, int if name.endswith("shape") else str)
    check_type("product.index", values["index"], int)
    if values["repeats"] is not None:
        check_type("product.repeats", values["repeats"], int)
    values |= {name: None if values[name] is None else jnp.dtype(check_type(name, values[name], str)) for name in DTYPE_FIELDS}
    axes = data["dimension_numbers"]
    if "convolution" in axes:
        lhs, rhs, out = _nested_tuples(check_members("axes", axes, ("convolution",))["convolution"])
        numbers: Any = lax.ConvDimensionNumbers(lhs, rhs, out)
    elif "ragged" in axes:
        numbers = lax.RaggedDotDimensionNumbers(_nested_tuples(axes["dot"]), axes["ragged"], axes["group"])
    else:
        numbers = _nested_tuples(check_members("axes", axes, ("dot",))["dot"])
    return Product(**values | {"dimension_numbers": numbers})


# ---- functions


def function_to_dict(function: Function) -> dict[str, Any]:
    """Convert a function to plain values."""
    values = {field.name: getattr(function, field.name) for field in fields(function)}
    return {"function": values | {name: jnp.dtype(values[name]).name for name in FUNCTION_DTYPES}}


def function_from_dict(data: Any) -> Function:
    """Convert the plain values of `function_to_dict` to their function. Raises ValueError, TypeError or LookupError."""
    members = check_members("function", data["function"], [f.name for f in fields(Function)])
    values: dict[str, Any] = {name: _nested_tuples(value) for name, value in members.items()}
    types: dict[str, type] = {"shape": tuple, "parameters": tuple, "index": int, "axis": int, "has_weight": bool, "has_bias": bool}
    types |= dict.fromkeys(("name", "kind", *FUNCTION_DTYPES, "form", "source", "scope"), str)
    types |= {name: kind for name, kind in (("repeats", int), ("eps", float)) if values[name] is not None}
    for name, kind in types.items():
        check_type(f"function.{name}", values[name], kind)
    for name, kind in (("shape", int), ("parameters", str)):
        for item in values[name]:
            check_type(f"function.{name}", item, kind)
    if values["kind"] not in FUNCTIONS:
        raise DamagedFile(f"function.kind: got {values['kind'][:80]!r}; expected one of {', '.join(FUNCTIONS)}")
    values |= {name: jnp.dtype(values[name]) for name in FUNCTION_DTYPES}
    return Function(**values)


def computed_from_dict(data: Any) -> Product | Function:
    """Convert the plain values of a product or a function to it. Raises ValueError, TypeError or LookupError."""
    return function_from_dict(data) if isinstance(data, dict) and set(data) == {"function"} else product_from_dict(data)


# ---- choices


def saved_choice(choice: Choice | FunctionChoice, is_kernel: bool = False) -> Any:
    """Convert a choice to plain values; a function to its name. is_kernel: whether it is the choice for a `Function`."""
    if is_kernel or isinstance(choice, KernelValue):
        return None if choice is None else {"kernel": kernel_to_dict(choice)}  # type: ignore[arg-type]
    if isinstance(choice, SavedFunction):
        return {"function": choice.name}
    try:
        return choice_to_dict(choice)
    except TypeError:
        return {"function": function_name(choice)}


def read_choice(data: Any) -> Any:
    """Convert the plain values of `saved_choice` to their choice."""
    if isinstance(data, dict) and set(data) == {"kernel"}:
        return kernel_from_dict(data["kernel"])
    if isinstance(data, dict) and set(data) == {"function"} and isinstance(data["function"], str):
        return SavedFunction(data["function"])
    return choice_from_dict(data)


class Numbering:
    """The different values of a result, as plain values without repetition, and the number of each."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[str, int] = {}

    def number(self, plain: Any) -> int:
        """Return the number of a plain value, a new one if it was not seen."""
        text = json.dumps(plain, sort_keys=True)
        if text not in self._numbers:
            self._numbers[text] = len(self.values)
            self.values.append(plain)
        return self._numbers[text]


def save_result(
    kind: str, version: int, table: Table, entries: Iterable[tuple[Product | Function | None, Choice | FunctionChoice, dict[str, Any]]]
) -> dict[str, Any]:
    """Return a result as plain values: the table, the different products or functions and choices, and an entry for each row.

    Args:
        kind: Kind of the file.
        version: Version of its format.
        table: Table of the result.
        entries: Product or function, choice and further members of each row.
    """
    products, choices = Numbering(), Numbering()
    numbered = []
    for product, choice, members in entries:
        is_function = isinstance(product, Function)
        plain = None if product is None else function_to_dict(product) if is_function else product_to_dict(product)
        number = None if plain is None else products.number(plain)
        numbered.append({"product": number, "choice": choices.number(saved_choice(choice, is_function)), **members})
    plain = table.to_dict()
    records = plain.pop("records")
    plain |= {"products": products.values, "choices": choices.values, "entries": numbered, "records": records}
    return {"kind": kind, "version": version, **plain}


def read_number(value: Any, count: int) -> int:
    """Return a number of `Numbering` if it is one of `count` values. Raises DamagedFile."""
    if type(value) is not int or not 0 <= value < count:
        raise DamagedFile(f"got the number {str(value)[:80]}; expected one from 0 to {count - 1}")
    return value
