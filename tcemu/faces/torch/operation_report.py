"""The report of `emulate(model, gpu=...)`: its operations, and what each was computed by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tcemu.base.results import Result, Table
from tcemu.base.text import table_lines, wrap_lines
from tcemu.uses.replay.aten_operations import EXACT_RESULT, NOT_KNOWN


@dataclass(frozen=True)
class OperationLine:
    """Calls of one operator in one module whose operands have the same description.

    Attributes:
        operator: Name of the operator: "aten.mm".
        path: Path of the module, "" outside of modules.
        backward: Whether the backward pass called it.
        operands: Dtypes and shapes of the operands.
        kernel: The kernel or the order, or what runs in its place.
        status: "not known", "by rule", "measured" or "exact".
        evidence: The evidence; for what is not known, what a record would teach.
        runs: Number of calls.
    """

    operator: str
    path: str
    backward: bool
    operands: str
    kernel: str
    status: str
    evidence: str
    runs: int = 1


STATUS_ORDER = (NOT_KNOWN, "by rule", "measured", EXACT_RESULT)


class OperationReport(Result):
    """The operations of a block in the order of their evidence, unknown ones first: a sequence of `OperationLine`.

    Attributes:
        lines: A line for each operator, module and shape.
        gpu: The GPU.
        library: The library.
    """

    def __init__(self, lines: Sequence[OperationLine], gpu: str, library: str) -> None:
        self.lines, self.gpu, self.library = tuple(sorted(lines, key=lambda x: STATUS_ORDER.index(x.status))), gpu, library

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Any:
        return iter(self.lines)

    def __getitem__(self, index: int) -> OperationLine:
        return self.lines[index]

    @property
    def unknown(self) -> tuple[OperationLine, ...]:
        """The lines of operations whose result on the GPU is not known."""
        return tuple(line for line in self.lines if line.status == NOT_KNOWN)

    def counts(self) -> dict[str, int]:
        """Return the number of calls of each status."""
        return {status: sum(line.runs for line in self.lines if line.status == status) for status in STATUS_ORDER}

    def __str__(self) -> str:
        """Operations as text: those that move elements are counted only."""
        shown = [line for line in self.lines if line.status != EXACT_RESULT or not line.kernel.startswith("torch on this CPU")]
        rows = [
            [
                line.status,
                line.operator,
                line.path + " (backward)" * line.backward,
                line.operands,
                str(line.runs),
                line.kernel,
                line.evidence,
            ]
            for line in shown
        ]
        heads = ["status", "operator", "module", "operands", "runs", "kernel", "evidence"]
        counts = self.counts()
        summary = ", ".join(f"{counts[status]} {status}" for status in STATUS_ORDER)
        lines = table_lines(heads, rows, left=(0, 1, 2, 3, 5, 6)) if rows else []
        lines += wrap_lines(f"{self.library} on {self.gpu}: {sum(counts.values())} operations: {summary}")
        if counts[NOT_KNOWN]:
            lines += wrap_lines(
                "An operation that is not known ran as PyTorch runs it on this CPU. "
                f"tcemu.drift.record on an {self.gpu} records its operands and results; tcemu drift then says which arithmetic gives them."
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<OperationReport: {sum(line.runs for line in self.lines)} operations as {self.library} on {self.gpu}>"

    def table(self) -> Table:
        """Return a table with a row for each line."""
        heads = ("operator", "module", "backward", "operands", "kernel", "status", "evidence", "runs")
        rows = tuple((x.operator, x.path, x.backward, x.operands, x.kernel, x.status, x.evidence, x.runs) for x in self.lines)
        return Table(
            f"operations as {self.library} on {self.gpu}", heads, rows, {"gpu": self.gpu, "library": self.library, **self.counts()}
        )
