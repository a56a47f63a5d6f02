"""Policies: which product of a function is computed by which recipe.

`tcemu.emulate`, `tcemu.compare` and `tcemu.torch.emulate` take a policy in one of four forms:

- a `Recipe`, or its name ("bf16", "fp8 on H100"), for every product;
- rules: a dict, or a list of pairs, from a pattern to a choice. The first rule that matches counts. A pattern is a string for the product's
  name or scope or the path of a parameter, in which "*" stands for anything (`fnmatch`), a regular expression, or a function from a
  `Product` to a bool, as `Where`;
- a function from a `Product` to a choice;
- a function of this module, which restricts a policy to some layers as libraries and papers do.

A choice is a `Recipe`, the name of one, a callable with the signature of `jax.lax.dot_general`, or None, which leaves the product as it is.
A choice for a ragged product that is no Recipe is called in a loop over the groups, each time with full arrays in which the rows of all
other groups are 0.

`to_json` and `from_json` save every policy that consists of values. They refuse functions. `functions_to_json` and `functions_from_json`
save another policy, that for softmaxes, norms and activations, which is the argument `functions`. Its text is separate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from tcemu.base.plain_values import Codec, Codecs, from_plain, to_plain
from tcemu.base.provenance import function_name
from tcemu.base.saved_files import DamagedFile, check_members, check_saved, parse_json
from tcemu.operations.functional.kernel_values import kernel_from_dict, kernel_to_dict
from tcemu.operations.products.dot_general import DotGeneral
from tcemu.operations.products.recipe_json import construct, recipe_from_dict, recipe_to_dict
from tcemu.operations.products.recipe_kinds import find_kind, registered_kinds
from tcemu.operations.products.recipes import Recipe
from tcemu.uses.emulation.decisions import Choice, Policy, Where, as_policy, choose, plan_policy, policy_note
from tcemu.uses.emulation.function_choices import FunctionPolicy, as_function_policy
from tcemu.uses.emulation.survey import Product

__all__ = ["Where", "from_json", "functions_from_json", "functions_to_json", "linear_only", "skip_attention", "skip_ends", "to_json"]


@dataclass(frozen=True)
class FilteredPolicy:
    """A policy for the products of one program that a test selects; the others are left."""

    policy: Policy
    keeps: Callable[[Product], bool]

    def __call__(self, product: Product) -> Choice:
        return choose(self.policy, product) if self.keeps(product) else None

    def note(self, product: Product) -> str:
        return policy_note(self.policy, product) if self.keeps(product) else ""


@dataclass(frozen=True)
class RestrictedPolicy:
    """A policy for some of the products; the others are left."""

    policy: Policy
    make_filter: Callable[[Sequence[Product]], Callable[[Product], bool]]  # from a program's products to a test of each of them
    name: str  # name of the function that made it
    arguments: Mapping[str, int] = field(default_factory=dict)  # the function's other arguments

    def plan(self, products: Sequence[Product]) -> Callable[[Product], Choice]:
        return FilteredPolicy(plan_policy(self.policy, products), self.make_filter(products))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join([repr(self.policy), *(f'{name}={value}' for name, value in self.arguments.items())])})"


def linear_only(policy: Policy) -> Policy:
    """Restrict a policy to products with a weight and their gradients; all others are left, attention's among them.

    NVIDIA's TransformerEngine does so under `fp8_autocast`: its attention stays in the type of its inputs unless another is requested.
    `skip_attention` describes how the products of a gradient are recognised in `emulate(jax.grad(fn), ...)`.

    Args:
        policy: A policy in any form.

    Returns:
        The restricted policy.
    """
    return RestrictedPolicy(as_policy(policy), lambda products: lambda p: "weight" in p.roles or _is_weight_gradient(p), "linear_only")


def skip_attention(policy: Policy) -> Policy:
    """Leave products of two activations and their gradients, and use the policy for all others.

    In `emulate(jax.grad(fn), ...)` a product of a gradient and an activation counts as a weight's gradient if it has no batch axes, and as
    attention's if it has some, the heads.

    Args:
        policy: A policy in any form.

    Returns:
        The restricted policy.

    Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.1.
    """

    def keeps(product: Product) -> bool:
        attention = product.roles == ("activation", "activation") or set(product.roles) == {"activation", "gradient"}
        return not attention or _is_weight_gradient(product)

    return RestrictedPolicy(as_policy(policy), lambda products: keeps, "skip_attention")


def skip_ends(policy: Policy, *, first: int = 1, last: int = 1) -> Policy:
    """Leave the first and the last layers and the gradients of their inputs, and use the policy for all others.

    A layer is a product of data and a weight; layers count in the order of the program, each weight once. In `emulate(jax.grad(fn), ...)`
    the gradients of these layers' weights cannot be distinguished from others and are not left; `jax.grad(emulate(fn, ...))` leaves them
    too.

    Args:
        policy: A policy in any form.
        first: Number of layers to leave at the beginning.
        last: Number of layers to leave at the end.

    Returns:
        The restricted policy.

    Raises:
        ValueError: A number is negative, or no integer.

    Source: arXiv 1812.08011 (both ends); arXiv 2509.25149 (mostly the last layers).
    """
    for name, count in (("first", first), ("last", last)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"{name}={count!r}: expected a number of layers, 0 or more")

    def keeps(products: Sequence[Product]) -> Callable[[Product], bool]:
        layers = list(dict.fromkeys(p.parameters for p in products if p.parameters and "activation" in p.roles))
        ends = {*layers[:first], *layers[max(len(layers) - last, 0) :]}
        return lambda product: product.parameters not in ends

    return RestrictedPolicy(as_policy(policy), keeps, "skip_ends", {"first": first, "last": last})


def _is_weight_gradient(product: Product) -> bool:
    batched = isinstance(product.dimension_numbers, tuple) and any(product.dimension_numbers[1])
    return set(product.roles) == {"activation", "gradient"} and not (product.primitive == "dot_general" and batched)


# ---- policies as JSON

POLICY_KIND, POLICY_VERSION = "tcemu policy", 1
FUNCTIONS_KIND, FUNCTIONS_VERSION = "tcemu policy for functions", 1
MAX_POLICY_NESTING = 16  # restrictions of restrictions
RESTRICTIONS: dict[str, tuple[Callable[..., Policy], tuple[str, ...]]] = {  # functions that restrict a policy, and their other arguments
    "linear_only": (linear_only, ()),
    "skip_attention": (skip_attention, ()),
    "skip_ends": (skip_ends, ("first", "last")),
}
SAVED_FLAGS = re.ASCII | re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE | re.UNICODE
DTYPES = Codec(
    lambda dtype: None if dtype is None else jnp.dtype(dtype).name,
    lambda name: None if name is None else jnp.dtype(from_plain("dtype", str, name)),
)
DTYPE_CODECS: Codecs = {DTypeLike: DTYPES, DTypeLike | None: DTYPES}
# kinds of policies that other modules define. A policy of that kind has `saved_kind` and `to_dict()`; the module has `policy_from_dict`.
# The module is imported when a file names the kind, since it stands on this one
POLICY_MODULES = {"library_policy": "tcemu.uses.replay.kernel_profiles"}


def to_json(policy: Policy, indent: int | None = None) -> str:
    """Return a policy for products as JSON. `from_json` reads it; `functions_to_json` saves the argument `functions`.

    Args:
        policy: A policy in any form but a function: a recipe or its name, rules whose patterns are strings, regular expressions or `Where`,
            None, a policy of this module, or `tcemu.replay.library_policy(...)`. A choice may also be a `tcemu.dot_general(...)` without a
            key.
        indent: Spaces per level, or None for one line.

    Raises:
        TypeError: The policy or a part of it is a function, or holds a random key. The message names it.
    """
    return json.dumps({"kind": POLICY_KIND, "version": POLICY_VERSION, "policy": policy_to_dict(as_policy(policy))}, indent=indent)


def from_json(text: str) -> Policy:
    """Read the policy of `to_json`.

    Args:
        text: JSON text. It is not trusted: unknown names and values are rejected.

    Returns:
        A policy that decides as the saved one does. Recipes and rules equal the saved ones.

    Raises:
        ValueError: The text is no policy of this version of the format, or its values are impossible.
        NotModelled: It is a library's policy, and this version of tcemu has no such measurement.
    """
    data = check_saved("a policy", parse_json(text), POLICY_KIND, POLICY_VERSION, ("policy",))
    return policy_from_dict(data["policy"])


def functions_to_json(functions: FunctionPolicy, indent: int | None = None) -> str:
    """Return a policy for functions, the argument `functions` of `emulate` and `compare`, as JSON. `functions_from_json` reads it.

    Args:
        functions: The name of kernels, rules whose patterns are strings or regular expressions, or None.
        indent: Spaces per level, or None for one line.

    Raises:
        TypeError: The policy or a pattern is a function, which the message names, or it is no policy for functions.
        ValueError: A name is no kernel's.
    """
    plain = _functions_to_dict(as_function_policy(functions))
    return json.dumps({"kind": FUNCTIONS_KIND, "version": FUNCTIONS_VERSION, "functions": plain}, indent=indent)


def functions_from_json(text: str) -> FunctionPolicy:
    """Read the policy for functions of `functions_to_json`.

    Args:
        text: JSON text. It is not trusted: unknown names and values are rejected.

    Returns:
        A policy that equals the saved one, with rules as a tuple of pairs.

    Raises:
        ValueError: The text is no policy for functions of this version of the format, or a value is impossible.
    """
    data = check_saved("a policy for functions", parse_json(text), FUNCTIONS_KIND, FUNCTIONS_VERSION, ("functions",))["functions"]
    return as_function_policy(_functions_from_dict(data))


def _functions_to_dict(functions: FunctionPolicy) -> Any:
    if functions is None or isinstance(functions, str):
        return functions
    if callable(functions):
        raise TypeError(f"functions: {function_name(functions)} is a function, which is no value and cannot be saved; use rules")
    assert isinstance(functions, tuple)  # as `as_function_policy` leaves rules
    rules = []
    for pattern, choice in functions:
        if not isinstance(pattern, str | re.Pattern):
            raise TypeError(f"functions: the pattern {function_name(pattern)} is a function, which cannot be saved; use a string")
        rules.append([_pattern_to_dict(pattern), None if choice is None else kernel_to_dict(choice)])
    return {"rules": rules}


def _functions_from_dict(data: Any) -> FunctionPolicy:
    if data is None or isinstance(data, str):
        return data
    if not isinstance(data, dict):
        raise DamagedFile(f"functions: got {str(data)[:80]}; expected null, the name of kernels, or an object with rules")
    rules = _rules_of_pairs("functions", data)
    for pattern, _ in rules:
        if not isinstance(pattern, str) and not (isinstance(pattern, dict) and "regex" in pattern):
            raise DamagedFile(f"functions: got the pattern {str(pattern)[:80]}; expected text, or an object with regex")
    return tuple((_pattern_from_dict(pattern), None if kernel is None else kernel_from_dict(kernel)) for pattern, kernel in rules)


def policy_to_dict(policy: Policy) -> Any:
    """Convert a policy, as `as_policy` returns it, to plain values. Raises TypeError for a function."""
    if isinstance(policy, tuple):
        return {"rules": [[_pattern_to_dict(pattern), choice_to_dict(choice)] for pattern, choice in policy]}
    if isinstance(policy, RestrictedPolicy):
        return {"restriction": policy.name, "arguments": dict(policy.arguments), "policy": policy_to_dict(policy.policy)}
    kind = getattr(policy, "saved_kind", None)
    if kind in POLICY_MODULES:
        return {kind: policy.to_dict()}  # type: ignore[union-attr]
    return choice_to_dict(policy)  # type: ignore[arg-type]


def choice_to_dict(choice: Choice) -> Any:
    """Convert the choice for one product to plain values. Raises TypeError for a function."""
    if choice is None:
        return None
    if isinstance(choice, Recipe):
        return {"recipe": recipe_to_dict(choice)}
    if isinstance(choice, DotGeneral):
        if choice.key is not None:
            raise TypeError(f"policy: {choice} holds a random key, which is not saved; give the recipe and the key of the call apart")
        kind = find_kind(choice.recipe)
        assert kind is not None
        return {kind.saved_as: kind.to_dict(choice.recipe), "a": choice.a, "name": choice.name}
    raise TypeError(f"policy: {function_name(choice)} is a function, which is no value and cannot be saved; use recipes, rules or Where")


def _pattern_to_dict(pattern: Any) -> Any:
    if isinstance(pattern, str):
        return pattern
    if isinstance(pattern, re.Pattern):
        if not isinstance(pattern.pattern, str):
            raise TypeError(f"policy: the pattern {pattern.pattern!r} is of bytes, and names are text")
        return {"regex": pattern.pattern, "flags": pattern.flags & SAVED_FLAGS}
    if isinstance(pattern, Where):
        return {"where": to_plain(pattern, DTYPE_CODECS)}
    raise TypeError(f"policy: the pattern {function_name(pattern)} is a function, which cannot be saved; use tcemu.policies.Where")


def policy_from_dict(data: Any, depth: int = 0) -> Policy:
    """Convert the plain values of `policy_to_dict` to their policy. Raises ValueError."""
    if depth > MAX_POLICY_NESTING:
        raise DamagedFile(f"policy: restrictions are nested {depth} deep; expected at most {MAX_POLICY_NESTING}")
    if isinstance(data, dict) and "rules" in data:
        return tuple((_pattern_from_dict(pattern), choice_from_dict(choice)) for pattern, choice in _rules_of_pairs("policy", data))
    if isinstance(data, dict) and "restriction" in data:
        members = check_members("policy", data, ("restriction", "arguments", "policy"))
        name = members["restriction"]
        if not isinstance(name, str) or name not in RESTRICTIONS:
            raise DamagedFile(f"policy.restriction: got {str(name)[:80]!r}; expected one of {', '.join(RESTRICTIONS)}")
        restrict, names = RESTRICTIONS[name]
        arguments = check_members("policy.arguments", members["arguments"], names)
        inner = policy_from_dict(members["policy"], depth + 1)
        return construct("policy.arguments", lambda: restrict(inner, **arguments))
    if isinstance(data, dict) and len(data) == 1 and next(iter(data)) in POLICY_MODULES:
        ((kind, inner),) = data.items()
        return import_module(POLICY_MODULES[kind]).policy_from_dict(inner)
    choice: Any = choice_from_dict(data)
    return choice


def _rules_of_pairs(name: str, data: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return the rules of an object that has only these, as pairs of plain values. Raises ValueError."""
    return from_plain(f"{name}.rules", list[tuple[Any, Any]], check_members(name, data, ("rules",))["rules"])


