"""Products and quotients of floats, rounded once, as the recipes of block quantisers compute them: by the device where that is exact.

Source: IEEE 754-2019, 5.4.1, 6.1 to 6.3. Subnormals are kept; every NaN is the canonical one.
"""

from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.arithmetic.integer_quotients import broadcast_words, divide_on_integers, multiply_on_integers, nearest_quotient
from tcemu.backends.cuda import elementwise
from tcemu.base.compilation import compile_once
from tcemu.formats import F32, Format

DIVISOR_BINADES = 100  # binades: the exponents of divisors whose reciprocals are far from subnormal


def multiply(x: ArrayLike, y: ArrayLike, fmt: Format, rounding: str = "RN") -> Array:
    """x * y, rounded once. Codes of `fmt` in and out, which has 32 bits or fewer; x and y broadcast against each other."""
    x, y, on_integers = jnp.asarray(x), jnp.asarray(y), partial(multiply_on_integers, fmt=fmt, rounding=rounding)
    if fmt != F32 or rounding != "RN":
        return on_integers(x, y)
    return lax.platform_dependent(x, y, default=on_integers, **elementwise.platform_programs(elementwise.multiply_f32, x, y))


def divide(x: ArrayLike, y: ArrayLike, fmt: Format, rounding: str = "RN") -> Array:
    """x / y, rounded once. Codes of `fmt` in and out, which has 32 bits or fewer; x and y broadcast against each other.

    A finite value over zero is Inf, 0/0 and Inf/Inf are NaN.
    """
    x, y, on_integers = jnp.asarray(x), jnp.asarray(y), partial(divide_on_integers, fmt=fmt, rounding=rounding)
    if fmt != F32 or rounding != "RN":
        return on_integers(x, y)
    programs = {"cpu": _divide_on_cpu} | elementwise.platform_programs(elementwise.divide_f32, x, y)
    return lax.platform_dependent(x, y, default=on_integers, **programs)


def _divide_on_cpu(x: Array, y: Array) -> Array:
    return _by_machine_or_integers(*broadcast_words(x, y, F32))


@compile_once()
def _by_machine_or_integers(x: Array, y: Array) -> Array:
    """By the machine's division, made exact. By integers where an Inf, a NaN or a subnormal number may take part: XLA flushes the last."""
    most = F32.infinity >> F32.mantissa_bits  # the exponent's field of Inf and NaN
    of_x, of_y = (jnp.int32(v >> F32.mantissa_bits) & most for v in (x, y))
    apart = abs(of_x - of_y) < F32.bias - 2
    ordinary = ((apart & (of_x > 0) & (of_x < most)) | (x << 1 == 0)) & (abs(of_y - F32.bias) < DIVISOR_BINADES)
    return lax.cond(ordinary.all(), _by_machine, partial(divide_on_integers, fmt=F32), x, y)


def _by_machine(x: Array, y: Array) -> Array:
    of_x, of_y = (lax.bitcast_convert_type(v & jnp.uint32(0x7FFFFFFF), jnp.float32) for v in (x, y))
    return nearest_quotient(x, y, lax.bitcast_convert_type(of_x / of_y, jnp.uint32))
