"""Kernels of libraries that are none: products of matrices in NumPy floats, in any order. It shares no line with the package.

A sum is described by nested lists of places along K. Values are float64 arrays that hold what the kernel's format holds; each rounding is
written out. The arithmetic of a tensor core's step is that of Hopper's (arXiv 2512.07004): cut below a fraction of the largest exponent.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

Indices = Sequence[int]
Formats = str | tuple[str, str]  # of both operands, or of A and of B
FLOATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LEAST = {"f16": -14, "bf16": -126, "e4m3": -6, "e5m2": -14, "tf32": -126}  # exponents of the least normal number


class Core(NamedTuple):
    """A tensor core's step: bits kept below the largest exponent, and bits of the result's fraction. rounded: to nearest, not cut."""

    fraction: int = 25
    result: int = 23
    rounded: bool = False


HOPPER, AMPERE, HOPPER_FP8, STRANGE, NEAREST = Core(), Core(24), Core(13, 13), Core(20), Core(25, 23, True)


def exponent(x: np.ndarray, least: int) -> np.ndarray:
    """Of the leading bit, subnormal numbers have the least one; of 0 far below all."""
    with np.errstate(divide="ignore"):
        return np.where(x == 0, -10_000, np.maximum(np.frexp(x)[1] - 1, least))


def core_step(core: Core, fmt: Formats, a: np.ndarray, b: np.ndarray, running: np.ndarray) -> np.ndarray:
    """running + A·B of a few products, a [M, t] and b [t, N], added at once."""
    of_a, of_b = (fmt, fmt) if isinstance(fmt, str) else fmt
    exponents = exponent(a, LEAST[of_a])[:, :, None] + exponent(b, LEAST[of_b])[None]
    largest = np.maximum(np.maximum(exponents.max(1), exponent(running, -126)), -133)
    last = np.ldexp(1.0, (largest - core.fraction).astype(int))
    infinite = ~np.isfinite(running)
    terms = np.concatenate([a[:, :, None] * b[None], np.where(infinite, 0, running)[:, None]], 1)
    total = (np.trunc(terms / last[:, None]) * last[:, None]).sum(1)
    unit = np.ldexp(1.0, np.maximum(np.frexp(total)[1] - 1, -126) - core.result)
    total = (np.rint(total / unit) if core.rounded else np.trunc(total / unit)) * unit + 0.0
    return np.where(infinite, running, np.where(np.abs(total) < 2.0**128, total, np.copysign(np.inf, total)))


def core_chain(core: Core, fmt: Formats, steps: Sequence[Indices], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A chain of steps, from +0."""
    running = np.zeros((a.shape[0], b.shape[1]))
    for places in steps:
        running = core_step(core, fmt, a[:, places], b[places], running)
    return running


