"""The arithmetic of a recorded operation, found by computing it again from its recorded operands under every hypothesis.

An arithmetic explains a side only if it gives every word of the recorded result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from tcemu.engine.formats.number_formats import F32, TF32
from tcemu.operations.products.library.kernel_json import to_dict
from tcemu.uses.drift.hypotheses import describe, differing_features, merge, moment_variants, paired_variants, single_variants
from tcemu.uses.drift.moments import candidate_moments
from tcemu.uses.drift.program_evaluation import evaluate
from tcemu.uses.drift.programs import FACTOR_FORMATS, FORMATS, UNFIT, Choices, Node, Program, Ref
from tcemu.uses.drift.quantization import candidate_quantizations, is_quantizer, quantization_misses
from tcemu.uses.drift.recorded_operations import append_operation
from tcemu.uses.drift.records import DTYPES, Operation, Record, TensorRecord
from tcemu.uses.drift.rewrites import one_pass_program, rewritten_programs
from tcemu.uses.drift.samples import Sample, infer_shapes, take_sample
from tcemu.uses.drift.summation import ROUNDED_OPERANDS, Summation, candidate_summations, plain_summation
from tcemu.uses.replay.order_candidates import TARGETS

SAMPLE = 32  # elements on which all hypotheses are tried
LARGE_SAMPLE = 512  # elements on which those are tried that fit the sample
MAX_VARIANTS = 4000
MAX_CARRIED = 1 << 16  # elements of a result up to which every word decides between a carrier and a hidden source
MAX_ELEMENTS = 1 << 28  # elements of a tensor that is computed again
MAX_PRODUCERS = 8  # earlier operations that are taken into a program, to find roundings that were skipped
PRODUCER_LIMITS = (1, 2, 4, MAX_PRODUCERS)
SCALED_NAMES = ("dot_general", "mm", "reduce_sum", "aten.sum", "mul")  # operations whose scale may be applied elsewhere
FEW_SUMMATIONS = 16  # summations that are combined with other variants


class Fit(NamedTuple):
    """An arithmetic that gives every word of one side."""

    choices: Choices
    words: str
    program: Program


@dataclass(frozen=True)
class Side:
    """The arithmetics that were tried for one side of an operation, and those that give its result.

    Attributes:
        fits: The arithmetics that give every word, plain ones first.
        tried: Number of arithmetics that were tried.
        nearest: The arithmetic with the fewest misses, in words, if none fits.
        misses: Its number of wrong words on the sample.
        sampled: Number of words of that sample.
        problem: The reason for which nothing was tried, or "".
    """

    fits: tuple[Fit, ...] = ()
    tried: int = 0
    nearest: str = ""
    misses: int = 0
    sampled: int = 0
    problem: str = ""

    @property
    def words(self) -> str:
        if not self.fits:
            return self.problem or f"unexplained; nearest: {self.nearest}, with {self.misses} of {self.sampled} words wrong"
        return self.fits[0].words


def build_program(record: Record, operations: Sequence[Operation], place: int = 0) -> Program | None:
    """Return operations that follow each other as one program, or None if one is unknown.

    Args:
        record: The record that has the operations.
        operations: The operations.
        place: Number of the result of the last operation that the program gives.
    """
    program = Program()
    made: dict[tuple, Ref] = {}
    views: dict[tuple, Ref] = {}
    given: dict[tuple, Ref] = {}
    ref: Ref | None = None
    for operation in operations:
        if any(prod(tensor.shape) > MAX_ELEMENTS for tensor in (*operation.operands, *operation.results)):
            return None
        refs: list[Ref] = []
        for number, tensor in enumerate(operation.operands):
            known = made.get(tensor.key) or given.get(tensor.key)
            viewed = views.get(tensor.identity)
            if known is None and viewed is not None:  # another shape of an earlier result: views are not recorded
                known = program.add("reshape", (viewed,), DTYPES[tensor.dtype], operation.index, internal=True, shape=tensor.shape)
                made[tensor.key] = known
            laid = record.stored_order(tensor) if known is None and views else None
            if laid is not None and (viewed := views.get(laid[0])) is not None:  # a transposition of an earlier result
                dtype = DTYPES[tensor.dtype]
                known = program.add("reshape", (viewed,), dtype, operation.index, internal=True, shape=laid[1])
                made[tensor.key] = known = program.add("transpose", (known,), dtype, operation.index, internal=True, axes=laid[2])
            if known is None:
                program.inputs.append((operation.index, number))
                known = ("input", len(program.inputs) - 1)
                given[tensor.key] = known
                if tensor.dtype == "float32" and tensor.shape:
                    program.f32_inputs.add(known[1])
            refs.append(known)
        ref = append_operation(program, operation, refs)
        if ref is None:
            return None
        result = operation.results[0]
        made[result.key] = ref
        if prod(result.shape) > 1:
            views[result.identity] = ref
        program.shape = result.shape
    if ref != ("node", len(program.nodes) - 1) or (place and place not in program.others):
        return None
    if place:
        result = operations[-1].results[place]
        program.add("reshape", (program.others[place],), DTYPES[result.dtype], operations[-1].index, shape=result.shape)
        program.shape = result.shape
    return program


def producers(record: Record, operation: Operation, limit: int = MAX_PRODUCERS) -> list[Operation]:
    """Return the earlier operations whose roundings a fused operation may skip, nearest last, at most `limit`.

    These give narrow results, or products to an addition or a scale.
    """
    latest: dict[tuple, Operation] = {}
    for earlier in record.operations[: operation.index]:
        for tensor in earlier.results:
            latest[tensor.key] = latest[tensor.identity] = earlier
    found: dict[int, Operation] = {}
    waiting = [operation]
    while waiting and len(found) < limit:
        reader = waiting.pop(0)
        for tensor in reader.operands:
            earlier = latest.get(tensor.key)
            if earlier is None and (laid := record.stored_order(tensor)) is not None:
                earlier = latest.get(laid[0])
            narrow = tensor.dtype in ("bfloat16", "float16") and tensor.shape
            scaled = earlier is not None and reader.name.endswith(("mul", "div")) and earlier.name.endswith(SCALED_NAMES)
            factor = earlier is not None and reader.name.endswith(("add", "sub", "add_any")) and earlier.name.endswith("mul")
            if earlier is not None and (narrow or factor or scaled) and earlier.index not in found and len(earlier.results) == 1:
                found[earlier.index] = earlier
                waiting.append(earlier)
    return [found[index] for index in sorted(found)][-limit:]


def explain_with_producers(
    record: Record, operation: Operation, expected: np.ndarray, differing: np.ndarray, targets: tuple[str, ...] = TARGETS, place: int = 0
) -> Side:
    """Explain a result by its operation, else by that and some of the operations before it, whose roundings may be missing."""
    side, known = explain_side(record, (operation,), expected, differing, targets, place=place), 0
    for limit in PRODUCER_LIMITS:
        earlier = producers(record, operation, limit)
        if side.fits or len(earlier) == known:
            break
        known = len(earlier)
        longer = explain_side(record, (*earlier, operation), expected, differing, targets, place=place)
        nearer = longer.sampled and longer.misses * side.sampled < side.misses * longer.sampled
        side = longer if longer.fits or nearer else side
    return side


def explain_result(
    record: Record,
    operations: Sequence[Operation],
    result: TensorRecord,
    differing: np.ndarray | None = None,
    *,
    targets: tuple[str, ...],
    earlier: bool = False,
    trial: Trial | None = None,
    other: Record | None = None,
) -> Side:
    """Explain a recorded result by operations that lead to it.

    Args:
        record: The record that has the operations.
        operations: The operations, in order.
        result: The result.
        differing: Flat indices at which the sides differ, which are tried first.
        targets: GPUs whose tensor cores are tried.
        earlier: Whether operations before a single one are tried too, whose roundings may be missing.
        trial: The trial of these operations, if some arithmetics have been tried already.
        other: The record that has the result, if it is another one.
    """
    expected = (other or record).value(result)
    if expected is None or result.rows is not None:
        return Side(problem="unexplained: the result was not kept")
    where = np.arange(min(64, expected.size)) if differing is None else differing
    place = next((i for i, tensor in enumerate(operations[-1].results) if tensor is result), 0)
    if earlier:
        return explain_with_producers(record, operations[0], expected, where, targets, place)
    return explain_side(record, operations, expected, where, targets, trial, place)


def program_inputs(record: Record, program: Program) -> list[np.ndarray] | None:
    """Return the arrays that a program reads, or None if one was not kept whole."""
    arrays = []
    for given in program.inputs:
        if isinstance(given, np.ndarray):
            arrays.append(given)
            continue
        tensor = record.operations[given[0]].operands[given[1]]
        value = None if tensor.rows is not None else record.value(tensor)
        if value is None:
            return None
        arrays.append(value)
    return arrays


def raw_words(x: np.ndarray) -> np.ndarray:
    """Return the bits of an array, flat."""
    x = np.ascontiguousarray(x).reshape(-1)
    return x.view(f"u{x.dtype.itemsize}")


def _variants(program: Program, inputs: list[np.ndarray], targets: tuple[str, ...], few: bool = False) -> list[Choices]:
    """Return the arithmetics that are tried. few: the plain one and the first summations, for a program that is itself a hypothesis."""
    moment = next((node for node in program.nodes if node.kind == "moment"), None)
    if moment is not None:
        shape = inputs[moment.inputs[0][1]].shape if moment.inputs[0][0] == "input" else infer_shapes(program, inputs)[moment.inputs[0][1]]
        k = prod(shape[axis] for axis in moment.attributes["axes"])
        rest = list(moment_variants(program))
        return [merge(Choices(moments=how), other) for how in candidate_moments(k, moment.attributes["inner"] or k) for other in rest]
    singles = single_variants(program)
    if not program.sums and few:
        return singles
    if not program.sums:
        return list(dict.fromkeys([*singles, *paired_variants(program)]))[:MAX_VARIANTS]
    node = program.nodes[program.sums[0]]
    k, formats, shape = sum_operands(program, inputs)
    a, b = (FACTOR_FORMATS.get(dtype) for dtype in formats)
    if k < 1 or a is None or b is None:
        return []
    summations = candidate_summations(a, b, k, targets, node.kind == "product", shape)
    if few:
        return [Choices(summation=how) for how in summations[:FEW_SUMMATIONS] if not how.bias_first]
    alone = len(program.nodes) == 1
    if alone or len(program.sums) == 1:
        found = [Choices(summation=how) for how in summations if not how.bias_first or len(node.inputs) > 2]
    else:
        found = [Choices(summation=how) for how in summations[: 8 * FEW_SUMMATIONS] if not how.bias_first]
    moved = [i for i, node in enumerate(program.nodes) if node.kind not in ("convert", "reshape", "transpose")]
    if moved == program.sums[:1] and not alone:  # nothing but the rounding of the sum may be missing
        found += [Choices(unrounded=frozenset(moved), summation=how) for how in summations if not how.bias_first]
    found += [merge(Choices(summation=how), other) for other, how in product(singles[1:], summations[:FEW_SUMMATIONS])]
    return list(dict.fromkeys(found))[:MAX_VARIANTS]


def sum_operands(program: Program, inputs: list[np.ndarray]) -> tuple[int, list[np.dtype], tuple[int, int] | None]:
    """Return the number of terms of a program's first sum, the dtypes of what it multiplies, and M and N of a single product."""
    node, shapes = program.nodes[program.sums[0]], infer_shapes(program, inputs)
    given = [inputs[i].shape if kind == "input" else shapes[i] for kind, i in node.inputs]
    dtypes = [program.dtype(ref, inputs) for ref in node.inputs[:2]]
    if node.kind == "sum":
        return prod(given[0][axis] for axis in node.attributes["axes"]), [dtypes[0], dtypes[0]], None
    (left, _), (left_batch, _) = node.attributes.get("axes", (((), ()), ((), ())))
    if "windows" in node.attributes:
        k, columns = prod(given[1][i] for i in node.attributes["windows"][1][1:]), given[1][node.attributes["windows"][1][0]]
    else:
        k = prod(given[0][i] for i in left)
        columns = prod(given[1]) // max(k * prod(given[0][i] for i in left_batch), 1)
    batches = prod(given[0][i] for i in left_batch)
    return k, dtypes, (prod(shapes[program.sums[0]]) // max(columns, 1), columns) if batches == 1 else None


class Trial:
    """A program with a recorded result, against which arithmetics are tried: on a sample, then on a larger one, then on every word."""

    def __init__(self, program: Program, inputs: list[np.ndarray], expected: np.ndarray, differing: np.ndarray) -> None:
        self.program, self.inputs = program, inputs
        self.words = raw_words(expected)
        self._differing = differing
        self._samples: dict[int, tuple[Sample, np.ndarray] | None] = {}
        self._misses: dict[Choices, int] = {}  # on the first sample
        self._variants: list[Choices] | None = None

    def _sample(self, size: int) -> tuple[Sample, np.ndarray] | None:
        """Return a sample and its words, half of them words that differ; None if it is the whole result."""
        if size not in self._samples:
            others = np.linspace(0, self.words.size - 1, min(size, self.words.size)).astype(np.int64)
            chosen = np.unique(np.concatenate([self._differing[: size // 2], others]))[:size]
            sample = take_sample(self.program, self.inputs, chosen) if size < self.words.size else None
            self._samples[size] = None if sample is None else (sample, self.words[chosen])
        return self._samples[size]

    def variants(self, targets: tuple[str, ...], few: bool = False) -> list[Choices]:
        """Return the arithmetics that are tried."""
        if self._variants is None or few:
            self._variants = _variants(self.program, self.inputs, targets, few)
        return self._variants

    def _wrong_words(self, choices: Choices, size: int) -> tuple[int, int]:
        sample = self._sample(size)
        if sample is None:
            return self.misses(choices), self.words.size
        got = evaluate(self.program, self.inputs, choices, sample[0])
        return int((raw_words(got) != sample[1]).sum()), sample[0].size

    def sample_misses(self, choices: Choices) -> int:
        """Return the number of wrong words of the first sample."""
        if choices not in self._misses:
            self._misses[choices] = self._wrong_words(choices, SAMPLE)[0]
        return self._misses[choices]

    @property
    def sample_size(self) -> int:
        """The number of words of the first sample."""
        sample = self._sample(SAMPLE)
        return self.words.size if sample is None else sample[0].size

    def fits(self, choices: Choices, *, all_words: bool) -> bool:
        """Return whether an arithmetic gives every word of the large sample, or of the result."""
        if all_words:
            return not self.count_misses(choices)[0]
        return not self.sample_misses(choices) and not self._wrong_words(choices, LARGE_SAMPLE)[0]

    def misses(self, choices: Choices) -> int:
        """Return the number of wrong words."""
        return int((raw_words(evaluate(self.program, self.inputs, choices)) != self.words).sum())

    def count_misses(self, choices: Choices) -> tuple[int, int]:
        """Return the number of wrong words and of compared words: of the smallest sample that has a wrong word, else of all words."""
        misses, size = self.sample_misses(choices), self.sample_size
        if not misses and size < self.words.size:
            misses, size = self._wrong_words(choices, LARGE_SAMPLE)
        if not misses and size < self.words.size:
            misses, size = self.misses(choices), self.words.size
        return misses, size


def build_trial(record: Record, operation: Operation, expected: np.ndarray) -> Trial | None:
    """Return the trial of one operation as it was recorded; None if its arithmetic is not known or its operands were not kept."""
    try:
        program = build_program(record, [operation])
        inputs = None if program is None else program_inputs(record, program)
        if program is None or inputs is None or program.shape != expected.shape or program.nodes[-1].dtype != expected.dtype:
            return None
        return Trial(program, inputs, expected, np.arange(min(SAMPLE, expected.size)))
    except UNFIT:  # a record is not trusted
        return None


def find_common_arithmetic(trials: tuple[Trial, Trial], targets: tuple[str, ...], first: Sequence[Choices] = ()) -> Choices | None:
    """Return an arithmetic that gives every word of both results, or None.

    Results of more than MAX_CARRIED elements are judged by a large sample.

    Args:
        trials: One operation in both records.
        targets: GPUs whose tensor cores are tried.
        first: Arithmetics that are tried before the others.
    """
    try:
        left, right = (trial.variants(targets) for trial in trials)
        possible, known = set(right), set(first)
        order = [*(choices for choices in first if choices in possible), *(choices for choices in left if choices not in known)]
        for choices in order:
            fits = choices in possible and not any(trial.sample_misses(choices) for trial in trials)
            if fits and all(trial.fits(choices, all_words=trial.words.size <= MAX_CARRIED) for trial in trials):
                return choices
    except UNFIT:  # a record is not trusted
        pass
    return None


def explain_side(
    record: Record,
    operations: Sequence[Operation],
    expected: np.ndarray,
    differing: np.ndarray,
    targets: tuple[str, ...] = TARGETS,
    trial: Trial | None = None,
    place: int = 0,
) -> Side:
    """Find the arithmetics that give every word of a recorded result.

    Args:
        record: The record whose operands are used.
        operations: The operations that lead to the result, in order.
        expected: The result of the side that is to be explained.
        differing: Flat indices at which the sides differ, which are tried first.
        targets: GPUs whose tensor cores are tried.
        trial: The trial of these operations, if some arithmetics have been tried already.
        place: Number of the result among those of the last operation.
    """
    if len(operations) == 1 and is_quantizer(operations[0]):
        return _explain_quantizer(record, operations[0], expected)
    program = build_program(record, operations, place)
    if program is None:
        if place:
            return Side(problem=f"unexplained: the arithmetic of result {place} of {operations[-1].name} is not known")
        unknown = next((op.name for op in operations if build_program(record, [op]) is None), operations[-1].name)
        return Side(problem=f"unexplained: the arithmetic of {unknown} is not known")
    inputs = program_inputs(record, program)
    if inputs is None:
        return Side(problem="unexplained: the operands were not kept")
    if expected.shape != program.shape or expected.dtype not in [*FORMATS, *(DTYPES[n] for n in ("float8_e4m3fn", "float8_e5m2"))]:
        return Side(problem=f"unexplained: no hypotheses for {expected.dtype}")
    last = program.nodes[-1]
    if last.dtype != expected.dtype:
        program.nodes[-1] = last._replace(dtype=expected.dtype)
    try:
        return _try_arithmetics(trial or Trial(program, inputs, expected, differing), expected, differing, targets)
    except UNFIT as error:  # a record is not trusted
        return Side(problem=f"unexplained: the parameters of {operations[-1].name} do not fit its operands ({str(error)[:80]})")


def _try_arithmetics(plain: Trial, expected: np.ndarray, differing: np.ndarray, targets: tuple[str, ...]) -> Side:
    fits, best, tried = [], (expected.size + 1, "", 1), 0
    one_pass = one_pass_program(plain.program)
    first = [("", plain.program), *([] if one_pass is None else [("", one_pass)])]
    for order, form in (*first, *rewritten_programs(plain.program, plain.inputs)):
        if order and fits:
            break  # scales in another place are tried if nothing else explains the words
        trial = plain if form is plain.program else Trial(form, plain.inputs, expected, differing)
        for choices in trial.variants(targets, few=bool(order)):
            tried += 1
            misses, size = trial.count_misses(choices)
            choices = choices._replace(order=order)
            if not misses:
                fits.append(Fit(choices, describe(form, choices), form))
            elif misses / size < best[0] / best[2]:
                best = (misses, describe(form, choices), size)
    return Side(tuple(fits), tried, best[1], best[0], best[2])


def _explain_quantizer(record: Record, operation: Operation, expected: np.ndarray) -> Side:
    """Find the quantisations that give every word of the elements and of the scales."""
    given, results = record.values(operation.operands[:1]), record.values(operation.results)
    if given is None or results is None:
        return Side(problem="unexplained: the operands or the results were not kept")
    if not any(result.tobytes() == expected.tobytes() for result in results):
        return Side(problem="unexplained: the result belongs to another quantiser")
    dtype = DTYPES[operation.results[0].dtype]
    program = Program([Node("quantize", (("input", 0),), dtype, {}, False, operation.index)], [(operation.index, 0)], expected.shape)
    fits, best, tried = [], (2, "", 1), 0
    for how in candidate_quantizations(operation):
        tried += 1
        misses, size = quantization_misses(how, given[0], operation, results)
        if not misses:
            fits.append(Fit(Choices(quantization=how), str(how), program))
        elif misses / size < best[0] / best[2]:
            best = (misses, str(how), size)
    return Side(tuple(fits), tried, best[1], best[0], best[2])


# ---- the cause of a difference


@dataclass(frozen=True)
class Cause:
    """The difference between the arithmetics of the two sides of an operation.

    Attributes:
        kinds: Names of the hypotheses in which the two arithmetics differ; empty if unexplained.
        left: The left side's arithmetic in words.
        right: The right side's arithmetic in words.
        twins: Further pairs of arithmetics that no recorded element distinguishes from the first, in words.
        recipes: Kernel recipes, as JSON values, that pin the sums of the left and the right side; None without a sum.
    """

    kinds: tuple[str, ...]
    left: str
    right: str
    twins: tuple[str, ...] = ()
    recipes: tuple[dict | None, dict | None] = (None, None)

    @property
    def explained(self) -> bool:
        return bool(self.kinds)

    def __str__(self) -> str:
        return f"{', '.join(self.kinds) if self.kinds else 'unexplained'}: left {self.left}; right {self.right}"


MAX_TWINS = 20


def find_cause(left: Side, right: Side) -> Cause:
    """Return the cause of a difference from the arithmetics of both sides: the pair of arithmetics that differ in the fewest hypotheses."""
    if left.fits and right.fits:
        pairs = [(x, y, differing_features(x.choices, y.choices)) for x, y in product(left.fits[:200], right.fits[:200])]
        rank = lambda pair: (len(pair[2]), _changes(pair[0]) + _changes(pair[1]))
        fewest = min(map(rank, pairs))
        nearest = [pair for pair in pairs if rank(pair) == fewest]
        x, y, kinds = nearest[0]
        twins = dict.fromkeys(f"{', '.join(k)}: left {a.words}; right {b.words}" for a, b, k in nearest[1:])
        all_kinds = tuple(dict.fromkeys(name for *_, names in nearest for name in names)) or (_program_difference(x.program, y.program),)
        return Cause(all_kinds, x.words, y.words, tuple(twins)[:MAX_TWINS], (fit_recipe(x), fit_recipe(y)))
    if not left.fits and not right.fits:
        return Cause((), left.words, right.words)
    side = left if left.fits else right
    simplest = min(map(_changes, side.fits))
    simple = [fit for fit in side.fits if _changes(fit) == simplest]
    first = simple[0]
    names = [differing_features(Choices(summation=_find_plain_summation(fit)), fit.choices) for fit in simple]
    kinds = () if not all(names) else tuple(dict.fromkeys(name for some in names for name in some))  # plain on one side: no cause
    twins = tuple(fit.words for fit in simple[1 : MAX_TWINS + 1])
    recipes = (fit_recipe(first), None) if left.fits else (None, fit_recipe(first))
    return Cause(kinds, left.words, right.words, twins, recipes)


def _program_difference(left: Program, right: Program) -> str:
    """Name the difference of two programs that are computed as recorded."""
    kinds = [[node.kind for node in program.nodes] for program in (left, right)]
    scaled = any(kind in ("mul", "div") for kind in kinds[0]) and any(kind in ("product", "sum") for kind in kinds[0])
    moved = kinds[0] != kinds[1] and sorted(kinds[0]) == sorted(kinds[1])
    return ("scale before or after" if scaled else "order of operations") if moved else "operations"


def _changes(fit: Fit) -> int:
    """Return the number of hypotheses in which an arithmetic differs from the plain one."""
    return len(differing_features(Choices(summation=_find_plain_summation(fit)), fit.choices))


def _find_plain_summation(fit: Fit) -> Summation | None:
    how = fit.choices.summation
    if how is None:
        return None
    program, order = fit.program, how.order
    rounded = order.conditions.evidence == ROUNDED_OPERANDS or order.a == TF32
    a, b = (F32, F32) if rounded and program.f32_inputs else (order.a, order.b)
    return plain_summation(a, b, order.k, of_terms=how.of_terms)


def fit_recipe(fit: Fit) -> dict | None:
    how = fit.choices.summation
    if how is None or how.accumulator != "float32" or how.bias_first or how.library:
        return None
    fmt = FORMATS.get(fit.program.nodes[fit.program.sums[0]].dtype)
    return None if fmt is None else to_dict(how.order.replace(dtype=fmt))
