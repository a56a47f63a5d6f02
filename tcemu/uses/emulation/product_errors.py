"""The errors of a product or function under a policy: how they are measured, and the results of `compare` as values and as a table.

The emulated runs of a product are compared with the exact product of the same operands. The error has two parts: one comes from quantising
the operands, the other from how their products are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array

from tcemu.base.intervals import INTERVAL_METHOD, MeanInterval, mean_interval
from tcemu.base.plain_values import Codec, Codecs, from_plain, to_plain
from tcemu.base.plots import dot_plot
from tcemu.base.provenance import Provenance
from tcemu.base.results import Table
from tcemu.base.saved_files import DamagedFile
from tcemu.base.text import table_lines, wrap_lines
from tcemu.engine.arithmetic.reference.exact_values import decimal_text
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, Format
from tcemu.operations.products.dot_general import DimensionNumbers, DotGeneral, product_axes
from tcemu.operations.products.matmul import pruned_operand
from tcemu.operations.products.product_arguments import product_keys
from tcemu.operations.products.recipe_facts import NO_FACTS, RECIPE_COLUMNS, make_provenance, recipe_facts, unit_sentences
from tcemu.operations.products.recipe_kinds import AnyRecipe
from tcemu.operations.products.recipes import Recipe
from tcemu.operations.quantize.quantizer import QuantizedOperand, Scheme, exact_factors, exact_values, quantize
from tcemu.uses.emulation.decisions import Choice, Decision, applied_recipe
from tcemu.uses.emulation.function_choices import FunctionChoice
from tcemu.uses.emulation.saved_results import NumberedResult
from tcemu.uses.emulation.survey import Function, Product
from tcemu.uses.explanation.explain import explain
from tcemu.uses.explanation.explanation_results import Explanation
from tcemu.uses.study.accuracy import ErrorTally, Reference

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class WorstElement:
    """The element of a product's results that is furthest from the exact one, with the arguments that `tcemu.explain` takes.

    A and B are the recipe's: where its A is rhs, the result counts as transposed.

    Attributes:
        run: Index of the product's run, from 0.
        index: Index of the result as [batch, row of A, column of B], the axes that dot_general multiplies out.
        value: The emulated value.
        exact: The exact sum of the products of a_row and b_col.
        a_row: Row of A as the function has it, float64[K]. None in a result that was read from a file, which has no operands.
        b_col: Column of B as the function has it, float64[K]; None likewise.
        recipe: The recipe that computed it, or None.
        a_codes: The row as the recipe quantises it.
        b_codes: The column as the recipe quantises it.
        scales: Scales of the instruction's blocks, or None.
    """

    run: int
    index: tuple[int, int, int]
    value: float
    exact: Fraction
    a_row: np.ndarray | None = None
    b_col: np.ndarray | None = None
    recipe: Recipe | None = None
    a_codes: np.ndarray | None = None
    b_codes: np.ndarray | None = None
    scales: tuple[np.ndarray, np.ndarray] | None = None

    def explain(self) -> Explanation:
        """Explain the element by `tcemu.explain`: the instruction's steps on the quantised row and column, with C = 0.

        The explanation leaves out the recipe's work outside the instruction (scales that multiply sums, promotion, parts of K).

        Returns:
            An `Explanation`; str() shows the steps that lose the most.

        Raises:
            TypeError: The product was not computed by a recipe, or the result was read from a file.
            Unsupported: The recipe's unit has no instruction on its target.
        """
        if self.a_row is None:
            raise TypeError(
                "explain: this result was read from a file, which has no operands (compare again to explain an element), or it is a "
                "function's, which no instruction computes"
            )
        if self.recipe is None or self.a_codes is None or self.b_codes is None:
            raise TypeError("explain: the product was not by a tcemu.Recipe; give a_row and b_col to tcemu.explain with an instruction")
        scale_a, scale_b = self.scales or (None, None)
        explanation = explain(
            self.recipe.op,
            self.a_codes,
            self.b_codes,
            target=self.recipe.target,
            model=self.recipe.model,
            scale_a=scale_a,
            scale_b=scale_b,
            codes=True,
        )
        assert isinstance(explanation, Explanation)
        return replace(explanation, brief=True)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.index))}] {self.value:.6g}, exact {decimal_text(self.exact, 6)}"

    __repr__ = __str__


@dataclass(frozen=True)
class ProductErrors:
    """The errors of one product, or of one function, under one policy, over all its runs.

    Attributes:
        product: The product, or the function.
        policy: Name of the policy; "functions" for a function.
        method: Name of what computed it.
        choice: The policy's choice.
        runs: Number of runs.
        relative_error: Norm of the errors over the norm of the exact results (Frobenius).
        operand_error: Part of it that comes from quantising the operands: the error of the exact product of the quantised operands, over
            the same norm. None without a recipe.
        sum_error: Part of it that comes from the sums: the distance of the emulated product from the exact product of the quantised
            operands, over the same norm. None without a recipe. Two large parts need not add up: they may cancel.
        largest_error: Largest error of an element.
        bits_lost: Mean log2 of the error in ulps of the result's dtype, from 0 to the bits of its significand.
        most_bits_lost: Largest log2 of the error in ulps, in the same range.
        overflow: Numbers of elements of A and of B that quantisation clamps or turns into Inf or NaN. None without a recipe.
        underflow: Numbers of elements of A and of B that quantisation turns into zero. None without a recipe.
        not_finite: Number of results that are not finite; they are left out of the errors.
        worst: The element with the largest error, None if no result is finite.
        output_error: Relative error of all results of the function if only this product is emulated; None unless it was requested.
        seed: The seed of the inputs; None without seeds.
    """

    product: Product | Function
    policy: str
    method: str
    choice: Choice | FunctionChoice
    runs: int
    relative_error: float
    operand_error: float | None
    sum_error: float | None
    largest_error: float
    bits_lost: float
    most_bits_lost: float
    overflow: tuple[int, int] | None
    underflow: tuple[int, int] | None
    not_finite: int
    worst: WorstElement | None
    output_error: float | None = None
    seed: int | None = None

    @property
    def recipe(self) -> AnyRecipe | None:
        """The recipe that computed the product; None if a function or a kernel did."""
        return None if isinstance(self.product, Function) else applied_recipe(self.choice, self.product.roles)  # type: ignore[arg-type]


@dataclass(frozen=True, repr=False)
class Comparison(NumberedResult):
    """The errors of products under policies.

    A comparison is a sequence of `ProductErrors`; str() is a table, `plot()` a picture, `records()` is what pandas takes, `summary()` has
    means and intervals over seeds, and `from_json` reads what `to_json` writes.

    Attributes:
        rows: Errors of each product under each policy, for each seed.
        results: For each policy, the relative error of all results of the function with every product emulated, so that errors add up; the
            mean over seeds.
        seeds: The seeds of the inputs; empty if the inputs were given.
        results_by_seed: For each policy, the errors of `results` for each seed; empty without seeds.
        provenance: Versions, the evidence of each arithmetic, and the law or a digest of the inputs.
    """

    saved_as = "tcemu comparison", 2

    rows: tuple[ProductErrors, ...]
    results: dict[str, float] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    results_by_seed: dict[str, tuple[float, ...]] = field(default_factory=dict)
    provenance: Provenance = field(default_factory=Provenance)

    @classmethod
    def from_rows(cls, rows: Sequence[ProductErrors], results: dict[str, float], inputs: str = "") -> Comparison:
        """Make the comparison of these rows, with the provenance of now. inputs: the law or a digest of the inputs."""
        return cls(tuple(rows), results, provenance=make_provenance((row.recipe for row in rows), inputs))

    @classmethod
    def from_seeds(cls, compared: dict[int, Comparison], inputs: str) -> Comparison:
        """Join the comparisons of the same products for several seeds.

        Args:
            compared: The comparisons by seed.
            inputs: Law of the inputs.

        Raises:
            ValueError: Two seeds have other products.
        """
        first = next(iter(compared.values()))
        keys = [(row.product, row.policy) for row in first]
        for seed, other in compared.items():
            if [(row.product, row.policy) for row in other] != keys:
                raise ValueError(f"inputs: those of seed {seed} give other products than those of seed {next(iter(compared))}")
        rows = [replace(compared[seed].rows[i], seed=seed) for i in range(len(keys)) for seed in compared]
        by_seed = {name: tuple(one.results[name] for one in compared.values()) for name in first.results}
        means = {name: fmean(values) for name, values in by_seed.items()}
        return cls(tuple(rows), means, tuple(compared), by_seed, replace(first.provenance, inputs=inputs))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ProductErrors]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> ProductErrors:
        return self.rows[index]

    def __str__(self) -> str:
        """Return a table with a line for each product and under it one for each policy. Columns without information are left out."""
        lines_by_key = [mean_errors(rows) for rows in self._rows_by_key()]
        facts = [recipe_facts(line.row.recipe, self.provenance.evidence) for line in lines_by_key]
        shown = [c for c in COLUMNS if c.always or any(c.cell(line) not in c.blank_cells for line in lines_by_key)]
        figures = [[c.cell(line) for c in shown] for line in lines_by_key]
        known = [(target or "-", evidence or "-") for target, *_, evidence in facts]
        heads = ["  policy", "target", "evidence", *(c.head for c in shown)]
        rows = [[f"  {line.row.policy}", *two, *cells] for line, two, cells in zip(lines_by_key, known, figures, strict=True)]
        below: list[str] = []
        head, *cells = table_lines(heads, rows, left=(0, 1, 2, len(shown) + 2))
        if max(map(len, (head, *cells))) > MAX_WIDTH:  # GPU and evidence stand below the table
            head, *cells = table_lines(["  policy", *heads[3:]], [[row[0], *row[3:]] for row in rows], left=(0, len(shown)))
            pairs = zip(lines_by_key, known, strict=True)
            below = [
                f"{policy}: {target}, {found}" for policy, target, found in dict.fromkeys((line.row.policy, *two) for line, two in pairs)
            ]
        lines = [head] if self.rows else ["no product is replaced by these policies; tcemu.emulate(fn, policy).report(...) lists all"]
        for place, some in groupby(zip(lines_by_key, cells, strict=True), lambda pair: _product_heading(pair[0].row)):
            lines += [place, *(line for _, line in some)]
        if self.results:
            results = [[name, f"{value:.2e}", *self._result_interval(name)] for name, value in self.results.items()]
            heads = ["results of the whole", "rel. error", *(["interval"] if results and len(results[0]) > 2 else [])]
            lines += ["", *table_lines(heads, results, left=(0,))]
        notes = [f"Means over seeds {', '.join(map(str, self.seeds))}. Interval: {INTERVAL_METHOD}."] if len(self.seeds) > 1 else []
        units = [line for sentence in unit_sentences(facts) for line in wrap_lines(sentence)]
        about_functions = [FUNCTION_NOTE] if any(isinstance(row.product, Function) for row in self.rows) else []
        return "\n".join([*lines, "", *below, *units, *notes, NOTE, *about_functions, *(c.note for c in shown if c.note)])

    def _rows_by_key(self) -> Iterator[list[ProductErrors]]:
        """Yield the rows of all seeds, for each product and policy."""
        for _, rows in groupby(self.rows, key=lambda row: (row.product, row.policy)):
            yield list(rows)

    def _result_interval(self, policy: str) -> list[str]:
        values = self.results_by_seed.get(policy, ())
        return [_interval_text(mean_interval(values))] if len(values) > 1 else []

    def summary(self) -> Table:
        """Return a table with a row for each product and policy, and one for the whole function: mean and interval over the seeds.

        A row has the mean relative error, its interval and the number of seeds. The interval is that of `INTERVAL_METHOD`; with fewer than
        two seeds it is None. A row without a product is of all results of the function.
        """
        rows = []
        for several in self._rows_by_key():
            found = _known_interval([row.relative_error for row in several])
            facts = recipe_facts(several[0].recipe, self.provenance.evidence)
            rows.append((several[0].product.name, several[0].policy, len(several), *found, *facts))
        for name, mean in self.results.items():
            values = self.results_by_seed.get(name, (mean,))
            rows.append((None, name, len(values), *_known_interval(values), *NO_FACTS))
        heads = ("product", "policy", "seeds", "relative_error", "low", "high", *RECIPE_COLUMNS)
        return Table(f"Means of {repr(self)[1:-1]}", heads, tuple(rows), {"interval": INTERVAL_METHOD})

    def __repr__(self) -> str:
        products, policies = {row.product.name for row in self.rows}, {row.policy for row in self.rows}
        policy_word = "policy" if len(policies) == 1 else "policies"
        return f"<Comparison of {len(products)} product{'s' * (len(products) != 1)} under {len(policies)} {policy_word}>"

    def table(self) -> Table:
        """Return a table with a row for each product, policy and seed: all figures, and the worst element with its exact value."""
        rows = tuple((*_errors_record(row), *recipe_facts(row.recipe, self.provenance.evidence)) for row in self.rows)
        facts = {
            "results": dict(self.results), "seeds": list(self.seeds),
            "results_by_seed": {name: list(values) for name, values in self.results_by_seed.items()},
            "interval": INTERVAL_METHOD, "provenance": to_plain(self.provenance),
        }  # fmt: skip
        return Table(repr(self)[1:-1], RECORD_COLUMNS, rows, facts)

    def to_members(self, codecs: Codecs | None) -> dict[str, Any]:
        return super().to_members({**(codecs or {}), **WORST_CODEC})

    @classmethod
    def from_members(cls, data: dict[str, Any], codecs: Codecs | None = None) -> Self:
        found = super().from_members(data, {**(codecs or {}), **WORST_CODEC})
        if any([row.seed for row in rows] != list(found.seeds or (None,)) for rows in found._rows_by_key()):
            raise DamagedFile("records: expected a row for each product, policy and seed")
        return found

    def plot(self) -> Figure:
        """Draw the relative errors on a logarithmic axis, a line for each product. With several seeds, marks are means and bars the range.

        An error of 0 has no mark, and neither has a product that a policy leaves.

        Returns:
            A matplotlib Figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        series: dict[str, dict[str, Sequence[float]]] = {}
        known: dict[str, None] = {}
        for rows in self._rows_by_key():
            policy = rows[0].policy
            series.setdefault(policy, {})[rows[0].product.name] = [row.relative_error for row in rows]
            target, *_, evidence = recipe_facts(rows[0].recipe, self.provenance.evidence)
            known |= {f"{policy}: {target}, {evidence}.": None} if target else {}
        note = ["Relative error: the norm of the errors over the norm of the exact results (Frobenius), without a unit."]
        note += [f"Marks: means over {len(self.seeds)} seeds; bars: from the least to the greatest."] if len(self.seeds) > 1 else []
        title = "Error of each matrix product under each policy, against the exact product of the same operands"
        return dot_plot(series, title=title, label="relative error", note=" ".join([*note, *known]))


