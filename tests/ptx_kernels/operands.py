"""Operands of the kernels as raw bits, drawn by a NumPy generator from integers alone, so that every machine draws the same ones."""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

import numpy as np

FLOATS = {  # name -> bits of the exponent, bits of the fraction
    "f64": (11, 52), "f32": (8, 23), "f16": (5, 10), "bf16": (8, 7), "e4m3": (4, 3), "e5m2": (5, 2),
}  # fmt: skip


class Operand(NamedTuple):
    """An array that a kernel takes. kind: "f16", "s32", ...; how: the name of a distribution below; `low`, `high`: its range."""

    kind: str
    shape: tuple[int, ...]
    how: str = "near"
    low: int = 0
    high: int = 0

    def draw(self, seed: str) -> np.ndarray:
        """Draw raw bits as unsigned integers of the kind's width, signed ones for s8 and the like. The seed is any text."""
        rng = np.random.default_rng(crc32(seed.encode()))
        if self.how == "constant":
            return np.full(self.shape, self.low, storage(self.kind))
        if self.how == "uniform":
            return rng.integers(self.low, self.high, self.shape, np.int64).astype(storage(self.kind))
        words = rng.integers(0, 1 << 64, (2, *self.shape), np.uint64)
        if self.how == "raw":
            return words[0].astype(storage(self.kind))
        if self.how == "metadata":
            return _metadata(words[0]).astype(np.uint32)
        return _float(self.kind, self.how, *words)


def storage(kind: str) -> np.dtype:
    """Return the storage dtype of a kind."""
    bits = int("".join(filter(str.isdigit, kind))) if kind not in ("e4m3", "e5m2") else 8
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")


def _float(kind: str, how: str, word: np.ndarray, choice: np.ndarray) -> np.ndarray:
    """near: 2**-3 <= |x| < 4. wide: any number. integers: -4 to 4.

    specials: one of eight is zero, infinite, NaN, subnormal, or at a limit. rare: one of 256, for products, which one NaN makes NaN.
    limits: one of eight is zero, infinite or NaN.
    """
    exponent_bits, fraction_bits = FLOATS[kind]
    top, one = (1 << exponent_bits) - 1, (1 << exponent_bits - 1) - 1
    fraction, sign = word & np.uint64((1 << fraction_bits) - 1), word >> np.uint64(63)
    spread = word >> np.uint64(53) & np.uint64(0x3FF)
    exponent = one - 3 + spread % np.uint64(5)
    if how == "wide":
        exponent = spread % np.uint64(top - 1) + np.uint64(1)
    codes = sign << np.uint64(exponent_bits + fraction_bits) | exponent << np.uint64(fraction_bits) | fraction
    if how == "integers":
        table = [_small(value, one, exponent_bits, fraction_bits) for value in range(-4, 5)]
        codes = np.array(table, np.uint64)[(spread % np.uint64(9)).astype(int)]
    if how in ("specials", "rare", "limits"):
        inf = top << fraction_bits
        values = [0, inf, inf + (1 << fraction_bits - 1)]
        values += [1, (1 << fraction_bits) - 1, 1 << fraction_bits, inf - 1] if how != "limits" else []
        signed = [value | bit << exponent_bits + fraction_bits for value in values for bit in (0, 1)]
        special = np.array(signed, np.uint64)[(choice >> np.uint64(8) & np.uint64(0xFFFF)).astype(int) % len(signed)]
        codes = np.where(choice & np.uint64(255 if how == "rare" else 7) == 0, special, codes)
    return codes.astype(storage(kind))


def _small(value: int, one: int, exponent_bits: int, fraction_bits: int) -> int:
    """Return the code of a small integer."""
    if value == 0:
        return 0
    exponent = abs(value).bit_length() - 1
    fraction = (abs(value) - (1 << exponent)) << fraction_bits >> exponent
    return (value < 0) << exponent_bits + fraction_bits | (one + exponent) << fraction_bits | fraction


def _metadata(words: np.ndarray) -> np.ndarray:
    """Draw metadata that selects two of each four elements, in their order: each four bits have one of six values."""
    pairs = np.array([0x4, 0x8, 0xC, 0x9, 0xD, 0xE], np.uint64)
    fields = (words[..., None] >> np.arange(0, 64, 8, dtype=np.uint64) & np.uint64(0xFF)) % np.uint64(6)
    return (pairs[fields.astype(int)] << np.arange(0, 32, 4, dtype=np.uint64)).sum(-1, dtype=np.uint64)


def floats(kind: str, codes: np.ndarray) -> np.ndarray:
    """Return the exact values of codes of a float type, as float64."""
    exponent_bits, fraction_bits = FLOATS[kind]
    codes, bias = codes.astype(np.uint64), (1 << exponent_bits - 1) - 1
    fraction = (codes & np.uint64((1 << fraction_bits) - 1)).astype(np.float64)
    exponent = (codes >> np.uint64(fraction_bits) & np.uint64((1 << exponent_bits) - 1)).astype(np.int64)
    normal = exponent > 0
    top = exponent == (1 << exponent_bits) - 1
    power = np.where(top & (kind != "e4m3"), 0, np.maximum(exponent, 1) - bias - fraction_bits)
    values = np.ldexp(fraction + normal * 2.0**fraction_bits, power)
    if kind == "e4m3":
        values = np.where(top & (fraction == 7), np.nan, values)
    else:
        values = np.where(top, np.where(fraction == 0, np.inf, np.nan), values)
    return np.where(codes >> np.uint64(exponent_bits + fraction_bits) & np.uint64(1), -values, values)
