"""Sums of products in the order of a `Summation`, on matrices or on a selection of outputs.

Lanes are computed in NumPy's float32, whose additions and multiplications are single IEEE operations that nothing contracts or flushes.
Tensor-core steps are computed by the engine, in segments of K of one size, so that one compiled program serves every K and every slice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.arithmetic.product_spec import ProductSpec, product_spec
from tcemu.engine.arithmetic.sum_tree import Chain, Node, Turn, evaluate
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.formats.float_arrays import to_float
from tcemu.engine.formats.number_formats import F16, F32, Format
from tcemu.operations.functional.torch_cuda.numpy_evaluation import fma_f32
from tcemu.operations.products.library.kernel_order import recipe_tree, slice_indices
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Lanes, Steps
from tcemu.operations.products.library.kernel_sums import operand_codes
from tcemu.operations.products.library.numpy_sums import FLOATS, FloatSums, InstructionSums, flush_floats, round_floats
from tcemu.uses.drift.summation import Summation

SEGMENT = 64  # elements along K that a compiled program takes
SELECTED = 32  # outputs of a selection that a compiled program takes
TILE = 64  # rows and columns that a compiled program takes
OUTPUTS_AT_ONCE = 1 << 15  # running sums of lanes
LEAST_CAST = 1 << 12  # elements to which short operands are padded before they are rounded
MIN_THREADED = 4  # blocks of rows from which they are shared out among threads


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
    tree = recipe_tree(how.order)
    if isinstance(how.order.unit, Steps):
        return evaluate(tree, CoreSums(how, a, b))
    return _sum_in_lanes(how, tree, _cast(how.order, a), _cast(how.order, b), bias, shape)


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


def _narrow(name: str) -> np.dtype | None:
    return None if name in ("float32", "f32") else np.dtype({"bf16": ml_dtypes.bfloat16, "f16": np.float16}.get(name, name))


# ---- lanes


def _products_in_range(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether all products of two f32 arrays of 16-bit values are normal numbers or zero, so that f32 has them exactly."""
    sizes = [np.abs(x[x != 0]) for x in (a, b)]
    if not all(x.size for x in sizes):
        return True
    least, most = (float(f(sizes[0])) * float(f(sizes[1])) for f in (np.min, np.max))
    return least >= 2.0**-126 and most < 2.0**127


