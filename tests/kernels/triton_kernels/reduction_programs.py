"""Programs whose kernels reduce, scan, sort, count or update memory atomically."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton_kernels.program_table import EPSILON, Result, as_tensor, floats, integers, program


@triton.jit
def reductions_kernel(x_ptr, sum_ptr, max_ptr, place_ptr, xor_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + rows[:, None] * COLUMNS + columns[None, :])
    tl.store(sum_ptr + columns, tl.sum(x, axis=0))
    largest, place = tl.max(x, axis=1, return_indices=True)
    tl.store(max_ptr + rows, largest)
    tl.store(place_ptr + rows, place)
    tl.store(xor_ptr + rows, tl.xor_sum(x.to(tl.int32), axis=1))


@program("A100")
def sums_and_extrema_along_axes(rng):
    """Integers as f32: every order of the sums is exact, and the first of equal maxima wins."""
    x = integers(rng, -100, 100, 16, 64, dtype=np.float32)
    total, largest, place, bits = np.zeros(64, np.float32), np.zeros(16, np.float32), np.zeros(16, np.int32), np.zeros(16, np.int32)
    reductions_kernel[(1,)](*map(as_tensor, (x, total, largest, place, bits)), ROWS=16, COLUMNS=64, num_warps=2)
    return [
        Result(total, x.sum(0)), Result(largest, x.max(1)), Result(place, x.argmax(1).astype(np.int32)),
        Result(bits, np.bitwise_xor.reduce(x.astype(np.int32), axis=1)),
    ]  # fmt: skip


@triton.jit
def merge_moments(mean, deviation, count, other_mean, other_deviation, other_count):
    """Welford's update for two parts."""
    difference = other_mean - mean
    total = count + other_count
    share = tl.where(total == 0, 0.0, other_count / total)
    return mean + difference * share, deviation + other_deviation + difference * difference * count * share, total


@triton.jit
def welford_kernel(x_ptr, mean_ptr, variance_ptr, COLUMNS: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row * COLUMNS + columns)
    mean, deviation, count = tl.reduce((x, tl.zeros_like(x), tl.full((COLUMNS,), 1.0, tl.float32)), 0, merge_moments)
    tl.store(mean_ptr + row, mean)
    tl.store(variance_ptr + row, deviation / count)


@program("A100")
def mean_and_variance_by_welford(rng):
    """Seven levels, each of some roundings at the size of its terms."""
    x, mean, variance = floats(rng, 4, 128), np.zeros(4, np.float32), np.zeros(4, np.float32)
    welford_kernel[(4,)](*map(as_tensor, (x, mean, variance)), COLUMNS=128)
    wide = x.astype(np.float64)
    return [Result(mean, wide.mean(1), 21 * EPSILON * abs(wide).max()), Result(variance, wide.var(1), 42 * EPSILON * (wide**2).max())]


@triton.jit
def scan_kernel(x_ptr, sum_ptr, product_ptr, reverse_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + place)
    tl.store(sum_ptr + place, tl.cumsum(x, axis=1))
    tl.store(product_ptr + place, tl.cumprod(x % 2 * 2 + 1, axis=0))
    tl.store(reverse_ptr + place, tl.cumsum(x, axis=1, reverse=True))


@program("A100")
def prefix_sums_and_products(rng):
    x = integers(rng, -1000, 1000, 8, 64)
    results = [np.zeros_like(x) for _ in range(3)]
    scan_kernel[(1,)](*map(as_tensor, (x, *results)), ROWS=8, COLUMNS=64, num_warps=4)
    signs = np.sign(x) * (np.abs(x) % 2) * 2 + 1  # Triton's % is that of C
    expected = x.cumsum(1), signs.cumprod(0), x[:, ::-1].cumsum(1)[:, ::-1]
    return [Result(each, np.ascontiguousarray(value).astype(np.int32)) for each, value in zip(results, expected, strict=True)]


@triton.jit
def compose_affine(a, b, other_a, other_b):
    return a * other_a, other_a * b + other_b


