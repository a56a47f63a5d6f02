"""Every instruction that is run, by the first part of its opcode: the tables of all families as one."""

from __future__ import annotations

from difflib import get_close_matches

from tcemu.errors import Unsupported
from tcemu.ptx import atomics, loads, ordering, warp
from tcemu.ptx.context import Context, Operation, Prepare, Step
from tcemu.ptx.module import Statement
from tcemu.ptx.operand_types import check_types
from tcemu.ptx.scalar import table as scalars
from tcemu.ptx.tensor import table as tensor

FAMILIES = (loads.PREPARE, atomics.PREPARE, ordering.PREPARE, scalars.PREPARE, warp.PREPARE, tensor.PREPARE)
BARRIER = ("cta", "sync", "arrive", "red", "popc", "and", "or", "u32", "pred", "aligned")
ENDINGS = {  # instructions that end a piece, which the scheduler runs, with the qualifiers that each may have
    "bra": ("uni",), "brx": ("idx", "uni"), "call": ("uni",), "ret": ("uni",), "exit": (), "trap": (),
    "bar": BARRIER, "barrier": (*BARRIER, "cluster", "wait", "release", "acquire", "relaxed"),
}  # fmt: skip
PREPARE: dict[str, Prepare] = {name: prepare for family in FAMILIES for name, prepare in family.items()}


def prepared_by(statement: Statement) -> Prepare:
    """What prepares a statement. Raises Unsupported."""
    found = PREPARE.get(statement.name)
    if found is None:
        near = get_close_matches(statement.name, [*PREPARE, *ENDINGS], n=3)
        raise Unsupported(f"{statement.name!r} is no instruction that is run" + (f"; near it: {', '.join(near)}" if near else ""))
    return found


def prepare(statement: Statement, context: Context) -> Operation | Step:
    """What a statement does. Raises Unsupported."""
    ready = prepared_by(statement)(statement, context)
    if isinstance(ready, Operation):
        check_types(ready, statement, context)
    return ready


def check_ending(statement: Statement, context: Context) -> None:
    """Raises Unsupported for a branch, call, return or barrier that is not run."""
    del context
    known = ENDINGS[statement.name]
    wrong = [part for part in statement.qualifiers if part not in known]
    if wrong:
        raise Unsupported(
            f"{statement.name!r} with {', '.join(f'.{part}' for part in wrong)} is not run; known are: {', '.join(known) or 'none'}"
        )
    counts = {"bra": (1, 1), "brx": (2, 2), "call": (1, 4), "ret": (0, 0), "exit": (0, 0), "trap": (0, 0)}
    least, most = counts.get(statement.name, _barrier_operands(statement))
    if not least <= len(statement.operands) <= most:
        raise Unsupported(f"{statement.name!r} takes {least} to {most} operands here; got {len(statement.operands)}")


def _barrier_operands(statement: Statement) -> tuple[int, int]:
    """How many operands a barrier has, least and most."""
    parts = statement.qualifiers
    if "cluster" in parts:
        return (0, 0)
    if "red" in parts:
        return (3, 4)
    return (2, 2) if "arrive" in parts else (1, 2)
