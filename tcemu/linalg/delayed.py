"""Delayed scaling: FP8 products whose scales come from the magnitudes of earlier steps, with that memory as a value that goes in and out.

TransformerEngine, recipe.DelayedScaling, and common/recipe/delayed_scaling.cu for its update.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from tcemu.arithmetic.quotient import divide, multiply
from tcemu.formats import ARRAY_FORMATS, F32, Format, array_codes, convert
from tcemu.linalg.arguments import floats, given_recipe, in_jax
from tcemu.linalg.matmul import rounded_result, sum_of_quantized, unbroadcast
from tcemu.linalg.recipes import Recipe
from tcemu.linalg.shapes import shape_of_product
from tcemu.quantize.operands import ONE, Quantized, Quantizer, is_count
from tcemu.quantize.scale_rules import largest_value

AMAX = ("max", "most_recent")
GREATEST = np.float32(np.finfo(np.float32).max).view(np.uint32)
MOST_MARGIN = 64


class TensorScale(NamedTuple):
    """What is remembered of one tensor between two steps. Both float32."""

    scale: Array  # []: what the tensor's elements are multiplied by in the next step
    amax_history: Array  # [length]: the largest magnitudes of the last steps; place 0 is 0 between steps


class DelayedScaling(NamedTuple):
    """What one product remembers: of A, of B, and of the gradient that comes back. A pytree of float32 arrays."""

    a: TensorScale
    b: TensorScale
    gradient: TensorScale

    @classmethod
    def start(cls, length: int = 1024) -> DelayedScaling:
        """Before the first step: scales of 1, histories of so many zeros. Raises ValueError for a length below 1."""
        if not is_count(length):
            raise ValueError(f"DelayedScaling.start(length={length!r}): wanted a number of steps, 1 or more")
        return cls(*(TensorScale(jnp.ones((), jnp.float32), jnp.zeros(length, jnp.float32)) for _ in cls._fields))


def delayed_matmul(
    a: ArrayLike,
    b: ArrayLike,
    state: DelayedScaling,
    *,
    recipe: Recipe | str = "fp8_split",
    margin: int = 0,
    amax: str = "max",
    dtype: DTypeLike = jnp.float32,
) -> Array:
    """A·B by a recipe, each tensor scaled by what earlier steps saw of it: TransformerEngine's DelayedScaling, every bit as stated here.

    a: [..., M, K]; b: [..., K, N]; floats; leading axes broadcast. Returns [..., M, N] of `dtype`, by way of `recipe.out`.
    state: of this product, from `DelayedScaling.start` or the step before. Its gradient is the next state, of all three tensors, whatever
    the loss: take `jax.grad` with respect to it too, and put what comes in its place. (flax calls this "overwrite with gradient"; the
    gradient's own magnitude is known nowhere else.) So a state serves one product, once a step: gradients of two uses would be added, and
    where a loss does not depend on the product, JAX gives zeros, which are no state.
    recipe: one with a scale for each tensor, forward and in both gradients, as "fp8_split", which is TransformerEngine's default.
    margin, amax: of the update. New scales are largest / 2^margin / amax, where amax is the largest in the history ("max") or the last one
    ("most_recent").

    An element is x * scale, rounded to f32 and then to the format, out of range to the largest value; the product is multiplied by the
    product of both 1 / scale, f32. The backward products take the same codes of A and B. The update: the tensor's largest magnitude goes
    to place 0 of its history, the scale follows, and the history rolls by one. Where amax is 0 or infinite the scale stays; a scale that
    would be infinite is the largest f32. NaN counts for no amax.
    Raises ValueError for other recipes, words and shapes, TypeError for arrays that hold no floats.
    """
    recipe = given_recipe(recipe, None)
    a, b = in_jax(floats("a", a)), in_jax(floats("b", b))
    shape_of_product(a.shape, b.shape)
    _check_recipe(recipe)
    if not isinstance(state, DelayedScaling):
        raise TypeError(f"state: got {type(state).__name__}; wanted a DelayedScaling, as DelayedScaling.start() gives the first")
    if isinstance(margin, bool) or not isinstance(margin, int) or abs(margin) > MOST_MARGIN:
        raise ValueError(f"margin={margin!r}: wanted a power of two, an int from -{MOST_MARGIN} to {MOST_MARGIN}")
    if amax not in AMAX:
        raise ValueError(f"amax={amax!r}: wanted one of {', '.join(AMAX)}")
    target = ARRAY_FORMATS.get(np.dtype(dtype))
    if target is None or target.is_integer:
        raise TypeError(f"dtype: got {np.dtype(dtype)}; wanted a float dtype")
    return _product(Options(np.dtype(dtype), margin, amax), Operands(recipe, a, b, state))


@dataclass(frozen=True)
class Options:
    """What is static."""

    dtype: np.dtype
    margin: int
    amax: str


class Operands(NamedTuple):
    """What is traced."""

    recipe: Recipe
    a: Array
    b: Array
    state: DelayedScaling


class Scaled(NamedTuple):
    """A tensor in its format, in its own shape, and the largest magnitude that it had, an f32 code."""

    codes: Array
    inverse: Array  # f32 code of 1 / scale
    amax: Array

    def operand(self, transposed: bool) -> Quantized:
        """As `sum_of_quantized` takes it, K last."""
        return Quantized(jnp.swapaxes(self.codes, -1, -2) if transposed else self.codes, scales=self.inverse)


def _scaled(fmt: Format, x: Array, own: TensorScale) -> Scaled:
    source, codes = array_codes(x)
    codes, (_, scale) = convert(source, F32, codes), array_codes(own.scale.astype(jnp.float32))
    magnitudes = codes & 0x7FFFFFFF
    amax = jnp.max(jnp.where(magnitudes > F32.infinity, 0, magnitudes), initial=0)
    return Scaled(convert(F32, fmt, multiply(codes, scale, F32), saturate=True), divide(ONE, scale, F32), amax)


def _updated(options: Options, fmt: Format, own: TensorScale, amax: Array) -> TensorScale:
    history = lax.bitcast_convert_type(own.amax_history, jnp.uint32).at[0].set(amax)
    chosen = jnp.max(jnp.where(history > F32.infinity, 0, history)) if options.amax == "max" else amax
    margin = np.float32(2.0**-options.margin).view(np.uint32)
    scale = jnp.minimum(divide(multiply(largest_value(fmt), margin, F32), chosen, F32), GREATEST)
    kept = (chosen == 0) | (chosen >= F32.infinity)
    scale = jnp.where(kept, lax.bitcast_convert_type(own.scale, jnp.uint32), scale)
    history = jnp.roll(history, -1).at[0].set(0)
    return TensorScale(*(lax.bitcast_convert_type(v, jnp.float32) for v in (scale, history)))


def _bits(options: Options, recipe: Recipe, a: Quantized, b: Quantized) -> Array:
    return lax.bitcast_convert_type(rounded_result(recipe, sum_of_quantized(recipe, a, b), options.dtype), options.dtype)


@partial(jax.jit, static_argnums=0)
def _forward(options: Options, operands: Operands) -> tuple[Array, tuple[Scaled, Scaled]]:
    recipe, state = operands.recipe.replace(backward="exact"), operands.state
    a, b = _scaled(recipe.schemes[0].format, operands.a, state.a), _scaled(recipe.schemes[1].format, operands.b, state.b)
    shape = shape_of_product(operands.a.shape, operands.b.shape)
    if 0 in (*shape, operands.a.shape[-1]):
        return jnp.zeros(shape, options.dtype), (a, b)
    return _bits(options, recipe, a.operand(False), b.operand(True)), (a, b)


@partial(jax.jit, static_argnums=0)
def _backward(options: Options, recipe: Recipe, state: DelayedScaling, a: Scaled, b: Scaled, g: Array) -> tuple:
    """The gradients of A and B, in f32 and the product's shape, and the next state."""
    assert recipe.gradients is not None
    recipe_da, recipe_db = recipe.gradients
    of_gradient = recipe_da.schemes[0].format
    scaled = _scaled(of_gradient, g, state.gradient)
    f32 = Options(np.dtype(np.float32), options.margin, options.amax)
    batch = g.shape[:-2]
    if 0 in (*g.shape, a.codes.shape[-1]):
        da, db = jnp.zeros((*batch, *a.codes.shape[-2:])), jnp.zeros((*batch, *b.codes.shape[-2:]))
    else:
        da = _bits(f32, recipe_da, scaled.operand(False), b.operand(False))
        db = _bits(f32, recipe_db, a.operand(True), scaled.operand(True))
    formats = (*(scheme.format for scheme in recipe.schemes), of_gradient)
    following = DelayedScaling(*(_updated(options, fmt, own, x.amax) for fmt, own, x in zip(formats, state, (a, b, scaled), strict=True)))
    return da, db, following


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(options: Options, operands: Operands) -> Array:
    return _forward(options, operands)[0]


def _product_forward(options: Options, operands: Operands) -> tuple[Array, tuple]:
    d, (a, b) = _forward(options, operands)
    like = jnp.zeros((0,), operands.a.dtype), jnp.zeros((0,), operands.b.dtype)
    return d, (operands.recipe, operands.state, a, b, like)


def _product_backward(options: Options, kept: tuple, g: Array) -> tuple[Operands]:
    recipe, state, a, b, (like_a, like_b) = kept
    da, db, following = _backward(options, recipe, state, a, b, g.astype(jnp.float32))
    da, db = unbroadcast(da, a.codes.shape).astype(like_a.dtype), unbroadcast(db, b.codes.shape).astype(like_b.dtype)
    nothing: Any = None  # the recipe has no derivative
    return (Operands(recipe=nothing, a=da, b=db, state=following),)


_product.defvjp(_product_forward, _product_backward)


def _check_recipe(recipe: Recipe) -> None:
    def by_tensor(quantizer: Quantizer) -> bool:
        return quantizer == Quantizer("tensor", saturate=True)

    every = (recipe, *(recipe.gradients or ()))
    fits = recipe.gradients is not None and all(by_tensor(r.a) and by_tensor(r.b) for r in every)
    if fits and recipe.gradients is not None:
        da, db = recipe.gradients
        fits = (da.op.b, db.op.a, da.op.a) == (recipe.op.b, recipe.op.a, db.op.b)
    if not fits:
        raise ValueError(
            f"recipe {recipe.name or recipe.op}: delayed scaling keeps one f32 scale for each of A, B and the gradient, so it wants "
            'Quantizer("tensor", saturate=True) on both sides, gradients by recipes, and one format for each tensor, as fp8_split, fp8 '
            "and fp8_e4m3 have them"
        )
