"""A matrix product as a policy sees it, what was decided for each, and the table of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from tcemu.linalg.dot_general import DimensionNumbers, dot_general
from tcemu.linalg.recipes import Recipe
from tcemu.text import columns

DotGeneralLike = Callable[..., Array]  # takes the arguments of jax.lax.dot_general
Choice = Recipe | DotGeneralLike | None


@dataclass(frozen=True)
class Product:
    """One matrix product of a program, as a policy sees it.

    name: where it stands, as "encoder/mlp/dot_general": the jit functions, named scopes and loops around it. Where a name repeats, ".1",
    ".2" and so on follow it. index: that number, 0 for the first.
    primitive: "dot_general", "conv_general_dilated" or "ragged_dot_general". dimension_numbers, preferred_element_type: its parameters.
    lhs_shape, lhs_dtype, rhs_shape, rhs_dtype: the operands; shape, dtype: the result.
    repeats: how often the loops around it run it; None inside a `while`.
    """

    name: str
    index: int
    primitive: str
    lhs_shape: tuple[int, ...]
    lhs_dtype: DTypeLike
    rhs_shape: tuple[int, ...]
    rhs_dtype: DTypeLike
    dimension_numbers: DimensionNumbers | lax.ConvDimensionNumbers | lax.RaggedDotDimensionNumbers
    preferred_element_type: DTypeLike | None
    shape: tuple[int, ...]
    dtype: DTypeLike
    repeats: int | None = 1

    @property
    def is_float(self) -> bool:
        """Both operands and the result are real floats."""
        return all(jnp.issubdtype(dtype, jnp.floating) for dtype in (self.lhs_dtype, self.rhs_dtype, self.dtype))

    @property
    def is_contraction(self) -> bool:
        """It sums over an axis, be it of size 1. einsum("i,j->ij") and einsum("btd,btd->btd") do not: they only multiply elements."""
        if isinstance(self.dimension_numbers, lax.ConvDimensionNumbers):
            return True
        numbers = self.dimension_numbers
        (contracting, _), _ = numbers.dot_dimension_numbers if isinstance(numbers, lax.RaggedDotDimensionNumbers) else numbers
        return len(contracting) > 0

    def __str__(self) -> str:
        operands = f"{_array(self.lhs_dtype, self.lhs_shape)} · {_array(self.rhs_dtype, self.rhs_shape)}"
        return f"{self.name}: {operands} -> {_array(self.dtype, self.shape)}"


Policy = Recipe | Callable[[Product], Choice] | Sequence[tuple[str, Choice]] | None


def _array(dtype: DTypeLike, shape: Sequence[int]) -> str:
    return f"{jnp.dtype(dtype).name}[{','.join(map(str, shape))}]"


@dataclass(frozen=True)
class Decision:
    """What becomes of a product. run: its evaluation, or None where it is left as it is; choice: what the policy gave; why: in words."""

    run: DotGeneralLike | None
    choice: Choice
    why: str


def decide(policy: Policy, product: Product, convolutions: bool) -> Decision:
    """The policy's decision. Raises TypeError for a choice that is no Recipe, callable or None."""
    choice, why = _chosen(policy, product)
    if choice is not None and product.primitive == "conv_general_dilated" and not convolutions:
        choice, why = None, "a convolution; convolutions=True takes it as a product of patches"
    if choice is None:
        return Decision(run=None, choice=None, why=why)
    if isinstance(choice, Recipe):
        return Decision(run=dot_general(choice), choice=choice, why=choice.name or f"{choice.op} on {choice.target}")
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
    for pattern, choice in policy:
        if fnmatchcase(product.name, pattern):
            return choice, f"the rule for {pattern!r} leaves it"
    return None, "no pattern fits"


def checked(policy: Policy) -> Policy:
    """The policy itself, a list of rules as a tuple. Raises TypeError for anything that is no policy."""
    if policy is None or isinstance(policy, Recipe) or callable(policy):
        return policy
    if isinstance(policy, Sequence) and not isinstance(policy, str):
        rules = tuple(policy)
        if all(isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str) for rule in rules):
            return tuple((pattern, choice) for pattern, choice in rules)
    raise TypeError(
        f"policy: got {policy!r}; wanted a Recipe, a function from a Product to a Recipe, a callable like jax.lax.dot_general or None, "
        "or a list of pairs of a pattern for names, as '*attention*', and one of these"
    )


@dataclass(frozen=True)
class Entry:
    """A line of a report.

    name: that of the product, or of what hides products. product: None for the latter. replaced: whether it is emulated. why: by what it
    is, or why it is not.
    """

    name: str
    product: Product | None
    replaced: bool
    why: str


def unused(policy: Policy, entries: Sequence[Entry]) -> list[str]:
    """What to say of a policy in short form that replaced nothing, and of its rules that fit no product's name."""
    if policy is None or (callable(policy) and not isinstance(policy, Recipe)):
        return []
    products = [entry.product for entry in entries if entry.product is not None]
    names = ", ".join(dict.fromkeys(product.name for product in products[:8])) or "none"
    wanted = True
    lines = []
    if not isinstance(policy, Recipe):
        rules = [rule for rule in policy if isinstance(rule, tuple)]
        lines = [
            f"the rule for {pattern!r} fits no product; the products are {names}"
            for pattern, _ in rules
            if not any(fnmatchcase(product.name, pattern) for product in products)
        ]
        wanted = any(choice is not None for _, choice in rules) and not lines
    if wanted and not any(entry.replaced or entry.why == "it is emulated already" for entry in entries):
        why = "; ".join(dict.fromkeys(f"{entry.name}: {entry.why}" for entry in entries[:4])) or "it has no matrix products"
        lines.append(f"no product is replaced ({why}); .report(...) lists all")
    return lines


@dataclass(frozen=True, repr=False)
class Report:
    """What `emulate` replaces in a program and what it leaves, and why. A sequence of `Entry`; str() is a table."""

    entries: tuple[Entry, ...]

    @property
    def replaced(self) -> tuple[Product, ...]:
        """The products that are emulated."""
        return tuple(e.product for e in self.entries if e.replaced and e.product is not None)

    @property
    def left(self) -> tuple[Entry, ...]:
        """What is evaluated as it was."""
        return tuple(e for e in self.entries if not e.replaced)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __getitem__(self, index: int) -> Entry:
        return self.entries[index]

    def __str__(self) -> str:
        rows = [[e.name, *_described(e.product), ("" if e.replaced else "left: ") + e.why] for e in self.entries]
        heads = ["product", "operands", "result", "runs", "by"]
        count = f"{len(self.replaced)} of {len(self.entries)} products replaced"
        return "\n".join([*columns(heads, rows, left=(0, 1, 2, 4)), count] if rows else ["no products"])

    def __repr__(self) -> str:
        return f"<Report: {len(self.replaced)} products replaced, {len(self.left)} left>"


def _described(product: Product | None) -> tuple[str, str, str]:
    if product is None:
        return "", "", ""
    operands = f"{_array(product.lhs_dtype, product.lhs_shape)} · {_array(product.rhs_dtype, product.rhs_shape)}"
    return operands, _array(product.dtype, product.shape), "?" if product.repeats is None else str(product.repeats)
