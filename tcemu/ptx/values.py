"""The types of PTX, and how their values are held: as raw bits.

A predicate is a bool array; a value of up to 32 bits a uint32 array, zeros above its bits; one of 64 bits a uint64 array. The engine runs
under `jax.enable_x64(True)`. Packed types (f16x2, bf16x2, e4m3x2, ...) are one value of their whole width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np


class Kind(NamedTuple):
    """A type. bits: its width; signed: a value that is written to a wider register is extended by its sign."""

    name: str
    bits: int
    signed: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("pred", 1),
        *(Kind(f"b{bits}", bits) for bits in (8, 16, 32, 64)),
        *(Kind(f"u{bits}", bits) for bits in (8, 16, 32, 64)),
        *(Kind(f"s{bits}", bits, signed=True) for bits in (8, 16, 32, 64)),
        Kind("f16", 16), Kind("bf16", 16), Kind("tf32", 32), Kind("f32", 32), Kind("f64", 64),
        Kind("f16x2", 32), Kind("bf16x2", 32), Kind("u16x2", 32), Kind("s16x2", 32), Kind("f32x2", 64),
        *(Kind(f"{name}x2", 16) for name in ("e4m3", "e5m2", "ue8m0")),
        *(Kind(f"{name}x2", 16) for name in ("e2m3", "e3m2")), Kind("e2m1x2", 8),
    )
}  # fmt: skip


def dtype(kind: str) -> np.dtype:
    """How values of the type are held."""
    bits = KINDS[kind].bits
    return np.dtype(bool if bits == 1 else jnp.uint32 if bits <= 32 else jnp.uint64)
