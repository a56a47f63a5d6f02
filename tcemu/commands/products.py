"""What `tcemu gemm` multiplies by: an instruction or a recipe, by the words of the command line. Every fault is a CommandError."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike

from tcemu.architectures.evidence import Evidence
from tcemu.architectures.lookup import row_for
from tcemu.commands import CommandError
from tcemu.commands.what_ifs import changed
from tcemu.emulation.product_errors import lost, quantized
from tcemu.formats import Format
from tcemu.isa.catalog import check
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import Instruction
from tcemu.linalg.arguments import in_jax
from tcemu.linalg.gemm import gemm
from tcemu.linalg.matmul import matmul
from tcemu.linalg.recipes import Recipe, recipe
from tcemu.study.accuracy import rounded

FAR = np.array([1e300])  # beyond every format but f64
TARGET = "sm_90a"  # where none is given
Matrices = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # A, B, C


class Held(NamedTuple):
    """The operands as they are multiplied, float64, and what is said of those that their formats do not hold."""

    arrays: Matrices
    said: list[str]


class Asked(NamedTuple):
    """One way to multiply.

    said, known: it in words, and how its arithmetic is known. result: the format of D. product: A, B and C, or None, to D. hold: what
    becomes of the operands before. by_rows: whether D may be made in pieces of A's rows, with the same bits.
    """

    op: Instruction
    said: str
    known: str
    result: Format
    product: Callable[..., ArrayLike]
    hold: Callable[[Matrices], Held]
    by_rows: bool


def asked(args: argparse.Namespace) -> Asked:
    """What the words ask for. Raises CommandError."""
    try:
        return _by_instruction(args) if args.recipe is None else _by_recipe(args)
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from error


def _by_instruction(args: argparse.Namespace) -> Asked:
    target, rounding = args.target or TARGET, args.rounding or "RN"
    op = check(parse(args.op), target)
    row = row_for(op, target)
    assert op.a and op.b and op.c and op.d
    model = None if args.what_if is None else changed(row.model, args.what_if)
    product = partial(gemm, op=op, target=target, rounding=rounding, saturate=args.saturate, model=model)
    formats = (op.a, op.b, op.c)

    def hold(given: Matrices) -> Held:
        pairs = [(name, x, fmt) for name, x, fmt in zip("ABC", given, formats, strict=True) if x is not None]
        free = [rounded(x, fmt, rounding) for _, x, fmt in pairs]
        kept = [rounded(x, fmt, rounding, args.saturate) for _, x, fmt in pairs]
        said = [line for (name, x, fmt), y in zip(pairs, free, strict=True) for line in _beyond(name, fmt, x, y, args.saturate)]
        return Held((kept[0], kept[1], kept[2] if len(kept) > 2 else None), said)

    return Asked(op, f"{op} on {target}{_changes(args)}", _known(row.evidence, args), op.d, product, hold, by_rows=True)


def _by_recipe(args: argparse.Namespace) -> Asked:
    if args.rounding is not None:
        raise CommandError("--rounding: the recipe says how operands are rounded; leave it out")
    chosen = recipe(args.recipe, args.target, backward="exact")
    if args.saturate:
        chosen = chosen.replace(a=replace(chosen.a, saturate=True), b=replace(chosen.b, saturate=True))
    known = chosen.evidence["D"]
    assert known is not None
    if args.what_if is not None:
        chosen = chosen.replace(model=changed(chosen.arithmetic, args.what_if))
    first, *more = repr(chosen).splitlines()[:-1]  # the last line is of gradients

    def product(a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> np.ndarray:
        a, b, *rest = (x if x.dtype.kind == "f" else x.astype(np.float64) for x in (a, b, c) if x is not None)
        return np.asarray(matmul(a, b, *rest, recipe=chosen))

    said = "\n".join([f"{first}{_changes(args)}", *more])
    return Asked(chosen.op, said, _known(known, args), chosen.out, product, partial(_quantized, chosen), by_rows=False)


def _quantized(chosen: Recipe, given: Matrices) -> Held:
    """The operands as the recipe quantises them. C is added behind the product, in f32."""
    a, b, c = given
    schemes = chosen.schemes
    taken = [in_jax(x.astype(np.float64), once=scheme.rounds_once) for x, scheme in zip((a, b), schemes, strict=True)]
    of_a, of_b = quantized(chosen, None, np.asarray(taken[0]), np.asarray(taken[1]))
    said = []
    for name, x, operand in (("A", a, of_a), ("B", b.swapaxes(-1, -2), of_b)):
        over, under = lost(x.astype(np.float64), operand)
        what = f"{over:,} of {x.size:,} elements of {name} lie beyond what their scale and {operand.format} reach" if over else ""
        zero = f"{under:,} of {x.size:,} elements of {name} are too small for {operand.format} at their scale and became 0" if under else ""
        clamped = chosen.a.saturate if name == "A" else chosen.b.saturate
        (beyond,) = rounded(FAR, operand.format, "RN")
        became = " and became the largest." if clamped else f" and became {_named(beyond)}. --saturate takes the largest instead."
        said += [f"{what}{became}"] if what else []
        said += [f"{zero}."] if zero else []
    return Held((of_a.values, of_b.values.swapaxes(-1, -2), None if c is None else c.astype(np.float32).astype(np.float64)), said)


def _beyond(name: str, fmt: Format, x: np.ndarray, y: np.ndarray, saturate: bool) -> Iterator[str]:
    """What is said of elements x that are finite and out of the range of their format; y: rounded, without saturation."""
    if fmt.is_integer or fmt.bits == 64:
        return
    (largest,), (beyond,) = rounded(FAR, fmt, "RN", True), rounded(FAR, fmt, "RN")
    wide = x.astype(np.float64)
    out = np.isfinite(wide) & (
        ~np.isfinite(y) if not np.isfinite(beyond) else np.abs(wide) > largest * (1 + 2.0 ** -(fmt.mantissa_bits + 2))
    )
    if count := int(out.sum()):
        became = f"{_named(beyond)}. --saturate takes the largest instead; or scale {name} down"
        if saturate or np.isfinite(beyond):
            became = "the largest; scale it down to keep its values"
        yield f"{count:,} of {x.size:,} elements of {name} lie beyond {fmt}, whose largest is {largest:.6g}, and became {became}."


def _named(value: float) -> str:
    return "Inf" if np.isinf(value) else "NaN"


def _known(evidence: Evidence, args: argparse.Namespace) -> str:
    if args.what_if is not None:
        return "The arithmetic is a what-if: no GPU is known to have it."
    return f"The arithmetic is known by {evidence.level}: {evidence.source}"


def _changes(args: argparse.Namespace) -> str:
    return "" if args.what_if is None else f" with {args.what_if}"
