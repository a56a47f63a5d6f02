"""`dot`: one instruction's product on matrices of raw codes, without registers."""

from __future__ import annotations

from functools import partial

import jax
from jax import Array
from jax.typing import ArrayLike

from tcemu.arithmetic.model import Model
from tcemu.formats import F64, U4
from tcemu.isa.instructions import Instruction
from tcemu.meshes import with_axes_of
from tcemu.operations.operands import codes_of, instruction_product, matrix_codes, modelled, require
from tcemu.operations.selected import scale_matrix


def dot(
    op: str | Instruction,
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike,
    *,
    target: str,
    model: Model | None = None,
    e: ArrayLike | None = None,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
) -> Array:
    """One instruction's D = A·B + C on raw codes, without registers: mma, mma.sp, wmma.mma, wgmma and wgmma.sp.

    a: codes [..., M, K], of a sparse instruction the stored [..., M, K/2]. b: [..., K, N]. c: [..., M, N]. Codes are unsigned integers;
    those of f64 are uint32[..., 2], low word first. Leading axes are batch axes and broadcast. m8n8k4 with f16, which is four products,
    takes them as four elements of the batch.
    target, model: as in `mma`. e: the 4-bit fields of a sparse instruction's metadata, [..., M, chunks]. scale_a, scale_b: the scale codes
    of a block-scaled one, [..., M, scale_vec] and [..., scale_vec, N].
    Returns codes [..., M, N] in `op.d.dtype`. Raises as `mma`.
    """
    applied = modelled(op, target, model, "dot")
    op, model, clamped = applied.op, applied.model, applied.clamped_metadata
    a, b = matrix_codes(op, "a", a), matrix_codes(op, "b", b)
    c = matrix_codes(op, "d" if op.c is None else "c", c)
    require(op, "e", e, op.sparse)
    require(op, "scale_a", scale_a, op.block_scale)
    require(op, "scale_b", scale_b, op.block_scale)
    fields = None if e is None else codes_of(op, "e", e, U4, op.matrix(op.metadata))
    scales = None
    if op.block_scale:
        scales = scale_matrix(op, "scale_a", scale_a), scale_matrix(op, "scale_b", scale_b)

    of_words = op.d == F64

    def plain(given: tuple[Array, ...]) -> Array:
        """Something of D's shape. Codes of f64 have an axis of words."""
        (a, b), c = (v[..., 0] if of_words else v for v in given[:2]), given[2]
        axes = a[..., :1].astype(c.dtype) * b[..., :1, :].astype(c.dtype)
        return c * (axes[..., None] if of_words else axes)

    return with_axes_of(plain, lambda given: dot_codes(op, clamped, model, *given, fields, scales), (a, b, c))


@partial(jax.jit, static_argnames=("op", "clamped"))
def dot_codes(
    op: Instruction, clamped: bool, model: Model, a: Array, b: Array, c: Array, fields: Array | None, scales: tuple[Array, Array] | None
) -> Array:
    """`dot` on operands that were checked, by a model: see `instruction_product`."""
    return instruction_product(op, model, a, b, c, fields, scales, clamped)
