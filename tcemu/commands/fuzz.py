"""`tcemu fuzz` and `tcemu infer`: two sides compared on many cases, and the arithmetic of one found out."""

import argparse
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from tcemu.architectures.lookup import COMPUTING
from tcemu.commands import EXAMPLE, OP, CommandError
from tcemu.commands.progress import ProgressLine
from tcemu.files import replace_file
from tcemu.fuzz import KINDS, Run, infer, run
from tcemu.fuzz.kinds import MOST_WEIGHT
from tcemu.fuzz.outcome import NotWritten
from tcemu.fuzz.run_file import FILE
from tcemu.fuzz.runs import header, span
from tcemu.fuzz.sides import GPU, REFERENCE, in_full, words
from tcemu.isa.catalog import instructions, is_supported, targets
from tcemu.isa.grammar import parse

REPORT = "report.txt"
SIDES = 'a target (H100, sm_90a), one with changes (sm_90a:fraction_bits=24,terms=8), an older lowering (sm_90@12.6), or "reference:sm_90a"'


def add_fuzz(subparsers) -> None:
    """Adds the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "fuzz",
        description="Compares two sides on generated operands of one instruction, or of every one that both have of a family: counts what "
        "differs, makes the first mismatch small and explains it, and says what the cases reached. Ctrl-C stops it; with --out the same "
        "words, or --resume, go on where it stopped.",
        epilog=f"example: tcemu fuzz {EXAMPLE} --left sm_80 --right sm_90a --cases 1e5",
    )
    parser.add_argument("op", metavar="OP", nargs="?", help=f"{OP}, or a family: {', '.join(COMPUTING)}")
    parser.add_argument("--left", help=SIDES)
    parser.add_argument("--right", help="the same, or gpu")
    parser.add_argument("--cases", type=positive, help="instructions to compare, such as 1e6 (default: 1e5); of a family, all together")
    parser.add_argument("--seed", type=number, help="of the operands (default: 0)")
    parser.add_argument("--kind", action="append", metavar="KIND[=WEIGHT]", help=f"of {', '.join(kind.name for kind in KINDS)}")
    parser.add_argument(
        "--out", metavar="DIRECTORY", help=f"hold the run there, so that it can go on, also to more cases, and {REPORT} for people"
    )
    parser.add_argument("--resume", metavar="DIRECTORY", help="go on with the run that is held there; with --cases, on to so many")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(run=run_fuzz)


def add_infer(subparsers) -> None:
    """Adds the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "infer",
        description="Takes a target as a black box and finds by probes how it adds: terms of a step, fraction bits, order, rounding, "
        "floor. Prints the model with its evidence, and compares it with the box.",
        epilog=f"example: tcemu infer {EXAMPLE} --target sm_90a",
    )
    parser.add_argument("op", metavar="OP", help=OP)
    parser.add_argument("--target", dest="box", metavar="TARGET", default="sm_90a", help=f"{SIDES}, or gpu (default: sm_90a)")
    parser.add_argument("--cases", type=positive, default=512, help="on which the model is compared with the box (default: 512)")
    parser.set_defaults(run=run_infer)


def number(text: str) -> int:
    """A count, also as 1e6."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 <= value < 1 << 62 and value == int(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is no count from 0 to 2^62 - 1; write it as 1000000 or 1e6")
    return int(text) if text.isdecimal() else int(value)


def positive(text: str) -> int:
    """A count of something that must be: of nothing there is nothing to say."""
    count = number(text)
    if not count:
        raise argparse.ArgumentTypeError(f"{text!r}: nothing would be done; want 1 at least")
    return count


def run_fuzz(args: argparse.Namespace) -> int:
    """Does what the words say; 1 if something differs. Raises CommandError."""
    each_core_a_device()
    status, lines = 0, []
    try:
        asked_for = resumed(args) if args.resume else asked(args)
        several = len(asked_for) > 1
        progress = Spellings(len(asked_for), sys.stderr) if several and not args.quiet else None
        report = None if args.quiet or several else lambda line: print(line, file=sys.stderr, flush=True)
        for number, arguments in enumerate(asked_for):
            if progress is not None and jax.process_index() == 0:
                progress.show(number)
            outcome = run(**arguments, report=report)
            if jax.process_index() == 0:  # of several processes one speaks
                lines.append(brief(outcome))
                if progress is not None:
                    progress.clear()
                print(lines[-1] if several else outcome, flush=True)
                if arguments["out"]:
                    keep(Path(arguments["out"]), str(outcome))
            status = max(status, int(outcome.wrong_cases > 0))
            if outcome.stopped:
                print(f"stopped; {'the same words go on' if arguments['out'] else 'nothing was held: give --out to be able to go on'}")
                return 128 + outcome.signal
        if several and jax.process_index() == 0 and (folder := args.out or args.resume):
            keep(Path(folder), "\n".join(lines))
    except NotWritten as error:
        try:
            print(error.run, flush=True)
        finally:  # also where that cannot be printed, as on the same full disk
            raise CommandError(str(error)) from error
    except (ValueError, TypeError, OSError) as error:
        raise CommandError(str(error)) from error
    return status


def keep(folder: Path, account: str) -> None:
    """Writes what a run, or a family of runs, found beside its file, for people. Raises CommandError."""
    try:
        replace_file(folder / REPORT, f"{account}\n".encode())
    except OSError as error:
        raise CommandError(f"--out {folder}: {REPORT} cannot be written: {error.strerror or error}; the run's own file is whole") from error


class Spellings(ProgressLine):
    """How many spellings of a family are done."""

    def show(self, done: int) -> None:
        left = f", {span(self.passed / done * (self.total - done))} left" if done else ""
        self.say(f"{done} of {self.total} spellings{left}")

    def clear(self) -> None:
        """Makes room for a line of results."""
        if self.covered:
            print(f"\r{' ' * self.covered}\r", end="", file=self.stream, flush=True)
            self.covered = 0


def each_core_a_device() -> None:
    """Of a CPU, so that the cases are shared among its cores; where JAX runs already, it stays as it is."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", cores)


