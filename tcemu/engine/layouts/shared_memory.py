"""Operands of wgmma in shared memory: the matrix descriptor, the canonical layouts and the swizzle.

An operand is a set of lines of 16-byte units. K-major: a line is a row of A or a column of B, and its units follow each other along K.
MN-major: a line is one k, and its units follow each other along M or N. Eight lines by one swizzle width are an atom. A canonical layout
says which of the descriptor's two strides leads to the next eight lines and which to the next atom along a line. Addresses are bytes of
shared memory. Source: PTX ISA 9.7.15.5.1.2; the addresses were measured on an NVIDIA H200 in every mode and both majors (tests/golden,
wgmma and wgmma_sp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.engine.formats.number_formats import Format
from tcemu.engine.layouts.fragment_layouts import REGISTER_BITS
from tcemu.engine.layouts.packing import container, pack_registers, unpack_registers
from tcemu.engine.layouts.strided_memory import as_memory

UNIT = 16  # bytes that the swizzle moves together; also the alignment of an operand
UNIT_WORDS = UNIT // 4
ATOM_LINES = 8  # lines of an atom
ADDRESS_BITS = 18  # width of an address in a descriptor
SWIZZLE_SHIFT = 7  # the swizzle uses the low bits of address >> 7
SECTION = "PTX ISA 9.7.15.5.1.2"


class DescriptorField(NamedTuple):
    low: int  # lowest bit
    bits: int  # width
    in_units: bool = False  # True for an address or offset in units of 16 bytes


FIELDS = {  # 9.7.15.5.1.2.2
    "start": DescriptorField(low=0, bits=14, in_units=True),
    "leading": DescriptorField(low=16, bits=14, in_units=True),
    "stride": DescriptorField(low=32, bits=14, in_units=True),
    "base_offset": DescriptorField(low=49, bits=3),
    "mode": DescriptorField(low=62, bits=2),
}
SWIZZLE_BYTES = (0, 128, 64, 32)  # swizzle width in bytes, by the field `mode`
ATOM_WIDTHS = tuple(max(1, swizzle // UNIT) for swizzle in SWIZZLE_BYTES)  # width of an atom in units, by mode


MAJORS = ("k", "mn")


class Descriptor(NamedTuple):
    """The fields of a descriptor, as ints or integer arrays."""

    start: Any  # byte address of the matrix
    leading: Any  # leading dimension byte offset
    stride: Any  # stride dimension byte offset
    base_offset: Any  # (address >> 7) & 7 of the start of the swizzle's pattern
    mode: Any  # index into SWIZZLE_BYTES


def descriptor(start: int, leading: int, stride: int, swizzle: int, base_offset: int = 0) -> int:
    """Encode the 64-bit matrix descriptor of an operand of wgmma in shared memory.

    Adding `n >> 4` to the result moves the start by n bytes, which steps along K inside a swizzle atom.

    Args:
        start: Byte address of the matrix, a multiple of 16 below 2^18.
        leading: Leading dimension byte offset, a multiple of 16 below 2^18.
        stride: Stride dimension byte offset, a multiple of 16 below 2^18.
        swizzle: Width of the swizzle in bytes: 0 (none), 32, 64 or 128.
        base_offset: `(address >> 7) & 7` of the address where the swizzle's pattern starts; 0 if that is a multiple of 8 * swizzle.

    Returns:
        The descriptor.

    Raises:
        TypeError: An argument is not an int.
        ValueError: An argument does not fit its field.

    Source: PTX ISA 9.7.15.5.1.2.2.
    """
    values = {"start": start, "leading": leading, "stride": stride, "base_offset": base_offset}
    for name, value in (*values.items(), ("swizzle", swizzle)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise TypeError(f"{name}: got {type(value).__name__}; expected an int that is known before tracing. {SECTION}.2")
    if swizzle not in SWIZZLE_BYTES:
        raise ValueError(f"swizzle: got {swizzle}; expected 0, 32, 64 or 128 bytes. {SECTION}.2")
    if base_offset and not swizzle:
        raise ValueError(f"base_offset: got {base_offset} without a swizzle; only the swizzled modes have one. {SECTION}.2")
    return pack_fields(FIELDS, values | {"mode": SWIZZLE_BYTES.index(swizzle)}, f"{SECTION}.2")


def pack_fields(fields: Mapping[str, DescriptorField], values: Mapping[str, int], section: str) -> int:
    """Return the descriptor with these values of fields.

    Args:
        fields: The fields of the descriptor by name.
        values: Values of some of them; the others are 0.
        section: Section of the manual, for the message.

    Raises:
        ValueError: A value does not fit its field.
    """
    packed = 0
    for name, value in values.items():
        field = fields[name]
        scale = UNIT if field.in_units else 1
        if value % scale or not 0 <= value < scale << field.bits:
            raise ValueError(f"{name}: got {value}; expected a multiple of {scale} from 0 to {((1 << field.bits) - 1) * scale}. {section}")
        packed |= int(value) // scale << field.low
    return packed


def descriptor_words(name: str, value: Any) -> Any:
    """Convert a descriptor to words.

    Args:
        name: Name of the argument, for the messages.
        value: An int, or words uint32[..., 2].

    Returns:
        uint32[..., 2], low word first: a NumPy array if the value is known, else a tracer.

    Raises:
        TypeError: The value is neither an int nor uint32.
        ValueError: The int does not fit 64 bits, or the last axis does not have two words.
    """
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{name}: got {value}; a descriptor has 64 bits, see tcemu.layouts.descriptor. {SECTION}.2")
        return np.array([int(value) & 0xFFFFFFFF, int(value) >> 32], np.uint32)
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype != jnp.uint32 or shape is None:
        raise TypeError(
            f"{name}: got {dtype or type(value).__name__}; expected an int from tcemu.layouts.descriptor, or its words uint32[..., 2]"
        )
    if shape[-1:] != (2,):
        raise ValueError(f"{name}: got uint32{list(shape)}; expected uint32[..., 2], the low word of each descriptor first. {SECTION}.2")
    return value if isinstance(value, Tracer) else np.asarray(value)


def decode_field(words: Any, field: DescriptorField) -> Any:
    """Return one field of descriptors uint32[..., 2], int32[...], in bytes where it counts units."""
    word, low = divmod(field.low, REGISTER_BITS)
    value = (words[..., word] >> np.uint32(low)) & np.uint32((1 << field.bits) - 1)
    return value.astype(np.int32) * (UNIT if field.in_units else 1)


def decode_descriptor(words: Any) -> Descriptor:
    """Decode descriptors to their fields.

    Args:
        words: NumPy or JAX array uint32[..., 2], low word first.

    Returns:
        The fields, int32[...] each.

    Source: PTX ISA 9.7.15.5.1.2.2.
    """
    return Descriptor(**{name: decode_field(words, FIELDS[name]) for name in Descriptor._fields})


def has_stray_bits(words: Any) -> Any:
    """Return True where a descriptor has a set bit outside of its fields.

    Args:
        words: NumPy or JAX array uint32[..., 2], low word first.

    Returns:
        bool[...].
    """
    known = sum((1 << field.bits) - 1 << field.low for field in FIELDS.values())
    low, high = ~known & 0xFFFFFFFF, ~known >> 32 & 0xFFFFFFFF
    return (words[..., 0] & np.uint32(low) | words[..., 1] & np.uint32(high)) != 0


def swizzle_address(address: Any, width: Any, base_offset: Any = 0) -> Any:
    """Apply the swizzle to a byte address; the swizzle is its own inverse.

    Args:
        address: Byte address in the unswizzled layout. It is an address in shared memory, not an offset in the matrix, so that a start
            inside an atom reads the right bytes.
        width: Width of the swizzle in units: 1 (none), 2, 4 or 8.
        base_offset: The descriptor's field.

    Returns:
        The byte address in the swizzled layout.
    """
    return address ^ (((address >> SWIZZLE_SHIFT) - base_offset & width - 1) << 4)


def field_columns(at: Any) -> tuple[Any, Any]:
    """Return NumPy, or JAX where a field of descriptors is its array, and the fields with axes for lines and units."""
    xp: Any = jnp if any(isinstance(field, jax.Array) for field in at) else np
    return xp, type(at)(*(xp.asarray(field)[..., None, None] for field in at))


def unit_addresses(at: Descriptor, major: str, lines: int, units: int) -> Any:
    """Compute the byte address of every 16-byte unit of an operand.

    Args:
        at: Fields of the descriptor, int32[...] each, NumPy or JAX.
        major: "k" or "mn".
        lines: Number of lines.
        units: Units of a line.

    Returns:
        int32 [..., lines, units].

    Source: PTX ISA 9.7.15.5.1.2.
    """
    xp, at = field_columns(at)
    width = xp.asarray(np.array(ATOM_WIDTHS, np.int32))[at.mode]
    before, along = strided_units(xp, at, major, lines, units, width)
    return swizzle_address(at.start + before + along, width, at.base_offset)


def strided_units(xp: Any, at: Any, major: str, lines: int, units: int, width: Any, atom_lines: Any = ATOM_LINES) -> tuple[Any, Any]:
    """Return the bytes from an operand's start to each line, and from there to each unit of it, before the swizzle.

    `stride` leads to the next eight lines and `leading` to the next atom along a line; MN-major without a swizzle they change places
    (9.7.15.5.1.2.1.3). The manual calls `leading` unused in the swizzled K-major layouts. It repeats atoms along K with the stride of
    units, which would put them into the next line. On an H200 `leading` is used: measured with a sparse instruction's B, which has 64 bytes
    of K, and the 32-byte swizzle.

    Args:
        xp: NumPy or JAX, as `field_columns` returns it.
        at: Fields of the descriptor, with axes for lines and units.
        major: "k" or "mn".
        lines: Number of lines.
        units: Units of a line.
        width: Width of an atom in units.
        atom_lines: Lines of an atom.
    """
    line, unit = np.arange(lines, dtype=np.int32)[:, None], np.arange(units, dtype=np.int32)
    next_lines, next_atom = at.stride, at.leading
    if major == "mn":
        plain = at.mode == 0
        next_lines, next_atom = xp.where(plain, at.leading, at.stride), xp.where(plain, at.stride, at.leading)
    return line // atom_lines * next_lines + line % atom_lines * width * UNIT, unit % width * UNIT + unit // width * next_atom


def unit_extent(fmt: Format, major: str, rows: int, columns: int) -> tuple[int, int]:
    """Compute the number of lines of a matrix and the number of 16-byte units of a line.

    Args:
        fmt: Format of the elements.
        major: "k" or "mn".
        rows: M or N.
        columns: K.

    Returns:
        (lines, units).

    Raises:
        ValueError: `major` is unknown, the matrix is empty, or a line is not a whole number of units.
    """
    if major not in MAJORS:
        raise ValueError(f"major: got {major!r}; expected 'k' or 'mn'. {SECTION}")
    lines, along = (rows, columns) if major == "k" else (columns, rows)
    per_unit = UNIT * 8 // container(fmt).container_bits
    if lines < 1 or along < 1 or along % per_unit:
        axis = "columns" if major == "k" else "rows"
        raise ValueError(
            f"{rows} x {columns} of {fmt}, {major}-major: {axis} must be a multiple of {per_unit}, 16 bytes, above 0. {SECTION}"
        )
    return lines, along // per_unit


def is_outside(addresses: Any, words: int) -> Any:
    """Return True where a unit is not entirely inside the memory, or is beyond the range of shared addresses.

    Args:
        addresses: Byte addresses of units, NumPy or JAX [...].
        words: Size of the memory in words.

    Returns:
        bool [...].
    """
    return addresses > min(4 * words, 1 << ADDRESS_BITS) - UNIT


def read_matrix(memory: Array, addresses: Any, fmt: Format, major: str) -> Array:
    """Read a matrix of codes from memory.

    Args:
        memory: uint32[..., words].
        addresses: Byte addresses of the units, int32 [..., lines, units]. An address beyond the memory reads the memory's last unit.
        fmt: Format of the elements.
        major: "k" or "mn".

    Returns:
        Codes [..., rows, columns].
    """
    *batch, lines, units = addresses.shape
    count = memory.shape[-1] // UNIT_WORDS
    blocks = memory[..., : count * UNIT_WORDS].reshape(*memory.shape[:-1], count, UNIT_WORDS)
    indices = addresses.reshape(*batch, lines * units) // UNIT
    if not batch:
        taken = jnp.take(blocks, indices, axis=-2, mode="clip")
    else:
        rank = max(len(batch), blocks.ndim - 2)
        blocks = blocks.reshape(*(1,) * (rank + 2 - blocks.ndim), *blocks.shape)
        indices = indices.reshape(*(1,) * (rank + 1 - indices.ndim), *indices.shape)
        taken = jnp.take_along_axis(blocks, jnp.clip(indices, 0, count - 1)[..., None], axis=-2)
    codes = unpack_registers(taken.reshape(*taken.shape[:-2], lines, units * UNIT_WORDS), fmt)
    return codes if major == "k" else codes.swapaxes(-1, -2)


@dataclass(frozen=True)
class SharedLayout:
    """A matrix in shared memory for wgmma: a canonical layout with its strides, for `to_shared` and `from_shared`.

    The matrix is M x K of A (sparse: M x K/2, as stored), or N x K of B, which is B transposed. It may be larger than the operand of one
    instruction. Hashable, so it may be static under `jit`.

    Raises:
        ValueError: A number does not fit its field, or a line is not a multiple of 16 bytes.
        TypeError: A number is not an int.

    Source: PTX ISA 9.7.15.5.1.2.
    """

    format: Format  # format of the elements, at most 32 bits
    rows: int  # M or N
    columns: int  # K, or K/2 for a sparse A
    major: str = "k"  # "k", or "mn" for the transposed operands of imm-trans 1
    swizzle: int = 128  # width of the swizzle in bytes: 0 (none), 32, 64 or 128
    start: int = 0  # byte address, as in `tcemu.layouts.descriptor`
    leading: int | None = None  # bytes, as in `descriptor`; None: atoms without gaps, along M or N first
    stride: int | None = None  # bytes, as in `descriptor`; None: atoms without gaps, along M or N first
    base_offset: int = 0  # as in `descriptor`

    def __post_init__(self) -> None:
        end = 4 * self.words  # raises if a number does not fit its field
        if end > 1 << ADDRESS_BITS:
            raise ValueError(f"{self}: reaches to byte {end}; shared addresses end at {1 << ADDRESS_BITS}. {SECTION}.2")

    @property
    def extent(self) -> tuple[int, int]:
        """Number of lines, and number of 16-byte units of a line."""
        if container(self.format).container_bits > REGISTER_BITS:
            raise ValueError(f"format: {self.format}; wgmma takes elements of at most 32 bits. PTX ISA 9.7.15.3")
        return unit_extent(self.format, self.major, self.rows, self.columns)

    @property
    def fields(self) -> Descriptor:
        """Fields of the layout's descriptor."""
        return decode_descriptor(descriptor_words("descriptor", self._descriptor(self.start)))

    @cached_property
    def units(self) -> np.ndarray:
        """Byte address of every 16-byte unit, int32 [lines, units]."""
        return unit_addresses(self.fields, self.major, *self.extent)

    @property
    def words(self) -> int:
        """Size of the smallest memory that holds the matrix, in 32-bit words from shared address 0."""
        return (int(self.units.max()) + UNIT) // 4

    def addresses(self) -> np.ndarray:
        """Compute the byte address of every element.

        Returns:
            int32 [rows, columns]. For a format below 8 bits: the address of the byte that contains the element.
        """
        bits = container(self.format).container_bits
        inside = np.arange(UNIT * 8 // bits, dtype=np.int32) * bits // 8
        addresses = (self.units[..., None] + inside).reshape(self.extent[0], -1)
        return addresses if self.major == "k" else addresses.T

    def descriptor(self, row: int = 0, column: int = 0) -> int:
        """Encode the descriptor of a part of the matrix: one instruction's operand in a larger matrix.

        A part of a K-major matrix may begin inside a swizzle atom, because an instruction's K of 32 bytes never leaves the atom. The B of a
        sparse instruction has 64 bytes of K; its parts should begin at multiples of 64 bytes.

        Args:
            row: First row of the part: a multiple of 8; if MN-major, of the swizzle's width.
            column: First column of the part. K-major: a multiple of 32 bytes (16 without swizzle). MN-major: a multiple of 8.

        Returns:
            The descriptor.

        Raises:
            ValueError: A part cannot begin at this row or column.
        """
        bits = container(self.format).container_bits
        width = max(1, self.swizzle // UNIT)
        per_unit = UNIT * 8 // bits
        lines, units = self.extent
        row_step, column_step = (ATOM_LINES, per_unit * min(width, 2)) if self.major == "k" else (per_unit * width, ATOM_LINES)
        for name, value, step, size in (("row", row, row_step, self.rows), ("column", column, column_step, self.columns)):
            if value % step or not 0 <= value < size:
                raise ValueError(f"{name}: got {value}; a part of {self} may begin at a multiple of {step} below {size}. {SECTION}")
        line, along = (row, column) if self.major == "k" else (column, row)
        fields = self.fields._replace(start=0, base_offset=0)
        swizzled = unit_addresses(fields, self.major, lines, units)[line, along // per_unit]
        offset = swizzle_address(int(swizzled), width)  # the offset before the swizzle
        return self._descriptor(self.start + offset)

    def _descriptor(self, start: int) -> int:
        width = max(1, self.swizzle // UNIT)
        lines, units = self.extent
        atom = ATOM_LINES * width * UNIT
        # atoms follow each other along M or N first
        lines_step, atom_step = (atom, atom * -(-lines // ATOM_LINES)) if self.major == "k" else (atom * -(-units // width), atom)
        leading, stride = (lines_step, atom_step) if self.major == "mn" and not self.swizzle else (atom_step, lines_step)
        leading = leading if self.leading is None else self.leading
        return descriptor(start, leading, stride if self.stride is None else self.stride, self.swizzle, self.base_offset)


def to_shared(matrix: ArrayLike, layout: SharedLayout, memory: ArrayLike | None = None) -> Array:
    """Write a matrix of raw codes into shared memory in a layout of wgmma.

    Args:
        matrix: Unsigned codes [..., rows, columns]: A as M x K, B as N x K (B transposed). Leading axes are batch axes and broadcast.
        layout: Layout of the matrix.
        memory: uint32[..., words] to write into. None: zeros, `layout.words` of them.

    Returns:
        The written memory, uint32[..., words].

    Raises:
        TypeError: The dtype of the matrix or the memory is wrong.
        ValueError: The shape is wrong, the memory is too small, or two elements have the same address.
    """
    matrix = matrix if isinstance(matrix, jax.Array) else np.asarray(matrix)
    shape = (layout.rows, layout.columns)
    if not jnp.issubdtype(matrix.dtype, jnp.unsignedinteger):
        raise TypeError(
            f"matrix: got {matrix.dtype}{list(matrix.shape)}; expected the raw codes of {layout.format}, unsigned [..., {shape}]"
        )
    if matrix.shape[-2:] != shape:
        raise ValueError(f"matrix: got shape {list(matrix.shape)}; {layout} needs [..., {layout.rows}, {layout.columns}]")
    if len(np.unique(layout.units)) < layout.units.size:
        raise ValueError(
            f"{layout}: two elements would have the same address; leading {layout.fields.leading} and stride {layout.fields.stride} bytes "
            f"are too small. Leave them out for atoms without gaps. {SECTION}.1"
        )
    memory = jnp.zeros(layout.words, jnp.uint32) if memory is None else _check_memory(layout, memory)
    return _write(layout, jnp.asarray(matrix), memory)


def from_shared(memory: ArrayLike, layout: SharedLayout) -> Array:
    """Read a matrix of raw codes from shared memory; the inverse of `to_shared`.

    Args:
        memory: uint32[..., words].
        layout: Layout of the matrix.

    Returns:
        Codes [..., rows, columns].

    Raises:
        TypeError: The memory is not uint32.
        ValueError: The memory is too small.
    """
    return _read(layout, _check_memory(layout, memory))


def _check_memory(layout: SharedLayout, memory: ArrayLike) -> Array:
    memory = as_memory("memory", memory)
    if memory.shape[-1] < layout.words:
        raise ValueError(f"memory: got {memory.shape[-1]} words; {layout} reaches to word {layout.words}")
    return memory


def _read(layout: SharedLayout, memory: Array) -> Array:
    return read_matrix(memory, layout.units, layout.format, layout.major)


def _write(layout: SharedLayout, matrix: Array, memory: Array) -> Array:
    """Write the matrix, without checks: each word of the memory takes its word of the matrix, if any."""
    lines = matrix if layout.major == "k" else matrix.swapaxes(-1, -2)
    words = pack_registers(lines, layout.format)
    words = words.reshape(*words.shape[:-2], -1)
    batch = jnp.broadcast_shapes(words.shape[:-1], memory.shape[:-1])
    indices = (layout.units[..., None] // 4 + np.arange(UNIT_WORDS)).ravel()
    source = np.full(memory.shape[-1], -1)
    source[indices] = np.arange(indices.size)
    written = jnp.take(jnp.broadcast_to(words, (*batch, indices.size)), np.maximum(source, 0), axis=-1)
    return jnp.where(source >= 0, written, jnp.broadcast_to(memory, (*batch, memory.shape[-1])))


_read, _write = jax.jit(_read, static_argnums=0), jax.jit(_write, static_argnums=0)
