"""Sums of f32 as PyTorch's libraries for CPUs add them: cascades of PyTorch's own kernels, and lanes of MKL's.

`torch_sum`: four cascades side by side, each with partial sums of 16 terms. Source: pytorch aten/src/ATen/native/cpu/SumKernel.cpp
(`cascade_sum`); the vectors have eight f32, with AVX-512 too.

`multiply_row`: products of one row and a matrix as MKL's sgemv adds them with AVX-512, in 16 lanes, whose sum is carried on in the first
lane. Source: measured with PyTorch 2.13 (MKL 2024.2) on an Intel Xeon (Emerald Rapids), by terms that cancel, and held to words by
`tests/uses/drift/test_mkl_sums.py`. With `MKL_ENABLE_INSTRUCTIONS=AVX2` the order is another one, which is not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from tcemu.engine.arithmetic.sum_tree import Chain, Concat, Join, Node, evaluate
from tcemu.operations.functional.torch_cuda.numpy_evaluation import fma_f32
from tcemu.operations.products.library.numpy_sums import FloatSums
from tcemu.uses.drift.sum_evaluation import terms_first

VECTOR, CASCADES, LEVELS = 8, 4, 4


def torch_sum(rows: np.ndarray, axes: Sequence[int], columns: np.ndarray, count: int, rank: int) -> np.ndarray | None:
    """Sum f32 terms along the last axes of an operand or along its first ones; None for other axes.

    Args:
        rows: f32 terms [n, K] of some elements of the result.
        axes: Axes that are summed.
        columns: Number of each of the n elements.
        count: Number of elements of the whole result.
        rank: Rank of the operand, which lies in memory as its shape says.
    """
    axes = sorted(axis % rank for axis in axes)
    if axes == list(range(rank - len(axes), rank)):
        return _sum(inner_tree(rows.shape[-1]), rows)
    if axes == list(range(len(axes))):
        return _sum_columns(rows, columns, count)
    return None


def _sum_columns(rows: np.ndarray, columns: np.ndarray, count: int) -> np.ndarray:
    """Sum rows [n, K], the columns of these numbers of a matrix with `count` columns."""
    group = CASCADES * VECTOR if count >= VECTOR else CASCADES  # columns that are added together; the remaining ones have another order
    total, grouped = np.empty(len(rows), np.float32), columns < count // group * group
    for which in (True, False):
        total[grouped == which] = _sum(outer_tree(rows.shape[-1], which), rows[grouped == which])
    return total


def _sum(tree: Node, rows: np.ndarray) -> np.ndarray:
    """Sum f32 terms [..., K] along the last axis."""
    terms = terms_first(rows, -0.0)
    return evaluate(tree, FloatSums(terms, terms.shape[1:]))


def _cascade(places: np.ndarray) -> Node:
    """Return the sums [...] of elements [..., n]: after every 2^power terms, a level's sum is added to that of the next level."""
    places = places[..., None, :]  # the axis along which the levels are added at the end
    *grid, n = places.shape
    power = max(4, math.ceil(math.log2(n)) // LEVELS if n > 1 else 0)
    parts: list[Node] = []
    for level in range(LEVELS):  # the sums that a level has at the end: of 2^power sums of the level below, each
        size = 1 << (power * level)
        count = n // size if level == LEVELS - 1 else n // size % (1 << power)
        own, places = places[..., places.shape[-1] - count * size :], places[..., : places.shape[-1] - count * size]
        node: Node = Chain(np.moveaxis(own.reshape(*grid, count, *[1 << power] * level), -1, 0))
        for _ in range(level):
            node = Join(node, from_zero=True)
        parts.append(node)
    return Join(Concat(tuple(parts)))


def _four_cascades(places: np.ndarray) -> Node:
    """Return the sums of elements [..., n]: cascades take the terms in turn, and the first one takes the remainder."""
    whole = places.shape[-1] // CASCADES * CASCADES
    others = [_cascade(places[..., None, start:whole:CASCADES]) for start in range(1, CASCADES)]
    first = Join(Concat((_cascade(places[..., None, None, 0:whole:CASCADES]), _elements(places[..., None, whole:]))))
    return Join(Concat((first, *others)))


def _elements(places: np.ndarray) -> Node:
    """Return elements as sums of one term."""
    return Chain(places[None], from_first=True)


@lru_cache(maxsize=64)
def inner_tree(k: int) -> Node:
    """Return the sum of neighbours in memory: lanes of a vector, added one after the other to the remainder."""
    whole = k // VECTOR * VECTOR
    lanes = _four_cascades(np.arange(whole).reshape(-1, VECTOR).T)
    return Join(Concat((_elements(np.arange(whole, k)), lanes)), from_zero=True)


@lru_cache(maxsize=64)
def outer_tree(k: int, grouped: bool) -> Node:
    """Return the sum of a column of a matrix, of one that is added in a group of columns or of another one."""
    return _cascade(np.arange(k)) if grouped else _four_cascades(np.arange(k))


# ---- products of a row by MKL

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
