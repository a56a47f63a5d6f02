"""Stores and reductions that signal an mbarrier, `st.async` and `red.async`, and the filling of shared memory with zeros, `st.bulk`.

A store takes effect when it is issued, which is one of the outcomes that the manual allows; its bytes are then complete at the mbarrier.
Source: PTX ISA 9.7.9.12, 9.7.9.13, 9.7.13.8.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from tcemu.base.errors import Unsupported
from tcemu.kernels.ptx.instruction_interface import Context, Prepare, Step
from tcemu.kernels.ptx.simt.faults import Message, Misaligned
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.simt.memory_access import element_atomic, execute_atomic, prepare_atomic, prepare_store
from tcemu.kernels.ptx.tensor.async_copies import check_ranges
from tcemu.kernels.ptx.tensor.mbarriers import complete_bytes, update_barriers
from tcemu.kernels.ptx.tensor.statement_forms import InstructionForm, match_form, require, vector_elements
from tcemu.kernels.ptx.text.module import Address, Integer, Statement
from tcemu.kernels.ptx.text.ptx_types import KINDS

BULK_SECTION = "PTX ISA 9.7.9.13"
MMIO = {"mmio": "stores to another device's memory signal nothing that a kernel sees"}
STORE_FORM = InstructionForm("st.async", ("[] <{type}*{count}> []",), MMIO)
REDUCTION_FORM = InstructionForm("red.async", ("[] {type} []",), MMIO)
BULK_FORM = InstructionForm("st.bulk", ("[] %u32 #", "[] u64 #"))
BULK_UNIT = 8  # address and size of a st.bulk are multiples of it


def prepare_any_store(statement: Statement, context: Context) -> Step:
    """Prepare `st`, `st.async` or `st.bulk`."""
    kind = statement.qualifiers[:1]
    if kind == ("async",):
        return _prepare_async_store(statement, context)
    return _prepare_bulk_store(statement, context) if kind == ("bulk",) else prepare_store(statement, context)


def prepare_any_reduction(statement: Statement, context: Context) -> Step:
    """Prepare `red` or `red.async`."""
    return _prepare_async_reduction(statement, context) if statement.qualifiers[:1] == ("async",) else prepare_atomic(statement, context)


def _prepare_async_store(statement: Statement, context: Context) -> Step:
    """Prepare `st.async [a], b, [mbar]`."""
    _, choices = match_form(statement, context, (STORE_FORM,))
    address, value, barrier = statement.operands
    kind, count = choices["type"] or "", int((choices["vector"] or "v1")[1:])
    registers, size = vector_elements(value), count * KINDS[kind].bits // 8
    assert isinstance(address, Address) and isinstance(barrier, Address)

    def execute(machine: Machine) -> Machine:
        space = choices["space"] or ""
        values = tuple(machine.read(register, kind) for register in registers)
        machine = machine.store(space, machine.address(address), kind, values)
        return _complete_store(machine, barrier, size, context.checked)

    return Step(execute)


def _complete_store(machine: Machine, barrier: Address, size: int, checked: bool) -> Machine:
    """Complete the bytes of each thread's store at its mbarrier."""
    amount = jnp.full(machine.active.shape, size, jnp.int64)
    return update_barriers(machine, complete_bytes, machine.address(barrier), amount, checked)[1]


def _prepare_async_reduction(statement: Statement, context: Context) -> Step:
    """Prepare `red.async [a], b, [mbar]`."""
    _, choices = match_form(statement, context, (REDUCTION_FORM,))
    operation, kind = choices["operation"] or "", choices["type"] or ""
    address, value, barrier = statement.operands
    assert isinstance(address, Address) and isinstance(barrier, Address)
    atomic = element_atomic(choices["space"] or "", operation, kind, context)._replace(address=address, b=(value,))
    reduction = execute_atomic(atomic)
    return Step(lambda machine: _complete_store(reduction(machine), barrier, KINDS[kind].bits // 8, context.checked))


def _prepare_bulk_store(statement: Statement, context: Context) -> Step:
    """Prepare `st.bulk [a], size, 0`: zeros in shared memory."""
    match_form(statement, context, (BULK_FORM,))
    address, size, value = statement.operands
    if not isinstance(address, Address) or value != Integer(0):
        raise Unsupported(f"the operands are [address], size, 0. {BULK_SECTION}")
    misaligned = Message(f"address and size must be multiples of {BULK_UNIT}. {BULK_SECTION}", Misaligned, "shared")

    def execute(machine: Machine) -> Machine:
        active, start, count = machine.active, machine.address(address), machine.read(size, "b64")
        aligned = (start | count) % BULK_UNIT == 0
        machine = require(machine, aligned, misaligned, start).restrict_active(count > 0)
        machine = check_ranges(machine, "shared", start, count.astype(jnp.int64), BULK_UNIT)
        places = machine.locate_shared(start, BULK_UNIT)
        words = machine.words("shared")
        first = jnp.where(machine.active, places.first_word, words.shape[0])
        last = first + (count // 4).astype(jnp.int32)
        edges = jnp.zeros(words.shape[0] + 1, jnp.int32).at[first].add(1, mode="drop").at[last].add(-1, mode="drop")
        zeroed = jnp.cumsum(edges)[:-1] > 0
        return replace(machine.with_words("shared", jnp.where(zeroed, np.uint32(0), words)), active=active)

    return Step(execute)


PREPARE: dict[str, Prepare] = {"st": prepare_any_store, "red": prepare_any_reduction}
