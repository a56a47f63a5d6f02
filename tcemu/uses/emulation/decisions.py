"""A policy's decision on one product: what computes it, and which operand is a recipe's A.

A policy is a recipe for every product, rules from patterns to choices, or a function; `tcemu.policies` describes the forms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from chex import PRNGKey
from jax.typing import DTypeLike

from tcemu.operations.products.dot_general import DotGeneral, dot_general
from tcemu.operations.products.matmul import parse_recipe
from tcemu.operations.products.recipe_kinds import AnyRecipe, find_kind
from tcemu.operations.products.recipes import Recipe
from tcemu.operations.quantize.quantizer import Quantizer
from tcemu.uses.emulation.primitives import DotGeneralLike
from tcemu.uses.emulation.survey import Function, Product

# ---- a recipe for a product whose operands have roles

PRODUCTS_BY_ROLES = {  # from the roles of (lhs, rhs) to the product of the recipe and the operand that is A: D = A·B, dA = g·Bᵀ, dB = Aᵀ·g
    ("activation", "weight"): ("D", "lhs"),
    ("weight", "activation"): ("D", "rhs"),
    ("gradient", "weight"): ("dA", "lhs"),
    ("weight", "gradient"): ("dA", "rhs"),
    ("activation", "gradient"): ("dB", "lhs"),
    ("gradient", "activation"): ("dB", "rhs"),
}
NO_RULE = "no rule matches"  # why a product is left
MIRRORED_SCALINGS = {"row": "column", "column": "row"}


def place_recipe(recipe: Recipe, roles: tuple[str, str], key: Callable[[], PRNGKey] | None = None) -> tuple[DotGeneral, str]:
    """Return the dot_general of a recipe for a product with these roles, and its name.

    A product with a gradient among its operands gets the recipe's recipe for gradients, if there is one. Where the roles do not decide, lhs
    is A. key: function that gives the product's random bits, if the recipe rounds stochastically.
    """
    which, a = PRODUCTS_BY_ROLES.get(roles, ("dA" if "gradient" in roles else "D", "lhs"))
    if recipe.op.sparse and which == "D" and "weight" in roles:
        a = ("lhs", "rhs")[roles.index("weight")]  # weights are pruned, never activations
    name = recipe.name or f"{recipe.op} on {recipe.target}"
    if which != "D" and recipe.gradients is not None:
        recipe, name = recipe.gradients[("dA", "dB").index(which)], f"{name}, {which}"
    random = key() if key is not None and recipe.is_stochastic else None
    if is_symmetric(recipe):
        return dot_general(recipe, key=random), name
    return dot_general(recipe, key=random, a=a), name + ("" if a == "lhs" else ", A is rhs")


def as_choice(choice: Choice) -> Recipe | DotGeneralLike | None:
    """Return a choice with names and recipes of other kinds than `Recipe` replaced by what computes the product.

    Other values are returned as they are. Only a `Recipe` has recipes for gradients: other kinds compute the products of gradients too.
    """
    recipe: Any = parse_recipe(choice) if isinstance(choice, str) else choice
    kind = find_kind(recipe)
    if kind is None or not kind.any_shape or isinstance(recipe, Recipe):
        return recipe
    return replace(dot_general(recipe), name=choice if isinstance(choice, str) else f"{recipe.name} on {recipe.target}")


def applied_recipe(choice: Choice, roles: tuple[str, str]) -> AnyRecipe | None:
    """Return what a choice computes a product of these roles by: the recipe, or its recipe for gradients. None for a function."""
    if isinstance(choice, DotGeneral):
        return choice.recipe
    if not isinstance(choice, Recipe):
        return None
    which, _ = PRODUCTS_BY_ROLES.get(roles, ("dA" if "gradient" in roles else "D", "lhs"))
    return choice if which == "D" or choice.gradients is None else choice.gradients[("dA", "dB").index(which)]


def is_undecided(recipe: Recipe, roles: tuple[str, str]) -> bool:
    """Return whether it matters which operand is A and the roles do not decide it."""
    if roles in PRODUCTS_BY_ROLES:
        return False
    gradients = recipe.gradients if "gradient" in roles else None
    return not all(is_symmetric(part) for part in gradients or (recipe,))


def is_symmetric(recipe: Recipe) -> bool:
    """Return whether D and its gradients are the same whichever operand is A."""
    forward = recipe.op.a == recipe.op.b and recipe.a == _mirror(recipe.b) and not recipe.op.sparse
    if recipe.gradients is None:
        return forward
    da, db = recipe.gradients
    return forward and (da.op.a, da.op.b, da.a, da.b) == (db.op.b, db.op.a, _mirror(db.b), _mirror(db.a))


def _mirror(quantizer: Quantizer) -> Quantizer:
    """Return the quantizer that does the same to the other operand."""
    return replace(quantizer, scaling=MIRRORED_SCALINGS.get(quantizer.scaling, quantizer.scaling))


# ---- policies

Choice = Recipe | AnyRecipe | str | DotGeneralLike | None  # a string is the name of a recipe


@dataclass(frozen=True)
class Where:
    """A rule's pattern: it matches the products that agree with every field that is given.

    It is a function from a `Product` to a bool; a rule may have any other such function in its place.

    Attributes:
        name: Pattern for the product's name or scope, in which "*" stands for anything (`fnmatch`).
        parameter: The same for the path of a parameter that a weight comes from, as "layers/0/*".
        role: Role of one operand, "activation", "weight" or "gradient"; or the roles of both, in either order.
        shape: Shape of an operand, with None for any size, as (None, 128).
        dtype: Dtype of an operand.
        primitive: "dot_general", "conv_general_dilated" or "ragged_dot_general".
    """

    name: str | None = None
    parameter: str | None = None
    role: str | tuple[str, str] | None = None
    shape: tuple[int | None, ...] | None = None
    dtype: DTypeLike | None = None
    primitive: str | None = None

    def __call__(self, product: Product) -> bool:
        """Return whether a product agrees with every field that is given."""
        roles = (self.role,) if isinstance(self.role, str) else self.role or ()
        shapes, dtypes = (product.lhs_shape, product.rhs_shape), (product.lhs_dtype, product.rhs_dtype)
        return (
            (self.name is None or any(fnmatchcase(text, self.name) for text in (product.name, product.scope)))
            and (self.parameter is None or any(fnmatchcase(path, self.parameter) for path in product.parameters))
            and (sorted(roles) == sorted(product.roles) if len(roles) == 2 else all(role in product.roles for role in roles))
            and (self.shape is None or any(_shape_matches(self.shape, shape) for shape in shapes))
            and (self.dtype is None or any(jnp.dtype(dtype) == jnp.dtype(self.dtype) for dtype in dtypes))
            and (self.primitive is None or product.primitive == self.primitive)
        )

    def __repr__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return f"Where({', '.join(f'{name}={value!r}' for name, value in given if value is not None)})"


def _shape_matches(pattern: Sequence[int | None], shape: Sequence[int]) -> bool:
    return len(pattern) == len(shape) and all(expected in (None, size) for expected, size in zip(pattern, shape, strict=True))


@runtime_checkable
class PlannedPolicy(Protocol):
    """A policy that must know all products of a program before it decides on one, such as `skip_ends`."""

    def plan(self, products: Sequence[Product]) -> Callable[[Product], Choice]: ...


@runtime_checkable
class AnnotatedPolicy(Protocol):
    """A policy that gives reports a note on its choice for a product, such as "not measured"; "" for no note."""

    def note(self, product: Product) -> str: ...


Pattern = str | re.Pattern[str] | Callable[[Product], bool]
Rules = Mapping[Pattern, Choice] | Sequence[tuple[Pattern, Choice]]
Policy = Recipe | AnyRecipe | str | Callable[[Product], Choice] | PlannedPolicy | Rules | None


@dataclass(frozen=True)
class Decision:
    """A policy's decision on a product."""

    dot_general: DotGeneralLike | None  # function that computes the product, or None if it is left unchanged
    choice: Choice  # the policy's choice
    reason: str  # name of the choice, or why the product is left
    undecided: bool = False  # whether the recipe treats its operands differently and the product does not show which is which


