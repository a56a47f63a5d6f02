"""The rounding modes and the rounding of a magnitude."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from tcemu.base import bits
from tcemu.base.bits import Limbs

Rounding = str | Array  # one of ROUNDINGS, or a traced int32 index into it
ROUNDINGS = ("RN", "RZ", "RM", "RP", "SR")  # nearest even, toward zero, toward -Inf, toward +Inf, stochastic
AWAY = "RNA"  # nearest, ties away from zero, as cvt.rna does; a rounding of conversions that is never traced
CONVERSION_ROUNDINGS = (*ROUNDINGS, AWAY)


def truncates(rounding: Rounding) -> bool:
    """Return True if the rounding is known to be toward zero.

    Args:
        rounding: One of ROUNDINGS, or a traced index, for which the result is False.

    Returns:
        True for "RZ".
    """
    return isinstance(rounding, str) and rounding == "RZ"


def round_magnitude(
    integer: Limbs, odd: Array, magnitude: Limbs, drop: Array, negative: Array, rounding: Rounding, random: Array | None = None
) -> Limbs:
    """Round a magnitude to a multiple of 2^drop and drop its lowest `drop` bits.

    Args:
        integer: magnitude >> drop. The result is this value or one more.
        odd: bool [...]: the code of `integer` is odd, so that a tie in "RN" rounds up.
        magnitude: Limbs [...] of the unrounded magnitude.
        drop: Number of bits to drop, [...].
        negative: bool [...]: the sign of the number.
        rounding: One of CONVERSION_ROUNDINGS, or a traced int32 index into ROUNDINGS.
        random: Random bits for "SR", uint32 [...], as in `encode_limbs`.

    Returns:
        Limbs of the rounded integer.

    Raises:
        ValueError: The rounding is unknown, or "SR" lacks random bits.
    """
    if truncates(rounding):
        return integer
    width = 32 * len(magnitude)
    rest = bits.shift_left(magnitude, width - jnp.minimum(drop, width))  # the dropped bits, at the top
    tiny = ((~bits.is_zero(magnitude)).astype(jnp.uint32), *bits.zeros_like(rest[1:]))
    rest = bits.select(drop > width, tiny, rest)  # less than half a unit; zero only if the magnitude is zero
    inexact = ~bits.is_zero(rest)
    half = rest[-1] >= jnp.uint32(0x80000000)
    beyond_half = half & ~bits.is_zero((*rest[:-1], rest[-1] << 1))
    up = {
        "RN": lambda: half & (beyond_half | odd),
        "RZ": lambda: jnp.zeros_like(inexact),
        "RM": lambda: inexact & negative,
        "RP": lambda: inexact & ~negative,
        AWAY: lambda: half,
        "SR": lambda: _stochastic_up(bits.select(drop > width, bits.shift_right(magnitude, drop - width), rest)[-1], random),
    }
    if isinstance(rounding, str):
        if rounding not in up:
            raise ValueError(f"rounding={rounding!r} is not one of {', '.join(CONVERSION_ROUNDINGS)}")
        increment = up[rounding]()
    else:
        modes = ROUNDINGS if random is not None else ROUNDINGS[:-1]
        increment = lax.select_n(jnp.broadcast_to(rounding, inexact.shape), *(up[mode]() for mode in modes))
    return bits.add(integer, (increment.astype(jnp.uint32), *bits.zeros_like(integer[1:])))


def _stochastic_up(rest: Array, random: Array | None) -> Array:
    """Return True where stochastic rounding rounds up, with a probability of rest / 2^32."""
    if random is None:
        raise ValueError('rounding="SR" needs random bits: give key= (a jax.random key)')
    return random < rest


def overflows_to_infinity(negative: Array, rounding: Rounding) -> Array:
    """Return True where the rounding takes a magnitude above the largest finite value to Inf.

    Args:
        negative: bool [...]: the sign of the number.
        rounding: One of CONVERSION_ROUNDINGS, or a traced int32 index into ROUNDINGS.

    Returns:
        bool [...].

    Source: IEEE 754-2019, 7.4.
    """
    by_mode = (jnp.ones_like(negative), jnp.zeros_like(negative), negative, ~negative, jnp.ones_like(negative))
    if isinstance(rounding, str):
        return by_mode[ROUNDINGS.index("RN" if rounding == AWAY else rounding)]
    return lax.select_n(jnp.broadcast_to(rounding, negative.shape), *by_mode)
