"""Operands for studies, drawn by NumPy from a seed: the same numbers on every machine."""

from collections.abc import Callable

import numpy as np

Pair = tuple[np.ndarray, np.ndarray]


def normal(m: int, n: int, k: int) -> Callable[[int], Pair]:
    """A function of a seed: A [m, k] and B [k, n], float32, standard normal."""
    return lambda seed: _pair(seed, m, n, k, lambda rng, shape: rng.standard_normal(shape, np.float32))


def uniform(m: int, n: int, k: int) -> Callable[[int], Pair]:
    """A function of a seed: A [m, k] and B [k, n], float32, uniform from 0 to 1, so that nothing cancels in a sum."""
    return lambda seed: _pair(seed, m, n, k, lambda rng, shape: rng.random(shape, np.float32))


def _pair(seed: int, m: int, n: int, k: int, draw: Callable[[np.random.Generator, tuple[int, int]], np.ndarray]) -> Pair:
    rng = np.random.default_rng(seed)
    return draw(rng, (m, k)), draw(rng, (k, n))
