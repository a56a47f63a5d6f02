"""The kinds of recipes: how each is named, saved and multiplied, and what results say of it.

A kind is one record, which its module registers when it is imported. Everything that takes a recipe (`tcemu.matmul`, `dot_general`,
policies, `compare`, saved policies, tables of results) asks the record, so a new kind is one file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from chex import PRNGKey
from jax import Array
from jax.typing import DTypeLike

if TYPE_CHECKING:
    from tcemu.operations.products.recipes import Recipe

RecipeFacts = tuple[str | None, str | None, str | None, str | None]  # target, instruction, model, evidence
Evidence = Mapping[str, str] | None


class AnyRecipe(Protocol):
    """A value of a registered kind: `Recipe`, `WideRecipe`, `OzakiSliceRecipe`, `OzakiModularRecipe`, `KernelRecipe`, or your own."""

    def __hash__(self) -> int: ...


class ProductOperands(NamedTuple):
    """The arrays of a product, floats."""

    a: Array | np.ndarray  # [..., M, K]
    b: Array | np.ndarray  # [..., K, N]
    bias: Array | np.ndarray | None = None
    scale_a: Array | np.ndarray | None = None
    scale_b: Array | np.ndarray | None = None


class ProductCall(NamedTuple):
    """The arguments of `tcemu.matmul` besides the recipe."""

    operands: ProductOperands
    key: PRNGKey | None
    dtype: DTypeLike
    axis_name: str | None

    def forbid(self, *names: str, why: str) -> None:
        """Raise ValueError if one of the named arguments is given."""
        given = self.operands._asdict() | self._asdict()
        if any(given[name] is not None for name in names):
            raise ValueError(f"{', '.join(names)}: {why}; leave them out")


class RecipeKind(NamedTuple):
    """One kind of recipe."""

    saved_as: str  # its key in saved policies
    types: tuple[type, ...]
    find: Callable[[str], Any]  # the recipe that a text, with or without " on TARGET", names; None for any other text
    to_dict: Callable[[Any], dict[str, Any]]
    from_dict: Callable[[Any], Any]  # raises ValueError
    multiply: Callable[[Any, ProductCall], Array]
    facts: Callable[[Any, Evidence], RecipeFacts]
    plain: Callable[[Any], Recipe | None]  # the recipe whose arithmetic a result's evidence is about
    any_shape: bool = True  # it serves products of any shape, and has a name and a target


_KINDS: dict[str, RecipeKind] = {}


def register_kind(kind: RecipeKind) -> RecipeKind:
    """Make a kind of recipe known to everything that takes recipes.

    Args:
        kind: The kind. One of the same `saved_as` is replaced.
    """
    _KINDS[kind.saved_as] = kind
    return kind


def registered_kinds() -> tuple[RecipeKind, ...]:
    """Return all kinds, in the order of registration."""
    return tuple(_KINDS.values())


def find_kind(recipe: object) -> RecipeKind | None:
    """Return the kind of a value, or None if it is no recipe."""
    return next((kind for kind in _KINDS.values() if isinstance(recipe, kind.types)), None)
