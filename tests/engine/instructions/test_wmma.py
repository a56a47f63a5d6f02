"""`wmma`: the recorded words and fragments of an H200, batches, what may be done to a fragment, and what is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replay_golden as replay
from support import golden
from support.sampling import sample_cases
from support.traced_programs import equations
from support.word_arrays import random_words

import tcemu

CASES = golden.cases("wmma")
A, B = "wmma.load.a.sync.aligned.row.m16n16k16.f16", "wmma.load.b.sync.aligned.col.m16n16k16.f16"
C, D = "wmma.load.c.sync.aligned.row.m16n16k16.f32", "wmma.store.d.sync.aligned.row.m16n16k16.f32"
MMA = "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32"
WORDS = 1024


@pytest.mark.parametrize("case", sample_cases(CASES, 20, lambda case: case["ptx"].replace(".sync.aligned", "")))
def test_recorded_words(case):
    wrong, words = replay.compare(case)
    assert words > 0 and wrong == 0, f"{wrong} mismatches of {words}"


def test_all_that_was_recorded_is_compared():
    words = golden.arrays(CASES[0])
    assert set(replay.REPLAYS["wmma"](CASES[0], words)) == set(words) - set("abc")


def test_every_spelling_of_sm_90_is_recorded_but_for_layouts_of_satfinite():
    recorded = {tcemu.parse(case["ptx"]) for case in CASES}
    missing = {op for op in tcemu.isa.instructions("sm_90", family="wmma.mma")} - recorded
    assert len(CASES) == 126 and len(recorded) == 122 and len(missing) == 12
    assert all(op.satfinite and op.alayout == "col" for op in missing)
    assert all(tcemu.evidence(op, target).level == "silicon" for op in recorded | missing for target in ("sm_90", "sm_90a"))


def test_the_layouts_in_memory_leave_no_trace_in_the_product():
    a, b, c = (random_words((3, 32, 8), seed) for seed in range(3))
    one = np.asarray(tcemu.wmma_mma(MMA, a, b, c, target="sm_90"))
    for layouts in ("row.row", "col.row", "col.col"):
        np.testing.assert_array_equal(tcemu.wmma_mma(MMA.replace("row.col", layouts), a, b, c, target="sm_90"), one)


def error_message(error, *fragments):
    return pytest.raises(error, match="(?s)" + ".*".join(fragments))


# ---- batches


@pytest.mark.full
def test_any_leading_axes_give_the_same_words():
    memory, fragment = random_words((2, 3, WORDS)), random_words((2, 3, 32, 8), 1)
    offsets = 16 * np.random.default_rng(0).integers(0, 9, (2, 3))
    for at in (32, offsets, jnp.asarray(offsets), offsets[0], offsets[:, :1]):
        loads = np.asarray(tcemu.wmma_load(A, memory, offset=at, stride=32))
        stores = np.asarray(tcemu.wmma_store(D, memory, fragment, offset=at, stride=32))
        wide = np.broadcast_to(at, (2, 3))
        for i in np.ndindex(2, 3):
            np.testing.assert_array_equal(tcemu.wmma_load(A, memory[i], offset=int(wide[i]), stride=32), loads[i])
            np.testing.assert_array_equal(tcemu.wmma_store(D, memory[i], fragment[i], offset=int(wide[i]), stride=32), stores[i])
    load = jax.vmap(jax.vmap(lambda m, o: tcemu.wmma_load(A, m, offset=o, stride=32)))
    np.testing.assert_array_equal(load(memory, offsets), tcemu.wmma_load(A, memory, offset=offsets, stride=32))
    store = jax.jit(jax.vmap(jax.vmap(lambda m, f: tcemu.wmma_store(D, m, f, offset=16, stride=32))))
    np.testing.assert_array_equal(store(memory, fragment), tcemu.wmma_store(D, memory, fragment, offset=16, stride=32))
    one = tcemu.wmma_load(A, memory[0, 0], offset=offsets, stride=np.array([16, 32, 48]))
    for i in np.ndindex(2, 3):
        np.testing.assert_array_equal(one[i], tcemu.wmma_load(A, memory[0, 0], offset=int(offsets[i]), stride=16 + 16 * i[1]))
    many = np.asarray(tcemu.wmma_store(D, memory[0, 0], fragment[:, :1]))
    assert many.shape == (2, 1, WORDS)
    np.testing.assert_array_equal(many[1, 0], tcemu.wmma_store(D, memory[0, 0], fragment[1, 0]))
    a, b = (random_words((2, 3, 32, 8), seed) for seed in (2, 3))
    d = np.asarray(tcemu.wmma_mma(MMA, a, b[0, 0], fragment[0], target="sm_90"))
    np.testing.assert_array_equal(d[1, 2], tcemu.wmma_mma(MMA, a[1, 2], b[0, 0], fragment[0, 2], target="sm_90"))


def test_an_empty_batch_is_an_empty_result():
    none = np.zeros((0, WORDS), np.uint32)
    fragment = tcemu.wmma_load(A, none)
    assert fragment.shape == (0, 32, 8) and tcemu.wmma_load(A, none, offset=np.zeros((2, 1), int)).shape == (2, 0, 32, 8)
    assert tcemu.wmma_mma(MMA, fragment, fragment, fragment, target="sm_90").shape == (0, 32, 8)
    assert tcemu.wmma_store(D, none, fragment).shape == tcemu.wmma_store(D, none, fragment, offset=np.zeros(0, int)).shape == (0, WORDS)


# ---- fragments


def test_a_fragment_may_be_changed_uniformly():
    memory = random_words((4, WORDS), 1) & np.uint32(0x3FFF3FFF) | np.uint32(0x10001000)  # finite numbers
    a, b, c = tcemu.wmma_load(A, memory), tcemu.wmma_load(B, memory[::-1]), tcemu.wmma_load(C, memory[:1])
    signs = np.uint32(0x80008000)
    np.testing.assert_array_equal(a ^ signs, tcemu.wmma_load(A, memory ^ signs))
    d = tcemu.wmma_mma(MMA, a, b, c, target="sm_90", checked=True)
    both = tcemu.wmma_mma(MMA, a ^ signs, b ^ signs, c, target="sm_90", checked=True)
    np.testing.assert_array_equal(d, both)
    scaled = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(d, jnp.float32) * 0.5, jnp.uint32)
    stored = np.asarray(tcemu.wmma_store(D, np.zeros(256, np.uint32), scaled)).view(np.float32)
    np.testing.assert_array_equal(stored, np.asarray(tcemu.wmma_store(D, np.zeros(256, np.uint32), d)).view(np.float32) / 2)


def test_the_first_copy_counts_and_checked_reports_copies_that_differ():
    memory = random_words((2, WORDS))
    a, b, c = np.asarray(tcemu.wmma_load(A, memory)), tcemu.wmma_load(B, memory), tcemu.wmma_load(C, memory)
    np.testing.assert_array_equal(a[..., :4], a[..., 4:])
    other = a.copy()
    other[1, 13, 6] ^= 1
    d = tcemu.wmma_mma(MMA, a, b, c, target="sm_90")
    np.testing.assert_array_equal(tcemu.wmma_mma(MMA, other, b, c, target="sm_90"), d)
    with error_message(tcemu.UndefinedBehaviour, "a holds copies", "lane 13", "9.7.14.4.1"):
        tcemu.wmma_mma(MMA, other, b, c, target="sm_90", checked=True)
    run = tcemu.checked(jax.jit(lambda *x: tcemu.wmma_mma(MMA, *x, target="sm_90", checked=True)))
    np.testing.assert_array_equal(run(a, b, c), d)
    with error_message(tcemu.UndefinedBehaviour, "a holds copies", "lane 13"):
        run(other, b, c)


def test_pack_and_unpack_know_the_fragments():
    for case in CASES[::64]:
        op, words = tcemu.parse(case["ptx"]), golden.arrays(case)
        for name in "abcd":
            codes = tcemu.unpack(op, name, words[f"frag_{name}"])
            np.testing.assert_array_equal(tcemu.pack(op, name, codes), words[f"frag_{name}"])
        codes = (tcemu.unpack(op, name, words[f"frag_{name}"]) for name in "abc")
        np.testing.assert_array_equal(tcemu.pack(op, "d", tcemu.dot(op, *codes, target="sm_90")), words["frag_d"])


# ---- what is compiled


@pytest.mark.full
def test_gathers_only_where_places_are_data():
    memory, fragment, offsets = random_words((8, WORDS)), random_words((8, 32, 8), 1), np.arange(8, dtype=np.int32) * 16

    def moves(fn, *operands):
        text = jax.jit(fn).lower(*operands).compile().as_text()
        return " gather(" in text or " scatter(" in text

    for place in ({}, {"offset": 32, "stride": 32}, {"offset": 32, "stride": 8}):
        for op in (C, C.replace("row", "col")):
            assert not moves(lambda m, place=place, op=op: tcemu.wmma_load(op, m, **place), memory)
            store = op.replace("load.c", "store.d")
            assert not moves(lambda m, f, place=place, op=store: tcemu.wmma_store(op, m, f, **place), memory, fragment)
        assert not moves(jax.vmap(lambda m, place=place: tcemu.wmma_load(C, m, **place)), memory)
        assert not moves(jax.vmap(lambda m, f, place=place: tcemu.wmma_store(D, m, f, **place)), memory, fragment)
    assert not moves(lambda m, o: tcemu.wmma_load(C, m, offset=o, stride=32), memory, 0)
    assert moves(lambda m, o: tcemu.wmma_load(C, m, offset=o), memory, offsets)
    assert not moves(lambda *x: tcemu.wmma_mma(MMA, *x, target="sm_90"), fragment, fragment, fragment)


@pytest.mark.full
def test_thousands_of_warps_are_one_call():
    memory = random_words((4096, 256))
    a, b, c = tcemu.wmma_load(A, memory), tcemu.wmma_load(B, memory[::-1]), tcemu.wmma_load(C, memory)
    d = tcemu.wmma_mma(MMA, a, b, c, target="sm_90")
    after = np.asarray(tcemu.wmma_store(D, memory, d))
    for i in (0, 1234, 4095):
        one = tcemu.wmma_mma(MMA, a[i], b[i], c[i], target="sm_90")
        np.testing.assert_array_equal(after[i], tcemu.wmma_store(D, memory[i], one))


def test_another_offset_does_not_compile_anew():
    from tcemu.engine.instructions import wmma

    memory = random_words((WORDS,))
    tcemu.wmma_load(A, memory, offset=0, stride=64)
    before = wmma._load._cache_size()
    for offset in (16, 32, 512):
        tcemu.wmma_load(A, memory, offset=offset, stride=64)
    assert wmma._load._cache_size() == before


def test_only_integers_move():
    memory, fragment, address = random_words((2, WORDS)), random_words((2, 32, 8)), np.zeros((2, 32), np.int32)
    ld, st = "ldmatrix.sync.aligned.m8n8.x4.b16", "stmatrix.sync.aligned.m8n8.x4.b16"
    for moved in (
        jax.make_jaxpr(lambda m, o: tcemu.wmma_load(C, m, offset=o))(memory, 16),
        jax.make_jaxpr(lambda m, f: tcemu.wmma_store(D, m, f))(memory, fragment),
        jax.make_jaxpr(lambda m, p: tcemu.ldmatrix(ld, m, p))(memory, address),
        jax.make_jaxpr(lambda m, p, r: tcemu.stmatrix(st, m, p, r))(memory, address, fragment[..., :4]),
    ):
        values = [v.aval.dtype for e in equations(moved.jaxpr) for v in (*e.invars, *e.outvars)]
        assert values and not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in values)
