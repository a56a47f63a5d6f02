"""The asynchronous protocol of tcgen05 on arrays: a CTA, or a pair of CTAs, with its tensor memory and the work that is under way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.base.errors import UndefinedBehaviour
from tcemu.engine.instructions import tcgen05
from tcemu.engine.instructions.tcgen05_faults import Tcgen05Fault, is_pipelined
from tcemu.engine.instructions.tcgen05_operands import BAND, BANDS, operand_cells, shared_extents
from tcemu.engine.isa.families import Instruction
from tcemu.engine.isa.legality import check
from tcemu.engine.isa.targets import TARGETS, resolve_target
from tcemu.engine.isa.tcgen05 import MAX_ALLOCATION, Tcgen05Copy, Tcgen05Mma, Tcgen05Move, Tcgen05Product, Tcgen05Shift
from tcemu.engine.isa.tcgen05_descriptors import InstructionDescriptor, decode_instruction_descriptor
from tcemu.engine.layouts.shared_memory import UNIT
from tcemu.engine.layouts.strided_memory import as_memory
from tcemu.engine.layouts.tcgen05_memory import decode_tcgen05_descriptor, descriptor_problem, tcgen05_unit_addresses
from tcemu.engine.layouts.tensor_memory import LANES, QUARTER, SHIFT_COLUMNS, accumulator_layout, copy_lanes, move_cells

PIECE = 32  # columns that are allocated together
STATIC = {"static": True}
Cells = int  # a bit for each column of each band of 16 lanes, band after band


class PendingAccess(NamedTuple):
    """An instruction that is not known to be complete."""

    kind: str  # "work": a product, copy or shift; "store"; "load"
    signature: tuple  # of work, as `is_pipelined` takes it
    warp: int = 0  # of a store or load
    reads: Cells = 0
    writes: Cells = 0
    units: frozenset[int] = frozenset()  # of 16 bytes in shared memory that are read
    committed: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Tcgen05Block:
    """A CTA, or with cta_group 2 a pair of CTAs, that issues tcgen05 instructions, as a value: each method returns the next state.

    One thread issues the products, copies and shifts; warps load and store. `commit` and then `wait` stand for a commit and for the
    mbarrier's phase that the threads have seen, `wait_load` and `wait_store` for the waits of all warps. Results are there when an
    instruction is issued; in checked mode their use before it is known to be complete raises UndefinedBehaviour, with the texts of
    `Tcgen05Fault`. Addresses and descriptors must then be known before tracing. Without checked mode nothing is followed.

    Make one by Tcgen05Block(shared, target="B200"), or Tcgen05Block(shared, target="B200", checked=True). A block is a pytree: jit and vmap
    may carry it; what is under way is static.

    Checked mode cannot see the order of several warps among each other, and fences, which CUTLASS and Triton leave out.

    Source: PTX ISA 9.7.16.6 to 9.7.16.12.
    """

    shared: ArrayLike  # uint32[..., words]; of a pair uint32[..., 2, words]
    tmem: Any = None  # uint32[..., 128, columns]; of a pair uint32[..., 2, 128, columns]; None: zeros
    target: str = field(default="", metadata=STATIC)
    cta_group: int = field(default=1, metadata=STATIC)
    checked: bool = field(default=False, metadata=STATIC)
    allocations: tuple[tuple[int, int], ...] = field(default=(), metadata=STATIC)  # first column and number of columns
    last_allocation: int = field(default=0, metadata=STATIC)  # columns; 0 before the first
    relinquished: bool = field(default=False, metadata=STATIC)
    pending: tuple[PendingAccess, ...] = field(default=(), metadata=STATIC)
    written: Cells = field(default=0, metadata=STATIC)  # cells that something has written since their allocation
    unfenced: frozenset[int] = field(default=frozenset(), metadata=STATIC)  # units of shared memory that threads have stored to
    collectors: frozenset[str] = field(default=frozenset(), metadata=STATIC)  # buffers that a product has filled
    notes: tuple[str, ...] = field(default=(), metadata=STATIC)  # what the manual asks for but compilers leave out

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", resolve_target(self.target))
        if self.tmem is None:
            shape = (LANES, self.tensor_columns)
            object.__setattr__(self, "tmem", np.zeros((2, *shape) if self.cta_group == 2 else shape, np.uint32))

    @property
    def tensor_columns(self) -> int:
        """Columns of the target's tensor memory."""
        return TARGETS[self.target].tensor_columns

    def _cells(self, bands: Iterable[int], first: int, end: int) -> Cells:
        width, chosen = self.tensor_columns, set(map(int, bands))
        columns = (1 << min(end, width)) - (1 << min(first, width))
        return sum(columns << band * width for band in range(BANDS) if band in chosen)

    # ---- allocation

    def alloc(self, columns: int) -> tuple[int, Tcgen05Block]:
        """Allocate the lowest free columns.

        Args:
            columns: A power of 2 from 32 to 512.

        Returns:
            Their address, and the block afterwards.

        Raises:
            UndefinedBehaviour: The number of columns is illegal, no columns are free, or, in checked mode, the block may not allocate them.
        """
        if not PIECE <= columns <= MAX_ALLOCATION or columns & (columns - 1):
            self._raise(Tcgen05Fault.ILLEGAL_SIZE, PIECE, MAX_ALLOCATION)
        if self.checked and self.relinquished:
            self._raise(Tcgen05Fault.NO_PERMIT)
        if self.checked and 0 < self.last_allocation < columns:
            self._raise(Tcgen05Fault.LARGER_ALLOCATION)
        taken = sum((1 << start + count) - (1 << start) for start, count in self.allocations)
        starts = range(0, self.tensor_columns - columns + 1, PIECE)
        start = next((start for start in starts if not taken >> start & (1 << columns) - 1), None)
        if start is None:
            raise UndefinedBehaviour(
                f"alloc: {columns} columns are not free, and nothing frees them: the warp waits for ever. PTX ISA 9.7.16.7"
            )
        return start, replace(self, allocations=(*self.allocations, (start, columns)), last_allocation=columns)

    def dealloc(self, address: int, columns: int) -> Tcgen05Block:
        """Free columns.

        Args:
            address: Address that `alloc` has given.
            columns: Columns of that allocation.

        Raises:
            UndefinedBehaviour: In checked mode, `alloc` has not given these columns, or an instruction still uses them.
        """
        known = dict(self.allocations).get(address)
        cells = self._cells(range(BANDS), address, address + columns)
        if self.checked:
            if known is None:
                self._raise(Tcgen05Fault.UNKNOWN_ALLOCATION)
            if known != columns:
                self._raise(Tcgen05Fault.OTHER_SIZE)
            for each in self.pending:
                if cells & (each.reads | each.writes):
                    self._raise(Tcgen05Fault.FREED_IN_USE, _name(each))
        rest = tuple(each for each in self.allocations if each[0] != address)
        return replace(self, allocations=rest, written=self.written & ~cells)

    def relinquish_alloc_permit(self) -> Tcgen05Block:
        """Give up the right to allocate."""
        return replace(self, relinquished=True)

    def exit(self) -> None:
        """End the block.

        Raises:
            UndefinedBehaviour: In checked mode, columns are not freed.
        """
        if self.checked and self.allocations:
            self._raise(Tcgen05Fault.NOT_FREED, "the block", sum(count for _, count in self.allocations))

    # ---- products, copies and shifts

    def mma(self, op: str | Instruction, d: int, b_desc: int, idesc: int | None = None, **operands: Any) -> Tcgen05Block:
        """Issue `tcgen05.mma`. The arguments are those of `tcemu.engine.instructions.tcgen05.mma`.

        Args:
            op: PTX spelling, or a `Tcgen05Product`.
            d: Address of D.
            b_desc: Descriptor of B.
            idesc: Instruction descriptor; None for a product.
            **operands: Further operands by name.

        Raises:
            UndefinedBehaviour: In checked mode, the use of a cell or of shared memory is not ordered, or an operand is illegal.
        """
        checked = check(op, self.target)
        state = self
        if self.checked:
            described = self._describe(checked, idesc)
            state = self._follow_product(checked, described, {"d": d, "b_desc": b_desc, **operands})
        memories = {"shared": self.shared, "tmem": self.tmem, "target": self.target, "checked": self.checked}
        return replace(state, tmem=tcgen05.mma(checked, d, b_desc, idesc, **memories, **operands))

    def cp(self, op: str | Instruction, address: int, s_desc: int) -> Tcgen05Block:
        """Issue `tcgen05.cp`. The arguments are those of `tcemu.engine.instructions.tcgen05.cp`.

        Raises:
            UndefinedBehaviour: In checked mode, the use of a cell or of shared memory is not ordered, or an operand is illegal.
        """
        copy, state = check(op, self.target), self
        if self.checked and isinstance(copy, Tcgen05Copy):
            lanes, units = copy_lanes(copy.tile, copy.multicast), 2 if copy.tile.endswith("256b") else 1
            read = self._read_units("s_desc", _require_known("s_desc", s_desc), ("k", len(lanes), units))
            bands = np.unique(((_require_known("address", address) >> 16) + lanes) // BAND)
            column = address & 0xFFFF
            state = self._issue(("copy", copy.tile), writes=self._cells(bands, column, column + 4 * units), units=read)
        return replace(state, tmem=tcgen05.cp(copy, address, s_desc, self.shared, self.tmem, target=self.target))

    def shift(self, op: str | Instruction, address: int) -> Tcgen05Block:
        """Issue `tcgen05.shift`. The arguments are those of `tcemu.engine.instructions.tcgen05.shift`.

        Raises:
            UndefinedBehaviour: The lane is no multiple of 32, or, in checked mode, the use of a cell is not ordered.
        """
        moved, state = check(op, self.target), self
        if self.checked and isinstance(moved, Tcgen05Shift):
            column = _require_known("address", address) & 0xFFFF
            cells = self._cells(range(BANDS), column, column + SHIFT_COLUMNS)
            self._require_written(cells, "the shift")
            state = self._issue(("shift",), writes=cells)
        return replace(state, tmem=tcgen05.shift(moved, address, self.tmem, target=self.target))

    def commit(self) -> Tcgen05Block:
        """Issue `tcgen05.commit` for all work that was issued before."""
        return replace(self, pending=tuple(each._replace(committed=each.kind == "work") for each in self.pending))

    def wait(self) -> Tcgen05Block:
        """See the phase of the mbarrier at which the commits have arrived: committed work is complete."""
        return replace(self, pending=tuple(each for each in self.pending if not each.committed))

    # ---- loads and stores

    def ld(self, op: str | Instruction, address: int, *, warp: int, half_split_offset: int = 0) -> tuple[Any, Tcgen05Block]:
        """Issue `tcgen05.ld`. The arguments are those of `tcemu.engine.instructions.tcgen05.ld`.

        Returns:
            What `tcgen05.ld` returns, of a pair for both CTAs with an axis of 2 in front, and the block afterwards.

        Raises:
            UndefinedBehaviour: In checked mode, the cells are not written, or work or a store on them is not known to be complete.
        """
        move, state = check(op, self.target), self
        if self.checked and isinstance(move, Tcgen05Move):
            cells = self._move_cells(move, address, warp, half_split_offset)
            self._require_complete(cells, ("work", "store"))
            if not cells & self.written:
                self._raise(Tcgen05Fault.UNWRITTEN_CELLS, "the load")
            state = self._add(PendingAccess("load", (), warp, reads=cells))
        options = {"warp": warp, "half_split_offset": half_split_offset, "target": self.target}
        return tcgen05.ld(move, address, self.tmem, **options), state

    def st(self, op: str | Instruction, address: int, registers: ArrayLike, *, warp: int, half_split_offset: int = 0) -> Tcgen05Block:
        """Issue `tcgen05.st`. The arguments are those of `tcemu.engine.instructions.tcgen05.st`.

        Raises:
            UndefinedBehaviour: In checked mode, work or a load on the cells is not known to be complete.
        """
        move, state = check(op, self.target), self
        if self.checked and isinstance(move, Tcgen05Move):
            cells = self._move_cells(move, address, warp, half_split_offset)
            self._require_complete(cells, ("work", "store", "load"), reads=True)
            state = self._add(PendingAccess("store", (), warp, writes=cells))
        options = {"warp": warp, "half_split_offset": half_split_offset, "target": self.target}
        return replace(state, tmem=tcgen05.st(move, address, registers, self.tmem, **options))

    def wait_load(self) -> Tcgen05Block:
        """Issue `tcgen05.wait::ld` in all warps."""
        return replace(self, pending=tuple(each for each in self.pending if each.kind != "load"))

    def wait_store(self) -> Tcgen05Block:
        """Issue `tcgen05.wait::st` in all warps."""
        return replace(self, pending=tuple(each for each in self.pending if each.kind != "store"))

    # ---- shared memory

    def store_shared(self, offset: int, words: ArrayLike) -> Tcgen05Block:
        """Store words to shared memory from threads, of a pair to that of both CTAs.

        Args:
            offset: Byte address, a multiple of 4.
            words: uint32[..., n]; of a pair uint32[..., 2, n].

        Raises:
            UndefinedBehaviour: In checked mode, work still reads there.
        """
        values, memory = as_memory("words", words), as_memory("shared", self.shared)
        count = values.shape[-1]
        if offset % 4 or offset < 0 or offset + 4 * count > 4 * memory.shape[-1]:
            raise ValueError(f"offset: got {offset}; {count} words from there must fit the {memory.shape[-1]} of shared memory")
        units = frozenset(range(offset // UNIT, (offset + 4 * count + UNIT - 1) // UNIT))
        if self.checked:
            for each in self.pending:
                if each.units & units:
                    self._raise(Tcgen05Fault.SHARED_MEMORY_IN_USE, _name(each))
        return replace(self, shared=memory.at[..., offset // 4 : offset // 4 + count].set(values), unfenced=self.unfenced | units)

    def fence_proxy_async(self) -> Tcgen05Block:
        """Issue `fence.proxy.async` behind the stores to shared memory."""
        return replace(self, unfenced=frozenset())

    # ---- what is followed in checked mode

    def _raise(self, fault: Tcgen05Fault, *words: object) -> NoReturn:
        raise UndefinedBehaviour(fault.message(*words))

    def _describe(self, op: Instruction, idesc: int | None) -> InstructionDescriptor:
        if isinstance(op, Tcgen05Product) and idesc is None:
            return InstructionDescriptor(op)
        instruction = op.instruction if isinstance(op, Tcgen05Product) else op
        if not isinstance(instruction, Tcgen05Mma):
            raise ValueError(f"op: {op} is no tcgen05.mma")
        return decode_instruction_descriptor(instruction, _require_known("idesc", idesc))

    def _follow_product(self, op: Instruction, described: InstructionDescriptor, operands: dict[str, Any]) -> Tcgen05Block:
        product = described.product
        if _require_known("d", operands["d"]) >> 16 not in ((0, 16) if self._rows_above(product) else (0,)):
            self._raise(Tcgen05Fault.LANE_OF_D)
        units: frozenset[int] = frozenset()
        for name, extent in shared_extents(described, operands.get("zero_column_mask")).items():
            if operands.get(name) is not None:
                units |= self._read_units(name, _require_known(name, operands[name]), extent[:3], absolute=product.depth.absolute)
        read = written = 0
        for name, bands, count in operand_cells(described):
            if operands.get(name) is None:
                continue
            lane, column = _require_known(name, operands[name]) >> 16, operands[name] & 0xFFFF
            cells = self._cells(np.minimum(bands + lane // BAND, BANDS - 1), column, column + count)
            if name != "d" or bool(operands.get("enable_input_d", True)):
                self._require_written(cells, "the product" if name != "d" else "D of the product")
            read, written = (read, cells) if name == "d" else (read | cells, written)
        state = self._use_collector(op.collector) if isinstance(op, Tcgen05Mma) else self
        signature = ("product", product.kind, product.ws, product.m, product.n, operands["d"])
        state = state._issue(signature, reads=read, writes=written, units=units)
        if isinstance(op, Tcgen05Mma) and op.ashift:
            column = operands["a_tmem"] & 0xFFFF
            state = state._issue(("shift",), writes=self._cells(range(BANDS), column, column + SHIFT_COLUMNS))
        return state

    def _rows_above(self, product: Tcgen05Product) -> bool:
        return accumulator_layout(product.m, product.cta_group, ws=product.ws, sparse=product.sparse).rows_above

    def _use_collector(self, collector: str) -> Tcgen05Block:
        buffer, _, use = collector.partition("::")
        notes = self.notes
        if use in ("use", "lastuse") and buffer not in self.collectors:
            notes = (*notes, Tcgen05Fault.COLLECTOR_NOT_FILLED.message(buffer))
        filled = self.collectors | {buffer} if use in ("fill", "use") else self.collectors - {buffer}
        return replace(self, notes=tuple(dict.fromkeys(notes)), collectors=filled)

    def _issue(self, signature: tuple, *, reads: Cells = 0, writes: Cells = 0, units: frozenset[int] = frozenset()) -> Tcgen05Block:
        """Check a product, copy or shift against what is under way, and add it."""
        cells = reads | writes
        self._require_allocated(cells)
        for each in self.pending:
            if each.kind == "work" and each.writes & cells:
                is_read = bool(each.writes & reads)
                if not is_pipelined(each.signature, signature, is_read=is_read):
                    self._raise(Tcgen05Fault.UNORDERED_WORK, f"{each.signature[0]} of the same thread")
        self._require_complete(cells, ("store",))
        self._require_complete(writes, ("load",), reads=True)
        return self._add(PendingAccess("work", signature, reads=reads, writes=writes, units=units))

    def _add(self, access: PendingAccess) -> Tcgen05Block:
        return replace(self, pending=(*self.pending, access), written=self.written | access.writes)

    def _require_complete(self, cells: Cells, kinds: tuple[str, ...], *, reads: bool = False) -> None:
        """Forbid an access to cells on which instructions of these kinds are under way; reads: also of those that only read them."""
        faults = {"store": Tcgen05Fault.STORE_WITHOUT_WAIT, "load": Tcgen05Fault.LOAD_WITHOUT_WAIT}
        for each in self.pending:
            if each.kind in kinds and cells & (each.writes | each.reads if reads else each.writes):
                self._raise(faults.get(each.kind, Tcgen05Fault.UNFINISHED_WORK), _name(each) if each.kind == "work" else each.warp)

    def _require_allocated(self, cells: Cells) -> None:
        if cells & ~sum(self._cells(range(BANDS), start, start + count) for start, count in self.allocations):
            self._raise(Tcgen05Fault.UNALLOCATED_COLUMNS)

    def _require_written(self, cells: Cells, name: str) -> None:
        anywhere = 0
        for band in range(BANDS):
            anywhere |= self.written >> band * self.tensor_columns & (1 << self.tensor_columns) - 1
        if cells & ~sum(anywhere << band * self.tensor_columns for band in range(BANDS)):
            self._raise(Tcgen05Fault.UNWRITTEN_CELLS, name)

    def _move_cells(self, move: Tcgen05Move, address: int, warp: int, offset: int) -> Cells:
        lane, column = _require_known("address", address) >> 16, address & 0xFFFF
        if lane // QUARTER not in (0, warp % 4):
            self._raise(Tcgen05Fault.OTHER_QUARTER)
        moved = move_cells(move.tile, move.num, offset, packed=move.packed)
        bands = np.unique(QUARTER * (warp % 4) + lane % QUARTER + moved.lane) // BAND
        cells = self._cells(bands, column + int(moved.column.min()), column + int(moved.column.max()) + 1)
        self._require_allocated(cells)
        return cells

    def _read_units(self, name: str, value: int, extent: tuple[str, int, int], *, absolute: bool = False) -> frozenset[int]:
        words = np.array([value & 0xFFFFFFFF, value >> 32], np.uint32)
        problem = descriptor_problem(words, absolute=absolute)
        if problem:
            self._raise(Tcgen05Fault.ILLEGAL_DESCRIPTOR, name, problem.rpartition(". ")[0])
        units = frozenset((np.unique(tcgen05_unit_addresses(decode_tcgen05_descriptor(words), *extent)) // UNIT).tolist())
        if units & self.unfenced:
            self._raise(Tcgen05Fault.PROXY_FENCE_MISSING)
        return units


def _name(access: PendingAccess) -> str:
    return access.signature[0] if access.kind == "work" else f"{access.kind} of warp {access.warp}"


def _require_known(name: str, value: Any) -> int:
    """Return an operand that checked mode must know."""
    if isinstance(value, Tracer) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: got {type(value).__name__}; checked mode needs an int that is known before tracing")
    return int(value)
