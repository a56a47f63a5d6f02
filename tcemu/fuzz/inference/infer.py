"""What a black box that multiplies does inside: the row of its model, found by probes, each finding with the answers that show it."""

from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np

from tcemu.architectures.lookup import must_compute
from tcemu.arithmetic.model import MAX_FRACTION_BITS, Model
from tcemu.arithmetic.order import Order
from tcemu.errors import Unsupported
from tcemu.explanation.exact import leading, power, word
from tcemu.formats import F16, F32, S32, Format
from tcemu.fuzz.generators import FLOORS
from tcemu.fuzz.inference.confirmation import Account, confirmed
from tcemu.fuzz.inference.findings import Finding, Inferred
from tcemu.fuzz.inference.probes import Bench, C, Question, Unreachable, special_questions
from tcemu.fuzz.inference.trees import matching
from tcemu.fuzz.sides import Side, side
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import Instruction

MODES_PLAIN_FIRST: tuple[str, ...] = ("RZ", "RN", "RM", "RP")
ALIGNED: dict[str, list[int]] = {"RZ": [0, 0, 1], "RN": [0, 0, 2], "RM": [0, -1, 1], "RP": [1, 0, 2]}  # 1/2, -1/2 and 3/2
APART = 32  # 25 fraction bits, and the sum of up to 64 terms


def infer(op: str | Instruction, box: str | Side | Callable, *, cases: int = 512, seed: int = 1) -> Inferred:
    """Finds out by which Model a black box computes one instruction's D = A·B + C.

    op: a PTX spelling or an Instruction that computes; its shape bounds what can be seen: a step larger than its K looks like one of K.
    box: what `tcemu.fuzz.side` takes: a function from operands (NumPy codes) to D's codes, a Side, or a target, whose emulation is then
    taken apart as if it were unknown. cases: on which the model that was found is compared with the box afterwards.
    Where operands of these formats cannot show a difference the plainer value is found, as evidence says. A rounding that the probes
    cannot show is left to the comparison: `survivors` of the result are all models that agree with the box on every case.
    Raises Unsupported if `op` computes nothing, or its operands reach too little far apart to tell where they are cut; KeyboardInterrupt on
    Ctrl-C.
    """
    op = parse(op)
    must_compute(op)
    if not isinstance(cases, int | np.integer) or cases < 1:
        raise ValueError(f"cases: got {cases}; want a whole number from 1: a model that was compared on nothing is not confirmed")
    one = side(op, box)
    if op.d == S32:
        only = Finding("result", S32, "the only model with an s32 result: exact; what is probed is the end of its range")
        return confirmed(op, one, [Model(S32)], Account([only], 0), cases=cases, seed=seed)
    probe = Probe(Bench(op, one))
    try:
        models = probe.find()
    except Unreachable as error:
        raise Unsupported(
            f"{op}: its operands reach too little far apart: {error}; take an instruction of the kind with wider types"
        ) from error
    return confirmed(op, one, models, Account(probe.findings, probe.bench.asked), cases=cases, seed=seed)


