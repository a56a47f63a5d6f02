"""Loads, stores and atomics: `ld`, `ldu`, `st`, `atom` and `red` (PTX ISA 9.7.9.8 to 9.7.9.11, 9.7.13.5 to 9.7.13.7).

Cache hints change nothing. Memory orders do not either, since all threads see every access at once. Atomics of threads that meet at one
address are applied one after the other, in the order of the threads' numbers. On a GPU that order is unspecified; the result of integer
operations does not depend on it, the result of floating-point ones may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.statement_table import require_form
from tcemu.kernels.ptx.instruction_interface import Context, Operation, Prepare, Step
from tcemu.kernels.ptx.operand_classes import check_operand_lists
from tcemu.kernels.ptx.scalar import scalar_table as scalars
from tcemu.kernels.ptx.simt import device_memory
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.text.module import Address, Operand, Sink, Statement, Vector
from tcemu.kernels.ptx.text.ptx_types import KINDS

# ---- loads and stores

STRONG = {"volatile", "relaxed", "acquire", "release"}  # such an access is no race, and it may order others


class Access(NamedTuple):
    """A load or a store."""

    space: str  # "" for generic addresses
    kind: str  # type of an element
    elements: int
    registers: tuple[Operand, ...]
    address: Address


def parse_access(statement: Statement, context: Context) -> Access:
    """Return the access of an `ld`, `ldu` or `st`. Raises Unsupported."""
    choices = require_form(statement.opcode).choices
    kind, count, hint = choices["type"] or "", int((choices.get("vector") or "v1")[1:]), " u64" if choices.get("hint") else ""
    operands = statement.operands
    if kind == "b128":  # `wide_registers` makes two elements of 64 bits of a register of 128
        raise Unsupported(f"{statement.opcode!r} takes a register of 128 bits. PTX ISA 9.7.9.8")
    if statement.name == "st":
        check_operand_lists(statement, context, f"[] <~{kind}*{count}>{hint}")
        address, value = operands[:2]
    else:
        check_operand_lists(statement, context, f"<=~{kind}_*{count}> []{hint}")
        value, address = operands[:2]
    assert isinstance(address, Address)
    registers = value.elements if isinstance(value, Vector) else (value,)
    return Access(plain_space(choices["space"]), kind, count, registers, address)


def plain_space(space: str | None) -> str:
    """Return the machine's name of a state space: "param" for "param::entry", "shared" for "shared::cta"; "" if there is none."""
    return space if space == "shared::cluster" else (space or "").partition("::")[0]


def prepare_load(statement: Statement, context: Context) -> Step:
    """Prepare an `ld` or `ldu`."""
    access = parse_access(statement, context)

    def apply(machine: Machine) -> Machine:
        values, machine = machine.load(access.space, machine.address(access.address), access.kind, access.elements)
        for register, value in zip(access.registers, values, strict=True):
            machine = machine.write(register, access.kind, value)
        return machine

    return Step(apply)


def prepare_store(statement: Statement, context: Context) -> Step:
    """Prepare an `st`."""
    access = parse_access(statement, context)

    def apply(machine: Machine) -> Machine:
        values = tuple(machine.read(register, access.kind) for register in access.registers)
        return machine.store(access.space, machine.address(access.address), access.kind, values)

    return Step(apply)


# ---- atomics

OWN_OPERATIONS: dict[str, Callable[[Array, Array, Array], Array]] = {  # the others are instructions of values
    "exch": lambda old, b, c: b,
    "cas": lambda old, b, c: jnp.where(old == b, c, old),
    "inc": lambda old, b, c: jnp.where(old >= b, np.uint32(0), old + np.uint32(1)),
    "dec": lambda old, b, c: jnp.where((old == 0) | (old > b), b, old - np.uint32(1)),
}
ASSOCIATIVE = ("add", "and", "or", "xor", "min", "max")  # the operations that are associative for integers


class Atomic(NamedTuple):
    """An atomic operation and its operands."""

    space: str  # "" for generic addresses
    kind: str  # type of an element
    elements: int
    combine: Callable[[Array, Array, Array], Array]  # (old value, b, c) -> new value
    associative: bool  # the operations of several threads may be combined first
    destination: tuple[Operand, ...]
    address: Address
    b: tuple[Operand, ...]
    c: Operand | None


