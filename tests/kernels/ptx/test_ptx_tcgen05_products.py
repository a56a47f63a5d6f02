"""One tcgen05.mma in a kernel, of every kind and pair of types, against `dot` of the same row; and how a trace explains its elements."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from support.tcgen05_operands import RNG, descriptor, place, result
from support.tcgen05_protocol_kernels import Variant, kernel_lines, kernel_text, operands

import tcemu
from tcemu import ptx
from tcemu.base.errors import UndefinedBehaviour
from tcemu.engine.isa.tcgen05 import Tcgen05Product
from tcemu.engine.isa.tcgen05_descriptors import encode_instruction_descriptor
from tcemu.ptx import Tracepoint

TARGET, SCALES = "sm_100a", (16, 20)  # columns of the scales of A and of B
NARROW, SIGNS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"), ("s8", "u8")
PRODUCTS = (
    *(f"f16.m128n16k16.{types}" for types in ("f32.f16.f16", "f16.f16.f16", "f32.bf16.bf16")),
    "tf32.m128n16k8.f32.tf32.tf32",
    *(f"f8f6f4.m128n16k32.{d}.{a}.{b}" for d, a, b in product(("f32", "f16"), NARROW, NARROW)),
    *(f"i8.m128n16k32.{saturated}s32.{a}.{b}" for saturated, a, b in product(("", "satfinite."), SIGNS, SIGNS)),
    *(f"mxf8f6f4.block_scale.m128n16k32.f32.{a}.{b}.ue8m0" for a, b in product(NARROW, NARROW)),
    "mxf4.block_scale.m128n16k64.f32.e2m1.e2m1.ue8m0",
    "mxf4nvf4.block_scale.block32.m128n16k64.f32.e2m1.e2m1.ue8m0",
    "mxf4nvf4.block_scale.block16.m128n16k64.f32.e2m1.e2m1.ue8m0",
    "mxf4nvf4.block_scale.block16.m128n16k64.f32.e2m1.e2m1.ue4m3",
)


def kernel(op):
    """Return a kernel that copies an image to shared memory and 32 columns to tensor memory, multiplies once, and gives back D."""
    many = lambda first, count: "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"
    loads = " ".join(f"ld.global.v4.b32 {many(40 + 4 * i, 4)}, [%rd2+{16 * i}];" for i in range(8))
    stores = " ".join(f"st.global.v4.b32 [%rd3+{16 * i}], {many(80 + 4 * i, 4)};" for i in range(4))
    scales = f"[%r7+{SCALES[0]}], [%r7+{SCALES[1]}], " if op.scaling is not None else ""
    metadata = f"[%r7+{SCALES[0]}], " if op.sparse else ""
    return f""".version 9.0
