"""Tensor memory of the blocks of a chunk, and its allocation in pieces of 32 columns.

Every block has all columns of the target, as if it were alone on its multiprocessor, so that an allocation waits for warps of its own
block only. An allocation takes the lowest columns that are free. Source: PTX ISA 9.7.16.1, 9.7.16.7; which columns a GPU gives is
unspecified.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.engine.isa.targets import TARGETS
from tcemu.engine.layouts.tensor_memory import LANES
from tcemu.kernels.ptx.simt.machine import Machine

TENSOR_MEMORY_KEY = "tensor_memory"  # of the state in `Machine.extra`
PIECE = 32  # columns
FREE = -1


class TensorMemory(NamedTuple):
    """The tensor memory of blocks."""

    cells: Array  # uint32[blocks, 128, columns]
    owners: Array  # int32[blocks, pieces]: the first column of the allocation that has each piece; -1: free
    last: Array  # int32[blocks]: columns of the block's last allocation; 0 before the first
    relinquished: Array  # bool[blocks]: the block may not allocate any more


def block_bytes(target: str) -> int:
    """Return the bytes of a block's tensor memory on a target."""
    return 4 * LANES * TARGETS[target].tensor_columns


def new_tensor_memory(blocks: int, target: str) -> TensorMemory:
    """Return the tensor memory of blocks that have allocated nothing; its cells are zeros."""
    columns = TARGETS[target].tensor_columns
    return TensorMemory(  # unlike jnp.zeros, device_put compiles nothing
        cells=jax.device_put(np.zeros((blocks, LANES, columns), np.uint32)),
        owners=jax.device_put(np.full((blocks, columns // PIECE), FREE, np.int32)),
        last=jax.device_put(np.zeros(blocks, np.int32)),
        relinquished=jax.device_put(np.zeros(blocks, bool)),
    )


def tensor_memory(machine: Machine) -> TensorMemory:
    """Return the tensor memory of a machine."""
    return machine.extra[TENSOR_MEMORY_KEY]


def replace_tensor_memory(machine: Machine, state: TensorMemory) -> Machine:
    """Return the machine with another tensor memory."""
    return replace(machine, extra={**machine.extra, TENSOR_MEMORY_KEY: state})


def find_room(owners: Any, columns: Any) -> Any:
    """Return the first column of the lowest free columns of each block, int32[blocks]; -1 where there is no room.

    Args:
        owners: As in `TensorMemory`; an array of JAX or of NumPy, as the result is.
        columns: Columns to allocate, int32[blocks].
    """
    xp: Any = np if isinstance(owners, np.ndarray) else jnp
    pieces, most = -(-columns // PIECE)[:, None], owners.shape[1]
    taken = xp.pad(xp.cumsum(owners != FREE, axis=1, dtype=np.int32), ((0, 0), (1, 0)))
    first = xp.arange(most)
    end = first + pieces
    inside = xp.take_along_axis(taken, xp.clip(end, 0, most), axis=1) - taken[:, :-1]
    fits = (end <= most) & (inside == 0)
    return xp.where(fits.any(1), PIECE * xp.argmax(fits, axis=1), -1).astype(np.int32)


def piece_mask(owners: Array, start: Array, columns: Array) -> Array:
    """Return bool[blocks, pieces], the pieces of columns that begin at `start`, int32[blocks] both."""
    first = PIECE * jnp.arange(owners.shape[1])
    return (first >= start[:, None]) & (first < (start + columns)[:, None])


def allocated_columns(owners: Array, start: Array) -> Array:
    """Return the columns of the allocation that begins at `start`, int32[blocks]; 0 where there is none."""
    return PIECE * (owners == start[:, None]).sum(1, dtype=jnp.int32)
