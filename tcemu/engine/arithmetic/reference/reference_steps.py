"""The reference: one dot product D = A·B + C in plain Python numbers, step by step, every term of every step kept.

Read this file first to learn what an instruction computes: it is a specification that runs. `Reduction` takes the products in order. Each
of its methods `fused_step`, `fma_step`, `add_step`, `convert_step` and `integer_step` is one kind of step. `fused_step` is what tensor
cores do with floating point. It follows the eight rules in the docstring of the engine's fused step, and names each where it applies it.
`exact_step`, `pairwise_step`, `joined_step`, `complement_step` and `floored_step` are the steps of other makers' units.

The modules of this folder are an oracle for the engine. They read the same records (`Model`, `ProductSpec`, `Format`) and share no
arithmetic with it: numbers are Python integers and Fractions, and the order of steps is derived here a second time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, trunc
from typing import Any, NamedTuple

from tcemu.engine.arithmetic.model import TO_ODD, Model
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.arithmetic.reference.exact_values import (
    INFINITY,
    MINUS_INFINITY,
    NAN,
    Value,
    convert,
    decode,
    encode,
    flush,
    infinity,
    is_tiny,
    leading_exponent,
    multiply_values,
    power_of_two,
    special_code,
    sum_values,
    ulp,
)
from tcemu.engine.arithmetic.reference.reference_products import Product
from tcemu.engine.formats.number_formats import F32, F64, S32, Format

F64_QUIET_BIT = 1 << (F64.mantissa_bits - 1)
F64_INVALID_NAN = 1 << (F64.bits - 1) | F64.infinity | F64_QUIET_BIT  # of Inf x 0 and Inf - Inf


class Accumulator(NamedTuple):
    """C, or the result of the previous step."""

    name: str  # name of its term in the recorded steps
    code: int  # code in the format of the model's result


@dataclass(frozen=True)
class Term:
    """One summand of a step: C, the running value, a product, or a group of products."""

    name: str
    value: Value  # exact value
    products: tuple[Product, ...] = ()  # empty for C and the running value
    code: int | None = None  # code of C or of the running value
    exponent: int | None = None  # exponent that the term is aligned by; None if the alignment ignores the term
    shift: int | None = None  # distance in bits below the step's max exponent
    retained: Fraction | None = None  # value after alignment; None in a step with a NaN or an infinity
    truncated: Fraction | None = None  # value that alignment removed; None in a step with a NaN or an infinity


@dataclass(frozen=True)
class Step:
    """One operation with its rounding.

    `kind` is "fused" (align, truncate, add, round), "fma" (one exact product), "add" (the result of a chain to C), "convert" (to another
    format) or "integer" (exact, then wrapped or clamped). Other makers' units also have "exact" (several exact products), "multiply" (one
    product, rounded) and "joined" (aligned products, whose sum joins the running value).
    """

    kind: str
    instruction: int  # number of the instruction along K, from 1
    terms: tuple[Term, ...]
    result: int  # code of `fmt`
    fmt: Format
    rounding: str
    alignment_exponent: int | None = None  # fused: max exponent, to which the terms are aligned
    last_bit: int | None = None  # fused: exponent of the last bit that alignment retains
    result_bits: int | None = None  # fraction bits of the result; None for all bits of `fmt`
    exact_sum: Fraction | None = None  # exact sum of the retained values; None if a term is a NaN or an infinity
    rule: str | None = None  # special rule that determined the result

    def require_alignment(self) -> tuple[int, int]:
        """Return the exponent that the terms are aligned to, and that of the last bit that alignment retains.

        Raises:
            ValueError: The step aligns nothing.
        """
        if self.alignment_exponent is None or self.last_bit is None:
            raise ValueError(f"a step of kind {self.kind!r} aligns nothing; fused steps do")
        return self.alignment_exponent, self.last_bit

    @property
    def value(self) -> Value:
        return decode(self.fmt, self.result).value

    @property
    def result_last_bit(self) -> int:
        dropped = 0 if self.result_bits is None else self.fmt.mantissa_bits - self.result_bits
        return leading_exponent(ulp(self.fmt, self.exact_sum or Fraction(0))) + dropped

    @property
    def rounding_loss(self) -> Fraction | None:
        """The sum minus the result; None if the result is not finite."""
        value = self.value
        return None if self.exact_sum is None or isinstance(value, str) else self.exact_sum - value


# ---- the order of steps


def split_into_steps(products: Sequence[Product], terms: int, groups: int, dealing: str = "pairs") -> list[Sequence[Product]]:
    """Split the products of one instruction into its steps.

    Pairs of products, fours or single ones, are distributed over the groups round-robin. Then each group, in order, is split into steps of
    `terms` products. "reversed" takes the last group first.
    """
    distributed = deal_products(products, groups, dealing)
    return [step for group in distributed for step in batched(group, terms)]


def deal_products(products: Sequence[Any], groups: int, dealing: str) -> list[list[Any]]:
    """Return the products of each group, in the order in which the groups are added."""
    width = {"pairs": 2, "fours": 4}.get(dealing, 1)
    dealt = [[product for index, product in enumerate(products) if index // width % groups == group] for group in range(groups)]
    return dealt[::-1] if dealing == "reversed" else dealt


def steps_per_chain(chain: int | str, k: int, steps: int) -> int:
    """Return the number of steps in a chain.

    A chain consists of the complete steps that its products fill, at least one. Where the last steps of an instruction are short, each step
    counts for the average number of products per step.

    Args:
        chain: Products per chain; "k" for all products of one instruction.
        k: Products per instruction.
        steps: Steps per instruction.
    """
    products_per_step = Fraction(k, steps)
    products_per_chain = k if isinstance(chain, str) else int(chain)
    return max(1, floor(products_per_chain / products_per_step))


def batched(items: Sequence[Any], length: int) -> Iterator[Sequence[Any]]:
    """Yield the items in batches of `length`; the last batch may be shorter."""
    return (items[start : start + length] for start in range(0, len(items), length))


# ---- the steps


def reduce_products(model: Model, spec: ProductSpec, products: Sequence[Product], c: int) -> tuple[tuple[Step, ...], int]:
    """Compute D = A·B + C.

    Args:
        model: The arithmetic of the instruction.
        spec: Formats and modes of the instruction.
        products: The products along K, a multiple of `spec.k`.
        c: Code of `spec.c`.

    Returns:
        All steps, and the code of D.
    """
    reduction = Reduction(model, spec)
    d = reduction.multiply_add(products, c)
    return tuple(reduction.steps), d


class Reduction:
    """One reduction over K, and the steps that it has recorded. Running values are codes of the model's result."""

    def __init__(self, model: Model, spec: ProductSpec) -> None:
        self.model, self.spec = model, spec
        self.steps: list[Step] = []
        self.instruction = 1  # number of the current instruction

    def multiply_add(self, products: Sequence[Product], c: int) -> int:
        """Return the code of D.

        Where D has another format than the model's result, each instruction rounds to D's format, and the next one starts from that value.
        """
        spec, result = self.spec, self.model.result
        instructions = list(batched(products, spec.k))
        if result.is_integer:
            running = Accumulator("C", c)
            step = self.model.clamp_step if spec.clamp and self.model.clamp_step else spec.k
            for number, instruction in enumerate(instructions, 1):
                self.instruction = number
                for part in batched(instruction, step):
                    running = Accumulator("running", self.integer_step(part, running))
            return running.code
        running = Accumulator("C", self.convert_step("C", c, spec.c, result))
        if spec.d == result:
            return self.reduce_instructions(instructions, running).code
        for number, instruction in enumerate(instructions, 1):
            code = self.convert_step("running", self.reduce_instructions([instruction], running, number).code, result, spec.d)
            running = Accumulator("running", convert(spec.d, result, code))
        return convert(result, spec.d, running.code)

    def reduce_instructions(self, instructions: Sequence[Sequence[Product]], c: Accumulator, first: int = 1) -> Accumulator:
        """Accumulate the steps of instructions onto C, one after the other or in chains; `first` is the first instruction's number."""
        model = self.model
        groups = 1 if model.step_kind == "joined" else model.groups  # a joined step takes all groups
        split = [split_into_steps(products, int(model.terms), groups, model.dealing) for products in instructions]
        numbered = [(number, products) for number, steps in enumerate(split, first) for products in steps]
        if model.chain is None:
            return self.reduce_steps(numbered, c)
        length = steps_per_chain(model.chain, self.spec.k, len(split[0]))
        chains = list(batched(numbered, length))
        if not model.together:
            for chain in chains:
                c = self.add_step(self.flushed(c), Accumulator("chain", self.reduce_chain(chain)))
            return c
        chains_per_instruction = len(split[0]) // length
        for instruction_chains in batched(chains, chains_per_instruction):
            partial = self.reduce_chain(instruction_chains[0])
            for chain in instruction_chains[1:]:
                partial = self.add_step(Accumulator("sum", partial), Accumulator("chain", self.reduce_chain(chain))).code
            c = self.add_step(self.flushed(c), Accumulator("chain" if chains_per_instruction == 1 else "sum", partial))
        return c

    def reduce_chain(self, numbered: Sequence[tuple[int, Sequence[Product]]]) -> int:
        """Reduce steps from nothing, or from +0, and return the code of the result."""
        start = Accumulator("+0", encode(self.model.result, Fraction(0))) if self.model.from_zero else None
        return self.reduce_steps(numbered, start).code

    def reduce_steps(self, numbered: Sequence[tuple[int, Sequence[Product]]], running: Accumulator | None) -> Accumulator:
        """Execute steps in order. Each one is given by the number of its instruction and its products."""
        usual = self.fma_step if self.model.fraction_bits is None else self.fused_step
        usual = self.exact_step if self.model.is_exact_sum else usual
        kinds = {"pairwise": self.pairwise_step, "joined": self.joined_step}
        kinds |= {"complement": self.complement_step, "floored": self.floored_step}
        step = usual if self.model.step_kind is None else kinds[self.model.step_kind]
        previous = 0
        for number, products in numbered:
            running = self.flushed(running) if running is not None and number != previous else running
            self.instruction = previous = number
            running = Accumulator("running", step(products, running))
        return require_running(running)

    def record_step(self, kind: str, terms: Sequence[Term], result: int, rounding: str, fmt: Format | None = None, **fields: Any) -> int:
        """Record a step with further fields of `Step`, and return its result."""
        if self.model.nan is not None and decode(F32, result).value == NAN:
            result = self.model.nan
        self.steps.append(Step(kind, self.instruction, tuple(terms), result, fmt or self.model.result, rounding, **fields))
        return result

    def flushed(self, running: Accumulator) -> Accumulator:
        """Return C or the running value as an instruction of the model takes it."""
        return running._replace(code=flush(self.model.result, running.code, self.model.flush))

    def accumulator_term(self, running: Accumulator) -> Term:
        decoded = decode(self.model.result, running.code)
        present = decoded.finite and decoded.value != 0
        return Term(running.name, decoded.value, code=running.code, exponent=decoded.exponent if present else None)

    def fused_step(self, products: Sequence[Product], running: Accumulator | None) -> int:
        """Align to the max exponent, truncate, add exactly, round once."""
        model, rounding = self.model, str(self.model.rounding)
        # rules 1 and 2: exact products, each with the exponent that it is aligned by
        terms = [] if running is None else [self.accumulator_term(running)]
        if model.summed is None:
            terms += map(product_term, products)
        else:
            terms += map(group_term, batched(products, model.summed))
        # rule 3: the max exponent of all terms that are not zero, and at least the floor
        max_exponent = max([int(model.floor), *(term.exponent for term in terms if term.exponent is not None)])
        last_bit = max_exponent - int(model.require_fraction_bits())
        alignment: dict[str, Any] = {"alignment_exponent": max_exponent, "last_bit": last_bit}
        # rule 8: a NaN or an infinity alone determines the result
        value, rule = special_sum(terms)
        if rule is not None:
            return self.record_step("fused", terms, special_code(model.result, value), rounding, rule=rule, **alignment)
        # rule 4: every term is aligned and truncated below the last bit
        terms = [align_term(term, max_exponent, last_bit, str(model.alignment)) for term in terms]
        # rule 5: the retained values are added exactly
        exact_sum = sum_retained(terms)
        # rules 6 and 7: the sum is rounded once; a sum of zero is +0, an overflow is infinite
        bits = None if model.result_bits is None else int(model.result_bits)
        code = encode(model.result, exact_sum, rounding, overflow="infinity", fraction_bits=bits)
        if decode(model.result, code).value == 0:
            code = 0
        return self.record_step("fused", terms, code, rounding, result_bits=bits, exact_sum=exact_sum, **alignment)

    def fma_step(self, products: Sequence[Product], running: Accumulator | None) -> int:
        """Add one product and the running value, if there is one, exactly, and round once (IEEE 754-2019, 5.4.1)."""
        model, (product,) = self.model, products
        a, b = convert(self.spec.a, model.result, product.a), convert(self.spec.b, model.result, product.b)
        # the neutral element of addition: -0, but +0 where sums are rounded down, because +0 and -0 add up to -0 there
        neutral = encode(model.result, Fraction(0), negative_zero=model.rounding != "RM")
        before = neutral if running is None else running.code
        terms = [*([] if running is None else [self.accumulator_term(running)]), product_term(product)]
        signs = [product.decoded_a.negative != product.decoded_b.negative, decode(model.result, before).negative]
        return self.ieee_step("fma", terms, signs, [b, before, a], str(model.rounding))

    def exact_step(self, products: Sequence[Product], running: Accumulator | None) -> int:
        """Add all products and the running value, if there is one, exactly, and round once."""
        terms = [*([] if running is None else [self.accumulator_term(running)]), *map(product_term, products)]
        signs = [] if running is None else [decode(self.model.result, running.code).negative]
        signs += [product.decoded_a.negative != product.decoded_b.negative for product in products]
        return self.ieee_step("exact", terms, signs, [], str(self.model.rounding))

    def pairwise_step(self, products: Sequence[Product], running: Accumulator | None) -> int:
        """Round every product, add them in pairs, these sums in pairs, and the total to the running value; round each sum."""
        running, rounding = require_running(running), str(self.model.rounding)
        sums = []
        for product in products:
            sign = product.decoded_a.negative != product.decoded_b.negative
            code = self.ieee_step("multiply", [product_term(product)], [sign], [], rounding)
            sums.append(Accumulator(f"product {product.name}", code))
        while len(sums) > 1:
            sums = [self.add_step(left, right, rounding)._replace(name="sum") for left, right in batched(sums, 2)]
        return self.add_step(running, sums[0], rounding).code

    def joined_step(self, products: Sequence[Product], running: Accumulator | None) -> int:
        """Align and truncate the products without the running value, then join their sum with it, rounded down."""
        model, rounding = self.model, str(self.model.rounding)
        running = require_running(running)
        bits, c = int(model.require_fraction_bits()), self.accumulator_term(running)
        terms = [overflowed_term(product_term(product)) for product in products]
        value, rule = special_sum([c, *terms])
        if rule is not None:
            return self.record_step("joined", [c, *terms], special_code(model.result, value), rounding, rule=rule)
        c_exponent = decode(model.result, running.code).exponent
        sums, exponents = [], []
        for group in deal_products(terms, model.groups, model.dealing):
            exponent = max((term.exponent for term in group if term.exponent is not None), default=None)
            if exponent is not None:
                sums.append(sum_retained([align_term(term, exponent, exponent - bits, "RZ") for term in group]))
                exponents.append(exponent)
        exponent = max(exponents, default=c_exponent)
        total = sum((round_down(one, exponent - bits) for one in sums), Fraction(0))
        joined = max(exponent, c_exponent)
        dropped = model.groups > 1 and c_exponent < joined - bits - 1
        assert isinstance(c.value, Fraction)
        retained_c = Fraction(0) if dropped else round_down(c.value, joined - bits)
        exact_sum = round_down(total, joined - 32) + retained_c
        if exact_sum:
            exact_sum = round_down(exact_sum, max(leading_exponent(exact_sum), model.result.min_exponent) - 31)
        code = encode(model.result, exact_sum, rounding)
        terms = [replace(c, retained=retained_c, truncated=c.value - retained_c), *map(untruncated_term, terms)]
        return self.record_step("joined", terms, code, rounding, exact_sum=exact_sum)

    def complement_step(self, products: Sequence[Product], running: Accumulator | None) -> int:
        """Align and truncate all terms, the running value two bits finer, and negate those of the other sign by flipping their bits."""
        model, fmt = self.model, self.model.result
        running = require_running(running)
        bits, smallest = int(model.require_fraction_bits()), power_of_two(fmt.min_exponent)
        decoded = decode(fmt, running.code)
        tiny = lambda value: isinstance(value, Fraction) and abs(value) < smallest
        c = self.accumulator_term(running)
        terms, signs = [replace(c, value=Fraction(0), exponent=None) if tiny(c.value) else c], [decoded.negative]
        for product in products:
            factors = [
                Fraction(0) if source.min_exponent == fmt.min_exponent and tiny(factor.value) else factor.value
                for factor, source in ((product.decoded_a, self.spec.a), (product.decoded_b, self.spec.b))
            ]
            value = multiply_values(*factors)
            present = isinstance(value, Fraction) and value != 0
            terms.append(replace(product_term(product), value=value, exponent=product_term(product).exponent if present else None))
            signs.append(product.decoded_a.negative != product.decoded_b.negative)
        value, rule = special_sum(terms)
        if rule is not None:
            return self.record_step("complement", terms, special_code(fmt, value), "RN", rule=rule)
        units = [term.exponent - bits - (2 if i == 0 else 0) for i, term in enumerate(terms) if term.exponent is not None]
        if not units:
            return self.record_step("complement", [untruncated_term(term) for term in terms], 0, "RN", exact_sum=Fraction(0))
        unit, aligned = power_of_two(max(units)), []
        for term, negative in zip(terms, signs, strict=True):
            assert isinstance(term.value, Fraction)
            magnitude = floor(abs(term.value) / unit) + (negative != signs[0])
            retained = (-magnitude if negative else magnitude) * unit
            aligned.append(replace(term, retained=retained, truncated=term.value - retained))
        exact_sum = sum_retained(aligned)
        code = encode(fmt, exact_sum, "RN", overflow="infinity")
        if exact_sum == 0 or is_tiny(fmt, exact_sum, "RN"):
            code = 0
        return self.record_step("complement", aligned, code, "RN", exact_sum=exact_sum)

    def floored_step(self, products: Sequence[Product], running: Accumulator | None) -> int:
        """Add pairs of products, each pair aligned by itself; then these sums and the running value. Alignment rounds down."""
        model, fmt = self.model, self.model.result
        assert running is not None and model.fraction_bits is not None
        bits, c = int(model.fraction_bits), self.accumulator_term(running)
        terms = [product_term(product) for product in products]
        value, rule = special_sum([c, *terms])
        if rule is not None:
            return self.record_step("floored", [c, *terms], special_code(fmt, value), "RN", rule=rule)
        assert isinstance(c.value, Fraction)
        leading = max(leading_exponent(c.value), fmt.min_exponent) if c.value else fmt.min_exponent
        unit = max([leading - bits - 2, *(term.exponent - bits for term in terms if term.exponent is not None)])
        retained_c = Fraction(0) if abs(c.value) < power_of_two(unit) else round_down(c.value, unit)
        exact_sum = retained_c
        for pair in batched(terms, 2):
            exponents = [term.exponent for term in pair if term.exponent is not None]
            if exponents:
                exact_sum += round_down(sum((round_down(term.value, max(exponents) - bits) for term in pair), Fraction(0)), unit)
        code = encode(fmt, exact_sum, "RN", overflow="infinity")
        terms = [replace(c, retained=retained_c, truncated=c.value - retained_c), *map(untruncated_term, terms)]
        return self.record_step("floored", terms, code, "RN", exact_sum=exact_sum)

    def add_step(self, left: Accumulator, right: Accumulator, rounding: str = "RN") -> Accumulator:
        """Add two values as an ordinary addition."""
        terms = [self.accumulator_term(left), self.accumulator_term(right)]
        signs = [decode(self.model.result, accumulator.code).negative for accumulator in (left, right)]
        return Accumulator("running", self.ieee_step("add", terms, signs, [], rounding))

    def ieee_step(self, kind: str, terms: list[Term], signs: list[bool], codes: list[int], rounding: str) -> int:
        """Round the exact sum of terms once.

        Args:
            kind: Kind of the step.
            terms: The exact terms.
            signs: Signs of the terms (True for minus), which give the sign of a sum of 0.
            codes: In f64, the operands in order of precedence: the first NaN among them is the result.
            rounding: Rounding mode.
        """
        fmt = self.model.result
        value, rule = special_sum(terms)
        if rule is not None:
            code = special_code(fmt, value)
            if value == NAN and fmt == F64 and codes:
                code = next((c | F64_QUIET_BIT for c in codes if decode(F64, c).value == NAN), F64_INVALID_NAN)
            return self.record_step(kind, terms, code, rounding, rule=rule)
        terms = [untruncated_term(term) for term in terms]
        exact = sum_retained(terms)
        negative = signs[0] if len(set(signs)) == 1 else rounding == "RM"  # sign of a zero from opposite signs (IEEE 754-2019, 6.3)
        odd = rounding == TO_ODD
        code = encode(fmt, exact, "RZ" if odd else rounding, overflow="infinity" if odd else "ieee", negative_zero=negative)
        if odd and decode(fmt, code).finite and decode(fmt, code).value != exact:
            code |= 1
        if self.model.flush is not None and is_tiny(fmt, exact, "RZ" if odd else rounding):
            code = encode(fmt, Fraction(0), negative_zero=decode(fmt, code).negative)
        return self.record_step(kind, terms, code, "odd" if odd else rounding, exact_sum=exact)

    def convert_step(self, name: str, code: int, source: Format, target: Format) -> int:
        """Convert a code to another format, and record a step if the formats differ."""
        if source == target:
            return code
        value, result = decode(source, code).value, convert(source, target, code)
        term = Term(name, value, code=code)
        if isinstance(value, str):
            return self.record_step("convert", [term], result, "RN", target, rule=f"{name} is {value}, and stays so")
        return self.record_step("convert", [untruncated_term(term)], result, "RN", target, exact_sum=value)

    def integer_step(self, products: Sequence[Product], running: Accumulator) -> int:
        """Add exactly, then keep the low 32 bits, or with .satfinite clamp to s32."""
        spec = self.spec
        terms = [self.accumulator_term(running)]
        for product in products:
            value = Fraction(product.decoded_a.value != product.decoded_b.value) if spec.bit_op == "xor" else product.value
            terms.append(Term(product.name, value, (product,)))
        terms = [untruncated_term(term) for term in terms]
        exact = sum_retained(terms)
        clamps = spec.clamp and spec.bit_op != "xor"
        code = encode(S32, exact) if clamps else int(exact) & (1 << S32.bits) - 1
        rounding = "clamp" if clamps else "wrap"
        rule = None if decode(S32, code).value == exact else f"the sum is beyond s32 and {rounding}s"
        return self.record_step("integer", terms, code, rounding, exact_sum=exact, rule=rule)


