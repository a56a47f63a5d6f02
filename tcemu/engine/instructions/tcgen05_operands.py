"""What a `tcgen05.mma` reads: the extents of its operands in both memories, and their codes.

Source: PTX ISA 9.7.16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.base.checking import forbid
from tcemu.base.errors import UndefinedBehaviour
from tcemu.engine.formats.number_formats import E2M1, E2M3, E3M2, E4M3, E5M2, F16, Format
from tcemu.engine.instructions.tcgen05_memories import TensorMemory, check_descriptor, check_shared_memory, read_units
from tcemu.engine.isa.tcgen05_descriptors import InstructionDescriptor
from tcemu.engine.layouts.packing import Container, unpack_registers
from tcemu.engine.layouts.shared_memory import UNIT
from tcemu.engine.layouts.sparsity import undefined_fields
from tcemu.engine.layouts.tensor_memory import (
    LANES,
    QUARTER,
    AccumulatorCells,
    AccumulatorLayout,
    accumulator_cells,
    accumulator_layout,
    metadata_cells,
    multiplicand_lanes,
    scale_cells,
)

# A byte of tensor memory for each element of f8f6f4 and mxf8f6f4. e2m1: PTX ISA 9.7.16.9.1 as NVIDIA's CuTe DSL shows it. The places of
# the 6-bit types are in figures alone; these are the defaults: e3m2 as the DSL's example has it, e2m3 aligned with e4m3's bits
BYTE_CONTAINERS = {
    E4M3: Container(8), E5M2: Container(8), E2M1: Container(8, shift=2), E3M2: Container(8, shift=1), E2M3: Container(8),
}  # fmt: skip
PADDED_KINDS = ("f8f6f4", "mxf8f6f4")  # 16 narrow elements and padding fill 16 bytes of shared memory: 9.7.16.10.4
BAND = 16  # lanes whose cells of a column are followed together where the asynchronous protocol is checked
BANDS = LANES // BAND


class ProductOperands(NamedTuple):
    """The operands of an mma that are read, by the names of `tcgen05.mma`."""

    d: Any
    b_desc: Any
    a_desc: Any = None
    a_tmem: Any = None
    sp_meta: Any = None
    scale_a: Any = None
    scale_b: Any = None
    enable_input_d: Any = True
    zero_column_mask: int | None = None


class ReadProduct(NamedTuple):
    memory: TensorMemory
    a_parts: list[Array]  # codes of A [..., cta, rows, K], for each part of D's columns or once for all
    b: Array  # codes of B's transpose [..., N, K]
    start: Array  # codes of D before [..., M, N]; zeros where D is left out
    metadata: Array | None  # [..., M, chunks]
    scales: tuple[Array, Array] | None  # codes [..., cta, rows, S] and [..., cta, S, N]
    cells: AccumulatorCells  # of D
    indices: Any  # of the same cells


# ---- extents


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
    """Return what the descriptors of A and B reach in the shared memory of one CTA, by the names of `tcgen05.mma`.

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
    """Return the columns of tensor memory from their addresses on that the operands of an mma reach, by the names of `tcgen05.mma`.

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


# ---- codes


def read_product(described: InstructionDescriptor, at: ProductOperands, shared: ArrayLike, tmem: ArrayLike, checked: bool) -> ReadProduct:
    """Read the operands of an mma.

    Args:
        described: What the instruction descriptor says.
        at: The operands: addresses and descriptors.
        shared: As in `tcgen05.mma`.
        tmem: As in `tcgen05.mma`.
        checked: Report undefined metadata and copies of scales that differ.

    Raises:
        UndefinedBehaviour: An operand lies outside the memory, or `checked` finds what it reports.
    """
    product = described.product
    work = _OperandReader(described, tmem, shared)
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
    indices = work.memory.indices(at.d, cells.lane, cells.column, cells.cta)
    start = work.memory.load(indices)
    start = start.astype(product.d.dtype) if product.d != F16 else (start & 0xFFFF).astype(product.d.dtype)
    enabled = jnp.asarray(at.enable_input_d)[..., None, None]
    start = jnp.where(enabled, start, jnp.zeros((), start.dtype))
    return ReadProduct(work.memory, a_parts, b, start, metadata, scales, cells, indices)


class _OperandReader:
    """The memories of one mma, and how its operands are read from them."""

    def __init__(self, described: InstructionDescriptor, tmem: ArrayLike, shared: ArrayLike) -> None:
        self.op, self.described = described.product, described
        self.shared = check_shared_memory(shared, self.op.cta_group)
        self.memory = TensorMemory.from_array(tmem, self.op.cta_group)

    def load(self, address: Any, lane: Any, column: Any) -> Array:
        """Cells [..., cta, lane, column] of both CTAs, counted from an address."""
        return self.memory.load(self.memory.indices(address, lane, column, np.arange(self.op.cta_group).reshape(-1, 1, 1)))

    def matrix(self, name: str, desc: Any, rows: int, skip: int = 0) -> Array:
        """Codes of A [..., cta, rows, K] or of B's transpose [..., cta, rows, K] from shared memory, without the first `skip` rows."""
        extent = operand_extent(self.described, name, rows + skip)
        words = check_descriptor(f"{name}_desc", desc, absolute=self.op.depth.absolute)
        words = read_units(self.shared, words, extent.major, extent.lines, extent.units)
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
        words = self.load(address, lanes[:, None], cells)
        layout = BYTE_CONTAINERS[op.a] if padded else Container(op.a.bits)
        return self._negated("a", unpack_registers(words, op.a, **layout._asdict()))

    def metadata(self, address: Any, layout: AccumulatorLayout, checked: bool) -> Array:
        """Fields [..., M, chunks]. The selector moves the column by its value (inferred for 2 and 3)."""
        op = self.op
        stored_bits = 8 if op.kind in PADDED_KINDS else op.a.bits
        cells = metadata_cells(layout, op.k, stored_bits)
        words = self.load(address, cells.lane, cells.column + self.described.selector)
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
        cells = scale_cells(rows, count, byte_id)
        shift = 8 * cells.byte.astype(np.uint32)
        read = lambda quarter: self.load(address, cells.lane + QUARTER * quarter, cells.column) >> shift & 0xFF
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


