"""Probes of a black box that multiplies: exact values as single terms of one dot product, and its answers as codes.

The order of the terms appears as a summation tree. Its probe is that of FPRev (Xie, Gao and Jia, arXiv 2411.00442): two leaves hold M and
-M and all others one small number, so that the result counts the leaves outside the smallest subtree that holds both.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np

from tcemu.engine.arithmetic.order import Order
from tcemu.engine.arithmetic.product_spec import ProductSpec, product_spec
from tcemu.engine.arithmetic.reference.exact_values import Value, decode, encode, leading_exponent, power_of_two
from tcemu.engine.formats.number_formats import S32, Format
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.engine.layouts.sparsity import defined_fields
from tcemu.uses.fuzz.case_generator import DotOperands, codes_to_integers, place_dots
from tcemu.uses.fuzz.comparison_loop import compute_result
from tcemu.uses.fuzz.implementations import Implementation

SummationTree = int | tuple  # a leaf's number, or the children that one step adds; C has the last number
CHAINS = (None, "k", 2, 4, 8, 16, 32)


def summation_tree(order: Order, k: int) -> SummationTree:
    """Return how `arithmetic.program` adds k products and C, which is leaf number k."""
    accumulator: SummationTree = k
    if order.chain is None:
        return _chain_steps(accumulator, order.steps(k))
    chains = [_chain_steps(None, steps) for steps in order.chains(k)]
    if order.together:
        return accumulator, _add_in_sequence(chains[0], chains[1:])
    return _add_in_sequence(accumulator, chains)


def _chain_steps(start: SummationTree | None, steps: Sequence[list[int]]) -> SummationTree:
    """Chain steps, each of which adds to the result of the one before."""
    running = start
    for products in steps:
        members = products if running is None else [running, *products]
        running = tuple(members) if len(members) > 1 else members[0]
    assert running is not None
    return running


def _add_in_sequence(start: SummationTree, others: Sequence[SummationTree]) -> SummationTree:
    """Add the other sums one by one."""
    for other in others:
        start = start, other
    return start


def subtree_sizes(root: SummationTree, leaves: int, *, lossless: bool = False) -> np.ndarray:
    """Count the leaves of the smallest subtree that holds both leaves, int [leaves, leaves]. The diagonal is 0.

    lossless: steps retain the small terms beside the large ones, whose results alone lose them. Then the terms of the step in which both
    leaves meet do not count, but for the sums that hold them.
    """
    table = np.zeros((leaves, leaves), int)

    def below(node: SummationTree) -> list[int]:
        if isinstance(node, int):
            return [node]
        parts = [below(child) for child in node]
        every = [leaf for part in parts for leaf in part]
        for i, part in enumerate(parts):
            for other in parts[i + 1 :]:
                table[np.ix_(part, other)] = table[np.ix_(other, part)] = len(part) + len(other) if lossless else len(every)
        return every

    below(root)
    return table


def possible_orders(k: int) -> Iterator[Order]:
    """Yield every order of k products that a Model can have, the plainest first."""
    for chain in CHAINS:
        for groups in (1, 2, 4):
            if groups > 1 and k % (2 * groups):
                continue
            if isinstance(chain, int) and chain > k:
                continue
            for terms in range(1, k // groups + 1):
                # the products of a chain fill its steps
                if isinstance(chain, int) and chain * Order(terms, groups).steps_per_instruction(k) % k:
                    continue
                yield Order(terms, groups, chain)
                if isinstance(chain, int):
                    yield Order(terms, groups, chain, together=True)


def match_order(table: np.ndarray) -> Order | None:
    """Find the plainest order whose tree has this table of sizes, [k + 1, k + 1]. Returns None if no model has such a tree.

    The step of the tree may lose small terms beside large ones or retain them. If it retains them and all terms meet in one step, the table
    has nothing but twos, and the order cannot be seen.
    """
    k = len(table) - 1
    for order in possible_orders(k):
        tree = summation_tree(order, k)
        if any(np.array_equal(subtree_sizes(tree, k + 1, lossless=lossless), table) for lossless in (False, True)):
            return order
    return None


# ---- questions and answers


ACCUMULATOR = -1  # the accumulator as a slot
CASES_PER_CALL = 32  # cases per call
RAW_CODE = "raw"  # values under a key (RAW_CODE, operand, k) are codes

# the nonzero terms of one dot product; see `ProbeBench.dot_operands` for the keys and values
Question = dict[Any, Any]


class Unreachable(Exception):
    """The operands of the instruction cannot hold a requested value."""


@lru_cache(maxsize=1 << 14)
def is_representable(fmt: Format, value: Fraction) -> bool:
    """Return whether the format has exactly this value."""
    return decode(fmt, encode(fmt, value, overflow="infinity")).value == value


@lru_cache(maxsize=1 << 14)
def factor_codes(a: Format, b: Format, value: Fraction) -> tuple[int, int]:
    """Return codes whose product is the value, normal numbers if there are any. Raises Unreachable."""
    if value == 0:
        return 0, 0
    odd, exponent = abs(value.numerator), 1 - value.denominator.bit_length()
    while odd % 2 == 0:
        odd, exponent = odd // 2, exponent + 1
    divisors = [m for m in range(1, min(odd, 1 << 12) + 1) if odd % m == 0]
    splits = sorted({*((m, odd // m) for m in divisors), *((odd // m, m) for m in divisors)}, key=lambda s: abs(s[0] - s[1]), reverse=True)
    exponents = range(a.min_exponent - a.mantissa_bits, a.max_exponent + 1)
    near = sorted(exponents, key=lambda e: abs(2 * e - exponent))[:512]
    subnormal: tuple[int, int] | None = None
    for m, n in splits:
        for e in near:
            x, y = m * power_of_two(e), n * power_of_two(exponent - e) * (-1 if value < 0 else 1)
            if is_representable(a, x) and is_representable(b, y):
                if leading_exponent(x) >= a.min_exponent and leading_exponent(y) >= b.min_exponent:
                    return encode(a, x), encode(b, y)
                subnormal = subnormal or (encode(a, x), encode(b, y))
    if subnormal is None:
        raise Unreachable(f"no product of {a} and {b} is {value}")
    return subnormal


def special_questions(spec: ProductSpec) -> dict[str, Question]:
    """Return questions with NaN, infinities and zeros alone, by name."""
    a, b, c = spec.a, spec.b, spec.c
    one = b.bias << b.mantissa_bits + b.unused_bits
    nan_a = (a.infinity + 1 if a.specials == "ieee" else a.nan) << a.unused_bits
    inf_a, sign = a.infinity << a.unused_bits, 1 << a.bits - 1
    questions: dict[str, Question] = {}
    if a.specials != "none":
        questions["NaN x 1"] = {(RAW_CODE, "a", 0): nan_a, (RAW_CODE, "b", 0): one}
    if a.specials == "ieee" and b.specials == "ieee":
        questions["Inf x 0"] = {(RAW_CODE, "a", 0): inf_a, (RAW_CODE, "b", 0): 0}
        questions["Inf x 1"] = {(RAW_CODE, "a", 0): inf_a, (RAW_CODE, "b", 0): one}
        if spec.k > 1:
            two = {(RAW_CODE, "a", 0): inf_a, (RAW_CODE, "b", 0): one, (RAW_CODE, "a", 1): inf_a | sign, (RAW_CODE, "b", 1): one}
            questions["Inf - Inf"] = two
    questions["C NaN"] = {(RAW_CODE, "c", 0): c.infinity + 1}
    minus = {(RAW_CODE, "c", 0): 1 << c.bits - 1}
    questions["-0 with products of +0"] = minus
    questions["-0 with products of -0"] = minus | {(RAW_CODE, "a", k): sign for k in range(spec.k)}
    return questions


class DotBench:
    """A black box, asked about single dot products of one instruction."""

    def __init__(self, op: MatrixMultiply, implementation: Implementation):
        self.op, self.implementation, self.spec = op, implementation, product_spec(op)
        self.k, self.probe_count = self.spec.k, 0

    def ask_dots(self, given: Sequence[DotOperands]) -> list[int]:
        """Return D's code for each dot product of stored products."""
        op, spec = self.op, self.spec
        dots = [self._with_metadata(dot) for dot in given]
        self.probe_count += len(dots)
        per_case = min(op.m, op.n, 8)  # questions per case, on the diagonal
        answers: list[int] = []
        for start in range(0, len(dots), CASES_PER_CALL * per_case):
            batch = dots[start : start + CASES_PER_CALL * per_case]
            positions = [(index // per_case, index % per_case, index % per_case) for index in range(len(batch))]
            operands = place_dots(op, batch, positions, CASES_PER_CALL)
            d = compute_result(op, self.implementation, {name: jnp.asarray(codes) for name, codes in operands.items()})
            codes = codes_to_integers(spec.d, np.asarray(d))
            answers += [int(codes[position]) for position in positions]
        return answers

    def _with_metadata(self, dot: DotOperands) -> DotOperands:
        """Add the first defined metadata of a sparse instruction, and expand B to a full column, in which B's stored elements meet A's."""
        op = self.op
        if not op.sparse:
            return dot
        field = defined_fields(op.chunk_size, op.ordered)[0]
        first, second = field & 3, field >> 2
        size = op.chunk_size // 4
        inside = [first >> 1] if op.chunk_size == 2 else [size * u + i for u in (first, second) for i in range(size)]
        chunks = op.k // op.chunk_size
        column = [0] * op.k
        for code, row in zip(dot["b"], [chunk * op.chunk_size + i for chunk in range(chunks) for i in inside], strict=True):
            column[row] = code
        return dot | {"b": column, "e": [field] * chunks}


class ProbeBench(DotBench):
    """A black box and one instruction.

    A slot is an index along K, or a block of scales for an instruction with several blocks of them.
    """

    def __init__(self, op: MatrixMultiply, implementation: Implementation):
        super().__init__(op, implementation)
        self.scaling = op.scaling if op.scaling is not None and op.scaling.count > 1 else None  # None: one scale for all of K, or none
        self.slots = self.k if self.scaling is None else self.scaling.count
        self.slot_width = self.k // self.slots  # products per slot
        self.top, self.normal_bottom, self.bottom = self._exponent_range()
        spec, scales = self.spec, 0 if self.scaling is None else 2 * self.scaling.format.min_exponent
        smallest = spec.d.min_exponent - spec.d.mantissa_bits
        # the exponent of the smallest product of normal numbers, or of the smallest result if products are smaller: floors show down to it
        self.lowest_normal = max(spec.a.min_exponent + spec.b.min_exponent + scales, smallest)

    def _exponent_range(self) -> tuple[int, int, int]:
        """Return the exponents of the largest and smallest power of two that every slot, C and the result can hold.

        Two smallest ones: as products of normal numbers with a normal C, and of any. A step aligns subnormal numbers as if they were as
        large as the smallest normal ones, so that beside each other they may lose bits that normal numbers of their size would not.
        """
        c, d = self.spec.c, self.spec.d
        deep = 200 if d.words == 2 else 60
        if self.scaling is not None:
            reached = [e for e in range(-deep, deep + 1) if self._scale_codes(self.scaling.format, e) is not None]
            normal = min(reached)
        else:
            reached = [e for e in range(-2 * deep, 2 * deep + 1) if self._is_reachable(power_of_two(e))]
            normal = self.spec.a.min_exponent + self.spec.b.min_exponent
        top = min(max(reached), d.max_exponent - 1, c.max_exponent - 1, deep)
        bottom = max(min(reached), d.min_exponent - d.mantissa_bits, c.min_exponent - c.mantissa_bits, -deep)
        return top, max(normal, c.min_exponent, bottom), bottom

    def _is_reachable(self, value: Fraction) -> bool:
        try:
            return bool(factor_codes(self.spec.a, self.spec.b, value))
        except Unreachable:
            return False

    @staticmethod
    @lru_cache(maxsize=4096)
    def _scale_codes(fmt: Format, exponent: int) -> tuple[int, int] | None:
        """Return codes of two scales whose product is 2^exponent, or None."""
        for x in sorted(range(-127, 128), key=lambda x: abs(x - exponent // 2)):
            if is_representable(fmt, power_of_two(x)) and is_representable(fmt, power_of_two(exponent - x)):
                return encode(fmt, power_of_two(x)), encode(fmt, power_of_two(exponent - x))
        return None

    def dot_operands(self, values: Question) -> DotOperands:
        """Return the codes of one dot product.

        Args:
            values: The terms by slot, or under ACCUMULATOR, as Fractions. A list of Fractions holds the products of a block before its
                scales, whose exponent is under (slot, "scale"). A key (RAW_CODE, operand, k) has a code.

        Returns:
            The codes by operand.

        Raises:
            Unreachable: The operands cannot hold a value.
        """
        spec, op = self.spec, self.op
        codes = {"a": [0] * self.k, "b": [0] * self.k, "c": [0]}
        if op.scaling is not None:
            one = op.scaling.format.bias << op.scaling.format.mantissa_bits
            codes |= {name: [one] * op.scaling.count for name in ("scale_a", "scale_b")}
        for slot, value in values.items():
            if isinstance(slot, tuple):
                if slot[0] == RAW_CODE:
                    codes[slot[1]][slot[2]] = value
                continue
            if slot == ACCUMULATOR:
                if not is_representable(spec.c, value):
                    raise Unreachable(f"{spec.c} has no {value}")
                codes["c"][0] = encode(spec.c, value)
            elif self.scaling is not None:
                products = value if isinstance(value, list) else self._block_products(value)
                exponent: int = values[slot, "scale"] if isinstance(value, list) else self._block_exponent(value)
                scales = self._scale_codes(self.scaling.format, exponent)
                if scales is None or len(products) > self.slot_width:
                    raise Unreachable(f"no block holds {value}")
                codes["scale_a"][slot], codes["scale_b"][slot] = scales
                for index, part in enumerate(products):
                    codes["a"][slot * self.slot_width + index], codes["b"][slot * self.slot_width + index] = factor_codes(
                        spec.a, spec.b, part
                    )
            else:
                codes["a"][slot], codes["b"][slot] = factor_codes(spec.a, spec.b, value)
        return codes

    def _block_exponent(self, value: Fraction) -> int:
        """Return an exponent for a block, such that its products are integers in units of 2^-2 with the value's leading bits."""
        odd = abs(value.numerator)
        width = (odd // (odd & -odd)).bit_length() if odd else 1
        return leading_exponent(value) - max(width - 3, 0) if value else 0

    def _block_products(self, value: Fraction) -> list[Fraction]:
        """Return the products of a block, before its scales."""
        remainder, sign, products = abs(value) / power_of_two(self._block_exponent(value)), 1 if value >= 0 else -1, []
        sizes = sorted({x * y for x, y in product(*(self._positive_values(fmt) for fmt in (self.spec.a, self.spec.b)))}, reverse=True)
        while remainder:
            part = next((s for s in sizes if s <= remainder), None)
            if part is None:
                raise Unreachable(f"no block holds {value}")
            products.append(sign * part)
            remainder -= part
        return products

    @staticmethod
    def _positive_values(fmt: Format) -> list[Fraction]:
        return [v for code in range(1 << (fmt.bits - 1)) if isinstance(v := decode(fmt, code).value, Fraction) and v > 0]

    def ask_codes(self, questions: Sequence[Question]) -> list[int]:
        """Return D's code for each question. Raises Unreachable if the operands cannot hold a question."""
        return self.ask_dots([self.dot_operands(question) for question in questions])

    def ask_values(self, questions: Sequence[Question]) -> list[Value]:
        """Return D's value for each question. Raises Unreachable."""
        return [decode(self.spec.d, code).value for code in self.ask_codes(questions)]


def find_clamp_step(bench: DotBench) -> int | None:
    """Return the products after which an integer sum with .satfinite is clamped, or None if no operands show it.

    C is the largest s32. The first product is 1 and a later one -1: the result is C - 1 if they are in different steps.
    """
    a, b = bench.spec.a, bench.spec.b
    if not (a.signed or b.signed):
        return None
    minus = {"a": (1 << a.bits) - 1 if not b.signed else 1, "b": (1 << b.bits) - 1 if b.signed else 1}
    largest = (1 << S32.bits - 1) - 1
    dots = []
    for later in range(1, bench.k):
        codes = {name: [1 if k == 0 else minus[name] if k == later else 0 for k in range(bench.k)] for name in minus}
        dots.append({**codes, "c": [largest]})
    answers = bench.ask_dots(dots)
    return next((later for later, d in enumerate(answers, 1) if d == largest - 1), bench.k)
