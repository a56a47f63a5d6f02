"""The reference: one dot product D = A·B + C in plain Python numbers, step by step, every term of every step kept.

Read this file first to learn what an instruction computes: it is the specification, and it runs. `Walk` takes the products in their order,
and each of its methods `fused`, `fma`, `add`, `converted` and `integer` is one kind of step. `fused` is what tensor cores do with floating
point. It follows the eight rules that stand in the docstring of `arithmetic.dot_add`, and names them where it applies them.

This file, `products` and `exact` are an oracle for the engine, `arithmetic.program`. They read the same records, `Model`, `Signature` and
`Format`, and share no arithmetic with it: numbers are Python integers and Fractions, and the order of steps is worked out here anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, trunc
from typing import Any, NamedTuple

from tcemu.arithmetic.model import Model, Signature
from tcemu.explanation.exact import (
    INFINITY,
    MINUS_INFINITY,
    NAN,
    Value,
    convert,
    decode,
    encode,
    leading,
    multiplied,
    power,
    spacing,
    special_code,
    total,
)
from tcemu.explanation.products import Product
from tcemu.formats import F64, S32, Format

QUIET = 1 << (F64.mantissa_bits - 1)
INVALID_F64 = 1 << (F64.bits - 1) | F64.infinity | QUIET  # of Inf x 0 and Inf - Inf


class Running(NamedTuple):
    """C, or what the steps before left."""

    name: str  # under which terms show it
    code: int  # of the model's result


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


# ---- the order of steps


def in_steps(products: Sequence[Product], terms: int, groups: int) -> list[Sequence[Product]]:
    """The products of one instruction, as its steps add them.

    Pairs of products are dealt out to the groups in turn. One group after the other is cut into steps of `terms` products.
    """
    steps: list[Sequence[Product]] = []
    for group in range(groups):
        members = [product for place, product in enumerate(products) if place // 2 % groups == group]
        steps += runs(members, terms)
    return steps


def steps_of_a_chain(chain: int | str, k: int, steps: int) -> int:
    """How many steps a chain is made of. k, steps: the products and the steps of one instruction.

    A chain is so many products, "k" those of one instruction. It is made of the whole steps that they fill, at least one. Where an
    instruction's last steps are short, each step counts for as many products as its steps have on average.
    """
    products_of_a_step = Fraction(k, steps)
    products_of_a_chain = k if isinstance(chain, str) else int(chain)
    return max(1, floor(products_of_a_chain / products_of_a_step))


def runs(items: Sequence[Any], length: int) -> Iterator[Sequence[Any]]:
    """The items, so many at a time; the last run may be shorter."""
    return (items[start : start + length] for start in range(0, len(items), length))


# ---- the steps


def walk(model: Model, signature: Signature, products: Sequence[Product], c: int) -> tuple[tuple[Step, ...], int]:
    """All steps of D = A·B + C, and D's code. products: those of whole instructions; c: a code of `signature.c`."""
    steps = Walk(model, signature)
    d = steps.multiply_add(products, c)
    return tuple(steps.made), d