class Probe:
    """The probes of one box, in the order in which one finding serves the next."""

    def __init__(self, bench: Bench):
        self.bench, self.signature = bench, bench.signature
        self.findings: list[Finding] = []
        self.up = Fraction(1)  # the sign of small terms that roundings do not carry away from what they are added to

    def note(self, field: str, value: Any, evidence: str) -> Any:
        self.findings.append(Finding(field, value, evidence))
        return value

    def find(self) -> list[Model]:
        """The models that the probes leave, the plainest first; none if no model has the order of the box."""
        zeros = self.specials()
        order = self.order()
        if order is None:
            return []
        self.sequence = self.places(order)
        width = self.bench.width
        bits = self.fraction_bits() if self.room > 2 else None
        self.alignment = "RZ" if bits is None else self.how_aligned(bits)
        between = self.result(bits)
        summed = self.summed(bits) if self.bench.by_block and bits is not None else None
        roundings = self.roundings(between, bits)
        model = Model(
            result=between,
            terms=order.terms * width,
            fraction_bits=bits,
            rounding=roundings[0],
            groups=order.groups,
            chain=self.chain(order),
            together=order.together,
            summed=summed,
            alignment=self.alignment,
        )
        if bits is None:
            if model.chain is not None and zeros == 0:
                model = model.replace(from_zero=self.note("from_zero", True, "C and products that are all -0 give +0"))
            return [model.replace(rounding=rounding) for rounding in roundings]
        model = model.replace(result_bits=self.result_bits(between, bits))
        return [model.replace(rounding=rounding, floor=self.floor(between, bits, rounding)) for rounding in roundings]

    def chain(self, order: Order) -> Any:
        return order.chain * self.bench.width if isinstance(order.chain, int) else order.chain

    # ---- specials

    def specials(self) -> int:
        """NaN words and infinities, the same in every model, so that they can only be wrong; and what -0 with products of -0 gives."""
        questions, signature = special_questions(self.signature), self.signature
        answers = self.bench.ask(list(questions.values()))
        said = ", ".join(f"{name} gives {word(signature.d, code)}" for name, code in zip(questions, answers, strict=True))
        self.note("", "specials", said)
        return int(answers[-1])

    # ---- who meets whom

    def order(self) -> Order | None:
        bench, n = self.bench, self.bench.slots
        large, small = power(bench.top), power(bench.bottom)
        if bench.top - bench.bottom < APART:
            raise Unreachable(f"terms from 2^{bench.bottom} to 2^{bench.top}, of which the least must vanish beside the largest")
        leaves = [*range(n), C]
        pairs = list(combinations(range(n + 1), 2))
        for sign in (1, -1):
            self.up = Fraction(sign)
            questions = []
            for i, j in pairs:
                values = {leaf: sign * small for leaf in leaves}
                values[leaves[i]], values[leaves[j]] = large, -large
                questions.append(values)
            table, whole = np.zeros((n + 1, n + 1), int), True
            for (i, j), value in zip(pairs, bench.values(questions), strict=True):
                survivors = value / (sign * small) if isinstance(value, Fraction) else Fraction(-1)
                if survivors.denominator != 1 or not 0 <= survivors <= n - 1:
                    whole = False
                    break
                table[i, j] = table[j, i] = n + 1 - int(survivors)
            if whole:
                break
        if whole and n > 1 and all(table[i, j] == 2 for i, j in pairs):
            raise Unreachable(f"terms of 2^{bench.bottom} survive beside every 2^{bench.top}")
        matched = matching(table) if whole else None
        how = f"{len(pairs)} pairs of 2^{bench.top} and -2^{bench.top}, all other terms 2^{bench.bottom}"
        if matched is None:
            self.note(
                "terms", "unknown", f"{how}: the numbers of terms that survive are those of no model: {sorted(set(table[0, 1:].tolist()))}"
            )
            return None
        blocks = "" if bench.width == 1 else f" (blocks of {bench.width})"
        meets = f"{matched.terms} terms{blocks} meet in a step, {matched.steps_of_instruction(n)} in all"
        last = "C with the first" if matched.chain is None else "C is added after them"
        self.note("terms", matched.terms * bench.width, f"{how}: by what survives, {meets}, {last}")
        if matched.groups > 1:
            self.note("groups", matched.groups, "which terms meet: pairs of them in turn")
        if matched.chain is not None:
            self.note(
                "chain",
                self.chain(matched),
                "which terms survive beside C" + (", chains first with each other" if matched.together else ""),
            )
        return matched

    def places(self, order: Order) -> list[int]:
        """Slots in the order in which they are added, and how many of the first are added at once."""
        first = order.steps(self.bench.slots)
        with_c = order.chain is None
        self.room = len(first[0]) + with_c
        self.steps = len(first)
        sequence = [slot for step in first for slot in step]
        if order.terms == 1:
            return [C, *sequence] if with_c else sequence
        return [*first[0], *([C] if with_c else [])]

    def terms(self, *values: Fraction) -> Question:
        """These values as the first terms that are added: at once where there is room, else one after the other."""
        if len(values) > len(self.sequence):
            raise Unreachable(f"{len(values)} terms do not meet")
        return dict(zip(self.sequence, values, strict=False))

    # ---- where terms are cut

    def fraction_bits(self) -> int | None:
        bench = self.bench
        large = bench.top
        distances, questions = [], []
        for d in range(1, MAX_FRACTION_BITS + 2):
            try:
                bench.vector(question := self.terms(power(large), -power(large), power(large - d)))
            except Unreachable:
                break
            distances.append(d)
            questions.append(question)
        survived = [d for d, value in zip(distances, bench.values(questions), strict=True) if value == power(large - d)]
        furthest = max(survived, default=0)
        if survived != list(range(1, furthest + 1)):
            raise Unreachable(f"terms survive at distances {survived}, which is no cut")
        if distances and furthest == distances[-1]:
            raise Unreachable(f"terms survive at every distance up to {furthest}, the last that they reach")
        return self.note(
            "fraction_bits", furthest, f"2^{large} - 2^{large} + 2^({large} - d) in one step is 2^({large} - d) for d to {furthest}, then 0"
        )

    def how_aligned(self, bits: int) -> str:
        """How a term is rounded to the last bit that is kept: half of it, minus half, and one and a half."""
        large, last = self.bench.top, power(self.bench.top - bits)
        parts = [last / 2, -last / 2, 3 * last / 2]
        try:
            values = self.bench.values([self.terms(power(large), -power(large), part) for part in parts])
        except Unreachable:
            return self.note("alignment", "RZ", "as every known unit: these operands cannot show it")
        in_units = [value / last for value in values if isinstance(value, Fraction)]
        found = {way: rounded for way, rounded in ALIGNED.items() if in_units == rounded}
        if len(found) != 1:
            raise Unreachable(f"terms of {', '.join(map(str, parts))} are aligned to {', '.join(map(str, values))}, which is no rounding")
        way = next(iter(found))
        if way != "RZ":
            self.note("alignment", way, f"beside 2^{large}, terms of 1/2, -1/2 and 3/2 of the last bit kept become {found[way]}")
        return way

    # ---- what a step leaves

    def result(self, bits: int | None) -> Format:
        """The format between steps, which is D's unless D is f16."""
        d = self.signature.d
        if d != F16:
            return d
        e = 10
        if bits is None:  # a running value: 1 + 2^-12 keeps its last bit only if it is wider than f16
            values = self.terms(power(0), power(-12), -power(0)) if len(self.sequence) >= 3 else None
            (value,) = self.bench.values([values]) if values else (Fraction(0),)
            wide = value == power(-12)
            self.note("result", F32 if wide else F16, f"1 + 2^-12 - 1 is {value}")
            return F32 if wide else F16
        if bits < 23 or self.room < 4:
            return self.note("result", F16, "what a step adds would fit f32 too: a detour through it cannot be seen")
        half, tiny = power(e + 1 - 11), power(e - bits)
        (value,) = self.bench.values([self.terms(power(e), power(e), half, tiny)])
        direct = value != power(e + 1)
        how = f"2^{e} + 2^{e} + half an ulp + 2^{e - bits} is {value}: rounded {'once' if direct else 'to f32 first'}"
        return self.note("result", F16 if direct else F32, how)

    def roundings(self, result: Format, bits: int | None) -> list[str]:
        """How the sum of a step is rounded; all ways if no sum of the probes needs to be."""
        d = self.signature.d
        if bits is not None and result == d and 2 ** self._carry(result, bits) + 1 > len(self.sequence):
            seen = self._precision(result, bits)
            self.note("rounding", "unknown", f"sums down to 2^-{seen} of their leading one are exact, and no probe makes a longer one")
            return list(MODES_PLAIN_FIRST)
        return [self.rounding(result, bits)]

    def _carry(self, result: Format, bits: int) -> int:
        """The sum of 2^carry equal terms has half an ulp of the result among the bits that alignment keeps."""
        return max(0, self._precision(result, bits) + 1 - bits)

    def rounding(self, result: Format, bits: int | None) -> str:
        """Sums half an ulp above an odd and an even value, and below zero."""
        d, p = self.signature.d, self._precision(result, bits)
        e = 0 if d.words == 2 else min(self.bench.top - 2, 10)
        if result == F32 and d == F16:
            odd = 3 * power(e - 11)  # with it the sum is the middle between two values of f16, which a last bit of f32 less is not
            tiny = power(e - 24)
            base = [power(e - 1), power(e - 1)] if bits is not None else []
            top = [] if bits is not None else [power(e) + odd]
            up = [*base, *([odd] if bits is not None else []), *top, -tiny]
            values = self.bench.values([self.terms(*up), self.terms(*(-v for v in up))])
            high = power(e) + 4 * power(e - 11)
            ways = {(False, False): "RZ", (True, True): "RN", (True, False): "RP", (False, True): "RM"}
            found = ways[values[0] == high, values[1] == -high]
            return self.note("rounding", found, "half an ulp of f32 below the middle between two values of f16, of either sign")
        carry = 0 if bits is None else self._carry(result, bits)
        one, ulp, half = power(e), power(e - p), power(e - p - 1)
        parts = [power(e - carry)] * 2**carry
        tail = [ulp, half] if len(parts) + 2 <= len(self.sequence) else [ulp + half]
        odd, even = [*parts, *tail], [*parts, half]
        values = self.bench.values([self.terms(*odd), self.terms(*even), self.terms(*(-v for v in even))])
        ups = values[0] == one + 2 * ulp, values[1] == one + ulp, values[2] == -one - ulp
        ways = {(True, False, False): "RN", (False, False, False): "RZ", (True, True, False): "RP", (False, False, True): "RM"}
        if ups not in ways:
            raise Unreachable(f"half an ulp above {one} goes to {', '.join(map(str, values))}, which is no rounding of {result}")
        said = ", ".join(f"{name} {'away' if up else 'back'}" for name, up in zip(("odd", "even", "-even"), ups, strict=True))
        return self.note("rounding", ways[ups], f"half an ulp (2^-{p + 1}) above values goes: {said}")

    def _precision(self, result: Format, bits: int | None) -> int:
        """Fraction bits that the result keeps: the furthest that a last bit may lie below the leading one."""
        d = self.signature.d
        if bits is None:
            return min(result.mantissa_bits, d.mantissa_bits)
        if not hasattr(self, "_kept"):
            e, furthest = self.bench.top - 4, 0
            carried = [(c, n) for c, n in ((0, 1), (1, 2), (2, 4), (3, 8)) if n + 1 <= len(self.sequence)]
            questions, wanted, distances = [], [], []
            for c, n in carried:
                for lower in range(1, bits + 1):
                    try:
                        self.bench.vector(question := self.terms(*[power(e)] * n, power(e - lower)))
                    except Unreachable:
                        continue
                    questions.append(question)
                    wanted.append(n * power(e) + power(e - lower))
                    distances.append(lower + c)
            for value, exact, distance in zip(self.bench.values(questions), wanted, distances, strict=True):
                furthest = max(furthest, distance) if value == exact else furthest
            self._kept, self._limit = furthest, max(distances)
        return self._kept

    def result_bits(self, result: Format, bits: int | None) -> int | None:
        kept = self._precision(result, bits)
        if result == self.signature.d and kept == self._limit < result.mantissa_bits:
            self.note(
                "result_bits",
                f"{kept} or more",
                f"sums keep all bits down to 2^-{kept} of their leading one; the probes make no longer sum",
            )
        if result != self.signature.d or kept >= min(result.mantissa_bits, self._limit):
            return None
        return self.note("result_bits", kept, f"sums keep bits down to 2^-{kept} of their leading one, of {result.mantissa_bits}")

    def summed(self, bits: int) -> int | None:
        """Which products of a block are added before they are cut: two halves of the last bit that is kept."""
        bench, e = self.bench, 0
        pairs = [(0, j) for j in range(1, bench.width)]
        questions: list[Question] = []
        for _, j in pairs:
            parts = [Fraction(1), *[Fraction(0)] * (j - 1), Fraction(1)]
            questions.append({0: power(e), C: -power(e), 1: parts, (1, "scale"): e - bits - 1})
        together = [j for (_, j), value in zip(pairs, bench.values(questions), strict=True) if value == power(e - bits)]
        if not together:
            return None
        size = max(together) + 1
        return self.note("summed", size, f"two products of half the last bit that is kept survive within {size}, added before they are cut")

    # ---- how low a step aligns

    def floor(self, result: Format, bits: int, rounding: str) -> int:
        """The last place that a step of the smallest products keeps: `floor` less the fraction bits."""
        d = self.signature.d
        q = result.least_exponent - result.mantissa_bits if result == d else d.least_exponent - d.mantissa_bits
        nearest, sign = result != d or rounding == "RN", -1 if "RP" in (rounding, self.alignment) else 1  # RP cuts what is negative
        # sums that reach a value of D by what alignment or rounding adds show nothing
        single = self.alignment == "RN" or {"RP", "RM"} == {rounding, self.alignment}
        tried: list[tuple[int, Question, Fraction]] = []
        for s in range(-self.bench.top, -q + bits + 24):
            values, exact = self._lowest(s, q, nearest)
            if s > bits - max(map(leading, values)):
                break  # beside the largest of them the last place is cut whatever the floor
            values, exact = [sign * v for v in values], sign * exact
            alone = [{C: exact}] if -s >= q and C in self.sequence else []
            fits = len(values) <= len(self.sequence) and not (single and len(values) > 1)
            for question in ([self.terms(*values)] if fits else []) + alone:
                with suppress(Unreachable):
                    if s <= bits - self.bench.exponent(question):  # else it is cut whatever the floor, as subnormal factors may be
                        tried.append((s, question, exact))
        answers = self.bench.values([question for _, question, _ in tried])
        kept = {s for (s, _, exact), value in zip(tried, answers, strict=True) if value == exact}
        cut = {s for (s, _, exact), value in zip(tried, answers, strict=True) if value != exact}
        if not kept or (cut and min(cut) < max(kept)):
            raise Unreachable(f"places of 2^-s are kept for s = {sorted(kept)} and cut for {sorted(cut)}, which is no floor")
        deepest = max(kept)
        pinned = {self.signature.a.least_exponent + self.signature.b.least_exponent} | (
            {self.signature.c.least_exponent} if C in self.sequence else set()
        )
        if not cut or bits - deepest in pinned:  # subnormal terms count as having the exponent of the least normal ones
            self.note("floor", f"at most {bits - deepest}", f"2^-{deepest}, the last place that the smallest operands can show, is kept")
            return min(bits - deepest, FLOORS[result.bits])  # the newest targets' own, if these operands cannot tell
        return self.note(
            "floor", bits - deepest, f"in sums of the smallest terms 2^-{deepest} is the last place kept, {bits} below the floor"
        )

    def _lowest(self, s: int, q: int, nearest: bool) -> tuple[list[Fraction], Fraction]:
        """Terms with a last bit of 2^-s, and the result if it is kept: a sum that reaches the next value of D only then."""
        if -s >= q:
            return [power(-s)], power(-s)
        start = q - 1 if nearest else q
        ones = start + s  # 2^start less 2^-s is so many ones, and the last bit makes it whole
        values = [power(q)] if nearest else []
        width, at = self._ones(), start
        while ones > 0:
            some = min(width, ones)
            values.append((power(some) - 1) * power(at - some))
            at, ones = at - some, ones - some
        return [*values, power(-s)], 2 * power(q) if nearest else power(q)

    def _ones(self) -> int:
        """Ones that one term has room for."""
        return 10 if self.bench.by_block else max(self.signature.a.mantissa_bits, self.signature.b.mantissa_bits) + 1
