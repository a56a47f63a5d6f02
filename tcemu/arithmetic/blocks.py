"""D in blocks that stay in the cache of a CPU core while K is walked."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

COLUMNS = 128  # of D in a block: a step's part of B then stays in the first-level cache
ELEMENTS = 1 << 17  # of D in a block


def in_blocks(walk: Callable[[Array, Any, Any], Array], c: Array, x: Any, y: Any) -> Array:
    """walk(c, x, y), on a CPU block after block of D.

    c: [..., M, N]; x: a pytree of [steps, ..., M, terms]; y: of [steps, ..., terms, N]; a leaf may have 1 in place of any of these sizes
    but the first. walk may take its batch axes as one. Elsewhere than on a CPU, and where a size is a symbol of `jax.export`, all of D is
    one block.
    """
    *batch, m, n = c.shape
    whole = (math.prod(batch), m, n)
    if not all(isinstance(size, int) for size in whole) or (tiles := _tiles(*whole)) == whole:
        return walk(c, x, y)

    def flat(v: Array) -> Array:
        """The batch axes as one, of size 1 if all are."""
        if v.size == v.shape[0] * v.shape[-2] * v.shape[-1]:
            return v.reshape(v.shape[0], 1, *v.shape[-2:])
        v = v.reshape(v.shape[0], *(1,) * (len(batch) + 3 - v.ndim), *v.shape[1:])
        return jnp.broadcast_to(v, (v.shape[0], *batch, *v.shape[-2:])).reshape(v.shape[0], -1, *v.shape[-2:])

    def blocked(c: Array, x: Any, y: Any) -> Array:
        d = _over(0, tiles, walk, c.reshape(whole), *jax.tree.map(flat, (x, y)))
        return d.reshape(c.shape)

    return lax.platform_dependent(c, x, y, cpu=blocked, default=walk)


def _tiles(b: int, m: int, n: int) -> tuple[int, int, int]:
    """The sizes of a block."""
    columns = _even(n, COLUMNS)
    rows = _even(m, ELEMENTS // columns)
    return _even(b, max(1, ELEMENTS // (rows * columns))), rows, columns


def _even(size: int, most: int) -> int:
    """The least tile with which no more tiles of at most `most` are needed; whole vectors of a CPU where there are several."""
    count = -(-size // most)
    return size if count == 1 else min(most, -(-size // count // 8) * 8)


def _over(axis: int, tiles: tuple[int, int, int], walk: Callable, c: Array, x: Any, y: Any) -> Array:
    """The blocks along one axis of c, [B, M, N], and along those after it, one after the other."""
    if axis == len(tiles):
        return walk(c, x, y)
    size, tile = c.shape[axis], tiles[axis]
    if size == tile:
        return _over(axis + 1, tiles, walk, c, x, y)
    found = (axis, (1, 2, None)[axis], (1, None, 3)[axis])  # x is [steps, B, M, terms], y is [steps, B, terms, N]

    def cut(v: Array, at: int | None) -> Array | None:
        return None if at is None or v.shape[at] == 1 else _split(v, at, tile)

    def block(moving: tuple) -> Array:
        whole = jax.tree.map(lambda part, all_of_it: all_of_it if part is None else part, moving, (c, x, y), is_leaf=lambda v: v is None)
        return _over(axis + 1, tiles, walk, *whole)

    d = lax.map(block, tuple(jax.tree.map(partial(cut, at=at), side) for side, at in zip((c, x, y), found, strict=True)))
    d = jnp.moveaxis(d, 0, axis)
    return lax.slice_in_dim(d.reshape(*d.shape[:axis], -1, *d.shape[axis + 2 :]), 0, size, axis=axis)


def _split(v: Array, axis: int, tile: int) -> Array:
    """[..., size, ...] -> [blocks, ..., tile, ...], the last block filled with zeros."""
    v = jnp.pad(v, [(0, -v.shape[axis] % tile if at == axis else 0) for at in range(v.ndim)])
    return jnp.moveaxis(v.reshape(*v.shape[:axis], -1, tile, *v.shape[axis + 1 :]), axis, 0)
