"""Barriers of a block: `bar` and `barrier` with their 16 numbers, and those of a cluster, which has one block here.

Source: PTX ISA 9.7.13.1, 9.7.13.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tcemu.errors import UndefinedBehaviour
from tcemu.ptx.module import Negated, Operand, Register

if TYPE_CHECKING:
    from tcemu.ptx.link import Line, Linked

BARRIERS = 16
CLUSTER = BARRIERS  # the number under which threads wait for their cluster


class Reduction(NamedTuple):
    """A `bar.red` at which threads wait. values: their predicates, of those in the mask."""

    linked: Any
    operation: str
    destination: Operand
    kind: str
    values: np.ndarray
    mask: np.ndarray


class Barriers:
    """The barriers of the blocks of a chunk. waiting: the barrier at which each thread waits, -1 for none."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.waiting = np.full(shape, -1, np.int8)
        self.arrived = np.zeros((shape[0], BARRIERS), np.int64)  # by bar.arrive
        self.counts = np.zeros((shape[0], BARRIERS), np.int64)  # of threads; 0: all of the block
        self.cluster = np.zeros(shape, np.int64)  # how often each thread has arrived at its cluster's barrier
        self.reductions: list[Reduction] = []

    def arrive(self, line: Line, linked: Linked, mask: np.ndarray, schedule: Any) -> np.ndarray:
        """The threads arrive at a statement's barrier; those that then wait."""
        statement = line.statement
        parts = statement.qualifiers
        if "cluster" in parts:
            if "arrive" in parts:
                self.cluster[mask] += 1
                return np.zeros_like(mask)
            self.waiting[mask] = CLUSTER
            return mask
        operands = list(statement.operands)
        destination = operands.pop(0) if "red" in parts else None
        predicate = operands.pop() if "red" in parts else None
        number = schedule.value(operands[0], "u32", linked.names)
        count = schedule.value(operands[1], "u32", linked.names) if len(operands) > 1 else np.zeros(self.shape, np.uint32)
        self._look(line, number[mask], count[mask])
        blocks = np.nonzero(mask)[0]
        self.counts[blocks, number[mask]] = count[mask]
        if "arrive" in parts:
            np.add.at(self.arrived, (blocks, number[mask]), 1)
            return np.zeros_like(mask)
        self.waiting[mask] = number[mask]
        if destination is not None and predicate is not None:
            operation = next(part for part in parts if part in ("popc", "and", "or"))
            register = predicate.register if isinstance(predicate, Negated) else predicate
            values = np.asarray(schedule.value(register, "pred", linked.names)) != isinstance(predicate, Negated)
            kind = "u32" if operation == "popc" else "pred"
            self.reductions.append(Reduction(linked, operation, destination, kind, values, mask.copy()))
        return mask

    def _look(self, line: Line, number: np.ndarray, count: np.ndarray) -> None:
        wrong = None
        if (number >= BARRIERS).any():
            wrong = f"barrier {int(number.max())}; a block has those from 0 to {BARRIERS - 1}"
        elif (count % 32).any():
            wrong = f"a count of {int(count[count % 32 != 0][0])} threads; it must be a multiple of 32"
        if wrong:
            raise UndefinedBehaviour(f"line {line.statement.place.line}: {line.statement.opcode}: {wrong}. PTX ISA 9.7.13.1")

    def release(self, exited: np.ndarray, schedule: Any) -> np.ndarray | None:
        """The threads that need not wait any longer; None if there are none."""
        if not (self.waiting >= 0).any() and not self.arrived.any():
            return None
        alive = ~exited
        freed = np.zeros(self.shape, bool)
        present = alive.sum(-1)
        for number in range(BARRIERS):
            here = self.waiting == number
            if not here.any() and not self.arrived[:, number].any():
                continue
            wanted = np.where(self.counts[:, number] > 0, self.counts[:, number], present)
            done = here.sum(-1) + self.arrived[:, number] >= wanted
            self.arrived[done, number] = 0
            ends = here & done[:, None]
            if ends.any():
                self._reduce(ends, schedule)
            freed |= ends
        behind = np.where(alive, self.cluster, np.iinfo(np.int64).max).min(-1)
        freed |= (self.waiting == CLUSTER) & (self.cluster <= behind[:, None])
        self.waiting[freed] = -1
        return freed if freed.any() else None

    def _reduce(self, ends: np.ndarray, schedule: Any) -> None:
        """The results of reductions whose barrier is complete, written. Threads may have come by several statements."""
        kept = []
        for each in self.reductions:
            mine = each.mask & ends
            if not mine.any():
                kept.append(each)
                continue
            votes = np.zeros((self.shape[0], 1), np.int64)
            for other in self.reductions:
                votes[:, 0] += (other.values & other.mask & ends).sum(-1)
            everyone = ends.sum(-1, keepdims=True)
            result = {"popc": votes, "and": votes == everyone, "or": votes > 0}[each.operation]
            self._write(each, mine, np.broadcast_to(result, self.shape), schedule)
            if (each.mask & ~ends).any():
                kept.append(each._replace(mask=each.mask & ~ends))
        self.reductions = kept

    def _write(self, reduction: Reduction, mask: np.ndarray, value: np.ndarray, schedule: Any) -> None:
        destination = reduction.destination
        if not isinstance(destination, Register):
            return
        names, chunk = reduction.linked.names, schedule.chunk
        held, kind = names.held(destination), names.kind(destination)
        old = chunk.register(held, kind)
        chunk.registers[held] = jnp.where(jnp.asarray(mask), jnp.asarray(value.astype(old.dtype)), old)
