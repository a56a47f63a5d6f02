"""Copies and reductions of tensors: gathered rows, im2col, padded and rounded types, and bulk copies with a mask of bytes."""

from itertools import product

import numpy as np
import pytest
from support.sampling import sample_cases

from tcemu import ptx
from tcemu.base.errors import NotModelled, UndefinedBehaviour, Unsupported

BYTES = 4096
KERNEL = """.version 8.8
.target {target}
.address_size 64
.visible .entry e(.param .align 64 .b8 map[128], .param .u64 given, .param .u64 out, .param .u32 size) {{
    .reg .b64 %rd<9>; .reg .b32 %r<16>; .reg .b16 %h<4>; .reg .pred %p<3>;
    .shared .align 1024 .b8 tile[{bytes}]; .shared .align 8 .b64 object;
    ld.param.u64 %rd1, [given]; ld.param.u64 %rd3, [out]; mov.u64 %rd2, map; cvta.param.u64 %rd2, %rd2; ld.param.u32 %r8, [size];
    mov.u32 %r2, tile; mov.u32 %r3, object; mov.u32 %r4, %tid.x; setp.eq.u32 %p1, %r4, 0; mov.u16 %h0, 1; mov.u16 %h1, 2; mov.u16 %h2, 0;
    mul.wide.u32 %rd5, %r4, {part}; add.u64 %rd1, %rd1, %rd5; add.u64 %rd3, %rd3, %rd5; mad.lo.u32 %r7, %r4, {part}, %r2;
    {fill}
    @%p1 mbarrier.init.shared.b64 [%r3], 1;
    fence.proxy.async.shared::cta; bar.warp.sync -1;
    {statement}
    {read}
    ret;
}}"""
PART = BYTES // 32
EVERY = range(0, PART, 16)
FILL = " ".join(
    f"ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd1+{at}]; st.shared.v4.b32 [%r7+{at}], {{%r10, %r11, %r12, %r13}};" for at in EVERY
)
READ = " ".join(
    f"ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r7+{at}]; st.global.v4.b32 [%rd3+{at}], {{%r10, %r11, %r12, %r13}};" for at in EVERY
)
LOAD = """@%p1 mbarrier.arrive.expect_tx.shared.b64 %rd4, [%r3], %r8;
    @%p1 cp.async.bulk.tensor.{dim}.shared::{to}.global.{mode}.mbarrier::complete_tx::bytes [%r2], [%rd2, {{{at}}}], [%r3]{offsets};
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
    @!%p2 bra WAIT;"""
DONE = "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"


def launch(statement, tensor, size=0, given=None, target="sm_100a", read=True):
    """Run a kernel of 32 threads; return the tensor's array and the bytes of shared memory."""
    text = KERNEL.format(
        target=target, bytes=BYTES, part=PART, fill=FILL, statement=statement, read=READ if read else "",
    )  # fmt: skip
    given = np.zeros(BYTES, np.uint8) if given is None else given
    found = ptx.run(text, grid=1, block=32, args=[tensor, given, np.zeros(BYTES, np.uint8), size], target=target)
    return np.asarray(found[0]), np.asarray(found[2])


def load(mode, dim, coordinates, tensor, size, offsets="", to="cluster", **options):
    at = ", ".join(map(str, coordinates))
    return launch(LOAD.format(dim=dim, to=to, mode=mode, at=at, offsets=offsets), tensor, size, **options)[1][:size]


def random_bytes(*shape):
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def random_halves(*shape):
    return np.random.default_rng(sum(shape)).integers(1, 1 << 16, shape, dtype=np.uint16)


ROWS = (7, 0, 12, 3)  # the third lies outside


@pytest.mark.full
def test_four_rows_are_gathered():
    data = random_halves(10, 64)
    found = load("tile::gather4", "2d", (16, *ROWS), ptx.TensorMap(data, "f16", (64, 10), (32, 1)), 256).view(np.uint16).reshape(4, 32)
    expected = np.array([data[row, 16:48] if row < 10 else np.zeros(32) for row in ROWS], np.uint16)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.full
