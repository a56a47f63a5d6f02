"""Instructions around asynchronous kernels that change nothing a program can see here: register budgets, dependent grids, policies.

Source: PTX ISA 9.7.13.16, 9.7.19.5, 9.7.9.18.
"""

from __future__ import annotations

import jax.numpy as jnp

from tcemu.errors import Unsupported
from tcemu.isa.targets import named_target
from tcemu.ptx.context import Context, Prepare, Step
from tcemu.ptx.module import Statement
from tcemu.ptx.tensor.variants import Form, chosen, constant, slot

GRID = tuple(Form(f"griddepcontrol.{what}", (), (0,), 90, "PTX ISA 9.7.13.16") for what in ("launch_dependents", "wait"))
REGISTERS = Form(
    "setmaxnreg",
    (
        slot("action", "inc dec", needed=True),
        slot("sync", "sync", needed=True),
        slot("aligned", "aligned", needed=True),
        slot("type", "u32", needed=True),
    ),
    (1,),
    90,
    "PTX ISA 9.7.19.5",
)
FEWEST, MOST, STEP = 24, 256, 8  # registers that a thread may ask for
PRIORITIES = "L2::evict_last L2::evict_normal L2::evict_first L2::evict_unchanged"
POLICIES = (
    Form(
        "createpolicy.fractional",
        (slot("first", PRIORITIES, needed=True), slot("second", PRIORITIES), slot("type", "b64", needed=True)),
        (1, 2),
        80,
        "PTX ISA 9.7.9.18",
    ),
    Form(
        "createpolicy.range",
        (slot("space", "global"), slot("first", PRIORITIES, needed=True), slot("second", PRIORITIES), slot("type", "b64", needed=True)),
        (4,),
        80,
        "PTX ISA 9.7.9.18",
    ),
    Form("createpolicy.cvt", (slot("level", "L2", needed=True), slot("type", "b64", needed=True)), (2,), 80, "PTX ISA 9.7.9.18"),
)


def prepare_grid(statement: Statement, context: Context) -> Step:
    """`griddepcontrol`: a launch here depends on no other, and what came before it has ended."""
    chosen(statement, context, GRID)
    return Step(lambda machine: machine)


def prepare_registers(statement: Statement, context: Context) -> Step:
    """`setmaxnreg`: threads have all the registers that they name."""
    chosen(statement, context, (REGISTERS,))
    count, target = constant(statement.operands[0], "the number of registers", REGISTERS.section), named_target(context.target)
    if not FEWEST <= count <= MOST or count % STEP:
        raise Unsupported(f"got {count}; wanted a multiple of {STEP} from {FEWEST} to {MOST}. {REGISTERS.section}")
    if not target.endswith(("a", "f")):
        raise Unsupported(f"it needs a target as sm_90a; the target is {target}. {REGISTERS.section}")
    return Step(lambda machine: machine, together=True)


def prepare_policy(statement: Statement, context: Context) -> Step:
    """`createpolicy`: an opaque value that hints take; here it is 0."""
    chosen(statement, context, POLICIES)
    result = statement.operands[0]
    return Step(lambda machine: machine.write(result, "b64", jnp.zeros(machine.active.shape, jnp.uint64)))


PREPARE: dict[str, Prepare] = {
    "griddepcontrol": prepare_grid,
    "setmaxnreg": prepare_registers,
    "createpolicy": prepare_policy,
}
