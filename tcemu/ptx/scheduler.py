"""Who runs next: the blocks of a chunk go on together, each thread at its piece, until all have exited.

The piece with the least number at which threads stand runs first, for all of them: so those that parted meet again (see `flow`). Pieces of
loops that wait for other threads run when nothing else can. A piece that was passed over for long has its turn all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from tcemu.errors import UndefinedBehaviour
from tcemu.isa.instructions import LANES
from tcemu.ptx.barriers import Barriers
from tcemu.ptx.chunk import Chunk, Names
from tcemu.ptx.faults import Trapped
from tcemu.ptx.flow import Gathering
from tcemu.ptx.link import Kernel, Line, Linked
from tcemu.ptx.machine import constant
from tcemu.ptx.module import Negated, Operand, Register

IDLE = np.int64(2**62)  # the key of threads that wait or have exited
PATIENCE = 4096  # pieces after which one that was passed over runs
LOOKS = 256  # pieces between looks at who was passed over
KEPT_MASKS = 64
Watch = Callable[[Line, Chunk, np.ndarray], None]


class Report(Protocol):
    """What says where something happened."""

    def where(self, line: Line, block: int, thread: int) -> str:
        """A statement, and who executed it."""
        ...

    def check(self, chunk: Chunk) -> None:
        """Raises the fault that the chunk has noted, if there is one."""
        ...


class StepLimit(RuntimeError):
    """A kernel executed more statements than it may."""


class Schedule:
    """The threads of a chunk. pc: the piece at which each stands; keys: in which order they go on, IDLE for those that cannot."""

    def __init__(
        self, kernel: Kernel, chunk: Chunk, present: np.ndarray, step_limit: int, report: Report, watch: Watch | None = None
    ) -> None:
        self.kernel, self.chunk, self.limit, self.report, self.watch = kernel, chunk, step_limit, report, watch
        self.shape = present.shape
        self.exited = ~present
        self.pc = np.zeros(self.shape, np.int32)
        self.depth = np.zeros(self.shape, np.int32)
        self.calls = np.zeros((*self.shape, kernel.depth), np.int32)  # the pieces whose calls each thread is in
        self.bits = max(len(kernel.pieces) - 1, 1).bit_length()
        self.levels = max(60 // self.bits, 1)
        self.keys = np.full(self.shape, IDLE)
        self.barriers = Barriers(self.shape)
        self.last_run = np.zeros(len(kernel.pieces), np.int64)
        self.time = 0
        self.masks: dict[bytes, Any] = {}
        self.polls = np.array([linked.piece.polls for linked in kernel.pieces])
        self._stand(present)

    def run(self) -> None:
        """Runs until all threads have exited. Raises what the kernel does wrong."""
        while True:
            number, mask = self._next()
            if number < 0:
                break
            self.time += 1
            self.last_run[number] = self.time
            linked = self.kernel.pieces[number]
            self._execute(linked.lines, mask)
            self._follow(number, linked, mask)
            if self.chunk.executed > self.limit:
                raise StepLimit(
                    f"the kernel has executed {self.chunk.executed} statements, more than step_limit={self.limit}, and has not ended; "
                    f"{self._standing()}"
                )

    # ---- the choice

    def _next(self) -> tuple[int, np.ndarray]:
        """The piece to run and who runs it; -1 when all have exited."""
        keys = self.keys
        if self.time % LOOKS == LOOKS - 1:
            late = self._passed_over()
            if late is not None:
                return late
        least = keys.min()
        polling: list[tuple[int, np.ndarray]] = []
        while least < IDLE:
            mask = keys == least
            number = int(self.pc.flat[int(mask.argmax())])
            mask &= self.pc == number
            ready = self._ready(self.kernel.pieces[number], mask)
            if ready is not None:
                if not self.polls[number]:
                    return number, ready
                polling.append((number, ready))
            keys = np.where(mask, IDLE, keys)
            least = keys.min()
        if polling:
            return min(polling, key=lambda each: self.last_run[each[0]])
        if self.exited.all():
            return -1, self.exited
        raise UndefinedBehaviour(f"deadlock: no thread can go on; {self._standing()}")

    def _passed_over(self) -> tuple[int, np.ndarray] | None:
        """A piece at which threads have stood for long."""
        standing = np.unique(self.pc[self.keys < IDLE])
        absent = np.ones(len(self.last_run), bool)
        absent[standing] = False
        self.last_run[absent] = self.time
        for number in sorted(standing, key=lambda each: self.last_run[each]):
            if self.time - self.last_run[number] <= PATIENCE:
                break
            mask = (self.pc == number) & (self.keys < IDLE)
            ready = self._ready(self.kernel.pieces[number], mask)
            if ready is not None:
                return int(number), ready
        return None

    def _ready(self, linked: Linked, mask: np.ndarray) -> np.ndarray | None:
        """Those of the mask who need not wait for other threads of their warp; None if all must."""
        if not linked.piece.gatherings:
            return mask
        for gathering in linked.piece.gatherings:
            mask = mask & self._gathered(gathering, linked.names, mask)
        return mask if mask.any() else None

    def _gathered(self, gathering: Gathering, names: Names, mask: np.ndarray) -> np.ndarray:
        blocks, threads = self.shape
        width = gathering.width if threads % gathering.width == 0 else LANES
        here = (mask | self.exited).reshape(blocks, -1, width)
        if gathering.members is None:
            whole = np.asarray(here.all(-1))
        else:
            members = self.value(gathering.members, "b32", names)
            taking = mask
            if gathering.guard is not None:
                taking = mask & (self.value(Register(gathering.guard.register), "pred", names) != gathering.guard.negated)
            wanted = np.where(taking, members, 0).reshape(blocks, -1, width)
            wanted = np.asarray(np.bitwise_or.reduce(wanted, axis=-1, keepdims=True))
            wanted = wanted >> np.arange(LANES, dtype=np.uint32) & 1 != 0
            whole = np.asarray((here | ~wanted).all(-1))
        return np.broadcast_to(whole[..., None], here.shape).reshape(self.shape)

    # ---- running

    def _execute(self, lines: list[Line], mask: np.ndarray) -> None:
        if not lines:
            return
        chunk = self.chunk
        chunk["active"] = self._on_device(mask)
        for line in lines:
            line.run(chunk)
            chunk.executed += 1
            if self.watch is not None:
                self.watch(line, chunk, mask)
        self.report.check(chunk)

    def _on_device(self, mask: np.ndarray) -> Any:
        """The mask on the device; the same ones come again and again."""
        key = mask.tobytes()
        found = self.masks.get(key)
        if found is None:
            if len(self.masks) >= KEPT_MASKS:
                self.masks.pop(next(iter(self.masks)))
            found = self.masks[key] = jnp.asarray(mask.copy())
        return found

    def value(self, operand: Operand, kind: str, names: Names) -> np.ndarray:
        """An operand's raw bits on the host."""
        if isinstance(operand, Negated):
            return ~self.value(operand.register, kind, names)
        if isinstance(operand, Register):
            return np.asarray(self.chunk.register(names.held(operand), names.kind(operand)))
        return np.broadcast_to(constant(operand, kind), self.shape)

    # ---- what follows a piece

    def _follow(self, number: int, linked: Linked, mask: np.ndarray) -> None:
        piece = linked.piece
        self.chunk.executed += 1
        if piece.ends == "next":
            self._move(mask, piece.after)
            return
        taking = mask
        guard = linked.last.statement.guard if linked.last is not None else None
        if guard is not None:
            taking = mask & (self.value(Register(guard.register), "pred", linked.names) != guard.negated)
            self._move(mask & ~taking, piece.after)
            if not taking.any():
                return
        if piece.ends == "branch":
            self._move(taking, piece.targets[0])
        elif piece.ends == "indexed":
            self._indexed(linked, taking)
        elif piece.ends == "call":
            self._call(number, linked, taking)
        elif piece.ends == "return":
            self._return(taking)
        elif piece.ends == "exit":
            self._exit(taking)
        elif piece.ends == "trap":
            assert linked.last is not None
            block, thread = np.argwhere(taking)[0]
            raise Trapped(f"{self.report.where(linked.last, int(block), int(thread))}: the kernel executed trap")
        else:
            self._barrier(linked, taking)

    def _move(self, mask: np.ndarray, piece: int) -> None:
        """The threads stand at a piece."""
        self.pc[mask] = piece
        if self.calls.shape[-1]:
            self._stand(mask)
        else:
            self.keys[mask] = piece

    def _stand(self, mask: np.ndarray) -> None:
        """The keys of threads that can go on: the calls that they are in, the outermost first, then the piece."""
        if not self.calls.shape[-1]:
            self.keys[mask] = self.pc[mask]
            return
        key = np.zeros(int(mask.sum()), np.int64)
        depth, calls, pc = self.depth[mask], self.calls[mask], self.pc[mask]
        for level in range(min(self.levels, calls.shape[-1] + 1)):
            part = np.where(depth == level, pc, 0)
            if level < calls.shape[-1]:
                part = np.where(depth > level, calls[:, level], part)
            key += part.astype(np.int64) << np.int64(self.bits * (self.levels - 1 - level))
        self.keys[mask] = key

    def _indexed(self, linked: Linked, mask: np.ndarray) -> None:
        line = linked.last
        assert line is not None
        index = self.value(line.statement.operands[0], "u32", linked.names)
        targets = linked.piece.targets
        if (index[mask] >= len(targets)).any():
            wrong = int(index[mask].max())
            raise UndefinedBehaviour(f"line {line.statement.place.line}: {line.statement.opcode}: index {wrong} of {len(targets)} labels")
        for i in np.unique(index[mask]):
            self._move(mask & (index == i), targets[int(i)])

    def _call(self, number: int, linked: Linked, mask: np.ndarray) -> None:
        self._execute(linked.before, mask)
        self.calls[mask, self.depth[mask]] = number
        self.depth[mask] += 1
        self._move(mask, linked.entered)

    def _return(self, mask: np.ndarray) -> None:
        self._exit(mask & (self.depth == 0))
        inside = mask & (self.depth > 0)
        if not inside.any():
            return
        self.depth[inside] -= 1
        callers = np.full(self.shape, -1, np.int32)
        callers[inside] = self.calls[inside, self.depth[inside]]
        for caller in np.unique(callers[inside]):
            linked = self.kernel.pieces[int(caller)]
            self._execute(linked.behind, callers == caller)
            self._move(callers == caller, linked.piece.after)

    def _exit(self, mask: np.ndarray) -> None:
        if mask.any():
            self.exited |= mask
            self.keys[mask] = IDLE
            self._release()

    def _barrier(self, linked: Linked, mask: np.ndarray) -> None:
        line = linked.last
        assert line is not None
        waiting = self.barriers.arrive(line, linked, mask, self)
        self._move(mask & ~waiting, linked.piece.after)
        self.pc[waiting] = linked.piece.after
        self.keys[waiting] = IDLE
        self._release()

    def _release(self) -> None:
        """Threads go on whose barrier is complete."""
        freed = self.barriers.release(self.exited, self)
        if freed is not None:
            self._stand(freed)
            self.chunk.order(np.asarray(freed.any(-1)))

    def _standing(self) -> str:
        """Where the threads stand, in words."""
        said = []
        alive = ~self.exited
        for number in np.unique(self.pc[alive])[:8]:
            here = alive & (self.pc == number)
            linked = self.kernel.pieces[int(number)]
            statements = self.kernel.lines
            at = min(linked.first + linked.piece.start, len(statements) - 1)
            block, thread = np.argwhere(here)[0]
            waits = " at a barrier" if (self.barriers.waiting[here] >= 0).all() else ""
            line = statements[at].statement.place.line
            said.append(f"{int(here.sum())} threads wait{waits} before line {line}, the first is block {block} thread {thread}")
        return "; ".join(said)
