"""Sums along K of several products that lie one behind the other: the accumulator starts anew where another product begins.

The sums are those of `accumulation.sums_of_parts`, each from its own beginning, and rounded in the same places.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tcemu.arithmetic.program import multiply_add
from tcemu.formats import F32
from tcemu.formats.coding import recoded
from tcemu.linalg.accumulation import Factors, whole_interval, with_chunk
from tcemu.linalg.matmul import blocks_of
from tcemu.linalg.recipes import Recipe
from tcemu.meshes import alike
from tcemu.operations.operands import signature_of


class Stretch(NamedTuple):
    """Which sum a stretch of K belongs to."""

    segment: Array  # int32: the number of the sum
    first: Array  # bool: it begins it


class Running(NamedTuple):
    """A sum on its way."""

    total: Array  # f32 codes: what is promoted
    accumulator: Array  # the instruction's, codes of its own format
    length: Array  # int32: how many stretches it has


def stretch_length(recipe: Recipe) -> int:
    """Elements along K between two places where a sum may begin or be promoted."""
    return recipe.op.k * (recipe.promote if isinstance(recipe.promote, int) else 1)


def fresh(recipe: Recipe, m: int, n: int) -> Running:
    signature = signature_of(recipe.op)
    return Running(jnp.zeros((m, n), jnp.uint32), jnp.zeros((m, n), signature.c.dtype), jnp.zeros((), jnp.int32))


def advanced(recipe: Recipe, running: Running, factors: Factors) -> tuple[Running, Array]:
    """One stretch further, and the sum as it would end there, f32 codes. factors: the stretch's part of K; without promotion it may be
    several instructions long."""
    signature, blocks, (total, accumulator, count) = signature_of(recipe.op), blocks_of(recipe), running
    start = jnp.zeros_like(accumulator) if isinstance(recipe.promote, int) else accumulator
    accumulator = multiply_add(recipe.arithmetic, signature, *factors.codes, start, factors.unit_scales)
    if recipe.promote is None:
        return Running(total, accumulator, count + 1), recoded(signature.d, F32, accumulator)
    promoted = with_chunk(total, accumulator, signature, factors.block_scales, blocks)
    if isinstance(recipe.promote, int):
        return Running(promoted, accumulator, count + 1), promoted
    interval, inside = whole_interval(recipe.promote, blocks)
    due = (count + 1) % interval == 0
    further = Running(jnp.where(due, promoted, total), jnp.where(due, 0, accumulator), count + 1)
    return further, jnp.where(inside, promoted, F32.nan)


class Sums(NamedTuple):
    """Sums of all segments, f32 codes [segments + 1, M, N], the last for what belongs to none; and the running one."""

    done: Array
    running: Running


def no_sums(recipe: Recipe, segments: int, m: int, n: int, *like: Array) -> Sums:
    """All +0. like: arrays that will be added, for their axes of a mesh."""
    sums = Sums(jnp.zeros((segments + 1, m, n), jnp.uint32), fresh(recipe, m, n))
    leaves, tree = jax.tree.flatten(sums)
    return jax.tree.unflatten(tree, alike(*leaves, *like)[: len(leaves)])


def summed(recipe: Recipe, sums: Sums, stretches: Stretch, factors: Factors) -> Sums:
    """The sums after further stretches, all arrays with these in front."""

    def step(sums: Sums, part: tuple[Stretch, Factors]) -> tuple[Sums, None]:
        (segment, first), factors = part
        running = jax.tree.map(lambda v: jnp.where(first, jnp.zeros_like(v), v), sums.running)
        running, value = advanced(recipe, running, factors)
        return Sums(lax.dynamic_update_index_in_dim(sums.done, value, segment, 0), running), None

    return lax.scan(step, sums, (stretches, factors))[0]
