"""Products by a recipe whose groups have sizes that are data: each group is a separate product with its own scales.

The three forms of `jax.lax.ragged_dot_general`, K last in every operand: groups of rows, of elements along K, and of batch indices. A
fourth, groups of columns, is a gradient of the second. A group has the bits of `matmul` of its rows alone, and so have its gradients.
Operands are quantised group by group and multiplied tile by tile; no scale is shared by two groups, and blocks restart with each group.
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

from tcemu.base.meshes import match_varying_axes
from tcemu.engine.arithmetic.product_spec import ProductSpec, product_spec
from tcemu.operations.products.accumulation import Factors, reduce_partial_sums
from tcemu.operations.products.differentiable import attach_derivative, differentiable_product
from tcemu.operations.products.matmul import apply_scales, chunk_scales, multiply_quantized, round_result, scales_chunks
from tcemu.operations.products.product_arguments import product_keys
from tcemu.operations.products.ragged.group_sums import ChunkPlacement, accumulate_chunks, chunk_length, zero_group_sums
from tcemu.operations.products.ragged.group_tiles import GroupTiles, tile_groups, tile_size
from tcemu.operations.products.recipes import Recipe
from tcemu.operations.quantize.quantizer import QuantizedOperand, Scheme, amax_codes, dequantize, quantize, scale_from_amax

MAX_TILE_ROWS, MAX_TILE_DEPTH = 512, 1024  # elements of a tile


class RaggedOperands(NamedTuple):
    """The traced part of a ragged product. Shapes by kind, with batch B, G groups, and K last:

    rows: A [B, X, R, K], rhs [G, B, N, K], groups [B, X, R] -> [B, X, R, N]. X: indices that share rhs
    columns: A [G, B, M, K], rhs [B, X, R, K], groups [B, X, R] -> [B, X, R, M]
    depth: A [B, M, K], rhs [B, N, K], groups [B, K] -> [G, B, M, N]
    batch: A [B, M, K], rhs [B, N, K], groups [B] -> [B, M, N]
    """

    recipe: Recipe
    a: Array
    b: Array
    groups: Array  # int32: group of each row; `count` for rows of no group
    key: PRNGKey | None


@dataclass(frozen=True)
class RaggedForm:
    """The static part of a ragged product: a `differentiable.DifferentiableProduct`."""

    kind: str  # "rows", "columns", "depth" or "batch"
    count: int  # number of groups
    dtype: np.dtype  # dtype of the result

    @partial(jax.jit, static_argnums=0)
    def bits(self, operands: RaggedOperands) -> Array:
        multiply = {"depth": _multiply_depth_groups, "batch": _multiply_batch_groups}.get(self.kind, _multiply_row_groups)
        return lax.bitcast_convert_type(round_result(operands.recipe, multiply(self, operands), self.dtype), self.dtype)

    @partial(jax.jit, static_argnums=0)
    def smooth(self, operands: RaggedOperands) -> Array:
        """Computes the product in plain f32, from the quantised operands, or for "straight_through" from the given ones."""
        raw = operands.recipe.backward == "straight_through"
        numbers = (operands.a, operands.b) if raw else _dequantized_operands(self, jax.tree.map(lax.stop_gradient, operands))
        a, b = (
            attach_derivative(number.astype(jnp.float32), x.astype(jnp.float32))
            for number, x in zip(numbers, (operands.a, operands.b), strict=True)
        )
        return _plain_ragged_product(self, a, b, operands.groups)

    def backward(self, operands: RaggedOperands, g: Array) -> RaggedOperands:
        recipe, a, b, groups, keys = operands.recipe, operands.a, operands.b, operands.groups, product_keys(operands.key)
        gradients = recipe.require_gradients()
        g = g.astype(jnp.float32)
        t = lambda x: jnp.swapaxes(x, -1, -2)
        along_k = lambda x: t(x.reshape(x.shape[0], -1, x.shape[-1]))

        def multiply(which: int, kind: str, x: Array, y: Array, groups: Array = groups) -> Array:
            recipe, key = gradients[which], (keys.da, keys.db)[which]
            form = RaggedForm(kind, self.count, np.dtype(np.float32))
            return ragged_product(form, RaggedOperands(recipe, x, y, groups, key if recipe.is_stochastic else None))

        if self.kind == "rows":
            da = multiply(0, "rows", g, t(b))
            db = t(multiply(1, "depth", along_k(a), along_k(g), groups.reshape(groups.shape[0], -1)))
        elif self.kind == "columns":
            da = multiply(0, "depth", along_k(g), along_k(b), groups.reshape(groups.shape[0], -1))
            db = multiply(1, "columns", t(a), g)
        elif self.kind == "depth":
            da = t(multiply(0, "columns", g, t(b)[:, None], groups[:, None])[:, 0])
            db = t(multiply(1, "rows", t(a)[:, None], jnp.swapaxes(g, -1, -2), groups[:, None])[:, 0])
        else:
            da, db = multiply(0, "batch", g, t(b)), t(multiply(1, "batch", t(a), t(g)))
        nothing: Any = None  # recipe, groups and key have no derivative
        return RaggedOperands(recipe=nothing, a=da.astype(a.dtype), b=db.astype(b.dtype), groups=nothing, key=nothing)


def ragged_product(form: RaggedForm, operands: RaggedOperands) -> Array:
    """Computes the product. Rows, columns and elements of no group contribute nothing: their results are +0.

    Batch indices of no group have results, as in JAX: they are one more group.
    """
    return differentiable_product(form, operands)


# ---- groups of rows, or of columns


class _RaggedPair(NamedTuple):
    """The operand whose rows are in groups, and the other one, which has a matrix per group."""

    ragged: tuple[Scheme, Array, PRNGKey | None]
    whole: tuple[Scheme, Array, PRNGKey | None]


def ragged_pair(form: RaggedForm, operands: RaggedOperands) -> _RaggedPair:
    (scheme_a, scheme_b), keys = operands.recipe.schemes, product_keys(operands.key)
    a, b = (scheme_a, operands.a, keys.a), (scheme_b, operands.b, keys.b)
    return _RaggedPair(a, b) if form.kind == "rows" else _RaggedPair(b, a)


def split_keys(key: PRNGKey | None, *shape: int) -> Any:
    """Splits a key into an array of keys of this shape. Returns None without a key."""
    return None if key is None else jax.random.split(key, shape)


def row_tiles(form: RaggedForm, scheme: Scheme, groups: Array) -> GroupTiles:
    """Tiles the rows at every index of the batch."""
    size = tile_size(groups.shape[-1], form.count, scheme.row_granularity, MAX_TILE_ROWS)
    return jax.vmap(jax.vmap(lambda own: tile_groups(own, form.count, size)))(groups)


def _amax_by_group(form: RaggedForm, part_amax: Array, groups: Array, axes: int) -> Array:
    """Reduces the magnitudes of parts, which are the first `axes` axes, to those of their groups, [groups + 1, ...]."""
    flat = part_amax.reshape(-1, *part_amax.shape[axes:])
    return jnp.zeros((form.count + 1, *flat.shape[1:]), jnp.uint32).at[groups.reshape(-1)].max(flat)


def _multiply_row_groups(form: RaggedForm, operands: RaggedOperands) -> Array:
    """Computes f32 codes [B, X, R, C], C the rows of the other operand."""
    recipe, (ragged, whole) = operands.recipe, ragged_pair(form, operands)
    (scheme, x, key), (other_scheme, other, other_key) = ragged, whole
    (batch, outer, rows, k), c = x.shape, other.shape[2]
    if 0 in (batch, outer, rows, k, c, form.count):
        return jnp.zeros((batch, outer, rows, c), jnp.uint32)
    tiles = row_tiles(form, scheme, operands.groups)
    amax = row_group_amax(form, scheme, x, tiles)
    of_groups = jax.vmap(lambda y, key: quantize(other_scheme, y, key=key))(other, split_keys(other_key, form.count))
    of_groups = jax.tree.map(lambda v: _broadcast_to_batch(v, form.count, batch), of_groups)

    def place(x: Array, tiles: GroupTiles, keys: Any, of_groups: QuantizedOperand) -> Array:
        padded = jnp.pad(x, ((0, 1), (0, 0)))

        def tile(part: tuple) -> Array:
            member, group, key = part
            q = quantize(scheme, padded[member], key=key, amax=amax[group] if scheme.spans_rows else None)
            own = jax.tree.map(lambda v: lax.dynamic_index_in_dim(v, group, 0, keepdims=False), of_groups)
            if form.kind == "rows":
                return multiply_quantized(recipe, q, own)
            return jnp.swapaxes(multiply_quantized(recipe, own, q), -1, -2)

        return tiles.scatter_rows(lax.map(tile, (tiles.source_row, tiles.group, keys)), 0)

    keys = split_keys(key, batch, outer, tiles.source_row.shape[2])
    outer_places = jax.vmap(place, in_axes=(0, 0, 0, None))
    return jax.vmap(outer_places, in_axes=(0, 0, 0, 0))(x, tiles, keys, of_groups)


def row_group_amax(form: RaggedForm, scheme: Scheme, x: Array, tiles: GroupTiles) -> Array:
    """Returns the max magnitude of each group, [groups + 1], where a scale spans the rows of a group; else zeros."""
    if not scheme.spans_rows:
        return jnp.zeros(form.count + 1, jnp.uint32)

    def place(x: Array, tiles: GroupTiles) -> Array:
        padded = jnp.pad(x, ((0, 1), (0, 0)))
        return lax.map(lambda member: amax_codes(scheme, padded[member]), tiles.source_row)

    return _amax_by_group(form, jax.vmap(jax.vmap(place))(x, tiles), tiles.group, 3)


def _broadcast_to_batch(v: Array, count: int, batch: int) -> Array:
    """Broadcasts a field of an operand quantised per group, [groups, ...], to [B, groups, ...]."""
    if v.ndim == 1:  # scales of tensors
        return jnp.broadcast_to(v, (batch, count))
    return jnp.moveaxis(jnp.broadcast_to(v, (count, batch, *v.shape[2:])), 1, 0)


# ---- groups of elements along K


def _multiply_depth_groups(form: RaggedForm, operands: RaggedOperands) -> Array:
    """Computes f32 codes [groups, B, M, N]."""
    recipe, (batch, m, k), n = operands.recipe, operands.a.shape, operands.b.shape[1]
    if 0 in (batch, m, k, n, form.count):
        return jnp.zeros((form.count, batch, m, n), jnp.uint32)
    tiles = depth_tiles(form, recipe, operands.groups)
    values, keys = (operands.a, operands.b), product_keys(operands.key)[:2]
    amax_a, amax_b = (depth_group_amax(form, s, x, tiles) for s, x in zip(recipe.schemes, values, strict=True))
    count = tiles.source_row.shape[1]

    def place(a: Array, b: Array, tiles: GroupTiles, keys: tuple, amax: tuple[Array, Array]) -> Array:
        padded = [jnp.pad(v, ((0, 0), (0, 1))) for v in (a, b)]

        def tile(sums: Any, part: tuple) -> tuple[Any, None]:
            member, group, number, keys = part
            q_a, q_b = (
                quantize(scheme, v[:, member], key=key, amax=of_groups[group])
                for scheme, v, key, of_groups in zip(recipe.schemes, padded, keys, amax, strict=True)
            )
            factors = _split_chunks(recipe, q_a, q_b, member < k)
            return accumulate_chunks(recipe, sums, _place_chunks(form, recipe, tiles.sizes, group, number, factors), factors), None

        start = zero_group_sums(recipe, form.count * recipe.split_k, m, n, a, tiles.source_row)
        done = lax.scan(tile, start, (tiles.source_row, tiles.group, tiles.tile_in_group, keys))[0].totals[:-1]
        done = reduce_partial_sums(jnp.moveaxis(done.reshape(form.count, recipe.split_k, m, n), 1, 0), recipe.reduction)
        for at_end, scales in _final_scales(recipe, (amax[0][:-1], amax[1][:-1])):
            done = apply_scales(done, *scales) if at_end else done
        return jnp.where(tiles.sizes[:-1, None, None] == 0, 0, done)

    # a tensor's amax is the same for the whole batch, an amax of rows is not
    axes = tuple(0 if of_groups.ndim == 4 else None for of_groups in (amax_a, amax_b))
    over_batch = jax.vmap(place, in_axes=(0, 0, 0, 0, axes), out_axes=1)
    return over_batch(*values, tiles, tuple(split_keys(key, batch, count) for key in keys), (amax_a, amax_b))


def _final_scales(recipe: Recipe, amax: tuple[Array, Array]) -> list[tuple[bool, tuple[Array | None, Array | None]]]:
    """Returns the scales [groups, M or 1, N or 1] in the order in which they multiply sums, with a flag whether they do.

    First those of tensors above blocks, then those of tensors, rows and columns.
    """

    def final_scale(scheme: Scheme, amax: Array, axis: int) -> Array | None:
        if not scheme.spans_depth or scheme.quantizer.element is not None:  # dequantised elements have no scale outside
            return None
        scale = scale_from_amax(scheme, amax)
        return scale[:, None, None] if scale.ndim == 1 else jnp.swapaxes(scale, -1, -2) if axis == 1 else scale

    scales = [final_scale(scheme, own, axis) for axis, (scheme, own) in enumerate(zip(recipe.schemes, amax, strict=True))]
    above = [scale if scheme.is_two_level else None for scheme, scale in zip(recipe.schemes, scales, strict=True)]
    whole = [None if scheme.is_two_level else scale for scheme, scale in zip(recipe.schemes, scales, strict=True)]
    return [(True, (above[0], above[1])), (not scales_chunks(recipe), (whole[0], whole[1]))]


def depth_tiles(form: RaggedForm, recipe: Recipe, groups: Array) -> GroupTiles:
    """Tiles the elements along K, in whole blocks and chunks, at every index of the batch."""
    depths = [scheme.depth_granularity for scheme in recipe.schemes]
    size = tile_size(groups.shape[-1], form.count, lcm(chunk_length(recipe), *depths), MAX_TILE_DEPTH)
    return jax.vmap(lambda own: tile_groups(own, form.count, size))(groups)


def depth_group_amax(form: RaggedForm, scheme: Scheme, x: Array, tiles: GroupTiles) -> Array:
    """Returns the max magnitudes over a group's K: [groups + 1], or per row [B, groups + 1, rows, 1]."""
    if not scheme.spans_depth:
        return jnp.zeros(form.count + 1, jnp.uint32)

    def place(x: Array, tiles: GroupTiles) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, 1)))
        return lax.map(lambda member: amax_codes(scheme, padded[:, member]), tiles.source_row)

    of_tiles = jax.vmap(place)(x, tiles)
    if scheme.spans_rows:
        return _amax_by_group(form, of_tiles, tiles.group, 2)
    return jax.vmap(lambda v, groups: _amax_by_group(form, v, groups, 1))(of_tiles, tiles.group)


