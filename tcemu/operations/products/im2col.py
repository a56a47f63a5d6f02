"""A convolution as one product of patches (im2col) by a recipe, in pieces along its rows, so that memory never holds all patches.

Pieces change no bit of a product: rows are summed independently, and a scale that all rows share is found before.
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

from tcemu.base.meshes import match_varying_axes
from tcemu.operations.products.differentiable import attach_derivative, differentiable_product
from tcemu.operations.products.matmul import multiply_quantized, round_result
from tcemu.operations.products.recipes import Recipe
from tcemu.operations.quantize.quantizer import QuantizedOperand, Scheme, amax_codes, dequantize, quantize

MOST_ELEMENTS = 1 << 22  # elements of the patches in one piece, but at least one line of an image


@dataclass(frozen=True)
class Windows:
    """The windows on images x, [batch groups, batch, features, *space], already padded and dilated. One number per axis of space."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    feature_groups: int

    def counts(self, x: Array | jax.ShapeDtypeStruct) -> tuple[int, ...]:
        """Returns the number of windows along each axis."""
        return tuple(
            max((extent - (size - 1) * dilation - 1) // stride + 1, 0)
            for extent, size, stride, dilation in zip(x.shape[3:], self.sizes, self.strides, self.dilations, strict=True)
        )

    def patches(self, x: Array) -> Array:
        """Returns patches [groups, rows, K]: a row per image and window; K is the positions in the window, then the features of a group."""
        (groups, batch, features, *_), counts = x.shape, self.counts(x)
        for axis, (count, size, stride, dilation) in enumerate(zip(counts, self.sizes, self.strides, self.dilations, strict=True), 3):
            x = _windows(x, axis, count, size, stride, dilation)
        shape = (groups, batch, self.feature_groups, features // self.feature_groups, prod(counts), prod(self.sizes))
        x = x.reshape(shape).transpose(0, 2, 1, 4, 5, 3)
        return x.reshape(groups * self.feature_groups, batch * shape[4], shape[5] * shape[3])

    def patch_column(self, x: Array, number: Array) -> Array:
        """Returns one position of all windows, [groups, features of a group, rows]: part `number` of K, which may be traced."""
        (groups, batch, features, *_), counts = x.shape, self.counts(x)
        at = jnp.unravel_index(number, self.sizes) if self.sizes else ()
        for axis, (start, count, stride, dilation) in enumerate(zip(at, counts, self.strides, self.dilations, strict=True), 3):
            x = lax.dynamic_slice_in_dim(x, start * dilation, (count - 1) * stride + 1, axis)
            x = lax.slice_in_dim(x, 0, None, stride, axis)
        x = x.reshape(groups, batch, self.feature_groups, features // self.feature_groups, prod(counts)).transpose(0, 2, 3, 1, 4)
        return x.reshape(groups * self.feature_groups, x.shape[2], batch * x.shape[4])


def _windows(x: Array, axis: int, count: int, size: int, stride: int, dilation: int) -> Array:
    """Replaces the axis by the windows of `size` along it; the window's elements are a new last axis."""
    if count == 0 or size == 0:
        return jnp.zeros((*x.shape[:axis], count, *x.shape[axis + 1 :], size), x.dtype)
    last = (count - 1) * stride + 1
    slices = [lax.slice_in_dim(x, at * dilation, at * dilation + last, stride, axis) for at in range(size)]
    return jnp.stack(slices, axis=-1)


@dataclass(frozen=True)
class Pieces:
    """Pieces of whole images, or of whole lines of one image: the first axis of space."""

    images: int  # images per piece
    lines: int  # lines per piece
    batch: int  # images in all
    height: int  # lines per image
    inner: int  # windows per line

    @property
    def count(self) -> tuple[int, int]:
        """The number of pieces along the batch and along an image."""
        return -(-self.batch // self.images), -(-self.height // self.lines)

    def join_rows(self, y: Array) -> Array:
        """Joins [pieces, groups, rows of a piece, N] to [groups, rows, N]."""
        across, down = self.count
        y = y.reshape(across, down, y.shape[1], self.images, self.lines, self.inner, y.shape[-1]).transpose(2, 0, 3, 1, 4, 5, 6)
        y = y.reshape(y.shape[0], across * self.images, down * self.lines, self.inner, y.shape[-1])
        return y[:, : self.batch, : self.height].reshape(y.shape[0], -1, y.shape[-1])

    def split_rows(self, y: Array) -> Array:
        """Splits [groups, rows, N] into pieces, the inverse of `join_rows`; the last pieces are padded with zeros."""
        across, down = self.count
        y = y.reshape(y.shape[0], self.batch, self.height, self.inner, y.shape[-1])
        missing = (across * self.images - self.batch, down * self.lines - self.height)
        y = jnp.pad(y, ((0, 0), (0, missing[0]), (0, missing[1]), (0, 0), (0, 0)))
        y = y.reshape(y.shape[0], across, self.images, down, self.lines, self.inner, y.shape[-1]).transpose(1, 3, 0, 2, 4, 5, 6)
        return y.reshape(across * down, y.shape[2], -1, y.shape[-1])

    def patches(self, windows: Windows, x: Array, number: Array) -> Array:
        """Returns the patches of one piece. Lines behind the last one of an image are zero."""
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


def plan_pieces(recipe: Recipe, windows: Windows, x: Array) -> Pieces | None:
    """Plans the pieces. Returns None for one piece: few patches, stochastic rounding, or scales that several rows share in blocks.

    In the last two cases pieces would change the recipe's random bits or scales.
    """
    height, *inner = (*windows.counts(x), *(1,) * (not windows.sizes))
    line = prod(inner) * prod(windows.sizes) * x.shape[0] * x.shape[2]  # elements in the patches of a line
    gradients = recipe.gradients or ()
    blocks = [r.schemes[0].row_granularity for r in (recipe, *gradients[:1])]
    of_places = gradients[1].schemes[0].row_granularity if gradients else 1
    whole = recipe.is_stochastic or max(blocks) > 1 or x.shape[2] // windows.feature_groups % of_places != 0
    if whole or x.shape[1] * height * line <= MOST_ELEMENTS or prod(windows.counts(x)) == 0:
        return None
    images = min(max(MOST_ELEMENTS // (height * line), 1), x.shape[1])
    lines = height if images > 1 or height * line <= MOST_ELEMENTS else max(MOST_ELEMENTS // line, 1)
    lines = -(-height // -(-height // lines))  # pieces of equal size
    return Pieces(images=images, lines=lines, batch=x.shape[1], height=height, inner=prod(inner))


class PatchOperands(NamedTuple):
    """The traced part of a product of patches."""

    recipe: Recipe
    x: Array  # images, as `Windows` has them
    kernel: Array  # [groups, N, K]


@dataclass(frozen=True)
class PatchOptions:
    """The static part of a product of patches: a `differentiable.DifferentiableProduct`."""

    windows: Windows
    pieces: Pieces
    dtype: np.dtype

    @partial(jax.jit, static_argnums=0)
    def bits(self, operands: PatchOperands) -> Array:
        recipe, x, (scheme, other) = operands.recipe, operands.x, operands.recipe.schemes
        amax, kernel = _patch_amax(scheme, self, x), quantize(other, operands.kernel)

        def piece(number: Array) -> Array:
            total = multiply_quantized(recipe, quantize(scheme, self.piece(x, number), amax=amax), kernel)
            return round_result(recipe, total, self.dtype)

        return lax.bitcast_convert_type(self.pieces.join_rows(lax.map(piece, self.numbers)), self.dtype)

    @partial(jax.jit, static_argnums=0)
    def smooth(self, operands: PatchOperands) -> Array:
        """Computes the product in plain f32, from the quantised operands, or for "straight_through" from the given ones."""
        recipe, (scheme, other) = operands.recipe, operands.recipe.schemes
        raw = recipe.backward == "straight_through"
        fixed_operands = jax.tree.map(lax.stop_gradient, operands)
        amax = None if raw else _patch_amax(scheme, self, fixed_operands.x)

        def numbers(scheme: Scheme, x: Array, amax: Array | None) -> Array:
            values = x.astype(jnp.float32)
            fixed = lax.stop_gradient(x)
            rounded = values if raw else dequantize(scheme, quantize(scheme, fixed, amax=amax), x.shape[-1])
            return attach_derivative(rounded, values)

        kernel = numbers(other, operands.kernel, None)

        @jax.checkpoint
        def piece(number: Array) -> Array:
            p = numbers(scheme, self.piece(operands.x, number), amax)
            return jnp.einsum("gmk,gnk->gmn", p, kernel, precision=lax.Precision.HIGHEST)

        return self.pieces.join_rows(lax.map(piece, self.numbers))

    def backward(self, operands: PatchOperands, g: Array) -> PatchOperands:
        recipe_da, recipe_db = (recipe.replace(backward="exact") for recipe in operands.recipe.require_gradients())
        dx = _image_gradient(self, operands._replace(recipe=recipe_da), g.astype(jnp.float32))
        dkernel = _kernel_gradient(self, operands._replace(recipe=recipe_db), g.astype(jnp.float32))
        nothing: Any = None  # the recipe has no derivative
        return PatchOperands(recipe=nothing, x=dx.astype(operands.x.dtype), kernel=dkernel.astype(operands.kernel.dtype))

    @property
    def numbers(self) -> Array:
        """The indices of all pieces."""
        return jnp.arange(prod(self.pieces.count))

    def piece(self, x: Array, number: Array) -> Array:
        """Returns the patches of one piece."""
        return self.pieces.patches(self.windows, x, number)


def patches_product(options: PatchOptions, operands: PatchOperands) -> Array:
    """Multiplies patches by a kernel, [groups, rows, N], with the bits of `matmul` of all patches; the gradients' products too.

    Gradients by recipes have no gradients of their own: JAX raises TypeError. A pixel's gradient is the plain sum over the windows that
    contain it; where the lines of an image are split, the order of this sum differs.
    """
    return differentiable_product(options, operands)


def _patch_amax(scheme: Scheme, options: PatchOptions, x: Array) -> Array | None:
    """Returns the max magnitude of all patches, where a scale spans rows."""
    if not scheme.spans_rows:
        return None
    return jnp.max(lax.map(lambda number: amax_codes(scheme, options.piece(x, number)), options.numbers))


def _f32_product(recipe: Recipe, a: QuantizedOperand, b: QuantizedOperand) -> Array:
    return lax.bitcast_convert_type(round_result(recipe, multiply_quantized(recipe, a, b), np.dtype(np.float32)), jnp.float32)


@partial(jax.jit, static_argnums=0)
def _image_gradient(options: PatchOptions, operands: PatchOperands, g: Array) -> Array:
    """Computes the gradient of x from g [groups, rows, N]: piece by piece, each added to its pixels."""
    recipe, (scheme, other), x = operands.recipe, operands.recipe.schemes, operands.x
    amax = amax_codes(scheme, g) if scheme.spans_rows else None
    kernel = quantize(other, jnp.swapaxes(operands.kernel, -1, -2))

    def piece(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        number, own = part
        d = _f32_product(recipe, quantize(scheme, own, amax=amax), kernel).astype(x.dtype)
        (back,) = jax.vjp(lambda x: options.piece(x, number), x)[1](d)
        return total + back, None

    start, *_ = match_varying_axes(jnp.zeros_like(x), x, g)
    return lax.scan(piece, start, (options.numbers, options.pieces.split_rows(g)))[0]


@partial(jax.jit, static_argnums=0)
def _kernel_gradient(options: PatchOptions, operands: PatchOperands, g: Array) -> Array:
    """Computes the gradient of the kernel, [groups, N, K]: position by position in the window, each a sum over all rows."""
    recipe, (scheme, other), x, windows = operands.recipe, operands.recipe.schemes, operands.x, options.windows
    numbers = jnp.arange(prod(windows.sizes))
    amax = jnp.max(lax.map(lambda n: amax_codes(scheme, windows.patch_column(x, n)), numbers)) if scheme.spans_rows else None
    right = quantize(other, jnp.swapaxes(g, -1, -2))
    d = lax.map(
        lambda n: _f32_product(recipe, quantize(scheme, windows.patch_column(x, n), amax=amax), right), numbers
    )  # [places, groups, features, N]
    return jnp.moveaxis(d, 0, 1).reshape(d.shape[1], -1, d.shape[-1]).swapaxes(-1, -2)
