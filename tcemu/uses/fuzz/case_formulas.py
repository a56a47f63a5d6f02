"""The operands of a case as formulas over lane values, which JAX and the kernels of CPUs and GPUs render: see `arithmetic.step.values`.

What all elements of a case share is drawn once (`draw_case`), what those of one k share once per k (`draw_term`). Then each element of a
float operand is built from a word of its own (`build_float`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.arithmetic.step.values import I32, V
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.uses.fuzz.case_kinds import AIMED_BASE, ALL, EVERY, Kind, kind_thresholds
from tcemu.uses.fuzz.random_words import (
    CaseBitField,
    CaseFields,
    FloatFields,
    FloatSecondFields,
    TermFields,
    draw_words,
    mix_words,
    remix_words,
)

# streams of words: of the case, of its terms, and of its operands
CASE, TERM, STREAMS = 1, 2, {"a": 3, "b": 4, "c": 5, "e": 6, "scale_a": 7, "scale_b": 8}
# fraction bits of the known models, and floors of their steps; literal, so that a new model row changes no operand
FRACTION_WIDTHS, FLOOR_EXPONENTS = (13, 23, 24, 25, 35), {16: -21, 32: -133}
FieldReader = Callable[[CaseBitField], Any]  # reads a bit field of the case's words
T = TypeVar("T")  # lane values, or arrays of them
EDGE_FRACTIONS = 1 << 8  # values that `edge_fraction` depends on
LOWEST = -(1 << 31)  # added to words, it makes the order of signed numbers that of unsigned ones


def lookup(table: Sequence[int], index: V) -> V:
    """table[index], by a tree of selections over the bits of the index."""
    level: list[Any] = [*table]
    bit = 1
    while len(level) > 1:
        is_odd, merged = (index & bit) != 0, []
        for even, odd in zip(level[::2], [*level[1::2], *level[-1:]], strict=False):
            same = even is odd or (isinstance(even, int) and isinstance(odd, int) and even == odd)
            merged.append(even if same else is_odd.select(index.constant(odd) if isinstance(odd, int) else odd, even))
        level, bit = merged, 2 * bit
    return index.constant(level[0]) if isinstance(level[0], int) else level[0]


# ---- what the elements of a case share


class KindValues(NamedTuple, Generic[T]):
    """The fields of a `Kind`, i32."""

    base: T
    span: T
    raw: T
    edge: T
    special: T
    zero: T
    same_sign: T
    spread: T
    twins: T


class DrawnCase(NamedTuple, Generic[T]):
    """Values drawn once per case, i32."""

    kind: KindValues[T]
    low_a: T  # exponent field where A's elements start
    low_b: T
    c_mode: T  # see `CaseFields`
    c_field: T  # exponent field where C's elements start
    twin_bit: T  # the distance between twins along K, a power of two; 0: no twins
    large: T  # k of the large term
    distance: T  # how far the small terms lie below the large ones


class DrawnTerm(NamedTuple, Generic[T]):
    """Values drawn for each k."""

    word_index: T  # index of a term's words: its own k or its twin's
    flipped: T  # condition: the second of two twins
    nudged: T  # condition: the second twin differs in the last bit
    drop: T  # exponents by which the term lies below the largest


def draw_case_kind(keys: tuple[V, V], kinds: tuple[Kind, ...]) -> V:
    """Draw the index of a case's kind."""
    word = draw_words(keys, CASE, keys[0].constant(0)) + LOWEST
    number = keys[0].constant(0)
    for threshold in kind_thresholds(kinds):
        number = number + (word >= int(threshold) + LOWEST).resize(I32, signed=False)
    return number


def draw_case(op: MatrixMultiply, keys: tuple[V, V], kinds: tuple[Kind, ...]) -> DrawnCase[V]:
    """Draw what the elements of a case share."""
    spec = product_spec(op)
    words: dict[int, V] = {}
    kind_index = draw_case_kind(keys, kinds)
    kind = KindValues(*(lookup([int(getattr(kind, name)) for kind in kinds], kind_index) for name in KindValues._fields))

    def draw(field: CaseBitField) -> V:
        if field.word not in words:
            words[field.word] = draw_words(keys, CASE, keys[0].constant(field.word))
        return field.bits.extract(words[field.word])

    zero = keys[0].constant(0)
    low_a, low_b = (zero, zero) if spec.a.is_integer else _draw_start_exponents(op, draw, kind)
    twin_bit = _draw_twin_bit(op, draw, kind)
    large = _scale_to_count(draw(CaseFields.LARGE), op.matrix_shape("a")[1]) & ~twin_bit
    distance = _draw_distance(op, draw)
    c_field = zero
    if not spec.c.is_integer and not spec.a.is_integer:
        c_field = _draw_accumulator_exponent(op, draw, low_a + low_b, distance)
    return DrawnCase(kind, low_a, low_b, draw(CaseFields.C_MODE), c_field, twin_bit, large, distance)


