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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.base.checking import forbid
from tcemu.base.errors import NotModelled, UndefinedBehaviour, Unsupported
from tcemu.engine.architectures.lookup import Arithmetic, resolve_arithmetic
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.formats.number_formats import E2M1, E2M3, E3M2, E4M3, E5M2, F16, Format
from tcemu.engine.instructions.operand_checks import instruction_product
from tcemu.engine.isa.families import Instruction
from tcemu.engine.isa.legality import check, manual_section
from tcemu.engine.isa.targets import TARGETS, resolve_target
from tcemu.engine.isa.tcgen05 import Tcgen05, Tcgen05Copy, Tcgen05Mma, Tcgen05Move, Tcgen05Product, Tcgen05Shift
from tcemu.engine.isa.tcgen05_descriptors import InstructionDescriptor, decode_instruction_descriptor
from tcemu.engine.layouts.packing import Container, unpack_registers
from tcemu.engine.layouts.shared_memory import ADDRESS_BITS, UNIT, UNIT_WORDS, descriptor_words
from tcemu.engine.layouts.sparsity import undefined_fields
from tcemu.engine.layouts.strided_memory import as_memory
from tcemu.engine.layouts.tcgen05_memory import decode_tcgen05_descriptor, descriptor_problem, tcgen05_unit_addresses
from tcemu.engine.layouts.tensor_memory import (
    LANES,
    QUARTER,
    SHIFT_COLUMNS,
    AccumulatorCells,
    AccumulatorLayout,
    accumulator_cells,
    accumulator_layout,
    copy_lanes,
    metadata_cells,
    move_cells,
    multiplicand_lanes,
    scale_cells,
    shift_sources,
)

# A byte of tensor memory for each element of f8f6f4 and mxf8f6f4. e2m1: PTX ISA 9.7.16.9.1 as NVIDIA's CuTe DSL shows it. The places of
# the 6-bit types are in figures alone; these are the defaults: e3m2 as the DSL's example has it, e2m3 aligned with e4m3's bits
BYTE_CONTAINERS = {
    E4M3: Container(8), E5M2: Container(8), E2M1: Container(8, shift=2), E3M2: Container(8, shift=1), E2M3: Container(8),
}  # fmt: skip
PADDED_KINDS = ("f8f6f4", "mxf8f6f4")  # 16 narrow elements and padding fill 16 bytes of shared memory: 9.7.16.10.4
MAX_SCALE_INPUT_D = 15
LANE_BITS = 7  # bits of an address that count; of the column as many as the last one has
CANONICAL_NAN = 0x7FFFFFFF


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
    _check_operands(product, a_desc, a_tmem, sp_meta, (scale_a, scale_b), disable_output_lane, zero_column_mask, scale_input_d, target)
    if shifts_a and a_tmem is None:
        raise Unsupported(f"{op}: .ashift takes A from tensor memory, a_tmem=. PTX ISA {manual_section(product)}")
    addresses = _Addresses(d, b_desc, a_desc, a_tmem, sp_meta, scale_a, scale_b, enable_input_d, zero_column_mask)
    memory = _check_tensor_memory(tmem, product.cta_group, target)
    read = _read_product(described, addresses, shared, memory, checked)
    work, cells, places = read.work, read.cells, read.places
    start = read.start
    if scale_input_d:
        if checked:
            message = f"scale_input_d={scale_input_d}: D is {{code}}; nobody has published how {product} rounds a subnormal scaled D"
            forbid(loses_bits(product.d, start, scale_input_d), message, code=start)
        start = scale_accumulator(product.d, start, scale_input_d)
    sums = _multiply(applied, read.a_parts, read.b, start, read.metadata, read.scales)
    written = sums.astype(jnp.uint32)
    if disable_output_lane is not None:
        written = _keep_masked(work, disable_output_lane, places, cells, written)
    after = work.store(places, written)
    return move_rows_down(product.cta_group, _split_address(a_tmem, work.columns)[1], after) if shifts_a else after


