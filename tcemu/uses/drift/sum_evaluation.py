"""Sums of products in the order of a `Summation`, on matrices or on a selection of outputs.

Lanes are computed in NumPy's float32, whose additions and multiplications are single IEEE operations that nothing contracts or flushes.
Tensor-core steps are computed by the engine, in segments of K of one size, so that one compiled program serves every K and every slice.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.formats.float_arrays import to_float
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.operations.products.library.kernel_order import additions, instruction_runs, lane_order, slice_indices
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Lanes, Steps
from tcemu.operations.products.library.kernel_sums import operand_codes
from tcemu.uses.drift.summation import Summation

SEGMENT = 64  # elements along K that a compiled program takes
SELECTED = 32  # outputs of a selection that a compiled program takes
TILE = 64  # rows and columns that a compiled program takes
OUTPUTS_AT_ONCE = 1 << 15  # running sums of lanes
TERMS_AT_ONCE = 1 << 16  # products that are computed before they are added
LEAST_CAST = 1 << 12  # elements to which short operands are padded before they are rounded
MIN_THREADED = 4  # blocks of rows from which they are shared out among threads


def fma_f32(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Compute x·y + z in f32, rounded once.

    A product of two f32 has 48 bits, which f64 holds exactly. Its sum with z is rounded to odd in f64, and a number of 53 bits that was
    rounded to odd is rounded to 24 bits as the exact one is (Boldo and Melquiond, 2008).
    """
    with np.errstate(invalid="ignore", over="ignore"):
        p, c = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
        total = p + c
        back = total - p
        error = (p - (total - back)) + (c - back)
        bits = total.view(np.int64) if total.ndim else np.asarray(total).view(np.int64)
        even = (bits & 1) == 0
        inexact = (error != 0) & np.isfinite(total)
        # towards the exact value: one unit away from zero if the error has the sign of the sum, else one towards it
        step = np.where((error > 0) == (total > 0), 1, -1)
        odd = np.where(inexact & even, bits + step, bits)
        return odd.view(np.float64).astype(np.float32)


