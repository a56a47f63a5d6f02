"""Match the operations of two records, and compare their tensors.

Operations are matched by name and path, then by name alone, so that renamed modules match. What is left between two matches on both sides
is a group: operations that one side fused, split or put in another order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

import numpy as np

from tcemu.uses.drift.records import UNKNOWN_DIGEST, Operation, Record, TensorRecord
from tcemu.uses.replay.aten_operations import EXACT, MOVES_ELEMENTS

MOVEMENTS = (
    "convert_element_type", "reshape", "broadcast_in_dim", "squeeze", "transpose", "stop_gradient", "copy", "expand_dims", "slice", "split",
    "concatenate", "pad", "iota", "gather",
    *(f"aten.{name}{end}" for name, reason in EXACT.items() if reason == MOVES_ELEMENTS for end in ("", "_")),
)  # fmt: skip


MOVED = 4  # operations over which one may have been moved


class Match(NamedTuple):
    """Operations of both sides that belong together. One side may be empty."""

    left: tuple[Operation, ...]
    right: tuple[Operation, ...]


def align(left: Record, right: Record) -> list[Match]:
    """Return the matches of two records, in order."""
    modules = [_is_module(record) for record in (left, right)]
    if modules[0] != modules[1]:
        return _align_modules(left, right) if modules[1] else [Match(b, a) for a, b in _align_modules(right, left)]
    levels: tuple[Callable[[Operation], Hashable], ...] = (
        lambda op: (op.step, op.backward, op.name, _plain_path(op.path), tuple(t.shape[1:] for t in op.results)),
        lambda op: (op.step, op.backward, op.name, tuple(len(t.shape) for t in op.operands)),
        lambda op: (op.step, op.backward, op.name),
    )
    rest = [[op for op in record.operations if op.index not in record.absorbed] for record in (left, right)]
    return _join_moved(_align_level(rest[0], rest[1], levels))


def _join_moved(matches: list[Match]) -> list[Match]:
    """Join matches where one operation stands at another place on the other side, as a scale before a product and after it."""
    alone = {name: [i for i, match in enumerate(matches) if not match[1 - side]] for side, name in enumerate(("left", "right"))}
    found, done = [], 0
    for i in sorted(alone["left"] + alone["right"]):
        side = 0 if matches[i].left else 1
        name = matches[i][side][0].name
        others = [j for j in alone["right" if side == 0 else "left"] if i < j <= i + MOVED and matches[j][1 - side][0].name == name]
        if i < done or not others or name in MOVEMENTS:
            continue
        span = matches[i : others[0] + 1]
        found += [*matches[done:i], Match(tuple(op for m in span for op in m.left), tuple(op for m in span for op in m.right))]
        done = others[0] + 1
    return [*found, *matches[done:]]


def _align_level(left: Sequence[Operation], right: Sequence[Operation], levels: Sequence[Callable[[Operation], Hashable]]) -> list[Match]:
    if not left or not right or not levels:
        return _align_rest(left, right)
    key = levels[0]
    matcher = SequenceMatcher(None, [key(op) for op in left], [key(op) for op in right], autojunk=False)
    found: list[Match] = []
    at_left = at_right = 0
    for block in matcher.get_matching_blocks():
        found += _align_level(left[at_left : block.a], right[at_right : block.b], levels[1:])
        found += [Match((left[block.a + i],), (right[block.b + i],)) for i in range(block.size)]
        at_left, at_right = block.a + block.size, block.b + block.size
    return found


def _align_rest(left: Sequence[Operation], right: Sequence[Operation]) -> list[Match]:
    """Match what no name matches: by equal results, else as one group."""
    if not left or not right:
        return [*(Match((op,), ()) for op in left), *(Match((), (op,)) for op in right)]
    by_result = {op.results[-1].identity: i for i, op in enumerate(left) if op.results}
    for j, op in enumerate(right):
        i = by_result.get(op.results[-1].identity) if op.results and op.results[-1].shape else None
        if i is not None:
            before = _align_rest(left[:i], right[:j])
            return [*before, Match((left[i],), (op,)), *_align_rest(left[i + 1 :], right[j + 1 :])]
    return [Match(tuple(left), tuple(right))]


def _is_module(record: Record) -> bool:
    return bool(record.operations) and all(op.name.startswith("module.") for op in record.operations)


def _plain_path(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in ("_orig_mod", "module"))


def _align_modules(left: Record, right: Record) -> list[Match]:
    """Match the operations of a record with the calls of modules that contain them.

    A module that is called several times shares its operations out evenly among the calls.
    """
    found = []
    key = lambda call: (call.step, call.backward, call.path, call.name)
    counts = Counter(map(key, right.operations))
    seen: Counter = Counter()
    for call in right.operations:
        gradient = call.name == "module.gradient"
        path = _plain_path(call.path.rpartition(".")[0] if gradient else call.path)
        inside = [
            op
            for op in left.operations
            if (op.step, op.backward) == (call.step, call.backward)
            and (not path or _plain_path(op.path) == path or (_plain_path(op.path).startswith(path + ".") and not gradient))
        ]
        count, number = counts[key(call)], seen[key(call)]
        seen[key(call)] += 1
        if count > 1 and len(inside) % count == 0:
            each = len(inside) // count
            inside = inside[number * each : (number + 1) * each]
        shape = call.results[0].shape if call.results else None
        fitting = [i for i, op in enumerate(inside) if op.results and op.results[0].shape == shape]
        same = [i for i in fitting if call.results and inside[i].results[0].identity == call.results[0].identity]
        if fitting and (call.backward or gradient):
            inside = inside[: (same or fitting)[-1] + 1]  # a gradient of another operand may follow
        found.append(Match(tuple(inside), (call,)))
    return found


# ---- equal tensors


class Rows(NamedTuple):
    """The rows of the right batch that correspond to the rows of the left batch."""

    left: int  # batch size
    right: int
    rows: tuple[int, ...]  # rows of the right batch, one for each of the left


class Comparer:
    """Compares tensors of two records: by digests, by values of other dtypes, and by rows of other batch sizes."""

    def __init__(self, left: Record, right: Record, rows: Rows | None) -> None:
        self.left, self.right, self.rows = left, right, rows
        self._known: dict[tuple, bool | None] = {}

    def equal(self, x: TensorRecord, y: TensorRecord) -> bool | None:
        """Return whether two tensors have the same values, or None if their values were not kept."""
        if UNKNOWN_DIGEST in (x.digest, y.digest):
            return None
        if x.identity == y.identity and (x.shape == y.shape or np.prod(x.shape) == np.prod(y.shape)):
            return True
        if x.shape == y.shape and x.dtype == y.dtype:
            return False
        key = (x.identity, x.shape, y.identity, y.shape)
        if key not in self._known:
            pair = self.values(x, y)
            self._known[key] = None if pair is None else _equal_values(*pair)
        return self._known[key]

    def values(self, x: TensorRecord, y: TensorRecord) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the values of both tensors on the elements that both records have, or None if there are none."""
        a, b = self.left.value(x), self.right.value(y)
        if a is None or b is None:
            return None
        kept_left, kept_right = x.rows, y.rows
        if x.shape == y.shape:
            if kept_left == kept_right:
                return a, b
            both = [r for r in range(x.shape[0]) if (kept_left is None or r in kept_left) and (kept_right is None or r in kept_right)]
            return (_take(a, kept_left, both), _take(b, kept_right, both)) if both else None
        if x.shape[1:] != y.shape[1:] or not x.shape or not y.shape or self.rows is None:
            return (a.reshape(-1), b.reshape(-1)) if a.size == b.size and kept_left is None and kept_right is None else None
        each, rest = divmod(x.shape[0], self.rows.left)
        if rest or each * self.rows.right != y.shape[0]:
            return None
        wanted = [row * each + i for row in self.rows.rows for i in range(each)]
        pairs = [(i, r) for i, r in enumerate(wanted) if (kept_left is None or i in kept_left) and (kept_right is None or r in kept_right)]
        return (_take(a, kept_left, [i for i, _ in pairs]), _take(b, kept_right, [r for _, r in pairs])) if pairs else None


