"""`compare`: every product of a function under several policies, beside the exact product of the same operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from chex import PRNGKey
from jax import Array, lax

from tcemu.emulation.emulate import traced
from tcemu.emulation.policy import Choice, Decision, Policy, checked, decide
from tcemu.emulation.products import Product
from tcemu.emulation.rewriting import Rewriter, Scope
from tcemu.explanation.exact import decimal
from tcemu.explanation.explain import explain
from tcemu.explanation.explanation import Explanation
from tcemu.formats import ARRAY_FORMATS, Format
from tcemu.linalg.arguments import product_keys
from tcemu.linalg.dot_general import DimensionNumbers, DotGeneral, product_axes
from tcemu.linalg.recipes import Recipe
from tcemu.quantize.operands import Quantized, Scheme, dequantized, quantize
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
        explanation = explain(
            self.recipe.op,
            self.a_codes,
            self.b_codes,
            target=self.recipe.target,
            model=self.recipe.model,
            scale_a=scale_a,
            scale_b=scale_b,
            codes=True,
        )
        assert isinstance(explanation, Explanation)
        return explanation

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.index))}] {self.value:.6g}, exact {decimal(self.exact, 6)}"

    __repr__ = __str__


@dataclass(frozen=True)
class Errors:
    """What one policy does to one product, over all its runs.

    runs: how often it ran. by: what it was evaluated by, in words; choice: what the policy gave.
    relative_error: the norm of the errors over that of the exact results (Frobenius). largest_error: of an element.
    bits_lost, most_bits_lost: mean and largest log2 of the error in ulps of the result's dtype, from 0 to the bits of its significand.
    overflow: how many elements of A and of B quantisation clamps or takes to Inf or NaN; underflow: how many it takes to zero. None where
    no recipe is at work.
    not_finite: results that are not finite; they are left out of the errors. worst: the element furthest off, None if none is finite.
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
    not_finite: int
    worst: Worst | None


@dataclass(frozen=True, repr=False)
class Comparison:
    """Errors of products under policies: a sequence of `Errors`; str() is a table, `tcemu.viz.plot` a picture.

    results: for each policy, the relative error of all results of the function, with every product emulated, so that errors add up.
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
    return [*figures, *counts, str(row.not_finite), "" if row.worst is None else str(row.worst)]


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
    fn runs once as it is. The operands of its products are kept in memory and multiplied by each policy's choice, so that errors of one
    product do not reach the next. A policy that leaves a product has no row for it.
    The exact product is of the operands as fn has them, of any real float dtype. It is computed in float64 by NumPy, off by no more than
    `study.accuracy.Reference` bounds; for the worst element it is rational.
    Returns a `Comparison`: a table when printed, one `Errors` for each product and policy, `tcemu.viz.plot` draws it.
    Raises TypeError for policies of another kind, and what `emulate` raises.
    """
    named = _named(policies)
    captured: dict[Product, list[_Run]] = {}

    def keeping(product: Product) -> Choice:
        if not product.is_float or all(decide(policy, product, convolutions).run is None for policy in named.values()):
            return None
        runs = captured.setdefault(product, [])

        def product_as_it_is(lhs: Array, rhs: Array, dimension_numbers: DimensionNumbers, **kwargs: Any) -> Array:
            jax.debug.callback(lambda a, b: runs.append(_Run(np.asarray(a), np.asarray(b), dimension_numbers, kwargs)), lhs, rhs)
            return lax.dot_general(lhs, rhs, dimension_numbers, **kwargs)

        return product_as_it_is

    call = traced(fn, tuple(inputs), {})

    def run(policy: Policy) -> list[np.ndarray]:
        rewriter = Rewriter(policy, convolutions, call.survey)
        results = jax.jit(lambda *arrays: rewriter.evaluate(call.program.jaxpr, call.program.consts, arrays, Scope()))(*call.arrays)
        jax.effects_barrier()
        return [np.asarray(v, np.float64) for v in results if jax.numpy.issubdtype(v.dtype, jax.numpy.floating)]

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


