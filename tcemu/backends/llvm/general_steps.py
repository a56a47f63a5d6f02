"""Fused steps of any numbers as a CPU kernel in LLVM IR: the eight rules of `fused_dot_add` in integers, on vectors of columns of D.

It takes every `Model` of fused steps whose fields are known before tracing: any rounding and alignment, results in f16, sums of groups of
products, chains, and results that each instruction rounds once more. Significands and exponents are integers and sums have 64 bits.

Rule 8 is applied before a step: an accumulator becomes Inf or NaN where the products give one, and then stays so (see `absorb_specials`).
Only steps with an Inf or NaN among their operands need that. It adds floats of which none is subnormal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from llvmlite import ir

from tcemu.arithmetic.multiplicands import ZERO_EXPONENT, is_compact
from tcemu.backends.cuda.kernel_text import KernelNumbers
from tcemu.backends.llvm.blocks import LANES, BlockForm, BlockKernel, code_type, count_tasks
from tcemu.backends.llvm.decoding import BIAS, FRACTION, decode, extend, significand, value_word
from tcemu.backends.llvm.values import F32, I1, I16, I32, I64, Builder, Value
from tcemu.formats import F16, Format
from tcemu.formats import F32 as WORD

PLACES = 1 << 13  # of a block, rows or columns times the products of a step
MOST_LINES = 64  # rows or columns of a block
MOST_BITS = 28  # fraction bits of products that fit an s32
GROUP = 64  # columns whose max exponents are found together
ZERO_LANE = -(1 << 13)  # the exponent of a zero in lanes of 16 bits
ROUNDED = {"RN": "rint", "RM": "floor", "RP": "ceil"}  # LLVM's names
TINY = (BIAS - 30) << FRACTION  # the code of 2^-30
UNROLLED = 32  # products of a step whose operations are not a loop
VECTOR = ir.VectorType(I32, LANES)


class GeneralForm(NamedTuple):
    """The parameters of a kernel, which is compiled for each set of them."""

    numbers: KernelNumbers
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
        """Sums of aligned products, each of which fits an s32 with the accumulator; 0 where terms are added as integers of 64 bits."""
        n = self.numbers
        if n.summed or n.fraction_bits > MOST_BITS:
            return 0
        largest = ((2 << self.a.mantissa_bits) - 1) * ((2 << self.b.mantissa_bits) - 1)
        shift = n.fraction_bits - n.mantissas
        largest, own = (largest << shift if shift >= 0 else largest >> -shift) + 1, (2 << n.fraction_bits) + 1  # 1: rounded up
        return next((sums for sums in (1, 2) if -(-n.terms // sums) * largest + own < 1 << 31), 0)

    def of_block(self, lines: tuple[int, int], group: int) -> BlockForm:
        return BlockForm(*lines, group, self.a, self.b, self.result, self.d, self.numbers.terms, self.block, self.by_columns)


# ---- codes


def exponent_field(fmt: Format, code: Value) -> Value:
    """Returns the exponent field of a code."""
    return (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)


def sign_mask(fmt: Format, code: Value) -> Value:
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
    field, fraction = exponent_field(fmt, code), code & ((1 << fmt.mantissa_bits) - 1)
    special = field == (1 << fmt.exponent_bits) - 1
    size = special.select(0, (field == 0).select(fraction, fraction | (1 << fmt.mantissa_bits)))
    exponent = (field == 0).select(1, field) - fmt.bias
    return Accumulator(size, sign_mask(fmt, code), (size == 0).select(ZERO_EXPONENT, exponent), special)


def special_value(fmt: Format, code: Value) -> Value:
    """f32: Inf and NaN themselves, and 0 for numbers."""
    special = exponent_field(fmt, code) == (1 << fmt.exponent_bits) - 1
    infinite = code & ((1 << fmt.mantissa_bits) - 1) == 0
    word = infinite.select(code - code + WORD.infinity, WORD.nan) | (sign_mask(fmt, code) & sign_bit(WORD))
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


def round_integer(size: Value, drop: Value, negative: Value, rounding: str, drops: bool = False) -> Value:
    """size / 2^drop, rounded to an integer.

    All three have one type, of W bits. size: below 2^(W-2); drop: from 0 to W-1; negative: -1 or 0; drops: no `drop` is 0.
    """
    whole = size >> drop
    if rounding == "RZ":
        return whole
    if rounding == "RN" and drops:
        below_half = ((drop - drop + 1) << (drop - 1)) - 1
        return (size + below_half + (whole & 1)) >> drop
    rest = size - (whole << drop)
    if rounding == "RN":
        half = ((drop - drop + 1) << drop) >> 1  # 0 where nothing is dropped
        up = (rest > half) | ((rest == half) & (whole & 1 != 0) & (drop > 0))
    else:
        up = (rest != 0) & ((negative != 0) if rounding == "RM" else (negative == 0))
    return whole + up.cast("zext", size.element)


def resize(value: Value, of: ir.IntType, how: str = "sext") -> Value:
    """The integers with another number of bits."""
    before = value.element
    assert isinstance(before, ir.IntType)
    return value if before == of else value.cast("trunc" if of.width < before.width else how, of)


def encode(b: Builder, fmt: Format, total: Value, unit: Value, rounding: str, kept: int) -> Value:
    """Rules 6 and 7: the code of total * 2^unit, rounded to `kept` fraction bits; +0 for every zero. total: i32 or i64; unit: i32."""
    of = total.element
    assert isinstance(of, ir.IntType)
    width = of.width
    sign = total.shift_right_signed(width - 1)
    size = with_sign(total, sign)
    zeros = b.call(f"llvm.ctlz.{b.suffix(size.type)}", size.type, size, b.constant(I1, 0))
    leading = width - 1 - resize(zeros, I32) + unit  # exponent of the leading bit
    shifted = size << (zeros & (width - 1))
    jammed = (shifted >> 2) | ((shifted | (shifted >> 1)) & 1)  # the leading bit is bit W - 3
    below = b.maximum(fmt.min_exponent - leading, b.constant(unit.type, 0))
    drop = b.minimum(below + (width - 3 - kept), b.constant(unit.type, width - 1))
    whole = resize(round_integer(jammed, resize(drop, of), sign, rounding, drops=True), I32)
    above = b.minimum(b.maximum(leading - fmt.min_exponent, b.constant(unit.type, 0)), b.constant(unit.type, 1 << fmt.exponent_bits))
    code = (whole << (fmt.mantissa_bits - kept)) + (above << fmt.mantissa_bits)  # the leading bit adds one to the field
    code = ((leading > fmt.max_exponent) | (code >= fmt.infinity)).select(fmt.infinity, code)
    code = code | (resize(sign, I32) & sign_bit(fmt))
    return ((size == 0) | (whole == 0)).select(0, code)


def add_codes(b: Builder, fmt: Format, x: Value, y: Value) -> Value:
    """x + y of codes, rounded RN once. They are not both -0. Tasks run without flushing subnormals: see `ffi_handler`."""
    if fmt == WORD:
        total = x.as_float() + y.as_float()
        return (total == total).select(total.bits(), fmt.nan)
    left, right = decode_accumulator(fmt, x), decode_accumulator(fmt, y)
    top = b.maximum(left.exponent, right.exponent)
    spare = 29 - fmt.mantissa_bits  # bits below a significand: a guard bit and a sticky bit at least
    total = b.constant(VECTOR, 0)
    for v in (left, right):
        far = b.minimum(top - v.exponent, b.constant(VECTOR, 31))
        size = v.significand << spare
        kept = size >> far
        kept = kept | (size != kept << far).cast("zext", I32)
        total = total + with_sign(kept, v.negative)
    code = encode(b, fmt, total, top - (fmt.mantissa_bits + spare), "RN", fmt.mantissa_bits)
    return code_of_class(fmt, special_value(fmt, x) + special_value(fmt, y), code)


def narrow_code(b: Builder, code: Value) -> Value:
    """The code in f16 of a code in f32, rounded RN. A zero keeps its sign."""
    v = decode_accumulator(WORD, code)
    total = with_sign(v.significand, v.negative)
    narrow = encode(b, F16, total, v.exponent - FRACTION, "RN", F16.mantissa_bits)
    narrow = narrow | (v.negative & sign_bit(F16))
    return v.special.select(code_of_class(F16, special_value(WORD, code), narrow), narrow)


def widen_code(b: Builder, code: Value) -> Value:
    """The code in f32 of a code in f16."""
    v = decode_accumulator(F16, code)
    total = with_sign(v.significand, v.negative)
    wide = encode(b, WORD, total, v.exponent - F16.mantissa_bits, "RZ", FRACTION)
    wide = wide | (v.negative & sign_bit(WORD))
    return v.special.select(code_of_class(WORD, special_value(F16, code), wide), wide)


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
        self.lanes = b.allocate(I16, count)  # exponents, while their max is found
        self.values = b.allocate(F32, count if form.partial_sums else 1)  # of compact formats, else significands
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
            if form.is_compact and form.partial_sums:
                value = (gone.select(0, value_word(fmt, x)) | (sign & sign_bit(WORD))).as_float()
                b.store(value, b.at(self.values, F32, place))
            elif form.partial_sums:
                b.store(with_sign(number, sign).cast("sitofp", F32), b.at(self.values, F32, place))
            else:
                b.store(with_sign(number, sign), b.at(self.significands, I32, place))
            exponent = gone.select(ZERO_EXPONENT, exponent)
            b.store(exponent, b.at(self.exponents, I32, place))
            b.store(gone.select(ZERO_LANE, exponent).cast("trunc", I16), b.at(self.lanes, I16, place))
            one, infinity, nan = (codes - codes + word for word in (BIAS << FRACTION, WORD.infinity, WORD.nan))
            word = special.select(infinite.select(infinity, nan), x.zero.select(0, one)) | (sign & sign_bit(WORD))
            b.store(word.as_float(), b.at(self.classes, F32, place))
            b.store(b.load(self.vector, self.special) | special.cast("sext", I32), self.special)

        self.kernel.visit_codes(self.is_row, step, visit)

    def has_special(self) -> Value:
        b = self.kernel.b
        return b.load(self.vector, self.special).reduce("or") != 0

    def load_factors(self, memory: Value, of: ir.Type, line: Value, term: Value) -> Value:
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
        self.tops = self.b.allocate(I16, kernel.block.group)
        self.product, self.any, self.exponent = (self.b.allocate(VECTOR) for _ in range(3))
        self.classes = self.b.allocate(ir.VectorType(F32, LANES))

    def add(self, step: Value, accumulators: Value) -> None:
        """Computes one step for the block."""
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

        self._over_terms(0, terms, 1, visit)

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
        b, form, n = self.b, self.form, self.form.numbers
        c = decode_accumulator(form.result, code)
        least = b.maximum(c.exponent, b.constant(VECTOR, n.floor))
        top = self._top_of_groups(row, column, least) if n.summed else b.maximum(top, least)
        own = partial(self._aligned, c.significand, c.negative, form.result.mantissa_bits, top - c.exponent)
        unit = top - n.fraction_bits
        if form.partial_sums:
            first, *others = self._add_floats(row, column, top)
            total = first + own(I32)
            for other in others:
                total, unit = self._add_jammed(total, other, unit)
        else:
            total = self._add_integers(row, column, top, own(I64))
        d = encode(b, form.result, total, unit, n.rounding, n.kept)  # rules 6 and 7
        return c.special.select(code, d)  # rule 8

    def _over_terms(self, start: int, stop: int, stride: int, visit: Callable[[Value], None]) -> None:
        b = self.b
        if stop - start <= UNROLLED:
            for term in range(start, stop, stride):
                visit(b.constant(I64, term))
        else:
            with b.loop(b.constant(I64, stop - start), stride) as term:
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
        power = lambda exponent: (b.maximum(exponent + BIAS, b.constant(VECTOR, 0)) << FRACTION).as_float()
        least = form.a.min_exponent + form.b.min_exponent
        unit = power(n.fraction_bits - b.maximum(top, b.constant(VECTOR, least))) if form.is_compact else None
        last = top + (n.mantissas - n.fraction_bits)
        size = -(-n.terms // form.partial_sums)

        def visit(term: Value) -> None:
            product = self.x.load_factors(self.x.values, F32, row, term) * self.y.load_factors(self.y.values, F32, column, term)
            scale = power(self._sum_of_exponents(row, column, term) - last) if unit is None else unit
            b.store(b.load(VECTOR, self.product) + self._rounded_float(product * scale, product).cast("fptosi", I32), self.product)

        sums = []
        for start in range(0, n.terms, size):
            b.store(b.constant(VECTOR, 0), self.product)
            self._over_terms(start, min(start + size, n.terms), 1, visit)
            sums.append(b.load(VECTOR, self.product))
        return sums

    def _rounded_float(self, aligned: Value, product: Value) -> Value:
        """An aligned product, ready to be truncated to the integer to which it is rounded. One that underflowed is not zero."""
        b, alignment = self.b, self.form.numbers.alignment
        if alignment == "RZ":
            return aligned
        if alignment != "RN":
            tiny = ((aligned.bits() & ~sign_bit(WORD)) < TINY) & (product != 0.0)
            aligned = tiny.select((product.bits() & sign_bit(WORD)) | TINY, aligned.bits()).as_float()
        return b.call(f"llvm.{ROUNDED[alignment]}.{b.suffix(aligned.type)}", aligned.type, aligned)

    def _add_jammed(self, x: Value, y: Value, unit: Value) -> tuple[Value, Value]:
        """x + y in units 2^unit, i32, and the unit: a sum that does not fit is halved, with a sticky last bit."""
        total = x + y
        wraps = (x ^ total) & (y ^ total) < 0
        half = x.shift_right_signed(1) + y.shift_right_signed(1) + (x & y & 1)
        return wraps.select(half | ((x ^ y) & 1), total), unit + wraps.cast("zext", I32)

    def _add_integers(self, row: Value, column: Value, top: Value, own: Value) -> Value:
        """Rules 4 and 5 in integers of 64 bits, with the aligned accumulator."""
        b, n = self.b, self.form.numbers
        b.store(own, self.total)

        def visit(term: Value) -> None:
            product, exponent = self._term(row, column, term)
            sign = product.shift_right_signed(31)
            aligned = self._aligned(with_sign(product, sign), sign, n.mantissas, top - exponent, I64)
            b.store(b.load(aligned.type, self.total) + aligned, self.total)

        with b.loop(b.constant(I64, n.terms), n.summed or 1) as term:
            visit(term)
        return b.load(ir.VectorType(I64, LANES), self.total)

    def _aligned(self, size: Value, sign: Value, stored: int, distance: Value, of: ir.IntType) -> Value:
        """A term of `stored` fraction bits, `distance` binades below the exponent that the step aligns to, with its sign."""
        b, kept = self.b, self.form.numbers.fraction_bits
        size, negative = resize(size, of, "zext") << max(kept - stored, 0), resize(sign, of)
        drop = resize(b.minimum(distance + max(stored - kept, 0), b.constant(VECTOR, of.width - 1)), of)
        return with_sign(round_integer(size, drop, negative, self.form.numbers.alignment), negative)


class GeneralKernel(BlockKernel):
    """The function of one task."""

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
            code = narrow_code(b, code) if n.rounded_again else canonical
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
