"""Products of one row and a matrix as MKL's sgemv adds them with AVX-512: 16 lanes, whose sum is carried on in the first lane.

Source: measured with PyTorch 2.13 (MKL 2024.2) on an Intel Xeon (Emerald Rapids), by terms that cancel, and held to words by
`tests/uses/drift/test_mkl_sums.py`. With `MKL_ENABLE_INSTRUCTIONS=AVX2` the order is another one, which is not known.
"""

from __future__ import annotations

import numpy as np

from tcemu.uses.drift.sum_evaluation import fma_f32

LANES = 16
GROUP = 4  # columns that are computed together; the remaining columns have another order


def multiply_row(a: np.ndarray, b: np.ndarray, columns: np.ndarray, count: int) -> np.ndarray:
    """Compute elements of the product of one row [K] and the columns [K] of a matrix.

    Args:
        a: The row, f32 [n, K] or [1, K].
        b: The column of each element, f32 [n, K].
        columns: Number of each of the n columns.
        count: Number of columns of the matrix.

    Returns:
        f32 [n].
    """
    a, place = np.broadcast_to(a, b.shape), columns - count // GROUP * GROUP
    remaining = np.where(place == 1, _remaining_sum(a, b, paired=False), _remaining_sum(a, b, paired=True))
    return np.where(place < 0, _carried_sum(a, b), remaining)


def _accumulate(a: np.ndarray, b: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """Add products to lanes in turn."""
    lanes = lanes.copy()
    for start in range(0, a.shape[1], LANES):
        x, y = a[:, start : start + LANES], b[:, start : start + LANES]
        lanes[:, : x.shape[1]] = fma_f32(x, y, lanes[:, : x.shape[1]])
    return lanes


def _fold(lanes: np.ndarray) -> np.ndarray:
    """Add lanes 8 apart, then 4, 2 and 1."""
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _carried_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sum the first product, whole vectors of the others, and the remainder; each part starts with the sum before it in its first lane."""
    k = a.shape[1]
    whole = 1 + (k - 1) // LANES * LANES
    total = np.zeros(len(b), np.float32)
    for start, stop in ((0, 1), (1, whole), (whole, k)):
        if stop > start:
            lanes = np.zeros((len(b), LANES), np.float32)
            lanes[:, 0] = total
            total = _fold(_accumulate(a[:, start:stop], b[:, start:stop], lanes))
    return total


def _remaining_sum(a: np.ndarray, b: np.ndarray, *, paired: bool) -> np.ndarray:
    """Sum all products but the first in lanes, then add the first.

    With `paired`, even and odd vectors have lanes of their own, as long as they come in pairs.
    """
    x, y, lanes = a[:, 1:], b[:, 1:], np.zeros((len(b), LANES), np.float32)
    done = x.shape[1] // (2 * LANES) * 2 * LANES if paired else 0
    if done:
        pairs = [v[:, :done].reshape(len(b), -1, 2, LANES) for v in (x, y)]
        even, odd = (_accumulate(*(v[:, :, half].reshape(len(b), -1) for v in pairs), lanes=lanes) for half in (0, 1))
        lanes = even + odd
    return _fold(_accumulate(x[:, done:], y[:, done:], lanes)) + a[:, 0] * b[:, 0]
