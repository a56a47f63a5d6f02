"""Sums as PyTorch's kernels for CPUs add them, as trees: four cascades side by side, each with partial sums of 16 terms.

Source: pytorch aten/src/ATen/native/cpu/SumKernel.cpp (`cascade_sum`); the vectors have eight f32, with AVX-512 too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from tcemu.engine.arithmetic.sum_tree import Chain, Concat, Join, Node, evaluate
from tcemu.uses.drift.sum_evaluation import FloatSums, terms_first

VECTOR, CASCADES, LEVELS = 8, 4, 4
F32 = np.float32


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
    total, grouped = np.empty(len(rows), F32), columns < _grouped(count)
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


def _grouped(count: int) -> int:
    """Return the number of columns that are added in groups."""
    group = CASCADES * VECTOR if count >= VECTOR else CASCADES
    return count // group * group
