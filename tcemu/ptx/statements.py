"""Statements made ready to run: each as one compiled function of the arrays that it reads and writes.

Statements that differ in the names of their registers, in addresses and in constants that are data share one function: registers are
renamed by their place in the statement, and what is added to an address is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal, jaxpr_as_fun

from tcemu.ptx.chunk import Chunk, Names
from tcemu.ptx.context import Context, Operation, Prepare, Step
from tcemu.ptx.machine import constant, fitted
from tcemu.ptx.module import (
    Address,
    Function,
    Guard,
    Integer,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Statement,
    Symbol,
    Vector,
)
from tcemu.ptx.special_values import SPECIAL
from tcemu.ptx.values import dtype

CARRY = "carry"  # the register of condition codes, CC.CF


def flattened(operands: tuple[Operand, ...]) -> list[Operand]:
    """Operands with those of vectors and pairs in their places."""
    flat: list[Operand] = []
    for operand in operands:
        if isinstance(operand, Vector):
            flat += operand.elements
        elif isinstance(operand, Pair):
            flat += [operand.first, operand.second]
        else:
            flat.append(operand)
    return flat


Run = Callable[[Chunk], None]
MOST = 2048  # entries of a cache here; each program takes memory and maps of it


@lru_cache(maxsize=MOST, typed=True)
def scalar(value: np.generic) -> Array:
    """A constant on the device, made once."""
    return jnp.asarray(value)


def _kept(cache: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """What a cache has for a key, made if it has nothing; the oldest entry goes where it is full."""
    if key not in cache:
        made = make()
        if len(cache) >= MOST:
            del cache[next(iter(cache))]
        cache[key] = made
    return cache[key]


# ---- operations


class _Shape(NamedTuple):
    """What the compiled function of an operation hangs on. Types of the registers; None: a constant, or a destination that is not kept."""

    operation: Operation
    destinations: tuple[str | None, ...]
    sources: tuple[str | None, ...]
    negated: tuple[bool, ...]
    guard: bool | None


@lru_cache(maxsize=MOST)
def _operation(shape: _Shape) -> Callable[..., Any]:
    operation = shape.operation
    kept = [i for i, kind in enumerate(shape.destinations) if kind is not None]

    def run(active: Array, guard: Array | None, olds: list[Array], sources: list[Array]) -> list[Array]:
        mask = active if guard is None else active & (guard != shape.guard)
        values = []
        for value, have, want, negated in zip(sources, shape.sources, operation.sources, shape.negated, strict=True):
            value = value if have is None else fitted(value, have, want)
            values.append(~value if negated else value)
        results = operation.compute(*values)
        fresh = [fitted(results[i], operation.results[i], shape.destinations[i] or "", extends=True) for i in kept]
        return [jnp.where(mask, value, old) for value, old in zip(fresh, olds, strict=True)]

    return jax.jit(run)


def bind_operation(operation: Operation, statement: Statement, names: Names) -> Run:
    """A statement of an operation, ready to run."""
    carry = Register(CARRY)
    flat = [names.resolved(operand) for operand in flattened(statement.operands)]
    count = len(operation.results) - operation.carry_out
    destinations = flat[:count] + [carry] * operation.carry_out
    sources = flat[count:] + [carry] * operation.carry_in
    kind = lambda register: "pred" if register == carry else names.kind(register)  # noqa: E731
    read, kinds, negated = [], [], []
    for operand, wanted in zip(sources, operation.sources, strict=True):
        negated.append(isinstance(operand, Negated))
        operand = operand.register if isinstance(operand, Negated) else operand
        if isinstance(operand, Register):
            read.append((names.held(operand), kind(operand)))
            kinds.append(kind(operand))
        else:
            read.append(scalar(constant(operand, wanted)))
            kinds.append(None)
    written = [None if isinstance(operand, Sink) else kind(operand) for operand in destinations]
    guard = statement.guard
    shape = _Shape(operation, tuple(written), tuple(kinds), tuple(negated), None if guard is None else guard.negated)
    function = _operation(shape)
    targets = [(names.held(operand), kind(operand)) for operand in destinations if isinstance(operand, Register)]
    guarding = None if guard is None else names.prefix + guard.register

    def run(chunk: Chunk) -> None:
        olds = [chunk.register(*target) for target in targets]
        values = [chunk.register(*each) if isinstance(each, tuple) else each for each in read]
        mask = None if guarding is None else chunk.register(guarding, "pred")
        fresh = function(chunk["active"], mask, olds, values)
        for (name, _), value in zip(targets, fresh, strict=True):
            chunk.registers[name] = value

    return run


# ---- steps


class _Canonical(NamedTuple):
    """A statement with its registers renamed. registers: the real ones, in the order of the new names; offsets: what is added to addresses.

    bases: for each address, the new name of its base, or None.
    """

    statement: Statement
    registers: tuple[Register, ...]
    bases: tuple[str | None, ...]
    offsets: tuple[int, ...]


def canonical(statement: Statement, names: Names) -> _Canonical:
    """The statement as others of its form are too."""
    registers: dict[Register, str] = {}
    bases: list[str | None] = []
    offsets: list[int] = []

    def renamed(operand: Operand | None) -> Any:
        if isinstance(operand, Register):
            if operand.name in SPECIAL:
                return operand
            return Register(registers.setdefault(operand, f"%{len(registers)}"))
        if isinstance(operand, Symbol):
            return names.resolved(operand)
        if isinstance(operand, Negated):
            return Negated(renamed(operand.register))
        if isinstance(operand, Vector):
            return Vector(tuple(map(renamed, operand.elements)))
        if isinstance(operand, Pair):
            return Pair(renamed(operand.first), renamed(operand.second))
        if isinstance(operand, Address):
            base = renamed(operand.base)
            offsets.append(operand.offset + (base.value if isinstance(base, Integer) else 0))
            bases.append(base.name if isinstance(base, Register) else None)
            return Address(Register(f"%address{len(bases) - 1}"), 0, renamed(operand.coordinates))
        return operand

    operands = tuple(map(renamed, statement.operands))
    guard = statement.guard
    if guard is not None:
        guard = Guard(renamed(Register(guard.register)).name, guard.negated)
    return _Canonical(replace(statement, operands=operands, guard=guard), tuple(registers), tuple(bases), tuple(offsets))


class _Form(NamedTuple):
    """What the step of a canonical statement hangs on."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    bases: tuple[str | None, ...]
    kinds: tuple[tuple[str, str], ...]
    target: str
    checked: bool
    version: tuple[int, int]


