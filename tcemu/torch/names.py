"""Names for what a product is computed by: torch's operators take words, and no Python objects."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Any

import torch

from tcemu.linalg.dot_general import DotGeneral
from tcemu.linalg.recipes import Recipe, as_recipe, recipe

_known: dict[str, Any] = {}
_names: dict[Hashable, str] = {}
_lock = Lock()


@torch.compiler.assume_constant_result
def name_of(what: Any) -> str:
    """The name by which operators know a recipe, a kernel recipe, a `tcemu.dot_general`, or another callable like it.

    Equal ones have one name. It holds in this process; the name of a recipe in use, as "fp8 on sm_90a", holds everywhere.
    Raises TypeError for what does not hash, as a recipe of arrays, and ValueError for a word that names no recipe.
    """
    if isinstance(what, str) and what in _known:
        return what
    if isinstance(what, str):
        what = as_recipe(what)
    try:
        key = (type(what), what, getattr(what, "key", None) is None)
        hash(key)
    except TypeError:
        raise TypeError(
            f"recipe: {what!r} does not hash, as a recipe whose fields are arrays; tcemu.torch takes a recipe of plain numbers"
        ) from None
    with _lock:
        if key not in _names:
            said = _in_use(what) or f"{getattr(what, 'name', '') or getattr(what, '__name__', type(what).__name__)} #{len(_known)}"
            _known[said], _names[key] = what, said
        return _names[key]


def _in_use(what: Any) -> str | None:
    """The name and target of a recipe that is one of those in use."""
    if not (isinstance(what, Recipe) and what.name):
        return None
    try:
        same = recipe(what.name, what.target) == what
    except (TypeError, ValueError):
        return None
    return f"{what.name} on {what.target}" if same else None


def named(name: str) -> Any:
    """What has this name. Raises ValueError for one that was given in another process."""
    if name not in _known:
        try:
            return as_recipe(name)
        except ValueError:
            raise ValueError(
                f"{name!r} names no recipe in use, and nothing in this process; names with '#' are given to a recipe at its first product, "
                "and hold in that process only"
            ) from None
    return _known[name]


def stochastic(what: Any) -> bool:
    """It rounds stochastically, and wants a seed."""
    return bool(getattr(what.recipe if isinstance(what, DotGeneral) else what, "stochastic", False))
