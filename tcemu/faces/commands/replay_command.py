"""`tcemu replay`: find by probes how a library multiplies, show recipes, find where two diverge, and what rates of differences mean."""

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tcemu.faces.commands import CommandError, command_errors
from tcemu.faces.commands.array_files import Output, load_array, path_text
from tcemu.operations.products.library.kernel_json import dumps, loads
from tcemu.operations.products.library.kernel_recipe import SCALES, KernelRecipe
from tcemu.uses.replay.attribution import DRAWS, GPUS, SLACK, SLICE_COUNTS, attribute
from tcemu.uses.replay.black_box import FRAMEWORKS, ProductForm
from tcemu.uses.replay.fingerprinting import fingerprint
from tcemu.uses.replay.kernel_profiles import MIN_PROBABILITY
from tcemu.uses.replay.order_changes import find_order_changes
from tcemu.uses.replay.recipe_divergence import find_divergence

LIBRARY_FUNCTIONS = {"numpy": "numpy:matmul", "jax": "jax.numpy:matmul", "torch": "torch:matmul"}
MAX_ROWS = 1 << 16  # numbers of rows that `orders` looks at
MAX_RECIPE_BYTES = 1 << 20  # size limit of a recipe file
UNDETERMINED_STATUS = 3  # exit status of an undetermined fingerprint


def add_replay(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "replay",
        description="Finds by probes in which order a library's matrix product adds, and where two such orders diverge.",
    )
    commands = parser.add_subparsers(dest="replay", required=True, metavar="WHAT")
    found = commands.add_parser(
        "fingerprint",
        help="find the order of a library's product",
        description="Calls a function with probes and reports in which order, and with which arithmetic, it adds, or that this is "
        "undetermined (exit status 3).",
        epilog="example: tcemu replay fingerprint numpy 16 16 256 --dtype f32",
    )
    found.add_argument(
        "function", help=f"{', '.join(LIBRARY_FUNCTIONS)} for their matmul, or MODULE:FUNCTION, which takes A [M, K] and B [K, N]"
    )
    for name in ("m", "n", "k"):
        found.add_argument(name, type=int, metavar=name.upper())
    found.add_argument(
        "--dtype", default="f16", help="of both operands: f16, bf16, f32, e4m3, e5m2; or of A and B: e5m2,e4m3 (default: f16)"
    )
    found.add_argument("--scales", choices=SCALES, help="the function takes scale_a and scale_b: one per tensor, or one per row and column")
    found.add_argument("--bias", choices=("f32", "f16", "bf16"), help="the function takes a bias [N] in this format")
    found.add_argument("--framework", choices=FRAMEWORKS, help="the library of the function's arrays (default: by its module)")
    found.add_argument("--device", help="device of the operands: cuda, cpu, gpu (default: the framework's)")
    found.add_argument("--calls", type=int, default=64, help="maximum number of calls (default: 64)")
    found.add_argument("--seed", type=int, default=1, help="seed of the probes (default: 1)")
    found.add_argument("--out", type=Path, metavar="FILE", help="write the recipe to this file, as JSON")
    found.add_argument("--overwrite", action="store_true", help="replace an existing FILE")
    found.add_argument("--quiet", action="store_true", help="no progress")
    shows = commands.add_parser("show", help="print a recipe", description="Prints a recipe from its file.")
    shows.add_argument("file", type=Path, metavar="FILE")
    differ = commands.add_parser(
        "diff",
        help="find where two recipes diverge",
        description="Multiplies A and B by two recipes, counts the outputs that differ, and reports the first sum at which an "
        "output diverges.",
    )
    differ.add_argument("a", type=Path, metavar="A.npy")
    differ.add_argument("b", type=Path, metavar="B.npy")
    differ.add_argument("--left", type=Path, required=True, metavar="FILE", help="a recipe")
    differ.add_argument("--right", type=Path, required=True, metavar="FILE", help="the other")
    orders = commands.add_parser(
        "orders",
        help="at which M a layer's order changes",
        description="Prints the order of a library's product M x N x K for each range of M, as it was measured on a GPU or as a rule "
        "predicts it, and the M at which it changes.",
        epilog="example: tcemu replay orders jax-bf16 4096 4096 --rows 1:512",
    )
    orders.add_argument("library", help="name of a profile, such as torch-bf16")
    orders.add_argument("n", type=int, metavar="N")
    orders.add_argument("k", type=int, metavar="K")
    orders.add_argument("--rows", default="1:512", metavar="FIRST:LAST", help="range of M (default: 1:512)")
    orders.add_argument(
        "--min-probability", type=float, default=MIN_PROBABILITY, metavar="P",
        help=f"predictions with a lower probability count as unknown (default: {MIN_PROBABILITY})",
    )  # fmt: skip
    _add_attribute(commands)
    parser.set_defaults(run=_run_replay)


