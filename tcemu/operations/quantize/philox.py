"""Philox4x32, the counter-based generator of random words that Triton's `randint` computes, on uint32 arrays.

Source: Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3 (2011); triton/language/random.py of Triton 3.9.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint32)  # added to the key after each round


def _multiply_wide(factor: int, x: Array) -> tuple[Array, Array]:
    """Return the upper and the lower word of a product."""
    high, low = np.uint32(factor >> 16), np.uint32(factor & 0xFFFF)
    x_high, x_low = x >> 16, x & np.uint32(0xFFFF)
    middle = high * x_low + (low * x_low >> 16)
    other = low * x_high + (middle & np.uint32(0xFFFF))
    return high * x_high + (middle >> 16) + (other >> 16), np.uint32(factor) * x


def philox(counters: tuple[Array, Array, Array, Array], key: Array, rounds: int) -> tuple[Array, Array, Array, Array]:
    """Return the four words of each counter.

    Args:
        counters: Four uint32 arrays of one shape.
        key: The key, uint32 [2], low word first.
        rounds: Number of rounds; 10 is the generator's usual one.

    Returns:
        Four uint32 arrays of that shape.
    """
    c0, c1, c2, c3 = counters
    for _ in range(rounds):
        high0, low0 = _multiply_wide(MULTIPLIERS[0], c0)
        high1, low1 = _multiply_wide(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key[0], low1, high0 ^ c3 ^ key[1], low0
        key = key + WEYL
    return c0, c1, c2, c3


def triton_randint(key: Array, offsets: Array, rounds: int) -> Array:
    """Return `tl.randint(seed, offsets, rounds)` for 32-bit offsets as uint32. key: the seed as uint32 [2], low word first."""
    zero = jnp.zeros_like(offsets)
    return philox((offsets, zero, zero, zero), key, rounds)[0]
