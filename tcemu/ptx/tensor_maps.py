"""The tensor map of TMA copies: which box of which tensor `cp.async.bulk.tensor` copies, and how it lies in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BYTES = 128  # of the opaque object
ALIGNMENT = 64
MAGIC = 0x7CE37A90  # its first word: the object is one of ours
BITS = {  # the data types of cuTensorMapEncodeTiled that are copied as they are
    **{name: 8 for name in ("u8", "e4m3", "e5m2")},
    **{name: 16 for name in ("u16", "f16", "bf16")},
    **{name: 32 for name in ("u32", "s32", "f32")},
    **{name: 64 for name in ("u64", "s64", "f64")},
}
SWIZZLES = (0, 32, 64, 128)
RANKS, BOX, ELEMENT_STRIDE, DIMENSION, STRIDE = 5, 256, 8, 1 << 32, 1 << 40  # limits
UNIT = 16  # bytes: of a copy's rows and of strides
SECTION = "CUDA driver API, cuTensorMapEncodeTiled"
# words of the encoded object, each a run of RANKS
KIND, ADDRESS, DIMENSIONS, STRIDES, BOXES, ELEMENT_STRIDES = 1, 2, 4, 9, 19, 24


@dataclass(frozen=True)
class TensorMap:
    """A tensor map, to be passed to `tcemu.ptx.run` as the argument of a parameter `.param .align 64 .b8 map[128]`.

    data: the array that the tensor lies in, whose contents come back in the map's place; or an int, the number of the argument that is that
    array. The rest is as in `cuTensorMapEncodeTiled`, innermost dimension first. dtype: "f16", "bf16", "f32", "f64", "u8", "e4m3", "e5m2",
    "u16", "u32", "s32", "u64", "s64". global_dims: elements along each dimension, 1 to 5 of them. global_strides: bytes from one element to
    the next along each dimension but the first; None: without gaps. box_dims: of the box that one copy moves. element_strides: None: all 1.
    swizzle: 0, 32, 64 or 128 bytes. offset: where the tensor begins in `data`, in bytes.
    What lies outside the tensor is filled with zeros, and not stored. Interleaved layouts, im2col boxes, the fill with NaN, and the types
    that round (TFLOAT32) or flush (FTZ) are not there.
    Raises ValueError for what cuTensorMapEncodeTiled refuses.
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

    def __post_init__(self) -> None:
        if self.dtype not in BITS:
            raise ValueError(f"dtype: got {self.dtype!r}; wanted one of {', '.join(BITS)}. {SECTION}")
        rank = len(self.global_dims)
        if not 1 <= rank <= RANKS:
            raise ValueError(f"global_dims: got {rank} dimensions; wanted 1 to {RANKS}. {SECTION}")
        _each("global_dims", self.global_dims, rank, 1, DIMENSION - 1)
        _each("box_dims", self.box_dims, rank, 1, BOX)
        _each("element_strides", self.steps, rank, 1, ELEMENT_STRIDE)
        _each("global_strides", self.strides, rank - 1, UNIT, STRIDE - UNIT, UNIT)
        _each("offset", (self.offset,), 1, 0, STRIDE, UNIT)
        if self.swizzle not in SWIZZLES:
            raise ValueError(f"swizzle: got {self.swizzle}; wanted one of {', '.join(map(str, SWIZZLES))}, in bytes. {SECTION}")
        row = self.box_dims[0] * self.size
        if row % UNIT:
            raise ValueError(f"box_dims: the innermost one has {row} bytes; wanted a multiple of {UNIT}. {SECTION}")
        if self.swizzle and row > self.swizzle:
            raise ValueError(f"box_dims: the innermost one has {row} bytes; the swizzle takes at most {self.swizzle}. {SECTION}")

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return BITS[self.dtype] // 8

    @property
    def strides(self) -> tuple[int, ...]:
        """`global_strides`, in bytes; without gaps if they were left out."""
        if self.global_strides is not None:
            return tuple(self.global_strides)
        return tuple(int(np.prod(self.global_dims[:axis])) * self.size for axis in range(1, len(self.global_dims)))

    @property
    def steps(self) -> tuple[int, ...]:
        """`element_strides`; that of the innermost dimension does not count, and is 1."""
        return (1, *self.element_strides[1:]) if self.element_strides is not None else (1,) * len(self.global_dims)

    @property
    def extent(self) -> int:
        """The byte of `data` at which the tensor ends."""
        reach = sum((count - 1) * stride for count, stride in zip(self.global_dims[1:], self.strides, strict=True))
        return self.offset + reach + self.global_dims[0] * self.size

    def encoded(self, address: int, nbytes: int) -> np.ndarray:
        """The object of 128 bytes, uint32[32], for `data` of so many bytes at an address. ValueError if the tensor does not fit.

        The words are our own: programs see them as opaque.
        """
        if self.extent > nbytes:
            raise ValueError(f"tensor map: the tensor ends at byte {self.extent}, but its array has {nbytes}. {SECTION}")
        words = np.zeros(BYTES // 4, np.uint32)
        rank, start = len(self.global_dims), address + self.offset
        words[0] = MAGIC
        words[KIND] = rank | self.size << 8 | self.swizzle << 16
        words[ADDRESS : ADDRESS + 2] = start & 0xFFFFFFFF, start >> 32
        words[DIMENSIONS : DIMENSIONS + RANKS] = 1
        words[DIMENSIONS : DIMENSIONS + rank] = self.global_dims
        for axis, stride in enumerate(self.strides):
            words[STRIDES + 2 * axis : STRIDES + 2 * axis + 2] = stride & 0xFFFFFFFF, stride >> 32
        words[BOXES : BOXES + RANKS] = 1
        words[BOXES : BOXES + rank] = [-(-box // step) for box, step in zip(self.box_dims, self.steps, strict=True)]
        words[ELEMENT_STRIDES : ELEMENT_STRIDES + RANKS] = 1
        words[ELEMENT_STRIDES : ELEMENT_STRIDES + rank] = self.steps
        return words


def _each(name: str, values: Sequence[int], count: int, least: int, most: int, multiple: int = 1) -> None:
    """Raises ValueError unless there are so many integers within the limits."""
    if len(values) != count:
        raise ValueError(f"{name}: got {len(values)} numbers; wanted {count}. {SECTION}")
    for value in values:
        if not isinstance(value, int | np.integer) or not least <= value <= most or value % multiple:
            kind = f"multiples of {multiple}" if multiple > 1 else "integers"
            raise ValueError(f"{name}: got {value!r}; wanted {kind} from {least} to {most}. {SECTION}")
