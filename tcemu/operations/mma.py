"""`mma` and `mma_sp`: registers -> codes -> sum -> codes -> registers, for any number of warps at once."""

from functools import partial
from typing import Any

import jax
from jax import Array
from jax.typing import ArrayLike

from tcemu.arithmetic.program import Model
from tcemu.catalog import check, section
from tcemu.formats import U4
from tcemu.grammar import parse
from tcemu.instructions import Instruction
from tcemu.models import Evidence, row
from tcemu.operations.operands import (
    codes_of,
    lane_words,
    matrix_codes,
    modelled,
    multiply_add,
    pack_matrix,
    register_words,
    unpack_matrix,
)
from tcemu.operations.selected import (
    forbid_undefined_metadata,
    metadata_fields,
    metadata_registers,
    scale_codes,
    scale_registers,
    scale_selector,
    sparsity_selector,
)

SCALES = ("scale_a", "scale_b")
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
    op, model, clamped = modelled(op, target, model, "mma", "mma")
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
    op, model, clamped = modelled(op, target, model, "mma_sp", "mma.sp")
    registers = [register_words(op, name, value) for name, value in (("a", a), ("b", b), ("c", c))]
    which = sparsity_selector(op, selector)
    fields = metadata_fields(op, lane_words(op, "e", e), which)
    if checked:
        forbid_undefined_metadata(op, fields, which)
    return _mma(op, clamped, model, *registers, fields, *_scale_words(op, scale_a, scale_b, selector_a, selector_b))


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
    op, model, clamped = modelled(op, target, model, "dot")
    codes = [matrix_codes(op, name, value) for name, value in (("a", a), ("b", b), ("d" if op.c is None else "c", c))]
    fields = _given(op, "e", e, op.sparse)
    fields = None if fields is None else codes_of(op, "e", fields, U4, op.matrix(op.metadata))
    scales = [_given(op, name, value, op.block_scale) for name, value in zip(SCALES, (scale_a, scale_b), strict=True)]
    scales = tuple(_scale_matrix(op, name, value) for name, value in zip(SCALES, scales, strict=True)) if op.block_scale else None
    return _dot(op, clamped, model, *codes, fields, scales)


def pack(op: str | Instruction, operand: str, codes: ArrayLike, *, selector: Any = None) -> Array:
    """A matrix of raw codes -> the registers that hold it.

    operand: "a", "b", "c" or "d". codes: unsigned [..., rows, columns] of A (M x K, sparse: the stored M x K/2), B (K x N), C or D (M x N);
    for m8n8k4 with f16, which is four products, [..., 4, rows, columns]; for f64 [..., rows, columns, 2]. Bits above the format's are
    dropped. Returns uint32[..., 32, n], of wgmma uint32[..., 4, 32, n].
    Or operand "e" (wgmma: "sp_meta"), the sparsity metadata: 4-bit fields [..., M, chunks], with the sparsity selector; "scale_a" or
    "scale_b": scale codes [..., M, scale_vec] or [..., scale_vec, N], with the selector (byte_id, thread_id). These return uint32[..., 32]
    (wgmma: [..., 4, 32]), zero where the selector does not look; several may be joined by `|`. The selector is 0 unless given.
    Raises Unsupported if `op` is no instruction, TypeError or ValueError for another dtype, shape or selector.
    Source: PTX ISA 9.7.14.5.1 to 9.7.14.5.13, 9.7.14.6.1, 9.7.14.6.2, 9.7.14.3.
    """
    op = parse(op)
    if _operand(op, operand) == op.metadata:
        fields = codes_of(op, operand, codes, U4, op.matrix(operand))
        return metadata_registers(op, fields, sparsity_selector(op, 0 if selector is None else selector))
    if operand in SCALES:
        return scale_registers(
            op, operand, _scale_matrix(op, operand, codes), scale_selector(op, operand, (0, 0) if selector is None else selector)
        )
    _no_selector(op, operand, selector)
    return pack_matrix(op, operand, matrix_codes(op, operand, codes, products=True))


