"""Sums and products in the orders and formats that libraries use, on any selection of outputs.

Orders are kernel recipes. Lanes are computed here in NumPy's float32, whose additions and multiplications are single IEEE operations that
nothing contracts or flushes; tensor-core steps are computed by `tcemu.products.library`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tcemu.formats import BF16, F16, F32, TF32, Format, to_float
from tcemu.products.library.kernel_order import additions, lane_order
from tcemu.products.library.kernel_recipe import KernelRecipe, Lanes, Slices, Steps
from tcemu.products.library.kernel_sums import EpilogueOperands, kernel_output_codes, operand_codes
from tcemu.replay.order_candidates import RESTARTS, candidate_lanes, candidate_steps

CASTS = ((TF32, "RN"), (TF32, "RZ"), (TF32, "RNA"), (BF16, "RN"))  # roundings of f32 operands before they are multiplied
CAST_ORDERS = 40  # orders that are tried with rounded operands
LANE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)  # of replay's candidates
SLICE_COUNTS = (2, 3, 4, 5, 6, 8, 16, 32)
GRAINS = (1, 8, 16, 32, 64)
CHUNK_OUTPUTS = 1 << 14  # outputs that are computed at once
TERMS_AT_ONCE = 1 << 22  # elements of gathered operands at once


@dataclass(frozen=True)
class Summation:
    """The order and the formats in which a sum of products, or of terms, is computed.

    Attributes:
        order: Slices of K, their unit and their merge. Its formats are those that are multiplied; its result is f32.
        accumulator: f32, or a format to which every running sum is rounded. f64: the sum is exact but for one rounding to f32.
        bias_first: A bias is the start of the sum, not added to it.
        of_terms: The sum is of terms, not of products.
    """

    order: KernelRecipe
    accumulator: str = "float32"
    bias_first: bool = False
    of_terms: bool = False

    @property
    def fused(self) -> bool:
        """True if each product and its addition are rounded once. A lane of one product rounds that product."""
        unit = self.order.unit
        return isinstance(unit, Lanes) and unit.fused and not self.of_terms and unit.lanes < self.order.k

    def __str__(self) -> str:
        if self.accumulator == "float64":
            return f"{_operand_words(self.order)}sum in float64, rounded to f32"
        slices = self.order.slices
        words = _operand_words(self.order)
        if isinstance(self.order.unit, Lanes):
            unit = self.order.unit
            plain = unit.lanes == 1 and unit.chunk is None
            pairwise = unit.lanes == self.order.k > 1 and unit.vector == 1
            how = "sequential" if plain else f"pairwise ({unit.join})" if pairwise else _lane_words(unit)
            words += f"{how} sum" + ("" if self.of_terms else ", fma" if self.fused else ", products rounded")
            words += "" if self.accumulator == "float32" else f", running sums rounded to {self.accumulator}"
            words += ", subnormal numbers count as zeros" if unit.flush else ""
        else:
            words += f"tensor core, {self.order.unit}"
        if len(slices.edges) != 2:
            words += f"; {slices}, added {self.order.merge.order}"
        return words + ("; the sum starts at the bias" if self.bias_first else "")


def _operand_words(order: KernelRecipe) -> str:
    if order.a in (TF32,):
        return f"operands rounded to tf32 ({order.cast}); "
    return f"operands rounded to {order.a}; " if order.conditions.evidence == "rounded operands" else ""


def _lane_words(unit: Lanes) -> str:
    words = f"{unit.lanes} lanes of {unit.vector}, joined {unit.join}" if unit.lanes > 1 else "sequential"
    return words + ("" if unit.chunk is None else f", restarted every {unit.chunk}")


def plain_summation(a: Format, b: Format, k: int, *, of_terms: bool = False) -> Summation:
    """Return the sequential sum in f32."""
    return Summation(KernelRecipe(a, b, F32, Lanes(), Slices.single(k)), of_terms=of_terms)


@lru_cache(maxsize=256)
def candidate_summations(a: Format, b: Format, k: int, targets: tuple[str, ...], is_product: bool) -> tuple[Summation, ...]:
    """List the ways in which a library may sum, plain ones first, each schedule once.

    Args:
        a: Format of the left operand.
        b: Format of the right operand.
        k: Number of terms.
        targets: GPUs whose tensor cores are tried.
        is_product: Terms are products. Otherwise they are the left operand, and fma and casts make no difference.
    """
    plain = KernelRecipe(a, b, F32, Lanes(), Slices.single(k))
    inexact = is_product and (a, b) in ((F32, F32), (BF16, F32), (F32, BF16))
    known: set[Any] = set()
    orders: list[KernelRecipe] = []
    for lanes, slices in _lane_schedules(k):
        key = _schedule_key(lanes, slices)
        if key not in known:
            known.add(key)
            orders.append(plain.replace(unit=lanes, slices=slices))
    found = [Summation(order) for order in orders]
    if inexact:
        found += [Summation(_unfused(order)) for order in orders]
    first = orders[0]
    narrow = [Summation(_unfused(order), name) for order, name in product(orders[:4], ("bfloat16", "float16"))]
    found += [*narrow, Summation(first, "float64"), Summation(first, bias_first=True), Summation(_unfused(first), bias_first=True)]
    found += [Summation(first.replace(unit=replace(first.unit, flush=True, fused=fused))) for fused in (True, False)]
    if is_product and (a, b) == (F32, F32):
        for fmt, cast in CASTS:
            conditions = replace(plain.conditions, evidence="rounded operands")
            found += [Summation(order.replace(a=fmt, b=fmt, cast=cast, conditions=conditions)) for order in orders[:CAST_ORDERS]]
    if is_product:
        for fmts in ((TF32, TF32),) if (a, b) == (F32, F32) else ((a, b),):
            for steps in candidate_steps(fmts, targets) if targets and fmts[0] in (TF32, BF16, F16) else ():
                restarts = [None, *(r for r in RESTARTS if r < k and r % steps.op.k == 0)]
                for restart in restarts:
                    found.append(Summation(KernelRecipe(*fmts, F32, replace(steps, restart=restart), Slices.single(k))))
                found += [Summation(KernelRecipe(*fmts, F32, steps, Slices.even(k, count, 64))) for count in (2, 4, 8) if 64 * count <= k]
    return tuple(found) if is_product else tuple(replace(how, of_terms=True) for how in found if not how.bias_first)


def _unfused(order: KernelRecipe) -> KernelRecipe:
    assert isinstance(order.unit, Lanes)
    return order.replace(unit=replace(order.unit, fused=False))


def _lane_schedules(k: int) -> Iterator[tuple[Lanes, Slices]]:
    single = Slices.single(k)
    yield Lanes(), single
    for join in ("tree", "folded"):  # one product in each lane: pairwise
        if k > 1:
            yield Lanes(lanes=k, vector=1, join=join), single
    for count, grain in product(SLICE_COUNTS, GRAINS):
        if -(-k // grain) > 1 and count < k:
            yield Lanes(), Slices.even(k, count, grain)
    yield from ((lanes, single) for lanes in candidate_lanes(k) if lanes.lanes in LANE_COUNTS and lanes.lanes < k)


def _schedule_key(unit: Lanes, slices: Slices) -> Any:
    order = lane_order(unit, slices)
    joined = tuple(additions(unit.join, unit.lanes))
    return order.indices.tobytes(), order.indices.shape, order.closes.tobytes() if order.chunked else b"", joined


# ---- evaluation


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


def _products_in_range(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether all products of two f32 arrays of 16-bit values are normal numbers or zero, so that f32 has them exactly."""
    sizes = [np.abs(x[x != 0]) for x in (a, b)]
    if not all(x.size for x in sizes):
        return True
    least, most = (float(f(sizes[0])) * float(f(sizes[1])) for f in (np.min, np.max))
    return least >= 2.0**-126 and most < 2.0**127


