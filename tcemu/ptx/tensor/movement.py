"""`ldmatrix`, `stmatrix`, `movmatrix`, `wmma.load` and `wmma.store`.

Each lane loads or stores its own part of the matrices by the machine, which looks at bounds and alignment. What the parts of a warp are
together is a small memory of its own, and the existing operations bring it into registers and back.
Source: PTX ISA 9.7.14.4.3, 9.7.14.4.4, 9.7.14.5.15 to 17.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.isa.catalog import section
from tcemu.isa.instructions import LANES, Instruction
from tcemu.layouts import mover_fragment
from tcemu.memory import Lines
from tcemu.operations.movement import ROW_BYTES, ROW_WORDS, ldmatrix, movmatrix, stmatrix
from tcemu.operations.wmma import memory_lines, wmma_load, wmma_store
from tcemu.ptx.context import Context, Prepare, Step
from tcemu.ptx.module import Address, Statement
from tcemu.ptx.tensor.statements import Bound, bind, registers, undefined, whole_warps, write

if TYPE_CHECKING:
    from tcemu.ptx.machine import Machine

ROWS = ROW_BYTES * np.arange(LANES)  # where the rows lie in the memory of a warp
ACCESS = 16  # bytes of the widest access that a lane makes: what GPUs want aligned
STORAGE = "PTX ISA 9.7.14.4.2"


def prepare_ldmatrix(statement: Statement, context: Context) -> Step:
    """`ldmatrix` by `tcemu.ldmatrix`: the lanes that name a row load it. On sm_75 the others' addresses must be good too."""
    bound = bind(statement, context)
    op = bound.op
    named = np.ones(LANES, bool) if bound.target == "sm_75" else _lanes_with_rows(op)

    def run(machine: Machine) -> Machine:
        machine = whole_warps(machine, bound)
        rows, machine = _load(machine, bound, machine.address(_place(bound)), _lanes(machine, named), ROW_WORDS)
        return write(machine, bound, "r", _ldmatrix(op, rows))

    return Step(run, together=True)


def _ldmatrix(op: Instruction, rows: Array) -> Array:
    return ldmatrix(op, rows.reshape(*rows.shape[:2], LANES * ROW_WORDS), ROWS)


def prepare_stmatrix(statement: Statement, context: Context) -> Step:
    """`stmatrix` by `tcemu.stmatrix`: the lanes that name a row store it."""
    bound = bind(statement, context)
    op, named = bound.op, _lanes_with_rows(bound.op)

    def run(machine: Machine) -> Machine:
        machine = whole_warps(machine, bound)
        rows = _stmatrix(op, registers(machine, bound, "r"))
        return _store(machine, bound, machine.address(_place(bound)), _lanes(machine, named), rows)

    return Step(run, together=True)


def _stmatrix(op: Instruction, words: Array) -> Array:
    rows = stmatrix(op, jnp.zeros((*words.shape[:2], LANES * ROW_WORDS), jnp.uint32), ROWS, words)
    return rows.reshape(*words.shape[:2], LANES, ROW_WORDS)


def prepare_movmatrix(statement: Statement, context: Context) -> Step:
    """`movmatrix` by `tcemu.movmatrix`."""
    bound = bind(statement, context)

    def run(machine: Machine) -> Machine:
        machine = whole_warps(machine, bound)
        return write(machine, bound, "d", _movmatrix(bound.op, registers(machine, bound, "a")))

    return Step(run, together=True)


def _movmatrix(op: Instruction, words: Array) -> Array:
    return movmatrix(op, words)


def _lanes_with_rows(op: Instruction) -> np.ndarray:
    """bool[32]: the lanes whose address is looked at: one for each row of 16 bytes of every matrix."""
    return np.arange(LANES) < op.num * mover_fragment((op.m, op.n), op.num, trans=op.trans).rows


def _lanes(machine: Machine, named: np.ndarray) -> Array:
    """bool[blocks, threads]: the active threads on these lanes of their warps."""
    return machine.threads(machine.warps(machine.active) & named)


def _place(bound: Bound) -> Address:
    place = bound.operands["p"]
    assert isinstance(place, Address)
    return place


def _space(op: Instruction) -> str:
    """The state space of the address, as the machine names it; "" is generic."""
    return (op.space or "").partition("::")[0]


