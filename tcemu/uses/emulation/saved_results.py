"""The products, functions and choices of a result as JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from jax import lax

from tcemu.base.plain_values import Codec, Codecs, field_types, from_plain, to_plain
from tcemu.base.provenance import function_name
from tcemu.base.results import SavedResult
from tcemu.base.saved_files import DamagedFile, check_members
from tcemu.operations.functional.kernel_values import KernelValue, kernel_from_dict, kernel_to_dict
from tcemu.uses.emulation.decisions import Choice
from tcemu.uses.emulation.function_choices import FunctionChoice
from tcemu.uses.emulation.function_patterns import FUNCTIONS
from tcemu.uses.emulation.policies import DTYPE_CODECS, choice_from_dict, choice_to_dict
from tcemu.uses.emulation.survey import Function, Product


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


# ---- products and functions


def _write_axes(numbers: Any) -> dict[str, Any]:
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


def _read_axes(axes: Any) -> Any:
    if "convolution" in axes:
        return lax.ConvDimensionNumbers(*_nested_tuples(check_members("axes", axes, ("convolution",))["convolution"]))
    if "ragged" in axes:
        return lax.RaggedDotDimensionNumbers(_nested_tuples(axes["dot"]), axes["ragged"], axes["group"])
    return _nested_tuples(check_members("axes", axes, ("dot",))["dot"])


CODECS = {**DTYPE_CODECS, field_types(Product)["dimension_numbers"]: Codec(_write_axes, _read_axes)}


def computed_to_dict(computed: Product | Function) -> dict[str, Any]:
    """Convert a product or a function to plain values."""
    plain = to_plain(computed, CODECS)
    return {"function": plain} if isinstance(computed, Function) else plain


def computed_from_dict(data: Any) -> Product | Function:
    """Convert the plain values of `computed_to_dict`. Raises ValueError, TypeError or LookupError."""
    if not isinstance(data, dict) or set(data) != {"function"}:
        return from_plain("product", Product, data, CODECS)
    function = from_plain("function", Function, data["function"], CODECS)
    if function.kind not in FUNCTIONS:
        raise DamagedFile(f"function.kind: got {function.kind[:80]!r}; expected one of {', '.join(FUNCTIONS)}")
    return function


# ---- choices


def choice_to_plain(choice: Choice | FunctionChoice) -> Any:
    """Convert a choice to plain values; a function to its name. A text is the name of a kernel."""
    if isinstance(choice, KernelValue | str):
        return {"kernel": kernel_to_dict(choice)}
    if isinstance(choice, SavedFunction):
        return {"function": choice.name}
    try:
        return choice_to_dict(choice)
    except TypeError:
        return {"function": function_name(choice)}


def choice_from_plain(data: Any) -> Any:
    """Convert the plain values of `choice_to_plain` to their choice."""
    if isinstance(data, dict) and set(data) == {"kernel"}:
        return kernel_from_dict(data["kernel"])
    if isinstance(data, dict) and set(data) == {"function"} and isinstance(data["function"], str):
        return SavedFunction(data["function"])
    return choice_from_dict(data)


class Numbering:
    """The different values of a result, each saved once; fields have their numbers."""

    def __init__(self, write: Callable[[Any], Any], read: Callable[[Any], Any] | None = None, saved: Sequence[Any] = ()) -> None:
        self.write, self.saved, self.values = write, list(saved), [] if read is None else list(map(read, saved))
        self._numbers: dict[str, int] = {}

    def number(self, value: Any) -> int | None:
        """Return the number of a value, a new one if it was not seen; None for None."""
        if value is None:
            return None
        plain = self.write(value)
        text = json.dumps(plain, sort_keys=True)
        if text not in self._numbers:
            self._numbers[text] = len(self.saved)
            self.saved.append(plain)
        return self._numbers[text]

    def value(self, number: Any) -> Any:
        """Return the value of a number, None for None. Raises DamagedFile."""
        if number is None:
            return None
        if type(number) is not int or not 0 <= number < len(self.values):
            raise DamagedFile(f"got the number {str(number)[:80]}; expected one from 0 to {len(self.values) - 1}")
        return self.values[number]


class NumberedResult(SavedResult):
    """Base class of results whose products, functions and choices are saved once each."""

    def to_dict(self) -> dict[str, Any]:
        """Return the table, the fields, the products and the choices as plain values."""
        products, choices = Numbering(computed_to_dict), Numbering(choice_to_plain)
        members = self.to_members(_numbered(products, choices))
        return members | {"products": products.saved, "choices": choices.saved}

    @classmethod
    def from_members(cls, data: dict[str, Any], codecs: Codecs | None = None) -> Self:
        products = Numbering(computed_to_dict, computed_from_dict, data["products"])
        choices = Numbering(choice_to_plain, choice_from_plain, data["choices"])
        return super().from_members(data, {**(codecs or {}), **_numbered(products, choices)})


def _numbered(products: Numbering, choices: Numbering) -> Codecs:
    computed, chosen = Codec(products.number, products.value), Codec(choices.number, choices.value)
    return dict.fromkeys((Product | None, Function | None, Product | Function), computed) | dict.fromkeys(
        (Choice, KernelValue | str | None, Choice | FunctionChoice), chosen
    )
