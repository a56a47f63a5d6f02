"""The order in which a kernel recipe adds: arrays of indices along K, and the tree of them that every interpreter of a recipe walks."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tcemu.engine.arithmetic.sum_tree import EMPTY, Chain, Join, Node, Waiting
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Lanes, Merge, Slices, Steps


class StepOrder(NamedTuple):
    """Instructions in the order in which they run, slice after slice. T instructions of k products."""

    indices: np.ndarray  # int32 [T, k]: along K, or EMPTY
    closes: np.ndarray  # bool [T]: its accumulator is then added to the sum of the slice
    restarted: bool  # slices are sums of accumulators, from +0 on; else the slice's one accumulator is its sum
    slices: np.ndarray  # int32 [T]: which slice it is of


class LaneOrder(NamedTuple):
    """Elements in the order in which each lane takes them: T iterations, S slices, L lanes."""

    indices: np.ndarray  # int32 [T, S, L]
    closes: np.ndarray  # bool [T, S, L]: the lane's chain is then added to its sum
    chunked: bool


@lru_cache(maxsize=4096)
def slice_indices(slices: Slices) -> tuple[np.ndarray, ...]:
    """Lists the indices along K of each slice, ascending. No slice is empty."""
    if slices.dealt is None:
        return tuple(np.arange(x, y) for x, y in zip(slices.edges, slices.edges[1:], strict=False))
    count, tile = slices.dealt
    k = np.arange(slices.used)
    return tuple(k[k // tile % count == s] for s in range(count) if s * tile < slices.used)


def instruction_runs(unit: Steps, length: int) -> list[tuple[int, int, bool]]:
    """Splits a slice of `length` elements into runs of instructions (start, stop, closes). `closes`: the accumulator ends after the run."""
    if unit.restart is not None:
        return [(x, min(x + unit.restart, length), True) for x in range(0, length, unit.restart)]
    first = 0 if unit.residue is None else length % unit.residue
    pieces = [(0, first, False)] if 0 < first < length else []
    return [*pieces, (pieces[0][1] if pieces else 0, length, True)]


def step_order(unit: Steps, slices: Slices) -> StepOrder:
    """Lists every instruction of the kernel."""
    k = unit.op.k
    rows, closes, numbers = [], [], []
    for number, places in enumerate(slice_indices(slices)):
        for start, stop, closing in instruction_runs(unit, len(places)):
            count = -(-(stop - start) // k)
            piece = np.full(count * k, EMPTY)
            piece[: stop - start] = places[start:stop]
            rows.append(piece.reshape(count, k))
            closes += [False] * (count - 1) + [closing]
            numbers += [number] * count
    return StepOrder(np.concatenate(rows).astype(np.int32), np.array(closes), unit.restart is not None, np.array(numbers, np.int32))


def lane_schedule(unit: Lanes, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lane of each element of a slice, and the iteration in which the lane takes it."""
    at = np.arange(length)
    return at // unit.vector % unit.lanes, at // (unit.vector * unit.lanes) * unit.vector + at % unit.vector


def lane_order(unit: Lanes, slices: Slices) -> LaneOrder:
    """Lists every multiply-add of the kernel."""
    parts = slice_indices(slices)
    turns = max(-(-len(p) // (unit.lanes * unit.vector)) for p in parts) * unit.vector
    places = np.full((turns, len(parts), unit.lanes), EMPTY, np.int32)
    for number, part in enumerate(parts):
        lane, turn = lane_schedule(unit, len(part))
        places[turn, number, lane] = part
    own = np.arange(turns)[:, None, None]
    last = np.where(places != EMPTY, own, -1).max(axis=0)  # a lane's last iteration
    closes = own == last
    if unit.chunk is not None:
        closes = (closes | (own % unit.chunk == unit.chunk - 1)) & (places != EMPTY)
    return LaneOrder(places, closes, unit.chunk is not None)


def recipe_tree(recipe: KernelRecipe) -> Join:
    """Return the tree of a recipe's sum over K: the merge of its slices."""
    return merge_node(recipe.merge, unit_tree(recipe.unit, recipe.slices))


def merge_node(merge: Merge, slices: Node | None) -> Join:
    """Return the join of the slices' sums, given their tree, or without it."""
    waiting = None if merge.partial == F32 else Waiting(merge.partial, merge.rounds_slices, merge.rounds_running)
    return Join(slices, merge.order, merge.start == "zero", waiting)


def unit_tree(unit: Steps | Lanes, slices: Slices, *, closing: bool = False) -> Node:
    """Return the tree of the sums of the slices, [S].

    Args:
        unit: The unit that adds the products of a slice.
        slices: The slices of K.
        closing: Lanes of a single chain close it too, so that programs are shared with those of several.
    """
    if isinstance(unit, Steps):
        order = step_order(unit, slices)
        return Chain(order.indices, order.closes, order.slices, False, order.restarted, True, int(order.slices[-1]) + 1)
    order = lane_order(unit, slices)
    closes = order.closes if order.chunked or closing else None
    return Join(Chain(order.indices, closes, None, unit.start == "first", closes is not None), unit.join)