def test_four_rows_are_scattered():
    data, given = random_halves(10, 64), random_bytes(BYTES)
    statement = f"@%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%rd2, {{40, 7, 0, 12, 3}}], [%r2]; {DONE}"
    found, _ = launch(statement, ptx.TensorMap(data, "f16", (64, 10), (32, 1)), given=given, read=False)
    expected, rows = data.copy(), given.view(np.uint16)[:128].reshape(4, 32)
    for row, values in zip(ROWS, rows, strict=True):
        if row < 10:
            expected[row, 40:64] = values[:24]
    np.testing.assert_array_equal(found, expected)


IM2COL = {  # sizes of the spatial dimensions, width first; lower and upper corner; steps; start; offsets
    "3d": ((9,), ((-1,), (-1,)), (1,), (3,), (2,)),
    "4d": ((6, 5), ((-1, -1), (-1, -1)), (1, 1), (2, -1), (1, 2)),
    "4d steps": ((7, 6), ((-1, 0), (-2, -1)), (2, 3), (1, 3), (0, 1)),
    "5d": ((4, 3, 2), ((-1, 0, 0), (0, -1, 0)), (1, 1, 1), (-1, 1, 0), (1, 1, 0)),
}


def pixels(sizes, corners, steps, start, count, image):
    """Yield the pixels of a column with their images, one after the other."""
    at, (lower, upper) = list(start), corners
    for _ in range(count):
        yield image, tuple(at)
        for i in range(len(sizes)):
            at[i] += steps[i]
            if at[i] <= sizes[i] - 1 + upper[i]:
                break
            at[i] = lower[i]
        else:
            image += 1


