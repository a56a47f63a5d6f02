"""Asynchronous copies between global and shared memory: `cp.async`, `cp.async.bulk` and `cp.async.bulk.tensor`.

A copy is made when it is issued, which is one of the outcomes that the manual allows. So the instructions that wait have no effect except
in checked mode, see `tcemu.ptx.simt.shared_memory_checks`.

A single thread issues a bulk copy. The issuing threads of a block follow one another, one thread of every block at a time, and `COPY_LANES`
lanes per block move units of `UNIT_BYTES` bytes. A tensor copy moves a box of a tensor, described by a tensor map, in tile mode as TMA
does. The box lies in shared memory row by row, innermost dimension first, and its units are swizzled by their addresses. Elements outside
the tensor are read as zeros and not stored. Source: PTX ISA 5.5, 9.7.9.25.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base.errors import Unsupported
from tcemu.isa.targets import resolve_target
from tcemu.layouts.shared_memory import SWIZZLE_SHIFT
from tcemu.ptx.instruction_interface import Context, Prepare, Step
from tcemu.ptx.simt import shared_memory_checks as pending
from tcemu.ptx.simt import tensor_maps as maps
from tcemu.ptx.simt.device_memory import ROOM_BITS, gather_words, locate_in_rooms, replace_rank, scatter_words
from tcemu.ptx.simt.faults import Message, Misaligned, OutOfBounds
from tcemu.ptx.tensor.mbarriers import Arrivals, BarrierUpdate, arrive, arrive_after_copies, complete_bytes, update_barriers
from tcemu.ptx.tensor.statement_forms import Choices, InstructionForm, constant_operand, match_form, note_fault, note_undefined, slot
from tcemu.ptx.text.module import Address, Negated, Operand, Register, Statement, Vector

if TYPE_CHECKING:
    from tcemu.ptx.simt.machine import Machine

UNIT_BYTES = 16  # bytes that a lane moves at a time
UNIT_WORDS = UNIT_BYTES // 4
COPY_LANES = 512  # lanes per block that move the units of a copy
COPY_SECTION, BULK_SECTION, TENSOR_SECTION = "PTX ISA 9.7.9.25.3", "PTX ISA 9.7.9.25.4", "PTX ISA 9.7.9.25.5"
BOX_ALIGNMENT = 128  # alignment of a box in shared memory in bytes
HINT_SLOT = slot("hint", "L2::cache_hint")
GROUP_SLOT = slot("group", "cta_group::1 cta_group::2")
DIMENSION_SLOT = slot("dim", "1d 2d 3d 4d 5d", required=True)
MULTICAST_SLOT = slot("multicast", "multicast::cluster")
REFUSED_MODES: dict[str, str] = dict.fromkeys(
    ("im2col", "im2col_no_offs", "im2col::w", "im2col::w::128", "tile::gather4", "tile::scatter4"), "only boxes in tile mode are supported"
)
TENSOR_FORM = InstructionForm(
    "cp.async.bulk.tensor",
    (
        DIMENSION_SLOT,
        slot("to", "shared::cluster shared::cta global", required=True),
        slot("from", "global shared::cta", required=True),
        slot("mode", "tile"),
        slot("completion", "mbarrier::complete_tx::bytes bulk_group", required=True),
        MULTICAST_SLOT,
        GROUP_SLOT,
        HINT_SLOT,
    ),
    (2, 3, 4, 5),
    90,
    TENSOR_SECTION,
    REFUSED_MODES,
)
PREFETCH_TENSOR_FORM = InstructionForm(
    "cp.async.bulk.prefetch.tensor",
    (
        DIMENSION_SLOT,
        slot("level", "L2", required=True),
        slot("from", "global", required=True),
        slot("mode", "tile"),
        slot("hint", "L2::cache_hint"),
    ),
    (1, 2),
    90,
    TENSOR_SECTION,
    REFUSED_MODES,
)
COPY_FORM = InstructionForm(
    "cp.async",
    (
        slot("cache", "ca cg", required=True),
        slot("to", "shared shared::cta", required=True),
        slot("from", "global", required=True),
        HINT_SLOT,
        slot("prefetch", "L2::64B L2::128B L2::256B"),
    ),
    (3, 4, 5),
    80,
    COPY_SECTION,
)
ARRIVE_FORM = InstructionForm(
    "cp.async.mbarrier.arrive",
    (slot("noinc", "noinc"), slot("space", "shared shared::cta"), slot("type", "b64", required=True)),
    (1,),
    80,
    "PTX ISA 9.7.13.15.17",
)
COMMIT_FORM = InstructionForm("cp.async.commit_group", (), (0,), 80, COPY_SECTION)
WAIT_ALL_FORM = InstructionForm("cp.async.wait_all", (), (0,), 80, COPY_SECTION)
WAIT_FORM = InstructionForm("cp.async.wait_group", (), (1,), 80, COPY_SECTION)
BULK_FORM = InstructionForm(
    "cp.async.bulk",
    (
        slot("to", "shared::cluster shared::cta global", required=True),
        slot("from", "global shared::cta", required=True),
        slot("completion", "mbarrier::complete_tx::bytes bulk_group", required=True),
        MULTICAST_SLOT,
        HINT_SLOT,
        slot("mask", "cp_mask"),
    ),
    (3, 4, 5, 6),
    90,
    BULK_SECTION,
)
BULK_COMMIT_FORM = InstructionForm("cp.async.bulk.commit_group", (), (0,), 90, BULK_SECTION)
BULK_WAIT_FORM = InstructionForm("cp.async.bulk.wait_group", (slot("read", "read"),), (1,), 90, BULK_SECTION)
PREFETCH_FORM = InstructionForm(
    "cp.async.bulk.prefetch",
    (slot("level", "L2", required=True), slot("from", "global", required=True), HINT_SLOT),
    (2, 3),
    90,
    BULK_SECTION,
)
EMPTY_FORMS = (BULK_COMMIT_FORM, PREFETCH_FORM, PREFETCH_TENSOR_FORM)
COPY_FORMS = (COPY_FORM, ARRIVE_FORM, COMMIT_FORM, WAIT_FORM, WAIT_ALL_FORM, BULK_FORM, BULK_WAIT_FORM, TENSOR_FORM, *EMPTY_FORMS)
COPY_SIZES = {"ca": (4, 8, 16), "cg": (16,)}  # sizes of a cp.async in bytes


def prepare_copy(statement: Statement, context: Context) -> Step:
    """Prepare every `cp.async`."""
    form, choices = match_form(statement, context, COPY_FORMS)
    if form in (WAIT_FORM, BULK_WAIT_FORM):
        groups = constant_operand(statement.operands[0], "the number of groups that may stay pending", form.section)
        if groups < 0:
            raise Unsupported(f"the number of groups that may stay pending must be 0 or more. {form.section}")
        return Step(lambda machine: pending.wait_group(machine, groups) if form is WAIT_FORM else machine)
    if form is WAIT_ALL_FORM:
        return Step(lambda machine: pending.wait_group(machine, None))
    if form is COMMIT_FORM:
        return Step(pending.commit_group)
    if form in EMPTY_FORMS:
        return Step(lambda machine: machine)
    if form is ARRIVE_FORM:
        return _prepare_arrival(statement, arrive if choices["noinc"] else arrive_after_copies, context.checked)
    if form is TENSOR_FORM:
        return prepare_tensor_copy(statement, choices, context)
    if form is BULK_FORM:
        return _prepare_bulk(statement, choices, context)
    return _prepare_small(statement, choices, context)


def _require_address(operand: Operand) -> Address:
    if not isinstance(operand, Address):
        raise Unsupported(f"an address must be in brackets. {COPY_SECTION}")
    return operand


def _prepare_arrival(statement: Statement, update: BarrierUpdate, checked: bool) -> Step:
    """Prepare `cp.async.mbarrier.arrive`: the thread arrives, because its copies have completed."""
    address = _require_address(statement.operands[0])

    def execute(machine: Machine) -> Machine:
        machine = pending.wait_group(machine, None)
        arrivals = Arrivals(machine.address(address), jnp.ones(machine.active.shape, jnp.int64))
        return update_barriers(machine, statement, update, arrivals, checked)[1]

    return Step(execute)


# ---- cp.async


def _prepare_small(statement: Statement, choices: Choices, context: Context) -> Step:
    """Prepare `cp.async` of 4, 8 or 16 bytes. Bytes beyond src-size, and all bytes under ignore-src, become zeros and are not read."""
    target, source = (_require_address(operand) for operand in statement.operands[:2])
    size = constant_operand(statement.operands[2], "cp-size", COPY_SECTION)
    sizes = COPY_SIZES[choices["cache"] or ""]
    if size not in sizes:
        raise Unsupported(f"cp-size is {size}; expected {' or '.join(map(str, sizes))}. {COPY_SECTION}")
    optional = statement.operands[3 : None if choices["hint"] is None else -1]
    if len(optional) > 1 or (choices["hint"] and len(statement.operands) < 4):
        raise Unsupported(f"the operands are [dst], [src], cp-size {{, src-size or ignore-src}} {{, cache-policy}}. {COPY_SECTION}")
    limit = optional[0] if optional else None
    ignores = isinstance(limit, Negated) or (isinstance(limit, Register) and context.function.registers.get(limit.name) == "pred")

    def execute(machine: Machine) -> Machine:
        count = _bytes_read(machine, limit, ignores, size)
        values, machine = _read_words(machine, machine.address(source), count, size, partial=limit is not None and not ignores)
        machine = machine.store("shared", machine.address(target), "b32", values)
        if pending.COPY_KEY not in machine.extra:
            return machine
        places, valid, machine = machine.locate("shared", machine.address(target), size)
        return replace(pending.record_copies(machine.restrict_active(valid), places.first_word, size // 4), active=machine.active)

    return Step(execute)


def _bytes_read(machine: Machine, limit: Operand | None, ignores: bool, size: int) -> Array:
    """Return the number of bytes that each thread reads, int64[blocks, threads]."""
    if limit is None:
        return jnp.full(machine.active.shape, size, jnp.int64)
    if ignores:
        return jnp.where(machine.read(limit, "pred"), 0, size)
    return jnp.minimum(machine.read(limit, "u32").astype(jnp.int64), size)


def _read_words(machine: Machine, address: Array, count: Array, size: int, *, partial: bool) -> tuple[tuple[Array, ...], Machine]:
    """Read the words of a copy, zeros beyond `count` bytes; partial: `count` may be any number of bytes."""
    active, words = machine.active, size // 4

    def read_bytes(machine: Machine) -> tuple[tuple[Array, ...], Machine]:
        values = [jnp.zeros(active.shape, jnp.uint32) for _ in range(words)]
        for i in range(size):
            lanes = replace(machine, active=active & (i < count) & (count < size))
            (byte,), lanes = lanes.load("global", address + np.uint64(i), "b8")
            values[i // 4] |= byte << np.uint32(i % 4 * 8)
            machine = replace(lanes, active=active)
        return tuple(values), machine

    def read_nothing(machine: Machine) -> tuple[tuple[Array, ...], Machine]:
        return tuple(jnp.zeros(active.shape, jnp.uint32) for _ in range(words)), machine

    values, machine = replace(machine, active=active & (count == size)).load("global", address, "b32", words)
    machine = replace(machine, active=active)
    if not partial:
        return values, machine
    partial_values, machine = lax.cond((active & (count > 0) & (count < size)).any(), read_bytes, read_nothing, machine)
    return tuple(value | other for value, other in zip(values, partial_values, strict=True)), machine


# ---- bulk copies: the issuing threads of a block one after the other, and lanes that move units

CopyValues = dict[str, Array]  # values of the issuing threads by name


def issue_copies(machine: Machine, values: CopyValues, body: Callable[[Machine, CopyValues], Machine]) -> Machine:
    """Apply `body` for each active thread, in the order of their numbers, one thread of every block at a time.

    Args:
        machine: The machine.
        values: Values of the threads, [blocks, threads, ...].
        body: Function of the machine and the values of the issuing threads, [blocks, ...], among them "live": the block has an issuing
            thread in this iteration. It may change only the memory.

    Returns:
        The machine.
    """
    order = jnp.argsort(~machine.active, axis=1, stable=True)
    iterations = machine.active.sum(axis=1)

    def issue(state: tuple[Array, Any]) -> tuple[Array, Any]:
        iteration, memories = state
        thread = order[:, iteration]
        copy = jax.tree.map(lambda x: x[jnp.arange(thread.shape[0]), thread], values)
        return iteration + 1, _memories(body(_replace_memories(machine, memories), copy | {"live": iteration < iterations}))

    start = jnp.zeros((), iterations.dtype), _memories(machine)
    return _replace_memories(machine, lax.while_loop(lambda state: state[0] < iterations.max(), issue, start)[1])


def carry_units(machine: Machine, units: Array, body: Callable[[Machine, Array, Array], Machine]) -> Machine:
    """Apply `body` to the units of 16 bytes of each block's copy.

    Args:
        machine: The machine.
        units: Number of units of each block's copy, int64[blocks].
        body: Function of the machine, the indices of units int64[1, lanes], and bool[blocks, lanes], the units that a block has. It may
            change only the memory.

    Returns:
        The machine.
    """

    def carry(state: tuple[Array, Any]) -> tuple[Array, Any]:
        first, memories = state
        unit = first + jnp.arange(COPY_LANES)[None]
        return first + COPY_LANES, _memories(body(_replace_memories(machine, memories), unit, unit < units[:, None]))

    start = jnp.zeros((), jnp.int64), _memories(machine)
    return _replace_memories(machine, lax.while_loop(lambda state: state[0] < units.max(), carry, start)[1])


def _memories(machine: Machine) -> tuple[Array, Array]:
    return machine.memory, machine.shared


def _replace_memories(machine: Machine, memories: tuple[Array, Array]) -> Machine:
    return replace(machine, memory=memories[0], shared=memories[1])


def copy_units(machine: Machine, spaces: tuple[str, str], source: Array, target: Array, active: Array) -> Machine:
    """Copy 16 bytes for each active lane from `source` to `target`, uint64[blocks, lanes], in the spaces of source and target.

    The addresses must be valid, see `check_ranges`.
    """
    values = load_units(machine, spaces[0], source)
    return store_units(machine, spaces[1], values, target, active)


def load_units(machine: Machine, space: str, source: Array) -> list[Array]:
    """Return the four words of each lane at `source`, uint64[blocks, lanes]."""
    return gather_words(*_unit_words(machine, space, source), UNIT_WORDS)


def store_units(machine: Machine, space: str, values: list[Array], target: Array, active: Array) -> Machine:
    """Store the four words of each active lane at `target`, uint64[blocks, lanes]."""
    words, index = _unit_words(machine, space, target)
    for i, value in enumerate(values):
        words = scatter_words(words, index + np.int32(i), value, active)
    return machine.with_words(space, words)


def each_destination(machine: Machine, mask: Array | None) -> Iterator[tuple[Array | None, Array | None]]:
    """Yield the ranks that a copy goes to, and whether each of its blocks' copies goes there.

    Args:
        machine: The machine.
        mask: The masks of a multicast copy, uint32 of any shape; None: the copy goes to the block of its address alone.
    """
    if mask is None:
        yield None, None
        return
    for rank in range(machine.cluster_size):
        yield jnp.full(mask.shape, rank, jnp.uint32), (mask >> np.uint32(rank)) & np.uint32(1) != 0


def _unit_words(machine: Machine, space: str, address: Array) -> tuple[Array, Array]:
    """Return the words of a space, and the indices of the words at addresses uint64[blocks, lanes]."""
    if space == "global":
        return machine.words(space), locate_in_rooms(machine.rooms, address, UNIT_BYTES).first_word
    return machine.words(space), shared_word_indices(machine, address)


def shared_word_indices(machine: Machine, address: Array) -> Array:
    """Return the indices, in the shared memory of all blocks, of the words at addresses uint64[blocks, lanes]."""
    return machine.locate_shared(address, UNIT_BYTES).first_word


def check_ranges(machine: Machine, space: str, address: Array, size: Array, unit: int = UNIT_BYTES) -> tuple[Array, Machine]:
    """Check that ranges of `size` bytes, multiples of `unit`, are within memory and aligned to units.

    Returns:
        The threads whose ranges are valid, and the machine with the faults of the others noted.
    """
    _, first_valid, machine = machine.locate(space, address, unit)
    last = address + jnp.maximum(size, unit).astype(jnp.uint64) - np.uint64(unit)
    _, last_valid, machine = machine.locate(space, last, unit)
    return first_valid & last_valid, machine


def _prepare_bulk(statement: Statement, choices: Choices, context: Context) -> Step:
    """Prepare `cp.async.bulk` between global and shared memory, or between the shared memory of blocks of a cluster."""
    to_global = goes_to_global(choices, BULK_SECTION)
    if choices["mask"]:
        raise Unsupported(f".cp_mask is not supported; a copy of all bytes of its units of 16 bytes is. {BULK_SECTION}")
    if choices["multicast"] and (to_global or choices["from"] != "global"):
        raise Unsupported(f".multicast::cluster needs .shared::cluster.global. {BULK_SECTION}")
    count = 3 + (not to_global) + (choices["multicast"] is not None) + (choices["hint"] is not None)
    if len(statement.operands) != count:
        raise Unsupported(f"it has {len(statement.operands)} operands; expected {count}. {BULK_SECTION}")
    target, source = (_require_address(operand) for operand in statement.operands[:2])
    barrier = None if to_global else _require_address(statement.operands[3])
    mask = statement.operands[4] if choices["multicast"] else None
    from_space, to_space = ("global" if choices[name] == "global" else "shared::cluster" for name in ("from", "to"))
    bad_size = Message(f"the size must be a multiple of {UNIT_BYTES} bytes. {BULK_SECTION}", Misaligned)

    def execute(machine: Machine) -> Machine:
        active = machine.active
        size = machine.read(statement.operands[2], "u32").astype(jnp.int64)
        machine = note_fault(machine, size % UNIT_BYTES != 0, bad_size, statement)
        machine = replace(machine, active=active & (size % UNIT_BYTES == 0) & (size > 0))
        values = {"units": size // UNIT_BYTES}
        for name, space, address in (("source", from_space, source), ("target", to_space, target)):
            values[name] = machine.address(address)
            valid, machine = check_ranges(machine, space, values[name], size)
            machine = replace(machine, active=valid)
        if mask is not None:
            values["mask"], machine = read_multicast_mask(machine, statement, mask, BULK_SECTION)
        machine = issue_copies(machine, values, partial(_copy_ranges, spaces=(from_space, to_space)))
        if barrier is not None:
            machine = _complete_copies(machine, statement, machine.address(barrier), size, values.get("mask"), context.checked)
        return replace(machine, active=active)

    return Step(execute)


def read_multicast_mask(machine: Machine, statement: Statement, operand: Operand, section: str) -> tuple[Array, Machine]:
    """Read the masks of multicast copies, uint32[blocks, threads]. A bit of a rank that the cluster does not have is a fault."""
    mask = machine.read(operand, "b16").astype(jnp.uint32)
    beyond = mask >> np.uint32(machine.cluster_size) != 0
    message = f"the multicast mask names a block that the cluster does not have. {section}"
    machine = note_fault(machine, beyond, Message(message, OutOfBounds), statement)
    return mask, machine.restrict_active(~beyond)


def _complete_copies(machine: Machine, statement: Statement, barrier: Array, size: Array, mask: Array | None, checked: bool) -> Machine:
    """Complete the bytes of copies at their barrier; those of a multicast copy at the barrier of the same offset in each destination."""
    active = machine.active
    for rank, goes in each_destination(machine, mask):
        address = barrier if rank is None else replace_rank(barrier, rank)
        machine = machine if goes is None else replace(machine, active=active & goes)
        machine = update_barriers(machine, statement, complete_bytes, Arrivals(address, size), checked)[1]
    return replace(machine, active=active)


def _copy_ranges(machine: Machine, copy: CopyValues, *, spaces: tuple[str, str]) -> Machine:
    """Make one copy for each block that has one."""

    def copy_range(machine: Machine, unit: Array, present: Array) -> Machine:
        offset = unit.astype(jnp.uint64) * np.uint64(UNIT_BYTES)
        source, target = copy["source"][:, None] + offset, copy["target"][:, None] + offset
        mask = copy["mask"][:, None] if "mask" in copy else None
        for rank, goes in each_destination(machine, mask):
            address = target if rank is None else replace_rank(target, rank)
            machine = copy_units(machine, spaces, source, address, present if goes is None else present & goes)
        return machine

    return carry_units(machine, jnp.where(copy["live"], copy["units"], 0), copy_range)


# ---- tensor copies


class TensorBox(NamedTuple):
    """The fields of tensor maps, with leading axes of blocks, or blocks and threads."""

    start: Array  # address of the tensor, uint64
    rank: Array  # int64
    bits: Array  # size of an element in bits, int64
    swizzle: Array  # mask of the bits of an address from bit 7 on that are added to lower ones, int64
    swizzle_shift: Array  # lowest bit that they are added to, int64
    dims: Array  # sizes of the tensor, int64[..., 5]
    strides: Array  # strides of the tensor in bytes, int64[..., 5]; that of the elements, the first, is not used
    boxes: Array  # elements of the box, int64[..., 5]
    steps: Array  # steps of the box in elements, int64[..., 5]

    @property
    def units(self) -> Array:
        """16-byte units of the box."""
        return jnp.prod(self.boxes, axis=-1) * self.bits // (8 * UNIT_BYTES)


def decode_tensor_map(words: Array) -> TensorBox:
    """Decode the words of tensor maps, uint32[..., 32]."""
    field = lambda name: words[..., maps.KIND_WORD] >> np.uint32(maps.FIELD_SHIFTS[name]) & np.uint32(0xFF)
    rank = field("rank").astype(jnp.int64)
    absent = jnp.arange(maps.MAX_RANK) >= rank[..., None]
    five = lambda at: jnp.where(absent, 1, words[..., at : at + maps.MAX_RANK].astype(jnp.int64))
    wide = lambda at: words[..., at].astype(jnp.uint64) | words[..., at + 1].astype(jnp.uint64) << np.uint64(32)
    strides = jnp.stack([rank, *(wide(maps.STRIDE_WORDS + 2 * axis).astype(jnp.int64) for axis in range(maps.MAX_RANK - 1))], axis=-1)
    steps = jnp.where(jnp.arange(maps.MAX_RANK) == 0, 1, jnp.maximum(five(maps.ELEMENT_STRIDE_WORDS), 1))
    mode, atom = field("swizzle_mode"), field("swizzle_atomicity")
    sizes = np.array([maps.BITS.get(name or "", 8) for name in maps.ELEMENT_TYPES], np.int64)
    doublings = jnp.asarray([0 if size is None else size.bit_length() - 5 for size in maps.ATOMS], jnp.int64)[atom & 3]
    return TensorBox(
        start=wide(maps.ADDRESS_WORD),
        rank=rank,
        bits=jnp.asarray(sizes)[field("elemtype") & 0xF],
        swizzle=((np.int64(1) << (mode & 3).astype(jnp.int64)) - 1) >> doublings,
        swizzle_shift=4 + doublings,
        dims=five(maps.DIMENSION_WORDS),
        strides=jnp.where(absent, 0, strides),
        boxes=-(-five(maps.BOX_WORDS) // steps),
        steps=steps,
    )


def goes_to_global(choices: Choices, section: str) -> bool:
    """Return True for a bulk copy to global memory. Raises Unsupported if the spaces and the completion do not match."""
    to_global = choices["to"] == "global"
    if to_global and choices["from"] == "global":
        raise Unsupported(f"it copies from global to global memory; one side must be shared memory. {section}")
    if to_global != (choices["completion"] == "bulk_group"):
        expected = "bulk_group" if to_global else "mbarrier::complete_tx::bytes"
        raise Unsupported(f"expected .{expected} with .{choices['to']}. {section}")
    return to_global


def prepare_tensor_copy(statement: Statement, choices: Choices, context: Context) -> Step:
    """Prepare `cp.async.bulk.tensor`.

    Its operands are [dst], [map, {coordinates}], [mbar] {, mask} {, policy} or [map, {coordinates}], [src] {, policy}.
    """
    to_global = goes_to_global(choices, TENSOR_SECTION)
    if to_global and (choices["multicast"] or choices["group"]):
        raise Unsupported(f".multicast::cluster and .cta_group belong to copies to shared memory. {TENSOR_SECTION}")
    if choices["group"] and not resolve_target(context.target).startswith(("sm_10", "sm_11")):
        raise Unsupported(
            f".{choices['group']} needs sm_100a or a later target of its family; the target is {context.target}. {TENSOR_SECTION}"
        )
    operands = list(statement.operands[: -1 if choices["hint"] else None])
    mask = operands.pop() if choices["multicast"] else None
    tensor = operands.pop(0 if to_global else 1)
    rank = int((choices["dim"] or "1d")[0])
    coordinates = tensor.coordinates if isinstance(tensor, Address) else None
    if not all(isinstance(operand, Address) for operand in operands) or len(operands) != 2 - to_global:
        form = (
            "[map, {coordinates}], [src]" if to_global else f"[dst], [map, {{coordinates}}], [mbar]{', mask' if mask is not None else ''}"
        )
        raise Unsupported(f"the operands are {form}. {TENSOR_SECTION}")
    if coordinates is None or len(coordinates.elements) != rank:
        raise Unsupported(f"expected {rank} coordinates with the tensor map. {TENSOR_SECTION}")
    assert isinstance(tensor, Address)
    addresses = [address for address in operands if isinstance(address, Address)]
    return _prepare_box_copy(statement, tensor, addresses, mask, context)


def _prepare_box_copy(statement: Statement, tensor: Address, addresses: list[Address], mask: Operand | None, context: Context) -> Step:
    """Prepare the copy of a box to shared memory (addresses of box and barrier) or from shared memory (address of the box)."""
    to_shared = len(addresses) == 2
    vector = tensor.coordinates or Vector(())

    def execute(machine: Machine) -> Machine:
        active = machine.active
        boxes, machine = _read_boxes(machine, statement, tensor, len(vector.elements))
        address = machine.address(addresses[0])
        machine = _check_boxes(machine, statement, address, boxes)
        coordinates = [machine.read(x, "s32").astype(jnp.int32).astype(jnp.int64) for x in vector.elements]
        coordinates += [jnp.zeros(active.shape, jnp.int64)] * (maps.MAX_RANK - len(coordinates))
        values = boxes._asdict() | {"address": address, "coordinates": jnp.stack(coordinates, axis=-1)}
        machine = _check_tensors(machine, statement, boxes, values["coordinates"])
        if mask is not None:
            values["mask"], machine = read_multicast_mask(machine, statement, mask, TENSOR_SECTION)
        machine = issue_copies(machine, values, _load_boxes if to_shared else _store_boxes)
        if to_shared:
            size = boxes.units * UNIT_BYTES
            machine = _complete_copies(machine, statement, machine.address(addresses[1]), size, values.get("mask"), context.checked)
        return replace(machine, active=active)

    return Step(execute)


def _read_boxes(machine: Machine, statement: Statement, tensor: Address, rank: int) -> tuple[TensorBox, Machine]:
    """Read the tensor maps of the threads. Returns them, and the machine with the threads active whose maps are valid."""
    words, machine = machine.load("", machine.address(replace(tensor, coordinates=None)), "b32", maps.MAP_BYTES // 4, maps.ALIGNMENT)
    missing = f"there is no tensor map of tcemu.ptx.TensorMap at the address. {TENSOR_SECTION}"
    machine = note_undefined(machine, words[0] != maps.MAGIC, missing, statement, machine.address(tensor))
    boxes = decode_tensor_map(jnp.stack(words, axis=-1))
    wrong_rank = f"the tensor map has another rank. {TENSOR_SECTION}"
    machine = note_undefined(machine, (words[0] == maps.MAGIC) & (boxes.rank != rank), wrong_rank, statement, machine.address(tensor))
    return boxes, machine.restrict_active((words[0] == maps.MAGIC) & (boxes.rank == rank))


def _check_tensors(machine: Machine, statement: Statement, boxes: TensorBox, coordinates: Array) -> Machine:
    """Return the machine with the threads active whose boxes, where they lie in the tensor, lie in global memory.

    `TensorMap` checks its own tensor; `tensormap.replace` may write any address, size and stride.
    """
    beyond = boxes.dims - 1 - coordinates
    last = coordinates + jnp.minimum(boxes.boxes - 1, beyond // boxes.steps) * boxes.steps
    empty = ((beyond < 0) | (last < 0)).any(-1)
    rows = (last * boxes.strides)[..., 1:].sum(-1)
    end = boxes.start + (rows + ((last[..., 0] + 1) * boxes.bits + 7) // 8 - 1).astype(jnp.uint64)
    inside = locate_in_rooms(machine.rooms, boxes.start, 1).good & locate_in_rooms(machine.rooms, end, 1).good
    inside &= boxes.start >> np.uint64(ROOM_BITS) == end >> np.uint64(ROOM_BITS)
    message = Message(f"the box of the tensor lies outside global memory. {TENSOR_SECTION}", OutOfBounds)
    machine = note_fault(machine, ~(inside | empty), message, statement, end)
    return machine.restrict_active(inside | empty)


def _check_boxes(machine: Machine, statement: Statement, address: Array, boxes: TensorBox) -> Machine:
    """Return the machine with the threads active whose boxes are aligned and within shared memory."""
    misaligned = f"the box in shared memory must lie at a multiple of {BOX_ALIGNMENT} bytes. {TENSOR_SECTION}"
    aligned = address % BOX_ALIGNMENT == 0
    machine = note_fault(machine, ~aligned, Message(misaligned, Misaligned, "shared"), statement, address)
    last = address + (boxes.units * UNIT_BYTES - UNIT_BYTES).astype(jnp.uint64)
    fits = machine.locate_shared(address, UNIT_BYTES).good & machine.locate_shared(last, UNIT_BYTES).good
    too_large = f"the box does not fit the block's shared memory. {TENSOR_SECTION}"
    machine = note_fault(machine, ~fits, Message(too_large, OutOfBounds, "shared"), statement, address)
    return machine.restrict_active(aligned & fits)


class UnitPlaces(NamedTuple):
    """Places of the units of a copy."""

    shared: Array  # address in shared memory, uint64[blocks, lanes]
    first: Array  # first word in global memory, int32[blocks, lanes]
    shift: Array  # first bit within that word, uint32[blocks, lanes]
    within: Array  # bytes that lie in the tensor, bool[blocks, lanes, 16]


def _locate_units(machine: Machine, copy: CopyValues, unit: Array, present: Array) -> UnitPlaces:
    """Locate units of each block's box."""
    box = TensorBox(**{name: copy[name] for name in TensorBox._fields})
    bits = box.bits[:, None]
    units_per_row = box.boxes[:, :1] * bits // (8 * UNIT_BYTES)
    column, rest = unit % units_per_row, unit // units_per_row
    first = copy["coordinates"][:, 0, None] + column * (8 * UNIT_BYTES // bits)
    offset = first * bits // 8  # from the beginning of the tensor in bytes; negative before it
    inside = present
    for axis in range(1, maps.MAX_RANK):
        count = box.boxes[:, axis, None]
        coordinate = copy["coordinates"][:, axis, None] + rest % count * box.steps[:, axis, None]
        rest = rest // count
        inside &= (coordinate >= 0) & (coordinate < box.dims[:, axis, None])
        offset += coordinate * box.strides[:, axis, None]
    element = first[..., None] + jnp.arange(UNIT_BYTES) * 8 // bits[..., None]
    within = inside[..., None] & (element >= 0) & (element < box.dims[:, :1, None])
    address = copy["address"][:, None].astype(jnp.int64) + unit * UNIT_BYTES
    address ^= (address >> SWIZZLE_SHIFT & box.swizzle[:, None]) << box.swizzle_shift[:, None]
    start = locate_in_rooms(machine.rooms, box.start[:, None], UNIT_BYTES).first_word
    return UnitPlaces(
        shared=address.astype(jnp.uint64),
        first=start + (offset >> 2).astype(jnp.int32),
        shift=(offset & 3).astype(jnp.uint32) * np.uint32(8),
        within=within,
    )


def _byte_masks(within: Array) -> list[Array]:
    """Convert bytes bool[..., 16] into masks of the four words."""
    masks = jnp.where(within.reshape(*within.shape[:-1], UNIT_WORDS, 4), np.uint32(0xFF), np.uint32(0)) << (
        8 * np.arange(4, dtype=np.uint32)
    )
    words = masks[..., 0] | masks[..., 1] | masks[..., 2] | masks[..., 3]
    return [words[..., i] for i in range(UNIT_WORDS)]


def _shift_words(words: list[Array], shift: Array) -> list[Array]:
    """Return the 32 bits from bit `shift` on, 0 to 31, of each pair of neighbouring words: one word fewer."""
    up = np.uint32(31) - shift
    return [low >> shift | (high << np.uint32(1)) << up for low, high in pairwise(words)]


def _load_boxes(machine: Machine, copy: CopyValues) -> Machine:
    """Copy a box from global to shared memory, for each block that has a copy."""

    def load(machine: Machine, unit: Array, present: Array) -> Machine:
        places = _locate_units(machine, copy, unit, present)
        values = _shift_words(gather_words(machine.memory, places.first, UNIT_WORDS + 1), places.shift)
        values = [value & mask for value, mask in zip(values, _byte_masks(places.within), strict=True)]
        for rank, goes in each_destination(machine, copy["mask"][:, None] if "mask" in copy else None):
            address = places.shared if rank is None else replace_rank(places.shared, rank)
            machine = store_units(machine, "shared", values, address, present if goes is None else present & goes)
        return machine

    return carry_units(machine, _unit_counts(copy), load)


def _store_boxes(machine: Machine, copy: CopyValues) -> Machine:
    """Copy a box from shared to global memory, for each block that has a copy.

    Neighbouring units share a word, which is the last word of one and the first of the other. Each index of a word is stored separately, so
    both parts are kept.
    """

    def store(machine: Machine, unit: Array, present: Array) -> Machine:
        places = _locate_units(machine, copy, unit, present)
        shift = places.shift
        zero = jnp.zeros(shift.shape, jnp.uint32)
        back = (np.uint32(32) - shift) & np.uint32(31)
        operands = gather_words(*_unit_words(machine, "shared", places.shared), UNIT_WORDS), _byte_masks(places.within)
        shifted = [_shift_words([zero, *words, zero], back) for words in operands]
        memory = machine.memory
        for i in range(UNIT_WORDS + 1):
            aligned = [words[i] if i < UNIT_WORDS else zero for words in operands]
            value, mask = (jnp.where(shift == 0, x, words[i]) for x, words in zip(aligned, shifted, strict=True))
            index = places.first + np.int32(i)
            memory = scatter_words(memory, index, gather_words(memory, index, 1)[0] & ~mask | value & mask, mask != 0)
        return replace(machine, memory=memory)

    return carry_units(machine, _unit_counts(copy), store)


def _unit_counts(copy: CopyValues) -> Array:
    """Return the number of units that each block copies in this iteration."""
    return jnp.where(copy["live"], jnp.prod(copy["boxes"], axis=-1) * copy["bits"] // (8 * UNIT_BYTES), 0)


PREPARE: dict[str, Prepare] = {"cp": prepare_copy}
