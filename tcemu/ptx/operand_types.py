"""Whether registers have the sizes that an instruction takes, held against what the instruction says of itself before anything runs."""

from __future__ import annotations

from tcemu.errors import Unsupported
from tcemu.ptx.context import Context, Operation
from tcemu.ptx.module import Negated, Register, Statement
from tcemu.ptx.statements import flattened
from tcemu.ptx.values import KINDS

WIDER = ("cvt",)  # takes registers wider than its types, and fills them: PTX ISA 9.4.1, table "relaxed type-checking"


def check_types(operation: Operation, statement: Statement, context: Context) -> None:
    """Raises Unsupported for a register of another size than the instruction's type, or a predicate in place of a number."""
    flat = flattened(statement.operands)
    results = operation.results[: len(operation.results) - operation.carry_out]
    wanted = (*results, *operation.sources[: len(operation.sources) - operation.carry_in])
    for operand, kind in zip(flat, wanted, strict=False):
        register = operand.register if isinstance(operand, Negated) else operand
        if not isinstance(register, Register) or register.name not in context.function.registers:
            continue  # constants are cut, and special registers are numbers of any size
        have, want = KINDS.get(context.function.registers[register.name]), KINDS[kind]
        wider = statement.name in WIDER and want.bits > 1 and have is not None and have.bits >= want.bits
        if have is None or (have.bits != want.bits and not wider):
            form = "a predicate" if want.bits == 1 else f"{want.bits} bits"
            has = context.function.registers[register.name]
            raise Unsupported(f"{register.name} is a register of .{has}; here the instruction takes {form}. PTX ISA 9.4")
