"""`Drift`, the result of `locate`: a table, JSON that can be read again, and HTML with a picture."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import log10
from typing import Any, Literal, NamedTuple, get_args

from tcemu.base.results import SavedResult, Table
from tcemu.uses.drift.bounds import Legitimacy
from tcemu.uses.drift.causes import Cause

Role = Literal["source", "hidden source", "carrier", "left only", "right only", "not compared"]
ROLES: tuple[Role, ...] = get_args(Role)
SOURCES = ROLES[:2]
COLOURS = {"source": "#c00", "hidden source": "#e60", "carrier": "#888"}
SHOWN_CARRIERS = 12


class Difference(NamedTuple):
    """The size of a difference between two results.

    Attributes:
        changed: Number of elements with other bits, or other values where the dtypes differ.
        elements: Number of compared elements.
        ulps: Largest difference in units of the last place of the narrower dtype; None for integers.
        relative: Norm of the difference over the norm of the right result; None if that is not finite.
    """

    changed: int
    elements: int
    ulps: int | None
    relative: float | None


class Line(NamedTuple):
    """The comparison of one operation, or of a group of operations that one side fused.

    Attributes:
        role: One of ROLES.
        order: Its place in the run.
        left: Number of the left operation, or -1.
        right: Number of the right operation, or -1.
        name: Names of the operations.
        path: Path of the module.
        source: Line of the code.
        backward: True in the backward pass.
        difference: Size of the difference, or None if it was not kept.
        cause: The cause, of a source.
        legitimate: The errors of both results over their bounds, of a source; None if they are unknown.
        share: Norm of the final difference that this source alone makes, over that of both runs; None if it was not measured.
    """

    role: Role
    order: int
    left: int
    right: int
    name: str
    path: str
    source: str
    backward: bool
    difference: Difference | None = None
    cause: Cause | None = None
    legitimate: Legitimacy | None = None
    share: float | None = None


@dataclass(frozen=True)
class Drift(SavedResult):
    """The operations at which two recorded runs diverge.

    Attributes:
        left: Name of the left record.
        right: Name of the right record.
        left_count: Number of operations of the left record.
        right_count: Number of operations of the right record.
        lines: The operations that differ, in order.
        complete: True if both runs closed their records. The record of a killed run is compared up to its last operation.
    """

    saved_as = "tcemu drift", 2

    left: str
    right: str
    left_count: int
    right_count: int
    lines: tuple[Line, ...]
    complete: bool

    @property
    def sources(self) -> tuple[Line, ...]:
        """The operations at which the runs diverge, in order."""
        return tuple(line for line in self.lines if line.role in SOURCES)

    @property
    def unexplained(self) -> tuple[Line, ...]:
        """The sources whose cause is unknown."""
        return tuple(line for line in self.sources if line.cause is None or not line.cause.explained)

    def recipes(self) -> list[dict[str, Any]]:
        """Return, for each source with a sum, the kernel recipes that pin its sides, as `tcemu.replay.loads` reads their JSON."""
        causes = [(line, line.cause.recipes) for line in self.sources if line.cause is not None and line.cause.recipes != (None, None)]
        return [{"path": line.path, "name": line.name, "left": left, "right": right} for line, (left, right) in causes]

    def __str__(self) -> str:
        counts = {role: sum(line.role == role for line in self.lines) for role in ROLES}
        head = f"{self.left} ({self.left_count} operations) against {self.right} ({self.right_count}): "
        if not self.lines:
            return head + "no operation differs"
        plural = lambda role, count: f"{count} {role}{'s' if count > 1 and role.endswith(('source', 'carrier')) else ''}"
        lines = [head + ", ".join(plural(role, count) for role, count in counts.items() if count)]
        if not self.complete:
            lines.append("a run did not end; what it recorded was compared")
        for line in self.sources:
            lines += ["", *_source_lines(line)]
        if not self.sources:
            lines += ["", "no source: the operands of the first operation that differs differ already"]
        carriers = [f"{_title(line)}{_size(line.difference)}" for line in self.lines if line.role == "carrier"]
        others = [f"{line.role}: {_title(line)}" for line in self.lines if line.role in ROLES[3:]]
        for heading, shown in (("carried on by:", carriers), ("on one side, or not kept:", others)):
            if shown:
                lines += ["", heading, *(f"  {text}" for text in shown[:SHOWN_CARRIERS])]
            if len(shown) > SHOWN_CARRIERS:
                lines.append(f"  and {len(shown) - SHOWN_CARRIERS} more")
        return "\n".join(lines)

    def table(self) -> Table:
        """Return a table with a row for each operation that differs."""
        columns = ("role", "left", "right", "path", "name", "source", "changed", "elements", "ulps", "relative", "cause", "share")
        rows = []
        for line in self.lines:
            size = line.difference or Difference(0, 0, None, None)
            cause = None if line.cause is None else ", ".join(line.cause.kinds) or "unexplained"
            rows.append((line.role, line.left, line.right, line.path, line.name, line.source, *size, cause, line.share))
        return Table(f"{self.left} against {self.right}", columns, tuple(rows), {"sources": len(self.sources), "complete": self.complete})

    def html(self) -> str:
        """Return a page's part: a picture of the relative difference by operation, and the report. It has no script."""
        return f"{self._picture()}<pre>{escape(str(self))}</pre>"

    def _repr_html_(self) -> str:
        return self.html()

    def _picture(self) -> str:
        """Draw the relative difference of each operation in order of execution, on a logarithmic axis."""
        differences = [(line, line.difference) for line in self.lines if line.difference is not None]
        shown = [(line, difference, difference.relative) for line, difference in differences if difference.relative]
        if not shown:
            return ""
        width, height, low = 720, 180, -9.0
        marks = []
        last = max(max(line.order for line, _, _ in shown), 1)
        for line, difference, relative in shown:
            x = 40 + (width - 60) * line.order / last
            y = 10 + (height - 40) * min(max(log10(relative) / low, 0), 1)
            title = escape(f"{_title(line)}{_size(difference)}")
            radius = 4 if line.role in SOURCES else 2
            marks.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{COLOURS.get(line.role, "#888")}"><title>{title}</title></circle>'
            )
        ticks = "".join(
            f'<text x="2" y="{14 + (height - 40) * -power / 9:.0f}" font-size="10">1e{power}</text>' for power in (0, -3, -6, -9)
        )
        label = f'<text x="40" y="{height - 8}" font-size="10">operations in order; red: sources; height: relative difference</text>'
        return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">{ticks}{"".join(marks)}{label}</svg>'


