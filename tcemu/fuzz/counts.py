"""`Coverage`: the counts of what the cases of a run reached, as values, as a table and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax import Array

from tcemu.plots import bars
from tcemu.results import Record, Table, to_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAR = 64  # distances from here on are one
LEAST_CARRY, MOST_CARRY = -32, 8
EVENTS = (
    "an operand NaN", "Inf x 0", "+Inf and -Inf", "one infinity", "D zero", "D subnormal", "D normal",
    "D infinite of finite terms", "D NaN",
    "all products zero", "C zero", "the sum cancels to 0", "nothing cut", "something cut",
    "rounding exact", "rounding below half", "rounding a tie", "rounding above half", "D negative", "s32 passed",
)  # fmt: skip


class Coverage(NamedTuple):
    """Counts of a run, NumPy arrays; of one turn of the compiled loop JAX arrays."""

    products: np.ndarray | Array  # [FAR + 1]: distances of products to the largest exponent of their step
    accumulator: np.ndarray | Array  # [FAR + 1]: those of C
    carries: np.ndarray | Array  # [MOST_CARRY - LEAST_CARRY + 1]: the place of the sum's leading bit above (below) the largest exponent
    events: np.ndarray | Array  # [len(EVENTS)]
    cases: np.ndarray | Array  # [1]: those that were looked at

    @classmethod
    def none(cls) -> Coverage:
        zeros = lambda size: np.zeros(size, np.int64)  # noqa: E731
        return cls(
            products=zeros(FAR + 1), accumulator=zeros(FAR + 1), carries=zeros(MOST_CARRY - LEAST_CARRY + 1), events=zeros(len(EVENTS)),
            cases=zeros(1),
        )  # fmt: skip

    def table(self) -> Table:
        """A row for each event, and for each distance or place with what was seen there: "events", "products", "accumulator", "carries"."""
        rows = [("events", name, int(n)) for name, n in zip(EVENTS, self.events, strict=True)]
        for name, (places, counts) in self._panels().items():
            rows += [(name, place, count) for place, count in zip(places, counts, strict=True) if count]
        return Table(f"Coverage of {int(self.cases[0]):,} cases", ("counted", "at", "count"), tuple(rows), {"cases": int(self.cases[0])})

    def _panels(self) -> dict[str, tuple[list[int], list[int]]]:
        """Counts by their places: distances to the largest exponent, and places of the leading bit from it."""
        starts = {"products": 0, "accumulator": 0, "carries": LEAST_CARRY}
        counts = {name: np.asarray(getattr(self, name)).tolist() for name in starts}
        return {name: (list(range(start, start + len(counts[name]))), counts[name]) for name, start in starts.items()}

    def records(self) -> list[Record]:
        """A flat dict for each row of `table()`, as pandas and csv take them."""
        return self.table().records()

    def to_json(self, indent: int | None = None) -> str:
        """The table as strict JSON."""
        return to_json(self.table().to_dict(), indent)

    def _repr_html_(self) -> str:
        return self.table().html()

    def __repr__(self) -> str:
        return f"<Coverage of {int(self.cases[0]):,} cases>"

    def plot(self) -> Figure:
        """How often products and C were how far below the largest exponent, and where the leading bit of the sum was; matplotlib's Figure.

        Raises ImportError if matplotlib is not installed.
        """
        titles = {
            "products": "a product below the largest exponent",
            "accumulator": "C below it",
            "carries": "the sum's leading bit from it",
        }
        return bars({f"{titles[name]}, in bits": panel for name, panel in self._panels().items()}, "cases")

    def __add__(self, other: Coverage) -> Coverage:  # type: ignore[override]
        return jax.tree.map(lambda x, y: np.asarray(x, np.int64) + np.asarray(y, np.int64), self, other)
