"""Pictures of results by matplotlib, which is imported when a picture is wanted, and not before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS = "osD^vP*X<>"


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot() needs matplotlib: pip install 'tcemu[viz]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def dots(names: Sequence[str], series: Mapping[str, Mapping[str, float]], label: str, linear: bool = False) -> Figure:
    """For each series a mark a name, names downwards; what is not there has no mark.

    The axis is logarithmic, where what is 0 has no mark either; or, with `linear`, as it is.
    """
    figure = _figure(8, 1.2 + 0.3 * len(names))
    axes: Any = figure.subplots()
    for number, (title, values) in enumerate(series.items()):
        places = [names.index(name) for name in values]
        shown = [value if value > 0 or linear else float("nan") for value in values.values()]
        axes.plot(shown, places, MARKS[number % len(MARKS)], label=title)
    axes.set_xscale("linear" if linear else "log")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)
    if series:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def lines(series: Mapping[str, Sequence[tuple[float, float, float, float]]], x_label: str, y_label: str) -> Figure:
    """A line for each series of (x, y, least y, most y), with a band from least to most.

    An axis is logarithmic where all its values are above zero and span more than a factor of 8; x then in powers of two.
    """
    figure = _figure(8, 5)
    axes: Any = figure.subplots()
    for number, (title, points) in enumerate(series.items()):
        x, y, least, most = zip(*sorted(points), strict=True)
        axes.plot(x, y, marker=MARKS[number % len(MARKS)], label=title)
        axes.fill_between(x, least, most, alpha=0.2)
    places = [x for points in series.values() for x, *_ in points]
    values = [y for points in series.values() for _, y, *_ in points]
    if spans(places):
        axes.set_xscale("log", base=2)
    if spans(values):
        axes.set_yscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    if len(series) > 1 or any(series):
        axes.legend(frameon=False)
    return figure


def spans(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis serves these values."""
    return min(values, default=0) > 0 and max(values) > 8 * min(values)


def bars(panels: Mapping[str, tuple[Sequence[int], Sequence[int]]], label: str) -> Figure:
    """A panel of bars for each entry, places and counts, one below the other; counts on a logarithmic axis."""
    figure = _figure(8, 2.2 * max(len(panels), 1))
    for axes, (title, (places, counts)) in zip(figure.subplots(max(len(panels), 1), 1, squeeze=False).flat, panels.items(), strict=False):
        axes.bar(places, counts, width=0.9)
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(0, None)
        axes.set_xlabel(title)
        axes.set_ylabel(label)
    return figure


def svg(figure: Figure) -> bytes:
    """A figure as SVG; the same bytes for the same figure and version of matplotlib."""
    from matplotlib import rc_context

    held = BytesIO()
    with rc_context({"svg.hashsalt": "tcemu", "svg.fonttype": "none"}):
        figure.savefig(held, format="svg", metadata={"Date": None})
    return held.getvalue()
