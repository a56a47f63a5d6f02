"""Codes and the numbers that they represent: `decode`, `encode`, and `convert` from one format to another."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array
from jax.typing import ArrayLike

from tcemu.base import bits
from tcemu.base.bits import Limbs
from tcemu.base.compilation import compile_once
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.engine.formats.rounding import Rounding, overflows_to_infinity, round_magnitude


class Number(NamedTuple):
    """Decoded values: (-1)^negative * magnitude * 2^exponent, unless nan or infinite.

    All fields and all limbs have the same shape.
    """

    negative: Array  # bool: the sign
    magnitude: Limbs  # unsigned significand; for a NaN, the fraction bits
    exponent: Array  # int32: log2 of the weight of the magnitude's bit 0
    nan: Array  # bool: NaN elements
    infinite: Array  # bool: infinite elements


def codes_to_limbs(fmt: Format, codes: Array) -> Limbs:
    """Split codes into uint32 limbs: one limb, or two for a 64-bit format.

    Args:
        fmt: Format of the codes.
        codes: Unsigned [...]; uint32[..., 2] for a 64-bit format.

    Returns:
        Limbs [...], the least significant first.
    """
    if fmt.words == 2:
        return codes[..., 0], codes[..., 1]
    return (codes.astype(jnp.uint32),)


def limbs_to_codes(fmt: Format, limbs: Limbs) -> Array:
    """Join limbs into codes; the inverse of `codes_to_limbs`.

    Args:
        fmt: Format of the codes.
        limbs: One limb [...], or two for a 64-bit format.

    Returns:
        Codes [...] in the format's dtype; uint32[..., 2] for a 64-bit format.
    """
    if fmt.words == 2:
        return jnp.stack(limbs, axis=-1)
    return limbs[0].astype(fmt.dtype)


def decode(fmt: Format, codes: ArrayLike) -> Number:
    """Decode raw codes to values.

    Args:
        fmt: Format of the codes.
        codes: Unsigned [...]; uint32[..., 2] for a 64-bit format. Bits above `fmt.bits` and the format's unused bits are ignored.

    Returns:
        The exact values [...].
    """
    return decode_limbs(fmt, codes_to_limbs(fmt, jnp.asarray(codes)))


def decode_limbs(fmt: Format, code: Limbs) -> Number:
    """Decode raw codes that are already split into limbs.

    Args:
        fmt: Format of the codes.
        code: Limbs [...], as `codes_to_limbs` returns them.

    Returns:
        The exact values [...], as `decode` returns them.
    """
    top = code[-1]
    if fmt.is_integer and fmt.words == 2:
        negative = top.astype(jnp.int32) < 0 if fmt.signed else jnp.zeros(top.shape, bool)
        low, high = -code[0], ~top + (code[0] == 0).astype(jnp.uint32)  # limbs of -code, in two's complement
        never = jnp.zeros(top.shape, bool)
        magnitude = jnp.where(negative, low, code[0]), jnp.where(negative, high, top)
        return Number(negative, magnitude, jnp.zeros(top.shape, jnp.int32), never, never)
    if fmt.is_integer:
        value = (top << (32 - fmt.bits)).astype(jnp.uint32)
        negative = value.astype(jnp.int32) < 0 if fmt.signed else jnp.zeros(top.shape, bool)
        extended = (value.astype(jnp.int32) >> (32 - fmt.bits)).astype(jnp.uint32) if fmt.signed else value >> (32 - fmt.bits)
        never = jnp.zeros(top.shape, bool)
        return Number(negative, (jnp.where(negative, -extended, extended),), jnp.zeros(top.shape, jnp.int32), never, never)
    top_bits = fmt.bits - 32 * (len(code) - 1)  # the format's bits in the top limb
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
    elif fmt.specials == "fnuz":
        nan, infinite = top & ((1 << fmt.bits) - 1) == fmt.nan, never
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
    """Encode values as raw codes, rounded once.

    Args:
        fmt: Format of the result.
        number: Values [...].
        rounding: As in `encode_limbs`.
        **options: Keyword arguments of `encode_limbs`.

    Returns:
        Codes [...] in the format's dtype; uint32[..., 2] for a 64-bit format.

    Raises:
        ValueError: The rounding is unknown, or "SR" lacks random bits.

    Source: as in `encode_limbs`.
    """
    return limbs_to_codes(fmt, encode_limbs(fmt, number, rounding, **options))


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
    """Encode values as raw codes in limbs, rounded once.

    NaN becomes the canonical NaN. In a format without NaN it becomes the largest finite value (PTX ISA 9.7.9, cvt to e2m1, e2m3, e3m2),
    and in an integer format 0. In an unsigned float format a negative value becomes NaN, or the least value with overflow="saturate".
    ue8m0 has no zero: 0 becomes NaN, as in ml_dtypes, and with overflow="saturate" the code 0, 2^-127, as cvt to ue8m0x2 gives in PTX
    with and without .satfinite. A tie in "RN" goes to the even code. In ue8m0, where every significand is 1, that is
    the even exponent field (ml_dtypes rounds up).

    Args:
        fmt: Format of the result.
        number: Values [...].
        rounding: One of CONVERSION_ROUNDINGS, or a traced int32 index into ROUNDINGS. "SR" rounds a value that lies a fraction f of the
            way from its lower to its upper neighbour up with probability f. The probability is exact if at most 32 bits are dropped, else
            within 2^-32.
        overflow: Result for a magnitude above the largest finite one. "ieee": Inf (NaN in formats that have only NaN) if the rounding
            leads there, else the largest finite value. "infinity": Inf in every rounding, as tensor cores do. "saturate": the largest
            finite value, for Inf too. Integers and formats without specials always saturate.
        signed_zero: False makes every zero result +0.
        fraction_bits: Number of the format's fraction bits to keep; may be traced. None keeps all.
        random: Random bits for "SR", uint32 of the number's shape.

    Returns:
        Limbs [...] of the codes.

    Raises:
        ValueError: The rounding is unknown, or "SR" lacks random bits.

    Source: PTX ISA 9.7.9; IEEE 754-2019, 7.4.
    """
    omitted = 0 if fraction_bits is None else fmt.mantissa_bits - fraction_bits  # fraction bits to leave out
    negative = number.negative
    shift = bits.leading_zeros(number.magnitude)
    magnitude = bits.shift_left(number.magnitude, shift)
    exponent = number.exponent + (32 * len(magnitude) - 1) - shift  # log2 of the leading one's weight
    if len(magnitude) < fmt.words:
        magnitude = _widen(magnitude, fmt.words)
    elif not fmt.is_integer and random is None:  # a float has room below its last bit for the half bit and the sticky bit
        magnitude = bits.narrow_jam(magnitude, fmt.words)
    width = 32 * len(magnitude)
    zero = bits.is_zero(magnitude)
    if fmt.is_integer:
        # bits of weight below 1 are dropped; the exponent detects a value that is too large
        min_exponent, mantissa_bits = 0, 0
        drop = width - 1 - exponent
    else:
        min_exponent, mantissa_bits = fmt.min_exponent, fmt.mantissa_bits
        drop = (width - 1 - mantissa_bits) + omitted + jnp.maximum(min_exponent - exponent, 0)
    drop = jnp.clip(drop, 0, 2 * width)
    significand = bits.shift_right(magnitude, drop)
    # without fraction bits, the exponent decides which of the two codes of a tie is even
    odd = significand[0] if fmt.subnormals else (exponent - min_exponent).astype(jnp.uint32)
    significand = round_magnitude(significand, (odd & 1) == 1, magnitude, drop, negative, rounding, random)
    if fmt.is_integer:
        return _integer_code(fmt, number, significand, exponent, zero)
    significand = significand[: fmt.words]
    if fraction_bits is not None:
        significand = bits.shift_left(significand, omitted)
    # the hidden bit of the significand adds one to the exponent field, and a carry out of the fraction adds one more
    field = jnp.clip(exponent - min_exponent, 0, fmt.max_exponent - min_exponent + 1).astype(jnp.uint32)
    field = jnp.where(zero, 0, field)
    if fmt.subnormals:
        code = bits.add(significand, bits.shift_left((field, *(jnp.zeros_like(field),) * (fmt.words - 1)), fmt.mantissa_bits))
    else:
        code = (field + significand[0] - 1,)  # the hidden bit is always set; a value below the smallest normal rounds to that normal
        code = (jnp.where(exponent < min_exponent, 0, code[0]),)
    return _apply_specials(fmt, number, code, exponent, rounding, overflow, signed_zero)


def _widen(magnitude: Limbs, count: int) -> Limbs:
    """Extend a normalised magnitude to `count` limbs; its leading one stays at the top."""
    return (jnp.zeros_like(magnitude[0]),) * (count - len(magnitude)) + magnitude


def _integer_code(fmt: Format, number: Number, integer: Limbs, exponent: Array, zero: Array) -> Limbs:
    """Encode a rounded magnitude in two's complement, clamped to the format's range; NaN becomes 0 (PTX ISA 9.7.9, cvt)."""
    limit = jnp.uint32(fmt.max_magnitude) + (number.negative & fmt.signed).astype(jnp.uint32)
    limit = jnp.where(number.negative & (not fmt.signed), 0, limit)
    too_large = number.infinite | (~zero & (exponent > 31)) | (integer[0] > limit)
    for limb in integer[1:]:
        too_large = too_large | (limb != 0)
    magnitude = jnp.where(too_large, limit, integer[0])
    magnitude = jnp.where(number.nan, 0, magnitude)
    code = jnp.where(number.negative, -magnitude, magnitude) & jnp.uint32((1 << fmt.bits) - 1)
    return (code,)


def _apply_specials(
    fmt: Format, number: Number, code: Limbs, exponent: Array, rounding: Rounding, overflow: str, signed_zero: bool
) -> Limbs:
    """Apply overflow, special values and the sign to the code of a rounded magnitude."""

    def constant(value: int) -> Limbs:
        return tuple(jnp.full(exponent.shape, (value >> (32 * i)) & 0xFFFFFFFF, jnp.uint32) for i in range(fmt.words))

    negative = number.negative
    max_finite, infinity_or_nan = constant(fmt.max_magnitude), constant(fmt.infinity if fmt.specials == "ieee" else fmt.nan)
    nonzero = ~bits.is_zero(number.magnitude)
    too_large = ((exponent > fmt.max_exponent) & nonzero) | bits.less(max_finite, code)
    if overflow == "saturate" or fmt.specials == "none":
        code = bits.select(too_large | number.infinite, max_finite, code)
    else:
        outward = jnp.ones_like(negative) if overflow == "infinity" else overflows_to_infinity(negative, rounding)
        code = bits.select(too_large, bits.select(outward, infinity_or_nan, max_finite), code)
        code = bits.select(number.infinite, infinity_or_nan, code)
    not_a_number = number.nan
    if not fmt.signed:
        below = negative & (nonzero | number.infinite)
        if not fmt.subnormals:
            below = below | (~nonzero & ~number.infinite & ~number.nan)
        code = bits.select(below, constant(0), code)
        if overflow != "saturate":
            not_a_number = not_a_number | below
    canonical = fmt.max_magnitude if fmt.specials == "none" else fmt.nan
    code = bits.select(not_a_number, constant(canonical), code)
    if fmt.signed:
        negative = negative & ~number.nan
        if not signed_zero or fmt.specials == "fnuz":
            negative = negative & ~bits.is_zero(code)
        sign_bit = fmt.bits - fmt.unused_bits - 1 - 32 * (fmt.words - 1)
        code = (*code[:-1], code[-1] | (negative.astype(jnp.uint32) << sign_bit))
    if fmt.unused_bits:
        ones = jnp.where(number.nan, (1 << fmt.unused_bits) - 1, 0).astype(jnp.uint32)
        code = ((code[0] << fmt.unused_bits) | ones,)
    return code


def convert(
    source: Format, target: Format, codes: ArrayLike, rounding: Rounding = "RN", saturate: bool = False, key: PRNGKey | None = None
) -> Array:
    """Convert codes of one format to codes of another, rounded once, in integer arithmetic.

    Args:
        source: Format of the codes.
        target: Format of the result.
        codes: Unsigned [...]; uint32[..., 2] for a 64-bit format.
        rounding: "RN", "RZ", "RM", "RP", "SR" (stochastic) or "RNA" (to nearest, ties away from zero), or a traced int32 index into
            ROUNDINGS.
        saturate: Replace a value out of range by the largest finite value instead of Inf or NaN. In ue8m0, which has no zero, 0 is out of
            range: it becomes NaN, or with `saturate` the code 0, as in PTX's cvt.
        key: A `jax.random` key, for rounding="SR".

    Returns:
        Codes of `target`, [...]; uint32[..., 2] for a 64-bit format. Special values are treated as in `encode_limbs`.

    Raises:
        ValueError: The rounding is unknown, or "SR" lacks a key.

    Source: as in `encode_limbs`.
    """
    codes = jnp.asarray(codes)
    if isinstance(rounding, str) and rounding == "RN" and rounds_from_f32(source, target):
        return _round_directly(source, target, saturate, codes)
    random = None if key is None else jax.random.bits(key, codes.shape[: codes.ndim - (source.words - 1)], jnp.uint32)
    if isinstance(rounding, str):
        return _convert(source, target, rounding, saturate, codes, random)
    return encode(target, decode(source, codes), rounding, overflow="saturate" if saturate else "ieee", random=random)


def _widens_exactly(source: Format) -> bool:
    """Return True if every number of the format is zero, a normal number of f32, or a number with the same exponent field in f32."""
    same_fields = source.bias == F32.bias or source.min_exponent - source.mantissa_bits >= F32.min_exponent
    narrower = not source.is_integer and source.mantissa_bits < F32.mantissa_bits and F32.can_represent(source)
    narrower = narrower and source.specials != "fnuz"
    return narrower and source.subnormals and not source.unused_bits and same_fields


def _widen_to_f32(source: Format, codes: Array) -> Array:
    """Convert codes to f32 in fewer operations than `convert`, for a format that `_widens_exactly`: nothing rounds or overflows."""
    code = codes.astype(jnp.uint32)
    magnitude = code & source.nan
    wide = magnitude << (F32.mantissa_bits - source.mantissa_bits)
    if source.bias != F32.bias:
        top = bits.LIMB_BITS - 1 - bits.leading_zeros((magnitude,))  # for a subnormal number: the index of its leading one
        field = top + (source.min_exponent - source.mantissa_bits + F32.bias - 1)  # the leading one adds one to it
        leading = magnitude << (F32.mantissa_bits - top).astype(jnp.uint32)
        subnormal = jnp.where(magnitude == 0, 0, (field.astype(jnp.uint32) << F32.mantissa_bits) + leading)
        normal = wide + np.uint32((F32.bias - source.bias) << F32.mantissa_bits)
        wide = jnp.where(magnitude < 1 << source.mantissa_bits, subnormal, normal)
    signed = wide | (code >> (source.bits - 1) & 1) << 31 if source.signed else wide
    if source.specials == "ieee":
        signed = jnp.where(magnitude == source.infinity, signed & np.uint32(1 << 31) | np.uint32(F32.infinity), signed)
        return jnp.where(magnitude > source.infinity, np.uint32(F32.nan), signed)
    return jnp.where(magnitude == source.nan, np.uint32(F32.nan), signed) if source.specials == "nan" else signed


def recode(source: Format, target: Format, codes: Array) -> Array:
    """Convert codes as `convert` does, but return them unchanged if the formats are equal, so that a NaN keeps its bits.

    Args:
        source: Format of the codes.
        target: Format of the result.
        codes: Unsigned [...]; uint32[..., 2] for a 64-bit format.

    Returns:
        Codes of `target`, rounded to nearest even.
    """
    return codes if source == target else convert(source, target, codes)


def rounds_from_f32(source: Format, target: Format) -> bool:
    """Return True if `round_from_f32` serves for a conversion to the nearest number: the numbers of the source are those of f32."""
    exact_source = source == F32 or _widens_exactly(source)
    narrower = not target.is_integer and target.subnormals and target.specials != "fnuz" and F32.can_represent(target)
    # f32's subnormal numbers have another leading bit: they must be less than half of the target's least number, or have its codes
    flushed = target.bias == F32.bias or target.min_exponent - target.mantissa_bits > F32.min_exponent
    return exact_source and narrower and flushed


def nan_code(fmt: Format) -> int:
    """Return the code that a NaN becomes in a float format: see `encode_limbs`."""
    code = fmt.max_magnitude if fmt.specials == "none" else fmt.nan
    return (code + 1 << fmt.unused_bits) - 1


def round_from_f32(target: Format, saturate: bool, codes: Array) -> Array:
    """Convert f32 codes to a float format that f32 can represent, in fewer operations than `convert`, rounded to nearest even.

    Args:
        target: Format of the result, with subnormals.
        saturate: As in `convert`.
        codes: f32 codes [...].

    Returns:
        Codes of `target` [...], as `convert` returns them.
    """
    drop, negative = F32.mantissa_bits - target.mantissa_bits, codes >> 31 != 0
    magnitude = codes & np.uint32((1 << 31) - 1)
    if drop == 0:
        code = magnitude
    elif target.bias == F32.bias:  # f32 codes in fewer bits, subnormal ones too
        code = (magnitude + np.uint32((1 << drop - 1) - 1) + (magnitude >> drop & 1)) >> drop
    else:
        hidden = np.uint32(1 << F32.mantissa_bits)
        field, significand = (magnitude >> F32.mantissa_bits).astype(jnp.int32), magnitude & (hidden - 1) | hidden
        above = field - (F32.bias + target.min_exponent)  # exponent above the smallest normal number's
        # a shift of one bit more than the significand has leaves less than half a unit, as of every subnormal f32 number
        shift = (drop + jnp.clip(-above, 0, F32.mantissa_bits + 2 - drop)).astype(jnp.uint32)
        code = (significand + ((np.uint32(1) << shift - 1) - 1) + (significand >> shift & 1)) >> shift
        binades = target.max_exponent - target.min_exponent + 2  # beyond the largest number
        code = code + (jnp.clip(above, 0, binades).astype(jnp.uint32) << target.mantissa_bits)
    limit = np.uint32(target.max_magnitude + (target.specials != "none" and not saturate))  # Inf or NaN follows the largest number
    code = jnp.minimum(code, limit)
    if target.signed:
        code = code | negative.astype(jnp.uint32) << target.bits - target.unused_bits - 1
    else:
        code = jnp.where(negative & (magnitude != 0), np.uint32(0 if saturate or target.specials == "none" else target.nan), code)
    code = jnp.where(magnitude > F32.infinity, np.uint32(nan_code(target)), code << target.unused_bits)
    return code.astype(target.dtype)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _round_directly(source: Format, target: Format, saturate: bool, codes: Array) -> Array:
    """Convert to the nearest number in few operations, which XLA fuses with those around them."""
    if source != F32:
        codes = _widen_to_f32(source, codes)
        if target == F32 and not saturate:
            return codes
    return round_from_f32(target, saturate, codes)


@compile_once(0, 1, 2, 3)
def _convert(source: Format, target: Format, rounding: str, saturate: bool, codes: Array, random: Array | None) -> Array:
    return encode(target, decode(source, codes), rounding, overflow="saturate" if saturate else "ieee", random=random)
