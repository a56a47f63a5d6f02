"""Tensor maps that a kernel writes with `tensormap.replace`, swizzles of larger atoms, packed elements of 4 bits, and what is refused."""

import numpy as np
import pytest

from tcemu import ptx
from tcemu.base.errors import UndefinedBehaviour, Unsupported

BOX_BYTES, ROWS = 1024, 8
WIDTH, HEIGHT = 100, 11  # of the tensor, in elements of 16 bits; its rows are 256 bytes apart
FIELDS = """
    tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r1], %rd1;
    tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r1], 1;
    tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r1], 0, 64;
    tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r1], 1, %r5;
    tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r1], 0, 100;
    tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r1], 1, 11;
    tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r1], 0, 256;
    tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%r1], 0, 1;
    tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%r1], 1, 1;
    tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%r1], 6;
    tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [%r1], 0;
    tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%r1], {mode};
    {atom}
    tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%r1], 0;"""
KERNEL = """.version 8.6
.target {target}
.address_size 64
.visible .entry e(.param .u64 data, .param .u64 scratch, .param .u64 out) {{
    .reg .b64 %rd<9>; .reg .b32 %r<12>; .reg .pred %p<3>;
    .shared .align 1024 .b8 tile[1024]; .shared .align 128 .b8 map[128]; .shared .align 8 .b64 object;
    ld.param.u64 %rd1, [data]; ld.param.u64 %rd2, [scratch]; ld.param.u64 %rd3, [out];
    mov.u32 %r1, map; mov.u32 %r2, tile; mov.u32 %r3, object; mov.u32 %r4, %tid.x; setp.eq.u32 %p1, %r4, 0; mov.u32 %r5, 8;
    mad.lo.u32 %r6, %r4, 4, %r1; st.shared.u32 [%r6], {fill}; bar.warp.sync -1;
    @!%p1 bra COPY;
    {fields}
    mbarrier.init.shared.b64 [%r3], 1;
COPY: bar.warp.sync -1;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd2], [%r1], 128;
    fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd4, [%r3], 1024;
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd2, {{5, -2}}], [%r3];
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
    @!%p2 bra WAIT;
    mul.wide.u32 %rd5, %r4, 32; add.u64 %rd3, %rd3, %rd5; mad.lo.u32 %r7, %r4, 32, %r2;
    ld.shared.v4.b32 {{%r8, %r9, %r10, %r11}}, [%r7]; st.global.v4.b32 [%rd3], {{%r8, %r9, %r10, %r11}};
    ld.shared.v4.b32 {{%r8, %r9, %r10, %r11}}, [%r7+16]; st.global.v4.b32 [%rd3+16], {{%r8, %r9, %r10, %r11}};
    ret;
}}"""
ATOM = "tensormap.replace.tile.swizzle_atomicity.shared::cta.b1024.b32 [%r1], {};"
# mode, atomicity and target; the bits that a byte address receives from those of its row, as CUTLASS's Swizzle<bits, base, shift> has them
SWIZZLES = {
    "none": (0, None, "sm_90a", (0, 4, 3)),
    "32 bytes": (1, None, "sm_90a", (1, 4, 3)),
    "64 bytes": (2, None, "sm_90a", (2, 4, 3)),
    "128 bytes": (3, None, "sm_90a", (3, 4, 3)),
    "atoms of 16 bytes": (3, 0, "sm_100a", (3, 4, 3)),
    "atoms of 32 bytes": (3, 1, "sm_100a", (2, 5, 2)),
    "atoms of 64 bytes": (3, 3, "sm_100a", (1, 6, 1)),
}


def kernel(mode, atom, target, fields=FIELDS, fill=0):
    text = fields.format(mode=mode, atom="" if atom is None else ATOM.format(atom))
    return KERNEL.format(target=target, fields=text, fill=fill)


def launch(text, target, data, checked=True):
    return ptx.run(text, grid=1, block=32, args=[data, np.zeros(128, np.uint8), np.zeros(256, np.uint32)], target=target, checked=checked)


def swizzle(offset, bits, base, shift):
    """Return the place of a byte by the definition of CUTLASS, bit by bit."""
    place = offset
    for i in range(bits):
        place ^= (offset >> (base + shift + i) & 1) << (base + i)
    return place


