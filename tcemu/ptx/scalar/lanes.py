"""Raw bits as integers and back: what all instructions of values share. Values are held as `tcemu.ptx.values` says."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from tcemu.ptx.values import KINDS, dtype


def width(kind: str) -> int:
    """The bits of a type."""
    return KINDS[kind].bits


def ones(bits: int) -> int:
    """So many ones."""
    return (1 << bits) - 1


def cut(x: Array, kind: str) -> Array:
    """Any integers, held as values of the type: their lowest bits."""
    bits, held = width(kind), dtype(kind)
    x = x.astype(held)
    return x if bits == held.itemsize * 8 else x & held.type(ones(bits))


def signed(x: Array, kind: str) -> Array:
    """A value of a type of any sign as a signed integer: int32 for up to 32 bits, int64 for 64."""
    bits = width(kind)
    if bits == 64:
        return x.astype(jnp.int64)
    return (x.astype(jnp.int32) << (32 - bits)) >> (32 - bits) if bits < 32 else x.astype(jnp.int32)


def number(x: Array, kind: str) -> Array:
    """The integer that a value stands for: signed if the type is, else unsigned."""
    return signed(x, kind) if KINDS[kind].signed else x


def wide(x: Array, kind: str) -> Array:
    """The integer that a value of up to 32 bits stands for, in 64 bits."""
    return number(x, kind).astype(jnp.int64 if KINDS[kind].signed else jnp.uint64)


def halves(x: Array) -> Array:
    """A packed pair -> [2, ...]: the lower and the upper 16 bits."""
    return jnp.stack([x & 0xFFFF, x >> 16])


def joined(x: Array) -> Array:
    """The inverse of `halves`."""
    return x[0] | (x[1] << 16)


def paired(compute: Callable[..., Array]) -> Callable[..., Array]:
    """A function of 16-bit values, on both halves of packed pairs. Other arguments are not taken."""
    return lambda *values: joined(compute(*map(halves, values)))
