"""The exact reference of any fused `Model` on whole arrays: NumPy integers of 64 bits, one operation after the other, as the rules say.

It computes what `model_reference.multiply_add` computes for one element, for millions of them. It imports nothing of tcemu. Sums are below
2^53, which is checked, and every shift is by less than 64 bits.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oracles.model_reference import Fields, Kind, model_steps
from oracles.reference import FORMATS, parts

Integers = NDArray[np.int64]
Codes = NDArray[np.unsignedinteger]
FARTHEST = 62  # a shift to the right by more leaves nothing of a number below 2^62
NOWHERE = -(10**6)  # the exponent of a term that takes no part in the alignment


class Terms(NamedTuple):
    """Numbers (-1)^negative * significand * 2^(exponent - fraction), Inf and NaN. Arrays of one shape."""

    negative: Integers
    significand: Integers
    exponent: Integers
    infinite: NDArray[np.bool_]
    nan: NDArray[np.bool_]


@lru_cache(maxsize=64)
def _table(name: str) -> Terms:
    """The terms of all codes of a format of at most 16 bits."""
    rows = [parts(name, code) for code in range(1 << FORMATS[name].bits)]
    kinds, *numbers = zip(*rows, strict=True)
    return Terms(*(np.array(v, np.int64) for v in numbers), np.array([k == "inf" for k in kinds]), np.array([k == "nan" for k in kinds]))


def decode(name: str, codes: Codes) -> Terms:
    """The terms of codes of a float format."""
    spec = FORMATS[name]
    codes = np.asarray(codes).astype(np.int64) & ((1 << spec.bits) - 1)
    if spec.bits <= 16:
        return Terms(*(v[codes] for v in _table(name)))
    magnitude = (codes & ((1 << 31) - 1)) >> spec.ignored
    field, low = magnitude >> spec.fraction, magnitude & ((1 << spec.fraction) - 1)
    top = field == (1 << spec.exponent) - 1
    significand = np.where(top, 0, np.where(field == 0, low, low | 1 << spec.fraction))
    return Terms(codes >> 31, significand, np.maximum(field, 1) - spec.bias, top & (low == 0), top & (low != 0))


def _shift_rounded(magnitude: Integers, negative: Integers, left: Integers | int, rounding: str) -> Integers:
    """magnitude * 2^left, rounded to an integer."""
    up, drop = np.maximum(left, 0), np.minimum(np.maximum(-np.asarray(left), 0), FARTHEST)
    whole = np.where(magnitude == 0, 0, magnitude << np.minimum(up, FARTHEST)) >> drop
    rest = np.where(drop > 0, magnitude & ((np.int64(1) << drop) - 1), 0)
    if rounding == "RZ":
        return whole
    if rounding == "RN":
        half = np.where(drop > 0, np.int64(1) << np.maximum(drop - 1, 0), 1)
        return whole + ((rest > half) | ((rest == half) & (whole & 1 == 1)))
    return whole + ((rest != 0) & ((negative == 1) == (rounding == "RM")))


def _signed(negative: Integers, magnitude: Integers) -> Integers:
    return np.where(negative == 1, -magnitude, magnitude)


def _encode(name: str, total: Integers, unit: Integers, rounding: str, kept: int | None) -> Integers:
    """Rules 6 and 7: codes of total * 2^unit, rounded once to `kept` fraction bits; +0 for a sum that is or becomes zero."""
    spec = FORMATS[name]
    fraction = spec.fraction if kept is None else kept
    size, negative = np.abs(total), (total < 0).astype(np.int64)
    assert size.max(initial=0) < 1 << 53
    leading = np.where(size == 0, spec.least, np.frexp(size.astype(np.float64))[1] - 1 + unit)
    head = np.maximum(leading, spec.least)
    whole = _shift_rounded(size, negative, unit - (head - fraction), rounding)
    code = (whole << (spec.fraction - fraction)) + ((np.minimum(head, 4096) - spec.least) << spec.fraction)
    code = np.where(code > spec.greatest, spec.greatest + 1, code)
    return np.where((size == 0) | (whole == 0), 0, code | negative << (spec.bits - 1))


def _add(name: str, x: Integers, y: Integers) -> Integers:
    """x + y of codes of f16 or f32, rounded to nearest once. NumPy's f16 sum is right: f32 has more than twice the bits of f16."""
    floats = {"f32": (np.uint32, np.float32), "f16": (np.uint16, np.float16)}[name]
    with np.errstate(all="ignore"):
        total = x.astype(floats[0]).view(floats[1]) + y.astype(floats[0]).view(floats[1])
    return np.where(np.isnan(total), FORMATS[name].nan, total.view(floats[0]).astype(np.int64))


