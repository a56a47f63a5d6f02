"""Questions to a black box about its order: pairs of large terms that cancel, and how many small terms survive beside each.

Every row of A has a pair (or every column of B), and every column of B has a window of small terms (or every row of A): one call answers
all pairs with all windows. Source: the masks of FPRev (arXiv 2411.00442), with windows, so that narrow formats have room for the counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tcemu.formats import BF16, E4M3, E5M2, F16, F32, TF32, Format
from tcemu.replay.boxes import Box, codes_of, values
from tcemu.replay.trees import Level, lost


class Sizes(NamedTuple):
    """Exponents of a factor of the large terms and of the small ones, and how many small ones a window may have.

    A step that keeps 25 fraction bits, and an f32 rounded to nearest, lose all small terms of a window beside a large one; a result of 11
    bits counts them exactly; and a large term is within f16, so that partial sums may wait in it.
    """

    large: int
    small: int
    most: int


SIZES: dict[Format, Sizes] = {
    F16: Sizes(7, -11, 1 << 10),
    E5M2: Sizes(7, -11, 1 << 10),
    E4M3: Sizes(8, -9, 1 << 8),
    BF16: Sizes(7, -11, 1 << 10),
    TF32: Sizes(7, -11, 1 << 10),
    F32: Sizes(7, -12, 1 << 10),
}
TRIES = 200  # to find pairs about which two orders differ
KEPT = {F32: 1 << 24, F16: 1 << 11, BF16: 1 << 8}  # whole numbers that a result holds, all of them up to this


class Asked(NamedTuple):
    """Pairs, windows, and the answers."""

    pairs: list[tuple[int, int]]
    windows: np.ndarray  # bool [W, K]
    counts: np.ndarray  # int [P, W]: small terms that survived; -1 where the answer is no number of them
    window_of: np.ndarray  # int [K]: which window a place is in, or -1


def asked_of(pairs: list[tuple[int, int]], windows: np.ndarray, counts: np.ndarray) -> Asked:
    """Answers with their pairs and windows."""
    return Asked(pairs, windows, counts, np.where(windows.any(0), windows.argmax(0), -1))


def most_of(box: Box) -> int:
    """How many small terms a window may have."""
    assert box.out is not None
    exact = np.frexp(box.form.alpha)[0] in (0.5, -0.5)  # alpha is a power of two; else each count is rounded once more
    return min(*(SIZES[fmt].most for fmt in box.held), KEPT[box.out] if exact else KEPT[box.out] // 4)


def counted(box: Box, codes: np.ndarray, unit: float) -> np.ndarray:
    """How many units each result is, int64; -1 where it is no number of them."""
    assert box.out is not None
    answer, one = values(box.out, codes), float(np.float32(box.form.alpha)) * unit
    with np.errstate(invalid="ignore", over="ignore"):
        counts = np.rint(answer / one)
        right = (counts >= 0) & (counts <= 1 << 24)
        counts = np.where(right, counts, 0)
        right &= values(box.out, codes_of(box.out, counts * one)) == answer
    return np.where(right, counts, -1).astype(np.int64)


def ask(box: Box, pairs: list[tuple[int, int]], windows: np.ndarray, *, by_rows: bool) -> Asked:
    """One call. pairs: no more than rows (columns, without by_rows); windows: no more than columns (rows), none with a place of a pair."""
    assert box.out is not None
    m, n, k = box.shape
    of_pairs, of_windows = box.held if by_rows else box.held[::-1]
    (large, small), (other_large, other_small) = ((2.0 ** SIZES[fmt].large, 2.0 ** SIZES[fmt].small) for fmt in (of_pairs, of_windows))
    places = sorted({place for pair in pairs for place in pair})
    first = np.full((len(pairs), k), small)
    first[:, places] = 0
    for row, (i, j) in enumerate(pairs):
        first[row, i], first[row, j] = large, -large
    second = windows * other_small
    second[:, places] = other_large
    first, second = codes_of(of_pairs, first), codes_of(of_windows, second)
    a, b = (first, second.T) if by_rows else (second, first.T)
    a, b = _repeated(a, m, 0), _repeated(b, n, 1)
    counts = counted(box, box(a, b), small * other_small)
    counts = (counts if by_rows else counts.T)[: len(pairs), : len(windows)]
    return asked_of(pairs, windows, np.where(counts <= windows.sum(1), counts, -1))


def _repeated(x: np.ndarray, count: int, axis: int) -> np.ndarray:
    """So many rows or columns: these, and then the first ones again. In row-major order, as a box takes them."""
    return np.ascontiguousarray(x).take(np.arange(count) % x.shape[axis], axis)


def drawn(rng: np.random.Generator, box: Box, usable: int, most: int) -> tuple[list[tuple[int, int]], np.ndarray, bool]:
    """Pairs at all distances, and windows between them, for one call. usable: places along K from 0 on that may be asked about."""
    m, n, _ = box.shape
    by_rows = bool(rng.integers(2)) if min(m, n) >= 8 else m >= n
    with_pairs, with_windows = (m, n) if by_rows else (n, m)
    count = int(min(max(2, usable // 3), 24))
    anchors = [0, usable - 1] if rng.integers(2) else []
    anchors += rng.integers(0, usable, count).tolist()
    near = [min(usable - 1, a + (1 << int(rng.integers(0, max(usable.bit_length(), 1))))) for a in anchors]
    edges = [min(usable - 1, max(0, int(rng.integers(0, usable // 8 + 1)) * 8 - int(rng.integers(2)))) for _ in anchors]
    places = list(dict.fromkeys([p for three in zip(anchors, near, edges, strict=True) for p in three]))[:count]
    if len(places) < 2:
        places = [0, usable - 1]
    pairs = [(i, j) for x, i in enumerate(places) for j in places[x + 1 :]]
    flips = rng.integers(0, 2, len(pairs))
    pairs = [(j, i) if flip else (i, j) for (i, j), flip in zip(pairs, flips, strict=True)]
    pairs = [pairs[x] for x in rng.permutation(len(pairs))[: min(with_pairs, 64)]]
    free = np.setdiff1d(np.arange(usable), [place for pair in pairs for place in pair])
    return pairs, windows_of(rng, free, box.shape[2], min(with_windows, 256), most), by_rows


def telling(rng: np.random.Generator, trees: list[list[Level]], usable: int, most: int) -> list[tuple[int, int]]:
    """Pairs for which the first order and another one lose other terms: none where no such pair was met. At most 16, and `most`."""
    found: list[tuple[int, int]] = []
    for other in trees[1:5]:
        for _ in range(TRIES):
            i = int(rng.integers(usable))
            j = int(rng.integers(usable)) if rng.integers(2) else min(usable - 1, i + (1 << int(rng.integers(usable.bit_length()))))
            if i != j and (lost(trees[0], i, j) != lost(other, i, j)).sum() > 1:
                found.append((i, j))
            if len(found) >= min(most, 16):
                return found
    return found


def windows_of(rng: np.random.Generator, free: np.ndarray, k: int, count: int, most: int) -> np.ndarray:
    """The free places in `count` windows, neighbours together; where they do not fit, some of them, evenly drawn."""
    if len(free) > count * most:
        free = np.sort(rng.choice(free, count * most, replace=False))
    windows = np.zeros((min(count, max(len(free), 1)), k), bool)
    for row, part in zip(windows, np.array_split(free, len(windows)), strict=True):
        row[part] = True
    return windows


def left_out(box: Box) -> int | None:
    """How many of the last products the box leaves out; None if what is missing is no end of K. One call."""
    m, n, k = box.shape
    tail = min(k, 128, most_of(box))
    of_a, of_b = (2.0 ** SIZES[fmt].small for fmt in box.held)
    ends = np.where(np.arange(k) < k - tail, 0, of_b)[None]
    a, b = _repeated(codes_of(box.held[0], np.full((1, k), of_a)), m, 0), _repeated(codes_of(box.held[1], ends).T, n, 1)
    counts = np.unique(counted(box, box(a, b), of_a * of_b))
    if len(counts) != 1 or counts[0] < 0 or not 0 <= tail - counts[0] < k:
        return None
    return int(tail - counts[0])


def predicted(tree: list[Level], asked: Asked, first: int | None = None) -> np.ndarray:
    """The counts that an order would give, of the first pairs or of all."""
    window = asked.window_of
    held = window >= 0
    alive = [~lost(tree, i, j) & held for i, j in asked.pairs[:first]]
    return np.stack([np.bincount(window[a], minlength=len(asked.windows)) for a in alive])


def fits(tree: list[Level], asked: Asked) -> bool:
    """An order explains all answers of a call. The first pairs are looked at first."""
    return all((predicted(tree, asked, first) == asked.counts[:first]).all() for first in (1, 3, None))
