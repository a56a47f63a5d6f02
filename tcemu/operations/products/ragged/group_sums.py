"""Sums along K for groups of elements that follow each other: the accumulator restarts where another group's sum begins.

Each sum equals that of `accumulation.partial_sums` over its own elements, rounded at the same points. K is reduced in chunks: the
instructions between two points where a sum may begin or be promoted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tcemu.base.meshes import match_varying_axes
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.formats.coding import recode
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.products.accumulation import Factors, add_chunk, clamp_interval
from tcemu.operations.products.matmul import scale_block_shape
from tcemu.operations.products.recipes import Recipe


class ChunkPlacement(NamedTuple):
    """The sum that a chunk of K belongs to."""

    segment: Array  # int32: index of the sum
    first: Array  # bool: the chunk begins the sum


class RunningSum(NamedTuple):
    """A sum in progress."""

    total: Array  # promoted sum, f32 codes
    accumulator: Array  # the instruction's accumulator, codes of its format
    length: Array  # int32: chunks added


def chunk_length(recipe: Recipe) -> int:
    """Returns the elements along K between two points where a sum may begin or be promoted."""
    return recipe.op.k * (recipe.promote if isinstance(recipe.promote, int) else 1)


def zero_running_sum(recipe: Recipe, m: int, n: int) -> RunningSum:
    spec = product_spec(recipe.op)
    return RunningSum(jnp.zeros((m, n), jnp.uint32), jnp.zeros((m, n), spec.c.dtype), jnp.zeros((), jnp.int32))


def accumulate_chunk(recipe: Recipe, running: RunningSum, factors: Factors) -> tuple[RunningSum, Array]:
    """Adds one chunk. Returns the running sum, and the value if the sum ends here, f32 codes.

    Without promotion a chunk may be several instructions long.
    """
    spec, blocks, (total, accumulator, count) = product_spec(recipe.op), scale_block_shape(recipe), running
    start = jnp.zeros_like(accumulator) if isinstance(recipe.promote, int) else accumulator
    accumulator = multiply_matrices(recipe.arithmetic, spec, *factors.codes, start, factors.unit_scales)
    if recipe.promote is None:
        return RunningSum(total, accumulator, count + 1), recode(spec.d, F32, accumulator)
    promoted = add_chunk(total, accumulator, spec, factors.block_scales, blocks)
    if isinstance(recipe.promote, int):
        return RunningSum(promoted, accumulator, count + 1), promoted
    interval, inside = clamp_interval(recipe.promote, blocks)
    due = (count + 1) % interval == 0
    further = RunningSum(jnp.where(due, promoted, total), jnp.where(due, 0, accumulator), count + 1)
    return further, jnp.where(inside, promoted, F32.nan)


class GroupSums(NamedTuple):
    """The sums of all segments, and the running one."""

    totals: Array  # f32 codes [segments + 1, M, N]; the last is for chunks of no segment
    running: RunningSum


def zero_group_sums(recipe: Recipe, segments: int, m: int, n: int, *like: Array) -> GroupSums:
    """Returns sums of +0 that vary over the mesh axes of the arrays `like`, which will be added."""
    sums = GroupSums(jnp.zeros((segments + 1, m, n), jnp.uint32), zero_running_sum(recipe, m, n))
    leaves, tree = jax.tree.flatten(sums)
    return jax.tree.unflatten(tree, match_varying_axes(*leaves, *like)[: len(leaves)])


def accumulate_chunks(recipe: Recipe, sums: GroupSums, placements: ChunkPlacement, factors: Factors) -> GroupSums:
    """Adds chunks, which are the first axis of all arrays."""

    def step(sums: GroupSums, part: tuple[ChunkPlacement, Factors]) -> tuple[GroupSums, None]:
        (segment, first), factors = part
        running = jax.tree.map(lambda v: jnp.where(first, jnp.zeros_like(v), v), sums.running)
        running, value = accumulate_chunk(recipe, running, factors)
        return GroupSums(lax.dynamic_update_index_in_dim(sums.totals, value, segment, 0), running), None

    return lax.scan(step, sums, (placements, factors))[0]
