"""Mean and variance of rows in one pass, as the kernels of normalisations compute them, in NumPy's f32.

Welford's update takes one element into a mean and a sum of squared differences. Chan's formula joins two such pairs. The kernels differ in
the elements that a lane takes, in the order of the joins, and in the form of both formulas.

Sources, all in PyTorch (pytorch/pytorch, aten/src/ATen/native): `cpu/moments_utils.h` (RowwiseMoments), `SharedReduceOps.h` (WelfordOps)
with `cuda/block_reduce.cuh`, `cuda/layer_norm_kernel.cu`, `cuda/group_norm_kernel.cu`, `cuda/Normalization.cuh`,
`cpu/batch_norm_kernel.cpp`, and `cpu/group_norm_kernel.cpp` before RowwiseMoments (sums of squares). The fma are those of GCC's build for
AVX2, whose words PyTorch 2.13 gives, and of nvcc's build, whose words PyTorch 2.11 gave on an H100 (tests/golden/moments_h100.json.xz).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tcemu.engine.arithmetic.sum_tree import EMPTY, Node, evaluate
from tcemu.engine.formats.number_formats import F32 as NUMBERS
from tcemu.operations.functional.torch_cuda import reductions
from tcemu.operations.functional.torch_cuda.batch_norms import channel_places
from tcemu.operations.functional.torch_cuda.norms import block_tree, group_tree
from tcemu.operations.functional.torch_cuda.numpy_evaluation import fma_f32
from tcemu.operations.functional.torch_cuda.reduce_plans import NORM_THREADS, NORM_VECTOR, WARP, thread_tree
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Lanes, Slices
from tcemu.operations.products.library.numpy_sums import FloatSums
from tcemu.uses.drift.sum_evaluation import sum_products, terms_first
from tcemu.uses.drift.summation import Summation
from tcemu.uses.replay.order_candidates import JOINS

VECTOR, CHUNK = 8, 16  # f32 lanes of a vector of PyTorch on a CPU, also with AVX-512; vectors of a chunk
LANE_COUNTS, VECTORS = (8, 16, 32, 128), (1, 4)  # of sums of squares
F32 = np.float32
NUMPY = reductions.Arithmetic(fma_f32, np.where)
Pair = tuple[np.ndarray, np.ndarray, np.ndarray]  # mean, sum of squared differences, number of elements


class Moments(NamedTuple):
    """The arithmetic of a mean and a variance in one pass.

    Attributes:
        algorithm: A key of ALGORITHMS.
        summation: Order of the sums of x and of x², where the algorithm has them; else None.
    """

    algorithm: str
    summation: Summation | None = None

    def __str__(self) -> str:
        words = ALGORITHMS[self.algorithm].words
        return f"{words}; {self.summation}" if self.summation is not None else words


class Rows(NamedTuple):
    """Rows whose moments are computed.

    Attributes:
        values: f32 [n, K].
        narrow: True if the elements were loaded as 16-bit values.
        inner: Number of neighbouring elements in memory, if a row consists of several parts, as a channel of a batch; else K.
    """

    values: np.ndarray
    narrow: bool
    inner: int


class Algorithm(NamedTuple):
    words: str
    compute: Callable[[Rows, Summation | None], tuple[np.ndarray, np.ndarray]]
    applies: Callable[[int, int], bool] = lambda k, inner: True  # to K and the number of neighbouring elements


def candidate_moments(k: int, inner: int) -> Iterator[Moments]:
    """Yield the arithmetics that are tried for rows of K elements, of which `inner` are neighbours in memory."""
    for name, algorithm in ALGORITHMS.items():
        if algorithm.applies(k, inner):
            yield from (Moments(name, how) for how in (_one_pass_sums(k) if name.startswith("sums") else (None,)))


def _one_pass_sums(k: int) -> Iterator[Summation]:
    """Yield the orders that are tried for sums of x and x²: one lane, or usual numbers of lanes in which vectors are dealt out."""
    lanes = [Lanes(), *(Lanes(*unit) for unit in product(LANE_COUNTS, VECTORS, (None,), JOINS) if unit[0] * unit[1] < k)]
    for unit, fused in product(lanes, (True, False)):
        yield Summation(KernelRecipe(NUMBERS, NUMBERS, NUMBERS, replace(unit, fused=fused), Slices.single(k)))


def mean_and_variance(how: Moments, rows: np.ndarray, inner: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute the mean and the variance (divided by K) of rows.

    Args:
        how: The arithmetic.
        rows: [n, K] in f32, bf16 or f16.
        inner: Number of neighbouring elements in memory.

    Returns:
        f32 [n] of each.
    """
    return _of_bytes(how, np.ascontiguousarray(rows, F32).tobytes(), rows.shape, rows.dtype != F32, inner)


