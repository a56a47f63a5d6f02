"""`tcemu run`: a kernel's PTX run without a GPU, on arrays in files."""

import argparse
import os
import re
import sys
import time
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

import numpy as np

from tcemu.commands import TARGET, CommandError
from tcemu.commands.arrays import load, npy
from tcemu.commands.outputs import Output, shown
from tcemu.commands.progress import ProgressLine
from tcemu.ptx import parse
from tcemu.ptx.comparing import compare
from tcemu.ptx.link import Line
from tcemu.ptx.module import Module
from tcemu.ptx.run import STEP_LIMIT, run
from tcemu.ptx.scheduler import StepLimit
from tcemu.ptx.statements import Chunk

PAUSE = 0.2  # seconds between two reports

TYPES = {f"{letter}{bits}": np.dtype(f"{kind}{bits // 8}") for letter, kind in (("u", "u"), ("s", "i")) for bits in (8, 16, 32, 64)}
TYPES |= {"f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
_MADE = re.compile(
    r"(?P<value>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|inf|nan))(?P<kind>[usf]\d+)?(?P<axes>(?:x\d+)*)"
)


class Argument(NamedTuple):
    """An argument of the kernel. name: as the user gave it; path: the file that it was read from."""

    name: str
    value: Any
    path: Path | None = None

    @property
    def is_array(self) -> bool:
        """Whether the kernel gets a pointer."""
        return isinstance(self.value, np.ndarray) and self.value.ndim > 0


def add_run(subparsers) -> None:
    """Adds the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "run",
        description="Runs a kernel of a PTX file, as nvcc -ptx, Triton or CUTLASS write it, bit for bit as the GPU would, and says which "
        "arrays it changed. Arguments stand in the order of the kernel's parameters: a .npy file or a filled array where it takes a "
        "pointer, a number where it takes a value.",
        epilog="example: tcemu run axpy.ptx --grid 4 --block 256 --arg 2.5f32 --arg X.npy --arg 0f32x1024 --out results",
    )
    parser.add_argument("file", metavar="FILE.ptx", type=Path)
    parser.add_argument("--entry", metavar="NAME", help="the kernel (default: the only one of the file)")
    parser.add_argument("--grid", metavar="X[,Y[,Z]]", required=True, help="blocks along each axis")
    parser.add_argument("--block", metavar="X[,Y[,Z]]", required=True, help="threads of a block along each axis")
    parser.add_argument(
        "--arg", dest="args", metavar="ARGUMENT", action="append", default=[],
        help=f"A.npy; or a number, as 7 or 1.5f32 (with {', '.join(TYPES)}; by itself it takes the parameter's type); or 0f32x64x64, an "
        "array of that shape filled with it. Once for each parameter",
    )  # fmt: skip
    parser.add_argument("--target", help=f"{TARGET} (default: that of the file)")
    parser.add_argument("--compare-target", metavar="TARGET", help="run it there too, and explain the first statement that differs")
    parser.add_argument("--shared-bytes", metavar="N", type=_count, default=0, help="dynamic shared memory of a block (default: 0)")
    parser.add_argument("--checked", action="store_true", help="refuse what PTX leaves undefined: races and uninitialised shared memory")
    parser.add_argument("--step-limit", metavar="N", type=_count, default=STEP_LIMIT, help=f"statements at most (default: {STEP_LIMIT:,})")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where the arrays go, as arg0.npy, arg1.npy, ... (default: nowhere)")
    parser.add_argument("--overwrite", action="store_true", help="files in DIR may exist; one that is read is never overwritten")
    parser.set_defaults(run=run_run)


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return int(text)


def axes(name: str, text: str) -> tuple[int, ...]:
    """ "4,2" -> (4, 2)."""
    if not re.fullmatch(r"\d{1,10}(,\d{1,10}){0,2}", text):
        raise CommandError(f"--{name}: {text!r} is no size; wanted one to three numbers, as 4 or 4,2,1")
    return tuple(map(int, text.split(",")))


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        if path.exists() and not S_ISREG(path.stat().st_mode):
            raise CommandError(f"{shown(path)} is no regular file")
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise CommandError(
            f"{shown(path)} is no text: {error.reason} at byte {error.start}; a cubin is not PTX, nvcc -ptx writes it"
        ) from error
    except (OSError, ValueError) as error:
        raise CommandError(f"{shown(path)} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def argument(at: int, text: str) -> Argument:
    """What a word of --arg says."""
    if text.endswith(".npy"):
        path = Path(text)
        return Argument(text, load(f"argument {at}", path, exact=False), path)
    found = _MADE.fullmatch(text)
    if not found or (found["kind"] and found["kind"] not in TYPES):
        raise CommandError(
            f"argument {at}: {text!r} is no argument; wanted a file, as A.npy, a number, as 7 or 1.5f32, or an array, as 0f32x1024. "
            f"Types are {', '.join(TYPES)}"
        )
    digits = found["value"]
    whole = re.fullmatch(r"[-+]?(0[xX][0-9a-fA-F]+|\d+)", digits) is not None
    value = int(digits, 16 if "x" in digits.lower() else 10) if whole else float(digits)
    if not found["kind"]:
        if found["axes"]:
            raise CommandError(f"argument {at}: {text!r} is an array without a type; wanted one, as {digits}f32{found['axes']}")
        return Argument(text, value)
    return Argument(text, _made(at, text, value, TYPES[found["kind"]], found["axes"]))


def _made(at: int, text: str, value: int | float, dtype: np.dtype, axes: str) -> Any:
    """A number of a type, or an array filled with it."""
    shape = tuple(map(int, axes.split("x")[1:]))
    if dtype.kind in "ui" and (isinstance(value, float) or not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max):
        raise CommandError(f"argument {at}: {text!r}: {value} does not fit {dtype}")
    if len(shape) > 32 or prod(shape) * dtype.itemsize > _memory():
        raise CommandError(f"argument {at}: {text!r} does not fit in this machine's memory")
    with np.errstate(over="ignore"):
        number = dtype.type(value)
    return np.full(shape, number) if shape else number


def _memory() -> int:
    """Bytes of this machine's memory, or no limit where it does not say."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 62


def outputs(args: argparse.Namespace, given: list[Argument]) -> dict[int, Output]:
    """Where each array goes; refused before anything runs."""
    if args.out is None:
        if args.overwrite:
            raise CommandError("--overwrite is about the files in --out, which is missing")
        return {}
    inputs = {"FILE.ptx": args.file} | {f"argument {at}": arg.path for at, arg in enumerate(given) if arg.path is not None}
    try:
        args.out.mkdir(exist_ok=True)
    except (OSError, ValueError) as error:
        raise CommandError(f"out: {shown(args.out)} is no folder that can be made: {getattr(error, 'strerror', None) or error}") from error
    return {
        at: Output(args.out / f"arg{at}.npy", args.overwrite, "out", inputs) for at, arg in enumerate(given) if arg.is_array
    }  # fmt: skip


class Progress(ProgressLine):
    """Blocks done, and statements executed."""

    def __init__(self, total: int) -> None:
        super().__init__(total, sys.stderr)
        self.done = self.statements = 0  # with --compare-target the blocks count once a run
        self.chunk: Chunk | None = None  # the blocks that run now
        self.said = 0.0

    def watch(self, _line: Line, chunk: Chunk, _active: np.ndarray) -> None:
        """What `tcemu.ptx.run` calls after each statement."""
        if chunk is not self.chunk:
            self.done += self.chunk.shape[0] if self.chunk is not None else 0
            self.chunk = chunk
        self.statements += 1
        if self.passed - self.said >= PAUSE:
            self.said = self.passed
            done = min(self.done, self.total)
            self.say(f"tcemu run: {done:,} of {self.total:,} blocks, {self.statements:,} statements, {self.passed:.0f} s")

    def end(self) -> None:
        """The last line, if there was one."""
        if self.said:
            self.say(f"tcemu run: {self.total:,} blocks, {self.statements:,} statements, {self.passed:.0f} s", last=True)


def run_run(args: argparse.Namespace) -> int:
    """Does what the words say. Raises CommandError."""
    grid, block = axes("grid", args.grid), axes("block", args.block)
    text = read_text(args.file)
    given = [argument(at, word) for at, word in enumerate(args.args)]
    if args.compare_target is not None and args.checked:
        raise CommandError("--checked and --compare-target do not go together: what is undefined has no first difference")
    try:
        module = parse(text)
        entry = _entry(module, args.entry)
        target, other = args.target or module.target, args.compare_target
        files = outputs(args, given)
        progress = Progress(prod(grid))
        words: dict[str, Any] = {"entry": entry, "grid": grid, "block": block, "args": [arg.value for arg in given]}
        words |= {"shared_bytes": args.shared_bytes, "step_limit": args.step_limit, "watch": progress.watch}
        began = time.perf_counter()
        found = compare(module, targets=(target, other), **words) if other else None
        results = found.outputs[0] if found else run(module, target=target, checked=args.checked, **words)
    except MemoryError as error:
        raise CommandError(f"the kernel's memory does not fit in this machine's: {error}") from error
    except (ValueError, TypeError, StepLimit) as error:
        raise CommandError(f"{shown(args.file)}: {error}") from error
    progress.end()
    seconds = time.perf_counter() - began
    sizes = " by ".join(",".join(map(str, size)) for size in (grid, block))
    print(f"{entry}, {sizes}, {target}: {prod(grid) * prod(block):,} threads in {seconds:.2f} s, compilation included")
    pairs = zip(given, module.entries[entry].parameters, strict=True)
    arrays = [(at, arg) for at, (arg, parameter) in enumerate(pairs) if arg.is_array and not parameter.shape]
    for (at, arg), result in zip(arrays, results, strict=True):
        print(_written(at, arg, np.asarray(result), files.get(at)))
    if found:
        print(f"\n{found}")
    return 0


def _entry(module: Module, wanted: str | None) -> str:
    """The kernel's name, for what is printed. Raises CommandError if there is none, or several and none was asked for."""
    names = ", ".join(module.entries) or "it has none"
    if wanted is not None and wanted not in module.entries:
        raise CommandError(f"the file has no entry {wanted!r}; its entries: {names}")
    if wanted is None and len(module.entries) != 1:
        raise CommandError(f"--entry is wanted, as the file has {len(module.entries)} entries: {names}")
    return wanted or next(iter(module.entries))


def _written(at: int, arg: Argument, result: np.ndarray, output: Output | None) -> str:
    """Writes an array, and says what became of it."""
    before = np.ascontiguousarray(arg.value)
    size = before.dtype.itemsize
    old, new = (np.ascontiguousarray(x).view(np.uint8).reshape(-1, size) if x.size else x for x in (before, result))
    changed = int(np.any(old != new, axis=-1).sum()) if before.size else 0
    if output is not None:
        output.write(npy(result))
    where = "" if output is None else f", in {shown(output.path)}"
    return f"argument {at}, {arg.name}: {result.dtype} {list(result.shape)}, {changed:,} of {result.size:,} elements changed{where}"
