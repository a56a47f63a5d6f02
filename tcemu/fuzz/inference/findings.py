"""What probes of a black box showed, and the account of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tcemu.arithmetic.model import Model
from tcemu.fuzz.runs import Run
from tcemu.isa.instructions import Instruction
from tcemu.plots import dots
from tcemu.results import Result, Table, scalar
from tcemu.text import wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNTS = ("compared", "that differ")  # the columns of `Run.by_kind`


@dataclass(frozen=True)
class Finding:
    """One thing that probes showed. field: of Model, or "" if it is none of its fields."""

    field: str
    value: Any
    evidence: str

    def __str__(self) -> str:
        return f"{f'{self.field} = {self.value}' if self.field else self.value}: {self.evidence}"


@dataclass(frozen=True, repr=False)
class Inferred(Result):
    """The arithmetic of a black box. `str()` is the account for people, with the whole Model; `records()` has what was found, for pandas.

    model: None if the probes led to none; comparison: of the box with it, on cases of `tcemu.fuzz.generate`. survivors: all models that
    agree with the box on all cases, `model` first; more than one where neither probes nor cases tell them apart.
    """

    op: Instruction
    box: str
    model: Model | None
    findings: tuple[Finding, ...]
    asked: int  # probes
    comparison: Run | None
    survivors: tuple[Model, ...] = ()

    @property
    def confirmed(self) -> bool:
        """The model gives the words of the box on every case that was compared."""
        comparison = self.comparison
        return comparison is not None and comparison.complete and comparison.done > 0 and comparison.wrong_cases == 0

    def __repr__(self) -> str:
        found = "no model" if self.model is None else "a confirmed model" if self.confirmed else "a model that is not confirmed"
        return f"<Inferred of {self.box} for {self.op}: {found}, print it for the account>"

    def table(self) -> Table:
        """A row for each finding; the facts are the model's fields and how it was confirmed."""
        compared = self.comparison
        facts: dict[str, Any] = {"op": str(self.op), "box": self.box, "probes": self.asked, "confirmed": self.confirmed}
        facts["model"] = None if self.model is None else {name: scalar(value) for name, value in vars(self.model).items()}
        facts |= {"survivors": len(self.survivors), "cases": compared.done if compared else 0}
        facts |= {"wrong_outputs": compared.wrong_outputs if compared else None}
        return Table(repr(self)[1:-1], ("field", "value", "evidence"), tuple((f.field, f.value, f.evidence) for f in self.findings), facts)

    def plot(self) -> Figure:
        """The cases on which the box was compared with the model, by their kinds, and those that differ, as a matplotlib Figure.

        Raises ValueError where nothing was compared, ImportError if matplotlib is not installed.
        """
        compared = self.comparison
        if compared is None or compared.by_kind is None:
            raise ValueError("plot: no model was found, so nothing was compared; str() has what the probes showed")
        names = [kind.name for kind in compared.kinds]
        series = {
            title: dict(zip(names, map(float, counts), strict=True)) for title, counts in zip(COUNTS, compared.by_kind.T, strict=True)
        }
        return dots(names, series, "cases", linear=True)

    def __str__(self) -> str:
        said = [
            f"{self.op}",
            f"{self.box}, by {self.asked:,} probes:",
            *(line for f in self.findings for line in wrapped(f"  {f}", indent="    ")),
        ]
        if self.model is None or self.comparison is None:
            return "\n".join([*said, "No model of tcemu has this arithmetic."])
        outputs = self.comparison.done * self.op.m * self.op.n
        said += wrapped(repr(self.model), indent="      ")
        if self.confirmed:
            others = [_difference(self.model, other) for other in self.survivors[1:]]
            also = f" The same with {', '.join(others)}: it is not determined." if others else ""
            return "\n".join([*said, f"0 mismatches with it of {outputs:,} outputs.{also}"])
        return "\n".join(
            [*said, f"but {self.comparison.wrong_outputs:,} of {outputs:,} outputs differ from it, so it is not the whole truth."]
        )


def _difference(model: Model, other: Model) -> str:
    """The fields of another model that differ."""
    return " and ".join(f"{name}={value}" for name, value in vars(other).items() if value != getattr(model, name))
