"""`ldmatrix`, `stmatrix`, `movmatrix`: 8 x 8, 8 x 16, 16 x 8 and 16 x 16 matrices between shared memory and registers."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.checking import forbid, refuse
from tcemu.formats import U8, Format
from tcemu.isa.catalog import section
from tcemu.isa.instructions import LANES, Instruction
from tcemu.layouts import Fragment, mover_fragment
from tcemu.memory import Integers, as_integers, as_memory, read_at, write_at
from tcemu.operations.launches import moved, of_mover, of_movmatrix
from tcemu.operations.operands import moving, register_words
from tcemu.packing import pack_registers, unpack_registers

B16 = Format("b16", 16, signed=False)
ROW_BYTES, ROW_WORDS = 16, 4  # of one matrix row in memory: 9.7.14.5.15
PACKED_BITS = {"b6x16_p32": 6, "b4x16_p64": 4}  # sixteen elements from the low end of a row; the rest is padding: 9.7.14.5.15


def ldmatrix(op: str | Instruction, shared: ArrayLike, address: ArrayLike, *, target: str | None = None, checked: bool = False) -> Array:
    """One `ldmatrix` for each batch element: rows of shared memory -> registers.

    op: a PTX spelling or an Instruction, static under `jit`. shared: uint32[..., words], little-endian, from shared address 0.
    address: integers [..., 32], for each lane the byte offset of its row of 16 bytes; lane r + rows * j has row r of matrix j, and lanes
    beyond the last row are not looked at (on sm_75 theirs must be good too). Leading axes are batch axes and broadcast.
    target: if given, `op` must be legal there; None: any target, since all hold the matrices alike.
    Returns uint32[..., 32, n], lane, then register. Elements of six and four bits come as bytes, in the low bits, with zeros above.
    Raises Unsupported if `op` is no ldmatrix, or none of `target`, TypeError or ValueError for another dtype or shape, and
    UndefinedBehaviour for an address that is no multiple of 16 or leads outside `shared`. Traced ones are reported if `checked`; without
    it they load zeros.
    Source: PTX ISA 9.7.14.5.15; zeros above narrow elements are assumed from CUTLASS, no hardware seen.
    """
    op, target = moving(op, target, "ldmatrix", "ldmatrix")
    operands = bind_ldmatrix(op, shared, address, every_lane=target == "sm_75", checked=checked)
    return moved(op, lambda: of_mover(op, operands), lambda: _load(op, operands.shared, operands.rows))


def stmatrix(
    op: str | Instruction,
    shared: ArrayLike,
    address: ArrayLike,
    registers: ArrayLike,
    *,
    target: str | None = None,
    checked: bool = False,
) -> Array:
    """One `stmatrix` for each batch element: the new shared memory, in which the matrices in `registers` stand.

    registers: uint32[..., 32, n]. The rest is as in `ldmatrix`. Returns uint32[..., words]; what is in no addressed row keeps its bits.
    Raises as `ldmatrix`. Traced addresses that are not good store nothing. If two lanes have one address, which row stays is open in PTX
    (reported if `checked`); here that of the higher lane stays.
    Source: PTX ISA 9.7.14.5.16.
    """
    op, _ = moving(op, target, "stmatrix", "stmatrix")
    operands = bind_stmatrix(op, shared, address, registers, checked=checked)
    return moved(op, lambda: of_mover(op, operands), lambda: _store(op, operands.shared, operands.rows, operands.registers))


def movmatrix(op: str | Instruction, registers: ArrayLike, *, target: str | None = None) -> Array:
    """One `movmatrix` for each batch element: the 8 x 8 matrix in the registers of a warp, transposed.

    op: a PTX spelling or an Instruction, static under `jit`. registers: uint32[..., 32, 1], any leading axes. target: if given, `op` must
    be legal there; the result is the same everywhere. Returns the same shape.
    Raises Unsupported if `op` is no movmatrix, or none of `target`, TypeError or ValueError for another dtype or shape.
    Source: PTX ISA 9.7.14.5.17.
    """
    op, _ = moving(op, target, "movmatrix", "movmatrix")
    operands = bind_movmatrix(op, registers)
    return moved(op, lambda: of_movmatrix(op, operands), lambda: _transpose(operands.registers))


class Rows(NamedTuple):
    """Where the matrices' rows lie in shared memory."""

    starts: Array | np.ndarray  # int32[..., num * rows]: the word at which each begins
    good: Array | None  # bool: where that is legal; None: everywhere


class LdmatrixOperands(NamedTuple):
    """The operands of an ldmatrix. shared: uint32[..., words]; address: integers [..., 32], in bytes."""

    shared: Array
    address: Integers
    rows: Rows


class StmatrixOperands(NamedTuple):
    """The operands of an stmatrix: those of an ldmatrix, and registers, uint32[..., 32, n]."""

    shared: Array
    address: Integers
    rows: Rows
    registers: Array


class MovmatrixOperands(NamedTuple):
    """The operand of a movmatrix, uint32[..., 32, 1]."""

    registers: Array


def bind_ldmatrix(
    op: Instruction, shared: ArrayLike, address: ArrayLike, *, every_lane: bool = False, checked: bool = False
) -> LdmatrixOperands:
    """The operands of an ldmatrix, checked. Arguments and errors are those of `ldmatrix`.

    every_lane: the address of every lane must be legal, not only those of the lanes that name a row.
    """
    memory, at = as_memory("shared", shared), _bind_address(op, address)
    return LdmatrixOperands(shared=memory, address=at, rows=_bind_rows(op, memory.shape[-1], at, checked, every_lane))


