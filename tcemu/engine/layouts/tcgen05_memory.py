"""Operands of tcgen05 in shared memory: the matrix descriptor of 64 bits, the canonical layouts and the swizzles.

The layouts are those of wgmma and one more, the 128-byte swizzle of atoms of 32 bytes, which tf32 needs MN-major. The descriptor differs
in bits 46 to 48, bit 52 and the field of the swizzle. As for wgmma an operand is a set of lines of 16-byte units: K-major a line is a row
of A or a column of B, MN-major it is one k.

Source: PTX ISA 9.7.16.4.1, 9.7.16.3; CUTLASS mma_sm100_desc.hpp. 34 kernels of nvcc, CuTe and Triton lay their operands out so.
"""

from typing import Any, NamedTuple

import numpy as np

from tcemu.engine.layouts.shared_memory import UNIT, DescriptorField, decode_field, field_columns, pack_fields, strided_units

SECTION = "PTX ISA 9.7.16.4.1"
FIELDS = {
    "start": DescriptorField(low=0, bits=14, in_units=True),
    "leading": DescriptorField(low=16, bits=14, in_units=True),
    "stride": DescriptorField(low=32, bits=14, in_units=True),
    "version": DescriptorField(low=46, bits=3),
    "base_offset": DescriptorField(low=49, bits=3),
    "absolute": DescriptorField(low=52, bits=1),
    "mode": DescriptorField(low=61, bits=3),
}
LONG_ROW = 128  # bytes of a row behind which bit 52 sends the rest to another address
VERSION = 1  # the value of bits 46 to 48


class Swizzle(NamedTuple):
    """One swizzle, by the descriptor's field."""

    mode: int
    width: int  # bytes of a line of an atom
    atom: int  # bytes that move together
    mn_lines: int  # lines of an atom where MN-major; K-major there are 8

    @property
    def mask(self) -> int:
        """The bits of address >> 7 that the swizzle uses."""
        return self.width // self.atom - 1


SWIZZLES = {  # by the name of `Tcgen05Descriptor.swizzle`: bytes, "128x32" for atoms of 32 bytes
    "0": Swizzle(mode=0, width=16, atom=16, mn_lines=8),
    "32": Swizzle(mode=6, width=32, atom=16, mn_lines=8),
    "64": Swizzle(mode=4, width=64, atom=16, mn_lines=8),
    "128": Swizzle(mode=2, width=128, atom=16, mn_lines=8),
    "128x32": Swizzle(mode=1, width=128, atom=32, mn_lines=4),
}
BY_MODE = {row.mode: row for row in SWIZZLES.values()}


class Tcgen05Descriptor(NamedTuple):
    """The fields of a descriptor, as ints or integer arrays."""

    start: Any  # byte address of the matrix
    leading: Any  # leading dimension byte offset
    stride: Any  # stride dimension byte offset
    version: Any  # 1
    base_offset: Any  # (address >> 7) & 7 of the start of the swizzle's pattern
    absolute: Any  # 1 if `leading` is an address: K = 96
    mode: Any  # see SWIZZLES


def encode_tcgen05_descriptor(
    start: int, leading: int, stride: int, swizzle: str | int = "128", base_offset: int = 0, *, absolute: bool = False
) -> int:
    """Encode the 64-bit descriptor of an operand of tcgen05 in shared memory.

    Adding `n >> 4` to the result moves the start by n bytes, which steps along K inside a swizzle atom.

    Args:
        start: Byte address of the matrix, a multiple of 16 below 2^18.
        leading: Leading dimension byte offset, a multiple of 16 below 2^18; with `absolute` an address.
        stride: Stride dimension byte offset, a multiple of 16 below 2^18.
        swizzle: Width in bytes, 0, 32, 64 or 128, or "128x32" for the 128-byte swizzle of atoms of 32 bytes.
        base_offset: `(address >> 7) & 7` of the address where the swizzle's pattern starts; 0 if that is a multiple of 8 widths.
        absolute: True for a K-major operand of K = 96 whose rows go on at the address `leading` behind byte 128.

    Raises:
        ValueError: An argument does not fit its field.
    """
    if str(swizzle) not in SWIZZLES:
        raise ValueError(f"swizzle: got {swizzle!r}; expected one of {', '.join(SWIZZLES)}. {SECTION}")
    values = {"start": start, "leading": leading, "stride": stride, "base_offset": base_offset, "absolute": int(absolute)}
    return pack_fields(FIELDS, values | {"mode": SWIZZLES[str(swizzle)].mode, "version": VERSION}, SECTION)


