"""Fused steps as CUDA kernels. The texts lie in `cuda/`; the shape is an argument at run time, so that each is compiled once an arithmetic.

`tile` has a large tile of D a block and is for large matrices, whose operands `prepare` decodes once. `integer` has one element a thread.
It reads the codes as they are, and takes every order of steps.
"""

from functools import lru_cache
from math import lcm
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.engine.architectures.lookup import find_row
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, Promotion, Scales
from tcemu.engine.arithmetic.step.forms import StepNumbers, anchored_form, step_numbers
from tcemu.engine.backends.batched_calls import call_batched, launch_numbers
from tcemu.engine.backends.cuda import kernel_text as source
from tcemu.engine.backends.cuda import register_kernel as warp
from tcemu.engine.backends.cuda.kernel_text import TileNumbers
from tcemu.engine.backends.cuda.xla_launch import KernelEntry, launch, route
from tcemu.engine.formats.coding import recode
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.targets import capability_target

MOST_PREPARED = 4 << 30  # bytes of prepared operands at once: of a longer K, part after part
INTEGER_ROWS, INTEGER_COLUMNS = 16, 8  # elements of D of a block of `integer`
FEW_TILES = 1.5  # large tiles of D for each multiprocessor, below which smaller ones are faster
LEAST_TILE = 32  # rows and columns of D from which on `tile` is faster, though most of its block may be empty


class MatrixKernels(NamedTuple):
    """The kernels of one arithmetic, a `BatchedCall`. Hashable: a compiled program belongs to each."""

    numbers: StepNumbers
    tiling: TileNumbers | None  # None: `tile` cannot take it
    spec: ProductSpec
    result: Format  # format of the steps' results
    stored: tuple[Format, Format]  # formats of the stored codes of A and B, which are converted to those of the spec

    @property
    def result_format(self) -> Format:
        return F32 if self.numbers.promoted else self.spec.d

    @property
    def axes(self) -> tuple[str, ...]:
        scales = [name for name, present in (("s", self.numbers.scaled), ("p", self.numbers.block_scaled)) if present]
        return "m k", "k n", "m n", *(axes for name in scales for axes in (f"m {name}", f"{name} n")), "m n"

    @property
    def sharing(self) -> tuple[str, ...]:
        """A and its scales serve the whole batch together, B and its scales too."""
        return "a", "b", "", *("a", "b") * (self.numbers.scaled + self.numbers.block_scaled)

    def __call__(self, a: Array, b: Array, c: Array, *scales: Array) -> Array:
        """Computes on one device. Operands have one batch axis, of length 1 where one matrix serves the whole batch."""
        return _multiply(self, a, b, c, *scales)


def find_matrix_kernels(
    model: Model, spec: ProductSpec, promotion: Promotion | None = None, stored: tuple[Format, Format] | None = None
) -> MatrixKernels | None:
    """Returns the kernels for a model, or None where fields are traced, steps are no fused dot-adds, or chains would be promoted.

    Args:
        model: The model, specialised to the instruction.
        spec: The formats and modes, A and B as they are multiplied.
        promotion: The promotion of sums outside the instruction, if there is one.
        stored: The formats of the stored codes of A and B; None: those of the spec.
    """
    numbers = step_numbers(model, spec)
    if numbers is None or (promotion and numbers.chain):
        return None
    if promotion:
        numbers = numbers._replace(promoted=promotion.instructions, block_scaled=promotion.scale_block_shape is not None)
    return MatrixKernels(numbers, source.tile_numbers(anchored_form(model, spec)), spec, model.result, stored or (spec.a, spec.b))


def multiply_by_kernels(
    kernels: MatrixKernels, a: Array, b: Array, c: Array, scales: Scales | None = None, block_scales: Scales | None = None
) -> Array:
    """Reduces K and returns codes of D. Under `vmap` the batch grows longer; under a mesh, batch, M and N may be sharded.

    Args:
        kernels: The kernels of the arithmetic.
        a: Stored codes [..., M, K], K in whole instructions.
        b: Stored codes [..., K, N].
        c: Codes [..., M, N] of the steps' results. Where chunks of K are promoted, c and D are f32 and K is whole chunks.
        scales: Codes [..., M, S] and [..., S, N].
        block_scales: f32 codes [..., M, chunks] and [..., chunks, N].
    """
    pairs = [pair for pair in (scales, block_scales) if pair is not None]
    return call_batched(kernels, a, b, c, *(jnp.asarray(scale) for pair in pairs for scale in pair))