def f32(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(np.float64)


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of f32 values, rounded once: the sum in float64, rounded to odd, has bits enough to be rounded again."""
    with np.errstate(over="ignore", invalid="ignore"):
        p = x * y  # exact: 48 bits
        s = p + z
        t = s - p
        error = (p - (s - t)) + (z - t)
        even = (s.view(np.int64) & 1) == 0
        odd = np.where(error > 0, np.nextafter(s, np.inf), np.nextafter(s, -np.inf))
        return f32(np.where((error != 0) & even & np.isfinite(s), odd, s))


def fma_chain(places: Indices, a: np.ndarray, b: np.ndarray, fused: bool = True, product: str = "f32", start: float = 0.0) -> np.ndarray:
    """A chain of f32 multiply-adds, from +0, or from -0, which leaves the first product as it is. product: in which products wait."""
    running = np.full((a.shape[0], b.shape[1]), start)
    for k in places:
        x, y = np.broadcast_arrays(a[:, k, None], b[None, k])
        running = fma(x.copy(), y.copy(), running) if fused else f32(rounder(product)(x * y) + running)
    return running


def add_in_order(sums: Sequence[np.ndarray]) -> np.ndarray:
    """In ascending order, in f32."""
    total = sums[0]
    for s in sums[1:]:
        total = f32(total + s)
    return total


def rounder(name: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: f32(x).astype(FLOATS[name]).astype(np.float64)


def serial(name: str) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
    """The running sum is stored in a narrow format."""
    cast = rounder(name)

    def merge(sums: Sequence[np.ndarray]) -> np.ndarray:
        total = cast(sums[0])
        for s in sums[1:]:
            total = cast(f32(total + s))
        return total

    return merge


def store_rounded(name: str) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
    """Each partial sum is stored in a narrow format."""
    return lambda sums: add_in_order([rounder(name)(s) for s in sums])


def atomic(name: str) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
    """Additions in a narrow format: each slice's sum and each running sum are rounded to it."""
    return lambda sums: serial(name)([rounder(name)(s) for s in sums])


def descending(sums: Sequence[np.ndarray]) -> np.ndarray:
    return add_in_order(list(sums)[::-1])


def pairwise(sums: Sequence[np.ndarray]) -> np.ndarray:
    """Neighbours, and what is left over goes on."""
    sums = list(sums)
    while len(sums) > 1:
        sums = [f32(sums[i] + sums[i + 1]) if i + 1 < len(sums) else sums[i] for i in range(0, len(sums), 2)]
    return sums[0]


def halves(sums: Sequence[np.ndarray]) -> np.ndarray:
    """A butterfly over a power of two of sums: the upper half on the lower."""
    sums = list(sums)
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [f32(sums[i] + sums[i + half]) for i in range(half)]
    return sums[0]


def paired(sums: Sequence[np.ndarray]) -> np.ndarray:
    """cuBLASLt's customOption 1 on an RTX 4060, as mmaemu has it."""
    sums, count = list(sums), len(sums)
    half = -(-count // 2)
    slots = [f32(sums[i] + sums[i + half]) if i + half < count - 1 else sums[i] for i in range(half)]
    total = sums[-1]
    for slot in slots:
        total = f32(total + slot)
    return total


def split_steps(places: Indices, width: int) -> list[Indices]:
    return [places[i : i + width] for i in range(0, len(places), width)]


def residue_first(places: Indices, tile: int, width: int = 16) -> list[Indices]:
    """K modulo the tile comes first, in steps of its own."""
    first = len(places) % tile
    return split_steps(places[:first], width) + split_steps(places[first:], width)


def even(k: int, count: int, grain: int) -> list[list[int]]:
    """Slices of equal numbers of grains; the last is shorter."""
    chunk = -(-(-(-k // grain)) // count) * grain  # noqa: B002
    return [list(range(x, min(x + chunk, k))) for x in range(0, k, chunk)]


def uneven(*edges: int) -> list[list[int]]:
    return [list(range(x, y)) for x, y in itertools.pairwise(edges)]


def round_robin(k: int, count: int, tile: int) -> list[list[int]]:
    return [[p for p in range(k) if p // tile % count == s] for s in range(count)]


def folded(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One factor, and an fma with +0."""
    return f32(total * f32(a * b) + 0.0)


def folded_plainly(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return f32(total * f32(a * b))


def a_first(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return f32(f32(total * a) * b)


def b_first(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return f32(f32(total * b) * a)


def rounded_once(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Both products without a rounding between them."""
    return f32((total.astype(np.longdouble) * a * b).astype(np.float64))


def flushing(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """As with subnormal numbers that count as zeros."""
    kept = lambda x: np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x)
    return kept(f32(kept(f32(kept(total) * kept(a))) * kept(b)))


def added_last(total: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return f32(total + bias)


def make_scaled_kernel(fmt: Formats, out: str, total: Callable, scaling: Callable | None = None, adding: Callable = added_last) -> Callable:
    """A function that takes scales or a bias too. total: of a box with f32 results; adding: of the scaled total and the bias."""

    def product(a, b, scale_a=None, scale_b=None, bias=None):
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            d = total(a, b).astype(np.float64)
            if scaling is not None:
                d = scaling(d, *(x.astype(np.float64) for x in (scale_a, scale_b)))
            return (d if bias is None else adding(d, bias.astype(np.float64))).astype(np.float32).astype(FLOATS[out])

    return product


def fused(scaling: Callable) -> Callable:
    """A bias that is added in the last product of the scales, in one rounding: a function in place of `with_extras`' product."""

    def made(fmt: Formats, out: str, total: Callable) -> Callable:
        def product(a, b, scale_a, scale_b, bias):
            with np.errstate(over="ignore", invalid="ignore", under="ignore"):
                d, x, y, z = (v.astype(np.float64) for v in (total(a, b), scale_a, scale_b, bias))
                first, last = (d, f32(x * y)) if scaling is folded else (f32(d * x), y)
                return fma(*(v.copy() for v in np.broadcast_arrays(first, last, z))).astype(np.float32).astype(FLOATS[out])

        return product

    return made


def box(fmt: Formats, out: str, total: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A function of arrays of one format, or of two, to an array of another."""

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if fmt == "tf32":  # to nearest, ties away from zero
            a, b = (((x.view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32) for x in (a, b))
        with np.errstate(over="ignore", invalid="ignore"):
            return f32(total(a.astype(np.float64), b.astype(np.float64))).astype(FLOATS[out])

    return product


def tensor(
    fmt: Formats,
    out: str,
    slices: Sequence[Indices],
    merge: Callable = add_in_order,
    steps: Callable[[Indices], list[Indices]] | None = None,
    core: Core = HOPPER,
    restart: int | None = None,
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A kernel with a tensor core."""
    width = {"f16": 16, "bf16": 16, "tf32": 8}.get(fmt if isinstance(fmt, str) else "", 32)

    def of_slice(places: Indices, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if restart is None:
            return core_chain(core, fmt, steps(places) if steps else split_steps(places, width), a, b)
        return add_in_order(
            [np.zeros(()), *(core_chain(core, fmt, split_steps(block, width), a, b) for block in split_steps(places, restart))]
        )

    return box(fmt, out, lambda a, b: merge([of_slice(places, a, b) for places in slices]))


def lanes(fmt: str, out: str, chains: Sequence[Sequence[Sequence[Indices]]], join: Callable = add_in_order, **options) -> Callable:
    """A kernel without a tensor core. chains: slices of lanes of chunks of places; a lane's chunks and the slices are added ascending.

    options: of `by_fma`.
    """

    def total(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return add_in_order(
            [join([add_in_order([fma_chain(chunk, a, b, **options) for chunk in lane]) for lane in slice_]) for slice_ in chains]
        )

    return box(fmt, out, total)


def dealt(places: Indices, count: int, vector: int, chunk: int | None = None) -> list[list[Indices]]:
    """Lanes that take `vector` elements in turn, their chains closed every so many."""
    own = [[p for at, p in enumerate(places) if at // vector % count == lane] for lane in range(count)]
    return [split_steps(o, chunk or len(o)) for o in own]
