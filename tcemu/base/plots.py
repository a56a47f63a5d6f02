"""Pictures of results by matplotlib, which is imported only when a picture is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from math import isfinite, isnan, log10, nan
from statistics import fmean
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^vP*X<"  # nine, beside ten colours: the pairs repeat after ninety series
TITLE_WIDTH, NOTE_WIDTH, NAME_WIDTH = 84, 108, 34  # characters of a line


def empty_figure(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> Figure:
    """Return a figure of this size in inches. Raises ImportError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot() needs matplotlib: pip install '.[viz]' in a clone of tcemu") from error
    return Figure(figsize=(width, height), layout=layout)


def dot_plot(
    series: Mapping[str, Mapping[str, Sequence[float]]], *, title: str, label: str, note: str = "", linear: bool = False
) -> Figure:
    """Draw a mark for each series and name, with the names from top to bottom.

    Args:
        series: For each series title, the values of each name, as one for each seed. Their mean is the mark, and a bar goes from the least
            to the greatest. A missing name has no mark.
        title: Title of the figure.
        label: Label of the value axis, with its unit.
        note: Definitions, below the axis. The number of values without a mark is added.
        linear: If true, the value axis is linear. By default it is logarithmic, and values that are not above 0 have no mark.

    Raises:
        ImportError: matplotlib is not installed.
    """
    series = {name: values for name, values in series.items() if values}
    names = list(dict.fromkeys(name for values in series.values() for name in values))
    rows_of_names = [_wrap(name, NAME_WIDTH) for name in names]
    shared = sum(map(len, series.values())) > len(names)
    row_height = max(0.3, 0.17 * max((name.count("\n") + 1 for name in rows_of_names), default=1), 0.14 * len(series) * shared)
    body = max(row_height * len(names), _legend_height(series))
    figure = empty_figure(8, 0.7 + body + _words_height(title, note))
    axes: Any = figure.subplots()
    hidden, drawn = 0, []
    for number, (name, values) in enumerate(series.items()):
        shift = 0.6 * ((number + 0.5) / len(series) - 0.5) if shared else 0.0
        rows = [names.index(row) + shift for row in values]
        marks = [mean if isfinite(mean) and (mean > 0 or linear) else nan for mean in map(fmean, values.values())]
        hidden += sum(map(isnan, marks))
        axes.plot(marks, rows, MARKERS[number % len(MARKERS)], label=name, color=f"C{number % 10}")
        ends = [(min(some), max(some), row) for some, row in zip(values.values(), rows, strict=True) if len(some) > 1]
        shown = [(low, high, row) for low, high, row in ends if isfinite(high - low) and (low > 0 or linear)]
        if shown:
            lows, highs, heights = zip(*shown, strict=True)
            axes.hlines(heights, lows, highs, f"C{number % 10}", alpha=0.5)
        drawn += [mark for mark in marks if not isnan(mark)] + [end for low, high, _ in shown for end in (low, high)]
    axes.set_yticks(range(len(names)), rows_of_names, parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(label)
    if not linear:
        _set_log_axis(axes, "x", drawn)
    axes.grid(axis="x", alpha=0.3)
    _add_legend(axes, len(series) > 1)
    lost = "finite" if linear else "finite and above 0"
    return _add_words(figure, title, _join_notes(note, hidden, lost))


def line_plot(
    series: Mapping[str, Sequence[tuple[float, Sequence[float]]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    note: str = "",
    points: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Figure:
    """Draw a line and a band for each series.

    An axis is logarithmic if all its values are above zero and span more than a factor of 8. A logarithmic x axis has base 2.

    Args:
        series: For each series title, x and the values of y, as one for each seed. The line goes through their means, the band from the
            least to the greatest.
        title: Title of the figure.
        x_label: Label of the x axis, with its unit.
        y_label: Label of the y axis, with its unit.
        note: Definitions, below the axis. The number of points without a mark is added.
        points: Single points (x, y) for each title, drawn as hollow marks.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from_points = points or {}
    named = len(series) > 1 or any(series) or bool(from_points)
    figure = empty_figure(8 if not named else 9.5, max(4.0, _legend_height([*series, *from_points])) + 0.6 + _words_height(title, note))
    axes: Any = figure.subplots()
    places: list[tuple[float, float]] = [place for some in from_points.values() for place in some]
    for number, (name, some) in enumerate(series.items()):
        x, y, least, most = zip(*sorted((x, fmean(y), min(y), max(y)) for x, y in some), strict=True)
        places += zip(x, y, strict=True)
        axes.plot(x, y, marker=MARKERS[number % len(MARKERS)], label=name, color=f"C{number % 10}")
        axes.fill_between(x, least, most, alpha=0.2, color=f"C{number % 10}", linewidth=0)
    for number, (name, some) in enumerate(from_points.items()):
        x, y = zip(*some, strict=True)
        axes.scatter(x, y, s=90, marker=MARKERS[number % len(MARKERS)], facecolors="none", edgecolors="black", label=name, zorder=3)
    positions, values = [x for x, _ in places], [y for _, y in places if isfinite(y)]
    if suits_log_axis(positions):
        axes.set_xscale("log", base=2)
    elif all(float(x).is_integer() for x in positions):
        axes.xaxis.get_major_locator().set_params(integer=True)
    if suits_log_axis(values):
        _set_log_axis(axes, "y", values)
    axes.set_xlabel(x_label)
    axes.set_ylabel(_wrap(y_label, 2 * NAME_WIDTH))
    axes.grid(alpha=0.3)
    _add_legend(axes, named)
    return _add_words(figure, title, _join_notes(note, len(places) - len(values), "finite"))


def suits_log_axis(values: Sequence[float]) -> bool:
    """Return whether all values are above zero and span more than a factor of 8, so that a logarithmic axis suits them."""
    return min(values, default=0) > 0 and max(values) > 8 * min(values)


def _set_log_axis(axes: Any, name: Literal["x", "y"], values: Sequence[float]) -> None:
    """Make one axis logarithmic with ticks at the powers of ten, over at least a decade, and at their triples over less than two."""
    from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullLocator

    if not values:  # a logarithmic axis needs limits
        return
    getattr(axes, f"set_{name}scale")("log")
    low, high = log10(min(values)), log10(max(values))
    spare = max(0.05 * (high - low), (1.1 - (high - low)) / 2, 0.1)
    getattr(axes, f"set_{name}lim")(10 ** (low - spare), 10 ** (high + spare))
    axis = getattr(axes, f"{name}axis")
    if high - low + 2 * spare < 2:
        axis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.set_major_formatter(LogFormatterSciNotation(labelOnlyBase=False, minor_thresholds=(99, 99)))
        axis.set_minor_locator(NullLocator())


def _add_legend(axes: Any, named: bool) -> None:
    """Name the series to the right of the axes, where no line or mark can be."""
    handles, labels = axes.get_legend_handles_labels()
    if named and handles:
        legend = axes.legend(
            handles, [_wrap(label, NAME_WIDTH) for label in labels], loc="upper left", bbox_to_anchor=(1, 1), frameon=False
        )
        for text in legend.get_texts():
            text.set_parse_math(False)


def _add_words(figure: Figure, title: str, note: str) -> Figure:
    figure.suptitle(_wrap(title, TITLE_WIDTH), fontsize="medium", parse_math=False)
    if note:
        figure.supxlabel(_wrap(note, NOTE_WIDTH), x=0.01, ha="left", fontsize="small", color="0.3", parse_math=False)
    return figure


def _join_notes(note: str, hidden: int, wanted: str) -> str:
    one = hidden == 1
    missing = f"{hidden} value{'' if one else 's'} without a mark, since {'it is' if one else 'they are'} not {wanted}." if hidden else ""
    return "\n".join(filter(None, (note, missing)))


def _wrap(text: str, width: int) -> str:
    return "\n".join(line for part in text.split("\n") for line in (wrap(part, width) or [""]))


def _legend_height(names: Iterable[str]) -> float:
    """Height in inches of a legend with these names."""
    return 0.3 + 0.22 * sum(_wrap(name, NAME_WIDTH).count("\n") + 1 for name in names)


def _words_height(title: str, note: str) -> float:
    """Height in inches of the title and of the note, which may get one line more."""
    return 0.2 * (_wrap(title, TITLE_WIDTH).count("\n") + 1) + 0.16 * (_wrap(note, NOTE_WIDTH).count("\n") + 2)


def figure_svg(figure: Figure, title: str | None = None) -> bytes:
    """Return a figure as SVG: the same bytes for the same figure and version of matplotlib. title: what screen readers read."""
    from matplotlib import rc_context

    buffer = BytesIO()
    with rc_context({"svg.hashsalt": "tcemu", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None} | ({"Title": title} if title else {}))
    return buffer.getvalue()
