"""`mma` in registers: the recorded words of an H200, batch axes, jit and vmap, and what bad input is told."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replay_golden as replay
from support import golden
from support.sampling import sample_cases

import tcemu

F16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
F64 = "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64.rz"
VOLTA = "mma.sync.aligned.m8n8k4.col.row.f32.f16.f16.f32"
MXF4 = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0"
CASES = golden.cases("mma")


TYPES = ("f32.f16", "f16.f16", "bf16", "tf32", "f64", "e4m3", "f32.e5m2", "s8.u8", "b1")  # the usual run has a recording of each
USUAL = [next(case for case in CASES if f".{types}." in case["ptx"]) for types in TYPES]


@pytest.mark.parametrize("case", sample_cases(CASES, USUAL, lambda case: case["ptx"].removeprefix("mma.sync.aligned.")))
def test_recorded_words(case):
    wrong, words = replay.compare(case)
    assert words > 0 and wrong == 0, f"{wrong} mismatches of {words}"


def test_every_dense_spelling_of_sm_90_is_recorded():
    recorded = {tcemu.parse(case["ptx"]) for case in CASES}
    assert len(CASES) == 110
    assert recorded == {op for op in tcemu.isa.instructions("sm_90", family="mma")}
    assert all(tcemu.evidence(case["ptx"], target).level == "silicon" for case in CASES for target in ("sm_90", "sm_90a"))


def operands(spelling, batch=(), seed=0):
    op, rng = tcemu.parse(spelling), np.random.default_rng(seed)
    return [rng.integers(0, 2**32, (*batch, 32, op.register_count(name)), np.uint32) for name in "abc"]


@pytest.mark.parametrize("spelling", sample_cases((F16, F64, VOLTA), (F16,)))
def test_any_leading_axes_give_the_same_words(spelling):
    a, b, c = operands(spelling, (2, 3))
    whole = np.asarray(tcemu.mma(spelling, a, b, c, target="sm_90"))
    for i, j in np.ndindex(2, 3):
        np.testing.assert_array_equal(tcemu.mma(spelling, a[i, j], b[i, j], c[i, j], target="sm_90"), whole[i, j])
    one = lambda *registers: tcemu.mma(spelling, *registers, target="sm_90")
    np.testing.assert_array_equal(jax.vmap(jax.vmap(one))(a, b, c), whole)
    np.testing.assert_array_equal(jax.jit(one)(a, b, c), whole)
    shared = np.asarray(tcemu.mma(spelling, a, b[0, 0], c[0], target="sm_90"))
    np.testing.assert_array_equal(shared[1, 2], tcemu.mma(spelling, a[1, 2], b[0, 0], c[0, 2], target="sm_90"))


def test_an_empty_batch_is_an_empty_result():
    assert tcemu.mma(F16, *operands(F16, (0,)), target="sm_90").shape == (0, 32, 4)


@pytest.mark.parametrize("case", sample_cases(CASES, 110, lambda case: case["ptx"].removeprefix("mma.sync.aligned.")))
def test_mma_is_unpack_dot_pack(case):
    words = golden.arrays(case)
    codes = [tcemu.unpack(case["ptx"], name, words[name]) for name in "abc"]
    d = tcemu.dot(case["ptx"], *codes, target="sm_90")
    np.testing.assert_array_equal(tcemu.pack(case["ptx"], "d", d), words["d"])
    for name, matrix in zip("abc", codes, strict=True):
        np.testing.assert_array_equal(tcemu.pack(case["ptx"], name, matrix), words[name])


@chex.assert_max_traces(n=1)
def _counted(a, b, c):
    return tcemu.mma(F16, a, b, c, target="sm_90")


def test_new_values_do_not_compile_anew():
    chex.clear_trace_counter()
    step = jax.jit(_counted)
    for seed in range(3):
        step(*operands(F16, (4,), seed))


def error_message(error, *fragments):
    return pytest.raises(error, match="(?s)" + ".*".join(fragments))


def test_bad_registers_are_named():
    a, b, c = operands(F16)
    with error_message(ValueError, "^a: got uint32.31, 4.", "uint32.*32, 4.", "9.7.14.5"):
        tcemu.mma(F16, a[:31], b, c, target="sm_90")
    with error_message(ValueError, "^b: got uint32.32, 3.", "32, 2."):
        tcemu.mma(F16, a, np.zeros((32, 3), np.uint32), c, target="sm_90")
    with error_message(ValueError, "^c: got uint32.4.", "32, 4."):
        tcemu.mma(F16, a, b, np.zeros(4, np.uint32), target="sm_90")
    with error_message(TypeError, "^c: got float32", "raw words", "tcemu.pack"):
        tcemu.mma(F16, a, b, c.astype(np.float32), target="sm_90")
    with error_message(TypeError, "^a: got int64"):
        tcemu.mma(F16, a.astype(np.int64), b, c, target="sm_90")
    with pytest.raises(ValueError):
        tcemu.mma(F16, operands(F16, (2,))[0], operands(F16, (3,))[1], c, target="sm_90")


def test_bad_codes_are_named():
    with error_message(TypeError, "^a: got float32", "f16", "16, 16"):
        tcemu.dot(F16, jnp.zeros((16, 16)), jnp.zeros((16, 8)), jnp.zeros((16, 8)), target="sm_90")
    with error_message(ValueError, "^b: got uint16.8, 16.", "16, 8"):
        tcemu.dot(F16, np.zeros((16, 16), np.uint16), np.zeros((8, 16), np.uint16), np.zeros((16, 8), np.uint32), target="sm_90")
    with error_message(ValueError, "^a: got uint16.8, 4.", "4, 8, 4"):
        tcemu.pack(VOLTA, "a", np.zeros((8, 4), np.uint16))
    with error_message(ValueError, "operand 'e'", "it has 'a', 'b', 'c', 'd'"):
        tcemu.pack(F16, "e", np.zeros((16, 16), np.uint16))


def test_bad_spellings_and_targets_are_explained():
    registers = operands(F16)
    with error_message(tcemu.Unsupported, "m16n8k17"):
        tcemu.mma("mma.sync.aligned.m16n8k17.row.col.f32.f16.f16.f32", *registers, target="sm_90")
    with error_message(tcemu.Unsupported, "sm_120a"):
        tcemu.mma(MXF4, *registers, target="sm_90a")
    with error_message(tcemu.Unsupported, "sm_80"):
        tcemu.mma(F16, *registers, target="sm_70")
    with error_message(tcemu.Unsupported, "sm_91"):
        tcemu.mma(F16, *registers, target="sm_91")
    with error_message(tcemu.Unsupported, "wmma.load", "computes nothing; mma, mma.sp"):
        tcemu.evidence("wmma.load.a.sync.aligned.row.m16n16k16.f16", "sm_90")
