"""`pack` and `unpack`: a matrix of raw codes and the registers that hold it."""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.typing import ArrayLike

from tcemu.engine.formats.number_formats import U4
from tcemu.engine.instructions.operand_checks import (
    check_codes,
    check_lane_registers,
    check_matrix,
    check_registers,
    pack_matrix,
    unpack_matrix,
)
from tcemu.engine.instructions.selected_operands import (
    SCALES,
    MetadataRegisters,
    ScaleRegisters,
    check_scale_matrix,
    metadata_fields,
    metadata_registers,
    scale_codes,
    scale_registers,
    scale_selector,
    sparsity_selector,
)
from tcemu.engine.isa.families import Instruction, MatrixMultiply, WmmaMemory
from tcemu.engine.isa.grammar import parse


def pack(op: str | Instruction, operand: str, codes: ArrayLike, *, selector: Any = None) -> Array:
    """Pack a matrix of raw codes into the registers that hold it.

    Args:
        op: PTX spelling, short name or `Instruction`.
        operand: "a", "b", "c" or "d"; or "e" (wgmma: "sp_meta"), the sparsity metadata; or "scale_a", "scale_b", the block scales.
        codes: Unsigned [..., rows, columns] of A (M x K, sparse: the stored M x K/2), B (K x N), C or D (M x N). m8n8k4 with f16, which is
            four products, takes [..., 4, rows, columns]; f64 takes [..., rows, columns, 2]. Metadata are 4-bit fields [..., M, chunks].
            Scales are codes [..., M, scale_vec] or [..., scale_vec, N].
        selector: The sparsity selector of metadata, or (byte_id, thread_id) of scales; None: 0.

    Returns:
        uint32[..., 32, n], of wgmma uint32[..., 4, 32, n]. Metadata and scales are uint32[..., 32] (wgmma: [..., 4, 32]), zero where the
        selector does not look; several may be joined by `|`.

    Raises:
        Unsupported: `op` is no instruction.
        TypeError: `codes` has another dtype.
        ValueError: `codes` has another shape, or a code that the format does not have; or there is no such operand or selector.

    Source: PTX ISA 9.7.14.5.1 to 9.7.14.5.13, 9.7.14.6.1, 9.7.14.6.2, 9.7.14.3.
    """
    op = _require_operand(parse(op), operand)
    if isinstance(op, MatrixMultiply) and operand == op.metadata_operand:
        fields = check_codes(op, operand, codes, U4, op.matrix_shape(operand))
        return metadata_registers(op, fields, sparsity_selector(op, 0 if selector is None else selector))
    if isinstance(op, MatrixMultiply) and operand in SCALES:
        scales = check_scale_matrix(op, operand, codes)
        return scale_registers(op, operand, scales, scale_selector(op, operand, (0, 0) if selector is None else selector))
    _no_selector(op, operand, selector)
    return pack_matrix(op, operand, check_matrix(op, operand, codes, products=True))


def unpack(op: str | Instruction, operand: str, registers: ArrayLike, *, selector: Any = None) -> Array:
    """Unpack registers into the matrix of raw codes that they hold; the inverse of `pack`.

    Args:
        op: As in `pack`.
        operand: As in `pack`.
        registers: The registers, as `pack` returns them.
        selector: As in `pack`.

    Returns:
        Codes in the smallest unsigned dtype.

    Raises:
        As `pack`.
    """
    op = _require_operand(parse(op), operand)
    if isinstance(op, MatrixMultiply) and operand == op.metadata_operand:
        which = sparsity_selector(op, 0 if selector is None else selector)
        return metadata_fields(op, MetadataRegisters(registers=check_lane_registers(op, operand, registers), selector=which))
    if isinstance(op, MatrixMultiply) and operand in SCALES:
        which = scale_selector(op, operand, (0, 0) if selector is None else selector)
        return scale_codes(op, operand, ScaleRegisters(registers=check_lane_registers(op, operand, registers), selector=which))
    _no_selector(op, operand, selector)
    return unpack_matrix(op, operand, check_registers(op, operand, registers))


def _no_selector(op: Instruction, operand: str, selector: Any) -> None:
    if selector is not None:
        raise ValueError(f"selector: got {selector!r} for operand {operand!r} of {op}; only metadata and scales have one")


def _require_operand(op: Instruction, operand: str) -> MatrixMultiply | WmmaMemory:
    """The instruction, which has the operand in registers; else raises ValueError."""
    names: tuple[str, ...] = ()
    if isinstance(op, MatrixMultiply):
        names = ("a", "b", "c", "d") if op.accumulator_operand == "c" else ("a", "d")
        names += ((op.metadata_operand,) if op.sparse else ()) + (SCALES if op.scaling is not None else ())
    elif isinstance(op, WmmaMemory):
        names = (op.operand,)
    if operand not in names or not isinstance(op, MatrixMultiply | WmmaMemory):
        raise ValueError(f"operand {operand!r} of {op}: it has {', '.join(map(repr, names)) or 'none to pack'}")
    return op
