"""Pictures of the operands of an instruction, drawn from the rows of `tcemu.layouts`.

A register operand shows the lane and the element of each place of its matrix. An operand that wgmma reads through a descriptor shows the
places of its elements in shared memory: one atom of every canonical layout. D of tcgen05 shows its rows and columns in tensor memory.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator

import numpy as np

from tcemu.engine.formats.number_formats import Format
from tcemu.engine.isa.families import LANES, Instruction, MatrixMultiply, Mover, WmmaMemory
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.legality import manual_section
from tcemu.engine.isa.operand_fragments import register_fragments
from tcemu.engine.isa.tcgen05 import Tcgen05, Tcgen05Product
from tcemu.engine.layouts.fragment_layouts import Fragment
from tcemu.engine.layouts.packing import container
from tcemu.engine.layouts.shared_memory import ATOM_LINES, SECTION, SWIZZLE_BYTES, UNIT, SharedLayout
from tcemu.engine.layouts.tensor_memory import LANES as TENSOR_MEMORY_LANES
from tcemu.engine.layouts.tensor_memory import accumulator_cells, accumulator_layout
from tcemu.uses.viz.svg_drawing import (
    GRID_GAP,
    PAGE_WIDTH,
    Block,
    Cell,
    Grid,
    cell_width,
    draw_grid,
    draw_paragraph,
    flow_blocks,
    stack_blocks,
    svg_document,
)

DESCRIPTOR_MATRICES = {"a_desc": "a", "b_desc": "b"}  # matrix of each descriptor operand
BANK_ROW_BYTES = 128  # bytes of one word in each of the 32 banks; the swizzle depends on the index of such a row
INDEX_LETTERS = {"a": ("m", "k"), "b": ("n", "k")}  # letters of the index of a K-major line and of the index along it
SHADES_PER_HUE = 4  # colours of one hue
MAX_SEPARATE = 32  # rows or columns drawn separately; where there are more, neighbours in one lane share a cell
FOLD_CELLS = 4  # a row that is too long for the page is broken after a multiple of this number of cells
HEADING_MARGIN = 64  # pixels of a page for headings
METADATA_OPERANDS = ("e", "sp_meta")
METADATA_SELECTORS = {"e": "f", "sp_meta": "sp_sel"}  # operand that selects the metadata. 9.7.14.6.3, 9.7.15.6.3
EXAMPLE_LANE = 5  # lane of the example in legends
LANE_BLOCK = 16  # lanes of one drawn cell: the largest unit that every layout keeps together
COLUMN_BLOCKS = 8  # drawn cells along the columns, at most
MATRIX_DESCRIPTIONS = {"a": "A, M x K", "b": "B, K x N", "c": "C, M x N", "d": "D, M x N"}


def operands(op: str | Instruction) -> tuple[str, ...]:
    """Return the manual's names of the operands of `op` that have a picture.

    Args:
        op: PTX spelling, short name or `Instruction`.

    Raises:
        Unsupported: `op` is not an instruction.
    """
    op = parse(op)
    if isinstance(op, Tcgen05):
        return ()
    if isinstance(op, Tcgen05Product):
        return ("d",)
    return (*register_fragments(op), *(name for name in DESCRIPTOR_MATRICES if name in op.operands))


def svg(op: str | Instruction, operand: str, lane: int | None = None) -> str:
    """Draw one operand as an SVG document. The text is the same each time.

    The fragments of wmma are those of sm_80 and later. A descriptor operand, "a_desc" or "b_desc", shows places in shared memory and has no
    lanes.

    Args:
        op: PTX spelling, short name or `Instruction`.
        operand: One of `operands(op)`.
        lane: The lane that keeps its colour while the others are grey. The lanes of wgmma are counted through its four warps, 0 to 127.

    Returns:
        The SVG document as text.

    Raises:
        Unsupported: `op` is not an instruction.
        ValueError: The operand has no picture, or the lane does not exist.
        TypeError: The lane is not an integer.

    Source: the layout's, which the picture names.
    """
    op = parse(op)
    names = operands(op)
    if operand not in names:
        raise ValueError(
            f"operand: {operand!r} of {op} has no picture; expected one of {', '.join(names) or 'none'}. PTX ISA {manual_section(op)}"
        )
    lane = _validate_lane(op, lane)
    if lane is not None and operand in DESCRIPTOR_MATRICES:
        raise ValueError(f"lane: got {lane}; {operand} of {op} lies in shared memory and has no lanes. PTX ISA {manual_section(op)}")
    return svg_document(stack_blocks([_headline(op, lane, (operand,)), _operand_block(op, operand, lane)], GRID_GAP), f"{op}: {operand}")


def page(op: str | Instruction, lane: int | None = None) -> str:
    """Draw all operands of `op` that have a picture in one SVG document.

    Args:
        op: PTX spelling, short name or `Instruction`.
        lane: The lane that keeps its colour, see `svg`.

    Returns:
        The SVG document as text.

    Raises:
        Unsupported: `op` is not an instruction.
        ValueError: No operand has a picture, or the lane does not exist.
        TypeError: The lane is not an integer.
    """
    op = parse(op)
    names = operands(op)
    if not names:
        raise ValueError(f"{op}: has no operand to draw. PTX ISA {manual_section(op)}")
    lane = _validate_lane(op, lane)
    drawn = flow_blocks((_operand_block(op, name, lane) for name in names), 2 * GRID_GAP)
    return svg_document(stack_blocks([_headline(op, lane, names), drawn], GRID_GAP), f"{op}: {', '.join(names)}")


# ---- atoms in shared memory


def atom_grids(op: Instruction, name: str) -> Iterator[list[Grid]]:
    """Yield, for each major that the operand may have, a grid for each canonical layout; a cell is 16 bytes."""
    for major in ("k", "mn") if f"imm_trans_{DESCRIPTOR_MATRICES[name]}" in op.operands else ("k",):
        yield [_atom_grid(op, name, major, swizzle) for swizzle in sorted(SWIZZLE_BYTES)]


def _atom_grid(op: Instruction, name: str, major: str, swizzle: int) -> Grid:
    fmt = _matrix_format(op, name)
    per_unit = UNIT * 8 // container(fmt).container_bits
    across, k = INDEX_LETTERS[DESCRIPTOR_MATRICES[name]]
    line_axis, unit_axis = (across, k) if major == "k" else (k, across)
    length = max(swizzle, UNIT) // UNIT * per_unit
    rows, columns = (ATOM_LINES, length) if major == "k" else (length, ATOM_LINES)
    units = SharedLayout(fmt, rows, columns, major, swizzle).units
    cells = tuple(
        Cell(
            int(address) // BANK_ROW_BYTES,
            int(address) % BANK_ROW_BYTES // UNIT,
            frozenset(),
            SHADES_PER_HUE * unit + line % SHADES_PER_HUE,
            (f"{line_axis}{line}", f"{unit_axis}{unit * per_unit}-{(unit + 1) * per_unit - 1}"),
        )
        for line, addresses in enumerate(units)
        for unit, address in enumerate(addresses)
    )
    title = f"{unit_axis.upper()}-major, " + (f"{swizzle}-byte swizzle" if swizzle else "no swizzle")
    rows_of_banks = tuple(map(str, range(0, units.size * UNIT, BANK_ROW_BYTES)))
    return Grid(title, rows_of_banks, tuple(map(str, range(0, BANK_ROW_BYTES, UNIT))), cells)


def describe_atoms(op: Instruction, name: str) -> str:
    """Describe the matrix of a descriptor operand, for a heading."""
    stored = " as stored (half of K)" if isinstance(op, MatrixMultiply) and op.sparse and name == "a_desc" else ""
    return f"{DESCRIPTOR_MATRICES[name].upper()}{stored} in shared memory, {_matrix_format(op, name)}: one atom of each layout"


def atom_legend(example: Cell) -> list[str]:
    """Explain the text of a cell of an atom, with the source."""
    line, along = example.text
    place = f"{line[0]} = {line[1:]} and {along[0]} = {along[1:].replace('-', ' to ')}"
    return [
        f"{line} {along}: the 16 bytes with {place}; the hue goes with {along[0]}",
        f"A row is {BANK_ROW_BYTES} bytes of the atom, which begins at a multiple of its size; rows and columns are numbered in bytes.",
        f"The descriptor's leading and stride lead to the next atoms. {SECTION}",
    ]


def _matrix_format(op: Instruction, name: str) -> Format:
    return op.operand_format(DESCRIPTOR_MATRICES[name])


# ---- D in tensor memory


def _accumulator_picture(op: Tcgen05Product) -> Block:
    """Draw where D lies: for each CTA the lanes from top to bottom, the columns from left to right."""
    layout = accumulator_layout(op.m, op.cta_group, ws=op.ws, sparse=op.sparse)
    cells = accumulator_cells(layout, op.n)
    used = op.n // layout.parts
    width = max(1, used // COLUMN_BLOCKS)
    # the row and the column of D in each cell of a CTA; -1 where nothing of D lies
    r, c = np.full((2, op.cta_group, TENSOR_MEMORY_LANES, used), -1)
    rows, columns = np.indices((op.m, op.n))
    r[cells.cta, cells.lane, cells.column], c[cells.cta, cells.lane, cells.column] = rows, columns
    grids = []
    for cta in range(op.cta_group):
        drawn = []
        for i, j in np.ndindex(TENSOR_MEMORY_LANES // LANE_BLOCK, -(-used // width)):
            block = np.s_[cta, i * LANE_BLOCK : (i + 1) * LANE_BLOCK, j * width : (j + 1) * width]
            if (r[block] < 0).any():
                continue
            text = (f"m {r[block].min()}-{r[block].max()}", f"n {c[block].min()}-{c[block].max()}")
            drawn.append(Cell(i, j, frozenset(), int(r[block].min()) // LANE_BLOCK % 32, text))
        lanes = tuple(f"lanes {i}-{i + LANE_BLOCK - 1}" for i in range(0, TENSOR_MEMORY_LANES, LANE_BLOCK))
        heads = tuple(str(j) if width == 1 else f"{j}-{min(j + width, used) - 1}" for j in range(0, used, width))
        title = "D in tensor memory" + (f", CTA {cta} of the pair" if op.cta_group == 2 else "")
        grids.append(Grid(title, lanes, heads, tuple(drawn)))
    legend = [f"Layout {layout.name}. m: rows of D, n: columns. Columns of tensor memory count from D's address.", "PTX ISA 9.7.16.10.5"]
    return stack_blocks([draw_paragraph(legend), *map(draw_grid, grids)], 12)


# ---- register operands


def holders(fragment: Fragment) -> np.ndarray:
    """Return int[*shape, copies, 2], the lane and the element that hold each place of the matrix, its copies in order.

    The lanes of a warpgroup are numbered 32 * warp + lane.
    """
    order = np.argsort(fragment.index(), axis=None, kind="stable").reshape(*fragment.shape, -1)
    return np.stack(np.divmod(order, fragment.elements), axis=-1)


def _validate_lane(op: Instruction, lane: int | None) -> int | None:
    if lane is None:
        return None
    if isinstance(lane, bool) or not hasattr(lane, "__index__"):
        raise TypeError(f"lane: got {lane!r}; expected an integer or None")
    lane = operator.index(lane)
    if isinstance(op, Tcgen05Product):
        raise ValueError(f"lane: got {lane}; D of {op} lies in tensor memory, not in lanes of a warp. PTX ISA {manual_section(op)}")
    if not 0 <= lane < LANES * op.warps:
        counted = ", counted through its four warps" if op.warps > 1 else ""
        raise ValueError(f"lane: got {lane}; the lanes of {op} are 0 to {LANES * op.warps - 1}{counted}. PTX ISA {manual_section(op)}")
    return lane


def _headline(op: Instruction, lane: int | None, names: tuple[str, ...]) -> Block:
    lines = ["One colour a lane: hue by groupID (lane / 4), lightness by threadID_in_group (lane % 4)."]
    if isinstance(op, Tcgen05Product):
        lines = ["One colour for 16 rows of D."]
    if lane is not None:
        lines = [f"In colour: T{lane}" + (f", lane {lane % LANES} of warp {lane // LANES}." if op.warps > 1 else ".")]
    if op.warps > 1:
        lines.append("Lanes count through the four warps: T37 is lane 5 of warp 1.")
    return stack_blocks(
        [draw_paragraph([str(op)], 16, bold=True), draw_paragraph(lines if any(name not in DESCRIPTOR_MATRICES for name in names) else [])],
        6,
    )


def _operand_block(op: Instruction, name: str, lane: int | None) -> Block:
    """Draw an operand's grids below its name and legend."""
    if isinstance(op, Tcgen05Product):
        return _accumulator_picture(op)
    if name in DESCRIPTOR_MATRICES:
        groups = list(atom_grids(op, name))
        description, lines = describe_atoms(op, name), atom_legend(groups[0][-1].cells[-1])
    else:
        fragment = register_fragments(op)[name]
        groups = [list(_grids(op, name, fragment))]
        example = next(cell for part in groups[0] for cell in part.cells if EXAMPLE_LANE in cell.lanes)
        description, lines = _operand_description(op, name, fragment), _fragment_legend(op, name, fragment, example)
    drawn = stack_blocks((flow_blocks(draw_grid(part, lane) for part in group) for group in groups), GRID_GAP)
    return stack_blocks([draw_paragraph([f"{name}: {description}"], 13, bold=True), draw_paragraph(lines), drawn], 8)


