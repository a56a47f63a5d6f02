"""Tiles of rows, each of one group, so that arrays keep static shapes where the groups' sizes are data.

A row is a row of a ragged product, or an element along K. A group's rows fill its tiles in order, from the beginning of the first tile, so
that blocks of a quantiser lie as in the group alone. The rest of its last tile is empty.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class GroupTiles(NamedTuple):
    """The positions of rows in tiles."""

    source_row: Array  # int32 [tiles, size]: index of the row in each slot; the number of rows in an empty slot
    group: Array  # int32 [tiles]: group of the tile; the number of groups for an unused tile
    tile_in_group: Array  # int32 [tiles]: index of the tile within its group
    position: Array  # int32 [rows]: slot of each row, counted over all tiles; the number of slots for a row of no group
    sizes: Array  # int32 [groups + 1]: rows per group; the last counts the rows of no group

    def gather_rows(self, x: Array, axis: int) -> Array:
        """Gathers x, whose rows lie along `axis`, into tiles [tiles, ...] with `size` slots there. Empty slots are 0."""
        width = [(0, 1 if at == axis % x.ndim else 0) for at in range(x.ndim)]
        tiles = jnp.take(jnp.pad(x, width), self.source_row, axis=axis, mode="clip")
        return jnp.moveaxis(tiles, axis % x.ndim, 0)

    def scatter_rows(self, tiles: Array, axis: int) -> Array:
        """Scatters tiles [tiles, ...] back to rows along `axis`, the inverse of `gather_rows`. Rows of no group are 0."""
        axis %= tiles.ndim - 1
        x = jnp.moveaxis(tiles, 0, axis)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return jnp.take(jnp.pad(x, [(0, 1 if at == axis else 0) for at in range(x.ndim)]), self.position, axis=axis, mode="clip")


def group_ids(sizes: Array, count: int) -> Array:
    """Returns the group of each of `count` rows, int32 [count]. Groups follow each other; rows behind the last get the number of groups."""
    ends = jnp.cumsum(sizes.astype(jnp.int32))
    return jnp.searchsorted(ends, jnp.arange(count, dtype=jnp.int32), side="right").astype(jnp.int32)


def tile_groups(groups: Array, count: int, size: int) -> GroupTiles:
    """Assigns rows to tiles. Their number suffices for groups of any sizes: less than rows / size + groups.

    Args:
        groups: int32 [rows], the group of each row; `count` for rows of no group.
        count: Number of groups.
        size: Slots per tile.
    """
    rows = groups.shape[0]
    tiles = (rows + count * (size - 1)) // size
    counts = jnp.zeros(count + 1, jnp.int32).at[groups].add(1)
    ends = jnp.cumsum(-(-counts[:count] // size))
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])  # first tile of each group, then of the unused tiles
    order = jnp.argsort(groups, stable=True)
    before = jnp.cumsum(counts) - counts
    rank = jnp.arange(rows, dtype=jnp.int32) - before[groups[order]]
    to = jnp.where(groups[order] < count, starts[groups[order]] * size + rank, tiles * size)
    numbers = jnp.arange(tiles, dtype=jnp.int32)
    group = jnp.searchsorted(ends, numbers, side="right").astype(jnp.int32)
    return GroupTiles(
        source_row=jnp.full(tiles * size, rows, jnp.int32).at[to].set(order.astype(jnp.int32), mode="drop").reshape(tiles, size),
        group=group,
        tile_in_group=numbers - starts[group],
        position=jnp.zeros(rows, jnp.int32).at[order].set(to.astype(jnp.int32)),
        sizes=counts,
    )


def tile_size(rows: int, groups: int, multiple: int, most: int) -> int:
    """Returns a multiple of `multiple` that leaves about half as many slots empty as there are rows, for groups of equal size."""
    target = min(most, -(-rows // (2 * max(groups, 1))))
    return multiple * max(1, -(-target // multiple))
