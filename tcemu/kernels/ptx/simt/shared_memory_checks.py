"""Checked mode of shared memory: data races between barriers, reads of what nothing has written, reads of what `cp.async` still writes.

For every byte of shared memory a shadow records its last writer and its readers since the threads of the block last synchronised, and
whether it was ever written. Whatever may order accesses clears the record of the whole block: a barrier of any kind, a fence, an atomic, an
access that is volatile, relaxed, acquire or release. `bar.warp.sync` orders the accesses of its warp. So everything found is a race, but
not every race is found.

For every word of shared memory a second record has the thread whose `cp.async` wrote it last, and that thread's group. The word may be read
after that thread has waited for the group. An arrival at an mbarrier by `cp.async.mbarrier.arrive` counts as a wait, since it follows the
copies. Source: PTX ISA 9.7.9.25.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.base.errors import UndefinedBehaviour
from tcemu.engine.isa.families import LANES
from tcemu.kernels.ptx.simt import cluster_checks as clusters
from tcemu.kernels.ptx.simt.faults import Message, register_messages

ACCESS_KEY = "checks"  # of the shadow in `Machine.extra`
COPY_KEY = "copies"  # of the pending copies in `Machine.extra`
NOBODY = np.int32(-1)
ABOVE_ALL_THREADS = np.int32(2**30)
WARP_SYNCED = np.int32(1 << 20)  # added to a writer whose warp has synchronised since
register_messages(
    copy_pending=Message("a cp.async of thread {0} writes there, and that thread has not waited for it", UndefinedBehaviour, "shared")
)


# ---- races and uninitialised reads


class Shadow(NamedTuple):
    """The record of each byte of shared memory, [blocks, bytes] each."""

    writer: Array  # int32: the last writer, plus WARP_SYNCED if its warp has synchronised since; NOBODY if there is none
    first: Array  # int32: the least thread that read the byte; ABOVE_ALL_THREADS if there is none
    last: Array  # int32: the greatest thread that read it; NOBODY if there is none
    written: Array  # bool: something has ever written it


def new_shadow(blocks: int, size: int, initialised: bool) -> Shadow:
    """Return the shadow of untouched memory. initialised: reads of unwritten bytes are not reported."""
    nobody = jnp.full((blocks, size), NOBODY)
    return Shadow(nobody, jnp.full((blocks, size), ABOVE_ALL_THREADS), nobody.copy(), jnp.full((blocks, size), initialised))


class _TouchedBytes(NamedTuple):
    """The bytes that threads access, [blocks, threads, size] each."""

    byte_index: Array  # int64; beyond the end where the thread takes no part
    thread: Array
    mask: Array


def _own_bytes(machine: Any, first_word: Array, touched: _TouchedBytes) -> _TouchedBytes:
    """Return the bytes of the threads' own blocks; those of other blocks of a cluster are the subject of `cluster_checks`."""
    if machine.cluster_size == 1:
        return touched
    mask = touched.mask & clusters.is_own_memory(machine, first_word)[..., None]
    return touched._replace(byte_index=jnp.where(mask, touched.byte_index, machine.shared.size * 4), mask=mask)


def _touched_bytes(machine: Any, first_word: Array, address: Array, size: int, mask: Array) -> _TouchedBytes:
    start = first_word.astype(jnp.int64) * 4 + (address & np.uint64(3)).astype(jnp.int64)
    every = start[..., None] + jnp.arange(size)
    thread = jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=jnp.int32)[:, None], every.shape)
    mask = jnp.broadcast_to(mask[..., None], every.shape)
    return _TouchedBytes(jnp.where(mask, every, machine.shared.size * 4), thread, mask)


def _gather_bytes(array: Array, touched: _TouchedBytes) -> Array:
    return array.ravel().at[touched.byte_index].get(mode="fill", fill_value=0)


