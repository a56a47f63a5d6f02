"""Groups of neighbours along an axis that share a scale."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

SHORT = 32  # elements of an axis that XLA:CPU reduces in one go


class GroupSizes(NamedTuple):
    """Rows of an operand [..., R, K], and elements along K, that share a scale; None: all."""

    rows: int | None
    depth: int | None


def split_groups(x: Array, size: int, axis: int) -> Array:
    """Moves the axis to the end, pads it with zeros and splits it into groups: [..., K, ...] -> [..., groups, size]."""
    x = jnp.moveaxis(x, axis, -1)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)])
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def join_groups(x: Array, length: int, axis: int) -> Array:
    """Joins groups, the inverse of `split_groups`: [..., groups, size] -> [..., length, ...]."""
    return jnp.moveaxis(x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])[..., :length], -1, axis)


def repeat_scales(scales: Array, size: int, length: int, axis: int) -> Array:
    """Repeats each scale for every element of its group: [..., groups, ...] -> [..., length, ...]."""
    return lax.slice_in_dim(jnp.repeat(scales, size, axis=axis), 0, length, axis=axis % scales.ndim)


def broadcast_scales(scales: Array, shape: tuple[int, ...], sizes: tuple[int | None, int | None]) -> Array:
    """Broadcasts scales to an array of this shape. sizes: neighbours along its last two axes that share a scale; None: all."""
    for axis, size in zip((-2, -1), sizes, strict=True):
        if size is not None and size > 1:
            scales = repeat_scales(scales, size, shape[axis], axis)
    return jnp.broadcast_to(scales, shape)


def max_along_rows(x: Array) -> Array:
    """Returns the maximum of unsigned integers along the last axis; 0 if that is empty.

    In two reductions, kept apart by a barrier: XLA:CPU uses vectors for one along an axis that is short and not the last.
    """
    if x.shape[-1] > SHORT and x.shape[-1] % SHORT == 0:
        x = lax.optimization_barrier(jnp.max(x.reshape(*x.shape[:-1], SHORT, x.shape[-1] // SHORT), axis=-2))
    return jnp.max(x, axis=-1, initial=0)
