"""The order in which a kernel recipe adds, as arrays of indices along K. The engine, the probes and the explanations all read it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tcemu.operations.products.library.kernel_recipe import Lanes, Slices, Steps

EMPTY = -1  # index of a product that pads an instruction


class StepOrder(NamedTuple):
    """Instructions in the order in which they run, slice after slice. T instructions of k products."""

    indices: np.ndarray  # int32 [T, k]: along K, or NONE
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


def additions(order: str, count: int) -> list[tuple[int, int]]:
    """Lists the additions of `count` sums as pairs (to, from), in order. The total is at the last pair's `to`, or at 0 for one sum."""
    if order == "ascending":
        return [(0, i) for i in range(1, count)]
    if order == "descending":
        return [(count - 1, i) for i in range(count - 2, -1, -1)]
    if order == "tree":
        pairs, apart = [], 1
        while apart < count:
            pairs += [(i, i + apart) for i in range(0, count - apart, 2 * apart)]
            apart *= 2
        return pairs
    if order == "folded":
        pairs, apart = [], 1 << max(count - 1, 0).bit_length()
        while (apart := apart // 2) >= 1:
            pairs += [(i, i + apart) for i in range(apart) if i + apart < count]
        return pairs
    half = -(-count // 2)
    return [(i, i + half) for i in range(half) if i + half < count - 1] + [
        (count - 1, i) for i in range(half) if count > 1 and i != count - 1
    ]
