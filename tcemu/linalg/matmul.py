"""`matmul` and `dot_general`: products of float arrays by a recipe, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
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
from tcemu.formats import ARRAY_FORMATS, F32, Format, array_codes, convert, to_float
from tcemu.gradients import stand_in
from tcemu.linalg.accumulation import parts_of, reduced
from tcemu.linalg.arguments import check_recipe, floats
from tcemu.linalg.recipes import Recipe
from tcemu.operations.operands import signature_of
from tcemu.quantize.operands import ONE, Quantized, Quantizer, dequantized, greatest, own_keys, quantize, shared_by, spread

Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    recipe: Recipe,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    key: PRNGKey | None = None,
    dtype: DTypeLike = jnp.float32,
    axis_name: str | None = None,
) -> Array:
    """A·B (+ bias) by a recipe, every bit as the recipe states it.

    a: [..., M, K]; b: [..., K, N]; bias: what broadcasts to [..., M, N]; floats of any dtype. Leading axes broadcast.
    scale_a, scale_b: float scales in place of those that the recipe computes: a scalar for "tensor", [..., M, 1] for "row", [..., 1, N] for
    "column", [..., blocks of M, blocks of K] and [..., blocks of K, blocks of N] for "block" (of an instruction: rounded to its format).
    key: a jax.random key, where the recipe rounds stochastically.
    dtype: of the result, whose values are rounded to `recipe.out` and then to it.
    axis_name: under `jax.shard_map`, the mesh axis along which K is cut: the devices' parts of K, in the order of the axis, are added as
    `recipe.reduction` says. Scales that span K are then found over all devices.
    Gradients flow to a, b, bias and the scales, as `recipe.backward` says. Forward mode wants "exact" or "straight_through" there; with a
    Recipe, which is of the products of reverse mode, JAX raises TypeError. The gradient of a scale is that of scale * round(x / scale), the
    rounding counted as identity, and no step where it saturates (LSQ, arXiv 1902.08153).
    Raises TypeError or ValueError for arrays of another kind or shape, or where a key is missing.
    """
    check_recipe(recipe, key)
    a, b = floats("a", a), floats("b", b)
    bias, scale_a, scale_b = _perhaps_floats("bias", bias), _perhaps_floats("scale_a", scale_a), _perhaps_floats("scale_b", scale_b)
    given = Operands(recipe, a, b, bias, scale_a, scale_b, key)
    _check_shapes(given)
    target = ARRAY_FORMATS.get(np.dtype(dtype))
    if target is None or target.is_integer:
        raise TypeError(f"dtype: got {np.dtype(dtype)}; wanted a float dtype")
    how = How(np.dtype(dtype), axis_name)
    return stand_in(how.bits, how.smooth, given) if recipe.gradients is None else _emulated(how, given)


class Operands(NamedTuple):
    """All that is traced in a product."""

    recipe: Recipe
    a: Array  # [..., M, K]
    b: Array  # [..., K, N]
    bias: Array | None
    scale_a: Array | None
    scale_b: Array | None
    key: PRNGKey | None


@dataclass(frozen=True)
class How:
    """What is static in a product besides its recipe; and its two faces, one in bits, one smooth, for the derivatives."""

    dtype: np.dtype
    axis_name: str | None

    def bits(self, given: Operands) -> Array:
        forward = given._replace(recipe=given.recipe.replace(backward="exact"))  # one program, whatever the gradients
        return lax.bitcast_convert_type(_product(self, forward), self.dtype)

    def smooth(self, given: Operands) -> Array:
        return _smooth(self, given)


@partial(jax.jit, static_argnums=0)
def _smooth(how: How, given: Operands) -> Array:
    x, y = _multiplied(how, given, raw=given.recipe.backward == "straight_through")
    total = jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
    if how.axis_name is not None:
        total = lax.psum(total, how.axis_name)
    return total if given.bias is None else total + given.bias.astype(jnp.float32)


@partial(jax.jit, static_argnums=0)
def _product(how: How, given: Operands) -> Array:
    """Codes of the result."""
    recipe, a, b, bias = given[:4]
    batch, (m, n) = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2]), (a.shape[-2], b.shape[-1])
    empty = 0 in (*batch, m, n, a.shape[-1])
    total = jnp.zeros((*batch, m, n), jnp.uint32) if empty else _sum(how, given)
    if bias is not None:
        source, codes = array_codes(bias)
        total = add(total, convert(codes, source, F32), F32)
    for fmt, wanted in ((F32, recipe.out), (recipe.out, ARRAY_FORMATS[how.dtype])):
        total = total if fmt == wanted else convert(total, fmt, wanted)
    return total


def _sum(how: How, given: Operands) -> Array:
    """A·B, scaled, as f32 codes."""
    recipe, k = given.recipe, given.a.shape[-1]
    x, y = _quantized(how, given)
    y = y._replace(**{name: jnp.swapaxes(v, -1, -2) for name, v in y._asdict().items() if v is not None and v.ndim >= 2})
    unit = None if x.unit_scales is None or y.unit_scales is None else (x.unit_scales, y.unit_scales)
    at_promotion = recipe.a.block is not None or recipe.b.block is not None
    blocks, sizes = _block_scales(recipe, x, y, k) if at_promotion else (None, (None, None))
    signature, split = signature_of(recipe.op), recipe.split_k
    parts = parts_of(recipe.arithmetic, signature, x.codes, y.codes, unit, blocks, promote=recipe.promote, split=split, group_sizes=sizes)
    if how.axis_name is not None:
        parts = lax.all_gather(parts, how.axis_name, tiled=True)
    total = reduced(parts, recipe.reduction)
    for u, v in ((x.tensor_scale, y.tensor_scale), (None, None) if at_promotion else (x.scales, y.scales)):
        scale = multiply(u, v, F32) if u is not None and v is not None else u if v is None else v
        total = total if scale is None else multiply(total, scale, F32)
    return total


def _block_scales(recipe: Recipe, x: Quantized, y: Quantized, k: int) -> tuple[tuple[Array, Array], tuple[int | None, int | None]]:
    """The scales of both operands for each chunk of promoted instructions, and how many rows or columns share one."""
    assert isinstance(recipe.promote, int)
    chunk = recipe.promote * recipe.op.k
    count, found, sizes = -(-k // chunk), [], []
    for quantizer, q, axis in ((recipe.a, x, -1), (recipe.b, y, -2)):
        scales = jnp.full((1, 1), ONE) if q.scales is None else q.scales
        rows, depth = shared_by(quantizer, 0)
        scales = jnp.repeat(scales, count if depth is None else depth // chunk, axis=axis)
        found.append(lax.slice_in_dim(scales, 0, count, axis=axis % scales.ndim))
        sizes.append(rows)
    return (found[0], found[1]), (sizes[0], sizes[1])


def _sides(given: Operands) -> tuple[tuple, tuple]:
    """Each operand as rows along K, [..., M, K] and [..., N, K]: its format, quantiser, values, scales, and whether it was turned."""
    op, recipe = given.recipe.op, given.recipe
    scale_b = given.scale_b if given.scale_b is None or given.scale_b.ndim < 2 else jnp.swapaxes(given.scale_b, -1, -2)
    return (op.a, recipe.a, given.a, given.scale_a, False), (op.b, recipe.b, jnp.swapaxes(given.b, -1, -2), scale_b, True)


def _quantized(how: How, given: Operands) -> tuple[Quantized, Quantized]:
    """Both operands, B as [..., N, K]."""
    unit = {"stype": given.recipe.op.stype, "unit_block": given.recipe.unit_block, "axis_name": how.axis_name}
    keys = own_keys(given.key)
    (*x, _), (*y, _) = _sides(given)
    return quantize(x[0], x[1], x[2], x[3], keys[0], **unit), quantize(y[0], y[1], y[2], y[3], keys[1], **unit)


def _multiplied(how: How, given: Operands, raw: bool) -> tuple[Array, Array]:
    """What the smooth product multiplies, f32: the quantised operands, or with `raw` the operands as they came.

    Their derivatives are those of quantisation with the rounding counted as identity.
    """
    recipe, found = given.recipe, []
    quantized = _quantized(how, jax.tree.map(lax.stop_gradient, given))
    for (fmt, quantizer, value, scale, turned), q in zip(_sides(given), quantized, strict=True):
        value = value.astype(jnp.float32)
        rounded = value if raw else dequantized(fmt, q, quantizer, recipe.op.stype, recipe.unit_block)
        if scale is None:
            moved = value - lax.stop_gradient(value)
        else:
            moved = _moved(fmt, quantizer, recipe.unit_block, q, value, scale.astype(jnp.float32))
        result = lax.stop_gradient(rounded) + moved
        found.append(jnp.swapaxes(result, -1, -2) if turned else result)
    return found[0], found[1]


def _moved(fmt: Format, quantizer: Quantizer, unit_block: int, q: Quantized, value: Array, scale: Array) -> Array:
    """0, with the derivatives of scale * round(value / scale)."""
    element = to_float(F32, convert(q.codes, fmt, F32))
    scale = spread(scale, value.shape, *shared_by(quantizer, unit_block))
    ratio = lax.stop_gradient(value / scale)
    inside = jnp.abs(ratio) <= to_float(F32, greatest(fmt))
    by_value = jnp.where(inside, value - lax.stop_gradient(value), 0)
    return by_value + lax.stop_gradient(element - jnp.where(inside, ratio, 0)) * (scale - lax.stop_gradient(scale))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _emulated(how: How, given: Operands) -> Array:
    return how.bits(given)


def _emulated_forward(how: How, given: Operands) -> tuple[Array, Operands]:
    return how.bits(given), given


def _emulated_backward(how: How, given: Operands, g: Array) -> tuple[Operands]:
    assert given.recipe.gradients is not None
    g, keys = g.astype(jnp.float32), own_keys(given.key)[2:]
    factors = (g, jnp.swapaxes(given.b, -1, -2)), (jnp.swapaxes(given.a, -1, -2), g)
    products = [
        matmul(*pair, recipe=recipe, key=key if recipe.stochastic else None)
        for pair, recipe, key in zip(factors, given.recipe.gradients, keys, strict=True)
    ]

    def multiplied(a: Array, b: Array, scale_a: Array | None, scale_b: Array | None) -> tuple[Array, Array]:
        return _multiplied(how, given._replace(a=a, b=b, scale_a=scale_a, scale_b=scale_b), raw=True)

    _, pull = jax.vjp(multiplied, given.a, given.b, given.scale_a, given.scale_b)
    da, db, dscale_a, dscale_b = pull(tuple(_unbroadcast(v, x.shape) for v, x in zip(products, (given.a, given.b), strict=True)))
    dbias = None if given.bias is None else _unbroadcast(g, given.bias.shape).astype(given.bias.dtype)
    nothing: Any = None  # recipe and key have no derivative
    return (Operands(nothing, da, db, dbias, dscale_a, dscale_b, nothing),)


_emulated.defvjp(_emulated_forward, _emulated_backward)


def _unbroadcast(x: Array, shape: tuple[int, ...]) -> Array:
    """The sum over the axes along which `shape` was broadcast to x's."""
    x = jnp.sum(x, axis=tuple(range(x.ndim - len(shape))))
    wide = tuple(i for i, (n, size) in enumerate(zip(x.shape, shape, strict=True)) if n != size)
    return jnp.sum(x, axis=wide, keepdims=True) if wide else x


