"""Sparse A: the recorded words of an H200, metadata in and outside its defined values, checked mode, `sparsify` and `densify`."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import replay_golden as replay
from oracles import block_scaled_reference as reference_scaled
from oracles import fragment_formulas as fragments
from oracles import reference
from support import golden
from support import random_operands as operands
from support.sampling import sample_cases

import tcemu
from tcemu.engine.layouts import sparsity

CASES = golden.cases("mma_sp")
F16 = "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32"
ORDERED = F16.replace(".sp.", ".sp::ordered_metadata.")
TF32 = "mma.sp.sync.aligned.m16n8k16.row.col.f32.tf32.tf32.f32"
S8 = "mma.sp.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
E4M3 = "mma.sp.sync.aligned.m16n8k64.row.col.f32.e4m3.e4m3.f32"
U4 = "mma.sp.sync.aligned.m16n8k64.row.col.s32.u4.u4.s32"
WGMMA = "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16"
CHUNKS = {"1:2": 2, "2:4": 4, "4:8": 8}
NAMES = {2: "tf32", 4: "f16", 8: "s4"}  # a type of the reference with chunks of this size
sparsify = jax.jit(tcemu.sparsify, static_argnames=("pattern", "op", "selector"))  # one program where the function itself is forty
densify = jax.jit(tcemu.densify, static_argnames=("pattern", "op", "selector"))
SPARSE_OPS = sorted((op for op in tcemu.isa.instructions("sm_120a") if op.family == "mma.sp"), key=str)


@pytest.mark.parametrize(
    "case",
    sample_cases(CASES, [CASES[i] for i in (0, 18, 36, 90, 126)], lambda case: f"{case['ptx'].removeprefix('mma.')}-{case['selector']}"),
)
def test_recorded_words(case):
    wrong, words = replay.compare(case)
    assert words > 0 and wrong == 0, f"{wrong} mismatches of {words}"


def test_every_spelling_and_selector_of_sm_90_is_recorded():
    recorded = {(tcemu.parse(case["ptx"]), case["selector"]) for case in CASES}
    assert recorded == {(op, selector) for op in tcemu.isa.instructions("sm_90", family="mma.sp") for selector in op.selectors}
    assert all(tcemu.evidence(op, target).level == "silicon" for op, _ in recorded for target in ("sm_90", "sm_90a"))


# ---- metadata


@pytest.mark.parametrize("chunk", NAMES)
def test_kept_positions_are_the_reference_for_every_field(chunk):
    fields = np.array(list(itertools.product(range(16), repeat=2)), np.uint8)
    for row, found in zip(fields.tolist(), np.asarray(sparsity.stored_positions(jnp.asarray(fields), chunk)), strict=True):
        width = chunk // 2
        whole = [chunk * (i // width) + int(v) for i, v in enumerate(found)]
        assert whole == reference.kept_positions(NAMES[chunk], row)


@pytest.mark.parametrize("chunk", [4, 8])
def test_gather_takes_what_the_fields_name(chunk):
    """Every field, in NumPy's own indexing; clamped as published for sm_120: the pairs min(v & 3, 2) and max(v >> 2, 1)."""
    b = np.random.default_rng(0).integers(0, 256, (2, 16 * chunk, 5)).astype(np.uint8)
    fields = np.stack([np.arange(16), np.arange(16)[::-1]]).astype(np.uint8)
    for clamped in (False, True):
        found = np.asarray(sparsity.gather(jnp.asarray(b), jnp.asarray(fields), chunk, clamped))
        pair = chunk // 4
        for m, c in np.ndindex(fields.shape):
            v = int(fields[m, c])
            units = (min(v & 3, 2), max(v >> 2, 1)) if clamped else (v & 3, v >> 2)
            at = [chunk * c + pair * unit + i for unit in units for i in range(pair)]
            np.testing.assert_array_equal(found[:, m, 2 * pair * c : 2 * pair * (c + 1)], b[:, at])


