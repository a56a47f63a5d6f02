"""A differential run and its file: two sides, any number of cases, progress, and a state from which it goes on after a kill."""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from signal import SIGINT
from typing import Any

import jax
import numpy as np

from tcemu.architectures.lookup import must_compute
from tcemu.compilation import compile_clock
from tcemu.files import locked, replace_file, sweep
from tcemu.fuzz.counts import Coverage
from tcemu.fuzz.kinds import chosen
from tcemu.fuzz.loop import ChunkCounts, Chunks, chunks, result
from tcemu.fuzz.operands import HostOperands
from tcemu.fuzz.outcome import NotWritten, Run, looked_at
from tcemu.fuzz.processes import Processes, in_several_processes
from tcemu.fuzz.run_file import ADVICE, FILE, FORMAT, MOST, Header, content, packed, parsed
from tcemu.fuzz.shrink import shrink
from tcemu.fuzz.sides import Side, side
from tcemu.interrupts import Held, held_back
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import Instruction

STREAM = 1  # of the operands: another number where the same seed no longer gives the same cases
SHORT, LONG = 0.5, 4.0  # seconds: below the first a chunk is doubled; the second lies between two writings of the file
UNWRITTEN = 1 << 20  # why a run ends, beside the numbers of signals: its file cannot be written

