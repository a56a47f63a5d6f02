"""The picture of one step: its terms bit under bit, and which bits alignment and rounding remove. Drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from tcemu.base.plots import empty_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEPT, REMOVED, EDGE, INK, FAINT = "#bcd9f5", "#f6b8b0", "#b3261e", "#1a1a1a", "#666666"
MAX_COLUMNS = 56  # bit positions of a picture; lower ones are left out
MAX_ROWS = 24  # terms of a panel; those that lose the most are kept
MAX_GAP = 3  # positions without a bit that are drawn; a longer gap becomes one column
MAX_NAME = 32  # characters of a row's name
ROW, TITLE_HEIGHT, PANEL_GAP, MARGIN = 0.3, 0.34, 0.3, 0.15  # inches
CHARACTER = 0.088  # inches, the width of a character of the names
LEGEND = "Blue: bits that are kept. Red: bits that are removed, by alignment in a term and by rounding in the sum."
LEFT_OUT = "+n: n lower bits are not drawn."


class BitRow(NamedTuple):
    """A number of the picture."""

    name: str
    value: Fraction | str  # number, or the text of a NaN or an infinity
    last_bit: int | None  # exponent of the last bit that is kept; None: all are kept


class StepPanel(NamedTuple):
    """A step of one arithmetic as a panel of the picture."""

    title: str
    terms: tuple[BitRow, ...]
    total: BitRow | None  # sum of the retained terms; None if it is not a number
    edge: int | None  # exponent of the last bit that alignment keeps
    verdict: str  # line below the sum


def set_bits(value: Fraction | str) -> set[int]:
    """Return the exponents of the one bits of a number that is a fraction with a power of two below it."""
    if isinstance(value, str):
        return set()
    numerator, lowest = abs(value.numerator), 1 - value.denominator.bit_length()
    return {lowest + place for place in range(numerator.bit_length()) if numerator >> place & 1}


def choose_columns(panels: Iterable[StepPanel]) -> list[int | None]:
    """Return the exponents of the columns from the highest, with None for a long gap; at most MAX_COLUMNS."""
    places: set[int] = set()
    for panel in panels:
        for row in (*panel.terms, *([panel.total] if panel.total else [])):
            places |= set_bits(row.value)
        places |= set() if panel.edge is None else {panel.edge}
    columns: list[int | None] = []
    for place in sorted(places, reverse=True):
        last = columns[-1] if columns else None
        if last is not None and last - place > MAX_GAP + 1:
            columns.append(None)
        elif last is not None:
            columns += range(last - 1, place, -1)
        columns.append(place)
    return columns[:MAX_COLUMNS]


def draw_panels(panels: Sequence[StepPanel], title: str) -> Figure:
    """Draw panels one below the other, with the same columns.

    Args:
        panels: One panel for each arithmetic.
        title: Title of the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    panels = [_limit_terms(panel) for panel in panels]
    columns = choose_columns(panels)
    drawn = {place for place in columns if place is not None}
    numbers = [row for panel in panels for row in (*panel.terms, *([panel.total] if panel.total else []))]
    legend = f"{LEGEND} {LEFT_OUT}" if any(set_bits(row.value) - drawn for row in numbers) else LEGEND
    cell = 0.42 if len(columns) <= 24 else 0.3
    names = [_short(row.name) for panel in panels for row in panel.terms]
    left = MARGIN + CHARACTER * max([len("2⁻¹²³"), *map(len, names)]) + 0.1
    rows = [len(panel.terms) + (panel.total is not None) for panel in panels]
    lines = [title, *(line for panel in panels for line in (panel.title, panel.verdict)), legend]
    width = max(left + cell * len(columns) + 2 * MARGIN, MARGIN * 2 + CHARACTER * max(map(len, lines)))
    height = 2 * MARGIN + 2 * TITLE_HEIGHT + sum(2 * TITLE_HEIGHT + ROW * (1 + count) for count in rows) + PANEL_GAP * (len(panels) - 1)
    figure = empty_figure(width, height, None)
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    x_by_place = {place: left + cell * number for number, place in enumerate(columns) if place is not None}
    y = MARGIN
    axes.text(MARGIN, y + TITLE_HEIGHT / 2, title, va="center", weight="bold", fontsize=11, color=INK)
    y += TITLE_HEIGHT
    for panel in panels:
        y = _draw_panel(axes, panel, columns, x_by_place, (left, cell), y) + PANEL_GAP
    axes.text(MARGIN, y - PANEL_GAP + TITLE_HEIGHT / 2, legend, va="center", fontsize=9, color=FAINT)
    return figure


