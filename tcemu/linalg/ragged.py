"""Products whose groups have sizes that are data, by a recipe: each group is a product of its own, with scales of its own.

Three forms, as `jax.lax.ragged_dot_general` has them, K last in every operand: groups of rows, of elements along K, of places in the batch.
A fourth, groups of columns, is a gradient of the second. A group has the bits of `matmul` of its members alone, and so have its gradients.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax

from tcemu.gradients import stand_in
from tcemu.linalg.arguments import product_keys
from tcemu.linalg.ragged_sums import (
    Form,
    Operands,
    amax_of_batch,
    amax_of_depth,
    amax_of_rows,
    depth_tiles,
    keys_for,
    product_codes,
    row_tiles,
    sides_of,
)
from tcemu.linalg.tiles import Tiles
from tcemu.meshes import alike
from tcemu.quantize.operands import Scheme, dequantized, quantize


def ragged_product(form: Form, operands: Operands) -> Array:
    """The product. Rows, columns and elements of no group count for nothing: their results are +0. Places of a batch have results also if
    they are in no group, as in JAX; they then are one more group."""
    leaves, tree = jax.tree.flatten(operands._replace(key=None))
    operands = jax.tree.unflatten(tree, alike(*leaves))._replace(key=operands.key)
    if operands.recipe.gradients is not None:
        return _emulated(form, operands)
    return stand_in(partial(_bits, form), partial(_smooth, form), operands)


def _bits(form: Form, operands: Operands) -> Array:
    forward = operands._replace(recipe=operands.recipe.replace(backward="exact"))  # one program, whatever the gradients
    return lax.bitcast_convert_type(product_codes(form, forward), form.dtype)


# ---- derivatives


@partial(jax.jit, static_argnums=0)
def _smooth(form: Form, operands: Operands) -> Array:
    """The same product in plain f32, of the quantised operands, or "straight_through" of those that came."""
    raw = operands.recipe.backward == "straight_through"
    held = jax.tree.map(lax.stop_gradient, operands)
    numbers = (operands.a, operands.b) if raw else _numbers(form, held)
    a, b = (
        lax.stop_gradient(number.astype(jnp.float32)) + (x.astype(jnp.float32) - lax.stop_gradient(x.astype(jnp.float32)))
        for number, x in zip(numbers, (operands.a, operands.b), strict=True)
    )
    return _plain(form, a, b, operands.groups)


def _plain(form: Form, a: Array, b: Array, groups: Array) -> Array:
    """In plain f32, group by group; what a group does not have is 0 in its turn."""
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
    def added(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        number, own = part
        return total + dot("bxrk,bnk->bxrn", jnp.where((groups == number)[..., None], ragged, 0), own), None

    total, *_ = alike(jnp.zeros((*ragged.shape[:3], whole.shape[2]), jnp.float32), ragged, whole)
    return lax.scan(added, total, (numbers, whole))[0]


def _numbers(form: Form, operands: Operands) -> tuple[Array, Array]:
    """The numbers that the quantised operands stand for, where the operands have them."""
    recipe, keys = operands.recipe, product_keys(operands.key)
    if form.kind == "batch":
        a, b = (
            jax.vmap(lambda x, own, key, scheme=scheme: dequantized(scheme, quantize(scheme, x, key=key, amax=own), x.shape[-1]))(
                x, amax_of_batch(form, scheme, x, operands.groups), keys_for(key, x.shape[0])
            )
            for scheme, x, key in zip(recipe.schemes, (operands.a, operands.b), keys[:2], strict=True)
        )
        return a, b
    if form.kind == "depth":
        tiles = depth_tiles(form, recipe, operands.groups)
        a, b = (
            _numbers_in_tiles(scheme, x, tiles, amax_of_depth(form, scheme, x, tiles), key, 1)
            for scheme, x, key in zip(recipe.schemes, (operands.a, operands.b), keys[:2], strict=True)
        )
        return a, b
    (scheme, x, key), (other_scheme, other, other_key) = sides_of(form, operands)
    tiles = row_tiles(form, scheme, operands.groups)
    ragged = _numbers_in_tiles(scheme, x, tiles, amax_of_rows(form, scheme, x, tiles), key, 0)
    quantized = jax.vmap(lambda y, key: dequantized(other_scheme, quantize(other_scheme, y, key=key), y.shape[-1]))
    whole = quantized(other, keys_for(other_key, form.count))
    return (ragged, whole) if form.kind == "rows" else (whole, ragged)


def _numbers_in_tiles(scheme: Scheme, x: Array, tiles: Tiles, amax: Array, key: PRNGKey | None, axis: int) -> Array:
    """Of an operand whose members, along `axis` of a place, are in tiles."""
    places = tiles.member.shape[:-2]
    spans = scheme.spans_depth if axis else scheme.spans_rows

    def place(x: Array, tiles: Tiles, keys: Any, amax: Array) -> Array:
        values = lax.map(
            lambda part: dequantized(
                scheme, quantize(scheme, part[0], key=part[2], amax=amax[part[1]] if spans else None), part[0].shape[-1]
            ),
            (tiles.gathered(x, axis), tiles.group, keys),
        )
        return tiles.scattered(values, axis)

    of_places = 0 if amax.ndim == 4 else None
    for _ in places:
        place = jax.vmap(place, in_axes=(0, 0, 0, of_places))
    return place(x, tiles, keys_for(key, *places, tiles.member.shape[-2]), amax)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _emulated(form: Form, operands: Operands) -> Array:
    """The product whose gradients are products by the recipe's own."""
    return _bits(form, operands)


def _emulated_backward(form: Form, operands: Operands, g: Array) -> tuple[Operands]:
    recipe, a, b, groups, keys = operands.recipe, operands.a, operands.b, operands.groups, product_keys(operands.key)
    gradients = recipe.gradients
    assert gradients is not None
    g = g.astype(jnp.float32)
    t = lambda x: jnp.swapaxes(x, -1, -2)  # noqa: E731
    along_k = lambda x: t(x.reshape(x.shape[0], -1, x.shape[-1]))  # noqa: E731  [B, X, R, C] -> [B, C, X * R]

    def by(which: int, kind: str, x: Array, y: Array, groups: Array = groups) -> Array:
        own, key = gradients[which], (keys.da, keys.db)[which]
        return ragged_product(Form(kind, form.count, np.dtype(np.float32)), Operands(own, x, y, groups, key if own.stochastic else None))

    if form.kind == "rows":
        da = by(0, "rows", g, t(b))
        db = t(by(1, "depth", along_k(a), along_k(g), groups.reshape(groups.shape[0], -1)))
    elif form.kind == "columns":
        da = by(0, "depth", along_k(g), along_k(b), groups.reshape(groups.shape[0], -1))
        db = by(1, "columns", t(a), g)
    elif form.kind == "depth":
        da = t(by(0, "columns", g, t(b)[:, None], groups[:, None])[:, 0])
        db = t(by(1, "rows", t(a)[:, None], jnp.swapaxes(g, -1, -2), groups[:, None])[:, 0])
    else:
        da, db = by(0, "batch", g, t(b)), t(by(1, "batch", t(a), t(g)))
    nothing: Any = None  # recipe, groups and key have no derivative
    return (Operands(recipe=nothing, a=da.astype(a.dtype), b=db.astype(b.dtype), groups=nothing, key=nothing),)


_emulated.defvjp(lambda form, operands: (_bits(form, operands), operands), _emulated_backward)