def _unordered_writer(state: Shadow, touched: _TouchedBytes) -> Array:
    """Return each byte's writer if it is another thread with which this one has not synchronised since; else NOBODY."""
    writer = jnp.where(touched.mask, _gather_bytes(state.writer, touched), NOBODY)
    thread = writer % WARP_SYNCED
    ordered = (thread == touched.thread) | ((writer >= WARP_SYNCED) & (thread // LANES == touched.thread // LANES))
    return jnp.where((writer == NOBODY) | ordered, NOBODY, thread)


def _with_shadow(machine: Any, **changes: Array) -> Any:
    old: Shadow = machine.extra[ACCESS_KEY]
    new = old._replace(**{name: value.reshape(getattr(old, name).shape) for name, value in changes.items()})
    return replace(machine, extra={**machine.extra, ACCESS_KEY: new})


def check_read(machine: Any, first_word: Array, address: Array, size: int, mask: Array) -> Any:
    """Record that threads have read `size` bytes each, from `first_word` of shared memory on, and report races and unwritten bytes."""
    if ACCESS_KEY not in machine.extra:
        return machine
    state: Shadow = machine.extra[ACCESS_KEY]
    touched = _touched_bytes(machine, first_word, address, size, mask)
    unwritten = touched.mask & ~_gather_bytes(state.written, touched)
    machine = machine.fault(mask & unwritten.any(-1), "uninitialised", address, size)
    if clusters.CLUSTER_KEY in machine.extra:
        machine = clusters.check_read(machine, touched.byte_index, address, mask)
    touched = _own_bytes(machine, first_word, touched)
    writer = _unordered_writer(state, touched)
    raced = writer != NOBODY
    machine = machine.fault(mask & raced.any(-1), "race_read", address, jnp.where(raced, writer, NOBODY).max(-1))
    return _with_shadow(
        machine,
        first=state.first.ravel().at[touched.byte_index].min(touched.thread, mode="drop"),
        last=state.last.ravel().at[touched.byte_index].max(touched.thread, mode="drop"),
    )


def check_write(machine: Any, old_words: Array, first_word: Array, address: Array, size: int, mask: Array) -> Any:
    """Record that threads have stored `size` bytes each, and report races. old_words: shared memory before the stores."""
    if ACCESS_KEY not in machine.extra:
        return machine
    state: Shadow = machine.extra[ACCESS_KEY]
    touched = _touched_bytes(machine, first_word, address, size, mask)
    now, old = (_extract_byte(words.ravel(), touched.byte_index) for words in (machine.shared, old_words))
    written = state.written.ravel().at[touched.byte_index].set(True, mode="drop")
    if clusters.CLUSTER_KEY in machine.extra:
        machine = clusters.check_write(machine, touched.byte_index, address, mask, now != old)
    touched = _own_bytes(machine, first_word, touched)
    writer = _unordered_writer(state, touched)
    winner = _last_thread(state.writer.ravel(), touched.byte_index, touched.thread)
    other = (writer != NOBODY) & (now != old)
    first, last = _gather_bytes(state.first, touched), _gather_bytes(state.last, touched)
    read = touched.mask & ((first < touched.thread) | ((last != NOBODY) & (last > touched.thread)))
    reader = jnp.where(first < touched.thread, first, last)
    machine = machine.fault(mask & other.any(-1), "race_write", address, jnp.where(other, writer, NOBODY).max(-1))
    machine = machine.fault(mask & read.any(-1), "race_overwrite", address, jnp.where(read, reader, NOBODY).max(-1))
    return _with_shadow(machine, writer=winner, written=written)


def _last_thread(threads: Array, index: Array, thread: Array) -> Array:
    """Store each thread's number at its index. Of several, the greatest stays, whose store `device_memory.scatter_runs` keeps."""
    return threads.at[index].set(NOBODY, mode="drop").at[index].max(thread, mode="drop")


def check_collision(machine: Any, values: list[Array], first_word: Array, address: Array, size: int, mask: Array) -> Any:
    """Report threads that stored different bytes at one address in one statement. values: the bytes of each thread."""
    if ACCESS_KEY not in machine.extra:
        return machine
    touched = _touched_bytes(machine, first_word, address, size, mask)
    lost = touched.mask & (_extract_byte(machine.shared.ravel(), touched.byte_index) != jnp.stack(values, -1))
    writer = _gather_bytes(machine.extra[ACCESS_KEY].writer, touched)
    return machine.fault(mask & lost.any(-1), "race_write", address, jnp.where(lost, writer, NOBODY).max(-1))


def _extract_byte(words: Array, byte_index: Array) -> Array:
    word = words.at[byte_index >> 2].get(mode="fill", fill_value=0)
    return (word >> ((byte_index & 3) * 8).astype(jnp.uint32)) & np.uint32(0xFF)


def split_bytes(values: tuple[Array, ...], bits: int) -> list[Array]:
    """Return the bytes of consecutive values, each as uint32."""
    return [((value >> value.dtype.type(low)) & value.dtype.type(0xFF)).astype(jnp.uint32) for value in values for low in range(0, bits, 8)]


def mark_written(machine: Any, first_word: Array, address: Array, size: int, mask: Array) -> Any:
    """Record bytes that an atomic has written."""
    if ACCESS_KEY not in machine.extra:
        return machine
    touched = _touched_bytes(machine, first_word, address, size, mask)
    return _with_shadow(machine, written=machine.extra[ACCESS_KEY].written.ravel().at[touched.byte_index].set(True, mode="drop"))


def mark_words_written(machine: Any, words: Array) -> Any:
    """Record words of shared memory, bool[words of all blocks], that a fill has written."""
    if ACCESS_KEY not in machine.extra:
        return machine
    state: Shadow = machine.extra[ACCESS_KEY]
    return _with_shadow(machine, written=state.written | jnp.repeat(words, 4).reshape(state.written.shape))


def clear_blocks(state: Shadow, blocks: Array) -> Shadow:
    """Forget the accesses of the blocks, bool[blocks]: they are ordered before everything that follows."""
    cleared = blocks[:, None]
    return Shadow(
        jnp.where(cleared, NOBODY, state.writer),
        jnp.where(cleared, ABOVE_ALL_THREADS, state.first),
        jnp.where(cleared, NOBODY, state.last),
        state.written,
    )


def order_blocks(machine: Any) -> Any:
    """Forget the accesses of the blocks whose active threads did what may order accesses."""
    if ACCESS_KEY not in machine.extra:
        return machine
    state = clear_blocks(machine.extra[ACCESS_KEY], machine.active.any(-1))
    return _with_shadow(machine, writer=state.writer, first=state.first, last=state.last)


def order_warps(machine: Any) -> Any:
    """Order the accesses of each warp of which a thread is active, among its own lanes."""
    if ACCESS_KEY not in machine.extra:
        return machine
    state: Shadow = machine.extra[ACCESS_KEY]
    synced = machine.warps(machine.active).any(-1)

    def is_synchronised(thread: Array) -> Array:
        warp = jnp.clip(thread % WARP_SYNCED // LANES, 0, synced.shape[1] - 1)
        return jnp.take_along_axis(synced, warp, axis=1) & (thread != NOBODY) & (thread != ABOVE_ALL_THREADS)

    alone = is_synchronised(state.first) & (state.first // LANES == state.last // LANES)
    return _with_shadow(
        machine,
        writer=jnp.where(is_synchronised(state.writer), state.writer % WARP_SYNCED + WARP_SYNCED, state.writer),
        first=jnp.where(alone, ABOVE_ALL_THREADS, state.first),
        last=jnp.where(alone, NOBODY, state.last),
    )


# ---- cp.async


class PendingCopies(NamedTuple):
    """The copies of `cp.async`."""

    copier: Array  # int32[blocks, words] of shared memory: the thread whose copy wrote the word last, or NOBODY
    group: Array  # int32[blocks, words]: the copy's group, counted from 1; 0 if there is none
    committed: Array  # int32[blocks, threads]: groups committed so far
    waited: Array  # int32[blocks, threads]: groups waited for so far


def no_pending_copies(blocks: int, words: int, threads: int) -> PendingCopies:
    """Return the record before any copy."""
    nothing = jnp.zeros((blocks, threads), jnp.int32)
    return PendingCopies(jnp.full((blocks, words), NOBODY), jnp.zeros((blocks, words), jnp.int32), nothing, nothing.copy())


def _with_copies(machine: Any, copies: PendingCopies) -> Any:
    return replace(machine, extra={**machine.extra, COPY_KEY: copies})


def record_copies(machine: Any, first_word: Array, words: int) -> Any:
    """Record that active threads have issued copies of `words` words each, to `first_word` of shared memory and those after it."""
    if COPY_KEY not in machine.extra:
        return machine
    copies: PendingCopies = machine.extra[COPY_KEY]
    thread = jnp.broadcast_to(jnp.arange(first_word.shape[1], dtype=jnp.int32), first_word.shape)
    copier, group = copies.copier.ravel(), copies.group.ravel()
    end = np.int32(copier.shape[0])
    for i in range(words):
        index = jnp.where(machine.active, first_word + np.int32(i), end)
        copier = _last_thread(copier, index, thread)
        wins = copier.at[index].get(mode="fill", fill_value=NOBODY) == thread
        group = group.at[jnp.where(wins, index, end)].set(copies.committed + 1, mode="drop")
    shape = copies.copier.shape
    return _with_copies(machine, copies._replace(copier=copier.reshape(shape), group=group.reshape(shape)))


def commit_group(machine: Any) -> Any:
    """Record a `cp.async.commit_group` of the active threads."""
    if COPY_KEY not in machine.extra:
        return machine
    copies: PendingCopies = machine.extra[COPY_KEY]
    return _with_copies(machine, copies._replace(committed=copies.committed + machine.active))


def wait_group(machine: Any, pending: int | None) -> Any:
    """Record that active threads have waited for all groups but the last `pending`; None: for all copies, also those in no group."""
    if COPY_KEY not in machine.extra:
        return machine
    copies: PendingCopies = machine.extra[COPY_KEY]
    done = copies.committed + 1 if pending is None else copies.committed - pending
    return _with_copies(machine, copies._replace(waited=jnp.where(machine.active, jnp.maximum(copies.waited, done), copies.waited)))


def check_pending(machine: Any, first_word: Array, address: Array, size: int, mask: Array) -> Any:
    """Report threads that read `size` bytes, from `first_word` of shared memory on, which a copy still writes."""
    if COPY_KEY not in machine.extra:
        return machine
    copies: PendingCopies = machine.extra[COPY_KEY]
    row = clusters.owner_rows(machine, first_word)
    for i in range(-(-size // 4)):
        copier = copies.copier.ravel().at[first_word + np.int32(i)].get(mode="fill", fill_value=NOBODY)
        group = copies.group.ravel().at[first_word + np.int32(i)].get(mode="fill", fill_value=0)
        pending = (copier >= 0) & (group > copies.waited[row, jnp.maximum(copier, 0)])
        machine = machine.fault(mask & pending, "copy_pending", address, copier)
    return machine
