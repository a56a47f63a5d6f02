"""A convolution as one matrix product of patches, as implicit-GEMM kernels see it. All else is slices, pads and transposes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.linalg.dot_general import DimensionNumbers

PLAIN, BATCHED = (((1,), (0,)), ((), ())), (((2,), (1,)), ((0,), (0,)))  # [M, K] · [K, N], and the same with the groups in front


class ConvolutionParams(NamedTuple):
    """The parameters of `lax.conv_general_dilated` that say which numbers are multiplied."""

    window_strides: Sequence[int]
    padding: Sequence[tuple[int, int]]
    lhs_dilation: Sequence[int]
    rhs_dilation: Sequence[int]
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int


def through_patches(lhs: Array, rhs: Array, params: ConvolutionParams, product: Callable[[Array, Array, DimensionNumbers], Array]) -> Array:
    """`lax.conv_general_dilated` by `product(patches, kernel, dimension_numbers)`.

    K runs over the places of the window in row-major order, and within a place over the input features of a group. M is the batch and the
    places of the output; N is the output features of a group. Padding and lhs_dilation put in zeros, which take part in the sums. Groups
    are a batch axis of the product.
    """
    lhs_spec, rhs_spec, out_spec = params.dimension_numbers
    batch_group_count, feature_group_count = params.batch_group_count, params.feature_group_count
    groups = feature_group_count * batch_group_count  # one of them is 1
    x = lax.transpose(lhs, lhs_spec)  # [batch, features, *space]
    w = lax.transpose(rhs, rhs_spec)  # [output features, features of a group, *window]
    (batch, _, *_), (outputs, features, *window) = x.shape, w.shape
    config = [(0, 0, 0)] * 2 + [(low, high, step - 1) for (low, high), step in zip(params.padding, params.lhs_dilation, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), config)
    for axis, (size, stride, dilation) in enumerate(zip(window, params.window_strides, params.rhs_dilation, strict=True), 2):
        x = _windows(x, axis, size, stride, dilation)
    space = x.shape[2 : 2 + len(window)]
    batch //= batch_group_count
    x = x.reshape(batch_group_count, batch, feature_group_count, features, int(np.prod(space)), int(np.prod(window)))
    patches = x.transpose(0, 2, 1, 4, 5, 3).reshape(groups, batch * x.shape[4], x.shape[5] * features)
    kernel = w.reshape(groups, outputs // groups, features, x.shape[5]).transpose(0, 3, 2, 1).reshape(groups, *patches.shape[2:], -1)
    y = product(patches[0], kernel[0], PLAIN)[None] if groups == 1 else product(patches, kernel, BATCHED)
    y = jnp.moveaxis(y.reshape(groups, batch, *space, outputs // groups), (0, -1), (1, 2)).reshape(batch, outputs, *space)
    return lax.transpose(y, np.argsort(out_spec))


def _windows(x: Array, axis: int, size: int, stride: int, dilation: int) -> Array:
    """The axis becomes the places of a window of `size` along it; what stands in the window is a new last axis."""
    count = max((x.shape[axis] - (size - 1) * dilation - 1) // stride + 1, 0)
    if count == 0 or size == 0:
        return jnp.zeros((*x.shape[:axis], count, *x.shape[axis + 1 :], size), x.dtype)
    last = (count - 1) * stride + 1
    slices = [lax.slice_in_dim(x, at * dilation, at * dilation + last, stride, axis) for at in range(size)]
    return jnp.stack(slices, axis=-1)
