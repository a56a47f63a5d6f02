"""The last accesses to each cell of a memory: one write, and the reads since.

An access is one integer: who made it, as a column of `Clocks` in a group of blocks, the number in that column, the statement, and the lane.
A cell is as large as the narrowest access of the kernel to that memory, so accesses that only share a word are kept apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# lowest bits of the fields of an access; 0 is no access. A read by several lanes of one warp has SEVERAL, by several
# warps in one statement REPLICATED, and a strong access has STRONG
LANE_BITS, SEVERAL, STRONG, REPLICATED = 5, 1 << 5, 1 << 6, 1 << 7
COMPARED = SEVERAL | STRONG  # of a write: a compare-and-swap
STATEMENT_SHIFT, STATEMENT_BITS = 8, 16
NUMBER_SHIFT, NUMBER_BITS = 24, 20
ACTOR_SHIFT, ACTOR_BITS = 44, 19


class Access(NamedTuple):
    """The fields of accesses, ints or arrays."""

    actor: Any  # group of blocks times columns of a group, plus column
    number: Any  # in the column
    statement: Any
    lane: Any
    several: Any
    strong: Any


def encode_access(actor: Any, number: Any, statement: int, lane: Any, strong: bool = False) -> Any:
    """Return accesses as integers, int64 of the arguments' common shape."""
    number = np.asarray(np.minimum(number, (1 << NUMBER_BITS) - 1), np.int64)
    return (
        np.asarray(actor, np.int64) << ACTOR_SHIFT
        | number << NUMBER_SHIFT
        | statement << STATEMENT_SHIFT
        | (STRONG if strong else 0)
        | lane
    )


def decode_access(access: Any) -> Access:
    """Return the fields of accesses."""
    return Access(
        access >> ACTOR_SHIFT,
        access >> NUMBER_SHIFT & (1 << NUMBER_BITS) - 1,
        access >> STATEMENT_SHIFT & (1 << STATEMENT_BITS) - 1,
        access & (1 << LANE_BITS) - 1,
        access & SEVERAL != 0,
        access & STRONG != 0,
    )


class AccessRecords:
    """The accesses to one memory, whose cells are numbered.

    Attributes:
        granule: Bytes of a cell, 1 to 16.
        writer: The last write, int64[cells].
        value: What it wrote, the low 32 bits, uint32[cells].
        readers: Reads since, int64[cells, slots]. With `rotates`, the slots have the last reads of two different warps; else each slot
            belongs to one reader.
        swizzle: 1 plus the swizzle in bytes of the tensor copy that wrote last, uint8[cells]; 0 for another write.
    """

    def __init__(self, name: str, cells: int, granule: int, slots: int, rotates: bool) -> None:
        self.name, self.granule, self.rotates = name, granule, rotates
        self.writer, self.value = np.zeros(cells, np.int64), np.zeros(cells, np.uint32)  # zeros take no memory before they are touched
        self.readers = np.zeros((cells, slots), np.int64)
        self.swizzle = np.zeros(cells, np.uint8)

    def cells(self, first_byte: np.ndarray, size: int) -> np.ndarray:
        """Return the cells of runs of bytes, int64[n, cells of a run]."""
        return first_byte[:, None] // self.granule + np.arange(max(size // self.granule, 1))

    def note_write(self, cells: np.ndarray, access: np.ndarray, values: np.ndarray | None) -> None:
        """Record writes; of several to one cell the last one stays."""
        self.writer[cells] = access
        self.swizzle[cells] = 0
        self.readers[cells] = 0
        if values is not None:
            self.value[cells] = values

    def note_read(self, cells: np.ndarray, access: np.ndarray, slots: np.ndarray) -> None:
        """Record reads in the slots of the readers, both of the cells' shape."""
        if self.rotates:
            before = self.readers[cells, 0]
            foreign = (before != 0) & (before >> ACTOR_SHIFT != access >> ACTOR_SHIFT)
            self.readers[cells[foreign], 1] = before[foreign]
            slots = np.zeros_like(cells)
        before = self.readers[cells, slots]
        same = before >> NUMBER_SHIFT == access >> NUMBER_SHIFT
        several = same & ((before & SEVERAL != 0) | (before & (1 << LANE_BITS) - 1 != access & (1 << LANE_BITS) - 1))
        self.readers[cells, slots] = access | np.where(several, SEVERAL, 0)
        after = self.readers[cells, slots]
        lost = after & ~np.int64(SEVERAL | REPLICATED) != access
        if lost.any():
            other_warp = lost & (after >> ACTOR_SHIFT != access >> ACTOR_SHIFT)
            self.readers[cells[lost & ~other_warp], slots[lost & ~other_warp]] |= SEVERAL
            if self.rotates and other_warp.any():
                self.readers[cells[other_warp], 1] = access[other_warp] | REPLICATED
                self.readers[cells[other_warp], 0] |= REPLICATED
