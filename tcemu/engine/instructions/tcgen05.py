"""`tcgen05` on arrays: mma, ld, st, cp and shift on tensor memory and shared memory, each complete when it returns.

Tensor memory is uint32[..., 128, columns], lane and column; a B200 has 512 columns. Shared memory is uint32[..., words] from shared
address 0. With cta_group::2 both have an axis for the two CTAs of the pair before these axes, the even CTA first. Leading axes are batch
axes and broadcast. The functions are pure: they return tensor memory as it is afterwards. Addresses and matrix descriptors are single
values, which may be traced: `jax.vmap` gives each batch index its own. Instruction descriptors are static.

Where nobody has published what the hardware does, the functions raise NotModelled or take the default that their docstrings state.

Source: PTX ISA 9.7.16.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.base.checking import forbid
from tcemu.base.errors import NotModelled, Unsupported
from tcemu.engine.architectures.lookup import Arithmetic, resolve_arithmetic
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.instructions.operand_checks import instruction_product
from tcemu.engine.instructions.tcgen05_memories import (
    TensorMemory,
    check_descriptor,
    check_shared_memory,
    check_tensor_memory,
    move_places,
    move_rows_down,
    pack_cells,
    read_units,
    reduce_registers,
    split_address,
    unpack_cells,
)
from tcemu.engine.instructions.tcgen05_operands import ProductOperands, ReadProduct, loses_bits, read_product, scale_accumulator
from tcemu.engine.instructions.tcgen05_operands import zero_columns as zero_columns
from tcemu.engine.isa.families import Instruction
from tcemu.engine.isa.legality import check, manual_section
from tcemu.engine.isa.tcgen05 import Tcgen05, Tcgen05Copy, Tcgen05Mma, Tcgen05Move, Tcgen05Product, Tcgen05Shift
from tcemu.engine.isa.tcgen05_descriptors import InstructionDescriptor, decode_instruction_descriptor
from tcemu.engine.layouts.shared_memory import UNIT_WORDS
from tcemu.engine.layouts.strided_memory import as_memory
from tcemu.engine.layouts.tensor_memory import LANES, QUARTER, copy_lanes

MAX_SCALE_INPUT_D = 15


def mma(
    op: str | Instruction,
    d: int | ArrayLike,
    b_desc: int | ArrayLike,
    idesc: int | None,
    shared: ArrayLike,
    tmem: ArrayLike,
    *,
    a_desc: int | ArrayLike | None = None,
    a_tmem: int | ArrayLike | None = None,
    sp_meta: int | ArrayLike | None = None,
    scale_a: int | ArrayLike | None = None,
    scale_b: int | ArrayLike | None = None,
    enable_input_d: bool | ArrayLike = True,
    scale_input_d: int = 0,
    disable_output_lane: ArrayLike | None = None,
    zero_column_mask: int | None = None,
    target: str,
    model: Model | None = None,
    checked: bool = False,
) -> Array:
    """Compute one `tcgen05.mma`, dense or sparse, with or without block scales and .ws, and wait for it: D = A·B + D, bit for bit.

    Defaults where nobody has published what the hardware does: an f16 D leaves zeros in bits 31 to 16 of its cells; the columns that a
    zero-column mask names are zeros before they are multiplied; of a mask of eight words the even CTA has the first four; a D that
    `scale_input_d` makes subnormal is rounded toward zero before it is added; .ashift moves A after the product has read it, as the
    docstrings of NVIDIA's CuTe DSL say.

    Args:
        op: PTX spelling, or a `Tcgen05Product` such as "f16 tcgen05", whose descriptor need not be given. Static under `jit`.
        d: Address of D in tensor memory.
        b_desc: Descriptor of B: an int, or uint32[2], low word first.
        idesc: Instruction descriptor, an int that is known before tracing; None for a product.
        shared: uint32[..., words]; with cta_group::2 uint32[..., 2, words].
        tmem: uint32[..., 128, columns]; with cta_group::2 uint32[..., 2, 128, columns].
        a_desc: Descriptor of A in shared memory; give either this or `a_tmem`.
        a_tmem: Address of A in tensor memory.
        sp_meta: Address of the metadata of a sparse A.
        scale_a: Address of A's block scales.
        scale_b: Address of B's block scales.
        enable_input_d: bool[...]; False leaves D out of the sum.
        scale_input_d: D is multiplied by 2^-scale_input_d.
        disable_output_lane: uint32[..., 4 or 8]: a bit for each lane of D that is not written.
        zero_column_mask: Zero-column mask descriptor of .ws, 64 bits.
        target: GPU or target to emulate, as "B200" or "sm_100a". Static under `jit`.
        model: Another arithmetic in place of the target's own.
        checked: Report undefined metadata, copies of scales that differ, and a scaled D whose rounding nobody has published.

    Returns:
        Tensor memory with D, of the shape of `tmem` and all batch axes.

    Raises:
        Unsupported: PTX does not give `op` to `target`, or the instruction descriptor is invalid for it.
        NotModelled: There is no evidence of this arithmetic.
        UndefinedBehaviour: An operand lies outside the memory, or `checked` finds what it reports.
        TypeError, ValueError: An operand has another dtype or shape.

    Source: PTX ISA 9.7.16.10; the arithmetic is `tcemu.evidence(product, target)`.
    """
    op = check(op, target)
    described = _describe(op, idesc, target)
    product, shifts_a = described.product, isinstance(op, Tcgen05Mma) and op.ashift
    applied = resolve_arithmetic(product, target, model)
    operands = ProductOperands(d, b_desc, a_desc, a_tmem, sp_meta, scale_a, scale_b, enable_input_d, zero_column_mask)
    _check_operands(product, operands, disable_output_lane, scale_input_d, target)
    if shifts_a and a_tmem is None:
        raise Unsupported(f"{op}: .ashift takes A from tensor memory, a_tmem=. PTX ISA {manual_section(product)}")
    read = read_product(described, operands, shared, check_tensor_memory(tmem, product.cta_group, target), checked)
    start = read.start
    if scale_input_d:
        if checked:
            message = f"scale_input_d={scale_input_d}: D is {{code}}; nobody has published how {product} rounds a subnormal scaled D"
            forbid(loses_bits(product.d, start, scale_input_d), message, code=start)
        start = scale_accumulator(product.d, start, scale_input_d)
    sums = _multiply(applied, read.a_parts, read.b, start, read.metadata, read.scales)
    written = sums.astype(jnp.uint32)
    if disable_output_lane is not None:
        written = _keep_masked(product, read, disable_output_lane, written)
    after = read.memory.store(read.indices, written)
    return move_rows_down(product.cta_group, split_address(a_tmem, read.memory.columns)[1], after) if shifts_a else after


def ld(
    op: str | Instruction, address: int | ArrayLike, tmem: ArrayLike, *, warp: int = 0, half_split_offset: int = 0, target: str
) -> Array | tuple[Array, Array]:
    """Load registers of a warp from tensor memory, and with .red also their minimum or maximum.

    Args:
        op: `tcgen05.ld` or `tcgen05.ld.red` as PTX spells it.
        address: Address in tensor memory; of its lane the bits within a quarter count.
        tmem: uint32[..., 128, columns].
        warp: Warp of the CTA; it reaches the quarter `warp % 4` of the lanes.
        half_split_offset: Columns by which threads 16 to 31 lie behind the others, for 16x32bx2.
        target: GPU or target.

    Returns:
        uint32[..., 32, n], thread and register. With .red a pair: these, and uint32[..., 32], the reduction of each thread's registers.

    Raises:
        Unsupported: PTX does not give `op` to `target`, or it is another instruction.
        UndefinedBehaviour: A cell lies outside tensor memory.

    Source: PTX ISA 9.7.16.8.3, tables 49 and 50.
    """
    move = _require(op, target, Tcgen05Move, "ld")
    memory = TensorMemory.from_array(check_tensor_memory(tmem, 1, target), 1)
    values = pack_cells(move, memory.load(move_places(move, address, memory.columns, warp, half_split_offset)))
    return values if move.reduction is None else (values, reduce_registers(move, values))


def st(
    op: str | Instruction, address: int | ArrayLike, registers: ArrayLike, tmem: ArrayLike, *, warp: int = 0, half_split_offset: int = 0,
    target: str,
) -> Array:  # fmt: skip
    """Store registers of a warp to tensor memory. With .unpack::16b the upper halves of the cells become zeros, a default.

    Args:
        op: `tcgen05.st` as PTX spells it.
        address: Address in tensor memory, as in `ld`.
        registers: uint32[..., 32, n], thread and register.
        tmem: uint32[..., 128, columns].
        warp: Warp of the CTA.
        half_split_offset: As in `ld`.
        target: GPU or target.

    Returns:
        Tensor memory as it is afterwards.

    Raises:
        Unsupported: PTX does not give `op` to `target`, or it is another instruction.
        UndefinedBehaviour: A cell lies outside tensor memory.
        TypeError, ValueError: The registers have another dtype or shape.

    Source: PTX ISA 9.7.16.8.4.
    """
    move = _require(op, target, Tcgen05Move, "st")
    registers = registers if isinstance(registers, jax.Array) else np.asarray(registers)
    count = move.register_count("r")
    if registers.dtype != jnp.uint32:
        raise TypeError(f"registers: got {registers.dtype}; expected uint32[..., 32, {count}] for {move}")
    if registers.shape[-2:] != (QUARTER, count):
        raise ValueError(f"registers: got uint32{list(registers.shape)}; expected uint32[..., 32, {count}] for {move}")
    values = unpack_cells(move, jnp.asarray(registers))
    memory = TensorMemory.from_array(check_tensor_memory(tmem, 1, target), 1)
    return memory.store(move_places(move, address, memory.columns, warp, half_split_offset), values)


def cp(
    op: str | Instruction, address: int | ArrayLike, s_desc: int | ArrayLike, shared: ArrayLike, tmem: ArrayLike, *, target: str
) -> Array:
    """Copy rows from shared memory to tensor memory, decompressed where `op` has .b8x16.

    Args:
        op: `tcgen05.cp` as PTX spells it.
        address: Address in tensor memory.
        s_desc: Descriptor of the rows: an int, or uint32[2].
        shared: uint32[..., words]; with cta_group::2 uint32[..., 2, words].
        tmem: uint32[..., 128, columns]; with cta_group::2 uint32[..., 2, 128, columns].
        target: GPU or target.

    Returns:
        Tensor memory as it is afterwards.

    Raises:
        Unsupported: PTX does not give `op` to `target`, or it is another instruction.
        NotModelled: `op` has .b6x16_p32: nobody has published where the six bits stand in their byte.
        UndefinedBehaviour: An operand lies outside its memory.

    Source: PTX ISA 9.7.16.9.2.
    """
    copy = _require(op, target, Tcgen05Copy, "cp")
    if copy.source == "b6x16_p32":
        raise NotModelled(
            f"{copy}: nobody has published where the copy puts six bits in a byte; b4x16_p64 is modelled. PTX ISA {manual_section(copy)}"
        )
    memory = TensorMemory.from_array(check_tensor_memory(tmem, copy.cta_group, target), copy.cta_group)
    shared = check_shared_memory(shared, copy.cta_group)
    lanes = copy_lanes(copy.tile, copy.multicast)
    units = 2 if copy.tile.endswith("256b") else 1
    words = read_units(shared, check_descriptor("s_desc", s_desc), "k", len(lanes), units)
    if copy.source is not None:
        nibbles = words[..., :2, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 0xF
        nibbles = nibbles.reshape(*words.shape[:-1], 4, 4) << 2 << np.arange(0, 32, 8, dtype=np.uint32)
        words = jax.lax.reduce_or(nibbles, axes=(nibbles.ndim - 1,))
    values = words.reshape(*words.shape[:-2], 1, units * UNIT_WORDS)  # [..., cta, row, copy, column]
    values = jnp.broadcast_to(values, (*values.shape[:-2], lanes.shape[1], values.shape[-1]))
    cta = np.arange(copy.cta_group).reshape(-1, 1, 1, 1)
    return memory.store(memory.indices(address, lanes[:, :, None], np.arange(units * UNIT_WORDS), cta), values)


def shift(op: str | Instruction, address: int | ArrayLike, tmem: ArrayLike, *, target: str) -> Array:
    """Move 31 rows of 8 columns down by one lane, in each quarter of the lanes; the last lane of a quarter stays.

    That one instruction moves all four quarters is a default: nobody has published it.

    Args:
        op: `tcgen05.shift` as PTX spells it.
        address: Address in tensor memory; its lane is a multiple of 32.
        tmem: uint32[..., 128, columns]; with cta_group::2 uint32[..., 2, 128, columns].
        target: GPU or target.

    Returns:
        Tensor memory as it is afterwards.

    Raises:
        Unsupported: PTX does not give `op` to `target`, or it is another instruction.
        UndefinedBehaviour: The address has a lane that is no multiple of 32, or columns lie outside tensor memory.

    Source: PTX ISA 9.7.16.9.3.
    """
    moved = _require(op, target, Tcgen05Shift, "shift")
    memory = check_tensor_memory(tmem, moved.cta_group, target)
    lane, column = split_address(address, memory.shape[-1])
    forbid(
        lane % QUARTER != 0, "tcgen05.shift: the lane of the address is {lane}, but must be a multiple of 32. PTX ISA 9.7.16.9.3", lane=lane
    )
    return move_rows_down(moved.cta_group, column, memory)


# ---- the product


def _multiply(applied: Arithmetic, a_parts: list[Array], b: Array, start: Array, metadata: Array | None, scales: Any) -> Array:
    """D [..., M, N] from A [..., cta, rows, K] of each part of the columns, B's transpose [..., N, K] and D before."""
    op = applied.op
    b = b.swapaxes(-1, -2)
    ctas = 1 if scales is None else a_parts[0].shape[-3]  # the CTAs have scales of their own
    rows = []
    for cta in range(ctas):
        whole = lambda a, cta=cta: a.reshape(*a.shape[:-3], -1, a.shape[-1]) if ctas == 1 else a[..., cta, :, :]
        height = op.m // ctas
        c, own = start[..., cta * height : (cta + 1) * height, :], None if scales is None else tuple(v[..., cta, :, :] for v in scales)
        kept = None if metadata is None else metadata[..., cta * height : (cta + 1) * height, :]
        width = op.n // len(a_parts)
        columns = []
        for part, a in enumerate(a_parts):
            taken = slice(part * width, (part + 1) * width)
            mine = None if own is None else (own[0], own[1][..., taken])
            multiply = partial(instruction_product, op, applied.model, whole(a), b[..., taken], c[..., taken])
            columns.append(multiply(kept, mine, applied.clamped_metadata))
        rows.append(columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=-1))
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=-2)


