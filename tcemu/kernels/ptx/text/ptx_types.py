"""The types of PTX, and the arrays that store their values.

Values are raw bits. A predicate is a bool array, a value of up to 32 bits a uint32 array with zeros above its bits, a value of 64 bits a
uint64 array. Packed types (f16x2, bf16x2, e4m3x2, ...) are one value of their whole width. The engine runs under `jax.enable_x64(True)`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np


class Kind(NamedTuple):
    """A PTX type."""

    name: str
    bits: int
    signed: bool = False  # a value that is written to a wider register is extended by its sign


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


def storage_dtype(kind: str) -> np.dtype:
    """Return the dtype of the array that stores values of a type."""
    bits = KINDS[kind].bits
    return np.dtype(bool if bits == 1 else jnp.uint32 if bits <= 32 else jnp.uint64)
