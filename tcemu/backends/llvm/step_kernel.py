"""Fused steps as a CPU kernel in LLVM IR: the eight rules of `fused_dot_add`, on vectors of columns of D.

A task computes a block of D, ROWS x COLUMNS, for one matrix of the batch, step by step. In each step it decodes the operands of the block and
looks at their exponents. Then there are two ways to add:

- Bounded steps (see `arithmetic.bounded_steps`, which states what bounded operands are and why this is right): products are f32 values,
  multiplied by a power of two and truncated by the conversion to integers, or, for few fraction bits, added as floats that are rounded toward
  zero.
- Any steps: significands and exponents are integers, sums have 64 bits, and rule 8 is a sum of f32 in which Inf and NaN stand for themselves.

After a step of the second kind the accumulators are looked at again. So a special value or a subnormal costs the steps in which it is.
The bits of D do not depend on the choice, which is that of the block.

Nothing here depends on whether the machine flushes subnormals: floats are normal or zero wherever their value matters.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from operator import add
from typing import NamedTuple

from llvmlite import ir

from tcemu.arithmetic.bounded_steps import MAX_ACCUMULATOR, StepForm
from tcemu.arithmetic.fused_dot_add import products_fit_one_limb
from tcemu.arithmetic.multiplicands import ZERO_EXPONENT
from tcemu.backends.llvm.blocks import LANES, BlockForm, BlockKernel, count_tasks
from tcemu.backends.llvm.decoding import BIAS, FRACTION, decode, significand, value_word
from tcemu.backends.llvm.values import F32, I1, I8, I16, I32, I64, Value
from tcemu.formats import F32 as RESULT

ROWS, COLUMNS = 64, 128  # of a block of D: a step's part of B stays in the first-level cache
GROUP = 64  # columns whose max exponents are found together
SIGN = 1 << 31
TOWARD_ZERO = 11  # AVX-512's rounding operand: toward zero, without exceptions
FAR = 1 << 20  # a distance beyond every exponent


class KernelForm(NamedTuple):
    """What a kernel is compiled for."""

    step: StepForm
    block: int  # products along K that share a block scale; 0: there are none
    wide_registers: bool  # AVX-512 is there
    by_columns: bool = False  # see `BlockForm`

    name = "steps"

    def text(self) -> str:
        """LLVM IR of the kernel."""
        return kernel_text(self.name, self)

    @property
    def scaled(self) -> bool:
        return self.block > 0

    @property
    def terms(self) -> int:
        return self.step.terms

    @property
    def lane_type(self) -> ir.IntType:
        """The type of exponents while their max is found."""
        return I8 if self.step.is_narrow else I16

    @property
    def lane_biases(self) -> tuple[int, int]:
        """What is added to the exponents of A and B in lanes, so that a sum has the bias of f32. Narrow lanes have no sign."""
        return (BIAS + 1) // 2 if self.step.is_narrow else BIAS, BIAS // 2 if self.step.is_narrow else 0

    @property
    def lane_zero(self) -> int:
        """The exponent of a zero in lanes."""
        return 0 if self.step.is_narrow else -1 << 13

    @property
    def least(self) -> int:
        """The least exponent to which a bounded step is aligned, with the bias of f32. No sum with the exponent of a zero is above it."""
        if not self.step.is_narrow:
            return self.step.least + BIAS
        a, b = self.lane_biases
        return max(self.step.spec.a.max_exponent + a, self.step.spec.b.max_exponent + b)

    @property
    def adds_floats(self) -> bool:
        """True if the products of a step are added as floats, rounded toward zero: their sum fits the fraction of an f32."""
        return self.wide_registers and self.step.is_narrow and self.terms << (self.step.fraction_bits + 2) <= 1 << FRACTION


class Side:
    """One multiplicand's part in a step: where its codes are, and where it is put for the rows and columns of a block."""

    def __init__(self, kernel: StepKernel, is_row: bool) -> None:
        form, b = kernel.form, kernel.b
        spec = form.step.spec
        self.kernel, self.is_row = kernel, is_row
        self.format, self.other = (spec.a, spec.b) if is_row else (spec.b, spec.a)
        self.bias = form.lane_biases[0 if is_row else 1]
        self.width = kernel.block.largest_width(is_row)
        count = form.terms * (ROWS if is_row else COLUMNS)
        self.values = b.allocate(F32, 2 * count)  # where products are added as floats: B has two planes, A the plane of B for each value
        self.planes = b.allocate(I32, count)
        self.exponents = b.allocate(form.lane_type, count)
        # for any steps
        self.significands, self.numbers, self.classes = b.allocate(I32, count), b.allocate(I32, count), b.allocate(F32, count)
        vector = ir.VectorType(I32, self.width)
        self.low, self.high, self.special = b.allocate(vector), b.allocate(vector), b.allocate(vector)

    def clear_range(self) -> None:
        b, of = self.kernel.b, ir.VectorType(I32, self.width)
        for memory, start in ((self.low, FAR), (self.high, -FAR), (self.special, 0)):
            b.store(b.constant(of, start), memory)

    def prepare_bounded(self, step: Value) -> None:
        """Decodes the step's operands for bounded steps, and notes the range of their exponents."""
        b, form = self.kernel.b, self.kernel.form
        self.clear_range()

        def visit(codes: Value, scales: Value | None, place: Value) -> None:
            x = decode(self.format, codes)
            word, exponent, special = value_word(self.format, x), x.exponent - BIAS, x.special
            if scales is not None:
                of_scale = scales - BIAS
                exponent = exponent + of_scale
                word = x.zero.select(0, word + (of_scale << FRACTION))
                special = scales == 0xFF if special is None else special | (scales == 0xFF)
            elif self.format.specials == "fnuz":
                word = x.zero.select(0, word)
            if form.adds_floats:
                negative = codes - codes if x.negative is None else x.negative
                if self.is_row:
                    b.store(negative & (form.terms * COLUMNS), b.at(self.planes, I32, place))
                else:
                    b.store((word & negative).as_float(), b.at(self.values, F32, place + form.terms * COLUMNS))
                    word = word & ~negative
            elif x.negative is not None:
                word = word | (x.negative & -SIGN)
            b.store(word.as_float(), b.at(self.values, F32, place))
            lane = x.zero.select(form.lane_zero, exponent + self.bias)
            if special is not None:
                lane = special.select(form.lane_zero, lane)
            b.store(lane.cast("trunc", form.lane_type), b.at(self.exponents, form.lane_type, place))
            of = codes.type
            if not form.step.is_narrow:
                low = b.minimum(b.load(of, self.low), x.zero.select(FAR, exponent))
                b.store(low, self.low)
                b.store(b.maximum(b.load(of, self.high), x.zero.select(-FAR, exponent)), self.high)
            if special is not None:
                b.store(b.load(of, self.special) | special.cast("sext", I32), self.special)

        self.kernel.visit_codes(self.is_row, step, visit)

    def prepare_any(self, step: Value) -> None:
        """Decodes the step's operands for any steps."""
        b = self.kernel.b

        def visit(codes: Value, scales: Value | None, place: Value) -> None:
            x = decode(self.format, codes)
            number, exponent = significand(self.format, x), x.exponent - BIAS
            never = codes != codes
            special = never if x.special is None else x.special
            infinite = never if x.infinite is None else x.infinite
            if scales is not None:
                exponent = exponent + scales - BIAS
                special, infinite = special | (scales == 0xFF), infinite & (scales != 0xFF)
            gone = x.zero | special
            number = gone.select(0, number)
            sign = codes - codes if x.negative is None else x.negative
            b.store((number ^ sign) - sign, b.at(self.significands, I32, place))
            b.store(gone.select(ZERO_EXPONENT, exponent), b.at(self.numbers, I32, place))
            one, infinity, nan = (codes - codes + word for word in (BIAS << FRACTION, RESULT.infinity, RESULT.nan))
            word = special.select(infinite.select(infinity, nan), x.zero.select(0, one)) | (sign & -SIGN)
            b.store(word.as_float(), b.at(self.classes, F32, place))

        self.kernel.visit_codes(self.is_row, step, visit)


