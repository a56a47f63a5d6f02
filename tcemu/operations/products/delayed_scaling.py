"""Delayed scaling: FP8 products whose scales come from the magnitudes of earlier steps. The state is a value that goes in and out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from tcemu.base.gradients import reverse_mode_only
from tcemu.base.records import is_count
from tcemu.engine.backends.quotients import divide, multiply
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.operations.products.matmul import multiply_quantized, round_result, unbroadcast
from tcemu.operations.products.product_arguments import as_jax_array, check_float_dtype, float_array, product_shape
from tcemu.operations.products.recipes import Recipe, resolve_recipe
from tcemu.operations.quantize.quantizer import QuantizedOperand, Quantizer
from tcemu.operations.quantize.scale_rules import max_finite_code
from tcemu.operations.quantize.scaled_elements import ONE

NO_FORWARD_MODE = (
    "tcemu.products.delayed_matmul: forward mode (jax.jvp, jax.jacfwd, jax.hessian) has no rule, since the gradient of the state is its "
    "next value, which reverse mode alone computes. Take jax.jacrev, jax.vjp or jax.grad"
)
AMAX_RULES = ("max", "most_recent")
MAX_F32 = np.float32(np.finfo(np.float32).max).view(np.uint32)
MAX_MARGIN = 64


class TensorScale(NamedTuple):
    """The state of one tensor between two steps, float32."""

    scale: Array  # []: multiplies the tensor's elements in the next step
    amax_history: Array  # [length]: max magnitudes of the last steps; index 0 is 0 between steps


class DelayedScaling(NamedTuple):
    """The state of one product: of A, of B, and of the incoming gradient. A pytree of float32 arrays."""

    a: TensorScale
    b: TensorScale
    gradient: TensorScale

    @classmethod
    def start(cls, length: int = 1024) -> DelayedScaling:
        """Return the state before the first step: scales of 1 and histories of zeros.

        Args:
            length: Steps in the histories.

        Raises:
            ValueError: the length is below 1.
        """
        if not is_count(length):
            raise ValueError(f"DelayedScaling.start(length={length!r}): expected a number of steps, 1 or more")
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
    """Multiply by a recipe with delayed scaling: each tensor is scaled by the magnitudes that earlier steps measured.

    An element is x * scale, rounded to f32 and then to the format; values out of range become the largest finite value. The product is
    multiplied by the product of both 1 / scale, f32. The backward products take the same codes of A and B. The update of a state: the
    tensor's max magnitude goes to index 0 of its history, the scale follows, and the history rolls by one. Where amax is 0 or infinite the
    scale stays; a scale that would be infinite is the largest f32. NaN is ignored in every amax.

    Args:
        a: Floats [..., M, K]. Leading axes broadcast.
        b: Floats [..., K, N].
        state: The product's state, from `DelayedScaling.start` or the previous step. The gradient with respect to the state is the next
            state, of all three tensors, whatever the loss: take `jax.grad` with respect to it too and replace the state by the result.
            (flax calls this "overwrite with gradient"; the magnitude of the gradient is known nowhere else.) A state therefore serves one
            product, once per step: the gradients of two uses would be added, and where a loss does not depend on the product JAX gives
            zeros, which are no valid state.
        recipe: A recipe with one scale per tensor, forward and in both gradients, as "fp8_split", TransformerEngine's default.
        margin: New scales are max_finite / 2^margin / amax.
        amax: The amax of the update: the largest in the history ("max"), or the last one ("most_recent").
        dtype: Float dtype of the result. Values are rounded to `recipe.dtype` and then to this dtype.

    Returns:
        Array [..., M, N] of `dtype`.

    Raises:
        ValueError: another recipe, word or shape.
        TypeError: an array holds no floats, or `state` is no DelayedScaling.

    Source: TransformerEngine, recipe.DelayedScaling, and common/recipe/delayed_scaling.cu for the update.
    """
    recipe = resolve_recipe(recipe, None)
    a, b = as_jax_array(float_array("a", a)), as_jax_array(float_array("b", b))
    product_shape(a.shape, b.shape)
    _check_recipe(recipe)
    if not isinstance(state, DelayedScaling):
        raise TypeError(f"state: got {type(state).__name__}; expected a DelayedScaling; DelayedScaling.start() returns the first")
    if isinstance(margin, bool) or not isinstance(margin, int) or abs(margin) > MAX_MARGIN:
        raise ValueError(f"margin={margin!r}: expected a power of two, an int from -{MAX_MARGIN} to {MAX_MARGIN}")
    if amax not in AMAX_RULES:
        raise ValueError(f"amax={amax!r}: expected one of {', '.join(AMAX_RULES)}")
    operands = reverse_mode_only(DelayedOperands(recipe, a, b, state), NO_FORWARD_MODE)
    return _product(DelayedOptions(check_float_dtype(dtype), margin, amax), operands)


@dataclass(frozen=True)
class DelayedOptions:
    """The static part of a product."""

    dtype: np.dtype
    margin: int
    amax: str


class DelayedOperands(NamedTuple):
    """The traced part of a product."""

    recipe: Recipe
    a: Array
    b: Array
    state: DelayedScaling


class ScaledTensor(NamedTuple):
    """A tensor in its format and its own shape, and its max magnitude, an f32 code."""

    codes: Array
    inverse: Array  # f32 code of 1 / scale
    amax: Array

    def operand(self, transposed: bool) -> QuantizedOperand:
        """As `sum_of_quantized` takes it, K last."""
        return QuantizedOperand(jnp.swapaxes(self.codes, -1, -2) if transposed else self.codes, scales=self.inverse)


def _scale_tensor(fmt: Format, x: Array, own: TensorScale) -> ScaledTensor:
    source, codes = array_codes(x)
    codes, (_, scale) = convert(source, F32, codes), array_codes(own.scale.astype(jnp.float32))
    magnitudes = codes & 0x7FFFFFFF
    amax = jnp.max(jnp.where(magnitudes > F32.infinity, 0, magnitudes), initial=0)
    return ScaledTensor(convert(F32, fmt, multiply(codes, scale, F32), saturate=True), divide(ONE, scale, F32), amax)


def _next_tensor_scale(options: DelayedOptions, fmt: Format, own: TensorScale, amax: Array) -> TensorScale:
    history = lax.bitcast_convert_type(own.amax_history, jnp.uint32).at[0].set(amax)
    chosen = jnp.max(jnp.where(history > F32.infinity, 0, history)) if options.amax == "max" else amax
    margin = np.float32(2.0**-options.margin).view(np.uint32)
    scale = jnp.minimum(divide(multiply(max_finite_code(fmt), margin, F32), chosen, F32), MAX_F32)
    unchanged = (chosen == 0) | (chosen >= F32.infinity)
    scale = jnp.where(unchanged, lax.bitcast_convert_type(own.scale, jnp.uint32), scale)
    history = jnp.roll(history, -1).at[0].set(0)
    return TensorScale(*(lax.bitcast_convert_type(v, jnp.float32) for v in (scale, history)))


def _product_bits(options: DelayedOptions, recipe: Recipe, a: QuantizedOperand, b: QuantizedOperand) -> Array:
    return lax.bitcast_convert_type(round_result(recipe, multiply_quantized(recipe, a, b), options.dtype), options.dtype)


@partial(jax.jit, static_argnums=0)
def _forward(options: DelayedOptions, operands: DelayedOperands) -> tuple[Array, tuple[ScaledTensor, ScaledTensor]]:
    recipe, state = operands.recipe.replace(backward="exact"), operands.state
    a, b = _scale_tensor(recipe.schemes[0].format, operands.a, state.a), _scale_tensor(recipe.schemes[1].format, operands.b, state.b)
    shape = product_shape(operands.a.shape, operands.b.shape)
    if 0 in (*shape, operands.a.shape[-1]):
        return jnp.zeros(shape, options.dtype), (a, b)
    return _product_bits(options, recipe, a.operand(False), b.operand(True)), (a, b)


@partial(jax.jit, static_argnums=0)
def _backward(options: DelayedOptions, recipe: Recipe, state: DelayedScaling, a: ScaledTensor, b: ScaledTensor, g: Array) -> tuple:
    """Computes the gradients of A and B, in f32 and with the product's batch axes, and the next state."""
    recipe_da, recipe_db = recipe.require_gradients()
    gradient_format = recipe_da.schemes[0].format
    scaled = _scale_tensor(gradient_format, g, state.gradient)
    f32 = DelayedOptions(np.dtype(np.float32), options.margin, options.amax)
    batch = g.shape[:-2]
    if 0 in (*g.shape, a.codes.shape[-1]):
        da, db = jnp.zeros((*batch, *a.codes.shape[-2:])), jnp.zeros((*batch, *b.codes.shape[-2:]))
    else:
        da = _product_bits(f32, recipe_da, scaled.operand(False), b.operand(False))
        db = _product_bits(f32, recipe_db, a.operand(True), scaled.operand(True))
    formats = (*(scheme.format for scheme in recipe.schemes), gradient_format)
    following = DelayedScaling(
        *(_next_tensor_scale(options, fmt, own, x.amax) for fmt, own, x in zip(formats, state, (a, b, scaled), strict=True))
    )
    return da, db, following


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(options: DelayedOptions, operands: DelayedOperands) -> Array:
    return _forward(options, operands)[0]


