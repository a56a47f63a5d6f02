"""What `compare` returns: the errors of each product under each policy, as values and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from tcemu.emulation.policy import Choice
from tcemu.emulation.products import Product
from tcemu.explanation.exact import decimal
from tcemu.explanation.explain import explain
from tcemu.explanation.explanation import Explanation
from tcemu.linalg.recipes import Recipe
from tcemu.plots import dots
from tcemu.results import Result, Table
from tcemu.text import columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Worst:
    """The element of a product's results that is furthest from the exact one, with what `tcemu.explain` takes.

    run: which run of the product, from 0. index: of the result as [batch, row of A, column of B], the axes that dot_general multiplies out.
    value, exact: what came, and the exact sum of the products of a_row and b_col, the operands as fn has them, float64[K].
    A and B are the recipe's: where the recipe's A is rhs, the result counts as transposed.
    recipe: the recipe at work, or None; a_codes, b_codes: that row and column as the recipe quantises them; scales: those of its
    instruction's blocks, or None.
    """

    run: int
    index: tuple[int, int, int]
    value: float
    exact: Fraction
    a_row: np.ndarray
    b_col: np.ndarray
    recipe: Recipe | None = None
    a_codes: np.ndarray | None = None
    b_codes: np.ndarray | None = None
    scales: tuple[np.ndarray, np.ndarray] | None = None

    def explain(self) -> Explanation:
        """`tcemu.explain` of it: the instruction's steps on the quantised row and column, C = 0. str() shows the steps that lose the most.

        What a recipe does outside the instruction (scales that multiply sums, promotion, parts of K) is not part of it.
        Raises TypeError where no recipe is at work, Unsupported for a recipe whose unit has no instruction on its target.
        """
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
        return f"[{', '.join(map(str, self.index))}] {self.value:.6g}, exact {decimal(self.exact, 6)}"

    __repr__ = __str__


@dataclass(frozen=True)
class Errors:
    """What one policy does to one product, over all its runs.

    runs: how often it ran. by: what it was evaluated by, in words; choice: what the policy gave.
    relative_error: the norm of the errors over that of the exact results (Frobenius). operand_error, sum_error: its parts, over the same
    norm: what the exact product of the quantised operands is off, and what the emulated product is off from that; None where no recipe is
    at work. (Where both are large they need not add up: they may cancel.)
    output_error: the relative error of all results of the function where only this product is emulated; None if `compare` was not asked.
    largest_error: of an element.
    bits_lost, most_bits_lost: mean and largest log2 of the error in ulps of the result's dtype, from 0 to the bits of its significand.
    overflow: how many elements of A and of B quantisation clamps or takes to Inf or NaN; underflow: how many it takes to zero. None where
    no recipe is at work.
    not_finite: results that are not finite; they are left out of the errors. worst: the element furthest off, None if none is finite.
    """

    product: Product
    policy: str
    by: str
    choice: Choice
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
    worst: Worst | None
    output_error: float | None = None


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """Errors of products under policies: a sequence of `Errors`; str() is a table, `plot()` a picture, `records()` what pandas takes.

    results: for each policy, the relative error of all results of the function, with every product emulated, so that errors add up.
    """

    rows: tuple[Errors, ...]
    results: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Errors]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> Errors:
        return self.rows[index]

    def __str__(self) -> str:
        """A line for each product, and under it one for each policy. Columns in which nothing happened are left out."""
        shown = [c for c in COLUMNS if c.always or any(c.cell(row) not in c.nothing for row in self.rows)]
        heads, rows = ["  policy", *(c.head for c in shown)], [[f"  {row.policy}", *(c.cell(row) for c in shown)] for row in self.rows]
        head, *cells = columns(heads, rows, left=(0, len(shown)))
        lines = [head]
        for place, some in groupby(zip(self.rows, cells, strict=True), lambda pair: _place(pair[0])):
            lines += [place, *(line for _, line in some)]
        if self.results:
            lines += ["", *columns(["results of the whole", "rel. error"], [[k, f"{v:.2e}"] for k, v in self.results.items()], left=(0,))]
        return "\n".join([*lines, "", NOTE, *(c.note for c in shown if c.note)])

    def __repr__(self) -> str:
        products, policies = {row.product.name for row in self.rows}, {row.policy for row in self.rows}
        return f"<Comparison of {len(products)} products under {len(policies)} policies>"

    def table(self) -> Table:
        """A row for each product and policy, with all figures; of the worst element where it is, what came and what is exact."""
        return Table(repr(self)[1:-1], RECORD, tuple(_record(row) for row in self.rows), {"results": dict(self.results)})

    def plot(self) -> Figure:
        """The relative errors as a matplotlib Figure: products downwards, on a logarithmic axis.

        An error of 0 has no mark; a product that a policy leaves has none either. Raises ImportError if matplotlib is not installed.
        """
        series: dict[str, dict[str, float]] = {}
        for row in self.rows:
            series.setdefault(row.policy, {})[row.product.name] = row.relative_error
        return dots(list(dict.fromkeys(row.product.name for row in self.rows)), series, "relative error")


SIDES = ("overflow", "underflow")  # counts of A and of B
FIGURES = (
    "runs", "relative_error", "operand_error", "sum_error", "output_error", "largest_error", "bits_lost", "most_bits_lost", "not_finite",
)  # fmt: skip
RECORD = (
    "product", "operands", "policy", "by", *FIGURES, *(f"{name}_{side}" for name in SIDES for side in "ab"),
    "worst_run", "worst_batch", "worst_row", "worst_column", "worst_value", "worst_exact",
)  # fmt: skip


def _record(row: Errors) -> tuple[Any, ...]:
    worst = (None,) * 6 if row.worst is None else (row.worst.run, *row.worst.index, row.worst.value, row.worst.exact)
    counts = [count for name in SIDES for count in getattr(row, name) or (None, None)]
    figures = [getattr(row, name) for name in FIGURES]
    return (row.product.name, row.product.operands, row.policy, row.by, *figures, *counts, *worst)


NOTE = """Each product gets the operands that the function itself has there, the same under every policy; the exact product is of these, in
float64 by NumPy, and of the worst element in rational arithmetic. Operands, sums: the parts of the error that come of quantising the
operands, and of how their products are added. Bits lost: log2 of the error in ulps of the result, mean and most.
Worst: [batch, row, column], what came."""


@dataclass(frozen=True)
class Column:
    """A column of the table. nothing: cells that say nothing; where all do, the column is left out, unless `always`."""

    head: str
    kind: str  # "error", "bits", "pair" or "plain"
    name: str  # the field of Errors
    always: bool = True
    nothing: tuple[str, ...] = ("-", "0+0", "0")
    note: str = ""

    def cell(self, row: Errors) -> str:
        value = getattr(row, self.name)
        if value is None:
            return "-"
        return {"error": "{:.2e}", "bits": "{:.1f}", "pair": "{0[0]}+{0[1]}", "plain": "{}"}[self.kind].format(value)


COLUMNS = (
    Column("rel. error", "error", "relative_error"),
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


def _place(row: Errors) -> str:
    shapes = " · ".join(f"[{','.join(map(str, shape))}]" for shape in (row.product.lhs_shape, row.product.rhs_shape))
    return f"{row.product.name}: {shapes}, {row.runs} run{'s' if row.runs != 1 else ''}"
