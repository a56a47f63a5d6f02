"""`dot_general`: a replacement of `jax.lax.dot_general` in a model, by a recipe."""

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

from tcemu.base.meshes import shard_like
from tcemu.operations.products.matmul import matmul, resolve_product_recipe
from tcemu.operations.products.product_arguments import float_array, promoted_dtype
from tcemu.operations.products.recipe_kinds import AnyRecipe
from tcemu.operations.products.recipes import Recipe

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class ProductAxes(NamedTuple):
    """The axes of lhs and rhs by their part in the product."""

    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    lhs_contracting: tuple[int, ...]  # K
    rhs_contracting: tuple[int, ...]
    rows: tuple[int, ...]  # M, axes of lhs
    columns: tuple[int, ...]  # N, axes of rhs

    @property
    def a_order(self) -> tuple[int, ...]:
        """The axes of lhs in the order of A, [batch, M, K]."""
        return self.lhs_batch + self.rows + self.lhs_contracting

    @property
    def b_order(self) -> tuple[int, ...]:
        """The axes of rhs in the order of B, [batch, K, N]."""
        return self.rhs_batch + self.rhs_contracting + self.columns


def product_axes(dimension_numbers: DimensionNumbers, lhs_ndim: int, rhs_ndim: int) -> ProductAxes:
    """Sorts all axes by the dimension numbers of `jax.lax.dot_general`."""
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
    """`jax.lax.dot_general` by a recipe: a callable that hashes as its recipe does. Made by `dot_general`.

    Attributes:
        recipe: A `Recipe`, a `WideRecipe`, or the `KernelRecipe` of one kernel, for products without batch axes.
        key: JAX random key; ignored by equality.
        a: The operand that is the recipe's A, "lhs" or "rhs".
        name: The product's name in reports; ignored by equality.
    """

    recipe: AnyRecipe
    key: PRNGKey | None = field(default=None, compare=False)
    a: str = "lhs"
    name: str = field(default="", compare=False)

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
        """Multiply as `jax.lax.dot_general` does, with its shapes and dtypes. `precision` has no effect: the recipe decides."""
        if unknown:
            raise TypeError(f"dot_general(recipe) takes the arguments of jax.lax.dot_general; got also {', '.join(unknown)}")
        lhs, rhs = float_array("lhs", lhs), float_array("rhs", rhs)
        dtype = promoted_dtype(lhs, rhs, preferred_element_type)
        plain = partial(lax.dot_general, dimension_numbers=dimension_numbers, out_sharding=out_sharding)
        d = shard_like(
            lambda given: plain(*(v.astype(jnp.float32) for v in given)),
            lambda given: self._multiply(given, dimension_numbers, dtype),
            (lhs, rhs),
        )
        return d if out_sharding is None else lax.with_sharding_constraint(d, out_sharding)

    def __str__(self) -> str:
        return self.name or repr(self)

    @property
    def lhs_recipe(self) -> Recipe | None:
        """The recipe if it is a `Recipe` whose A is lhs, else None."""
        return self.recipe if isinstance(self.recipe, Recipe) and self.a == "lhs" else None

    def _multiply(self, operands: tuple[Any, Any], dimension_numbers: DimensionNumbers, dtype: np.dtype) -> Array:
        lhs, rhs = operands
        axes = product_axes(dimension_numbers, lhs.ndim, rhs.ndim)
        contracting, batch = (axes.lhs_contracting, axes.rhs_contracting), (axes.lhs_batch, axes.rhs_batch)
        expected = jax.eval_shape(partial(lax.dot_general, dimension_numbers=(contracting, batch)), lhs, rhs)
        size = lambda x, axes: prod(x.shape[i] for i in axes)
        batch_shape, k = [lhs.shape[i] for i in axes.lhs_batch], size(lhs, axes.lhs_contracting)
        a = lhs.transpose(*axes.a_order).reshape(*batch_shape, size(lhs, axes.rows), k)
        b = rhs.transpose(*axes.b_order).reshape(*batch_shape, k, size(rhs, axes.columns))
        if self.a == "rhs":  # D = A·B of the transposes, transposed
            a, b = jnp.swapaxes(b, -1, -2), jnp.swapaxes(a, -1, -2)
        d = matmul(a, b, recipe=self.recipe, key=self.key, dtype=dtype)
        return (jnp.swapaxes(d, -1, -2) if self.a == "rhs" else d).reshape(expected.shape)


def dot_general(recipe: AnyRecipe | str, *, key: PRNGKey | None = None, a: str = "lhs") -> DotGeneral:
    """Make a replacement of `jax.lax.dot_general`, as `nn.Dense(dot_general=tcemu.dot_general(recipe))`.

    K is the contracting axes in the order given, as one axis; M and N are the other axes of lhs and rhs.

    Args:
        recipe: A `Recipe` or a `tcemu.products.WideRecipe`, the name of one, as "bf16", "deepseek on H100" or "bf16x6 on A100", or a
            `tcemu.replay.KernelRecipe`.
        key: JAX random key, where the recipe rounds stochastically. Every call of the result draws the same bits from it; `tcemu.emulate`
            gives every execution of a product its own bits.
        a: The operand that is the recipe's A, "lhs" or "rhs"; the other is its B. In the usual recipes A is the activation and B the
            weight.

    Returns:
        A frozen callable that hashes as the recipe does. It takes the arguments of `jax.lax.dot_general`: any batch and contracting axes,
        floats of any dtype, preferred_element_type. It raises the errors of `tcemu.matmul`.

    Raises:
        TypeError: `recipe` is neither a recipe nor a name.
        ValueError: the name is unknown, a key is missing, or `a` is another word.

    Example:
        >>> import tcemu
        >>> import numpy as np
        >>> product = tcemu.dot_general("bf16 on A100")
        >>> product(np.ones((2, 3)), np.ones((3, 4)), (((1,), (0,)), ((), ()))).shape
        (2, 4)
    """
    recipe = resolve_product_recipe(recipe, key)
    if a not in ("lhs", "rhs"):
        raise ValueError(f"a={a!r}: expected 'lhs' or 'rhs', the operand that is the recipe's A")
    return DotGeneral(recipe, key, a)
