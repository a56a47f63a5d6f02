"""Sparsity metadata: the stored positions of each row of A, and the elements of B that they multiply.

A row of A is split into chunks along K, each with one 4-bit field. Every type stores two of the four units of a chunk. A unit is one
element for 16- and 8-bit types, half an element for tf32 (so one of two elements is stored), and a pair of elements for 4-bit types (so
four of eight are stored). The field's low two bits index the first stored unit, its high two bits the second.
Source: PTX ISA 9.7.14.6.1, 9.7.15.6.1.
"""

from itertools import permutations
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from tcemu.base.bits import Limbs, less, select

UNITS = 4  # units of a chunk
PATTERNS = {"1:2": 2, "2:4": 4, "4:8": 8}  # elements of a chunk: 1:2 for tf32, 4:8 (two pairs of four) for 4-bit types
PATTERN_NAMES = {chunk: name for name, chunk in PATTERNS.items()}

# Fields that PTX defines: two different units, low index first; in either order without .ordered_metadata. tf32: the halves of an element
ORDERED_FIELDS = tuple(sorted(first | second << 2 for first, second in permutations(range(UNITS), 2) if first < second))
UNORDERED_FIELDS = tuple(sorted(first | second << 2 for first, second in permutations(range(UNITS), 2)))
TF32_FIELDS = (0b0100, 0b1110)


def defined_fields(chunk: int, ordered: bool) -> tuple[int, ...]:
    """List the 4-bit fields that PTX defines.

    Args:
        chunk: Elements of a chunk: 2, 4 or 8.
        ordered: True for .ordered_metadata.

    Source: PTX ISA 9.7.14.6.1.
    """
    return TF32_FIELDS if chunk == 2 else ORDERED_FIELDS if ordered else UNORDERED_FIELDS


def undefined_fields(fields: Array, chunk: int, ordered: bool) -> Array:
    """Return True where a 4-bit field is one that PTX leaves undefined.

    Args:
        fields: Integer fields [...].
        chunk: Elements of a chunk: 2, 4 or 8.
        ordered: True for .ordered_metadata.

    Returns:
        bool [...].
    """
    table = sum(1 << field for field in defined_fields(chunk, ordered))  # bit f is 1 if field f is defined
    return (jnp.uint32(table) >> fields.astype(jnp.uint32)) & 1 == 0


def _units(fields: Array, clamped: bool = False) -> tuple[Array, Array]:
    """Return the two unit indices of each field, int32 from 0 to 3; `clamped` as in `gather`."""
    fields = fields.astype(jnp.int32)
    first, second = fields & 3, fields >> 2 & 3
    return (jnp.minimum(first, 2), jnp.maximum(second, 1)) if clamped else (first, second)