@lru_cache(maxsize=128)  # mean and variance are two nodes of a program, and serve every variant of the rest
def _of_bytes(how: Moments, data: bytes, shape: tuple[int, int], narrow: bool, inner: int) -> tuple[np.ndarray, np.ndarray]:
    rows = Rows(np.frombuffer(data, F32).reshape(shape), narrow, inner)
    with np.errstate(all="ignore"):
        return ALGORITHMS[how.algorithm].compute(rows, how.summation)


# ---- updates and joins


def _multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray, fused: bool) -> np.ndarray:
    return fma_f32(*np.broadcast_arrays(x, y, z)) if fused else np.asarray(x * y + z, F32)


def _empty(shape: tuple[int, ...]) -> Pair:
    return np.zeros(shape, F32), np.zeros(shape, F32), np.zeros(shape[1:], F32)


# ---- GPUs: threads, then lanes of a warp, then warps


class WelfordSums(FloatSums):
    """The algebra of moments in NumPy's f32: values [*grid, 3, n], whose parts are mean, sum of squared differences and count.

    Attributes:
        how: The kernel's update and join.
    """

    def __init__(self, how: reductions.Moments, terms: np.ndarray) -> None:
        super().__init__(terms, (3, terms.shape[1]))
        self.how = how

    def read(self, places: np.ndarray) -> Iterable[Any]:
        return list(zip(self.terms[places], (places != EMPTY)[..., None], strict=True))

    def accumulate(self, running: np.ndarray, elements: Any) -> np.ndarray:
        x, given = elements
        return np.where(given[..., None], np.stack(self.how.update(NUMPY, _parts(running), x), axis=-2), running)

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.stack(self.how.join(NUMPY, _parts(x), _parts(y)), axis=-2)


def _parts(moments: np.ndarray) -> Pair:
    return moments[..., 0, :], moments[..., 1, :], moments[..., 2, :]


def _in_threads(rows: Rows, tree: Node, how: reductions.Moments) -> tuple[np.ndarray, np.ndarray]:
    """Compute the moments of rows by a tree of threads."""
    mean, squares, _ = evaluate(tree, WelfordSums(how, terms_first(rows.values, 0.0)))
    return mean, squares / F32(rows.values.shape[1])


def _cuda_vectorised(rows: Rows, _: Summation | None) -> tuple[np.ndarray, np.ndarray]:
    return _in_threads(rows, block_tree(rows.values.shape[1], NORM_THREADS, NORM_VECTOR), reductions.VECTORISED)


def _cuda_rows(rows: Rows, _: Summation | None) -> tuple[np.ndarray, np.ndarray]:
    return _in_threads(rows, group_tree(rows.values.shape[1]), reductions.WELFORD_OPS)


