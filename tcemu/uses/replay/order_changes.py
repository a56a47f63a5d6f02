"""At which M do the bits of a layer's outputs change? The order of each number of rows, measured or predicted, as a table and a picture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from tcemu.base.errors import NotModelled
from tcemu.base.plots import empty_figure
from tcemu.base.records import check_positive_integers
from tcemu.base.results import Result, Table
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Lanes
from tcemu.uses.replay.kernel_profiles import MIN_PROBABILITY, find_profile, likely_recipe, list_profiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOURCES = ("measured", "predicted", "unknown")


class RowRange(NamedTuple):
    """Numbers of rows with one order."""

    first: int  # M
    last: int
    source: str  # one of SOURCES
    probability: float | None  # the least one of the predictions; None for what was measured or is unknown
    recipe: KernelRecipe | None  # of the first M; None if it is unknown

    @property
    def order(self) -> str:
        """The order in a few words."""
        if self.recipe is None:
            return "unknown"
        slices, unit = self.recipe.slices, self.recipe.unit
        if slices.dealt is not None:
            cut = f"{slices.dealt[0]} slices of tiles of {slices.dealt[1]} in turn"
        else:
            count = len(slices.edges) - 1
            cut = "one slice" if count == 1 else f"{count} slices of {slices.edges[1]}"
        by = f"{unit.lanes} lanes" if isinstance(unit, Lanes) else f"{unit.op.family}, K = {unit.op.k}"
        return f"{cut} by {by}" + ("" if isinstance(unit, Lanes) or unit.residue is None else f", K modulo {unit.residue} first")


@dataclass(frozen=True)
class OrderChanges(Result):
    """The orders of a layer for several numbers of rows.

    Attributes:
        library: Name of the profile.
        gpu: Name of the GPU.
        n: Columns of the outputs.
        k: Length of the sums.
        ranges: Ranges of M, ascending. Neighbours differ in their order or in its source.
    """

    library: str
    gpu: str
    n: int
    k: int
    ranges: tuple[RowRange, ...]

    @property
    def changes(self) -> tuple[int, ...]:
        """Each M whose order differs from the last known one below it. Where an order is predicted, so is the change."""
        found, before = [], None
        for one in self.ranges:
            if one.recipe is None:
                continue
            if before is not None and not one.recipe.has_order(before):
                found.append(one.first)
            before = one.recipe
        return tuple(found)

    def table(self) -> Table:
        """Make a table with a row per range.

        Returns:
            The table.
        """
        rows = tuple((one.first, one.last, one.order, one.source, one.probability) for one in self.ranges)
        title = f"{self.library} on {self.gpu}: M rows x {self.n} x {self.k}"
        return Table(title, ("from_m", "to_m", "order", "source", "probability"), rows, {"changes": list(self.changes)})

    def __str__(self) -> str:
        changes = ", ".join(map(str, self.changes)) or "none of these M"
        unknown = sum(one.last - one.first + 1 for one in self.ranges if one.recipe is None)
        return f"{self.table().text()}\nthe order, and with it the bits, changes at M = {changes}" + (
            f"; {unknown} of the M in these ranges are unknown" if unknown else ""
        )

    def plot(self) -> Figure:
        """Draw the number of slices over M, with measured, predicted and unknown orders apart.

        Returns:
            A matplotlib Figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = empty_figure(8, 3)
        axes = figure.subplots()
        colours: dict[str, str] = dict(zip(SOURCES, ("C0", "C1", "0.75"), strict=True))
        for one in self.ranges:
            count = 0 if one.recipe is None else max(1, len(one.recipe.slices.edges) - 1)
            axes.plot([one.first, one.last + 1], [count, count], color=colours[one.source], linewidth=4, solid_capstyle="butt")
        for source in SOURCES:
            axes.plot([], [], color=colours[source], linewidth=4, label=source)
        for m in self.changes:
            axes.axvline(m, color="C3", linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="M, rows", ylabel="slices of K (0: unknown)", title=self.table().title)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        return figure


def find_order_changes(
    library: str,
    n: int,
    k: int,
    rows: Iterable[int] = range(1, 513),
    *,
    version: str | None = None,
    gpu: str | None = None,
    min_probability: float = MIN_PROBABILITY,
) -> OrderChanges:
    """Find at which numbers of rows a library's product of a layer changes its order of sums.

    A row's bits depend on the other rows of a batch only by the order that the library chooses for M. Orders are those that were measured,
    and those that a rule predicts with at least `min_probability`.

    Args:
        library: As in `tcemu.replay.get_kernel_recipe`.
        n: Columns of B.
        k: Columns of A.
        rows: The M to look at.
        version: As in `tcemu.replay.get_kernel_recipe`.
        gpu: As in `tcemu.replay.get_kernel_recipe`.
        min_probability: Predictions with a lower probability count as unknown.

    Returns:
        The ranges of M with one order.

    Raises:
        NotModelled: The library was not measured.
        ValueError: Several profiles match, or a number is not positive.
    """
    profile = find_profile(list_profiles(), library, version, gpu)
    known: list[tuple[int, str, KernelRecipe | None]] = []
    for m in sorted(set(rows)):
        check_positive_integers(m=m, n=n, k=k)
        try:
            recipe = likely_recipe(profile, (m, n, k), min_probability)
            known.append((m, "measured" if recipe.conditions.probability is None else "predicted", recipe))
        except NotModelled:
            known.append((m, "unknown", None))
    return OrderChanges(library, profile.gpu, n, k, tuple(_ranges(known)))


def _ranges(known: list[tuple[int, str, KernelRecipe | None]]) -> Iterable[RowRange]:
    numbers, number, before = [], 0, None
    for one in known:
        if before is not None and not _same(before, one):
            number += 1
        numbers.append((number, one))
        before = one
    for _, group in groupby(numbers, key=lambda pair: pair[0]):
        part = [one for _, one in group]
        recipes = [recipe for _, _, recipe in part if recipe is not None]
        probability = min((r.conditions.probability for r in recipes if r.conditions.probability is not None), default=None)
        yield RowRange(part[0][0], part[-1][0], part[0][1], probability, recipes[0] if recipes else None)


def _same(one: tuple[int, str, KernelRecipe | None], other: tuple[int, str, KernelRecipe | None]) -> bool:
    if one[1] != other[1]:
        return False
    return one[2] is None or (other[2] is not None and one[2].has_order(other[2]))
