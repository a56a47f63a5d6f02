"""Statements bound to registers, each as one compiled function of the arrays that it reads and writes.

Statements that differ only in the names of their registers, in addresses and in constants share one compiled function: registers are
renamed by their position in the statement, and the offset of an address is an argument. The caches are `functools` ones, which threads may
share.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal, jaxpr_as_fun

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.base.execution import current_execution, execution
from tcemu.base.jax_internals import caches_were_cleared
from tcemu.base.numpy_programs import NumpyProgram, ProgramCall, trace_elementwise
from tcemu.kernels.ptx.instruction_interface import Context, Operation, Step
from tcemu.kernels.ptx.linker.instruction_table import find_preparer
from tcemu.kernels.ptx.linker.statement_programs import StatementProgram, TracedStatement
from tcemu.kernels.ptx.simt.chunk import Chunk, ChunkLayout, NameTable
from tcemu.kernels.ptx.simt.machine import constant_bits, convert_width
from tcemu.kernels.ptx.simt.special_registers import SPECIAL_VALUES, TIMERS
from tcemu.kernels.ptx.text.module import (
    Address,
    Function,
    Guard,
    Integer,
    Module,
    Negated,
    Operand,
    Pair,
    Position,
    Register,
    Sink,
    Statement,
    Symbol,
    Vector,
    flatten_operands,
)
from tcemu.kernels.ptx.text.ptx_types import KINDS, storage_dtype

CARRY = "carry+"  # the register of condition codes, CC.CF; no name in PTX has a plus sign
CACHE_SIZE = 2048  # entries of each cache; a compiled program takes memory and memory maps
# executions of a program, each of one thread, after which the time that optimised code saves exceeds the time of compiling it: measured
# with products and copies of Triton's kernels, and with scalar operations
STEP_PATIENCE, OPERATION_PATIENCE = 1_000_000, 8_000_000
HOST_PATIENCE = 48_000_000  # operations, each of one thread, that NumPy executes in the time of compiling a program
HOST_CALL = 100_000  # likewise in the time of calling a compiled program: an operation that costs less is never compiled
HOST_OVERHEAD = 500  # threads whose operations take NumPy as long as a call
# products take most of a kernel's time and stand in its loops: they are optimised at once if as many threads execute them together
PRODUCTS = re.compile(r"(mma|wmma\.mma|wgmma\.mma_async|tcgen05\.mma)\b")
PRODUCT_THREADS = 1024
NO_CONSTANTS: list[tuple[int, ...]] = [()]


@lru_cache(maxsize=CACHE_SIZE, typed=True)
def device_constant(value: np.generic) -> Array:
    """Return a constant as an array on the device."""
    return jax.device_put(value)


# ---- operations


def _plain_kind(kind: str) -> str:
    """Return the type of bits with the size of a register's type, on which nothing else depends."""
    return f"b{KINDS[kind].bits}" if kind != "pred" else kind


class _OperationKey(NamedTuple):
    """All that the compiled function of an operation depends on, besides the operation itself: the opcode says which that is."""

    opcode: str
    sizes: tuple[int, ...]  # elements of the operands
    results: tuple[str, ...]  # types of the operation
    operands: tuple[str, ...]
    destinations: tuple[str | None, ...]  # types of the registers; None: the result is discarded
    sources: tuple[str | None, ...]  # types of the registers; None: a constant
    negated: tuple[bool, ...]  # sources that are negated predicates
    guard: bool | None  # the guard is negated; None: there is no guard
    in_entry: bool  # the statement names the parameters of an entry, not those of a function
    chosen: str  # the choice of `tcemu.execution`


class _OperationProgram:
    """An operation for arrays of one shape: executed by NumPy at first, and compiled when it has done much work or if NumPy cannot."""

    def __init__(self, operation: Operation, key: _OperationKey, shape: tuple[int, ...], device: Any) -> None:
        self._host = _trace_on_host(operation, key) if device.platform == "cpu" else None
        self._unmasked = _trace_unmasked(operation, key) if self._host is not None and key.guard is None else None
        self._shape = shape
        self._compile = partial(_compile_operation, operation, key, shape, device, hot=self._host is not None)
        self._compiled = self._compile() if self._host is None else None
        self._cost = 0 if self._host is None else len(self._host) * (shape[0] * shape[1] + HOST_OVERHEAD)
        self._remaining = HOST_PATIENCE
        self.stays_on_host = self._host is not None and self._cost <= HOST_CALL  # it is never compiled

    def __call__(self, chunk: Chunk, guard: Array | None, olds: list[Array], sources: list[Array]) -> list[Any]:
        """Return the values of the destinations."""
        active = chunk["active"]
        if self._compiled is None:
            self._remaining -= self._cost if self._cost > HOST_CALL else 0
            if self._host is not None and self._remaining >= 0:
                if chunk.all_active and self._unmasked is not None:
                    return [x if x.shape == self._shape else np.full(self._shape, x) for x in self._unmasked(*sources)]
                return self._host(active, *([] if guard is None else [guard]), *olds, *sources)
            self._compiled = self._compile()
        return self._compiled(active, guard, olds, sources)


