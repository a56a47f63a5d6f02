"""Statements of tcgen05 in kernels: allocation, loads and stores, copies, shifts and commits, and what is refused."""

import numpy as np
import pytest

from tcemu import ptx
from tcemu.base.errors import NotModelled, UndefinedBehaviour, Unsupported
from tcemu.engine.instructions import tcgen05
from tcemu.engine.layouts.tensor_memory import MOVE_REGISTERS
from tcemu.kernels.ptx.simt.faults import OutOfBounds

TARGET = "sm_103a"
HEAD = f".version 9.0\n.target {TARGET}\n.address_size 64\n"


def entry(body):
    """Return a kernel; %rd1 is the address of the thread's 128 words of output, %r2 the tensor memory of 512 columns."""
    return f"""{HEAD}
.visible .entry e(.param .u64 out, .param .u32 given) {{
    .reg .b32 %r<400>; .reg .b64 %rd<20>; .reg .pred %p<8>;
    .shared .align 128 .b8 tile[4096];
    .shared .align 8 .b64 barrier;
    .shared .align 4 .b32 place;
    ld.param.u64 %rd1, [out]; ld.param.u32 %r3, [given]; mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 512; add.u64 %rd1, %rd1, %rd2;
    mov.u32 %r4, tile; mov.u32 %r5, barrier; mov.u32 %r6, place;
    shr.u32 %r7, %r1, 5; setp.eq.u32 %p1, %r7, 0; setp.eq.u32 %p2, %r1, 0;
    {body}
    ret;
}}"""


WITH_MEMORY = """
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r6], 512;
    bar.sync 0; ld.shared.u32 %r2, [place];
    BODY
    bar.sync 0;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 512;
"""


def run(body, given=0, block=128, memory=True, checked=True, text=None):
    """Run a kernel; return its output, uint32[threads, 128]."""
    text = entry(WITH_MEMORY.replace("BODY", body) if memory else body) if text is None else text
    return ptx.run(text, grid=1, block=block, args=[np.zeros((block, 128), np.uint32), given], target=TARGET, checked=checked)[0]


def vector(first, count):
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def fill(first, count):
    """Write numbers of their own to the registers of each thread."""
    return "".join(f"mad.lo.u32 %r{first + i}, %r1, 4097, {i * 65537 + 12345};" for i in range(count))


def emit(first, count):
    return "".join(f"st.global.u32 [%rd1+{4 * i}], %r{first + i};" for i in range(count))


def numbers(threads, count):
    t, i = np.arange(threads)[:, None], np.arange(count)
    return (t * 4097 + i * 65537 + 12345).astype(np.uint32)


def store_and_load(store, load, registers, offset=None):
    """Return the output of a kernel that stores by one shape and loads 16 columns of each lane."""
    split = "" if offset is None else f", {offset}"
    return run(f"""
    {fill(10, registers)}
    shl.b32 %r8, %r7, 21; add.u32 %r9, %r2, %r8;
    tcgen05.st.sync.aligned.{store}.b32 [%r9]{split}, {vector(10, registers)};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.{load}.b32 {vector(200, 16)}, [%r9];
    tcgen05.wait::ld.sync.aligned;
    {emit(200, 16)}""")[:, :16]


STORES = [
    ("32x32b", 16, ""),
    ("16x64b", 16, ""),
    ("16x128b", 8, ""),
    ("16x256b", 4, ""),
    ("16x32bx2", 8, ""),
    ("32x32b", 8, ".unpack::16b"),
]


@pytest.mark.parametrize("shape, num, unpack", [pytest.param(*case, marks=pytest.mark.full) for case in STORES])
def test_a_store_is_that_on_arrays(shape, num, unpack):
    count = MOVE_REGISTERS[shape] * num
    offset = 8 if shape == "16x32bx2" else None
    found = store_and_load(f"{shape}.x{num}{unpack}", "32x32b.x16", count, offset)
    op, memory = f"tcgen05.st.sync.aligned.{shape}.x{num}{unpack}.b32", np.zeros((128, 512), np.uint32)
    registers = numbers(128, count)
    for warp in range(4):
        memory = tcgen05.st(op, 0, registers[32 * warp : 32 * warp + 32], memory, warp=warp, half_split_offset=offset or 0, target=TARGET)
    np.testing.assert_array_equal(found, np.asarray(memory)[:, :16])


