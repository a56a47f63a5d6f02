"""Derivatives of products whose bits are computed on integers: one rule for all products by a `Recipe`.

Three products have rules of their own. Attention and delayed scaling keep what their forward pass measured for the backward pass: the
maxima and sums of the rows, the codes and magnitudes of the tensors. A kernel recipe has no recipe for gradients: `straight_through` is all
of its rule.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import jax
from jax import Array

from tcemu.base.gradients import reverse_mode_only, straight_through
from tcemu.base.meshes import match_varying_axes


class Product(Protocol):
    """The static part of a product: hashable, with the product's results, its smooth form and its gradients as methods.

    Operands are a NamedTuple with a field `recipe`, and a field `key` where the product may round stochastically.
    """

    def bits(self, operands: Any) -> Array:
        """Returns the result as the recipe states it. `operands.recipe` has backward="exact" here, so that programs are shared."""
        ...

    def smooth(self, operands: Any) -> Array:
        """Returns the same product in plain float arithmetic, whose derivatives stand for those of `bits`."""
        ...

    def backward(self, operands: Any, g: Array) -> Any:
        """Returns the operands' cotangents by the recipe's own products for gradients, None for what has no derivative."""
        ...


def differentiable_product(product: Product, operands: Any) -> Array:
    """Computes a product with the derivatives that `operands.recipe.backward` asks for.

    "exact" and "straight_through" give the derivatives of `product.smooth`, in forward and reverse mode and to any order. A recipe for the
    gradients gives `product.backward`, in reverse mode only.
    """
    operands = match_mesh_axes(operands)
    if operands.recipe.gradients is None:
        return straight_through(partial(_forward_bits, product), product.smooth, operands)
    return _product_with_emulated_gradients(product, reverse_mode_only(operands, explain_reverse_mode(operands.recipe)))


def explain_reverse_mode(recipe: Any) -> str:
    """Returns the message for forward mode through a product whose recipe has recipes for the gradients."""
    return (
        f"forward mode (jax.jvp, jax.jacfwd, jax.hessian) of a product by {recipe.op}: its recipe has recipes for the gradients, which are "
        'products of reverse mode, and none for tangents. Take jax.jacrev, jax.vjp or jax.grad; or a recipe with backward="exact", as '
        'tcemu.get_recipe(name, target, backward="exact"), whose derivatives are those of the plain product of the rounded operands in '
        "both modes. See tcemu.Recipe"
    )


def match_mesh_axes(operands: Any) -> Any:
    """Makes all arrays of a NamedTuple but its `key` vary over the same axes of the mesh, under `jax.shard_map`.

    A product's own derivative rule then gives back what varies in the same way, and JAX sums it over the axes along which an operand did
    not vary.
    """
    key = getattr(operands, "key", None)
    leaves, tree = jax.tree.flatten(operands if key is None else operands._replace(key=None))
    matched = jax.tree.unflatten(tree, match_varying_axes(*leaves))
    return matched if key is None else matched._replace(key=key)


@jax.custom_jvp
def attach_derivative(rounded: Array, value: Array) -> Array:
    """Return `rounded`, every bit of it, with the derivative of `value`: rounding counts as identity. Both have one shape and dtype."""
    return rounded


@attach_derivative.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return attach_derivative(*primals), tangents[1]


def _forward_bits(product: Product, operands: Any) -> Array:
    """One program serves all kinds of gradients."""
    return product.bits(operands._replace(recipe=operands.recipe.replace(backward="exact")))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product_with_emulated_gradients(product: Product, operands: Any) -> Array:
    return _forward_bits(product, operands)


_product_with_emulated_gradients.defvjp(
    lambda product, operands: (_forward_bits(product, operands), operands),
    lambda product, operands, g: (product.backward(operands, g),),
)