def _title(line: Line) -> str:
    number = str(line.left) if line.left == line.right or line.right < 0 else f"{line.left}|{line.right}"
    where = f" {line.path}" if line.path else ""
    source = f" ({line.source})" if line.source else ""
    return f"{number}{where}: {line.name}{' backward' if line.backward else ''}{source}"


def _size(size: Difference | None) -> str:
    if size is None:
        return ", not kept"
    ulps = "" if size.ulps is None else f", at most {size.ulps} ulp"
    relative = "" if size.relative is None else f", relative {size.relative:.1e}"
    return f", {size.changed} of {size.elements} elements{ulps}{relative}"


def _source_lines(line: Line) -> list[str]:
    lines = [f"{line.role}: {_title(line)}{_size(line.difference)}"]
    cause = line.cause
    if cause is not None:
        lines += [f"  cause: {', '.join(cause.kinds) or 'unexplained'}", f"    left:  {cause.left}", f"    right: {cause.right}"]
        if cause.twins:
            lines.append(
                f"    or, with the same words: {cause.twins[0]}" + (f", and {len(cause.twins) - 1} more" if len(cause.twins) > 1 else "")
            )
    if line.legitimate is not None:
        lines.append(f"  legitimate: {line.legitimate}")
    if line.share is not None:
        lines.append(f"  share of the final difference: {line.share:.2g}")
    return lines
