"""The launches of an emulated program, as a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tcemu.base.results import Result, Table


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    kernel: str  # name of the Triton function
    grid: tuple[int, int, int]
    threads: int  # of a block
    settings: dict[str, Any]  # constants, num_warps, num_stages
    statements: int  # executed PTX statements, each by all threads of a chunk of blocks
    seconds: float
    inexact: tuple[str, ...]  # what may not have the GPU's bits, and why
    printed: str = ""  # by tl.device_print


@dataclass(repr=False)
class LaunchReport(Result):
    """All launches under `tcemu.triton.emulated`, in order.

    `str` of it is a table; `records()` has a row for each launch.
    """

    target: str
    triton: str = ""  # version whose compiler or interpreter ran; see `tcemu.kernels.triton.triton_versions`
    launches: list[Launch] = field(default_factory=list)

    def table(self) -> Table:
        """One row for each launch."""
        columns = ("kernel", "grid", "threads", "settings", "statements", "seconds", "bits")
        rows = tuple(
            (
                each.kernel, " x ".join(map(str, each.grid)), each.threads,
                ", ".join(f"{name}={value}" for name, value in each.settings.items()), each.statements, round(each.seconds, 3),
                f"not exact: {', '.join(each.inexact)}" if each.inexact else "exact",
            )
            for each in self.launches
        )  # fmt: skip
        return Table(f"Launches on {self.target}, Triton {self.triton}", columns, rows, {"target": self.target, "triton": self.triton})
