"""Reduction over K with one instruction: chained, promoted to f32 after every n instructions, and in parts whose sums are then added.

Arithmetic outside the instruction is f32, rounded to nearest even, on integers: subnormals are kept, and nothing is contracted unless
stated.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.checkify import debug_check

from tcemu.base.meshes import match_varying_axes
from tcemu.engine.arithmetic.fma import add, fma
from tcemu.engine.arithmetic.model import OUT_OF_RANGE, Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, Promotion
from tcemu.engine.backends.dispatch import PromotedOperands, multiply_matrices, multiply_promoted
from tcemu.engine.backends.quotients import multiply
from tcemu.engine.formats.coding import recode
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.products.product_arguments import OperandPair, pad_along_k, pad_k, pad_scales
from tcemu.operations.quantize.scale_groups import broadcast_scales

REDUCTIONS = ("ascending", "tree")
MINUS_ZERO = np.uint32(1 << 31)  # f32 code


class ScaleBlockShape(NamedTuple):
    """The extent of a block scale of each operand. None: no blocks, or one scale for all."""

    rows: tuple[int | None, int | None] = (None, None)  # rows of A, columns of B
    instructions: int | None = None  # instructions along K: the greatest common divisor of A's and B's blocks


class Factors(NamedTuple):
    """The factors of a product, pairs for A and B."""

    codes: OperandPair  # [..., M, K] and [..., K, N]
    unit_scales: OperandPair | None  # scales of the instruction's blocks, as `dispatch.multiply_matrices` takes them
    block_scales: OperandPair | None  # f32 codes that multiply chunks' sums, [..., groups of M, chunks] and [..., chunks, groups of N]


def partial_sums(
    model: Model, spec: ProductSpec, factors: Factors, *, promote: int | Array | None, split_k: int, blocks: ScaleBlockShape
) -> Array:
    """Computes the sums of `split_k` parts of K.

    A part is ceil(chunks / split_k) chunks; without promotion a chunk is an instruction. The last parts may be short, or +0.

    Args:
        model: The arithmetic of the instruction.
        spec: The instruction's types and modes.
        factors: Codes and scales of A and B; B is a transposition, since operands are quantised along their last axis.
        promote: None: the instruction's accumulator is chained through a part. n: the sum of n instructions, begun at +0, is a chunk; it is
            added to an f32 sum, begun at +0: sum + chunk, or with block scales fma(scale_a * scale_b, chunk, sum). An array: the same,
            traced, with the same bits and with block scales per instruction. Where it is below 1 or does not divide the depth of the
            blocks, all sums are NaN, and checked mode raises.
        split_k: Number of parts.
        blocks: Extent of the block scales.

    Returns:
        f32 codes [split_k, ..., M, N].

    Raises:
        ValueError: a traced promote, and a model with chains that span several instructions.
    """
    if promote is not None and not isinstance(promote, int):
        return _sum_traced_promotion(promote, model, spec, factors, split_k, blocks)
    (a, b), unit, block = factors
    chunk = spec.k * (promote or 1)
    length = chunk * -(-a.shape[-1] // (chunk * split_k))  # elements of a part
    whole = length * split_k
    unit = None if unit is None else pad_scales(spec, unit, whole)
    block = None if block is None else pad_along_k(block, whole // chunk - block[0].shape[-1], 0)
    factors = Factors(pad_k(spec, a, b, whole), unit, block)
    factors = _split_factors(factors, split_k)
    if promote is None:
        a, b = factors.codes
        d = multiply_matrices(model, spec, a, b, _zero_accumulator(spec, a, b), factors.unit_scales, by_columns=True)
        return recode(spec.d, F32, d)
    return _sum_promoted_chunks(model, spec, factors, promote, blocks)


def reduce_partial_sums(parts: Array, order: str) -> Array:
    """Adds f32 codes along the first axis, each addition rounded to nearest even.

    order: "ascending": ((p0 + p1) + p2) + ...; "tree": neighbours in pairs, p0 + p1, p2 + p3, ..., until one is left. With an odd number
    the last goes to the next round unchanged.
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


def _sum_promoted_chunks(model: Model, spec: ProductSpec, factors: Factors, promote: int, blocks: ScaleBlockShape) -> Array:
    """Adds all chunks of K: in one kernel where a backend has one, else chunk by chunk."""
    chunks = factors.codes[0].shape[-1] // (spec.k * promote)

    def by_chunks(operands: PromotedOperands) -> Array:
        whole = Factors((operands.a, operands.b), operands.scales, operands.block_scales)
        in_chunks = _split_factors(whole, chunks)
        start = _zero_accumulator(spec, *(x[0] for x in in_chunks.codes))

        def step(total: Array, chunk: Factors) -> tuple[Array, None]:
            added = multiply_matrices(model, spec, *chunk.codes, start, chunk.unit_scales)
            return add_chunk(total, added, spec, chunk.block_scales, blocks), None

        return lax.scan(step, match_varying_axes(jnp.zeros(start.shape, jnp.uint32), *jax.tree.leaves(in_chunks))[0], in_chunks)[0]

    promotion = Promotion(promote, None if factors.block_scales is None else blocks.rows)
    operands = PromotedOperands(*factors.codes, factors.unit_scales, factors.block_scales)
    return multiply_promoted(model, spec, promotion, operands, by_chunks)


