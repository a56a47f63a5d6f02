"""`tcemu.ptx.compare`: one kernel on two targets, the first statement whose registers differ, and that instruction explained."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tcemu.base.errors import Unsupported
from tcemu.base.results import Result, Table
from tcemu.engine.instructions.register_packing import unpack
from tcemu.engine.isa.families import LANES, MatrixMultiply
from tcemu.engine.isa.targets import resolve_target
from tcemu.kernels.ptx.cuda_source import Source, read_module
from tcemu.kernels.ptx.linker.linked_kernel import LinkedStatement
from tcemu.kernels.ptx.runtime.kernel_runner import STEP_LIMIT, find_entry, run
from tcemu.kernels.ptx.runtime.launch_shape import coordinates, launch_shape
from tcemu.kernels.ptx.runtime.tracing import ExecutedStatement, Observer, named_registers
from tcemu.kernels.ptx.tensor.statement_forms import BoundStatement, bind_operands, vector_elements
from tcemu.kernels.ptx.text.module import SPECIAL_REGISTERS, Float, Integer, Operand, Register, Vector
from tcemu.uses.explanation.explain import explain
from tcemu.uses.explanation.explanation_results import Explanations

EXPLAINED_FAMILIES = ("mma", "mma.sp", "wmma.mma")  # only one target has wgmma, so no two targets differ there
SCALE_OPERANDS = ("scale_a", "scale_b")
RegisterValues = Mapping[str, Any]  # [blocks, threads] by qualified name; None: never written


class RegisterDifference(NamedTuple):
    """A register that differs."""

    name: str
    threads: int  # in which it differs
    words: tuple[int, int]  # raw bits on either target, in the first of these threads


@dataclass(frozen=True)
class Divergence:
    """The first statement after which the registers of two targets differ; before it all were equal."""

    line: int
    column: int
    statement: str
    steps: int  # statements executed before it, each by all threads of a chunk of blocks
    earlier_executions: int  # of this statement
    case: int  # of the first thread with a difference, as `block` and `thread`; 0 without `cases`
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    registers: tuple[RegisterDifference, ...]
    explanation: Explanations | None = None  # of the first element of D that differs, for products of matrices
    unexplained_reason: str = ""  # why there is no explanation


class ElementDifference(NamedTuple):
    """The first element of an array that differs."""

    array: int  # its number among the arrays
    place: tuple[int, ...]
    values: tuple[Any, Any]  # left and right


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """The result of `compare`. `str()` is a report, and `records()` has a row for each array."""

    entry: str
    targets: tuple[str, str]
    outputs: tuple[list[np.ndarray], list[np.ndarray]]  # the arrays that the kernel leaves on each target
    differing_elements: tuple[int, ...]  # by array
    cases: int
    differing_cases: int  # cases with any difference
    steps: int  # statements executed
    divergence: Divergence | None  # registers may differ where no array does; None where two kernels are compared
    first_elements: tuple[ElementDifference, ...] = ()  # of the arrays that differ
    two_kernels: bool = False  # a candidate and a reference, or two launches, whose statements were not compared

    @property
    def equal(self) -> bool:
        """True if no register and no array ever differed."""
        return self.divergence is None and not any(self.differing_elements)

    def __str__(self) -> str:
        left, right = self.targets
        total = sum(array.size for array in self.outputs[0])
        lines = [f"{self.entry} on {left} and {right}: {sum(self.differing_elements):,} of {total:,} elements of its arrays differ"]
        if self.cases > 1:
            lines[0] += f", in {self.differing_cases:,} of {self.cases:,} cases"
        found = self.divergence
        if self.two_kernels:
            for number, place, values in self.first_elements:
                lines.append(f"Array {number} differs first at {list(place)}: {values[0]} and {values[1]}")
            return "\n".join(lines)
        if found is None:
            return "\n".join([*lines, f"No register differs after any of {self.steps:,} statements."])
        place = f"block {found.block}, thread {found.thread}" + (f", case {found.case:,}" if self.cases > 1 else "")
        history = f"{found.steps:,} statements before it, and {found.earlier_executions:,} earlier executions of it, left equal registers"
        lines += [f"They diverge at line {found.line}, {place}: {history}.", f"    {found.statement}"]
        for name, count, (one, other) in found.registers:
            lines.append(f"{name}: {count:,} threads differ, the first has {one:#x} on {left}, {other:#x} on {right}")
        return "\n".join([*lines, "", str(found.explanation) if found.explanation is not None else found.unexplained_reason])

    def __repr__(self) -> str:
        where = "equal" if self.equal else f"{sum(self.differing_elements):,} elements differ"
        return f"<Comparison of {self.entry} on {' and '.join(self.targets)}: {where}>"

    def table(self) -> Table:
        """Return a row for each array, and the divergence as facts."""
        rows = tuple(
            (self.entry, *self.targets, index, array.size, self.differing_elements[index]) for index, array in enumerate(self.outputs[0])
        )
        found = self.divergence
        facts: dict[str, Any] = {"equal": self.equal, "cases": self.cases, "differing_cases": self.differing_cases, "steps": self.steps}
        facts |= {"line": None if found is None else found.line, "statement": None if found is None else found.statement}
        return Table(repr(self)[1:-1], ("entry", "left", "right", "array", "elements", "differing"), rows, facts)


def compare(
    text: Source | tuple[Source, Source],
    *,
    targets: tuple[str, str],
    right: Mapping[str, Any] | None = None,
    entry: str | None = None,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any] = (),
    shared_bytes: int = 0,
    cluster: int | Sequence[int] | None = None,
    cooperative: bool = False,
    fmad: bool = True,
    cases: int | None = None,
    options: Sequence[str] = (),
    step_limit: int = STEP_LIMIT,
    watch: Observer | Sequence[Observer] = (),
) -> Comparison:
    """Run a kernel on two targets, and find the first statement after which a register differs; or compare the arrays of two kernels.

    Each target runs the whole kernel; if they diverge, the first one runs once more up to the divergence. Statements are compared by a
    128-bit digest of all that they write to registers. Differences in memory alone, as between the fragments that `wmma.store` writes, show
    in the arrays and where they are read.

    Args:
        text: The kernel, as for `run`, where CUDA C++ is compiled for the left target; or two, a candidate and a reference, whose arrays
            alone are compared.
        targets: The two GPUs, as ("sm_80", "sm_90a"), which may be the same.
        right: Arguments of `run` that the right one has instead, as {"block": 256}: another launch of the same kernel, or another entry.
            Then arrays alone are compared.
        entry: As in `run`, like all further arguments.
        grid: Blocks.
        block: Threads of a block.
        args: Arguments of the kernel.
        shared_bytes: Dynamic shared memory.
        cluster: Blocks of a cluster.
        cooperative: All blocks of the grid run at once.
        fmad: Fuse products and sums whose rounding the text leaves open, as ptxas does.
        cases: Number of launches in one call, to compare many inputs.
        options: Options of NVRTC.
        step_limit: Statements that a chunk of blocks may execute.
        watch: Functions that are called with an `ExecutedStatement` after each statement of every run.

    Returns:
        The arrays on both targets, and the divergence with its explanation.

    Raises:
        ValueError: There are not two targets or kernels, or the two leave arrays of other shapes. Further errors are those of `run`.
    """
    if isinstance(targets, str) or len(targets) != 2:
        raise ValueError(f"targets: got {targets!r}; expected two, as ('sm_80', 'sm_90a')")
    targets = resolve_target(targets[0]), resolve_target(targets[1])
    sources = text if isinstance(text, tuple) else (text, text)
    if len(sources) != 2:
        raise ValueError(f"text: got {len(sources)} kernels; expected one, or two")
    launch = {
        "entry": entry, "grid": grid, "block": block, "args": args, "shared_bytes": shared_bytes, "cluster": cluster,
        "cooperative": cooperative, "fmad": fmad, "cases": cases, "step_limit": step_limit,
    }  # fmt: skip
    launches = (launch, launch | dict(right or {}))
    two_kernels = right is not None or isinstance(text, tuple)
    compiled_for = targets if two_kernels else (targets[0], targets[0])
    modules = [
        read_module(*each, options=options) for each in zip(sources, compiled_for, (each["entry"] for each in launches), strict=True)
    ]
    watching = [watch] if callable(watch) else list(watch)

    def run_kernel(side: int, *observers: Observer) -> list[np.ndarray]:
        return list(run(modules[side], target=targets[side], watch=[*watching, *observers], **launches[side]))

    divergence, steps = None, 0
    if two_kernels:
        outputs = [run_kernel(0), run_kernel(1)]
    else:
        left = _DigestObserver()
        outputs = [run_kernel(0, left)]
        found = _DigestObserver(left.digests)
        outputs.append(run_kernel(1, found))
        steps = left.steps
        if found.execution is not None:
            again = _DigestObserver(stop=found.execution.number)
            with suppress(_StopRun):
                run_kernel(0, again)
            assert again.execution is not None  # the run repeats exactly
            shape = launch_shape(find_entry(modules[0], entry), targets[0], grid, block, cluster)
            divergence = _describe_divergence((again.execution, found.execution), targets, shape.grid, shape.block)
    shapes = [[(array.shape, array.dtype) for array in each] for each in outputs]
    if shapes[0] != shapes[1]:
        raise ValueError(f"text: the two kernels leave arrays of other shapes or dtypes: {shapes[0]} and {shapes[1]}")
    differing = [_bits_differ(x, y) for x, y in zip(*outputs, strict=True)]
    by_case = [each.reshape(cases or 1, -1).any(-1) for each in differing if each.size]
    return Comparison(
        entry=" and ".join(dict.fromkeys(find_entry(module, each["entry"]).name for module, each in zip(modules, launches, strict=True))),
        targets=targets,
        outputs=(outputs[0], outputs[1]),
        differing_elements=tuple(int(each.sum()) for each in differing),
        cases=cases or 1,
        differing_cases=int(np.any(by_case, axis=0).sum()) if by_case else 0,
        steps=steps,
        divergence=divergence,
        first_elements=tuple(
            _first_element(number, differs, *arrays)
            for number, (differs, *arrays) in enumerate(zip(differing, *outputs, strict=True))
            if differs.any()
        ),
        two_kernels=two_kernels,
    )


def _first_element(number: int, differs: np.ndarray, left: np.ndarray, right: np.ndarray) -> ElementDifference:
    place = tuple(int(n) for n in np.unravel_index(int(differs.reshape(-1).argmax()), left.shape))
    return ElementDifference(number, place, (left[place], right[place]))


# ---- the first difference


class _Execution(NamedTuple):
    """A statement as one target executed it."""

    linked: LinkedStatement
    old_registers: RegisterValues
    new_registers: dict[str, np.ndarray]  # the registers that it wrote
    block_numbers: np.ndarray
    number: int  # statements executed before it
    earlier_executions: int


class _StopRun(Exception):
    """The run has reached the statement at which it should stop."""


class _DigestObserver:
    """Computes a digest of what each statement writes.

    expected: The digests of another run; `found` is then the first statement whose digest differs.
    stop: The number of a statement; the run stops there with the statement in `found`.
    """

    def __init__(self, expected: list[bytes] | None = None, stop: int | None = None) -> None:
        self.expected, self.stop = expected, stop
        self.digests: list[bytes] = []
        self.execution: _Execution | None = None
        self.steps = 0  # statements executed
        self._executions: dict[int, int] = {}

    def __call__(self, event: ExecutedStatement) -> None:
        number, self.steps = self.steps, self.steps + 1
        earlier = self._executions[event.linked.number] = self._executions.get(event.linked.number, -1) + 1
        if self.execution is not None or (self.stop is not None and number != self.stop):
            return
        if self.stop is None:
            total = hashlib.blake2b(digest_size=16)
            for name, value in sorted(event.written_registers().items()):
                total.update(name.encode())
                total.update(np.ascontiguousarray(np.asarray(value)).data)
            digest = total.digest()
            if self.expected is None:
                self.digests.append(digest)
                return
            if number < len(self.expected) and self.expected[number] == digest:
                return
        new = {name: np.asarray(value) for name, value in event.written_registers().items()}
        old = {**event.chunk.registers, **event.chunk.previous}
        self.execution = _Execution(event.linked, old, new, event.block_numbers, number, earlier)
        if self.stop is not None:
            raise _StopRun


def _describe_divergence(
    executions: tuple[_Execution, _Execution], targets: Sequence[str], grid: tuple[int, int, int], block: tuple[int, int, int]
) -> Divergence:
    """Return the difference between two executions of one statement, explained."""
    first, second = (execution.new_registers for execution in executions)
    left = executions[0]
    linked, prefix = left.linked, left.linked.names.prefix
    differing = {name: first[name] != second[name] for name in first if name in second and (first[name] != second[name]).any()}
    order = [prefix + register.name for register in named_registers(linked.statement)]
    names = sorted(differing, key=lambda name: order.index(name) if name in order else len(order))
    row, thread = (int(n) for n in np.argwhere(np.any(list(differing.values()), axis=0))[0])
    registers = []
    for name in names:
        index = tuple(np.argwhere(differing[name])[0])
        words = int(first[name][index]), int(second[name][index])
        registers.append(RegisterDifference(name.removeprefix(prefix), int(differing[name].sum()), words))
    explanation, reason = _Warp(linked, row, thread // LANES).explain_difference(left.old_registers, (first, second), targets)
    number, position = int(left.block_numbers[row]), linked.statement.position
    return Divergence(
        line=position.line, column=position.column, statement=str(linked.statement), steps=left.number,
        earlier_executions=left.earlier_executions, case=number // prod(grid), block=coordinates(number % prod(grid), grid),
        thread=coordinates(thread, block), registers=tuple(registers), explanation=explanation, unexplained_reason=reason,
    )  # fmt: skip


def _bits_differ(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return where two arrays have different bits, bool of their shape."""
    x, y = (np.ascontiguousarray(each) for each in (x, y))
    words = [each.view(np.uint8).reshape(*each.shape, each.dtype.itemsize) if each.size else each for each in (x, y)]
    return np.any(words[0] != words[1], axis=-1) if x.size else np.zeros(x.shape, bool)


