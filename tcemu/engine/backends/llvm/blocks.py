"""The frame of kernels on matrices in LLVM IR: a task computes a block of D for one matrix of the batch.

Operands: A [b, M, K], B [b, K, N] or [b, N, K], C [B, M, N], and codes of scales [b, M, S] and [b, S, N] where there are any; b is B or 1.
Result: D [B, M, N].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from llvmlite import ir

from tcemu.engine.arithmetic.step.bounded import exponent_field
from tcemu.engine.arithmetic.step.forms import accumulator_is_bounded
from tcemu.engine.arithmetic.step.specials import MAGNITUDE
from tcemu.engine.backends.llvm.values import I1, I8, I32, I64, POINTER, Value, build_count, build_task
from tcemu.engine.formats.number_formats import Format

LANES = 16  # elements of D in a vector
FAR = 1 << 20  # a distance beyond every exponent


class BlockForm(NamedTuple):
    """The block that a task computes, and what the operands are."""

    rows: int
    columns: int
    group: int  # columns that are computed together: the block is filled up to whole groups
    a: Format
    b: Format
    c: Format
    d: Format
    terms: int  # products of a step
    block: int  # products along K that share a block scale; 0: there are none
    by_columns: bool = False  # B is [b, N, K]: the codes of a column lie side by side

    def largest_width(self, is_row: bool) -> int:
        """Elements that are decoded together: along K for A, along N for B."""
        if not is_row:
            return LANES
        shared = self.block if self.block > 1 else self.terms
        return next(width for width in (16, 8, 4, 2, 1) if self.terms % width == 0 and shared % width == 0)


def code_type(fmt: Format) -> ir.IntType:
    return ir.IntType(8 * fmt.dtype.itemsize)


def extend(codes: Value) -> Value:
    """Codes as integers of 32 bits."""
    return codes if codes.element == I32 else codes.cast("zext", I32)


class BlockKernel:
    """The function of one task: where its block is.

    A kernel that has bounded steps also allocates what `note_bounded_accumulators` reads and writes.
    """

    accumulators: Value  # codes in f32, [rows, columns] of the block
    unbounded_lanes: Value  # a vector
    are_bounded: Value  # a condition

    def __init__(self, module: ir.Module, name: str, form: BlockForm, wide_registers: bool = False) -> None:
        self.block, self.b = form, build_task(module, name, wide_registers)
        b = self.b
        task, buffers, dims = b.arguments
        operands = 5 if form.block else 3
        pointers = [b.load(POINTER, b.at(buffers, POINTER, at)) for at in range(operands + 1)]
        shapes = [b.load(POINTER, b.at(dims, POINTER, at)) for at in range(operands + 1)]
        size = lambda operand, axis: b.load(I64, b.at(shapes[operand], I64, axis))
        self.k, self.n = size(0, 2), size(2, 2)
        m = size(2, 1)
        self.step_count = self.k // form.terms
        down, across = (m + (form.rows - 1)) // form.rows, (self.n + (form.columns - 1)) // form.columns
        batch, place = task // (down * across), task % (down * across)
        row, column = place // across * form.rows, place % across * form.columns
        self.rows = b.minimum(m - row, b.constant(I64, form.rows))
        self.columns = b.minimum(self.n - column, b.constant(I64, form.columns))
        self.padded = (self.columns + (form.group - 1)) // form.group * form.group  # columns with those of the last group
        of_a, of_b = ((size(operand, 0) > 1).select(batch, b.constant(I64, 0)) for operand in (0, 1))
        self.a = b.at(pointers[0], code_type(form.a), (of_a * m + row) * self.k)
        self.b_codes = b.at(pointers[1], code_type(form.b), of_b * self.k * self.n + column * (self.k if form.by_columns else 1))
        self.columns_of_b = b.allocate(code_type(form.b), form.terms * form.columns)  # of a step, [terms, columns]
        at = (batch * m + row) * self.n + column
        self.c, self.d = b.at(pointers[2], code_type(form.c), at), b.at(pointers[-1], code_type(form.d), at)
        if form.block:
            self.scale_count = size(3, 2)
            self.scales_a = b.at(pointers[3], I8, (of_a * m + row) * self.scale_count)
            self.scales_b = b.at(pointers[4], I8, of_b * self.scale_count * self.n + column)

    def elements(self) -> Iterator[tuple[Value, Value, Value]]:
        """The vectors of the block: places in the block, places in C and D, and the lanes that exist."""
        b = self.b
        with b.loop(self.rows) as row, b.loop(self.padded, LANES) as column:
            yield row * self.block.columns + column, row * self.n + column, self.mask(column)

    def note_bounded_accumulators(self, least: int, most: int) -> None:
        """Notes whether bounded steps take every accumulator. least, most: exponents, see `accumulator_is_bounded`."""
        b, of = self.b, ir.VectorType(I32, LANES)
        b.store(b.constant(of, 0), self.unbounded_lanes)
        with b.loop(self.rows) as row, b.loop(self.padded, LANES) as column:
            code = b.load(of, b.at(self.accumulators, I32, row * self.block.columns + column))
            bounded = accumulator_is_bounded(code & MAGNITUDE, exponent_field(code), least, most)
            b.store(b.load(of, self.unbounded_lanes) | (~bounded).cast("sext", I32), self.unbounded_lanes)
        b.store(b.load(of, self.unbounded_lanes).reduce("or") == 0, self.are_bounded)

    def sides_are_bounded(self, sides: Sequence[BlockSide], is_narrow: bool, check: Callable[..., Value]) -> Value:
        """Returns whether this step's operands and the accumulators are bounded.

        Args:
            sides: Of A and of B, prepared for the step.
            is_narrow: The formats alone bound the exponents.
            check: Decides by the ends of both ranges, and the bits of K.
        """
        b, bounded = self.b, self.b.load(I1, self.are_bounded)
        for side in sides:
            bounded = bounded & ~side.has_special()
        if is_narrow:
            return bounded
        bits = 64 - b.call("llvm.ctlz.i64", I64, self.k, b.constant(I1, 0))
        return bounded & check(*(end for side in sides for end in side.exponent_range()), bits.cast("trunc", I32))

    def mask(self, column: Value) -> Value:
        """The lanes of a vector of columns that exist."""
        return self.b.splat((self.columns - column).cast("trunc", I32), LANES) > self.b.iota(I32, LANES)

    def visit_codes(self, is_row: bool, step: Value, visit: Callable[[Value, Value | None, Value], None]) -> None:
        """Calls visit(codes, scales, place) for all vectors of a step: codes and scales are i32.

        A place is the row times the products of a step plus the product, or the product times the columns of a block plus the column.
        """
        b, form = self.b, self.block
        width = form.largest_width(is_row)
        of = code_type(form.a if is_row else form.b)
        first = step * form.terms
        if is_row:
            with b.loop(self.rows) as row:
                for part in range(0, form.terms, width):
                    at = first + part
                    codes = b.load(ir.VectorType(of, width), b.at(self.a, of, row * self.k + at))
                    scales = None
                    if form.block == 1:
                        scales = extend(b.load(ir.VectorType(I8, width), b.at(self.scales_a, I8, row * self.scale_count + at)))
                    elif form.block:
                        scale = b.load(I8, b.at(self.scales_a, I8, row * self.scale_count + at // form.block))
                        scales = b.splat(scale.cast("zext", I32), width)
                    visit(extend(codes), scales, row * form.terms + part)
            return
        if form.by_columns:
            self.transpose_columns(first)
        with b.loop(b.constant(I64, form.terms)) as term, b.loop(self.padded, LANES) as column:
            mask = self.mask(column)
            at = first + term
            if form.by_columns:
                codes = b.load(ir.VectorType(of, LANES), b.at(self.columns_of_b, of, term * form.columns + column))
            else:
                codes = b.masked_load(ir.VectorType(of, LANES), b.at(self.b_codes, of, at * self.n + column), mask)
            scales = None
            if form.block:
                place = b.at(self.scales_b, I8, at // form.block * self.n + column)
                scales = extend(b.masked_load(ir.VectorType(I8, LANES), place, mask))
            visit(extend(codes), scales, term * form.columns + column)

    def transpose_columns(self, first: Value) -> None:
        """Copies a step's codes of B from columns to rows. A column that does not exist gets the codes of the last one."""
        b, form = self.b, self.block
        of, width = code_type(form.b), next(width for width in (16, 8, 4, 2, 1) if form.terms % width == 0)
        last = self.columns - 1
        with b.loop(self.padded, LANES) as column, b.loop(b.constant(I64, form.terms), width) as part:
            places = [b.minimum(column + lane, last) * self.k + first + part for lane in range(LANES)]
            rows = b.transpose([b.load(ir.VectorType(of, width), b.at(self.b_codes, of, place)) for place in places])
            for term, row in enumerate(rows):
                b.store(row, b.at(self.columns_of_b, of, (part + term) * form.columns + column))


