"""tcgen05 on arrays: mma in every layout against `dot` of the same codes, which are placed by formulas written here; ld, st, cp, shift."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import sample_cases
from support.tcgen05_operands import D_PLACES, RNG, codes, descriptor, k_major, place, result

import tcemu
from tcemu.engine.instructions import tcgen05
from tcemu.engine.instructions.tcgen05_operands import element_operands, loses_bits, scale_accumulator
from tcemu.engine.isa.tcgen05_descriptors import InstructionDescriptor, encode_instruction_descriptor
from tcemu.engine.layouts.tcgen05_memory import encode_tcgen05_descriptor
from tcemu.formats import F16, F32

B200 = "sm_100a"


FORMS = (
    "tcgen05.mma.cta_group::1.kind::f16.m128n16k16.f32.f16.f16",
    "tcgen05.mma.cta_group::1.kind::f16.m64n8k16.f16.f16.f16",
    "tcgen05.mma.cta_group::2.kind::f16.m256n16k16.f32.bf16.bf16",
    "tcgen05.mma.cta_group::2.kind::tf32.m128n16k8.f32.tf32.tf32",
    "tcgen05.mma.ws.cta_group::1.kind::f16.m32n64k16.f32.f16.f16",
    "tcgen05.mma.ws.cta_group::1.kind::f8f6f4.m64n64k32.f32.e4m3.e5m2",
    "tcgen05.mma.ws.cta_group::1.kind::i8.m128n64k32.s32.u8.s8",
    "tcgen05.mma.cta_group::1.kind::f8f6f4.m64n8k32.f32.e2m1.e3m2",
    "tcgen05.mma.cta_group::1.kind::f8f6f4.m128n8k32.f16.e2m3.e4m3",
    "tcgen05.mma.cta_group::1.kind::i8.m64n8k32.satfinite.s32.s8.s8",
)


@pytest.mark.parametrize("spelling", sample_cases(FORMS, (FORMS[3], FORMS[7])))  # two blocks with one product; formats in bytes
def test_mma_is_the_product_of_what_its_descriptors_name(spelling):
    op = tcemu.parse(spelling)
    a, b, c, (shared, tmem), (a_desc, b_desc) = place(op, 40)
    idesc = encode_instruction_descriptor(op)
    got = tcgen05.mma(str(op.instruction), 40, b_desc, idesc, shared, tmem, a_desc=a_desc, target=B200)
    want = np.asarray(tcemu.dot(op, a, b.T.copy(), c, target=B200)).astype(np.uint32)
    assert (result(op, got, 40) == want).all()
    kept = np.ones(np.asarray(tmem).reshape(-1, 128, 512).shape, bool)
    for r, column in np.ndindex(op.m, op.n):
        cta, lane, at = D_PLACES[op.m, op.cta_group, op.ws](r, column, op.n)
        kept[cta, lane, 40 + at] = False
    assert (np.asarray(got).reshape(kept.shape)[kept] == tmem.reshape(kept.shape)[kept]).all()  # nothing else changed


def test_operands_that_may_be_left_out_or_traced():
    """jit and vmap, A in tensor memory, negation, a mask of lanes, and D left out of the sum, on one product."""
    op = tcemu.parse(FORMS[0])
    a, b, c, (shared, tmem), (a_desc, b_desc) = place(op, 40)
    tmem[:, 300:308] = a.astype(np.uint32)[:, 0::2] | a.astype(np.uint32)[:, 1::2] << 16
    want = np.asarray(tcemu.dot(op, a, b.T.copy(), c, target=B200))
    idesc = encode_instruction_descriptor(op)
    words = lambda value: np.array([value & 0xFFFFFFFF, value >> 32], np.uint32)
    call = jax.jit(lambda d, desc, shared, tmem: tcgen05.mma(op, d, desc, idesc, shared, tmem, a_tmem=300, target=B200))
    assert (result(op, call(np.uint32(40), words(b_desc), shared, tmem), 40) == want).all()
    both = jax.vmap(call, in_axes=(0, None, None, 0))(np.array([40, 40], np.uint32), words(b_desc), shared, np.stack([tmem, tmem]))
    assert all((result(op, one, 40) == want).all() for one in both)
    negated = encode_instruction_descriptor(InstructionDescriptor(op, negate_a=True))
    mask = np.array([0, 0xFFFF0000, 0, 1], np.uint32)
    got = tcgen05.mma(op, 40, b_desc, negated, shared, tmem, a_desc=a_desc, enable_input_d=False, disable_output_lane=mask, target=B200)
    want = np.array(tcemu.dot(op, a ^ np.uint16(0x8000), b.T.copy(), np.zeros_like(c), target=B200))
    off = [lane for lane in range(128) if mask[lane // 32] >> lane % 32 & 1]
    want[off] = c[off]
    assert (result(op, got, 40) == want).all() and len(off) == 17


SCALED = (
    "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.m128n8k32.f32.e4m3.e5m2",
    "tcgen05.mma.cta_group::2.kind::mxf4.block_scale.m256n16k64.f32.e2m1.e2m1",
    "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16.m128n8k64.f32.e2m1.e2m1.ue4m3",
)


@pytest.mark.parametrize("spelling", [SCALED[0], *(pytest.param(form, marks=pytest.mark.full) for form in SCALED[1:])])
def test_block_scales(spelling):
    op = tcemu.parse(spelling)
    a, b, c, (shared, tmem), (a_desc, b_desc) = place(op, 40)
    tmem = tmem.reshape(-1, 128, 512)
    bias = op.scaling.format.bias << op.scaling.format.mantissa_bits
    ids = {1: (3, 1), 2: (2, 0), 4: (0, 0)}[op.scaling.count]
    scales = [(bias + RNG.integers(-3, 4, (rows, op.scaling.count))).astype(np.uint8) for rows in (op.m, op.n)]
    tmem[:, :, 200:204] = tmem[:, :, 220:224] = 0
    for cta, x, s, quarter in product(range(op.cta_group), range(128), range(op.scaling.count), range(4)):
        tmem[cta, x % 32 + 32 * quarter, 200 + x // 32] |= np.uint32(int(scales[0][128 * cta + x, s]) << 8 * (ids[0] + s))
        if x < op.n:
            tmem[cta, x % 32 + 32 * quarter, 220 + x // 32] |= np.uint32(int(scales[1][x, s]) << 8 * (ids[1] + s))
    idesc = encode_instruction_descriptor(InstructionDescriptor(op, scale_a_id=ids[0], scale_b_id=ids[1]))
    tmem = tmem if op.cta_group == 2 else tmem[0]
    got = tcgen05.mma(op, 40, b_desc, idesc, shared, tmem, a_desc=a_desc, scale_a=200, scale_b=220, target=B200, checked=True)
    want = tcemu.dot(op, a, b.T.copy(), c, scale_a=scales[0], scale_b=scales[1].T.copy(), target=B200)
    assert (result(op, got, 40) == np.asarray(want)).all()


def test_sparse():
    """f16, 2:4, with metadata as section 9.7.16.10.8 has it for M = 128."""
    op = tcemu.parse("tcgen05.mma.sp.cta_group::1.kind::f16.m128n8k32.f32.f16.f16")
    fields = RNG.choice([0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110], (128, 8)).astype(np.uint8)
    stored, b = codes(op, "a", (128, 16)), codes(op, "b", (8, 32))
    shared = np.zeros(32768, np.uint8)
    k_major(stored, 16, False, 0, shared)
    k_major(b, 16, False, 16384, shared)
    tmem = np.zeros((128, 512), np.uint32)
    for m, chunk in np.ndindex(128, 8):
        k = 4 * chunk
        tmem[m % 8 + 8 * (k // 16) + 16 * (m // 16), 100] |= np.uint32(int(fields[m, chunk]) << 16 * (m // 8 % 2) + k % 16)
    idesc = encode_instruction_descriptor(op)
    got = tcgen05.mma(
        op, 0, descriptor(32, 16, False, 16384), idesc, shared.view(np.uint32), tmem, a_desc=descriptor(16, 16, False, 0), sp_meta=100,
        target=B200, checked=True,
    )  # fmt: skip
    dense = np.zeros((128, 32), np.uint16)
    for m, chunk in np.ndindex(128, 8):
        for i in range(2):
            dense[m, 4 * chunk + (fields[m, chunk] >> 2 * i & 3)] = stored[m, 2 * chunk + i]
    values = lambda x: np.asarray(tcemu.formats.to_float(F16, x), np.float64)
    exact = values(dense) @ values(b).T
    d = np.asarray(got)[:, :8].view(np.float32)
    assert np.abs(d - exact).max() < 1e-5 and np.abs(exact).max() > 3
    with pytest.raises(tcemu.UndefinedBehaviour, match="a field is 0"):
        tcgen05.mma(
            op, 0, 1 << 46, idesc, shared.view(np.uint32), np.zeros_like(tmem), a_desc=1 << 46, sp_meta=100, target=B200, checked=True
        )


@pytest.mark.full
def test_zero_columns():
    """The manual's example: skip 2, use 3, first span of ones, start 1, M = 32: ...0000 111 0000 11."""
    value = 1 << 39 | 2 << 40 | 3 << 48 | 1 << 32 | 1
    columns, by = tcgen05.zero_columns(value, 32, 64)
    assert columns[:16].astype(int).tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1] and by == 0
    assert columns[16:20].astype(int).tolist() == [0, 0, 0, 0] and not tcgen05.zero_columns(0, 32, 64)[0].any()
    op = tcemu.parse(FORMS[4])
    a, b, c, (shared, tmem), (a_desc, b_desc) = place(op, 40)
    got = tcgen05.mma(op, 40, b_desc, None, shared, tmem, a_desc=a_desc, zero_column_mask=value, target=B200)
    want = tcemu.dot(op, a, np.where(columns, np.uint16(0), b.T).astype(np.uint16), c, target=B200)
    assert (result(op, got, 40) == np.asarray(want)).all()


