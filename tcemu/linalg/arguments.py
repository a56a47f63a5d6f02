"""What every product by a recipe does with its arguments: look at what came, say what was wanted, and share out the random bits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.formats import F32, F64, array_codes, convert
from tcemu.linalg.recipes import Recipe, as_recipe


def given_recipe(recipe: Recipe | str, key: PRNGKey | None) -> Recipe:
    """The recipe of one product, given as itself or by its name. Raises TypeError and ValueError for what is none, or needs a key."""
    recipe = as_recipe(recipe)
    if isinstance(recipe.promote, jax.Array | np.ndarray) and recipe.promote.ndim:
        raise ValueError(
            f"recipe: promote is an array {list(recipe.promote.shape)}; a product takes one number: sweep recipes with jax.vmap"
        )
    if recipe.stochastic and key is None:
        raise ValueError('recipe: rounding="SR" needs random bits: give key= (a jax.random key)')
    return recipe


def floats(name: str, value: ArrayLike) -> Array | np.ndarray:
    """The array of floats that came; NumPy's float64 stays NumPy's where JAX would cut it to 32 bits."""
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    array = array if array.dtype == np.float64 and jax.dtypes.canonicalize_dtype(np.float64) != np.float64 else jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name}: got {array.dtype}{list(array.shape)}; wanted floats, as recipes quantise them (x.astype('float32'))")
    return array


def in_jax(x: Array | np.ndarray, once: bool = False) -> Array:
    """Floats as a JAX array. NumPy's float64, where JAX has none, as float32: rounded to nearest even, or with `once` to odd.

    Rounded to odd (cut, and the last bit set where something was lost), a value rounds on to any format of at most 22 bits of significand
    as from its 64 bits, in every rounding: nothing is rounded twice.
    """
    if isinstance(x, jax.Array):
        return x
    _, codes = array_codes(x)
    if not once:
        return lax.bitcast_convert_type(convert(F64, F32, codes), jnp.float32)
    cut = convert(F64, F32, codes, "RZ")
    lost = jnp.any(convert(F32, F64, cut) != codes, axis=-1)
    return lax.bitcast_convert_type(cut | lost.astype(jnp.uint32), jnp.float32)


class ProductKeys(NamedTuple):
    """The random bits of one product, and of its gradients: a jax.random key for each operand and each product of the backward pass."""

    a: PRNGKey | None
    b: PRNGKey | None
    da: PRNGKey | None
    db: PRNGKey | None


def product_keys(key: PRNGKey | None) -> ProductKeys:
    """All from one key, or none where there is none."""
    return ProductKeys(*((None,) * 4 if key is None else jax.random.split(key, 4)))
