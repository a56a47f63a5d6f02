"""Random keys of products, all derived from one key.

A product's key comes from the given key, its location in the program, the iterations of the loops around it and, under `jax.shard_map`, the
device, if the operands differ between devices. So no two executions of a product share random bits. The keys of a product's gradient come
from the product's key. Equal keys give equal bits under jit, in a checkpoint that computes again, and where a function with a derivative
rule is differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax

from tcemu.base.jax_internals import varying_axes
from tcemu.engine.formats.float_arrays import array_codes


def as_typed_key(key: Any) -> PRNGKey | None:
    """Return a key as a typed one, or None for None.

    Raises:
        TypeError: It is no key, or several.
    """
    if key is None:
        return None
    what = type(key).__name__
    if isinstance(key, jax.Array | np.ndarray):
        what = f"{key.dtype}{list(key.shape)}"
        if key.shape == () and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            return jnp.asarray(key)
        if key.dtype == np.uint32 and key.shape == jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape:
            return jax.random.wrap_key_data(jnp.asarray(key))
    raise TypeError(f"key: got {what}; expected one key, as jax.random.key(0) gives it (several: jax.vmap over them)")


def fold_in_location(key: PRNGKey, location: Sequence[str]) -> PRNGKey:
    """Return the key of a location. 64 bits of a hash distinguish locations, the same ones in every process."""
    digest = blake2b("\0".join(location).encode(), digest_size=8).digest()
    for word in np.frombuffer(digest, "<u4"):
        key = jax.random.fold_in(key, word)
    return key


def fold_in_iteration(key: PRNGKey, iteration: Array) -> PRNGKey:
    """Return the key of one iteration of a loop."""
    return jax.random.fold_in(key, iteration)


def fold_in_device(key: PRNGKey, lhs: Array, rhs: Array) -> PRNGKey:
    """Return the key of this device's part of a product under `jax.shard_map`: another key on each device whose operands differ.

    The operands' types show along which axes of the mesh they may differ. With check_vma=False the types show nothing, and the operands'
    bits decide.
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
    """Return a uint32 checksum: the sum of an array's codes, each scrambled with its index by a bijection (MurmurHash3's last step)."""
    _, codes = array_codes(lax.stop_gradient(x))
    words = codes.ravel().astype(jnp.uint32)
    words += jnp.arange(words.size, dtype=jnp.uint32) * np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        words = (words ^ (words >> shift)) * np.uint32(factor)
    return jnp.sum(words, dtype=jnp.uint32)
