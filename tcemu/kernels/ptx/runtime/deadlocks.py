"""Threads that wait for ever: a run that comes to a state a second time, and what its threads wait for.

A run is deterministic. If the state that decides how it goes on (basic blocks, calls, barriers, registers, memory) is one of before, and
each thread that could go on has run in between, the run never ends: in this order of execution and, while memory does not change, in any
other. This is decided. Registers count that reach a branch, an address, a barrier or memory within the statements that the threads run, so
that a counter of the waits does not hide a deadlock. Not decided are loops that read a clock, which is no part of the state, and loops in
functions that have called themselves, whose callers' registers are saved elsewhere. A loop that counts until it gives up comes to no state
twice. `step_limit` ends all of these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tcemu.base.errors import UndefinedBehaviour
from tcemu.kernels.ptx.instruction_interface import Operation
from tcemu.kernels.ptx.linker.compiled_statements import CARRY
from tcemu.kernels.ptx.linker.linked_kernel import LinkedBlock, LinkedStatement
from tcemu.kernels.ptx.runtime.tracing import qualified_registers
from tcemu.kernels.ptx.simt.chunk import NameTable
from tcemu.kernels.ptx.simt.device_memory import locate_shared
from tcemu.kernels.ptx.simt.special_registers import TIMERS
from tcemu.kernels.ptx.simt.tensor_memory_state import TENSOR_MEMORY_KEY
from tcemu.kernels.ptx.tensor.launch_control import LAUNCH_KEY
from tcemu.kernels.ptx.tensor.mbarriers import PHASE_SHIFT, decode_barrier
from tcemu.kernels.ptx.text.module import Address, Operand, Register, flatten_operands, nested_operands

if TYPE_CHECKING:
    from tcemu.kernels.ptx.runtime.scheduler import Schedule

FIRST_POLLS = 16  # basic blocks of waiting loops, one after the other, before the first state is kept; then twice as many, and so on
FIRST_TIME = 4096  # basic blocks of any kind before the first state is kept
COPY_LIMIT = 1 << 28  # bytes of memory that is copied to be compared
STATE_FIELDS, STATE_KEYS = ("memory", "shared", "local"), (TENSOR_MEMORY_KEY, LAUNCH_KEY)  # of the machine; the rest are checks
NO_EFFECT = ("nanosleep", "prefetch", "prefetchu", "pmevent", "discard", "applypriority")  # instructions whose operands decide nothing
WAITS = ("try_wait", "test_wait")
READS = ("ld", "atom")
MAX_DESCRIBED = 6  # waits in a message


@dataclass
class _State:
    """The state of a run before a basic block."""

    number: int  # of the basic block
    polls: bool  # only waiting loops have run since
    host: tuple[np.ndarray, ...]  # basic blocks, calls, barriers
    order: tuple[int, ...]  # the basic blocks at which threads stand, in the order in which they ran last
    registers: dict[str, Any]
    leaves: list[Any]  # arrays of the machine
    copies: list[np.ndarray] | None  # their values, if statements have changed them in place
    executed: dict[int, np.ndarray] = field(default_factory=dict)  # threads that have run each basic block since


class RepetitionDetector:
    """Compares states of a schedule that lie ever farther apart."""

    def __init__(self) -> None:
        self._state: _State | None = None
        self._polls = 0  # basic blocks of waiting loops, one after the other
        self._copies_memory = False
        self._relevant: dict[frozenset[int], set[str] | None] = {}  # by executed basic blocks; None: they read a clock

    def observe(self, schedule: Schedule, number: int, mask: np.ndarray) -> None:
        """Note the basic block that runs next, and its threads.

        Raises:
            UndefinedBehaviour: The state is one of before.
        """
        if schedule.saves.in_use(schedule):
            self._state = None
            return
        polls = bool(schedule.polling[number])
        self._polls = self._polls + 1 if polls else 0
        state = self._state
        if state is not None and state.polls and not polls:
            state = self._state = None
        if state is not None and number == state.number and self._repeats(schedule, state):
            raise UndefinedBehaviour(describe_deadlock(schedule, state.executed))
        if _is_power(self._polls, FIRST_POLLS) or (_is_power(schedule.time, FIRST_TIME) and not (state is not None and state.polls)):
            state = self._state = self._take_state(schedule, number, polls)
        if state is not None:
            before = state.executed.get(number)
            state.executed[number] = mask.copy() if before is None else before | mask

    def _take_state(self, schedule: Schedule, number: int, polls: bool) -> _State:
        leaves = _state_leaves(schedule)
        copies = [np.array(leaf) for leaf in leaves] if self._copies_memory else None
        host = tuple(array.copy() for array in _host_state(schedule))
        return _State(number, polls, host, _run_order(schedule), dict(schedule.chunk.registers), leaves, copies)

    def _repeats(self, schedule: Schedule, state: _State) -> bool:
        """Return True if the state is the same, and every thread that can go on has run."""
        if not all(np.array_equal(old, new) for old, new in zip(state.host, _host_state(schedule), strict=True)):
            return False
        if state.order != _run_order(schedule) or not self._same_registers(schedule, state):
            return False
        ran = np.logical_or.reduce(list(state.executed.values()))
        for number, threads in schedule.standing_threads():
            if schedule.can_run(number, threads, ~ran):
                return False
        leaves = _state_leaves(schedule)
        if all(old is new for old, new in zip(state.leaves, leaves, strict=True)):
            return True
        if state.copies is None:
            self._copies_memory = sum(leaf.nbytes for leaf in leaves) <= COPY_LIMIT
            return False
        if all(np.array_equal(old, np.asarray(new)) for old, new in zip(state.copies, leaves, strict=True)):
            return True
        self._state = None  # memory has changed, and is not compared again before the next state
        return False

    def _same_registers(self, schedule: Schedule, state: _State) -> bool:
        key = frozenset(state.executed)
        if key not in self._relevant:
            blocks = [schedule.kernel.blocks[number] for number in key]
            self._relevant[key] = None if any(map(_reads_clock, blocks)) else relevant_registers(blocks)
        registers, relevant = schedule.chunk.registers, self._relevant[key]
        if relevant is None:
            return False
        for name in relevant:
            old, new = state.registers.get(name), registers.get(name)
            if old is not new and (old is None or new is None or not np.array_equal(np.asarray(old), np.asarray(new))):
                return False
        return True


def _is_power(count: int, first: int) -> bool:
    """Return True for first, 2 first, 4 first, ..., where `first` is a power of two."""
    return count >= first and count & (count - 1) == 0


def _state_leaves(schedule: Schedule) -> list[Any]:
    chunk = schedule.chunk
    return [chunk[name] for name in STATE_FIELDS] + [
        chunk.leaves[index] for key in STATE_KEYS for index in chunk.layout.leaves_below("extra", key)
    ]


def _host_state(schedule: Schedule) -> tuple[np.ndarray, ...]:
    barriers = schedule.barriers
    return (
        schedule.pc, schedule.depth, schedule.calls, schedule.exited, barriers.waiting, barriers.arrivals, barriers.counts,
        barriers.cluster_arrivals, barriers.cluster_waits,
    )  # fmt: skip


def _run_order(schedule: Schedule) -> tuple[int, ...]:
    return tuple(sorted((number for number, _ in schedule.standing_threads()), key=lambda number: schedule.last_run[number]))


# ---- registers that decide how a run goes on


def _reads_clock(linked: LinkedBlock) -> bool:
    operands = [each.executed_statement.operands for each in linked.statements]
    return any(isinstance(part, Register) and part.name in TIMERS for each in operands for part in nested_operands(each))


def relevant_registers(blocks: list[LinkedBlock]) -> set[str]:
    """Return the qualified names of the registers that reach anything but other registers within basic blocks."""
    needed: set[str] = set()
    sources: dict[str, set[str]] = defaultdict(set)  # of each register that an operation writes
    for linked in blocks:
        moves = [move for callee in linked.callees for move in (*callee.argument_moves, *callee.result_moves)]
        if linked.terminator is not None:
            needed.update(qualified_registers(linked.terminator.statement, linked.names))
        for each in (*linked.statements, *moves):
            statement, names = each.executed_statement, each.names
            if not isinstance(each.semantics, Operation):
                needed.update(() if statement.name in NO_EFFECT else qualified_registers(statement, names))
                continue
            operation = each.semantics
            count = len(operation.results) - operation.carry_out
            flat = flatten_operands(statement.operands)
            read = {name for operand in flat[count:] for name in _operand_registers(operand, names)}
            read |= {names.prefix + CARRY} if operation.carry_in else set()
            read |= {names.prefix + statement.guard.register} if statement.guard is not None else set()
            written = {name for operand in flat[:count] for name in _operand_registers(operand, names)}
            for name in written | ({names.prefix + CARRY} if operation.carry_out else set()):
                sources[name] |= read
    work = list(needed)
    while work:
        for name in sources.pop(work.pop(), ()):
            if name not in needed:
                needed.add(name)
                work.append(name)
    return needed


def _operand_registers(operand: Operand, names: NameTable) -> Iterator[str]:
    for part in nested_operands((operand,)):
        resolved = names.resolve(part) if part is not operand or not isinstance(part, Address) else part
        if isinstance(resolved, Register):
            yield names.qualified_name(resolved)


# ---- messages


def describe_deadlock(schedule: Schedule, executed: dict[int, np.ndarray]) -> str:
    """Return what threads wait for that run the same basic blocks again and again.

    Args:
        schedule: The schedule.
        executed: The threads that run each basic block.
    """
    waits = []
    for number in sorted(executed):
        linked, threads = schedule.kernel.blocks[number], executed[number] & ~schedule.exited
        for each in linked.statements:
            if each.statement.name == "mbarrier" and set(WAITS) & set(each.statement.qualifiers):
                waits += _describe_mbarrier(schedule, each, threads)
            elif each.statement.name in READS:
                waits += _describe_read(schedule, each, threads)
    others = schedule.describe_threads(schedule.barriers.waiting >= 0)
    if not waits and not others:
        return f"the kernel never ends: its threads come to one state again and again, and wait for nothing; {schedule.describe_threads()}"
    more = f"; and {len(waits) - MAX_DESCRIBED} more waits" if len(waits) > MAX_DESCRIBED else ""
    parts = [*waits[:MAX_DESCRIBED], *([others] if others else [])]
    return f"deadlock: no thread can go on but by a wait whose state no thread changes; {'; '.join(parts)}{more}{schedule.absent_blocks()}"


def _threads_and_first(schedule: Schedule, linked: LinkedStatement, threads: np.ndarray) -> tuple[str, tuple[int, int]]:
    block, thread = (int(n) for n in np.argwhere(threads)[0])
    count, blocks = int(threads.sum()), int(threads.any(-1).sum())
    several = f" of {blocks} blocks" if blocks > 1 else ""
    return f"{schedule.reporter.describe(linked, block, thread)}: {count} thread{'s' * (count != 1)}{several}", (block, thread)


def _address(schedule: Schedule, operand: Address, names: NameTable) -> np.ndarray:
    """Return the address of an operand in each thread, uint64[blocks, threads]."""
    base = np.zeros(schedule.shape, np.uint64)
    if operand.base is not None:
        base = schedule.read_operand(names.resolve(operand.base), "u64", names).astype(np.uint64)
    return base + np.uint64(operand.offset % 2**64)


def _describe_mbarrier(schedule: Schedule, linked: LinkedStatement, threads: np.ndarray) -> Iterator[str]:
    """Yield the waits of a statement, one for each mbarrier."""
    statement, names = linked.executed_statement, linked.names
    address, phase = statement.operands[1:3]
    assert isinstance(address, Address)
    size = schedule.barriers.cluster_size
    rows, offsets = locate_shared(_address(schedule, address, names), np.arange(schedule.shape[0])[:, None], size)
    shared = np.asarray(schedule.chunk["shared"]).view(np.uint64)
    parity = "parity" in statement.qualifiers
    requested = schedule.read_operand(phase, "u32" if parity else "u64", names).astype(np.uint64)
    requested = requested & np.uint64(1) if parity else requested >> np.uint64(PHASE_SHIFT) & np.uint64(1)
    groups: dict[str, np.ndarray] = {}  # threads by what they wait for, over all blocks
    for row, offset in sorted({(int(r), int(o)) for r, o in zip(rows[threads], offsets[threads], strict=True)}):
        if offset % 8 or offset // 8 >= shared.shape[1]:
            continue  # a fault
        here = threads & (rows == row) & (offsets == offset)
        pending, expected, pending_bytes, current, valid = (int(np.asarray(each)) for each in decode_barrier(shared[row, offset // 8]))
        state = f"in phase {current} it has {pending} of {expected} arrivals and {pending_bytes} bytes pending"
        state = state if valid else "it was not initialised, or was invalidated"
        block, thread = np.argwhere(here)[0]
        where = "" if row == block else f" of another block of the cluster, of rank {row % size},"
        key = f"wait for phase {int(requested[block, thread])} of the mbarrier at {offset:#x}{where} to complete; {state}"
        groups[key] = groups[key] | here if key in groups else here
    for text, here in groups.items():
        yield f"{_threads_and_first(schedule, linked, here)[0]} {text}"


def _describe_read(schedule: Schedule, linked: LinkedStatement, threads: np.ndarray) -> Iterator[str]:
    """Yield the wait of a statement that reads memory again and again."""
    statement, names = linked.executed_statement, linked.names
    address = next((operand for operand in statement.operands if isinstance(operand, Address)), None)
    results = [each for each in flatten_operands(statement.operands[:1]) if isinstance(each, Register)]
    spaces = {part.partition("::")[0] for part in statement.qualifiers}
    if address is None or not results or not threads.any() or spaces & {"param", "local", "const"}:
        return
    text, place = _threads_and_first(schedule, linked, threads)
    values = [int(schedule.read_operand(each, "u64", names)[place]) for each in results]
    at = int(_address(schedule, address, names)[place])
    space = "shared" if "shared" in spaces else ""
    yield f"{text} read {', '.join(map(hex, values))} again and again at address {at:#x}{schedule.reporter.nearest_buffer(at, space)}"
