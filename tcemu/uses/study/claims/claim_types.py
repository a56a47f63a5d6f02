"""`Claim`: numbers that a source publishes and their measurement here; `Outcome`: the measured numbers beside the published ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tcemu.base.plain_values import Codec, Codecs
from tcemu.base.plots import dot_plot, line_plot, suits_log_axis
from tcemu.base.provenance import installed_versions
from tcemu.base.results import SavedResult, Table
from tcemu.base.text import table_lines, wrap_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Measure = Callable[[int, bool], Mapping[str, float]]
Progress = Callable[[int, int], None]


class Quantity(NamedTuple):
    """One number of a claim.

    Attributes:
        name: Name of the quantity.
        published: The source's number, or None.
        published_text: The source's wording, as "nearly 2%".
        series: Line of the picture on which the quantity lies.
        x: Position on that line. Quantities without x are marks beside their names.
        target: Target that the quantity is computed for, if it is not the claim's.
    """

    name: str
    published: float | None = None
    published_text: str = ""
    series: str = ""
    x: float | None = None
    target: str = ""


@dataclass(frozen=True, repr=False)
class Claim:
    """A published claim and its measurement.

    Attributes:
        name: Name on the command line.
        title: The claim in one sentence.
        citation: Source of the claim.
        link: Address of the source.
        setting: Description of the computation.
        reduced: Description of the quick form's reduction.
        differs: Reason why our numbers differ from the source's, where they do.
        quantities: The measured quantities.
        target: Target that the quantities without a target of their own are computed for. Quantities without either are of no GPU: they
            round operands, or add as no GPU does.
        measure: Function of a seed and of whether the form is quick that returns the values by the quantities' names.
        seeds: Default number of seeds.
        x_label: Label of the picture's x axis.
        y_label: Label of the picture's y axis.
    """

    name: str
    title: str
    citation: str
    link: str
    setting: str
    reduced: str
    differs: str
    quantities: tuple[Quantity, ...]
    measure: Measure
    target: str = ""
    seeds: int = 5
    x_label: str = ""
    y_label: str = ""

    def __repr__(self) -> str:
        return f"<Claim {self.name}: {self.title}>"

    def quantity_target(self, quantity: Quantity) -> str:
        """Return the target that a quantity is computed for, "" if it is of no GPU."""
        return quantity.target or self.target

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets of all quantities."""
        return tuple(target for target in dict.fromkeys(map(self.quantity_target, self.quantities)) if target)

    def reproduce(self, seeds: int | Iterable[int] | None = None, *, quick: bool = False, progress: Progress | None = None) -> Outcome:
        """Measure the claim.

        Args:
            seeds: Number of seeds, counted from 0, or the seeds themselves. None: the claim's default number.
            quick: Whether to measure the reduced form.
            progress: Function that is called with the number of finished seeds and the number of all seeds.

        Returns:
            The `Outcome`.

        Raises:
            ValueError: There are no seeds, or one is negative.
        """
        chosen = tuple(range(self.seeds if seeds is None else seeds)) if seeds is None or isinstance(seeds, int) else tuple(seeds)
        if not chosen or not all(isinstance(seed, int) and seed >= 0 for seed in chosen):
            raise ValueError(f"seeds: got {seeds!r}; expected a number of seeds, 1 or more, or the seeds themselves, from 0 on")
        values: dict[str, list[float]] = {}
        for done, seed in enumerate(chosen):
            if progress is not None:
                progress(done, len(chosen))
            for name, value in self.measure(seed, quick).items():
                values.setdefault(name, []).append(float(value))
        names = [quantity.name for quantity in self.quantities]
        assert values.keys() <= set(names), f"{self.name} measures {values.keys() - set(names)}, which are none of its quantities"
        return Outcome(self, chosen, quick, {name: tuple(values[name]) for name in names if name in values}, installed_versions())


class QuantityResult(NamedTuple):
    """The measured values of one quantity."""

    quantity: Quantity
    values: tuple[float, ...]  # one for each seed

    @property
    def ours(self) -> float:
        """The mean over the seeds."""
        return fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The standard deviation over the seeds, None for one seed."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Our number less the published one, None if none is published."""
        return None if self.quantity.published is None else self.ours - self.quantity.published


