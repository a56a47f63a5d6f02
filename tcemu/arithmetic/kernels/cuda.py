"""Fused steps as CUDA kernels. The texts lie in `cuda/`; the shape is an argument at run time, so that each is compiled once an arithmetic.

`tile` has a large tile of D a block and is for large matrices, whose operands `prepare` decodes once. `walk` has one element a thread. It
reads the codes as they are, and takes every order of steps.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import lcm, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.arithmetic.kernels import calls, source, warp
from tcemu.arithmetic.kernels.launch import Entry, launch, route
from tcemu.arithmetic.kernels.source import Numbers, Tiling
from tcemu.arithmetic.model import Model, Promotion, Scales, Signature
from tcemu.formats import F32, Format
from tcemu.formats.coding import recoded
from tcemu.meshes import cut_along_result

MOST_PREPARED = 4 << 30  # bytes of prepared operands at once: of a longer K, part after part
PROGRAMS = 512  # arithmetics whose programs are remembered
WALK_ROWS, WALK_COLUMNS = 16, 8  # elements of D of a block of `walk`
FEW_TILES = 1.5  # large tiles of D for each multiprocessor, below which smaller ones are faster
LEAST_TILE = 32  # rows and columns of D from which on `tile` is faster, though most of its block may be empty


class Kernels(NamedTuple):
    """What the kernels of one arithmetic are compiled for. Hashable: a compiled program belongs to each."""

    numbers: Numbers
    tiling: Tiling | None  # None: `tile` cannot take it
    signature: Signature
    result: Format  # of the steps
    held: tuple[Format, Format]  # of A's and B's codes, which may be others than those of the signature, and are converted

    @property
    def out(self) -> Format:
        """Of D."""
        return F32 if self.numbers.promoted else self.signature.d


def missing() -> str:
    """Why the kernels cannot run on the GPUs that are here; "" if they can."""
    return route().missing


def kernels_of(
    model: Model, signature: Signature, promotion: Promotion | None = None, held: tuple[Format, Format] | None = None
) -> Kernels | None:
    """The kernels that take a model; None where none does: fields are traced, steps are no fused dot-adds, or chains would be promoted.

    held: of A's and B's codes; None: what is multiplied.
    """
    numbers = source.numbers(model, signature)
    if numbers is None or (promotion and numbers.chain):
        return None
    if promotion:
        numbers = numbers._replace(promoted=promotion.instructions, block_scaled=promotion.reach is not None)
    return Kernels(numbers, source.tiling(model, signature), signature, model.result, held or (signature.a, signature.b))


def program(
    model: Model, signature: Signature, promotion: Promotion | None = None, held: tuple[Format, Format] | None = None
) -> Callable[..., Array] | None:
    """The function (a, b, c, scales, block scales) -> D that walks this model's steps; None where no kernel can. Codes as in `product`."""
    kernels = kernels_of(model, signature, promotion, held)
    return None if kernels is None else partial(product, kernels)


def product(kernels: Kernels, a: Array, b: Array, c: Array, scales: Scales | None = None, block_scales: Scales | None = None) -> Array:
    """All steps along K: codes of D.

    a: codes [..., M, K]; b: codes [..., K, N], of whole instructions, as they are held; c: codes [..., M, N] of the steps' results, with
    every batch axis; scales: codes [..., M, S] and [..., S, N]. Where parts of K are promoted, these are whole parts, c and D are f32, and
    block_scales are f32 codes [..., M, parts] and [..., parts, N], or None.
    Under `vmap` the batch grows longer; under a mesh, batch, M and N may be sharded.
    """
    batch, (m, n) = c.shape[:-2], c.shape[-2:]

    def flat(*together: Any) -> list[Array]:
        """One batch axis, of length 1 where these serve all of c."""
        own = jnp.broadcast_shapes(*(jnp.shape(v)[:-2] for v in together))
        own = own if prod(own) == 1 else batch
        return [jnp.broadcast_to(v, (*own, *jnp.shape(v)[-2:])).reshape(-1, *jnp.shape(v)[-2:]) for v in together]

    pairs = [pair for pair in (scales, block_scales) if pair is not None]
    (a, *of_a), (b, *of_b) = flat(a, *(pair[0] for pair in pairs)), flat(b, *(pair[1] for pair in pairs))
    every = [scale for pair in zip(of_a, of_b, strict=True) for scale in pair]
    return _batched(kernels)(a, b, *flat(c), *every).reshape(*batch, m, n)


def _pairs(kernels: Kernels, scales: Sequence[Any]) -> list[Any]:
    """Of the operands after a, b and c: the scales and the block scales, each a pair or None."""
    pairs = iter(zip(scales[::2], scales[1::2], strict=True))
    return [next(pairs) if has else None for has in (kernels.numbers.scaled, kernels.numbers.block_scaled)]


@lru_cache(maxsize=PROGRAMS)
def _batched(kernels: Kernels) -> Callable:
    """`_sharded`, which `vmap` gives a longer batch, not another axis."""

    @jax.custom_batching.custom_vmap
    def batched(*operands: Array) -> Array:
        return _sharded(kernels, tuple(v.shape[0] == 1 for v in operands))(*operands)

    @batched.def_vmap
    def rule(size: int, mapped: tuple[bool, ...], *operands: Array) -> tuple[Array, bool]:
        alone = [not given and at != 2 and len(v) == 1 for at, (v, given) in enumerate(zip(operands, mapped, strict=True))]
        every = [jnp.broadcast_to(v, (size, *v.shape)) if not given else v for v, given in zip(operands, mapped, strict=True)]
        a, b, c, *scales = (v if one else whole for v, whole, one in zip(operands, every, alone, strict=True))
        return product(kernels, a, b, c, *_pairs(kernels, scales)), True

    return batched


