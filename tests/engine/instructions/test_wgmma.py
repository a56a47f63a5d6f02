"""`wgmma`: the recorded words of an H200, operands anywhere in shared memory, batch axes, tracing, and what bad input is told."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replay_golden as replay
from oracles import fragment_formulas as fragments
from oracles import reference
from support import golden
from support import random_operands as operands
from support import recorded_cases as recorded
from support.sampling import sample_cases
from support.traced_programs import EXACT, MOVES, float_operations

import tcemu
from tcemu.engine.instructions import register_products
from tcemu.engine.layouts.shared_memory import SharedLayout
from tcemu.formats import from_float

F16 = "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16"
FP8 = "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3"
S8 = "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.u8"
SPARSE = "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16"
TARGET = "sm_90a"
CASES = golden.cases("wgmma") + golden.cases("wgmma_sp")
STEP = 146 if len(CASES) > 100 else 2  # every so many of the whole recording, and half of the sample


def parameters(cases):
    return [pytest.param(case, id=f"{case['i']}-{case['ptx'].removeprefix('wgmma.mma_async.')}") for case in cases]


@pytest.mark.parametrize("case", parameters(CASES[::STEP]))
def test_recorded_words(case):
    wrong, words = replay.compare(case)
    assert words > 0 and wrong == 0, f"{wrong} mismatches of {words}"


@pytest.mark.full
@pytest.mark.parametrize("case", parameters(CASES))
def test_all_recorded_words(case):
    wrong, words = replay.compare(case)
    assert words > 0 and wrong == 0, f"{wrong} mismatches of {words}"


@pytest.mark.skipif(len(CASES) < 500, reason="needs the whole recording, of which the repository has a sample")
def test_every_type_is_recorded():
    def types(op):
        return op.family, op.a, op.b, op.d, op.satfinite, op.bit_op

    every = tcemu.isa.instructions(TARGET, family="wgmma") + tcemu.isa.instructions(TARGET, family="wgmma.sp")
    assert {types(tcemu.parse(case["ptx"])) for case in CASES} == {types(op) for op in every}
    assert all(tcemu.evidence(op, TARGET).level == "silicon" for op in every)
    assert len(every) > 1000


def image(rng, words=4096, batch=()):
    return rng.integers(0, 2**32, (*batch, words), np.uint32)


def draw_words(spelling, batch=(), seed=0):
    op, rng = tcemu.parse(spelling), np.random.default_rng(seed)
    return [rng.integers(0, 2**32, (*batch, 4, 32, op.register_count(name)), np.uint32) for name in "da"] + [image(rng, batch=batch)]


DESC = tcemu.layouts.descriptor(8192, 16, 1024, 128)
A_DESC = tcemu.layouts.descriptor(0, 16, 1024, 128)
META = np.full((4, 32), 0x4E4E4E4E, np.uint32)  # 0100: elements 0 and 1, 1110: 2 and 3


def reference_element(op, a, b, c, row, column):
    types = fragments.spelling(str(op))
    return reference.dot(
        *(types[name] for name in "dabc"), a[row].tolist(), b[:, column].tolist(), c, family=types["family"],
        **{name: types[name] for name in ("k", "mode", "satfinite", "bit_op")},
    )  # fmt: skip


@pytest.mark.parametrize(
    "types", ["k32.f16.e5m2.e4m3", *(pytest.param(types, marks=pytest.mark.full) for types in ("k16.f32.f16.f16", "k8.f32.tf32.tf32"))]
)
def test_scale_d_false_leaves_the_accumulator_out(types):
    op = tcemu.parse("wgmma.mma_async.sync.aligned.m64n8" + types)
    rng = np.random.default_rng(3)
    kinds = np.array_split(np.arange(64), len(operands.CLASSES))
    a = np.concatenate([operands.codes(op.a.name, kind, (len(at), op.k), rng) for kind, at in zip(operands.CLASSES, kinds, strict=True)])
    b = np.concatenate([operands.codes(op.b.name, kind, (1, op.k), rng) for kind in operands.CLASSES[:8]])
    memory = tcemu.layouts.to_shared(b, SharedLayout(op.b, 8, op.k, "k", 32))
    d = operands.codes(op.d.name, "raw", (64, 8), rng)
    call = lambda scale: tcemu.wgmma(
        op, tcemu.pack(op, "d", d), SharedLayout(op.b, 8, op.k, "k", 32).descriptor(), memory, a=tcemu.pack(op, "a", a),
        scale_d=scale, target=TARGET,
    )  # fmt: skip
    without, with_d = (np.asarray(tcemu.unpack(op, "d", call(scale))) for scale in (False, True))
    for row, column in np.ndindex(64, 8):
        assert without[row, column] == reference_element(op, a, b.T, None, row, column)
        assert with_d[row, column] == reference_element(op, a, b.T, int(d[row, column]), row, column)


@pytest.mark.full
def test_scale_d_may_be_traced_and_differ_between_warpgroups():
    d, a, shared = draw_words(S8, (2, 3))
    call = lambda scale: tcemu.wgmma(S8, d, DESC, shared, a=a, scale_d=scale, target=TARGET)
    true, false = np.asarray(call(True)), np.asarray(call(False))
    assert (true != false).any()
    np.testing.assert_array_equal((true - false), d)
    traced = jax.jit(call)
    np.testing.assert_array_equal(traced(True), true)
    np.testing.assert_array_equal(traced(False), false)
    mixed = np.asarray(traced(np.array([[True], [False]])))
    np.testing.assert_array_equal(mixed, np.stack([true[0], false[1]]))
    np.testing.assert_array_equal(call(np.array([[True], [False]])), mixed)


@pytest.mark.full
@pytest.mark.parametrize("spelling", [S8, pytest.param(F16, marks=pytest.mark.full), pytest.param(SPARSE, marks=pytest.mark.full)])
def test_any_leading_axes_give_the_same_words(spelling):
    d, a, shared = draw_words(spelling, (2, 3))
    sparse = {"sp_meta": META} if "sp" in spelling.split(".") else {}
    call = lambda d, a, shared, b: tcemu.wgmma(spelling, d, b, shared, a=a, target=TARGET, **sparse)
    whole = np.asarray(call(d, a, shared, DESC))
    words = np.array([DESC & 0xFFFFFFFF, DESC >> 32], np.uint32)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_array_equal(call(d[i, j], a[i, j], shared[i, j], words), whole[i, j])
    one = lambda d, a, shared: call(d, a, shared, DESC)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(one))(d, a, shared), whole)
    np.testing.assert_array_equal(jax.jit(call)(d, a, shared, words), whole)
    np.testing.assert_array_equal(call(d, a, shared, np.broadcast_to(words, (2, 1, 2))), whole)
    mixed = np.asarray(call(d[0, 0], a[1], shared[:, :1], DESC))
    assert mixed.shape == whole.shape
    np.testing.assert_array_equal(mixed[1, 2], call(d[0, 0], a[1, 2], shared[1, 0], DESC))
    assert call(d[:0], a[:0], shared[0, 0], DESC).shape == (0, *whole.shape[1:])


def test_a_descriptor_for_each_warpgroup():
    """One image, many descriptors: each warpgroup reads its own place, static or traced, of any mode."""
    d, _, shared = draw_words(F16)
    rng = np.random.default_rng(5)
    made = [
        tcemu.layouts.descriptor(*(16 * rng.integers(0, top, 3)), mode, int(rng.integers(0, 8)) if mode else 0)
        for mode in (0, 32, 64, 128)
        for top in (60, 40)
    ]
    words = np.array([[desc & 0xFFFFFFFF, desc >> 32] for desc in made], np.uint32)
    call = lambda a_words, b_words, shared: tcemu.wgmma(F16, d, b_words, shared, a_desc=a_words, imm_trans_b=1, target=TARGET)
    whole = np.asarray(call(words, words[::-1], shared))
    np.testing.assert_array_equal(jax.jit(call)(words, words[::-1], shared), whole)
    for at, (first, second) in enumerate(zip(made, made[::-1], strict=True)):
        np.testing.assert_array_equal(tcemu.wgmma(F16, d, second, shared, a_desc=first, imm_trans_b=1, target=TARGET), whole[at])


def test_new_descriptors_and_signs_do_not_compile_anew():
    d, a, shared = draw_words(F16)
    for start in range(0, 2048, 128):
        desc = tcemu.layouts.descriptor(start, 16, 256, (0, 32, 64, 128)[start // 128 % 4])
        tcemu.wgmma(F16, d, desc, shared, a=a, imm_scale_b=-1 if start > 1024 else 1, target=TARGET)
    before = register_products._emulate._cache_size()
    tcemu.wgmma(F16, d, DESC, shared, a=a, imm_scale_a=-1, target=TARGET)
    assert register_products._emulate._cache_size() == before

    @chex.assert_max_traces(n=1)
    def counted(words, d, a, shared):
        return tcemu.wgmma(F16, d, words, shared, a=a, target=TARGET)

    step = jax.jit(counted)
    for start in (0, 1024):
        desc = tcemu.layouts.descriptor(start, 16, 256, 32)
        step(np.array([desc & 0xFFFFFFFF, desc >> 32], np.uint32), d, a, shared)


@pytest.fixture(scope="module")
def product():
    """Codes of A and B, and what gemm makes of 128 x 256 x 64 of FP8."""
    rng, op = np.random.default_rng(1), tcemu.parse(FP8)
    a, b = rng.standard_normal((128, 64), np.float32), rng.standard_normal((64, 256), np.float32)
    convert = jax.jit(from_float, static_argnums=0)
    return op, np.asarray(convert(op.a, a)), np.asarray(convert(op.b, b.T)), np.asarray(tcemu.gemm(a, b, op=op, target=TARGET))


@pytest.mark.full  # every run has the widest in a block of docs/howto/kernels.md
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_a_tile_by_a_chain_that_steps_through_k_equals_gemm(swizzle, product):
    """128 x 256 x 64 of FP8: two warpgroups, two steps of K; with the wide swizzles these are two starts inside one atom."""
    op, a, b, want = product
    a_layout, b_layout = SharedLayout(op.a, 128, 64, "k", swizzle), SharedLayout(op.b, 256, 64, "k", swizzle, start=16384)
    shared = tcemu.layouts.to_shared(b, b_layout, tcemu.layouts.to_shared(a, a_layout, np.zeros(b_layout.words, np.uint32)))
    rows = np.array([[desc & 0xFFFFFFFF, desc >> 32] for desc in (a_layout.descriptor(row) for row in (0, 64))], np.uint32)
    step = a_layout.descriptor(0, 32) - a_layout.descriptor()
    d = np.zeros((2, 4, 32, op.register_count("d")), np.uint32)
    for k in (0, 32):
        a_desc = rows + np.array([step if k else 0, 0], np.uint32)
        d = tcemu.wgmma(op, d, b_layout.descriptor(0, k), shared, a_desc=a_desc, scale_d=k > 0, target=TARGET)
    np.testing.assert_array_equal(np.asarray(tcemu.unpack(op, "d", d)).reshape(128, 256), want.view(np.uint32))
    assert np.abs(want).max() > 1 and step == (2 if swizzle > 32 else 256)


@pytest.mark.parametrize("case", sample_cases(itertools.product((0, 32, 64, 128), ("k", "mn"), ("k", "mn")), [(128, "mn", "mn")], str))
def test_both_majors_of_both_operands_are_one_product(case):
    swizzle, a_major, b_major = case
    rng = np.random.default_rng(7)
    op = tcemu.parse("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16")
    a, b = (rng.integers(0, 1 << 16, shape, np.uint16) for shape in ((64, 16), (64, 16)))
    a_layout = SharedLayout(op.a, 64, 16, a_major, swizzle)
    b_layout = SharedLayout(op.b, 64, 16, b_major, swizzle, start=8192)
    shared = tcemu.layouts.to_shared(b, b_layout, jnp.pad(tcemu.layouts.to_shared(a, a_layout), (0, b_layout.words - a_layout.words)))
    d = rng.integers(0, 2**32, (4, 32, 32), np.uint32)
    trans = {"imm_trans_a": int(a_major == "mn"), "imm_trans_b": int(b_major == "mn")}
    got = tcemu.wgmma(op, d, b_layout.descriptor(), shared, a_desc=a_layout.descriptor(), target=TARGET, **trans)
    plain = SharedLayout(op.b, 64, 16, "k", 0)
    want = tcemu.wgmma(op, d, plain.descriptor(), tcemu.layouts.to_shared(b, plain), a=tcemu.pack(op, "a", a), target=TARGET)
    np.testing.assert_array_equal(got, want)


def test_integers_and_bits_are_exact():
    rng = np.random.default_rng(9)
    op = tcemu.parse("wgmma.mma_async.sync.aligned.m64n128k256.s32.b1.b1.and.popc")
    a, b = (rng.integers(0, 2, shape, np.uint8) for shape in ((64, 256), (128, 256)))
    layout = SharedLayout(op.b, 128, 256, "k", 32)
    d = tcemu.wgmma(
        op,
        np.zeros((4, 32, 64), np.uint32),
        layout.descriptor(),
        tcemu.layouts.to_shared(b, layout),
        a=tcemu.pack(op, "a", a),
        target=TARGET,
    )
    np.testing.assert_array_equal(tcemu.unpack(op, "d", d), a.astype(np.int32) @ b.T.astype(np.int32))


@pytest.mark.parametrize("field", range(16))
def test_a_sparse_product_gathers_b_by_every_field(field):
    """Also by the fields that PTX leaves undefined: element 0 of a chunk meets the B that the low bits name, element 1 that of the high."""
    op = tcemu.parse(SPARSE)
    rng = np.random.default_rng(field)
    a, b = rng.standard_normal((64, 16)).astype(np.float16), rng.standard_normal((8, 32)).astype(np.float16)
    layout = SharedLayout(op.b, 8, 32, "k", 64)
    shared = tcemu.layouts.to_shared(b.view(np.uint16), layout)
    meta = np.full((4, 32), 0x11111111 * field, np.uint32)
    zero = np.zeros((4, 32, 4), np.uint32)
    got = tcemu.wgmma(op, zero, layout.descriptor(), shared, a=tcemu.pack(op, "a", a.view(np.uint16)), sp_meta=meta, target=TARGET)
    chunks = b.reshape(8, 8, 4)
    picked = np.stack([chunks[..., field & 3], chunks[..., field >> 2]], axis=-1).reshape(8, 16)
    dense = tcemu.parse("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16")
    dense_layout = SharedLayout(op.b, 8, 16, "k", 32)
    want = tcemu.wgmma(
        dense, zero, dense_layout.descriptor(), tcemu.layouts.to_shared(picked.view(np.uint16), dense_layout),
        a=tcemu.pack(dense, "a", a.view(np.uint16)), target=TARGET,
    )  # fmt: skip
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "spelling", sample_cases([SPARSE, *(SPARSE.replace("k32.f32.f16.f16", types) for types in ("k16.f32.tf32.tf32", "k64.s32.s8.s8"))], [])
)
def test_undefined_metadata_is_reported_in_checked_mode(spelling):
    op = tcemu.parse(spelling)
    d, a, shared = draw_words(spelling)
    defined = {0b0100, 0b1110} if op.chunk_size == 2 else {value for value in range(16) if value & 3 != value >> 2}
    call = lambda meta, sel=0, checked=True: tcemu.wgmma(op, d, DESC, shared, a=a, sp_meta=meta, sp_sel=sel, target=TARGET, checked=checked)
    silent = 0
    for value in range(16):
        for warp, lane, field, sel in ((0, 0, 0, 0), (3, 29, 7, 0), (2, 6, 3, op.selectors[-1])):
            meta = META.copy()
            meta[warp, lane] = meta[warp, lane] & ~np.uint32(15 << 4 * field) | np.uint32(value << 4 * field)
            selected = len(op.selectors) == 1 or lane % 4 // 2 == sel
            if value in defined or not selected:
                call(meta, sel)
                silent += 1
            else:
                with pytest.raises(
                    tcemu.UndefinedBehaviour, match=rf"warp {warp}, lane {lane}, field {field} .* is {value:04b}, .*9.7.15.6.1"
                ):
                    call(meta, sel)
                call(meta, sel, checked=False)
    assert silent > 0
    bad = META.copy()
    bad[1, 4] = 0
    with pytest.raises(tcemu.UndefinedBehaviour, match=r"warp 1, lane 4, field 0 .* is 0000"):
        tcemu.checked(jax.jit(call))(bad)
    np.testing.assert_array_equal(tcemu.checked(jax.jit(call))(META), call(META))


@pytest.mark.full
def test_traced_descriptors_out_of_range_are_clamped_or_reported():
    d, a, shared = draw_words(F16)
    words = lambda desc: np.array([desc & 0xFFFFFFFF, desc >> 32], np.uint32)
    call = lambda b, checked: tcemu.wgmma(F16, d, b, shared, a=a, target=TARGET, checked=checked)
    beyond = words(tcemu.layouts.descriptor(16384, 16, 256, 0))
    last = tcemu.wgmma(F16, d, tcemu.layouts.descriptor(0, 0, 0, 0), np.tile(shared[-4:], 32), a=a, target=TARGET)
    np.testing.assert_array_equal(jax.jit(call, static_argnums=1)(beyond, False), last)
    found = tcemu.checked(jax.jit(lambda b: call(b, True)))
    np.testing.assert_array_equal(found(words(DESC)), call(DESC, True))
    with pytest.raises(tcemu.UndefinedBehaviour, match="b_desc: the operand's 16 bytes at 16384 lie beyond 16384 bytes of shared memory"):
        found(beyond)
    with pytest.raises(tcemu.UndefinedBehaviour, match="b_desc: bits are set that belong to no field"):
        found(words(DESC | 1 << 46))


def test_uniform_descriptors():
    held = np.broadcast_to(np.array([DESC & 0xFFFFFFFF, DESC >> 32], np.uint32), (2, 4, 32, 2)).copy()
    one = tcemu.instructions.uniform_descriptor(held, checked=True)
    d, a, shared = draw_words(F16)
    np.testing.assert_array_equal(
        tcemu.wgmma(F16, d, one, shared, a=a, target=TARGET)[1], tcemu.wgmma(F16, d, DESC, shared, a=a, target=TARGET)
    )
    held[1, 2, 5, 0] += 2
    np.testing.assert_array_equal(tcemu.instructions.uniform_descriptor(held), one)
    with pytest.raises(tcemu.UndefinedBehaviour, match=r"warp 2, lane 5 holds another one than warp 0, lane 0.*9\.7\.15\.5\.2"):
        tcemu.instructions.uniform_descriptor(held, checked=True)
    with error_message(ValueError, r"registers: got uint32\[4, 2\]; expected uint32\[..., 4, 32, 2\]"):
        tcemu.instructions.uniform_descriptor(held[0, :, 0])
    with error_message(TypeError, "registers: got int64"):
        tcemu.instructions.uniform_descriptor(held.astype(np.int64))


def error_message(error, *said):
    return pytest.raises(error, match="(?s)" + ".*".join(said))


def test_what_an_instruction_does_not_take_is_explained():
    d, a, shared = draw_words(F16)
    call = lambda op=F16, d=d, b=DESC, shared=shared, a=a, **given: tcemu.wgmma(op, d, b, shared, a=a, **({"target": TARGET} | given))
    with error_message(tcemu.Unsupported, "m64n20k16"):
        call(F16.replace("n16", "n20"))
    with error_message(tcemu.Unsupported, "n40"):
        call(S8.replace("n8", "n40"))
    with error_message(tcemu.Unsupported, "sm_100a", "no wgmma"):
        call(target="sm_100a")
    with error_message(tcemu.Unsupported, "is mma; tcemu.wgmma runs wgmma and wgmma.sp"):
        call("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
    with error_message(tcemu.Unsupported, "is wgmma.fence; tcemu.wgmma runs"):
        call("wgmma.fence.sync.aligned")
    with error_message(tcemu.Unsupported, "imm_trans_a=1, which only f16 and bf16 in shared memory take", "9.7.15.5.2"):
        call(imm_trans_a=1)
    s8_d, s8_a, _ = draw_words(S8)
    with error_message(tcemu.Unsupported, "imm_trans_b=1", "operands are d, a_desc, b_desc, scale_d"):
        call(S8, s8_d, a=None, a_desc=A_DESC, imm_trans_b=1)
    with error_message(tcemu.Unsupported, "imm_scale_a=-1, which only floating-point types take"):
        call(S8, s8_d, a=s8_a, imm_scale_a=-1)
    with error_message(ValueError, "imm_scale_b: got 2; an immediate, 1 or -1"):
        call(imm_scale_b=2)
    with error_message(ValueError, "imm_trans_b: got -1; an immediate, 0 or 1"):
        call(imm_trans_b=-1)
    with error_message(ValueError, "a=, or from shared memory, a_desc=; got neither"):
        call(a=None)
    with error_message(ValueError, "got both"):
        call(a_desc=A_DESC)
    with error_message(TypeError, "scale_d: got int64.*; a predicate"):
        call(scale_d=1)


def test_bad_registers_memory_and_descriptors_are_named():
    d, a, shared = draw_words(F16)
    call = lambda d=d, b=DESC, shared=shared, a=a, **given: tcemu.wgmma(F16, d, b, shared, a=a, target=TARGET, **given)
    with error_message(ValueError, r"^d: got uint32\[32, 8\]", r"4, 32, 8\] \(warp, lane, register\)"):
        call(d[0])
    with error_message(TypeError, "^a: got float32"):
        call(a=a.astype(np.float32))
    with error_message(TypeError, "^shared: got uint8", "little-endian"):
        call(shared=shared.view(np.uint8))
    with error_message(TypeError, "^b_desc: got float", "tcemu.layouts.descriptor"):
        call(b=1.5)
    with error_message(TypeError, "^b_desc: got int64"):
        call(b=np.array([1, 2]))
    with error_message(ValueError, r"^b_desc: got uint32\[4\]; .*uint32\[..., 2\]"):
        call(b=np.zeros(4, np.uint32))
    with error_message(ValueError, "^b_desc: got -1; a descriptor has 64 bits"):
        call(b=-1)
    with error_message(ValueError, "^b_desc: bits are set that belong to no field"):
        call(b=DESC | 1 << 60)
    with error_message(
        ValueError,
        r"^b_desc: start 8192, leading 16, stride 8080, base_offset 0, mode 0 reaches to byte 16415, beyond 16384 bytes of shared memory",
    ):
        call(b=tcemu.layouts.descriptor(8192, 16, 8192 - 128 + 16, 0))
    with error_message(ValueError, "^a_desc: .*beyond 1024 bytes"):
        call(a=None, a_desc=A_DESC, b=tcemu.layouts.descriptor(0, 16, 16, 0), shared=shared[:256])
    with error_message(ValueError, "^b_desc: .*beyond the 2.18 that it can address"):
        call(b=tcemu.layouts.descriptor((1 << 18) - 256, 128, 512, 0), shared=np.zeros(1 << 17, np.uint32))
    in_jit = jax.jit(lambda d: call(d, b=tcemu.layouts.descriptor(8192, 16, 8192, 0)))  # known while tracing
    with error_message(ValueError, "^b_desc: .*beyond 16384"):
        in_jit(d)


def test_bad_metadata_is_named():
    d, a, shared = draw_words(SPARSE)
    call = lambda **given: tcemu.wgmma(SPARSE, d, DESC, shared, a=a, target=TARGET, **given)
    with error_message(ValueError, "is sparse; give its metadata"):
        call()
    with error_message(tcemu.UndefinedBehaviour, "sp_sel: got 2;", "takes 0 or 1", "9.7.15.6.3"):
        call(sp_meta=META, sp_sel=2)
    with error_message(tcemu.UndefinedBehaviour, "sp_sel: got 1;", "takes 0. PTX"):
        s8 = SPARSE.replace("k32.f32.f16.f16", "k64.s32.s8.s8")
        tcemu.wgmma(s8, d, DESC, shared, a=a, sp_meta=META, sp_sel=1, target=TARGET)
    with error_message(ValueError, r"sp_meta: got uint32\[32\]"):
        call(sp_meta=META[0])
    with error_message(TypeError, "sp_meta: got int32"):
        call(sp_meta=META.astype(np.int32))
    dense_d, dense_a, _ = draw_words(F16)
    with error_message(ValueError, "is dense; sp_meta and sp_sel belong to"):
        tcemu.wgmma(F16, dense_d, DESC, shared, a=dense_a, sp_meta=META, target=TARGET)


@pytest.mark.parametrize("spelling", [F16, FP8, S8, SPARSE])
def test_only_exact_float_operations(spelling):
    d, a, shared = draw_words(spelling)
    sparse = {"sp_meta": META} if "sp" in spelling.split(".") else {}
    desc = tcemu.layouts.descriptor(0, 16, 256, 32)
    jaxpr = jax.make_jaxpr(lambda d, a, shared: tcemu.wgmma(spelling, d, desc, shared, a=a, target=TARGET, **sparse))(d, a, shared).jaxpr
    assert float_operations(jaxpr) - MOVES <= set(EXACT)


@pytest.mark.full
def test_a_thousand_warpgroups_in_one_call():
    op = tcemu.parse("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16")
    rng = np.random.default_rng(11)
    d = rng.integers(0, 2**32, (1000, 4, 32, 128), np.uint32)
    shared = image(rng, 2560, (1000,))  # B is 8 KiB, A is 2 KiB
    a_desc, b_desc = tcemu.layouts.descriptor(8192, 16, 256, 32), tcemu.layouts.descriptor(0, 16, 256, 32)
    call = jax.jit(lambda d, shared: tcemu.wgmma(op, d, b_desc, shared, a_desc=a_desc, target=TARGET))
    compiled = call.lower(d, shared).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 3 * memory.output_size_in_bytes
    whole = np.asarray(compiled(d, shared))
    assert whole.shape == (1000, 4, 32, 128)
    for at in (0, 499, 999):
        np.testing.assert_array_equal(tcemu.wgmma(op, d[at], b_desc, shared[at], a_desc=a_desc, target=TARGET), whole[at])


@pytest.mark.parametrize("case", parameters(CASES[7::53]))
def test_operands_are_read_as_the_slow_reading_does(case):
    """The matrices that wgmma makes of registers, shared memory and immediates, element by element."""
    words, slow = golden.arrays(case), recorded.load(case)
    op = tcemu.parse(case["ptx"])
    for name, desc, matrix in (("a", case["a_desc"], slow.a[0]), ("b", case["b_desc"], slow.b[0].T)):
        if name == "a" and case["a"] == "registers":
            continue
        trans = dict(zip(("b", "a"), case["immediates"][:1:-1], strict=False)).get(name, 0)
        sign = dict(zip("ab", case["immediates"][:2], strict=False)).get(name, 1)
        fields = [(desc >> low & 0x3FFF) << 4 for low in (0, 16, 32)]
        layout = SharedLayout(getattr(op, name), *matrix.shape, "mn" if trans else "k", (0, 128, 64, 32)[desc >> 62], *fields)
        assert layout.descriptor() == desc
        codes = np.asarray(tcemu.layouts.from_shared(words["shared"], layout))
        flip = 1 << getattr(op, name).bits - 1 if sign == -1 else 0
        np.testing.assert_array_equal(codes ^ codes.dtype.type(flip), matrix.astype(codes.dtype))