def _draw_panel(
    axes: Any, panel: StepPanel, columns: Sequence[int | None], x_by_place: dict[int, float], sizes: tuple[float, float], y: float
) -> float:
    """Draw a panel below y and return its lower edge."""
    left, cell = sizes
    axes.text(MARGIN, y + TITLE_HEIGHT / 2, panel.title, va="center", weight="bold", fontsize=10, color=INK)
    y += TITLE_HEIGHT
    step = 1 if cell > 0.4 else 2  # every other label where columns are narrow
    for number, place in enumerate(columns):
        label = "…" if place is None else f"2{_superscript(place)}" if number % step == 0 else ""
        axes.text(left + cell * (number + 0.5), y + ROW / 2, label, ha="center", va="center", fontsize=8, color=FAINT)
    y += ROW
    top = y
    for row in panel.terms:
        _draw_row(axes, row, x_by_place, sizes, y)
        y += ROW
    if panel.edge is not None and panel.edge in x_by_place:
        x = x_by_place[panel.edge] + cell
        axes.plot([x, x], [top - ROW, y], color=EDGE, linestyle=(0, (4, 2)), linewidth=1.3)
    if panel.total is not None:
        axes.plot([MARGIN, left + cell * len(columns)], [y, y], color=INK, linewidth=1)
        _draw_row(axes, panel.total, x_by_place, sizes, y)
        y += ROW
    axes.text(left, y + TITLE_HEIGHT / 2, panel.verdict, va="center", weight="bold", fontsize=9, color=INK)
    return y + TITLE_HEIGHT


def _draw_row(axes: Any, row: BitRow, x_by_place: dict[int, float], sizes: tuple[float, float], y: float) -> None:
    from matplotlib.patches import Rectangle

    left, cell = sizes
    axes.text(left - 0.1, y + ROW / 2, _short(row.name), ha="right", va="center", fontsize=9, color=INK)
    if isinstance(row.value, str):
        axes.text(left + 0.05, y + ROW / 2, row.value, va="center", fontsize=9, color=INK)
        return
    sign = "−1" if row.value < 0 else "+1"
    for place in set_bits(row.value) & x_by_place.keys():
        removed = row.last_bit is not None and place < row.last_bit
        colour, x = REMOVED if removed else KEPT, x_by_place[place]
        axes.add_patch(Rectangle((x + 0.03, y + 0.03), cell - 0.06, ROW - 0.06, facecolor=colour, edgecolor="none"))
        ink = EDGE if removed else INK
        axes.text(x + cell / 2, y + ROW / 2, sign, ha="center", va="center", fontsize=9 if cell > 0.4 else 7, color=ink)
    left_out = len(set_bits(row.value) - x_by_place.keys())
    if left_out:
        axes.text(max(x_by_place.values()) + cell, y + ROW / 2, f"+{left_out}", va="center", fontsize=7, color=FAINT)


def _limit_terms(panel: StepPanel) -> StepPanel:
    """Keep at most MAX_ROWS terms, those with the largest removed value, in their order, and say so in the title."""
    left_out = len(panel.terms) - MAX_ROWS
    if left_out <= 0:
        return panel
    order = sorted(range(len(panel.terms)), key=lambda number: (-_removed_value(panel.terms[number]), number))
    terms = tuple(panel.terms[number] for number in sorted(order[:MAX_ROWS]))
    return panel._replace(title=f"{panel.title}; {left_out} terms that lose the least are not drawn", terms=terms)


def _removed_value(row: BitRow) -> Fraction:
    lost = [] if row.last_bit is None else [place for place in set_bits(row.value) if place < row.last_bit]
    return sum((Fraction(2) ** place for place in lost), Fraction())


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"


def _superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
