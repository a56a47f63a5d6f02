"""A batch of small products as a CPU kernel in LLVM IR: one instruction each, on matrices or on registers, with vectors along the batch.

A task computes LANES products. The 32-bit words of an operand are loaded for all of them and transposed, so that a vector has one word of
each product. A table says where each element lies among the words; so registers and matrices are the same to the kernel. Then elements are
decoded, and D is computed an element at a time. Last, its words are transposed back.

Random bits are the usual operands here, so nearly every product has an Inf or a NaN. They stand for themselves in f32, and the f32 sum of a
step's products has rule 8. Otherwise steps are those of `LaneSteps`: bounded ones for narrow formats, and any steps for wide formats.

Nothing here depends on whether the machine flushes subnormals: floats are normal or zero wherever their value matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import NamedTuple

from llvmlite import ir

from tcemu.engine.arithmetic.step import bounded, specials
from tcemu.engine.arithmetic.step.decoding import BIAS, FRACTION, decode, decode_factor, special_word, value_word, with_sign_bit
from tcemu.engine.arithmetic.step.specials import MAGNITUDE
from tcemu.engine.backends.llvm.blocks import LANES
from tcemu.engine.backends.llvm.bounded_lanes import KernelForm, LaneSteps
from tcemu.engine.backends.llvm.values import F32, HALF, I8, I16, I32, I64, POINTER, Builder, Value, build_count, build_task
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


class SideForm(NamedTuple):
    """A model by which a kernel adds the products."""

    arithmetic: KernelForm
    parts: int  # parts of K, one after the other, that a step adds
    chained: bool  # steps begin at zero, and their sum is added to C


class SmallForm(NamedTuple):
    """The parameters of small products, which are compiled for each set of them."""

    m: int
    n: int
    parts: tuple[tuple[int, ...], ...]  # products of each part of K, by their numbers along K
    a: PlacedOperand
    b: PlacedOperand
    c: PlacedOperand
    d: PlacedOperand
    sides: tuple[SideForm, ...]  # of the same formats
    converts_half: bool  # the CPU converts f16 to f32

    def missing_reason(self) -> str:
        """Returns why there is no kernel of this form; "" if there is one."""
        if any(operand.words % LANES for operand in (self.a, self.b, self.c, self.d)):
            return f"an operand is not a multiple of {LANES} words"
        return "" if self.n % (GROUP // LANES) == 0 else f"D is not a multiple of {GROUP // LANES} columns"

    @property
    def terms(self) -> int:
        """Products of a part; the last part may have fewer."""
        return max(map(len, self.parts))

    @property
    def group(self) -> int:
        """Parts of K after which every side has completed a step."""
        return max(side.parts for side in self.sides)

    def merge(self, other: SmallForm) -> SmallForm | None:
        """Returns the form of both models, which multiplies the operands once, or None if their steps do not fit each other.

        Both have one side. The steps of one of them have to be parts of those of the other one.
        """
        if len(self.parts) < len(other.parts):
            merged = other.merge(self)
            return None if merged is None else merged._replace(sides=merged.sides[::-1])
        (side,), (coarse,) = self.sides, other.sides
        ratio, parts = len(self.parts) // len(other.parts), self.parts
        joined = tuple(tuple(k for part in parts[at : at + ratio] for k in part) for at in range(0, len(parts), ratio))
        steps, formats = (side.arithmetic.step, coarse.arithmetic.step), lambda step: (step.a, step.b, step.is_narrow)
        fits = list(map(sorted, joined)) == list(map(sorted, other.parts)) and len({len(part) for part in parts}) == 1
        if not fits or formats(steps[0]) != formats(steps[1]) or self._replace(parts=(), sides=()) != other._replace(parts=(), sides=()):
            return None
        return self._replace(sides=(side, coarse._replace(parts=ratio)))


class SideSteps(LaneSteps):
    """The steps of one model in a function that is being built: for a row, the columns one after the other."""

    def __init__(self, b: Builder, side: SideForm, elements: int) -> None:
        super().__init__(side.arithmetic, b)
        self.side = side
        self.accumulators, self.added = b.allocate(VECTOR, elements), b.allocate(VECTOR, elements if side.chained else 1)

    @property
    def start(self) -> Value:
        """Where C is stored first."""
        return self.added if self.side.chained else self.accumulators

    def begin(self, code: Value, top: Value | None) -> None:
        """Begins a step with an accumulator. top: max exponent of the products, in lanes; None: the formats are wide."""
        self.code, self.top, self.products, self.special = code, top, [], specials.own_special(code)
        if top is not None:
            self.usable = bounded.usable_accumulator(code, self.form.step.most)
            self.unit, self.scale = self.align(self.usable, top)
            self.sums: list[Value] = []

    def add(self, product: Value, exponent: Value | None) -> None:
        """Adds a product. exponent: of wide formats, whose products are fractions."""
        self.products.append((product, exponent))
        if exponent is None:
            term, half = bounded.truncate_by_conversion(product, self.scale), -(-self.form.terms // self.form.step.sums)
            at = (len(self.products) - 1) // half
            self.sums[at:] = [self.sums[at] + term if at < len(self.sums) else term]

    def finish(self) -> Value:
        """Returns the accumulator after the step. One that is Inf or NaN is among the specials."""
        if self.top is None:
            word = self.add_any_vector(self.products, self.code, None)
        else:
            own = bounded.truncate_by_conversion(self.usable.as_float(), self.scale)
            word = self.select_unreached(self.code, self.round([*self.sums, own], self.unit), self.top, None)
        return specials.is_special(self.special).select(specials.special_code(self.special, self.form.step.nan), word)

    def add_chain(self, c: Value, total: Value) -> Value:
        """C + the sum of a chain of narrow formats, which is zero or far from the subnormal numbers; so their sum is, too, or is C."""
        nan = self.form.step.nan
        d = specials.special_code(c.as_float() + total.as_float(), nan)
        alone = (c & MAGNITUDE > RESULT.infinity).select(nan, c & ((c << 1) != 0).cast("sext", I32))
        return (total == 0).select(alone, d)


class SmallProducts:
    """LANES products in a function that is being built. D is left in `sides`: for each element in turn, a vector of the products."""

    def __init__(self, b: Builder, small: SmallForm) -> None:
        self.b, self.small = b, small
        self.form = form = small.sides[0].arithmetic  # of which what depends on the formats is that of every side
        step, terms = form.step, small.terms
        self.sides = [SideSteps(b, side, small.m * small.n) for side in small.sides]
        self.words = b.allocate(VECTOR, max(small.a.words, small.b.words) + 1)
        self.lane = form.lane_type if step.is_narrow else I32
        self.lanes = ir.VectorType(self.lane, LANES)
        parts = [[*part, *[None] * (terms - len(part))] for part in small.parts]
        k = len(small.a.bits) // small.m
        rows = [None if at is None else small.a.bits[row * k + at] for part in parts for row in range(small.m) for at in part]
        columns = [None if at is None else small.b.bits[at * small.n + j] for part in parts for at in part for j in range(small.n)]
        self.x = Factors(self, small.a, step.a, rows, form.lane_biases[0])
        self.y = Factors(self, small.b, step.b, columns, form.lane_biases[1])
        self.tops = b.allocate(self.lanes, small.n * small.group)

    def shares_factors(self, other: SmallProducts) -> bool:
        """Returns whether another model of the same operands multiplies the same elements, in whichever order, without padding."""
        return None not in (*self.x.elements, *other.x.elements)

    def load(self, pointers: list[Value], products: list[list[Value]], others: Sequence[SmallProducts] = ()) -> None:
        """Loads and decodes the operands.

        Args:
            pointers: Of A, B and C.
            products: The numbers of the products among those of each operand.
            others: Other models that share the factors.
        """
        b, small = self.b, self.small
        self.x.load(pointers[0], products[0], [other.x for other in others])
        self.y.load(pointers[1], products[1], [other.y for other in others])
        elements = b.table(I32, elements_of_words(small.c))
        with b.loop(b.constant(I64, small.c.words), LANES) as block:
            for lane, vector in enumerate(self.load_words(pointers[2], products[2], small.c.words, block)):
                for side in (side for kernel in (self, *others) for side in kernel.sides):
                    b.store(vector, place_of_word(b, side.start, elements, block + lane))

    def compute(self) -> None:
        """Computes D of what was loaded."""
        b, small, terms = self.b, self.small, self.small.terms
        count = b.constant(I64, small.m * small.n)
        chained = [side for side in self.sides if side.side.chained]
        for side in chained:
            with b.loop(count) as at:
                b.store(b.constant(VECTOR, 0), b.at(side.accumulators, VECTOR, at))
        with b.loop(b.constant(I64, len(small.parts)), small.group) as part, b.loop(b.constant(I64, small.m)) as row:
            starts = [(((part + at) * small.m + row) * terms, (part + at) * (terms * small.n)) for at in range(small.group)]
            if self.form.step.is_narrow:
                self._find_tops(starts)
            self._add_row(row, starts)
        for side in chained:
            with b.loop(count) as at:
                place = b.at(side.accumulators, VECTOR, at)
                b.store(side.add_chain(b.load(VECTOR, b.at(side.added, VECTOR, at)), b.load(VECTOR, place)), place)

    def load_words(self, pointer: Value, products: list[Value], words: int, block: Value) -> list[Value]:
        """LANES words of each product, from number `block` on, as a vector for each word."""
        b = self.b
        return transpose(b, [b.load(VECTOR, b.at(pointer, I32, product * words + block)) for product in products])

    # ---- steps. starts: for each part of the group, the places of the row of A and of the columns of B

    def _find_tops(self, starts: list[tuple[Value, Value]]) -> None:
        """Finds the max exponents of each part of narrow formats."""
        b, form, n = self.b, self.form, self.small.n
        groups = ir.VectorType(self.lane, GROUP)
        for part, (x_start, y_start) in enumerate(starts):
            with b.loop(b.constant(I64, n), GROUP // LANES) as column:
                top = b.constant(groups, form.least)
                for term in range(self.small.terms):
                    x = b.repeat(self.x.load_lane(x_start + term), GROUP // LANES)
                    y = b.load(groups, b.at(self.y.exponents, self.lanes, y_start + column + term * n))
                    top = b.maximum(top, x + y, signed=False)
                b.store(top, b.at(self.tops, self.lanes, column + part * n))

    def _load_top(self, column: Value, parts: range) -> Value:
        b = self.b
        tops = [b.load(self.lanes, b.at(self.tops, self.lanes, column + part * self.small.n)) for part in parts]
        return reduce(lambda x, y: b.maximum(x, y, signed=False), tops)

    def _add_row(self, row: Value, starts: list[tuple[Value, Value]]) -> None:
        """Adds the products of the group's parts, each of which is computed once for all sides."""
        b, n, narrow = self.b, self.small.n, self.form.step.is_narrow
        with b.loop(b.constant(I64, n)) as column:
            places = [b.at(side.accumulators, VECTOR, row * n + column) for side in self.sides]
            codes = [b.load(VECTOR, place) for place in places]
            for part, (x_start, y_start) in enumerate(starts):
                for side, code in zip(self.sides, codes, strict=True):
                    if part % side.side.parts == 0:
                        side.begin(code, self._load_top(column, range(part, part + side.side.parts)) if narrow else None)
                special: Value | None = None  # the sum so far, so that no product has to be kept
                for term in range(self.small.terms):
                    x, y = x_start + term, y_start + column + term * n
                    product = self.x.load_value(x) * self.y.load_value(y)
                    special = product if special is None else special + product
                    exponent = None if narrow else self.x.load_lane(x) + self.y.load_lane(y)
                    for side in self.sides:
                        side.add(product, exponent)
                assert special is not None
                for at, side in enumerate(self.sides):
                    side.special = side.special + special
                    if (part + 1) % side.side.parts == 0:
                        codes[at] = side.finish()
            for code, place in zip(codes, places, strict=True):
                b.store(code, place)


