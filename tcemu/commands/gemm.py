"""`tcemu gemm`: one matrix product with an instruction's arithmetic, and how far it is from the exact one."""

import argparse
import sys
import time
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from pathlib import Path

import jax
import numpy as np

from tcemu.commands import OP, TARGET, CommandError
from tcemu.commands.arrays import check_size, load, npy, shape_of_files
from tcemu.commands.outputs import Output, shown
from tcemu.commands.products import Asked, Matrices, asked
from tcemu.commands.progress import ProgressLine
from tcemu.compilation import compile_clock
from tcemu.formats import F64, Format
from tcemu.linalg.recipes import RECIPES
from tcemu.linalg.shapes import shape_of_product
from tcemu.study.accuracy import Reference, Tally, ulp
from tcemu.text import wrapped

BLOCK = 2**28  # multiply-accumulates between two reports of progress, about
SAMPLE = 64  # outputs computed again in rational arithmetic, over all blocks
F64_SAMPLE = 1024  # the same where float64 cannot judge, so that all figures come from the sample
KINDS = {  # what is measured: its line in the report
    "emulated": "D from the exact product",
    "inputs": "  of it, by rounding the inputs",
    "arithmetic": "  of it, by the instruction's sums",
    "plain": "plain float32 from the exact product",
    "apart": "D from plain float32",
}


