"""`pack` and `unpack`: a matrix of raw codes and the registers that hold it."""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.typing import ArrayLike

from tcemu.formats import U4
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import Instruction
from tcemu.operations.operands import (
    codes_of,
    lane_words,
    matrix_codes,
    pack_matrix,
    register_words,
    unpack_matrix,
)
from tcemu.operations.selected import (
    SCALES,
    Metadata,
    Scale,
    metadata_fields,
    metadata_registers,
    scale_codes,
    scale_matrix,
    scale_registers,
    scale_selector,
    sparsity_selector,
)


def pack(op: str | Instruction, operand: str, codes: ArrayLike, *, selector: Any = None) -> Array:
    """A matrix of raw codes -> the registers that hold it.

    operand: "a", "b", "c" or "d". codes: unsigned [..., rows, columns] of A (M x K, sparse: the stored M x K/2), B (K x N), C or D (M x N);
    for m8n8k4 with f16, which is four products, [..., 4, rows, columns]; for f64 [..., rows, columns, 2]. A code that the format
    does not have raises ValueError. Returns uint32[..., 32, n], of wgmma uint32[..., 4, 32, n].
    Or operand "e" (wgmma: "sp_meta"), the sparsity metadata: 4-bit fields [..., M, chunks], with the sparsity selector; "scale_a" or
    "scale_b": scale codes [..., M, scale_vec] or [..., scale_vec, N], with the selector (byte_id, thread_id). These return uint32[..., 32]
    (wgmma: [..., 4, 32]), zero where the selector does not look; several may be joined by `|`. The selector is 0 unless given.
    Raises Unsupported if `op` is no instruction, TypeError or ValueError for another dtype, shape or selector.
    Source: PTX ISA 9.7.14.5.1 to 9.7.14.5.13, 9.7.14.6.1, 9.7.14.6.2, 9.7.14.3.
    """
    op = parse(op)
    _known_operand(op, operand)
    if operand == op.metadata:
        fields = codes_of(op, operand, codes, U4, op.matrix(operand))
        return metadata_registers(op, fields, sparsity_selector(op, 0 if selector is None else selector))
    if operand in SCALES:
        scales = scale_matrix(op, operand, codes)
        return scale_registers(op, operand, scales, scale_selector(op, operand, (0, 0) if selector is None else selector))
    _no_selector(op, operand, selector)
    return pack_matrix(op, operand, matrix_codes(op, operand, codes, products=True))


def unpack(op: str | Instruction, operand: str, registers: ArrayLike, *, selector: Any = None) -> Array:
    """Registers -> the matrix of raw codes that they hold, in the smallest unsigned dtype; the inverse of `pack`, with the same errors."""
    op = parse(op)
    _known_operand(op, operand)
    if operand == op.metadata:
        which = sparsity_selector(op, 0 if selector is None else selector)
        return metadata_fields(op, Metadata(registers=lane_words(op, operand, registers), selector=which))
    if operand in SCALES:
        which = scale_selector(op, operand, (0, 0) if selector is None else selector)
        return scale_codes(op, operand, Scale(registers=lane_words(op, operand, registers), selector=which))
    _no_selector(op, operand, selector)
    return unpack_matrix(op, operand, register_words(op, operand, registers))


def _no_selector(op: Instruction, operand: str, selector: Any) -> None:
    if selector is not None:
        raise ValueError(f"selector: got {selector!r} for operand {operand!r} of {op}; only metadata and scales have one")


def _known_operand(op: Instruction, operand: str) -> None:
    names = ("a", "b", "c", "d") if op.c is not None else ("a", "d")
    names += ((op.metadata,) if op.sparse else ()) + (SCALES if op.block_scale else ())
    if operand not in names:
        raise ValueError(f"operand {operand!r} of {op}: it has {', '.join(map(repr, names))}")