@triton.jit
def recurrence_kernel(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, state = tl.associative_scan((tl.load(a_ptr + place), tl.load(b_ptr + place)), 0, compose_affine)
    tl.store(out_ptr + place, state)


@program("A100")
def linear_recurrence_by_a_scan(rng):
    """h = a h + b with powers of two and integers, so that no order rounds: the scan of a state-space model."""
    a, b = np.exp2(integers(rng, -1, 1, 2, 64, dtype=np.float32)), integers(rng, -8, 8, 2, 64, dtype=np.float32)
    a = np.where(np.arange(64) % 8 == 0, 0, a).astype(np.float32)  # short memory: few bits below the unit
    out = np.zeros((2, 64), np.float32)
    recurrence_kernel[(2,)](*map(as_tensor, (a, b, out)), BLOCK=64, num_warps=2)
    expected, state = np.zeros((2, 64)), np.zeros(2)
    for t in range(64):
        state = expected[:, t] = a[:, t] * state + b[:, t]
    return [Result(out, expected.astype(np.float32))]


@triton.jit
def sort_kernel(x_ptr, up_ptr, down_ptr, top_ptr, flipped_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None]
    place = rows * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + place)
    tl.store(up_ptr + place, tl.sort(x, dim=1))
    tl.store(down_ptr + place, tl.sort(x, dim=1, descending=True))
    tl.store(top_ptr + rows * K + tl.arange(0, K)[None, :], tl.topk(x, K, dim=1))
    tl.store(flipped_ptr + place, tl.flip(x, dim=1))


@program("A100")
def sorts_and_top_k(rng):
    x = floats(rng, 4, 32)
    up, down, flipped, top = *(np.zeros_like(x) for _ in range(3)), np.zeros((4, 8), np.float32)
    sort_kernel[(1,)](*map(as_tensor, (x, up, down, top, flipped)), ROWS=4, COLUMNS=32, K=8, num_warps=1)
    falling = np.ascontiguousarray(np.sort(x, axis=1)[:, ::-1])
    return [
        Result(up, np.sort(x, axis=1)), Result(down, falling), Result(top, falling[:, :8].copy()),
        Result(flipped, np.ascontiguousarray(x[:, ::-1])),
    ]  # fmt: skip


