"""A convolution as one product of patches (im2col) by a recipe, cut along its rows, so that all patches are never there at once.

A cut changes no bit of a product: rows are summed each by itself, and a scale that all of them share is found before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.gradients import stand_in
from tcemu.linalg.matmul import rounded_result, sum_of_quantized
from tcemu.linalg.recipes import Recipe
from tcemu.meshes import alike
from tcemu.quantize.operands import Quantized, Scheme, dequantized, largest, quantize

MOST_ELEMENTS = 1 << 22  # of patches in one piece; more are cut, but not below one line of an image


@dataclass(frozen=True)
class Windows:
    """Where windows stand on images x, [batch groups, batch, features, *space], padded and dilated already; one number for each axis."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    feature_groups: int

    def counts(self, x: Array | jax.ShapeDtypeStruct) -> tuple[int, ...]:
        """How many windows stand along each axis."""
        return tuple(
            max((extent - (size - 1) * dilation - 1) // stride + 1, 0)
            for extent, size, stride, dilation in zip(x.shape[3:], self.sizes, self.strides, self.dilations, strict=True)
        )

    def patches(self, x: Array) -> Array:
        """[groups, rows, K]: a row for each image and place, K the places in the window and within them the features of a group."""
        (groups, batch, features, *_), counts = x.shape, self.counts(x)
        for axis, (count, size, stride, dilation) in enumerate(zip(counts, self.sizes, self.strides, self.dilations, strict=True), 3):
            x = _windows(x, axis, count, size, stride, dilation)
        shape = (groups, batch, self.feature_groups, features // self.feature_groups, prod(counts), prod(self.sizes))
        x = x.reshape(shape).transpose(0, 2, 1, 4, 5, 3)
        return x.reshape(groups * self.feature_groups, batch * shape[4], shape[5] * shape[3])

    def place(self, x: Array, number: Array) -> Array:
        """[groups, features of a group, rows]: K's part `number`, traced, of all patches: what stands in that place of the windows."""
        (groups, batch, features, *_), counts = x.shape, self.counts(x)
        at = jnp.unravel_index(number, self.sizes) if self.sizes else ()
        for axis, (start, count, stride, dilation) in enumerate(zip(at, counts, self.strides, self.dilations, strict=True), 3):
            x = lax.dynamic_slice_in_dim(x, start * dilation, (count - 1) * stride + 1, axis)
            x = lax.slice_in_dim(x, 0, None, stride, axis)
        x = x.reshape(groups, batch, self.feature_groups, features // self.feature_groups, prod(counts)).transpose(0, 2, 3, 1, 4)
        return x.reshape(groups * self.feature_groups, x.shape[2], batch * x.shape[4])


def _windows(x: Array, axis: int, count: int, size: int, stride: int, dilation: int) -> Array:
    """The axis becomes the places of a window of `size` along it; what stands in the window is a new last axis."""
    if count == 0 or size == 0:
        return jnp.zeros((*x.shape[:axis], count, *x.shape[axis + 1 :], size), x.dtype)
    last = (count - 1) * stride + 1
    slices = [lax.slice_in_dim(x, at * dilation, at * dilation + last, stride, axis) for at in range(size)]
    return jnp.stack(slices, axis=-1)


@dataclass(frozen=True)
class Pieces:
    """Patches in pieces of whole images, or of whole lines of one image: the first axis of its space.

    images, lines: in a piece. batch, height: in all. inner: places in a line.
    """

    images: int
    lines: int
    batch: int
    height: int
    inner: int

    @property
    def count(self) -> tuple[int, int]:
        """Pieces along the batch, and along an image."""
        return -(-self.batch // self.images), -(-self.height // self.lines)

    def joined(self, y: Array) -> Array:
        """[pieces, groups, rows of a piece, N] -> [groups, rows, N]"""
        across, down = self.count
        y = y.reshape(across, down, y.shape[1], self.images, self.lines, self.inner, y.shape[-1]).transpose(2, 0, 3, 1, 4, 5, 6)
        y = y.reshape(y.shape[0], across * self.images, down * self.lines, self.inner, y.shape[-1])
        return y[:, : self.batch, : self.height].reshape(y.shape[0], -1, y.shape[-1])

    def cut(self, y: Array) -> Array:
        """The inverse, what is missing in the last pieces filled with zeros."""
        across, down = self.count
        y = y.reshape(y.shape[0], self.batch, self.height, self.inner, y.shape[-1])
        missing = (across * self.images - self.batch, down * self.lines - self.height)
        y = jnp.pad(y, ((0, 0), (0, missing[0]), (0, missing[1]), (0, 0), (0, 0)))
        y = y.reshape(y.shape[0], across, self.images, down, self.lines, self.inner, y.shape[-1]).transpose(1, 3, 0, 2, 4, 5, 6)
        return y.reshape(across * down, y.shape[2], -1, y.shape[-1])

    def patches(self, windows: Windows, x: Array, number: Array) -> Array:
        """Of one piece; lines behind the last of an image are zero."""
        across, down = self.count
        pad = [(0, 0), (0, across * self.images - self.batch), *[(0, 0)] * (x.ndim - 2)]
        x = lax.dynamic_slice_in_dim(jnp.pad(x, pad), number // down * self.images, self.images, 1)
        if down == 1:
            return windows.patches(x)
        stride, reach = windows.strides[0], (windows.sizes[0] - 1) * windows.dilations[0] + 1
        extent = (self.lines - 1) * stride + reach
        needed = (down * self.lines - 1) * stride + reach
        x = jnp.pad(x, [(0, max(needed - x.shape[3], 0) if axis == 3 else 0) for axis in range(x.ndim)])
        first = number % down * self.lines
        p = windows.patches(lax.dynamic_slice_in_dim(x, first * stride, extent, 3))
        shape = p.shape
        inside = (first + jnp.arange(self.lines) < self.height)[:, None, None]
        p = p.reshape(shape[0], self.images, self.lines, self.inner, shape[2])
        return jnp.where(inside, p, jnp.zeros_like(p)).reshape(shape)


def pieces_of(recipe: Recipe, windows: Windows, x: Array) -> Pieces | None:
    """How patches are cut; None: they are one piece, since they are few, or since the recipe's scales or random bits would be others.

    That is so with stochastic rounding, and where rows share scales in blocks.
    """
    height, *inner = (*windows.counts(x), *(1,) * (not windows.sizes))
    line = prod(inner) * prod(windows.sizes) * x.shape[0] * x.shape[2]  # elements of a line's patches
    gradients = recipe.gradients or ()
    blocks = [r.schemes[0].rows_together for r in (recipe, *gradients[:1])]
    of_places = gradients[1].schemes[0].rows_together if gradients else 1
    whole = recipe.stochastic or max(blocks) > 1 or x.shape[2] // windows.feature_groups % of_places != 0
    if whole or x.shape[1] * height * line <= MOST_ELEMENTS or prod(windows.counts(x)) == 0:
        return None
    images = min(max(MOST_ELEMENTS // (height * line), 1), x.shape[1])
    lines = height if images > 1 or height * line <= MOST_ELEMENTS else max(MOST_ELEMENTS // line, 1)
    lines = -(-height // -(-height // lines))  # pieces alike
    return Pieces(images=images, lines=lines, batch=x.shape[1], height=height, inner=prod(inner))


class Operands(NamedTuple):
    """All that is traced. x as `Windows` has it; kernel: [groups, N, K]."""

    recipe: Recipe
    x: Array
    kernel: Array


@dataclass(frozen=True)
class Convolution:
    """What is static."""

    windows: Windows
    pieces: Pieces
    dtype: np.dtype

    def bits(self, operands: Operands) -> Array:
        forward = operands._replace(recipe=operands.recipe.replace(backward="exact"))  # one program, whatever the gradients
        return lax.bitcast_convert_type(_codes(self, forward), self.dtype)

    def smooth(self, operands: Operands) -> Array:
        return _smooth(self, operands)

    @property
    def numbers(self) -> Array:
        return jnp.arange(prod(self.pieces.count))

    def piece(self, x: Array, number: Array) -> Array:
        return self.pieces.patches(self.windows, x, number)


def patches_product(convolution: Convolution, operands: Operands) -> Array:
    """Patches times kernel, [groups, rows, N], with the bits of `matmul` of all patches; so have the gradients' products.

    These have no gradients of their own: TypeError. A pixel's gradient is the plain sum over the windows that it stands in; where lines of
    an image are cut, in another order.
    """
    leaves, tree = jax.tree.flatten(operands)
    operands = jax.tree.unflatten(tree, alike(*leaves))
    if operands.recipe.gradients is not None:
        return _emulated(convolution, operands)
    return stand_in(convolution.bits, convolution.smooth, operands)


def _amax(scheme: Scheme, convolution: Convolution, x: Array) -> Array | None:
    """What a scale of all patches comes from."""
    if not scheme.spans_rows:
        return None
    return jnp.max(lax.map(lambda number: largest(scheme, convolution.piece(x, number)), convolution.numbers))


@partial(jax.jit, static_argnums=0)
def _codes(convolution: Convolution, operands: Operands) -> Array:
    recipe, x, (scheme, other) = operands.recipe, operands.x, operands.recipe.schemes
    amax, kernel = _amax(scheme, convolution, x), quantize(other, operands.kernel)

    def piece(number: Array) -> Array:
        total = sum_of_quantized(recipe, quantize(scheme, convolution.piece(x, number), amax=amax), kernel)
        return rounded_result(recipe, total, convolution.dtype)

    return convolution.pieces.joined(lax.map(piece, convolution.numbers))


@partial(jax.jit, static_argnums=0)
def _smooth(convolution: Convolution, operands: Operands) -> Array:
    """The same product in plain f32, of the quantised operands, or "straight_through" of those that came."""
    recipe, (scheme, other) = operands.recipe, operands.recipe.schemes
    raw = recipe.backward == "straight_through"
    held = jax.tree.map(lax.stop_gradient, operands)
    amax = None if raw else _amax(scheme, convolution, held.x)

    def numbers(scheme: Scheme, x: Array, amax: Array | None) -> Array:
        values = x.astype(jnp.float32)
        fixed = lax.stop_gradient(x)
        rounded = values if raw else dequantized(scheme, quantize(scheme, fixed, amax=amax), x.shape[-1])
        return lax.stop_gradient(rounded) + (values - lax.stop_gradient(values))

    kernel = numbers(other, operands.kernel, None)

    @jax.checkpoint
    def piece(number: Array) -> Array:
        p = numbers(scheme, convolution.piece(operands.x, number), amax)
        return jnp.einsum("gmk,gnk->gmn", p, kernel, precision=lax.Precision.HIGHEST)

    return convolution.pieces.joined(lax.map(piece, convolution.numbers))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _emulated(convolution: Convolution, operands: Operands) -> Array:
    """The product whose gradients are products by the recipe's own."""
    return convolution.bits(operands)


def _emulated_backward(convolution: Convolution, operands: Operands, g: Array) -> tuple[Operands]:
    assert operands.recipe.gradients is not None
    recipe_da, recipe_db = (recipe.replace(backward="exact") for recipe in operands.recipe.gradients)
    dx = _of_images(convolution, operands._replace(recipe=recipe_da), g.astype(jnp.float32))
    dkernel = _of_kernel(convolution, operands._replace(recipe=recipe_db), g.astype(jnp.float32))
    nothing: Any = None  # the recipe has no derivative
    return (Operands(recipe=nothing, x=dx.astype(operands.x.dtype), kernel=dkernel.astype(operands.kernel.dtype)),)


_emulated.defvjp(lambda convolution, operands: (convolution.bits(operands), operands), _emulated_backward)


def _floats(recipe: Recipe, a: Quantized, b: Quantized) -> Array:
    return lax.bitcast_convert_type(rounded_result(recipe, sum_of_quantized(recipe, a, b), np.dtype(np.float32)), jnp.float32)


@partial(jax.jit, static_argnums=0)
def _of_images(convolution: Convolution, operands: Operands, g: Array) -> Array:
    """The gradient of x: that of the patches, piece by piece, each added where its pixels stand. g: [groups, rows, N]."""
    recipe, (scheme, other), x = operands.recipe, operands.recipe.schemes, operands.x
    amax = largest(scheme, g) if scheme.spans_rows else None
    kernel = quantize(other, jnp.swapaxes(operands.kernel, -1, -2))

    def piece(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        number, own = part
        d = _floats(recipe, quantize(scheme, own, amax=amax), kernel).astype(x.dtype)
        (back,) = jax.vjp(lambda x: convolution.piece(x, number), x)[1](d)
        return total + back, None

    start, *_ = alike(jnp.zeros_like(x), x, g)
    return lax.scan(piece, start, (convolution.numbers, convolution.pieces.cut(g)))[0]


@partial(jax.jit, static_argnums=0)
def _of_kernel(convolution: Convolution, operands: Operands, g: Array) -> Array:
    """The gradient of the kernel, [groups, N, K]: one place of the window after the other, each a sum over all rows."""
    recipe, (scheme, other), x, windows = operands.recipe, operands.recipe.schemes, operands.x, convolution.windows
    numbers = jnp.arange(prod(windows.sizes))
    amax = jnp.max(lax.map(lambda n: largest(scheme, windows.place(x, n)), numbers)) if scheme.spans_rows else None
    right = quantize(other, jnp.swapaxes(g, -1, -2))
    d = lax.map(
        lambda n: _floats(recipe, quantize(scheme, windows.place(x, n), amax=amax), right), numbers
    )  # [places, groups, features, N]
    return jnp.moveaxis(d, 0, 1).reshape(d.shape[1], -1, d.shape[-1]).swapaxes(-1, -2)
