"""Drawn operands on which a black box and a recipe are compared. Each kind shows some differences and hides others.

Matrices are drawn by kind and seed, scales and biases by theirs. Recorded words of GPUs depend on these draws, so their streams never
change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from tcemu.engine.formats.number_formats import BF16, E4M3, E5M2, F16, F32, TF32, Format
from tcemu.uses.replay.black_box import EpilogueCodes, FormatPair, ProductForm, codes_to_float64, round_to_codes

SPREAD_EXPONENTS = {F16: 5, E4M3: 3, E5M2: 5, BF16: 12, TF32: 12, F32: 12}  # powers of two of the spread data, up and down
CANCELLING_EXPONENTS = {F16: 4, E4M3: 3, E5M2: 4, BF16: 0, TF32: 0, F32: 0}  # exponents of the cancelling data, whose small results fit f16
Matrices = tuple[np.ndarray, np.ndarray]  # A [M, K] and B [K, N]
Draw = Callable[[np.random.Generator, FormatPair, int, int, int], Matrices]


def flat(rng: np.random.Generator, fmts: FormatPair, m: int, n: int, k: int) -> Matrices:
    """Draw normal numbers."""
    return rng.standard_normal((m, k)), rng.standard_normal((k, n))


def spread(rng: np.random.Generator, fmts: FormatPair, m: int, n: int, k: int) -> Matrices:
    """Draw normal numbers over many orders of magnitude."""
    a, b = flat(rng, fmts, m, n, k)
    one, other = (SPREAD_EXPONENTS[fmt] for fmt in fmts)
    return a * np.exp2(rng.integers(-one, one + 1, (m, k))), b * np.exp2(rng.integers(-other, other + 1, (k, n)))


def cancelling(rng: np.random.Generator, fmts: FormatPair, m: int, n: int, k: int) -> Matrices:
    """Draw products in pairs far apart whose exact sum is 0.

    The result is the sum of the rounding errors, and shows their order in its first bits.
    """
    a, b = flat(rng, fmts, m, n, k)
    places = rng.permutation(k)
    return _cancel(fmts, a, b, places[: k // 2], places[k // 2 : 2 * (k // 2)])


def _cancel(fmts: FormatPair, a: np.ndarray, b: np.ndarray, one: np.ndarray, other: np.ndarray) -> Matrices:
    """Make the products at other indices along K the opposites of those at the first ones."""
    a[:, other], b[other] = a[:, one], -b[one]
    return a * 2.0 ** CANCELLING_EXPONENTS[fmts[0]], b * 2.0 ** CANCELLING_EXPONENTS[fmts[1]]


def late(rng: np.random.Generator, fmts: FormatPair, m: int, n: int, k: int) -> Matrices:
    """Draw cancelling data over some orders of magnitude, whose second half undoes the first half in reverse order."""
    a, b = flat(rng, fmts, m, n, k)
    a = a * np.exp2(rng.integers(-2, 3, (m, k)))
    return _cancel(fmts, a, b, np.arange(k // 2)[::-1], np.arange(k - k // 2, k))


def near(rng: np.random.Generator, fmts: FormatPair, m: int, n: int, k: int) -> Matrices:
    """Draw cancelling data whose pairs are within blocks of 32.

    The sum of each slice then consists of its rounding errors, which show in a short format.
    """
    a, b = flat(rng, fmts, m, n, k)
    blocks = [start + rng.permutation(min(32, k - start)) for start in range(0, k, 32)]
    one, other = (np.concatenate([v[half * (len(v) // 2) :][: len(v) // 2] for v in blocks]) for half in (0, 1))
    return _cancel(fmts, a, b, one, other)


def steep(rng: np.random.Generator, fmts: FormatPair, m: int, n: int, k: int) -> Matrices:
    """Draw a large term, its opposite, and between them small terms of all magnitudes down to where a step truncates them."""
    (of_a, reach_a), (of_b, reach_b) = ((7, 16) if fmt != E4M3 else (6, 12) for fmt in fmts)
    a = rng.standard_normal((m, k)) * np.exp2(rng.integers(of_a - reach_a, of_a + 1, (m, k)))
    b = rng.standard_normal((k, n)) * np.exp2(rng.integers(of_b - reach_b, of_b + 1, (k, n)))
    if k >= 3:
        first, second = rng.choice(k, 2, replace=False)
        a[:, second] = a[:, first] = np.abs(rng.standard_normal(m) + 2) * 2.0**of_a
        b[first] = np.abs(rng.standard_normal(n) + 2) * 2.0**of_b
        b[second] = -b[first]
    return a, b


def ties(rng: np.random.Generator, fmts: FormatPair, m: int, n: int, k: int) -> Matrices:
    """Draw a large product at the midpoint of two numbers of a short result, and one-bit terms so small that a step may truncate them."""
    bits = [{F16: 6, E4M3: 4, E5M2: 3}.get(fmt, 5) for fmt in fmts]
    low = [{F16: -11, E4M3: -6, E5M2: -11}.get(fmt, -12) for fmt in fmts]
    a = np.exp2(rng.integers(low[0], 1, (m, k)))
    b = np.exp2(rng.integers(low[1], 1, (k, n))) * rng.choice([-1.0, 1.0], (k, n))
    index = int(rng.integers(k))
    for x, bit_count in ((a[:, index], bits[0]), (b[index], bits[1])):
        x[...] = 2 * rng.integers(2 ** (bit_count - 2), 2 ** (bit_count - 1), x.shape) + 1
    return a, b


def positive(rng: np.random.Generator, fmts: FormatPair, m: int, n: int, k: int) -> Matrices:
    """Draw numbers from 1 to 2, negative in every other row or column: sums with carries, which a short fraction rounds."""
    signs = np.resize([1.0, -1.0], max(m, n))
    return rng.uniform(1, 2, (m, k)) * signs[:m, None], rng.uniform(1, 2, (k, n)) * (signs[:n] if m == 1 else 1.0)


def zeros(rng: np.random.Generator, fmts: FormatPair, m: int, n: int, k: int) -> Matrices:
    """Draw products that are all -0. Other rows and columns hold the smallest negative products, which vanish in some format on the way."""
    wide = fmts[0] in (F32, TF32, BF16)
    of_a, of_b = (2.0**fmt.min_exponent if wide else 2.0 ** (fmt.min_exponent - fmt.mantissa_bits) for fmt in fmts)
    scales = [1.0, 2.0**-12, 2.0**-20, 2.0**-30] if wide else [1.0, of_b]
    a = np.full((m, k), of_a)
    if wide and n < 4:
        a *= np.resize([1.0, 2.0**10, 2.0**18, 0.0, 2.0**30], m)[:, None]
        return a, np.full((k, n), -(2.0**-30))
    a[1 + int(rng.integers(2)) :: 2] = 0
    return a, np.repeat(-np.resize(np.roll([*scales, 0.0], rng.integers(5)), n)[None], k, 0)


SIZE_EXPONENTS = {  # kinds of normal numbers: the exponent of their size by format
    "tiny": {F32: -71, TF32: -71, BF16: -71, F16: -11, E5M2: -11, E4M3: -6},  # near the smallest number of the result's format, or of f32
    "subnormal": dict.fromkeys(CANCELLING_EXPONENTS, -65),  # products that are subnormal numbers of bf16 and of f32
    "huge": {F32: 63, TF32: 63, BF16: 63, F16: 9, E5M2: 9, E4M3: 6},  # sums near the largest number of f16, or beyond that of f32
    "faint": dict.fromkeys(CANCELLING_EXPONENTS, -63),  # products near the smallest normal number of f32
}


def sized(kind: str, rng: np.random.Generator, fmts: FormatPair, m: int, n: int, k: int) -> Matrices:
    """Draw normal numbers of a size of `SIZE_EXPONENTS`."""
    a, b = flat(rng, fmts, m, n, k)
    return a * 2.0 ** SIZE_EXPONENTS[kind][fmts[0]], b * 2.0 ** SIZE_EXPONENTS[kind][fmts[1]]


def window(rng: np.random.Generator, fmts: FormatPair, m: int, n: int, k: int, most: int = 64, only: Draw | None = None) -> Matrices:
    """Draw numbers at a few indices along K, at most so many, and zeros elsewhere, so that no other sum hides a difference at these."""
    length = min(k, int(rng.integers(2, most + 1)))
    start = int(rng.integers(k - length + 1))
    a, b = np.zeros((m, k)), np.zeros((k, n))
    inner = only or (cancelling, late, steep, positive, ties, spread)[int(rng.integers(6))]
    a[:, start : start + length], b[start : start + length] = inner(rng, fmts, m, n, length)
    return a, b


def brink(rng: np.random.Generator, fmts: FormatPair, m: int, n: int, k: int) -> Matrices:
    """Draw a product one ulp of f32 (2^-149) below the midpoint of two numbers of bf16, and products of a half and of three halves.

    The result depends on whether an f32 rounds these before it adds them. 217 · 151 = 2^15 - 1 is the only such product of bf16 numbers.
    """
    a = rng.choice([1.0, 3.0], (m, k)) * 2.0**-75
    b = rng.choice([1.0, -1.0], (k, n)) * 2.0**-75
    index = int(rng.integers(k))
    a[:, index], b[index] = 217 * 2.0**-75, 151 * 2.0**-74
    return a, b


MATRIX_KINDS: dict[str, Draw] = {  # their order is their numbers in seeds, on which recorded words of GPUs depend
    "cancelling": cancelling, "flat": flat, "huge": partial(sized, "huge"), "late": late, "spread": spread,
    "tiny": partial(sized, "tiny"), "zeros": zeros, "near": near, "steep": steep, "ties": ties, "halves": flat, "positive": positive,
    "subnormal": partial(sized, "subnormal"), "window": window, "brink": brink,
    # a short result shows whether each product is rounded, and its subnormals flushed, before it is added
    "faint": partial(window, most=8, only=partial(sized, "faint")),
}  # fmt: skip


def draw_matrices(kind: str, seed: int, formats: FormatPair, shape: tuple[int, int, int]) -> Matrices:
    """Draw codes of A [M, K] and B [K, N].

    Args:
        kind: Name of the kind, a key of `MATRIX_KINDS`.
        seed: Integer seed.
        formats: Storage formats of A and B. f32 keeps all its bits.
        shape: M, N and K.

    Returns:
        The codes of A and of B.
    """
    m, n, k = shape
    rng = np.random.default_rng([seed, m, n, k, list(MATRIX_KINDS).index(kind)])
    a, b = MATRIX_KINDS[kind](rng, formats, m, n, k)
    a, b = round_to_codes(formats[0], np.clip(a, -3e38, 3e38)), round_to_codes(formats[1], np.clip(b, -3e38, 3e38))
    if kind == "halves" and formats == (F32, F32):  # midpoints of two numbers of tf32
        a, b = ((x & np.uint32(0xFFFFE000)) | np.uint32(0x1000) for x in (a, b))
    return a, b


# ---- scales and biases


EPILOGUE_KINDS = {"mild": 0, "low a": 1, "low b": 2, "aimed": 3, "beyond": 4}  # numbers of the kinds in seeds
MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT = -148, 127  # exponents of scales
FOLDED_EXPONENTS = ((90, 40), (-64, -80))  # exponents of two scales whose product is beyond f32, or subnormal with few bits
LOST_EXPONENT = -143  # exponent of a product of the total and one scale that has few bits left


def epilogue_kinds(form: ProductForm) -> tuple[str, ...]:
    """Return the kinds that distinguish a form's epilogues."""
    return ("mild", *(("low a", "low b", "beyond") if form.scales else ()), *(("aimed",) if form.bias is not None else ()))


