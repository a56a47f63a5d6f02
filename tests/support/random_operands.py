"""Seeded operands: raw codes in classes that each reach another corner of the arithmetic, and hypothesis strategies over bit patterns.

Codes are the smallest unsigned NumPy dtype that holds them, uint64 for f64; the formats are the reference's.
"""

import hypothesis.extra.numpy as arrays
import numpy as np
from hypothesis import strategies as st
from oracles.reference import FORMATS, Spec

CLASSES = ("full", "near one", "narrow", "subnormal", "special", "sparse", "raw", "cancelling", "ties")
Shape = tuple[int, ...]


def storage_dtype(name: str) -> np.dtype:
    bits = FORMATS[name].bits
    return np.dtype(np.uint8 if bits <= 8 else np.uint16 if bits <= 16 else np.uint32 if bits <= 32 else np.uint64)


def two_words(codes: np.ndarray) -> np.ndarray:
    """uint64 [...] -> uint32 [..., 2], low word first."""
    return np.stack([codes & np.uint64(0xFFFFFFFF), codes >> np.uint64(32)], axis=-1).astype(np.uint32)


def one_code(words: np.ndarray) -> np.ndarray:
    """uint32 [..., 2], low word first -> uint64 [...]."""
    words = np.asarray(words, np.uint64)
    return words[..., 0] | words[..., 1] << np.uint64(32)


