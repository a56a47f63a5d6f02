"""Control of launches and resources: `clusterlaunchcontrol`, `griddepcontrol`, `setmaxnreg`, `createpolicy`.

By `clusterlaunchcontrol` a running cluster takes over the work of one that has not begun (PTX ISA 9.7.13.17). Clusters that wait for their
chunk can be cancelled, the next one first. A kernel with `try_cancel` runs in chunks of as many blocks as a GPU has multiprocessors, so
that a larger grid leaves clusters to cancel. PTX leaves the encoding of the response open: here its words are the coordinates of the first
block of the cancelled cluster, and 1 if there is one. The other instructions have no effect here: PTX ISA 9.7.13.16, 9.7.19.5, 9.7.9.18.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.base.errors import UndefinedBehaviour, Unsupported
from tcemu.kernels.ptx.instruction_interface import NO_EFFECT, Context, Operation, Prepare, Step
from tcemu.kernels.ptx.simt.device_memory import replace_rank
from tcemu.kernels.ptx.simt.faults import Message
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.tensor.mbarriers import complete_bytes, update_barriers
from tcemu.kernels.ptx.tensor.statement_forms import InstructionForm, constant_operand, match_form, note_fault
from tcemu.kernels.ptx.text.module import Address, Statement

SECTION = "PTX ISA 9.7.13.17"
LAUNCH_KEY = "launch"  # of the clusters that have not begun, in `Machine.extra`
RESPONSE_BYTES = 16
QUERY = "clusterlaunchcontrol.query_cancel"
TRY_FORM = InstructionForm("clusterlaunchcontrol.try_cancel", ("[] []",))
TEST_FORM = InstructionForm(f"{QUERY}.is_canceled", ("=pred <b64*2>",))
ALL_FORM = InstructionForm(f"{QUERY}.get_first_ctaid", ("<=b32_*4> <b64*2>",))
AXIS_FORMS = tuple(InstructionForm(f"{QUERY}.get_first_ctaid::{axis}", ("=b32 <b64*2>",)) for axis in "xyz")


class PendingClusters(NamedTuple):
    """The clusters of a launch that have not begun."""

    next: Array  # int64: number of the next one
    end: Array  # int64: number behind the last one that may be cancelled
    first_blocks: Array  # uint32[clusters, 3]: coordinates of the first block of each cluster of the launch


def prepare_launch_control(statement: Statement, context: Context) -> Operation | Step:
    """Prepare every `clusterlaunchcontrol`. A response in a register is two registers of 64 bits."""
    form, choices = match_form(statement, context, (TRY_FORM, TEST_FORM, ALL_FORM, *AXIS_FORMS))
    if form is TRY_FORM:
        return _prepare_request(statement, choices["multicast"] is not None, choices["space"] is not None, context.checked)
    if form is TEST_FORM:
        return IS_CANCELLED
    return FIRST_BLOCK if form is ALL_FORM else COORDINATES[form.head[-1]]


def _coordinates(low: Array, high: Array) -> tuple[Array, Array, Array]:
    return low.astype(jnp.uint32), (low >> np.uint64(32)).astype(jnp.uint32), high.astype(jnp.uint32)


IS_CANCELLED = Operation(("pred",), ("b64", "b64"), lambda low, high: (high >> np.uint64(32) != 0,))
FIRST_BLOCK = Operation(("b32",) * 4, ("b64", "b64"), lambda low, high: (*_coordinates(low, high), jnp.zeros(low.shape, jnp.uint32)))
COORDINATES = {
    axis: Operation(("b32",), ("b64", "b64"), lambda low, high, index=index: (_coordinates(low, high)[index],))
    for index, axis in enumerate("xyz")
}


def _prepare_request(statement: Statement, multicast: bool, shared: bool, checked: bool) -> Step:
    """Prepare `try_cancel [response], [mbar]`: each thread's request takes the next cluster."""
    target, barrier = statement.operands
    assert isinstance(target, Address) and isinstance(barrier, Address)
    space = "shared" if shared else ""
    unknown = Message(f"the launch was not prepared for clusterlaunchcontrol. {SECTION}", UndefinedBehaviour)

    def execute(machine: Machine) -> Machine:
        pending = machine.extra.get(LAUNCH_KEY)
        if pending is None:
            return note_fault(machine, machine.active, unknown)
        active = machine.active
        number = pending.next + jnp.cumsum(active.ravel()).reshape(active.shape) - 1
        given = active & (number < pending.end)
        place = pending.first_blocks[jnp.where(given, number, 0)]
        words = [jnp.where(given, place[..., axis], 0) for axis in range(3)] + [given.astype(jnp.uint32)]
        taken = pending._replace(next=jnp.minimum(pending.next + active.sum(), jnp.maximum(pending.end, pending.next)))
        machine = replace(machine, extra={**machine.extra, LAUNCH_KEY: taken})
        size = jnp.full(active.shape, RESPONSE_BYTES, jnp.int64)
        addresses = machine.address(target), machine.address(barrier)
        for rank in range(machine.cluster_size) if multicast else (None,):
            there, signal = addresses if rank is None else (replace_rank(each, jnp.full(active.shape, rank)) for each in addresses)
            machine = machine.store("shared::cluster" if multicast else space, there, "b32", tuple(words), RESPONSE_BYTES)
            machine = update_barriers(machine, complete_bytes, signal, size, checked)[1]
        return machine

    return Step(execute)


# ---- instructions without an observable effect: register budgets, dependent grids, cache policies

GRID_FORMS = tuple(InstructionForm(f"griddepcontrol.{what}", ("",)) for what in ("launch_dependents", "wait"))
REGISTER_FORM = InstructionForm("setmaxnreg", ("#",))
MIN_REGISTERS, MAX_REGISTERS, REGISTER_MULTIPLE = 24, 256, 8  # registers per thread that setmaxnreg accepts
POLICY_FORMS = (
    InstructionForm("createpolicy.fractional", ("=u64", "=u64 f32")),
    InstructionForm("createpolicy.range", ("=u64 [] u32 u32",)),
    InstructionForm("createpolicy.cvt", ("=u64 u64",)),
)


def prepare_grid_dependency(statement: Statement, context: Context) -> Step:
    """Prepare `griddepcontrol`: a launch depends on no other one, and earlier launches have finished."""
    match_form(statement, context, GRID_FORMS)
    return NO_EFFECT


def prepare_register_budget(statement: Statement, context: Context) -> Step:
    """Prepare `setmaxnreg`: threads have all the registers that they name."""
    match_form(statement, context, (REGISTER_FORM,))
    count = constant_operand(statement.operands[0], "the number of registers", REGISTER_FORM.section)
    if not MIN_REGISTERS <= count <= MAX_REGISTERS or count % REGISTER_MULTIPLE:
        raise Unsupported(
            f"got {count}; expected a multiple of {REGISTER_MULTIPLE} from {MIN_REGISTERS} to {MAX_REGISTERS}. {REGISTER_FORM.section}"
        )
    return NO_EFFECT._replace(collective=True)


def prepare_cache_policy(statement: Statement, context: Context) -> Step:
    """Prepare `createpolicy`: an opaque value for cache hints, always 0 here."""
    match_form(statement, context, POLICY_FORMS)
    result = statement.operands[0]
    return Step(lambda machine: machine.write(result, "b64", jnp.zeros(machine.active.shape, jnp.uint64)))


PREPARE: dict[str, Prepare] = {
    "clusterlaunchcontrol": prepare_launch_control, "griddepcontrol": prepare_grid_dependency, "setmaxnreg": prepare_register_budget,
    "createpolicy": prepare_cache_policy,
}  # fmt: skip