class Walk:
    """The steps made so far, and what makes them. A running value is a code of the model's result."""

    def __init__(self, model: Model, signature: Signature) -> None:
        self.model, self.signature = model, signature
        self.made: list[Step] = []
        self.instruction = 1  # whose products are added now

    def multiply_add(self, products: Sequence[Product], c: int) -> int:
        """D's code. Where the steps' result is of another format than D, each instruction rounds to D's and the next starts from that."""
        signature, result = self.signature, self.model.result
        instructions = list(runs(products, signature.k))
        if result.is_integer:
            running = Running("C", c)
            for number, own in enumerate(instructions, 1):
                self.instruction = number
                running = Running("running", self.integer(own, running))
            return running.code
        running = Running("C", self.converted("C", c, signature.c, result))
        if signature.d == result:
            return self.instructions(instructions, running).code
        for first, own in enumerate(instructions, 1):
            code = self.converted("running", self.instructions([own], running, first).code, result, signature.d)
            running = Running("running", convert(signature.d, result, code))
        return convert(result, signature.d, running.code)

    def instructions(self, instructions: Sequence[Sequence[Product]], c: Running, first: int = 1) -> Running:
        """Some instructions, of which the first has this number: their steps one after the other from C on, or in chains."""
        model = self.model
        cut = [in_steps(products, int(model.terms), model.groups) for products in instructions]
        dealt = [(number, products) for number, steps in enumerate(cut, first) for products in steps]
        if model.chain is None:
            return self.advance(dealt, c)
        length = steps_of_a_chain(model.chain, self.signature.k, len(cut[0]))
        chains = list(runs(dealt, length))
        if not model.together:
            for chain in chains:
                c = self.add(c, Running("chain", self.chain(chain)))
            return c
        for of_one_instruction in runs(chains, len(cut[0]) // length):
            partial = self.chain(of_one_instruction[0])
            for chain in of_one_instruction[1:]:
                partial = self.add(Running("sum", partial), Running("chain", self.chain(chain))).code
            c = self.add(c, Running("chain" if len(cut[0]) // length == 1 else "sum", partial))
        return c

    def chain(self, dealt: Sequence[tuple[int, Sequence[Product]]]) -> int:
        """Steps that start from nothing, or from +0."""
        start = Running("+0", encode(self.model.result, Fraction(0))) if self.model.from_zero else None
        return self.advance(dealt, start).code

    def advance(self, dealt: Sequence[tuple[int, Sequence[Product]]], running: Running | None) -> Running:
        """Steps one after the other. dealt: for each the number of its instruction, and its products."""
        step = self.fma if self.model.fraction_bits is None else self.fused
        for number, products in dealt:
            self.instruction = number
            running = Running("running", step(products, running))
        assert running is not None
        return running

    def record(self, kind: str, terms: Sequence[Term], result: int, rounding: str, fmt: Format | None = None, **more: Any) -> int:
        """Keeps a step, and gives its result. more: further fields of `Step`."""
        step = Step(kind, self.instruction, tuple(terms), result, fmt or self.model.result, rounding, **more)
        self.made.append(step)
        return result

    def carried(self, running: Running) -> Term:
        """C or the running value as a term."""
        meant = decode(self.model.result, running.code)
        present = meant.finite and meant.value != 0
        return Term(running.name, meant.value, code=running.code, exponent=meant.exponent if present else None)

    def fused(self, products: Sequence[Product], running: Running | None) -> int:
        """Align to the largest exponent, cut, add exactly, round once."""
        model, rounding = self.model, str(self.model.rounding)
        assert model.fraction_bits is not None
        # rules 1 and 2: exact products, each with the exponent that it is aligned by
        terms = [] if running is None else [self.carried(running)]
        terms += [single(product) for product in products] if model.summed is None else [group(own) for own in runs(products, model.summed)]
        # rule 3: the largest exponent of all terms that are not zero, at least the floor
        point = max([int(model.floor), *(term.exponent for term in terms if term.exponent is not None)])
        last = point - int(model.fraction_bits)
        # rule 8: a NaN or an infinity decides the result alone
        value, rule = special(terms)
        if rule is not None:
            return self.record("fused", terms, special_code(model.result, value), rounding, point=point, last=last, rule=rule)
        # rule 4: every term is aligned, and cut below the last bit
        terms = [aligned(term, point, last, str(model.alignment)) for term in terms]
        # rule 5: what is kept is added exactly
        kept = sum_of_kept(terms)
        # rules 6 and 7: rounded once; a sum of zero is +0, an overflow is infinite
        bits = None if model.result_bits is None else int(model.result_bits)
        code = encode(model.result, kept, rounding, overflow="infinity", fraction_bits=bits)
        if decode(model.result, code).value == 0:
            code = 0
        return self.record("fused", terms, code, rounding, point=point, last=last, result_bits=bits, total=kept)

    def fma(self, products: Sequence[Product], running: Running | None) -> int:
        """One product and the running value, exact, rounded once (IEEE 754-2019, 5.4.1). Without one: the product alone."""
        model, (product,) = self.model, products
        a, b = convert(self.signature.a, model.result, product.a), convert(self.signature.b, model.result, product.b)
        # -0 adds nothing at all; +0 where sums are rounded down, since there +0 and -0 add up to -0
        nothing = encode(model.result, Fraction(0), negative_zero=model.rounding != "RM")
        before = nothing if running is None else running.code
        terms = [*([] if running is None else [self.carried(running)]), single(product)]
        signs = [product.x.negative != product.y.negative, decode(model.result, before).negative]
        return self.ieee("fma", terms, signs, [b, before, a], str(model.rounding))

    def add(self, one: Running, other: Running) -> Running:
        """An ordinary addition, to the nearest."""
        terms = [self.carried(one), self.carried(other)]
        signs = [decode(self.model.result, running.code).negative for running in (one, other)]
        return Running("running", self.ieee("add", terms, signs, [], "RN"))

    def ieee(self, kind: str, terms: list[Term], signs: list[bool], codes: list[int], rounding: str) -> int:
        """A sum of exact terms rounded once. signs: of the terms, for a sum of 0; codes: f64's, of which the first NaN is the result."""
        fmt = self.model.result
        value, rule = special(terms)
        if rule is not None:
            code = special_code(fmt, value)
            if value == NAN and fmt == F64 and codes:
                code = next((c | QUIET for c in codes if decode(F64, c).value == NAN), INVALID_F64)
            return self.record(kind, terms, code, rounding, rule=rule)
        terms = [uncut(term) for term in terms]
        exact = sum_of_kept(terms)
        negative = signs[0] if len(set(signs)) == 1 else rounding == "RM"  # a zero of unlike signs (IEEE 754-2019, 6.3)
        return self.record(kind, terms, encode(fmt, exact, rounding, negative_zero=negative), rounding, total=exact)

    def converted(self, name: str, code: int, source: Format, target: Format) -> int:
        """A code in another format. It is a step only where the formats differ."""
        if source == target:
            return code
        value, result = decode(source, code).value, convert(source, target, code)
        term = Term(name, value, code=code)
        if isinstance(value, str):
            return self.record("convert", [term], result, "RN", target, rule=f"{name} is {value}, and stays so")
        return self.record("convert", [uncut(term)], result, "RN", target, total=value)

    def integer(self, products: Sequence[Product], running: Running) -> int:
        """Exact; then the low 32 bits, or with .satfinite the nearest of s32."""
        signature = self.signature
        terms = [self.carried(running)]
        for product in products:
            value = Fraction(product.x.value != product.y.value) if signature.bit_op == "xor" else product.value
            terms.append(Term(product.name, value, (product,)))
        terms = [uncut(term) for term in terms]
        exact = sum_of_kept(terms)
        clamps = signature.clamp and signature.bit_op != "xor"
        code = encode(S32, exact) if clamps else int(exact) & (1 << S32.bits) - 1
        rounding = "clamp" if clamps else "wrap"
        rule = None if decode(S32, code).value == exact else f"the sum is beyond s32 and {rounding}s"
        return self.record("integer", terms, code, rounding, total=exact, rule=rule)


# ---- the terms of a step


def single(product: Product) -> Term:
    """A product as a term. Its exponent is the sum of those of its factors and scales; a zero has none."""
    value = product.value
    exponent = product.x.exponent + product.y.exponent
    for scale in product.scales or ():
        value, exponent = multiplied(value, scale.value), exponent + scale.exponent
    present = isinstance(value, Fraction) and value != 0
    return Term(product.name, value, (product,), exponent=exponent if present else None)


def group(products: Sequence[Product]) -> Term:
    """Products added exactly, then scaled: the exponent is that of the scales alone, even if the products cancel.

    It takes no part if all products, or a scale, are zero.
    """
    scales = products[0].scales
    assert scales is not None
    value = total(product.value for product in products)
    for scale in scales:
        value = multiplied(value, scale.value)
    present = isinstance(value, Fraction) and any(product.value for product in products) and all(scale.value for scale in scales)
    names = [product.name for product in products]
    name = names[0] if len(names) == 1 else f"{names[0]}-{names[-1].removeprefix('k ')}"
    return Term(name, value, tuple(products), exponent=sum(scale.exponent for scale in scales) if present else None)


TO_INTEGER = {"RN": round, "RZ": trunc, "RM": floor, "RP": ceil}  # of a Fraction; round goes to the even one of two


def aligned(term: Term, point: int, last: int, alignment: str) -> Term:
    """The term rounded to a multiple of 2^last: cut toward zero by "RZ"."""
    assert isinstance(term.value, Fraction)
    unit = power(last)
    kept = TO_INTEGER[alignment](term.value / unit) * unit
    return replace(term, shift=None if term.exponent is None else point - term.exponent, kept=kept, cut=term.value - kept)


def uncut(term: Term) -> Term:
    """The term with all its bits, as the steps that align nothing take it."""
    assert isinstance(term.value, Fraction)
    return replace(term, kept=term.value, cut=Fraction(0))


def sum_of_kept(terms: Sequence[Term]) -> Fraction:
    """The exact sum of what alignment left of the terms."""
    return sum((term.kept for term in terms if term.kept is not None), Fraction(0))


def special(terms: Sequence[Term]) -> tuple[str, str | None]:
    """What NaNs and infinities among the terms make of the sum, and why; None: there are none."""
    specials = [term for term in terms if isinstance(term.value, str)]
    if not specials:
        return "", None
    for term in specials:
        if term.value == NAN:
            return NAN, f"NaN: {reason(term)}"
    plus, minus = (next((term for term in specials if term.value == sign), None) for sign in (INFINITY, MINUS_INFINITY))
    if plus is not None and minus is not None:
        return NAN, f"NaN: +Inf at {plus.name} and -Inf at {minus.name}"
    return str(specials[0].value), f"{specials[0].value}: an infinity of one sign, at {', '.join(term.name for term in specials)}"


def reason(term: Term) -> str:
    """Why a term is NaN."""
    for product in term.products:
        for letter, scale in zip("AB", product.scales or (), strict=False):
            if not scale.finite:
                return f"the scale of {letter} at {product.name} is NaN"
        if product.value == NAN:
            factors = [letter for letter, factor in (("A", product.x), ("B", product.y)) if factor.value == NAN]
            if not factors:
                return f"Inf x 0 at {product.name}"
            return f"{' and '.join(factors)} {'is' if len(factors) == 1 else 'are'} NaN at {product.name}"
    return f"{term.name} is NaN"
