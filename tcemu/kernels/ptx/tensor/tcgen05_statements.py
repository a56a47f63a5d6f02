"""`tcgen05`: tensor memory, its loads, stores and copies, and the products of single threads or of pairs of blocks.

A product, copy or shift is complete when it is issued, which is one of the outcomes that the asynchronous protocol allows; `commit` then
arrives at once. Loads and stores of tensor memory complete at once as well, so that fences and waits have no effect. Checked mode follows
the protocol on the host; see `tcgen05_protocol`.

The instruction descriptor of `mma` decides the shape and the types of the product, and kernels hold it in a register. The host therefore
reads it, and the statement is compiled for the value that the launch shows; threads with different descriptors execute the statement one
value after the other. The zero-column mask of .ws is read in the same way. All other operands may differ between blocks and threads.

With cta_group::2 a thread of either block of a pair issues for both. Blocks 2i and 2i + 1 of a cluster are a pair. Source: PTX ISA 9.7.16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base.errors import UndefinedBehaviour, Unsupported
from tcemu.engine.instructions import tcgen05
from tcemu.engine.instructions.tcgen05_faults import Tcgen05Fault
from tcemu.engine.instructions.tcgen05_memories import move_places, move_rows_down, pack_cells, reduce_registers, unpack_cells
from tcemu.engine.instructions.tcgen05_operands import column_counts, scaled_input_is_open, shared_extents
from tcemu.engine.isa.families import LANES
from tcemu.engine.isa.legality import manual_section
from tcemu.engine.isa.targets import TARGETS
from tcemu.engine.isa.tcgen05 import (
    MAX_ALLOCATION,
    Tcgen05,
    Tcgen05Allocation,
    Tcgen05Commit,
    Tcgen05Copy,
    Tcgen05Mma,
    Tcgen05Move,
    Tcgen05Shift,
)
from tcemu.engine.isa.tcgen05_descriptors import decode_instruction_descriptor
from tcemu.engine.layouts.shared_memory import is_outside
from tcemu.engine.layouts.tcgen05_memory import decode_tcgen05_descriptor, tcgen05_unit_addresses
from tcemu.engine.layouts.tensor_memory import LANES as TENSOR_LANES
from tcemu.engine.layouts.tensor_memory import (
    QUARTER,
    SHIFT_COLUMNS,
    accumulator_layout,
    copy_lanes,
    move_cells,
)
from tcemu.kernels.ptx.instruction_interface import Context, Prepare, Step
from tcemu.kernels.ptx.simt import tensor_memory_state as memory
from tcemu.kernels.ptx.simt.device_memory import split_words
from tcemu.kernels.ptx.simt.faults import Message, OutOfBounds
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.tensor.async_copies import each_destination, read_multicast_mask
from tcemu.kernels.ptx.tensor.mbarriers import arrive, update_barriers
from tcemu.kernels.ptx.tensor.statement_forms import (
    BoundStatement,
    bind_operands,
    note_fault,
    note_undefined,
    read_registers,
    read_uniform,
    require_whole_warps,
    vector_elements,
    write_registers,
)
from tcemu.kernels.ptx.text.module import Address, Operand, Statement

Values = dict[str, Any]  # operands, arrays of the issuing threads by name
DESCRIPTOR_SECTION = "PTX ISA 9.7.16.4.1"


def prepare_tcgen05(statement: Statement, context: Context) -> Step:
    """Prepare every `tcgen05` instruction."""
    bound: BoundStatement[Any] = bind_operands(statement, context, Tcgen05)
    op = bound.op
    if isinstance(op, Tcgen05Allocation):
        return Step(ALLOCATIONS[op.name](bound), collective=True)
    if isinstance(op, Tcgen05Move):
        return Step(_load(bound) if op.name == "tcgen05.ld" else _store(bound), collective=True)
    if isinstance(op, Tcgen05Commit):
        return Step(_commit(bound))
    if isinstance(op, Tcgen05Copy | Tcgen05Shift):
        return Step(_copy(bound) if isinstance(op, Tcgen05Copy) else _shift(bound))
    if isinstance(op, Tcgen05Mma):
        return _prepare_product(bound)
    if op.family == "tcgen05.wait":
        return Step(lambda machine: require_whole_warps(machine, bound), collective=True)
    return Step(lambda machine: machine)  # tcgen05.fence


# ---- values of whole warps


def _read_uniform(machine: Machine, bound: BoundStatement, name: str) -> tuple[Array, Machine]:
    """Read a 32-bit value that is uniform in a warp, [blocks, warps]."""
    operand = bound.operands[name]
    value = machine.address(operand).astype(jnp.uint32) if isinstance(operand, Address) else machine.read(operand, "b32")
    return read_uniform(machine, bound, value, LANES, Tcgen05Fault.DIFFERENT_VALUES.message(name))


def _spread(value: Array) -> Array:
    """Repeat [blocks, warps] to [blocks, threads]."""
    return jnp.repeat(value, LANES, axis=1)


def _first_warp(machine: Machine, value: Array) -> tuple[Array, Array]:
    """Return the value, [blocks, warps], of the first active warp of each block, and whether the block has one."""
    active = machine.warps(machine.active).any(-1)
    return jnp.take_along_axis(value, jnp.argmax(active, axis=1)[:, None], axis=1)[:, 0], active.any(1)


# ---- allocation


def _allocate(bound: BoundStatement) -> Callable[[Machine], Machine]:
    """Allocate columns. The scheduler lets one warp of a block execute the statement at a time, once there is room."""
    address, space = bound.operands["dst"], "shared" if bound.op.space else ""
    assert isinstance(address, Address)

    def execute(machine: Machine) -> Machine:
        machine = require_whole_warps(machine, bound)
        wanted, machine = _read_uniform(machine, bound, "columns")
        count, live = _first_warp(machine, wanted.astype(jnp.int32))
        state = memory.tensor_memory(machine)
        legal = (count >= memory.PIECE) & (count <= MAX_ALLOCATION) & (count & (count - 1) == 0)
        message = Tcgen05Fault.ILLEGAL_SIZE.message(memory.PIECE, MAX_ALLOCATION)
        machine = note_undefined(machine, ~legal[:, None], message)
        if bound.checked:
            machine = note_undefined(machine, state.relinquished[:, None], Tcgen05Fault.NO_PERMIT.message())
            larger = (state.last > 0) & (count > state.last)
            machine = note_undefined(machine, larger[:, None], Tcgen05Fault.LARGER_ALLOCATION.message())
        start = memory.find_room(state.owners, count)
        live &= legal & (start >= 0)
        taken = memory.piece_mask(state.owners, start, count) & live[:, None]
        state = state._replace(owners=jnp.where(taken, start[:, None], state.owners), last=jnp.where(live, count, state.last))
        machine = memory.replace_tensor_memory(machine, state)
        value = jnp.broadcast_to(start.astype(jnp.uint32)[:, None], machine.active.shape)
        active = machine.active
        machine = machine.restrict_active(_is_first_lane(machine)).store(space, machine.address(address), "b32", (value,))
        return replace(machine, active=active)

    return execute


def _is_first_lane(machine: Machine) -> Array:
    active = machine.warps(machine.active)
    return machine.threads(active & (jnp.cumsum(active, axis=-1) == 1))


def _deallocate(bound: BoundStatement) -> Callable[[Machine], Machine]:
    def execute(machine: Machine) -> Machine:
        machine = require_whole_warps(machine, bound)
        addresses, machine = _read_uniform(machine, bound, "address")
        counts, machine = _read_uniform(machine, bound, "columns")
        state, active = memory.tensor_memory(machine), machine.warps(machine.active).any(-1)
        owners = state.owners
        for warp in range(addresses.shape[1]):
            start, count, live = addresses[:, warp].astype(jnp.int32), counts[:, warp].astype(jnp.int32), active[:, warp]
            if bound.checked:
                known = memory.allocated_columns(owners, start)
                mine = _spread(jnp.arange(addresses.shape[1])[None] == warp)
                message = Tcgen05Fault.UNKNOWN_ALLOCATION.message()
                machine = note_undefined(machine, mine & (known == 0)[:, None], message)
                message = Tcgen05Fault.OTHER_SIZE.message()
                machine = note_undefined(machine, mine & ((known > 0) & (known != count))[:, None], message)
            freed = memory.piece_mask(state.owners, start, count) & live[:, None]
            owners = jnp.where(freed, memory.FREE, owners)
        return memory.replace_tensor_memory(machine, state._replace(owners=owners))

    return execute


def _relinquish(bound: BoundStatement) -> Callable[[Machine], Machine]:
    def execute(machine: Machine) -> Machine:
        machine = require_whole_warps(machine, bound)
        state = memory.tensor_memory(machine)
        return memory.replace_tensor_memory(machine, state._replace(relinquished=state.relinquished | machine.active.any(1)))

    return execute


ALLOCATIONS: dict[str, Callable[[BoundStatement], Callable[[Machine], Machine]]] = {
    "tcgen05.alloc": _allocate, "tcgen05.dealloc": _deallocate, "tcgen05.relinquish_alloc_permit": _relinquish,
}  # fmt: skip


# ---- ld and st


def _move_places(machine: Machine, bound: BoundStatement) -> tuple[Array, Machine]:
    """Return the cells of all registers, as indices into the cells of all blocks, [blocks, warps, 32, n, ...].

    A warp whose cells lie outside tensor memory notes a fault.
    """
    op, offset = bound.op, bound.integer("half_split_offset", 0)
    machine = require_whole_warps(machine, bound)
    address, machine = _read_uniform(machine, bound, "taddr")
    cells = move_cells(op.tile, op.num, offset, packed=op.packed)
    column, lane = (address & np.uint32(0xFFFF)).astype(jnp.int32), ((address >> 16) & np.uint32(0xFFFF)).astype(jnp.int32)
    columns = memory.tensor_memory(machine).cells.shape[-1]
    beyond = (column + int(cells.column.max()) >= columns) | (column + int(cells.column.min()) < 0)
    beyond |= lane % QUARTER + int(cells.lane.max()) >= QUARTER
    message = Message(f"the cells lie outside the warp's part of tensor memory. PTX ISA {manual_section(op)}", OutOfBounds)
    where = _spread(beyond)
    machine = note_fault(machine, where, message, _spread(address).astype(jnp.uint64))
    if bound.checked:
        quarter = lane // QUARTER
        other = (quarter != jnp.arange(address.shape[1])[None] % 4) & (quarter != 0)
        machine = note_undefined(machine, _spread(other), Tcgen05Fault.OTHER_QUARTER.message())
    if bound.checked:
        last, first = int(cells.column.max()), int(cells.column.min())
        held = _holds_columns(memory.tensor_memory(machine).owners, column + first, last - first + 1)
        machine = note_undefined(machine, _spread(~held), Tcgen05Fault.UNALLOCATED_COLUMNS.message())
    machine = machine.restrict_active(~where)
    one = lambda address, warp: move_places(op, address, columns, warp, offset)
    warps = jnp.arange(address.shape[1], dtype=jnp.int32)
    places = jax.vmap(jax.vmap(one), in_axes=(0, None))(address, warps)
    block = jnp.arange(address.shape[0], dtype=jnp.int32).reshape(-1, *(1,) * (places.ndim - 1))
    return places + block * np.int32(TENSOR_LANES * columns), machine


def _load(bound: BoundStatement[Tcgen05Move]) -> Callable[[Machine], Machine]:
    op = bound.op

    def execute(machine: Machine) -> Machine:
        active = machine.active
        places, machine = _move_places(machine, bound)
        values = pack_cells(op, memory.tensor_memory(machine).cells.ravel()[places])
        machine = write_registers(machine, bound, "r", values)
        if op.reduction is not None:
            machine = machine.write(bound.operands["reduced"], "b32", machine.threads(reduce_registers(op, values)))
        return replace(machine, active=active)

    return execute


def _store(bound: BoundStatement[Tcgen05Move]) -> Callable[[Machine], Machine]:
    op = bound.op

    def execute(machine: Machine) -> Machine:
        active = machine.active
        places, machine = _move_places(machine, bound)
        values = unpack_cells(op, read_registers(machine, bound, "r"))
        state = memory.tensor_memory(machine)
        live = machine.warps(machine.active)
        live = live.reshape(*live.shape, *(1,) * (places.ndim - live.ndim))
        cells = state.cells.ravel().at[jnp.where(live, places, state.cells.size)].set(values, mode="drop")
        machine = memory.replace_tensor_memory(machine, state._replace(cells=cells.reshape(state.cells.shape)))
        return replace(machine, active=active)

    return execute


# ---- commit


def _commit(bound: BoundStatement[Tcgen05Commit]) -> Callable[[Machine], Machine]:
    address, section = bound.operands["mbar"], f"PTX ISA {manual_section(bound.op)}"
    assert isinstance(address, Address)

    def execute(machine: Machine) -> Machine:
        active, mask = machine.active, None
        barrier, one = machine.address(address), jnp.ones(machine.active.shape, jnp.int64)
        _require_pairs(machine, bound)
        if "cta_mask" in bound.operands:
            mask, machine = read_multicast_mask(machine, bound.operands["cta_mask"], section)
        for place, there in each_destination(machine, barrier, machine.active, mask):
            machine = update_barriers(replace(machine, active=there), arrive, place, one, bound.checked)[1]
        return replace(machine, active=active)

    return execute


# ---- statements of single threads, which execute one after the other


Body = Callable[[Values, Array, Array], tuple[Array, Array]]  # operands, shared memory, cells -> cells, and which problems there are


def _require_pairs(machine: Machine, bound: BoundStatement) -> None:
    """Raise Unsupported for cta_group::2 in clusters of an odd number of blocks."""
    if bound.op.cta_group == 2 and machine.cluster_size % 2:
        raise Unsupported(
            f"cta_group::2 needs clusters of an even number of blocks; they have {machine.cluster_size}. PTX ISA {manual_section(bound.op)}"
        )


def _issue(machine: Machine, bound: BoundStatement, values: Values, body: Body, problems: tuple[Message, ...]) -> Machine:
    """Execute a statement for each active thread, one thread of every block, or of every pair of blocks, at a time.

    Args:
        machine: The machine.
        bound: The statement.
        values: Operands of the threads, [blocks, threads, ...].
        body: Function for one block, or for one pair: operands of the issuing thread, shared memory uint32[words] and cells
            uint32[128, columns], with an axis of 2 before them for a pair. It returns the cells and bool[problems].
        problems: Messages; a thread with a problem notes a fault, and its cells stay as they were.
    """
    _require_pairs(machine, bound)
    size, state, shape = bound.op.cta_group, memory.tensor_memory(machine), machine.active.shape
    groups = shape[0] // size

    def group(value: Array) -> Array:
        return value.reshape(groups, size * shape[1], *value.shape[2:])

    own = (2,) if size == 2 else ()
    shared = machine.shared.reshape(groups, *own, machine.shared.shape[-1])
    active = group(machine.active)
    operands = {name: group(value) for name, value in values.items()}
    threads = jnp.arange(active.shape[1])

    def issue(loop: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        remaining, cells, found = loop
        thread = jnp.where(remaining, threads, len(threads) - 1).min(axis=1)  # where none remains, any one
        fresh, wrong = jax.vmap(body)({name: value[jnp.arange(groups), thread] for name, value in operands.items()}, shared, cells)
        live = remaining & (threads == thread[:, None])
        good = (live.any(axis=1) & ~wrong.any(-1)).reshape(-1, *(1,) * (cells.ndim - 1))
        found = jnp.where(live[..., None], wrong[:, None], found)
        return remaining & ~live, jnp.where(good, fresh, cells), found

    cells = state.cells.reshape(groups, *own, *state.cells.shape[1:])
    start = active, cells, jnp.zeros((*active.shape, len(problems)), bool)
    _, cells, found = lax.while_loop(lambda loop: loop[0].any(), issue, start)
    machine = memory.replace_tensor_memory(machine, state._replace(cells=cells.reshape(state.cells.shape)))
    for i, message in enumerate(problems):
        machine = note_fault(machine, found[..., i].reshape(shape), message)
    return machine


def _read_descriptor(machine: Machine, operand: Operand) -> Array:
    """Return the words of 64-bit descriptors, uint32[blocks, threads, 2]."""
    return jnp.stack(split_words(machine.read(operand, "b64")), axis=-1)


def _leaves_shared_memory(words: Array, shared: Array, major: str, lines: int, units: int) -> Array:
    """Return True if a descriptor, uint32[2], leads beyond the shared memory of the block."""
    return is_outside(tcgen05_unit_addresses(decode_tcgen05_descriptor(words), major, lines, units), shared.shape[-1]).any()


def _holds_columns(owners: Array, column: Array, count: int) -> Array:
    """Return True where `count` columns from `column`, int32[blocks, ...], on are allocated, as far as they are in tensor memory."""
    taken = (owners != memory.FREE).reshape(owners.shape[0], *(1,) * (column.ndim - 1), owners.shape[1])
    first = memory.PIECE * jnp.arange(owners.shape[1])
    used = (first + memory.PIECE > column[..., None]) & (first < column[..., None] + count)
    return (taken | ~used).all(-1)


def _check_allocation(machine: Machine, bound: BoundStatement, addresses: Values, columns: dict[str, int]) -> Machine:
    """Note a fault, in checked mode, for threads whose operands use columns that their block has not allocated."""
    if not bound.checked:
        return machine
    owners = memory.tensor_memory(machine).owners
    for name, count in columns.items():
        column = (addresses[name] & np.uint32(0xFFFF)).astype(jnp.int32)
        machine = note_undefined(machine, ~_holds_columns(owners, column, count), Tcgen05Fault.UNALLOCATED_COLUMNS.message())
    return machine


def _leaves_tensor_memory(address: Array, columns: int, cells: Array) -> Array:
    """Return True if columns from an address on lie beyond the last one."""
    return (address & np.uint32(0xFFFF)).astype(jnp.int32) + columns > cells.shape[-1]


def _shared_message(name: str) -> Message:
    return Message(f"{name} leads beyond the block's shared memory. {DESCRIPTOR_SECTION}", OutOfBounds)


def _tensor_message(name: str, target: str) -> Message:
    columns = TARGETS[target].tensor_columns
    return Message(f"{name} leads beyond the {columns} columns of tensor memory. PTX ISA 9.7.16.1", OutOfBounds)


def _copy(bound: BoundStatement[Tcgen05Copy]) -> Callable[[Machine], Machine]:
    op = bound.op
    address = bound.operands["taddr"]
    assert isinstance(address, Address)
    units = 2 if op.tile.endswith("256b") else 1
    lines = len(copy_lanes(op.tile, op.multicast))

    def copy(values: Values, shared: Array, cells: Array) -> tuple[Array, Array]:
        wrong = (
            _leaves_shared_memory(values["s_desc"], shared, "k", lines, units),
            _leaves_tensor_memory(values["address"], 4 * units, cells),
        )
        return tcgen05.cp(op, values["address"], values["s_desc"], shared, cells, target=bound.target), jnp.stack(wrong)

    def execute(machine: Machine) -> Machine:
        values = {
            "address": machine.address(address).astype(jnp.uint32),
            "s_desc": _read_descriptor(machine, bound.operands["s_desc"]),
        }
        machine = _check_allocation(machine, bound, values, {"address": 4 * units})
        return _issue(machine, bound, values, copy, (_shared_message("s-desc"), _tensor_message("taddr", bound.target)))

    return execute


def _shift(bound: BoundStatement[Tcgen05Shift]) -> Callable[[Machine], Machine]:
    address = bound.operands["taddr"]
    assert isinstance(address, Address)
    misaligned = Message(Tcgen05Fault.LANE_OF_SHIFT.message(), UndefinedBehaviour)

    def shift(values: Values, shared: Array, cells: Array) -> tuple[Array, Array]:
        at = values["address"]
        wrong = (at >> 16) % QUARTER != 0, _leaves_tensor_memory(at, SHIFT_COLUMNS, cells)
        return move_rows_down(bound.op.cta_group, at & np.uint32(0xFFFF), cells), jnp.stack(wrong)

    def execute(machine: Machine) -> Machine:
        values = {"address": machine.address(address).astype(jnp.uint32)}
        machine = _check_allocation(machine, bound, values, {"address": SHIFT_COLUMNS})
        return _issue(machine, bound, values, shift, (misaligned, _tensor_message("taddr", bound.target)))

    return execute


# ---- mma


def _prepare_product(bound: BoundStatement[Tcgen05Mma]) -> Step:
    op = bound.op
    scale = bound.integer("scale_input_d", 0)
    names = [name for name in ("idesc", "zero_column_mask") if name in bound.operands]

    def execute(machine: Machine, idesc: int, mask: int | None = None) -> Machine:
        described = decode_instruction_descriptor(op, idesc)
        layout = accumulator_layout(described.product.m, op.cta_group, ws=op.ws, sparse=op.sparse)
        values = _read_operands(machine, bound)
        extents = shared_extents(described, mask)
        extents = {name: extent for name, extent in extents.items() if name in values}
        columns = {name: count for name, count in column_counts(described).items() if name in values}

        def multiply(values: Values, shared: Array, cells: Array) -> tuple[Array, Array]:
            wrong = [_leaves_shared_memory(values[name], shared, *extent[:3]) for name, extent in extents.items()]
            wrong += [_leaves_tensor_memory(values[name], count, cells) for name, count in columns.items()]
            lane = values["d"] >> 16
            wrong.append((lane != 0) & ((lane != 16) | (not layout.rows_above)))
            if scale and bound.checked:
                wrong.append(scaled_input_is_open(described, values["d"], values["enable_input_d"], scale, cells))
            fresh = tcgen05.mma(
                op, idesc=idesc, shared=shared, tmem=cells, zero_column_mask=mask, scale_input_d=scale, target=bound.target, **values
            )
            return fresh, jnp.stack(wrong)

        machine = _check_allocation(machine, bound, values, columns)
        messages = (*map(_shared_message, extents), *(_tensor_message(name, bound.target) for name in columns), LANE_MESSAGE)
        messages += (SCALE_MESSAGE,) if scale and bound.checked else ()
        return _issue(machine, bound, values, multiply, messages)

    return Step(execute, constants=tuple(bound.operands[name] for name in names))


LANE_MESSAGE = Message(Tcgen05Fault.LANE_OF_D.message(), UndefinedBehaviour)
SCALE_MESSAGE = Message(Tcgen05Fault.OPEN_SCALED_INPUT.message(), UndefinedBehaviour)


def _read_operands(machine: Machine, bound: BoundStatement[Tcgen05Mma]) -> Values:
    """Read the operands of an mma that may differ between threads, by the names of `tcgen05.mma`."""
    operands, values = bound.operands, {}
    for name in ("d", "a_tmem", "sp_meta", "scale_a", "scale_b"):
        if name in operands:
            operand = operands[name]
            assert isinstance(operand, Address)
            values[name] = machine.address(operand).astype(jnp.uint32)
    for name in ("a_desc", "b_desc"):
        if name in operands:
            values[name] = _read_descriptor(machine, operands[name])
    values["enable_input_d"] = machine.read(operands["enable_input_d"], "pred")
    if "disable_output_lane" in operands:
        words = vector_elements(operands["disable_output_lane"])
        values["disable_output_lane"] = jnp.stack([machine.read(word, "b32") for word in words], axis=-1)
    return values


PREPARE: dict[str, Prepare] = {"tcgen05": prepare_tcgen05}
