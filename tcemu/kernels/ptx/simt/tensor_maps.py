"""Tensor maps: the box of a tensor that `cp.async.bulk.tensor` copies, and its layout in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAP_BYTES = 128  # the opaque object
ALIGNMENT = 64
MAGIC = 0x7CE37A90  # first word of an object that `TensorMap.encode` made
BITS = {  # the data types of cuTensorMapEncodeTiled; b4x16 is 16U4_ALIGN8B, b4x16_p64 16U4_ALIGN16B, b6x16_p32 16U6_ALIGN16B
    **{name: 8 for name in ("u8", "e4m3", "e5m2")},
    **{name: 16 for name in ("u16", "f16", "bf16")},
    **{name: 32 for name in ("u32", "s32", "f32", "f32_ftz", "tf32", "tf32_ftz")},
    **{name: 64 for name in ("u64", "s64", "f64")},
    **{name: 4 for name in ("b4x16", "b4x16_p64")},
    "b6x16_p32": 6,
}
# data types by their numbers in tensormap.replace (PTX ISA 9.7.9.28, table of .elemtype); CUtensorMapDataType of the driver has 8 to 10 in
# another order
ELEMENT_TYPES = (
    "u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32_ftz", "f64", "bf16", "tf32", "tf32_ftz",
    "b4x16", "b4x16_p64", "b6x16_p32",
)  # fmt: skip
FLOATS = ("f16", "f32", "f32_ftz", "f64", "bf16", "tf32", "tf32_ftz")  # data types that may be filled with NaN
FILL_NAN = 0x7FF77FF7  # the NaN of f16 and bf16 that fma.oob takes for out of bounds, in each half of a word: see `TensorMap`
PADDED = ("b4x16_p64", "b6x16_p32")  # 16 elements and padding fill 16 bytes of shared memory: PTX ISA 5.5.1.1
LOADED_ONLY = ("b4x16_p64",)  # types of which no source says what a copy to global memory does
TYPE_NUMBERS = {name: ELEMENT_TYPES.index("u8" if name in ("e4m3", "e5m2") else name) for name in BITS}
SWIZZLES = (0, 32, 64, 128)  # in bytes, by their numbers in tensormap.replace
ATOMS = (16, 32, 32, 64)  # bytes that the swizzle of 128 moves as one, by their numbers
FLIPPING_ATOM = 2  # the number of SWIZZLE_128B_ATOM_32B_FLIP_8B
PADDED_ROW = 128  # elements of a row of a box of a padded type
INTERLEAVES = (0, 16, 32)  # bytes of a pixel, by their numbers in tensormap.replace
LEAST_INTERLEAVED = 3  # dimensions of an interleaved tensor
MAX_RANK, MAX_BOX, MAX_ELEMENT_STRIDE, DIMENSION_LIMIT, STRIDE_LIMIT = 5, 256, 8, 1 << 32, 1 << 40
UNIT_BYTES = 16  # rows of a copy and strides are multiples of it
SECTION, IM2COL_SECTION = "CUDA driver API, cuTensorMapEncodeTiled", "CUDA driver API, cuTensorMapEncodeIm2col"
# first words of the fields of the encoded object
KIND_WORD, ADDRESS_WORD, DIMENSION_WORDS, STRIDE_WORDS, BOX_WORDS, ELEMENT_STRIDE_WORDS = 1, 2, 4, 9, 19, 24
FILL_WORD = 17  # 1 where elements outside the tensor are read as FILL_NAN
INTERLEAVE_WORD = 18  # the number of INTERLEAVES
CORNER_WORDS = 29  # of an im2col map, for each spatial dimension: the lower corner in the low half, the upper one in the high half
IM2COL = 8  # bit of the rank's byte that tells an im2col map
CORNER_BITS = {3: 16, 4: 8, 5: 5}  # signed bits of a coordinate of a corner, by the rank
MAX_PIXELS = 1024  # pixels of a column
FIELD_SHIFTS = {"rank": 0, "elemtype": 8, "swizzle_mode": 16, "swizzle_atomicity": 24}  # lowest bits of the bytes in the word KIND_WORD


@dataclass(frozen=True)
class TensorMap:
    """A tensor map: the argument of `tcemu.ptx.run` for a parameter `.param .align 64 .b8 map[128]`.

    Elements outside the tensor are read as zeros, or with `nan_fill` as NaN, and not stored. The NaN is 0x7ff7 in each 16 bits of an
    element of any size, as recorded on an H100. A copy to shared memory rounds "tf32" and "tf32_ftz" to nearest even, with 0x7fffe000 for
    every NaN; a copy to global memory does not round. Copies keep the subnormal numbers of "f32_ftz" and "tf32_ftz": on an H100, 0 of
    50,176 words differ for each type and direction. The padding of "b4x16_p64" and "b6x16_p32", which PTX leaves open, is filled with
    zeros.

    An interleaved tensor (NC/8HWC8 with `interleave=16`, NC/16HWC16 with 32) has pixels of 16 or 32 bytes, whatever its type. Its first
    dimension counts pixels along the width, its last but one slices of channels, and its last images. A box has one slice: what
    `box_dims` says of slices is not read, and neither is their element stride. An H100 copied such boxes:
    tests/golden/interleaved_h100.json.xz.

    Args:
        data: The array that contains the tensor, whose contents `run` returns; or an int, the number of the argument that is that array.
        dtype: "f16", "bf16", "f32", "f32_ftz", "tf32", "tf32_ftz", "f64", "u8", "e4m3", "e5m2", "u16", "u32", "s32", "u64", "s64", "b4x16"
            for packed elements of 4 bits, or "b4x16_p64" and "b6x16_p32" for packed elements of 4 and 6 bits, padded in shared memory.
        global_dims: Elements along each dimension, 1 to 5 dimensions, innermost first as in `cuTensorMapEncodeTiled`.
        box_dims: Elements of the box that one copy moves; of an im2col map the channels of a pixel and the pixels of a column.
        global_strides: Bytes from one element to the next along each dimension but the first; None: no gaps.
        element_strides: Strides in elements; None: all 1.
        swizzle: 0, 32, 64 or 128 bytes.
        swizzle_atom: Bytes that stay together: 16; for the swizzle of 128 also 32 or 64 (SWIZZLE_128B_ATOM_32B, _ATOM_64B).
        offset: Byte of `data` at which the tensor begins.
        swizzle_flip: True for SWIZZLE_128B_ATOM_32B_FLIP_8B: the halves of each 16 bytes change places in odd lines of 128 bytes, where
            the driver's documentation says "every alternate row".
        corners: Lower and upper corner of the bounding box of the pixels, width first, for an im2col map as cuTensorMapEncodeIm2col makes
            it. Its `element_strides` are the steps from one pixel to the next. None: a map of boxes.
        nan_fill: True for CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA, with a floating-point type of 16 bits or more.
        interleave: 0, or the bytes of a pixel: 16 or 32. Interleaved tensors have 3 to 5 dimensions.

    Raises:
        ValueError: cuTensorMapEncodeTiled rejects the arguments.

    Source: CUDA driver API, tensor map object management; PTX ISA 5.5.
    """

    data: Any = field(repr=False)
    dtype: str
    global_dims: Sequence[int]
    box_dims: Sequence[int]
    global_strides: Sequence[int] | None = None
    element_strides: Sequence[int] | None = None
    swizzle: int = 0
    offset: int = 0
    swizzle_atom: int = 16
    swizzle_flip: bool = False
    corners: tuple[Sequence[int], Sequence[int]] | None = None
    nan_fill: bool = False
    interleave: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in BITS:
            raise ValueError(f"dtype: got {self.dtype!r}; expected one of {', '.join(BITS)}. {SECTION}")
        if self.nan_fill and self.dtype not in FLOATS:
            raise ValueError(f"nan_fill: elements of {self.dtype} have no NaN to fill with; {', '.join(FLOATS)} do. {SECTION}")
        rank = len(self.global_dims)
        if not 1 <= rank <= MAX_RANK:
            raise ValueError(f"global_dims: got {rank} dimensions; expected 1 to {MAX_RANK}. {SECTION}")
        _check_integers("global_dims", self.global_dims, rank, 1, DIMENSION_LIMIT - 1)
        if self.corners is None:
            _check_integers("box_dims", self.box_dims, rank, 1, MAX_BOX)
        else:
            self._check_corners(rank, self.corners)
        _check_integers("element_strides", self.element_steps, rank, 1, MAX_ELEMENT_STRIDE)
        if self.interleave:
            self._check_interleave(rank)
        unit = max(UNIT_BYTES, self.interleave)
        _check_integers("global_strides", self.strides, rank - 1, unit, STRIDE_LIMIT - unit, unit)
        _check_integers("offset", (self.offset,), 1, 0, STRIDE_LIMIT, unit)
        if self.swizzle not in SWIZZLES:
            raise ValueError(f"swizzle: got {self.swizzle}; expected one of {', '.join(map(str, SWIZZLES))}, in bytes. {SECTION}")
        if self.swizzle_atom not in (16, 32, 64) or (self.swizzle_atom != 16 and self.swizzle != 128):
            raise ValueError(f"swizzle_atom: got {self.swizzle_atom}; expected 16, or 32 or 64 with swizzle=128. {SECTION}")
        if self.swizzle_flip and self.swizzle_atom != 32:
            raise ValueError(f"swizzle_flip: expected swizzle_atom=32, got {self.swizzle_atom}. {SECTION}")
        row = self.box_dims[0] * self.bits // 8
        if self.dtype in PADDED:
            row = self._check_padded()
        elif self.box_dims[0] * self.bits % (8 * UNIT_BYTES):
            raise ValueError(f"box_dims: the innermost one has {row} bytes; expected a multiple of {UNIT_BYTES}. {SECTION}")
        if self.swizzle and row > self.swizzle and not self.interleave:
            raise ValueError(f"box_dims: the innermost one has {row} bytes; the swizzle takes at most {self.swizzle}. {SECTION}")

    def _check_corners(self, rank: int, corners: tuple[Sequence[int], Sequence[int]]) -> None:
        """Raise ValueError for an im2col map that cuTensorMapEncodeIm2col rejects."""
        if rank not in CORNER_BITS:
            raise ValueError(f"global_dims: got {rank} dimensions; an im2col map has 3, 4 or 5. {IM2COL_SECTION}")
        if len(self.box_dims) != 2:
            raise ValueError(f"box_dims: got {len(self.box_dims)} numbers; an im2col map has channels and pixels. {IM2COL_SECTION}")
        _check_integers("box_dims", self.box_dims[:1], 1, 1, MAX_BOX)
        _check_integers("box_dims", self.box_dims[1:], 1, 1, MAX_PIXELS)
        limit = 1 << CORNER_BITS[rank] - 1
        for name, corner in zip(("lower corner", "upper corner"), corners, strict=True):
            _check_integers(f"corners: the {name}", corner, rank - 2, -limit, limit - 1)

    def _check_interleave(self, rank: int) -> None:
        """Raise ValueError for an interleaved map that the driver rejects, or of which no recording exists."""
        if self.interleave not in INTERLEAVES:
            raise ValueError(f"interleave: got {self.interleave}; expected one of {', '.join(map(str, INTERLEAVES))}, in bytes. {SECTION}")
        if rank < LEAST_INTERLEAVED:
            raise ValueError(f"global_dims: got {rank} dimensions; an interleaved map has {LEAST_INTERLEAVED} to {MAX_RANK}. {SECTION}")
        if self.corners is not None or self.bits < 8:
            what = "im2col maps" if self.corners is not None else f"elements of {self.dtype}"
            raise ValueError(f"interleave: tcemu interleaves boxes of elements of 8 bits or more; nothing is recorded of {what}. {SECTION}")

    def _check_padded(self) -> int:
        """Return the bytes of a row in shared memory of a padded type. Raises ValueError for what the driver rejects."""
        if self.box_dims[0] != PADDED_ROW or self.global_dims[0] % PADDED_ROW:
            raise ValueError(f"box_dims, global_dims: a row of {self.dtype} has {PADDED_ROW} elements, or a multiple. {SECTION}")
        if any(stride % 32 for stride in self.strides) or self.offset % 32 or self.swizzle not in (0, 128) or self.swizzle_atom == 64:
            raise ValueError(
                f"{self.dtype}: strides and offset are multiples of 32 bytes, and the swizzle is 0 or 128 in atoms of 16 or 32. {SECTION}"
            )
        return PADDED_ROW

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return BITS[self.dtype]

    @property
    def strides(self) -> tuple[int, ...]:
        """`global_strides` in bytes, or the strides without gaps."""
        if self.global_strides is not None:
            return tuple(self.global_strides)
        return tuple(int(np.prod(self.global_dims[:axis])) * self._first_bits // 8 for axis in range(1, len(self.global_dims)))

    @property
    def _first_bits(self) -> int:
        """Bits from one place along the first dimension to the next: of an element, or of a pixel."""
        return 8 * self.interleave or self.bits

    @property
    def element_steps(self) -> tuple[int, ...]:
        """`element_strides`; the stride of the innermost dimension is ignored, and 1, unless that dimension counts pixels."""
        steps = tuple(self.element_strides or (1,) * len(self.global_dims))
        return steps if self.interleave else (1, *steps[1:])

    @property
    def end_byte(self) -> int:
        """The byte of `data` behind the tensor."""
        extent = sum((count - 1) * stride for count, stride in zip(self.global_dims[1:], self.strides, strict=True))
        return self.offset + extent + -(-self.global_dims[0] * self._first_bits // 8)

    def encode(self, address: int, nbytes: int) -> np.ndarray:
        """Encode the map as an opaque object of 128 bytes.

        The words have a layout of tcemu's own, since programs treat the object as opaque.

        Args:
            address: Address of `data`.
            nbytes: Bytes of `data`.

        Returns:
            uint32[32].

        Raises:
            ValueError: The tensor does not fit in `data`.
        """
        if self.end_byte > nbytes:
            raise ValueError(f"tensor map: the tensor ends at byte {self.end_byte}, but its array has {nbytes}. {SECTION}")
        words = np.zeros(MAP_BYTES // 4, np.uint32)
        rank, start = len(self.global_dims), address + self.offset
        words[0] = MAGIC
        atom = FLIPPING_ATOM if self.swizzle_flip else ATOMS.index(self.swizzle_atom)
        kind = rank | (IM2COL if self.corners is not None else 0)
        numbers = kind, TYPE_NUMBERS[self.dtype], SWIZZLES.index(self.swizzle), atom
        words[KIND_WORD] = sum(number << FIELD_SHIFTS[name] for name, number in zip(FIELD_SHIFTS, numbers, strict=True))
        words[FILL_WORD], words[INTERLEAVE_WORD] = self.nan_fill, INTERLEAVES.index(self.interleave)
        words[ADDRESS_WORD : ADDRESS_WORD + 2] = start & 0xFFFFFFFF, start >> 32
        words[DIMENSION_WORDS : DIMENSION_WORDS + MAX_RANK] = 1
        words[DIMENSION_WORDS : DIMENSION_WORDS + rank] = self.global_dims
        for axis, stride in enumerate(self.strides):
            words[STRIDE_WORDS + 2 * axis : STRIDE_WORDS + 2 * axis + 2] = stride & 0xFFFFFFFF, stride >> 32
        words[BOX_WORDS : BOX_WORDS + MAX_RANK] = 1
        words[BOX_WORDS : BOX_WORDS + len(self.box_dims)] = self.box_dims
        for axis, (low, high) in enumerate(zip(*(self.corners or ((), ())), strict=True)):
            words[CORNER_WORDS + axis] = low & 0xFFFF | (high & 0xFFFF) << 16
        words[ELEMENT_STRIDE_WORDS : ELEMENT_STRIDE_WORDS + MAX_RANK] = 1
        words[ELEMENT_STRIDE_WORDS : ELEMENT_STRIDE_WORDS + rank] = self.element_steps
        return words


def _check_integers(name: str, values: Sequence[int], count: int, least: int, most: int, multiple: int = 1) -> None:
    """Raise ValueError unless there are `count` integers within the limits."""
    if len(values) != count:
        raise ValueError(f"{name}: got {len(values)} numbers; expected {count}. {SECTION}")
    for value in values:
        if not isinstance(value, int | np.integer) or not least <= value <= most or value % multiple:
            kind = f"multiples of {multiple}" if multiple > 1 else "integers"
            raise ValueError(f"{name}: got {value!r}; expected {kind} from {least} to {most}. {SECTION}")
