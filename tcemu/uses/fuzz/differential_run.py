"""Differential runs: two implementations compared on any number of cases, with progress, and with a file from which a killed run resumes.

The file of a run is not trusted when it is read: sizes are checked first, then contents, then whether the counts are consistent.
"""

from __future__ import annotations

import json
import math
import os
import re
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

from tcemu.base.compilation import compile_clock
from tcemu.base.files import lock_folder, remove_leftovers, replace_file
from tcemu.base.interrupts import PendingSignal, defer_signals
from tcemu.base.results import Result, Table
from tcemu.base.saved_files import DamagedFile, pack_archive, read_array, unpack_archive
from tcemu.engine.architectures.lookup import require_product
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.isa.families import Instruction, MatrixMultiply
from tcemu.operations.products.unit_choice import describe_unit
from tcemu.uses.fuzz.case_generator import HostOperandCodes, generate
from tcemu.uses.fuzz.case_kinds import Kind, select_kinds
from tcemu.uses.fuzz.comparison_loop import ChunkCounts, ChunkRunner, Processes, compute_result, make_chunk_runner, spans_processes
from tcemu.uses.fuzz.coverage import SIZES, Coverage, coverage_lines
from tcemu.uses.fuzz.implementations import Implementation, get_implementation, resolve_common_op
from tcemu.uses.fuzz.shrinking import SmallMismatch, shrink_mismatch

OPERAND_STREAM = 1  # version of the operands; it changes if the same seed no longer gives the same cases
SHORT_CHUNK_SECONDS = 0.5  # a chunk that takes less is followed by one of twice its size
SAVE_INTERVAL_SECONDS = 4.0  # between two writes of the file
STOP_UNWRITABLE = 1 << 20  # stop code for a file that cannot be written, beyond the numbers of signals

RUN_FILE = "run.npz"
FILE_FORMAT = 2  # version of the file's format
MAX_MISMATCHES = 16  # mismatches whose operands the file keeps
MAX_FILE_BYTES = 1 << 24  # the largest instruction's 16 mismatches take a third of it
MEMBER_NAMES = re.compile(r"(header|by_kind|coverage_[a-z]+|case_\d+_[a-z_]+)\.npy")
ADVICE = "choose another directory, or move the file away"

