"""The rounding modes, and what each does to the bits that a number loses."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from tcemu import bits
from tcemu.bits import Limbs

Rounding = str | Array  # one of ROUNDINGS, or a traced int32 that indexes them
ROUNDINGS = ("RN", "RZ", "RM", "RP", "SR")  # nearest even, toward zero, toward -Inf, toward +Inf, stochastic


def cuts(rounding: Rounding) -> bool:
    """The rounding is known to be toward zero: it is no traced one."""
    return isinstance(rounding, str) and rounding == "RZ"


def round_up(
    whole: Limbs, odd: Array, magnitude: Limbs, drop: Array, negative: Array, rounding: Rounding, random: Array | None = None
) -> Limbs:
    """A magnitude without its lowest `drop` bits, rounded.

    whole: magnitude >> drop; the result is this or one more. odd: the code of `whole` is odd, so that a tie in "RN" goes up.
    random: for "SR", uint32 as in `encode_limbs`.
    """
    if cuts(rounding):
        return whole
    width = 32 * len(magnitude)
    rest = bits.shift_left(magnitude, width - jnp.minimum(drop, width))  # the dropped bits, at the top
    trace = ((~bits.is_zero(magnitude)).astype(jnp.uint32), *bits.zeros_like(rest[1:]))
    rest = bits.select(drop > width, trace, rest)  # less than half a unit; not 0 unless the magnitude is
    inexact = ~bits.is_zero(rest)
    half = rest[-1] >= jnp.uint32(0x80000000)
    beyond_half = half & ~bits.is_zero((*rest[:-1], rest[-1] << 1))
    up = {
        "RN": lambda: half & (beyond_half | odd),
        "RZ": lambda: jnp.zeros_like(inexact),
        "RM": lambda: inexact & negative,
        "RP": lambda: inexact & ~negative,
        "SR": lambda: _stochastic_up(bits.select(drop > width, bits.shift_right(magnitude, drop - width), rest)[-1], random),
    }
    if isinstance(rounding, str):
        if rounding not in up:
            raise ValueError(f"rounding={rounding!r} is not one of {', '.join(ROUNDINGS)}")
        increment = up[rounding]()
    else:
        modes = ROUNDINGS if random is not None else ROUNDINGS[:-1]
        increment = lax.select_n(jnp.broadcast_to(rounding, inexact.shape), *(up[mode]() for mode in modes))
    return bits.add(whole, (increment.astype(jnp.uint32), *bits.zeros_like(whole[1:])))


def _stochastic_up(rest: Array, random: Array | None) -> Array:
    if random is None:
        raise ValueError('rounding="SR" needs random bits: give key= (a jax.random key)')
    return random < rest


def leads_outward(negative: Array, rounding: Rounding) -> Array:
    """bool: whether the rounding takes a magnitude above the largest finite one to Inf (IEEE 754-2019, 7.4)."""
    by_mode = (jnp.ones_like(negative), jnp.zeros_like(negative), negative, ~negative, jnp.ones_like(negative))
    if isinstance(rounding, str):
        return by_mode[ROUNDINGS.index(rounding)]
    return lax.select_n(jnp.broadcast_to(rounding, negative.shape), *by_mode)
