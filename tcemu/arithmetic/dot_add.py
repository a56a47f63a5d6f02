"""One step of a tensor core, the fused dot-add: some products and one accumulator in a single sum, rounded once.

The law, for every floating instruction that is no chain of fused multiply-adds. The numbers in it are fields of `Model`:

  rule 1  Decode. Subnormals are kept, with the exponent of the least normal. Of tf32 the low 13 bits are ignored.
  rule 2  A product's significand is the exact product of the significands, and its exponent the sum of the exponents; it is not
          normalised. With block scales, the exponents of both scales are added. The accumulator keeps its own exponent.
  rule 3  The step aligns to the largest exponent among the products and the accumulator that are not zero, but to `floor` at least.
  rule 4  Each term is aligned to it with `fraction_bits` bits, and the bits below are cut: its magnitude is rounded toward zero.
  rule 5  The aligned terms are added exactly.
  rule 6  The sum is rounded once, by `rounding`, to `result` with `result_bits` fraction bits. A sum that is or becomes zero is +0.
  rule 7  What is too large for the result becomes Inf, in every rounding.
  rule 8  A NaN, Inf x 0, or +Inf and -Inf together give the canonical NaN; otherwise an Inf gives that Inf.

Source: measured on an NVIDIA H200, 0 mismatches of 1.3e10 outputs (tests/golden/README.md, verified_h200.txt). The same form with other
numbers fits every NVIDIA tensor core from Volta on (Khattak and Mikaitis, arXiv 2512.07004; MMA-Sim, arXiv 2511.10909). The numbers of a
target are rows of `tcemu.architectures`.

Floats appear here in four operations only. Each is exact wherever its result is used, on any backend, whether or not it flushes subnormals
or contracts multiply-adds (tests/test_jaxpr.py holds the list). `specials` adds floats too, but asks only whether the sum is Inf or NaN.
  multiply     (1) two significands: the product has at most 24 bits, so an f32 holds it whole, and it is 0 or normal (see `Operand`).
               (2) by a power of two: every bit stays, unless the result leaves f32's normal range. Upward it cannot, since an aligned
               product is below 2^(fraction_bits + 2). Downward it is then below 1, and rule 4 cuts it to 0 all the same.
  convert      f32 to s32 cuts toward zero, which is rule 4's cut. The value is below 2^31, by `_fits_one_limb` or by MAX_FRACTION_BITS.
               s32 to f32, for the high part of a wide term, is of at most 24 significant bits.
  subtract     a wide term less its high part: the low bits of the same 24-bit significand.
  bitcast      no arithmetic.
A what-if model may align otherwise than by cutting. Then `whole` also rounds an f32 to an integer (floor, ceil, round), which is exact.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tcemu import bits
from tcemu.arithmetic.model import Model, Signature
from tcemu.arithmetic.multiplicands import ZERO_EXPONENT, Operand, is_compact, power_of_two
from tcemu.arithmetic.specials import infinity
from tcemu.arithmetic.truncation import truncated_f32
from tcemu.bits import Limbs
from tcemu.formats import F32, ROUNDINGS, Format, Number, Rounding, cuts, decode_limbs, encode_limbs, round_up

LOW_BITS = 24  # of a wide term


class Pair(NamedTuple):
    """What A and B bring to one product, shaped to meet as [..., M, N]."""

    a: Array
    b: Array


class Product(NamedTuple):
    """One term of a step: the significands and the exponents of its two factors."""

    significands: Pair
    exponents: Pair


class ProductSum(NamedTuple):
    """The aligned products of a step, added: (-1)^negative * magnitude * 2^(greatest - fraction_bits)."""

    negative: Array
    magnitude: Limbs
    greatest: Array  # the exponent that the step aligns to


def dot_add(model: Model, signature: Signature, a: Operand, b: Operand, accumulator: Limbs) -> Limbs:
    """One step: all products of a and b along K, and one accumulator, which has their Inf and NaN already: see `specials`.

    a: [..., M, terms]; b: [..., terms, N]; accumulator: codes of `model.result` [..., M, N], as one limb.
    model: its numeric fields may be traced. signature: of the instruction, with the formats that are multiplied.
    Returns codes of `model.result` [..., M, N], as one limb.
    """
    products = _products(a, b)

    # rule 3: the largest exponent of all that is not zero
    greatest = products[0].exponents.a + products[0].exponents.b
    for product in products[1:]:
        greatest = jnp.maximum(greatest, product.exponents.a + product.exponents.b)
    c = decode_accumulator(model.result, accumulator)
    greatest = jnp.maximum(jnp.maximum(greatest, c.exponent), model.floor)

    # rules 4 and 5: align, cut, add
    aligned = _aligned(model, signature, products, greatest)
    narrow = cuts(model.alignment) and _fits_one_limb(model, signature, len(products))
    negative, magnitude = _add_narrow(aligned) if narrow else add_wide(aligned)
    return add_accumulator(model, ProductSum(negative, magnitude, greatest), c)


def _products(a: Operand, b: Operand) -> list[Product]:
    row, column = (lambda v, t: v[..., :, t, None]), (lambda v, t: v[..., t, None, :])
    return [
        Product(Pair(row(a.significand, t), column(b.significand, t)), Pair(row(a.exponent, t), column(b.exponent, t)))
        for t in range(a.exponent.shape[-1])
    ]


def _aligned(model: Model, signature: Signature, products: list[Product], greatest: Array) -> list[Array]:
    """f32: each term in units of 2^(greatest - fraction_bits), not yet cut; a whole number where alignment does not cut."""
    assert model.fraction_bits is not None
    a, b, fraction_bits = signature.a, signature.b, model.fraction_bits
    terms = [product.significands.a * product.significands.b for product in products]
    if is_compact(a, b) and signature.scale is None:
        least = a.least_exponent + b.least_exponent  # below it every product is 0, and the scale would overflow
        unit = power_of_two(fraction_bits - jnp.maximum(greatest, least))
        aligned = [term * unit for term in terms]
    else:
        last = a.mantissa_bits + b.mantissa_bits - fraction_bits + greatest
        exponents = [product.exponents.a + product.exponents.b for product in products]
        aligned = [term * power_of_two(exponent - last) for term, exponent in zip(terms, exponents, strict=True)]
    if cuts(model.alignment):
        return aligned
    return [whole(value, term, model.alignment) for value, term in zip(aligned, terms, strict=True)]


def _fits_one_limb(model: Model, signature: Signature, terms: int) -> bool:
    """Whether the sum of the aligned products fits an s32, and with the accumulator a 32-bit magnitude.

    A product is at most (2^(Ma+1) - 1) (2^(Mb+1) - 1) units of 2^-(Ma+Mb); the accumulator is below 2^(fraction_bits + 1).
    """
    fraction_bits, a, b = model.fraction_bits, signature.a.mantissa_bits, signature.b.mantissa_bits
    if not isinstance(fraction_bits, int) or fraction_bits > 30:
        return False
    largest = (2 ** (a + 1) - 1) * (2 ** (b + 1) - 1)
    shift = fraction_bits - a - b
    return terms * (largest << shift if shift >= 0 else largest >> -shift) < 2**31


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


def add_accumulator(model: Model, products: ProductSum, c: Number) -> Limbs:
    """The end of a step: align the accumulator, add it to the products, round once. An accumulator that is Inf or NaN stays.

    c: from `decode_accumulator`.
    """
    assert model.fraction_bits is not None
    negative, magnitude, greatest = products
    result, fraction_bits = model.result, model.fraction_bits
    up = bits.shift_left(bits.extend(c.magnitude, len(magnitude)), jnp.maximum(fraction_bits - result.mantissa_bits, 0))
    down = jnp.maximum(result.mantissa_bits - fraction_bits, 0) + (greatest - c.exponent)
    kept = bits.shift_right(up, down)
    kept = round_up(kept, kept[0] & 1 == 1, up, down, c.negative, model.alignment)
    negative, magnitude = bits.add_signed(negative, magnitude, c.negative, kept)

    # rules 6 and 7
    unit = greatest - fraction_bits
    if result == F32 and cuts(model.rounding) and len(magnitude) == 1:
        d = truncated_f32(negative, magnitude[0], unit, model.result_bits)
    else:
        never = jnp.zeros(greatest.shape, bool)
        total = Number(negative, magnitude, unit, never, never)
        (d,) = encode_limbs(result, total, model.rounding, overflow="infinity", signed_zero=False, fraction_bits=model.result_bits)

    # rule 8
    d = jnp.where(c.infinite, infinity(result, c.negative), d)
    return (jnp.where(c.nan, result.nan, d),)


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
