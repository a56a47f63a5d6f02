"""A product of matrices explained from the registers of a warp: the first element of D to which two targets give other words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tcemu.errors import Unsupported
from tcemu.explanation.comparison import Explanations
from tcemu.explanation.explain import explain
from tcemu.isa.instructions import LANES
from tcemu.operations.registers import unpack
from tcemu.ptx.link import Line
from tcemu.ptx.module import Float, Integer, Operand, Register, Vector
from tcemu.ptx.special import SPECIAL
from tcemu.ptx.tensor.statements import Bound, bind, elements

FAMILIES = ("mma", "mma.sp", "wmma.mma")  # wgmma is of one target alone, so that no two part there
SCALES = ("scale_a", "scale_b")
Registers = Mapping[str, Any]


def explained(
    line: Line, before: Registers, after: tuple[Registers, Registers], where: tuple[int, int], targets: Sequence[str]
) -> tuple[Explanations | None, str]:
    """The explanation, or None and why there is none.

    before: the registers [blocks, threads] before the statement, by the names that a chunk has; after: those that it wrote, on each target;
    where: the row among the blocks, and the warp.
    """
    try:
        bound = bind(line.statement, line.context)
    except Unsupported:
        return None, f"{line.statement.name} is no product of matrices; there is nothing to explain"
    if bound.op.family not in FAMILIES:
        return None, f"{bound.op} is not explained; {', '.join(FAMILIES)} are"
    words = {name: _words(bound, name, line, before, where) for name in ("a", "b", "c", "e", *SCALES) if name in bound.operands}
    results = [unpack(bound.op, "d", _words(bound, "d", line, {**before, **each}, where)) for each in after]
    first, second = (np.asarray(codes) for codes in results)
    unlike = first != second
    if bound.op.m * bound.op.n * 2 == unlike.size:  # a word of 64 bits is two
        unlike = unlike.any(-1)
    places = np.argwhere(unlike)
    if unlike.ndim != 2 or not len(places):
        return None, f"the words of {bound.op} that differ make no element of one product of matrices"
    row, column = (int(n) for n in places[0])
    try:
        given = _element(bound, words, line, before, where, (row, column))
        made = explain(bound.op, **given, codes=True, target=targets)
    except ValueError as error:
        return None, f"not explained: {error}"
    assert isinstance(made, Explanations)
    return made, ""


def _element(
    bound: Bound, words: dict[str, np.ndarray], line: Line, before: Registers, where: tuple[int, int], place: tuple[int, int]
) -> dict[str, Any]:
    """What `explain` takes for one element of D: a row of A, a column of B, C, metadata and scales, as codes."""
    op, (row, column) = bound.op, place
    codes = {name: np.asarray(unpack(op, name, words[name])) for name in ("a", "b", "c")}
    given: dict[str, Any] = {"a_row": codes["a"][row], "b_col": codes["b"][:, column], "c": codes["c"][row, column]}
    if op.sparse:
        given["e"] = np.asarray(unpack(op, "e", words["e"][:, 0], selector=bound.integer("f", 0)))[row]
    for name in SCALES:
        if name in words:
            pair = bound.operands[name.replace("scale", "selector")]
            numbers = tuple(int(_lanes(number, line, before, where)[0]) for number in elements(pair))
            scales = np.asarray(unpack(op, name, words[name][:, 0], selector=numbers))
            given[name] = scales[row] if name == "scale_a" else scales[:, column]
    return given


def _words(bound: Bound, name: str, line: Line, registers: Registers, where: tuple[int, int]) -> np.ndarray:
    """An operand of the warp, uint32[32, n]; a register of 64 bits is two words, low first."""
    columns = []
    for element in elements(bound.operands[name]):
        value = _lanes(element, line, registers, where)
        columns += [value.astype(np.uint32)] if value.dtype != np.uint64 else [value.astype(np.uint32), (value >> 32).astype(np.uint32)]
    return np.stack(columns, axis=-1)


def _lanes(operand: Operand, line: Line, registers: Registers, where: tuple[int, int]) -> np.ndarray:
    """The raw bits of an operand in the 32 lanes of the warp."""
    block, warp = where
    if isinstance(operand, Register) and operand.name not in SPECIAL:
        value = registers.get(line.names.held(operand))
        return np.zeros(LANES, np.uint32) if value is None else np.asarray(value)[block, LANES * warp : LANES * (warp + 1)]
    if isinstance(operand, Integer):
        return np.full(LANES, operand.value & 0xFFFFFFFF, np.uint32)
    if isinstance(operand, Float) and operand.width == 32:
        return np.full(LANES, operand.bits, np.uint32)
    kind = "a vector" if isinstance(operand, Vector) else str(operand)
    raise ValueError(f"{kind} is no operand that is explained; registers and constants are")