# ---- its explanation


class _Warp(NamedTuple):
    """The warp that executed a statement."""

    linked: LinkedStatement
    row: int  # of its block in the chunk
    warp: int  # number in the block

    def explain_difference(
        self, old: RegisterValues, new: tuple[RegisterValues, RegisterValues], targets: Sequence[str]
    ) -> tuple[Explanations | None, str]:
        """Explain the first element of D that differs between two targets.

        Args:
            old: The registers before the statement.
            new: The registers that it wrote on each target.
            targets: The two targets.

        Returns:
            The explanation, or None and the reason why there is none.
        """
        try:
            bound = bind_operands(self.linked.statement, self.linked.context, MatrixMultiply)
        except Unsupported:
            return None, f"{self.linked.statement.name} is no product of matrices; there is nothing to explain"
        if bound.op.family not in EXPLAINED_FAMILIES:
            return None, f"{bound.op} is not explained; {', '.join(EXPLAINED_FAMILIES)} are"
        names = [name for name in ("a", "b", "c", "e", *SCALE_OPERANDS) if name in bound.operands]
        words = {name: self.read_words(bound.operands[name], old) for name in names}
        results = [np.asarray(unpack(bound.op, "d", self.read_words(bound.operands["d"], {**old, **each}))) for each in new]
        differing = results[0] != results[1]
        if bound.op.m * bound.op.n * 2 == differing.size:  # a word of 64 bits is two
            differing = differing.any(-1)
        indices = np.argwhere(differing)
        if differing.ndim != 2 or not len(indices):
            return None, f"the words of {bound.op} that differ make no element of one product of matrices"
        row, column = (int(n) for n in indices[0])
        try:
            inputs = self.explain_inputs(bound, words, old, row, column)
            explanation = explain(bound.op, **inputs, codes=True, target=targets)
        except ValueError as error:
            return None, f"not explained: {error}"
        assert isinstance(explanation, Explanations)
        return explanation, ""

    def explain_inputs(
        self, bound: BoundStatement, words: dict[str, np.ndarray], old: RegisterValues, row: int, column: int
    ) -> dict[str, Any]:
        """Return the arguments of `explain` for one element of D: a row of A, a column of B, C, metadata and scales, as codes."""
        op = bound.op
        codes = {name: np.asarray(unpack(op, name, words[name])) for name in ("a", "b", "c")}
        inputs: dict[str, Any] = {"a_row": codes["a"][row], "b_col": codes["b"][:, column], "c": codes["c"][row, column]}
        if op.sparse:
            inputs["e"] = np.asarray(unpack(op, "e", words["e"][:, 0], selector=bound.integer("f", 0)))[row]
        for name in SCALE_OPERANDS:
            if name in words:
                selector = vector_elements(bound.operands[name.replace("scale", "selector")])
                numbers = tuple(int(self.read_lanes(number, old)[0]) for number in selector)
                scales = np.asarray(unpack(op, name, words[name][:, 0], selector=numbers))
                inputs[name] = scales[row] if name == "scale_a" else scales[:, column]
        return inputs

    def read_words(self, operand: Operand, registers: RegisterValues) -> np.ndarray:
        """Return the registers of an operand, uint32[32, n]; a register of 64 bits is two words, low first."""
        columns = []
        for element in vector_elements(operand):
            value = self.read_lanes(element, registers)
            columns += [value.astype(np.uint32)] if value.dtype != np.uint64 else [value.astype(np.uint32), (value >> 32).astype(np.uint32)]
        return np.stack(columns, axis=-1)

    def read_lanes(self, operand: Operand, registers: RegisterValues) -> np.ndarray:
        """Return the raw bits of an operand in the 32 lanes."""
        if isinstance(operand, Register) and operand.name not in SPECIAL_REGISTERS:
            value = registers.get(self.linked.names.qualified_name(operand))
            lanes = slice(LANES * self.warp, LANES * (self.warp + 1))
            return np.zeros(LANES, np.uint32) if value is None else np.asarray(value)[self.row, lanes]
        if isinstance(operand, Integer):
            return np.full(LANES, operand.value & 0xFFFFFFFF, np.uint32)
        if isinstance(operand, Float) and operand.width == 32:
            return np.full(LANES, operand.bits, np.uint32)
        kind = "a vector" if isinstance(operand, Vector) else str(operand)
        raise ValueError(f"{kind} is an operand that is not explained; registers and constants are")