def decode_tcgen05_descriptor(words: Any) -> Tcgen05Descriptor:
    """Decode descriptors to their fields.

    Args:
        words: NumPy or JAX array uint32[..., 2], low word first.

    Returns:
        The fields, int32[...] each.
    """
    return Tcgen05Descriptor(**{name: decode_field(words, field) for name, field in FIELDS.items()})


def descriptor_problem(words: np.ndarray, *, absolute: bool = False) -> str | None:
    """Return what is wrong with a known descriptor, or None.

    Args:
        words: uint32[2], low word first.
        absolute: True for an operand of a product whose K allows bit 52: `DepthRow.absolute` of the row of K.
    """
    value = int(words[0]) | int(words[1]) << 32
    stray = value & ~sum((1 << field.bits) - 1 << field.low for field in FIELDS.values())
    fields = decode_tcgen05_descriptor(np.asarray(words))
    if int(fields.version) != VERSION:
        return f"bits 46 to 48 are {int(fields.version)}, but must be {VERSION}. {SECTION}"
    if int(fields.mode) not in BY_MODE:
        return f"the swizzle field is {int(fields.mode)}; valid are {', '.join(str(mode) for mode in sorted(BY_MODE))}. {SECTION}"
    if int(fields.absolute) and not absolute:
        return f"bit 52 is set, which only a product with K = 96 may have. {SECTION}"
    return f"bits are set that belong to no field, {stray:#x}. {SECTION}" if stray else None


def _by_mode(mode: Any, xp: Any, value: Any) -> Any:
    """Look up a property of the swizzle of each descriptor."""
    table = np.array([value(BY_MODE[i]) if i in BY_MODE else 0 for i in range(8)], np.int32)
    return xp.asarray(table)[mode]


def tcgen05_unit_addresses(at: Tcgen05Descriptor, major: str, lines: int, units: int) -> Any:
    """Compute the byte address of every 16-byte unit of an operand.

    K-major the units beyond a line of an atom lie `leading` bytes on, as measured for wgmma; only a sparse B of the 32-byte swizzle has
    such units. With bit 52 the bytes of a row that would lie beyond byte 128 lie at the address `leading`, in the same lines (inferred
    from CUTLASS sm103_blockscaled_mma_warpspecialized.hpp).

    Args:
        at: Fields of the descriptor, int32[...] each, NumPy or JAX.
        major: "k" or "mn".
        lines: Number of lines.
        units: Units of a line.

    Returns:
        int32 [..., lines, units].
    """
    xp, at = field_columns(at)
    width = _by_mode(at.mode, xp, lambda row: row.width // UNIT)
    atom_lines = 8 if major == "k" else _by_mode(at.mode, xp, lambda row: row.mn_lines)
    before, along = strided_units(xp, at, major, lines, units, width, atom_lines)
    address = at.start + before + along
    if major == "k":
        beyond = at.start % LONG_ROW + np.arange(units, dtype=np.int32) * UNIT - LONG_ROW
        address = xp.where((at.absolute == 1) & (beyond >= 0), at.leading + before + beyond, address)
    shift = _by_mode(at.mode, xp, lambda row: 5 if row.atom == 32 else 4)
    mask = _by_mode(at.mode, xp, lambda row: row.mask)
    return address ^ (((address >> 7) - at.base_offset & mask) << shift)
