"""Exact fused multiply-add and addition in f16, f32 and f64, rounded once, on uint32 limbs: no x64 mode, no float operation.

Source: IEEE 754-2019, 5.4.1 and 6.3 (signs of zero); NaN words as an NVIDIA H200 gives them (tests/golden, mma).
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tcemu.base import bits
from tcemu.base.bits import Limbs
from tcemu.engine.formats.coding import Number, codes_to_limbs, decode_limbs, encode_limbs, limbs_to_codes
from tcemu.engine.formats.number_formats import F64, Format
from tcemu.engine.formats.rounding import Rounding

QUIET = 1 << 19  # the quiet bit of an f64 NaN, in its upper word
INVALID_F64 = (0x00000000, 0xFFF80000)  # Inf x 0 and Inf - Inf, low word first


def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike, fmt: Format, rounding: Rounding = "RN") -> Array:
    """a * b + c, rounded once. Codes of `fmt` in and out (f64: uint32[..., 2]); a, b and c broadcast against each other.

    NaN: f32 and f16 give the canonical NaN; f64 the quieted first NaN in the order b, c, a, and 0xFFF8000000000000 for an invalid
    operation.
    """
    x, y, z = (codes_to_limbs(fmt, jnp.asarray(v)) for v in (a, b, c))
    return limbs_to_codes(fmt, fma_limbs(x, y, z, fmt, rounding))


def fma_limbs(a: Limbs, b: Limbs, c: Limbs, fmt: Format, rounding: Rounding, *, flush: bool = False) -> Limbs:
    """`fma` of codes in limbs. The operands are brought to one shape first, since XLA recomputes a broadcast for every use.

    flush: a tiny result of a format of one limb becomes a zero of its sign.
    """
    a, b, c = _one_shape(a, b, c)
    x, y, z = (decode_limbs(fmt, v) for v in (a, b, c))
    product = multiply_numbers(x, y)
    width = len(product.magnitude)  # 2 limbs for f32, 4 for f64: at least 2p + 3 bits, so that no cancellation meets a jammed bit
    total = add_numbers(product, z._replace(magnitude=bits.extend(z.magnitude, width)), rounding)
    d = encode_limbs(fmt, total, rounding)
    if flush:
        d = _flush_tiny(fmt, total, rounding, d)
    return _f64_nans(d, b, c, a) if fmt == F64 else d


def _flush_tiny(fmt: Format, number: Number, rounding: Rounding, d: Limbs) -> Limbs:
    """Replaces a tiny result d by a zero of its sign.

    It is tiny if the number, rounded with no bound on the exponent, lies below the smallest normal number (IEEE 754-2019, 7.5). So a number
    just below it flushes although the subnormal grid would round it up.
    """
    up = fmt.mantissa_bits + 2
    (raised,) = encode_limbs(fmt, number._replace(exponent=number.exponent + up), rounding)
    sign = fmt.dtype.type(1 << (fmt.bits - 1))
    return (jnp.where(raised & ~sign < (1 + up) << fmt.mantissa_bits, d[0] & sign, d[0]),)


def add_limbs(x: Limbs, y: Limbs, fmt: Format, rounding: Rounding = "RN") -> Limbs:
    """x + y, rounded once; codes of `fmt` in limbs. Every NaN is the canonical one."""
    x, y = _one_shape(x, y)
    width = 1 if fmt.mantissa_bits + 4 <= 32 else 2  # p + 3 bits
    u, v = (n._replace(magnitude=bits.extend(n.magnitude, width)) for n in (decode_limbs(fmt, x), decode_limbs(fmt, y)))
    return encode_limbs(fmt, add_numbers(u, v, rounding), rounding)


def add(x: ArrayLike, y: ArrayLike, fmt: Format, rounding: Rounding = "RN") -> Array:
    """x + y, rounded once. Codes of `fmt` in and out; every NaN is the canonical one."""
    return limbs_to_codes(fmt, add_limbs(codes_to_limbs(fmt, jnp.asarray(x)), codes_to_limbs(fmt, jnp.asarray(y)), fmt, rounding))


def multiply_numbers(x: Number, y: Number) -> Number:
    """The exact product of two numbers of one shape."""
    return Number(
        x.negative != y.negative,
        bits.multiply(x.magnitude, y.magnitude),
        x.exponent + y.exponent,
        x.nan | y.nan | (x.infinite & _is_zero(y)) | (y.infinite & _is_zero(x)),
        x.infinite | y.infinite,
    )


def _one_shape(*operands: Limbs) -> tuple[Limbs, ...]:
    shape = jnp.broadcast_shapes(*(limbs[0].shape for limbs in operands))
    return tuple(tuple(jnp.broadcast_to(limb, shape) for limb in limbs) for limbs in operands)


def _is_zero(x: Number) -> Array:
    return bits.is_zero(x.magnitude) & ~x.nan & ~x.infinite


def _normalize(x: Number) -> tuple[Limbs, Array]:
    """Returns the magnitude with two free bits at the top, for the carry, and its exponent."""
    shift = jnp.maximum(bits.leading_zeros(x.magnitude) - 2, 0)
    return bits.shift_left(x.magnitude, shift), x.exponent - shift


def add_numbers(x: Number, y: Number, rounding: Rounding) -> Number:
    """The sum of two numbers of equal width, with a sticky last bit: to encode by this rounding.

    The width has at least three bits more than the result's significand, and for an unrounded product at least 2p + 3.
    """
    (x_magnitude, x_exponent), (y_magnitude, y_exponent) = _normalize(x), _normalize(y)
    x_zero, y_zero = bits.is_zero(x_magnitude), bits.is_zero(y_magnitude)
    exponent = jnp.where(x_zero, y_exponent, jnp.where(y_zero, x_exponent, jnp.maximum(x_exponent, y_exponent)))
    x_magnitude = bits.shift_right_jam(x_magnitude, jnp.maximum(exponent - x_exponent, 0))
    y_magnitude = bits.shift_right_jam(y_magnitude, jnp.maximum(exponent - y_exponent, 0))
    negative, magnitude = bits.add_signed(x.negative, x_magnitude, y.negative, y_magnitude)
    same = x.negative == y.negative
    # an exact zero of unlike signs is +0, but -0 when rounding down (IEEE 754-2019, 6.3)
    down = rounding == "RM" if isinstance(rounding, str) else rounding == 2
    negative = jnp.where(bits.is_zero(magnitude) & ~same, down, negative)
    nan = x.nan | y.nan | (x.infinite & y.infinite & ~same)
    infinite = (x.infinite | y.infinite) & ~nan
    negative = jnp.where(infinite, jnp.where(x.infinite, x.negative, y.negative), negative)
    return Number(negative, magnitude, exponent, nan, infinite)


def _f64_nans(d: Limbs, *operands: Limbs) -> Limbs:
    """Replaces the canonical NaN by the payload rule of f64. operands: in order of precedence."""
    nan = decode_limbs(F64, d).nan
    d = bits.select(nan, tuple(jnp.full(nan.shape, word, jnp.uint32) for word in INVALID_F64), d)
    for low, high in reversed(operands):
        d = bits.select(decode_limbs(F64, (low, high)).nan, (low, high | QUIET), d)
    return d
