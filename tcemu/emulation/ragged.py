"""A ragged product by a policy's choice: by a recipe as one ragged product, by any other callable group by group."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.linalg.dot_general import DotGeneral
from tcemu.linalg.ragged_dot import RaggedDot, members_of_groups, ragged_axes


def through_groups(run: Callable[..., Array], lhs: Array, rhs: Array, group_sizes: Array, params: dict[str, Any]) -> Array:
    """`lax.ragged_dot_general` by `run(lhs, rhs, dimension_numbers, **)`, one group after the other; a recipe's `run` whose A is lhs by
    `RaggedDot`.

    run sees a group with the members of all others 0, so that its arrays have the whole size: as much work as groups times a product.
    params: those of the primitive.
    """
    if isinstance(run, DotGeneral) and run.a == "lhs":
        return RaggedDot(run.recipe, run.key)(lhs, rhs, group_sizes, **params)
    whole = jax.eval_shape(lambda *x: lax.ragged_dot_general(*x, **{**params, "out_sharding": None}), lhs, rhs, group_sizes)
    numbers = params["ragged_dot_dimension_numbers"]
    kept = {name: params[name] for name in ("precision", "preferred_element_type", "out_sharding")}
    axes, (contracting, batch) = ragged_axes(numbers, lhs.ndim, rhs.ndim), numbers.dot_dimension_numbers
    labels = members_of_groups(axes._replace(inner=()), lhs.shape, group_sizes)
    labelled = [*(axes.lhs[0] if axes.kind != "batch" else ()), *axes.outer, axes.ragged]  # axes of lhs
    labels = labels.reshape([lhs.shape[i] for i in labelled])
    of_lhs = _spread(labels, labelled, lhs.ndim)
    turns = jnp.arange(group_sizes.shape[-1] + (axes.kind == "batch"), dtype=jnp.int32)  # places behind the last group are a group

    def one(number: Array, y: Array, numbers: Any) -> Array:
        result = run(jnp.where(of_lhs == number, lhs, jnp.zeros_like(lhs)), y, numbers, **kept)
        shape = whole.shape[1:] if axes.kind == "depth" else whole.shape
        if jnp.shape(result) != shape:
            raise ValueError(
                f"policy: for a group of a ragged product its choice returned shape {list(result.shape)}; wanted {list(shape)}"
            )
        return result.astype(whole.dtype)

    if axes.kind == "depth":
        of_rhs = _spread(labels, [_partner(numbers, i) for i in labelled], rhs.ndim)
        return lax.map(lambda number: one(number, jnp.where(of_rhs == number, rhs, jnp.zeros_like(rhs)), (contracting, batch)), turns)
    of_result = _spread(labels, [(*axes.lhs[0], *axes.lhs[1]).index(i) for i in labelled], whole.ndim)
    own, plain = None, (contracting, batch)
    if axes.kind == "rows":
        ((group,), *_) = axes.rhs
        own = jnp.moveaxis(rhs, group, 0)
        right, right_batch = (tuple(i - (i > group) for i in part) for part in (contracting[1], batch[1]))
        plain = (contracting[0], right), (batch[0], right_batch)

    def turn(total: Array, part: tuple[Array, Array | None]) -> tuple[Array, None]:
        number, y = part
        return jnp.where(of_result == number, one(number, rhs if y is None else y, plain), total), None

    return lax.scan(turn, jnp.zeros(whole.shape, whole.dtype), (turns, own))[0]


def _partner(numbers: lax.RaggedDotDimensionNumbers, axis: int) -> int:
    """The axis of rhs that goes with an axis of lhs, contracted or of the batch."""
    (left, right), (left_batch, right_batch) = numbers.dot_dimension_numbers
    return dict(zip((*left, *left_batch), (*right, *right_batch), strict=True))[axis]


def _spread(labels: Array, at: Sequence[int], ndim: int) -> Array:
    """The axes of labels at these axes of an array of `ndim`, size 1 elsewhere."""
    order = np.argsort(at)
    return lax.expand_dims(labels.transpose(order), [i for i in range(ndim) if i not in at])
