"""`matmul`: products of float arrays by a recipe, and their gradients."""

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

from tcemu.arithmetic.fma import add
from tcemu.arithmetic.quotient import multiply
from tcemu.compilation import wide_vectors
from tcemu.formats import ARRAY_FORMATS, F32, array_codes, convert, to_float
from tcemu.formats.coding import recoded
from tcemu.gradients import stand_in
from tcemu.linalg.accumulation import Blocks, Factors, reduced, sums_of_parts
from tcemu.linalg.arguments import floats, given_recipe, in_jax, product_keys
from tcemu.linalg.kernel_matmul import Given, product_by_kernel
from tcemu.linalg.kernel_recipes import KernelRecipe
from tcemu.linalg.recipes import Recipe
from tcemu.linalg.shapes import Pair, shape_of_product
from tcemu.meshes import alike, with_axes_of
from tcemu.operations.operands import signature_of
from tcemu.quantize.groups import repeated, spread
from tcemu.quantize.operands import ONE, Quantized, Quantizer, Scheme, dequantized, quantize
from tcemu.quantize.scale_rules import largest_value


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    recipe: Recipe | KernelRecipe | str,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    key: PRNGKey | None = None,
    dtype: DTypeLike = jnp.float32,
    axis_name: str | None = None,
) -> Array:
    """A·B (+ bias) by a recipe, every bit as the recipe states it.

    a: [..., M, K]; b: [..., K, N]; bias: what broadcasts to [..., M, N]; floats of any dtype. Leading axes broadcast. NumPy's float64 is
    rounded from its 64 bits, once, where the recipe rounds operands as they are, and to f32 where it divides by f32 scales; as an argument
    of a transformation JAX cuts it to float32 before, unless x64 mode is on.
    recipe: a Recipe, or the name of one, as "bf16" or "deepseek on H100"; or a `tcemu.KernelRecipe`, the order in which one kernel of a
    library adds: then K is no mesh axis, there are no keys, and scales are single numbers, or [..., M, 1] and [..., 1, N].
    scale_a, scale_b: float scales in place of those that the recipe computes: a scalar for "tensor", [..., M, 1] for "row", [..., 1, N] for
    "column", [..., blocks of M, blocks of K] and [..., blocks of K, blocks of N] for "block" (of an instruction: rounded to its format).
    key: a jax.random key, where the recipe rounds stochastically.
    dtype: of the result, whose values are rounded to `recipe.out` and then to it.
    axis_name: under `jax.shard_map`, the mesh axis along which K is cut: the devices' parts of K, in the order of the axis, are added as
    `recipe.reduction` says. Scales that span K are then found over all devices.
    Gradients flow to a, b, bias and the scales, as `recipe.backward` says. Forward mode wants "exact" or "straight_through" there; with a
    Recipe, which is of the products of reverse mode, JAX raises TypeError. The gradient of a scale is that of scale * round(x / scale), the
    rounding counted as identity, and no step where it saturates (LSQ, arXiv 1902.08153).
    Raises TypeError or ValueError for arrays of another kind or shape, a name that is no recipe's, or where a key is missing.
    """
    if not isinstance(recipe, KernelRecipe):
        recipe = given_recipe(recipe, key)
    a, b = floats("a", a), floats("b", b)
    bias, scale_a, scale_b = (
        None if value is None else floats(name, value) for name, value in (("bias", bias), ("scale_a", scale_a), ("scale_b", scale_b))
    )
    if isinstance(recipe, KernelRecipe):
        if key is not None or axis_name is not None:
            raise ValueError("key, axis_name: a kernel recipe rounds to nearest, on one device; leave them out")
        return product_by_kernel(recipe, Given(a, b, bias, scale_a, scale_b), dtype)
    shape_of_product(a.shape, b.shape, None if bias is None else bias.shape, names=("a", "b", "bias"))
    scheme_a, scheme_b = recipe.schemes
    sizes_a, sizes_b = scheme_a.group_sizes, scheme_b.group_sizes
    _check_scale("scale_a", recipe.a, (sizes_a.rows, sizes_a.depth), scale_a, a.shape)
    _check_scale("scale_b", recipe.b, (sizes_b.depth, sizes_b.rows), scale_b, b.shape)
    target = ARRAY_FORMATS.get(np.dtype(dtype))
    if target is None or target.is_integer:
        raise TypeError(f"dtype: got {np.dtype(dtype)}; wanted a float dtype")
    options = Options(np.dtype(dtype), axis_name)
    operands = Operands(
        recipe=recipe,
        a=in_jax(a, once=scheme_a.rounds_once and scale_a is None),
        b=in_jax(b, once=scheme_b.rounds_once and scale_b is None),
        bias=None if bias is None else in_jax(bias),
        scale_a=None if scale_a is None else in_jax(scale_a),
        scale_b=None if scale_b is None else in_jax(scale_b),
        key=key,
    ).alike()
    call = partial(stand_in, options.bits, options.smooth) if recipe.gradients is None else partial(_emulated, options)
    return with_axes_of(lambda given: jnp.matmul(given.a, given.b), call, operands)


