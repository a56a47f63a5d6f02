"""Products and quotients of floats on integers, exact or rounded once.

Source: IEEE 754-2019, 5.4.1, 6.1 to 6.3. Subnormals are kept; every NaN is the canonical one.
"""

import jax.numpy as jnp
from jax import Array, lax

from tcemu.base import bits
from tcemu.base.compilation import compile_once
from tcemu.engine.arithmetic.fma import multiply_numbers
from tcemu.engine.formats.coding import Number, decode, encode
from tcemu.engine.formats.number_formats import F64, Format


def multiply_on_integers(x: Array, y: Array, fmt: Format, rounding: str = "RN") -> Array:
    """x * y, rounded once, as every device can do it. Codes of `fmt` in and out, which has 32 bits or fewer; x and y broadcast."""
    return _multiply(fmt, rounding, *broadcast_words(x, y, fmt))


@compile_once(0, 1)
def _multiply(fmt: Format, rounding: str, x: Array, y: Array) -> Array:
    return encode(fmt, multiply_numbers(decode(fmt, x), decode(fmt, y)), rounding)


def divide_on_integers(x: Array, y: Array, fmt: Format, rounding: str = "RN") -> Array:
    """x / y, rounded once, as every device can do it. Codes of `fmt` in and out, which has 32 bits or fewer; x and y broadcast."""
    return _divide(fmt, rounding, *broadcast_words(x, y, fmt))


@compile_once(0, 1)
def _divide(fmt: Format, rounding: str, x: Array, y: Array) -> Array:
    u, v = decode(fmt, x), decode(fmt, y)
    kept = fmt.mantissa_bits + 1
    n, n_exponent = _normalize(u, kept)
    d, d_exponent = _normalize(v, kept)
    d = jnp.maximum(d, 1)  # of a zero nothing of the division is used
    # Long division, 7 bits at a time; kept + 2 bits or more, so that the last one may stand for the rest. A loop, into which XLA cannot
    # copy what n and d come from, once for each use.
    count = -(-(kept + 2) // 7)

    def digits(_: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
        quotient, rest = state[0], state[1] << 7
        return (quotient << 7) | (rest // d), rest % d

    quotient, rest = lax.fori_loop(0, count, digits, (n // d, n % d))
    inexact = rest != 0
    u_zero, v_zero = _is_zero(u), _is_zero(v)
    infinite = u.infinite | (v_zero & ~u_zero)
    number = Number(
        u.negative != v.negative,
        (jnp.where(u_zero | v.infinite, 0, quotient | inexact),),
        n_exponent - d_exponent - 7 * count,
        u.nan | v.nan | (u_zero & v_zero) | (u.infinite & v.infinite),
        infinite,
    )
    return encode(fmt, number, rounding)


def broadcast_words(x: Array, y: Array, fmt: Format) -> tuple[Array, Array]:
    """Broadcast codes of a float format of 32 bits or fewer against each other."""
    assert fmt != F64 and not fmt.is_integer
    # each operation starts from words: of a chain in one kernel XLA copies each link into all its uses, and compiles for minutes
    x, y = jnp.broadcast_arrays(*lax.optimization_barrier((x, y)))
    return x, y


def _is_zero(x: Number) -> Array:
    return bits.is_zero(x.magnitude) & ~x.nan & ~x.infinite


def _normalize(x: Number, kept: int) -> tuple[Array, Array]:
    """The magnitude with its leading one at bit kept - 1, and its exponent."""
    shift = bits.leading_zeros(x.magnitude) - (bits.LIMB_BITS - kept)
    return bits.shift_left(x.magnitude, shift)[0], x.exponent - shift