def _sum_in_lanes(how: Summation, tree: Node, a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """Compute sums, f32, for some rows of the result after the other."""
    order, unit = how.order, how.order.unit
    assert isinstance(unit, Lanes)
    exact = order.a.bits <= 16 and order.b.bits <= 16 and _products_in_range(a, b)
    fused = unit.fused and _narrow(how.accumulator) is None and not exact and not how.of_terms
    x, y = terms_first(a, -0.0), terms_first(b, 0.0)  # the product that pads a lane is -0, which changes no sum
    rows = max(1, OUTPUTS_AT_ONCE // max(len(slice_indices(order.slices)) * unit.lanes * (shape[1] if len(shape) > 1 else 1), 1))
    found = np.empty(shape, np.float32)

    def compute(i: int) -> None:
        pick = slice(i, i + rows)
        parts = x[:, pick] if x.shape[1] == len(found) else x, y[:, pick] if len(b) == len(found) and len(shape) == 1 else y
        sums = LaneSums(how, *parts, None if bias is None else bias[pick], fused)
        found[pick] = _evaluate_quietly(tree, sums)
        if sums.doubtful.any():  # these outputs again, by fma that are exact whatever their operands
            m, n = (sums.doubtful.nonzero()[0], None) if len(shape) == 1 else sums.doubtful.nonzero()
            left, right = a[i + m] if n is None else a[i + m, 0], (b if len(b) == 1 else b[i + m]) if n is None else b[0, n]
            start = None if bias is None else bias[pick][sums.doubtful]
            careful = LaneSums(how, terms_first(left, -0.0), terms_first(right, 0.0), start, fused, careful=True)
            found[pick][sums.doubtful] = _evaluate_quietly(tree, careful)

    starts = range(0, len(found), rows)
    if len(starts) < MIN_THREADED:
        for start in starts:
            compute(start)
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy releases the interpreter's lock within an operation
            list(pool.map(compute, starts))
    return found


def _evaluate_quietly(tree: Node, sums: FloatSums) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        return evaluate(tree, sums)


def terms_first(x: np.ndarray, padding: float) -> np.ndarray:
    """Return [K + 1, ...] with a last term that pads lanes."""
    return np.concatenate([np.moveaxis(x, -1, 0), np.full((1, *x.shape[:-1]), padding, np.float32)])


def _find_doubtful(sums: np.ndarray, terms: np.ndarray, before: Sequence[np.ndarray], after: np.ndarray) -> np.ndarray | None:
    """Return the outputs whose f64 sums of a term and a running sum may be rounded to another f32 than the exact sums; None for none.

    These are inexact sums that fell on a midpoint of two f32, and those of at most 2^-126, where f32 has fewer bits. A sum that f32
    rounds to zero is exact in f64.

    Args:
        sums: f64 [T, S, L, ...].
        terms: The terms, f64.
        before: The running sums before each term, f32 [S, L, ...].
        after: Those after each term, f32 [T, S, L, ...].
    """
    suspect = (sums.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    small = ((after.view(np.uint32) & 0x7FFFFFFF) - np.uint32(1)) < 0x00800000
    if not suspect.any() and not small.any():
        return None
    places = np.nonzero(suspect | small)
    total, x, y = sums[places], terms[places], np.stack(before)[places].astype(np.float64)
    back = total - x
    inexact = ((x - (total - back)) + (y - back)) != 0
    found = np.zeros(sums.shape[3:], bool)
    found[tuple(axis[inexact] for axis in places[3:])] = True
    return found


class LaneSums(FloatSums):
    """Sums of the products of terms a and b [K + 1, ...] by multiply-adds.

    With `fused`, a product and its addition are computed in f64 and rounded to f32, which is almost always an fma: `doubtful` has the
    outputs where it may be none. With `careful`, they are an fma always.
    """

    def __init__(self, how: Summation, a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, fused: bool, careful: bool = False) -> None:
        unit = how.order.unit
        assert isinstance(unit, Lanes)
        super().__init__(a, np.broadcast_shapes(a.shape[1:], b.shape[1:]), flush=unit.flush, narrow=_narrow(how.accumulator))
        self.a, self.b = (flush_floats(x) if unit.flush else x for x in (a, b))
        self.bias, self.fused, self.quick = bias, fused, fused and not careful
        self.product = _narrow(str(unit.product)) if unit.product is not None else self.narrow
        self.doubtful = np.zeros(self.outputs, bool)
        self.products = self.sums = self.after = np.zeros(0)
        self.before: list[np.ndarray] = []

    def scan(self, turn: Callable[[Any, Turn], Any], state: Any, chain: Chain) -> Any:
        if self.bias is not None:
            sums, running = state if isinstance(state, tuple) else (None, state)
            running = running.copy()
            running[0, 0] = self.bias
            state = running if sums is None else (sums, running)
        return super().scan(turn, state, chain)

    def read(self, places: np.ndarray) -> Iterable[Any]:
        x, y = self.a[places], self.b[places]
        if self.fused and not self.quick:
            return list(zip(x, y, strict=True))
        shape = (*places.shape, *self.outputs)
        if not self.quick:
            products = round_floats(x * y, self.product)
            return np.broadcast_to(flush_floats(products) if self.flush else products, shape)
        self.products = np.broadcast_to(np.multiply(x, y, dtype=np.float64), shape)
        self.sums, self.after, self.before = np.empty(shape), np.empty(shape, np.float32), []
        return range(len(places))

    def accumulate(self, running: np.ndarray, elements: Any) -> np.ndarray:
        if not self.fused:
            return super().accumulate(running, elements)
        if not self.quick:
            x, y = elements
            return self.settle(fma_f32(x, y, running))
        self.before.append(running)
        np.add(self.products[elements], running, out=self.sums[elements])
        self.after[elements] = self.sums[elements]
        if self.flush:
            self.after[elements] = flush_floats(self.after[elements])
        return self.after[elements]

    def end_block(self) -> None:
        if self.quick:
            found = _find_doubtful(self.sums, self.products, self.before, self.after)
            self.doubtful = self.doubtful if found is None else self.doubtful | found


# ---- tensor cores


@partial(jax.jit, static_argnums=(0, 1))
def _segment(model: Any, spec: Any, a: Any, b: Any, running: Any) -> Any:
    return multiply_matrices(model, spec, a, b, running)


def _run_segments(model: Any, spec: Any, a: np.ndarray, b: np.ndarray, running: np.ndarray) -> np.ndarray:
    """Add the products of A [..., M, K] and B [..., N, K] to codes [..., M, N]."""
    codes = jnp.asarray(running)
    for k in range(0, a.shape[-1], SEGMENT):
        x, y = a[..., k : k + SEGMENT], b[..., k : k + SEGMENT].swapaxes(-1, -2)
        codes = _segment(model, spec, jnp.asarray(x), jnp.asarray(y), codes)
    return np.asarray(codes)


class CoreSums(InstructionSums):
    """Sums of products by an instruction, of operands [n, K], or [M, 1, K] and [1, N, K]."""

    def __init__(self, how: Summation, a: np.ndarray, b: np.ndarray) -> None:
        order, unit = how.order, how.order.unit
        assert isinstance(unit, Steps)
        super().__init__(a, np.broadcast_shapes(a.shape[:-1], b.shape[:-1]))
        self.op, self.model = unit.op, unit.arithmetic
        if how.accumulator == "float16":
            narrow = resolve_arithmetic(replace(unit.op, **{"d": F16, unit.op.accumulator_operand: F16}), unit.target)
            self.op, self.model = narrow.op, narrow.model
        self.spec = product_spec(self.op)
        self.a, self.b = (
            pad_last(np.asarray(operand_codes(fmt, order.cast, x)), 1, code)
            for fmt, x, code in ((order.a, a, 1 << (order.a.bits - 1)), (order.b, b, 0))
        )  # the product of the last two is -0, which changes no sum

    def accumulate(self, running: np.ndarray, elements: Any) -> np.ndarray:
        codes = running.astype(FLOATS[self.op.d]).view(self.op.d.dtype)
        return np.asarray(to_float(self.op.d, _chain(self.model, self.spec, self.a[..., elements], self.b[..., elements], codes)))


def pad_last(x: np.ndarray, count: int, value: int) -> np.ndarray:
    """Append elements along the last axis."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count)], constant_values=np.array(value, x.dtype))


def _chain(model: Any, spec: ProductSpec, a: np.ndarray, b: np.ndarray, running: np.ndarray) -> np.ndarray:
    """Run instructions along K from a running sum: codes of the accumulators, [n] or [M, N]."""
    missing = -a.shape[-1] % SEGMENT
    a, b = pad_last(a, missing, 1 << (spec.a.bits - 1)), pad_last(b, missing, 0)
    if a.ndim == 2:
        return _selected(model, spec, a, b, running)
    return _tiled(model, spec, a[:, 0], b[0], running)


def _selected(model: Any, spec: Any, a: np.ndarray, b: np.ndarray, running: np.ndarray) -> np.ndarray:
    n = len(a)
    more = -n % SELECTED
    a, b = (np.pad(x, ((0, more), (0, 0))) for x in (a, b))
    state = np.pad(running, (0, more))
    for start in range(0, len(a), SELECTED):
        pick = slice(start, start + SELECTED)
        state[pick] = _run_segments(model, spec, a[pick, None], b[pick, None], state[pick, None, None]).reshape(-1)
    return state[:n]


def _tiled(model: Any, spec: Any, a: np.ndarray, b: np.ndarray, running: np.ndarray) -> np.ndarray:
    m, n = len(a), len(b)
    down, along = -m % TILE, -n % TILE
    a, b = np.pad(a, ((0, down), (0, 0))), np.pad(b, ((0, along), (0, 0)))
    state = np.pad(running, ((0, down), (0, along)))
    for i in range(0, len(a), TILE):
        for j in range(0, len(b), TILE):
            place = slice(i, i + TILE), slice(j, j + TILE)
            state[place] = _run_segments(model, spec, a[place[0]], b[place[1]], state[place])
    return state[:m, :n]
