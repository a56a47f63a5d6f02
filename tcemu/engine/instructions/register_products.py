"""One instruction from registers to registers: by a backend that takes registers, else unpacked to matrices, once.

Each family (mma, wmma, wgmma) says how its operands become matrices, and how they lie in registers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.base.execution import NATIVE, execution
from tcemu.engine.architectures.lookup import Arithmetic
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.backends import dispatch
from tcemu.engine.backends.native import native_programs
from tcemu.engine.backends.product_requests import Program, RegisterForms, RegisterProduct, StatementLaunch
from tcemu.engine.isa.families import MatrixMultiply


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
