"""Memory on the stack of a thread: `alloca`, `stacksave` and `stackrestore` (PTX ISA 9.7.17).

The stack lies behind the variables of all functions in local memory. Its height in bytes is a register of the thread, which the linker adds
to the operands; each call of a function saves and restores it.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.statement_table import require_form
from tcemu.kernels.ptx.instruction_interface import Context, Operation, Prepare
from tcemu.kernels.ptx.operand_classes import check_operand_lists
from tcemu.kernels.ptx.text.module import Integer, Operand, Register, Statement

STACK_BYTES = 1024  # of a thread, the default of cudaLimitStackSize
STACK_PREFIX = "%stack+"  # the registers of stacks; no name in PTX has a plus sign
HEIGHT = Register(STACK_PREFIX)
DEFAULT_ALIGNMENT = 8
SECTION = "PTX ISA 9.7.17"
INSTRUCTIONS = ("alloca", "stacksave", "stackrestore")


def add_height(statement: Statement, start: int) -> Statement:
    """Add the stack's height to the operands of a statement. start: the stack's first byte in local memory."""
    operands: list[Operand] = [*statement.operands]
    if statement.name == "stacksave":
        return Statement(f"mov.b{_bits(statement)}", (operands[0], HEIGHT), statement.guard, statement.position)
    if statement.name == "stackrestore":
        return Statement(f"mov.b{_bits(statement)}", (HEIGHT, operands[0]), statement.guard, statement.position)
    alignment = operands[2] if len(operands) > 2 else Integer(DEFAULT_ALIGNMENT)
    added = (operands[0], HEIGHT, operands[1], alignment, Integer(start), HEIGHT)
    return Statement(statement.opcode, added, statement.guard, statement.position)


def _bits(statement: Statement) -> str:
    return statement.qualifiers[0][1:]


def prepare_stack(statement: Statement, context: Context) -> Operation:
    """Prepare `alloca.type d, size {, alignment}`, `stacksave.type d` and `stackrestore.type a`, with or without the added operands."""
    kind = require_form(statement.opcode).choices["type"] or ""
    lists = {"alloca": (f"={kind} {kind}", f"={kind} {kind} #"), "stacksave": (f"={kind}",), "stackrestore": (f"%{kind}",)}[statement.name]
    if len(statement.operands) < 6:
        check_operand_lists(statement, context, *lists)
    if statement.name != "alloca":
        return Operation((kind,), (), lambda: ()) if statement.name == "stacksave" else Operation((), (kind,), lambda _height: ())
    if len(statement.operands) < 6:
        alignment = statement.operands[2] if len(statement.operands) > 2 else Integer(DEFAULT_ALIGNMENT)
        if not isinstance(alignment, Integer) or alignment.value < 1 or alignment.value & (alignment.value - 1):
            raise Unsupported(f"{statement.opcode!r}: the alignment must be a constant power of two. {SECTION}")
        return Operation((kind,), (kind, "u64")[: len(statement.operands) - 1], lambda *_sizes: ())
    return _allocate(kind)


@cache
def _allocate(kind: str) -> Operation:
    """Return the operation that maps size, alignment, start and height to the address of the memory and the new height."""

    def compute(size, alignment, start, height):
        ones = alignment - np.uint64(1)
        address = (start + height + ones) & ~ones
        return (address if kind == "u64" else address.astype(np.uint32)), address - start + size.astype(np.uint64)

    return Operation((kind, "u64"), (kind, "u64", "u64", "u64"), compute)


PREPARE: dict[str, Prepare] = dict.fromkeys(INSTRUCTIONS, prepare_stack)
