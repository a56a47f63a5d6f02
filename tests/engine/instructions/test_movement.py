"""`ldmatrix`, `stmatrix`, `movmatrix`: the recorded words of an H200, the manual's formulas for those it lacks, and bad addresses."""

import hypothesis.extra.numpy as arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replay_golden as replay
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import layout_formulas
from support import golden
from support.sampling import sample_cases
from support.word_arrays import random_words, to_bits, to_words

import tcemu

CASES = golden.cases("movement")
B16_LOADS = [op for op in tcemu.isa.instructions("sm_90", "ldmatrix") if op.space is None]
B16_STORES = [op for op in tcemu.isa.instructions("sm_90", "stmatrix") if op.space is None]
MOVERS_120 = tcemu.isa.instructions("sm_120a", "ldmatrix") + tcemu.isa.instructions("sm_120a", "stmatrix")
NARROW = [op for op in MOVERS_120 if op.space is None and op.element != "b16"]
LD_X4, ST_X4 = "ldmatrix.sync.aligned.m8n8.x4.b16", "stmatrix.sync.aligned.m8n8.x4.b16"
MOV = "movmatrix.sync.aligned.m8n8.trans.b16"
WORDS = 256
FORMULA = {(shape, trans): (elements, memory, formula) for shape, trans, elements, memory, formula in layout_formulas.MOVERS}


@pytest.mark.parametrize("case", sample_cases(CASES, 4, lambda case: case["ptx"]))
def test_recorded_words(case):
    wrong, words = replay.compare(case)
    assert words > 0 and wrong == 0, f"{wrong} mismatches of {words}"


def test_every_spelling_of_sm_90_is_recorded():
    def moved(ptx):  # the recording has generic addresses and .shared::cta
        return str(tcemu.parse(ptx)).replace(".shared::cta", "").replace(".shared", "")

    here = {moved(str(op)) for family in ("ldmatrix", "stmatrix", "movmatrix") for op in tcemu.isa.instructions("sm_90", family)}
    assert len(CASES) == 25 and {moved(case["ptx"]) for case in CASES} == here


def matrix_rows(op):
    return FORMULA[(op.m, op.n), op.trans][1][0]


def places(op):
    """[lane, element] -> (memory row among all of the matrices, place in it), by the formulas; every place is there once."""
    elements, (rows, columns), formula = FORMULA[(op.m, op.n), op.trans]
    found = np.empty((32, op.num * elements, 2), int)
    for lane, j, i in np.ndindex(32, op.num, elements):
        row, place = formula(lane, i)
        found[lane, j * elements + i] = j * rows + row, place
    assert len({tuple(place) for place in found.reshape(-1, 2).tolist()}) == op.num * rows * columns == found.size // 2
    return found


def to_bytes(words):
    return np.ascontiguousarray(words).astype("<u4").view(np.uint8)


def load_by_manual(op, shared, address):
    """What the manual's words say of one warp, in NumPy."""
    memory = to_bytes(shared)
    rows = [memory[at : at + 16] for at in address[: op.num * matrix_rows(op)]]
    if op.src_fmt is None:
        elements = [row.view("<u2") if op.element == "b16" else row for row in rows]
    else:
        bits = int(op.src_fmt[1])
        numbers = [int.from_bytes(row.tobytes(), "little") for row in rows]
        elements = [[number >> bits * c & (1 << bits) - 1 for c in range(16)] for number in numbers]
    at = places(op)
    elements = np.array(elements, np.uint16 if op.element == "b16" else np.uint8)[at[..., 0], at[..., 1]]
    return np.ascontiguousarray(elements).view("<u4").astype(np.uint32)


def store_by_manual(op, shared, address, registers):
    memory, at = to_bytes(shared).copy(), places(op)
    held = to_bytes(registers) if op.element == "b8" else np.ascontiguousarray(registers).astype("<u4").view("<u2")
    size = 1 if op.element == "b8" else 2
    for (row, place), code in zip(at.reshape(-1, 2), held.ravel(), strict=True):
        start = address[row] + size * place
        memory[start : start + size] = np.array([code], held.dtype).view(np.uint8)
    return memory.view("<u4").astype(np.uint32)


