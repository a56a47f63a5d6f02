"""A convolution as one matrix product of patches, as implicit-GEMM kernels see it. All else is slices, pads and transposes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.linalg.dot_general import DotGeneral
from tcemu.linalg.patches import Convolution, Operands, Windows, patches_product, pieces_of

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


def through_patches(run: Callable[..., Array], lhs: Array, rhs: Array, params: ConvolutionParams, **kept: Any) -> Array:
    """`lax.conv_general_dilated` by `run(patches, kernel, dimension_numbers, **kept)`.

    K runs over the places of the window in row-major order, and within a place over the input features of a group. M is the batch and the
    places of the output; N is the output features of a group. Padding and lhs_dilation put in zeros, which take part in the sums. Groups
    are a batch axis of the product. A recipe's product of many patches is cut along M, with the same bits: see `linalg.patches`.
    """
    lhs_spec, rhs_spec, out_spec = params.dimension_numbers
    groups = params.feature_group_count * params.batch_group_count  # one of them is 1
    x = lax.transpose(lhs, lhs_spec)  # [batch, features, *space]
    w = lax.transpose(rhs, rhs_spec)  # [output features, features of a group, *window]
    outputs, features, *window = w.shape
    config = [(0, 0, 0)] * 2 + [(low, high, step - 1) for (low, high), step in zip(params.padding, params.lhs_dilation, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), config)
    batch = x.shape[0] // params.batch_group_count
    x = x.reshape(params.batch_group_count, batch, *x.shape[1:])
    windows = Windows(tuple(window), tuple(params.window_strides), tuple(params.rhs_dilation), params.feature_group_count)
    kernel = w.reshape(groups, outputs // groups, features, -1).transpose(0, 3, 2, 1).reshape(groups, -1, outputs // groups)
    recipe = run.recipe if isinstance(run, DotGeneral) and run.a == "lhs" else None
    pieces = None if recipe is None else pieces_of(recipe, windows, x)
    if recipe is not None and pieces is not None:
        dtype = jnp.result_type(lhs, rhs) if kept["preferred_element_type"] is None else kept["preferred_element_type"]
        y = patches_product(Convolution(windows, pieces, np.dtype(dtype)), Operands(recipe, x, jnp.swapaxes(kernel, -1, -2)))
    else:
        patches = windows.patches(x)
        y = run(patches[0], kernel[0], PLAIN, **kept)[None] if groups == 1 else run(patches, kernel, BATCHED, **kept)
    space = windows.counts(x)
    y = jnp.moveaxis(y.reshape(groups, batch, *space, outputs // groups), (0, -1), (1, 2)).reshape(batch, outputs, *space)
    return lax.transpose(y, np.argsort(out_spec))
