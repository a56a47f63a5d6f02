"""`gemm`: the same bits as a loop of instructions, any shape and dtype, and what bad input is told."""

import copy
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu import formats
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Slices, Steps

F16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
F16_F16 = "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"
BF16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
TF32 = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
E4M3 = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
E5M2 = "mma.sync.aligned.m16n8k32.row.col.f16.e5m2.e5m2.f16"
VOLTA = "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32"
VOLTA_F16 = "mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f16"
F64 = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64"
S8 = "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32"
S4_SAT = "mma.sync.aligned.m16n8k64.row.col.satfinite.s32.s4.s4.s32"
B1 = "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.xor.popc"
FLOATS = [F16, F16_F16, BF16, TF32, E4M3, E5M2, VOLTA, VOLTA_F16]
USUAL = sample_cases(FLOATS, (F16_F16,))


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.itemsize}")


def loop_gemm(op, a, b, c):
    """D tile by tile and K step by K step through `dot`, operands filled with zeros (A with -0) to whole tiles. Returns D's codes."""
    op = tcemu.parse(op)
    words = (2,) if op.a.words == 2 else ()
    code = lambda fmt, x: np.asarray(formats.from_float(fmt, x))

    def fill(x, rows, columns, value):
        pad = [(0, -x.shape[0] % rows), (0, -x.shape[1] % columns), *[(0, 0)] * len(words)]
        return np.pad(x, pad, constant_values=value)

    minus_zero = 0 if words or op.a.is_integer else 1 << (op.a.bits - 1)
    (m, _), n = a.shape, b.shape[1]
    a, b = fill(code(op.a, a), op.m, op.k, minus_zero), fill(code(op.b, b), op.k, op.n, 0)
    c = fill(code(op.c, c), op.m, op.n, 0)
    tiles = lambda x, r, s: np.swapaxes(x.reshape(-1, r, x.shape[1] // s, s, *words), 1, 2)
    a, b, d = tiles(a, op.m, op.k), tiles(b, op.k, op.n), tiles(c, op.m, op.n)
    for step in range(a.shape[1]):
        d = np.asarray(tcemu.dot(op, a[:, step][:, None], b[step][None], d, target="sm_90a"))
    return np.swapaxes(d, 1, 2).reshape(-1, d.shape[1] * op.n, *words)[:m, :n]


def normal(*shape, seed=0, spread=6.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.uniform(-spread, spread, shape))).astype(np.float32)


@pytest.mark.parametrize("op", USUAL)
def test_gemm_is_a_loop_of_instructions(op):
    a, b, c = normal(37, 75, seed=1), normal(75, 19, seed=2), normal(37, 19, seed=3)
    for scale, accumulator in ((1.0, c), (1e-6, None)):
        d = np.asarray(tcemu.gemm(a * np.float32(scale), b, accumulator, op=op, target="sm_90a"))
        assert d.dtype == (np.float16 if ".f16.f16.f16.f16" in op or "e5m2" in op else np.float32)
        want = loop_gemm(op, a * np.float32(scale), b, np.zeros_like(c) if accumulator is None else accumulator)
        np.testing.assert_array_equal(bits(d), want)


@pytest.mark.full
def test_gemm_f64():
    rng = np.random.default_rng(4)
    a, b, c = rng.standard_normal((9, 12)), rng.standard_normal((12, 10)), rng.standard_normal((9, 10))
    c[0, 0], a[0], b[:, 0] = -0.0, 0.0, -1.0
    d = tcemu.gemm(a, b, c, op=F64, target="sm_90a")
    assert isinstance(d, np.ndarray) and d.dtype == np.float64
    np.testing.assert_array_equal(d.view(np.uint32).reshape(9, 10, 2), loop_gemm(F64, a, b, c))
    exact = tcemu.gemm(a[:, :5], b[:5], c, op=F64, target="sm_90a")  # K is not a multiple of 4: five multiply-adds, not eight
    np.testing.assert_allclose(exact, a[:, :5] @ b[:5] + c, rtol=1e-13, atol=1e-13)
    with pytest.raises(tcemu.Unsupported, match=r"x64.*NumPy array"):
        jax.jit(lambda x: tcemu.gemm(x, x, op=F64, target="sm_90a"))(jnp.ones((4, 4)))


@pytest.mark.parametrize("op", sample_cases([S8, S4_SAT, B1], (S8, B1)))
def test_gemm_of_integers(op):
    rng, parsed = np.random.default_rng(5), tcemu.parse(op)
    low, high = (-(2 ** (parsed.a.bits - 1)), 2 ** (parsed.a.bits - 1)) if parsed.a.signed else (0, 2**parsed.a.bits)
    a, b = rng.integers(low, high, (21, 700)), rng.integers(0 if not parsed.b.signed else low, high, (700, 13))
    d = np.asarray(tcemu.gemm(a, b, op=op, target="sm_90a"))
    exact = (a[:, :, None] != b[None]).sum(1) if op == B1 else a @ b
    assert d.dtype == np.int32
    np.testing.assert_array_equal(d, exact)


def test_integers_wrap_or_clamp_and_inputs_saturate():
    top = np.full((1, 1), 2**31 - 1, np.int32)
    one = np.ones((1, 64), np.int8)
    assert int(tcemu.gemm(one, one.T, top, op=S8, target="sm_90a")[0, 0]) == -(2**31) + 63
    assert int(tcemu.gemm(one, one.T, top, op=S4_SAT, target="sm_90a")[0, 0]) == 2**31 - 1
    # each instruction clamps its own 64 products: up to the limit first, then down from there
    up_then_down = np.concatenate([one, -one], axis=1)
    assert int(tcemu.gemm(up_then_down, np.ones((128, 1)), top, op=S4_SAT, target="sm_90a")[0, 0]) == 2**31 - 1 - 64
    assert int(tcemu.gemm([[1000.7]], [[-3.0]], op=S8, target="sm_90a")[0, 0]) == 0  # -3 is 0 as u8
    assert int(tcemu.gemm([[1000.7]], [[3.0]], op=S8, target="sm_90a")[0, 0]) == 127 * 3


@pytest.mark.parametrize("op", sample_cases([*FLOATS, F64, S8], (F16,)))
def test_filling_k_with_zeros_changes_no_bit(op):
    """What `fill` claims: K of 5 equals K filled by hand to two whole instructions, also where D is a signed zero."""
    k = tcemu.parse(op).k
    a, b, c = normal(6, 5, seed=6), normal(5, 6, seed=7), normal(6, 6, seed=8)
    a[0], c[0, ::2], c[0, 1::2] = 0.0, -0.0, 0.0
    b[:, 3] = -0.0
    a_filled = np.concatenate([a, np.full((6, 2 * k - 5), -0.0, np.float32)], axis=1)
    b_filled = np.concatenate([b, np.zeros((2 * k - 5, 6), np.float32)])
    short, long = (tcemu.gemm(x, y, c, op=op, target="sm_90a") for x, y in ((a, b), (a_filled, b_filled)))
    np.testing.assert_array_equal(bits(short), bits(long))


def test_padding_by_hand_with_infinities_and_nans_beside_it():
    a = np.array([[np.inf, 1, 2], [np.nan, 1, 2], [1, 2, 3]], np.float32)
    d = np.asarray(tcemu.gemm(a, np.ones((3, 2), np.float32), op=F16, target="sm_90a"))
    np.testing.assert_array_equal(bits(d), [[0x7F800000] * 2, [0x7FFFFFFF] * 2, [0x40C00000] * 2])


@pytest.mark.parametrize(
    "dtype",
    sample_cases(
        [np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int64, np.uint8, bool, np.float32], (np.float64, bool)
    ),
)
def test_any_real_dtype(dtype):
    a, b = (np.random.default_rng(9).integers(0, 2, (5, 20)).astype(dtype) for _ in range(2))
    d = np.asarray(tcemu.gemm(a, b.T, op=F16, target="sm_90a"))
    np.testing.assert_array_equal(d, a.astype(np.float32) @ b.T.astype(np.float32))


def test_numpy_float64_is_rounded_once():
    just_above_a_tie = 1 + 2.0**-11 + 2.0**-40  # by way of float32 it would be the tie, and round down
    d = tcemu.gemm([[just_above_a_tie]], np.ones((1, 1)), op=F16, target="sm_90a")
    assert float(d[0, 0]) == 1 + 2.0**-10


def test_rounding_and_saturation_of_the_inputs():
    x, one = np.array([[1 + 2.0**-12]], np.float32), np.ones((1, 1), np.float32)
    got = [float(tcemu.gemm(x, one, op=F16, target="sm_90a", rounding=mode)[0, 0]) for mode in ("RN", "RZ", "RM", "RP")]
    assert got == [1, 1, 1, 1 + 2.0**-10]
    big = np.array([[1e6]], np.float32)
    assert np.isinf(tcemu.gemm(big, one, op=F16, target="sm_90a")[0, 0])
    assert float(tcemu.gemm(big, one, op=F16, target="sm_90a", saturate=True)[0, 0]) == 65504
    many = np.full((1, 4096), 1 + 2.0**-12, np.float32)
    mean = float(tcemu.gemm(many, np.ones((4096, 1)), op=F16, target="sm_90a", rounding="SR", key=jax.random.key(0))[0, 0]) / 4096 - 1
    assert abs(mean - 2.0**-12) < 4 * 2.0**-10 * np.sqrt(0.25 * 0.75 / 4096)
    with pytest.raises(ValueError, match="key="):
        tcemu.gemm(x, one, op=F16, target="sm_90a", rounding="SR")
    with pytest.raises(ValueError, match=r"'up' is not one of RN, RZ.*RNA"):
        tcemu.gemm(x, one, op=F16, target="sm_90a", rounding="up")


def test_ties_away_from_zero_are_those_of_a_kernel_recipe():
    """What cvt.rna.tf32 makes of f32 operands, in gemm and where a library's kernel casts so."""
    ties = np.array([[1 + 2.0**-11, -1 - 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 - 2.0**-23]], np.float32)
    op, one = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", np.eye(4, dtype=np.float32)
    d = np.asarray(tcemu.gemm(ties, one, op=op, target="sm_90a", rounding="RNA"))
    assert d.tolist() == [[1 + 2.0**-10, -1 - 2.0**-10, 1 + 2 * 2.0**-10, 1]]
    rng = np.random.default_rng(11)
    normal = (rng.standard_normal((16, 16)).astype(np.float32) for _ in range(2))
    a, b = ((x.view(np.uint32) & np.uint32(0xFFFFF000)).view(np.float32) for x in normal)  # half of them are ties
    recipe = KernelRecipe(formats.TF32, formats.TF32, formats.F32, Steps(tcemu.parse(op), "sm_90a"), Slices.single(16), cast="RNA")
    assert (bits(tcemu.gemm(a, b, op=op, target="sm_90a", rounding="RNA")) == bits(tcemu.matmul(a, b, recipe=recipe))).all()
    assert (bits(tcemu.gemm(a, b, op=op, target="sm_90a")) != bits(tcemu.matmul(a, b, recipe=recipe))).any()


AXES = list(itertools.product((0, 1, 2), (0, 1, 7, 16), (0, 1, 9), (0, 3, 8), (True, False)))


@pytest.mark.parametrize("case", sample_cases(AXES, 62))
def test_batches_and_empty_axes(case):
    axes, m, k, n, with_c = case
    rng = np.random.default_rng(10)
    batch = (2, 3)[:axes]
    a, b = rng.standard_normal((*batch, m, k), np.float32), rng.standard_normal((k, n), np.float32)
    c = rng.standard_normal((m, n), np.float32) if with_c else None
    d = np.asarray(tcemu.gemm(a, b, c, op=F16, target="sm_90a"))
    assert d.shape == (*batch, m, n) and d.dtype == np.float32
    if k == 0:
        np.testing.assert_array_equal(bits(d), bits(np.broadcast_to(np.zeros((m, n), np.float32) if c is None else c, d.shape)))
    for at in np.ndindex(*batch):
        np.testing.assert_array_equal(bits(d[at]), bits(tcemu.gemm(a[at], b, c, op=F16, target="sm_90a")))


@pytest.mark.full
def test_b_may_have_the_batch_and_vmap_agrees():
    a, b = normal(4, 6, 17, seed=11), normal(4, 17, 5, seed=12)
    d = np.asarray(tcemu.gemm(a, b, op=BF16, target="sm_90a"))
    one = lambda x, y: tcemu.gemm(x, y, op=BF16, target="sm_90a")
    np.testing.assert_array_equal(bits(jax.jit(jax.vmap(one))(a, b)), bits(d))
    np.testing.assert_array_equal(bits(tcemu.gemm(a[0], b, op=BF16, target="sm_90a")[2]), bits(one(a[0], b[2])))


def test_an_exact_model_is_a_chain_of_f32_multiply_adds():
    a, b = normal(5, 23, seed=15), normal(23, 7, seed=16)
    d = tcemu.gemm(a, b, op=BF16, target="sm_90a", model=tcemu.Model(formats.F32, 1, None, rounding="RN"))
    x, y = (v.astype(ml_dtypes.bfloat16).astype(np.float64) for v in (a, b))
    want = np.zeros((5, 7), np.float32)
    for k in range(23):  # a product of two bf16 values, and its sum with an f32, are rounded once by way of longdouble's 64 bits
        want = (np.longdouble(x[:, k : k + 1] * y[k]) + want).astype(np.float32)
    np.testing.assert_array_equal(bits(d), bits(want))


@pytest.mark.parametrize(
    "spelling",
    sample_cases(
        [
            "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16",
            "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64",
            "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32",
        ],
        3,
    ),
)
def test_a_copied_instruction_is_the_instruction(spelling):
    """As another process is given it: its formats are not the package's own objects."""
    op = copy.deepcopy(tcemu.parse(spelling))
    a, b = np.arange(32.0).reshape(2, 16) / 3, np.arange(48.0).reshape(16, 3) - 20
    d, expected = (np.asarray(tcemu.gemm(a, b, op=given, target="sm_90a")) for given in (op, spelling))
    assert (d.dtype, d.shape, d.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


@pytest.mark.full
def test_another_model():
    a, b = normal(8, 64, seed=13, spread=1.0), normal(64, 8, seed=14, spread=1.0)
    own = tcemu.list_models("sm_90a")["mma f16 to f32"]
    np.testing.assert_array_equal(
        bits(tcemu.gemm(a, b, op=F16, target="sm_90a", model=own)), bits(tcemu.gemm(a, b, op=F16, target="sm_90a"))
    )
    exact = a.astype(np.float16).astype(np.float64) @ b.astype(np.float16).astype(np.float64)
    sweep = jax.vmap(lambda f: tcemu.gemm(a, b, op=F16, target="sm_90a", model=own.replace(fraction_bits=f)))(jnp.arange(6, 31))
    error = np.abs(np.asarray(sweep, np.float64) - exact).mean((1, 2))
    assert (error[:8] > 1.5 * error[1:9]).all()  # a bit halves the error until f32's own rounding is what is left
    for f in (6, 13, 30):
        fixed = tcemu.gemm(a, b, op=F16, target="sm_90a", model=own.replace(fraction_bits=f))
        np.testing.assert_array_equal(bits(sweep[f - 6]), bits(fixed))
    promoted = own.replace(chain=32)
    assert (bits(tcemu.gemm(a, b, op=F16, target="sm_90a", model=promoted)) != bits(tcemu.gemm(a, b, op=F16, target="sm_90a"))).any()
    with pytest.raises(ValueError, match="does not hold every value of bf16"):
        tcemu.gemm(a, b, op=BF16, target="sm_90a", model=tcemu.Model(formats.F16, 1, None, rounding="RN"))
    with pytest.raises(ValueError, match=r"result is s32.*accumulates in f32"):
        tcemu.gemm(a, b, op=F16, target="sm_90a", model=tcemu.Model(formats.S32))


@pytest.mark.parametrize(
    ("a", "b", "c", "error", "told"),
    [
        (np.ones(4), np.ones((4, 4)), None, ValueError, r"^a: got shape \[4\]; expected a matrix"),
        (np.ones((4, 5)), np.ones((4, 4)), None, ValueError, "K is 5 in a and 4 in b"),
        (np.ones((2, 4, 4)), np.ones((3, 4, 4)), None, ValueError, r"batch axes of a, \[2\], and of b, \[3\]"),
        (np.ones((4, 4)), np.ones((4, 4)), np.ones((3, 4)), ValueError, r"^c: got shape \[3, 4\].*\[4, 4\]"),
        (np.ones((4, 4)), np.ones((4, 4)), np.ones((2, 4, 4)), ValueError, r"^c: got shape \[2, 4, 4\]"),
        (np.ones((4, 4), complex), np.ones((4, 4)), None, TypeError, "^a: an array of dtype complex128"),
        (np.ones((4, 4)), np.array([["x"]]), None, TypeError, "^b: an array of dtype <U1"),
    ],
)
def test_bad_arrays_are_named(a, b, c, error, told):
    with pytest.raises(error, match=told):
        tcemu.gemm(a, b, c, op=F16, target="sm_90a")


def test_bad_ops_are_explained():
    with pytest.raises(tcemu.Unsupported):
        tcemu.gemm(np.ones((4, 4)), np.ones((4, 4)), op="mma.sync", target="sm_90a")
    with pytest.raises(tcemu.Unsupported, match="needs sm_80 or later"):
        tcemu.gemm(np.ones((4, 4)), np.ones((4, 4)), op=F16, target="sm_75")
    with pytest.raises(tcemu.Unsupported, match="computes nothing"):
        tcemu.gemm(np.ones((4, 4)), np.ones((4, 4)), op="movmatrix.sync.aligned.m8n8.trans.b16", target="sm_90")


@pytest.mark.parametrize("spelling", sample_cases((F16, BF16, E4M3), (F16,)))
def test_memory_grows_with_the_matrices_only(spelling):
    """2048 cubed within 1 GiB above the operands, by the compiler's own account."""
    from tcemu.engine.architectures.lookup import find_row
    from tcemu.engine.arithmetic.product_spec import product_spec
    from tcemu.operations.products.gemm import _Conversion, _gemm_numbers

    n = 2048
    matrix = jax.ShapeDtypeStruct((n, n), jnp.uint32)
    op = tcemu.parse(spelling)
    conversion, codes = _Conversion((formats.F32,) * 3, "RN", False), (matrix,) * 3
    lowered = jax.jit(_gemm_numbers, static_argnums=(1, 2, 6)).lower(
        find_row(op, "sm_90a").model, product_spec(op), conversion, codes, None, None, 0, None
    )
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 2**30, memory
