"""Multiplicands and their block scales, decoded once a matrix: from codes to significands and exponents.

Zeros and specials are marked in the exponent, so that one maximum finds the alignment of a step and shows whether a special takes part.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.formats import F32, Format, decode

ZERO_EXPONENT = -(1 << 18)  # exponent of a term that takes no part in the alignment
SPECIAL_EXPONENT = 1 << 20  # exponent of Inf and NaN


class DecodedScales(NamedTuple):
    """Block scales decoded, one for each product of a row of A or a column of B: (significand) * 2^exponent."""

    significand: Array  # f32 integer, in units of its format's last place at exponent 0; a NaN's is 0
    exponent: Array  # int32; SPECIAL_EXPONENT for NaN


class EncodedMultiplicand(NamedTuple):
    """Codes of one multiplicand and their scales, which have the codes' shape."""

    codes: Array
    scales: DecodedScales | None


class Multiplicand(NamedTuple):
    """A multiplicand decoded for `fused_dot_add`: two arrays of the codes' shape.

    significand: f32, signed. If every product of the two formats is a normal f32 (`is_compact`) and there are no scales, the value
        itself; else the integer significand. NaN: 0. Inf: +1 or -1.
    exponent: int32, the exponent of the value as rule 2 of `fused_dot_add` counts it; ZERO_EXPONENT for 0, SPECIAL_EXPONENT for Inf and
        NaN.
    """

    significand: Array
    exponent: Array


def is_compact(a: Format, b: Format) -> bool:
    """Returns whether every product of two non-zero values is a normal f32, with room for the alignment, so that values can be
    multiplied.
    """
    least = a.min_exponent - a.mantissa_bits + b.min_exponent - b.mantissa_bits
    greatest = a.max_exponent + b.max_exponent + 2
    return least >= F32.min_exponent and greatest <= F32.max_exponent


def power_of_two(exponent: ArrayLike) -> Array:
    """Returns f32 2^exponent, made of its bits; 0 below the normal range. exponent: int32 <= 127."""
    return lax.bitcast_convert_type(jnp.maximum(jnp.asarray(exponent) + F32.bias, 0) << F32.mantissa_bits, jnp.float32)


def decode_scales(fmt: Format, codes: ArrayLike) -> DecodedScales:
    """Decode the codes of block scales."""
    number = decode(fmt, codes)
    significand = jnp.where(number.nan, 0, number.magnitude[0]).astype(jnp.int32).astype(jnp.float32)
    return DecodedScales(significand, jnp.where(number.nan, SPECIAL_EXPONENT, number.exponent + fmt.mantissa_bits))


def spread_scales(fmt: Format, codes: Array, scales: ArrayLike, axis: int) -> tuple[Array, DecodedScales]:
    """Returns codes [..., M, K] (axis -1) or [..., K, N] (axis -2) with the batch axes of their scales, and a scale for each code.

    fmt: of the scales; scales: codes [..., M, S] or [..., S, N].
    """
    scales = jnp.asarray(scales)
    batch = jnp.broadcast_shapes(codes.shape[:-2], scales.shape[:-2])
    codes, scales = (jnp.broadcast_to(v, (*batch, *v.shape[-2:])) for v in (codes, scales))
    return codes, jax.tree.map(lambda v: jnp.repeat(v, codes.shape[axis] // scales.shape[axis], axis=axis), decode_scales(fmt, scales))


def decode_multiplicand(fmt: Format, codes: ArrayLike, other: Format, scales: DecodedScales | None = None) -> Multiplicand:
    """Decode the codes of one multiplicand, whose partner has the format `other`.

    scales: powers of two, of the codes' shape, whose exponents join those of the values; a NaN among them makes its values NaN.
    """
    number = decode(fmt, codes)
    magnitude = number.magnitude[0].astype(jnp.int32).astype(jnp.float32)
    exponent = number.exponent + fmt.mantissa_bits
    special = number.nan | number.infinite
    if scales is not None:
        number = number._replace(nan=number.nan | (scales.exponent == SPECIAL_EXPONENT))
        special, exponent = number.nan | number.infinite, exponent + scales.exponent
    elif is_compact(fmt, other):
        magnitude = magnitude * power_of_two(number.exponent)
    magnitude = jnp.where(number.nan, 0.0, jnp.where(number.infinite, 1.0, magnitude))
    exponent = jnp.where(number.magnitude[0] == 0, ZERO_EXPONENT, exponent)
    return Multiplicand(jnp.where(number.negative, -magnitude, magnitude), jnp.where(special, SPECIAL_EXPONENT, exponent))


class ExponentRange(NamedTuple):
    """The exponents of the numbers of a matrix that are not zero, int32 [..., 1, 1]."""

    low: Array  # large where all are zero
    high: Array  # SPECIAL_EXPONENT where there is an Inf or NaN


def exponent_range(x: Multiplicand) -> ExponentRange:
    """Returns the range of the exponents of each matrix."""
    low = jnp.min(jnp.where(x.exponent == ZERO_EXPONENT, SPECIAL_EXPONENT, x.exponent), axis=(-2, -1), keepdims=True)
    return ExponentRange(low, jnp.max(x.exponent, axis=(-2, -1), keepdims=True))
