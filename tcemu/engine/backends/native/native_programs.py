"""The native backend: the instruction of the GPU that is here, for each form of a product, or the reason why none computes it."""

from collections.abc import Callable

import jax
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.base.execution import NATIVE, execution
from tcemu.engine.architectures.lookup import Arithmetic
from tcemu.engine.arithmetic.product_spec import Scales, product_spec
from tcemu.engine.backends.batched_calls import require_known_sizes
from tcemu.engine.backends.cuda import xla_launch
from tcemu.engine.backends.native import units
from tcemu.engine.backends.native.mma_products import multiply_by_mma, pad_to_instructions
from tcemu.engine.backends.native.native_statement import StatementLaunch, launch_cases, program_runner, uses_shared_memory
from tcemu.engine.backends.native.units import Unit, find_product_unit, find_statement_unit, require_same_padding, require_verified_movement
from tcemu.engine.backends.native.wgmma_products import ChunkPromotion, StepSizes, WgmmaReduction, multiply_by_wgmma
from tcemu.engine.backends.product_requests import (
    MatrixProduct,
    Program,
    PromotedOperands,
    PromotedProduct,
    RegisterProduct,
    compute_by_matrices,
)
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.engine.isa.families import Instruction


def registers_program(product: RegisterProduct) -> Program:
    """The GPU's own statement; else, for dense instructions, another instruction of the same bits, by matrices. Raises Unsupported."""
    op, model, target = product.op, product.model, units.gpu_target()
    spec = product_spec(op)
    assert product.statement is not None
    decoded = product.decoded_op or op
    try:
        require_same_padding(op, decoded, target)
        find_statement_unit(op, model, product.clamped_metadata, spec, target)
        return _statement_program(op, product.statement, target)
    except Unsupported:
        if op.sparse or op.scaling is not None:
            raise
    find_product_unit(product_spec(decoded), model, target)
    require_known_sizes(*jax.tree.leaves(product.operands))

    def program(operands: object) -> Array:
        with execution(NATIVE):
            return compute_by_matrices(product.forms, decoded, product.clamped_metadata, model, operands)

    return program


def movement_program(op: Instruction, statement: Callable[[], StatementLaunch]) -> Program:
    """The GPU's own statement for an instruction that only moves words. Raises Unsupported."""
    target = units.gpu_target()
    require_verified_movement(op, target)
    return _statement_program(op, statement, target)


def matrices_program(product: MatrixProduct) -> Program:
    """The kernel that reduces K by an instruction of the GPU. Raises Unsupported."""
    spec = product.spec
    unit = find_product_unit(spec, product.model, units.gpu_target())
    require_known_sizes(product.a, product.b, product.c)

    def program(a: Array, b: Array, c: Array, scales: Scales | None) -> Array:
        return _multiply(unit, spec.c, a, b, c)

    return program


def promoted_program(product: PromotedProduct) -> Program:
    """The kernel by `wgmma` that promotes the sums of chunks. Raises Unsupported."""
    spec, promotion = product.spec, product.promotion
    if product.operands.scales is not None:
        raise Unsupported("no kernel promotes products with block scales of the instruction")
    unit = find_product_unit(spec, product.model, units.gpu_target())
    require_known_sizes(product.operands.a, product.operands.b)
    if unit.op.family != "wgmma" or unit.op.d != F32:
        raise Unsupported(f"no kernel promotes sums of {unit.op}")
    rows, columns = promotion.scale_block_shape or (None, None)
    chunks = ChunkPromotion(promotion.instructions * spec.k, rows, columns, promotion.scale_block_shape is not None)
    call = WgmmaReduction(unit.op, StepSizes(unit.step, unit.own_step), chunks)

    def program(operands: PromotedOperands) -> Array:
        return multiply_by_wgmma(call, operands.a, operands.b, *(operands.block_scales or ()))

    return program


def refusal_reason(arithmetic: Arithmetic) -> str:
    """The reason why the GPU that is here does not compute an instruction's products itself; "" if it does."""
    op, model, spec = arithmetic.op, arithmetic.model, product_spec(arithmetic.op)
    try:
        if op.sparse or op.scaling is not None:
            find_statement_unit(op, model, arithmetic.clamped_metadata, spec, units.gpu_target())
        else:
            find_product_unit(spec, model, units.gpu_target())
    except Unsupported as error:
        return str(error)
    return ""


def _statement_program(op: Instruction, statement: Callable[[], StatementLaunch], target: str) -> Program:
    launch = statement()
    require_known_sizes(*launch.words.values())
    image = launch.words["memory"].shape[-1] if uses_shared_memory(op) and "memory" in launch.words else 0
    room = xla_launch.route().shared_bytes
    if 4 * image > room:
        raise Unsupported(f"a memory of {4 * image} bytes; a block of the GPU here has {room} bytes of shared memory")
    return lambda *_: launch_cases(op, launch, program_runner(target))


def _multiply(unit: Unit, addend: Format, a: Array, b: Array, c: Array) -> Array:
    c = c if addend == unit.op.d else convert(addend, unit.op.d, c)
    if unit.op.family == "wgmma":
        return multiply_by_wgmma(WgmmaReduction(unit.op, StepSizes(unit.step, unit.own_step)), a, b, c)
    return multiply_by_mma(unit.op, *pad_to_instructions(unit.op, a, b), c)
