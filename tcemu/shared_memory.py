"""wgmma's operands in shared memory: the matrix descriptor, the canonical layouts and the swizzle.

An operand is lines of 16-byte units. K-major: a line is a row of A or a column of B, and its units follow each other along K. MN-major: a
line is one k, and its units follow each other along M or N. Eight lines by one swizzle width are an atom; the canonical layouts say which
of the descriptor's two strides leads to the next eight lines and which to the next atom along a line. Addresses are bytes of shared memory.
Source: PTX ISA 9.7.15.5.1.2; the addresses were seen on an NVIDIA H200 in every mode and both majors (tests/golden, wgmma and wgmma_sp).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.formats import Format
from tcemu.memory import as_memory
from tcemu.packing import REGISTER_BITS, container, pack_registers, unpack_registers

UNIT = 16  # bytes that stay together, and that an operand is aligned to
UNIT_WORDS = UNIT // 4
LINES = 8  # of an atom
ADDRESS_BITS = 18  # that a descriptor can hold
PHASE = 7  # the swizzle takes the low bits of address >> 7
SECTION = "PTX ISA 9.7.15.5.1.2"


class Field(NamedTuple):
    """A field of the descriptor: its lowest bit, its width, and whether it holds an address or offset in units of 16 bytes."""

    low: int
    bits: int
    in_units: bool = False


FIELDS = {  # 9.7.15.5.1.2.2
    "start": Field(low=0, bits=14, in_units=True),
    "leading": Field(low=16, bits=14, in_units=True),
    "stride": Field(low=32, bits=14, in_units=True),
    "base_offset": Field(low=49, bits=3),
    "mode": Field(low=62, bits=2),
}
MODES = (0, 128, 64, 32)  # the swizzle in bytes, by the field `mode`
WIDTHS = tuple(max(1, swizzle // UNIT) for swizzle in MODES)  # of an atom in units, by mode


class Canonical(NamedTuple):
    """A canonical layout: the field with the offset to the next eight lines, and that to the next atom along a line."""

    major: str
    swizzle: int
    next_lines: str
    next_atom: str


CANONICAL = (  # 9.7.15.5.1.2.1.3
    Canonical(major="mn", swizzle=0, next_lines="leading", next_atom="stride"),
    Canonical(major="mn", swizzle=32, next_lines="stride", next_atom="leading"),
    Canonical(major="mn", swizzle=64, next_lines="stride", next_atom="leading"),
    Canonical(major="mn", swizzle=128, next_lines="stride", next_atom="leading"),
    Canonical(major="k", swizzle=0, next_lines="stride", next_atom="leading"),
    # The manual calls `leading` unused here. It repeats atoms along K with the stride of units, which would put them into the next line. On
    # an H200 `leading` is used: seen with sparse B, which has 64 bytes of K, and the 32-byte swizzle
    Canonical(major="k", swizzle=32, next_lines="stride", next_atom="leading"),
    Canonical(major="k", swizzle=64, next_lines="stride", next_atom="leading"),
    Canonical(major="k", swizzle=128, next_lines="stride", next_atom="leading"),
)
MAJORS = ("k", "mn")


class Descriptor(NamedTuple):
    """A descriptor's fields, ints or integer arrays: start, leading and stride in bytes; mode is an index into MODES."""

    start: Any
    leading: Any
    stride: Any
    base_offset: Any
    mode: Any


