"""The arrays of a chunk of blocks while it runs, and the table that maps the names in a function's statements to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from tcemu.kernels.ptx.simt.device_memory import RANK_SHIFT
from tcemu.kernels.ptx.simt.faults import FaultState
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.simt.special_registers import SPECIAL_VALUES, TIMERS
from tcemu.kernels.ptx.simt.stack_memory import STACK_PREFIX
from tcemu.kernels.ptx.simt.tensor_memory_state import TENSOR_MEMORY_KEY, TensorMemory, find_room
from tcemu.kernels.ptx.text.module import Integer, Operand, Register, Symbol
from tcemu.kernels.ptx.text.ptx_types import KINDS, storage_dtype

PARAMETER_PREFIX = "%param+"  # a parameter of the entry that is read as a register is named by this and its byte offset
SHARED_PREFIX = "%shared+"  # likewise an address in the block's own shared memory, where clusters have several blocks
COMMON_PREFIXES = (PARAMETER_PREFIX, SHARED_PREFIX, STACK_PREFIX)  # of registers that all functions share
DONATED_FIELDS = ("memory", "shared", "local", "extra")  # large arrays that a step changes in place


class NameTable(NamedTuple):
    """The registers and symbols that a function's statements may name."""

    prefix: str  # of the function's registers in a chunk
    kinds: dict[str, str]  # types of registers
    symbols: Mapping[str, int]  # addresses
    ranked: frozenset[str] = frozenset()  # the symbols whose addresses contain the rank of the block

    def kind(self, register: Register) -> str:
        """Return the type of a register, special ones included."""
        name = register.name
        if name.startswith((SHARED_PREFIX, STACK_PREFIX)):
            return "b64"
        return SPECIAL_VALUES[name][0] if name in SPECIAL_VALUES else self.kinds[name]

    def qualified_name(self, register: Register) -> str:
        """Return the name of a register in a chunk."""
        name = register.name
        return name if name in SPECIAL_VALUES or name.startswith(COMMON_PREFIXES) else self.prefix + name

    def resolve(self, operand: Operand) -> Operand:
        """Replace a symbol by its address; return other operands as they are."""
        if not isinstance(operand, Symbol):
            return operand
        address = self.symbols[operand.name] + operand.offset
        return Register(f"{SHARED_PREFIX}{address}") if operand.name in self.ranked else Integer(address)


@dataclass(frozen=True)
class ChunkLayout:
    """The shapes of a chunk's arrays: all that a compiled statement depends on. Hashable."""

    structure: Any  # the tree of a `Machine` without registers
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # its arrays, in the order of the tree
    device: Any  # where they are
    paths: tuple[tuple[Any, ...], ...] = field(compare=False)  # of each array: names of fields and keys; follows from `structure`

    @property
    def shape(self) -> tuple[int, ...]:
        """Blocks and threads."""
        return self.leaves[self.leaf_index["active"]].shape

    @property
    def leaf_index(self) -> dict[str, int]:
        """The positions of the fields that are single arrays."""
        return {path[0]: index for index, path in enumerate(self.paths) if len(path) == 1}

    @property
    def donated_leaves(self) -> list[int]:
        """The positions of the arrays that a step changes in place."""
        return [index for index, path in enumerate(self.paths) if path[0] in DONATED_FIELDS]

    def leaves_below(self, *path: str) -> list[int]:
        """Return the positions of the arrays within a field."""
        return [index for index, each in enumerate(self.paths) if each[: len(path)] == path]


@lru_cache(maxsize=256)
def _shared_layout(layout: ChunkLayout) -> ChunkLayout:
    """Return the first layout that is equal, which tells by its identity that the programs of a statement fit."""
    return layout