def scale_accumulator(fmt: Format, codes: Array, by: int) -> Array:
    """Return codes of D · 2^-by. A result that is subnormal is rounded toward zero, a default.

    Args:
        fmt: Format of D: f16 or f32.
        codes: Codes of D.
        by: Exponent, from 1 to 15.
    """
    magnitude, mantissa = codes & fmt.nan, fmt.mantissa_bits  # the canonical NaN has all bits but the sign
    exponent = magnitude >> mantissa
    significand = jnp.where(exponent > 0, magnitude & (1 << mantissa) - 1 | 1 << mantissa, magnitude)
    down = jnp.minimum(by + 1 - jnp.clip(exponent, 1, by), mantissa + 1).astype(magnitude.dtype)
    small = (significand >> down).astype(codes.dtype)
    scaled = jnp.where(exponent > by, magnitude - (by << mantissa), small)
    return jnp.where(magnitude >= fmt.infinity, codes, codes ^ magnitude ^ scaled).astype(codes.dtype)


def loses_bits(fmt: Format, codes: Array, by: int) -> Array:
    """Return where D · 2^-by is subnormal and not 0, so that its rounding and its alignment are open, bool of the shape of `codes`.

    Args:
        fmt: Format of D: f16 or f32.
        codes: Codes of D.
        by: Exponent, from 1 to 15.
    """
    magnitude = codes & fmt.nan
    return (magnitude > 0) & (magnitude >> fmt.mantissa_bits <= by)


def scaled_input_is_open(described: InstructionDescriptor, d: Any, enabled: Any, by: int, tmem: ArrayLike) -> Array:
    """Return True if an mma adds a D whose scaled value is subnormal, which nobody has published.

    Args:
        described: What the instruction descriptor says.
        d: Address of D, which may be traced.
        enabled: False leaves D out of the sum.
        by: `scale_input_d`.
        tmem: As in `mma`.
    """
    op = described.product
    cells = accumulator_cells(accumulator_layout(op.m, op.cta_group, ws=op.ws, sparse=op.sparse), op.n)
    memory, columns = _flatten(tmem, op.cta_group)
    codes = _load(memory, _places(d, cells.lane, cells.column, cells.cta, columns)) & ((1 << op.d.bits) - 1)
    return loses_bits(op.d, codes, by).any() & enabled


class _Addresses(NamedTuple):
    """The operands of an mma, by the names of `mma`."""

    d: Any
    b_desc: Any
    a_desc: Any = None
    a_tmem: Any = None
    sp_meta: Any = None
    scale_a: Any = None
    scale_b: Any = None
    enable_input_d: Any = True
    zero_column_mask: int | None = None


class _ReadProduct(NamedTuple):
    """The operands that an mma reads."""

    work: _Operands
    a_parts: list[Array]  # codes of A [..., cta, rows, K], for each part of D's columns or once for all
    b: Array  # codes of B's transpose [..., N, K]
    start: Array  # codes of D before [..., M, N]; zeros where D is left out
    metadata: Array | None  # [..., M, chunks]
    scales: tuple[Array, Array] | None  # codes [..., cta, rows, S] and [..., cta, S, N]
    cells: AccumulatorCells
    places: Any


