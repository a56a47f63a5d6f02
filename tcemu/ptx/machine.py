"""One chunk of a kernel's blocks as a value: what the threads hold, and the memory that they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.errors import Unsupported
from tcemu.isa.instructions import LANES
from tcemu.ptx import checks, faults, memory, pending
from tcemu.ptx.memory import LOCAL_ROOM, PARAM_ROOM, SHARED_ROOM, Rooms, window
from tcemu.ptx.module import Address, Float, Integer, Negated, Operand, Register, Sink, Statement
from tcemu.ptx.special_values import DIMENSIONS, SPECIAL
from tcemu.ptx.values import KINDS, dtype


@dataclass(frozen=True)
class Machine:
    """Blocks of one launch, some statement being executed. Every method is pure, and traceable under `jax.enable_x64(True)`.

    Values of threads are [blocks, threads], threads padded to whole warps; raw bits, see `tcemu.ptx.values`.
    active: bool, the threads that execute the statement. registers: by name. memory: uint32 [words], the buffers of global memory, in
    `rooms`. shared: uint32 [blocks, words]. local: uint32 [blocks, threads, words]. parameters: uint32 [blocks, words] of the entry.
    blocks: uint32 [blocks, 3], %ctaid. dimensions: uint32, see `special_values.DIMENSIONS`. statement: int32, its number.
    clock: uint64. faults: the first one of each thread. extra: what families of instructions keep, by their names.
    kinds: the types of the registers.
    """

    active: Array
    registers: dict[str, Array]
    memory: Array
    rooms: Rooms
    shared: Array
    local: Array
    parameters: Array
    blocks: Array
    dimensions: Array
    statement: Array
    clock: Array
    faults: faults.Noted
    extra: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[tuple[str, str], ...] = ()

    # ---- threads

    def warps(self, value: Array) -> Array:
        """[blocks, threads, ...] -> [blocks, warps, 32, ...]."""
        return value.reshape(value.shape[0], -1, LANES, *value.shape[2:])

    def threads(self, value: Array) -> Array:
        """[blocks, warps, 32, ...] -> [blocks, threads, ...]."""
        return value.reshape(value.shape[0], -1, *value.shape[3:])

    def within(self, mask: Array) -> Machine:
        """The same machine with fewer threads active: those of the mask."""
        return replace(self, active=self.active & mask)

    def _full(self, value: Any) -> Array:
        return jnp.broadcast_to(value, self.active.shape)

    # ---- registers

    def kind_of(self, register: Register) -> str:
        """The declared type of a register."""
        special = SPECIAL.get(register.name)
        return special[0] if special else dict(self.kinds)[register.name]

    def read(self, operand: Operand, kind: str) -> Array:
        """The raw bits of a register or a constant as a value of `kind`: cut to its width, or extended by zeros."""
        if isinstance(operand, Negated):
            return ~self.read(operand.register, kind)
        if isinstance(operand, Register):
            name = operand.name
            value = SPECIAL[name][1](self) if name in SPECIAL else self.registers[name]
            return self._full(fitted(value, self.kind_of(operand), kind))
        return self._full(constant(operand, kind))

    def write(self, operand: Operand, kind: str, value: Array) -> Machine:
        """The machine with a value of `kind` in a register, in the active threads; extended by its sign if the kind has one."""
        if isinstance(operand, Sink):
            return self
        if not isinstance(operand, Register):
            raise Unsupported(f"{operand}: a destination is a register, or _")
        name = operand.name
        value = fitted(value, kind, self.kind_of(operand), extends=True)
        return replace(self, registers={**self.registers, name: jnp.where(self.active, value, self.registers[name])})

    # ---- memory

    def address(self, operand: Address) -> Array:
        """uint64: the address that `[base+offset]` names, in the statement's space. A base of 32 bits wraps there."""
        if operand.base is None:
            return self._full(np.uint64(operand.offset % 2**64))
        if not isinstance(operand.base, Register):
            raise Unsupported(f"{operand}: the address of {operand.base.name} is not known here")
        wide = KINDS[self.kind_of(operand.base)].bits == 64
        base = self.read(operand.base, "u64" if wide else "u32")
        if wide:
            return base + np.uint64(operand.offset % 2**64)
        return (base + np.uint32(operand.offset % 2**32)).astype(jnp.uint64)

    def load(
        self, space: str, address: Array, kind: str, count: int = 1, alignment: int | None = None
    ) -> tuple[tuple[Array, ...], Machine]:
        """`count` elements one after the other at each thread's address; 0 where a thread is not active, or its access is a fault.

        space: "global", "const", "shared", "local", "param", or "" for generic. alignment: in bytes, None: that of all elements together.
        """
        bits = KINDS[kind].bits
        size = count * bits // 8
        parts, machine = self.parts(space, address, size, alignment)
        words = [jnp.zeros(self.active.shape, jnp.uint32)] * (-(-size // 4))
        for room, at, mine in parts:
            for i, word in enumerate(memory.gather(self.words(room), at, len(words))):
                words[i] = jnp.where(mine, word, words[i])
            if room == "shared":
                machine = pending.reading(checks.reading(machine, at, address, size, mine), at, address, size, mine)
        if bits < 32:
            per_word = 32 // bits
            values = [memory.element(words[i // per_word :], address + np.uint64(i % per_word * bits // 8), bits) for i in range(count)]
        else:
            values = [memory.element(words[i * bits // 32 :], address, bits) for i in range(count)]
        good = sum((mine for _, _, mine in parts), jnp.zeros(self.active.shape, bool))
        return tuple(jnp.where(good, value, jnp.zeros((), value.dtype)) for value in values), machine

    def store(self, space: str, address: Array, kind: str, values: tuple[Array, ...], alignment: int | None = None) -> Machine:
        """The machine with elements stored one after the other at each active thread's address.

        Of threads that meet in one place, the last one wins.
        """
        bits = KINDS[kind].bits
        parts, machine = self.parts(space, address, len(values) * bits // 8, alignment)
        first = (address & np.uint64(3)).astype(jnp.int32)
        for room, start, mine in parts:
            flat = self.words(room)
            for i, value in enumerate(values):
                at = start + ((first + np.int32(i * bits // 8)) >> 2)
                flat = memory.scatter_element(flat, at, address + np.uint64(i * bits // 8), value, mine, bits)
            machine = machine.with_words(room, flat)
            if room == "shared":
                size = len(values) * bits // 8
                machine = checks.writing(machine, self.shared, start, address, size, mine)
                machine = checks.colliding(machine, checks.bytes_of(values, bits), start, address, size, mine)
        return machine

    def parts(self, space: str, address: Array, size: int, alignment: int | None = None) -> tuple[list[tuple[str, Array, Array]], Machine]:
        """Where accesses of `size` bytes go: for each space that they may touch its name, the first words, and which threads touch it.

        The machine comes back with the faults noted.
        """
        machine, good = self._checked(space, address, size, alignment or size)
        spaces = self._spaces(space, address)
        return [(room, self._places(room, address, size).at, mine & good) for room, mine in spaces], machine

    def with_shared(self, words: Array) -> Machine:
        """The machine with other words in shared memory."""
        return replace(self, shared=words)

    def words(self, space: str) -> Array:
        """The words of "global", "shared", "local" or "param", flat."""
        return {"global": self.memory, "shared": self.shared, "local": self.local, "param": self.parameters}[space].ravel()

    def with_words(self, space: str, flat: Array) -> Machine:
        """The machine with other words in a space, flat as `words` gives them."""
        name = {"global": "memory", "param": "parameters"}.get(space, space)
        return replace(self, **{name: flat.reshape(getattr(self, name).shape)})

    def place(self, space: str, address: Array, size: int) -> tuple[memory.Places, Array, Machine]:
        """Where `size` bytes at each address lie in `words(space)`, where threads may touch them, and the machine with the faults noted."""
        machine, good = self._checked(space, address, size, size)
        return self._places(space, address, size), good, machine

    def _spaces(self, space: str, address: Array) -> list[tuple[str, Array]]:
        """The spaces that an access may touch, and which threads touch each."""
        everywhere = self._full(np.bool_(True))
        if space:
            name = "global" if space == "const" else space
            return [(name, everywhere)] if self.words(name).size else []
        room = address >> np.uint64(memory.ROOM_BITS)
        held = [("shared", SHARED_ROOM, self.shared), ("local", LOCAL_ROOM, self.local), ("param", PARAM_ROOM, self.parameters)]
        found = [(name, room == np.uint64(number)) for name, number, words in held if words.size]
        return [("global", room >= np.uint64(memory.CONST_ROOM)), *found]

    def _places(self, space: str, address: Array, size: int) -> memory.Places:
        """Where `size` bytes at addresses lie in the words of a space. A generic address may stand for one of the space."""
        if space in ("global", "const"):
            return memory.in_rooms(self.rooms, address, size)
        blocks, threads = self.active.shape
        row = jnp.arange(blocks, dtype=jnp.int32)[:, None]
        number = {"shared": SHARED_ROOM, "local": LOCAL_ROOM, "param": PARAM_ROOM}[space]
        start = np.uint64(window(number))
        address = jnp.where(address >> np.uint64(memory.ROOM_BITS) == np.uint64(number), address - start, address)
        if space == "local":
            row = row * np.int32(threads) + jnp.arange(threads, dtype=jnp.int32)
        held = {"shared": self.shared, "local": self.local, "param": self.parameters}[space]
        places = memory.in_rows(address, size, held.shape[-1], row)
        if space != "shared":
            return places
        end = self.dimensions[DIMENSIONS.index("total_smem_size")].astype(jnp.uint64)  # the words are whole, the bytes need not be
        return places._replace(good=places.good & (address + np.uint64(size) <= end))

    def _checked(self, space: str, address: Array, size: int, alignment: int) -> tuple[Machine, Array]:
        """The machine with the fault of an access noted, and the threads that may make it."""
        named = space or "generic"
        inside = self._full(np.bool_(False))
        for room, mine in self._spaces(space, address):
            inside |= mine & self._places(room, address, size).good
        aligned = (address & np.uint64(alignment - 1)) == 0
        good = self.active & inside & aligned
        if alignment == 1:
            return self.fault(~inside, f"bounds.{named}", None, address, size), good
        outside, misaligned = (f"bounds.{named}", (size,)), (f"alignment.{named}", (size, alignment))
        code = jnp.where(inside, faults.coded(*misaligned, True)[0], faults.coded(*outside, True)[0])
        return self._noted(self.active & ~good, code, address, []), good

    # ---- faults

    def fault(self, where: Array, key: str, statement: Statement | None = None, address: Array | None = None, *values: Any) -> Machine:
        """The machine with a fault noted, of the active threads in `where` that have met none before.

        key: of `faults.MESSAGES`. The machine knows its statement; the argument is for the reader. values: of the message's places, ints
        or integers of each thread, two of these at most. The driver raises the fault after the statement's piece.
        """
        del statement
        code, told = faults.coded(key, values, address is not None)
        return self._noted(self.active & self._full(where), code, address, told)

    def _noted(self, where: Array, code: Any, address: Array | None, values: list[Array]) -> Machine:
        number = self.statement.astype(jnp.uint64) << np.uint64(faults.STATEMENT) | jnp.asarray(code, jnp.uint64)
        return replace(self, faults=faults.note(self.faults, jnp.where(where, number, np.uint64(0)), address, values))


jax.tree_util.register_dataclass(Machine, [name for name in Machine.__dataclass_fields__ if name != "kinds"], ["kinds"])


def begin(
    kinds: Mapping[str, str], *, blocks: int = 1, threads: int = LANES, buffers: tuple[Any, ...] = (), shared: int = 0, local: int = 0
) -> Machine:
    """A machine at its beginning, all threads active, registers and memory zero: the start of tests of single instructions.

    kinds: the registers and their types. buffers: uint32 arrays in global memory, at `window(FIRST_ROOM)`, `window(FIRST_ROOM + 1)`, ...
    shared, local: in words. Call it under `jax.enable_x64(True)`.
    """
    sizes = [0] * memory.FIRST_ROOM + [4 * len(buffer) for buffer in buffers]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]) // 4
    held = {name: jnp.zeros((blocks, threads), dtype(kind)) for name, kind in kinds.items()}
    words = jnp.concatenate([jnp.zeros(1, jnp.uint32), *map(jnp.asarray, buffers)])
    return Machine(
        active=jnp.ones((blocks, threads), bool),
        registers=held,
        memory=words,
        rooms=Rooms(jnp.asarray(starts + 1), jnp.asarray(sizes, jnp.uint64)),
        shared=jnp.zeros((blocks, shared), jnp.uint32),
        local=jnp.zeros((blocks, threads, local), jnp.uint32),
        parameters=jnp.zeros((blocks, 0), jnp.uint32),
        blocks=jnp.zeros((blocks, 3), jnp.uint32).at[:, 0].set(jnp.arange(blocks, dtype=jnp.uint32)),
        dimensions=jnp.asarray([threads, 1, 1, blocks, 1, 1, 4 * shared, 0], jnp.uint32),
        statement=jnp.int32(0),
        clock=jnp.uint64(0),
        faults=faults.none_noted((blocks, threads)),
        kinds=tuple(kinds.items()),
    )


# ---- values of other widths


def fitted(value: Array, have: str, want: str, extends: bool = False) -> Array:
    """A value of one type as one of another width: cut, or extended by zeros; by its sign if it `extends` and `have` has one."""
    source, target = KINDS[have], KINDS[want]
    if (source.bits == 1) != (target.bits == 1):
        raise Unsupported(f"a register of type .{have} is no operand of type .{want}")
    if target.bits == 1 or source.bits == target.bits:
        return value
    if target.bits < source.bits:
        cut = value & value.dtype.type((1 << target.bits) - 1) if target.bits < 64 else value
        return cut.astype(dtype(want))
    value = value.astype(dtype(want))
    if extends and source.signed:
        ones, sign = (1 << target.bits) - (1 << source.bits), 1 << source.bits - 1
        value = jnp.where(value & value.dtype.type(sign) != 0, value | value.dtype.type(ones), value)
    return value


def constant(operand: Operand, kind: str) -> np.generic:
    """The raw bits of a constant as a value of `kind`."""
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
        raise Unsupported(f"{operand}: wanted a register or a constant")
    return dtype(kind).type(value != 0 if bits == 1 else value % (1 << bits))
