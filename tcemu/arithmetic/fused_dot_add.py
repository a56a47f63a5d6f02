"""One step of a tensor core, the fused dot-add: some products and one accumulator in a single sum, rounded once.

The rules hold for every floating-point instruction that is not a chain of fused multiply-adds. Their numbers are fields of `Model`:

  rule 1  Operands are decoded. Subnormals are kept, with the exponent of the smallest normal. The low 13 bits of tf32 are ignored.
  rule 2  A product's significand is the exact product of the significands, and its exponent the sum of the exponents; it is not
          normalised. With block scales, the exponents of both scales are added. The accumulator keeps its own exponent.
  rule 3  The step aligns to the max exponent of the products and the accumulator that are not zero, and at least to `floor`.
  rule 4  Each term is aligned to it with `fraction_bits` bits and truncated: its magnitude is rounded toward zero.
  rule 5  The aligned terms are added exactly.
  rule 6  The sum is rounded once, by `rounding`, to `result` with `result_bits` fraction bits. A sum that is or becomes zero is +0.
  rule 7  A sum that is too large for the result becomes Inf, in every rounding.
  rule 8  A NaN, Inf x 0, or +Inf and -Inf together give the canonical NaN; otherwise an Inf gives that Inf.

Source: measured on NVIDIA's H200 and H100, 0 mismatches of 7.5e10 outputs (tests/golden, verified_*.txt). The same form with other
numbers fits every NVIDIA tensor core from Volta on (Khattak and Mikaitis, arXiv 2512.07004; MMA-Sim, arXiv 2511.10909). The numbers of a
target are rows of `tcemu.architectures`.

Float arithmetic appears in four operations only. Each is exact wherever its result is used, on any backend, whether or not the backend
flushes subnormals or contracts multiply-adds (tests/arithmetic/test_jaxpr.py holds the list). `absorb_specials` adds floats too, but uses
only whether the sum is Inf or NaN.
  multiply     (1) two significands: the product has at most 24 bits, so an f32 holds it exactly, and it is 0 or normal (see
  `Multiplicand`).
               (2) by a power of two: every bit stays, unless the result leaves f32's normal range. It cannot overflow, since an aligned
               product is below 2^(fraction_bits + 2). Where it underflows it is below 1, and rule 4 truncates it to 0 anyway.
  convert      f32 to s32 truncates, as rule 4 does. The value is below 2^31, by `products_fit_one_limb` or by MAX_FRACTION_BITS.
               s32 to f32, for the high part of a wide term, converts at most 24 significant bits.
  subtract     the high part from a wide term, which leaves the low bits of the same 24-bit significand.
  bitcast      no arithmetic.
A what-if model may round aligned terms in another way. Then `round_aligned` also rounds an f32 to an integer (floor, ceil, round), which is
exact.

The 4-bit block-scaled kinds add the products of a group exactly first, then scale, align and truncate the sum as one term
(`grouped_dot_add`). Source: MMA-Sim (arXiv 2511.10909 v2, table 5) and the sm_120 measurements that agree with it. There the values are
integers whose sums and products stay below 2^24, which `fitting.check_exact` verifies. So an f32 holds every partial sum, in any order,
with or without FMA. The operands of the matmul fit the eight significant bits of bf16, so that every precision mode is exact.
"""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.arithmetic.model import Model
from tcemu.arithmetic.multiplicands import SPECIAL_EXPONENT, ZERO_EXPONENT, DecodedScales, Multiplicand, is_compact, power_of_two
from tcemu.arithmetic.product_spec import ProductSpec
from tcemu.base import bits
from tcemu.base.bits import Limbs
from tcemu.formats import F32, ROUNDINGS, Format, Number, Rounding, decode, decode_limbs, encode_limbs, round_magnitude, truncates

LOW_BITS = 24  # low bits of a wide term, which are added apart
SIGN = 1 << 31
KEPT = F32.mantissa_bits + 1  # significant bits of an f32
LEAST = F32.min_exponent - F32.mantissa_bits  # exponent of the last bit of a subnormal f32


class Pair(NamedTuple):
    """The factors of A and of B in one product, shaped to broadcast to [..., M, N]."""

    a: Array
    b: Array


class Product(NamedTuple):
    """One term of a step: the significands and the exponents of its two factors."""

    significands: Pair
    exponents: Pair