def _split_chunks(recipe: Recipe, a: QuantizedOperand, b: QuantizedOperand, inside: Array) -> Factors:
    """Splits the factors of a tile into chunks, a new first axis. Slots that are not `inside` [size] are padded as by `pad_k`."""
    spec, size = product_spec(recipe.op), inside.shape[0]
    if (transform := recipe.schemes[0].transform) is not None:  # mixes the last elements with the zeros behind them
        inside = jnp.repeat(jnp.any(inside.reshape(-1, transform.size), axis=-1), transform.size)
    length = chunk_length(recipe) if recipe.promote is not None or recipe.split_k > 1 else size
    minus_zero = np.array(spec.a.negative_zero, spec.a.dtype)
    x, y = jnp.where(inside, a.codes, minus_zero), jnp.where(inside, b.codes, 0)

    def split(v: Array, axis: int) -> Array:
        pieces = v.reshape(*v.shape[:-1], size // length, -1)
        pieces = jnp.moveaxis(pieces, -2, 0)
        return pieces if axis == -1 else jnp.swapaxes(pieces, -1, -2)

    unit = None
    if a.unit_scales is not None and b.unit_scales is not None:
        unit = _unit_scales(spec, a.unit_scales, inside), _unit_scales(spec, b.unit_scales, inside)
        unit = split(unit[0], -1), split(unit[1], -2)
    block = None
    if scales_chunks(recipe):
        of_a, of_b = chunk_scales(recipe, a, b._replace(scales=None if b.scales is None else jnp.swapaxes(b.scales, -1, -2)), size)
        block = split(of_a, -1), jnp.moveaxis(of_b, -2, 0)[:, None, :]
    return Factors(codes=(split(x, -1), split(y, -2)), unit_scales=unit, block_scales=block)


def _unit_scales(spec: ProductSpec, scales: Array, inside: Array) -> Array:
    """Sets the scales of empty blocks to 1."""
    scale = spec.require_scale()
    used = jnp.any(inside.reshape(scales.shape[-1], -1), axis=-1)
    return jnp.where(used, scales, np.array(scale.bias << scale.mantissa_bits, scales.dtype))


def _place_chunks(form: RaggedForm, recipe: Recipe, counts: Array, group: Array, number: Array, factors: Factors) -> ChunkPlacement:
    """Returns the sum that each chunk of a tile belongs to: a part of its group."""
    here, size = factors.codes[0].shape[0], factors.codes[0].shape[0] * factors.codes[0].shape[-1]
    length = size // here
    at = number * here + jnp.arange(here, dtype=jnp.int32)  # index within the group
    stretches = -(-counts[group] // length)
    of_part = jnp.maximum(-(-stretches // recipe.split_k), 1)
    used = (at < stretches) & (group < form.count)
    segment = jnp.where(used, group * recipe.split_k + at // of_part, form.count * recipe.split_k)
    return ChunkPlacement(segment=segment, first=at % of_part == 0)


# ---- groups of batch indices


def _multiply_batch_groups(form: RaggedForm, operands: RaggedOperands) -> Array:
    """Computes f32 codes [B, M, N]."""
    recipe, values = operands.recipe, (operands.a, operands.b)
    if 0 in (*operands.a.shape, operands.b.shape[1]):
        return jnp.zeros((*operands.a.shape[:2], operands.b.shape[1]), jnp.uint32)
    a, b = (
        jax.vmap(lambda x, own, key, scheme=scheme: quantize(scheme, x, key=key, amax=own))(
            x, batch_group_amax(form, scheme, x, operands.groups), split_keys(key, x.shape[0])
        )
        for scheme, x, key in zip(recipe.schemes, values, product_keys(operands.key)[:2], strict=True)
    )
    return jax.vmap(lambda x, y: multiply_quantized(recipe, x, y))(a, b)


def batch_group_amax(form: RaggedForm, scheme: Scheme, x: Array, groups: Array) -> Array:
    """Returns the max magnitude at each batch index: its group's where a scale spans the tensor, else its own."""
    own = jax.vmap(lambda x: amax_codes(scheme, x))(x)
    return _amax_by_group(form, own, groups, 1)[groups] if scheme.spans_rows else own


# ---- derivatives


def _plain_ragged_product(form: RaggedForm, a: Array, b: Array, groups: Array) -> Array:
    """Multiplies in plain f32, group by group; the rows of all other groups are 0."""
    dot = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    if form.kind == "batch":
        return dot("bmk,bnk->bmn", a, b)
    numbers = jnp.arange(form.count, dtype=jnp.int32)
    if form.kind == "depth":

        def product(number: Array) -> Array:
            inside = (groups == number)[:, None, :]
            return dot("bmk,bnk->bmn", jnp.where(inside, a, 0), jnp.where(inside, b, 0))

        return lax.map(jax.checkpoint(product), numbers)
    ragged, whole = (a, b) if form.kind == "rows" else (b, a)

    @jax.checkpoint
    def add_group(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        number, own = part
        return total + dot("bxrk,bnk->bxrn", jnp.where((groups == number)[..., None], ragged, 0), own), None

    total, *_ = match_varying_axes(jnp.zeros((*ragged.shape[:3], whole.shape[2]), jnp.float32), ragged, whole)
    return lax.scan(add_group, total, (numbers, whole))[0]


def _dequantized_operands(form: RaggedForm, operands: RaggedOperands) -> tuple[Array, Array]:
    """Returns the values of the quantised operands, in the operands' own layout."""
    recipe, keys = operands.recipe, product_keys(operands.key)
    if form.kind == "batch":
        a, b = (
            jax.vmap(lambda x, own, key, scheme=scheme: dequantize(scheme, quantize(scheme, x, key=key, amax=own), x.shape[-1]))(
                x, batch_group_amax(form, scheme, x, operands.groups), split_keys(key, x.shape[0])
            )
            for scheme, x, key in zip(recipe.schemes, (operands.a, operands.b), keys[:2], strict=True)
        )
        return a, b
    if form.kind == "depth":
        tiles = depth_tiles(form, recipe, operands.groups)
        a, b = (
            _dequantize_tiles(scheme, x, tiles, depth_group_amax(form, scheme, x, tiles), key, 1)
            for scheme, x, key in zip(recipe.schemes, (operands.a, operands.b), keys[:2], strict=True)
        )
        return a, b
    (scheme, x, key), (other_scheme, other, other_key) = ragged_pair(form, operands)
    tiles = row_tiles(form, scheme, operands.groups)
    ragged = _dequantize_tiles(scheme, x, tiles, row_group_amax(form, scheme, x, tiles), key, 0)
    quantized = jax.vmap(lambda y, key: dequantize(other_scheme, quantize(other_scheme, y, key=key), y.shape[-1]))
    whole = quantized(other, split_keys(other_key, form.count))
    return (ragged, whole) if form.kind == "rows" else (whole, ragged)


def _dequantize_tiles(scheme: Scheme, x: Array, tiles: GroupTiles, amax: Array, key: PRNGKey | None, axis: int) -> Array:
    """Returns the values of an operand that is quantised tile by tile along `axis`."""
    places = tiles.source_row.shape[:-2]
    spans = scheme.spans_depth if axis else scheme.spans_rows

    def place(x: Array, tiles: GroupTiles, keys: Any, amax: Array) -> Array:
        values = lax.map(
            lambda part: dequantize(
                scheme, quantize(scheme, part[0], key=part[2], amax=amax[part[1]] if spans else None), part[0].shape[-1]
            ),
            (tiles.gather_rows(x, axis), tiles.group, keys),
        )
        return tiles.scatter_rows(values, axis)

    of_places = 0 if amax.ndim == 4 else None
    for _ in places:
        place = jax.vmap(place, in_axes=(0, 0, 0, of_places))
    return place(x, tiles, split_keys(key, *places, tiles.source_row.shape[-2]), amax)
