"""What lies where in shared memory, for the operands that wgmma reads through a descriptor: one atom of every canonical layout."""

from collections.abc import Iterator

from tcemu.formats import Format
from tcemu.isa.instructions import Instruction
from tcemu.packing import container
from tcemu.shared_memory import CANONICAL, LINES, SECTION, UNIT, SharedLayout
from tcemu.viz.drawing import Cell, Grid

DESCRIPTORS = {"a_desc": "a", "b_desc": "b"}  # operand -> matrix
BANKS = 128  # bytes of shared memory that all 32 banks hold together, and that the swizzle counts its phase in
ALONG = {"a": ("m", "k"), "b": ("n", "k")}  # the letters of the index of a line, K-major, and of the index along it
HUES = 4  # colours of one hue


def atoms(op: Instruction, name: str) -> Iterator[list[Grid]]:
    """For each major that the operand may have, a grid for each canonical layout; a cell is 16 bytes."""
    for major in ("k", "mn") if f"imm_trans_{DESCRIPTORS[name]}" in op.operands else ("k",):
        yield [_atom(op, name, major, swizzle) for swizzle in sorted(row.swizzle for row in CANONICAL if row.major == major)]


def _atom(op: Instruction, name: str, major: str, swizzle: int) -> Grid:
    fmt = _format(op, name)
    per_unit = UNIT * 8 // container(fmt).container_bits
    across, k = ALONG[DESCRIPTORS[name]]
    line_of, along = (across, k) if major == "k" else (k, across)
    length = max(swizzle, UNIT) // UNIT * per_unit
    rows, columns = (LINES, length) if major == "k" else (length, LINES)
    units = SharedLayout(fmt, rows, columns, major, swizzle).units
    cells = tuple(
        Cell(
            int(address) // BANKS,
            int(address) % BANKS // UNIT,
            frozenset(),
            HUES * unit + line % HUES,
            (f"{line_of}{line}", f"{along}{unit * per_unit}-{(unit + 1) * per_unit - 1}"),
        )
        for line, addresses in enumerate(units)
        for unit, address in enumerate(addresses)
    )
    title = f"{along.upper()}-major, " + (f"{swizzle}-byte swizzle" if swizzle else "no swizzle")
    rows_of_banks = tuple(map(str, range(0, units.size * UNIT, BANKS)))
    return Grid(title, rows_of_banks, tuple(map(str, range(0, BANKS, UNIT))), cells)


def described(op: Instruction, name: str) -> str:
    """The matrix, for a heading."""
    stored = " as stored (half of K)" if op.sparse and name == "a_desc" else ""
    return f"{DESCRIPTORS[name].upper()}{stored} in shared memory, {_format(op, name)}: one atom of each layout"


def legend(op: Instruction, name: str, example: Cell) -> list[str]:
    """What a cell says, and where that is written."""
    line, along = example.text
    place = f"{line[0]} = {line[1:]} and {along[0]} = {along[1:].replace('-', ' to ')}"
    return [
        f"{line} {along}: the 16 bytes with {place}; the hue goes with {along[0]}",
        f"A row is {BANKS} bytes of the atom, which begins at a multiple of its size; rows and columns are numbered in bytes.",
        f"The descriptor's leading and stride lead to the next atoms. {SECTION}",
    ]


def _format(op: Instruction, name: str) -> Format:
    fmt = getattr(op, DESCRIPTORS[name])
    assert isinstance(fmt, Format)
    return fmt
