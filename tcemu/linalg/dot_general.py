"""`dot_general`: what takes the place of `jax.lax.dot_general` in a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from tcemu.linalg.arguments import floats, given_recipe
from tcemu.linalg.matmul import matmul
from tcemu.linalg.recipes import Recipe
from tcemu.meshes import with_axes_of

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class ProductAxes(NamedTuple):
    """The axes of lhs and rhs by their part in the product."""

    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    lhs_contracting: tuple[int, ...]  # K
    rhs_contracting: tuple[int, ...]
    rows: tuple[int, ...]  # of lhs: M
    columns: tuple[int, ...]  # of rhs: N

    @property
    def of_a(self) -> tuple[int, ...]:
        """The axes of lhs in the order of A, [batch, M, K]."""
        return self.lhs_batch + self.rows + self.lhs_contracting

    @property
    def of_b(self) -> tuple[int, ...]:
        """The axes of rhs in the order of B, [batch, K, N]."""
        return self.rhs_batch + self.rhs_contracting + self.columns


def product_axes(dimension_numbers: DimensionNumbers, lhs_ndim: int, rhs_ndim: int) -> ProductAxes:
    """What the dimension numbers of `jax.lax.dot_general` say of every axis."""
    (left, right), (left_batch, right_batch) = (tuple(tuple(map(int, axes)) for axes in pair) for pair in dimension_numbers)
    return ProductAxes(
        lhs_batch=left_batch,
        rhs_batch=right_batch,
        lhs_contracting=left,
        rhs_contracting=right,
        rows=tuple(i for i in range(lhs_ndim) if i not in left + left_batch),
        columns=tuple(i for i in range(rhs_ndim) if i not in right + right_batch),
    )


@dataclass(frozen=True)
class DotGeneral:
    """`jax.lax.dot_general` by a recipe: a callable that hashes as its recipe does. Made by `dot_general`."""

    recipe: Recipe
    key: PRNGKey | None = field(default=None, compare=False)
    a: str = "lhs"

    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        dimension_numbers: DimensionNumbers,
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
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"preferred_element_type: got {dtype}; a recipe's products are floats: take a float dtype and cast")
        plain = partial(lax.dot_general, dimension_numbers=dimension_numbers, out_sharding=out_sharding)
        d = with_axes_of(
            lambda given: plain(*(v.astype(jnp.float32) for v in given)),
            lambda given: self._product(given, dimension_numbers, dtype),
            (lhs, rhs),
        )
        return d if out_sharding is None else lax.with_sharding_constraint(d, out_sharding)

    def _product(self, operands: tuple[Any, Any], dimension_numbers: DimensionNumbers, dtype: np.dtype) -> Array:
        lhs, rhs = operands
        axes = product_axes(dimension_numbers, lhs.ndim, rhs.ndim)
        contracting, batch = (axes.lhs_contracting, axes.rhs_contracting), (axes.lhs_batch, axes.rhs_batch)
        wanted = jax.eval_shape(partial(lax.dot_general, dimension_numbers=(contracting, batch)), lhs, rhs)
        size = lambda x, axes: prod(x.shape[i] for i in axes)  # noqa: E731
        batch_shape, k = [lhs.shape[i] for i in axes.lhs_batch], size(lhs, axes.lhs_contracting)
        a = lhs.transpose(*axes.of_a).reshape(*batch_shape, size(lhs, axes.rows), k)
        b = rhs.transpose(*axes.of_b).reshape(*batch_shape, k, size(rhs, axes.columns))
        if self.a == "rhs":  # D = A·B of the transposes, transposed
            a, b = jnp.swapaxes(b, -1, -2), jnp.swapaxes(a, -1, -2)
        d = matmul(a, b, recipe=self.recipe, key=self.key, dtype=dtype)
        return (jnp.swapaxes(d, -1, -2) if self.a == "rhs" else d).reshape(wanted.shape)


def dot_general(recipe: Recipe | str, *, key: PRNGKey | None = None, a: str = "lhs") -> DotGeneral:
    """What takes the place of `jax.lax.dot_general` in a model, as `nn.Dense(dot_general=tcemu.dot_general(recipe))`.

    recipe: a Recipe, or the name of one, as "bf16" or "deepseek on H100".
    key: a jax.random key, where the recipe rounds stochastically; every call of the result draws the same bits from it. `tcemu.emulate`
    takes a key from which every execution of a product has bits of its own.
    a: which operand is the recipe's A, "lhs" or "rhs"; the other is its B. In the usual recipes A is the activation and B the weight.
    The result takes the arguments of `jax.lax.dot_general`: any batch and contracting axes, floats of any dtype, preferred_element_type.
    It is frozen, and hashes as the recipe does. K is the contracting axes in the order given, as one axis; M and N are the others.
    Raises TypeError for what is no Recipe, ValueError for a name that is none, where a key is missing and for another a; the result, as
    `matmul`.
    """
    recipe = given_recipe(recipe, key)
    if a not in ("lhs", "rhs"):
        raise ValueError(f"a={a!r}: wanted 'lhs' or 'rhs', the operand that is the recipe's A")
    return DotGeneral(recipe, key, a)
