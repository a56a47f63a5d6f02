"""The sums of ragged products: quantised group by group, multiplied tile by tile.

A scale is never shared by two groups, and blocks begin anew with each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax

from tcemu.arithmetic.model import Signature
from tcemu.linalg.accumulation import Factors, reduced
from tcemu.linalg.arguments import product_keys
from tcemu.linalg.matmul import chunk_scales, rounded_result, scaled, scales_at_promotion, sum_of_quantized
from tcemu.linalg.recipes import Recipe
from tcemu.linalg.segments import Stretch, no_sums, stretch_length, summed
from tcemu.linalg.tiles import Tiles, in_tiles, tile_size
from tcemu.operations.operands import signature_of
from tcemu.quantize.operands import Quantized, Scheme, largest, quantize, scale_of_largest

MOST_ROWS, MOST_DEPTH = 512, 1024  # of a tile


class Operands(NamedTuple):
    """All that is traced. The shapes, by form, with B places of a batch, G groups, and K last:

    rows: A [B, X, R, K], rhs [G, B, N, K], groups [B, X, R] -> [B, X, R, N]. X: places that share rhs
    columns: A [G, B, M, K], rhs [B, X, R, K], groups [B, X, R] -> [B, X, R, M]
    depth: A [B, M, K], rhs [B, N, K], groups [B, K] -> [G, B, M, N]
    batch: A [B, M, K], rhs [B, N, K], groups [B] -> [B, M, N]
    """

    recipe: Recipe
    a: Array
    b: Array
    groups: Array  # int32: the group of each member, `count` for members of none
    key: PRNGKey | None


@dataclass(frozen=True)
class Form:
    """What is static. kind: "rows", "columns", "depth" or "batch"; count: of the groups; dtype: of the result."""

    kind: str
    count: int
    dtype: np.dtype


@partial(jax.jit, static_argnums=0)
def product_codes(form: Form, operands: Operands) -> Array:
    """Codes of the result."""
    total = {"rows": _by_rows, "columns": _by_rows, "depth": _by_depth, "batch": _by_batch}[form.kind](form, operands)
    return rounded_result(operands.recipe, total, form.dtype)


# ---- groups of rows, or of columns


class _Sides(NamedTuple):
    """The operand whose rows are in groups, and the other, of which each group has its own."""

    ragged: tuple[Scheme, Array, PRNGKey | None]
    whole: tuple[Scheme, Array, PRNGKey | None]


def sides_of(form: Form, operands: Operands) -> _Sides:
    (scheme_a, scheme_b), keys = operands.recipe.schemes, product_keys(operands.key)
    a, b = (scheme_a, operands.a, keys.a), (scheme_b, operands.b, keys.b)
    return _Sides(a, b) if form.kind == "rows" else _Sides(b, a)


def keys_for(key: PRNGKey | None, *shape: int) -> Any:
    """A key for each of so many arrays, or none where there is none."""
    return None if key is None else jax.random.split(key, shape)


def row_tiles(form: Form, scheme: Scheme, groups: Array) -> Tiles:
    """Of rows, of every place."""
    size = tile_size(groups.shape[-1], form.count, scheme.rows_together, MOST_ROWS)
    return jax.vmap(jax.vmap(lambda own: in_tiles(own, form.count, size)))(groups)


def _largest_of_groups(form: Form, of_parts: Array, groups: Array, places: int) -> Array:
    """Of groups [groups + 1, ...], of those of parts. groups: of each part; the first `places` axes count the parts."""
    flat = of_parts.reshape(-1, *of_parts.shape[places:])
    return jnp.zeros((form.count + 1, *flat.shape[1:]), jnp.uint32).at[groups.reshape(-1)].max(flat)


def _by_rows(form: Form, operands: Operands) -> Array:
    """f32 codes [B, X, R, C], C the rows of the other operand."""
    recipe, (ragged, whole) = operands.recipe, sides_of(form, operands)
    (scheme, x, key), (other_scheme, other, other_key) = ragged, whole
    (batch, outer, rows, k), c = x.shape, other.shape[2]
    if 0 in (batch, outer, rows, k, c, form.count):
        return jnp.zeros((batch, outer, rows, c), jnp.uint32)
    tiles = row_tiles(form, scheme, operands.groups)
    amax = amax_of_rows(form, scheme, x, tiles)
    of_groups = jax.vmap(lambda y, key: quantize(other_scheme, y, key=key))(other, keys_for(other_key, form.count))
    of_groups = jax.tree.map(lambda v: _for_places(v, form.count, batch), of_groups)

    def place(x: Array, tiles: Tiles, keys: Any, of_groups: Quantized) -> Array:
        padded = jnp.pad(x, ((0, 1), (0, 0)))

        def tile(part: tuple) -> Array:
            member, group, key = part
            q = quantize(scheme, padded[member], key=key, amax=amax[group] if scheme.spans_rows else None)
            own = jax.tree.map(lambda v: lax.dynamic_index_in_dim(v, group, 0, keepdims=False), of_groups)
            if form.kind == "rows":
                return sum_of_quantized(recipe, q, own)
            return jnp.swapaxes(sum_of_quantized(recipe, own, q), -1, -2)

        return tiles.scattered(lax.map(tile, (tiles.member, tiles.group, keys)), 0)

    keys = keys_for(key, batch, outer, tiles.member.shape[2])
    outer_places = jax.vmap(place, in_axes=(0, 0, 0, None))
    return jax.vmap(outer_places, in_axes=(0, 0, 0, 0))(x, tiles, keys, of_groups)


def amax_of_rows(form: Form, scheme: Scheme, x: Array, tiles: Tiles) -> Array:
    """[groups + 1]: what a scale of all rows of a group comes from."""
    if not scheme.spans_rows:
        return jnp.zeros(form.count + 1, jnp.uint32)

    def place(x: Array, tiles: Tiles) -> Array:
        padded = jnp.pad(x, ((0, 1), (0, 0)))
        return lax.map(lambda member: largest(scheme, padded[member]), tiles.member)

    return _largest_of_groups(form, jax.vmap(jax.vmap(place))(x, tiles), tiles.group, 3)


def _for_places(v: Array, count: int, batch: int) -> Array:
    """Of an operand quantised for each group, [groups, ...], with the places of the batch in front: [B, groups, ...]."""
    if v.ndim == 1:  # the tensors' own scales
        return jnp.broadcast_to(v, (batch, count))
    return jnp.moveaxis(jnp.broadcast_to(v, (count, batch, *v.shape[2:])), 1, 0)


# ---- groups of elements along K


def _by_depth(form: Form, operands: Operands) -> Array:
    """f32 codes [groups, B, M, N]."""
    recipe, (batch, m, k), n = operands.recipe, operands.a.shape, operands.b.shape[1]
    if 0 in (batch, m, k, n, form.count):
        return jnp.zeros((form.count, batch, m, n), jnp.uint32)
    tiles = depth_tiles(form, recipe, operands.groups)
    values, keys = (operands.a, operands.b), product_keys(operands.key)[:2]
    amax_a, amax_b = (amax_of_depth(form, s, x, tiles) for s, x in zip(recipe.schemes, values, strict=True))
    count = tiles.member.shape[1]

    def place(a: Array, b: Array, tiles: Tiles, keys: tuple, amax: tuple[Array, Array]) -> Array:
        padded = [jnp.pad(v, ((0, 0), (0, 1))) for v in (a, b)]

        def tile(sums: Any, part: tuple) -> tuple[Any, None]:
            member, group, number, keys = part
            q_a, q_b = (
                quantize(scheme, v[:, member], key=key, amax=of_groups[group])
                for scheme, v, key, of_groups in zip(recipe.schemes, padded, keys, amax, strict=True)
            )
            factors = _stretches(recipe, q_a, q_b, member < k)
            return summed(recipe, sums, _segments(form, recipe, tiles.sizes, group, number, factors), factors), None

        start = no_sums(recipe, form.count * recipe.split_k, m, n, a, tiles.member)
        done = lax.scan(tile, start, (tiles.member, tiles.group, tiles.number, keys))[0].done[:-1]
        done = reduced(jnp.moveaxis(done.reshape(form.count, recipe.split_k, m, n), 1, 0), recipe.reduction)
        for at_end, scales in _final_scales(recipe, (amax[0][:-1], amax[1][:-1])):
            done = scaled(done, *scales) if at_end else done
        return jnp.where(tiles.sizes[:-1, None, None] == 0, 0, done)

    # an amax of the tensor is the same for all places, one of rows is a place's own
    axes = tuple(0 if of_groups.ndim == 4 else None for of_groups in (amax_a, amax_b))
    over_batch = jax.vmap(place, in_axes=(0, 0, 0, 0, axes), out_axes=1)
    return over_batch(*values, tiles, tuple(keys_for(key, batch, count) for key in keys), (amax_a, amax_b))


def _final_scales(recipe: Recipe, amax: tuple[Array, Array]) -> list[tuple[bool, tuple[Array | None, Array | None]]]:
    """The scales that multiply sums, in order: of the tensors above blocks, and of tensors, rows and columns; [groups, M or 1, N or 1]."""

    def of(scheme: Scheme, amax: Array, axis: int) -> Array | None:
        if not scheme.spans_depth:
            return None
        scale = scale_of_largest(scheme, amax)
        return scale[:, None, None] if scale.ndim == 1 else jnp.swapaxes(scale, -1, -2) if axis == 1 else scale

    scales = [of(scheme, own, axis) for axis, (scheme, own) in enumerate(zip(recipe.schemes, amax, strict=True))]
    above = [scale if scheme.is_two_level else None for scheme, scale in zip(recipe.schemes, scales, strict=True)]
    whole = [None if scheme.is_two_level else scale for scheme, scale in zip(recipe.schemes, scales, strict=True)]
    return [(True, (above[0], above[1])), (not scales_at_promotion(recipe), (whole[0], whole[1]))]


def depth_tiles(form: Form, recipe: Recipe, groups: Array) -> Tiles:
    """Of elements along K, whole blocks and stretches, of every place of the batch."""
    depths = [scheme.depth_together for scheme in recipe.schemes]
    size = tile_size(groups.shape[-1], form.count, lcm(stretch_length(recipe), *depths), MOST_DEPTH)
    return jax.vmap(lambda own: in_tiles(own, form.count, size))(groups)


def amax_of_depth(form: Form, scheme: Scheme, x: Array, tiles: Tiles) -> Array:
    """What a scale of all of a group's K comes from: [groups + 1], or of rows [B, groups + 1, rows, 1]."""
    if not scheme.spans_depth:
        return jnp.zeros(form.count + 1, jnp.uint32)

    def place(x: Array, tiles: Tiles) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, 1)))
        return lax.map(lambda member: largest(scheme, padded[:, member]), tiles.member)

    of_tiles = jax.vmap(place)(x, tiles)
    if scheme.spans_rows:
        return _largest_of_groups(form, of_tiles, tiles.group, 2)
    return jax.vmap(lambda v, groups: _largest_of_groups(form, v, groups, 1))(of_tiles, tiles.group)


