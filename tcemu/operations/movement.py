"""`ldmatrix`, `stmatrix`, `movmatrix`: 8 x 8, 8 x 16, 16 x 8 and 16 x 16 matrices between shared memory and registers."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.checking import forbid, refuse
from tcemu.formats import U8, Format
from tcemu.isa.catalog import check, section
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import LANES, Instruction
from tcemu.layouts import Fragment, mover_fragment
from tcemu.memory import Integers, as_integers, as_memory, read_at, write_at
from tcemu.operations.operands import of_family, register_words
from tcemu.packing import pack_registers, unpack_registers

B16 = Format("b16", 16, signed=False)
ROW_BYTES, ROW_WORDS = 16, 4  # of one matrix row in memory: 9.7.14.5.15
PACKED_BITS = {"b6x16_p32": 6, "b4x16_p64": 4}  # sixteen elements from the low end of a row; the rest is padding: 9.7.14.5.15


def ldmatrix(op: str | Instruction, shared: ArrayLike, address: ArrayLike, *, target: str | None = None, checked: bool = False) -> Array:
    """One `ldmatrix` for each batch element: rows of shared memory -> registers.

    op: a PTX spelling or an Instruction, static under `jit`. shared: uint32[..., words], little-endian, from shared address 0.
    address: integers [..., 32], for each lane the byte offset of its row of 16 bytes; lane r + rows * j has row r of matrix j, and lanes
    beyond the last row are not looked at (on sm_75 theirs must be good too). Leading axes are batch axes and broadcast.
    target: if given, `op` must be legal there. Returns uint32[..., 32, n], lane, then register. Elements of six and four bits come as
    bytes, in the low bits, with zeros above.
    Raises Unsupported if `op` is no ldmatrix, or none of `target`, TypeError or ValueError for another dtype or shape, and
    UndefinedBehaviour for an address that is no multiple of 16 or leads outside `shared`. Traced ones are reported if `checked`; without
    it they load zeros.
    Source: PTX ISA 9.7.14.5.15; zeros above narrow elements are assumed from CUTLASS, no hardware seen.
    """
    op = _mover(op, target, "ldmatrix")
    memory = as_memory("shared", shared)
    starts, good = _rows(op, memory.shape[-1], address, checked, every_lane=target == "sm_75")
    return _load(op, memory, starts, good)


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
    op = _mover(op, target, "stmatrix")
    memory = as_memory("shared", shared)
    held = register_words(op, "r", registers, "registers")
    starts, good = _rows(op, memory.shape[-1], address, checked)
    if checked:
        lanes = np.arange(starts.shape[-1])
        again = ((starts[..., :, None] == starts[..., None, :]) & (lanes[:, None] > lanes)).any(-1)
        forbid(again, f"{op}: lane {{lane}} stores where a lower lane does, which PTX leaves open. PTX ISA {section(op)}", lane=lanes)
    return _store(op, memory, starts, good, held)


def movmatrix(op: str | Instruction, registers: ArrayLike) -> Array:
    """One `movmatrix` for each batch element: the 8 x 8 matrix in the registers of a warp, transposed.

    op: a PTX spelling or an Instruction, static under `jit`. registers: uint32[..., 32, 1], any leading axes. Returns the same shape.
    Raises Unsupported if `op` is no movmatrix, TypeError or ValueError for another dtype or shape. Source: PTX ISA 9.7.14.5.17.
    """
    op = _mover(op, None, "movmatrix")
    return _transpose(register_words(op, "a", registers, "registers"))


def _mover(op: str | Instruction, target: str | None, family: str) -> Instruction:
    op = parse(op) if target is None else check(op, target)
    of_family(op, family, family)
    return op


def _fragment(op: Instruction) -> Fragment:
    """Registers against memory: [matrix, row of 16 bytes in memory, place in that row]."""
    return mover_fragment((op.m, op.n), op.num, trans=op.trans)


def _rows(op: Instruction, words: int, address: ArrayLike, checked: bool, every_lane: bool = False) -> tuple[Integers, Array | None]:
    """The word at which each row starts, [..., num * rows], and where that is good (None: always)."""
    at = as_integers("address", address)
    if at.ndim < 1 or at.shape[-1] != LANES:
        raise ValueError(f"address: got shape {list(at.shape)}; wanted byte offsets [..., 32], one a lane, for {op}. PTX ISA {section(op)}")
    used = op.num * _fragment(op).rows
    seen = at if every_lane else at[..., :used]
    lanes = np.arange(seen.shape[-1])
    misaligned, outside = _bad(seen, words)
    where = f"{op}: lane {{lane}} has address {{address}}"
    refuse(misaligned, f"{where}, which is no multiple of {ROW_BYTES}. PTX ISA {section(op)}", checked, lane=lanes, address=seen)
    last = f"the last row that fits {words} words begins at {_last(words)}"
    refuse(outside, f"{where}; {last}. PTX ISA {section(op)}", checked, lane=lanes, address=seen)
    at = at[..., :used]
    if not isinstance(at, Tracer):
        return (at // 4).astype(np.int32), None
    misaligned, outside = _bad(at, words)
    good = jnp.logical_not(misaligned | outside)
    return jnp.where(good, at // 4, 0).astype(jnp.int32), good


def _bad(address: Integers, words: int) -> tuple[Array | np.ndarray, Array | np.ndarray]:
    return address % ROW_BYTES != 0, (address < 0) | (address > _last(words))


def _last(words: int) -> int:
    return 4 * (words - ROW_WORDS) // ROW_BYTES * ROW_BYTES


@partial(jax.jit, static_argnames="op")
def _load(op: Instruction, shared: Array, starts: Array, good: Array | None) -> Array:
    fragment = _fragment(op)
    rows = read_at(shared, starts, good, length=ROW_WORDS)
    codes = _unpacked(rows, PACKED_BITS[op.src_fmt]) if op.src_fmt else unpack_registers(rows, _element(op))
    matrices = codes.reshape(*codes.shape[:-2], *fragment.shape)
    return pack_registers(fragment.encode(matrices), _element(op))


@partial(jax.jit, static_argnames="op")
def _store(op: Instruction, shared: Array, starts: Array, good: Array | None, registers: Array) -> Array:
    fragment = _fragment(op)
    rows = pack_registers(fragment.decode(unpack_registers(registers, _element(op))), _element(op))
    return write_at(shared, starts, rows.reshape(*rows.shape[:-3], op.num * fragment.rows, ROW_WORDS), good)


@jax.jit
def _transpose(registers: Array) -> Array:
    matrix = mover_fragment((8, 8), 1).decode(unpack_registers(registers, B16))
    return pack_registers(mover_fragment((8, 8), 1, trans=True).encode(matrix), B16)


def _element(op: Instruction) -> Format:
    return B16 if op.element == "b16" else U8


def _unpacked(rows: Array, bits: int) -> Array:
    """Sixteen elements of `bits` bits from the low end of each row, as bytes: uint32[..., 4] -> uint32[..., 16]."""
    each = (rows[..., None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    each = each.reshape(*rows.shape[:-1], 32 * ROW_WORDS)[..., : 16 * bits].reshape(*rows.shape[:-1], 16, bits)
    return lax.reduce_or(each << np.arange(bits, dtype=np.uint32), axes=(each.ndim - 1,))