def _product_forward(options: DelayedOptions, operands: DelayedOperands) -> tuple[Array, tuple]:
    d, (a, b) = _forward(options, operands)
    like = jnp.zeros((0,), operands.a.dtype), jnp.zeros((0,), operands.b.dtype)
    return d, (operands.recipe, operands.state, a, b, like)


def _product_backward(options: DelayedOptions, kept: tuple, g: Array) -> tuple[DelayedOperands]:
    recipe, state, a, b, (like_a, like_b) = kept
    da, db, following = _backward(options, recipe, state, a, b, g.astype(jnp.float32))
    da, db = unbroadcast(da, a.codes.shape).astype(like_a.dtype), unbroadcast(db, b.codes.shape).astype(like_b.dtype)
    nothing: Any = None  # the recipe has no derivative
    return (DelayedOperands(recipe=nothing, a=da, b=db, state=following),)


_product.defvjp(_product_forward, _product_backward)


def _check_recipe(recipe: Recipe) -> None:
    def has_tensor_scale(quantizer: Quantizer) -> bool:
        return quantizer == Quantizer("tensor", saturate=True)

    every = (recipe, *(recipe.gradients or ()))
    fits = recipe.gradients is not None and all(has_tensor_scale(r.a) and has_tensor_scale(r.b) for r in every)
    if fits and recipe.gradients is not None:
        da, db = recipe.gradients
        fits = (da.op.b, db.op.a, da.op.a) == (recipe.op.b, recipe.op.a, db.op.b)
    if not fits:
        raise ValueError(
            f"recipe {recipe.name or recipe.op}: delayed scaling keeps one f32 scale for each of A, B and the gradient, so it needs "
            'Quantizer("tensor", saturate=True) on both sides, gradients by recipes, and one format for each tensor, as fp8_split, fp8 '
            "and fp8_e4m3 have them"
        )
