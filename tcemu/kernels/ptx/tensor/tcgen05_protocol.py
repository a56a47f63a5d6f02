"""Checked mode: the asynchronous protocol of `tcgen05`, in the order in which threads execute statements.

The emulation completes everything when it is issued, so values do not show a missing wait. The host therefore follows what each warp knows
to be complete. The work of a warp is three streams: its products, copies and shifts, which a commit and the mbarrier's phase complete; its
stores, which wait::st completes; and its loads, which wait::ld or a use of the loaded register completes. A warp knows how far each stream
of its cluster has come. It learns that from its own waits, and from others at barriers, mbarriers, fences and atomics. Tensor memory
records the last write, product and load of each 16 lanes of a column, shared memory the last product that reads each 16 bytes.

Knowledge is that of warps, and whatever may order threads passes it on. So what is found is a fault, but not every fault is found. What
only `tcgen05.fence` would order is a note. Source: PTX ISA 9.7.16.6; the rows of `Tcgen05Fault`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from tcemu.base.errors import UndefinedBehaviour
from tcemu.engine.instructions.tcgen05_faults import Tcgen05Fault, is_pipelined
from tcemu.engine.instructions.tcgen05_operands import BAND, BANDS, PADDED_KINDS, OperandCells, operand_cells, shared_extents
from tcemu.engine.isa.families import LANES
from tcemu.engine.isa.targets import TARGETS
from tcemu.engine.isa.tcgen05 import Tcgen05, Tcgen05Allocation, Tcgen05Commit, Tcgen05Copy, Tcgen05Mma, Tcgen05Move, Tcgen05Shift
from tcemu.engine.isa.tcgen05_descriptors import InstructionDescriptor, decode_instruction_descriptor
from tcemu.engine.layouts.sparsity import undefined_fields
from tcemu.engine.layouts.tcgen05_memory import BY_MODE, FIELDS, decode_tcgen05_descriptor, descriptor_problem, tcgen05_unit_addresses
from tcemu.engine.layouts.tensor_memory import LANES as TENSOR_LANES
from tcemu.engine.layouts.tensor_memory import (
    QUARTER,
    SHIFT_COLUMNS,
    AccumulatorLayout,
    accumulator_layout,
    copy_lanes,
    metadata_cells,
    move_cells,
    scale_cells,
)
from tcemu.kernels.ptx.hazards.hazard_tracker import HazardTracker
from tcemu.kernels.ptx.linker.control_flow import CLUSTER_BARRIER, ending_kind
from tcemu.kernels.ptx.linker.linked_kernel import Kernel, LinkedStatement
from tcemu.kernels.ptx.runtime.tracing import ExecutedStatement, PlaceReporter, qualified_registers
from tcemu.kernels.ptx.simt.device_memory import ROOM_BITS, SHARED_ROOM, locate_shared
from tcemu.kernels.ptx.simt.tensor_memory_state import PIECE
from tcemu.kernels.ptx.tensor.mbarriers import PHASE_SHIFT
from tcemu.kernels.ptx.tensor.statement_forms import BoundStatement, bind_operands, vector_elements
from tcemu.kernels.ptx.text.module import Address, Operand, Register, Sink

WORK, STORES, LOADS = range(3)  # the streams of a warp
UNIT = 16  # bytes of shared memory that have one record
NEVER = -1
SWIZZLE_WIDTHS = {row.mode: row.width if row.mask else 0 for row in BY_MODE.values()}  # in bytes, by the descriptor's field
ORDERING_QUALIFIERS = frozenset({"volatile", "relaxed", "acquire", "release", "mmio"})


class CellAccess(NamedTuple):
    """Cells that a statement accesses in one block."""

    row: int  # of the block in the chunk
    bands: np.ndarray  # int[n]
    first: int  # column
    end: int  # column behind the last
    name: str = ""  # of the operand

    @property
    def cells(self) -> tuple:
        """The index of the cells' records."""
        return self.row, self.bands[:, None], np.arange(self.first, self.end)


