"""`tcemu verify` compares the emulation with the GPU of this machine; `tcemu record` writes the words that the GPU gives."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from math import prod
from multiprocessing import get_context, parent_process
from pathlib import Path
from re import findall
from threading import Thread, local
from typing import Any

import jax

from tcemu.base.files import lock_folder, remove_leftovers, replace_file
from tcemu.base.plain_values import from_plain
from tcemu.base.saved_files import check_members, pack_archive, parse_json
from tcemu.engine.backends.native.gpu_runner import Gpu, Runner, gpu
from tcemu.engine.isa.families import Instruction
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.legality import check
from tcemu.faces.commands import CommandError, command_errors
from tcemu.faces.commands.arguments import parse_count, parse_positive_count
from tcemu.uses.fuzz.verification import FAMILIES, WGMMA_N, Verification, emulation_key, list_spellings, record_cases, verify_instruction

STATE_FILE, RECORD_FILE = "verify.json", "verify.txt"
Rows = dict[str, Verification]
Report = Callable[[str], None]


def add_verify(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "verify",
        description="Runs every spelling of the families on the NVIDIA GPU of this machine and on the emulation of its target, "
        "with generated operands, and compares all words. With --out, the same command continues a run that was stopped.",
        epilog="example: tcemu verify mma mma.sp --outputs 1e8 --jobs 8 --out verified/",
    )
    _add_common_arguments(parser)
    parser.add_argument("--outputs", type=parse_positive_count, default=10**7, help="outputs to compare, over all spellings (default: 1e7)")
    parser.add_argument("--out", metavar="DIRECTORY", help=f"store the results there ({STATE_FILE}), and the record ({RECORD_FILE})")
    parser.add_argument(
        "--jobs",
        type=parse_positive_count,
        default=1,
        help="processes that share the GPU (default: 1); most of the time is spent compiling",
    )
    parser.set_defaults(run=_run_verify)


def add_record(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "record",
        description="Runs every spelling of the families on the NVIDIA GPU of this machine and writes the words of operands and results: "
        "an .npz file of uint32 arrays NUMBER_NAME, and a JSON header with the cases, device, driver, compiler and date.",
        epilog="example: tcemu record mma --cases 16 --out mma.npz",
    )
    _add_common_arguments(parser)
    parser.add_argument(
        "--cases", type=parse_positive_count, default=8, help="warps or warpgroups per variant of each spelling (default: 8)"
    )
    parser.add_argument("--out", metavar="FILE", required=True, help="the file, such as words.npz")
    parser.set_defaults(run=_run_record)


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of both commands."""
    parser.add_argument("what", metavar="FAMILY|OP", nargs="+", help=f"PTX spellings, families, or all; {', '.join(FAMILIES)}")
    parser.add_argument("--seed", type=parse_count, default=0, help="seed of the operands (default: 0)")
    parser.add_argument("--n", metavar="N,...|all", default=",".join(map(str, WGMMA_N)), help="wgmma's sizes N (default: %(default)s)")