class Factors:
    """One multiplicand, decoded: for each row of A or column of B, and each product of each step, LANES values."""

    def __init__(self, kernel: SmallProducts, placed: PlacedOperand, multiplied: Format, elements: list[int | None], bias: int) -> None:
        """elements: first bits of the elements, in the order in which they are multiplied; None: zero."""
        b, count = kernel.b, len(elements)
        self.kernel, self.placed, self.format, self.elements, self.bias = kernel, placed, multiplied, elements, bias
        self.lane = kernel.lanes
        self.values, self.exponents = b.allocate(ir.VectorType(F32, LANES), count), b.allocate(self.lane, count)

    def load_value(self, place: Value) -> Value:
        of = ir.VectorType(F32, LANES)
        return self.kernel.b.load(of, self.kernel.b.at(self.values, of, place))

    def load_lane(self, place: Value) -> Value:
        return self.kernel.b.load(self.lane, self.kernel.b.at(self.exponents, self.lane, place))

    def load(self, pointer: Value, products: list[Value], others: Sequence[Factors] = ()) -> None:
        """Loads and decodes the elements.

        Args:
            pointer: Of the operand.
            products: The numbers of the products among those of the operand.
            others: The same multiplicand of other models, with the same elements in another order.
        """
        kernel, b, words = self.kernel, self.kernel.b, self.placed.words
        with b.loop(b.constant(I64, words), LANES) as block:
            for lane, vector in enumerate(kernel.load_words(pointer, products, words, block)):
                b.store(vector, b.at(kernel.words, VECTOR, block + lane))
        b.store(b.constant(VECTOR, 0), b.at(kernel.words, VECTOR, words))
        table = b.table(I32, [words * WORD_BITS if at is None else at for at in self.elements])
        tables = [b.table(I32, [other.elements.index(at) for at in self.elements]) for other in others]
        with b.loop(b.constant(I64, len(self.elements))) as place:
            at = b.load(I32, b.at(table, I32, place))
            word = b.load(VECTOR, b.at(kernel.words, VECTOR, (at >> 5).cast("zext", I64)))
            codes = word >> b.splat(at & (WORD_BITS - 1), LANES)
            places = [place, *(b.load(I32, b.at(of_other, I32, place)).cast("zext", I64) for of_other in tables)]
            decoded = decode_factor(self.placed.format, codes) if not kernel.form.step.is_narrow else None
            value = self._decode_narrow(codes) if decoded is None else decoded.fraction
            field = (value.bits() >> FRACTION).cast("trunc", I8)
            for factors, to in zip((self, *others), places, strict=True):
                lane = factors._narrow_exponent(field) if decoded is None else decoded.exponent
                b.store(value, b.at(factors.values, ir.VectorType(F32, LANES), to))
                b.store(lane, b.at(factors.exponents, factors.lane, to))

    def _decode_narrow(self, codes: Value) -> Value:
        """The values, f32, of codes, below which other bits may stand."""
        given = self.placed.format
        if self.kernel.small.converts_half and extends_from_half(given):
            short, sign = codes.cast("trunc", I16), 1 << (given.bits - 1)
            magnitude = short & (sign - 1)
            half = magnitude << (F16.mantissa_bits - given.mantissa_bits) | (short & sign) << (F16.bits - given.bits)
            if given.specials == "nan":
                half = (magnitude == given.nan).select(F16.nan, half)
            return half.cast("bitcast", HALF).cast("fpext", F32) * 2.0 ** (F16.bias - given.bias)
        x = decode(given, codes)
        word = x.zero.select(0, value_word(given, x))
        if x.special is not None and x.infinite is not None:
            word = x.special.select(special_word(x.infinite), word)
        elif x.special is not None:
            word = x.special.select(RESULT.nan, word)
        return with_sign_bit(word, x.negative).as_float()

    def _narrow_exponent(self, field: Value) -> Value:
        """The exponents of numbers whose exponent fields as f32 are these, in lanes. 0 is the field of zero alone."""
        least = field.constant(BIAS + self.format.min_exponent)
        exponent = self.kernel.b.maximum(field, least, signed=False) + (self.bias - BIAS)
        return ((field == 0) | (field == 0xFF)).select(self.kernel.form.lane_zero, exponent)


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


