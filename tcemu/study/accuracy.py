"""How far a matrix product is from the exact one: the reference, its own uncertainty, and the figures that are printed.

The reference is a float64 product by NumPy with a bound of its own error, or exact rational arithmetic for single outputs.
Nothing here touches the emulated values: they come in as finished arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tcemu.formats import F64, S32, Format, from_float, to_float

ROUNDOFF = 2.0**-53  # of float64
WHOLE = {"RN": np.rint, "RZ": np.trunc, "RM": np.floor, "RP": np.ceil}


def rounded(x: np.ndarray, fmt: Format, rounding: str, saturate: bool = False) -> np.ndarray:
    """The values of x once they are rounded to `fmt`, as float64, which holds them all. x: any real dtype, [...].

    saturate: what is out of range is the largest finite value, as in `gemm`.
    """
    if fmt == F64:
        return x.astype(np.float64)
    if fmt == S32:  # float32, which `to_float` gives, does not hold them all
        return np.clip(WHOLE[rounding](x.astype(np.float64)), -(2.0**31), 2.0**31 - 1)
    return np.asarray(to_float(fmt, from_float(fmt, x, rounding=rounding, saturate=saturate))).astype(np.float64)


def last_bit(x: np.ndarray) -> int:
    """The exponent of the lowest one bit of the finite values of x, float64 [...]; 0 if all are zero."""
    fraction, exponent = np.frexp(x[np.isfinite(x) & (x != 0)])
    if not fraction.size:
        return 0
    whole = np.abs(np.ldexp(fraction, 53)).astype(np.int64)
    zeros = np.frexp((whole & -whole).astype(np.float64))[1] - 1
    return int((exponent + zeros).min()) - 53


@dataclass(frozen=True)
class Reference:
    """A·B + C of float64 arrays a [..., M, K], b [..., K, N] and c [..., M, N] or None."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray | None
    unit: int  # every product, and C, is a multiple of 2 ** unit

    @classmethod
    def of(cls, a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> "Reference":
        unit = last_bit(a) + last_bit(b)
        return cls(a, b, c, unit if c is None else min(unit, last_bit(c)))

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows `start` to `stop` of the product and a bound of the error of each element: two float64 arrays [..., rows, N].

        The bound is 0 where nothing could round: all terms are multiples of one unit and their magnitudes sum to 2^53 units or less.
        Else it is n·u of that sum for n = K + 1 operations of roundoff u in any order (Higham, Accuracy and Stability of Numerical
        Algorithms, 2002, section 3.1), doubled for the roundings of the sum itself, and half a last bit for each product's underflow.
        """
        a, c = self.a[..., start:stop, :], None if self.c is None else self.c[..., start:stop, :]
        count = a.shape[-1] + 1
        with np.errstate(all="ignore"):
            value, size = a @ self.b, np.abs(a) @ np.abs(self.b)
            if c is not None:
                value, size = value + c, size + np.abs(c)
            exact = (np.ldexp(size, -self.unit) * (1 + count * ROUNDOFF) <= 1 / ROUNDOFF) & (self.unit >= -1074)
            return value, np.where(exact, 0.0, 2 * count * ROUNDOFF * size + count * 2.0**-1074)

    def element(self, index: Sequence[int]) -> Fraction:
        """One element, exactly; its row of A, its column of B and its C must be finite. index: [..., row, column] of the product."""
        *batch, row, column = index
        leading = np.broadcast_shapes(self.a.shape[:-2], self.b.shape[:-2])
        a = np.broadcast_to(self.a, leading + self.a.shape[-2:])[tuple(batch)][row]
        b = np.broadcast_to(self.b, leading + self.b.shape[-2:])[tuple(batch)][:, column]
        total = sum((Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)), Fraction())
        return total if self.c is None else total + Fraction(float(self.c[tuple(index)]))


def ulp(x: np.ndarray, fmt: Format) -> np.ndarray:
    """The distance of neighbouring values of `fmt` at the magnitude of x, float64 [...] in and out; 1 for an integer format."""
    if fmt.is_integer:
        return np.ones_like(x)
    exponent = np.where(x == 0, fmt.least_exponent, np.frexp(x)[1] - 1)
    return np.ldexp(1.0, np.maximum(exponent, fmt.least_exponent) - fmt.mantissa_bits)


class Tally:
    """Running figures of one kind of error over arrays that come in pieces; `fmt` is the format whose ulps are meant.

    Errors whose exact value is 0 have no ulp: they count in the errors alone.
    """

    def __init__(self, fmt: Format):
        self.fmt = fmt
        self.errors = self.ulps = self.bits = (0.0, 0.0, 0)  # largest, sum, count

    def add(self, error: np.ndarray, exact: np.ndarray) -> None:
        """error, exact: float64 [n], finite. Bits lost: log2 of the error in ulps, from 0 to all the format's significand bits."""
        error = np.abs(error)
        ulps = (error / ulp(exact, self.fmt))[exact != 0]
        precision = self.fmt.bits if self.fmt.is_integer else self.fmt.mantissa_bits + 1
        bits = np.minimum(np.log2(np.maximum(ulps, 1.0)), precision)
        self.errors, self.ulps, self.bits = _with(self.errors, error), _with(self.ulps, ulps), _with(self.bits, bits)

    @property
    def figures(self) -> list[float]:
        """Largest and mean error, largest and mean ulps, largest and mean bits lost; NaN where nothing was counted."""
        return [x for largest, total, count in (self.errors, self.ulps, self.bits) for x in _largest_and_mean(largest, total, count)]


def _with(tally: tuple[float, float, int], values: np.ndarray) -> tuple[float, float, int]:
    largest, total, count = tally
    return max(largest, float(values.max(initial=0.0))), total + float(values.sum()), count + values.size


def _largest_and_mean(largest: float, total: float, count: int) -> tuple[float, float]:
    return (largest, total / count) if count else (float("nan"), float("nan"))
