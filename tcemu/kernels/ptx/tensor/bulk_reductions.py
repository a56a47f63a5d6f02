"""Bulk reductions: `cp.reduce.async.bulk`, from shared memory into global memory or into the shared memory of a block of the cluster.

Each element is one atomic operation. Copies of several blocks that meet at an element are applied in the order of the blocks, which is one
of the orders that the manual allows. Source: PTX ISA 9.7.9.25.4.2.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.kernels.ptx.instruction_interface import Context, Step
from tcemu.kernels.ptx.simt.device_memory import locate_in_rooms
from tcemu.kernels.ptx.simt.faults import Message, Misaligned
from tcemu.kernels.ptx.simt.memory_access import Atomic, AtomicRequests, apply_atomic, element_atomic
from tcemu.kernels.ptx.tensor import async_copies as copies
from tcemu.kernels.ptx.tensor.async_copies import UNIT_BYTES, CopyValues
from tcemu.kernels.ptx.tensor.mbarriers import Arrivals, complete_bytes, update_barriers
from tcemu.kernels.ptx.tensor.statement_forms import InstructionForm, match_form, note_fault
from tcemu.kernels.ptx.text.module import Address, Statement
from tcemu.kernels.ptx.text.ptx_types import KINDS

if TYPE_CHECKING:
    from tcemu.kernels.ptx.simt.machine import Machine

SECTION = "PTX ISA 9.7.9.25.4.2"
FORM = InstructionForm("cp.reduce.async.bulk", ("[] [] u32{barrier}{hint}",))


def prepare_linear_copy(statement: Statement, context: Context) -> Step:
    """Prepare `cp.async` or `cp.reduce.async.bulk` of a run of bytes."""
    return _prepare_reduction(statement, context) if statement.qualifiers[:1] == ("reduce",) else copies.prepare_copy(statement, context)


def _prepare_reduction(statement: Statement, context: Context) -> Step:
    """Prepare `cp.reduce.async.bulk [dst], [src], size {, [mbar]} {, policy}`."""
    _, choices = match_form(statement, context, (FORM,))
    space, operation, kind = choices["to"] or "", choices["operation"] or "", choices["type"] or ""
    target, source, size = statement.operands[:3]
    barrier = None if space == "global" else statement.operands[3]
    assert isinstance(target, Address) and isinstance(source, Address)
    atomic = element_atomic(space, operation, kind, context)
    misaligned = Message(f"the size must be a multiple of {UNIT_BYTES} bytes. {SECTION}", Misaligned)

    def execute(machine: Machine) -> Machine:
        active, count = machine.active, machine.read(size, "u32").astype(jnp.int64)
        machine = note_fault(machine, count % UNIT_BYTES != 0, misaligned, statement)
        machine = machine.restrict_active((count % UNIT_BYTES == 0) & (count > 0))
        values = {"units": count // UNIT_BYTES}
        for name, place, address in (("source", "shared", source), ("target", space, target)):
            values[name] = machine.address(address)
            valid, machine = copies.check_ranges(machine, place, values[name], count)
            machine = replace(machine, active=valid)
        machine = copies.issue_copies(machine, values, partial(_reduce_range, atomic=atomic, space=space))
        if isinstance(barrier, Address):
            arrivals = Arrivals(machine.address(barrier), count)
            machine = update_barriers(machine, statement, complete_bytes, arrivals, context.checked)[1]
        return replace(machine, active=active)

    return Step(execute)


def _reduce_range(machine: Machine, copy: CopyValues, *, atomic: Atomic, space: str) -> Machine:
    """Make one reduction for each block that has one."""
    bits = KINDS[atomic.kind].bits

    def reduce_units(machine: Machine, unit: Array, present: Array) -> Machine:
        offset = unit.astype(jnp.uint64) * np.uint64(UNIT_BYTES)
        source, target = copy["source"][:, None] + offset, copy["target"][:, None] + offset
        words = copies.load_units(machine, "shared", source)
        for i in range(8 * UNIT_BYTES // bits):
            value = _extract_element(words, i, bits)
            address = target + np.uint64(i * bits // 8)
            index = (
                locate_in_rooms(machine.rooms, address, bits // 8) if space == "global" else machine.locate_shared(address, bits // 8)
            ).first_word
            requests = AtomicRequests(index, address, value, jnp.zeros_like(value), present)
            machine = machine.with_words(space, apply_atomic(atomic, machine.words(space), requests)[0])
        return machine

    return copies.carry_units(machine, jnp.where(copy["live"], copy["units"], 0), reduce_units)


def _extract_element(words: list[Array], i: int, bits: int) -> Array:
    """Return element i of a unit's four words."""
    if bits == 64:
        return words[2 * i].astype(jnp.uint64) | words[2 * i + 1].astype(jnp.uint64) << np.uint64(32)
    if bits == 32:
        return words[i]
    return words[i // 2] >> np.uint32(16 * (i % 2)) & np.uint32(0xFFFF)