def _read_product(described: InstructionDescriptor, at: _Addresses, shared: ArrayLike, tmem: ArrayLike, checked: bool) -> _ReadProduct:
    """Read the operands of an mma."""
    product = described.product
    work = _Operands(product, described, tmem, shared)
    layout = accumulator_layout(product.m, product.cta_group, ws=product.ws, sparse=product.sparse)
    b = work.matrix("b", at.b_desc, product.n // product.cta_group)
    b = _zero_columns(work, b, at.b_desc, at.zero_column_mask)
    b = b.reshape(*b.shape[:-3], product.n, product.k)  # the even CTA has the first columns
    if at.a_desc is not None:
        a_parts = [work.matrix("a", at.a_desc, layout.cta_rows)]
    else:
        a_parts = [work.from_tensor_memory(at.a_tmem, lanes) for lanes in multiplicand_lanes(layout)]
    metadata = None if at.sp_meta is None else work.metadata(at.sp_meta, layout, checked)
    scales = None if at.scale_a is None or at.scale_b is None else work.scales(at.scale_a, at.scale_b, layout, checked)
    cells = accumulator_cells(layout, product.n)
    places = work.places(at.d, cells.lane, cells.column, cells.cta)
    start = work.load(places)
    start = start.astype(product.d.dtype) if product.d != F16 else (start & 0xFFFF).astype(product.d.dtype)
    enabled = jnp.asarray(at.enable_input_d)[..., None, None]
    start = jnp.where(enabled, start, jnp.zeros((), start.dtype))
    return _ReadProduct(work, a_parts, b, start, metadata, scales, cells, places)


def element_operands(
    described: InstructionDescriptor, row: int, column: int, shared: ArrayLike, tmem: ArrayLike, **operands: Any
) -> dict[str, Any]:
    """Return what one element of D of an mma is computed from, as arguments of `tcemu.explain` with `codes=True`.

    Args:
        described: What the instruction descriptor says.
        row: Row of D.
        column: Column of D.
        shared: uint32[words]; with cta_group::2 uint32[2, words].
        tmem: uint32[128, columns] before the product; with cta_group::2 uint32[2, 128, columns].
        **operands: The operands by the names of `mma`, without those of masks of lanes.

    Returns:
        Codes `a_row`, `b_col` and `c`; with sparsity `e`, with block scales `scale_a` and `scale_b`.

    Raises:
        ValueError: D has no such element.
    """
    op = described.product
    if not (0 <= row < op.m and 0 <= column < op.n):
        raise ValueError(f"element: got ({row}, {column}); D of {op} has {op.m} rows and {op.n} columns")
    read = _read_product(described, _Addresses(**operands), shared, tmem, checked=False)
    rows = op.m // op.cta_group
    a = read.a_parts[column * len(read.a_parts) // op.n]
    found = {"a_row": a[row // rows, row % rows], "b_col": read.b[column], "c": read.start[row, column]}
    if read.metadata is not None:
        found["e"] = read.metadata[row]
    if read.scales is not None:
        found |= {"scale_a": read.scales[0][row // rows, row % rows], "scale_b": read.scales[1][row // rows, :, column]}
    return {name: np.asarray(value) for name, value in found.items()}


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
    memory, columns = _flatten(_check_tensor_memory(tmem, 1, target), 1)
    values = pack_cells(move, _load(memory, move_places(move, address, columns, warp, half_split_offset)))
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
    memory, columns = _flatten(_check_tensor_memory(tmem, 1, target), 1)
    return _unflatten(_store(memory, move_places(move, address, columns, warp, half_split_offset), values), 1, columns)


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
    memory, columns = _flatten(_check_tensor_memory(tmem, copy.cta_group, target), copy.cta_group)
    shared = _shared_memory(shared, copy.cta_group)
    lanes = copy_lanes(copy.tile, copy.multicast)
    units = 2 if copy.tile.endswith("256b") else 1
    words = _read_units(shared, _descriptor("s_desc", s_desc), "k", len(lanes), units)
    if copy.source is not None:
        nibbles = words[..., :2, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 0xF
        nibbles = nibbles.reshape(*words.shape[:-1], 4, 4) << 2 << np.arange(0, 32, 8, dtype=np.uint32)
        words = jax.lax.reduce_or(nibbles, axes=(nibbles.ndim - 1,))
    values = words.reshape(*words.shape[:-2], 1, units * UNIT_WORDS)  # [..., cta, row, copy, column]
    values = jnp.broadcast_to(values, (*values.shape[:-2], lanes.shape[1], values.shape[-1]))
    cta = np.arange(copy.cta_group).reshape(-1, 1, 1, 1)
    places = _places(address, lanes[:, :, None], np.arange(units * UNIT_WORDS), cta, columns)
    return _unflatten(_store(memory, places, values), copy.cta_group, columns)


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
    memory = _check_tensor_memory(tmem, moved.cta_group, target)
    lane, column = _split_address(address, memory.shape[-1])
    forbid(
        lane % QUARTER != 0, "tcgen05.shift: the lane of the address is {lane}, but must be a multiple of 32. PTX ISA 9.7.16.9.3", lane=lane
    )
    return move_rows_down(moved.cta_group, column, memory)


def move_rows_down(cta_group: int, column: Any, tmem: ArrayLike) -> Array:
    """Compute `shift` at a column, which may be traced.

    Args:
        cta_group: CTAs whose tensor memory is changed.
        column: First of the columns.
        tmem: As in `shift`.
    """
    memory, columns = _flatten(tmem, cta_group)
    cta, moved = np.arange(cta_group).reshape(-1, 1, 1), np.arange(SHIFT_COLUMNS)
    source = _places(column, shift_sources()[:, None], moved, cta, columns)
    to = _places(column, np.arange(LANES)[:, None], moved, cta, columns)
    return _unflatten(_store(memory, to, _load(memory, source)), cta_group, columns)


# ---- the operands of an mma


class OperandExtent(NamedTuple):
    """The lines of 16-byte units that an operand in shared memory has in one CTA."""

    major: str  # "k" or "mn"
    lines: int
    units: int  # of a line
    elements: int  # of a line


def operand_extent(described: InstructionDescriptor, name: str, rows: int) -> OperandExtent:
    """Return the lines of 16-byte units of A or of B's transpose.

    Args:
        described: What the instruction descriptor says.
        name: "a" or "b".
        rows: Rows of A or columns of B in one CTA.
    """
    op = described.product
    columns = op.matrix_shape("a")[1] if name == "a" else op.k
    transposed = described.transpose_a if name == "a" else described.transpose_b
    bits = 8 if op.kind in PADDED_KINDS else getattr(op, name).bits
    along, across = (rows, columns) if transposed else (columns, rows)
    return OperandExtent("mn" if transposed else "k", across, -(-along * bits // (8 * UNIT)), along)


def shared_extents(described: InstructionDescriptor, mask: int | None) -> dict[str, OperandExtent]:
    """Return what the descriptors of A and B reach in the shared memory of one CTA, by the names of `mma`.

    Args:
        described: What the instruction descriptor says.
        mask: Zero-column mask descriptor of .ws, or None.
    """
    op = described.product
    layout = accumulator_layout(op.m, op.cta_group, ws=op.ws, sparse=op.sparse)
    skipped = 0 if mask is None else zero_columns(mask, op.m, op.n)[1]
    rows = {"a": layout.cta_rows, "b": op.n // op.cta_group + skipped}
    return {f"{name}_desc": operand_extent(described, name, count) for name, count in rows.items()}


def column_counts(described: InstructionDescriptor) -> dict[str, int]:
    """Return the columns of tensor memory from their addresses on that the operands of an mma reach, by the names of `mma`.

    Args:
        described: What the instruction descriptor says.
    """
    op = described.product
    layout = accumulator_layout(op.m, op.cta_group, ws=op.ws, sparse=op.sparse)
    bits = 8 if op.kind in PADDED_KINDS else op.a.bits
    counts = {"d": op.n // layout.parts, "a_tmem": op.matrix_shape("a")[1] * bits // 32}
    if op.sparse:
        counts["sp_meta"] = int(metadata_cells(layout, op.k, bits).column.max()) + described.selector + 1
    if op.scaling is not None:
        columns_of_b = op.n // 2 if layout.name == "B" else op.n
        for name, rows, byte_id in (
            ("scale_a", layout.cta_rows, described.scale_a_id), ("scale_b", columns_of_b, described.scale_b_id),
        ):  # fmt: skip
            counts[name] = int(scale_cells(rows, op.scaling.count, byte_id).column.max()) + 1
    return counts


BAND = 16  # lanes whose cells of a column are followed together where the asynchronous protocol is checked
BANDS = LANES // BAND


class OperandCells(NamedTuple):
    """The cells of an operand of an mma in one CTA, from its address on."""

    name: str
    bands: np.ndarray
    columns: int


def operand_cells(described: InstructionDescriptor) -> tuple[OperandCells, ...]:
    """Return the cells of tensor memory that an mma may use for its operands.

    Args:
        described: What the instruction descriptor says.
    """
    op = described.product
    lanes = multiplicand_lanes(accumulator_layout(op.m, op.cta_group, ws=op.ws, sparse=op.sparse))
    bands: dict[str, np.ndarray] = dict.fromkeys(("d", "a_tmem"), np.unique(lanes // BAND))
    return tuple(OperandCells(name, bands.get(name, np.arange(BANDS)), count) for name, count in column_counts(described).items())


class _Operands:
    """The memories of one mma, and how its operands are read from them."""

    def __init__(self, op: Tcgen05Product, described: InstructionDescriptor, tmem: ArrayLike, shared: ArrayLike) -> None:
        self.op, self.described = op, described
        self.shared = _shared_memory(shared, op.cta_group)
        self.tmem, self.columns = _flatten(tmem, op.cta_group)

    def places(self, address: Any, lane: Any, column: Any, cta: Any) -> Any:
        return _places(address, lane, column, cta, self.columns)

    def load(self, places: Any) -> Array:
        return _load(self.tmem, places)

    def store(self, places: Any, values: Array) -> Array:
        return _unflatten(_store(self.tmem, places, values), self.op.cta_group, self.columns)

    def matrix(self, name: str, desc: Any, rows: int, skip: int = 0) -> Array:
        """Codes of A [..., cta, rows, K] or of B's transpose [..., cta, rows, K] from shared memory, without the first `skip` rows."""
        extent = operand_extent(self.described, name, rows + skip)
        words = _descriptor(f"{name}_desc", desc, absolute=self.op.depth.absolute)
        words = _read_units(self.shared, words, extent.major, extent.lines, extent.units)
        codes = self._unpack(words, getattr(self.op, name)).reshape(*words.shape[:-2], -1)[..., : extent.elements]
        codes = codes.swapaxes(-1, -2) if extent.major == "mn" else codes
        return self._negated(name, codes[..., skip:, :])

    def from_tensor_memory(self, address: Any, lanes: np.ndarray) -> Array:
        """Codes of A [..., cta, rows, K] from tensor memory."""
        op = self.op
        columns = op.matrix_shape("a")[1]
        padded = op.kind in PADDED_KINDS
        bits = 8 if padded else op.a.bits
        cells = np.arange(columns * bits // 32)
        words = self.load(self.places(address, lanes[:, None], cells, np.arange(op.cta_group).reshape(-1, 1, 1)))
        layout = BYTE_CONTAINERS[op.a] if padded else Container(op.a.bits)
        return self._negated("a", unpack_registers(words, op.a, **layout._asdict()))

    def metadata(self, address: Any, layout: AccumulatorLayout, checked: bool) -> Array:
        """Fields [..., M, chunks]. The selector moves the column by its value (inferred for 2 and 3)."""
        op = self.op
        stored_bits = 8 if op.kind in PADDED_KINDS else op.a.bits
        cells = metadata_cells(layout, op.k, stored_bits)
        cta = np.arange(op.cta_group).reshape(-1, 1, 1)
        words = self.load(self.places(address, cells.lane, cells.column + self.described.selector, cta))
        fields = (words >> cells.bit.astype(np.uint32) & 0xF).astype(jnp.uint8)
        fields = fields.reshape(*fields.shape[:-3], op.m, fields.shape[-1])
        if checked:
            wrong = undefined_fields(fields, op.chunk_size, True)
            forbid(wrong, "sp_meta: a field is {field}, which PTX leaves undefined. PTX ISA 9.7.16.10.8", field=fields)
        return fields

    def scales(self, scale_a: Any, scale_b: Any, layout: AccumulatorLayout, checked: bool) -> tuple[Array, Array]:
        """Scales of A [..., cta, rows, S] and of B [..., cta, S, N]."""
        op, described = self.op, self.described
        count = op.require_scaling().count
        a = self._scale_bytes(scale_a, layout.cta_rows, count, described.scale_a_id, (0, 1, 2, 3), "scale_a", checked)
        if layout.name != "B":
            b = self._scale_bytes(scale_b, op.n, count, described.scale_b_id, (0, 1, 2, 3), "scale_b", checked)
        else:  # each pair of quarters has the scales of the columns of D that it holds
            halves = [
                self._scale_bytes(scale_b, op.n // 2, count, described.scale_b_id, pair, "scale_b", checked) for pair in ((0, 1), (2, 3))
            ]
            b = jnp.concatenate(halves, axis=-2)
        return a, b.swapaxes(-1, -2)

    def _scale_bytes(self, address: Any, rows: int, count: int, byte_id: int, quarters: tuple[int, ...], name: str, checked: bool) -> Array:
        cells, cta = scale_cells(rows, count, byte_id), np.arange(self.op.cta_group).reshape(-1, 1, 1)
        shift = 8 * cells.byte.astype(np.uint32)
        read = lambda quarter: self.load(self.places(address, cells.lane + QUARTER * quarter, cells.column, cta)) >> shift & 0xFF
        first = read(quarters[0])
        for quarter in quarters[1:] if checked else ():
            differs = read(quarter) != first
            forbid(
                differs, name + ": the copies in quarters {first} and {other} differ. PTX ISA 9.7.16.10.7", first=quarters[0], other=quarter
            )
        return first.astype(jnp.uint8)

    def _unpack(self, words: Array, fmt: Format) -> Array:
        """Codes of the elements of 16-byte units, uint32 [..., units, 4] -> [..., units, elements]."""
        if self.op.kind not in PADDED_KINDS or fmt.bits == 8:
            return unpack_registers(words, fmt)
        low = np.arange(16) * fmt.bits  # 16 elements from bit 0 on, and padding
        first, second = words[..., low // 32], words[..., np.minimum(low // 32 + 1, 3)]
        at = (low % 32).astype(np.uint32)
        beyond = np.where(at > 32 - fmt.bits, 32 - at, np.uint32(31)).astype(np.uint32)
        codes = first >> at | jnp.where(at > 32 - fmt.bits, second << beyond, np.uint32(0))
        return (codes & np.uint32((1 << fmt.bits) - 1)).astype(fmt.dtype)

    def _negated(self, name: str, codes: Array) -> Array:
        fmt, negated = (self.op.a, self.described.negate_a) if name == "a" else (self.op.b, self.described.negate_b)
        return codes ^ np.asarray(1 << fmt.bits - 1, codes.dtype) if negated else codes


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


def _keep_masked(work: _Operands, mask: ArrayLike, places: Any, cells: Any, written: Array) -> Array:
    """D with the lanes that the mask disables as they were."""
    words = as_memory("disable_output_lane", mask)
    count = 4 * work.op.cta_group
    if words.shape[-1] != count:
        raise ValueError(f"disable_output_lane: got uint32{list(words.shape)}; expected uint32[..., {count}] for {work.op}")
    lane = places // work.columns % LANES + LANES * cells.cta
    disabled = jnp.take(words, lane // 32, axis=-1) >> (lane % 32).astype(np.uint32) & 1 == 1
    return jnp.where(disabled, work.load(places), written)


def zero_columns(value: int, m: int, n: int) -> tuple[np.ndarray, int]:
    """Return which columns of B a zero-column mask descriptor names, and by how many columns B is shifted.

    Args:
        value: Descriptor, 64 bits.
        m: M of the product: 32, 64 or 128.
        n: N of the product.

    Returns:
        bool [n], True where B counts as zeros, and the shift.

    Source: PTX ISA 9.7.16.4.3; the order of the runs as in CUTLASS mma_sm100_desc.hpp and in the manual's examples.
    """
    field = lambda low, count: value >> low & (1 << count) - 1
    parts = 128 // m
    columns = np.zeros((parts, n // parts), bool)
    if field(39, 1):
        skip, use = field(40, 8) + 1, field(48, 8) + 1
        for part in range(parts):
            start, ones = field(8 * part, 8), bool(field(32 + part, 1))
            period = [True] * skip + [False] * use if ones else [False] * use + [True] * skip
            columns[part] = [period[(start + i) % len(period)] for i in range(n // parts)]
    return columns.reshape(n), field(56, 6)


def _zero_columns(work: _Operands, b: Array, b_desc: Any, value: int | None) -> Array:
    if value is None:
        return b
    op = work.op
    zeros, by = zero_columns(value, op.m, op.n)
    limit = 16 if op.m == 32 else 32
    if by > limit or by > work.described.max_shift:
        raise UndefinedBehaviour(
            f"{op}: the zero-column mask shifts by {by}; at most {min(limit, work.described.max_shift)}, the largest that the instruction "
            "descriptor states. PTX ISA 9.7.16.4.3"
        )
    b = work.matrix("b", b_desc, op.n, skip=by) if by else b
    return jnp.where(zeros[:, None], jnp.zeros((), b.dtype), b)


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


def _check_operands(
    op: Tcgen05Product, a_desc: Any, a_tmem: Any, sp_meta: Any, scales: tuple[Any, Any], mask: Any, zeros: Any, scale_input_d: int,
    target: str,
) -> None:  # fmt: skip
    section = manual_section(op)
    if (a_desc is None) == (a_tmem is None):
        given = "neither" if a_desc is None else "both"
        raise ValueError(f"{op}: A comes from shared memory, a_desc=, or from tensor memory, a_tmem=; got {given}")
    for name, value, has in (
        ("sp_meta", sp_meta, op.sparse), ("scale_a", scales[0], op.scaling is not None), ("scale_b", scales[1], op.scaling is not None),
    ):  # fmt: skip
        if (value is not None) != has:
            raise ValueError(f"{name}: {op} {'needs it' if has else 'has none'}. PTX ISA {section}")
    names = op.operands
    if mask is not None and "disable_output_lane" not in names:
        raise Unsupported(f"disable_output_lane: {op} has none. PTX ISA {section}")
    if zeros is not None and "zero_column_mask" not in names:
        raise Unsupported(f"zero_column_mask: {op} has none; .ws has. PTX ISA {section}")
    if scale_input_d and "scale_input_d" not in names:
        raise Unsupported(f"scale_input_d: {op} has none; .kind::f16 and .kind::tf32 have. PTX ISA {section}")
    if not 0 <= scale_input_d <= MAX_SCALE_INPUT_D:
        raise Unsupported(f"scale_input_d: got {scale_input_d}; expected 0 to {MAX_SCALE_INPUT_D}. PTX ISA {section}")
    if scale_input_d:
        check(replace(op.instruction, arguments=("[d]", "a", "b", "idesc", "enable", str(scale_input_d))), target)


# ---- memories


def _check_tensor_memory(tmem: ArrayLike, ctas: int, target: str) -> Array | np.ndarray:
    """Tensor memory of the columns that the target has."""
    value = tmem if isinstance(tmem, jax.Array) else np.asarray(tmem)
    shape = ((2,) if ctas == 2 else ()) + (LANES, TARGETS[resolve_target(target)].tensor_columns)
    if value.dtype != jnp.uint32:
        raise TypeError(f"tmem: got {value.dtype}{list(value.shape)}; tensor memory is uint32[..., {', '.join(map(str, shape))}]")
    if value.shape[-len(shape) :] != shape:
        raise ValueError(f"tmem: got uint32{list(value.shape)}; tensor memory is uint32[..., {', '.join(map(str, shape))}]")
    return value


def _flatten(tmem: ArrayLike, ctas: int) -> tuple[Array, int]:
    """Tensor memory as uint32[..., ctas * 128 * columns], and its columns."""
    value = jnp.asarray(tmem)
    return value.reshape(*value.shape[: -3 if ctas == 2 else -2], -1), value.shape[-1]


def _unflatten(memory: Array, ctas: int, columns: int) -> Array:
    return memory.reshape(*memory.shape[:-1], *((2,) if ctas == 2 else ()), LANES, columns)


def _shared_memory(shared: ArrayLike, ctas: int) -> Array:
    """Shared memory as uint32[..., ctas, words], checked."""
    memory = as_memory("shared", shared)
    if ctas == 2 and (memory.ndim < 2 or memory.shape[-2] != 2):
        raise ValueError(f"shared: got uint32{list(memory.shape)}; with cta_group::2 it is uint32[..., 2, words], one memory for each CTA")
    return memory if ctas == 2 else memory[..., None, :]


def _descriptor(name: str, value: Any, *, absolute: bool = False) -> Any:
    words = descriptor_words(name, value)
    if words.ndim != 1:
        raise ValueError(f"{name}: got uint32{list(words.shape)}; a descriptor is one value, and jax.vmap gives each batch index its own")
    if not isinstance(words, Tracer):
        problems = filter(None, (descriptor_problem(each, absolute=absolute) for each in words.reshape(-1, 2)))
        if problem := next(problems, None):
            raise UndefinedBehaviour(f"{name}: {problem}")
    return words


def _read_units(shared: Array, words: Any, major: str, lines: int, units: int) -> Array:
    """The 16-byte units behind a descriptor, uint32[..., ctas, lines, units, 4]."""
    addresses = tcgen05_unit_addresses(decode_tcgen05_descriptor(words), major, lines, units)
    limit = min(4 * shared.shape[-1], 1 << ADDRESS_BITS)
    if not isinstance(addresses, jax.Array) and (addresses > limit - UNIT).any():
        raise UndefinedBehaviour(
            f"descriptor: the operand reaches byte {int(addresses.max()) + UNIT - 1} of shared memory, which "
            f"has {limit}. PTX ISA 9.7.16.4.1"
        )
    blocks = shared[..., : shared.shape[-1] // UNIT_WORDS * UNIT_WORDS].reshape(*shared.shape[:-1], -1, UNIT_WORDS)
    return jnp.take(blocks, jnp.asarray(addresses // UNIT), axis=-2, mode="clip")


def _split_address(address: Any, columns: int) -> tuple[Any, Any]:
    """Lane and column of an address; bits beyond them do not count."""
    value = address if isinstance(address, jax.Array) else np.asarray(address)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"address: got {value.dtype}; an address of tensor memory is an int or a uint32")
    if value.ndim:
        raise ValueError(f"address: got shape {list(value.shape)}; an address is one value, and jax.vmap gives each batch index its own")
    value = value.astype(np.uint32) if isinstance(value, np.ndarray) else value.astype(jnp.uint32)
    lane, column = value >> 16 & (1 << LANE_BITS) - 1, value & (1 << (columns - 1).bit_length()) - 1
    return lane.astype(np.int32), column.astype(np.int32)


def _places(address: Any, lane: Any, column: Any, cta: Any, columns: int) -> Any:
    """Indices into flat tensor memory of cells that are counted from an address. Known ones are checked."""
    base_lane, base_column = _split_address(address, columns)
    lanes, reached = base_lane + lane, base_column + column
    if not isinstance(lanes, jax.Array) and (lanes.max() >= LANES or reached.max() >= columns):
        raise UndefinedBehaviour(
            f"address: lane {int(lanes.max())} and column {int(reached.max())} are reached; tensor memory has {LANES} lanes and {columns} "
            "columns. PTX ISA 9.7.16.1"
        )
    return (cta * LANES + lanes % LANES) * columns + reached % columns


def _load(memory: Array, places: Any) -> Array:
    """Cells [..., *places.shape] of flat tensor memory."""
    return jnp.take(memory, places, axis=-1, mode="clip")


def _store(memory: Array, places: Any, values: Array) -> Array:
    """Flat tensor memory with other cells."""
    rank, batch = np.ndim(places), jnp.broadcast_shapes(memory.shape[:-1], values.shape[: values.ndim - np.ndim(places)])
    values = jnp.broadcast_to(values, (*batch, *np.shape(places))).reshape(*batch, -1)
    return jnp.broadcast_to(memory, (*batch, memory.shape[-1])).at[..., jnp.ravel(places) if rank else places].set(values)


def move_places(op: Tcgen05Move, address: Any, columns: int, warp: Any, half_split_offset: int = 0) -> Any:
    """Return the cells of a warp's registers as indices into tensor memory, lane * columns + column.

    Args:
        op: `tcgen05.ld` or `tcgen05.st`.
        address: Address in tensor memory, which may be traced; of its lane the bits within a quarter count.
        columns: Columns of tensor memory.
        warp: Warp of the CTA, which may be traced.
        half_split_offset: As in `ld`.

    Returns:
        int32[32, n], thread and register; with .pack::16b and .unpack::16b int32[32, n, 2], the low half first.
    """
    cells = move_cells(op.tile, op.num, half_split_offset, packed=op.packed)
    lane, column = _split_address(address, columns)
    own = QUARTER * (warp % 4) + lane % QUARTER
    return _places(own.astype(np.uint32) << 16 | column.astype(np.uint32), cells.lane, cells.column, 0, columns)


def pack_cells(op: Tcgen05Move, cells: Array) -> Array:
    """Return the registers that `ld` makes of the cells that `move_places` names.

    Args:
        op: `tcgen05.ld`.
        cells: uint32[..., 32, n], with .pack::16b uint32[..., 32, n, 2].
    """
    return cells[..., 0] & 0xFFFF | cells[..., 1] << 16 if op.packed else cells


def unpack_cells(op: Tcgen05Move, registers: Array) -> Array:
    """Return the cells that `st` makes of registers, in the shape of `move_places`.

    Args:
        op: `tcgen05.st`.
        registers: uint32[..., 32, n].
    """
    return jnp.stack([registers & 0xFFFF, registers >> 16], axis=-1) if op.packed else registers


def reduce_registers(op: Tcgen05Move, values: Array) -> Array:
    """Return the minimum or maximum of each thread's registers. Of f32 -0 is below +0, and a NaN counts only with .NaN.

    Args:
        op: `tcgen05.ld.red`.
        values: uint32[..., n].
    """
    least = op.reduction == "min"
    if op.element != "f32":
        ordered = values if op.element == "u32" else values ^ np.uint32(1 << 31)
        found = ordered.min(-1) if least else ordered.max(-1)
        return found if op.element == "u32" else found ^ np.uint32(1 << 31)
    sign, magnitude = np.uint32(1 << 31), values & np.uint32(CANONICAL_NAN)
    values = magnitude if op.absolute else values
    nan = magnitude > np.uint32(0x7F800000)
    key = jnp.where(values >= sign, ~values, values | sign)  # ascends with the numbers
    key = jnp.where(nan, np.uint32(0xFFFFFFFF if least else 0), key)
    best = key.min(-1) if least else key.max(-1)
    found = jnp.where(best >= sign, best ^ sign, ~best)
    undefined = nan.any(-1) if op.nan else nan.all(-1)
    return jnp.where(undefined, np.uint32(CANONICAL_NAN), found)