RUBIN = "sm_107a"
LONG_STEPS = (
    "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16.m128n8k128.f32.e2m1.e2m1.ue5m3",
    "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.m128n8k64.f32.e4m3.e2m1.ue8m0",
)
USUAL = {128: ("k128.f32.e2m1.e2m1.ue5m3", "k64.f32.e2m1.e2m1.ue4m3"), 64: ("k64", "k32")}  # what a B200 has in its place


@pytest.mark.parametrize("spelling", sample_cases(LONG_STEPS, LONG_STEPS[:1]))
def test_layouts_of_rubin_with_a_model_of_ones_own(spelling):
    """Tensor memory of 576 columns, and rows of eight scales; how the sums are added is nobody's to say but the caller's."""
    op = tcemu.parse(spelling)
    a, b, c, (shared, tmem), (a_desc, b_desc) = place(op, 560, 576)
    count, bias = op.scaling.count, op.scaling.format.bias << op.scaling.format.mantissa_bits
    scales = [(bias + RNG.integers(-3, 4, (rows, count))).astype(np.uint8) for rows in (op.m, op.n)]
    tmem[:, 520:528] = tmem[:, 540:548] = 0
    for x, s, quarter in product(range(128), range(count), range(4)):
        column, shift = x // 32 + 4 * (s // 4), 8 * (s % 4)
        tmem[x % 32 + 32 * quarter, 520 + column] |= np.uint32(int(scales[0][x, s]) << shift)
        if x < op.n:
            tmem[x % 32 + 32 * quarter, 540 + column] |= np.uint32(int(scales[1][x, s]) << shift)
    operands = {"a_desc": a_desc, "scale_a": 520, "scale_b": 540, "target": RUBIN}
    with pytest.raises(tcemu.NotModelled, match="one sum"):
        tcgen05.mma(op, 560, b_desc, None, shared, tmem, **operands)
    model = tcemu.get_model(spelling.replace(*USUAL[op.k]), B200)
    got = tcgen05.mma(op, 560, b_desc, encode_instruction_descriptor(op), shared, tmem, model=model, checked=True, **operands)
    want = tcemu.dot(op, a, b.T.copy(), c, scale_a=scales[0], scale_b=scales[1].T.copy(), target=RUBIN, model=model)
    assert (result(op, got, 560) == np.asarray(want)).all()
    with pytest.raises(ValueError, match=r"tensor memory is uint32\[\.\.\., 128, 576\]"):
        tcgen05.mma(op, 40, b_desc, None, shared, tmem[:, :512], model=model, **operands)