class BlockSide:
    """One multiplicand's part in a step, for the rows or columns of a block, with the range of its exponents and its specials."""

    def __init__(self, kernel: BlockKernel, is_row: bool, fmt: Format, width: int) -> None:
        self.kernel, self.b, self.is_row, self.format = kernel, kernel.b, is_row, fmt
        self.vector = ir.VectorType(I32, width)
        self.low, self.high, self.special = (self.b.allocate(self.vector) for _ in range(3))

    def clear_range(self) -> None:
        for memory, start in ((self.low, FAR), (self.high, -FAR), (self.special, 0)):
            self.b.store(self.b.constant(self.vector, start), memory)

    def note_exponents(self, least: Value, most: Value) -> None:
        self.b.store(self.b.minimum(self.b.load(self.vector, self.low), least), self.low)
        self.b.store(self.b.maximum(self.b.load(self.vector, self.high), most), self.high)

    def note_special(self, special: Value) -> None:
        self.b.store(self.b.load(self.vector, self.special) | special.cast("sext", I32), self.special)

    def exponent_range(self) -> tuple[Value, Value]:
        """The least and the largest exponent that were noted in the step."""
        return self.b.load(self.vector, self.low).reduce("smin"), self.b.load(self.vector, self.high).reduce("smax")

    def has_special(self) -> Value:
        return self.b.load(self.vector, self.special).reduce("or") != 0


@lru_cache(maxsize=768)
def block_text(kernel: Callable[[ir.Module, str, Any], BlockKernel], form: Any) -> str:
    """LLVM IR of the functions NAME_tasks and NAME_task of a form, which has the name: see `xla_call`."""
    module = ir.Module(form.name)
    block = kernel(module, form.name, form).block
    _count_tasks(module, form.name, block.rows, block.columns)
    return str(module)


def _count_tasks(module: ir.Module, name: str, rows: int, columns: int) -> None:
    """Adds the function NAME_tasks, which returns the number of blocks of D."""
    counting, dims = build_count(module, name)
    sizes = counting.load(POINTER, counting.at(dims, POINTER, 2))
    batch, m, n = (counting.load(I64, counting.at(sizes, I64, axis)) for axis in range(3))
    counting.finish(batch * ((m + (rows - 1)) // rows) * ((n + (columns - 1)) // columns))