def _take(x: np.ndarray, kept: tuple[int, ...] | None, rows: list[int]) -> np.ndarray:
    return x[rows] if kept is None else x[[kept.index(row) for row in rows]]


def _equal_values(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype == b.dtype:
        return a.tobytes() == b.tobytes()
    if a.dtype.kind in "iub" or b.dtype.kind in "iub":
        return bool((a == b).all())
    x, y = a.astype(np.float64), b.astype(np.float64)
    return x.tobytes() == y.tobytes()


def find_rows(left: Record, right: Record, rows: Sequence[int] | None) -> Rows | None:
    """Return the rows that both batches share, from the first matched operands whose first axes differ; None if all shapes agree."""
    for x_op, y_op in zip(left.operations, right.operations, strict=False):
        if x_op.name != y_op.name:
            break
        for x, y in zip((*x_op.operands, *x_op.results), (*y_op.operands, *y_op.results), strict=False):
            if x.shape != y.shape and x.shape[1:] == y.shape[1:] and x.shape and x.shape[0] < y.shape[0]:
                chosen = tuple(range(x.shape[0])) if rows is None else tuple(rows)
                if not chosen or x.shape[0] % len(chosen) or max(chosen) * (x.shape[0] // len(chosen)) >= y.shape[0]:
                    raise ValueError(f"rows={rows!r}: the left batch is {list(x.shape)}, the right one {list(y.shape)}")
                each = x.shape[0] // len(chosen)
                return Rows(len(chosen), y.shape[0] // each, chosen)
            if x.shape != y.shape and x.shape[1:] == y.shape[1:] and x.shape and x.shape[0] > y.shape[0]:
                raise ValueError(f"the left batch is {list(x.shape)}, the right one {list(y.shape)}; give the smaller batch as left")
    return None
