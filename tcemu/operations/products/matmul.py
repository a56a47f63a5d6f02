"""`matmul`: products of float arrays by a recipe, with gradients; and the product of quantised operands that all of this folder uses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from tcemu.base.compilation import compile_once, jit_wide_vectors
from tcemu.base.errors import Unsupported
from tcemu.base.meshes import match_varying_axes, shard_like
from tcemu.engine.arithmetic.fma import add
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.backends.quotients import multiply
from tcemu.engine.formats.coding import convert, recode
from tcemu.engine.formats.float_arrays import array_codes, to_float
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, F32
from tcemu.engine.instructions.sparsify import choose_fields, prune
from tcemu.engine.layouts.sparsity import PATTERN_NAMES
from tcemu.operations.products.accumulation import Factors, ScaleBlockShape, partial_sums, reduce_partial_sums
from tcemu.operations.products.differentiable import attach_derivative, differentiable_product
from tcemu.operations.products.library.kernel_matmul import KERNEL_KIND as KERNEL_KIND  # registered by their modules
from tcemu.operations.products.ozaki import OZAKI_KIND as OZAKI_KIND
from tcemu.operations.products.product_arguments import (
    OperandPair,
    as_jax_array,
    check_float_dtype,
    float_array,
    pad_k,
    product_keys,
    product_shape,
)
from tcemu.operations.products.recipe_facts import plain_facts
from tcemu.operations.products.recipe_json import recipe_from_dict, recipe_to_dict
from tcemu.operations.products.recipe_kinds import (
    AnyRecipe,
    ProductCall,
    ProductOperands,
    RecipeKind,
    find_kind,
    register_kind,
    registered_kinds,
)
from tcemu.operations.products.recipes import Recipe, as_recipe, names_recipe_alone, resolve_recipe
from tcemu.operations.products.sparse_rows import multiply_sparse_rows
from tcemu.operations.products.wide import WIDE_KIND as WIDE_KIND
from tcemu.operations.quantize.quantizer import QuantizedOperand, Quantizer, Scheme, dequantize, quantize
from tcemu.operations.quantize.scale_groups import broadcast_scales, repeat_scales
from tcemu.operations.quantize.scale_rules import max_finite_code
from tcemu.operations.quantize.scaled_elements import ONE


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    recipe: AnyRecipe | str,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    key: PRNGKey | None = None,
    dtype: DTypeLike = jnp.float32,
    axis_name: str | None = None,
) -> Array:
    """Multiply two float matrices as a recipe states it, bit for bit: A·B (+ bias).

    Gradients flow to a, b, bias and the scales, as `recipe.backward` says. Forward mode needs "exact" or "straight_through" there; a recipe
    for the gradients works in reverse mode only, and forward mode raises TypeError. The gradient of a scale is that of
    scale * round(x / scale), the rounding counted as identity, without the elements that saturate (LSQ, arXiv 1902.08153).

    Args:
        a: Floats [..., M, K]. Leading axes are batch axes and broadcast. NumPy's float64 is rounded once, from its 64 bits, where the
            recipe rounds operands directly, and to f32 first where it divides by f32 scales. As an argument of a transformation, JAX
            truncates float64 to float32 before, unless x64 mode is on. A sparse recipe keeps the largest magnitudes of A as f32.
        b: Floats [..., K, N].
        bias: Floats that broadcast to [..., M, N], or None.
        recipe: A `Recipe`, or the name of one, as "bf16" or "deepseek on H100". Or a `tcemu.replay.KernelRecipe`, the order in which one
            kernel of a library adds: then K is not sharded, there are no keys, and scales are single numbers, or [..., M, 1] and
            [..., 1, N]. Or a `tcemu.products.WideRecipe` or the name of one, as "bf16x6 on A100": then there are neither keys nor scales,
            and K is not sharded; or an `OzakiRecipe` or its name, which takes no bias either.
        scale_a: Float scales that replace those which the recipe computes: a scalar for "tensor", [..., M, 1] for "row",
            [..., blocks of M, blocks of K] for "block" (the blocks of an instruction: rounded to its scale format).
        scale_b: The same for B: a scalar, [..., 1, N] for "column", [..., blocks of K, blocks of N] for "block".
        key: JAX random key, where the recipe rounds stochastically.
        dtype: Float dtype of the result. Values are rounded to `recipe.dtype` and then to this dtype.
        axis_name: Under `jax.shard_map`, the mesh axis along which K is sharded. The devices' sums, in the order of the axis, are added as
            `recipe.reduction` says, and scales that span K are found over all devices.

    Returns:
        Array [..., M, N] of `dtype`.

    Raises:
        TypeError: an argument holds no floats, or the recipe or dtype has another type.
        ValueError: shapes do not fit, the name is unknown, or a key is missing.

    Example:
        >>> import tcemu
        >>> import numpy as np
        >>> a, b = np.array([[1.0, 2.0]], np.float32), np.array([[3.0], [4.0]], np.float32)
        >>> tcemu.matmul(a, b, recipe="bf16 on A100")
        Array([[11.]], dtype=float32)
    """
    recipe = resolve_product_recipe(recipe, key)
    a, b = float_array("a", a), float_array("b", b)
    others = {"bias": bias, "scale_a": scale_a, "scale_b": scale_b}
    operands = ProductOperands(a, b, **{name: float_array(name, value) for name, value in others.items() if value is not None})
    kind = find_kind(recipe)
    assert kind is not None
    return kind.multiply(recipe, ProductCall(operands, key, dtype, axis_name))


def resolve_product_recipe(recipe: AnyRecipe | str, key: PRNGKey | None) -> AnyRecipe:
    """Return the recipe of a product, given as a value of any kind or by its name. Raises the errors of `resolve_recipe`."""
    recipe = parse_recipe(recipe) if isinstance(recipe, str) else recipe
    if find_kind(recipe) is None or isinstance(recipe, Recipe):
        return resolve_recipe(recipe, key)  # type: ignore[arg-type]
    return recipe


def parse_recipe(name: str) -> AnyRecipe:
    """Return the recipe of a name, of any kind. Raises ValueError for an unknown one."""
    for kind in registered_kinds():
        recipe = kind.find(name)
        if recipe is not None:
            return recipe
    return as_recipe(name)


def _multiply(recipe: Recipe, call: ProductCall) -> Array:
    (a, b, bias, scale_a, scale_b), key, dtype, axis_name = call
    product_shape(a.shape, b.shape, None if bias is None else bias.shape, names=("a", "b", "bias"))
    if axis_name is not None and recipe.op.sparse and a.shape[-1] % recipe.op.chunk_size:
        raise ValueError(
            f"axis_name: a device has K = {a.shape[-1]}, and {recipe.op} prunes A in chunks of {recipe.op.chunk_size} along K: shard K at "
            "multiples of a chunk"
        )
    scheme_a, scheme_b = recipe.schemes
    sizes_a, sizes_b = scheme_a.group_sizes, scheme_b.group_sizes
    _check_scale("scale_a", recipe.a, (sizes_a.rows, sizes_a.depth), scale_a, a.shape)
    _check_scale("scale_b", recipe.b, (sizes_b.depth, sizes_b.rows), scale_b, b.shape)
    options = MatmulOptions(check_float_dtype(dtype), axis_name)
    operands = MatmulOperands(
        recipe=recipe,
        a=as_jax_array(a, round_to_odd=scheme_a.rounds_once and scale_a is None),
        b=as_jax_array(b, round_to_odd=scheme_b.rounds_once and scale_b is None),
        bias=None if bias is None else as_jax_array(bias),
        scale_a=None if scale_a is None else as_jax_array(scale_a),
        scale_b=None if scale_b is None else as_jax_array(scale_b),
        key=key,
    )
    return shard_like(lambda given: jnp.matmul(given.a, given.b), partial(differentiable_product, options), operands)


PLAIN_KIND = register_kind(
    RecipeKind(
        saved_as="dot_general", types=(Recipe,), find=lambda name: as_recipe(name) if names_recipe_alone(name) else None,
        to_dict=recipe_to_dict, from_dict=partial(recipe_from_dict, Recipe),
        multiply=_multiply, facts=plain_facts, plain=lambda recipe: recipe,
    )
)  # fmt: skip


class MatmulOperands(NamedTuple):
    """The traced part of a product."""

    recipe: Recipe
    a: Array  # [..., M, K]
    b: Array  # [..., K, N]
    bias: Array | None
    scale_a: Array | None
    scale_b: Array | None
    key: PRNGKey | None


@dataclass(frozen=True)
class MatmulOptions:
    """The static part of a product besides its recipe: a `differentiable.DifferentiableProduct`."""

    dtype: np.dtype
    axis_name: str | None

    @jit_wide_vectors(0)
    def bits(self, operands: MatmulOperands) -> Array:
        recipe, bias = operands.recipe, operands.bias
        shape = product_shape(operands.a.shape, operands.b.shape)
        if 0 in (*shape, operands.a.shape[-1]):
            total = jnp.zeros(shape, jnp.uint32)
        else:
            total = multiply_quantized(recipe, *_quantize_operands(self, operands), self.axis_name)
        if bias is not None:
            source, codes = array_codes(bias)
            total = add(total, convert(source, F32, codes), F32)
        return lax.bitcast_convert_type(round_result(recipe, total, self.dtype), self.dtype)

    @partial(jax.jit, static_argnums=0)
    def smooth(self, operands: MatmulOperands) -> Array:
        a, b = _smooth_factors(self, operands, raw=operands.recipe.backward == "straight_through")
        total = jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
        if self.axis_name is not None:
            total, _ = match_varying_axes(lax.psum(total, self.axis_name), a)  # as the gathered parts vary
        return total if operands.bias is None else total + operands.bias.astype(jnp.float32)

    def backward(self, operands: MatmulOperands, g: Array) -> MatmulOperands:
        recipe, a, b = operands.recipe, pruned_operand(operands.recipe, operands.a), operands.b
        recipe_da, recipe_db = recipe.require_gradients()
        keys = product_keys(operands.key)
        g = g.astype(jnp.float32)
        da = matmul(g, jnp.swapaxes(b, -1, -2), recipe=recipe_da, key=keys.da if recipe_da.is_stochastic else None)
        db = matmul(jnp.swapaxes(a, -1, -2), g, recipe=recipe_db, key=keys.db if recipe_db.is_stochastic else None)

        da, db = unbroadcast(da, a.shape), unbroadcast(db, b.shape)
        if operands.scale_a is None and operands.scale_b is None:
            da, db, dscale_a, dscale_b = da.astype(a.dtype), db.astype(b.dtype), None, None
        else:

            def factors(a: Array, b: Array, scale_a: Array | None, scale_b: Array | None) -> tuple[Array, Array]:
                return _smooth_factors(self, operands._replace(a=a, b=b, scale_a=scale_a, scale_b=scale_b), raw=True)

            da, db, dscale_a, dscale_b = jax.vjp(factors, a, b, operands.scale_a, operands.scale_b)[1]((da, db))
        dbias = None if operands.bias is None else unbroadcast(g, operands.bias.shape).astype(operands.bias.dtype)
        nothing: Any = None  # recipe and key have no derivative
        return MatmulOperands(recipe=nothing, a=da, b=db, bias=dbias, scale_a=dscale_a, scale_b=dscale_b, key=nothing)


def unbroadcast(x: Array, shape: tuple[int, ...]) -> Array:
    """Sums over the axes along which `shape` was broadcast to x's."""
    x = jnp.sum(x, axis=tuple(range(x.ndim - len(shape))))
    wide = tuple(i for i, (n, size) in enumerate(zip(x.shape, shape, strict=True)) if n != size)
    return jnp.sum(x, axis=wide, keepdims=True) if wide else x


