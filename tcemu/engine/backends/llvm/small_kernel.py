"""A batch of small products as a CPU kernel in LLVM IR: one instruction each, on matrices or on registers, with vectors along the batch.

A task computes LANES products. The 32-bit words of an operand are loaded for all of them and transposed, so that a vector has one word of
each product. A table says where each element lies among the words; so registers and matrices are the same to the kernel. Then elements are
decoded, and D is computed an element at a time. Last, its words are transposed back.

Random bits are the usual operands here, so nearly every product has an Inf or a NaN. They stand for themselves in f32, and the f32 sum of a
step's products has rule 8. Otherwise steps are those of `LaneSteps`: bounded ones for narrow formats, and any steps for wide formats.

Nothing here depends on whether the machine flushes subnormals: floats are normal or zero wherever their value matters.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from llvmlite import ir

from tcemu.engine.arithmetic.step import bounded, specials
from tcemu.engine.arithmetic.step.decoding import BIAS, FRACTION, decode, decode_factor, special_word, value_word, with_sign_bit
from tcemu.engine.arithmetic.step.specials import MAGNITUDE
from tcemu.engine.backends.llvm.blocks import LANES
from tcemu.engine.backends.llvm.bounded_lanes import KernelForm, LaneSteps
from tcemu.engine.backends.llvm.values import F32, HALF, I16, I32, I64, POINTER, Builder, Value
from tcemu.engine.formats.number_formats import F16, Format
from tcemu.engine.formats.number_formats import F32 as RESULT

GROUP = 64  # elements of D whose max exponents are found together, those of LANES products of a few columns
WORD_BITS = 32
VECTOR = ir.VectorType(I32, LANES)


class PlacedOperand(NamedTuple):
    """An operand as 32-bit words."""

    format: Format
    bits: tuple[int, ...]  # place of each element, row by row: the number of its first bit among the words
    words: int


class SmallForm(NamedTuple):
    """The parameters of a kernel, which is compiled for each set of them."""

    arithmetic: KernelForm
    m: int
    n: int
    steps: tuple[tuple[int, ...], ...]  # products of each step, by their numbers along K
    chained: bool  # steps begin at zero, and their sum is added to C
    a: PlacedOperand
    b: PlacedOperand
    c: PlacedOperand
    d: PlacedOperand

    def missing_reason(self) -> str:
        """Returns why there is no kernel of this form; "" if there is one."""
        if any(operand.words % LANES for operand in (self.a, self.b, self.c, self.d)):
            return f"an operand is not a multiple of {LANES} words"
        return "" if self.n % (GROUP // LANES) == 0 else f"D is not a multiple of {GROUP // LANES} columns"


class SmallKernel(LaneSteps):
    """The function of one task."""

    def __init__(self, module: ir.Module, name: str, small: SmallForm) -> None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64, POINTER, POINTER]), f"{name}_task")
        b = Builder(function, small.arithmetic.wide_registers)
        super().__init__(small.arithmetic, b)
        self.small = small
        task, buffers, dims = b.arguments
        self.pointers = [b.load(POINTER, b.at(buffers, POINTER, at)) for at in range(4)]
        sizes = [b.load(I64, b.load(POINTER, b.at(dims, POINTER, at))) for at in range(4)]
        last = sizes[3] - 1
        products = [b.minimum(task * LANES + lane, last) for lane in range(LANES)]  # beyond the batch its last product, once more
        self.products = [[(size > 1).select(product, 0) for product in products] for size in sizes]
        step, narrow = self.form.step, self.form.step.is_narrow
        self.words = b.allocate(VECTOR, max(small.a.words, small.b.words) + 1)
        self.accumulators, self.added = b.allocate(VECTOR, small.m * small.n), b.allocate(VECTOR, small.m * small.n)
        self.lane = self.form.lane_type if narrow else I32
        self.x = Factors(self, small.a, step.a, small.m, self.form.lane_biases[0])
        self.y = Factors(self, small.b, step.b, small.n, self.form.lane_biases[1])
        self.tops = b.allocate(ir.VectorType(self.lane, LANES), small.n)
        self._build()

    def _build(self) -> None:
        b, small, terms = self.b, self.small, self.form.terms
        steps = [[*step, *[None] * (terms - len(step))] for step in small.steps]
        k = len(small.a.bits) // small.m
        rows = [None if at is None else small.a.bits[row * k + at] for step in steps for row in range(small.m) for at in step]
        columns = [None if at is None else small.b.bits[at * small.n + j] for step in steps for at in step for j in range(small.n)]
        self.x.load(self.pointers[0], self.products[0], rows)
        self.y.load(self.pointers[1], self.products[1], columns)
        start = self.added if small.chained else self.accumulators
        elements = b.table(I32, elements_of_words(small.c))
        with b.loop(b.constant(I64, small.c.words), LANES) as block:
            for lane, vector in enumerate(self.load_words(self.pointers[2], self.products[2], small.c.words, block)):
                b.store(vector, self._element(start, elements, block + lane))
        count = b.constant(I64, small.m * small.n)
        if small.chained:
            with b.loop(count) as at:
                b.store(b.constant(VECTOR, 0), b.at(self.accumulators, VECTOR, at))
        with b.loop(b.constant(I64, len(steps))) as step:
            add_row = self._add_narrow_row if self.form.step.is_narrow else self._add_any_row
            with b.loop(b.constant(I64, small.m)) as row:
                add_row(row, (step * small.m + row) * terms, step * (terms * small.n))
        if small.chained:
            with b.loop(count) as at:
                place = b.at(self.accumulators, VECTOR, at)
                b.store(self._add_chain(b.load(VECTOR, b.at(self.added, VECTOR, at)), b.load(VECTOR, place)), place)
        elements = b.table(I32, elements_of_words(small.d))
        with b.loop(b.constant(I64, small.d.words), LANES) as block:
            columns = [b.load(VECTOR, self._element(self.accumulators, elements, block + lane)) for lane in range(LANES)]
            for vector, product in zip(transpose(b, columns), self.products[3], strict=True):
                b.store(vector, b.at(self.pointers[3], I32, product * small.d.words + block))
        b.finish()

    def _element(self, memory: Value, table: Value, word: Value) -> Value:
        """The place of the element that a word of C or D holds."""
        b = self.b
        return b.at(memory, VECTOR, b.load(I32, b.at(table, I32, word)).cast("zext", I64))

    def load_words(self, pointer: Value, products: list[Value], words: int, block: Value) -> list[Value]:
        """LANES words of each product, from number `block` on, as a vector for each word."""
        b = self.b
        return transpose(b, [b.load(VECTOR, b.at(pointer, I32, product * words + block)) for product in products])

    # ---- steps

    def _add_narrow_row(self, row: Value, x_start: Value, y_start: Value) -> None:
        """x_start, y_start: places of the row and of the step."""
        b, form, n = self.b, self.form, self.small.n
        groups = ir.VectorType(self.lane, GROUP)
        with b.loop(b.constant(I64, n), GROUP // LANES) as column:
            top = b.constant(groups, form.least)
            for term in range(form.terms):
                x = b.repeat(self.x.load_lane(x_start + term), GROUP // LANES)
                y = b.load(groups, b.at(self.y.exponents, ir.VectorType(self.lane, LANES), y_start + column + term * n))
                top = b.maximum(top, x + y, signed=False)
            b.store(top, b.at(self.tops, ir.VectorType(self.lane, LANES), column))
        with b.loop(b.constant(I64, n)) as column:
            place = b.at(self.accumulators, VECTOR, row * n + column)
            code, top = (
                b.load(VECTOR, place),
                b.load(ir.VectorType(self.lane, LANES), b.at(self.tops, ir.VectorType(self.lane, LANES), column)),
            )
            usable = bounded.usable_accumulator(code, form.step.most)
            unit, scale = self.align(usable, top)
            products = [self.x.load_value(x_start + t) * self.y.load_value(y_start + column + t * n) for t in range(form.terms)]
            sums = bounded.add_terms([bounded.truncate_by_conversion(product, scale) for product in products], form.step.sums)
            own = bounded.truncate_by_conversion(usable.as_float(), scale)
            word = self.select_unreached(code, self.round([*sums, own], unit), top)
            b.store(self._select_special(word, specials.add_specials(code, products)), place)

    def _add_any_row(self, row: Value, x_start: Value, y_start: Value) -> None:
        b, n = self.b, self.small.n
        with b.loop(b.constant(I64, n)) as column:
            place = b.at(self.accumulators, VECTOR, row * n + column)
            code, products = b.load(VECTOR, place), []
            for term in range(self.form.terms):
                x, y = x_start + term, y_start + column + term * n
                products.append((self.x.load_value(x) * self.y.load_value(y), self.x.load_lane(x) + self.y.load_lane(y)))
            word = self.add_any_vector(products, code)
            total = specials.add_specials(code, [fraction for fraction, _ in products])
            b.store(self._select_special(word, total), place)

    def _select_special(self, word: Value, total: Value) -> Value:
        return specials.is_special(total).select(specials.special_code(total, self.form.step.nan), word)

    def _add_chain(self, c: Value, total: Value) -> Value:
        """C + the sum of a chain of narrow formats, which is zero or far from the subnormal numbers; so their sum is, too, or is C."""
        nan = self.form.step.nan
        d = specials.special_code(c.as_float() + total.as_float(), nan)
        alone = (c & MAGNITUDE > RESULT.infinity).select(nan, c & ((c << 1) != 0).cast("sext", I32))
        return (total == 0).select(alone, d)


class Factors:
    """One multiplicand, decoded: for each row of A or column of B, and each product of each step, LANES values."""

    def __init__(self, kernel: SmallKernel, placed: PlacedOperand, multiplied: Format, lines: int, bias: int) -> None:
        b, form = kernel.b, kernel.form
        self.kernel, self.placed, self.format, self.bias = kernel, placed, multiplied, bias
        self.lane = ir.VectorType(kernel.lane, LANES)
        count = len(kernel.small.steps) * form.terms * lines
        self.values, self.exponents = b.allocate(ir.VectorType(F32, LANES), count), b.allocate(self.lane, count)

    def load_value(self, place: Value) -> Value:
        of = ir.VectorType(F32, LANES)
        return self.kernel.b.load(of, self.kernel.b.at(self.values, of, place))

    def load_lane(self, place: Value) -> Value:
        return self.kernel.b.load(self.lane, self.kernel.b.at(self.exponents, self.lane, place))

    def load(self, pointer: Value, products: list[Value], bits: list[int | None]) -> None:
        """Loads and decodes the elements of which the first bits are given. None: zero."""
        kernel, b, words = self.kernel, self.kernel.b, self.placed.words
        with b.loop(b.constant(I64, words), LANES) as block:
            for lane, vector in enumerate(kernel.load_words(pointer, products, words, block)):
                b.store(vector, b.at(kernel.words, VECTOR, block + lane))
        b.store(b.constant(VECTOR, 0), b.at(kernel.words, VECTOR, words))
        table = b.table(I32, [words * WORD_BITS if at is None else at for at in bits])
        with b.loop(b.constant(I64, len(bits))) as place:
            at = b.load(I32, b.at(table, I32, place))
            word = b.load(VECTOR, b.at(kernel.words, VECTOR, (at >> 5).cast("zext", I64)))
            value, lane = self._decode(word >> b.splat(at & (WORD_BITS - 1), LANES))
            b.store(value, b.at(self.values, ir.VectorType(F32, LANES), place))
            b.store(lane, b.at(self.exponents, self.lane, place))

    def _decode(self, codes: Value) -> tuple[Value, Value]:
        """Value and exponent of codes, below which other bits may stand."""
        form, given = self.kernel.form, self.placed.format
        if not form.step.is_narrow:
            x = decode_factor(given, codes)
            return x.fraction, x.exponent
        if form.wide_registers and extends_from_half(given):
            magnitude, sign = (1 << (given.bits - 1)) - 1, 1 << (given.bits - 1)
            bits = (codes & magnitude) << (F16.mantissa_bits - given.mantissa_bits) | (codes & sign) << (F16.bits - given.bits)
            half = bits.cast("trunc", I16).cast("bitcast", HALF)
            word = (half.cast("fpext", F32) * 2.0 ** (F16.bias - given.bias)).bits()
            if given.specials == "nan":
                word = (codes & magnitude == given.nan).select(RESULT.nan, word)
        else:
            x = decode(given, codes)
            word = x.zero.select(0, value_word(given, x))
            if x.special is not None and x.infinite is not None:
                word = x.special.select(special_word(x.infinite), word)
            elif x.special is not None:
                word = x.special.select(RESULT.nan, word)
            word = with_sign_bit(word, x.negative)
        field = (word >> FRACTION) & 0xFF
        exponent = field.max(BIAS + self.format.min_exponent) + (self.bias - BIAS)
        lane = ((word << 1 == 0) | (field == 0xFF)).select(form.lane_zero, exponent)
        return word.as_float(), lane.cast("trunc", form.lane_type)


def extends_from_half(fmt: Format) -> bool:
    """Whether a code, moved to the fields of f16, is that f16 times a power of two, or NaN."""
    fits = fmt.signed and fmt.subnormals and fmt.unused_bits == 0 and fmt.mantissa_bits <= F16.mantissa_bits
    special = fmt.specials in ("nan", "none") or (fmt.specials == "ieee" and fmt.exponent_bits == F16.exponent_bits)
    return fits and special and fmt.exponent_bits <= F16.exponent_bits


def elements_of_words(placed: PlacedOperand) -> list[int]:
    """Returns the element, by its number row by row, that each word of an operand of 32-bit elements holds."""
    elements = {bits // WORD_BITS: at for at, bits in enumerate(placed.bits)}
    return [elements[word] for word in range(placed.words)]


def transpose(b: Builder, rows: list[Value]) -> list[Value]:
    """Transposes a LANES x LANES matrix of words."""
    each = 1
    while each < LANES:  # exchanges blocks of `each` words; of rows that lie `each` apart
        for at in range(LANES):
            if not at & each:
                x, y = rows[at], rows[at + each]
                low = [lane if not lane & each else LANES + lane - each for lane in range(LANES)]
                high = [lane + each if not lane & each else LANES + lane for lane in range(LANES)]
                rows[at], rows[at + each] = b.shuffle(x, y, low), b.shuffle(x, y, high)
        each *= 2
    return rows


@lru_cache(maxsize=256)
def small_kernel_text(name: str, small: SmallForm) -> str:
    """LLVM IR of the functions NAME_tasks and NAME_task: see `xla_call`. Operands: A, B and C, [b, ...], the words of each product in turn,
    where b is the batch or 1. Result: D [batch, ...].
    """
    module = ir.Module(name)
    counting = Builder(ir.Function(module, ir.FunctionType(I64, [POINTER]), f"{name}_tasks"))
    (dims,) = counting.arguments
    batch = counting.load(I64, counting.load(POINTER, counting.at(dims, POINTER, 3)))
    counting.finish((batch + (LANES - 1)) // LANES)
    SmallKernel(module, name, small)
    return str(module)
