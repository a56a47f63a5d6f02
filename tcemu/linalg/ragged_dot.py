"""`ragged_dot`: what takes the place of `jax.lax.ragged_dot` and `ragged_dot_general` in a model."""

from __future__ import annotations

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

from tcemu.linalg.arguments import floats, given_recipe, in_jax
from tcemu.linalg.ragged import ragged_product
from tcemu.linalg.ragged_sums import Form, Operands
from tcemu.linalg.recipes import Recipe
from tcemu.linalg.tiles import groups_of

BASIC = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))  # [M, K] · [groups, K, N]


class RaggedAxes(NamedTuple):
    """The axes of a ragged product in the order of its form; see `ragged_sums.Operands`."""

    kind: str  # "rows", "depth" or "batch": what is in groups
    lhs: tuple[tuple[int, ...], ...]  # batch, rows, K
    rhs: tuple[tuple[int, ...], ...]  # groups, batch, columns, K
    outer: tuple[int, ...]  # of lhs: those before the ragged one, for each place of which the groups have sizes of their own
    inner: tuple[int, ...]  # of lhs: those after it, whose places go with it
    ragged: int  # of lhs


def ragged_axes(numbers: lax.RaggedDotDimensionNumbers, lhs_ndim: int, rhs_ndim: int) -> RaggedAxes:
    """What the dimension numbers of `jax.lax.ragged_dot_general` say of every axis."""
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


def members_of_groups(axes: RaggedAxes, lhs_shape: tuple[int, ...], group_sizes: Array) -> Array:
    """The group of every member, int32 [batch, outer, members], members the ragged axis and the inner ones; of the batch's kind [members].

    group_sizes: [groups], the same everywhere, or [..., groups] with the axes of the batch and the outer ones in front.
    """
    sizes = lambda which: [lhs_shape[i] for i in which]  # noqa: E731
    places = [1 if axes.kind == "batch" else prod(sizes(axes.lhs[0])), prod(sizes(axes.outer))]
    if group_sizes.ndim == 1:
        group_sizes = jnp.broadcast_to(group_sizes, (*places, group_sizes.shape[0]))
    group_sizes = group_sizes.reshape(*places, group_sizes.shape[-1])
    groups = jax.vmap(jax.vmap(lambda own: groups_of(own, lhs_shape[axes.ragged])))(group_sizes)
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
        ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers = BASIC,
    ) -> Array:
        """The product, with the shape and dtype that `jax.lax.ragged_dot_general` gives. precision has no effect: all is the recipe's."""
        if group_offset is not None:
            raise NotImplementedError("group_offset: JAX has no products with it either; give the rows, rhs and sizes of the groups wanted")
        lhs, rhs, sizes = floats("lhs", lhs), floats("rhs", rhs), jnp.asarray(group_sizes)
        dtype = np.dtype(jnp.result_type(lhs, rhs) if preferred_element_type is None else preferred_element_type)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"preferred_element_type: got {dtype}; a recipe's products are floats: take a float dtype and cast")
        wanted = jax.eval_shape(partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=ragged_dot_dimension_numbers), lhs, rhs, sizes)
        axes = ragged_axes(ragged_dot_dimension_numbers, lhs.ndim, rhs.ndim)
        groups = members_of_groups(axes, lhs.shape, sizes)
        a, b = _ordered(lhs, axes.lhs), _ordered(rhs, axes.rhs)  # [batch, M, K], [groups or 1, batch, N, K]
        if axes.kind == "rows":
            outer = prod(lhs.shape[i] for i in axes.outer)
            a = a.reshape(a.shape[0], outer, a.shape[1] // max(outer, 1), a.shape[2]) if outer else a[:, None, :0]
            groups = groups if outer else groups[:, :1, :0]
        else:
            b = b[0]
            groups = groups.reshape(groups.shape[0], -1) if axes.kind == "depth" else groups.reshape(-1)
        (scheme_a, scheme_b), form = self.recipe.schemes, Form(axes.kind, sizes.shape[-1], dtype)
        a, b = in_jax(a, once=scheme_a.rounds_once), in_jax(b, once=scheme_b.rounds_once)
        d = ragged_product(form, Operands(self.recipe, a, b, groups, self.key)).reshape(wanted.shape)
        return d if out_sharding is None else lax.with_sharding_constraint(d, out_sharding)


def _ordered(x: Any, axes: tuple[tuple[int, ...], ...]) -> Any:
    """The axes in this order, those of a part as one."""
    return x.transpose([i for part in axes for i in part]).reshape([prod(x.shape[i] for i in part) for part in axes])


def ragged_dot(recipe: Recipe | str, *, key: PRNGKey | None = None) -> RaggedDot:
    """What takes the place of `jax.lax.ragged_dot` in a mixture of experts: `tcemu.ragged_dot(recipe)(lhs, rhs, group_sizes)`.

    recipe: a Recipe, or the name of one, as "bf16" or "deepseek on H100".
    The result takes lhs [M, K], rhs [groups, K, N] and group_sizes, integers [groups], all as `jax.lax.ragged_dot`, and gives [M, N]:
    the first group_sizes[0] rows times rhs[0], and so on. With ragged_dot_dimension_numbers= it takes what
    `jax.lax.ragged_dot_general` takes: groups of rows, of elements along K (one result for each group) or of places in the batch.
    Each group is a product of its own: its bits, and where the recipe has recipes for them the bits of its gradients, are those of
    `matmul(lhs[rows], rhs[group])`. So a scale of the tensor is shared by the rows of one group, in all places of the batch, and by one
    matrix of rhs, as libraries scale experts; blocks begin anew with each group, and with each place of the batch. Rows behind the last
    group are 0, as in JAX; places of a batch behind it are one more group.
    With stochastic rounding (key: a jax.random key, used anew by every call) the random bits are others than those of that loop.
    It is frozen, and hashes as the recipe does. Work and memory are those of about 1.5 times the rows, whatever the sizes.
    Raises TypeError for what is no Recipe, ValueError for a name that is none and where a key is missing; the result, TypeError and
    ValueError for arrays of other kinds or shapes, and NotImplementedError for a group_offset.
    """
    recipe = given_recipe(recipe, key)
    return RaggedDot(recipe, key)