# ---- the bits


def multiply_quantized(recipe: Recipe, a: QuantizedOperand, b: QuantizedOperand, axis_name: str | None = None) -> Array:
    """Multiplies quantised operands, A [..., M, K] and B [..., N, K], neither empty: scaled sums, f32 codes [..., M, N]."""
    parts = _partial_sums(recipe, a, b)
    if axis_name is not None:
        parts = lax.all_gather(parts, axis_name, tiled=True)
    total = apply_scales(reduce_partial_sums(parts, recipe.reduction), a.tensor_scale, b.tensor_scale)
    return total if scales_chunks(recipe) else apply_scales(total, a.scales, _transposed(b).scales)


def pruned_operand(recipe: Recipe, a: Array) -> Array:
    """Returns A [..., M, K] as a sparse recipe prunes it, with a straight-through gradient; as it is for a dense one."""
    return prune(a, PATTERN_NAMES[recipe.op.chunk_size]) if recipe.op.sparse else a


@compile_once()
def _partial_sums(recipe: Recipe, a: QuantizedOperand, b: QuantizedOperand) -> Array:
    """Computes the sums of the parts of K, f32 codes [parts, ..., M, N].

    B is transposed within the compilation unit, where XLA joins that with the transposition into blocks. Outside XLA:CPU would join it with
    the loop that rounds, which then uses no vectors.
    """
    k, b = a.codes.shape[-1], _transposed(b)
    spec, sums = product_spec(recipe.op), {"promote": recipe.promote, "split_k": recipe.split_k, "blocks": scale_block_shape(recipe)}
    if recipe.op.sparse:
        if a.fields is None:
            raise Unsupported(f"{recipe.op}: this product takes recipes with dense instructions; tcemu.matmul prunes A for a sparse one")
        multiply = lambda a, b: partial_sums(recipe.arithmetic, spec, Factors((a, b), None, None), **sums)
        codes = pad_k(spec, a.codes, b.codes, recipe.op.chunk_size)
        return multiply_sparse_rows(multiply, codes, a.fields, recipe.op.chunk_size)
    return partial_sums(
        recipe.arithmetic,
        spec,
        Factors(
            codes=(a.codes, b.codes),
            unit_scales=None if a.unit_scales is None or b.unit_scales is None else (a.unit_scales, b.unit_scales),
            block_scales=chunk_scales(recipe, a, b, k) if scales_chunks(recipe) else None,
        ),
        **sums,
    )


