"""Fences and hints, which change nothing since all threads see every access at once; and conversions between address spaces.

Source: PTX ISA 9.7.9.15 to 9.7.9.21, 9.7.13.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from tcemu.engine.isa.statement_table import require_form
from tcemu.kernels.ptx.instruction_interface import NO_EFFECT, Context, Operation, Prepare, Step
from tcemu.kernels.ptx.operand_classes import check_operand_lists
from tcemu.kernels.ptx.simt.device_memory import (
    CONST_ROOM,
    FIRST_ROOM,
    LOCAL_ROOM,
    PARAM_ROOM,
    ROOM_BITS,
    SHARED_ROOM,
    extract_rank,
    replace_rank,
    room_start,
)
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.text.module import Statement


def _no_effect(operands: str, step: Step = NO_EFFECT) -> Prepare:
    """Return the preparer of an instruction that changes nothing. operands: as classes of `tcemu.kernels.ptx.operand_classes`."""

    def prepare(statement: Statement, context: Context) -> Step:
        require_form(statement.opcode)
        check_operand_lists(statement, context, operands)
        return step

    return prepare


def prepare_fence(statement: Statement, context: Context) -> Step:
    """Prepare a `fence`. One that acquires a tensor map has its address and size."""
    form = require_form(statement.opcode)
    sized = "tensormap::generic" in form.qualifiers and "acquire" in form.qualifiers
    check_operand_lists(statement, context, "[] #" if sized else "")
    return NO_EFFECT


# ---- generic addresses


def _room_number(space: str, context: Context) -> int | None:
    """Return the room of a space in generic addresses; None if addresses in the space are generic ones."""
    if space.startswith("param"):
        return PARAM_ROOM if context.function.entry else LOCAL_ROOM
    return {"shared": SHARED_ROOM, "shared::cta": SHARED_ROOM, "shared::cluster": SHARED_ROOM, "local": LOCAL_ROOM}.get(space)


def prepare_cvta(statement: Statement, context: Context) -> Operation:
    """Prepare a `cvta`: conversion between an address in a space and the generic one (9.7.9.20)."""
    form = require_form(statement.opcode)
    room = _room_number(form.choices["space"] or "", context)
    start = 0 if room is None else room_start(room)
    return _offset_operation((-start if "to" in form.qualifiers else start) % 2**64)


@cache
def _offset_operation(offset: int) -> Operation:
    """Return the operation that adds an offset; one object for each offset, since compiled programs are cached by it."""
    return Operation(("u64",), ("u64",), lambda address: (address + np.uint64(offset),))


def prepare_isspacep(statement: Statement, context: Context) -> Operation | Step:
    """Prepare an `isspacep`: a test whether a generic address lies in a space (9.7.9.19)."""
    space = require_form(statement.opcode).choices["space"] or ""
    if space == "global":
        return _room_test(FIRST_ROOM, 1 << 64 - ROOM_BITS)
    if space in ("shared", "shared::cta"):
        check_operand_lists(statement, context, "=pred u64")
        return _own_shared_test(statement)
    room = CONST_ROOM if space == "const" else _room_number(space, context)
    return _room_test(room or 0, (room or 0) + 1)


@cache
def _room_test(first: int, stop: int) -> Operation:
    """Return the operation that tests whether an address lies in the rooms from `first` to `stop`."""

    def compute(address):
        room = address >> np.uint64(ROOM_BITS)
        return ((room >= np.uint64(first)) & (room < np.uint64(stop)),)

    return Operation(("pred",), ("u64",), compute)


def _own_shared_test(statement: Statement) -> Step:
    """Prepare the test whether a generic address lies in the shared memory of the thread's own block."""
    result, operand = statement.operands

    def apply(machine: Machine) -> Machine:
        address = machine.read(operand, "u64")
        own = (address >> np.uint64(ROOM_BITS) == np.uint64(SHARED_ROOM)) & (extract_rank(address) == machine.ranks())
        return machine.write(result, "pred", own)

    return Step(apply)


# ---- addresses of the other blocks of a cluster


def prepare_rank(statement: Statement, context: Context) -> Operation:
    """Prepare a `mapa` or a `getctarank` (9.7.9.23, 9.7.9.24).

    A rank that the cluster does not have gives an address at which every access is out of bounds.
    """
    return RANK_OPERATIONS[statement.name, require_form(statement.opcode).choices["type"] or ""]


RANK_OPERATIONS = {
    ("mapa", kind): Operation((kind,), (kind, "u32"), lambda address, rank: (replace_rank(address, rank),)) for kind in ("u32", "u64")
} | {("getctarank", kind): Operation(("u32",), (kind,), lambda address: (extract_rank(address),)) for kind in ("u32", "u64")}
PREPARE: dict[str, Prepare] = {
    "membar": _no_effect(""),
    "fence": prepare_fence,
    "nanosleep": _no_effect("u32"),
    "prefetch": _no_effect("[]"),
    "prefetchu": _no_effect("[]"),
    "applypriority": _no_effect("[] #"),
    "discard": _no_effect("[] #"),
    "pmevent": _no_effect("#"),
    "brkpt": _no_effect(""),
    "bar": _no_effect("u32", NO_EFFECT._replace(collective=True)),  # bar.warp.sync
    "cvta": prepare_cvta,
    "isspacep": prepare_isspacep,
    "mapa": prepare_rank,
    "getctarank": prepare_rank,
}
