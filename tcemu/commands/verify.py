"""`tcemu verify` and `tcemu record`: the emulation held to the GPU that is here, and that GPU's words written down."""

import argparse
import io
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
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread, local
from typing import Any

import jax
import numpy as np

from tcemu.commands import CommandError
from tcemu.commands.fuzz import number, positive
from tcemu.files import locked, replace_file, sweep
from tcemu.isa.catalog import check
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import Instruction
from tcemu.silicon.gpu import Gpu, Runner, gpu
from tcemu.verification import FAMILIES, WGMMA_N, Verified, alike, recorded, spelled, verified

STATE, TABLE = "verify.json", "verify.txt"
Rows = dict[str, Verified]
Report = Callable[[str], None]


def add_verify(subparsers) -> None:
    """Adds the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "verify",
        description="Runs every spelling of the families on the NVIDIA GPU that is here and on the emulation of its target, with generated "
        "operands, and compares all words. With --out the same words go on where it stopped.",
        epilog="example: tcemu verify mma mma.sp --outputs 1e8 --jobs 8 --out verified/",
    )
    _add_shared(parser)
    parser.add_argument("--outputs", type=positive, default=10**7, help="to compare, over all spellings (default: 1e7)")
    parser.add_argument("--out", metavar="DIRECTORY", help=f"hold the results there, {STATE}, and the record, {TABLE}")
    parser.add_argument("--jobs", type=positive, default=1, help="processes that share the GPU (default: 1); most of the time compiles")
    parser.set_defaults(run=verify)


def add_record(subparsers) -> None:
    """Adds the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "record",
        description="Runs every spelling of the families on the NVIDIA GPU that is here and writes the words of the operands and results: "
        "an .npz file of uint32 arrays NUMBER_NAME, and a JSON header with the cases, device, driver, compiler and date.",
        epilog="example: tcemu record mma --cases 16 --out mma.npz",
    )
    _add_shared(parser)
    parser.add_argument("--cases", type=positive, default=8, help="warps, or warpgroups, of each variant of each spelling (default: 8)")
    parser.add_argument("--out", metavar="FILE", required=True, help="such as words.npz")
    parser.set_defaults(run=record)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    """The arguments that both commands take."""
    parser.add_argument("what", metavar="FAMILY|OP", nargs="+", help=f"PTX spellings, families, or all; {', '.join(FAMILIES)}")
    parser.add_argument("--seed", type=number, default=0, help="of the operands (default: 0)")
    parser.add_argument("--n", metavar="N,...|all", default=",".join(map(str, WGMMA_N)), help="wgmma's sizes N (default: %(default)s)")


def verify(args: argparse.Namespace) -> int:
    """Does what the words say; 1 if something differs. Raises CommandError."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share one GPU's memory
    try:
        runner = gpu()
        report = lambda line: print(line, flush=True)  # noqa: E731
        with to_itself(args.out):
            results = compared(asked(args, runner), runner, args.outputs, args.seed, args.out, args.jobs, report)
    except (ValueError, TypeError, OSError) as error:
        raise CommandError(str(error)) from error
    return int(any(row.mismatches or row.failed or not row.outputs + row.undefined for row in results.values()))


@contextmanager
def to_itself(out: str | None) -> Iterator[None]:
    """The directory of the results, made, and locked against another run. Raises InUse and OSError."""
    if out is None:
        yield
        return
    Path(out).mkdir(parents=True, exist_ok=True)
    with locked(Path(out)):
        for name in (STATE, TABLE):
            sweep(Path(out) / name)
        yield


def record(args: argparse.Namespace) -> int:
    """Does what the words say. Raises CommandError."""
    try:
        runner = gpu()
        written(asked(args, runner), runner, args.cases, args.seed, Path(args.out))
    except (ValueError, TypeError, OSError) as error:
        raise CommandError(str(error)) from error
    return 0


def asked(args: argparse.Namespace, runner: Runner) -> tuple[Instruction, ...]:
    """The instructions that the words name, each once."""
    try:
        sizes = None if args.n == "all" else tuple(map(int, args.n.split(",")))
    except ValueError as error:
        raise CommandError(f"--n {args.n}: sizes with commas between, or all, are wanted") from error
    ops: dict[Instruction, None] = {}
    for word in args.what:
        named = spelled(runner.target, word, sizes) if word in (*FAMILIES, "all") else (check(parse(word), runner.target),)
        if not named:
            raise CommandError(f"{word}: {runner.name}, {runner.target}, has none that tcemu models")
        ops |= dict.fromkeys(named)
    return tuple(ops)


def compared(ops: tuple[Instruction, ...], runner: Runner, outputs: int, seed: int, out: str | None, jobs: int, report: Report) -> Rows:
    """Each spelling's result; those that `out` holds are not made again. More than one job: processes, on the GPU that is here."""
    share = -(-outputs // len(ops))
    facts = runner.facts() | {"tcemu": _version(), "jax": jax.__version__}
    question = {"seed": seed, "outputs a spelling": share, "device": facts["device"], "target": facts["target"], "tcemu": facts["tcemu"]}
    rows = _held(Path(out), question) if out else {}
    left = [op for op in ops if str(op) not in rows]
    for done in _each(left, share, seed, runner, jobs):
        for row in done:
            rows[row.op] = row
            report("\n".join(line for line in (f"{row.op}: {counted(row)}", row.said) if line))
        if out:
            _hold(Path(out), question, facts, rows)
    chosen = {str(op): rows[str(op)] for op in ops if str(op) in rows}
    report(_total(chosen, facts, seed))
    return chosen


def _each(ops: list[Instruction], share: int, seed: int, runner: Runner, jobs: int) -> Iterator[list[Verified]]:
    """The results, as they come; spellings that share a compiled emulation are done together, the longest work first."""
    shared = lambda op: str(alike(op))  # noqa: E731
    groups = [list(group) for _, group in groupby(sorted(ops, key=lambda op: (-op.m * op.n * max(op.k, 1), shared(op))), shared)]
    if not isinstance(runner, Gpu):
        yield from ([verified(op, runner, share, seed) for op in group] for group in groups)
        return
    pools = local()
    with ThreadPoolExecutor(jobs) as threads:
        waiting = [threads.submit(_in_process, pools, group, share, seed) for group in groups]
        try:
            for future in as_completed(waiting):
                yield future.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _in_process(pools: Any, group: list[Instruction], share: int, seed: int) -> list[Verified]:
    """By the process of this thread; after an error by a new one, since a fault of the GPU is the end of the process that met it."""
    results = []
    for op in group:
        pool = getattr(pools, "own", None) or ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_with_its_parent)
        pools.own = pool
        try:
            results.append(pool.submit(_work, str(op), share, seed).result())
        except Exception as error:
            pool.shutdown(wait=False, cancel_futures=True)
            pools.own = None
            failure = f"{type(error).__name__}: {error}"
            results.append(Verified(op=str(op), family=op.family, outputs=0, mismatches=0, variants=0, failed=failure))
    return results


