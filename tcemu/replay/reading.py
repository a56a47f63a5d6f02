"""Slices of any lengths, read from a black box: contiguous ones whose sums are added in ascending order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tcemu.formats import BF16, E4M3, E5M2, F16, F32
from tcemu.linalg.kernel_recipes import Slices
from tcemu.replay.boxes import Box, codes_of, values
from tcemu.replay.candidates import MOST_SLICES
from tcemu.replay.probes import ask, most_of, windows_of

STEP = {F16: 16, BF16: 16, F32: 8, E4M3: 32, E5M2: 32}  # terms of the longest step of each format
MOST_CALLS = 16
LARGE = {F16: (7, 0, -24), BF16: (7, 0, -40), F32: (7, 0, -40), E5M2: (7, 0, -16), E4M3: (6, 4, -9)}  # exponents: large, small, least


def read_slices(box: Box, rng: np.random.Generator) -> Slices | None:
    """The slices that the terms lost beside pairs (0, j) show; None where these are no prefixes of K, or show one slice.

    Within the first slice a prefix ends with the step of j, and beyond it with the slice of j. What is read is a proposal: the caller holds
    it against all other answers.
    """
    k = box.shape[2]
    grid, step = (8 if k <= 4096 else 16), STEP[box.held[0]]
    wanted = list(range(3, k, grid))  # odd places, so that usual edges are not among them
    if -(-len(wanted) // max(box.shape[:2])) > MOST_CALLS:
        return None
    found = lost_prefixes(box, rng, wanted)
    if found is None:
        return None
    beyond = next((at for at, (j, end) in enumerate(zip(wanted, found, strict=True)) if end > j + step), None)
    if not beyond:
        return None
    low, first, high = wanted[beyond - 1], found[beyond - 1], wanted[beyond]  # the first slice ends between them
    while high - low > 1:
        middle = (low + high) // 2
        ends = lost_prefixes(box, rng, [middle])
        if ends is None:
            return None
        if ends[0] > middle + step:
            high = middle
        else:
            low, first = middle, ends[0]
    edges = sorted({first, *(x for x, y in pairwise(found[beyond:]) if x == y), k})
    return Slices.listed((0, *edges)) if len(edges) <= MOST_SLICES else None


def lost_prefixes(box: Box, rng: np.random.Generator, places: Sequence[int]) -> list[int] | None:
    """Where the terms end that are lost beside pairs (0, j), for each place j; None where what is lost cannot be a prefix of K."""
    m, n, k = box.shape
    by_rows, most = m >= n, most_of(box)
    per, across = (m, n) if by_rows else (n, m)
    if k > most * across:
        return None
    ends: list[int] = []
    for at in range(0, len(places), per):
        pairs = [(0, j) for j in places[at : at + per]]
        free = np.setdiff1d(np.arange(k), [0, *(j for _, j in pairs)])
        asked = ask(box, pairs, windows_of(rng, free, k, across, most), by_rows=by_rows)
        for (_, j), counts in zip(pairs, asked.counts, strict=True):
            end = None if (counts < 0).any() else _end(free, k, j, len(free) - int(counts.sum()))
            if end is None:
                return None
            ends.append(end)
    return ends


def _end(free: np.ndarray, k: int, j: int, lost: int) -> int | None:
    """Where the prefix ends that has place j and so many free ones; None where places that are not free leave that open."""
    if lost >= len(free):
        return k
    end = max(int(free[lost - 1]) if lost else 0, j) + 1
    return end if free[lost] == end else None


def read_fraction_bits(box: Box, places: np.ndarray) -> int | None:
    """How many bits below the largest exponent a step keeps: 2^e - 2^e + 2^(e - d) is 2^(e - d) for so many d, then 0. One call.

    places: along K, of one instruction, whose first three are of one step. None where there are fewer, or what survives is no cut.
    """
    m, n, k = box.shape
    assert box.out is not None
    own = [int(p) for p in places if p >= 0][:3]
    if len(own) < 3 or max(m, n) < 32:
        return None
    of_one, of_other = box.held if m <= n else box.held[::-1]
    (top, small, _), (other_top, other_small, least) = LARGE[of_one], LARGE[of_other]
    small, tops = max(small, other_small), top + other_top
    distances = np.arange(1, min(max(m, n), tops - least - small + 1))
    one, other = np.zeros((1, k)), np.zeros((max(m, n), k))
    one[0, own] = 2.0**top, 2.0**top, 2.0**small
    other[:, own[0]], other[:, own[1]] = 2.0**other_top, -(2.0**other_top)
    other[: len(distances), own[2]] = np.exp2(tops - small - distances)
    one, other = codes_of(of_one, np.repeat(one, min(m, n), 0)), codes_of(of_other, other)
    answer = values(box.out, box(*((one, other.T) if m <= n else (other, one.T))))
    answer = (answer if m <= n else answer.T)[:, : len(distances)]
    wanted = values(box.out, codes_of(box.out, float(np.float32(box.form.alpha)) * np.exp2(float(tops) - distances)))
    survived = answer == wanted
    bits = int(survived[0].sum())
    whole = (survived[:, :bits]).all() and (answer[:, bits:] == 0).all()
    return bits if whole and 0 < bits < len(distances) else None
