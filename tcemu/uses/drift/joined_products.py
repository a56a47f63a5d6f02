"""Products that one record has as one operation and the other one in parts, as a fused projection of q, k and v and three projections.

The parts share one operand. Their other operands, put together, are those of the whole product, bit for bit; so are the results, but for a
drift. In the record with the parts, `join_products` puts one operation in the place of the first part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tcemu.uses.drift.records import Operation, Record, TensorRecord

PRODUCTS = ("dot_general", "conv_general_dilated", "aten.mm", "aten.addmm", "aten.bmm", "aten.convolution")


def join_products(left: Record, right: Record) -> tuple[Record, Record]:
    """Return both records, each with its parts of a product of the other one joined. Operations keep their numbers."""
    return _join(left, right), _join(right, left)


def _join(record: Record, other: Record) -> Record:
    groups: dict[tuple, list[Operation]] = defaultdict(list)  # products that share an operand, by its place
    for operation in filter(_is_product, record.operations):
        for place, tensor in enumerate(operation.operands):
            groups[_kind(operation), place, tensor.key].append(operation)
    by_kind: dict[tuple, list[tuple[int, list[Operation]]]] = defaultdict(list)
    for (kind, place, _), members in groups.items():
        if len(members) > 1:
            by_kind[kind].append((place, members))
    found: dict[tuple[int, ...], Operation] = {}
    joined = record
    for whole in filter(_is_product, other.operations):
        for place, members in by_kind.get(_kind(whole), ()):
            free = [op for op in members if not any(op.index in parts for parts in found)]
            axes = _joined_axes(whole, free[0], place) if free else None
            parts = None if axes is None else _find_parts(whole, free, axes, other, record)
            if parts is not None and axes is not None:
                joined = joined if joined is not record else record.copy()
                found[tuple(sorted(op.index for op in parts))] = _build(joined, whole, parts, axes)
                break
    for numbers, operation in found.items():
        joined.operations[numbers[0]] = operation
        joined.absorbed |= set(numbers[1:])
    return joined


def _is_product(operation: Operation) -> bool:
    return operation.name in PRODUCTS and len(operation.results) == 1


def _kind(operation: Operation) -> tuple:
    return operation.step, operation.backward, operation.name, repr(operation.attributes)


def _joined_axes(whole: Operation, part: Operation, place: int) -> list[int | None] | None:
    """Return the axis along which each operand and the result are joined, None for the shared operand; None if the shapes do not fit."""
    pairs = list(zip((*whole.operands, whole.results[0]), (*part.operands, part.results[0]), strict=False))
    if len(whole.operands) != len(part.operands) or pairs[place][0].shape != pairs[place][1].shape:
        return None
    axes: list[int | None] = []
    for number, (x, y) in enumerate(pairs):
        different = [i for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=False)) if a != b]
        if x.dtype != y.dtype or len(x.shape) != len(y.shape) or len(different) != (number != place):
            return None
        axes.append(different[0] if different else None)
    return axes


def _find_parts(
    whole: Operation, members: Sequence[Operation], axes: list[int | None], other: Record, record: Record
) -> list[Operation] | None:
    """Return the products whose operands are those of the whole one in order, or None."""
    found: list[Operation] = []
    at, size = 0, whole.results[0].shape[axes[-1]]  # type: ignore[index]
    wanted = [None if axis is None else other.value(t) for t, axis in zip(whole.operands, axes, strict=False)]
    if any(x is None and axis is not None for x, axis in zip(wanted, axes, strict=False)):
        return None
    while at < size:
        for part in members:
            if part not in found and _joined_axes(whole, part, axes.index(None)) == axes and _is_slice(wanted, axes, at, part, record):
                found.append(part)
                at += part.results[0].shape[axes[-1]]  # type: ignore[index]
                break
        else:
            return None
    kept = all(op.results[0].kept is not None and op.results[0].rows is None for op in found)
    return found if len(found) > 1 and kept else None


def _is_slice(wanted: list[np.ndarray | None], axes: list[int | None], at: int, part: Operation, record: Record) -> bool:
    for x, axis, tensor in zip(wanted, axes, part.operands, strict=False):
        if x is None or axis is None:
            continue
        value = None if tensor.rows is not None else record.value(tensor)
        some = x.take(range(at, min(at + tensor.shape[axis], x.shape[axis])), axis)
        if value is None or some.shape != value.shape or some.tobytes() != value.tobytes():
            return False
    return True


def _build(record: Record, whole: Operation, parts: list[Operation], axes: list[int | None]) -> Operation:
    def join(tensors: list[TensorRecord], axis: int | None) -> TensorRecord:
        return tensors[0] if axis is None else record.join(tensors, axis)

    columns = list(zip(*(op.operands for op in parts), strict=True))
    operands = tuple(join(list(tensors), axis) for tensors, axis in zip(columns, axes, strict=False))
    result = join([op.results[0] for op in parts], axes[-1])
    first = min(parts, key=lambda op: op.index)
    return replace(first, path=whole.path, operands=operands, results=(result,), parts=tuple(parts))
