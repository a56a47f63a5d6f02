"""One product under one policy: its emulated runs beside the exact product, and where the error comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array

from tcemu.emulation.comparison import Errors, Worst
from tcemu.emulation.policy import Decision
from tcemu.emulation.products import Product
from tcemu.formats import ARRAY_FORMATS, Format
from tcemu.linalg.arguments import product_keys
from tcemu.linalg.dot_general import DimensionNumbers, DotGeneral, product_axes
from tcemu.linalg.recipes import Recipe
from tcemu.quantize.operands import Quantized, Scheme, exact_factors, exact_values, quantize
from tcemu.study.accuracy import Reference, Tally


class Run(NamedTuple):
    """One run of a product: its operands, and the other arguments of its dot_general."""

    lhs: np.ndarray
    rhs: np.ndarray
    dimension_numbers: DimensionNumbers
    kwargs: dict[str, Any]


class Operand(NamedTuple):
    """An operand by a recipe's quantiser, [batch, rows, K]."""

    format: Format
    quantized: Quantized
    values: np.ndarray  # what the codes stand for, exactly, float64; a Hadamard transform undone
    rounded: tuple[np.ndarray, np.ndarray] | None = None  # where there is a transform: its outcome, and what that was rounded to


Operands = tuple[Operand, Operand]


@dataclass
class Sums:
    """Over the runs of a product."""

    tally: Tally
    squared_error: float = 0.0
    squared_size: float = 0.0
    by_operands: float = 0.0  # squared
    by_sums: float = 0.0  # squared
    not_finite: int = 0
    overflow: tuple[int, int] | None = None
    underflow: tuple[int, int] | None = None
    worst: Worst | None = None
    worst_error: float = 0.0

    def relative(self, squared: float) -> float:
        """The norm over that of the exact results."""
        return float(np.sqrt(squared / self.squared_size)) if self.squared_size else float("nan")


def errors_of(product: Product, policy: str, decision: Decision, runs: Sequence[Run]) -> Errors:
    """What a policy, which decided so, does to a product over its runs."""
    by = decision.run
    recipe, key, mirrored = (by.recipe, by.key, by.a == "rhs") if isinstance(by, DotGeneral) else (None, None, False)
    sums = Sums(Tally(ARRAY_FORMATS[np.dtype(product.dtype)]))
    for number, run in enumerate(runs):
        assert decision.run is not None
        d = decision.run(jnp.asarray(run.lhs), jnp.asarray(run.rhs), run.dimension_numbers, **run.kwargs)
        a, b = _matrices(run)
        d = np.asarray(d, np.float64).reshape(*a.shape[:2], b.shape[-1])
        if mirrored:
            a, b, d = b.swapaxes(-1, -2), a.swapaxes(-1, -2), d.swapaxes(-1, -2)
        operands = None if recipe is None else quantized(recipe, key, a, b)
        worst = _add(sums, number, (a.astype(np.float64), b.astype(np.float64)), d, operands)
        if worst is not None:
            sums.worst = worst if recipe is None or operands is None else _with_codes(worst, recipe, operands)
    largest, _, _, _, most_bits, mean_bits = sums.tally.figures
    return Errors(
        product=product,
        policy=policy,
        by=decision.why,
        choice=decision.choice,
        runs=len(runs),
        relative_error=sums.relative(sums.squared_error),
        operand_error=None if recipe is None else sums.relative(sums.by_operands),
        sum_error=None if recipe is None else sums.relative(sums.by_sums),
        largest_error=largest,
        bits_lost=mean_bits,
        most_bits_lost=most_bits,
        overflow=sums.overflow,
        underflow=sums.underflow,
        not_finite=sums.not_finite,
        worst=sums.worst,
    )