def parse_atomic(statement: Statement, context: Context) -> Atomic:
    """Return the operation of an `atom` or a `red`. Raises Unsupported."""
    choices = require_form(statement.opcode).choices
    operation, kind = choices["operation"] or "", choices["type"] or ""
    count, space = int((choices.get("vector") or "v1")[1:]), plain_space(choices["space"])
    third, hint = f" {kind}" if operation == "cas" else "", " u64" if choices.get("hint") else ""
    value = kind if count == 1 else f"<{kind}*{count}>"
    result = f"={kind}_" if count == 1 else f"<={kind}_*{count}>"
    if statement.name == "red":
        check_operand_lists(statement, context, f"[] {value}{hint}")
    else:
        discarded = statement.operands[:1] == (Sink(),)  # also in place of a vector
        check_operand_lists(statement, context, f"{f'={kind}_' if discarded else result} [] {value}{third}{hint}")
    operands = statement.operands if statement.name == "atom" else (Sink(), *statement.operands)
    destination, b = (
        each.elements if isinstance(each, Vector) else (each,) * (count if isinstance(each, Sink) else 1)
        for each in (operands[0], operands[2])
    )
    assert isinstance(operands[1], Address) and len(destination) == len(b) == count
    atomic = element_atomic(space, operation, kind, context)
    c = operands[3] if operation == "cas" else None
    return atomic._replace(elements=count, destination=destination, address=operands[1], b=b, c=c)


def element_atomic(space: str, operation: str, kind: str, context: Context) -> Atomic:
    """Return the atomic operation on one element without its operands."""
    associative = (operation in ASSOCIATIVE and not _is_float(kind)) or operation == "exch"
    combine = _combiner(operation, kind, space, context)
    return Atomic(space, kind, 1, combine, associative, (Sink(),), Address(None), (Sink(),), None)


def _is_float(kind: str) -> bool:
    return "f" in kind


def _combiner(operation: str, kind: str, space: str, context: Context) -> Callable[[Array, Array, Array], Array]:
    if operation in OWN_OPERATIONS:
        return OWN_OPERATIONS[operation]
    flushes = (operation, kind) == ("add", "f32") and not space.startswith("shared")  # subnormals in global memory: 9.7.13.5
    rounding = f".rn{'.ftz' * flushes}" if operation == "add" and _is_float(kind) else ""
    opcode = f"{operation}{rounding}.{kind}"
    prepare = scalars.PREPARE[opcode.partition(".")[0]]
    operation_bits = prepare(Statement(opcode, (Sink(), Sink(), Sink()), None, context.function.position), context)
    assert isinstance(operation_bits, Operation)
    return lambda old, b, c: operation_bits.compute(old, b)[0]


class AtomicExtent(NamedTuple):
    """The memory that an `atom` or a `red` accesses."""

    space: str
    address: Address
    element: int  # bytes of an element
    size: int  # bytes of all


def atomic_extent(statement: Statement, context: Context) -> AtomicExtent:
    """Return the memory that an `atom` or a `red` accesses. Raises Unsupported."""
    choices = require_form(statement.opcode).choices
    if choices["type"] == "b128":
        address = statement.operands[1]
        assert isinstance(address, Address)
        return AtomicExtent(plain_space(choices["space"]), address, 16, 16)
    atomic = parse_atomic(statement, context)
    element = KINDS[atomic.kind].bits // 8
    return AtomicExtent(atomic.space, atomic.address, element, element * atomic.elements)


def prepare_atomic(statement: Statement, context: Context) -> Step:
    """Prepare an `atom` or `red`."""
    if require_form(statement.opcode).choices["type"] == "b128":
        return Step(_execute_wide_atomic(statement, context))
    return Step(execute_atomic(parse_atomic(statement, context)))


