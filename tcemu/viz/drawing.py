"""Grids of labelled cells as SVG text; nothing here knows what an instruction is."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple
from xml.sax.saxutils import escape

# one colour a lane: a row of hue for each groupID, a column of lightness for each threadID_in_group. Searched for black text on every one
# and for distance of any two, also to eyes that lack a cone; tests/test_viz.py measures both
COLOURS = tuple(
    colour
    for row in (
        "#ffdbe4 #f5bacb #dba2b2 #c28b9b",
        "#fed7b2 #f2b983 #d9a16b #c08a54",
        "#ffeeaf #f4d453 #daba34 #c1a211",
        "#d8fe8f #c0e476 #a8cb5d #90b343",
        "#c4fed4 #8deeab #74d493 #5bbc7c",
        "#2fffe5 #18e4cc #17c8b2 #16ad9a",
        "#a7e9fa #8fd0e1 #77b7c8 #5fa0b0",
        "#e6edfe #c3d4ff #9fbafe #7d9fff",
    )
    for colour in row.split()
)
INK, FADED, FADED_INK, PAPER = "#000000", "#f1f1f1", "#666666", "#ffffff"
FONT = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"
SIZE = 11  # of a cell's text, in pixels
ADVANCE = 0.61  # of one character, in sizes; of the fonts above the widest has 0.602
PAGE = 2048  # pixels that a line of grids may take
PAD = 4  # between a cell's text and its edge
LINE = 14  # from one line of text to the next
CELL = 2 * LINE + 4  # height of a cell
GAP = 28  # between grids
SPLIT = 12  # between bands of rows
HEAD = 16  # height of the headings above a grid
ADDRESS = "address"  # the heading of the lanes that point to a row


class Cell(NamedTuple):
    """A place of a grid, with the lanes that hold it (none: it is never faded) and up to two lines of text."""

    row: int
    column: int
    lanes: frozenset[int]
    colour: int  # an index into COLOURS
    text: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """Cells of one size in rows and columns that have headings."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    bands: tuple[str, ...] = ()  # names of equal parts of the rows, drawn apart
    addresses: tuple[int, ...] = ()  # the lane that points to each row


class Block(NamedTuple):
    """A drawing with its size in pixels."""

    width: int
    height: int
    body: tuple[str, ...]


def text_width(text: str, size: int = SIZE) -> int:
    """Pixels that a text takes."""
    return int(len(text) * size * ADVANCE) + 1


def cell_width(labels: Iterable[str]) -> int:
    """Pixels that cells with these labels, one a line, take."""
    return max(30, max(map(text_width, labels), default=0) + 2 * PAD)


def paragraph(lines: Sequence[str], size: int = SIZE, bold: bool = False) -> Block:
    """Lines of text."""
    step = size + 5
    weight = ' font-weight="bold"' if bold else ""
    body = tuple(f'<text x="0" y="{step * i + size}">{escape(line)}</text>' for i, line in enumerate(lines))
    return Block(
        max((text_width(line, size) for line in lines), default=0),
        step * len(lines),
        (f'<g font-size="{size}" fill="{INK}"{weight}>', *body, "</g>"),
    )


def stack(blocks: Iterable[Block], gap: int) -> Block:
    """One below the other."""
    x, y, body = 0, -gap, []
    for block in blocks:
        y += gap
        body += _moved(block, 0, y)
        x, y = max(x, block.width), y + block.height
    return Block(x, max(y, 0), tuple(body))


def flow(blocks: Iterable[Block], gap: int = GAP) -> Block:
    """Side by side, as many as a page is wide, then in the next line."""
    lines: list[list[Block]] = []
    end = 0
    for block in blocks:
        if not lines or end + gap + block.width > PAGE:
            lines.append([])
            end = -gap
        lines[-1].append(block)
        end += gap + block.width
    return stack((_line(line, gap) for line in lines), gap)


def _line(blocks: list[Block], gap: int) -> Block:
    x, body = -gap, []
    for block in blocks:
        x += gap
        body += _moved(block, x, 0)
        x += block.width
    return Block(x, max(block.height for block in blocks), tuple(body))


def _moved(block: Block, x: int, y: int) -> tuple[str, ...]:
    return (f'<g transform="translate({x} {y})">', *block.body, "</g>") if x or y else block.body


