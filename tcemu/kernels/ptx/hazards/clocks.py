"""The happens-before relation of a chunk's threads, by vector clocks.

A column of the clocks stands for something whose accesses happen one after the other: what a warp accesses itself, its `cp.async`, its
bulk copies as readers and as writers, the products of a warpgroup, and the phases of an mbarrier. A thread knows a number in each column:
accesses up to that number happen before what the thread does next. The number of a warp's own column is its epoch, which every release
advances. A clock has up to three planes: what is known; what of it a proxy fence has made visible to the async proxy; and what a fence has
ordered before the thread's next strong write or relaxed arrival. A strong read makes known what such writes pass on: NVIDIA's own examples
have no fence on that side. `fence.mbarrier_init` counts as a fence of all accesses, although it orders initialisations alone.

Clocks are those of threads, columns those of warps. So a release by some lanes of a warp releases the accesses of all its lanes: what is
found is a hazard, but not every hazard between the lanes of a diverged warp is found. Source: PTX ISA 8.9 to 8.11, 9.7.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from tcemu.engine.isa.families import LANES

KNOWN, VISIBLE, FENCED = range(3)  # the planes of a clock
MAX_PHASE_COLUMNS = 256  # mbarriers of a group of blocks whose copies are followed


class Column(IntEnum):
    """The meaning of a column; each warp of the group has one of each that the kernel uses."""

    ACCESS = 0  # the warp's own accesses
    COPY = 1  # its cp.async
    BULK_READ = 2  # its bulk copies, until they have read shared memory
    BULK_WRITE = 3  # its bulk copies, until they have written global memory
    PRODUCT = 4  # the wgmma of the warpgroup whose first warp it is


class Clocks:
    """The clocks of the threads of a chunk.

    Attributes:
        span: Blocks of a group. Threads of a group know columns of each other; threads of different groups are never ordered.
        known: int32[blocks, threads, planes, columns].
        epoch: int32[blocks, warps].
        copied: The last of its own `cp.async` that each thread has waited for, int32[blocks, threads].
    """

    def __init__(self, blocks: int, threads: int, span: int, used: Sequence[Column], planes: int) -> None:
        self.blocks, self.threads, self.warps, self.span = blocks, threads, threads // LANES, span
        self.first = {kind: position * span * self.warps for position, kind in enumerate(used)}
        self.phase_column = len(used) * span * self.warps  # the first column of an mbarrier
        self.columns = self.phase_column
        self.known = np.zeros((blocks, threads, planes, self.columns), np.int32)
        self.epoch = np.ones((blocks, self.warps), np.int32)
        self.copied = np.zeros((blocks, threads), np.int32)
        self._phase_columns: dict[tuple[int, int], int] = {}  # by the row of the block and the offset of the mbarrier
        self._phases_of_group = np.zeros(-(-blocks // span), np.int32)

    @property
    def planes(self) -> int:
        """1; 2 if accesses by the async proxy are followed; 3 if the kernel has fences."""
        return self.known.shape[2]

    def nothing(self) -> np.ndarray:
        """Return the clock that knows nothing, int32[planes, columns]."""
        return np.zeros((self.planes, self.columns), np.int32)

    def column(self, kind: Column, row: np.ndarray | int, warp: np.ndarray | int) -> np.ndarray | int:
        """Return the columns of warps."""
        return self.first[kind] + row % self.span * self.warps + warp

    def column_of_phases(self, row: int, offset: int) -> int | None:
        """Return the column of an mbarrier; None if there are too many."""
        found = self._phase_columns.get((row, offset))
        if found is None:
            group = row // self.span
            number = int(self._phases_of_group[group])
            if number >= MAX_PHASE_COLUMNS:
                return None
            self._phases_of_group[group] += 1
            found = self._phase_columns[row, offset] = self.phase_column + number
            if found >= self.columns:
                more = min(MAX_PHASE_COLUMNS + self.phase_column, max(self.columns + 8, found + 1)) - self.columns
                self.known = np.pad(self.known, ((0, 0), (0, 0), (0, 0), (0, more)))
                self.columns += more
        return found

    def fit(self, clock: np.ndarray) -> np.ndarray:
        """Return a clock with the columns that were added since it was made."""
        missing = self.columns - clock.shape[-1]
        return clock if not missing else np.pad(clock, [(0, 0)] * (clock.ndim - 1) + [(0, missing)])

    def knows(self, rows: np.ndarray, threads: np.ndarray, columns: np.ndarray, numbers: np.ndarray, plane: int = KNOWN) -> np.ndarray:
        """Return whether threads know the numbers of columns, bool of the arguments' common shape."""
        return np.asarray(self.known[rows, threads, min(plane, self.planes - 1), columns] >= numbers)

    # ---- releases and acquires

    def release(self, row: int, threads: np.ndarray) -> np.ndarray:
        """Return what threads of a block, int[n], know together with their own accesses, and advance the epochs of their warps."""
        clock = self.known[row, threads].max(0)
        for warp in np.unique(threads // LANES):
            clock[KNOWN, self.column(Column.ACCESS, row, warp)] = self.epoch[row, warp]
            if Column.COPY in self.first:
                column = self.column(Column.COPY, row, warp)
                clock[KNOWN, column] = max(clock[KNOWN, column], self.copied[row, threads[threads // LANES == warp]].max())
            self.epoch[row, warp] += 1
        return clock

    def acquire(self, row: int, threads: np.ndarray, clock: np.ndarray) -> None:
        """Add a clock to what threads of a block know."""
        self.known[row, threads] = np.maximum(self.known[row, threads], self.fit(clock))

    def release_blocks(self, mask: np.ndarray) -> np.ndarray:
        """Return what the threads of the mask know in each block, int32[blocks, planes, columns]; see `release`."""
        rows, warps = np.nonzero(mask.reshape(self.blocks, self.warps, LANES).any(-1))
        clock = np.zeros((self.blocks, self.planes, self.columns), np.int32)
        some = np.unique(rows)
        clock[some] = (self.known[some] * mask[some, :, None, None]).max(1)
        clock[rows, KNOWN, self.column(Column.ACCESS, rows, warps)] = self.epoch[rows, warps]
        if Column.COPY in self.first:
            copied = np.where(mask, self.copied, 0).reshape(self.blocks, self.warps, LANES).max(-1)[rows, warps]
            columns = self.column(Column.COPY, rows, warps)
            clock[rows, KNOWN, columns] = np.maximum(clock[rows, KNOWN, columns], copied)
        self.epoch[rows, warps] += 1
        return clock

    def fenced(self, mask: np.ndarray) -> np.ndarray:
        """Return what the last fences of the threads of the mask ordered in each block, int32[blocks, planes, columns]."""
        clock = np.zeros((self.blocks, self.planes, self.columns), np.int32)
        if self.planes > FENCED:
            clock[:, KNOWN] = (self.known[:, :, FENCED] * mask[..., None]).max(1)
        return clock

    def acquire_blocks(self, mask: np.ndarray, clock: np.ndarray) -> None:
        """Add clocks, int32[blocks, planes, columns], to what the threads of the mask know."""
        some = np.flatnonzero(mask.any(-1))
        self.known[some] = np.maximum(self.known[some], self.fit(clock)[some, None] * mask[some, :, None, None])

    def fence_proxy(self, mask: np.ndarray) -> None:
        """Make visible to the async proxy what threads know, and what their warps have accessed."""
        if self.planes == 1:
            return
        rows, threads = np.nonzero(mask)
        own = self.known[rows, threads, KNOWN]
        at = np.arange(len(rows))
        own[at, self.column(Column.ACCESS, rows, threads // LANES)] = self.epoch[rows, threads // LANES]
        if Column.COPY in self.first:
            columns = self.column(Column.COPY, rows, threads // LANES)
            own[at, columns] = np.maximum(own[at, columns], self.copied[rows, threads])
        self.known[rows, threads, VISIBLE] = np.maximum(self.known[rows, threads, VISIBLE], own)
        rows, warps = np.nonzero(mask.reshape(self.blocks, self.warps, LANES).any(-1))
        self.epoch[rows, warps] += 1
