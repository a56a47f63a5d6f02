"""Products of matrices of codes that reduce K with `wgmma`."""

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.engine.backends.batched_calls import call_batched, launch_numbers
from tcemu.engine.backends.cuda.xla_launch import KernelEntry, launch
from tcemu.engine.backends.native import native_text as sources
from tcemu.engine.backends.native.native_text import LINE, ROWS, THREADS, WgmmaKernelSpec
from tcemu.engine.formats.number_formats import F16
from tcemu.engine.isa.families import MatrixMultiply

WIDE, NARROW = 256, 128  # columns of D of a block
BUSY = 132  # blocks from which on wide ones are better: one for each of an H100's multiprocessors
PLACING = 256  # threads of a block of `place.cu`
EVERY = (1 << 31) - 1  # rows that share a scale, where all do


class StepSizes(NamedTuple):
    """Products per step of the requested arithmetic and of the instruction that computes it. Zeros fill each step of the latter."""

    requested: int
    own: int


class ChunkPromotion(NamedTuple):
    """Promotion to f32 after a number of instructions of the requested arithmetic; blocks: rows of A, columns of B with one scale."""

    products: int
    rows: int | None = None
    columns: int | None = None
    scaled: bool = False


class WgmmaReduction(NamedTuple):
    """D = A·B + C by `wgmma`, a `BatchedCall` on a, b, c; or, promoted, on a, b and the block scales of both, and D is f32.

    a: codes [batch or 1, M, K]; b: codes [batch or 1, N, K]; c: codes [batch, M, N]; scales: f32 [as a, groups of M, chunks] and
    [as b, chunks, groups of N].
    """

    op: MatrixMultiply
    steps: StepSizes
    promotion: ChunkPromotion | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        if self.promotion is None:
            return "m k", "n k", "m n", "m n"
        # a scale's group of rows may reach over a cut
        return ("m k", "n k", "s t", "t u", "i j") if self.promotion.scaled else ("m k", "n k", "m n")

    @property
    def sharing(self) -> tuple[str, ...]:
        """A and its scales serve the whole batch together, B and its scales too."""
        if self.promotion is None:
            return "a", "b", ""
        return ("a", "b") * (1 + self.promotion.scaled)

    def __call__(self, *operands: Array) -> Array:
        a, b, *others = operands
        (_, m, k), n = a.shape, b.shape[1]
        batch = max(v.shape[0] for v in (a, b, *others))
        columns = self._columns(batch, m, n)
        size = a.dtype.itemsize
        line = LINE // size
        steps = self.steps
        products = k if self.promotion is None else min(k, self.promotion.products)
        filled = -(-products // steps.requested) * steps.own
        chunk = -(-filled // line)  # tiles
        count = -(-k // products)
        tiles = chunk * count
        along = products, chunk * line, steps.requested, steps.own
        x = _place_operand(a, sources.place_kernel_text(size, ROWS), ROWS, tiles, along)
        y = _place_operand(b, sources.place_kernel_text(size, columns), columns, tiles, along)
        scaled = self.promotion is not None and self.promotion.scaled
        kernel = WgmmaKernelSpec(self.op, columns, self.promotion is not None, scaled)
        shape = batch, m, n, tiles, a.shape[0], b.shape[0], chunk, *self._scales(others if scaled else [])
        result = jax.ShapeDtypeStruct((batch, m, n), jnp.uint16 if self.op.d == F16 else jnp.uint32)
        entry = KernelEntry("multiply_by_wgmma", sources.wgmma_kernel_text(kernel), THREADS, kernel.shared_bytes, features="a")
        blocks = batch * -(-m // ROWS) * -(-n // columns)
        return launch(entry, blocks, result, launch_numbers(*shape), x, y, *others)[0]

    def _columns(self, batch: int, m: int, n: int) -> int:
        wide = batch * -(-m // ROWS) * -(-n // WIDE)
        return WIDE if self.promotion is None and wide >= BUSY else NARROW

    def _scales(self, scales: list[Array]) -> tuple[int, ...]:
        if not scales or self.promotion is None:
            return (1,) * 5
        x, y = scales
        return self.promotion.rows or EVERY, self.promotion.columns or EVERY, x.shape[1], y.shape[2], x.shape[2]


def _place_operand(codes: Array, text: str, lines: int, tiles: int, along: tuple[int, ...]) -> Array:
    """A multiplicand as the kernel reads it, [batch, tiles of lines, tiles of K, bytes]. along: see `Places` in place.cu."""
    batch, count, k = codes.shape
    shape = batch, -(-count // lines), tiles, lines * LINE
    pieces = prod(shape) // 16
    result = jax.ShapeDtypeStruct(shape, jnp.uint8)
    entry = KernelEntry("place", text, PLACING)
    return launch(entry, -(-pieces // PLACING), result, launch_numbers(batch, count, k, *shape[1:3], *along), codes)[0]


def multiply_by_wgmma(call: WgmmaReduction, a: Array, b: Array, *others: Array) -> Array:
    """Runs `WgmmaReduction` on a [..., M, K] and b [..., K, N], with any batch axes."""
    return call_batched(call, a, jnp.swapaxes(b, -1, -2), *others)
