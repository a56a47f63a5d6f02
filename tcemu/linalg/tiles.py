"""Members of groups brought to tiles, each of one group, so that arrays keep static shapes where the groups' sizes are data.

A member is a row of a ragged product, or an element along K. A group's members stand in its tiles in their own order, from the beginning of
the first one, so that blocks of a quantiser lie as they lie in the group alone; what is left of its last tile is empty.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Tiles(NamedTuple):
    """Where members stand."""

    member: Array  # int32 [tiles, size]: who stands there; the number of members where nobody does
    group: Array  # int32 [tiles]: whose tile it is; the number of groups for nobody's
    number: Array  # int32 [tiles]: the how-manieth tile of its group it is
    place: Array  # int32 [members]: where each stands among all places; their number for members of no group
    sizes: Array  # int32 [groups + 1]: how many members each group has, last those of none

    def gathered(self, x: Array, axis: int) -> Array:
        """x with members along `axis` -> [tiles, ...]: there `size` places, empty ones 0."""
        width = [(0, 1 if at == axis % x.ndim else 0) for at in range(x.ndim)]
        tiles = jnp.take(jnp.pad(x, width), self.member, axis=axis, mode="clip")
        return jnp.moveaxis(tiles, axis % x.ndim, 0)

    def scattered(self, tiles: Array, axis: int) -> Array:
        """The inverse: [tiles, ...] -> members along `axis`; those of no group 0."""
        axis %= tiles.ndim - 1
        x = jnp.moveaxis(tiles, 0, axis)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return jnp.take(jnp.pad(x, [(0, 1 if at == axis else 0) for at in range(x.ndim)]), self.place, axis=axis, mode="clip")


def groups_of(sizes: Array, count: int) -> Array:
    """The group of each of `count` members, int32 [count]: groups follow each other, and behind the last it is their number."""
    ends = jnp.cumsum(sizes.astype(jnp.int32))
    return jnp.searchsorted(ends, jnp.arange(count, dtype=jnp.int32), side="right").astype(jnp.int32)


def in_tiles(groups: Array, count: int, size: int) -> Tiles:
    """groups: int32 [members], of each member, `count` for those of none. size: of a tile.

    There are as many tiles as groups of any sizes need at most: less than members / size + groups.
    """
    members = groups.shape[0]
    tiles = (members + count * (size - 1)) // size
    counts = jnp.zeros(count + 1, jnp.int32).at[groups].add(1)
    ends = jnp.cumsum(-(-counts[:count] // size))
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])  # of each group's tiles, last of what is nobody's
    order = jnp.argsort(groups, stable=True)
    before = jnp.cumsum(counts) - counts
    rank = jnp.arange(members, dtype=jnp.int32) - before[groups[order]]
    to = jnp.where(groups[order] < count, starts[groups[order]] * size + rank, tiles * size)
    numbers = jnp.arange(tiles, dtype=jnp.int32)
    group = jnp.searchsorted(ends, numbers, side="right").astype(jnp.int32)
    return Tiles(
        member=jnp.full(tiles * size, members, jnp.int32).at[to].set(order.astype(jnp.int32), mode="drop").reshape(tiles, size),
        group=group,
        number=numbers - starts[group],
        place=jnp.zeros(members, jnp.int32).at[order].set(to.astype(jnp.int32)),
        sizes=counts,
    )


def tile_size(members: int, groups: int, multiple: int, most: int) -> int:
    """A multiple with which about half as many places stay empty as there are members, if groups are alike."""
    wanted = min(most, -(-members // (2 * max(groups, 1))))
    return multiple * max(1, -(-wanted // multiple))