_operation_program = lru_cache(maxsize=CACHE_SIZE)(_OperationProgram)


@lru_cache(maxsize=CACHE_SIZE)
def _trace_on_host(operation: Operation, key: _OperationKey) -> NumpyProgram | None:
    traced = _trace_operation(operation, key, ())
    with execution(key.chosen):  # this thread may have another choice
        return trace_elementwise(traced.function, traced.shapes)


@lru_cache(maxsize=CACHE_SIZE)
def _trace_unmasked(operation: Operation, key: _OperationKey) -> NumpyProgram | None:
    """Return the program of the sources alone, for statements that all threads of a chunk execute."""
    *_, sources = _trace_operation(operation, key, ()).shapes
    with execution(key.chosen):
        return trace_elementwise(partial(_compute_operation, operation, key), (sources,))


def _compute_operation(operation: Operation, key: _OperationKey, sources: list[Array]) -> list[Array]:
    """Return the values of the destinations that are registers, of the registers' types."""
    values = []
    for value, have, want, negated in zip(sources, key.sources, operation.sources, key.negated, strict=True):
        value = value if have is None else convert_width(value, have, want)
        values.append(~value if negated else value)
    results = operation.compute(*values)
    used = [(i, kind) for i, kind in enumerate(key.destinations) if kind is not None]
    return [convert_width(results[i], operation.results[i], kind, extends=True) for i, kind in used]


def _trace_operation(operation: Operation, key: _OperationKey, shape: tuple[int, ...]) -> TracedStatement:
    def execute(active: Array, guard: Array | None, olds: list[Array], sources: list[Array]) -> list[Array]:
        mask = active if guard is None else active & (guard != key.guard)
        return [jnp.where(mask, value, old) for value, old in zip(_compute_operation(operation, key, sources), olds, strict=True)]

    mask = jax.ShapeDtypeStruct(shape, bool)
    olds = [jax.ShapeDtypeStruct(shape, storage_dtype(kind)) for kind in key.destinations if kind is not None]
    sources = [
        jax.ShapeDtypeStruct(() if have is None else shape, storage_dtype(want if have is None else have))
        for have, want in zip(key.sources, operation.sources, strict=True)
    ]
    return TracedStatement(execute, (mask, None if key.guard is None else mask, olds, sources))


def _compile_operation(operation: Operation, key: _OperationKey, shape: tuple[int, ...], device: Any, hot: bool) -> StatementProgram:
    """Compile an operation. hot: it has done so much work that it is optimised at once."""
    traced = _trace_operation(operation, key, shape)
    patience = 0 if hot else OPERATION_PATIENCE
    return StatementProgram((key, shape), lambda: traced, device, chosen=key.chosen, threads=shape[0] * shape[1], patience=patience)