def descriptor(start: int, leading: int, stride: int, swizzle: int, base_offset: int = 0) -> int:
    """The 64-bit matrix descriptor of an operand of wgmma in shared memory.

    start: byte address of the matrix; leading, stride: the leading and stride dimension byte offsets; each a multiple of 16 below 2^18.
    swizzle: bytes, 0 (none), 32, 64 or 128. base_offset: `(address >> 7) & 7` of where the swizzle's pattern starts; 0 if that is a
    multiple of 8 * swizzle. Adding `n >> 4` to the result moves the start by n bytes, which walks K inside a swizzle atom.
    Raises TypeError if an argument is no int, ValueError if it does not fit its field.
    Source: PTX ISA 9.7.15.5.1.2.2.
    """
    values = {"start": start, "leading": leading, "stride": stride, "base_offset": base_offset}
    for name, value in (*values.items(), ("swizzle", swizzle)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise TypeError(f"{name}: got {type(value).__name__}; wanted an int, known before tracing. {SECTION}.2")
    if swizzle not in MODES:
        raise ValueError(f"swizzle: got {swizzle}; wanted one of 0, 32, 64, 128, in bytes. {SECTION}.2")
    if base_offset and not swizzle:
        raise ValueError(f"base_offset: got {base_offset} without a swizzle; only the swizzled modes have one. {SECTION}.2")
    packed = MODES.index(swizzle) << FIELDS["mode"].low
    for name, value in values.items():
        field = FIELDS[name]
        scale = UNIT if field.in_units else 1
        if value % scale or not 0 <= value < scale << field.bits:
            raise ValueError(f"{name}: got {value}; wanted a multiple of {scale} from 0 to {((1 << field.bits) - 1) * scale}. {SECTION}.2")
        packed |= int(value) // scale << field.low
    return packed


def descriptor_words(name: str, value: Any) -> Any:
    """A descriptor, an int or uint32[..., 2], as uint32[..., 2], low word first: NumPy if its value is known, else a tracer.

    Raises TypeError for anything else, ValueError for an int beyond 64 bits or another shape; `name` is the argument's.
    """
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{name}: got {value}; a descriptor has 64 bits, see tcemu.descriptor. {SECTION}.2")
        return np.array([int(value) & 0xFFFFFFFF, int(value) >> 32], np.uint32)
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype != jnp.uint32 or shape is None:
        raise TypeError(f"{name}: got {dtype or type(value).__name__}; wanted an int from tcemu.descriptor, or its words uint32[..., 2]")
    if shape[-1:] != (2,):
        raise ValueError(f"{name}: got uint32{list(shape)}; wanted uint32[..., 2], the low word of each descriptor first. {SECTION}.2")
    return value if isinstance(value, Tracer) else np.asarray(value)


def fields(words: Any) -> Descriptor:
    """The fields of descriptors uint32[..., 2], NumPy or JAX, as int32[...]."""

    def value_of(field: Field) -> Any:
        word, low = divmod(field.low, REGISTER_BITS)
        value = (words[..., word] >> np.uint32(low)) & np.uint32((1 << field.bits) - 1)
        return value.astype(np.int32) * (UNIT if field.in_units else 1)

    return Descriptor(**{name: value_of(FIELDS[name]) for name in Descriptor._fields})


def strays(words: Any) -> Any:
    """bool[...]: descriptors uint32[..., 2] with a bit set that belongs to no field."""
    known = sum((1 << field.bits) - 1 << field.low for field in FIELDS.values())
    low, high = ~known & 0xFFFFFFFF, ~known >> 32 & 0xFFFFFFFF
    return (words[..., 0] & np.uint32(low) | words[..., 1] & np.uint32(high)) != 0


def swizzle(address: Any, width: Any, base_offset: Any = 0) -> Any:
    """Where the byte that an unswizzled layout puts at `address` really lies. width: of the swizzle in units: 1 (none), 2, 4 or 8.

    The address is that in shared memory, not in the matrix, so that a start inside an atom finds what lies there.
    """
    return address ^ (((address >> PHASE) - base_offset & width - 1) << 4)


def unit_addresses(at: Descriptor, major: str, lines: int, units: int) -> Any:
    """int32 [..., lines, units]: the byte address of every 16-byte unit of an operand. `at`: int32[...] fields, NumPy or JAX."""
    xp = jnp if any(isinstance(field, jax.Array) for field in at) else np
    at = Descriptor(**{name: xp.asarray(field)[..., None, None] for name, field in at._asdict().items()})
    by_mode = {row.swizzle: row for row in CANONICAL if row.major == major}
    width = xp.asarray(np.array(WIDTHS, np.int32))[at.mode]
    lines_by_leading = xp.asarray(np.array([by_mode[bytes_].next_lines == "leading" for bytes_ in MODES]))[at.mode]
    next_lines = xp.where(lines_by_leading, at.leading, at.stride)
    next_atom = xp.where(lines_by_leading, at.stride, at.leading)
    line, unit = np.arange(lines, dtype=np.int32)[:, None], np.arange(units, dtype=np.int32)
    along = unit % width * UNIT + unit // width * next_atom
    return swizzle(at.start + line // LINES * next_lines + line % LINES * width * UNIT + along, width, at.base_offset)


def extent(fmt: Format, major: str, rows: int, columns: int) -> tuple[int, int]:
    """(lines, units) of a matrix of rows (M or N) x columns (K). ValueError if a line is no whole number of units."""
    if major not in MAJORS:
        raise ValueError(f"major: got {major!r}; wanted 'k' or 'mn'. {SECTION}")
    lines, along = (rows, columns) if major == "k" else (columns, rows)
    per_unit = UNIT * 8 // container(fmt).container_bits
    if lines < 1 or along < 1 or along % per_unit:
        axis = "columns" if major == "k" else "rows"
        raise ValueError(
            f"{rows} x {columns} of {fmt}, {major}-major: {axis} must be a multiple of {per_unit}, 16 bytes, above 0. {SECTION}"
        )
    return lines, along // per_unit


def outside(addresses: Any, words: int) -> Any:
    """bool: which units, by their addresses, do not lie whole in a memory of so many words, or lie where no shared address reaches."""
    return addresses > min(4 * words, 1 << ADDRESS_BITS) - UNIT


def read(memory: Array, addresses: Any, fmt: Format, major: str) -> Array:
    """The codes of `fmt` in memory uint32[..., words], by unit addresses [..., lines, units] -> [..., rows, columns].

    Addresses beyond the memory give what lies at its end.
    """
    *batch, lines, units = addresses.shape
    count = memory.shape[-1] // UNIT_WORDS
    blocks = memory[..., : count * UNIT_WORDS].reshape(*memory.shape[:-1], count, UNIT_WORDS)
    at = addresses.reshape(*batch, lines * units) // UNIT
    if not batch:
        taken = jnp.take(blocks, at, axis=-2, mode="clip")
    else:
        rank = max(len(batch), blocks.ndim - 2)
        blocks, at = blocks.reshape(*(1,) * (rank + 2 - blocks.ndim), *blocks.shape), at.reshape(*(1,) * (rank + 1 - at.ndim), *at.shape)
        taken = jnp.take_along_axis(blocks, jnp.clip(at, 0, count - 1)[..., None], axis=-2)
    codes = unpack_registers(taken.reshape(*taken.shape[:-2], lines, units * UNIT_WORDS), fmt)
    return codes if major == "k" else codes.swapaxes(-1, -2)


@dataclass(frozen=True)
class SharedLayout:
    """How a matrix lies in shared memory for wgmma: a canonical layout with its strides. `to_shared` and `from_shared` follow it.

    format: of the elements, at most 32 bits. rows, columns: M x K of A (sparse: M x K/2, as stored), N x K of B: B is seen transposed.
    They may exceed one instruction's. major: "k", or "mn" for the transposed operands of imm-trans 1. swizzle: bytes, 0, 32, 64 or 128.
    start, leading, stride, base_offset: as in `tcemu.descriptor`; leading and stride default to atoms that follow each other without
    gaps, along M or N first. Hashable, so it may be static under jit.
    Raises ValueError if a number fits no field or a line does not fill whole 16 bytes; TypeError for numbers that are not ints.
    Source: PTX ISA 9.7.15.5.1.2.
    """

    format: Format
    rows: int
    columns: int
    major: str = "k"
    swizzle: int = 128
    start: int = 0
    leading: int | None = None
    stride: int | None = None
    base_offset: int = 0

    def __post_init__(self) -> None:
        highest = 4 * self.words  # which raises if a number fits no field
        if highest > 1 << ADDRESS_BITS:
            raise ValueError(f"{self}: reaches to byte {highest}; shared addresses end at {1 << ADDRESS_BITS}. {SECTION}.2")

    @property
    def extent(self) -> tuple[int, int]:
        """(lines, 16-byte units of a line)."""
        if container(self.format).container_bits > REGISTER_BITS:
            raise ValueError(f"format: {self.format}; wgmma takes elements of at most 32 bits. PTX ISA 9.7.15.3")
        return extent(self.format, self.major, self.rows, self.columns)

    @property
    def fields(self) -> Descriptor:
        """Its descriptor's fields."""
        return fields(descriptor_words("descriptor", self._descriptor(self.start)))

    @cached_property
    def units(self) -> np.ndarray:
        """int32 [lines, units]: the byte address of every 16 bytes."""
        return unit_addresses(self.fields, self.major, *self.extent)

    @property
    def words(self) -> int:
        """The least memory, in 32-bit words from shared address 0, that holds the matrix."""
        return (int(self.units.max()) + UNIT) // 4

    def addresses(self) -> np.ndarray:
        """int32 [rows, columns]: the byte address of every element (of the byte that holds it, for formats below 8 bits)."""
        bits = container(self.format).container_bits
        inside = np.arange(UNIT * 8 // bits, dtype=np.int32) * bits // 8
        addresses = (self.units[..., None] + inside).reshape(self.extent[0], -1)
        return addresses if self.major == "k" else addresses.T

    def descriptor(self, row: int = 0, column: int = 0) -> int:
        """The descriptor of the part that begins at (row, column): of one instruction's operand in a larger matrix.

        Raises ValueError unless the two are where a part may begin. Along M or N: a multiple of 8, for MN-major of the swizzle's width.
        Along K: for MN-major a multiple of 8, for K-major of 32 bytes (16 without swizzle), so inside a swizzle atom too; an
        instruction's K of 32 bytes then never leaves the atom (the B of a sparse one takes 64: let them begin at multiples of 64).
        """
        bits = container(self.format).container_bits
        width = max(1, self.swizzle // UNIT)
        per_unit = UNIT * 8 // bits
        lines, units = self.extent
        row_step, column_step = (LINES, per_unit * min(width, 2)) if self.major == "k" else (per_unit * width, LINES)
        for name, value, step, size in (("row", row, row_step, self.rows), ("column", column, column_step, self.columns)):
            if value % step or not 0 <= value < size:
                raise ValueError(f"{name}: got {value}; a part of {self} may begin at a multiple of {step} below {size}. {SECTION}")
        line, along = (row, column) if self.major == "k" else (column, row)
        plain = unit_addresses(self.fields._replace(start=0, base_offset=0), self.major, lines, units)[line, along // per_unit]
        offset = swizzle(int(plain), width)  # its own inverse
        return self._descriptor(self.start + offset)

    def _descriptor(self, start: int) -> int:
        width = max(1, self.swizzle // UNIT)
        lines, units = self.extent
        atom = LINES * width * UNIT
        # along M or N first
        lines_step, atom_step = (atom, atom * -(-lines // LINES)) if self.major == "k" else (atom * -(-units // width), atom)
        by_leading = any(row.next_lines == "leading" for row in CANONICAL if (row.major, row.swizzle) == (self.major, self.swizzle))
        leading, stride = (lines_step, atom_step) if by_leading else (atom_step, lines_step)
        leading = leading if self.leading is None else self.leading
        return descriptor(start, leading, stride if self.stride is None else self.stride, self.swizzle, self.base_offset)


def to_shared(matrix: ArrayLike, layout: SharedLayout, memory: ArrayLike | None = None) -> Array:
    """Write a matrix of raw codes into shared memory as wgmma wants it.

    matrix: unsigned codes [..., rows, columns] of `layout`: A as M x K, B as N x K (B transposed). memory: uint32[..., words] to write
    into; None: zeros, of `layout.words`. Leading axes are batch axes and broadcast. Returns uint32[..., words].
    Raises TypeError or ValueError for another dtype or shape, ValueError if the memory is too small or two elements would share a place.
    """
    matrix = matrix if isinstance(matrix, jax.Array) else np.asarray(matrix)
    shape = (layout.rows, layout.columns)
    if not jnp.issubdtype(matrix.dtype, jnp.unsignedinteger):
        raise TypeError(f"matrix: got {matrix.dtype}{list(matrix.shape)}; wanted the raw codes of {layout.format}, unsigned [..., {shape}]")
    if matrix.shape[-2:] != shape:
        raise ValueError(f"matrix: got shape {list(matrix.shape)}; {layout} wants [..., {layout.rows}, {layout.columns}]")
    if len(np.unique(layout.units)) < layout.units.size:
        raise ValueError(
            f"{layout}: two elements would lie in one place, leading {layout.fields.leading} and stride {layout.fields.stride} bytes being "
            f"too small; leave them out for atoms without gaps. {SECTION}.1"
        )
    memory = jnp.zeros(layout.words, jnp.uint32) if memory is None else _fitting(layout, memory)
    return _write(layout, jnp.asarray(matrix), memory)


def from_shared(memory: ArrayLike, layout: SharedLayout) -> Array:
    """The matrix of raw codes [..., rows, columns] that lies in memory uint32[..., words]; the inverse of `to_shared`, with its errors."""
    return _read(layout, _fitting(layout, memory))


def _fitting(layout: SharedLayout, memory: ArrayLike) -> Array:
    memory = as_memory("memory", memory)
    if memory.shape[-1] < layout.words:
        raise ValueError(f"memory: got {memory.shape[-1]} words; {layout} reaches to word {layout.words}")
    return memory


def _read(layout: SharedLayout, memory: Array) -> Array:
    return read(memory, layout.units, layout.format, layout.major)


def _write(layout: SharedLayout, matrix: Array, memory: Array) -> Array:
    lines = matrix if layout.major == "k" else matrix.swapaxes(-1, -2)
    words = pack_registers(lines, layout.format)
    words = words.reshape(*words.shape[:-2], -1)
    batch = jnp.broadcast_shapes(words.shape[:-1], memory.shape[:-1])
    at = (layout.units[..., None] // 4 + np.arange(UNIT_WORDS)).ravel()
    source = np.full(memory.shape[-1], -1)
    source[at] = np.arange(at.size)
    written = jnp.take(jnp.broadcast_to(words, (*batch, at.size)), np.maximum(source, 0), axis=-1)
    return jnp.where(source >= 0, written, jnp.broadcast_to(memory, (*batch, memory.shape[-1])))


_read, _write = jax.jit(_read, static_argnums=0), jax.jit(_write, static_argnums=0)
