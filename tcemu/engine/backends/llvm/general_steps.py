"""Fused steps of any numbers as a CPU kernel in LLVM IR: the eight rules of `fused_dot_add` in integers, on vectors of columns of D.

It takes every `Model` of fused steps whose fields are known before tracing: any rounding and alignment, results in f16, sums of groups of
products, chains, and results that each instruction rounds once more. Significands and exponents are integers and sums have 64 bits.

Rule 8 is applied before a step: an accumulator becomes Inf or NaN where the products give one, and then stays so (see `absorb_specials`).
Only steps with an Inf or NaN among their operands need that. It adds floats of which none is subnormal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from llvmlite import ir

from tcemu.engine.arithmetic.step import general
from tcemu.engine.arithmetic.step import values as lanes
from tcemu.engine.arithmetic.step.decoding import (
    BIAS,
    ZERO_EXPONENT,
    decode,
    decode_accumulator,
    sign_bit,
    significand,
    value_word,
    with_sign_bit,
)
from tcemu.engine.arithmetic.step.forms import StepNumbers, float_sums, is_compact
from tcemu.engine.arithmetic.step.rounding import encode, take_sign, with_sign
from tcemu.engine.arithmetic.step.specials import code_of_class, factor_class, special_value
from tcemu.engine.backends.llvm.blocks import LANES, BlockForm, BlockKernel, BlockSide, code_type, extend
from tcemu.engine.backends.llvm.values import F32, I16, I32, I64, Value
from tcemu.engine.formats.number_formats import F16, Format
from tcemu.engine.formats.number_formats import F32 as WORD

PLACES = 1 << 13  # of a block, rows or columns times the products of a step
MOST_LINES = 64  # rows or columns of a block
GROUP = 64  # columns whose max exponents are found together
ZERO_LANE = -(1 << 13)  # the exponent of a zero in lanes of 16 bits
UNROLLED = 32  # products of a step whose operations are not a loop
VECTOR = ir.VectorType(I32, LANES)


class GeneralForm(NamedTuple):
    """The parameters of a kernel, which is compiled for each set of them."""

    numbers: StepNumbers
    a: Format
    b: Format
    scale: Format | None
    result: Format
    d: Format
    block: int  # products along K that share a block scale; 0: there are none
    nan: int  # code of every NaN of D
    by_columns: bool = False  # see `BlockForm`

    name = "general"

    @property
    def lines(self) -> int:
        """Rows and columns of a block."""
        return max(LANES, min(MOST_LINES, PLACES // self.numbers.terms // LANES * LANES))

    @property
    def steps_per_instruction(self) -> int:
        n = self.numbers
        return n.groups * -(-n.of_group // n.terms)

    @property
    def is_compact(self) -> bool:
        """True if values are multiplied as they are."""
        return self.scale is None and is_compact(self.a, self.b)

    @property
    def partial_sums(self) -> int:
        """Sums of aligned products, each of which fits an i32 with the accumulator; 0 where terms are added as integers of 64 bits."""
        n = self.numbers
        return 0 if n.summed else float_sums(self.a, self.b, n.fraction_bits, n.terms)

    def of_block(self, lines: tuple[int, int], group: int) -> BlockForm:
        return BlockForm(*lines, group, self.a, self.b, self.result, self.d, self.numbers.terms, self.block, self.by_columns)


# ---- steps


class GeneralSide(BlockSide):
    """One multiplicand's factors in a step, for the rows or columns of a block."""

    def __init__(self, kernel: BlockKernel, form: GeneralForm, is_row: bool) -> None:
        b = kernel.b
        super().__init__(kernel, is_row, form.a if is_row else form.b, kernel.block.largest_width(is_row))
        self.form = form
        lines = kernel.block.rows if is_row else kernel.block.columns
        count = form.numbers.terms * lines
        self.significands, self.exponents, self.classes = b.allocate(I32, count), b.allocate(I32, count), b.allocate(F32, count)
        self.lanes = b.allocate(I16, count)  # exponents, while their max is found
        self.values = b.allocate(F32, count if form.partial_sums else 1)  # of compact formats, else significands

    def prepare(self, step: Value) -> None:
        """Decodes the step's operands, and notes whether one of them is Inf or NaN."""
        b, form, fmt = self.b, self.form, self.format
        self.clear_range()

        def visit(codes: Value, scales: Value | None, place: Value) -> None:
            x = decode(fmt, codes)
            number, exponent = significand(fmt, x), x.exponent - BIAS
            special = codes.never() if x.special is None else x.special
            infinite = codes.never() if x.infinite is None else x.infinite
            gone = x.zero | special
            if scales is not None:
                assert form.scale is not None
                s = decode(form.scale, scales)
                of_scale = s.exponent - BIAS
                if form.numbers.summed:  # a group has the exponent of its scales, and its values one unit
                    number = (number << (exponent - fmt.min_exponent)) * significand(form.scale, s)
                    exponent = of_scale
                    gone = gone | (significand(form.scale, s) == 0)
                else:
                    exponent = exponent + of_scale
                if s.special is not None:
                    special, infinite, gone = special | s.special, infinite & ~s.special, gone | s.special
            number = gone.select(0, number)
            sign = codes.constant(0) if x.negative is None else x.negative
            if form.is_compact and form.partial_sums:
                value = with_sign_bit(gone.select(0, value_word(fmt, x)), x.negative).as_float()
                b.store(value, b.at(self.values, F32, place))
            elif form.partial_sums:
                b.store(with_sign(number, sign).cast("sitofp", F32), b.at(self.values, F32, place))
            else:
                b.store(with_sign(number, sign), b.at(self.significands, I32, place))
            exponent = gone.select(ZERO_EXPONENT, exponent)
            b.store(exponent, b.at(self.exponents, I32, place))
            b.store(gone.select(ZERO_LANE, exponent).cast("trunc", I16), b.at(self.lanes, I16, place))
            b.store(factor_class(special, infinite, x.zero, x.negative), b.at(self.classes, F32, place))
            self.note_special(special)

        self.kernel.visit_codes(self.is_row, step, visit)

    def load_factors(self, memory: Value, of: ir.Type, line: Value, term: Value) -> Value:
        """The factors of one product: that of a row, repeated, or those of a vector of columns."""
        b = self.b
        if self.is_row:
            return b.splat(b.load(of, b.at(memory, of, line * self.form.numbers.terms + term)), LANES)
        return b.load(ir.VectorType(of, LANES), b.at(memory, of, term * self.kernel.block.columns + line))