class Chunk:
    """The arrays of a chunk of blocks while it runs."""

    def __init__(self, machine: Machine) -> None:
        leaves, structure = jax.tree.flatten_with_path(replace(machine, registers={}, kinds=()))
        paths = (tuple(getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in path) for path, _ in leaves)
        self.leaves: list[Array] = [leaf for _, leaf in leaves]  # all of the machine but its registers
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves)
        (device,) = machine.memory.devices()
        self.layout = _shared_layout(ChunkLayout(structure, shapes, device, tuple(paths)))
        self.registers: dict[str, Array] = {}  # by qualified names; created on first use
        self.previous: dict[str, Array | None] = {}  # values that the current statement has overwritten; None: never written before
        self.shape = self.layout.shape
        self.all_active = False  # all threads execute the current statements
        self.statement_count = 0  # statements executed so far, which the clock shows
        self.cluster, self.explicit_cluster = machine.cluster, machine.explicit_cluster
        self._leaf_index = self.layout.leaf_index
        self._faults = self.layout.leaves_below("faults")
        self._zeros: dict[np.dtype, Array] = {}

    def __getitem__(self, name: str) -> Array:
        return self.leaves[self._leaf_index[name]]

    def __setitem__(self, name: str, value: Array) -> None:
        self.leaves[self._leaf_index[name]] = value

    @property
    def faults(self) -> FaultState:
        """The faults that threads have met."""
        return FaultState(*(self.leaves[index] for index in self._faults))

    @property
    def tensor_memory(self) -> TensorMemory | None:
        """The tensor memory of the blocks; None for kernels without `tcgen05`."""
        leaves = self.layout.leaves_below("extra", TENSOR_MEMORY_KEY)
        return TensorMemory(*(self.leaves[index] for index in leaves)) if leaves else None

    def require_tensor_memory(self) -> TensorMemory:
        """Return the tensor memory of the blocks.

        Raises:
            ValueError: The kernel has no `tcgen05` instruction.
        """
        memory = self.tensor_memory
        if memory is None:
            raise ValueError("the kernel has no tcgen05 instruction, and its blocks have no tensor memory")
        return memory

    def find_tensor_memory(self, columns: np.ndarray) -> np.ndarray:
        """Return the first column of free tensor memory of each block for as many columns, int32[blocks]; -1 where there is no room."""
        return find_room(np.asarray(self.require_tensor_memory().owners), columns)

    def register(self, name: str, kind: str) -> Array:
        """Return a register's values; zeros before it is written."""
        found = self.registers.get(name)
        if found is not None:
            return found
        if name.startswith(PARAMETER_PREFIX):
            found = self.registers[name] = self._read_parameter(int(name.removeprefix(PARAMETER_PREFIX)), kind)
            return found
        if name.startswith(SHARED_PREFIX):
            rank = np.arange(self.shape[0], dtype=np.uint64)[:, None] % np.uint64(prod(self.cluster))
            value = rank << np.uint64(RANK_SHIFT) | np.uint64(int(name.removeprefix(SHARED_PREFIX)))
            found = self.registers[name] = jax.device_put(np.broadcast_to(value, self.shape))
            return found
        if name not in SPECIAL_VALUES:
            found = self.registers[name] = self._read_zeros(kind)
            return found
        if name in TIMERS:
            self["clock"] = jax.device_put(np.uint64(self.statement_count))
        dimensions, blocks, clock = (np.asarray(self[each]) for each in ("dimensions", "blocks", "clock"))
        fields = SimpleNamespace(
            active=self["active"], dimensions=dimensions, blocks=blocks, clock=clock, cluster=self.cluster,
            explicit_cluster=self.explicit_cluster,
        )  # fmt: skip
        found = jax.device_put(np.broadcast_to(SPECIAL_VALUES[name][1](fields), self.shape))
        if name not in TIMERS:
            self.registers[name] = found
        return found

    def write_register(self, name: str, value: Array) -> None:
        """Replace a register's values."""
        self.previous[name] = self.registers.get(name)
        self.registers[name] = value

    def _read_parameter(self, start: int, kind: str) -> Array:
        """Return the value at a byte of the entry's parameters, for every thread."""
        data = np.asarray(self["parameters"]).view(np.uint8)[:, start : start + KINDS[kind].bits // 8]
        words = np.ascontiguousarray(data).view(f"u{KINDS[kind].bits // 8}").astype(storage_dtype(kind))
        return jax.device_put(np.broadcast_to(words, self.shape))

    def _read_zeros(self, kind: str) -> Array:
        """Return zeros for every thread; one array serves all registers of a dtype."""
        dtype = storage_dtype(kind)
        if dtype not in self._zeros:
            self._zeros[dtype] = jax.device_put(np.zeros(self.shape, dtype))
        return self._zeros[dtype]