@pytest.mark.full
def test_tf32_fields_outside_the_defined_ones_put_halves_together():
    """Words that an NVIDIA H200 gave for every field: shapes, selectors, and .sp::ordered_metadata; the file is described beside it."""
    with np.load(golden.TESTS / "golden" / "tf32_metadata.npz") as file:
        words = {name: file[name] for name in file.files}
    wrong = total = 0
    for i, (ptx, selector) in enumerate(zip(words["ptx"].tolist(), words["selector"].tolist(), strict=True)):
        registers = [words[f"{i:04d}_{name}"] for name in "abce"]
        d = np.asarray(tcemu.mma_sp(ptx, *registers, selector=selector, target="sm_90a"))
        wrong, total = wrong + int((d != words[f"{i:04d}_d"]).sum()), total + d.size
    assert total == 8192 and wrong == 0


def test_tf32_signs_turn_after_the_halves_are_put_together():
    """Words that an NVIDIA H200 gave for wgmma with every pair of imm-scale-a and imm-scale-b; the file is described beside it."""
    with np.load(golden.TESTS / "golden" / "tf32_negation.npz") as file:
        words = {name: file[name] for name in file.files}
    wrong = total = 0
    for i, (scale_a, scale_b) in enumerate(words["imm_scales"].tolist()):
        one = {name.removeprefix(f"{i:04d}_"): x for name, x in words.items() if name.startswith(f"{i:04d}_")}
        a = {name: one[name] for name in ("a", "a_desc") if name in one}
        d = tcemu.wgmma(
            str(words["ptx"]), one["d_in"], one["b_desc"], one["shared"], sp_meta=one["sp_meta"], sp_sel=int(words["sp_sel"][i]),
            scale_d=one["scale_d"], imm_scale_a=scale_a, imm_scale_b=scale_b, target="sm_90a", **a,
        )  # fmt: skip
        wrong, total = wrong + int((np.asarray(d) != one["d_out"]).sum()), total + one["d_out"].size
    assert total == 4096 and wrong == 0


def test_the_defined_fields():
    assert sparsity.defined_fields(4, ordered=True) == sparsity.defined_fields(8, ordered=True) == (4, 8, 9, 12, 13, 14)
    assert set(sparsity.defined_fields(4, ordered=False)) == {4, 8, 9, 12, 13, 14} | {1, 2, 6, 3, 7, 11}
    assert sparsity.defined_fields(2, ordered=False) == (0b0100, 0b1110)
    for chunk, ordered in itertools.product(NAMES, (False, True)):
        flags = np.asarray(sparsity.undefined_fields(jnp.arange(16), chunk, ordered))
        assert set(np.flatnonzero(~flags)) == set(sparsity.defined_fields(chunk, ordered))