def _run_verify(args: argparse.Namespace) -> int:
    """Return the exit status: 1 if something differs."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share one GPU's memory
    with command_errors(ValueError, TypeError, OSError):
        runner = gpu()
        report = lambda line: print(line, flush=True)
        with lock_directory(args.out):
            results = verify_instructions(
                requested_instructions(args, runner), runner, args.outputs, args.seed, args.out, args.jobs, report
            )
    return int(any(row.mismatches or row.failed or not row.outputs + row.undefined for row in results.values()))


@contextmanager
def lock_directory(out: str | None) -> Iterator[None]:
    """Create the directory of the results and lock it against another run.

    Raises:
        InUse: Another run has the directory.
        OSError: The directory cannot be created.
    """
    if out is None:
        yield
        return
    Path(out).mkdir(parents=True, exist_ok=True)
    with lock_folder(Path(out)):
        for name in (STATE_FILE, RECORD_FILE):
            remove_leftovers(Path(out) / name)
        yield


def _run_record(args: argparse.Namespace) -> int:
    with command_errors(ValueError, TypeError, OSError):
        runner = gpu()
        write_recording(requested_instructions(args, runner), runner, args.cases, args.seed, Path(args.out))
    return 0


def requested_instructions(args: argparse.Namespace, runner: Runner) -> tuple[Instruction, ...]:
    """The instructions that the arguments name, each once."""
    try:
        sizes = None if args.n == "all" else tuple(map(int, args.n.split(",")))
    except ValueError as error:
        raise CommandError(f"--n {args.n}: expected sizes separated by commas, or all") from error
    ops: dict[Instruction, None] = {}
    for word in args.what:
        named = list_spellings(runner.target, word, sizes) if word in (*FAMILIES, "all") else (check(word, runner.target),)
        if not named:
            raise CommandError(f"{word}: {runner.name}, {runner.target}, has no such instruction that tcemu models")
        ops |= dict.fromkeys(named)
    return tuple(ops)


def verify_instructions(
    ops: tuple[Instruction, ...], runner: Runner, outputs: int, seed: int, out: str | None, jobs: int, report: Report
) -> Rows:
    """Verify each instruction and report its result. Results stored in `out` are reused; several jobs are processes that share the GPU."""
    share = -(-outputs // len(ops))
    facts = runner.facts() | {"tcemu": _version(), "jax": jax.__version__}
    question = {"seed": seed, "outputs a spelling": share, "device": facts["device"], "target": facts["target"], "tcemu": facts["tcemu"]}
    rows = _load_results(Path(out), question) if out else {}
    left = [op for op in ops if str(op) not in rows]
    for done in _verify_groups(left, share, seed, runner, jobs):
        for row in done:
            rows[row.op] = row
            report("\n".join(line for line in (f"{row.op}: {outcome_text(row)}", row.message) if line))
        if out:
            _save_results(Path(out), question, facts, rows)
    chosen = {str(op): rows[str(op)] for op in ops if str(op) in rows}
    report(_total_line(chosen, facts, seed))
    return chosen


def _work_size(op: Instruction) -> int:
    """The numbers in an instruction's shape, multiplied."""
    return prod(map(int, findall(r"\d+", op.shape)))


def _verify_groups(ops: list[Instruction], share: int, seed: int, runner: Runner, jobs: int) -> Iterator[list[Verification]]:
    """Yield results as they arrive. Spellings that share a compiled emulation form a group; the largest groups come first."""
    shared = lambda op: str(emulation_key(op))
    groups = [list(group) for _, group in groupby(sorted(ops, key=lambda op: (-_work_size(op), shared(op))), shared)]
    if not isinstance(runner, Gpu):
        yield from ([verify_instruction(op, runner, share, seed) for op in group] for group in groups)
        return
    pools = local()
    with ThreadPoolExecutor(jobs) as threads:
        waiting = [threads.submit(_verify_in_process, pools, group, share, seed) for group in groups]
        try:
            for future in as_completed(waiting):
                yield future.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _verify_in_process(pools: Any, group: list[Instruction], share: int, seed: int) -> list[Verification]:
    """Verify a group in the process of this thread, and in a new one after an error, since a fault of the GPU ends its process."""
    results = []
    for op in group:
        pool = getattr(pools, "own", None) or ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_exit_with_parent)
        pools.own = pool
        try:
            results.append(pool.submit(_verify_one, str(op), share, seed).result())
        except Exception as error:
            pool.shutdown(wait=False, cancel_futures=True)
            pools.own = None
            failure = f"{type(error).__name__}: {error}"
            results.append(Verification(op=str(op), family=op.family, outputs=0, mismatches=0, variants=0, failed=failure))
    return results


