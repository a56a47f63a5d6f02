"""`tcemu fuzz` compares two implementations on many cases; `tcemu infer` finds the arithmetic of a black box."""

import argparse
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from tcemu.base.files import replace_file
from tcemu.base.progress import ProgressLine
from tcemu.engine.architectures.lookup import COMPUTING_FAMILIES
from tcemu.engine.isa.legality import instructions, min_version, targets
from tcemu.engine.isa.targets import DEFAULT_TARGET
from tcemu.faces.commands import EXAMPLE_SPELLING, OP_HELP, CommandError, command_errors
from tcemu.faces.commands.arguments import parse_count, parse_positive_count
from tcemu.uses.fuzz.case_kinds import KINDS, MAX_WEIGHT
from tcemu.uses.fuzz.differential_run import RUN_FILE, FuzzRun, NotWritten, find_mismatches, format_duration, read_run_header
from tcemu.uses.fuzz.implementations import GPU, REFERENCE, canonical_spec, resolve_common_op, split_spec
from tcemu.uses.fuzz.model_inference import infer_model

REPORT_FILE = "report.txt"
SIDE_HELP = (
    'a target (H100, sm_90a), one with changes (sm_90a:fraction_bits=24,terms=8), an older lowering (sm_90@12.6), or "reference:sm_90a"'
)


def add_fuzz(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "fuzz",
        description="Compares two implementations on generated operands of one instruction, or of all common "
        "instructions of a family: counts the differences, makes the first mismatch small, explains it, and reports what the "
        "cases reached. Ctrl-C stops it; with --out, the same command or --resume continues.",
        epilog=f"example: tcemu fuzz {EXAMPLE_SPELLING} --left sm_80 --right sm_90a --cases 1e5",
    )
    parser.add_argument("op", metavar="OP", nargs="?", help=f"{OP_HELP}, or a family: {', '.join(COMPUTING_FAMILIES)}")
    parser.add_argument("--left", help=SIDE_HELP)
    parser.add_argument("--right", help="the same, or gpu")
    parser.add_argument("--cases", type=parse_positive_count, help="cases to compare, such as 1e6 (default: 1e5); the total for a family")
    parser.add_argument("--seed", type=parse_count, help="seed of the operands (default: 0)")
    parser.add_argument(
        "--kind", action="append", metavar="KIND[=WEIGHT]", help=f"kind of cases and its weight: {', '.join(kind.name for kind in KINDS)}"
    )
    parser.add_argument(
        "--out", metavar="DIRECTORY", help=f"store the run there, so that it can be continued or extended, with {REPORT_FILE} for people"
    )
    parser.add_argument("--resume", metavar="DIRECTORY", help="continue the run stored there; with --cases, up to that many")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(run=_run_fuzz)


def add_infer(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "infer",
        description="Treats a target as a black box and finds by probes how it adds: terms of a step, fraction bits, order, rounding, "
        "floor. Prints the model with its evidence and compares it with the black box.",
        epilog=f"example: tcemu infer {EXAMPLE_SPELLING} --target sm_90a",
    )
    parser.add_argument("op", metavar="OP", help=OP_HELP)
    help_text = f"{SIDE_HELP}, or gpu (default: {DEFAULT_TARGET})"
    parser.add_argument("--target", dest="box", metavar="TARGET", default=DEFAULT_TARGET, help=help_text)
    parser.add_argument(
        "--cases", type=parse_positive_count, default=512, help="cases on which the model is compared with the black box (default: 512)"
    )
    parser.set_defaults(run=_run_infer)


def _run_fuzz(args: argparse.Namespace) -> int:
    """Return the exit status: 1 if something differs."""
    use_one_device_per_core()
    status, lines = 0, []
    try:
        runs = resumed_arguments(args) if args.resume else fuzz_arguments(args)
        several = len(runs) > 1
        progress = SpellingProgress(len(runs), sys.stderr) if several and not args.quiet else None
        report = None if args.quiet or several else lambda line: print(line, file=sys.stderr, flush=True)
        for number, arguments in enumerate(runs):
            if progress is not None and jax.process_index() == 0:
                progress.show(number)
            outcome = find_mismatches(**arguments, report=report)
            if jax.process_index() == 0:  # one of several processes prints
                lines.append(summary_line(outcome))
                if progress is not None:
                    progress.clear()
                print(lines[-1] if several else outcome, flush=True)
                if arguments["out"]:
                    write_report(Path(arguments["out"]), str(outcome))
            status = max(status, int(outcome.wrong_cases > 0))
            if outcome.stopped:
                print(f"stopped; {'the same command continues' if arguments['out'] else 'nothing was stored; --out stores a run'}")
                return 128 + outcome.signal
        if several and jax.process_index() == 0 and (folder := args.out or args.resume):
            write_report(Path(folder), "\n".join(lines))
    except NotWritten as error:
        try:
            print(error.run, flush=True)
        finally:  # even if it cannot be printed, as on the same full disk
            raise CommandError(str(error)) from error
    except (ValueError, TypeError, OSError) as error:
        raise CommandError(str(error)) from error
    return status