def _grids(op: Instruction, name: str, fragment: Fragment) -> Iterator[Grid]:
    places = holders(fragment)
    if name in METADATA_OPERANDS:  # the fragment describes one warp
        places = np.concatenate([places + np.array([LANES * warp, 0]) for warp in range(op.warps)], axis=-4)
    for index in np.ndindex(places.shape[:-4]):
        yield from _folded_grids(op, name, fragment, index, places[index])


def _folded_grids(op: Instruction, name: str, fragment: Fragment, index: tuple[int, ...], places: np.ndarray) -> Iterator[Grid]:
    """Yield the grid of one matrix, int[rows, columns, copies, 2], or several grids if its columns need them."""
    down, across = (_merge_length(places, axis) if places.shape[axis] > MAX_SEPARATE else 1 for axis in (0, 1))
    rows, columns = _headings(places.shape[0], down), _headings(places.shape[1], across)
    lanes = places[::down, ::across, :, 0]
    texts = [
        [(_lane_text(copies[:, 0]), _element_text(op, name, fragment, copies[:, 1], down * across)) for copies in line]
        for line in places[::down, ::across]
    ]
    bands = tuple(f"warp {warp}" for warp in range(op.warps)) if op.warps > 1 else ()
    addresses = (
        tuple(range(index[0] * len(rows), (index[0] + 1) * len(rows))) if isinstance(op, Mover) and op.uses_memory else ()
    )  # 9.7.14.5.15
    width = cell_width([*columns, *(line for row in texts for text in row for line in text)])
    parts = -(-width * len(columns) // (PAGE_WIDTH - HEADING_MARGIN))
    columns_per_part = -(-len(columns) // (parts * FOLD_CELLS)) * FOLD_CELLS
    for first in range(0, len(columns), columns_per_part):
        shown = range(first, min(first + columns_per_part, len(columns)))
        cells = tuple(
            Cell(i, j - first, frozenset(lanes[i, j].tolist()), int(lanes[i, j, 0]) % LANES, texts[i][j])
            for i in range(len(rows))
            for j in shown
        )
        yield Grid(_grid_title(op, name, index, places), rows, tuple(columns[j] for j in shown), cells, bands, addresses)


def _merge_length(places: np.ndarray, axis: int) -> int:
    """Return the number of neighbours along an axis that one lane holds as successive elements; 1 if it is not the same everywhere."""
    difference = np.diff(np.moveaxis(places, axis, 0), axis=0)
    successive = (difference == (0, 1)).all(axis=-1).all(axis=-1)  # [differences, other axis]
    length = int(np.argmin(np.append(successive.all(axis=-1), False))) + 1
    expected = np.arange(1, len(successive) + 1) % length != 0
    return length if (successive == expected[:, None]).all() else 1


def _headings(count: int, length: int) -> tuple[str, ...]:
    return tuple(_range_text(first, length) for first in range(0, count, length))


def _range_text(first: int, length: int) -> str:
    return str(first) if length == 1 else f"{first}-{first + length - 1}"


def _lane_text(lanes: np.ndarray) -> str:
    return f"T{','.join(map(str, dict.fromkeys(lanes.tolist())))}"


def _element_text(op: Instruction, name: str, fragment: Fragment, elements: np.ndarray, length: int) -> str:
    """Name the elements of a cell, given the first element of each copy."""
    first = elements.tolist()
    if name in METADATA_OPERANDS:
        return f"[{4 * first[0] + 3}:{4 * first[0]}]"
    if name.startswith("scale"):
        return f"byte {first[0]}"
    if isinstance(op, Mover):
        register, part = divmod(first[0], fragment.elements // op.register_count(name))
        return f"{name}{register}[{part}]"
    matrix = op.operand if isinstance(op, WmmaMemory) else name
    return matrix + ",".join(_range_text(element, length) for element in dict.fromkeys(first))


def _grid_title(op: Instruction, name: str, index: tuple[int, ...], places: np.ndarray) -> str:
    """Describe the index along the leading axes of a layout."""
    if name in METADATA_OPERANDS:
        return f"{METADATA_SELECTORS[name]} = {index[0]}"
    if isinstance(op, MatrixMultiply) and op.scaling is not None and name.startswith("scale"):
        return f"byte_id {index[1] * op.scaling.count}, thread_id {index[0]}"
    if isinstance(op, Mover):
        return f"matrix {index[0]}"
    if not index:
        return ""
    lanes = np.unique(places[..., 0])
    ends = np.flatnonzero(np.diff(lanes, append=LANES * 2) != 1)
    starts = np.r_[0, ends[:-1] + 1]
    return f"product {index[0]}: lanes " + ", ".join(f"{lanes[i]}-{lanes[j]}" for i, j in zip(starts, ends, strict=True))


def _operand_description(op: Instruction, name: str, fragment: Fragment) -> str:
    """Describe the matrix of an operand."""
    if isinstance(op, Mover):
        rows, columns = fragment.shape[-2:]
        count = f"{op.num} matrices" if op.num > 1 else "matrix"
        return f"{count} of {rows} rows of {columns} elements, {'16' if op.element == 'b16' else '8'} bits each"
    rows, columns = op.matrix_shape(name)
    if isinstance(op, MatrixMultiply) and name in METADATA_OPERANDS:
        return f"metadata of A, M x chunks of {op.chunk_size} along K = {rows} x {columns} fields of 4 bits"
    if isinstance(op, MatrixMultiply) and op.scaling is not None and name.startswith("scale"):
        return f"scales of {name[-1].upper()}, {rows} x {columns} {op.scaling.format}"
    matrix = op.operand if isinstance(op, WmmaMemory) else name
    stored = "/2 as stored" if isinstance(op, MatrixMultiply) and op.sparse and name == "a" else ""
    return f"{MATRIX_DESCRIPTIONS[matrix]}{stored} = {rows} x {columns} {op.operand_format(name)}"


def _fragment_legend(op: Instruction, name: str, fragment: Fragment, example: Cell) -> list[str]:
    """Explain the text of a cell of a fragment, with the source."""
    numbers = re.findall(r"\d+", example.text[1])
    cell = f"{' '.join(example.text)}: lane {EXAMPLE_LANE}"
    source = [f"PTX ISA {fragment.layout.source}"]
    if name in METADATA_OPERANDS:
        return [f"{cell}, bits {numbers[0]} to {numbers[1]} of its {name}; {METADATA_SELECTORS[name]} says whose bits count", *source]
    if name.startswith("scale"):
        return [f"{cell}, byte {numbers[0]} of its {name}; {name.replace('scale', 'selector')} is {{byte_id, thread_id}}", *source]
    if isinstance(op, Mover):
        more = ["A row is one of memory; address: the lane that points to it."] if op.uses_memory else []
        if not op.uses_memory and name == "d":
            more = ["Rows and columns are those of a."]  # so that the transpose is visible in the lanes
        return [f"{cell}, register {name}{numbers[0]}, part {numbers[1]} of it, low first", *more, *source]
    if op.family.startswith("wmma"):
        source = ["As sm_80 and later hold it;", "PTX leaves it open: PTX ISA 9.7.14.4.1"]
    if op.copy_count(name) > 1:
        return [f"{cell}, elements {', '.join(numbers)}, which are copies of one", *source]
    return [f"{cell}, element{'s' if numbers[1:] else ''} {' to '.join(numbers)}", *source]
