"""The bits of a CUtensorMap as an H200's driver writes them, packed here from the arguments: what `decode_tensor_map` takes apart."""

import json
import lzma
from pathlib import Path

import numpy as np

RECORDING = Path(__file__).parents[1] / "golden" / "ptx_h200.json.xz"
TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz")  # CUtensorMapDataType
NUMBERS = {"f32_ftz": 8, "f64": 9, "bf16": 10, "tf32": 7, "tf32_ftz": 8}  # in the object, where they are not those of the driver


def recording():
    return json.loads(lzma.decompress(RECORDING.read_bytes()))


def encode(kind, address, dims, strides, box, steps, swizzle=0, interleave=0, fill=0, low=(), high=(), pixels=0, mode=0):
    """The first 64 bytes. swizzle, interleave: numbers of the driver's enumerations; box: of an im2col map the channels alone."""
    strides = [stride // 16 for stride in (*strides, *[0] * (4 - len(strides)))]
    dims, steps = [size - 1 for size in (*dims, *[1] * 5)][:5], [step - 1 for step in (*steps, *[1] * 5)][1:5]
    words = np.zeros(16, np.uint32)
    words[0], words[1] = address & 0xFFFFFFFF, address >> 32
    number = NUMBERS.get(kind, TYPES.index(kind))
    rounded = kind.startswith("tf32")
    im2col = len(low) > 0
    rank = len([*low, 0, 0]) if im2col else len(box)
    words[2] = (1 if im2col else mode) | rank - 1 << 4 | number << 7 | interleave << 11 | swizzle << 13 | fill << 15 | rounded << 16
    words[3:7] = [stride & 0xFFFFFFFF for stride in strides]
    words[7] = sum((stride >> 32) << 4 * axis for axis, stride in enumerate(strides))
    words[8:13] = dims
    words[13] = sum(step << 3 + 3 * axis for axis, step in enumerate(steps)) | box[0] - 1 << 24
    if im2col:
        bits = {1: 16, 2: 8, 3: 5}[len(low)]
        corners = [sum((value & (1 << bits) - 1) << bits * axis for axis, value in enumerate(corner)) for corner in (low, high)]
        words[14], words[15] = corners[0] | corners[1] << 16, pixels - 1
    else:
        words[14] = sum(size - 1 << 8 * axis for axis, size in enumerate(box[1:]))
    return words.tobytes()