def write_report(folder: Path, report: str) -> None:
    """Write the report of a run, or of a family of runs, next to its file.

    Raises:
        CommandError: The report cannot be written.
    """
    try:
        replace_file(folder / REPORT_FILE, f"{report}\n".encode())
    except OSError as error:
        raise CommandError(
            f"--out {folder}: {REPORT_FILE} cannot be written: {error.strerror or error}; the run's own file is complete"
        ) from error


class SpellingProgress(ProgressLine):
    """Progress in spellings of a family."""

    def show(self, done: int) -> None:
        """Report the number of finished spellings."""
        left = f", {format_duration(self.elapsed / done * (self.total - done))} left" if done else ""
        self.update(f"{done} of {self.total} spellings{left}")


def use_one_device_per_core() -> None:
    """Make each core of a CPU a device, so that the cores share the cases. No effect if JAX is already initialised."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", cores)


def fuzz_arguments(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The arguments of `find_mismatches` for each instruction."""
    if not args.op or not args.left or not args.right:
        raise CommandError("nothing to compare: give OP, --left and --right, or --resume DIRECTORY")
    ops = (
        family_instructions(args.op, args.left, args.right)
        if args.op in COMPUTING_FAMILIES
        else [resolve_common_op(args.op, args.left, args.right)]
    )
    cases, names, weights = 100_000 if args.cases is None else args.cases, None, None
    if args.kind:
        names, weights = map(list, zip(*map(parse_kind, args.kind), strict=True))
    share = -(-cases // len(ops))
    out = lambda op: args.out if args.out is None or len(ops) == 1 else str(Path(args.out) / re.sub(r"\W+", "_", str(op)))
    return [
        {"op": op, "left": args.left, "right": args.right, "cases": share, "seed": args.seed or 0, "out": out(op), "kinds": names,
         "weights": weights} for op in ops
    ]  # fmt: skip


def parse_kind(text: str) -> tuple[str, int]:
    """Parse KIND[=WEIGHT].

    Raises:
        CommandError: The kind is unknown or the weight is out of range.
    """
    name, equals, weight = text.partition("=")
    known = {kind.name: kind.weight for kind in KINDS}
    if name not in known:
        raise CommandError(f"--kind {text}: {name!r} is not one of {', '.join(map(repr, known))}")
    if equals and not (weight.isascii() and weight.isdecimal() and int(weight[:11]) <= MAX_WEIGHT):
        raise CommandError(f"--kind {text}: the weight is {weight!r}; expected an integer from 0 to {MAX_WEIGHT}, or no =")
    return name, int(weight) if equals else known[name]


def family_instructions(name: str, left: str, right: str) -> list[Any]:
    """The instructions of a family that both implementations have."""
    known = [split_spec(canonical_spec(side).removeprefix(REFERENCE))[0] for side in (left, right) if side != GPU]
    if not known:
        raise CommandError(f"--left {left}, --right {right}: a family needs a target on at least one side, one of {', '.join(targets())}")
    ops = [op for op in instructions(known[0], name) if all(min_version(op, target) is not None for target in known[1:])]
    if not ops:
        raise CommandError(f"{' and '.join(known)} have no {name} in common; tcemu list shows what each has")
    return ops


def resumed_arguments(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The arguments of `find_mismatches` from the stored runs."""
    if args.op or args.left or args.right or args.seed is not None or args.kind or args.out:
        raise CommandError("--resume takes all settings from the stored run; only --cases, which may be more, can be given with it")
    files = sorted(Path(args.resume).glob(f"**/{RUN_FILE}"))
    if not files:
        raise CommandError(f"--resume {args.resume}: no run is stored there; --out DIRECTORY stores one")
    runs = []
    for file in files:
        h = read_run_header(file)
        names, weights = map(list, zip(*h["kinds"], strict=True))
        share = h["cases"] if args.cases is None else -(-args.cases // len(files))
        if share < h["cases"]:
            raise CommandError(f"--cases {args.cases}: {file} is a run of {h['cases']:,} already; give more, or omit --cases")
        runs.append(
            {"op": h["op"], "left": h["left"], "right": h["right"], "cases": share, "seed": h["seed"], "out": str(file.parent),
             "kinds": names, "weights": weights}
        )  # fmt: skip
    return runs


def summary_line(run: FuzzRun) -> str:
    """The line of one instruction in a family."""
    outputs = run.done * run.op.m * run.op.n
    return f"{run.op}: {f'{run.wrong_outputs:,} of {outputs:,} outputs differ' if outputs else 'nothing was compared'}"


def _run_infer(args: argparse.Namespace) -> int:
    """Return the exit status: 1 if no model was found and confirmed."""
    with command_errors(ValueError, TypeError):
        inferred = infer_model(args.op, args.box, cases=args.cases)
    print(inferred)
    return int(not inferred.confirmed)