def choice_from_dict(data: Any) -> Choice:
    """Convert the plain values of `choice_to_dict` to their choice. Raises ValueError."""
    if data is None:
        return None
    kinds = {kind.saved_as: kind for kind in registered_kinds()}
    if not isinstance(data, dict) or not data.keys() & {"recipe", *kinds}:
        raise DamagedFile(f"policy: got {str(data)[:80]}; expected null, or an object with recipe, {', '.join(kinds)} or rules")
    if "recipe" in data:
        return recipe_from_dict(Recipe, check_members("choice", data, ("recipe",))["recipe"])
    saved_as = next(name for name in kinds if name in data)
    members = check_members("choice", data, (saved_as, "a", "name"))
    if members["a"] not in ("lhs", "rhs") or not isinstance(members["name"], str):
        raise DamagedFile(f"choice: got a={str(members['a'])[:80]!r}, name={str(members['name'])[:80]!r}; expected lhs or rhs, and text")
    return DotGeneral(kinds[saved_as].from_dict(members[saved_as]), None, members["a"], members["name"])


def _pattern_from_dict(data: Any) -> Any:
    if isinstance(data, str):
        return data
    if isinstance(data, dict) and "regex" in data:
        members = check_members("pattern", data, ("regex", "flags"))
        text, flags = members["regex"], members["flags"]
        if not isinstance(text, str) or type(flags) is not int or not flags >= 0 or flags & ~SAVED_FLAGS:
            raise DamagedFile(f"pattern: got {str(data)[:80]}; expected a regular expression and its flags")
        try:
            return re.compile(text, flags)
        except (re.error, ValueError, RecursionError, OverflowError) as error:
            raise DamagedFile(f"pattern: {text[:80]!r} is no regular expression: {error}") from None
    if not isinstance(data, dict) or "where" not in data:
        raise DamagedFile(f"pattern: got {str(data)[:80]}; expected text, or an object with regex or where")
    where = check_members("pattern", data, ("where",))["where"]
    return construct("where", lambda: from_plain("where", Where, where, DTYPE_CODECS))
