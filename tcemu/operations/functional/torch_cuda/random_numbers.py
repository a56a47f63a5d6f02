"""PyTorch's random numbers on a GPU: Philox, which a seed, an offset and the number of a thread determine, and dropout by them.

Each thread of a launch draws from a separate subsequence. A call of `curand_uniform4` gives it four numbers, and a launch moves the
generator's offset by as many as one thread may take. Which element takes which number depends on the launch, and so on the number of
multiprocessors.

Source: PyTorch 2.11.0, aten/src/ATen/native/cuda/Dropout.cu, DistributionTemplates.h and aten/src/ATen/cuda/CUDAGeneratorImpl.cpp;
CUDA 13.0, curand_philox4x32_x.h and curand_uniform.h. Held to words of PyTorch 2.11.0 on an H200:
`tests/operations/functional/test_torch_random.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.reduce_plans import GPUS
from tcemu.operations.quantize.philox import philox

ROUNDS, WORDS = 10, 4  # of Philox, and words that a counter gives: those of one curand_uniform4
THREADS = 256  # of a block
VECTOR_BYTES = 16
TENSOR_STEP = 10  # numbers that `bernoulli_` of a tensor of probabilities asks for
F32 = np.float32


@dataclass
class GpuGenerator:
    """PyTorch's default generator of a GPU.

    Attributes:
        seed: The seed, or None if none was given: then PyTorch draws one.
        offset: Numbers that each thread has taken since the seed.
        lost: Name of an operator whose numbers are not known, after which the offset is not known either.
    """

    seed: int | None = None
    offset: int = 0
    lost: str = ""

    def manual_seed(self, seed: int, offset: int = 0) -> None:
        """Begin anew, as `torch.cuda.manual_seed` does.

        Args:
            seed: The seed; a negative one counts from 2^64.
            offset: What `torch.cuda.default_generators[0].get_offset()` gives, a multiple of 4.

        Raises:
            ValueError: The offset is no multiple of 4.
        """
        if offset < 0 or offset % WORDS:
            raise ValueError(f"offset={offset}: a generator's offset is a multiple of {WORDS}")
        self.seed, self.offset, self.lost = int(seed) % (1 << 64), offset, ""

    def advance(self, step: int) -> tuple[int, int]:
        """Return seed and offset for one launch, and move the offset by a step, rounded up to a multiple of 4.

        Raises:
            NotModelled: No seed was given, or an operator took an unknown number of numbers.
        """
        if self.seed is None:
            raise NotModelled(
                "random numbers: PyTorch draws a seed for the GPU itself; call torch.manual_seed(...) within the block, or "
                "emulated.generator.manual_seed(seed, offset) (torch_cuda/random_numbers.py)"
            )
        if self.lost:
            raise NotModelled(
                f"random numbers: how many {self.lost} took before is not known; torch.manual_seed(...) begins anew "
                "(torch_cuda/random_numbers.py)"
            )
        found = self.seed, self.offset
        self.offset += -(-step // WORDS) * WORDS
        return found


def count_threads(elements: int, gpu: str) -> int:
    """Return the number of threads of a launch over some elements: a block for each 256 of them, as many as run at a time.

    Raises:
        NotModelled: The GPU's number of multiprocessors is not known.
    """
    if gpu not in GPUS:
        raise NotModelled(f"gpu={gpu!r}: the launch depends on its multiprocessors; known: {', '.join(GPUS)} (reduce_plans.GPUS)")
    processors, threads = GPUS[gpu]
    return THREADS * min(processors * (threads // THREADS), -(-elements // THREADS))


def launch_step(elements: int, gpu: str, each: int = WORDS) -> int:
    """Return by how much a launch over some elements moves the generator's offset; each: elements that four words make.

    Nothing is launched for no elements.
    """
    return -(-elements // max(count_threads(elements, gpu) * each, 1)) * WORDS


def philox_words(seed: int, offset: int, threads: int) -> np.ndarray:
    """Return the next four words of each thread, uint32 [threads, 4]. offset: a multiple of 4."""
    return _philox_of_counters(np.array(offset // WORDS, np.uint64), np.arange(threads, dtype=np.uint64), seed, ROUNDS)


def to_uniform(words: np.ndarray) -> np.ndarray:
    """Return words as f32 in (0, 1], as `curand_uniform` does."""
    return words.astype(F32) * F32(2.0**-32) + F32(2.0**-33)


def draw_elements(
    seed: int, offset: int, elements: int, transform: Callable[[np.ndarray], np.ndarray], *, each: int = WORDS, gpu: str = "H200"
) -> np.ndarray:
    """Return the number of each element by a launch whose threads take single elements, a launch's width apart.

    Args:
        seed: The generator's seed.
        offset: Its offset.
        elements: Number of elements, in the order in which the kernel counts them.
        transform: Makes numbers [threads, each] of words uint32 [threads, 4].
        each: Numbers that four words make: 4, or 2 of 64 bits.
        gpu: "H100" or "H200".
    """
    threads = count_threads(elements, gpu)
    calls = -(-elements // max(threads * each, 1))
    found = [transform(philox_words(seed, offset + WORDS * i, threads)).T.reshape(-1) for i in range(calls)]
    return np.concatenate(found or [transform(np.zeros((0, WORDS), np.uint32)).reshape(-1)])[:elements]


def uniform_numbers(seed: int, offset: int, elements: int, *, vector: int = 1, gpu: str = "H200") -> np.ndarray:
    """Return the number of each element, f32.

    Args:
        seed: The generator's seed.
        offset: Its offset.
        elements: Number of elements, in the order in which the kernel counts them.
        vector: Neighbours that a thread takes at a time; 1: single elements, the four of a call a launch's width apart.
        gpu: "H100" or "H200".
    """
    if vector == 1:
        return draw_elements(seed, offset, elements, to_uniform, gpu=gpu)
    threads, calls, found = count_threads(elements, gpu), -(-vector // WORDS), []
    for _ in range(0, elements, max(threads * vector, 1)):
        parts = [to_uniform(philox_words(seed, offset + WORDS * i, threads)) for i in range(calls)]
        found.append(np.concatenate(parts, axis=-1)[:, :vector].reshape(-1))
        offset += WORDS * calls
    return np.concatenate([np.zeros(0, F32), *found])[:elements]


def dropout_vector(elements: int, itemsize: int, *, is_dense: bool = True) -> int:
    """Return the neighbours that a thread of dropout's kernel takes at a time: as many as leave no rest."""
    vector = VECTOR_BYTES // itemsize if is_dense else 1
    while elements % vector:
        vector //= 2
    return vector


