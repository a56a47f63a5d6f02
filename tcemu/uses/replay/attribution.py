"""What a reported rate of differing outputs means: which pairs of orders, formats of partial sums, GPUs and kernels give it, by simulation.

Both sides of each pair are computed bit for bit on drawn operands, by the recipes and the sums of `tcemu.replay`. A pair is consistent with
a report if every reported number lies within what the simulation says a report of that size may show.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from itertools import combinations
from math import exp, inf, isfinite, log, nan, sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.base.intervals import LEVEL
from tcemu.base.plain_values import to_plain
from tcemu.base.provenance import Provenance, function_name
from tcemu.base.records import check_choice, check_positive_integers
from tcemu.base.results import Result, Table
from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.formats.number_formats import BF16, F16, F32, FORMATS, TF32, Format
from tcemu.engine.isa.targets import resolve_target
from tcemu.operations.products.library.kernel_recipe import (
    RESULTS,
    KernelRecipe,
    Lanes,
    Merge,
    Slices,
    Steps,
)
from tcemu.operations.products.matmul import matmul
from tcemu.operations.products.recipe_facts import make_provenance
from tcemu.operations.products.recipes import Recipe
from tcemu.uses.replay.black_box import DTYPES, FP8_FORMATS, codes_to_float64, round_to_codes
from tcemu.uses.replay.kernel_profiles import MIN_PROBABILITY, likely_recipe, list_profiles
from tcemu.uses.replay.order_candidates import candidate_steps
from tcemu.uses.replay.recipe_results import MAX_ROWS, RecipeResults, Sample

GPUS = ("A100", "L40S", "H100", "GeForce RTX 5090")  # their targets have every known arithmetic of these formats
SLICE_COUNTS = (2, 3, 4, 6, 8, 16)
DRAWS = 8
SLACK = 0.05
PROMOTED = 128  # elements after which FP8 accumulators are added to f32 sums: DeepGEMM, CUTLASS
F16_SUMS = "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"
NORMAL = NormalDist().inv_cdf((1 + LEVEL) / 2)
MISSING = (1 - LEVEL) / 2  # probability on either side of an interval
KEPT = 4096  # largest deviations of a pair
TAIL = 20  # deviations that show how the largest grows with the number of outputs
SHOWN, SHOWN_INCONSISTENT = 24, 8  # pairs in a text
RATE_METHOD = (
    f"{LEVEL:.0%} Wilson interval with the number of independent outputs that has the variance of the mean, by the components of rows, "
    "columns and outputs; a report and a simulation agree by Newcombe's interval of the difference"
)
LARGEST_METHOD = (
    f"{LEVEL:.0%} interval of the largest of as many outputs as were reported: from order statistics, above them by an exponential tail "
    f"through the {TAIL} largest, or through all where fewer differ"
)
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]

# ---- the law of the operands

LAWS: dict[str, Callable[[np.random.Generator, tuple[int, int], float, float], np.ndarray]] = {
    "normal": lambda rng, shape, mean, deviation: mean + deviation * rng.standard_normal(shape),
    "uniform": lambda rng, shape, low, high: rng.uniform(low, high, shape),
}
LAW_TEXT = re.compile(rf"({'|'.join(LAWS)})(?:\(\s*([^,()]+),\s*([^,()]+)\))?")


def parse_law(law: str | Draw) -> Draw:
    """Return the function that draws from a law.

    Args:
        law: "normal" for N(0, 1), "normal(MEAN, DEVIATION)", "uniform" for 0 to 1, "uniform(LOW, HIGH)", or a function of a NumPy
            generator and a shape.

    Raises:
        ValueError: The text names no law.
    """
    if callable(law):
        return law
    found = LAW_TEXT.fullmatch(law.strip())
    first = second = nan
    with suppress(ValueError):
        first, second = (0.0, 1.0) if found is None or found[2] is None else (float(found[2]), float(found[3]))
    if found is None or not (isfinite(first) and isfinite(second)) or second <= (first if found[1] == "uniform" else 0):
        raise ValueError(
            f"law={law!r}: expected 'normal', 'normal(MEAN, DEVIATION)', 'uniform', 'uniform(LOW, HIGH)', or a function of a NumPy "
            "generator and a shape"
        )
    draw = LAWS[found[1]]
    return lambda rng, shape: draw(rng, shape, first, second)


# ---- the report


Range = tuple[float, float]


def reported_range(name: str, value: float | Range) -> Range:
    """Return the numbers that a reported one may be: rounded at its last decimal digit, or a range (low, high) as given.

    Raises:
        ValueError: It is no number from 0, or no such range.
    """
    try:
        if isinstance(value, tuple):
            low, high = (float(end) for end in value)
        else:
            number = Decimal(repr(float(value)))
            half = 0.5 * 10.0 ** int(number.as_tuple().exponent)
            low, high = max(0.0, float(number) - half), float(number) + half
    except (TypeError, ValueError, InvalidOperation):
        low, high = inf, -inf
    if not 0 <= low <= high < inf:
        raise ValueError(f"{name}={value!r}: expected a finite number from 0, or a pair of them, low and high")
    return low, high


# ---- the sides


class Side(NamedTuple):
    """What one side of a comparison may have been."""

    name: str
    kind: str  # the property that decides how far it is from others: "one slice", "f16 partial sums", ...
    recipe: KernelRecipe | Recipe | None  # None: the exact sum, rounded once; in f64, whose own rounding is far below

    @property
    def is_reference(self) -> bool:
        """True if others are compared with it: sums that nothing divides."""
        return self.kind in (EXACT, ONE_SLICE, FMA)


EXACT, ONE_SLICE, FMA, LIBRARY = "exact sum", "one slice", "one slice by fma", "library"


def list_sides(operands: Format, out: Format, shape: tuple[int, int, int], gpus: Sequence[str], counts: Sequence[int]) -> Iterator[Side]:
    """Yield what a side may have been, the references first.

    Args:
        operands: Format of A and B.
        out: Format of the result.
        shape: M, N and K.
        gpus: Names of GPUs.
        counts: Numbers of slices.
    """
    k = shape[2]
    grain = 128 if operands in FP8_FORMATS else 64
    whole = Slices.single(k)
    units = dict(_units(operands, gpus))
    yield Side("exact sum, rounded once", EXACT, None)
    for name, unit in units.items():
        fmts = (unit.op.a, unit.op.b)
        yield Side(f"{name}, one slice", ONE_SLICE, KernelRecipe(*fmts, out, unit, whole))
    for lanes in (1, 32) if operands == F32 else ():  # chains of exact products are nearly the exact sum
        yield Side(f"f32 fma, {lanes} lane{'s' * (lanes > 1)}", FMA, KernelRecipe(F32, F32, out, Lanes(lanes), whole))
    for name, unit in units.items():
        plain = KernelRecipe(unit.op.a, unit.op.b, out, unit, whole)
        if operands in FP8_FORMATS and k > PROMOTED and PROMOTED % unit.op.k == 0 and unit.arithmetic.chain is None:
            promoted = plain.replace(unit=Steps(unit.op, unit.target, restart=PROMOTED))
            yield Side(f"{name}, promoted every {PROMOTED}", "promoted sums", promoted)
        seen = {whole.edges}
        for count in counts:
            slices = Slices.even(k, count, grain)
            if slices.edges not in seen:
                seen.add(slices.edges)
                for kind, merge in _merges(out):
                    yield Side(f"{name}, {len(slices.edges) - 1} slices, {kind}", kind, plain.replace(slices=slices, merge=merge))
        if operands == out == F16 and unit.op.family == "mma" and unit.op.k == 16:
            yield Side(
                f"{name.partition(',')[0]}, f16 accumulators",
                "f16 accumulators",
                Recipe(resolve_arithmetic(F16_SUMS, unit.target).op, unit.target, dtype=F16),
            )
    yield from _library_sides(operands, shape, {resolve_target(name) for name in gpus}, out)


def _units(operands: Format, gpus: Sequence[str]) -> Iterator[tuple[str, Steps]]:
    """Yield one unit per arithmetic with the names of its GPUs. Raises NotModelled where a GPU has none."""
    fmt = TF32 if operands == F32 else operands
    known: dict[tuple, tuple[list[str], Steps]] = {}
    lacking = []
    for gpu in gpus:
        steps = candidate_steps((fmt, fmt), (resolve_target(gpu),))
        if steps:
            known.setdefault((steps[0].arithmetic, steps[0].op.k), ([], steps[0]))[0].append(gpu)
        else:
            lacking.append(gpu)
    if not known:
        raise NotModelled(f"gpus={tuple(gpus)}: no unit of {', '.join(lacking)} adds products of {fmt} in an order that replay knows")
    for names, unit in known.values():
        yield ", ".join(names) + (", tf32" if fmt == TF32 else ""), unit


def _merges(out: Format) -> Iterator[tuple[str, Merge]]:
    yield "f32 partial sums", Merge()
    if out in (F16, BF16):
        yield f"{out} partial sums", Merge(partial=out)
        yield f"{out} running sum", Merge(partial=out, serial=True)
        yield f"{out} partial and running sums", Merge(partial=out, atomic=True)


def _library_sides(operands: Format, shape: tuple[int, int, int], targets: set[str], out: Format) -> Iterator[Side]:
    """Yield the orders of libraries that were measured, or are predicted, for this shape on these targets."""
    names = (f"torch-{operands}", f"jax-{operands}", *(("torch-tf32",) if operands == F32 else ()))
    for profile in list_profiles():
        if profile.library in names and resolve_target(profile.gpu) in targets:
            try:
                recipe = likely_recipe(profile, shape, MIN_PROBABILITY)
            except NotModelled:
                continue
            if recipe.dtype == out and recipe.epilogue == type(recipe.epilogue)():
                words = "measured" if recipe.conditions.probability is None else "predicted"
                yield Side(f"{profile.library} on {profile.gpu}, {words}", LIBRARY, recipe.without_shape())


# ---- simulation


def _draw(operands: Format, law: Draw, size: tuple[int, int], k: int, seed: int) -> Sample:
    rng = np.random.default_rng([seed, k])
    codes = []
    for shape in ((size[0], k), (k, size[1])):
        drawn = np.asarray(law(rng, shape), np.float64)
        if drawn.shape != shape:
            raise ValueError(f"law: it drew shape {list(drawn.shape)}; expected {list(shape)}")
        codes.append(round_to_codes(operands, drawn))
        if not np.isfinite(codes_to_float64(operands, codes[-1])).all():
            raise ValueError(f"law: it drew numbers that are not finite in {operands}, and NaN on both sides tells no orders apart")
    a, b = codes
    return Sample("law", (operands, operands), a, b, np.zeros((0, 0)))


def _compute(side: Side, sample: Sample, results: RecipeResults, out: Format) -> np.ndarray:
    """Return the outputs of a side on a sample, float64."""
    operands = sample.operand_formats[0]
    if isinstance(side.recipe, KernelRecipe):
        return codes_to_float64(out, results.result_codes(side.recipe))
    if side.recipe is None:
        return codes_to_float64(out, round_to_codes(out, codes_to_float64(operands, sample.a) @ codes_to_float64(operands, sample.b)))
    a, b = (x.view(DTYPES[operands]) for x in (sample.a, sample.b))
    return np.asarray(matmul(a, b, recipe=side.recipe, dtype=DTYPES[out])).astype(np.float64)


class Estimate(NamedTuple):
    """A measured number and the interval in which a report's number is expected."""

    value: float
    low: float
    high: float