def bind_stmatrix(
    op: Instruction,
    shared: ArrayLike,
    address: ArrayLike,
    registers: ArrayLike,
    *,
    every_lane: bool = False,
    checked: bool = False,
) -> StmatrixOperands:
    """The operands of an stmatrix, checked. Arguments and errors are those of `stmatrix`; every_lane: as in `bind_ldmatrix`."""
    memory = as_memory("shared", shared)
    words = register_words(op, "r", registers, "registers")
    at = _bind_address(op, address)
    rows = _bind_rows(op, memory.shape[-1], at, checked, every_lane)
    if checked:
        lanes = np.arange(rows.starts.shape[-1])
        again = ((rows.starts[..., :, None] == rows.starts[..., None, :]) & (lanes[:, None] > lanes)).any(-1)
        forbid(again, f"{op}: lane {{lane}} stores where a lower lane does, which PTX leaves open. PTX ISA {section(op)}", lane=lanes)
    return StmatrixOperands(shared=memory, address=at, rows=rows, registers=words)


def bind_movmatrix(op: Instruction, registers: ArrayLike) -> MovmatrixOperands:
    """The operand of a movmatrix, checked. Arguments and errors are those of `movmatrix`."""
    return MovmatrixOperands(registers=register_words(op, "a", registers, "registers"))


def _fragment(op: Instruction) -> Fragment:
    """Registers against memory: [matrix, row of 16 bytes in memory, place in that row]."""
    return mover_fragment((op.m, op.n), op.num, trans=op.trans)


def _bind_address(op: Instruction, address: ArrayLike) -> Integers:
    at = as_integers("address", address)
    if at.ndim < 1 or at.shape[-1] != LANES:
        raise ValueError(f"address: got shape {list(at.shape)}; wanted byte offsets [..., 32], one a lane, for {op}. PTX ISA {section(op)}")
    return at


def _bind_rows(op: Instruction, words: int, address: Integers, checked: bool, every_lane: bool) -> Rows:
    """The rows that the addresses name in a memory of so many words, or an error."""
    used = address[..., : op.num * _fragment(op).rows]
    looked_at = address if every_lane else used
    lanes = np.arange(looked_at.shape[-1])
    misaligned, outside = _bad(looked_at, words)
    where = f"{op}: lane {{lane}} has address {{address}}"
    refuse(misaligned, f"{where}, which is no multiple of {ROW_BYTES}. PTX ISA {section(op)}", checked, lane=lanes, address=looked_at)
    last = f"the last row that fits {words} words begins at {_last(words)}"
    refuse(outside, f"{where}; {last}. PTX ISA {section(op)}", checked, lane=lanes, address=looked_at)
    if not isinstance(used, Tracer):
        return Rows(starts=(used // 4).astype(np.int32), good=None)
    misaligned, outside = _bad(used, words)
    good = jnp.logical_not(misaligned | outside)
    return Rows(starts=jnp.where(good, used // 4, 0).astype(jnp.int32), good=good)


def _bad(address: Integers, words: int) -> tuple[Array | np.ndarray, Array | np.ndarray]:
    """Which addresses are misaligned, and which lead outside a memory of so many words."""
    return address % ROW_BYTES != 0, (address < 0) | (address > _last(words))


def _last(words: int) -> int:
    """The highest address of a row."""
    return 4 * (words - ROW_WORDS) // ROW_BYTES * ROW_BYTES


@partial(jax.jit, static_argnames="op")
def _load(op: Instruction, shared: Array, rows: Rows) -> Array:
    fragment = _fragment(op)
    words = read_at(shared, jnp.asarray(rows.starts), rows.good, length=ROW_WORDS)
    codes = _unpacked(words, PACKED_BITS[op.src_fmt]) if op.src_fmt else unpack_registers(words, _element(op))
    matrices = codes.reshape(*codes.shape[:-2], *fragment.shape)
    return pack_registers(fragment.encode(matrices), _element(op))


@partial(jax.jit, static_argnames="op")
def _store(op: Instruction, shared: Array, rows: Rows, registers: Array) -> Array:
    fragment = _fragment(op)
    words = pack_registers(fragment.decode(unpack_registers(registers, _element(op))), _element(op))
    words = words.reshape(*words.shape[:-3], op.num * fragment.rows, ROW_WORDS)
    return write_at(shared, jnp.asarray(rows.starts), words, rows.good)


@jax.jit
def _transpose(registers: Array) -> Array:
    matrix = mover_fragment((8, 8), 1).decode(unpack_registers(registers, B16))
    return pack_registers(mover_fragment((8, 8), 1, trans=True).encode(matrix), B16)


def _element(op: Instruction) -> Format:
    return B16 if op.element == "b16" else U8


def _unpacked(rows: Array, bits: int) -> Array:
    """Sixteen elements of `bits` bits from the low end of each row, as bytes: uint32[..., 4] -> uint32[..., 16]."""
    single = (rows[..., None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)  # bits
    single = single.reshape(*rows.shape[:-1], 32 * ROW_WORDS)[..., : 16 * bits].reshape(*rows.shape[:-1], 16, bits)
    return lax.reduce_or(single << np.arange(bits, dtype=np.uint32), axes=(single.ndim - 1,))