def dropout_mask(seed: int, offset: int, elements: int, probability: float, *, vector: int, gpu: str = "H200") -> np.ndarray:
    """Return which elements `native_dropout` keeps, booleans. probability: that an element is dropped; other arguments as above."""
    return uniform_numbers(seed, offset, elements, vector=vector, gpu=gpu) < F32(1.0 - probability)


def drop(x: np.ndarray, mask: np.ndarray, scale: float) -> np.ndarray:
    """Return f32 x · mask · scale, each product rounded: the sign of a dropped element stays, and an infinity becomes NaN."""
    with np.errstate(all="ignore"):
        return x * mask.astype(F32) * F32(scale)


def dropout_scale(probability: float) -> float:
    """Return the factor of what `native_dropout` keeps: the probability to keep is rounded to f32 before it is inverted."""
    return 1.0 / float(F32(1.0 - probability))


def bernoulli_of_tensor(seed: int, offset: int, probabilities: np.ndarray) -> np.ndarray:
    """Return `bernoulli_` by a contiguous tensor of probabilities, booleans: a thread takes four neighbours."""
    flat = probabilities.astype(F32).reshape(-1)
    numbers = to_uniform(philox_words(seed, offset, -(-flat.size // WORDS))).reshape(-1)[: flat.size]
    return (numbers <= flat).reshape(probabilities.shape)


# ---- dropout within attention


class AttentionDropout(NamedTuple):
    """Dropout of the weights of one call of a fused kernel.

    Attributes:
        probability: That a weight is dropped.
        seed: The generator's seed.
        offset: Its offset.
    """

    probability: float
    seed: int
    offset: int


FUSED_ROUNDS = 7  # of Philox in FlashAttention 2 and cuDNN
FLASH_TILE = (16, 32)  # rows and columns of which 32 threads each take 16 bytes of one counter
CUDNN_TILE, CUDNN_LANES = 16, 8  # rows and columns of a tile of cuDNN; its columns that take numbers of one counter


def attention_step(name: str, shape: tuple[int, int, int, int]) -> int:
    """Return by how much PyTorch moves the generator's offset for a fused kernel. shape: batch, heads, queries and keys."""
    batch, heads, queries, keys = shape
    return batch * heads * (32 if name == "flash" else queries * keys)


def attention_mask(name: str, dropout: AttentionDropout, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Return which weights a fused kernel keeps.

    CUTLASS's kernel takes a number for each weight, in the order of memory. FlashAttention 2 compares bytes, whose counter has the tile's
    row and column, and the thread of a warp. cuDNN compares halves of words, whose counter has the head and the column modulo 8, and the
    number of a tile of 16 x 16 weights, column by column: rows r, r + 2, r + 4 and r + 6 of 8 share a number.

    Args:
        name: "cudnn", "flash" or "efficient".
        dropout: The probability and the generator's state.
        shape: Batch, heads, queries and keys.

    Returns:
        Booleans of that shape.

    Raises:
        NotModelled: The kernel is another one.

    Source: PyTorch 2.11.0, mem_eff_attention/kernel_forward.h; FlashAttention 2, csrc/flash_attn/src/dropout.h and philox.cuh.
    """
    batch, heads, queries, keys = shape
    if name == "efficient":
        count = batch * heads * queries * keys
        counters = np.arange(dropout.offset // WORDS, dropout.offset // WORDS + -(-count // WORDS), dtype=np.uint64)
        numbers = to_uniform(_philox_of_counters(counters, np.zeros(1, np.uint64), dropout.seed, ROUNDS)).reshape(-1)[:count]
        return (numbers > F32(dropout.probability)).reshape(shape)
    if name == "cudnn":
        rows, columns = -(-queries // CUDNN_TILE), -(-keys // CUDNN_TILE)
        heads_first = dropout.offset // WORDS + CUDNN_LANES * np.arange(batch * heads, dtype=np.uint64)
        counters = heads_first[:, None, None, None] + np.arange(CUDNN_LANES, dtype=np.uint64)
        tiles = np.arange(rows, dtype=np.uint64)[:, None] + np.arange(columns, dtype=np.uint64) * np.uint64(rows)
        words = _philox_of_counters(counters, tiles[None, :, :, None], dropout.seed, FUSED_ROUNDS)
        # half of a word: half of the rows, half of the columns, and whether the row is odd
        parts = np.ascontiguousarray(words).view(np.uint16).reshape(batch * heads, rows, columns, CUDNN_LANES, 2, 2, 2)
        parts = np.repeat(parts.transpose(0, 1, 4, 6, 2, 5, 3)[:, :, :, None], 4, axis=3)
        laid = parts.reshape(batch, heads, rows * CUDNN_TILE, columns * CUDNN_TILE)[:, :, :queries, :keys]
        return laid <= (1.0 - dropout.probability) * (1 << 16)
    high, wide = FLASH_TILE
    rows, columns = -(-queries // high), -(-keys // wide)
    first = dropout.offset + 32 * np.arange(batch * heads, dtype=np.uint64)
    counters = first[:, None, None, None] + np.arange(32, dtype=np.uint64)
    tiles = np.arange(rows, dtype=np.uint64)[:, None] | np.arange(columns, dtype=np.uint64) << np.uint64(32)
    words = _philox_of_counters(counters, tiles[None, :, :, None], dropout.seed, FUSED_ROUNDS)  # [heads, rows, columns, 32, 4]
    parts = np.ascontiguousarray(words).view(np.uint8)
    # lane: row of 8, pair of columns; byte: half of the columns, 8 columns of it, half of the rows, column of the pair
    parts = parts.reshape(batch * heads, rows, columns, 8, 4, 2, 2, 2, 2).transpose(0, 1, 7, 3, 2, 5, 6, 4, 8)
    laid = parts.reshape(batch, heads, rows * high, columns * wide)[:, :, :queries, :keys]
    return laid <= np.uint8(np.floor(float(F32(1) - F32(dropout.probability)) * 255))


def _philox_of_counters(low: np.ndarray, high: np.ndarray, seed: int, rounds: int) -> np.ndarray:
    """Return the words uint32 [..., 4] of counters of two halves of 64 bits, which broadcast."""
    given = np.broadcast_arrays(low, high)
    halves = [(half >> np.uint64(shift)).astype(np.uint32) for half in given for shift in (0, 32)]
    found = philox(tuple(halves), np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32), rounds)  # type: ignore[arg-type]
    return np.stack([np.asarray(word) for word in found], axis=-1)
