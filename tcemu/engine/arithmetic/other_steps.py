"""Steps that NVIDIA's tensor cores do not have: exact, pairwise, joined, complement and floored sums, as units of AMD and Arm compute them.

`Model.step_kind` names the kind of a step, and the docstring of `Model` says what each computes. All results are f32. Only integers touch
a value, except in `joined_dot_add`, whose products are aligned as in `fused_dot_add`.

Source: mmasim 2.1.1 (E-FDPA, FTZ-MUL-ADD, TR-FDPA, GTR-FDPA) and arXiv 2511.10909 v2 for AMD; Arm Architecture Reference Manual DDI 0487,
BFAdd, BFMul and BFRound, for round to odd; gfx11_dot2.h and gfx12_dot.h of rocjitsu (ROCm/rocm-systems, MIT) for complement and
floored sums.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.base import bits
from tcemu.base.bits import LIMB_BITS, Limbs
from tcemu.engine.arithmetic.fma import add_numbers, multiply_numbers
from tcemu.engine.arithmetic.fused_dot_add import StepProduct, add_wide, align_products, infinity_code, pair_products
from tcemu.engine.arithmetic.model import DEALING_WIDTHS, TO_ODD, Model
from tcemu.engine.arithmetic.multiplicands import SPECIAL_EXPONENT, Multiplicand
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.arithmetic.step.jax_values import integers
from tcemu.engine.arithmetic.step.rounding import take_sign
from tcemu.engine.formats.coding import Number, decode, decode_limbs, encode_limbs
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.engine.formats.rounding import round_magnitude

JOINED_SUM_BITS = 32  # bits below the max exponent that the sum of products keeps when it joins the running value
JOINED_TOTAL_BITS = 31  # bits below its leading bit that their total keeps
SIGN = 1 << 31
OVERFLOW = F32.max_exponent + 1  # a product of 2^OVERFLOW or more is infinite in a joined step


def flush_subnormals(fmt: Format, codes: Array, how: str | None) -> Array:
    """Replaces subnormal codes of a format with Inf by zeros: "signed" keeps the sign, "positive" makes all of them, and -0, +0."""
    if how is None:
        return codes
    zero = codes & np.array(1 << (fmt.bits - 1) if how == "signed" else 0, fmt.dtype)
    return jnp.where(codes & np.array(fmt.infinity << fmt.unused_bits, fmt.dtype) == 0, zero, codes)


# ---- sums of rounded products


def pairwise_sum(model: Model, pairs: Sequence[tuple[Array, Array]], accumulator: Array) -> Array:
    """Computes one "pairwise" step. pairs: f32 codes of the factors, which broadcast; a power of two of them."""
    products = [multiply_numbers(*(decode(F32, v) for v in jnp.broadcast_arrays(a, b))) for a, b in pairs]
    sums = [_round_number(model, product) for product in products]
    while len(sums) > 1:
        sums = [_add_rounded(model, x, y) for x, y in zip(sums[::2], sums[1::2], strict=True)]
    return _add_rounded(model, accumulator, sums[0])


def _add_rounded(model: Model, x: Array, y: Array) -> Array:
    rounding = "RZ" if model.rounding == TO_ODD else model.rounding
    return _round_number(model, add_numbers(decode(F32, x), decode(F32, y), rounding))


def _round_number(model: Model, number: Number) -> Array:
    """Returns the f32 code of a number by the model's rounding, subnormals flushed."""
    if model.rounding == TO_ODD:
        (code,) = encode_limbs(F32, number, "RZ", overflow="infinity")
        (above,) = encode_limbs(F32, number._replace(negative=jnp.zeros_like(number.negative)), "RP", overflow="infinity")
        code = jnp.where(above == code & jnp.uint32(F32.nan), code, code | 1)
    else:
        (code,) = encode_limbs(F32, number, model.rounding)
    return code if model.flush is None else flush_subnormals(F32, code, "signed")


# ---- exact sums


