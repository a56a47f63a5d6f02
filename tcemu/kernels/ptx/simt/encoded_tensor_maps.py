"""The 128 bytes of a CUtensorMap, as NVIDIA's driver and the host code of CuTe DSL encode it, turned into a `TensorMap`.

Source: read from what cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col write on an H200 (driver for CUDA 13.0): the arguments of 6,500
random maps are found again, tests/golden/tensor_maps_h200.json.xz has a sample. The host code of CuTe DSL 4.8 for sm_100a writes the same
fields.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from tcemu.base.errors import NotModelled
from tcemu.kernels.ptx.simt.tensor_maps import CORNER_BITS, ELEMENT_TYPES, INTERLEAVES, MAP_BYTES, MAX_RANK, SWIZZLES, TensorMap

WORDS = struct.Struct("<16Q")
BOXES, PIXELS, CUTE_BOXES = 0, 1, 2  # the lowest four bits: a map of boxes, one of im2col, and a map of boxes as CuTe DSL writes it
ROUNDED = {"f32": "tf32", "f32_ftz": "tf32_ftz"}  # types by those that have the same number, and bit ROUNDED_BIT besides
RANK, TYPE, INTERLEAVE, SWIZZLE, FILL, ROUNDED_BIT, PROMOTION = (4, 3), (7, 4), (11, 2), (13, 2), (15, 1), (16, 1), (17, 2)  # of word 1
KNOWN_BITS = {  # of the words that the hardware reads; the others are the driver's own
    0: (1 << 57) - 16, 1: (1 << 64) - (1 << 32) + (1 << 19) - 1, 2: (1 << 64) - 1, 3: (1 << 48) - 1, 4: (1 << 64) - 1, 5: (1 << 64) - 1,
    6: (0xFF << 56) + (0xFFF << 35) + (1 << 32) - 1, 7: (1 << 42) - 1,
}  # fmt: skip


class EncodedMap(NamedTuple):
    """A tensor map and the address of its tensor."""

    address: int
    tensor_map: TensorMap  # of an array that begins at that address; `data` is None


def decode_tensor_map(data: bytes) -> EncodedMap:
    """Decode a CUtensorMap.

    Args:
        data: Its 128 bytes.

    Returns:
        The map.

    Raises:
        NotModelled: A field has a value that no recorded map has, as in bytes that are no tensor map.
        ValueError: cuTensorMapEncodeTiled would reject the fields.
    """
    words = WORDS.unpack(data)
    kind = words[1] & 0xF
    unknown = [number for number, bits in KNOWN_BITS.items() if words[number] & ~bits]
    number, rank = _field(words[1], TYPE), _field(words[1], RANK) + 1
    if unknown or kind not in (BOXES, PIXELS, CUTE_BOXES) or rank > MAX_RANK or number >= len(ELEMENT_TYPES):
        raise NotModelled(f"these {MAP_BYTES} bytes are no tensor map as a driver was seen to write one: {data[:64].hex()}")
    name = ELEMENT_TYPES[number]
    if _field(words[1], ROUNDED_BIT):
        if name not in ROUNDED:
            raise NotModelled(f"a tensor map of {name} has the bit of tf32, which no recorded map has")
        name = ROUNDED[name]
    tops = [words[3] >> 32 + 4 * axis & 0xF for axis in range(MAX_RANK - 1)]
    lows = [words[1] >> 32, words[2] & 0xFFFFFFFF, words[2] >> 32, words[3] & 0xFFFFFFFF]
    strides = [16 * (low | top << 32) for low, top in zip(lows, tops, strict=True)]
    dimensions = [words[4], words[4] >> 32, words[5], words[5] >> 32, words[6]]
    steps = [1, *((words[6] >> 35 + 3 * axis & 7) + 1 for axis in range(MAX_RANK - 1))]
    shape: dict[str, Any] = {"box_dims": [(words[6] >> 56) + 1, *((words[7] >> 8 * axis & 0xFF) + 1 for axis in range(rank - 1))]}
    if kind == PIXELS:
        if rank not in CORNER_BITS:
            raise NotModelled(f"an im2col map of {rank} dimensions: {data[:64].hex()}")
        bits = CORNER_BITS[rank]
        corners = [[_signed(words[7] >> 16 * which + bits * axis, bits) for axis in range(rank - 2)] for which in (0, 1)]
        shape = {"box_dims": [(words[6] >> 56) + 1, (words[7] >> 32 & 0x3FF) + 1], "corners": tuple(corners)}
    tensor_map = TensorMap(
        None, name, [(size & 0xFFFFFFFF) + 1 for size in dimensions[:rank]], global_strides=strides[: rank - 1],
        element_strides=steps[:rank], swizzle=SWIZZLES[_field(words[1], SWIZZLE)], nan_fill=bool(_field(words[1], FILL)),
        interleave=INTERLEAVES[_field(words[1], INTERLEAVE)], **shape,
    )  # fmt: skip
    return EncodedMap(words[0], tensor_map)


def _field(word: int, place: tuple[int, int]) -> int:
    return word >> place[0] & (1 << place[1]) - 1


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value
