"""Checked mode: hazards, found by the happens-before relation and not by results.

The observer follows every access to shared and to global memory, and all that orders accesses: barriers of blocks and clusters with their
counts, `bar.warp.sync`, mbarriers, fences with strong accesses, proxy fences, and the groups of `cp.async`, of bulk copies and of
`wgmma`. Two accesses to one cell, one of them a write, are a hazard if nothing orders them, whatever this run computes. Writes of equal
values are none, and neither are two strong accesses. Asynchronous accesses are in `hazards.hazard_tracker`; tensor memory is followed by
`tensor.tcgen05_protocol`, which tells of its reads of shared memory here. Source: PTX ISA 8.10, 9.7.9.25, 9.7.13, 9.7.15.7; what is
promised is the table in `promises`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tcemu.base.errors import UndefinedBehaviour
from tcemu.engine.isa.families import LANES, Mover, WmmaMemory
from tcemu.kernels.ptx.hazards.access_records import (
    ACTOR_BITS,
    COMPARED,
    REPLICATED,
    SEVERAL,
    STATEMENT_BITS,
    AccessRecords,
    decode_access,
    encode_access,
)
from tcemu.kernels.ptx.hazards.clocks import FENCED, KNOWN, MAX_PHASE_COLUMNS, VISIBLE, Clocks, Column
from tcemu.kernels.ptx.hazards.hazard_faults import Hazard
from tcemu.kernels.ptx.linker.control_flow import CLUSTER_BARRIER
from tcemu.kernels.ptx.linker.linked_kernel import Kernel, LinkedStatement
from tcemu.kernels.ptx.runtime.tracing import ExecutedStatement, PlaceReporter
from tcemu.kernels.ptx.simt.chunk import Chunk
from tcemu.kernels.ptx.simt.device_memory import (
    CONST_ROOM,
    LOCAL_ROOM,
    OFFSET_MASK,
    PARAM_ROOM,
    ROOM_BITS,
    SHARED_OFFSET_MASK,
    SHARED_ROOM,
    locate_shared,
)
from tcemu.kernels.ptx.simt.memory_access import STRONG, atomic_extent, parse_access, plain_space
from tcemu.kernels.ptx.tensor.mbarriers import PHASE_SHIFT
from tcemu.kernels.ptx.tensor.statement_forms import bind_operands
from tcemu.kernels.ptx.tensor.warp_matrices import lane_parts
from tcemu.kernels.ptx.text.module import Address, Integer, Operand, Register, Sink
from tcemu.kernels.ptx.text.ptx_types import KINDS

UNIT_BYTES = 16
MAX_CLOCK_BYTES, MAX_RECORD_BYTES = 1 << 26, 1 << 32  # above these, blocks or a memory are not followed
GENERIC_SPACES = ("", "shared", "shared::cluster", "global", "const")


class Threads(NamedTuple):
    """Threads that access memory, one for each run of bytes."""

    rows: np.ndarray  # of their blocks in the chunk, int[n]
    threads: np.ndarray  # int[n]


class Runs(NamedTuple):
    """Runs of bytes in one memory, one for each thread."""

    records: AccessRecords
    who: Threads
    first_byte: np.ndarray  # in the memory of the records, int64[n]
    places: np.ndarray  # of each run among those that were located


class Phases:
    """The clocks that threads pass on when they arrive at an mbarrier, of its open phase and of those that are complete."""

    def __init__(self, clocks: Clocks, init: int = 0, count: int = 0) -> None:
        self.open, self.complete = clocks.nothing(), clocks.nothing()
        self.parity, self.count = False, count  # of the current phase; completed phases, of earlier mbarriers at the address too
        self.init = init  # the access that initialised it

    def join(self, clocks: Clocks, clock: np.ndarray) -> None:
        """Add what a thread passes on."""
        self.open = np.maximum(clocks.fit(self.open), clocks.fit(clock))

    def see_parity(self, clocks: Clocks, parity: bool) -> None:
        """Note the parity of the current phase."""
        if parity != self.parity:
            self.complete = np.maximum(clocks.fit(self.complete), clocks.fit(self.open))
            self.open, self.parity, self.count = clocks.nothing(), parity, self.count + 1


Handler = Callable[[ExecutedStatement, np.ndarray], None]  # of a statement and the threads that execute it


class AccessTracker:
    """The accesses of threads in a chunk of blocks, and what orders them; `HazardTracker` adds asynchronous ones.

    Attributes:
        notes: The notes so far, each statement once.
    """

    def __init__(
        self, kernel: Kernel, shape: tuple[int, int], cluster: int, shared_bytes: int, chunk: Chunk, reporter: PlaceReporter
    ) -> None:
        """Follow a chunk of `shape` (blocks, threads)."""
        self.kernel, self.reporter = kernel, reporter
        self.blocks, self.threads_per_block = shape
        self.cluster, self.shared_bytes = cluster, -(-shared_bytes // UNIT_BYTES) * UNIT_BYTES
        self.room_starts, self.room_sizes = (
            np.asarray(chunk.leaves[index]).astype(np.int64) for index in chunk.layout.leaves_below("rooms")
        )
        self.notes: dict[tuple[Hazard, int], str] = {}
        self.asynchronous = any(_uses_async_proxy(line) for line in kernel.statements)
        self.orders = any(_orders_by_memory(line) for line in kernel.statements)
        self.between_blocks = True
        self.gone = np.zeros(self.blocks, bool)  # blocks that have exited
        self.reports_unwritten = not kernel.uses("cp")
        self.clocks = self._new_clocks()
        self.actors = 1 << (self.clocks.phase_column + (MAX_PHASE_COLUMNS if kernel.uses("mbarrier") else 0) + 1).bit_length()
        # groups that an access tells apart; those of shared memory are known from its place
        self.groups = min(self.blocks // self.clocks.span, (1 << ACTOR_BITS) // self.actors - 1)
        self.handlers: dict[int, Handler] = {}
        granules = {"shared": 4, "global": 4}
        for line in kernel.statements:
            handler = self._prepare(line, granules)
            if handler is not None:
                self.handlers[line.number] = handler
        warps = self.clocks.warps
        self.slots = cluster * warps + -(-warps // 4) + 1  # readers of shared memory: warps, warpgroups' products, bulk copies
        self.shared = self._records("shared", self.blocks * self.shared_bytes, granules["shared"], self.slots)
        self.memory = self._records("global", 4 * chunk["memory"].size, granules["global"], 2)
        self.mbarriers: dict[tuple[int, int], Phases] = {}
        self._touched_mbarriers: set[tuple[int, int]] = set()  # those that the current statement may have completed
        self.pools: dict[int, np.ndarray] = {}  # what threads pass to each barrier, int32[blocks, planes, columns]
        self.locations: dict[tuple[str, int], int] = {}  # what strong writes pass on, by cell: the row of `passed`
        self.passed = np.zeros((0, self.clocks.planes, self.clocks.columns), np.int32)
        self.copy_number = np.ones(shape, np.int32)  # of the cp.async that each thread issues next

    def _new_clocks(self) -> Clocks:
        """Return clocks for the accesses that the kernel has; they relate all blocks if global memory can order them."""
        statements = [line.statement for line in self.kernel.statements]
        used = [Column.ACCESS]
        if any(each.opcode.startswith(("cp.async.ca", "cp.async.cg")) for each in statements):
            used.append(Column.COPY)
        if any(each.name == "cp" and "bulk" in each.qualifiers and "global" in each.qualifiers for each in statements):
            used += [Column.BULK_READ, Column.BULK_WRITE]
        if any(each.name == "wgmma" for each in statements):
            used.append(Column.PRODUCT)
        fences = self.orders or any(each.opcode.startswith("fence.mbarrier_init") for each in statements)
        planes = 3 if fences else 2 if self.asynchronous else 1
        span = self.cluster
        if self.orders and any(_is_strong_global(line) for line in self.kernel.statements) and self.blocks > span:
            columns = len(used) * self.blocks * self.threads_per_block // LANES
            if 4 * self.blocks * self.threads_per_block * planes * columns <= MAX_CLOCK_BYTES:
                span = self.blocks
            else:
                self.between_blocks = False
        return Clocks(self.blocks, self.threads_per_block, span, used, planes)

    def _records(self, name: str, size: int, granule: int, slots: int) -> AccessRecords | None:
        """Return the records of a memory; None if they would be too large."""
        cells = size // granule
        if not cells or cells * (14 + 8 * slots) > MAX_RECORD_BYTES or len(self.kernel.statements) >= 1 << STATEMENT_BITS:
            return None
        if name == "global" and self.groups < self.blocks // self.clocks.span:
            return None
        return AccessRecords(name, cells, granule, slots, rotates=name == "global")

    def __call__(self, event: ExecutedStatement) -> None:
        """Follow a statement that threads have executed. Raises UndefinedBehaviour."""
        handler = self.handlers.get(event.linked.number)
        if handler is None:
            return
        executing = np.asarray(event.executing())
        if executing.any():
            handler(event, executing)
            for row, offset in self._touched_mbarriers:  # once all threads of the statement have passed on what they know
                self._see_parity(event, row, offset)
            self._touched_mbarriers.clear()

    # ---- the handlers of statements

    def _prepare(self, line: LinkedStatement, granules: dict[str, int]) -> Handler | None:
        """Return the handler of a statement; None if it neither accesses a followed memory nor orders anything."""
        statement, name = line.statement, line.statement.name
        kind = statement.qualifiers[:1]
        if name in ("ld", "ldu", "st") and kind not in (("async",), ("bulk",)):
            access = parse_access(statement, line.context)
            if access.space not in GENERIC_SPACES:
                return None
            bits = KINDS[access.kind].bits
            narrow_granules(granules, access.space, bits // 8)
            registers = access.registers if name == "st" else None
            return self._access_handler(line, access.space, access.address, access.elements * bits // 8, registers, bits)
        if name in ("atom", "red") and kind != ("async",):
            extent = atomic_extent(statement, line.context)
            narrow_granules(granules, extent.space, extent.element)
            return self._atomic_handler(line, extent.space, extent.address, extent.size)
        if name in ("ldmatrix", "stmatrix"):
            return self._matrix_handler(line)
        if name == "wmma":
            return self._wmma_handler(line)
        if name in ("membar", "fence"):
            return self._fence_handler(line)
        if name == "bar":  # bar.warp.sync; barriers of blocks end basic blocks
            return lambda event, executing: self._synchronise_warps(executing)
        if name == "mbarrier":
            return self._mbarrier_handler(line)
        if name == "tcgen05" and kind in (("commit",), ("alloc",)):
            return self._commit_handler(line) if kind == ("commit",) else self._allocation_handler(line)
        return None

    # ---- places

    def _locate(self, event: ExecutedStatement, space: str, address: np.ndarray, executing: np.ndarray, size: int) -> list[Runs]:
        """Locate runs of bytes, one for each executing thread, in the memories that are followed; others are left out."""
        who = Threads(*np.nonzero(executing))
        address = address[who].astype(np.uint64)
        room = (address >> np.uint64(ROOM_BITS)).astype(np.int64)
        found = []
        is_shared = np.full(room.shape, True) if space.startswith("shared") else room == SHARED_ROOM
        if self.shared is not None and is_shared.any() and space not in ("global", "const"):
            own, offset = locate_shared(address, who.rows, self.cluster)
            self._check_owners(event, who, np.where(is_shared, own, who.rows), space == "shared")
            good = is_shared & (offset + size <= self.shared_bytes)
            found.append(_select(self.shared, who, own * self.shared_bytes + offset, good))
        is_global = ~is_shared & ~np.isin(room, (LOCAL_ROOM, PARAM_ROOM, CONST_ROOM))
        if self.memory is not None and is_global.any():
            known = np.where(room < len(self.room_starts), room, 0)
            offset = (address & np.uint64(OFFSET_MASK)).astype(np.int64)
            good = is_global & (room < len(self.room_starts)) & (offset + size <= self.room_sizes[known])
            found.append(_select(self.memory, who, 4 * self.room_starts[known] + offset, good))
        return [each for each in found if len(each.places)]

    def _check_owners(self, event: ExecutedStatement, who: Threads, own: np.ndarray, only_own: bool) -> None:
        """Report accesses to the shared memory of blocks that have exited, or with `only_own` of another block."""
        for wrong, hazard in (((own != who.rows) & only_own, Hazard.FOREIGN_BLOCK), (self.gone[own], Hazard.EXITED_BLOCK)):
            if wrong.any():
                at = int(wrong.argmax())
                self._forbid(event, hazard, int(who.rows[at]), int(who.threads[at]), int(own[at]) % self.cluster)

    def _one(self, row: int, thread: int) -> Threads:
        return Threads(np.array([row]), np.array([thread]))

    def _actor(self, kind: Column, who: Threads) -> np.ndarray:
        return self._group(who.rows) * self.actors + self.clocks.column(kind, who.rows, who.threads // LANES)

    def _group(self, rows: Any) -> Any:
        return rows // self.clocks.span % self.groups

    # ---- checks

    def _unordered(self, accesses: np.ndarray, rows: np.ndarray, threads: np.ndarray, plane: int, strong: bool) -> np.ndarray:
        """Return the flat indices of earlier accesses that do not happen before what threads do now; arguments of one shape, flat."""
        index = np.flatnonzero(accesses)
        if not len(index):
            return index
        earlier, rows, threads = decode_access(accesses[index]), rows[index], threads[index]
        group, column = earlier.actor // self.actors, earlier.actor % self.actors
        same = group == self._group(rows)
        column = np.where(same, column, 0)
        ordered = same & self.clocks.knows(rows, threads, column, earlier.number, plane)
        if not self.between_blocks:
            ordered |= ~same
        warps, lanes = threads // LANES, threads % LANES
        own = same & (lanes == earlier.lane) & (~earlier.several | earlier.strong)
        if plane == KNOWN:
            ordered |= own & (column == self.clocks.column(Column.ACCESS, rows, warps))
            if Column.COPY in self.clocks.first:
                waited = self.clocks.copied[rows, threads] >= earlier.number
                ordered |= own & waited & (column == self.clocks.column(Column.COPY, rows, warps))
        if strong:
            ordered |= earlier.strong
        return index[~ordered]

    def _check_writer(
        self, event: ExecutedStatement, runs: Runs, cells: np.ndarray, strong: bool, hazard: Hazard, skip: Any = None
    ) -> None:
        """Report cells, int64[n, cells], whose last write is not ordered before the threads' access; skip: bool of their shape."""
        writers = runs.records.writer[cells]
        if hazard is Hazard.UNORDERED_READ:
            writers = np.where(writers & COMPARED == COMPARED, 0, writers)
        if skip is not None:
            writers = np.where(skip, 0, writers)
        if not writers.any():
            return
        rows, threads = (np.broadcast_to(each[:, None], cells.shape).ravel() for each in runs.who)
        wrong = self._unordered(writers.ravel(), rows, threads, KNOWN, strong)
        if len(wrong):
            self._report(event, hazard, runs.records, int(writers.ravel()[wrong[0]]), int(rows[wrong[0]]), int(threads[wrong[0]]))

    def _check_readers(self, event: ExecutedStatement, runs: Runs, cells: np.ndarray, strong: bool) -> None:
        """Report cells with reads that are not ordered before the threads' writes."""
        readers = runs.records.readers[cells]
        if not readers.any():
            return
        shape = readers.shape
        rows, threads = (np.broadcast_to(each[:, None, None], shape).ravel() for each in runs.who)
        readers = readers.ravel()
        wrong = self._unordered(readers, rows, threads, KNOWN, strong)
        if not len(wrong):
            return
        hazard = Hazard.UNORDERED_OVERWRITE
        if runs.records.rotates:
            group, column = np.divmod(decode_access(readers[wrong]).actor, self.actors)
            own_block = group * self.clocks.span + column // self.clocks.warps == rows[wrong]  # reads have columns of accesses alone
            replicated = own_block & (readers[wrong] & (REPLICATED | SEVERAL) != 0)
            if replicated.all():
                hazard = Hazard.REPLICATED_READ
            else:
                wrong = wrong[~replicated]
        self._report(event, hazard, runs.records, int(readers[wrong[0]]), int(rows[wrong[0]]), int(threads[wrong[0]]))

    def _describe_actor(self, access: int, finder: int) -> tuple[str, Column | None]:
        """Return an earlier access in words, and its column; None for a copy that completes at an mbarrier. finder: row of a block."""
        earlier, clocks = decode_access(access), self.clocks
        line = self.kernel.statements[earlier.statement]
        group, column = divmod(int(earlier.actor), self.actors)
        group = finder // clocks.span if group == self._group(finder) else group
        if column >= clocks.phase_column:
            return f"that is line {line.statement.position.line}, {line.statement.opcode}", None
        position, place = divmod(column, clocks.span * clocks.warps)
        row, thread = group * clocks.span + place // clocks.warps, place % clocks.warps * LANES + int(earlier.lane)
        kind = list(clocks.first)[position]
        if kind is Column.COPY and clocks.copied[row, thread] >= earlier.number:  # its thread has waited for it
            kind = Column.ACCESS
        return f"that is {self.reporter.describe(line, row, thread)}", kind

    def _report(self, event: ExecutedStatement, hazard: Hazard, records: AccessRecords, access: int, row: int, thread: int) -> None:
        """Raise a hazard between an earlier access and this one."""
        words, kind = self._describe_actor(access, row)
        if kind in (Column.BULK_READ, Column.PRODUCT):
            hazard = Hazard.COPY_READS
        elif kind is None or kind in (Column.BULK_WRITE, Column.COPY):
            hazard = Hazard.PENDING_COPY if hazard is not Hazard.PROXY_FENCE_MISSING else hazard
        self._forbid(event, hazard, row, thread, records.name, words)

    def _forbid(self, event: ExecutedStatement, hazard: Hazard, row: int, thread: int, *words: object) -> None:
        """Raise a hazard, after the faults that the statement itself has met; keep a note."""
        if hazard.value.is_note and (hazard, event.linked.number) in self.notes:
            return
        text = f"{self.reporter.describe(event.linked, row, thread)}: {hazard.message(*words)}"
        if not hazard.value.is_note:
            self.reporter.raise_fault(event.chunk)
            raise UndefinedBehaviour(text)
        self.notes[hazard, event.linked.number] = text

    # ---- accesses by threads

    def _note_read(self, event: ExecutedStatement, runs: Runs, cells: np.ndarray, strong: bool) -> None:
        who = runs.who
        access = encode_access(
            self._actor(Column.ACCESS, who), self.clocks.epoch[who.rows, who.threads // LANES], event.linked.number,
            who.threads % LANES, strong,
        )  # fmt: skip
        slots = who.rows % self.cluster * self.clocks.warps + who.threads // LANES
        flat = [np.broadcast_to(each[:, None], cells.shape).ravel() for each in (access, slots)]
        runs.records.note_read(cells.ravel(), *flat)

    def _read(self, event: ExecutedStatement, space: str, address: np.ndarray, executing: np.ndarray, size: int, strong: bool) -> None:
        for runs in self._locate(event, space, address, executing, size):
            cells = runs.records.cells(runs.first_byte, size)
            unwritten = (runs.records.writer[cells] == 0).any(-1)
            if runs.records is self.shared and self.reports_unwritten and unwritten.any():
                at = int(unwritten.argmax())
                row, thread = int(runs.who.rows[at]), int(runs.who.threads[at])
                self._forbid(event, Hazard.UNWRITTEN_READ, row, thread, size, int(address[row, thread]))
            self._check_writer(event, runs, cells, strong, Hazard.UNORDERED_READ)
            self._note_read(event, runs, cells, strong)

    def _write(
        self, event: ExecutedStatement, space: str, address: np.ndarray, executing: np.ndarray, size: int, strong: bool,
        values: np.ndarray | None, kind: Column = Column.ACCESS, compares: bool = False,
    ) -> None:  # fmt: skip
        """Check and record writes.

        Args:
            event, space, address, executing, size, strong: As of `_read`.
            values: The bytes of each executing thread, uint8[n, size]; None: not known.
            kind: What makes the writes.
            compares: They are compare-and-swaps. A loop around one begins with a plain read, as in NVIDIA's examples; the swap itself
                sees a stale value.
        """
        for runs in self._locate(event, space, address, executing, size):
            records, who = runs.records, runs.who
            cells = records.cells(runs.first_byte, size)
            own = None if values is None else np.ascontiguousarray(values[runs.places]).view(f"<u{records.granule}").astype(np.uint32)
            equal = None if own is None else records.value[cells] == own
            self._check_writer(event, runs, cells, strong, Hazard.UNORDERED_WRITE, equal)
            if not compares:
                self._check_readers(event, runs, cells, strong)
            number = self.copy_number if kind is Column.COPY else None
            numbers = self.clocks.epoch[who.rows, who.threads // LANES] if number is None else number[who.rows, who.threads]
            access = encode_access(self._actor(kind, who), numbers, event.linked.number, who.threads % LANES, strong)
            access = access | COMPARED if compares else access
            records.note_write(cells, np.broadcast_to(access[:, None], cells.shape), own)
            if own is not None and not strong:
                lost = records.value[cells] != own
                if lost.any():
                    at = int(np.argwhere(lost)[0, 0])
                    winner = int(records.writer[cells[lost][0]])
                    self._report(event, Hazard.UNORDERED_WRITE, records, winner, int(who.rows[at]), int(who.threads[at]))

    def _access_handler(
        self, line: LinkedStatement, space: str, address: Address, size: int, registers: tuple[Operand, ...] | None, bits: int
    ) -> Handler:
        parts = set(line.statement.qualifiers)
        strong = bool(STRONG & parts)

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            place = event.operand_value(address, "b64")
            if registers is None:
                self._read(event, space, place, executing, size, strong)
            else:
                values = [event.operand_value(each, f"b{bits}")[executing] for each in registers]
                stacked = np.stack([each.astype(f"<u{bits // 8}") for each in values], axis=-1)
                self._write(event, space, place, executing, size, strong, stacked.view(np.uint8).reshape(len(stacked), -1))
            if strong and self.orders:
                self._synchronise_by_memory(event, space, place, executing, parts, registers is None, registers is not None)

        return follow

    def _atomic_handler(self, line: LinkedStatement, space: str, address: Address, size: int) -> Handler:
        parts, reads = set(line.statement.qualifiers), line.statement.name == "atom"
        compares = "cas" in parts

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            place = event.operand_value(address, "b64")
            self._write(event, space, place, executing, size, True, None, compares=compares)
            if self.orders:
                self._synchronise_by_memory(event, space, place, executing, parts, reads, True)

        return follow

    def _matrix_handler(self, line: LinkedStatement) -> Handler:
        op = bind_operands(line.statement, line.context, Mover).op
        name, count = op.name, next((int(part[1:]) for part in line.statement.qualifiers if part in ("x1", "x2", "x4")), 1)
        lanes = min((16 if "m16n16" in line.statement.qualifiers else 8) * count, LANES)
        address = next(operand for operand in line.statement.operands if isinstance(operand, Address))
        space = "shared" if any(part.startswith("shared") for part in line.statement.qualifiers) else ""

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            mask = executing & (np.arange(executing.shape[1]) % LANES < lanes)
            place = event.operand_value(address, "b64")
            if name == "ldmatrix":
                self._read(event, space, place, mask, UNIT_BYTES, False)
            else:
                self._write(event, space, place, mask, UNIT_BYTES, False, None)

        return follow

    def _wmma_handler(self, line: LinkedStatement) -> Handler | None:
        """Return the handler of `wmma.load` and `wmma.store` in shared memory."""
        kind, *_ = line.statement.qualifiers
        if kind == "mma" or "global" in line.statement.qualifiers:
            return None
        bound = bind_operands(line.statement, line.context, WmmaMemory)
        lines, numbers, offsets, words = lane_parts(bound.op)

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            stride = event.operand_value(bound.operands.get("stride", Integer(bound.op.default_stride)), "s32")
            step = stride.astype(np.int32).astype(np.int64) * lines.bits // 8
            lanes = np.arange(executing.shape[1]) % LANES
            place = event.operand_value(bound.operands["p"], "b64") + (step * numbers[lanes] + offsets[lanes]).astype(np.uint64)
            mask = executing if bound.op.space else executing & (place >> np.uint64(ROOM_BITS) == np.uint64(SHARED_ROOM))
            if kind == "load":
                self._read(event, "shared::cluster", place, mask, 4 * words, False)
            else:
                self._write(event, "shared::cluster", place, mask, 4 * words, False, None)

        return follow

    def _allocation_handler(self, line: LinkedStatement) -> Handler:
        """Return the handler of `tcgen05.alloc`, whose result one lane of the warp stores."""
        address = bind_operands(line.statement, line.context).operands["dst"]

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            first = (executing.reshape(self.blocks, -1, LANES).cumsum(-1) == 1).reshape(executing.shape)
            self._write(event, "shared", event.operand_value(address, "b64"), executing & first, 4, False, None)

        return follow

    # ---- what orders threads

    def _fence_handler(self, line: LinkedStatement) -> Handler | None:
        opcode = line.statement.opcode
        if opcode.startswith("fence.proxy"):
            return (lambda event, executing: self.clocks.fence_proxy(executing)) if "async" in opcode else None

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            known = self.clocks.known
            rows, threads = np.nonzero(executing)
            known[rows, threads, FENCED] = self._own_clocks(rows, threads)[:, KNOWN]
            self._advance(executing)

        return follow

    def _own_clocks(self, rows: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Return what threads know together with their own accesses, int32[n, planes, columns]."""
        clock = self.clocks.known[rows, threads]
        at, warps = np.arange(len(rows)), threads // LANES
        clock[at, KNOWN, self.clocks.column(Column.ACCESS, rows, warps)] = self.clocks.epoch[rows, warps]
        return clock

    def _advance(self, executing: np.ndarray) -> None:
        rows, warps = np.nonzero(executing.reshape(self.blocks, -1, LANES).any(-1))
        self.clocks.epoch[rows, warps] += 1

    def _synchronise_by_memory(
        self, event: ExecutedStatement, space: str, place: np.ndarray, executing: np.ndarray, parts: set[str], reads: bool, writes: bool
    ) -> None:
        """Follow strong accesses: a write passes on what a fence or its own .release orders, and a read receives it."""
        for runs in self._locate(event, space, place, executing, 1):
            rows, threads = runs.who
            cells = runs.first_byte // runs.records.granule
            unique, inverse = np.unique(cells, return_inverse=True)
            at = np.array([self.locations.setdefault((runs.records.name, int(cell)), len(self.locations)) for cell in unique])
            missing = len(self.locations) - len(self.passed)
            if missing > 0 or self.passed.shape[-1] < self.clocks.columns:
                grown = max(missing, len(self.passed)) if missing > 0 else 0
                self.passed = self.clocks.fit(np.pad(self.passed, ((0, grown), (0, 0), (0, 0))))
            at = at[inverse]
            if writes:
                clock = self._own_clocks(rows, threads)
                if not parts & {"release", "acq_rel"}:
                    clock[:, KNOWN] = clock[:, FENCED]
                np.maximum.at(self.passed, at, clock)
                if parts & {"release", "acq_rel"}:
                    self._advance(executing)
            if reads:
                received = self.passed[at]
                known = self.clocks.known
                for plane in (KNOWN, VISIBLE):
                    known[rows, threads, plane] = np.maximum(known[rows, threads, plane], received[:, plane])

    def _synchronise_warps(self, executing: np.ndarray) -> None:
        for row, warp in np.argwhere(executing.reshape(self.blocks, -1, LANES).any(-1)).tolist():
            threads = warp * LANES + np.flatnonzero(executing[row, warp * LANES : (warp + 1) * LANES])
            self.clocks.acquire(row, threads, self.clocks.release(row, threads))

    def arrive(self, threads: np.ndarray, numbers: np.ndarray, relaxed: bool) -> None:
        """Pass on what threads know when they arrive at barriers, by number; relaxed: what their last fence ordered."""
        for number in np.unique(numbers[threads]):
            here = threads & (numbers == number)
            clock = self.clocks.fenced(here) if relaxed else self.clocks.release_blocks(here)
            before = self.pools.get(int(number))
            self.pools[int(number)] = clock if before is None else np.maximum(self.clocks.fit(before), clock)

    def release(self, threads: np.ndarray, numbers: np.ndarray) -> None:
        """Receive what others have passed on when barriers, by number, let threads go on."""
        for number in np.unique(numbers[threads]):
            pool = self.pools.get(int(number))
            if pool is None:
                continue
            here = threads & (numbers == number)
            if number == CLUSTER_BARRIER:
                clusters = pool.reshape(-1, self.cluster, *pool.shape[1:]).max(1)
                pool = np.repeat(clusters, self.cluster, axis=0)
            self.clocks.acquire_blocks(here, pool)
            if number != CLUSTER_BARRIER:
                self.pools[int(number)][here.any(-1)] = 0

    # ---- mbarriers

    def _mbarrier_users(self, event: ExecutedStatement, address: Operand, executing: np.ndarray) -> list[tuple[int, int, int, np.ndarray]]:
        """Return the row and offset of each mbarrier, and the row and numbers of the threads of a block that use it."""
        rows, threads = np.nonzero(executing)
        own, offsets = locate_shared(event.operand_value(address, "b64")[rows, threads], rows, self.cluster)
        self._check_owners(event, Threads(rows, threads), own, False)
        key = (own * (SHARED_OFFSET_MASK + 1) + offsets) * self.blocks + rows
        order = np.argsort(key, kind="stable")
        starts = np.flatnonzero(np.diff(key[order], prepend=-1))
        return [
            (int(own[part[0]]), int(offsets[part[0]]), int(rows[part[0]]), threads[part])
            for part in (order[i:j] for i, j in zip(starts, [*starts[1:], len(order)], strict=True))
        ]

    def _see_parity(self, event: ExecutedStatement, row: int, offset: int) -> None:
        shared, word = event.chunk["shared"], (offset + PHASE_SHIFT // 8) // 4
        if word < shared.shape[1]:
            parity = bool(int(np.asarray(shared)[row, word]) >> PHASE_SHIFT % 32 & 1)
            self.mbarriers[row, offset].see_parity(self.clocks, parity)

    def _use_mbarrier(self, event: ExecutedStatement, row: int, offset: int, user: int, threads: np.ndarray) -> Phases:
        """Return an mbarrier, after a check that its initialisation is ordered before the use by threads of a block."""
        phases = self.mbarriers.get((row, offset))
        if phases is None:
            phases = self.mbarriers[row, offset] = Phases(self.clocks)
        if phases.init:
            rows = np.full(len(threads), user)
            wrong = self._unordered(np.full(len(threads), phases.init), rows, threads, KNOWN, False)
            if len(wrong):
                words, _ = self._describe_actor(phases.init, user)
                self._forbid(event, Hazard.UNORDERED_INIT, user, int(threads[wrong[0]]), words)
        return phases

    def _mbarrier_handler(self, line: LinkedStatement) -> Handler | None:
        statement = line.statement
        kind = statement.qualifiers[0]
        address = next((operand for operand in statement.operands if isinstance(operand, Address)), None)
        if address is None:
            return None
        done = statement.operands[0]

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            for row, offset, user, threads in self._mbarrier_users(event, address, executing):
                if kind in ("init", "inval"):
                    init = self._own_access(event, user, int(threads[-1])) if kind == "init" else 0
                    before = self.mbarriers.get((row, offset))
                    self.mbarriers[row, offset] = Phases(self.clocks, init, 0 if before is None else before.count)
                    continue
                phases = self._use_mbarrier(event, row, offset, user, threads)
                if kind in ("test_wait", "try_wait"):
                    self._wait(event, done, row, offset, user, threads, phases)
                    continue
                if kind not in ("expect_tx", "complete_tx") and "relaxed" not in statement.qualifiers:
                    phases.join(self.clocks, self.clocks.release(user, threads))
                self._touched_mbarriers.add((row, offset))

        return follow

    def _own_access(self, event: ExecutedStatement, row: int, thread: int) -> int:
        actor = self._actor(Column.ACCESS, self._one(row, thread))
        return int(encode_access(actor, self.clocks.epoch[row, thread // LANES], event.linked.number, thread % LANES)[0])

    def _wait(self, event: ExecutedStatement, done: Operand, row: int, offset: int, user: int, threads: np.ndarray, phases: Phases) -> None:
        """Receive what an mbarrier passes on, by the threads whose wait has succeeded."""
        if isinstance(done, Sink) or not isinstance(done, Register):
            return
        complete = np.asarray(event.chunk.register(event.linked.names.qualified_name(done), "pred"))[user, threads]
        threads = threads[complete]
        if not len(threads):
            return
        if "relaxed" not in event.linked.statement.qualifiers:
            self.clocks.acquire(user, threads, phases.complete)
        column = self.clocks.column_of_phases(row, offset)
        if column is not None:
            known = self.clocks.known
            known[user, threads, KNOWN, column] = np.maximum(known[user, threads, KNOWN, column], phases.count)

    def _commit_handler(self, line: LinkedStatement) -> Handler:
        bound = bind_operands(line.statement, line.context)

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            masks = event.operand_value(bound.operands["cta_mask"], "b16") if "cta_mask" in bound.operands else None
            for row, offset, user, threads in self._mbarrier_users(event, bound.operands["mbar"], executing):
                first = user - user % self.cluster
                mask = None if masks is None else int(masks[user, threads[0]])
                targets = [row] if mask is None else [first + rank for rank in range(self.cluster) if mask >> rank & 1]
                clock = self.clocks.release(user, threads)
                for target in targets:
                    phases = self._use_mbarrier(event, target, offset, user, threads)
                    phases.join(self.clocks, clock)
                    self._touched_mbarriers.add((target, offset))

        return follow


# ---- helpers


def _select(records: AccessRecords, who: Threads, first_byte: np.ndarray, good: np.ndarray) -> Runs:
    index = np.flatnonzero(good)
    return Runs(records, Threads(who.rows[index], who.threads[index]), first_byte[index], index)


def narrow_granules(granules: dict[str, int], space: str, size: int) -> None:
    """Make the cells of the memories that an access may touch no larger than one of its elements."""
    for name in granules:
        if not space or space.startswith(name):
            granules[name] = min(granules[name], size)


def _uses_async_proxy(line: LinkedStatement) -> bool:
    return line.statement.name in ("wgmma", "tcgen05") or (line.statement.name == "cp" and "bulk" in line.statement.qualifiers)


def _orders_by_memory(line: LinkedStatement) -> bool:
    """Return True for a fence, a release or an acquire, without which strong accesses order nothing."""
    statement = line.statement
    if statement.name == "membar" or (statement.name == "fence" and not statement.opcode.startswith(("fence.proxy", "fence.mbarrier"))):
        return True
    return statement.name in ("ld", "st", "atom", "red") and bool({"acquire", "release", "acq_rel"} & set(statement.qualifiers))


def _is_strong_global(line: LinkedStatement) -> bool:
    """Return True for a strong access that may be to global memory."""
    statement = line.statement
    strong = statement.name in ("atom", "red") or (statement.name in ("ld", "st") and STRONG & set(statement.qualifiers))
    return bool(strong) and plain_space(next((part for part in statement.qualifiers if part.startswith("shared")), "")) == ""
