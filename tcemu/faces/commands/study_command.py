"""`tcemu study`: published claims about low-precision sums, reproduced."""

import argparse
import re
import sys
from pathlib import Path

from tcemu.base.plots import figure_svg
from tcemu.base.progress import ProgressLine
from tcemu.base.text import table_lines
from tcemu.faces.commands import CommandError, command_errors
from tcemu.faces.commands.array_files import Output, path_text
from tcemu.uses.study.claims import get_claim, list_claims
from tcemu.uses.study.claims.claim_types import Claim, Outcome


def add_study(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "study",
        description="Reproduces a published claim about low-precision sums: prints the published value, what tcemu finds over several "
        "seeds, the difference, and the reason for it. Without a name it lists the claims.",
        epilog="example: tcemu study deepseek-accumulation --quick",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="the claim (default: list them all)")
    parser.add_argument("--quick", action="store_true", help="run a reduced form that takes seconds")
    parser.add_argument("--seeds", metavar="N", help="number of seeds, or a list such as 0,3,7 (default: the claim's own)")
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, help="write NAME.json, and with matplotlib the picture NAME.svg, to this folder"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files in FOLDER")
    parser.set_defaults(run=_run_study)


def _run_study(args: argparse.Namespace) -> int:
    if args.name is None:
        if args.quick or args.seeds is not None or args.out is not None or args.overwrite:
            raise CommandError("--quick, --seeds, --out and --overwrite need the name of a claim")
        rows = [(claim.name, _list_targets(claim.targets), claim.title) for claim in list_claims().values()]
        print("\n".join(table_lines(("claim", "target", ""), rows, left=(0, 1, 2))))
        return 0
    if args.out is None and args.overwrite:
        raise CommandError("--overwrite needs --out, which is missing")
    with command_errors(ValueError):
        chosen = get_claim(args.name)
    seeds = None if args.seeds is None else parse_seeds(args.seeds)
    outputs = {} if args.out is None else {end: Output(args.out / f"{chosen.name}.{end}", args.overwrite) for end in ("json", "svg")}
    outcome = run_claim(chosen, seeds, args.quick)
    print(outcome)
    if outputs:
        print()
        for output in write_outcome(outcome, outputs):
            print(f"{path_text(output.path)} is written")
    return 0


def _list_targets(targets: tuple[str, ...]) -> str:
    """List targets; of many, the first six."""
    return ", ".join(targets[:6]) + (f" and {len(targets) - 6} more" if len(targets) > 6 else "") or "-"


def parse_seeds(text: str) -> int | tuple[int, ...]:
    """A number of seeds, or a list of seeds separated by commas.

    Raises:
        CommandError: The text is neither.
    """
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*,?", text) or text == "0":
        raise CommandError(f"--seeds {text!r}: expected a number such as 3, or a list such as 0,3,7")
    return tuple(int(word) for word in text.rstrip(",").split(",")) if "," in text else int(text)


def run_claim(chosen: Claim, seeds: int | tuple[int, ...] | None, quick: bool) -> Outcome:
    """Reproduce the claim, with a line of progress."""
    line: ProgressLine | None = None

    def progress(done: int, total: int) -> None:
        nonlocal line
        line = line or ProgressLine(total, sys.stderr)
        line.update(f"tcemu study: {chosen.name}, {done} of {total} seeds, {line.elapsed:.0f} s")

    outcome = chosen.reproduce(seeds, quick=quick, progress=progress)
    if line is not None:
        line.update(f"tcemu study: {chosen.name}, {len(outcome.seeds)} seeds, {line.elapsed:.0f} s", last=True)
    return outcome


def write_outcome(outcome: Outcome, outputs: dict[str, Output]) -> list[Output]:
    """Write the JSON, and the picture if matplotlib is installed. Return the written outputs."""
    outputs["json"].write((outcome.to_json(indent=1) + "\n").encode())
    try:
        picture = figure_svg(outcome.plot())
    except ImportError as error:
        print(f"no picture: {error}")
        return [outputs["json"]]
    outputs["svg"].write(picture)
    return list(outputs.values())