def _load(machine: Machine, bound: Bound, address: Array, lanes: Array, words: int) -> tuple[Array, Machine]:
    """So many words from each lane's address, uint32[blocks, warps, 32, words], and the machine afterwards."""
    active, machine = machine.active, replace(machine, active=lanes)
    values, machine = machine.load(_space(bound.op), address, "b32", words, min(4 * words, ACCESS))
    return jnp.stack([machine.warps(value) for value in values], axis=-1), replace(machine, active=active)


def _store(machine: Machine, bound: Bound, address: Array, lanes: Array, words: Array) -> Machine:
    active, machine = machine.active, replace(machine, active=lanes)
    values = tuple(machine.threads(words[..., at]) for at in range(words.shape[-1]))
    return replace(machine.store(_space(bound.op), address, "b32", values, min(4 * len(values), ACCESS)), active=active)


# ---- wmma.load, wmma.store


def prepare_wmma_memory(bound: Bound) -> Step:
    """`wmma.load` and `wmma.store` by `tcemu.wmma_load` and `tcemu.wmma_store`, on the lines of the matrix without gaps."""
    op, every = bound.op, np.ones(LANES, bool)
    lines = memory_lines(op)
    words = int(lines.count * lines.words(lines.length)) // LANES  # of each lane
    sm = bound.target

    def run(machine: Machine) -> Machine:
        machine = whole_warps(machine, bound)
        address, machine = _line_addresses(machine, bound, lines, words)
        if op.family == "wmma.load":
            parts, machine = _load(machine, bound, address, _lanes(machine, every), words)
            return write(machine, bound, "r", _wmma_load(op, sm, parts))
        return _store(machine, bound, address, _lanes(machine, every), _wmma_store(op, sm, words, registers(machine, bound, "r")))

    return Step(run, together=True)


def _wmma_load(op: Instruction, target: str, parts: Array) -> Array:
    return wmma_load(op, parts.reshape(*parts.shape[:2], -1), target=target)


def _wmma_store(op: Instruction, target: str, words: int, fragment: Array) -> Array:
    memory = jnp.zeros((*fragment.shape[:2], LANES * words), jnp.uint32)
    return wmma_store(op, memory, fragment, target=target).reshape(*fragment.shape[:2], LANES, words)


def _line_addresses(machine: Machine, bound: Bound, lines: Lines, words: int) -> tuple[Array, Machine]:
    """The byte address of each lane's part of the matrix: so many words within a line. And the machine, with a fault for a bad place."""
    op = bound.op
    address = machine.address(_place(bound))
    if "stride" in bound.operands:
        stride = machine.read(bound.operands["stride"], "s32")
    else:
        stride = jnp.full(address.shape, op.default_stride, jnp.uint32)
    step = stride.astype(jnp.int32).astype(jnp.int64) * lines.bits // 8
    if bound.checked:
        machine = _defined_place(machine, bound, lines, address, step)
    of_line = lines.words(lines.length)
    first = np.arange(LANES) * words
    line, within = jnp.asarray(first // of_line), jnp.asarray(first % of_line * 4)
    offset = machine.threads(machine.warps(step) * line + within)
    return address + offset.astype(jnp.uint64), machine


def _defined_place(machine: Machine, bound: Bound, lines: Lines, address: Array, step: Array) -> Machine:
    """Checked mode: what PTX leaves open. step: from line to line, in bytes.

    A place that is not aligned as the manual wants it is among this: GPUs load a lane's part in narrower pieces, and CUDA asks for less.
    """
    op, unit = bound.op, lines.alignment * lines.bits // 8
    misaligned = (address % np.uint64(unit) != 0) | (step % unit != 0)
    aligned = f"the address and the stride must be multiples of {unit} bytes, the size of a lane's fragment. {STORAGE}"
    machine = undefined(machine, machine.active & misaligned, aligned, bound.statement, address)
    unlike = jnp.zeros(address.shape, bool)
    for value in (machine.warps(address), machine.warps(step)):
        unlike |= machine.threads(value != value[..., :1])
    one = f"the address and the stride must be the same in all lanes of the warp. PTX ISA {section(op)}"
    machine = undefined(machine, machine.active & unlike, one, bound.statement, address)
    below = f"the stride is below {op.default_stride} elements, a line's length. {STORAGE}"
    return undefined(machine, machine.active & (step < op.default_stride * lines.bits // 8), below, bound.statement)


PREPARE: dict[str, Prepare] = {"ldmatrix": prepare_ldmatrix, "stmatrix": prepare_stmatrix, "movmatrix": prepare_movmatrix}
