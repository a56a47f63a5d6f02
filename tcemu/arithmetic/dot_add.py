"""The truncated fused dot-add: align products and accumulator to the largest, cut, add exactly, round once.

Source: the rules are those measured on an NVIDIA H200 (README, "What is exact"). The same form with other numbers fits every NVIDIA tensor
core from Volta on (Khattak and Mikaitis, arXiv 2512.07004; MMA-Sim, arXiv 2511.10909); which numbers a target uses is `models`' affair.

Floats appear here in four operations only, each exact wherever its result is used, on any backend, whether or not it flushes subnormals
or contracts multiply-adds (tests/test_jaxpr.py holds the list):
  multiply     (1) two significands: the product has at most 24 bits, so an f32 holds it whole, and it is 0 or normal (see `Operand`).
               (2) by a power of two: every bit stays, unless the result leaves f32's normal range. Upward it cannot, since an aligned
               product is below 2^(fraction_bits + 2); downward it is then below 1, and cut to 0 all the same.
  convert      f32 to s32 cuts toward zero, which is rule 4's cut; the value is below 2^31, by `_fits_one_limb` or by MAX_FRACTION_BITS.
               s32 to f32, for the high part of a wide term, is of at most 24 significant bits.
  subtract     a wide term less its high part: the low bits of the same 24-bit significand.
  bitcast      no arithmetic.
Where a what-if model aligns otherwise than by cutting, `whole` also rounds an f32 to an integer (floor, ceil, round): exact by definition.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu import bits
from tcemu.arithmetic.truncation import truncated_f32
from tcemu.bits import Limbs
from tcemu.formats import F32, ROUNDINGS, Format, Number, Rounding, cuts, decode, decode_limbs, encode_limbs, round_up

# Zeros and specials ride on the exponent, so that one maximum finds the alignment and shows whether a special took part
ZERO_EXPONENT = -(1 << 18)
SPECIAL_EXPONENT = 1 << 20

PLUS, MINUS, NAN = 1, 2, 4  # what a step met: +Inf, -Inf, NaN; any sum above MINUS makes a NaN

LOW_BITS = 24  # of a wide term


class Scale(NamedTuple):
    """Block scales decoded, one for each product of a row of A or a column of B: (significand) * 2^exponent."""

    significand: Array  # f32 integer, in units of its format's last place at exponent 0; a NaN's is 0
    exponent: Array  # int32; SPECIAL_EXPONENT for NaN


class Operand(NamedTuple):
    """A multiplicand decoded for `dot_add`, once a matrix. Two arrays of the codes' shape.

    significand: f32, signed. If every product of the two formats is a normal f32 (`_is_compact`) and there are no scales, the value
        itself; else the integer significand. NaN: 0. Inf: +1 or -1.
    exponent: int32, that of the value as rule 2 counts it; ZERO_EXPONENT for 0, SPECIAL_EXPONENT for Inf and NaN.
    """

    significand: Array
    exponent: Array


def _is_compact(a: Format, b: Format) -> bool:
    """Every product of two non-zero values is a normal f32, with room for the alignment: the values themselves can be multiplied."""
    least = a.least_exponent - a.mantissa_bits + b.least_exponent - b.mantissa_bits
    greatest = a.greatest_exponent + b.greatest_exponent + 2
    return least >= F32.least_exponent and greatest <= F32.greatest_exponent


def _fits_one_limb(a: Format, b: Format, terms: int, fraction_bits: ArrayLike) -> bool:
    """Whether the sum of the aligned products fits an s32, and with the accumulator a 32-bit magnitude.

    A product is at most (2^(Ma+1) - 1) (2^(Mb+1) - 1) units of 2^-(Ma+Mb); the accumulator is below 2^(fraction_bits + 1).
    """
    if not isinstance(fraction_bits, int) or fraction_bits > 30:
        return False
    largest = (2 ** (a.mantissa_bits + 1) - 1) * (2 ** (b.mantissa_bits + 1) - 1)
    shift = fraction_bits - a.mantissa_bits - b.mantissa_bits
    return terms * (largest << shift if shift >= 0 else largest >> -shift) < 2**31


def power_of_two(exponent: ArrayLike) -> Array:
    """f32 2^exponent, by its bits; 0 below the normal range. exponent: int32 <= 127."""
    return lax.bitcast_convert_type(jnp.maximum(jnp.asarray(exponent) + F32.bias, 0) << F32.mantissa_bits, jnp.float32)


def scale(fmt: Format, codes: ArrayLike) -> Scale:
    """Decode the codes of block scales."""
    number = decode(fmt, codes)
    significand = jnp.where(number.nan, 0, number.magnitude[0]).astype(jnp.int32).astype(jnp.float32)
    return Scale(significand, jnp.where(number.nan, SPECIAL_EXPONENT, number.exponent + fmt.mantissa_bits))


def operand(fmt: Format, codes: ArrayLike, other: Format, scales: Scale | None = None) -> Operand:
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
    elif _is_compact(fmt, other):
        magnitude = magnitude * power_of_two(number.exponent)
    magnitude = jnp.where(number.nan, 0.0, jnp.where(number.infinite, 1.0, magnitude))
    exponent = jnp.where(number.magnitude[0] == 0, ZERO_EXPONENT, exponent)
    return Operand(jnp.where(number.negative, -magnitude, magnitude), jnp.where(special, SPECIAL_EXPONENT, exponent))


def has_special(x: Operand) -> Array:
    """bool [..., 1, 1]: an Inf or NaN stands somewhere in the matrix."""
    return jnp.any(x.exponent == SPECIAL_EXPONENT, axis=(-2, -1), keepdims=True)


def _products(a: Operand, b: Operand) -> list[tuple[tuple[Array, Array], tuple[Array, Array]]]:
    """((x, y), (i, j)) for every term: significands and exponents, shaped to meet as [..., M, N]."""
    row, column = (lambda v, t: v[..., :, t, None]), (lambda v, t: v[..., t, None, :])
    return [
        ((row(a.significand, t), column(b.significand, t)), (row(a.exponent, t), column(b.exponent, t)))
        for t in range(a.exponent.shape[-1])
    ]


def dot_add(
    a: Operand,
    b: Operand,
    accumulator: Limbs | None,
    *,
    special: bool,
    a_format: Format,
    b_format: Format,
    scaled: bool = False,
    result: Format,
    rounding: Rounding,
    fraction_bits: ArrayLike,
    floor: ArrayLike,
    result_bits: ArrayLike | None = None,
    alignment: Rounding = "RZ",
) -> Limbs:
    """One step: `terms` products and one accumulator in a single fused sum, rounded once.

    a: [..., M, terms]; b: [..., terms, N]; accumulator: codes of `result` [..., M, N], as one limb, or None for none at all.
    special: whether a or b may hold an Inf or NaN; False spares the search for them.
    scaled: the operands carry block scales.
    fraction_bits: bits kept below the unit of the largest exponent, 1 to MAX_FRACTION_BITS; floor: the least that exponent can be.
    result_bits: fraction bits of the result that are kept (13 for FP8 on Hopper's wgmma); None: all.
    alignment: how an aligned term is rounded to these bits; "RZ" cuts, as every known unit does.
    fraction_bits, floor, result_bits, rounding and alignment may be traced.
    Returns codes of `result` [..., M, N], as one limb: +0 for any zero sum, Inf on overflow in every rounding, the canonical NaN.
    """
    terms, products = a.exponent.shape[-1], _products(a, b)

    # rule 3: the largest exponent of all that is not zero
    greatest = products[0][1][0] + products[0][1][1]
    for _, (x, y) in products[1:]:
        greatest = jnp.maximum(greatest, x + y)
    c = None if accumulator is None else decode_accumulator(result, accumulator)
    greatest = jnp.maximum(greatest if c is None else jnp.maximum(greatest, c.exponent), floor)

    # rules 4 and 5: align, cut, add
    if _is_compact(a_format, b_format) and not scaled:
        least = a_format.least_exponent + b_format.least_exponent  # below it every product is 0, and the scale would overflow
        unit = power_of_two(fraction_bits - jnp.maximum(greatest, least))
        aligned = [x * y * unit for (x, y), _ in products]
    else:
        last = a_format.mantissa_bits + b_format.mantissa_bits - fraction_bits + greatest
        aligned = [x * y * power_of_two(i + j - last) for (x, y), (i, j) in products]
    add = _add_narrow if cuts(alignment) and _fits_one_limb(a_format, b_format, terms, fraction_bits) else add_wide
    if not cuts(alignment):
        aligned = [whole(v, x * y, alignment) for v, ((x, y), _) in zip(aligned, products, strict=True)]
    flags = _specials_of_products(products) if special else jnp.zeros(greatest.shape, jnp.int32)
    return add_accumulator(
        *add(aligned), greatest, flags, c, result=result, rounding=rounding, fraction_bits=fraction_bits, result_bits=result_bits,
        alignment=alignment,
    )  # fmt: skip


def whole(aligned: Array, term: Array, alignment: Rounding) -> Array:
    """An aligned term, f32, rounded to an integer. term: what was aligned, so that what vanished on the way still counts as not zero."""
    tiny = jnp.float32(2.0**-30)
    value = jnp.where((jnp.abs(aligned) < tiny) & (term != 0), jnp.where(term < 0, -tiny, tiny), aligned)
    ways = {"RN": lambda v: lax.round(v, lax.RoundingMethod.TO_NEAREST_EVEN), "RZ": jnp.trunc, "RM": jnp.floor, "RP": jnp.ceil}
    if isinstance(alignment, str):
        return ways[alignment](value)
    which = jnp.broadcast_to(jnp.asarray(alignment, jnp.int32), value.shape)
    return lax.select_n(which, *(ways[name](value) for name in ROUNDINGS[:-1]))


def decode_accumulator(result: Format, accumulator: Limbs) -> Number:
    """The accumulator, its exponent that of the value as rule 2 counts it: ZERO_EXPONENT where it takes no part in the alignment."""
    c = decode_limbs(result, accumulator)
    no_part = bits.is_zero(c.magnitude) | c.nan | c.infinite
    return c._replace(exponent=jnp.where(no_part, ZERO_EXPONENT, c.exponent + result.mantissa_bits))


def add_accumulator(
    negative: Array,
    magnitude: Limbs,
    greatest: Array,
    flags: Array,
    c: Number | None,
    *,
    result: Format,
    rounding: Rounding,
    fraction_bits: ArrayLike,
    result_bits: ArrayLike | None,
    alignment: Rounding = "RZ",
) -> Limbs:
    """The end of a step: align the accumulator, add it to the sum of the products, round once, and let the specials have their say.

    negative, magnitude: the aligned products' sum, in units of 2^(greatest - fraction_bits); flags: int32, the sum of PLUS, MINUS and NAN
    over what the products hold; c: from `decode_accumulator`, or None.
    """
    if c is not None:
        up = bits.shift_left(bits.extend(c.magnitude, len(magnitude)), jnp.maximum(fraction_bits - result.mantissa_bits, 0))
        down = jnp.maximum(result.mantissa_bits - fraction_bits, 0) + (greatest - c.exponent)
        kept = bits.shift_right(up, down)
        kept = round_up(kept, kept[0] & 1 == 1, up, down, c.negative, alignment)
        negative, magnitude = bits.add_signed(negative, magnitude, c.negative, kept)

    # rules 6 and 7
    unit = greatest - fraction_bits
    if result == F32 and cuts(rounding) and len(magnitude) == 1:
        d = truncated_f32(negative, magnitude[0], unit, result_bits)
    else:
        never = jnp.zeros(greatest.shape, bool)
        total = Number(negative, magnitude, unit, never, never)
        (d,) = encode_limbs(result, total, rounding, overflow="infinity", signed_zero=False, fraction_bits=result_bits)

    # rule 8
    if c is not None:
        flags = flags | jnp.where(c.nan, NAN, jnp.where(c.infinite, jnp.where(c.negative, MINUS, PLUS), 0))
    sign = jnp.where(flags == MINUS, jnp.uint32(1 << (result.bits - 1)), 0)
    d = jnp.where(flags == 0, d, sign | result.infinity)
    return (jnp.where(flags > MINUS, result.nan, d),)


def _add_narrow(aligned: list[Array]) -> tuple[Array, Limbs]:
    """Cut each term toward zero and add, in one s32. Returns sign and magnitude."""
    total = aligned[0].astype(jnp.int32)
    for term in aligned[1:]:
        total = total + term.astype(jnp.int32)
    return total < 0, (jnp.abs(total).astype(jnp.uint32),)


def add_wide(aligned: list[Array]) -> tuple[Array, Limbs]:
    """The same in two s32 sums, of the terms' bits above and below 2^24. Returns sign and 64-bit magnitude."""
    high_sum = low_sum = jnp.int32(0)
    for term in aligned:
        high = (term * 2.0**-LOW_BITS).astype(jnp.int32)
        low = (term - high.astype(jnp.float32) * 2.0**LOW_BITS).astype(jnp.int32)
        high_sum, low_sum = high_sum + high, low_sum + low
    sign = lambda x: (x >> 31).astype(jnp.uint32)  # noqa: E731  the limb that extends a two's complement word
    high = bits.shift_left((high_sum.astype(jnp.uint32), sign(high_sum)), jnp.int32(LOW_BITS))
    total = bits.add(high, (low_sum.astype(jnp.uint32), sign(low_sum)))
    negative = total[1].astype(jnp.int32) < 0
    return negative, bits.select(negative, bits.negate(total), total)


def _specials_of_products(products: list[tuple[tuple[Array, Array], tuple[Array, Array]]]) -> Array:
    """int32 [..., M, N], the sum of PLUS, MINUS and NAN over what the products hold."""
    flags = jnp.int32(0)
    for (x, y), (i, j) in products:
        x_special, y_special = i == SPECIAL_EXPONENT, j == SPECIAL_EXPONENT
        invalid = (x_special & ((x == 0) | (j == ZERO_EXPONENT))) | (y_special & ((y == 0) | (i == ZERO_EXPONENT)))
        infinity = jnp.where((x < 0) != (y < 0), MINUS, PLUS)
        flags = flags | jnp.where(invalid, NAN, jnp.where(x_special | y_special, infinity, 0))
    return flags