def _stretches(recipe: Recipe, a: Quantized, b: Quantized, inside: Array) -> Factors:
    """What is multiplied in a tile, in stretches, which are a new first axis. inside: bool [size], the places of members.

    Places behind a group's last member are filled as `shapes.fill` fills K.
    """
    signature, size = signature_of(recipe.op), inside.shape[0]
    if (transform := recipe.schemes[0].transform) is not None:  # its last group is mixed with the zeros that fill it
        inside = jnp.repeat(jnp.any(inside.reshape(-1, transform.size), axis=-1), transform.size)
    length = stretch_length(recipe) if recipe.promote is not None or recipe.split_k > 1 else size
    minus_zero = np.array(1 << (signature.a.bits - 1), signature.a.dtype)
    x, y = jnp.where(inside, a.codes, minus_zero), jnp.where(inside, b.codes, 0)

    def cut(v: Array, axis: int) -> Array:
        pieces = v.reshape(*v.shape[:-1], size // length, -1)
        pieces = jnp.moveaxis(pieces, -2, 0)
        return pieces if axis == -1 else jnp.swapaxes(pieces, -1, -2)

    unit = None
    if a.unit_scales is not None and b.unit_scales is not None:
        unit = _unit_scales(signature, a.unit_scales, inside), _unit_scales(signature, b.unit_scales, inside)
        unit = cut(unit[0], -1), cut(unit[1], -2)
    block = None
    if scales_at_promotion(recipe):
        of_a, of_b = chunk_scales(recipe, a, b._replace(scales=None if b.scales is None else jnp.swapaxes(b.scales, -1, -2)), size)
        block = cut(of_a, -1), jnp.moveaxis(of_b, -2, 0)[:, None, :]
    return Factors(codes=(cut(x, -1), cut(y, -2)), unit_scales=unit, block_scales=block)


def _unit_scales(signature: Signature, scales: Array, inside: Array) -> Array:
    """Those of blocks without members are 1."""
    assert signature.scale is not None
    used = jnp.any(inside.reshape(scales.shape[-1], -1), axis=-1)
    return jnp.where(used, scales, np.array(signature.scale.bias << signature.scale.mantissa_bits, scales.dtype))


def _segments(form: Form, recipe: Recipe, counts: Array, group: Array, number: Array, factors: Factors) -> Stretch:
    """Which sum each stretch of a tile belongs to: a part of its group."""
    here, size = factors.codes[0].shape[0], factors.codes[0].shape[0] * factors.codes[0].shape[-1]
    length = size // here
    at = number * here + jnp.arange(here, dtype=jnp.int32)  # in its group
    stretches = -(-counts[group] // length)
    of_part = jnp.maximum(-(-stretches // recipe.split_k), 1)
    used = (at < stretches) & (group < form.count)
    segment = jnp.where(used, group * recipe.split_k + at // of_part, form.count * recipe.split_k)
    return Stretch(segment=segment, first=at % of_part == 0)


# ---- groups of places in the batch


def _by_batch(form: Form, operands: Operands) -> Array:
    """f32 codes [B, M, N]."""
    recipe, values = operands.recipe, (operands.a, operands.b)
    if 0 in (*operands.a.shape, operands.b.shape[1]):
        return jnp.zeros((*operands.a.shape[:2], operands.b.shape[1]), jnp.uint32)
    a, b = (
        jax.vmap(lambda x, own, key, scheme=scheme: quantize(scheme, x, key=key, amax=own))(
            x, amax_of_batch(form, scheme, x, operands.groups), keys_for(key, x.shape[0])
        )
        for scheme, x, key in zip(recipe.schemes, values, product_keys(operands.key)[:2], strict=True)
    )
    return jax.vmap(lambda x, y: sum_of_quantized(recipe, x, y))(a, b)


def amax_of_batch(form: Form, scheme: Scheme, x: Array, groups: Array) -> Array:
    """Of each place: that of its group for a scale of the tensor, its own for one of rows."""
    own = jax.vmap(lambda x: largest(scheme, x))(x)
    return _largest_of_groups(form, own, groups, 1)[groups] if scheme.spans_rows else own
