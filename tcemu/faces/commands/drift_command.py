"""`tcemu drift`: which operation of two recorded runs diverged first, and why; with one record, the arithmetic of its operations."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from tcemu.faces.commands import TARGET_HELP, CommandError, command_errors
from tcemu.faces.commands.array_files import Output, path_text
from tcemu.uses.drift.debug_logs import read_run
from tcemu.uses.drift.drift_results import Drift
from tcemu.uses.drift.identification import identify
from tcemu.uses.drift.locate import locate
from tcemu.uses.drift.prediction import Prediction, predict
from tcemu.uses.drift.records import Record
from tcemu.uses.replay.aten_operations import GPUS

FAILED_STATUS = 1  # exit status of --fail-on


def _is_outside(drift: Drift) -> bool:
    return any(line.legitimate is not None and max(line.legitimate) > 1 for line in drift.sources)


CONDITIONS: dict[str, Callable[[Drift], bool]] = {  # what --fail-on may name
    "source": lambda drift: bool(drift.sources),
    "unexplained": lambda drift: bool(drift.unexplained),
    "outside": _is_outside,
}


def add_drift(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "drift",
        description="Compares two records of tcemu.drift.record: the operations at which the runs part, the cause of each, and whether "
        "both results are within the error of their arithmetic. With one record, it names the arithmetic of each operation, or with --gpu "
        "the first operation that this GPU would not give.",
        epilog="examples: tcemu drift eager.drift compiled.drift --fail-on unexplained; tcemu drift eager.drift --target H100; "
        "tcemu drift eager.drift --gpu H100",
    )
    parser.add_argument("left", type=Path, metavar="LEFT", help="a record, or a log of PyTorch's DebugMode with hashes")
    parser.add_argument("right", type=Path, metavar="RIGHT", nargs="?", help="the other record; if the batches differ, the larger one")
    parser.add_argument("--rows", help="rows of the right batch that are those of the left one, as 0,3 (default: the first)")
    parser.add_argument("--target", action="append", metavar="GPU", help=f"try the tensor cores of {TARGET_HELP}; may be repeated")
    parser.add_argument("--gpu", help=f"one record of torch: judge it by what PyTorch gives on this GPU ({', '.join(GPUS)})")
    parser.add_argument("--fail-on", action="append", choices=tuple(CONDITIONS), default=[], help="exit with status 1 if there is one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as HTML with a picture")
    parser.add_argument("--recipes", type=Path, metavar="FILE", help="write the kernel recipes that pin the sums of both sides, as JSON")
    parser.add_argument("--overwrite", action="store_true", help="replace existing FILEs")
    parser.set_defaults(run=_run_drift)


def _run_drift(args: argparse.Namespace) -> int:
    """Return the exit status: 1 if a condition of --fail-on holds."""
    if args.right is None:
        return _judge_one(args)
    if args.gpu is not None:
        raise CommandError("--gpu: this judges one record, but there are two: leave out RIGHT, or --gpu")
    inputs = {"LEFT": args.left, "RIGHT": args.right}
    outputs = {
        name: Output(path, args.overwrite, f"--{name}", inputs)
        for name in ("json", "html", "recipes")
        if (path := getattr(args, name)) is not None
    }
    try:
        rows = None if args.rows is None else [int(row) for row in args.rows.split(",")]
    except ValueError:
        raise CommandError(f"--rows {args.rows}: expected row numbers, as 0,3") from None
    left, right = _read("LEFT", args.left), _read("RIGHT", args.right)
    with command_errors(ValueError):
        drift = locate(left, right, rows=rows, targets=args.target or ())
    print(drift)
    contents = {
        "json": lambda: drift.to_json(1),
        "html": lambda: f"<!doctype html><meta charset=utf-8><title>tcemu drift</title>{drift.html()}",
        "recipes": lambda: json.dumps(drift.recipes(), indent=1),
    }
    for name, output in outputs.items():
        output.write((contents[name]() + "\n").encode())
    return FAILED_STATUS if any(CONDITIONS[name](drift) for name in args.fail_on) else 0


def _judge_one(args: argparse.Namespace) -> int:
    """Print the arithmetics of one record, or its comparison with a GPU.

    Returns 1 if --fail-on unexplained is given and an operation is unexplained, or differs from the GPU's.
    """
    needless = [f"--{name}" for name in ("rows", "html", "recipes") if getattr(args, name) is not None]
    needless += [f"--fail-on {name}" for name in args.fail_on if name != "unexplained"]
    if needless:
        raise CommandError(f"{', '.join(needless)}: this compares two records, but RIGHT is missing")
    if args.gpu is not None and args.target:
        raise CommandError("--target: with --gpu nothing is tried; leave out one of the two")
    output = None if args.json is None else Output(args.json, args.overwrite, "--json", {"LEFT": args.left})
    record = _read("LEFT", args.left)
    with command_errors(ValueError):
        found = identify(record, targets=args.target or ()) if args.gpu is None else predict(record, gpu=args.gpu)
    print(found)
    if output is not None:
        output.write((found.to_json(1) + "\n").encode())
    failed = found.different if isinstance(found, Prediction) else found.unexplained
    return FAILED_STATUS if args.fail_on and failed else 0


def _read(name: str, path: Path) -> Record:
    try:
        return read_run(path)
    except (OSError, ValueError) as error:
        raise CommandError(f"{name}: {path_text(path)}: {error}") from error
