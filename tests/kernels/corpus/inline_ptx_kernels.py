"""PTX of the corpus: bodies of instructions, each thread with some words of its own, and whole kernels of the asynchronous proxies."""

import numpy as np
from kernels.corpus.corpus_table import BF16, E4M3, E5M2, PTX, bits, case, launch, small

REGISTERS = ".reg .b32 %r<40>, %a<20>, %o<20>; .reg .f32 %f<40>; .reg .f64 %d<9>; .reg .b64 %w<20>; .reg .b16 %h<9>; .reg .pred %p<6>;"


def run_words(body, x, outputs, *, target="H100", version="8.8", shared=0, prologue="", block=None, **options):
    """Run a body for each row of x, whose words are %a0, %a1, ...; what it leaves in %o0, %o1, ... is returned, a row a thread."""
    arch = {"H100": "sm_90a", "A100": "sm_80", "B200": "sm_100a", "RTX 5090": "sm_120a"}[target]
    x = np.ascontiguousarray(x.reshape(len(x), -1)).view(np.uint32)
    loads = " ".join(f"ld.global.u32 %a{i}, [%w0+{4 * i}];" for i in range(x.shape[1]))
    stores = " ".join(f"st.global.u32 [%w1+{4 * i}], %o{i};" for i in range(outputs))
    memory = f".shared .align 1024 .b8 mem[{shared}];" if shared else ""
    text = f""".version {version}
    .target {arch}
    .address_size 64
    .visible .entry k(.param .u64 x, .param .u64 y) {{ {REGISTERS} {memory}
    ld.param.u64 %w0, [x]; ld.param.u64 %w1, [y]; cvta.to.global.u64 %w0, %w0; cvta.to.global.u64 %w1, %w1; mov.u32 %r0, %tid.x;
    {prologue} mul.wide.u32 %w2, %r0, {4 * x.shape[1]}; add.u64 %w0, %w0, %w2; mul.wide.u32 %w2, %r0, {4 * outputs}; add.u64 %w1, %w1, %w2;
    {loads} {body} {stores} ret; }}"""
    return launch(text, x, np.zeros((len(x), outputs), np.uint32), target=target, block=block or len(x), **options)[1]


def words(rng, *shape):
    return rng.integers(0, 2**32, shape, dtype=np.uint32)