def draw_epilogue(form: ProductForm, kind: str, seed: int, totals: np.ndarray) -> EpilogueCodes:
    """Draw scales and a bias of one kind for totals of A·B.

    Args:
        form: Form of the product.
        kind: "mild": all signs, near the totals' magnitude, with some biases of zero. "low a", "low b": a product of the total and one
            scale has few bits left, which the other scale restores, so that the order of the scales shows. "beyond": the scales' product
            has few bits, or is beyond f32. "aimed": the bias cancels nearly all of the scaled total, so that the result is the rounding
            before they met.
        seed: Integer seed.
        totals: float [M, N], totals of A·B.

    Returns:
        The codes.
    """
    m, n = totals.shape
    rng = np.random.default_rng([seed, m, n, EPILOGUE_KINDS[kind]])
    totals = np.where(np.isfinite(totals), totals, 0)
    nonzero = np.abs(totals[totals != 0])
    middle = int(np.floor(np.log2(np.median(nonzero)))) if len(nonzero) else 0
    a, b = _draw_scales(rng, form, kind, middle, m, n)
    if form.bias is None:
        return EpilogueCodes(_f32_codes(a), _f32_codes(b))
    assert isinstance(form.bias, Format)
    of_a, of_b = (np.asarray(1 if x is None else x, np.float64) for x in (a, b))
    size = (1, n) if form.bias_shape == "columns" else (m, n)
    scaled_totals = totals * of_a * of_b * form.alpha / form.beta
    if kind == "aimed":
        bias = -scaled_totals[rng.integers(0, m, n), np.arange(n)][None] if form.bias_shape == "columns" else -scaled_totals
    else:
        typical = np.abs(scaled_totals).mean(0, keepdims=True) if form.bias_shape == "columns" else np.abs(scaled_totals)
        bias = rng.standard_normal(size) * typical * np.exp2(rng.integers(-2, 4, size))
        bias = np.where(rng.integers(0, 8, size) == 0, np.copysign(0, rng.standard_normal(size)), bias)
    codes = round_to_codes(form.bias, np.clip(bias, -3e38, 3e38))
    if kind == "aimed" and a is not None:
        a = _aim_scale(rng, totals, a, of_b, form.beta * np.broadcast_to(codes_to_float64(form.bias, codes), totals.shape))
    return EpilogueCodes(_f32_codes(a), _f32_codes(b), codes[0] if form.bias_shape == "columns" else codes)


