"""Checked mode of `cp.async`: shared memory that a copy writes may be read only after the thread that issued the copy has waited for it.

Of every word of shared memory it is kept which thread's copy wrote it last, and in which of that thread's groups. An arrival at an mbarrier
by `cp.async.mbarrier.arrive` counts as a wait, since it follows the copies. Source: PTX ISA 9.7.9.25.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.errors import UndefinedBehaviour
from tcemu.ptx.faults import Message, add

KEY = "copies"  # in `Machine.extra`
NOBODY = np.int32(-1)
add(copy_pending=Message("a cp.async of thread {0} writes there, and that thread has not waited for it", UndefinedBehaviour, "shared"))


class Copies(NamedTuple):
    """copier, group: int32 [blocks, words] of shared memory, NOBODY and 0 for none.

    committed, waited: int32 [blocks, threads], the groups so far.
    """

    copier: Array
    group: Array
    committed: Array
    waited: Array


def none_pending(blocks: int, words: int, threads: int) -> Copies:
    """Nothing was copied yet."""
    nothing = jnp.zeros((blocks, threads), jnp.int32)
    return Copies(jnp.full((blocks, words), NOBODY), jnp.zeros((blocks, words), jnp.int32), nothing, nothing.copy())


def _with(machine: Any, copies: Copies) -> Any:
    return replace(machine, extra={**machine.extra, KEY: copies})


def copied(machine: Any, at: Array, words: int) -> Any:
    """The machine after active threads have issued copies of so many words each, to the words `at` of shared memory."""
    if KEY not in machine.extra:
        return machine
    copies: Copies = machine.extra[KEY]
    thread = jnp.broadcast_to(jnp.arange(at.shape[1], dtype=jnp.int32), at.shape)
    copier, group = copies.copier.ravel(), copies.group.ravel()
    for i in range(words):
        place = jnp.where(machine.active, at + np.int32(i), np.int32(copier.shape[0]))
        copier = copier.at[place].set(thread, mode="drop")
        group = group.at[place].set(copies.committed + 1, mode="drop")
    shape = copies.copier.shape
    return _with(machine, copies._replace(copier=copier.reshape(shape), group=group.reshape(shape)))


def committed(machine: Any) -> Any:
    """The machine after `cp.async.commit_group`."""
    if KEY not in machine.extra:
        return machine
    copies: Copies = machine.extra[KEY]
    return _with(machine, copies._replace(committed=copies.committed + machine.active))


def waited(machine: Any, pending: int | None) -> Any:
    """The machine after active threads have waited for all groups but so many; None: for all copies, also those in no group."""
    if KEY not in machine.extra:
        return machine
    copies: Copies = machine.extra[KEY]
    done = copies.committed + 1 if pending is None else copies.committed - pending
    return _with(machine, copies._replace(waited=jnp.where(machine.active, jnp.maximum(copies.waited, done), copies.waited)))


def reading(machine: Any, at: Array, address: Array, size: int, mask: Array) -> Any:
    """The machine with a fault where threads read `size` bytes, from the words `at` of shared memory on, that a copy still writes."""
    if KEY not in machine.extra:
        return machine
    copies: Copies = machine.extra[KEY]
    row = jnp.arange(at.shape[0])[:, None]
    for i in range(-(-size // 4)):
        copier = copies.copier.ravel().at[at + np.int32(i)].get(mode="fill", fill_value=-1)
        group = copies.group.ravel().at[at + np.int32(i)].get(mode="fill", fill_value=0)
        under_way = (copier >= 0) & (group > copies.waited[row, jnp.maximum(copier, 0)])
        machine = machine.fault(mask & under_way, "copy_pending", None, address, copier)
    return machine
