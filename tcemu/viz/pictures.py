"""Pictures of an instruction's operands. The layout rows know where a cell sits; what it says, and the legend, are made here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import index

import numpy as np

from tcemu.isa.catalog import section
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import LANES, Instruction
from tcemu.layouts import Fragment
from tcemu.operations.fragments import fragments
from tcemu.viz.atoms import DESCRIPTORS, atoms, described, legend
from tcemu.viz.drawing import GAP, PAGE, Block, Cell, Grid, cell_width, document, flow, grid, paragraph, stack

LONGEST = 32  # rows or columns that are drawn one by one; of more, neighbours that one lane holds in turn share a cell
FOLD = 4  # a row that is too long for the page breaks after a multiple of so many cells
MARGIN = 64  # pixels of a page that headings may take
METADATA = ("e", "sp_meta")
EXAMPLE = 5  # the lane that the legends speak of
SELECTOR = {"e": "f", "sp_meta": "sp_sel"}  # the operand that selects among metadata. 9.7.14.6.3, 9.7.15.6.3


def operands(op: str | Instruction) -> tuple[str, ...]:
    """The operands of `op` that have a picture, by their names in the manual. Raises Unsupported if `op` is no instruction."""
    op = parse(op)
    return (*fragments(op), *(name for name in DESCRIPTORS if name in op.operands))


def svg(op: str | Instruction, operand: str, lane: int | None = None) -> str:
    """One operand as an SVG document, the same text each time.

    op: a PTX spelling. operand: one of `operands(op)`. lane: the one that keeps its colour while the others turn grey; the lanes of wgmma
    count through its four warps, 0 to 127. wmma's fragments are those of sm_80 and later. A descriptor, "a_desc" or "b_desc", shows what
    lies where in shared memory, and has no lanes.
    Raises Unsupported if `op` is no instruction, ValueError for an operand without a picture or a lane that is not there, TypeError for a
    lane that is no integer. Source: that of the layout, which the picture names.
    """
    op = parse(op)
    names = operands(op)
    if operand not in names:
        raise ValueError(f"operand: {operand!r} of {op} has no picture; wanted one of {', '.join(names) or 'none'}. PTX ISA {section(op)}")
    lane = _lane(op, lane)
    if lane is not None and operand in DESCRIPTORS:
        raise ValueError(f"lane: got {lane}; {operand} of {op} lies in shared memory and has no lanes. PTX ISA {section(op)}")
    return document(stack([_headline(op, lane, (operand,)), _picture(op, operand, lane)], GAP), f"{op}: {operand}")


def page(op: str | Instruction, lane: int | None = None) -> str:
    """Every operand of `op` that has a picture, in one SVG document; arguments and errors are those of `svg`.

    Raises ValueError also if none has.
    """
    op = parse(op)
    names = operands(op)
    if not names:
        raise ValueError(f"{op}: has no operand to draw. PTX ISA {section(op)}")
    lane = _lane(op, lane)
    drawn = flow((_picture(op, name, lane) for name in names), 2 * GAP)
    return document(stack([_headline(op, lane, names), drawn], GAP), f"{op}: {', '.join(names)}")


def holders(fragment: Fragment) -> np.ndarray:
    """int[*shape, copies, 2]: lane (of a warpgroup: 32 * warp + lane) and element of each place of the matrix, its copies in order."""
    held = np.argsort(fragment.index(), axis=None, kind="stable").reshape(*fragment.shape, -1)
    return np.stack(np.divmod(held, fragment.elements), axis=-1)


def _lane(op: Instruction, lane: int | None) -> int | None:
    if lane is None:
        return None
    if isinstance(lane, bool) or not hasattr(lane, "__index__"):
        raise TypeError(f"lane: got {lane!r}; wanted an integer or None")
    lane = index(lane)
    if not 0 <= lane < LANES * op.warps:
        counted = ", counted through its four warps" if op.warps > 1 else ""
        raise ValueError(f"lane: got {lane}; the lanes of {op} are 0 to {LANES * op.warps - 1}{counted}. PTX ISA {section(op)}")
    return lane


def _headline(op: Instruction, lane: int | None, names: tuple[str, ...]) -> Block:
    lines = ["One colour a lane: hue by groupID (lane / 4), lightness by threadID_in_group (lane % 4)."]
    if lane is not None:
        lines = [f"In colour: T{lane}" + (f", lane {lane % LANES} of warp {lane // LANES}." if op.warps > 1 else ".")]
    if op.warps > 1:
        lines.append("Lanes count through the four warps: T37 is lane 5 of warp 1.")
    return stack([paragraph([str(op)], 16, bold=True), paragraph(lines if any(name not in DESCRIPTORS for name in names) else [])], 6)


def _picture(op: Instruction, name: str, lane: int | None) -> Block:
    """An operand's grids, below its name and what a cell says."""
    if name in DESCRIPTORS:
        groups = list(atoms(op, name))
        description, lines = described(op, name), legend(op, name, groups[0][-1].cells[-1])
    else:
        fragment = fragments(op)[name]
        groups = [list(_grids(op, name, fragment))]
        example = next(cell for part in groups[0] for cell in part.cells if EXAMPLE in cell.lanes)
        description, lines = _description(op, name, fragment), _legend(op, name, fragment, example)
    drawn = stack((flow(grid(part, lane) for part in group) for group in groups), GAP)
    return stack([paragraph([f"{name}: {description}"], 13, bold=True), paragraph(lines), drawn], 8)