def _draw_scales(
    rng: np.random.Generator, form: ProductForm, kind: str, middle: int, m: int, n: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Draw float32 scales as the form has them. `middle` is the exponent of the totals."""
    if form.scales is None:
        return None, None
    found = []
    for size, low in (((m, 1), "low a"), ((1, n), "low b")):
        size = size if form.scales == "rows" else ()
        if kind in ("mild", "aimed"):
            exponents = rng.integers(-4, 5, size)
        elif kind == "beyond":
            exponents = FOLDED_EXPONENTS[middle > 0][low == "low b"] + rng.integers(0, 2, size)
        elif kind == low:
            exponents = np.clip(LOST_EXPONENT - middle + rng.integers(-2, 3, size), MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT)
        else:
            exponents = np.clip(-LOST_EXPONENT - 8 + rng.integers(-2, 3, size), MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT)
        sizes = np.ldexp(rng.uniform(1, 2, size), np.asarray(exponents).astype(int)) * rng.choice([-1.0, 1.0], size)
        found.append(np.asarray(sizes, np.float64).astype(np.float32))
    return found[0], found[1]


def _aim_scale(rng: np.random.Generator, totals: np.ndarray, a: np.ndarray, of_b: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return scale_a such that in each row (with one scale: at one output) the scaled total is nearly the opposite of the bias."""
    m, n = totals.shape
    rows, columns = np.arange(m), rng.integers(0, n, m)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        aimed = (-bias / (totals * of_b))[rows, columns].astype(np.float32)
    usable = np.isfinite(aimed) & (np.abs(aimed) > 2.0**-100) & (np.abs(aimed) < 2.0**100)
    if a.ndim:
        return np.where(usable[:, None], aimed[:, None], a)
    return aimed[usable][rng.integers(usable.sum(), size=())].reshape(()) if usable.any() else a


def _f32_codes(x: np.ndarray | None) -> np.ndarray | None:
    return None if x is None else np.asarray(x, np.float32).view(np.uint32)
