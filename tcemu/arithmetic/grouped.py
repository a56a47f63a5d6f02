"""The fused sum of groups: the products of a group are added exactly, then scaled, aligned and cut as one term.

So the 4-bit block-scaled kinds work. Source: MMA-Sim (arXiv 2511.10909 v2, table 5) and the sm_120 measurements that agree with it.

Floats appear as in `dot_add`, and each operation is exact. The values are integers whose sums and products stay below 2^24, which
`fitting.check_exact` holds. So an f32 holds every partial sum, in any order, with or without FMA. The matmul's operands fit the eight
significant bits of bf16, so that every precision mode is exact.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.arithmetic.dot_add import ProductSum, add_accumulator, add_wide, decode_accumulator, whole
from tcemu.arithmetic.model import Model, Signature
from tcemu.arithmetic.multiplicands import SPECIAL_EXPONENT, ZERO_EXPONENT, Scale, power_of_two
from tcemu.bits import Limbs
from tcemu.formats import Format, cuts, decode


class Groups(NamedTuple):
    """One multiplicand, its products dealt out in groups with a scale each. Leading axis: the groups."""

    values: Array  # f32 integers [groups, ..., M, products of a group], or [groups, ..., products, N]
    significand: Array  # of the scale: f32 integers [groups, ..., M] or [groups, ..., N]; 0 for NaN
    exponent: Array  # of the scale: int32, SPECIAL_EXPONENT for NaN


def unit(fmt: Format) -> int:
    """Every value of the format is an integer times 2^unit."""
    return fmt.least_exponent - fmt.mantissa_bits


def values(fmt: Format, codes: ArrayLike) -> Array:
    """f32: the values in units of 2^unit."""
    number = decode(fmt, codes)
    magnitude = number.magnitude[0] << (number.exponent - unit(fmt)).astype(jnp.uint32)
    magnitude = magnitude.astype(jnp.int32).astype(jnp.float32)
    return jnp.where(number.negative, -magnitude, magnitude)


def grouped_dot_add(model: Model, signature: Signature, a: Groups, b: Groups, accumulator: Limbs) -> Limbs:
    """One step: groups of products, and one accumulator, in a single fused sum, rounded once.

    A group's exponent is that of its two scales alone, whatever its sum, and even if its products cancel. It takes no part if all of its
    products, or one of its scales, are zero. The other arguments, the result and the rules are those of `dot_add`.
    """
    assert model.fraction_bits is not None and signature.scale is not None
    dot = lambda x, y: jnp.matmul(x, y, precision=lax.Precision.HIGHEST)  # noqa: E731
    row, column = (lambda v: v[..., :, None]), (lambda v: v[..., None, :])
    significand = row(a.significand) * column(b.significand)
    present = (dot(jnp.abs(a.values), jnp.abs(b.values)) > 0) & (significand > 0)
    sums = dot(a.values, b.values) * significand
    exponent = row(a.exponent) + column(b.exponent)

    # rule 3
    c = decode_accumulator(model.result, accumulator)
    greatest = jnp.max(jnp.where(present, exponent, ZERO_EXPONENT), axis=0)
    greatest = jnp.maximum(jnp.maximum(greatest, c.exponent), model.floor)

    # rules 4 and 5
    last = greatest - model.fraction_bits - unit(signature.a) - unit(signature.b) + 2 * signature.scale.mantissa_bits
    aligned = jnp.where(present, sums * power_of_two(exponent - last), 0.0)
    if not cuts(model.alignment):
        aligned = whole(aligned, jnp.where(present, sums, 0.0), model.alignment)
    negative, magnitude = add_wide(list(aligned))

    nan = row(jnp.any(a.exponent == SPECIAL_EXPONENT, axis=0)) | column(jnp.any(b.exponent == SPECIAL_EXPONENT, axis=0))
    (d,) = add_accumulator(model, ProductSum(negative, magnitude, greatest), c)
    return (jnp.where(nan, model.result.nan, d),)


def deal(values: Array, scales: Scale, products: int, axis: int) -> Groups:
    """[K, ..., M] -> groups [..., M, products] (axis -1), or [K, ..., N] -> groups [..., products, N] (axis -2), and their scales."""
    grouped = values.reshape(-1, products, *values.shape[1:])
    first = lambda v: v.reshape(-1, products, *v.shape[1:])[:, 0]  # noqa: E731  a group lies within one block of scales
    return Groups(jnp.moveaxis(grouped, 1, axis), first(scales.significand), first(scales.exponent))
