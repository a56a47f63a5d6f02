"""`explain`: one dot product of one instruction, step by step, on one target or side by side on several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from tcemu.architectures.lookup import COMPUTING, applied
from tcemu.architectures.rows import ModelRow
from tcemu.arithmetic.fitting import fills_k, fitted
from tcemu.arithmetic.model import Model
from tcemu.errors import Unsupported
from tcemu.explanation.comparison import Explanations
from tcemu.explanation.explanation import Explanation
from tcemu.explanation.inputs import as_codes, concrete, metadata
from tcemu.explanation.products import met, products
from tcemu.explanation.steps import walk
from tcemu.explanation.view import FILLING
from tcemu.formats import Format
from tcemu.isa.catalog import check, section
from tcemu.isa.instructions import Instruction
from tcemu.isa.targets import named_target
from tcemu.operations.operands import signature_of


def explain(
    op: str | Instruction,
    a_row: Any,
    b_col: Any,
    c: Any = 0,
    *,
    target: str | Sequence[str],
    model: Model | Sequence[Model | None] | None = None,
    e: Any = None,
    scale_a: Any = None,
    scale_b: Any = None,
    codes: bool = False,
    rounding: str = "RN",
) -> Explanation | Explanations:
    """One element of D = A·B + C taken apart: each term's exact value, exponent and shift, the bits kept and cut, the sums, the roundings.

    op: a PTX spelling or an Instruction of mma, mma.sp, wmma.mma, wgmma or wgmma.sp. a_row, b_col: K elements each; K may be several
    instructions long, which then follow each other, and is filled up to whole instructions as `gemm` does. c: one element, 0 if left out.
    Elements, and scales, are numbers (ints, floats, Fractions, arrays of any real dtype), which are rounded to the instruction's formats by
    `rounding`; with codes=True all of them are raw codes (ints or integer arrays, f64 also uint32[K, 2]). Scales in an unsigned array,
    which `gemm` takes for codes, are refused without it.
    A sparse instruction takes the stored elements in a_row, and in b_col the elements of B that they meet; or with e, the row's 4-bit
    metadata fields, the whole column. scale_a, scale_b: the block scales of the row and the column, each for `op.k // op.scale_vec`
    elements along K.
    target: as "sm_90a", or several; model: another arithmetic in place of the target's own, or several, of which None is the target's own.
    One of either goes with all of the other.
    Returns an `Explanation`, or for several `Explanations`, which compare them: print it, or take its `to_dict()`. It is made of Python
    integers and fractions all the way, and shares no arithmetic with `dot`.
    Raises Unsupported if PTX does not give `op` to a target, NotModelled if nobody has evidence of its arithmetic there, TypeError or
    ValueError for operands of another kind or length, ValueError for a model that does not fit `op`.
    Source: for the arithmetic `tcemu.evidence`; PTX ISA 9.7.14, 9.7.15.
    """
    targets = [target] if isinstance(target, str) else list(target)
    models = [model] if isinstance(model, Model) or model is None else list(model)
    several = not isinstance(target, str) or not (isinstance(model, Model) or model is None)
    if not targets or not models or (len(targets) > 1 and len(models) > 1 and len(targets) != len(models)):
        raise ValueError(f"got {len(targets)} targets and {len(models)} models; want one of either for all, or a model for each target")
    count = max(len(targets), len(models))
    targets, models = targets * (count // len(targets)), models * (count // len(models))
    given = Given(a_row=a_row, b_col=b_col, c=c, e=e, scale_a=scale_a, scale_b=scale_b, codes=codes, rounding=rounding)
    explanations = [_explain(op, given, target, model) for target, model in zip(targets, models, strict=True)]
    return Explanations(tuple(explanations)) if several else explanations[0]


class Given(NamedTuple):
    """The operands as the caller gave them, see `explain`."""

    a_row: Any
    b_col: Any
    c: Any
    e: Any
    scale_a: Any
    scale_b: Any
    codes: bool
    rounding: str

    def of(self, op: Instruction, name: str, fmt: Format) -> tuple[tuple[int, ...], bool]:
        """The codes of the operand of this name, and whether they are of numbers, of which some were rounded."""
        return as_codes(op, name, fmt, getattr(self, name), self.rounding, raw=self.codes)


class Elements(NamedTuple):
    """The operands as codes, K filled up to whole instructions."""

    a: tuple[int, ...]
    b: tuple[int, ...]  # those that A's elements meet
    c: int
    names: list[str]  # of the products' places along K
    scales: tuple[tuple[int, ...], tuple[int, ...]] | None
    rounded: tuple[str, ...]  # the operands that came as numbers their format does not hold
    filled: int  # products that were added to fill K up


def _explain(op: str | Instruction, given: Given, target: str, model: Model | None) -> Explanation:
    op, target = check(op, target), named_target(target)
    if op.family not in COMPUTING:
        raise Unsupported(f"{op} is {op.family}; tcemu.explain takes {', '.join(COMPUTING)}. PTX ISA {section(op)}")
    model = None if model is None else concrete(model)
    used = applied(op, target, model)
    label, known = _label(target, model, used.row)
    signature = signature_of(op)
    model = fitted(used.model, signature, signature.k // signature.scale_vec if op.block_scale else None)
    elements = _elements(op, given, fills_k(model, signature), used.clamped_metadata)
    terms = products(model, signature, elements.a, elements.b, elements.names, elements.scales)
    steps, result = walk(model, signature, terms, elements.c)
    return Explanation(
        op=op,
        target=target,
        label=label,
        known=known,
        model=model,
        signature=signature,
        a=elements.a,
        b=elements.b,
        c=elements.c,
        scales=elements.scales,
        products=tuple(terms),
        steps=steps,
        result=result,
        rounded=elements.rounded,
        filled=elements.filled,
    )


def _elements(op: Instruction, given: Given, filling: bool, clamped: bool) -> Elements:
    """filling: K is filled up to whole instructions; clamped: see `met`. Raises TypeError or ValueError for operands that do not fit."""
    signature = signature_of(op)
    a, a_rounded = given.of(op, "a_row", signature.a)
    b, b_rounded = given.of(op, "b_col", signature.b)
    c, c_rounded = given.of(op, "c", signature.c)
    if len(c) != 1:
        raise ValueError(f"c: got {len(c)} elements; wanted one of {signature.c}, for one element of D")
    if not a:
        raise ValueError("a_row: got no elements; wanted one at least")
    b, names = _column(op, a, b, given.e, clamped)
    rounded = [name for name, was_rounded in (("a_row", a_rounded), ("b_col", b_rounded), ("c", c_rounded)) if was_rounded]
    missing = -len(a) % signature.k if filling else 0
    zero = 0 if signature.a.is_integer else 1 << signature.a.bits - 1  # -0, as in gemm
    scales = None
    if op.block_scale or given.scale_a is not None or given.scale_b is not None:
        scales, scales_rounded = _scales(op, given, len(a), len(a) + missing)
        rounded += scales_rounded
    return Elements(
        a=(*a, *[zero] * missing),
        b=(*b, *[0] * missing),
        c=c[0],
        names=[*names, *[FILLING] * missing],
        scales=scales,
        rounded=tuple(rounded),
        filled=missing,
    )


def _label(target: str, model: Model | None, own: ModelRow | None) -> tuple[str, str]:
    """The target with what differs from its own arithmetic, and how that is known."""
    if model is None:
        assert own is not None
        return target, f"{own.evidence.level}: {own.evidence.source}"
    if own is None:
        return f"{target}, {model}", "a what-if; the target's own arithmetic is not modelled"
    changed = [(f.name, getattr(model, f.name)) for f in fields(model)]
    changed = [f"{name} {value}" for name, value in changed if value != getattr(own.model, name, None)]
    return f"{target}{''.join(', ' + c for c in changed)}", "a what-if" if changed else "a model given that is the target's own"


def _column(op: Instruction, a: Sequence[int], b: Sequence[int], e: Any, clamped: bool) -> tuple[Sequence[int], list[str]]:
    """The elements of B that meet those of A, and names of their places along K."""
    if e is None:
        if len(a) != len(b):
            kept = " (the stored ones and those of B that they meet; give e with a whole column)" if op.sparse else ""
            raise ValueError(f"a_row has {len(a)} elements and b_col {len(b)}; they must be equally many{kept}")
        return b, [f"k {i}" for i in range(len(a))]
    if not op.sparse:
        raise ValueError(f"e: {op} has no sparsity metadata; leave it out. PTX ISA {section(op)}")
    if len(b) != 2 * len(a) or len(b) % op.chunk:
        raise ValueError(f"a_row has {len(a)} elements and b_col {len(b)}; with e wanted K/2 and K, K a multiple of {op.chunk}, for {op}")
    return met(op.chunk, b, metadata(op, e, len(b) // op.chunk), clamped)


def _scales(op: Instruction, given: Given, count: int, filled: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], list[str]]:
    """Both rows of scales, and which of them were rounded. count: products; filled: with those that fill K up, whose scales are ones."""
    if not op.block_scale or op.stype is None or op.scale_vec is None:
        raise ValueError(f"scale_a, scale_b: {op} has no block scales; leave them out. PTX ISA {section(op)}")
    fmt = op.stype
    one = fmt.bias << fmt.mantissa_bits
    block = signature_of(op).k // op.scale_vec
    wanted = -(-count // block)
    expected = f"wanted {wanted} of {fmt}, one for {block} products, for {op}. PTX ISA {section(op)}"

    def row(name: str, scales: Any) -> tuple[tuple[int, ...], bool]:
        if scales is None:
            raise ValueError(f"{name}: none came; {expected}")
        if not given.codes and np.dtype(getattr(scales, "dtype", float)).kind == "u":
            raise TypeError(f"{name}: got {scales.dtype}, which gemm takes for raw codes; wanted floats, or raw codes and codes=True")
        own, was_rounded = given.of(op, name, fmt)
        if len(own) != wanted:
            raise ValueError(f"{name}: got {len(own)}; {expected}")
        return (*own, *[one] * (filled // block - wanted)), was_rounded

    (of_a, a_rounded), (of_b, b_rounded) = row("scale_a", given.scale_a), row("scale_b", given.scale_b)
    rounded = [name for name, was_rounded in (("scale_a", a_rounded), ("scale_b", b_rounded)) if was_rounded]
    return (of_a, of_b), rounded
