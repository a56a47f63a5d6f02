"""Grids of labelled cells as SVG text, independent of instructions."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple
from xml.sax.saxutils import escape

# one colour per lane: a row of hue for each groupID, a column of lightness for each threadID_in_group. The colours were optimised for
# black text and for the distance of any two, also for colour-blind eyes; tests/uses/viz/test_viz.py measures both
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
FONT_SIZE = 11  # size of a cell's text in pixels
ADVANCE = 0.61  # width of a character in font sizes; the widest of the fonts above has 0.602
PAGE_WIDTH = 2048  # largest width of a line of grids in pixels
CELL_PADDING = 4  # pixels between a cell's text and its edge
LINE_HEIGHT = 14  # distance of lines of text in pixels
CELL_HEIGHT = 2 * LINE_HEIGHT + 4  # height of a cell in pixels
GRID_GAP = 28  # pixels between grids
MARGIN = 16  # pixels around a drawing
BAND_GAP = 12  # pixels between bands of rows
HEADING_HEIGHT = 16  # height of the headings above a grid in pixels
ADDRESS_HEADING = "address"  # heading of the lanes that point to a row


class Cell(NamedTuple):
    """A cell of a grid."""

    row: int
    column: int
    lanes: frozenset[int]  # lanes that hold the cell; a cell without lanes is never faded
    colour: int  # index into COLOURS
    text: tuple[str, ...]  # up to two lines


@dataclass(frozen=True)
class Grid:
    """Cells of one size in rows and columns with headings."""

    title: str
    rows: tuple[str, ...]  # headings of the rows
    columns: tuple[str, ...]  # headings of the columns
    cells: tuple[Cell, ...]
    bands: tuple[str, ...] = ()  # names of equal parts of the rows, drawn with a gap between them
    addresses: tuple[int, ...] = ()  # lane that points to each row


class Block(NamedTuple):
    """A drawing with its size in pixels."""

    width: int
    height: int
    body: tuple[str, ...]  # SVG elements


def text_width(text: str, size: int = FONT_SIZE) -> int:
    """Return the width of a text in pixels."""
    return int(len(text) * size * ADVANCE) + 1


def cell_width(labels: Iterable[str]) -> int:
    """Return the width in pixels of cells with these lines of text."""
    return max(30, max(map(text_width, labels), default=0) + 2 * CELL_PADDING)


def draw_paragraph(lines: Sequence[str], size: int = FONT_SIZE, bold: bool = False) -> Block:
    """Draw lines of text."""
    step = size + 5
    weight = ' font-weight="bold"' if bold else ""
    body = tuple(f'<text x="0" y="{step * i + size}">{escape(line)}</text>' for i, line in enumerate(lines))
    return Block(
        max((text_width(line, size) for line in lines), default=0),
        step * len(lines),
        (f'<g font-size="{size}" fill="{INK}"{weight}>', *body, "</g>"),
    )


def stack_blocks(blocks: Iterable[Block], gap: int) -> Block:
    """Place blocks one below the other."""
    x, y, body = 0, -gap, []
    for block in blocks:
        y += gap
        body += _translate(block, 0, y)
        x, y = max(x, block.width), y + block.height
    return Block(x, max(y, 0), tuple(body))


def flow_blocks(blocks: Iterable[Block], gap: int = GRID_GAP) -> Block:
    """Place blocks side by side, and begin a new line where the page is full."""
    lines: list[list[Block]] = []
    end = 0
    for block in blocks:
        if not lines or end + gap + block.width > PAGE_WIDTH:
            lines.append([])
            end = -gap
        lines[-1].append(block)
        end += gap + block.width
    return stack_blocks((_row_block(line, gap) for line in lines), gap)


def _row_block(blocks: list[Block], gap: int) -> Block:
    x, body = -gap, []
    for block in blocks:
        x += gap
        body += _translate(block, x, 0)
        x += block.width
    return Block(x, max(block.height for block in blocks), tuple(body))


def _translate(block: Block, x: int, y: int) -> tuple[str, ...]:
    return (f'<g transform="translate({x} {y})">', *block.body, "</g>") if x or y else block.body


def svg_document(block: Block, title: str) -> str:
    """Return the SVG document of a drawing. Screen readers read the title."""
    width, height = block.width + 2 * MARGIN, block.height + 2 * MARGIN
    lines = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'font-family="{FONT}" font-size="{FONT_SIZE}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        *_translate(block, MARGIN, MARGIN),
        "</svg>",
    )
    return "\n".join(lines) + "\n"


def draw_grid(picture: Grid, lane: int | None = None) -> Block:
    """Draw a grid. If `lane` is given, only the cells of this lane keep their colour."""
    width = cell_width([*picture.columns, *(line for cell in picture.cells for line in cell.text)])
    label = max(text_width(row) for row in picture.rows) + 2 * CELL_PADDING
    left = (LINE_HEIGHT + CELL_PADDING if picture.bands else 0) + label
    address = cell_width([ADDRESS_HEADING, "T31"]) + CELL_PADDING if picture.addresses else 0
    top = (LINE_HEIGHT + CELL_PADDING if picture.title else 0) + HEADING_HEIGHT
    depth = len(picture.rows) // max(1, len(picture.bands))
    ys = [top + CELL_HEIGHT * i + BAND_GAP * (i // depth) for i in range(len(picture.rows))]
    x0 = left + address
    body = ['<g class="grid">', f'<g fill="{INK}">']
    if picture.title:
        body.append(f'<text x="{x0}" y="{FONT_SIZE + 1}" font-weight="bold">{escape(picture.title)}</text>')
    body.append(f'<g class="columns" text-anchor="middle">{"".join(_column_headings(picture, x0, width, top, address))}</g>')
    headings = (
        f'<text x="{left - CELL_PADDING}" y="{y + CELL_HEIGHT // 2 + 4}">{escape(row)}</text>'
        for y, row in zip(ys, picture.rows, strict=True)
    )
    body.append(f'<g class="rows" text-anchor="end">{"".join(headings)}</g>')
    body += [_upright_text(name, ys[i * depth] + (CELL_HEIGHT * depth) // 2) for i, name in enumerate(picture.bands)]
    body.append("</g>")
    if address:
        cells = [Cell(row, 0, frozenset([pointer]), pointer, (f"T{pointer}",)) for row, pointer in enumerate(picture.addresses)]
        body += _draw_cells("address", cells, left, ys, address - CELL_PADDING, lane)
    body += _draw_cells("cells", picture.cells, x0, ys, width, lane)
    across = max(x0 + width * len(picture.columns), x0 + text_width(picture.title))
    return Block(across, ys[-1] + CELL_HEIGHT, (*body, "</g>"))


def _column_headings(picture: Grid, x0: int, width: int, top: int, address: int) -> Iterator[str]:
    if address:
        yield f'<text x="{x0 - CELL_PADDING - (address - CELL_PADDING) // 2}" y="{top - 5}">{ADDRESS_HEADING}</text>'
    for i, column in enumerate(picture.columns):
        yield f'<text x="{x0 + width * i + width // 2}" y="{top - 5}">{escape(column)}</text>'


def _upright_text(name: str, middle: int) -> str:
    return f'<text transform="translate({FONT_SIZE} {middle}) rotate(-90)" text-anchor="middle" font-weight="bold">{escape(name)}</text>'


def _draw_cells(name: str, cells: Iterable[Cell], x0: int, ys: list[int], width: int, lane: int | None) -> Iterator[str]:
    """Draw cells, grouped by colour. The cells of the marked lane are last, so that their edges are on top."""

    def appearance(cell: Cell) -> tuple[bool, bool, int]:
        marked = lane in cell.lanes
        return marked, lane is not None and bool(cell.lanes) and not marked, cell.colour

    yield f'<g class="{name}" text-anchor="middle">'
    for (marked, faded, colour), group in groupby(sorted(cells, key=appearance), appearance):
        fill, ink = (FADED, FADED_INK) if faded else (COLOURS[colour], INK)
        edge = f'stroke="{INK}" stroke-width="2"' if marked else f'stroke="{PAPER}"'
        rects, texts = [], []
        for cell in group:
            x, y = x0 + width * cell.column, ys[cell.row]
            rects.append(f'<rect x="{x}" y="{y}" width="{width}" height="{CELL_HEIGHT}"/>')
            first = y + (LINE_HEIGHT - 1 if len(cell.text) == 2 else CELL_HEIGHT // 2 + 4)
            texts += [f'<text x="{x + width // 2}" y="{first + LINE_HEIGHT * i}">{escape(line)}</text>' for i, line in enumerate(cell.text)]
        yield f'<g fill="{fill}" {edge}>{"".join(rects)}</g>'
        yield f'<g fill="{ink}">{"".join(texts)}</g>'
    yield "</g>"
