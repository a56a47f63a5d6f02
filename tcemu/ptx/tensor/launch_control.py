"""Instructions of asynchronous kernels without an observable effect here: register budgets, dependent grids, cache policies.

Source: PTX ISA 9.7.13.16, 9.7.19.5, 9.7.9.18.
"""

from __future__ import annotations

import jax.numpy as jnp

from tcemu.base.errors import Unsupported
from tcemu.isa.targets import resolve_target
from tcemu.ptx.instruction_interface import Context, Prepare, Step
from tcemu.ptx.tensor.statement_forms import InstructionForm, constant_operand, match_form, slot
from tcemu.ptx.text.module import Statement

GRID_FORMS = tuple(InstructionForm(f"griddepcontrol.{what}", (), (0,), 90, "PTX ISA 9.7.13.16") for what in ("launch_dependents", "wait"))
REGISTER_FORM = InstructionForm(
    "setmaxnreg",
    (
        slot("action", "inc dec", required=True),
        slot("sync", "sync", required=True),
        slot("aligned", "aligned", required=True),
        slot("type", "u32", required=True),
    ),
    (1,),
    90,
    "PTX ISA 9.7.19.5",
)
MIN_REGISTERS, MAX_REGISTERS, REGISTER_MULTIPLE = 24, 256, 8  # registers per thread that setmaxnreg accepts
PRIORITIES = "L2::evict_last L2::evict_normal L2::evict_first L2::evict_unchanged"
POLICY_FORMS = (
    InstructionForm(
        "createpolicy.fractional",
        (slot("first", PRIORITIES, required=True), slot("second", PRIORITIES), slot("type", "b64", required=True)),
        (1, 2),
        80,
        "PTX ISA 9.7.9.18",
    ),
    InstructionForm(
        "createpolicy.range",
        (slot("space", "global"), slot("first", PRIORITIES, required=True), slot("second", PRIORITIES), slot("type", "b64", required=True)),
        (4,),
        80,
        "PTX ISA 9.7.9.18",
    ),
    InstructionForm(
        "createpolicy.cvt", (slot("level", "L2", required=True), slot("type", "b64", required=True)), (2,), 80, "PTX ISA 9.7.9.18"
    ),
)


def prepare_grid_dependency(statement: Statement, context: Context) -> Step:
    """Prepare `griddepcontrol`: a launch depends on no other one, and earlier launches have finished."""
    match_form(statement, context, GRID_FORMS)
    return Step(lambda machine: machine)


def prepare_register_budget(statement: Statement, context: Context) -> Step:
    """Prepare `setmaxnreg`: threads have all the registers that they name."""
    match_form(statement, context, (REGISTER_FORM,))
    count, target = (
        constant_operand(statement.operands[0], "the number of registers", REGISTER_FORM.section),
        resolve_target(context.target),
    )
    if not MIN_REGISTERS <= count <= MAX_REGISTERS or count % REGISTER_MULTIPLE:
        raise Unsupported(
            f"got {count}; expected a multiple of {REGISTER_MULTIPLE} from {MIN_REGISTERS} to {MAX_REGISTERS}. {REGISTER_FORM.section}"
        )
    if not target.endswith(("a", "f")):
        raise Unsupported(f"it needs an architecture-specific target like sm_90a; the target is {target}. {REGISTER_FORM.section}")
    return Step(lambda machine: machine, collective=True)


def prepare_cache_policy(statement: Statement, context: Context) -> Step:
    """Prepare `createpolicy`: an opaque value for cache hints, always 0 here."""
    match_form(statement, context, POLICY_FORMS)
    result = statement.operands[0]
    return Step(lambda machine: machine.write(result, "b64", jnp.zeros(machine.active.shape, jnp.uint64)))


PREPARE: dict[str, Prepare] = {
    "griddepcontrol": prepare_grid_dependency,
    "setmaxnreg": prepare_register_budget,
    "createpolicy": prepare_cache_policy,
}