def decide(policy: Policy, product: Product, convolutions: bool, key: Callable[[], PRNGKey] | None = None) -> Decision:
    """Decide on a product by a policy.

    Args:
        policy: Policy as `as_policy` and `plan_policy` return it.
        product: Product to decide on.
        convolutions: Whether convolutions are products too.
        key: Function that gives the product's random bits to a recipe that rounds stochastically.

    Raises:
        TypeError: The choice is no Recipe, callable or None.
        ValueError: The recipe rounds stochastically and there is no key.
    """
    choice, why = _choice_and_reason(policy, product)
    choice = as_choice(choice)
    if choice is not None and product.primitive == "conv_general_dilated" and not convolutions:
        choice, why = None, "a convolution; convolutions=True takes it as a product of patches"
    if choice is None:
        return Decision(dot_general=None, choice=None, reason=why)
    if isinstance(choice, Recipe):
        if choice.is_stochastic and key is None:
            raise ValueError(
                f"policy: for {product} it gave {choice.name or 'a recipe'}, which rounds stochastically and needs random bits: give key= "
                "(a jax.random key) beside the policy"
            )
        run, why = place_recipe(choice, product.roles, key if choice.is_stochastic else None)
        why = ", ".join(filter(None, (why, policy_note(policy, product))))
        return Decision(dot_general=run, choice=choice, reason=why, undecided=is_undecided(choice, product.roles))
    if not callable(choice):
        raise TypeError(f"policy: for {product} it gave {choice!r}; expected a Recipe, a callable like jax.lax.dot_general, or None")
    return Decision(dot_general=choice, choice=choice, reason=getattr(choice, "__name__", None) or str(choice))


