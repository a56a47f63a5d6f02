"""Policies: which product is evaluated by what."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from chex import PRNGKey
from jax import Array
from jax.typing import DTypeLike

from tcemu.emulation.placing import placed, undecided
from tcemu.emulation.products import Product
from tcemu.linalg.recipes import Recipe, as_recipe

DotGeneralLike = Callable[..., Array]  # takes the arguments of jax.lax.dot_general
Choice = Recipe | str | DotGeneralLike | None  # a string: the name of a recipe


@dataclass(frozen=True)
class Where:
    """The products that a rule is for: those that fit every field that is given.

    name: a pattern for the product's name, where "*" stands for anything (`fnmatch`). parameter: the same for the path of a parameter that
    its weights come from, as "layers/0/*". role: what one operand is, "activation", "weight" or "gradient"; or a pair, what both are, in
    either order. shape: of an operand, None for any size, as (None, 128). dtype: of an operand. primitive: "dot_general" or another.
    It is a function from a `Product` to a bool; so is any other that a rule may have in its place.
    """

    name: str | None = None
    parameter: str | None = None
    role: str | tuple[str, str] | None = None
    shape: tuple[int | None, ...] | None = None
    dtype: DTypeLike | None = None
    primitive: str | None = None

    def __call__(self, product: Product) -> bool:
        wanted = (self.role,) if isinstance(self.role, str) else self.role or ()
        shapes, dtypes = (product.lhs_shape, product.rhs_shape), (product.lhs_dtype, product.rhs_dtype)
        return (
            (self.name is None or fnmatchcase(product.name, self.name))
            and (self.parameter is None or any(fnmatchcase(path, self.parameter) for path in product.parameters))
            and (sorted(wanted) == sorted(product.roles) if len(wanted) == 2 else all(role in product.roles for role in wanted))
            and (self.shape is None or any(_fits(self.shape, shape) for shape in shapes))
            and (self.dtype is None or any(jnp.dtype(dtype) == jnp.dtype(self.dtype) for dtype in dtypes))
            and (self.primitive is None or product.primitive == self.primitive)
        )

    def __repr__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return f"Where({', '.join(f'{name}={value!r}' for name, value in given if value is not None)})"


def _fits(wanted: Sequence[int | None], shape: Sequence[int]) -> bool:
    return len(wanted) == len(shape) and all(want in (None, size) for want, size in zip(wanted, shape, strict=True))


@runtime_checkable
class Planned(Protocol):
    """A policy that must know all products before it decides on one, as "the first and the last" does."""

    def plan(self, products: Sequence[Product]) -> Callable[[Product], Choice]: ...


Pattern = str | re.Pattern[str] | Callable[[Product], bool]
Rules = Mapping[Pattern, Choice] | Sequence[tuple[Pattern, Choice]]
Policy = Recipe | str | Callable[[Product], Choice] | Planned | Rules | None


@dataclass(frozen=True)
class Decision:
    """What becomes of a product.

    run: its evaluation, or None where it is left as it is; choice: what the policy gave; why: in words. undecided: the recipe treats its
    two operands differently, and the product does not show which is which.
    """

    run: DotGeneralLike | None
    choice: Choice
    why: str
    undecided: bool = False


def decide(policy: Policy, product: Product, convolutions: bool, key: Callable[[], PRNGKey] | None = None) -> Decision:
    """The policy's decision. key: gives the product's random bits, to a recipe that rounds stochastically.

    Raises TypeError for a choice that is no Recipe, callable or None, ValueError where a key is missing.
    """
    choice, why = _chosen(policy, product)
    choice = as_recipe(choice) if isinstance(choice, str) else choice
    if choice is not None and product.primitive == "conv_general_dilated" and not convolutions:
        choice, why = None, "a convolution; convolutions=True takes it as a product of patches"
    if choice is None:
        return Decision(run=None, choice=None, why=why)
    if isinstance(choice, Recipe):
        if choice.stochastic and key is None:
            raise ValueError(
                f"policy: for {product} it gave {choice.name or 'a recipe'}, which rounds stochastically and needs random bits: give key= "
                "(a jax.random key)"
            )
        run, why = placed(choice, product.roles, key if choice.stochastic else None)
        return Decision(run=run, choice=choice, why=why, undecided=undecided(choice, product.roles))
    if not callable(choice):
        raise TypeError(f"policy: for {product} it gave {choice!r}; wanted a Recipe, a callable like jax.lax.dot_general, or None")
    return Decision(run=choice, choice=choice, why=getattr(choice, "__name__", None) or str(choice))


def _chosen(policy: Policy, product: Product) -> tuple[Choice, str]:
    if policy is None:
        return None, "there is no policy"
    if callable(policy) and not isinstance(policy, Recipe):
        return policy(product), "the policy leaves it"
    if not product.is_float:
        return None, "not of real floats, which a policy in short form passes by"
    if not product.is_contraction:
        return None, "no contraction: nothing is summed, which a policy in short form passes by"
    if isinstance(policy, Recipe):
        return policy, ""
    assert isinstance(policy, tuple)  # as `checked` leaves rules
    for pattern, choice in policy:
        if fits(pattern, product):
            return choice, f"the rule for {_shown(pattern)} leaves it"
    return None, "no rule fits"


def choice_of(policy: Policy, product: Product) -> Choice:
    """What the policy chooses for a product."""
    return _chosen(policy, product)[0]


def fits(pattern: Pattern, product: Product) -> bool:
    """A rule's pattern is for this product: a glob for its name or the path of a parameter, a regular expression that is found in one of
    them, or a function."""
    if isinstance(pattern, str):
        return any(fnmatchcase(text, pattern) for text in (product.name, *product.parameters))
    if isinstance(pattern, re.Pattern):
        return any(pattern.search(text) for text in (product.name, *product.parameters))
    return bool(pattern(product))


def _shown(pattern: Pattern) -> str:
    return repr(pattern.pattern if isinstance(pattern, re.Pattern) else pattern)


def checked(policy: Policy) -> Policy:
    """The policy itself, rules as a tuple of pairs, recipes that are named as recipes.

    Raises TypeError for anything that is no policy, and as `tcemu.recipe` for a name.
    """
    if isinstance(policy, str):
        return as_recipe(policy)
    if policy is None or isinstance(policy, Recipe | Planned) or callable(policy):
        return policy
    if isinstance(policy, Mapping | Sequence):
        rules: tuple[Any, ...] = tuple(policy.items() if isinstance(policy, Mapping) else policy)
        pairs = all(isinstance(rule, tuple | list) and len(rule) == 2 for rule in rules)
        if pairs and all(isinstance(pattern, str | re.Pattern) or callable(pattern) for pattern, _ in rules):
            return tuple((pattern, as_recipe(choice) if isinstance(choice, str) else choice) for pattern, choice in rules)
    raise TypeError(
        f"policy: got {policy!r}; wanted a Recipe, a function from a Product to a Recipe, a callable like jax.lax.dot_general or None, "
        "or rules: a dict, or a list of pairs, from a pattern for names, as '*attention*', a regular expression or a "
        "function from a Product to a bool, as tcemu.policies.Where(role='weight'), to one of these"
    )


def planned(policy: Policy, products: Iterable[Product]) -> Policy:
    """The policy for a program with these products."""
    return policy.plan(tuple(products)) if isinstance(policy, Planned) else policy
