"""Products of matrices of codes that walk K with `wgmma`."""

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.arithmetic.kernels.calls import numbers, run
from tcemu.arithmetic.kernels.launch import Entry, launch
from tcemu.formats import F16
from tcemu.isa.instructions import Instruction
from tcemu.native import sources
from tcemu.native.sources import LINE, ROWS, THREADS, Tiled

WIDE, NARROW = 256, 128  # columns of D of a block
BUSY = 132  # blocks from which on wide ones are better: one for each of an H100's multiprocessors
PLACING = 256  # threads of a block of `place.cu`
EVERY = (1 << 31) - 1  # rows that share a scale, where all do


class Steps(NamedTuple):
    """Products of a step of the arithmetic that is asked for, and of the instruction that runs it: zeros stand behind the first."""

    asked: int
    own: int


class Promotion(NamedTuple):
    """Sums of so many instructions of the arithmetic that is asked for are added in f32; blocks: rows of A, columns of B with one scale."""

    products: int
    rows: int | None = None
    columns: int | None = None
    scaled: bool = False


class Product(NamedTuple):
    """D = A·B + C by `wgmma`, a call of `calls.run` on a, b, c; or, promoted, on a, b and the block scales of both, and D is f32.

    a: codes [batch or 1, M, K]; b: codes [batch or 1, N, K]; c: codes [batch, M, N]; scales: f32 [as a, groups of M, chunks] and
    [as b, chunks, groups of N].
    """

    op: Instruction
    steps: Steps
    promotion: Promotion | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        if self.promotion is None:
            return "m k", "n k", "m n", "m n"
        # a scale's group of rows may reach over a cut
        return ("m k", "n k", "s t", "t u", "i j") if self.promotion.scaled else ("m k", "n k", "m n")

    @property
    def shared(self) -> tuple[bool, ...]:
        given = len(self.axes) - 1
        return tuple(not (self.promotion is None and at == 2) for at in range(given))

    def __call__(self, *operands: Array) -> Array:
        a, b, *others = operands
        (_, m, k), n = a.shape, b.shape[1]
        batch = max(v.shape[0] for v in (a, b, *others))
        columns = self._columns(batch, m, n)
        size = a.dtype.itemsize
        line = LINE // size
        steps = self.steps
        products = k if self.promotion is None else min(k, self.promotion.products)
        filled = -(-products // steps.asked) * steps.own
        chunk = -(-filled // line)  # tiles
        count = -(-k // products)
        tiles = chunk * count
        along = products, chunk * line, steps.asked, steps.own
        x = _placed(a, sources.place(size, ROWS), ROWS, tiles, along)
        y = _placed(b, sources.place(size, columns), columns, tiles, along)
        scaled = self.promotion is not None and self.promotion.scaled
        kernel = Tiled(self.op, columns, self.promotion is not None, scaled)
        shape = batch, m, n, tiles, a.shape[0], b.shape[0], chunk, *self._scales(others if scaled else [])
        result = jax.ShapeDtypeStruct((batch, m, n), jnp.uint16 if self.op.d == F16 else jnp.uint32)
        entry = Entry("multiply_by_wgmma", sources.tiled(kernel), THREADS, kernel.shared_bytes, features="a")
        blocks = batch * -(-m // ROWS) * -(-n // columns)
        return launch(entry, blocks, result, numbers(*shape), x, y, *others)[0]

    def _columns(self, batch: int, m: int, n: int) -> int:
        wide = batch * -(-m // ROWS) * -(-n // WIDE)
        return WIDE if self.promotion is None and wide >= BUSY else NARROW

    def _scales(self, scales: list[Array]) -> tuple[int, ...]:
        if not scales or self.promotion is None:
            return (1,) * 5
        x, y = scales
        return self.promotion.rows or EVERY, self.promotion.columns or EVERY, x.shape[1], y.shape[2], x.shape[2]


def _placed(codes: Array, text: str, lines: int, tiles: int, along: tuple[int, ...]) -> Array:
    """A multiplicand as the kernel reads it, [batch, tiles of lines, tiles of K, bytes]. along: see `Places` in place.cu."""
    batch, count, k = codes.shape
    shape = batch, -(-count // lines), tiles, lines * LINE
    pieces = prod(shape) // 16
    result = jax.ShapeDtypeStruct(shape, jnp.uint8)
    entry = Entry("place", text, PLACING)
    return launch(entry, -(-pieces // PLACING), result, numbers(batch, count, k, *shape[1:3], *along), codes)[0]


def product(call: Product, a: Array, b: Array, *others: Array) -> Array:
    """`Product` under `vmap` and sharding, on b as [batch or 1, K, N]."""
    return run(call, a, jnp.swapaxes(b, 1, 2), *others)
