"""The table of the corpus: kernels of four kinds, each with operands, the launch and a NumPy reference; and how a result is judged.

`python tests/kernels/corpus/run_corpus.py` runs them and prints which are right, wrong and refused. All run in checked mode, where a false
alarm counts too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tcemu import ptx

CUDA, PTX, TRITON, CUTE = "CUDA C++", "inline PTX", "Triton", "CuTe DSL"
Results = Iterator[tuple[Any, Any, Any]]  # (found, expected, bound of the absolute error or 0: the same words)


class Case(NamedTuple):
    """A kernel of the corpus."""

    kind: str
    run: Callable[[np.random.Generator], Results]


CASES: dict[str, Case] = {}


def case(kind: str) -> Callable:
    """Add a function to the table under its name."""

    def add(function: Callable) -> Callable:
        assert function.__name__ not in CASES
        CASES[function.__name__] = Case(kind, function)
        return function

    return add


def launch(source: str, *args: Any, target: str = "H100", grid: Any = 1, block: Any = 32, **options: Any) -> ptx.KernelOutputs:
    """Run CUDA C++ or PTX in checked mode."""
    return ptx.run(source, args=args, target=target, grid=grid, block=block, checked=True, **options)


def check(name: str) -> int:
    """Run a case, and return the number of its arrays. Raises AssertionError for a wrong one."""
    count = 0
    for found, expected, bound in CASES[name].run(np.random.default_rng(len(name))):
        found, expected = np.asarray(found), np.asarray(expected)
        assert found.shape == expected.shape, f"{name}: shape {found.shape}, expected {expected.shape}"
        if np.ndim(bound) or bound:
            wrong = ~(np.abs(found.astype(np.float64) - expected.astype(np.float64)) <= bound)
        else:
            assert found.dtype == expected.dtype, f"{name}: {found.dtype}, expected {expected.dtype}"
            wrong = found.view(f"u{found.itemsize}") != expected.view(f"u{found.itemsize}")
        place = tuple(np.argwhere(wrong)[0]) if wrong.any() else ()
        assert not wrong.any(), (
            f"{name}: {wrong.sum()} of {wrong.size} elements of array {count}; {place}: {found[place]}, {expected[place]}"
        )
        count += 1
    assert count, f"{name} compares nothing"
    return count


def small(rng: np.random.Generator, *shape: int, dtype: Any = np.float16, high: int = 4) -> np.ndarray:
    """Integers of a float dtype, whose products and sums of some hundreds every order of adding leaves exact."""
    return rng.integers(-high, high + 1, shape).astype(dtype)


def bits(array: np.ndarray) -> np.ndarray:
    """Codes of a dtype that NumPy itself does not have."""
    return array.view(f"u{array.itemsize}")


BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
