"""The order in which a kernel recipe adds, as arrays of places along K: what the engine, the probes and the accounts all read."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tcemu.linalg.kernel_recipes import Lanes, Slices, Steps

NONE = -1  # a place of an instruction that is filled up


class StepOrder(NamedTuple):
    """Instructions in the order in which they run, slice after slice. T instructions of k products."""

    places: np.ndarray  # int32 [T, k]: along K, or NONE
    closes: np.ndarray  # bool [T]: its accumulator is then added to the sum of the slice
    restarted: bool  # slices are sums of accumulators, from +0 on; else the slice's one accumulator is its sum
    slices: np.ndarray  # int32 [T]: which slice it is of


class LaneOrder(NamedTuple):
    """Elements in the order in which each lane takes them. T turns, S slices, L lanes."""

    places: np.ndarray  # int32 [T, S, L]
    closes: np.ndarray  # bool [T, S, L]: the lane's chain is then added to its sum
    chunked: bool


@lru_cache(maxsize=4096)
def places_of_slices(slices: Slices) -> tuple[np.ndarray, ...]:
    """The places along K of each slice, ascending; none is empty."""
    if slices.dealt is None:
        return tuple(np.arange(x, y) for x, y in zip(slices.edges, slices.edges[1:], strict=False))
    count, tile = slices.dealt
    k = np.arange(slices.used)
    return tuple(k[k // tile % count == s] for s in range(count) if s * tile < slices.used)


def pieces_of(unit: Steps, length: int) -> list[tuple[int, int, bool]]:
    """A slice of so many elements as (start, stop, closes): runs of instructions, and whether the accumulator is closed after them."""
    if unit.restart is not None:
        return [(x, min(x + unit.restart, length), True) for x in range(0, length, unit.restart)]
    first = 0 if unit.residue is None else length % unit.residue
    pieces = [(0, first, False)] if 0 < first < length else []
    return [*pieces, (pieces[0][1] if pieces else 0, length, True)]


def step_order(unit: Steps, slices: Slices) -> StepOrder:
    """Every instruction of the kernel."""
    k = unit.op.k
    rows, closes, numbers = [], [], []
    for number, places in enumerate(places_of_slices(slices)):
        for start, stop, closing in pieces_of(unit, len(places)):
            count = -(-(stop - start) // k)
            piece = np.full(count * k, NONE)
            piece[: stop - start] = places[start:stop]
            rows.append(piece.reshape(count, k))
            closes += [False] * (count - 1) + [closing]
            numbers += [number] * count
    return StepOrder(np.concatenate(rows).astype(np.int32), np.array(closes), unit.restart is not None, np.array(numbers, np.int32))


def lanes_and_turns(unit: Lanes, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The lane of each element of a slice, and the turn in which that lane takes it."""
    at = np.arange(length)
    return at // unit.vector % unit.lanes, at // (unit.vector * unit.lanes) * unit.vector + at % unit.vector


def lane_order(unit: Lanes, slices: Slices) -> LaneOrder:
    """Every multiply-add of the kernel."""
    parts = places_of_slices(slices)
    turns = max(-(-len(p) // (unit.lanes * unit.vector)) for p in parts) * unit.vector
    places = np.full((turns, len(parts), unit.lanes), NONE, np.int32)
    for number, part in enumerate(parts):
        lane, turn = lanes_and_turns(unit, len(part))
        places[turn, number, lane] = part
    own = np.arange(turns)[:, None, None]
    last = np.where(places != NONE, own, -1).max(axis=0)  # a lane's last turn
    closes = own == last
    if unit.chunk is not None:
        closes = (closes | (own % unit.chunk == unit.chunk - 1)) & (places != NONE)
    return LaneOrder(places, closes, unit.chunk is not None)


def additions(order: str, count: int) -> list[tuple[int, int]]:
    """How `count` sums are added, as pairs (to, from) in turn; the total then is where the last pair points to, or at 0 for one sum."""
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