def _distance(results: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """The norm of the differences over that of the wanted results; where these are all zero, the norm of the differences."""
    error = sum(float(((x - y) ** 2).sum()) for x, y in zip(results, wanted, strict=True))
    size = sum(float((y**2).sum()) for y in wanted)
    return float(np.sqrt(error / size)) if size else float(np.sqrt(error))


# ---- one product under one policy


class _Run(NamedTuple):
    """One run of a product: its operands, and the other arguments of its dot_general."""

    lhs: np.ndarray
    rhs: np.ndarray
    dimension_numbers: DimensionNumbers
    kwargs: dict[str, Any]


class _Operand(NamedTuple):
    """An operand by a recipe's quantiser, [batch, rows, K]."""

    format: Format
    quantized: Quantized
    values: np.ndarray  # what the codes stand for


@dataclass
class _Sums:
    """Over the runs of a product."""

    tally: Tally
    squared_error: float = 0.0
    squared_size: float = 0.0
    not_finite: int = 0
    overflow: tuple[int, int] | None = None
    underflow: tuple[int, int] | None = None
    worst: Worst | None = None
    worst_error: float = 0.0

    @property
    def relative_error(self) -> float:
        return float(np.sqrt(self.squared_error / self.squared_size)) if self.squared_size else float("nan")


def _errors(product: Product, policy: str, decision: Decision, runs: Sequence[_Run]) -> Errors:
    recipe, key = _recipe(decision.choice)
    sums = _Sums(Tally(ARRAY_FORMATS[np.dtype(product.dtype)]))
    for number, run in enumerate(runs):
        assert decision.run is not None
        d = decision.run(jax.numpy.asarray(run.lhs), jax.numpy.asarray(run.rhs), run.dimension_numbers, **run.kwargs)
        a, b = _matrices(run)
        d = np.asarray(d, np.float64).reshape(*a.shape[:2], b.shape[-1])
        operands = None if recipe is None else _quantized(recipe, key, a, b)
        worst = _add(sums, number, a, b, d, operands)
        if worst is not None:
            sums.worst = worst if recipe is None or operands is None else _with_codes(worst, recipe, operands)
    largest, _, _, _, most_bits, mean_bits = sums.tally.figures
    return Errors(
        product=product,
        policy=policy,
        by=decision.why,
        choice=decision.choice,
        runs=len(runs),
        relative_error=sums.relative_error,
        largest_error=largest,
        bits_lost=mean_bits,
        most_bits_lost=most_bits,
        overflow=sums.overflow,
        underflow=sums.underflow,
        not_finite=sums.not_finite,
        worst=sums.worst,
    )


def _recipe(choice: Choice) -> tuple[Recipe | None, PRNGKey | None]:
    if isinstance(choice, DotGeneral):
        return choice.recipe, choice.key
    return (choice, None) if isinstance(choice, Recipe) else (None, None)


def _matrices(run: _Run) -> tuple[np.ndarray, np.ndarray]:
    """The operands as float64 [batch, M, K] and [batch, K, N], with the axes as `tcemu.dot_general` takes them together."""
    axes = product_axes(run.dimension_numbers, run.lhs.ndim, run.rhs.ndim)
    size = lambda x, axes: int(np.prod([x.shape[i] for i in axes]))  # noqa: E731
    batch, k = size(run.lhs, axes.lhs_batch), size(run.lhs, axes.lhs_contracting)
    a = run.lhs.astype(np.float64).transpose(*axes.of_a).reshape(batch, size(run.lhs, axes.rows), k)
    return a, run.rhs.astype(np.float64).transpose(*axes.of_b).reshape(batch, k, size(run.rhs, axes.columns))


def _quantized(recipe: Recipe, key: PRNGKey | None, a: np.ndarray, b: np.ndarray) -> tuple[_Operand, _Operand]:
    """Both operands by the recipe's quantisers, B with K last."""
    keys = product_keys(key)
    scheme_a, scheme_b = recipe.schemes
    return _operand(scheme_a, a, keys.a), _operand(scheme_b, b.swapaxes(-1, -2), keys.b)


def _operand(scheme: Scheme, x: np.ndarray, key: PRNGKey | None) -> _Operand:
    quantized, values = _codes_and_values(scheme, np.asarray(x, np.float32), key)
    return _Operand(format=scheme.format, quantized=quantized, values=np.asarray(values, np.float64))


@partial(jax.jit, static_argnums=0)
def _codes_and_values(scheme: Scheme, x: Array, key: PRNGKey | None) -> tuple[Quantized, Array]:
    quantized = quantize(scheme, x, key=key)
    return quantized, dequantized(scheme, quantized)


def _add(sums: _Sums, number: int, a: np.ndarray, b: np.ndarray, d: np.ndarray, operands: tuple[_Operand, _Operand] | None) -> Worst | None:
    """One run's errors and counts; its worst element, if no earlier run has a worse one."""
    reference = Reference.of(a, b, None)
    exact = reference.rows(0, a.shape[-2])[0]
    finite = np.isfinite(d) & np.isfinite(exact)
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(d - exact), 0.0)
    sums.not_finite += int((~np.isfinite(d)).sum())
    sums.squared_error += float((error**2).sum())
    sums.squared_size += float((exact[finite] ** 2).sum())
    sums.tally.add(error[finite], exact[finite])
    if operands is not None:
        (over_a, under_a), (over_b, under_b) = _lost(a, operands[0]), _lost(b.swapaxes(-1, -2), operands[1])
        sums.overflow = _plus(sums.overflow, over_a, over_b)
        sums.underflow = _plus(sums.underflow, under_a, under_b)
    if not finite.any() or (sums.worst is not None and error.max() <= sums.worst_error):
        return None
    batch, row, column = map(int, np.unravel_index(np.argmax(np.where(finite, error, -1.0)), error.shape))
    index = batch, row, column
    sums.worst_error = float(error[index])
    return Worst(
        run=number,
        index=index,
        value=float(d[index]),
        exact=reference.element(index),
        a_row=a[batch, row],
        b_col=b.swapaxes(-1, -2)[batch, column],
    )