def unpack(op: str | Instruction, operand: str, registers: ArrayLike, *, selector: Any = None) -> Array:
    """Registers -> the matrix of raw codes that they hold, in the smallest unsigned dtype; the inverse of `pack`, with the same errors."""
    op = parse(op)
    if _operand(op, operand) == op.metadata:
        words = lane_words(op, operand, registers)
        return metadata_fields(op, words, sparsity_selector(op, 0 if selector is None else selector))
    if operand in SCALES:
        return scale_codes(
            op, operand, lane_words(op, operand, registers), scale_selector(op, operand, (0, 0) if selector is None else selector)
        )
    _no_selector(op, operand, selector)
    return unpack_matrix(op, operand, register_words(op, operand, registers))


def evidence(op: str | Instruction, target: str) -> Evidence:
    """How it is known what `target` computes for `op`: a level, one of `tcemu.models.LEVELS`, and its source. Raises as `mma`."""
    op = check(op, target)
    return row(op, target).evidence


def model(op: str | Instruction, target: str, *, toolkit: str | None = None, unit: str | None = None) -> Model:
    """The arithmetic by which `target` computes `op`, to look at, to change, and to give to `model=`.

    toolkit: the version of ptxas that made the code, "12.4" to "13.5", which matters to FP8 `mma` on sm_90 before 12.8; None is the newest.
    unit: "tcgen05", the fifth-generation tensor core of sm_100 to sm_110, on operands of the types of `op`, which need not be legal there.
    Raises as `mma`, and ValueError for another toolkit or unit.
    """
    op = check(op, target) if unit is None else parse(op)
    return row(op, target, toolkit=toolkit, unit=unit).model


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


@partial(jax.jit, static_argnames=("op", "clamped"))
def _dot(op: Instruction, clamped: bool, model: Model, a: Array, b: Array, c: Array, fields: Array | None, scales: Any) -> Array:
    return multiply_add(op, model, a, b, c, fields, scales, clamped)


def _scale_words(op: Instruction, scale_a: ArrayLike | None, scale_b: ArrayLike | None, selector_a: Pair, selector_b: Pair) -> tuple:
    """The scales' registers and selectors, or (None, None) for an instruction without."""
    given = [_given(op, name, value, op.block_scale) for name, value in zip(SCALES, (scale_a, scale_b), strict=True)]
    if not op.block_scale:
        return None, None
    words = tuple(lane_words(op, name, value) for name, value in zip(SCALES, given, strict=True))
    return words, tuple(scale_selector(op, name, value) for name, value in zip(SCALES, (selector_a, selector_b), strict=True))


def _scale_matrix(op: Instruction, name: str, codes: Any) -> Array:
    assert op.stype is not None
    return codes_of(op, name, codes, op.stype, op.matrix(name))


def _given(op: Instruction, name: str, value: Any, wanted: bool) -> Any:
    """The value of an operand, or an error if `op` has it and it is missing, or has it not and it came."""
    what = {"e": "sparsity metadata"}.get(name, "block scales")
    if wanted and value is None:
        raise ValueError(f"{name}: {op} has {what}, and none came. PTX ISA {section(op)}")
    if not wanted and value is not None:
        raise ValueError(f"{name}: {op} has no {what}; leave it out. PTX ISA {section(op)}")
    return value


def _no_selector(op: Instruction, operand: str, selector: Any) -> None:
    if selector is not None:
        raise ValueError(f"selector: got {selector!r} for operand {operand!r} of {op}; only metadata and scales have one")


def _operand(op: Instruction, operand: str) -> str:
    names = ("a", "b", "c", "d") if op.c is not None else ("a", "d")
    names += ((op.metadata,) if op.sparse else ()) + (SCALES if op.block_scale else ())
    if operand not in names:
        raise ValueError(f"operand {operand!r} of {op}: it has {', '.join(map(repr, names))}")
    return operand