@pytest.mark.parametrize("name", sample_cases(IM2COL, {"4d steps"}))
def test_pixels_of_a_bounding_box(name):
    """Also behind the last image, whose pixels are zeros."""
    sizes, corners, steps, start, offsets = IM2COL[name]
    channels, count, images, first = 16, 40, 3, 1
    data = random_halves(images, *sizes[::-1], 24)
    tensor = ptx.TensorMap(
        data, "f16", (24, *sizes, images), (channels, count), element_strides=(1, *steps, 1), corners=corners, swizzle=32
    )  # fmt: skip
    given = "".join(f", {offset}" for offset in offsets)[2:]
    found = load("im2col", name[:2], (8, *start, first), tensor, 32 * count, f", {{{given}}}").view(np.uint16)
    expected = np.zeros((count, channels), np.uint16)
    for row, (image, at) in enumerate(pixels(sizes, corners, steps, start, count, first)):
        place = tuple(x + offset for x, offset in zip(at, offsets, strict=True))
        if image < images and all(0 <= x < size for x, size in zip(place, sizes, strict=True)):
            expected[row] = data[(image, *place[::-1])][8:24]
    swizzled = np.zeros_like(expected).ravel()
    for i, value in enumerate(expected.ravel()):
        byte = 2 * i
        swizzled[(byte ^ (byte >> 7 & 1) << 4) // 2] = value
    np.testing.assert_array_equal(found, swizzled)
    assert np.count_nonzero(expected) >= 90


@pytest.mark.full
def test_pixels_are_stored():
    sizes, corners, steps, start, _ = IM2COL["4d steps"]
    data, given = random_halves(3, *sizes[::-1], 24), random_bytes(BYTES)
    tensor = ptx.TensorMap(data, "f16", (24, *sizes, 3), (16, 10), element_strides=(1, *steps, 1), corners=corners)
    at = ", ".join(map(str, (8, *start, 1)))
    found, _ = launch(f"@%p1 cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%rd2, {{{at}}}], [%r2]; {DONE}", tensor,
                      given=given, read=False)  # fmt: skip
    expected, rows = data.copy(), given.view(np.uint16)[:160].reshape(10, 16)
    for row, (image, place) in enumerate(pixels(sizes, corners, steps, start, 10, 1)):
        if image < 3 and all(0 <= x < size for x, size in zip(place, sizes, strict=True)):
            expected[(image, *place[::-1])][8:24] = rows[row]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.full
@pytest.mark.parametrize("bits", [4, 6])
def test_narrow_elements_are_padded(bits):
    """16 elements of 4 or 6 bits fill 16 bytes of shared memory; rows outside the tensor are zeros."""
    data = random_bytes(6, 128 * bits // 8 * 2)
    kind = {4: "b4x16_p64", 6: "b6x16_p32"}[bits]
    found = load("tile", "2d", (128, -1), ptx.TensorMap(data, kind, (256, 6), (128, 4)), 4 * 128).reshape(4, 8, 16)
    width = 2 * bits
    expected = np.zeros((4, 8, 16), np.uint8)
    for row, unit in product(range(1, 4), range(8)):
        expected[row, unit, :width] = data[row - 1, 128 * bits // 8 + width * unit :][:width]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.full
def test_six_bits_of_each_byte_are_stored():
    data, given = np.zeros((2, 96), np.uint8), random_bytes(BYTES)
    statement = f"@%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd2, {{0, 0}}], [%r2]; {DONE}"
    found, _ = launch(statement, ptx.TensorMap(data, "b6x16_p32", (128, 2), (128, 2)), given=given, read=False)
    number = [int.from_bytes(bytes(row), "little") for row in found]
    for row, i in product(range(2), range(128)):
        assert number[row] >> 6 * i & 63 == given[128 * row + i] & 63


@pytest.mark.full
@pytest.mark.parametrize("kind", ["tf32", "tf32_ftz", "f32_ftz"])
def test_tf32_is_rounded_and_nothing_is_flushed(kind):
    """As an H100 does, of which 50,176 words a type and direction were compared."""
    words = [0x3F801000, 0x3F803000, 0x3F801001, 0x7F800000, 0x7F800001, 0xFFC00001, 0xBF800FFF, 0x7F7FFFFF, 0x807FE001, 1, 0x1000, 0x3000]
    rounded = [0x3F800000, 0x3F804000, 0x3F802000, 0x7F800000, 0x7FFFE000, 0x7FFFE000, 0xBF800000, 0x7F800000, 0x807FE000, 0, 0, 0x4000]
    given, expected = np.zeros(BYTES, np.uint8), np.array(words if kind == "f32_ftz" else rounded, np.uint32)
    tensor = ptx.TensorMap(np.array(words, np.uint32), kind, (12,), (12,))
    np.testing.assert_array_equal(load("tile", "1d", (0,), tensor, 48, target="sm_90a").view(np.uint32), expected)
    given[:48] = np.array(words, np.uint32).view(np.uint8)
    statement = f"@%p1 cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%rd2, {{0}}], [%r2]; {DONE}"
    tensor = ptx.TensorMap(np.zeros(12, np.uint32), kind, (12,), (12,))
    np.testing.assert_array_equal(launch(statement, tensor, given=given, read=False, target="sm_90a")[0], words)


@pytest.mark.full
@pytest.mark.parametrize("kind, dtype", [("f32", np.uint32), ("tf32", np.uint32), ("f64", np.uint64), ("bf16", np.uint16)])
def test_elements_outside_are_nan(kind, dtype):
    """Each 16 bits of an element outside the tensor are 0x7ff7, whatever its size; a gathered row outside too."""
    data = (random_bytes(6, 256) & 0xE0 if kind == "tf32" else random_bytes(6, 256)).view(dtype)
    columns = data.shape[1]
    if kind == "tf32":
        data = data & np.uint32(0x7F7FE000)  # finite, and nothing to round
    wide, width = np.full((10, 2 * columns), int.from_bytes(b"\xf7\x7f" * 4, "little") & np.iinfo(dtype).max, dtype), columns // 4
    wide[2:8, width : width + columns] = data
    tensor = ptx.TensorMap(data, kind, (columns, 6), (width, 4), nan_fill=True)
    for x, y in ((-width // 2, -2), (columns - width // 2, 4)):
        found = load("tile", "2d", (x, y), tensor, 1024 // 4, target="sm_90a").view(dtype).reshape(4, width)
        np.testing.assert_array_equal(found, wide[y + 2 : y + 6, x + width : x + 2 * width])


@pytest.mark.full
def test_halves_of_units_change_places_in_odd_lines():
    data = random_bytes(8, 128)
    tensor = ptx.TensorMap(data, "u8", (128, 8), (128, 8), swizzle=128, swizzle_atom=32, swizzle_flip=True)
    found = load("tile", "2d", (0, 0), tensor, 1024)
    expected = np.zeros(1024, np.uint8)
    for byte, value in enumerate(data.ravel()):
        place = byte ^ (byte >> 7 & 3) << 5
        expected[place ^ (8 if byte >> 7 & 1 else 0)] = value
    np.testing.assert_array_equal(found, expected)


REDUCTIONS = {
    "add f16": ("add", "f16", np.float16), "add f32": ("add", "f32", np.float32), "max s32": ("max", "s32", np.int32),
    "min u64": ("min", "u64", np.uint64), "xor u32": ("xor", "u32", np.uint32), "inc u32": ("inc", "u32", np.uint32),
}  # fmt: skip


@pytest.mark.parametrize("name", sample_cases(REDUCTIONS, ()))
def test_boxes_are_reduced(name):
    operation, kind, dtype = REDUCTIONS[name]
    rng = np.random.default_rng(3)
    draw = (lambda *shape: rng.standard_normal(shape).astype(dtype)) if np.dtype(dtype).kind == "f" else (
        lambda *shape: rng.integers(0, 1 << 31, shape).astype(dtype)
    )  # fmt: skip
    data, given = draw(6, 32), np.zeros(BYTES, np.uint8)
    box = draw(4, 16)
    given[: box.nbytes] = box.ravel().view(np.uint8)
    statement = f"@%p1 cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group [%rd2, {{20, 4}}], [%r2]; {DONE}"
    found, _ = launch(statement, ptx.TensorMap(data, kind, (32, 6), (16, 4)), given=given, target="sm_90a", read=False)
    expected = data.copy()
    old, new = expected[4:6, 20:32], box[:2, :12]
    apply = {
        "add": np.add, "max": np.maximum, "min": np.minimum, "xor": np.bitwise_xor, "inc": lambda x, y: np.where(x >= y, 0, x + 1),
    }[operation]  # fmt: skip
    expected[4:6, 20:32] = apply(old, new)
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


@pytest.mark.full
def test_a_bulk_copy_with_a_mask_of_bytes():
    data, given = random_bytes(64), random_bytes(BYTES)
    statement = (
        f"mov.u16 %h3, 0x8421; mov.b64 %rd6, 0; @%p1 cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd7], [%r2], 32, %h3; {DONE}"
    )
    text = (
        KERNEL.format(target="sm_100", bytes=BYTES, part=PART, fill=FILL, statement=statement, read="")
        .replace(".param .align 64 .b8 map[128]", ".param .u64 map")
        .replace("mov.u64 %rd2, map; cvta.param.u64 %rd2, %rd2;", "ld.param.u64 %rd7, [map];")
    )
    found = np.asarray(ptx.run(text, grid=1, block=32, args=[data, given, np.zeros(BYTES, np.uint8), 0], target="sm_100")[0])
    expected = data.copy()
    for i in range(32):
        if 0x8421 >> i % 16 & 1:
            expected[i] = given[i]
    np.testing.assert_array_equal(found, expected)


COPY = "@%p1 cp.async.bulk.tensor"
WRONG = {
    "rows of a cube": (f"{COPY}.3d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r2], [%rd2, {{%r4, %r4, %r4}}], [%r3];",
                       Unsupported, "gather4 cannot be combined", "sm_100a"),
    "rows on Hopper": (f"{COPY}.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r2], [%rd2, {{1, 2, 3, 4, 5}}], [%r3];",
                       Unsupported, "needs sm_100", "sm_90a"),
    "rows for a cluster": (f"{COPY}.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes [%r2], [%rd2, {{1, 2, 3, 4, 5}}],"
                           " [%r3];", Unsupported, "needs sm_100a", "sm_120a"),
    "two rows": (f"{COPY}.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r2], [%rd2, {{1, 2, 3}}], [%r3];",
                 Unsupported, "expected 5 coordinates", "sm_100a"),
    "scattered to shared memory": (f"{COPY}.2d.shared::cta.global.tile::scatter4.mbarrier::complete_tx::bytes [%r2], [%rd2, {{1, 2, 3, 4, "
                                   "5}], [%r3];", Unsupported, "belongs to copies to global", "sm_100a"),
    "no offsets": (f"{COPY}.4d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r2], [%rd2, {{1, 2, 3, 4}}], [%r3], {{1}};",
                   Unsupported, "takes a vector of 2", "sm_90"),
    "a halo": (f"{COPY}.4d.shared::cta.global.im2col::w.mbarrier::complete_tx::bytes [%r2], [%rd2, {{1, 2, 3, 4}}], [%r3], {{1, 2}};",
               Unsupported, "figures", "sm_100a"),
    "a map of boxes": (f"{COPY}.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd2, {{1, 2}}], [%r3];",
                       UndefinedBehaviour, "another rank", "sm_90"),
    "no map of pixels": (f"{COPY}.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd2, {{1, 2, 3, 4}}], [%r3];",
                         UndefinedBehaviour, "an im2col map", "sm_90"),
    "a reduction of f16": ("@%p1 cp.reduce.async.bulk.tensor.4d.global.shared::cta.inc.im2col_no_offs.bulk_group [%rd2, {1, 2, 3, 4}], "
                           "[%r2];", Unsupported, "type", "sm_90"),
}  # fmt: skip


@pytest.mark.parametrize("name", sample_cases(WRONG, {"two rows", "no offsets", "rows on Hopper", "rows of a cube"}))
def test_what_is_wrong_is_named(name):
    statement, error, said, target = WRONG[name]
    tensor = ptx.TensorMap(np.zeros((2, 5, 6, 24), np.uint16), "f16", (24, 6, 5, 2), (16, 8), corners=((0, 0), (0, 0)))
    with pytest.raises(error, match=said):
        launch(statement, tensor, target=target)


@pytest.mark.full
def test_a_type_that_is_only_loaded():
    statement = f"@%p1 cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%rd2, {{0}}], [%r2]; {DONE}"
    with pytest.raises(NotModelled, match="does not take"):
        launch(statement, ptx.TensorMap(np.zeros(128, np.uint8), "b4x16_p64", (128,), (128,)), read=False)


MAPS = {
    "corners of a matrix": ({"global_dims": (8, 8), "box_dims": (8, 8), "corners": ((0,), (0,))}, "3, 4 or 5"),
    "a corner too far": ({"global_dims": (8, 8, 8), "box_dims": (8, 8), "corners": ((-40000,), (0,))}, "lower corner"),
    "boxes of pixels": ({"global_dims": (8, 8, 8), "box_dims": (8, 8, 8), "corners": ((0,), (0,))}, "channels and pixels"),
    "a flip of 16 bytes": ({"global_dims": (64, 8), "box_dims": (64, 8), "swizzle": 128, "swizzle_flip": True}, "swizzle_atom=32"),
    "a short padded row": ({"global_dims": (256, 8), "box_dims": (64, 8), "dtype": "b6x16_p32"}, "128 elements"),
    "a fill of integers": ({"global_dims": (64, 8), "box_dims": (64, 8), "dtype": "u16", "nan_fill": True}, "no NaN"),
    "a padded row of 64": ({"global_dims": (128, 8), "box_dims": (128, 8), "dtype": "b6x16_p32", "swizzle": 64}, "0 or 128"),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPS)
def test_maps_that_the_driver_rejects(name):
    given, said = MAPS[name]
    with pytest.raises(ValueError, match=said):
        ptx.TensorMap(np.zeros(1 << 16, np.uint8), **{"dtype": "f16", **given})