EDIT = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry e(.param .u64 given, .param .u64 out) {
    .reg .b64 %rd<5>; .reg .b32 %r<5>; .reg .pred %p<2>; .shared .align 128 .b8 map[128];
    ld.param.u64 %rd1, [given]; ld.param.u64 %rd2, [out];
    mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; mul.wide.u32 %rd3, %r1, 4; mov.u32 %r2, map; mad.lo.u32 %r3, %r1, 4, %r2;
    add.u64 %rd1, %rd1, %rd3; ld.global.u32 %r4, [%rd1]; st.shared.u32 [%r3], %r4; bar.warp.sync -1;
    @%p1 tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r2], 0, 32;
    @%p1 tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%r2], 2;
    @%p1 tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [%r2], 1;
    bar.warp.sync -1; ld.shared.u32 %r4, [%r3]; add.u64 %rd2, %rd2, %rd3; st.global.u32 [%rd2], %r4; ret;
}"""


def test_fields_that_a_kernel_replaces_are_those_of_the_host():
    data, dims, strides = np.zeros((40, 128), np.uint16), (WIDTH, HEIGHT, 2), (256, 4096)
    before, after = (
        np.asarray(
            ptx.TensorMap(data, "f16", dims, (columns, ROWS, 1), strides, swizzle=swizzle, interleave=interleave).encode(0, data.nbytes)
        )
        for columns, swizzle, interleave in ((64, 0, 0), (32, 64, 16))
    )
    *_, found = ptx.run(EDIT, grid=1, block=32, args=[before.view(np.uint32), np.zeros(32, np.uint32)], target="sm_90a")
    assert (found == after.view(np.uint32)).all() and (before != after).any()


@pytest.mark.full
@pytest.mark.parametrize("name", SWIZZLES)
def test_maps_made_by_a_kernel(name):
    """A map of zeros whose fields are all replaced, as Triton does, copied to global memory and used there."""
    mode, atom, target, pattern = SWIZZLES[name]
    data = np.random.default_rng(7).integers(0, 1 << 16, (HEIGHT, 128)).astype(np.uint16)
    *_, found = launch(kernel(mode, atom, target), target, data)
    inside = np.zeros((ROWS, 64), np.uint16)
    inside[2:, :] = data[: ROWS - 2, 5:69]
    box, wanted = inside.view(np.uint8).ravel(), np.zeros(BOX_BYTES, np.uint8)
    for offset in range(BOX_BYTES):
        wanted[swizzle(offset, *pattern)] = box[offset]
    assert np.count_nonzero(found.view(np.uint8) != wanted) == 0


@pytest.mark.full
@pytest.mark.parametrize("element", [6, 10])
def test_a_map_made_by_a_kernel_fills_with_nan(element):
    """f16 and bf16."""
    data = np.random.default_rng(7).integers(0, 1 << 16, (HEIGHT, 128)).astype(np.uint16)
    fields = FIELDS.replace("fill_mode.shared::cta.b1024.b32 [%r1], 0", "fill_mode.shared::cta.b1024.b32 [%r1], 1")
    fields = fields.replace("elemtype.shared::cta.b1024.b32 [%r1], 6", f"elemtype.shared::cta.b1024.b32 [%r1], {element}")
    *_, found = launch(kernel(0, None, "sm_90a", fields), "sm_90a", data)
    wanted = np.full((ROWS, 64), 0x7FF7, np.uint16)
    wanted[2:, :] = data[: ROWS - 2, 5:69]
    assert np.count_nonzero(found.view(np.uint16).reshape(ROWS, 64) != wanted) == 0
    with pytest.raises(Unsupported, match="fills with NaN"):
        launch(kernel(0, None, "sm_90a", fields.replace(f"b32 [%r1], {element};", "b32 [%r1], 1;")), "sm_90a", data)


@pytest.mark.full
def test_maps_of_the_host_with_larger_atoms():
    """`TensorMap(swizzle_atom=)` encodes what the kernel's own fields say."""
    for name, atom in (("atoms of 32 bytes", 32), ("atoms of 64 bytes", 64)):
        mode, number, target, _ = SWIZZLES[name]
        data = np.zeros((HEIGHT, 128), np.uint16)
        _, scratch, _ = launch(kernel(mode, number, target), target, data)
        own = ptx.TensorMap(data, "f16", (WIDTH, HEIGHT), (64, ROWS), (256,), swizzle=128, swizzle_atom=atom).encode(0, data.nbytes)
        made = scratch.view(np.uint32)
        same = [i for i in range(32) if i not in (2, 3)]  # but for the address
        used = [i for i in same if own[i] not in (0, 1) or made[i]]
        assert [int(own[i]) for i in used] == [int(made[i]) for i in used]