def _execute_wide_atomic(statement: Statement, context: Context) -> Callable[[Machine], Machine]:
    """Return the function of `atom.exch.b128` or `atom.cas.b128`, whose registers are vectors of two halves (see `wide_registers`)."""
    choices = require_form(statement.opcode).choices
    compares, space, hint = choices["operation"] == "cas", plain_space(choices["space"]), " u64" if choices.get("hint") else ""
    discarded = statement.operands[:1] == (Sink(),)
    result, value = "=b64_" if discarded else "<=b64_*2>", "<b64*2>"
    check_operand_lists(statement, context, f"{result} [] {value}{f' {value}' * compares}{hint}")
    destination, address, b, c = (*statement.operands[: 3 + compares], *statement.operands[2:3])[:4]
    assert isinstance(address, Address)

    def apply(machine: Machine) -> Machine:
        start = machine.address(address)
        given, other = (tuple(machine.read(half, "b64") for half in operand.elements) for operand in (b, c) if isinstance(operand, Vector))
        parts, machine = machine.split_access(space, start, 16, 16)
        found = [jnp.zeros(machine.active.shape, jnp.uint64)] * 2
        for room, word_index, mask in parts:
            words, old = _apply_wide_atomic(machine.words(room), word_index, given, other if compares else None, mask)
            machine = machine.with_words(room, words)
            found = [jnp.where(mask, new, before) for new, before in zip(old, found, strict=True)]
        for half, old in zip(destination.elements if isinstance(destination, Vector) else (), found, strict=False):
            machine = machine.write(half, "b64", old)
        return machine

    return apply


def _apply_wide_atomic(
    words: Array, word_index: Array, b: tuple[Array, ...], c: tuple[Array, ...] | None, mask: Array
) -> tuple[Array, list[Array]]:
    """Exchange 128 bits, or with `c` compare them with `b` and exchange; one thread at an address after the other, by their numbers.

    Returns:
        The words, and the old values as two halves.
    """
    shape, index, mask = word_index.shape, word_index.ravel(), mask.ravel()
    b, c = tuple(each.ravel() for each in b), None if c is None else tuple(each.ravel() for each in c)
    same = jnp.where(mask, index, -1)
    order = jnp.argsort(same, stable=True)
    place = jnp.arange(index.size)
    first = jnp.concatenate([jnp.ones(1, bool), same[order][1:] != same[order][:-1]])
    rank = jnp.zeros_like(place).at[order].set(place - lax.cummax(jnp.where(first, place, 0)))  # threads before it at its address
    last = jnp.where(mask, rank, -1).max()

    def apply_rank(state: tuple[Array, Array, list[Array]]) -> tuple[Array, Array, list[Array]]:
        number, words, old = state
        here = mask & (rank == number)
        runs = device_memory.gather_words(words, index, 4)
        current = [device_memory.join_words(*runs[i : i + 2]) for i in (0, 2)]
        writes = here if c is None else here & (current[0] == b[0]) & (current[1] == b[1])
        new = [word for half in (b if c is None else c) for word in device_memory.split_words(half)]
        words = device_memory.scatter_runs(words, index, new, writes, exclusive=True)
        return number + 1, words, [jnp.where(here, now, before) for now, before in zip(current, old, strict=True)]

    start = (jnp.zeros((), rank.dtype), words, [jnp.zeros(index.shape, jnp.uint64)] * 2)
    _, words, old = lax.while_loop(lambda state: state[0] <= last, apply_rank, start)
    return words, [half.reshape(shape) for half in old]


def execute_atomic(atomic: Atomic) -> Callable[[Machine], Machine]:
    """Return the function that applies an atomic operation of the active threads."""
    size = KINDS[atomic.kind].bits // 8

    def apply(machine: Machine) -> Machine:
        start = machine.address(atomic.address)
        c = machine.read(atomic.c, atomic.kind) if atomic.c is not None else jnp.uint32(0)
        for i, (destination, operand) in enumerate(zip(atomic.destination, atomic.b, strict=True)):
            address = start + np.uint64(i * size)
            parts, machine = machine.split_access(atomic.space, address, size, atomic.elements * size if i == 0 else size)
            b, found = machine.read(operand, atomic.kind), jnp.zeros(machine.active.shape, jnp.uint64 if size == 8 else jnp.uint32)
            for room, word_index, mask in parts:
                requests = AtomicRequests(word_index, address, b, jnp.broadcast_to(c, b.shape), mask)
                words, old = apply_atomic(atomic, machine.words(room), requests)
                machine = machine.with_words(room, words)
                found = jnp.where(mask, old, found)
            machine = machine.write(destination, atomic.kind, found)
        return machine

    return apply


