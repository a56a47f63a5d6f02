"""Warp-level matrix instructions: `mma`, `mma.sp`, `wmma`, `ldmatrix`, `stmatrix` and `movmatrix`.

Products take the fragments of all warps at once. For loads and stores each lane accesses its own part of the matrices through the machine,
which checks bounds and alignment. The parts of a warp form a small memory, between which and registers the functions of
`tcemu.instructions` move the matrices. Source: PTX ISA 9.7.14.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.engine.instructions.mma import mma, mma_sp
from tcemu.engine.instructions.movers import ROW_BYTES, ROW_WORDS, ldmatrix, movmatrix, stmatrix
from tcemu.engine.instructions.selected_operands import MetadataRegisters, metadata_fields, sparsity_selector
from tcemu.engine.instructions.wmma import memory_lines, wmma_load, wmma_mma, wmma_store
from tcemu.engine.isa.families import LANES, Mma, Mover, Wmma, WmmaMemory
from tcemu.engine.isa.legality import manual_section
from tcemu.engine.isa.targets import TARGETS
from tcemu.engine.layouts.fragment_layouts import mover_fragment
from tcemu.engine.layouts.sparsity import undefined_fields
from tcemu.engine.layouts.strided_memory import StridedLines
from tcemu.kernels.ptx.instruction_interface import Context, Prepare, Step
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.tensor.statement_forms import (
    BoundStatement,
    bind_operands,
    note_undefined,
    read_registers,
    require_whole_warps,
    write_registers,
)
from tcemu.kernels.ptx.text.module import Address, Integer, Operand, Statement, Vector

SCALE_NAMES, SELECTOR_NAMES = ("scale_a", "scale_b"), ("selector_a", "selector_b")
ROW_OFFSETS = ROW_BYTES * np.arange(LANES)  # byte offsets of the rows in the memory of a warp
ACCESS_BYTES = 16  # widest access of a lane, which GPUs require to be aligned
STORAGE_SECTION = "PTX ISA 9.7.14.4.2"


# ---- mma


class Selectors(NamedTuple):
    """The constant selectors of an instruction."""

    sparsity: int = 0
    scales: tuple[tuple[int, int], ...] | None = None  # (byte-id, thread-id) of A and of B; None if registers hold them


def prepare_mma(statement: Statement, context: Context) -> Step:
    """Prepare `mma` and `mma.sp`: D = A·B + C, one product per warp."""
    bound = bind_operands(statement, context, Mma)
    op = bound.op
    constants = Selectors(bound.integer("f", 0), _constant_scale_selectors(bound))
    if op.sparse and constants.sparsity not in op.selectors:
        raise Unsupported(f"the sparsity selector is {constants.sparsity}; expected one of {op.selectors}. PTX ISA {manual_section(op)}")

    def execute(machine: Machine) -> Machine:
        machine = require_whole_warps(machine, bound)
        words = {name: read_registers(machine, bound, name) for name in ("a", "b", "c", "e", *SCALE_NAMES) if name in bound.operands}
        if op.sparse and bound.checked:
            machine = _check_metadata(machine, bound, words["e"][..., 0], constants.sparsity)
        selectors = None if constants.scales is not None or not op.scaling is not None else _read_scale_selectors(machine, bound)
        return write_registers(machine, bound, "d", _compute_mma(op, bound.target, constants, words, selectors))

    return Step(execute, collective=True)


def _compute_mma(op: Mma, target: str, constants: Selectors, words: dict[str, Array], selectors: Array | None) -> Array:
    """Compute D of every warp; selectors: int32[blocks, warps, 4], those of the scales if registers hold them."""

    def product(words: dict[str, Array], pairs: Any) -> Array:
        scales: dict[str, Any] = {name: words[name][..., 0] for name in SCALE_NAMES if name in words}
        if pairs is not None:
            scales |= {"selector_a": tuple(pairs[0]), "selector_b": tuple(pairs[1])}
        operands = words["a"], words["b"], words["c"]
        if op.sparse:
            return mma_sp(op, *operands, words["e"][..., 0], selector=constants.sparsity, target=target, **scales)
        return mma(op, *operands, target=target, **scales)

    if selectors is None:
        return product(words, constants.scales)
    product_per_warp = jax.vmap(jax.vmap(lambda words, four: product(words, ((four[0], four[1]), (four[2], four[3])))))
    return product_per_warp(words, selectors)


def _constant_scale_selectors(bound: BoundStatement[Mma]) -> tuple[tuple[int, int], ...] | None:
    """Return the selectors of the scales, or None unless all are constants. Raises Unsupported for a selector out of range."""
    op, pairs = bound.op, [_selector_pair(bound, name) for name in SELECTOR_NAMES if name in bound.operands]
    if not pairs or not all(isinstance(number, Integer) for pair in pairs for number in pair):
        return None
    values = tuple((byte.value, thread.value) for byte, thread in pairs)  # pyright: ignore[reportAttributeAccessIssue]
    scaling = op.require_scaling()
    for name, (byte_id, thread_id) in zip(SELECTOR_NAMES, values, strict=True):
        threads = scaling.thread_ids[name[-1]]
        if byte_id not in scaling.byte_ids or thread_id not in threads:
            raise Unsupported(
                f"{name} is {{{byte_id}, {thread_id}}}; byte-id is in {scaling.byte_ids}, thread-id in {threads}. PTX ISA "
                f"{manual_section(op)}"
            )
    return values


def _selector_pair(bound: BoundStatement[Mma], name: str) -> tuple[Operand, ...]:
    operand = bound.operands[name]
    if not isinstance(operand, Vector) or len(operand.elements) != 2:
        raise Unsupported(f"{name} must be a pair {{byte-id, thread-id}}. PTX ISA {manual_section(bound.op)}")
    return operand.elements


def _read_scale_selectors(machine: Machine, bound: BoundStatement[Mma]) -> Array:
    """Read the selectors of the scales from the first lane of each warp: int32[blocks, warps, 4]."""
    numbers = [number for name in SELECTOR_NAMES for number in _selector_pair(bound, name)]
    return jnp.stack([machine.warps(machine.read(number, "u16"))[..., 0].astype(jnp.int32) for number in numbers], axis=-1)


def _check_metadata(machine: Machine, bound: BoundStatement[Mma], metadata: Array, selector: int) -> Machine:
    op = bound.op
    fields = metadata_fields(op, MetadataRegisters(metadata, sparsity_selector(op, selector)))
    wrong = undefined_fields(fields, op.chunk_size, op.ordered).any((-1, -2))
    where = machine.threads(jnp.broadcast_to(wrong[..., None], metadata.shape)) & machine.active
    return note_undefined(machine, where, "a field of the sparsity metadata is not defined. PTX ISA 9.7.14.6.1")


# ---- wmma


def prepare_wmma(statement: Statement, context: Context) -> Step:
    """Prepare `wmma.mma`, `wmma.load` and `wmma.store`."""
    if statement.opcode.startswith("wmma.mma"):
        return _prepare_wmma_mma(bind_operands(statement, context, Wmma))
    return _prepare_wmma_memory(bind_operands(statement, context, WmmaMemory))


def _prepare_wmma_mma(bound: BoundStatement[Wmma]) -> Step:
    def execute(machine: Machine) -> Machine:
        machine = require_whole_warps(machine, bound)
        a, b, c = (read_registers(machine, bound, name) for name in "abc")
        return write_registers(machine, bound, "d", wmma_mma(bound.op, a, b, c, target=bound.target))

    return Step(execute, collective=True)


def _prepare_wmma_memory(bound: BoundStatement[WmmaMemory]) -> Step:
    """Prepare `wmma.load` and `wmma.store`, which access the lines of the matrix without gaps."""
    op, all_lanes = bound.op, np.ones(LANES, bool)
    parts, target = lane_parts(op), bound.target
    words = parts.words

    def execute(machine: Machine) -> Machine:
        machine = require_whole_warps(machine, bound)
        address, machine = _part_addresses(machine, bound, parts)
        if op.family == "wmma.load":
            values, machine = _load_lanes(machine, bound, address, _active_lanes(machine, all_lanes), words)
            fragment = wmma_load(op, values.reshape(*values.shape[:2], -1), target=target)
            return write_registers(machine, bound, "r", fragment)
        fragment = read_registers(machine, bound, "r")
        memory = jnp.zeros((*fragment.shape[:2], LANES * words), jnp.uint32)
        values = wmma_store(op, memory, fragment, target=target).reshape(*fragment.shape[:2], LANES, words)
        return _store_lanes(machine, bound, address, _active_lanes(machine, all_lanes), values)

    return Step(execute, collective=True)


class LaneParts(NamedTuple):
    """The parts of a matrix in memory, one for each lane, each within a line."""

    lines: StridedLines
    numbers: np.ndarray  # int[32]: the line of each part
    offsets: np.ndarray  # int[32]: bytes from the line's beginning
    words: int  # of a part


def lane_parts(op: WmmaMemory) -> LaneParts:
    """Return the parts of the matrix of a `wmma.load` or `wmma.store`."""
    lines = memory_lines(op)
    per_line = lines.words(lines.length)
    words = int(lines.count * per_line) // LANES
    first = np.arange(LANES) * words
    return LaneParts(lines, first // per_line, first % per_line * 4, words)


def _part_addresses(machine: Machine, bound: BoundStatement[WmmaMemory], parts: LaneParts) -> tuple[Array, Machine]:
    """Return the byte address of each lane's part of the matrix, and the machine with faults noted."""
    op, lines = bound.op, parts.lines
    address = machine.address(_memory_operand(bound))
    if "stride" in bound.operands:
        stride = machine.read(bound.operands["stride"], "s32")
    else:
        stride = jnp.full(address.shape, op.default_stride, jnp.uint32)
    step = stride.astype(jnp.int32).astype(jnp.int64) * lines.bits // 8
    if bound.checked:
        machine = _check_place(machine, bound, lines, address, step)
    offset = machine.threads(machine.warps(step) * jnp.asarray(parts.numbers) + jnp.asarray(parts.offsets))
    return address + offset.astype(jnp.uint64), machine


