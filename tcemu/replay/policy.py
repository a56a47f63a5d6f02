"""A function's products as a library on a GPU computes them: a policy for `tcemu.emulate`, by the shapes of a profile."""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from tcemu.emulation.policy import Choice
from tcemu.emulation.products import Product
from tcemu.errors import NotModelled
from tcemu.formats import ARRAY_FORMATS
from tcemu.linalg.dot_general import DimensionNumbers
from tcemu.linalg.kernel_recipes import KernelRecipe
from tcemu.linalg.matmul import matmul
from tcemu.linalg.recipes import Recipe, as_recipe
from tcemu.replay.profiles import Profile, measured, profile_of, profiles

ROWS_BY_COLUMNS: DimensionNumbers = (((1,), (0,)), ((), ()))  # A [M, K], B [K, N]: what the surveys asked


@dataclass(frozen=True)
class KernelProduct:
    """`jax.lax.dot_general` of two matrices by a kernel recipe."""

    recipe: KernelRecipe
    library: str

    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        dimension_numbers: DimensionNumbers = ROWS_BY_COLUMNS,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        **_: Any,
    ) -> Array:
        dtype = jnp.result_type(lhs, rhs) if preferred_element_type is None else preferred_element_type
        return matmul(lhs, rhs, recipe=self.recipe, dtype=dtype)

    @property
    def __name__(self) -> str:
        conditions = self.recipe.conditions
        return f"{self.library} {conditions.m} x {conditions.n} x {self.recipe.k}"


@dataclass(frozen=True, eq=False)
class ByShape:
    """The policy that `policy` makes."""

    profile: Profile
    missing: Recipe | None
    refuses: bool  # what was not measured

    def __call__(self, product: Product) -> Choice:
        if not (product.is_float and product.is_contraction):
            return None
        try:
            self._check(product)
            (m, k), n = product.lhs_shape, product.rhs_shape[1]
            return KernelProduct(measured(self.profile, (m, n, k)), self.profile.library)
        except NotModelled as error:
            if self.refuses:
                raise NotModelled(
                    f"{product}: {error}. replay.policy(..., missing=None) leaves such a product, missing=RECIPE computes it by that recipe"
                ) from None
            return self.missing

    def _check(self, product: Product) -> None:
        """Raises NotModelled for a product of another kind than the profile's, whatever its size."""
        library = self.profile.library
        if product.primitive != "dot_general" or product.dimension_numbers != ROWS_BY_COLUMNS:
            raise NotModelled(f"{library} was measured for A [M, K] times B [K, N], and this product has other axes")
        one = self.profile.recipe(next(iter(self.profile.shapes)))
        given = tuple(ARRAY_FORMATS.get(np.dtype(dtype)) for dtype in (product.lhs_dtype, product.rhs_dtype, product.dtype))
        if given != (one.a, one.b, one.out):
            raise NotModelled(f"{library} was measured for {one.a} x {one.b} -> {one.out}")

    def __repr__(self) -> str:
        return f"policy({self.profile.library!r}, gpu={self.profile.gpu!r})"


def policy(
    library: str, *, version: str | None = None, gpu: str | None = None, missing: Recipe | str | EllipsisType | None = ...
) -> ByShape:
    """A policy for `tcemu.emulate`: each product as a library's kernel for that shape adds it, as it was measured on a GPU.

    library, version, gpu: as `tcemu.replay.recipe` takes them. It knows products of two matrices, A [M, K] and B [K, N], in the formats
    that were measured; products of other than real floats, and what sums nothing, are left.
    missing: what becomes of a product that was not measured: a Recipe, or the name of one; None: it is left as it is. Not given: it raises.
    The library was asked call by call, with both matrices in row-major order. A compiler that fuses a product with what stands around it,
    or tries several kernels, may take another one.
    Gradients are those of the product in plain f32, as `tcemu.matmul` with a kernel recipe has them.
    Raises NotModelled or ValueError as `tcemu.replay.recipe`, NotModelled for a library that was measured with scales or a bias, ValueError
    for a name that is no recipe's; the policy raises NotModelled for a product that was not measured.
    """
    found = profile_of(profiles(), library, version, gpu)
    known = found.recipe(next(iter(found.shapes))).conditions
    if known.scales is not None or known.bias is not None:
        besides = " and ".join(filter(None, (known.scales and f"scales ({known.scales})", known.bias and f"a bias ({known.bias})")))
        raise NotModelled(
            f"{library} was measured with {besides}, and the products of a program have none. replay.recipe({library!r}, m, n, k) is for "
            "tcemu.matmul, which takes them"
        )
    if missing is ...:
        return ByShape(found, None, refuses=True)
    return ByShape(found, as_recipe(missing) if isinstance(missing, str) else missing, refuses=False)