class StepKernel(BlockKernel):
    """The function of one task."""

    def __init__(self, module: ir.Module, name: str, form: KernelForm) -> None:
        spec = form.step.spec
        super().__init__(
            module, name, BlockForm(ROWS, COLUMNS, GROUP, spec.a, spec.b, RESULT, RESULT, form.terms, form.block, form.by_columns)
        )
        self.form, b = form, self.b
        self.accumulators = b.allocate(I32, ROWS * COLUMNS)
        self.tops = b.allocate(form.lane_type, COLUMNS)
        self.are_bounded = b.allocate(I1)
        self.unbounded_lanes = b.allocate(ir.VectorType(I32, LANES))
        self.x, self.y = Side(self, True), Side(self, False)
        self._build()

    def _build(self) -> None:
        b = self.b
        of = ir.VectorType(I32, LANES)
        for place, memory, mask in self.elements():
            b.store(b.masked_load(of, b.at(self.c, I32, memory), mask), b.at(self.accumulators, I32, place))
        self._look_at_accumulators()
        with b.loop(self.step_count) as step:
            self.x.prepare_bounded(step)
            self.y.prepare_bounded(step)
            b.branch(self._is_bounded(), self._add_bounded, lambda: self._add_any(step))
        for place, memory, mask in self.elements():
            b.masked_store(b.load(of, b.at(self.accumulators, I32, place)), b.at(self.d, I32, memory), mask)
        b.finish()

    def _look_at_accumulators(self) -> None:
        """Notes whether all accumulators are such as bounded steps take."""
        b, of = self.b, ir.VectorType(I32, LANES)
        b.store(b.constant(of, 0), self.unbounded_lanes)
        with b.loop(self.rows) as row, b.loop(self.padded, LANES) as column:
            magnitude = b.load(of, b.at(self.accumulators, I32, row * COLUMNS + column)) & (SIGN - 1)
            field = magnitude >> FRACTION
            unusual = (magnitude != 0) & ((field < self.form.least) | (field > MAX_ACCUMULATOR + BIAS))
            b.store(b.load(of, self.unbounded_lanes) | unusual.cast("sext", I32), self.unbounded_lanes)
        b.store(b.load(of, self.unbounded_lanes).reduce("or") == 0, self.are_bounded)

    def _is_bounded(self) -> Value:
        """Whether this step's operands and the accumulators are bounded."""
        b, form = self.b, self.form.step
        bounded = b.load(I1, self.are_bounded)
        for side in (self.x, self.y):
            of = ir.VectorType(I32, side.width)
            bounded = bounded & (b.load(of, side.special).reduce("or") == 0)
        if form.is_narrow:
            return bounded
        (x_low, x_high), (y_low, y_high) = (
            (b.load(of, side.low).reduce("smin"), b.load(of, side.high).reduce("smax"))
            for side in (self.x, self.y)
            for of in [ir.VectorType(I32, side.width)]
        )
        a, c = form.spec.a, form.spec.b
        # the products of all steps stay below 2^(most + 2 + bits of their number)
        bits = 64 - b.call("llvm.ctlz.i64", I64, self.k, b.constant(I1, 0))
        most = (MAX_ACCUMULATOR - 1) - bits.cast("trunc", I32)
        normal = (x_low >= RESULT.min_exponent + a.mantissa_bits) & (y_low >= RESULT.min_exponent + c.mantissa_bits)
        return bounded & normal & (x_low + y_low >= form.least) & (x_high + y_high <= most)

    # ---- bounded steps

    def _add_bounded(self) -> None:
        b, form = self.b, self.form
        groups = ir.VectorType(form.lane_type, GROUP)
        with b.loop(self.rows) as row:
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
        units = []
        for code, column in zip(codes, columns, strict=True):
            top = b.load(ir.VectorType(form.lane_type, LANES), b.at(self.tops, form.lane_type, column))
            top = b.maximum(top.cast("zext" if form.step.is_narrow else "sext", I32), (code >> FRACTION) & 0xFF)
            if not form.step.is_narrow:
                top = b.maximum(top, b.constant(of, form.least))
            units.append((top - form.step.fraction_bits) << FRACTION)
        scales = [(((2 * BIAS) << FRACTION) - unit).as_float() for unit in units]
        add_up = self._add_floats if form.adds_floats else self._truncate_products
        sums = add_up(first, columns, units, scales)
        for place, code, unit, scale, products in zip(places, codes, units, scales, sums, strict=True):
            addends = [*products, (code.as_float() * scale).cast("fptosi", I32)]
            b.store(self._round(addends, unit), place)

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

    def _truncate_products(self, first: Value, columns: list[Value], units: list[Value], scales: list[Value]) -> list[list[Value]]:
        """Rules 4 and 5: for each vector, sums that fit an s32, of products truncated to integer multiples of the unit."""
        form, sums = self.form.step, []
        for column, scale in zip(columns, scales, strict=True):
            integers = [(x * y * scale).cast("fptosi", I32) for x, y in self._pairs("values", F32, first, column)]
            if products_fit_one_limb(form.model, form.spec, form.terms):
                sums.append([reduce(add, integers)])
            else:
                half = -(-form.terms // 2)
                sums.append([reduce(add, integers[:half]), reduce(add, integers[half:])])
        return sums

    def _add_floats(self, first: Value, columns: list[Value], units: list[Value], scales: list[Value]) -> list[list[Value]]:
        """As `_truncate_products`, for products of few bits: two sums of floats, of the positive and of the negative products.

        A sum begins at 2^FRACTION units, and its last place is the unit while it is below twice that. So a magnitude that is added, rounded
        toward zero, is truncated to the unit. B has its positive values in one plane and its negative ones in another, with zeros between
        them, and a negative value of A exchanges the planes.
        """
        b, terms = self.b, self.form.terms
        rounding = b.constant(I32, TOWARD_ZERO)
        start = [(unit + (FRACTION << FRACTION)).as_float() for unit in units]
        positive, negative = list(start), list(start)
        for term in range(terms):
            x = b.splat(b.load(F32, b.at(self.x.values, F32, first + term)), LANES)
            plane = b.load(I32, b.at(self.x.planes, I32, first + term)).cast("zext", I64)
            for at, column in enumerate(columns):
                place = column + term * COLUMNS
                for sums, start_of in ((positive, plane + place), (negative, place + terms * COLUMNS - plane)):
                    y = b.load(x.type, b.at(self.y.values, F32, start_of))
                    sums[at] = b.call("llvm.x86.avx512.vfmadd.ps.512", x.type, x, y, sums[at], rounding)
        return [[p.bits() - n.bits()] for p, n in zip(positive, negative, strict=True)]

    def _round(self, addends: list[Value], unit: Value) -> Value:
        """Rule 6: the sum of the addends, truncated to an f32 without the bits that the result does not keep. unit: code of the power."""
        b, form = self.b, self.form.step
        rounding = b.constant(I32, TOWARD_ZERO)
        largest = (1 << (form.fraction_bits + 2)) * form.terms + (1 << (form.fraction_bits + 1))
        if len(addends) == 2 and largest < 1 << 31:
            total = reduce(add, addends)
            if self.form.wide_registers:
                raw = b.call("llvm.x86.avx512.sitofp.round.v16f32.v16i32", addends[0]._shaped(F32), total, rounding)
                return self._cut((raw * unit.as_float()).bits(), total)
            negative = total.shift_right_signed(31)
            magnitude = (total ^ negative) - negative
        elif len(addends) == 2:
            x, y = addends
            total = x + y
            same_sign = ~(x ^ y)  # of two addends of one sign, the sum has that sign even where it wraps
            negative = ((x & same_sign) | (total & ~same_sign)).shift_right_signed(31)
            magnitude = (total ^ negative) - negative
        else:
            wide = reduce(add, (v.cast("sext", I64) for v in addends))
            sign = wide.shift_right_signed(63)
            size = (wide ^ sign) - sign
            negative = sign.cast("trunc", I32)
            large = size > 0xFFFFFFFF  # the lowest bits of such a sum are not kept
            magnitude = large.select(size >> 8, size).cast("trunc", I32)
            unit = unit + (large.cast("zext", I32) << (FRACTION + 3))
        if self.form.wide_registers:
            raw = b.call("llvm.x86.avx512.uitofp.round.v16f32.v16i32", magnitude._shaped(F32), magnitude, rounding)
        else:  # without the bits that cannot be kept, the conversion truncates: see `fused_dot_add`
            raw = (magnitude & ~(magnitude >> (FRACTION + 1))).cast("uitofp", F32)
        code = (raw * unit.as_float()).bits()
        return self._cut(code | (negative & -SIGN), magnitude)

    def _cut(self, code: Value, total: Value) -> Value:
        """Without the fraction bits that the result does not keep."""
        kept = self.form.step.model.result_bits
        return code if kept is None else code & (-1 << (FRACTION - kept))

    # ---- any steps

    def _add_any(self, step: Value) -> None:
        b, form = self.b, self.form
        self.x.prepare_any(step)
        self.y.prepare_any(step)
        with b.loop(self.rows) as row:
            first = row * form.terms
            with b.loop(self.padded, LANES) as column:
                self._add_any_vector(row, first, column)
        self._look_at_accumulators()

    def _add_any_vector(self, row: Value, first: Value, column: Value) -> None:
        b, form = self.b, self.form.step
        of = ir.VectorType(I32, LANES)
        place = b.at(self.accumulators, I32, row * COLUMNS + column)
        code = b.load(of, place)
        magnitude, negative = code & (SIGN - 1), code.shift_right_signed(31)
        field = magnitude >> FRACTION
        subnormal = field == 0
        takes_part = (magnitude != 0) & (field != 0xFF)
        exponent = takes_part.select(subnormal.select(1, field) - BIAS, ZERO_EXPONENT)
        # rule 3
        exponents = [x + y for x, y in self._pairs("numbers", I32, first, column)]
        assert isinstance(form.model.floor, int)
        top = reduce(b.maximum, exponents, b.maximum(exponent, b.constant(of, form.model.floor)))
        # rules 4 and 5
        bits, product_bits = form.fraction_bits, form.spec.a.mantissa_bits + form.spec.b.mantissa_bits
        total = self._aligned(magnitude & ((1 << FRACTION) - 1) | subnormal.select(0, magnitude - magnitude + (1 << FRACTION)),
                              negative, FRACTION, bits, top - exponent, takes_part)  # fmt: skip
        classes = self._class_of(code)
        for (x, y), one, (p, q) in zip(
            self._pairs("significands", I32, first, column), exponents, self._pairs("classes", F32, first, column), strict=True
        ):
            product = x * y
            sign = product.shift_right_signed(31)
            total = total + self._aligned((product ^ sign) - sign, sign, product_bits, bits, top - one, product != 0)
            classes = classes + p * q
        # rules 6, 7 and 8
        word = self._encode(total, top - bits)
        special = classes.bits()
        size = special & (SIGN - 1)
        nan = form.model.nan if isinstance(form.model.nan, int) else RESULT.nan
        word = (size == RESULT.infinity).select(special, word)
        b.store((size > RESULT.infinity).select(nan, word), place)

    def _class_of(self, code: Value) -> Value:
        """f32: Inf and NaN themselves, and 0 for numbers."""
        return ((code & RESULT.infinity) == RESULT.infinity).select(code, 0).as_float()

    def _aligned(self, size: Value, sign: Value, stored: int, kept: int, distance: Value, takes_part: Value) -> Value:
        """A term of `stored` fraction bits, truncated to `kept` below an exponent that is `distance` above its own; i64, with its sign."""
        wide = size.cast("zext", I64) << max(kept - stored, 0)
        far = distance + max(stored - kept, 0)
        shift = ((far > 63) | ~takes_part).select(63, far)
        wide = wide >> shift.cast("zext", I64)
        sign = sign.cast("sext", I64)
        return (wide ^ sign) - sign

    def _encode(self, total: Value, unit: Value) -> Value:
        """The f32 code of total * 2^unit, truncated."""
        b = self.b
        sign = total.shift_right_signed(63)
        size = (total ^ sign) - sign
        kept = self.form.step.model.result_bits
        kept = FRACTION if kept is None else kept
        zeros = b.call(f"llvm.ctlz.{b.suffix(size.type)}", size.type, size, b.constant(I1, 0)).cast("trunc", I32)
        leading = 63 - zeros + unit  # exponent of the leading bit
        last = b.maximum(leading - kept, b.constant(leading.type, RESULT.min_exponent - kept))  # of the last bit kept
        down = (last - unit).cast("sext", I64)
        up = 0 - down
        shifted = (down > 0).select(size >> b.minimum(b.maximum(down, down - down), down - down + 63),
                                    size << b.minimum(b.maximum(up, up - up), up - up + 63))  # fmt: skip
        word = (shifted.cast("trunc", I32) << (FRACTION - kept)) + ((last + (kept + BIAS - 1)) << FRACTION)
        word = (leading > RESULT.max_exponent).select(RESULT.infinity, word)
        word = word | (sign.cast("trunc", I32) & -SIGN)
        return ((size == 0).cast("sext", I32) | (shifted == 0).cast("sext", I32) != 0).select(0, word)


@lru_cache(maxsize=256)
def kernel_text(name: str, form: KernelForm) -> str:
    """LLVM IR of the functions NAME_tasks and NAME_task: see `xla_call` and `blocks`."""
    module = ir.Module(name)
    count_tasks(module, name, ROWS, COLUMNS)
    StepKernel(module, name, form)
    return str(module)