OnProgress = Callable[[str], None]  # receives a line of text
Header = dict[str, Any]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, repr=False)
class FuzzRun(Result):
    """The result of a differential run, complete or as far as it came.

    `str()` is a report for people, and `records()` has a row per kind of cases.

    Attributes:
        op: The instruction.
        left: One implementation.
        right: The other implementation.
        cases: Number of cases requested.
        seed: Seed of the cases.
        kinds: Kinds of cases.
        done: Number of cases compared.
        wrong_cases: Number of cases that differ.
        wrong_outputs: Number of outputs that differ.
        first: Numbers of the first cases that differ.
        by_kind: int64 [kinds, 2], cases and cases that differ, or None if nothing was compared.
        coverage: Counts of what the cases reached, or None.
        signal: Number of the signal that stopped the run, or 0.
        seconds: Seconds of work over all sessions.
        small_mismatch: The first mismatch, shrunk, or None.
    """

    op: MatrixMultiply
    left: Implementation
    right: Implementation
    cases: int
    seed: int
    kinds: tuple[Kind, ...]
    done: int = 0
    wrong_cases: int = 0
    wrong_outputs: int = 0
    first: tuple[int, ...] = ()
    by_kind: np.ndarray | None = None
    coverage: Coverage | None = None
    signal: int = 0
    seconds: float = 0.0
    small_mismatch: SmallMismatch | None = None

    @property
    def complete(self) -> bool:
        """True if all requested cases were compared."""
        return self.done >= self.cases

    @property
    def stopped(self) -> bool:
        """True if Ctrl-C or SIGTERM stopped the run."""
        return self.signal != 0

    def __str__(self) -> str:
        outputs = self.done * self.op.m * self.op.n
        units = (describe_unit(self.op, side.target) for side in (self.left, self.right) if side.target is not None)
        lines = [
            str(self.op),
            *dict.fromkeys(unit for unit in units if unit),
            f"{self.left.name} and {self.right.name}, seed {self.seed}: {self.done:,} of {self.cases:,} cases",
        ]
        if self.wrong_cases:
            lines.append(f"{self.wrong_outputs:,} of {outputs:,} outputs differ, in {self.wrong_cases:,} cases")
        else:
            lines.append(f"0 mismatches of {outputs:,} outputs" if self.done else "nothing was compared")
        if self.by_kind is not None:
            parts = [
                f"{kind.name} {n:,}" + (f" ({wrong:,} differ)" if wrong else "")
                for kind, (n, wrong) in zip(self.kinds, self.by_kind, strict=True)
            ]
            lines.append("cases: " + ", ".join(parts))
        if self.coverage is not None and self.coverage.events.any():
            lines += coverage_lines(self.op, coverage_model(self.left, self.right), self.coverage)
        if self.first:
            lines.append(f"first cases that differ: {', '.join(map(str, self.first[:8]))}")
        if self.small_mismatch is not None:
            lines += ["", str(self.small_mismatch)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        found = f"{self.wrong_outputs:,} outputs differ" if self.wrong_cases else "0 mismatches" if self.done else "nothing compared"
        return f"<Run of {self.left.name} and {self.right.name} for {self.op}: {self.done:,} of {self.cases:,} cases, {found}>"

    def table(self) -> Table:
        """Make a table with a row per kind of cases.

        Returns:
            The table. Its facts are the request and the totals.
        """
        counts = np.zeros((len(self.kinds), 2), np.int64) if self.by_kind is None else self.by_kind
        request = (str(self.op), self.left.name, self.right.name, self.seed)
        rows = tuple((*request, kind.name, int(n), int(wrong)) for kind, (n, wrong) in zip(self.kinds, counts, strict=True))
        facts: dict[str, Any] = {name: getattr(self, name) for name in ("done", "wrong_cases", "wrong_outputs", "complete", "seconds")}
        facts |= {"cases_asked": self.cases, "outputs": self.done * self.op.m * self.op.n, "first_wrong_cases": list(self.first)}
        facts |= {"coverage": None if self.coverage is None or not self.coverage.cases[0] else self.coverage.records()}
        facts |= {"smallest_mismatch": None if self.small_mismatch is None else str(self.small_mismatch)}
        return Table(repr(self)[1:-1], ("op", "left", "right", "seed", "kind", "cases", "wrong_cases"), rows, facts)

    def case_operands(self, number: int) -> HostOperandCodes:
        """Generate the operands of one case.

        Args:
            number: Number of the case.

        Returns:
            NumPy codes by operand name, [1, ...].
        """
        codes = generate(self.op, self.seed, number, 1, kinds=[k.name for k in self.kinds], weights=[k.weight for k in self.kinds])
        return {name: np.asarray(x) for name, x in codes.items()}


class NotWritten(OSError):
    """The file of a run cannot be written. `run` is the run so far, with everything that was counted."""

    def __init__(self, message: str, run: FuzzRun) -> None:
        super().__init__(message)
        self.run = run


def coverage_model(left: Implementation, right: Implementation) -> Model | None:
    """Return the model whose steps coverage examines: the left implementation's, or the right one's if the left has none."""
    return left.model if left.model is not None else right.model


# ---- runs


def find_mismatches(
    op: str | Instruction,
    left: str | Implementation | Callable,
    right: str | Implementation | Callable,
    *,
    cases: int,
    seed: int = 0,
    out: str | os.PathLike | None = None,
    kinds: Sequence[str] | None = None,
    weights: Sequence[int] | None = None,
    iterations: int | None = None,
    devices: Sequence[Any] | None = None,
    report: OnProgress | None = None,
    coverage: bool = True,
    shrink: bool = True,
) -> FuzzRun:
    """Compare two implementations of one instruction on cases 0, 1, ... of a seed, as `tcemu.fuzz.generate` makes them.

    Ctrl-C, and SIGTERM if it is handled, end a run after a chunk, with its file written. A second Ctrl-C raises KeyboardInterrupt.

    Args:
        op: PTX spelling, short name or `Instruction` that computes.
        left: Specification, as `tcemu.fuzz.get_implementation` takes it: "sm_90a", "sm_90a:fraction_bits=24", "sm_90@12.6",
            "reference:sm_90a", "gpu", an `Implementation`, or a function from operands (NumPy codes) to D's codes.
        right: The same for the other implementation.
        cases: Number of cases.
        seed: Integer from 0 to 2^64 - 1.
        out: Directory for the run's file, run.npz. A run in it with the same arguments resumes where it stopped, for any reason. A run with
            fewer cases continues where it ended; coverage then examines every 16th case from there. A function resumes only as an
            `Implementation` with an `identity`. One run at a time can use the directory.
        kinds: Names from `tcemu.fuzz.KINDS`. None takes all kinds.
        weights: One weight per kind, in place of the kinds' own.
        iterations: Iterations of the compiled loop per call. None adapts the number to their time.
        devices: Devices that share the cases. None takes all of JAX's. If `jax.distributed` has several processes, all must call this
            function, and the first one owns the file.
        report: Function that receives a line of progress now and then.
        coverage: True counts what the cases reached.
        shrink: True shrinks the first mismatch.

    Returns:
        The run.

    Raises:
        Unsupported, NotModelled: An implementation does not have `op`.
        ValueError: An argument is invalid, or `out` holds another run (DamagedFile: not a run; FolderInUse: another process uses it).
        NotWritten: The file cannot be written. The error has the run so far.
    """
    op = require_product(resolve_common_op(op, left, right))
    for name, value, smallest, limit in (
        ("cases", cases, 1, 1 << 62),
        ("seed", seed, 0, 1 << 64),
        ("iterations", iterations or 1, 1, 1 << 31),
    ):
        if not isinstance(value, int | np.integer) or not smallest <= value < limit:
            raise ValueError(f"{name}: got {value}; expected an integer from {smallest} to {limit - 1}")
    request = FuzzRun(op, get_implementation(op, left), get_implementation(op, right), int(cases), int(seed), select_kinds(kinds, weights))
    used_devices = tuple(devices or jax.devices())
    processes = Processes(spans_processes(used_devices))
    with ExitStack() as stack:
        interrupts = stack.enter_context(defer_signals())
        state, path = (request, None) if out is None else _open_run(Path(out), request, processes, stack, report)
        if not state.complete:
            model = coverage_model(state.left, state.right) if coverage else None
            chunk = make_chunk_runner(op, state.left, state.right, state.kinds, model, used_devices)
            state = _advance(state, chunk, path, iterations, report, interrupts, processes)
        if state.first and shrink and not state.stopped:
            state = _shrink_first_mismatch(state, interrupts)
        return replace(state, signal=state.signal or interrupts.signal)


def _advance(
    state: FuzzRun,
    chunk: ChunkRunner,
    path: Path | None,
    fixed_iterations: int | None,
    report: OnProgress | None,
    interrupts: PendingSignal,
    processes: Processes,
) -> FuzzRun:
    """Continue the run to its end or to a signal. `path` is None except in the process that owns the file. Raises NotWritten."""
    clock, compiled = compile_clock(), 0.0
    compiled_before = clock.seconds
    if report is not None:
        report("compiling both implementations and the comparison")
    now = began = last_saved = last_reported = time.monotonic()
    done_before, seconds_before = state.done, state.seconds
    iterations, failure, stop = fixed_iterations or 1, None, 0
    try:
        while True:
            iterations, stop = processes.agree(iterations, interrupts.signal if failure is None else STOP_UNWRITABLE)
            if stop or state.complete:
                break
            counted, start = min(chunk.cases_per_iteration * iterations, state.cases - state.done), now
            state = add_chunk(state, chunk.compare(state.seed, state.done, counted, iterations))
            interrupts.busy = True
            now, first = time.monotonic(), not compiled
            compiled = clock.seconds - compiled_before
            if report is not None and first and compiled:
                report(f"compiled in {compiled:.1f} s")
            state = replace(state, seconds=seconds_before + now - began)
            if fixed_iterations is None and now - start < SHORT_CHUNK_SECONDS:
                iterations = min(2 * iterations, chunk.max_iterations)
            if path is not None and now - last_saved > SAVE_INTERVAL_SECONDS:
                failure, last_saved = try_save(path, state), now
            if report is not None and now - last_reported > 1:
                report(progress_line(state, done_before, now - began - compiled))
                last_reported = now
    except KeyboardInterrupt:  # a second one, or one raised by an implementation
        stop = SIGINT
    except Exception:  # raised by an implementation or by `report`; earlier counts are saved
        if path is not None:
            try_save(path, state)
        raise
    state = replace(state, signal=stop if stop < STOP_UNWRITABLE else 0)
    if path is not None and failure is None:
        failure = try_save(path, state)
    if failure is not None:
        raise NotWritten(str(failure), state) from failure
    if report is not None:
        report(progress_line(state, done_before, time.monotonic() - began - compiled))
    return state


def _shrink_first_mismatch(state: FuzzRun, interrupts: PendingSignal) -> FuzzRun:
    """Shrink the first mismatch, unless a signal arrives meanwhile."""

    def interruptible(implementation: Implementation) -> Implementation:
        def call(operands: Any) -> Any:
            if interrupts.signal:
                raise KeyboardInterrupt
            return implementation.fn(operands)

        return replace(implementation, fn=call)

    number = state.first[0]
    try:
        small = shrink_mismatch(state.op, interruptible(state.left), interruptible(state.right), state.case_operands(number), number)
    except KeyboardInterrupt:
        return replace(state, signal=interrupts.signal or SIGINT)
    return replace(state, small_mismatch=replace(small, left=state.left, right=state.right))


def add_chunk(state: FuzzRun, counts: ChunkCounts) -> FuzzRun:
    """Add the counts of one more chunk."""
    return replace(
        state,
        done=state.done + counts.cases,
        wrong_cases=state.wrong_cases + counts.wrong_cases,
        wrong_outputs=state.wrong_outputs + counts.wrong_outputs,
        first=(*state.first, *counts.first)[:MAX_MISMATCHES],
        by_kind=counts.by_kind if state.by_kind is None else state.by_kind + counts.by_kind,
        coverage=counts.coverage if state.coverage is None else state.coverage + counts.coverage,
    )


def progress_line(state: FuzzRun, before: int, seconds: float) -> str:
    """Format the progress: cases, rate and time left. `seconds` were spent on the cases after `before`, without compiling."""
    rate = (state.done - before) / max(seconds, 1e-9)
    left = (state.cases - state.done) / rate if rate else float("inf")
    share = state.done / max(state.cases, 1)
    end = "stopped" if state.stopped else "done" if state.complete else f"{format_duration(left)} left"
    return f"{state.done:,} of {state.cases:,} cases ({share:.1%}), {rate:,.0f} a second, {state.wrong_cases:,} differ, {end}"


def format_duration(seconds: float) -> str:
    """Format a length of time."""
    if seconds == float("inf"):
        return "unknown time"
    rounded = round(seconds)
    return f"{rounded} s" if rounded < 120 else f"{rounded // 60} min" if rounded < 7200 else f"{rounded / 3600:.1f} h"


# ---- saving and resuming


def run_identity(state: FuzzRun) -> Header:
    """Return the properties that two sessions of one run must share."""
    sides = (state.left, state.right)
    return {
        "format": FILE_FORMAT, "stream": OPERAND_STREAM, "op": str(state.op), "left": state.left.name, "right": state.right.name,
        "identities": [s.identity for s in sides], "models": [str(s.model) for s in sides],
        "cases": state.cases, "seed": state.seed, "kinds": [[kind.name, kind.weight] for kind in state.kinds],
    }  # fmt: skip


def run_file_content(state: FuzzRun, cases: bool = True) -> bytes:
    """Return the bytes of the run's file, with the first mismatches if `cases`."""
    header = run_identity(state) | {name: getattr(state, name) for name in ("done", "wrong_cases", "wrong_outputs", "first", "seconds")}
    arrays: dict[str, Any] = {}
    if state.by_kind is not None and state.coverage is not None:
        arrays = {"by_kind": state.by_kind} | {f"coverage_{name}": counts for name, counts in vars(state.coverage).items()}
    for number in state.first if cases else ():
        words = case_words(FuzzRun(state.op, state.left, state.right, state.cases, state.seed, state.kinds), number)
        arrays |= {f"case_{number}_{name}": codes for name, codes in words.items()}
    return pack_archive(header, arrays)


@lru_cache(maxsize=4 * MAX_MISMATCHES)
def case_words(request: FuzzRun, number: int) -> HostOperandCodes:
    """Return the operands and both results of one case, computed once and written every few seconds. `request` has no counts."""
    operands = request.case_operands(number)
    on_device = {name: jax.numpy.asarray(codes) for name, codes in operands.items()}
    results = {
        name: compute_result(request.op, compared, on_device) for name, compared in (("left", request.left), ("right", request.right))
    }
    return {name: np.asarray(codes)[0] for name, codes in (operands | results).items()}


def try_save(path: Path, state: FuzzRun) -> OSError | None:
    """Write the run's file, with the operands and results of the first mismatches, or return why it cannot be written."""
    try:
        replace_file(path, run_file_content(state))
    except OSError as error:
        return OSError(f"out: {path} cannot be written: {error.strerror or error}. It is unchanged; free space or choose another folder")
    return None


def read_run_header(path: str | os.PathLike) -> Header:
    """Read the header of a run's file.

    Args:
        path: The file, or the directory that holds it.

    Returns:
        The header.

    Raises:
        DamagedFile: The file is damaged, or is not a run's file.
        OSError: The file cannot be read.
    """
    path = Path(path)
    path = path / RUN_FILE if path.is_dir() else path
    return parse_run(read_run_file(path), path)[0]


def _open_run(
    folder: Path, request: FuzzRun, processes: Processes, stack: ExitStack, report: OnProgress | None
) -> tuple[FuzzRun, Path | None]:
    """Open or begin the run of a folder. Returns the run and its file's path, locked until `stack` closes."""
    path = folder / RUN_FILE

    def open_in_first() -> bytes:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            alone = stack.enter_context(lock_folder(folder))
        except OSError as error:
            raise NotWritten(f"out: {folder} cannot be used: {error.strerror or error}; choose another directory", request) from error
        if report is not None and not alone:
            report(f"{folder}: this file system has no locks; let no other run write there")
        if report is not None and None in run_identity(request)["identities"]:
            report("this run cannot resume: an implementation is a function without an identity; see tcemu.fuzz.Implementation")
        state = _resume_run(path, request) if os.path.lexists(path) else request
        remove_leftovers(path)
        failure = try_save(path, state) if not state.done else None  # found before hours of work
        if failure is None and not state.complete and not os.access(folder, os.W_OK):
            failure = OSError(f"out: {folder} cannot be written: Permission denied")
        if failure is not None:
            raise NotWritten(str(failure), state) from failure
        return run_file_content(state, cases=False)

    content = processes.broadcast_from_first(open_in_first)
    return _restore_run(*parse_run(content, path), request), path if processes.is_first else None


def _resume_run(path: Path, request: FuzzRun) -> FuzzRun:
    """Return the run that the file holds.

    Raises:
        DamagedFile: The file is damaged.
        OSError: The file cannot be read.
        ValueError: The file holds another run, or an implementation has no identity.
    """
    header, counts = parse_run(read_run_file(path), path)
    expected = json.loads(json.dumps(run_identity(request)))  # through JSON, like the file
    extended = expected["cases"] > header["cases"]
    same = {name: value for name, value in expected.items() if not (extended and name == "cases")}
    differences = [f"{name} is {header.get(name)!r} there and {value!r} here" for name, value in same.items() if header.get(name) != value]
    if differences:
        raise ValueError(f"out: {path} holds another run: {'; '.join(differences)}. Choose another directory, or the same arguments")
    unknown = [side.name for side in (request.left, request.right) if side.identity is None]
    if unknown:
        raise ValueError(
            f"out: {path} holds a run that cannot resume: {unknown[0]} is a function, which cannot be told from another one of that name. "
            f"Start with tcemu.fuzz.Implementation({unknown[0]!r}, function, traceable=False, identity=...), whose identity changes when "
            f"the function does; {ADVICE}"
        )
    return _restore_run(header, counts, request)


def _restore_run(header: Header, counts: dict[str, np.ndarray], request: FuzzRun) -> FuzzRun:
    """Return the run with the state of a header and counts."""
    numbers = {name: header[name] for name in ("done", "wrong_cases", "wrong_outputs", "seconds")}
    reached = Coverage(*(counts[f"coverage_{name}"] for name in SIZES)) if counts else None
    return replace(request, **numbers, first=tuple(header["first"]), by_kind=counts.get("by_kind"), coverage=reached)


# ---- contents of the run file


def read_run_file(path: Path) -> bytes:
    """Read the bytes of a run's file. Raises DamagedFile if it is too large or is not a file, and OSError."""
    size = path.stat().st_size
    if not path.is_file():
        raise DamagedFile(f"out: {path} is not a file; {ADVICE}")
    if size > MAX_FILE_BYTES:
        raise DamagedFile(f"out: {path} has {size:,} bytes, more than a run's file can have, {MAX_FILE_BYTES:,}; {ADVICE}")
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES)