def _matrices(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """The operands as [batch, M, K] and [batch, K, N], with the axes as `tcemu.dot_general` takes them together."""
    axes = product_axes(run.dimension_numbers, run.lhs.ndim, run.rhs.ndim)
    size = lambda x, axes: int(np.prod([x.shape[i] for i in axes]))  # noqa: E731
    batch, k = size(run.lhs, axes.lhs_batch), size(run.lhs, axes.lhs_contracting)
    a = run.lhs.transpose(*axes.of_a).reshape(batch, size(run.lhs, axes.rows), k)
    return a, run.rhs.transpose(*axes.of_b).reshape(batch, k, size(run.rhs, axes.columns))


def quantized(recipe: Recipe, key: PRNGKey | None, a: np.ndarray, b: np.ndarray) -> Operands:
    """Both operands by the recipe's quantisers, B with K last. a: [batch, M, K], b: [batch, K, N], of a float dtype that JAX has."""
    keys = product_keys(key)
    scheme_a, scheme_b = recipe.schemes
    return _operand(scheme_a, a, keys.a), _operand(scheme_b, b.swapaxes(-1, -2), keys.b)


def _operand(scheme: Scheme, x: np.ndarray, key: PRNGKey | None) -> Operand:
    codes, factors = _codes_and_factors(scheme, jnp.asarray(x), key)
    values = exact_values(factors)
    if (transform := scheme.transform) is None:
        return Operand(format=scheme.format, quantized=codes, values=values)
    with np.errstate(invalid="ignore"):
        undone = transform.undone(values, x.shape[-1])
    return Operand(scheme.format, codes, undone, (np.asarray(transform.of(jnp.asarray(x)), np.float64), values))


@partial(jax.jit, static_argnums=0)
def _codes_and_factors(scheme: Scheme, x: Array, key: PRNGKey | None) -> tuple[Quantized, list[Array]]:
    """The operand quantised, and the factors of what it stands for."""
    q = quantize(scheme, x, key=key)
    return q, exact_factors(scheme, q)


def _add(sums: Sums, number: int, matrices: tuple[np.ndarray, np.ndarray], d: np.ndarray, operands: Operands | None) -> Worst | None:
    """One run's errors and counts; its worst element, if no earlier run has a worse one. matrices: A and B, float64."""
    a, b = matrices
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
        x, y = operands[0].values, operands[1].values.swapaxes(-1, -2)
        held = Reference.of(x, y, None).rows(0, x.shape[-2])[0]
        both = finite & np.isfinite(held)
        sums.by_operands += float(((held - exact)[both] ** 2).sum())
        sums.by_sums += float(((d - held)[both] ** 2).sum())
        (over_a, under_a), (over_b, under_b) = lost(a, operands[0]), lost(b.swapaxes(-1, -2), operands[1])
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


def _with_codes(worst: Worst, recipe: Recipe, operands: Operands) -> Worst:
    """The same with its row and column as the recipe quantises them."""
    batch, row, column = worst.index
    a, b = operands[0].quantized, operands[1].quantized
    scales = None
    if a.unit_scales is not None and b.unit_scales is not None:
        scales = np.asarray(a.unit_scales)[batch, row], np.asarray(b.unit_scales)[batch, column]
    a_codes, b_codes = np.asarray(a.codes)[batch, row], np.asarray(b.codes)[batch, column]
    return replace(worst, recipe=recipe, a_codes=a_codes, b_codes=b_codes, scales=scales)


def lost(x: np.ndarray, operand: Operand) -> tuple[int, int]:
    """How many elements of x quantisation takes out of range, to Inf or NaN or by clamping, and how many to zero.

    An element counts as clamped if it became the largest magnitude and lies beyond that by more than half the format's last spacing there.
    Of an operand that is transformed first, the elements of what comes of it are counted.
    """
    fmt, (x, values) = operand.format, operand.rounded or (x, operand.values)
    codes = np.asarray(operand.quantized.codes).astype(np.int64) >> fmt.unused_bits
    largest = (codes & (1 << fmt.exponent_bits + fmt.mantissa_bits) - 1) == fmt.greatest_magnitude
    significand = (1 << fmt.mantissa_bits) + (fmt.greatest_magnitude & (1 << fmt.mantissa_bits) - 1)  # of the largest magnitude
    finite, magnitude = np.isfinite(x), np.abs(values)
    with np.errstate(invalid="ignore", over="ignore"):
        clamped = largest & (np.abs(x) - magnitude > magnitude / (2 * significand))
    return int((finite & (~np.isfinite(values) | clamped)).sum()), int((finite & (x != 0) & (values == 0)).sum())
