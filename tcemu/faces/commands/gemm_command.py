"""`tcemu gemm`: one matrix product with the arithmetic of an instruction or a recipe, and its distance from the exact product."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from tcemu.base.compilation import compile_clock
from tcemu.base.progress import ProgressLine
from tcemu.base.text import table_lines, wrap_lines
from tcemu.engine.architectures.evidence import Evidence
from tcemu.engine.architectures.lookup import find_row, require_product
from tcemu.engine.formats.number_formats import F64, Format
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.engine.isa.legality import check, recipe_name
from tcemu.engine.isa.targets import DEFAULT_TARGET
from tcemu.faces.commands import OP_HELP, TARGET_HELP, CommandError, command_errors
from tcemu.faces.commands.arguments import apply_what_if
from tcemu.faces.commands.array_files import Output, check_size, load_array, npy_bytes, output_shape, path_text
from tcemu.operations.products.gemm import gemm, require_sparsity
from tcemu.operations.products.matmul import matmul
from tcemu.operations.products.product_arguments import as_jax_array, product_shape
from tcemu.operations.products.recipes import RECIPES, Recipe, get_recipe, names_recipe_alone
from tcemu.operations.products.unit_choice import describe_unit
from tcemu.uses.emulation.product_errors import count_out_of_range, quantize_operands
from tcemu.uses.study.accuracy import ErrorTally, Reference, round_values, ulp

BEYOND_RANGE = np.array([1e300])  # beyond the range of every format but f64
BLOCK_MACS = 2**28  # approximate multiply-accumulates of a block of rows
SAMPLED_OUTPUTS = 64  # outputs recomputed in rational arithmetic, over all blocks
F64_SAMPLED_OUTPUTS = 1024  # the same for f64, where float64 cannot serve as the exact product and all figures come from the sample
ERROR_KINDS = {  # name of an error -> its line in the report
    "emulated": "D from the exact product",
    "inputs": "  of it, by rounding the inputs",
    "arithmetic": "  of it, by the instruction's sums",
    "plain": "plain float32 from the exact product",
    "apart": "D from plain float32",
}
Matrices = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # A, B, C


def add_gemm(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
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
    given.add_argument("--op", metavar="SPELLING", help=OP_HELP)
    given.add_argument(
        "--recipe",
        metavar="NAME",
        help=f'instead of --op: how a library multiplies, such as fp8 or "fp8 on H100"; one of {", ".join(RECIPES)}',
    )
    parser.add_argument("--target", help=f"{TARGET_HELP} (default: {DEFAULT_TARGET}, or the recipe's own)")
    parser.add_argument(
        "--rounding",
        type=str.upper,
        choices=("RN", "RZ", "RM", "RP", "RNA"),
        help="rounding of the inputs (default: RN; a recipe has its own)",
    )
    parser.add_argument("--saturate", action="store_true", help="clamp inputs beyond the format's largest value (default: Inf or NaN)")
    parser.add_argument(
        "--what-if", metavar="FIELD=VALUE[,...]", help="change the arithmetic, such as fraction_bits=13 (fields of tcemu.Model)"
    )
    parser.add_argument("-o", dest="output", metavar="D.npy", type=Path, help="the file for D (default: only the report is printed)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing file of -o; files that are read are never overwritten"
    )
    parser.set_defaults(run=_run_gemm)


def _run_gemm(args: argparse.Namespace) -> int:
    multiplication = parse_multiplication(args)
    inputs = {name: path for name, path in (("A", args.a), ("B", args.b), ("C", args.c)) if path is not None}
    if args.output is None and args.overwrite:
        raise CommandError("--overwrite needs the file of -o, which is missing")
    output = None if args.output is None else Output(args.output, args.overwrite, "D", inputs, ".npy")
    arrays = {name: load_array(name, path) for name, path in inputs.items()}
    a, b, c = arrays["A"], arrays["B"], arrays.get("C")
    shape = output_shape(a, b, c)
    check_size(shape, multiplication.d_format)
    terms = [f"A {list(a.shape)} {a.dtype} · B {list(b.shape)} {b.dtype}"] + ([] if c is None else [f"C {list(c.shape)} {c.dtype}"])
    print(multiplication.description, flush=True)
    try:
        rounded, remarks = multiplication.round_operands((a, b, c))
        d, report = multiply_blocks(multiplication, rounded, a, b, c)
    except MemoryError as error:
        raise CommandError(f"the product does not fit in memory: {error}") from error
    write_error = None if output is None else try_write(output, d)
    print(f"D {list(d.shape)} {d.dtype} = {' + '.join(terms)}")
    print(f"{prod(shape) * a.shape[-1]:,} multiply-accumulates in {report.seconds:.2f} s, after {report.compiling:.2f} s of compiling")
    if output is not None and write_error is None:
        print(f"D is in {path_text(output.path)}")
    print()
    if report.counted:
        print("\n".join([*error_table(report), ""]))
    if remarks:
        print("\n".join([*remarks, ""]))
    if multiplication.op.bit_op == "xor":
        print("No error is given: .xor.popc counts bits that differ, which is no product.")
    elif not report.outputs:
        print("D is empty, so there is no error to give.")
    else:
        print("\n".join(report_remarks(report, multiplication.d_format)))
    print("\n".join(wrap_lines(multiplication.evidence_text)))
    if write_error is not None:
        raise write_error
    return 0


def try_write(output: Output, d: np.ndarray) -> CommandError | None:
    """Write D. An error is returned and not raised, so that the report can be printed before it."""
    try:
        output.write(npy_bytes(d))
    except CommandError as error:
        return error
    return None


class RoundedOperands(NamedTuple):
    """The operands after rounding, in float64, and remarks on elements that their formats cannot represent."""

    arrays: Matrices
    remarks: list[str]


class Multiplication(NamedTuple):
    """A way to multiply: by an instruction or by a recipe."""

    op: MatrixMultiply
    description: str  # the first lines of the report
    evidence_text: str  # the last line of the report
    d_format: Format
    product: Callable[..., ArrayLike]  # A, B, and C or None -> D
    round_operands: Callable[[Matrices], RoundedOperands]  # the operands as the product sees them
    by_rows: bool  # D may be computed in blocks of A's rows, with the same bits


def parse_multiplication(args: argparse.Namespace) -> Multiplication:
    """The multiplication that the arguments describe.

    Raises:
        CommandError: There is no such multiplication.
    """
    with command_errors(ValueError, TypeError):
        return _instruction_multiplication(args) if args.recipe is None else _recipe_multiplication(args)


def _instruction_multiplication(args: argparse.Namespace) -> Multiplication:
    target, rounding = args.target or DEFAULT_TARGET, args.rounding or "RN"
    try:
        op = require_sparsity(require_product(check(args.op, target)))
    except ValueError as error:
        if not names_recipe_alone(args.op):
            raise
        raise CommandError(f"--op {args.op!r}: {args.op!r} is a recipe: --recipe {args.op}. {error}") from error
    if op.scaling is not None:
        recipe = recipe_name(op)
        instead = f"--recipe {recipe} finds block scales as libraries do, and " if recipe else ""
        raise CommandError(
            f"--op: {op} takes block scales, for which there is no file here; {instead}tcemu.gemm takes scale_a= and scale_b="
        )
    row = find_row(op, target)
    model = None if args.what_if is None else apply_what_if(row.model, args.what_if)
    product = partial(gemm, op=op, target=target, rounding=rounding, saturate=args.saturate, model=model)
    formats = (op.a, op.b, op.accumulator)

    def round_operands(matrices: Matrices) -> RoundedOperands:
        pairs = [(name, x, fmt) for name, x, fmt in zip("ABC", matrices, formats, strict=True) if x is not None]
        unclamped = [round_values(x, fmt, rounding) for _, x, fmt in pairs]
        rounded = [round_values(x, fmt, rounding, args.saturate) for _, x, fmt in pairs]
        remarks = [
            line for (name, x, fmt), y in zip(pairs, unclamped, strict=True) for line in _overflow_remarks(name, fmt, x, y, args.saturate)
        ]
        return RoundedOperands((rounded[0], rounded[1], rounded[2] if len(rounded) > 2 else None), remarks)

    return Multiplication(
        op,
        "\n".join([f"{op} on {target}{_what_if_suffix(args)}", *wrap_lines(describe_unit(op, target))]),
        _evidence_text(row.evidence, args),
        op.d,
        product,
        round_operands,
        by_rows=True,
    )


def _recipe_multiplication(args: argparse.Namespace) -> Multiplication:
    if args.rounding is not None:
        raise CommandError("--rounding: the recipe defines how operands are rounded; leave it out")
    chosen = get_recipe(args.recipe, args.target, backward="exact")
    if args.saturate:
        chosen = chosen.replace(a=replace(chosen.a, saturate=True), b=replace(chosen.b, saturate=True))
    known = chosen.evidence["D"]
    assert known is not None
    if args.what_if is not None:
        chosen = chosen.replace(model=apply_what_if(chosen.arithmetic, args.what_if))
    first, *more = repr(chosen).splitlines()[:-1]  # the last line describes the gradients

    def product(a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> np.ndarray:
        a, b, *rest = (x if x.dtype.kind == "f" else x.astype(np.float64) for x in (a, b, c) if x is not None)
        return np.asarray(matmul(a, b, *rest, recipe=chosen))

    description = "\n".join([f"{first}{_what_if_suffix(args)}", *more])
    return Multiplication(
        chosen.op, description, _evidence_text(known, args), chosen.dtype, product, partial(_quantize_operands, chosen), by_rows=False
    )


def _quantize_operands(chosen: Recipe, matrices: Matrices) -> RoundedOperands:
    """The operands as the recipe quantises them. C is added after the product, in f32."""
    a, b, c = matrices
    schemes = chosen.schemes
    converted = [as_jax_array(x.astype(np.float64), round_to_odd=scheme.rounds_once) for x, scheme in zip((a, b), schemes, strict=True)]
    quantized_a, quantized_b = quantize_operands(chosen, None, np.asarray(converted[0]), np.asarray(converted[1]))
    remarks = []
    for name, x, operand in (("A", a, quantized_a), ("B", b.swapaxes(-1, -2), quantized_b)):
        over, under = count_out_of_range(x.astype(np.float64), operand)
        what = f"{over:,} of {x.size:,} elements of {name} lie beyond what their scale and {operand.format} reach" if over else ""
        zero = f"{under:,} of {x.size:,} elements of {name} are too small for {operand.format} at their scale and became 0" if under else ""
        clamped = chosen.a.saturate if name == "A" else chosen.b.saturate
        (beyond,) = round_values(BEYOND_RANGE, operand.format, "RN")
        became = " and became the largest." if clamped else f" and became {_overflow_name(beyond)}. --saturate takes the largest instead."
        remarks += [f"{what}{became}"] if what else []
        remarks += [f"{zero}."] if zero else []
    return RoundedOperands(
        (quantized_a.values, quantized_b.values.swapaxes(-1, -2), None if c is None else c.astype(np.float32).astype(np.float64)), remarks
    )


def _overflow_remarks(name: str, fmt: Format, x: np.ndarray, y: np.ndarray, saturate: bool) -> Iterator[str]:
    """Remarks on finite elements of x beyond the range of their format; y is x rounded without saturation."""
    if fmt.is_integer or fmt.bits == 64:
        return
    (largest,), (beyond,) = round_values(BEYOND_RANGE, fmt, "RN", True), round_values(BEYOND_RANGE, fmt, "RN")
    wide = x.astype(np.float64)
    out = np.isfinite(wide) & (
        ~np.isfinite(y) if not np.isfinite(beyond) else np.abs(wide) > largest * (1 + 2.0 ** -(fmt.mantissa_bits + 2))
    )
    if count := int(out.sum()):
        became = f"{_overflow_name(beyond)}. --saturate takes the largest instead; or scale {name} down"
        if saturate or np.isfinite(beyond):
            became = "the largest; scale it down to keep its values"
        yield f"{count:,} of {x.size:,} elements of {name} lie beyond {fmt}, whose largest is {largest:.6g}, and became {became}."


def _overflow_name(value: float) -> str:
    return "Inf" if np.isinf(value) else "NaN"


def _evidence_text(evidence: Evidence, args: argparse.Namespace) -> str:
    if args.what_if is not None:
        return "The arithmetic is a what-if: no GPU is known to have it."
    return f"The arithmetic is known by {evidence.level}: {evidence.source}"


def _what_if_suffix(args: argparse.Namespace) -> str:
    return "" if args.what_if is None else f" with {args.what_if}"


@dataclass
class ErrorReport:
    """Errors and counts over all blocks."""

    tallies: dict[str, ErrorTally]
    bound: float = 0.0  # largest bound of the reference's own error
    bound_ulps: float = 0.0  # the same in ulps of D
    sampled: int = 0  # outputs recomputed in rational arithmetic
    outputs: int = 0  # all outputs
    counted: int = 0  # finite outputs, which the figures cover
    not_finite: Counter[tuple[str, str]] = field(default_factory=Counter)  # elements of a matrix that are "NaN" or "infinite"
    seconds: float = 0.0  # time of the emulation, without tracing and compiling
    compiling: float = 0.0  # seconds of tracing and compiling


class RowProgress(ProgressLine):
    """Progress in rows of D."""

    def compiling(self, done: int) -> None:
        """On a terminal, before the first block: say that the product is being compiled."""
        if not done and self.stream.isatty():
            text = "tcemu gemm: compiling the product"
            self.width = len(text)
            print(text, end="", file=self.stream, flush=True)

    def report(self, done: int) -> None:
        """Report the number of finished rows."""
        self.update(f"tcemu gemm: {done} of {self.total} rows, {self.elapsed:.0f} s", last=done == self.total)


def multiply_blocks(
    multiplication: Multiplication, operands: Matrices, a: np.ndarray, b: np.ndarray, c: np.ndarray | None
) -> tuple[np.ndarray, ErrorReport]:
    """Compute D and its errors in blocks of rows, so that the exact product of only one block is in memory.

    Args:
        multiplication: The way to multiply.
        operands: The rounded operands, for the exact product of what is multiplied.
        a, b, c: The matrices of the files.
    """
    shape = product_shape(a.shape, b.shape)
    report = ErrorReport({name: ErrorTally(multiplication.d_format) for name in ERROR_KINDS})
    wide = a.astype(np.float64), b.astype(np.float64), None if c is None else c.astype(np.float64)
    exact, rounded = Reference.from_arrays(*wide), Reference.from_arrays(*operands)
    if all(np.array_equal(x, y, equal_nan=True) for x, y in zip(wide, operands, strict=True) if x is not None and y is not None):
        rounded = exact
    size = block_rows(shape, a.shape[-1]) if multiplication.by_rows else max(1, shape[-2])
    starts = range(0, max(1, shape[-2]), size)  # one empty block where there are no rows
    sample = -(-(F64_SAMPLED_OUTPUTS if multiplication.d_format == F64 else SAMPLED_OUTPUTS) // len(starts))
    progress, clock = RowProgress(shape[-2], sys.stderr), compile_clock()
    blocks = []
    for start in starts:
        stop = min(start + size, shape[-2])
        rows, addend = pad_rows(a, start, size), None if c is None else pad_rows(c, start, size)
        began, compiled = time.perf_counter(), clock.seconds
        progress.compiling(start)
        with command_errors(ValueError, TypeError):
            d = np.asarray(multiplication.product(rows, b, addend))[..., : stop - start, :]
        compiled = clock.seconds - compiled
        report.compiling += compiled
        report.seconds += time.perf_counter() - began - compiled
        blocks.append(d)
        if multiplication.op.bit_op != "xor":
            with np.errstate(all="ignore"):
                plain = plain_product(rows, b, addend)[..., : stop - start, :]
                add_errors(report, exact, rounded, start, d, plain, sample)
        progress.report(stop)
    return np.concatenate(blocks, axis=-2), report


def block_rows(shape: tuple[int, ...], k: int) -> int:
    """Rows of D [..., M, N] in about BLOCK_MACS multiply-accumulates: at least one, at most all of them."""
    rows = max(1, shape[-2])
    return max(1, min(rows, BLOCK_MACS // max(1, prod(shape) // rows * k)))


def pad_rows(x: np.ndarray, start: int, size: int) -> np.ndarray:
    """Rows of x [..., M, n] from `start` on, padded with zeros to `size`, so that every block has one shape and compiles once."""
    rows = x[..., start : start + size, :]
    missing = size - rows.shape[-2] if start else 0
    return np.pad(rows, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)]) if missing else rows


def plain_product(a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> np.ndarray:
    """A·B + C in float32 as XLA computes it on this machine; the inputs are rounded to float32."""
    with np.errstate(over="ignore"):
        a, b, *rest = (np.asarray(x, np.float32) for x in ((a, b) if c is None else (a, b, c)))
    product = jax.numpy.matmul(a, b, precision="highest")
    return np.asarray(product + rest[0] if rest else product)


def add_errors(
    report: ErrorReport, exact: Reference, rounded: Reference, start: int, d: np.ndarray, plain: np.ndarray, sample: int
) -> None:
    """Add the errors of a block of rows to the report.

    Args:
        report: The report to extend.
        exact: The exact product of the inputs in the files.
        rounded: The exact product of the inputs rounded to the instruction's formats.
        start: First row of the block.
        d: Rows of D, [..., rows, N].
        plain: The same rows of the float32 product.
        sample: Outputs to recompute in rational arithmetic.
    """
    fmt = report.tallies["emulated"].fmt
    values, bound = exact.compute_rows(start, start + d.shape[-2])
    rounded_values = values if rounded is exact else rounded.compute_rows(start, start + d.shape[-2])[0]
    d, plain = d.astype(np.float64), plain.astype(np.float64)
    for name, x in (("D", d), ("exact", values), ("plain float32", plain)):
        report.not_finite += Counter({(name, "NaN"): int(np.isnan(x).sum()), (name, "infinite"): int(np.isinf(x).sum())})
    report.outputs += d.size
    indices = np.argwhere(np.isfinite(d) & np.isfinite(values) & np.isfinite(plain) & np.isfinite(rounded_values))
    report.counted += len(indices)
    chosen = indices[np.random.default_rng(start).permutation(len(indices))[:sample]]
    truths = [exact.exact_element((*index[:-2], index[-2] + start, index[-1])) for index in chosen]
    report.sampled += len(chosen)
    if fmt == F64:  # float64 inputs are not rounded, so `rounded` is `exact`
        at = tuple(chosen.T)
        d_error, plain_error = (
            np.array([float(Fraction(x) - truth) for x, truth in zip(y[at].tolist(), truths, strict=True)]) for y in (d, plain)
        )
        errors = {"emulated": d_error, "inputs": np.zeros(len(truths)), "arithmetic": d_error, "plain": plain_error}
    else:
        at = tuple(indices.T)
        errors = {"emulated": d[at] - values[at], "inputs": rounded_values[at] - values[at]}
        errors |= {"arithmetic": d[at] - rounded_values[at], "plain": plain[at] - values[at]}
        report.bound = max(report.bound, float(bound[at].max(initial=0.0)))
        report.bound_ulps = max(report.bound_ulps, float((bound[at] / ulp(values[at], fmt))[values[at] != 0].max(initial=0.0)))
        for index, truth in zip(chosen, truths, strict=True):
            off = abs(Fraction(float(values[tuple(index)])) - truth)
            if off > Fraction(float(bound[tuple(index)])):
                raise AssertionError(f"the float64 product at {index.tolist()} is off by {float(off)}, more than its bound")
    for name, error in (errors | {"apart": d[at] - plain[at]}).items():
        report.tallies[name].add(error, values[at])


def error_table(report: ErrorReport) -> list[str]:
    """The lines of the table of errors."""
    heads = ["", *(f"{statistic} {figure}" for figure in ("error", "ulps", "bits lost") for statistic in ("largest", "mean"))]
    rows = [[ERROR_KINDS[name], *(f"{x:.3g}" for x in tally.figures)] for name, tally in report.tallies.items()]
    return table_lines(heads, rows, left=[0])


def report_remarks(report: ErrorReport, fmt: Format) -> list[str]:
    """Notes below the table: what is left out, what an ulp is, and how exact the exact product is."""
    lines = []
    if report.counted < report.outputs:
        count = report.not_finite
        kinds = "; ".join(f"{x}: {count[x, 'NaN']} NaN, {count[x, 'infinite']} infinite" for x in ("D", "exact", "plain float32"))
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
