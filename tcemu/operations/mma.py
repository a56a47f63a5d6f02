"""`mma`: registers -> codes -> sum -> codes -> registers, for any number of warps at once."""

from functools import partial

import jax
from jax import Array
from jax.typing import ArrayLike

from tcemu.catalog import check
from tcemu.grammar import parse
from tcemu.instructions import Instruction
from tcemu.models import Evidence, Row, row
from tcemu.operations.operands import matrix_codes, modelled, multiply_add, pack_matrix, register_words, unpack_matrix


def mma(op: str | Instruction, a: ArrayLike, b: ArrayLike, c: ArrayLike, *, target: str) -> Array:
    """One dense `mma.sync` for each batch element: D = A·B + C, registers in, registers out, bit for bit.

    op: a PTX spelling or an Instruction; target: the GPU to imitate, as "sm_90a". Both are static under `jit`.
    a, b, c: uint32[..., 32, n], lane, then register in the order of the PTX statement, n = `op.registers(...)`; an f64 register is two
    words, low first. Leading axes are batch axes, any number of them; they broadcast.
    Returns uint32[..., 32, n]: D's registers. NaN words are the target's own.
    Raises Unsupported if PTX does not give `op` to `target`, NotModelled if nobody has evidence of its arithmetic there, TypeError or
    ValueError if registers have another dtype or shape.
    Source: PTX ISA 9.7.14.5.14; the arithmetic, with its evidence, is a row of `tcemu.models`.
    """
    op, found = modelled(op, target, "mma", "mma")
    registers = (register_words(op, name, value) for name, value in (("a", a), ("b", b), ("c", c)))
    return _mma(op, found, *registers)


def dot(op: str | Instruction, a: ArrayLike, b: ArrayLike, c: ArrayLike, *, target: str) -> Array:
    """One instruction's D = A·B + C on raw codes, without registers.

    a: codes [..., M, K]; b: [..., K, N]; c: [..., M, N], unsigned integers; f64 codes are uint32[..., 2], low word first. (Each of the four
    products of m8n8k4 with f16 is one element of the batch.) Leading axes broadcast. Returns codes [..., M, N] in `op.d.dtype`.
    Raises as `mma`.
    """
    op, found = modelled(op, target, "dot")
    codes = (matrix_codes(op, name, value) for name, value in (("a", a), ("b", b), ("c", c)))
    return _dot(op, found, *codes)


def pack(op: str | Instruction, operand: str, codes: ArrayLike) -> Array:
    """A matrix of raw codes -> the registers that hold it.

    operand: "a", "b", "c" or "d". codes: unsigned [..., rows, columns] of A (M x K), B (K x N), C or D (M x N); for m8n8k4 with f16, which
    is four products, [..., 4, rows, columns]; for f64 [..., rows, columns, 2]. Bits above the format's are dropped.
    Returns uint32[..., 32, n]. Raises Unsupported if `op` is no instruction, TypeError or ValueError for another dtype or shape.
    Source: PTX ISA 9.7.14.5.1 to 9.7.14.5.13.
    """
    op = parse(op)
    return pack_matrix(op, _operand(op, operand), matrix_codes(op, operand, codes, products=True))


def unpack(op: str | Instruction, operand: str, registers: ArrayLike) -> Array:
    """Registers -> the matrix of raw codes that they hold, in the smallest unsigned dtype; the inverse of `pack`, with the same errors."""
    op = parse(op)
    return unpack_matrix(op, _operand(op, operand), register_words(op, operand, registers))


def evidence(op: str | Instruction, target: str) -> Evidence:
    """How it is known what `target` computes for `op`: a level, one of `tcemu.models.LEVELS`, and its source. Raises as `mma`."""
    op = check(op, target)
    return row(op, target).evidence


@partial(jax.jit, static_argnames=("op", "found"))
def _mma(op: Instruction, found: Row, a: Array, b: Array, c: Array) -> Array:
    return pack_matrix(op, "d", multiply_add(op, found, unpack_matrix(op, "a", a), unpack_matrix(op, "b", b), unpack_matrix(op, "c", c)))


@partial(jax.jit, static_argnames=("op", "found"))
def _dot(op: Instruction, found: Row, a: Array, b: Array, c: Array) -> Array:
    return multiply_add(op, found, a, b, c)


def _operand(op: Instruction, operand: str) -> str:
    if operand not in ("a", "b", "c", "d"):
        raise ValueError(f"operand {operand!r} of {op}: its matrices are 'a' (M x K), 'b' (K x N), 'c' and 'd' (M x N)")
    return operand