MAX_WIDTH = 140  # characters of a line of the table
OPERAND_COUNTS = ("overflow", "underflow")  # fields with a count of A and one of B
FIGURES = (
    "runs", "relative_error", "operand_error", "sum_error", "output_error", "largest_error", "bits_lost", "most_bits_lost", "not_finite",
)  # fmt: skip
COUNTS = ("runs", "not_finite")  # the figures that are counts
RECORD_COLUMNS = (
    "product", "operands", "policy", "by", "seed", *FIGURES, *(f"{name}_{side}" for name in OPERAND_COUNTS for side in "ab"),
    "worst_run", "worst_batch", "worst_row", "worst_column", "worst_value", "worst_exact", *RECIPE_COLUMNS,
)  # fmt: skip


def _errors_record(row: ProductErrors) -> tuple[Any, ...]:
    worst = (None,) * 6 if row.worst is None else (row.worst.run, *row.worst.index, row.worst.value, row.worst.exact)
    counts = [count for name in OPERAND_COUNTS for count in getattr(row, name) or (None, None)]
    figures = [getattr(row, name) for name in FIGURES]
    return (row.product.name, row.product.operands, row.policy, row.method, row.seed, *figures, *counts, *worst)


def _write_worst(worst: WorstElement | None) -> Any:
    return None if worst is None else [worst.run, list(worst.index), worst.value, str(worst.exact)]


