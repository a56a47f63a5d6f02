"""The arrays of the blocks that run at once, and what the names in a function's statements stand for among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.ptx.checks import KEY, Shadow, forgotten
from tcemu.ptx.faults import Noted
from tcemu.ptx.machine import Machine
from tcemu.ptx.module import Integer, Operand, Register, Symbol
from tcemu.ptx.special_values import SPECIAL, TIMERS
from tcemu.ptx.values import KINDS, dtype

PARAMETER = "%param+"  # before the byte at which it begins: the name under which a parameter of the entry is read as a register
DONATED = ("memory", "shared", "local", "extra")  # large arrays that a step changes in place

_forgotten = jax.jit(forgotten)


class Names(NamedTuple):
    """What the operands of a function's statements stand for.

    prefix: of its registers in a chunk; kinds: their types; symbols: addresses.
    """

    prefix: str
    kinds: dict[str, str]
    symbols: Mapping[str, int]

    def kind(self, register: Register) -> str:
        """The type of a register, also of a special one."""
        name = register.name
        return SPECIAL[name][0] if name in SPECIAL else self.kinds[name]

    def held(self, register: Register) -> str:
        """The name under which a chunk holds it."""
        name = register.name
        return name if name in SPECIAL or name.startswith(PARAMETER) else self.prefix + name

    def resolved(self, operand: Operand) -> Operand:
        """A symbol as its address; all else as it is."""
        return Integer(self.symbols[operand.name] + operand.offset) if isinstance(operand, Symbol) else operand


class Chunk:
    """The arrays of one chunk of blocks while it runs. registers: by their names with the function's prefix, made when first used.

    others: the leaves of the machine besides, in the order of `structure`; `field` has the numbers of those that are single arrays.
    """

    def __init__(self, machine: Machine) -> None:
        plain = replace(machine, registers={}, kinds=())
        leaves, self.structure = jax.tree.flatten_with_path(plain)
        self.others: list[Array] = [leaf for _, leaf in leaves]
        paths = [tuple(getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in path) for path, _ in leaves]
        self.field = {path[0]: number for number, path in enumerate(paths) if len(path) == 1}
        self._faults = [number for number, path in enumerate(paths) if path[0] == "faults"]
        self._shadow = [number for number, path in enumerate(paths) if path[:2] == ("extra", KEY)]
        self.donated = {number for number, path in enumerate(paths) if path[0] in DONATED}
        self.registers: dict[str, Array] = {}
        self.shape = machine.active.shape
        self.signature = (self.structure, tuple((leaf.shape, leaf.dtype.name) for leaf in self.others))
        self.executed = 0  # statements, which the clock counts
        self._zeros: dict[np.dtype, Array] = {}

    def __getitem__(self, name: str) -> Array:
        return self.others[self.field[name]]

    def __setitem__(self, name: str, value: Array) -> None:
        self.others[self.field[name]] = value

    @property
    def faults(self) -> Noted:
        """What threads have met."""
        return Noted(*(self.others[number] for number in self._faults))

    def order(self, blocks: np.ndarray) -> None:
        """Threads of the blocks have met: in checked mode their accesses to shared memory are ordered."""
        if self._shadow:
            state = Shadow(*(self.others[number] for number in self._shadow))
            for number, value in zip(self._shadow, _forgotten(state, jnp.asarray(blocks)), strict=True):
                self.others[number] = value

    def register(self, name: str, kind: str) -> Array:
        """A register's values; zeros before it is written."""
        found = self.registers.get(name)
        if found is not None:
            return found
        if name.startswith(PARAMETER):
            found = self.registers[name] = self._parameter(int(name.removeprefix(PARAMETER)), kind)
            return found
        if name not in SPECIAL:
            found = self.registers[name] = self.zeros(kind)
            return found
        if name in TIMERS:
            self["clock"] = jnp.asarray(np.uint64(self.executed))
        value = SPECIAL[name][1](_Geometry(self["active"], *(np.asarray(self[each]) for each in ("dimensions", "blocks", "clock"))))
        found = jnp.asarray(np.broadcast_to(value, self.shape))
        if name not in TIMERS:
            self.registers[name] = found
        return found

    def _parameter(self, at: int, kind: str) -> Array:
        """A parameter of the entry, from a byte on, for every thread."""
        data = np.asarray(self["parameters"]).view(np.uint8)[:, at : at + KINDS[kind].bits // 8]
        words = np.ascontiguousarray(data).view(f"u{KINDS[kind].bits // 8}").astype(dtype(kind))
        return jnp.asarray(np.broadcast_to(words, self.shape))

    def zeros(self, kind: str) -> Array:
        """Zeros of every thread, one array for all."""
        wanted = dtype(kind)
        if wanted not in self._zeros:
            self._zeros[wanted] = jnp.zeros(self.shape, wanted)
        return self._zeros[wanted]


@dataclass(frozen=True)
class _Geometry:
    """As much of a machine as special registers hang on."""

    active: Array
    dimensions: np.ndarray
    blocks: np.ndarray
    clock: np.ndarray