class ProductSum(NamedTuple):
    """The aligned products of a step, added: (-1)^negative * magnitude * 2^(max_exponent - fraction_bits)."""

    negative: Array
    magnitude: Limbs
    max_exponent: Array  # the exponent that the step aligns to


def fused_dot_add(model: Model, spec: ProductSpec, a: Multiplicand, b: Multiplicand, accumulator: Limbs) -> Limbs:
    """Computes one step: all products of a and b along K and one accumulator, which `absorb_specials` has given their Inf and NaN.

    a: [..., M, terms]; b: [..., terms, N]; accumulator: codes of `model.result` [..., M, N], as one limb.
    model: its numeric fields may be traced. spec: of the instruction, with the formats that are multiplied.
    Returns codes of `model.result` [..., M, N], as one limb.
    """
    return add_products(model, spec, pair_products(a, b), accumulator)


def add_products(model: Model, spec: ProductSpec, products: list[Product], accumulator: Limbs) -> Limbs:
    """Computes one step from its products, whose axes are those of the accumulator: see `fused_dot_add`."""
    # rule 3
    max_exponent = products[0].exponents.a + products[0].exponents.b
    for product in products[1:]:
        max_exponent = jnp.maximum(max_exponent, product.exponents.a + product.exponents.b)
    c = decode_accumulator(model.result, accumulator)
    max_exponent = jnp.maximum(jnp.maximum(max_exponent, c.exponent), model.floor)

    # rules 4 and 5
    aligned = align_products(model, spec, products, max_exponent)
    half = -(-len(products) // 2)
    if truncates(model.alignment) and products_fit_one_limb(model, spec, len(products)):
        negative, magnitude = _add_narrow(aligned)
    elif truncates(model.alignment) and products_fit_one_limb(model, spec, half):
        negative, magnitude = _add_halves(aligned[:half], aligned[half:])
    else:
        negative, magnitude = add_wide(aligned)
    return add_accumulator(model, ProductSum(negative, magnitude, max_exponent), c)


def pair_products(a: Multiplicand, b: Multiplicand) -> list[Product]:
    """Pairs the factors of every product of a step."""
    row, column = (lambda v, t: v[..., :, t, None]), (lambda v, t: v[..., t, None, :])
    return [
        Product(Pair(row(a.significand, t), column(b.significand, t)), Pair(row(a.exponent, t), column(b.exponent, t)))
        for t in range(a.exponent.shape[-1])
    ]


def align_products(model: Model, spec: ProductSpec, products: list[Product], max_exponent: Array) -> list[Array]:
    """f32: each term in units of 2^(max_exponent - fraction_bits), not yet truncated; an integer where alignment does not truncate."""
    a, b, fraction_bits = spec.a, spec.b, model.require_fraction_bits()
    terms = [product.significands.a * product.significands.b for product in products]
    if is_compact(a, b) and spec.scale is None:
        least = a.min_exponent + b.min_exponent  # below it every product is 0, and the scale would overflow
        unit = power_of_two(fraction_bits - jnp.maximum(max_exponent, least))
        aligned = [term * unit for term in terms]
    else:
        last = a.mantissa_bits + b.mantissa_bits - fraction_bits + max_exponent
        exponents = [product.exponents.a + product.exponents.b for product in products]
        aligned = [term * power_of_two(exponent - last) for term, exponent in zip(terms, exponents, strict=True)]
    if truncates(model.alignment):
        return aligned
    return [round_aligned(value, term, model.alignment) for value, term in zip(aligned, terms, strict=True)]


def products_fit_one_limb(model: Model, spec: ProductSpec, terms: int) -> bool:
    """Returns whether the sum of the aligned products fits an s32, and with the accumulator a 32-bit magnitude.

    A product is at most (2^(Ma+1) - 1) (2^(Mb+1) - 1) units of 2^-(Ma+Mb); the accumulator is below 2^(fraction_bits + 1).
    """
    fraction_bits, a, b = model.fraction_bits, spec.a.mantissa_bits, spec.b.mantissa_bits
    if not isinstance(fraction_bits, int) or fraction_bits > 30:
        return False
    largest = (2 ** (a + 1) - 1) * (2 ** (b + 1) - 1)
    shift = fraction_bits - a - b
    return terms * (largest << shift if shift >= 0 else largest >> -shift) < 2**31


def round_aligned(aligned: Array, term: Array, alignment: Rounding) -> Array:
    """Rounds an aligned term to an integer. term: the value before alignment, so that a value that underflowed still counts as not zero."""
    tiny = jnp.float32(2.0**-30)
    value = jnp.where((jnp.abs(aligned) < tiny) & (term != 0), jnp.where(term < 0, -tiny, tiny), aligned)
    ways = {"RN": lambda v: lax.round(v, lax.RoundingMethod.TO_NEAREST_EVEN), "RZ": jnp.trunc, "RM": jnp.floor, "RP": jnp.ceil}
    if isinstance(alignment, str):
        return ways[alignment](value)
    which = jnp.broadcast_to(jnp.asarray(alignment, jnp.int32), value.shape)
    return lax.select_n(which, *(ways[name](value) for name in ROUNDINGS[:-1]))


def decode_accumulator(result: Format, accumulator: Limbs) -> Number:
    """Decodes the accumulator. Its exponent is counted as in rule 2, and is ZERO_EXPONENT where it takes no part in the alignment."""
    c = decode_limbs(result, accumulator)
    no_part = bits.is_zero(c.magnitude) | c.nan | c.infinite
    return c._replace(exponent=jnp.where(no_part, ZERO_EXPONENT, c.exponent + result.mantissa_bits))


def add_accumulator(model: Model, products: ProductSum, c: Number) -> Limbs:
    """Ends a step: aligns the accumulator, adds it to the products, rounds once. An accumulator that is Inf or NaN stays.

    c: from `decode_accumulator`.
    """
    negative, magnitude, max_exponent = products
    result, fraction_bits = model.result, model.require_fraction_bits()
    up = bits.shift_left(bits.extend(c.magnitude, len(magnitude)), jnp.maximum(fraction_bits - result.mantissa_bits, 0))
    down = jnp.maximum(result.mantissa_bits - fraction_bits, 0) + (max_exponent - c.exponent)
    kept = bits.shift_right(up, down)
    kept = round_magnitude(kept, kept[0] & 1 == 1, up, down, c.negative, model.alignment)
    negative, magnitude = bits.add_signed(negative, magnitude, c.negative, kept)

    # rules 6 and 7
    unit = max_exponent - fraction_bits
    if result == F32 and truncates(model.rounding) and len(magnitude) == 1:
        d = truncate_to_f32(negative, magnitude[0], unit, model.result_bits)
    else:
        never = jnp.zeros(max_exponent.shape, bool)
        total = Number(negative, magnitude, unit, never, never)
        (d,) = encode_limbs(result, total, model.rounding, overflow="infinity", signed_zero=False, fraction_bits=model.result_bits)

    # rule 8
    d = jnp.where(c.infinite, infinity_code(result, c.negative), d)
    return (jnp.where(c.nan, result.nan, d),)


def _add_narrow(aligned: list[Array]) -> tuple[Array, Limbs]:
    """Truncates each term and adds them in one s32. Returns sign and magnitude."""
    total = _truncated_sum(aligned)
    return total < 0, (jnp.abs(total).astype(jnp.uint32),)


def _truncated_sum(aligned: list[Array]) -> Array:
    """Truncates each term and adds them in one s32."""
    total = aligned[0].astype(jnp.int32)
    for term in aligned[1:]:
        total = total + term.astype(jnp.int32)
    return total


def _add_halves(first: list[Array], second: list[Array]) -> tuple[Array, Limbs]:
    """Truncates each term and adds each half in one s32. Returns sign and 64-bit magnitude of the sum of both."""
    return add_signed_words((_truncated_sum(first), _truncated_sum(second)))


def add_signed_words(addends: Sequence[Array]) -> tuple[Array, Limbs]:
    """Returns the sign and the 64-bit magnitude of a sum of s32."""
    return _sign_and_magnitude(reduce(bits.add, ((x.astype(jnp.uint32), (x >> 31).astype(jnp.uint32)) for x in addends)))


def _sign_and_magnitude(total: Limbs) -> tuple[Array, Limbs]:
    """Returns the sign and the magnitude of a 64-bit number in two's complement."""
    negative = total[1].astype(jnp.int32) < 0
    return negative, bits.select(negative, bits.negate(total), total)


def add_wide(aligned: list[Array]) -> tuple[Array, Limbs]:
    """Truncates and adds in two s32 sums, of the terms' bits above and below 2^24. Returns sign and 64-bit magnitude."""
    high_sum = low_sum = jnp.int32(0)
    for term in aligned:
        high = (term * 2.0**-LOW_BITS).astype(jnp.int32)
        low = (term - high.astype(jnp.float32) * 2.0**LOW_BITS).astype(jnp.int32)
        high_sum, low_sum = high_sum + high, low_sum + low
    sign = lambda x: (x >> 31).astype(jnp.uint32)
    high = bits.shift_left((high_sum.astype(jnp.uint32), sign(high_sum)), jnp.int32(LOW_BITS))
    return _sign_and_magnitude(bits.add(high, (low_sum.astype(jnp.uint32), sign(low_sum))))


# ---- rule 8


def absorb_specials(result: Format, x: Multiplicand, y: Multiplicand, accumulator: Limbs) -> Limbs:
    """Returns the accumulator, with Inf or NaN where the products of a step give one.

    An accumulator that is Inf or NaN stays so, whatever is added. So the step itself need not look for specials among its products, and its
    result beside such an accumulator is not used. x: [..., M, terms]; y: [..., terms, N]; accumulator: codes of `result` [..., M, N], as
    one limb.
    """
    # float addition has rule 8 itself; numbers count as 0, 1 and -1, so that no other sum becomes Inf and any order is right
    return absorb_sum(result, jnp.matmul(_as_floats(x), _as_floats(y), precision=lax.Precision.DEFAULT), accumulator)


def absorb_sum(result: Format, total: Array, accumulator: Limbs) -> Limbs:
    """Returns the accumulator, with Inf or NaN where the f32 sum of the products of a step is Inf or NaN."""
    word = lax.bitcast_convert_type(total, jnp.uint32)
    negative, magnitude = word >> 31 == 1, word & 0x7FFFFFFF
    c = decode_limbs(result, accumulator)
    none = (magnitude > F32.infinity) | c.nan | (c.infinite & (c.negative != negative))
    code = jnp.where(none, result.nan, infinity_code(result, negative))
    return (jnp.where(magnitude < F32.infinity, accumulator[0], code),)


def infinity_code(result: Format, negative: Array) -> Array:
    """Returns the codes of Inf with these signs, uint32."""
    return jnp.where(negative, jnp.uint32(result.infinity | 1 << (result.bits - 1)), result.infinity)


def _as_floats(x: Multiplicand) -> Array:
    """Returns f32: Inf and NaN themselves, 0 for a zero, 1 and -1 for all other numbers."""
    zero, one, infinite, none = map(jnp.float32, (0, 1, jnp.inf, jnp.nan))  # not Python's, which are f64 under x64
    special = jnp.where(x.significand == 0, none, infinite)
    magnitude = jnp.where(x.exponent == SPECIAL_EXPONENT, special, jnp.where(x.exponent == ZERO_EXPONENT, zero, one))
    return jnp.where(x.significand < 0, -magnitude, magnitude)


# ---- rule 6, for f32 rounded toward zero


def truncate_to_f32(negative: Array, magnitude: Array, unit: Array, result_bits: ArrayLike | None = None) -> Array:
    """Returns the f32 code of (-1)^negative * magnitude * 2^unit, truncated: +0 for every zero result, Inf from 2^128 on.

    It takes a dozen vector operations, and no count of leading zeros as `encode_limbs` does. A machine converts integers to f32 in one
    instruction, but rounds to nearest; `_truncating_convert` makes that a truncation. negative: bool; magnitude: uint32; unit: int32 of at
    most 2^21; one shape. result_bits: fraction bits kept, may be traced; None: all.
    """
    significand, up = _truncating_convert(magnitude)
    shift = unit + up
    field = (significand >> F32.mantissa_bits) + shift
    code = significand + (shift << F32.mantissa_bits)
    below = LEAST - unit  # a subnormal result is the magnitude itself, in units of 2^LEAST
    subnormal = jnp.where(below >= 0, magnitude >> below.astype(jnp.uint32), magnitude << (-below).astype(jnp.uint32))
    code = jnp.where(field <= 0, subnormal.astype(jnp.int32), code)
    code = jnp.where(field > F32.max_exponent + F32.bias, F32.infinity, code)
    code = jnp.where(magnitude == 0, 0, code)
    if result_bits is not None:
        code = code & (jnp.int32(-1) << (F32.mantissa_bits - result_bits))
    sign = jnp.where(negative & (code != 0), jnp.uint32(SIGN), 0)
    return code.astype(jnp.uint32) | sign


def _truncating_convert(x: Array) -> tuple[Array, Array]:
    """Returns (bits of an f32 as int32, up): x truncated to 24 bits is that f32 times 2^up.

    Where bit i + 24 of x is set, bit i cannot be kept. Without those bits the first bit below the last kept one is 0: less than half a
    unit is dropped, so that rounding to nearest truncates. From 2^31 on x is first shifted into the range of s32, by bits never kept.
    """
    large = x >= jnp.uint32(SIGN)
    x = jnp.where(large, x >> 8, x)
    x = x & ~(x >> KEPT)
    return lax.bitcast_convert_type(x.astype(jnp.int32).astype(jnp.float32), jnp.int32), jnp.where(large, 8, 0)


# ---- groups of products


class Groups(NamedTuple):
    """One multiplicand, divided into groups of products that have a scale each. Leading axis: the groups."""

    values: Array  # f32 integers [groups, ..., M, products of a group], or [groups, ..., products, N]
    significand: Array  # significand of the scale: f32 integers [groups, ..., M] or [groups, ..., N]; 0 for NaN
    exponent: Array  # exponent of the scale: int32, SPECIAL_EXPONENT for NaN


def unit_exponent(fmt: Format) -> int:
    """Returns the exponent of the unit of which every value of the format is a multiple."""
    return fmt.min_exponent - fmt.mantissa_bits


def decode_in_units(fmt: Format, codes: ArrayLike) -> Array:
    """Returns the values in units of 2^unit_exponent, f32."""
    number = decode(fmt, codes)
    magnitude = number.magnitude[0] << (number.exponent - unit_exponent(fmt)).astype(jnp.uint32)
    magnitude = magnitude.astype(jnp.int32).astype(jnp.float32)
    return jnp.where(number.negative, -magnitude, magnitude)


def grouped_dot_add(model: Model, spec: ProductSpec, a: Groups, b: Groups, accumulator: Limbs) -> Limbs:
    """Computes one step: groups of products and one accumulator in a single fused sum, rounded once.

    A group's exponent is that of its two scales alone, whatever its sum, and even if its products cancel. It takes no part if all of its
    products, or one of its scales, are zero. The other arguments, the result and the rules are those of `dot_add`.
    """
    fraction_bits, scale = model.require_fraction_bits(), spec.require_scale()
    dot = lambda x, y: jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
    row, column = (lambda v: v[..., :, None]), (lambda v: v[..., None, :])
    significand = row(a.significand) * column(b.significand)
    present = (dot(jnp.abs(a.values), jnp.abs(b.values)) > 0) & (significand > 0)
    sums = dot(a.values, b.values) * significand
    exponent = row(a.exponent) + column(b.exponent)

    # rule 3
    c = decode_accumulator(model.result, accumulator)
    max_exponent = jnp.max(jnp.where(present, exponent, ZERO_EXPONENT), axis=0)
    max_exponent = jnp.maximum(jnp.maximum(max_exponent, c.exponent), model.floor)

    # rules 4 and 5
    last = max_exponent - fraction_bits - unit_exponent(spec.a) - unit_exponent(spec.b) + 2 * scale.mantissa_bits
    aligned = jnp.where(present, sums * power_of_two(exponent - last), 0.0)
    if not truncates(model.alignment):
        aligned = round_aligned(aligned, jnp.where(present, sums, 0.0), model.alignment)
    negative, magnitude = add_wide(list(aligned))

    nan = row(jnp.any(a.exponent == SPECIAL_EXPONENT, axis=0)) | column(jnp.any(b.exponent == SPECIAL_EXPONENT, axis=0))
    (d,) = add_accumulator(model, ProductSum(negative, magnitude, max_exponent), c)
    return (jnp.where(nan, model.result.nan, d),)


def deal_groups(values: Array, scales: DecodedScales, products: int, axis: int) -> Groups:
    """Divides [K, ..., M] into groups [..., M, products] (axis -1), or [K, ..., N] into groups [..., products, N] (axis -2), with their
    scales.
    """
    grouped = values.reshape(-1, products, *values.shape[1:])
    first = lambda v: v.reshape(-1, products, *v.shape[1:])[:, 0]
    return Groups(jnp.moveaxis(grouped, 1, axis), first(scales.significand), first(scales.exponent))
