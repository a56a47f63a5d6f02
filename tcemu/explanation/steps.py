"""One dot product by the step program, in plain Python numbers, every term of every step kept.

It reads the same `Model` as `arithmetic.program` and shares no arithmetic with it, so each is a test of the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from math import ceil, floor, trunc
from typing import Any

from tcemu.arithmetic.model import Model, Signature
from tcemu.explanation.exact import (
    INFINITY,
    MINUS_INFINITY,
    NAN,
    Decoded,
    Value,
    convert,
    decode,
    encode,
    infinity,
    leading,
    power,
    spacing,
    special_code,
)
from tcemu.formats import F64, ROUNDINGS, S32, Format

QUIET = 1 << (F64.mantissa_bits - 1)
Running = tuple[str, int]  # C or the running value: the name under which terms show it, and its code
INVALID_F64 = 1 << (F64.bits - 1) | F64.infinity | QUIET  # Inf x 0 and Inf - Inf


@dataclass(frozen=True)
class Product:
    """One product on its way in: where it stands along K, its codes, and what they mean once A and B are converted."""

    index: int
    name: str  # of its place along K; in a sparse instruction, of the element of B
    a: int
    b: int
    x: Decoded
    y: Decoded
    scales: tuple[Decoded, Decoded] | None = None
    scale_codes: tuple[int, int] | None = None

    @property
    def value(self) -> Value:
        """Without scales."""
        return product(self.x.value, self.y.value)


@dataclass(frozen=True)
class Term:
    """What one step adds: C, the running value, a product, or a group of products.

    value: exact; exponent: the one it is aligned by (None: it takes no part in the alignment); shift: places to the right of the step's
    largest exponent; kept, cut: what alignment leaves of the value, and takes (None in a step that met a NaN or an infinity).
    """

    name: str
    value: Value
    products: tuple[Product, ...] = ()  # none: C or the running value
    code: int | None = None  # of C or the running value
    exponent: int | None = None
    shift: int | None = None
    kept: Fraction | None = None
    cut: Fraction | None = None


@dataclass(frozen=True)
class Step:
    """One operation with its rounding.

    kind: "fused" (align, cut, add, round), "fma" (one exact product), "add" (a chain's outcome to C), "convert" (to another format) or
    "integer" (exact, then wrapped or clamped).
    """

    kind: str
    instruction: int
    terms: tuple[Term, ...]
    result: int  # a code of `fmt`
    fmt: Format
    rounding: str
    point: int | None = None  # fused: the largest exponent
    last: int | None = None  # fused: the exponent of the last bit that alignment keeps
    result_bits: int | None = None  # fraction bits that the result keeps; None: all of `fmt`
    total: Fraction | None = None  # the exact sum of what was kept; None if a NaN or an infinity took part
    rule: str | None = None  # the special rule that made the result

    @property
    def value(self) -> Value:
        return decode(self.fmt, self.result).value

    @property
    def end(self) -> int:
        """The exponent of the last bit that the result has room for."""
        given_up = 0 if self.result_bits is None else self.fmt.mantissa_bits - self.result_bits
        return leading(spacing(self.fmt, self.total or Fraction(0))) + given_up

    @property
    def lost(self) -> Fraction | None:
        """What the rounding took from the sum: sum minus result; None if the result is no finite number."""
        value = self.value
        return None if self.total is None or isinstance(value, str) else self.total - value


def product(x: Value, y: Value) -> Value:
    """Exact, by the rules for infinities."""
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x * y
    if NAN in (x, y) or 0 in (x, y):
        return NAN
    return infinity(sum(v == MINUS_INFINITY or (isinstance(v, Fraction) and v < 0) for v in (x, y)) == 1)


def total(values: Iterable[Value]) -> Value:
    """The exact sum, by the rules for infinities."""
    values = list(values)
    found = {v for v in values if isinstance(v, str)}
    if not found:
        return sum((v for v in values if isinstance(v, Fraction)), Fraction(0))
    return found.pop() if len(found) == 1 else NAN


def concrete(model: Model) -> Model:
    """The model with plain numbers in place of arrays. Raises TypeError where they are traced."""
    found = {}
    for name in ("terms", "fraction_bits", "floor", "result_bits", "rounding", "alignment"):
        value = getattr(model, name)
        if value is not None and not isinstance(value, int | str):
            try:
                found[name] = int(value)
            except TypeError as error:
                raise TypeError(f"model: its {name} is traced; explain wants plain numbers, so call it outside jit and vmap") from error
    for name in found.keys() & {"rounding", "alignment"}:
        found[name] = ROUNDINGS[found[name]]
    return model.replace(**found) if found else model


def walk(model: Model, signature: Signature, products: Sequence[Product], c: int) -> tuple[tuple[Step, ...], int]:
    """All steps of D = A·B + C, and D's code. products: those of whole instructions; c: a code of `signature.c`."""
    return Walk(model, signature).run(products, c)


class Walk:
    """The steps made so far, and what makes them. A running value is a code of the model's result."""

    def __init__(self, model: Model, signature: Signature) -> None:
        self.model, self.signature, self.steps = model, signature, list[Step]()
        self.instruction = 1

    def run(self, products: Sequence[Product], c: int) -> tuple[tuple[Step, ...], int]:
        signature, result = self.signature, self.model.result
        instructions = [products[at : at + signature.k] for at in range(0, len(products), signature.k)]
        if result.is_integer:
            for number, some in enumerate(instructions, 1):
                self.instruction = number
                c = self.integer(some, ("C" if number == 1 else "running", c))
            return tuple(self.steps), c
        running = ("C", self.converted("C", c, signature.c, result))
        if signature.d == result:
            code = self.chains(instructions, running)[1]
            return tuple(self.steps), code
        for first, some in enumerate(instructions, 1):
            # what one instruction leaves is rounded to D's format, and the next one starts from that
            code = self.converted("running", self.chains([some], running, first)[1], result, signature.d)
            running = ("running", convert(code, signature.d, result))
        return tuple(self.steps), convert(running[1], result, signature.d)

    def chains(self, instructions: Sequence[Sequence[Product]], c: Running, first: int = 1) -> Running:
        """The steps of some instructions, one after the other or in chains."""
        model, k = self.model, self.signature.k
        per = min(int(model.terms), k // model.groups)
        dealt = [(number, step) for number, some in enumerate(instructions, first) for step in self.dealt(some, per)]
        if model.chain is None:
            return self.advance(dealt, c)
        per_instruction = model.groups * -(-k // (model.groups * per))
        length = per_instruction if isinstance(model.chain, str) else max(1, int(model.chain) * per_instruction // k)
        each = [dealt[at : at + length] for at in range(0, len(dealt), length)]
        together = per_instruction // length if model.together else 1
        start = ("+0", encode(model.result, Fraction(0))) if model.from_zero else None
        for at in range(0, len(each), together):
            partial = self.advance(each[at], start)
            for one in each[at + 1 : at + together]:
                partial = self.add(("sum", partial[1]), ("chain", self.advance(one, start)[1]))
            c = self.add(c, ("chain" if together == 1 else "sum", partial[1]))
        return c

    def dealt(self, products: Sequence[Product], per: int) -> Iterable[Sequence[Product]]:
        """The products of one instruction, step by step: pair p goes to group p mod `groups`, and a step stays in its group."""
        for group in range(self.model.groups):
            members = [p for at, p in enumerate(products) if at // 2 % self.model.groups == group]
            yield from (members[at : at + per] for at in range(0, len(members), per))

    def advance(self, dealt: Sequence[tuple[int, Sequence[Product]]], running: Running | None) -> Running:
        step = self.fma if self.model.fraction_bits is None else self.fused
        for number, products in dealt:
            self.instruction = number
            running = ("running", step(products, running))
        assert running is not None
        return running

    def record(self, kind: str, terms: Sequence[Term], result: int, rounding: str, fmt: Format | None = None, **facts: Any) -> int:
        self.steps.append(Step(kind, self.instruction, tuple(terms), result, fmt or self.model.result, rounding, **facts))
        return result

    def carried(self, running: Running) -> Term:
        """C or the running value as a term."""
        name, code = running
        found = decode(self.model.result, code)
        return Term(name, found.value, code=code, exponent=found.exponent if found.finite and found.value else None)

    def fused(self, products: Sequence[Product], running: Running | None) -> int:
        """Align to the largest exponent, cut, add exactly, round once."""
        model, rounding = self.model, str(self.model.rounding)
        assert model.fraction_bits is not None
        terms = [] if running is None else [self.carried(running)]
        terms += [single(p) for p in products] if model.summed is None else [group(some) for some in batched(products, model.summed)]
        point = max([int(model.floor), *(t.exponent for t in terms if t.exponent is not None)])
        last = point - int(model.fraction_bits)
        value, rule = special(terms)
        if rule is not None:
            return self.record("fused", terms, special_code(model.result, value), rounding, point=point, last=last, rule=rule)
        terms = [aligned(t, point, last, str(model.alignment)) for t in terms]
        found = sum((t.kept for t in terms if t.kept is not None), Fraction(0))
        bits = None if model.result_bits is None else int(model.result_bits)
        code = encode(model.result, found, rounding, overflow="infinity", fraction_bits=bits)
        if decode(model.result, code).value == 0:
            code = 0  # every zero is +0
        return self.record("fused", terms, code, rounding, point=point, last=last, result_bits=bits, total=found)

    def fma(self, products: Sequence[Product], running: Running | None) -> int:
        """One product and the running value, exact, rounded once (IEEE 754-2019, 5.4.1). Without one: the product alone."""
        model, (one,) = self.model, products
        a, b = convert(one.a, self.signature.a, model.result), convert(one.b, self.signature.b, model.result)
        nothing = encode(model.result, Fraction(0), negative_zero=True)  # -0 adds nothing at all
        before = nothing if running is None else running[1]
        terms = [*([] if running is None else [self.carried(running)]), single(one)]
        signs, codes = [one.x.negative != one.y.negative, decode(model.result, before).negative], [b, before, a]
        return self.ieee("fma", terms, signs, codes, str(model.rounding))

    def add(self, one: Running, other: Running) -> Running:
        """An ordinary addition, to the nearest."""
        terms = [self.carried(one), self.carried(other)]
        signs = [decode(self.model.result, code).negative for _, code in (one, other)]
        return "running", self.ieee("add", terms, signs, [], "RN")

    def ieee(self, kind: str, terms: list[Term], signs: list[bool], codes: list[int], rounding: str) -> int:
        """A sum of exact terms rounded once. signs: of the terms, for a sum of 0; codes: f64's, of which the first NaN is the result."""
        fmt = self.model.result
        value, rule = special(terms)
        if rule is not None:
            code = special_code(fmt, value)
            if value == NAN and fmt is F64 and codes:
                code = next((c | QUIET for c in codes if decode(F64, c).value == NAN), INVALID_F64)
            return self.record(kind, terms, code, rounding, rule=rule)
        terms = [replace(t, kept=t.value, cut=Fraction(0)) for t in terms]
        found = sum((t.kept for t in terms if t.kept is not None), Fraction(0))
        negative = signs[0] if len(set(signs)) == 1 else rounding == "RM"  # a zero of unlike signs (IEEE 754-2019, 6.3)
        return self.record(kind, terms, encode(fmt, found, rounding, negative_zero=negative), rounding, total=found)

    def converted(self, name: str, code: int, source: Format, target: Format) -> int:
        if source == target:
            return code
        value, result = decode(source, code).value, convert(code, source, target)
        if isinstance(value, str):
            term, rule = Term(name, value, code=code), f"{name} is {value}, and stays so"
            return self.record("convert", [term], result, "RN", target, rule=rule)
        term = Term(name, value, code=code, kept=value, cut=Fraction(0))
        return self.record("convert", [term], result, "RN", target, total=value)

    def integer(self, products: Sequence[Product], running: Running) -> int:
        """Exact; then the low 32 bits, or with .satfinite the nearest of s32."""
        signature = self.signature
        terms = [self.carried(running)]
        for one in products:
            value = one.value
            if signature.bit_op == "xor":
                value = Fraction(one.x.value != one.y.value)
            terms.append(Term(one.name, value, (one,)))
        terms = [replace(t, kept=t.value, cut=Fraction(0)) for t in terms]
        found = sum((t.kept for t in terms if t.kept is not None), Fraction(0))
        clamps = signature.clamp and signature.bit_op != "xor"
        code = encode(S32, found) if clamps else int(found) & (1 << S32.bits) - 1
        rounding = "clamp" if clamps else "wrap"
        rule = None if decode(S32, code).value == found else f"the sum is beyond s32 and {rounding}s"
        return self.record("integer", terms, code, rounding, total=found, rule=rule)


def single(one: Product) -> Term:
    """A product as a term: its exponent is the sum of those of its factors and scales, and a zero has none."""
    scales = one.scales or ()
    value = one.value
    for s in scales:
        value = product(value, s.value)
    present = isinstance(value, Fraction) and value != 0
    exponent = one.x.exponent + one.y.exponent + sum(s.exponent for s in scales) if present else None
    return Term(one.name, value, (one,), exponent=exponent)


def group(some: Sequence[Product]) -> Term:
    """Products added exactly, then scaled: the exponent is that of the scales alone, even if the products cancel.

    It takes no part if all products, or a scale, are zero.
    """
    scales = some[0].scales
    assert scales is not None
    value = total(p.value for p in some)
    for s in scales:
        value = product(value, s.value)
    present = isinstance(value, Fraction) and any(p.value for p in some) and all(s.value for s in scales)
    name = some[0].name if len(some) == 1 else f"{some[0].name}-{some[-1].name.removeprefix('k ')}"
    return Term(name, value, tuple(some), exponent=sum(s.exponent for s in scales) if present else None)


INTEGERS = {"RN": round, "RZ": trunc, "RM": floor, "RP": ceil}  # of a Fraction; round goes to the even one of two


def aligned(term: Term, point: int, last: int, alignment: str) -> Term:
    """The term rounded to a multiple of 2^last: cut toward zero by "RZ"."""
    assert isinstance(term.value, Fraction)
    unit = power(last)
    kept = INTEGERS[alignment](term.value / unit) * unit
    return replace(term, shift=None if term.exponent is None else point - term.exponent, kept=kept, cut=term.value - kept)


def special(terms: Sequence[Term]) -> tuple[str, str | None]:
    """What NaNs and infinities among the terms make of the sum, and why; None: there are none."""
    odd = [t for t in terms if isinstance(t.value, str)]
    if not odd:
        return "", None
    for term in odd:
        if term.value == NAN:
            return NAN, f"NaN: {reason(term)}"
    plus, minus = (next((t for t in odd if t.value == sign), None) for sign in (INFINITY, MINUS_INFINITY))
    if plus is not None and minus is not None:
        return NAN, f"NaN: +Inf at {plus.name} and -Inf at {minus.name}"
    return str(odd[0].value), f"{odd[0].value}: an infinity of one sign, at {', '.join(t.name for t in odd)}"


def reason(term: Term) -> str:
    """Why a term is NaN."""
    for one in term.products:
        for letter, scale in zip("AB", one.scales or (), strict=False):
            if not scale.finite:
                return f"the scale of {letter} at {one.name} is NaN"
        if one.value == NAN:
            which = [letter for letter, v in (("A", one.x), ("B", one.y)) if v.value == NAN]
            return f"{' and '.join(which)} {'is' if len(which) == 1 else 'are'} NaN at {one.name}" if which else f"Inf x 0 at {one.name}"
    return f"{term.name} is NaN"


def batched(items: Sequence[Product], size: int) -> Iterable[list[Product]]:
    iterator = iter(items)
    return iter(lambda: list(islice(iterator, size)), [])
