"""`matmul` by a kernel recipe: checks of arguments, the bits, and the derivatives of the plain product."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from tcemu.base.compilation import jit_wide_vectors
from tcemu.base.gradients import straight_through
from tcemu.engine.arithmetic.sum_tree import Join
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import to_float
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, Format
from tcemu.operations.products.differentiable import attach_derivative
from tcemu.operations.products.library import kernel_json
from tcemu.operations.products.library.kernel_recipe import Epilogue, KernelRecipe, Steps
from tcemu.operations.products.library.kernel_sums import (
    KernelProgram,
    epilogue_operands,
    kernel_product_codes,
    operand_codes,
    plan_kernel,
)
from tcemu.operations.products.product_arguments import as_jax_array, check_float_dtype, is_broadcastable, product_shape
from tcemu.operations.products.recipe_facts import evidence_level, model_changes
from tcemu.operations.products.recipe_kinds import Evidence, ProductCall, ProductOperands, RecipeFacts, RecipeKind, register_kind
from tcemu.operations.products.recipes import Recipe

Floats = Array | np.ndarray


def matmul_with_kernel(recipe: KernelRecipe, given: ProductOperands, dtype: DTypeLike) -> Array:
    """Computes A·B as the recipe's kernel adds it: see `tcemu.matmul`. Raises TypeError or ValueError for unfit operands."""
    target = ARRAY_FORMATS[check_float_dtype(dtype)]
    shape = product_shape(given.a.shape, given.b.shape, None if given.bias is None else given.bias.shape, names=("a", "b", "bias"))
    _check_operands(recipe, given, shape)
    if 0 in shape:
        return jnp.zeros(shape, dtype)
    to_odd = recipe.cast == "RN"  # these round as NumPy's float64 would
    operands = jax.tree.map(lambda x: as_jax_array(x, round_to_odd=to_odd) if x.dtype == np.float64 else x, given)

    program, tree = plan_kernel(recipe)
    # an array of NumPy goes into the program as it is: jnp.asarray would compile an identity for its shape
    tree = jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else jnp.asarray(x), tree)
    plan = _BitsPlan(program, recipe.cast, recipe.epilogue, recipe.dtype, target, np.dtype(dtype))
    return straight_through(lambda given: _product_bits(plan, tree, given), lambda given: _smooth_product(recipe, given), operands)


class _BitsPlan(NamedTuple):
    """What a program from floats to floats must know besides the order."""

    program: KernelProgram
    cast: str
    epilogue: Epilogue
    result: Format  # of the kernel
    target: Format  # of the returned array
    dtype: np.dtype


@jit_wide_vectors(0)
def _product_bits(plan: _BitsPlan, tree: Join, given: ProductOperands) -> Array:
    """Computes a product from floats to floats as one program, so that no conversion is compiled by itself."""
    a, b = (operand_codes(fmt, plan.cast, x) for fmt, x in zip(plan.program.factors, (given.a, given.b), strict=True))
    extras = epilogue_operands(plan.epilogue, (given.scale_a, given.scale_b), given.bias)
    codes = kernel_product_codes(plan.program, tree, a, b, extras)
    codes = codes if plan.result == plan.target else convert(plan.result, plan.target, codes)
    return lax.bitcast_convert_type(codes, plan.dtype)


def _check_operands(recipe: KernelRecipe, given: ProductOperands, shape: tuple[int, ...]) -> None:
    conditions, k = recipe.conditions, given.a.shape[-1]
    if k != recipe.k:
        raise ValueError(
            f"a is {list(given.a.shape)}, so K is {k}; this recipe is for K = {recipe.k}, and the order for another K may differ"
        )
    for name, size, expected in (("M", shape[-2], conditions.m), ("N", shape[-1], conditions.n)):
        if expected is not None and size != expected:
            raise ValueError(
                f"{name} is {size}, and this recipe was observed at {name} = {expected}; another shape may get another kernel. "
                "recipe.without_shape() computes some rows and columns of that product, or the product by this kernel"
            )
    rows = {"scale_a": (shape[-2], 1), "scale_b": (1, shape[-1])}
    for name, scale in (("scale_a", given.scale_a), ("scale_b", given.scale_b)):
        if scale is None:
            continue
        if not recipe.epilogue.scaled:
            raise ValueError(f"{name}: this recipe's epilogue is not scaled; leave it out, or give the recipe Epilogue(scaled=True)")
        if scale.size == 1 and conditions.scales != "rows":
            continue
        if conditions.scales == "tensor" or scale.shape[-2:] != rows[name] or not is_broadcastable(scale.shape, shape):
            expected = {"tensor": "one number", "rows": f"[..., {rows[name][0]}, {rows[name][1]}]"}
            either = expected.get(conditions.scales or "", f"one number, or {expected['rows']}")
            raise ValueError(
                f"{name}: got shape {list(scale.shape)}; expected {either}"
                + ("" if conditions.scales is None else f", as this recipe was observed with (conditions.scales={conditions.scales!r})")
            )
    if given.bias is not None and conditions.bias is not None:
        per_column = given.bias.ndim < 2 or given.bias.shape[-2] == 1
        if per_column != conditions.bias.endswith("columns") and shape[-2] != 1:
            raise ValueError(f"bias: got shape {list(given.bias.shape)}; this recipe was observed with a bias in {conditions.bias}")


def _smooth_product(recipe: KernelRecipe, given: ProductOperands) -> Array:
    """Multiplies the rounded operands in plain f32. Roundings count as identity."""

    def rounded(fmt: Format, x: Array) -> Array:
        value = to_float(fmt, operand_codes(fmt, recipe.cast, lax.stop_gradient(x)))
        return attach_derivative(value, x.astype(jnp.float32))

    a, b = rounded(recipe.a, jnp.asarray(given.a)), rounded(recipe.b, jnp.asarray(given.b))
    k = recipe.slices.used
    total = jnp.matmul(a[..., :k], b[..., :k, :], precision=lax.Precision.HIGHEST)
    total *= recipe.epilogue.alpha
    for scale in (given.scale_a, given.scale_b):
        if scale is not None:
            total = total * (jnp.reshape(scale, ()) if scale.size == 1 else scale).astype(jnp.float32)
    return total if given.bias is None else total + recipe.epilogue.beta * given.bias.astype(jnp.float32)


# ---- the kind of recipe


def _multiply(recipe: KernelRecipe, call: ProductCall) -> Array:
    call.forbid("key", "axis_name", why="a kernel recipe rounds to nearest, on one device")
    return matmul_with_kernel(recipe, call.operands, call.dtype)


def _facts(recipe: KernelRecipe, evidence: Evidence) -> RecipeFacts:
    unit, recorded = recipe.unit, recipe.conditions.evidence
    if not isinstance(unit, Steps):
        return recipe.conditions.gpu, "fma", "", recorded
    plain = Recipe(unit.op, unit.target, model=unit.model)
    return plain.target, str(plain.op), model_changes(plain), recorded or evidence_level(plain, evidence)


KERNEL_KIND = register_kind(
    RecipeKind(
        saved_as="kernel_recipe", types=(KernelRecipe,), find=lambda name: None,  # measured by shape
        to_dict=kernel_json.to_dict, from_dict=kernel_json.from_dict,
        multiply=_multiply, facts=_facts, plain=lambda recipe: None, any_shape=False,
    )
)  # fmt: skip
