"""The lattice of a fused step: every exponent of C against every exponent of a product, in the patterns that bounds are about.

A bound that is wrong by one exponent shows where products cancel and C lies at the end of what the step keeps, which random operands do not
reach. A row of A has one exponent, a column has one exponent of C; each batch entry has a pattern of products, an exponent of B and a place
along K. Where there are block scales, rows and columns have every scale instead.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from oracles.reference import FORMATS
from oracles.vectorised_reference import decode, multiply_add

from support.llvm_products import Arithmetic
from tcemu.engine.arithmetic.order import Order

Codes = NDArray[Any]


class Lattice(NamedTuple):
    """Operands as NumPy codes."""

    a: Codes  # [batch, M, K]
    b: Codes  # [batch, K, N]
    c: Codes  # [batch, M, N]
    scales: tuple[Codes, Codes] | None

    @property
    def operands(self) -> tuple[Any, ...]:
        return tuple(self)


class Bounds(NamedTuple):
    """Exponents at which a kernel's guards decide otherwise."""

    products: list[int]
    accumulators: list[int]


def exponents_of(name: str) -> list[int]:
    """A magnitude for each exponent of a format, subnormals included, without fraction bits below the leading one."""
    spec = FORMATS[name]
    normal = [field << spec.fraction for field in range(1, (spec.greatest >> spec.fraction) + 1)]
    return [1 << bit for bit in range(spec.fraction)] + normal


def special_codes(name: str) -> Codes:
    """Every code of Inf and NaN of a format of at most 16 bits; of a longer one those with few fraction bits. Empty: there is none."""
    spec = FORMATS[name]
    if spec.bits > 16:
        fractions = [0, 1, 1 << 12, 1 << 13, 1 << 22, (1 << 23) - 1]
        return np.array([sign << 31 | 0x7F800000 | fraction for sign in (0, 1) for fraction in fractions])
    codes = np.arange(1 << spec.bits)
    terms = decode(name, codes)
    return codes[terms.infinite | terms.nan]


def with_fraction(name: str, magnitudes: Codes, kind: Codes, rng: np.random.Generator) -> Codes:
    """The magnitudes with other bits below their leading bit: 0 none, 1 the last one, 2 all, 3 random ones."""
    spec = FORMATS[name]
    fraction = (1 << spec.fraction) - 1
    leading = np.where(magnitudes > fraction, fraction + 1, magnitudes & fraction)
    below = np.where(magnitudes > fraction, fraction, np.maximum(leading, 1) - 1)
    bits = np.choose(kind, [np.zeros_like(below), below & 1, below, rng.integers(0, 1 << spec.fraction, below.shape) & below])
    return np.minimum(magnitudes | bits, spec.greatest)


# For each pattern: the products of a step as (factor of A, factor of B), with s for -1. x, X: two values of the row that differ in
# their fraction; z: zero; w: a row's value of another exponent. y, Y, v: of the column likewise. First product, last product, filling.
PATTERNS = {
    "cancelled": (("x", "y"), ("x", "-y"), None),
    "cancelled but for a fraction": (("x", "y"), ("X", "-y"), None),
    "cancelled beside small products": (("x", "y"), ("x", "-y"), ("w", "v")),
    "one product": (("x", "y"), None, None),
    "two of one sign": (("x", "y"), ("X", "Y"), None),
    "all of one sign": (("x", "y"), ("X", "Y"), ("x", "Y")),
    "negative, all": (("x", "-y"), ("X", "-Y"), ("x", "-Y")),
    "signed zeros": (("x", "z"), ("-z", "-y"), ("z", "-z")),
    "one far below": (("x", "y"), ("w", "v"), None),
}  # fmt: skip