def exact_sum(model: Model, spec: ProductSpec, pairs: Sequence[tuple[Array, Array]], accumulator: Array) -> Array:
    """Computes one "exact" step. pairs: codes of the factors, which broadcast. The sum is a fixed-point number of every bit it may have.

    A sum of zero is +0, but -0 where all terms are -0 (IEEE 754-2019, 6.3).
    """
    last_a, last_b = (fmt.min_exponent - fmt.mantissa_bits for fmt in (spec.a, spec.b))
    least = min(last_a + last_b, F32.min_exponent - F32.mantissa_bits)
    greatest = max(spec.a.max_exponent + spec.b.max_exponent + 2, F32.max_exponent + 1) + len(pairs).bit_length() + 1
    width = -(-(greatest - least) // LIMB_BITS)
    shape = jnp.broadcast_shapes(accumulator.shape, *(v.shape for pair in pairs for v in pair))
    c = decode(F32, jnp.broadcast_to(accumulator, shape))
    terms = [c]
    for a, b in pairs:
        x, y = (decode(fmt, jnp.broadcast_to(v, shape)) for fmt, v in ((spec.a, a), (spec.b, b)))
        terms.append(multiply_numbers(x, y)._replace(magnitude=(x.magnitude[0] * y.magnitude[0],)))  # at most 32 bits: see `fitting`
    plus = minus = (jnp.zeros_like(c.magnitude[0]),) * width
    for term in terms:
        place = term.exponent - least
        limbs = tuple(_limb(term.magnitude[0], place - LIMB_BITS * i) for i in range(width))
        plus = bits.add(plus, tuple(jnp.where(term.negative, 0, limb) for limb in limbs))
        minus = bits.add(minus, tuple(jnp.where(term.negative, limb, 0) for limb in limbs))
    negative, magnitude = bits.add_signed(jnp.zeros_like(c.negative), plus, jnp.ones_like(c.negative), minus)
    infinite, below = (_any([t.infinite & sign(t) for t in terms]) for sign in (lambda t: ~t.negative, lambda t: t.negative))
    all_minus = ~_any([~t.negative for t in terms])
    negative = jnp.where(bits.is_zero(magnitude), all_minus, negative)
    nan = _any([t.nan for t in terms]) | (infinite & below)
    negative = jnp.where(infinite | below, below, negative)
    window, place = _leading_limbs(magnitude)
    total = Number(negative, window, least + place, nan, (infinite | below) & ~nan)
    (code,) = encode_limbs(F32, total, model.rounding)
    return code


def _leading_limbs(magnitude: Limbs) -> tuple[Limbs, Array]:
    """Returns the two limbs from the highest that is not 0 on, with a sticky bit for the limbs below, and the place of their bit 0."""
    window, place = (magnitude[0], magnitude[1]), jnp.zeros(magnitude[0].shape, jnp.int32)
    below = jnp.zeros(magnitude[0].shape, bool)
    for i in range(2, len(magnitude)):
        below = below | (magnitude[i - 2] != 0)
        leads = magnitude[i] != 0
        window = bits.select(leads, (magnitude[i - 1] | below, magnitude[i]), window)
        place = jnp.where(leads, LIMB_BITS * (i - 1), place)
    return window, place


def _limb(magnitude: Array, place: Array) -> Array:
    """One limb of magnitude << place; place may be negative."""
    return jnp.where(place >= 0, magnitude << place.astype(jnp.uint32), magnitude >> (-place).astype(jnp.uint32))


def _any(conditions: Sequence[Array]) -> Array:
    found = conditions[0]
    for condition in conditions[1:]:
        found = found | condition
    return found


# ---- complement sums

ACCUMULATOR_BITS = 2  # bits below those of the products that the running value keeps
NOWHERE = -(1 << 12)  # exponent of a zero


def complement_sum(model: Model, spec: ProductSpec, pairs: Sequence[tuple[Array, Array]], accumulator: Array) -> Array:
    """Computes one "complement" step. pairs: codes of the factors, which broadcast. All magnitudes have less than 30 bits (`fitting`)."""
    assert isinstance(model.fraction_bits, int)
    shape = jnp.broadcast_shapes(accumulator.shape, *(v.shape for pair in pairs for v in pair))
    c = _flushed_number(F32, jnp.broadcast_to(accumulator, shape))
    unit = jnp.where(c.magnitude[0] == 0, NOWHERE, c.exponent + F32.mantissa_bits - model.fraction_bits - ACCUMULATOR_BITS)
    terms = [c]
    for a, b in pairs:
        x, y = (_flushed_number(fmt, jnp.broadcast_to(v, shape)) for fmt, v in ((spec.a, a), (spec.b, b)))
        terms.append(multiply_numbers(x, y)._replace(magnitude=(x.magnitude[0] * y.magnitude[0],)))
        exponent = x.exponent + y.exponent + spec.a.mantissa_bits + spec.b.mantissa_bits
        unit = jnp.maximum(unit, jnp.where(terms[-1].magnitude[0] == 0, NOWHERE, exponent - model.fraction_bits))
    total = jnp.zeros(shape, jnp.int32)
    for term in terms:
        aligned = jnp.where(term.magnitude[0] == 0, 0, _limb(term.magnitude[0], term.exponent - unit)).astype(jnp.int32)
        total = total + jnp.where(term.negative == c.negative, aligned, ~aligned)
    code = _round_unbounded(total.astype(jnp.uint32), unit, c.negative)
    plus, minus = (_any([t.infinite & sign(t) for t in terms]) for sign in (lambda t: ~t.negative, lambda t: t.negative))
    code = jnp.where(plus | minus, infinity_code(F32, minus), jnp.where(unit == NOWHERE, 0, code))
    return jnp.where(_any([t.nan for t in terms]) | (plus & minus), jnp.uint32(F32.nan), code)


def _flushed_number(fmt: Format, codes: Array) -> Number:
    """Decodes codes. Subnormals of formats with F32's exponents become zeros of their sign."""
    number = decode(fmt, codes)
    if fmt.min_exponent > F32.min_exponent:
        return number
    tiny = number.magnitude[0] < 1 << fmt.mantissa_bits
    return number._replace(magnitude=(jnp.where(tiny & ~number.nan & ~number.infinite, 0, number.magnitude[0]),))


def _round_unbounded(total: Array, unit: Array, negative: Array) -> Array:
    """Rounds a two's complement total * 2^unit, in the frame of a sign, to f32: nearest even before the exponent is checked.

    What is then below the smallest normal number becomes +0.
    """
    below = total >> 31 == 1
    magnitude = jnp.where(below, ~total + 1, total)
    zeros = bits.leading_zeros((magnitude,)).astype(jnp.int32)
    drop = jnp.maximum(LIMB_BITS - 1 - F32.mantissa_bits - zeros, 0).astype(jnp.uint32)
    kept = magnitude >> drop
    rest, half = magnitude - (kept << drop), (jnp.uint32(1) << drop) >> 1
    kept = kept + ((rest > half) | ((rest == half) & (kept & 1 == 1) & (drop > 0)))
    kept = jnp.where(drop > 0, kept, magnitude << jnp.maximum(zeros - (LIMB_BITS - 1 - F32.mantissa_bits), 0).astype(jnp.uint32))
    carried = kept >> (F32.mantissa_bits + 1)  # rounded up to the next power of two
    exponent = unit + (LIMB_BITS - 1) - zeros + carried.astype(jnp.int32)
    sign = jnp.where(below != negative, jnp.uint32(SIGN), 0)
    fraction = (kept >> carried) & jnp.uint32((1 << F32.mantissa_bits) - 1)
    code = sign | ((exponent + F32.max_exponent).astype(jnp.uint32) << F32.mantissa_bits) | fraction
    code = jnp.where(exponent > F32.max_exponent, sign | jnp.uint32(F32.infinity), code)
    return jnp.where((magnitude == 0) | (exponent < F32.min_exponent), 0, code)


# ---- floored sums


def floored_sum(model: Model, spec: ProductSpec, pairs: Sequence[tuple[Array, Array]], accumulator: Array) -> Array:
    """Computes one "floored" step. pairs: codes of the factors, which broadcast; an even number. Every sum has less than 31 bits."""
    assert isinstance(model.fraction_bits, int)
    shape = jnp.broadcast_shapes(accumulator.shape, *(v.shape for pair in pairs for v in pair))
    c = decode(F32, jnp.broadcast_to(accumulator, shape))
    terms, units = [c], []
    for a, b in pairs:
        x, y = (decode(fmt, jnp.broadcast_to(v, shape)) for fmt, v in ((spec.a, a), (spec.b, b)))
        terms.append(multiply_numbers(x, y)._replace(magnitude=(x.magnitude[0] * y.magnitude[0],)))
        exponent = x.exponent + y.exponent + spec.a.mantissa_bits + spec.b.mantissa_bits
        units.append(jnp.where(terms[-1].magnitude[0] == 0, NOWHERE, exponent - model.fraction_bits))
    leading = c.exponent + (LIMB_BITS - 1) - bits.leading_zeros(c.magnitude).astype(jnp.int32)
    unit = jnp.maximum(leading, F32.min_exponent) - model.fraction_bits - ACCUMULATOR_BITS
    for one in units:
        unit = jnp.maximum(unit, one)
    signed = [jnp.where(t.negative, -t.magnitude[0].astype(jnp.int32), t.magnitude[0].astype(jnp.int32)) for t in terms]
    retained = _limb(c.magnitude[0], c.exponent - unit) != 0
    total = jnp.where(retained, _shift_down(signed[0], c.exponent - unit), 0)
    for i in range(0, len(pairs), 2):
        own = jnp.maximum(units[i], units[i + 1])
        both = [_shift_down(signed[j], terms[j].exponent - own) for j in (i + 1, i + 2)]
        total = total + _shift_down(both[0] + both[1], own - unit)
    plus, minus = (_any([t.infinite & sign(t) for t in terms]) for sign in (lambda t: ~t.negative, lambda t: t.negative))
    nan = _any([t.nan for t in terms]) | (plus & minus)
    negative = jnp.where(plus | minus, minus, total < 0)
    (code,) = encode_limbs(F32, Number(negative, (jnp.abs(total).astype(jnp.uint32),), unit, nan, (plus | minus) & ~nan), model.rounding)
    return code


def _shift_down(x: Array, place: Array) -> Array:
    """Returns the integer x * 2^place, rounded down; place may be negative."""
    return jnp.where(place >= 0, x << jnp.clip(place, 0, LIMB_BITS - 1), x >> jnp.clip(-place, 0, LIMB_BITS - 1))


# ---- joined sums


class _Fixed(NamedTuple):
    """(-1)^negative * magnitude * 2^unit."""

    negative: Array
    magnitude: Limbs
    unit: Array


def joined_dot_add(model: Model, spec: ProductSpec, a: Multiplicand, b: Multiplicand, accumulator: Limbs) -> Limbs:
    """Computes one "joined" step. The arguments and the result are those of `fused_dot_add`."""
    assert isinstance(model.fraction_bits, int)
    products = pair_products(a, b)
    width = DEALING_WIDTHS[model.dealing]
    groups = [[p for t, p in enumerate(products) if t // width % model.groups == group] for group in range(model.groups)]
    sums, exponents = zip(*(_sum_truncated(model, spec, group) for group in groups if group), strict=True)
    exponent = exponents[0]
    for other in exponents[1:]:
        exponent = jnp.maximum(exponent, other)
    total = sums[0]
    if len(sums) > 1:
        joined = [_floor(one, exponent - model.fraction_bits) for one in sums]
        total = joined[0]
        for one in joined[1:]:
            total = _add_fixed(total, one)

    c = decode_limbs(F32, accumulator)
    c_exponent = c.exponent + F32.mantissa_bits  # of zero: that of subnormals, as of every C
    max_exponent = jnp.maximum(exponent, c_exponent)
    fixed_c = _floor(_Fixed(c.negative, bits.extend(c.magnitude, 2), c.exponent), max_exponent - model.fraction_bits)
    if len(sums) > 1:
        dropped = c_exponent < max_exponent - model.fraction_bits - 1
        fixed_c = fixed_c._replace(magnitude=tuple(jnp.where(dropped, 0, limb) for limb in fixed_c.magnitude))
    unit = max_exponent - JOINED_SUM_BITS
    total = _add_fixed(_floor(total, unit), _floor(fixed_c, unit))
    leading = unit + (2 * LIMB_BITS - 1) - bits.leading_zeros(total.magnitude)
    total = _floor(total, jnp.maximum(jnp.maximum(leading, F32.min_exponent) - JOINED_TOTAL_BITS, unit))

    plus, minus = _overflow_signs(spec, products)
    plus, minus = plus | (c.infinite & ~c.negative), minus | (c.infinite & c.negative)
    nan, infinite = c.nan | (plus & minus), plus | minus
    negative = jnp.where(infinite, minus, total.negative & ~bits.is_zero(total.magnitude))
    never = jnp.zeros_like(negative)
    (code,) = encode_limbs(F32, Number(negative, total.magnitude, total.unit, never, never), model.rounding)
    code = jnp.where(infinite, infinity_code(F32, minus), code)
    return (jnp.where(nan, jnp.uint32(F32.nan), code),)


def _sum_truncated(model: Model, spec: ProductSpec, products: list[StepProduct]) -> tuple[_Fixed, Array]:
    """Returns the sum of products that are aligned to their own max exponent and truncated, and that exponent."""
    exponent = products[0].exponents.a + products[0].exponents.b
    for product in products[1:]:
        exponent = jnp.maximum(exponent, product.exponents.a + product.exponents.b)
    negative, magnitude, _ = take_sign(add_wide(align_products(model, spec, products, integers(exponent))))
    return _Fixed((negative != 0).raw, magnitude.raw, exponent - model.require_fraction_bits()), exponent


def _floor(x: _Fixed, unit: Array) -> _Fixed:
    """Rounds down to a multiple of 2^unit."""
    up = bits.shift_left(x.magnitude, jnp.maximum(x.unit - unit, 0))
    drop = jnp.maximum(unit - x.unit, 0)
    kept = bits.shift_right(up, drop)
    return _Fixed(x.negative, round_magnitude(kept, kept[0] & 1 == 1, up, drop, x.negative, "RM"), unit)


def _add_fixed(x: _Fixed, y: _Fixed) -> _Fixed:
    return _Fixed(*bits.add_signed(x.negative, x.magnitude, y.negative, y.magnitude), x.unit)


def _overflow_signs(spec: ProductSpec, products: list[StepProduct]) -> tuple[Array, Array]:
    """Returns whether a positive, and whether a negative product is 2^OVERFLOW or more. Inf and NaN do not count."""
    first = products[0]
    plus = minus = jnp.zeros((first.exponents.a + first.exponents.b).shape, bool)
    if spec.a.max_exponent + spec.b.max_exponent + 2 <= OVERFLOW:
        return plus, minus
    two = jnp.float32(2.0 ** (spec.a.mantissa_bits + spec.b.mantissa_bits + 1))  # 2 as a product of integer significands
    for product in products:
        significand, exponent = product.significands.a * product.significands.b, product.exponents.a + product.exponents.b
        large = (exponent + (jnp.abs(significand) >= two) >= OVERFLOW) & (exponent < SPECIAL_EXPONENT // 2)
        plus, minus = plus | (large & (significand > 0)), minus | (large & (significand < 0))
    return plus, minus