OnProgress = Callable[[str], None]  # is given a line of text


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
    stopped it; one that asks for more cases goes on where it ended (for the coverage, every 16th case from there is looked at). A side that
    is a function goes on only as a `Side` with an `identity`. One run at a time has the directory.
    kinds, weights: as in `generate`. turns: of the compiled loop in one call (None: by the time that they take). devices: those that share
    the cases (all of JAX's; where `jax.distributed` has several processes all must call this, and the first has the file).
    report: is given a line of progress now and then. covering: what was reached is counted. shrinking: the first mismatch is made small.
    Ctrl-C, and SIGTERM where it is handled, end it after a chunk, with its file written; a second Ctrl-C raises. Returns the Run.
    Raises Unsupported, NotModelled or ValueError for sides that do not go with `op`, ValueError if `out` holds another run (Damaged: none
    at all; InUse: another process has it), and NotWritten, an OSError with the Run so far, if it cannot be written.
    """
    op = parse(op)
    must_compute(op)
    for name, value, least, most in (("cases", cases, 1, 1 << 62), ("seed", seed, 0, 1 << 64), ("turns", turns or 1, 1, 1 << 31)):
        if not isinstance(value, int | np.integer) or not least <= value < most:
            raise ValueError(f"{name}: got {value}; want a whole number from {least} to {most - 1}")
    asked = Run(op, side(op, left), side(op, right), int(cases), int(seed), chosen(kinds, weights))
    among = tuple(devices or jax.devices())
    processes = Processes(in_several_processes(among))
    with ExitStack() as stack:
        held = stack.enter_context(held_back())
        state, path = (asked, None) if out is None else _opened(Path(out), asked, processes, stack, report)
        if not state.complete:
            model = looked_at(state.left, state.right) if covering else None
            chunk = chunks(op, state.left, state.right, state.kinds, model, among)
            state = _advance(state, Sitting(path, turns, report, held, processes), chunk)
        if state.first and shrinking and not state.stopped:
            state = _shrunk(state, held)
        return replace(state, signal=state.signal or held.signal)


@dataclass(frozen=True)
class Sitting:
    """How a run goes on. path: of its file; of the first process alone."""

    path: Path | None
    turns: int | None
    report: OnProgress | None
    held: Held
    processes: Processes


def _advance(state: Run, sitting: Sitting, chunk: Chunks) -> Run:
    """The run on to its end, or to a signal. Raises NotWritten."""
    path, report, held, clock = sitting.path, sitting.report, sitting.held, compile_clock()
    compiled_before, compiled = clock.seconds, 0.0
    if report is not None:
        report("compiling both sides and what compares them")
    now = began = last_saved = last_reported = time.monotonic()
    done_before, seconds_before = state.done, state.seconds
    turns, failure, stop = sitting.turns or 1, None, 0
    try:
        while True:
            turns, stop = sitting.processes.agreed(turns, held.signal if failure is None else UNWRITTEN)
            if stop or state.complete:
                break
            counted, start = min(chunk.per_turn * turns, state.cases - state.done), now
            state = added(state, chunk.compare(state.seed, state.done, counted, turns))
            held.counted = True
            now, first = time.monotonic(), not compiled
            compiled = clock.seconds - compiled_before
            if report is not None and first and compiled:
                report(f"compiled in {compiled:.1f} s")
            state = replace(state, seconds=seconds_before + now - began)
            if sitting.turns is None and now - start < SHORT:
                turns = min(2 * turns, chunk.most)
            if path is not None and now - last_saved > LONG:
                failure, last_saved = unwritten(path, state), now
            if report is not None and now - last_reported > 1:
                report(progress(state, done_before, now - began - compiled))
                last_reported = now
    except KeyboardInterrupt:  # a second one, or one of a side's own
        stop = SIGINT
    except Exception:  # of a side, or of `report`: what was counted before it stays
        if path is not None:
            unwritten(path, state)
        raise
    state = replace(state, signal=stop if stop < UNWRITTEN else 0)
    if path is not None and failure is None:
        failure = unwritten(path, state)
    if failure is not None:
        raise NotWritten(str(failure), state) from failure
    if report is not None:
        report(progress(state, done_before, time.monotonic() - began - compiled))
    return state


def _shrunk(state: Run, held: Held) -> Run:
    """The run with its first mismatch made small, unless a signal comes meanwhile."""

    def looking(side: Side) -> Side:
        def call(given: Any) -> Any:
            if held.signal:
                raise KeyboardInterrupt
            return side.call(given)

        return replace(side, call=call)

    number = state.first[0]
    try:
        small = shrink(state.op, looking(state.left), looking(state.right), state.operands(number), number)
    except KeyboardInterrupt:
        return replace(state, signal=held.signal or SIGINT)
    return replace(state, shrunk=replace(small, left=state.left, right=state.right))


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
    """One line: how far, how fast, how much longer. seconds: spent on what came after `before`, without compiling."""
    rate = (state.done - before) / max(seconds, 1e-9)
    left = (state.cases - state.done) / rate if rate else float("inf")
    share = state.done / max(state.cases, 1)
    end = "stopped" if state.stopped else "done" if state.complete else f"{span(left)} left"
    return f"{state.done:,} of {state.cases:,} cases ({share:.1%}), {rate:,.0f} a second, {state.wrong_cases:,} differ, {end}"


def span(seconds: float) -> str:
    """A length of time in words."""
    if seconds == float("inf"):
        return "unknown time"
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min" if whole < 7200 else f"{whole / 3600:.1f} h"


# ---- the file


def question(state: Run) -> Header:
    """What two sittings of one run must have in common."""
    sides = (state.left, state.right)
    return {
        "format": FORMAT, "stream": STREAM, "op": str(state.op), "left": state.left.name, "right": state.right.name,
        "identities": [s.identity for s in sides], "models": [str(s.model) for s in sides],
        "cases": state.cases, "seed": state.seed, "kinds": [[kind.name, kind.weight] for kind in state.kinds],
    }  # fmt: skip


def save(path: Path, state: Run) -> None:
    """Writes the run's file, with the operands and results of the first mismatches. Raises OSError."""
    replace_file(path, content_of(state))


def content_of(state: Run, cases: bool = True) -> bytes:
    """The bytes of the run's file. cases: with the first mismatches."""
    header = question(state) | {name: getattr(state, name) for name in ("done", "wrong_cases", "wrong_outputs", "first", "seconds")}
    arrays: dict[str, Any] = {}
    if state.by_kind is not None and state.coverage is not None:
        arrays = {"by_kind": state.by_kind} | {f"coverage_{name}": counts for name, counts in state.coverage._asdict().items()}
    for number in state.first if cases else ():
        words = case(Run(state.op, state.left, state.right, state.cases, state.seed, state.kinds), number)
        arrays |= {f"case_{number}_{name}": codes for name, codes in words.items()}
    return packed(header, arrays)


@lru_cache(maxsize=4 * MOST)
def case(asked: Run, number: int) -> HostOperands:
    """The operands and both results of one case: made once, written every few seconds. asked: a run with nothing counted."""
    given = asked.operands(number)
    on_device = {name: jax.numpy.asarray(codes) for name, codes in given.items()}
    results = {name: result(asked.op, compared, on_device) for name, compared in (("left", asked.left), ("right", asked.right))}
    return {name: np.asarray(codes)[0] for name, codes in (given | results).items()}


def unwritten(path: Path, state: Run) -> OSError | None:
    """Writes the file; why it cannot be written, if so."""
    try:
        save(path, state)
    except OSError as error:
        return OSError(f"out: {path} cannot be written: {error.strerror or error}. It is as it was before; free or change the place")
    return None


def header(path: str | os.PathLike) -> Header:
    """The header of a run's file, or of the directory with one. Raises Damaged, and OSError."""
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    return parsed(content(path), path)[0]


def _opened(folder: Path, asked: Run, processes: Processes, stack: ExitStack, report: OnProgress | None) -> tuple[Run, Path | None]:
    """The run that the folder holds, or begins to hold, and the path of its file, both locked until `stack` ends."""
    path = folder / FILE

    def first() -> bytes:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            alone = stack.enter_context(locked(folder))
        except OSError as error:
            raise NotWritten(f"out: {folder} cannot be used: {error.strerror or error}; choose another directory", asked) from error
        if report is not None and not alone:
            report(f"{folder}: this file system has no locks; let no other run write there")
        if report is not None and None in question(asked)["identities"]:
            report("this run cannot go on after a stop: a side is a function without an identity; see tcemu.fuzz.Side")
        state = _resumed(path, asked) if os.path.lexists(path) else asked
        sweep(path)
        failure = unwritten(path, state) if not state.done else None  # before hours of work, not after them
        if failure is None and not state.complete and not os.access(folder, os.W_OK):
            failure = OSError(f"out: {folder} cannot be written: Permission denied")
        if failure is not None:
            raise NotWritten(str(failure), state) from failure
        return content_of(state, cases=False)

    made = processes.of_first(first)
    return _state(*parsed(made, path), asked), path if processes.first else None


def _resumed(path: Path, asked: Run) -> Run:
    """The run that the file holds. Raises Damaged, OSError, and ValueError if it is not the one that is asked for."""
    header, counts = parsed(content(path), path)
    wanted = json.loads(json.dumps(question(asked)))  # through JSON, as the file went
    further = wanted["cases"] > header["cases"]  # a run that is to be longer than it was
    same = {name: value for name, value in wanted.items() if not (further and name == "cases")}
    differences = [f"{name} is {header.get(name)!r} there and {value!r} here" for name, value in same.items() if header.get(name) != value]
    if differences:
        raise ValueError(f"out: {path} holds another run: {'; '.join(differences)}. Choose another directory, or ask the same")
    unknown = [compared.name for compared in (asked.left, asked.right) if compared.identity is None]
    if unknown:
        raise ValueError(
            f"out: {path} holds a run that cannot go on: {unknown[0]} is a function, which cannot be told from another one of that name. "
            f"Start with tcemu.fuzz.Side({unknown[0]!r}, function, traced=False, identity=...), whose words change when it does; {ADVICE}"
        )
    return _state(header, counts, asked)


def _state(header: Header, counts: dict[str, np.ndarray], asked: Run) -> Run:
    """The run as far as the header and the counts say."""
    numbers = {name: header[name] for name in ("done", "wrong_cases", "wrong_outputs", "seconds")}
    reached = Coverage(*(counts[f"coverage_{name}"] for name in Coverage._fields)) if counts else None
    return replace(asked, **numbers, first=tuple(header["first"]), by_kind=counts.get("by_kind"), coverage=reached)
