"""Policies as libraries and papers have them: which layers are computed in low precision, whatever the recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tcemu.emulation.policy import Choice, Policy, Where, checked, choice_of, planned
from tcemu.emulation.products import Product

__all__ = ["Where", "attention_left", "ends_left", "linear_only"]


@dataclass(frozen=True)
class Restricted:
    """A policy for a part of the products; the others are left. keeps: which part, of a program with these products."""

    policy: Policy
    keeps: Callable[[Sequence[Product]], Callable[[Product], bool]]
    name: str

    def plan(self, products: Sequence[Product]) -> Callable[[Product], Choice]:
        policy, keeps = planned(self.policy, products), self.keeps(products)
        return lambda product: choice_of(policy, product) if keeps(product) else None

    def __repr__(self) -> str:
        return f"{self.name}({self.policy!r})"


def linear_only(policy: Policy) -> Policy:
    """The policy for products with a weight, and for their gradients; all others are left, and attention's with them.

    As NVIDIA's TransformerEngine does under `fp8_autocast`, whose attention stays in the type of its inputs unless asked otherwise.
    Products of the gradient are told apart in `emulate(jax.grad(fn), ...)` as `attention_left` says.
    policy: a Recipe, or what else `emulate` takes.
    """
    return Restricted(checked(policy), lambda products: lambda p: "weight" in p.roles or _gradient_of_weight(p), "linear_only")


def attention_left(policy: Policy) -> Policy:
    """The policy but for products of two activations, and for their gradients. As DeepSeek-V3 (arXiv 2412.19437, 3.3.1).

    In `emulate(jax.grad(fn), ...)` a product of a gradient and an activation is taken for a weight's gradient where it has no batch axes,
    and for attention's where it has some, the heads.
    policy: a Recipe, or what else `emulate` takes.
    """

    def keeps(product: Product) -> bool:
        attention = product.roles == ("activation", "activation") or set(product.roles) == {"activation", "gradient"}
        return not attention or _gradient_of_weight(product)

    return Restricted(checked(policy), lambda products: keeps, "attention_left")


def ends_left(policy: Policy, *, first: int = 1, last: int = 1) -> Policy:
    """The policy but for the first and the last layers, and for the gradients of what goes into them.

    A layer is a product of data and a weight; layers count in the order of the program, each weight once. As arXiv 1812.08011 has it (both
    ends), and arXiv 2509.25149 (mostly the last). In `emulate(jax.grad(fn), ...)` the gradients of their weights are not told from
    others, and are not left; `jax.grad(emulate(fn, ...))` leaves them too.
    policy: a Recipe, or what else `emulate` takes. Raises ValueError for numbers below 0.
    """
    for name, count in (("first", first), ("last", last)):
        if count < 0:
            raise ValueError(f"{name}={count}: wanted a number of layers, 0 or more")

    def keeps(products: Sequence[Product]) -> Callable[[Product], bool]:
        layers = list(dict.fromkeys(p.parameters for p in products if p.parameters and "activation" in p.roles))
        ends = {*layers[:first], *layers[max(len(layers) - last, 0) :]}
        return lambda product: product.parameters not in ends

    return Restricted(checked(policy), keeps, "ends_left")


def _gradient_of_weight(product: Product) -> bool:
    batched = isinstance(product.dimension_numbers, tuple) and any(product.dimension_numbers[1])
    return set(product.roles) == {"activation", "gradient"} and not (product.primitive == "dot_general" and batched)
