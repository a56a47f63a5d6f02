"""`tcemu launches`: record the launches of a Python script, list them, and repeat them on the GPU of this machine."""

import argparse
import runpy
import sys
import traceback
from pathlib import Path

from tcemu.base.files import FolderInUse
from tcemu.base.results import Table
from tcemu.base.saved_files import DamagedFile
from tcemu.faces.commands import CommandError
from tcemu.faces.commands.array_files import path_text
from tcemu.kernels.ptx.runtime.launch_records import list_launches, read_launch, record_launches
from tcemu.kernels.ptx.runtime.launch_replay import LAUNCH_SECONDS, ReplayedLaunch, replay_launches


def add_launches(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "launches", description="Records launches of kernels without a GPU, and repeats them on a GPU, with all words compared."
    )
    commands = parser.add_subparsers(dest="launches", required=True, metavar="WHAT")
    records = commands.add_parser(
        "record",
        help="run a Python script and record the launches of its process",
        description="Runs a Python script and writes each launch of tcemu.ptx.run and of tcemu.triton.emulated to a file of its own: the "
        "PTX, the shape, the parameters, and all arrays before and after. Files that lie in the folder remain.",
        epilog="example: tcemu launches record launches/ my_kernels.py --size 512",
    )
    records.add_argument("folder", type=Path, metavar="FOLDER", help="folder for the files")
    records.add_argument("script", type=Path, metavar="SCRIPT.py")
    records.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    lists = commands.add_parser("list", help="list recorded launches", description="Lists recorded launches and checks their files.")
    lists.add_argument("folder", type=Path, metavar="FOLDER")
    replays = commands.add_parser(
        "replay",
        help="repeat recorded launches on a real GPU",
        description="Repeats recorded launches on the NVIDIA GPU of this machine and compares every word of their arrays. The exit status "
        "is 1 unless all are equal. With --out, the same command continues a run that was stopped.",
        epilog="example: tcemu launches replay launches/ --out replayed/",
    )
    replays.add_argument("folder", type=Path, metavar="FOLDER")
    replays.add_argument("--out", type=Path, metavar="DIR", help="folder for the results, one JSON file for each launch (default: none)")
    replays.add_argument(
        "--seconds", type=float, default=LAUNCH_SECONDS, metavar="S",
        help="time after which a launch counts as one that does not terminate (default: %(default)g)",
    )  # fmt: skip
    parser.set_defaults(run=_run_launches)


def _run_launches(args: argparse.Namespace) -> int:
    return {"record": _record, "list": _list, "replay": _replay}[args.launches](args)


def _record(args: argparse.Namespace) -> int:
    if not args.script.is_file():
        raise CommandError(f"{path_text(args.script)} is not a file; expected a Python script")
    kept, status = (sys.argv, sys.path[0]), 0
    sys.argv, sys.path[0] = [str(args.script), *args.arguments], str(args.script.resolve().parent)
    try:
        with record_launches(args.folder) as recorder:
            try:
                runpy.run_path(str(args.script), run_name="__main__")
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
                if status and not isinstance(stop.code, int):
                    print(stop.code, file=sys.stderr)
            except Exception:  # the script's own error, which Python would show so
                traceback.print_exc()
                status = 1
    except FolderInUse as error:
        raise CommandError(str(error)) from error
    finally:
        sys.argv, sys.path[0] = kept
    print(f"{len(recorder.files):,} launches recorded in {path_text(args.folder)}")
    return status


def _list(args: argparse.Namespace) -> int:
    rows, status = [], 0
    for path in _find_launches(args.folder):
        try:
            launch = read_launch(path)
        except (DamagedFile, OSError) as error:
            rows.append((path.stem, "", "", "", "", f"damaged: {str(error).rpartition(': ')[2]}"))
            status = 1
            continue
        sizes = (" x ".join(map(str, size)) for size in (launch.grid, launch.block))
        words = sum(array.size for array in launch.before) // 4
        rows.append((path.stem, launch.entry, launch.target, *sizes, f"{len(launch.names)} arrays, {words:,} words"))
    columns = ("launch", "kernel", "target", "grid", "block", "contents")
    print(Table(f"{len(rows):,} launches in {path_text(args.folder)}", columns, tuple(rows)).text())
    return status


def _find_launches(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CommandError(f"{path_text(folder)} is not a folder; tcemu launches record writes one")
    return list_launches(folder)


def _replay(args: argparse.Namespace) -> int:
    def report(result: ReplayedLaunch) -> None:
        counts = f": {result.differing:,} of {result.words:,} words differ" if result.words else ""
        print(f"{result.name}: {result.status}{counts}{'. ' if result.message else ''}{result.message}", flush=True)

    _find_launches(args.folder)
    try:
        found = replay_launches(args.folder, out=args.out, seconds=args.seconds, report=report)
    except ValueError as error:
        raise CommandError(str(error)) from error
    print(found.table().title)
    return int(not found.all_equal)