def special_codes(name: str) -> list[int]:
    """Zeros, the ends of the subnormals and normals, one, Infs, NaNs of several payloads; of an integer its ends and its middle."""
    spec = FORMATS[name]
    if not spec.exponent:
        return sorted({0, 1, (1 << spec.bits) - 1, 1 << spec.bits - 1, (1 << spec.bits - 1) - 1})
    hidden = 1 << spec.fraction
    magnitudes = {0, 1, hidden - 1, hidden, hidden + 1, spec.bias << spec.fraction, spec.greatest - 1, spec.greatest}
    if spec.top == "ieee":
        infinity = spec.greatest + 1
        magnitudes |= {infinity, infinity + 1, infinity + hidden // 2, infinity + hidden - 1}
    elif spec.top == "nan":
        magnitudes.add(spec.greatest + 1)
    codes = {magnitude << spec.ignored for magnitude in magnitudes}
    if spec.ignored:  # an Inf whose payload lies in the ignored bits only
        codes |= {spec.greatest + 1 << spec.ignored | 1, (1 << spec.bits - 1) - 1}
    return sorted(codes | {code | 1 << spec.bits - 1 for code in codes} if spec.signed else codes)


def _fields(spec: Spec, shape: Shape, rng: np.random.Generator, low: int, high: int) -> np.ndarray:
    """Exponent fields in [low, high], kept inside what is finite."""
    last = spec.greatest >> spec.fraction
    return np.clip(rng.integers(low, high, shape, endpoint=True), 0, last)


def codes(name: str, kind: str, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Codes of a float format in one of CLASSES. "cancelling" pairs neighbours along the last axis, "ties" end in 1000...0."""
    spec = FORMATS[name]
    raw = (
        rng.integers(0, 1 << spec.bits, shape, dtype=np.uint64, endpoint=False)
        if spec.bits < 64
        else rng.integers(0, 1 << 64, shape, np.uint64)
    )
    if kind == "raw":
        return raw.astype(storage_dtype(name))
    if kind == "special":
        picked = rng.choice(np.array(special_codes(name), np.uint64), shape)
        return np.where(rng.random(shape) < 0.7, picked, raw).astype(storage_dtype(name))
    sign = (raw >> np.uint64(spec.bits - 1) << np.uint64(spec.bits - 1)) if spec.signed else np.zeros(shape, np.uint64)
    unused = raw & np.uint64((1 << spec.ignored) - 1)
    fraction = raw >> np.uint64(spec.ignored) & np.uint64((1 << spec.fraction) - 1)
    last = spec.greatest >> spec.fraction
    if kind == "near one":
        field = _fields(spec, shape, rng, spec.bias - 2, spec.bias + 1)
    elif kind == "narrow":
        base = int(rng.integers(0, last, endpoint=True))
        field = _fields(spec, shape, rng, base, base + 3)
    elif kind == "subnormal":
        field = _fields(spec, shape, rng, 0, 1)
        fraction = np.where(rng.random(shape) < 0.3, 0, fraction)
    else:
        field = _fields(spec, shape, rng, 0, last)
    if spec.fraction and kind == "sparse":
        one, other = (np.uint64(1) << rng.integers(0, spec.fraction, shape).astype(np.uint64) for _ in range(2))
        fraction = np.where(rng.random(shape) < 0.5, one | other, np.where(rng.random(shape) < 0.5, one, 0))
    elif spec.fraction and kind == "ties":
        end = rng.integers(0, spec.fraction, shape).astype(np.uint64)
        fraction = fraction >> end << end | np.uint64(1) << end
    magnitude = np.minimum(field.astype(np.uint64) << np.uint64(spec.fraction) | fraction.astype(np.uint64), np.uint64(spec.greatest))
    found = sign | magnitude << np.uint64(spec.ignored) | unused
    if kind == "cancelling" and spec.signed:
        even = shape[-1] // 2 * 2
        nudged = (rng.random((*shape[:-1], even // 2)) < 0.3) & (magnitude[..., 0:even:2] != spec.greatest)
        nudge = nudged.astype(np.uint64) << np.uint64(spec.ignored)
        found[..., 1:even:2] = found[..., 0:even:2] ^ np.uint64(1 << spec.bits - 1) ^ nudge
    if spec.top == "fnuz":  # there is no -0: its code is NaN
        found = np.where(found == spec.nan, 0, found)
    return found.astype(storage_dtype(name))


def integers(name: str, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Codes of an integer format: any, with its ends often enough for sums to overflow."""
    any_code = rng.integers(0, 1 << FORMATS[name].bits, shape, np.uint64)
    ends = rng.choice(np.array(special_codes(name), np.uint64), shape)
    return np.where(rng.random(shape) < 0.4, ends, any_code).astype(storage_dtype(name))


def dot_operands(
    a: str, b: str, c: str, kind: str, count: int, k: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a [count, k], b [count, k], c [count] for D = a*b + c, floats.

    "cancelling": each second product is the first one's negative, or nearly. "ties": products and C are signed powers of two, so that
    sums fall on and beside the halves of the result's last bit. In the other classes all three are drawn alike.
    """
    if kind == "ties":
        drawn = []
        for name, width in ((a, k), (b, k), (c, 1)):
            spec = FORMATS[name]
            field = np.clip(spec.bias + rng.integers(-14, 3, (count, width)), 0, spec.greatest >> spec.fraction).astype(np.uint64)
            sign = rng.integers(0, 2, (count, width)).astype(np.uint64) << np.uint64(spec.bits - 1) if spec.signed else np.uint64(0)
            zero = rng.random((count, width)) < 0.3
            drawn.append(np.where(zero, 0, field << np.uint64(spec.fraction + spec.ignored) | sign).astype(storage_dtype(name)))
        return drawn[0], drawn[1], drawn[2][:, 0]
    left, right = codes(a, kind, (count, k), rng), codes(b, kind, (count, k), rng)
    if kind == "cancelling":
        right[:, 1 : k // 2 * 2 : 2] = right[:, 0 : k // 2 * 2 : 2]
    accumulators = codes(c, "full" if kind == "cancelling" else kind, (count, 1), rng)
    return left, right, accumulators[:, 0]


# ---- hypothesis


def words(bits: int = 32) -> st.SearchStrategy[int]:
    """Any bit pattern of a width."""
    return st.integers(0, (1 << bits) - 1)


def code_strategy(name: str) -> st.SearchStrategy[int]:
    """Any code of a format, its special codes often."""
    return st.one_of(words(FORMATS[name].bits), st.sampled_from(special_codes(name)))


def array_strategy(name: str, shape: Shape) -> st.SearchStrategy[np.ndarray]:
    """An array of any codes of a format."""
    return arrays.arrays(storage_dtype(name), shape, elements=code_strategy(name))


def registers(shape: Shape) -> st.SearchStrategy[np.ndarray]:
    """uint32 registers of any bits."""
    return arrays.arrays(np.uint32, shape, elements=words())
