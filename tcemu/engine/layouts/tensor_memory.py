"""Tensor memory: 128 lanes of 32 bits a column, and where tcgen05 puts the elements of its operands.

A cell is 32 bits at (lane, column). Every layout is a row of a table. The functions turn a row into arrays of cells, which serve both
directions: reading takes the cells, writing sets them. Columns count from the operand's address, lanes from the lane of its address.

Source: PTX ISA 9.7.16, in the form in which CUTLASS's headers and TVM's tests on a B200 have it. What only a figure of the manual shows, or
nobody has published, is marked (inferred).
"""

from typing import NamedTuple

import numpy as np

LANES = 128
QUARTER = 32  # lanes that one warp of a warpgroup reaches
THREADS = 32


class Cells(NamedTuple):
    """Cells of tensor memory, int32 arrays of one shape."""

    lane: np.ndarray
    column: np.ndarray


# ---- registers: tcgen05.ld and tcgen05.st


class MoveLayout(NamedTuple):
    """The registers of one shape of tcgen05.ld and .st: which bit of a thread's or a register's index each bit of a cell is."""

    lane: tuple[str, ...]  # sources of the bits of the lane, lowest first: "t0" is bit 0 of the thread, "r0" of the register
    column: tuple[str, ...]  # sources of the lowest bits of the column; the register's other bits follow
    split: bool = False  # True if threads 16 to 31 read columns that a constant of the instruction says


MOVES = {  # tables 49 and 50; CUTLASS copy_traits_sm100.hpp
    "32x32b": MoveLayout(lane=("t0", "t1", "t2", "t3", "t4"), column=()),
    "16x64b": MoveLayout(lane=("t2", "t3", "t4", "t0"), column=("t1",)),
    "16x128b": MoveLayout(lane=("t2", "t3", "t4", "r0"), column=("t0", "t1")),
    "16x256b": MoveLayout(lane=("t2", "t3", "t4", "r1"), column=("r0", "t0", "t1")),
    "16x32bx2": MoveLayout(lane=("t0", "t1", "t2", "t3"), column=(), split=True),
}
MOVE_REGISTERS = {"16x64b": 1, "16x128b": 2, "16x256b": 4, "32x32b": 1, "16x32bx2": 1}  # registers of .x1


def move_cells(tile: str, num: int, split_offset: int = 0, *, packed: bool = False) -> Cells:
    """Return the cells of the registers of tcgen05.ld and .st.

    Args:
        tile: Shape, such as "16x64b".
        num: Repetitions, 1 for .x1.
        split_offset: immHalfSplitoff of 16x32bx2: columns by which threads 16 to 31 lie behind the others.
        packed: True for .pack::16b and .unpack::16b: a register holds the low halves of two cells.

    Returns:
        Cells [32 threads, registers], with `packed` [32, registers, 2], the low half first.
    """
    row, registers = MOVES[tile], MOVE_REGISTERS[tile] * num
    index = {"t": np.arange(THREADS)[:, None], "r": np.arange(registers)[None, :]}
    bit = lambda source: index[source[0]] >> int(source[1:]) & 1
    lane = sum(bit(source) << i for i, source in enumerate(row.lane))
    column = sum((bit(source) << i for i, source in enumerate(row.column)), 0 * index["t"])
    used = [source for source in (*row.lane, *row.column) if source[0] == "r"]
    column = column + (index["r"] >> len(used) << len(row.column))
    lane, column = np.broadcast_arrays(lane, column)
    shift = split_offset * (index["t"] >> 4) if row.split else 0 * index["t"]
    if packed:
        pair = np.arange(2)
        lane, column = np.broadcast_to(lane[..., None], (*lane.shape, 2)), 2 * column[..., None] + pair + shift[..., None]
    else:
        column = column + shift
    return Cells(lane.astype(np.int32), column.astype(np.int32))


# ---- D


class AccumulatorLayout(NamedTuple):
    """One of the layouts A to G of D: where row r and column c of M x N lie."""

    name: str
    m: int
    cta_group: int
    ws: bool
    sparse: bool | None  # None: either
    cta_rows: int  # rows of D that a CTA holds
    group: int  # rows in consecutive lanes; the next group begins 32 lanes on
    parts: int = 1  # parts of the columns; each lies `cta_rows` lanes behind the one before

    @property
    def rows_above(self) -> bool:
        """True if the address may have lane 16, so that two such accumulators share their lanes."""
        return self.group == 16


