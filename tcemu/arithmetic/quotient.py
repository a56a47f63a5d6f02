"""Products and quotients of floats, exact or rounded once, on uint32 limbs: what the recipes of block quantisers do in f32.

Source: IEEE 754-2019, 5.4.1, 6.1 to 6.3. Subnormals are kept; every NaN is the canonical one.
"""

from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu import bits
from tcemu.arithmetic.kernels import elementwise
from tcemu.compilation import compiled_once
from tcemu.formats import F32, F64, Format, Number, decode, encode

REACH = 100  # binades: the exponents of divisors whose reciprocals are far from subnormal


def product(x: Number, y: Number) -> Number:
    """x * y, exact: the limbs of both, side by side. The two have one shape."""
    infinite = x.infinite | y.infinite
    return Number(
        x.negative != y.negative,
        bits.multiply(x.magnitude, y.magnitude),
        x.exponent + y.exponent,
        x.nan | y.nan | (infinite & (_is_zero(x) | _is_zero(y))),
        infinite,
    )


def multiply(x: ArrayLike, y: ArrayLike, fmt: Format, rounding: str = "RN") -> Array:
    """x * y, rounded once. Codes of `fmt` in and out, which has 32 bits or fewer; x and y broadcast against each other."""
    x, y, on_integers = jnp.asarray(x), jnp.asarray(y), partial(multiply_on_integers, fmt=fmt, rounding=rounding)
    if fmt != F32 or rounding != "RN":
        return on_integers(x, y)
    return lax.platform_dependent(x, y, default=on_integers, **elementwise.programs(elementwise.product, x, y))


def multiply_on_integers(x: Array, y: Array, fmt: Format, rounding: str = "RN") -> Array:
    """`multiply` as every device can do it."""
    return _multiply(fmt, rounding, *_of_one_shape(x, y, fmt))


@compiled_once(0, 1)
def _multiply(fmt: Format, rounding: str, x: Array, y: Array) -> Array:
    return encode(fmt, product(decode(fmt, x), decode(fmt, y)), rounding)


def divide(x: ArrayLike, y: ArrayLike, fmt: Format, rounding: str = "RN") -> Array:
    """x / y, rounded once. Codes of `fmt` in and out, which has 32 bits or fewer; x and y broadcast against each other.

    A finite value over zero is Inf, 0/0 and Inf/Inf are NaN.
    """
    x, y, on_integers = jnp.asarray(x), jnp.asarray(y), partial(divide_on_integers, fmt=fmt, rounding=rounding)
    if fmt != F32 or rounding != "RN":
        return on_integers(x, y)
    programs = {"cpu": _divide_on_cpu} | elementwise.programs(elementwise.quotient, x, y)
    return lax.platform_dependent(x, y, default=on_integers, **programs)


def divide_on_integers(x: Array, y: Array, fmt: Format, rounding: str = "RN") -> Array:
    """`divide` as every device can do it."""
    return _divide(fmt, rounding, *_of_one_shape(x, y, fmt))


def _divide_on_cpu(x: Array, y: Array) -> Array:
    return _by_machine_or_integers(*_of_one_shape(x, y, F32))


@compiled_once()
def _by_machine_or_integers(x: Array, y: Array) -> Array:
    """By the machine's division, made exact. By integers where an Inf, a NaN or a subnormal number may take part: XLA flushes the last."""
    most = F32.infinity >> F32.mantissa_bits  # the exponent's field of Inf and NaN
    of_x, of_y = (jnp.int32(v >> F32.mantissa_bits) & most for v in (x, y))
    apart = abs(of_x - of_y) < F32.bias - 2
    ordinary = ((apart & (of_x > 0) & (of_x < most)) | (x << 1 == 0)) & (abs(of_y - F32.bias) < REACH)
    return lax.cond(ordinary.all(), _by_machine, partial(_divide, F32, "RN"), x, y)


def _by_machine(x: Array, y: Array) -> Array:
    of_x, of_y = (lax.bitcast_convert_type(v & jnp.uint32(0x7FFFFFFF), jnp.float32) for v in (x, y))
    return nearest_quotient(x, y, lax.bitcast_convert_type(of_x / of_y, jnp.uint32))


def nearest_quotient(x: Array, y: Array, guess: Array) -> Array:
    """x / y, rounded to nearest once: f32 codes, normal ones, also of the quotient; x may be zero.

    guess: the code of a magnitude two units off at most. Where y is a constant, XLA may multiply by a rounded 1 / y, and be one off.
    """
    hidden = jnp.uint32(1 << F32.mantissa_bits)
    (of_x, m), (of_y, d) = ((v & F32.infinity, v & (hidden - 1) | hidden) for v in (x, y))
    less = jnp.uint32(m < d)
    least = of_x - of_y + (jnp.uint32(F32.bias) - less) * hidden  # of the quotient's binade, in which a code more is a unit more
    # what guess * y lacks of x, in units of the last places of both: it is below 2^27, so that what overflows does no harm
    rest = lax.bitcast_convert_type((m << (F32.mantissa_bits + less)) - (guess - least + hidden) * d, jnp.int32) * 2
    d = d.astype(jnp.int32)  # a quotient is never in the middle between two floats
    units = sum((rest > d * i).astype(jnp.int32) - (rest < -d * i).astype(jnp.int32) for i in (1, 3))
    magnitude = guess + lax.bitcast_convert_type(units, jnp.uint32)
    return jnp.where(x << 1 == 0, 0, magnitude) | ((x ^ y) & jnp.uint32(1 << 31))


@compiled_once(0, 1)
def _divide(fmt: Format, rounding: str, x: Array, y: Array) -> Array:
    u, v = decode(fmt, x), decode(fmt, y)
    kept = fmt.mantissa_bits + 1
    n, n_exponent = _normal(u, kept)
    d, d_exponent = _normal(v, kept)
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


def _of_one_shape(x: Array, y: Array, fmt: Format) -> tuple[Array, Array]:
    assert fmt != F64 and not fmt.is_integer
    # each operation starts from words: of a chain in one kernel XLA copies each link into all its uses, and compiles for minutes
    x, y = jnp.broadcast_arrays(*lax.optimization_barrier((x, y)))
    return x, y


def _is_zero(x: Number) -> Array:
    return bits.is_zero(x.magnitude) & ~x.nan & ~x.infinite


def _normal(x: Number, kept: int) -> tuple[Array, Array]:
    """The magnitude with its leading one at bit kept - 1, and its exponent."""
    shift = bits.leading_zeros(x.magnitude) - (bits.WORD - kept)
    return bits.shift_left(x.magnitude, shift)[0], x.exponent - shift