class _Compiled(NamedTuple):
    """A step, compiled for arrays of certain shapes: numbers of the leaves that it reads in place of, reads, and writes."""

    function: Callable[..., Any]
    donated: list[int]
    kept: list[int]
    writes: list[int]


_steps: dict[_Form, Step] = {}
_compiled: dict[tuple[Any, ...], _Compiled] = {}


def bind_step(prepare: Prepare, statement: Statement, number: int, context: Context, names: Names) -> Run:
    """A statement of a step, ready to run. number: of the statement, which faults name."""
    same = canonical(statement, names)
    kinds = tuple((f"%{i}", names.kind(register)) for i, register in enumerate(same.registers))
    form = _Form(
        statement.opcode,
        same.statement.operands,
        same.statement.guard,
        same.bases,
        kinds,
        context.target,
        context.checked,
        context.module.version,
    )
    step = _kept(_steps, form, lambda: prepare(same.statement, _context(form, context)))
    held = [(names.held(register), names.kind(register)) for register in same.registers]
    added = [scalar(np.uint64(offset % 2**64)) for offset in same.offsets]
    count, told = len(held), scalar(np.int32(number))
    known: list[Any] = [None, None]  # of which signature, and what was compiled

    def run(chunk: Chunk) -> None:
        if known[0] is not chunk.signature:
            known[:] = chunk.signature, _kept(_compiled, (form, chunk.signature), lambda: _step(form, step, chunk))
        compiled: _Compiled = known[1]
        chunk["statement"] = told
        leaves = [*(chunk.register(*each) for each in held), *added, *chunk.others]
        fresh = compiled.function([leaves[i] for i in compiled.donated], [leaves[i] for i in compiled.kept])
        for i, value in zip(compiled.writes, fresh, strict=True):
            if i < count:
                chunk.registers[held[i][0]] = value
            else:
                chunk.others[i - count - len(added)] = value

    return run