ACCUMULATORS = (  # the table of 9.7.16.10.5; maps of CUTLASS mma_traits_sm100_frag.hpp and, for layout C, of TVM
    AccumulatorLayout("A", m=256, cta_group=2, ws=False, sparse=None, cta_rows=128, group=32),
    AccumulatorLayout("B", m=128, cta_group=2, ws=False, sparse=False, cta_rows=64, group=32, parts=2),
    AccumulatorLayout("C", m=128, cta_group=2, ws=False, sparse=True, cta_rows=64, group=16),
    AccumulatorLayout("D", m=128, cta_group=1, ws=False, sparse=None, cta_rows=128, group=32),
    AccumulatorLayout("D", m=128, cta_group=1, ws=True, sparse=None, cta_rows=128, group=32),
    AccumulatorLayout("E", m=64, cta_group=1, ws=True, sparse=None, cta_rows=64, group=32, parts=2),
    AccumulatorLayout("F", m=64, cta_group=1, ws=False, sparse=None, cta_rows=64, group=16),
    AccumulatorLayout("G", m=32, cta_group=1, ws=True, sparse=None, cta_rows=32, group=32, parts=4),
)


def accumulator_layout(m: int, cta_group: int = 1, *, ws: bool = False, sparse: bool = False) -> AccumulatorLayout:
    """Return the layout of D of a product.

    Args:
        m: Rows of D, of both CTAs with `cta_group` 2.
        cta_group: CTAs that compute together.
        ws: True for .ws.
        sparse: True for .sp.

    Raises:
        ValueError: There is no such product.
    """
    for row in ACCUMULATORS:
        if (row.m, row.cta_group, row.ws) == (m, cta_group, ws) and row.sparse in (None, sparse):
            return row
    raise ValueError(f"M = {m} with cta_group::{cta_group}{' and .ws' if ws else ''}: no layout of D. PTX ISA 9.7.16.10.5")


