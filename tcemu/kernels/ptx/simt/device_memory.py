"""Memory of the simulated GPU: words at addresses, gathered and scattered for all threads at once.

A 64-bit address has the number of a room in its upper bits and a byte offset in its lower 40 bits. Every buffer has a room of its own, and
so do shared and local memory in generic addresses. An index that runs out of its buffer therefore never reaches another buffer.

Bits 24 to 31 of a shared-memory address are the rank of the block in its cluster, as in the machine code for sm_90a and sm_100a: kernels
set and clear these bits to reach another block of the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

ROOM_BITS = 40
SHARED_ROOM, LOCAL_ROOM, PARAM_ROOM, FUNCTION_ROOM, CONST_ROOM = 1, 2, 3, 4, 5
FIRST_ROOM = 16  # room of the first buffer
OFFSET_MASK = (1 << ROOM_BITS) - 1
WORD_BYTES = 4
RANK_SHIFT, RANK_MASK = 24, 0xFF  # the rank of the block in an address of shared memory
SHARED_OFFSET_MASK = (1 << RANK_SHIFT) - 1


def room_start(room: int) -> int:
    """Return the generic address of a room's first byte."""
    return room << ROOM_BITS


class Rooms(NamedTuple):
    """The position of each room in the words of global memory."""

    starts: Array  # int64[rooms], in words
    sizes: Array  # uint64[rooms], in bytes


class WordLocations(NamedTuple):
    """Runs of words, one for each thread."""

    first_word: Array  # int32[blocks, threads]
    good: Array  # bool[blocks, threads]: the run lies inside its memory


def locate_in_rooms(rooms: Rooms, address: Array, size: int) -> WordLocations:
    """Locate `size` bytes at generic addresses in global memory."""
    room = (address >> np.uint64(ROOM_BITS)).astype(jnp.int64)
    known = room < rooms.starts.shape[0]
    room = jnp.where(known, room, 0)
    offset = address & np.uint64(OFFSET_MASK)
    good = known & (offset + np.uint64(size) <= rooms.sizes[room])
    return WordLocations((rooms.starts[room] + (offset >> np.uint64(2)).astype(jnp.int64)).astype(jnp.int32), good)


def locate_in_rows(address: Array, size: int, words: int, row: Array) -> WordLocations:
    """Locate `size` bytes at addresses within rows of `words` words each; row: int32[blocks, threads], each thread's row."""
    good = address + np.uint64(size) <= np.uint64(WORD_BYTES * words)
    good &= address <= np.uint64(OFFSET_MASK)
    offset = jnp.where(good, address >> np.uint64(2), 0).astype(jnp.int32)
    return WordLocations(row * np.int32(words) + offset, good)


def extract_rank(address: Array) -> Array:
    """Return the rank of the block to which an address of shared memory belongs, generic or not, uint32."""
    return (address >> address.dtype.type(RANK_SHIFT)).astype(jnp.uint32) & np.uint32(RANK_MASK)


def replace_rank(address: Array, rank: Array) -> Array:
    """Return the address of the same offset in the shared memory of the block of another rank."""
    others = address & ~address.dtype.type(RANK_MASK << RANK_SHIFT)
    return others | (rank.astype(address.dtype) & address.dtype.type(RANK_MASK)) << address.dtype.type(RANK_SHIFT)


