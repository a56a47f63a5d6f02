"""Instructions on whole registers, where a kernel takes them: no matrix of codes is made. What the kernel is told of the registers are the
fragments of `fragments`, as they stand in `layouts`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tcemu.arithmetic.fitting import fitted
from tcemu.arithmetic.kernels.held import Held, Warp, row_by_row
from tcemu.arithmetic.kernels.launch import route
from tcemu.arithmetic.kernels.warp import Kernel, Words, kernel_of, product
from tcemu.arithmetic.model import Model
from tcemu.isa.instructions import Instruction
from tcemu.layouts import REGISTER_BITS, metadata_fragment, scale_fragment
from tcemu.operations.fragments import matrix_fragment
from tcemu.operations.operands import signature_of
from tcemu.operations.selected import Metadata, Scale
from tcemu.packing import container

TILE_COLUMNS = 8  # of D, that a warp of a warpgroup computes at once


def held(op: Instruction, name: str) -> Held:
    """How a warp's registers hold an operand."""
    fmt = getattr(op, name)
    return Held(matrix_fragment(op, name), fmt, *container(fmt, op.kind if name in "ab" else None))


def warp_of(op: Instruction, clamped: bool = False, *, a_in_memory: bool = False) -> Warp:
    """The operands of an mma or wgmma, dense or sparse. a_in_memory: A comes as codes, row by row, as B of a wgmma always does."""
    group = op.warps > 1
    c = held(op, "c" if op.c is not None else "d")
    if not held_alike(op):
        c = Held(matrix_fragment(op, "d"), c.format, REGISTER_BITS)
    a = held(op, "a") if not a_in_memory else Held(row_by_row(*op.matrix("a"), warps=op.warps), *_whole(op, "a"))
    b = Held(row_by_row(TILE_COLUMNS, op.k, transposed=True), *_whole(op, "b")) if group else held(op, "b")
    return Warp(
        a, b, c, held(op, "d"),
        warps=op.warps,
        tiles=op.n // TILE_COLUMNS if group else 1,
        metadata=metadata_fragment(op.k, op.container_bits("a")) if op.sparse else None,
        chunk=op.chunk,
        clamped=clamped,
        scales=None if op.scale_vec is None else (scale_fragment("a", op.scale_vec), scale_fragment("b", op.scale_vec)),
    )  # fmt: skip


def held_alike(op: Instruction) -> bool:
    """Whether C's elements are where D's are; else the kernel takes C as D is held, a register an element."""
    return op.c is None or matrix_fragment(op, "c") == matrix_fragment(op, "d")


def _whole(op: Instruction, name: str) -> tuple:
    """Format and container of codes that fill their dtype, as in memory."""
    fmt = getattr(op, name)
    return fmt, fmt.dtype.itemsize * 8


def kernel_of_instruction(op: Instruction, model: Model, warp: Warp) -> Kernel | None:
    """The kernel that computes the instruction; None where its model's fields are traced, its steps are no fused sums, or `tcemu.execution`
    leaves it to the GPU's own instruction."""
    signature = signature_of(op)
    if model.result.is_integer or signature.native is not None:
        return None
    model = fitted(model, signature, None if signature.scale is None else signature.k // signature.scale_vec)
    if model.common is not None:
        signature = signature._replace(a=model.common, b=model.common)
    return kernel_of(model, signature, warp)


def by_kernel(found: Kernel | None, words: Callable[[Any], Words], portable: Callable[[Any], Array], operands: Any) -> Array:
    """D's registers: by the kernel on the platform that has it, else by `portable`, which takes the operands as they are.

    words: makes of the operands what the kernel takes.
    """
    empty = any(0 in v.shape for v in jax.tree.leaves(operands))
    if found is None or empty or route().missing:
        return portable(operands)
    return lax.platform_dependent(operands, default=portable, cuda=lambda operands: product(found, words(operands)))


def selectors(op: Instruction, metadata: Metadata | None, scales: tuple[Scale | None, ...] = ()) -> Array | None:
    """The values of all selectors, as `Words` has them."""
    values = [] if metadata is None else [metadata.selector]
    for scale in scales:
        if scale is not None:
            assert op.scale_vec is not None
            values += [scale.selector.byte_id // op.scale_vec, scale.selector.thread_id]
    return jnp.stack(values) if values else None
