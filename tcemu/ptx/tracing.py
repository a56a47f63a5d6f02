"""`trace=` of `tcemu.ptx.run`: what registers and memory hold after the statements of a line, for chosen threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tcemu.ptx.link import Kernel, Line
from tcemu.ptx.module import Register
from tcemu.ptx.special import SPECIAL
from tcemu.ptx.statements import Chunk, Names, flattened
from tcemu.ptx.values import KINDS

FLOATS = {"f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}


@dataclass(frozen=True)
class Keep:
    """What is kept each time that chosen threads have executed a statement of a line, for `trace=` of `tcemu.ptx.run`.

    line: of the PTX text, from 1. registers: by name, as "%f1" or "%tid.x"; (): those that the statement names. blocks: their numbers in
    the grid, x first, case after case; threads: their numbers in the block; None: all. shared: the bytes of the blocks' shared memory to
    keep, from and to. arrays: which of the arrays among the arguments to keep, by their numbers. visits: at most so many.
    """

    line: int
    registers: tuple[str, ...] = ()
    blocks: tuple[int, ...] | None = (0,)
    threads: tuple[int, ...] | None = None
    shared: tuple[int, int] | None = None
    arrays: tuple[int, ...] = ()
    visits: int = 1000


@dataclass(frozen=True)
class Visit:
    """What was kept of one execution of a statement.

    line, statement: where, and its text; visit: how often chosen threads have executed it before. blocks, threads: their numbers; active:
    bool [blocks, threads], which of them executed it. registers: by name, [blocks, threads], values after the statement, also of threads
    that did not execute it: bool for predicates, floats for .f16, .f32 and .f64, signed for .s types, else unsigned bits. A register that
    was never written is zero. shared: uint8 [blocks, bytes]. arrays: by their numbers, as `run` would return them now.
    """

    line: int
    statement: str
    visit: int
    blocks: tuple[int, ...]
    threads: tuple[int, ...]
    active: np.ndarray
    registers: dict[str, np.ndarray]
    shared: np.ndarray | None = None
    arrays: dict[int, np.ndarray] = field(default_factory=dict)


class Arrays(list[np.ndarray]):
    """What a kernel leaves in its arrays; visits: what `trace=` kept, in the order of execution."""

    visits: tuple[Visit, ...] = ()


class Tracer:
    """Keeps what is asked for while a kernel runs: a `Watch` of the scheduler.

    Raises ValueError if a line has no statement that can be kept, or if the kernel has no such register.
    """

    def __init__(self, asked: Sequence[Keep], kernel: Kernel, threads: int, results: Callable[[np.ndarray], list[np.ndarray]]) -> None:
        self.asked, self.threads, self.results = tuple(asked), threads, results
        self.visits: list[Visit] = []
        self._counts: dict[tuple[int, int], int] = {}  # by the number of what is asked, and that of the statement
        self._first = 0  # block of the chunk that runs
        self._chunk: Chunk | None = None
        self._before: dict[str, Any] = {}  # the registers before the statement
        for keep in self.asked:
            _check(keep, kernel, threads)

    def __call__(self, line: Line, chunk: Chunk, active: np.ndarray) -> None:
        """After a statement."""
        if chunk is not self._chunk:
            self._first += self._chunk.shape[0] if self._chunk is not None else 0
            self._chunk, self._before = chunk, {}
        for number, keep in enumerate(self.asked):
            if keep.line == line.statement.place.line:
                self._keep(number, keep, line, chunk, active)
        self._before = dict(chunk.registers)

    def _keep(self, number: int, keep: Keep, line: Line, chunk: Chunk, active: np.ndarray) -> None:
        here = range(self._first, self._first + chunk.shape[0])
        blocks = list(here if keep.blocks is None else [block for block in keep.blocks if block in here])
        threads = list(range(self.threads) if keep.threads is None else keep.threads)
        rows = np.array(blocks, int) - self._first
        chosen = np.ix_(rows, np.array(threads, int))
        taking = executing(line, self._before, active)[chosen]
        visit = self._counts.get((number, line.number), 0)
        if not taking.any() or visit >= keep.visits:
            return
        self._counts[number, line.number] = visit + 1
        names = keep.registers or tuple(register.name for register in named(line))
        shared = None
        if keep.shared is not None:
            shared = np.ascontiguousarray(np.asarray(chunk["shared"])[rows]).view(np.uint8)[:, slice(*keep.shared)].copy()
        every = self.results(np.asarray(chunk["memory"])) if keep.arrays else []
        self.visits.append(
            Visit(
                line=keep.line, statement=str(line.statement), visit=visit, blocks=tuple(blocks), threads=tuple(threads), active=taking,
                registers={name: values(line.names, chunk, name)[chosen] for name in names}, shared=shared,
                arrays={at: every[at].copy() for at in keep.arrays},
            )
        )  # fmt: skip


def named(line: Line) -> list[Register]:
    """The registers that a statement names, each once."""
    found = (getattr(operand, "register", getattr(operand, "base", operand)) for operand in flattened(line.statement.operands))
    return list(dict.fromkeys(register for register in found if isinstance(register, Register)))


def executing(line: Line, before: Mapping[str, Any], active: np.ndarray) -> np.ndarray:
    """The threads that execute a statement, its guard included. before: the registers before it; those not written yet are missing."""
    guard = line.statement.guard
    if guard is None:
        return active
    predicate = before.get(line.names.held(Register(guard.register)))
    return active & ((False if predicate is None else np.asarray(predicate)) != guard.negated)


def values(names: Names, chunk: Chunk, name: str) -> np.ndarray:
    """A register's values [blocks, threads], in the dtype of its type."""
    register = Register(name)
    kind = KINDS[names.kind(register)]
    bits = np.asarray(chunk.register(names.held(register), kind.name))
    if kind.bits == 1:
        return bits
    whole = bits.astype(np.dtype(f"u{kind.bits // 8}"))
    return whole.view(FLOATS[kind.name]) if kind.name in FLOATS else whole.view(f"i{kind.bits // 8}") if kind.signed else whole


def _check(keep: Keep, kernel: Kernel, threads: int) -> None:
    """Refuses what would never keep anything."""
    running = {id(line): line for piece in kernel.pieces for line in piece.lines}.values()
    lines = [line for line in running if line.statement.place.line == keep.line]
    if not lines:
        there = sorted({line.statement.place.line for line in running}, key=lambda at: abs(at - keep.line))[:3]
        raise ValueError(
            f"trace: line {keep.line} has no statement of {kernel.entry.name} that changes a register or memory; nearest are lines "
            f"{', '.join(map(str, sorted(there)))}. Branches, calls, barriers and the end of a thread are not kept"
        )
    for line in lines:
        for name in keep.registers:
            if name not in SPECIAL and name not in line.names.kinds:
                raise ValueError(f"trace: there is no register {name} in the function of line {keep.line}")
    wrong = [number for number in keep.threads or () if not 0 <= number < threads]
    if wrong:
        raise ValueError(f"trace: threads: got {wrong[0]}; a block has {threads}, from 0 on")