def _context(form: _Form, context: Context) -> Context:
    """Where a canonical statement stands: a function that has its registers and nothing else."""
    registers = {**dict(form.kinds), **{f"%address{i}": "b64" for i in range(len(form.bases))}}
    function = Function("", False, (), (), registers, (), (), {}, context.function.place)
    module = Module(context.module.version, context.module.target, context.module.address_size, {}, ())
    return Context(module, function, form.target, form.checked)


def _step(form: _Form, step: Step, chunk: Chunk) -> _Compiled:
    """The step's function for the shapes of a chunk."""
    count, addresses = len(form.kinds), len(form.bases)
    kinds = (*form.kinds, *((f"%address{i}", "b64") for i in range(addresses)))
    names = [name for name, _ in form.kinds]

    def whole(*leaves: Array) -> list[Array]:
        registers = dict(zip(names, leaves, strict=False))
        others = leaves[count + addresses :]
        for i, (base, offset) in enumerate(zip(form.bases, leaves[count:], strict=False)):
            registers[f"%address{i}"] = offset if base is None else _moved(registers[base], offset)
        machine = replace(jax.tree.unflatten(chunk.structure, others), registers=registers, kinds=kinds)
        guard = form.guard
        active = machine.active if guard is None else machine.active & (registers[guard.register] != guard.negated)
        machine = step.run(replace(machine, active=active))
        rest = jax.tree.leaves(replace(machine, registers={}, kinds=(), active=others[chunk.field["active"]]))
        return [*(machine.registers[name] for name in names), *leaves[count : count + addresses], *rest]

    shapes = [jax.ShapeDtypeStruct(chunk.shape, dtype(kind)) for _, kind in form.kinds]
    shapes += [jax.ShapeDtypeStruct((), np.uint64)] * addresses
    shapes += [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in chunk.others]
    return _reduced(jax.make_jaxpr(whole)(*shapes), {count + addresses + i for i in chunk.donated})


def _moved(base: Array, offset: Array) -> Array:
    """An address; a base of 32 bits wraps there."""
    if base.dtype == jnp.uint64:
        return base + offset
    return (base + offset.astype(jnp.uint32)).astype(jnp.uint64)


def _reduced(program: Any, in_place: set[int]) -> _Compiled:
    """The function of the leaves that a program reads, which gives those that it changes."""
    inputs, outputs = program.jaxpr.invars, program.jaxpr.outvars
    writes = [i for i, (before, after) in enumerate(zip(inputs, outputs, strict=True)) if before is not after]
    used = {var for equation in program.jaxpr.eqns for var in equation.invars if not isinstance(var, Literal)}
    used |= {outputs[i] for i in writes if not isinstance(outputs[i], Literal)}
    reads = [i for i, var in enumerate(inputs) if var in used]
    donated = [i for i in reads if i in in_place and i in writes]
    kept = [i for i in reads if i not in donated]
    call = jaxpr_as_fun(program)
    fill = [jnp.zeros((), var.aval.dtype) for var in inputs]

    def function(changing: list[Array], others: list[Array]) -> list[Array]:
        given: list[Any] = list(fill)
        for i, value in zip((*donated, *kept), (*changing, *others), strict=True):
            given[i] = value
        results = call(*given)
        return [results[i] for i in writes]

    return _Compiled(jax.jit(function, donate_argnums=0), donated, kept, writes)