class BoundOperation:
    """A statement of an operation with the registers that it reads and writes."""

    def __init__(self, operation: Operation, statement: Statement, context: Context, names: NameTable) -> None:
        carry = Register(CARRY)
        flat = [names.resolve(operand) for operand in flatten_operands(statement.operands)]
        count = len(operation.results) - operation.carry_out
        destinations = flat[:count] + [carry] * operation.carry_out
        sources = flat[count:] + [carry] * operation.carry_in
        kind = lambda register: "pred" if register == carry else names.kind(register)
        self.operation, self.read = operation, list[Any]()
        kinds, negated = [], []
        for operand, expected in zip(sources, operation.sources, strict=True):
            negated.append(isinstance(operand, Negated))
            operand = operand.register if isinstance(operand, Negated) else operand
            if isinstance(operand, Register):
                self.read.append((names.qualified_name(operand), kind(operand)))
                kinds.append(_plain_kind(kind(operand)))
            else:
                self.read.append(device_constant(constant_bits(operand, expected)))
                kinds.append(None)
        self.targets = [(names.qualified_name(operand), kind(operand)) for operand in destinations if isinstance(operand, Register)]
        guard = statement.guard
        self.guard_name = None if guard is None else names.prefix + guard.register
        self.key = _OperationKey(
            opcode=statement.opcode,
            sizes=tuple(len(flatten_operands((operand,))) for operand in statement.operands),
            results=operation.results,
            operands=operation.sources,
            destinations=tuple(None if isinstance(operand, Sink) else _plain_kind(kind(operand)) for operand in destinations),
            sources=tuple(kinds),
            negated=tuple(negated),
            guard=None if guard is None else guard.negated,
            in_entry=context.function.entry and "param" in statement.opcode,
            chosen=current_execution(),
        )
        # launches in several threads may share the statement, so that the layout and its program are one value
        self.programs: tuple[ChunkLayout, _OperationProgram] | None = None

    def find_program(self, layout: ChunkLayout) -> _OperationProgram:
        """Return the statement's program for the shapes of a chunk."""
        return _operation_program(self.operation, self.key, layout.shape, layout.device)

    def joins_others(self, layout: ChunkLayout) -> bool:
        """Return True if the operation may be executed with its neighbours: by NumPy, and by no clock, which each statement advances."""
        return self.find_program(layout).stays_on_host and not any(isinstance(each, tuple) and each[0] in TIMERS for each in self.read)

    def named_registers(self) -> list[tuple[str, str]]:
        """Return the names and types of the registers that the statement names."""
        guard = [] if self.guard_name is None else [(self.guard_name, "pred")]
        return [*guard, *self.targets, *(each for each in self.read if isinstance(each, tuple))]

    def program_call(self, all_active: bool, active: str) -> ProgramCall:
        """Return the call of NumPy's program in a joined one. active: the name of the threads that execute the statement."""
        unmasked = _trace_unmasked(self.operation, self.key) if all_active and self.guard_name is None else None
        sources = [each[0] if isinstance(each, tuple) else each for each in self.read]
        targets = [name for name, _ in self.targets]
        masks = [active, *([] if self.guard_name is None else [self.guard_name]), *targets]
        program = unmasked or _trace_on_host(self.operation, self.key)
        assert program is not None  # NumPy executes it
        return ProgramCall(program, [*([] if unmasked else masks), *sources], targets)

    def __call__(self, chunk: Chunk) -> None:
        """Execute the statement for the active threads of a chunk."""
        layout, program = self.programs or (None, None)
        if program is None or layout is not chunk.layout:
            program = self.find_program(chunk.layout)
            self.programs = chunk.layout, program
        olds = [chunk.register(*target) for target in self.targets]
        values = [chunk.register(*each) if isinstance(each, tuple) else each for each in self.read]
        mask = None if self.guard_name is None else chunk.register(self.guard_name, "pred")
        fresh = program(chunk, mask, olds, values)
        for (name, _), value in zip(self.targets, fresh, strict=True):
            chunk.write_register(name, value)


# ---- steps


class _CanonicalStatement(NamedTuple):
    """A statement with its registers renamed."""

    statement: Statement
    registers: tuple[Register, ...]  # the original ones, in the order of the new names
    bases: tuple[str | None, ...]  # for each address the new name of its base; None: an absolute address
    offsets: tuple[int, ...]  # for each address the bytes added to its base


def canonicalise(statement: Statement, names: NameTable) -> _CanonicalStatement:
    """Rename registers by their position and take the offsets out of addresses, so that statements of one form become equal."""
    registers: dict[Register, str] = {}
    bases: list[str | None] = []
    offsets: list[int] = []

    def rename(operand: Operand | None) -> Any:
        if isinstance(operand, Register):
            if operand.name in SPECIAL_VALUES:
                return operand
            return Register(registers.setdefault(operand, f"%{len(registers)}"))
        if isinstance(operand, Symbol):
            return rename(names.resolve(operand))
        if isinstance(operand, Negated):
            return Negated(rename(operand.register))
        if isinstance(operand, Vector):
            return Vector(tuple(map(rename, operand.elements)))
        if isinstance(operand, Pair):
            return Pair(rename(operand.first), rename(operand.second))
        if isinstance(operand, Address):
            base = rename(operand.base)
            offsets.append(operand.offset + (base.value if isinstance(base, Integer) else 0))
            bases.append(base.name if isinstance(base, Register) else None)
            return Address(Register(f"%address{len(bases) - 1}"), 0, rename(operand.coordinates))
        return operand

    operands = tuple(map(rename, statement.operands))
    guard = statement.guard
    if guard is not None:
        guard = Guard(rename(Register(guard.register)).name, guard.negated)
    return _CanonicalStatement(replace(statement, operands=operands, guard=guard), tuple(registers), tuple(bases), tuple(offsets))


