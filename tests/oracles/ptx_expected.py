"""What the references of the kernels in ptx_kernels/ share: the table that they enter, and values of codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from ptx_kernels.operands import FLOATS, floats


class ExpectedBuffer(NamedTuple):
    """values: integers, or floats of the buffer's kind. error: relative to the largest finite one; 0: the same."""

    values: np.ndarray
    error: float = 0.0


REFERENCES: dict[str, Callable[..., dict[int, ExpectedBuffer]]] = {}


def reference(*entries: str):
    """What the function returns is expected of these entries. It takes the buffers' values, and the numbers among the arguments."""

    def keep(function):
        REFERENCES.update(dict.fromkeys(entries, function))
        return function

    return keep


def values(kind: str, codes: np.ndarray) -> np.ndarray:
    return floats(kind, codes) if kind in FLOATS else codes.astype(object) if codes.dtype.itemsize == 8 else codes.astype(np.int64)


def to_signed(x, bits: int = 32):
    """The number of two's complement that the low bits are."""
    return (x + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def some_rows(rows: dict[int, np.ndarray], count: int, width: int) -> np.ma.MaskedArray:
    """Some rows of a buffer; the others are masked."""
    out = np.ma.masked_all((count, width))
    for i, row in rows.items():
        out[i] = row
    return out