def _cuda_batch_norm(rows: Rows, _: Summation | None) -> tuple[np.ndarray, np.ndarray]:
    places = channel_places(rows.values.shape[1] // rows.inner, rows.inner)
    return _in_threads(rows, thread_tree(places, far=False, least_warps=WARP), reductions.BATCH_NORM)


# ---- CPUs


def _add_vector(own: Pair, other: Pair, fused: bool) -> Pair:
    """Join as AddMomentsVec."""
    total = own[2] + other[2]
    share = np.broadcast_to(np.where(total > 0, other[2] / np.maximum(total, 1), 0).astype(F32), own[0].shape)
    delta = other[0] - own[0]
    step = share * delta
    return own[0] + step, _multiply_add(delta * own[2], step, own[1] + other[1], fused), total


def _add_scalar(own: Pair, other: Pair, fused: bool) -> Pair:
    """Join as AddMoments, in which the compiler fuses."""
    total = own[2] + other[2]
    share = np.broadcast_to(np.where(total > 0, other[2] / np.maximum(total, 1), 0).astype(F32), own[0].shape)
    delta = other[0] - own[0]
    mean = _multiply_add(share, delta, own[0], fused)
    return mean, own[1] + _multiply_add(delta * delta * share, np.broadcast_to(own[2], delta.shape), other[1], fused), total


def _rowwise_moments(rows: Rows, fused: bool) -> tuple[np.ndarray, np.ndarray]:
    """Compute RowwiseMoments: chunks of vectors, added in a cascade; the remainder; then lane after lane.

    A vector of 16-bit elements is two vectors of f32, which have their own moments in a chunk.
    """
    x, (n, k) = rows.values, rows.values.shape
    parts = 2 if rows.narrow else 1
    vectors = k // (VECTOR * parts)
    loaded = x[:, : vectors * VECTOR * parts].reshape(n, vectors, parts, VECTOR)
    depth = max(max(-(-vectors // CHUNK) - 1, 0).bit_length(), 1)
    stack = [_empty((n, VECTOR))] * depth
    for number, start in enumerate(range(0, vectors, CHUNK), 1):
        chunk = loaded[:, start : start + CHUNK]
        for part in range(parts):
            mean, squares = np.zeros((2, n, VECTOR), F32)
            for j in range(chunk.shape[1]):
                delta = chunk[:, j, part] - mean
                mean = _multiply_add(delta, np.full_like(delta, F32(1) / F32(j + 1)), mean, fused)
                squares = _multiply_add(delta, chunk[:, j, part] - mean, squares, fused)
            stack[0] = _add_vector(stack[0], (mean, squares, np.full(VECTOR, chunk.shape[1], F32)), fused)
        level = 1
        while level < depth and number % (1 << level) == 0:
            stack[level] = _add_vector(stack[level], stack[level - 1], fused)
            stack[level - 1] = _empty((n, VECTOR))
            level += 1
    for level in range(1, depth):
        stack[0] = _add_vector(stack[0], stack[level], fused)
    total = _empty((n,))[0], _empty((n,))[0], np.zeros((), F32)
    for i in range(loaded[0].size, k):
        delta, count = x[:, i] - total[0], total[2] + F32(1)
        mean = total[0] + delta / count
        total = mean, total[1] + delta * (x[:, i] - mean), count
    for lane in range(VECTOR):
        total = _add_scalar(total, (stack[0][0][:, lane], stack[0][1][:, lane], stack[0][2][lane]), fused)
    return total[0], total[1] / F32(k)


def _in_float64(rows: Rows, _: Summation | None) -> tuple[np.ndarray, np.ndarray]:
    """Two passes whose sums are f64, over differences and squares in f32."""
    x = rows.values
    mean = (np.cumsum(x, axis=1, dtype=np.float64)[:, -1] / x.shape[1]).astype(F32)
    delta = x - mean[:, None]
    return mean, np.cumsum(delta * delta, axis=1, dtype=np.float64)[:, -1].astype(F32) / F32(x.shape[1])


def _sums_of_squares(rows: Rows, how: Summation | None, reciprocal: bool) -> tuple[np.ndarray, np.ndarray]:
    assert how is not None
    x, count = rows.values, F32(rows.values.shape[1])
    sums = sum_products(how, x, np.ones((1, x.shape[1]), F32)), sum_products(how, x, x)
    mean, squares = (total * (F32(1) / count) if reciprocal else total / count for total in sums)
    return mean, np.maximum(squares - mean * mean, F32(0))


WELFORD = "Welford's moments of PyTorch"
ALGORITHMS = {
    "cpu": Algorithm(f"{WELFORD} on a CPU, 8 lanes, fma", lambda rows, _: _rowwise_moments(rows, True)),
    "cpu without fma": Algorithm(f"{WELFORD} on a CPU, 8 lanes, products rounded", lambda rows, _: _rowwise_moments(rows, False)),
    "cuda": Algorithm(f"{WELFORD}'s CUDA kernels for rows", _cuda_rows),
    "cuda vectorised": Algorithm(f"{WELFORD}'s vectorised CUDA kernel", _cuda_vectorised, lambda k, inner: k % 4 == 0),
    "cuda batch norm": Algorithm(f"{WELFORD}'s CUDA kernel of batch norm", _cuda_batch_norm, lambda k, inner: inner < k),
    "float64": Algorithm("moments in two passes, with sums in float64", _in_float64),
    "sums of squares": Algorithm("the variance from sums of x and x²", partial(_sums_of_squares, reciprocal=False), lambda k, inner: k > 1),
    "sums of squares, scaled": Algorithm(
        "the variance from sums of x and x² times 1 / K", partial(_sums_of_squares, reciprocal=True), lambda k, inner: k > 1
    ),
}
