"""The order in which PyTorch's reduction kernel adds, as trees: sums, means, norms, products, extremes and variances.

Source: PyTorch 2.13.0, aten/src/ATen/native/cuda/Reduce.cuh (`setReduceConfig`, `thread_reduce_impl`,
`input_vectorized_thread_reduce_impl`, `block_x_reduce`, `block_y_reduce`, `global_reduce`). The words of PyTorch 2.11.0 on an H200 agree:
see `tests/operations/functional/test_torch_cuda.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.engine.arithmetic.sum_tree import EMPTY, Chain, Join, Node

WARP, MAX_THREADS = 32, 512
NORM_THREADS, NORM_VECTOR = 128, 4  # of the vectorised kernel of layer and RMS norm
LEAST_VECTORISED = 128  # terms from which neighbours in memory are loaded as vectors
LEAST_VALUES, MAX_VALUES = 16, 256  # terms of a thread from which warps, and from which blocks share a sum
GPUS = {"H100": (132, 2048), "H200": (132, 2048)}  # multiprocessors, and threads of one


class ReduceCall(NamedTuple):
    """What the launch of a reduction depends on.

    Attributes:
        terms: Number of terms of each sum.
        outputs: Number of sums.
        contiguous: The terms of a sum are neighbours in memory; else the sums are, as those over the first axis.
        unrolled: Accumulators of a thread that loads single elements: `vt0`.
        vector: Elements of a vector, each with an accumulator: `input_vec_size`.
        gpu: A key of GPUS.
        packed: Sums of a thread, where sums are neighbours: 1, 2 or 4.
        is_split: The terms lie along several axes, so that no vectors are loaded.
    """

    terms: int
    outputs: int
    contiguous: bool = True
    unrolled: int = 4
    vector: int = 4
    gpu: str = "H200"
    packed: int = 1
    is_split: bool = False


class ReduceLaunch(NamedTuple):
    """A launch of the kernel: threads that share a sum in x and y, blocks that do, and whether they load vectors."""

    width: int
    height: int
    blocks: int
    vectorised: bool


def _last_power(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def reduce_launch(call: ReduceCall) -> ReduceLaunch:
    """Return the launch of a reduction.

    Raises:
        NotModelled: The GPU's number of multiprocessors is not known.
    """
    if call.gpu not in GPUS:
        raise NotModelled(f"gpu={call.gpu!r}: the launch depends on its multiprocessors; known: {', '.join(GPUS)} (reduce_plans.GPUS)")
    processors, threads = GPUS[call.gpu]
    vectorised = call.contiguous and call.terms >= LEAST_VECTORISED and not call.is_split
    together = call.packed
    x, y = (call.terms // (call.vector if vectorised else 1), call.outputs) if call.contiguous else (call.outputs // together, call.terms)
    most = MAX_THREADS // together
    x, y = (_last_power(n) if n < most else most for n in (x, y))
    height = min(y, most // min(x, WARP))
    width = min(x, most // height)
    step = width if call.contiguous else 1
    step_out = 1 if call.contiguous else width
    values = -(-call.terms // step)
    if values < min(height * LEAST_VALUES, MAX_VALUES):  # each warp has sums of its own
        return ReduceLaunch(width if call.contiguous else 1, 1, 1, vectorised)
    values = -(-call.terms // (step * height))
    grid = -(-(call.outputs // together) // step_out)
    wanted = processors * (threads // (width * height))
    blocks = 1
    if values >= MAX_VALUES and grid <= wanted:
        blocks = max(min(-(-wanted // grid), -(-values // LEAST_VALUES)), -(-values // MAX_VALUES))
    return ReduceLaunch(width if call.contiguous else 1, height, blocks, vectorised)


class ReduceLayout(NamedTuple):
    """The axes of a contiguous array as a reduction takes them.

    Attributes:
        reduced: The axes of the terms, in the order in which they are counted, the slowest first.
        kept: The axes of the sums.
        terms: Number of terms of each sum.
        outputs: Number of sums.
        contiguous: As in `ReduceCall`.
        packed: As in `ReduceCall`.
        is_split: As in `ReduceCall`.
    """

    reduced: tuple[int, ...]
    kept: tuple[int, ...]
    terms: int
    outputs: int
    contiguous: bool
    packed: int
    is_split: bool


@lru_cache(maxsize=1024)
def reduce_layout(shape: tuple[int, ...], axes: tuple[int, ...]) -> ReduceLayout:
    """Return how TensorIterator lays out a reduction of a contiguous array: neighbouring axes become one, reduced axes come first."""
    strides = np.append(np.cumprod(shape[:0:-1])[::-1], 1).tolist() if shape else []
    kept = tuple(axis for axis in range(len(shape)) if axis not in axes)
    parts = []
    for own in (axes, kept):
        merged: list[tuple[int, int]] = []  # (length, stride), the fastest first
        for axis in sorted(own, reverse=True):
            if shape[axis] == 1:
                continue
            if merged and merged[-1][0] * merged[-1][1] == strides[axis]:
                merged[-1] = (merged[-1][0] * shape[axis], merged[-1][1])
            else:
                merged.append((shape[axis], strides[axis]))
        parts.append(merged)
    reduced, others = parts
    terms, outputs = (int(np.prod([shape[axis] for axis in own], dtype=int)) for own in (axes, kept))
    contiguous = not others or (bool(reduced) and reduced[0][1] < others[0][1])
    packed = 1
    if not contiguous and others[0][1] == 1:
        limits = [others[0][0], *(stride for _, stride in reduced), *(stride for _, stride in others[1:])]
        packed = next(size for size in (4, 2, 1) if all(limit % size == 0 for limit in limits))
    return ReduceLayout(tuple(sorted(axes)), kept, terms, outputs, contiguous, packed, len(reduced) > 1)


@lru_cache(maxsize=256)
def reduce_tree(call: ReduceCall, shift: int = 0) -> Node:
    """Return the sum of one output by the places of its terms: accumulators of a thread, threads in x and in y, blocks.

    shift: Elements by which the first term lies after a vector's boundary.
    """
    launch = reduce_launch(call)
    blocks, height, width = launch.blocks, launch.height, launch.width
    threads = blocks * height * width
    places = _vector_places(call, threads, shift) if launch.vectorised else unrolled_places(call.terms, threads, call.unrolled)
    places = places.astype(np.int32).reshape(len(places), blocks, height, width, -1)
    if blocks == 1:
        return _block_sum(places[:, 0])
    rounds = -(-blocks // (height * width))  # the last block's threads take the sums of all blocks in turn
    missing = rounds * height * width - blocks
    places = np.pad(places, [(0, 0), (0, missing), (0, 0), (0, 0), (0, 0)], constant_values=EMPTY)
    places = places.reshape(len(places), rounds, height, width, *places.shape[2:])
    places = places.transpose(0, 3, 2, 1, 4, 5, 6)  # [T, width, height, rounds, height, width, registers]
    return Join(Join(Join(_block_sum(places), from_zero=True), "folded"), "folded")


def _block_sum(places: np.ndarray) -> Node:
    """Return the sums of blocks [...] from elements [T, ..., height, width, registers]."""
    return Join(Join(Join(Chain(places)), "folded"), "folded")


def unrolled_places(terms: int, threads: int, unrolled: int) -> np.ndarray:
    """Return the terms [T, threads, unrolled] of threads that load single elements into accumulators in turn."""
    return strided_places(terms, threads * unrolled).reshape(-1, unrolled, threads).swapaxes(1, 2)


def _vector_places(call: ReduceCall, threads: int, shift: int) -> np.ndarray:
    """Return the terms [T, threads, vector] of threads that load vectors: those before the first vector, the vectors, and those after.

    shift: Elements by which the first term lies after a vector's boundary.
    """
    vector = call.vector
    head = -shift % vector
    vectors, tail = divmod(call.terms - head, vector)
    turns = -(-(call.terms // vector) // threads)
    numbers = np.arange(turns * threads * vector).reshape(turns, threads, vector)
    first, last = np.full((2, 1, threads, vector), EMPTY)
    first[0, vector - head : vector, 0] = np.arange(head)  # thread `shift` takes the first one
    last[0, :tail, 0] = np.arange(call.terms - tail, call.terms)
    return np.concatenate([first, np.where(numbers < vectors * vector, numbers + head, EMPTY), last])


# ---- norms: each row by the threads of a block


def strided_places(columns: int, threads: int, vector: int = 1) -> np.ndarray:
    """Return the elements of each thread [T, threads]: vectors in turn, one element after the other."""
    turns = -(-columns // (threads * vector))
    numbers = np.arange(turns * threads * vector).reshape(turns, threads, vector).swapaxes(1, 2).reshape(-1, threads)
    return np.where(numbers < columns, numbers, EMPTY)


def thread_tree(places: np.ndarray, *, far: bool = True, least_warps: int = 1) -> Node:
    """Return the sums of threads, joined over the lanes of a warp and then over warps.

    Args:
        places: Elements [T, ..., threads], EMPTY for none.
        far: Lanes and warps are joined in halves; else neighbours first.
        least_warps: As many warps are joined at least, empty ones among them, and a power of two.
    """
    *before, threads = places.shape
    lanes = min(WARP, threads)
    warps = threads // lanes
    missing = max(1 << max(warps - 1, 0).bit_length(), least_warps) - warps
    places = np.pad(places.reshape(*before, warps, lanes), [*[(0, 0)] * len(before), (0, missing), (0, 0)], constant_values=EMPTY)
    order = "folded" if far else "tree"
    return Join(Join(Chain(places), order), order)


def is_vectorised_norm(columns: int) -> bool:
    """Return whether layer norm's kernel loads vectors of a row."""
    return columns % NORM_VECTOR == 0
