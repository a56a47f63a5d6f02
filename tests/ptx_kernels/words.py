"""Recorded words of a GPU, and the comparison of others with them."""

from __future__ import annotations

import json
from functools import cache
from typing import NamedTuple
from zlib import crc32

import numpy as np

from .manifest import FOLDER, Kernel

WHOLE = 1 << 18  # bytes up to which an array is kept whole
PARTS = (".rows", ".columns", ".sample")


def stored_arrays(array: np.ndarray) -> dict[str, np.ndarray]:
    """An array as it is kept, by suffixes of its name. Of a large matrix: a checksum of each row and of each column, and every 31st word of
    every 17th row; a word that differs lies where the rows and columns whose checksums differ cross."""
    if array.nbytes <= WHOLE:
        return {"": array}
    rows, columns = ([crc32(np.ascontiguousarray(line).tobytes()) for line in lines] for lines in (array, array.T))
    return {".rows": np.array(rows, np.uint32), ".columns": np.array(columns, np.uint32), ".sample": array[::17, ::31]}


class Differing(NamedTuple):
    """The number of differing words, of all words, and the first differences."""

    count: int
    of: int
    where: list[tuple[int, ...]]

    def __bool__(self) -> bool:
        return self.count > 0


def differing(kernel: Kernel, buffer: int, ours: np.ndarray, theirs: np.ndarray) -> Differing:
    """Compare the words of a buffer as the manifest requires."""
    if kernel.compared.get(buffer) == "sorted":
        ours, theirs = np.sort(ours, axis=None), np.sort(theirs, axis=None)
    wrong = np.atleast_1d(ours != theirs)
    return Differing(int(wrong.sum()), wrong.size, [tuple(map(int, place)) for place in np.argwhere(wrong)[:4]])


def differing_large(ours: np.ndarray, theirs: dict[str, np.ndarray]) -> tuple[list[int], list[int], int]:
    """Compare an array recorded by parts: the rows and columns whose checksums differ, and the number of differing recorded words."""
    made = stored_arrays(ours)
    rows, columns = (np.flatnonzero(made[part] != theirs[part]).tolist() for part in (".rows", ".columns"))
    return rows, columns, int((made[".sample"] != theirs[".sample"]).sum())


@cache
def _archive() -> tuple[dict, dict[str, np.ndarray]]:
    with np.load(FOLDER / "recorded.npz") as file:
        words = dict(file)
    return json.loads((FOLDER / "recorded.json").read_text()), words


def recorded_facts() -> dict:
    """Return recorded.json: the machine, and for each kernel checksums of its operands and texts, and the buffers that it changed."""
    return _archive()[0]


def recorded_names() -> tuple[str, ...]:
    """Return the names of the recorded arrays."""
    return tuple(_archive()[1])


def recorded_buffers(kernel: Kernel, target: str) -> list[np.ndarray]:
    """Return each buffer after the GPU ran the text for the target."""
    words = _archive()[1]
    assert not any(name.startswith(f"{kernel.name}.") and name.endswith(PARTS) for name in words), "kept by parts: see recorded_large"
    names = [(f"{kernel.name}.{i}.{target}", f"{kernel.name}.{i}") for i in range(len(kernel.operands))]
    return [words.get(own, words.get(shared, before)) for (own, shared), before in zip(names, kernel.draw_buffers(), strict=True)]


def recorded_large(kernel: Kernel, buffer: int) -> dict[str, np.ndarray]:
    """Return the recorded parts of a large buffer."""
    return {part: _archive()[1][f"{kernel.name}.{buffer}{part}"] for part in PARTS}