def convert(source: str, target: str, codes: Integers) -> Integers:
    """Codes of f16 and f32 in the other format, rounded to nearest."""
    if source == target:
        return codes
    pairs = {"f32": (np.uint32, np.float32), "f16": (np.uint16, np.float16)}
    with np.errstate(all="ignore"):
        values = codes.astype(pairs[source][0]).view(pairs[source][1]).astype(pairs[target][1])
    return np.where(np.isnan(values), FORMATS[target].nan, values.view(pairs[target][0]).astype(np.int64))


class Side(NamedTuple):
    """A multiplicand's terms, K last, and those of its scales, one for each element; None: no scales."""

    terms: Terms
    scales: Terms | None

    def at(self, k: int) -> "Side":
        pick = lambda terms: None if terms is None else Terms(*(v[..., k] for v in terms))
        return Side(pick(self.terms), pick(self.scales))


def _product(kind: Kind, x: Side, y: Side) -> Terms:
    """Rule 2. The significand's unit is 2^(exponent - fractions of A and B)."""
    a, b = x.terms, y.terms
    nan, infinite = a.nan | b.nan, a.infinite | b.infinite
    zero = (a.infinite & _is_zero(b)) | (b.infinite & _is_zero(a))
    exponent = a.exponent + b.exponent
    for scales in (x.scales, y.scales):
        if scales is not None:
            nan, exponent = nan | scales.nan, exponent + scales.exponent
    significand = a.significand * b.significand
    return Terms(a.negative ^ b.negative, significand, np.where(significand == 0, NOWHERE, exponent), infinite & ~nan & ~zero, nan | zero)


def _is_zero(x: Terms) -> NDArray[np.bool_]:
    return (x.significand == 0) & ~x.infinite & ~x.nan


def _group(kind: Kind, pairs: list[tuple[Side, Side]]) -> Terms:
    """Products added exactly, then scaled. The sum's unit is 2^(exponent of the scales - fractions of the scales + least units)."""
    total, present = 0, False
    for x, y in pairs:
        values = [
            _signed(v.terms.negative, v.terms.significand << (v.terms.exponent - FORMATS[name].least))
            for v, name in ((x, kind.a), (y, kind.b))
        ]
        product = values[0] * values[1]
        total, present = total + product, present | (product != 0)
    (s, t) = (v.scales for v in pairs[0])
    assert s is not None and t is not None
    total, present = total * s.significand * t.significand, present & (s.significand * t.significand != 0)
    exponent = np.where(present, s.exponent + t.exponent, NOWHERE)
    return Terms((total < 0).astype(np.int64), np.abs(total), exponent, np.zeros(total.shape, bool), s.nan | t.nan)


def _fused_step(model: Fields, kind: Kind, pairs: list[tuple[Side, Side]], running: Integers) -> Integers:
    fraction = FORMATS[kind.a].fraction + FORMATS[kind.b].fraction
    if model.summed is None:
        terms = [_product(kind, *pair) for pair in pairs]
    else:
        terms = [_group(kind, pairs[at : at + model.summed]) for at in range(0, len(pairs), model.summed)]
        fraction += 2 * FORMATS[kind.scale or ""].fraction - FORMATS[kind.a].least - FORMATS[kind.b].least
    own, spec = decode(model.result, running), FORMATS[model.result]
    own = own._replace(exponent=np.where(own.significand == 0, NOWHERE, own.exponent))
    point = np.maximum(own.exponent, model.floor)  # rule 3
    for term in terms:
        point = np.maximum(point, term.exponent)
    total = np.zeros_like(point)
    nan, plus, minus = own.nan, own.infinite & (own.negative == 0), own.infinite & (own.negative == 1)
    for term, bits in [*((term, fraction) for term in terms), (own, spec.fraction)]:  # rules 4 and 5
        left = np.maximum(model.fraction_bits - bits - (point - term.exponent), -FARTHEST - 1)
        left = np.where(term.significand == 0, 0, left)
        total = total + _signed(term.negative, _shift_rounded(term.significand, term.negative, left, model.alignment))
        nan = nan | term.nan
        plus, minus = plus | (term.infinite & (term.negative == 0)), minus | (term.infinite & (term.negative == 1))
    code = _encode(model.result, total, point - model.fraction_bits, model.rounding, model.result_bits)
    code = np.where(plus, spec.greatest + 1, np.where(minus, (spec.greatest + 1) | 1 << (spec.bits - 1), code))  # rule 8
    return np.where(nan | (plus & minus), spec.nan, code)