def parse_run(content: bytes, path: Path) -> tuple[Header, Arrays]:
    """Return the header and the counts by name. Raises DamagedFile with the reason.

    The operands of mismatches are in the file for people. They are generated again, not read.
    """
    try:
        header, members = unpack_archive(content, MEMBER_NAMES, skipped="case_")
        _check_header(header)
        shapes = {"by_kind": (len(header["kinds"]), 2)}
        shapes |= {f"coverage_{name}": (size,) for name, size in SIZES.items()}
        counts = {name: read_array(data, np.int64, shapes[name]) for name, data in members.items()}
        _check_counts(header, counts, set(shapes))
    except Exception as error:  # a hostile file finds more ways to fail than can be listed
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise DamagedFile(f"out: {path} is damaged, or no run's file: {reason}; {ADVICE}") from error
    return header, counts


def _check_header(header: Any) -> None:
    """Raise ValueError or KeyError if no run can have written the header."""
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    if header["format"] != FILE_FORMAT:
        raise ValueError(f"its format is {header['format']!r:.40}, and this tcemu reads {FILE_FORMAT}")

    def is_count(value):
        return type(value) is int and 0 <= value < 1 << 64

    def pair(value):
        return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)

    names = ("cases", "seed", "done", "wrong_cases", "wrong_outputs")
    wrong = [name for name in names if not is_count(header[name])]
    wrong += [name for name in ("op", "left", "right") if not isinstance(header[name], str)]
    kinds, first, seconds = header["kinds"], header["first"], header["seconds"]
    if not isinstance(kinds, list) or not kinds or not all(pair(kind) and is_count(kind[1]) for kind in kinds):
        wrong.append("kinds")
    if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
        wrong.append("seconds")
    if not isinstance(first, list) or not all(map(is_count, first)) or first != sorted(set(first)):
        wrong.append("first")
    if wrong:
        raise ValueError(f"the header's {wrong[0]} is {str(header[wrong[0]])[:80]}, which no run writes")
    if header["done"] > header["cases"]:
        raise ValueError(f"it says that {header['done']:,} of {header['cases']:,} cases are done")
    within = header["wrong_cases"] <= min(header["done"], header["wrong_outputs"]) and all(number < header["done"] for number in first)
    if (
        not within
        or bool(header["wrong_outputs"]) != bool(header["wrong_cases"])
        or len(first) != min(header["wrong_cases"], MAX_MISMATCHES)
    ):
        raise ValueError("the header's counts do not fit each other")


def _check_counts(header: Header, counts: Arrays, names: set[str]) -> None:
    """Raise ValueError if the counts do not fit the header."""
    missing = names - counts.keys()
    if missing and (header["done"] or counts):
        raise ValueError(f"{min(missing)} is missing")
    if any((array < 0).any() for array in counts.values()):
        raise ValueError("a count is negative")
    if counts:
        by_kind = [sum(column) for column in zip(*counts["by_kind"].tolist(), strict=True)]
        if by_kind != [header["done"], header["wrong_cases"]] or counts["coverage_cases"][0] > header["done"]:
            raise ValueError(f"cases by kind, {by_kind}, are not those of the header, {[header['done'], header['wrong_cases']]}")
