"""Complex products from real ones: four of them (4M), or three (3M, after Gauss), each by a recipe.

The sums of real products are f32, rounded to nearest even, in the order that `METHODS` states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.base.gradients import straight_through
from tcemu.engine.arithmetic.fma import add
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.products.library.kernel_recipe import KernelRecipe
from tcemu.operations.products.matmul import matmul
from tcemu.operations.products.ozaki import OzakiRecipe
from tcemu.operations.products.recipes import Recipe
from tcemu.operations.products.wide import WideRecipe

Multiply = Callable[[Array, Array], Array]
Parts = tuple[Array, Array]  # real and imaginary, float32


class Method(NamedTuple):
    """A way to multiply complex matrices."""

    products: int  # real products
    multiply: Callable[[Multiply, Parts, Parts], Parts]
    formula: str
    source: str


def _sum(x: Array, y: Array, sign: int = 1) -> Array:
    """Returns x + y or x - y in f32, rounded to nearest even, with subnormal numbers; its derivative is that of the sum."""

    def words(given: Parts) -> Array:
        left, right = (lax.bitcast_convert_type(v, jnp.uint32) for v in given)
        return lax.bitcast_convert_type(add(left, right if sign == 1 else right ^ np.uint32(0x80000000), F32), jnp.float32)

    return straight_through(words, lambda given: given[0] + sign * given[1], (x, y))


def _multiply_by_four(multiply: Multiply, a: Parts, b: Parts) -> Parts:
    (p, q), (r, s) = a, b
    return _sum(multiply(p, r), multiply(q, s), -1), _sum(multiply(p, s), multiply(q, r))


def _multiply_by_three(multiply: Multiply, a: Parts, b: Parts) -> Parts:
    (p, q), (r, s) = a, b
    first, second, third = multiply(p, r), multiply(q, s), multiply(_sum(p, q), _sum(r, s))
    return _sum(first, second, -1), _sum(_sum(third, first, -1), second, -1)


METHODS = {
    "4m": Method(4, _multiply_by_four, "re = AB - A'B'; im = AB' + A'B", "the definition; Van Zee and Smith, ACM TOMS 44, 2017: 4M"),
    "3m": Method(
        3,
        _multiply_by_three,
        "re = AB - A'B'; im = ((A + A')(B + B') - AB) - A'B'",
        "Higham, SIAM J. Matrix Anal. Appl. 13, 1992: 3M; cuBLAS cublasCgemm3m, whose order of the last sums is unpublished",
    ),
}


def complex_matmul(
    a: ArrayLike, b: ArrayLike, *, recipe: Recipe | WideRecipe | OzakiRecipe | KernelRecipe | str, method: str = "4m"
) -> Array:
    """Multiply complex matrices by real products.

    Args:
        a: Complex64 or real float array [..., M, K].
        b: Complex64 or real float array [..., K, N].
        recipe: The recipe of the real products: see `tcemu.matmul`. Static under `jit`.
        method: "4m" or "3m". Static under `jit`.

    Returns:
        Complex64 array [..., M, N], differentiable.

    Raises:
        TypeError: An argument holds no numbers, or complex128, whose parts are no float32.
        ValueError: Shapes do not fit, or the method or the recipe is unknown.

    Source: the method's `source` in `tcemu.operations.products.complex_products.METHODS`.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r}: expected one of {', '.join(METHODS)}")
    parts = [_split(name, x) for name, x in (("a", a), ("b", b))]
    real, imaginary = METHODS[method].multiply(lambda x, y: matmul(x, y, recipe=recipe), *parts)
    return lax.complex(real, imaginary)


def _split(name: str, x: ArrayLike) -> Parts:
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    dtype = np.dtype(x.dtype)
    if dtype == np.complex128 or not (jnp.issubdtype(dtype, jnp.complexfloating) or jnp.issubdtype(dtype, jnp.floating)):
        raise TypeError(f"{name}: got {dtype}; expected complex64 or floats")
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = array.astype(jnp.float32)
        return array, jnp.zeros_like(array)
    return jnp.real(array), jnp.imag(array)
