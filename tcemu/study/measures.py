"""Measures of error, by name: what one number says of how far an array is from the exact one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tcemu.formats import Format
from tcemu.study.accuracy import Tally

Measure = Callable[[np.ndarray, np.ndarray], float]  # of the values and the exact ones, float64 arrays of one shape


def normwise(value: np.ndarray, exact: np.ndarray) -> float:
    """The norm of the errors over that of the exact values (Frobenius)."""
    return _over(np.linalg.norm(value - exact), np.linalg.norm(exact))


def elementwise(value: np.ndarray, exact: np.ndarray) -> float:
    """The largest relative error of an element, those that are exactly 0 left out. Where sums cancel it has no bound."""
    return float(_relative(value, exact).max(initial=0.0))


def mean_elementwise(value: np.ndarray, exact: np.ndarray) -> float:
    """The mean relative error of the elements; those whose exact value is 0 are left out."""
    relative = _relative(value, exact)
    return float(relative.mean()) if relative.size else float("nan")


def largest_over_rms(value: np.ndarray, exact: np.ndarray) -> float:
    """The largest error of an element over the root mean square of the exact values."""
    return _over(np.abs(value - exact).max(initial=0.0), np.sqrt(np.mean(exact**2)) if exact.size else 0.0)


def bias(value: np.ndarray, exact: np.ndarray) -> float:
    """The mean error in the direction of the exact values' signs, over the mean magnitude: below zero where magnitudes shrink."""
    return _over(np.sum((value - exact) * np.sign(exact)), np.sum(np.abs(exact)))


def _relative(value: np.ndarray, exact: np.ndarray) -> np.ndarray:
    there = exact != 0
    return np.abs(value[there] - exact[there]) / np.abs(exact[there])


def _over(error: Any, size: Any) -> float:
    """0 / 0 is 0: nothing, and no error."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return 0.0 if error == 0 else float(np.float64(error) / np.float64(size))


MEASURES: dict[str, Measure] = {one.__name__: one for one in (normwise, elementwise, mean_elementwise, largest_over_rms, bias)}
FIGURES = {"ulps": 2, "mean_ulps": 3, "most_bits_lost": 4, "bits_lost": 5}  # their places in `Tally.figures`: of the result's format
USUAL = ("normwise", "elementwise", "largest_over_rms", "ulps", "bits_lost")


def checked(measures: str | Sequence[str] | Mapping[str, Measure]) -> dict[str, Measure | None]:
    """Measures by name; None: one of `FIGURES`. Raises ValueError for a name that is none, TypeError for what is no function."""
    if isinstance(measures, Mapping):
        if wrong := [name for name, one in measures.items() if not isinstance(name, str) or not callable(one)]:
            raise TypeError(f"measures: {wrong[0]!r} has no function of (value, exact), two float64 arrays")
        return dict(measures)
    names = (measures,) if isinstance(measures, str) else tuple(measures)
    if not names or not set(names) <= MEASURES.keys() | FIGURES.keys():
        raise ValueError(f"measures: got {measures!r}; wanted some of {', '.join((*MEASURES, *FIGURES))}, or a dict of functions by name")
    return {name: MEASURES.get(name) for name in names}


def measured(measures: Mapping[str, Measure | None], fmt: Format, value: np.ndarray, exact: np.ndarray) -> tuple[dict[str, float], int]:
    """Every measure of finite elements, and how many are not finite. value: in `fmt`, as float64; exact: float64 of the same shape."""
    finite = np.isfinite(value) & np.isfinite(exact)
    value, exact = value[finite], exact[finite]
    tally = Tally(fmt)
    if not measures.keys().isdisjoint(FIGURES):
        tally.add(value - exact, exact)
    found = {name: tally.figures[FIGURES[name]] if one is None else float(one(value, exact)) for name, one in measures.items()}
    return found, int((~finite).sum())