class Operands(NamedTuple):
    """All that is traced in a product."""

    recipe: Recipe
    a: Array  # [..., M, K]
    b: Array  # [..., K, N]
    bias: Array | None
    scale_a: Array | None
    scale_b: Array | None
    key: PRNGKey | None

    def alike(self) -> Operands:
        """Under `jax.shard_map`, all varying over the same axes of the mesh: a product's own derivative rule gives back what varies so, and
        JAX sums it over the axes along which an operand did not vary."""
        leaves, tree = jax.tree.flatten(self._replace(key=None))
        return jax.tree.unflatten(tree, alike(*leaves))._replace(key=self.key)


@dataclass(frozen=True)
class Options:
    """What is static in a product besides its recipe; and its two faces, one in bits, one smooth, for the derivatives."""

    dtype: np.dtype
    axis_name: str | None

    def bits(self, operands: Operands) -> Array:
        forward = operands._replace(recipe=operands.recipe.replace(backward="exact"))  # one program, whatever the gradients
        return lax.bitcast_convert_type(_product(self, forward), self.dtype)

    def smooth(self, operands: Operands) -> Array:
        return _smooth(self, operands)


class Side(NamedTuple):
    """One operand, with K last."""

    scheme: Scheme
    values: Array  # [..., M, K], or of B [..., N, K]
    scales: Array | None  # the user's
    is_b: bool  # A·B wants it transposed


@partial(jax.jit, static_argnums=0)
def _smooth(options: Options, operands: Operands) -> Array:
    a, b = _multiplied(options, operands, raw=operands.recipe.backward == "straight_through")
    total = jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
    if options.axis_name is not None:
        total, _ = alike(lax.psum(total, options.axis_name), a)  # as the gathered parts vary
    return total if operands.bias is None else total + operands.bias.astype(jnp.float32)


@wide_vectors(0)
def _product(options: Options, operands: Operands) -> Array:
    """Codes of the result."""
    recipe, bias = operands.recipe, operands.bias
    shape = shape_of_product(operands.a.shape, operands.b.shape)
    empty = 0 in (*shape, operands.a.shape[-1])
    total = jnp.zeros(shape, jnp.uint32) if empty else _sum(options, operands)
    if bias is not None:
        source, codes = array_codes(bias)
        total = add(total, convert(source, F32, codes), F32)
    return rounded_result(recipe, total, options.dtype)


def rounded_result(recipe: Recipe, total: Array, dtype: np.dtype) -> Array:
    """f32 codes as codes of `dtype`, by way of the recipe's own format for results."""
    for source, target in ((F32, recipe.out), (recipe.out, ARRAY_FORMATS[dtype])):
        total = recoded(source, target, total)
    return total


def _sum(options: Options, operands: Operands) -> Array:
    """A·B, scaled, as f32 codes."""
    return sum_of_quantized(operands.recipe, *_quantized(options, operands), options.axis_name)


