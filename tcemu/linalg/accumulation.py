"""How a kernel walks K with one instruction: chained, promoted to f32 every so many instructions, and in parts whose sums are then added.

What happens outside the instruction is f32, rounded to nearest even, on integers: no flushed subnormals and no contraction but that stated.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.checkify import debug_check

from tcemu.arithmetic.fma import add, fma
from tcemu.arithmetic.model import BEYOND, Model, Promotion, Signature
from tcemu.arithmetic.program import Promoted, multiply_add, promoted
from tcemu.arithmetic.quotient import multiply
from tcemu.formats import F32
from tcemu.formats.coding import recoded
from tcemu.linalg.shapes import Pair, fill, fill_along_k, fill_scales
from tcemu.meshes import alike
from tcemu.quantize.groups import spread

REDUCTIONS = ("ascending", "tree")
MINUS_ZERO = np.uint32(1 << 31)  # of f32


class Blocks(NamedTuple):
    """How far a block scale of each operand reaches; None where there are no blocks, or all share one."""

    rows: tuple[int | None, int | None] = (None, None)  # rows of A, columns of B
    instructions: int | None = None  # along K: of the blocks of A and of B, the greatest common divisor


class Factors(NamedTuple):
    """What is multiplied, each as a pair, of A and of B."""

    codes: Pair  # [..., M, K] and [..., K, N]
    unit_scales: Pair | None  # of the instruction's blocks, as `program.multiply_add` takes them
    # f32 codes [..., groups of M, chunks] and [..., chunks, groups of N]: each chunk's sum is multiplied by them
    block_scales: Pair | None


def sums_of_parts(
    model: Model, signature: Signature, factors: Factors, *, promote: int | Array | None, split: int, blocks: Blocks
) -> Array:
    """The sums of `split` parts of K, f32 codes [split, ..., M, N].

    promote: None: the instruction's accumulator is chained through a part. n: the sum of n instructions, begun at +0, is a chunk, and is
        added to an f32 sum, begun at +0: sum = sum + chunk, or with block scales fma(scale_a * scale_b, chunk, sum). An array: the same,
        traced, with the same bits; its block scales come for each instruction. Below 1, or where it does not divide the depth of the
        blocks, all sums are NaN, and checked mode raises.
    A part is ceil(chunks / split) chunks; where there is no promotion, a chunk is an instruction. The last parts may be short, or +0.
    Raises ValueError for a traced promote with chains that reach beyond one instruction.
    """
    if promote is not None and not isinstance(promote, int):
        return _promoted_when(promote, model, signature, factors, split, blocks)
    (a, b), unit, block = factors
    chunk = signature.k * (promote or 1)
    length = chunk * -(-a.shape[-1] // (chunk * split))  # of a part
    whole = length * split
    unit = None if unit is None else fill_scales(signature, unit, whole)
    block = None if block is None else fill_along_k(block, whole // chunk - block[0].shape[-1], 0)
    factors = Factors(fill(signature, a, b, whole), unit, block)
    cut = partial(_in_pieces, split, max(v.ndim for v in jax.tree.leaves(factors)))
    factors = _map_pairs(lambda pair: (cut(pair[0], -1), cut(pair[1], -2)), factors)
    if promote is None:
        a, b = factors.codes
        return recoded(signature.d, F32, multiply_add(model, signature, a, b, _zeros(signature, a, b), factors.unit_scales))
    return _promoted(model, signature, factors, promote, blocks)


def reduced(parts: Array, order: str) -> Array:
    """The sum of f32 codes along the first axis, each addition rounded to nearest even.

    order: "ascending": ((p0 + p1) + p2) + ...; "tree": neighbours in pairs, p0 + p1, p2 + p3, ..., and so on until one is left. Where the
    number is odd, the last goes on to the next round as it is.
    """
    sums = list(parts)
    if order == "ascending":
        total = sums[0]
        for part in sums[1:]:
            total = add(total, part, F32)
        return total
    while len(sums) > 1:
        sums = [add(*sums[i : i + 2], F32) if i + 1 < len(sums) else sums[i] for i in range(0, len(sums), 2)]
    return sums[0]


def _promoted(model: Model, signature: Signature, factors: Factors, promote: int, blocks: Blocks) -> Array:
    """All chunks of K: in one kernel where there is one, or chunk by chunk."""
    chunks = factors.codes[0].shape[-1] // (signature.k * promote)

    def by_chunks(operands: Promoted) -> Array:
        whole = Factors((operands.a, operands.b), operands.scales, operands.block_scales)
        cut = partial(_in_pieces, chunks, max(v.ndim for v in jax.tree.leaves(whole)))
        in_chunks = _map_pairs(lambda pair: (cut(pair[0], -1), cut(pair[1], -2)), whole)
        start = _start(signature, in_chunks)

        def step(total: Array, chunk: Factors) -> tuple[Array, None]:
            added = multiply_add(model, signature, *chunk.codes, start, chunk.unit_scales)
            return with_chunk(total, added, signature, chunk.block_scales, blocks), None

        return lax.scan(step, alike(jnp.zeros(start.shape, jnp.uint32), *jax.tree.leaves(in_chunks))[0], in_chunks)[0]

    promotion = Promotion(promote, None if factors.block_scales is None else blocks.rows)
    operands = Promoted(*factors.codes, factors.unit_scales, factors.block_scales)
    return promoted(model, signature, promotion, operands, by_chunks)


def with_chunk(total: Array, chunk: Array, signature: Signature, block_scales: Pair | None, blocks: Blocks) -> Array:
    """The f32 sum with a chunk's, which are codes of the instruction's result."""
    added = recoded(signature.d, F32, chunk)
    if block_scales is None:
        return add(total, added, F32)
    scale = multiply(*block_scales, F32)  # of groups of rows and columns
    return fma(spread(scale, added.shape, blocks.rows), added, total, F32)


def whole_interval(interval: Array, blocks: Blocks) -> tuple[Array, Array]:
    """A traced interval as an int32 of 1 or more, and whether it is one that can be: else all sums are NaN, and checked mode raises."""
    info = jnp.iinfo(interval.dtype)
    interval = jnp.clip(interval, max(info.min, -BEYOND), min(info.max, BEYOND)).astype(jnp.int32)
    whole, inside = jnp.maximum(interval, 1), interval >= 1
    if blocks.instructions is not None:
        inside &= blocks.instructions % whole == 0
    debug_check(inside, "a traced promote is below 1, or does not divide the depth of the blocks, which tcemu.Recipe states")
    return whole, inside


def _promoted_when(interval: Array, model: Model, signature: Signature, factors: Factors, split: int, blocks: Blocks) -> Array:
    """`sums_of_parts` with a traced interval: instruction by instruction, and those that are due are promoted to the sum of their part."""
    if isinstance(model.chain, int) and model.chain > signature.k:
        raise ValueError(
            f"Model(chain={model.chain}): a traced promote cuts K after any instruction, of {signature.k} products, and so through chains "
            "that are longer; give promote as an int, or a shorter chain"
        )
    (a, b), unit, block = factors
    count = -(-a.shape[-1] // signature.k)
    filled = signature.k * (count + 1)  # one instruction of zeros at the end, for a last chunk that is not full: see `fill`
    unit = None if unit is None else fill_scales(signature, unit, filled)
    block = None if block is None else (_with_last_again(block[0], -1), _with_last_again(block[1], -2))
    factors = Factors(fill(signature, a, b, filled), unit, block)
    cut = partial(_in_pieces, count + 1, max(v.ndim for v in jax.tree.leaves(factors)))
    factors = _map_pairs(lambda pair: (cut(pair[0], -1), cut(pair[1], -2)), factors)
    interval, inside = whole_interval(interval, blocks)
    chunk = jnp.clip(interval, 1, count + 1)  # instructions; count + 1: one chunk, and it is not full
    length = chunk * -(-count // (chunk * split))  # of a part
    start = _start(signature, factors)

    def step(state: tuple[Array, Array], numbered: tuple[Array, Factors]) -> tuple[tuple[Array, Array], None]:
        (parts, running), (number, instruction) = state, numbered
        running = multiply_add(model, signature, *instruction.codes, running, instruction.unit_scales)
        part, place = number // length, number % length + 1
        due = jnp.where(number == count, count % chunk != 0, place % chunk == 0)
        total = with_chunk(parts[part], running, signature, instruction.block_scales, blocks)
        return (parts.at[part].set(jnp.where(due, total, parts[part])), jnp.where(due, start, running)), None

    zeros = jnp.zeros((split, *start.shape), jnp.uint32)
    parts, running, *_ = alike(zeros, start, *jax.tree.leaves(factors), interval)
    parts = lax.scan(step, (parts, running), (jnp.arange(count + 1), factors))[0][0]
    if block is not None:  # a part that is filled up with chunks of zeros ends with sum + 0
        chunks = -(-count // chunk)
        short = (jnp.arange(split) + 1) * (length // chunk) > chunks
        parts = jnp.where(short.reshape(-1, *[1] * start.ndim) & (parts == MINUS_ZERO), 0, parts)
    return jnp.where(inside, parts, F32.nan)


def _with_last_again(x: Array, axis: int) -> Array:
    """The array with its last place along an axis once more."""
    return jnp.concatenate([x, lax.slice_in_dim(x, x.shape[axis] - 1, None, axis=axis)], axis)


def _map_pairs(of_pair: Callable[[Pair], Pair], factors: Factors) -> Factors:
    codes, unit, block = factors
    return Factors(
        codes=of_pair(codes),
        unit_scales=None if unit is None else of_pair(unit),
        block_scales=None if block is None else of_pair(block),
    )


def _start(signature: Signature, factors: Factors) -> Array:
    """An accumulator of +0 for one chunk."""
    a, b = factors.codes
    return _zeros(signature, a[0], b[0])


def _zeros(signature: Signature, a: Array, b: Array) -> Array:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.zeros((*batch, a.shape[-2], b.shape[-1]), signature.c.dtype)


def _in_pieces(count: int, rank: int, x: Array, axis: int) -> Array:
    """K in `count` equal pieces, as a new first axis, of an array brought to `rank` axes first."""
    x = x.reshape((1,) * (rank - x.ndim) + x.shape)
    axis += rank
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :]), axis, 0)
