"""Checked mode of clusters: accesses to the shared memory of other blocks that no synchronisation orders, and accesses to exited blocks.

For every byte of shared memory a record has the block that wrote it last and the blocks that have read it, since threads of the cluster
last acquired what others released: by `barrier.cluster.wait`, by a wait for an mbarrier that succeeded, by an atomic, or by a load that is
volatile, relaxed or acquire. Whatever is found is a race, but not every race is found. The accesses of a block's own threads to its memory
among themselves are the subject of `shared_memory_checks`. Source: PTX ISA 8.7, 9.7.13.4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.base.errors import UndefinedBehaviour
from tcemu.kernels.ptx.simt.device_memory import extract_rank
from tcemu.kernels.ptx.simt.faults import Message, register_messages

CLUSTER_KEY = "cluster"  # of the record in `Machine.extra`
NOBODY = np.int32(-1)
UNORDERED = "and no barrier of the cluster and no mbarrier has ordered it since"
register_messages(
    cluster_write=Message(f"the block of rank {{0}} wrote another value there, {UNORDERED}", UndefinedBehaviour, "shared"),
    cluster_read=Message(f"the block of rank {{0}} wrote there, {UNORDERED}", UndefinedBehaviour, "shared"),
    cluster_overwrite=Message(f"the block of rank {{0}} read there, {UNORDERED}", UndefinedBehaviour, "shared"),
    cluster_barrier=Message(f"the block of rank {{0}} initialised this mbarrier, {UNORDERED}", UndefinedBehaviour, "shared"),
    cluster_exited=Message(
        "the block of rank {0} has exited; a barrier of the cluster must keep it until others have used its memory",
        UndefinedBehaviour,
        "shared",
    ),
    cluster_foreign=Message("a .shared::cta access reaches the block of rank {0}; expected .shared::cluster", UndefinedBehaviour, "shared"),
)


class ClusterRecord(NamedTuple):
    """The accesses of blocks since the last synchronisation of their cluster."""

    writer: Array  # int32[blocks, bytes]: the rank of the last writer; NOBODY if there is none
    readers: Array  # bool[blocks, bytes, ranks]
    exited: Array  # bool[blocks]: all threads have exited


def new_record(blocks: int, size: int, cluster_size: int) -> ClusterRecord:
    """Return the record before any access."""
    return ClusterRecord(jnp.full((blocks, size), NOBODY), jnp.zeros((blocks, size, cluster_size), bool), jnp.zeros(blocks, bool))


def owner_rows(machine: Any, first_word: Array) -> Array:
    """Return the rows of the blocks to which words of shared memory belong, int32 of the shape of `first_word`."""
    return first_word // np.int32(max(machine.shared.shape[-1], 1))


def is_own_memory(machine: Any, first_word: Array) -> Array:
    """Return where words of shared memory belong to the thread's own block."""
    return owner_rows(machine, first_word) == jnp.arange(first_word.shape[0], dtype=jnp.int32)[:, None]


def _own_ranks(machine: Any) -> Array:
    return jnp.broadcast_to(machine.ranks(), machine.active.shape)


def _with_record(machine: Any, **changes: Array) -> Any:
    record: ClusterRecord = machine.extra[CLUSTER_KEY]
    new = record._replace(**{name: value.reshape(getattr(record, name).shape) for name, value in changes.items()})
    return replace(machine, extra={**machine.extra, CLUSTER_KEY: new})


def _other_writer(machine: Any, byte_index: Array, mask: Array) -> Array:
    """Return the rank of each byte's writer if it is another block; else NOBODY."""
    writer = machine.extra[CLUSTER_KEY].writer.ravel().at[byte_index].get(mode="fill", fill_value=NOBODY)
    return jnp.where(mask & (writer != _own_ranks(machine)[..., None].astype(jnp.int32)), writer, NOBODY)


def check_read(machine: Any, byte_index: Array, address: Array, mask: Array) -> Any:
    """Record that threads have read bytes, int64[blocks, threads, size], and report what another block wrote."""
    writer = _other_writer(machine, byte_index, mask[..., None])
    machine = machine.fault(mask & (writer != NOBODY).any(-1), "cluster_read", address, writer.max(-1))
    record: ClusterRecord = machine.extra[CLUSTER_KEY]
    readers = record.readers.reshape(-1, record.readers.shape[-1])
    rank = jnp.broadcast_to(_own_ranks(machine)[..., None], byte_index.shape)
    return _with_record(machine, readers=readers.at[byte_index, rank].set(True, mode="drop"))