def wilson(rate: float, outputs: float) -> Range:
    """Return the Wilson interval of a rate that was found in a number of independent outputs."""
    z = NORMAL * NORMAL / outputs
    centre, half = rate + z / 2, NORMAL * sqrt(max(0.0, rate * (1 - rate) / outputs) + (z / outputs) / 4)
    return max(0.0, (centre - half) / (1 + z)), min(1.0, (centre + half) / (1 + z))


class RateSpread(NamedTuple):
    """The variance of whether an output differs, by components: outputs that share a row or a column are not independent."""

    rows: float
    columns: float
    outputs: float

    @classmethod
    def of(cls, differs: np.ndarray) -> RateSpread:
        """Estimate the components from draws [D, R, C]. Where a draw has one row or one column, the spread between draws counts for it."""
        _, r, c = differs.shape
        x = differs.astype(np.float64)
        of_rows, of_columns, whole = x.mean(2, keepdims=True), x.mean(1, keepdims=True), x.mean((1, 2), keepdims=True)
        between = float(whole.var(ddof=1)) if len(x) > 1 else 0.0
        if r == 1 or c == 1:
            rest = float(x.var((1, 2), ddof=1).mean()) if r * c > 1 else 0.0
            shared = max(0.0, between - rest / (r * c))
            return cls(shared, 0.0, rest) if r == 1 else cls(0.0, shared, rest)
        rest = float(((x - of_rows - of_columns + whole) ** 2).sum((1, 2)).mean()) / ((r - 1) * (c - 1))
        rows, columns = (
            max(0.0, float(mean.var(axis, ddof=1).mean()) - rest / n) for mean, axis, n in ((of_rows, 1, c), (of_columns, 2, r))
        )
        return cls(rows, columns, rest)

    def independent(self, rate: float, m: int, n: int, draws: int = 1) -> float:
        """Return the number of independent outputs with the variance of the rate of `draws` draws of m x n outputs."""
        variance = (self.rows / m + self.columns / n + self.outputs / (m * n)) / draws
        most = float(m * n * draws)
        return min(most, rate * (1 - rate) / variance) if variance > 0 else most


