"""The places of operands of `wgmma` in shared memory, and of boxes of tensors in global memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.engine.instructions.wgmma import operand_addresses
from tcemu.engine.isa.families import Wgmma
from tcemu.engine.layouts.shared_memory import SWIZZLE_BYTES, decode_descriptor
from tcemu.kernels.ptx.simt import tensor_maps as maps
from tcemu.kernels.ptx.tensor.tensor_copies import TensorBox, decode_tensor_map

WARP_ROWS = 16  # rows of A of a wgmma that a warp has


@lru_cache(maxsize=4096)
def descriptor_units(op: Wgmma, name: str, major: str, value: int) -> tuple[np.ndarray, tuple[np.ndarray, ...], int, int]:
    """Return the runs of 16 bytes of A or B in shared memory, each once.

    Also return the runs of each warp's rows of A, where it is K-major, the bytes of the descriptor's swizzle, and the number of runs that
    are read again.
    """
    words = np.array([value & 0xFFFFFFFF, value >> 32], np.uint32)
    lines = np.asarray(operand_addresses(op, name, major, words)).astype(np.int64)
    sliced = name == "a" and major == "k" and len(lines) == 4 * WARP_ROWS
    slices = tuple(np.unique(lines[WARP_ROWS * warp : WARP_ROWS * (warp + 1)]) for warp in range(4)) if sliced else ()
    units = np.unique(lines)
    return units, slices, SWIZZLE_BYTES[int(decode_descriptor(words).mode)], lines.size - len(units)


@lru_cache(maxsize=1024)
def decode_map(words: bytes, rank: int) -> tuple[TensorBox, int]:
    """Return the fields of a tensor map as NumPy's arrays, and the bytes of its swizzle."""
    data = np.frombuffer(words, np.uint32)
    with jax.enable_x64(True):
        box = jax.tree.map(np.asarray, decode_tensor_map(jnp.asarray(data), rank))
    return box, maps.SWIZZLES[int(data[maps.KIND_WORD] >> maps.FIELD_SHIFTS["swizzle_mode"] & 3)]


def box_ranges(box: TensorBox, coordinates: Sequence[int]) -> list[tuple[int, int]]:
    """Return the addresses and sizes of the rows of a box that lie in the tensor; nothing for a box that is not followed."""
    bits = int(box.bits)
    if bits % 8 or box.is_interleaved or len(coordinates) != len(box.dims):
        return []
    low, high = max(coordinates[0], 0), min(coordinates[0] + int(box.boxes[0]), int(box.dims[0]))
    if low >= high:
        return []
    starts = np.array([int(box.start) + low * bits // 8], np.int64)
    for axis in range(1, len(box.dims)):
        at = coordinates[axis] + np.arange(int(box.boxes[axis])) * box.steps[axis]
        at = at[(at >= 0) & (at < box.dims[axis])]
        starts = (starts[:, None] + at * box.strides[axis]).ravel()
    return [(int(start), (high - low) * bits // 8) for start in starts]
