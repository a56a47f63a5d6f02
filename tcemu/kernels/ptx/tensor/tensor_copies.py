"""Copies and reductions of tensors: `cp.async.bulk.tensor`, its prefetches, and `cp.reduce.async.bulk.tensor`.

A tensor map describes the tensor, and what one statement moves: in tile mode a box, with gather4 and scatter4 four rows of a matrix, in
im2col mode pixels of a bounding box with their channels. A box of an interleaved tensor has pixels of one slice of channels. What is moved
lies in shared memory row by row, innermost dimension first, in units of 16 bytes that are swizzled by their addresses. Elements outside the
tensor are read as zeros, and neither stored nor reduced. Copies are made when they are issued. Source: PTX ISA 5.5, 9.7.9.25.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base.errors import NotModelled, UndefinedBehaviour, Unsupported
from tcemu.engine.isa.statement_table import Choices
from tcemu.engine.layouts.shared_memory import SWIZZLE_SHIFT
from tcemu.kernels.ptx.instruction_interface import NO_EFFECT, Context, Prepare, Step
from tcemu.kernels.ptx.simt import tensor_maps as maps
from tcemu.kernels.ptx.simt.device_memory import ROOM_BITS, gather_words, join_words, locate_in_rooms, scatter_words
from tcemu.kernels.ptx.simt.faults import Message, Misaligned, OutOfBounds
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.simt.memory_access import Atomic, AtomicRequests, apply_atomic, element_atomic
from tcemu.kernels.ptx.tensor.async_copies import (
    UNIT_BYTES,
    UNIT_WORDS,
    CopyValues,
    carry_units,
    complete_copies,
    each_destination,
    issue_copies,
    prepare_copy,
    read_multicast_mask,
    store_units,
    unit_words,
)
from tcemu.kernels.ptx.tensor.statement_forms import InstructionForm, match_form, require, vector_elements
from tcemu.kernels.ptx.text.module import Address, Operand, Statement
from tcemu.kernels.ptx.text.ptx_types import KINDS

SECTION = "PTX ISA 9.7.9.25.5"
BOX_ALIGNMENT = 128  # alignment of what is copied, in shared memory in bytes
GATHERED_ROWS = 4  # of gather4 and scatter4
OPEN_MODES: dict[str, str] = dict.fromkeys(
    ("im2col::w", "im2col::w::128"), "where its halo elements lie in shared memory is in figures of the manual alone; im2col is supported"
)
COPY_FORM = InstructionForm("cp.async.bulk.tensor", ("{moved}{offsets}{multicast}{hint}",), OPEN_MODES)
PREFETCH_FORM = InstructionForm("cp.async.bulk.prefetch.tensor", ("[,]{offsets}{hint}",))
REDUCTION_FORM = InstructionForm("cp.reduce.async.bulk.tensor", ("[,] []{hint}",))
REDUCED_TYPES = {  # types of the tensors that each operation takes: 9.7.9.25.5.3
    "add": ("u32", "s32", "u64", "f32", "f16", "bf16"), "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"), "inc": ("u32",), "dec": ("u32",), "and": ("u32", "s32", "u64", "s64"),
    "or": ("u32", "s32", "u64", "s64"), "xor": ("u32", "s32", "u64", "s64"),
}  # fmt: skip


def prepare_any_copy(statement: Statement, context: Context) -> Step:
    """Prepare `cp.async` or `cp.reduce.async.bulk`, of tensors or of runs of bytes."""
    if "tensor" not in statement.qualifiers:
        return prepare_copy(statement, context)
    form, choices = match_form(statement, context, (COPY_FORM, PREFETCH_FORM, REDUCTION_FORM))
    if form is PREFETCH_FORM:
        return NO_EFFECT
    return _prepare_tensor_copy(statement, choices, context, form.section)


# ---- tensor maps


class TensorBox(NamedTuple):
    """The fields of tensor maps, with leading axes of blocks, or blocks and threads."""

    start: Array  # address of the tensor, uint64
    rank: Array  # int64
    element: Array  # number of the type of the elements, as in `tensormap.replace`, int64
    bits: Array  # size of an element in bits, int64; of an interleaved tensor, of a pixel
    unit_elements: Array  # elements of a unit of 16 bytes in shared memory, int64; 1 for pixels
    pixel_units: Array  # units of a pixel of an interleaved tensor, int64; 1 for other tensors
    is_interleaved: Array  # bool
    swizzle: Array  # mask of the bits of an address from bit 7 on that are added to lower ones, int64
    swizzle_shift: Array  # lowest bit that they are added to, int64
    flips: Array  # the halves of each unit change places in every second line of 128 bytes, bool
    dims: Array  # sizes of the tensor, int64[..., rank]
    strides: Array  # strides of the tensor in bytes, int64[..., rank]; that of the elements, the first, is not used
    boxes: Array  # elements of the box, int64[..., rank]; channels and pixels of an im2col map
    steps: Array  # steps of the box in elements, int64[..., rank]
    is_im2col: Array  # bool
    nan_fill: Array  # elements outside the tensor are NaN, bool
    lower: Array  # lower corner of the bounding box of an im2col map, int64[..., 3], width first
    upper: Array  # upper corner, from the tensor's end

    @property
    def units(self) -> Array:
        """16-byte units of the box."""
        return self.boxes.prod(axis=-1) // self.unit_elements * self.pixel_units


def decode_tensor_map(words: Array, axes: int) -> TensorBox:
    """Decode the words of tensor maps, uint32[..., 32], as maps of `axes` dimensions."""
    field = lambda name: words[..., maps.KIND_WORD] >> np.uint32(maps.FIELD_SHIFTS[name]) & np.uint32(0xFF)
    rank = (field("rank") & np.uint32(maps.IM2COL - 1)).astype(jnp.int64)
    is_im2col = field("rank") & np.uint32(maps.IM2COL) != 0
    each = lambda at: words[..., at : at + axes].astype(jnp.int64)
    wide = lambda at: join_words(words[..., at], words[..., at + 1])
    strides = jnp.stack([rank, *(wide(maps.STRIDE_WORDS + 2 * axis).astype(jnp.int64) for axis in range(axes - 1))], axis=-1)
    interleave = jnp.asarray(np.array(maps.INTERLEAVES, np.int64))[jnp.minimum(words[..., maps.INTERLEAVE_WORD], 2)]
    is_interleaved = interleave != 0
    is_first, is_slice = jnp.arange(axes) == 0, (jnp.arange(axes) == axes - 2) & is_interleaved[..., None]
    steps = jnp.where(is_first & ~is_interleaved[..., None], 1, jnp.maximum(each(maps.ELEMENT_STRIDE_WORDS), 1))
    mode, atom = field("swizzle_mode"), field("swizzle_atomicity")
    element = (field("elemtype") & np.uint32(0xF)).astype(jnp.int64)
    look_up = lambda values: jnp.asarray(np.array(values, np.int64))[element]
    bits = look_up([maps.BITS.get(name or "", 8) for name in maps.ELEMENT_TYPES])
    doublings = jnp.asarray([size.bit_length() - 5 for size in maps.ATOMS], jnp.int64)[atom & 3]
    boxes = jnp.where(is_slice, 1, each(maps.BOX_WORDS))
    unit_elements = jnp.where(look_up([name in maps.PADDED for name in maps.ELEMENT_TYPES]) == 1, 16, 8 * UNIT_BYTES // bits)
    corners = words[..., maps.CORNER_WORDS : maps.CORNER_WORDS + maps.MAX_RANK - 2].astype(jnp.int32)
    return TensorBox(
        start=wide(maps.ADDRESS_WORD),
        rank=rank,
        element=element,
        bits=jnp.where(is_interleaved, 8 * interleave, bits),
        unit_elements=jnp.where(is_interleaved, 1, unit_elements),
        pixel_units=jnp.maximum(interleave // UNIT_BYTES, 1),
        is_interleaved=is_interleaved,
        swizzle=((np.int64(1) << (mode & 3).astype(jnp.int64)) - 1) >> doublings,
        swizzle_shift=4 + doublings,
        flips=atom == maps.FLIPPING_ATOM,
        dims=each(maps.DIMENSION_WORDS),
        strides=strides,
        boxes=jnp.where(is_im2col[..., None], jnp.where(jnp.arange(axes) < 2, boxes, 1), -(-boxes // steps)),
        steps=steps,
        is_im2col=is_im2col,
        nan_fill=words[..., maps.FILL_WORD] != 0,
        lower=(corners << 16 >> 16).astype(jnp.int64),
        upper=(corners >> 16).astype(jnp.int64),
    )


# ---- statements


class _TensorOperands(NamedTuple):
    """The operands of a statement by name."""

    tensor: Address  # the tensor map
    coordinates: tuple[Operand, ...]
    address: Address  # in shared memory
    barrier: Address | None
    offsets: tuple[Operand, ...]  # of the filter, in im2col mode
    mask: Operand | None  # of a multicast copy


def _bind_operands(statement: Statement, choices: Choices, to_global: bool, section: str) -> _TensorOperands:
    """Bind the operands [dst], [map, {coordinates}], [mbar] {, {offsets}} {, mask} {, policy}, or [map, {coordinates}], [src] {, policy}.

    Raises:
        Unsupported: The statement has other operands.
    """
    mode, operands = choices["mode"] or "tile", list(statement.operands[: -1 if choices["hint"] else None])
    rank = int((choices["dim"] or "1d")[0])
    mask = operands.pop() if choices.get("multicast") else None
    offsets = operands.pop() if mode == "im2col" else None
    tensor = operands.pop(0 if to_global else 1) if len(operands) > 1 else None
    assert isinstance(tensor, Address)
    count = GATHERED_ROWS + 1 if mode in ("tile::gather4", "tile::scatter4") else rank
    if tensor.coordinates is None or len(tensor.coordinates.elements) != count:
        raise Unsupported(f"expected {count} coordinates with the tensor map. {section}")
    addresses = [operand for operand in operands if isinstance(operand, Address)]
    elements = () if offsets is None else tuple(vector_elements(offsets))
    return _TensorOperands(tensor, tensor.coordinates.elements, addresses[0], None if to_global else addresses[1], elements, mask)


def _prepare_tensor_copy(statement: Statement, choices: Choices, context: Context, section: str) -> Step:
    reduces = "operation" in choices
    to_global = choices["to"] == "global"
    bound = _bind_operands(statement, choices, to_global, section)
    mode, rank = choices["mode"] or "tile", int((choices["dim"] or "1d")[0])
    atomics = _element_operations(context, choices["operation"] or "") if reduces else {}
    kind = partial(_reduce_boxes, atomics=atomics) if reduces else _store_boxes if to_global else _load_boxes
    move = partial(_move_units, mode=mode, move=kind)

    def execute(machine: Machine) -> Machine:
        active = machine.active
        words, boxes, machine = _read_boxes(machine, bound.tensor, rank, mode, section)
        machine = _check_types(machine, boxes, to_global, tuple(atomics), section)
        address = machine.address(bound.address)
        machine = _check_boxes(machine, address, boxes, section)
        read = lambda operand, kind, dtype: machine.read(operand, kind).astype(dtype).astype(jnp.int64)
        numbers = [read(each, "s32", jnp.int32) for each in bound.coordinates]
        values = {"map": words, "address": address}  # few values, since each is gathered for the issuing threads
        if mode.startswith("tile::"):
            values["rows"], numbers = jnp.stack(numbers[1:], axis=-1), numbers[:1]
        if mode == "im2col":
            values["offsets"] = jnp.stack([read(each, "b16", jnp.uint16) for each in bound.offsets], axis=-1)
        numbers += [jnp.zeros(active.shape, jnp.int64)] * (rank - len(numbers))
        values["coordinates"] = jnp.stack(numbers, axis=-1)
        machine = _check_tensors(machine, boxes, values["coordinates"], mode, section)
        if bound.mask is not None:
            values["mask"], machine = read_multicast_mask(machine, bound.mask, section)
        machine = issue_copies(machine, values, move)
        if bound.barrier is not None:
            size = boxes.units * UNIT_BYTES
            machine = complete_copies(machine, machine.address(bound.barrier), size, values.get("mask"), context.checked)
        return replace(machine, active=active)

    return Step(execute)


def _element_operations(context: Context, operation: str) -> dict[int, Atomic]:
    names = {kind: f"b{kind[1:]}" if operation in ("and", "or", "xor") else kind for kind in REDUCED_TYPES[operation]}
    return {maps.TYPE_NUMBERS[kind]: element_atomic("global", operation, name, context) for kind, name in names.items()}


def _read_boxes(machine: Machine, tensor: Address, rank: int, mode: str, section: str) -> tuple[Array, TensorBox, Machine]:
    """Read the tensor maps of the threads. Returns their words and fields, and the machine with the threads active whose maps are valid."""
    place = machine.address(replace(tensor, coordinates=None))
    words, machine = _load_maps(machine, place)
    boxes, is_im2col, gathers = decode_tensor_map(words, rank), mode.startswith("im2col"), mode.startswith("tile::")
    conditions = [
        (words[..., 0] == maps.MAGIC, "there is no tensor map of tcemu.ptx.TensorMap at the address"),
        (boxes.rank == rank, "the tensor map has another rank"),
        (boxes.is_im2col == is_im2col, f"the tensor map is {'no' if is_im2col else 'an'} im2col map"),
    ]
    if rank < maps.LEAST_INTERLEAVED:
        conditions.append((~boxes.is_interleaved, f"an interleaved tensor has {maps.LEAST_INTERLEAVED} dimensions or more"))
    if gathers:
        conditions.append((boxes.boxes[..., 1] == 1, "the box must have one row"))
    for good, text in conditions:
        machine = require(machine, good, Message(f"{text}. {section}", UndefinedBehaviour), place)
    return words, _gather_rows(boxes) if gathers else boxes, machine


def _gather_rows(boxes: TensorBox) -> TensorBox:
    """Return the boxes of gather4 and scatter4: four rows in place of one."""
    return boxes._replace(boxes=boxes.boxes.at[..., 1].set(GATHERED_ROWS))


def _load_maps(machine: Machine, address: Array) -> tuple[Array, Machine]:
    """Load the words of the tensor maps at generic addresses, uint32[blocks, threads, 32]; addresses without a map give zeros."""
    count = maps.MAP_BYTES // 4
    parts, machine = machine.split_access("", address, maps.MAP_BYTES, maps.ALIGNMENT)
    words = jnp.zeros((*address.shape, count), jnp.uint32)
    for room, first, mask in parts:
        if room != "shared":  # where no tensor copy reads its map
            found = machine.words(room).at[first[..., None] + np.arange(count, dtype=np.int32)].get(mode="fill", fill_value=0)
            words = jnp.where(mask[..., None], found, words)
    return words, machine


def _check_types(machine: Machine, boxes: TensorBox, to_global: bool, reduced: tuple[int, ...], section: str) -> Machine:
    """Return the machine with the threads active whose elements the statement can move."""
    numbers = reduced if reduced else tuple(i for i, name in enumerate(maps.ELEMENT_TYPES) if not to_global or name not in maps.LOADED_ONLY)
    text = "the reduction does not take" if reduced else "a copy to global memory does not take"
    message = Message(f"{text} elements of the tensor's type. {section}", NotModelled if not reduced else Unsupported)
    machine = require(machine, jnp.isin(boxes.element, jnp.asarray(numbers, jnp.int64)), message)
    floats = jnp.asarray([maps.TYPE_NUMBERS[name] for name in maps.FLOATS], jnp.int64)
    message = Message(f"the map fills with NaN, and its type is no floating-point type. {section}", Unsupported)
    return require(machine, ~boxes.nan_fill | jnp.isin(boxes.element, floats), message)


def _check_tensors(machine: Machine, boxes: TensorBox, coordinates: Array, mode: str, section: str) -> Machine:
    """Return the machine with the threads active whose boxes, where they lie in the tensor, lie in global memory.

    `TensorMap` checks its own tensor; `tensormap.replace` may write any address, size and stride. Of a map for rows or pixels the whole
    tensor must lie there.
    """
    if mode == "tile":
        beyond = boxes.dims - 1 - coordinates
        last = coordinates + jnp.minimum(boxes.boxes - 1, beyond // boxes.steps) * boxes.steps
        empty = ((beyond < 0) | (last < 0)).any(-1)
    else:
        last, empty = boxes.dims - 1, (boxes.dims <= 0).any(-1)
    rows = (last * boxes.strides)[..., 1:].sum(-1)
    end = boxes.start + (rows + ((last[..., 0] + 1) * boxes.bits + 7) // 8 - 1).astype(jnp.uint64)
    inside = locate_in_rooms(machine.rooms, boxes.start, 1).good & locate_in_rooms(machine.rooms, end, 1).good
    inside &= boxes.start >> np.uint64(ROOM_BITS) == end >> np.uint64(ROOM_BITS)
    message = Message(f"the box of the tensor lies outside global memory. {section}", OutOfBounds)
    return require(machine, inside | empty, message, end)


def _check_boxes(machine: Machine, address: Array, boxes: TensorBox, section: str) -> Machine:
    """Return the machine with the threads active whose boxes are aligned and within shared memory."""
    misaligned = f"the box in shared memory must lie at a multiple of {BOX_ALIGNMENT} bytes. {section}"
    machine = require(machine, address % BOX_ALIGNMENT == 0, Message(misaligned, Misaligned, "shared"), address)
    last = address + (boxes.units * UNIT_BYTES - UNIT_BYTES).astype(jnp.uint64)
    fits = machine.locate_shared(address, UNIT_BYTES).good & machine.locate_shared(last, UNIT_BYTES).good
    too_large = f"the box does not fit the block's shared memory. {section}"
    return require(machine, fits, Message(too_large, OutOfBounds, "shared"), address)


# ---- the units of a copy


class UnitPlaces(NamedTuple):
    """Places of the units of a copy."""

    shared: Array  # address in shared memory, uint64[blocks, lanes]
    flipped: Array  # the halves of the unit change places, bool[blocks, lanes]
    first: Array  # first word in global memory, int32[blocks, lanes]
    shift: Array  # first bit within that word, uint32[blocks, lanes]
    within: Array  # bytes that lie in the tensor, bool[blocks, lanes, 16]


def _move_units(machine: Machine, copy: CopyValues, *, mode: str, move: Callable[..., Machine]) -> Machine:
    """Move the units of each block that has a copy. move: function of the machine, the copy, its box, places of units, and which exist."""
    box = decode_tensor_map(copy["map"], copy["coordinates"].shape[-1])
    box = _gather_rows(box) if mode.startswith("tile::") else box

    def move_some(machine: Machine, unit: Array, present: Array) -> Machine:
        return move(machine, copy, box, _locate_units(machine, copy, box, unit, present, mode), present)

    return carry_units(machine, jnp.where(copy["live"], box.units, 0), move_some)


def _locate_units(machine: Machine, copy: CopyValues, box: TensorBox, unit: Array, present: Array, mode: str) -> UnitPlaces:
    """Locate units of what each block moves."""
    bits, elements, parts = box.bits[:, None], box.unit_elements[:, None], box.pixel_units[:, None]
    units_per_row = box.boxes[:, :1] // elements * parts
    column, row = unit % units_per_row, unit // units_per_row
    first = copy["coordinates"][:, 0, None] + column // parts * elements * box.steps[:, :1]
    offset = first * bits // 8 + column % parts * UNIT_BYTES  # from the beginning of the tensor in bytes; negative before it
    inside = present
    for axis, coordinate in enumerate(_row_coordinates(box, copy, row, mode), 1):
        inside &= (coordinate >= 0) & (coordinate < box.dims[:, axis, None])
        offset += coordinate * box.strides[:, axis, None]
    byte = jnp.arange(UNIT_BYTES)
    element = first[..., None] + byte * 8 // bits[..., None]
    within = inside[..., None] & (element >= 0) & (element < box.dims[:, :1, None]) & (byte < (elements * bits // 8)[..., None])
    address = copy["address"][:, None].astype(jnp.int64) + unit * UNIT_BYTES
    flipped = box.flips[:, None] & (address >> SWIZZLE_SHIFT & 1 == 1)
    address ^= (address >> SWIZZLE_SHIFT & box.swizzle[:, None]) << box.swizzle_shift[:, None]
    start = locate_in_rooms(machine.rooms, box.start[:, None], UNIT_BYTES).first_word
    return UnitPlaces(
        shared=address.astype(jnp.uint64),
        flipped=flipped,
        first=start + (offset >> 2).astype(jnp.int32),
        shift=(offset & 3).astype(jnp.uint32) * np.uint32(8),
        within=within,
    )


def _row_coordinates(box: TensorBox, copy: CopyValues, row: Array, mode: str) -> list[Array]:
    """Return the coordinates along all dimensions but the first of rows of what each block moves, int64[blocks, lanes]."""
    if mode.startswith("tile::"):
        return [jnp.take_along_axis(copy["rows"], jnp.clip(row, 0, GATHERED_ROWS - 1), axis=1)]
    given = copy["coordinates"]
    if mode.startswith("im2col"):
        return _pixel_coordinates(box, given, copy.get("offsets"), row)
    found = []
    for axis in range(1, given.shape[-1]):
        count = box.boxes[:, axis, None]
        found.append(given[:, axis, None] + row % count * box.steps[:, axis, None])
        row = row // count
    return found


def _pixel_coordinates(box: TensorBox, given: Array, offsets: Array | None, pixel: Array) -> list[Array]:
    """Return the coordinates of pixels along width, height, depth and images, counted from the pixel at the given coordinates.

    The pixels of an image's bounding box follow one another by the steps of the map, width first; behind the last one the next image
    begins at the lower corner. The offsets move each pixel within the filter.
    """
    found, carry, images = [], pixel, given.shape[-1] - 1
    for axis in range(1, images):
        step, lower = box.steps[:, axis, None], box.lower[:, axis - 1, None]
        last, start = box.dims[:, axis, None] - 1 + box.upper[:, axis - 1, None], given[:, axis, None]
        count = jnp.maximum((last - lower) // step + 1, 1)
        left = (last - start) // step + 1  # pixels from the first one to the end of its row
        at = jnp.where(carry < left, start + carry * step, lower + (carry - left) % count * step)
        found.append(at if offsets is None else at + offsets[:, axis - 1, None])
        carry = jnp.where(carry < left, 0, 1 + (carry - left) // count)
    return [*found, given[:, images, None] + carry]


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


def _flip_halves(words: list[Array], flipped: Array) -> list[Array]:
    return [jnp.where(flipped, words[(i + 2) % UNIT_WORDS], words[i]) for i in range(UNIT_WORDS)]


def _round_to_tf32(word: Array) -> Array:
    """Round f32 to the nearest tf32, ties to even. Every NaN becomes 0x7fffe000."""
    rounded = word + (np.uint32(0xFFF) + (word >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    magnitude = word & np.uint32(0x7FFFFFFF)
    return jnp.where(magnitude > np.uint32(0x7F800000), np.uint32(0x7FFFE000), rounded)


def _load_boxes(machine: Machine, copy: CopyValues, box: TensorBox, places: UnitPlaces, present: Array) -> Machine:
    """Copy units from global to shared memory."""
    index = places.first[..., None] + np.arange(UNIT_WORDS + 1, dtype=np.int32)  # the last ones may lie behind all memory
    words = machine.memory.at[index].get(mode="fill", fill_value=0)
    values = _shift_words([words[..., i] for i in range(UNIT_WORDS + 1)], places.shift)
    is_tf32 = jnp.isin(box.element, jnp.asarray([maps.TYPE_NUMBERS[name] for name in ("tf32", "tf32_ftz")]))[:, None]
    values = [jnp.where(is_tf32, _round_to_tf32(value), value) for value in values]
    fill = jnp.where(box.nan_fill, np.uint32(maps.FILL_NAN), np.uint32(0))[:, None]
    values = [value & mask | fill & ~mask for value, mask in zip(values, _byte_masks(places.within), strict=True)]
    values = _flip_halves(values, places.flipped)
    for address, there in each_destination(machine, places.shared, present, copy["mask"][:, None] if "mask" in copy else None):
        machine = store_units(machine, "shared", values, address, there)
    return machine


def _read_shared_units(machine: Machine, box: TensorBox, places: UnitPlaces) -> list[Array]:
    """Return the four words of units in shared memory, as they go to global memory."""
    words = _flip_halves(gather_words(*unit_words(machine, "shared", places.shared), UNIT_WORDS), places.flipped)
    packed = _pack_six_bits(words)
    six = (box.bits == 6)[:, None]
    return [jnp.where(six, narrow, word) for narrow, word in zip(packed, words, strict=True)]


def _pack_six_bits(words: list[Array]) -> list[Array]:
    """Return 16 elements, the low 6 bits of each byte, without gaps: 96 bits and a word of zeros (.b6p2x16)."""
    packed = [jnp.zeros_like(words[0]) for _ in range(UNIT_WORDS)]
    for i in range(UNIT_BYTES):
        code = words[i // 4] >> np.uint32(8 * (i % 4)) & np.uint32(0x3F)
        word, bit = divmod(6 * i, 32)
        packed[word] |= code << np.uint32(bit)
        if bit > 26:
            packed[word + 1] |= code >> np.uint32(32 - bit)
    return packed


def _store_boxes(machine: Machine, copy: CopyValues, box: TensorBox, places: UnitPlaces, present: Array) -> Machine:
    """Copy units from shared to global memory.

    Neighbouring units share a word, which is the last word of one and the first of the other. Each index of a word is stored separately, so
    both parts are kept.
    """
    shift = places.shift
    zero = jnp.zeros(shift.shape, jnp.uint32)
    back = (np.uint32(32) - shift) & np.uint32(31)
    operands = _read_shared_units(machine, box, places), _byte_masks(places.within)
    shifted = [_shift_words([zero, *words, zero], back) for words in operands]
    memory = machine.memory
    for i in range(UNIT_WORDS + 1):
        aligned = [words[i] if i < UNIT_WORDS else zero for words in operands]
        value, mask = (jnp.where(shift == 0, x, words[i]) for x, words in zip(aligned, shifted, strict=True))
        index = places.first + np.int32(i)
        memory = scatter_words(memory, index, gather_words(memory, index, 1)[0] & ~mask | value & mask, mask != 0)
    return replace(machine, memory=memory)


def _reduce_boxes(
    machine: Machine, copy: CopyValues, box: TensorBox, places: UnitPlaces, present: Array, *, atomics: dict[int, Atomic]
) -> Machine:
    """Reduce units from shared into global memory, element by element."""
    words = jnp.stack(_read_shared_units(machine, box, places))
    for number, atomic in atomics.items():
        chosen = present & (box.element == number)[:, None]
        reduce = partial(_reduce_elements, atomic=atomic, places=places, words=words, chosen=chosen)
        machine = replace(machine, memory=lax.cond(chosen.any(), reduce, lambda memory: memory, machine.memory))
    return machine


def _reduce_elements(memory: Array, *, atomic: Atomic, places: UnitPlaces, words: Array, chosen: Array) -> Array:
    """Return global memory after the reductions of all elements of units, the first ones of all units first."""
    bits = KINDS[atomic.kind].bits

    def reduce_element(i: Array, memory: Array) -> Array:
        word, low = i * bits // 32, (i * bits % 32).astype(jnp.uint32)
        value = jnp.take(words, word, axis=0) >> low
        if bits == 64:
            value = join_words(value, jnp.take(words, word + 1, axis=0))
        value = value & np.uint32(0xFFFF) if bits == 16 else value
        byte = places.shift // 8 + (i * bits // 8).astype(jnp.uint32)
        index, address = places.first + (byte // 4).astype(jnp.int32), (byte % 4).astype(jnp.uint64)
        mask = chosen & jnp.take(places.within, i * bits // 8, axis=-1)
        return apply_atomic(atomic, memory, AtomicRequests(index, address, value, jnp.zeros_like(value), mask))[0]

    return lax.fori_loop(0, 8 * UNIT_BYTES // bits, reduce_element, memory)


PREPARE: dict[str, Prepare] = {"cp": prepare_any_copy}
