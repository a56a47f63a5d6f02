"""The exact reference of any `Model`: one element of D = A·B + C by its fields, in plain Fractions.

Written from what the docstring of Model and the eight rules of a fused step say. It imports nothing of tcemu. A model comes as anything
that has its fields.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor, trunc
from typing import Any, NamedTuple

from oracles.reference import FORMATS, add, convert, decode, encode, encode_inf, fma, parts, power_of_two, sign_bit

Value = Fraction | str | tuple[str, int]  # exact, "nan", or ("inf", sign)
MODES = ("RN", "RZ", "RM", "RP")
INTEGER_FIELDS = {"RN": round, "RZ": trunc, "RM": floor, "RP": ceil}  # of a Fraction; round goes to the even one of two


class Kind(NamedTuple):
    """What of an instruction counts: formats by name, products, and those that share a scale."""

    a: str
    b: str
    c: str
    d: str
    k: int
    scale: str | None = None
    block: int | None = None
    rounding: str | None = None  # the instruction's own, in place of the model's


class Fields(NamedTuple):
    """A model in plain numbers and names."""

    result: str
    terms: int
    fraction_bits: int | None
    floor: int
    rounding: str
    result_bits: int | None
    multiplicand: str | None
    groups: int
    chain: int | str | None
    together: bool
    summed: int | None
    alignment: str
    from_zero: bool

    @classmethod
    def from_model(cls, model: Any) -> "Fields":
        """Arrays become numbers, numbers of roundings their names, formats their names."""
        values = {name: getattr(model, name) for name in cls._fields}
        for name in ("terms", "fraction_bits", "floor", "result_bits"):
            values[name] = None if values[name] is None else int(values[name])
        for name in ("rounding", "alignment"):
            values[name] = values[name] if isinstance(values[name], str) else MODES[int(values[name])]
        for name in ("result", "multiplicand"):
            values[name] = None if values[name] is None else str(values[name])
        return cls(**values)


class Scaled(NamedTuple):
    """One place along K: the codes of a product's factors, in the formats that are multiplied, and of their scales."""

    a: int
    b: int
    scale_a: int = 0
    scale_b: int = 0


class Term(NamedTuple):
    """What a step adds: its exact value, and the exponent that it is aligned by; None where it takes no part."""

    value: Value
    exponent: int | None


def is_defined(model: Fields, kind: Kind) -> bool:
    """Whether the model has a meaning for the instruction: all that the documents exclude, written out."""
    exact, scaled = model.fraction_bits is None, kind.scale is not None
    mantissa = FORMATS[model.result].fraction
    if not (1 <= model.terms <= 65536 and -1024 <= model.floor <= 512 and (exact or 1 <= model.fraction_bits <= 40)):
        return False
    if model.result_bits is not None and not 1 <= model.result_bits <= mantissa:
        return False
    if exact and (model.terms != 1 or model.alignment != "RZ" or model.result_bits or model.multiplicand or model.summed or scaled):
        return False
    if not exact and (model.result == "f64" or kind.a == "f64"):
        return False
    if (model.together and model.chain is None) or (model.from_zero and (model.chain is None or not exact)):
        return False
    if scaled and model.summed is None and kind.scale != "ue8m0":
        return False
    if model.summed is not None:
        small = kind.a == kind.b == "e2m1"
        if not scaled or not small or model.terms % model.summed or kind.block % model.summed or model.multiplicand or model.groups > 1:
            return False
    if model.groups > 1 and kind.k % (2 * model.groups):
        return False
    if not _whole_chains(model, kind.k):
        return False
    common = model.result if exact else model.multiplicand
    for fmt in (kind.a, kind.b):
        if common is not None and not _holds(common, fmt):
            return False
    widths = [FORMATS[common or fmt].fraction + 1 for fmt in (kind.a, kind.b)]
    return exact or sum(widths) <= 24


def _whole_chains(model: Fields, k: int) -> bool:
    if not isinstance(model.chain, int):
        return True
    count = len(model_steps(model, list(range(k))))
    steps = Fraction(model.chain * count, k)
    return steps.denominator == 1 and not (model.together and Fraction(count) % steps)


def _holds(wide: str, narrow: str) -> bool:
    """Every finite value of the one is a value of the other."""
    w, n = FORMATS[wide], FORMATS[narrow]
    tops = [decode(name, spec.greatest << spec.ignored) for name, spec in ((wide, w), (narrow, n))]
    return w.fraction >= n.fraction and w.least - w.fraction <= n.least - n.fraction and tops[0] >= tops[1] and w.top == "ieee"


