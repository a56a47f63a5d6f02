"""Checked mode: asynchronous accesses, as `hazards.access_tracker` follows those of threads.

`cp.async` writes for its thread when the thread waits. Bulk copies, copies of tensors and the operands of `wgmma` and `tcgen05` are of the
async proxy: what a thread wrote becomes visible to it by a proxy fence. A copy to shared memory ends with a phase of its mbarrier, one to
global memory and a product with their group. Source: PTX ISA 9.7.9.25, 9.7.13, 9.7.15.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tcemu.base.errors import UndefinedBehaviour
from tcemu.engine.isa.families import LANES, Wgmma
from tcemu.engine.isa.statement_table import require_form
from tcemu.kernels.ptx.hazards.access_records import (
    decode_access,
    encode_access,
)
from tcemu.kernels.ptx.hazards.access_tracker import UNIT_BYTES, AccessTracker, Handler, Runs, narrow_granules
from tcemu.kernels.ptx.hazards.clocks import KNOWN, VISIBLE, Column
from tcemu.kernels.ptx.hazards.hazard_faults import Hazard
from tcemu.kernels.ptx.hazards.operand_places import box_ranges, decode_map, descriptor_units
from tcemu.kernels.ptx.linker.linked_kernel import Kernel, LinkedStatement
from tcemu.kernels.ptx.runtime.tracing import ExecutedStatement, PlaceReporter
from tcemu.kernels.ptx.simt import tensor_maps as maps
from tcemu.kernels.ptx.simt.chunk import Chunk
from tcemu.kernels.ptx.simt.device_memory import (
    LOCAL_ROOM,
    OFFSET_MASK,
    PARAM_ROOM,
    ROOM_BITS,
    SHARED_OFFSET_MASK,
    SHARED_ROOM,
    locate_shared,
)
from tcemu.kernels.ptx.tensor.statement_forms import bind_operands
from tcemu.kernels.ptx.text.module import Address, Integer, Operand, Register, Vector
from tcemu.kernels.ptx.text.ptx_types import KINDS

RING = 32  # groups that a thread may leave pending


class HazardTracker(AccessTracker):
    """The hazards of a chunk of blocks."""

    def __init__(
        self, kernel: Kernel, shape: tuple[int, int], cluster: int, shared_bytes: int, chunk: Chunk, reporter: PlaceReporter
    ) -> None:
        super().__init__(kernel, shape, cluster, shared_bytes, chunk, reporter)
        warps = self.clocks.warps
        self.copy_groups = np.zeros((*shape, RING), np.int32)  # last cp.async of each committed group
        self.copy_committed = np.zeros(shape, np.int64)
        self.bulk_issued = np.zeros((self.blocks, warps), np.int64)
        self.bulk_pending: dict[tuple[int, int], list[list[int]]] = {}  # by thread: the numbers of each group; the last one is open
        self.products = np.zeros((self.blocks, warps), np.int64)  # by the first warp of the warpgroup
        self.product_groups: dict[tuple[int, int], list[int]] = {}

    def _prepare(self, line: LinkedStatement, granules: dict[str, int]) -> Handler | None:
        name, asynchronous = line.statement.name, line.statement.qualifiers[:1] == ("async",)
        if name == "wgmma":
            return self._wgmma_handler(line)
        if name == "cp":
            return self._copy_handler(line)
        if name in ("st", "red") and asynchronous:
            return self._async_store_handler(line, granules)
        if name == "st" and line.statement.qualifiers[:1] == ("bulk",):
            return self._fill_handler(line)
        if name == "clusterlaunchcontrol" and line.statement.qualifiers[:1] == ("try_cancel",):
            return self._cancel_handler(line)
        return super()._prepare(line, granules)

    # ---- cp.async

    def _copy_handler(self, line: LinkedStatement) -> Handler | None:
        statement = line.statement
        parts = statement.qualifiers
        if parts[:2] == ("async", "commit_group"):
            return lambda event, executing: self._commit_copies(executing)
        if parts[:2] in (("async", "wait_group"), ("async", "wait_all")):
            pending = statement.operands[0].value if parts[1] == "wait_group" and isinstance(statement.operands[0], Integer) else None
            return lambda event, executing: self._wait_for_copies(executing, pending)
        if parts[:2] == ("async", "mbarrier"):
            return self._copy_arrival_handler(line)
        if "bulk" in parts:
            return self._bulk_handler(line)
        if parts[:2] in (("async", "ca"), ("async", "cg")):
            return self._small_copy_handler(line)
        return None

    def _small_copy_handler(self, line: LinkedStatement) -> Handler:
        statement = line.statement
        target, source, size = statement.operands[:3]
        assert isinstance(target, Address) and isinstance(source, Address) and isinstance(size, Integer)
        optional = statement.operands[3 : None if not any("cache_hint" in part for part in statement.qualifiers) else -1]

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            whole = executing
            if optional:  # bytes that are not read are not followed
                limit = optional[0]
                register = isinstance(limit, Register) and line.names.kind(limit) != "pred"
                whole = executing & (event.operand_value(limit, "u32") >= size.value) if register else np.zeros_like(executing)
            self._read(event, "global", event.operand_value(source, "b64"), whole, size.value, False)
            self._write(event, "shared", event.operand_value(target, "b64"), executing, size.value, False, None, Column.COPY)

        return follow

    def _commit_copies(self, executing: np.ndarray) -> None:
        rows, threads = np.nonzero(executing)
        self.copy_groups[rows, threads, self.copy_committed[rows, threads] % RING] = self.copy_number[rows, threads]
        self.copy_committed[rows, threads] += 1
        self.copy_number[rows, threads] += 1

    def _wait_for_copies(self, executing: np.ndarray, pending: int | None) -> None:
        rows, threads = np.nonzero(executing)
        if pending is None:
            numbers = self.copy_number[rows, threads].copy()
            self.copy_number[rows, threads] += 1
        else:
            last = self.copy_committed[rows, threads] - 1 - min(pending, RING - 1)
            numbers = np.where(last >= 0, self.copy_groups[rows, threads, last % RING], 0)
        self.clocks.copied[rows, threads] = np.maximum(self.clocks.copied[rows, threads], numbers)

    def _copy_arrival_handler(self, line: LinkedStatement) -> Handler:
        address = line.statement.operands[0]

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            for row, offset, user, threads in self._mbarrier_users(event, address, executing):
                phases = self._use_mbarrier(event, row, offset, user, threads)
                clock = self.clocks.nothing()
                if Column.COPY in self.clocks.first:  # of the thread's accesses, the copies alone are complete
                    columns = self.clocks.column(Column.COPY, np.full(len(threads), user), threads // LANES)
                    np.maximum.at(clock[KNOWN], columns, self.copy_number[user, threads])
                    self.copy_number[user, threads] += 1
                phases.join(self.clocks, clock)
                phases.join(self.clocks, self.clocks.release(user, threads))
                self._touched_mbarriers.add((row, offset))

        return follow

    # ---- the async proxy

    def check_async_read(
        self, event: ExecutedStatement, row: int, groups: Sequence[np.ndarray], owner: int, first_bytes: np.ndarray, what: str,
        swizzle: int | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Check that writes to runs of 16 bytes of a block are ordered before reads by the async proxy, and visible to it.

        Args:
            event: The statement.
            row: Row of the block whose threads read.
            groups: Threads that read together: what one of a group knows, all know.
            owner: Row of the block whose memory is read.
            first_bytes: Offsets of the runs, int[n], each once.
            what: The operand in words.
            swizzle: The bytes of its swizzle, for notes; None: no notes.

        Returns:
            The cells, int64[n, cells of a run].
        """
        records = self.shared
        if records is None:
            return np.zeros((0, 1), np.int64)
        first_bytes = first_bytes[first_bytes + UNIT_BYTES <= self.shared_bytes].astype(np.int64)
        cells = records.cells(owner * self.shared_bytes + first_bytes, UNIT_BYTES)
        writers = _distinct(records.writer[cells].ravel())
        generic = writers[self._is_generic(writers)]
        for plane, hazard, accesses in ((KNOWN, Hazard.UNORDERED_READ, writers), (VISIBLE, Hazard.PROXY_FENCE_MISSING, generic)):
            for threads in filter(len, groups if len(accesses) else ()):
                count = len(threads)
                rows = np.full(len(accesses) * count, row)
                wrong = self._unordered(np.repeat(accesses, count), rows, np.tile(threads, len(accesses)), plane, False)
                if len(wrong) >= count:
                    bad = np.flatnonzero(np.bincount(wrong // count, minlength=len(accesses)) == count)
                    if len(bad):
                        self._report(event, hazard, records, int(accesses[bad[0]]), row, int(threads[0]))
        if swizzle is not None:
            self._note_operand(event, row, int(groups[0][0]), cells, first_bytes, what, swizzle)
        return cells

    def _is_generic(self, accesses: np.ndarray) -> np.ndarray:
        """Return which accesses are of the generic proxy. Triton puts no proxy fence between `cp.async` and `wgmma`: those are left out."""
        column = decode_access(accesses).actor % self.actors
        return (column < self.clocks.span * self.clocks.warps) & (accesses != 0)

    def _note_operand(
        self, event: ExecutedStatement, row: int, thread: int, cells: np.ndarray, offsets: np.ndarray, what: str, swizzle: int
    ) -> None:
        """Keep notes of an operand that reads what is legal and never meant."""
        if self.shared is None or not len(cells):
            return
        writers, modes = self.shared.writer[cells], self.shared.swizzle[cells]
        nothing = (writers == 0).all(-1)  # the padding beside narrow codes is not written, and not used
        if nothing.any():
            self._forbid(event, Hazard.UNWRITTEN_CELLS, row, thread, what, int(offsets[nothing][0]))
        other = (modes != 0) & (modes != swizzle + 1)
        if other.any():
            access = decode_access(int(writers[other][0]))
            line = self.kernel.statements[access.statement].statement.position.line
            self._forbid(event, Hazard.OTHER_SWIZZLE, row, thread, what, swizzle, int(modes[other][0]) - 1, line)
        earlier = decode_access(writers)
        copied = (writers != 0) & (earlier.actor % self.actors >= self.clocks.phase_column)
        if copied.any():
            for actor in np.unique(earlier.actor[copied]):
                mine = copied & (earlier.actor == actor)
                older = mine & (earlier.number < earlier.number[mine].max())
                if older.any():
                    self._forbid(event, Hazard.OLDER_COPY, row, thread, what, int(offsets[older.any(-1)][0]))

    # ---- wgmma

    def _wgmma_handler(self, line: LinkedStatement) -> Handler | None:
        bound = bind_operands(line.statement, line.context)
        family = bound.op.family
        if family == "wgmma.commit_group":
            return lambda event, executing: self._commit_products(executing)
        if family == "wgmma.wait_group":
            pending = bound.integer("n", 0)
            return lambda event, executing: self._wait_for_products(executing, pending)
        if not isinstance(bound.op, Wgmma):
            return None
        names = [name for name in ("a_desc", "b_desc") if name in bound.operands]
        majors = {name: "mn" if bound.integer(f"imm_trans_{name[0]}", 0) else "k" for name in names}

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            values = {name: event.operand_value(bound.operands[name], "b64") for name in names}
            for row, first in self._warpgroups(executing):
                self.products[row, first] += 1
                threads = first * LANES + np.flatnonzero(executing[row, first * LANES : (first + 4) * LANES])
                warps = [threads[threads // LANES == warp] for warp in range(first, first + 4)]
                for name in names:
                    value, operand = int(values[name][row, threads[0]]), name.replace("_", "-")
                    units, slices, swizzle, repeated = descriptor_units(bound.op, name[0], majors[name], value)
                    units = units[units + UNIT_BYTES <= self.shared_bytes]  # others are a fault of the statement
                    for mine, part in zip(warps, slices, strict=False):  # each warp reads its own rows of A
                        self.check_async_read(event, row, [mine], row, part, operand)
                    cells = self.check_async_read(event, row, [] if slices else warps, row, units, operand)
                    self._note_operand(event, row, int(threads[0]), cells, units, operand, swizzle)
                    if repeated:
                        self._forbid(event, Hazard.REPEATED_CELLS, row, int(threads[0]), operand, repeated)
                    self._note_product(event, row, first, cells)

        return follow

    def _note_product(self, event: ExecutedStatement, row: int, first: int, cells: np.ndarray) -> None:
        if self.shared is None or not len(cells):
            return
        actor = self._actor(Column.PRODUCT, self._one(row, first * LANES))
        access = encode_access(actor, self.products[row, first], event.linked.number, 0)
        slot = self.cluster * self.clocks.warps + first // 4
        self.shared.readers[cells, slot] = access

    def _warpgroups(self, executing: np.ndarray) -> list[tuple[int, int]]:
        """Return the row and the first warp of the warpgroups with executing threads."""
        return sorted({(row, warp // 4 * 4) for row, warp in np.argwhere(executing.reshape(self.blocks, -1, LANES).any(-1)).tolist()})

    def _commit_products(self, executing: np.ndarray) -> None:
        for row, first in self._warpgroups(executing):
            self.product_groups.setdefault((row, first), []).append(int(self.products[row, first]))

    def _wait_for_products(self, executing: np.ndarray, pending: int) -> None:
        for row, first in self._warpgroups(executing):
            groups = self.product_groups.get((row, first), [])
            if len(groups) <= pending:
                continue
            threads = first * LANES + np.flatnonzero(executing[row, first * LANES : (first + 4) * LANES])
            column = self.clocks.column(Column.PRODUCT, row, first)
            known = self.clocks.known[row, threads, KNOWN, column]
            self.clocks.known[row, threads, KNOWN, column] = np.maximum(known, groups[len(groups) - 1 - pending])

    # ---- bulk copies and copies of tensors

    def _bulk_handler(self, line: LinkedStatement) -> Handler | None:
        statement = line.statement
        parts = statement.qualifiers
        if "commit_group" in parts:
            return lambda event, executing: self._commit_bulk(executing)
        if "wait_group" in parts:
            assert isinstance(statement.operands[0], Integer)
            pending = statement.operands[0].value
            return lambda event, executing: self._wait_for_bulk(executing, pending, "read" in parts)
        if "prefetch" in parts:
            return None
        spaces = [part for part in parts if part.startswith(("shared", "global"))]
        to_global = spaces[0] == "global"
        operands = list(statement.operands[: -1 if any("cache_hint" in part for part in parts) else None])
        mask = operands.pop() if "multicast::cluster" in parts and "tensor" not in parts else None
        if "tensor" in parts:
            return self._tensor_handler(line, operands, to_global)
        if "cp_mask" in parts or ("reduce" in parts and not to_global):
            return None
        target, source, size = operands[:3]
        barrier = None if to_global else operands[3]

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            places = [event.operand_value(each, "b64") for each in (target, source)]
            sizes = event.operand_value(size, "u32")
            for row, thread in np.argwhere(executing).tolist():
                count = int(sizes[row, thread])
                to, start = (np.uint64(each[row, thread]) for each in places)
                if to_global:
                    self._store_bulk(event, row, thread, start, count, [(to, count)], "reduce" in parts)
                    continue
                ranks = None if mask is None else int(event.operand_value(mask, "b16")[row, thread])
                if spaces[1] == "global":
                    self._read_memory(event, row, thread, [(start, count)])
                self._load_bulk(event, row, thread, to, count, barrier, ranks, None)

        return follow

    def _tensor_handler(self, line: LinkedStatement, operands: list[Operand], to_global: bool) -> Handler | None:
        """Return the handler of a copy of a tensor. Of modes but tile the shared memory alone is followed."""
        parts = line.statement.qualifiers
        mask = operands.pop() if "multicast::cluster" in parts else None
        tensor = next(each for each in operands if isinstance(each, Address) and each.coordinates is not None)
        others = [each for each in operands if isinstance(each, Address) and each is not tensor]
        coordinates = tensor.coordinates.elements if isinstance(tensor.coordinates, Vector) else ()
        rank = next((int(part[0]) for part in parts if part in ("1d", "2d", "3d", "4d", "5d")), 1)
        rows = "tile::gather4" in parts or "tile::scatter4" in parts
        plain = not rows and not any(part.startswith("im2col") for part in parts)
        pure = Address(tensor.base, tensor.offset)

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            place, address = event.operand_value(pure, "b64"), event.operand_value(others[0], "b64")
            given = [event.operand_value(each, "s32") for each in coordinates]
            for row, thread in np.argwhere(executing).tolist():
                words = self._map_words(event, row, int(place[row, thread]))
                if words is None:
                    continue
                box, swizzle = decode_map(words, rank)
                count = int(box.units) * (4 if rows else 1) * UNIT_BYTES
                at = [int(np.int64(np.uint32(each[row, thread]).astype(np.int32))) for each in given]
                ranges = box_ranges(box, at) if plain else []
                shared = np.uint64(address[row, thread])
                period, start = 8 * swizzle, int(shared) & SHARED_OFFSET_MASK
                if period and start % period:
                    self._forbid(event, Hazard.STAGE_ALIGNMENT, row, thread, start, period)
                if to_global:
                    self._store_bulk(event, row, thread, shared, count, ranges, "reduce" in parts)
                    continue
                self._read_memory(event, row, thread, ranges)
                ranks = None if mask is None else int(event.operand_value(mask, "b16")[row, thread])
                self._load_bulk(event, row, thread, shared, count, others[1], ranks, swizzle)

        return follow

    def _map_words(self, event: ExecutedStatement, row: int, address: int) -> bytes | None:
        """Return the words of a tensor map at a generic address; None where no map lies."""
        room, offset = address >> ROOM_BITS, address & OFFSET_MASK
        if room == PARAM_ROOM:
            data = np.asarray(event.chunk["parameters"])[row]
        elif room < len(self.room_starts) and room not in (SHARED_ROOM, LOCAL_ROOM):
            data, offset = np.asarray(event.chunk["memory"]), offset + 4 * int(self.room_starts[room])
        else:
            return None
        words = data[offset // 4 : offset // 4 + maps.MAP_BYTES // 4]
        return words.tobytes() if len(words) == maps.MAP_BYTES // 4 and int(words[0]) == maps.MAGIC else None

    def _load_bulk(
        self, event: ExecutedStatement, row: int, thread: int, address: np.uint64, size: int, barrier: Operand | None, ranks: int | None,
        swizzle: int | None,
    ) -> None:  # fmt: skip
        """Follow a copy to shared memory that completes at an mbarrier, in one block or in those of a multicast mask."""
        if not size or barrier is None:
            return
        at = np.uint64(event.operand_value(barrier, "b64")[row, thread])
        first = row - row % self.cluster
        who, threads = self._one(row, thread), np.array([thread])
        owner, offset = (int(each[0]) for each in locate_shared(np.array([address]), who.rows, self.cluster))
        place, start = (int(each[0]) for each in locate_shared(np.array([at]), who.rows, self.cluster))
        targets = [(owner, place)]
        if ranks is not None:
            targets = [(first + rank, first + rank) for rank in range(self.cluster) if ranks >> rank & 1]
        for block, at_block in targets:
            phases = self._use_mbarrier(event, at_block, start, row, threads)
            column = self.clocks.column_of_phases(at_block, start)
            if self.shared is not None and offset + size <= self.shared_bytes and column is not None:
                runs = Runs(self.shared, who, np.array([block * self.shared_bytes + offset]), np.zeros(1, int))
                cells = self.shared.cells(runs.first_byte, size)
                self._check_writer(event, runs, cells, False, Hazard.UNORDERED_WRITE)
                self._check_readers(event, runs, cells, False)
                actor = np.array(self._group(row) * self.actors + column)
                self.shared.note_write(cells, encode_access(actor, phases.count + 1, event.linked.number, thread % LANES), None)
                if swizzle is not None:
                    self.shared.swizzle[cells] = swizzle + 1
            self._touched_mbarriers.add((at_block, start))

    def _memory_cells(self, ranges: Sequence[tuple[Any, int]]) -> np.ndarray:
        """Return the cells of ranges of global memory that lie wholly within them."""
        assert self.memory is not None
        found = []
        for address, size in ranges:
            room, offset = int(address) >> ROOM_BITS, int(address) & OFFSET_MASK
            if room < len(self.room_starts) and offset + size <= self.room_sizes[room]:
                start, granule = 4 * int(self.room_starts[room]) + offset, self.memory.granule
                found.append(np.arange(-(-start // granule), (start + size) // granule))
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _read_memory(self, event: ExecutedStatement, row: int, thread: int, ranges: Sequence[tuple[Any, int]]) -> None:
        """Check the reads of a copy from global memory. They are not recorded: they end when its mbarrier says so."""
        cells = self._memory_cells(ranges) if self.memory is not None and ranges else np.zeros(0, np.int64)
        if self.memory is None or not len(cells):
            return
        runs = Runs(self.memory, self._one(row, thread), np.zeros(1, np.int64), np.zeros(1, int))
        self._check_writer(event, runs, cells[None], False, Hazard.UNORDERED_READ)
        access = encode_access(
            self._actor(Column.ACCESS, runs.who), self.clocks.epoch[row, thread // LANES], event.linked.number, thread % LANES
        )
        self.memory.note_read(cells, np.broadcast_to(access, cells.shape), np.zeros_like(cells))

    def _store_bulk(
        self, event: ExecutedStatement, row: int, thread: int, source: np.uint64, size: int, ranges: Sequence[tuple[Any, int]],
        reduces: bool,
    ) -> None:  # fmt: skip
        """Follow a copy or a reduction from shared to global memory, which its thread's groups complete."""
        if not size:
            return
        who, warp = self._one(row, thread), thread // LANES
        self.bulk_issued[row, warp] += 1
        number = int(self.bulk_issued[row, warp])
        self.bulk_pending.setdefault((row, thread), [[]])[-1].append(number)
        owner, offset = (int(each[0]) for each in locate_shared(np.array([source]), who.rows, self.cluster))
        units = offset + UNIT_BYTES * np.arange(size // UNIT_BYTES)
        cells = self.check_async_read(event, row, [np.array([thread])], owner, units, "the copy")
        if self.shared is not None:
            access = encode_access(self._actor(Column.BULK_READ, who), number, event.linked.number, thread % LANES)
            self.shared.readers[cells.ravel(), self.slots - 1] = access
        targets = self._memory_cells(ranges) if self.memory is not None and ranges else np.zeros(0, np.int64)
        if self.memory is not None and len(targets):
            runs = Runs(self.memory, who, np.zeros(1, np.int64), np.zeros(1, int))
            self._check_writer(event, runs, targets[None], reduces, Hazard.UNORDERED_WRITE)
            self._check_readers(event, runs, targets[None], reduces)
            access = encode_access(self._actor(Column.BULK_WRITE, who), number, event.linked.number, thread % LANES, reduces)
            self.memory.note_write(targets, np.broadcast_to(access, targets.shape), None)

    def _commit_bulk(self, executing: np.ndarray) -> None:
        for row, thread in np.argwhere(executing).tolist():
            groups = self.bulk_pending.get((row, thread))
            if groups is not None:
                groups.append([])

    def _wait_for_bulk(self, executing: np.ndarray, pending: int, reads_only: bool) -> None:
        for row, thread in np.argwhere(executing).tolist():
            groups = self.bulk_pending.get((row, thread))
            if groups is None:
                continue
            complete = [number for group in groups[: max(len(groups) - 1 - pending, 0)] for number in group]
            if not complete:
                continue
            for kind in (Column.BULK_READ,) if reads_only else (Column.BULK_READ, Column.BULK_WRITE):
                column = self.clocks.column(kind, row, thread // LANES)
                before = self.clocks.known[row, thread, KNOWN, column]
                self.clocks.known[row, thread, KNOWN, column] = max(before, complete[-1])

    def exit(self, threads: np.ndarray, blocks: np.ndarray, statement: LinkedStatement | None) -> None:
        """Report threads that exit while a bulk copy of theirs may still read shared memory, and blocks whose memory others may use."""
        line = statement or self.kernel.statements[-1]
        self.gone |= blocks
        for row in np.flatnonzero(blocks) if self.shared is not None and self.cluster > 1 else ():
            self._check_users(line, int(row), int(threads[row].argmax()))
        for (row, thread), groups in self.bulk_pending.items():
            if not threads[row, thread]:
                continue
            column = self.clocks.column(Column.BULK_READ, row, thread // LANES)
            issued = max((number for group in groups for number in group), default=0)
            if issued > self.clocks.known[row, thread, KNOWN, column]:
                raise UndefinedBehaviour(f"{self.reporter.describe(line, row, thread)}: {Hazard.UNWAITED_EXIT.message()}")

    def _check_users(self, line: LinkedStatement, row: int, thread: int) -> None:
        """Report accesses of other blocks to a block's shared memory that none of its threads knows to have happened."""
        assert self.shared is not None
        region = slice(row * self.shared_bytes // self.shared.granule, (row + 1) * self.shared_bytes // self.shared.granule)
        accesses = np.unique(np.concatenate([self.shared.writer[region], self.shared.readers[region].ravel()]))
        earlier = decode_access(accesses)
        column = earlier.actor % self.actors
        users = column // self.clocks.warps
        foreign = (accesses != 0) & (column < self.clocks.span * self.clocks.warps) & (users != row % self.clocks.span)
        known = self.clocks.known[row, :, KNOWN].max(0)
        pending = np.flatnonzero(foreign & (known[np.where(foreign, column, 0)] < earlier.number))
        if len(pending):
            words, _ = self._describe_actor(int(accesses[pending[0]]), row)
            text = Hazard.USED_AT_EXIT.message(int(users[pending[0]]) % self.cluster, words)
            raise UndefinedBehaviour(f"{self.reporter.describe(line, row, thread)}: {text}")

    def _fill_handler(self, line: LinkedStatement) -> Handler:
        """Return the handler of `st.bulk`, by which a thread writes zeros."""
        address, size = line.statement.operands[:2]

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            place, sizes = event.operand_value(address, "b64"), event.operand_value(size, "b64")
            for row, thread in np.argwhere(executing):
                alone, count = np.zeros_like(executing), int(sizes[row, thread])
                alone[row, thread] = True
                self._write(event, "shared", place, alone, count, False, np.zeros((1, count), np.uint8))

        return follow

    def _cancel_handler(self, line: LinkedStatement) -> Handler:
        """Return the handler of `clusterlaunchcontrol.try_cancel`, whose response completes at an mbarrier."""
        target, barrier = line.statement.operands
        ranks = (1 << self.cluster) - 1 if "multicast::cluster::all" in line.statement.qualifiers else None

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            place = event.operand_value(target, "b64")
            for row, thread in np.argwhere(executing).tolist():
                self._load_bulk(event, row, thread, np.uint64(place[row, thread]), UNIT_BYTES, barrier, ranks, None)

        return follow

    def _async_store_handler(self, line: LinkedStatement, granules: dict[str, int]) -> Handler:
        """Return the handler of `st.async` and `red.async`, which complete at an mbarrier of the block that they write."""
        address, barrier = line.statement.operands[0], line.statement.operands[2]
        choices = require_form(line.statement.opcode).choices
        count, bits = int((choices.get("vector") or "v1")[1:]), KINDS[choices["type"] or "b32"].bits
        narrow_granules(granules, "shared", bits // 8)

        def follow(event: ExecutedStatement, executing: np.ndarray) -> None:
            places, barriers = (event.operand_value(each, "b64") for each in (address, barrier))
            for row, thread in np.argwhere(executing).tolist():
                at, size = np.uint64(places[row, thread]), count * bits // 8
                if line.statement.name == "st":
                    self._load_bulk(event, row, thread, at, size, barrier, None, None)
                    continue
                own, offsets = locate_shared(np.array([barriers[row, thread]]), np.array([row]), self.cluster)
                self._use_mbarrier(event, int(own[0]), int(offsets[0]), row, np.array([thread]))
                self._touched_mbarriers.add((int(own[0]), int(offsets[0])))

        return follow


def _distinct(values: np.ndarray) -> np.ndarray:
    """Return the different values of an array."""
    return values[:1] if len(values) and (values == values[0]).all() else np.unique(values)