# ---- the terms of a step


def product_term(product: Product) -> Term:
    """Return a product as a term. Its exponent is the sum of the exponents of its factors and scales; a zero has no exponent."""
    value = product.value
    exponent = product.decoded_a.exponent + product.decoded_b.exponent
    for scale in product.scales or ():
        value, exponent = multiply_values(value, scale.value), exponent + scale.exponent
    present = isinstance(value, Fraction) and value != 0
    return Term(product.name, value, (product,), exponent=exponent if present else None)


def require_running(running: Accumulator | None) -> Accumulator:
    """Return C or the running value; raises ValueError where a step that needs one starts from nothing."""
    if running is None:
        raise ValueError("the step needs C or a running value")
    return running


def group_term(products: Sequence[Product]) -> Term:
    """Return products, added exactly and then scaled, as one term.

    The exponent is the sum of the exponents of the scales alone, even if the products cancel. The alignment ignores the term if all
    products or a scale are zero.
    """
    scales = products[0].scales
    assert scales is not None
    value = sum_values(product.value for product in products)
    for scale in scales:
        value = multiply_values(value, scale.value)
    present = isinstance(value, Fraction) and any(product.value for product in products) and all(scale.value for scale in scales)
    names = [product.name for product in products]
    name = names[0] if len(names) == 1 else f"{names[0]}-{names[-1].removeprefix('k ')}"
    return Term(name, value, tuple(products), exponent=sum(scale.exponent for scale in scales) if present else None)