def _scale_to_count(half: V, count: int) -> V:
    """Scale 16 drawn bits to a number from 0 to count - 1. `count` is at most 2^16."""
    return half * np.uint32(count) >> 16


def _clip(x: V, last: int) -> V:
    return x.min(last).max(0)


def max_exponent_field(fmt: Format) -> int:
    """Return the exponent field of the largest finite value."""
    return fmt.max_magnitude >> fmt.mantissa_bits


def _target_exponents(op: MatrixMultiply) -> list[int]:
    """Return the product exponents at which a result becomes subnormal, zero or infinite, or alignment ends, and that of 1.0."""
    d = product_spec(op).d
    return sorted({0, d.min_exponent, d.min_exponent - d.mantissa_bits, d.max_exponent - 4, FLOOR_EXPONENTS.get(d.bits, 0)})


@lru_cache(maxsize=4096)
def alignment_edges(op: MatrixMultiply) -> tuple[int, ...]:
    """Return the distances from the largest term at which some model truncates, or at which the result rounds."""
    d = product_spec(op).d
    return tuple(
        sorted({*FRACTION_WIDTHS, d.mantissa_bits, d.mantissa_bits + 1} if d.words == 1 else {d.mantissa_bits, 2 * d.mantissa_bits})
    )


def _draw_start_exponents(op: MatrixMultiply, draw: FieldReader, kind: KindValues[V]) -> tuple[V, V]:
    """Draw the exponent fields where A's and B's elements start: independently, or aimed by their product."""
    spec = product_spec(op)
    last_a, last_b = max_exponent_field(spec.a), max_exponent_field(spec.b)
    independent = _scale_to_count(draw(CaseFields.EXPONENT_A), last_a + 1), _scale_to_count(draw(CaseFields.EXPONENT_B), last_b + 1)
    targets = _target_exponents(op)
    aim = lookup(targets, _scale_to_count(draw(CaseFields.TARGET), len(targets))) + draw(CaseFields.MISS) - 8
    total = aim + (spec.a.bias + spec.b.bias)
    aimed_a = _clip(total.shift_right_signed(1) + draw(CaseFields.SPLIT) - 4, last_a)
    aimed = aimed_a, _clip(total - aimed_a, last_b)
    room = (kind.span > 16).select(0, kind.span)  # exponents above the start
    low_a, low_b = (
        (kind.span == EVERY).select(0, (kind.base == AIMED_BASE).select(x, (y - room).max(0)))
        for x, y in zip(aimed, independent, strict=True)
    )
    return low_a, low_b