@case(PTX)
def logic_of_three_operands(rng):
    x = words(rng, 32, 3)
    tables = (0x96, 0xE8, 0xCA, 0x1D)
    found = run_words(" ".join(f"lop3.b32 %o{i}, %a0, %a1, %a2, {t};" for i, t in enumerate(tables)), x, len(tables))
    a, b, c = x.T
    for i, table in enumerate(tables):
        expected = np.zeros(32, np.uint32)
        for index in range(8):
            term = (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
            expected |= term if table >> index & 1 else np.uint32(0)
        yield found[:, i], expected, 0


@case(PTX)
def permutation_of_bytes(rng):
    x = words(rng, 32, 3)
    found = run_words("prmt.b32 %o0, %a0, %a1, %a2; prmt.b32.rc16 %o1, %a0, %a1, %a2;", x, 2)
    octets = x[:, :2].copy().view(np.uint8)
    chosen = x[:, 2:] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
    picked = np.take_along_axis(octets, (chosen & 7).astype(int), 1)
    picked = np.where(chosen & 8, np.where(picked & 128, 255, 0), picked).astype(np.uint8)
    yield found[:, 0], picked.view(np.uint32)[:, 0], 0
    halves = x[:, 0].copy().view(np.uint16).reshape(32, 2)
    yield found[:, 1], halves[np.arange(32), x[:, 2] & 1].astype(np.uint32) * 0x10001, 0


@case(PTX)
def fields_of_bits(rng):
    x = words(rng, 32, 2)
    found = run_words(
        "bfe.u32 %o0, %a0, 5, 9; bfe.s32 %o1, %a0, 20, 12; bfi.b32 %o2, %a1, %a0, 3, 17; brev.b32 %o3, %a0; clz.b32 %o4, %a0;", x, 5
    )
    a, b = x.T
    mask = np.uint32(((1 << 17) - 1) << 3)
    yield found[:, 0], a >> 5 & 511, 0
    yield found[:, 1], (a.view(np.int32) >> 20).view(np.uint32), 0
    yield found[:, 2], (b << 3 & mask) | (a & ~mask), 0
    yield found[:, 3], np.array([int(f"{v:032b}"[::-1], 2) for v in a], np.uint32), 0
    yield found[:, 4], np.array([32 - int(v).bit_length() for v in a], np.uint32), 0


@case(PTX)
def products_of_bytes_added(rng):
    x = words(rng, 32, 3)
    found = run_words("dp4a.s32.u32 %o0, %a0, %a1, %a2; dp2a.lo.u32.s32 %o1, %a0, %a1, %a2;", x, 2)
    c = x[:, 2].view(np.int32).astype(np.int64)
    four = (x[:, :1].copy().view(np.int8).astype(np.int64) * x[:, 1:2].copy().view(np.uint8)).sum(1) + c
    two = (x[:, :1].copy().view(np.uint16).astype(np.int64) * x[:, 1:2].copy().view(np.int8)[:, :2]).sum(1) + c
    yield found[:, 0], four.astype(np.uint32), 0
    yield found[:, 1], two.astype(np.uint32), 0


@case(PTX)
def funnel_shifts(rng):
    x = words(rng, 32, 3)
    found = run_words("shf.l.wrap.b32 %o0, %a0, %a1, %a2; shf.r.clamp.b32 %o1, %a0, %a1, %a2;", x, 2)
    wide = [int(hi) << 32 | int(lo) for lo, hi in x[:, :2]]
    yield found[:, 0], np.array([(v << int(n & 31) >> 32) & 0xFFFFFFFF for v, n in zip(wide, x[:, 2], strict=True)], np.uint32), 0
    yield found[:, 1], np.array([v >> min(int(n), 32) & 0xFFFFFFFF for v, n in zip(wide, x[:, 2], strict=True)], np.uint32), 0


@case(PTX)
def product_of_128_bits_by_carries(rng):
    x = words(rng, 32, 4)
    body = """mov.b64 %w3, {%a0, %a1}; mov.b64 %w4, {%a2, %a3}; mul.lo.u64 %w5, %w3, %w4; mul.hi.u64 %w6, %w3, %w4;
    add.cc.u64 %w5, %w5, %w3; addc.cc.u64 %w6, %w6, %w4; addc.u64 %w7, 0, 0; sub.cc.u64 %w5, %w5, %w4; subc.u64 %w6, %w6, 0;
    mov.b64 {%o0, %o1}, %w5; mov.b64 {%o2, %o3}, %w6; cvt.u32.u64 %o4, %w7;"""
    a, b = ([int(lo) | int(hi) << 32 for lo, hi in part] for part in (x[:, :2], x[:, 2:]))
    full = [p * q + p + (q << 64) for p, q in zip(a, b, strict=True)]
    found = run_words(body, x, 5)
    rest = [(f - q) % 2**128 for f, q in zip(full, b, strict=True)]
    yield found[:, :4], np.array([[r >> 32 * i & 0xFFFFFFFF for i in range(4)] for r in rest], np.uint32), 0
    yield found[:, 4], np.array([f >> 128 for f in full], np.uint32), 0


@case(PTX)
def votes_and_elections(rng):
    x = words(rng, 64, 1)
    body = """and.b32 %r1, %a0, 3; setp.eq.u32 %p0, %r1, 0; vote.sync.ballot.b32 %o0, %p0, -1; vote.sync.any.pred %p1, %p0, -1;
    selp.u32 %o1, 1, 0, %p1; elect.sync %r2|%p2, -1; selp.u32 %o2, 1, 0, %p2; match.any.sync.b32 %o3, %r1, -1; activemask.b32 %o4;"""
    low = (x[:, 0] & 3).reshape(2, 32)
    lanes = np.uint32(1) << np.arange(32, dtype=np.uint32)
    ballots = ((low == 0) * lanes).sum(1, dtype=np.uint32)
    found = run_words(body, x, 5).reshape(2, 32, 5)
    yield found[..., 0], np.repeat(ballots[:, None], 32, 1), 0
    yield found[..., 1].sum(1), np.where(ballots, 32, 0).astype(np.uint64), 0
    yield found[..., 2].sum(1), np.ones(2, np.uint64), 0
    yield found[..., 3], ((low[:, :, None] == low[:, None, :]) * lanes).sum(-1, dtype=np.uint32), 0
    yield found[..., 4], np.full((2, 32), 2**32 - 1, np.uint32), 0


@case(PTX)
def shuffles_in_four_modes(rng):
    x = words(rng, 32, 1)
    body = """shfl.sync.up.b32 %o0|%p0, %a0, 3, 0, -1; selp.u32 %o4, 1, 0, %p0; shfl.sync.down.b32 %o1, %a0, 5, 31, -1;
    shfl.sync.bfly.b32 %o2, %a0, 9, 31, -1; shfl.sync.idx.b32 %o3, %a0, 6, 0x181f, -1;"""
    found, lane, v = run_words(body, x, 5), np.arange(32), x[:, 0]
    yield found[:, 0], v[np.where(lane >= 3, lane - 3, lane)], 0
    yield found[:, 1], v[np.where(lane + 5 <= 31, lane + 5, lane)], 0
    yield found[:, 2], v[lane ^ 9], 0
    yield found[:, 3], v[lane // 8 * 8 + 6], 0
    yield found[:, 4], (lane >= 3).astype(np.uint32), 0


@case(PTX)
def reductions_of_warps(rng):
    x = words(rng, 32, 1)
    kinds = ("add.u32", "min.s32", "max.u32", "xor.b32", "and.b32")
    found = run_words(" ".join(f"redux.sync.{kind} %o{i}, %a0, -1;" for i, kind in enumerate(kinds)), x, 5, target="A100", version="8.0")
    v = x[:, 0]
    expected = [v.sum(dtype=np.uint32), v.view(np.int32).min().view(np.uint32), v.max(), np.bitwise_xor.reduce(v), np.bitwise_and.reduce(v)]
    yield found, np.tile(np.array(expected, np.uint32), (32, 1)), 0


@case(PTX)
def conversions_to_narrow_floats(rng):
    x = (rng.normal(size=(64, 2)) * 2.0 ** rng.integers(-12, 12, (64, 1))).astype(np.float32)
    body = """mov.b32 %f0, %a0; mov.b32 %f1, %a1; cvt.rn.satfinite.e4m3x2.f32 %h0, %f1, %f0; cvt.u32.u16 %o0, %h0;
    cvt.rn.satfinite.e5m2x2.f32 %h0, %f1, %f0;
    cvt.u32.u16 %o1, %h0; cvt.rn.bf16x2.f32 %o2, %f1, %f0; cvt.rn.f16x2.f32 %o3, %f1, %f0; cvt.rna.tf32.f32 %o4, %f0;"""
    found = run_words(body, x, 5)
    for i, (dtype, top) in enumerate(((E4M3, 448), (E5M2, 57344))):
        yield found[:, i], bits(np.clip(x, -top, top).astype(dtype)).view(np.uint16)[:, 0].astype(np.uint32), 0
    yield found[:, 2], bits(x.astype(BF16)).view(np.uint32)[:, 0], 0
    with np.errstate(over="ignore"):
        yield found[:, 3], x.astype(np.float16).view(np.uint32)[:, 0], 0
    yield found[:, 4], (x[:, 0].view(np.uint32) + 0x1000) & 0xFFFFE000, 0


@case(PTX)
def roundings_of_f32(rng):
    x = rng.normal(size=(64, 3)).astype(np.float32)
    body = "mov.b32 %f0, %a0; mov.b32 %f1, %a1; mov.b32 %f2, %a2; " + " ".join(
        f"add.{mode}.f32 %f3, %f0, %f1; mov.b32 %o{i}, %f3;" for i, mode in enumerate(("rn", "rz", "rm", "rp"))
    ) + " fma.rn.f32 %f3, %f0, %f1, %f2; mov.b32 %o4, %f3; div.rn.f32 %f3, %f0, %f1; mov.b32 %o5, %f3;"  # fmt: skip
    found, (a, b, c) = run_words(body, x, 6).view(np.float32), x.T.astype(np.float64)
    total, near = a + b, x[:, 0] + x[:, 1]
    down = np.where(near > total, np.nextafter(near, np.float32(-np.inf)), near)
    up = np.where(near < total, np.nextafter(near, np.float32(np.inf)), near)
    for i, expected in enumerate((near, np.where(total > 0, down, up), down, up)):
        yield found[:, i], expected.astype(np.float32), 0
    yield found[:, 4], (a * b + c), np.abs(a * b + c) * 2.0**-23 + 1e-30
    yield found[:, 5], x[:, 0] / x[:, 1], 0


@case(PTX)
def atomics_in_shared_memory(rng):
    x = rng.integers(0, 1000, (64, 1)).astype(np.uint32)
    prologue = (
        "mov.u32 %r9, mem; setp.lt.u32 %p5, %r0, 4; shl.b32 %r8, %r0, 2; add.u32 %r8, %r8, %r9; @%p5 st.shared.u32 [%r8], 7; bar.sync 0;"
    )
    body = """atom.shared.add.u32 %r1, [%r9], %a0; atom.shared.max.u32 %r1, [%r9+4], %a0; atom.shared.min.u32 %r1, [%r9+8], %a0;
    red.shared.inc.u32 [%r9+12], 20; bar.sync 0; ld.shared.v4.u32 {%o0, %o1, %o2, %o3}, [%r9];"""
    found, v = run_words(body, x, 4, shared=16, prologue=prologue), x[:, 0]
    yield found, np.tile(np.array([v.sum() + 7, v.max(), min(v.min(), 7), (7 + 64) % 21], np.uint32), (64, 1)), 0


@case(PTX)
def pipeline_of_asynchronous_copies(rng):
    x = words(rng, 32, 4)
    prologue = """mov.u32 %r9, mem; mul.lo.u32 %r8, %r0, 16; add.u32 %r8, %r8, %r9; mul.wide.u32 %w5, %r0, 16; add.u64 %w5, %w0, %w5;
    cp.async.cg.shared.global [%r8], [%w5], 16; cp.async.commit_group; cp.async.ca.shared.global [%r8+512], [%w5+4], 4, 2;
    cp.async.commit_group;
    cp.async.wait_group 1; bar.sync 0; xor.b32 %r7, %r8, 16; ld.shared.v4.u32 {%o0, %o1, %o2, %o3}, [%r7]; cp.async.wait_all; bar.sync 0;
    ld.shared.u32 %o4, [%r8+512];"""
    found = run_words("", x, 5, shared=1024, prologue=prologue)
    yield found[:, :4], x.reshape(16, 2, 4)[:, ::-1].reshape(32, 4), 0
    yield found[:, 4], x[:, 1] & 0xFFFF, 0


@case(PTX)
def bulk_copy_and_mbarrier(rng):
    x = words(rng, 64, 2)
    prologue = """mov.u32 %r9, mem; setp.eq.u32 %p5, %r0, 0; add.u32 %r7, %r9, 512;
    @%p5 mbarrier.init.shared.b64 [%r7], 1; @%p5 fence.mbarrier_init.release.cluster; bar.sync 0; @!%p5 bra W;
    mbarrier.arrive.expect_tx.shared.b64 %w9, [%r7], 512; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%w0],
    512, [%r7];
    W: mbarrier.try_wait.parity.shared.b64 %p4, [%r7], 0; @!%p4 bra W; shl.b32 %r8, %r0, 3; sub.u32 %r8, 504, %r8; add.u32 %r8, %r8, %r9;
    ld.shared.v2.u32 {%o0, %o1}, [%r8];"""
    yield run_words("", x, 2, shared=1024, prologue=prologue), x[::-1], 0


@case(PTX)
def matrices_moved_and_transposed(rng):
    x = words(rng, 32, 4)
    prologue = "mov.u32 %r9, mem; shl.b32 %r8, %r0, 4; add.u32 %r8, %r8, %r9;"
    body = """st.shared.v4.u32 [%r8], {%a0, %a1, %a2, %a3}; bar.warp.sync 0xffffffff;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%o0, %o1, %o2, %o3}, [%r8];
    movmatrix.sync.aligned.m8n8.trans.b16 %o4, %o0; bar.warp.sync 0xffffffff; stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r8], {%o0,
    %o1, %o2, %o3};
    bar.warp.sync 0xffffffff; ld.shared.v4.u32 {%o5, %o6, %o7, %o8}, [%r8];"""
    found = run_words(body, x, 9, shared=512, prologue=prologue)
    tiles = x.view(np.uint16).reshape(4, 8, 8)
    fragment = lambda tile: np.ascontiguousarray(tile).view(np.uint32).reshape(32)
    yield found[:, :4], np.stack([fragment(tile) for tile in tiles], 1), 0
    yield found[:, 4], fragment(tiles[0].T), 0
    yield found[:, 5:], np.ascontiguousarray(tiles.transpose(0, 2, 1)).reshape(32, 8).view(np.uint32), 0


def _rows_of_fragments(a, rows, k):
    """The A registers of m16n8k16 by lane, from [16, k] of 16 bits."""
    words_ = np.ascontiguousarray(a).view(np.uint32).reshape(16, -1)
    g, q = np.arange(32) // 4, np.arange(32) % 4
    return np.stack([words_[g + i % 2 * 8, q + i // 2 * 4] for i in range(rows)], 1)


@case(PTX)
def sparse_product_of_f16(rng):
    a, b = small(rng, 16, 16), small(rng, 32, 8)
    lanes = np.arange(32)
    columns = np.ascontiguousarray(b.T).view(np.uint32)
    kept = np.stack([columns[lanes // 4, lanes % 4 + 4 * i] for i in range(4)], 1)
    meta = np.full((32, 1), 0x44444444, np.uint32)  # of each four elements the first and the second
    x = np.concatenate([_rows_of_fragments(a, 4, 16), kept, meta], 1)
    body = """mov.f32 %f0, 0f00000000; mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%a0,
    %a1, %a2, %a3},
    {%a4, %a5, %a6, %a7}, {%f0, %f0, %f0, %f0}, %a8, 0; mov.b32 %o0, %f1; mov.b32 %o1, %f2; mov.b32 %o2, %f3; mov.b32 %o3, %f4;"""
    dense = np.zeros((16, 32), np.float32)
    dense.reshape(16, 8, 4)[..., :2] = a.reshape(16, 8, 2)
    d = dense @ b.astype(np.float32)
    g, q = lanes // 4, lanes % 4 * 2
    yield run_words(body, x, 4).view(np.float32), np.stack([d[g, q], d[g, q + 1], d[g + 8, q], d[g + 8, q + 1]], 1), 0


@case(PTX)
def product_with_block_scales_on_sm_120(rng):
    a, b = small(rng, 16, 32, dtype=E4M3), small(rng, 8, 32, dtype=E4M3)
    lanes = np.arange(32)
    columns = np.ascontiguousarray(b).view(np.uint32)
    scales = rng.integers(120, 134, (32, 2)).astype(np.uint32)
    x = np.concatenate(
        [_rows_of_fragments(a.view(np.uint16), 4, 32), columns[lanes // 4][lanes[:, None], (lanes % 4)[:, None] + [0, 4]], scales], 1
    )
    body = """mov.f32 %f0, 0f00000000; mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0
    {%f1, %f2, %f3, %f4}, {%a0, %a1, %a2, %a3}, {%a4, %a5}, {%f0, %f0, %f0, %f0}, %a6, {0, 0}, %a7, {0, 0};
    mov.b32 %o0, %f1; mov.b32 %o1, %f2; mov.b32 %o2, %f3; mov.b32 %o3, %f4;"""
    row, column = np.arange(16), np.arange(8)
    left = (
        scales[row % 8 * 4 + row // 8, 0].astype(np.float64) - 127
    )  # byte 0 of thread 0 of a quad: rows 0 to 7, of thread 1: rows 8 to 15
    right = scales[column * 4, 1].astype(np.float64) - 127
    d = (a.astype(np.float64) @ b.T.astype(np.float64) * 2.0 ** (left[:, None] + right)).astype(np.float32)
    g, q = lanes // 4, lanes % 4 * 2
    expected = np.stack([d[g, q], d[g, q + 1], d[g + 8, q], d[g + 8, q + 1]], 1)
    yield run_words(body, x, 4, target="RTX 5090").view(np.float32), expected, 0


@case(PTX)
def product_of_a_warpgroup(rng):
    """wgmma from shared memory without swizzle: cores of 8 rows of 16 bytes."""
    a, b = small(rng, 64, 16), small(rng, 8, 16)
    cores = lambda m: np.ascontiguousarray(m.reshape(-1, 8, 2, 8).transpose(0, 2, 1, 3))  # 8 x 8 each; along K first
    memory = np.concatenate([cores(a).reshape(-1).view(np.uint32), cores(b).reshape(-1).view(np.uint32)])
    x = np.zeros((128, 5), np.uint32)
    x.reshape(-1)[: memory.size] = memory
    prologue = f"""mov.u32 %r9, mem; shl.b32 %r8, %r0, 2; add.u32 %r8, %r8, %r9; mul.wide.u32 %w5, %r0, 4; add.u64 %w5, %w0, %w5;
    {" ".join(f"ld.global.u32 %r1, [%w5+{512 * i}]; st.shared.u32 [%r8+{512 * i}], %r1;" for i in range(5))}
    fence.proxy.async.shared::cta; bar.sync 0; shr.u32 %r7, %r9, 4; cvt.u64.u32 %w6, %r7; or.b64 %w6, %w6, {8 << 16 | 16 << 32};
    add.u64 %w7, %w6, 128; wgmma.fence.sync.aligned; mov.pred %p0, 0;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%f0, %f1, %f2, %f3}}, %w6, %w7, %p0, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    mov.b32 %o0, %f0; mov.b32 %o1, %f1; mov.b32 %o2, %f2; mov.b32 %o3, %f3;"""
    d, thread = a.astype(np.float32) @ b.T.astype(np.float32), np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    expected = np.stack([d[row, column], d[row, column + 1], d[row + 8, column], d[row + 8, column + 1]], 1)
    yield run_words("", x, 4, shared=4096, prologue=prologue).view(np.float32), expected, 0


@case(PTX)
def product_in_tensor_memory(rng):
    """tcgen05 on sm_100a: operands without swizzle, one product of 128 x 8 x 16, and its sums from tensor memory."""
    a, b = small(rng, 128, 16), small(rng, 8, 16)
    cores = lambda m: np.ascontiguousarray(m.reshape(-1, 8, 2, 8).transpose(0, 2, 1, 3))
    memory = np.concatenate([cores(a).reshape(-1).view(np.uint32), cores(b).reshape(-1).view(np.uint32)])
    x = np.zeros((128, 9), np.uint32)
    x.reshape(-1)[: memory.size] = memory
    shape = 1 << 4 | (8 // 8) << 17 | (128 // 16) << 24  # f32 sums; A and B are f16, and K is the fast axis of both
    prologue = f"""mov.u32 %r9, mem; add.u32 %r7, %r9, 6144; setp.lt.u32 %p5, %r0, 32; setp.eq.u32 %p4, %r0, 0;
    @!%p5 bra A; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r7], 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    A: @%p4 mbarrier.init.shared.b64 [%r7+8], 1; @%p4 fence.mbarrier_init.release.cluster;
    shl.b32 %r8, %r0, 2; add.u32 %r8, %r8, %r9; mul.wide.u32 %w5, %r0, 4; add.u64 %w5, %w0, %w5;
    {" ".join(f"ld.global.u32 %r1, [%w5+{512 * i}]; st.shared.u32 [%r8+{512 * i}], %r1;" for i in range(9))}
    fence.proxy.async.shared::cta; tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
    ld.shared.u32 %r6, [%r7];
    shr.u32 %r5, %r9, 4; cvt.u64.u32 %w6, %r5; mov.b64 %w8, {1 << 46 | 16 << 32 | 8 << 16}; or.b64 %w6, %w6, %w8; add.u64 %w7, %w6, 256;
    @!%p4 bra W; mov.pred %p0, 0; tcgen05.mma.cta_group::1.kind::f16 [%r6], %w6, %w7, {shape}, %p0;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r7+8];
    W: mbarrier.try_wait.parity.shared.b64 %p3, [%r7+8], 0; @!%p3 bra W; tcgen05.fence::after_thread_sync;
    and.b32 %r4, %r0, 96; shl.b32 %r4, %r4, 16; add.u32 %r4, %r4, %r6;
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {{%o0, %o1, %o2, %o3, %o4, %o5, %o6, %o7}}, [%r4]; tcgen05.wait::ld.sync.aligned;
    tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
    @!%p5 bra Z; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 32; Z:"""
    found = run_words("", x, 8, target="B200", shared=8192, prologue=prologue).view(np.float32)
    yield found, a.astype(np.float32) @ b.T.astype(np.float32), 0


@case(PTX)
def distributed_shared_memory(rng):
    """A cluster of two blocks: each reads what the other has in its shared memory."""
    x = words(rng, 32, 2)
    prologue = """mov.u32 %r9, mem; mov.u32 %r1, %cluster_ctarank; mul.lo.u32 %r2, %r1, 32; add.u32 %r0, %r0, %r2; mul.wide.u32 %w5, %r0, 8;
    mov.u32 %r3, %tid.x; shl.b32 %r3, %r3, 2; add.u32 %r3, %r3, %r9;"""
    body = """add.u32 %r4, %a0, %r1; st.shared.u32 [%r3], %r4; barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
    xor.b32 %r5, %r1, 1; mapa.shared::cluster.u32 %r6, %r3, %r5; ld.shared::cluster.u32 %o0, [%r6]; mov.u32 %o1, %r5;
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"""
    x = words(rng, 64, 2)
    found = run_words(body, x, 2, shared=256, prologue=prologue, block=32, grid=2, cluster=2)
    ranks = np.repeat([1, 0], 32).astype(np.uint32)
    yield found[:, 0], np.roll(x[:, 0], 32) + ranks, 0
    yield found[:, 1], ranks, 0


@case(PTX)
def compare_and_swap_until_it_holds(rng):
    """Multiplies an accumulator of all threads by compare and swap, in a loop."""
    x = rng.choice(np.array([1, 3, 5, 7], np.uint32), (40, 1))
    prologue = "mov.u32 %r9, mem; setp.eq.u32 %p5, %r0, 0; @%p5 st.shared.u32 [%r9], 1; bar.sync 0;"
    body = """ld.volatile.shared.u32 %r1, [%r9]; L: mul.lo.u32 %r2, %r1, %a0; mov.u32 %r3, %r1; atom.shared.cas.b32 %r1, [%r9], %r3, %r2;
    setp.ne.u32 %p0, %r1, %r3; @%p0 bra L; bar.sync 0; ld.shared.u32 %o0, [%r9];"""
    found = run_words(body, x, 1, shared=16, prologue=prologue)
    yield found, np.full((40, 1), np.multiply.reduce(x[:, 0], dtype=np.uint32)), 0
