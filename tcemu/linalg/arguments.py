"""What every product of arrays does with its arguments: look at what came, and say what was wanted."""

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
