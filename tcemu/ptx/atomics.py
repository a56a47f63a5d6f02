"""`atom` and `red`: threads that meet at one address go one after the other, in the order of their numbers (PTX ISA 9.7.13.5 to 9.7.13.7).

On a GPU the order is nobody's; integers come to the same in every order, floats need not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.errors import Unsupported
from tcemu.ptx import checks, memory
from tcemu.ptx.context import Context, Operation, Prepare, Step
from tcemu.ptx.loads import EVICT, HINT, in_order
from tcemu.ptx.module import Address, Operand, Sink, Statement, Vector
from tcemu.ptx.scalar import table as scalars
from tcemu.ptx.values import KINDS

if TYPE_CHECKING:
    from tcemu.ptx.machine import Machine

# the types of each operation, and the instruction of values that computes it: {} stands for the type. None: computed here
INTEGERS = ("u32", "s32", "u64", "s64")
ROWS: dict[tuple[str, str], str | None] = {
    **{(name, kind): f"{name}.{kind}" for name in ("and", "or", "xor") for kind in ("b32", "b64")},
    **{(name, kind): f"{name}.{kind}" for name in ("min", "max") for kind in INTEGERS},
    **{("add", kind): f"add.{kind}" for kind in INTEGERS},
    **{("inc", "u32"): None, ("dec", "u32"): None},
    **{(name, kind): None for name in ("exch", "cas") for kind in ("b16", "b32", "b64") if (name, kind) != ("exch", "b16")},
    **{("add", kind): f"add.rn.{kind}" for kind in ("f32", "f64")},
    **{("add.noftz", kind): f"add.rn.{kind}" for kind in ("f16", "f16x2", "bf16", "bf16x2")},
    **{(f"{name}.noftz", kind): f"{name}.{kind}" for name in ("min", "max") for kind in ("f16", "f16x2", "bf16", "bf16x2")},
}
SUMS = ("add", "and", "or", "xor", "min", "max")  # of integers: the same however threads are taken together
PATTERN = re.compile(
    r"((relaxed|acquire|release|acq_rel)\.)?((cta|cluster|gpu|sys)\.)?((?P<space>global|shared::cta|shared::cluster|shared)\.)?"
    rf"{EVICT}{HINT}(?P<operation>\w+?)\.(?P<rounding>noftz\.)?((?P<vector>v[248])\.)?(?P<type>\w+)"
)


class Atomic(NamedTuple):
    """What an opcode says, and its operands. combine: (what lies there, b, c) -> what then lies there."""

    space: str
    kind: str
    elements: int
    combine: Callable[[Array, Array, Array], Array]
    sums: bool
    destination: tuple[Operand, ...]
    address: Address
    b: tuple[Operand, ...]
    c: Operand | None


def read_atomic(statement: Statement, context: Context) -> Atomic:
    """The parts of an `atom` or a `red`. Raises Unsupported."""
    found = PATTERN.fullmatch(in_order(statement.qualifiers))
    if found is None:
        raise Unsupported(f"{statement.opcode!r} is not run: its qualifiers are none that are known for {statement.name}")
    operation, kind = found["operation"] + (".noftz" if found["rounding"] else ""), found["type"]
    if (operation, kind) not in ROWS or (statement.name == "red" and operation in ("exch", "cas")):
        types = [known for name, known in ROWS if name == operation]
        raise Unsupported(f"{statement.opcode!r} is not run: {statement.name}.{operation} has {', '.join(types) or 'no types here'}")
    count = int((found["vector"] or "v1")[1:])
    space = (found["space"] or "").partition("::")[0]
    if count > 1 and (space != "global" or not _is_float(kind)):
        raise Unsupported(f"{statement.opcode!r} is not run: vectors are of floats in global memory")
    operands = statement.operands if statement.name == "atom" else (Sink(), *statement.operands)
    wanted = 4 if operation == "cas" else 3
    if len(operands) - bool(found["hint"]) != wanted or not isinstance(operands[1], Address):
        raise Unsupported(f"{statement.opcode!r} takes {wanted - (statement.name == 'red')} operands, the address in []")
    to, b = (
        each.elements if isinstance(each, Vector) else (each,) * (count if isinstance(each, Sink) else 1)
        for each in (operands[0], operands[2])
    )
    if len(to) != count or len(b) != count:
        raise Unsupported(f"{statement.opcode!r} takes vectors of {count} elements")
    combine = _combine(operation, kind, space, context)
    sums = (operation in SUMS and not _is_float(kind)) or operation == "exch"
    return Atomic(space, kind, count, combine, sums, to, operands[1], b, operands[3] if operation == "cas" else None)


def _is_float(kind: str) -> bool:
    return "f" in kind


def _combine(operation: str, kind: str, space: str, context: Context) -> Callable[[Array, Array, Array], Array]:
    """What an operation makes of the word that lies there."""
    if operation == "exch":
        return lambda old, b, c: b
    if operation == "cas":
        return lambda old, b, c: jnp.where(old == b, c, old)
    if operation == "inc":
        return lambda old, b, c: jnp.where(old >= b, np.uint32(0), old + np.uint32(1))
    if operation == "dec":
        return lambda old, b, c: jnp.where((old == 0) | (old > b), b, old - np.uint32(1))
    opcode = ROWS[operation, kind] or ""
    if (operation, kind) == ("add", "f32") and space != "shared":
        opcode = "add.rn.ftz.f32"  # in global memory subnormals become zero: 9.7.13.5
    prepare = scalars.PREPARE.get(opcode.partition(".")[0])
    if prepare is None:
        raise Unsupported(f"{operation}.{kind} is not run")
    from_values = prepare(Statement(opcode, (Sink(), Sink(), Sink()), None, context.function.place), context)
    assert isinstance(from_values, Operation)
    return lambda old, b, c: from_values.compute(old, b)[0]


def prepare_atomic(statement: Statement, context: Context) -> Step:
    """`atom`, `red`."""
    atomic = read_atomic(statement, context)
    size = KINDS[atomic.kind].bits // 8

    def run(machine: Machine) -> Machine:
        start = machine.address(atomic.address)
        c = machine.read(atomic.c, atomic.kind) if atomic.c is not None else jnp.uint32(0)
        for i, (to, operand) in enumerate(zip(atomic.destination, atomic.b, strict=True)):
            address = start + np.uint64(i * size)
            parts, machine = machine.parts(atomic.space, address, size, atomic.elements * size if i == 0 else size)
            b, found = machine.read(operand, atomic.kind), jnp.zeros(machine.active.shape, jnp.uint64 if size == 8 else jnp.uint32)
            for room, at, mine in parts:
                words, old = _at_once(atomic, machine.words(room), _Lanes(at, address, b, jnp.broadcast_to(c, b.shape), mine))
                machine = machine.with_words(room, words)
                if room == "shared":
                    machine = checks.forget(checks.written(machine, at, address, size, mine))
                found = jnp.where(mine, old, found)
            machine = machine.write(to, atomic.kind, found)
        return machine

    return Step(run)


class _Lanes(NamedTuple):
    """What threads bring: the word that each touches, the address, the operands, and which take part."""

    at: Array
    address: Array
    b: Array
    c: Array
    mask: Array


def _at_once(atomic: Atomic, words: Array, lanes: _Lanes) -> tuple[Array, Array]:
    """The words after all threads have had their turn, and what each found: [blocks, threads]."""
    shape, count, bits = lanes.at.shape, lanes.at.size, KINDS[atomic.kind].bits
    lanes = _Lanes(*(each.ravel() for each in lanes))
    key = jnp.where(lanes.mask, lanes.at.astype(jnp.int64) * 4 + (lanes.address & np.uint64(3)).astype(jnp.int64), np.int64(1) << 40)
    order = jnp.argsort(key, stable=True)
    lanes, key = _Lanes(*(each[order] for each in lanes)), key[order]
    place = jnp.arange(count)
    first = jnp.concatenate([jnp.ones(1, bool), key[1:] != key[:-1]])
    rank = place - lax.cummax(jnp.where(first, place, 0))  # how many go before
    held = words.shape[0]

    def found(words: Array) -> Array:
        return memory.element(memory.gather(words, lanes.at, 2 if bits == 64 else 1), lanes.address, bits)

    def stored(words: Array, value: Array, mask: Array) -> Array:
        return memory.scatter_element(words, jnp.where(mask, lanes.at, held), lanes.address, value, mask, bits)

    if atomic.sums:
        taken = _running(atomic.combine, lanes.b, rank)
        before = jnp.roll(taken, 1)
        old = found(words)
        after = atomic.combine(old, taken, lanes.c)
        old = jnp.where(rank > 0, atomic.combine(old, before, lanes.c), old)
        words = stored(words, after, lanes.mask & jnp.roll(first, -1).at[-1].set(True))
    else:
        words, old = _by_turns(atomic, words, lanes, rank, found, stored)
    return words, jnp.zeros_like(old).at[order].set(old).reshape(shape)


def _running(combine: Callable[[Array, Array, Array], Array], values: Array, rank: Array) -> Array:
    """The values of each thread and of those that go before it at its address, taken together."""

    def step(i: Array, taken: Array) -> Array:
        distance = jnp.left_shift(1, i)
        return jnp.where(rank >= distance, combine(jnp.roll(taken, distance), taken, taken), taken)

    return lax.fori_loop(0, max(values.size - 1, 1).bit_length(), step, values)


def _by_turns(
    atomic: Atomic,
    words: Array,
    lanes: _Lanes,
    rank: Array,
    found: Callable[[Array], Array],
    stored: Callable[[Array, Array, Array], Array],
) -> tuple[Array, Array]:
    """Turn by turn: first those who are first at their address, then those who are second."""
    last = jnp.where(lanes.mask, rank, -1).max()

    def turn(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        number, words, old = carry
        mine = lanes.mask & (rank == number)
        here = found(words)
        words = stored(words, atomic.combine(here, lanes.b, lanes.c), mine)
        return number + 1, words, jnp.where(mine, here, old)

    start = (jnp.zeros((), rank.dtype), words, jnp.zeros_like(lanes.b))
    _, words, old = lax.while_loop(lambda carry: carry[0] <= last, turn, start)
    return words, old


PREPARE: dict[str, Prepare] = {"atom": prepare_atomic, "red": prepare_atomic}
