"""How instructions of values are written down as rows, and how a row becomes a `Prepare`.

A row is the lines of an instruction's syntax, and what makes an `Operation` of the qualifiers. A line has the parts of an opcode in their
order: "rn|rz? ftz? f32" takes ".f32", ".ftz.f32", ".rz.ftz.f32" and so on. "?" after a part: it may be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from tcemu.errors import Unsupported
from tcemu.ptx.context import Context, Operation, Prepare
from tcemu.ptx.module import Operand, Pair, Statement, Vector
from tcemu.ptx.values import KINDS

ROUNDINGS = ("rn", "rz", "rm", "rp")


class Qualifiers(tuple[str, ...]):
    """The parts of an opcode after its name. "x" in them: the instruction has `.x`."""

    @property
    def types(self) -> tuple[str, ...]:
        """Those that name a type, in their order."""
        return tuple(part for part in self if part in KINDS)

    @property
    def type(self) -> str:
        """The last type."""
        return self.types[-1]

    def one_of(self, *parts: str, default: str = "") -> str:
        """The first of the parts that is there, or the default."""
        return next((part for part in self if part in parts), default)

    @property
    def rounding(self) -> str:
        """rn, rz, rm or rp; rn if none is there."""
        return self.one_of(*ROUNDINGS, default="rn")


class Shape(NamedTuple):
    """How the operands are written: of each, how many elements it has (1, of a vector or a pair more)."""

    sizes: tuple[int, ...]


Build = Callable[[Qualifiers], Operation]
ShapedBuild = Callable[[Qualifiers, Shape], Operation]


def ordered(line: str, parts: tuple[str, ...]) -> Qualifiers | None:
    """The parts in the line's order, or None: they are none of it. Types keep their order; the others may stand anywhere, as in ptxas."""
    rest, found = list(parts), []
    for slot in line.split():
        names = slot.removesuffix("?").split("|")
        types = [part for part in rest if part in KINDS]
        chosen = next((part for part in rest if part in names and (part not in KINDS or part == types[0])), None)
        if chosen is not None:
            rest.remove(chosen)
            found.append(chosen)
        elif slot[-1] != "?":
            return None
    return None if rest else Qualifiers(found)


def size(operand: Operand) -> int:
    """How many values an operand stands for."""
    return 2 if isinstance(operand, Pair) else len(operand.elements) if isinstance(operand, Vector) else 1


def _refusal(statement: Statement, lines: list[str]) -> str:
    """What is known of an instruction of that name: the lines with the statement's last type, or all."""
    last = statement.qualifiers[-1] if statement.qualifiers else ""
    near = [line for line in lines if last in line.split()[-1].split("|")] or lines
    known = "; ".join(".".join(f"({part.removesuffix('?')})?" if part[-1] == "?" else part for part in line.split()) for line in near)
    return f"{statement.opcode!r} is not run: of {statement.name!r} these are: {known} (| either, ? may be left out)"


class Row(NamedTuple):
    """Syntax, and what makes an `Operation` of an opcode that follows it."""

    lines: tuple[str, ...]
    build: ShapedBuild


def row(lines: str | tuple[str, ...], build: Build) -> Row:
    """A row of an instruction whose opcode says everything."""
    return shaped(lines, lambda qualifiers, _: build(qualifiers))


def shaped(lines: str | tuple[str, ...], build: ShapedBuild) -> Row:
    """A row of an instruction whose types hang on how its operands are written too."""
    return Row((lines,) if isinstance(lines, str) else lines, cache(build))


def either(*rows: Row) -> Prepare:
    """The `Prepare` of an instruction that has these rows: the first whose syntax fits serves.

    Equal opcodes with operands of equal sizes give one and the same `Operation`, so that what is compiled for one serves all.
    """

    def prepare(statement: Statement, context: Context) -> Operation:
        fitting = ((row, ordered(line, statement.qualifiers)) for row in rows for line in row.lines)
        build, qualifiers = next(((row.build, found) for row, found in fitting if found is not None), (None, None))
        if build is None or qualifiers is None:
            raise Unsupported(_refusal(statement, [line for row in rows for line in row.lines]))
        shape = Shape(tuple(map(size, statement.operands)))
        operation = build(qualifiers, shape)
        wanted = len(operation.results) + len(operation.sources) - operation.carry_in - operation.carry_out
        if sum(shape.sizes) != wanted:
            raise Unsupported(f"{statement.opcode!r} takes {wanted} operands, elements of vectors counted; got {sum(shape.sizes)}")
        return operation

    return prepare
