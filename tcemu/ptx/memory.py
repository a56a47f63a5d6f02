"""Memory as the machine holds it: words at addresses, gathered and scattered for all threads at once.

An address of 64 bits names a room in its upper bits and a byte of it in its lower 40: every buffer has a room of its own, and so do
shared and local memory, for generic addresses. So an index that runs out of its buffer never meets another one, however far it runs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

ROOM_BITS = 40
SHARED_ROOM, LOCAL_ROOM, PARAM_ROOM, CONST_ROOM, FIRST_ROOM = 1, 2, 3, 5, 16  # FIRST_ROOM: of the buffers
INSIDE = (1 << ROOM_BITS) - 1
WORD = 4  # bytes


def window(room: int) -> int:
    """The generic address at which a room begins."""
    return room << ROOM_BITS


class Rooms(NamedTuple):
    """Where buffers lie in the words of global memory, by room. starts: int64 [rooms], in words; sizes: uint64 [rooms], in bytes."""

    starts: Array
    sizes: Array


class Places(NamedTuple):
    """Runs of words. at: int32 [blocks, threads], the first word of each; good: bool, whether the run lies inside."""

    at: Array
    good: Array


def in_rooms(rooms: Rooms, address: Array, size: int) -> Places:
    """Where `size` bytes at generic addresses lie in global memory."""
    room = (address >> np.uint64(ROOM_BITS)).astype(jnp.int64)
    known = room < rooms.starts.shape[0]
    room = jnp.where(known, room, 0)
    inside = address & np.uint64(INSIDE)
    good = known & (inside + np.uint64(size) <= rooms.sizes[room])
    return Places((rooms.starts[room] + (inside >> np.uint64(2)).astype(jnp.int64)).astype(jnp.int32), good)


def in_rows(address: Array, size: int, words: int, row: Array) -> Places:
    """Where `size` bytes at addresses within rows of so many words lie; row: int32 [blocks, threads], the row of each thread."""
    good = address + np.uint64(size) <= np.uint64(WORD * words)
    good &= address <= np.uint64(INSIDE)
    inside = jnp.where(good, address >> np.uint64(2), 0).astype(jnp.int32)
    return Places(row * np.int32(words) + inside, good)


# ---- words in, words out: `words` is flat, places [blocks, threads]


def gather(words: Array, at: Array, count: int) -> list[Array]:
    """`count` words from each place on."""
    return [words.at[at + np.int32(i)].get(mode="fill", fill_value=0) for i in range(count)]


def element(words: list[Array], address: Array, bits: int) -> Array:
    """The value of an element out of the words in which it lies: one, or two."""
    if bits == 64:
        return words[0].astype(jnp.uint64) | words[1].astype(jnp.uint64) << np.uint64(32)
    if bits == 32:
        return words[0]
    shift = (address & np.uint64(3)).astype(jnp.uint32) << np.uint32(3)
    return (words[0] >> shift) & np.uint32((1 << bits) - 1)


def scatter(words: Array, at: Array, value: Array, mask: Array) -> Array:
    """The words with one word stored at each place of the mask. Of threads that meet in one word, the last one wins."""
    at = jnp.where(mask, at, np.int32(words.shape[0])).ravel()
    return lax.platform_dependent(words, at, value.ravel(), cpu=_in_order, default=_winners)


def _in_order(words: Array, at: Array, value: Array) -> Array:
    return words.at[at].set(value, mode="drop")  # XLA:CPU scatters in the order of the indices


def _winners(words: Array, at: Array, value: Array) -> Array:
    """Elsewhere the order is nobody's: only the last of each address stores."""
    order = jnp.argsort(at, stable=True)
    at, value = at[order], value[order]
    last = jnp.concatenate([at[1:] != at[:-1], jnp.ones(1, bool)])
    return words.at[jnp.where(last, at, np.int32(words.shape[0]))].set(value, mode="drop")


def scatter_element(words: Array, at: Array, address: Array, value: Array, mask: Array, bits: int) -> Array:
    """The words with one element stored at each place, of 8 to 64 bits. Parts of one word from different threads all arrive."""
    if bits == 64:
        words = scatter(words, at, value.astype(jnp.uint32), mask)
        return scatter(words, at + np.int32(1), (value >> np.uint64(32)).astype(jnp.uint32), mask)
    if bits == 32:
        return scatter(words, at, value, mask)
    ones = np.uint32((1 << bits) - 1)
    for shift in range(0, 32, bits):
        here = mask & ((address & np.uint64(3)) == np.uint64(shift // 8))
        (old,) = gather(words, at, 1)
        kept = old & ~(ones << np.uint32(shift))
        words = scatter(words, at, kept | (value & ones) << np.uint32(shift), here)
    return words