def _rate_interval(differs: np.ndarray, report: tuple[int, int]) -> tuple[Estimate, float, float]:
    """Return the rate with its interval, and the independent outputs of the simulation and of a report with m x n outputs."""
    draws, r, c = differs.shape
    rate, spread = float(differs.mean()), RateSpread.of(differs)
    simulated = max(1.0, spread.independent(rate, r, c, draws))
    reported = max(1.0, spread.independent(rate, *report))
    return Estimate(rate, *wilson(rate, simulated)), simulated, reported


def rates_agree(rate: float, simulated: float, other: float, reported: float) -> bool:
    """Return whether Newcombe's interval of the difference of two rates contains 0.

    Args:
        rate: The one rate.
        simulated: Its number of independent outputs.
        other: The other rate.
        reported: Its number of independent outputs.

    Source: R. G. Newcombe, Statistics in Medicine 17 (1998), method 10.
    """
    (low, high), (other_low, other_high) = wilson(rate, simulated), wilson(other, reported)
    difference = rate - other
    below = sqrt((rate - low) ** 2 + (other_high - other) ** 2)
    above = sqrt((high - rate) ** 2 + (other - other_low) ** 2)
    return difference - below <= 0 <= difference + above


def largest_interval(deviations: np.ndarray, simulated: int, reported: int) -> Estimate:
    """Return the largest deviation of a simulation, and the interval of the largest among `reported` outputs.

    Args:
        deviations: The largest deviations, at most `KEPT`, descending.
        simulated: Number of outputs that were simulated.
        reported: Number of outputs of the report.
    """
    top = deviations[deviations > 0]
    greatest = float(top[0]) if len(top) else 0.0
    if not isfinite(greatest):
        return Estimate(greatest, 0.0, inf)
    exceeding = lambda share: 1 - exp(reported * np.log1p(-min(share, 1 - 1e-16)))  # probability that one output of the report does
    low = next((x for rank, x in enumerate(top, 1) if exceeding(wilson(rank / simulated, simulated)[0]) >= 1 - MISSING), 0.0)
    within = [x for rank, x in enumerate(top) if exceeding(wilson(rank / simulated, simulated)[1]) <= MISSING]
    if within:
        return Estimate(greatest, float(low), float(within[-1]))
    if not len(top):
        return Estimate(0.0, float(low), inf)
    rank = min(TAIL, len(top))
    growth = log(max(1.0, rank * reported / simulated)) - log(-log(1 - MISSING))
    if rank < TAIL:  # an exponential law above 0, whose mean is known from few numbers
        return Estimate(greatest, float(low), max(greatest, float(np.mean(top)) * 2 * rank / _chi_square(MISSING, 2 * rank) * growth))
    excess = float(np.mean(top[:TAIL] - top[TAIL - 1]))
    return Estimate(greatest, float(low), max(greatest, float(top[TAIL - 1]) + excess * growth))


