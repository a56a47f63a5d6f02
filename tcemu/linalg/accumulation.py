"""How a kernel walks K with one instruction: chained, promoted to f32 every so many instructions, and in parts whose sums are then added.

What happens outside the instruction is f32, rounded to nearest even, on integers: no flushed subnormals and no contraction but that stated.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from tcemu.arithmetic.fma import add, fma
from tcemu.arithmetic.model import Model, Signature
from tcemu.arithmetic.program import run
from tcemu.arithmetic.quotient import multiply
from tcemu.formats import F32, convert
from tcemu.linalg.gemm import fill, fill_scales

Pair = tuple[Array, Array]  # of A and of B
REDUCTIONS = ("ascending", "tree")


def parts_of(
    model: Model,
    signature: Signature,
    a: Array,
    b: Array,
    unit_scales: Pair | None,
    block_scales: Pair | None,
    *,
    promote: int | Array | None,
    split: int,
    group_sizes: tuple[int | None, int | None] = (None, None),
) -> Array:
    """The sums of `split` parts of K, f32 codes [split, ..., M, N].

    a: codes [..., M, K], b: [..., K, N], K a multiple of signature.k; unit_scales: as `program.run` takes them, or None.
    block_scales: f32 codes [..., groups of M, chunks] and [..., chunks, groups of N] that multiply each chunk of `promote` instructions, or
        None; group_sizes: how many rows of A and columns of B share one, or None for all.
    promote: None: the instruction's accumulator is chained through a part. n: after n instructions their sum, begun at +0, is added to an
        f32 sum, begun at +0: sum = sum + chunk, or with block scales fma(scale_a * scale_b, chunk, sum). An array: the same, traced.
    A part is ceil(chunks / split) chunks; where there is no promotion, a chunk is an instruction. The last parts may be short, or +0.
    """
    chunk = signature.k * (promote if isinstance(promote, int) else 1)
    length = chunk * -(-a.shape[-1] // (chunk * split))  # of a part
    whole = length * split
    unit = None if unit_scales is None else fill_scales(signature, unit_scales, whole)
    block = None if block_scales is None else _fill_chunks(block_scales, whole // chunk)
    a, b = fill(signature, a, b, whole)
    rank = max(v.ndim for v in jax.tree.leaves((a, b, unit, block)))
    cut = partial(_by_piece, split, rank)
    if promote is not None:
        cut = lambda x, axis: _by_piece(length // chunk, rank + 1, _by_piece(split, rank, x, axis), axis)  # noqa: E731
    a, b = cut(a, -1), cut(b, -2)
    unit, block = (None if pair is None else (cut(pair[0], -1), cut(pair[1], -2)) for pair in (unit, block))
    if promote is None:
        return convert(run(model, signature, a, b, _zeros(signature, a, b), unit), signature.d, F32)
    if isinstance(promote, int):
        return _promoted(model, signature, group_sizes, (a, b), unit, block)
    return _promoted_when(promote, model, signature, (a, b), unit)


def reduced(parts: Array, order: str) -> Array:
    """The sum of f32 codes along the first axis, each addition rounded to nearest even.

    order: "ascending": ((p0 + p1) + p2) + ...; "tree": neighbours in pairs, p0 + p1, p2 + p3, ..., an odd one left as it is, and again.
    """
    one = [parts[i] for i in range(parts.shape[0])]
    if order == "ascending":
        total = one[0]
        for part in one[1:]:
            total = add(total, part, F32)
        return total
    while len(one) > 1:
        one = [add(*one[i : i + 2], F32) if i + 1 < len(one) else one[i] for i in range(0, len(one), 2)]
    return one[0]


def _promoted(
    model: Model,
    signature: Signature,
    group_sizes: tuple[int | None, int | None],
    operands: Pair,
    unit_scales: Pair | None,
    scales: Pair | None,
) -> Array:
    """All arrays with the chunks in front."""
    start = _zeros(signature, operands[0][0], operands[1][0])

    def step(total: Array, one: tuple) -> tuple[Array, None]:
        (a, b), unit, block = one
        chunk = convert(run(model, signature, a, b, start, unit), signature.d, F32)
        if block is None:
            return add(total, chunk, F32), None
        return fma(_of_outputs(multiply(block[0], block[1], F32), chunk.shape, group_sizes), chunk, total, F32), None

    return lax.scan(step, jnp.zeros(start.shape, jnp.uint32), (operands, unit_scales, scales))[0]


def _promoted_when(interval: Array, model: Model, signature: Signature, operands: Pair, unit_scales: Pair | None) -> Array:
    """The same with a traced interval: instruction by instruction, and those that are due are promoted."""
    start = _zeros(signature, operands[0][0], operands[1][0])
    count = operands[0].shape[0]

    def step(state: tuple[Array, Array], one: tuple) -> tuple[tuple[Array, Array], None]:
        (total, running), (number, (a, b), unit) = state, one
        running = run(model, signature, a, b, running, unit)
        due = (number % interval == 0) | (number == count)
        total = jnp.where(due, add(total, convert(running, signature.d, F32), F32), total)
        return (total, jnp.where(due, start, running)), None

    numbers = jnp.arange(1, count + 1)
    return lax.scan(step, (jnp.zeros(start.shape, jnp.uint32), start), (numbers, operands, unit_scales))[0][0]


def _of_outputs(scale: Array, shape: tuple[int, ...], group_sizes: tuple[int | None, int | None]) -> Array:
    """The scale of each output, from one for each group of rows and columns."""
    for axis, size in zip((-2, -1), group_sizes, strict=True):
        if size is not None and size > 1:
            scale = lax.slice_in_dim(jnp.repeat(scale, size, axis=axis), 0, shape[axis], axis=axis % scale.ndim)
    return scale


def _zeros(signature: Signature, a: Array, b: Array) -> Array:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.zeros((*batch, a.shape[-2], b.shape[-1]), signature.c.dtype)


def _fill_chunks(scales: Pair, count: int) -> Pair:
    """Zeros for the chunks of zeros."""
    a, b = scales
    missing, batch_a, batch_b = count - a.shape[-1], [(0, 0)] * (a.ndim - 1), [(0, 0)] * (b.ndim - 2)
    return jnp.pad(a, [*batch_a, (0, missing)]), jnp.pad(b, [*batch_b, (0, missing), (0, 0)])


def _by_piece(count: int, rank: int, x: Array, axis: int) -> Array:
    """K in `count` equal pieces, as a new first axis, of an array brought to `rank` axes first."""
    x = x.reshape((1,) * (rank - x.ndim) + x.shape)
    axis += rank
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :]), axis, 0)
