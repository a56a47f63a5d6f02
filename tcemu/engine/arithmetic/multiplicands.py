"""Multiplicands and their block scales, decoded once a matrix: from codes to significands and exponents.

Zeros and specials are marked in the exponent, so that one maximum finds the alignment of a step and shows whether a special takes part.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from tcemu.engine.arithmetic.step.decoding import (
    BIAS,
    FRACTION,
    SPECIAL_EXPONENT,
    ZERO_EXPONENT,
    decode,
    significand,
    value_word,
    with_sign_bit,
)
from tcemu.engine.arithmetic.step.forms import is_compact
from tcemu.engine.arithmetic.step.jax_values import integers
from tcemu.engine.formats.number_formats import Format


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


def decode_scales(fmt: Format, codes: ArrayLike) -> DecodedScales:
    x = decode(fmt, integers(codes))
    nan = integers(codes).never() if x.special is None else x.special
    exponent = nan.select(SPECIAL_EXPONENT, x.exponent - BIAS)
    return DecodedScales(nan.select(0, significand(fmt, x)).to_float().raw, exponent.raw)


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
    x = decode(fmt, integers(codes))
    never = x.zero.never()
    special, infinite = never if x.special is None else x.special, never if x.infinite is None else x.infinite
    exponent = x.exponent - BIAS
    if scales is not None:
        of_scale = integers(scales.exponent)
        special, infinite = special | (of_scale == SPECIAL_EXPONENT), infinite & (of_scale != SPECIAL_EXPONENT)
        exponent = exponent + of_scale
    is_value = scales is None and is_compact(fmt, other)
    magnitude = value_word(fmt, x) if is_value else significand(fmt, x).to_float().bits()
    one = magnitude.constant(BIAS << FRACTION)
    magnitude = special.select(infinite.select(one, 0), magnitude)
    exponent = special.select(SPECIAL_EXPONENT, x.zero.select(ZERO_EXPONENT, exponent))
    return Multiplicand(with_sign_bit(magnitude, x.negative).as_float().raw, exponent.raw)


class ExponentRange(NamedTuple):
    """The exponents of the numbers of a matrix that are not zero, int32 [..., 1, 1]."""

    low: Array  # large where all are zero
    high: Array  # SPECIAL_EXPONENT where there is an Inf or NaN


def exponent_range(x: Multiplicand) -> ExponentRange:
    """Returns the range of the exponents of each matrix."""
    low = jnp.min(jnp.where(x.exponent == ZERO_EXPONENT, SPECIAL_EXPONENT, x.exponent), axis=(-2, -1), keepdims=True)
    return ExponentRange(low, jnp.max(x.exponent, axis=(-2, -1), keepdims=True))
