"""The words of an H200 in tests/golden/ptx_scalars.json.xz: results of the instructions of values and of the warp collectives."""

from __future__ import annotations

import base64
import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tcemu.kernels.ptx.text.ptx_types import KINDS, storage_dtype

FILE = Path(__file__).parents[1] / "golden" / "ptx_scalars.json.xz"
WORDS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


@cache
def document() -> dict[str, Any]:
    return json.loads(lzma.decompress(FILE.read_bytes()))


def array(text: str, bits: int) -> np.ndarray:
    """Decode words of `bits` bits; single bits are packed, padded to a multiple of 8."""
    raw = base64.b64decode(text)
    return np.unpackbits(np.frombuffer(raw, np.uint8)).astype(bool) if bits == 1 else np.frombuffer(raw, WORDS[bits])


def to_typed_array(values: np.ndarray, kind: str) -> np.ndarray:
    """Convert words to the storage dtype of a type."""
    bits = KINDS[kind].bits
    return values.astype(bool) if bits == 1 else (values & values.dtype.type((1 << bits) - 1)).astype(storage_dtype(kind))


def operands(case: dict[str, Any], kinds: tuple[str, ...]) -> list[np.ndarray]:
    """Return the operands of a case for sources of these types, with the case's table or fixed factors where it has them."""
    if case["sources"] == ["codes"]:
        return [to_typed_array(array(document()["codes"], 16), kinds[0])]
    given = []
    for name in case["sources"]:
        kind = "f16" if name == "oob" else name.partition(":")[0]
        given.append(to_typed_array(array(document()["operands"][name], max(8, KINDS[kind].bits)), kind))
    if "table" in case:
        given.insert(3, np.full(len(given[0]), case["table"], np.uint32))
    if "slot" in case:
        other = np.full(len(given[0]), case["other"], np.uint32)
        given = [given[0] if slot == case["slot"] else other for slot in range(3)]
    return given


def results(case: dict[str, Any], kinds: tuple[str, ...], count: int) -> list[np.ndarray]:
    """Return the recorded results."""
    return [to_typed_array(array(text, KINDS[kind].bits)[:count], kind) for text, kind in zip(case["words"], kinds, strict=True)]


def warps() -> list[tuple[str, list[np.ndarray], list[np.ndarray]]]:
    """Return each warp collective's opcode, operands [warps, 32] (the membermask last) and results."""
    found = []
    for case in document()["warps"]:
        given = []
        for name in case["sources"]:
            place, _, bits = name.partition(":")
            words = array(document()["warp_operands"][place], 64 if bits == "64" else 32).reshape(-1, 32)
            given.append(words.astype(bool) if bits == "1" else words)
        found.append(
            (case["op"], given, [array(text, bits).reshape(-1, 32) for text, bits in zip(case["words"], case["bits"], strict=True)])
        )
    return found
