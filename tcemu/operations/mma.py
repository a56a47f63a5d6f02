"""`mma` and `mma_sp`: registers -> codes -> sum -> codes -> registers, for any number of warps at once."""

from __future__ import annotations

from functools import partial

import jax
from jax import Array
from jax.typing import ArrayLike

from tcemu.arithmetic.model import Model
from tcemu.isa.instructions import Instruction
from tcemu.operations.operands import (
    given_or_not,
    lane_words,
    modelled,
    multiply_add,
    pack_matrix,
    register_words,
    unpack_matrix,
)
from tcemu.operations.selected import (
    SCALES,
    forbid_undefined_metadata,
    metadata_fields,
    scale_codes,
    scale_selector,
    sparsity_selector,
)

Pair = tuple[ArrayLike, ArrayLike]


def mma(
    op: str | Instruction,
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike,
    *,
    target: str,
    model: Model | None = None,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    selector_a: Pair = (0, 0),
    selector_b: Pair = (0, 0),
) -> Array:
    """One dense `mma.sync` for each batch element: D = A·B + C, registers in, registers out, bit for bit.

    op: a PTX spelling or an Instruction; target: the GPU to imitate, as "sm_90a". Both are static under `jit`.
    a, b, c: uint32[..., 32, n], lane, then register in the order of the PTX statement, n = `op.registers(...)`; an f64 register is two
    words, low first. Leading axes are batch axes, any number of them; they broadcast.
    model: another arithmetic in place of the target's own; its fields may be traced (see `tcemu.Model`).
    scale_a, scale_b: with .block_scale only, and then both: uint32[..., 32], the register of four scale bytes in each lane. selector_a,
    selector_b: (byte_id, thread_id), integers, which bytes of which lanes of a quad are read; they may be traced, and are then cut to the
    bits that the instruction reads.
    Returns uint32[..., 32, n]: D's registers. NaN words are the target's own.
    Raises Unsupported if PTX does not give `op` to `target`, NotModelled if nobody has evidence of its arithmetic there, TypeError or
    ValueError if registers have another dtype or shape, or a selector names what is not there.
    Source: PTX ISA 9.7.14.5.14, 9.7.14.3; the arithmetic, with its evidence, is a row of `tcemu.models`.
    """
    applied = modelled(op, target, model, "mma", "mma")
    op, model, clamped = applied.op, applied.model, applied.clamped_metadata
    registers = [register_words(op, name, value) for name, value in (("a", a), ("b", b), ("c", c))]
    return _mma(op, clamped, model, *registers, None, *_scale_words(op, scale_a, scale_b, selector_a, selector_b))


def mma_sp(
    op: str | Instruction,
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike,
    e: ArrayLike,
    *,
    selector: ArrayLike,
    target: str,
    model: Model | None = None,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    selector_a: Pair = (0, 0),
    selector_b: Pair = (0, 0),
    checked: bool = False,
) -> Array:
    """One `mma.sp.sync` for each batch element: D = A·B + C with a sparse A, registers in, registers out, bit for bit.

    a: the stored half of A; e: uint32[..., 32], the register of sparsity metadata in each lane; selector: the sparsity selector, which
    lanes of a quad hold the metadata (one of `op.selectors`; it may be traced, and is then cut to its bits). All else as in `mma`.
    What is not stored takes no part: a NaN or Inf that B has there does not matter. A metadata field that PTX does not define does what
    silicon does: each stored element multiplies the element of B that its index names, in any order, twice the same too.
    checked: raise UndefinedBehaviour for such a field, with lane, field and value; under a trace wrap the function in `tcemu.checked`.
    `tcemu.sparsify` makes A and its metadata from a matrix, `pack` their registers.
    Source: PTX ISA 9.7.14.6; the arithmetic, with its evidence, is a row of `tcemu.models`.
    """
    applied = modelled(op, target, model, "mma_sp", "mma.sp")
    op, model, clamped = applied.op, applied.model, applied.clamped_metadata
    registers = [register_words(op, name, value) for name, value in (("a", a), ("b", b), ("c", c))]
    which = sparsity_selector(op, selector)
    fields = metadata_fields(op, lane_words(op, "e", e), which)
    if checked:
        forbid_undefined_metadata(op, fields, which)
    return _mma(op, clamped, model, *registers, fields, *_scale_words(op, scale_a, scale_b, selector_a, selector_b))


@partial(jax.jit, static_argnames=("op", "clamped"))
def _mma(
    op: Instruction,
    clamped: bool,
    model: Model,
    a: Array,
    b: Array,
    c: Array,
    fields: Array | None,
    scales: tuple[Array, Array] | None,
    selectors: tuple[tuple[Array, Array], tuple[Array, Array]] | None,
) -> Array:
    a, b, c = (unpack_matrix(op, name, registers) for name, registers in (("a", a), ("b", b), ("c", c)))
    if scales is not None and selectors is not None:
        x, y = (scale_codes(op, name, words, at) for name, words, at in zip(SCALES, scales, selectors, strict=True))
        scales = x, y
    return pack_matrix(op, "d", multiply_add(op, model, a, b, c, fields, scales, clamped))


def _scale_words(op: Instruction, scale_a: ArrayLike | None, scale_b: ArrayLike | None, selector_a: Pair, selector_b: Pair) -> tuple:
    """The scales' registers and selectors, or (None, None) for an instruction without."""
    given = [given_or_not(op, name, value, op.block_scale) for name, value in zip(SCALES, (scale_a, scale_b), strict=True)]
    if not op.block_scale:
        return None, None
    words = tuple(lane_words(op, name, value) for name, value in zip(SCALES, given, strict=True))
    return words, tuple(scale_selector(op, name, value) for name, value in zip(SCALES, (selector_a, selector_b), strict=True))
