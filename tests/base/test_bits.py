"""Integers of several limbs against Python's."""

import jax.numpy as jnp
import numpy as np

from tcemu.base import bits


def test_sums_along_an_axis_are_those_of_integers():
    words = np.random.default_rng(0).integers(0, 1 << 32, (3, 50, 40), np.uint32)
    words[:, 0] = 0xFFFFFFFF
    sums = np.stack(bits.sum_along(tuple(map(jnp.asarray, words)), -1)).astype(object)
    integers = sum(limb.astype(object) << 32 * n for n, limb in enumerate(words))
    assert (sum(limb << 32 * n for n, limb in enumerate(sums)) == integers.sum(-1) % (1 << 96)).all()
