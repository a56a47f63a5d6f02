"""Random words by counting: a word is a function of the seed, the number of the case and the place in it, and of nothing else.

So the operands of case 10^12 are had without those before it, on any number of devices and in chunks of any size, a resumed run needs no
state of a generator, and a mismatch is kept as its number. `jax.random` was not taken: which word of its stream falls to which case depends
on the shape that is drawn, on `jax_threefry_partitionable`, and on how each release draws shapes; and a threefry word costs some 70 integer
operations where these 10 are enough. No word needs to be unpredictable, only unlike its neighbours.

Source of `mix`: lowbias32, by Chris Wellons, a bijection of 32-bit words (nullprogram.com/blog/2018/07/31, public domain).
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: the counter's step
ROUNDS = 4  # of the Feistel network
WORD = (1 << 32) - 1

Pair = tuple[Array, Array]  # a 64-bit number, low word first


def pair(value: int) -> Pair:
    """A Python integer from 0 to 2^64 - 1 as two words."""
    return jnp.asarray(value & WORD, jnp.uint32), jnp.asarray(value >> 32, jnp.uint32)


def plus(base: Pair, offset: Array) -> Pair:
    """base + offset, offset: uint32[...]."""
    low = base[0] + offset
    return low, base[1] + (low < offset)


def mix(x: Array) -> Array:
    """Each word to another one, far away."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def case_keys(seed: Pair, number: Pair) -> Pair:
    """The key of each case. Two cases of one seed never share it: a Feistel network is a bijection of 64-bit numbers."""
    left, right = number
    for i in range(ROUNDS):
        left, right = right, left ^ mix(right + mix(seed[i % 2] + np.uint32(GOLDEN * (i + 1) & WORD)))
    return left, right


def words(keys: Pair, stream: int, places: Array | np.ndarray) -> Array:
    """One word for each place of a stream of a case; keys and places broadcast. It is `mix` with half of the key put in midway."""
    x = keys[0] + places.astype(jnp.uint32) * np.uint32(GOLDEN) + np.uint32(mix_int(stream))
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D) ^ keys[1]
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def second(word: Array) -> Array:
    """Another word for each word, where 32 bits are not enough: half of `mix`."""
    x = (word ^ (word >> 15)) * np.uint32(0x2C1B3C6D)
    return x ^ (x >> 16)


def mix_int(x: int) -> int:
    """`mix` of a Python integer."""
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    return x ^ x >> 16
