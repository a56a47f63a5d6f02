"""The comparison of a launch's outputs under two schedules, word by word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SHOWN = 8  # words that a description names


@dataclass(frozen=True)
class WordDifferences:
    """The words of an output that depend on the schedule."""

    array: int  # number of the output, among the arguments that are arrays
    words: np.ndarray  # indices of the words that differ, int64[n]
    first: np.ndarray  # their values in the first schedule, unsigned
    second: np.ndarray  # their values in the second one
    total: int  # words of the output

    def describe(self, seed: int) -> str:
        """Return the differences in words; seed: of the second schedule."""
        width = 2 * self.first.dtype.itemsize + 2
        shown = [f"{i}: {a:#0{width}x} {b:#0{width}x}" for i, a, b in zip(self.words[:SHOWN], self.first, self.second, strict=False)]
        more = f", and {len(self.words) - SHOWN} more" if len(self.words) > SHOWN else ""
        return (
            f"array {self.array}: {len(self.words)} of {self.total} words depend on the schedule, seed {seed}: {', '.join(shown)}{more}. "
            "Sums of floats by atomics may; else threads race"
        )


def compare_schedules(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> tuple[WordDifferences, ...]:
    """Return the outputs that differ. Words are those of the arrays' dtypes, of 64 bits at most."""
    found = []
    for number, arrays in enumerate(zip(first, second, strict=True)):
        size = arrays[0].dtype.itemsize if arrays[0].dtype.itemsize in (1, 2, 4, 8) else 1
        old, new = (np.ascontiguousarray(array).reshape(-1).view(np.uint8).view(f"u{size}") for array in arrays)
        words = np.flatnonzero(old != new)
        if len(words):
            found.append(WordDifferences(number, words, old[words], new[words], old.size))
    return tuple(found)
