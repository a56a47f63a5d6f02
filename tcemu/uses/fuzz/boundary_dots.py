"""Dot products that tell two models apart by their definitions: a sum on a rounding boundary, and terms at the last bit that a step
retains.

The models of a search often differ only in what they do with bits far below the result. Such bits decide a result only if the other terms
add up to a rounding boundary, or cancel. These operands are built so, from products with long runs of zeros: 145 * 113 = 2^14 + 1.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tcemu.engine.arithmetic.order import Order
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.formats.number_formats import Format
from tcemu.uses.fuzz.model_hypotheses import FLOOR, FRACTION_BITS, RESULT_BITS, DotArrays, ModelGroup

MAX_TABLE_BITS = 11  # significands whose products the table holds
MAX_SIGNED_DIGITS = 3  # nonzero digits of these products in the signed form with the fewest digits
EXACT_FRACTION_BITS = (24, 61)  # where last bits are placed for steps without alignment


class SparseProducts(NamedTuple):
    """Pairs of odd integers with products of few signed digits, sorted by the distance of the first digit from the last."""

    a: np.ndarray
    b: np.ndarray
    first: np.ndarray  # index of the first pair by distance, with the number of pairs at the end

    def choose(self, random: np.random.Generator, distance: np.ndarray) -> np.ndarray:
        """Return the index of a pair with this distance for each element, or of any pair if no pair has it."""
        last = len(self.first) - 2
        start, end = (self.first[np.clip(distance, 0, last) + i] for i in (0, 1))
        missing = (start == end) | (distance > last) | (distance < 0)
        start, end = np.where(missing, 0, start), np.where(missing, len(self.a), end)
        return start + (random.random(distance.shape) * (end - start)).astype(int)


@lru_cache(maxsize=16)
def sparse_products(a_bits: int, b_bits: int) -> SparseProducts:
    """List the pairs of odd significands, of at most `a_bits` and `b_bits` bits, whose products have few signed digits."""
    a, b = (np.arange(1, 1 << min(bits, MAX_TABLE_BITS), 2, dtype=np.int64) for bits in (a_bits, b_bits))
    a, b = (v.ravel() for v in np.meshgrid(a, b, indexing="ij"))
    digits = (a * b ^ 3 * a * b) >> 1  # positions of the nonzero digits of the non-adjacent form
    distance = np.frexp(digits.astype(float))[1] - 1
    few = np.bitwise_count(digits) <= MAX_SIGNED_DIGITS
    order = np.argsort(distance[few], kind="stable")
    distance = distance[few][order]
    return SparseProducts(a[few][order], b[few][order], np.searchsorted(distance, np.arange(distance[-1] + 2)))


def encode_integers(fmt: Format, negative: np.ndarray, integer: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """Return the codes of odd integers * 2^exponent, uint64; 0 for values that the format does not have."""
    length = np.frexp(integer.astype(float))[1]
    leading, least = exponent + length - 1, fmt.min_exponent - fmt.mantissa_bits
    fits = (integer > 0) & (length <= fmt.mantissa_bits + 1) & (leading <= fmt.max_exponent) & (exponent >= least)
    shift = np.where(leading >= fmt.min_exponent, fmt.mantissa_bits + 1 - length, exponent - least)
    fraction = integer.astype(np.uint64) << np.clip(shift, 0, 63).astype(np.uint64)
    field = np.clip(leading - fmt.min_exponent, 0, None).astype(np.uint64)  # the leading bit of a normal number adds 1
    code = (field << np.uint64(fmt.mantissa_bits)) + fraction
    fits &= code <= np.uint64(fmt.max_magnitude)
    sign = (negative & fits).astype(np.uint64) << np.uint64(fmt.bits - 1 - fmt.unused_bits) if fmt.signed else np.uint64(0)
    return (np.where(fits, code, np.uint64(0)) | sign) << np.uint64(fmt.unused_bits)


class _Terms(NamedTuple):
    """Terms by dot product, [dots, terms]: signs, indices of products, exponents of their last digits, and which are present."""

    negative: np.ndarray
    row: np.ndarray
    exponent: np.ndarray
    present: np.ndarray


class BoundaryDrawer:
    """Draws dot products at the rounding boundaries of pairs of models."""

    def __init__(self, spec: ProductSpec, top: int, bottom: int, seed: int):
        self.spec, self.top, self.bottom = spec, top, bottom
        self.random = np.random.default_rng(seed)
        self.table = sparse_products(spec.a.mantissa_bits + 1, spec.b.mantissa_bits + 1)

    def draw(self, count: int, groups: Sequence[ModelGroup]) -> DotArrays:
        """Draw dot products, each of which is built for two of the models.

        Args:
            count: Number of dot products.
            groups: The models. They have one order.

        Returns:
            The operands.
        """
        terms = self._draw_terms(count, groups)
        steps = Order.from_model(groups[0].base, self.spec.k).steps(self.spec.k)
        slots = np.full((len(steps), self.spec.k), -1)
        for i, step in enumerate(steps):
            slots[i, : len(step)] = step
        random, k = self.random, self.spec.k
        slots = random.permuted(slots[random.integers(0, len(steps), count)], axis=1)
        slots = np.take_along_axis(slots, np.argsort(slots < 0, axis=1, kind="stable"), 1)
        accumulated = random.integers(-3, terms.row.shape[1], count)  # the term that C holds, or none
        columns = np.arange(terms.row.shape[1])
        in_c = terms.present & (columns == accumulated[:, None])
        priority = np.argsort(~(terms.present & ~in_c) + 0.9 * random.random(in_c.shape), axis=1)
        placed = {"row": np.zeros((count, k), int), "exponent": np.zeros((count, k), int)}
        negative, used = np.zeros((count, k), bool), np.zeros((count, k), bool)
        each = np.arange(count)
        for position in range(min(k, len(columns))):
            column, slot = priority[:, position], slots[:, position]
            valid = (slot >= 0) & (terms.present & ~in_c)[each, column]
            rows, slot, column = each[valid], slot[valid], column[valid]
            placed["row"][rows, slot], placed["exponent"][rows, slot] = terms.row[rows, column], terms.exponent[rows, column]
            negative[rows, slot], used[rows, slot] = terms.negative[rows, column], True
        scales: DotArrays = {}
        exponent = placed["exponent"]
        if self.spec.scale is not None:
            exponent = self._draw_scales(scales, exponent, used)
        a, b = self._encode_products(negative, placed["row"], exponent, used)
        return {"a": a, "b": b} | scales | {"c": self._encode_accumulators(terms, in_c)}

    def _draw_terms(self, count: int, groups: Sequence[ModelGroup]) -> _Terms:
        """Draw a pair of terms that cancel, a power of two, a term on a boundary of the result, and two or three at the last bit."""
        random, spec = self.random, self.spec
        numbers = np.concatenate([group.numbers for group in groups])
        exact = np.concatenate([np.full(len(group.numbers), group.base.fraction_bits is None) for group in groups])
        pick = random.integers(0, len(numbers), (2, count))
        bits = np.where(exact[pick], random.integers(*EXACT_FRACTION_BITS, pick.shape), numbers[pick, FRACTION_BITS])
        lowest = self.bottom - 12
        floors = np.where(exact[pick], lowest, np.maximum(numbers[pick, FLOOR], lowest))
        largest = random.integers(self.bottom - 6, self.top, count)
        low, high = floors.min(0), np.minimum(floors.max(0), self.top - 1)
        near_floors = random.integers(np.minimum(low, high) - 2, high + 3)
        largest = np.where((low != high) & (random.random(count) < 0.6), near_floors, largest)
        last = (np.maximum(largest, floors) - bits)[random.integers(0, 2, count), np.arange(count)]
        cancels = random.random(count) < 0.5
        leading = np.where(cancels, random.integers(np.minimum(last, largest - 1), largest + 1), largest)
        kept = np.where(exact, spec.d.mantissa_bits, numbers[:, RESULT_BITS])[pick[0]]
        kept = np.where(random.random(count) < 0.2, spec.d.mantissa_bits, kept)
        unit = np.maximum(leading - kept, spec.d.min_exponent - spec.d.mantissa_bits) - random.integers(0, 2, count)  # half of it is a tie
        tiny = last[:, None] + random.integers(-3, 3, (count, 3))
        tiny[:, 1] = np.where(random.random(count) < 0.7, tiny[:, 0], tiny[:, 1])
        largest_row = self.table.choose(random, np.where(random.random(count) < 0.6, 0, random.integers(0, 20, count)))
        plain = np.zeros(count, int)
        distance = np.where(
            random.random((count, 3)) < 0.5, 0, np.where(random.random((count, 1)) < 0.7, unit[:, None], leading[:, None]) - tiny
        )
        tiny_rows = self.table.choose(random, distance)
        tiny_rows[:, 1] = np.where((tiny[:, 1] == tiny[:, 0]) & (random.random(count) < 0.8), tiny_rows[:, 0], tiny_rows[:, 1])
        rows = np.column_stack([largest_row, largest_row, plain, plain, tiny_rows])
        exponents = np.column_stack([largest - self._length(largest_row), largest - self._length(largest_row), leading, unit, tiny])
        sign = random.random(count) < 0.5
        opposite = random.random((count, 5)) < 0.5
        negative = np.column_stack([sign, ~sign, *(sign[:, None] ^ opposite).T])
        share = random.choice([0.3, 0.6, 0.9], (count, 1))
        present = np.column_stack([cancels, cancels, random.random((count, 5)) < [0.9, 0.6, 1, 1, 1] * np.maximum(share, 0.5)])
        present[:, 4] = True
        return _Terms(negative, rows, exponents, present)

    def _length(self, row: np.ndarray) -> np.ndarray:
        """Return the distance of the leading bit of a product of the table from its last."""
        return np.frexp((self.table.a[row] * self.table.b[row]).astype(float))[1] - 1

    def _draw_scales(self, scales: DotArrays, exponent: np.ndarray, used: np.ndarray) -> np.ndarray:
        """Draw scales of powers of two that carry one term of each block, and return the exponents that remain for the elements."""
        spec, random, scale = self.spec, self.random, self.spec.require_scale()
        count = len(exponent)
        blocks, used = (v.reshape(count, spec.scale_vec, -1) for v in (exponent, used))
        anchor = np.argmax(used + 0.5 * random.random(used.shape), axis=2)[..., None]
        room = spec.a.max_exponent + spec.b.max_exponent - 2
        total = np.take_along_axis(blocks, anchor, 2)[..., 0] - random.integers(-2, max(room, 1), anchor.shape[:2])
        total = np.where(used.any(2), total, 0)
        first = np.clip(total // 2 + random.integers(-2, 3, total.shape), 1 - scale.bias, scale.max_exponent)
        second = np.clip(total - first, 1 - scale.bias, scale.max_exponent)
        for name, part in (("scale_a", first), ("scale_b", second)):
            scales[name] = encode_integers(scale, np.zeros(part.shape, bool), np.ones(part.shape, np.int64), part)
        return (blocks - (first + second)[..., None]).reshape(exponent.shape)

    def _encode_products(
        self, negative: np.ndarray, row: np.ndarray, exponent: np.ndarray, used: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return codes of A and B for the products of the table; 0 where no codes have such a product."""
        a_fmt, b_fmt, random = self.spec.a, self.spec.b, self.random
        a, b = self.table.a[row], self.table.b[row]
        least = [fmt.min_exponent - fmt.mantissa_bits for fmt in (a_fmt, b_fmt)]
        most = [fmt.max_exponent + 1 - np.frexp(v.astype(float))[1] for fmt, v in ((a_fmt, a), (b_fmt, b))]
        low, high = np.maximum(least[0], exponent - most[1]), np.minimum(most[0], exponent - least[1])
        used = used & (low <= high)
        high = np.maximum(low, high)
        way = random.random(row.shape)  # the ends have subnormal codes of one operand, the middle has none if possible
        middle = np.clip(exponent // 2 + random.integers(-2, 3, row.shape), low, high)
        split = np.where(way < 0.2, random.integers(low, high + 1), np.where(way < 0.3, low, np.where(way < 0.4, high, middle)))
        zero = np.int64(0)
        plain = np.zeros(row.shape, bool)
        codes_a = encode_integers(a_fmt, negative & used, np.where(used, a, zero), split)
        codes_b = encode_integers(b_fmt, plain, np.where(used & (codes_a != 0), b, zero), exponent - split)
        return np.where(codes_b != 0, codes_a, np.uint64(0)), codes_b

    def _encode_accumulators(self, terms: _Terms, in_c: np.ndarray) -> np.ndarray:
        """Return C: one of the terms, in some dot products with an additional last bit."""
        random, fmt, column = self.random, self.spec.c, np.argmax(in_c, axis=1)[:, None]
        row, exponent, negative = (np.take_along_axis(v, column, 1)[:, 0] for v in (terms.row, terms.exponent, terms.negative))
        integer = np.where(in_c.any(1), self.table.a[row] * self.table.b[row], 0)
        extra = random.integers(1, fmt.mantissa_bits + 1, len(integer))
        extra = np.where(random.random(len(extra)) < 0.4, fmt.mantissa_bits, extra)
        wide = (integer == 1) & (random.random(len(integer)) < 0.5)
        ends = np.where(random.random(len(integer)) < 0.7, 1, -1)
        exponent = np.where(wide, exponent - extra, exponent)
        return encode_integers(fmt, negative, np.where(wide, (np.int64(1) << extra) + ends, integer), exponent)