def add_chunk(total: Array, chunk: Array, spec: ProductSpec, block_scales: OperandPair | None, blocks: ScaleBlockShape) -> Array:
    """Adds a chunk's sum, codes of the instruction's result, to the f32 sum."""
    added = recode(spec.d, F32, chunk)
    if block_scales is None:
        return add(total, added, F32)
    scale = multiply(*block_scales, F32)  # per group of rows and columns
    return fma(broadcast_scales(scale, added.shape, blocks.rows), added, total, F32)


def clamp_interval(interval: Array, blocks: ScaleBlockShape) -> tuple[Array, Array]:
    """Returns a traced interval as an int32 of 1 or more, and a flag that it is valid. Checked mode raises where it is not."""
    info = jnp.iinfo(interval.dtype)
    interval = jnp.clip(interval, max(info.min, -OUT_OF_RANGE), min(info.max, OUT_OF_RANGE)).astype(jnp.int32)
    whole, inside = jnp.maximum(interval, 1), interval >= 1
    if blocks.instructions is not None:
        inside &= blocks.instructions % whole == 0
    debug_check(inside, "a traced promote is below 1, or does not divide the depth of the blocks, which tcemu.Recipe states")
    return whole, inside


def _sum_traced_promotion(interval: Array, model: Model, spec: ProductSpec, factors: Factors, split: int, blocks: ScaleBlockShape) -> Array:
    """Computes `partial_sums` with a traced interval: instruction by instruction, promoting where it is due."""
    if isinstance(model.chain, int) and model.chain > spec.k:
        raise ValueError(
            f"Model(chain={model.chain}): a traced promote cuts K after any instruction, of {spec.k} products, and so within "
            "longer chains; give promote as an int, or a shorter chain"
        )
    (a, b), unit, block = factors
    count = -(-a.shape[-1] // spec.k)
    filled = spec.k * (count + 1)  # one instruction of zeros at the end, for a last chunk that is not full: see `pad_k`
    unit = None if unit is None else pad_scales(spec, unit, filled)
    block = None if block is None else (_repeat_last(block[0], -1), _repeat_last(block[1], -2))
    factors = Factors(pad_k(spec, a, b, filled), unit, block)
    factors = _split_factors(factors, count + 1)
    interval, inside = clamp_interval(interval, blocks)
    chunk = jnp.clip(interval, 1, count + 1)  # instructions; count + 1: a single chunk that is not full
    length = chunk * -(-count // (chunk * split))  # elements of a part
    start = _zero_accumulator(spec, *(x[0] for x in factors.codes))

    def step(state: tuple[Array, Array], numbered: tuple[Array, Factors]) -> tuple[tuple[Array, Array], None]:
        (parts, running), (number, instruction) = state, numbered
        running = multiply_matrices(model, spec, *instruction.codes, running, instruction.unit_scales)
        part, place = number // length, number % length + 1
        due = jnp.where(number == count, count % chunk != 0, place % chunk == 0)
        total = add_chunk(parts[part], running, spec, instruction.block_scales, blocks)
        return (parts.at[part].set(jnp.where(due, total, parts[part])), jnp.where(due, start, running)), None

    zeros = jnp.zeros((split, *start.shape), jnp.uint32)
    parts, running, *_ = match_varying_axes(zeros, start, *jax.tree.leaves(factors), interval)
    parts = lax.scan(step, (parts, running), (jnp.arange(count + 1), factors))[0][0]
    if block is not None:  # a part that is padded with chunks of zeros ends with sum + 0
        chunks = -(-count // chunk)
        short = (jnp.arange(split) + 1) * (length // chunk) > chunks
        parts = jnp.where(short.reshape(-1, *[1] * start.ndim) & (parts == MINUS_ZERO), 0, parts)
    return jnp.where(inside, parts, F32.nan)


def _repeat_last(x: Array, axis: int) -> Array:
    """Repeats the last slice along an axis."""
    return jnp.concatenate([x, lax.slice_in_dim(x, x.shape[axis] - 1, None, axis=axis)], axis)


def _zero_accumulator(spec: ProductSpec, a: Array, b: Array) -> Array:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.zeros((*batch, a.shape[-2], b.shape[-1]), spec.c.dtype)


def _split_factors(factors: Factors, count: int) -> Factors:
    """Splits K into `count` equal pieces, a new first axis of all factors, which get the same number of axes."""
    rank = max(v.ndim for v in jax.tree.leaves(factors))

    def split(x: Array, axis: int) -> Array:
        x = x.reshape((1,) * (rank - x.ndim) + x.shape)
        axis += rank
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :]), axis, 0)

    def split_pair(pair: OperandPair) -> OperandPair:
        return split(pair[0], -1), split(pair[1], -2)

    codes, unit, block = factors
    return Factors(split_pair(codes), None if unit is None else split_pair(unit), None if block is None else split_pair(block))