class _StepKey(NamedTuple):
    """All that the step of a canonical statement depends on."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    bases: tuple[str | None, ...]
    kinds: tuple[tuple[str, str], ...]
    target: str
    checked: bool
    version: tuple[int, int]  # of the PTX ISA
    chosen: str  # the choice of `tcemu.execution`

    @property
    def address_kinds(self) -> tuple[tuple[str, str], ...]:
        """The registers that stand for the addresses, with their type."""
        return tuple((f"%address{i}", "b64") for i in range(len(self.bases)))


class _CompiledStep(NamedTuple):
    """A step compiled for one layout. Its leaves are the registers, the offsets of addresses, and the arrays of the chunk."""

    function: StatementProgram  # (leaves of `donated`, leaves of `read_only`) -> leaves of `writes`
    donated: list[int]  # leaves changed in place
    read_only: list[int]
    writes: list[int]


class BoundStep:
    """A statement of a step with the registers that it reads and writes."""

    def __init__(self, statement: Statement, number: int, context: Context, names: NameTable) -> None:
        """Bind a statement. number: the statement's number, which faults name."""
        canonical = canonicalise(statement, names)
        kinds = tuple((f"%{i}", _plain_kind(names.kind(register))) for i, register in enumerate(canonical.registers))
        same = canonical.statement
        self.statement = statement
        module = context.module
        self.key = _StepKey(
            same.opcode, same.operands, same.guard, canonical.bases, kinds, context.target, context.checked, module.version,
            current_execution(),
        )  # fmt: skip
        self.registers = [(names.qualified_name(register), names.kind(register)) for register in canonical.registers]
        self.offsets = [device_constant(np.uint64(offset % 2**64)) for offset in canonical.offsets]
        self.number = device_constant(np.int32(number))
        self.step = _prepare_step(self.key)
        self.qualified = dict(zip((name for name, _ in kinds), self.registers, strict=True))
        self.programs: tuple[ChunkLayout, dict[tuple[int, ...], _CompiledStep]] | None = None  # one value, as that of a `BoundOperation`

    def find_program(self, layout: ChunkLayout) -> _CompiledStep | None:
        """Return the statement's program for the shapes of a chunk; None if it depends on values of operands."""
        return None if self.step.constants else _compile_step(self.key, layout, ())

    def __call__(self, chunk: Chunk) -> None:
        """Execute the statement for the active threads of a chunk."""
        layout, compiled = self.programs or (None, {})
        if layout is not chunk.layout:
            compiled = {}
            self.programs = chunk.layout, compiled
        chunk["statement"] = self.number
        count = len(self.registers)
        behind = count + len(self.offsets)

        def leaf(i: int) -> Array:
            return chunk.register(*self.registers[i]) if i < count else self.offsets[i - count] if i < behind else chunk.leaves[i - behind]

        for constants in _read_constants(self.step, chunk, self.key, self.qualified) if self.step.constants else NO_CONSTANTS:
            program = compiled.get(constants)
            if program is None:
                try:
                    program = compiled[constants] = _compile_step(self.key, chunk.layout, constants)
                except (Unsupported, NotModelled) as error:
                    where = f"{self.statement.line_text}, column {self.statement.position.column}"
                    raise type(error)(f"{where}: {self.statement.opcode}: {error}") from None
            fresh = program.function([leaf(i) for i in program.donated], [leaf(i) for i in program.read_only])
            for i, value in zip(program.writes, fresh, strict=True):
                if i < count:
                    chunk.write_register(self.registers[i][0], value)
                else:
                    chunk.leaves[i - behind] = value


def _read_constants(step: Step, chunk: Chunk, key: _StepKey, registers: dict[str, tuple[str, str]]) -> list[tuple[int, ...]]:
    """Return the different values that the operands `step.constants` have in the threads that execute a statement."""
    active = np.asarray(chunk["active"])
    if key.guard is not None:
        active = active & (np.asarray(chunk.register(*registers[key.guard.register])) != key.guard.negated)
    values = []
    for operand in step.constants:
        if isinstance(operand, Register):
            values.append(np.asarray(chunk.register(*registers[operand.name]))[active])
        else:
            assert isinstance(operand, Integer)
            values.append(np.full(int(active.sum()), operand.value % 2**64, np.uint64))
    return list(dict.fromkeys(zip(*(value.tolist() for value in values), strict=True)))


@lru_cache(maxsize=CACHE_SIZE)
def _prepare_step(key: _StepKey) -> Step:
    """Prepare a canonical statement, in a function that has its registers and nothing else."""
    nowhere = Position(0, 0)
    function = Function("", False, (), (), dict((*key.kinds, *key.address_kinds)), (), (), {}, nowhere)
    statement = Statement(key.opcode, key.operands, key.guard, nowhere)
    context = Context(Module(key.version, key.target, 64, {}, ()), function, key.target, key.checked)
    return find_preparer(statement)(statement, context)