def _grids(op: Instruction, name: str, fragment: Fragment) -> Iterator[Grid]:
    held = holders(fragment)
    if name in METADATA:  # the fragment is one warp's
        held = np.concatenate([held + np.array([LANES * warp, 0]) for warp in range(op.warps)], axis=-4)
    for place in np.ndindex(held.shape[:-4]):
        yield from _folded(op, name, fragment, place, held[place])


def _folded(op: Instruction, name: str, fragment: Fragment, place: tuple[int, ...], held: np.ndarray) -> Iterator[Grid]:
    """The grid of one matrix, int[rows, columns, copies, 2], or as many as its columns need."""
    down, across = (_run(held, axis) if held.shape[axis] > LONGEST else 1 for axis in (0, 1))
    rows, columns = _headings(held.shape[0], down), _headings(held.shape[1], across)
    lanes = held[::down, ::across, :, 0]
    texts = [[(_lanes(at[:, 0]), _elements(op, name, fragment, at[:, 1], down * across)) for at in line] for line in held[::down, ::across]]
    bands = tuple(f"warp {warp}" for warp in range(op.warps)) if op.warps > 1 else ()
    addresses = tuple(range(place[0] * len(rows), (place[0] + 1) * len(rows))) if op.num else ()  # 9.7.14.5.15
    width = cell_width([*columns, *(line for row in texts for text in row for line in text)])
    parts = -(-width * len(columns) // (PAGE - MARGIN))
    each = -(-len(columns) // (parts * FOLD)) * FOLD
    for first in range(0, len(columns), each):
        shown = range(first, min(first + each, len(columns)))
        cells = tuple(
            Cell(i, j - first, frozenset(lanes[i, j].tolist()), int(lanes[i, j, 0]) % LANES, texts[i][j])
            for i in range(len(rows))
            for j in shown
        )
        yield Grid(_title(op, name, place, held), rows, tuple(columns[j] for j in shown), cells, bands, addresses)


def _run(held: np.ndarray, axis: int) -> int:
    """How many neighbours along an axis one lane holds in turn, everywhere alike; 1 if that differs from place to place."""
    step = np.diff(np.moveaxis(held, axis, 0), axis=0)
    joined = (step == (0, 1)).all(axis=-1).all(axis=-1)  # [steps, other axis]
    run = int(np.argmin(np.append(joined.all(axis=-1), False))) + 1
    wanted = np.arange(1, len(joined) + 1) % run != 0
    return run if (joined == wanted[:, None]).all() else 1


def _headings(count: int, run: int) -> tuple[str, ...]:
    return tuple(_range(first, run) for first in range(0, count, run))


def _range(first: int, run: int) -> str:
    return str(first) if run == 1 else f"{first}-{first + run - 1}"


def _lanes(lanes: np.ndarray) -> str:
    return f"T{','.join(map(str, dict.fromkeys(lanes.tolist())))}"


def _elements(op: Instruction, name: str, fragment: Fragment, elements: np.ndarray, run: int) -> str:
    """What a cell says of its first elements, one a copy."""
    first = elements.tolist()
    if name in METADATA:
        return f"[{4 * first[0] + 3}:{4 * first[0]}]"
    if name.startswith("scale"):
        return f"byte {first[0]}"
    if op.element:
        register, part = divmod(first[0], fragment.elements // op.registers(name))
        return f"{name}{register}[{part}]"
    return (op.operand or name) + ",".join(_range(element, run) for element in dict.fromkeys(first))


def _title(op: Instruction, name: str, place: tuple[int, ...], held: np.ndarray) -> str:
    """What the leading axes of a layout say."""
    if name in METADATA:
        return f"{SELECTOR[name]} = {place[0]}"
    if name.startswith("scale"):
        assert op.scale_vec is not None
        return f"byte_id {place[1] * op.scale_vec}, thread_id {place[0]}"
    if op.element:
        return f"matrix {place[0]}"
    if not place:
        return ""
    lanes = np.unique(held[..., 0])
    ends = np.flatnonzero(np.diff(lanes, append=LANES * 2) != 1)
    starts = np.r_[0, ends[:-1] + 1]
    return f"product {place[0]}: lanes " + ", ".join(f"{lanes[i]}-{lanes[j]}" for i, j in zip(starts, ends, strict=True))


MATRICES = {"a": "A, M x K", "b": "B, K x N", "c": "C, M x N", "d": "D, M x N"}


def _description(op: Instruction, name: str, fragment: Fragment) -> str:
    """The matrix that an operand holds."""
    if op.element:
        rows, columns = fragment.shape[-2:]
        count = f"{op.num} matrices" if op.num > 1 else "matrix"
        return f"{count} of {rows} rows of {columns} elements, {'16' if op.element == 'b16' else '8'} bits each"
    rows, columns = op.matrix(name)
    if name in METADATA:
        return f"metadata of A, M x chunks of {op.chunk} along K = {rows} x {columns} fields of 4 bits"
    if name.startswith("scale"):
        return f"scales of {name[-1].upper()}, {rows} x {columns} {op.stype}"
    matrix = op.operand or name
    stored = "/2 as stored" if op.sparse and name == "a" else ""
    return f"{MATRICES[matrix]}{stored} = {rows} x {columns} {getattr(op, matrix)}"


def _legend(op: Instruction, name: str, fragment: Fragment, example: Cell) -> list[str]:
    """What a cell says, and where that is written."""
    numbers = re.findall(r"\d+", example.text[1])
    cell = f"{' '.join(example.text)}: lane {EXAMPLE}"
    source = [f"PTX ISA {fragment.layout.source}"]
    if name in METADATA:
        return [f"{cell}, bits {numbers[0]} to {numbers[1]} of its {name}; {SELECTOR[name]} says whose bits count", *source]
    if name.startswith("scale"):
        return [f"{cell}, byte {numbers[0]} of its {name}; {name.replace('scale', 'selector')} is {{byte_id, thread_id}}", *source]
    if op.element:
        more = ["A row is one of memory; address: the lane that points to it."] if op.num else []
        if not op.num and name == "d":
            more = ["Rows and columns are those of a."]  # so the transpose shows in who holds what
        return [f"{cell}, register {name}{numbers[0]}, part {numbers[1]} of it, low first", *more, *source]
    if op.family.startswith("wmma"):
        source = ["As sm_80 and later hold it;", "PTX leaves it open: PTX ISA 9.7.14.4.1"]
    if op.copies(name) > 1:
        return [f"{cell}, elements {', '.join(numbers)}, which are copies of one", *source]
    return [f"{cell}, element{'s' if numbers[1:] else ''} {' to '.join(numbers)}", *source]
