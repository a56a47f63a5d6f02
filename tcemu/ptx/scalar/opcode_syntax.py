"""The syntax of scalar instructions as rows, and the `Prepare` that rows give.

A row consists of lines of syntax and a function that builds the `Operation` from the qualifiers. A line lists the parts of an opcode in
order: "rn|rz? ftz? f32" matches ".f32", ".ftz.f32", ".rz.ftz.f32" and so on. A part that ends in "?" is optional.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from tcemu.base.errors import Unsupported
from tcemu.ptx.instruction_interface import Context, Operation, Prepare
from tcemu.ptx.text.module import Operand, Pair, Statement, Vector
from tcemu.ptx.text.ptx_types import KINDS

ROUNDINGS = ("rn", "rz", "rm", "rp")


class Qualifiers(tuple[str, ...]):
    """The parts of an opcode after its name: `"ftz" in qualifiers` if the instruction has `.ftz`."""

    @property
    def types(self) -> tuple[str, ...]:
        """The parts that name a type, in order."""
        return tuple(part for part in self if part in KINDS)

    @property
    def type(self) -> str:
        """The last type."""
        return self.types[-1]

    def find(self, *parts: str, default: str = "") -> str:
        """Return the first qualifier that is one of `parts`, or the default."""
        return next((part for part in self if part in parts), default)

    @property
    def rounding(self) -> str:
        """The rounding mode: rn, rz, rm or rp; rn if the opcode has none."""
        return self.find(*ROUNDINGS, default="rn")


class OperandShape(NamedTuple):
    """The written form of the operands."""

    sizes: tuple[int, ...]  # elements of each operand: 1, or more for a vector or a pair


Build = Callable[[Qualifiers], Operation]
ShapedBuild = Callable[[Qualifiers, OperandShape], Operation]


def match_line(line: str, parts: tuple[str, ...]) -> Qualifiers | None:
    """Return the parts in the order of the line, or None if they do not match it.

    Types must be in order; other parts may stand anywhere, as in ptxas.
    """
    rest, matched = list(parts), []
    for slot in line.split():
        names = slot.removesuffix("?").split("|")
        types = [part for part in rest if part in KINDS]
        match = next((part for part in rest if part in names and (part not in KINDS or part == types[0])), None)
        if match is not None:
            rest.remove(match)
            matched.append(match)
        elif slot[-1] != "?":
            return None
    return None if rest else Qualifiers(matched)


def element_count(operand: Operand) -> int:
    """Return the number of values in an operand."""
    return 2 if isinstance(operand, Pair) else len(operand.elements) if isinstance(operand, Vector) else 1


def _refusal_message(statement: Statement, lines: list[str]) -> str:
    """List the supported forms of the instruction: the lines with the statement's last type, or all lines."""
    last = statement.qualifiers[-1] if statement.qualifiers else ""
    near = [line for line in lines if last in line.split()[-1].split("|")] or lines
    known = "; ".join(".".join(f"({part.removesuffix('?')})?" if part[-1] == "?" else part for part in line.split()) for line in near)
    return f"{statement.opcode!r} is not supported; {statement.name!r} has the forms: {known} (| separates choices, ? marks optional parts)"


class Row(NamedTuple):
    """Lines of syntax, and the function that builds the `Operation` of an opcode that matches one of them."""

    lines: tuple[str, ...]
    build: ShapedBuild


def row(lines: str | tuple[str, ...], build: Build) -> Row:
    """Make a row of an instruction whose operation depends on the opcode alone."""
    return shaped_row(lines, lambda qualifiers, _: build(qualifiers))


def shaped_row(lines: str | tuple[str, ...], build: ShapedBuild) -> Row:
    """Make a row of an instruction whose operation also depends on the written form of the operands."""
    return Row((lines,) if isinstance(lines, str) else lines, cache(build))


def prepare_from_rows(*rows: Row) -> Prepare:
    """Return the `Prepare` of an instruction with these rows. The first row that matches the opcode is used.

    Equal opcodes with operands of equal sizes give the same `Operation` object, so that one compiled function serves all of them.
    """

    def prepare(statement: Statement, context: Context) -> Operation:
        matches = ((row, match_line(line, statement.qualifiers)) for row in rows for line in row.lines)
        build, qualifiers = next(((row.build, match) for row, match in matches if match is not None), (None, None))
        if build is None or qualifiers is None:
            raise Unsupported(_refusal_message(statement, [line for row in rows for line in row.lines]))
        shape = OperandShape(tuple(map(element_count, statement.operands)))
        operation = build(qualifiers, shape)
        expected = len(operation.results) + len(operation.sources) - operation.carry_in - operation.carry_out
        if sum(shape.sizes) != expected:
            raise Unsupported(f"{statement.opcode!r} takes {expected} operands, counting elements of vectors; got {sum(shape.sizes)}")
        return operation

    return prepare