def _add_attribute(commands: Any) -> None:
    rates = commands.add_parser(
        "attribute",
        help="what a reported rate of differing outputs means",
        description="Computes a product by many pairs of orders, formats of partial sums and GPUs, and says which pairs give the reported "
        "numbers and which cannot. --differing 0:1 shows what every pair gives.",
        epilog='example: tcemu replay attribute 512 4096 4096 --differing 0.2038 --largest 1.0 --law "normal(-0.5, 1)" --gpu A100',
    )
    for name in ("m", "n", "k"):
        rates.add_argument(name, type=int, metavar=name.upper())
    rates.add_argument("--dtype", default="f16", help="of both operands: f16, bf16, f32, e4m3, e5m2 (default: f16)")
    rates.add_argument("--out", metavar="FORMAT", help="of the outputs: f32, f16, bf16 (default: that of the operands)")
    for name, text in (
        ("differing", "reported share of outputs that differ, as 0.0038"),
        ("largest", "reported largest difference"),
        ("largest-relative", "reported largest difference over the magnitude of the right side"),
    ):
        rates.add_argument(f"--{name}", metavar="X", help=f"{text}; LOW:HIGH for a range")
    for name, text in (
        ("relative-above", "magnitudes of the right side from which relative differences were taken"),
        ("atol", "an output differs by more than ATOL + RTOL * |right|"),
        ("rtol", "see --atol"),
    ):
        rates.add_argument(f"--{name}", type=float, default=0.0, metavar="X", help=f"{text} (default: 0)")
    rates.add_argument(
        "--law", default="normal",
        help='of the operands: normal, "normal(MEAN, DEVIATION)", uniform, "uniform(LOW, HIGH)" (default: normal)',
    )  # fmt: skip
    rates.add_argument("--gpu", action="append", metavar="NAME", help=f"may be repeated (default: {', '.join(GPUS)})")
    rates.add_argument(
        "--slices", default=",".join(map(str, SLICE_COUNTS)), metavar="N,...", help="numbers of slices of K (default: %(default)s)"
    )
    rates.add_argument("--draws", type=int, default=DRAWS, help="draws of at most 48 x 48 outputs (default: %(default)s)")
    rates.add_argument("--slack", type=float, default=SLACK, help="relative error granted to reported numbers (default: %(default)s)")
    rates.add_argument("--seed", type=int, default=0, help="seed of the operands (default: 0)")
    rates.add_argument("--json", action="store_true", help="print every pair as JSON")


def _run_replay(args: argparse.Namespace) -> int:
    runs = {
        "fingerprint": _run_fingerprint, "show": _run_show, "diff": _run_diff, "orders": _run_orders, "attribute": _run_attribute,
    }  # fmt: skip
    return runs[args.replay](args)


def _run_fingerprint(args: argparse.Namespace) -> int:
    output = None if args.out is None else Output(args.out, args.overwrite, "the recipe")
    fn = import_function(args.function)
    framework = args.framework or (args.function if args.function in LIBRARY_FUNCTIONS else None)

    def counted_call(a: Any, b: Any, calls: list[int] = [0], **epilogue: Any) -> Any:  # noqa: B006
        calls[0] += 1
        if not args.quiet:
            print(f"call {calls[0]} of at most {args.calls}", file=sys.stderr, flush=True)
        return fn(a, b, **epilogue)

    try:
        counted_call.__module__, counted_call.__qualname__ = str(getattr(fn, "__module__", None) or ""), args.function
        dtypes = tuple(args.dtype.split(","))
        found = fingerprint(
            counted_call, args.m, args.n, args.k, operand_dtype=dtypes if len(dtypes) > 1 else args.dtype,
            form=ProductForm(args.scales, args.bias),
            framework=framework, device=args.device, max_calls=args.calls, seed=args.seed,
        )  # fmt: skip
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise CommandError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    print(found)
    if found.recipe is None:
        return UNDETERMINED_STATUS
    if output is not None:
        output.write(dumps(found.recipe).encode())
    return 0


