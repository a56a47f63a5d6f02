"""On a machine with an NVIDIA GPU: random tensor maps as its driver encodes them, by `python tests/gpu_runs/tensor_maps.py OUT`.

Writes arguments and objects to OUT/tmaps.json.xz. Enumerations are those of cuda.h, by their numbers. Of such a run
tests/golden/ptx_h200.json.xz has a sample.
"""

import ctypes
import json
import lzma
import random
import sys
from collections import Counter
from pathlib import Path

SIZES = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4]  # bytes by CUtensorMapDataType
FLOATS = (6, 7, 8, 9, 10, 11, 12)
CORNERS = {3: 32768, 4: 128, 5: 16}  # limits of a coordinate of a corner, by the rank
WANTED = {"tiled": 5000, "im2col": 1500}
U32, U64 = ctypes.c_uint32, ctypes.c_uint64


def draw(pick: random.Random, im2col: bool) -> dict:
    """Draw the arguments of a map. The driver rejects many of them."""
    kind = pick.randrange(16) if pick.random() < 0.2 else pick.randrange(13)
    rank = pick.randint(3, 5) if im2col else pick.randint(1, 5)
    interleave = pick.choice([0, 0, 0, 1, 2]) if rank >= 3 else 0
    swizzle = pick.choice([0, 1, 2, 3, 3, 4, 5, 6])
    unit = 32 if interleave == 2 or kind > 12 else 16
    bits = SIZES[kind] * 8 if kind < 13 else [4, 4, 6][kind - 13]
    span = {0: 256 * 8, 1: 32, 2: 64}.get(swizzle, 128) * 8
    most, step = max(min(256, span // bits), 1), max(128 // bits, 1)
    inner = 128 if kind > 13 else min(pick.randrange(step, max(most, step) + 1, step), 256)
    address = pick.randrange(0, 2 ** pick.randint(8, 56)) // 128 * 128 + pick.choice([0, 0, 16, 32, 64]) // unit * unit
    dims = [pick.randint(1, 2 ** pick.randint(0, 32)) for _ in range(rank)]
    dims[0] = max(dims[0] // 128, 1) * 128 if kind > 12 else dims[0]
    row = {
        "kind": kind, "address": address, "dims": dims, "interleave": interleave, "swizzle": swizzle, "l2": pick.randrange(4),
        "strides": [pick.randint(1, 2 ** pick.randint(0, 40) // unit + 1) * unit for _ in range(rank - 1)],
        "steps": [1] + [pick.choice([1, 1, 1, pick.randint(1, 8)]) for _ in range(rank - 1)],
        "fill": pick.choice([0, 0, 1]) if kind in FLOATS else 0,
    }  # fmt: skip
    if not im2col:
        return row | {"box": [inner] + [pick.choice([1, 8, 64, 128, 256, pick.randint(1, 256)]) for _ in range(rank - 1)]}
    limit = CORNERS[rank]
    low, high = ([pick.randint(-limit, limit - 1) for _ in range(rank - 2)] for _ in range(2))
    return row | {"low": low, "high": high, "channels": inner, "pixels": pick.randint(1, 1024)}


def encode(cuda: ctypes.CDLL, place: int, row: dict) -> int:
    """Encode a map at an address, and return the driver's status."""
    rank = len(row["dims"])
    first = ctypes.c_void_p(place), row["kind"], rank, U64(row["address"])
    shape = (U64 * rank)(*row["dims"]), (U64 * max(rank - 1, 1))(*row["strides"])
    last = (U32 * rank)(*row["steps"]), row["interleave"], row["swizzle"], row["l2"], row["fill"]
    if "box" in row:
        return cuda.cuTensorMapEncodeTiled(*first, *shape, (U32 * rank)(*row["box"]), *last)
    corners = [(ctypes.c_int * (rank - 2))(*row[name]) for name in ("low", "high")]
    return cuda.cuTensorMapEncodeIm2col(*first, *shape, *corners, U32(row["channels"]), U32(row["pixels"]), *last)


def main(out: Path) -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    cuda.cuInit(0)
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    cuda.cuCtxSetCurrent(context)
    room = ctypes.create_string_buffer(256)
    place = (ctypes.addressof(room) + 63) // 64 * 64
    pick, rows, statuses = random.Random(60), {name: [] for name in WANTED}, Counter()
    for number in range(60_000):
        name = "tiled" if number % 5 else "im2col"
        if len(rows[name]) < WANTED[name]:
            row = draw(pick, name == "im2col")
            ctypes.memset(place, 0xEE, 128)
            status = encode(cuda, place, row)
            statuses[name, status] += 1
            if status == 0:
                rows[name].append(row | {"object": ctypes.string_at(place, 128).hex()})
    print(statuses)
    (out / "tmaps.json.xz").write_bytes(lzma.compress(json.dumps(rows).encode()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