def _read_worst(data: Any) -> WorstElement | None:
    """Return the element that a file has, without its operands."""
    if data is None:
        return None
    run, index, value, exact = from_plain("worst", tuple[int, tuple[int, int, int], float, str], data)
    return WorstElement(run, index, value, Fraction(exact))


WORST_CODEC = {WorstElement | None: Codec(_write_worst, _read_worst)}


# ---- means over seeds


class MeanErrors(NamedTuple):
    """The errors of one product under one policy as a line of the table."""

    row: ProductErrors  # figures are means over the seeds, counts are sums, and the worst element is that of all seeds
    interval: MeanInterval | None  # interval of the relative error; None without several seeds


def mean_errors(rows: Sequence[ProductErrors]) -> MeanErrors:
    """Return the mean over the seeds of one product's errors under one policy."""
    if len(rows) == 1:
        return MeanErrors(rows[0], None)
    first = rows[0]
    optional = lambda name: None if getattr(first, name) is None else fmean(getattr(row, name) for row in rows)
    pair = lambda name: None if getattr(first, name) is None else tuple(sum(getattr(row, name)[side] for row in rows) for side in (0, 1))
    worst = max((row.worst for row in rows if row.worst is not None), key=lambda one: abs(Fraction(one.value) - one.exact), default=None)
    means = {name: optional(name) for name in FIGURES if name not in (*COUNTS, "largest_error", "most_bits_lost")}
    most = {name: max(getattr(row, name) for row in rows) for name in ("largest_error", "most_bits_lost")}
    counts = {name: sum(getattr(row, name) for row in rows) for name in COUNTS} | {name: pair(name) for name in OPERAND_COUNTS}
    return MeanErrors(replace(first, worst=worst, **means, **most, **counts), mean_interval([row.relative_error for row in rows]))


