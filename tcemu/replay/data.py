"""Operands on which a black box and a recipe are compared: of each kind, what shows some differences and hides others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tcemu.formats import BF16, E4M3, E5M2, F16, F32, TF32, Format
from tcemu.replay.boxes import codes_of

Formats = tuple[Format, Format]  # of A and of B
WIDE = {F16: 5, E4M3: 3, E5M2: 5, BF16: 12, TF32: 12, F32: 12}  # orders of magnitude (of two) of the spread data, each way
SCALE = {F16: 4, E4M3: 3, E5M2: 4, BF16: 0, TF32: 0, F32: 0}  # of the cancelling data: their small results are within f16


def flat(rng: np.random.Generator, fmts: Formats, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Normal numbers."""
    return rng.standard_normal((m, k)), rng.standard_normal((k, n))


def spread(rng: np.random.Generator, fmts: Formats, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Normal numbers over many orders of magnitude."""
    a, b = flat(rng, fmts, m, n, k)
    one, other = (WIDE[fmt] for fmt in fmts)
    return a * np.exp2(rng.integers(-one, one + 1, (m, k))), b * np.exp2(rng.integers(-other, other + 1, (k, n)))


def cancelling(rng: np.random.Generator, fmts: Formats, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Products in pairs far apart whose exact sum is 0: the result is what the roundings left, and shows their order in its first bits."""
    a, b = flat(rng, fmts, m, n, k)
    places = rng.permutation(k)
    one, other = places[: k // 2], places[k // 2 : 2 * (k // 2)]
    a[:, other], b[other] = a[:, one], -b[one]
    return a * 2.0 ** SCALE[fmts[0]], b * 2.0 ** SCALE[fmts[1]]


def late(rng: np.random.Generator, fmts: Formats, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Cancelling data over some orders of magnitude, of which the second half undoes the first, backwards."""
    a, b = flat(rng, fmts, m, n, k)
    a = a * np.exp2(rng.integers(-2, 3, (m, k)))
    half = k // 2
    a[:, k - half :], b[k - half :] = a[:, :half][:, ::-1], -b[:half][::-1]
    return a * 2.0 ** SCALE[fmts[0]], b * 2.0 ** SCALE[fmts[1]]


def near(rng: np.random.Generator, fmts: Formats, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Cancelling data whose pairs are within blocks of 32: so every slice's sum is what its roundings left, and shows in a short format."""
    a, b = flat(rng, fmts, m, n, k)
    for start in range(0, k, 32):
        places = start + rng.permutation(min(32, k - start))
        half = len(places) // 2
        one, other = places[:half], places[half : 2 * half]
        a[:, other], b[other] = a[:, one], -b[one]
    return a * 2.0 ** SCALE[fmts[0]], b * 2.0 ** SCALE[fmts[1]]


def steep(rng: np.random.Generator, fmts: Formats, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """A large term and its opposite, and small terms between them of all magnitudes down to where a step cuts them."""
    (of_a, reach_a), (of_b, reach_b) = ((7, 16) if fmt != E4M3 else (6, 12) for fmt in fmts)
    a = rng.standard_normal((m, k)) * np.exp2(rng.integers(of_a - reach_a, of_a + 1, (m, k)))
    b = rng.standard_normal((k, n)) * np.exp2(rng.integers(of_b - reach_b, of_b + 1, (k, n)))
    if k >= 3:
        one, other = rng.choice(k, 2, replace=False)
        a[:, other] = a[:, one] = np.abs(rng.standard_normal(m) + 2) * 2.0**of_a
        b[one] = np.abs(rng.standard_normal(n) + 2) * 2.0**of_b
        b[other] = -b[one]
    return a, b


def ties(rng: np.random.Generator, fmts: Formats, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """A large product in the middle between two numbers of a short result, and terms of one bit, so small that a step may cut them."""
    bits = [{F16: 6, E4M3: 4, E5M2: 3}.get(fmt, 5) for fmt in fmts]
    low = [{F16: -11, E4M3: -6, E5M2: -11}.get(fmt, -12) for fmt in fmts]
    a = np.exp2(rng.integers(low[0], 1, (m, k)))
    b = np.exp2(rng.integers(low[1], 1, (k, n))) * rng.choice([-1.0, 1.0], (k, n))
    place = int(rng.integers(k))
    for x, own in ((a[:, place], bits[0]), (b[place], bits[1])):
        x[...] = 2 * rng.integers(2 ** (own - 2), 2 ** (own - 1), x.shape) + 1
    return a, b


def positive(rng: np.random.Generator, fmts: Formats, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers from 1 to 2, negative in every other row or column: sums with carries, which a short fraction rounds."""
    signs = np.resize([1.0, -1.0], max(m, n))
    return rng.uniform(1, 2, (m, k)) * signs[:m, None], rng.uniform(1, 2, (k, n)) * (signs[:n] if m == 1 else 1.0)


def zeros(rng: np.random.Generator, fmts: Formats, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Products that are all -0, and in other rows and columns the least ones, negative, which vanish in some format on the way."""
    wide = fmts[0] in (F32, TF32, BF16)
    of_a, of_b = (2.0**fmt.least_exponent if wide else 2.0 ** (fmt.least_exponent - fmt.mantissa_bits) for fmt in fmts)
    scales = [1.0, 2.0**-12, 2.0**-20, 2.0**-30] if wide else [1.0, of_b]
    a = np.full((m, k), of_a)
    if wide and n < 4:
        a *= np.resize([1.0, 2.0**10, 2.0**18, 0.0, 2.0**30], m)[:, None]
        return a, np.full((k, n), -(2.0**-30))
    a[1 + int(rng.integers(2)) :: 2] = 0
    return a, np.repeat(-np.resize(np.roll([*scales, 0.0], rng.integers(5)), n)[None], k, 0)


def tiny(rng: np.random.Generator, fmts: Formats, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Products about the least number of the result's format, or of f32."""
    a, b = flat(rng, fmts, m, n, k)
    low = {F32: -71, TF32: -71, BF16: -71, F16: -11, E5M2: -11, E4M3: -6}
    return a * 2.0 ** low[fmts[0]], b * 2.0 ** low[fmts[1]]


def subnormal(rng: np.random.Generator, fmts: Formats, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Products that are subnormal numbers of bf16 and of f32."""
    a, b = flat(rng, fmts, m, n, k)
    return a * 2.0**-65, b * 2.0**-65


def huge(rng: np.random.Generator, fmts: Formats, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums about the greatest number of f16, or beyond the one of f32."""
    a, b = flat(rng, fmts, m, n, k)
    high = {F32: 63, TF32: 63, BF16: 63, F16: 9, E5M2: 9, E4M3: 6}
    return a * 2.0 ** high[fmts[0]], b * 2.0 ** high[fmts[1]]


def window(rng: np.random.Generator, fmts: Formats, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers in a few places along K, zeros elsewhere: what only these places show is hidden by no other sum."""
    length = min(k, int(rng.integers(2, 65)))
    start = int(rng.integers(k - length + 1))
    a, b = np.zeros((m, k)), np.zeros((k, n))
    inner = (cancelling, late, steep, positive, ties, spread)[int(rng.integers(6))]
    a[:, start : start + length], b[start : start + length] = inner(rng, fmts, m, n, length)
    return a, b


def brink(rng: np.random.Generator, fmts: Formats, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """A product one unit of f32's last place (2^-149) below the middle of two numbers of bf16, and products of a half and of three halves.

    Whether an f32 rounds these before it adds them decides the result. 217 · 151 = 2^15 - 1 is the one such product of numbers of bf16.
    """
    a = rng.choice([1.0, 3.0], (m, k)) * 2.0**-75
    b = rng.choice([1.0, -1.0], (k, n)) * 2.0**-75
    place = int(rng.integers(k))
    a[:, place], b[place] = 217 * 2.0**-75, 151 * 2.0**-74
    return a, b


KINDS: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "flat": flat, "spread": spread, "cancelling": cancelling, "late": late, "zeros": zeros, "tiny": tiny, "huge": huge,
    "near": near, "steep": steep, "ties": ties, "halves": flat, "positive": positive,
    "subnormal": subnormal, "window": window, "brink": brink,
}  # fmt: skip
NUMBERS = {  # of the kinds, in seeds: words of GPUs are kept with operands that are drawn by them
    "cancelling": 0, "flat": 1, "huge": 2, "late": 3, "spread": 4, "tiny": 5, "zeros": 6, "near": 7, "steep": 8, "ties": 9, "halves": 10,
    "positive": 11, "subnormal": 12, "window": 13, "brink": 14,
}  # fmt: skip


def operands(kind: str, seed: int, formats: Formats, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Codes of A [M, K] and of B [K, N], of one kind, by a seed. formats: in which they are held; f32 keeps all its bits."""
    m, n, k = shape
    rng = np.random.default_rng([seed, m, n, k, NUMBERS[kind]])
    a, b = KINDS[kind](rng, formats, m, n, k)
    a, b = codes_of(formats[0], np.clip(a, -3e38, 3e38)), codes_of(formats[1], np.clip(b, -3e38, 3e38))
    if kind == "halves" and formats == (F32, F32):  # in the middle between two numbers of tf32
        a, b = ((x & np.uint32(0xFFFFE000)) | np.uint32(0x1000) for x in (a, b))
    return a, b
