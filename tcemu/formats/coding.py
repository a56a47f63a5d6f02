"""Codes and the numbers that they stand for: `decode` and `encode`, from one to the other, and `convert`, from format to format."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array
from jax.typing import ArrayLike

from tcemu import bits
from tcemu.bits import Limbs
from tcemu.compilation import compiled_once
from tcemu.formats.rounding import Rounding, leads_outward, round_up
from tcemu.formats.table import F32, Format


class Number(NamedTuple):
    """Decoded values: (-1)^negative * magnitude * 2^exponent, unless nan or infinite. All fields have one shape; each limb too."""

    negative: Array  # bool
    magnitude: Limbs  # of a NaN: its fraction bits
    exponent: Array  # int32: the weight of the magnitude's bit 0
    nan: Array  # bool
    infinite: Array  # bool


def code_limbs(fmt: Format, codes: Array) -> Limbs:
    """Codes as one uint32 limb, or two for 64-bit formats (whose trailing axis of two words is taken off)."""
    if fmt.words == 2:
        return codes[..., 0], codes[..., 1]
    return (codes.astype(jnp.uint32),)


def limbs_code(fmt: Format, limbs: Limbs) -> Array:
    """The inverse of `code_limbs`."""
    if fmt.words == 2:
        return jnp.stack(limbs, axis=-1)
    return limbs[0].astype(fmt.dtype)


def decode(fmt: Format, codes: ArrayLike) -> Number:
    """Raw codes -> values. Bits above `fmt.bits` and the format's unused bits are ignored.

    codes: unsigned [...] (f64: uint32[..., 2]).
    """
    return decode_limbs(fmt, code_limbs(fmt, jnp.asarray(codes)))


def decode_limbs(fmt: Format, code: Limbs) -> Number:
    """`decode` of codes that are already in limbs."""
    top = code[-1]
    if fmt.is_integer and fmt.words == 2:
        negative = top.astype(jnp.int32) < 0 if fmt.signed else jnp.zeros(top.shape, bool)
        low, high = -code[0], ~top + (code[0] == 0).astype(jnp.uint32)  # of the negative, in two's complement
        never = jnp.zeros(top.shape, bool)
        magnitude = jnp.where(negative, low, code[0]), jnp.where(negative, high, top)
        return Number(negative, magnitude, jnp.zeros(top.shape, jnp.int32), never, never)
    if fmt.is_integer:
        value = (top << (32 - fmt.bits)).astype(jnp.uint32)
        negative = value.astype(jnp.int32) < 0 if fmt.signed else jnp.zeros(top.shape, bool)
        extended = (value.astype(jnp.int32) >> (32 - fmt.bits)).astype(jnp.uint32) if fmt.signed else value >> (32 - fmt.bits)
        never = jnp.zeros(top.shape, bool)
        return Number(negative, (jnp.where(negative, -extended, extended),), jnp.zeros(top.shape, jnp.int32), never, never)
    top_bits = fmt.bits - 32 * (len(code) - 1)  # of the format, in the top limb
    top_mantissa = fmt.mantissa_bits + fmt.unused_bits - 32 * (len(code) - 1)
    field = ((top >> top_mantissa) & ((1 << fmt.exponent_bits) - 1)).astype(jnp.int32)
    negative = ((top >> (top_bits - 1)) & 1) == 1 if fmt.signed else jnp.zeros(top.shape, bool)
    fraction = (*code[:-1], top & ((1 << top_mantissa) - 1))
    if fmt.unused_bits:
        fraction = (fraction[0] >> fmt.unused_bits,)
    empty = bits.is_zero(fraction)
    never = jnp.zeros(top.shape, bool)
    if fmt.specials == "ieee":
        extreme = field == (1 << fmt.exponent_bits) - 1
        nan, infinite = extreme & ~empty, extreme & empty
    elif fmt.specials == "nan":
        magnitude = (top & fmt.nan).astype(jnp.int32)
        nan, infinite = magnitude == fmt.nan, never
    else:
        nan, infinite = never, never
    hidden = 1 << (top_mantissa - fmt.unused_bits)
    if fmt.subnormals:
        normal = (field > 0) & ~nan & ~infinite
        significand = (*fraction[:-1], jnp.where(normal, fraction[-1] | hidden, fraction[-1]))
        exponent = jnp.maximum(field, 1) - fmt.bias - fmt.mantissa_bits
    else:
        significand = (jnp.full(top.shape, hidden, jnp.uint32),)
        exponent = field - fmt.bias
    return Number(negative, significand, exponent, nan, infinite)


def encode(fmt: Format, number: Number, rounding: Rounding = "RN", **options: Any) -> Array:
    """Values -> raw codes, rounded once; arguments as in `encode_limbs`."""
    return limbs_code(fmt, encode_limbs(fmt, number, rounding, **options))


def encode_limbs(
    fmt: Format,
    number: Number,
    rounding: Rounding = "RN",
    *,
    overflow: str = "ieee",
    signed_zero: bool = True,
    fraction_bits: ArrayLike | None = None,
    random: Array | None = None,
) -> Limbs:
    """Values -> raw codes in limbs, rounded once.

    rounding: one of ROUNDINGS, or a traced int32 index into it. "SR" needs `random`: uint32 of the number's shape. A value that lies a
        fraction f of the way from its lower neighbour to its upper goes up with probability f; that is exact where up to 32 bits are
        dropped, else within 2^-32.
    overflow: what a magnitude above the largest finite one becomes. "ieee": Inf (NaN in formats that have only NaN) if the rounding leads
        there, else the largest finite one. "infinity": Inf in every rounding, as tensor cores do. "saturate": the largest finite one, also
        for Inf. Formats without specials always saturate. So do integers; NaN becomes 0 there.
    signed_zero: False makes every zero result +0.
    fraction_bits: keep only so many of the format's fraction bits (may be traced); None keeps all.
    NaN becomes the canonical NaN; in formats without one the largest finite value (PTX ISA 9.7.9, cvt to e2m1, e2m3, e3m2).
    Unsigned floats: a negative value becomes NaN, or the least value with overflow="saturate"; ue8m0 has no zero and treats it so too.
    A tie in "RN" goes to the even code, which in ue8m0, where every significand is 1, is the even exponent field (ml_dtypes goes up).
    """
    omitted = 0 if fraction_bits is None else fmt.mantissa_bits - fraction_bits  # of the format's fraction bits
    negative = number.negative
    shift = bits.leading_zeros(number.magnitude)
    magnitude = bits.shift_left(number.magnitude, shift)
    exponent = number.exponent + (32 * len(magnitude) - 1) - shift  # of the leading one
    if len(magnitude) < fmt.words:
        magnitude = _widen(magnitude, fmt.words)
    elif not fmt.is_integer and random is None:  # a float leaves room below its last bit for half and the jammed rest
        magnitude = bits.narrow_jam(magnitude, fmt.words)
    width = 32 * len(magnitude)
    zero = bits.is_zero(magnitude)
    if fmt.is_integer:
        # the unit is 1: bits below weight 0 are dropped; too large a value is caught by its exponent
        least, kept = 0, 0
        drop = width - 1 - exponent
    else:
        least, kept = fmt.least_exponent, fmt.mantissa_bits
        drop = (width - 1 - kept) + omitted + jnp.maximum(least - exponent, 0)
    drop = jnp.clip(drop, 0, 2 * width)
    whole = bits.shift_right(magnitude, drop)
    odd = whole[0] if fmt.subnormals else (exponent - least).astype(jnp.uint32)  # without fraction bits a tie looks at the exponent
    whole = round_up(whole, (odd & 1) == 1, magnitude, drop, negative, rounding, random)
    if fmt.is_integer:
        return _integer_code(fmt, number, whole, exponent, zero)
    whole = whole[: fmt.words]
    if fraction_bits is not None:
        whole = bits.shift_left(whole, omitted)
    # the hidden bit of `whole` adds one to the exponent field, and a carry out of the fraction one more
    field = jnp.clip(exponent - least, 0, fmt.greatest_exponent - least + 1).astype(jnp.uint32)
    field = jnp.where(zero, 0, field)
    if fmt.subnormals:
        code = bits.add(whole, bits.shift_left((field, *(jnp.zeros_like(field),) * (fmt.words - 1)), fmt.mantissa_bits))
    else:
        code = (field + whole[0] - 1,)  # always a hidden bit; a value below the least normal rounds to it
        code = (jnp.where(exponent < least, 0, code[0]),)
    return _finish(fmt, number, code, exponent, rounding, overflow, signed_zero)


def _widen(magnitude: Limbs, count: int) -> Limbs:
    """A normalised magnitude in more limbs, still with its leading one at the top."""
    return (jnp.zeros_like(magnitude[0]),) * (count - len(magnitude)) + magnitude


def _integer_code(fmt: Format, number: Number, whole: Limbs, exponent: Array, zero: Array) -> Limbs:
    """Sign and magnitude to two's complement, clamped to the format's range; NaN gives 0 (PTX ISA 9.7.9, cvt)."""
    limit = jnp.uint32(fmt.greatest_magnitude) + (number.negative & fmt.signed).astype(jnp.uint32)
    limit = jnp.where(number.negative & (not fmt.signed), 0, limit)
    too_large = number.infinite | (~zero & (exponent > 31)) | (whole[0] > limit)
    for limb in whole[1:]:
        too_large = too_large | (limb != 0)
    magnitude = jnp.where(too_large, limit, whole[0])
    magnitude = jnp.where(number.nan, 0, magnitude)
    code = jnp.where(number.negative, -magnitude, magnitude) & jnp.uint32((1 << fmt.bits) - 1)
    return (code,)


def _finish(fmt: Format, number: Number, code: Limbs, exponent: Array, rounding: Rounding, overflow: str, signed_zero: bool) -> Limbs:
    """Overflow, specials and the sign, onto a rounded magnitude code."""

    def constant(value: int) -> Limbs:
        return tuple(jnp.full(exponent.shape, (value >> (32 * i)) & 0xFFFFFFFF, jnp.uint32) for i in range(fmt.words))

    negative = number.negative
    greatest, beyond = constant(fmt.greatest_magnitude), constant(fmt.infinity if fmt.specials == "ieee" else fmt.nan)
    nonzero = ~bits.is_zero(number.magnitude)
    too_large = ((exponent > fmt.greatest_exponent) & nonzero) | bits.less(greatest, code)
    if overflow == "saturate" or fmt.specials == "none":
        code = bits.select(too_large | number.infinite, greatest, code)
    else:
        outward = jnp.ones_like(negative) if overflow == "infinity" else leads_outward(negative, rounding)
        code = bits.select(too_large, bits.select(outward, beyond, greatest), code)
        code = bits.select(number.infinite, beyond, code)
    not_a_number = number.nan
    if not fmt.signed:
        below = negative & (nonzero | number.infinite)
        if not fmt.subnormals:
            below = below | (~nonzero & ~number.infinite & ~number.nan)
        code = bits.select(below, constant(0), code)
        if overflow != "saturate":
            not_a_number = not_a_number | below
    canonical = fmt.greatest_magnitude if fmt.specials == "none" else fmt.nan
    code = bits.select(not_a_number, constant(canonical), code)
    if fmt.signed:
        negative = negative & ~number.nan
        if not signed_zero:
            negative = negative & ~bits.is_zero(code)
        sign_bit = fmt.bits - fmt.unused_bits - 1 - 32 * (fmt.words - 1)
        code = (*code[:-1], code[-1] | (negative.astype(jnp.uint32) << sign_bit))
    if fmt.unused_bits:
        ones = jnp.where(number.nan, (1 << fmt.unused_bits) - 1, 0).astype(jnp.uint32)
        code = ((code[0] << fmt.unused_bits) | ones,)
    return code


def convert(
    source: Format,
    target: Format,
    codes: ArrayLike,
    rounding: Rounding = "RN",
    saturate: bool = False,
    key: PRNGKey | None = None,
) -> Array:
    """Codes of one format -> codes of another, rounded once; integers only.

    codes: unsigned [...] (f64: uint32[..., 2]); saturate: out of range becomes the largest finite value instead of Inf or NaN;
    key: a jax.random key, for rounding="SR". Specials as in `encode`.
    """
    codes = jnp.asarray(codes)
    random = None if key is None else jax.random.bits(key, codes.shape[: codes.ndim - (source.words - 1)], jnp.uint32)
    if isinstance(rounding, str):
        return _convert(source, target, rounding, saturate, codes, random)
    return encode(target, decode(source, codes), rounding, overflow="saturate" if saturate else "ieee", random=random)


def _widens(source: Format) -> bool:
    """Every number of the format is a normal one of f32, or zero, or has the same exponent field there."""
    same_fields = source.bias == F32.bias or source.least_exponent - source.mantissa_bits >= F32.least_exponent
    narrower = not source.is_integer and source.mantissa_bits < F32.mantissa_bits and F32.holds(source)
    return narrower and source.subnormals and not source.unused_bits and same_fields


def _widened(source: Format, codes: Array) -> Array:
    """`convert` to f32 of a format that `_widens`, in fewer operations: with neither a rounding nor an overflow."""
    code = codes.astype(jnp.uint32)
    magnitude = code & source.nan
    wide = magnitude << (F32.mantissa_bits - source.mantissa_bits)
    if source.bias != F32.bias:
        top = bits.WORD - 1 - bits.leading_zeros((magnitude,))  # of a subnormal number: the place of its leading one
        field = top + (source.least_exponent - source.mantissa_bits + F32.bias - 1)  # the leading one adds one to it
        leading = magnitude << (F32.mantissa_bits - top).astype(jnp.uint32)
        subnormal = jnp.where(magnitude == 0, 0, (field.astype(jnp.uint32) << F32.mantissa_bits) + leading)
        normal = wide + np.uint32((F32.bias - source.bias) << F32.mantissa_bits)
        wide = jnp.where(magnitude < 1 << source.mantissa_bits, subnormal, normal)
    signed = wide | (code >> (source.bits - 1) & 1) << 31 if source.signed else wide
    if source.specials == "ieee":
        signed = jnp.where(magnitude == source.infinity, signed & np.uint32(1 << 31) | np.uint32(F32.infinity), signed)
        return jnp.where(magnitude > source.infinity, np.uint32(F32.nan), signed)
    return jnp.where(magnitude == source.nan, np.uint32(F32.nan), signed) if source.specials == "nan" else signed


def recoded(source: Format, target: Format, codes: Array) -> Array:
    """`convert`, and nothing where the formats are one: a NaN stays as it is."""
    return codes if source == target else convert(source, target, codes)


@compiled_once(0, 1, 2, 3)
def _convert(source: Format, target: Format, rounding: str, saturate: bool, codes: Array, random: Array | None) -> Array:
    if target == F32 and not saturate and _widens(source):
        return _widened(source, codes)
    return encode(target, decode(source, codes), rounding, overflow="saturate" if saturate else "ieee", random=random)
