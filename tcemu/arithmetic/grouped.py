"""The fused sum of groups: the products of a group are added exactly, then scaled, aligned and cut as one term.

So the 4-bit block-scaled kinds work. Source: MMA-Sim (arXiv 2511.10909 v2, table 5) and the sm_120 measurements that agree with it.

Floats appear as in `dot_add`, each exact: the values are integers whose sums and products stay below 2^24 (`check_exact` holds the widths),
so an f32 holds every partial sum, in any order, with or without FMA; the matmul's operands fit the eight significant bits of bf16, so that
every precision mode is exact.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.arithmetic.dot_add import (
    NAN,
    SPECIAL_EXPONENT,
    ZERO_EXPONENT,
    Scale,
    add_accumulator,
    add_wide,
    decode_accumulator,
    power_of_two,
    whole,
)
from tcemu.bits import Limbs
from tcemu.formats import Format, Rounding, cuts, decode


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


def grouped_dot_add(
    a: Groups,
    b: Groups,
    accumulator: Limbs | None,
    *,
    a_format: Format,
    b_format: Format,
    scale: Format,
    result: Format,
    rounding: Rounding,
    fraction_bits: ArrayLike,
    floor: ArrayLike,
    result_bits: ArrayLike | None = None,
    alignment: Rounding = "RZ",
) -> Limbs:
    """One step: groups of products, and one accumulator, in a single fused sum, rounded once.

    A group's exponent is that of its two scales alone, whatever its sum, and even if its products cancel; it takes no part if all of its
    products, or one of its scales, are zero. The other arguments and the result are those of `dot_add`.
    """
    dot = lambda x, y: jnp.matmul(x, y, precision=lax.Precision.HIGHEST)  # noqa: E731
    row, column = (lambda v: v[..., :, None]), (lambda v: v[..., None, :])
    significand = row(a.significand) * column(b.significand)
    present = (dot(jnp.abs(a.values), jnp.abs(b.values)) > 0) & (significand > 0)
    sums = dot(a.values, b.values) * significand
    exponent = row(a.exponent) + column(b.exponent)

    c = None if accumulator is None else decode_accumulator(result, accumulator)
    greatest = jnp.max(jnp.where(present, exponent, ZERO_EXPONENT), axis=0)
    greatest = jnp.maximum(greatest if c is None else jnp.maximum(greatest, c.exponent), floor)
    last = greatest - fraction_bits - unit(a_format) - unit(b_format) + 2 * scale.mantissa_bits
    aligned = jnp.where(present, sums * power_of_two(exponent - last), 0.0)
    if not cuts(alignment):
        aligned = whole(aligned, jnp.where(present, sums, 0.0), alignment)

    nan = row(jnp.any(a.exponent == SPECIAL_EXPONENT, axis=0)) | column(jnp.any(b.exponent == SPECIAL_EXPONENT, axis=0))
    flags = jnp.where(nan, NAN, 0)
    return add_accumulator(
        *add_wide(list(aligned)), greatest, flags, c, result=result, rounding=rounding, fraction_bits=fraction_bits,
        result_bits=result_bits, alignment=alignment,
    )  # fmt: skip


def deal(values: Array, scales: Scale, products: int, axis: int) -> Groups:
    """[K, ..., M] -> groups [..., M, products] (axis -1), or [K, ..., N] -> groups [..., products, N] (axis -2), and their scales."""
    grouped = values.reshape(-1, products, *values.shape[1:])
    first = lambda v: v.reshape(-1, products, *v.shape[1:])[:, 0]  # noqa: E731  a group lies within one block of scales
    return Groups(jnp.moveaxis(grouped, 1, axis), first(scales.significand), first(scales.exponent))
