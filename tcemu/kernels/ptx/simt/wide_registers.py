"""Registers of 128 bits: each is two registers of 64 bits, and a statement that names it is executed on these (PTX ISA 5.2.1, 9.7.9.6)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tcemu.base.errors import Unsupported
from tcemu.kernels.ptx.instruction_interface import Context, Operation, Prepare, Step
from tcemu.kernels.ptx.scalar import scalar_table as scalars
from tcemu.kernels.ptx.text.module import Register, Statement, Vector

WIDE_KIND = "b128"
HALVES = ("+low", "+high")  # added to the name of a wide register; no name in PTX has a plus sign
ACCESSES = ("ld", "ldu", "st")


def add_halves(kinds: dict[str, str]) -> dict[str, str]:
    """Return the types of registers with the wide ones replaced by their halves."""
    wide = [name for name, kind in kinds.items() if kind == WIDE_KIND]
    halves = {name + half: "b64" for name in wide for half in HALVES}
    return {name: kind for name, kind in kinds.items() if kind != WIDE_KIND} | halves


def split_registers(statement: Statement, kinds: dict[str, str]) -> Statement:
    """Replace wide registers by vectors of their halves, and loads and stores of 128 bits by those of two elements.

    Args:
        statement: The statement.
        kinds: The types of the function's registers, the wide ones included.

    Raises:
        Unsupported: An instruction has no such operand here.
    """

    def split(operand: Any) -> Any:
        if isinstance(operand, Register) and kinds.get(operand.name) == WIDE_KIND:
            return Vector(tuple(Register(operand.name + half) for half in HALVES))
        return operand

    operands = tuple(map(split, statement.operands))
    if operands == statement.operands and not (statement.name == "mov" and statement.opcode.endswith(WIDE_KIND)):
        return statement
    if statement.name in ACCESSES and statement.qualifiers[-1] == WIDE_KIND:
        opcode = statement.opcode.removesuffix(WIDE_KIND) + "v2.b64"
        return replace(statement, opcode=opcode, operands=operands)
    if statement.opcode != "mov.b128" and statement.name != "clusterlaunchcontrol":
        raise Unsupported(f"{statement.opcode!r} of a register of 128 bits is not supported; mov, ld, ldu and st of them are")
    return replace(statement, operands=operands)


def prepare_any_move(statement: Statement, context: Context) -> Operation | Step:
    """Prepare `mov`: one of 128 bits after `split_registers`, or a scalar one."""
    if statement.opcode != "mov.b128":
        return scalars.PREPARE["mov"](statement, context)
    if len(statement.operands) != 2 or any(not isinstance(each, Vector) or len(each.elements) != 2 for each in statement.operands):
        raise Unsupported("mov.b128 takes registers of 128 bits, or vectors of two of 64. PTX ISA 9.7.9.6")
    return MOVE


MOVE = Operation(("b64", "b64"), ("b64", "b64"), lambda low, high: (low, high))
PREPARE: dict[str, Prepare] = {"mov": prepare_any_move}