@pytest.mark.full
def test_elements_of_four_bits():
    """Boxes of 4-bit elements, packed in pairs: those beyond the edge are zeros."""
    data = np.random.default_rng(3).integers(0, 256, (HEIGHT, 128), np.uint8)
    text = kernel(0, None, "sm_100a").replace("elemtype.shared::cta.b1024.b32 [%r1], 6", "elemtype.shared::cta.b1024.b32 [%r1], 13")
    text = text.replace("box_dim.shared::cta.b1024.b32 [%r1], 0, 64", "box_dim.shared::cta.b1024.b32 [%r1], 0, 256")
    text = text.replace("[%r1], 1, %r5", "[%r1], 1, 8").replace(
        "[%r1], 0, 256;\n    tensormap.replace.tile.element", "[%r1], 0, 128;\n    tensormap.replace.tile.element"
    )
    text = text.replace("{5, -2}", "{-32, 4}").replace("[%r1], 0, 100;", "[%r1], 0, 200;")
    *_, found = launch(text, "sm_100a", data)
    inside = np.zeros((ROWS, 128), np.uint8)
    inside[: HEIGHT - 4, 16:116] = data[4:, :100]
    assert np.count_nonzero(found.view(np.uint8).reshape(ROWS, 128) != inside) == 0


REPLACE = "tensormap.replace.tile."
REFUSED = {
    REPLACE + "box_dim.shared::cta.b1024.b32 [%r1], 5, 1;": "dimension of .box_dim is 5; expected 0 to 4",
    REPLACE + "global_dim.shared::cta.b1024.b32 [%r1], %r2, 1;": "takes an integer constant",
    REPLACE + "elemtype.shared::cta.b1024.b32 [%r1], 15;": "is 15; expected 0 to 12",
    REPLACE + "elemtype.shared::cta.b1024.b32 [%r1], %r2;": "must be an integer constant",
    REPLACE + "swizzle_mode.shared::cta.b1024.b32 [%r1], 4;": "is 4; expected 0 to 3",
    REPLACE + "swizzle_atomicity.shared::cta.b1024.b32 [%r1], 1;": "needs sm_100a",
    REPLACE + "fill_mode.shared::cta.b1024.b32 [%r1], 2;": "is 2; expected 0 to 1",
    REPLACE + "interleave_layout.shared::cta.b1024.b32 [%r1], 3;": "is 3; expected 0 to 2",
    REPLACE + "global_address.shared::cta.b1024.b32 [%r1], %r2;": "needs b64",
    REPLACE + "rank.shared::cta.b1024.b32 [%r1], 0, 1;": "has 2 operands; got 3",
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd2], [%r1], 64;": "128",
}


@pytest.mark.parametrize("statement", REFUSED)
def test_edits_that_are_refused(statement):
    with pytest.raises(Unsupported, match=REFUSED[statement]):
        launch(kernel(0, None, "sm_90a", statement), "sm_90a", np.zeros(8, np.uint16))


@pytest.mark.full
def test_maps_that_lead_astray():
    """An object that is no map, in checked mode; a box outside the array to which the map points."""
    data = np.zeros((HEIGHT, 128), np.uint16)
    with pytest.raises(UndefinedBehaviour, match="neither a tensor map nor zeros"):
        launch(kernel(3, None, "sm_90a", fill=12345), "sm_90a", data)
    with pytest.raises(ptx.OutOfBounds, match="outside global memory"):
        launch(kernel(3, None, "sm_90a"), "sm_90a", data[:5].copy())
