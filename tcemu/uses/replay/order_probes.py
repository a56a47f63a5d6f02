"""Probes of a black box's order: pairs of large terms that cancel, and the number of small terms that survive beside each pair.

Every row of A has a pair (or every column of B), and every column of B has a window of small terms (or every row of A), so that one call
answers all pairs with all windows. Source: the masks of FPRev (arXiv 2411.00442), with windows so that narrow formats can hold the counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tcemu.engine.formats.number_formats import BF16, E4M3, E5M2, F16, F32, TF32, Format
from tcemu.uses.replay.black_box import BlackBox, codes_to_float64, repeat, round_to_codes
from tcemu.uses.replay.summation_levels import Level, lost_terms


class TermSizes(NamedTuple):
    """Exponents of a factor of the large and the small terms, and the number of small terms per window.

    A step with 25 fraction bits, and f32 rounded to nearest, lose all small terms of a window beside a large term. A result of 11 bits
    counts them exactly. A large term fits f16, so that partial sums may be stored in it.
    """

    large: int
    small: int
    max_terms: int


TERM_SIZES: dict[Format, TermSizes] = {
    F16: TermSizes(7, -11, 1 << 10),
    E5M2: TermSizes(7, -11, 1 << 10),
    E4M3: TermSizes(8, -9, 1 << 8),
    BF16: TermSizes(7, -11, 1 << 10),
    TF32: TermSizes(7, -11, 1 << 10),
    F32: TermSizes(7, -12, 1 << 10),
}
PAIR_TRIES = 200  # attempts to find pairs for which two orders differ
EXACT_INTEGERS = {F32: 1 << 24, F16: 1 << 11, BF16: 1 << 8}  # the result holds every integer up to this one


class PairAnswers(NamedTuple):
    """Pairs, windows, and the answers of one call."""

    pairs: list[tuple[int, int]]
    windows: np.ndarray  # bool [W, K]
    counts: np.ndarray  # int [P, W]: small terms that survived; -1 if the answer is no count
    window_indices: np.ndarray  # int [K]: window of each index, or -1


def make_answers(pairs: list[tuple[int, int]], windows: np.ndarray, counts: np.ndarray) -> PairAnswers:
    """Return answers with the window of each index along K."""
    return PairAnswers(pairs, windows, counts, np.where(windows.any(0), windows.argmax(0), -1))


def max_window_terms(black_box: BlackBox) -> int:
    """Return the largest number of small terms that a window may have."""
    exact = np.frexp(black_box.form.alpha)[0] in (0.5, -0.5)  # alpha is a power of two; otherwise each count is rounded once more
    return min(
        *(TERM_SIZES[fmt].max_terms for fmt in black_box.operand_formats),
        EXACT_INTEGERS[black_box.result_format] if exact else EXACT_INTEGERS[black_box.result_format] // 4,
    )


def count_units(black_box: BlackBox, codes: np.ndarray, unit: float) -> np.ndarray:
    """Divide each result by a unit, int64; -1 if the result is no multiple of it."""
    answer, unit_value = codes_to_float64(black_box.result_format, codes), float(np.float32(black_box.form.alpha)) * unit
    with np.errstate(invalid="ignore", over="ignore"):
        counts = np.rint(answer / unit_value)
        exact = (counts >= 0) & (counts <= 1 << 24)
        counts = np.where(exact, counts, 0)
        exact &= codes_to_float64(black_box.result_format, round_to_codes(black_box.result_format, counts * unit_value)) == answer
    return np.where(exact, counts, -1).astype(np.int64)


def ask_pairs(black_box: BlackBox, pairs: list[tuple[int, int]], windows: np.ndarray, *, by_rows: bool) -> PairAnswers:
    """Ask about pairs and windows in one call.

    Args:
        black_box: The black box.
        pairs: At most as many as A has rows (columns of B without `by_rows`).
        windows: At most as many as B has columns (rows of A), without indices of the pairs.
        by_rows: The pairs are in rows of A, and the windows in columns of B.

    Returns:
        The answers.
    """
    m, n, k = black_box.shape
    of_pairs, of_windows = black_box.operand_formats if by_rows else black_box.operand_formats[::-1]
    (large, small), (other_large, other_small) = (
        (2.0 ** TERM_SIZES[fmt].large, 2.0 ** TERM_SIZES[fmt].small) for fmt in (of_pairs, of_windows)
    )
    indices = sorted({index for pair in pairs for index in pair})
    first = np.full((len(pairs), k), small)
    first[:, indices] = 0
    for row, (i, j) in enumerate(pairs):
        first[row, i], first[row, j] = large, -large
    second = windows * other_small
    second[:, indices] = other_large
    first, second = round_to_codes(of_pairs, first), round_to_codes(of_windows, second)
    a, b = (first, second.T) if by_rows else (second, first.T)
    a, b = repeat(a, 0, m), repeat(b, 1, n)
    counts = count_units(black_box, black_box(a, b), small * other_small)
    counts = (counts if by_rows else counts.T)[: len(pairs), : len(windows)]
    return make_answers(pairs, windows, np.where(counts <= windows.sum(1), counts, -1))


def draw_pairs(
    rng: np.random.Generator, black_box: BlackBox, usable: int, max_terms: int
) -> tuple[list[tuple[int, int]], np.ndarray, bool]:
    """Draw pairs at all distances, and windows between them, for one call. `usable` is the number of indices, from 0, that may occur."""
    m, n, _ = black_box.shape
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
    return pairs, draw_windows(rng, free, black_box.shape[2], min(with_windows, 256), max_terms), by_rows


def find_distinguishing_pairs(rng: np.random.Generator, trees: list[list[Level]], usable: int, limit: int) -> list[tuple[int, int]]:
    """Find pairs for which the first order and another one lose different terms: at most 16 and `limit`, none if no such pair occurred."""
    found: list[tuple[int, int]] = []
    for other in trees[1:5]:
        for _ in range(PAIR_TRIES):
            i = int(rng.integers(usable))
            j = int(rng.integers(usable)) if rng.integers(2) else min(usable - 1, i + (1 << int(rng.integers(usable.bit_length()))))
            if i != j and (lost_terms(trees[0], i, j) != lost_terms(other, i, j)).sum() > 1:
                found.append((i, j))
            if len(found) >= min(limit, 16):
                return found
    return found


def draw_windows(rng: np.random.Generator, free: np.ndarray, k: int, count: int, max_terms: int) -> np.ndarray:
    """Divide the free indices into `count` windows of neighbours. If they do not fit, an even sample of them is taken."""
    if len(free) > count * max_terms:
        free = np.sort(rng.choice(free, count * max_terms, replace=False))
    windows = np.zeros((min(count, max(len(free), 1)), k), bool)
    for row, part in zip(windows, np.array_split(free, len(windows)), strict=True):
        row[part] = True
    return windows


def count_dropped(black_box: BlackBox) -> int | None:
    """Count the trailing products that the black box omits, in one call. Returns None if the omitted products are not at the end of K."""
    m, n, k = black_box.shape
    tail = min(k, 128, max_window_terms(black_box))
    of_a, of_b = (2.0 ** TERM_SIZES[fmt].small for fmt in black_box.operand_formats)
    ends = np.where(np.arange(k) < k - tail, 0, of_b)[None]
    a, b = (round_to_codes(fmt, x) for fmt, x in zip(black_box.operand_formats, (np.full((1, k), of_a), ends), strict=True))
    a, b = repeat(a, 0, m), repeat(b.T, 1, n)
    counts = np.unique(count_units(black_box, black_box(a, b), of_a * of_b))
    if len(counts) != 1 or counts[0] < 0 or not 0 <= tail - counts[0] < k:
        return None
    return int(tail - counts[0])


def predict_counts(tree: list[Level], answers: PairAnswers, first: int | None = None) -> np.ndarray:
    """Predict the counts of an order, for the first pairs or for all."""
    window = answers.window_indices
    in_window = window >= 0
    alive = [~lost_terms(tree, i, j) & in_window for i, j in answers.pairs[:first]]
    return np.stack([np.bincount(window[a], minlength=len(answers.windows)) for a in alive])


def explains_answers(tree: list[Level], answers: PairAnswers) -> bool:
    """Return whether an order explains all answers of a call. The first pairs are compared first."""
    return all((predict_counts(tree, answers, first) == answers.counts[:first]).all() for first in (1, 3, None))