def _chi_square(probability: float, degrees: int) -> float:
    """Return the quantile by the approximation of Wilson and Hilferty (1931), which is 1 % off at 2 degrees and less beyond."""
    share = 2 / (9 * degrees)
    return degrees * max(0.05, 1 - share + NormalDist().inv_cdf(probability) * sqrt(share)) ** 3


# ---- the result


@dataclass(frozen=True)
class AttributedPair:
    """What the two sides of a report may have been, and what this pair gives.

    Attributes:
        left: Name of the one side.
        right: Name of the other, the reference of relative differences.
        kinds: The kinds of both sides.
        differing: Share of outputs that differ, with its interval.
        largest: Largest difference, with the interval for as many outputs as were reported.
        largest_relative: Largest difference over the magnitude of the right side.
        reasons: Which reported numbers contradict the pair, and how; empty if none does.
        distance: Distance from the report, for ranking: the sum of the logarithms of ratios.
    """

    left: str
    right: str
    kinds: tuple[str, str]
    differing: Estimate
    largest: Estimate
    largest_relative: Estimate
    reasons: tuple[str, ...]
    distance: float = field(compare=False)

    @property
    def consistent(self) -> bool:
        """True if no reported number contradicts the pair."""
        return not self.reasons


STATISTICS = ("differing", "largest", "largest_relative")