def test_moves_of_rubin():
    """The last columns are reached by ld, st, cp, shift and an allocation of their own; on a B200 they are not there."""
    tmem, load = RNG.integers(0, 1 << 32, (128, 576), dtype=np.uint32), "tcgen05.ld.sync.aligned.32x32b.x16.b32"
    assert (np.asarray(tcgen05.ld(load, 560, tmem, warp=1, target=RUBIN)) == tmem[32:64, 560:]).all()
    with pytest.raises(tcemu.UndefinedBehaviour, match="128 lanes and 576 columns"):
        tcgen05.ld(load, 561, tmem, target=RUBIN)
    back = np.asarray(tcgen05.st(load.replace(".ld", ".st"), 560, tmem[:32, :16], np.zeros_like(tmem), warp=2, target=RUBIN))
    assert (back[64:96, 560:] == tmem[:32, :16]).all() and np.count_nonzero(back) <= 512
    moved = np.asarray(tcgen05.shift("tcgen05.shift.cta_group::1.down", 568, tmem, target=RUBIN))
    assert (moved[:31, 568:] == tmem[1:32, 568:]).all() and (moved[:, :568] == tmem[:, :568]).all()
    block = tcemu.instructions.Tcgen05Block(np.zeros(64, np.uint32), target="Rubin")
    for columns, want in ((512, 0), (64, 512)):
        first, block = block.alloc(columns)
        assert first == want and block.tmem.shape == (128, 576)
    with pytest.raises(tcemu.UndefinedBehaviour, match="32 columns are not free"):
        block.alloc(32)


