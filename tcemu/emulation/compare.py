"""`compare`: every product of a function under several policies, beside the exact product of the same operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from tcemu.emulation.emulate import traced
from tcemu.emulation.policy import Choice, Decision, Policy, Product, checked, decide
from tcemu.emulation.rewriting import Rewriter, Scope
from tcemu.explanation.exact import decimal
from tcemu.explanation.explain import explain
from tcemu.explanation.explanation import Explanation
from tcemu.formats import ARRAY_FORMATS, Format
from tcemu.linalg.dot_general import DotGeneral
from tcemu.linalg.recipes import Recipe
from tcemu.quantize.operands import Quantized, Quantizer, dequantized, own_keys, quantize
from tcemu.study.accuracy import Reference, Tally
from tcemu.text import columns


@dataclass(frozen=True, repr=False)
class Worst:
    """The element of a product's results that is furthest from the exact one, with what `tcemu.explain` takes.

    run: which run of the product, from 0. index: of the result as [batch, row of A, column of B], the axes that dot_general multiplies out.
    value, exact: what came, and the exact sum of the products of a_row and b_col, the operands as fn has them, float64[K].
    recipe: the recipe at work, or None; a_codes, b_codes: that row and column as the recipe quantises them; scales: those of its
    instruction's blocks, or None.
    """

    run: int
    index: tuple[int, int, int]
    value: float
    exact: Fraction
    a_row: np.ndarray
    b_col: np.ndarray
    recipe: Recipe | None = None
    a_codes: np.ndarray | None = None
    b_codes: np.ndarray | None = None
    scales: tuple[np.ndarray, np.ndarray] | None = None

    def explain(self) -> Explanation:
        """`tcemu.explain` of it: the instruction's steps on the quantised row and column, C = 0.

        What a recipe does outside the instruction (scales that multiply sums, promotion, parts of K) is not part of it.
        Raises TypeError where no recipe is at work, Unsupported for a recipe whose unit has no instruction on its target.
        """
        if self.recipe is None or self.a_codes is None or self.b_codes is None:
            raise TypeError("explain: the product was not by a tcemu.Recipe; give a_row and b_col to tcemu.explain with an instruction")
        scale_a, scale_b = self.scales or (None, None)
        found = explain(
            self.recipe.op,
            self.a_codes,
            self.b_codes,
            target=self.recipe.target,
            model=self.recipe.model,
            scale_a=scale_a,
            scale_b=scale_b,
        )
        assert isinstance(found, Explanation)
        return found

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.index))}] {self.value:.6g}, exact {decimal(self.exact, 6)}"

    __repr__ = __str__


@dataclass(frozen=True)
class Errors:
    """What one policy does to one product, over all its runs.

    runs: how often it ran. by: what it was evaluated by. relative_error: the norm of the errors over that of the exact results (Frobenius).
    largest_error: of an element. bits_lost, most_bits_lost: mean and largest log2 of the error in ulps of the result's dtype, from 0 to its
    significand's bits. overflow, underflow: elements of A and of B that quantisation takes to Inf or NaN or clamps, and that it takes to
    zero; None where no recipe is at work. odd: results that are not finite; they are left out of the errors.
    worst: the element furthest off, None if there is no finite one.
    """

    product: Product
    policy: str
    by: str
    choice: Choice
    runs: int
    relative_error: float
    largest_error: float
    bits_lost: float
    most_bits_lost: float
    overflow: tuple[int, int] | None
    underflow: tuple[int, int] | None
    odd: int
    worst: Worst | None


@dataclass(frozen=True, repr=False)
class Comparison:
    """Errors of products under policies: a sequence of `Errors`; str() is a table, `tcemu.viz.plot` a picture.

    results: for each policy, how far the function's own results are from those of fn, relative error over all of them, every product
    emulated, so that errors add up.
    """

    rows: tuple[Errors, ...]
    results: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Errors]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> Errors:
        return self.rows[index]

    def __str__(self) -> str:
        heads = ["product", "shapes", "runs", "policy", "rel. error", "bits lost", "most", "overflow", "underflow", "not finite", "worst"]
        rows = [[*_place(row), row.policy, *_figures(row)] for row in self.rows]
        rows = [[*("" if i and row[:3] == rows[i - 1][:3] else cell for cell in row[:3]), *row[3:]] for i, row in enumerate(rows)]
        lines = columns(heads, rows, left=(0, 1, 3, 10))
        if self.results:
            lines += ["", *columns(["results of the whole", "rel. error"], [[k, f"{v:.2e}"] for k, v in self.results.items()], left=(0,))]
        return "\n".join([*lines, "", NOTE])

    def __repr__(self) -> str:
        products, policies = {row.product.name for row in self.rows}, {row.policy for row in self.rows}
        return f"<Comparison of {len(products)} products under {len(policies)} policies>"


NOTE = """Each product gets the operands that the function itself has there, the same under every policy; the exact product is of these, in
float64 by NumPy, and of the worst element in rational arithmetic. Bits lost: log2 of the error in ulps of the result, mean and most.
Overflow and underflow: elements of A + of B that quantisation takes out of range and to zero. Worst: [batch, row, column], what came."""


def _place(row: Errors) -> list[str]:
    p = row.product
    return [p.name, " · ".join(f"[{','.join(map(str, shape))}]" for shape in (p.lhs_shape, p.rhs_shape)), str(row.runs)]


def _figures(row: Errors) -> list[str]:
    counts = ["-" if pair is None else "{}+{}".format(*pair) for pair in (row.overflow, row.underflow)]
    figures = [f"{row.relative_error:.2e}", f"{row.bits_lost:.1f}", f"{row.most_bits_lost:.1f}"]
    return [*figures, *counts, str(row.odd), "" if row.worst is None else str(row.worst)]


def compare(
    fn: Callable,
    policies: Recipe | Mapping[str, Policy] | Sequence[Recipe],
    inputs: Sequence[Any],
    *,
    convolutions: bool = False,
    results: bool = True,
) -> Comparison:
    """How far every product of fn(*inputs) is from the exact one under each policy.

    policies: by name, each as `emulate` takes it; or recipes, by their own names. inputs: fn's arguments. convolutions: as in `emulate`.
    results: whether to run fn under each policy too, to see what comes of the errors together; that compiles it once for each.
    fn runs once as it is, and the operands of its products, kept in memory, are multiplied by each policy's choice: errors of one product
    do not reach the next. A policy that leaves a product has no row for it. The exact product is of the operands as fn has them, of any
    real float dtype, in float64 (NumPy's, off by no more than `study.accuracy.Reference` bounds); for the worst element it is rational.
    Returns a `Comparison`: a table when printed, one `Errors` for each product and policy, `tcemu.viz.plot` draws it.
    Raises TypeError for policies of another kind, and what `emulate` raises.
    """
    named = _named(policies)
    captured: dict[Product, list[tuple]] = {}

    def keeping(product: Product) -> Choice:
        if not product.is_float or all(decide(policy, product, convolutions).run is None for policy in named.values()):
            return None
        runs = captured.setdefault(product, [])

        def product_as_it_is(lhs: Array, rhs: Array, dimension_numbers: Any, **kwargs: Any) -> Array:
            jax.debug.callback(lambda a, b: runs.append((np.asarray(a), np.asarray(b), dimension_numbers, kwargs)), lhs, rhs)
            return lax.dot_general(lhs, rhs, dimension_numbers, **kwargs)

        return product_as_it_is

    program, arrays, _ = traced(fn, tuple(inputs), {})

    def run(policy: Policy) -> list[np.ndarray]:
        rewriter = Rewriter(policy, convolutions)
        found = jax.jit(lambda *arrays: rewriter.evaluate(program.jaxpr, program.consts, arrays, Scope()))(*arrays)
        jax.effects_barrier()
        return [np.asarray(v, np.float64) for v in found if jax.numpy.issubdtype(v.dtype, jax.numpy.floating)]

    plain = run(keeping)
    rows = [
        _errors(product, name, decision, runs)
        for product, runs in captured.items()
        for name, policy in named.items()
        if (decision := decide(policy, product, convolutions)).run is not None
    ]
    return Comparison(tuple(rows), {name: _distance(run(policy), plain) for name, policy in named.items()} if results else {})


def _named(policies: Recipe | Mapping[str, Policy] | Sequence[Recipe]) -> dict[str, Policy]:
    if isinstance(policies, Mapping):
        return {str(name): checked(policy) for name, policy in policies.items()}
    recipes = [policies] if isinstance(policies, Recipe) else policies
    if not isinstance(recipes, Sequence) or not all(isinstance(recipe, Recipe) for recipe in recipes):
        raise TypeError(f"policies: got {policies!r}; wanted a dict from names to policies, or recipes")
    names = [recipe.name or f"recipe {number}" for number, recipe in enumerate(recipes)]
    if len(set(names)) < len(names):
        raise TypeError(f"policies: the recipes' names, {', '.join(names)}, do not tell them apart; give a dict from names to policies")
    return dict(zip(names, recipes, strict=True))


def _distance(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    error = sum(float(((a - b) ** 2).sum()) for a, b in zip(found, wanted, strict=True))
    size = sum(float((b**2).sum()) for b in wanted)
    return float(np.sqrt(error / size)) if size else float(np.sqrt(error))


# ---- one product under one policy


@dataclass
class _Sums:
    """Over the runs of a product."""

    tally: Tally
    error: float = 0.0  # squares
    size: float = 0.0
    odd: int = 0
    overflow: tuple[int, int] | None = None
    underflow: tuple[int, int] | None = None
    worst: tuple[float, Worst] | None = None


def _errors(product: Product, policy: str, decision: Decision, runs: Sequence[tuple]) -> Errors:
    recipe, key = _recipe(decision.choice)
    sums = _Sums(Tally(ARRAY_FORMATS[np.dtype(product.dtype)]))
    for number, (lhs, rhs, numbers, kwargs) in enumerate(runs):
        assert decision.run is not None
        d = decision.run(jax.numpy.asarray(lhs), jax.numpy.asarray(rhs), numbers, **kwargs)
        a, b = _matrices(lhs, rhs, numbers)
        quantized = None if recipe is None else _quantized(recipe, key, a, b)
        _add(sums, number, a, b, np.asarray(d, np.float64).reshape(*a.shape[:2], b.shape[-1]), recipe, quantized)
    largest, _, _, _, most, mean = sums.tally.figures
    relative = float(np.sqrt(sums.error / sums.size)) if sums.size else float("nan")
    worst = None if sums.worst is None else sums.worst[1]
    found = (len(runs), relative, largest, mean, most, sums.overflow, sums.underflow, sums.odd, worst)
    return Errors(product, policy, decision.why, decision.choice, *found)


def _recipe(choice: Choice) -> tuple[Recipe | None, Any]:
    if isinstance(choice, DotGeneral):
        return choice.recipe, choice.key
    return (choice, None) if isinstance(choice, Recipe) else (None, None)


def _matrices(lhs: np.ndarray, rhs: np.ndarray, numbers: Any) -> tuple[np.ndarray, np.ndarray]:
    """The operands as float64 [batch, M, K] and [batch, K, N], with the axes as `tcemu.dot_general` takes them together."""
    (left, right), (left_batch, right_batch) = numbers
    rows = [i for i in range(lhs.ndim) if i not in (*left, *left_batch)]
    columns = [i for i in range(rhs.ndim) if i not in (*right, *right_batch)]
    size = lambda x, axes: int(np.prod([x.shape[i] for i in axes]))  # noqa: E731
    batch, m, k, n = size(lhs, left_batch), size(lhs, rows), size(lhs, left), size(rhs, columns)
    a = lhs.astype(np.float64).transpose(*left_batch, *rows, *left).reshape(batch, m, k)
    return a, rhs.astype(np.float64).transpose(*right_batch, *right, *columns).reshape(batch, k, n)


Operand = tuple[Quantized, np.ndarray, Format]  # [batch, rows, K]: its codes, the values they stand for, their format


def _quantized(recipe: Recipe, key: Any, a: np.ndarray, b: np.ndarray) -> tuple[Operand, Operand]:
    """Both operands by the recipe's quantisers, B with K last."""
    op, keys, found = recipe.op, own_keys(key), []
    assert op.a is not None and op.b is not None
    for fmt, quantizer, x, own in ((op.a, recipe.a, a, keys[0]), (op.b, recipe.b, b.swapaxes(-1, -2), keys[1])):
        q, values = _operand(fmt, quantizer, op.stype, recipe.unit_block, np.asarray(x, np.float32), own)
        found.append((q, np.asarray(values, np.float64), fmt))
    return found[0], found[1]


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _operand(fmt: Format, quantizer: Quantizer, stype: Format | None, unit_block: int, x: Array, key: Any) -> tuple[Quantized, Array]:
    q = quantize(fmt, quantizer, x, None, key, stype=stype, unit_block=unit_block)
    return q, dequantized(fmt, q, quantizer, stype, unit_block)


def _add(
    sums: _Sums, run: int, a: np.ndarray, b: np.ndarray, d: np.ndarray, recipe: Recipe | None, quantized: tuple[Operand, Operand] | None
) -> None:
    """One run's errors and counts."""
    reference = Reference.of(a, b, None)
    exact = reference.rows(0, a.shape[-2])[0]
    finite = np.isfinite(d) & np.isfinite(exact)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(d - exact), 0.0)
    sums.odd += int((~np.isfinite(d)).sum())
    sums.error, sums.size = sums.error + float((error**2).sum()), sums.size + float((exact[finite] ** 2).sum())
    sums.tally.add(error[finite], exact[finite])
    if quantized is not None:
        counts = [_lost(x, *operand) for x, operand in zip((a, b.swapaxes(-1, -2)), quantized, strict=True)]
        for name, pair in zip(("overflow", "underflow"), zip(*counts, strict=True), strict=True):
            before = getattr(sums, name) or (0, 0)
            setattr(sums, name, (before[0] + pair[0], before[1] + pair[1]))
    if not finite.any() or (sums.worst is not None and error.max() <= sums.worst[0]):
        return
    batch, row, column = np.unravel_index(np.argmax(np.where(finite, error, -1.0)), error.shape)
    index = int(batch), int(row), int(column)
    rows, columns = (index[0], index[1]), (index[0], index[2])
    worst = Worst(run, index, float(d[index]), reference.element(index), a[rows], b.swapaxes(-1, -2)[columns])
    if recipe is not None and quantized is not None:
        (x, _, _), (y, _, _) = quantized
        codes = [np.asarray(q.codes)[place] for q, place in ((x, rows), (y, columns))]
        scales = None
        if x.unit_scales is not None and y.unit_scales is not None:
            scales = np.asarray(x.unit_scales)[rows], np.asarray(y.unit_scales)[columns]
        worst = replace(worst, recipe=recipe, a_codes=codes[0], b_codes=codes[1], scales=scales)
    sums.worst = float(error[index]), worst


def _lost(x: np.ndarray, q: Quantized, values: np.ndarray, fmt: Format) -> tuple[int, int]:
    """How many elements of x quantisation takes out of range, to Inf or NaN or by clamping, and how many to zero.

    Clamped is what lies beyond the largest magnitude by more than half the format's last spacing there.
    """
    codes = np.asarray(q.codes).astype(np.int64) >> fmt.unused_bits
    largest = (codes & (1 << fmt.exponent_bits + fmt.mantissa_bits) - 1) == fmt.greatest_magnitude
    last = (1 << fmt.mantissa_bits) + (fmt.greatest_magnitude & (1 << fmt.mantissa_bits) - 1)  # its significand
    finite, magnitude = np.isfinite(x), np.abs(values)
    with np.errstate(invalid="ignore", over="ignore"):
        clamped = largest & (np.abs(x) - magnitude > magnitude / (2 * last))
    return int((finite & (~np.isfinite(values) | clamped)).sum()), int((finite & (x != 0) & (values == 0)).sum())
