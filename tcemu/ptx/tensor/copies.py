"""`cp.async` and `cp.async.bulk`: copies between global and shared memory that threads issue and wait for.

A copy is made at once, when it is issued: one of the outcomes that the manual allows. So the instructions that wait have nothing to do,
but in checked mode: see `tcemu.ptx.pending`.
Source: PTX ISA 9.7.9.25.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.errors import Unsupported
from tcemu.ptx import pending
from tcemu.ptx.context import Context, Prepare, Step
from tcemu.ptx.faults import Message, Misaligned
from tcemu.ptx.module import Address, Negated, Operand, Register, Statement
from tcemu.ptx.tensor.barriers import Arrivals, Change, arrived, awaited, brought, changed
from tcemu.ptx.tensor.issuers import UNIT, Values, carried, issued, moved, whole
from tcemu.ptx.tensor.statements import fault
from tcemu.ptx.tensor.tensor_copies import PREFETCH_TENSOR, TENSOR, goes_to_global, prepare_tensor_copy
from tcemu.ptx.tensor.variants import Choices, Form, chosen, constant, slot

if TYPE_CHECKING:
    from tcemu.ptx.machine import Machine

SECTION, BULK_SECTION = "PTX ISA 9.7.9.25.3", "PTX ISA 9.7.9.25.4"
HINT = slot("hint", "L2::cache_hint")
CLUSTER = {"multicast::cluster": "there are no clusters of more than one block; a launch of clusters of 1 needs no multicast"}
COPY = Form(
    "cp.async",
    (
        slot("cache", "ca cg", needed=True),
        slot("to", "shared shared::cta", needed=True),
        slot("from", "global", needed=True),
        HINT,
        slot("prefetch", "L2::64B L2::128B L2::256B"),
    ),
    (3, 4, 5),
    80,
    SECTION,
)
ARRIVE = Form(
    "cp.async.mbarrier.arrive",
    (slot("noinc", "noinc"), slot("space", "shared shared::cta"), slot("type", "b64", needed=True)),
    (1,),
    80,
    "PTX ISA 9.7.13.15.17",
)
COMMIT = Form("cp.async.commit_group", (), (0,), 80, SECTION)
WAIT_ALL = Form("cp.async.wait_all", (), (0,), 80, SECTION)
WAIT = Form("cp.async.wait_group", (), (1,), 80, SECTION)
BULK = Form(
    "cp.async.bulk",
    (
        slot("to", "shared::cluster shared::cta global", needed=True),
        slot("from", "global shared::cta", needed=True),
        slot("completion", "mbarrier::complete_tx::bytes bulk_group", needed=True),
        HINT,
        slot("mask", "cp_mask"),
    ),
    (3, 4, 5),
    90,
    BULK_SECTION,
    CLUSTER,
)
BULK_COMMIT = Form("cp.async.bulk.commit_group", (), (0,), 90, BULK_SECTION)
BULK_WAIT = Form("cp.async.bulk.wait_group", (slot("read", "read"),), (1,), 90, BULK_SECTION)
PREFETCH = Form(
    "cp.async.bulk.prefetch", (slot("level", "L2", needed=True), slot("from", "global", needed=True), HINT), (2, 3), 90, BULK_SECTION
)
NOTHING_TO_DO = (BULK_COMMIT, PREFETCH, PREFETCH_TENSOR)
FORMS = (COPY, ARRIVE, COMMIT, WAIT, WAIT_ALL, BULK, BULK_WAIT, TENSOR, *NOTHING_TO_DO)
SIZES = {"ca": (4, 8, 16), "cg": (16,)}  # of a cp.async, in bytes


def prepare_copy(statement: Statement, context: Context) -> Step:
    """Every `cp.async`."""
    form, choices = chosen(statement, context, FORMS)
    if form in (WAIT, BULK_WAIT):
        groups = constant(statement.operands[0], "how many groups may stay pending", form.section)
        if groups < 0:
            raise Unsupported(f"how many groups may stay pending is 0 or more. {form.section}")
        return Step(lambda machine: pending.waited(machine, groups) if form is WAIT else machine)
    if form is WAIT_ALL:
        return Step(lambda machine: pending.waited(machine, None))
    if form is COMMIT:
        return Step(pending.committed)
    if form in NOTHING_TO_DO:
        return Step(lambda machine: machine)
    if form is ARRIVE:
        return _prepare_arrival(statement, arrived if choices["noinc"] else awaited, context.checked)
    if form is TENSOR:
        return prepare_tensor_copy(statement, choices, context)
    if form is BULK:
        return _prepare_bulk(statement, choices, context)
    return _prepare_small(statement, choices, context)


def _address(operand: Operand) -> Address:
    if not isinstance(operand, Address):
        raise Unsupported(f"an address is written in brackets. {SECTION}")
    return operand


def _prepare_arrival(statement: Statement, change: Change, checked: bool) -> Step:
    """`cp.async.mbarrier.arrive`: the copies of the thread are done, so it arrives."""
    address = _address(statement.operands[0])

    def run(machine: Machine) -> Machine:
        machine = pending.waited(machine, None)
        by = Arrivals(machine.address(address), jnp.ones(machine.active.shape, jnp.int64))
        return changed(machine, statement, change, by, checked)[1]

    return Step(run)


# ---- cp.async


def _prepare_small(statement: Statement, choices: Choices, context: Context) -> Step:
    """`cp.async` of 4, 8 or 16 bytes. What is beyond src-size, and all of it under ignore-src, becomes zeros and is not read."""
    target, source = (_address(operand) for operand in statement.operands[:2])
    size = constant(statement.operands[2], "cp-size", SECTION)
    sizes = SIZES[choices["cache"] or ""]
    if size not in sizes:
        raise Unsupported(f"cp-size is {size}; wanted {' or '.join(map(str, sizes))}. {SECTION}")
    further = statement.operands[3 : None if choices["hint"] is None else -1]
    if len(further) > 1 or (choices["hint"] and len(statement.operands) < 4):
        raise Unsupported(f"the operands are [dst], [src], cp-size {{, src-size or ignore-src}} {{, cache-policy}}. {SECTION}")
    given = further[0] if further else None
    ignores = isinstance(given, Negated) or (isinstance(given, Register) and context.function.registers.get(given.name) == "pred")

    def run(machine: Machine) -> Machine:
        read = _bytes_read(machine, given, ignores, size)
        values, machine = _read(machine, machine.address(source), read, size, partial=given is not None and not ignores)
        machine = machine.store("shared", machine.address(target), "b32", values)
        if pending.KEY not in machine.extra:
            return machine
        places, good, machine = machine.place("shared", machine.address(target), size)
        return replace(pending.copied(machine.within(good), places.at, size // 4), active=machine.active)

    return Step(run)


def _bytes_read(machine: Machine, given: Operand | None, ignores: bool, size: int) -> Array:
    """How many bytes each thread reads: int64[blocks, threads]."""
    if given is None:
        return jnp.full(machine.active.shape, size, jnp.int64)
    if ignores:
        return jnp.where(machine.read(given, "pred"), 0, size)
    return jnp.minimum(machine.read(given, "u32").astype(jnp.int64), size)


def _read(machine: Machine, address: Array, read: Array, size: int, *, partial: bool) -> tuple[tuple[Array, ...], Machine]:
    """The words of a copy, zeros beyond what is read; partial: it may be any number of bytes."""
    active, words = machine.active, size // 4

    def by_bytes(machine: Machine) -> tuple[tuple[Array, ...], Machine]:
        values = [jnp.zeros(active.shape, jnp.uint32) for _ in range(words)]
        for at in range(size):
            lanes = replace(machine, active=active & (at < read) & (read < size))
            (byte,), lanes = lanes.load("global", address + np.uint64(at), "b8")
            values[at // 4] |= byte << np.uint32(at % 4 * 8)
            machine = replace(lanes, active=active)
        return tuple(values), machine

    def none(machine: Machine) -> tuple[tuple[Array, ...], Machine]:
        return tuple(jnp.zeros(active.shape, jnp.uint32) for _ in range(words)), machine

    values, machine = replace(machine, active=active & (read == size)).load("global", address, "b32", words)
    machine = replace(machine, active=active)
    if not partial:
        return values, machine
    some, machine = lax.cond((active & (read > 0) & (read < size)).any(), by_bytes, none, machine)
    return tuple(whole_ | part for whole_, part in zip(values, some, strict=True)), machine


# ---- cp.async.bulk


def _prepare_bulk(statement: Statement, choices: Choices, context: Context) -> Step:
    """`cp.async.bulk` between global and shared memory, or within shared memory; each thread copies so many bytes."""
    to_global = goes_to_global(choices, BULK_SECTION)
    if choices["mask"]:
        raise Unsupported(f".cp_mask is not run; a copy of whole units of 16 bytes is. {BULK_SECTION}")
    count = 3 + (not to_global) + (choices["hint"] is not None)
    if len(statement.operands) != count:
        raise Unsupported(f"it has {len(statement.operands)} operands; wanted {count}. {BULK_SECTION}")
    target, source = (_address(operand) for operand in statement.operands[:2])
    object_ = None if to_global else _address(statement.operands[3])
    spaces = tuple("global" if choices[side] == "global" else "shared" for side in ("from", "to"))
    bad_size = Message(f"the size must be a multiple of {UNIT} bytes. {BULK_SECTION}", Misaligned)

    def run(machine: Machine) -> Machine:
        active = machine.active
        size = machine.read(statement.operands[2], "u32").astype(jnp.int64)
        machine = fault(machine, size % UNIT != 0, bad_size, statement)
        machine = replace(machine, active=active & (size % UNIT == 0) & (size > 0))
        ends = {}
        for name, space, address in (("source", spaces[0], source), ("target", spaces[1], target)):
            ends[name] = machine.address(address)
            good, machine = whole(machine, space, ends[name], size)
            machine = replace(machine, active=good)
        machine = issued(machine, ends | {"units": size // UNIT}, lambda machine, mine: _copied(machine, spaces, mine))
        if object_ is not None:
            machine = changed(machine, statement, brought, Arrivals(machine.address(object_), size), context.checked)[1]
        return replace(machine, active=active)

    return Step(run)


def _copied(machine: Machine, spaces: tuple[str, ...], mine: Values) -> Machine:
    """One copy of each block that has one."""

    def carry(machine: Machine, unit: Array, there: Array) -> Machine:
        offset = unit.astype(jnp.uint64) * np.uint64(UNIT)
        source, target = mine["source"][:, None] + offset, mine["target"][:, None] + offset
        return moved(machine, (spaces[0], spaces[1]), source, target, there)

    return carried(machine, jnp.where(mine["live"], mine["units"], 0), carry)


PREPARE: dict[str, Prepare] = {"cp": prepare_copy}