class LatticeBuilder:
    """Draws the operands of a lattice for one arithmetic."""

    def __init__(self, arithmetic: Arithmetic, seed: int, instructions: int = 2) -> None:
        self.arithmetic, self.spec = arithmetic, arithmetic.spec
        self.rng = np.random.default_rng(seed)
        self.k = instructions * self.spec.k
        order = Order.from_model(arithmetic.model, self.spec.k)
        self.steps = [[i * self.spec.k + at for at in step] for i in range(instructions) for step in order.steps(self.spec.k)]

    def side(self, name: str, magnitudes: Codes) -> dict[str, Codes]:
        """Codes for the letters of PATTERNS, one for each line."""
        rng, spec = self.rng, FORMATS[name]
        kinds = lambda: rng.integers(0, 4, magnitudes.shape)
        values = {letter: with_fraction(name, magnitudes, kinds(), rng) for letter in "xX"}
        values["w"] = with_fraction(name, rng.choice(exponents_of(name), magnitudes.shape), kinds(), rng)
        values["z"] = np.zeros_like(magnitudes)
        shown = {letter: magnitude << spec.ignored for letter, magnitude in values.items()}
        return shown | {f"-{letter}": code | 1 << (spec.bits - 1) for letter, code in shown.items()}

    def fill(self, pattern: str, row: dict[str, Codes], column: dict[str, Codes]) -> tuple[Codes, Codes]:
        """A [..., M, K] and B [..., K, N] with the pattern in one step; the other products are zero."""
        column = {letter.translate(str.maketrans("xXw", "yYv")): code for letter, code in column.items()}
        first, last, rest = PATTERNS[pattern]
        step = self.steps[self.rng.integers(len(self.steps))]
        a, b = (np.zeros((self.k, *side["z"].shape), np.int64) for side in (row, column))
        ends = step[0], step[-1] if self.rng.random() < 0.5 else step[1 % len(step)]
        for at in step:
            terms = first if at == ends[0] else last if at == ends[1] else rest
            if terms is not None:
                a[at], b[at] = row[terms[0]], column[terms[1]]
        return np.moveaxis(a, 0, -1), np.moveaxis(b, 0, -2)

    def accumulators(self, magnitudes: Codes) -> Codes:
        """C with these exponents, any sign and fraction."""
        name, shape = str(self.spec.c), magnitudes.shape
        code = with_fraction(name, magnitudes, self.rng.integers(0, 4, shape), self.rng)
        return np.where(magnitudes == 0, 0, code) | self.rng.integers(0, 2, shape) << (FORMATS[name].bits - 1)

    def spread(self, repeats: int, m: int, n: int) -> Lattice:
        """Rows have every exponent of A and columns every exponent of C: most blocks take any steps."""
        spec, rng, parts = self.spec, self.rng, []
        every_a, every_b, every_c = (np.array(exponents_of(str(fmt))) for fmt in (spec.a, spec.b, spec.c))
        ends = [0, FORMATS[str(spec.b)].fraction, len(every_b) // 2, len(every_b) - 1]
        for entry, pattern in enumerate(list(PATTERNS) * repeats):
            rows, columns = np.resize(every_a[self._choose(len(every_a), m)], (1, m)), np.resize(np.append(every_c, 0), (1, n))
            b = np.full((1, n), every_b[ends[entry % 4]] if rng.random() < 0.7 else rng.choice(every_b))
            scales = None
            if spec.scale is not None:
                every = np.arange(FORMATS[str(spec.scale)].greatest + 1)
                scales = tuple(np.resize(rng.permutation(every), (1, size)) for size in (m, n))
            parts.append(self._part(pattern, rows, b, np.broadcast_to(columns[:, None], (1, m, n)), scales))
        return _join(parts)

    def tight(self, repeats: int, entries: int = 25, m: int = 4, n: int = 16, bounds: Bounds | None = None) -> Lattice:
        """Rows, columns and scales of an entry have nearly one exponent, and its C is near a bound: blocks take bounded steps.

        An entry is one matrix of the batch. bounds: what most entries are near, besides.
        """
        spec, rng, parts = self.spec, self.rng, []
        every_a, every_b, every_c = (np.array(exponents_of(str(fmt))) for fmt in (spec.a, spec.b, spec.c))
        fraction_bits, shape = int(self.arithmetic.model.fraction_bits or 0), (entries, m, n)
        for pattern in list(PATTERNS) * repeats:
            rows, of_row = self._neighbours(every_a, (entries, m), str(spec.a))
            aim = None if bounds is None else rng.choice(bounds.products, entries) + rng.integers(-2, 3, entries)
            own = None if aim is None or spec.scale is not None else aim - of_row
            columns, of_column = self._neighbours(every_b, (entries, n), str(spec.b), own)
            scales, product = None, of_row + of_column
            if spec.scale is not None:
                fmt, drawn = FORMATS[str(spec.scale)], []
                for size in (m, n):
                    base = self._bases(fmt.greatest + 1, entries)
                    if aim is not None and drawn:  # the scale that makes the product what it should be
                        base = np.clip((aim - product + fmt.bias) << fmt.fraction, 0, fmt.greatest)
                    product = product + (base >> fmt.fraction) - fmt.bias
                    drawn.append(np.minimum(base[:, None] + rng.integers(0, 2, (entries, size)), fmt.greatest))
                scales = tuple(drawn)
            # the end of what a step keeps, the product itself, the least and the largest accumulators, or anything
            anything, low, high = rng.integers(-149, 128, entries), np.full(entries, -126), np.full(entries, 126)
            centre = np.choose(
                rng.integers(0, 6, entries), [product - fraction_bits, product, product + fraction_bits, low, high, anything]
            )
            if bounds is not None:
                centre = np.where(rng.random(entries) < 0.5, rng.choice(bounds.accumulators, entries), centre)
            near = centre[:, None, None] + rng.integers(-3, 4, shape) - _leading(str(spec.c), every_c[:1])[0]
            zero = rng.random(shape) < np.where(rng.random(entries) < 0.2, 1.0, 0.1)[:, None, None]
            c = np.where(zero, 0, every_c[np.clip(near, 0, len(every_c) - 1)])
            parts.append(self._part(pattern, rows, columns, c, scales))
        return _join(parts)

    def special(self, repeats: int, entries: int = 8) -> Lattice:
        """As `tight`, with Inf and NaN in place of some factors, scales and accumulators: at most one of each operand in an entry."""
        spec, tight = self.spec, self.tight(repeats, entries)
        names = [str(fmt) for fmt in (spec.a, spec.b, spec.c, spec.scale, spec.scale)]
        shares, changed = (0.4, 0.4, 0.4, 0.2, 0.2), []
        for name, codes, share in zip(names, (*tight[:3], *(tight.scales or ())), shares, strict=False):
            found, flat = special_codes(name), codes.reshape(len(codes), -1).copy()
            chosen = np.flatnonzero(self.rng.random(len(codes)) < share)
            if len(found):
                flat[chosen, self.rng.integers(0, flat.shape[1], len(chosen))] = self.rng.choice(found, len(chosen))
            changed.append(flat.reshape(codes.shape))
        a, b, c, *scales = changed
        return Lattice(a, b, c, (scales[0], scales[1]) if scales else None)

    def lone(self, entries: int = 12, m: int = 32, n: int = 32) -> Lattice:
        """Each matrix has one element of D whose products all lie far below what its row and its column have elsewhere.

        In a step, all rows and columns have two large factors; of the lone element's row one of them is small, and of its column the other.
        A guard that looks at rows, columns or some elements does not see it. C is zero or near 1, so that guards of accumulators pass.
        """
        spec, rng, parts = self.spec, self.rng, []
        names, sizes = (str(spec.a), str(spec.b)), (m, n)
        every_c = np.array(exponents_of(str(spec.c)))
        for entry in range(entries):
            step = self.steps[rng.integers(len(self.steps))]
            places = rng.choice(step, 2, replace=False)
            # lanes of a warp hold rows 8 apart and neighbouring columns: all four kinds
            lines = rng.integers(m // 16) * 16 + rng.integers(8) + 8 * (entry % 2), rng.integers(n // 2) * 2 + entry // 2 % 2
            factors = []
            for name, size, line, place in zip(names, sizes, lines, places, strict=True):
                every = np.array(exponents_of(name))
                large = np.full((1, size), every[len(every) // 2 + rng.integers(len(every) // 8 + 1)])
                codes = np.zeros((1, self.k, size), np.int64)
                for at, letter in zip(places, "xX", strict=True):
                    codes[:, at] = self.side(name, large)[letter]
                small = every[rng.integers(1, max(len(every) // 4, 2))]
                codes[0, place, line] = self.side(name, np.array([small]))["x"][0]
                factors.append(codes)
            near_one = every_c[len(every_c) // 2 + rng.integers(-4, 5, (1, m, n))]
            c = self.accumulators(near_one if entry // 4 % 2 else np.zeros_like(near_one))
            operands = np.moveaxis(factors[0], 1, 2).astype(spec.a.dtype), factors[1].astype(spec.b.dtype), c.astype(spec.c.dtype)
            if spec.scale is not None:
                one, count = FORMATS[str(spec.scale)].bias << FORMATS[str(spec.scale)].fraction, self.k // self.arithmetic.block
                operands += tuple(np.full(shape, one, spec.scale.dtype) for shape in ((1, m, count), (1, count, n)))
            parts.append(operands)
        return _join(parts)

    def _bases(self, count: int, entries: int) -> Codes:
        """Indices, often near an end."""
        near = self.rng.integers(0, min(4, count), entries)
        return np.choose(self.rng.choice(3, entries, p=(0.6, 0.2, 0.2)), [self.rng.integers(0, count, entries), near, count - 1 - near])

    def _neighbours(self, magnitudes: Codes, shape: tuple[int, int], name: str, exponents: Codes | None = None) -> tuple[Codes, Codes]:
        """Magnitudes [entries, lines] of neighbouring exponents, and the exponent of each entry. exponents: what these should be."""
        base = self._bases(len(magnitudes), shape[0])
        if exponents is not None:
            base = np.searchsorted(_leading(name, magnitudes), exponents).clip(0, len(magnitudes) - 1)
        at = np.minimum(base[:, None] + self.rng.choice([0, 0, 0, 1, 2], shape), len(magnitudes) - 1)
        return magnitudes[at], _leading(name, magnitudes[base])

    def _part(self, pattern: str, rows: Codes, columns: Codes, c: Codes, scales: Any) -> tuple[Codes, ...]:
        """Operands of entries [entries, ...] with one pattern in one place along K."""
        spec = self.spec
        a, b = self.fill(pattern, self.side(str(spec.a), rows), self.side(str(spec.b), columns))
        operands = a.astype(spec.a.dtype), b.astype(spec.b.dtype), self.accumulators(c).astype(spec.c.dtype)
        if scales is None:
            return operands
        assert spec.scale is not None
        count = self.k // self.arithmetic.block
        of_a, of_b = np.repeat(scales[0][..., None], count, -1), np.repeat(scales[1][..., None, :], count, -2)
        return *operands, of_a.astype(spec.scale.dtype), of_b.astype(spec.scale.dtype)

    def _choose(self, count: int, most: int) -> Codes:
        """Indices: all of them, or `most` with both ends."""
        if count <= most:
            return np.arange(count)
        inner = self.rng.choice(np.arange(2, count - 2), most - 4, replace=False)
        return np.sort(np.concatenate([[0, 1, count - 2, count - 1], inner]))


def _leading(name: str, magnitudes: Codes) -> Codes:
    """The exponents of the leading bits of magnitudes."""
    spec = FORMATS[name]
    field = magnitudes >> spec.fraction
    subnormal = np.frexp(magnitudes.astype(np.float64))[1] - 1 - spec.fraction + spec.least
    return np.where(field > 0, field - spec.bias, subnormal)


def _join(parts: list[tuple[Codes, ...]]) -> Lattice:
    a, b, c, *scales = (np.concatenate(v) for v in zip(*parts, strict=True))
    return Lattice(a, b, c, (scales[0], scales[1]) if scales else None)


def lattices(arithmetic: Arithmetic, seed: int = 0, repeats: int = 1) -> dict[str, Lattice]:
    """The two lattices of an arithmetic. repeats: times as many entries."""
    builder = LatticeBuilder(arithmetic, seed)
    return {"spread": builder.spread(repeats, 64, 300), "tight": builder.tight(6 * repeats)}


def expected(arithmetic: Arithmetic, operands: Lattice) -> Codes:
    """The codes of D by the exact reference."""
    from oracles.model_reference import Fields, Kind

    model, spec, block = arithmetic
    scale = None if not block else str(spec.scale)
    kind = Kind(str(spec.a), str(spec.b), str(spec.c), str(spec.d), spec.k, scale, block or None)
    return multiply_add(Fields.from_model(model), kind, operands.a, operands.b, operands.c, operands.scales)