def _with_its_parent() -> None:
    """A process of the pool leaves Ctrl-C to its parent, whose end, however it comes, is its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()

    def end() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=end, daemon=True).start()


def _work(spelling: str, share: int, seed: int) -> Verified:
    return verified(parse(spelling), gpu(), share, seed)


def counted(row: Verified) -> str:
    """What came of one spelling, in words."""
    if row.failed:
        return f"failed: {row.failed}"
    apart = f"; with undefined metadata {row.undefined_mismatches:,} of {row.undefined:,} differ" if row.undefined else ""
    return f"{row.mismatches:,} mismatches of {row.outputs:,}{apart}"


# ---- what is held


def _held(directory: Path, question: dict[str, Any]) -> Rows:
    path = directory / STATE
    if not path.exists():
        return {}
    try:
        held = json.loads(path.read_text())
        there, rows = held["question"], [Verified(**row) for row in held["rows"]]
        if not isinstance(there, dict) or not all(isinstance(row.op, str) and row.family in FAMILIES for row in rows):
            raise ValueError("its rows are none of a comparison")
        counts = [
            row._asdict()[name] for row in rows for name in ("outputs", "mismatches", "variants", "undefined", "undefined_mismatches")
        ]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("a count is none")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CommandError(f"--out {directory}: {path} is damaged: {error}. Choose another directory, or move the file away") from error
    if there != question:
        differences = "; ".join(f"{name} is {there.get(name)!r} there and {question[name]!r} here" for name in question)
        raise CommandError(f"--out {directory} holds another comparison: {differences}. Choose another directory, or ask the same")
    return {row.op: row for row in rows if not row.failed}


def _hold(directory: Path, question: dict[str, Any], facts: dict[str, str], rows: Rows) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    held = {"question": question, "facts": facts, "rows": [row._asdict() for row in rows.values()]}
    replace_file(directory / STATE, json.dumps(held, indent=1).encode())
    replace_file(directory / TABLE, table(rows, facts, question["seed"]).encode())


def table(rows: Rows, facts: dict[str, str], seed: int) -> str:
    """The record as text: a header, a line a family, a line a spelling."""
    lines = [_total(rows, facts, seed), ""]
    families = {row.family: None for row in rows.values()}
    for family in sorted(families, key=FAMILIES.index):
        own = sorted((row for row in rows.values() if row.family == family), key=lambda row: row.op)
        lines.append(f"{family}: {len(own)} spellings, {sum(r.mismatches for r in own):,} mismatches of {sum(r.outputs for r in own):,}")
        lines += [f"  {row.op} ({row.variants} variants): {counted(row)}" for row in own]
        lines.append("")
    return "\n".join(lines)


def _total(rows: Rows, facts: dict[str, str], seed: int) -> str:
    results = rows.values()
    wrong, total = sum(row.mismatches for row in results), sum(row.outputs for row in results)
    failed = sum(bool(row.failed) for row in results)
    undefined_wrong, undefined = sum(row.undefined_mismatches for row in results), sum(row.undefined for row in results)
    apart = f"; {failed} of them failed" if failed else ""
    apart += f"\nwith undefined metadata, counted apart, {undefined_wrong:,} of {undefined:,} differ" if undefined else ""
    where = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"{wrong:,} mismatches of {total:,} outputs, {len(rows):,} spellings{apart}\n{where}, {_today()}, seed {seed}"


def written(ops: tuple[Instruction, ...], runner: Runner, cases: int, seed: int, path: Path) -> None:
    """The golden file of these instructions."""
    index, arrays = [], {}
    for op in ops:
        for entry, words in recorded(op, runner, cases, seed):
            index.append({"i": len(index), **entry})
            arrays |= {f"{len(index) - 1:04d}_{name}": x for name, x in words.items()}
    header = {**runner.facts(), "tcemu": _version(), "date": _today(), "seed": seed, "cases": index}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, header=np.frombuffer(json.dumps(header, indent=1).encode(), np.uint8), **arrays)
    replace_file(path, buffer.getvalue())
    print(f"{len(index)} cases of {len(ops)} spellings in {path}", file=sys.stderr)


def _today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def _version() -> str:
    try:
        return version("tcemu")
    except PackageNotFoundError:
        return "not installed"
