"""One chunk of a kernel's blocks as a value: registers, memory and faults."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.families import LANES
from tcemu.kernels.ptx.simt import device_memory, faults
from tcemu.kernels.ptx.simt.device_memory import LOCAL_ROOM, PARAM_ROOM, SHARED_OFFSET_MASK, SHARED_ROOM, Rooms, extract_rank, room_start
from tcemu.kernels.ptx.simt.special_registers import DIMENSIONS, SPECIAL_VALUES
from tcemu.kernels.ptx.text.module import Address, Float, Integer, Negated, Operand, Register, Sink
from tcemu.kernels.ptx.text.ptx_types import KINDS, storage_dtype

FIELDS = {"global": "memory", "shared": "shared", "shared::cluster": "shared", "local": "local", "param": "parameters"}  # by state space


@dataclass(frozen=True)
class Machine:
    """The state of a chunk of blocks while it executes a statement. Every method is pure, and traceable under `jax.enable_x64(True)`.

    Values of threads are raw bits [blocks, threads], the threads padded to whole warps; see `tcemu.kernels.ptx.text.ptx_types`.
    """

    active: Array  # bool: the threads that execute the statement
    registers: dict[str, Array]
    memory: Array  # uint32[words]: the buffers of global memory
    rooms: Rooms  # the buffers' positions in it
    shared: Array  # uint32[blocks, words]
    local: Array  # uint32[blocks, threads, words]
    parameters: Array  # uint32[blocks, words]: the entry's parameters
    blocks: Array  # uint32[blocks, 3]: %ctaid
    dimensions: Array  # uint32: `special_registers.DIMENSIONS`
    statement: Array  # int32: the statement's number
    clock: Array  # uint64
    faults: faults.FaultState
    extra: dict[str, Any] = field(default_factory=dict)  # further state of families of instructions, by key
    kinds: tuple[tuple[str, str], ...] = ()  # the registers' types
    cluster: tuple[int, int, int] = (1, 1, 1)  # blocks of a cluster; consecutive blocks of the chunk are one, in the order of their ranks
    explicit_cluster: bool = False  # the launch or the kernel has named the size of clusters

    # ---- threads

    def warps(self, value: Array) -> Array:
        """Reshape [blocks, threads, ...] to [blocks, warps, 32, ...]."""
        return value.reshape(value.shape[0], -1, LANES, *value.shape[2:])

    def threads(self, value: Array) -> Array:
        """Reshape [blocks, warps, 32, ...] to [blocks, threads, ...]."""
        return value.reshape(value.shape[0], -1, *value.shape[3:])

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        return prod(self.cluster)

    def ranks(self) -> Array:
        """Return the rank of each block in its cluster, uint32[blocks, 1]."""
        return (jnp.arange(self.active.shape[0], dtype=jnp.uint32) % np.uint32(self.cluster_size))[:, None]

    def clusters(self, value: Array) -> Array:
        """Reshape [blocks, threads, ...] to [clusters, threads of all its blocks, ...]."""
        return value.reshape(-1, self.cluster_size * value.shape[1], *value.shape[2:])

    def restrict_active(self, mask: Array) -> Machine:
        """Keep only the threads of the mask active."""
        return replace(self, active=self.active & mask)

    def _broadcast(self, value: Any) -> Array:
        return jnp.broadcast_to(value, self.active.shape)

    # ---- registers

    def register_kind(self, register: Register) -> str:
        """Return the declared type of a register."""
        special = SPECIAL_VALUES.get(register.name)
        return special[0] if special else dict(self.kinds)[register.name]

    def read(self, operand: Operand, kind: str) -> Array:
        """Return the raw bits of a register or a constant as a value of `kind`, truncated or extended by zeros."""
        if isinstance(operand, Negated):
            return ~self.read(operand.register, kind)
        if isinstance(operand, Register):
            name = operand.name
            value = SPECIAL_VALUES[name][1](self) if name in SPECIAL_VALUES else self.registers[name]
            return self._broadcast(convert_width(value, self.register_kind(operand), kind))
        return self._broadcast(constant_bits(operand, kind))

    def write(self, operand: Operand, kind: str, value: Array) -> Machine:
        """Write a value of `kind` to a register of the active threads; it is extended by its sign if the kind has one."""
        if isinstance(operand, Sink):
            return self
        if not isinstance(operand, Register):
            raise Unsupported(f"{operand}: a destination is a register, or _")
        name = operand.name
        value = convert_width(value, kind, self.register_kind(operand), extends=True)
        return replace(self, registers={**self.registers, name: jnp.where(self.active, value, self.registers[name])})

    # ---- memory

    def address(self, operand: Address) -> Array:
        """Return the address `[base+offset]` in the statement's space, uint64. The sum wraps at 32 bits if the base has 32."""
        if operand.base is None:
            return self._broadcast(np.uint64(operand.offset % 2**64))
        if not isinstance(operand.base, Register):
            raise Unsupported(f"{operand}: the address of {operand.base.name} is not known here")
        wide = KINDS[self.register_kind(operand.base)].bits == 64
        base = self.read(operand.base, "u64" if wide else "u32")
        if wide:
            return base + np.uint64(operand.offset % 2**64)
        return (base + np.uint32(operand.offset % 2**32)).astype(jnp.uint64)

    def load(
        self, space: str, address: Array, kind: str, count: int = 1, alignment: int | None = None
    ) -> tuple[tuple[Array, ...], Machine]:
        """Load `count` consecutive elements at each thread's address; 0 where a thread is inactive or its access is a fault.

        Args:
            space: "global", "const", "shared", "shared::cluster", "local", "param", or "" for generic addresses.
            address: uint64[blocks, threads].
            kind: Type of an element.
            count: Number of elements.
            alignment: Required alignment in bytes; None: the size of all elements together.

        Returns:
            The elements, and the machine with the faults recorded.
        """
        bits = KINDS[kind].bits
        size = count * bits // 8
        parts, machine = self.split_access(space, address, size, alignment)
        words = [jnp.zeros(self.active.shape, jnp.uint32)] * (-(-size // 4))
        for room, index, mask in parts:
            for i, word in enumerate(device_memory.gather_words(self.words(room), index, len(words))):
                words[i] = jnp.where(mask, word, words[i])
        per_word = max(32 // bits, 1)
        values = []
        for i in range(count):
            offset = np.uint64(i % per_word * bits // 8)
            values.append(device_memory.extract_element(words[i * bits // 32 :], address + offset, bits))
        good = sum((mask for _, _, mask in parts), jnp.zeros(self.active.shape, bool))
        return tuple(jnp.where(good, value, jnp.zeros((), value.dtype)) for value in values), machine

    def store(self, space: str, address: Array, kind: str, values: tuple[Array, ...], alignment: int | None = None) -> Machine:
        """Store consecutive elements at each active thread's address. If several threads store at one address, the last thread wins.

        Args: as of `load`; `values` are the elements.
        """
        bits = KINDS[kind].bits
        size = len(values) * bits // 8
        parts, machine = self.split_access(space, address, size, alignment)
        first = (address & np.uint64(3)).astype(jnp.int32)
        for room, start, mask in parts:
            flat = self.words(room)
            if size % 4 == 0 and (alignment is None or alignment >= size):  # aligned runs of one size coincide or are disjoint
                flat = device_memory.scatter_runs(flat, start, device_memory.join_elements(values, bits), mask)
            else:
                for i, value in enumerate(values):
                    index = start + ((first + np.int32(i * bits // 8)) >> 2)
                    flat = device_memory.scatter_element(flat, index, address + np.uint64(i * bits // 8), value, mask, bits)
            machine = machine.with_words(room, flat)
        return machine

    def split_access(
        self, space: str, address: Array, size: int, alignment: int | None = None
    ) -> tuple[list[tuple[str, Array, Array]], Machine]:
        """Split accesses of `size` bytes by the spaces that they may touch.

        Returns:
            For each space its name, the threads' first words and the mask of the threads that touch it; and the machine with the faults
            recorded.
        """
        machine, good = self._check_access(space, address, size, alignment or size)
        spaces = self._touched_spaces(space, address)
        return [(room, self.locate_words(room, address, size).first_word, mask & good) for room, mask in spaces], machine

    def words(self, space: str) -> Array:
        """Return the words of "global", "shared", "local" or "param", flat."""
        return getattr(self, FIELDS[space]).ravel()

    def with_words(self, space: str, flat: Array) -> Machine:
        """Replace the words of a space, flat as `words` returns them."""
        return replace(self, **{FIELDS[space]: flat.reshape(getattr(self, FIELDS[space]).shape)})

    def locate(self, space: str, address: Array, size: int) -> tuple[device_memory.WordLocations, Array, Machine]:
        """Locate `size` bytes at each address in `words(space)`; return also who may touch them and the machine with faults."""
        machine, good = self._check_access(space, address, size, size)
        return self.locate_words(space, address, size), good, machine

    def _touched_spaces(self, space: str, address: Array) -> list[tuple[str, Array]]:
        """Return the spaces that an access may touch, and the mask of the threads that touch each."""
        everywhere = self._broadcast(np.bool_(True))
        if space:
            name = {"const": "global", "shared::cluster": "shared"}.get(space, space)
            return [(name, everywhere)] if self.words(name).size else []
        room = address >> np.uint64(device_memory.ROOM_BITS)
        memories = [("shared", SHARED_ROOM, self.shared), ("local", LOCAL_ROOM, self.local), ("param", PARAM_ROOM, self.parameters)]
        found = [(name, room == np.uint64(number)) for name, number, words in memories if words.size]
        return [("global", room >= np.uint64(device_memory.CONST_ROOM)), *found]

    def locate_words(self, space: str, address: Array, size: int) -> device_memory.WordLocations:
        """Locate `size` bytes in the words of a space, at addresses of the space or generic ones."""
        if space in ("global", "const"):
            return device_memory.locate_in_rooms(self.rooms, address, size)
        if space.startswith("shared"):
            return self.locate_shared(address, size)
        blocks, threads = self.active.shape
        row = jnp.arange(blocks, dtype=jnp.int32)[:, None]
        number = PARAM_ROOM
        if space == "local":
            number, row = LOCAL_ROOM, row * np.int32(threads) + jnp.arange(threads, dtype=jnp.int32)
        return device_memory.locate_in_rows(_without_room(address, number), size, getattr(self, FIELDS[space]).shape[-1], row)

    def locate_shared(self, address: Array, size: int) -> device_memory.WordLocations:
        """Locate `size` bytes in the shared memory of the blocks that the addresses name, uint64[blocks, ...], generic ones or not."""
        address = _without_room(address, SHARED_ROOM)
        row = jnp.arange(address.shape[0], dtype=jnp.int32).reshape(-1, *(1,) * (address.ndim - 1))
        known: Any = True
        count = self.cluster_size
        if count > 1:
            rank = extract_rank(address).astype(jnp.int32)
            known = rank < count
            row = row - row % np.int32(count) + jnp.where(known, rank, 0)
            known &= address <= np.uint64(0xFFFFFFFF)
            address = address & np.uint64(SHARED_OFFSET_MASK)
        places = device_memory.locate_in_rows(address, size, self.shared.shape[-1], row)
        end = self.dimensions[DIMENSIONS.index("total_smem_size")].astype(jnp.uint64)  # shared memory is padded to words
        return places._replace(good=places.good & known & (address + np.uint64(size) <= end))

    def _check_access(self, space: str, address: Array, size: int, alignment: int) -> tuple[Machine, Array]:
        """Record the faults of an access, and return the threads that may make it."""
        named = space or "generic"
        inside = self._broadcast(np.bool_(False))
        for room, mask in self._touched_spaces(space, address):
            inside |= mask & self.locate_words(room, address, size).good
        aligned = (address & np.uint64(alignment - 1)) == 0
        good = self.active & inside & aligned
        if alignment == 1:
            return self.fault(~inside, f"bounds.{named}", address, size), good
        outside, misaligned = (f"bounds.{named}", (size,)), (f"alignment.{named}", (size, alignment))
        code = jnp.where(inside, faults.encode_fault(*misaligned, True)[0], faults.encode_fault(*outside, True)[0])
        return self._record_fault(self.active & ~good, code, address, []), good

    # ---- faults

    def fault(self, where: Array, key: str, address: Array | None = None, *values: Any) -> Machine:
        """Record a fault of the active threads in `where` that have met none before. The scheduler raises it after the basic block.

        Args:
            where: bool[blocks, threads].
            key: Key of `faults.MESSAGES`.
            address: The address that the message names, if it names one.
            *values: The message's values: ints, or integers of each thread, two of these at most.
        """
        code, arrays = faults.encode_fault(key, values, address is not None)
        return self._record_fault(self.active & self._broadcast(where), code, address, arrays)

    def _record_fault(self, where: Array, code: Any, address: Array | None, values: list[Array]) -> Machine:
        number = self.statement.astype(jnp.uint64) << np.uint64(faults.STATEMENT_SHIFT) | jnp.asarray(code, jnp.uint64)
        return replace(self, faults=faults.record_faults(self.faults, jnp.where(where, number, np.uint64(0)), address, values))


_STATIC = ("kinds", "cluster", "explicit_cluster")  # fields that a compiled statement is specialised to
jax.tree_util.register_dataclass(Machine, [name for name in Machine.__dataclass_fields__ if name not in _STATIC], list(_STATIC))


def _without_room(address: Array, room: int) -> Array:
    """Return generic addresses in a room as addresses in its space, and other addresses as they are."""
    start = np.uint64(room_start(room))
    return jnp.where(address >> np.uint64(device_memory.ROOM_BITS) == np.uint64(room), address - start, address)


# ---- values of other widths


def convert_width(value: Array, have: str, want: str, extends: bool = False) -> Array:
    """Convert raw bits of type `have` to the width of type `want`.

    They are truncated or extended by zeros; with `extends` and a signed `have`, extended by the sign.
    """
    source, target = KINDS[have], KINDS[want]
    if (source.bits == 1) != (target.bits == 1):
        raise Unsupported(f"a register of type .{have} is no operand of type .{want}")
    if target.bits == 1 or source.bits == target.bits:
        return value
    if target.bits < source.bits:
        cut = value & value.dtype.type((1 << target.bits) - 1) if target.bits < 64 else value
        return cut.astype(storage_dtype(want))
    value = value.astype(storage_dtype(want))
    if extends and source.signed:
        ones, sign = (1 << target.bits) - (1 << source.bits), 1 << source.bits - 1
        value = jnp.where(value & value.dtype.type(sign) != 0, value | value.dtype.type(ones), value)
    return value


def constant_bits(operand: Operand, kind: str) -> np.generic:
    """Return the raw bits of a constant as a value of `kind`."""
    bits = KINDS[kind].bits
    if isinstance(operand, Integer):
        value = operand.value
    elif isinstance(operand, Float):
        value = operand.bits
        if operand.width == 64 and bits < 64:
            narrow = {32: np.float32, 16: np.float16}[bits]
            with np.errstate(over="ignore"):
                single = np.uint64(value).view(np.float64).astype(narrow)
            value = int(single.view({32: np.uint32, 16: np.uint16}[bits]))
        elif operand.width == 32 and bits == 64:
            value = int(np.uint32(value).view(np.float32).astype(np.float64).view(np.uint64))
    else:
        raise Unsupported(f"{operand}: expected a register or a constant")
    return storage_dtype(kind).type(value != 0 if bits == 1 else value % (1 << bits))
