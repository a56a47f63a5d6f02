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

Its formulas are `arithmetic.step`, rendered as JAX arrays. Float arithmetic appears in four operations only. Each is exact wherever its
result is used, on any backend, whether or not the backend flushes subnormals or contracts multiply-adds
(tests/engine/arithmetic/test_jaxpr.py holds the list). `absorb_specials` adds floats too, but uses only whether the sum is Inf or NaN.
multiply     (1) two significands: the product has at most 24 bits, so an f32 holds it exactly, and it is 0 or normal (see `Multiplicand`).
(2) by a power of two: every bit stays, unless the result leaves f32's normal range. It cannot overflow, since an aligned product is below
2^(fraction_bits + 2). Where it underflows it is below 1, and rule 4 truncates it to 0 anyway. convert      f32 to s32 truncates, as rule 4
does. The value is below 2^31, by `forms.products_fit_word` or by MAX_FRACTION_BITS. s32 to f32, for the high part of a wide term, converts
at most 24 significant bits. subtract     the high part from a wide term, which leaves the low bits of the same 24-bit significand. bitcast
no arithmetic. A what-if model may round aligned terms in another way. Then `general.round_product` also rounds an f32 to an integer (floor,
ceil, round), which is exact.

The 4-bit block-scaled kinds add the products of a group exactly first, then scale, align and truncate the sum as one term
(`grouped_dot_add`). Source: MMA-Sim (arXiv 2511.10909 v2, table 5) and the sm_120 measurements that agree with it. There the values are
integers whose sums and products stay below 2^24, which `fitting.check_exact` verifies. So an f32 holds every partial sum, in any order,
with or without FMA. The operands of the matmul fit the eight significant bits of bf16, so that every precision mode is exact.
"""

from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.base.bits import Limbs
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.multiplicands import DecodedScales, Multiplicand
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.arithmetic.step import general
from tcemu.engine.arithmetic.step.bounded import add_terms
from tcemu.engine.arithmetic.step.decoding import SPECIAL_EXPONENT, ZERO_EXPONENT, Accumulator, decode_accumulator
from tcemu.engine.arithmetic.step.forms import is_compact, unit_exponent, word_sums
from tcemu.engine.arithmetic.step.jax_values import JaxValue, codes_of, conditions, floats, integers
from tcemu.engine.arithmetic.step.rounding import Magnitude, add_two, encode, encode_truncated, take_sign
from tcemu.engine.arithmetic.step.specials import code_of_class, factor_class, special_value
from tcemu.engine.arithmetic.step.values import I32, I64
from tcemu.engine.formats.coding import decode
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.engine.formats.rounding import truncates


class Pair(NamedTuple):
    """The factors of A and of B in one product, shaped to broadcast to [..., M, N]."""

    a: Array
    b: Array


class StepProduct(NamedTuple):
    """One term of a step: the significands and the exponents of its two factors."""

    significands: Pair
    exponents: Pair


def fused_dot_add(model: Model, spec: ProductSpec, a: Multiplicand, b: Multiplicand, accumulator: Limbs) -> Limbs:
    """Computes one step: all products of a and b along K and one accumulator, which `absorb_specials` has given their Inf and NaN.

    a: [..., M, terms]; b: [..., terms, N]; accumulator: codes of `model.result` [..., M, N], as one limb.
    model: its numeric fields may be traced. spec: of the instruction, with the formats that are multiplied.
    Returns codes of `model.result` [..., M, N], as one limb.
    """
    return add_products(model, spec, pair_products(a, b), accumulator)


def add_products(model: Model, spec: ProductSpec, products: list[StepProduct], accumulator: Limbs) -> Limbs:
    """Computes one step from its products, whose axes are those of the accumulator: see `fused_dot_add`."""
    # rule 3
    exponents = [product.exponents.a + product.exponents.b for product in products]
    c = decode_accumulator(model.result, integers(accumulator[0]))
    top = integers(reduce(jnp.maximum, exponents)).max(c.exponent).max(_field(model.floor))

    # rules 4 and 5
    aligned = align_products(model, spec, products, top)
    sums = word_sums(model.fraction_bits, spec.a, spec.b, len(products), model.alignment)
    if sums:
        addends = add_terms([term.to_integer() for term in aligned], sums)
        total = addends[0] if sums == 1 else addends[0].resize(I64) + addends[1].resize(I64)
    else:
        total = add_wide(aligned)
    return add_accumulator(model, total, top, c)


def _field(value: Any) -> Any:
    """A number of a model as a formula takes it: traced ones as values."""
    return integers(value) if isinstance(value, Array) else value


def pair_products(a: Multiplicand, b: Multiplicand) -> list[StepProduct]:
    row, column = (lambda v, t: v[..., :, t, None]), (lambda v, t: v[..., t, None, :])
    return [
        StepProduct(Pair(row(a.significand, t), column(b.significand, t)), Pair(row(a.exponent, t), column(b.exponent, t)))
        for t in range(a.exponent.shape[-1])
    ]


def align_products(model: Model, spec: ProductSpec, products: list[StepProduct], top: JaxValue) -> list[JaxValue]:
    """f32: each term in units of 2^(top - fraction_bits), not yet truncated; an integer where alignment does not truncate."""
    a, b, fraction_bits = spec.a, spec.b, _field(model.require_fraction_bits())
    terms = [floats(product.significands.a * product.significands.b) for product in products]
    if is_compact(a, b) and spec.scale is None:
        scale = general.common_scale(top, a.min_exponent + b.min_exponent, fraction_bits)
        scales = [scale] * len(terms)
    else:
        mantissas = a.mantissa_bits + b.mantissa_bits
        exponents = [integers(product.exponents.a + product.exponents.b) for product in products]
        scales = [general.product_scale(exponent, top, mantissas, fraction_bits) for exponent in exponents]
    return [general.round_product(term * scale, term, _field(model.alignment)) for term, scale in zip(terms, scales, strict=True)]


def add_wide(aligned: list[JaxValue]) -> JaxValue:
    """Truncates and adds in two sums, of the terms' bits above and below 2^24: i64."""
    highs, lows = zip(*map(general.split_term, aligned), strict=True)
    return general.join_sums(reduce(add, highs), reduce(add, lows))


