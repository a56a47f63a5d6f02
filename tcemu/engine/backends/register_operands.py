"""The operands of one instruction in registers, for kernels that take registers: the place of each element, and the words."""

from typing import NamedTuple

from jax import Array

from tcemu.engine.formats.number_formats import Format
from tcemu.engine.layouts.fragment_layouts import LANES, Fragment, Layout

# a matrix in memory, row by row, cut evenly among the lanes: w warp of a warpgroup; r, j row; h, i column
ROW_BY_ROW = Layout("(w r h) (j i)", "(w r j) (h i)")


class StoredOperand(NamedTuple):
    """An operand as words: which element is where, and the bits that hold it."""

    fragment: Fragment
    format: Format
    container_bits: int
    shift: int = 0  # position of the code in its container, in bits


class WarpOperands(NamedTuple):
    """The operands of one instruction as a warp, or each warp of a group, holds them. Hashable: a compiled kernel belongs to each."""

    a: StoredOperand
    b: StoredOperand  # for a warpgroup: eight columns, row by row of their transpose
    c: StoredOperand
    d: StoredOperand
    warps: int = 1
    tiles: int = 1  # tiles of eight columns that B and D are cut into
    metadata: Fragment | None = None  # metadata of a sparse instruction
    chunk: int = 0  # elements along K of one field of metadata
    clamped: bool = False  # see `sparsity.gather`
    scales: tuple[Fragment, Fragment] | None = None


def row_by_row(rows: int, columns: int, *, warps: int = 1, transposed: bool = False) -> Fragment:
    """A matrix in memory as lanes read it, each as many neighbouring elements. Rows, columns: powers of two; transposed: as `Fragment`."""
    each = rows * columns // (LANES * warps)
    of_row = min(each, columns)
    sizes = {"w": warps, "r": rows * of_row // (each * warps), "h": columns // of_row, "j": each // of_row, "i": of_row}
    return Fragment(ROW_BY_ROW, tuple(sizes.items()), transposed)


class KernelRegisters(NamedTuple):
    """The operands, with batch axes in front."""

    a: Array  # uint32 [..., lanes, words], as `WarpOperands` says
    b: Array
    c: Array
    fields: Array | None = None  # metadata of a sparse instruction: uint32 [..., lanes], a register each
    a_scales: Array | None = None  # scales of a block-scaled instruction
    b_scales: Array | None = None
    selectors: Array | None = None  # int32 [..., values]: the sparsity selector; of A's and B's scales the group of bytes and the thread
