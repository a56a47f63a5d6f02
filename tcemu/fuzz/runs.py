"""A differential run and its file: two sides, any number of cases, progress, and a state from which it goes on after a kill."""

import io
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tcemu.architectures.lookup import must_compute
from tcemu.arithmetic.model import Model
from tcemu.files import replace_file
from tcemu.fuzz import coverage
from tcemu.fuzz.coverage import Coverage
from tcemu.fuzz.generators import generate
from tcemu.fuzz.kinds import Kind, chosen
from tcemu.fuzz.loop import ChunkCounts, chunks, result
from tcemu.fuzz.operands import HostOperands
from tcemu.fuzz.shrink import Shrunk, shrink
from tcemu.fuzz.sides import Side, side
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import Instruction

FORMAT = 1  # of the file
STREAM = 1  # of the operands: another number where the same seed no longer gives the same cases
FILE = "run.npz"
SHORT, LONG = 0.5, 4.0  # seconds: below the first a chunk is doubled; the second lies between two writings of the file
MOST = 16  # mismatches whose operands the file keeps

OnProgress = Callable[[str], None]  # is given a line of text


@dataclass(frozen=True)
class Run:
    """A run as far as it came: what was asked, and what was found. `str()` is the account for people."""

    op: Instruction
    left: Side
    right: Side
    cases: int
    seed: int
    kinds: tuple[Kind, ...]
    done: int = 0
    wrong_cases: int = 0
    wrong_outputs: int = 0
    first: tuple[int, ...] = ()  # numbers of the first cases that differ
    by_kind: np.ndarray | None = None  # int64 [kinds, 2]: cases, and those that differ
    coverage: Coverage | None = None
    stopped: bool = False  # by Ctrl-C
    seconds: float = 0.0  # of work, over all sittings
    shrunk: Shrunk | None = None

    @property
    def complete(self) -> bool:
        return self.done >= self.cases

    def __str__(self) -> str:
        outputs = self.done * self.op.m * self.op.n
        lines = [str(self.op), f"{self.left.name} and {self.right.name}, seed {self.seed}: {self.done:,} of {self.cases:,} cases"]
        lines.append(
            f"{self.wrong_outputs:,} of {outputs:,} outputs differ, in {self.wrong_cases:,} cases"
            if self.wrong_cases
            else f"0 mismatches of {outputs:,} outputs"
        )
        if self.by_kind is not None:
            parts = [
                f"{kind.name} {n:,}" + (f" ({wrong:,} differ)" if wrong else "")
                for kind, (n, wrong) in zip(self.kinds, self.by_kind, strict=True)
            ]
            lines.append("cases: " + ", ".join(parts))
        if self.coverage is not None and self.coverage.events.any():
            lines += coverage.lines(self.op, looked_at(self.left, self.right), self.coverage)
        if self.first:
            lines.append(f"first cases that differ: {', '.join(map(str, self.first[:8]))}")
        if self.shrunk is not None:
            lines += ["", str(self.shrunk)]
        return "\n".join(lines)

    def operands(self, number: int) -> HostOperands:
        """The operands of one case, [1, ...]."""
        codes = generate(self.op, self.seed, number, 1, kinds=[k.name for k in self.kinds], weights=[k.weight for k in self.kinds])
        return {name: np.asarray(x) for name, x in codes.items()}


def looked_at(left: Side, right: Side) -> Model | None:
    """The model whose steps the coverage counts: the left one's, or the right one's if it has none."""
    return left.model if left.model is not None else right.model


def run(
    op: str | Instruction,
    left: str | Side | Callable,
    right: str | Side | Callable,
    *,
    cases: int,
    seed: int = 0,
    out: str | os.PathLike | None = None,
    kinds: Sequence[str] | None = None,
    weights: Sequence[int] | None = None,
    turns: int | None = None,
    devices: Sequence[Any] | None = None,
    report: OnProgress | None = None,
    covering: bool = True,
    shrinking: bool = True,
) -> Run:
    """Compares two sides on `cases` cases of one instruction: cases 0, 1, ... of the seed, as `tcemu.fuzz.generate` makes them.

    op: a PTX spelling or an Instruction that computes. left, right: what `tcemu.fuzz.side` takes: a target, "sm_90a:fraction_bits=24",
    "sm_90@12.6", "reference:sm_90a", a Side, or a function from operands (NumPy codes) to D's codes.
    out: a directory that holds the run's file, run.npz; a run that stands there and asks the same goes on where it stopped, whatever
    stopped it. kinds, weights: as in `generate`. turns: of the compiled loop in one call (None: by the time that they take). devices: those
    that share the cases (all of JAX's). report: is given a line of progress now and then. covering: what was reached is counted.
    shrinking: the first mismatch is made small.
    Ctrl-C ends it after the file is written. Returns the Run. Raises Unsupported, NotModelled or ValueError for sides that do not go with
    `op`, and ValueError if `out` holds another run.
    """
    op = parse(op)
    must_compute(op)
    state = Run(op, side(op, left), side(op, right), cases, seed, chosen(kinds, weights))
    if not 0 <= cases < 1 << 62 or not 0 <= seed < 1 << 64:
        raise ValueError(f"cases: got {cases}, seed: got {seed}; want 0 to 2^62 - 1, and 0 to 2^64 - 1")
    path = None if out is None else Path(out) / FILE
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = _resumed(path, state) if path.exists() else state
    model = looked_at(state.left, state.right) if covering else None
    state = _advance(replace(state, stopped=False), path, turns, tuple(devices or jax.devices()), report, model)
    if state.first and shrinking:
        number = state.first[0]
        state = replace(state, shrunk=shrink(op, state.left, state.right, state.operands(number), number))
    return state


