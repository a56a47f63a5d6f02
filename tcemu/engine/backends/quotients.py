"""Products and quotients of floats, rounded once, as the recipes of block quantisers compute them: by the device where that is exact.

On a CPU the machine multiplies or divides the significands, two floats in [1, 2), so that no operand and no result is subnormal, which XLA
flushes. What the rounded result lacks of the exact one is an integer below 2^31 in size: it is computed modulo 2^32, corrects a quotient
(where y is a constant, XLA may multiply by a rounded 1 / y), and decides the rounding of a subnormal result.

Source: IEEE 754-2019, 5.4.1, 6.1 to 6.3. Subnormals are kept; every NaN is the canonical one.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.base.compilation import call_kernel_by_platform, compile_once
from tcemu.engine.arithmetic.integer_quotients import broadcast_words, divide_on_integers, multiply_on_integers
from tcemu.engine.backends import elementwise
from tcemu.engine.formats.number_formats import F32, Format

MAGNITUDE, INFINITY = np.uint32((1 << 31) - 1), np.uint32(F32.infinity)
HIDDEN = np.uint32(1 << F32.mantissa_bits)  # the bit above the fraction
ONE = np.uint32(F32.bias << F32.mantissa_bits)  # the code of 1


def multiply(x: ArrayLike, y: ArrayLike, fmt: Format, rounding: str = "RN") -> Array:
    """x * y, rounded once. Codes of `fmt` in and out, which has 32 bits or fewer; x and y broadcast against each other."""
    x, y, on_integers = jnp.asarray(x), jnp.asarray(y), partial(multiply_on_integers, fmt=fmt, rounding=rounding)
    if fmt != F32 or rounding != "RN":
        return on_integers(x, y)
    return _by_platform(elementwise.multiply_f32, multiply_by_machine, on_integers, x, y)


def divide(x: ArrayLike, y: ArrayLike, fmt: Format, rounding: str = "RN") -> Array:
    """x / y, rounded once. Codes of `fmt` in and out, which has 32 bits or fewer; x and y broadcast against each other.

    A finite value over zero is Inf, 0/0 and Inf/Inf are NaN.
    """
    x, y, on_integers = jnp.asarray(x), jnp.asarray(y), partial(divide_on_integers, fmt=fmt, rounding=rounding)
    if fmt != F32 or rounding != "RN":
        return on_integers(x, y)
    return _by_platform(elementwise.divide_f32, divide_by_machine, on_integers, x, y)


def _by_platform(by_kernel: Callable[..., Array], by_machine: Callable, on_integers: Callable, x: Array, y: Array) -> Array:
    """By a kernel where there is one."""

    def portable(x: Array, y: Array) -> Array:
        return lax.platform_dependent(x, y, default=on_integers, cpu=partial(_on_cpu, by_machine))

    return call_kernel_by_platform(elementwise.kernel_programs(by_kernel, x, y), portable, x, y)


# ---- by the machine, without a kernel


def _on_cpu(operation: Callable[[Array, Array], Array], x: Array, y: Array) -> Array:
    """Compiles the operation once a shape; on two numbers it is a part of the program around it."""
    return operation(x, y) if x.size == y.size == 1 else _on_arrays(operation, *broadcast_words(x, y, F32))


@compile_once(0)
def _on_arrays(operation: Callable[[Array, Array], Array], x: Array, y: Array) -> Array:
    return operation(x, y)


class Significand(NamedTuple):
    """A finite magnitude: value * 2^(exponent - bias - mantissa_bits) of f32, subnormal numbers with smaller exponents than f32 has."""

    value: Array  # uint32 in [2^23, 2^24); for zero, 0
    exponent: Array  # int32


def multiply_by_machine(x: Array, y: Array) -> Array:
    """Multiplies f32 codes, which broadcast."""
    u, v = x & MAGNITUDE, y & MAGNITUDE
    a, b = _significand(u), _significand(v)
    product = lax.bitcast_convert_type(_as_float(a.value) * _as_float(b.value), jnp.uint32)
    carried = (product >> F32.mantissa_bits) - F32.bias  # 1 if the product of the significands is 2 or more
    value = product & (HIDDEN - 1) | HIDDEN
    lost = lax.bitcast_convert_type(a.value * b.value - (value << F32.mantissa_bits + carried), jnp.int32)
    code = _assemble(value, lost, a.exponent + b.exponent + carried.astype(jnp.int32) - F32.bias)
    code = jnp.where((u == 0) | (v == 0), 0, jnp.where(jnp.maximum(u, v) == INFINITY, INFINITY, code))
    nan = (jnp.maximum(u, v) > INFINITY) | ((jnp.maximum(u, v) == INFINITY) & (jnp.minimum(u, v) == 0))
    return jnp.where(nan, np.uint32(F32.nan), code | ((x ^ y) & ~MAGNITUDE))


def divide_by_machine(x: Array, y: Array, *, flush: bool = False) -> Array:
    """Divides f32 codes, which broadcast. flush: a subnormal quotient is zero."""
    u, v = x & MAGNITUDE, y & MAGNITUDE
    a, b = _significand(u), _significand(v)
    guess = lax.bitcast_convert_type(_as_float(a.value) / _as_float(b.value), jnp.uint32)
    less = (a.value < b.value).astype(jnp.uint32)
    value, lost = correct_quotient(a.value << F32.mantissa_bits + less, b.value, guess - (ONE - less * HIDDEN) + HIDDEN)
    code = _assemble(value, lost, a.exponent - b.exponent + (F32.bias - less.astype(jnp.int32)), flush)
    code = jnp.where((u == 0) | (v == INFINITY), 0, jnp.where((u == INFINITY) | (v == 0), INFINITY, code))
    nan = (jnp.maximum(u, v) > INFINITY) | ((u == v) & ((u == 0) | (u == INFINITY)))
    return jnp.where(nan, np.uint32(F32.nan), code | ((x ^ y) & ~MAGNITUDE))


def correct_quotient(n: Array, d: Array, guess: Array) -> tuple[Array, Array]:
    """Returns n / d in [2^23, 2^24), rounded to the nearest integer, and what it lacks, in units of 1 / d.

    Args:
        n: The numerator modulo 2^32.
        d: The denominator, in [2^23, 2^24).
        guess: An integer two units off at most.
    """
    lost = lax.bitcast_convert_type(n - guess * d, jnp.int32)  # below 2^26 in size
    d = d.astype(jnp.int32)  # a quotient is never in the middle between two floats
    units = sum((2 * lost > d * i).astype(jnp.int32) - (2 * lost < -d * i).astype(jnp.int32) for i in (1, 3))
    return guess + lax.bitcast_convert_type(units, jnp.uint32), lost - units * d


def _significand(magnitude: Array) -> Significand:
    field, up = (magnitude >> F32.mantissa_bits).astype(jnp.int32), lax.clz(magnitude) - np.uint32(31 - F32.mantissa_bits)
    subnormal = field == 0
    value = jnp.where(subnormal, magnitude << up, magnitude & (HIDDEN - 1) | HIDDEN)
    return Significand(value, jnp.where(subnormal, 1 - up.astype(jnp.int32), field))


def _as_float(value: Array) -> Array:
    """Returns a significand as a float in [1, 2)."""
    return lax.bitcast_convert_type(value + (ONE - HIDDEN), jnp.float32)


def _assemble(value: Array, lost: Array, exponent: Array, flush: bool = False) -> Array:
    """Returns the code of a magnitude; flush: a subnormal one is zero.

    value: its significand, rounded to nearest; lost: a number with the sign of what was rounded off; exponent: as in `Significand`, any.
    """
    normal = (exponent.astype(jnp.uint32) << F32.mantissa_bits) + (value - HIDDEN)
    code = jnp.where(exponent >= F32.infinity >> F32.mantissa_bits, INFINITY, normal)
    if flush:
        return jnp.where(exponent < 1, 0, code)
    sticky = (value - (lost < 0)) << 1 | (lost != 0)  # truncated, with a last bit for the rest
    drop = jnp.clip(2 - exponent, 2, F32.mantissa_bits + 3).astype(jnp.uint32)  # more would leave less than half a unit too
    subnormal = (sticky + ((np.uint32(1) << drop - 1) - 1) + (sticky >> drop & 1)) >> drop
    return jnp.where(exponent < 1, subnormal, code)
