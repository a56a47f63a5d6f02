"""The scheduler: the blocks of a chunk run together, each thread at its basic block, until all threads have exited.

The basic block with the least number runs first, for all threads that are at it, so that diverged threads meet again (see
`linker.control_flow`). Basic blocks of loops that wait for other threads run when nothing else can. A basic block that was passed over for
long runs in any case. Barriers of a block, `bar` and `barrier`, and those of a cluster, `barrier.cluster`, are kept here as well.
Source: PTX ISA 9.7.13.1, 9.7.13.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.base.errors import UndefinedBehaviour, Unsupported
from tcemu.engine.isa.families import LANES
from tcemu.engine.isa.tcgen05 import MAX_ALLOCATION
from tcemu.kernels.ptx.hazards.hazard_faults import Hazard
from tcemu.kernels.ptx.linker.control_flow import BARRIER_COUNT, CLUSTER_BARRIER, ConvergencePoint
from tcemu.kernels.ptx.linker.linked_kernel import Kernel, LinkedBlock, LinkedCallee, LinkedStatement, byte_size, compile_together
from tcemu.kernels.ptx.runtime.deadlocks import RepetitionDetector
from tcemu.kernels.ptx.runtime.runtime_functions import RuntimeFunctions
from tcemu.kernels.ptx.runtime.tracing import ExecutedStatement, Observer, PlaceReporter
from tcemu.kernels.ptx.simt.chunk import Chunk, NameTable
from tcemu.kernels.ptx.simt.faults import Trapped
from tcemu.kernels.ptx.simt.machine import constant_bits
from tcemu.kernels.ptx.text.module import Negated, Operand, Register, Statement, Symbol, Vector

IDLE = np.int64(2**62)  # the key of threads that wait or have exited
STARVATION_LIMIT = 4096  # basic blocks after which a passed-over one runs
STARVATION_INTERVAL = 256  # basic blocks between searches for passed-over ones
MASK_CACHE_SIZE = 64
MAX_RECURSION = 1024  # nested calls; the stack of a thread has 1 KiB by default, and at most 512 KiB
DRAWN_WARPS, DRAWN_LANES, DRAWN_SPLITS = (0.2, 0.5, 0.8), 0.5, 0.25  # of a drawn order: shares of warps and lanes; how often lanes part


class StepLimit(RuntimeError):
    """A kernel executed more statements than `step_limit`."""


class Reporter(PlaceReporter, Protocol):
    """The launch as the scheduler needs it."""

    def block_name(self, row: int) -> str:
        """Return the name of a block of the chunk."""
        ...

    def nearest_buffer(self, address: int, space: str) -> str:
        """Return the buffer that is nearest to an address, or the size of the space, in words."""
        ...

    def absent_blocks(self) -> int:
        """Return the number of the launch's blocks that are not in the chunk."""
        ...


class BarrierObserver(Protocol):
    """An observer of the barriers of blocks and clusters. Barriers have numbers, that of the cluster is `CLUSTER_BARRIER`."""

    def arrive(self, threads: np.ndarray, numbers: np.ndarray, relaxed: bool) -> None:
        """Note threads, bool[blocks, threads], that arrive at barriers, int[blocks, threads]; relaxed: the arrival releases nothing."""
        ...

    def release(self, threads: np.ndarray, numbers: np.ndarray) -> None:
        """Note threads that barriers let go on."""
        ...

    def exit(self, threads: np.ndarray, blocks: np.ndarray, statement: LinkedStatement | None) -> None:
        """Note threads that exit, and blocks, bool[blocks], whose last threads are among them."""
        ...


