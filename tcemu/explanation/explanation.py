"""What `explain` returns: one dot product taken apart, as values, as a dict and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tcemu.arithmetic.model import Model, Signature
from tcemu.explanation import view
from tcemu.explanation.exact import Value, decode, encode, exact_decimal, multiplied, shortest, spacing, total, word
from tcemu.explanation.products import Product
from tcemu.explanation.steps import Step, Term
from tcemu.formats import Format
from tcemu.isa.instructions import Instruction
from tcemu.results import Result, Table


@dataclass(frozen=True, repr=False)
class Explanation(Result):
    """One dot product, D = A·B + C, step by step.

    str() is the view for a terminal, of all steps, or with `brief` of those that lose the most; `text()` has all of them in any case, and
    `to_dict()` the same as plain values. Codes are Python ints of the formats in `signature`; numbers are
    Fractions, or "nan", "+inf", "-inf".
    """

    op: Instruction
    target: str
    label: str  # the target, and what is changed of its arithmetic
    known: str  # how the arithmetic is known
    model: Model
    signature: Signature
    a: tuple[int, ...]  # of a sparse instruction the stored elements, as all that follows
    b: tuple[int, ...]
    c: int
    scales: tuple[tuple[int, ...], tuple[int, ...]] | None
    products: tuple[Product, ...]
    steps: tuple[Step, ...]
    result: int
    rounded: tuple[str, ...] = ()  # the operands that came as numbers their format does not hold
    filled: int = 0  # products that were added, zeros, to fill K up to whole instructions
    brief: bool = False

    @property
    def d(self) -> Format:
        """The format of the result."""
        return self.signature.d

    @property
    def value(self) -> Value:
        """The number behind the result."""
        return decode(self.d, self.result).value

    @property
    def exact(self) -> Value:
        """A·B + C of the codes, without any rounding."""
        terms = [decode(self.signature.c, self.c).value]
        for product in self.products:
            value = Fraction(product.x.value != product.y.value) if self.signature.bit_op == "xor" else product.value
            for scale in product.scales or ():
                value = multiplied(value, scale.value)
            terms.append(value)
        return total(terms)

    @property
    def nearest(self) -> int:
        """The exact result in D's format, to the nearest."""
        return encode(self.d, self.exact)

    @property
    def error(self) -> Fraction | None:
        """Result minus exact result; None if one of them is not finite."""
        value, exact = self.value, self.exact
        return value - exact if isinstance(value, Fraction) and isinstance(exact, Fraction) else None

    @property
    def ulps(self) -> Fraction | None:
        """The error in distances of neighbouring values of D's format at the exact result."""
        error, exact = self.error, self.exact
        return None if error is None or not isinstance(exact, Fraction) else error / spacing(self.d, exact)

    def text(self, colour: bool = False) -> str:
        """The view for a terminal; colour: what is cut away is dimmed, by ANSI codes."""
        shown = [*view.wrapped(f"{self.op} on {self.label}"), *view.wrapped(view.describe(self.model, self.signature))]
        if self.signature.bit_op is None:  # else the step shows them
            shown += [*view.vector("a", self.signature.a, self.a), *view.vector("b", self.signature.b, self.b)]
        shown.append(f"{view.vector('c', self.signature.c, (self.c,))[0]} = {shortest(self.signature.c, self.c)}")
        if self.scales is not None and self.signature.scale is not None:
            for name, codes in zip(("scale_a", "scale_b"), self.scales, strict=True):
                shown += view.vector(name, self.signature.scale, codes)
        shown += self.remarks()
        shown += view.lines(self.steps, self.signature, colour)
        return "\n".join([*shown, "", *self.verdict()])

    def remarks(self) -> list[str]:
        """What was done to the operands before, and how to read the bits."""
        said = []
        if self.rounded:
            said.append(f"{', '.join(self.rounded)} came as numbers that the format does not hold: rounded to the codes above.")
        if self.filled:
            said.append(f"K is filled up to whole instructions with {self.filled} zeros, which take no part.")
        if any(step.kind == "fused" and step.total is not None for step in self.steps):
            said.append(view.LEGEND)
        return said

    def verdict(self) -> list[str]:
        """The result beside the exact one."""
        exact = self.exact
        shown = [f"D       {word(self.d, self.result)} = {shortest(self.d, self.result)}"]
        nearest = f"the nearest {self.d} is {word(self.d, self.nearest)} = {shortest(self.d, self.nearest)}"
        shown.append(f"exact   {exact_decimal(exact)}; {nearest}")
        if self.error is not None and self.ulps is not None:
            off = exact_decimal(self.error, 12) + ("" if self.d.is_integer else f", {exact_decimal(self.ulps, 8)} ulps of {self.d}")
            shown.append(f"error   {off if self.error else 'none'}")
        return [*shown, *view.wrapped(f"evidence: {self.known}")]

    def summary(self) -> str:
        """The view for a terminal in short: the arithmetic, the steps that lose the most, and the result."""
        shown = [*view.wrapped(f"{self.op} on {self.label}"), *view.wrapped(view.describe(self.model, self.signature))]
        return "\n".join([*shown, "", *view.greatest_losses(self.steps), "", *self.verdict()])

    def __str__(self) -> str:
        return self.summary() if self.brief else self.text()

    def __repr__(self) -> str:
        return f"<Explanation of {self.op} on {self.label}: D = {word(self.d, self.result)}, print it for the steps>"

    def table(self) -> Table:
        """A row for each term of each step: its value, its shift, what is kept and what is cut, as floats; `to_dict()` has them exactly."""
        title = f"{self.op} on {self.label}: D = {shortest(self.d, self.result)}"
        return Table(title, ("target", *TERM), tuple((self.label, *row) for row in term_rows(self.steps)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values that json can write. Codes are ints; a number is a string that Fraction reads, "nan", "+inf" or "-inf"."""
        s = self.signature
        return {
            "op": str(self.op),
            "target": self.target,
            "label": self.label,
            "evidence": self.known,
            "model": {k: _plain(v) for k, v in vars(self.model).items()},
            "formats": {name: fmt.name for name, fmt in (("a", s.a), ("b", s.b), ("c", s.c), ("d", s.d), ("scale", s.scale)) if fmt},
            "a": list(self.a),
            "b": list(self.b),
            "c": self.c,
            "scales": None if self.scales is None else {"a": list(self.scales[0]), "b": list(self.scales[1])},
            "rounded": list(self.rounded),
            "filled": self.filled,
            "steps": [step_dict(step, number) for number, step in enumerate(self.steps, 1)],
            "result": {"code": self.result, "word": word(self.d, self.result), "value": str(self.value)},
            "exact": {"value": str(self.exact), "nearest": self.nearest},
            "error": None if self.error is None else str(self.error),
            "ulps": None if self.ulps is None else str(self.ulps),
        }


TERM = ("step", "kind", "term", "value", "exponent", "shift", "kept", "cut", "result")


def term_rows(steps: tuple[Step, ...]) -> Iterator[tuple[Any, ...]]:
    """The terms of all steps, as values of TERM."""
    for number, step in enumerate(steps, 1):
        for term in step.terms:
            value = term.value if isinstance(term.value, Fraction) else float(term.value)
            yield number, step.kind, term.name, value, term.exponent, term.shift, term.kept, term.cut, str(step.value)


def step_dict(step: Step, number: int) -> dict[str, Any]:
    """One step as plain values."""
    return {
        "step": number,
        "kind": step.kind,
        "instruction": step.instruction,
        "exponent": step.point,
        "last_bit": step.last,
        "terms": [term_dict(term) for term in step.terms],
        "sum": _number(step.total),
        "rounding": step.rounding,
        "format": step.fmt.name,
        "result_bits": step.result_bits,
        "result": {"code": step.result, "word": word(step.fmt, step.result), "value": str(step.value)},
        "lost": _number(step.lost),
        "rule": step.rule,
    }


def term_dict(term: Term) -> dict[str, Any]:
    """One term as plain values."""
    plain = {"name": term.name, "value": str(term.value), "exponent": term.exponent, "shift": term.shift}
    plain |= {"kept": _number(term.kept), "cut": _number(term.cut)}
    if term.code is not None:
        return plain | {"code": term.code}
    return plain | {
        "k": [p.index for p in term.products],
        "a": [p.a for p in term.products],
        "b": [p.b for p in term.products],
        "scales": None if term.products[0].scale_codes is None else list(term.products[0].scale_codes),
    }


def _number(value: Fraction | None) -> str | None:
    return None if value is None else str(value)


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Format) else value
