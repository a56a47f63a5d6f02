"""Groups of neighbours along an axis, each with a scale of its own."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class GroupSizes(NamedTuple):
    """How many rows of an operand [..., R, K], and how many elements along K, share a scale; None: all of them."""

    rows: int | None
    depth: int | None


def in_groups(x: Array, size: int, axis: int) -> Array:
    """[..., K, ...] -> [..., groups, size]: the axis moved to the end, filled up with zeros, and cut into groups."""
    x = jnp.moveaxis(x, axis, -1)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)])
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def out_of_groups(x: Array, length: int, axis: int) -> Array:
    """The inverse of `in_groups`: [..., groups, size] -> [..., length, ...]."""
    return jnp.moveaxis(x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])[..., :length], -1, axis)


def repeated(scales: Array, size: int, length: int, axis: int) -> Array:
    """Each scale once for every member of its group: [..., groups, ...] -> [..., length, ...]."""
    return lax.slice_in_dim(jnp.repeat(scales, size, axis=axis), 0, length, axis=axis % scales.ndim)


def spread(scales: Array, shape: tuple[int, ...], sizes: tuple[int | None, int | None]) -> Array:
    """A scale for each element of an array of this shape; sizes: how many neighbours along its last two axes share one, None: all."""
    for axis, size in zip((-2, -1), sizes, strict=True):
        if size is not None and size > 1:
            scales = repeated(scales, size, shape[axis], axis)
    return jnp.broadcast_to(scales, shape)