INTEGER_ROUNDINGS = {"RN": round, "RZ": trunc, "RM": floor, "RP": ceil}  # functions of a Fraction; `round` rounds ties to even


def align_term(term: Term, max_exponent: int, last_bit: int, rounding: str) -> Term:
    """Round a term to a multiple of 2^last_bit; "RZ" truncates toward zero."""
    assert isinstance(term.value, Fraction)
    unit = power_of_two(last_bit)
    retained = INTEGER_ROUNDINGS[rounding](term.value / unit) * unit
    shift = None if term.exponent is None else max_exponent - term.exponent
    return replace(term, shift=shift, retained=retained, truncated=term.value - retained)


def overflowed_term(term: Term) -> Term:
    """Return a product, which is infinite in a joined step from 2^128 on."""
    too_large = isinstance(term.value, Fraction) and abs(term.value) >= power_of_two(F32.max_exponent + 1)
    return replace(term, value=infinity(term.value < 0)) if too_large and isinstance(term.value, Fraction) else term


def round_down(value: Fraction, last_bit: int) -> Fraction:
    return floor(value / power_of_two(last_bit)) * power_of_two(last_bit)


def untruncated_term(term: Term) -> Term:
    """Return a term with all its bits retained, as steps without alignment use it."""
    assert isinstance(term.value, Fraction)
    return replace(term, retained=term.value, truncated=Fraction(0))


