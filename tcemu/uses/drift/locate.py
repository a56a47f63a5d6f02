"""`locate` finds the operations at which two recorded runs diverge, in order, each with its cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tcemu.engine.isa.targets import resolve_target
from tcemu.uses.drift.alignment import MOVEMENTS, Comparer, Match, align, find_rows
from tcemu.uses.drift.bounds import Legitimacy, check_legitimate
from tcemu.uses.drift.causes import (
    Cause,
    Side,
    Trial,
    build_program,
    build_trial,
    explain_result,
    find_cause,
    find_common_arithmetic,
    program_inputs,
    raw_words,
)
from tcemu.uses.drift.debug_logs import hash_record, read_run
from tcemu.uses.drift.drift_results import SOURCES, Difference, Drift, Line, Role
from tcemu.uses.drift.hypotheses import differing_features
from tcemu.uses.drift.joined_products import join_products
from tcemu.uses.drift.program_evaluation import evaluate
from tcemu.uses.drift.programs import Choices
from tcemu.uses.drift.recorder import Recording, Substitute, TorchRecording, record
from tcemu.uses.drift.records import Operation, Record, RecordSource, TensorRecord
from tcemu.uses.replay.order_candidates import TARGETS


def locate(
    left: RecordSource,
    right: RecordSource,
    *,
    rows: Sequence[int] | None = None,
    targets: Sequence[str] = TARGETS,
    fn: Callable[[], Any] | None = None,
    options: Mapping[str, Any] | None = None,
    metric: str = "norm",
) -> Drift:
    """Find the operations at which two recorded runs diverge.

    A *source* is an operation whose operands are equal in bits and whose results are not. Behind it, most operations only carry the
    difference on. An operation whose operands differ is a *hidden source* if one arithmetic explains the left side, another one the right
    side, and none both.

    Args:
        left: A record: a file, a finished recording, or its bytes. Or a file with a log of PyTorch's `DebugMode` with hashes
            (`tcemu.uses.drift.debug_logs`): then hashes are compared, and no causes are searched.
        right: The other record. If the batches differ, the larger one.
        rows: Rows of the right batch that are those of the left one; by default the first ones.
        targets: GPUs whose tensor cores are tried, as "H100"; () for none, which is much faster.
        fn: A function of no arguments that runs the left side again, in the framework of the left record. Then each source gets its share
            of the final difference: the run is repeated with the right side's results at that operation, for a hidden source with the
            right side's arithmetic on the left operands.
        options: `substitute` and `whole` with which the left run was recorded, if any; `fn` is run with them too.
        metric: Size of a difference between final results: "norm", the norm of the difference, or "kl", the Kullback-Leibler divergence of
            logits on the last axis.

    Returns:
        A `Drift`: `str()` is a table, `to_json()` and `from_json` keep it, `html()` has a picture.

    Raises:
        DamagedFile: A file is no record.
        ValueError: rows do not fit the batches, or a target, the metric or an option is unknown.
    """
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r}: expected one of {', '.join(METRICS)}")
    if options and not set(options) <= {"substitute", "whole"}:
        raise ValueError(f"options: got {', '.join(sorted(map(str, options)))}; expected substitute or whole")
    first, second = read_run(left), read_run(right)
    if first.has_values and second.has_values:
        first, second = join_products(first, second)
    else:
        first, second = hash_record(first), hash_record(second)
    comparer = Comparer(first, second, find_rows(first, second, rows))
    search = _Search(first, second, comparer, tuple(resolve_target(target) for target in targets))
    matches = align(first, second)
    lines = [line for match in matches if (line := search.line(match)) is not None]
    lines.sort(key=lambda line: (line.order, line.left))
    lines = _without_containers(lines, second)
    if fn is not None:
        lines = _with_shares(lines, matches, search, partial(_run_again, first, fn, options or {}), METRICS[metric])
    return Drift(first.name, second.name, len(first.operations), len(second.operations), tuple(lines), first.complete and second.complete)


def _without_containers(lines: list[Line], right: Record) -> list[Line]:
    """Return the lines where the call of a module only carries what a module within it has changed."""
    calls = [line for line in lines if line.right >= 0 and right.operations[line.right].name.startswith("module.")]
    changed = [(line.path, line.backward) for line in calls]
    found = []
    for line in lines:
        path = right.operations[line.right].path if line in calls else None
        inside = path is not None and any(
            other != path and (not path or other.startswith(f"{path}.")) and backward == line.backward for other, backward in changed
        )
        found.append(line._replace(role="carrier", cause=None, legitimate=None) if inside and line.role in SOURCES else line)
    return found


class _Search:
    def __init__(self, left: Record, right: Record, comparer: Comparer, targets: tuple[str, ...]) -> None:
        self.left, self.right, self.comparer, self.targets = left, right, comparer, targets
        self._explain = partial(explain_result, targets=targets)
        self.common: dict[tuple, list[Choices]] = {}  # of earlier operations of one kind, the latest first
        self.replacements: dict[int, list[np.ndarray] | None] = {}  # results of sources, by the number of the left operation
        self.has_difference = False  # an earlier match differs

    def line(self, match: Match) -> Line | None:
        """Return the report of one match; None where both sides are equal."""
        if not match.left or not match.right:
            operation = (match.left or match.right)[0]
            return None if operation.name in MOVEMENTS else _line("left only" if match.left else "right only", operation.index, match)
        x_op, y_op = match.left[-1], match.right[-1]
        equal_operands = self._equal_operands(match)
        results = [(x, y, self.comparer.equal(x, y)) for x, y in zip(x_op.results, y_op.results, strict=False)]
        if all(equal for *_, equal in results):
            return None
        if any(equal is None for *_, equal in results) and not any(equal is False for *_, equal in results):
            return _line("not compared", x_op.index, match)
        x, y, _ = next(result for result in results if result[2] is False)
        difference = self._difference(x, y)
        earlier, self.has_difference = self.has_difference, True
        if equal_operands:
            pairs = [self.comparer.values(*pair) for pair in zip(x_op.results, y_op.results, strict=False)]
            if not x_op.parts and all(pair is not None for pair in pairs):
                self.replacements[x_op.index] = [pair[1] for pair in pairs if pair is not None]
            cause, legitimate = self._cause(match, x, y)
            return _line("source", x_op.index, match, difference, cause, legitimate)
        if not earlier and len(match.left) == len(match.right) == 1 and (cause := self._other_order(x_op, y_op)) is not None:
            return _line("source", x_op.index, match, difference, cause)
        if len(match.left) == len(match.right) == 1 and x_op.name not in MOVEMENTS:
            sides = self._different_arithmetics(x_op, y_op, x, y)
            if sides is not None:
                self.replacements[x_op.index] = None if x_op.parts else self._recomputed(*sides)
                return _line("hidden source", x_op.index, match, difference, find_cause(*sides))
        return _line("carrier", x_op.index, match, difference)

    def _other_order(self, left: Operation, right: Operation) -> Cause | None:
        """Return the cause if a view or a move, which no operation computes, gives the same words in another order."""
        pairs = [*zip(left.operands, right.operands, strict=False)]
        moves = left.name in MOVEMENTS and right.name in MOVEMENTS and bool(pairs) and self.comparer.equal(*pairs[0])
        for number, (x, y) in enumerate(zip(left.results, right.results, strict=False) if moves else pairs):
            if x.key == y.key or (x.dtype, x.shape) != (y.dtype, y.shape) or x.rows or y.rows:
                continue
            values = self.left.value(x), self.right.value(y)
            if values[0] is not None and values[1] is not None and (np.sort(raw_words(values[0])) == np.sort(raw_words(values[1]))).all():
                what = "the result" if moves else f"operand {number}, a view of an earlier result,"
                return Cause(("order of elements",), f"{what} in one order", f"{what} in another order")
        return None

    def _recomputed(self, left: Side, right: Side) -> list[np.ndarray] | None:
        """Compute the left operands by the arithmetic of the right side."""
        program, choices = left.fits[0].program, right.fits[0].choices
        inputs = program_inputs(self.left, program)
        return None if inputs is None or choices.quantization is not None else [np.array(evaluate(program, inputs, choices))]

    def _different_arithmetics(self, x_op: Operation, y_op: Operation, x: TensorRecord, y: TensorRecord) -> tuple[Side, Side] | None:
        """Return both sides if one arithmetic explains the left one, another the right one, and none both."""
        trials: list[Trial | None] = [None, None]
        if not (x.rows or y.rows) and x_op.results[0] is x and y_op.results[0] is y:
            values = self.left.value(x), self.right.value(y)
            runs = zip((self.left, self.right), (x_op, y_op), values, strict=True)
            trials = [None if value is None else build_trial(run, op, value) for run, op, value in runs]
        if trials[0] is not None and trials[1] is not None:
            kind = (x_op.name, tuple(t.shape for t in x_op.operands), tuple(t.dtype for t in (*x_op.operands, *x_op.results)))
            known = self.common.setdefault(kind, [])
            found = find_common_arithmetic((trials[0], trials[1]), self.targets, known)
            if found is not None:
                self.common[kind] = [found, *(choices for choices in known if choices != found)]
                return None
        left = self._explain(self.left, (x_op,), x, trial=trials[0])
        if not left.fits:
            return None
        right = self._explain(self.right, (y_op,), y, trial=trials[1])
        return (left, right) if right.fits and not _share_arithmetic(left, right) else None

    def _equal_operands(self, match: Match) -> bool:
        left, right = (_outer_operands(side) for side in match)
        if len(match.left) == len(match.right) == 1 and len(left) == len(right):
            return all(self.comparer.equal(x, y) for x, y in zip(left, right, strict=True))
        large = [[t for t in side if t.shape] for side in (left, right)]
        known = all(any(self.comparer.equal(x, y) for x in large[0]) for y in large[1])
        return known and bool(large[1])

    def _difference(self, x: TensorRecord, y: TensorRecord) -> Difference | None:
        pair = self.comparer.values(x, y)
        return None if pair is None else measure(*pair)

    def _differing(self, x: TensorRecord, y: TensorRecord) -> np.ndarray | None:
        pair = self.comparer.values(x, y)
        if pair is None or pair[0].shape != pair[1].shape or x.shape != y.shape or x.rows or y.rows:
            return None
        a, b = pair
        different = a.reshape(-1) != b.reshape(-1) if a.dtype != b.dtype else raw_words(a) != raw_words(b)
        return np.flatnonzero(different)

    def _cause(self, match: Match, x: TensorRecord, y: TensorRecord) -> tuple[Cause, Legitimacy | None]:
        if not (self.left.has_values and self.right.has_values):
            unknown = Side(problem="unexplained: a log has hashes alone")
            return find_cause(unknown, unknown), None
        differing = self._differing(x, y)
        sides = []
        for run, operations, tensor in ((self.left, match.left, x), (self.right, match.right, y)):
            side = self._explain(run, operations, tensor, differing, earlier=len(operations) == 1)
            if not side.fits and operations[-1].parts:
                side = self._explain_parts(run, operations[-1], tensor, differing)
            sides.append(side)
        left, right = sides
        if len(match.left) != len(match.right) or len(match.left) > 1:  # one side may be the other one, fused
            if not right.fits and x.shape == y.shape:
                fused = self._explain(self.left, match.left, y, differing, other=self.right)
                right = fused if fused.fits or right.problem else right
            if not left.fits and x.shape == y.shape:
                fused = self._explain(self.right, match.right, x, differing, other=self.left)
                left = fused if fused.fits or left.problem else left
        cause = find_cause(left, right)
        if left.fits and right.fits and x.dtype != y.dtype:
            cause = Cause(("result dtype",), f"{left.fits[0].words}, stored as {x.dtype}", f"{right.fits[0].words}, stored as {y.dtype}")
        return cause, self._legitimacy(match, x, y, left, right)

    def _explain_parts(self, record: Record, joined: Operation, result: TensorRecord, differing: np.ndarray | None) -> Side:
        """Explain those parts of a product that differ from the other side, by one arithmetic.

        The other parts have the words of the other side, which explains them.
        """
        axis = next(i for i, size in enumerate(result.shape) if size != joined.parts[0].results[0].shape[i])
        ends = np.cumsum([part.results[0].shape[axis] for part in joined.parts])
        indices = np.arange(0) if differing is None else np.unravel_index(differing, result.shape)[axis]
        changed = [joined.parts[i] for i in np.unique(np.searchsorted(ends, indices, side="right"))]
        sides = [self._explain(record, (part,), part.results[0], earlier=True) for part in changed]
        if not sides or not all(side.fits for side in sides):
            return next((side for side in sides if not side.fits), Side(problem="unexplained: the parts were not kept"))
        common = [fit for fit in sides[0].fits if all(any(fit.words == other.words for other in side.fits) for side in sides[1:])]
        if not common:
            return Side(problem="unexplained: its parts have several arithmetics")
        where = f"in part {', '.join(str(part.index) for part in changed)}: "
        return replace(sides[0], fits=tuple(fit._replace(words=where + fit.words) for fit in common))

    def _legitimacy(self, match: Match, x: TensorRecord, y: TensorRecord, left: Side, right: Side) -> Legitimacy | None:
        a, b = self.left.value(x), self.right.value(y)
        if a is None or b is None or x.rows or y.rows:
            return None
        found = [(run, side.fits[0].program) for run, side in ((self.left, left), (self.right, right)) if side.fits]
        run, program = max(found, key=lambda pair: len(pair[1].nodes), default=(self.left, build_program(self.left, match.left)))
        how = [side.fits[0].choices.summation if side.fits else None for side in (left, right)]
        return None if program is None else check_legitimate(run, program, a, b, (how[0], how[1]))


def _share_arithmetic(left: Side, right: Side) -> bool:
    """Return whether one arithmetic explains both sides, as far as their programs are comparable."""
    return any(not differing_features(x.choices, y.choices) for x in left.fits for y in right.fits)


def _outer_operands(operations: Sequence[Operation]) -> list[TensorRecord]:
    """Return the operands that no earlier operation of a group has made."""
    made: set[tuple] = set()
    found = []
    for operation in operations:
        found += [tensor for tensor in operation.operands if tensor.key not in made]
        made |= {tensor.key for tensor in operation.results}
    return found


def _line(role: Role, order: int, match: Match, *found: Any) -> Line:
    """Return the report of a match. found: the difference, the cause and the errors over their bounds, as far as they are known."""
    names = [" + ".join(dict.fromkeys(_shown_name(op) for op in side)) for side in match]
    left, right = (side[-1].index if side else -1 for side in match)
    name = names[0] if names[0] == names[1] or not names[1] else f"{names[0] or '(nothing)'} | {names[1]}"
    last = (match.left or match.right)[-1]
    return Line(role, order, left, right, name, last.path, last.source, last.backward, *found)


def _shown_name(operation: Operation) -> str:
    numbers = ", ".join(str(part.index) for part in operation.parts)
    return f"{operation.name} in {len(operation.parts)} parts ({numbers})" if operation.parts else operation.name


def measure(a: np.ndarray, b: np.ndarray) -> Difference | None:
    """Return the size of the difference of two arrays, in units of the last place of the narrower dtype."""
    if a.dtype.kind in "iub" or b.dtype.kind in "iub" or a.shape != b.shape:
        different = int((a != b).sum()) if a.shape == b.shape else max(a.size, b.size)
        return Difference(different, max(a.size, b.size), None, None)
    narrow = a.dtype if a.dtype.itemsize <= b.dtype.itemsize else b.dtype
    x, y = a.astype(np.float64), b.astype(np.float64)
    changed = int((raw_words(a) != raw_words(b)).sum()) if a.dtype == b.dtype else int((~((x == y) | (np.isnan(x) & np.isnan(y)))).sum())
    with np.errstate(all="ignore"):
        size = float(np.sqrt((y**2).sum()))
        relative = float(np.sqrt(((x - y) ** 2).sum())) / size if size else float("nan")
    ulps = int(np.abs(_ordinals(a.astype(narrow)) - _ordinals(b.astype(narrow))).max()) if a.size else 0
    return Difference(changed, a.size, ulps, relative if np.isfinite(relative) else None)


def _ordinals(x: np.ndarray) -> np.ndarray:
    """Return the position of each float among the floats of its dtype."""
    bits = raw_words(x).astype(np.int64)
    sign = 1 << (8 * x.dtype.itemsize - 1)
    return np.where(bits & sign, sign - bits, bits)


Run = Callable[[Substitute | None], np.ndarray]


def _with_shares(lines: list[Line], matches: list[Match], search: _Search, run: Run, size: Metric) -> list[Line]:
    """Return the lines with the share of the final difference that each source makes."""
    final = run(None)
    target = _final_values(matches, search.comparer, final)
    if target is None:
        raise ValueError("fn: its results are not among those of the last operations of both records")
    whole = size(final, target)
    found = []
    for line in lines:
        values = search.replacements.get(line.left)  # None also for parts that the left run computes one by one
        if line.role not in SOURCES or values is None:
            found.append(line)
            continue

        replacement = _Replacement(search.left, line.left, values)
        changed = run(replacement)
        if not replacement.done:
            raise ValueError(
                f"fn: it does not run {line.name} (operation {line.left} of the left record); give the function that was recorded"
            )
        found.append(line._replace(share=size(final, changed) / whole if whole else None))
    return found


class _Replacement:
    """A substitute that puts values in the place of one operation's results.

    The operation is known by its name, its results' shapes and its place among those like it, not by its number: a function without
    arguments may compute on constants before it is recorded.
    """

    def __init__(self, record_: Record, number: int, values: list[np.ndarray]) -> None:
        self.values, self.done, self._seen = values, False, 0
        operation = record_.operations[number]
        key = lambda op: (op.name, tuple(t.shape for t in op.results))
        self._key = key(operation)
        self._place = sum(key(op) == self._key for op in record_.operations[:number])

    def __call__(self, number: int, name: str, operands: list[np.ndarray], results: list[np.ndarray]) -> list[np.ndarray] | None:
        if (name, tuple(x.shape for x in results)) != self._key:
            return None
        self._seen += 1
        if self._seen != self._place + 1 or any(x.shape != y.shape for x, y in zip(self.values, results, strict=False)):
            return None
        self.done = True
        return [*self.values, *results[len(self.values) :]]


def _join(first: Substitute | None, then: Substitute | None) -> Substitute:
    """Return a substitute that asks one, then the other."""

    def substitute(number: int, name: str, operands: list[np.ndarray], results: list[np.ndarray]) -> list[np.ndarray] | None:
        replaced = None
        for change in (first, then):
            found = None if change is None else change(number, name, operands, results)
            replaced, results = (replaced, results) if found is None else (found, found)
        return replaced

    return substitute


def _run_again(left: Record, fn: Callable[[], Any], options: Mapping[str, Any], change: Substitute | None) -> np.ndarray:
    substitute = _join(options.get("substitute"), change)
    if left.framework.startswith("torch"):
        with TorchRecording(Recording(None, 0, None, substitute, "torch"), None, False):
            result = fn()
        return result.detach().double().cpu().numpy()
    import jax

    result = record(fn, budget=0, whole=options.get("whole", ()), substitute=substitute)().result
    leaves = [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(result)]
    return leaves[0] if len(leaves) == 1 else np.concatenate([x.reshape(-1) for x in leaves])


def _final_values(matches: list[Match], comparer: Comparer, like: np.ndarray) -> np.ndarray | None:
    """Return the right values of the last operation whose left result has the size of the function's result."""
    for left, right in reversed(matches):
        if left and right and left[-1].results and right[-1].results and np.prod(left[-1].results[0].shape) == like.size:
            pair = comparer.values(left[-1].results[0], right[-1].results[0])
            if pair is not None and pair[1].size == like.size:
                return pair[1].astype(np.float64).reshape(like.shape)
    return None


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.sqrt(((x - y) ** 2).sum()))


def divergence(x: np.ndarray, y: np.ndarray) -> float:
    """Return the Kullback-Leibler divergence of the distributions of logits on the last axis, summed over the others, in float64."""
    p, q = (z - z.max(-1, keepdims=True) for z in (x.astype(np.float64), y.astype(np.float64)))
    p, q = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in (p, q))
    return float((np.exp(p) * (p - q)).sum())


Metric = Callable[[np.ndarray, np.ndarray], float]
METRICS: dict[str, Metric] = {"norm": _distance, "kl": divergence}