def check_write(machine: Any, byte_index: Array, address: Array, mask: Array, changes: Array) -> Any:
    """Record that threads have stored bytes, and report what another block wrote or read there. changes: the bytes with another value."""
    writer = jnp.where(changes, _other_writer(machine, byte_index, mask[..., None]), NOBODY)
    machine = machine.fault(mask & (writer != NOBODY).any(-1), "cluster_write", address, writer.max(-1))
    record: ClusterRecord = machine.extra[CLUSTER_KEY]
    rank = _own_ranks(machine)
    readers = record.readers.reshape(-1, record.readers.shape[-1]).at[byte_index].get(mode="fill", fill_value=False).any(-2)
    others = readers & (jnp.arange(readers.shape[-1]) != rank[..., None])
    machine = machine.fault(mask & others.any(-1), "cluster_overwrite", address, jnp.argmax(others, axis=-1))
    everywhere = jnp.broadcast_to(rank[..., None].astype(jnp.int32), byte_index.shape)
    return _with_record(machine, writer=record.writer.ravel().at[byte_index].set(everywhere, mode="drop"))


def record_initialisation(machine: Any, first_word: Array, size: int, mask: Array) -> Any:
    """Record that threads have initialised mbarriers of `size` bytes."""
    if CLUSTER_KEY not in machine.extra:
        return machine
    record: ClusterRecord = machine.extra[CLUSTER_KEY]
    byte_index = _byte_index(record, first_word, size, mask)
    rank = jnp.broadcast_to(_own_ranks(machine)[..., None].astype(jnp.int32), byte_index.shape)
    return _with_record(machine, writer=record.writer.ravel().at[byte_index].set(rank, mode="drop"))


def check_barrier(machine: Any, first_word: Array, address: Array, size: int, mask: Array) -> Any:
    """Report arrivals at mbarriers that another block has initialised, if nothing has ordered the initialisation before them."""
    if CLUSTER_KEY not in machine.extra:
        return machine
    byte_index = _byte_index(machine.extra[CLUSTER_KEY], first_word, size, mask)
    writer = _other_writer(machine, byte_index, mask[..., None]).max(-1)
    return machine.fault(mask & (writer != NOBODY), "cluster_barrier", address, writer)


def _byte_index(record: ClusterRecord, first_word: Array, size: int, mask: Array) -> Array:
    every = first_word.astype(jnp.int64)[..., None] * 4 + jnp.arange(size)
    return jnp.where(mask[..., None], every, record.writer.size)


def check_owner(machine: Any, space: str, first_word: Array, address: Array, mask: Array) -> Any:
    """Report accesses to blocks that have exited, and .shared::cta accesses to other blocks."""
    if CLUSTER_KEY not in machine.extra:
        return machine
    other = mask & ~is_own_memory(machine, first_word)
    rank = extract_rank(address)
    if space == "shared":
        machine = machine.fault(other, "cluster_foreign", address, rank)
    exited = machine.extra[CLUSTER_KEY].exited.at[owner_rows(machine, first_word)].get(mode="fill", fill_value=False)
    return machine.fault(other & exited, "cluster_exited", address, rank)


def order_cluster(machine: Any, threads: Array | None = None) -> Any:
    """Forget the accesses in the clusters of which a thread acquires what others released; threads: bool, None: the active ones."""
    if CLUSTER_KEY not in machine.extra:
        return machine
    acquired = (machine.active if threads is None else machine.active & threads).any(-1)
    record = clear_clusters(machine.extra[CLUSTER_KEY], acquired)
    return _with_record(machine, writer=record.writer, readers=record.readers)


def clear_clusters(record: ClusterRecord, blocks: Array) -> ClusterRecord:
    """Forget the accesses in the clusters of the blocks, bool[blocks]."""
    count = record.readers.shape[-1]
    cleared = jnp.repeat(blocks.reshape(-1, count).any(-1), count)[:, None]
    return record._replace(writer=jnp.where(cleared, NOBODY, record.writer), readers=record.readers & ~cleared[..., None])


def users_of_blocks(record: ClusterRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return bool[blocks], the blocks whose memory others have used since the last synchronisation, and the rank of such a user."""
    rank = np.arange(record.writer.shape[0]) % record.readers.shape[-1]
    writer, readers, count = np.asarray(record.writer), np.asarray(np.asarray(record.readers).any(1)), record.readers.shape[-1]
    used = readers & (np.arange(count) != rank[:, None])
    for number in range(count):
        used[:, number] |= ((writer == number) & (rank[:, None] != number)).any(-1)
    return np.asarray(used.any(-1)), np.asarray(used.argmax(-1))
