"""Fused steps as a CPU kernel in LLVM IR: the eight rules of `fused_dot_add`, on vectors of columns of D.

A task computes a block of D, ROWS x COLUMNS, for one matrix of the batch, step by step. In each step it decodes the operands of the
block and looks at their exponents. Then there are two ways to add:

- Bounded steps (see `arithmetic.step.bounded`, which states what bounded operands are and why this is right): products are f32 values,
  multiplied by a power of two and truncated by the conversion to integers, or, for few fraction bits, added as floats that are rounded
  toward zero.
- Any steps: a row of A or a column of B with an Inf or a NaN makes all its elements of D special. These are sums of f32 in which Inf and
  NaN stand for themselves. The other elements of narrow formats are those of bounded steps, but for accumulators that no product reaches.
  For wide formats each product of two fractions is multiplied by its own power of two, and the sum is encoded with all rules.

After a step of the second kind the accumulators are looked at again. So a special value or a subnormal costs the steps in which it is.
The bits of D do not depend on the choice, which is that of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llvmlite import ir

from tcemu.engine.arithmetic.step import bounded, specials
from tcemu.engine.arithmetic.step.decoding import BIAS, FRACTION, decode, decode_factor, value_word, with_sign_bit
from tcemu.engine.arithmetic.step.forms import factors_are_bounded
from tcemu.engine.backends.llvm.blocks import FAR, LANES, BlockForm, BlockKernel, BlockSide
from tcemu.engine.backends.llvm.bounded_lanes import KernelForm, LaneSteps
from tcemu.engine.backends.llvm.values import F32, I1, I32, I64, Value
from tcemu.engine.formats.number_formats import F32 as RESULT

ROWS, COLUMNS = 64, 128  # of a block of D: a step's part of B stays in the first-level cache
GROUP = 64  # columns whose max exponents are found together


class Side(BlockSide):
    """One multiplicand's part in a step: where its codes are, and where it is put for the rows and columns of a block."""

    def __init__(self, kernel: StepKernel, is_row: bool) -> None:
        form, b = kernel.form, kernel.b
        super().__init__(kernel, is_row, form.step.a if is_row else form.step.b, kernel.block.largest_width(is_row))
        self.form, self.bias = form, form.lane_biases[0 if is_row else 1]
        count = form.terms * (ROWS if is_row else COLUMNS)
        self.values = b.allocate(F32, 2 * count)  # where products are added as floats: B has two planes, A the plane of B for each value
        self.planes = b.allocate(I32, count)
        self.exponents = b.allocate(form.lane_type, count)
        # for any steps
        self.fractions = b.allocate(F32, count)
        self.numbers = b.allocate(I32, 1 if form.step.is_narrow else count)  # exponents of wide formats
        self.specials = b.allocate(I32, ROWS if is_row else COLUMNS)  # not 0 for a row or a column with an Inf or a NaN

    def prepare_bounded(self, step: Value) -> None:
        """Decodes the step's operands for bounded steps, and notes the range of the exponents of those that are not zero."""
        b, form = self.b, self.form
        self.clear_range()

        def visit(codes: Value, scales: Value | None, place: Value) -> None:
            x = decode(self.format, codes)
            word, exponent, special = value_word(self.format, x), x.exponent - BIAS, x.special
            if scales is not None:
                of_scale = scales - BIAS
                exponent = exponent + of_scale
                word = x.zero.select(0, word + (of_scale << FRACTION))
                special = scales == 0xFF if special is None else special | (scales == 0xFF)
            if form.adds_floats:
                negative = codes.constant(0) if x.negative is None else x.negative
                if self.is_row:
                    b.store(negative & (form.terms * COLUMNS), b.at(self.planes, I32, place))
                else:
                    b.store((word & negative).as_float(), b.at(self.values, F32, place + form.terms * COLUMNS))
                    word = word & ~negative
            else:
                word = with_sign_bit(word, x.negative)
            b.store(word.as_float(), b.at(self.values, F32, place))
            lane = x.zero.select(form.lane_zero, exponent + self.bias)
            if special is not None:
                lane = special.select(form.lane_zero, lane)
            b.store(lane.cast("trunc", form.lane_type), b.at(self.exponents, form.lane_type, place))
            if not form.step.is_narrow:
                self.note_exponents(x.zero.select(FAR, exponent), x.zero.select(-FAR, exponent))
            if special is not None:
                self.note_special(special)

        self.kernel.visit_codes(self.is_row, step, visit)

    def prepare_any(self, step: Value) -> None:
        """Decodes the step's operands for any steps."""
        b, form = self.b, self.form
        zeros = b.constant(ir.VectorType(I32, LANES), 0)
        for place in range(0, ROWS if self.is_row else COLUMNS, LANES):
            b.store(zeros, b.at(self.specials, I32, place))

        def visit(codes: Value, scales: Value | None, place: Value) -> None:
            x = decode_factor(self.format, codes, scales)
            b.store(x.fraction, b.at(self.fractions, F32, place))
            if not form.step.is_narrow:
                b.store(x.exponent, b.at(self.numbers, I32, place))
            noted = x.special.cast("sext", I32)
            if self.is_row:
                where = b.at(self.specials, I32, place // form.terms)
                b.store(b.load(I32, where) | noted.reduce("or"), where)
            else:
                where = b.at(self.specials, I32, place % COLUMNS)
                b.store(b.load(noted.type, where) | noted, where)

        self.kernel.visit_codes(self.is_row, step, visit)


class StepKernel(BlockKernel, LaneSteps):
    def __init__(self, module: ir.Module, name: str, form: KernelForm) -> None:
        block = BlockForm(ROWS, COLUMNS, GROUP, form.step.a, form.step.b, RESULT, RESULT, form.terms, form.block, form.by_columns)
        BlockKernel.__init__(self, module, name, block, form.wide_registers)
        LaneSteps.__init__(self, form, self.b)
        b = self.b
        self.accumulators = b.allocate(I32, ROWS * COLUMNS)
        self.tops = b.allocate(form.lane_type, COLUMNS)
        self.are_bounded = b.allocate(I1)
        self.unbounded_lanes = b.allocate(ir.VectorType(I32, LANES))
        self.is_bounded_step, self.special_columns = b.allocate(I1), b.allocate(I1)
        self.special_words, self.set_aside = b.allocate(I32, COLUMNS), b.allocate(I32, COLUMNS)  # of a row
        self.x, self.y = Side(self, True), Side(self, False)
        self._build()

    def _build(self) -> None:
        b, form = self.b, self.form.step
        of = ir.VectorType(I32, LANES)
        for place, memory, mask in self.elements():
            b.store(b.masked_load(of, b.at(self.c, I32, memory), mask), b.at(self.accumulators, I32, place))
        self._note_accumulators()
        with b.loop(self.step_count) as step:
            self.x.prepare_bounded(step)
            self.y.prepare_bounded(step)
            is_bounded = self.sides_are_bounded((self.x, self.y), form.is_narrow, partial(factors_are_bounded, form))
            b.store(is_bounded, self.is_bounded_step)
            self._unless_bounded(lambda: self._prepare_any(step))
            with b.loop(self.rows) as row:
                self._add_row(row)
            self._unless_bounded(self._note_accumulators)
        for place, memory, mask in self.elements():
            b.masked_store(b.load(of, b.at(self.accumulators, I32, place)), b.at(self.d, I32, memory), mask)
        b.finish()

    def _note_accumulators(self) -> None:
        self.note_bounded_accumulators(self.form.least - BIAS, self.form.step.most)

    def _unless_bounded(self, execute: Callable[[], None]) -> None:
        b = self.b
        b.branch(b.load(I1, self.is_bounded_step), lambda: None, execute)

    # ---- bounded steps

    def _add_bounded_row(self, row: Value) -> None:
        """Computes a step for a row whose products and accumulators are bounded."""
        b, form = self.b, self.form
        groups = ir.VectorType(form.lane_type, GROUP)
        first = row * form.terms
        with b.loop(self.padded, GROUP) as column:
            start = form.least if form.step.is_narrow else form.lane_zero
            top = b.constant(groups, start)
            for term in range(form.terms):
                x = b.splat(b.load(form.lane_type, b.at(self.x.exponents, form.lane_type, first + term)), GROUP)
                y = b.load(groups, b.at(self.y.exponents, form.lane_type, column + term * COLUMNS))
                top = b.maximum(top, x + y, signed=not form.step.is_narrow)
            b.store(top, b.at(self.tops, form.lane_type, column))
        neighbours = GROUP if form.adds_floats else LANES
        with b.loop(self.columns, neighbours) as column:
            self._add_bounded_vectors(row, first, [column + at for at in range(0, neighbours, LANES)])

    def _add_bounded_vectors(self, row: Value, first: Value, columns: list[Value]) -> None:
        """Computes a step for vectors of columns, side by side."""
        b, form = self.b, self.form
        of = ir.VectorType(I32, LANES)
        places = [b.at(self.accumulators, I32, row * COLUMNS + column) for column in columns]
        codes = [b.load(of, place) for place in places]
        tops = [b.load(ir.VectorType(form.lane_type, LANES), b.at(self.tops, form.lane_type, column)) for column in columns]
        alignments = [self.align(code, top) for code, top in zip(codes, tops, strict=True)]
        add_up = self._add_floats if form.adds_floats else self._truncate_products
        sums = add_up(first, columns, alignments)
        for place, code, alignment, products in zip(places, codes, alignments, sums, strict=True):
            own = bounded.truncate_by_conversion(code.as_float(), alignment.scale)
            b.store(self.round([*products, own], alignment.unit), place)

    def _operands(self, side: Side, memory: str, of: ir.Type, first: Value, column: Value, term: int) -> Value:
        b = self.b
        if side is self.x:
            return b.splat(b.load(of, b.at(getattr(side, memory), of, first + term)), LANES)
        return b.load(ir.VectorType(of, LANES), b.at(getattr(side, memory), of, column + term * COLUMNS))

    def _pairs(self, memory: str, of: ir.Type, first: Value, column: Value) -> list[tuple[Value, Value]]:
        """The factors of every product of a step, for a row and a vector of columns."""
        return [
            (self._operands(self.x, memory, of, first, column, term), self._operands(self.y, memory, of, first, column, term))
            for term in range(self.form.terms)
        ]

    def _truncate_products(self, first: Value, columns: list[Value], alignments: Sequence[bounded.Alignment]) -> list[list[Value]]:
        """Rules 4 and 5: for each vector, sums that fit an i32, of products truncated to integer multiples of the unit."""
        sums = []
        for column, alignment in zip(columns, alignments, strict=True):
            pairs = self._pairs("values", F32, first, column)
            terms = [bounded.truncate_by_conversion(x * y, alignment.scale) for x, y in pairs]
            sums.append(bounded.add_terms(terms, self.form.step.sums))
        return sums

    def _add_floats(self, first: Value, columns: list[Value], alignments: Sequence[bounded.Alignment]) -> list[list[Value]]:
        """As `_truncate_products`, for products of few bits: two sums of floats, of the positive and of the negative products.

        B has its positive values in one plane and its negative ones in another, with zeros between them, and a negative value of A
        exchanges the planes.
        """
        b, terms = self.b, self.form.terms
        start = [bounded.float_sum_start(alignment.unit) for alignment in alignments]
        positive, negative = list(start), list(start)
        for term in range(terms):
            x = b.splat(b.load(F32, b.at(self.x.values, F32, first + term)), LANES)
            plane = b.load(I32, b.at(self.x.planes, I32, first + term)).cast("zext", I64)
            for at, column in enumerate(columns):
                place = column + term * COLUMNS
                for sums, start_of in ((positive, plane + place), (negative, place + terms * COLUMNS - plane)):
                    sums[at] = bounded.add_truncated(sums[at], x, b.load(x.type, b.at(self.y.values, F32, start_of)))
        return [[bounded.float_sums_difference(p, n)] for p, n in zip(positive, negative, strict=True)]

    # ---- any steps

    def _prepare_any(self, step: Value) -> None:
        b = self.b
        self.x.prepare_any(step)
        self.y.prepare_any(step)
        found = b.constant(ir.VectorType(I32, LANES), 0)
        for column in range(0, COLUMNS, LANES):
            found = found | b.load(found.type, b.at(self.y.specials, I32, column))
        b.store(found.reduce("or") != 0, self.special_columns)

    def _add_row(self, row: Value) -> None:
        b = self.b
        unbounded = ~b.load(I1, self.is_bounded_step)
        b.branch(
            unbounded & (b.load(I32, b.at(self.x.specials, I32, row)) != 0),
            lambda: self._find_special_words(row, self.accumulators, row * COLUMNS),
            lambda: self._add_numbers(row, unbounded),
        )

    def _add_numbers(self, row: Value, unbounded: Value) -> None:
        """Computes a step for a row of A without Inf and NaN."""
        b = self.b
        special = unbounded & b.load(I1, self.special_columns)
        b.branch(special, lambda: self._find_special_words(row, self.special_words, b.constant(I64, 0)), lambda: None)
        if self.form.step.is_narrow:
            b.branch(unbounded, lambda: self._set_aside(row), lambda: None)
            self._add_bounded_row(row)
            b.branch(unbounded, lambda: self._select_unreached(row), lambda: None)
        else:
            b.branch(unbounded, lambda: self._add_any_row(row), lambda: self._add_bounded_row(row))
        b.branch(special, lambda: self._replace_specials(row), lambda: None)

    def _set_aside(self, row: Value) -> None:
        """Replaces the accumulators of a row that bounded steps do not take."""
        b, of = self.b, ir.VectorType(I32, LANES)
        with b.loop(self.padded, LANES) as column:
            place = b.at(self.accumulators, I32, row * COLUMNS + column)
            code = b.load(of, place)
            b.store(code, b.at(self.set_aside, I32, column))
            b.store(bounded.usable_accumulator(code, self.form.step.most), place)

    def _select_unreached(self, row: Value) -> None:
        """Replaces the results of a row that are those of accumulators alone."""
        b, of = self.b, ir.VectorType(I32, LANES)
        with b.loop(self.padded, LANES) as column:
            place = b.at(self.accumulators, I32, row * COLUMNS + column)
            top = b.load(ir.VectorType(self.form.lane_type, LANES), b.at(self.tops, self.form.lane_type, column))
            code, word = b.load(of, b.at(self.set_aside, I32, column)), b.load(of, place)
            b.store(self.select_unreached(code, word, top, self.form.step.nan), place)

    def _find_special_words(self, row: Value, memory: Value, start: Value) -> None:
        """Rule 8, for elements of D of special rows or columns: the sum of f32 in which Inf and NaN stand for themselves."""
        b, of = self.b, ir.VectorType(I32, LANES)
        with b.loop(self.padded, LANES) as column:
            code = b.load(of, b.at(self.accumulators, I32, row * COLUMNS + column))
            products = [x * y for x, y in self._pairs("fractions", F32, row * self.form.terms, column)]
            total = specials.add_specials(code, products)
            b.store(specials.special_code(total, self.form.step.nan), b.at(memory, I32, start + column))

    def _replace_specials(self, row: Value) -> None:
        """Replaces results in the columns of B that have an Inf or a NaN."""
        b, of = self.b, ir.VectorType(I32, LANES)
        with b.loop(self.padded, LANES) as column:
            place = b.at(self.accumulators, I32, row * COLUMNS + column)
            special = b.load(of, b.at(self.y.specials, I32, column)) != 0
            b.store(special.select(b.load(of, b.at(self.special_words, I32, column)), b.load(of, place)), place)

    def _add_any_row(self, row: Value) -> None:
        b, of = self.b, ir.VectorType(I32, LANES)
        with b.loop(self.padded, LANES) as column:
            place = b.at(self.accumulators, I32, row * COLUMNS + column)
            products = self._fraction_pairs(row * self.form.terms, column)
            b.store(self.add_any_vector(products, b.load(of, place), self.form.step.nan), place)

    def _fraction_pairs(self, first: Value, column: Value) -> list[tuple[Value, Value]]:
        fractions, numbers = self._pairs("fractions", F32, first, column), self._pairs("numbers", I32, first, column)
        return [(x * y, p + q) for (x, y), (p, q) in zip(fractions, numbers, strict=True)]