def _multiply(kernels: MatrixKernels, a: Array, b: Array, c: Array, *scales: Array) -> Array:
    m, n = c.shape[1:]
    if a.shape[2] == kernels.spec.k:
        single = warp.find_small_matrix_kernel(kernels.numbers, kernels.spec, kernels.result, kernels.stored, m, n)
        if single is not None:
            return warp.launch_on_matrices(single, a, b, c)
    a, b = recode(kernels.stored[0], kernels.spec.a, a), recode(kernels.stored[1], kernels.spec.b, b)
    tiles = _tiles(kernels, *c.shape)
    if tiles is None or min(m, n) < LEAST_TILE:
        return _multiply_in_integers(kernels, a, b, c, *scales)
    k, chain = a.shape[2], kernels.numbers.chain * kernels.numbers.terms
    step = lcm(kernels.spec.k * (kernels.numbers.promoted or 1), chain or 1)
    prepared = (a.size + b.size) * source.step_bytes(kernels.numbers, tiles) // kernels.numbers.terms
    length = -(-k // (step * -(-prepared // MOST_PREPARED))) * step  # of K, at once
    for at in range(0, k, length):
        part, *of_a = (v[:, :, at * v.shape[2] // k : min(at + length, k) * v.shape[2] // k] for v in (a, *scales[::2]))
        other, *of_b = (v[:, at * v.shape[1] // k : min(at + length, k) * v.shape[1] // k] for v in (b, *scales[1::2]))
        c = _multiply_by_tiles(kernels, tiles, part, other, c, *(scale for pair in zip(of_a, of_b, strict=True) for scale in pair))
    return c


def _tiles(kernels: MatrixKernels, batch: int, m: int, n: int) -> TileNumbers | None:
    """Returns the numbers of `tile` for a result of this shape: smaller tiles where large ones are too few for all multiprocessors."""
    shared, processors, own = route().shared_bytes, route().multiprocessors, own_fraction_bits(route().capability)
    large = source.fit_shared_memory(kernels.numbers, kernels.tiling, shared, own_bits=own)
    if large is not None:
        rows, columns = large.lines
        if kernels.numbers.summed or batch * -(-m // rows) * -(-n // columns) >= FEW_TILES * processors:
            return large
    return source.fit_shared_memory(kernels.numbers, kernels.tiling, shared, small=True, own_bits=own) or large


@lru_cache(maxsize=16)
def own_fraction_bits(capability: str) -> int:
    """Fraction bits of the steps of a GPU's own mma of bf16 to f32; 0 where nobody has verified on silicon that it truncates to them."""
    op = parse("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
    row = find_row(op, capability_target(int(capability[:-1]), int(capability[-1])))
    bits, truncates = row.model.fraction_bits, row.model.rounding == row.model.alignment == "RZ" and row.model.result_bits is None
    return bits if isinstance(bits, int) and truncates and row.evidence.level == "silicon" else 0


def _shape(kernels: MatrixKernels, a: Array, b: Array, c: Array, scales: tuple[Array, ...], limit: int = 0) -> Array:
    """The shape as the kernels have it: see `Shape` in decode.cu."""
    share = a.shape[2] // scales[0].shape[2] if kernels.numbers.scaled else 1
    return launch_numbers(*c.shape, a.shape[2], a.shape[0], b.shape[0], share, limit)


def _multiply_in_integers(kernels: MatrixKernels, a: Array, b: Array, c: Array, *scales: Array) -> Array:
    text = source.kernel_text("integer", kernels.numbers, kernels.spec, kernels.result)
    batch, m, n = c.shape
    blocks = batch * -(-m // INTEGER_ROWS) * -(-n // INTEGER_COLUMNS)
    d = jax.ShapeDtypeStruct(c.shape, kernels.result_format.dtype)
    return launch(
        KernelEntry("integer", text, INTEGER_ROWS * INTEGER_COLUMNS), blocks, d, _shape(kernels, a, b, c, scales), a, b, c, *scales
    )[0]


def _multiply_by_tiles(kernels: MatrixKernels, tiles: TileNumbers, a: Array, b: Array, c: Array, *scales: Array) -> Array:
    numbers, (batch, m, n), k = kernels.numbers, c.shape, a.shape[2]
    preparing, text = (source.kernel_text(entry, numbers, kernels.spec, kernels.result, tiles) for entry in ("prepare", "tile"))
    (rows, columns), bytes_of_line = tiles.lines, source.step_bytes(numbers, tiles)
    down, across, steps = -(-m // rows), -(-n // columns), k // numbers.terms
    parts, sizes = (a.shape[0] * down * steps, b.shape[0] * across * steps), (rows * bytes_of_line, columns * bytes_of_line)
    prepared = tuple(jax.ShapeDtypeStruct(v, jnp.uint8) for v in zip(parts, sizes, strict=True))
    shape, of_units = _shape(kernels, a, b, c, scales, tiles.form.exponent_limit(k)), scales[: 2 * numbers.scaled]
    x, y = launch(KernelEntry("prepare", preparing, max(rows, columns)), sum(parts), prepared, shape, a, b, *of_units)
    entry = KernelEntry("tile", text, tiles.threads, source.shared_bytes(numbers, tiles))
    return launch(entry, batch * down * across, jax.ShapeDtypeStruct(c.shape, c.dtype), shape, a, b, c, *scales, x, y)[0]