def model_steps(model: Fields, products: list) -> list[list]:
    """The products of one instruction, step by step: pairs dealt out to groups, a group after the other, `terms` at a time."""
    steps = []
    for group in range(model.groups):
        own = [product for at, product in enumerate(products) if at // 2 % model.groups == group]
        steps += [own[at : at + model.terms] for at in range(0, len(own), model.terms)]
    return steps


def multiply_add(model: Fields, kind: Kind, a: Sequence[int], b: Sequence[int], c: int, scales: Any = None) -> int:
    """The code of D. a, b: codes of whole instructions; scales: two lists of codes, spread evenly over K."""
    model = model if kind.rounding is None else model._replace(rounding=kind.rounding)
    common = model.result if model.fraction_bits is None else model.multiplicand
    if common is not None:
        a, b = ([code if fmt == common else convert(fmt, common, code) for code in codes] for codes, fmt in ((a, kind.a), (b, kind.b)))
        kind = kind._replace(a=common, b=common)
    products = [Scaled(x, y) for x, y in zip(a, b, strict=True)]
    if scales is not None:
        spread = [[codes[at * len(codes) // len(a)] for at in range(len(a))] for codes in scales]
        products = [Scaled(x, y, *pair) for x, y, *pair in zip(a, b, *spread, strict=True)]
    running = c if kind.c == model.result else convert(kind.c, model.result, c)
    instructions = [products[at : at + kind.k] for at in range(0, len(products), kind.k)]
    if kind.d == model.result:
        return _instructions(model, kind, instructions, running)
    for own in instructions:
        running = convert(kind.d, model.result, convert(model.result, kind.d, _instructions(model, kind, [own], running)))
    return convert(model.result, kind.d, running)


def _instructions(model: Fields, kind: Kind, instructions: list[list[Scaled]], c: int) -> int:
    """From c on, a code of the result, to another."""

    def reduce_steps(steps: list[list[Scaled]], running: int | None) -> int:
        for step in steps:
            running = _fma(model, step[0], running) if model.fraction_bits is None else _fused_step(model, kind, step, running)
        return running

    dealt = [model_steps(model, products) for products in instructions]
    every = [step for steps in dealt for step in steps]
    if model.chain is None:
        return reduce_steps(every, c)
    length = len(dealt[0]) if model.chain == "k" else model.chain * len(dealt[0]) // kind.k
    start = 0 if model.from_zero else None
    cut = lambda steps: [reduce_steps(steps[at : at + length], start) for at in range(0, len(steps), length)]
    if model.together:
        sums = []
        for own in dealt:
            total, *others = cut(own)
            for other in others:
                total = add(total, other, model.result)
            sums.append(total)
    else:
        sums = cut(every)
    for partial in sums:
        c = add(c, partial, model.result)
    return c


def _fma(model: Fields, product: Scaled, running: int | None) -> int:
    """An exact step. Without a running value the product alone, rounded: a zero keeps the product's sign."""
    fmt = model.result
    if running is None:
        negative = sign_bit(fmt, product.a) ^ sign_bit(fmt, product.b)
        running = negative << FORMATS[fmt].bits - 1  # a zero of the product's own sign changes nothing, in any rounding
    return fma(product.a, product.b, running, fmt, model.rounding)


def _times(x: Value, y: Value) -> Value:
    if "nan" in (x, y) or (isinstance(x, tuple) and y == 0) or (isinstance(y, tuple) and x == 0):
        return "nan"
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x * y
    return "inf", int((x[1] if isinstance(x, tuple) else x < 0) != (y[1] if isinstance(y, tuple) else y < 0))


def _term(kind: Kind, product: Scaled) -> Term:
    """Rule 2: the exact product; its exponent is the sum of those of its factors and scales."""
    factors = [(kind.a, product.a), (kind.b, product.b)]
    factors += [] if kind.scale is None else [(kind.scale, product.scale_a), (kind.scale, product.scale_b)]
    value = Fraction(1)
    for factor in factors:
        value = _times(value, decode(*factor))
    exponent = sum(parts(*factor)[3] for factor in factors)
    return Term(value, exponent if isinstance(value, Fraction) and value else None)


def _group(kind: Kind, products: list[Scaled]) -> Term:
    """Products added exactly, then scaled; aligned by the scales' exponents alone, if a product and both scales are not zero."""
    scales = [(kind.scale, products[0].scale_a), (kind.scale, products[0].scale_b)]
    if any(decode(*scale) == "nan" for scale in scales):
        return Term("nan", None)
    values = [decode(kind.a, product.a) * decode(kind.b, product.b) for product in products]
    scale = decode(*scales[0]) * decode(*scales[1])
    present = any(values) and scale
    return Term(sum(values) * scale, sum(parts(*s)[3] for s in scales) if present else None)


def _fused_step(model: Fields, kind: Kind, products: list[Scaled], running: int | None) -> int:
    if model.summed is None:
        terms = [_term(kind, product) for product in products]
    else:
        terms = [_group(kind, products[at : at + model.summed]) for at in range(0, len(products), model.summed)]
    if running is not None:
        value = decode(model.result, running)
        terms.append(Term(value, parts(model.result, running)[3] if isinstance(value, Fraction) and value else None))
    values, spec = [term.value for term in terms], FORMATS[model.result]
    signs = {value[1] for value in values if isinstance(value, tuple)}
    if "nan" in values or len(signs) == 2:  # rule 8
        return spec.nan
    if signs:
        return encode_inf(spec, signs.pop())
    point = max([model.floor, *(term.exponent for term in terms if term.exponent is not None)])  # rule 3
    unit = power_of_two(point - model.fraction_bits)
    total = sum(INTEGER_FIELDS[model.alignment](value / unit) for value in values) * unit  # rules 4 and 5
    return _round_sum(model, Fraction(total))


def _round_sum(model: Fields, value: Fraction) -> int:
    """Rules 6 and 7: rounded once, to so many fraction bits; zero is +0, and an overflow infinite."""
    spec, kept = FORMATS[model.result], model.result_bits
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= power_of_two(exponent) > size
    last = max(exponent, spec.least) - (spec.fraction if kept is None else kept)
    result = INTEGER_FIELDS[model.rounding](value / power_of_two(last)) * power_of_two(last)
    if abs(result) > decode(model.result, spec.greatest):
        return encode_inf(spec, int(value < 0))
    return encode(model.result, result) if result else 0
