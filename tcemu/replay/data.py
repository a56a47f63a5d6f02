"""Operands on which a black box and a recipe are compared: of each kind, what shows some differences and hides others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tcemu.formats import BF16, E4M3, E5M2, F16, F32, TF32, Format
from tcemu.replay.boxes import codes_of

WIDE = {F16: 5, E4M3: 3, E5M2: 5, BF16: 12, TF32: 12, F32: 12}  # orders of magnitude (of two) of the spread data, each way
SCALE = {F16: 4, E4M3: 3, E5M2: 4, BF16: 0, TF32: 0, F32: 0}  # of the cancelling data: their small results are within f16


def flat(rng: np.random.Generator, fmt: Format, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Normal numbers."""
    return rng.standard_normal((m, k)), rng.standard_normal((k, n))


def spread(rng: np.random.Generator, fmt: Format, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Normal numbers over many orders of magnitude."""
    a, b = flat(rng, fmt, m, n, k)
    reach = WIDE[fmt]
    return a * np.exp2(rng.integers(-reach, reach + 1, (m, k))), b * np.exp2(rng.integers(-reach, reach + 1, (k, n)))


def cancelling(rng: np.random.Generator, fmt: Format, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Products in pairs far apart whose exact sum is 0: the result is what the roundings left, and shows their order in its first bits."""
    a, b = flat(rng, fmt, m, n, k)
    places = rng.permutation(k)
    one, other = places[: k // 2], places[k // 2 : 2 * (k // 2)]
    a[:, other], b[other] = a[:, one], -b[one]
    return a * 2.0 ** SCALE[fmt], b * 2.0 ** SCALE[fmt]


def late(rng: np.random.Generator, fmt: Format, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Cancelling data over some orders of magnitude, of which the second half undoes the first, backwards."""
    a, b = flat(rng, fmt, m, n, k)
    a = a * np.exp2(rng.integers(-2, 3, (m, k)))
    half = k // 2
    a[:, k - half :], b[k - half :] = a[:, :half][:, ::-1], -b[:half][::-1]
    return a * 2.0 ** SCALE[fmt], b * 2.0 ** SCALE[fmt]


def zeros(rng: np.random.Generator, fmt: Format, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Products that are all -0, and in other rows and columns the least ones, negative, which vanish in some format on the way."""
    wide = fmt in (F32, TF32, BF16)
    least = 2.0**fmt.least_exponent if wide else 2.0 ** (fmt.least_exponent - fmt.mantissa_bits)
    scales = [1.0, 2.0**-12, 2.0**-20, 2.0**-30] if wide else [1.0, least]
    a = np.full((m, k), least)
    a[1 + int(rng.integers(2)) :: 2] = 0
    return a, np.repeat(-np.resize(np.roll([*scales, 0.0], rng.integers(5)), n)[None], k, 0)


def tiny(rng: np.random.Generator, fmt: Format, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Products about the least number of the result's format, or of f32."""
    a, b = flat(rng, fmt, m, n, k)
    low = {F32: -71, TF32: -71, BF16: -71, F16: -11, E5M2: -11, E4M3: -6}[fmt]
    return a * 2.0**low, b * 2.0**low


def huge(rng: np.random.Generator, fmt: Format, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums about the greatest number of f16, or beyond the one of f32."""
    a, b = flat(rng, fmt, m, n, k)
    high = {F32: 63, TF32: 63, BF16: 63, F16: 9, E5M2: 9, E4M3: 6}[fmt]
    return a * 2.0**high, b * 2.0**high


KINDS: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "flat": flat, "spread": spread, "cancelling": cancelling, "late": late, "zeros": zeros, "tiny": tiny, "huge": huge,
}  # fmt: skip


def operands(kind: str, seed: int, formats: tuple[Format, Format], shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Codes of A [M, K] and of B [K, N], of one kind, by a seed. formats: in which they are held; f32 keeps all its bits."""
    m, n, k = shape
    rng = np.random.default_rng([seed, m, n, k, sorted(KINDS).index(kind)])
    a, b = KINDS[kind](rng, formats[0], m, n, k)
    return codes_of(formats[0], np.clip(a, -3e38, 3e38)), codes_of(formats[1], np.clip(b, -3e38, 3e38))
