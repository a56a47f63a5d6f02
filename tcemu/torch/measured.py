"""A policy of kernel recipes: products as a library computed them on a GPU, where somebody measured their shape."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from tcemu.emulation.products import Product
from tcemu.errors import NotModelled
from tcemu.linalg.dot_general import DimensionNumbers, product_axes
from tcemu.linalg.kernel_recipes import KernelRecipe
from tcemu.linalg.matmul import matmul
from tcemu.replay.profiles import recipe

LIBRARIES = {"float16": "torch-f16", "bfloat16": "torch-bf16", "float32": "torch-f32"}  # what torch.mm was measured as


@dataclass(frozen=True)
class Measured:
    """`jax.lax.dot_general` by a kernel recipe, of two matrices."""

    recipe: KernelRecipe

    @property
    def __name__(self) -> str:
        return f"{self.recipe.conditions.library}, {self.recipe.slices}"

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> Array:
        """The product. precision has no effect."""
        axes = product_axes(dimension_numbers, lhs.ndim, rhs.ndim)
        k = prod(lhs.shape[at] for at in axes.lhs_contracting)
        shape = [*(lhs.shape[at] for at in axes.rows), *(rhs.shape[at] for at in axes.columns)]
        dtype = np.dtype(lhs.dtype if preferred_element_type is None else preferred_element_type)
        d = matmul(lhs.transpose(*axes.of_a).reshape(-1, k), rhs.transpose(*axes.of_b).reshape(k, -1), recipe=self.recipe, dtype=dtype)
        return d.reshape(shape)


@dataclass(frozen=True)
class AsMeasured:
    """A policy. Made by `as_measured`."""

    gpu: str
    tf32: bool
    transposed: bool
    strict: bool

    def __call__(self, product: Product) -> Measured | None:
        try:
            return Measured(self._recipe(product))
        except NotModelled:
            if self.strict:
                raise
            return None

    def _recipe(self, product: Product) -> KernelRecipe:
        numbers, dtype = product.dimension_numbers, jnp.dtype(product.lhs_dtype).name
        if product.primitive != "dot_general" or dtype not in LIBRARIES or not isinstance(numbers, tuple):
            raise NotModelled(f"{product}: nothing was measured of {product.primitive} of {dtype}")
        axes = product_axes(cast(DimensionNumbers, numbers), len(product.lhs_shape), len(product.rhs_shape))
        if axes.lhs_batch or len(product.rhs_shape) != 2 or axes.lhs_contracting != (len(product.lhs_shape) - 1,):
            raise NotModelled(f"{product}: products of two matrices were measured, row by row, and no batches of them")
        if axes.rhs_contracting != (0,) and not self.transposed:
            raise NotModelled(
                f"{product}: its weight lies transposed, [N, K]. torch.mm was measured with both operands row by row, and cuBLAS may take "
                "another kernel; as_measured(transposed=True) takes the one that was measured"
            )
        m, k, n = prod(product.lhs_shape[:-1]), product.lhs_shape[-1], product.shape[-1]
        library = "torch-tf32" if self.tf32 and dtype == "float32" else LIBRARIES[dtype]
        return recipe(library, m, n, k, gpu=self.gpu)


def as_measured(gpu: str = "H200", *, tf32: bool = False, transposed: bool = False, strict: bool = False) -> AsMeasured:
    """A policy for `emulate`: forward products as torch's cuBLAS computed them on a GPU, where their shape was measured (`tcemu.replay`).

    gpu: a part of its name. tf32: float32 products with tf32 allowed. transposed: whether products whose weight lies transposed, as those
    of `torch.nn.Linear`, count as measured: torch.mm was measured with both operands row by row, and cuBLAS may take another kernel for
    another memory order. The same holds for a bias, which is added in f32 before the result is rounded. Other products are left, and the
    report lists them; strict: they raise NotModelled. Gradients are those of the plain product.
    """
    return AsMeasured(gpu, tf32, transposed, strict)