def add_gemm(subparsers) -> None:
    """Adds the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "gemm",
        description="Computes D = A·B + C with the arithmetic of one tensor-core instruction, bit for bit, and prints how far D is from "
        "the exact product and from plain float32. Files are .npy: A is [..., M, K], B [..., K, N], C and D [..., M, N].",
        epilog="example: tcemu gemm A.npy B.npy --op f16 --target H100 -o D.npy",
    )
    parser.add_argument("a", metavar="A.npy", type=Path)
    parser.add_argument("b", metavar="B.npy", type=Path)
    parser.add_argument("-c", metavar="C.npy", type=Path, help="the matrix to add to (default: zero)")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--op", metavar="SPELLING", help=OP)
    given.add_argument("--recipe", metavar="NAME", help=f'instead: as a library multiplies, also as "fp8 on H100": {", ".join(RECIPES)}')
    parser.add_argument("--target", help=f"{TARGET} (default: sm_90a, or where the recipe is used)")
    parser.add_argument("--rounding", choices=("RN", "RZ", "RM", "RP"), help="of the inputs (default: RN; a recipe says it itself)")
    parser.add_argument("--saturate", action="store_true", help="inputs beyond the format's largest value become it (else Inf or NaN)")
    parser.add_argument("--what-if", metavar="FIELD=VALUE[,...]", help="change the arithmetic, as fraction_bits=13 (fields of tcemu.Model)")
    parser.add_argument("-o", dest="output", metavar="D.npy", type=Path, help="where D goes (default: only the report is made)")
    parser.add_argument("--overwrite", action="store_true", help="the file of -o may exist; one that is read is never overwritten")
    parser.set_defaults(run=run_gemm)


@dataclass
class NotFinite:
    """Elements of a matrix that are no finite numbers."""

    nan: int = 0
    infinite: int = 0


@dataclass
class ErrorReport:
    """What the blocks showed, gathered."""

    tallies: dict[str, Tally]
    bound: float = 0.0  # of the reference's error
    bound_ulps: float = 0.0
    sampled: int = 0  # outputs computed again in rational arithmetic
    outputs: int = 0
    counted: int = 0  # outputs in the figures
    not_finite: dict[str, NotFinite] = field(default_factory=lambda: {name: NotFinite() for name in ("D", "exact", "plain float32")})
    seconds: float = 0.0  # spent in the emulation, without
    compiling: float = 0.0  # what tracing and compiling it took


class Progress(ProgressLine):
    """Rows done."""

    def compiling(self, done: int) -> None:
        """Before the first block, on a terminal: what it waits for."""
        if not done and self.stream.isatty():
            text = "tcemu gemm: compiling the product"
            self.covered = len(text)
            print(text, end="", file=self.stream, flush=True)

    def report(self, done: int) -> None:
        self.say(f"tcemu gemm: {done} of {self.total} rows, {self.passed:.0f} s", last=done == self.total)


def rows_of_a_block(shape: tuple[int, ...], k: int) -> int:
    """How many rows of D, [..., M, N], make about BLOCK multiply-accumulates; all of them if that is fewer, and one at least."""
    rows = max(1, shape[-2])
    return max(1, min(rows, BLOCK // max(1, prod(shape) // rows * k)))


def take(x: np.ndarray, start: int, size: int) -> np.ndarray:
    """Rows of x [..., M, n] from `start` on, filled up with zeros to `size`, so that every block has one shape and compiles once."""
    rows = x[..., start : start + size, :]
    missing = size - rows.shape[-2] if start else 0
    return np.pad(rows, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)]) if missing else rows


def plain_product(a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> np.ndarray:
    """A·B + C in float32 as XLA computes it on this machine, inputs and all."""
    with np.errstate(over="ignore"):
        a, b, *rest = (np.asarray(x, np.float32) for x in ((a, b) if c is None else (a, b, c)))
    product = jax.numpy.matmul(a, b, precision="highest")
    return np.asarray(product + rest[0] if rest else product)


def judge(report: ErrorReport, exact: Reference, held: Reference, start: int, d: np.ndarray, plain: np.ndarray, sample: int) -> None:
    """Adds a block to the report.

    d, plain: its rows from `start` on, [..., rows, N]. exact: the product of the inputs as they are in the files; held: that of the inputs
    rounded to the instruction's formats. sample: how many outputs are computed in rational arithmetic.
    """
    fmt = report.tallies["emulated"].fmt
    values, bound = exact.rows(start, start + d.shape[-2])
    held_values = values if held is exact else held.rows(start, start + d.shape[-2])[0]
    d, plain = d.astype(np.float64), plain.astype(np.float64)
    for name, x in (("D", d), ("exact", values), ("plain float32", plain)):
        report.not_finite[name].nan += int(np.isnan(x).sum())
        report.not_finite[name].infinite += int(np.isinf(x).sum())
    report.outputs += d.size
    places = np.argwhere(np.isfinite(d) & np.isfinite(values) & np.isfinite(plain) & np.isfinite(held_values))
    report.counted += len(places)
    chosen = places[np.random.default_rng(start).permutation(len(places))[:sample]]
    truths = [exact.element((*place[:-2], place[-2] + start, place[-1])) for place in chosen]
    report.sampled += len(chosen)
    if fmt == F64:  # float64 inputs are not rounded, so `held` is `exact`
        at = tuple(chosen.T)
        of_d, of_plain = (
            np.array([float(Fraction(x) - truth) for x, truth in zip(y[at].tolist(), truths, strict=True)]) for y in (d, plain)
        )
        errors = {"emulated": of_d, "inputs": np.zeros(len(truths)), "arithmetic": of_d, "plain": of_plain}
    else:
        at = tuple(places.T)
        errors = {"emulated": d[at] - values[at], "inputs": held_values[at] - values[at]}
        errors |= {"arithmetic": d[at] - held_values[at], "plain": plain[at] - values[at]}
        report.bound = max(report.bound, float(bound[at].max(initial=0.0)))
        report.bound_ulps = max(report.bound_ulps, float((bound[at] / ulp(values[at], fmt))[values[at] != 0].max(initial=0.0)))
        for place, truth in zip(chosen, truths, strict=True):
            off = abs(Fraction(float(values[tuple(place)])) - truth)
            if off > Fraction(float(bound[tuple(place)])):
                raise AssertionError(f"the float64 product at {place.tolist()} is off by {float(off)}, more than its bound")
    for name, error in (errors | {"apart": d[at] - plain[at]}).items():
        report.tallies[name].add(error, values[at])


def multiply(way: Asked, kept: Matrices, a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> tuple[np.ndarray, ErrorReport]:
    """D and the report on it, made in blocks of rows, so that the reference of only one is held at a time. kept: what is multiplied."""
    shape = shape_of_product(a.shape, b.shape)
    report = ErrorReport({name: Tally(way.result) for name in KINDS})
    wide = a.astype(np.float64), b.astype(np.float64), None if c is None else c.astype(np.float64)
    exact, held = Reference.of(*wide), Reference.of(*kept)
    if all(np.array_equal(x, y, equal_nan=True) for x, y in zip(wide, kept, strict=True) if x is not None and y is not None):
        held = exact
    size = rows_of_a_block(shape, a.shape[-1]) if way.by_rows else max(1, shape[-2])
    starts = range(0, max(1, shape[-2]), size)  # one empty block where there are no rows
    sample = -(-(F64_SAMPLE if way.result == F64 else SAMPLE) // len(starts))
    progress, clock = Progress(shape[-2], sys.stderr), compile_clock()
    pieces = []
    for start in starts:
        stop = min(start + size, shape[-2])
        rows, addend = take(a, start, size), None if c is None else take(c, start, size)
        began, compiled = time.perf_counter(), clock.seconds
        progress.compiling(start)
        try:
            d = np.asarray(way.product(rows, b, addend))[..., : stop - start, :]
        except (ValueError, TypeError) as error:
            raise CommandError(str(error)) from error
        compiled = clock.seconds - compiled
        report.compiling += compiled
        report.seconds += time.perf_counter() - began - compiled
        pieces.append(d)
        if way.op.bit_op != "xor":
            with np.errstate(all="ignore"):
                plain = plain_product(rows, b, addend)[..., : stop - start, :]
                judge(report, exact, held, start, d, plain, sample)
        progress.report(stop)
    return np.concatenate(pieces, axis=-2), report


def table(report: ErrorReport) -> list[str]:
    """The report's figures, a line for each kind of error."""
    head = f"{'':36}{'error':>20}{'ulps':>22}{'bits lost':>22}"
    lines = [head, f"{'':36}" + f"{'largest':>11}{'mean':>11}" * 3]
    return lines + [f"{KINDS[name]:36}" + "".join(f"{x:>11.3g}" for x in tally.figures) for name, tally in report.tallies.items()]