@triton.jit
def histogram_kernel(x_ptr, counts_ptr, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    counts = tl.histogram(tl.load(x_ptr + offsets, mask=mask, other=0), BINS, mask=mask)
    tl.atomic_add(counts_ptr + tl.arange(0, BINS), counts)


@program("A100")
def histograms_of_blocks(rng):
    x, counts = integers(rng, 0, 32, 300), np.zeros(32, np.int32)
    histogram_kernel[(3,)](as_tensor(x), as_tensor(counts), 300, BINS=32, BLOCK=128, num_warps=4)
    return [Result(counts, np.bincount(x, minlength=32).astype(np.int32))]


@triton.jit
def atomics_kernel(x_ptr, sum_ptr, low_ptr, high_ptr, and_ptr, or_ptr, last_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    slot = tl.arange(0, BLOCK) % 4
    tl.atomic_add(sum_ptr + slot, x)
    tl.atomic_min(low_ptr + slot, x)
    tl.atomic_max(high_ptr + slot, x, mask=x % 2 == 0)
    tl.atomic_and(and_ptr + slot, x)
    tl.atomic_or(or_ptr + slot, x)
    old = tl.atomic_cas(last_ptr, 0, 7)
    tl.atomic_xchg(last_ptr + 1 + old, tl.program_id(0) + 1)


@program("A100")
def atomic_operations_on_integers(rng):
    """The first program finds 0 in `last` and writes behind it; the others find 7."""
    x = integers(rng, 0, 1 << 20, 2, 64)
    total, low, high, every, some = (np.full(4, start, np.int32) for start in (0, 1 << 30, -1, -1, 0))
    last = np.zeros(9, np.int32)
    atomics_kernel[(2,)](*map(as_tensor, (x, total, low, high, every, some, last)), BLOCK=64, num_warps=1)
    groups = x.reshape(-1, 4)
    return [
        Result(total, groups.sum(0).astype(np.int32)), Result(low, groups.min(0)),
        Result(high, np.where(groups % 2 == 0, groups, -1).max(0).astype(np.int32)),
        Result(every, np.bitwise_and.reduce(groups, axis=0)), Result(some, np.bitwise_or.reduce(groups, axis=0)),
        Result(np.sort(last), np.array([0] * 6 + [1, 2, 7], np.int32)),
    ]  # fmt: skip


@triton.jit
def atomic_sum_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(out_ptr, tl.sum(x))


@program("A100")
def atomic_sum_of_floats(rng):
    """No order is promised; of at most 256 sums each rounds at no more than the sum of the magnitudes."""
    x, out = floats(rng, 4, 64), np.zeros(1, np.float32)
    atomic_sum_kernel[(4,)](as_tensor(x), as_tensor(out), BLOCK=64)
    return [Result(out, x.astype(np.float64).sum(keepdims=True).ravel(), 256 * EPSILON / 2 * abs(x).sum())]


@triton.jit
def segment_kernel(x_ptr, starts_ptr, out_ptr, COLUMNS: tl.constexpr):
    """The sums of the rows of a group, whose bounds are data."""
    group, columns = tl.program_id(0), tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for row in range(tl.load(starts_ptr + group), tl.load(starts_ptr + group + 1)):
        total += tl.load(x_ptr + row * COLUMNS + columns)
    tl.store(out_ptr + group * COLUMNS + columns, total)


@program("A100")
def sums_of_groups_of_rows(rng):
    """One sum after the other, in the order of the rows, as NumPy's cumulative sum."""
    x, starts, out = floats(rng, 20, 32), np.array([0, 3, 3, 11, 20], np.int32), np.zeros((4, 32), np.float32)
    segment_kernel[(4,)](*map(as_tensor, (x, starts, out)), COLUMNS=32, num_warps=1)
    zero = np.zeros((1, 32), np.float32)
    groups = (np.concatenate([zero, x[first:last]]) for first, last in pairwise(starts))
    return [Result(out, np.stack([group.cumsum(0)[-1] for group in groups]))]


@triton.jit
def entropy_kernel(logits_ptr, labels_ptr, loss_ptr, gradient_ptr, COLUMNS: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, COLUMNS)
    x = tl.load(logits_ptr + row * COLUMNS + columns).to(tl.float32)
    label = tl.load(labels_ptr + row)
    x -= tl.max(x, axis=0)
    weights = tl.exp(x)
    total = tl.sum(weights, axis=0)
    tl.store(loss_ptr + row, tl.log(total) - tl.sum(tl.where(columns == label, x, 0.0), axis=0))
    tl.store(gradient_ptr + row * COLUMNS + columns, weights / total - tl.where(columns == label, 1.0, 0.0))


@program("H100")
def cross_entropy_of_bf16_logits(rng):
    """ex2.approx and lg2.approx err by 2^-22 of their results or, near 1, of 1; arguments of up to 12 are rounded twice before."""
    x, labels = (3 * floats(rng, 6, 128)).astype(ml_dtypes.bfloat16), integers(rng, 0, 128, 6)
    loss, gradient = np.zeros(6, np.float32), np.zeros((6, 128), np.float32)
    entropy_kernel[(6,)](*map(as_tensor, (x, labels, loss, gradient)), COLUMNS=128)
    wide = x.astype(np.float64) - x.astype(np.float64).max(1, keepdims=True)
    total = np.exp(wide).sum(1)
    one_hot = np.eye(128)[labels]
    size = abs(wide).max()
    return [
        Result(loss, np.log(total) - (wide * one_hot).sum(1), 16 * EPSILON * (1 + size)),
        Result(gradient, np.exp(wide) / total[:, None] - one_hot, 8 * EPSILON * (1 + size)),
    ]


@triton.jit
def quick_select_kernel(x_ptr, out_ptr, k, BLOCK: tl.constexpr):
    """The k-th smallest number by bisection over the bits: reductions within a loop."""
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    low = 0
    for bit in tl.static_range(20):
        trial = low + (1 << (19 - bit))
        low = tl.where(tl.sum((x < trial).to(tl.int32), axis=0) <= k, trial, low)
    tl.store(out_ptr, low)


@program("A100")
def selection_by_bisection(rng):
    x, out = integers(rng, 0, 1 << 20, 128), np.zeros(1, np.int32)
    quick_select_kernel[(1,)](as_tensor(x), as_tensor(out), 40, BLOCK=128, num_warps=4)
    return [Result(out, np.sort(x)[40:41])]
