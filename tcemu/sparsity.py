"""Sparsity metadata: which positions of a row of A are kept, and the elements of B that they meet.

A row of A is cut into chunks along K, each with one 4-bit field. Read in units, every type keeps two of four: a unit is the element for
16- and 8-bit types, half an element for tf32 (so one of two is kept), a pair for 4-bit types (so four of eight). The field's low two bits
index the first kept unit, its high two bits the second. Source: PTX ISA 9.7.14.6.1, 9.7.15.6.1.
"""

from itertools import permutations
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.bits import Limbs, less, select

UNITS = 4  # of a chunk
PATTERNS = {"1:2": 2, "2:4": 4, "4:8": 8}  # elements of a chunk: 1:2 is that of tf32, 4:8 (two pairs of four) that of 4-bit types

# the fields that PTX defines: two different units, low index first; without .ordered_metadata in either order. tf32: an element's halves
ORDERED = tuple(sorted(first | second << 2 for first, second in permutations(range(UNITS), 2) if first < second))
UNORDERED = tuple(sorted(first | second << 2 for first, second in permutations(range(UNITS), 2)))
WHOLE = (0b0100, 0b1110)


def defined_fields(chunk: int, ordered: bool) -> tuple[int, ...]:
    """The 4-bit fields that PTX defines for chunks of 2, 4 or 8 elements."""
    return WHOLE if chunk == 2 else ORDERED if ordered else UNORDERED


def undefined(fields: Array, chunk: int, ordered: bool) -> Array:
    """bool: which 4-bit fields PTX leaves undefined."""
    table = sum(1 << field for field in defined_fields(chunk, ordered))  # bit f: whether field f is defined
    return (jnp.uint32(table) >> fields.astype(jnp.uint32)) & 1 == 0


def _units(fields: Array, clamped: bool = False) -> tuple[Array, Array]:
    """Which unit of its chunk a field's two indices name: int32, each 0 to 3."""
    fields = fields.astype(jnp.int32)
    first, second = fields & 3, fields >> 2 & 3
    return (jnp.minimum(first, 2), jnp.maximum(second, 1)) if clamped else (first, second)


def kept_positions(fields: Array, chunk: int) -> Array:
    """Where in its chunk each stored element of a row stands: 4-bit fields [..., chunks] -> int32 [..., chunks * chunk / 2]."""
    first, second = _units(fields)
    if chunk == 2:
        kept = (first >> 1)[..., None]
    elif chunk == 4:
        kept = jnp.stack([first, second], axis=-1)
    else:
        kept = jnp.stack([2 * first, 2 * first + 1, 2 * second, 2 * second + 1], axis=-1)
    return kept.reshape(*fields.shape[:-1], fields.shape[-1] * chunk // 2)


def gather(b: Array, fields: Array, chunk: int, clamped: bool = False) -> Array:
    """The elements of B that each row of a sparse A meets: codes [..., K, N], fields [..., M, chunks] -> [..., M, K/2, N].

    Any field has a meaning here, as on silicon: the units of B are taken that it names, in any order, twice the same too. So a tf32 field
    outside the defined ones puts halves of two elements together; measured on an NVIDIA H200 (tests/golden, tf32_metadata). clamped: a
    first index above 2 counts as 2 and a second index of 0 as 1, as sm_120 does for 4-bit types.

    It selects among four elements, so that no memory access depends on data.
    """
    *batch, k, n = b.shape
    if chunk == 2:
        b = jnp.stack([b & 0xFFFF, b >> 16], axis=-2)
    units = b.reshape(*batch, 1, k // chunk, UNITS, max(1, chunk // UNITS), n)

    def named(unit: Array) -> Array:
        at = unit[..., None, None]
        low, high = (jnp.where(at & 1 == 1, units[..., i + 1, :, :], units[..., i, :, :]) for i in (0, 2))
        return jnp.where(at & 2 == 2, high, low)

    first, second = (named(unit) for unit in _units(fields, clamped))
    met = first | second << 16 if chunk == 2 else jnp.stack([first, second], axis=-3)
    return met.reshape(*first.shape[:-3], k // 2, n)


def keep_largest(magnitude: Limbs, chunk: int) -> Array:
    """The ordered 4-bit fields [..., M, chunks], uint8, that keep the units of largest magnitude; of equal ones the first.

    magnitude: [..., M, K], unsigned integers. A unit of two elements (chunk 8) has the larger of their magnitudes, then the smaller.
    """
    pair = max(1, chunk // UNITS)
    units = tuple(limb.reshape(*limb.shape[:-1], limb.shape[-1] // chunk, chunk // pair, pair) for limb in magnitude)
    key = tuple(limb[..., 0] for limb in units)
    if pair == 2:
        other = tuple(limb[..., 1] for limb in units)
        swap = less(key, other)
        key = (*select(swap, key, other), *select(swap, other, key))
    if chunk == 2:
        second = less(tuple(v[..., 0] for v in key), tuple(v[..., 1] for v in key))
        return jnp.where(second, WHOLE[1], WHOLE[0]).astype(jnp.uint8)
    at = [tuple(v[..., i] for v in key) for i in range(UNITS)]
    # how many units go before unit i: the larger ones, and the equal ones to the left
    before = [sum(~less(at[j], at[i]) if j < i else less(at[i], at[j]) for j in range(UNITS) if j != i) for i in range(UNITS)]
    kept = jnp.stack(before, axis=-1) < 2
    first, second = jnp.argmax(kept, axis=-1), UNITS - 1 - jnp.argmax(kept[..., ::-1], axis=-1)
    return (first | second << 2).astype(jnp.uint8)


def compress(dense: Any, fields: Any, chunk: int) -> Any:
    """What the fields keep: [..., M, K] -> [..., M, K/2], any dtype, NumPy or JAX."""
    at = kept_positions(jnp.asarray(fields), chunk)
    count = dense.shape[-1] // chunk
    chunks = dense.reshape(*dense.shape[:-1], count, chunk)
    at = at.reshape(*at.shape[:-1], count, chunk // 2)
    if isinstance(dense, np.ndarray):
        return np.take_along_axis(chunks, np.asarray(at), axis=-1).reshape(*dense.shape[:-1], count * chunk // 2)
    return jnp.take_along_axis(chunks, at, axis=-1).reshape(*dense.shape[:-1], count * chunk // 2)


def expand(kept: Any, fields: Any, chunk: int) -> Any:
    """The dense rows, zero where nothing is kept; the inverse of `compress`. Where a field names a unit twice, the later element stays."""
    xp: Any = np if isinstance(kept, np.ndarray) else jnp
    at = xp.asarray(kept_positions(jnp.asarray(fields), chunk))
    stored = chunk // 2
    at, kept = (v.reshape(*v.shape[:-1], v.shape[-1] // stored, stored, 1) for v in (at, kept))
    dense = xp.zeros((*kept.shape[:-2], chunk), kept.dtype)
    for j in range(stored):
        dense = xp.where(at[..., j, :] == np.arange(chunk), kept[..., j, :], dense)
    return dense.reshape(*dense.shape[:-2], dense.shape[-2] * chunk)