@dataclass(frozen=True)
class Attribution(Result):
    """Pairs of sides, those that are consistent with a report first. `str()` is a report for people.

    Attributes:
        shape: M, N and K.
        operands: Format of A and B.
        out: Format of the outputs.
        reported: The ranges of the reported numbers, by name.
        pairs: The pairs, ranked.
        conditions: Law, draws, outputs, seed, slack and tolerances of the simulation.
        provenance: Versions and evidence.
    """

    shape: tuple[int, int, int]
    operands: str
    out: str
    reported: Mapping[str, Range]
    pairs: tuple[AttributedPair, ...]
    conditions: Mapping[str, Any]
    provenance: Provenance

    @property
    def consistent(self) -> tuple[AttributedPair, ...]:
        """The pairs that no reported number contradicts."""
        return tuple(pair for pair in self.pairs if pair.consistent)

    def find(self, left: str, right: str) -> AttributedPair:
        """Return the pair whose sides have these words in their names.

        Args:
            left: Words of the left side's name.
            right: Words of the right side's name.

        Returns:
            The first such pair.

        Raises:
            KeyError: There is none.
        """
        for pair in self.pairs:
            if left in pair.left and right in pair.right:
                return pair
        raise KeyError(f"no pair of {left!r} and {right!r}; str(result.table().text()) lists all")

    def table(self) -> Table:
        """Return one row for each pair, ranked.

        Returns:
            The table.
        """
        columns = ["verdict", "left", "right"]
        for name in STATISTICS:
            columns += [name, f"{name}_low", f"{name}_high"]
        rows = tuple(
            (_verdict(pair), pair.left, pair.right, *(x for name in STATISTICS for x in getattr(pair, name)), "; ".join(pair.reasons))
            for pair in self.pairs
        )
        facts = {
            "reported": {name: list(ends) for name, ends in self.reported.items()}, **self.conditions,
            "intervals": {"differing": RATE_METHOD, "largest": LARGEST_METHOD}, "provenance": to_plain(self.provenance),
        }  # fmt: skip
        return Table(self._title(), (*columns, "reason"), rows, facts)

    def kinds(self) -> Table:
        """Return one row for each pair of kinds, with the smallest and the largest rate of its pairs.

        Returns:
            The table. A kind without a consistent pair did not give the report.
        """
        groups: dict[tuple[str, str], list[AttributedPair]] = {}
        for pair in self.pairs:
            groups.setdefault(pair.kinds, []).append(pair)
        rows = [
            (*kinds, f"{sum(p.consistent for p in pairs)} of {len(pairs)}", *(f(p.differing.value for p in pairs) for f in (min, max)),
             max(p.largest.value for p in pairs))
            for kinds, pairs in groups.items()
        ]  # fmt: skip
        columns = ("left", "right", "consistent", "least_rate", "greatest_rate", "largest")
        return Table("Kinds of pairs", columns, tuple(rows))

    def _title(self) -> str:
        m, n, k = self.shape
        said = ", ".join(f"{name.replace('_', ' ')} {low:.5g} to {high:.5g}" for name, (low, high) in self.reported.items())
        return f"{m} x {n} x {k}, {self.operands} to {self.out}, {self.conditions['law']}: reported {said}"

    def __str__(self) -> str:
        shown = [*self.consistent[:SHOWN], *[pair for pair in self.pairs if not pair.consistent][:SHOWN_INCONSISTENT]]
        statistics = [name for name in STATISTICS if name in self.reported or name == "differing"]
        if "largest" not in statistics and "largest_relative" not in statistics:
            statistics.append("largest")
        cell = lambda e: f"{e.value:.4g} ({e.low:.4g} to {e.high:.4g})"
        rows = tuple((_verdict(p), p.left, p.right, *(cell(getattr(p, name)) for name in statistics), "; ".join(p.reasons)) for p in shown)
        left_out = len(self.pairs) - len(shown)
        count = len(self.consistent)
        at = self.conditions
        return "\n".join([
            Table(self._title(), ("verdict", "left", "right", *statistics, "reason"), rows).text(),
            *([f"... and {left_out} more pairs; records() has all"] if left_out else []),
            "", self.kinds().text(), "",
            f"{count} of {len(self.pairs)} pairs are consistent, on {at['outputs']:,} outputs of {at['draws']} draws, seed {at['seed']}, "
            f"with a slack of {at['slack']:g} for what a law leaves open",
        ])  # fmt: skip