class Schedule:
    """The threads of a chunk, and the choice of the basic block that runs next."""

    def __init__(
        self,
        kernel: Kernel,
        chunk: Chunk,
        present: np.ndarray,
        step_limit: int,
        reporter: Reporter,
        observers: Sequence[Observer] = (),
        block_numbers: np.ndarray | None = None,
        runtime: RuntimeFunctions | None = None,
        barrier_observers: Sequence[BarrierObserver] = (),
        chooser: np.random.Generator | None = None,
    ) -> None:
        """Begin with all threads at the entry. chooser: what draws the order; None: the least basic block first."""
        self.kernel, self.chunk, self.step_limit, self.reporter = kernel, chunk, step_limit, reporter
        self.observers, self.runtime, self.barrier_observers = tuple(observers), runtime, tuple(barrier_observers)
        self.block_numbers = np.arange(present.shape[0]) if block_numbers is None else block_numbers
        self.shape = present.shape
        self.exited = ~present
        self.pc = np.zeros(self.shape, np.int32)  # the basic block of each thread
        self.depth = np.zeros(self.shape, np.int32)  # of calls
        self.calls = np.zeros((*self.shape, kernel.call_depth), np.int32)  # the basic blocks whose calls each thread is in
        self.key_bits = max(len(kernel.blocks) - 1, 1).bit_length()
        self.key_levels = max(60 // self.key_bits, 1)
        self.keys = np.full(self.shape, IDLE)  # threads run in the order of their keys
        self.barriers = BlockBarriers(self.shape, prod(chunk.cluster))
        self.last_run = np.zeros(len(kernel.blocks), np.int64)
        self.time = 0  # basic blocks run so far
        self.masks: dict[bytes, Any] = {}
        self.chooser = chooser
        self.apart = np.zeros(self.shape, bool)  # threads that executed their last statements without others of their warp
        self.polling = np.array([linked.basic_block.polls for linked in kernel.blocks])
        self.repetitions = RepetitionDetector()
        self.saves = SavedCallers()
        self._update_keys(present)

    def run_to_completion(self) -> None:
        """Run until all threads have exited. Raises the kernel's faults, UndefinedBehaviour for a deadlock, and StepLimit."""
        while True:
            number, mask = self._choose_block() if self.chooser is None else self._draw_block(self.chooser)
            if number < 0:
                break
            self.time += 1
            if self.chooser is None:  # a drawn order may leave a state to which it comes twice
                self.repetitions.observe(self, number, mask)
            self.last_run[number] = self.time
            linked = self.kernel.blocks[number]
            self._execute(linked.statements, mask)
            if self.kernel.checked and linked.statements and self.chooser is None:  # a drawn order takes warps apart itself
                self._note_divergence(mask)
            self._leave_block(number, linked, mask)
            count = self.chunk.statement_count
            if count > self.step_limit:
                raise StepLimit(
                    f"the kernel has executed {count} statements, more than step_limit={self.step_limit}, and has not ended; "
                    f"{self.describe_threads()}"
                )

    # ---- the choice

    def _choose_block(self) -> tuple[int, np.ndarray]:
        """Return the basic block to run and the threads that run it; -1 when all have exited."""
        keys = self.keys
        if self.time % STARVATION_INTERVAL == STARVATION_INTERVAL - 1:
            starved = self._find_starved()
            if starved is not None:
                return starved
        least = keys.min()
        polling: list[tuple[int, np.ndarray]] = []
        while least < IDLE:
            mask = keys == least
            number = int(self.pc.flat[int(mask.argmax())])
            mask &= self.pc == number
            ready = self._ready_threads(self.kernel.blocks[number], mask)
            if ready is not None:
                if not self.polling[number]:
                    return number, ready
                polling.append((number, ready))
            keys = np.where(mask, IDLE, keys)
            least = keys.min()
        if polling:
            return min(polling, key=lambda each: self.last_run[each[0]])
        return self._end_run()

    def _draw_block(self, chooser: np.random.Generator) -> tuple[int, np.ndarray]:
        """Return a basic block and threads that may run it next, drawn at random; -1 when all threads have exited.

        PTX promises no order between warps, nor between the lanes of a warp that do not synchronise.
        """
        runnable = self.keys < IDLE
        candidates = chooser.permutation(np.unique(self.pc[runnable])) if runnable.any() else []
        candidates = sorted(candidates, key=lambda number: bool(self.polling[number]))
        for number in candidates:
            mask = runnable & (self.pc == number)
            if self.calls.shape[-1]:  # threads at a basic block by different calls run apart
                mask &= self.keys == chooser.choice(self.keys[mask])
            warps = np.repeat(chooser.random((self.shape[0], self.shape[1] // LANES)) < chooser.choice(DRAWN_WARPS), LANES, axis=-1)
            if not (mask & warps).any():
                row, thread = np.argwhere(mask)[chooser.integers(mask.sum())]
                warps[row, thread // LANES * LANES : thread // LANES * LANES + LANES] = True
            lanes = chooser.random(self.shape) < DRAWN_LANES if chooser.random() < DRAWN_SPLITS else True
            for drawn in (mask & warps & lanes, mask & warps, mask):
                ready = self._ready_threads(self.kernel.blocks[number], drawn) if drawn.any() else None
                if ready is not None:
                    return int(number), ready
        return self._end_run()

    def _end_run(self) -> tuple[int, np.ndarray]:
        """Return -1 and all threads if they have exited. Raises UndefinedBehaviour for a deadlock."""
        if self.exited.all():
            return -1, self.exited
        raise UndefinedBehaviour(f"deadlock: no thread can go on; {self.describe_threads()}{self.absent_blocks()}")

    def _find_starved(self) -> tuple[int, np.ndarray] | None:
        """Return a basic block that has been passed over for long, and the threads at it."""
        standing = np.unique(self.pc[self.keys < IDLE])
        absent = np.ones(len(self.last_run), bool)
        absent[standing] = False
        self.last_run[absent] = self.time
        for number in sorted(standing, key=lambda each: self.last_run[each]):
            if self.time - self.last_run[number] <= STARVATION_LIMIT:
                break
            mask = (self.pc == number) & (self.keys < IDLE)
            ready = self._ready_threads(self.kernel.blocks[number], mask)
            if ready is not None:
                return int(number), ready
        return None

    def _ready_threads(self, linked: LinkedBlock, mask: np.ndarray) -> np.ndarray | None:
        """Return the threads of the mask that need not wait for others of their warp; None if all must wait."""
        if not linked.basic_block.convergence_points:
            return mask
        for point in linked.basic_block.convergence_points:
            mask = mask & self._converged_threads(point, linked.names, mask)
            if point.columns is not None and mask.any():
                mask = self._threads_with_room(point, point.columns, linked.names, mask)
        return mask if mask.any() else None

    def _converged_threads(self, point: ConvergencePoint, names: NameTable, mask: np.ndarray) -> np.ndarray:
        """Return the threads whose participants have all arrived at a collective statement, or have exited."""
        blocks, threads = self.shape
        width = point.width if threads % point.width == 0 else LANES
        arrived = (mask | self.exited).reshape(blocks, -1, width)
        if point.members is None:
            complete = np.asarray(arrived.all(-1))
        else:
            members = self.read_operand(point.members, "b32", names)
            executing = mask
            if point.guard is not None:
                executing = mask & (self.read_operand(Register(point.guard.register), "pred", names) != point.guard.negated)
            needed = np.where(executing, members, 0).reshape(blocks, -1, width)
            needed = np.asarray(np.bitwise_or.reduce(needed, axis=-1, keepdims=True))
            needed = needed >> np.arange(LANES, dtype=np.uint32) & 1 != 0
            complete = np.asarray((arrived | ~needed).all(-1))
        return np.broadcast_to(complete[..., None], arrived.shape).reshape(self.shape)

    def _threads_with_room(self, point: ConvergencePoint, columns: Operand, names: NameTable, mask: np.ndarray) -> np.ndarray:
        """Return the threads that need not wait at a `tcgen05.alloc`: the first warp of each block whose columns are free.

        Threads whose guard is false do not allocate and never wait. An illegal number of columns does not wait either; it is a fault.
        """
        executing = mask
        if point.guard is not None:
            executing = mask & (self.read_operand(Register(point.guard.register), "pred", names) != point.guard.negated)
        first = executing.argmax(-1)
        count = self.read_operand(columns, "b32", names)[np.arange(len(first)), first].astype(np.int64)
        legal = (count > 0) & (count <= MAX_ALLOCATION) & (count & (count - 1) == 0)
        has_room = self.chunk.find_tensor_memory(np.where(legal, count, 0).astype(np.int32)) >= 0
        own_warp = np.arange(self.shape[1]) // LANES == first[:, None] // LANES
        return mask & ~executing | executing & own_warp & (has_room | ~legal)[:, None]

    # ---- running

    def _execute(self, statements: list[LinkedStatement], mask: np.ndarray) -> None:
        if not statements:
            return
        chunk = self.chunk
        if statements[-1].executor is None:
            compile_together(statements, chunk.layout)
        chunk["active"], chunk.all_active = self._device_mask(mask), bool(mask.all())
        for each in statements if self.observers else self.kernel.plan(statements, chunk.layout):
            chunk.previous = {}
            each.execute(chunk)
            chunk.statement_count += each.count
            if isinstance(each, LinkedStatement) and self.observers:
                event = ExecutedStatement(each, chunk, mask, self.block_numbers)
                for observer in self.observers:
                    observer(event)
        self.reporter.raise_fault(chunk)

    def _device_mask(self, mask: np.ndarray) -> Any:
        """Return the mask on the device. Few different masks occur."""
        key = mask.tobytes()
        found = self.masks.get(key)
        if found is None:
            if len(self.masks) >= MASK_CACHE_SIZE:
                self.masks.pop(next(iter(self.masks)))
            found = self.masks[key] = jax.device_put(mask.copy())
        return found

    def read_operand(self, operand: Operand, kind: str, names: NameTable) -> np.ndarray:
        """Return the raw bits of an operand on the host."""
        if isinstance(operand, Negated):
            return ~self.read_operand(operand.register, kind, names)
        if isinstance(operand, Register):
            return np.asarray(self.chunk.register(names.qualified_name(operand), names.kind(operand)))
        return np.broadcast_to(constant_bits(operand, kind), self.shape)

    # ---- control flow between basic blocks

    def _leave_block(self, number: int, linked: LinkedBlock, mask: np.ndarray) -> None:
        basic_block = linked.basic_block
        self.chunk.statement_count += 1
        if basic_block.ending == "next":
            self._move_threads(mask, basic_block.fallthrough)
            return
        executing = mask
        guard = linked.terminator.statement.guard if linked.terminator is not None else None
        if guard is not None:
            executing = mask & (self.read_operand(Register(guard.register), "pred", linked.names) != guard.negated)
            self._move_threads(mask & ~executing, basic_block.fallthrough)
            if not executing.any():
                return
        if basic_block.ending == "branch":
            self._move_threads(executing, basic_block.targets[0])
        elif basic_block.ending == "indexed":
            self._branch_indexed(linked, executing)
        elif basic_block.ending == "call":
            self._enter_call(number, linked, executing)
        elif basic_block.ending == "return":
            self._return_threads(linked, executing)
        elif basic_block.ending == "exit":
            self._exit_threads(executing, linked.terminator)
        elif basic_block.ending == "trap":
            block, thread = np.argwhere(executing)[0]
            raise Trapped(f"{self.reporter.describe(linked.require_terminator(), int(block), int(thread))}: the kernel executed trap")
        else:
            self._arrive_at_barrier(linked, executing)

    def _move_threads(self, mask: np.ndarray, block: int) -> None:
        """Move threads to a basic block."""
        self.pc[mask] = block
        if self.calls.shape[-1]:
            self._update_keys(mask)
        else:
            self.keys[mask] = block

    def _update_keys(self, mask: np.ndarray) -> None:
        """Set the keys of threads that can go on: their calls, the outermost first, then their basic block."""
        if not self.calls.shape[-1]:
            self.keys[mask] = self.pc[mask]
            return
        key = np.zeros(int(mask.sum()), np.int64)
        depth, calls, pc = self.depth[mask], self.calls[mask], self.pc[mask]
        for level in range(min(self.key_levels, calls.shape[-1] + 1)):
            part = np.where(depth == level, pc, 0)
            if level < calls.shape[-1]:
                part = np.where(depth > level, calls[:, level], part)
            key += part.astype(np.int64) << np.int64(self.key_bits * (self.key_levels - 1 - level))
        self.keys[mask] = key

    def _branch_indexed(self, linked: LinkedBlock, mask: np.ndarray) -> None:
        statement = linked.require_terminator().statement
        index = self.read_operand(statement.operands[0], "u32", linked.names)
        targets = linked.basic_block.targets
        if (index[mask] >= len(targets)).any():
            wrong = int(index[mask].max())
            raise UndefinedBehaviour(f"{statement.line_text}: {statement.opcode}: index {wrong} of {len(targets)} labels")
        for i in np.unique(index[mask]):
            self._move_threads(mask & (index == i), targets[int(i)])

    def _enter_call(self, number: int, linked: LinkedBlock, mask: np.ndarray) -> None:
        if linked.runtime_function:
            assert self.runtime is not None
            self.runtime.call(
                linked.runtime_function, linked, self.chunk, mask, partial(self.reporter.describe, linked.require_terminator())
            )
            self._move_threads(mask, linked.basic_block.fallthrough)
            return
        for callee, threads in self._called_functions(linked, mask):
            if callee.recursive:
                self.saves.save(self, linked, threads)
            self._execute(callee.argument_moves, threads)
            self.calls[threads, self.depth[threads]] = number
            self.depth[threads] += 1
            self._move_threads(threads, callee.block)

    def _called_functions(self, linked: LinkedBlock, mask: np.ndarray) -> list[tuple[LinkedCallee, np.ndarray]]:
        """Return the functions that the threads of a call reach, with the threads of each.

        Raises:
            UndefinedBehaviour: A register has no address of a function of the call's prototype or list.
            Unsupported: A function calls itself through a register.
        """
        terminator = linked.require_terminator()
        operand = terminator.statement.operands[1]
        if not isinstance(operand, Register):
            found = [(linked.callees[0], mask)]
        else:
            address = self.read_operand(operand, "u64", linked.names)
            found = [(callee, mask & (address == callee.address)) for callee in linked.callees]
            wrong = mask & ~np.isin(address, [callee.address for callee in linked.callees])
            if wrong.any():
                block, thread = (int(n) for n in np.argwhere(wrong)[0])
                names = ", ".join(callee.name for callee in linked.callees) or "no function"
                raise UndefinedBehaviour(
                    f"{self.reporter.describe(terminator, block, thread)}: {operand} is {int(address[block, thread]):#x}, the address "
                    f"of no function of the call's prototype or list; those are {names}. PTX ISA 9.7.12.5"
                )
        for callee, threads in found:
            if self.kernel.taken_functions and threads.any():
                self._check_recursion(terminator, linked, callee, threads)
        return [(callee, threads) for callee, threads in found if threads.any()]

    def _check_recursion(self, terminator: LinkedStatement, linked: LinkedBlock, callee: LinkedCallee, threads: np.ndarray) -> None:
        """Raise Unsupported if threads call a function in which they are already."""
        prefixes = np.array([each.names.prefix for each in self.kernel.blocks])
        inside = np.arange(self.calls.shape[-1]) < self.depth[..., None]
        again = threads & ((prefixes[self.calls] == f"{callee.name}:") & inside).any(-1)
        again |= threads & (linked.names.prefix == f"{callee.name}:")
        if again.any():
            block, thread = (int(n) for n in np.argwhere(again)[0])
            place = self.reporter.describe(terminator, block, thread)
            raise Unsupported(f"{place}: recursion is not supported: {callee.name} calls itself through a register")

    def _return_threads(self, returning: LinkedBlock, mask: np.ndarray) -> None:
        self._exit_threads(mask & (self.depth == 0), returning.terminator)
        inside = mask & (self.depth > 0)
        if not inside.any():
            return
        self.depth[inside] -= 1
        callers = np.full(self.shape, -1, np.int32)
        callers[inside] = self.calls[inside, self.depth[inside]]
        for caller in np.unique(callers[inside]):
            linked = self.kernel.blocks[int(caller)]
            callee = next(each for each in linked.callees if f"{each.name}:" == returning.names.prefix)
            self._execute(callee.result_moves, callers == caller)
            if callee.recursive:
                self.saves.restore(self, linked, callers == caller)
            self._move_threads(callers == caller, linked.basic_block.fallthrough)

    def _exit_threads(self, mask: np.ndarray, statement: LinkedStatement | None) -> None:
        if mask.any():
            self.exited |= mask
            gone = np.asarray(self.exited.all(-1) & mask.any(-1))
            for observer in self.barrier_observers:
                observer.exit(mask, gone, statement)
            self.keys[mask] = IDLE
            self._release_barriers()

    def _arrive_at_barrier(self, linked: LinkedBlock, mask: np.ndarray) -> None:
        terminator = linked.require_terminator()
        parts = terminator.statement.qualifiers
        waiting = self.barriers.arrive(terminator, linked, mask, self)
        if not ("cluster" in parts and "wait" in parts):
            for observer in self.barrier_observers:
                observer.arrive(mask, self.barriers.arrived_at, "relaxed" in parts)
        self._move_threads(mask & ~waiting, linked.basic_block.fallthrough)
        self.pc[waiting] = linked.basic_block.fallthrough
        self.keys[waiting] = IDLE
        self._release_barriers()

    def _release_barriers(self) -> None:
        """Let the threads go on whose barrier is complete."""
        released = self.barriers.release(self.exited, self)
        if released is not None:
            self._update_keys(released)
            for observer in self.barrier_observers:
                observer.release(released, self.barriers.arrived_at)

    def _note_divergence(self, mask: np.ndarray) -> None:
        warps = (mask | self.exited).reshape(self.shape[0], -1, LANES).all(-1)
        self.apart[mask] = ~np.repeat(warps, LANES, axis=-1)[mask]

    def leaving_threads(self) -> np.ndarray:
        """Return the threads that exit next and do nothing before."""
        leaving = np.array([not linked.statements and linked.basic_block.ending in ("return", "exit") for linked in self.kernel.blocks])
        return np.asarray(leaving[self.pc]) & (self.depth == 0)

    def describe_threads(self, among: np.ndarray | None = None) -> str:
        """Return the positions of the threads that have not exited, or of those among them, in words."""
        described = []
        alive = ~self.exited if among is None else ~self.exited & among
        for number in np.unique(self.pc[alive])[:8]:
            here = alive & (self.pc == number)
            linked = self.kernel.blocks[int(number)]
            statements = self.kernel.statements
            first = min(linked.first_number + linked.basic_block.start, len(statements) - 1)
            block, thread = np.argwhere(here)[0]
            waits = " at a barrier" if (self.barriers.waiting[here] >= 0).all() else ""
            line = statements[first].statement.line_text
            described.append(f"{int(here.sum())} threads wait{waits} before {line}, the first is block {block} thread {thread}")
        return "; ".join(described)

    def absent_blocks(self) -> str:
        """Return a note for messages of threads that wait, if blocks of the launch are absent from the chunk."""
        count = self.reporter.absent_blocks()
        if not count:
            return ""
        return f". {count} blocks of the launch run before or after these, for which a wait is in vain: cooperative=True runs all at once"

    # ---- the threads at each basic block

    def standing_threads(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the basic blocks at which threads stand that wait at no barrier, and these threads."""
        able = self.keys < IDLE
        for number in np.unique(self.pc[able]):
            yield int(number), able & (self.pc == number)

    def can_run(self, number: int, threads: np.ndarray, among: np.ndarray) -> bool:
        """Return True if one of the threads at a basic block that is also among others need not wait for the rest of its warp."""
        if not (threads & among).any():
            return False
        ready = self._ready_threads(self.kernel.blocks[number], threads)
        return ready is not None and bool((ready & among).any())


# ---- recursion


class SavedCallers:
    """Registers and frames of functions that call themselves, by the depth of the call.

    Functions have their registers and parameters at fixed places. Before a call that may lead to the caller again, what the caller has is
    saved; after it, everything but the results is restored.
    """

    def __init__(self) -> None:
        self._levels: dict[int, tuple[dict[str, np.ndarray], np.ndarray]] = {}  # registers by qualified name, and words of local memory

    def in_use(self, schedule: Schedule) -> bool:
        """Return True if threads may be in a function that has called itself."""
        return bool(self._levels) and bool(schedule.depth.any())

    def save(self, schedule: Schedule, linked: LinkedBlock, threads: np.ndarray) -> None:
        """Save the caller of the threads at a call, at their depths; make room for deeper calls.

        Raises:
            UndefinedBehaviour: Calls are nested deeper than any stack of a GPU.
        """
        chunk, prefix = schedule.chunk, linked.names.prefix
        deepest = int(schedule.depth[threads].max())
        if deepest >= MAX_RECURSION:
            block, thread = (int(n) for n in np.argwhere(threads)[0])
            place = schedule.reporter.describe(linked.require_terminator(), block, thread)
            raise UndefinedBehaviour(f"{place}: calls are nested deeper than {MAX_RECURSION}; a GPU's stack overflows")
        if deepest + 1 >= schedule.calls.shape[-1]:
            schedule.calls = np.concatenate([schedule.calls, np.zeros_like(schedule.calls)], axis=-1)
        registers = {name: np.asarray(value) for name, value in chunk.registers.items() if name.startswith(prefix)}
        local = np.asarray(chunk["local"])
        for level in np.unique(schedule.depth[threads]):
            here = threads & (schedule.depth == level)
            saved, memory = self._levels.get(int(level), ({}, np.zeros_like(local)))
            merged = {name: np.where(here, value, saved.get(name, value)) for name, value in registers.items()}
            self._levels[int(level)] = saved | merged, np.where(here[..., None], local, memory)

    def restore(self, schedule: Schedule, linked: LinkedBlock, threads: np.ndarray) -> None:
        """Restore the caller of threads that have returned to a call, but for the results."""
        chunk, names = schedule.chunk, linked.names
        results = linked.require_terminator().statement.operands[0]
        kept, memory = set[str](), np.array(chunk["local"])
        start, stop = schedule.kernel.frame_words[linked.require_terminator().context.function.name]
        restored = np.zeros(memory.shape[-1], bool)
        restored[start:stop] = True
        for operand in results.elements if isinstance(results, Vector) else ():
            if isinstance(operand, Register):
                kept.add(names.qualified_name(operand))
            elif isinstance(operand, Symbol):
                first = names.symbols[operand.name] // 4
                size = next(byte_size(each) for each in linked.require_terminator().context.function.variables if each.name == operand.name)
                restored[first : first + -(-size // 4)] = False
        for level in np.unique(schedule.depth[threads]):
            here = threads & (schedule.depth == level)
            registers, local = self._levels[int(level)]
            for name, value in registers.items():
                if name.startswith(names.prefix) and name not in kept:
                    chunk.registers[name] = jax.device_put(np.where(here, value, np.asarray(chunk.registers[name])))
            memory = np.where(here[..., None] & restored, local, memory)
        chunk["local"] = jax.device_put(memory)


# ---- barriers


class PendingReduction(NamedTuple):
    """A `bar.red` at which threads wait."""

    names: NameTable
    operation: str
    destination: Operand
    kind: str
    values: np.ndarray  # the predicates of the threads in the mask
    mask: np.ndarray


class BlockBarriers:
    """The barriers of the blocks of a chunk."""

    def __init__(self, shape: tuple[int, ...], cluster_size: int) -> None:
        self.shape, self.cluster_size = shape, cluster_size
        self.waiting = np.full(shape, -1, np.int8)  # the barrier at which each thread waits; -1: none
        self.arrivals = np.zeros((shape[0], BARRIER_COUNT), np.int64)  # by bar.arrive
        self.counts = np.zeros((shape[0], BARRIER_COUNT), np.int64)  # participating threads; 0: all of the block
        self.cluster_arrivals = np.zeros(shape, np.int64)  # arrivals of each thread at the cluster's barrier
        self.cluster_waits = np.zeros(shape, np.int64)  # waits of each thread at it
        self.arrived_at = np.full(shape, -1, np.int8)  # the barrier at which each thread has last arrived
        self.arrived_by = np.full(shape, -1, np.int32)  # the number of the statement by which it did
        self.awaited = np.zeros(shape, bool)  # other threads of its warp have arrived at an .aligned barrier, and this one has not
        self.reductions: list[PendingReduction] = []
        self.notes: dict[tuple[int, ...], str] = {}

    def arrive(self, terminator: LinkedStatement, linked: LinkedBlock, mask: np.ndarray, schedule: Schedule) -> np.ndarray:
        """Let threads arrive at a statement's barrier; return the threads that then wait."""
        statement = terminator.statement
        parts = statement.qualifiers
        if "cluster" in parts:
            self._check_cluster_order(terminator, mask, schedule)
            if "arrive" in parts:
                self.cluster_arrivals[mask] += 1
                self.arrived_at[mask] = CLUSTER_BARRIER
                return np.zeros_like(mask)
            self.cluster_waits[mask] += 1
            self.waiting[mask] = self.arrived_at[mask] = CLUSTER_BARRIER
            return mask
        operands = list(statement.operands)
        destination = operands.pop(0) if "red" in parts else None
        predicate = operands.pop() if "red" in parts else None
        number = schedule.read_operand(operands[0], "u32", linked.names)
        count = schedule.read_operand(operands[1], "u32", linked.names) if len(operands) > 1 else np.zeros(self.shape, np.uint32)
        self._validate(statement, number[mask], count[mask])
        blocks = np.nonzero(mask)[0]
        if terminator.context.checked:
            self._check_participants(terminator, mask, number, count, schedule)
        self.counts[blocks, number[mask]] = count[mask]
        self.arrived_at[mask], self.arrived_by[mask] = number[mask], terminator.number
        if "arrive" in parts:
            np.add.at(self.arrivals, (blocks, number[mask]), 1)
            return np.zeros_like(mask)
        self.waiting[mask] = number[mask]
        if destination is not None and predicate is not None:
            operation = next(part for part in parts if part in ("popc", "and", "or"))
            register = predicate.register if isinstance(predicate, Negated) else predicate
            values = np.asarray(schedule.read_operand(register, "pred", linked.names)) != isinstance(predicate, Negated)
            kind = "u32" if operation == "popc" else "pred"
            self.reductions.append(PendingReduction(linked.names, operation, destination, kind, values, mask.copy()))
        return mask

    def _check_cluster_order(self, terminator: LinkedStatement, mask: np.ndarray, schedule: Schedule) -> None:
        """Raise UndefinedBehaviour, in checked mode, for an arrival that follows an arrival or a wait that follows none."""
        arrives = "arrive" in terminator.statement.qualifiers
        wrong = mask & (self.cluster_arrivals - self.cluster_waits != (0 if arrives else 1))
        if terminator.context.checked and wrong.any():
            block, thread = (int(n) for n in np.argwhere(wrong)[0])
            what = "arrives a second time without a barrier.cluster.wait" if arrives else "waits without a barrier.cluster.arrive"
            raise UndefinedBehaviour(f"{schedule.reporter.describe(terminator, block, thread)}: the thread {what}. PTX ISA 9.7.13.4")

    def _check_participants(
        self, terminator: LinkedStatement, mask: np.ndarray, number: np.ndarray, count: np.ndarray, schedule: Schedule
    ) -> None:
        """Raise UndefinedBehaviour for counts that differ or that more threads exceed, and for warps whose lanes arrive apart."""

        def forbid(row: int, thread: int, hazard: Hazard, *words: object) -> None:
            raise UndefinedBehaviour(f"{schedule.reporter.describe(terminator, row, thread)}: {hazard.message(*words)}")

        alive = ~schedule.exited
        for each in np.unique(number[mask]):
            mine = mask & (number == each)
            rows, threads = mine.any(-1), np.asarray(mine.argmax(-1))
            own = count[np.arange(len(rows)), threads].astype(np.int64)
            present = alive.sum(-1)
            expected = np.where(own > 0, own, present)
            waiting = (self.waiting == each).sum(-1) + self.arrivals[:, each]
            before = np.where(self.counts[:, each] > 0, self.counts[:, each], present)
            for wrong, hazard in (
                (rows & (waiting > 0) & (before != expected), Hazard.DIFFERENT_COUNTS),
                (rows & (own > 0) & (waiting + mine.sum(-1) > expected), Hazard.TOO_MANY_ARRIVALS),
            ):
                if wrong.any():
                    row = int(wrong.argmax())
                    total = int(waiting[row] + mine[row].sum())
                    words = (each, expected[row], before[row]) if hazard is Hazard.DIFFERENT_COUNTS else (total, each, expected[row])
                    forbid(row, int(threads[row]), hazard, *words)
        if terminator.statement.name == "barrier" and "aligned" not in terminator.statement.qualifiers:
            return
        lanes = (self.shape[0], -1, LANES)
        warps = mask.reshape(lanes).any(-1, keepdims=True)
        leaving = schedule.leaving_threads() | schedule.exited
        others = warps & (alive & ~mask & ~leaving).reshape(lanes)
        self.awaited[mask] = False
        elsewhere = others & ((self.waiting >= 0) & (self.arrived_by != terminator.number)).reshape(lanes)
        elsewhere |= warps & (leaving & schedule.apart).reshape(lanes)
        if elsewhere.any():
            row, warp, _ = (int(i) for i in np.argwhere(elsewhere)[0])
            forbid(row, warp * LANES + int(mask[row, warp * LANES : (warp + 1) * LANES].argmax()), Hazard.DIVERGENT_BARRIER)
        self.awaited |= (others & (self.waiting < 0).reshape(lanes)).reshape(self.shape)

    def _check_released(self, released: np.ndarray, schedule: Schedule) -> None:
        """Raise UndefinedBehaviour for warps of which only some lanes have arrived at an .aligned barrier; note differing statements."""
        lanes = (self.shape[0], -1, LANES)
        own = released & (self.waiting < CLUSTER_BARRIER)
        left = self.awaited.reshape(lanes) & own.reshape(lanes).any(-1, keepdims=True)
        statements = schedule.kernel.statements
        if left.any():
            row, warp, _ = (int(i) for i in np.argwhere(left)[0])
            thread = warp * LANES + int(own[row, warp * LANES : (warp + 1) * LANES].argmax())
            place = schedule.reporter.describe(statements[int(self.arrived_by[row, thread])], row, thread)
            raise UndefinedBehaviour(f"{place}: {Hazard.DIVERGENT_BARRIER.message()}")
        whole = own & (self.waiting == 0) & (self.counts[:, :1] == 0)
        for row in np.flatnonzero(whole.any(-1)):
            numbers = tuple(int(each) for each in np.unique(self.arrived_by[row, whole[row]]))
            if len(numbers) > 1 and numbers not in self.notes and statements[numbers[0]].statement.name == "bar":
                lines = ", ".join(str(statements[each].statement.position.line) for each in numbers)
                self.notes[numbers] = f"{schedule.reporter.block_name(int(row))}: {Hazard.OTHER_BARRIER_STATEMENT.message(0, lines)}"

    def _validate(self, statement: Statement, number: np.ndarray, count: np.ndarray) -> None:
        wrong = None
        if (number >= BARRIER_COUNT).any():
            wrong = f"barrier {int(number.max())}; a block has barriers 0 to {BARRIER_COUNT - 1}"
        elif (count % 32).any():
            wrong = f"a count of {int(count[count % 32 != 0][0])} threads; it must be a multiple of 32"
        if wrong:
            raise UndefinedBehaviour(f"{statement.line_text}: {statement.opcode}: {wrong}. PTX ISA 9.7.13.1")

    def release(self, exited: np.ndarray, schedule: Schedule) -> np.ndarray | None:
        """Return the threads whose barrier is complete; None if there are none."""
        if not (self.waiting >= 0).any() and not self.arrivals.any():
            return None
        alive = ~exited
        released = np.zeros(self.shape, bool)
        present = alive.sum(-1)
        for number in range(BARRIER_COUNT):
            here = self.waiting == number
            if not here.any() and not self.arrivals[:, number].any():
                continue
            expected = np.where(self.counts[:, number] > 0, self.counts[:, number], present)
            done = here.sum(-1) + self.arrivals[:, number] >= expected
            self.arrivals[done, number] = 0
            completing = here & done[:, None]
            if completing.any():
                self._finish_reductions(completing, schedule)
            released |= completing
        waiting = self.waiting == CLUSTER_BARRIER
        if waiting.any():
            arrivals = np.where(alive, self.cluster_arrivals, np.iinfo(np.int64).max)
            slowest = arrivals.reshape(-1, self.cluster_size * self.shape[1]).min(-1)
            complete = waiting & (self.cluster_arrivals <= np.repeat(slowest, self.cluster_size)[:, None])
            released |= complete
        if schedule.kernel.checked and released.any():
            self._check_released(released, schedule)
        self.waiting[released] = -1
        return released if released.any() else None

    def _finish_reductions(self, ends: np.ndarray, schedule: Schedule) -> None:
        """Write the results of reductions whose barrier is complete. Its threads may have arrived by several statements."""
        unfinished = []
        for each in self.reductions:
            mine = each.mask & ends
            if not mine.any():
                unfinished.append(each)
                continue
            votes = np.zeros((self.shape[0], 1), np.int64)
            for other in self.reductions:
                votes[:, 0] += (other.values & other.mask & ends).sum(-1)
            everyone = ends.sum(-1, keepdims=True)
            result = {"popc": votes, "and": votes == everyone, "or": votes > 0}[each.operation]
            self._write_result(each, mine, np.broadcast_to(result, self.shape), schedule)
            if (each.mask & ~ends).any():
                unfinished.append(each._replace(mask=each.mask & ~ends))
        self.reductions = unfinished

    def _write_result(self, reduction: PendingReduction, mask: np.ndarray, value: np.ndarray, schedule: Schedule) -> None:
        destination = reduction.destination
        if not isinstance(destination, Register):
            return
        names, chunk = reduction.names, schedule.chunk
        name = names.qualified_name(destination)
        old = chunk.register(name, names.kind(destination))
        chunk.write_register(name, jnp.where(jnp.asarray(mask), jnp.asarray(value.astype(old.dtype)), old))
