"""Inference of the arithmetic of a black box: probes show the order of its terms, and answers eliminate models until no operands remain
that would tell the others apart.

Nothing is concluded from one probe alone. A field is determined if the answers contradict every other value of it, and undetermined if
models that differ in it give the same results for all operands of the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from itertools import combinations, product
from typing import Any

import numpy as np

from tcemu.base.errors import Unsupported
from tcemu.base.interrupts import Interrupted
from tcemu.base.results import Result, Table, to_scalar
from tcemu.base.text import wrap_lines
from tcemu.engine.architectures.lookup import require_product
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.order import Order, products_per_clamp
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.arithmetic.reference.exact_values import hex_code, power_of_two
from tcemu.engine.formats.number_formats import F16, F32, F64, S32, Format
from tcemu.engine.isa.families import Instruction, MatrixMultiply
from tcemu.engine.isa.legality import targets
from tcemu.operations.products.unit_choice import describe_unit
from tcemu.uses.fuzz.boundary_dots import BoundaryDrawer
from tcemu.uses.fuzz.case_formulas import FLOOR_EXPONENTS
from tcemu.uses.fuzz.case_generator import generate
from tcemu.uses.fuzz.differential_run import FuzzRun, find_mismatches
from tcemu.uses.fuzz.implementations import Implementation, emulator, get_implementation, resolve_common_op
from tcemu.uses.fuzz.model_hypotheses import (
    FLOOR,
    LOWEST_FLOOR,
    DotArrays,
    DotDrawer,
    ModelGroup,
    equal_multiplicands,
    equal_orders,
    exact_group,
    fused_group,
    group_models,
    join_dots,
    list_dots,
    predict,
    select_dots,
    stack_dots,
    structure,
)
from tcemu.uses.fuzz.model_probes import ACCUMULATOR, DotBench, ProbeBench, Unreachable, find_clamp_step, match_order, special_questions

ORDER_FIELDS = ("terms", "groups", "chain", "together")


@dataclass(frozen=True)
class ModelFinding:
    """One result of the probes. `field` is a field of Model, or "" if the finding is about none."""

    field: str
    value: Any
    evidence: str

    def __str__(self) -> str:
        return f"{f'{self.field} = {self.value}' if self.field else self.value}: {self.evidence}"


class Equivalence:
    """The models that no operand of an instruction can tell apart, by their construction."""

    def __init__(self, op: MatrixMultiply):
        self.spec = spec = product_spec(op)
        self.multiplicands = [(None,)] if spec.a.is_integer else equal_multiplicands(spec.a, spec.b)
        exponents = [spec.a.min_exponent - spec.a.mantissa_bits + spec.b.min_exponent - spec.b.mantissa_bits, spec.c.min_exponent]
        scales = 0 if spec.scale is None else 2 * spec.scale.min_exponent
        self.lowest_exponent = min(exponents[0] + scales, exponents[1])  # no term is aligned by a smaller one

    def key(self, model: Model) -> tuple:
        """Return a value that is equal for equivalent models."""
        if model.result.is_integer:
            shown = self.spec.clamp and (self.spec.a.signed or self.spec.b.signed)  # otherwise sums only grow
            return (model.result, products_per_clamp(model, self.spec.k) if shown else None)
        exact, order = model.fraction_bits is None, Order.from_model(model, self.spec.k)
        return (
            model.result,
            str(structure(order, self.spec.k)),
            model.fraction_bits,
            None if exact else max(int(model.floor), self.lowest_exponent),
            model.result.mantissa_bits if model.result_bits is None else model.result_bits,
            self.spec.rounding or model.rounding,
            model.alignment,
            next((i for i, members in enumerate(self.multiplicands) if model.multiplicand in members), model.multiplicand),
            model.summed,
            model.from_zero,
        )


@dataclass(frozen=True, repr=False)
class InferredModel(Result):
    """The arithmetic of a black box, as far as its answers show it.

    `str()` is a report for people with every field of the Model, and `records()` has the findings, for pandas.

    Attributes:
        op: The instruction.
        black_box: Name of the black box.
        model: The model, or None if the probes led to none. Of several that fit, the plainest.
        findings: The findings.
        probe_count: Number of dot products that the black box was asked.
        comparison: Comparison of the black box with the model on generated cases, or None.
        survivors: Models that agree with every answer, `model` first. There are several if no operands were found that tell them apart.
            Models that are equal by construction, such as two floors below every exponent, stand here once; `undetermined` names them.
    """

    op: MatrixMultiply
    black_box: str
    model: Model | None
    findings: tuple[ModelFinding, ...]
    probe_count: int
    comparison: FuzzRun | None
    survivors: tuple[Model, ...] = ()

    @cached_property
    def undetermined(self) -> dict[str, str]:
        """The fields of the model that the instruction's operands do not determine, with the values that fit, as text."""
        spec, found = product_spec(self.op), {}
        if self.model is not None and self.model.result.is_integer:
            unseen = spec.clamp and not (spec.a.signed or spec.b.signed)
            return {"clamp_step": "any, since sums of products that are not negative only grow"} if unseen else {}
        if self.model is None:
            return {}
        same = Equivalence(self.op)
        for field in fields(Model):
            values = list(dict.fromkeys(getattr(model, field.name) for model in self.survivors or (self.model,)))
            if field.name in ORDER_FIELDS:
                found[field.name] = _order_values(field.name, Order.from_model(self.model, spec.k), spec.k)
            elif field.name == "floor":
                found["floor"] = "any, since exact steps align nothing" if self.model.fraction_bits is None else _floors(values, same)
            elif field.name == "multiplicand" and self.model.fraction_bits is not None:
                members = [fmt for fmts in same.multiplicands for fmt in fmts if any(value in fmts for value in values)]
                found["multiplicand"] = _alternatives(members)
            elif field.name == "rounding" and spec.rounding is not None:
                found["rounding"] = f"any, since the instruction has its own, {spec.rounding}"
            else:
                found[field.name] = _alternatives(values)
        return {name: text for name, text in found.items() if text}

    def admits(self, model: Model) -> bool:
        """Return whether a model is among those that fit every answer, in any of its equivalent forms."""
        key = Equivalence(self.op).key
        return key(model) in {key(survivor) for survivor in self.survivors}

    @property
    def confirmed(self) -> bool:
        """True if the model gives the codes of the black box on every case that was compared."""
        comparison = self.comparison
        return comparison is not None and comparison.complete and comparison.done > 0 and comparison.wrong_cases == 0

    def __repr__(self) -> str:
        found = "no model" if self.model is None else "a confirmed model" if self.confirmed else "a model that is not confirmed"
        return f"<Inferred of {self.black_box} for {self.op}: {found}, print it for the account>"

    def table(self) -> Table:
        """Make a table with a row per finding.

        Returns:
            The table. Its facts are the model's fields and how the model was confirmed.
        """
        compared = self.comparison
        facts: dict[str, Any] = {"op": str(self.op), "box": self.black_box, "probes": self.probe_count, "confirmed": self.confirmed}
        facts["model"] = None if self.model is None else {name: to_scalar(value) for name, value in vars(self.model).items()}
        facts |= {"survivors": len(self.survivors), "undetermined": self.undetermined, "cases": compared.done if compared else 0}
        facts |= {"wrong_outputs": compared.wrong_outputs if compared else None}
        return Table(repr(self)[1:-1], ("field", "value", "evidence"), tuple((f.field, f.value, f.evidence) for f in self.findings), facts)

    def __str__(self) -> str:
        target = None if self.comparison is None else self.comparison.left.target
        lines = [
            f"{self.op}",
            *wrap_lines("" if target is None else describe_unit(self.op, target)),
            f"{self.black_box}, by {self.probe_count:,} probes:",
            *(line for f in self.findings for line in wrap_lines(f"  {f}", indent="    ")),
        ]
        if self.model is None or self.comparison is None:
            return "\n".join([*lines, "No model of tcemu with an order of terms that is searched has this arithmetic."])
        outputs = self.comparison.done * self.op.m * self.op.n
        lines += wrap_lines(repr(self.model), indent="      ")
        if not self.confirmed:
            differing = f"{self.comparison.wrong_outputs:,} of {outputs:,} outputs differ from it, so the model is incomplete."
            return "\n".join([*lines, differing])
        lines.append(f"0 mismatches with it of {outputs:,} outputs.")
        if self.undetermined:
            lines.append("Not determined, since no operands of this instruction were found that show it:")
            lines += [line for name, text in self.undetermined.items() for line in wrap_lines(f"  {name}: {text}", indent="    ")]
        return "\n".join(lines)


