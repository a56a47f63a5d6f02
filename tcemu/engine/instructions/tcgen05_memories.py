"""Tensor memory and shared memory as `tcgen05` reaches them: cells from an address on, and units of 16 bytes behind a descriptor.

Source: PTX ISA 9.7.16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.base.errors import UndefinedBehaviour
from tcemu.engine.isa.targets import TARGETS, resolve_target
from tcemu.engine.isa.tcgen05 import Tcgen05Move
from tcemu.engine.layouts.shared_memory import ADDRESS_BITS, UNIT, UNIT_WORDS, descriptor_words
from tcemu.engine.layouts.strided_memory import as_memory
from tcemu.engine.layouts.tcgen05_memory import decode_tcgen05_descriptor, descriptor_problem, tcgen05_unit_addresses
from tcemu.engine.layouts.tensor_memory import LANES, QUARTER, SHIFT_COLUMNS, move_cells, shift_sources

LANE_BITS = 7  # bits of an address that count; of the column as many as the last one has
CANONICAL_NAN = 0x7FFFFFFF


# ---- tensor memory


class TensorMemory(NamedTuple):
    """The tensor memory of one CTA or of a pair, as a row of cells."""

    cells: Array  # uint32[..., ctas * 128 * columns]
    ctas: int
    columns: int

    @classmethod
    def from_array(cls, tmem: ArrayLike, ctas: int) -> TensorMemory:
        """Flatten uint32[..., 128, columns], of a pair uint32[..., 2, 128, columns]."""
        value = jnp.asarray(tmem)
        return cls(value.reshape(*value.shape[: -3 if ctas == 2 else -2], -1), ctas, value.shape[-1])

    def indices(self, address: Any, lane: Any, column: Any, cta: Any) -> Any:
        return cell_indices(address, lane, column, cta, self.columns)

    def load(self, indices: Any) -> Array:
        """Return the cells [..., *indices.shape]."""
        return jnp.take(self.cells, indices, axis=-1, mode="clip")

    def store(self, indices: Any, values: Array) -> Array:
        """Return tensor memory with other cells, in the shape that it had."""
        cells, rank = self.cells, np.ndim(indices)
        batch = jnp.broadcast_shapes(cells.shape[:-1], values.shape[: values.ndim - rank])
        values = jnp.broadcast_to(values, (*batch, *np.shape(indices))).reshape(*batch, -1)
        cells = jnp.broadcast_to(cells, (*batch, cells.shape[-1])).at[..., jnp.ravel(indices) if rank else indices].set(values)
        return cells.reshape(*batch, *((2,) if self.ctas == 2 else ()), LANES, self.columns)


def check_tensor_memory(tmem: ArrayLike, ctas: int, target: str) -> Array | np.ndarray:
    value = tmem if isinstance(tmem, jax.Array) else np.asarray(tmem)
    shape = ((2,) if ctas == 2 else ()) + (LANES, TARGETS[resolve_target(target)].tensor_columns)
    if value.dtype != jnp.uint32:
        raise TypeError(f"tmem: got {value.dtype}{list(value.shape)}; tensor memory is uint32[..., {', '.join(map(str, shape))}]")
    if value.shape[-len(shape) :] != shape:
        raise ValueError(f"tmem: got uint32{list(value.shape)}; tensor memory is uint32[..., {', '.join(map(str, shape))}]")
    return value


def split_address(address: Any, columns: int) -> tuple[Any, Any]:
    """Lane and column of an address; bits beyond them do not count."""
    value = address if isinstance(address, jax.Array) else np.asarray(address)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"address: got {value.dtype}; an address of tensor memory is an int or a uint32")
    if value.ndim:
        raise ValueError(f"address: got shape {list(value.shape)}; an address is one value, and jax.vmap gives each batch index its own")
    value = value.astype(np.uint32) if isinstance(value, np.ndarray) else value.astype(jnp.uint32)
    lane, column = value >> 16 & (1 << LANE_BITS) - 1, value & (1 << (columns - 1).bit_length()) - 1
    return lane.astype(np.int32), column.astype(np.int32)


def cell_indices(address: Any, lane: Any, column: Any, cta: Any, columns: int) -> Any:
    """Indices into flat tensor memory of cells that are counted from an address. Known ones are checked."""
    base_lane, base_column = split_address(address, columns)
    lanes, reached = base_lane + lane, base_column + column
    if not isinstance(lanes, jax.Array) and (lanes.max() >= LANES or reached.max() >= columns):
        raise UndefinedBehaviour(
            f"address: lane {int(lanes.max())} and column {int(reached.max())} are reached; tensor memory has {LANES} lanes and {columns} "
            "columns. PTX ISA 9.7.16.1"
        )
    return (cta * LANES + lanes % LANES) * columns + reached % columns


def move_places(op: Tcgen05Move, address: Any, columns: int, warp: Any, half_split_offset: int = 0) -> Any:
    """Return the cells of a warp's registers as indices into tensor memory, lane * columns + column.

    Args:
        op: `tcgen05.ld` or `tcgen05.st`.
        address: Address in tensor memory, which may be traced; of its lane the bits within a quarter count.
        columns: Columns of tensor memory.
        warp: Warp of the CTA, which may be traced.
        half_split_offset: As in `tcgen05.ld`.

    Returns:
        int32[32, n], thread and register; with .pack::16b and .unpack::16b int32[32, n, 2], the low half first.
    """
    cells = move_cells(op.tile, op.num, half_split_offset, packed=op.packed)
    lane, column = split_address(address, columns)
    own = QUARTER * (warp % 4) + lane % QUARTER
    return cell_indices(own.astype(np.uint32) << 16 | column.astype(np.uint32), cells.lane, cells.column, 0, columns)


def pack_cells(op: Tcgen05Move, cells: Array) -> Array:
    """Return the registers that `ld` makes of the cells that `move_places` names.

    Args:
        op: `tcgen05.ld`.
        cells: uint32[..., 32, n], with .pack::16b uint32[..., 32, n, 2].
    """
    return cells[..., 0] & 0xFFFF | cells[..., 1] << 16 if op.packed else cells


def unpack_cells(op: Tcgen05Move, registers: Array) -> Array:
    """Return the cells that `st` makes of registers, in the shape of `move_places`.

    Args:
        op: `tcgen05.st`.
        registers: uint32[..., 32, n].
    """
    return jnp.stack([registers & 0xFFFF, registers >> 16], axis=-1) if op.packed else registers


def reduce_registers(op: Tcgen05Move, values: Array) -> Array:
    """Return the minimum or maximum of each thread's registers. Of f32 -0 is below +0, and a NaN counts only with .NaN.

    Args:
        op: `tcgen05.ld.red`.
        values: uint32[..., n].
    """
    least = op.reduction == "min"
    if op.element != "f32":
        ordered = values if op.element == "u32" else values ^ np.uint32(1 << 31)
        found = ordered.min(-1) if least else ordered.max(-1)
        return found if op.element == "u32" else found ^ np.uint32(1 << 31)
    sign, magnitude = np.uint32(1 << 31), values & np.uint32(CANONICAL_NAN)
    values = magnitude if op.absolute else values
    nan = magnitude > np.uint32(0x7F800000)
    key = jnp.where(values >= sign, ~values, values | sign)  # ascends with the numbers
    key = jnp.where(nan, np.uint32(0xFFFFFFFF if least else 0), key)
    best = key.min(-1) if least else key.max(-1)
    found = jnp.where(best >= sign, best ^ sign, ~best)
    undefined = nan.any(-1) if op.nan else nan.all(-1)
    return jnp.where(undefined, np.uint32(CANONICAL_NAN), found)


def move_rows_down(cta_group: int, column: Any, tmem: ArrayLike) -> Array:
    """Compute `tcgen05.shift` at a column, which may be traced.

    Args:
        cta_group: CTAs whose tensor memory is changed.
        column: First of the columns.
        tmem: As in `tcgen05.shift`.
    """
    memory = TensorMemory.from_array(tmem, cta_group)
    cta, moved = np.arange(cta_group).reshape(-1, 1, 1), np.arange(SHIFT_COLUMNS)
    source = memory.indices(column, shift_sources()[:, None], moved, cta)
    to = memory.indices(column, np.arange(LANES)[:, None], moved, cta)
    return memory.store(to, memory.load(source))


# ---- shared memory


def check_shared_memory(shared: ArrayLike, ctas: int) -> Array:
    """Shared memory as uint32[..., ctas, words], checked."""
    memory = as_memory("shared", shared)
    if ctas == 2 and (memory.ndim < 2 or memory.shape[-2] != 2):
        raise ValueError(f"shared: got uint32{list(memory.shape)}; with cta_group::2 it is uint32[..., 2, words], one memory for each CTA")
    return memory if ctas == 2 else memory[..., None, :]


def check_descriptor(name: str, value: Any, *, absolute: bool = False) -> Any:
    words = descriptor_words(name, value)
    if words.ndim != 1:
        raise ValueError(f"{name}: got uint32{list(words.shape)}; a descriptor is one value, and jax.vmap gives each batch index its own")
    if not isinstance(words, Tracer):
        problems = filter(None, (descriptor_problem(each, absolute=absolute) for each in words.reshape(-1, 2)))
        if problem := next(problems, None):
            raise UndefinedBehaviour(f"{name}: {problem}")
    return words


def read_units(shared: Array, words: Any, major: str, lines: int, units: int) -> Array:
    """The 16-byte units behind a descriptor, uint32[..., ctas, lines, units, 4]."""
    addresses = tcgen05_unit_addresses(decode_tcgen05_descriptor(words), major, lines, units)
    limit = min(4 * shared.shape[-1], 1 << ADDRESS_BITS)
    if not isinstance(addresses, jax.Array) and (addresses > limit - UNIT).any():
        raise UndefinedBehaviour(
            f"descriptor: the operand reaches byte {int(addresses.max()) + UNIT - 1} of shared memory, which "
            f"has {limit}. PTX ISA 9.7.16.4.1"
        )
    blocks = shared[..., : shared.shape[-1] // UNIT_WORDS * UNIT_WORDS].reshape(*shared.shape[:-1], -1, UNIT_WORDS)
    return jnp.take(blocks, jnp.asarray(addresses // UNIT), axis=-2, mode="clip")
