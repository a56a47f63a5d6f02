"""The table of Triton programs as people write them, and how a result is compared with its reference.

A program is a function that draws its operands, launches its kernels and returns what they wrote beside an independent NumPy reference. The
reference is in bits where the arithmetic is determined, and else has a bound of the error, which the program states and derives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tcemu.testing import assert_bits_equal
from tcemu.triton import as_tensor as as_tensor

EPSILON = 2.0**-23  # one unit in the last place of an f32 in [1, 2)


class Result(NamedTuple):
    """One array that a program wrote."""

    actual: np.ndarray
    expected: np.ndarray
    bound: np.ndarray | float | None = None  # of the absolute error; None: the bits are determined

    def check(self) -> None:
        """Raise AssertionError unless the array is right."""
        if self.bound is None:
            assert_bits_equal(self.actual, self.expected)
            return
        with np.errstate(invalid="ignore"):  # NaN
            error = np.abs(self.actual.astype(np.float64) - self.expected)
        wrong = ~(error <= self.bound)  # NaN is wrong
        if wrong.any():
            place = tuple(np.argwhere(wrong)[0])
            limit = np.broadcast_to(self.bound, error.shape)[place]
            raise AssertionError(
                f"{wrong.sum()} of {wrong.size} elements exceed their bound; {place}: got {self.actual[place]}, "
                f"expected {self.expected[place]}, bound {limit:.3g}"
            )


class Program(NamedTuple):
    """A row of the table."""

    function: Callable[[np.random.Generator], list[Result]]
    target: str
    ways: tuple[str, ...]  # "emulated", and "interpreted" unless `tcemu.triton.interpreted` refuses it


PROGRAMS: dict[str, Program] = {}


def program(target: str = "H100", *, ways: tuple[str, ...] = ("emulated", "interpreted")) -> Callable:
    """Add a function to the table under its name."""

    def add(function: Callable) -> Callable:
        PROGRAMS[function.__name__] = Program(function, target, ways)
        return function

    return add


def floats(rng: np.random.Generator, *shape: int, dtype: type = np.float32) -> np.ndarray:
    """Normal numbers."""
    return rng.normal(size=shape).astype(dtype)


def integers(rng: np.random.Generator, low: int, high: int, *shape: int, dtype: type = np.int32) -> np.ndarray:
    """Uniform integers below `high`, as a float dtype exact numbers."""
    return rng.integers(low, high, size=shape).astype(dtype)


def bf16(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16."""
    return x.astype(ml_dtypes.bfloat16)
