"""Fused steps of any numbers as a CPU kernel in LLVM IR: the eight rules of `fused_dot_add` in integers, on vectors of columns of D.

It takes every `Model` of fused steps whose fields are known before tracing: any rounding and alignment, results in f16, sums of groups of
products, chains, and results that each instruction rounds once more. Significands and exponents are integers and sums have 64 bits.

Rule 8 is applied before a step: an accumulator becomes Inf or NaN where the products give one, and then stays so (see `absorb_specials`).
Only steps with an Inf or NaN among their operands need that. It adds floats of which none is subnormal.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from llvmlite import ir

from tcemu.arithmetic.multiplicands import ZERO_EXPONENT
from tcemu.backends.cuda.kernel_text import KernelNumbers
from tcemu.backends.llvm.blocks import LANES, BlockForm, BlockKernel, code_type, count_tasks
from tcemu.backends.llvm.decoding import BIAS, FRACTION, decode, extend, significand
from tcemu.backends.llvm.values import F32, I1, I32, I64, Builder, Value
from tcemu.formats import F16, Format
from tcemu.formats import F32 as WORD

PLACES = 1 << 13  # of a block, rows or columns times the products of a step
MOST_LINES = 64  # rows or columns of a block
VECTOR = ir.VectorType(I32, LANES)


class GeneralForm(NamedTuple):
    """What a kernel is compiled for."""

    numbers: KernelNumbers
    a: Format
    b: Format
    scale: Format | None
    result: Format
    d: Format
    block: int  # products along K that share a block scale; 0: there are none
    nan: int  # code of every NaN of D

    @property
    def lines(self) -> int:
        """Rows and columns of a block."""
        return max(LANES, min(MOST_LINES, PLACES // self.numbers.terms // LANES * LANES))

    @property
    def steps_per_instruction(self) -> int:
        n = self.numbers
        return n.groups * -(-n.of_group // n.terms)

    def of_block(self, lines: tuple[int, int], group: int) -> BlockForm:
        return BlockForm(*lines, group, self.a, self.b, self.result, self.d, self.numbers.terms, self.block)


# ---- codes


def field_of(fmt: Format, code: Value) -> Value:
    """The exponent field of a code."""
    return (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)


def sign_of(fmt: Format, code: Value) -> Value:
    """-1 for negative codes, else 0."""
    return (code << (32 - fmt.bits)).shift_right_signed(31)


def sign_bit(fmt: Format) -> int:
    """The sign bit, as a signed number of 32 bits."""
    return -(1 << 31) if fmt.bits == 32 else 1 << (fmt.bits - 1)


class Accumulator(NamedTuple):
    """A code of a result taken apart, as rule 2 counts: integers of 32 bits."""

    significand: Value  # without sign; 0 for Inf and NaN
    negative: Value  # -1 or 0
    exponent: Value  # ZERO_EXPONENT for what takes no part
    special: Value  # condition: Inf or NaN


def decode_accumulator(fmt: Format, code: Value) -> Accumulator:
    field, fraction = field_of(fmt, code), code & ((1 << fmt.mantissa_bits) - 1)
    special = field == (1 << fmt.exponent_bits) - 1
    size = special.select(0, (field == 0).select(fraction, fraction | (1 << fmt.mantissa_bits)))
    exponent = (field == 0).select(1, field) - fmt.bias
    return Accumulator(size, sign_of(fmt, code), (size == 0).select(ZERO_EXPONENT, exponent), special)


def class_of(fmt: Format, code: Value) -> Value:
    """f32: Inf and NaN themselves, and 0 for numbers."""
    special = field_of(fmt, code) == (1 << fmt.exponent_bits) - 1
    infinite = code & ((1 << fmt.mantissa_bits) - 1) == 0
    word = infinite.select(code - code + WORD.infinity, WORD.nan) | (sign_of(fmt, code) & sign_bit(WORD))
    return special.select(word, 0).as_float()


def code_of_class(fmt: Format, total: Value, otherwise: Value) -> Value:
    """The code of a sum of classes where it is Inf or NaN, else another code."""
    word = total.bits()
    size, negative = word & ~sign_bit(WORD), word.shift_right_signed(31)
    code = (size == WORD.infinity).select((negative & sign_bit(fmt)) | fmt.infinity, otherwise)
    return (size > WORD.infinity).select(fmt.nan, code)


def with_sign(size: Value, sign: Value) -> Value:
    """sign: -1 where the number is negative, else 0."""
    return (size ^ sign) - sign


def round_integer(size: Value, drop: Value, negative: Value, rounding: str) -> Value:
    """size / 2^drop, rounded to an integer: i64 below 2^62, drop from 0 to 63. negative: -1 or 0, i64."""
    whole = size >> drop
    if rounding == "RZ":
        return whole
    rest = size - (whole << drop)
    if rounding == "RN":
        half = ((drop - drop + 1) << drop) >> 1  # 0 where nothing is dropped
        up = (rest > half) | ((rest == half) & (whole & 1 != 0) & (drop > 0))
    else:
        up = (rest != 0) & ((negative != 0) if rounding == "RM" else (negative == 0))
    return whole + up.cast("zext", I64)


def encode(b: Builder, fmt: Format, total: Value, unit: Value, rounding: str, kept: int) -> Value:
    """Rules 6 and 7: the code of total * 2^unit, rounded to `kept` fraction bits; +0 for every zero. total: i64; unit: i32."""
    sign = total.shift_right_signed(63)
    size = with_sign(total, sign)
    zeros = b.call(f"llvm.ctlz.{b.suffix(size.type)}", size.type, size, b.constant(I1, 0))
    leading = 63 - zeros.cast("trunc", I32) + unit  # exponent of the leading bit
    shifted = size << (zeros & 63)
    jammed = (shifted >> 2) | (shifted & 3 != 0).cast("zext", I64)  # the leading bit is bit 61
    below = b.maximum(fmt.min_exponent - leading, b.constant(unit.type, 0))
    drop = b.minimum(below + (61 - kept), b.constant(unit.type, 63))
    whole = round_integer(jammed, drop.cast("zext", I64), sign, rounding).cast("trunc", I32)
    above = b.minimum(b.maximum(leading - fmt.min_exponent, b.constant(unit.type, 0)), b.constant(unit.type, 1 << fmt.exponent_bits))
    code = (whole << (fmt.mantissa_bits - kept)) + (above << fmt.mantissa_bits)  # the leading bit adds one to the field
    too_large = (leading > fmt.max_exponent) | (code >= fmt.infinity)
    code = too_large.select(fmt.infinity, code)
    code = code | (sign.cast("trunc", I32) & sign_bit(fmt))
    return ((size == 0).cast("sext", I32) | (whole == 0).cast("sext", I32) != 0).select(0, code)


def add_codes(b: Builder, fmt: Format, x: Value, y: Value) -> Value:
    """x + y of codes, rounded RN once. They are not both -0."""
    left, right = decode_accumulator(fmt, x), decode_accumulator(fmt, y)
    top = b.maximum(left.exponent, right.exponent)
    spare = 60 - fmt.mantissa_bits
    total = b.constant(ir.VectorType(I64, LANES), 0)
    for v in (left, right):
        far = b.minimum(top - v.exponent, b.constant(top.type, 63)).cast("zext", I64)
        size = v.significand.cast("zext", I64) << spare
        kept = size >> far
        kept = kept | (size != kept << far).cast("zext", I64)  # a sticky last bit
        total = total + with_sign(kept, v.negative.cast("sext", I64))
    code = encode(b, fmt, total, top - (fmt.mantissa_bits + spare), "RN", fmt.mantissa_bits)
    return code_of_class(fmt, class_of(fmt, x) + class_of(fmt, y), code)


def narrow_code(b: Builder, code: Value) -> Value:
    """The code in f16 of a code in f32, rounded RN. A zero keeps its sign."""
    v = decode_accumulator(WORD, code)
    total = with_sign(v.significand.cast("zext", I64), v.negative.cast("sext", I64))
    narrow = encode(b, F16, total, v.exponent - FRACTION, "RN", F16.mantissa_bits)
    narrow = narrow | (v.negative & sign_bit(F16))
    return v.special.select(code_of_class(F16, class_of(WORD, code), narrow), narrow)


def widen_code(b: Builder, code: Value) -> Value:
    """The code in f32 of a code in f16."""
    v = decode_accumulator(F16, code)
    total = with_sign(v.significand.cast("zext", I64), v.negative.cast("sext", I64))
    wide = encode(b, WORD, total, v.exponent - F16.mantissa_bits, "RZ", FRACTION)
    wide = wide | (v.negative & sign_bit(WORD))
    return v.special.select(code_of_class(WORD, class_of(F16, code), wide), wide)


# ---- steps


class GeneralSide:
    """One multiplicand's factors in a step, for the rows or columns of a block."""

    def __init__(self, kernel: BlockKernel, form: GeneralForm, is_row: bool) -> None:
        b = kernel.b
        self.kernel, self.form, self.is_row = kernel, form, is_row
        self.format = form.a if is_row else form.b
        lines = kernel.block.rows if is_row else kernel.block.columns
        count = form.numbers.terms * lines
        self.significands, self.exponents, self.classes = b.allocate(I32, count), b.allocate(I32, count), b.allocate(F32, count)
        self.vector = ir.VectorType(I32, kernel.block.largest_width(is_row))
        self.special = b.allocate(self.vector)

    def prepare(self, step: Value) -> None:
        """Decodes the step's operands, and notes whether one of them is Inf or NaN."""
        b, form, fmt = self.kernel.b, self.form, self.format
        b.store(b.constant(self.vector, 0), self.special)

        def visit(codes: Value, scales: Value | None, place: Value) -> None:
            x = decode(fmt, codes)
            number, exponent = significand(fmt, x), x.exponent - BIAS
            never = codes != codes
            special = never if x.special is None else x.special
            infinite = never if x.infinite is None else x.infinite
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
                    special, infinite, gone = special | s.special, infinite & (s.special ^ -1), gone | s.special
            number = gone.select(0, number)
            sign = codes - codes if x.negative is None else x.negative
            b.store(with_sign(number, sign), b.at(self.significands, I32, place))
            b.store(gone.select(ZERO_EXPONENT, exponent), b.at(self.exponents, I32, place))
            one, infinity, nan = (codes - codes + word for word in (BIAS << FRACTION, WORD.infinity, WORD.nan))
            word = special.select(infinite.select(infinity, nan), x.zero.select(0, one)) | (sign & sign_bit(WORD))
            b.store(word.as_float(), b.at(self.classes, F32, place))
            b.store(b.load(self.vector, self.special) | special.cast("sext", I32), self.special)

        self.kernel.visit_codes(self.is_row, step, visit)

    def has_special(self) -> Value:
        b = self.kernel.b
        return b.load(self.vector, self.special).reduce("or") != 0

    def vector_of(self, memory: Value, of: ir.Type, line: Value, term: Value) -> Value:
        """The factors of one product: that of a row, repeated, or those of a vector of columns."""
        b = self.kernel.b
        if self.is_row:
            return b.splat(b.load(of, b.at(memory, of, line * self.form.numbers.terms + term)), LANES)
        return b.load(ir.VectorType(of, LANES), b.at(memory, of, term * self.kernel.block.columns + line))


