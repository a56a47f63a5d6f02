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

from tcemu.base.checking import forbid, forbid_concrete
from tcemu.engine.backends.dispatch import move_words
from tcemu.engine.backends.product_requests import StatementLaunch
from tcemu.engine.formats.number_formats import U8, Format
from tcemu.engine.instructions.operand_checks import check_registers, resolve_mover
from tcemu.engine.instructions.statement_operands import mover_launch
from tcemu.engine.isa.families import LANES, Instruction, Mover
from tcemu.engine.isa.legality import manual_section
from tcemu.engine.isa.targets import TARGETS
from tcemu.engine.layouts.fragment_layouts import Fragment, mover_fragment
from tcemu.engine.layouts.packing import pack_registers, unpack_registers
from tcemu.engine.layouts.strided_memory import Integers, as_integers, as_memory, read_runs, write_runs

B16 = Format("b16", 16, signed=False)
ROW_BYTES, ROW_WORDS = 16, 4  # size of one matrix row in memory: 9.7.14.5.15
PACKED_BITS = {"b6x16_p32": 6, "b4x16_p64": 4}  # sixteen elements from the low end of a row; the rest is padding: 9.7.14.5.15


def ldmatrix(op: str | Instruction, shared: ArrayLike, address: ArrayLike, *, target: str | None = None, checked: bool = False) -> Array:
    """Load matrices from shared memory into registers for each warp of a batch, as `ldmatrix` does.

    Args:
        op: PTX spelling or `Instruction`. Static under `jit`.
        shared: uint32[..., words], little-endian, from shared address 0. Leading axes are batch axes; they broadcast.
        address: Integers [..., 32], the byte offset of each lane's row of 16 bytes. Lane r + rows * j has row r of matrix j. The addresses
            of lanes beyond the last row are ignored, except on sm_75, where they must be valid too.
        target: GPU or target that must have `op`. None: any target, since all hold the matrices alike.
        checked: Report traced addresses that are misaligned or lead outside `shared`. Without it they load zeros.

    Returns:
        uint32[..., 32, n], lane, then register. Elements of six and four bits come as bytes, in the low bits, with zeros above.

    Raises:
        Unsupported: `op` is no ldmatrix, or `target` does not have it.
        TypeError: An operand has another dtype.
        ValueError: An operand has another shape.
        UndefinedBehaviour: A known address is no multiple of 16 or leads outside `shared`; with `checked`, a traced one too.

    Source: PTX ISA 9.7.14.5.15. Zeros above narrow elements: digests of an RTX PRO 6000, which pantheongpu/pantheonsim published
    (tests/golden/pantheonsim.json); what padding does: `tcemu.engine.architectures.container_rows`.
    """
    op, target = resolve_mover(op, target, "ldmatrix", Mover, "ldmatrix")
    operands = bind_mover(op, shared, address, every_lane=target in TARGETS and TARGETS[target].loads_all_rows, checked=checked)
    return move_words(op, lambda: mover_launch(op, operands), lambda: _load(op, operands.shared, operands.rows))


def stmatrix(
    op: str | Instruction, shared: ArrayLike, address: ArrayLike, registers: ArrayLike, *, target: str | None = None, checked: bool = False
) -> Array:
    """Store matrices from registers into shared memory for each warp of a batch, as `stmatrix` does, and return the new memory.

    If two lanes have one address, PTX leaves open which row stays; here the row of the higher lane stays.

    Args:
        op: PTX spelling or `Instruction`. Static under `jit`.
        shared: As in `ldmatrix`.
        address: As in `ldmatrix`.
        registers: uint32[..., 32, n].
        target: As in `ldmatrix`.
        checked: Report traced addresses that are not valid, and lanes with one address. Without it, invalid traced addresses store nothing.

    Returns:
        uint32[..., words]. Memory outside the addressed rows keeps its bits.

    Raises:
        As `ldmatrix`.

    Source: PTX ISA 9.7.14.5.16.
    """
    op, _ = resolve_mover(op, target, "stmatrix", Mover, "stmatrix")
    operands = bind_mover(op, shared, address, registers, checked=checked)
    return move_words(op, lambda: mover_launch(op, operands), lambda: _store(op, operands.shared, operands.rows, operands.registers))


def movmatrix(op: str | Instruction, registers: ArrayLike, *, target: str | None = None) -> Array:
    """Transpose the 8 x 8 matrix in the registers of each warp of a batch, as `movmatrix` does.

    Args:
        op: PTX spelling or `Instruction`. Static under `jit`.
        registers: uint32[..., 32, 1], with any leading axes.
        target: GPU or target that must have `op`; the result is the same everywhere.

    Returns:
        uint32[..., 32, 1].

    Raises:
        Unsupported: `op` is no movmatrix, or `target` does not have it.
        TypeError: `registers` has another dtype.
        ValueError: `registers` has another shape.

    Source: PTX ISA 9.7.14.5.17.
    """
    op, _ = resolve_mover(op, target, "movmatrix", Mover, "movmatrix")
    words = check_registers(op, "a", registers, "registers")
    return move_words(op, lambda: StatementLaunch(0, {}, {"a": words}), lambda: _transpose(words))


class Rows(NamedTuple):
    """The places of the matrices' rows in shared memory."""

    starts: Array | np.ndarray  # int32[..., num * rows]: the word at which each begins
    good: Array | None  # bool: where that is legal; None: everywhere