def locate_shared(address: np.ndarray, rows: np.ndarray, cluster: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the blocks to which addresses of shared memory belong, and the offsets there, on the host.

    Args:
        address: uint64, generic or not.
        rows: Rows in the chunk of the blocks that use them, int; they broadcast to the addresses.
        cluster: Blocks of a cluster. A rank beyond it counts as its last one.
    """
    address = address.astype(np.uint64)
    offset = (address & np.uint64(SHARED_OFFSET_MASK)).astype(np.int64)
    if cluster == 1:
        return np.broadcast_to(rows, address.shape), offset
    rank = (address >> np.uint64(RANK_SHIFT)).astype(np.int64) & RANK_MASK
    return rows - rows % cluster + np.minimum(rank, cluster - 1), offset


# ---- gather and scatter: `words` is flat, indices are [blocks, threads]


def gather_words(words: Array, index: Array, count: int) -> list[Array]:
    """Return `count` consecutive words from each index on; zeros for a run that is not whole."""
    if not words.size:  # JAX refuses to gather from nothing: a kernel without shared memory
        return [jnp.zeros(index.shape, words.dtype)] * count
    axes = lax.GatherDimensionNumbers(offset_dims=(index.ndim,), collapsed_slice_dims=(), start_index_map=(0,))
    runs = lax.gather(words, index[..., None], axes, (count,), mode=lax.GatherScatterMode.FILL_OR_DROP, fill_value=0)
    return [runs[..., i] for i in range(count)]


def extract_element(words: list[Array], address: Array, bits: int) -> Array:
    """Return the element of 8 to 64 bits at an address, from the one or two words that contain it."""
    if bits == 64:
        return join_words(words[0], words[1])
    if bits == 32:
        return words[0]
    shift = (address & np.uint64(3)).astype(jnp.uint32) << np.uint32(3)
    return (words[0] >> shift) & np.uint32((1 << bits) - 1)


def scatter_words(words: Array, index: Array, value: Array, mask: Array) -> Array:
    """Store one word at each index of the mask. If several threads store at one index, the last thread wins."""
    return scatter_runs(words, index, [value], mask)


def scatter_runs(words: Array, index: Array, values: Sequence[Array], mask: Array, exclusive: bool = False) -> Array:
    """Store consecutive words from each index of the mask on. If several threads store at one index, the last thread wins.

    XLA leaves the order of several updates of one element open. So the winners are found first: each element takes the greatest number of
    the threads that store there, which is the same in every order, and a thread that reads its own number back has won. Each element then
    has one update.

    Args:
        words: uint32[words].
        index: int32[blocks, threads], the first word of each run. Two runs must coincide or be disjoint.
        values: The words of each run, uint32[blocks, threads] each.
        mask: bool[blocks, threads], the threads that store.
        exclusive: No two threads of the mask have one index, so that there are no winners to find.

    Returns:
        The words after the stores.
    """
    if not words.size:
        return words
    end = np.int32(words.shape[0])
    index = jnp.where(mask, index, end).ravel()
    if not exclusive:
        number = jnp.arange(index.size, dtype=words.dtype)
        words = words.at[index].set(words.dtype.type(0), mode="drop").at[index].max(number, mode="drop")
        wins = words.at[index].get(mode="fill", fill_value=0) == number
        index = jnp.where(wins, index, end)
    if len(values) == 1:
        return words.at[index].set(values[0].ravel(), mode="drop")
    runs = jnp.stack([value.ravel() for value in values], axis=-1)  # one scatter compiles fastest
    return words.at[index[:, None] + np.arange(len(values), dtype=np.int32)].set(runs, mode="drop")


def scatter_element(words: Array, index: Array, address: Array, value: Array, mask: Array, bits: int, exclusive: bool = False) -> Array:
    """Store one element of 8 to 64 bits at each address. Elements that share a word are all stored. See `scatter_runs`."""
    if bits >= 32:
        return scatter_runs(words, index, split_words(value), mask, exclusive)
    ones = np.uint32((1 << bits) - 1)
    for shift in range(0, 32, bits):
        aligned = mask & ((address & np.uint64(3)) == np.uint64(shift // 8))
        (old,) = gather_words(words, index, 1)
        others = old & ~(ones << np.uint32(shift))
        words = scatter_runs(words, index, [others | (value & ones) << np.uint32(shift)], aligned, exclusive)
    return words


def join_elements(values: Sequence[Array], bits: int) -> list[Array]:
    """Return the words of consecutive elements of 8 to 64 bits, which fill them."""
    if bits >= 32:
        return [word for value in values for word in split_words(value)]
    ones, count = np.uint32((1 << bits) - 1), 32 // bits
    return [
        reduce(jnp.bitwise_or, [(values[first + i] & ones) << np.uint32(i * bits) for i in range(count)])
        for first in range(0, len(values), count)
    ]


def join_words(low: Array, high: Array) -> Array:
    """Return a low and a high word as uint64."""
    return low.astype(jnp.uint64) | high.astype(jnp.uint64) << np.uint64(32)


def split_words(value: Array) -> list[Array]:
    """Return the words of a 32-bit or 64-bit value, low word first."""
    if value.dtype == jnp.uint64:
        return [value.astype(jnp.uint32), (value >> np.uint64(32)).astype(jnp.uint32)]
    return [value]