def _keep_masked(op: Tcgen05Product, read: ReadProduct, mask: ArrayLike, written: Array) -> Array:
    """D with the lanes that the mask disables as they were."""
    words = as_memory("disable_output_lane", mask)
    count = 4 * op.cta_group
    if words.shape[-1] != count:
        raise ValueError(f"disable_output_lane: got uint32{list(words.shape)}; expected uint32[..., {count}] for {op}")
    lane = read.indices // read.memory.columns % LANES + LANES * read.cells.cta
    disabled = jnp.take(words, lane // 32, axis=-1) >> (lane % 32).astype(np.uint32) & 1 == 1
    return jnp.where(disabled, read.memory.load(read.indices), written)


# ---- checks


def _describe(op: Instruction, idesc: int | None, target: str) -> InstructionDescriptor:
    if isinstance(op, Tcgen05Product):
        if idesc is None:
            return InstructionDescriptor(op)
        found = decode_instruction_descriptor(op.instruction, idesc)
        if found.product != op:
            raise Unsupported(f"idesc: {idesc:#010x} describes {found.product}, not {op}. PTX ISA 9.7.16.4.2")
        return found
    if not isinstance(op, Tcgen05Mma):
        raise Unsupported(f"{op} is {op.family}; tcgen05.mma runs tcgen05.mma, .sp, .ws and .ws.sp. PTX ISA {manual_section(op)}")
    if not isinstance(idesc, int | np.integer):
        raise TypeError(f"idesc: got {type(idesc).__name__}; {op} needs its instruction descriptor, an int that is known before tracing")
    found = decode_instruction_descriptor(op, int(idesc))
    check(found.product, target)  # K = 96
    if op.ashift and found.product.m < LANES:
        raise Unsupported(f"{op}: .ashift needs M of 128 or 256, not {found.product.m}. PTX ISA {manual_section(op)}")
    return found


def _require(op: str | Instruction, target: str, record: type[Tcgen05], name: str) -> Any:
    op = check(op, target)
    if not isinstance(op, record) or not op.opcode.startswith(f"tcgen05.{name}"):
        raise Unsupported(f"{op} is {op.family}; tcgen05.{name} runs tcgen05.{name}. PTX ISA {manual_section(op)}")
    return op


def _check_operands(op: Tcgen05Product, given: ProductOperands, mask: Any, scale_input_d: int, target: str) -> None:
    section = manual_section(op)
    if (given.a_desc is None) == (given.a_tmem is None):
        places = "neither" if given.a_desc is None else "both"
        raise ValueError(f"{op}: A comes from shared memory, a_desc=, or from tensor memory, a_tmem=; got {places}")
    scaled = op.scaling is not None
    for name, has in (("sp_meta", op.sparse), ("scale_a", scaled), ("scale_b", scaled)):
        if (getattr(given, name) is not None) != has:
            raise ValueError(f"{name}: {op} {'needs it' if has else 'has none'}. PTX ISA {section}")
    names = op.operands
    if mask is not None and "disable_output_lane" not in names:
        raise Unsupported(f"disable_output_lane: {op} has none. PTX ISA {section}")
    if given.zero_column_mask is not None and "zero_column_mask" not in names:
        raise Unsupported(f"zero_column_mask: {op} has none; .ws has. PTX ISA {section}")
    if scale_input_d and "scale_input_d" not in names:
        raise Unsupported(f"scale_input_d: {op} has none; .kind::f16 and .kind::tf32 have. PTX ISA {section}")
    if not 0 <= scale_input_d <= MAX_SCALE_INPUT_D:
        raise Unsupported(f"scale_input_d: got {scale_input_d}; expected 0 to {MAX_SCALE_INPUT_D}. PTX ISA {section}")
    if scale_input_d:
        check(replace(op.instruction, arguments=("[d]", "a", "b", "idesc", "enable", str(scale_input_d))), target)
