"""`tcemu run`: run a kernel of a PTX or CUDA C++ file without a GPU on arrays in files."""

import argparse
import re
import sys
import time
from importlib.resources import files
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

import numpy as np

from tcemu.base.progress import ProgressLine
from tcemu.faces.commands import TARGET_HELP, CommandError
from tcemu.faces.commands.arguments import parse_count
from tcemu.faces.commands.array_files import Output, load_array, memory_bytes, npy_bytes, path_text
from tcemu.kernels.ptx.cuda_source import compile as compile_source
from tcemu.kernels.ptx.runtime.kernel_runner import STEP_LIMIT, run
from tcemu.kernels.ptx.runtime.scheduler import StepLimit
from tcemu.kernels.ptx.runtime.target_comparison import compare
from tcemu.kernels.ptx.runtime.tracing import ExecutedStatement
from tcemu.kernels.ptx.simt.chunk import Chunk
from tcemu.kernels.ptx.text.module import Module
from tcemu.kernels.ptx.text.parser import parse

EXAMPLE_FILE = "axpy.ptx"  # in tcemu/faces/data: y = a x + y
REPORT_PAUSE = 0.2  # seconds between two reports

ARGUMENT_TYPES = {
    f"{letter}{bits}": np.dtype(f"{kind}{bits // 8}") for letter, kind in (("u", "u"), ("s", "i")) for bits in (8, 16, 32, 64)
}
ARGUMENT_TYPES |= {"f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
_VALUE_PATTERN = re.compile(
    r"(?P<value>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|inf|nan))(?P<kind>[usf]\d+)?(?P<axes>(?:x\d+)*)"
)


class KernelArgument(NamedTuple):
    """An argument of the kernel."""

    name: str  # the text of --arg
    value: Any
    path: Path | None = None  # the file that it was read from

    @property
    def is_array(self) -> bool:
        """True if the kernel gets a pointer."""
        return isinstance(self.value, np.ndarray) and self.value.ndim > 0


def add_run(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "run",
        description="Runs a kernel with the bits of the GPU and reports the arrays that it changed. The file is PTX, as nvcc -ptx, Triton "
        "or CUTLASS write it, or CUDA C++ (FILE.cu), which NVRTC compiles (extra cuda). Arguments are given in the order of the kernel's "
        "parameters: a .npy file or a filled array for a pointer, a number for a value.",
        epilog=f"example: tcemu run {EXAMPLE_FILE} --grid 4 --block 256 --arg 2.5f32 --arg 1f32x1024 --arg 0f32x1024 --out results",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        help=f"the file, PTX or CUDA C++ (.cu); {EXAMPLE_FILE}, if there is no such file, is an example that tcemu brings along",
    )
    parser.add_argument(
        "--entry", metavar="NAME", help="the kernel (default: the only one of the file); in a .cu file its C++ name, as axpy<float>"
    )
    parser.add_argument(
        "--option", dest="options", metavar="OPTION", action="append", default=[],
        help="option of NVRTC for a .cu file, as --option=--std=c++20 or --option=-DN=4; repeat it for each",
    )  # fmt: skip
    parser.add_argument("--grid", metavar="X[,Y[,Z]]", required=True, help="blocks along each axis")
    parser.add_argument("--block", metavar="X[,Y[,Z]]", required=True, help="threads of a block along each axis")
    parser.add_argument(
        "--arg", dest="args", metavar="ARGUMENT", action="append", default=[],
        help=f"A.npy; or a number such as 7 or 1.5f32 (types: {', '.join(ARGUMENT_TYPES)}; default: the parameter's type); or "
        "0f32x64x64, an "
        "array of that shape filled with the number. Repeat it for each parameter",
    )  # fmt: skip
    parser.add_argument("--target", help=f"{TARGET_HELP} (default: the target of a PTX file; a .cu file needs it)")
    parser.add_argument(
        "--compare-target", metavar="TARGET", help="also run it on this target, and explain the first statement that differs"
    )
    parser.add_argument("--shared-bytes", metavar="N", type=parse_count, default=0, help="dynamic shared memory of a block (default: 0)")
    parser.add_argument("--checked", action="store_true", help="detect what PTX leaves undefined: races and uninitialised shared memory")
    parser.add_argument(
        "--step-limit", metavar="N", type=parse_count, default=STEP_LIMIT, help=f"maximum number of statements (default: {STEP_LIMIT:,})"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder for the arrays, arg0.npy, arg1.npy, ... (default: none)")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files in DIR; files that are read are never overwritten")
    parser.set_defaults(run=_run_kernel)


def parse_axes(name: str, text: str) -> tuple[int, ...]:
    """ "4,2" -> (4, 2)."""
    if not re.fullmatch(r"\d{1,10}(,\d{1,10}){0,2}", text):
        raise CommandError(f"--{name}: {text!r} is not a size; expected one to three numbers, such as 4 or 4,2,1")
    return tuple(map(int, text.split(",")))


def read_source(path: Path) -> str:
    """Read the text of a PTX or CUDA C++ file."""
    try:
        if path.exists() and not S_ISREG(path.stat().st_mode):
            raise CommandError(f"{path_text(path)} is not a regular file")
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise CommandError(
            f"{path_text(path)} is not text: {error.reason} at byte {error.start}; a cubin is not PTX, nvcc -ptx writes it"
        ) from error
    except (OSError, ValueError) as error:
        raise CommandError(f"{path_text(path)} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def parse_argument(index: int, text: str) -> KernelArgument:
    """Parse one --arg; `index` is its position."""
    if text.endswith(".npy"):
        path = Path(text)
        return KernelArgument(text, load_array(f"argument {index}", path, exact=False), path)
    found = _VALUE_PATTERN.fullmatch(text)
    if not found or (found["kind"] and found["kind"] not in ARGUMENT_TYPES):
        raise CommandError(
            f"argument {index}: {text!r} is not an argument; expected a file (A.npy), a number (7 or 1.5f32) or an array (0f32x1024). "
            f"Types are {', '.join(ARGUMENT_TYPES)}"
        )
    digits = found["value"]
    whole = re.fullmatch(r"[-+]?(0[xX][0-9a-fA-F]+|\d+)", digits) is not None
    value = int(digits, 16 if "x" in digits.lower() else 10) if whole else float(digits)
    if not found["kind"]:
        if found["axes"]:
            raise CommandError(f"argument {index}: {text!r} is an array without a type; expected one, such as {digits}f32{found['axes']}")
        return KernelArgument(text, value)
    return KernelArgument(text, _make_value(index, text, value, ARGUMENT_TYPES[found["kind"]], found["axes"]))


def _make_value(index: int, text: str, value: int | float, dtype: np.dtype, axes: str) -> Any:
    """A number of a type, or an array filled with that number."""
    shape = tuple(map(int, axes.split("x")[1:]))
    if dtype.kind in "ui" and (isinstance(value, float) or not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max):
        raise CommandError(f"argument {index}: {text!r}: {value} does not fit {dtype}")
    if len(shape) > 32 or prod(shape) * dtype.itemsize > memory_bytes():
        raise CommandError(f"argument {index}: {text!r} does not fit in this machine's memory")
    with np.errstate(over="ignore"):
        number = dtype.type(value)
    return np.full(shape, number) if shape else number


def array_outputs(args: argparse.Namespace, given: list[KernelArgument]) -> dict[int, Output]:
    """The output files by argument, checked before the kernel runs."""
    if args.out is None:
        if args.overwrite:
            raise CommandError("--overwrite needs --out, which is missing")
        return {}
    inputs = {"FILE": args.file} | {f"argument {index}": arg.path for index, arg in enumerate(given) if arg.path is not None}
    try:
        args.out.mkdir(exist_ok=True)
    except (OSError, ValueError) as error:
        raise CommandError(f"out: {path_text(args.out)} cannot be created: {getattr(error, 'strerror', None) or error}") from error
    return {
        index: Output(args.out / f"arg{index}.npy", args.overwrite, "out", inputs) for index, arg in enumerate(given) if arg.is_array
    }  # fmt: skip


class BlockProgress(ProgressLine):
    """Progress in thread blocks and executed statements."""

    def __init__(self, total: int) -> None:
        super().__init__(total, sys.stderr)
        self.done = self.statements = 0  # with --compare-target the blocks of both runs count
        self.chunk: Chunk | None = None  # the blocks that are running
        self.last_shown = 0.0  # time of the last shown line, in seconds after the start

    def watch(self, event: ExecutedStatement) -> None:
        """Count a statement that `tcemu.ptx.run` has executed."""
        if event.chunk is not self.chunk:
            self.done += self.chunk.shape[0] if self.chunk is not None else 0
            self.chunk = event.chunk
        self.statements += 1
        if self.elapsed - self.last_shown >= REPORT_PAUSE:
            self.last_shown = self.elapsed
            done = min(self.done, self.total)
            self.update(f"tcemu run: {done:,} of {self.total:,} blocks, {self.statements:,} statements, {self.elapsed:.0f} s")

    def end(self) -> None:
        """Finish the line if one was shown."""
        if self.last_shown:
            self.update(f"tcemu run: {self.total:,} blocks, {self.statements:,} statements, {self.elapsed:.0f} s", last=True)


def _run_kernel(args: argparse.Namespace) -> int:
    grid, block = parse_axes("grid", args.grid), parse_axes("block", args.block)
    if args.file == Path(EXAMPLE_FILE) and not args.file.exists():
        args.file = Path(str(files("tcemu.faces.data") / EXAMPLE_FILE))
        print(f"{EXAMPLE_FILE} is the example that tcemu brings along: {path_text(args.file)}")
    text = read_source(args.file)
    given = [parse_argument(index, word) for index, word in enumerate(args.args)]
    if args.compare_target is not None and args.checked:
        raise CommandError("--checked and --compare-target exclude each other: undefined behaviour has no first difference")
    try:
        module = _make_module(args, text)
        entry = _entry_name(module, args.entry)
        target, other = args.target or module.target, args.compare_target
        outputs = array_outputs(args, given)
        progress = BlockProgress(prod(grid))
        words: dict[str, Any] = {"entry": entry, "grid": grid, "block": block, "args": [arg.value for arg in given]}
        words |= {"shared_bytes": args.shared_bytes, "step_limit": args.step_limit, "watch": progress.watch}
        began = time.perf_counter()
        found = compare(module, targets=(target, other), **words) if other else None
        results = found.outputs[0] if found else run(module, target=target, checked=args.checked, **words)
    except MemoryError as error:
        raise CommandError(f"the kernel's memory does not fit in this machine's: {error}") from error
    except (ValueError, TypeError, StepLimit) as error:
        raise CommandError(f"{path_text(args.file)}: {error}") from error
    progress.end()
    seconds = time.perf_counter() - began
    sizes = " by ".join(",".join(map(str, size)) for size in (grid, block))
    print(f"{entry}, {sizes}, {target}: {prod(grid) * prod(block):,} threads in {seconds:.2f} s, compilation included")
    pairs = zip(given, module.entries[entry].parameters, strict=True)
    arrays = [(index, arg) for index, (arg, parameter) in enumerate(pairs) if arg.is_array and not parameter.shape]
    for (index, arg), result in zip(arrays, results, strict=True):
        print(_write_array(index, arg, np.asarray(result), outputs.get(index)))
    if found:
        print(f"\n{found}")
    return 0


def _make_module(args: argparse.Namespace, text: str) -> Module:
    """Parse PTX, or compile CUDA C++.

    Raises:
        CommandError: Options do not fit the kind of file.
    """
    if args.file.suffix != ".cu":
        if args.options:
            raise CommandError(f"--option is for CUDA C++, a file that ends in .cu; {path_text(args.file)} is PTX")
        return parse(text)
    if args.target is None:
        raise CommandError("--target is required for CUDA C++: the GPU for which it is compiled, as H100")
    return compile_source(
        text, target=args.target, options=[f"--include-path={args.file.resolve().parent}", *args.options],
        name_expressions=[] if args.entry is None else [args.entry],
    )  # fmt: skip


def _entry_name(module: Module, wanted: str | None) -> str:
    """The name of the kernel to run.

    Raises:
        CommandError: The file has no such entry, or several and none was requested.
    """
    names = ", ".join(module.entries) or "it has none"
    wanted = module.name_expressions.get(wanted, wanted) if wanted is not None else None
    if wanted is not None and wanted not in module.entries:
        raise CommandError(f"the file has no entry {wanted!r}; its entries: {names}")
    if wanted is None and len(module.entries) != 1:
        raise CommandError(f"--entry is required, because the file has {len(module.entries)} entries: {names}")
    return wanted or next(iter(module.entries))


def _write_array(index: int, arg: KernelArgument, result: np.ndarray, output: Output | None) -> str:
    """Write an array and return the line that describes its changes."""
    before = np.ascontiguousarray(arg.value)
    size = before.dtype.itemsize
    old, new = (np.ascontiguousarray(x).view(np.uint8).reshape(-1, size) if x.size else x for x in (before, result))
    changed = int(np.any(old != new, axis=-1).sum()) if before.size else 0
    if output is not None:
        output.write(npy_bytes(result))
    where = "" if output is None else f", in {path_text(output.path)}"
    return f"argument {index}, {arg.name}: {result.dtype} {list(result.shape)}, {changed:,} of {result.size:,} elements changed{where}"
