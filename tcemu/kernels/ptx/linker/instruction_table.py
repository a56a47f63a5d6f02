"""The table of all supported instructions by the first part of their opcodes, and the checks of a statement against it."""

from __future__ import annotations

from difflib import get_close_matches

from tcemu.base.errors import Unsupported
from tcemu.engine.architectures.special_function_rows import special_function_evidence
from tcemu.engine.isa.legality import check
from tcemu.engine.isa.statement_table import require_form
from tcemu.engine.isa.targets import TARGETS
from tcemu.kernels.ptx.instruction_interface import Context, Operation, Prepare, Step
from tcemu.kernels.ptx.linker.control_flow import BARRIER_COUNT
from tcemu.kernels.ptx.operand_classes import check_operand_lists, check_operands, check_operation, parse_classes
from tcemu.kernels.ptx.scalar import scalar_table as scalars
from tcemu.kernels.ptx.scalar import video_instructions
from tcemu.kernels.ptx.simt import fences_and_addresses, memory_access, stack_memory, warp_collectives, wide_registers
from tcemu.kernels.ptx.tensor import (
    async_stores,
    launch_control,
    mbarriers,
    tcgen05_statements,
    tensor_copies,
    tensor_map_edits,
    warp_matrices,
    warpgroup_products,
)
from tcemu.kernels.ptx.text.module import Integer, Statement, Symbol, Vector

FAMILIES = (  # modules with a table of their own; of one name the last counts
    memory_access, fences_and_addresses, scalars, warp_collectives, warp_matrices, warpgroup_products, tensor_copies, async_stores,
    launch_control, mbarriers, tcgen05_statements, tensor_map_edits, stack_memory, wide_registers, video_instructions,
)  # fmt: skip
PREPARE: dict[str, Prepare] = {name: prepare for family in FAMILIES for name, prepare in family.PREPARE.items()}
# the operand lists of the instructions that end a basic block, which the scheduler executes; those of branches and calls are names
ENDINGS: dict[str, tuple[str, ...]] = {"ret": ("",), "exit": ("",), "trap": ("",)}
BRANCHES = ("bra", "brx", "call")
APPROXIMATE = frozenset({"approx", "full"})  # qualifiers of functions whose bits are each target's own
BARRIER = "u32"  # number of a barrier, or of its threads
CLUSTER_BARRIERS = ("barrier.cluster.arrive", "barrier.cluster.wait")


def find_preparer(statement: Statement) -> Prepare:
    """Return the function that prepares a statement. Raises Unsupported for an unknown instruction."""
    found = PREPARE.get(statement.name)
    if found is None:
        near = get_close_matches(statement.name, [*PREPARE, *ENDINGS, *BRANCHES, "barrier"], n=3)
        raise Unsupported(f"{statement.name!r} is no supported instruction" + (f"; near it: {', '.join(near)}" if near else ""))
    return found


def check_legality(statement: Statement, context: Context) -> None:
    """Raise Unsupported unless the module's target and PTX version have a statement.

    A target that tcemu does not know, older than Volta, counts as the target of the launch.
    """
    module = context.module
    target = module.target if module.target in TARGETS else context.target
    check(statement.opcode, target, ".".join(map(str, module.version)))


def prepare_statement(statement: Statement, context: Context) -> Operation | Step:
    """Return the operation or the step of a statement of the text.

    Raises:
        Unsupported: The statement is illegal, or an operand is wrong.
        NotModelled: There is no evidence of an approximate function on the target.
    """
    semantics = find_preparer(statement)(statement, context)
    check_legality(statement, context)
    if not APPROXIMATE.isdisjoint(statement.qualifiers):
        special_function_evidence(statement.opcode, context.target)
    if isinstance(semantics, Operation):
        check_operation(semantics, statement, context)
    return semantics


def check_ending(statement: Statement, context: Context) -> None:
    """Raise Unsupported for a branch, call, return or barrier of an unknown form or with wrong operands."""
    check_legality(statement, context)
    form = require_form(statement.opcode)
    if statement.name in BRANCHES:
        _check_branch(statement, context)
    elif statement.name in ("bar", "barrier"):
        _check_barrier(statement, form.qualifiers, context)
    else:
        check_operand_lists(statement, context, *ENDINGS[statement.name])


def _check_barrier(statement: Statement, parts: tuple[str, ...], context: Context) -> None:
    if form_head(statement) in CLUSTER_BARRIERS:
        return check_operand_lists(statement, context, "")
    if "red" in parts:
        result = "u32" if "popc" in parts else "pred"
        lists = (f"={result} {BARRIER} pred", f"={result} {BARRIER} {BARRIER} pred")
    else:
        lists = (f"{BARRIER} {BARRIER}",) if "arrive" in parts else (BARRIER, f"{BARRIER} {BARRIER}")
    check_operand_lists(statement, context, *lists)
    number = statement.operands[1 if "red" in parts else 0]
    if isinstance(number, Integer) and not 0 <= number.value < BARRIER_COUNT:
        raise Unsupported(f"the barrier's number is {number}; expected 0 to {BARRIER_COUNT - 1}. PTX ISA 9.7.13.1")


def _check_branch(statement: Statement, context: Context) -> None:
    """Raise Unsupported for a branch without a label. `control_flow.branch_targets` looks the labels up, the parser the callees."""
    if statement.name == "bra" and (len(statement.operands) != 1 or not isinstance(statement.operands[0], Symbol)):
        raise Unsupported(f"its operand must be a label; got {', '.join(map(str, statement.operands)) or 'none'}. PTX ISA 9.7.12")
    if statement.name == "brx":
        if len(statement.operands) != 2 or not isinstance(statement.operands[1], Symbol | Vector):
            raise Unsupported("its operands are an index and a list of labels. PTX ISA 9.7.12")
        check_operands(statement.operands[:1], parse_classes("u32"), context.function.registers)


def form_head(statement: Statement) -> str:
    """Return the head of the row of a statement."""
    return require_form(statement.opcode).row.head
