"""mbarriers, asynchronous copies and tensor maps: kernels that nvcc compiled, against NumPy; and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from support.sampling import sampled

import tcemu
from tcemu import ptx

MODULE = ptx.parse((Path(__file__).parent / "kernels" / "asynchronous.ptx").read_text())
KINDS = {"f16": np.uint16, "u8": np.uint8, "f32": np.uint32, "f64": np.uint64}


def launched(entry, **launch):
    return ptx.run(MODULE, entry=entry, target="sm_90a", checked=launch.pop("checked", False), **launch)


def words(*shape, seed=0, dtype=np.uint32):
    return np.random.default_rng(seed).integers(0, 1 << 31, shape).astype(dtype)


def test_two_warps_hand_over_numbers_through_a_ring():
    rounds, blocks = 5, 3
    given = words(blocks, rounds, 32)
    _, found = launched("ring", grid=blocks, block=64, args=[given, np.zeros((blocks, 32), np.uint32), rounds])
    sums = np.zeros((blocks, 32), np.uint32)
    for round_ in range(rounds):
        sums = sums * np.uint32(5) + given[:, round_, ::-1] * np.uint32(3)
    assert np.count_nonzero(found != sums) == 0


def test_runs_of_bytes_go_to_shared_memory_and_back():
    given = words(3, 600)
    _, found = launched("bulk", grid=3, block=64, args=[given, np.zeros_like(given), 600], shared_bytes=4 * 1200)
    assert np.count_nonzero(found != given[:, ::-1]) == 0


@pytest.mark.parametrize("read", [1000, 1024, 3])
def test_small_copies_fill_with_zeros(read):
    given = words(1024, dtype=np.uint8)
    _, found = launched("small", grid=1, block=64, args=[given[: max(read, 16)], np.zeros_like(given), read])
    wanted = np.where(np.arange(1024) < read, given, 0).reshape(64, 16)[::-1].ravel()
    assert np.count_nonzero(found != wanted) == 0


BOXES = [(dtype, swizzle) for dtype in KINDS for swizzle in (0, 32, 64, 128)]


@pytest.mark.parametrize("case", sampled(BOXES, [("f16", 128), ("u8", 32)]))
def test_boxes_of_tensors(case):
    """What lies in shared memory, unit by unit, and what is stored; boxes that reach beyond each edge, at odd places."""
    dtype, swizzle = case
    size = np.dtype(KINDS[dtype]).itemsize
    height, width, rows, columns, dx, dy = 21, 160 // size, 8, (swizzle or 48) // size, 5, 9
    tensor = words(height, width, dtype=KINDS[dtype])
    maps = [ptx.TensorMap(data, dtype, (width, height), (columns, rows), swizzle=swizzle) for data in (tensor, np.zeros_like(tensor))]
    blocks = (-(-width // dx) + 1, 3)
    count, bytes_ = blocks[0] * blocks[1], rows * columns * size
    args = [*maps, np.zeros((count, bytes_ // 4), np.uint32), bytes_, dx, dy]
    _, stored, seen = launched("box", grid=blocks, block=32, args=args, shared_bytes=bytes_)
    padded = np.pad(tensor, 64)
    covered = np.zeros(padded.shape, bool)
    wrong = 0
    for block in range(count):
        y, x = block // blocks[0] * dy - 2 + 64, block % blocks[0] * dx - 3 + 64
        inside = padded[y : y + rows, x : x + columns]
        covered[y : y + rows, x : x + columns] = True
        unit = np.arange(bytes_ // 16)
        placed = unit ^ (unit >> 3 & max(swizzle // 16 - 1, 0))  # the manual's patterns, on addresses that begin at 0
        wrong += np.count_nonzero(seen[block].reshape(-1, 4)[placed] != np.frombuffer(inside.tobytes(), np.uint32).reshape(-1, 4))
    assert wrong == 0
    assert np.count_nonzero(stored != np.where(covered[64:-64, 64:-64], tensor, 0)) == 0


def test_a_product_by_wgmma_whose_operands_tensor_maps_load():
    """Two stages, a producer and a consumer warpgroup, 2 x 2 blocks; 0 words differ from `tcemu.gemm`."""
    m, n, k = 128, 128, 192
    a, b = (np.random.default_rng(seed).standard_normal(shape).astype(np.float16) for seed, shape in enumerate(((m, k), (n, k))))
    maps = [ptx.TensorMap(x, "f16", (k, x.shape[0]), (64, 64), swizzle=128) for x in (a, b)]
    *_, c = launched("product", grid=(2, 2), block=256, args=[*maps, np.zeros((m, n), np.float32), k], shared_bytes=4 * 64 * 64 * 2)
    wanted = tcemu.gemm(a, b.T, op="wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16", target="sm_90a")
    assert np.count_nonzero(c.view(np.uint32) != np.asarray(wanted).view(np.uint32)) == 0
