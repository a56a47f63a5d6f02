"""Instructions of asynchronous kernels without an observable effect here: register budgets, dependent grids, cache policies.

Source: PTX ISA 9.7.13.16, 9.7.19.5, 9.7.9.18.
"""

from __future__ import annotations

import jax.numpy as jnp

from tcemu.base.errors import Unsupported
from tcemu.kernels.ptx.instruction_interface import Context, Prepare, Step
from tcemu.kernels.ptx.tensor.statement_forms import InstructionForm, constant_operand, match_form
from tcemu.kernels.ptx.text.module import Statement

GRID_FORMS = tuple(InstructionForm(f"griddepcontrol.{what}", ("",)) for what in ("launch_dependents", "wait"))
REGISTER_FORM = InstructionForm("setmaxnreg", ("#",))
MIN_REGISTERS, MAX_REGISTERS, REGISTER_MULTIPLE = 24, 256, 8  # registers per thread that setmaxnreg accepts
POLICY_FORMS = (
    InstructionForm("createpolicy.fractional", ("=u64", "=u64 f32")),
    InstructionForm("createpolicy.range", ("=u64 [] u32 u32",)),
    InstructionForm("createpolicy.cvt", ("=u64 u64",)),
)


def prepare_grid_dependency(statement: Statement, context: Context) -> Step:
    """Prepare `griddepcontrol`: a launch depends on no other one, and earlier launches have finished."""
    match_form(statement, context, GRID_FORMS)
    return Step(lambda machine: machine)


def prepare_register_budget(statement: Statement, context: Context) -> Step:
    """Prepare `setmaxnreg`: threads have all the registers that they name."""
    match_form(statement, context, (REGISTER_FORM,))
    count = constant_operand(statement.operands[0], "the number of registers", REGISTER_FORM.section)
    if not MIN_REGISTERS <= count <= MAX_REGISTERS or count % REGISTER_MULTIPLE:
        raise Unsupported(
            f"got {count}; expected a multiple of {REGISTER_MULTIPLE} from {MIN_REGISTERS} to {MAX_REGISTERS}. {REGISTER_FORM.section}"
        )
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
