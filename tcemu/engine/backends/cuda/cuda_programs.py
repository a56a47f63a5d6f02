"""The CUDA backend: for each form of a product the kernel that takes it, or the reason why none does."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tcemu.base.errors import Unsupported
from tcemu.engine.arithmetic.fitting import specialize
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, Promotion, Scales, product_spec
from tcemu.engine.backends.batched_calls import require_known_sizes
from tcemu.engine.backends.cuda import xla_launch
from tcemu.engine.backends.cuda.matrix_kernels import MatrixKernels, find_matrix_kernels, multiply_by_kernels
from tcemu.engine.backends.cuda.register_kernel import RegisterKernel, find_register_kernel, multiply_by_register_kernel
from tcemu.engine.backends.product_requests import MatrixProduct, Program, PromotedOperands, PromotedProduct, RegisterProduct, WarpOperands
from tcemu.engine.formats.coding import recode
from tcemu.engine.isa.families import Instruction

NOT_TAKEN = "it does not take this arithmetic"


def registers_program(product: RegisterProduct) -> Program:
    """The kernel that takes registers as they are. Raises Unsupported."""
    op, forms, operands = product.op, product.forms, product.operands
    _require_kernels(*jax.tree.leaves(operands))
    if forms is None:
        raise Unsupported(NOT_TAKEN)
    if any(0 in v.shape for v in jax.tree.leaves(operands)):
        raise Unsupported("the batch is empty")
    kernel = find_instruction_kernel(op, product.model, forms.places(op, product.clamped_metadata, operands))
    if kernel is None:
        raise Unsupported(NOT_TAKEN)
    words = forms.words  # the program keeps no operand alive
    return lambda operands: multiply_by_register_kernel(kernel, words(op, operands))


def find_instruction_kernel(op: Instruction, model: Model, warp: WarpOperands) -> RegisterKernel | None:
    """Returns the kernel that computes an instruction on registers, or None where its model has traced fields or no fused steps."""
    spec = product_spec(op)
    if model.result.is_integer:
        return None
    return find_register_kernel(*specialize(model, spec, spec.k // spec.scale_vec if spec.scale_vec else None), warp)


def matrices_program(product: MatrixProduct) -> Program:
    """The kernels that reduce K of matrices. Raises Unsupported."""
    kernels = _find_kernels(product.model, product.spec, product.scale_block, None, product.a, product.b, product.c)

    def program(a: Array, b: Array, c: Array, scales: Scales | None) -> Array:
        return multiply_by_kernels(kernels, a, b, recode(product.spec.c, kernels.result, c), scales)

    return program


def promoted_program(product: PromotedProduct) -> Program:
    """The kernels that promote the sums of chunks while they reduce K. Raises Unsupported."""
    a, scales = product.operands.a, product.operands.scales
    block = None if scales is None else a.shape[-1] // scales[0].shape[-1]
    kernels = _find_kernels(product.model, product.spec, block, product.promotion, *jax.tree.leaves(product.operands))
    batch = jnp.broadcast_shapes(*(v.shape[:-2] for v in jax.tree.leaves(product.operands)))

    def program(operands: PromotedOperands) -> Array:
        a, b, scales, block_scales = operands
        if block_scales is not None:
            rows, columns = product.promotion.scale_block_shape or (None, None)
            block_scales = _repeat(block_scales[0], rows, a.shape[-2], -2), _repeat(block_scales[1], columns, b.shape[-1], -1)
        zeros = jnp.zeros((*batch, a.shape[-2], b.shape[-1]), jnp.uint32)
        return multiply_by_kernels(kernels, a, b, zeros, scales, block_scales)

    return program


def _require_kernels(*operands: Any) -> None:
    """Raises Unsupported where kernels cannot run on the GPUs that are here, or a size is not known."""
    if missing := xla_launch.route().missing:
        raise Unsupported(missing)
    require_known_sizes(*operands)


def _find_kernels(model: Model, spec: ProductSpec, block: int | None, promotion: Promotion | None, *operands: Any) -> MatrixKernels:
    _require_kernels(*operands)
    if model.result.is_integer:
        raise Unsupported(NOT_TAKEN)
    kernels = find_matrix_kernels(*specialize(model, spec, block), promotion, (spec.a, spec.b))
    if kernels is None:
        raise Unsupported(NOT_TAKEN)
    return kernels


def _repeat(scales: Array, size: int | None, length: int, axis: int) -> Array:
    """One scale for each row or column. size: rows or columns that share a scale; None: all of them."""
    return lax.slice_in_dim(jnp.repeat(scales, size or length, axis), 0, length, axis=axis)