def remarks(report: ErrorReport, fmt: Format) -> list[str]:
    """What a reader must know to use the figures: what is left out, what an ulp is, how exact the exact product is."""
    lines = []
    if report.counted < report.outputs:
        kinds = "; ".join(f"{name}: {count.nan} NaN, {count.infinite} infinite" for name, count in report.not_finite.items())
        lines.append(
            f"{report.outputs - report.counted:,} of {report.outputs:,} outputs are not finite and left out of the figures. {kinds}."
        )
    lines.append(f"An ulp is the distance of neighbouring {fmt} values at the exact result; bits lost are log2 of the error in ulps.")
    if fmt == F64:
        return [
            *lines,
            f"Figures are of {report.sampled:,} outputs chosen with a fixed seed; their exact product is of rational arithmetic.",
        ]
    if report.bound == 0:
        basis = "in float64, which rounds nowhere on these inputs"
    else:
        basis = f"in float64, off by at most {report.bound:.2g} ({report.bound_ulps:.2g} ulps)"
    return [*lines, f"The exact product is of the values in the files, {basis}; {report.sampled:,} outputs checked in rational arithmetic."]


def run_gemm(args: argparse.Namespace) -> int:
    """Does what the words say. Raises CommandError."""
    way = asked(args)
    inputs = {name: path for name, path in (("A", args.a), ("B", args.b), ("C", args.c)) if path is not None}
    if args.output is None and args.overwrite:
        raise CommandError("--overwrite is about the file of -o, which is missing")
    output = None if args.output is None else Output(args.output, args.overwrite, "D", inputs)
    arrays = {name: load(name, path) for name, path in inputs.items()}
    a, b, c = arrays["A"], arrays["B"], arrays.get("C")
    shape = shape_of_files(a, b, c)
    check_size(shape, way.result)
    terms = [f"A {list(a.shape)} {a.dtype} · B {list(b.shape)} {b.dtype}"] + ([] if c is None else [f"C {list(c.shape)} {c.dtype}"])
    print(way.said, flush=True)
    try:
        kept, said = way.hold((a, b, c))
        d, report = multiply(way, kept, a, b, c)
    except MemoryError as error:
        raise CommandError(f"the product does not fit in memory: {error}") from error
    unwritten = None if output is None else written(output, d)
    print(f"D {list(d.shape)} {d.dtype} = {' + '.join(terms)}")
    print(f"{prod(shape) * a.shape[-1]:,} multiply-accumulates in {report.seconds:.2f} s, after {report.compiling:.2f} s of compiling")
    if output is not None and unwritten is None:
        print(f"D is in {shown(output.path)}")
    print()
    if report.counted:
        print("\n".join([*table(report), ""]))
    if said:
        print("\n".join([*said, ""]))
    if way.op.bit_op == "xor":
        print("No error is given: .xor.popc counts bits that differ, which is no product.")
    elif not report.outputs:
        print("D is empty, so there is no error to give.")
    else:
        print("\n".join(remarks(report, way.result)))
    print("\n".join(wrapped(way.known)))
    if unwritten is not None:
        raise unwritten
    return 0


def written(output: Output, d: np.ndarray) -> CommandError | None:
    """Writes D. What prevents it comes back, so that the report is not lost with it."""
    try:
        output.write(npy(d))
    except CommandError as error:
        return error
    return None