def _transposed(q: QuantizedOperand) -> QuantizedOperand:
    return jax.tree.map(lambda v: jnp.swapaxes(v, -1, -2) if v.ndim >= 2 else v, q)


def round_result(recipe: Recipe, total: Array, dtype: np.dtype) -> Array:
    """Rounds f32 codes to the recipe's format for results, and then to `dtype`: codes of `dtype`."""
    for source, target in ((F32, recipe.dtype), (recipe.dtype, ARRAY_FORMATS[dtype])):
        total = recode(source, target, total)
    return total


def apply_scales(total: Array, scale_a: Array | None, scale_b: Array | None) -> Array:
    """Computes total * (scale_a * scale_b) on f32 codes, without the scales that are None."""
    scales = [scale for scale in (scale_a, scale_b) if scale is not None]
    return _multiply_scales(total, *scales) if scales else total


@compile_once()
def _multiply_scales(total: Array, scale: Array, *others: Array) -> Array:
    return multiply(total, multiply(scale, others[0], F32) if others else scale, F32)


def scale_block_shape(recipe: Recipe) -> ScaleBlockShape:
    """Returns the extent of the recipe's block scales that multiply outside the instruction."""
    return ScaleBlockShape((recipe.schemes[0].outer_sizes.rows, recipe.schemes[1].outer_sizes.rows), recipe.instructions_per_block)