def _verdict(pair: AttributedPair) -> str:
    return "consistent" if pair.consistent else "not consistent"


class _Report(NamedTuple):
    """The reported numbers and how they were counted."""

    ranges: dict[str, Range]
    size: tuple[int, int]
    slack: float
    atol: float
    rtol: float
    relative_above: float


def _measure_pair(sides: tuple[Side, Side], values: tuple[np.ndarray, np.ndarray], report: _Report) -> AttributedPair:
    x, y = values
    with np.errstate(invalid="ignore", divide="ignore"):
        deviation = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
        deviation = np.where(np.isnan(deviation), inf, deviation)
        differs = deviation > report.atol + (report.rtol * np.abs(y) if report.rtol else 0.0)
        relative = np.where(deviation == 0, 0.0, deviation / np.abs(y))[np.abs(y) > report.relative_above]
    outputs, share = report.size[0] * report.size[1], max(1, relative.size) / deviation.size
    rate, simulated, reported = _rate_interval(differs, report.size)
    estimates = {
        "differing": rate,
        "largest": largest_interval(_descending(deviation), deviation.size, outputs),
        "largest_relative": largest_interval(_descending(relative), max(1, relative.size), max(1, round(outputs * share))),
    }
    reasons, distance = [], 0.0
    for name, (low, high) in report.ranges.items():
        estimate, (low, high) = estimates[name], (low * (1 - report.slack), high * (1 + report.slack))
        nearest = min(max(estimate.value, low), high)
        if name == "differing":
            agrees = rates_agree(rate.value, simulated, min(nearest, 1.0), reported)
        else:
            agrees = estimate.low <= high and low <= estimate.high
        distance += abs(log((estimate.value or 1e-9) / ((low + high) / 2 or 1e-9)))
        if not agrees:
            reasons.append(f"{name.replace('_', ' ')} {'too small' if estimate.value < nearest or estimate.high < low else 'too large'}")
    found = estimates["differing"], estimates["largest"], estimates["largest_relative"]
    return AttributedPair(sides[0].name, sides[1].name, (sides[0].kind, sides[1].kind), *found, tuple(reasons), distance)


