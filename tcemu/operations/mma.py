"""`mma` and `mma_sp`: registers -> codes -> sum -> codes -> registers, for any number of warps at once."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tcemu.architectures.lookup import Applied
from tcemu.arithmetic.kernels.warp import Words
from tcemu.arithmetic.model import Model
from tcemu.isa.instructions import Instruction
from tcemu.meshes import with_axes_of
from tcemu.operations.fragments import matrix_fragment
from tcemu.operations.launches import computed, of_mma
from tcemu.operations.operands import (
    instruction_product,
    lane_words,
    modelled,
    pack_matrix,
    register_words,
    require,
    unpack_matrix,
)
from tcemu.operations.selected import (
    Metadata,
    Scale,
    forbid_undefined_metadata,
    metadata_fields,
    scale_codes,
    scale_selector,
    sparsity_selector,
)
from tcemu.operations.warps import by_kernel, held_alike, kernel_of_instruction, selectors, warp_of

SelectorPair = tuple[ArrayLike, ArrayLike]  # (byte_id, thread_id)


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
    selector_a: SelectorPair = (0, 0),
    selector_b: SelectorPair = (0, 0),
) -> Array:
    """One dense `mma.sync` for each batch element: D = A·B + C, registers in, registers out, bit for bit.

    op: a PTX spelling or an Instruction; target: the GPU to imitate, as "sm_90a". Both are static under `jit`.
    a, b, c: uint32[..., 32, n], lane, then register in the order of the PTX statement, n = `op.registers(...)`; an f64 register is two
    words, low first. Leading axes are batch axes, any number of them; they broadcast.
    model: another arithmetic in place of the target's own; its fields may be traced (see `tcemu.Model`).
    scale_a, scale_b: with .block_scale only, and then both: uint32[..., 32], the register of four scale bytes in each lane.
    selector_a, selector_b: (byte_id, thread_id), which bytes of which lanes of a quad are read. Integers; traced ones are cut to the bits
    that the instruction reads.
    Returns uint32[..., 32, n]: D's registers. NaN words are the target's own.
    Raises Unsupported if PTX does not give `op` to `target`, NotModelled if nobody has evidence of its arithmetic there, TypeError or
    ValueError if registers have another dtype or shape, or a selector names what is not there.
    Source: PTX ISA 9.7.14.5.14, 9.7.14.3; for the arithmetic `tcemu.evidence`, and `tcemu.model` gives it.
    """
    applied = modelled(op, target, model, "mma", "mma")
    operands = bind_mma(applied.op, a, b, c, scale_a=scale_a, scale_b=scale_b, selector_a=selector_a, selector_b=selector_b)
    return _computed(applied, operands, selector_a=selector_a, selector_b=selector_b)


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
    selector_a: SelectorPair = (0, 0),
    selector_b: SelectorPair = (0, 0),
    checked: bool = False,
) -> Array:
    """One `mma.sp.sync` for each batch element: D = A·B + C with a sparse A, registers in, registers out, bit for bit.

    a: the stored half of A. e: uint32[..., 32], the register of sparsity metadata in each lane. selector: the sparsity selector, which says
    which lanes of a quad hold the metadata: one of `op.selectors`; a traced one is cut to its bits. All else is as in `mma`.
    An element of B that meets nothing stored takes no part, even if it is a NaN or Inf. A metadata field that PTX does not define does what
    silicon does: each stored element multiplies the element of B that its index names, in any order, also twice the same one.
    checked: raise UndefinedBehaviour for such a field, with lane, field and value; under a trace wrap the function in `tcemu.checked`.
    `tcemu.sparsify` makes A and its metadata from a matrix, `pack` their registers.
    Source: PTX ISA 9.7.14.6; for the arithmetic `tcemu.evidence`, and `tcemu.model` gives it.
    """
    applied = modelled(op, target, model, "mma_sp", "mma.sp")
    op = applied.op
    operands = bind_mma(op, a, b, c, e, selector=selector, scale_a=scale_a, scale_b=scale_b, selector_a=selector_a, selector_b=selector_b)
    if checked and operands.metadata is not None:
        forbid_undefined_metadata(op, operands.metadata)
    return _computed(applied, operands, selector, selector_a=selector_a, selector_b=selector_b)


class MmaOperands(NamedTuple):
    """The operands of an mma or mma.sp. a, b, c: uint32[..., 32, n]."""

    a: Array
    b: Array
    c: Array
    metadata: Metadata | None  # of mma.sp
    scale_a: Scale | None  # with .block_scale
    scale_b: Scale | None


def bind_mma(
    op: Instruction,
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike,
    e: ArrayLike | None = None,
    *,
    selector: ArrayLike | None = None,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    selector_a: SelectorPair = (0, 0),
    selector_b: SelectorPair = (0, 0),
) -> MmaOperands:
    """The operands of an mma or mma.sp, checked. Arguments and errors are those of `mma` and `mma_sp`."""
    a, b, c = register_words(op, "a", a), register_words(op, "b", b), register_words(op, "c", c)
    if (e is None or selector is None) == op.sparse:
        raise ValueError(f"{op}: a sparse instruction takes its metadata, e, and selector=; a dense one neither")
    metadata = None
    if e is not None and selector is not None:
        which = sparsity_selector(op, selector)
        metadata = Metadata(registers=lane_words(op, "e", e), selector=which)
    return MmaOperands(
        a=a,
        b=b,
        c=c,
        metadata=metadata,
        scale_a=_bind_scale(op, "scale_a", scale_a, selector_a),
        scale_b=_bind_scale(op, "scale_b", scale_b, selector_b),
    )


def _bind_scale(op: Instruction, name: str, registers: ArrayLike | None, selector: SelectorPair) -> Scale | None:
    require(op, name, registers, op.block_scale)
    if registers is None:
        return None
    return Scale(registers=lane_words(op, name, registers), selector=scale_selector(op, name, selector))


def _computed(applied: Applied, operands: MmaOperands, selector: ArrayLike | None = None, **selectors: SelectorPair) -> Array:
    op, clamped, model = applied.op, applied.clamped_metadata, applied.model

    def call(given: MmaOperands) -> Array:
        return computed(op, applied, partial(of_mma, op, given, selector, **selectors), lambda: _mma(op, clamped, model, given))

    return with_axes_of(lambda given: given.a[..., :1] | given.b[..., :1] | given.c[..., :1], call, operands)


@partial(jax.jit, static_argnames=("op", "clamped"))
def _mma(op: Instruction, clamped: bool, model: Model, operands: MmaOperands) -> Array:
    kernel = kernel_of_instruction(op, model, warp_of(op, clamped))
    return by_kernel(kernel, partial(_words, op), partial(_by_matrices, op, clamped, model), operands)


def _words(op: Instruction, operands: MmaOperands) -> Words:
    a, b, c, metadata, scale_a, scale_b = operands
    if not held_alike(op):
        c = matrix_fragment(op, "d").encode(unpack_matrix(op, "c", c)).astype(jnp.uint32)
    return Words(
        a, b, c,
        fields=None if metadata is None else metadata.registers,
        a_scales=None if scale_a is None else scale_a.registers,
        b_scales=None if scale_b is None else scale_b.registers,
        selectors=selectors(op, metadata, (scale_a, scale_b)),
    )  # fmt: skip


def _by_matrices(op: Instruction, clamped: bool, model: Model, operands: MmaOperands) -> Array:
    a, b, c = (unpack_matrix(op, name, getattr(operands, name)) for name in ("a", "b", "c"))
    metadata, scale_a, scale_b = operands.metadata, operands.scale_a, operands.scale_b
    fields = None if metadata is None else metadata_fields(op, metadata)
    scales = None
    if scale_a is not None and scale_b is not None:
        scales = scale_codes(op, "scale_a", scale_a), scale_codes(op, "scale_b", scale_b)
    return pack_matrix(op, "d", instruction_product(op, model, a, b, c, fields, scales, clamped))
