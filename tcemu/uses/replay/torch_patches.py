"""Products within other operations of PyTorch on Hopper: the patch convolution of a vision transformer, and grouped products of experts.

Source: kernels and words of torch 2.11.0 on an NVIDIA H200, 42 patch convolutions and 20 grouped products in bf16 and f16
(tests/gpu_runs/torch_products.py, seed 0): the orders below give every compared word, 60 and 100 of each. In f16 and f32 a grouped product
launched the kernels of one product an expert.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.base.errors import NotModelled
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.functional.torch_cuda.product_kernels import TorchProduct, check_product, tensor_core
from tcemu.operations.products.library.kernel_matmul import matmul_with_kernel
from tcemu.operations.products.library.kernel_recipe import Epilogue, KernelRecipe, Lanes, Slices
from tcemu.operations.products.recipe_kinds import ProductOperands
from tcemu.uses.replay.torch_products import matmul

FEW_CHANNELS, MANY_CHANNELS = 320, 768  # of the output: up to the first no tensor core was seen in 16 bits, from the second on one
INSTRUCTION_K = 16


def patch_convolution(x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None) -> Array:
    """Compute a convolution of patches, whose stride is its kernel's size, as cuDNN does it for PyTorch on Hopper.

    Without a tensor core the products are a chain of f32 fma over channels, rows and columns. With one, each row and column of a patch has
    an instruction of its own, whose products are those of its channels. A bias is added by another kernel, to the rounded result.

    Args:
        x: [batch, channels, height, width] in bf16, f16 or f32.
        weight: [outputs, channels, size, size].
        bias: [outputs], or None.

    Returns:
        [batch, outputs, height // size, width // size].

    Raises:
        NotModelled: Nothing tells whether cuDNN takes a tensor core.
        Unsupported: Another dtype.
        ValueError: The shapes do not fit.
    """
    x, weight, added = jnp.asarray(x), jnp.asarray(weight), None if bias is None else jnp.asarray(bias)
    if x.ndim != 4 or weight.ndim != 4 or weight.shape[1] != x.shape[1] or weight.shape[2] != weight.shape[3] or x.dtype != weight.dtype:
        raise ValueError(
            f"{x.dtype}{list(x.shape)} and {weight.dtype}{list(weight.shape)}: expected [B, C, H, W] and [O, C, P, P] in one dtype"
        )
    if added is not None and (added.shape != weight.shape[:1] or added.dtype != x.dtype):
        raise ValueError(f"bias: got {added.dtype}{list(added.shape)}; expected {x.dtype}{list(weight.shape[:1])}")
    batch, channels, height, width = x.shape
    outputs, size = weight.shape[0], weight.shape[2]
    rows, columns = height // size, width // size
    call = TorchProduct(jnp.dtype(x.dtype).name, batch * rows * columns, channels * size * size, outputs)
    check_product(call)
    patches = x[:, :, : rows * size, : columns * size].reshape(batch, channels, rows, size, columns, size).transpose(0, 2, 4, 1, 3, 5)
    if call.format != F32 and FEW_CHANNELS < outputs < MANY_CHANNELS:
        raise NotModelled(
            f"a patch convolution to {outputs} channels in {call.dtype}: cuDNN took no tensor core up to {FEW_CHANNELS} channels, and one "
            f"from {MANY_CHANNELS} on; a recording of its kernels would teach the shapes between"
        )
    with_tensor_core = call.format != F32 and outputs >= MANY_CHANNELS
    if with_tensor_core:
        padding = -channels % INSTRUCTION_K
        patches = jnp.pad(jnp.moveaxis(patches, 3, 5), [(0, 0)] * 5 + [(0, padding)])
        weight = jnp.pad(jnp.moveaxis(weight, 1, 3), [(0, 0)] * 3 + [(0, padding)])
    a, b = patches.reshape(call.m, -1), weight.reshape(outputs, -1).T
    factors = call.format if with_tensor_core else F32
    epilogue = Epilogue(between=None if bias is None or call.format == F32 else call.format)
    recipe = KernelRecipe(
        factors, factors, call.format, tensor_core(call) if with_tensor_core else Lanes(), Slices.single(a.shape[1]), epilogue=epilogue
    )
    y = matmul_with_kernel(recipe, ProductOperands(a, b, added), x.dtype)
    return y.reshape(batch, rows, columns, outputs).transpose(0, 3, 1, 2)


def grouped_matmul(x: ArrayLike, weights: ArrayLike, offsets: Any, *, transposed_b: bool = False, **options: Any) -> Array:
    """Compute the products of experts as `torch._grouped_mm` does on Hopper.

    In bf16 one kernel of CUTLASS multiplies every expert's rows, K in one slice. In f16 and f32 each expert has a product of its own.

    Args:
        x: [M, K], the rows of one expert after the other.
        weights: [experts, K, N], logical.
        offsets: The row after an expert's last, ascending, as integers that are known.
        transposed_b: The weights lie in memory as [experts, N, K].
        **options: Of `matmul`, for f16 and f32.

    Returns:
        [M, N].

    Raises:
        NotModelled, Unsupported: As in `matmul`.
        ValueError: The shapes or the offsets do not fit.
    """
    x, weights = jnp.asarray(x), jnp.asarray(weights)
    edges = [0, *np.asarray(offsets, np.int64).tolist()]
    if x.ndim != 2 or weights.ndim != 3 or len(edges) != len(weights) + 1 or sorted(edges) != edges or edges[-1] != len(x):
        raise ValueError(
            f"{list(x.shape)}, {list(weights.shape)} and offsets {edges[1:]}: expected [M, K], [E, K, N] and E offsets up to M"
        )
    call = TorchProduct(jnp.dtype(x.dtype).name, max(1, len(x)), x.shape[1], weights.shape[2])
    check_product(call)
    recipe = (
        KernelRecipe(call.format, call.format, call.format, tensor_core(call), Slices.single(call.k)) if call.dtype == "bfloat16" else None
    )
    parts = []
    for expert, (start, stop) in enumerate(pairwise(edges)):
        if start == stop:
            continue
        rows = x[start:stop]
        if recipe is not None:
            parts.append(matmul_with_kernel(recipe, ProductOperands(rows, weights[expert]), x.dtype))
        else:
            parts.append(matmul(rows, weights[expert], transposed_b=transposed_b, **options))
    return jnp.concatenate(parts) if parts else jnp.zeros((0, call.n), x.dtype)