.target {TARGET}
.address_size 64
.visible .entry e(.param .u64 image, .param .u64 cells, .param .u64 d, .param .u64 a_desc, .param .u64 b_desc) {{
    .reg .b32 %r<100>; .reg .b64 %rd<9>; .reg .pred %p<8>;
    .shared .align 128 .b8 tile[32768]; .shared .align 8 .b64 done; .shared .b32 place;
    ld.param.u64 %rd1, [image]; ld.param.u64 %rd2, [cells]; ld.param.u64 %rd3, [d];
    ld.param.u64 %rd4, [a_desc]; ld.param.u64 %rd5, [b_desc];
    mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 32; setp.eq.u32 %p2, %r0, 0; mov.u32 %r1, place; mov.u32 %r2, done; mov.u32 %r3, tile;
    shr.u32 %r4, %r3, 4; cvt.u64.u32 %rd6, %r4; add.u64 %rd4, %rd4, %rd6; add.u64 %rd5, %rd5, %rd6;
    @%p2 mbarrier.init.shared.b64 [%r2], 1;
    @%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
    mul.wide.u32 %rd7, %r0, 16; add.u64 %rd1, %rd1, %rd7; shl.b32 %r5, %r0, 4; add.u32 %r3, %r3, %r5; mov.u32 %r6, 0;
COPY:
    ld.global.v4.b32 {many(40, 4)}, [%rd1]; st.shared.v4.b32 [%r3], {many(40, 4)};
    add.u64 %rd1, %rd1, 2048; add.u32 %r3, %r3, 2048; add.u32 %r6, %r6, 1; setp.lt.u32 %p1, %r6, 16;
    @%p1 bra COPY;
    bar.sync 0;
    ld.shared.b32 %r7, [place]; shr.u32 %r8, %r0, 5; shl.b32 %r8, %r8, 21; add.u32 %r8, %r8, %r7;
    mul.wide.u32 %rd7, %r0, 128; add.u64 %rd2, %rd2, %rd7; mul.wide.u32 %rd7, %r0, 64; add.u64 %rd3, %rd3, %rd7;
    {loads}
    tcgen05.st.sync.aligned.32x32b.x32.b32 [%r8], {many(40, 32)};
    tcgen05.wait::st.sync.aligned; fence.proxy.async.shared::cta; tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync; mov.u32 %r9, {encode_instruction_descriptor(op)};
    @%p2 {op.instruction} [%r7], %rd4, %rd5, {metadata}%r9, {scales}1;
    @%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];
AGAIN:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0;
    @!%p3 bra AGAIN;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {many(80, 16)}, [%r8];
    tcgen05.wait::ld.sync.aligned;
    {stores}
    bar.sync 0;
    @%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 32;
    ret;
}}"""


@pytest.mark.full
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_statement_is_the_product_of_its_row(name):
    op = tcemu.parse(f"tcgen05.mma.cta_group::1.kind::{name}")
    assert isinstance(op, Tcgen05Product)
    a, b, c, (shared, tmem), descriptors = place(op, 0)
    given: dict[str, Any] = {}
    if op.scaling is not None:
        bias = op.scaling.format.bias << op.scaling.format.mantissa_bits
        scales = [(bias + RNG.integers(-3, 4, (rows, op.scaling.count))).astype(np.uint8) for rows in (op.m, op.n)]
        given = {"scale_a": scales[0], "scale_b": scales[1].T.copy()}
        tmem[:, SCALES[0] : SCALES[0] + 8] = 0
        for column, codes in zip(SCALES, scales, strict=True):
            for (x, s), quarter in product(np.ndindex(codes.shape), range(4)):
                tmem[x % 32 + 32 * quarter, column + x // 32] |= np.uint32(int(codes[x, s]) << 8 * s)
    args = [shared, np.ascontiguousarray(tmem[:, :32]), np.zeros((128, 16), np.uint32), *descriptors]
    found = ptx.run(kernel(op), grid=1, block=128, args=args, target=TARGET, checked=True)
    want = np.asarray(tcemu.dot(op, a, b.T.copy(), c, target=TARGET, **given)).astype(np.uint32)
    cells = np.zeros((128, 512), np.uint32)
    cells[:, :16] = found[2]
    wrong = int((result(op, cells, 0) != want).sum())
    assert wrong == 0, f"{wrong} of {want.size}"
    assert found.notes == ()


@pytest.mark.full
@pytest.mark.parametrize("field, wrong", [(0x4, False), (0xE, False), (0x0, True), (0x6, True)])
def test_undefined_metadata_is_found(field, wrong):
    """A field has the places of two elements of four, the lower place first: 0x4 and 0xE are defined, 0x0 and 0x6 are not."""
    op = tcemu.parse("tcgen05.mma.sp.cta_group::1.kind::f16.m128n16k32.f32.f16.f16")
    cells = np.zeros((128, 32), np.uint32)
    cells[:, SCALES[0]] = field * 0x11111111
    descriptors = [descriptor(k, 16, False, start) for k, start in ((16, 0), (32, 16384))]
    args = [np.zeros(8192, np.uint32), cells, np.zeros((128, 16), np.uint32), *descriptors]
    launch = lambda: ptx.run(kernel(op), grid=1, block=128, args=args, target=TARGET, checked=True)
    if not wrong:
        assert not launch()[2].any()
        return
    with pytest.raises(UndefinedBehaviour, match=f"metadata is {field}, which is not defined. PTX ISA 9.7.16.10.8"):
        launch()


def products_of(text):
    """Return the lines with products, from 1."""
    return [number for number, line in enumerate(text.splitlines(), 1) if "tcgen05.mma" in line]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["f16", "tf32", "f8f6f4", "i8", "mxf8f6f4"])
def test_a_trace_explains_elements_of_a_product(kind):
    """The explanation computes with Python's integers alone, and gives the word that the statement leaves in tensor memory."""
    variant = Variant(kind=kind, start="stored")
    text = kernel_text(kernel_lines(variant))
    a, b = operands(variant)
    elements = [(row, column) for row in (0, 31, 77, 127) for column in (0, 5, 15)]
    trace = [Tracepoint(products_of(text)[1], tensor=(0, 16), element=each, threads=(0,)) for each in elements]
    snapshots = ptx.run(text, grid=1, block=128, args=[a, b, np.zeros((128, 16), np.float32)], target=TARGET, trace=trace).snapshots
    assert len(snapshots) == len(elements)
    wrong = 0
    for (row, column), snapshot in zip(elements, snapshots, strict=True):
        assert snapshot.tensor is not None and snapshot.explanation is not None and snapshot.tensor.shape == (1, 128, 16)
        assert snapshot.explanation.c != 0  # of the product before
        wrong += snapshot.explanation.result & 0xFFFFFFFF != int(snapshot.tensor[0, row, column])
    assert wrong == 0, f"{wrong} of {len(elements)}"


@pytest.mark.full
def test_targets_of_one_family_are_compared():
    variant = Variant()
    text = kernel_text(kernel_lines(variant)).replace(".target sm_100a", ".target sm_100f")
    args = [*operands(variant), np.zeros((128, 16), np.float32)]
    comparison = ptx.compare(text, targets=("sm_100a", "sm_103a"), grid=1, block=128, args=args)
    assert comparison.equal
    assert str(comparison).startswith("e on sm_100a and sm_103a: 0 of ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor": (0, 513)}, "expected a first column and an end, within 0 to 512"),
        ({"element": (0, 0)}, "has another statement than tcgen05.mma; only its D is explained"),
    ],
)
def test_a_trace_of_tensor_memory_that_cannot_be_kept_is_refused(options, said):
    text = kernel_text(kernel_lines(Variant()))
    line = products_of(text)[-1] + 1
    with pytest.raises(ValueError, match=said):
        args = [*operands(Variant()), np.zeros((128, 16), np.float32)]
        ptx.run(text, grid=1, block=128, args=args, target=TARGET, trace=Tracepoint(line, **options))
