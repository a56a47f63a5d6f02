"""The same dot product several times over: side by side, and where two of them part."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from tcemu.explanation.exact import Value, decimal, exact_decimal, shortest, word
from tcemu.explanation.explanation import Explanation
from tcemu.explanation.steps import Step, Term
from tcemu.explanation.view import describe, listed, loss, outcome
from tcemu.results import Result, Table
from tcemu.text import WIDTH, columns, wrapped

Key = tuple
BESIDE = 3  # arithmetics in one table, to fit the width of a terminal


class Event(NamedTuple):
    """Something that may take bits away: the alignment of a term, or the rounding of a step."""

    time: float  # how many products went before
    taken: Value  # what it takes; of a step with NaN or infinity its result
    number: int  # of the step, from 1
    step: Step
    term: Term | None  # None: the rounding


@dataclass(frozen=True)
class Parting:
    """The first place where two explanations take different bits away. A step is None where that side has nothing of the kind.

    term: the name of the term whose alignment differs, or None for the rounding of a step.
    """

    labels: tuple[str, str]
    steps: tuple[int | None, int | None]
    term: str | None
    taken: tuple[Value | None, Value | None]
    reason: str

    def __str__(self) -> str:
        return self.reason

    def to_dict(self) -> dict[str, Any]:
        """Plain values that json can write."""
        taken = [None if v is None else str(v) for v in self.taken]
        return {"labels": list(self.labels), "steps": list(self.steps), "term": self.term, "taken": taken, "reason": self.reason}


@dataclass(frozen=True, repr=False)
class Explanations(Result):
    """Explanations of one dot product, each by another arithmetic. str() is the view for a terminal, `to_dict()` plain values."""

    explanations: tuple[Explanation, ...]

    @property
    def agree(self) -> bool:
        """All results are the same word."""
        return len({e.result for e in self.explanations}) == 1

    @property
    def partings(self) -> tuple[Parting | None, ...]:
        """Where each of the others parts from the first; None where they take the same bits away all along."""
        names = [e.label for e in self.explanations]
        if any("," in name for name in names) or len(set(names)) < len(names):  # too long to read in a sentence, or no names
            names = [f"[{number}]" for number in range(1, len(names) + 1)]
        pairs = zip(self.explanations[1:], names[1:], strict=True)
        return tuple(part(self.explanations[0], other, (names[0], name)) for other, name in pairs)

    def text(self) -> str:
        """The view for a terminal."""
        first = self.explanations[0]
        shown = [str(first.op)]
        for number, e in enumerate(self.explanations, 1):
            shown.append(f"[{number}] {e.label}")
            shown += [f"    {line}" for line in wrapped(describe(e.model, e.signature), width=WIDTH - 4)]
        shown += ["", *self._table(), ""]
        shown += [line for number, e in enumerate(self.explanations, 1) for line in _steps(e, number)]
        shown += ["", f"exact {exact_decimal(first.exact)}", *self._partings()]
        for number, e in enumerate(self.explanations, 1):
            shown += wrapped(f"[{number}] evidence: {e.known}")
        return "\n".join(shown)

    def _table(self) -> list[str]:
        """Every term that is not zero everywhere, and what each arithmetic does with it."""
        seen = [{key: event for key, event in events(e).items() if event.term is not None and _fixed(key)} for e in self.explanations]
        keys = sorted(dict.fromkeys(key for some in seen for key in some), key=lambda key: (key[0] != "C", key[1:]))
        terms = {key: next(event.term for some in seen if (event := some.get(key)) is not None and event.term is not None) for key in keys}
        zeros = [key for key in keys if terms[key].value == 0 and all(some[key].taken == 0 for some in seen if key in some)]
        table, partings = [], self.partings
        for first in range(0, len(seen), BESIDE):
            numbers = range(first, min(first + BESIDE, len(seen)))
            heads = ["", "exact value", *(head for number in numbers for head in (f"[{number + 1}] step", "shift", "cut")), ""]
            rows = []
            for key in (key for key in keys if key not in zeros):
                cells = [cell for number in numbers for cell in _cells(seen[number].get(key))]
                parted = [f"[{n + 1}]" for n in numbers if n and (p := partings[n - 1]) is not None and p.term == terms[key].name]
                mark = f"<- [1] and {', '.join(parted)} part" if parted else ""
                rows.append([terms[key].name, decimal(terms[key].value), *cells, mark])
            table += [*([""] if first else []), *columns(heads, rows, left=(0, len(heads) - 1))]
        return [*table, *wrapped(f"{listed([terms[key].name for key in zeros])}: zero", indent="  ")] if zeros else table

    def _partings(self) -> list[str]:
        lines = []
        for number, parting in enumerate(self.partings, 2):
            said = "take the same bits away all along" if parting is None else f"part {parting.reason}"
            lines += wrapped(f"[1] and [{number}] {said}")
        if self.agree and any(p is not None for p in self.partings):
            lines.append("The results are the same word all the same.")
        return lines

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Explanations of {len(self.explanations)}: {', '.join(map(repr, self.explanations))}>"

    def table(self) -> Table:
        """The rows of all explanations, one after the other, told apart by "target"."""
        tables = [e.table() for e in self.explanations]
        results = {e.label: shortest(e.d, e.result) for e in self.explanations}
        return Table(repr(self)[1:-1], tables[0].heads, tuple(row for one in tables for row in one.rows), {"results": results})

    def to_dict(self) -> dict[str, Any]:
        """Plain values that json can write."""
        return {
            "agree": self.agree,
            "partings": [None if p is None else p.to_dict() for p in self.partings],
            "explanations": [e.to_dict() for e in self.explanations],
        }


def _fixed(key: Key) -> bool:
    """The key of an operand, which every arithmetic has, and no running value."""
    return key[0] in ("C", "k")


def _cells(event: Event | None) -> list[str]:
    if event is None or event.term is None:
        return ["", "", ""]
    term = event.term
    cut = "" if term.cut is None else decimal(term.cut, 4) if term.cut else "."
    return [str(event.number), "" if term.shift is None else str(term.shift), cut]


def _steps(e: Explanation, number: int) -> list[str]:
    rows = []
    for at, step in enumerate(e.steps, 1):
        if _is_idle(step):
            continue
        aligned = "" if step.point is None else f", aligned to 2^{step.point}"
        rows.append(f"[{number}] step {at}: {listed([t.name for t in step.terms])}{aligned} -> {outcome(step)}, {loss(step)}")
    off = "" if e.error is None or e.ulps is None else f", error {exact_decimal(e.error, 9)} ({exact_decimal(e.ulps, 8)} ulps)"
    idle = sum(map(_is_idle, e.steps))
    if idle:
        rows.append(f"[{number}] {'one more step adds' if idle == 1 else f'{idle} more steps add'} zeros to the running value")
    rows = [line for row in rows for line in wrapped(row, indent="    ")]
    return [*rows, f"[{number}] D = {word(e.d, e.result)} = {shortest(e.d, e.result)}{off}"]


def _is_idle(step: Step) -> bool:
    """Zeros are added to the running value, and nothing is lost."""
    first, *others = step.terms
    return step.kind in ("fused", "fma") and first.name == "running" and not any(t.value for t in others) and step.value == first.value


def events(e: Explanation) -> dict[Key, Event]:
    """All alignments and roundings of an explanation, by a key that names the same thing in another."""
    events_by_key: dict[Key, Event] = {}
    before = 0
    for number, step in enumerate(e.steps, 1):
        count = 0
        for term in step.terms:
            key = ("k", *(p.index for p in term.products)) if term.products else (term.name, *(() if term.name == "C" else (number,)))
            count += len(term.products)
            taken: Value = term.cut if term.cut is not None else str(step.value)
            events_by_key.setdefault(key, Event(before + count, taken, number, step, term))
        before += count
        same = sum(key[:2] == ("round", before) for key in events_by_key)
        taken = step.lost if step.lost is not None else str(step.value)
        events_by_key["round", before, same] = Event(before + 0.5, taken, number, step, None)
    return events_by_key


def part(one: Explanation, other: Explanation, names: tuple[str, str]) -> Parting | None:
    """The first alignment or rounding, in the order of the products, that takes different bits away. names: those the reason uses."""
    left, right = events(one), events(other)
    differing = [key for key in dict.fromkeys([*left, *right]) if _differ(left.get(key), right.get(key))]
    if not differing:
        return None
    key = min(differing, key=lambda k: min(v.time for v in (left.get(k), right.get(k)) if v is not None))
    pair = left.get(key), right.get(key)
    term = next((v.term.name for v in pair if v is not None and v.term is not None), None)
    steps = tuple(None if v is None else v.number for v in pair)
    taken = tuple(None if v is None else v.taken for v in pair)
    said = [_said(name, v) for name, v in zip(names, pair, strict=True)]
    if term is not None:
        value = next(v.term.value for v in pair if v is not None and v.term is not None)
        where = f"in step {next(n for n in steps if n is not None)} at {term}, {exact_decimal(value, 12)}"
    else:
        event = next(v for v in pair if v is not None)
        where = f"where step {event.number} rounds, after {listed([t.name for t in event.step.terms])}"
    reason = f"{where}: {'; '.join(said)}."
    return Parting((one.label, other.label), (steps[0], steps[1]), term, (taken[0], taken[1]), reason)


def _differ(one: Event | None, other: Event | None) -> bool:
    if one is None or other is None:
        present = one or other
        return present is not None and present.taken != 0 and (present.term is None or isinstance(present.taken, Fraction))
    if one.term is not None and isinstance(one.taken, str) != isinstance(other.taken, str):
        return False  # a step with NaN or infinity looks at no bits; its result tells
    return one.taken != other.taken


def _said(label: str, event: Event | None) -> str:
    if event is None:
        return f"{label} has no rounding there"
    where = f"{label} in step {event.number}"
    if isinstance(event.taken, str):
        return f"{where} makes {event.taken}"
    if event.term is None:
        return f"{where} has {outcome(event.step)}, {loss(event.step)}"
    shift = "" if event.term.shift is None else f"shifts by {event.term.shift} and "
    if event.taken == 0:
        return f"{where} {shift}cuts nothing"
    return f"{where} {shift}cuts {decimal(event.taken)}, keeping {decimal(event.term.kept or Fraction(0), 12)}"
