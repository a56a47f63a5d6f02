"""`tcemu.ptx.compare`: one kernel on two targets, the first statement whose registers differ, and that instruction explained."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tcemu.explanation.comparison import Explanations
from tcemu.isa.targets import named_target
from tcemu.ptx.explaining import explained
from tcemu.ptx.link import Line
from tcemu.ptx.module import Module
from tcemu.ptx.parser import parse
from tcemu.ptx.run import STEP_LIMIT, run
from tcemu.ptx.scheduler import Watch
from tcemu.ptx.statements import Chunk
from tcemu.ptx.tracing import named
from tcemu.results import Result, Table


class Register(NamedTuple):
    """A register that differs. differing: in how many threads; words: its raw bits on either target, in the first of these threads."""

    name: str
    differing: int
    words: tuple[int, int]


@dataclass(frozen=True)
class Parting:
    """The first statement after which the registers of two targets differ; before it all were equal.

    line, column, statement: where, and its text. steps: how many statements were executed before it, each by all threads of a chunk of
    blocks at once; visit: how often this one was. case, block, thread: of the first thread with another word; case is 0 without `cases`.
    registers: those that differ. explanation: of the first element of its result that differs there, for products of matrices; else None,
    and `unexplained` says why.
    """

    line: int
    column: int
    statement: str
    steps: int
    visit: int
    case: int
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    registers: tuple[Register, ...]
    explanation: Explanations | None = None
    unexplained: str = ""


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """What `compare` found. `str()` is the account for people, `records()` has a row for each array.

    targets: the two. outputs: of each, the arrays that the kernel leaves. differing: elements that differ, by array; differing_cases: how
    many of the `cases` differ anywhere. parting: where they part first, or None; registers may part where no array does.
    """

    entry: str
    targets: tuple[str, str]
    outputs: tuple[list[np.ndarray], list[np.ndarray]]
    differing: tuple[int, ...]
    cases: int
    differing_cases: int
    steps: int
    parting: Parting | None

    @property
    def equal(self) -> bool:
        """Whether no register and no array ever differed."""
        return self.parting is None and not any(self.differing)

    def __str__(self) -> str:
        left, right = self.targets
        total = sum(array.size for array in self.outputs[0])
        lines = [f"{self.entry} on {left} and {right}: {sum(self.differing):,} of {total:,} elements of its arrays differ"]
        if self.cases > 1:
            lines[0] += f", in {self.differing_cases:,} of {self.cases:,} cases"
        found = self.parting
        if found is None:
            return "\n".join([*lines, f"No register differs after any of {self.steps:,} statements."])
        place = f"block {found.block}, thread {found.thread}" + (f", case {found.case:,}" if self.cases > 1 else "")
        before = f"{found.steps:,} statements before it, and {found.visit:,} visits of it, left equal registers"
        lines += [f"They part at line {found.line}, {place}: {before}.", f"    {found.statement}"]
        for name, count, (one, other) in found.registers:
            lines.append(f"{name}: {count:,} threads differ, the first has {one:#x} on {left}, {other:#x} on {right}")
        return "\n".join([*lines, "", str(found.explanation) if found.explanation is not None else found.unexplained])

    def __repr__(self) -> str:
        where = "equal" if self.equal else f"{sum(self.differing):,} elements differ"
        return f"<Comparison of {self.entry} on {' and '.join(self.targets)}: {where}>"

    def table(self) -> Table:
        """A row for each array; the facts say where the targets part."""
        rows = tuple((self.entry, *self.targets, at, array.size, self.differing[at]) for at, array in enumerate(self.outputs[0]))
        found = self.parting
        facts: dict[str, Any] = {"equal": self.equal, "cases": self.cases, "differing_cases": self.differing_cases, "steps": self.steps}
        facts |= {"line": None if found is None else found.line, "statement": None if found is None else found.statement}
        return Table(repr(self)[1:-1], ("entry", "left", "right", "array", "elements", "differing"), rows, facts)


class _Step(NamedTuple):
    """A statement as it was executed. before: the registers before it; after: those that it wrote; first: the first block of the chunk."""

    line: Line
    before: dict[str, Any]
    after: dict[str, np.ndarray]
    first: int
    number: int
    visit: int


class _Found(Exception):
    """The step that was looked for."""


class _Watch:
    """Follows a run statement by statement: a digest of what each writes, held against those of another run where there are any.

    wanted: the digests; step: the number of the one to stop at, with what it left in `found`; follow: what else is called.
    """

    def __init__(self, follow: Watch | None, wanted: list[bytes] | None = None, step: int | None = None) -> None:
        self.follow, self.wanted, self.step = follow, wanted, step
        self.digests: list[bytes] = []
        self.found: _Step | None = None
        self._chunk: Chunk | None = None
        self._before: dict[str, Any] = {}
        self._first = self._number = 0
        self._visits: dict[int, int] = {}

    def __call__(self, line: Line, chunk: Chunk, active: np.ndarray) -> None:
        if self.follow is not None:
            self.follow(line, chunk, active)
        if self.found is not None:
            return
        if chunk is not self._chunk:
            self._first += self._chunk.shape[0] if self._chunk is not None else 0
            self._chunk, self._before = chunk, {}
        written = {name: value for name, value in chunk.registers.items() if self._before.get(name) is not value}
        number, self._number = self._number, self._number + 1
        visit = self._visits[line.number] = self._visits.get(line.number, -1) + 1
        if self.step is None:
            digest = hashlib.blake2b(digest_size=16)
            for name in sorted(written):
                digest.update(name.encode())
                digest.update(np.ascontiguousarray(np.asarray(written[name])).data)
            if self.wanted is None:
                self.digests.append(digest.digest())
            elif number >= len(self.wanted) or self.wanted[number] != digest.digest():
                self._take(line, written, number, visit)
        elif number == self.step:
            self._take(line, written, number, visit)
            raise _Found
        self._before = dict(chunk.registers)

    def _take(self, line: Line, written: dict[str, Any], number: int, visit: int) -> None:
        after = {name: np.asarray(value) for name, value in written.items()}
        self.found = _Step(line, self._before, after, self._first, number, visit)

    @property
    def steps(self) -> int:
        """How many statements were executed."""
        return self._number


def compare(
    text: str | Module,
    *,
    targets: tuple[str, str],
    entry: str | None = None,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any] = (),
    shared_bytes: int = 0,
    cases: int | None = None,
    step_limit: int = STEP_LIMIT,
    watch: Watch | None = None,
) -> Comparison:
    """Runs a kernel on two targets, and finds the first statement after which a register differs.

    The other arguments are those of `tcemu.ptx.run`; with `cases` many inputs are tried in one call. Each target runs the whole kernel; if
    they part, one runs once more up to that statement. Statements are compared by a digest of 128 bits of all that they write to registers.
    Differences in memory alone, as between the fragments that `wmma.store` writes, are seen in the arrays, and where they are read.
    Raises what `run` raises, and ValueError unless there are two targets.
    """
    if isinstance(targets, str) or len(targets) != 2:
        raise ValueError(f"targets: got {targets!r}; wanted two, as ('sm_80', 'sm_90a')")
    targets = named_target(targets[0]), named_target(targets[1])
    module = parse(text) if isinstance(text, str) else text
    given: dict[str, Any] = {"entry": entry, "grid": grid, "block": block, "args": args, "shared_bytes": shared_bytes, "cases": cases}
    given |= {"step_limit": step_limit}
    left = _Watch(watch)
    outputs = [list(run(module, target=targets[0], watch=left, **given))]
    right = _Watch(watch, wanted=left.digests)
    outputs.append(list(run(module, target=targets[1], watch=right, **given)))
    parting = None
    if right.found is not None:
        again = _Watch(watch, step=right.found.number)
        with suppress(_Found):
            run(module, target=targets[0], watch=again, **given)
        assert again.found is not None  # what ran once runs again
        parting = _parting((again.found, right.found), targets, _shape(grid), _shape(block))
    unlike = [_unlike(x, y) for x, y in zip(*outputs, strict=True)]
    by_case = [each.reshape(cases or 1, -1).any(-1) for each in unlike if each.size]
    return Comparison(
        entry=entry or next(iter(module.entries)),
        targets=targets,
        outputs=(outputs[0], outputs[1]),
        differing=tuple(int(each.sum()) for each in unlike),
        cases=cases or 1,
        differing_cases=int(np.any(by_case, axis=0).sum()) if by_case else 0,
        steps=left.steps,
        parting=parting,
    )


def _shape(size: int | Sequence[int]) -> tuple[int, int, int]:
    """Three numbers, as `run` takes one to three."""
    numbers = (*((size,) if isinstance(size, int | np.integer) else size), 1, 1)
    return int(numbers[0]), int(numbers[1]), int(numbers[2])


def _unlike(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where two arrays have other bits: bool of their shape."""
    x, y = (np.ascontiguousarray(each) for each in (x, y))
    words = [each.view(np.uint8).reshape(*each.shape, each.dtype.itemsize) if each.size else each for each in (x, y)]
    return np.any(words[0] != words[1], axis=-1) if x.size else np.zeros(x.shape, bool)


