"""`wgmma.mma_async`, dense and sparse, and `wgmma.fence`, `wgmma.commit_group`, `wgmma.wait_group`.

A product is computed when it is issued, which is one of the outcomes that the asynchronous protocol allows. Each warp takes its rows of D
from the product of its warpgroup, so warps that execute the instruction one after the other get the same results. Source: PTX ISA 9.7.15.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.engine.instructions.selected_operands import MetadataRegisters, metadata_fields, sparsity_selector
from tcemu.engine.instructions.wgmma import operand_addresses, wgmma
from tcemu.engine.isa.families import LANES, Wgmma
from tcemu.engine.isa.legality import manual_section
from tcemu.engine.layouts.shared_memory import has_stray_bits, is_outside
from tcemu.engine.layouts.sparsity import undefined_fields
from tcemu.kernels.ptx.instruction_interface import Context, Prepare, Step
from tcemu.kernels.ptx.simt.device_memory import split_words
from tcemu.kernels.ptx.simt.faults import Message, OutOfBounds
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.tensor.statement_forms import (
    BoundStatement,
    bind_operands,
    group_warps,
    note_fault,
    note_undefined,
    read_registers,
    read_uniform,
    require_whole_warps,
    ungroup_warps,
    write_registers,
)
from tcemu.kernels.ptx.text.module import Integer, Operand, Statement

LEGAL_IMMEDIATES = {  # legal values, default first
    "imm_scale_a": (1, -1),
    "imm_scale_b": (1, -1),
    "imm_trans_a": (0, 1),
    "imm_trans_b": (0, 1),
}


def prepare_wgmma(statement: Statement, context: Context) -> Step:
    """Prepare every `wgmma` instruction."""
    if not statement.opcode.startswith("wgmma.mma_async"):
        bound = bind_operands(statement, context)
        if bound.integer("n", 0) < 0:
            raise Unsupported(f"the number of groups that may stay pending must be 0 or more. PTX ISA {manual_section(bound.op)}")
        return Step(lambda machine: require_whole_warps(machine, bound), collective=True)
    return _prepare_product(bind_operands(statement, context, Wgmma))


def _prepare_product(bound: BoundStatement[Wgmma]) -> Step:
    op = bound.op
    immediates = _read_immediates(bound)
    selector = bound.integer("sp_sel", 0)
    if op.sparse and selector not in op.selectors:
        raise Unsupported(f"sp_sel is {selector}; expected one of {op.selectors}. PTX ISA {manual_section(op)}")

    def execute(machine: Machine) -> Machine:
        machine = require_whole_warps(machine, bound)
        words = {name: group_warps(read_registers(machine, bound, name)) for name in ("d", "a") if name in bound.operands}
        for name in ("a_desc", "b_desc"):
            if name in bound.operands:
                value, machine = _read_uniform(machine, bound, name, "b64")
                words[name] = jnp.stack(split_words(value), axis=-1)
                machine = _check_descriptor(machine, bound, immediates, name, words[name])
        if op.sparse:
            words["sp_meta"] = group_warps(machine.warps(machine.read(bound.operands["sp_meta"], "b32")))
            machine = _check_metadata(machine, bound, words["sp_meta"], selector)
        if bound.operands["scale_d"] != Integer(1):
            words["scale_d"], machine = _read_uniform(machine, bound, "scale_d", "pred")
        d, b_desc, shared = words.pop("d"), words.pop("b_desc"), machine.shared[:, None]
        options: dict[str, Any] = words | immediates | ({"sp_sel": selector} if op.sparse else {})
        result = wgmma(op, d, b_desc, shared, target=bound.target, **options)
        return write_registers(machine, bound, "d", ungroup_warps(result, machine.warps(machine.active).shape[1]))

    return Step(execute, collective=True)


def _read_immediates(bound: BoundStatement[Wgmma]) -> dict[str, int]:
    """Return the immediate operands by the names of `tcemu.wgmma`. Raises Unsupported for an illegal value."""
    values = {name: bound.integer(name, legal[0]) for name, legal in LEGAL_IMMEDIATES.items()}
    for name, value in values.items():
        legal = LEGAL_IMMEDIATES[name]
        if value not in legal:
            raise Unsupported(f"{name} is {value}; expected {legal[0]} or {legal[1]}. PTX ISA {manual_section(bound.op)}")
    return values


def _read_uniform(machine: Machine, bound: BoundStatement[Wgmma], name: str, kind: str) -> tuple[Array, Machine]:
    """Read a value that is uniform in a warpgroup, [blocks, warpgroups]."""
    operand: Operand = bound.operands[name]
    is_constant = kind == "pred" and isinstance(operand, Integer)
    value = jnp.full(machine.active.shape, operand != Integer(0)) if is_constant else machine.read(operand, kind)
    message = f"{name} must be the same in all threads of the warpgroup. PTX ISA {manual_section(bound.op)}"
    return read_uniform(machine, bound, value, 4 * LANES, message)


def _check_descriptor(machine: Machine, bound: BoundStatement[Wgmma], immediates: dict[str, int], name: str, words: Array) -> Machine:
    """Note a fault for a descriptor beyond the block's shared memory, and in checked mode for bits that belong to no field."""
    op, matrix = bound.op, name[0]
    major = "mn" if immediates[f"imm_trans_{matrix}"] else "k"
    addresses = operand_addresses(op, matrix, major, words)
    beyond = is_outside(addresses, machine.shared.shape[-1]).any((-1, -2))
    last = jnp.max(addresses, axis=(-1, -2)).astype(jnp.uint64)
    message = f"{name} leads beyond the block's shared memory. PTX ISA 9.7.15.5.1.2"
    where = _spread_to_threads(machine, beyond) & machine.active
    machine = note_fault(machine, where, Message(message, OutOfBounds, "shared"), _spread_to_threads(machine, last))
    if not bound.checked:
        return machine
    stray = _spread_to_threads(machine, has_stray_bits(words)) & machine.active
    return note_undefined(machine, stray, f"{name} has bits that belong to no field. PTX ISA 9.7.15.5.1.2.2")


def _check_metadata(machine: Machine, bound: BoundStatement[Wgmma], metadata: Array, selector: int) -> Machine:
    op = bound.op
    if not bound.checked:
        return machine
    fields = metadata_fields(op, MetadataRegisters(metadata, sparsity_selector(op, selector)))  # [blocks, warpgroups, 64, chunks]
    wrong = undefined_fields(fields, op.chunk_size, op.ordered).any(-1).reshape(*fields.shape[:2], 4, -1).any(-1)
    lanes = jnp.broadcast_to(wrong[..., None], metadata.shape)
    where = machine.threads(ungroup_warps(lanes, machine.active.shape[1] // LANES)) & machine.active
    return note_undefined(machine, where, "a field of the sparsity metadata is not defined. PTX ISA 9.7.15.6.1")


def _spread_to_threads(machine: Machine, value: Array) -> Array:
    """Repeat [blocks, warpgroups] to [blocks, threads]."""
    return jnp.repeat(value, 4 * LANES, axis=1)[:, : machine.active.shape[1]]


PREPARE: dict[str, Prepare] = {"wgmma": prepare_wgmma}