class GeneralSteps:
    """The steps of a kernel on accumulators in memory, codes of the result as i32 [rows, columns] of a block."""

    def __init__(self, kernel: BlockKernel, form: GeneralForm) -> None:
        self.kernel, self.form, self.b = kernel, form, kernel.b
        self.x, self.y = GeneralSide(kernel, form, True), GeneralSide(kernel, form, False)
        self.top, self.total = self.b.allocate(VECTOR), self.b.allocate(ir.VectorType(I64, LANES))
        self.product, self.any, self.exponent = (self.b.allocate(VECTOR) for _ in range(3))
        self.classes = self.b.allocate(ir.VectorType(F32, LANES))

    def add(self, step: Value, accumulators: Value) -> None:
        """Computes one step for the block."""
        b = self.b
        self.x.prepare(step)
        self.y.prepare(step)
        b.branch(self.x.has_special() | self.y.has_special(), lambda: self._absorb(accumulators), lambda: None)
        with b.loop(self.kernel.rows) as row, b.loop(self.kernel.padded, LANES) as column:
            place = b.at(accumulators, I32, row * self.kernel.block.columns + column)
            b.store(self._add_vector(row, column, b.load(VECTOR, place)), place)

    def _absorb(self, accumulators: Value) -> None:
        """Rule 8: accumulators become Inf or NaN where the products of the step give one."""
        b, fmt = self.b, self.form.result
        of = ir.VectorType(F32, LANES)
        with b.loop(self.kernel.rows) as row, b.loop(self.kernel.padded, LANES) as column:
            place = b.at(accumulators, I32, row * self.kernel.block.columns + column)
            code = b.load(VECTOR, place)
            b.store(class_of(fmt, code), self.classes)
            with b.loop(b.constant(I64, self.form.numbers.terms)) as term:
                x, y = self.x.vector_of(self.x.classes, F32, row, term), self.y.vector_of(self.y.classes, F32, column, term)
                b.store(b.load(of, self.classes) + x * y, self.classes)
            b.store(code_of_class(fmt, b.load(of, self.classes), code), place)

    def _term(self, row: Value, column: Value, term: Value) -> tuple[Value, Value]:
        """The significand and the exponent of an aligned term: of a product, or of a sum of products with the same scales."""
        b, summed = self.b, self.form.numbers.summed
        factors = lambda memory, at: (self.x.vector_of(getattr(self.x, memory), I32, row, at),
                                      self.y.vector_of(getattr(self.y, memory), I32, column, at))  # fmt: skip
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

    def _add_vector(self, row: Value, column: Value, code: Value) -> Value:
        b, form, n = self.b, self.form, self.form.numbers
        c = decode_accumulator(form.result, code)
        stop, stride = b.constant(I64, n.terms), n.summed or 1
        # rule 3
        b.store(b.maximum(c.exponent, b.constant(VECTOR, n.floor)), self.top)
        with b.loop(stop, stride) as term:
            b.store(b.maximum(b.load(VECTOR, self.top), self._term(row, column, term)[1]), self.top)
        top = b.load(VECTOR, self.top)
        # rules 4 and 5
        b.store(self._aligned(c.significand, c.negative, form.result.mantissa_bits, top - c.exponent), self.total)
        with b.loop(stop, stride) as term:
            product, exponent = self._term(row, column, term)
            sign = product.shift_right_signed(31)
            aligned = self._aligned(with_sign(product, sign), sign, n.mantissas, top - exponent)
            b.store(b.load(aligned.type, self.total) + aligned, self.total)
        # rules 6, 7 and 8
        d = encode(b, form.result, b.load(ir.VectorType(I64, LANES), self.total), top - n.fraction_bits, n.rounding, n.kept)
        return c.special.select(code_of_class(form.result, class_of(form.result, code), d), d)

    def _aligned(self, size: Value, sign: Value, stored: int, distance: Value) -> Value:
        """A term of `stored` fraction bits, `distance` binades below the exponent that the step aligns to; i64, with its sign."""
        b, kept = self.b, self.form.numbers.fraction_bits
        wide, negative = size.cast("zext", I64) << max(kept - stored, 0), sign.cast("sext", I64)
        drop = b.minimum(distance + max(stored - kept, 0), b.constant(VECTOR, 63)).cast("zext", I64)
        return with_sign(round_integer(wide, drop, negative, self.form.numbers.alignment), negative)