def _descending(deviations: np.ndarray) -> np.ndarray:
    flat = deviations.reshape(-1)
    kept = np.partition(flat, len(flat) - KEPT)[len(flat) - KEPT :] if len(flat) > KEPT else flat
    return np.sort(kept)[::-1]


def attribute(
    shape: tuple[int, int, int],
    dtype: str | Format = "f16",
    *,
    differing: float | Range | None = None,
    largest: float | Range | None = None,
    largest_relative: float | Range | None = None,
    relative_above: float = 0.0,
    atol: float = 0.0,
    rtol: float = 0.0,
    out: str | Format | None = None,
    law: str | Draw = "normal",
    gpus: str | Sequence[str] = GPUS,
    slices: Sequence[int] = SLICE_COUNTS,
    recipes: Mapping[str, KernelRecipe | Recipe] | None = None,
    draws: int = DRAWS,
    slack: float = SLACK,
    seed: int = 0,
) -> Attribution:
    """Find what the two sides of a comparison may have been, from how many of their outputs differ and by how much.

    Every pair of sides is computed bit for bit on the same drawn operands: exact sums, one slice on each GPU, slices whose partial sums
    wait in f32 or in the result's format, f16 accumulators, and the orders of libraries that are known for the shape. The result says
    which pairs give the reported numbers and which cannot.

    Args:
        shape: M, N and K of the product.
        dtype: Format of both operands, f16, bf16, f32, e4m3 or e5m2.
        differing: Reported share of outputs that differ, from 0 to 1, as 0.0038. A number counts as rounded at its last decimal digit; a
            pair (low, high) says the range.
        largest: Reported largest difference of two outputs, a number or a pair.
        largest_relative: Reported largest difference, over the magnitude of the right side.
        relative_above: Outputs of the right side that are not larger take no part in `largest_relative`.
        atol: An output differs if |left - right| > atol + rtol * |right|.
        rtol: See `atol`.
        out: Format of the outputs, f32, f16 or bf16. None: that of the operands, and bf16 for FP8.
        law: Law of the operands' elements before they are rounded: "normal" (0, 1), "normal(MEAN, DEVIATION)", "uniform" (0 to 1),
            "uniform(LOW, HIGH)", or a function of a NumPy generator and a shape.
        gpus: Names of GPUs or targets; one name alone is a text.
        slices: Numbers of slices of K.
        recipes: More sides by name, recipes or kernel recipes, which are compared with all references.
        draws: Number of draws, of at most 48 x 48 outputs each.
        slack: Relative error that is granted to reported numbers, for what the law, the versions and the seed leave open.
        seed: Seed of the operands.

    Returns:
        The pairs, ranked, with their intervals.

    Raises:
        ValueError: An argument is invalid, or no number was reported.
        NotModelled: No GPU has a unit for the format.
        Unsupported: A GPU is unknown.
    """
    m, n, k = shape
    check_positive_integers(m=m, n=n, k=k, draws=draws)
    for index, count in enumerate(slices):
        check_positive_integers(optional=False, **{f"slices[{index}]": count})
    operands = _choose_format("dtype", dtype, (F16, BF16, F32, *FP8_FORMATS))
    result = _choose_format("out", (BF16 if operands in FP8_FORMATS else operands) if out is None else out, RESULTS[:3])
    for name, number in (("relative_above", relative_above), ("atol", atol), ("rtol", rtol), ("slack", slack)):
        if not 0 <= number < inf:
            raise ValueError(f"{name}={number!r}: expected a finite number from 0")
    given = {"differing": differing, "largest": largest, "largest_relative": largest_relative}
    ranges = {name: reported_range(name, value) for name, value in given.items() if value is not None}
    if ranges.get("differing", (0, 0))[0] > 1:
        raise ValueError(f"differing={differing!r}: expected a share from 0 to 1, as 0.0038 for 0.38 %")
    if not ranges:
        raise ValueError(
            f"{', '.join(given)}: none is given, so no pair can be told from another; expected at least one reported number, as "
            "differing=0.0038 for 0.38 %; differing=(0, 1) shows what every pair gives"
        )
    own = _given_sides(recipes)
    report = _Report(ranges, (m, n), slack, atol, rtol, relative_above)
    gpus = (gpus,) if isinstance(gpus, str) else tuple(gpus)
    sides = [*list_sides(operands, result, (m, n, k), gpus, slices)]
    sides += own
    draw, size = parse_law(law), (min(m, MAX_ROWS), min(n, MAX_ROWS))
    outputs = np.empty((len(sides), draws, *size))
    for number in range(draws):
        sample = _draw(operands, draw, size, k, seed + number)
        results = RecipeResults(sample)
        for index, side in enumerate(sides):
            outputs[index, number] = _compute(side, sample, results, result)
    pairs = [_measure_pair((sides[i], sides[j]), (outputs[i], outputs[j]), report) for i, j in _compared(sides)]
    pairs.sort(key=lambda pair: (not pair.consistent, pair.distance))
    conditions = {
        "law": law if isinstance(law, str) else function_name(law), "draws": draws, "outputs": draws * size[0] * size[1], "seed": seed,
        "slack": slack, "atol": atol, "rtol": rtol, "relative_above": relative_above,
    }  # fmt: skip
    units = [side.recipe.unit for side in sides if side.kind == ONE_SLICE and isinstance(side.recipe, KernelRecipe)]
    plain = [Recipe(unit.op, unit.target) for unit in units if isinstance(unit, Steps)]
    provenance = make_provenance(plain, f"operands drawn by {conditions['law']}")
    return Attribution((m, n, k), str(operands), str(result), ranges, tuple(pairs), conditions, provenance)


def _choose_format(name: str, value: str | Format, expected: tuple[Format, ...]) -> Format:
    found = FORMATS.get(value) if isinstance(value, str) else value
    check_choice(name, found or value, expected)
    assert found is not None
    return found


def _given_sides(recipes: Any) -> list[Side]:
    """Return the sides of the argument `recipes`. Raises ValueError unless it maps names to recipes."""
    given = {} if recipes is None else recipes
    if not isinstance(given, Mapping) or not all(isinstance(recipe, Recipe | KernelRecipe) for recipe in given.values()):
        raise ValueError(f"recipes={recipes!r}: expected a mapping from names to Recipe or KernelRecipe values, as {{'mine': recipe}}")
    return [Side(name, "given", x.without_shape() if isinstance(x, KernelRecipe) else x) for name, x in given.items()]


def _compared(sides: Sequence[Side]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of indices: each side against each reference before it, and libraries against each other."""
    for j, i in combinations(range(len(sides)), 2):
        if sides[j].is_reference or (sides[i].kind, sides[j].kind) == (LIBRARY, LIBRARY):
            yield i, j
