"""wmma's memory and fragments in NumPy bits, by formulas written out again: nothing of tcemu's tables or packing."""

import numpy as np
from support.word_arrays import to_bits, to_words

from oracles import layout_formulas

BITS = {"f64": 64, "f32": 32, "tf32": 32, "s32": 32, "f16": 16, "bf16": 16, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1}
WHOLE = ("s32", "s8", "u8", "s4", "u4", "b1")


def element(op) -> str:
    return str(op.format)


def fragment_formula(op, sm: int):
    """(lane, element) -> (row, column), as target number `sm` holds the matrix of a load or store, and the elements of a lane."""
    operand, shape, bits, whole = "c" if op.operand == "d" else op.operand, (op.m, op.n, op.k), BITS[element(op)], element(op) in WHOLE
    if sm < 75 and not whole:
        layout = op.layout if operand in "ab" else "row"
        (found,) = (row[-1] for row in layout_formulas.WMMA_70 if row[:4] == (operand, shape, bits, layout))
        return found, 8 if operand == "c" else 16
    registers = 8 if operand in "ab" and element(op) == "f16" else op.register_count("r")
    fits = [row for row in layout_formulas.WMMA_75 if row[:5] == (operand, shape, bits, registers, whole) and row[5] <= sm]
    found = max(fits, key=lambda row: row[5])
    return found[-1], registers * 32 // bits


def element_positions(op, sm: int) -> np.ndarray:
    """[lane, element, 2]: row and column; each place of the matrix is held equally often."""
    formula, count = fragment_formula(op, sm)
    found = np.array([[formula(lane, i) for i in range(count)] for lane in range(32)])
    rows, columns = op.matrix_shape("r")
    times = np.zeros((rows, columns), int)
    np.add.at(times, (found[..., 0], found[..., 1]), 1)
    assert times.min() == times.max() == 32 * count // (rows * columns)
    return found


def memory_elements(op, at: np.ndarray, offset: int, stride: int) -> np.ndarray:
    """The element of memory that holds each place."""
    major, minor = (at[..., 0], at[..., 1]) if op.layout == "row" else (at[..., 1], at[..., 0])
    return offset + major * stride + minor


def load(op, memory: np.ndarray, offset: int, stride: int, sm: int) -> np.ndarray:
    elements = to_bits(memory, BITS[element(op)])
    return to_words(elements[memory_elements(op, element_positions(op, sm), offset, stride)])


def store(op, memory: np.ndarray, fragment: np.ndarray, offset: int, stride: int, sm: int) -> np.ndarray:
    elements, held = to_bits(memory, BITS[element(op)]).copy(), to_bits(fragment, BITS[element(op)])
    elements[memory_elements(op, element_positions(op, sm), offset, stride)] = held
    return to_words(elements)


def alignment(op) -> int:
    """In elements: as a lane's fragment is long, and where even the default stride is less, as that (PTX ISA 9.7.14.4.2)."""
    bits = BITS[element(op)]
    return min(op.register_count("r") * 32 // bits, op.default_stride)