def place_of_word(b: Builder, memory: Value, table: Value, word: Value) -> Value:
    """The place of the element that a word of C or D holds. table: of `elements_of_words`."""
    return b.at(memory, VECTOR, b.load(I32, b.at(table, I32, word)).cast("zext", I64))


@lru_cache(maxsize=256)
def small_kernel_text(name: str, small: SmallForm) -> str:
    """LLVM IR of the functions NAME_tasks and NAME_task: see `xla_call`. Operands: A, B and C, [b, ...], the words of each product in turn,
    where b is the batch or 1. Result: D [batch, ...].
    """
    module = ir.Module(name)
    counting, dims = build_count(module, name)
    batch = counting.load(I64, counting.load(POINTER, counting.at(dims, POINTER, 3)))
    counting.finish((batch + (LANES - 1)) // LANES)

    (side,) = small.sides
    b = build_task(module, name, side.arithmetic.wide_registers)
    task, buffers, dims = b.arguments
    pointers = [b.load(POINTER, b.at(buffers, POINTER, at)) for at in range(4)]
    sizes = [b.load(I64, b.load(POINTER, b.at(dims, POINTER, at))) for at in range(4)]
    last = sizes[3] - 1
    numbers = [b.minimum(task * LANES + lane, last) for lane in range(LANES)]  # beyond the batch its last product, once more
    products = [[(size > 1).select(number, 0) for number in numbers] for size in sizes]
    kernel = SmallProducts(b, small)
    kernel.load(pointers[:3], products[:3])
    kernel.compute()
    elements = b.table(I32, elements_of_words(small.d))
    with b.loop(b.constant(I64, small.d.words), LANES) as block:
        columns = [b.load(VECTOR, place_of_word(b, kernel.sides[0].accumulators, elements, block + lane)) for lane in range(LANES)]
        for vector, product in zip(transpose(b, columns), products[3], strict=True):
            b.store(vector, b.at(pointers[3], I32, product * small.d.words + block))
    b.finish()
    return str(module)