def _known_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the mean and the ends of its interval, None for a single value."""
    found = mean_interval(values)
    return (found.mean, None, None) if len(values) < 2 else found


def _interval_text(interval: MeanInterval) -> str:
    return f"{interval.low:.2e} to {interval.high:.2e}"


NOTE = """Each product gets the operands that the function itself has there, the same under every policy; the exact product is of these, in
float64 by NumPy, and of the worst element in rational arithmetic. Operands, sums: the parts of the error that come of quantising the
operands, and of how their products are added. Bits lost: log2 of the error in ulps of the result, mean and most.
Worst: [batch, row, column], what came."""

FUNCTION_NOTE = "A function gets its own operands too; the exact function is of these, in float64."


@dataclass(frozen=True)
class Column:
    """A column of the table."""

    head: str
    kind: str  # "error", "bits", "pair", "interval" or "plain"
    name: str  # field of ProductErrors
    always: bool = True  # whether it is shown even if it has only blank cells
    blank_cells: tuple[str, ...] = ("-", "0+0", "0")  # cells without information
    note: str = ""  # line under the table

    def cell(self, line: MeanErrors) -> str:
        value = line.interval if self.kind == "interval" else getattr(line.row, self.name)
        if value is None:
            return "-"
        return {"error": "{:.2e}", "bits": "{:.1f}", "pair": "{0[0]}+{0[1]}", "interval": "{0.low:.2e} to {0.high:.2e}", "plain": "{}"}[
            self.kind
        ].format(value)


COLUMNS = (
    Column("rel. error", "error", "relative_error"),
    Column("interval", "interval", "relative_error", False),
    Column("operands", "error", "operand_error"),
    Column("sums", "error", "sum_error"),
    Column(
        "output", "error", "output_error", False, note="Output: the relative error of all results where this product alone is emulated."
    ),
    Column("bits lost", "bits", "bits_lost"),
    Column("most", "bits", "most_bits_lost"),
    Column("over", "pair", "overflow", False, note="Over: elements of A + of B that quantisation takes out of range."),
    Column("under", "pair", "underflow", False, note="Under: elements of A + of B that it takes to zero."),
    Column("inf/NaN", "plain", "not_finite", False),
    Column("worst", "plain", "worst"),
)


def _product_heading(row: ProductErrors) -> str:
    computed = row.product
    shapes = (computed.shape,) if isinstance(computed, Function) else (computed.lhs_shape, computed.rhs_shape)
    kind = f"{computed.kind} of " if isinstance(computed, Function) else ""
    text = " · ".join(f"[{','.join(map(str, shape))}]" for shape in shapes)
    return f"{computed.name}: {kind}{text}, {row.runs} run{'s' if row.runs != 1 else ''}"


# ---- the measurement


class CapturedRun(NamedTuple):
    """One run of a product: its operands and the other arguments of its dot_general."""

    lhs: np.ndarray
    rhs: np.ndarray
    dimension_numbers: DimensionNumbers
    kwargs: dict[str, Any]


class MeasuredOperand(NamedTuple):
    """An operand [batch, rows, K] quantised by a recipe."""

    format: Format
    quantized: QuantizedOperand
    values: np.ndarray  # exact values of the codes, float64, with a Hadamard transform undone
    transformed: tuple[np.ndarray, np.ndarray] | None = None  # transformed operand before and after rounding, if there is a transform


QuantizedPair = tuple[MeasuredOperand, MeasuredOperand]


@dataclass
class ErrorSums:
    """Sums and counts over the runs of a product."""

    tally: ErrorTally
    squared_error: float = 0.0
    squared_size: float = 0.0
    squared_operand_error: float = 0.0
    squared_sum_error: float = 0.0
    not_finite: int = 0
    overflow: tuple[int, int] | None = None
    underflow: tuple[int, int] | None = None
    worst: WorstElement | None = None
    worst_error: float = 0.0

    def add(self, computed: np.ndarray, exact: np.ndarray) -> tuple[int, int, int] | None:
        """Add the errors of one run. Return the index of its worst element, unless an earlier run has a worse one.

        Args:
            computed: float64 [batch, rows, columns].
            exact: float64 of the same shape.
        """
        finite = np.isfinite(computed) & np.isfinite(exact)
        with np.errstate(invalid="ignore"):
            error = np.where(finite, np.abs(computed - exact), 0.0)
        self.not_finite += int((~np.isfinite(computed)).sum())
        self.squared_error += float((error**2).sum())
        self.squared_size += float((exact[finite] ** 2).sum())
        self.tally.add(error[finite], exact[finite])
        if not finite.any() or (self.worst is not None and error.max() <= self.worst_error):
            return None
        batch, row, column = map(int, np.unravel_index(np.argmax(np.where(finite, error, -1.0)), error.shape))
        self.worst_error = float(error[batch, row, column])
        return batch, row, column

    def summarise(self, product: Product | Function, policy: str, method: str, choice: Choice | FunctionChoice, runs: int) -> ProductErrors:
        """Return the errors over all runs; the parts that come of quantising are None where nothing was quantised."""
        largest, _, _, _, most_bits, mean_bits = self.tally.figures
        norm = lambda squared: float(np.sqrt(squared / self.squared_size)) if self.squared_size else float("nan")
        return ProductErrors(
            product=product,
            policy=policy,
            method=method,
            choice=choice,
            runs=runs,
            relative_error=norm(self.squared_error),
            operand_error=None if self.overflow is None else norm(self.squared_operand_error),
            sum_error=None if self.overflow is None else norm(self.squared_sum_error),
            largest_error=largest,
            bits_lost=mean_bits,
            most_bits_lost=most_bits,
            overflow=self.overflow,
            underflow=self.underflow,
            not_finite=self.not_finite,
            worst=self.worst,
        )


def measure_errors(product: Product, policy: str, decision: Decision, runs: Sequence[CapturedRun]) -> ProductErrors:
    """Measure the errors of a product over its runs under a policy that decided to replace it."""
    dot_general = decision.dot_general
    assert dot_general is not None
    recipe, key, mirrored = None, None, False
    if isinstance(dot_general, DotGeneral) and isinstance(dot_general.recipe, Recipe):
        recipe, key, mirrored = dot_general.recipe, dot_general.key, dot_general.a == "rhs"
    sums = ErrorSums(ErrorTally(ARRAY_FORMATS[np.dtype(product.dtype)]))
    for number, run in enumerate(runs):
        d = dot_general(jnp.asarray(run.lhs), jnp.asarray(run.rhs), run.dimension_numbers, **run.kwargs)
        a, b = _as_matrices(run)
        d = np.asarray(d, np.float64).reshape(*a.shape[:2], b.shape[-1])
        if mirrored:
            a, b, d = b.swapaxes(-1, -2), a.swapaxes(-1, -2), d.swapaxes(-1, -2)
        operands = None if recipe is None else quantize_operands(recipe, key, a, b)
        worst = _add_run(sums, number, (a.astype(np.float64), b.astype(np.float64)), d, operands)
        if worst is not None:
            sums.worst = worst if recipe is None or operands is None else _attach_codes(worst, recipe, operands)
    return sums.summarise(product, policy, decision.reason, decision.choice, len(runs))


def _as_matrices(run: CapturedRun) -> tuple[np.ndarray, np.ndarray]:
    """Return the operands as [batch, M, K] and [batch, K, N], with axes merged as `tcemu.dot_general` merges them."""
    axes = product_axes(run.dimension_numbers, run.lhs.ndim, run.rhs.ndim)
    size = lambda x, axes: int(np.prod([x.shape[i] for i in axes]))
    batch, k = size(run.lhs, axes.lhs_batch), size(run.lhs, axes.lhs_contracting)
    a = run.lhs.transpose(*axes.a_order).reshape(batch, size(run.lhs, axes.rows), k)
    return a, run.rhs.transpose(*axes.b_order).reshape(batch, k, size(run.rhs, axes.columns))


def quantize_operands(recipe: Recipe, key: PRNGKey | None, a: np.ndarray, b: np.ndarray) -> QuantizedPair:
    """Quantise both operands by a recipe.

    Args:
        recipe: The recipe.
        key: Random key of the product, if the recipe rounds stochastically.
        a: Array [batch, M, K] of a float dtype that JAX has.
        b: Array [batch, K, N] of a float dtype that JAX has.

    Returns:
        Both operands with K last.
    """
    keys = product_keys(key)
    scheme_a, scheme_b = recipe.schemes
    a = np.asarray(pruned_operand(recipe, jnp.asarray(a))) if recipe.op.sparse else a
    return _quantize_operand(scheme_a, a, keys.a), _quantize_operand(scheme_b, b.swapaxes(-1, -2), keys.b)


def _quantize_operand(scheme: Scheme, x: np.ndarray, key: PRNGKey | None) -> MeasuredOperand:
    codes, factors = _quantize_and_factor(scheme, jnp.asarray(x), key)
    values = exact_values(factors)
    if (transform := scheme.transform) is None:
        return MeasuredOperand(format=scheme.format, quantized=codes, values=values)
    with np.errstate(invalid="ignore"):
        undone = transform.invert(values, x.shape[-1])
    return MeasuredOperand(scheme.format, codes, undone, (np.asarray(transform.apply(jnp.asarray(x)), np.float64), values))


@partial(jax.jit, static_argnums=0)
def _quantize_and_factor(scheme: Scheme, x: Array, key: PRNGKey | None) -> tuple[QuantizedOperand, list[Array]]:
    """Return the quantised operand and the factors of its exact values."""
    q = quantize(scheme, x, key=key)
    return q, exact_factors(scheme, q)


def _add_run(
    sums: ErrorSums, number: int, matrices: tuple[np.ndarray, np.ndarray], d: np.ndarray, operands: QuantizedPair | None
) -> WorstElement | None:
    """Add one run's errors and counts. Return its worst element, unless an earlier run has a worse one. matrices: A and B, float64."""
    a, b = matrices
    reference = Reference.from_arrays(a, b, None)
    exact = reference.compute_rows(0, a.shape[-2])[0]
    index = sums.add(d, exact)
    if operands is not None:
        x, y = operands[0].values, operands[1].values.swapaxes(-1, -2)
        quantized = Reference.from_arrays(x, y, None).compute_rows(0, x.shape[-2])[0]  # exact product of the quantised operands
        both = np.isfinite(d) & np.isfinite(exact) & np.isfinite(quantized)
        sums.squared_operand_error += float(((quantized - exact)[both] ** 2).sum())
        sums.squared_sum_error += float(((d - quantized)[both] ** 2).sum())
        (over_a, under_a), (over_b, under_b) = count_out_of_range(a, operands[0]), count_out_of_range(b.swapaxes(-1, -2), operands[1])
        sums.overflow = _add_counts(sums.overflow, over_a, over_b)
        sums.underflow = _add_counts(sums.underflow, under_a, under_b)
    if index is None:
        return None
    batch, row, column = index
    return WorstElement(
        run=number,
        index=index,
        value=float(d[index]),
        exact=reference.exact_element(index),
        a_row=a[batch, row],
        b_col=b.swapaxes(-1, -2)[batch, column],
    )


