"""`tcemu replay`: how a library multiplies, found by probes; recipes shown; and where two of them part."""

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tcemu.commands import CommandError
from tcemu.commands.arrays import load
from tcemu.commands.outputs import Output, shown
from tcemu.linalg.kernel_epilogue import SCALES
from tcemu.linalg.kernel_json import dumps, loads
from tcemu.linalg.kernel_recipes import KernelRecipe
from tcemu.replay.boxes import FRAMEWORKS
from tcemu.replay.fingerprint import fingerprint
from tcemu.replay.forms import Form
from tcemu.replay.parting import parting

KNOWN = {"numpy": "numpy:matmul", "jax": "jax.numpy:matmul", "torch": "torch:matmul"}
LARGEST = 1 << 20  # bytes of a recipe's file
OUT_OF_REACH = 3  # exit status where nothing was determined


def add_replay(subparsers) -> None:
    """Adds the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "replay",
        description="How a library's matrix product adds up, found by probes of a black box; and where two such orders part.",
    )
    commands = parser.add_subparsers(dest="replay", required=True, metavar="WHAT")
    found = commands.add_parser(
        "fingerprint",
        help="find the order of a library's product",
        description="Asks a function for products of probes and says in which order, and with which arithmetic, it adds; or that it cannot "
        "say so. Exit status 3: undetermined.",
        epilog="example: tcemu replay fingerprint numpy 16 16 256 --dtype f32",
    )
    found.add_argument("function", help=f"{', '.join(KNOWN)} for their matmul, or MODULE:FUNCTION, which takes A [M, K] and B [K, N]")
    for name in ("m", "n", "k"):
        found.add_argument(name, type=int, metavar=name.upper())
    found.add_argument(
        "--dtype", default="f16", help="of both operands: f16, bf16, f32, e4m3, e5m2; or of A and B: e5m2,e4m3 (default: f16)"
    )
    found.add_argument("--scales", choices=SCALES, help="it takes scale_a and scale_b: one for each tensor, or each row and column")
    found.add_argument("--bias", choices=("f32", "f16", "bf16"), help="it takes a bias in this format, [N]")
    found.add_argument("--framework", choices=FRAMEWORKS, help="whose arrays the function takes (default: by its module)")
    found.add_argument("--device", help="where its operands are: cuda, cpu, gpu (default: the framework's own)")
    found.add_argument("--calls", type=int, default=64, help="of the function, at most (default: 64)")
    found.add_argument("--seed", type=int, default=1, help="of the probes (default: 1)")
    found.add_argument("--out", type=Path, metavar="FILE", help="write the recipe there, as JSON")
    found.add_argument("--overwrite", action="store_true", help="FILE may exist")
    found.add_argument("--quiet", action="store_true", help="no progress")
    shows = commands.add_parser("show", help="print a recipe", description="Prints a recipe from its file.")
    shows.add_argument("file", type=Path, metavar="FILE")
    differ = commands.add_parser(
        "diff",
        help="where two recipes part",
        description="Multiplies A and B by two recipes, counts the outputs that differ, and says at which sum the first of them parts.",
    )
    differ.add_argument("a", type=Path, metavar="A.npy")
    differ.add_argument("b", type=Path, metavar="B.npy")
    differ.add_argument("--left", type=Path, required=True, metavar="FILE", help="a recipe")
    differ.add_argument("--right", type=Path, required=True, metavar="FILE", help="the other")
    parser.set_defaults(run=run_replay)


def run_replay(args: argparse.Namespace) -> int:
    """Does what the words say. Raises CommandError."""
    return {"fingerprint": _fingerprint, "show": _show, "diff": _diff}[args.replay](args)


def _fingerprint(args: argparse.Namespace) -> int:
    output = None if args.out is None else Output(args.out, args.overwrite, "the recipe")
    fn = function(args.function)
    framework = args.framework or (args.function if args.function in KNOWN else None)

    def asked(a: Any, b: Any, calls: list[int] = [0], **besides: Any) -> Any:  # noqa: B006  one command, one count
        calls[0] += 1
        if not args.quiet:
            print(f"call {calls[0]} of at most {args.calls}", file=sys.stderr, flush=True)
        return fn(a, b, **besides)

    try:
        asked.__module__, asked.__qualname__ = str(getattr(fn, "__module__", None) or ""), args.function
        dtypes = tuple(args.dtype.split(","))
        found = fingerprint(
            asked, args.m, args.n, args.k, dtype=dtypes if len(dtypes) > 1 else args.dtype, form=Form(args.scales, args.bias),
            framework=framework, device=args.device, calls=args.calls, seed=args.seed,
        )  # fmt: skip
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise CommandError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    print(found)
    if found.recipe is None:
        return OUT_OF_REACH
    if output is not None:
        output.write(dumps(found.recipe).encode())
    return 0


def function(text: str) -> Callable:
    """The function of MODULE:FUNCTION, or of a library's name. Raises CommandError."""
    module, colon, name = KNOWN.get(text, text).partition(":")
    if not colon or not module or not name:
        raise CommandError(f"{text!r} names no function; wanted {', '.join(KNOWN)}, or MODULE:FUNCTION")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise CommandError(f"{text!r}: {error}") from error
    if not callable(found):
        raise CommandError(f"{text!r} is no function")
    return found


def read(name: str, path: Path) -> KernelRecipe:
    """A recipe from its file. Raises CommandError."""
    try:
        if not path.is_file():
            raise CommandError(f"{name}: {shown(path)} is no file")
        if path.stat().st_size > LARGEST:
            raise CommandError(f"{name}: {shown(path)} has {path.stat().st_size:,} bytes; a recipe has no more than {LARGEST:,}")
        return loads(path.read_text())
    except OSError as error:
        raise CommandError(f"{name}: {shown(path)} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # UnicodeDecodeError too
        raise CommandError(f"{name}: {shown(path)} holds no recipe: {error}") from error


def _show(args: argparse.Namespace) -> int:
    print(read("FILE", args.file))
    return 0


def _diff(args: argparse.Namespace) -> int:
    left, right = read("--left", args.left), read("--right", args.right)
    a, b = load("A", args.a), load("B", args.b)
    if a.ndim != 2 or b.ndim != 2 or not all(np.issubdtype(x.dtype, np.floating) or x.dtype.kind == "V" for x in (a, b)):
        raise CommandError(f"A is {a.dtype}{list(a.shape)} and B is {b.dtype}{list(b.shape)}; wanted floats, [M, K] and [K, N]")
    try:
        found = parting(a, b, left.of_any_shape(), right.of_any_shape())
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from error
    print(found)
    return 0
