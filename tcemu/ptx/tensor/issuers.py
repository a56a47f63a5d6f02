"""Copies that single threads issue for their whole block: one issuing thread of every block at a time, and lanes that carry the bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.ptx.memory import SHARED_ROOM, gather, in_rooms, in_rows, scatter, window

if TYPE_CHECKING:
    from tcemu.ptx.machine import Machine

UNIT = 16  # bytes that a lane carries
CARRIERS = 512  # lanes
Values = dict[str, Array]


def issued(machine: Machine, values: Values, body: Callable[[Machine, Values], Machine]) -> Machine:
    """The machine after `body` for each active thread, in the order of their numbers; of every block one at a time.

    values: [blocks, threads, ...]. body: takes the machine and the values of the issuing threads, [blocks, ...], among them "live": whether
    the block has one in this turn. It may change the memory alone.
    """
    order = jnp.argsort(~machine.active, axis=1, stable=True)
    turns = machine.active.sum(axis=1)

    def one(state: tuple[Array, Any]) -> tuple[Array, Any]:
        turn, held = state
        at = order[:, turn]
        mine = jax.tree.map(lambda x: x[jnp.arange(at.shape[0]), at], values)
        return turn + 1, _held(body(_with(machine, held), mine | {"live": turn < turns}))

    start = jnp.zeros((), turns.dtype), _held(machine)
    return _with(machine, lax.while_loop(lambda state: state[0] < turns.max(), one, start)[1])


def carried(machine: Machine, units: Array, body: Callable[[Machine, Array, Array], Machine]) -> Machine:
    """The machine after `body` for units of 16 bytes: int64[blocks], how many each block's copy has.

    body: takes the machine, the numbers of units int64[1, lanes], and which of them there are, bool[blocks, lanes]. It may change the
    memory alone.
    """

    def one(state: tuple[Array, Any]) -> tuple[Array, Any]:
        first, held = state
        unit = first + jnp.arange(CARRIERS)[None]
        return first + CARRIERS, _held(body(_with(machine, held), unit, unit < units[:, None]))

    start = jnp.zeros((), jnp.int64), _held(machine)
    return _with(machine, lax.while_loop(lambda state: state[0] < units.max(), one, start)[1])


def _held(machine: Machine) -> tuple[Array, Array]:
    """What copies change."""
    return machine.memory, machine.shared


def _with(machine: Machine, held: tuple[Array, Array]) -> Machine:
    return replace(machine, memory=held[0], shared=held[1])


def moved(machine: Machine, spaces: tuple[str, str], source: Array, target: Array, active: Array) -> Machine:
    """The machine with 16 bytes copied for each active lane, from `source` to `target`, uint64[blocks, lanes], in these spaces.

    They must lie inside: see `whole`.
    """
    values = gather(*_words(machine, spaces[0], source), UNIT // 4)
    flat, at = _words(machine, spaces[1], target)
    for number, value in enumerate(values):
        flat = scatter(flat, at + np.int32(number), value, active)
    return machine.with_words(spaces[1], flat)


def _words(machine: Machine, space: str, address: Array) -> tuple[Array, Array]:
    """The words of a space, and the numbers of those in which addresses uint64[blocks, lanes] lie."""
    if space == "global":
        return machine.words(space), in_rooms(machine.rooms, address, UNIT).at
    return machine.words(space), shared_words(machine, address)


def shared_words(machine: Machine, address: Array) -> Array:
    """The numbers of the words of shared memory, of all blocks, in which units at addresses uint64[blocks, lanes] lie."""
    start = np.uint64(window(SHARED_ROOM))
    row = jnp.arange(address.shape[0], dtype=jnp.int32)[:, None]
    return in_rows(jnp.where(address >= start, address - start, address), UNIT, machine.shared.shape[-1], row).at


def whole(machine: Machine, space: str, address: Array, size: Array) -> tuple[Array, Machine]:
    """Which threads' runs of `size` bytes, multiples of 16, lie inside at a multiple of 16; and the machine with the faults noted."""
    _, first, machine = machine.place(space, address, UNIT)
    last = address + jnp.maximum(size, UNIT).astype(jnp.uint64) - np.uint64(UNIT)
    _, good, machine = machine.place(space, last, UNIT)
    return first & good, machine
