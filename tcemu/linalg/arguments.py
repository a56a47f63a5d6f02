"""What every product by a recipe does with its arguments: look at what came, say what was wanted, and share out the random bits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey
from jax import Array
from jax.typing import ArrayLike

from tcemu.linalg.recipes import Recipe


def check_recipe(recipe: Recipe, key: PRNGKey | None) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe: got {type(recipe).__name__}; wanted a tcemu.Recipe, as tcemu.recipes.RECIPES holds them")
    if recipe.stochastic and key is None:
        raise ValueError('recipe: rounding="SR" needs random bits: give key= (a jax.random key)')


def floats(name: str, value: ArrayLike) -> Array:
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name}: got {array.dtype}{list(array.shape)}; wanted floats, as recipes quantise them (x.astype('float32'))")
    return array


class ProductKeys(NamedTuple):
    """The random bits of one product, and of its gradients: a jax.random key for each operand and each product of the backward pass."""

    a: PRNGKey | None
    b: PRNGKey | None
    da: PRNGKey | None
    db: PRNGKey | None


def product_keys(key: PRNGKey | None) -> ProductKeys:
    """All from one key, or none where there is none."""
    return ProductKeys(*((None,) * 4 if key is None else jax.random.split(key, 4)))
