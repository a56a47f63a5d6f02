"""Observers of a running kernel, and `trace=` of `tcemu.ptx.run`, which records registers and memory after the statements of a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jax import Array

from tcemu.engine.instructions.tcgen05_operands import element_operands
from tcemu.engine.isa.targets import TARGETS
from tcemu.engine.isa.tcgen05 import Tcgen05, Tcgen05Mma
from tcemu.engine.isa.tcgen05_descriptors import decode_instruction_descriptor
from tcemu.kernels.ptx.linker.linked_kernel import Kernel, LinkedStatement
from tcemu.kernels.ptx.simt.chunk import Chunk, NameTable
from tcemu.kernels.ptx.simt.machine import constant_bits
from tcemu.kernels.ptx.tensor.statement_forms import bind_operands
from tcemu.kernels.ptx.text.module import SPECIAL_REGISTERS, Address, Operand, Register, Statement, Symbol, nested_operands
from tcemu.kernels.ptx.text.ptx_types import KINDS
from tcemu.uses.explanation.explain import explain
from tcemu.uses.explanation.explanation_results import Explanation

SHOWN_WORDS = 8  # that a description of differences names
FLOATS = {"f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}


@dataclass(frozen=True)
class ExecutedStatement:
    """One execution of a statement, as observers see it. The arrays of the chunk are those after the statement."""

    linked: LinkedStatement
    chunk: Chunk
    active: np.ndarray  # bool[blocks, threads]: the threads at the statement
    block_numbers: np.ndarray  # numbers in the launch of the chunk's blocks

    def executing(self) -> np.ndarray:
        """Return the threads that execute the statement, its guard included."""
        guard = self.linked.statement.guard
        if guard is None:
            return self.active
        predicate = self.previous_value(self.linked.names.qualified_name(Register(guard.register)))
        return self.active & ((False if predicate is None else np.asarray(predicate)) != guard.negated)

    def previous_value(self, name: str) -> Array | None:
        """Return a register's values before the statement, by its qualified name; None if it was never used."""
        return self.chunk.previous[name] if name in self.chunk.previous else self.chunk.registers.get(name)

    def operand_value(self, operand: Operand, kind: str) -> np.ndarray:
        """Return the raw bits of an operand as the statement has found it, [blocks, threads]; of an address in brackets, the address."""
        names, shape = self.linked.names, self.active.shape
        operand = names.resolve(operand) if isinstance(operand, Symbol) else operand
        if isinstance(operand, Address):
            base = np.zeros(shape, np.uint64) if operand.base is None else self.operand_value(operand.base, "b64").astype(np.uint64)
            return base + np.uint64(operand.offset % 2**64)
        if not isinstance(operand, Register):
            return np.broadcast_to(np.asarray(constant_bits(operand, kind)), shape)
        name = names.qualified_name(operand)
        before = self.chunk.previous.get(name)
        return np.broadcast_to(np.asarray(self.chunk.register(name, names.kind(operand)) if before is None else before), shape)

    def written_registers(self) -> dict[str, Array]:
        """Return the registers that the statement has written, by qualified names."""
        return {name: self.chunk.registers[name] for name in self.chunk.previous}


Observer = Callable[[ExecutedStatement], None]  # called after each statement


class PlaceReporter(Protocol):
    """Names of places of a launch, and its faults, as the checkers of checked mode need them."""

    def describe(self, linked: LinkedStatement, block: int, thread: int) -> str:
        """Return a statement and the thread that executed it in words."""
        ...

    def raise_fault(self, chunk: Chunk) -> None:
        """Raise the first fault that the chunk has met by itself, if there is one."""
        ...