class GeneralKernel(BlockKernel):
    """The function of one task."""

    def __init__(self, module: ir.Module, name: str, form: GeneralForm) -> None:
        super().__init__(module, name, form.of_block((form.lines, form.lines), LANES))
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
            if n.rounded_again:
                code = narrow_code(b, code)
            elif fmt == WORD:
                code = (code & ~sign_bit(WORD) > WORD.infinity).select(form.nan, code)
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
        self._visit(self.running, lambda code, place: widen_code(self.b, narrow_code(self.b, code)))

    def _add_chained(self, step: Value, steps: GeneralSteps) -> None:
        """A step of a chain, which begins at zero. An instruction whose result is rounded again ends a chain."""
        b, n = self.b, self.form.numbers
        per_instruction = self.form.steps_per_instruction
        in_instruction = step % per_instruction
        position, stop = (in_instruction, b.constant(I64, per_instruction)) if n.rounded_again else (step, self.step_count)
        add = lambda to, of: self._visit(to, lambda code, place: add_codes(b, self.form.result, code, b.load(VECTOR, b.at(of, I32, place))))
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


@lru_cache(maxsize=256)
def general_text(name: str, form: GeneralForm) -> str:
    """LLVM IR of the functions NAME_tasks and NAME_task: see `xla_call` and `blocks`."""
    module = ir.Module(name)
    count_tasks(module, name, form.lines, form.lines)
    GeneralKernel(module, name, form)
    return str(module)