def _check_place(machine: Machine, bound: BoundStatement[WmmaMemory], lines: StridedLines, address: Array, step: Array) -> Machine:
    """Note as faults the addresses and strides that PTX leaves undefined; step: distance of the lines in bytes.

    They include an address that is not aligned as the manual requires, although GPUs load a lane's part in narrower accesses, and CUDA
    requires less.
    """
    op, unit = bound.op, lines.alignment * lines.bits // 8
    misaligned = (address % np.uint64(unit) != 0) | (step % unit != 0)
    aligned = f"the address and the stride must be multiples of {unit} bytes, the size of a lane's fragment. {STORAGE_SECTION}"
    machine = note_undefined(machine, machine.active & misaligned, aligned, address)
    differs = jnp.zeros(address.shape, bool)
    for value in (machine.warps(address), machine.warps(step)):
        differs |= machine.threads(value != value[..., :1])
    uniform = f"the address and the stride must be the same in all lanes of the warp. PTX ISA {manual_section(op)}"
    machine = note_undefined(machine, machine.active & differs, uniform, address)
    below = f"the stride is below {op.default_stride} elements, a line's length. {STORAGE_SECTION}"
    return note_undefined(machine, machine.active & (step < op.default_stride * lines.bits // 8), below)


# ---- ldmatrix, stmatrix, movmatrix: PTX ISA 9.7.14.5.15 to 17


def prepare_ldmatrix(statement: Statement, context: Context) -> Step:
    """Prepare `ldmatrix`: the lanes that address a row load it. With `loads_all_rows` the other addresses must be valid too."""
    bound = bind_operands(statement, context, Mover)
    lanes = np.ones(LANES, bool) if TARGETS[bound.target].loads_all_rows else _row_lanes(bound.op)

    def execute(machine: Machine) -> Machine:
        machine = require_whole_warps(machine, bound)
        rows, machine = _load_lanes(machine, bound, machine.address(_memory_operand(bound)), _active_lanes(machine, lanes), ROW_WORDS)
        registers = ldmatrix(bound.op, rows.reshape(*rows.shape[:2], LANES * ROW_WORDS), ROW_OFFSETS)
        return write_registers(machine, bound, "r", registers)

    return Step(execute, collective=True)


def prepare_stmatrix(statement: Statement, context: Context) -> Step:
    """Prepare `stmatrix`: the lanes that address a row store it."""
    bound = bind_operands(statement, context, Mover)
    lanes = _row_lanes(bound.op)

    def execute(machine: Machine) -> Machine:
        machine = require_whole_warps(machine, bound)
        registers = read_registers(machine, bound, "r")
        memory = jnp.zeros((*registers.shape[:2], LANES * ROW_WORDS), jnp.uint32)
        rows = stmatrix(bound.op, memory, ROW_OFFSETS, registers).reshape(*registers.shape[:2], LANES, ROW_WORDS)
        return _store_lanes(machine, bound, machine.address(_memory_operand(bound)), _active_lanes(machine, lanes), rows)

    return Step(execute, collective=True)


def prepare_movmatrix(statement: Statement, context: Context) -> Step:
    """Prepare `movmatrix`."""
    bound = bind_operands(statement, context, Mover)

    def execute(machine: Machine) -> Machine:
        machine = require_whole_warps(machine, bound)
        return write_registers(machine, bound, "d", movmatrix(bound.op, read_registers(machine, bound, "a")))

    return Step(execute, collective=True)


# ---- memory accesses of lanes


def _row_lanes(op: Mover) -> np.ndarray:
    """Return bool[32], the lanes whose addresses are used: one for each row of 16 bytes of every matrix."""
    return np.arange(LANES) < op.num * mover_fragment((op.m, op.n), op.num, trans=op.trans).rows


def _active_lanes(machine: Machine, lanes: np.ndarray) -> Array:
    """Return bool[blocks, threads], the active threads on the given lanes of their warps."""
    return machine.threads(machine.warps(machine.active) & lanes)


def _memory_operand(bound: BoundStatement[Mover | WmmaMemory]) -> Address:
    address = bound.operands["p"]
    assert isinstance(address, Address)
    return address


def _state_space(op: Mover | WmmaMemory) -> str:
    """Return the machine's name of the state space of the address; "" is generic."""
    return (op.space or "").partition("::")[0]


def _load_lanes(
    machine: Machine, bound: BoundStatement[Mover | WmmaMemory], address: Array, lanes: Array, words: int
) -> tuple[Array, Machine]:
    """Load words from the address of each lane. Returns uint32[blocks, warps, 32, words] and the machine."""
    active, machine = machine.active, replace(machine, active=lanes)
    values, machine = machine.load(_state_space(bound.op), address, "b32", words, min(4 * words, ACCESS_BYTES))
    return jnp.stack([machine.warps(value) for value in values], axis=-1), replace(machine, active=active)


def _store_lanes(machine: Machine, bound: BoundStatement[Mover | WmmaMemory], address: Array, lanes: Array, words: Array) -> Machine:
    active, machine = machine.active, replace(machine, active=lanes)
    values = tuple(machine.threads(words[..., i]) for i in range(words.shape[-1]))
    return replace(machine.store(_state_space(bound.op), address, "b32", values, min(4 * len(values), ACCESS_BYTES)), active=active)


PREPARE: dict[str, Prepare] = {
    "mma": prepare_mma,
    "wmma": prepare_wmma,
    "ldmatrix": prepare_ldmatrix,
    "stmatrix": prepare_stmatrix,
    "movmatrix": prepare_movmatrix,
}