@pytest.mark.full
@pytest.mark.parametrize("reduction", ["max.u32", "min.s32", "max.abs.f32", "min.NaN.f32"])
def test_a_load_with_a_reduction(reduction):
    found = run(f"""
    {fill(10, 8)}
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r2], {vector(10, 8)};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.red.sync.aligned.32x32b.x8.{reduction} {vector(200, 8)}, %r208, [%r2];
    tcgen05.wait::ld.sync.aligned;
    {emit(200, 9)}""")[:, :9]
    values = numbers(128, 8)
    np.testing.assert_array_equal(found[:, :8], values)
    kind = {"u32": np.uint32, "s32": np.int32, "f32": np.float32}[reduction[-3:]]
    reduced = (values & 0x7FFFFFFF if "abs" in reduction else values).view(kind)
    best = np.max(reduced, axis=1) if "max" in reduction else np.min(reduced, axis=1)
    np.testing.assert_array_equal(found[:, 8], best.view(np.uint32))


def test_an_allocation_waits_for_columns():
    """Four warps allocate 256 columns each; two wait until the others have freed theirs, and take the same columns."""
    found = run(
        """
    mad.lo.u32 %r8, %r7, 4, %r4; shr.u32 %r10, %r7, 1; add.u32 %r10, %r10, 1;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r8], 256;
    bar.warp.sync 0xffffffff; ld.shared.u32 %r9, [%r8]; bar.sync %r10, 64;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 256;
    st.global.u32 [%rd1], %r9;""",
        memory=False,
    )
    assert (found[:, 0].reshape(4, 32) == np.array([0, 256, 0, 256])[:, None]).all()


@pytest.mark.full
def test_an_allocation_that_nothing_ends_is_a_deadlock():
    with pytest.raises(UndefinedBehaviour, match=r"deadlock"):
        run("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r6], 512; st.global.u32 [%rd1], %r1;", memory=False)


@pytest.mark.full
def test_a_copy_a_shift_and_a_commit():
    """Rows of shared memory, copied to all quarters, are one lane further up after the shift; the mbarrier says that both are done."""
    body = f"""
    mad.lo.u32 %r8, %r1, 4, %r4; mad.lo.u32 %r9, %r1, 3, 7; st.shared.u32 [%r8], %r9;
    @%p2 mbarrier.init.shared.b64 [%r5], 1;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    shr.u32 %r10, %r4, 4; cvt.u64.u32 %rd3, %r10; or.b64 %rd3, %rd3, {1 << 46 | 8 << 32 | 32 << 16};
    @%p2 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r2], %rd3;
    @%p2 tcgen05.shift.cta_group::1.down [%r2];
    @%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r5], 0;
    @!%p3 bra AGAIN;
    shl.b32 %r8, %r7, 21; add.u32 %r9, %r2, %r8;
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {vector(20, 4)}, [%r9];
    tcgen05.wait::ld.sync.aligned;
    {emit(20, 4)}"""
    rows = (np.arange(128, dtype=np.uint32) * 3 + 7).reshape(32, 4)
    expected = np.tile(np.concatenate([rows[1:], rows[-1:]]), (4, 1))
    np.testing.assert_array_equal(run(body)[:, :4], expected)


