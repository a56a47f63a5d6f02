"""Reads a picture back as an eye would: which texts stand in which rectangle, below which heading and beside which."""

import re
import xml.etree.ElementTree as ET
from bisect import bisect_right
from dataclasses import dataclass, field

SVG = "{http://www.w3.org/2000/svg}"
ADVANCE = 0.602  # of a character of DejaVu Sans Mono, in sizes


@dataclass
class Text:
    x: float
    y: float
    words: str
    anchor: str
    size: float

    @property
    def span(self) -> tuple[float, float]:
        width = len(self.words) * ADVANCE * self.size
        left = self.x - {"start": 0, "middle": width / 2, "end": width}[self.anchor]
        return left, left + width


@dataclass
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str | None
    texts: list[Text] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        return [text.words for text in sorted(self.texts, key=lambda text: text.y)]


@dataclass
class Grid:
    """One grid: texts by what they are, rectangles with the texts in them."""

    title: str
    columns: list[Text]
    rows: list[Text]
    upright: list[str]
    cells: list[Rect]
    addresses: list[Rect]

    def place(self, rect: Rect) -> tuple[str, str]:
        """The headings of its row and of its column, by where they stand."""
        row = [text.words for text in self.rows if rect.y < text.y < rect.y + rect.height]
        column = [text.words for text in self.columns if rect.x < text.x < rect.x + rect.width]
        assert len(row) == len(column) == 1, (row, column)
        return row[0], column[0]


def parse(svg: str) -> tuple[ET.Element, list[Grid]]:
    """The document and its grids, in its own coordinates."""
    root = ET.fromstring(svg)
    return root, list(_grids(root, 0.0, 0.0))


def texts(element: ET.Element, x: float = 0.0, y: float = 0.0, anchor: str = "start", size: float = 0.0):
    """Every horizontal text below an element."""
    dx, dy = _shift(element)
    anchor, size = element.get("text-anchor", anchor), float(element.get("font-size", size))
    if element.tag == SVG + "text" and "rotate" not in element.get("transform", ""):
        yield Text(x + float(element.get("x", 0)), y + float(element.get("y", 0)), element.text or "", anchor, size)
    for child in element:
        yield from texts(child, x + dx, y + dy, anchor, size)


def _shift(element: ET.Element) -> tuple[float, float]:
    found = re.match(r"translate\(([-\d.]+) ([-\d.]+)\)", element.get("transform", ""))
    return (float(found[1]), float(found[2])) if found else (0.0, 0.0)


def _grids(element: ET.Element, x: float, y: float):
    dx, dy = _shift(element)
    if element.get("class") == "grid":
        yield _grid(element, x + dx, y + dy)
        return
    for child in element:
        yield from _grids(child, x + dx, y + dy)


def _grid(element: ET.Element, x: float, y: float) -> Grid:
    groups = {child.get("class"): child for child in element}
    named = {child.get("class"): child for child in groups[None]}
    size = 11.0
    title = [child.text for child in groups[None] if child.get("font-weight") and "rotate" not in child.get("transform", "")]
    upright = [child.text or "" for child in groups[None] if "rotate" in child.get("transform", "")]
    columns, rows = (list(texts(named[name], x, y, size=size)) for name in ("columns", "rows"))
    cells, addresses = (_rects(groups.get(name), x, y, size) for name in ("cells", "address"))
    return Grid(title[0] if title else "", columns, rows, upright, cells, addresses)


def _rects(group: ET.Element | None, x: float, y: float, size: float) -> list[Rect]:
    if group is None:
        return []
    found = [
        Rect(
            x + float(r.get("x", 0)),
            y + float(r.get("y", 0)),
            float(r.get("width", 0)),
            float(r.get("height", 0)),
            one.get("fill", ""),
            one.get("stroke"),
        )
        for one in group
        for r in one.iter(SVG + "rect")
    ]
    at = {(rect.x, rect.y): rect for rect in found}
    assert len(at) == len(found), "two rectangles in one place"
    lefts, tops = sorted({rect.x for rect in found}), sorted({rect.y for rect in found})
    anchor = group.get("text-anchor", "start")
    drawn = (Text(x + float(t.get("x", 0)), y + float(t.get("y", 0)), t.text or "", anchor, size) for t in group.iter(SVG + "text"))
    for text in drawn:
        at[lefts[bisect_right(lefts, text.x) - 1], tops[bisect_right(tops, text.y) - 1]].texts.append(text)
    return found


def span(words: str) -> range:
    """ "3" and "8-15" as numbers."""
    first, _, last = words.partition("-")
    return range(int(first), int(last or first) + 1)
