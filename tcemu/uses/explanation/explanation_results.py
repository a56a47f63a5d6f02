"""The results of `explain`: one dot product decomposed into steps, and several explanations side by side with their first divergence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from tcemu.base.results import Result, Table
from tcemu.base.text import WIDTH, table_lines, wrap_lines
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.arithmetic.reference.exact_values import (
    Value,
    decimal_text,
    decode,
    encode,
    exact_decimal_text,
    hex_code,
    multiply_values,
    shortest_text,
    sum_values,
    ulp,
)
from tcemu.engine.arithmetic.reference.reference_products import Product
from tcemu.engine.arithmetic.reference.reference_steps import Step, Term
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.engine.isa.targets import gpus
from tcemu.operations.products.unit_choice import describe_unit
from tcemu.uses.explanation.explanation_picture import BitRow, StepPanel, draw_panels
from tcemu.uses.explanation.step_text import (
    BITS_LEGEND,
    code_lines,
    describe_arithmetic,
    largest_losses,
    list_names,
    result_text,
    rounding_text,
    step_lines,
    step_loss,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Explanation(Result):
    """One dot product, D = A·B + C, step by step.

    `str()` formats all steps for a terminal, or with `brief` only those that lose the most. `text()` always has all steps, and `to_dict()`
    has them as plain values. Codes are Python ints of the formats in `spec`; numbers are Fractions, or "nan", "+inf", "-inf".
    """

    op: MatrixMultiply
    target: str
    label: str  # target, with the differences from its own arithmetic
    evidence: str  # evidence of the arithmetic
    model: Model
    spec: ProductSpec
    a: tuple[int, ...]  # codes of A, for a sparse instruction of the stored elements
    b: tuple[int, ...]  # codes of the elements of B that A's elements multiply
    c: int
    scales: tuple[tuple[int, ...], tuple[int, ...]] | None  # codes of the block scales of A and B
    products: tuple[Product, ...]
    steps: tuple[Step, ...]
    result: int  # code of D
    rounded: tuple[str, ...] = ()  # names of the operands whose numbers were rounded to their format
    padding: int = 0  # zero products that pad K to whole instructions
    out_of_range: tuple[str, ...] = ()  # a sentence for each number that its format cannot hold
    brief: bool = False

    @property
    def d(self) -> Format:
        """The format of the result."""
        return self.spec.d

    @property
    def value(self) -> Value:
        """The value of the result."""
        return decode(self.d, self.result).value

    @property
    def exact(self) -> Value:
        """A·B + C of the codes without rounding."""
        terms = [decode(self.spec.c, self.c).value]
        for product in self.products:
            value = Fraction(product.decoded_a.value != product.decoded_b.value) if self.spec.bit_op == "xor" else product.value
            for scale in product.scales or ():
                value = multiply_values(value, scale.value)
            terms.append(value)
        return sum_values(terms)

    @property
    def nearest(self) -> int:
        """The code of the exact result, rounded to nearest in D's format."""
        return encode(self.d, self.exact)

    @property
    def error(self) -> Fraction | None:
        """Result minus exact result; None unless both are finite."""
        value, exact = self.value, self.exact
        return value - exact if isinstance(value, Fraction) and isinstance(exact, Fraction) else None

    @property
    def ulps(self) -> Fraction | None:
        """The error in units in the last place of D's format at the exact result."""
        error, exact = self.error, self.exact
        return None if error is None or not isinstance(exact, Fraction) else error / ulp(self.d, exact)

    def text(self, colour: bool = False) -> str:
        """Format all steps for a terminal.

        Args:
            colour: Dim the truncated and dropped bits by ANSI codes.
        """
        lines = self._heading()
        if self.spec.bit_op is None:  # else the step shows the operands
            lines += [*code_lines("a", self.spec.a, self.a), *code_lines("b", self.spec.b, self.b)]
        lines.append(f"{code_lines('c', self.spec.c, (self.c,))[0]} = {shortest_text(self.spec.c, self.c)}")
        if self.scales is not None and self.spec.scale is not None:
            for name, codes in zip(("scale_a", "scale_b"), self.scales, strict=True):
                lines += code_lines(name, self.spec.scale, codes)
        lines += self._remarks()
        lines += step_lines(self.steps, self.spec, colour)
        return "\n".join([*lines, "", *self._verdict()])

    def summary(self) -> str:
        """Format the arithmetic, the steps that lose the most, and the result for a terminal."""
        return "\n".join([*self._heading(), "", *largest_losses(self.steps), "", *self._verdict()])

    def _heading(self) -> list[str]:
        lines = (f"{self.op} on {self.label}", describe_unit(self.op, self.target), describe_arithmetic(self.model, self.spec))
        return [line for text in lines for line in wrap_lines(text)]

    def _remarks(self) -> list[str]:
        """Describe the preparation of the operands and the legend of the bits."""
        remarks = []
        if self.rounded:
            remarks.append(f"{', '.join(self.rounded)}: the format does not represent all numbers; they are rounded to the codes above.")
        remarks += [f"{sentence}." for sentence in self.out_of_range]
        if any("became nan" in sentence or "became inf" in sentence or "became -inf" in sentence for sentence in self.out_of_range):
            remarks.append("saturate=True (--saturate) takes the largest value instead.")
        if self.padding:
            remarks.append(f"K is padded to whole instructions with {self.padding} zeros.")
        if any(step.kind == "fused" and step.exact_sum is not None for step in self.steps):
            remarks.append(BITS_LEGEND)
        return remarks

    def _verdict(self) -> list[str]:
        """Compare the result with the exact result."""
        lines = [f"D       {hex_code(self.d, self.result)} = {shortest_text(self.d, self.result)}"]
        nearest = f"the nearest {self.d} is {hex_code(self.d, self.nearest)} = {shortest_text(self.d, self.nearest)}"
        lines.append(f"exact   {exact_decimal_text(self.exact)}; {nearest}")
        if self.error is not None and self.ulps is not None:
            ulps = "" if self.d.is_integer else f", {exact_decimal_text(self.ulps, 8)} ulps of {self.d}"
            lines.append(f"error   {exact_decimal_text(self.error, 12) + ulps if self.error else 'none'}")
        return [*lines, *wrap_lines(f"evidence: {self.evidence}")]

    def __str__(self) -> str:
        return self.summary() if self.brief else self.text()

    def __repr__(self) -> str:
        return f"<Explanation of {self.op} on {self.label}: D = {hex_code(self.d, self.result)}, print it for the steps>"

    def plot(self, step: int | None = None) -> Figure:
        """Draw the terms of one step bit under bit, with the bits that alignment and rounding remove in red.

        Args:
            step: Number of the step, from 1. None: the step that loses the most.

        Returns:
            A matplotlib Figure.

        Raises:
            ValueError: There is no such step.
            ImportError: matplotlib is not installed.
        """
        return draw_panels([self.panel(step)], f"One dot product of {self.spec.a} x {self.spec.b} + {self.spec.c} to {self.d}")

    def panel(self, number: int | None = None) -> StepPanel:
        """Return one step as a panel of the picture. number: as in `plot`."""
        if number is None:
            number = max(range(1, len(self.steps) + 1), key=lambda n: (step_loss(self.steps[n - 1]), -n))
        if not 1 <= number <= len(self.steps):
            raise ValueError(f"step={number}: expected a number from 1 to {len(self.steps)}")
        step = self.steps[number - 1]
        terms = tuple(BitRow(term.name, term.value, step.last_bit) for term in step.terms if term.value != 0)
        total = None
        if step.exact_sum is not None:
            total = BitRow("sum", step.exact_sum, step.result_last_bit if step.rounding_loss else None)
        busy = [index for index, one in enumerate(self.steps, 1) if not _is_idle(one)]
        of = f", step {number} of {len(self.steps)}" if set(busy) - {number} else ""
        kept = ""
        if step.alignment_exponent is not None and step.last_bit is not None:
            kept = f": aligned terms keep {step.alignment_exponent - step.last_bit} fraction bits"
        is_last = not any(index > number for index in busy)
        exact = f", exact {exact_decimal_text(self.exact, 12)}" if is_last else ""
        verdict = f"result {shortest_text(step.fmt, step.result)}{exact}"
        return StepPanel(f"{self._gpu_label()}{of}{kept}", terms, total, step.last_bit, verdict)

    def _gpu_label(self) -> str:
        """Return the label with the names of some GPUs of the target."""
        names = [name for name, target in gpus().items() if target == self.target][:2]
        return self.label + (f" ({', '.join(names)})" if names else "")

    def table(self) -> Table:
        """Tabulate the terms of all steps: value, shift, retained and truncated value as floats. `to_dict()` has the exact values."""
        title = f"{self.op} on {self.label}: D = {shortest_text(self.d, self.result)}"
        return Table(title, ("target", *TERM_COLUMNS), tuple((self.label, *row) for row in term_rows(self.steps)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that json can write.

        Codes are ints. A number is a string that `Fraction` reads, "nan", "+inf" or "-inf".
        """
        s = self.spec
        return {
            "op": str(self.op),
            "target": self.target,
            "label": self.label,
            "evidence": self.evidence,
            "model": {k: _plain_value(v) for k, v in vars(self.model).items()},
            "formats": {name: fmt.name for name, fmt in (("a", s.a), ("b", s.b), ("c", s.c), ("d", s.d), ("scale", s.scale)) if fmt},
            "a": list(self.a),
            "b": list(self.b),
            "c": self.c,
            "scales": None if self.scales is None else {"a": list(self.scales[0]), "b": list(self.scales[1])},
            "rounded": list(self.rounded),
            "out_of_range": list(self.out_of_range),
            "padding": self.padding,
            "steps": [step_dict(step, number) for number, step in enumerate(self.steps, 1)],
            "result": {"code": self.result, "word": hex_code(self.d, self.result), "value": str(self.value)},
            "exact": {"value": str(self.exact), "nearest": self.nearest},
            "error": None if self.error is None else str(self.error),
            "ulps": None if self.ulps is None else str(self.ulps),
        }


TERM_COLUMNS = ("step", "kind", "term", "value", "exponent", "shift", "retained", "truncated", "result")


def term_rows(steps: tuple[Step, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the terms of all steps as values of `TERM_COLUMNS`."""
    for number, step in enumerate(steps, 1):
        for term in step.terms:
            value = term.value if isinstance(term.value, Fraction) else float(term.value)
            yield number, step.kind, term.name, value, term.exponent, term.shift, term.retained, term.truncated, str(step.value)


def step_dict(step: Step, number: int) -> dict[str, Any]:
    """Return one step as plain values."""
    return {
        "step": number,
        "kind": step.kind,
        "instruction": step.instruction,
        "exponent": step.alignment_exponent,
        "last_bit": step.last_bit,
        "terms": [term_dict(term) for term in step.terms],
        "sum": _fraction_text(step.exact_sum),
        "rounding": step.rounding,
        "format": step.fmt.name,
        "result_bits": step.result_bits,
        "result": {"code": step.result, "word": hex_code(step.fmt, step.result), "value": str(step.value)},
        "rounding_loss": _fraction_text(step.rounding_loss),
        "rule": step.rule,
    }


def term_dict(term: Term) -> dict[str, Any]:
    """Return one term as plain values."""
    plain = {"name": term.name, "value": str(term.value), "exponent": term.exponent, "shift": term.shift}
    plain |= {"retained": _fraction_text(term.retained), "truncated": _fraction_text(term.truncated)}
    if term.code is not None:
        return plain | {"code": term.code}
    return plain | {
        "k": [p.index for p in term.products],
        "a": [p.a for p in term.products],
        "b": [p.b for p in term.products],
        "scales": None if term.products[0].scale_codes is None else list(term.products[0].scale_codes),
    }


def _fraction_text(value: Fraction | None) -> str | None:
    return None if value is None else str(value)


def _plain_value(value: Any) -> Any:
    return value.name if isinstance(value, Format) else value


# ---- several explanations

EventKey = tuple
ARITHMETICS_PER_TABLE = 3  # arithmetics in one table, so that it fits a terminal


class Event(NamedTuple):
    """An operation that may remove bits: the alignment of a term, or the rounding of a step."""

    products_before: float  # number of products before the operation
    removed: Value  # removed value; the result in a step with a NaN or an infinity
    number: int  # number of the step, from 1
    step: Step
    term: Term | None  # aligned term; None for a rounding


@dataclass(frozen=True)
class RoundingDivergence:
    """The first operation in which two explanations remove different bits."""

    labels: tuple[str, str]  # labels of the two explanations
    steps: tuple[int | None, int | None]  # number of the step in each; None if an explanation has no such operation
    term: str | None  # name of the term whose alignment differs; None for the rounding of a step
    removed: tuple[Value | None, Value | None]  # removed value in each
    reason: str  # description for people

    def __str__(self) -> str:
        return self.reason

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that json can write."""
        taken = [None if v is None else str(v) for v in self.removed]
        return {"labels": list(self.labels), "steps": list(self.steps), "term": self.term, "taken": taken, "reason": self.reason}


@dataclass(frozen=True, repr=False)
class Explanations(Result):
    """Explanations of one dot product by several arithmetics. `str()` formats them for a terminal, `to_dict()` has plain values."""

    explanations: tuple[Explanation, ...]

    @property
    def agree(self) -> bool:
        """True if all results have the same code."""
        return len({e.result for e in self.explanations}) == 1

    @property
    def divergences(self) -> tuple[RoundingDivergence | None, ...]:
        """The first divergence of each further explanation from the first one; None if they remove the same bits everywhere."""
        names = [e.label for e in self.explanations]
        if any("," in name for name in names) or len(set(names)) < len(names):  # too long for a sentence, or ambiguous
            names = [f"[{number}]" for number in range(1, len(names) + 1)]
        pairs = zip(self.explanations[1:], names[1:], strict=True)
        return tuple(find_divergence(self.explanations[0], other, (names[0], name)) for other, name in pairs)

    def text(self) -> str:
        """Format all explanations for a terminal."""
        first = self.explanations[0]
        same = all(e.op == first.op for e in self.explanations)
        lines = [str(first.op)] if same else []
        for number, e in enumerate(self.explanations, 1):
            lines.append(f"[{number}] {e.label}" if same else f"[{number}] {e.op} on {e.label}")
            for text in (describe_unit(e.op, e.target), describe_arithmetic(e.model, e.spec)):
                lines += [f"    {line}" for line in wrap_lines(text, width=WIDTH - 4)]
        lines += [f"{sentence}." for sentence in dict.fromkeys(sentence for e in self.explanations for sentence in e.out_of_range)]
        lines += ["", *self._table(), ""]
        lines += [line for number, e in enumerate(self.explanations, 1) for line in _step_lines(e, number)]
        lines += ["", f"exact {exact_decimal_text(first.exact)}", *self._divergence_lines()]
        for number, e in enumerate(self.explanations, 1):
            lines += wrap_lines(f"[{number}] evidence: {e.evidence}")
        return "\n".join(lines)

    def _table(self) -> list[str]:
        """Tabulate the terms that are not zero everywhere: the step, shift and truncated value in each arithmetic."""
        alignments = [
            {key: event for key, event in collect_events(e).items() if event.term is not None and _is_operand_key(key)}
            for e in self.explanations
        ]
        keys = sorted(dict.fromkeys(key for events in alignments for key in events), key=lambda key: (key[0] != "C", key[1:]))
        terms = {key: next(event.term for events in alignments if (event := events.get(key)) and event.term) for key in keys}
        zeros = [key for key in keys if terms[key].value == 0 and all(events[key].removed == 0 for events in alignments if key in events)]
        table, divergences = [], self.divergences
        for first in range(0, len(alignments), ARITHMETICS_PER_TABLE):
            numbers = range(first, min(first + ARITHMETICS_PER_TABLE, len(alignments)))
            columns = (heading for number in numbers for heading in (f"[{number + 1}] step", "shift", "trunc."))
            headings = ["", "exact value", *columns, ""]
            rows = []
            for key in (key for key in keys if key not in zeros):
                name = terms[key].name
                cells = [cell for number in numbers for cell in _event_cells(alignments[number].get(key))]
                others = [f"[{n + 1}]" for n in numbers if n and (d := divergences[n - 1]) is not None and d.term == name]
                mark = f"<- [1] and {', '.join(others)} diverge" if others else ""
                rows.append([name, decimal_text(terms[key].value), *cells, mark])
            table += [*([""] if first else []), *table_lines(headings, rows, left=(0, len(headings) - 1))]
        return [*table, *wrap_lines(f"{list_names([terms[key].name for key in zeros])}: zero", indent="  ")] if zeros else table

    def _divergence_lines(self) -> list[str]:
        lines = []
        for number, divergence in enumerate(self.divergences, 2):
            text = "remove the same bits everywhere" if divergence is None else f"diverge {divergence.reason}"
            lines += wrap_lines(f"[1] and [{number}] {text}")
        if self.agree and any(divergence is not None for divergence in self.divergences):
            lines.append("The results are equal nevertheless.")
        return lines

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Explanations of {len(self.explanations)}: {', '.join(map(repr, self.explanations))}>"

    def plot(self, step: int | None = None) -> Figure:
        """Draw one step of each explanation, bit under bit, one panel below the other.

        Args:
            step: Number of the step, from 1. None: the step in which an explanation diverges from the first, and if none does, the step
                that loses the most.

        Returns:
            A matplotlib Figure.

        Raises:
            ValueError: An explanation has no such step.
            ImportError: matplotlib is not installed.
        """
        numbers: list[int | None] = [step] * len(self.explanations)
        if step is None:
            found = [divergence.steps if divergence else (None, None) for divergence in self.divergences]
            first = next((steps[0] for steps in found if steps[0] is not None), None)
            numbers = [first, *(steps[1] for steps in found)]
        panels = [explanation.panel(number) for explanation, number in zip(self.explanations, numbers, strict=True)]
        spec = self.explanations[0].spec
        return draw_panels(panels, f"The same dot product of {spec.a} x {spec.b} + {spec.c} to {spec.d} by {len(panels)} arithmetics")

    def table(self) -> Table:
        """Tabulate the rows of all explanations, distinguished by "target"."""
        tables = [e.table() for e in self.explanations]
        results = {e.label: shortest_text(e.d, e.result) for e in self.explanations}
        return Table(repr(self)[1:-1], tables[0].columns, tuple(row for table in tables for row in table.rows), {"results": results})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that json can write."""
        return {
            "agree": self.agree,
            "divergences": [None if p is None else p.to_dict() for p in self.divergences],
            "explanations": [e.to_dict() for e in self.explanations],
        }


def _is_operand_key(key: EventKey) -> bool:
    """Return True for the key of an operand, which every arithmetic has, and False for a running value."""
    return key[0] in ("C", "k")


def _event_cells(event: Event | None) -> list[str]:
    if event is None or event.term is None:
        return ["", "", ""]
    term = event.term
    truncated = "" if term.truncated is None else decimal_text(term.truncated, 4) if term.truncated else "."
    return [str(event.number), "" if term.shift is None else str(term.shift), truncated]


def _step_lines(e: Explanation, number: int) -> list[str]:
    """Format the steps of one explanation, one line each, and its result."""
    lines = []
    for index, step in enumerate(e.steps, 1):
        if not _is_idle(step):
            aligned = "" if step.alignment_exponent is None else f", aligned to 2^{step.alignment_exponent}"
            names = list_names([t.name for t in step.terms])
            lines.append(f"[{number}] step {index}: {names}{aligned} -> {result_text(step)}, {rounding_text(step)}")
    idle = sum(map(_is_idle, e.steps))
    if idle:
        lines.append(f"[{number}] {'one more step adds' if idle == 1 else f'{idle} more steps add'} zeros to the running value")
    error = "" if e.error is None or e.ulps is None else f", error {exact_decimal_text(e.error, 9)} ({exact_decimal_text(e.ulps, 8)} ulps)"
    result = f"[{number}] D = {hex_code(e.d, e.result)} = {shortest_text(e.d, e.result)}{error}"
    return [*(line for text in lines for line in wrap_lines(text, indent="    ")), result]


def _is_idle(step: Step) -> bool:
    """Return True for a step that only adds zeros to the running value and loses nothing."""
    first, *others = step.terms
    return step.kind in ("fused", "fma") and first.name == "running" and not any(t.value for t in others) and step.value == first.value


def collect_events(e: Explanation) -> dict[EventKey, Event]:
    """Return all alignments and roundings of an explanation, by keys that match between explanations."""
    events: dict[EventKey, Event] = {}
    before = 0
    for number, step in enumerate(e.steps, 1):
        count = 0
        for term in step.terms:
            key = ("k", *(p.index for p in term.products)) if term.products else (term.name, *(() if term.name == "C" else (number,)))
            count += len(term.products)
            removed: Value = term.truncated if term.truncated is not None else str(step.value)
            events.setdefault(key, Event(before + count, removed, number, step, term))
        before += count
        same = sum(key[:2] == ("round", before) for key in events)
        removed = step.rounding_loss if step.rounding_loss is not None else str(step.value)
        events["round", before, same] = Event(before + 0.5, removed, number, step, None)
    return events


def find_divergence(left: Explanation, right: Explanation, names: tuple[str, str]) -> RoundingDivergence | None:
    """Find the first alignment or rounding, in the order of the products, that removes different bits.

    Args:
        left: One explanation.
        right: The other explanation.
        names: Names of the explanations in the reason.
    """
    left_events, right_events = collect_events(left), collect_events(right)
    pairs = {key: (left_events.get(key), right_events.get(key)) for key in dict.fromkeys([*left_events, *right_events])}
    differing = [pair for pair in pairs.values() if _events_differ(*pair)]
    if not differing:
        return None
    pair = min(differing, key=lambda pair: min(event.products_before for event in pair if event is not None))
    first = next(event for event in pair if event is not None)
    term = next((event.term for event in pair if event is not None and event.term is not None), None)
    if term is not None:
        place = f"in step {first.number} at {term.name}, {exact_decimal_text(term.value, 12)}"
    else:
        place = f"where step {first.number} rounds, after {list_names([t.name for t in first.step.terms])}"
    effects = "; ".join(_event_text(name, event) for name, event in zip(names, pair, strict=True))
    return RoundingDivergence(
        labels=(left.label, right.label),
        steps=(pair[0] and pair[0].number, pair[1] and pair[1].number),
        term=term and term.name,
        removed=(pair[0] and pair[0].removed, pair[1] and pair[1].removed),
        reason=f"{place}: {effects}.",
    )


def _events_differ(left: Event | None, right: Event | None) -> bool:
    if left is None or right is None:
        present = left or right
        return present is not None and present.removed != 0 and (present.term is None or isinstance(present.removed, Fraction))
    if left.term is not None and isinstance(left.removed, str) != isinstance(right.removed, str):
        return False  # a step with a NaN or an infinity truncates nothing; its result shows the difference
    return left.removed != right.removed


def _event_text(label: str, event: Event | None) -> str:
    if event is None:
        return f"{label} does not round there"
    place = f"{label} in step {event.number}"
    if isinstance(event.removed, str):
        return f"{place} gives {event.removed}"
    if event.term is None:
        return f"{place} has {result_text(event.step)}, {rounding_text(event.step)}"
    shift = "" if event.term.shift is None else f"shifts by {event.term.shift} and "
    if event.removed == 0:
        return f"{place} {shift}truncates nothing"
    retained = decimal_text(event.term.retained or Fraction(0), 12)
    return f"{place} {shift}truncates {decimal_text(event.removed)}, retaining {retained}"
