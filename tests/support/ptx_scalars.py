"""Instructions of values, called by opcode, and operands with many edge cases. Nothing here computes a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tcemu.base.numpy_programs import trace_elementwise
from tcemu.kernels.ptx.instruction_interface import Context, Operation
from tcemu.kernels.ptx.scalar.scalar_table import PREPARE
from tcemu.kernels.ptx.text.module import Pair, Position, Register, Statement, Vector
from tcemu.kernels.ptx.text.ptx_types import KINDS, storage_dtype

TOGETHER = 60
HERE = Context(None, None, "sm_90a", False)  # type: ignore[arg-type]  # no instruction of values looks at its module


def operation(opcode: str, *sizes: int) -> Operation:
    """Return the operation of an opcode. sizes: elements of each operand; without them, the first ones that fit."""
    name = opcode.partition(".")[0]
    refused: list[ValueError] = []
    for shape in [sizes] if sizes else [(1,) * count for count in range(1, 7)] + [(2, 1, 1), (2, 1, 1, 1), (2, 1, 1, 1, 1, 1)]:
        several = Vector((Register("%r"),) * max(shape)) if name == "mov" else Pair(Register("%r"), Register("%r"))
        operands = tuple(Register("%r") if size == 1 else several for size in shape)
        try:
            return PREPARE[name](Statement(opcode, operands, None, Position(1, 1)), HERE)
        except ValueError as error:
            refused.append(error)
    raise next((error for error in refused if "takes" not in str(error)), refused[0])


def run_operations(operations: Sequence[Operation], operands: Sequence[Sequence[np.ndarray]]) -> list[tuple[np.ndarray, ...]]:
    """Compute several operations on raw bits, in one compiled program, since hundreds of small ones would take minutes.

    NumPy must give the same words for the operations that it executes.
    """
    found = []
    with jax.enable_x64(True):
        for first in range(0, len(operations), TOGETHER):
            part = operations[first : first + TOGETHER]

            def all_of_them(given: Any, part: Sequence[Operation] = part) -> Any:
                return [operation.compute(*values) for operation, values in zip(part, given, strict=True)]

            found += jax.device_get(jax.jit(all_of_them)([tuple(values) for values in operands[first : first + TOGETHER]]))
    for each, values, words in zip(operations, operands, found, strict=True):
        host = trace_elementwise(each.compute, [jax.ShapeDtypeStruct((), value.dtype) for value in values])
        if host is not None:
            for made, word in zip(host(*values), words, strict=True):
                assert made.dtype == word.dtype and np.array_equal(np.broadcast_to(made, word.shape), word), each
    return found


EDGES = {
    8: [0, 1, 2, 3, 7, 8, 0x7F, 0x80, 0x81, 0xFE, 0xFF],
    16: [0, 1, 2, 0x0F, 0x10, 0x11, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF],
    32: [0, 1, 2, 3, 15, 16, 23, 31, 32, 33, 63, 64, 255, 256, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF],
    64: [0, 1, 2, 31, 32, 33, 63, 64, 65, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1],
}


def float_edges(exponent_bits: int, mantissa_bits: int) -> list[int]:
    """Return codes around every special value of a format, with both signs."""
    top, one = (1 << exponent_bits) - 1, 1 << mantissa_bits
    bias = top >> 1
    fields = {0, 1, 2, bias - mantissa_bits - 2, bias - mantissa_bits - 1, bias - 1, bias, bias + 1, bias + mantissa_bits, top - 1, top}
    fields = {field for field in fields if 0 <= field <= top}
    fractions = {0, 1, 2, 3, one // 2 - 1, one // 2, one // 2 + 1, one - 2, one - 1}
    codes = {(field << mantissa_bits) | fraction for field in fields for fraction in fractions}
    return sorted(code | (s << (exponent_bits + mantissa_bits)) for code in codes for s in (0, 1))


FLOAT_FIELDS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52), "tf32": (8, 23)}
FLOAT_EDGES = {kind: float_edges(*fields) for kind, fields in FLOAT_FIELDS.items()}


def draw(kind: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw raw bits of a type: a third edge cases, a third close exponents (floats) or small numbers, a third any bits."""
    held = storage_dtype(kind)
    if kind == "pred":
        return rng.integers(0, 2, count).astype(bool)
    if kind.endswith("x2") and KINDS[kind].bits == 32:
        single = kind.removesuffix("x2")
        return draw(single, count, rng) | (draw(single, count, rng) << 16)
    bits = KINDS[kind].bits
    drawn = rng.integers(0, 1 << bits, count, dtype=np.uint64)
    if kind in FLOAT_FIELDS:
        exponent_bits, mantissa_bits = FLOAT_FIELDS[kind]
        bias = (1 << (exponent_bits - 1)) - 1
        near = rng.integers(bias - min(6, bias), bias + 7, count).astype(np.uint64) << np.uint64(mantissa_bits)
        mask = np.uint64(~(((1 << exponent_bits) - 1) << mantissa_bits) & ((1 << bits) - 1))
        small, edges = (drawn & mask) | near, np.array(FLOAT_EDGES[kind], np.uint64)
    else:
        small, edges = drawn & np.uint64(63), np.array(EDGES[bits], np.uint64)
    chosen = rng.integers(0, 3, count)
    return np.where(chosen == 0, rng.choice(edges, count), np.where(chosen == 1, small, drawn)).astype(held)
