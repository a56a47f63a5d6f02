"""Random keys: all from one, apart by a product's place in its program, by the turns of the loops around it, and by device."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax

from tcemu.formats import array_codes
from tcemu.meshes import varying_axes


def one_key(key: Any) -> PRNGKey | None:
    """The key as a typed one, or None where there is none. Raises TypeError for anything else, and for several keys."""
    if key is None:
        return None
    what = type(key).__name__
    if isinstance(key, jax.Array | np.ndarray):
        what = f"{key.dtype}{list(key.shape)}"
        if key.shape == () and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            return jnp.asarray(key)
        if key.dtype == np.uint32 and key.shape == jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape:
            return jax.random.wrap_key_data(jnp.asarray(key))
    raise TypeError(f"key: got {what}; wanted one key, as jax.random.key(0) gives it (several: jax.vmap over them)")


def at_place(key: PRNGKey, place: Sequence[str]) -> PRNGKey:
    """The key of what stands there. 64 bits of a hash tell places apart, in every process alike."""
    digest = blake2b("\0".join(place).encode(), digest_size=8).digest()
    for word in np.frombuffer(digest, "<u4"):
        key = jax.random.fold_in(key, word)
    return key


def in_turn(key: PRNGKey, turn: Array) -> PRNGKey:
    """The key of one turn of a loop."""
    return jax.random.fold_in(key, turn)


def on_device(key: PRNGKey, lhs: Array, rhs: Array) -> PRNGKey:
    """Under `jax.shard_map`, the key of this device's part of a product: another one where the operands differ, the same where they do not.

    Their types say along which axes of the mesh they may differ. With check_vma=False they say nothing, and the operands' own bits decide.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return key
    axes = varying_axes(lhs) | varying_axes(rhs)
    for axis in sorted(axes, key=str):
        key = jax.random.fold_in(key, lax.axis_index(axis))
    for operand in () if axes else (lhs, rhs):
        key = jax.random.fold_in(key, _checksum(operand))
    return key


def _checksum(x: Array) -> Array:
    """uint32 of an array's bits: the sum of its codes, each scrambled with its place by a bijection (MurmurHash3's last step)."""
    _, codes = array_codes(lax.stop_gradient(x))
    words = codes.ravel().astype(jnp.uint32)
    words += jnp.arange(words.size, dtype=jnp.uint32) * np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        words = (words ^ (words >> shift)) * np.uint32(factor)
    return jnp.sum(words, dtype=jnp.uint32)
