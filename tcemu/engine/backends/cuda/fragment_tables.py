"""Tables of the places of an instruction's elements for the kernel `warp.cu`, made from the layouts.

A layout permutes digits, so a place is a sum: each bit of the lane's number adds a weight, and the element's number adds one.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tcemu.engine.arithmetic.step import forms
from tcemu.engine.arithmetic.step.forms import StepNumbers
from tcemu.engine.backends.product_requests import StoredOperand, WarpOperands
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.layouts.fragment_layouts import LANES, Fragment

TOGETHER = 4  # factors whose magnitudes lie together, then their signs, then their exponents
PARTS = 3
FIELDS_OF_WORD = 8  # fields of metadata in a word
MOST_WARPS, MOST_WORDS = 4, 12 << 10  # warps of a block, words of its shared memory
BLOCKS = 6  # least blocks of a multiprocessor, if its shared memory suffices, which limits a thread's registers

Table = NDArray[np.int64]


class BitSum(NamedTuple):
    """A table [lanes, elements] as a sum."""

    lane: tuple[int, ...]  # what each bit of the lane's number adds
    element: tuple[int, ...]  # what each element adds


def as_bit_sum(table: Table) -> BitSum | None:
    """The table as a sum; None where it is none."""
    bits = tuple(int(table[1 << bit, 0] - table[0, 0]) for bit in range(LANES.bit_length() - 1))
    made = sum(((np.arange(LANES) >> bit & 1) * weight for bit, weight in enumerate(bits)), np.zeros(LANES, np.int64))
    return BitSum(bits, tuple(map(int, table[0]))) if (made[:, None] + table[0] == table).all() else None


class Lines(NamedTuple):
    """Rows and columns of an operand's elements in one warp and one tile: tables [lanes, elements]."""

    row: Table  # rows, of the four products of m8n8k4 one after the other
    column: Table


