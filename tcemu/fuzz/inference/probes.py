"""Questions to a black box that multiplies: exact values on single terms of one dot product, and its answer as a code."""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np

from tcemu.arithmetic.model import Signature
from tcemu.explanation.exact import Value, decode, encode, leading, power
from tcemu.formats import Format
from tcemu.fuzz.loop import result
from tcemu.fuzz.operands import Vector, as_integers, from_integers
from tcemu.fuzz.sides import Side
from tcemu.isa.instructions import Instruction
from tcemu.operations.operands import signature_of
from tcemu.sparsity import defined_fields

C = -1  # the accumulator as a slot
BATCH = 32  # cases in one call
RAW = "raw"  # values whose key is (RAW, operand, k) are codes

# What the terms of one dot product are, all others being zero: see `Bench.vector` for the keys and their values
Question = dict[Any, Any]


class Unreachable(Exception):
    """The operands of the instruction cannot hold a value that is asked for."""


@lru_cache(maxsize=1 << 14)
def holds(fmt: Format, value: Fraction) -> bool:
    """Whether the format has exactly this value."""
    return decode(fmt, encode(fmt, value, overflow="infinity")).value == value


@lru_cache(maxsize=1 << 14)
def factors(a: Format, b: Format, value: Fraction) -> tuple[int, int]:
    """Codes whose product is the value, normal ones if there are any. Raises Unreachable."""
    if value == 0:
        return 0, 0
    odd, exponent = abs(value.numerator), 1 - value.denominator.bit_length()
    while odd % 2 == 0:
        odd, exponent = odd // 2, exponent + 1
    divisors = [m for m in range(1, min(odd, 1 << 12) + 1) if odd % m == 0]
    splits = sorted({*((m, odd // m) for m in divisors), *((odd // m, m) for m in divisors)}, key=lambda s: abs(s[0] - s[1]), reverse=True)
    exponents = range(a.least_exponent - a.mantissa_bits, a.greatest_exponent + 1)
    near = sorted(exponents, key=lambda e: abs(2 * e - exponent))[:512]
    subnormal: tuple[int, int] | None = None
    for m, n in splits:
        for e in near:
            x, y = m * power(e), n * power(exponent - e) * (-1 if value < 0 else 1)
            if holds(a, x) and holds(b, y):
                if leading(x) >= a.least_exponent and leading(y) >= b.least_exponent:
                    return encode(a, x), encode(b, y)
                subnormal = subnormal or (encode(a, x), encode(b, y))
    if subnormal is None:
        raise Unreachable(f"no product of {a} and {b} is {value}")
    return subnormal


def special_questions(signature: Signature) -> dict[str, Question]:
    """Where NaN, infinities and zeros alone are at work, each by a name."""
    a, b, c = signature.a, signature.b, signature.c
    one = b.bias << b.mantissa_bits + b.unused_bits
    nan_a = (a.infinity + 1 if a.specials == "ieee" else a.nan) << a.unused_bits
    inf_a, sign = a.infinity << a.unused_bits, 1 << a.bits - 1
    questions: dict[str, Question] = {}
    if a.specials != "none":
        questions["NaN x 1"] = {(RAW, "a", 0): nan_a, (RAW, "b", 0): one}
    if a.specials == "ieee" and b.specials == "ieee":
        questions["Inf x 0"] = {(RAW, "a", 0): inf_a, (RAW, "b", 0): 0}
        questions["Inf x 1"] = {(RAW, "a", 0): inf_a, (RAW, "b", 0): one}
        if signature.k > 1:
            two = {(RAW, "a", 0): inf_a, (RAW, "b", 0): one, (RAW, "a", 1): inf_a | sign, (RAW, "b", 1): one}
            questions["Inf - Inf"] = two
    questions["C NaN"] = {(RAW, "c", 0): c.infinity + 1}
    minus = {(RAW, "c", 0): 1 << c.bits - 1}
    questions["-0 with products of +0"] = minus
    questions["-0 with products of -0"] = minus | {(RAW, "a", k): sign for k in range(signature.k)}
    return questions


class Bench:
    """A black box and one instruction. A slot is a place of K; of an instruction with several blocks of scales, a block of them."""

    def __init__(self, op: Instruction, box: Side):
        self.op, self.box, self.signature = op, box, signature_of(op)
        self.k, self.asked = self.signature.k, 0
        self.by_block = op.scale_vec is not None and op.scale_vec > 1
        self.slots = op.scale_vec if self.by_block and op.scale_vec is not None else self.k
        self.width = self.k // self.slots  # products of a slot
        self.top, self.bottom = self._range()

    def _range(self) -> tuple[int, int]:
        """Exponents of the largest and the least power of two that every slot, C and the result have room for."""
        c, d = self.signature.c, self.signature.d
        deep = 200 if d.words == 2 else 60
        if self.by_block and self.op.stype is not None:
            s = self.op.stype
            room = range(-deep, deep + 1)
            reached = [e for e in room if self._scales_of(s, e) is not None]
        else:
            reached = [e for e in range(-2 * deep, 2 * deep + 1) if self._reached(power(e))]
        top = min(max(reached), d.greatest_exponent - 1, c.greatest_exponent - 1, deep)
        bottom = max(min(reached), d.least_exponent - d.mantissa_bits, c.least_exponent - c.mantissa_bits, -deep)
        return top, bottom

    def _reached(self, value: Fraction) -> bool:
        try:
            return bool(factors(self.signature.a, self.signature.b, value))
        except Unreachable:
            return False

    @staticmethod
    @lru_cache(maxsize=4096)
    def _scales_of(fmt: Format, exponent: int) -> tuple[int, int] | None:
        """Codes of two scales whose product is 2^exponent."""
        for x in sorted(range(-127, 128), key=lambda x: abs(x - exponent // 2)):
            if holds(fmt, power(x)) and holds(fmt, power(exponent - x)):
                return encode(fmt, power(x)), encode(fmt, power(exponent - x))
        return None

    def vector(self, values: Question) -> Vector:
        """Codes of one dot product. Raises Unreachable.

        values: the key is a slot, or C, and the value a Fraction. Or the value is a list of Fractions: the products of a block before its
        scales, whose exponent then stands under (slot, "scale"). The key (RAW, operand, k) has a code.
        """
        signature, op = self.signature, self.op
        codes = {"a": [0] * self.k, "b": [0] * self.k, "c": [0]}
        if op.stype is not None:
            one = op.stype.bias << op.stype.mantissa_bits
            codes |= {name: [one] * (op.scale_vec or 1) for name in ("scale_a", "scale_b")}
        for slot, value in values.items():
            if isinstance(slot, tuple):
                if slot[0] == RAW:
                    codes[slot[1]][slot[2]] = value
                continue
            if slot == C:
                if not holds(signature.c, value):
                    raise Unreachable(f"{signature.c} has no {value}")
                codes["c"][0] = encode(signature.c, value)
            elif self.by_block:
                parts = value if isinstance(value, list) else self._parts(value)
                exponent: int = values[slot, "scale"] if isinstance(value, list) else self._exponent(value)
                scales = self._scales_of(op.stype, exponent) if op.stype is not None else None
                if scales is None or len(parts) > self.width:
                    raise Unreachable(f"no block holds {value}")
                codes["scale_a"][slot], codes["scale_b"][slot] = scales
                for at, part in enumerate(parts):
                    codes["a"][slot * self.width + at], codes["b"][slot * self.width + at] = factors(signature.a, signature.b, part)
            else:
                codes["a"][slot], codes["b"][slot] = factors(signature.a, signature.b, value)
        return codes

    def exponent(self, values: Question) -> int:
        """The largest by which a term is aligned: of a product the sum of its factors', of which subnormal ones have the least normal's.

        Raises Unreachable.
        """
        v, signature = self.vector(values), self.signature
        if self.by_block:
            return max(leading(value) for value in values.values() if isinstance(value, Fraction) and value)
        pairs = [(decode(signature.a, a), decode(signature.b, b)) for a, b in zip(v["a"], v["b"], strict=True)]
        c = decode(signature.c, v["c"][0])
        return max([x.exponent + y.exponent for x, y in pairs if x.value and y.value] + ([c.exponent] if c.value else []))

    def _exponent(self, value: Fraction) -> int:
        """Of a block whose products sum to a value: such that they are integers in units of 2^-2 with the value's leading bits."""
        odd = abs(value.numerator)
        width = (odd // (odd & -odd)).bit_length() if odd else 1
        return leading(value) - max(width - 3, 0) if value else 0

    def _parts(self, value: Fraction) -> list[Fraction]:
        """The products of a block, before its scales."""
        rest, sign, parts = abs(value) / power(self._exponent(value)), 1 if value >= 0 else -1, []
        sizes = sorted({x * y for x, y in product(*(self._values(fmt) for fmt in (self.signature.a, self.signature.b)))}, reverse=True)
        while rest:
            part = next((s for s in sizes if s <= rest), None)
            if part is None:
                raise Unreachable(f"no block holds {value}")
            parts.append(sign * part)
            rest -= part
        return parts

    @staticmethod
    def _values(fmt: Format) -> list[Fraction]:
        return [v for code in range(1 << (fmt.bits - 1)) if isinstance(v := decode(fmt, code).value, Fraction) and v > 0]

    def ask(self, questions: Sequence[Question]) -> list[int]:
        """D's code for each. Raises Unreachable if one cannot be asked."""
        op, signature = self.op, self.signature
        vectors = [self.vector(q) for q in questions]
        self.asked += len(vectors)
        side = min(op.m, op.n, 8)  # questions of one case: on the diagonal
        (m, k), n, answers = op.matrix("a"), op.n, []
        plain = defined_fields(op.chunk, op.ordered)[0] if op.sparse else 0
        kept = self._kept(plain)
        for start in range(0, len(vectors), BATCH * side):
            some = vectors[start : start + BATCH * side]
            whole = {"a": np.zeros((BATCH, m, k), object), "b": np.zeros((BATCH, op.k, n), object), "c": np.zeros((BATCH, m, n), object)}
            scales = {name: np.zeros((BATCH, *op.matrix(name)), np.uint8) for name in (("scale_a", "scale_b") if op.block_scale else ())}
            for at, v in enumerate(some):
                case, i = divmod(at, side)
                whole["a"][case, i], whole["b"][case, kept, i], whole["c"][case, i, i] = v["a"], v["b"], v["c"][0]
                if scales:
                    scales["scale_a"][case, i], scales["scale_b"][case, :, i] = v["scale_a"], v["scale_b"]
            given: dict[str, Any] = {
                name: from_integers(fmt, whole[name]) for name, fmt in (("a", signature.a), ("b", signature.b), ("c", signature.c))
            }
            given |= scales
            if op.sparse:
                given["e"] = np.full((BATCH, *op.matrix(op.metadata)), plain, np.uint8)
            d = as_integers(signature.d, np.asarray(result(op, self.box, {name: jnp.asarray(v) for name, v in given.items()})))
            answers += [int(d[at // side, at % side, at % side]) for at in range(len(some))]
        return answers

    def _kept(self, field: int) -> np.ndarray:
        """Rows of B that the stored elements meet, all metadata being this field."""
        op = self.op
        if not op.sparse:
            return np.arange(op.k)
        first, second = field & 3, field >> 2
        size = op.chunk // 4
        inside = [first >> 1] if op.chunk == 2 else [size * u + i for u in (first, second) for i in range(size)]
        return np.array([at * op.chunk + i for at in range(op.k // op.chunk) for i in inside])

    def values(self, questions: Sequence[Question]) -> list[Value]:
        """The same as numbers."""
        return [decode(self.signature.d, code).value for code in self.ask(questions)]