def addresses(seed, batch=(), words=WORDS):
    rng = np.random.default_rng(seed)
    picked = [rng.permutation(words // 4)[:32] for _ in range(int(np.prod(batch)))]
    return (16 * np.array(picked)).reshape(*batch, 32).astype(np.int32)


@pytest.mark.parametrize("op", sample_cases([*NARROW, *B16_LOADS, *B16_STORES], 3, str))
def test_formulas_from_memory_to_registers_and_back(op):
    shared, address = random_words((4, WORDS), 1), addresses(2, (4,))
    if op.family == "ldmatrix":
        want = np.stack([load_by_manual(op, *one) for one in zip(shared, address, strict=True)])
        np.testing.assert_array_equal(tcemu.ldmatrix(op, shared, address), want)
        assert want.shape == (4, 32, op.register_count("r"))
    else:
        registers = random_words((4, 32, op.register_count("r")), 3)
        want = np.stack([store_by_manual(op, *one) for one in zip(shared, address, registers, strict=True)])
        np.testing.assert_array_equal(tcemu.stmatrix(op, shared, address, registers), want)
        changed = sum(bool(row.any()) for row in (want != shared).reshape(-1, 4))
        assert changed == 4 * op.num * 8


def test_the_narrow_forms_are_all_there():
    assert len(NARROW) == 6 + 6 + 3 and len(B16_LOADS) == len(B16_STORES) == 6


def test_unpacked_elements_have_clean_upper_bits_and_padding_is_ignored():
    address = addresses(5)
    for op in (op for op in NARROW if op.src_fmt):
        bits = int(op.src_fmt[1])
        shared = random_words((WORDS,), 4)
        held = to_bits(np.asarray(tcemu.ldmatrix(op, shared, address)), 8)
        assert not held[..., bits:].any() and held[..., :bits].any()
        padding = np.tile(np.arange(128) >= 16 * bits, WORDS // 4)
        other = to_words((to_bits(shared, 1).ravel() ^ padding).reshape(-1, 1))
        assert (other != shared).any()
        np.testing.assert_array_equal(tcemu.ldmatrix(op, other, address), tcemu.ldmatrix(op, shared, address))


WARPS = arrays.arrays(np.uint32, (WORDS,), elements=st.integers(0, 2**32 - 1))
ROWS = st.permutations(range(WORDS // 4)).map(lambda rows: 16 * np.array(rows[:32], np.int32))


@settings(deadline=None, max_examples=60)
@given(WARPS, ROWS, st.sampled_from(range(6)))
def test_store_undoes_load(shared, address, which):
    load, store = B16_LOADS[which], B16_STORES[which]
    assert str(load).removeprefix("ld") == str(store).removeprefix("st")
    registers = tcemu.ldmatrix(load, shared, address)
    np.testing.assert_array_equal(tcemu.stmatrix(store, shared, address, registers), shared)
    again = tcemu.stmatrix(store, np.zeros_like(shared), address, registers)
    np.testing.assert_array_equal(tcemu.ldmatrix(load, again, address), registers)


@settings(deadline=None, max_examples=60)
@given(arrays.arrays(np.uint32, (32, 1), elements=st.integers(0, 2**32 - 1)))
def test_movmatrix_twice_is_the_identity(registers):
    turned = np.asarray(tcemu.movmatrix(MOV, registers))
    np.testing.assert_array_equal(tcemu.movmatrix(MOV, turned), registers)
    halves, source = turned.astype("<u4").view("<u2").reshape(32, 2), registers.astype("<u4").view("<u2").reshape(32, 2)
    for lane, e in np.ndindex(32, 2):  # layouts.md, section 8
        g, t = lane >> 2, lane & 3
        assert halves[lane, e] == source[4 * (2 * t + e) + (g >> 1), g & 1]


def test_trans_is_movmatrix_after_the_load():
    shared, address = random_words((8, WORDS)), addresses(1, (8,))
    plain = tcemu.ldmatrix(LD_X4, shared, address)
    turned = np.asarray(tcemu.ldmatrix("ldmatrix.sync.aligned.m8n8.x4.trans.b16", shared, address))
    for j in range(4):
        np.testing.assert_array_equal(tcemu.movmatrix(MOV, plain[..., j : j + 1])[..., 0], turned[..., j])


@pytest.mark.full
def test_any_leading_axes_give_the_same_words():
    shared, address = random_words((2, 3, WORDS)), addresses(1, (2, 3))
    registers = random_words((2, 3, 32, 4), 2)
    loads, stores = np.asarray(tcemu.ldmatrix(LD_X4, shared, address)), np.asarray(tcemu.stmatrix(ST_X4, shared, address, registers))
    for i in np.ndindex(2, 3):
        np.testing.assert_array_equal(tcemu.ldmatrix(LD_X4, shared[i], address[i]), loads[i])
        np.testing.assert_array_equal(tcemu.stmatrix(ST_X4, shared[i], address[i], registers[i]), stores[i])
    load, store = (lambda *x: tcemu.ldmatrix(LD_X4, *x)), (lambda *x: tcemu.stmatrix(ST_X4, *x))
    np.testing.assert_array_equal(jax.vmap(jax.vmap(load))(shared, address), loads)
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(store)))(shared, address, registers), stores)
    for one, many in ((shared[0, 0], address), (shared, address[1, 1]), (shared[:, :1], address[0])):
        got = np.asarray(tcemu.ldmatrix(LD_X4, one, many))
        wide = np.broadcast_to(one, (2, 3, WORDS)), np.broadcast_to(many, (2, 3, 32))
        np.testing.assert_array_equal(got, tcemu.ldmatrix(LD_X4, *wide))
        np.testing.assert_array_equal(tcemu.stmatrix(ST_X4, one, many, registers), tcemu.stmatrix(ST_X4, *wide, registers))
    assert tcemu.ldmatrix(LD_X4, shared[:0], address[0]).shape == (0, 3, 32, 4)
    assert tcemu.stmatrix(ST_X4, shared[:0], address[0], registers[:0]).shape == (0, 3, WORDS)


def error_message(error, *fragments):
    return pytest.raises(error, match="(?s)" + ".*".join(fragments))


def change_address(address, lane, to):
    return np.where(np.arange(32) == lane, to, address)


BAD = [(8, "multiple of 16"), (-16, "last row .* begins at 1008"), (4 * WORDS, "last row .* begins at 1008"), (4 * WORDS - 8, "")]


@pytest.mark.parametrize(("to", "says"), [*BAD[:2], *(pytest.param(*case, marks=pytest.mark.full) for case in BAD[2:])])
def test_bad_addresses(to, says):
    shared, registers, good = random_words((WORDS,)), random_words((32, 4), 1), addresses(1)
    bad = change_address(good, 17, to)
    for address in (bad, jnp.asarray(bad)):
        with error_message(tcemu.UndefinedBehaviour, "lane 17 has address", str(to), says, "9.7.14.5.15"):
            tcemu.ldmatrix(LD_X4, shared, address)
        with error_message(tcemu.UndefinedBehaviour, "lane 17 has address", str(to), says, "9.7.14.5.16"):
            tcemu.stmatrix(ST_X4, shared, address, registers)
        with error_message(tcemu.UndefinedBehaviour, "lane 17"):  # concrete, though the rest is traced
            jax.jit(lambda shared, address=address: tcemu.ldmatrix(LD_X4, shared, address))(shared)
    with error_message(tcemu.UndefinedBehaviour, "lane 17 has address", str(to)):
        tcemu.checked(jax.jit(lambda *x: tcemu.ldmatrix(LD_X4, *x, checked=True)))(shared, bad)
    with error_message(tcemu.UndefinedBehaviour, "lane 17 has address", str(to)):
        tcemu.checked(jax.jit(lambda *x: tcemu.stmatrix(ST_X4, *x, checked=True)))(shared, bad, registers)
    held = np.asarray(jax.jit(lambda *x: tcemu.ldmatrix(LD_X4, *x))(shared, bad))
    want = np.asarray(tcemu.ldmatrix(LD_X4, shared, good)).copy()
    want[4:8, 2] = 0  # row 1 of matrix 2
    np.testing.assert_array_equal(held, want)
    after = np.asarray(jax.jit(lambda *x: tcemu.stmatrix(ST_X4, *x))(shared, bad, registers))
    want = np.asarray(tcemu.stmatrix(ST_X4, shared, good, registers)).copy()
    want[good[17] // 4 : good[17] // 4 + 4] = shared[good[17] // 4 : good[17] // 4 + 4]
    np.testing.assert_array_equal(after, want)
    x2 = LD_X4.replace("x4", "x2")
    np.testing.assert_array_equal(tcemu.ldmatrix(x2, shared, bad, target="sm_80"), tcemu.ldmatrix(x2, shared, good))
    with error_message(tcemu.UndefinedBehaviour, "lane 17"):  # sm_75 looks at every lane's
        tcemu.ldmatrix(x2, shared, bad, target="sm_75")


def test_checked_lets_good_addresses_pass():
    shared, registers, good = random_words((3, WORDS)), random_words((3, 32, 4), 1), addresses(1, (3,))
    load = tcemu.checked(jax.jit(lambda *x: tcemu.ldmatrix(LD_X4, *x, checked=True)))
    np.testing.assert_array_equal(load(shared, good), tcemu.ldmatrix(LD_X4, shared, good, checked=True))
    store = tcemu.checked(jax.jit(lambda *x: tcemu.stmatrix(ST_X4, *x, checked=True)))
    np.testing.assert_array_equal(store(shared, good, registers), tcemu.stmatrix(ST_X4, shared, good, registers, checked=True))


def test_of_two_rows_at_one_address_the_higher_lane_stays():
    shared, registers, good = random_words((5, WORDS)), random_words((5, 32, 4), 1), addresses(1, (5,))
    twice = change_address(good, 9, good[:, 3:4])
    want = np.asarray(tcemu.stmatrix(ST_X4, shared, good, registers)).copy()
    for warp in range(5):  # where lane 3 stored, what lane 9 stores; where lane 9 stored, nothing
        three, nine = (slice(good[warp, lane] // 4, good[warp, lane] // 4 + 4) for lane in (3, 9))
        want[warp, three], want[warp, nine] = want[warp, nine].copy(), shared[warp, nine]
    np.testing.assert_array_equal(tcemu.stmatrix(ST_X4, shared, twice, registers), want)
    with error_message(tcemu.UndefinedBehaviour, "lane 9 stores where a lower lane does"):
        tcemu.stmatrix(ST_X4, shared, twice, registers, checked=True)
    with error_message(tcemu.UndefinedBehaviour, "lane 9 stores where a lower lane does"):
        tcemu.checked(jax.jit(lambda *x: tcemu.stmatrix(ST_X4, *x, checked=True)))(shared, twice, registers)


def test_bad_operands_are_named():
    shared, address, registers = random_words((WORDS,)), addresses(1), random_words((32, 4))
    with error_message(TypeError, "^shared: got int32", "uint32"):
        tcemu.ldmatrix(LD_X4, shared.astype(np.int32), address)
    with error_message(ValueError, "^shared: got a single"):
        tcemu.ldmatrix(LD_X4, shared[0], address)
    with error_message(TypeError, "^address: got float32", "integers"):
        tcemu.ldmatrix(LD_X4, shared, address.astype(np.float32))
    with error_message(ValueError, r"^address: got shape \[31\]", "9.7.14.5.15"):
        tcemu.ldmatrix(LD_X4, shared, address[:31])
    with error_message(ValueError, r"^registers: got uint32\[32, 1\]", "32, 4"):
        tcemu.stmatrix(ST_X4, shared, address, registers[:, :1])
    with error_message(TypeError, "^registers: got int32"):
        tcemu.movmatrix(MOV, registers[:, :1].astype(np.int32))
    with error_message(tcemu.Unsupported, "is stmatrix; tcemu.ldmatrix runs ldmatrix"):
        tcemu.ldmatrix(ST_X4, shared, address)
    with error_message(tcemu.Unsupported, "sm_75 or later", "sm_70"):
        tcemu.movmatrix(MOV, registers[:, :1], target="sm_70")
    np.testing.assert_array_equal(tcemu.movmatrix(MOV, registers[:, :1], target="sm_90"), tcemu.movmatrix(MOV, registers[:, :1]))
    with error_message(tcemu.Unsupported, "sm_90 or later", "sm_80"):
        tcemu.stmatrix(ST_X4, shared, address, registers, target="sm_80")
    with error_message(tcemu.UndefinedBehaviour, "lane 0"):
        tcemu.ldmatrix(LD_X4, shared[:3], np.zeros(32, np.int32))
    huge = change_address(address.astype(np.int64), 4, 2**32 + 16)
    with error_message(tcemu.UndefinedBehaviour, "lane 4 has address 4294967312"):
        tcemu.ldmatrix(LD_X4, shared, huge)


def test_only_the_addressed_rows_are_gathered():
    shared, address, registers = random_words((8, WORDS)), addresses(1, (8,)), random_words((8, 32, 4))

    def compiled(fn, *operands):
        return jax.jit(fn).lower(*operands).compile().as_text()

    load = compiled(lambda *x: tcemu.ldmatrix(LD_X4, *x), shared, address)
    assert load.count(" gather(") == 1 and " scatter(" not in load
    turn = compiled(lambda x: tcemu.movmatrix(MOV, x), registers[..., :1])
    assert " gather(" not in turn and " scatter(" not in turn
    store = compiled(lambda m, r: tcemu.stmatrix(ST_X4, m, address[0], r), shared, registers)
    assert " gather(" not in store


# ---- a 64 x 64 x 64 product two ways

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
A_BYTES = 64 * 64 * 2


def multiply_by_ldmatrix(shared):
    """A at byte 0, B after it, both row-major f16 -> C, f32[64, 64]; the 4 x 8 tiles of C are a batch of warps."""
    lane = np.arange(32)
    i, j = 16 * np.arange(4)[:, None, None], 8 * np.arange(8)[:, None]
    d = jnp.zeros((4, 8, 32, 4), jnp.uint32)
    for k in range(0, 64, 16):
        a = tcemu.ldmatrix("ldmatrix.sync.aligned.m8n8.x4.b16", shared, 2 * (64 * (i + lane % 16) + k + 8 * (lane // 16)))
        b = tcemu.ldmatrix("ldmatrix.sync.aligned.m8n8.x2.trans.b16", shared, A_BYTES + 2 * (64 * (k + lane % 16) + j))
        d = tcemu.mma(MMA, a, b, d, target="sm_90")
    return tcemu.unpack(MMA, "d", d).swapaxes(1, 2).reshape(64, 64)


def multiply_by_wmma(shared):
    """The same through 4 x 4 fragments of 16 x 16; the tiles are stored one after the other into one memory."""
    tile = np.arange(4)
    d = jnp.zeros((4, 4, 32, 8), jnp.uint32)
    for k in range(0, 64, 16):
        a = tcemu.wmma_load("wmma.load.a.sync.aligned.row.m16n16k16.f16", shared, offset=1024 * tile[:, None] + k, stride=64)
        b = tcemu.wmma_load("wmma.load.b.sync.aligned.row.m16n16k16.f16", shared, offset=4096 + 64 * k + 16 * tile, stride=64)
        d = tcemu.wmma_mma("wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32", a, b, d, target="sm_90")
    memory = jnp.zeros(64 * 64, jnp.uint32)
    for i, j in np.ndindex(4, 4):
        memory = tcemu.wmma_store("wmma.store.d.sync.aligned.row.m16n16k16.f32", memory, d[i, j], offset=1024 * i + 16 * j, stride=64)
    return memory.reshape(64, 64)


@pytest.mark.full
def test_a_product_of_64_by_ldmatrix_and_mma_and_by_wmma():
    a, b = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float16)
    shared = np.concatenate([a.ravel(), b.ravel()]).view(np.uint32)
    one, other = np.asarray(multiply_by_ldmatrix(shared)), np.asarray(multiply_by_wmma(shared))
    np.testing.assert_array_equal(one, other)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert 0 < np.abs(one.view(np.float32) - exact).max() < 1e-4