# ---- what came


def _perhaps_floats(name: str, value: ArrayLike | None) -> Array | None:
    return None if value is None else floats(name, value)


def _check_shapes(given: Operands) -> None:
    recipe, a, b, bias, scale_a, scale_b = given[:6]
    for name, shape, wanted in (("a", a.shape, "[..., M, K]"), ("b", b.shape, "[..., K, N]")):
        if len(shape) < 2:
            raise ValueError(f"{name}: got shape {list(shape)}; wanted a matrix, {wanted}, with any batch axes in front")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"a is [..., M, K] = {list(a.shape)} and b is [..., K, N] = {list(b.shape)}: K is {a.shape[-1]} in a and {b.shape[-2]} in b; "
            "they must be equal"
        )
    try:
        d = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    except ValueError:
        raise ValueError(f"the batch axes of a, {list(a.shape[:-2])}, and of b, {list(b.shape[:-2])}, do not broadcast") from None
    if bias is not None:
        try:
            fits = np.broadcast_shapes(bias.shape, d) == d
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"bias: got shape {list(bias.shape)}; wanted one that broadcasts to D, [..., M, N] = {list(d)}")
    for name, quantizer, scale, x in (("scale_a", recipe.a, scale_a, a), ("scale_b", recipe.b, scale_b, b)):
        if scale is not None:
            _check_scale(name, quantizer, recipe.unit_block, scale, x.shape)


def _check_scale(name: str, quantizer: Quantizer, unit_block: int, scale: Array, shape: tuple[int, ...]) -> None:
    if quantizer.scaling == "none":
        raise ValueError(f"{name}: the recipe does not scale this operand; leave it out, or give the recipe another scaling")
    if quantizer.scaling == "tensor":
        wanted: tuple[int, ...] = ()
    else:
        sizes = shared_by(quantizer, unit_block)
        along = sizes if name == "scale_a" else sizes[::-1]
        wanted = (*shape[:-2], *(1 if size is None else -(-n // size) for n, size in zip(shape[-2:], along, strict=True)))
    if scale.shape != wanted:
        raise ValueError(f"{name}: got shape {list(scale.shape)}; wanted {list(wanted)}: {quantizer}")