@lru_cache(maxsize=CACHE_SIZE)
def _compile_step(key: _StepKey, layout: ChunkLayout, constants: tuple[int, ...]) -> _CompiledStep:
    """Compile a step for the shapes of a chunk, and for the values of its operands that the host reads."""
    blocks, threads = layout.shape
    trace = partial(_trace_step, key, layout, constants)
    patience = 0 if PRODUCTS.match(key.opcode) and blocks * threads >= PRODUCT_THREADS else STEP_PATIENCE
    program = StatementProgram(
        (key, layout, constants), trace, layout.device, chosen=key.chosen, threads=blocks * threads, patience=patience
    )
    return _CompiledStep(program, *program.facts)


def _trace_step(key: _StepKey, layout: ChunkLayout, constants: tuple[int, ...]) -> TracedStatement:
    step = _prepare_step(key)
    count, addresses = len(key.kinds), len(key.bases)
    kinds = (*key.kinds, *key.address_kinds)
    names = [name for name, _ in key.kinds]
    active_leaf = layout.leaf_index["active"]

    def apply_leaves(*leaves: Array) -> list[Array]:
        registers = dict(zip(names, leaves, strict=False))
        others = leaves[count + addresses :]
        machine = replace(jax.tree.unflatten(layout.structure, others), registers=registers, kinds=kinds)
        for i, (base, offset) in enumerate(zip(key.bases, leaves[count:], strict=False)):
            value = None if base is None else machine.read(Register(base), machine.register_kind(Register(base)))
            registers[f"%address{i}"] = offset if value is None else _add_offset(value, offset)
        guard = key.guard
        active = machine.active if guard is None else machine.active & (registers[guard.register] != guard.negated)
        for operand, value in zip(step.constants, constants, strict=True):
            if isinstance(operand, Register):
                active &= registers[operand.name] == value
        machine = step.apply(replace(machine, active=active), *constants)
        rest = jax.tree.leaves(replace(machine, registers={}, kinds=(), active=others[active_leaf]))
        return [*(machine.registers[name] for name in names), *leaves[count : count + addresses], *rest]

    shapes = [jax.ShapeDtypeStruct(layout.shape, storage_dtype(kind)) for _, kind in key.kinds]
    shapes += [jax.ShapeDtypeStruct((), np.uint64)] * addresses
    return _prune_program(jax.make_jaxpr(apply_leaves)(*shapes, *layout.leaves), {count + addresses + i for i in layout.donated_leaves})


def forget_cleared_programs() -> bool:
    """Drop all compiled statements if `jax.clear_caches` has dropped JAX's programs. Returns whether they were dropped."""
    cleared = caches_were_cleared("ptx")
    if cleared:
        _operation_program.cache_clear()
        _compile_step.cache_clear()
    return cleared


def _add_offset(base: Array, offset: Array) -> Array:
    """Return an address, uint64. The sum wraps at 32 bits if the base has 32."""
    if base.dtype == jnp.uint64:
        return base + offset
    return (base + offset.astype(jnp.uint32)).astype(jnp.uint64)


def _prune_program(program: Any, in_place: set[int]) -> TracedStatement:
    """Return a program as a function of the leaves that it reads, which returns the leaves that it changes."""
    inputs, outputs = program.jaxpr.invars, program.jaxpr.outvars
    writes = [i for i, (old, new) in enumerate(zip(inputs, outputs, strict=True)) if old is not new]
    used = {var for equation in program.jaxpr.eqns for var in equation.invars if not isinstance(var, Literal)}
    used |= {outputs[i] for i in writes if not isinstance(outputs[i], Literal)}
    reads = [i for i, var in enumerate(inputs) if var in used]
    donated = [i for i in reads if i in in_place and i in writes]
    read = [i for i in reads if i not in donated]
    call = jaxpr_as_fun(program)

    def function(changing: list[Array], others: list[Array]) -> list[Array]:
        leaves: list[Any] = [None] * len(inputs)
        for i, value in zip((*donated, *read), (*changing, *others), strict=True):
            leaves[i] = value
        fill = [jnp.zeros((), var.aval.dtype) if value is None else value for var, value in zip(inputs, leaves, strict=True)]
        results = call(*fill)
        return [results[i] for i in writes]

    shapes = tuple([jax.ShapeDtypeStruct(inputs[i].aval.shape, inputs[i].aval.dtype) for i in part] for part in (donated, read))
    return TracedStatement(function, shapes, donates=True, facts=(donated, read, writes))