@dataclass(frozen=True, repr=False)
class Outcome(SavedResult):
    """The outcome of a claim's measurement. `str()` is an account for people, and `records()` has a row for each quantity.

    `tcemu.study.read_outcome` reads what `to_json` writes.

    Attributes:
        claim: The claim.
        seeds: The seeds.
        quick: Whether the quick form was measured.
        values: For each measured quantity, its value for each seed.
        versions: Versions of tcemu and the packages that computed; empty in files of before they were recorded.
    """

    saved_as = "tcemu study outcome", 2

    claim: Claim
    seeds: tuple[int, ...]
    quick: bool
    values: Mapping[str, tuple[float, ...]]
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the claim's texts, the values and the records as plain values."""
        return self.to_members({Claim: Codec(lambda claim: claim.name, str)})

    @classmethod
    def from_members(cls, data: dict[str, Any], codecs: Codecs | None = None) -> Self:
        get_claim = import_module("tcemu.uses.study.claims").get_claim  # the folder's list of claims stands on this module
        return super().from_members({"versions": {}, **data}, codecs or {Claim: Codec(str, get_claim)})

    @classmethod
    def from_facts(cls, claim: Claim, facts: dict[str, Any]) -> Outcome:
        """Rebuild an outcome from a JSON file with the words that the claim has now. facts: contents of the file, as in `to_dict()`."""
        return cls.from_members(facts, {Claim: Codec(str, lambda _: claim)})

    @property
    def rows(self) -> tuple[QuantityResult, ...]:
        """The measured quantities in the claim's order."""
        return tuple(
            QuantityResult(quantity, self.values[quantity.name]) for quantity in self.claim.quantities if quantity.name in self.values
        )

    def __repr__(self) -> str:
        form = ", quick form" if self.quick else ""
        return f"<Outcome of {self.claim.name}: {len(self.rows)} quantities, {_seeds_text(self.seeds)}{form}>"

    def table(self) -> Table:
        """Return a table with a row for each quantity. Its facts are the claim's texts and the value for each seed."""
        heads = (
            "claim", "quantity", "target", "published", "said", "ours", "least", "most", "deviation", "seeds", "difference", "series", "x",
        )  # fmt: skip
        rows = tuple(
            (self.claim.name, q.name, self.claim.quantity_target(q) or None, q.published, q.published_text, row.ours, min(row.values),
             max(row.values), row.deviation, len(row.values), row.difference, q.series, q.x)
            for row in self.rows
            for q in (row.quantity,)
        )  # fmt: skip
        words = ("citation", "link", "setting", "differs")
        facts: dict[str, Any] = {"claim": self.claim.name} | {name: getattr(self.claim, name) for name in words}
        facts |= {"quick": self.quick, "reduced": self.claim.reduced if self.quick else ""}
        facts |= {"seeds": list(self.seeds), "values": {name: list(values) for name, values in self.values.items()}}
        facts |= {"versions": dict(self.versions)}
        return Table(self.claim.title, heads, rows, facts)

    def __str__(self) -> str:
        """Return the claim, the setting, a line for each quantity, and the reasons of differences."""
        claim = self.claim
        said = [f"{claim.name}: {claim.title}", *wrap_lines(claim.citation), claim.link, *wrap_lines(f"Setting: {claim.setting}")]
        said += wrap_lines(f"Quick form: {claim.reduced}") if self.quick else []
        cells = [_quantity_cells(row, claim.quantity_target(row.quantity)) for row in self.rows]
        heads = ("", "target", "published", "ours", "deviation", "difference")
        kept = [i for i in range(len(heads)) if i in (0, 3) or any(row[i] not in ("", "-") for row in cells)]
        shown = table_lines([heads[i] for i in kept], [[row[i] for i in kept] for row in cells], left=(0, 1) if 1 in kept else (0,))
        none = [] if any(row.quantity.published is not None for row in self.rows) else ["No number is published of these."]
        over = (
            f"Ours is the mean over {_seeds_text(self.seeds)}; deviation is the standard deviation over them."
            if len(self.seeds) > 1
            else ""
        )
        return "\n".join([*said, "", *shown, "", *none, *wrap_lines(over), *wrap_lines(claim.differs)])

    def plot(self) -> Figure:
        """Draw our numbers with their spread over seeds, and the published ones.

        Returns:
            A matplotlib Figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        claim, several = self.claim, len(self.seeds) > 1
        title = f"{claim.name}: {claim.title}" + (" (quick form)" if self.quick else "")
        on_lines = [row for row in self.rows if row.quantity.x is not None]
        note = claim.setting + (f" Quick form: {claim.reduced}" if self.quick else "")
        if several:
            note += f"\nMeans over {len(self.seeds)} seeds; {'bands' if on_lines else 'bars'} from the least to the greatest."
        if not on_lines:
            published = {row.quantity.name: (row.quantity.published,) for row in self.rows if row.quantity.published is not None}
            linear = not suits_log_axis([*(row.ours for row in self.rows), *(number for (number,) in published.values())])
            series = {"ours": {row.quantity.name: row.values for row in self.rows}, "published": published}
            return dot_plot(series, title=title, label=claim.y_label, note=note, linear=linear)
        lines: dict[str, list[tuple[float, Sequence[float]]]] = {}
        points: dict[str, list[tuple[float, float]]] = {}
        for row in on_lines:
            assert row.quantity.x is not None
            lines.setdefault(row.quantity.series, []).append((row.quantity.x, row.values))
            if row.quantity.published is not None:
                points.setdefault(f"{row.quantity.series}, published", []).append((row.quantity.x, row.quantity.published))
        return line_plot(lines, title=title, x_label=claim.x_label, y_label=claim.y_label, note=note, points=points)


def _seeds_text(seeds: tuple[int, ...]) -> str:
    return f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}"


def _quantity_cells(row: QuantityResult, target: str) -> tuple[str, ...]:
    """Return a quantity's cells in the table for people. The difference is relative unless the published number is zero."""
    quantity, difference = row.quantity, row.difference
    published = "-" if quantity.published is None else quantity.published_text or f"{quantity.published:.4g}"
    if difference is None:
        apart = "-"
    elif difference == 0:
        apart = "none"
    elif quantity.published:
        apart = f"{100 * difference / abs(quantity.published):+.0f}%"
    else:
        apart = f"{difference:+.2g}"
    return (quantity.name, target or "-", published, f"{row.ours:.4g}", "-" if not row.deviation else f"{row.deviation:.1g}", apart)