WRONG = {
    "columns beyond the last one": ("add.u32 %r8, %r2, 508; tcgen05.ld.sync.aligned.32x32b.x8.b32 {V}, [%r8];", OutOfBounds, "outside"),
    "columns that are no power of 2": (
        "mov.u32 %r8, 48; @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r6], %r8;", UndefinedBehaviour, "power of 2"
    ),
    "columns that no alloc gave": (
        "mov.u32 %r8, 32; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 512;", UndefinedBehaviour, "alloc did not give"
    ),
    "a part of an allocation": ("@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 256;", UndefinedBehaviour, "nCols is not"),
    "an instruction descriptor": (
        "mov.u32 %r8, 64; mov.b64 %rd3, 0; @%p2 tcgen05.mma.cta_group::1.kind::f16 [%r2], %rd3, %rd3, %r8, 1;",
        Unsupported,
        "line .*reserved",
    ),
    "columns after they were freed": (
        "mov.u32 %r8, 32; bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 512; bar.sync 0;"
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r2];",
        UndefinedBehaviour,
        "has not allocated",
    ),
    "columns that nothing frees": ("exit;", UndefinedBehaviour, "block .0, 0, 0. exits and has not freed 512 columns"),
    "a lane of another warp": (
        "add.u32 %r8, %r2, 0x400000; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r8];", UndefinedBehaviour, "quarter of the warp"
    ),
    "an allocation after the right to it was given up": (
        "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 512; @%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
        "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r6], 512;",
        UndefinedBehaviour,
        "relinquish_alloc_permit",
    ),
    "a larger allocation than the last one": (
        "bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 512;"
        "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r6], 32;"
        "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r6], 64;",
        UndefinedBehaviour,
        "larger than in the block's last",
    ),
    "half a warp": (
        "and.b32 %r8, %r1, 16; setp.eq.u32 %p3, %r8, 0; @%p3 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r2];",
        UndefinedBehaviour,
        "all 32 threads",
    ),
    "a descriptor that leaves shared memory": (
        f"mov.u32 %r8, 0x{1 << 4 | 8 << 17 | 8 << 24:x}; mov.b64 %rd3, 0x{1 << 46 | 16 << 16 | 64 << 32:x};"
        "@%p2 tcgen05.mma.cta_group::1.kind::f16 [%r2], %rd3, %rd3, %r8, 1;",
        OutOfBounds,
        "a_desc leads beyond",
    ),
    "a scaled D that is subnormal": (
        "mov.u32 %r8, 1; shl.b32 %r9, %r7, 21; add.u32 %r9, %r9, %r2; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r9], {%r8};"
        f"tcgen05.wait::st.sync.aligned; bar.sync 0; mov.u32 %r8, 0x{1 << 4 | 1 << 17 | 8 << 24:x}; mov.b64 %rd3, 0x{1 << 46:x};"
        "@%p2 tcgen05.mma.cta_group::1.kind::f16 [%r2], %rd3, %rd3, %r8, 1, 3;",
        UndefinedBehaviour,
        "scale-input-d",
    ),
    "six bits": (
        f"mov.b64 %rd3, 0x{1 << 46:x}; @%p2 tcgen05.cp.cta_group::1.128x128b.b8x16.b6x16_p32 [%r2], %rd3;", NotModelled, "six bits"
    ),
}  # fmt: skip
CHEAP = ("columns beyond the last one", "an instruction descriptor", "six bits")


@pytest.mark.parametrize("name", [name if name in CHEAP else pytest.param(name, marks=pytest.mark.full) for name in WRONG])
def test_what_is_wrong_is_named(name):
    body, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        run(body.replace("{V}", vector(10, 8)))


def run_on_rubin(body):
    text = entry(body).replace(".version 9.0", ".version 9.4").replace(TARGET, "sm_107a")
    return ptx.run(text, grid=1, block=128, args=[np.zeros((128, 128), np.uint32), 0], target="Rubin", checked=True)[0]


def test_the_tensor_memory_of_rubin_has_576_columns():
    """One statement allocates 512 columns at most, so that the others are an allocation of their own."""
    allocate, free = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32", "tcgen05.dealloc.cta_group::1.sync.aligned.b32"
    found = run_on_rubin(
        f"@%p1 {allocate} [%r6], 512; @%p1 {allocate} [%r6], 64; bar.sync 0; ld.shared.u32 %r2, [place]; {fill(10, 1)}"
        "shl.b32 %r8, %r7, 21; add.u32 %r8, %r8, %r2; add.u32 %r8, %r8, 63; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r10};"
        "tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r11}, [%r8]; tcgen05.wait::ld.sync.aligned;"
        f"bar.sync 0; @%p1 {free} %r2, 64; mov.u32 %r9, 0; @%p1 {free} %r9, 512; st.global.u32 [%rd1], %r11; st.global.u32 [%rd1+4], %r2;"
    )
    assert (found[:, 0] == np.arange(128) * 4097 + 12345).all() and (found[:, 1] == 512).all()


def test_arithmetic_of_rubin_is_refused_with_what_is_public():
    with pytest.raises(NotModelled, match=r"ex2\.approx\.f32 on sm_107a: there is no evidence"):
        run_on_rubin(".reg .f32 %f<2>; mov.f32 %f0, 0f3F800000; ex2.approx.f32 %f1, %f0; mov.b32 %r8, %f1; st.global.u32 [%rd1], %r8;")
    described = 1 << 4 | 2 << 17 | 8 << 24 | 1 << 29
    with pytest.raises(NotModelled, match=r"kind::f8f6f4\.m128n16k64\.f32\.e4m3\.e4m3.*one sum"):
        run_on_rubin(
            WITH_MEMORY.replace("BODY", f"mov.u32 %r8, {described}; mov.b64 %rd3, 0x{1 << 46:x};"
            "@%p2 tcgen05.mma.cta_group::1.kind::f8f6f4 [%r2], %rd3, %rd3, %r8, 0;")
        )  # fmt: skip