def _advance(
    state: Run, path: Path | None, turns: int | None, devices: tuple[Any, ...], report: OnProgress | None, model: Model | None
) -> Run:
    """The run on to its end, or to Ctrl-C. path: of its file; model: whose steps the coverage looks at."""
    if state.complete:
        return state
    chunk = chunks(state.op, state.left, state.right, state.kinds, model, devices)
    now = began = last_saved = last_reported = time.monotonic()
    done_before, seconds_before = state.done, state.seconds
    turns_of_a_call = turns or 1
    try:
        while not state.complete:
            counted, start = min(chunk.per_turn * turns_of_a_call, state.cases - state.done), now
            state = added(state, chunk.compare(state.seed, state.done, counted, turns_of_a_call))
            now = time.monotonic()
            state = replace(state, seconds=seconds_before + now - began)
            if turns is None and now - start < SHORT:
                turns_of_a_call = min(2 * turns_of_a_call, chunk.most)
            if path is not None and now - last_saved > LONG:
                save(path, state)
                last_saved = now
            if report is not None and now - last_reported > 1:
                report(progress(state, done_before, now - began))
                last_reported = now
    except KeyboardInterrupt:
        state = replace(state, stopped=True)
    if path is not None:
        save(path, state)
    if report is not None:
        report(progress(state, done_before, time.monotonic() - began))
    return state


def added(state: Run, counts: ChunkCounts) -> Run:
    """The run after one more chunk."""
    return replace(
        state,
        done=state.done + counts.cases,
        wrong_cases=state.wrong_cases + counts.wrong_cases,
        wrong_outputs=state.wrong_outputs + counts.wrong_outputs,
        first=(*state.first, *counts.first)[:MOST],
        by_kind=counts.by_kind if state.by_kind is None else state.by_kind + counts.by_kind,
        coverage=counts.coverage if state.coverage is None else state.coverage + counts.coverage,
    )


def progress(state: Run, before: int, seconds: float) -> str:
    """One line: how far, how fast, how much longer."""
    rate = (state.done - before) / max(seconds, 1e-9)
    left = (state.cases - state.done) / rate if rate else float("inf")
    share = state.done / max(state.cases, 1)
    end = "stopped" if state.stopped else "done" if state.complete else f"{_span(left)} left"
    return f"{state.done:,} of {state.cases:,} cases ({share:.1%}), {rate:,.0f} a second, {state.wrong_cases:,} differ, {end}"


def _span(seconds: float) -> str:
    if seconds == float("inf"):
        return "unknown time"
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min" if whole < 7200 else f"{whole / 3600:.1f} h"


# ---- the file


def question(state: Run) -> dict[str, Any]:
    """What two sittings of one run must have in common."""
    return {
        "format": FORMAT, "stream": STREAM, "op": str(state.op), "left": state.left.name, "right": state.right.name,
        "models": [str(s.model) for s in (state.left, state.right)],
        "cases": state.cases, "seed": state.seed, "kinds": {kind.name: kind.weight for kind in state.kinds},
    }  # fmt: skip


def save(path: Path, state: Run) -> None:
    """Writes the run's file, with the operands and results of the first mismatches."""
    header = question(state) | {name: getattr(state, name) for name in ("done", "wrong_cases", "wrong_outputs", "first", "seconds")}
    arrays: dict[str, Any] = {"header": np.frombuffer(json.dumps(header, indent=1).encode(), np.uint8)}
    if state.by_kind is not None:
        arrays["by_kind"] = state.by_kind
    if state.coverage is not None:
        arrays |= {f"coverage_{name}": counts for name, counts in state.coverage._asdict().items()}
    for number in state.first:
        given = state.operands(number)
        arrays |= {f"case_{number}_{name}": codes[0] for name, codes in given.items()}
        for name, compared in (("left", state.left), ("right", state.right)):
            arrays[f"case_{number}_{name}"] = np.asarray(result(state.op, compared, {k: jax.numpy.asarray(v) for k, v in given.items()}))[0]
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    replace_file(path, buffer.getvalue())


def header(path: str | os.PathLike) -> dict[str, Any]:
    """The header of a run's file, or of the directory with one."""
    path = Path(path)
    with np.load(path / FILE if path.is_dir() else path) as held:
        return json.loads(held["header"].tobytes())


def _resumed(path: Path, state: Run) -> Run:
    """The run that the file holds. Raises ValueError if it is not the one that `state` asks for."""
    with np.load(path) as file:
        held = json.loads(file["header"].tobytes())
        asked = json.loads(json.dumps(question(state)))  # through JSON, as the file went
        differences = [f"{name} is {held.get(name)!r} there and {asked[name]!r} here" for name in asked if held.get(name) != asked[name]]
        if differences:
            raise ValueError(f"out: {path} holds another run: {'; '.join(differences)}. Choose another directory, or ask the same")
        by_kind = file.get("by_kind")
        counts = Coverage(*(file[f"coverage_{name}"] for name in Coverage._fields)) if "coverage_events" in file else None
    counted = {name: held[name] for name in ("done", "wrong_cases", "wrong_outputs", "seconds")}
    return replace(state, **counted, first=tuple(held["first"]), by_kind=by_kind, coverage=counts)
