"""`tcemu study`: published claims about low-precision sums, reproduced."""

import argparse
import re
import sys
from pathlib import Path

from tcemu.commands import CommandError
from tcemu.commands.outputs import Output, shown
from tcemu.commands.progress import ProgressLine
from tcemu.plots import svg
from tcemu.study.claims import claim, published
from tcemu.study.claims.claim import Claim, Outcome
from tcemu.text import columns


def add_study(subparsers) -> None:
    """Adds the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "study",
        description="Reproduces a published claim about low-precision sums: prints what the source publishes, what tcemu finds over "
        "several seeds, the difference, and why it differs. Without a name it lists the claims.",
        epilog="example: tcemu study deepseek-accumulation --quick",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="the claim (default: list them all)")
    parser.add_argument("--quick", action="store_true", help="a reduced form, in seconds")
    parser.add_argument("--seeds", metavar="N", help="how many seeds, or which, as 0,3,7 (default: as many as the claim takes)")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="write NAME.json there, and with matplotlib the picture NAME.svg")
    parser.add_argument("--overwrite", action="store_true", help="the files in FOLDER may exist")
    parser.set_defaults(run=run_study)


def run_study(args: argparse.Namespace) -> int:
    """Does what the words say. Raises CommandError."""
    if args.name is None:
        if args.quick or args.seeds is not None or args.out is not None or args.overwrite:
            raise CommandError("--quick, --seeds, --out and --overwrite are about one claim; name it")
        print("\n".join(columns(("claim", ""), [(one.name, one.title) for one in published().values()], left=(0, 1))))
        return 0
    if args.out is None and args.overwrite:
        raise CommandError("--overwrite is about the files of --out, which is missing")
    try:
        chosen = claim(args.name)
    except ValueError as error:
        raise CommandError(str(error)) from error
    seeds = None if args.seeds is None else seeds_of(args.seeds)
    outputs = {} if args.out is None else {end: Output(args.out / f"{chosen.name}.{end}", args.overwrite) for end in ("json", "svg")}
    outcome = measured(chosen, seeds, args.quick)
    print(outcome)
    if outputs:
        print()
        for output in written(outcome, outputs):
            print(f"{shown(output.path)} is written")
    return 0


def seeds_of(text: str) -> int | tuple[int, ...]:
    """A number of seeds, or with commas the seeds themselves. Raises CommandError."""
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*,?", text) or text == "0":
        raise CommandError(f"--seeds {text!r}: wanted how many, as 3, or which, as 0,3,7")
    return tuple(int(word) for word in text.rstrip(",").split(",")) if "," in text else int(text)


def measured(chosen: Claim, seeds: int | tuple[int, ...] | None, quick: bool) -> Outcome:
    """The outcome, with a line of progress while it comes."""
    line: ProgressLine | None = None

    def progress(done: int, total: int) -> None:
        nonlocal line
        line = line or ProgressLine(total, sys.stderr)
        line.say(f"tcemu study: {chosen.name}, {done} of {total} seeds, {line.passed:.0f} s")

    outcome = chosen.run(seeds, quick=quick, progress=progress)
    if line is not None:
        line.say(f"tcemu study: {chosen.name}, {len(outcome.seeds)} seeds, {line.passed:.0f} s", last=True)
    return outcome


def written(outcome: Outcome, outputs: dict[str, Output]) -> list[Output]:
    """Writes the JSON, and the picture where matplotlib is installed. Those that were written."""
    outputs["json"].write((outcome.to_json(indent=1) + "\n").encode())
    try:
        picture = svg(outcome.plot())
    except ImportError as error:
        print(f"no picture: {error}")
        return [outputs["json"]]
    outputs["svg"].write(picture)
    return list(outputs.values())