def _plus(counts: tuple[int, int] | None, of_a: int, of_b: int) -> tuple[int, int]:
    before = counts or (0, 0)
    return before[0] + of_a, before[1] + of_b


def _with_codes(worst: Worst, recipe: Recipe, operands: tuple[_Operand, _Operand]) -> Worst:
    """The same with its row and column as the recipe quantises them."""
    batch, row, column = worst.index
    a, b = operands[0].quantized, operands[1].quantized
    scales = None
    if a.unit_scales is not None and b.unit_scales is not None:
        scales = np.asarray(a.unit_scales)[batch, row], np.asarray(b.unit_scales)[batch, column]
    a_codes, b_codes = np.asarray(a.codes)[batch, row], np.asarray(b.codes)[batch, column]
    return replace(worst, recipe=recipe, a_codes=a_codes, b_codes=b_codes, scales=scales)


def _lost(x: np.ndarray, operand: _Operand) -> tuple[int, int]:
    """How many elements of x quantisation takes out of range, to Inf or NaN or by clamping, and how many to zero.

    An element counts as clamped if it became the largest magnitude and lies beyond that by more than half the format's last spacing there.
    """
    fmt, values = operand.format, operand.values
    codes = np.asarray(operand.quantized.codes).astype(np.int64) >> fmt.unused_bits
    largest = (codes & (1 << fmt.exponent_bits + fmt.mantissa_bits) - 1) == fmt.greatest_magnitude
    significand = (1 << fmt.mantissa_bits) + (fmt.greatest_magnitude & (1 << fmt.mantissa_bits) - 1)  # of the largest magnitude
    finite, magnitude = np.isfinite(x), np.abs(values)
    with np.errstate(invalid="ignore", over="ignore"):
        clamped = largest & (np.abs(x) - magnitude > magnitude / (2 * significand))
    return int((finite & (~np.isfinite(values) | clamped)).sum()), int((finite & (x != 0) & (values == 0)).sum())