def asked(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The arguments of `run`, for each instruction."""
    if not args.op or not args.left or not args.right:
        raise CommandError("what is to be compared is missing: give OP, --left and --right, or --resume DIRECTORY")
    ops = family(args.op, args.left, args.right) if args.op in COMPUTING else [parse(args.op)]
    cases, names, weights = 100_000 if args.cases is None else args.cases, None, None
    if args.kind:
        names, weights = map(list, zip(*map(weighted, args.kind), strict=True))
    share = -(-cases // len(ops))
    out = lambda op: args.out if args.out is None or len(ops) == 1 else str(Path(args.out) / re.sub(r"\W+", "_", str(op)))  # noqa: E731
    return [
        {"op": op, "left": args.left, "right": args.right, "cases": share, "seed": args.seed or 0, "out": out(op), "kinds": names,
         "weights": weights} for op in ops
    ]  # fmt: skip


def weighted(text: str) -> tuple[str, int]:
    """KIND[=WEIGHT]. Raises CommandError if it is none."""
    name, equals, weight = text.partition("=")
    known = {kind.name: kind.weight for kind in KINDS}
    if name not in known:
        raise CommandError(f"--kind {text}: {name!r} is none of {', '.join(map(repr, known))}")
    if equals and not (weight.isascii() and weight.isdecimal() and int(weight[:11]) <= MOST_WEIGHT):
        raise CommandError(f"--kind {text}: the weight is {weight!r}; want a whole number from 0 to {MOST_WEIGHT}, or no =")
    return name, int(weight) if equals else known[name]


def family(name: str, left: str, right: str) -> list[Any]:
    """The instructions of a family that both sides have."""
    known = [words(in_full(side).removeprefix(REFERENCE))[0] for side in (left, right) if side != GPU]
    if not known:
        raise CommandError(
            f"--left {left}, --right {right}: a family needs a target on one side at least; there are {', '.join(targets())}"
        )
    ops = [op for op in instructions(known[0], name) if all(is_supported(op, target) for target in known[1:])]
    if not ops:
        raise CommandError(f"{' and '.join(known)} have no {name} in common; tcemu list shows what each has")
    return ops


def resumed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The arguments of `run` as the held runs have them."""
    if args.op or args.left or args.right or args.seed is not None or args.kind or args.out:
        raise CommandError("--resume takes all words from the run that is held; leave the others out, but for --cases, which may be more")
    files = sorted(Path(args.resume).glob(f"**/{FILE}"))
    if not files:
        raise CommandError(f"--resume {args.resume}: no run is held there; --out DIRECTORY holds one")
    asked_for = []
    for file in files:
        h = header(file)
        names, weights = map(list, zip(*h["kinds"], strict=True))
        share = h["cases"] if args.cases is None else -(-args.cases // len(files))
        if share < h["cases"]:
            raise CommandError(f"--cases {args.cases}: {file} is a run of {h['cases']:,} already; give more, or leave --cases out")
        asked_for.append(
            {"op": h["op"], "left": h["left"], "right": h["right"], "cases": share, "seed": h["seed"], "out": str(file.parent),
             "kinds": names, "weights": weights}
        )  # fmt: skip
    return asked_for


def brief(run: Run) -> str:
    """One line of a family."""
    outputs = run.done * run.op.m * run.op.n
    return f"{run.op}: {f'{run.wrong_outputs:,} of {outputs:,} outputs differ' if outputs else 'nothing was compared'}"


def run_infer(args: argparse.Namespace) -> int:
    """Does what the words say; 1 if no model was found and confirmed. Raises CommandError."""
    try:
        inferred = infer(args.op, args.box, cases=args.cases)
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from error
    print(inferred)
    return int(not inferred.confirmed)