class MoverOperands(NamedTuple):
    shared: Array  # uint32[..., words]
    address: Integers  # [..., 32], in bytes
    rows: Rows
    registers: Array | None  # of an stmatrix, uint32[..., 32, n]


def bind_mover(
    op: Mover, shared: ArrayLike, address: ArrayLike, registers: ArrayLike | None = None, *, every_lane: bool = False, checked: bool = False
) -> MoverOperands:
    """The operands of an ldmatrix or stmatrix, checked. The other arguments and the errors are those of `ldmatrix` and `stmatrix`.

    Args:
        op: The instruction.
        shared: As in `ldmatrix`.
        address: As in `ldmatrix`.
        registers: Registers of an stmatrix; None for an ldmatrix.
        every_lane: The address of every lane must be legal, not only those of the lanes that name a row.
        checked: As in `ldmatrix`.
    """
    memory = as_memory("shared", shared)
    words = None if registers is None else check_registers(op, "r", registers, "registers")
    at = _bind_address(op, address)
    rows = _bind_rows(op, memory.shape[-1], at, checked, every_lane)
    if checked and words is not None:
        lanes = np.arange(rows.starts.shape[-1])
        again = ((rows.starts[..., :, None] == rows.starts[..., None, :]) & (lanes[:, None] > lanes)).any(-1)
        forbid(
            again, f"{op}: lane {{lane}} stores where a lower lane does, which PTX leaves open. PTX ISA {manual_section(op)}", lane=lanes
        )
    return MoverOperands(memory, at, rows, words)


def _fragment(op: Mover) -> Fragment:
    """Registers against memory: [matrix, row of 16 bytes in memory, place in that row]."""
    return mover_fragment((op.m, op.n), op.num, trans=op.trans)


def _bind_address(op: Mover, address: ArrayLike) -> Integers:
    at = as_integers("address", address)
    if at.ndim < 1 or at.shape[-1] != LANES:
        raise ValueError(
            f"address: got shape {list(at.shape)}; expected byte offsets [..., 32], one a lane, for {op}. PTX ISA {manual_section(op)}"
        )
    return at


def _bind_rows(op: Mover, words: int, address: Integers, checked: bool, every_lane: bool) -> Rows:
    """Return the rows that the addresses name in a memory of `words` words, or raise."""
    used = address[..., : op.num * _fragment(op).rows]
    checked_addresses = address if every_lane else used
    lanes = np.arange(checked_addresses.shape[-1])
    misaligned, outside = _bad(checked_addresses, words)
    where = f"{op}: lane {{lane}} has address {{address}}"
    forbid_concrete(
        misaligned,
        f"{where}, which is no multiple of {ROW_BYTES}. PTX ISA {manual_section(op)}",
        checked,
        lane=lanes,
        address=checked_addresses,
    )
    last = f"the last row that fits {words} words begins at {_last(words)}"
    forbid_concrete(outside, f"{where}; {last}. PTX ISA {manual_section(op)}", checked, lane=lanes, address=checked_addresses)
    if not isinstance(used, Tracer):
        return Rows(starts=(used // 4).astype(np.int32), good=None)
    misaligned, outside = _bad(used, words)
    good = jnp.logical_not(misaligned | outside)
    return Rows(starts=jnp.where(good, used // 4, 0).astype(jnp.int32), good=good)


def _bad(address: Integers, words: int) -> tuple[Array | np.ndarray, Array | np.ndarray]:
    """Return which addresses are misaligned, and which lead outside a memory of `words` words."""
    return address % ROW_BYTES != 0, (address < 0) | (address > _last(words))


def _last(words: int) -> int:
    return 4 * (words - ROW_WORDS) // ROW_BYTES * ROW_BYTES


@partial(jax.jit, static_argnames="op")
def _load(op: Mover, shared: Array, rows: Rows) -> Array:
    fragment = _fragment(op)
    words = read_runs(shared, jnp.asarray(rows.starts), rows.good, length=ROW_WORDS)
    codes = _unpacked(words, PACKED_BITS[op.src_fmt]) if op.src_fmt else unpack_registers(words, _element(op))
    matrices = codes.reshape(*codes.shape[:-2], *fragment.shape)
    return pack_registers(fragment.encode(matrices), _element(op))


@partial(jax.jit, static_argnames="op")
def _store(op: Mover, shared: Array, rows: Rows, registers: Array) -> Array:
    fragment = _fragment(op)
    words = pack_registers(fragment.decode(unpack_registers(registers, _element(op))), _element(op))
    words = words.reshape(*words.shape[:-3], op.num * fragment.rows, ROW_WORDS)
    return write_runs(shared, jnp.asarray(rows.starts), words, rows.good)


@jax.jit
def _transpose(registers: Array) -> Array:
    matrix = mover_fragment((8, 8), 1).decode(unpack_registers(registers, B16))
    return pack_registers(mover_fragment((8, 8), 1, trans=True).encode(matrix), B16)


def _element(op: Mover) -> Format:
    return B16 if op.element == "b16" else U8


def _unpacked(rows: Array, bits: int) -> Array:
    """Sixteen elements of `bits` bits from the low end of each row, as bytes: uint32[..., 4] -> uint32[..., 16]."""
    single = (rows[..., None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)  # bits
    single = single.reshape(*rows.shape[:-1], 32 * ROW_WORDS)[..., : 16 * bits].reshape(*rows.shape[:-1], 16, bits)
    return lax.reduce_or(single << np.arange(bits, dtype=np.uint32), axes=(single.ndim - 1,))
