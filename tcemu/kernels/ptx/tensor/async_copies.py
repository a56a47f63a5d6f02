"""Asynchronous copies and reductions between global and shared memory: `cp.async`, `cp.async.bulk` and `cp.reduce.async.bulk`.

Those of tensors are in `tensor_copies`. Each element of a reduction is one atomic operation; those of several blocks that meet at an
element are applied in the order of the blocks, which is one of the orders that the manual allows.

A copy is made when it is issued, which is one of the outcomes that the manual allows. So the instructions that wait have no effect; checked
mode follows them on the host, see `tcemu.kernels.ptx.hazards`.

A single thread issues a bulk copy. The issuing threads of a block follow one another, one thread of every block at a time, and `COPY_LANES`
lanes per block move units of `UNIT_BYTES` bytes. Source: PTX ISA 9.7.9.25.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.statement_table import Choices
from tcemu.kernels.ptx.instruction_interface import NO_EFFECT, Context, Step
from tcemu.kernels.ptx.simt.device_memory import extract_element, gather_words, replace_rank, scatter_runs
from tcemu.kernels.ptx.simt.faults import Message, Misaligned, OutOfBounds
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.simt.memory_access import Atomic, AtomicRequests, apply_atomic, element_atomic
from tcemu.kernels.ptx.tensor.mbarriers import BarrierUpdate, arrive, arrive_after_copies, complete_bytes, update_barriers
from tcemu.kernels.ptx.tensor.statement_forms import InstructionForm, constant_operand, match_form, require
from tcemu.kernels.ptx.text.module import Address, Negated, Operand, Register, Statement
from tcemu.kernels.ptx.text.ptx_types import KINDS

UNIT_BYTES = 16  # bytes that a lane moves at a time
UNIT_WORDS = UNIT_BYTES // 4
COPY_LANES = 512  # lanes per block that move the units of a copy
COPY_SECTION = "PTX ISA 9.7.9.25.3"
COPY_FORM = InstructionForm("cp.async", ("[] [] #{hint}", "[] [] # u32{hint}", "[] [] # pred{hint}"))
ARRIVE_FORM = InstructionForm("cp.async.mbarrier.arrive", ("[]",))
COMMIT_FORM = InstructionForm("cp.async.commit_group", ("",))
WAIT_ALL_FORM = InstructionForm("cp.async.wait_all", ("",))
WAIT_FORM = InstructionForm("cp.async.wait_group", ("#",))
BULK_FORM = InstructionForm("cp.async.bulk", ("[] [] u32{barrier}{multicast}{hint}{mask}",))
REDUCTION_FORM = InstructionForm("cp.reduce.async.bulk", ("[] [] u32{barrier}{hint}",))
BULK_COMMIT_FORM = InstructionForm("cp.async.bulk.commit_group", ("",))
BULK_WAIT_FORM = InstructionForm("cp.async.bulk.wait_group", ("#",))
PREFETCH_FORM = InstructionForm("cp.async.bulk.prefetch", ("[] u32{hint}",))
EMPTY_FORMS = (COMMIT_FORM, WAIT_ALL_FORM, BULK_COMMIT_FORM, PREFETCH_FORM)
COPY_FORMS = (COPY_FORM, ARRIVE_FORM, WAIT_FORM, BULK_FORM, REDUCTION_FORM, BULK_WAIT_FORM, *EMPTY_FORMS)
COPY_SIZES = {"ca": (4, 8, 16), "cg": (16,)}  # sizes of a cp.async in bytes


def prepare_copy(statement: Statement, context: Context) -> Step:
    """Prepare every `cp.async` and `cp.reduce.async.bulk` but those of tensors."""
    form, choices = match_form(statement, context, COPY_FORMS)
    if form in (WAIT_FORM, BULK_WAIT_FORM):
        groups = constant_operand(statement.operands[0], "the number of groups that may stay pending", form.section)
        if groups < 0:
            raise Unsupported(f"the number of groups that may stay pending must be 0 or more. {form.section}")
        return NO_EFFECT
    if form in EMPTY_FORMS:
        return NO_EFFECT
    if form is ARRIVE_FORM:
        return _prepare_arrival(statement, arrive if choices["noinc"] else arrive_after_copies, context.checked)
    if form in (BULK_FORM, REDUCTION_FORM):
        return _prepare_bulk(statement, choices, context, form.section)
    return _prepare_small(statement, choices, context)


def _require_address(operand: Operand) -> Address:
    if not isinstance(operand, Address):
        raise Unsupported(f"an address must be in brackets. {COPY_SECTION}")
    return operand


def _prepare_arrival(statement: Statement, update: BarrierUpdate, checked: bool) -> Step:
    """Prepare `cp.async.mbarrier.arrive`: the thread arrives, because its copies have completed."""
    address = _require_address(statement.operands[0])

    def execute(machine: Machine) -> Machine:
        return update_barriers(machine, update, machine.address(address), jnp.ones(machine.active.shape, jnp.int64), checked)[1]

    return Step(execute)


# ---- cp.async


def _prepare_small(statement: Statement, choices: Choices, context: Context) -> Step:
    """Prepare `cp.async` of 4, 8 or 16 bytes. Bytes beyond src-size, and all bytes under ignore-src, become zeros and are not read."""
    target, source = (_require_address(operand) for operand in statement.operands[:2])
    size = constant_operand(statement.operands[2], "cp-size", COPY_SECTION)
    sizes = COPY_SIZES[choices["cache"] or ""]
    if size not in sizes:
        raise Unsupported(f"cp-size is {size}; expected {' or '.join(map(str, sizes))}. {COPY_SECTION}")
    optional = statement.operands[3 : None if choices["hint"] is None else -1]
    limit = optional[0] if optional else None
    ignores = isinstance(limit, Negated) or (isinstance(limit, Register) and context.function.registers.get(limit.name) == "pred")

    def execute(machine: Machine) -> Machine:
        count = _bytes_read(machine, limit, ignores, size)
        values, machine = _read_words(machine, machine.address(source), count, size, partial=limit is not None and not ignores)
        return machine.store("shared", machine.address(target), "b32", values)

    return Step(execute)


def _bytes_read(machine: Machine, limit: Operand | None, ignores: bool, size: int) -> Array:
    """Return the number of bytes that each thread reads, int64[blocks, threads]."""
    if limit is None:
        return jnp.full(machine.active.shape, size, jnp.int64)
    if ignores:
        return jnp.where(machine.read(limit, "pred"), 0, size)
    return jnp.minimum(machine.read(limit, "u32").astype(jnp.int64), size)


def _read_words(machine: Machine, address: Array, count: Array, size: int, *, partial: bool) -> tuple[tuple[Array, ...], Machine]:
    """Read the words of a copy, zeros beyond `count` bytes; partial: `count` may be any number of bytes."""
    active, words = machine.active, size // 4

    def read_byte(i: Array, state: tuple[Array, Any]) -> tuple[Array, Any]:
        values, found = state
        lanes = replace(machine, active=active & (i < count) & (count < size), faults=found)
        (byte,), lanes = lanes.load("global", address + i.astype(jnp.uint64), "b8")
        return values.at[i // 4].set(values[i // 4] | byte << (i % 4 * 8).astype(jnp.uint32)), lanes.faults

    def read_bytes(faults: Any) -> tuple[Array, Any]:  # a loop, since every byte that is written out is compiled
        return lax.fori_loop(0, size, read_byte, (nothing, faults))

    values, machine = replace(machine, active=active & (count == size)).load("global", address, "b32", words)
    machine = replace(machine, active=active)
    if not partial:
        return values, machine
    nothing = jnp.zeros((words, *active.shape), jnp.uint32)
    has_partial = (active & (count > 0) & (count < size)).any()
    others, faults = lax.cond(has_partial, read_bytes, lambda faults: (nothing, faults), machine.faults)
    return tuple(value | other for value, other in zip(values, others, strict=True)), replace(machine, faults=faults)


# ---- bulk copies: the issuing threads of a block one after the other, and lanes that move units

CopyValues = dict[str, Array]  # values of the issuing threads by name


def issue_copies(machine: Machine, values: CopyValues, body: Callable[[Machine, CopyValues], Machine]) -> Machine:
    """Apply `body` for each active thread, in the order of their numbers, one thread of every block at a time.

    Args:
        machine: The machine.
        values: Values of the threads, [blocks, threads, ...].
        body: Function of the machine and the values of the issuing threads, [blocks, ...], among them "live": the block has an issuing
            thread in this iteration. It may change only the memory.
    """
    order = jnp.argsort(~machine.active, axis=1, stable=True)
    iterations = machine.active.sum(axis=1)

    def issue(state: tuple[Array, Any]) -> tuple[Array, Any]:
        iteration, memories = state
        thread = order[:, iteration]
        copy = jax.tree.map(lambda x: x[jnp.arange(thread.shape[0]), thread], values)
        return iteration + 1, _memories(body(_replace_memories(machine, memories), copy | {"live": iteration < iterations}))

    start = jnp.zeros((), iterations.dtype), _memories(machine)
    return _replace_memories(machine, lax.while_loop(lambda state: state[0] < iterations.max(), issue, start)[1])


def carry_units(machine: Machine, units: Array, body: Callable[[Machine, Array, Array], Machine]) -> Machine:
    """Apply `body` to the units of 16 bytes of each block's copy.

    Args:
        machine: The machine.
        units: Number of units of each block's copy, int64[blocks].
        body: Function of the machine, the indices of units int64[1, lanes], and bool[blocks, lanes], the units that a block has. It may
            change only the memory.
    """

    def carry(state: tuple[Array, Any]) -> tuple[Array, Any]:
        first, memories = state
        unit = first + jnp.arange(COPY_LANES)[None]
        return first + COPY_LANES, _memories(body(_replace_memories(machine, memories), unit, unit < units[:, None]))

    start = jnp.zeros((), jnp.int64), _memories(machine)
    return _replace_memories(machine, lax.while_loop(lambda state: state[0] < units.max(), carry, start)[1])


def _memories(machine: Machine) -> tuple[Array, Array]:
    return machine.memory, machine.shared


def _replace_memories(machine: Machine, memories: tuple[Array, Array]) -> Machine:
    return replace(machine, memory=memories[0], shared=memories[1])


def load_units(machine: Machine, space: str, source: Array) -> list[Array]:
    """Return the four words of each lane at `source`, uint64[blocks, lanes]."""
    return gather_words(*unit_words(machine, space, source), UNIT_WORDS)


def store_units(machine: Machine, space: str, values: list[Array], target: Array, active: Array) -> Machine:
    """Store the four words of each active lane at `target`, uint64[blocks, lanes]."""
    words, index = unit_words(machine, space, target)
    return machine.with_words(space, scatter_runs(words, index, values, active))


def each_destination(machine: Machine, address: Array, active: Array, mask: Array | None) -> Iterator[tuple[Array, Array]]:
    """Yield the addresses of copies in each block to which they go, and which of them go there.

    Args:
        machine: The machine.
        address: The addresses, uint64.
        active: The copies that exist, bool.
        mask: The masks of multicast copies, uint32; they broadcast to the addresses. None: a copy goes to the block of its address alone.
    """
    if mask is None:
        yield address, active
        return
    for rank in range(machine.cluster_size):
        yield replace_rank(address, jnp.full(mask.shape, rank, jnp.uint32)), active & (mask >> np.uint32(rank) & np.uint32(1) != 0)


def unit_words(machine: Machine, space: str, address: Array) -> tuple[Array, Array]:
    """Return the words of a space, and the indices of the words at addresses uint64[blocks, lanes]."""
    return machine.words(space), machine.locate_words(space, address, UNIT_BYTES).first_word


def check_ranges(machine: Machine, space: str, address: Array, size: Array, unit: int = UNIT_BYTES) -> Machine:
    """Check that ranges of `size` bytes, multiples of `unit`, are within memory and aligned to units.

    Returns:
        The machine with the faults noted, in which only the threads with valid ranges are active.
    """
    _, first_valid, machine = machine.locate(space, address, unit)
    last = address + jnp.maximum(size, unit).astype(jnp.uint64) - np.uint64(unit)
    _, last_valid, machine = machine.locate(space, last, unit)
    return machine.restrict_active(first_valid & last_valid)


def _prepare_bulk(statement: Statement, choices: Choices, context: Context, section: str) -> Step:
    """Prepare the copy of a run of bytes between global and shared memory or the shared memory of blocks of a cluster, or its reduction."""
    target, source = (_require_address(operand) for operand in statement.operands[:2])
    barrier = None if choices["to"] == "global" else _require_address(statement.operands[3])
    mask = statement.operands[4] if choices.get("multicast") else None
    from_space, to_space = ("global" if choices[name] == "global" else "shared::cluster" for name in ("from", "to"))
    bad_size = Message(f"the size must be a multiple of {UNIT_BYTES} bytes. {section}", Misaligned)
    move: Callable[[Machine, CopyValues], Machine] = partial(_copy_ranges, spaces=(from_space, to_space))
    if "operation" in choices:
        atomic = element_atomic(choices["to"] or "", choices["operation"] or "", choices["type"] or "", context)
        move = partial(_reduce_ranges, atomic=atomic, space=to_space)

    def execute(machine: Machine) -> Machine:
        active = machine.active
        size = machine.read(statement.operands[2], "u32").astype(jnp.int64)
        machine = require(machine, size % UNIT_BYTES == 0, bad_size).restrict_active(size > 0)
        values = {"units": size // UNIT_BYTES}
        for name, space, address in (("source", from_space, source), ("target", to_space, target)):
            values[name] = machine.address(address)
            machine = check_ranges(machine, space, values[name], size)
        if choices.get("mask"):
            values["bytes"] = machine.read(statement.operands[-1], "b16").astype(jnp.uint32)
        if mask is not None:
            values["mask"], machine = read_multicast_mask(machine, mask, section)
        machine = issue_copies(machine, values, move)
        if barrier is not None:
            machine = complete_copies(machine, machine.address(barrier), size, values.get("mask"), context.checked)
        return replace(machine, active=active)

    return Step(execute)


def read_multicast_mask(machine: Machine, operand: Operand, section: str) -> tuple[Array, Machine]:
    """Read the masks of multicast copies, uint32[blocks, threads]. A bit of a rank that the cluster does not have is a fault."""
    mask = machine.read(operand, "b16").astype(jnp.uint32)
    message = f"the multicast mask names a block that the cluster does not have. {section}"
    return mask, require(machine, mask >> np.uint32(machine.cluster_size) == 0, Message(message, OutOfBounds))


def complete_copies(machine: Machine, barrier: Array, size: Array, mask: Array | None, checked: bool) -> Machine:
    """Complete the bytes of copies at their barrier; those of a multicast copy at the barrier of the same offset in each destination."""
    active = machine.active
    for address, there in each_destination(machine, barrier, active, mask):
        machine = update_barriers(replace(machine, active=there), complete_bytes, address, size, checked)[1]
    return replace(machine, active=active)


def _copy_ranges(machine: Machine, copy: CopyValues, *, spaces: tuple[str, str]) -> Machine:
    """Make one copy for each block that has one."""

    def copy_range(machine: Machine, unit: Array, present: Array) -> Machine:
        offset = unit.astype(jnp.uint64) * np.uint64(UNIT_BYTES)
        source, target = copy["source"][:, None] + offset, copy["target"][:, None] + offset
        values = load_units(machine, spaces[0], source)
        if "bytes" in copy:  # of each 16 bytes only those whose bits are set
            chosen = [copy["bytes"][:, None] >> np.uint32(i) & np.uint32(1) for i in range(UNIT_BYTES)]
            masks = [sum(chosen[4 * i + byte] * np.uint32(0xFF << 8 * byte) for byte in range(4)) for i in range(UNIT_WORDS)]
            old = load_units(machine, spaces[1], target)
            values = [new & mask | before & ~mask for new, before, mask in zip(values, old, masks, strict=True)]
        for address, there in each_destination(machine, target, present, copy["mask"][:, None] if "mask" in copy else None):
            machine = store_units(machine, spaces[1], values, address, there)
        return machine

    return carry_units(machine, jnp.where(copy["live"], copy["units"], 0), copy_range)


def _reduce_ranges(machine: Machine, copy: CopyValues, *, atomic: Atomic, space: str) -> Machine:
    """Make one reduction for each block that has one."""
    bits = KINDS[atomic.kind].bits

    def reduce_units(machine: Machine, unit: Array, present: Array) -> Machine:
        offset = unit.astype(jnp.uint64) * np.uint64(UNIT_BYTES)
        source, target = copy["source"][:, None] + offset, copy["target"][:, None] + offset
        words = load_units(machine, "shared", source)
        for i in range(8 * UNIT_BYTES // bits):
            value = extract_element(words[i * bits // 32 :], jnp.full(target.shape, i * bits // 8, jnp.uint64), bits)
            address = target + np.uint64(i * bits // 8)
            index = machine.locate_words(space, address, bits // 8).first_word
            requests = AtomicRequests(index, address, value, jnp.zeros_like(value), present)
            machine = machine.with_words(space, apply_atomic(atomic, machine.words(space), requests)[0])
        return machine

    return carry_units(machine, jnp.where(copy["live"], copy["units"], 0), reduce_units)