def add_accumulator(model: Model, total: JaxValue, top: JaxValue, c: Accumulator[JaxValue]) -> Limbs:
    """Ends a step: aligns the accumulator, adds it to the products, rounds once. An accumulator that is Inf or NaN stays.

    total: the sum of the products in units of the step, i32 or i64; top: the exponent that the step aligns to; c: the accumulator.
    """
    result, fraction_bits, alignment = model.result, _field(model.require_fraction_bits()), _field(model.alignment)
    lane = total.lane
    own = general.align_integer(c.significand, c.negative, result.mantissa_bits, top - c.exponent, fraction_bits, alignment, lane)
    magnitude: Magnitude[JaxValue] = add_two(total, own) if lane == I32 else take_sign(total + own)
    # rules 6 and 7
    unit, kept = top - fraction_bits, result.mantissa_bits if model.result_bits is None else _field(model.result_bits)
    if result == F32 and truncates(model.rounding) and lane == I32:
        d = encode_truncated(magnitude, unit, kept)
    else:
        d = encode(result, magnitude, unit, _field(model.rounding), kept)
    return (codes_of(c.special.select(c.code, d)),)  # rule 8


def add_chain(result: Format, accumulator: Limbs, total: Limbs) -> Limbs:
    """Adds the sum of a chain to codes of `result`, f16 or f32, rounded RN once."""
    return (codes_of(general.add_codes(result, integers(accumulator[0]), integers(total[0]))),)


# ---- rule 8


def absorb_specials(result: Format, x: Multiplicand, y: Multiplicand, accumulator: Limbs) -> Limbs:
    """Returns the accumulator, with Inf or NaN where the products of a step give one.

    An accumulator that is Inf or NaN stays so, whatever is added. So the step itself need not look for specials among its products, and its
    result beside such an accumulator is not used. x: [..., M, terms]; y: [..., terms, N]; accumulator: codes of `result` [..., M, N], as
    one limb.
    """
    # numbers count as 0, 1 and -1, so that no other sum becomes Inf and any order is right
    return absorb_sum(result, jnp.matmul(_classes(x), _classes(y), precision=lax.Precision.DEFAULT), accumulator)


def absorb_sum(result: Format, total: Array, accumulator: Limbs) -> Limbs:
    """Returns the accumulator, with Inf or NaN where the f32 sum of the products of a step is Inf or NaN."""
    code = integers(accumulator[0])
    return (codes_of(code_of_class(result, floats(total) + special_value(result, code), code)),)


def infinity_code(result: Format, negative: Array) -> Array:
    """Returns the codes of Inf with these signs, uint32."""
    return jnp.where(negative, jnp.uint32(result.infinity | 1 << (result.bits - 1)), result.infinity)


def _classes(x: Multiplicand) -> Array:
    """Returns f32: Inf and NaN themselves, 0 for a zero, 1 and -1 for all other numbers."""
    exponent, value = integers(x.exponent), floats(x.significand)
    negative = value.bits().shift_right_signed(31)
    return factor_class(exponent == SPECIAL_EXPONENT, value != 0.0, exponent == ZERO_EXPONENT, negative).raw


# ---- groups of products


class Groups(NamedTuple):
    """One multiplicand, divided into groups of products that have a scale each. Leading axis: the groups."""

    values: Array  # f32 integers [groups, ..., M, products of a group], or [groups, ..., products, N]
    significand: Array  # significand of the scale: f32 integers [groups, ..., M] or [groups, ..., N]; 0 for NaN
    exponent: Array  # exponent of the scale: int32, SPECIAL_EXPONENT for NaN


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
    c = decode_accumulator(model.result, integers(accumulator[0]))
    tops = jnp.max(jnp.where(present, exponent, ZERO_EXPONENT), axis=0)
    top = integers(tops).max(c.exponent).max(_field(model.floor))

    # rules 4 and 5
    mantissas = 2 * scale.mantissa_bits - unit_exponent(spec.a) - unit_exponent(spec.b)
    scales = general.product_scale(integers(exponent), top, mantissas, _field(fraction_bits))
    terms = conditions(present).select(floats(sums) * scales, 0.0)  # the scale of an absent group may be no f32
    aligned = general.round_product(terms, floats(jnp.where(present, sums, 0.0)), _field(model.alignment))
    total = add_wide([floats(term) for term in aligned.raw])

    nan = row(jnp.any(a.exponent == SPECIAL_EXPONENT, axis=0)) | column(jnp.any(b.exponent == SPECIAL_EXPONENT, axis=0))
    (d,) = add_accumulator(model, total, top, c)
    return (jnp.where(nan, model.result.nan, d),)


def deal_groups(values: Array, scales: DecodedScales, products: int, axis: int) -> Groups:
    """Divides [K, ..., M] into groups [..., M, products] (axis -1), or [K, ..., N] into groups [..., products, N] (axis -2), with their
    scales.
    """
    grouped = values.reshape(-1, products, *values.shape[1:])
    first = lambda v: v.reshape(-1, products, *v.shape[1:])[:, 0]
    return Groups(jnp.moveaxis(grouped, 1, axis), first(scales.significand), first(scales.exponent))
