"""`Claim`: what a source publishes and how it is measured here; `Outcome`: what was found, beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from tcemu.plots import dots, lines, spans
from tcemu.results import Result, Table
from tcemu.text import columns, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Measure = Callable[[int, bool], Mapping[str, float]]
Progress = Callable[[int, int], None]


class Quantity(NamedTuple):
    """One number of a claim.

    published: what the source gives, or None; said: how it says it, as "nearly 2%". series, x: the line of the picture on which it lies,
    and where; quantities without x are marks beside their names.
    """

    name: str
    published: float | None = None
    said: str = ""
    series: str = ""
    x: float | None = None


@dataclass(frozen=True, repr=False)
class Claim:
    """A published claim, and how it is measured here.

    name: as the command line takes it. title: the claim in one sentence. citation, link: who says so, and where. setting: what is computed,
    in words; reduced: what the quick form leaves out of it. differs: why ours differs from the source where it does. quantities: what is
    measured; measure: of a seed and whether the form is the quick one, the values by the quantities' names. seeds: how many are taken by
    default. x_label, y_label: of the picture.
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
    seeds: int = 5
    x_label: str = ""
    y_label: str = ""

    def __repr__(self) -> str:
        return f"<Claim {self.name}: {self.title}>"

    def run(self, seeds: int | Iterable[int] | None = None, *, quick: bool = False, progress: Progress | None = None) -> Outcome:
        """Measures the claim.

        seeds: how many, counted from 0, or which; None: as many as the claim takes. quick: the reduced form. progress: called with the
        seeds done and all of them. Raises ValueError for no seeds, or for one that is negative.
        """
        chosen = tuple(range(self.seeds if seeds is None else seeds)) if seeds is None or isinstance(seeds, int) else tuple(seeds)
        if not chosen or not all(isinstance(seed, int) and seed >= 0 for seed in chosen):
            raise ValueError(f"seeds: got {seeds!r}; wanted a number of seeds, 1 or more, or the seeds themselves, from 0 on")
        found: dict[str, list[float]] = {}
        for done, seed in enumerate(chosen):
            if progress is not None:
                progress(done, len(chosen))
            for name, value in self.measure(seed, quick).items():
                found.setdefault(name, []).append(float(value))
        known = [quantity.name for quantity in self.quantities]
        assert found.keys() <= set(known), f"{self.name} measures {found.keys() - set(known)}, which are none of its quantities"
        return Outcome(self, chosen, quick, {name: tuple(found[name]) for name in known if name in found})


class Row(NamedTuple):
    """One quantity as it was found. ours: the mean over the seeds; deviation: their standard deviation, None for one seed."""

    quantity: Quantity
    values: tuple[float, ...]

    @property
    def ours(self) -> float:
        return fmean(self.values)

    @property
    def deviation(self) -> float | None:
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the published number."""
        return None if self.quantity.published is None else self.ours - self.quantity.published


@dataclass(frozen=True, repr=False)
class Outcome(Result):
    """What a claim's measurement found. `str()` is the account for people, `records()` has a row for each quantity.

    values: for each quantity that was measured, its value for each seed.
    """

    claim: Claim
    seeds: tuple[int, ...]
    quick: bool
    values: Mapping[str, tuple[float, ...]]

    @classmethod
    def of(cls, claim: Claim, facts: Mapping[str, Any]) -> Outcome:
        """The outcome that wrote a JSON file. facts: what was read, as `to_dict()` gives it."""
        return cls(claim, tuple(facts["seeds"]), facts["quick"], {name: tuple(values) for name, values in facts["values"].items()})

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(Row(quantity, self.values[quantity.name]) for quantity in self.claim.quantities if quantity.name in self.values)

    def __repr__(self) -> str:
        form = ", quick form" if self.quick else ""
        return f"<Outcome of {self.claim.name}: {len(self.rows)} quantities, {_counted(self.seeds)}{form}>"

    def table(self) -> Table:
        """A row for each quantity; the facts are the claim in words, and the value for each seed."""
        heads = ("claim", "quantity", "published", "said", "ours", "least", "most", "deviation", "seeds", "difference", "series", "x")
        rows = tuple(
            (self.claim.name, q.name, q.published, q.said, row.ours, min(row.values), max(row.values), row.deviation, len(row.values),
             row.difference, q.series, q.x)
            for row in self.rows
            for q in (row.quantity,)
        )  # fmt: skip
        words = ("citation", "link", "setting", "differs")
        facts: dict[str, Any] = {"claim": self.claim.name} | {name: getattr(self.claim, name) for name in words}
        facts |= {"quick": self.quick, "reduced": self.claim.reduced if self.quick else ""}
        facts |= {"seeds": list(self.seeds), "values": {name: list(values) for name, values in self.values.items()}}
        return Table(self.claim.title, heads, rows, facts)

    def __str__(self) -> str:
        """The claim, the setting, a line for each quantity, and why ours differs."""
        claim = self.claim
        said = [f"{claim.name}: {claim.title}", *wrapped(claim.citation), claim.link, *wrapped(f"Setting: {claim.setting}")]
        said += wrapped(f"Quick form: {claim.reduced}") if self.quick else []
        cells = [_cells(row) for row in self.rows]
        heads = ("", "published", "ours", "deviation", "difference")
        kept = [i for i in range(len(heads)) if i in (0, 2) or any(row[i] not in ("", "-") for row in cells)]
        shown = columns([heads[i] for i in kept], [[row[i] for i in kept] for row in cells], left=(0,))
        none = [] if any(row.quantity.published is not None for row in self.rows) else ["No number is published of these."]
        over = (
            f"Ours is the mean over {_counted(self.seeds)}; deviation is the standard deviation over them." if len(self.seeds) > 1 else ""
        )
        return "\n".join([*said, "", *shown, "", *none, *wrapped(over), *wrapped(claim.differs)])

    def plot(self) -> Figure:
        """Ours with its spread over seeds, and what is published, as a matplotlib Figure. Raises ImportError if matplotlib is missing."""
        placed = [row for row in self.rows if row.quantity.x is not None]
        if not placed:
            ours = {row.quantity.name: row.ours for row in self.rows}
            given = {q.name: q.published for q in (row.quantity for row in self.rows) if q.published is not None}
            linear = not spans([*ours.values(), *given.values()])
            return dots(list(ours), {"ours": ours} | ({"published": given} if given else {}), self.claim.y_label, linear)
        series: dict[str, list[tuple[float, float, float, float]]] = {}
        for row in placed:
            assert row.quantity.x is not None
            series.setdefault(row.quantity.series, []).append((row.quantity.x, row.ours, min(row.values), max(row.values)))
        return lines(series, self.claim.x_label, self.claim.y_label)


def _counted(seeds: tuple[int, ...]) -> str:
    return f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}"


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    """A quantity for people. The difference is relative where the published number is not zero."""
    quantity, difference = row.quantity, row.difference
    published = "-" if quantity.published is None else quantity.said or f"{quantity.published:.4g}"
    if difference is None:
        apart = "-"
    elif difference == 0:
        apart = "none"
    elif quantity.published:
        apart = f"{100 * difference / abs(quantity.published):+.0f}%"
    else:
        apart = f"{difference:+.2g}"
    return (quantity.name, published, f"{row.ours:.4g}", "-" if not row.deviation else f"{row.deviation:.1g}", apart)