def policy_note(policy: Policy, product: Product) -> str:
    """Return what a policy says about its choice, for the report; "" if it says nothing."""
    return policy.note(product) if isinstance(policy, AnnotatedPolicy) else ""


def _choice_and_reason(policy: Policy, product: Product) -> tuple[Choice, str]:
    if policy is None:
        return None, "there is no policy"
    if callable(policy) and not isinstance(policy, Recipe):
        return policy(product), policy_note(policy, product) or "the policy leaves it"
    if not product.is_float:
        return None, "not of real floats; only a function as policy can take it"
    if not product.is_contraction:
        return None, "no contraction, nothing is summed; only a function as policy can take it"
    if isinstance(policy, Recipe):
        return policy, ""
    assert isinstance(policy, tuple)  # as `checked` leaves rules
    for pattern, choice in policy:
        if matches_pattern(pattern, product):
            return choice, f"the rule for {pattern_text(pattern)} leaves it"
    return None, NO_RULE


def choose(policy: Policy, product: Product) -> Choice:
    """Return the policy's choice for a product."""
    return _choice_and_reason(policy, product)[0]


def matches_pattern(pattern: str | re.Pattern[str] | Callable[[Any], bool], operation: Product | Function) -> bool:
    """Return whether a rule's pattern matches a product or a function.

    A string is a glob for its name, its scope, the path of a parameter or the kind of a function. A regular expression is searched for in
    them. A function decides itself.
    """
    texts = (operation.name, operation.scope, *operation.parameters, *([operation.kind] if isinstance(operation, Function) else []))
    if isinstance(pattern, str):
        return any(fnmatchcase(text, pattern) for text in texts)
    if isinstance(pattern, re.Pattern):
        return any(pattern.search(text) for text in texts)
    return bool(pattern(operation))


def pattern_text(pattern: str | re.Pattern[str] | Callable[[Any], bool]) -> str:
    """Return a rule's pattern as warnings show it."""
    return repr(pattern.pattern if isinstance(pattern, re.Pattern) else pattern)


def unused_rule_warnings(rules: Sequence[tuple[Any, Any]], operations: Sequence[Product | Function], kind: str, names: str) -> list[str]:
    """Return a warning for each rule whose pattern matches none of the operations.

    Args:
        rules: Pairs of a pattern and a choice.
        operations: The products or functions.
        kind: "product" or "function".
        names: The names of the operations.
    """
    unused = (pattern for pattern, _ in rules if not any(matches_pattern(pattern, operation) for operation in operations))
    return [f"the rule for {pattern_text(pattern)} matches no {kind}; the {kind}s are {names}" for pattern in unused]


def as_policy(policy: Policy) -> Policy:
    """Return the policy with rules as a tuple of pairs and names replaced by recipes.

    Raises:
        TypeError: It is no policy.
        ValueError: A name is no recipe's; see `tcemu.get_recipe`.
    """
    kind = find_kind(policy)
    if isinstance(policy, str) or (kind is not None and kind.any_shape):
        named = as_choice(policy)  # type: ignore[arg-type]
        return named if isinstance(named, Recipe) else (("*", named),)
    if isinstance(policy, DotGeneral):
        return (("*", policy),)
    if policy is None or isinstance(policy, Recipe | PlannedPolicy) or callable(policy):
        return policy
    rules = rule_pairs(policy)
    if rules is not None:
        return tuple((pattern, as_choice(choice)) for pattern, choice in rules)
    raise TypeError(
        f"policy: got {policy!r}; expected a Recipe, a function from a Product to a Recipe, a callable like jax.lax.dot_general or None, "
        "or rules: a dict, or a list of pairs, from a pattern for names, as '*attention*', a regular expression or a "
        "function from a Product to a bool, as tcemu.policies.Where(role='weight'), to one of these"
    )


def rule_pairs(policy: Any) -> tuple[tuple[Any, Any], ...] | None:
    """Return rules as pairs of a pattern and a choice; None for what is no rules."""
    if not isinstance(policy, Mapping | Sequence):
        return None
    rules: tuple[Any, ...] = tuple(policy.items() if isinstance(policy, Mapping) else policy)
    pairs = all(isinstance(rule, tuple | list) and len(rule) == 2 for rule in rules)
    is_pattern = lambda pattern: isinstance(pattern, str | re.Pattern) or callable(pattern)
    return tuple(map(tuple, rules)) if pairs and all(is_pattern(pattern) for pattern, _ in rules) else None


def plan_policy(policy: Policy, products: Iterable[Product]) -> Policy:
    """Return the policy for a program with these products."""
    return policy.plan(tuple(products)) if isinstance(policy, PlannedPolicy) else policy
