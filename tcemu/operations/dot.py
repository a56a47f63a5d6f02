"""`dot`: one instruction's product on matrices of raw codes, without registers."""

from functools import partial
from typing import Any

import jax
from jax import Array
from jax.typing import ArrayLike

from tcemu.arithmetic.model import Model
from tcemu.formats import U4
from tcemu.isa.instructions import Instruction
from tcemu.operations.operands import (
    codes_of,
    given_or_not,
    matrix_codes,
    modelled,
    multiply_add,
)
from tcemu.operations.selected import SCALES, scale_matrix


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

    a: codes [..., M, K], of a sparse instruction the stored [..., M, K/2]; b: [..., K, N]; c: [..., M, N], unsigned integers; f64 codes are
    uint32[..., 2], low word first. (Each of the four products of m8n8k4 with f16 is one element of the batch.) e: the 4-bit fields of a
    sparse instruction's metadata, [..., M, chunks]. scale_a, scale_b: the scale codes of a block-scaled one, [..., M, scale_vec] and
    [..., scale_vec, N]. Leading axes broadcast. Returns codes [..., M, N] in `op.d.dtype`. Raises as `mma`.
    """
    applied = modelled(op, target, model, "dot")
    op, model, clamped = applied.op, applied.model, applied.clamped_metadata
    codes = [matrix_codes(op, name, value) for name, value in (("a", a), ("b", b), ("d" if op.c is None else "c", c))]
    fields = given_or_not(op, "e", e, op.sparse)
    fields = None if fields is None else codes_of(op, "e", fields, U4, op.matrix(op.metadata))
    scales = [given_or_not(op, name, value, op.block_scale) for name, value in zip(SCALES, (scale_a, scale_b), strict=True)]
    scales = tuple(scale_matrix(op, name, value) for name, value in zip(SCALES, scales, strict=True)) if op.block_scale else None
    return dot_by_model(op, clamped, model, *codes, fields, scales)


@partial(jax.jit, static_argnames=("op", "clamped"))
def dot_by_model(op: Instruction, clamped: bool, model: Model, a: Array, b: Array, c: Array, fields: Array | None, scales: Any) -> Array:
    """`dot` with checked operands and the model that applies. clamped: see `sparsity.gather`."""
    return multiply_add(op, model, a, b, c, fields, scales, clamped)
