"""Products as backends are asked for them: registers of one instruction, matrices of codes, and matrices whose sums are promoted.

For kernels that take registers: the place of each element of an instruction's operands, and the words.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, Promotion, Scales
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.engine.layouts.fragment_layouts import LANES, Fragment, Layout

Program = Callable[..., Array]
# a matrix in memory, row by row, cut evenly among the lanes: w warp of a warpgroup; r, j row; h, i column
ROW_BY_ROW = Layout("(w r h) (j i)", "(w r j) (h i)")


class StatementLaunch(NamedTuple):
    """The operands of a PTX statement: its form, its immediates, and the operands' words with batch axes in front."""

    form: int
    immediates: Mapping[str, Any]
    words: Mapping[str, Array]


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


class RegisterForms(NamedTuple):
    """The places of a family's operands in registers, for backends that take registers. Static under `jit`."""

    places: Callable[[Any, bool, Any], WarpOperands]  # (op, clamped_metadata, operands) -> the places of the elements
    words: Callable[[Any, Any], KernelRegisters]  # (op, operands) -> the registers


class RegisterProduct(NamedTuple):
    """One instruction on the registers of a batch of warps. Its programs take the operands and return the registers of D."""

    op: MatrixMultiply
    model: Model
    clamped_metadata: bool  # see `layouts.sparsity.gather`
    operands: Any  # the family's bound operands, a pytree
    forms: RegisterForms | None  # None: no kernel takes the family's fragments
    statement: Callable[[], StatementLaunch] | None = None  # the operands as the PTX statement takes them; raises Unsupported
    # the instruction in whose formats registers are decoded, where `op` is the one that PTX has; None: `op`
    decoded_op: MatrixMultiply | None = None


class MatrixProduct(NamedTuple):
    """D = A·B + C on matrices of codes, any batch axes in front. Its programs take (a, b, c, scales)."""

    model: Model
    spec: ProductSpec
    a: Array  # [..., M, K], K in whole instructions
    b: Array  # [..., K, N]
    c: Array  # [..., M, N], with every batch axis
    scales: Scales | None
    by_columns: bool = False  # B is the transposition of an array [..., N, K]

    @property
    def scale_block(self) -> int | None:
        """Products along K that share a block scale; None where there are no scales."""
        return None if self.scales is None else self.a.shape[-1] // jnp.shape(self.scales[0])[-1]


class PromotedOperands(NamedTuple):
    """Operands of a product whose sums are promoted. Codes as in `MatrixProduct`, K in whole chunks."""

    a: Array
    b: Array
    scales: tuple[Array, Array] | None
    block_scales: tuple[Array, Array] | None  # f32 codes [..., groups of M, chunks] and [..., chunks, groups of N]


class PromotedProduct(NamedTuple):
    """A·B as an f32 sum of promoted chunks. Its programs take the operands and return f32 codes [..., M, N]."""

    model: Model
    spec: ProductSpec
    promotion: Promotion
    operands: PromotedOperands
    by_chunks: Callable[[PromotedOperands], Array]  # the same by one `MatrixProduct` a chunk
