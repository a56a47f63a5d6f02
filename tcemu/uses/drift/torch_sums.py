"""Sums as PyTorch's kernels for CPUs add them: four cascades side by side, each with partial sums of 16 terms.

Source: pytorch aten/src/ATen/native/cpu/SumKernel.cpp (`cascade_sum`); the vectors have eight f32, with AVX-512 too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

VECTOR, CASCADES, LEVELS = 8, 4, 4
F32 = np.float32


def torch_sum(x: np.ndarray, axes: Sequence[int]) -> np.ndarray | None:
    """Sum f32 values along the last axes or along the first ones, without these axes; None for other axes.

    Args:
        x: f32 values, in memory as their shape says.
        axes: Axes that are summed.
    """
    axes = sorted(axis % x.ndim for axis in axes)
    count, kept = len(axes), x.ndim - len(axes)
    if axes == list(range(kept, x.ndim)):
        return _inner_sum(x.reshape(*x.shape[:kept], -1))
    if axes == list(range(count)):
        rows = x.reshape(math.prod(x.shape[:count]), -1).T
        return _outer_sum(rows).reshape(x.shape[count:])
    return None


def torch_sum_rows(rows: np.ndarray, axes: Sequence[int], columns: np.ndarray, count: int, rank: int) -> np.ndarray | None:
    """Compute some elements of `torch_sum` from their terms; None for other axes.

    Args:
        rows: f32 terms [n, K].
        axes: Axes that are summed.
        columns: Number of each of the n elements.
        count: Number of elements of the whole result.
        rank: Rank of the operand.
    """
    axes = sorted(axis % rank for axis in axes)
    if axes == list(range(rank - len(axes), rank)):
        return _inner_sum(rows)
    if axes == list(range(len(axes))):
        return np.where(columns < _grouped(count), _cascade(rows), _four_cascades(rows))
    return None


def _cascade(x: np.ndarray) -> np.ndarray:
    """Sum along the last axis: after every 2^power terms, a level's sum is added to that of the next level."""
    n = x.shape[-1]
    power = max(4, math.ceil(math.log2(n)) // LEVELS if n > 1 else 0)
    sums = np.zeros((LEVELS, *x.shape[:-1]), F32)
    done = 0
    while done + (1 << power) <= n:
        for i in range(done, done + (1 << power)):
            sums[0] += x[..., i]
        done += 1 << power
        for level in range(1, LEVELS):
            sums[level] += sums[level - 1]
            sums[level - 1] = 0
            if done & (((1 << power) - 1) << (level * power)):
                break
    for i in range(done, n):
        sums[0] += x[..., i]
    for level in range(1, LEVELS):
        sums[0] += sums[level]
    return sums[0]


def _four_cascades(x: np.ndarray) -> np.ndarray:
    """Sum along the last axis: cascades take the terms in turn, and the first one takes the remainder."""
    whole = x.shape[-1] // CASCADES * CASCADES
    sums = [_cascade(x[..., first:whole:CASCADES]) for first in range(CASCADES)]
    for i in range(whole, x.shape[-1]):
        sums[0] = sums[0] + x[..., i]
    return ((sums[0] + sums[1]) + sums[2]) + sums[3]


def _inner_sum(x: np.ndarray) -> np.ndarray:
    whole = x.shape[-1] // VECTOR * VECTOR
    lanes = _four_cascades(np.moveaxis(x[..., :whole].reshape(*x.shape[:-1], -1, VECTOR), -2, -1))
    total = np.zeros(x.shape[:-1], F32)
    for i in range(whole, x.shape[-1]):
        total = total + x[..., i]
    for lane in range(VECTOR):
        total = total + lanes[..., lane]
    return total


def _outer_sum(columns: np.ndarray) -> np.ndarray:
    """Sum each row of `columns` [C, n]: columns of a matrix, in groups that depend on their number."""
    whole = _grouped(len(columns))
    return np.concatenate([_cascade(columns[:whole]), _four_cascades(columns[whole:])])


def _grouped(count: int) -> int:
    """Return the number of columns that are added in groups."""
    group = CASCADES * VECTOR if count >= VECTOR else CASCADES
    return count // group * group