def sum_products(how: Summation, a: np.ndarray, b: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Sum the products of rows: f32, before the rounding to the result.

    Args:
        how: The summation.
        a: Values of A, in f32 or a narrower format: [n, K] for selected outputs, or [M, 1, K].
        b: Values of B: [n, K], or [1, N, K].
        bias: Start of the sums, f32 [n] or [M, N], if `how.bias_first`.

    Returns:
        f32 [n], or [M, N].
    """
    shape = np.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    if how.accumulator == "float64":
        with np.errstate(invalid="ignore", over="ignore"):
            wide = a.astype(np.float64), b.astype(np.float64)
            return (np.einsum("mik,ink->mn", *wide) if a.ndim == 3 else (wide[0] * wide[1]).sum(-1)).astype(np.float32)
    if isinstance(how.order.unit, Steps):
        return _merge(how, _core_sums(how, a, b))
    return _merge(how, _sum_in_lanes(how, _cast(how.order, a), _cast(how.order, b), bias, shape))


def _cast(order: KernelRecipe, x: np.ndarray) -> np.ndarray:
    """Round f32 values to the multiplied format, as f32."""
    if x.dtype != np.float32 or order.a == F32:
        return x.astype(np.float32)
    return _cast_bytes(order.a, order.cast, np.ascontiguousarray(x).tobytes()).reshape(x.shape)


@lru_cache(maxsize=16)  # every order is tried with the same operands
def _cast_bytes(fmt: Format, cast: str, data: bytes) -> np.ndarray:
    x = np.frombuffer(data, np.float32)
    full = np.zeros(max(LEAST_CAST, 1 << max(x.size - 1, 0).bit_length()), np.float32)  # few sizes, each compiled once
    full[: x.size] = x
    return np.asarray(to_float(fmt, operand_codes(fmt, cast, full)))[: x.size]


# ---- merges


def _flush(x: np.ndarray) -> np.ndarray:
    small = np.abs(x) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), x), x)


def _narrow(name: str) -> np.dtype | None:
    return None if name in ("float32", "f32") else np.dtype({"bf16": ml_dtypes.bfloat16, "f16": np.float16}.get(name, name))


def _merge(how: Summation, sums: np.ndarray) -> np.ndarray:
    """Add the sums of slices [..., S] in the order of the recipe."""
    merge, unit = how.order.merge, how.order.unit
    flush = _flush if isinstance(unit, Lanes) and unit.flush else lambda x: x
    names = how.accumulator if isinstance(unit, Lanes) else "float32", str(merge.partial)
    accumulator, waiting = (_narrow(name) for name in names)
    rounded = lambda x, dtype: x if dtype is None else x.astype(dtype).astype(np.float32)
    sums = sums.astype(np.float32)
    count = sums.shape[-1]
    pairs = additions(merge.order, count)
    if merge.start == "zero":
        sums = np.concatenate([sums, np.zeros((*sums.shape[:-1], 1), np.float32)], -1)
        first = pairs[0][0] if pairs else 0
        pairs = [(count, first), *((count, origin) for _, origin in pairs)]
    if not pairs:
        return sums[..., 0]
    with np.errstate(invalid="ignore", over="ignore"):
        if merge.rounds_slices:
            sums = rounded(sums, waiting)
        else:
            sums[..., pairs[0][0]] = rounded(sums[..., pairs[0][0]], waiting)
        for to, origin in pairs:
            total = rounded(flush(sums[..., to] + sums[..., origin]), accumulator)
            sums[..., to] = rounded(total, waiting) if merge.rounds_running else total
    return sums[..., pairs[-1][0]]


# ---- lanes


def _products_in_range(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether all products of two f32 arrays of 16-bit values are normal numbers or zero, so that f32 has them exactly."""
    sizes = [np.abs(x[x != 0]) for x in (a, b)]
    if not all(x.size for x in sizes):
        return True
    least, most = (float(f(sizes[0])) * float(f(sizes[1])) for f in (np.min, np.max))
    return least >= 2.0**-126 and most < 2.0**127


def _sum_in_lanes(how: Summation, a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """Compute the sums of the slices, f32 [..., S], for some rows of the result after the other."""
    order, unit = how.order, how.order.unit
    assert isinstance(unit, Lanes)
    exact = order.a.bits <= 16 and order.b.bits <= 16 and _products_in_range(a, b)
    fused = unit.fused and _narrow(how.accumulator) is None and not exact and not how.of_terms
    x, y = _terms_first(a, -0.0), _terms_first(b, 0.0)  # the product that pads a lane is -0, which changes no sum
    slices = len(order.slices.edges) - 1
    rows = max(1, OUTPUTS_AT_ONCE // max(slices * unit.lanes * (shape[1] if len(shape) > 1 else 1), 1))
    found = np.empty((*shape, slices), np.float32)

    def compute(i: int) -> None:
        pick = slice(i, i + rows)
        parts = x[:, pick] if x.shape[1] == len(found) else x, y[:, pick] if len(b) == len(found) and len(shape) == 1 else y
        found[pick], doubtful = _lane_sums(how, *parts, None if bias is None else bias[pick], fused)
        if doubtful is not None and doubtful.any():  # these outputs again, by fma that are exact whatever their operands
            m, n = (doubtful.nonzero()[0], None) if len(shape) == 1 else doubtful.nonzero()
            left, right = a[i + m] if n is None else a[i + m, 0], (b if len(b) == 1 else b[i + m]) if n is None else b[0, n]
            start = None if bias is None else bias[pick][doubtful]
            found[pick][doubtful], _ = _lane_sums(how, _terms_first(left, -0.0), _terms_first(right, 0.0), start, fused, careful=True)

    starts = range(0, len(found), rows)
    if len(starts) < MIN_THREADED:
        for start in starts:
            compute(start)
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy releases the interpreter's lock within an operation
            list(pool.map(compute, starts))
    return found


def _terms_first(x: np.ndarray, padding: float) -> np.ndarray:
    """Return [K + 1, ...] with a last term that pads lanes."""
    return np.concatenate([np.moveaxis(x, -1, 0), np.full((1, *x.shape[:-1]), padding, np.float32)])


def _find_doubtful(sums: np.ndarray, terms: np.ndarray, running: np.ndarray) -> np.ndarray | None:
    """Return the outputs whose f64 sums of a term and a running sum may be rounded to another f32 than the exact sums; None for none.

    These are inexact sums that fell on a midpoint of two f32, and those of at most 2^-126, where f32 has fewer bits. A sum that f32
    rounds to zero is exact in f64.

    Args:
        sums: f64 [T, S, L, ...].
        terms: The terms, f64.
        running: The running sums, f32 [T + 1, S, L, ...], before each term and after the last.
    """
    suspect = (sums.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    small = ((running[1:].view(np.uint32) & 0x7FFFFFFF) - np.uint32(1)) < 0x00800000
    if not suspect.any() and not small.any():
        return None
    places = np.nonzero(suspect | small)
    total, x, y = sums[places], terms[places], running[:-1][places].astype(np.float64)
    back = total - x
    inexact = ((x - (total - back)) + (y - back)) != 0
    found = np.zeros(sums.shape[3:], bool)
    found[tuple(axis[inexact] for axis in places[3:])] = True
    return found


def _lane_sums(
    how: Summation, a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, fused: bool, careful: bool = False
) -> tuple[np.ndarray, np.ndarray | None]:
    """Compute the sums of the slices from terms [K + 1, ...], f32 [..., S], and where they are doubtful.

    With `fused`, a product and its addition are computed in f64 and rounded to f32, which is almost always an fma; with `careful`, they
    are an fma always.
    """
    order = how.order
    assert isinstance(order.unit, Lanes)
    unit, schedule = order.unit, lane_order(order.unit, order.slices)
    flush = _flush if unit.flush else lambda x: x
    narrow = _narrow(how.accumulator)
    rounded = (lambda x: x) if narrow is None else (lambda x: x.astype(narrow).astype(np.float32))
    stored = _narrow(str(unit.product)) if unit.product is not None else narrow
    multiplied = (lambda x: x) if stored is None else (lambda x: x.astype(stored).astype(np.float32))
    a, b = flush(a), flush(b)
    begin = np.float32(-0.0 if unit.start == "first" else 0.0)
    places = schedule.indices.shape[1:]
    shape = (*places, *np.broadcast_shapes(a.shape[1:], b.shape[1:]))
    turns, quick = max(1, min(TERMS_AT_ONCE // max(math.prod(shape), 1), len(schedule.indices))), fused and not careful
    history = np.empty((turns + 1 if quick else 1, *shape), np.float32)  # running sums before each term and after the last
    running, total = history[0], np.full(shape if schedule.chunked else (), begin)
    running[...] = begin
    begun = np.zeros((*places, *(1 for _ in shape[2:])), bool)
    closing = np.any(schedule.closes, axis=(1, 2)) if schedule.chunked else np.zeros(len(schedule.indices), bool)
    if bias is not None:
        running[0, 0] = bias
    doubtful = np.zeros(shape[2:], bool)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(schedule.indices), turns):
            x, y = a[schedule.indices[start : start + turns]], b[schedule.indices[start : start + turns]]
            terms = np.broadcast_to(np.multiply(x, y, dtype=np.float64) if quick else flush(multiplied(x * y)), (len(x), *shape))
            sums = np.empty_like(terms) if quick else None
            history[0] = running
            for turn, term in enumerate(terms):
                if sums is not None:
                    np.add(term, running, out=sums[turn])
                    running = history[turn + 1]
                    running[...] = sums[turn]
                elif fused:
                    running[...] = fma_f32(x[turn], y[turn], running)
                else:
                    running += term
                if unit.flush or narrow is not None:
                    running[...] = rounded(flush(running))
                if closing[start + turn]:
                    closes = schedule.closes[start + turn].reshape(begun.shape)
                    total = np.where(closes, np.where(begun, flush(rounded(total + running)), running), total)
                    begun = begun | closes
                    running[...] = np.where(closes, begin, running)
            if sums is not None:
                found = _find_doubtful(sums, terms, history[: len(sums) + 1])
                doubtful = doubtful if found is None else doubtful | found
        lanes = total if schedule.chunked else running
        last = additions(unit.join, unit.lanes)
        for to, origin in last:
            lanes[:, to] = rounded(flush(lanes[:, to] + lanes[:, origin]))
    return np.moveaxis(lanes[:, last[-1][0] if last else 0], 0, -1), doubtful if quick else None


# ---- tensor cores


@partial(jax.jit, static_argnums=(0, 1))
def _segment(model: Any, spec: Any, a: Any, b: Any, running: Any) -> Any:
    return multiply_matrices(model, spec, a, b, running)


def _core_sums(how: Summation, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compute the sums of the slices, f32 [..., S]."""
    order, unit = how.order, how.order.unit
    assert isinstance(unit, Steps)
    op, model = unit.op, unit.arithmetic
    if how.accumulator == "float16":
        narrow = resolve_arithmetic(str(unit.op).replace(".f32", ".f16"), unit.target)
        op, model = narrow.op, narrow.model
    a, b = (np.asarray(operand_codes(fmt, order.cast, x)) for fmt, x in ((order.a, a), (order.b, b)))
    spec, found = product_spec(op), []
    for indices in slice_indices(order.slices):
        total: np.ndarray | None = None
        running = None
        for start, stop, closes in instruction_runs(unit, len(indices)):
            part = indices[start:stop]
            running = _chain(model, spec, order.a, a[..., part], b[..., part], running)
            if closes:
                value = np.asarray(to_float(op.d, jnp.asarray(running)), np.float32)
                total = value if unit.restart is None else (np.float32(0) if total is None else total) + value
                running = None
        assert total is not None
        found.append(total)
    return np.stack(found, -1)


def _chain(model: Any, spec: Any, fmt: Format, a: np.ndarray, b: np.ndarray, running: np.ndarray | None) -> np.ndarray:
    """Run instructions along K from a running sum: codes of the accumulators, [n] or [M, N]."""
    missing = -a.shape[-1] % SEGMENT
    pad = lambda x, code: np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=np.array(code, x.dtype))
    a, b = pad(a, 1 << (fmt.bits - 1)), pad(b, 0)  # products of -0, which change no sum
    if a.ndim == 2:
        return _selected(model, spec, a, b, running)
    return _tiled(model, spec, a[:, 0], b[0], running)


def _selected(model: Any, spec: Any, a: np.ndarray, b: np.ndarray, running: np.ndarray | None) -> np.ndarray:
    n = len(a)
    more = -n % SELECTED
    a, b = (np.pad(x, ((0, more), (0, 0))) for x in (a, b))
    state = np.zeros(len(a), spec.d.dtype) if running is None else np.pad(running, (0, more))
    for start in range(0, len(a), SELECTED):
        pick = slice(start, start + SELECTED)
        codes = jnp.asarray(state[pick, None, None])
        for k in range(0, a.shape[-1], SEGMENT):
            x, y = jnp.asarray(a[pick, None, k : k + SEGMENT]), jnp.asarray(b[pick, k : k + SEGMENT, None])
            codes = _segment(model, spec, x, y, codes)
        state[pick] = np.asarray(codes).reshape(-1)
    return state[:n]


def _tiled(model: Any, spec: Any, a: np.ndarray, b: np.ndarray, running: np.ndarray | None) -> np.ndarray:
    m, n = len(a), len(b)
    down, along = -m % TILE, -n % TILE
    a, b = np.pad(a, ((0, down), (0, 0))), np.pad(b, ((0, along), (0, 0)))
    state = np.zeros((len(a), len(b)), spec.d.dtype) if running is None else np.pad(running, ((0, down), (0, along)))
    for i in range(0, len(a), TILE):
        for j in range(0, len(b), TILE):
            codes = jnp.asarray(state[i : i + TILE, j : j + TILE])
            for k in range(0, a.shape[-1], SEGMENT):
                x, y = jnp.asarray(a[i : i + TILE, k : k + SEGMENT]), jnp.asarray(b[j : j + TILE, k : k + SEGMENT].T)
                codes = _segment(model, spec, x, y, codes)
            state[i : i + TILE, j : j + TILE] = np.asarray(codes)
    return state[:m, :n]