@dataclass(frozen=True)
class Tracepoint:
    """A line of a kernel at which `tcemu.ptx.run` records snapshots, for `trace=`.

    Args:
        line: Line of the PTX text, from 1.
        registers: Names of registers, as "%f1" or "%tid.x"; (): the registers that the statement names.
        blocks: Numbers of blocks in the grid, x first, case after case; None: all.
        threads: Numbers of threads in the block; None: all.
        shared: First byte and end of the blocks' shared memory to record; None: nothing.
        arrays: Numbers of the arrays to record, among the arguments that are arrays.
        tensor: First column and end of the blocks' tensor memory to record; None: nothing.
        element: Row and column of an element of D to explain, at a line with a `tcgen05.mma`; None: no explanation.
        max_snapshots: Snapshots of each statement at most.
    """

    line: int
    registers: tuple[str, ...] = ()
    blocks: tuple[int, ...] | None = (0,)
    threads: tuple[int, ...] | None = None
    shared: tuple[int, int] | None = None
    arrays: tuple[int, ...] = ()
    tensor: tuple[int, int] | None = None
    element: tuple[int, int] | None = None
    max_snapshots: int = 1000


@dataclass(frozen=True)
class Snapshot:
    """Registers and memory after one execution of a statement, as a `Tracepoint` requests them.

    Values of registers are bool for predicates, floats for .f16, .f32 and .f64, signed integers for .s types, unsigned bits for all others.
    A register that was never written is zero.
    """

    line: int
    statement: str
    hit: int  # earlier executions of the statement by the chosen threads
    blocks: tuple[int, ...]
    threads: tuple[int, ...]
    active: np.ndarray  # bool[blocks, threads]: the threads that executed the statement
    registers: dict[str, np.ndarray]  # [blocks, threads], also of threads that did not execute the statement
    shared: np.ndarray | None = None  # uint8[blocks, bytes]
    arrays: dict[int, np.ndarray] = field(default_factory=dict)  # by number, as `run` would return them now
    tensor: np.ndarray | None = None  # uint32[blocks, 128, columns]
    explanation: Explanation | None = None  # of the tracepoint's element, in the first of the blocks that executes the product


# ---- outputs


@dataclass(frozen=True)
class WordDifferences:
    """The words of an output that depend on the schedule."""

    array: int  # number of the output, among the arguments that are arrays
    words: np.ndarray  # indices of the words that differ, int64[n]
    first: np.ndarray  # their values in the first schedule, unsigned
    second: np.ndarray  # their values in the second one
    total: int  # words of the output

    def describe(self, seed: int) -> str:
        """Return the differences in words; seed: of the second schedule."""
        width = 2 * self.first.dtype.itemsize + 2
        shown = [f"{i}: {a:#0{width}x} {b:#0{width}x}" for i, a, b in zip(self.words[:SHOWN_WORDS], self.first, self.second, strict=False)]
        more = f", and {len(self.words) - SHOWN_WORDS} more" if len(self.words) > SHOWN_WORDS else ""
        return (
            f"array {self.array}: {len(self.words)} of {self.total} words depend on the schedule, seed {seed}: {', '.join(shown)}{more}. "
            "Sums of floats by atomics may; else threads race"
        )