def scales_chunks(recipe: Recipe) -> bool:
    """Returns True if the scales multiply promoted chunks of a sum, and not the sum."""
    return recipe.a.outer_block is not None or recipe.b.outer_block is not None


def chunk_scales(recipe: Recipe, a: QuantizedOperand, b: QuantizedOperand, k: int) -> OperandPair:
    """Returns both operands' scales, f32 codes, per chunk of promoted instructions; per instruction where promote is traced."""
    chunk = recipe.op.k * (recipe.promote if isinstance(recipe.promote, int) else 1)
    count = -(-k // chunk)

    def repeat(scheme: Scheme, scales: Array | None, axis: int) -> Array:
        scales, depth = jnp.full((1, 1), ONE) if scales is None else scales, scheme.outer_sizes.depth
        return repeat_scales(scales, count if depth is None else depth // chunk, count, axis)

    return repeat(recipe.schemes[0], a.scales, -1), repeat(recipe.schemes[1], b.scales, -2)


# ---- operands with K last, and the smooth product


class OperandRows(NamedTuple):
    """One operand with K as its last axis."""

    scheme: Scheme
    values: Array  # A [..., M, K], or B transposed, [..., N, K]
    scales: Array | None  # the user's scales
    is_b: bool


def _operand_rows(operands: MatmulOperands) -> tuple[OperandRows, OperandRows]:
    scheme_a, scheme_b = operands.recipe.schemes
    scale_b = operands.scale_b
    if scale_b is not None and scale_b.ndim >= 2:
        scale_b = jnp.swapaxes(scale_b, -1, -2)
    a = OperandRows(scheme=scheme_a, values=pruned_operand(operands.recipe, operands.a), scales=operands.scale_a, is_b=False)
    return a, OperandRows(scheme=scheme_b, values=jnp.swapaxes(operands.b, -1, -2), scales=scale_b, is_b=True)


def _quantize_operands(options: MatmulOptions, operands: MatmulOperands) -> tuple[QuantizedOperand, QuantizedOperand]:
    """Quantises A, and B as [..., N, K]."""
    keys = product_keys(operands.key)
    a, b = (
        quantize(rows.scheme, rows.values, scales=rows.scales, key=key, axis_name=options.axis_name)
        for rows, key in zip(_operand_rows(operands), (keys.a, keys.b), strict=True)
    )
    if operands.recipe.op.sparse:
        a = a._replace(fields=choose_fields(lax.stop_gradient(operands.a), operands.recipe.op.chunk_size))
    return a, b


def _smooth_factors(options: MatmulOptions, operands: MatmulOperands, raw: bool) -> tuple[Array, Array]:
    """Returns the f32 factors of the smooth product: the quantised operands, or with `raw` the given ones.

    Their derivatives are those of quantisation with the rounding counted as identity.
    """
    quantized = _quantize_operands(options, jax.tree.map(lax.stop_gradient, operands))
    a, b = (_smooth_factor(rows, q, raw) for rows, q in zip(_operand_rows(operands), quantized, strict=True))
    return a, b


def _smooth_factor(rows: OperandRows, q: QuantizedOperand, raw: bool) -> Array:
    values = rows.values.astype(jnp.float32)
    rounded = values if raw else dequantize(rows.scheme, q, values.shape[-1])
    if rows.scales is None:
        result = attach_derivative(rounded, values)
    else:
        result = attach_derivative(rounded, _zero_with_scale_gradient(rows.scheme, q, values, rows.scales.astype(jnp.float32)))
    return jnp.swapaxes(result, -1, -2) if rows.is_b else result


def _zero_with_scale_gradient(scheme: Scheme, q: QuantizedOperand, values: Array, scales: Array) -> Array:
    """Returns 0 with the derivatives of scale * round(value / scale)."""
    elements = to_float(F32, convert(scheme.format, F32, q.codes))
    scales = broadcast_scales(scales, values.shape, scheme.group_sizes)
    ratios = lax.stop_gradient(values / scales)
    inside = jnp.abs(ratios) <= to_float(F32, max_finite_code(scheme.format))
    value_term = jnp.where(inside, values - lax.stop_gradient(values), 0)
    return value_term + lax.stop_gradient(elements - jnp.where(inside, ratios, 0)) * (scales - lax.stop_gradient(scales))


def _check_scale(
    name: str, quantizer: Quantizer, sizes: tuple[int | None, int | None], scale: Array | np.ndarray | None, shape: tuple[int, ...]
) -> None:
    """Raises ValueError unless the user's scales of an argument have the shape of the recipe's.

    sizes: neighbours along the operand's last two axes that share a scale; None: all. shape: the operand's.
    """
    if scale is None:
        return
    if quantizer.scaling == "none":
        raise ValueError(f"{name}: the recipe does not scale this operand; leave it out, or give the recipe another scaling")
    if quantizer.element is not None:
        raise ValueError(
            f"{name}: the recipe quantises this operand to {quantizer.element} and dequantises it by scales of its own; leave it out"
        )
    if quantizer.hadamard is not None:
        raise ValueError(
            f"{name}: the recipe transforms this operand before it is scaled; leave it out: its scales come from the transformed operand"
        )
    expected: tuple[int, ...] = ()
    if quantizer.scaling != "tensor":
        expected = (*shape[:-2], *(1 if size is None else -(-n // size) for n, size in zip(shape[-2:], sizes, strict=True)))
    if scale.shape != expected:
        raise ValueError(f"{name}: got shape {list(scale.shape)}; expected {list(expected)}: {quantizer}")