def import_function(text: str) -> Callable:
    """The function named by MODULE:FUNCTION or by a library's name.

    Raises:
        CommandError: There is no such function.
    """
    module, colon, name = LIBRARY_FUNCTIONS.get(text, text).partition(":")
    if not colon or not module or not name:
        raise CommandError(f"{text!r} names no function; expected {', '.join(LIBRARY_FUNCTIONS)}, or MODULE:FUNCTION")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise CommandError(f"{text!r}: {error}") from error
    if not callable(found):
        raise CommandError(f"{text!r} is not a function")
    return found


def read_recipe(name: str, path: Path) -> KernelRecipe:
    """Read a recipe from its file.

    Raises:
        CommandError: The file cannot be read or holds no recipe.
    """
    try:
        if not path.is_file():
            raise CommandError(f"{name}: {path_text(path)} is no file")
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise CommandError(
                f"{name}: {path_text(path)} has {path.stat().st_size:,} bytes; a recipe has no more than {MAX_RECIPE_BYTES:,}"
            )
        return loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{name}: {path_text(path)} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # UnicodeDecodeError too
        raise CommandError(f"{name}: {path_text(path)} holds no recipe: {error}") from error


def _run_show(args: argparse.Namespace) -> int:
    print(read_recipe("FILE", args.file))
    return 0


def _run_diff(args: argparse.Namespace) -> int:
    left, right = read_recipe("--left", args.left), read_recipe("--right", args.right)
    a, b = load_array("A", args.a), load_array("B", args.b)
    if a.ndim != 2 or b.ndim != 2 or not all(np.issubdtype(x.dtype, np.floating) or x.dtype.kind == "V" for x in (a, b)):
        raise CommandError(f"A is {a.dtype}{list(a.shape)} and B is {b.dtype}{list(b.shape)}; expected floats, [M, K] and [K, N]")
    with command_errors(ValueError, TypeError):
        found = find_divergence(a, b, left.without_shape(), right.without_shape())
    print(found)
    return 0


def _run_orders(args: argparse.Namespace) -> int:
    first, colon, last = args.rows.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < int(first) + MAX_ROWS):
        raise CommandError(f"--rows: got {args.rows[:40]!r}; expected FIRST:LAST, at most {MAX_ROWS:,} numbers from 1 on, such as 1:512")
    with command_errors(ValueError):
        print(find_order_changes(args.library, args.n, args.k, range(int(first), int(last) + 1), min_probability=args.min_probability))
    return 0


def _parse_reported(name: str, text: str | None) -> float | tuple[float, float] | None:
    """Convert "X" or "LOW:HIGH" to numbers."""
    try:
        ends = [float(part) for part in (text or "").split(":")] if text else []
    except ValueError:
        ends = [float("nan")] * 3
    if len(ends) > 2:
        raise CommandError(f"--{name}: got {str(text)[:40]!r}; expected a number, or LOW:HIGH")
    return None if not ends else ends[0] if len(ends) == 1 else (ends[0], ends[1])


def _run_attribute(args: argparse.Namespace) -> int:
    counts = args.slices.split(",")
    if not all(count.strip().isdecimal() for count in counts):
        raise CommandError(f"--slices: got {args.slices[:40]!r}; expected integers with commas between, such as 2,3,4")
    with command_errors(ValueError, TypeError):
        found = attribute(
            (args.m, args.n, args.k), args.dtype, out=args.out, law=args.law, gpus=args.gpu or GPUS, slices=[*map(int, counts)],
            differing=_parse_reported("differing", args.differing), largest=_parse_reported("largest", args.largest),
            largest_relative=_parse_reported("largest-relative", args.largest_relative), relative_above=args.relative_above,
            atol=args.atol, rtol=args.rtol, draws=args.draws, slack=args.slack, seed=args.seed,
        )  # fmt: skip
    print(found.to_json(1) if args.json else found)
    return 0
