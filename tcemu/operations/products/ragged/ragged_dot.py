"""`ragged_dot`: a replacement of `jax.lax.ragged_dot` and `ragged_dot_general` in a model, by a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from tcemu.operations.products.product_arguments import as_jax_array, float_array, promoted_dtype
from tcemu.operations.products.ragged.group_tiles import group_ids
from tcemu.operations.products.ragged.ragged_product import RaggedForm, RaggedOperands, ragged_product
from tcemu.operations.products.recipes import Recipe, resolve_recipe

BASIC_DIMENSION_NUMBERS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))  # [M, K] · [groups, K, N]


class RaggedAxes(NamedTuple):
    """The axes of a ragged product in the order of its form; see `ragged_product.RaggedOperands`."""

    kind: str  # the axis in groups: "rows", "depth" or "batch"
    lhs: tuple[tuple[int, ...], ...]  # batch, rows, K
    rhs: tuple[tuple[int, ...], ...]  # groups, batch, columns, K
    outer: tuple[int, ...]  # axes of lhs before the ragged one; each of their indices has its own group sizes
    inner: tuple[int, ...]  # axes of lhs after the ragged one, which follow its groups
    ragged: int  # the ragged axis of lhs


def ragged_axes(numbers: lax.RaggedDotDimensionNumbers, lhs_ndim: int, rhs_ndim: int) -> RaggedAxes:
    """Sorts all axes by the dimension numbers of `jax.lax.ragged_dot_general`."""
    (left, right), (left_batch, right_batch) = (tuple(tuple(map(int, axes)) for axes in pair) for pair in numbers.dot_dimension_numbers)
    group = tuple(map(int, numbers.rhs_group_dimensions))
    rows = tuple(i for i in range(lhs_ndim) if i not in left + left_batch)
    columns = tuple(i for i in range(rhs_ndim) if i not in right + right_batch + group)
    (ragged,) = map(int, numbers.lhs_ragged_dimensions)
    kind, axes = next((kind, axes) for kind, axes in (("rows", rows), ("depth", left), ("batch", left_batch)) if ragged in axes)
    at = axes.index(ragged)
    return RaggedAxes(
        kind, (left_batch, rows, left), (group, right_batch, columns, right), outer=axes[:at], inner=axes[at + 1 :], ragged=ragged
    )


def expand_group_ids(axes: RaggedAxes, lhs_shape: tuple[int, ...], group_sizes: Array) -> Array:
    """Returns the group of every row, int32 [batch, outer, rows], rows over the ragged axis and the inner ones. Kind "batch": [rows].

    group_sizes: [groups], or [..., groups] with the batch axes and the outer ones in front.
    """
    sizes = lambda which: [lhs_shape[i] for i in which]
    places = [1 if axes.kind == "batch" else prod(sizes(axes.lhs[0])), prod(sizes(axes.outer))]
    if group_sizes.ndim == 1:
        group_sizes = jnp.broadcast_to(group_sizes, (*places, group_sizes.shape[0]))
    group_sizes = group_sizes.reshape(*places, group_sizes.shape[-1])
    groups = jax.vmap(jax.vmap(lambda own: group_ids(own, lhs_shape[axes.ragged])))(group_sizes)
    return jnp.repeat(groups, prod(sizes(axes.inner)), axis=-1)


@dataclass(frozen=True)
class RaggedDot:
    """`jax.lax.ragged_dot` and `ragged_dot_general` by a recipe: a callable that hashes as its recipe does. Made by `ragged_dot`."""

    recipe: Recipe
    key: PRNGKey | None = field(default=None, compare=False)

    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        group_sizes: ArrayLike,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        group_offset: Any = None,
        out_sharding: Any = None,
        *,
        ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers = BASIC_DIMENSION_NUMBERS,
    ) -> Array:
        """Multiply as `jax.lax.ragged_dot_general` does, with its shapes and dtypes. `precision` has no effect: the recipe decides."""
        if group_offset is not None:
            raise NotImplementedError("group_offset: JAX does not implement it either; pass the rows, rhs and sizes of the groups you need")
        lhs, rhs, sizes = float_array("lhs", lhs), float_array("rhs", rhs), jnp.asarray(group_sizes)
        dtype = promoted_dtype(lhs, rhs, preferred_element_type)
        expected = jax.eval_shape(
            partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=ragged_dot_dimension_numbers), lhs, rhs, sizes
        )
        axes = ragged_axes(ragged_dot_dimension_numbers, lhs.ndim, rhs.ndim)
        groups = expand_group_ids(axes, lhs.shape, sizes)
        a, b = _merge_axes(lhs, axes.lhs), _merge_axes(rhs, axes.rhs)  # [batch, M, K], [groups or 1, batch, N, K]
        if axes.kind == "rows":
            outer = prod(lhs.shape[i] for i in axes.outer)
            a = a.reshape(a.shape[0], outer, a.shape[1] // max(outer, 1), a.shape[2]) if outer else a[:, None, :0]
            groups = groups if outer else groups[:, :1, :0]
        else:
            b = b[0]
            groups = groups.reshape(groups.shape[0], -1) if axes.kind == "depth" else groups.reshape(-1)
        (scheme_a, scheme_b), form = self.recipe.schemes, RaggedForm(axes.kind, sizes.shape[-1], dtype)
        a, b = as_jax_array(a, round_to_odd=scheme_a.rounds_once), as_jax_array(b, round_to_odd=scheme_b.rounds_once)
        d = ragged_product(form, RaggedOperands(self.recipe, a, b, groups, self.key)).reshape(expected.shape)
        return d if out_sharding is None else lax.with_sharding_constraint(d, out_sharding)


def _merge_axes(x: Any, axes: tuple[tuple[int, ...], ...]) -> Any:
    """Transposes to this order of axes and merges the axes of each part."""
    return x.transpose([i for part in axes for i in part]).reshape([prod(x.shape[i] for i in part) for part in axes])


def ragged_dot(recipe: Recipe | str, *, key: PRNGKey | None = None) -> RaggedDot:
    """Make a replacement of `jax.lax.ragged_dot`, as in a mixture of experts: `tcemu.ragged_dot(recipe)(lhs, rhs, group_sizes)`.

    Each group is a separate product: its bits, and where recipes compute them the bits of its gradients, are those of
    `matmul(lhs[rows], rhs[group])`. A scale of the tensor is therefore shared by the rows of one group, over the whole batch, and by one
    matrix of rhs, as libraries scale experts; blocks restart with each group and each batch index. Rows behind the last group are 0, as in
    JAX; batch indices behind it are one more group. Work and memory are those of about 1.5 times the rows, whatever the sizes.

    Args:
        recipe: A `Recipe`, or the name of one, as "bf16" or "deepseek on H100".
        key: JAX random key, where the recipe rounds stochastically; every call draws the same bits from it. The random bits differ from
            those of a loop over `matmul`.

    Returns:
        A frozen callable that hashes as the recipe does. It takes lhs [M, K], rhs [groups, K, N] and group_sizes, integers [groups], as
        `jax.lax.ragged_dot`, and returns [M, N]: the first group_sizes[0] rows times rhs[0], and so on. With
        ragged_dot_dimension_numbers= it takes all forms of `jax.lax.ragged_dot_general`: groups of rows, of elements along K (one result
        per group) or of batch indices. It raises TypeError and ValueError for arrays of other kinds or shapes, and NotImplementedError for
        a group_offset.

    Raises:
        TypeError: `recipe` is neither a Recipe nor a name.
        ValueError: the name is unknown, or a key is missing.
    """
    recipe = resolve_recipe(recipe, key)
    return RaggedDot(recipe, key)