def _zero_columns(work: _OperandReader, b: Array, b_desc: Any, value: int | None) -> Array:
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
        **operands: The operands by the names of `tcgen05.mma`, without those of masks of lanes.

    Returns:
        Codes `a_row`, `b_col` and `c`; with sparsity `e`, with block scales `scale_a` and `scale_b`.

    Raises:
        ValueError: D has no such element.
    """
    op = described.product
    if not (0 <= row < op.m and 0 <= column < op.n):
        raise ValueError(f"element: got ({row}, {column}); D of {op} has {op.m} rows and {op.n} columns")
    read = read_product(described, ProductOperands(**operands), shared, tmem, checked=False)
    rows = op.m // op.cta_group
    a = read.a_parts[column * len(read.a_parts) // op.n]
    found = {"a_row": a[row // rows, row % rows], "b_col": read.b[column], "c": read.start[row, column]}
    if read.metadata is not None:
        found["e"] = read.metadata[row]
    if read.scales is not None:
        found |= {"scale_a": read.scales[0][row // rows, row % rows], "scale_b": read.scales[1][row // rows, :, column]}
    return {name: np.asarray(value) for name, value in found.items()}


# ---- D, scaled before it is added


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
        tmem: As in `tcgen05.mma`.
    """
    op = described.product
    cells = accumulator_cells(accumulator_layout(op.m, op.cta_group, ws=op.ws, sparse=op.sparse), op.n)
    memory = TensorMemory.from_array(tmem, op.cta_group)
    codes = memory.load(memory.indices(d, cells.lane, cells.column, cells.cta)) & ((1 << op.d.bits) - 1)
    return loses_bits(op.d, codes, by).any() & enabled
