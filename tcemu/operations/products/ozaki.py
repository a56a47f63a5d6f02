"""Ozaki's schemes: f64 and f32 products from exact products of small integers, which int8 or FP8 instructions compute.

The first scheme cuts operands into slices (`tcemu.operations.products.ozaki_slices`), the second multiplies modulo small integers
(`tcemu.operations.products.ozaki_moduli`). `ROWS` has the recipes of both, each with its source.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from tcemu.base.gradients import straight_through
from tcemu.engine.architectures.lookup import find_row
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, F32, F64, Format
from tcemu.operations.products.ozaki_moduli import MODULAR_ROWS, OzakiModularRecipe, modular_product_codes
from tcemu.operations.products.ozaki_slices import SLICE_ROWS, OzakiSliceRecipe, slice_product_codes
from tcemu.operations.products.product_arguments import check_float_dtype, float_array, product_shape
from tcemu.operations.products.recipe_facts import WHAT_IF
from tcemu.operations.products.recipe_json import value_from_dict, value_to_dict
from tcemu.operations.products.recipe_kinds import Evidence, ProductCall, RecipeFacts, RecipeKind, register_kind
from tcemu.operations.products.recipe_names import normal_name, split_target, unknown_recipe

OzakiRecipe = OzakiSliceRecipe | OzakiModularRecipe
ROWS = SLICE_ROWS | MODULAR_ROWS


def get_ozaki_recipe(name: str, /, target: str | None = None, **changes: Any) -> OzakiRecipe:
    """Return one of the recipes by Ozaki's schemes: "ozaki_int8", "cublas_fixed_point", "ozaki2_int8", "ozaki2_fp8" and others.

    Args:
        name: The name, also with its target, as "ozaki_int8 on H100".
        target: The GPU; None: one that has the instruction.
        **changes: Other fields of the `OzakiSliceRecipe` or `OzakiModularRecipe`, as slices=6 or moduli=12.

    Returns:
        The recipe.

    Raises:
        ValueError: The name is unknown, or there are two targets.
        Unsupported: The target has no such instruction.
        NotModelled: There is no evidence for the instruction's arithmetic.

    Source: the recipe's `source`.
    """
    named, target = split_target(name, target)
    key = normal_name(named)
    if key not in ROWS:
        raise unknown_recipe("recipe", name, key, ROWS, "ozaki_int8 on H100")
    kind, columns = (
        (OzakiSliceRecipe, ("digits", "bits", "slices", "sums")) if key in SLICE_ROWS else (OzakiModularRecipe, ("moduli", "scaling"))
    )
    values: dict[str, Any] = dict(zip(("op", "target", *columns, "source"), ROWS[key], strict=True))
    values |= {"op": values["op"].format(a="s8", b="s8"), "name": key} | ({} if target is None else {"target": target})
    return kind(**values | changes)


_cached_recipe = lru_cache(maxsize=64)(get_ozaki_recipe)


def _find(name: str) -> OzakiRecipe | None:
    """Return the recipe that a text names, with or without its target; None for any other text."""
    return _cached_recipe(name) if normal_name(name.partition(" on ")[0]) in ROWS else None


# ---- JSON


def ozaki_recipe_from_dict(data: Any) -> OzakiRecipe:
    """Convert the plain values of a recipe, as `value_to_dict` has them, to the recipe. Raises ValueError."""
    kind = OzakiModularRecipe if isinstance(data, dict) and "moduli" in data else OzakiSliceRecipe
    return value_from_dict("a recipe by Ozaki's scheme", kind, data)


# ---- the product


def ozaki_matmul_codes(a: Array, b: Array, recipe: OzakiRecipe | str) -> Array:
    """Compute the f64 codes of A·B by one of Ozaki's schemes; for use under `jit` and `vmap`, where JAX has no float64.

    Args:
        a: f64 codes, uint32 [..., M, K, 2], the low word first.
        b: f64 codes, uint32 [..., K, N, 2].
        recipe: An `OzakiRecipe` or its name. Static under `jit`.

    Returns:
        f64 codes, uint32 [..., M, N, 2].

    Raises:
        ValueError: Shapes do not fit, K is too large for exact sums of slices, or the name is unknown.
    """
    recipe = _cached_recipe(recipe) if isinstance(recipe, str) else recipe
    return _codes(recipe, F64, jnp.asarray(a), jnp.asarray(b))


def ozaki_matmul(a: ArrayLike, b: ArrayLike, recipe: OzakiRecipe | str, *, dtype: DTypeLike | None = None) -> Array | np.ndarray:
    """Multiply matrices by one of Ozaki's schemes.

    Args:
        a: Float array [..., M, K]; NumPy's float64 is used in full.
        b: Float array [..., K, N].
        recipe: An `OzakiRecipe` or its name, as "ozaki_int8 on H100".
        dtype: float64 or a narrower float dtype; None: float64 if a or b is NumPy's float64, else float32.

    Returns:
        Array [..., M, N]; float64 is a NumPy array. Gradients of narrower results are those of the plain f32 product.

    Raises:
        TypeError: An argument holds no floats.
        ValueError: Shapes do not fit, K is too large for exact sums of slices, or the name is unknown.
    """
    recipe = _cached_recipe(recipe) if isinstance(recipe, str) else recipe
    left, right = float_array("a", a), float_array("b", b)
    wide = any(np.dtype(x.dtype) == np.float64 for x in (left, right))
    if np.dtype(dtype if dtype is not None else np.float64 if wide else np.float32) == np.float64:
        codes = np.asarray(_codes(recipe, F64, _f64_codes(left), _f64_codes(right)))
        return np.ascontiguousarray(codes).view(np.float64)[..., 0]
    narrow = np.dtype(check_float_dtype(jnp.float32 if dtype is None else dtype))
    target = ARRAY_FORMATS[narrow]
    if wide:
        codes = _codes(recipe, F32, _f64_codes(left), _f64_codes(right))
        return lax.bitcast_convert_type(convert(F32, target, codes), narrow)

    def words(given: tuple[Array, Array]) -> Array:
        codes = _codes(recipe, F32, *map(_f64_codes, given))
        return lax.bitcast_convert_type(convert(F32, target, codes), narrow)

    smooth = lambda given: jnp.matmul(*(x.astype(jnp.float32) for x in given), precision=lax.Precision.HIGHEST)
    return straight_through(words, smooth, (jnp.asarray(left), jnp.asarray(right)))


def _f64_codes(x: Array | np.ndarray) -> Array:
    source, codes = array_codes(x)
    return codes if source == F64 else convert(source, F64, codes)


def _codes(recipe: OzakiRecipe, result: Format, a: Array, b: Array) -> Array:
    shape = product_shape(a.shape[:-1], b.shape[:-1])
    if isinstance(recipe, OzakiSliceRecipe) and a.shape[-2] > recipe.max_k:
        raise ValueError(f"a: K is {a.shape[-2]}; the sums of {recipe.bits}-bit digits are exact up to K = {recipe.max_k}: use fewer bits")
    if 0 in shape or a.shape[-2] == 0:
        return jnp.zeros((*shape, 2) if result == F64 else shape, jnp.uint32)
    if isinstance(recipe, OzakiSliceRecipe):
        return slice_product_codes(recipe, result, recipe.arithmetic, a, b)
    return modular_product_codes(recipe, result, recipe.arithmetic, a, b)


# ---- the kind of recipe


def _multiply(recipe: OzakiRecipe, call: ProductCall) -> Array:
    call.forbid("key", "axis_name", "scale_a", "scale_b", "bias", why="a product by Ozaki's scheme has none of them")
    if check_float_dtype(call.dtype) == np.float64:
        raise ValueError("dtype=float64: JAX has no such arrays; tcemu.products.ozaki_matmul returns NumPy's, and _codes works under jit")
    return jnp.asarray(ozaki_matmul(*call.operands[:2], recipe, dtype=call.dtype))


def _facts(recipe: OzakiRecipe, evidence: Evidence) -> RecipeFacts:
    row = find_row(recipe.op, recipe.target)
    own = recipe.model is None or recipe.model == row.model
    level = row.evidence.level if own else WHAT_IF
    return recipe.target, f"{recipe.product_count} x {recipe.op}", "" if own else str(recipe.model), level


OZAKI_KIND = register_kind(
    RecipeKind(
        saved_as="ozaki_recipe", types=(OzakiSliceRecipe, OzakiModularRecipe), find=_find,
        to_dict=value_to_dict, from_dict=ozaki_recipe_from_dict,
        multiply=_multiply, facts=_facts, plain=lambda recipe: None,
    )
)  # fmt: skip
