"""Steps of block-scaled groups as a CPU kernel in LLVM IR: see `grouped_dot_add`. The products of a group are added exactly, then scaled.

A task computes a block of D step by step, and looks at the scales of each step. Then there are two ways to add:

- Bounded steps. The sum of a group is an f32: an integer below 2^24 times a power of two. It is found by multiply-adds of scaled values,
  or, where the CPU has AVX-512 VNNI, by sums of products of bytes, which are then multiplied by the scales. Aligned, it has up to 48 bits.
  It is divided into two parts, each of which is truncated by the conversion to an integer, and the parts of all groups are added.
- Any steps: see `general_steps`.

Scales are bounded if none is NaN, if all are normal f32, and if the exponents of two scales together are at least `least` and too small for
a sum to reach 2^127. `arithmetic.step.bounded` says why such steps need no other rule.

Nothing here depends on whether the machine flushes subnormals: floats are normal or zero wherever their value matters.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from llvmlite import ir

from tcemu.engine.arithmetic.step import groups
from tcemu.engine.arithmetic.step.bounded import exponent_field
from tcemu.engine.arithmetic.step.decoding import BIAS, decode, significand, value_word
from tcemu.engine.arithmetic.step.forms import MAX_ACCUMULATOR, GroupedForm, StepNumbers, largest_value, scales_are_bounded
from tcemu.engine.arithmetic.step.specials import MAGNITUDE
from tcemu.engine.backends.llvm.blocks import LANES, BlockKernel, BlockSide
from tcemu.engine.backends.llvm.general_steps import GeneralForm, GeneralSteps
from tcemu.engine.backends.llvm.values import F32, I1, I8, I16, I32, I64, Builder, Value
from tcemu.engine.formats.number_formats import F32 as RESULT
from tcemu.engine.formats.number_formats import Format

ROWS, COLUMNS = 64, 128  # of a block of D
NEIGHBOURS, NARROW_NEIGHBOURS = 64, 16  # columns that are computed together, with AVX-512 and without
VECTOR, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)


class GroupedKernelForm(NamedTuple):
    """The parameters of a kernel, which is compiled for each set of them."""

    step: GroupedForm
    general: GeneralForm
    wide_registers: bool  # AVX-512 is there
    adds_bytes: bool  # AVX-512 VNNI is there

    name = "groups"

    @property
    def scale(self) -> Format:
        return self.step.scale

    @property
    def groups(self) -> int:
        return self.step.groups

    @property
    def neighbours(self) -> int:
        """Columns that are computed together."""
        return NEIGHBOURS if self.wide_registers else NARROW_NEIGHBOURS


def has_whole_groups(n: StepNumbers, block: int) -> bool:
    """Returns whether groups fill the words and the blocks of scales that a kernel reads."""
    return n.summed == 16 and n.terms <= 128 and n.terms % max(block, 1) == 0 and block % n.summed == 0


class GroupedSide(BlockSide):
    """One multiplicand's part in a step, for the rows or columns of a block."""

    def __init__(self, kernel: GroupedKernel, is_row: bool) -> None:
        form, b = kernel.form, kernel.b
        self.form, self.width = form, form.groups if is_row else form.neighbours
        super().__init__(kernel, is_row, form.general.a if is_row else form.general.b, self.width)
        lines = ROWS if is_row else COLUMNS
        terms, groups = form.general.numbers.terms * lines, form.groups * lines
        self.values = b.allocate(I8 if form.adds_bytes else F32, terms)
        self.scales, self.exponents, self.nonzero = b.allocate(F32, groups), b.allocate(I16, groups), b.allocate(I16, groups)
        self.starts = b.allocate(I32, groups)  # of sums of bytes

    def prepare(self, step: Value) -> None:
        """Decodes the step's operands, and notes the range of the exponents of their scales."""
        self.clear_range()
        (self._prepare_rows if self.is_row else self._prepare_columns)(step)

    def _bytes(self, codes: Value) -> Value:
        """Values in units of the least one, in bytes: their slope doubles with each exponent."""
        b, fmt = self.b, self.format
        unsigned = codes & ((1 << (fmt.bits - 1)) - 1)
        size = unsigned
        for exponent in range(fmt.min_exponent + 1, fmt.max_exponent + 1):
            field = exponent + fmt.bias
            more = b.subtract_saturated(unsigned, b.constant(codes.type, field << fmt.mantissa_bits))
            for _ in range(exponent - fmt.min_exponent - 1):
                more = more + more
            size = size + more
        return (codes & (1 << (fmt.bits - 1)) != 0).select(0 - size, size)

    def _note_scales(self, codes: Value, place: Value, bias: int) -> None:
        """Stores the scales of groups, and clears the marks of values that are not zero under scales that are. codes: i32."""
        b, fmt = self.b, self.form.scale
        x = decode(fmt, codes)
        exponent, lanes = x.exponent - BIAS, codes.lanes
        assert lanes is not None
        b.store(value_word(fmt, x).as_float(), b.at(self.scales, F32, place))
        b.store((exponent + bias).cast("trunc", I16), b.at(self.exponents, I16, place))
        if fmt.subnormals:
            to = b.at(self.nonzero, I16, place)
            marks = b.load(ir.VectorType(I16, lanes), to)
            b.store((significand(fmt, x) == 0).select(b.constant(marks.type, 0), marks), to)
        assert x.special is not None
        self.note_special(x.special)
        if not self.form.step.has_narrow_scales:
            self.note_exponents(exponent, exponent)

    def _prepare_rows(self, step: Value) -> None:
        k, b, form = self.kernel, self.b, self.form
        n, block = form.general.numbers, form.general.block
        width = next(width for width in (64, 32, 16) if n.terms % width == 0)
        count = n.terms // block
        with b.loop(k.rows) as row:
            for part in range(0, n.terms, width):
                codes = b.load(ir.VectorType(I8, width), b.at(k.a, I8, row * k.k + (step * n.terms + part)))
                place = row * n.terms + part
                values = self._bytes(codes)
                marks = b.reinterpret(values != 0, ir.IntType(width))
                b.store(marks, b.at(self.nonzero, I16, row * form.groups + part // n.summed))
                if form.adds_bytes:  # bytes without sign
                    b.store(values + largest_value(self.format), b.at(self.values, I8, place))
                else:
                    b.store(values.cast("sext", I32).cast("sitofp", F32), b.at(self.values, F32, place))
            place = row * k.scale_count + step * count
            codes = b.load(ir.VectorType(I8, count), b.at(k.scales_a, I8, place)).cast("zext", I32)
            self._note_scales(b.shuffle(codes, codes, [g * n.summed // block for g in range(form.groups)]), row * form.groups, BIAS)
            if not form.adds_bytes:
                for group in range(form.groups):
                    scale = b.splat(b.load(F32, b.at(self.scales, F32, row * form.groups + group)), n.summed)
                    place = b.at(self.values, F32, row * n.terms + group * n.summed)
                    b.store(b.load(scale.type, place) * scale, place)

    def _prepare_columns(self, step: Value) -> None:
        k, b, form = self.kernel, self.b, self.form
        n, block = form.general.numbers, form.general.block
        codes_of = ir.VectorType(I8, self.width)
        if form.general.by_columns:
            k.transpose_columns(step * n.terms)
        with b.loop(b.constant(I64, form.groups)) as group, b.loop(k.padded, self.width) as column:
            mask = b.splat((k.columns - column).cast("trunc", I16), self.width) > b.iota(I16, self.width)
            first = step * n.terms + group * n.summed
            if form.general.by_columns:
                places = [b.at(k.columns_of_b, I8, (group * n.summed + term) * COLUMNS + column) for term in range(n.summed)]
                rows = [self._bytes(b.load(codes_of, place)) for place in places]
            else:
                places = [b.at(k.b_codes, I8, (first + term) * k.n + column) for term in range(n.summed)]
                rows = [self._bytes(b.masked_load(codes_of, place, mask)) for place in places]
            marks = b.constant(ir.VectorType(I16, self.width), 0)
            for term, row in enumerate(rows):
                marks = marks | (row != 0).select(b.constant(marks.type, 1 << term), b.constant(marks.type, 0))
            place = group * COLUMNS + column
            b.store(marks, b.at(self.nonzero, I16, place))
            at = b.at(k.scales_b, I8, first // block * k.n + column)
            self._note_scales(b.masked_load(codes_of, at, mask).cast("zext", I32), place, 0)
            if form.adds_bytes:
                self._store_words(rows, group, column)
            else:
                scales = b.load(ir.VectorType(F32, self.width), b.at(self.scales, F32, place))
                for term, row in enumerate(rows):
                    value = row.cast("sext", I32).cast("sitofp", F32) * scales
                    b.store(value, b.at(self.values, F32, (group * n.summed + term) * COLUMNS + column))

    def _store_words(self, rows: list[Value], group: Value, column: Value) -> None:
        """Stores four bytes of a column in a word, and the sums that take the shift of A's values back."""
        b, n = self.b, self.form.general.numbers
        words = []
        for at in range(0, n.summed, 4):
            parts = [(row.cast("zext", I32)) << (8 * place) for place, row in enumerate(rows[at : at + 4])]
            words.append(parts[0] | parts[1] | parts[2] | parts[3])
            b.store(words[-1], b.at(self.values, I32, (group * (n.summed // 4) + at // 4) * COLUMNS + column))
        for part in range(0, self.width, LANES):
            start = b.constant(VECTOR, 0)
            shift = b.constant(VECTOR, largest_value(self.form.general.a) * 0x01010101)
            for word in words:
                start = add_bytes(b, start, shift, b.shuffle(word, word, list(range(part, part + LANES))))
            b.store(0 - start, b.at(self.starts, I32, group * COLUMNS + column + part))


def add_bytes(b: Builder, total: Value, x: Value, y: Value) -> Value:
    """total and the sums of the products of four bytes each: those of x have no sign, those of y have one."""
    of = ir.VectorType(I8, 4 * LANES)
    return b.call("llvm.x86.avx512.vpdpbusd.512", VECTOR, total, b.reinterpret(x, of), b.reinterpret(y, of))


class GroupedKernel(BlockKernel):
    def __init__(self, module: ir.Module, name: str, form: GroupedKernelForm) -> None:
        super().__init__(module, name, form.general.of_block((ROWS, COLUMNS), form.neighbours), form.wide_registers)
        self.form, b = form, self.b
        self.accumulators = b.allocate(I32, ROWS * COLUMNS)
        self.tops = b.allocate(I16, form.neighbours)
        self.are_bounded, self.unbounded_lanes = b.allocate(I1), b.allocate(VECTOR)
        self.x, self.y = GroupedSide(self, True), GroupedSide(self, False)
        steps = GeneralSteps(self, form.general)
        for place, memory, mask in self.elements():
            b.store(b.masked_load(VECTOR, b.at(self.c, I32, memory), mask), b.at(self.accumulators, I32, place))
        self.note_bounded_accumulators(form.step.least, MAX_ACCUMULATOR)

        def add_any(step: Value) -> None:
            steps.add(step, self.accumulators)
            self.note_bounded_accumulators(form.step.least, MAX_ACCUMULATOR)

        with b.loop(self.step_count) as step:
            self.x.prepare(step)
            self.y.prepare(step)
            is_bounded = self.sides_are_bounded((self.x, self.y), form.step.has_narrow_scales, partial(scales_are_bounded, form.step))
            b.branch(is_bounded, self._add_bounded, lambda: add_any(step))
        for place, memory, mask in self.elements():
            code = b.load(VECTOR, b.at(self.accumulators, I32, place))
            code = (code & MAGNITUDE > RESULT.infinity).select(form.general.nan, code)
            b.masked_store(code, b.at(self.d, I32, memory), mask)
        b.finish()

    def _add_bounded(self) -> None:
        b = self.b
        with b.loop(self.rows) as row, b.loop(self.padded, self.form.neighbours) as column:
            self._find_tops(row, column)
            self._add_vectors(row, column)

    def _find_tops(self, row: Value, column: Value) -> None:
        """Rule 3: a group takes part if two of its factors that are not zero meet, under scales that are not."""
        b, form = self.b, self.form
        of = ir.VectorType(I16, form.neighbours)
        top = b.constant(of, form.step.least + BIAS)
        for group in range(form.groups):
            of_row = lambda memory: b.splat(b.load(I16, b.at(memory, I16, row * form.groups + group)), form.neighbours)  # noqa: B023
            of_columns = lambda memory: b.load(of, b.at(memory, I16, column + group * COLUMNS))  # noqa: B023
            exponent = of_row(self.x.exponents) + of_columns(self.y.exponents)
            meets = of_row(self.x.nonzero) & of_columns(self.y.nonzero) != 0
            top = meets.select(b.maximum(top, exponent), top)
        b.store(top, self.tops)

    def _add_vectors(self, row: Value, column: Value) -> None:
        """Computes a step for vectors of columns, side by side."""
        b, form = self.b, self.form
        n = form.general.numbers
        starts = range(0, form.neighbours, LANES)
        places = [b.at(self.accumulators, I32, row * COLUMNS + column + at) for at in starts]
        codes = [b.load(VECTOR, place) for place in places]
        tops = [
            b.load(ir.VectorType(I16, LANES), b.at(self.tops, I16, at)).cast("sext", I32).max(exponent_field(code))
            for at, code in zip(starts, codes, strict=True)
        ]
        sums = [groups.parts(code.as_float() * groups.power(top, n.fraction_bits)) for code, top in zip(codes, tops, strict=True)]
        units = [groups.power(top, n.fraction_bits + form.step.unit) for top in tops]
        for group in range(form.groups):
            for at, value in enumerate(self._sums(row, group, [column + start for start in starts])):
                high, low = groups.parts(value * units[at])
                sums[at] = sums[at][0] + high, sums[at][1] + low
        for place, (high, low), top in zip(places, sums, tops, strict=True):
            b.store(groups.round_parts(high, low, groups.unit(top, n.fraction_bits), n.kept, form.wide_registers), place)

    def _sums(self, row: Value, group: int, columns: list[Value]) -> list[Value]:
        """The exact sum of a group's products for each vector of columns, in units of the values, f32."""
        b, form = self.b, self.form
        summed = form.general.numbers.summed
        if not form.adds_bytes:
            sums = [b.constant(FLOATS, 0)] * len(columns)
            for term in range(group * summed, (group + 1) * summed):
                x = b.splat(b.load(F32, b.at(self.x.values, F32, row * form.general.numbers.terms + term)), LANES)
                for at, column in enumerate(columns):
                    y = b.load(FLOATS, b.at(self.y.values, F32, column + term * COLUMNS))
                    sums[at] = x.multiply_add_exact(y, sums[at])
            return sums
        totals = [b.load(VECTOR, b.at(self.y.starts, I32, column + group * COLUMNS)) for column in columns]
        for word in range(group * summed // 4, (group + 1) * summed // 4):
            x = b.splat(b.load(I32, b.at(self.x.values, I32, row * (form.general.numbers.terms // 4) + word)), LANES)
            for at, column in enumerate(columns):
                totals[at] = add_bytes(b, totals[at], x, b.load(VECTOR, b.at(self.y.values, I32, column + word * COLUMNS)))
        scale = b.splat(b.load(F32, b.at(self.x.scales, F32, row * form.groups + group)), LANES)
        return [
            total.cast("sitofp", F32) * scale * b.load(FLOATS, b.at(self.y.scales, F32, column + group * COLUMNS))
            for total, column in zip(totals, columns, strict=True)
        ]