def _parting(steps: tuple[_Step, _Step], targets: Sequence[str], grid: tuple[int, int, int], block: tuple[int, int, int]) -> Parting:
    """What parted, and why."""
    left, right = steps
    line, prefix = left.line, left.line.names.prefix
    names = [name for name in left.after if name in right.after and (left.after[name] != right.after[name]).any()]
    order = [prefix + register.name for register in named(line)]  # the destinations come first
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    unlike = {name: left.after[name] != right.after[name] for name in names}
    row, thread = (int(n) for n in np.argwhere(np.any(list(unlike.values()), axis=0))[0])
    registers = tuple(_register(name.removeprefix(prefix), left.after[name], right.after[name]) for name in names)
    explanation, why = explained(line, left.before, (left.after, right.after), (row, thread // 32), targets)
    number, place = left.first + row, line.statement.place
    return Parting(
        line=place.line, column=place.column, statement=str(line.statement), steps=left.number, visit=left.visit,
        case=number // prod(grid), block=_place(number % prod(grid), grid), thread=_place(thread, block), registers=registers,
        explanation=explanation, unexplained=why,
    )  # fmt: skip


def _register(name: str, left: np.ndarray, right: np.ndarray) -> Register:
    """A register that differs, with its words in the first thread where it does."""
    unlike = left != right
    at = tuple(np.argwhere(unlike)[0])
    return Register(name, int(unlike.sum()), (int(left[at]), int(right[at])))


def _place(number: int, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """A number, x first, as coordinates."""
    x, y, _ = shape
    return number % x, number // x % y, number // (x * y)
