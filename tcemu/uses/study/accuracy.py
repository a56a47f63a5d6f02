"""The distance of a matrix product from the exact one: the exact product with a bound of its own error, and measures of error by name.

The exact product is a float64 product by NumPy with a bound of its error, or exact rational arithmetic for single outputs. Emulated values
come in as finished arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from tcemu.engine.formats.float_arrays import from_float, to_float
from tcemu.engine.formats.number_formats import F64, S32, Format

ROUNDOFF = 2.0**-53  # unit roundoff of float64
INTEGER_ROUNDINGS = {
    "RN": np.rint, "RZ": np.trunc, "RM": np.floor, "RP": np.ceil,
    "RNA": lambda x: np.trunc(x) + np.copysign(np.abs(x - np.trunc(x)) >= 0.5, x),
}  # fmt: skip


def round_values(x: np.ndarray, fmt: Format, rounding: str, saturate: bool = False) -> np.ndarray:
    """Round values to a format.

    Args:
        x: Array [...] of any real dtype.
        fmt: The format.
        rounding: Rounding mode, as "RN".
        saturate: Whether values out of range become the largest finite value, as in `gemm`.

    Returns:
        The rounded values as float64 [...], which represents them all.
    """
    if fmt == F64:
        return x.astype(np.float64)
    if fmt == S32:  # float32, which `to_float` returns, does not represent them all
        return np.clip(INTEGER_ROUNDINGS[rounding](x.astype(np.float64)), -(2.0**31), 2.0**31 - 1)
    return np.asarray(to_float(fmt, from_float(fmt, x, rounding=rounding, saturate=saturate))).astype(np.float64)


def lowest_bit_exponent(x: np.ndarray) -> int:
    """Return the exponent of the lowest one bit of the finite values of x, float64 [...]; 0 if all are zero."""
    fraction, exponent = np.frexp(x[np.isfinite(x) & (x != 0)])
    if not fraction.size:
        return 0
    integer = np.abs(np.ldexp(fraction, 53)).astype(np.int64)
    zeros = np.frexp((integer & -integer).astype(np.float64))[1] - 1
    return int((exponent + zeros).min()) - 53


@dataclass(frozen=True)
class Reference:
    """The exact A·B + C of float64 arrays."""

    a: np.ndarray  # [..., M, K]
    b: np.ndarray  # [..., K, N]
    c: np.ndarray | None  # [..., M, N]
    unit_exponent: int  # exponent of a power of two of which every product, and C, is a multiple

    @classmethod
    def from_arrays(cls, a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> "Reference":
        """Make the reference of these operands and find their common unit."""
        unit = lowest_bit_exponent(a) + lowest_bit_exponent(b)
        return cls(a, b, c, unit if c is None else min(unit, lowest_bit_exponent(c)))

    def compute_rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Compute rows `start` to `stop` of the product and a bound of the error of each element.

        The bound is 0 where nothing could round: all terms are multiples of one unit and their magnitudes sum to 2^53 units or less.
        Else it is n·u of that sum for n = K + 1 operations of roundoff u in any order, doubled for the roundings of the sum itself, and
        half a last bit for each product's underflow.

        Returns:
            The rows and the bounds, two float64 arrays [..., rows, N].

        Source: Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1.
        """
        a, c = self.a[..., start:stop, :], None if self.c is None else self.c[..., start:stop, :]
        count = a.shape[-1] + 1
        with np.errstate(all="ignore"):
            value, size = a @ self.b, np.abs(a) @ np.abs(self.b)
            if c is not None:
                value, size = value + c, size + np.abs(c)
            exact = (np.ldexp(size, -self.unit_exponent) * (1 + count * ROUNDOFF) <= 1 / ROUNDOFF) & (self.unit_exponent >= -1074)
            return value, np.where(exact, 0.0, 2 * count * ROUNDOFF * size + count * 2.0**-1074)

    def exact_element(self, index: Sequence[int]) -> Fraction:
        """Compute one element exactly. Its row of A, its column of B and its C must be finite. index: [..., row, column] of the product."""
        *batch, row, column = index
        leading = np.broadcast_shapes(self.a.shape[:-2], self.b.shape[:-2])
        a = np.broadcast_to(self.a, leading + self.a.shape[-2:])[tuple(batch)][row]
        b = np.broadcast_to(self.b, leading + self.b.shape[-2:])[tuple(batch)][:, column]
        total = sum((Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)), Fraction())
        return total if self.c is None else total + Fraction(float(self.c[tuple(index)]))