class GeneralSteps:
    """The steps of a kernel on accumulators in memory, codes of the result as i32 [rows, columns] of a block."""

    def __init__(self, kernel: BlockKernel, form: GeneralForm) -> None:
        self.kernel, self.form, self.b = kernel, form, kernel.b
        self.x, self.y = GeneralSide(kernel, form, True), GeneralSide(kernel, form, False)
        self.top, self.total = self.b.allocate(VECTOR), self.b.allocate(ir.VectorType(I64, LANES))
        self.tops = self.b.allocate(I16, kernel.block.group)
        self.product, self.any, self.exponent = (self.b.allocate(VECTOR) for _ in range(3))
        self.classes = self.b.allocate(ir.VectorType(F32, LANES))

    def add(self, step: Value, accumulators: Value) -> None:
        b = self.b
        self.x.prepare(step)
        self.y.prepare(step)
        b.branch(self.x.has_special() | self.y.has_special(), lambda: self._absorb(accumulators), lambda: None)
        group = self.kernel.block.group
        with b.loop(self.kernel.rows) as row, b.loop(self.kernel.padded, group) as first:
            if not self.form.numbers.summed:
                self._find_tops(row, first)
            with b.loop(b.minimum(self.kernel.columns - first, b.constant(I64, group)), LANES) as at:
                column = first + at
                place = b.at(accumulators, I32, row * self.kernel.block.columns + column)
                top = b.load(ir.VectorType(I16, LANES), b.at(self.tops, I16, at)).cast("sext", I32)
                b.store(self._add_vector(row, column, top, b.load(VECTOR, place)), place)

    def _find_tops(self, row: Value, column: Value) -> None:
        """Rule 3: the max exponents of the products, for a group of columns."""
        b, terms, columns = self.b, self.form.numbers.terms, self.kernel.block.columns
        of = ir.VectorType(I16, self.kernel.block.group)
        b.store(b.constant(of, 2 * ZERO_LANE), self.tops)

        def visit(term: Value) -> None:
            x = b.splat(b.load(I16, b.at(self.x.lanes, I16, row * terms + term)), self.kernel.block.group)
            y = b.load(of, b.at(self.y.lanes, I16, term * columns + column))
            b.store(b.maximum(b.load(of, self.tops), x + y), self.tops)

        self._over_terms(0, terms, visit)

    def _absorb(self, accumulators: Value) -> None:
        """Rule 8: accumulators become Inf or NaN where the products of the step give one."""
        b, fmt = self.b, self.form.result
        of = ir.VectorType(F32, LANES)
        with b.loop(self.kernel.rows) as row, b.loop(self.kernel.padded, LANES) as column:
            place = b.at(accumulators, I32, row * self.kernel.block.columns + column)
            code = b.load(VECTOR, place)
            b.store(special_value(fmt, code), self.classes)
            with b.loop(b.constant(I64, self.form.numbers.terms)) as term:
                x, y = self.x.load_factors(self.x.classes, F32, row, term), self.y.load_factors(self.y.classes, F32, column, term)
                b.store(b.load(of, self.classes) + x * y, self.classes)
            b.store(code_of_class(fmt, b.load(of, self.classes), code), place)

    def _term(self, row: Value, column: Value, term: Value) -> tuple[Value, Value]:
        """The significand and the exponent of an aligned term: of a product, or of a sum of products with the same scales."""
        b, summed = self.b, self.form.numbers.summed
        factors = lambda memory, at: (self.x.load_factors(getattr(self.x, memory), I32, row, at),
                                      self.y.load_factors(getattr(self.y, memory), I32, column, at))  # fmt: skip
        if not summed:
            (x, y), (p, q) = factors("significands", term), factors("exponents", term)
            return x * y, p + q
        for memory, start in ((self.product, 0), (self.any, 0), (self.exponent, 2 * ZERO_EXPONENT)):
            b.store(b.constant(VECTOR, start), memory)
        with b.loop(b.constant(I64, summed)) as at:
            (x, y), (p, q) = factors("significands", term + at), factors("exponents", term + at)
            b.store(b.load(VECTOR, self.product) + x * y, self.product)
            b.store(b.maximum(b.load(VECTOR, self.exponent), p + q), self.exponent)
        return b.load(VECTOR, self.product), b.load(VECTOR, self.exponent)

    def _add_vector(self, row: Value, column: Value, top: Value, code: Value) -> Value:
        """The accumulators after a step. top: the max exponents of the products, where they are not added in groups."""
        form, n = self.form, self.form.numbers
        c = decode_accumulator(form.result, code)
        least = c.exponent.max(n.floor)
        top = self._top_of_groups(row, column, least) if n.summed else top.max(least)
        own = partial(self._aligned, c.significand, c.negative, form.result.mantissa_bits, top - c.exponent)
        unit = top - n.fraction_bits
        if form.partial_sums:
            first, *others = self._add_floats(row, column, top)
            total = first + own(lanes.I32)
            for other in others:
                total, unit = general.add_jammed(total, other, unit)
        else:
            total = self._add_integers(row, column, top, own(lanes.I64))
        d = encode(form.result, take_sign(total), unit, n.rounding, n.kept)  # rules 6 and 7
        return c.special.select(code, d)  # rule 8

    def _over_terms(self, start: int, stop: int, visit: Callable[[Value], None]) -> None:
        b = self.b
        if stop - start <= UNROLLED:
            for term in range(start, stop):
                visit(b.constant(I64, term))
        else:
            with b.loop(b.constant(I64, stop - start), 1) as term:
                visit(term + start)

    def _top_of_groups(self, row: Value, column: Value, least: Value) -> Value:
        """Rule 3: the max exponent of the groups, and at least `least`."""
        b, n = self.b, self.form.numbers
        b.store(least, self.top)
        with b.loop(b.constant(I64, n.terms), n.summed) as term:
            b.store(b.maximum(b.load(VECTOR, self.top), self._term(row, column, term)[1]), self.top)
        return b.load(VECTOR, self.top)

    def _sum_of_exponents(self, row: Value, column: Value, term: Value) -> Value:
        return self.x.load_factors(self.x.exponents, I32, row, term) + self.y.load_factors(self.y.exponents, I32, column, term)

    def _add_floats(self, row: Value, column: Value, top: Value) -> list[Value]:
        """Rules 4 and 5: sums of products, each rounded to an integer as an f32. See `fused_dot_add` for why that is exact."""
        b, form, n = self.b, self.form, self.form.numbers
        least = form.a.min_exponent + form.b.min_exponent
        common = general.common_scale(top, least, n.fraction_bits) if form.is_compact else None
        size = -(-n.terms // form.partial_sums)

        def visit(term: Value) -> None:
            product = self.x.load_factors(self.x.values, F32, row, term) * self.y.load_factors(self.y.values, F32, column, term)
            scale = common
            if scale is None:
                scale = general.product_scale(self._sum_of_exponents(row, column, term), top, n.mantissas, n.fraction_bits)
            rounded = general.round_product(product * scale, product, n.alignment).to_integer()
            b.store(b.load(VECTOR, self.product) + rounded, self.product)

        sums = []
        for start in range(0, n.terms, size):
            b.store(b.constant(VECTOR, 0), self.product)
            self._over_terms(start, min(start + size, n.terms), visit)
            sums.append(b.load(VECTOR, self.product))
        return sums

    def _add_integers(self, row: Value, column: Value, top: Value, own: Value) -> Value:
        """Rules 4 and 5 in integers of 64 bits, with the aligned accumulator."""
        b, n = self.b, self.form.numbers
        b.store(own, self.total)

        def visit(term: Value) -> None:
            product, exponent = self._term(row, column, term)
            sign = product.shift_right_signed(31)
            aligned = self._aligned(with_sign(product, sign), sign, n.mantissas, top - exponent, lanes.I64)
            b.store(b.load(aligned.type, self.total) + aligned, self.total)

        with b.loop(b.constant(I64, n.terms), n.summed or 1) as term:
            visit(term)
        return b.load(ir.VectorType(I64, LANES), self.total)

    def _aligned(self, size: Value, sign: Value, stored: int, distance: Value, lane: lanes.Lane) -> Value:
        """A term of `stored` fraction bits, `distance` binades below the exponent that the step aligns to, with its sign."""
        n = self.form.numbers
        return general.align_integer(size, sign, stored, distance, n.fraction_bits, n.alignment, lane)


class GeneralKernel(BlockKernel):
    def __init__(self, module: ir.Module, name: str, form: GeneralForm) -> None:
        super().__init__(module, name, form.of_block((form.lines, form.lines), min(GROUP, form.lines)))
        self.form, b = form, self.b
        n, fmt = form.numbers, form.result
        places = form.lines**2
        self.running = b.allocate(I32, places)
        self.chain, self.chains = (b.allocate(I32, places if n.chain else 1) for _ in range(2))
        steps = GeneralSteps(self, form)
        of_code = ir.VectorType(code_type(fmt), LANES)
        for place, memory, mask in self.elements():
            code = extend(b.masked_load(of_code, b.at(self.c, code_type(fmt), memory), mask))
            b.store(code, b.at(self.running, I32, place))
        with b.loop(self.step_count) as step:
            if n.chain:
                self._add_chained(step, steps)
            else:
                steps.add(step, self.running)
            if n.rounded_again:
                b.branch((step + 1) % form.steps_per_instruction == 0, self._round_again, lambda: None)
        for place, memory, mask in self.elements():
            code = b.load(VECTOR, b.at(self.running, I32, place))
            canonical = (code & ~sign_bit(fmt) > fmt.infinity).select(form.nan, code)
            code = general.convert_code(WORD, F16, code) if n.rounded_again else canonical
            of = code_type(form.d)
            b.masked_store(code if of == I32 else code.cast("trunc", of), b.at(self.d, of, memory), mask)
        b.finish()

    def _visit(self, memory: Value, change) -> None:  # type: ignore[no-untyped-def]
        """Replaces every code of a plane by change(code, place)."""
        b = self.b
        with b.loop(self.rows) as row, b.loop(self.padded, LANES) as column:
            place = row * self.block.columns + column
            b.store(change(b.load(VECTOR, b.at(memory, I32, place)), place), b.at(memory, I32, place))

    def _round_again(self) -> None:
        twice = lambda code: general.convert_code(F16, WORD, general.convert_code(WORD, F16, code))
        self._visit(self.running, lambda code, place: twice(code))

    def _add_chained(self, step: Value, steps: GeneralSteps) -> None:
        """A step of a chain, which begins at zero. An instruction whose result is rounded again ends a chain."""
        b, n = self.b, self.form.numbers
        per_instruction = self.form.steps_per_instruction
        in_instruction = step % per_instruction
        position, stop = (in_instruction, b.constant(I64, per_instruction)) if n.rounded_again else (step, self.step_count)
        add = lambda to, of: self._visit(
            to, lambda code, place: general.add_codes(self.form.result, code, b.load(VECTOR, b.at(of, I32, place)))
        )
        clear = lambda: self._visit(self.chain, lambda code, place: code ^ code)
        b.branch(position % n.chain == 0, clear, lambda: None)
        steps.add(step, self.chain)
        ends = ((position + 1) % n.chain == 0) | (position + 1 == stop)
        if not n.together:
            b.branch(ends, lambda: add(self.running, self.chain), lambda: None)
            return
        first = lambda: self._visit(self.chains, lambda code, place: b.load(VECTOR, b.at(self.chain, I32, place)))
        is_first = in_instruction < n.chain
        join = lambda: b.branch(is_first, first, lambda: add(self.chains, self.chain))
        b.branch(ends, join, lambda: None)
        b.branch(in_instruction + 1 == per_instruction, lambda: add(self.running, self.chains), lambda: None)