@lru_cache(maxsize=PROGRAMS)
def _sharded(kernels: Kernels, alone: tuple[bool, ...]) -> Callable:
    """`_product`, which a mesh may cut along batch, M and N. alone: the operands that serve the whole batch."""
    names = [names for names, pair in zip(("s", "p"), _pairs(kernels, alone[3:]), strict=True) if pair]
    matrices = ("m k", "k n", "m n", *(matrix for name in names for matrix in (f"m {name}", f"{name} n")))
    factors = [f"{f'u{at}' if one else 'b'} {matrix}" for at, (one, matrix) in enumerate(zip(alone, matrices, strict=True))]
    return cut_along_result(partial(_product, kernels), factors, factors[2])


def _product(kernels: Kernels, a: Array, b: Array, c: Array, *scales: Array) -> Array:
    """On one device. a, b: one batch axis, of length 1 where one matrix serves all."""
    m, n = c.shape[1:]
    if a.shape[2] == kernels.signature.k:
        single = warp.kernel_of_matrices(kernels.numbers, kernels.signature, kernels.result, kernels.held, m, n)
        if single is not None:
            return warp.launched_on_matrices(single, a, b, c)
    a, b = recoded(kernels.held[0], kernels.signature.a, a), recoded(kernels.held[1], kernels.signature.b, b)
    tiles = _tiles(kernels, *c.shape)
    if tiles is None or min(m, n) < LEAST_TILE:
        return _by_walk(kernels, a, b, c, *scales)
    k, chain = a.shape[2], kernels.numbers.chain * kernels.numbers.terms
    step = lcm(kernels.signature.k * (kernels.numbers.promoted or 1), chain or 1)
    prepared = (a.size + b.size) * source.bytes_of_step(kernels.numbers, tiles) // kernels.numbers.terms
    length = -(-k // (step * -(-prepared // MOST_PREPARED))) * step  # of K, at once
    for at in range(0, k, length):
        part, *of_a = (v[:, :, at * v.shape[2] // k : min(at + length, k) * v.shape[2] // k] for v in (a, *scales[::2]))
        other, *of_b = (v[:, at * v.shape[1] // k : min(at + length, k) * v.shape[1] // k] for v in (b, *scales[1::2]))
        c = _by_tiles(kernels, tiles, part, other, c, *(scale for pair in zip(of_a, of_b, strict=True) for scale in pair))
    return c


def _tiles(kernels: Kernels, batch: int, m: int, n: int) -> Tiling | None:
    """How `tile` is cut for a result of this shape: smaller where large tiles are too few for all multiprocessors."""
    shared, processors = route().shared_bytes, route().multiprocessors
    large = source.within(kernels.numbers, kernels.tiling, shared)
    if large is not None:
        rows, columns = large.lines
        if kernels.numbers.summed or batch * -(-m // rows) * -(-n // columns) >= FEW_TILES * processors:
            return large
    return source.within(kernels.numbers, kernels.tiling, shared, small=True) or large


def _shape(kernels: Kernels, a: Array, b: Array, c: Array, scales: tuple[Array, ...], limit: int = 0) -> Array:
    """The shape as the kernels have it: see `Shape` in decode.cu."""
    share = a.shape[2] // scales[0].shape[2] if kernels.numbers.scaled else 1
    return calls.numbers(*c.shape, a.shape[2], a.shape[0], b.shape[0], share, limit)


def _by_walk(kernels: Kernels, a: Array, b: Array, c: Array, *scales: Array) -> Array:
    text = source.text("walk", kernels.numbers, kernels.signature, kernels.result)
    batch, m, n = c.shape
    blocks = batch * -(-m // WALK_ROWS) * -(-n // WALK_COLUMNS)
    d = jax.ShapeDtypeStruct(c.shape, kernels.out.dtype)
    return launch(Entry("walk", text, WALK_ROWS * WALK_COLUMNS), blocks, d, _shape(kernels, a, b, c, scales), a, b, c, *scales)[0]


def _by_tiles(kernels: Kernels, tiles: Tiling, a: Array, b: Array, c: Array, *scales: Array) -> Array:
    numbers, (batch, m, n), k = kernels.numbers, c.shape, a.shape[2]
    preparing, text = (source.text(entry, numbers, kernels.signature, kernels.result, tiles) for entry in ("prepare", "tile"))
    (rows, columns), bytes_of_line = tiles.lines, source.bytes_of_step(numbers, tiles)
    down, across, steps = -(-m // rows), -(-n // columns), k // numbers.terms
    parts, sizes = (a.shape[0] * down * steps, b.shape[0] * across * steps), (rows * bytes_of_line, columns * bytes_of_line)
    prepared = tuple(jax.ShapeDtypeStruct(v, jnp.uint8) for v in zip(parts, sizes, strict=True))
    shape, of_units = _shape(kernels, a, b, c, scales, source.limit(tiles, k)), scales[: 2 * numbers.scaled]
    x, y = launch(Entry("prepare", preparing, max(rows, columns)), sum(parts), prepared, shape, a, b, *of_units)
    entry = Entry("tile", text, tiles.threads, source.shared_bytes(numbers, tiles))
    return launch(entry, batch * down * across, jax.ShapeDtypeStruct(c.shape, c.dtype), shape, a, b, c, *scales, x, y)[0]