@pytest.mark.parametrize("op", SPARSE_OPS[:: len(SPARSE_OPS) // 24], ids=str)
def test_metadata_lie_where_the_figures_say(op):
    """Every selector: the fields of a matrix land in the lane and nibble of the figures, each once, and no other bit is set."""
    rng = np.random.default_rng(1)
    fields = rng.integers(1, 16, op.matrix_shape("e")).astype(np.uint8)
    for selector in op.selectors:
        words = np.asarray(tcemu.pack(op, "e", fields, selector=selector))
        kind = "s4" if op.chunk_size == 8 else "s8" if op.container_bits("a") == 8 else op.a.name
        seen = set()
        for row, chunk in np.ndindex(fields.shape):
            lane, field = fragments.metadata_place(kind, fields.shape[1], row, chunk, selector)
            assert int(words[lane]) >> 4 * field & 15 == fields[row, chunk]
            seen.add((lane, field))
        nibbles = words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
        assert len(seen) == fields.size == np.count_nonzero(nibbles)
        np.testing.assert_array_equal(tcemu.unpack(op, "e", words, selector=selector), fields)


def draw_words(spelling, seed=0, batch=(3,)):
    op, rng = tcemu.parse(spelling), np.random.default_rng(seed)
    registers = [rng.integers(0, 2**32, (*batch, 32, op.register_count(name)), np.uint32) for name in "abc"]
    defined = np.array(sparsity.defined_fields(op.chunk_size, op.ordered), np.uint32)
    e = sum(rng.choice(defined, (*batch, 32)).astype(np.uint32) << np.uint32(4 * i) for i in range(8))
    return op, registers, e


def test_batches_jit_vmap_and_traced_selectors():
    op, registers, e = draw_words(F16, batch=(2, 3))
    whole = np.asarray(tcemu.mma_sp(op, *registers, e, selector=1, target="sm_90"))
    one = lambda *v: tcemu.mma_sp(F16, *v, selector=1, target="sm_90")
    np.testing.assert_array_equal(jax.vmap(jax.vmap(one))(*registers, e), whole)
    np.testing.assert_array_equal(one(*(v[1, 2] for v in (*registers, e))), whole[1, 2])
    traced = jax.jit(lambda s, *v: tcemu.mma_sp(F16, *v, selector=s, target="sm_90"))
    np.testing.assert_array_equal(traced(1, *registers, e), whole)
    assert (np.asarray(traced(0, *registers, e)) != whole).any()
    np.testing.assert_array_equal(one(*registers, e[0, 0])[0, 0], whole[0, 0])  # metadata that the batch shares
    assert one(*(v[:0] for v in (*registers, e))).shape == (0, 3, 32, op.register_count("d"))
    empty = tcemu.sparsify(np.zeros((0, 16, 32), np.float16))
    assert empty.values.shape == (0, 16, 16) and tcemu.densify(*empty).shape == (0, 16, 32)


@pytest.mark.parametrize("spelling", sample_cases([F16, TF32, E4M3], (TF32,)))
def test_what_b_has_at_pruned_positions_does_not_matter(spelling):
    op, rng = tcemu.parse(spelling), np.random.default_rng(4)
    a = operands.codes(op.a.name, "near one", (16, op.k // 2), rng)
    b = operands.codes(op.b.name, "near one", (op.k, 8), rng)
    c = np.zeros((16, 8), np.uint32)
    fields = np.broadcast_to(rng.choice(sparsity.defined_fields(op.chunk_size, True), op.k // op.chunk_size), op.matrix_shape("e")).astype(
        np.uint8
    )
    d = np.asarray(tcemu.dot(op, a, b, c, e=fields, target="sm_90"))
    kept = reference.kept_positions(NAMES[op.chunk_size], fields[0].tolist())
    spoiled = np.full_like(b, reference.FORMATS[op.b.name].nan)
    spoiled[kept] = b[kept]
    np.testing.assert_array_equal(tcemu.dot(op, a, spoiled, c, e=fields, target="sm_90"), d)
    assert not (d == 0x7FFFFFFF).any()
    spoiled[kept[0]] = reference.FORMATS[op.b.name].nan
    assert (np.asarray(tcemu.dot(op, a, spoiled, c, e=fields, target="sm_90")) == 0x7FFFFFFF).all()


# A spelling, the dense one on the pruned matrix, and whether their steps align: whether both add up the same products in one step
ALIGNED = [
    ("m16n8k16.row.col.f32.f16.f16.f32", 1, True), ("m16n8k16.row.col.f16.f16.f16.f16", 1, True),
    ("m16n8k16.row.col.f32.bf16.bf16.f32", 1, True), ("m16n8k8.row.col.f32.tf32.tf32.f32", 1, True),
    ("m16n8k32.row.col.s32.s8.u8.s32", 1, True), ("m16n8k64.row.col.s32.u4.s4.s32", 1, True),
    ("m16n8k64.row.col.s32.u8.u8.s32", 2, True), ("m16n8k128.row.col.s32.s4.s4.s32", 2, True),
    ("m16n8k32.row.col.f32.f16.f16.f32", 2, False), ("m16n8k16.row.col.f32.tf32.tf32.f32", 2, False),
    ("m16n8k64.row.col.f32.e4m3.e5m2.f32", 2, False),
]  # fmt: skip


@pytest.mark.parametrize("case", sample_cases(ALIGNED, [], str))
def test_sparse_against_dense_on_the_pruned_matrix(case):
    """parts: how many dense instructions the K of the sparse one takes. Not aligned: two dense steps, or other groups, and other words."""
    spelling, parts, aligned = case
    op = tcemu.parse("mma.sp.sync.aligned." + spelling)
    dense_op = "mma.sync.aligned." + spelling.replace(f"k{op.k}.", f"k{op.k // parts}.")
    rng, tiles = np.random.default_rng(9), 40
    draw = operands.integers if op.a.is_integer else (lambda name, shape, rng: operands.codes(name, "full", shape, rng))
    x, b, c = draw(op.a.name, (tiles, 16, op.k), rng), draw(op.b.name, (tiles, op.k, 8), rng), draw(op.c.name, (tiles, 16, 8), rng)
    if not op.a.is_integer:
        c = operands.codes(op.c.name, "near one", c.shape, rng)
    kept, e = sparsify(x, op=op, selector=0)
    kept, pruned = np.asarray(kept), np.asarray(densify(kept, e, op=op, selector=0))
    registers = [tcemu.pack(op, name, codes) for name, codes in (("a", kept), ("b", b), ("c", c))]
    sparse = np.asarray(tcemu.unpack(op, "d", tcemu.mma_sp(op, *registers, e, selector=0, target="sm_90")))
    k, dense = op.k // parts, c
    for at in range(0, op.k, k):
        dense = np.asarray(tcemu.dot(dense_op, pruned[..., at : at + k], b[:, at : at + k], dense, target="sm_90"))
    assert (sparse == dense).all() == aligned
    fields = np.asarray(tcemu.unpack(op, "e", e, selector=0))  # and either way the sparse words are the reference's
    for t, i, j in itertools.product(range(2), range(16), range(8)):
        at = reference.kept_positions(op.a.name, fields[t, i].tolist())
        want = reference.dot(
            op.d.name, op.a.name, op.b.name, op.c.name, kept[t, i].tolist(), b[t, at, j].tolist(), int(c[t, i, j]), k=op.k, family="mma.sp"
        )
        assert int(sparse[t, i, j]) == want


def test_undefined_fields_on_sm_120_follow_the_published_rule():
    op = tcemu.parse("mma.sp::ordered_metadata.sync.aligned.m16n8k128.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0")
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 16, (16, 64)).astype(np.uint8), rng.integers(0, 16, (128, 8)).astype(np.uint8)
    c, one = np.zeros((16, 8), np.uint32), 127
    fields = np.broadcast_to(np.arange(16, dtype=np.uint8)[:, None], (16, 16))
    x, y = np.full((16, 2), one, np.uint8), np.full((2, 8), one, np.uint8)
    d = np.asarray(tcemu.dot(op, a, b, c, e=fields, scale_a=x, scale_b=y, target="sm_120a"))
    for i, j in np.ndindex(16, 8):
        first, second = min(i & 3, 2), max(i >> 2, 1)
        at = [8 * chunk + p for chunk in range(16) for p in (2 * first, 2 * first + 1, 2 * second, 2 * second + 1)]
        want = reference_scaled.grouped_dot_add(a[i].tolist(), b[at, j].tolist(), 0, "ue8m0", [one] * 2, [one] * 2)
        assert int(d[i, j]) == want


# ---- checked mode


def error_message(error, *fragments_):
    return pytest.raises(error, match="(?s)" + ".*".join(fragments_))


def test_checked_mode_names_lane_field_and_value():
    op, registers, e = draw_words(F16)
    clean = tcemu.mma_sp(op, *registers, e, selector=1, target="sm_90")
    np.testing.assert_array_equal(tcemu.mma_sp(op, *registers, e, selector=1, target="sm_90", checked=True), clean)
    e[2, 14] = e[2, 14] & ~np.uint32(0xF << 24) | np.uint32(0x5 << 24)  # lane 14 = 4*3 + 2: row 3 + 8, chunks 0 to 3
    wanted = (
        tcemu.UndefinedBehaviour,
        "lane 14, field 6 .bits 24 to 27.",
        "is 0101",
        "row 11 and chunk 2",
        "defined are 0001",
        "9.7.14.6.1",
    )
    with error_message(*wanted):
        tcemu.mma_sp(op, *registers, e, selector=1, target="sm_90", checked=True)
    tcemu.mma_sp(op, *registers, e, selector=0, target="sm_90", checked=True)  # lane 14 is not read
    tcemu.mma_sp(op, *registers, e, selector=1, target="sm_90")  # silicon does something
    traced = tcemu.checked(jax.jit(lambda *v: tcemu.mma_sp(F16, *v, selector=1, target="sm_90", checked=True)))
    with error_message(*wanted):
        traced(*registers, e)
    with error_message(*wanted):
        tcemu.checked(jax.vmap(lambda *v: tcemu.mma_sp(F16, *v, selector=1, target="sm_90", checked=True)))(*registers, e)
    with error_message(ValueError, "checkify"):
        jax.jit(lambda *v: tcemu.mma_sp(F16, *v, selector=1, target="sm_90", checked=True))(*registers, e)
    e[2, 14] = e[2, 14] & ~np.uint32(0xF << 24) | np.uint32(0x4 << 24)
    np.testing.assert_array_equal(traced(*registers, e), tcemu.mma_sp(op, *registers, e, selector=1, target="sm_90"))


@pytest.mark.parametrize("spelling", sample_cases([F16, ORDERED, TF32, S8, E4M3, U4], (ORDERED,)))
def test_checked_mode_knows_every_field(spelling):
    op, registers, _ = draw_words(spelling, batch=())
    allowed = sparsity.defined_fields(op.chunk_size, op.ordered)
    for value in range(16):
        fields = np.full(op.matrix_shape("e"), allowed[0], np.uint8)
        fields[9, 3] = value
        call = lambda: tcemu.mma_sp(op, *registers, tcemu.pack(op, "e", fields), selector=0, target="sm_90", checked=True)  # noqa: B023
        if value in allowed:
            call()
        else:
            with error_message(tcemu.UndefinedBehaviour, f"is {value:04b}, for row 9 and chunk 3"):
                call()


# ---- sparsify and densify


def prune(x, pattern):
    """The pruned matrix, by a stable sort of magnitudes; a pair by its larger and then its smaller one."""
    chunk, unit = CHUNKS[pattern], 2 if pattern == "4:8" else 1
    rows = x.reshape(-1, chunk // unit, unit)
    out = np.zeros_like(rows)
    for row, kept in zip(rows, out, strict=True):
        size = [sorted(-abs(float(v)) for v in of_unit) for of_unit in row]
        for i in sorted(range(len(size)), key=lambda i: (size[i], i))[: chunk // unit // 2]:
            kept[i] = row[i]
    return out.reshape(x.shape)


DTYPES = (np.float64, np.float16, np.float32, np.int8, np.uint8, np.int32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
          ml_dtypes.float8_e5m2, ml_dtypes.float6_e3m2fn, ml_dtypes.float4_e2m1fn, ml_dtypes.int4)  # fmt: skip


CASES_OF_DTYPES = list(itertools.product(DTYPES, CHUNKS))


@pytest.mark.parametrize("case", sample_cases(CASES_OF_DTYPES, 28, lambda case: f"{np.dtype(case[0]).name}-{case[1]}"))
def test_densify_of_sparsify_is_the_pruned_matrix(case):
    dtype, pattern = case
    rng = np.random.default_rng(2)
    x = rng.integers(-8, 8, (2, 5, 48)) if np.dtype(dtype).kind in "iu" or "int" in np.dtype(dtype).name else rng.normal(0, 2, (2, 5, 48))
    x = (np.abs(x) if np.dtype(dtype).kind == "u" else x).astype(dtype)
    kept, fields = tcemu.sparsify(x, pattern)
    assert kept.dtype == x.dtype and kept.shape == (2, 5, 24) and fields.shape == (2, 5, 48 // CHUNKS[pattern])
    assert set(np.unique(fields)) <= set(sparsity.defined_fields(CHUNKS[pattern], ordered=True))
    want = prune(x, pattern)
    back = tcemu.densify(kept, fields, pattern)
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(back.astype(np.float64), want.astype(np.float64))
    again = tcemu.sparsify(want, pattern, already_sparse=True)
    np.testing.assert_array_equal(tcemu.densify(*again, pattern).astype(np.float64), want.astype(np.float64))


def test_ties_nan_and_subnormals():
    tiny = np.float32(1e-45)
    x = np.array([[1, -1, 1, 1], [0, tiny, -2 * tiny, 0], [np.inf, np.nan, 1, 2], [0, 0, 0, 0], [-0.0, 3, 0, 2]], np.float32)
    _, fields = sparsify(x)
    assert np.asarray(fields)[:, 0].tolist() == [0b0100, 0b1001, 0b0100, 0b0100, 0b1101]
    _, fields = sparsify(jnp.asarray(x[:2]))
    assert np.asarray(fields)[:, 0].tolist() == [0b0100, 0b1001]
    _, fields = sparsify(np.array([[1, 9, 8, 8, 9, 2, 9, 1]], np.float32), "4:8")  # (9 1) (8 8) (9 2) (9 1)
    assert np.asarray(fields)[0, 0] == 0b1000  # the pairs 0 and 2
    _, fields = sparsify(np.array([[1, 1], [1, -2]], np.float32), "1:2")
    assert np.asarray(fields)[:, 0].tolist() == [0b0100, 0b1110]


def test_codes_are_compared_as_their_instruction_reads_them():
    codes = np.zeros((16, 64), np.uint8)
    codes[:, 0::4], codes[:, 1::4], codes[:, 2::4], codes[:, 3::4] = 0x80, 0x01, 0x7E, 0xB8  # -0, least, greatest, -1 as e4m3
    kept, e = sparsify(codes, op=E4M3)
    assert (np.asarray(tcemu.unpack(E4M3, "e", e)) == 0b1110).all()
    np.testing.assert_array_equal(kept.reshape(16, 16, 2), np.broadcast_to([0x7E, 0xB8], (16, 16, 2)))
    signed = np.tile(np.array([0xFF, 0x02, 0x80, 0x7F], np.uint8), (16, 8))  # -1, 2, -128, 127 as s8
    assert (np.asarray(tcemu.unpack(S8, "e", sparsify(signed, op=S8).metadata)) == 0b1110).all()
    ignored = np.tile(np.array([0x3F801FFF, 0x3F800000], np.uint32), (16, 8))  # tf32 ignores 13 bits: a tie
    assert (np.asarray(tcemu.unpack(TF32, "e", sparsify(ignored, op=TF32).metadata)) == 0b0100).all()


def test_sparsify_under_jit_and_for_a_warpgroup():
    x = np.random.default_rng(0).normal(size=(3, 64, 32)).astype(np.float16)
    plain = tcemu.sparsify(jnp.asarray(x))
    for got, want in zip(sparsify(x), plain, strict=True):
        np.testing.assert_array_equal(got, want)
    kept, registers = sparsify(x, op=WGMMA, selector=1)
    assert registers.shape == (3, 4, 32)
    np.testing.assert_array_equal(tcemu.unpack(WGMMA, "sp_meta", registers, selector=1), plain.metadata)
    np.testing.assert_array_equal(densify(kept, registers, op=WGMMA, selector=1), tcemu.densify(*plain))


def test_constants_of_a_traced_function_are_pruned():
    """A weight that a traced function holds is NumPy's there too, with all its 64 bits; with traced metadata it is JAX's."""
    x = np.random.default_rng(1).normal(size=(4, 32))
    plain, found = tcemu.sparsify(x), []

    def traced(fields):
        kept = tcemu.sparsify(x)
        found.extend([*kept, tcemu.densify(*kept), tcemu.prune(x)])
        return tcemu.densify(plain.values.astype(np.float32), fields)

    d = jax.jit(traced)(plain.metadata)
    for got, want in zip(found, (*plain, tcemu.densify(*plain), tcemu.prune(x)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(d, tcemu.prune(x).astype(np.float32))
    assert jax.eval_shape(lambda: tcemu.prune(x)).shape == x.shape


# ---- errors


def test_bad_metadata_and_selectors_are_named():
    op, registers, e = draw_words(F16, batch=())
    with error_message(ValueError, "^selector: got 2", "takes 0, 1", "9.7.14.6"):
        tcemu.mma_sp(op, *registers, e, selector=2, target="sm_90")
    with error_message(ValueError, "^selector: got 1", "takes 0"):
        tcemu.mma_sp(*draw_words(E4M3)[:1], *draw_words(E4M3)[1], e, selector=1, target="sm_90")
    with error_message(ValueError, "^e: got uint32.32, 1.", "uint32.*32", "one register a lane"):
        tcemu.mma_sp(op, *registers, e[:, None], selector=0, target="sm_90")
    with error_message(TypeError, "^e: got uint16.32."):
        tcemu.mma_sp(op, *registers, e.astype(np.uint16), selector=0, target="sm_90")
    with error_message(tcemu.Unsupported, "is mma; tcemu.mma_sp runs mma.sp"):
        tcemu.mma_sp("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", *registers, e, selector=0, target="sm_90")
    with error_message(ValueError, "^e: ", "has sparsity metadata, and none came"):
        tcemu.dot(op, np.zeros((16, 16), np.uint16), np.zeros((32, 8), np.uint16), np.zeros((16, 8), np.uint32), target="sm_90")
    with error_message(ValueError, "^a: got uint16.16, 32.", "16, 16"):
        tcemu.dot(op, np.zeros((16, 32), np.uint16), np.zeros((32, 8), np.uint16), np.zeros((16, 8), np.uint32), e=e, target="sm_90")
    with error_message(tcemu.Unsupported, "gemm multiplies dense matrices", "sparse='a'", "tcemu.sparsify"):
        tcemu.gemm(np.zeros((16, 32), np.float16), np.zeros((32, 8), np.float16), op=op, target="sm_90")


def test_bad_matrices_are_named():
    with error_message(ValueError, "pattern: got '3:4'", "'1:2', '2:4', '4:8'"):
        tcemu.sparsify(np.zeros((2, 8), np.float32), "3:4")
    with error_message(ValueError, "^dense: got float32.2, 6.", "K a multiple of 4"):
        tcemu.sparsify(np.zeros((2, 6), np.float32))
    with error_message(ValueError, "^dense: got float16.16, 16.", "16, 32"):
        tcemu.sparsify(np.zeros((16, 16), np.float16), op=F16)
    with error_message(ValueError, "pattern: got '4:8'", "has '2:4'"):
        tcemu.sparsify(np.zeros((16, 32), np.float16), "4:8", op=F16)
    with error_message(tcemu.Unsupported, "is dense; sparsify"):
        tcemu.sparsify(np.zeros((16, 16)), op="mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
    x = np.zeros((2, 5, 48), np.float32)
    x[1, 2, 4:7] = 1
    with error_message(ValueError, "^already_sparse: 1 values", "row 2, chunk 1 .k = 6., batch element .1,."):
        tcemu.sparsify(x, already_sparse=True)
    with error_message(ValueError, "already_sparse: values are unknown"):
        jax.jit(lambda v: tcemu.sparsify(v, already_sparse=True))(x)
    with error_message(ValueError, "^kept is float32.2, 4. and the metadata's fields are .2, 3."):
        tcemu.densify(np.zeros((2, 4), np.float32), np.zeros((2, 3), np.uint8))
    with error_message(TypeError, "^metadata: got float32"):
        tcemu.densify(np.zeros((2, 4), np.float32), np.zeros((2, 2), np.float32))