def multiply_add(model: Fields, kind: Kind, a: Codes, b: Codes, c: Codes, scales: tuple[Codes, Codes] | None = None) -> NDArray[np.int64]:
    """The codes of D = A·B + C.

    Args:
        model: A fused model.
        kind: The formats and the products of an instruction.
        a: Codes [..., M, K], K of whole instructions.
        b: Codes [..., K, N].
        c: Codes [..., M, N].
        scales: Codes [..., M, S] and [..., S, N].
    """
    if model.multiplicand is not None:  # A and B keep their values
        x, y = (_widened(decode(name, v), name, model.multiplicand) for name, v in ((kind.a, a), (kind.b, b)))
        kind = kind._replace(a=model.multiplicand, b=model.multiplicand)
    else:
        x, y = decode(kind.a, a), decode(kind.b, b)
    row = lambda terms: Terms(*(v[..., :, None, :] for v in terms))
    column = lambda terms: Terms(*(np.swapaxes(v, -1, -2)[..., None, :, :] for v in terms))
    of = [None, None]
    if scales is not None:
        count = a.shape[-1] // scales[0].shape[-1]
        of = [decode(kind.scale or "", np.repeat(v, count, axis)) for v, axis in zip(scales, (-1, -2), strict=True)]
    left = Side(row(x), None if of[0] is None else row(of[0]))
    right = Side(column(y), None if of[1] is None else column(of[1]))
    pairs = [(left.at(k), right.at(k)) for k in range(a.shape[-1])]
    running = convert(kind.c, model.result, np.asarray(c).astype(np.int64))
    instructions = [pairs[at : at + kind.k] for at in range(0, len(pairs), kind.k)]
    if kind.d == model.result:
        return _instructions(model, kind, instructions, running)
    for own in instructions:
        running = convert(kind.d, model.result, convert(model.result, kind.d, _instructions(model, kind, [own], running)))
    return convert(model.result, kind.d, running)


def _widened(x: Terms, source: str, target: str) -> Terms:
    """The same values with the significands and exponents of another format: only a subnormal may change its exponent."""
    own, other = FORMATS[source], FORMATS[target]
    significand, exponent = x.significand << (other.fraction - own.fraction), x.exponent
    for _ in range(other.fraction):
        low = (significand < 1 << other.fraction) & (exponent > other.least) & (significand > 0)
        significand, exponent = np.where(low, significand << 1, significand), np.where(low, exponent - 1, exponent)
    return x._replace(significand=significand, exponent=exponent)


def _instructions(model: Fields, kind: Kind, instructions: list[list[tuple[Side, Side]]], c: Integers) -> Integers:
    def reduce_steps(steps: list, running: Integers) -> Integers:
        for step in steps:
            running = _fused_step(model, kind, step, running)
        return running

    dealt = [model_steps(model, products) for products in instructions]
    every = [step for steps in dealt for step in steps]
    if model.chain is None:
        return reduce_steps(every, c)
    length = len(dealt[0]) if model.chain == "k" else int(model.chain) * len(dealt[0]) // kind.k
    cut = lambda steps: [reduce_steps(steps[at : at + length], np.zeros_like(c)) for at in range(0, len(steps), length)]
    sums = cut(every)
    if model.together:
        sums = []
        for own in dealt:
            total, *others = cut(own)
            for other in others:
                total = _add(model.result, total, other)
            sums.append(total)
    for partial in sums:
        c = _add(model.result, c, partial)
    return c
