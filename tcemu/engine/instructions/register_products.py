"""One instruction from registers to registers: by a backend that takes registers, else unpacked to matrices, once.

Each family (mma, wmma, wgmma) says how its operands become matrices, and how they lie in registers. Those of mma and wgmma lie there as
the fragments of `tcemu.layouts` say, which kernels have as tables of places.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.base.execution import NATIVE, execution
from tcemu.engine.architectures.lookup import Arithmetic
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.backends import dispatch
from tcemu.engine.backends.native import native_programs
from tcemu.engine.backends.product_requests import (
    Program,
    RegisterForms,
    RegisterProduct,
    StatementLaunch,
    StoredOperand,
    WarpOperands,
    row_by_row,
)
from tcemu.engine.instructions.selected_operands import MetadataRegisters, ScaleRegisters
from tcemu.engine.isa.families import Instruction, MatrixMultiply
from tcemu.engine.isa.operand_fragments import matrix_fragment
from tcemu.engine.layouts.fragment_layouts import REGISTER_BITS, metadata_fragment, scale_fragment
from tcemu.engine.layouts.packing import container

TILE_COLUMNS = 8  # columns of D that a warp of a warpgroup computes at once


class Family(NamedTuple):
    """The functions that bring a family's own operands into matrices and registers. Static under `jit`."""

    by_matrices: Callable[[Any, bool, Model, Any], Array]  # (op, clamped_metadata, model, operands) -> registers of D
    forms: RegisterForms | None = None  # None: no kernel takes the family's fragments


def compute_registers(
    arithmetic: Arithmetic, family: Family, operands: Any, statement: Callable[[], StatementLaunch], op: MatrixMultiply | None = None
) -> Array:
    """Compute one instruction for each warp of a batch.

    Args:
        arithmetic: The instruction, and its model on a target.
        family: The functions that bring its operands into matrices and registers.
        operands: The family's bound operands, a pytree.
        statement: Makes the operands of the PTX statement; raises Unsupported where it cannot.
        op: The instruction whose compiled emulation serves this one too; None: itself.

    Returns:
        The registers of D, uint32.

    Raises:
        Unsupported: `tcemu.execution` says "native", and the GPU has no instruction of this arithmetic.
    """
    decoded, clamped, model = arithmetic.decoded_op, arithmetic.clamped_metadata, arithmetic.model
    product = RegisterProduct(arithmetic.op, model, clamped, operands, family.forms, statement, decoded)
    emulate = partial(_emulate, family, op or decoded, clamped, model, operands)
    return dispatch.choose_native(str(arithmetic.op), lambda: partial(_native_program(family, product), operands), emulate)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _emulate(family: Family, op: MatrixMultiply, clamped: bool, model: Model, operands: Any) -> Array:
    by_matrices = partial(family.by_matrices, op, clamped, model)
    return dispatch.multiply_registers(RegisterProduct(op, model, clamped, operands, family.forms), by_matrices, operands)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _by_matrices(family: Family, op: MatrixMultiply, clamped: bool, model: Model, operands: Any) -> Array:
    return family.by_matrices(op, clamped, model, operands)


def _native_program(family: Family, product: RegisterProduct) -> Program:
    """The GPU's own statement; else, for dense instructions, another instruction of the same bits, by matrices. Raises Unsupported."""
    op, decoded, clamped, model = product.op, product.decoded_op or product.op, product.clamped_metadata, product.model
    try:
        return native_programs.registers_program(product)
    except Unsupported:
        if op.sparse or op.scaling is not None:
            raise
    native_programs.require_product(product)

    def program(operands: Any) -> Array:
        with execution(NATIVE):
            return _by_matrices(family, decoded, clamped, model, operands)

    return program


# ---- the registers of mma and wgmma for kernels


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
