"""`matmul` by a kernel recipe: arguments checked, bits by the engine, derivatives by the plain product."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from tcemu.formats import ARRAY_FORMATS, Format, convert, to_float
from tcemu.gradients import stand_in
from tcemu.linalg.arguments import in_jax
from tcemu.linalg.kernel_recipes import KernelRecipe
from tcemu.linalg.kernel_sums import operand_codes, outputs
from tcemu.linalg.kernel_totals import extras_of
from tcemu.linalg.shapes import broadcasts, shape_of_product

Floats = Array | np.ndarray


class Given(NamedTuple):
    """The operands of a product by a kernel recipe, floats; None: there is none."""

    a: Floats  # [..., M, K]
    b: Floats  # [..., K, N]
    bias: Floats | None
    scale_a: Floats | None
    scale_b: Floats | None


def product_by_kernel(recipe: KernelRecipe, given: Given, dtype: DTypeLike) -> Array:
    """A·B as the recipe's kernel adds it: see `tcemu.matmul`. Raises TypeError or ValueError for what does not fit the recipe."""
    target = ARRAY_FORMATS.get(np.dtype(dtype))
    if target is None or target.is_integer:
        raise TypeError(f"dtype: got {np.dtype(dtype)}; wanted a float dtype")
    shape = shape_of_product(given.a.shape, given.b.shape, None if given.bias is None else given.bias.shape, names=("a", "b", "bias"))
    _check(recipe, given, shape)
    if 0 in shape:
        return jnp.zeros(shape, dtype)
    held = jax.tree.map(lambda x: in_jax(x, once=recipe.cast == "RN"), given)  # values that round as those of NumPy's float64

    def bits(given: Given) -> Array:
        a, b = operand_codes(recipe.a, recipe.cast, given.a), operand_codes(recipe.b, recipe.cast, given.b)
        codes = outputs(recipe, a, b, extras_of(recipe.epilogue, (given.scale_a, given.scale_b), given.bias))
        codes = codes if recipe.out == target else convert(recipe.out, target, codes)
        return lax.bitcast_convert_type(codes, np.dtype(dtype))

    return stand_in(bits, lambda given: _smooth(recipe, given), held)


def _check(recipe: KernelRecipe, given: Given, shape: tuple[int, ...]) -> None:
    conditions, k = recipe.conditions, given.a.shape[-1]
    if k != recipe.k:
        raise ValueError(
            f"a is {list(given.a.shape)}, so K is {k}; this recipe is for K = {recipe.k}, and a kernel for another K may add otherwise"
        )
    for name, size, wanted in (("M", shape[-2], conditions.m), ("N", shape[-1], conditions.n)):
        if wanted is not None and size != wanted:
            raise ValueError(
                f"{name} is {size}, and this recipe was seen at {name} = {wanted}; a library may take another kernel for another shape. "
                "recipe.of_any_shape() computes some rows and columns of that product, or what this kernel would compute"
            )
    rows = {"scale_a": (shape[-2], 1), "scale_b": (1, shape[-1])}
    for name, scale in (("scale_a", given.scale_a), ("scale_b", given.scale_b)):
        if scale is None:
            continue
        if not recipe.epilogue.scaled:
            raise ValueError(f"{name}: this recipe's epilogue is not scaled; leave it out, or give the recipe Epilogue(scaled=True)")
        if scale.size == 1 and conditions.scales != "rows":
            continue
        if conditions.scales == "tensor" or scale.shape[-2:] != rows[name] or not broadcasts(scale.shape, shape):
            wanted = {"tensor": "one number", "rows": f"[..., {rows[name][0]}, {rows[name][1]}]"}
            either = wanted.get(conditions.scales or "", f"one number, or {wanted['rows']}")
            raise ValueError(
                f"{name}: got shape {list(scale.shape)}; wanted {either}"
                + ("" if conditions.scales is None else f", as this recipe was seen with (conditions.scales={conditions.scales!r})")
            )
    if given.bias is not None and conditions.bias is not None:
        of_columns = given.bias.ndim < 2 or given.bias.shape[-2] == 1
        if of_columns != conditions.bias.endswith("columns") and shape[-2] != 1:
            raise ValueError(f"bias: got shape {list(given.bias.shape)}; this recipe was seen with a bias in {conditions.bias}")


def _smooth(recipe: KernelRecipe, given: Given) -> Array:
    """The product of the rounded operands in plain f32, roundings counted as identity."""

    def rounded(fmt: Format, x: Array) -> Array:
        held = to_float(fmt, operand_codes(fmt, recipe.cast, lax.stop_gradient(x)))
        x = x.astype(jnp.float32)
        return lax.stop_gradient(held) + x - lax.stop_gradient(x)

    a, b = rounded(recipe.a, jnp.asarray(given.a)), rounded(recipe.b, jnp.asarray(given.b))
    k = recipe.slices.used
    total = jnp.matmul(a[..., :k], b[..., :k, :], precision=lax.Precision.HIGHEST)
    total *= recipe.epilogue.alpha
    for scale in (given.scale_a, given.scale_b):
        if scale is not None:
            total = total * (jnp.reshape(scale, ()) if scale.size == 1 else scale).astype(jnp.float32)
    return total if given.bias is None else total + recipe.epilogue.beta * given.bias.astype(jnp.float32)