def compare_schedules(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> tuple[WordDifferences, ...]:
    """Return the outputs that differ. Words are those of the arrays' dtypes, of 64 bits at most."""
    found = []
    for number, arrays in enumerate(zip(first, second, strict=True)):
        size = arrays[0].dtype.itemsize if arrays[0].dtype.itemsize in (1, 2, 4, 8) else 1
        old, new = (np.ascontiguousarray(array).reshape(-1).view(np.uint8).view(f"u{size}") for array in arrays)
        words = np.flatnonzero(old != new)
        if len(words):
            found.append(WordDifferences(number, words, old[words], new[words], old.size))
    return tuple(found)


class KernelOutputs(list[np.ndarray]):
    """The arrays that a kernel leaves in its arguments, with the snapshots of `trace=` in the order of execution, text and notes."""

    snapshots: tuple[Snapshot, ...] = ()
    printed: str = ""  # the text of the kernel's `vprintf`
    notes: tuple[str, ...] = ()  # what checked mode remarks on and does not forbid
    differences: tuple[WordDifferences, ...] = ()  # outputs whose words depend on the schedule, of schedule="adversarial"


class Tracer:
    """The observer that records snapshots.

    Raises:
        ValueError: A line has no statement that can be recorded, or the kernel has no such register or thread.
    """

    def __init__(
        self, tracepoints: Sequence[Tracepoint], kernel: Kernel, threads: int, read_outputs: Callable[[np.ndarray], list[np.ndarray]]
    ) -> None:
        self.tracepoints, self.threads, self.read_outputs = tuple(tracepoints), threads, read_outputs
        self.snapshots: list[Snapshot] = []
        self._hits: dict[tuple[int, int], int] = {}  # by the number of the tracepoint and of the statement
        self._explains = any(tracepoint.element is not None for tracepoint in self.tracepoints)
        self._cells: tuple[Chunk, np.ndarray] | None = None  # tensor memory after the last `tcgen05` of a chunk, if elements are explained
        for tracepoint in self.tracepoints:
            _check_tracepoint(tracepoint, kernel, threads)

    def __call__(self, event: ExecutedStatement) -> None:
        """Record the snapshots of a statement."""
        for number, tracepoint in enumerate(self.tracepoints):
            if tracepoint.line == event.linked.statement.position.line:
                self._record(number, tracepoint, event)
        if self._explains and event.linked.statement.name == "tcgen05":
            self._cells = event.chunk, _tensor_cells(event.chunk).copy()

    def _record(self, number: int, tracepoint: Tracepoint, event: ExecutedStatement) -> None:
        linked, chunk = event.linked, event.chunk
        present = {int(number): row for row, number in enumerate(event.block_numbers)}
        blocks = sorted(present) if tracepoint.blocks is None else [block for block in tracepoint.blocks if block in present]
        threads = list(range(self.threads) if tracepoint.threads is None else tracepoint.threads)
        rows = np.array([present[block] for block in blocks], int)
        chosen = np.ix_(rows, np.array(threads, int))
        active = event.executing()[chosen]
        hit = self._hits.get((number, linked.number), 0)
        if not active.any() or hit >= tracepoint.max_snapshots:
            return
        self._hits[number, linked.number] = hit + 1
        names = tracepoint.registers or tuple(register.name for register in named_registers(linked.statement))
        shared = None
        if tracepoint.shared is not None:
            shared = np.ascontiguousarray(np.asarray(chunk["shared"])[rows]).view(np.uint8)[:, slice(*tracepoint.shared)].copy()
        tensor = None if tracepoint.tensor is None else _tensor_cells(chunk)[rows][:, :, slice(*tracepoint.tensor)].copy()
        explanation = None if tracepoint.element is None else self._explain(tracepoint.element, event, rows)
        outputs = self.read_outputs(np.asarray(chunk["memory"])) if tracepoint.arrays else []
        self.snapshots.append(
            Snapshot(
                line=tracepoint.line, statement=str(linked.statement), hit=hit, blocks=tuple(blocks), threads=tuple(threads), active=active,
                registers={name: register_values(linked.names, chunk, name)[chosen] for name in names}, shared=shared,
                arrays={index: outputs[index].copy() for index in tracepoint.arrays}, tensor=tensor, explanation=explanation,
            )
        )  # fmt: skip

    def _explain(self, element: tuple[int, int], event: ExecutedStatement, rows: np.ndarray) -> Explanation:
        """Explain an element of D of a `tcgen05.mma`, from what the first of the blocks that executes it has found."""
        bound, chunk = bind_operands(event.linked.statement, event.linked.context, Tcgen05), event.chunk
        op = bound.op
        assert isinstance(op, Tcgen05Mma)
        executing = event.executing()
        row = next(int(row) for row in rows if executing[row].any())
        thread = int(executing[row].argmax())
        value = lambda name, kind: int(event.operand_value(bound.operands[name], kind)[row, thread])
        operands: dict[str, object] = {"enable_input_d": bool(value("enable_input_d", "pred"))}
        for name in ("d", "a_tmem", "sp_meta", "scale_a", "scale_b"):
            if name in bound.operands:
                operands[name] = np.uint32(value(name, "b32"))
        operands |= {name: value(name, "b64") for name in ("a_desc", "b_desc", "zero_column_mask") if name in bound.operands}
        first = row - row % op.cta_group
        blocks = slice(first, first + 2) if op.cta_group == 2 else row
        before = self._cells[1] if self._cells is not None and self._cells[0] is chunk else np.zeros_like(_tensor_cells(chunk))
        described = decode_instruction_descriptor(op, value("idesc", "b32"))
        codes = element_operands(described, *element, np.asarray(chunk["shared"])[blocks], before[blocks], **operands)
        found = explain(described.product, **codes, codes=True, target=bound.target)
        assert isinstance(found, Explanation)
        return found


def _tensor_cells(chunk: Chunk) -> np.ndarray:
    """Return the tensor memory of a chunk, uint32[blocks, 128, columns]."""
    return np.asarray(chunk.require_tensor_memory().cells)


def named_registers(statement: Statement) -> list[Register]:
    """Return the registers that a statement names, each once, the destinations first."""
    return list(dict.fromkeys(operand for operand in nested_operands(statement.operands) if isinstance(operand, Register)))


def qualified_registers(statement: Statement, names: NameTable) -> list[str]:
    """Return the qualified names of the registers that a statement names, each once, its guard's among them."""
    guard = () if statement.guard is None else (Register(statement.guard.register),)
    return [names.qualified_name(register) for register in dict.fromkeys((*named_registers(statement), *guard))]


def register_values(names: NameTable, chunk: Chunk, name: str) -> np.ndarray:
    """Return a register's values [blocks, threads], in the dtype of its type."""
    register = Register(name)
    kind = KINDS[names.kind(register)]
    bits = np.asarray(chunk.register(names.qualified_name(register), kind.name))
    if kind.bits == 1:
        return bits
    unsigned = bits.astype(np.dtype(f"u{kind.bits // 8}"))
    return unsigned.view(FLOATS[kind.name]) if kind.name in FLOATS else unsigned.view(f"i{kind.bits // 8}") if kind.signed else unsigned


def _check_tracepoint(tracepoint: Tracepoint, kernel: Kernel, threads: int) -> None:
    reachable = {id(linked): linked for block in kernel.blocks for linked in block.statements}.values()
    chosen = [linked for linked in reachable if linked.statement.position.line == tracepoint.line]
    if not chosen:
        lines = {linked.statement.position.line for linked in reachable}
        nearest = sorted(lines, key=lambda line: abs(line - tracepoint.line))[:3]
        raise ValueError(
            f"trace: line {tracepoint.line} has no statement of {kernel.entry.name} that changes a register or memory; nearest are lines "
            f"{', '.join(map(str, sorted(nearest)))}. Branches, calls, barriers and the end of a thread are not recorded"
        )
    if tracepoint.tensor is not None and not kernel.uses("tcgen05"):
        raise ValueError(f"trace: tensor: {kernel.entry.name} has no tcgen05, and so no tensor memory")
    columns = TARGETS[kernel.target].tensor_columns
    if tracepoint.tensor is not None and not 0 <= tracepoint.tensor[0] < tracepoint.tensor[1] <= columns:
        raise ValueError(f"trace: tensor: got {tracepoint.tensor}; expected a first column and an end, within 0 to {columns}")
    if tracepoint.element is not None and not all(linked.statement.opcode.startswith("tcgen05.mma") for linked in chosen):
        raise ValueError(f"trace: element: line {tracepoint.line} has another statement than tcgen05.mma; only its D is explained")
    for linked in chosen:
        for name in tracepoint.registers:
            if name not in SPECIAL_REGISTERS and name not in linked.names.kinds:
                raise ValueError(f"trace: there is no register {name} in the function of line {tracepoint.line}")
    wrong = [number for number in tracepoint.threads or () if not 0 <= number < threads]
    if wrong:
        raise ValueError(f"trace: threads: got {wrong[0]}; a block has {threads}, from 0 on")
