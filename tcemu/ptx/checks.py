"""Checked mode of shared memory: data races between barriers, and reads of what nothing has written.

Of every byte of shared memory it is kept who wrote it and who read it since the threads of the block last met, and whether it was ever
written. Whatever may order accesses wipes that out for the whole block: a barrier of any kind, a fence, an atomic, an access that is
volatile, relaxed, acquire or release. `bar.warp.sync` orders its warp's. So what is found is a race; not every race is found.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.isa.instructions import LANES

KEY = "checks"  # in `Machine.extra`
NOBODY = np.int32(-1)
LAST = np.int32(2**30)  # above every thread
MET = np.int32(1 << 20)  # added to a writer whose warp has met since


class Shadow(NamedTuple):
    """What is known of each byte of shared memory, [blocks, bytes]. writer: the thread, see MET, or NOBODY; first, last: the least and the
    greatest thread that read it, LAST and NOBODY for none; written: whether anything ever has."""

    writer: Array
    first: Array
    last: Array
    written: Array


def shadow(blocks: int, size: int, initialised: bool) -> Shadow:
    """Nobody has touched anything. initialised: reads of what nothing has written are not looked for."""
    nobody = jnp.full((blocks, size), NOBODY)
    return Shadow(nobody, jnp.full((blocks, size), LAST), nobody.copy(), jnp.full((blocks, size), initialised))


class _Bytes(NamedTuple):
    """The bytes that threads touch. at: int64 [blocks, threads, size], beyond the end where the thread does not take part."""

    at: Array
    thread: Array
    mask: Array


def _bytes(machine: Any, at: Array, address: Array, size: int, mask: Array) -> _Bytes:
    start = at.astype(jnp.int64) * 4 + (address & np.uint64(3)).astype(jnp.int64)
    every = start[..., None] + jnp.arange(size)
    thread = jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=jnp.int32)[:, None], every.shape)
    whole = jnp.broadcast_to(mask[..., None], every.shape)
    return _Bytes(jnp.where(whole, every, machine.shared.size * 4), thread, whole)


def _gathered(array: Array, touched: _Bytes) -> Array:
    return array.ravel().at[touched.at].get(mode="fill", fill_value=0)


def _unordered(state: Shadow, touched: _Bytes) -> Array:
    """Who wrote each byte, if it is another thread with which this one has not met since; else NOBODY."""
    writer = jnp.where(touched.mask, _gathered(state.writer, touched), NOBODY)
    thread = writer % MET
    met = (thread == touched.thread) | ((writer >= MET) & (thread // LANES == touched.thread // LANES))
    return jnp.where((writer == NOBODY) | met, NOBODY, thread)


def _held(machine: Any, **changes: Array) -> Any:
    old: Shadow = machine.extra[KEY]
    new = old._replace(**{name: value.reshape(getattr(old, name).shape) for name, value in changes.items()})
    return replace(machine, extra={**machine.extra, KEY: new})


def reading(machine: Any, at: Array, address: Array, size: int, mask: Array) -> Any:
    """The machine after threads have read `size` bytes each, at words `at` of shared memory; with the faults noted."""
    if KEY not in machine.extra:
        return machine
    state: Shadow = machine.extra[KEY]
    touched = _bytes(machine, at, address, size, mask)
    writer = _unordered(state, touched)
    raced = writer != NOBODY
    unwritten = touched.mask & ~_gathered(state.written, touched)
    machine = machine.fault(mask & unwritten.any(-1), "uninitialised", None, address, size)
    machine = machine.fault(mask & raced.any(-1), "race_read", None, address, jnp.where(raced, writer, NOBODY).max(-1))
    return _held(
        machine,
        first=state.first.ravel().at[touched.at].min(touched.thread, mode="drop"),
        last=state.last.ravel().at[touched.at].max(touched.thread, mode="drop"),
    )


def writing(machine: Any, before: Array, at: Array, address: Array, size: int, mask: Array) -> Any:
    """The machine after threads have stored `size` bytes each; with the faults noted. before: the words of shared memory until then."""
    if KEY not in machine.extra:
        return machine
    state: Shadow = machine.extra[KEY]
    touched = _bytes(machine, at, address, size, mask)
    writer = _unordered(state, touched)
    winner = state.writer.ravel().at[touched.at].set(touched.thread, mode="drop")
    now, old = (_byte(words.ravel(), touched.at) for words in (machine.shared, before))
    other = (writer != NOBODY) & (now != old)
    first, last = _gathered(state.first, touched), _gathered(state.last, touched)
    read = touched.mask & ((first < touched.thread) | ((last != NOBODY) & (last > touched.thread)))
    reader = jnp.where(first < touched.thread, first, last)
    machine = machine.fault(mask & other.any(-1), "race_write", None, address, jnp.where(other, writer, NOBODY).max(-1))
    machine = machine.fault(mask & read.any(-1), "race_overwrite", None, address, jnp.where(read, reader, NOBODY).max(-1))
    written = state.written.ravel().at[touched.at].set(True, mode="drop")
    return _held(machine, writer=winner, written=written)


def colliding(machine: Any, values: list[Array], at: Array, address: Array, size: int, mask: Array) -> Any:
    """The machine with a fault where threads stored different bytes in one place in one statement. values: the bytes of each thread."""
    if KEY not in machine.extra:
        return machine
    touched = _bytes(machine, at, address, size, mask)
    lost = touched.mask & (_byte(machine.shared.ravel(), touched.at) != jnp.stack(values, -1))
    writer = _gathered(machine.extra[KEY].writer, touched)
    return machine.fault(mask & lost.any(-1), "race_write", None, address, jnp.where(lost, writer, NOBODY).max(-1))


def _byte(words: Array, at: Array) -> Array:
    word = words.at[at >> 2].get(mode="fill", fill_value=0)
    return (word >> ((at & 3) * 8).astype(jnp.uint32)) & np.uint32(0xFF)


def bytes_of(values: tuple[Array, ...], bits: int) -> list[Array]:
    """The bytes of values one after the other, each uint32."""
    return [((value >> value.dtype.type(low)) & value.dtype.type(0xFF)).astype(jnp.uint32) for value in values for low in range(0, bits, 8)]


def written(machine: Any, at: Array, address: Array, size: int, mask: Array) -> Any:
    """The machine with bytes that an atomic has written."""
    if KEY not in machine.extra:
        return machine
    touched = _bytes(machine, at, address, size, mask)
    return _held(machine, written=machine.extra[KEY].written.ravel().at[touched.at].set(True, mode="drop"))


# ---- what orders accesses


def forgotten(state: Shadow, blocks: Array) -> Shadow:
    """Accesses of the blocks, bool [blocks], are ordered before what follows."""
    wiped = blocks[:, None]
    return Shadow(
        jnp.where(wiped, NOBODY, state.writer), jnp.where(wiped, LAST, state.first), jnp.where(wiped, NOBODY, state.last), state.written
    )


def forget(machine: Any) -> Any:
    """The machine after its active threads did what may order accesses of their blocks."""
    if KEY not in machine.extra:
        return machine
    state = forgotten(machine.extra[KEY], machine.active.any(-1))
    return _held(machine, writer=state.writer, first=state.first, last=state.last)


def forget_warps(machine: Any) -> Any:
    """The machine after lanes of warps have met: among them, what they have done is ordered."""
    if KEY not in machine.extra:
        return machine
    state: Shadow = machine.extra[KEY]
    met = machine.warps(machine.active).any(-1)

    def of_met(thread: Array) -> Array:
        warp = jnp.clip(thread % MET // LANES, 0, met.shape[1] - 1)
        return jnp.take_along_axis(met, warp, axis=1) & (thread != NOBODY) & (thread != LAST)

    alone = of_met(state.first) & (state.first // LANES == state.last // LANES)
    return _held(
        machine,
        writer=jnp.where(of_met(state.writer), state.writer % MET + MET, state.writer),
        first=jnp.where(alone, LAST, state.first),
        last=jnp.where(alone, NOBODY, state.last),
    )