def _flush(x: np.ndarray) -> np.ndarray:
    small = np.abs(x) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), x), x)


def sum_products(how: Summation, a: np.ndarray, b: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Sum the products of rows: f32 [n], before the rounding to the result.

    Args:
        how: The summation.
        a: Values of A for each output, [n, K], in f32 or a narrower format.
        b: Values of B for each output, [n, K].
        bias: Start of the sums, f32 [n], if `how.bias_first`.
    """
    if how.accumulator == "float64":
        with np.errstate(invalid="ignore", over="ignore"):
            return (a.astype(np.float64) * b.astype(np.float64)).sum(-1).astype(np.float32)
    if isinstance(how.order.unit, Steps):
        return _sum_by_tensor_core(how.order, a, b)
    at_once = max(1, min(CHUNK_OUTPUTS, TERMS_AT_ONCE // max(a.shape[-1], 1)))
    parts = [
        _sum_by_lanes(
            how, _cast(how.order, a[i : i + at_once]), _cast(how.order, b[i : i + at_once]), None if bias is None else bias[i : i + at_once]
        )
        for i in range(0, len(a), at_once)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _cast(order: KernelRecipe, x: np.ndarray) -> np.ndarray:
    """Round f32 values to the multiplied format, as f32."""
    if x.dtype != np.float32 or order.a == F32:
        return x.astype(np.float32)
    return _cast_bytes(order.a, order.cast, np.ascontiguousarray(x).tobytes()).reshape(x.shape)


@lru_cache(maxsize=16)  # every order is tried with the same operands
def _cast_bytes(fmt: Format, cast: str, data: bytes) -> np.ndarray:
    return np.asarray(to_float(fmt, operand_codes(fmt, cast, np.frombuffer(data, np.float32))))


def _sum_by_lanes(how: Summation, a: np.ndarray, b: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    order = how.order
    assert isinstance(order.unit, Lanes)
    unit, exact = order.unit, order.a.bits <= 16 and order.b.bits <= 16 and _products_in_range(a, b)
    schedule = lane_order(unit, order.slices)
    n = len(a)
    flush = _flush if unit.flush else lambda x: x
    narrow = None if how.accumulator == "float32" else np.dtype(getattr(ml_dtypes, how.accumulator, how.accumulator))
    rounded = (lambda x: x) if narrow is None else (lambda x: x.astype(narrow).astype(np.float32))
    a = flush(np.concatenate([a, np.full((n, 1), -0.0, np.float32)], 1))  # the product that pads a lane is -0, which changes no sum
    b = flush(np.concatenate([b, np.zeros((n, 1), np.float32)], 1))
    begin = np.float32(-0.0 if unit.start == "first" else 0.0)
    shape = (n, *schedule.indices.shape[1:])
    running, total, begun = np.full(shape, begin), np.full(shape, begin), np.zeros(shape[1:], bool)
    if bias is not None:
        running[:, 0, 0] = bias
    with np.errstate(invalid="ignore", over="ignore"):
        for turn, indices in enumerate(schedule.indices):
            x, y = a[:, indices], b[:, indices]
            if unit.fused and narrow is None and not exact:
                running = flush(fma_f32(x, y, running))
            else:
                running = rounded(flush(running + flush(rounded(x * y))))
            if schedule.chunked:
                closes = schedule.closes[turn]
                closed = np.where(begun, flush(rounded(total + running)), running)
                total = np.where(closes, closed, total)
                begun = begun | closes
                running = np.where(closes, begin, running)
        sums = total if schedule.chunked else running
        for to, origin in additions(unit.join, unit.lanes):
            sums[:, :, to] = rounded(flush(sums[:, :, to] + sums[:, :, origin]))
        last = additions(unit.join, unit.lanes)
        slices = sums[:, :, last[-1][0] if last else 0]
        merges = additions(order.merge.order, slices.shape[1])
        for to, origin in merges:
            slices[:, to] = rounded(flush(slices[:, to] + slices[:, origin]))
    return slices[:, merges[-1][0] if merges else 0].copy()


def _sum_by_tensor_core(order: KernelRecipe, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compute each output as a product of one row and one column, in blocks of one size, so that programs are shared."""
    size = 32 if len(a) <= 32 else 1024
    found = []
    for start in range(0, len(a), size):
        x, y = (np.asarray(_codes(order, fmt, z[start : start + size])) for fmt, z in ((order.a, a), (order.b, b)))
        missing = ((0, size - len(x)), (0, 0))
        x, y = (jnp.asarray(np.pad(z, missing)) for z in (x, y))
        codes = kernel_output_codes(order, x[:, None, :], y[:, :, None], EpilogueOperands())
        found.append(np.asarray(codes).reshape(-1)[: len(a) - start].astype(np.uint32).view(np.float32))
    return np.concatenate(found) if found else np.zeros(0, np.float32)


def _codes(order: KernelRecipe, fmt: Format, x: np.ndarray) -> Any:
    return operand_codes(fmt, order.cast, x)