def _alternatives(values: Sequence[Any]) -> str:
    """Format several values, or return "" for one."""
    words = [str(value) for value in values]
    return "" if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _order_values(name: str, order: Order, k: int) -> str:
    """Format the values of a field of the order in all orders with the same steps, or return "" for one."""
    orders = equal_orders(order, k)
    values: list[Any] = list(dict.fromkeys(getattr(one, name) for one in orders))
    if name == "terms" and any(one.terms == k // one.groups for one in orders):
        values = [*values[:-1], f"{values[-1]} or more"]
        return " or ".join(map(str, values)) if len(values) <= 2 else f"{', '.join(map(str, values[:-1]))} or {values[-1]}"
    if name == "chain" and "k" in values:
        return _alternatives([value for value in values if value != k] + [f"{k} or more"])
    return _alternatives(values)


def _floors(values: Sequence[int], same: Equivalence) -> str:
    """Format the floors that fit, or return "" for one."""
    distinct = sorted({max(value, same.lowest_exponent) for value in values})
    if distinct[0] > same.lowest_exponent:
        return _alternatives(distinct)
    highest = distinct[0]
    while highest + 1 in distinct:
        highest += 1
    return _alternatives([f"at most {highest}", *(value for value in distinct if value > highest)]) or f"at most {highest}"


# ---- the search


MIN_EXPONENT_RANGE = 12  # exponents from the smallest to the largest product, without which no probe of the order works
MAX_SINGLE_SLOTS = 32  # slots up to which small terms may be asked about one by one
QUIET_ROUNDS = 16  # rounds without operands that tell the remaining models apart, after which the search ends
QUESTIONS_PER_ROUND = 32
MODELS_PER_ROUND, DOTS_PER_ROUND = 48, 2048  # remaining models, and dot products, that a round compares; more of fewer models
MAX_DOTS_PER_ROUND = 8192
EVIDENCE_FIELDS = ("fraction_bits", "alignment", "rounding", "result_bits", "result", "summed", "multiplicand", "from_zero", "floor")


def infer_model(op: str | Instruction, black_box: str | Implementation | Callable, *, cases: int = 512, seed: int = 1) -> InferredModel:
    """Infer the Model by which a black box computes one instruction's D = A·B + C.

    The order of the terms is found by probes, with all groups, and with chains of 2, 4, 8, 16 and 32 products and of an instruction. Then
    all widths, roundings, alignments, floors and formats are hypotheses. Random operands eliminate those that contradict the black box, and
    a search looks for operands that tell the others apart, until it finds none. A field that remains open is listed in `undetermined`, with
    all values that fit; the model then has the plainest.

    Args:
        op: PTX spelling, short name or `Instruction` that computes. Its shape bounds what can be seen: a step with more terms than its K
            looks like a step with K terms.
        black_box: Anything that `tcemu.fuzz.get_implementation` takes: a function from operands (NumPy codes) to D's codes, an
            `Implementation`, or a target, whose emulation is then treated as unknown.
        cases: Number of cases for the comparison of the model with the black box.
        seed: Seed of these cases and of the operands of the search.

    Returns:
        The inferred model, with its evidence.

    Raises:
        Unsupported: `op` does not compute, or the range of its operands is too small to show where terms are truncated.
        ValueError: An argument is invalid.
        KeyboardInterrupt: Ctrl-C.
    """
    op = require_product(resolve_common_op(op, black_box))
    if not isinstance(cases, int | np.integer) or cases < 1:
        raise ValueError(f"cases: got {cases}; expected an integer from 1, since a comparison of no cases confirms nothing")
    implementation = get_implementation(op, black_box)
    if op.d == S32:
        return _infer_integer_model(op, implementation, cases, seed)
    search = ModelSearch(ProbeBench(op, implementation), seed)
    try:
        models = search.find_models()
    except Unreachable as error:
        raise Unsupported(
            f"{op}: the range of its operands is too small: {error}; use an instruction of this kind with wider types"
        ) from error
    return _confirm(op, implementation, models, search.findings, search.bench.probe_count, cases=cases, seed=seed)


def _infer_integer_model(op: MatrixMultiply, implementation: Implementation, cases: int, seed: int) -> InferredModel:
    """Infer after how many products .satfinite clamps, the only field of a model with an s32 result."""
    bench, spec = DotBench(op, implementation), product_spec(op)
    findings = [ModelFinding("result", S32, "the only result of integers; the cases cover the limits of its range")]
    step = find_clamp_step(bench) if spec.clamp and spec.bit_op is None else None
    if step is not None:
        shown = f"with C = 2^31 - 1, 1 as the first product and -1 as a later one cancel up to product {step}"
        findings.append(ModelFinding("clamp_step", step, f"{shown} of {spec.k}"))
    model = Model(S32, clamp_step=None if step == spec.k else step)
    return _confirm(op, implementation, [model], findings, bench.probe_count, cases=cases, seed=seed)


def _confirm(
    op: MatrixMultiply,
    black_box: Implementation,
    models: Sequence[Model],
    findings: Sequence[ModelFinding],
    probe_count: int,
    *,
    cases: int,
    seed: int,
) -> InferredModel:
    """Compare the first model with the black box on generated cases, and return the inference."""
    if not models:
        return InferredModel(op, black_box.name, None, tuple(findings), probe_count, None)
    model, target = models[0], next(iter(targets(op)))
    right = emulator(op, target, model, "the model found")
    now = find_mismatches(op, black_box, right, cases=cases, seed=seed, shrink=False, coverage=False)
    if now.stopped:
        raise Interrupted(now.signal)
    return InferredModel(op, black_box.name, model, tuple(findings), probe_count, now, tuple(models) if now.wrong_cases == 0 else ())


class ModelSearch:
    """The search for the model of one black box: the order of the terms by probes, all other fields by elimination."""

    def __init__(self, bench: ProbeBench, seed: int):
        self.bench, self.spec = bench, bench.spec
        self.findings: list[ModelFinding] = []
        self.same = Equivalence(bench.op)
        self.drawer = DotDrawer(self.spec, bench.top, bench.normal_bottom, seed)
        self.boundary_drawer = BoundaryDrawer(self.spec, bench.top, bench.lowest_normal, seed)
        self.seed = seed
        self.dots: list[DotArrays] = []
        self.answers: list[np.ndarray] = []
        self.unexplained = False  # whether no hypothesis explains all answers

    def note(self, field: str, value: Any, evidence: str) -> None:
        self.findings.append(ModelFinding(field, value, evidence))

    def find_models(self) -> list[Model]:
        """Return the models that agree with every answer, the plainest first; the best one if none agrees; none without an order."""
        self.probe_specials()
        general, best = list(self.findings), None
        for order in self.probe_orders():
            groups = self.find_with_order(order)
            if best is None or not self.unexplained:
                best = groups, self.unexplained, self.findings
            if not self.unexplained:
                break
            self.findings, self.unexplained = list(general), False
        if best is None:
            return []
        groups, self.unexplained, self.findings = best
        models = sorted((model for group in groups for model in group.models()), key=self.plainness)
        self.note_evidence(models)
        return models

    def find_with_order(self, order: Order) -> list[ModelGroup]:
        """Return the models with this order that agree with every answer, or with the most."""
        zeros = self.dots[0], self.answers[0]  # all products -0, and C: from `probe_specials`
        groups = self.keep_agreeing(self.list_hypotheses(order), *zeros)
        groups = self.eliminate(groups, self.draw_without_floors(16, groups))
        groups = self.eliminate(groups, self.draw_without_floors(112, groups))
        groups = self.eliminate(self.with_floors(groups), join_dots([self.smallest_dots(), self.drawer.draw(64)]))
        groups = self.eliminate(groups, self.drawer.draw(160))
        return self.separate(groups)

    def plainness(self, model: Model) -> tuple:
        """Return a key by which plainer models come first."""
        lowest = min(self.same.lowest_exponent, FLOOR_EXPONENTS.get(model.result.bits, 0))
        return (
            model.result != self.spec.d,
            model.fraction_bits is None,
            model.multiplicand is not None,
            model.from_zero,
            abs(int(model.floor) - lowest),
            model.alignment != "RZ",
            -(model.result.mantissa_bits if model.result_bits is None else int(model.result_bits)),
            ("RZ", "RN", "RM", "RP").index(model.rounding) if model.result != F16 else ("RN", "RZ", "RM", "RP").index(model.rounding),
        )

    # ---- specials

    def probe_specials(self) -> None:
        """Probe NaN codes and infinities, which are the same in every model, and zeros."""
        questions, spec = special_questions(self.spec), self.spec
        answers = self.bench.ask_codes(list(questions.values()))
        evidence = ", ".join(f"{name} gives {hex_code(spec.d, code)}" for name, code in zip(questions, answers, strict=True))
        self.note("", "specials", evidence)
        self.record([self.bench.dot_operands(list(questions.values())[-1])], answers[-1:])

    # ---- the order of terms

    def probe_orders(self) -> Iterator[Order]:
        """Yield the orders that explain which terms survive beside a pair of large ones, the most reliable probe first."""
        bench, n = self.bench, self.bench.slots
        if bench.top - bench.bottom < MIN_EXPONENT_RANGE:
            raise Unreachable(f"terms from 2^{bench.bottom} to 2^{bench.top}, of which the smallest must vanish beside the largest")
        normal = self.lowest_surviving(bench.normal_bottom)
        found, counts = [], []
        lossless: set[int] = set()  # sizes of small terms that all survive, so that one by one they survive too
        bottoms = dict.fromkeys((normal, bench.bottom, normal + 4, normal + 8))
        for bottom, single in [(bottom, single) for single in ((False, True) if n <= MAX_SINGLE_SLOTS else (False,)) for bottom in bottoms]:
            table = None if bottom in lossless else self.order_table(bottom, single)
            if table is None:
                continue
            if n > 1 and (table + 2 * np.eye(n + 1, dtype=int) == 2).all():
                lossless.add(bottom)
                continue
            counts = counts or sorted(set(table[0, 1:].tolist()))
            matched = match_order(table)
            if matched is not None and matched not in found:
                found.append(matched)
                self.note_order(matched, bottom, single)
                yield matched
        if lossless and not found:
            raise Unreachable(f"terms of 2^{bench.bottom} survive beside every 2^{bench.top}")
        if not found:
            probes = f"pairs of 2^{bench.top} and -2^{bench.top}, all other terms smaller"
            self.note("terms", "unknown", f"{probes}: no model gives these numbers of surviving terms: {counts or 'fractions'}")

    def lowest_surviving(self, bottom: int) -> int:
        """Return the least exponent from which on a power of two alone, in C or in the first product, is its own sum."""
        exponents = range(bottom, self.bench.top + 1)
        answers = self.bench.ask_values([{leaf: power_of_two(e)} for e in exponents for leaf in (0, ACCUMULATOR)])
        lost = [e for i, e in enumerate(exponents) if any(answer != power_of_two(e) for answer in answers[2 * i : 2 * i + 2])]
        lowest = max(lost, default=bottom - 1) + 1
        if self.bench.top - lowest < MIN_EXPONENT_RANGE:
            raise Unreachable(f"a single term below 2^{lowest} is lost, and the largest that operands reach is 2^{self.bench.top}")
        return lowest

    def order_table(self, bottom: int, single: bool) -> np.ndarray | None:
        """Return for each pair of slots the number of terms that do not survive beside them, or None if answers are not such numbers.

        single: whether the small terms are asked about one by one. That takes more questions, and finds the order of steps that retain too
        few bits to count small terms.

        Source: FPRev (Xie, Gao and Jia, arXiv 2411.00442).
        """
        bench, n = self.bench, self.bench.slots
        large, small = power_of_two(bench.top), power_of_two(bottom)
        leaves, pairs = [*range(n), ACCUMULATOR], list(combinations(range(n + 1), 2))
        # A directed rounding moves a large term towards small ones of one sign, so that the first large term must have that sign. C may be
        # first or last.
        for sign, c_sign in product((1, -1), (-1, 1)):
            questions = []
            for i, j in pairs:
                first = -c_sign * large if leaves[j] == ACCUMULATOR else large
                ends = {leaves[i]: first, leaves[j]: -first}
                others = [leaf for leaf in leaves if leaf not in ends]
                if single:
                    questions += [ends | {leaf: sign * small} for leaf in others]
                else:
                    questions.append(ends | dict.fromkeys(others, sign * small))
            values = [value / (sign * small) if isinstance(value, Fraction) else Fraction(-1) for value in bench.ask_values(questions)]
            if single:
                if not set(values) <= {0, 1}:
                    continue
                values = (
                    [sum(values[start : start + n - 1], Fraction(0)) for start in range(0, len(values), n - 1)] if n > 1 else [Fraction(0)]
                )
            if all(value.denominator == 1 and 0 <= value <= n - 1 for value in values):
                table = np.zeros((n + 1, n + 1), int)
                for (i, j), value in zip(pairs, values, strict=True):
                    table[i, j] = table[j, i] = n + 1 - int(value)
                return table
        return None

    def note_order(self, order: Order, bottom: int, single: bool) -> None:
        bench, n = self.bench, self.bench.slots
        others = f"one other term 2^{bottom} at a time" if single else f"all other terms 2^{bottom}"
        probes = f"{n * (n + 1) // 2} pairs of 2^{bench.top} and -2^{bench.top}, {others}"
        blocks = "" if bench.slot_width == 1 else f" (blocks of {bench.slot_width})"
        meets = f"{order.terms} terms{blocks} meet in a step, {order.steps_per_instruction(n)} in all"
        last = "C with the first" if order.chain is None else "C is added after them"
        self.note("terms", order.terms * bench.slot_width, f"{probes}: by the surviving terms, {meets}, {last}")
        if order.groups > 1:
            self.note("groups", order.groups, "terms meet in pairs that alternate between groups")
        if order.chain is not None:
            together = ", chains first with each other" if order.together else ""
            self.note("chain", self.chain_products(order), f"which terms survive beside C{together}")

    def chain_products(self, order: Order) -> Any:
        return order.chain * self.bench.slot_width if isinstance(order.chain, int) else order.chain

    # ---- hypotheses

    def list_hypotheses(self, order: Order) -> list[ModelGroup]:
        """Return all models with this order that the instruction can have, with the lowest floor and A and B as they are."""
        spec, width = self.spec, self.bench.slot_width
        shared: dict[str, Any] = {"terms": order.terms * width, "groups": order.groups, "together": order.together}
        shared["chain"] = self.chain_products(order)
        results: tuple[Format, ...] = (F16, F32) if spec.d == F16 else (spec.d,)
        groups = []
        for result in results:
            if order.terms * width == 1:
                for from_zero in (False, True) if order.chain is not None else (False,):
                    groups.append(exact_group(Model(result, fraction_bits=None, rounding="RN", from_zero=from_zero, **shared)))
            if result != F64:
                sums = (None,) if spec.scale is None else (None, *(1 << i for i in range(7) if spec.k // spec.scale_vec % (1 << i) == 0))
                for summed in sums:
                    if summed is None or shared["terms"] % summed == 0:
                        groups.append(fused_group(Model(result, summed=summed, **shared)))
        return [group for group in groups if self.is_defined(group)]

    def is_defined(self, group: ModelGroup) -> bool:
        try:
            predict(self.spec, group.select(np.array([0])), self.drawer.draw(1, high=True))
        except ValueError:
            return False
        return True

    def with_floors(self, groups: Sequence[ModelGroup]) -> list[ModelGroup]:
        """Return the hypotheses with every floor below the largest terms, and with every conversion of A and B."""
        found = []
        for group in groups:
            if group.base.fraction_bits is None:
                found.append(group)
                continue
            lowest = min(self.same.lowest_exponent, FLOOR_EXPONENTS.get(group.base.result.bits, 0))
            floors = [lowest, *range(self.same.lowest_exponent + 1, self.bench.top - 8)]
            for members in self.same.multiplicands:
                if group.base.summed is None or None in members:
                    converted = ModelGroup(group.base.replace(multiplicand=None if None in members else members[0]), group.numbers)
                    if converted.base.multiplicand is None or (group.base.summed is None and self.is_defined(converted)):
                        found.append(converted.with_field(FLOOR, floors))
        return found

    def draw_without_floors(self, count: int, groups: Sequence[ModelGroup]) -> DotArrays:
        """Draw dot products with large terms, and return those in which the floor shows for the fewest of some of the models."""
        dots = self.drawer.draw(4 * count, high=True)
        sensitive = np.zeros(4 * count, int)
        total, random = sum(len(group.numbers) for group in groups), np.random.default_rng(self.seed)
        for group in _select_models(groups, np.sort(random.permutation(total)[:MODELS_PER_ROUND])):
            if group.base.fraction_bits is not None:
                low, high = (predict(self.spec, group.with_field(FLOOR, [floor]), dots) for floor in (LOWEST_FLOOR, self.bench.top - 9))
                sensitive += (low != high).sum(0)
        return select_dots(dots, np.sort(np.argsort(sensitive, kind="stable")[:count]))

    def smallest_dots(self) -> DotArrays:
        """Return single powers of two below the middle of the range, as C and as the first product, down to the smallest of each."""
        bench, spec, dots = self.bench, self.spec, []
        lowest = {0: bench.bottom, ACCUMULATOR: max(spec.c.min_exponent - spec.c.mantissa_bits, -200)}
        if bench.scaling is None:
            lowest[0] = max(sum(fmt.min_exponent - fmt.mantissa_bits for fmt in (spec.a, spec.b)), -200)
        for leaf, least in lowest.items():
            for exponent in range(least, (bench.top + bench.bottom) // 2):
                with suppress(Unreachable):
                    dots.append(bench.dot_operands({leaf: power_of_two(exponent)}))
        return stack_dots(dots)

    # ---- elimination

    def record(self, dots: Sequence[Any], answers: Sequence[int]) -> None:
        self.dots.append(stack_dots(dots))
        self.answers.append(np.array(answers, np.uint64))

    def eliminate(self, groups: Sequence[ModelGroup], dots: DotArrays) -> list[ModelGroup]:
        """Ask the black box these dot products, and return the models that give its answers: or those that give the most."""
        self.record(listed := list_dots(dots), self.bench.ask_dots(listed))
        return self.keep_agreeing(groups, dots, self.answers[-1])

    def keep_agreeing(self, groups: Sequence[ModelGroup], dots: DotArrays, answers: np.ndarray) -> list[ModelGroup]:
        agreeing = [(predict(self.spec, group, dots).astype(np.uint64) == answers).sum(1) for group in groups]
        most = max((int(count.max()) for count in agreeing if count.size), default=0)
        self.unexplained |= most < len(answers)
        return [group.select(count == most) for group, count in zip(groups, agreeing, strict=True) if (count == most).any()]

    def separate(self, groups: list[ModelGroup]) -> list[ModelGroup]:
        """Search operands for which the remaining models differ, and ask the black box these, until none are found."""
        quiet, rounds, random = 0, 0, np.random.default_rng(self.seed)
        while quiet < QUIET_ROUNDS and not self.unexplained and (count := sum(len(group.numbers) for group in groups)) > 1:
            rounds += 1
            sample = _select_models(groups, np.sort(random.permutation(count)[:MODELS_PER_ROUND]))
            size = min(MAX_DOTS_PER_ROUND, MODELS_PER_ROUND * DOTS_PER_ROUND // min(count, MODELS_PER_ROUND))
            if rounds == 1 and not self.bench.op.sparse:
                dots = self.generated_dots()
            else:
                dots = self.boundary_drawer.draw(size, sample) if rounds % 2 == 0 else self.drawer.draw(size, high=rounds % 6 == 3)
            results = np.concatenate([predict(self.spec, part, dots).astype(np.uint64) for part in sample])
            differ = np.flatnonzero((results != results[0]).any(0))
            if not differ.size:
                quiet += 1
                continue
            quiet = 0
            largest_class = [np.unique(results[:, i], return_counts=True)[1].max() for i in differ[:512]]
            chosen = differ[np.argsort(largest_class, kind="stable")[:QUESTIONS_PER_ROUND]]
            groups = self.eliminate(groups, select_dots(dots, chosen))
        return groups

    def generated_dots(self) -> DotArrays:
        """Return dot products on the diagonals of generated cases."""
        op, spec = self.bench.op, self.spec
        side = min(op.m, op.n)
        drawn = {name: np.asarray(v) for name, v in generate(op, self.seed, 0, 64).items()}
        index = np.arange(side)
        dots = {"a": drawn["a"][:, index], "b": np.moveaxis(drawn["b"], 1, 2)[:, index], "c": drawn["c"][:, index, index]}
        if spec.scale is not None:
            dots |= {"scale_a": drawn["scale_a"][:, index], "scale_b": np.moveaxis(drawn["scale_b"], 1, 2)[:, index]}
        formats = {"a": spec.a, "b": spec.b, "c": spec.c}
        flat = {name: v.reshape(-1, *v.shape[2:]) for name, v in dots.items()}
        return select_dots({name: _as_integers(formats.get(name), v) for name, v in flat.items()}, slice(0, DOTS_PER_ROUND))

    # ---- evidence

    def note_evidence(self, models: Sequence[Model]) -> None:
        """Note for every field the values that fit, and how many answers contradict the values next to them."""
        dots, answers = join_dots(self.dots), np.concatenate(self.answers)
        model = models[0]
        if self.unexplained:
            agreeing = int((predict(self.spec, group_models([model])[0], dots).astype(np.uint64) == answers).sum())
            self.note("", "no model", f"explains all answers; the one below explains {agreeing} of {len(answers)}")
            return
        result = InferredModel(self.bench.op, "", model, (), 0, None, tuple(models))
        for name in EVIDENCE_FIELDS:
            if name in result.undetermined:
                continue
            others = [other for other in self.neighbours(model, name) if not result.admits(other)]
            counts = []
            for other in others:
                (group,) = group_models([other])
                if self.is_defined(group):
                    wrong = int((predict(self.spec, group, dots).astype(np.uint64) != answers).sum())
                    counts.append(f"{wrong} contradict {getattr(other, name)}")
            if counts:
                self.note(name, getattr(model, name), f"of {len(answers)} answers, {', '.join(counts)}")

    def neighbours(self, model: Model, name: str) -> list[Model]:
        """Return models that differ from one in a field, by the values next to its own, as far as they are valid."""
        value, result = getattr(model, name), model.result
        choices: dict[str, list[Any]] = {
            "rounding": ["RZ", "RN", "RM", "RP"],
            "alignment": ["RZ", "RN", "RM", "RP"],
            "result": [F16, F32] if self.spec.d == F16 else [],
            "multiplicand": [members[0] for members in self.same.multiplicands],
            "from_zero": [False, True],
            "summed": [None, 8, 16, 32] if self.spec.scale is not None else [],
        }
        if name in ("fraction_bits", "floor"):
            choices[name] = [] if model.fraction_bits is None else [value - 1, value + 1]
        if name == "result_bits":
            kept = result.mantissa_bits if value is None else value
            choices[name] = [] if model.fraction_bits is None else [kept - 1, *([kept + 1] if value is not None else [])]
        found = []
        for choice in choices[name]:
            if choice != value:
                try:
                    found.append(model.replace(**{name: choice}))
                except ValueError:
                    continue
        return found


def _select_models(groups: Sequence[ModelGroup], chosen: np.ndarray) -> list[ModelGroup]:
    """Return the models with these numbers, counted over all groups."""
    parts, start = [], 0
    for group in groups:
        here = chosen[(chosen >= start) & (chosen < start + len(group.numbers))] - start
        start += len(group.numbers)
        if here.size:
            parts.append(group.select(here))
    return parts


def _as_integers(fmt: Format | None, codes: np.ndarray) -> np.ndarray:
    """Return codes with one uint64 each."""
    if fmt is None or fmt.words == 1:
        return codes.astype(np.uint64)
    return codes[..., 0].astype(np.uint64) | codes[..., 1].astype(np.uint64) << np.uint64(32)