def _exit_with_parent() -> None:
    """Initialise a process of the pool: ignore Ctrl-C, and exit when the parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()

    def end() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=end, daemon=True).start()


def _verify_one(spelling: str, share: int, seed: int) -> Verification:
    return verify_instruction(parse(spelling), gpu(), share, seed)


def outcome_text(row: Verification) -> str:
    """The result of one spelling in words."""
    if row.failed:
        return f"failed: {row.failed}"
    apart = f"; with undefined metadata {row.undefined_mismatches:,} of {row.undefined:,} differ" if row.undefined else ""
    return f"{row.mismatches:,} mismatches of {row.outputs:,}{apart}"


def _load_results(directory: Path, question: dict[str, Any]) -> Rows:
    path = directory / STATE_FILE
    if not path.exists():
        return {}
    try:
        held = check_members("the file", parse_json(path.read_bytes()), ("question", "facts", "rows"))
        there, rows = (from_plain(name, kind, held[name]) for name, kind in (("question", dict), ("rows", list[Verification])))
        if any(row.family not in FAMILIES or any(isinstance(fact, int) and fact < 0 for fact in row) for row in rows):
            raise ValueError("its rows are none of a comparison")
    except (ValueError, RecursionError) as error:
        raise CommandError(f"--out {directory}: {path} is damaged: {error}. Choose another directory, or move the file away") from error
    if there != question:
        differences = "; ".join(f"{name} is {there.get(name)!r} there and {question[name]!r} here" for name in question)
        raise CommandError(f"--out {directory} stores another comparison: {differences}. Choose another directory, or ask the same")
    return {row.op: row for row in rows if not row.failed}


def _save_results(directory: Path, question: dict[str, Any], facts: dict[str, str], rows: Rows) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    held = {"question": question, "facts": facts, "rows": [row._asdict() for row in rows.values()]}
    replace_file(directory / STATE_FILE, json.dumps(held, indent=1).encode())
    replace_file(directory / RECORD_FILE, record_text(rows, facts, question["seed"]).encode())


def record_text(rows: Rows, facts: dict[str, str], seed: int) -> str:
    """The record as text: a header, a line per family, a line per spelling."""
    lines = [_total_line(rows, facts, seed), ""]
    families = {row.family: None for row in rows.values()}
    for family in sorted(families, key=FAMILIES.index):
        own = sorted((row for row in rows.values() if row.family == family), key=lambda row: row.op)
        lines.append(f"{family}: {len(own)} spellings, {sum(r.mismatches for r in own):,} mismatches of {sum(r.outputs for r in own):,}")
        lines += [f"  {row.op} ({row.variants} variants): {outcome_text(row)}" for row in own]
        lines.append("")
    return "\n".join(lines)


def _total_line(rows: Rows, facts: dict[str, str], seed: int) -> str:
    results = rows.values()
    wrong, total = sum(row.mismatches for row in results), sum(row.outputs for row in results)
    failed = sum(bool(row.failed) for row in results)
    undefined_wrong, undefined = sum(row.undefined_mismatches for row in results), sum(row.undefined for row in results)
    apart = f"; {failed} of them failed" if failed else ""
    apart += f"\nwith undefined metadata, counted apart, {undefined_wrong:,} of {undefined:,} differ" if undefined else ""
    where = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"{wrong:,} mismatches of {total:,} outputs, {len(rows):,} spellings{apart}\n{where}, {_today()}, seed {seed}"


def write_recording(ops: tuple[Instruction, ...], runner: Runner, cases: int, seed: int, path: Path) -> None:
    """Record the words of these instructions and write the file."""
    index, arrays = [], {}
    for op in ops:
        for entry, words in record_cases(op, runner, cases, seed):
            index.append({"i": len(index), **entry})
            arrays |= {f"{len(index) - 1:04d}_{name}": x for name, x in words.items()}
    header = {**runner.facts(), "tcemu": _version(), "date": _today(), "seed": seed, "cases": index}
    replace_file(path, pack_archive(header, arrays))
    print(f"{len(index)} cases of {len(ops)} spellings in {path}", file=sys.stderr)


def _today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def _version() -> str:
    try:
        return version("tcemu")
    except PackageNotFoundError:
        return "not installed"
