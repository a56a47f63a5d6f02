"""f32 additions, products and fused multiply-adds on codes, each rounded once to nearest even and compiled once per shape.

Every NaN is the canonical NaN. Subnormals are kept unless stated.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.base.compilation import compile_once
from tcemu.base.jax_internals import traced_by_name
from tcemu.engine.arithmetic import fma as exact
from tcemu.engine.arithmetic.special_functions import INFINITY, MAGNITUDE, NAN, SIGN
from tcemu.engine.formats.number_formats import F32

LEAST_KEY = np.int32(-(1 << 31))  # order key of a NaN


def f32_code(value: float) -> np.uint32:
    """Return the code of a number, rounded to f32."""
    return np.float32(value).view(np.uint32)


@traced_by_name
@compile_once()
def add_f32(x: Array, y: Array) -> Array:
    """Return x + y; f32 codes of one shape."""
    return exact.add(x, y, F32)


def subtract_f32(x: Array, y: Array) -> Array:
    """Return x - y; f32 codes that broadcast against each other."""
    return add_f32(*jnp.broadcast_arrays(x, y ^ SIGN))


@traced_by_name
@compile_once()
def fma_f32(x: Array, y: Array, z: Array) -> Array:
    """Return x * y + z, rounded once; f32 codes of one shape."""
    return exact.fma(x, y, z, F32)


def flush_f32(codes: Array) -> Array:
    """Replace subnormals by zeros of their sign, as `.ftz` does."""
    return jnp.where(codes & INFINITY == 0, codes & SIGN, codes)


def maximum_f32(x: Array, y: Array) -> Array:
    """Return the larger number, as `max.f32` does: -0 is below +0, and a NaN gives the other operand."""
    larger = jnp.where(_order_key(x) > _order_key(y), x, y)
    return jnp.where(is_nan_f32(larger), NAN, larger)


def max_f32(x: Array) -> Array:
    """Return the largest number along the last axis, with that axis kept, as a chain of `max.f32` gives it: NaN only if all are NaN."""
    key = jnp.max(_order_key(x), axis=-1, keepdims=True)
    codes = jnp.where(key < 0, ~key, key).astype(jnp.uint32) | jnp.where(key < 0, SIGN, np.uint32(0))
    return jnp.where(key == LEAST_KEY, NAN, codes)


def is_nan_f32(codes: Array) -> Array:
    return (codes & MAGNITUDE) > INFINITY


def _order_key(codes: Array) -> Array:
    """Return an int32 that increases with the number; a NaN has the least."""
    size = (codes & MAGNITUDE).astype(jnp.int32)
    return jnp.where(is_nan_f32(codes), LEAST_KEY, jnp.where(codes >= SIGN, ~size, size))


@partial(traced_by_name, dtype=np.dtype(bool))
def less_f32(x: Array, y: Array) -> Array:
    """Return True where x < y; f32 codes of one shape; False where either is NaN. -0 equals +0."""
    key = lambda codes: jnp.where(codes & MAGNITUDE == 0, 0, _order_key(codes))
    return (key(x) < key(y)) & ~is_nan_f32(x) & ~is_nan_f32(y)