def document(block: Block, title: str, margin: int = 16) -> str:
    """The SVG document that shows a drawing. `title` is what a screen reader says."""
    width, height = block.width + 2 * margin, block.height + 2 * margin
    lines = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'font-family="{FONT}" font-size="{SIZE}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        *_moved(block, margin, margin),
        "</svg>",
    )
    return "\n".join(lines) + "\n"


def grid(picture: Grid, lane: int | None = None) -> Block:
    """A grid as a drawing; `lane`: the one that keeps its colour."""
    width = cell_width([*picture.columns, *(line for cell in picture.cells for line in cell.text)])
    label = max(text_width(row) for row in picture.rows) + 2 * PAD
    left = (LINE + PAD if picture.bands else 0) + label
    address = cell_width([ADDRESS, "T31"]) + PAD if picture.addresses else 0
    top = (LINE + PAD if picture.title else 0) + HEAD
    depth = len(picture.rows) // max(1, len(picture.bands))
    ys = [top + CELL * i + SPLIT * (i // depth) for i in range(len(picture.rows))]
    x0 = left + address
    body = ['<g class="grid">', f'<g fill="{INK}">']
    if picture.title:
        body.append(f'<text x="{x0}" y="{SIZE + 1}" font-weight="bold">{escape(picture.title)}</text>')
    body.append(f'<g class="columns" text-anchor="middle">{"".join(_columns(picture, x0, width, top, address))}</g>')
    headings = (f'<text x="{left - PAD}" y="{y + CELL // 2 + 4}">{escape(row)}</text>' for y, row in zip(ys, picture.rows, strict=True))
    body.append(f'<g class="rows" text-anchor="end">{"".join(headings)}</g>')
    body += [_upright(name, ys[i * depth] + (CELL * depth) // 2) for i, name in enumerate(picture.bands)]
    body.append("</g>")
    if address:
        pointing = [Cell(row, 0, frozenset([held]), held, (f"T{held}",)) for row, held in enumerate(picture.addresses)]
        body += _cells("address", pointing, left, ys, address - PAD, lane)
    body += _cells("cells", picture.cells, x0, ys, width, lane)
    across = max(x0 + width * len(picture.columns), x0 + text_width(picture.title))
    return Block(across, ys[-1] + CELL, (*body, "</g>"))


def _columns(picture: Grid, x0: int, width: int, top: int, address: int) -> Iterator[str]:
    if address:
        yield f'<text x="{x0 - PAD - (address - PAD) // 2}" y="{top - 5}">{ADDRESS}</text>'
    for i, column in enumerate(picture.columns):
        yield f'<text x="{x0 + width * i + width // 2}" y="{top - 5}">{escape(column)}</text>'


def _upright(name: str, middle: int) -> str:
    return f'<text transform="translate({SIZE} {middle}) rotate(-90)" text-anchor="middle" font-weight="bold">{escape(name)}</text>'


def _cells(name: str, cells: Iterable[Cell], x0: int, ys: list[int], width: int, lane: int | None) -> Iterator[str]:
    """The cells, those of one lane together; the marked ones last, so that their edges lie above."""

    def look(cell: Cell) -> tuple[bool, bool, int]:
        marked = lane in cell.lanes
        return marked, lane is not None and bool(cell.lanes) and not marked, cell.colour

    yield f'<g class="{name}" text-anchor="middle">'
    for (marked, faded, colour), group in groupby(sorted(cells, key=look), look):
        fill, ink = (FADED, FADED_INK) if faded else (COLOURS[colour], INK)
        edge = f'stroke="{INK}" stroke-width="2"' if marked else f'stroke="{PAPER}"'
        rects, texts = [], []
        for cell in group:
            x, y = x0 + width * cell.column, ys[cell.row]
            rects.append(f'<rect x="{x}" y="{y}" width="{width}" height="{CELL}"/>')
            first = y + (LINE - 1 if len(cell.text) == 2 else CELL // 2 + 4)
            texts += [f'<text x="{x + width // 2}" y="{first + LINE * i}">{escape(line)}</text>' for i, line in enumerate(cell.text)]
        yield f'<g fill="{fill}" {edge}>{"".join(rects)}</g>'
        yield f'<g fill="{ink}">{"".join(texts)}</g>'
    yield "</g>"