def row_lanes(layout: AccumulatorLayout) -> np.ndarray:
    """Return the lane of each row that a CTA holds, int32 [rows]: that of the first part of D, and of A.

    Args:
        layout: Row of ACCUMULATORS.
    """
    rows = np.arange(layout.cta_rows, dtype=np.int32)
    return rows % layout.group + QUARTER * (rows // layout.group)


class AccumulatorCells(NamedTuple):
    """Cells of D, int32 arrays [M, N]."""

    cta: np.ndarray  # 0, or 1 for the odd CTA of a pair
    lane: np.ndarray
    column: np.ndarray


def accumulator_cells(layout: AccumulatorLayout, n: int) -> AccumulatorCells:
    """Return the cells of D's elements.

    Args:
        layout: Row of ACCUMULATORS.
        n: Columns of D.
    """
    r, c = np.arange(layout.m, dtype=np.int32)[:, None], np.arange(n, dtype=np.int32)
    width = n // layout.parts
    lane = row_lanes(layout)[r % layout.cta_rows] + layout.cta_rows * (c // width)
    return AccumulatorCells(*np.broadcast_arrays(r // layout.cta_rows, lane, c % width))


# ---- A, scales and metadata


def multiplicand_lanes(layout: AccumulatorLayout) -> np.ndarray:
    """Return the lanes of the rows of A in tensor memory, int32 [copies, rows of a CTA].

    Where D is in several parts each part reads A from its own lanes, so A lies there once for each.

    Args:
        layout: Row of ACCUMULATORS.
    """
    return row_lanes(layout) + layout.cta_rows * np.arange(layout.parts, dtype=np.int32)[:, None]


class ScaleCells(NamedTuple):
    """Bytes of tensor memory that hold block scales, int32 arrays [rows, scales]; the same in all four quarters."""

    lane: np.ndarray  # within a quarter
    column: np.ndarray
    byte: np.ndarray


def scale_cells(rows: int, count: int, byte_id: int = 0) -> ScaleCells:
    """Return the bytes of the block scales of A's rows or of B's columns.

    Args:
        rows: Rows of A in a CTA, or N.
        count: Scales per row.
        byte_id: Scale factor ID of the instruction descriptor.

    Source: PTX ISA 9.7.16.10.7; more than four scales, which pass from one chunk of columns to the next, after CUTLASS (inferred).
    """
    x, byte = np.arange(rows, dtype=np.int32)[:, None], byte_id + np.arange(count, dtype=np.int32)
    chunk = 8 if rows > 128 else 4
    return ScaleCells(*np.broadcast_arrays(x % QUARTER, x // QUARTER + chunk * (byte // 4), byte % 4))


class MetadataCells(NamedTuple):
    """The places of the metadata of a sparse A, int32 arrays [rows, chunks] of fields of four bits."""

    lane: np.ndarray
    column: np.ndarray
    bit: np.ndarray  # lowest bit of the field


def metadata_cells(layout: AccumulatorLayout, k: int, element_bits: int) -> MetadataCells:
    """Return where the metadata of the rows of A that a CTA holds lies.

    The map of M = 64 without .ws and of layout C is (inferred) from the alignment of the address.

    Args:
        layout: Row of ACCUMULATORS.
        k: K of the product, of which half is stored.
        element_bits: Bits of an element of A as it is stored: 32, 16, 8 or 4.

    Source: PTX ISA 9.7.16.10.8; CUTLASS mma_traits_sm100_frag.hpp, tmem_e_frg.
    """
    chunk = {32: 2, 4: 8}.get(element_bits, 4)
    m, at = np.arange(layout.cta_rows, dtype=np.int32)[:, None], np.arange(0, k, chunk, dtype=np.int32)
    if element_bits >= 16:  # two rows, eight apart, share a cell
        span = 256 // element_bits  # logical elements of a row whose fields are 16 bits
        spread = 2 if layout.rows_above else 1
        lane = m % 8 + 8 * (at // span) + 16 * spread * (m // 16)
        bit = 16 * (m // 8 % 2) + 4 * (at % span // chunk)
        return MetadataCells(*np.broadcast_arrays(lane, 0 * at, bit))
    per_cell = 8 * chunk  # logical elements of a row whose fields fill a cell
    return MetadataCells(*np.broadcast_arrays(row_lanes(layout)[m], at // per_cell, 4 * (at % per_cell // chunk)))


# ---- tcgen05.cp and tcgen05.shift


class CopyLayout(NamedTuple):
    """The rows of one shape of tcgen05.cp."""

    rows: int
    lanes: tuple[tuple[int, ...], ...]  # first lanes of the copies of each block of `block` rows
    block: int


COPIES = {  # 9.7.16.9.2; TVM's tests on a B200
    ("128x256b", None): CopyLayout(128, ((0,),), 128),
    ("128x128b", None): CopyLayout(128, ((0,),), 128),
    ("4x256b", None): CopyLayout(4, ((0,), (32,), (64,), (96,)), 1),
    ("64x128b", "warpx2::02_13"): CopyLayout(64, ((0, 64),), 64),
    ("64x128b", "warpx2::01_23"): CopyLayout(64, ((0, 32), (64, 96)), 32),
    ("32x128b", "warpx4"): CopyLayout(32, ((0, 32, 64, 96),), 32),
}


def copy_lanes(tile: str, multicast: str | None) -> np.ndarray:
    """Return the lanes to which tcgen05.cp copies each row, int32 [rows, copies]; a row's bytes fill consecutive columns.

    Args:
        tile: Shape, such as "64x128b".
        multicast: "warpx2::02_13", "warpx2::01_23", "warpx4" or None.
    """
    layout = COPIES[tile, multicast]
    rows = np.arange(layout.rows, dtype=np.int32)
    first = np.array(layout.lanes, np.int32)[rows // layout.block]
    return first + (rows % layout.block)[:, None]


SHIFT_COLUMNS = 8  # columns of tcgen05.shift: 31x256b


def shift_sources() -> np.ndarray:
    """Return the lane whose contents each lane has after tcgen05.shift, int32 [128].

    Lane l gets what lane l + 1 held, except for the last lane of each quarter. That one shift moves all four quarters is (inferred).

    Source: PTX ISA 9.7.16.9.3; the direction: docstrings of NVIDIA's CuTe DSL.
    """
    lane = np.arange(LANES, dtype=np.int32)
    return np.where(lane % QUARTER == QUARTER - 1, lane, lane + 1)