def sum_of_quantized(recipe: Recipe, a: Quantized, b: Quantized, axis_name: str | None = None) -> Array:
    """A·B of quantised operands, A [..., M, K] and B [..., N, K], scaled, as f32 codes [..., M, N]. Neither is empty."""
    k = a.codes.shape[-1]
    b = jax.tree.map(lambda v: jnp.swapaxes(v, -1, -2) if v.ndim >= 2 else v, b)
    unit_scales = None if a.unit_scales is None or b.unit_scales is None else (a.unit_scales, b.unit_scales)
    at_promotion = scales_at_promotion(recipe)
    parts = sums_of_parts(
        recipe.arithmetic,
        signature_of(recipe.op),
        Factors(codes=(a.codes, b.codes), unit_scales=unit_scales, block_scales=chunk_scales(recipe, a, b, k) if at_promotion else None),
        promote=recipe.promote,
        split=recipe.split_k,
        blocks=blocks_of(recipe),
    )
    if axis_name is not None:
        parts = lax.all_gather(parts, axis_name, tiled=True)
    total = reduced(parts, recipe.reduction)
    scales = (None, None) if at_promotion else (a.scales, b.scales)
    return scaled(scaled(total, a.tensor_scale, b.tensor_scale), *scales)


def blocks_of(recipe: Recipe) -> Blocks:
    """How far the block scales of a recipe reach."""
    return Blocks((recipe.schemes[0].group_sizes.rows, recipe.schemes[1].group_sizes.rows), recipe.block_instructions)


def scaled(total: Array, scale_a: Array | None, scale_b: Array | None) -> Array:
    """total * (scale_a * scale_b), f32 codes; None: there is no such scale."""
    given = [scale for scale in (scale_a, scale_b) if scale is not None]
    if not given:
        return total
    return multiply(total, multiply(given[0], given[1], F32) if len(given) == 2 else given[0], F32)


def scales_at_promotion(recipe: Recipe) -> bool:
    """The scales multiply promoted chunks of a sum, not the sum."""
    return recipe.a.block is not None or recipe.b.block is not None


