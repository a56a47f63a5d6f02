"""`mbarrier`: barriers that are objects in shared memory, by the counts of threads that arrive and of bytes that copies bring.

An object is the 64-bit word at its address, in an encoding of its own (PTX says that it is opaque): see `Barrier`. Threads that meet at one
object in one step arrive one after the other, in the order of their numbers, so that counts and phases are exact.
Source: PTX ISA 9.7.13.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.errors import Unsupported
from tcemu.ptx import checks
from tcemu.ptx.context import Context, Prepare, Step
from tcemu.ptx.memory import element, gather, scatter_element
from tcemu.ptx.module import Address, Operand, Sink, Statement
from tcemu.ptx.tensor.statements import undefined
from tcemu.ptx.tensor.variants import Choices, Form, chosen, slot

if TYPE_CHECKING:
    from tcemu.ptx.machine import Machine

SECTION = "PTX ISA 9.7.13.15"
COUNT_BITS = 20  # of a count of arrivals: the manual's range is 1 to 2^20 - 1, and that of bytes -(2^20 - 1) to 2^20 - 1
ONES = np.uint64((1 << COUNT_BITS) - 1)
EXPECTED, BYTES, PHASE, VALID = 20, 40, 62, 63  # the lowest bits of the fields; that of the pending arrivals is 0
BYTE_BITS = 22
OBJECT = 8  # bytes


class Barrier(NamedTuple):
    """An object's fields, arrays of one shape.

    pending, expected: arrivals, of this phase and of the next, int64; bytes: those still to come, int64; phase: its parity, bool; valid:
    whether `mbarrier.init` has made it, bool.
    """

    pending: Array
    expected: Array
    bytes: Array
    phase: Array
    valid: Array


def unpacked(word: Array) -> Barrier:
    """The fields of objects uint64[...]."""
    field = lambda low: ((word >> np.uint64(low)) & ONES).astype(jnp.int64)  # noqa: E731
    unsigned = ((word >> np.uint64(BYTES)) & np.uint64((1 << BYTE_BITS) - 1)).astype(jnp.int64)
    signed = jnp.where(unsigned >= 1 << BYTE_BITS - 1, unsigned - (1 << BYTE_BITS), unsigned)
    bit = lambda low: (word >> np.uint64(low)) & np.uint64(1) != 0  # noqa: E731
    return Barrier(field(0), field(EXPECTED), signed, bit(PHASE), bit(VALID))


def packed(barrier: Barrier) -> Array:
    """The inverse of `unpacked`; what leaves its field is cut."""
    count = lambda value, low: (value.astype(jnp.uint64) & ONES) << np.uint64(low)  # noqa: E731
    bytes_ = (barrier.bytes.astype(jnp.uint64) & np.uint64((1 << BYTE_BITS) - 1)) << np.uint64(BYTES)
    bit = lambda value, low: value.astype(jnp.uint64) << np.uint64(low)  # noqa: E731
    return count(barrier.pending, 0) | count(barrier.expected, EXPECTED) | bytes_ | bit(barrier.phase, PHASE) | bit(barrier.valid, VALID)


# ---- what happens to an object: the fields before, and a count -> the fields after


def initialised(barrier: Barrier, count: Array) -> Barrier:
    """`mbarrier.init`: phase 0 begins, and so many arrivals end it."""
    return Barrier(count, count, jnp.zeros_like(count), jnp.zeros(count.shape, bool), jnp.ones(count.shape, bool))


def invalidated(barrier: Barrier, count: Array) -> Barrier:
    """`mbarrier.inval`: the memory may serve for something else."""
    nothing = jnp.zeros_like(count)
    return Barrier(nothing, nothing, nothing, jnp.zeros(count.shape, bool), jnp.zeros(count.shape, bool))


def completed(barrier: Barrier) -> Barrier:
    """The next phase begins, if nothing is pending."""
    ends = (barrier.pending <= 0) & (barrier.bytes == 0)
    return barrier._replace(pending=jnp.where(ends, barrier.expected, jnp.maximum(barrier.pending, 0)), phase=barrier.phase ^ ends)


def arrived(barrier: Barrier, count: Array) -> Barrier:
    """`mbarrier.arrive`: so many arrivals less are pending."""
    return completed(barrier._replace(pending=barrier.pending - count))


def dropped(barrier: Barrier, count: Array) -> Barrier:
    """`mbarrier.arrive_drop`: and so many fewer are expected from the next phase on."""
    return arrived(barrier._replace(expected=jnp.maximum(barrier.expected - count, 0)), count)


def expecting(barrier: Barrier, count: Array) -> Barrier:
    """`mbarrier.expect_tx`: so many bytes more are to come."""
    return barrier._replace(bytes=barrier.bytes + count)


def brought(barrier: Barrier, count: Array) -> Barrier:
    """`mbarrier.complete_tx`: so many bytes have come."""
    return completed(barrier._replace(bytes=barrier.bytes - count))


def expecting_and_arrived(barrier: Barrier, count: Array) -> Barrier:
    """`mbarrier.arrive.expect_tx`."""
    return arrived(expecting(barrier, count), jnp.ones_like(count))


def expecting_and_dropped(barrier: Barrier, count: Array) -> Barrier:
    """`mbarrier.arrive_drop.expect_tx`."""
    return dropped(expecting(barrier, count), jnp.ones_like(count))


def awaited(barrier: Barrier, count: Array) -> Barrier:
    """`cp.async.mbarrier.arrive` without .noinc: one arrival more is pending until the copies are done, which they are."""
    return arrived(barrier._replace(pending=barrier.pending + count), count)


Change = Callable[[Barrier, Array], Barrier]


class Arrivals(NamedTuple):
    """What the active threads do to objects. address: uint64[blocks, threads], in shared memory or generic; count: int64."""

    address: Array
    amount: Array


def changed(machine: Machine, statement: Statement, change: Change, by: Arrivals, checked: bool) -> tuple[Array, Machine]:
    """The objects as each thread found them, uint64[blocks, threads], and the machine afterwards."""
    places, where, machine = machine.place("shared", by.address, OBJECT)
    before = _objects(machine, places.at)

    def one(state: tuple[Array, ...]) -> tuple[Array, ...]:
        turn, words, found = state
        at = order[:, turn][:, None]
        mine = jnp.take_along_axis(words, at, axis=1)
        count = jnp.take_along_axis(by.amount, at, axis=1)
        after = packed(change(unpacked(mine), count))
        same = (places.at == jnp.take_along_axis(places.at, at, axis=1)) & (turn < turns)
        found = jnp.where((threads == at) & (turn < turns), mine, found)
        return turn + 1, jnp.where(same, after, words), found

    order = jnp.argsort(~where, axis=1, stable=True)  # the threads that take part come first
    turns = where.sum(axis=1, keepdims=True)
    threads = jnp.arange(where.shape[1])[None]
    start = jnp.zeros((), turns.dtype), before, before
    _, after, found = lax.while_loop(lambda state: state[0] < turns.max(), one, start)
    if checked:
        machine = _defined(machine, statement, change, found, by, where)
    machine = checks.forget(machine)  # arrivals order what their threads have done
    return found, machine.with_words("shared", scatter_element(machine.words("shared"), places.at, by.address, after, where, 64))


def _objects(machine: Machine, at: Array) -> Array:
    """The 64-bit words at places in shared memory."""
    return element(gather(machine.words("shared"), at, 2), at, 64)


def _defined(machine: Machine, statement: Statement, change: Change, found: Array, by: Arrivals, where: Array) -> Machine:
    """Checked mode: what PTX leaves undefined in a change of objects that were found like this."""
    if change is initialised:
        bad = (by.amount < 1) | (by.amount > int(ONES))
        return undefined(machine, where & bad, f"the count must be 1 to {int(ONES)}. {SECTION}", statement, by.address)
    barrier = unpacked(found)
    made = "the object is used before mbarrier.init has made it, or after mbarrier.inval"
    machine = undefined(machine, where & ~barrier.valid, f"{made}. {SECTION}", statement, by.address)
    if change is invalidated:
        return machine
    after = change(barrier, by.amount)
    bytes_ = jnp.abs(after.bytes) > int(ONES)
    machine = undefined(machine, where & bytes_, f"more than {int(ONES)} bytes are pending. {SECTION}", statement, by.address)
    if change not in (arrived, dropped):
        return machine
    more = "there are more arrivals than the phase still expects"
    return undefined(machine, where & (by.amount > barrier.pending), f"{more}. {SECTION}", statement, by.address)


# ---- statements

SPACE = slot("space", "shared shared::cta shared::cluster")
OWN = slot("space", "shared shared::cta")
ARRIVING = (slot("sem", "release relaxed"), slot("scope", "cta cluster"), SPACE, slot("type", "b64", needed=True))
COUNTING = (slot("sem", "relaxed"), slot("scope", "cta cluster"), SPACE, slot("type", "b64", needed=True))
TYPED = (OWN, slot("type", "b64", needed=True))
WAITING = (slot("parity", "parity"), slot("sem", "acquire relaxed"), slot("scope", "cta cluster"), *TYPED)
CHANGES: dict[str, tuple[Form, Change]] = {
    form.head: (form, change)
    for form, change in (
        (Form("mbarrier.init", TYPED, (2,), 80, SECTION), initialised),
        (Form("mbarrier.inval", TYPED, (1,), 80, SECTION), invalidated),
        (Form("mbarrier.expect_tx", COUNTING, (2,), 90, SECTION), expecting),
        (Form("mbarrier.complete_tx", COUNTING, (2,), 90, SECTION), brought),
        (Form("mbarrier.arrive", ARRIVING, (1, 2, 3), 80, SECTION), arrived),
        (Form("mbarrier.arrive.noComplete", ARRIVING, (3,), 80, SECTION), arrived),
        (Form("mbarrier.arrive.expect_tx", ARRIVING, (2, 3), 90, SECTION), expecting_and_arrived),
        (Form("mbarrier.arrive_drop", ARRIVING, (1, 2, 3), 80, SECTION), dropped),
        (Form("mbarrier.arrive_drop.noComplete", ARRIVING, (3,), 80, SECTION), dropped),
        (Form("mbarrier.arrive_drop.expect_tx", ARRIVING, (2, 3), 90, SECTION), expecting_and_dropped),
    )
}
WAITS = (
    Form("mbarrier.test_wait", WAITING, (3,), 80, SECTION),
    Form("mbarrier.try_wait", WAITING, (3, 4), 90, SECTION),
)
PENDING = Form("mbarrier.pending_count", (slot("type", "b64", needed=True),), (2,), 80, SECTION)
FORMS = (*(form for form, _ in CHANGES.values()), *WAITS, PENDING)


def prepare_mbarrier(statement: Statement, context: Context) -> Step:
    """Every `mbarrier` instruction. `try_wait` answers at once, as GPUs may: no time passes here."""
    form, choices = chosen(statement, context, FORMS)
    if form is PENDING:
        count, state = statement.operands
        return Step(lambda machine: machine.write(count, "b32", (machine.read(state, "b64") & ONES).astype(jnp.uint32)))
    if form in WAITS:
        return _prepare_wait(statement, choices, context.checked)
    return _prepare_change(statement, choices, CHANGES[form.head][1], context.checked)


def _prepare_change(statement: Statement, choices: Choices, change: Change, checked: bool) -> Step:
    operands = list(statement.operands)
    token = None if isinstance(operands[0], Address) else operands.pop(0)
    address, count = operands[0], operands[1] if len(operands) > 1 else None
    if not isinstance(address, Address) or len(operands) > 2:
        raise Unsupported(f"the operands are {{state,}} [address] {{, count}}. {SECTION}")
    if token is not None and change in (initialised, invalidated, expecting, brought):
        raise Unsupported(f"it gives no state; its operands are [address] {{, count}}. {SECTION}")

    def run(machine: Machine) -> Machine:
        counts = jnp.ones(machine.active.shape, jnp.int64) if count is None else machine.read(count, "u32").astype(jnp.int64)
        by = Arrivals(machine.address(address), counts)
        found, machine = changed(machine, statement, change, by, checked)
        return machine if token is None or isinstance(token, Sink) else machine.write(token, "b64", found)

    return Step(run)


def _prepare_wait(statement: Statement, choices: Choices, checked: bool) -> Step:
    done, address, phase = statement.operands[:3]
    if not isinstance(address, Address):
        raise Unsupported(f"the second operand is the object's address, in brackets. {SECTION}")

    def run(machine: Machine) -> Machine:
        at = machine.address(address)
        places, good, machine = machine.place("shared", at, OBJECT)
        barrier = unpacked(_objects(machine, places.at))
        if checked:
            made = f"the object is not one that mbarrier.init has made. {SECTION}"
            machine = undefined(machine, good & ~barrier.valid, made, statement, at)
        return checks.forget(machine).write(done, "pred", barrier.phase != _parity(machine, phase, choices))

    return Step(run)


def _parity(machine: Machine, phase: Operand, choices: Choices) -> Array:
    """The parity of the phase that is asked for: a number, or that of the object that an arrival found."""
    if choices["parity"]:
        return machine.read(phase, "u32") & np.uint32(1) != 0
    return unpacked(machine.read(phase, "b64")).phase


PREPARE: dict[str, Prepare] = {"mbarrier": prepare_mbarrier}
