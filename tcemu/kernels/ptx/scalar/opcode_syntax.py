"""Scalar instructions as rows, and the `Prepare` that rows give.

A row is a function that builds the `Operation` from the qualifiers of an opcode, by the key of its lines in
`tcemu.engine.isa.statement_table`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.statement_table import describe_forms, find_forms
from tcemu.kernels.ptx.instruction_interface import Context, Operation, Prepare
from tcemu.kernels.ptx.text.module import Operand, Pair, Statement, Vector
from tcemu.kernels.ptx.text.ptx_types import KINDS

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


def element_count(operand: Operand) -> int:
    """Return the number of values in an operand."""
    return 2 if isinstance(operand, Pair) else len(operand.elements) if isinstance(operand, Vector) else 1


class Row(NamedTuple):
    """The lines of syntax of a key of `tcemu.engine.isa.statement_table`, and the function that builds the `Operation` of an opcode of a line."""

    build: ShapedBuild
    grouped: str  # "pair": the first operand may be p|q; "vector": an operand may be a vector; "": all operands are single
    counts: tuple[int, ...]  # numbers of operands that the row is for; (): any


def row(build: Build, counts: tuple[int, ...] = ()) -> Row:
    """Make a row of an instruction whose operation depends on the opcode alone."""
    return shaped_row(lambda qualifiers, _: build(qualifiers), "", counts)


def shaped_row(build: ShapedBuild, grouped: str, counts: tuple[int, ...] = ()) -> Row:
    """Make a row of an instruction whose operation also depends on the written form of the operands."""
    return Row(cache(build), grouped, counts)


def prepare_from_rows(rows: dict[str, Row]) -> Prepare:
    """Return the `Prepare` of an instruction from its rows by key. The first row that has the opcode is used.

    Equal opcodes with operands of equal sizes give the same `Operation` object, so that one compiled function serves all of them.
    """

    def prepare(statement: Statement, context: Context) -> Operation:
        count = len(statement.operands)
        forms = [(form, rows[form.row.key]) for form in find_forms(statement.opcode) if form.row.key in rows]
        if not forms:
            raise Unsupported(describe_forms(statement.opcode))
        form, row = next(((form, row) for form, row in forms if count in (row.counts or (count,))), (None, None))
        if form is None or row is None:
            expected = " or ".join(str(number) for _, row in forms for number in row.counts)
            raise Unsupported(f"it has {count} operands; expected {expected}. PTX ISA {forms[0][0].row.section}")
        for position, operand in enumerate(statement.operands, 1):
            allowed = {
                "pair": isinstance(operand, Pair) and position == 1,
                "vector": isinstance(operand, Vector) and len(operand.elements) > 1,
            }.get(row.grouped, False)
            if isinstance(operand, Pair | Vector) and not allowed:
                what = "a vector" if isinstance(operand, Vector) else "a pair of destinations"
                here = "here the instruction takes a single operand"
                raise Unsupported(f"operand {position} is {operand}, {what}; {here}. PTX ISA {form.row.section}")
        shape = OperandShape(tuple(map(element_count, statement.operands)))
        operation = row.build(Qualifiers(form.qualifiers), shape)
        expected = len(operation.results) + len(operation.sources) - operation.carry_in - operation.carry_out
        if sum(shape.sizes) != expected:
            raise Unsupported(f"{statement.opcode!r} takes {expected} operands, counting elements of vectors; got {sum(shape.sizes)}")
        return operation

    return prepare
