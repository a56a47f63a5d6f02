"""A policy of kernel recipes: products as torch's cuBLAS computed them on a GPU, for shapes that were measured."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import cast

import jax.numpy as jnp

from tcemu.base.errors import NotModelled
from tcemu.operations.products.dot_general import DimensionNumbers, DotGeneral, product_axes
from tcemu.operations.products.library.kernel_recipe import KernelRecipe
from tcemu.uses.emulation.survey import Product
from tcemu.uses.replay.kernel_profiles import get_kernel_recipe

LIBRARY_NAMES = {"float16": "torch-f16", "bfloat16": "torch-bf16", "float32": "torch-f32"}  # libraries that measured torch.mm


@dataclass(frozen=True)
class MeasuredPolicy:
    """The policy that `measured_policy` returns."""

    gpu: str
    tf32: bool
    transposed: bool
    strict: bool

    def __call__(self, product: Product) -> DotGeneral | None:
        try:
            recipe = self._recipe(product)
            return DotGeneral(recipe, name=f"{recipe.conditions.library}, {recipe.slices}")
        except NotModelled:
            if self.strict:
                raise
            return None

    def _recipe(self, product: Product) -> KernelRecipe:
        numbers, dtype = product.dimension_numbers, jnp.dtype(product.lhs_dtype).name
        if product.primitive != "dot_general" or dtype not in LIBRARY_NAMES or not isinstance(numbers, tuple):
            raise NotModelled(f"{product}: nothing was measured of {product.primitive} of {dtype}")
        axes = product_axes(cast(DimensionNumbers, numbers), len(product.lhs_shape), len(product.rhs_shape))
        if axes.lhs_batch or len(product.rhs_shape) != 2 or axes.lhs_contracting != (len(product.lhs_shape) - 1,):
            raise NotModelled(f"{product}: only products of two row-major matrices were measured, and no batches")
        if axes.rhs_contracting != (0,) and not self.transposed:
            raise NotModelled(
                f"{product}: its weight lies transposed, [N, K]. torch.mm was measured with row-major operands, and cuBLAS may take "
                "another kernel; measured_policy(transposed=True) takes the one that was measured"
            )
        m, k, n = prod(product.lhs_shape[:-1]), product.lhs_shape[-1], product.shape[-1]
        library = "torch-tf32" if self.tf32 and dtype == "float32" else LIBRARY_NAMES[dtype]
        return get_kernel_recipe(library, m, n, k, gpu=self.gpu)


def measured_policy(gpu: str = "H200", *, tf32: bool = False, transposed: bool = False, strict: bool = False) -> MeasuredPolicy:
    """Return a policy for `emulate` that computes forward products as torch's cuBLAS computed them on a GPU (`tcemu.replay`).

    Products of a shape that was not measured are left, and the report lists them. Gradients are those of the plain product.

    Args:
        gpu: Part of the GPU's name.
        tf32: Whether float32 products use the measurement with tf32 allowed.
        transposed: Whether products with a transposed weight, such as those of `torch.nn.Linear`, count as measured. torch.mm was measured
            with row-major operands, and cuBLAS may choose another kernel for another memory order. The same holds for a bias, added in
            f32 before the result is rounded.
        strict: Whether a product that was not measured raises NotModelled.

    Returns:
        The policy.
    """
    return MeasuredPolicy(gpu, tf32, transposed, strict)
