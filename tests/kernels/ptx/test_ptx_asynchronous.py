"""mbarriers, asynchronous copies and tensor maps: kernels that nvcc compiled, against NumPy; and what is refused."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu import ptx
from tcemu.base.errors import UndefinedBehaviour

MODULE = ptx.parse((Path(__file__).parents[2] / "ptx_files" / "asynchronous.ptx").read_text())
KINDS = {"f16": np.uint16, "u8": np.uint8, "f32": np.uint32, "f64": np.uint64}


def launch_entry(entry, **launch):
    return ptx.run(MODULE, entry=entry, target="sm_90a", checked=launch.pop("checked", False), **launch)


def words(*shape, seed=0, dtype=np.uint32):
    return np.random.default_rng(seed).integers(0, 1 << 31, shape).astype(dtype)


def test_two_warps_hand_over_numbers_through_a_ring():
    rounds, blocks = 5, 3
    given = words(blocks, rounds, 32)
    _, found = launch_entry("ring", grid=blocks, block=64, args=[given, np.zeros((blocks, 32), np.uint32), rounds])
    sums = np.zeros((blocks, 32), np.uint32)
    for round_ in range(rounds):
        sums = sums * np.uint32(5) + given[:, round_, ::-1] * np.uint32(3)
    assert np.count_nonzero(found != sums) == 0


def test_runs_of_bytes_go_to_shared_memory_and_back():
    given = words(3, 600)
    _, found = launch_entry("bulk", grid=3, block=64, args=[given, np.zeros_like(given), 600], shared_bytes=4 * 1200)
    assert np.count_nonzero(found != given[:, ::-1]) == 0


@pytest.mark.parametrize("read", [1000, 3, 0])
def test_small_copies_fill_with_zeros(read):
    """Each thread copies 16 bytes of an array that ends within the last ones; nothing beyond src-size is read."""
    given = words(1000, dtype=np.uint8)
    _, found = launch_entry("small", grid=1, block=64, args=[given, np.zeros(1024, np.uint8), read])
    wanted = np.where(np.arange(1024) < read, np.pad(given, (0, 24)), 0).reshape(64, 16)[::-1].ravel()
    assert np.count_nonzero(found != wanted) == 0


def test_a_byte_of_a_small_copy_that_lies_outside_is_named():
    with pytest.raises(ptx.OutOfBounds, match=r"1 bytes of global memory .* byte 1000 of small_param_0"):
        launch_entry("small", grid=1, block=64, args=[words(1000, dtype=np.uint8), np.zeros(1024, np.uint8), 1003])


BOX_BYTES, ROW_BYTES, HEIGHT, BLOCKS = 1024, 160, 21, (5, 3)


BOXES = list(product(KINDS, (0, 32, 64, 128)))


@pytest.mark.parametrize("case", sample_cases(BOXES, [("u8", 0), ("f32", 32), ("f64", 64), ("f16", 128)], str))
def test_boxes_of_tensors(case):
    """Shared memory unit by unit, and the stored tensor, for boxes that extend beyond each edge at odd coordinates."""
    dtype, swizzle = case
    size = np.dtype(KINDS[dtype]).itemsize
    width, columns = ROW_BYTES // size, (swizzle or 64) // size
    rows, dx, dy = BOX_BYTES // (columns * size), width // 4 + 1, 9
    tensor = words(HEIGHT, width, dtype=KINDS[dtype])
    maps = [ptx.TensorMap(data, dtype, (width, HEIGHT), (columns, rows), swizzle=swizzle) for data in (tensor, np.zeros_like(tensor))]
    args = [*maps, np.zeros((BLOCKS[0] * BLOCKS[1], BOX_BYTES // 4), np.uint32), BOX_BYTES, dx, dy]
    _, stored, seen = launch_entry("box", grid=BLOCKS, block=32, args=args, shared_bytes=BOX_BYTES)
    padded = np.pad(tensor, 160)
    covered = np.zeros(padded.shape, bool)
    unit = np.arange(BOX_BYTES // 16)
    placed = unit ^ (unit >> 3 & max(swizzle // 16 - 1, 0))  # the manual's patterns, on addresses that begin at 0
    wrong = 0
    for block, of_block in enumerate(seen):
        y, x = block // BLOCKS[0] * dy - 2 + 160, block % BLOCKS[0] * dx - 3 + 160
        inside = padded[y : y + rows, x : x + columns]
        covered[y : y + rows, x : x + columns] = True
        wrong += np.count_nonzero(of_block.reshape(-1, 4)[placed] != np.frombuffer(inside.tobytes(), np.uint32).reshape(-1, 4))
    assert wrong == 0
    assert np.count_nonzero(stored != np.where(covered[160:-160, 160:-160], tensor, 0)) == 0


@pytest.mark.full
def test_boxes_of_five_dimensions_with_element_strides():
    """A box of every second plane, with strides that leave gaps, in both directions."""
    source = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry e(.param .align 64 .b8 from[128], .param .align 64 .b8 to[128]) {
    .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .pred %p;
    .shared .align 128 .b8 tile[384];
    .shared .align 8 .b64 object;
    mov.u32 %r1, tile; mov.u32 %r2, object; mov.u32 %r3, %tid.x;
    mov.b64 %rd1, from; cvta.param.u64 %rd1, %rd1; mov.b64 %rd2, to; cvta.param.u64 %rd2, %rd2;
    setp.ne.u32 %p, %r3, 0;
    @%p ret;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    mbarrier.arrive.expect_tx.relaxed.cta.shared::cta.b64 %rd3, [%r2], 384;
    cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint
        [%r1], [%rd1, {1, 1, 0, 1, -1}], [%r2], %rd3;
WAIT: mbarrier.test_wait.acquire.cta.shared::cta.b64 %p, [%r2], %rd3;
    @!%p bra WAIT;
    cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%rd2, {1, 1, 0, 1, -1}], [%r1];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
}"""
    tensor = words(2, 3, 4, 3, 8)  # outermost first
    strides = tuple(int(stride) for stride in tensor.strides[-2::-1])
    geometry = {"global_dims": (7, 3, 3, 3, 2), "global_strides": strides, "box_dims": (4, 2, 4, 2, 3), "element_strides": (1, 1, 2, 1, 1)}
    maps = [ptx.TensorMap(data, "u32", **geometry) for data in (tensor, np.zeros_like(tensor))]
    _, stored = ptx.run(source, grid=1, block=32, args=maps, target="sm_90a", checked=True)
    wanted = np.zeros_like(tensor)
    wanted[0:2, 1:3, 0:3:2, 1:3, 1:5] = tensor[0:2, 1:3, 0:3:2, 1:3, 1:5]
    assert np.count_nonzero(stored != wanted) == 0 and wanted.any()


