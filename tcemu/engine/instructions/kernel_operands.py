"""The registers of mma and wgmma for kernels, with the fragments of `tcemu.layouts` as tables of places."""

import jax.numpy as jnp
from jax import Array

from tcemu.engine.backends.product_requests import StoredOperand, WarpOperands, row_by_row
from tcemu.engine.instructions.selected_operands import MetadataRegisters, ScaleRegisters
from tcemu.engine.isa.families import Instruction, MatrixMultiply
from tcemu.engine.isa.operand_fragments import matrix_fragment
from tcemu.engine.layouts.fragment_layouts import REGISTER_BITS, metadata_fragment, scale_fragment
from tcemu.engine.layouts.packing import container

TILE_COLUMNS = 8  # columns of D that a warp of a warpgroup computes at once


def stored_operand(op: MatrixMultiply, name: str) -> StoredOperand:
    """Returns the layout of an operand in a warp's registers."""
    fmt = op.operand_format(name)
    return StoredOperand(matrix_fragment(op, name), fmt, *container(fmt, op.kind if name in "ab" else None))


def warp_operands(op: MatrixMultiply, clamped: bool = False, *, a_in_memory: bool = False) -> WarpOperands:
    """The operands of an mma or wgmma, dense or sparse. a_in_memory: A comes as codes, row by row, as B of a wgmma always does."""
    group = op.warps > 1
    c = stored_operand(op, op.accumulator_operand)
    if not accumulators_match(op):
        c = StoredOperand(matrix_fragment(op, "d"), c.format, REGISTER_BITS)
    a = stored_operand(op, "a") if not a_in_memory else StoredOperand(row_by_row(*op.matrix_shape("a"), warps=op.warps), *_whole(op, "a"))
    b = StoredOperand(row_by_row(TILE_COLUMNS, op.k, transposed=True), *_whole(op, "b")) if group else stored_operand(op, "b")
    return WarpOperands(
        a, b, c, stored_operand(op, "d"),
        warps=op.warps,
        tiles=op.n // TILE_COLUMNS if group else 1,
        metadata=metadata_fragment(op.k, op.container_bits("a")) if op.sparse else None,
        chunk=op.chunk_size,
        clamped=clamped,
        scales=None if op.scaling is None else (scale_fragment("a", op.scaling.count), scale_fragment("b", op.scaling.count)),
    )  # fmt: skip


def accumulators_match(op: MatrixMultiply) -> bool:
    """Returns whether C's elements are where D's are; else the kernel takes C in D's fragment, a register an element."""
    return op.accumulator_operand == "d" or matrix_fragment(op, "c") == matrix_fragment(op, "d")


def _whole(op: Instruction, name: str) -> tuple:
    """Format and container of codes that fill their dtype, as in memory."""
    fmt = op.operand_format(name)
    return fmt, fmt.dtype.itemsize * 8


def stack_selectors(op: MatrixMultiply, metadata: MetadataRegisters | None, scales: tuple[ScaleRegisters | None, ...] = ()) -> Array | None:
    """The values of all selectors, as `Words` has them."""
    values = [] if metadata is None else [metadata.selector]
    for scale in scales:
        if scale is not None:
            values += [scale.selector.byte_id // op.require_scaling().count, scale.selector.thread_id]
    return jnp.stack(values) if values else None