def sum_retained(terms: Sequence[Term]) -> Fraction:
    """Return the exact sum of the retained values."""
    return sum((term.retained for term in terms if term.retained is not None), Fraction(0))


def special_sum(terms: Sequence[Term]) -> tuple[str, str | None]:
    """Return the sum that NaNs and infinities among the terms determine, and the reason; ("", None) if all terms are finite."""
    specials = [term for term in terms if isinstance(term.value, str)]
    if not specials:
        return "", None
    for term in specials:
        if term.value == NAN:
            return NAN, f"NaN: {nan_reason(term)}"
    plus, minus = (next((term for term in specials if term.value == sign), None) for sign in (INFINITY, MINUS_INFINITY))
    if plus is not None and minus is not None:
        return NAN, f"NaN: +Inf at {plus.name} and -Inf at {minus.name}"
    return str(specials[0].value), f"{specials[0].value}: an infinity of one sign, at {', '.join(term.name for term in specials)}"


def nan_reason(term: Term) -> str:
    for product in term.products:
        for letter, scale in zip("AB", product.scales or (), strict=False):
            if not scale.finite:
                return f"the scale of {letter} at {product.name} is NaN"
        if product.value == NAN:
            factors = [letter for letter, factor in (("A", product.decoded_a), ("B", product.decoded_b)) if factor.value == NAN]
            if not factors:
                return f"Inf x 0 at {product.name}"
            return f"{' and '.join(factors)} {'is' if len(factors) == 1 else 'are'} NaN at {product.name}"
    return f"{term.name} is NaN"