@pytest.mark.full
def test_a_product_by_wgmma_whose_operands_tensor_maps_load():
    """Two stages, a producer and a consumer warpgroup, 2 x 2 blocks; no word differs from `tcemu.gemm`."""
    m, n, k = 128, 128, 192
    a, b = (np.random.default_rng(seed).standard_normal(shape).astype(np.float16) for seed, shape in enumerate(((m, k), (n, k))))
    maps = [ptx.TensorMap(x, "f16", (k, x.shape[0]), (64, 64), swizzle=128) for x in (a, b)]
    *_, c = launch_entry("product", grid=(2, 2), block=256, args=[*maps, np.zeros((m, n), np.float32), k], shared_bytes=4 * 64 * 64 * 2)
    wanted = tcemu.gemm(a, b.T, op="wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16", target="sm_90a")
    assert np.count_nonzero(c.view(np.uint32) != np.asarray(wanted).view(np.uint32)) == 0


WRONG_MAPS = {
    "dtype": ({"dtype": "f8"}, "expected one of u8"),
    "rank": ({"global_dims": ()}, "expected 1 to 5"),
    "box_dims": ({"box_dims": (4, 2)}, "has 8 bytes; expected a multiple of 16"),
    "swizzle": ({"box_dims": (32, 2), "swizzle": 32}, "has 64 bytes; the swizzle takes at most 32"),
    "global_strides": ({"global_strides": (24,)}, "got 24; expected multiples of 16"),
    "element_strides": ({"element_strides": (1, 9)}, "expected integers from 1 to 8"),
    "offset": ({"offset": 8}, "expected multiples of 16"),
}


@pytest.mark.parametrize("name", WRONG_MAPS)
def test_maps_that_are_refused(name):
    changed, said = WRONG_MAPS[name]
    given = {"dtype": "f16", "global_dims": (32, 4), "box_dims": (8, 2)} | changed
    with pytest.raises(ValueError, match=said):
        ptx.TensorMap(np.zeros((4, 32), np.uint16), **given)


def test_maps_as_arguments():
    """One array for two maps; a map that extends beyond its array; a map for a parameter that takes none."""
    out, small = np.zeros((1, 256), np.uint32), np.zeros(64, np.uint16)
    whole = ptx.TensorMap(2, "u32", (256,), (16,))
    with pytest.raises(ValueError, match="points into 5; expected an array, or the number of an argument"):
        launch_entry("box", grid=1, block=32, args=[ptx.TensorMap(5, "u32", (256,), (16,)), whole, out, 1024, 1, 1])
    with pytest.raises(ValueError, match="ends at byte 512, but its array has 128"):
        launch_entry("box", grid=1, block=32, args=[ptx.TensorMap(small, "f16", (256,), (16,)), whole, out, 1024, 1, 1])
    with pytest.raises(TypeError, match="got a TensorMap, which has 128 bytes; the parameter has 8"):
        launch_entry("bulk", grid=1, block=32, args=[out, whole, 16])
    # memory of the sizes of the other boxes, so that nothing is compiled again
    tensor, seen = words(HEIGHT, ROW_BYTES // 4), np.zeros(BLOCKS[0] * BLOCKS[1] * BOX_BYTES // 4 + 896, np.uint32)
    line = ptx.TensorMap(tensor, "u32", (256,), (16,))
    for maps, out, said in (
        ([line, line], seen[:-896], "the tensor map has another rank"),
        ([bytes(128), line], seen, "there is no tensor map"),
    ):
        with pytest.raises(UndefinedBehaviour, match=said):
            launch_entry("box", grid=BLOCKS, block=32, args=[*maps, out, BOX_BYTES, 1, 1], shared_bytes=BOX_BYTES)