def _draw_twin_bit(op: MatrixMultiply, draw: FieldReader, kind: KindValues[V]) -> V:
    """Draw the distance between twins. Twins of a sparse instruction are in different chunks."""
    _, k = op.matrix_shape("a")
    smallest = max(1, op.chunk_size // 2)
    if k < 2 * smallest or product_spec(op).a.is_integer:
        return kind.twins.constant(0)
    strides = [1 << i for i in range(smallest.bit_length() - 1, max(k.bit_length() - 1, 1)) if 1 << i < k] or [1]
    return (kind.twins == 1).select(lookup(strides, _scale_to_count(draw(CaseFields.STRIDE), len(strides))), 0)


def _draw_distance(op: MatrixMultiply, draw: FieldReader) -> Any:
    """Draw how far a case's small terms lie below its large ones: near a distance that changes a result, or any."""
    changes = alignment_edges(op)
    edge = lookup(changes, _scale_to_count(draw(CaseFields.EDGE), len(changes)))
    anywhere = _scale_to_count(draw(CaseFields.DISTANCE), changes[-1] + 12)
    return (draw(CaseFields.AT_AN_EDGE) == 1).select(edge + draw(CaseFields.EDGE_MISS) - 4, anywhere)


def _draw_accumulator_exponent(op: MatrixMultiply, draw: FieldReader, low: V, distance: V) -> V:
    """Draw the exponent field where C's elements start, by the case's mode. low: the sum of A's and B's starts."""
    spec = product_spec(op)
    of_products = low + (spec.c.bias - spec.a.bias - spec.b.bias)
    mode = draw(CaseFields.C_MODE)
    at_distance = of_products + (draw(CaseFields.C_ABOVE) == 1).select(distance, 0 - distance)
    near = (mode < 3).select(of_products + draw(CaseFields.C_BESIDE) - 3, at_distance)
    anywhere = _scale_to_count(draw(CaseFields.EXPONENT_C), max_exponent_field(spec.c) + 1)
    return (mode < 6).select(near, (draw(CaseFields.C_DRAWN) == 1).select(anywhere, 0))


def draw_term(keys: tuple[V, V], case: DrawnCase[V], k: V) -> DrawnTerm[V]:
    """Draw what the elements at one k share."""
    word_index = k & ~case.twin_bit
    flipped = word_index != k
    word = draw_words(keys, TERM, word_index)
    is_large = (word_index == case.large) | (TermFields.IS_LARGE.extract(word) == 0)
    drop = (case.distance + TermFields.DROP_MISS.extract(word) - 1).max(0)
    return DrawnTerm(
        word_index=word_index,
        flipped=flipped,
        nudged=flipped & (TermFields.IS_NUDGED.extract(word) == 0),
        drop=((case.kind.spread == 1) & ~is_large).select(drop, 0),
    )


def start_fields(op: MatrixMultiply, case: DrawnCase[V], drop: V) -> tuple[V, V]:
    """Split a term's drop between A's column and B's row, and return where their exponent fields start.

    A takes as much as it can, B the rest. Rows of B of a sparse instruction belong to several terms, and start at `case.low_b`.
    """
    of_a = drop.min(case.low_a)
    return case.low_a - of_a, case.low_b + (of_a - drop)


def accumulator_kind(case: DrawnCase[V]) -> tuple[KindValues[V], V]:
    """Return the kind of float C, and the exponent field of its lowest elements, by the case's mode."""
    kind = case.kind
    everywhere, zero = kind.span == EVERY, (case.c_mode == 7) & (kind.raw == 0)
    own = kind._replace(
        span=everywhere.select(EVERY, kind.span.constant(3)),
        special=zero.select(0, kind.special),
        zero=zero.select(ALL, kind.zero),
        same_sign=zero.resize(I32, signed=False),
    )
    return own, everywhere.select(0, case.c_field)


# ---- elements of float operands


class Features(NamedTuple):
    """The kinds of values that may occur among some elements. A formula leaves out the others."""

    edge: bool = True  # edge fractions
    zero: bool = True
    special: bool = True  # special values, and zeros
    raw: bool = True


EVERY_FEATURE = Features()


class FloatValues(NamedTuple, Generic[T]):
    """What an element of a float operand is drawn from, besides its word."""

    kind: KindValues[T]
    field: T  # exponent field of the lowest elements
    flipped: T | None = None  # condition: the element is negated
    nudged: T | None = None  # condition: the last bit changes


def special_magnitudes(fmt: Format) -> list[int]:
    """Return eight special magnitudes, without unused bits."""
    one, hidden = fmt.bias << fmt.mantissa_bits, 1 << fmt.mantissa_bits
    infinity = fmt.infinity if fmt.specials == "ieee" else fmt.max_magnitude
    nan = {"ieee": fmt.infinity + 1, "nan": fmt.nan, "none": fmt.max_magnitude}[fmt.specials]
    return [0, infinity, nan, fmt.max_magnitude, 1, hidden - 1, hidden, one]


def edge_fraction(fmt: Format, byte: V) -> V:
    """The upper word of an edge fraction, by the lowest byte of the second word; -1: none."""
    m = fmt.mantissa_bits - 32 * (fmt.words - 1)

    def from_variant(variant: int) -> V:  # -1 from this variant on, else 0
        return (byte >= FloatSecondFields.VARIANT.insert(variant)).resize(I32)

    place = FloatSecondFields.ONE.extract(byte) * m >> 5
    # 0 below variant 3, then the one bit, then ones from there up, then ones below it
    ones = ((from_variant(3) & 1) | from_variant(5)) << place ^ from_variant(6)
    return (ones & ((1 << m) - 1)) | from_variant(7)


def build_float(
    fmt: Format,
    word: V,
    source: FloatValues[V],
    features: Features = EVERY_FEATURE,
    find_edge_fraction: Callable[[Format, V], V] = edge_fraction,
) -> tuple[V, ...]:
    """Build a code from its word.

    Args:
        fmt: Format of the code.
        word: Word of the element.
        source: What else the element is drawn from.
        features: What may occur.
        find_edge_fraction: `edge_fraction`, or a table of it.

    Returns:
        The code, i32, and before it the lower word of an f64.
    """
    kind, more = source.kind, remix_words(word)
    low = mix_words(more) if fmt.words == 2 else None
    largest = fmt.max_magnitude >> (32 * (fmt.words - 1))
    edge = find_edge_fraction(fmt, more & EDGE_FRACTIONS - 1) if features.edge else None
    top, edged = _build_finite(fmt, word, more, low, source, edge)
    which, is_below = FloatSecondFields.WHICH_SPECIAL.extract(more), partial(FloatSecondFields.SPECIAL.is_below, more)
    is_special = is_below(kind.special)
    if features.zero or features.special:
        top = is_below(kind.special + kind.zero if features.special else kind.zero).select(0, top)
    if features.special:
        top = is_special.select(lookup([v >> (32 * (fmt.words - 1)) for v in special_magnitudes(fmt)], which), top)
    if source.nudged is not None and low is None:
        may_change = source.nudged & (top < largest)
        top = (may_change & ~is_special if features.special else may_change).select(top ^ 1, top)
    sign_bit = (fmt.bits - 1) % 32
    minus = word.constant(1 << sign_bit)
    sign = (more >> (FloatSecondFields.SIGN.low - sign_bit)) & (kind.same_sign == 0).select(minus, 0)
    if source.flipped is not None:
        sign = sign ^ source.flipped.select(minus, 0)
    if low is not None:
        return _build_lower_word(fmt, word, more, low, edged, source, top | sign)
    code = top << fmt.unused_bits | sign if fmt.signed else top << fmt.unused_bits
    if fmt.unused_bits:
        code = code | (word & ((1 << fmt.unused_bits) - 1))
    return ((kind.raw == 1).select(raw_code(fmt, word), code) if features.raw else code,)


def raw_code(fmt: Format, word: V) -> V:
    """The code of an element of which every bit is drawn."""
    return word if fmt.bits == 32 else word & ((1 << fmt.bits) - 1)


def _build_finite(fmt: Format, word: V, more: V, low: V | None, source: FloatValues[V], edge: V | None) -> tuple[V, V | None]:
    """Build the exponent and fraction of a number in the upper word, and return where the fraction is an edge fraction."""
    m = fmt.mantissa_bits - 32 * (fmt.words - 1)  # fraction bits in the upper word
    largest, all_ones = fmt.max_magnitude >> (32 * (fmt.words - 1)), (1 << m) - 1
    fraction, edged, kind = word >> (32 - m), None, source.kind
    if edge is not None:
        edge = FloatSecondFields.EDGE.is_below(more, kind.edge).select(edge, -1)
        edged = edge >= 0
        fraction = edged.select(edge, fraction)
    span = kind.span
    if fmt.exponent_bits != 8:
        span = (span == EVERY).select((1 << fmt.exponent_bits) - 1, span)
    bits, exponent_word = (FloatFields.EXPONENT, word) if low is None else (FloatFields.LOW_EXPONENT, low)
    above = bits.extract(exponent_word) * (span + 1) + (source.field << bits.width)
    field = _clip(above.shift_right_signed(bits.width), max_exponent_field(fmt))
    code = (field << m) + fraction
    if low is not None:
        return code.min(largest - 1), edged  # finite for any lower word
    return code if largest & all_ones == all_ones else code.min(largest), edged


def _build_lower_word(fmt: Format, word: V, more: V, low: V, edged: V | None, source: FloatValues[V], top: V) -> tuple[V, V]:
    """The words of an f64. Every feature may occur."""
    assert edged is not None
    kind = source.kind
    which, is_below = FloatSecondFields.WHICH_SPECIAL.extract(more), partial(FloatSecondFields.SPECIAL.is_below, more)
    variant = FloatSecondFields.VARIANT.extract(more)
    edge = (variant < 5).select(0, (variant == 5).select(-1, low & 1))
    bottom = is_below(kind.special + kind.zero).select(0, edged.select(edge, low))
    bottom = is_below(kind.special).select(lookup([v & 0xFFFFFFFF for v in special_magnitudes(fmt)], which), bottom)
    if source.nudged is not None:
        bottom = bottom ^ source.nudged.resize(I32, signed=False)
    raw = kind.raw == 1
    return raw.select(low, bottom), raw.select(word, top)