def chunk_scales(recipe: Recipe, a: Quantized, b: Quantized, k: int) -> Pair:
    """The scales of both operands for each chunk of promoted instructions, f32 codes; for each instruction where promote is traced."""
    chunk = recipe.op.k * (recipe.promote if isinstance(recipe.promote, int) else 1)
    count = -(-k // chunk)

    def of_chunks(scheme: Scheme, scales: Array | None, axis: int) -> Array:
        scales, depth = jnp.full((1, 1), ONE) if scales is None else scales, scheme.group_sizes.depth
        return repeated(scales, count if depth is None else depth // chunk, count, axis)

    return of_chunks(recipe.schemes[0], a.scales, -1), of_chunks(recipe.schemes[1], b.scales, -2)


def _sides(operands: Operands) -> tuple[Side, Side]:
    scheme_a, scheme_b = operands.recipe.schemes
    scale_b = operands.scale_b
    if scale_b is not None and scale_b.ndim >= 2:
        scale_b = jnp.swapaxes(scale_b, -1, -2)
    a = Side(scheme=scheme_a, values=operands.a, scales=operands.scale_a, is_b=False)
    return a, Side(scheme=scheme_b, values=jnp.swapaxes(operands.b, -1, -2), scales=scale_b, is_b=True)


def _quantized(options: Options, operands: Operands) -> tuple[Quantized, Quantized]:
    """Both operands, B as [..., N, K]."""
    keys = product_keys(operands.key)
    a, b = (
        quantize(side.scheme, side.values, scales=side.scales, key=key, axis_name=options.axis_name)
        for side, key in zip(_sides(operands), (keys.a, keys.b), strict=True)
    )
    return a, b


def _multiplied(options: Options, operands: Operands, raw: bool) -> tuple[Array, Array]:
    """What the smooth product multiplies, f32: the quantised operands, or with `raw` the operands as they came.

    Their derivatives are those of quantisation with the rounding counted as identity.
    """
    quantized = _quantized(options, jax.tree.map(lax.stop_gradient, operands))
    a, b = (_with_derivative(side, q, raw) for side, q in zip(_sides(operands), quantized, strict=True))
    return a, b


def _with_derivative(side: Side, q: Quantized, raw: bool) -> Array:
    """One operand of the smooth product."""
    values = side.values.astype(jnp.float32)
    rounded = lax.stop_gradient(values if raw else dequantized(side.scheme, q, values.shape[-1]))
    if side.scales is None:
        moving = values - lax.stop_gradient(values)
    else:
        moving = _zero_with_derivative(side.scheme, q, values, side.scales.astype(jnp.float32))
    result = rounded + moving
    return jnp.swapaxes(result, -1, -2) if side.is_b else result


def _zero_with_derivative(scheme: Scheme, q: Quantized, values: Array, scales: Array) -> Array:
    """0, with the derivatives of scale * round(value / scale)."""
    elements = to_float(F32, convert(scheme.format, F32, q.codes))
    scales = spread(scales, values.shape, scheme.group_sizes)
    ratios = lax.stop_gradient(values / scales)
    inside = jnp.abs(ratios) <= to_float(F32, largest_value(scheme.format))
    by_value = jnp.where(inside, values - lax.stop_gradient(values), 0)
    return by_value + lax.stop_gradient(elements - jnp.where(inside, ratios, 0)) * (scales - lax.stop_gradient(scales))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _emulated(options: Options, operands: Operands) -> Array:
    """The product whose gradients are products by the recipe's own."""
    return options.bits(operands)


def _emulated_forward(options: Options, operands: Operands) -> tuple[Array, Operands]:
    return options.bits(operands), operands


def _emulated_backward(options: Options, operands: Operands, g: Array) -> tuple[Operands]:
    recipe, a, b = operands.recipe, operands.a, operands.b
    assert recipe.gradients is not None
    recipe_da, recipe_db = recipe.gradients
    keys = product_keys(operands.key)
    g = g.astype(jnp.float32)
    by_a = matmul(g, jnp.swapaxes(b, -1, -2), recipe=recipe_da, key=keys.da if recipe_da.stochastic else None)
    by_b = matmul(jnp.swapaxes(a, -1, -2), g, recipe=recipe_db, key=keys.db if recipe_db.stochastic else None)

    def multiplied(a: Array, b: Array, scale_a: Array | None, scale_b: Array | None) -> tuple[Array, Array]:
        return _multiplied(options, operands._replace(a=a, b=b, scale_a=scale_a, scale_b=scale_b), raw=True)

    _, pull = jax.vjp(multiplied, a, b, operands.scale_a, operands.scale_b)
    da, db, dscale_a, dscale_b = pull((unbroadcast(by_a, a.shape), unbroadcast(by_b, b.shape)))
    dbias = None if operands.bias is None else unbroadcast(g, operands.bias.shape).astype(operands.bias.dtype)
    nothing: Any = None  # recipe and key have no derivative
    return (Operands(recipe=nothing, a=da, b=db, bias=dbias, scale_a=dscale_a, scale_b=dscale_b, key=nothing),)


_emulated.defvjp(_emulated_forward, _emulated_backward)


def unbroadcast(x: Array, shape: tuple[int, ...]) -> Array:
    """The sum over the axes along which `shape` was broadcast to x's."""
    x = jnp.sum(x, axis=tuple(range(x.ndim - len(shape))))
    wide = tuple(i for i, (n, size) in enumerate(zip(x.shape, shape, strict=True)) if n != size)
    return jnp.sum(x, axis=wide, keepdims=True) if wide else x


def _check_scale(
    name: str, quantizer: Quantizer, sizes: tuple[int | None, int | None], scale: Array | np.ndarray | None, shape: tuple[int, ...]
) -> None:
    """Raises ValueError unless the user's scales, if there are any, have the shape that the recipe's would have.

    shape: of the operand; sizes: how many neighbours along its last two axes share a scale.
    """
    if scale is None:
        return
    if quantizer.scaling == "none":
        raise ValueError(f"{name}: the recipe does not scale this operand; leave it out, or give the recipe another scaling")
    if quantizer.hadamard is not None:
        raise ValueError(
            f"{name}: the recipe transforms this operand before it is scaled; leave it out: its scales come from what is then there"
        )
    wanted: tuple[int, ...] = ()
    if quantizer.scaling != "tensor":
        wanted = (*shape[:-2], *(1 if size is None else -(-n // size) for n, size in zip(shape[-2:], sizes, strict=True)))
    if scale.shape != wanted:
        raise ValueError(f"{name}: got shape {list(scale.shape)}; wanted {list(wanted)}: {quantizer}")
