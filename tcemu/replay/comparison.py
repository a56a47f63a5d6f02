"""What recipes give on drawn operands, beside what a box gives: the elimination of candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.formats import Format
from tcemu.linalg.kernel_recipes import KernelRecipe
from tcemu.linalg.kernel_sums import extras_of, operand_codes, product, run_of
from tcemu.replay.boxes import DTYPES, Box
from tcemu.replay.data import operands

MOST = 48  # different rows of A, and columns of B, in one comparison: the others repeat them, so that every output is compared
SIZES = (1, 2, 4, 8, 16, 24, 32, MOST)  # to which they are filled up, so that programs are shared


TRIES = 36  # of operands, until two recipes are told apart
TELLING = ("window", "zeros", "window", "brink", "window", "subnormal", "window", "ties", "window", "tiny", "window", "brink")


class Telling(NamedTuple):
    """Operands that tell recipes apart: see `sample`."""

    kind: str
    seed: int


class Sample(NamedTuple):
    """One call on drawn operands."""

    kind: str
    held: tuple[Format, Format]
    a: np.ndarray  # codes of different rows
    b: np.ndarray  # codes of different columns
    answer: np.ndarray  # codes, all [M, N]


def sample(box: Box, kind: str, seed: int) -> Sample:
    """Asks the box about drawn operands, whose rows and columns repeat after at most MOST."""
    m, n, k = box.shape
    a, b = operands(kind, seed, box.held, (min(m, MOST), min(n, MOST), k))
    answer = box(a[np.arange(m) % len(a)], b[:, np.arange(n) % b.shape[1]])
    return Sample(kind, box.held, a, b, answer)


def telling_sample(shape: tuple[int, int, int], held: tuple[Format, Format], recipes: Sequence[KernelRecipe], seed: int) -> Telling | None:
    """The first drawn operands on which the first recipe and another one give other bits, at no call of a box; None where none were met."""
    m, n, k = shape
    for number in range(TRIES):
        kind = TELLING[number % len(TELLING)]
        a, b = operands(kind, seed + number, held, (min(m, MOST), min(n, MOST), k))
        asked = Sample(kind, held, a, b, np.zeros((0, 0)))
        first = given(recipes[0], asked)
        if any(unlike(other.out, given(other, asked), first) for other in recipes[1:3]):
            return Telling(kind, seed + number)
    return None


def _filled(x: np.ndarray, rows: int, k: int) -> np.ndarray:
    """More rows, equal to the first, and more places along K, which no order names."""
    x = np.concatenate([x, np.repeat(x[:1], rows - len(x), 0)])
    return np.pad(x, [(0, 0), (0, k - x.shape[1])])


def given(recipe: KernelRecipe, asked: Sample) -> np.ndarray:
    """The codes that a recipe gives on the different rows and columns of a sample. Computed on a CPU."""
    rows, columns, k = len(asked.a), asked.b.shape[1], asked.a.shape[1]
    step = 1 << max(k.bit_length() - 2, 3)
    longer = k + -k % step
    with jax.default_device(jax.devices("cpu")[0]):
        a, b = (
            operand_codes(fmt, recipe.cast, np.ascontiguousarray(x).view(DTYPES[held]))
            for fmt, held, x in (
                (recipe.a, asked.held[0], _filled(asked.a, _size(rows), longer)),
                (recipe.b, asked.held[1], _filled(asked.b.T, _size(columns), longer)),
            )
        )
        run, order = run_of(recipe)
        codes = product(run, jax.tree.map(jnp.asarray, order), a, b.T, extras_of(recipe, (None, None), None))
        return np.asarray(codes)[:rows, :columns]


def _size(count: int) -> int:
    return next(size for size in SIZES if size >= count)


def differing(recipe: KernelRecipe, asked: Sample) -> int:
    """How many outputs of the box a recipe does not give. NaN equals NaN, whatever its word."""
    codes = given(recipe, asked)
    m, n = asked.answer.shape
    return unlike(recipe.out, codes[np.arange(m) % len(codes)][:, np.arange(n) % codes.shape[1]], asked.answer)


def unlike(fmt: Format, x: np.ndarray, y: np.ndarray) -> int:
    """How many codes differ."""
    differ = x != y
    if not differ.any():
        return 0
    both = [v[differ].view(DTYPES[fmt]).astype(np.float32) for v in (x, y)]
    return int((~(np.isnan(both[0]) & np.isnan(both[1]))).sum())