def stored_positions(fields: Array, chunk: int) -> Array:
    """Return the index in its chunk of each stored element of a row.

    Args:
        fields: 4-bit fields [..., chunks].
        chunk: Elements of a chunk: 2, 4 or 8.

    Returns:
        int32 [..., chunks * chunk / 2].
    """
    first, second = _units(fields)
    if chunk == 2:
        indices = (first >> 1)[..., None]
    elif chunk == 4:
        indices = jnp.stack([first, second], axis=-1)
    else:
        indices = jnp.stack([2 * first, 2 * first + 1, 2 * second, 2 * second + 1], axis=-1)
    return indices.reshape(*fields.shape[:-1], fields.shape[-1] * chunk // 2)


def gather(b: Array, fields: Array, chunk: int, clamped: bool = False) -> Array:
    """Gather the elements of B that each row of a sparse A multiplies.

    Every field has a meaning, as on hardware: it selects the two units of B that it names, in any order, and also the same unit twice. An
    undefined tf32 field therefore joins halves of two elements; measured on an NVIDIA H200 (tests/golden, tf32_metadata).

    The function selects among four elements, so no memory access depends on data.

    Args:
        b: Codes of B, [..., K, N].
        fields: 4-bit fields [..., M, chunks].
        chunk: Elements of a chunk: 2, 4 or 8.
        clamped: Treat a first index above 2 as 2 and a second index of 0 as 1, as sm_120 does for 4-bit types.

    Returns:
        Codes [..., M, K/2, N].
    """
    *batch, k, n = b.shape
    if chunk == 2:
        b = jnp.stack([b & 0xFFFF, b >> 16], axis=-2)
    units = b.reshape(*batch, 1, k // chunk, UNITS, max(1, chunk // UNITS), n)

    def select_unit(unit: Array) -> Array:
        index = unit[..., None, None]
        low, high = (jnp.where(index & 1 == 1, units[..., i + 1, :, :], units[..., i, :, :]) for i in (0, 2))
        return jnp.where(index & 2 == 2, high, low)

    first, second = (select_unit(unit) for unit in _units(fields, clamped))
    gathered = first | second << 16 if chunk == 2 else jnp.stack([first, second], axis=-3)
    return gathered.reshape(*first.shape[:-3], k // 2, n)


def keep_largest(magnitude: Limbs, chunk: int) -> Array:
    """Choose the ordered 4-bit fields that keep the units of largest magnitude; among equal units, the first.

    Units of two elements (chunk 8) are compared by the larger of their magnitudes, then by the smaller.

    Args:
        magnitude: Limbs of unsigned integers [..., M, K].
        chunk: Elements of a chunk: 2, 4 or 8.

    Returns:
        Fields [..., M, chunks], uint8.
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
        return jnp.where(second, TF32_FIELDS[1], TF32_FIELDS[0]).astype(jnp.uint8)
    keys = [tuple(v[..., i] for v in key) for i in range(UNITS)]
    # number of units that rank before unit i: larger units, and equal units to its left
    before = [sum(~less(keys[j], keys[i]) if j < i else less(keys[i], keys[j]) for j in range(UNITS) if j != i) for i in range(UNITS)]
    kept = jnp.stack(before, axis=-1) < 2
    first, second = jnp.argmax(kept, axis=-1), UNITS - 1 - jnp.argmax(kept[..., ::-1], axis=-1)
    return (first | second << 2).astype(jnp.uint8)


def compress(dense: Any, fields: Any, chunk: int) -> Any:
    """Compress dense rows to the elements that the fields keep.

    Args:
        dense: NumPy or JAX array [..., M, K] of any dtype.
        fields: 4-bit fields [..., M, chunks].
        chunk: Elements of a chunk: 2, 4 or 8.

    Returns:
        Array [..., M, K/2].
    """
    positions = stored_positions(jnp.asarray(fields), chunk)
    count = dense.shape[-1] // chunk
    chunks = dense.reshape(*dense.shape[:-1], count, chunk)
    positions = positions.reshape(*positions.shape[:-1], count, chunk // 2)
    if isinstance(dense, np.ndarray) and not isinstance(positions, Tracer):
        return np.take_along_axis(chunks, np.asarray(positions), axis=-1).reshape(*dense.shape[:-1], count * chunk // 2)
    return jnp.take_along_axis(chunks, positions, axis=-1).reshape(*dense.shape[:-1], count * chunk // 2)


def decompress(kept: Any, fields: Any, chunk: int) -> Any:
    """Decompress stored elements to dense rows; the inverse of `compress`.

    Args:
        kept: Stored elements: NumPy or JAX array [..., M, K/2] of any dtype.
        fields: 4-bit fields [..., M, chunks]. If a field names a unit twice, the later element wins.
        chunk: Elements of a chunk: 2, 4 or 8.

    Returns:
        Array [..., M, K], zero at positions that are not stored.
    """
    positions = stored_positions(jnp.asarray(fields), chunk)
    xp: Any = np if isinstance(kept, np.ndarray) and not isinstance(positions, Tracer) else jnp
    positions = xp.asarray(positions)
    stored = chunk // 2
    positions, kept = (v.reshape(*v.shape[:-1], v.shape[-1] // stored, stored, 1) for v in (positions, kept))
    dense = xp.zeros((*kept.shape[:-2], chunk), kept.dtype)
    for j in range(stored):
        dense = xp.where(positions[..., j, :] == np.arange(chunk), kept[..., j, :], dense)
    return dense.reshape(*dense.shape[:-2], dense.shape[-2] * chunk)
