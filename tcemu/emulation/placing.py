"""A recipe in a product whose operands have roles: which of its recipes it is, and which operand is A."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from chex import PRNGKey

from tcemu.linalg.dot_general import DotGeneral, dot_general
from tcemu.linalg.recipes import Recipe
from tcemu.quantize.operands import Quantizer

PLACES = {  # roles of (lhs, rhs) -> which recipe's product it is, and which operand is A: D = A·B, dA = g·Bᵀ, dB = Aᵀ·g
    ("activation", "weight"): ("D", "lhs"),
    ("weight", "activation"): ("D", "rhs"),
    ("gradient", "weight"): ("dA", "lhs"),
    ("weight", "gradient"): ("dA", "rhs"),
    ("activation", "gradient"): ("dB", "lhs"),
    ("gradient", "activation"): ("dB", "rhs"),
}
MIRRORED = {"row": "column", "column": "row"}


def placed(recipe: Recipe, roles: tuple[str, str], key: Callable[[], PRNGKey] | None = None) -> tuple[DotGeneral, str]:
    """The recipe as it takes part in a product with these roles, and that in words.

    A product with a gradient among its operands gets the recipe's own for gradients, if it has recipes for them. Where the roles do not
    tell, lhs is A. key: gives the product's random bits, where the recipe rounds stochastically.
    """
    which, a = PLACES.get(roles, ("dA" if "gradient" in roles else "D", "lhs"))
    name = recipe.name or f"{recipe.op} on {recipe.target}"
    if which != "D" and recipe.gradients is not None:
        recipe, name = recipe.gradients[("dA", "dB").index(which)], f"{name}, {which}"
    random = key() if key is not None and recipe.stochastic else None
    if symmetric(recipe):
        return dot_general(recipe, key=random), name
    return dot_general(recipe, key=random, a=a), name + ("" if a == "lhs" else ", A is rhs")


def undecided(recipe: Recipe, roles: tuple[str, str]) -> bool:
    """It matters which operand is A, and the roles do not tell."""
    if roles in PLACES:
        return False
    gradients = recipe.gradients if "gradient" in roles else None
    return not all(symmetric(part) for part in gradients or (recipe,))


def symmetric(recipe: Recipe) -> bool:
    """D is the same whichever operand is A, and so are its gradients."""
    forward = recipe.op.a == recipe.op.b and recipe.a == _mirrored(recipe.b)
    if recipe.gradients is None:
        return forward
    da, db = recipe.gradients
    return forward and (da.op.a, da.op.b, da.a, da.b) == (db.op.b, db.op.a, _mirrored(db.b), _mirrored(db.a))


def _mirrored(quantizer: Quantizer) -> Quantizer:
    """The same of the other operand."""
    return replace(quantizer, scaling=MIRRORED.get(quantizer.scaling, quantizer.scaling))