class AtomicRequests(NamedTuple):
    """The operations of all threads."""

    word_index: Array
    address: Array
    b: Array
    c: Array
    mask: Array  # the threads that take part


def apply_atomic(atomic: Atomic, words: Array, lanes: AtomicRequests) -> tuple[Array, Array]:
    """Apply the operations of all threads; return the words, and the old value that each thread found, [blocks, threads]."""
    shape, count, bits = lanes.word_index.shape, lanes.word_index.size, KINDS[atomic.kind].bits
    lanes = AtomicRequests(*(each.ravel() for each in lanes))
    byte = lanes.word_index.astype(jnp.int64) * 4 + (lanes.address & np.uint64(3)).astype(jnp.int64)
    key = jnp.where(lanes.mask, byte, np.int64(1) << 40)
    order = jnp.argsort(key, stable=True)
    lanes, key = AtomicRequests(*(each[order] for each in lanes)), key[order]
    place = jnp.arange(count)
    first = jnp.concatenate([jnp.ones(1, bool), key[1:] != key[:-1]])
    rank = place - lax.cummax(jnp.where(first, place, 0))  # threads before it at its address
    end = words.shape[0]

    def read_values(words: Array) -> Array:
        found = device_memory.gather_words(words, lanes.word_index, 2 if bits == 64 else 1)
        return device_memory.extract_element(found, lanes.address, bits)

    def write_values(words: Array, value: Array, mask: Array) -> Array:
        index = jnp.where(mask, lanes.word_index, end)
        return device_memory.scatter_element(words, index, lanes.address, value, mask, bits, exclusive=True)

    if atomic.associative:
        totals = _prefix_totals(atomic.combine, lanes.b, rank)
        preceding = jnp.roll(totals, 1)
        old = read_values(words)
        new = atomic.combine(old, totals, lanes.c)
        old = jnp.where(rank > 0, atomic.combine(old, preceding, lanes.c), old)
        words = write_values(words, new, lanes.mask & jnp.roll(first, -1).at[-1].set(True))
    else:
        words, old = _apply_serially(atomic, words, lanes, rank, read_values, write_values)
    return words, jnp.zeros_like(old).at[order].set(old).reshape(shape)


def _prefix_totals(combine: Callable[[Array, Array, Array], Array], values: Array, rank: Array) -> Array:
    """Combine the values of each thread and of the threads before it at its address."""

    def combine_distance(i: Array, totals: Array) -> Array:
        distance = jnp.left_shift(1, i)
        return jnp.where(rank >= distance, combine(jnp.roll(totals, distance), totals, totals), totals)

    return lax.fori_loop(0, max(values.size - 1, 1).bit_length(), combine_distance, values)


def _apply_serially(
    atomic: Atomic,
    words: Array,
    lanes: AtomicRequests,
    rank: Array,
    read_values: Callable[[Array], Array],
    write_values: Callable[[Array, Array, Array], Array],
) -> tuple[Array, Array]:
    """Apply first the operations that are first at their address, then the second ones, and so on."""
    last = jnp.where(lanes.mask, rank, -1).max()

    def apply_rank(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        number, words, old = carry
        mask = lanes.mask & (rank == number)
        current = read_values(words)
        words = write_values(words, atomic.combine(current, lanes.b, lanes.c), mask)
        return number + 1, words, jnp.where(mask, current, old)

    start = (jnp.zeros((), rank.dtype), words, jnp.zeros_like(lanes.b))
    _, words, old = lax.while_loop(lambda carry: carry[0] <= last, apply_rank, start)
    return words, old


PREPARE: dict[str, Prepare] = {
    "ld": prepare_load,
    "ldu": prepare_load,
    "st": prepare_store,
    "atom": prepare_atomic,
    "red": prepare_atomic,
}
