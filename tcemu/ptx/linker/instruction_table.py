"""The table of all supported instructions by the first part of their opcodes, and the checks of a statement against it."""

from __future__ import annotations

from difflib import get_close_matches

from tcemu.base.errors import Unsupported
from tcemu.isa.targets import resolve_target
from tcemu.ptx.instruction_interface import Context, Operation, Prepare, Step
from tcemu.ptx.scalar import scalar_table as scalars
from tcemu.ptx.simt import fences_and_addresses, memory_access, stack_memory, warp_collectives, wide_registers
from tcemu.ptx.tensor import tensor_table as tensor
from tcemu.ptx.text.module import Negated, Register, Statement, flatten_operands
from tcemu.ptx.text.ptx_types import KINDS

FAMILIES = (
    memory_access.PREPARE, fences_and_addresses.PREPARE, scalars.PREPARE, warp_collectives.PREPARE, tensor.PREPARE, stack_memory.PREPARE,
    wide_registers.PREPARE,
)  # fmt: skip
PREPARE: dict[str, Prepare] = {name: prepare for family in FAMILIES for name, prepare in family.items()}
BARRIER_QUALIFIERS = ("cta", "sync", "arrive", "red", "popc", "and", "or", "u32", "pred", "aligned")
BLOCK_ENDINGS = {  # instructions that end a basic block, which the scheduler executes, with the qualifiers that each may have
    "bra": ("uni",), "brx": ("idx", "uni"), "call": ("uni",), "ret": ("uni",), "exit": (), "trap": (),
    "bar": BARRIER_QUALIFIERS, "barrier": BARRIER_QUALIFIERS,
}  # fmt: skip
CLUSTER_BARRIERS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("cluster", "arrive"): ("release", "relaxed"),
    ("cluster", "wait"): ("acquire",),
}  # with the orders of each
CLUSTER_BARRIER_SECTION, FIRST_CLUSTER_TARGET = "PTX ISA 9.7.13.4", 90
WIDENING = ("cvt",)  # takes registers wider than its types, and fills them: PTX ISA 9.4.1, table "relaxed type-checking"


def find_preparer(statement: Statement) -> Prepare:
    """Return the function that prepares a statement. Raises Unsupported for an unknown instruction."""
    found = PREPARE.get(statement.name)
    if found is None:
        near = get_close_matches(statement.name, [*PREPARE, *BLOCK_ENDINGS], n=3)
        raise Unsupported(f"{statement.name!r} is no supported instruction" + (f"; near it: {', '.join(near)}" if near else ""))
    return found


def prepare_statement(statement: Statement, context: Context) -> Operation | Step:
    """Return the operation or the step of a statement. Raises Unsupported."""
    semantics = find_preparer(statement)(statement, context)
    if isinstance(semantics, Operation):
        check_register_types(semantics, statement, context)
    return semantics


def check_register_types(operation: Operation, statement: Statement, context: Context) -> None:
    """Raise Unsupported for a register of another size than the instruction's type, or a predicate in place of a number."""
    flat = flatten_operands(statement.operands)
    results = operation.results[: len(operation.results) - operation.carry_out]
    expected = (*results, *operation.sources[: len(operation.sources) - operation.carry_in])
    for operand, kind in zip(flat, expected, strict=False):
        register = operand.register if isinstance(operand, Negated) else operand
        if not isinstance(register, Register) or register.name not in context.function.registers:
            continue  # constants are truncated, and special registers are numbers of any size
        declared = context.function.registers[register.name]
        have, want = KINDS.get(declared), KINDS[kind]
        wider = statement.name in WIDENING and want.bits > 1 and have is not None and have.bits >= want.bits
        if have is None or (have.bits != want.bits and not wider):
            form = "a predicate" if want.bits == 1 else f"{want.bits} bits"
            raise Unsupported(f"{register.name} is a register of .{declared}; here the instruction takes {form}. PTX ISA 9.4")


def check_ending(statement: Statement, target: str) -> None:
    """Raise Unsupported for a branch, call, return or barrier of an unknown form."""
    if statement.name == "barrier" and "cluster" in statement.qualifiers:
        return _check_cluster_barrier(statement, target)
    known = BLOCK_ENDINGS[statement.name]
    wrong = [part for part in statement.qualifiers if part not in known]
    if wrong:
        raise Unsupported(
            f"{statement.name!r} with {', '.join(f'.{part}' for part in wrong)} is not supported; known are: {', '.join(known) or 'none'}"
        )
    counts = {"bra": (1, 1), "brx": (2, 2), "call": (1, 4), "ret": (0, 0), "exit": (0, 0), "trap": (0, 0)}
    least, most = counts.get(statement.name, _barrier_operands(statement))
    if not least <= len(statement.operands) <= most:
        raise Unsupported(f"{statement.name!r} takes {least} to {most} operands here; got {len(statement.operands)}")


def _check_cluster_barrier(statement: Statement, target: str) -> None:
    """Raise Unsupported unless it is barrier.cluster.arrive{.release|.relaxed}{.aligned} or barrier.cluster.wait{.acquire}{.aligned}."""
    orders, rest = CLUSTER_BARRIERS.get(statement.qualifiers[:2]), statement.qualifiers[2:]
    repeated = len({part == "aligned" for part in rest}) != len(rest)
    if orders is None or statement.operands or repeated or not {*rest} <= {"aligned", *orders}:
        raise Unsupported(
            f"{statement.opcode!r} is not supported; barrier.cluster.arrive{{.release|.relaxed}}{{.aligned}} and "
            f"barrier.cluster.wait{{.acquire}}{{.aligned}} are, without operands. {CLUSTER_BARRIER_SECTION}"
        )
    if int("".join(filter(str.isdigit, resolve_target(target)))) < FIRST_CLUSTER_TARGET:
        raise Unsupported(f"it needs sm_{FIRST_CLUSTER_TARGET} or later; the target is {target}. {CLUSTER_BARRIER_SECTION}")


def _barrier_operands(statement: Statement) -> tuple[int, int]:
    """Return the least and the greatest number of operands of a barrier."""
    parts = statement.qualifiers
    if "red" in parts:
        return (3, 4)
    return (2, 2) if "arrive" in parts else (1, 2)
