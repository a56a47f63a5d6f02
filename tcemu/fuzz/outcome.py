"""`Run`: what a differential run was asked, and what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tcemu.arithmetic.model import Model
from tcemu.fuzz import coverage
from tcemu.fuzz.counts import Coverage
from tcemu.fuzz.generators import generate
from tcemu.fuzz.kinds import Kind
from tcemu.fuzz.operands import HostOperands
from tcemu.fuzz.shrink import Shrunk
from tcemu.fuzz.sides import Side
from tcemu.isa.instructions import Instruction
from tcemu.results import Result, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Run(Result):
    """A run as far as it came: what was asked, and what was found. `str()` is the account for people, `records()` has a row a kind."""

    op: Instruction
    left: Side
    right: Side
    cases: int
    seed: int
    kinds: tuple[Kind, ...]
    done: int = 0
    wrong_cases: int = 0
    wrong_outputs: int = 0
    first: tuple[int, ...] = ()  # numbers of the first cases that differ
    by_kind: np.ndarray | None = None  # int64 [kinds, 2]: cases, and those that differ
    coverage: Coverage | None = None
    signal: int = 0  # the number of the one that stopped it
    seconds: float = 0.0  # of work, over all sittings
    shrunk: Shrunk | None = None

    @property
    def complete(self) -> bool:
        return self.done >= self.cases

    @property
    def stopped(self) -> bool:
        """By Ctrl-C or SIGTERM."""
        return self.signal != 0

    def __str__(self) -> str:
        outputs = self.done * self.op.m * self.op.n
        lines = [str(self.op), f"{self.left.name} and {self.right.name}, seed {self.seed}: {self.done:,} of {self.cases:,} cases"]
        if self.wrong_cases:
            lines.append(f"{self.wrong_outputs:,} of {outputs:,} outputs differ, in {self.wrong_cases:,} cases")
        else:
            lines.append(f"0 mismatches of {outputs:,} outputs" if self.done else "nothing was compared")
        if self.by_kind is not None:
            parts = [
                f"{kind.name} {n:,}" + (f" ({wrong:,} differ)" if wrong else "")
                for kind, (n, wrong) in zip(self.kinds, self.by_kind, strict=True)
            ]
            lines.append("cases: " + ", ".join(parts))
        if self.coverage is not None and self.coverage.events.any():
            lines += coverage.lines(self.op, looked_at(self.left, self.right), self.coverage)
        if self.first:
            lines.append(f"first cases that differ: {', '.join(map(str, self.first[:8]))}")
        if self.shrunk is not None:
            lines += ["", str(self.shrunk)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        found = f"{self.wrong_outputs:,} outputs differ" if self.wrong_cases else "0 mismatches" if self.done else "nothing compared"
        return f"<Run of {self.left.name} and {self.right.name} for {self.op}: {self.done:,} of {self.cases:,} cases, {found}>"

    def table(self) -> Table:
        """A row for each kind of operands: its cases, and those that differ. The facts are what was asked, and the sums."""
        counts = np.zeros((len(self.kinds), 2), np.int64) if self.by_kind is None else self.by_kind
        asked = (str(self.op), self.left.name, self.right.name, self.seed)
        rows = tuple((*asked, kind.name, int(n), int(wrong)) for kind, (n, wrong) in zip(self.kinds, counts, strict=True))
        facts: dict[str, Any] = {name: getattr(self, name) for name in ("done", "wrong_cases", "wrong_outputs", "complete", "seconds")}
        facts |= {"cases_asked": self.cases, "outputs": self.done * self.op.m * self.op.n, "first_wrong_cases": list(self.first)}
        facts |= {"coverage": None if self.coverage is None or not self.coverage.cases[0] else self.coverage.records()}
        facts |= {"smallest_mismatch": None if self.shrunk is None else str(self.shrunk)}
        return Table(repr(self)[1:-1], ("op", "left", "right", "seed", "kind", "cases", "wrong_cases"), rows, facts)

    def plot(self) -> Figure:
        """What the cases reached, as `Coverage.plot`. Raises ValueError for a run that did not count it, ImportError without matplotlib."""
        if self.coverage is None or not self.coverage.cases[0]:
            raise ValueError("plot: this run did not count what its cases reached; run with covering=True")
        return self.coverage.plot()

    def operands(self, number: int) -> HostOperands:
        """The operands of one case, [1, ...]."""
        codes = generate(self.op, self.seed, number, 1, kinds=[k.name for k in self.kinds], weights=[k.weight for k in self.kinds])
        return {name: np.asarray(x) for name, x in codes.items()}


class NotWritten(OSError):
    """The file of a run cannot be written. run: as far as it came, with all that was counted."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


def looked_at(left: Side, right: Side) -> Model | None:
    """The model whose steps the coverage counts: the left one's, or the right one's if it has none."""
    return left.model if left.model is not None else right.model