def _add_counts(counts: tuple[int, int] | None, count_a: int, count_b: int) -> tuple[int, int]:
    before = counts or (0, 0)
    return before[0] + count_a, before[1] + count_b


def _attach_codes(worst: WorstElement, recipe: Recipe, operands: QuantizedPair) -> WorstElement:
    """Add the row and column of the worst element as the recipe quantises them."""
    batch, row, column = worst.index
    a, b = operands[0].quantized, operands[1].quantized
    scales = None
    if a.unit_scales is not None and b.unit_scales is not None:
        scales = np.asarray(a.unit_scales)[batch, row], np.asarray(b.unit_scales)[batch, column]
    a_codes, b_codes = np.asarray(a.codes)[batch, row], np.asarray(b.codes)[batch, column]
    return replace(worst, recipe=recipe, a_codes=a_codes, b_codes=b_codes, scales=scales)


def count_out_of_range(x: np.ndarray, operand: MeasuredOperand) -> tuple[int, int]:
    """Count the elements of x that quantisation takes out of range, to Inf or NaN or by clamping, and those that it turns into zero.

    An element counts as clamped if it became the largest magnitude and lies beyond that by more than half the format's last spacing there.
    If an operand is transformed first, the transformed elements are counted.
    """
    fmt, (x, values) = operand.format, operand.transformed or (x, operand.values)
    codes = np.asarray(operand.quantized.codes).astype(np.int64) >> fmt.unused_bits
    largest = (codes & (1 << fmt.exponent_bits + fmt.mantissa_bits) - 1) == fmt.max_magnitude
    significand = (1 << fmt.mantissa_bits) + (fmt.max_magnitude & (1 << fmt.mantissa_bits) - 1)  # significand of the largest magnitude
    finite, magnitude = np.isfinite(x), np.abs(values)
    with np.errstate(invalid="ignore", over="ignore"):
        clamped = largest & (np.abs(x) - magnitude > magnitude / (2 * significand))
    return int((finite & (~np.isfinite(values) | clamped)).sum()), int((finite & (x != 0) & (values == 0)).sum())