def _lines(held: StoredOperand, warp: WarpOperands, *, tiles: int = 1) -> Lines | None:
    """tiles: that the operand is cut in, along its columns."""
    *_, rows, columns = held.fragment.shape
    warps = warp.warps if len(held.fragment.lanes) > 1 else 1
    flat = held.fragment.index().reshape(warps, LANES, tiles, -1)
    product, row, column = flat // (rows * columns), flat // columns % rows, flat % columns
    row = product * rows + row - np.arange(warps)[:, None, None, None] * (rows // warps)
    column = product * columns + column - np.arange(tiles)[:, None] * (columns // tiles)
    alike = (row == row[:1, :, :1]).all() and (column == column[:1, :, :1]).all()
    return Lines(row[0, :, 0], column[0, :, 0]) if alike else None


def padded_group(n: StepNumbers) -> int:
    """Places of a group in a line: whole steps, and whole runs of factors that lie together."""
    return -(-(-(-n.of_group // n.terms) * n.terms) // TOGETHER) * TOGETHER


def _order(n: StepNumbers) -> Table:
    """The place in its line of each product of an instruction, group after group."""
    pair, which = np.divmod(np.arange(n.of_instruction), 2)
    return pair % n.groups * padded_group(n) + pair // n.groups * 2 + which


class SharedLines(NamedTuple):
    """Shared memory of a warp, in words: the rows' factors, then the columns'."""

    row: int  # words from one row to the next
    column: int
    rows: int  # lines
    columns: int

    @property
    def words(self) -> int:
        return self.row * self.rows + self.column * self.columns


def keeps_floats(n: StepNumbers, warp: WarpOperands, multiplied: tuple[Format, Format]) -> bool:
    """Returns whether the kernel keeps factors as f32. Its steps read four at a time."""
    read_together = n.terms % TOGETHER == 0 and warp.metadata is None and warp.scales is None
    return read_together and forms.keeps_floats(n, (warp.a.format, warp.b.format), multiplied)


def _shared(n: StepNumbers, warp: WarpOperands, rows: int, columns: int, floats: bool) -> SharedLines:
    dense = n.groups * padded_group(n) * PARTS
    if floats:  # a word of value and half a word of exponent
        dense = -(-dense // (2 * TOGETHER)) * TOGETHER
    own = dense if warp.metadata is None else 2 * n.of_instruction * _apart(warp)
    # so far apart that eight lines lie in different banks
    row, column = (next(words + more for more in range(0, 32, 4) if (words + more) % 8 == 4) for words in (dense, own))
    return SharedLines(row, column, rows, columns)


def _apart(warp: WarpOperands) -> int:
    """Words from one element of a sparse instruction's B to the next: its factor, or its code where metadata choose halves."""
    return 1 if warp.chunk == 2 else TOGETHER


class TablePlan(NamedTuple):
    floats: bool  # factors are kept as f32: see `as_floats`
    forms: dict[str, BitSum]  # by the names that they have in the text
    selected: dict[str, tuple[int, ...]]  # what the value of each selector is multiplied by, and then added
    elements: tuple[int, ...]  # elements of D in a lane, row by row
    rows: int  # rows of D in a lane
    shared: SharedLines

    @property
    def warps(self) -> int:
        return min(MOST_WARPS, 1 << (MOST_WORDS // self.shared.words).bit_length() >> 1)


def plan_tables(n: StepNumbers, warp: WarpOperands, multiplied: tuple[Format, Format]) -> TablePlan | None:
    """The tables; None where a place is no such sum, C is held in another way than D, or a warp's factors are too many.

    multiplied: the formats that A's and B's elements are multiplied in.
    """
    a, b = _lines(warp.a, warp), _lines(warp.b, warp)
    c, d = (_lines(held, warp, tiles=warp.tiles) for held in (warp.c, warp.d))
    if a is None or b is None or c is None or d is None or any((x != y).any() for x, y in zip(c, d, strict=True)):
        return None
    rows, columns = np.unique(d.row[0]), np.unique(d.column[0])
    at = {(int(row), int(column)): element for element, (row, column) in enumerate(zip(d.row[0], d.column[0], strict=True))}
    if len(at) != len(rows) * len(columns):
        return None
    floats = keeps_floats(n, warp, multiplied)
    shared = _shared(n, warp, int(a.row.max()) + 1, int(b.column.max()) + 1, floats)
    selected: dict[str, tuple[int, ...]] = {}
    places = (_float_places if floats else _places)(n, warp, shared, a, b) | {
        "row_place": _first(d.row, rows) * shared.row,
        "column_place": _first(d.column, columns) * shared.column,
    }
    if warp.metadata is not None:
        places |= _fields(warp.metadata, _first(d.row, rows), selected)
    if warp.scales is not None:
        (of_a, of_b), k, kept = warp.scales, warp.b.fragment.rows, warp.a.fragment.columns
        places |= _scales("a", of_a, a.row, a.column * of_a.columns // kept, selected)
        places |= _scales("b", of_b, b.row * of_b.rows // k, b.column, selected)
    forms = {name: as_bit_sum(table) for name, table in places.items()}
    found = {name: one for name, one in forms.items() if one is not None}
    made = TablePlan(floats, found, selected, tuple(at[int(row), int(column)] for row in rows for column in columns), len(rows), shared)
    return made if len(found) == len(forms) and made.warps else None


def _places(n: StepNumbers, warp: WarpOperands, shared: SharedLines, a: Lines, b: Lines) -> dict[str, Table]:
    """Places of A's and B's elements in shared memory."""
    order, spread = _order(n), lambda at: at // TOGETHER * TOGETHER * PARTS + at % TOGETHER
    of_a, of_b = a.column % warp.a.fragment.columns, b.row % warp.b.fragment.rows
    in_line = spread(order[of_b]) if warp.metadata is None else of_b * _apart(warp)
    return {"a_place": a.row * shared.row + spread(order[of_a]), "b_place": b.column * shared.column + in_line}


def _float_places(n: StepNumbers, warp: WarpOperands, shared: SharedLines, a: Lines, b: Lines) -> dict[str, Table]:
    """The same where values lie together in a line, and after them their exponents, in halves of words."""
    order, values = _order(n), n.groups * padded_group(n)
    of_a, of_b = order[a.column % warp.a.fragment.columns], order[b.row % warp.b.fragment.rows]
    place = {"a_place": a.row * shared.row + of_a, "b_place": b.column * shared.column + of_b}
    return place | {"a_half": 2 * (a.row * shared.row + values) + of_a, "b_half": 2 * (b.column * shared.column + values) + of_b}


def _first(line: Table, own: Table) -> Table:
    """A table [lanes, elements] of which lane 0 has some values in ascending order, with one column for each of them."""
    return line[:, [int(np.argmax(line[0] == value)) for value in own]]


def _run_length(place: BitSum) -> int:
    """Return the greatest length such that aligned runs of that many elements are contiguous."""
    for length in (4, 2):
        if len(place.element) % length == 0 and not any(weight % length for weight in place.lane):
            starts = np.array(place.element).reshape(-1, length)
            if not (starts[:, 0] % length).any() and (starts == starts[:, :1] + np.arange(length)).all():
                return length
    return 1


def _fields(fragment: Fragment, row: Table, selected: dict[str, tuple[int, ...]]) -> dict[str, Table]:
    """Lanes and field numbers of the metadata of a lane's rows, chunk by chunk."""
    place = _where(fragment)  # [selector, rows, chunks]
    for name, own in place.items():
        selected[f"field_{name}"] = _weights(own, 1)
    return {f"field_{name}": own[0][row].reshape(LANES, -1) for name, own in place.items()}


def _scales(name: str, fragment: Fragment, row: Table, column: Table, selected: dict[str, tuple[int, ...]]) -> dict[str, Table]:
    """Lanes and byte numbers of the scale of each element. row, column: in the matrix of scales."""
    place = {key: np.swapaxes(own, 0, 1) for key, own in _where(fragment).items()}  # [group of bytes, thread, rows, columns]
    for key, own in place.items():
        selected[f"{name}_scale_{key}"] = _weights(own, 2)
    return {f"{name}_scale_{key}": own[0, 0][row, column] for key, own in place.items()}


def _where(fragment: Fragment) -> dict[str, Table]:
    """Returns the lane, and the number in the lane, of each element of a fragment's matrix."""
    flat = np.argsort(fragment.index().ravel()).reshape(fragment.shape)
    return {"lane": flat // fragment.elements, "number": flat % fragment.elements}


def _weights(place: Table, selectors: int) -> tuple[int, ...]:
    """Returns the weight of each selector, which are the first axes, in a place; 0 for a selector of a single value."""
    weights = []
    for axis in range(selectors):
        moved = np.moveaxis(place, axis, 0)
        step = moved[1] - moved[0] if len(moved) > 1 else np.zeros(1, np.int64)
        assert (moved == moved[0] + np.arange(len(moved)).reshape(-1, *(1,) * (moved.ndim - 1)) * step.flat[0]).all()
        weights.append(int(step.flat[0]))
    return tuple(weights)


# ---- as text


def tables_text(n: StepNumbers, warp: WarpOperands, made: TablePlan) -> str:
    """The tables, and what is compiled in besides."""
    sparse, scaled, shared = warp.metadata is not None, warp.scales is not None, made.shared
    chunks = n.of_instruction * 2 // warp.chunk if sparse else 0
    numbers = {
        "row_stride": shared.row, "column_stride": shared.column, "columns_begin": shared.row * shared.rows,
        "a_lines": shared.rows, "b_lines": shared.columns, "words_of_warp": shared.words, "warps": made.warps, "blocks": BLOCKS,
        "rows_of_lane": made.rows, "columns_of_lane": len(made.elements) // made.rows, "padded": padded_group(n),
        "a_run": _run_length(made.forms["a_place"]), "b_run": 1 if sparse else _run_length(made.forms["b_place"]),
        "chunk": warp.chunk, "chunks": chunks, "field_words": max(1, -(-chunks // FIELDS_OF_WORD)), "clamped": warp.clamped,
        "selectors": sparse + 4 * scaled, "warpgroup": warp.warps, "tiles": warp.tiles,
        **_words(warp),
    }  # fmt: skip
    lines = [f"#define SPARSE {int(sparse)}", f"#define SELECTED {int(sparse or scaled)}"]
    lines += [f"[[maybe_unused]] constexpr int {name.upper()} = {int(value)};" for name, value in numbers.items()]
    for name, one in made.forms.items():
        lines += [_function(f"{name}_of_lane", "int lane", _sum_of_bits(one.lane)), _list(name, one.element)]
    lines.append(_list("d_element", made.elements))
    for name, weights in made.selected.items():
        names = [f"v{at}" for at in range(len(weights))]
        added = " + ".join(f"{value} * {weight}" for value, weight in zip(names, weights, strict=True))
        lines.append(_function(f"{name}_by", ", ".join(f"int {value}" for value in names), added))
    return "\n".join(lines)


def _words(warp: WarpOperands) -> dict[str, int]:
    """Returns for each operand the words of a lane and the distances of lanes, warps and tiles."""
    sizes = {}
    for name in "abcd":
        held: StoredOperand = getattr(warp, name)
        grouped, cut = len(held.fragment.lanes) > 1, warp.tiles if name in "cd" else 1
        words = held.fragment.elements * held.container_bits // 32
        of_part = LANES * words if grouped else 0
        copies = warp.tiles if name == "b" else warp.warps if grouped else 1
        sizes |= {f"{name}_words": words // cut, f"{name}_apart": words, f"{name}_part": of_part, f"{name}_all": LANES * words * copies}
        sizes |= {f"{name}_elements": held.fragment.elements // cut, f"{name}_bits": held.format.bits}
        sizes |= {f"{name}_container": held.container_bits, f"{name}_shift": held.shift}
    return sizes | {"b_tile": LANES * sizes["b_words"] if warp.tiles > 1 else 0}


def _function(name: str, arguments: str, value: str) -> str:
    return f"[[maybe_unused]] constexpr __device__ int {name}({arguments}) {{ return {value}; }}"


def _list(name: str, values: tuple[int, ...]) -> str:
    body = f"constexpr int of[] = {{{', '.join(map(str, values))}}}; return of[i];"
    return f"[[maybe_unused]] constexpr __device__ __forceinline__ int {name}(int i) {{ {body} }}"


def _sum_of_bits(weights: tuple[int, ...]) -> str:
    """Neighbouring bits that add twice as much each are a number."""
    parts, at = [], 0
    while at < len(weights):
        end = at + 1
        while end < len(weights) and weights[at] and weights[end] == 2 * weights[end - 1]:
            end += 1
        if weights[at]:
            parts.append(f"(lane >> {at} & {(1 << (end - at)) - 1}) * {weights[at]}")
        at = end
    return " + ".join(parts) or "0"
