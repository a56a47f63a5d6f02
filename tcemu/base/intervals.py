"""The mean of a few measurements and its confidence interval by Student's t distribution."""

from __future__ import annotations

from collections.abc import Sequence
from math import atan, cos, pi, sin, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

LEVEL = 0.95  # probability with which the intervals of results contain the mean
INTERVAL_METHOD = "95 % interval of the mean over seeds by Student's t distribution, with n - 1 degrees of freedom"
BISECTIONS = 200  # more than halve any interval of floats down to neighbours


class MeanInterval(NamedTuple):
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> MeanInterval:
    """Return the mean and its confidence interval, mean ± t · s / √n, with t of n - 1 degrees of freedom.

    The interval is exact for values that are independent and normal. It may reach below 0 where all values are above.

    Args:
        values: Measurements. A single one has no interval: low and high are NaN.
    """
    mean = fmean(values)
    if len(values) < 2:
        return MeanInterval(mean, float("nan"), float("nan"))
    half = student_t_quantile((1 + LEVEL) / 2, len(values) - 1) * stdev(values) / sqrt(len(values))
    return MeanInterval(mean, mean - half, mean + half)


def student_t_quantile(probability: float, degrees: int) -> float:
    """Return the t below which Student's distribution has a probability from 0.5 to 1.

    Args:
        probability: The probability, at least 0.5 and below 1.
        degrees: Degrees of freedom, at least 1.
    """
    low, high = 0.0, 1.0
    while _central_probability(high, degrees) < 2 * probability - 1:
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if _central_probability(middle, degrees) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return high


def _central_probability(t: float, degrees: int) -> float:
    """Return the probability of a value from -t to t. Source: Abramowitz and Stegun, 26.7.3 and 26.7.4, for integer degrees."""
    angle = atan(t / sqrt(degrees))
    squared = cos(angle) ** 2
    if degrees == 1:
        return 2 * angle / pi
    term = total = 1.0 if degrees % 2 == 0 else cos(angle)
    for factor in range(2 if degrees % 2 else 1, degrees - 2, 2):
        term *= squared * factor / (factor + 1)
        total += term
    return sin(angle) * total if degrees % 2 == 0 else 2 / pi * (angle + sin(angle) * total)
