"""Words that a GPU gave, as they are kept, and how others are compared with them."""

from __future__ import annotations

import json
from functools import cache
from typing import NamedTuple
from zlib import crc32

import numpy as np

from .manifest import FOLDER, Kernel, Within
from .operands import floats

WHOLE = 1 << 18  # bytes up to which an array is kept whole
PARTS = (".rows", ".columns", ".sample")


def kept(array: np.ndarray) -> dict[str, np.ndarray]:
    """An array as it is kept, by suffixes of its name. Of a large matrix: a checksum of each row and of each column, and every 31st word of
    every 17th row; a word that differs lies where the rows and columns whose checksums differ cross."""
    if array.nbytes <= WHOLE:
        return {"": array}
    rows, columns = ([crc32(np.ascontiguousarray(line).tobytes()) for line in lines] for lines in (array, array.T))
    return {".rows": np.array(rows, np.uint32), ".columns": np.array(columns, np.uint32), ".sample": array[::17, ::31]}


class Differing(NamedTuple):
    """How many words differ of how many, and where the first ones do. largest: of approximate ones, the difference over what is allowed."""

    count: int
    of: int
    where: list[tuple[int, ...]]
    largest: float = 0.0

    def __bool__(self) -> bool:
        return self.count > 0


def differing(kernel: Kernel, buffer: int, ours: np.ndarray, theirs: np.ndarray) -> Differing:
    """The words of a buffer, compared as the manifest says."""
    how = kernel.compared.get(buffer, "bits")
    if isinstance(how, Within):
        return _beyond(how, ours, theirs)
    if how == "sorted":
        ours, theirs = np.sort(ours, axis=None), np.sort(theirs, axis=None)
    wrong = np.atleast_1d(ours != theirs)
    return Differing(int(wrong.sum()), wrong.size, [tuple(map(int, place)) for place in np.argwhere(wrong)[:4]])


def differing_large(ours: np.ndarray, theirs: dict[str, np.ndarray]) -> tuple[list[int], list[int], int]:
    """Of an array that is kept by parts: the rows and the columns whose checksums differ, and how many of the words that are kept."""
    made = kept(ours)
    rows, columns = (np.flatnonzero(made[part] != theirs[part]).tolist() for part in (".rows", ".columns"))
    return rows, columns, int((made[".sample"] != theirs[".sample"]).sum())


def _beyond(how: Within, ours: np.ndarray, theirs: np.ndarray) -> Differing:
    """Numbers further from each other than allowed, or not of the same class."""
    a, b = floats(how.kind, ours), floats(how.kind, theirs)
    bounds = np.array(how.rows or [(how.relative, how.absolute)]).reshape(-1, 2, *[1] * (a.ndim - 1))
    both = np.isfinite(a) & np.isfinite(b)
    allowed = bounds[:, 0] * np.abs(np.where(both, b, 0)) + bounds[:, 1]
    off = np.abs(np.where(both, a, 0) - np.where(both, b, 0))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    wrong = np.where(both, off > allowed, ~same)
    ratio = float((off / np.where(allowed > 0, allowed, 1)).max(initial=0))
    return Differing(int(wrong.sum()), wrong.size, [tuple(map(int, place)) for place in np.argwhere(wrong)[:4]], ratio)


@cache
def _archive() -> tuple[dict, dict[str, np.ndarray]]:
    with np.load(FOLDER / "recorded.npz") as file:
        words = dict(file)
    return json.loads((FOLDER / "recorded.json").read_text()), words


def said() -> dict:
    """What recorded.json says: the machine; of each kernel the checksums of its operands and texts, and which buffers it changed."""
    return _archive()[0]


def recorded_names() -> tuple[str, ...]:
    """Of the arrays that are kept."""
    return tuple(_archive()[1])


def recorded(kernel: Kernel, target: str) -> list[np.ndarray]:
    """What each buffer held after the GPU ran the text for the target."""
    words = _archive()[1]
    assert not any(name.startswith(f"{kernel.name}.") and name.endswith(PARTS) for name in words), "kept by parts: see recorded_large"
    names = [(f"{kernel.name}.{i}.{target}", f"{kernel.name}.{i}") for i in range(len(kernel.operands))]
    return [words.get(own, words.get(shared, before)) for (own, shared), before in zip(names, kernel.drawn(), strict=True)]


def recorded_large(kernel: Kernel, buffer: int) -> dict[str, np.ndarray]:
    """What is kept of a large buffer, as `kept` has it."""
    return {part: _archive()[1][f"{kernel.name}.{buffer}{part}"] for part in PARTS}
