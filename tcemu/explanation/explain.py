"""`explain`: one dot product of one instruction, step by step, on one target or side by side on several."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from tcemu.architectures.lookup import COMPUTING, applied
from tcemu.architectures.rows import ModelRow
from tcemu.arithmetic.model import Model, fills_k, fitted
from tcemu.errors import Unsupported
from tcemu.explanation.comparison import Comparison
from tcemu.explanation.explanation import Explanation
from tcemu.explanation.inputs import codes, concrete, metadata
from tcemu.explanation.products import met, products
from tcemu.explanation.steps import walk
from tcemu.explanation.view import FILLING
from tcemu.isa.catalog import check, section
from tcemu.isa.instructions import Instruction
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
    rounding: str = "RN",
) -> Explanation | Comparison:
    """One element of D = A·B + C taken apart: each term's exact value, exponent and shift, the bits kept and cut, the sums, the roundings.

    op: a PTX spelling or an Instruction of mma, mma.sp, wmma.mma, wgmma or wgmma.sp. a_row, b_col: K elements each; K may be several
    instructions long, which then follow each other, and is filled up to whole instructions as `gemm` does. c: one element, 0 if left out.
    Elements, and scales, are raw codes (ints, unsigned arrays, f64 also uint32[K, 2]) or numbers (floats, Fractions), which are rounded to
    the instruction's formats by `rounding`: a list of ints is one of codes, [1.0, 2.0] one of numbers.
    A sparse instruction takes the stored elements in a_row, and in b_col the elements of B that they meet; or with e, the row's 4-bit
    metadata fields, the whole column. scale_a, scale_b: the block scales of the row and the column, each for `op.k // op.scale_vec`
    elements along K.
    target: as "sm_90a", or several; model: another arithmetic in place of the target's own, or several, of which None is the target's own.
    One of either goes with all of the other.
    Returns an `Explanation` (for several a `Comparison` of them): print it, or take its `to_dict()`. Python integers and fractions all
    the way, no arithmetic shared with `dot`.
    Raises Unsupported if PTX does not give `op` to a target, NotModelled if nobody has evidence of its arithmetic there, TypeError or
    ValueError for operands of another kind or length, ValueError for a model that does not fit `op`.
    Source: the rows of `tcemu.models`; PTX ISA 9.7.14, 9.7.15.
    """
    targets = [target] if isinstance(target, str) else list(target)
    models = [model] if isinstance(model, Model) or model is None else list(model)
    several = not isinstance(target, str) or not (isinstance(model, Model) or model is None)
    if not targets or not models or (len(targets) > 1 and len(models) > 1 and len(targets) != len(models)):
        raise ValueError(f"got {len(targets)} targets and {len(models)} models; want one of either for all, or a model for each target")
    count = max(len(targets), len(models))
    targets, models = targets * (count // len(targets)), models * (count // len(models))
    operands = {"e": e, "scale_a": scale_a, "scale_b": scale_b, "rounding": rounding}
    found = [_explain(op, a_row, b_col, c, t, m, **operands) for t, m in zip(targets, models, strict=True)]
    return Comparison(tuple(found)) if several else found[0]


def _explain(
    op: str | Instruction,
    a_row: Any,
    b_col: Any,
    c: Any,
    target: str,
    model: Model | None,
    *,
    e: Any,
    scale_a: Any,
    scale_b: Any,
    rounding: str,
) -> Explanation:
    op = check(op, target)
    if op.family not in COMPUTING:
        raise Unsupported(f"{op} is {op.family}; tcemu.explain takes {', '.join(COMPUTING)}. PTX ISA {section(op)}")
    model = None if model is None else concrete(model)
    used = applied(op, target, model)
    label, known = _label(target, model, used.row)
    signature = signature_of(op)
    model = fitted(used.model, signature, signature.k // signature.scale_vec if op.block_scale else None)
    a, a_rounded = codes(op, "a_row", signature.a, a_row, rounding)
    b, b_rounded = codes(op, "b_col", signature.b, b_col, rounding)
    start, c_rounded = codes(op, "c", signature.c, c, rounding)
    if len(start) != 1:
        raise ValueError(f"c: got {len(start)} elements; wanted one of {signature.c}, for one element of D")
    if not a:
        raise ValueError("a_row: got no elements; wanted one at least")
    b, names = _column(op, a, b, e, used.clamped_metadata)
    inexact = [n for n, inexact in (("a_row", a_rounded), ("b_col", b_rounded), ("c", c_rounded)) if inexact]
    missing = -len(a) % signature.k if fills_k(model, signature) else 0
    filling = 0 if signature.a.is_integer else 1 << signature.a.bits - 1  # -0, as in gemm
    a, b = (*a, *[filling] * missing), (*b, *[0] * missing)
    names = [*names, *[FILLING] * missing]
    scales = None
    if op.block_scale or scale_a is not None or scale_b is not None:
        scales, more = _scales(op, signature.k, len(a), missing, scale_a, scale_b, rounding)
        inexact += more
    ways = products(model, signature, a, b, names, scales)
    steps, result = walk(model, signature, ways, start[0])
    return Explanation(
        op,
        target,
        label,
        known,
        model,
        signature,
        tuple(a),
        tuple(b),
        start[0],
        scales,
        tuple(ways),
        steps,
        result,
        tuple(inexact),
        missing,
    )


def _label(target: str, model: Model | None, found: ModelRow | None) -> tuple[str, str]:
    """The target with what differs from its own arithmetic, and how that is known."""
    if model is None:
        assert found is not None
        return target, f"{found.evidence.level}: {found.evidence.source}"
    if found is None:
        return f"{target}, {model}", "a what-if; the target's own arithmetic is not modelled"
    changed = [(f.name, getattr(model, f.name)) for f in fields(model)]
    changed = [f"{name} {value}" for name, value in changed if value != getattr(found.model, name, None)]
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


def _scales(
    op: Instruction, k: int, count: int, missing: int, scale_a: Any, scale_b: Any, rounding: str
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], list[str]]:
    """Both rows of scales, with ones for the instructions that were filled up; and which of them were rounded."""
    if not op.block_scale or op.stype is None or op.scale_vec is None:
        raise ValueError(f"scale_a, scale_b: {op} has no block scales; leave them out. PTX ISA {section(op)}")
    one, found, inexact = op.stype.bias << op.stype.mantissa_bits, [], []
    block = k // op.scale_vec
    wanted = -(-(count - missing) // block)
    for name, given in (("scale_a", scale_a), ("scale_b", scale_b)):
        if given is None:
            raise ValueError(f"{name}: none came; wanted {wanted} of {op.stype}, one for {block} products, for {op}. PTX ISA {section(op)}")
        own, was_rounded = codes(op, name, op.stype, given, rounding)
        if len(own) != wanted:
            raise ValueError(
                f"{name}: got {len(own)}; wanted {wanted} of {op.stype}, one for {block} products, for {op}. PTX ISA {section(op)}"
            )
        found.append((*own, *[one] * (count // block - wanted)))
        inexact += [name] if was_rounded else []
    return (found[0], found[1]), inexact
