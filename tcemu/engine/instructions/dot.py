"""`dot`: one instruction's product on matrices of raw codes, without registers."""

from __future__ import annotations

from functools import partial

import jax
from jax import Array
from jax.typing import ArrayLike

from tcemu.base.meshes import shard_like
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.formats.number_formats import F64, U4
from tcemu.engine.instructions.operand_checks import check_codes, check_matrix, instruction_product, require_operand, resolve_model
from tcemu.engine.instructions.selected_operands import check_scale_matrix
from tcemu.engine.isa.families import Instruction, MatrixMultiply


def dot(
    op: str | Instruction,
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike,
    *,
    target: str,
    model: Model | str | None = None,
    e: ArrayLike | None = None,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
) -> Array:
    """Compute one instruction's D = A·B + C on matrices of raw codes, without registers.

    Args:
        op: PTX spelling, short name or `Instruction` of mma, mma.sp, wmma.mma, wgmma or wgmma.sp. Static under `jit`.
        a: Codes [..., M, K], of a sparse instruction the stored [..., M, K/2]. Codes are unsigned integers; f64 codes are uint32[..., 2],
            low word first. Leading axes are batch axes; they broadcast. m8n8k4 with f16, which is four products, takes them as four
            elements of the batch.
        b: Codes [..., K, N].
        c: Codes [..., M, N].
        target: As in `mma`.
        model: As in `mma`.
        e: The 4-bit fields of a sparse instruction's metadata, [..., M, chunks].
        scale_a: Scale codes of a block-scaled instruction, [..., M, scale_vec].
        scale_b: Scale codes [..., scale_vec, N].

    Returns:
        Codes [..., M, N] in `op.d.dtype`.

    Raises:
        As `mma`.
    """
    applied = resolve_model(op, target, model, "dot")
    op, model, clamped = applied.op, applied.model, applied.clamped_metadata
    a, b = check_matrix(op, "a", a), check_matrix(op, "b", b)
    c = check_matrix(op, op.accumulator_operand, c)
    require_operand(op, "e", e, op.sparse)
    require_operand(op, "scale_a", scale_a, op.scaling is not None)
    require_operand(op, "scale_b", scale_b, op.scaling is not None)
    fields = None if e is None else check_codes(op, "e", e, U4, op.matrix_shape(op.metadata_operand))
    scales = None
    if op.scaling is not None:
        scales = check_scale_matrix(op, "scale_a", scale_a), check_scale_matrix(op, "scale_b", scale_b)

    of_words = op.d == F64

    def plain(given: tuple[Array, ...]) -> Array:
        """Something of D's shape. Codes of f64 have an axis of words."""
        (a, b), c = (v[..., 0] if of_words else v for v in given[:2]), given[2]
        axes = a[..., :1].astype(c.dtype) * b[..., :1, :].astype(c.dtype)
        return c * (axes[..., None] if of_words else axes)

    return shard_like(plain, lambda given: dot_codes(op, clamped, model, *given, fields, scales), (a, b, c))


@partial(jax.jit, static_argnames=("op", "clamped"))
def dot_codes(
    op: MatrixMultiply, clamped: bool, model: Model, a: Array, b: Array, c: Array, fields: Array | None, scales: tuple[Array, Array] | None
) -> Array:
    """`dot` on operands that were checked, by a model: see `instruction_product`."""
    return instruction_product(op, model, a, b, c, fields, scales, clamped)