class Records:
    """The last accesses of one sort to places: the stream, and the number of the access in it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.stream = np.full(shape, NEVER, np.int32)
        self.number = np.zeros(shape, np.int64)

    def set(self, index: tuple, stream: int, number: int) -> None:
        """Record an access."""
        self.stream[index], self.number[index] = stream, number

    def forget(self, index: tuple) -> None:
        """Forget the accesses."""
        self.stream[index] = NEVER

    def unknown(self, index: tuple, known: np.ndarray) -> np.ndarray:
        """Return the streams of accesses that a warp does not know to be complete; `known`: its numbers by stream."""
        stream = self.stream[index]
        return np.asarray(stream[(stream != NEVER) & (self.number[index] > known[stream])])


class Passed(NamedTuple):
    """The knowledge that a thread passes on: numbers by stream that are complete, and those of them that fences order."""

    known: np.ndarray
    fenced: np.ndarray

    def join(self, other: Passed) -> None:
        """Add what another passes on."""
        np.maximum(self.known, other.known, out=self.known)
        np.maximum(self.fenced, other.fenced, out=self.fenced)


class _Barrier:
    """The knowledge that threads have passed to an mbarrier, in its open phase and in those that are complete."""

    def __init__(self, streams: int) -> None:
        self.phase = False
        self.open, self.complete = _nothing(streams), _nothing(streams)

    def see_phase(self, phase: bool) -> None:
        """Note the parity of the current phase."""
        if phase != self.phase:
            self.complete.join(self.open)
            self.phase, self.open = phase, _nothing(len(self.open.known))


def _nothing(streams: int) -> Passed:
    return Passed(np.zeros(streams, np.int64), np.zeros(streams, np.int64))


class Tcgen05Protocol:
    """The protocol state of a chunk of blocks.

    Attributes:
        known: What each warp knows to be complete, int64[blocks, warps, streams]: a number in each stream of its cluster.
        received, published, ordered: The same of what fences order: received at a barrier, to be passed on, and since the last fence.
        issued: Numbers of the last accesses, int64[blocks, warps, 3].
        notes: The notes so far, each line once.
        hazards: The tracker, which follows the shared memory that products and copies read.
    """

    def __init__(
        self, kernel: Kernel, shape: tuple[int, int], shared_bytes: int, cluster: int, reporter: PlaceReporter, hazards: HazardTracker
    ) -> None:
        """Begin with a chunk of `shape` (blocks, threads)."""
        blocks, threads = shape
        self.hazards = hazards
        self.reporter, self.cluster, self.blocks, self.warps = reporter, cluster, blocks, threads // LANES
        self.notes: dict[tuple[Tcgen05Fault, int], str] = {}
        self.bound = {
            line.number: bind_operands(line.statement, line.context, Tcgen05)
            for line in kernel.statements
            if line.statement.name == "tcgen05"
        }
        self._require_one_group(kernel)
        self.streams = cluster * self.warps * 3
        shape = (blocks, self.warps)
        self.known, self.received, self.published, self.ordered = (np.zeros((*shape, self.streams), np.int64) for _ in range(4))
        self.issued, self.thread_issued = np.zeros((*shape, 3), np.int64), np.zeros((blocks, threads), np.int64)
        self.columns = TARGETS[kernel.target].tensor_columns
        cells, units = (blocks, BANDS, self.columns), (blocks, -(-shared_bytes // UNIT) + 1)
        self.writes, self.reads, self.loads = Records(cells), Records(cells), Records(cells)
        self.written, self.tags = np.zeros(cells, bool), np.zeros(cells, np.int32)
        self.shared_reads, self.generic_writes = Records(units), np.zeros(units, bool)
        self.signatures: list[tuple] = [()]
        self.barriers: dict[tuple[int, int], _Barrier] = {}
        self.pools = [_nothing(self.streams) for _ in range(blocks)]  # of the barriers of each block
        self.cluster_pools = [_nothing(self.streams) for _ in range(blocks // cluster)]
        self.collectors: set[tuple[int, int, str]] = set()
        self.loaded: dict[str, np.ndarray] = {}  # number of the last load to a register, by qualified name
        self.uses = self._find_uses(kernel)

    # ---- what is followed

    def _require_one_group(self, kernel: Kernel) -> None:
        """Raise UndefinedBehaviour for a kernel with instructions of both cta_groups."""
        first: tuple[int, LinkedStatement] | None = None
        for line in kernel.statements:
            group = getattr(self.bound[line.number].op, "cta_group", None) if line.number in self.bound else None
            if group is None:
                continue
            if first is not None and group != first[0]:
                text = Tcgen05Fault.MIXED_GROUPS.message(group, first[1].statement.position.line)
                raise UndefinedBehaviour(f"{line.statement.line_text}: {line.statement.opcode}: {text}")
            first = first or (group, line)

    def _find_uses(self, kernel: Kernel) -> dict[int, tuple[str, ...]]:
        """Return the registers of loads that other statements name, by the statement's number.

        Compilers move statements between a load and its wait, since they do not know that the two belong together; ptxas does. So a
        statement is left out if a wait::ld follows it before control flow does.
        """
        for number, bound in self.bound.items():
            if isinstance(bound.op, Tcgen05Move) and bound.op.name == "tcgen05.ld":
                for register in _load_registers(bound):
                    self.loaded[kernel.statements[number].names.qualified_name(register)] = np.zeros((self.blocks, self.warps), np.int64)
        uses, waits = {}, False
        for line in reversed(kernel.statements if self.loaded else []):
            waits = line.statement.opcode.startswith("tcgen05.wait::ld") or (waits and not ending_kind(line.statement))
            bound = self.bound.get(line.number)
            if not waits and (bound is None or not bound.op.family.startswith("tcgen05.ld")):
                found = tuple(name for name in qualified_registers(line.statement, line.names) if name in self.loaded)
                if found:
                    uses[line.number] = found
        return uses

    def _check_loaded(self, event: ExecutedStatement, names: tuple[str, ...], warps: np.ndarray) -> None:
        """Note a use of registers whose load has not been waited for, which CuTe's kernels have; the load is then complete."""
        row, warp = np.indices(warps.shape)
        known = self.known[row, warp, (row % self.cluster * self.warps + warp) * 3 + LOADS]
        pending = warps & np.any([self.loaded[name] > known for name in names], axis=0)
        if pending.any():
            block, first = (int(i) for i in np.argwhere(pending)[0])
            self._forbid(event, block, first * LANES, Tcgen05Fault.LOADED_TOO_EARLY)
        for name in names:
            self._complete_own(LOADS, warps, self.loaded[name])

    def __call__(self, event: ExecutedStatement) -> None:
        """Follow a statement that threads have executed. Raises UndefinedBehaviour."""
        line, bound = event.linked, self.bound.get(event.linked.number)
        name = line.statement.name
        uses = self.uses.get(line.number, ())
        if bound is None and not uses and name not in FOLLOWED:
            return
        executing = np.asarray(event.executing())
        if not executing.any():
            return
        warps = np.asarray(executing.reshape(self.blocks, self.warps, LANES).any(-1))
        if uses:
            self._check_loaded(event, uses, warps)
        if bound is not None:
            self._follow_tcgen05(event, bound, executing, warps)
        elif name in FOLLOWED:
            FOLLOWED[name](self, event, executing, warps)

    def _follow_tcgen05(self, event: ExecutedStatement, bound: BoundStatement, executing: np.ndarray, warps: np.ndarray) -> None:
        op = bound.op
        if isinstance(op, Tcgen05Allocation):
            if op.name == "tcgen05.dealloc":
                self._free(event, bound, executing)
        elif isinstance(op, Tcgen05Move):
            self._move(event, bound, executing)
        elif isinstance(op, Tcgen05Commit):
            self._commit(event, bound, executing)
        elif isinstance(op, Tcgen05Mma):
            self._multiply(event, bound, executing)
        elif isinstance(op, Tcgen05Copy | Tcgen05Shift):
            self._copy_or_shift(event, bound, executing)
        elif op.family == "tcgen05.wait":
            kind = LOADS if str(op).startswith("tcgen05.wait::ld") else STORES
            self._complete_own(kind, warps, self.issued[..., kind])
        elif "before" in str(op):
            self.published[warps] = np.maximum(self.published, self.known)[warps]
        else:
            self.ordered[warps] = np.maximum(self.ordered, self.received)[warps]

    # ---- knowledge

    def _places(self, address: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the blocks whose shared memory addresses name, and the offsets there."""
        return locate_shared(address, np.arange(self.blocks)[:, None], self.cluster)

    def _stream(self, row: int, warp: int, kind: int) -> int:
        return (row % self.cluster * self.warps + warp) * 3 + kind

    def _warp(self, stream: int) -> int:
        """Return the warp of a stream, in its block."""
        return stream // 3 % self.warps

    def _complete_own(self, kind: int, warps: np.ndarray, numbers: np.ndarray) -> None:
        """Note that warps know their own stream to be complete up to the numbers."""
        for row, warp in np.argwhere(warps):
            stream = self._stream(row, warp, kind)
            for state in (self.known, self.ordered):
                state[row, warp, stream] = max(state[row, warp, stream], numbers[row, warp])

    def _knowledge(self, row: int, warp: int) -> Passed:
        return Passed(self.known[row, warp], np.maximum(self.published[row, warp], self.received[row, warp]))

    def _receive(self, row: int, warp: int, passed: Passed) -> None:
        np.maximum(self.known[row, warp], passed.known, out=self.known[row, warp])
        np.maximum(self.received[row, warp], passed.fenced, out=self.received[row, warp])

    def arrive(self, threads: np.ndarray, numbers: np.ndarray, relaxed: bool) -> None:
        """Pass on what warps know when threads arrive at a barrier of their block, or of their cluster."""
        for row, warp in self._list_warps(threads):
            of_cluster = (numbers[row][threads[row]] == CLUSTER_BARRIER).any()
            (self.cluster_pools[row // self.cluster] if of_cluster else self.pools[row]).join(self._knowledge(row, warp))

    def release(self, threads: np.ndarray, numbers: np.ndarray) -> None:
        """Receive what others have passed on when barriers let threads go on."""
        of_cluster = (threads & (numbers == CLUSTER_BARRIER)).any(-1)
        for row, warp in self._list_warps(threads):
            self._receive(row, warp, self.pools[row])
            if of_cluster[row]:
                self._receive(row, warp, self.cluster_pools[row // self.cluster])

    def exit(self, threads: np.ndarray, blocks: np.ndarray, statement: LinkedStatement | None) -> None:
        """Threads that exit: `kernel_runner` looks for columns that are not freed."""

    def _list_warps(self, threads: np.ndarray) -> list[tuple[int, int]]:
        warps = threads.reshape(self.blocks, self.warps, LANES).any(-1)
        return [(int(row), int(warp)) for row, warp in np.argwhere(warps)]

    def _synchronise(self, event: ExecutedStatement, executing: np.ndarray, warps: np.ndarray) -> None:
        """Follow an access or a fence by which threads may synchronise through memory."""
        statement = event.linked.statement
        parts = set(statement.qualifiers)
        if statement.opcode.startswith(("fence.proxy", "fence.mbarrier_init")):
            if "async" in statement.opcode:
                self.generic_writes[warps.any(-1)] = False
            return
        if statement.name in ("ld", "st") and not parts & ORDERING_QUALIFIERS:
            return
        for row, warp in np.argwhere(warps):
            pool = self.cluster_pools[row // self.cluster]
            pool.join(self._knowledge(row, warp))
            self._receive(row, warp, pool)

    # ---- mbarriers

    def _barrier(self, event: ExecutedStatement, row: int, offset: int, passed: Passed | None = None) -> _Barrier:
        """Return the state of an mbarrier after a thread has passed something on; None: it passes nothing."""
        barrier = self.barriers.setdefault((row, offset), _Barrier(self.streams))
        if passed is not None:
            barrier.open.join(passed)
        word = (offset + PHASE_SHIFT // 8) // 4
        shared = event.chunk["shared"]
        if word < shared.shape[1]:
            barrier.see_phase(bool(int(np.asarray(shared)[row, word]) >> PHASE_SHIFT % 32 & 1))
        return barrier

    def _touched_barriers(self, address: np.ndarray, executing: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
        """Yield block, warp, and the block and offset of the mbarrier, each once."""
        rows, offsets = self._places(address)
        seen = {
            (int(row), int(thread) // LANES, int(rows[row, thread]), int(offsets[row, thread])) for row, thread in np.argwhere(executing)
        }
        yield from sorted(seen)

    def _follow_mbarrier(self, event: ExecutedStatement, executing: np.ndarray, warps: np.ndarray) -> None:
        statement = event.linked.statement
        kind = statement.opcode.split(".")[1]
        address = next((operand for operand in statement.operands if isinstance(operand, Address)), None)
        if address is None:
            return
        place = event.operand_value(address, "b64")
        if kind in ("init", "inval"):
            for _, _, row, offset in self._touched_barriers(place, executing):
                self.barriers[row, offset] = _Barrier(self.streams)
        elif kind in ("test_wait", "try_wait"):
            done = statement.operands[0]
            if isinstance(done, Sink) or not isinstance(done, Register):
                return
            complete = np.asarray(event.chunk.register(event.linked.names.qualified_name(done), "pred"))
            for row, warp, at, offset in self._touched_barriers(place, executing & complete):
                self._receive(row, warp, self._barrier(event, at, offset).complete)
        else:
            for row, warp, at, offset in self._touched_barriers(place, executing):
                self._barrier(event, at, offset, None if kind in ("expect_tx", "complete_tx") else self._knowledge(row, warp))

    def _commit(self, event: ExecutedStatement, bound: BoundStatement, executing: np.ndarray) -> None:
        """Pass the thread's work to the mbarriers, as complete; a commit is also a fence::before_thread_sync."""
        rows, offsets = self._places(event.operand_value(bound.operands["mbar"], "b64"))
        masks = event.operand_value(bound.operands["cta_mask"], "b16") if "cta_mask" in bound.operands else None
        for row, thread in np.argwhere(executing).tolist():
            warp = thread // LANES
            known, stream = self.known[row, warp].copy(), self._stream(row, warp, WORK)
            known[stream] = max(known[stream], self.thread_issued[row, thread])
            first = row - row % self.cluster
            if masks is None:
                targets = [int(rows[row, thread])]
            else:
                mask = int(masks[row, thread])
                targets = [first + rank for rank in range(self.cluster) if mask >> rank & 1]
            for target in targets:
                self._barrier(event, target, int(offsets[row, thread]), Passed(known, known))

    # ---- faults

    def _forbid(self, event: ExecutedStatement, row: int, thread: int, fault: Tcgen05Fault, *words: object) -> None:
        """Raise a fault, after those that the statement itself has met; keep a note."""
        text = f"{self.reporter.describe(event.linked, row, thread)}: {fault.message(*words)}"
        if not fault.value.is_note:
            self.reporter.raise_fault(event.chunk)
            raise UndefinedBehaviour(text)
        self.notes.setdefault((fault, event.linked.number), text)

    def _require_complete(
        self, event: ExecutedStatement, thread: tuple[int, int], records: Records, access: CellAccess, *, other_streams_only: bool = False
    ) -> None:
        """Forbid an access to cells that have accesses of other statements which the warp does not know to be complete.

        Args:
            event: The statement.
            thread: Row of the block and number of the thread.
            records: The accesses.
            access: The cells.
            other_streams_only: Leave out the warp's own products, copies and shifts, which are checked apart.
        """
        row, warp = thread[0], thread[1] // LANES
        own = self._stream(row, warp, WORK)
        for state, is_note in ((self.known, False), (self.ordered, True)):
            streams = records.unknown(access.cells, state[row, warp])
            streams = streams[streams != own] if other_streams_only else streams
            if not streams.size:
                continue
            if is_note:
                self._forbid(event, *thread, Tcgen05Fault.MISSING_FENCE)
                return
            stream = int(streams[0])
            kind, issuer = stream % 3, self._warp(stream)
            if kind == WORK:
                fault = Tcgen05Fault.UNORDERED_WORK if other_streams_only else Tcgen05Fault.UNFINISHED_WORK
                self._forbid(event, *thread, fault, f"product, copy or shift of warp {issuer}")
            fault = Tcgen05Fault.STORE_WITHOUT_WAIT if kind == STORES else Tcgen05Fault.LOAD_WITHOUT_WAIT
            self._forbid(event, *thread, fault, issuer)

    def _issue(self, row: int, thread: int, kind: int) -> tuple[int, int]:
        """Return the stream and the number of a new access of a thread."""
        warp = thread // LANES
        self.issued[row, warp, kind] += 1
        number = int(self.issued[row, warp, kind])
        if kind == WORK:
            self.thread_issued[row, thread] = number
        return self._stream(row, warp, kind), number

    def _access(self, row: int, address: int, bands: np.ndarray, first: int, end: int, name: str = "") -> CellAccess:
        """Return the cells of bands and columns, both from an address in tensor memory on."""
        lane, column = address >> 16, address & 0xFFFF
        return CellAccess(row, np.minimum(bands + lane // BAND, BANDS - 1), column + first, min(column + end, self.columns), name)

    def _first_threads(self, executing: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """Yield the row, the warp and the first executing thread of each warp that executes a statement."""
        for row, warp in self._list_warps(executing):
            yield row, warp, warp * LANES + int(executing[row, warp * LANES : (warp + 1) * LANES].argmax())

    # ---- statements of warps

    def _move(self, event: ExecutedStatement, bound: BoundStatement, executing: np.ndarray) -> None:
        op = bound.op
        addresses = event.operand_value(bound.operands["taddr"], "b32")
        bands, first, end = _move_box(op.tile, op.num, bound.integer("half_split_offset", 0), op.packed)
        for row, warp, thread in self._first_threads(executing):
            address = int(addresses[row, thread])
            if address >> 16 < QUARTER and warp % 4:
                self._forbid(event, row, thread, Tcgen05Fault.LANE_OF_FIRST_QUARTER, warp % 4 * QUARTER)
            own_lane = warp % 4 * QUARTER + (address >> 16) % QUARTER
            access = self._access(row, own_lane << 16 | address & 0xFFFF, bands, first, end)
            self._require_complete(event, (row, thread), self.writes, access)
            if op.name == "tcgen05.ld":
                if not self.written[access.cells].any():
                    self._forbid(event, row, thread, Tcgen05Fault.UNWRITTEN_CELLS, "the load")
                stream, number = self._issue(row, thread, LOADS)
                self.loads.set(access.cells, stream, number)
                for register in _load_registers(bound):
                    self.loaded[event.linked.names.qualified_name(register)][row, warp] = number
            else:
                self._require_complete(event, (row, thread), self.reads, access)
                self._require_complete(event, (row, thread), self.loads, access)
                self.writes.set(access.cells, *self._issue(row, thread, STORES))
                self.written[access.cells] = True

    def _free(self, event: ExecutedStatement, bound: BoundStatement, executing: np.ndarray) -> None:
        addresses, counts = (event.operand_value(bound.operands[name], "b32") for name in ("address", "columns"))
        for row, warp, thread in self._first_threads(executing):
            first = int(addresses[row, thread]) & 0xFFFF
            access = self._access(row, 0, np.arange(BANDS), first // PIECE * PIECE, first + int(counts[row, thread]))
            for records in (self.writes, self.reads, self.loads):
                streams = records.unknown(access.cells, self.known[row, warp])
                if streams.size:
                    what = ("product, copy or shift", "store", "load")[int(streams[0]) % 3]
                    self._forbid(event, row, thread, Tcgen05Fault.FREED_IN_USE, f"{what} of warp {self._warp(int(streams[0]))}")
                records.forget(access.cells)
            self.written[access.cells] = False

    # ---- products, copies and shifts

    def _pair(self, row: int, group: int) -> list[int]:
        """Return the rows of the blocks that a statement of a block concerns."""
        return [row - row % group + cta for cta in range(group)]

    def _multiply(self, event: ExecutedStatement, bound: BoundStatement, executing: np.ndarray) -> None:
        op, operands = bound.op, bound.operands
        value = lambda name, kind: event.operand_value(operands[name], kind)
        values = {name: value(name, "b32") for name in ("idesc", "d", "a_tmem", "sp_meta", "scale_a", "scale_b") if name in operands}
        descriptors = {name: value(name, "b64") for name in ("a_desc", "b_desc") if name in operands}
        accumulates = value("enable_input_d", "pred")
        masks = value("zero_column_mask", "b64") if "zero_column_mask" in operands else None
        for row, thread in np.argwhere(executing).tolist():
            at = row, thread
            idesc = int(values["idesc"][at])
            described, layout = _describe_product(op, idesc)
            mask = None if masks is None else int(masks[at])
            extents = shared_extents(described, mask)
            for name, words in descriptors.items():
                self._read_shared(
                    event, at, name, int(words[at]), extents[name][:3], op.cta_group, absolute=described.product.depth.absolute
                )
            addresses = {name: int(array[at]) for name, array in values.items() if name != "idesc"}
            read, written = [], []
            for cta in self._pair(at[0], op.cta_group):
                for name, bands, count in _product_cells(op, idesc):
                    if name in addresses:
                        access = self._access(cta, addresses[name], bands, 0, count, name)
                        (written if name == "d" else read).append(access)
            product = described.product
            signature = ("product", op.kind, op.ws, product.m, product.n, addresses["d"])
            self._check_collector(event, at, op.collector)
            self._check_unwritten(event, at, read + (written if bool(accumulates[at]) else []))
            for access in read if op.scaled else ():
                self._check_scales(event, at, access, described, layout)
            for access in read:
                if access.name == "sp_meta":
                    self._check_metadata(event, at, access, described, layout, addresses["sp_meta"] >> 16)
            self._run_work(event, at, read, written, signature)
            if op.ashift:
                shifted = [access._replace(bands=np.arange(BANDS), name="") for access in read if access.name == "a_tmem"]
                self._run_work(event, at, [], shifted, ("shift",))

    def _check_metadata(
        self, event: ExecutedStatement, thread: tuple[int, int], access: CellAccess, described: InstructionDescriptor,
        layout: AccumulatorLayout, lane: int,
    ) -> None:  # fmt: skip
        op, state = described.product, event.chunk.require_tensor_memory()
        cells = metadata_cells(layout, op.k, 8 if op.kind in PADDED_KINDS else op.a.bits)
        lanes, columns = (lane + cells.lane) % TENSOR_LANES, np.minimum(access.first + cells.column + described.selector, self.columns - 1)
        fields = np.asarray(state.cells[access.row])[lanes, columns] >> cells.bit.astype(np.uint32) & 0xF
        wrong = fields[np.asarray(undefined_fields(jnp.asarray(fields), op.chunk_size, True))]
        if wrong.size:
            self._forbid(event, *thread, Tcgen05Fault.UNDEFINED_METADATA, int(wrong[0]))

    def _check_unwritten(self, event: ExecutedStatement, thread: tuple[int, int], accesses: list[CellAccess]) -> None:
        for access in accesses:
            if not self.written[access.cells].any(0).all():
                self._forbid(event, *thread, Tcgen05Fault.UNWRITTEN_CELLS, "the product" if access.name != "d" else "D of the product")

    def _check_scales(
        self,
        event: ExecutedStatement,
        thread: tuple[int, int],
        access: CellAccess,
        described: InstructionDescriptor,
        layout: AccumulatorLayout,
    ) -> None:
        """Forbid scales that differ between the quarters of the lanes. D of layout B has others in each pair of quarters."""
        if access.name not in ("scale_a", "scale_b"):
            return
        op = described.product
        halves = access.name == "scale_b" and layout.name == "B"
        rows = layout.cta_rows if access.name == "scale_a" else op.n // 2 if halves else op.n
        cells = scale_cells(rows, op.require_scaling().count, described.scale_a_id if access.name == "scale_a" else described.scale_b_id)
        state = event.chunk.require_tensor_memory()
        words = np.asarray(state.cells[access.row])[:, np.minimum(access.first + cells.column, self.columns - 1)]
        quarters = [words[cells.lane + QUARTER * i, np.arange(rows)[:, None], np.arange(cells.lane.shape[1])] for i in range(4)]
        codes = [quarter >> (8 * cells.byte).astype(np.uint32) & 0xFF for quarter in quarters]
        for first, others in ((0, (1,)), (2, (3,))) if halves else ((0, (1, 2, 3)),):
            if any((codes[other] != codes[first]).any() for other in others):
                self._forbid(event, *thread, Tcgen05Fault.SCALES_DIFFER, access.name)

    def _check_collector(self, event: ExecutedStatement, thread: tuple[int, int], collector: str) -> None:
        buffer, _, use = collector.partition("::")
        key = (*thread, buffer)
        if use in ("use", "lastuse") and key not in self.collectors:
            self._forbid(event, *thread, Tcgen05Fault.COLLECTOR_NOT_FILLED, buffer)
        if use in ("fill", "use"):
            self.collectors.add(key)
        else:
            self.collectors.discard(key)

    def _copy_or_shift(self, event: ExecutedStatement, bound: BoundStatement, executing: np.ndarray) -> None:
        op = bound.op
        addresses = event.operand_value(bound.operands["taddr"], "b32")
        if isinstance(op, Tcgen05Copy):
            lanes = copy_lanes(op.tile, op.multicast)
            bands, count = np.unique(lanes // BAND), 8 if op.tile.endswith("256b") else 4
            words = event.operand_value(bound.operands["s_desc"], "b64")
            extent = ("k", len(lanes), count // 4)
            signature = ("copy", op.tile)
        else:
            bands, count, words, extent, signature = np.arange(BANDS), SHIFT_COLUMNS, None, ("k", 0, 0), ("shift",)
        for row, thread in np.argwhere(executing).tolist():
            at = row, thread
            if words is not None:
                self._read_shared(event, at, "s-desc", int(words[at]), extent, op.cta_group)
            cells = [self._access(cta, int(addresses[at]), bands, 0, count) for cta in self._pair(at[0], op.cta_group)]
            if signature[0] == "shift":
                self._check_unwritten(event, at, cells)
            self._run_work(event, at, [], cells, signature)

    def _run_work(
        self, event: ExecutedStatement, thread: tuple[int, int], read: list[CellAccess], written: list[CellAccess], signature: tuple
    ) -> None:
        """Check and record the cells of a product, a copy or a shift."""
        row, warp = thread[0], thread[1] // LANES
        for access in read + written:
            self._require_complete(event, thread, self.writes, access, other_streams_only=True)
        for access in written:
            self._require_complete(event, thread, self.loads, access)
            self._require_complete(event, thread, self.reads, access, other_streams_only=True)
        known, own = self.known[row, warp], self._stream(row, warp, WORK)
        for access in read + written:
            pending = (self.writes.stream[access.cells] == own) & (self.writes.number[access.cells] > known[own])
            for tag in np.unique(self.tags[access.cells][pending]):
                before = self.signatures[int(tag)]
                if not is_pipelined(before, signature, is_read=access.name not in ("", "d")):
                    self._forbid(event, *thread, Tcgen05Fault.UNORDERED_WORK, f"{before[0]} of the same thread")
        for access in written:
            pending = (self.reads.stream[access.cells] == own) & (self.reads.number[access.cells] > known[own])
            if pending.any() and signature[0] != "shift":
                self._forbid(event, *thread, Tcgen05Fault.UNPROMISED_ORDER, "product")
        stream, number = self._issue(*thread, WORK)
        if signature not in self.signatures:
            self.signatures.append(signature)
        tag = self.signatures.index(signature)
        for access in read:
            self.reads.set(access.cells, stream, number)
        for access in written:
            self.writes.set(access.cells, stream, number)
            self.tags[access.cells], self.written[access.cells] = tag, True

    # ---- shared memory

    def _read_shared(
        self, event: ExecutedStatement, thread: tuple[int, int], name: str, value: int, extent: tuple[str, int, int], group: int,
        *, absolute: bool = False,
    ) -> None:  # fmt: skip
        """Check and record the shared memory that a descriptor names. The work that is about to be issued has the next number."""
        problem = descriptor_problem(np.array([value & 0xFFFFFFFF, value >> 32], np.uint32), absolute=absolute)
        if problem:
            self._forbid(event, *thread, Tcgen05Fault.ILLEGAL_DESCRIPTOR, name, problem.rpartition(". ")[0])
        units = _descriptor_units(value, *extent)
        units = units[units < self.generic_writes.shape[1]]
        warp = thread[1] // LANES
        for row in self._pair(thread[0], group):
            if self.generic_writes[row, units].any():
                self._forbid(event, *thread, Tcgen05Fault.PROXY_FENCE_MISSING)
            swizzle = SWIZZLE_WIDTHS[value >> FIELDS["mode"].low & 7]
            self.hazards.check_async_read(event, thread[0], [np.array([thread[1]])], row, units * UNIT, name.replace("_", "-"), swizzle)
            self.shared_reads.set((row, units), self._stream(thread[0], warp, WORK), int(self.issued[thread[0], warp, WORK]) + 1)

    def _write_shared(self, event: ExecutedStatement, executing: np.ndarray, warps: np.ndarray) -> None:
        """Follow stores and copies to shared memory."""
        statement = event.linked.statement
        if statement.name == "st":
            self._synchronise(event, executing, warps)
        address = statement.operands[0] if statement.operands else None
        space = next((part.partition("::")[0] for part in statement.qualifiers if part.startswith(SPACES)), "")
        if not isinstance(address, Address) or space not in ("", "shared") or (statement.name == "cp" and not space):
            return
        place = event.operand_value(address, "b64")
        mask = executing if space else executing & (place >> np.uint64(ROOM_BITS) == np.uint64(SHARED_ROOM))
        if statement.name == "stmatrix":
            count = next((int(part[1:]) for part in statement.qualifiers if part in ("x1", "x2", "x4")), 4)
            mask = mask & (np.arange(mask.shape[1]) % LANES < 8 * count)
        size = _store_bytes(statement.qualifiers, statement.operands) if statement.name == "st" else 1  # of others the first byte
        rows, offsets = self._places(place)
        last = self.generic_writes.shape[1] - 1
        for warp_row, warp in np.argwhere(mask.reshape(self.blocks, self.warps, LANES).any(-1)):
            lanes = slice(warp * LANES, (warp + 1) * LANES)
            here = mask[warp_row, lanes]
            row, at = rows[warp_row, lanes][here], offsets[warp_row, lanes][here]
            index = np.concatenate([row, row]), np.minimum(np.concatenate([at, at + size - 1]) // UNIT, last)
            streams = self.shared_reads.unknown(index, self.known[warp_row, warp])
            if streams.size and row[0] // self.cluster == warp_row // self.cluster:
                thread = int(warp * LANES + here.argmax())
                what = f"product or copy of warp {self._warp(int(streams[0]))}"
                self._forbid(event, int(warp_row), thread, Tcgen05Fault.SHARED_MEMORY_IN_USE, what)
            if statement.name in ("st", "stmatrix"):
                self.generic_writes[index] = True


SPACES = ("global", "local", "param", "shared")  # the first that a store or copy names is that of its destination
FOLLOWED: dict[str, Callable[[Tcgen05Protocol, ExecutedStatement, np.ndarray, np.ndarray], None]] = {
    "mbarrier": Tcgen05Protocol._follow_mbarrier,
    "fence": Tcgen05Protocol._synchronise,
    **dict.fromkeys(("atom", "red", "membar", "ld"), Tcgen05Protocol._synchronise),
    **dict.fromkeys(("st", "stmatrix", "cp"), Tcgen05Protocol._write_shared),
}


def _load_registers(bound: BoundStatement) -> list[Register]:
    registers = [*vector_elements(bound.operands["r"]), *([bound.operands["reduced"]] if "reduced" in bound.operands else [])]
    return [register for register in registers if isinstance(register, Register)]


def _store_bytes(qualifiers: tuple[str, ...], operands: tuple[Operand, ...]) -> int:
    """Return the bytes that a thread stores; those of a unit for a `st.bulk`, which has no type."""
    bits = int("0" + "".join(filter(str.isdigit, qualifiers[-1]))) or 8 * UNIT
    return bits // 8 * (len(vector_elements(operands[1])) if len(operands) > 1 else 1)


@lru_cache(maxsize=256)
def _move_box(tile: str, num: int, offset: int, packed: bool) -> tuple[np.ndarray, int, int]:
    """Return the bands of a load or store from the lane of its address on, its first column and the one behind its last."""
    cells = move_cells(tile, num, offset, packed=packed)
    return np.unique(cells.lane // BAND), int(cells.column.min()), int(cells.column.max()) + 1


@lru_cache(maxsize=256)
def _describe_product(op: Tcgen05Mma, idesc: int) -> tuple[InstructionDescriptor, AccumulatorLayout]:
    described = decode_instruction_descriptor(op, idesc)
    return described, accumulator_layout(described.product.m, op.cta_group, ws=op.ws, sparse=op.sparse)


@lru_cache(maxsize=256)
def _product_cells(op: Tcgen05Mma, idesc: int) -> tuple[OperandCells, ...]:
    return operand_cells(_describe_product(op, idesc)[0])


@lru_cache(maxsize=4096)
def _descriptor_units(value: int, major: str, lines: int, units: int) -> np.ndarray:
    """Return the 16-byte units of shared memory that a descriptor names."""
    words = np.array([value & 0xFFFFFFFF, value >> 32], np.uint32)
    return np.unique(np.asarray(tcgen05_unit_addresses(decode_tcgen05_descriptor(words), major, lines, units)) // UNIT)
