"""`dot_general`: what takes the place of `jax.lax.dot_general` in a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from tcemu.linalg.arguments import check_recipe, floats
from tcemu.linalg.matmul import matmul
from tcemu.linalg.recipes import Recipe

Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


@dataclass(frozen=True)
class DotGeneral:
    """`jax.lax.dot_general` by a recipe: a callable that hashes as its recipe does. Made by `dot_general`."""

    recipe: Recipe
    key: Any = field(default=None, compare=False)

    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        dimension_numbers: Dimensions,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
        **unknown: Any,
    ) -> Array:
        """The product, with the shape and dtype that `jax.lax.dot_general` gives. precision has no effect: the recipe says it all."""
        if unknown:
            raise TypeError(f"dot_general(recipe) takes what jax.lax.dot_general takes; got {', '.join(unknown)} besides")
        lhs, rhs = floats("lhs", lhs), floats("rhs", rhs)
        dtype = np.dtype(jnp.result_type(lhs, rhs) if preferred_element_type is None else preferred_element_type)
        (left, right), (left_batch, right_batch) = (tuple(tuple(map(int, axes)) for axes in pair) for pair in dimension_numbers)
        wanted = jax.eval_shape(partial(lax.dot_general, dimension_numbers=((left, right), (left_batch, right_batch))), lhs, rhs)
        rows = [i for i in range(lhs.ndim) if i not in left + left_batch]
        columns = [i for i in range(rhs.ndim) if i not in right + right_batch]
        size = lambda x, axes: prod(x.shape[i] for i in axes)  # noqa: E731
        batch = [lhs.shape[i] for i in left_batch]
        a = lhs.transpose(*left_batch, *rows, *left).reshape(*batch, size(lhs, rows), size(lhs, left))
        b = rhs.transpose(*right_batch, *right, *columns).reshape(*batch, size(rhs, right), size(rhs, columns))
        d = matmul(a, b, recipe=self.recipe, key=self.key, dtype=dtype).reshape(wanted.shape)
        return d if out_sharding is None else lax.with_sharding_constraint(d, out_sharding)


def dot_general(recipe: Recipe, *, key: PRNGKey | None = None) -> DotGeneral:
    """What takes the place of `jax.lax.dot_general` in a model, as `nn.Dense(dot_general=tcemu.dot_general(recipe))`.

    key: a jax.random key, where the recipe rounds stochastically; every call of the result uses it anew.
    The result takes the arguments of `jax.lax.dot_general`: any batch and contracting axes, floats of any dtype, preferred_element_type.
    It is frozen, and hashes as the recipe does. K is the contracting axes in the order given, as one axis; M and N are the others.
    Raises TypeError for what is no Recipe, ValueError where a key is missing; the result, as `matmul`.
    """
    check_recipe(recipe, key)
    return DotGeneral(recipe, key)
