"""`mma` and `mma_sp`: registers -> codes -> sum -> codes -> registers, for any number of warps at once."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tcemu.base.meshes import shard_like
from tcemu.engine.architectures.lookup import Arithmetic
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.backends.product_requests import KernelRegisters, RegisterForms, WarpOperands
from tcemu.engine.instructions.operand_checks import (
    check_lane_registers,
    check_registers,
    instruction_product,
    pack_matrix,
    require_operand,
    resolve_model,
    unpack_matrix,
)
from tcemu.engine.instructions.register_products import Family, accumulators_match, compute_registers, stack_selectors, warp_operands
from tcemu.engine.instructions.selected_operands import (
    MetadataRegisters,
    ScaleRegisters,
    forbid_undefined_metadata,
    metadata_fields,
    scale_codes,
    scale_selector,
    sparsity_selector,
)
from tcemu.engine.instructions.statement_operands import mma_launch
from tcemu.engine.isa.families import Instruction, MatrixMultiply
from tcemu.engine.isa.operand_fragments import matrix_fragment

SelectorPair = tuple[ArrayLike, ArrayLike]  # (byte_id, thread_id)


def mma(
    op: str | Instruction,
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike,
    *,
    target: str,
    model: Model | str | None = None,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    selector_a: SelectorPair = (0, 0),
    selector_b: SelectorPair = (0, 0),
) -> Array:
    """Compute one dense `mma.sync` for each warp of a batch: D = A·B + C, from registers to registers, bit for bit.

    Args:
        op: PTX spelling, short name or `Instruction`. Static under `jit`.
        a: uint32[..., 32, n], lane, then register in the order of the PTX statement, n = `op.register_count("a")`. An f64 register is two
            words, low first. Leading axes are batch axes; they broadcast.
        b: As `a`.
        c: As `a`.
        target: GPU or target to emulate, as "H100" or "sm_90a". Static under `jit`.
        model: Another arithmetic in place of the target's own. Its fields may be traced (see `tcemu.Model`).
        scale_a: With .block_scale only, and then with `scale_b`: uint32[..., 32], the register of four scale bytes in each lane.
        scale_b: As `scale_a`.
        selector_a: (byte_id, thread_id), the bytes and the lane of each quad that hold the scales of A. Integers; traced ones are cut to
            the bits that the instruction reads.
        selector_b: As `selector_a`, for B.

    Returns:
        D's registers, uint32[..., 32, n]. NaN words are the target's own.

    Raises:
        Unsupported: PTX does not give `op` to `target`.
        NotModelled: There is no evidence of the target's arithmetic for `op`.
        TypeError: An operand has another dtype.
        ValueError: An operand has another shape, or a selector names nothing.

    Source: PTX ISA 9.7.14.5.14, 9.7.14.3; the arithmetic is `tcemu.evidence(op, target)`.

    Example:
        >>> import tcemu
        >>> import numpy as np
        >>> op, one = tcemu.parse("f16"), np.float16(1).view(np.uint16)
        >>> shapes = {"a": (16, 16), "b": (16, 8)}
        >>> a, b = (tcemu.pack(op, name, np.full(shape, one)) for name, shape in shapes.items())
        >>> d = tcemu.mma(op, a, b, tcemu.pack(op, "c", np.zeros((16, 8), np.uint32)), target="H100")
        >>> d.shape, float(tcemu.unpack(op, "d", d).view(np.float32)[0, 0])
        ((32, 4), 16.0)
    """
    applied = resolve_model(op, target, model, "mma", "mma")
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
    model: Model | str | None = None,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    selector_a: SelectorPair = (0, 0),
    selector_b: SelectorPair = (0, 0),
    checked: bool = False,
) -> Array:
    """Compute one `mma.sp.sync` for each warp of a batch: D = A·B + C with a sparse A, from registers to registers, bit for bit.

    An element of B that meets no stored element takes no part, even if it is NaN or Inf. For a metadata field that PTX does not define the
    result is that of silicon: each stored element multiplies the element of B that its index names, in any order, also twice the same one.
    `tcemu.sparsify` makes A and its metadata from a matrix, `tcemu.pack` makes their registers.

    Args:
        op: PTX spelling, short name or `Instruction`. Static under `jit`.
        a: Registers of the stored half of A, as in `mma`.
        b: Registers, as in `mma`.
        c: Registers, as in `mma`.
        e: uint32[..., 32], the register of sparsity metadata in each lane.
        selector: Sparsity selector, the lanes of a quad that hold the metadata: one of `op.selectors`. A traced one is cut to its bits.
        target: As in `mma`.
        model: As in `mma`.
        scale_a: As in `mma`.
        scale_b: As in `mma`.
        selector_a: As in `mma`.
        selector_b: As in `mma`.
        checked: Report metadata fields that PTX does not define, with lane, field and value. Under a trace wrap the function in
            `tcemu.checked`.

    Returns:
        D's registers, uint32[..., 32, n].

    Raises:
        Unsupported: PTX does not give `op` to `target`.
        NotModelled: There is no evidence of the target's arithmetic for `op`.
        TypeError: An operand has another dtype.
        ValueError: An operand has another shape, or a selector names nothing.
        UndefinedBehaviour: With `checked`, a metadata field is undefined.

    Source: PTX ISA 9.7.14.6; the arithmetic is `tcemu.evidence(op, target)`.
    """
    applied = resolve_model(op, target, model, "mma_sp", "mma.sp")
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
    metadata: MetadataRegisters | None  # metadata of mma.sp
    scale_a: ScaleRegisters | None  # scales, with .block_scale
    scale_b: ScaleRegisters | None


def bind_mma(
    op: MatrixMultiply,
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
    a, b, c = check_registers(op, "a", a), check_registers(op, "b", b), check_registers(op, "c", c)
    if (e is None or selector is None) == op.sparse:
        raise ValueError(f"{op}: a sparse instruction takes its metadata, e, and selector=; a dense one neither")
    metadata = None
    if e is not None and selector is not None:
        which = sparsity_selector(op, selector)
        metadata = MetadataRegisters(registers=check_lane_registers(op, "e", e), selector=which)
    return MmaOperands(
        a=a,
        b=b,
        c=c,
        metadata=metadata,
        scale_a=_bind_scale(op, "scale_a", scale_a, selector_a),
        scale_b=_bind_scale(op, "scale_b", scale_b, selector_b),
    )


def _bind_scale(op: MatrixMultiply, name: str, registers: ArrayLike | None, selector: SelectorPair) -> ScaleRegisters | None:
    require_operand(op, name, registers, op.scaling is not None)
    if registers is None:
        return None
    return ScaleRegisters(registers=check_lane_registers(op, name, registers), selector=scale_selector(op, name, selector))


def _computed(applied: Arithmetic, operands: MmaOperands, selector: ArrayLike | None = None, **selectors: SelectorPair) -> Array:
    def call(given: MmaOperands) -> Array:
        return compute_registers(applied, MMA, given, partial(mma_launch, applied.op, given, selector, **selectors))

    return shard_like(lambda given: given.a[..., :1] | given.b[..., :1] | given.c[..., :1], call, operands)


def _places(op: MatrixMultiply, clamped: bool, operands: MmaOperands) -> WarpOperands:
    return warp_operands(op, clamped)


def _words(op: MatrixMultiply, operands: MmaOperands) -> KernelRegisters:
    a, b, c, metadata, scale_a, scale_b = operands
    if not accumulators_match(op):
        c = matrix_fragment(op, "d").encode(unpack_matrix(op, "c", c)).astype(jnp.uint32)
    return KernelRegisters(
        a, b, c,
        fields=None if metadata is None else metadata.registers,
        a_scales=None if scale_a is None else scale_a.registers,
        b_scales=None if scale_b is None else scale_b.registers,
        selectors=stack_selectors(op, metadata, (scale_a, scale_b)),
    )  # fmt: skip


def _by_matrices(op: MatrixMultiply, clamped: bool, model: Model, operands: MmaOperands) -> Array:
    a, b, c = (unpack_matrix(op, name, getattr(operands, name)) for name in ("a", "b", "c"))
    metadata, scale_a, scale_b = operands.metadata, operands.scale_a, operands.scale_b
    fields = None if metadata is None else metadata_fields(op, metadata)
    scales = None
    if scale_a is not None and scale_b is not None:
        scales = scale_codes(op, "scale_a", scale_a), scale_codes(op, "scale_b", scale_b)
    return pack_matrix(op, "d", instruction_product(op, model, a, b, c, fields, scales, clamped))


MMA = Family(_by_matrices, RegisterForms(_places, _words))