LOADS = {  # thread t, register r -> lane, column
    "32x32b": lambda t, r: (t, r),
    "16x64b": lambda t, r: (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r),
    "16x128b": lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)),
    "16x256b": lambda t, r: (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)),
    "16x32bx2": lambda t, r: (t % 16, r + 4 * (t // 16)),
}


@pytest.mark.parametrize("tile", LOADS)
def test_ld_and_st(tile):
    tmem = RNG.integers(0, 1 << 32, (2, 128, 512), dtype=np.uint32)
    offset = {"half_split_offset": 4} if tile == "16x32bx2" else {}
    op = f"tcgen05.{{}}.sync.aligned.{tile}.x4{{}}.b32"
    got = np.asarray(tcgen05.ld(op.format("ld", ""), 7 | 96 << 16, tmem, warp=3, target=B200, **offset))
    for t, r in np.ndindex(got.shape[1:]):
        lane, column = LOADS[tile](t, r)
        assert (got[:, t, r] == tmem[:, 96 + lane, 7 + column]).all()
    back = tcgen05.st(op.format("st", ""), 7, got, np.zeros_like(tmem), warp=3, target=B200, **offset)
    assert (np.asarray(tcgen05.ld(op.format("ld", ""), 7, back, warp=7, target=B200, **offset)) == got).all()
    assert np.count_nonzero(np.asarray(back)) == np.count_nonzero(got)
    packed = np.asarray(tcgen05.ld(op.format("ld", ".pack::16b"), 8, tmem, target=B200, **offset))
    lane, column = LOADS[tile](5, 1) if tile != "16x32bx2" else (5, 1)
    assert packed[0, 5, 1] == (tmem[0, lane, 8 + 2 * column] & 0xFFFF) | tmem[0, lane, 9 + 2 * column] << 16
    unpacked = tcgen05.st(op.format("st", ".unpack::16b"), 8, packed, np.zeros_like(tmem), target=B200, **offset)
    assert (np.asarray(tcgen05.ld(op.format("ld", ".pack::16b"), 8, unpacked, target=B200, **offset)) == packed).all()
    assert np.asarray(unpacked).max() < 1 << 16


def test_ld_red():
    values = np.array([1.5, -2.0, np.nan, 0.25], np.float32)
    tmem = np.zeros((128, 512), np.uint32)
    tmem[:, :4] = values.view(np.uint32)
    tmem[1, :4] = np.array([0.0, -0.0, 0.0, 0.0], np.float32).view(np.uint32)
    op = "tcgen05.ld.red.sync.aligned.32x32b.x4.{}"
    red = lambda how: np.asarray(tcgen05.ld(op.format(how), 0, tmem, target="B300")[1])
    assert red("min.f32").view(np.float32)[0] == -2 and red("max.f32").view(np.float32)[0] == 1.5
    assert red("max.abs.f32").view(np.float32)[0] == 2 and red("min.NaN.f32")[0] == 0x7FFFFFFF
    assert red("min.f32")[1] == 0x80000000 and red("max.f32")[1] == 0
    words = tmem[0, :4].astype(np.uint32)
    assert red("max.u32")[0] == words.max() and red("min.s32")[0] == words.view(np.int32).min().astype(np.int32).view(np.uint32)
    with pytest.raises(tcemu.Unsupported, match="sm_103f"):
        tcgen05.ld(op.format("min.f32"), 0, tmem, target=B200)


def test_cp_and_shift():
    shared = RNG.integers(0, 1 << 32, 4096, dtype=np.uint32)
    desc = encode_tcgen05_descriptor(1024, 128, 256, 0)
    tmem = np.zeros((128, 512), np.uint32)
    row = lambda i, unit: shared[(1024 + 16 * (i % 8) + 256 * (i // 8) + 128 * unit) // 4 :][:4]
    got = np.asarray(tcgen05.cp("tcgen05.cp.cta_group::1.128x256b", 3, desc, shared, tmem, target=B200))
    assert all((got[i, 3 + 4 * u : 7 + 4 * u] == row(i, u)).all() for i in range(128) for u in range(2)) and np.count_nonzero(got) == 1024
    got = np.asarray(tcgen05.cp("tcgen05.cp.cta_group::1.32x128b.warpx4", 3, desc, shared, tmem, target=B200))
    assert all((got[i, 3:7] == row(i % 32, 0)).all() for i in range(128))
    got = np.asarray(tcgen05.cp("tcgen05.cp.cta_group::1.4x256b", 3 | 31 << 16, desc, shared, tmem, target=B200))
    assert all((got[31 + 32 * i, 3:7] == row(i, 0)).all() for i in range(4)) and np.count_nonzero(got) == 32
    got = np.asarray(tcgen05.cp("tcgen05.cp.cta_group::1.64x128b.warpx2::01_23.b8x16.b4x16_p64", 3, desc, shared, tmem, target=B200))
    packed = row(40, 0).view(np.uint8)[:8]
    assert (
        got[64 + 8, 3:7].tobytes() == bytes(int(packed[i // 2] >> 4 * (i % 2) & 15) << 2 for i in range(16)) == got[96 + 8, 3:7].tobytes()
    )
    pair = np.asarray(
        tcgen05.cp("tcgen05.cp.cta_group::2.128x128b", 0, desc, np.stack([shared, shared[::-1]]), np.stack([tmem, tmem]), target=B200)
    )
    assert (pair[0, 9, :4] == row(9, 0)).all() and (pair[1, 9, :4] != pair[0, 9, :4]).any()
    with pytest.raises(tcemu.NotModelled, match="six bits"):
        tcgen05.cp("tcgen05.cp.cta_group::1.128x128b.b8x16.b6x16_p32", 0, desc, shared, tmem, target=B200)
    tmem = RNG.integers(0, 1 << 32, (128, 512), dtype=np.uint32)
    moved = np.asarray(tcgen05.shift("tcgen05.shift.cta_group::1.down", 16, tmem, target=B200))
    for lane in range(128):
        source = lane if lane % 32 == 31 else lane + 1
        assert (moved[lane, 16:24] == tmem[source, 16:24]).all()
    assert (moved[:, 24:] == tmem[:, 24:]).all() and (moved[:, :16] == tmem[:, :16]).all()


WRONG = {  # what is wrong -> error, words of its message
    "no A": (ValueError, "got neither", {"a_desc": None}),
    "both A": (ValueError, "got both", {"a_tmem": 0}),
    "scales": (ValueError, "scale_a: .* has none", {"scale_a": 0}),
    "scaled D": (tcemu.Unsupported, "expected 0 to 15", {"scale_input_d": 16}),
    "scaled D on Thor": (tcemu.Unsupported, "needs sm_100a", {"scale_input_d": 3, "target": "sm_110a"}),
    "K of 96": (tcemu.UndefinedBehaviour, "bit 52", {"a_desc": encode_tcgen05_descriptor(0, 128, 256, 128, absolute=True)}),
    "zero columns": (tcemu.Unsupported, "zero_column_mask", {"zero_column_mask": 0}),
    "beyond the columns": (tcemu.UndefinedBehaviour, "column 515", {"d": 500}),
    "beyond shared memory": (
        tcemu.UndefinedBehaviour,
        "shared memory, which has",
        {"b_desc": encode_tcgen05_descriptor(131072, 128, 256, 0)},
    ),
    "a descriptor of wgmma": (tcemu.UndefinedBehaviour, "bits 46 to 48", {"b_desc": 0}),
    "another descriptor": (tcemu.Unsupported, "describes", {"idesc": 0x8110010}),
    "another dtype": (TypeError, "tensor memory is uint32", {"tmem": np.zeros((128, 512))}),
    "another shape": (ValueError, "tensor memory is uint32", {"tmem": np.zeros((128, 500), np.uint32)}),
    "a target without": (tcemu.Unsupported, "needs sm_100a", {"target": "H100"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
    error, said, changes = WRONG[case]
    op = tcemu.parse(FORMS[0])
    desc = encode_tcgen05_descriptor(0, 128, 256, 0)
    arguments = {"d": 0, "b_desc": desc, "idesc": None, "shared": np.zeros(4096, np.uint32), "tmem": np.zeros((128, 512), np.uint32)}
    with pytest.raises(error, match=said):
        tcgen05.mma(op, **arguments | {"a_desc": desc, "target": B200} | changes)


def test_ashift_needs_a_in_tensor_memory_and_128_rows():
    op, desc = "tcgen05.mma.cta_group::1.kind::f16.ashift", encode_tcgen05_descriptor(0, 128, 256, 0)
    shared, tmem = np.zeros(4096, np.uint32), np.zeros((128, 512), np.uint32)
    for m, a, said in ((128, {"a_desc": desc}, "from tensor memory"), (64, {"a_tmem": 64}, "M of 128 or 256")):
        idesc = encode_instruction_descriptor(tcemu.parse(f"tcgen05.mma.cta_group::1.kind::f16.m{m}n16k16.f32.f16.f16"))
        with pytest.raises(tcemu.Unsupported, match=said):
            tcgen05.mma(op, 0, desc, idesc, shared, tmem, target=B200, **a)


@pytest.mark.parametrize("fmt, dtype, wide", [(F16, np.uint16, np.float64), (F32, np.uint32, np.float64)])
def test_a_scaled_d_is_exact_or_rounded_toward_zero(fmt, dtype, wide):
    """Against float64, which holds every f16 and f32 and their quotients by powers of two."""
    drawn = RNG.integers(0, 1 << fmt.bits, 4096).astype(dtype)
    small = RNG.integers(0, 40 << fmt.mantissa_bits, 4096).astype(dtype) % np.array(fmt.infinity, dtype)
    found_open = 0
    for codes_of_d, by in product((drawn, small | np.array(1 << fmt.bits - 1, dtype)), (1, 3, 15)):
        got = np.asarray(scale_accumulator(fmt, jnp.asarray(codes_of_d), by))
        finite = (codes_of_d & fmt.nan) < fmt.infinity
        assert (got[~finite] == codes_of_d[~finite]).all()
        values = codes_of_d[finite].view(f"f{fmt.bits // 8}").astype(wide)
        unit = wide(2.0) ** (fmt.min_exponent - fmt.mantissa_bits)
        exact = values * wide(2.0) ** -by
        expected = np.where(np.abs(exact) < wide(2.0) ** fmt.min_exponent, np.trunc(exact / unit) * unit, exact)
        assert (got[finite].view(f"f{fmt.bits // 8}").astype(wide) == expected).all()
        assert (got[finite] >> fmt.bits - 1 == codes_of_d[finite] >> fmt.bits - 1).all()
        is_open = (exact != 0) & (np.abs(exact) < wide(2.0) ** fmt.min_exponent)
        assert (np.asarray(loses_bits(fmt, jnp.asarray(codes_of_d), by))[finite] == is_open).all()
        found_open += int(is_open.sum())
    assert found_open > 2000


def test_a_subnormal_scaled_d_is_reported_in_checked_mode():
    op = tcemu.parse(FORMS[0])
    _, _, _, (shared, tmem), (a_desc, b_desc) = place(op, 40)
    tmem[5, 41] = 0x00800000
    with pytest.raises(tcemu.UndefinedBehaviour, match="D is 8388608; nobody has published"):
        tcgen05.mma(op, 40, b_desc, None, shared, tmem, a_desc=a_desc, scale_input_d=2, target=B200, checked=True)


@pytest.mark.parametrize("spelling", [FORMS[1], *(pytest.param(form, marks=pytest.mark.full) for form in (FORMS[0], *FORMS[2:]))])
def test_the_operands_of_an_element_are_those_that_were_placed_and_explain_its_word(spelling):
    op = tcemu.parse(spelling)
    a, b, c, (shared, tmem), (a_desc, b_desc) = place(op, 40)
    for row, column in ((0, 0), (op.m // 2 + 3, op.n // 2 + 1), (op.m - 1, op.n - 1)):
        found = element_operands(InstructionDescriptor(op), row, column, shared, tmem, d=40, a_desc=a_desc, b_desc=b_desc)
        assert (found["a_row"] == a[row]).all()
        assert (found["b_col"] == b[column]).all()
        assert int(found["c"]) == int(c[row, column])
        want = tcemu.dot(
            op, a[row : row + 1].repeat(op.m, 0), b[column : column + 1].T.repeat(op.n, 1), np.full_like(c, c[row, column]), target=B200
        )
        assert tcemu.explain(op, **found, codes=True, target=B200).result == int(np.asarray(want)[0, 0]) & (1 << op.d.bits) - 1
    with pytest.raises(ValueError, match=f"D of .* has {op.m} rows"):
        element_operands(InstructionDescriptor(op), op.m, 0, shared, tmem, d=40, a_desc=a_desc, b_desc=b_desc)
