"""`cp.async.bulk.tensor`: boxes of tensors between global and shared memory, by tensor maps, in tile mode, as TMA copies them.

The box lies in shared memory row after row, innermost dimension first, and its 16-byte units are swizzled by their addresses. What is
outside the tensor arrives as zeros, and is not stored. Source: PTX ISA 5.5, 9.7.9.25.5.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.errors import Unsupported
from tcemu.ptx import tensor_maps as maps
from tcemu.ptx.context import Context, Step
from tcemu.ptx.faults import Message, Misaligned, OutOfBounds
from tcemu.ptx.memory import SHARED_ROOM, gather, in_rooms, scatter, window
from tcemu.ptx.module import Address, Statement, Vector
from tcemu.ptx.tensor.barriers import Arrivals, brought, changed
from tcemu.ptx.tensor.issuers import UNIT, Values, carried, issued, shared_words
from tcemu.ptx.tensor.statements import fault, undefined
from tcemu.ptx.tensor.variants import Choices, Form, slot
from tcemu.shared_memory import swizzle

if TYPE_CHECKING:
    from tcemu.ptx.machine import Machine

SECTION = "PTX ISA 9.7.9.25.5"
BOX_ALIGNMENT = 128  # of the box in shared memory
DIMS = slot("dim", "1d 2d 3d 4d 5d", needed=True)
TILES = "boxes of tile mode are"
APART = {
    "multicast::cluster": "there are no clusters of more than one block; a launch of clusters of 1 needs no multicast",
    **{
        mode: f"{mode} is not; {TILES}"
        for mode in ("im2col", "im2col_no_offs", "im2col::w", "im2col::w::128", "tile::gather4", "tile::scatter4")
    },
}
TENSOR = Form(
    "cp.async.bulk.tensor",
    (
        DIMS,
        slot("to", "shared::cluster shared::cta global", needed=True),
        slot("from", "global shared::cta", needed=True),
        slot("mode", "tile"),
        slot("completion", "mbarrier::complete_tx::bytes bulk_group", needed=True),
        slot("group", "cta_group::1"),
        slot("hint", "L2::cache_hint"),
    ),
    (2, 3, 4),
    90,
    SECTION,
    APART,
)
PREFETCH_TENSOR = Form(
    "cp.async.bulk.prefetch.tensor",
    (DIMS, slot("level", "L2", needed=True), slot("from", "global", needed=True), slot("mode", "tile"), slot("hint", "L2::cache_hint")),
    (1, 2),
    90,
    SECTION,
    APART,
)


class Box(NamedTuple):
    """What a tensor map says, with the blocks (or blocks and threads) in front.

    start: uint64; rank, size, and width, of the swizzle in units: int64; dims, boxes, steps: int64[..., 5]; strides: uint64[..., 5], in
    bytes, that of the elements first.
    """

    start: Array
    rank: Array
    size: Array
    width: Array
    dims: Array
    strides: Array
    boxes: Array
    steps: Array

    @property
    def units(self) -> Array:
        """16-byte units of the box."""
        return jnp.prod(self.boxes, axis=-1) * self.size // UNIT


def box_of(words: Array) -> Box:
    """A tensor map's words, uint32[..., 32]."""
    five = lambda at: words[..., at : at + maps.RANKS].astype(jnp.int64)  # noqa: E731
    wide = lambda at: words[..., at].astype(jnp.uint64) | words[..., at + 1].astype(jnp.uint64) << np.uint64(32)  # noqa: E731
    size = (words[..., maps.KIND] >> 8 & 0xFF).astype(jnp.int64)
    strides = jnp.stack([size.astype(jnp.uint64), *(wide(maps.STRIDES + 2 * axis) for axis in range(maps.RANKS - 1))], axis=-1)
    return Box(
        start=wide(maps.ADDRESS),
        rank=(words[..., maps.KIND] & 0xFF).astype(jnp.int64),
        size=size,
        width=jnp.maximum((words[..., maps.KIND] >> 16).astype(jnp.int64) // UNIT, 1),
        dims=five(maps.DIMENSIONS),
        strides=strides,
        boxes=five(maps.BOXES),
        steps=five(maps.ELEMENT_STRIDES),
    )


def goes_to_global(choices: Choices, section: str) -> bool:
    """Whether a bulk copy leads to global memory. Raises Unsupported if its two spaces or its completion do not go together."""
    to_global = choices["to"] == "global"
    if to_global and choices["from"] == "global":
        raise Unsupported(f"it copies from global to global memory; one side must be shared memory. {section}")
    if to_global != (choices["completion"] == "bulk_group"):
        wanted = "bulk_group" if to_global else "mbarrier::complete_tx::bytes"
        raise Unsupported(f"wanted .{wanted} with .{choices['to']}. {section}")
    return to_global


def prepare_tensor_copy(statement: Statement, choices: Choices, context: Context) -> Step:
    """`cp.async.bulk.tensor` with its operands [dst], [map, {coordinates}], [mbar] or [map, {coordinates}], [src]."""
    to_global = goes_to_global(choices, SECTION)
    operands = list(statement.operands[: -1 if choices["hint"] else None])
    tensor = operands.pop(0 if to_global else 1)
    rank = int((choices["dim"] or "1d")[0])
    coordinates = tensor.coordinates if isinstance(tensor, Address) else None
    if not all(isinstance(operand, Address) for operand in operands) or len(operands) != 2 - to_global:
        form = "[map, {coordinates}], [src]" if to_global else "[dst], [map, {coordinates}], [mbar]"
        raise Unsupported(f"the operands are {form}. {SECTION}")
    if coordinates is None or len(coordinates.elements) != rank:
        raise Unsupported(f"wanted {rank} coordinates beside the tensor map. {SECTION}")
    assert isinstance(tensor, Address)
    return _prepare(statement, tensor, [place for place in operands if isinstance(place, Address)], context)


def _prepare(statement: Statement, tensor: Address, places: list[Address], context: Context) -> Step:
    place, to_shared = places[0], len(places) == 2
    vector = tensor.coordinates or Vector(())

    def run(machine: Machine) -> Machine:
        active = machine.active
        boxes, machine = _boxes(machine, statement, tensor, len(vector.elements))
        at, machine = _inside(machine, statement, machine.address(place), boxes)
        coordinates = [machine.read(x, "s32").astype(jnp.int32).astype(jnp.int64) for x in vector.elements]
        coordinates += [jnp.zeros(active.shape, jnp.int64)] * (maps.RANKS - len(coordinates))
        values = boxes._asdict() | {"at": at, "coordinates": jnp.stack(coordinates, axis=-1)}
        machine = issued(machine, values, _loaded if to_shared else _stored)
        if to_shared:
            by = Arrivals(machine.address(places[1]), boxes.units * UNIT)
            machine = changed(machine, statement, brought, by, context.checked)[1]
        return replace(machine, active=active)

    return Step(run)


def _boxes(machine: Machine, statement: Statement, tensor: Address, rank: int) -> tuple[Box, Machine]:
    """What the tensor maps of the threads say, and the machine with those threads active whose maps are good."""
    words, machine = machine.load("", machine.address(replace(tensor, coordinates=None)), "b32", maps.BYTES // 4, maps.ALIGNMENT)
    none = f"there is no tensor map of tcemu.ptx.TensorMap at the address. {SECTION}"
    machine = undefined(machine, words[0] != maps.MAGIC, none, statement, machine.address(tensor))
    boxes = box_of(jnp.stack(words, axis=-1))
    other = f"the tensor map has another rank. {SECTION}"
    machine = undefined(machine, (words[0] == maps.MAGIC) & (boxes.rank != rank), other, statement, machine.address(tensor))
    return boxes, machine.within((words[0] == maps.MAGIC) & (boxes.rank == rank))


def _inside(machine: Machine, statement: Statement, at: Array, boxes: Box) -> tuple[Array, Machine]:
    """Where the boxes lie in shared memory, and the machine with those threads active whose boxes lie inside and are aligned."""
    start = np.uint64(window(SHARED_ROOM))
    at = jnp.where(at >= start, at - start, at)
    aligned = f"the box in shared memory must lie at a multiple of {BOX_ALIGNMENT} bytes. {SECTION}"
    good = at % BOX_ALIGNMENT == 0
    machine = fault(machine, ~good, Message(aligned, Misaligned, "shared"), statement, at)
    fits = at + (boxes.units * UNIT).astype(jnp.uint64) <= np.uint64(4 * machine.shared.shape[-1])
    beyond = f"the box does not fit the block's shared memory. {SECTION}"
    machine = fault(machine, ~fits, Message(beyond, OutOfBounds, "shared"), statement, at)
    return at, machine.within(good & fits)


class Carried(NamedTuple):
    """The units of a copy.

    shared: int32[blocks, lanes], the word of each in shared memory; first: int32[blocks, lanes], the word of global memory in which it
    begins, and shift: uint32, at which bit; within: bool[blocks, lanes, 16], which of its bytes lie in the tensor.
    """

    shared: Array
    first: Array
    shift: Array
    within: Array


def _carried(machine: Machine, mine: Values, unit: Array, there: Array) -> Carried:
    """Where units of each block's box lie."""
    box = Box(**{name: mine[name] for name in Box._fields})
    in_row = (box.boxes[:, 0] * box.size // UNIT)[:, None]
    along, rest = unit % in_row, unit // in_row
    size = box.size[:, None]
    first = mine["coordinates"][:, 0, None] + along * (UNIT // size)
    offset = first * size  # from the tensor's beginning, in bytes; below 0 left of it
    inside = there
    for axis in range(1, maps.RANKS):
        count = box.boxes[:, axis, None]
        place = mine["coordinates"][:, axis, None] + rest % count * box.steps[:, axis, None]
        rest = rest // count
        inside &= (place >= 0) & (place < box.dims[:, axis, None])
        offset += place * box.strides[:, axis, None].astype(jnp.int64)
    element = first[..., None] + jnp.arange(UNIT) // size[..., None]
    within = inside[..., None] & (element >= 0) & (element < box.dims[:, :1, None])
    at = swizzle(mine["at"][:, None].astype(jnp.int64) + unit * UNIT, box.width[:, None])
    start = in_rooms(machine.rooms, box.start[:, None], UNIT).at
    return Carried(
        shared=shared_words(machine, at.astype(jnp.uint64)),
        first=start + (offset >> 2).astype(jnp.int32),
        shift=(offset & 3).astype(jnp.uint32) * np.uint32(8),
        within=within,
    )


def _masks(within: Array) -> list[Array]:
    """The bytes bool[..., 16] as masks of the four words."""
    ones = jnp.where(within.reshape(*within.shape[:-1], UNIT // 4, 4), np.uint32(0xFF), np.uint32(0)) << (8 * np.arange(4, dtype=np.uint32))
    words = ones[..., 0] | ones[..., 1] | ones[..., 2] | ones[..., 3]
    return [words[..., at] for at in range(UNIT // 4)]


def _turned(words: list[Array], shift: Array) -> list[Array]:
    """One word fewer: the bits of neighbouring words from `shift` on, 0 to 31."""
    up = np.uint32(31) - shift
    return [low >> shift | (high << np.uint32(1)) << up for low, high in pairwise(words)]


def _loaded(machine: Machine, mine: Values) -> Machine:
    """A box from global memory into shared memory, for each block that has one."""

    def carry(machine: Machine, unit: Array, there: Array) -> Machine:
        where = _carried(machine, mine, unit, there)
        values = _turned(gather(machine.memory, where.first, UNIT // 4 + 1), where.shift)
        flat = machine.words("shared")
        for at, (value, mask) in enumerate(zip(values, _masks(where.within), strict=True)):
            flat = scatter(flat, where.shared + np.int32(at), value & mask, there)
        return machine.with_words("shared", flat)

    return carried(machine, _units(mine), carry)


def _stored(machine: Machine, mine: Values) -> Machine:
    """A box from shared memory into global memory, for each block that has one. Neighbouring units share a word: one
    has it as its last word, the other as its first, and these are written one after the other."""

    def carry(machine: Machine, unit: Array, there: Array) -> Machine:
        where = _carried(machine, mine, unit, there)
        first, shift = where.first, where.shift
        nothing = [jnp.zeros(shift.shape, jnp.uint32)]
        back = (np.uint32(32) - shift) & np.uint32(31)
        values, masks = gather(machine.words("shared"), where.shared, UNIT // 4), _masks(where.within)
        if_turned = lambda words: _turned(nothing + words + nothing, back)  # noqa: E731
        memory = machine.memory
        for at in range(UNIT // 4 + 1):
            straight = [words[at] if at < UNIT // 4 else nothing[0] for words in (values, masks)]
            value, mask = (jnp.where(shift == 0, x, if_turned(words)[at]) for x, words in zip(straight, (values, masks), strict=True))
            place = first + np.int32(at)
            memory = scatter(memory, place, gather(memory, place, 1)[0] & ~mask | value & mask, mask != 0)
        return replace(machine, memory=memory)

    return carried(machine, _units(mine), carry)


def _units(mine: Values) -> Array:
    """How many units each block copies in this turn."""
    return jnp.where(mine["live"], jnp.prod(mine["boxes"], axis=-1) * mine["size"] // UNIT, 0)
