"""`mbarrier`: barriers in shared memory that count the arrivals of threads and the bytes of copies.

A barrier is the 64-bit word at its address. PTX leaves the encoding open; `MBarrier` has the fields of the one used here. Threads that
access one barrier in the same step do so one after the other, in the order of their numbers, so that counts and phases are exact. Source:
PTX ISA 9.7.13.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.engine.isa.statement_table import Choices
from tcemu.kernels.ptx.instruction_interface import Context, Prepare, Step
from tcemu.kernels.ptx.simt.device_memory import extract_element, gather_words, scatter_element
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.tensor.statement_forms import InstructionForm, match_form, note_undefined
from tcemu.kernels.ptx.text.module import Address, Sink, Statement

MBARRIER_SECTION = "PTX ISA 9.7.13.15"
COUNT_BITS = 20  # bits of a count of arrivals; the manual allows 1 to 2^20 - 1 arrivals and -(2^20 - 1) to 2^20 - 1 bytes
COUNT_MASK = np.uint64((1 << COUNT_BITS) - 1)
EXPECTED_SHIFT, BYTES_SHIFT, PHASE_SHIFT, VALID_SHIFT = 20, 40, 62, 63  # lowest bits of the fields; the pending arrivals begin at bit 0
BYTE_BITS = 22  # bits of the count of pending bytes
BARRIER_BYTES = 8  # size of a barrier in bytes


class MBarrier(NamedTuple):
    """The fields of barriers, arrays of one shape."""

    pending: Array  # arrivals that the current phase still expects, int64
    expected: Array  # arrivals of the next phase, int64
    pending_bytes: Array  # bytes that the current phase still expects, int64
    phase: Array  # parity of the phase, bool
    valid: Array  # whether `mbarrier.init` has initialised the barrier, bool


def decode_barrier(word: Array) -> MBarrier:
    """Decode barriers uint64[...] into their fields."""
    field = lambda low: ((word >> np.uint64(low)) & COUNT_MASK).astype(jnp.int64)
    unsigned = ((word >> np.uint64(BYTES_SHIFT)) & np.uint64((1 << BYTE_BITS) - 1)).astype(jnp.int64)
    signed = jnp.where(unsigned >= 1 << BYTE_BITS - 1, unsigned - (1 << BYTE_BITS), unsigned)
    bit = lambda low: (word >> np.uint64(low)) & np.uint64(1) != 0
    return MBarrier(field(0), field(EXPECTED_SHIFT), signed, bit(PHASE_SHIFT), bit(VALID_SHIFT))


def encode_barrier(barrier: MBarrier) -> Array:
    """Encode barriers as uint64[...]; bits that do not fit their field are dropped."""
    count = lambda value, low: (value.astype(jnp.uint64) & COUNT_MASK) << np.uint64(low)
    bytes_ = (barrier.pending_bytes.astype(jnp.uint64) & np.uint64((1 << BYTE_BITS) - 1)) << np.uint64(BYTES_SHIFT)
    bit = lambda value, low: value.astype(jnp.uint64) << np.uint64(low)
    return (
        count(barrier.pending, 0)
        | count(barrier.expected, EXPECTED_SHIFT)
        | bytes_
        | bit(barrier.phase, PHASE_SHIFT)
        | bit(barrier.valid, VALID_SHIFT)
    )


# ---- updates: functions of the fields and a count that return the new fields


def initialise(barrier: MBarrier, count: Array) -> MBarrier:
    """Compute `mbarrier.init`: phase 0 begins and completes after `count` arrivals."""
    return MBarrier(count, count, jnp.zeros_like(count), jnp.zeros(count.shape, bool), jnp.ones(count.shape, bool))


def invalidate(barrier: MBarrier, count: Array) -> MBarrier:
    """Compute `mbarrier.inval`: the memory may be used for other data."""
    zeros, false = jnp.zeros_like(count), jnp.zeros(count.shape, bool)
    return MBarrier(zeros, zeros, zeros, false, false)


def complete_phase(barrier: MBarrier) -> MBarrier:
    """Begin the next phase if nothing is pending."""
    ends = (barrier.pending <= 0) & (barrier.pending_bytes == 0)
    return barrier._replace(pending=jnp.where(ends, barrier.expected, jnp.maximum(barrier.pending, 0)), phase=barrier.phase ^ ends)


def arrive(barrier: MBarrier, count: Array) -> MBarrier:
    """Compute `mbarrier.arrive`: `count` fewer arrivals are pending."""
    return complete_phase(barrier._replace(pending=barrier.pending - count))


def arrive_and_drop(barrier: MBarrier, count: Array) -> MBarrier:
    """Compute `mbarrier.arrive_drop`: also expect `count` fewer arrivals from the next phase on."""
    return arrive(barrier._replace(expected=jnp.maximum(barrier.expected - count, 0)), count)


def expect_bytes(barrier: MBarrier, count: Array) -> MBarrier:
    """Compute `mbarrier.expect_tx`: `count` more bytes are pending."""
    return barrier._replace(pending_bytes=barrier.pending_bytes + count)


def complete_bytes(barrier: MBarrier, count: Array) -> MBarrier:
    """Compute `mbarrier.complete_tx`: `count` fewer bytes are pending."""
    return complete_phase(barrier._replace(pending_bytes=barrier.pending_bytes - count))


def expect_bytes_and_arrive(barrier: MBarrier, count: Array) -> MBarrier:
    """Compute `mbarrier.arrive.expect_tx`."""
    return arrive(expect_bytes(barrier, count), jnp.ones_like(count))


def expect_bytes_and_drop(barrier: MBarrier, count: Array) -> MBarrier:
    """Compute `mbarrier.arrive_drop.expect_tx`."""
    return arrive_and_drop(expect_bytes(barrier, count), jnp.ones_like(count))


def arrive_after_copies(barrier: MBarrier, count: Array) -> MBarrier:
    """Compute `cp.async.mbarrier.arrive` without .noinc: one more arrival is pending until the copies complete, which they have."""
    return arrive(barrier._replace(pending=barrier.pending + count), count)


BarrierUpdate = Callable[[MBarrier, Array], MBarrier]


def update_barriers(machine: Machine, update: BarrierUpdate, address: Array, amount: Array, checked: bool) -> tuple[Array, Machine]:
    """Update barriers, one thread of each cluster after the other.

    Args:
        machine: The machine.
        update: The function of the fields and the count.
        address: Addresses of barriers, in shared memory or generic, uint64[blocks, threads].
        amount: Arrivals or bytes, int64[blocks, threads].
        checked: Note undefined behaviour as a fault.

    Returns:
        The barriers as each thread found them, uint64[blocks, threads], and the machine.
    """
    places, valid, machine = machine.locate("shared::cluster", address, BARRIER_BYTES)
    valid_threads, first_word, amounts = (machine.clusters(x) for x in (valid, places.first_word, amount))
    before = machine.clusters(_load_barriers(machine, places.first_word))
    count = valid_threads.shape[1]
    threads = jnp.arange(count)[None]

    def update_one(state: tuple[Array, ...]) -> tuple[Array, ...]:
        remaining, words, found = state
        thread = jnp.where(remaining, threads, count).min(axis=1, keepdims=True)
        current = threads == thread  # no thread, if none of the cluster remains
        select = lambda values: jnp.where(current, values, 0).sum(axis=1, keepdims=True, dtype=values.dtype)
        word = select(words)
        updated = encode_barrier(update(decode_barrier(word), select(amounts)))
        same = (first_word == select(first_word)) & (thread < count)
        return remaining & ~current, jnp.where(same, updated, words), jnp.where(current, word, found)

    _, after, found = lax.while_loop(lambda state: state[0].any(), update_one, (valid_threads, before, before))
    after, found = (x.reshape(valid.shape) for x in (after, found))
    if checked:
        machine = _check_update(machine, update, found, address, amount, valid)
    words = scatter_element(machine.words("shared"), places.first_word, address, after, valid, 64)
    return found, machine.with_words("shared", words)


def _load_barriers(machine: Machine, first_word: Array) -> Array:
    return extract_element(gather_words(machine.words("shared"), first_word, 2), first_word, 64)


def _check_update(machine: Machine, update: BarrierUpdate, found: Array, address: Array, count: Array, valid: Array) -> Machine:
    """Note as faults what PTX leaves undefined in an update of the barriers `found`."""
    if update is initialise:
        illegal = (count < 1) | (count > int(COUNT_MASK))
        message = f"the count must be 1 to {int(COUNT_MASK)}. {MBARRIER_SECTION}"
        return note_undefined(machine, valid & illegal, message, address)
    barrier = decode_barrier(found)
    message = f"the barrier is used before mbarrier.init or after mbarrier.inval. {MBARRIER_SECTION}"
    machine = note_undefined(machine, valid & ~barrier.valid, message, address)
    if update is invalidate:
        return machine
    too_many = jnp.abs(update(barrier, count).pending_bytes) > int(COUNT_MASK)
    message = f"more than {int(COUNT_MASK)} bytes are pending. {MBARRIER_SECTION}"
    machine = note_undefined(machine, valid & too_many, message, address)
    if update not in (arrive, arrive_and_drop):
        return machine
    message = f"there are more arrivals than the phase still expects. {MBARRIER_SECTION}"
    return note_undefined(machine, valid & (count > barrier.pending), message, address)


# ---- statements

UPDATES: dict[str, tuple[InstructionForm, BarrierUpdate]] = {
    form.head: (form, update)
    for form, update in (
        (InstructionForm("mbarrier.init", ("[] u32",)), initialise),
        (InstructionForm("mbarrier.inval", ("[]",)), invalidate),
        (InstructionForm("mbarrier.expect_tx", ("[] u32",)), expect_bytes),
        (InstructionForm("mbarrier.complete_tx", ("[] u32",)), complete_bytes),
        (InstructionForm("mbarrier.arrive", ("[]", "[] u32", "=u64_ []", "=u64_ [] u32")), arrive),
        (InstructionForm("mbarrier.arrive.noComplete", ("=u64_ [] u32",)), arrive),
        (InstructionForm("mbarrier.arrive.expect_tx", ("[] u32", "=u64_ [] u32")), expect_bytes_and_arrive),
        (InstructionForm("mbarrier.arrive_drop", ("[]", "[] u32", "=u64_ []", "=u64_ [] u32")), arrive_and_drop),
        (InstructionForm("mbarrier.arrive_drop.noComplete", ("=u64_ [] u32",)), arrive_and_drop),
        (InstructionForm("mbarrier.arrive_drop.expect_tx", ("[] u32", "=u64_ [] u32")), expect_bytes_and_drop),
    )
}
WAIT_FORMS = (
    InstructionForm("mbarrier.test_wait", ("=pred [] {phase}",)),
    InstructionForm("mbarrier.try_wait", ("=pred [] {phase}", "=pred [] {phase} u32")),
)
PENDING_FORM = InstructionForm("mbarrier.pending_count", ("=u32 u64",))
BARRIER_FORMS = (*(form for form, _ in UPDATES.values()), *WAIT_FORMS, PENDING_FORM)


def prepare_mbarrier(statement: Statement, context: Context) -> Step:
    """Prepare every `mbarrier` instruction. `try_wait` returns at once, as GPUs may do."""
    form, choices = match_form(statement, context, BARRIER_FORMS)
    if form is PENDING_FORM:
        count, state = statement.operands
        return Step(lambda machine: machine.write(count, "b32", (machine.read(state, "b64") & COUNT_MASK).astype(jnp.uint32)))
    if form in WAIT_FORMS:
        return _prepare_wait(statement, choices, context.checked)
    return _prepare_update(statement, UPDATES[form.head][1], context.checked)


def _prepare_update(statement: Statement, update: BarrierUpdate, checked: bool) -> Step:
    operands = list(statement.operands)
    token = None if isinstance(operands[0], Address) else operands.pop(0)
    address, count = operands[0], operands[1] if len(operands) > 1 else None
    assert isinstance(address, Address)

    def execute(machine: Machine) -> Machine:
        counts = jnp.ones(machine.active.shape, jnp.int64) if count is None else machine.read(count, "u32").astype(jnp.int64)
        found, machine = update_barriers(machine, update, machine.address(address), counts, checked)
        return machine if token is None or isinstance(token, Sink) else machine.write(token, "b64", found)

    return Step(execute)


def _prepare_wait(statement: Statement, choices: Choices, checked: bool) -> Step:
    done, address, phase = statement.operands[:3]
    assert isinstance(address, Address)

    def execute(machine: Machine) -> Machine:
        start = machine.address(address)
        places, valid, machine = machine.locate("shared", start, BARRIER_BYTES)
        barrier = decode_barrier(_load_barriers(machine, places.first_word))
        if checked:
            message = f"the barrier was not initialised by mbarrier.init. {MBARRIER_SECTION}"
            machine = note_undefined(machine, valid & ~barrier.valid, message, start)
        given = machine.read(phase, "u32" if choices["parity"] else "b64")  # a number, or the state that an arrival returned
        parity = given & np.uint32(1) != 0 if choices["parity"] else decode_barrier(given).phase
        return machine.write(done, "pred", barrier.phase != parity)

    return Step(execute)


PREPARE: dict[str, Prepare] = {"mbarrier": prepare_mbarrier}