def ulp(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Return the distance of neighbouring values of `fmt` at the magnitude of x, float64 [...] in and out; 1 for an integer format."""
    if fmt.is_integer:
        return np.ones_like(x)
    exponent = np.where(x == 0, fmt.min_exponent, np.frexp(x)[1] - 1)
    return np.ldexp(1.0, np.maximum(exponent, fmt.min_exponent) - fmt.mantissa_bits)


class ErrorTally:
    """Running figures of one kind of error over arrays that come in pieces.

    Errors whose exact value is 0 have no ulp: they count in the errors alone.

    Args:
        fmt: The format whose ulps are counted.
    """

    def __init__(self, fmt: Format):
        self.fmt = fmt
        self.errors = self.ulps = self.bits = (0.0, 0.0, 0)  # maximum, sum, count

    def add(self, error: np.ndarray, exact: np.ndarray) -> None:
        """Add errors of finite elements.

        The lost bits of an element are log2 of its error in ulps, from 0 to all the format's significand bits.

        Args:
            error: Errors, float64 [n].
            exact: Exact values, float64 [n].
        """
        error = np.abs(error)
        ulps = (error / ulp(exact, self.fmt))[exact != 0]
        precision = self.fmt.bits if self.fmt.is_integer else self.fmt.mantissa_bits + 1
        bits = np.minimum(np.log2(np.maximum(ulps, 1.0)), precision)
        self.errors, self.ulps, self.bits = (
            _extend_tally(self.errors, error),
            _extend_tally(self.ulps, ulps),
            _extend_tally(self.bits, bits),
        )

    @property
    def figures(self) -> list[float]:
        """Maximum and mean of the errors, of the errors in ulps, and of the lost bits; NaN where nothing was counted."""
        return [x for largest, total, count in (self.errors, self.ulps, self.bits) for x in _max_and_mean(largest, total, count)]


def _extend_tally(tally: tuple[float, float, int], values: np.ndarray) -> tuple[float, float, int]:
    largest, total, count = tally
    return max(largest, float(values.max(initial=0.0))), total + float(values.sum()), count + values.size


def _max_and_mean(largest: float, total: float, count: int) -> tuple[float, float]:
    return (largest, total / count) if count else (float("nan"), float("nan"))


# ---- measures of error by name: NaN where there is nothing to measure

Measure = Callable[[np.ndarray, np.ndarray], float]  # function of the values and the exact values, float64 arrays of one shape


def normwise(value: np.ndarray, exact: np.ndarray) -> float:
    """Return the norm of the errors over the norm of the exact values (Frobenius)."""
    return _ratio(np.linalg.norm(value - exact), np.linalg.norm(exact)) if exact.size else float("nan")


def elementwise(value: np.ndarray, exact: np.ndarray) -> float:
    """Return the largest relative error of an element whose exact value is not 0. Where sums cancel it has no bound."""
    return float(_relative_errors(value, exact).max(initial=0.0)) if exact.size else float("nan")


def mean_elementwise(value: np.ndarray, exact: np.ndarray) -> float:
    """Return the mean relative error of the elements whose exact value is not 0."""
    relative = _relative_errors(value, exact)
    return float(relative.mean()) if relative.size else float("nan")


def largest_over_rms(value: np.ndarray, exact: np.ndarray) -> float:
    """Return the largest error of an element over the root mean square of the exact values."""
    return _ratio(np.abs(value - exact).max(), np.sqrt(np.mean(exact**2))) if exact.size else float("nan")


def bias(value: np.ndarray, exact: np.ndarray) -> float:
    """Return the mean error in the direction of the exact values' signs over the mean magnitude: negative where magnitudes shrink."""
    return _ratio(np.sum((value - exact) * np.sign(exact)), np.sum(np.abs(exact))) if exact.size else float("nan")


def _relative_errors(value: np.ndarray, exact: np.ndarray) -> np.ndarray:
    nonzero = exact != 0
    return np.abs(value[nonzero] - exact[nonzero]) / np.abs(exact[nonzero])


def _ratio(error: Any, size: Any) -> float:
    """Return error / size, where 0 / 0 is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return 0.0 if error == 0 else float(np.float64(error) / np.float64(size))


MEASURES: dict[str, Measure] = {f.__name__: f for f in (normwise, elementwise, mean_elementwise, largest_over_rms, bias)}
TALLY_MEASURES = {"ulps": 2, "mean_ulps": 3, "most_bits_lost": 4, "bits_lost": 5}  # measures in ulps: their indices in `ErrorTally.figures`
MEASURE_DEFINITIONS = {  # on pictures
    "normwise": "the norm of the errors over the norm of the exact values (Frobenius), without a unit",
    "elementwise": "the largest relative error of an element whose exact value is not 0, without a unit",
    "mean_elementwise": "the mean relative error of the elements whose exact value is not 0, without a unit",
    "largest_over_rms": "the largest error of an element over the root mean square of the exact values, without a unit",
    "bias": "the mean error in the direction of the exact values' signs over the mean magnitude, without a unit; "
    "below 0 where magnitudes shrink",
    "ulps": "the largest error in ulps of the result's format",
    "mean_ulps": "the mean error in ulps of the result's format",
    "most_bits_lost": "log2 of the error in ulps of the result's format, at least 0; the maximum over the elements, in bits",
    "bits_lost": "log2 of the error in ulps of the result's format, at least 0; the mean over the elements, in bits",
}
DEFAULT_MEASURES = ("normwise", "elementwise", "largest_over_rms", "ulps", "bits_lost")


def resolve_measures(measures: str | Sequence[str] | Mapping[str, Measure]) -> dict[str, Measure | None]:
    """Return measures by name, with None for those of `TALLY_MEASURES`.

    Raises:
        ValueError: A name is no measure's, or a function has the name of a measure that it is not.
        TypeError: A value of a dict is no function.
    """
    if isinstance(measures, Mapping):
        if wrong := [name for name, measure in measures.items() if not isinstance(name, str) or not callable(measure)]:
            raise TypeError(f"measures: {wrong[0]!r} has no function of (value, exact), two float64 arrays")
        if wrong := [name for name, f in measures.items() if name in MEASURE_DEFINITIONS and f is not MEASURES.get(name)]:
            raise ValueError(f"measures: {wrong[0]!r} is the name of a measure of tcemu; give your function another name")
        return dict(measures)
    names = (measures,) if isinstance(measures, str) else tuple(measures)
    if not names or not set(names) <= MEASURES.keys() | TALLY_MEASURES.keys():
        raise ValueError(
            f"measures: got {measures!r}; expected some of {', '.join((*MEASURES, *TALLY_MEASURES))}, or a dict of functions by name"
        )
    return {name: MEASURES.get(name) for name in names}


def compute_measures(
    measures: Mapping[str, Measure | None], fmt: Format, value: np.ndarray, exact: np.ndarray
) -> tuple[dict[str, float], int]:
    """Compute every measure of the finite elements, and count the others. value: values of `fmt` as float64; exact: float64."""
    finite = np.isfinite(value) & np.isfinite(exact)
    value, exact = value[finite], exact[finite]
    tally = ErrorTally(fmt)
    if not measures.keys().isdisjoint(TALLY_MEASURES):
        tally.add(value - exact, exact)
    errors = {name: tally.figures[TALLY_MEASURES[name]] if f is None else float(f(value, exact)) for name, f in measures.items()}
    return errors, int((~finite).sum())
