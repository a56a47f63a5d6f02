"""Fusions that move elements to or from places that are data, which XLA's runtime executes as copies: NumPy does the same.

Source: OpenXLA, the operation semantics of `DynamicSlice` and `DynamicUpdateSlice`: starts are clamped so that the slice lies within.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.kernels.xla.hlo_text import ArrayShape, Instruction, parse_literal

COMPARISONS = {"EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge}
INTEGERS: dict[str, Callable[..., Any]] = {  # of places: integers and booleans
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "minimum": np.minimum, "maximum": np.maximum,
    "and": operator.and_, "or": operator.or_, "not": operator.invert, "negate": operator.neg, "select": np.where,
    "clamp": lambda low, x, high: np.clip(x, low, high),
}  # fmt: skip


def evaluate_movement(program: str, body: Sequence[Instruction], operands: Sequence[np.ndarray]) -> np.ndarray:
    """Return the result of a fused computation.

    Args:
        program: Name of the program, for messages.
        body: The computation.
        operands: Its parameters.

    Raises:
        NotModelled: It has an instruction that does more than move elements.
    """
    values: dict[str, np.ndarray] = {}
    shapes = {each.name: each.shape for each in body}
    for each in body:
        given = [values[operand.name] for operand in each.operands]
        source = shapes[each.operands[0].name] if each.operands else each.shape
        if each.opcode == "bitcast" and isinstance(source, ArrayShape) and isinstance(each.shape, ArrayShape):
            values[each.name] = each.shape.from_bytes(source.to_bytes(given[0]))
        else:
            values[each.name] = _evaluate(program, each, given, operands)
    return values[next(each.name for each in body if each.is_root)]


def _evaluate(program: str, each: Instruction, given: Sequence[np.ndarray], operands: Sequence[np.ndarray]) -> np.ndarray:
    opcode, shape = each.opcode, each.shape
    if not isinstance(shape, ArrayShape):
        raise NotModelled(f"{program}: {each.name} has several results; tcemu.xla moves one at a time")
    if opcode == "parameter":
        return operands[int(each.literal)]
    if opcode == "constant":
        return parse_literal(shape, each.literal)
    if opcode in ("reshape", "copy"):
        return given[0].reshape(shape.sizes)
    if opcode == "slice":
        cuts = re.search(r"\bslice=\{([^}]*)\}", each.attributes)
        return given[0][tuple(slice(*map(int, cut.split(":"))) for cut in re.findall(r"\[([\d:]+)\]", cuts[1] if cuts else ""))].copy()
    if opcode == "dynamic-slice":
        x, *starts = given
        return x[_slices(x.shape, starts, shape.sizes)].copy()
    if opcode == "dynamic-update-slice":
        x, update, *starts = given
        x = x.copy()
        x[_slices(x.shape, starts, update.shape)] = update
        return x
    if opcode == "compare":
        direction = re.search(r"direction=(\w+)", each.attributes)
        return np.asarray(COMPARISONS[direction[1] if direction else ""](*given))
    if opcode == "convert" and shape.dtype.kind in "biu" and given[0].dtype.kind in "biu":
        return given[0].astype(shape.dtype)
    if opcode in INTEGERS and shape.dtype.kind in "biu":
        return np.asarray(INTEGERS[opcode](*given)).astype(shape.dtype)
    raise NotModelled(f"{program}: {each.name}: {opcode} within a copy of elements is not known to tcemu.xla")


def _slices(sizes: Sequence[int], starts: Sequence[np.ndarray], lengths: Sequence[int]) -> tuple[slice, ...]:
    first = [min(max(int(start), 0), size - length) for start, size, length in zip(starts, sizes, lengths, strict=True)]
    return tuple(slice(start, start + length) for start, length in zip(first, lengths, strict=True))
