"""Memory of the host behind arrays and tensors, which kernels reach through their arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Extent(NamedTuple):
    """A run of bytes by its addresses."""

    start: int
    end: int

    def view(self) -> np.ndarray:
        """Return the memory itself, uint8."""
        size = self.end - self.start
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.start)) if size else np.zeros(0, np.uint8)


def merge_extents(extents: Iterable[Extent]) -> list[Extent]:
    """Return the extents with those that overlap as one, in the order of their addresses."""
    merged: list[Extent] = []
    for extent in sorted(set(extents)):
        if merged and extent.start < merged[-1].end:
            merged[-1] = Extent(merged[-1].start, max(merged[-1].end, extent.end))
        else:
            merged.append(extent)
    return merged


def find_extent(extents: Iterable[Extent], address: int) -> int | None:
    """Return the number of the extent that contains an address; None if none does."""
    return next((number for number, extent in enumerate(extents) if extent.start <= address < extent.end), None)
