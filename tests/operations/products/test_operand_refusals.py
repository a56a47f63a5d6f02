"""What comes to `gemm`, `matmul`, `pack` and `Recipe` is taken as it is, once rounded, or refused with what would work."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu import formats
from tcemu.formats import BF16, E2M1, F16, F32, F64, S8, S32
from tcemu.operations.products.product_arguments import _scale_numbers

F16_OP = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
BF16_OP = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
TF32_OP = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
F64_OP = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64"
S8_OP = "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
MXF4_OP = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0"
ONE = np.ones((1, 1))


# ---- integers beyond s32


@pytest.mark.parametrize(
    "case",
    sample_cases(
        [
            (op, value)
            for op in (BF16_OP, TF32_OP, F64_OP)
            for value in (np.int64(2**40), np.int64(-(2**40)), np.uint32(3 * 2**30), np.uint64(2**63))
        ],
        12,
    ),
)
def test_wide_integers_keep_their_values(case):
    op, value = case
    x = np.full((1, 1), value)
    assert float(tcemu.gemm(x, ONE, op=op, target="sm_90a")[0, 0]) == float(value)
    assert float(tcemu.gemm(ONE, x, op=op, target="sm_90a")[0, 0]) == float(value)
    assert float(tcemu.gemm(ONE * 0, ONE, x, op=op, target="sm_90a")[0, 0]) == float(value)


def test_every_wide_integer_is_rounded_once():
    rng = np.random.default_rng(0)
    edges = [0, 1, -1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63 - 1, -(2**63), 2**24 + 1, 2**60 + 2**36 + 1]
    x = np.array(edges + (rng.integers(-(2**63), 2**63, 500) >> rng.integers(0, 62, 500)).tolist(), np.int64)
    np.testing.assert_array_equal(np.asarray(formats.from_float(F64, x)).view(np.float64)[:, 0], x.astype(np.float64))
    np.testing.assert_array_equal(np.asarray(formats.from_float(F32, x)).view(np.float32), x.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(formats.from_float(S32, x)).view(np.int32), np.clip(x, -(2**31), 2**31 - 1))
    np.testing.assert_array_equal(np.asarray(formats.from_float(S8, x)).view(np.int8), np.clip(x, -128, 127))
    u = x.view(np.uint64)
    np.testing.assert_array_equal(np.asarray(formats.from_float(F32, u)).view(np.float32), u.astype(np.float32))


def test_traced_uint32_keeps_its_value():
    x = jnp.full((1, 1), 3 * 2**30, jnp.uint32)
    d = jax.jit(lambda x: tcemu.gemm(x, jnp.ones((1, 1)), op=BF16_OP, target="sm_90a"))(x)
    assert float(d[0, 0]) == 3 * 2**30


def test_integers_saturate_where_the_instruction_takes_integers():
    c = np.array([[2**40, -(2**40)]])
    d = tcemu.gemm(np.zeros((1, 1), np.int8), np.zeros((1, 2), np.int8), c, op=S8_OP, target="sm_90a")
    assert d.tolist() == [[2**31 - 1, -(2**31)]]


# ---- NumPy's float64


@pytest.mark.parametrize("name", sample_cases(["bf16", "f16", "mxfp8_e5m2"], ("bf16",)))
def test_matmul_rounds_a_numpy_float64_once(name):
    ties = {"bf16": 1 + 2.0**-8, "f16": 1 + 2.0**-11, "mxfp8_e5m2": 1 + 2.0**-3}
    x = np.array([[ties[name] + 2.0**-40], [ties[name] - 2.0**-40], [ties[name]], [np.inf], [np.nan], [1e-320], [-0.0]])
    recipe = tcemu.get_recipe(name)
    d = np.asarray(tcemu.matmul(x, np.ones((1, 1), np.float32), recipe=recipe))[:, 0]
    unit = 2 * (ties[name] - 1)
    np.testing.assert_array_equal(d[:3], np.float32([1 + unit, 1, 1]))
    assert (np.isinf(d[3]) or name == "mxfp8_e5m2") and np.isnan(d[4]) and d[5] == 0 == d[6]
    plain = tcemu.dot_general(recipe)(x, np.ones((1, 1)), (((1,), (0,)), ((), ())))
    np.testing.assert_array_equal(np.asarray(plain)[:, 0].view(np.uint32), d.view(np.uint32))


@pytest.mark.parametrize("rounding", sample_cases(["RN", "RZ", "RM", "RP"], ()))
def test_matmul_of_near_ties_is_gemm(rounding):
    rng = np.random.default_rng(1)
    x = (1 + rng.integers(0, 256, (64, 1)) * 2.0**-8 + rng.choice([-1, 0, 1], (64, 1)) * 2.0**-40) * rng.choice([-1, 1, 2.0**-130], (64, 1))
    recipe = tcemu.get_recipe("bf16", target="sm_80", a=tcemu.quantize.Quantizer(rounding=rounding))
    d = np.asarray(tcemu.matmul(x, np.float32(ONE), recipe=recipe))
    want = np.asarray(tcemu.gemm(x, np.float32(ONE), op=recipe.op, target="sm_80", rounding=rounding))
    np.testing.assert_array_equal(d.view(np.uint32), want.view(np.uint32))


def test_round_to_rounds_a_numpy_float64_once():
    assert float(formats.round_float(BF16, np.float64(1 + 2.0**-8 + 2.0**-40))) == 1 + 2.0**-7
    assert formats.round_float(F16, np.ones(2)).dtype == jnp.float32


# ---- arrays of every kind


def multiply(by, a, b):
    return np.asarray(tcemu.gemm(a, b, op="f16", target="H100") if by == "gemm" else tcemu.matmul(a, b, recipe="f16 on H100"))


@pytest.mark.parametrize("by", ["gemm", "matmul"])
def test_arrays_of_every_kind_are_their_values_or_refused(by):
    a, b = np.random.default_rng(0).integers(-4, 5, (2, 4, 4)).astype(np.float32) / 4
    expected = multiply(by, a, b)
    same = [a.astype(">f4"), a.astype(">f8"), np.asfortranarray(a), a.tolist(), a.astype(np.float16)]
    same += [a.astype(dtype) for dtype in (ml_dtypes.float8_e4m3, ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3b11fnuz)]
    same += [jnp.asarray(a.astype(ml_dtypes.float8_e4m3)), np.ma.array(a), a.astype(ml_dtypes.float6_e3m2fn)]
    for x in same:
        np.testing.assert_array_equal(multiply(by, x, b), expected)
    refused = {
        TypeError: [a.astype(np.longdouble), np.ma.array(a, mask=a > 0), a.astype(object), a.astype(str), None, "ab", a + 0j],
        ValueError: [[[1, 2], [3]]],
    }
    for error, values in refused.items():
        for x in values:
            with pytest.raises(error, match=r"^a: "):
                multiply(by, x, b)


def test_modes_of_gemm_are_checked_where_nothing_is_rounded():
    half = np.ones((2, 2), np.float16)
    for rounding in ("up", "rn", None):
        with pytest.raises(ValueError, match="is not one of RN, RZ, RM, RP, SR"):
            tcemu.gemm(half, half, op="f16", target="H100", rounding=rounding)
    with pytest.raises(TypeError, match="saturate: got 'no'; expected True or False"):
        tcemu.gemm(half, half, op="f16", target="H100", saturate="no")


# ---- block scales


LACKING = [(1.5, "1 and 2"), (np.inf, "8.50706e[+]37 and 1.70141e[+]38"), (-1.0, "5.87747e-39"), (0.0, "5.87747e-39")]


@pytest.mark.parametrize("case", sample_cases(LACKING, LACKING[:2], lambda case: str(case[0])))
def test_block_scales_that_their_format_lacks_are_refused(case):
    """Rounded without a word, 1.5 would become 2 and -1 NaN."""
    bad, near = case
    a, ones = np.ones((16, 64)), np.ones((2, 8))
    scales = np.full((16, 2), 2.0)
    multiply = lambda s: tcemu.gemm(a, a[:8].T, op=MXF4_OP, target="sm_120a", scale_a=s, scale_b=ones)
    assert (np.asarray(multiply(scales)) == 128).all()
    scales[3, 1] = bad
    with pytest.raises(
        ValueError, match=rf"scale_a: got {bad:g} at \[3, 1\]; expected numbers of ue8m0.* of which {near} would be nearest"
    ):
        multiply(scales)
    assert jax.jit(multiply)(scales.astype(np.float32)).shape == (16, 8)  # traced scales are rounded


def test_scales_that_a_traced_function_holds_are_checked_while_it_is_traced():
    """The numbers of their format were once computed as part of that function."""
    a, ones = np.ones((16, 64), np.float32), np.ones((2, 8), np.float32)
    _scale_numbers.cache_clear()
    multiply = lambda a, s: tcemu.gemm(a, a[:8].T, op=MXF4_OP, target="sm_120a", scale_a=s, scale_b=ones)
    assert (jax.jit(lambda a: multiply(a, np.full((16, 2), 2, np.float32)))(a) == 128).all()
    with pytest.raises(ValueError, match=r"scale_a: got 1\.5 at \[0, 0\]"):
        jax.jit(lambda a: multiply(a, np.full((16, 2), 1.5, np.float32)))(a)


def test_nan_is_a_number_of_ue8m0():
    scales = np.full((16, 2), 2.0)
    scales[3, 1] = np.nan
    d = tcemu.gemm(np.ones((16, 64)), np.ones((64, 8)), op=MXF4_OP, target="sm_120a", scale_a=scales, scale_b=np.ones((2, 8)))
    assert np.isnan(d[3]).all() and not np.isnan(np.delete(d, 3, 0)).any()


@pytest.mark.parametrize("k", [64, 96])
def test_block_scaled_products_take_numpy_float64(k):
    """Its 64-bit codes are two words, which once counted as an axis."""
    rng = np.random.default_rng(k)
    a, b = rng.normal(size=(2, 16, k)), rng.normal(size=(k, 8))
    scales = np.ones((16, k // 32)), np.ones((k // 32, 8))
    double, single = (
        tcemu.gemm(x, y, op=MXF4_OP, target="sm_120a", scale_a=scales[0], scale_b=scales[1])
        for x, y in ((a, b), (a.astype(np.float32), b.astype(np.float32)))
    )
    assert double.shape == (2, 16, 8) and np.array_equal(double, single)


# ---- codes that a format does not have


@pytest.mark.parametrize("dtype", sample_cases([np.uint16, np.uint32], (np.uint16,)))
def test_codes_that_a_format_does_not_have_are_refused(dtype):
    a = np.ones((16, 64), np.float32)
    scales = np.full((16, 2), 127, dtype)
    multiply = lambda s: tcemu.gemm(a, a[:8].T, op=MXF4_OP, target="sm_120a", scale_a=s, scale_b=np.full((2, 8), 127, np.uint8))
    assert float(multiply(scales)[0, 0]) == 64
    scales[3, 1] = 300
    with pytest.raises(ValueError, match=r"scale_a: got the code 300 at \[3, 1\]; ue8m0 has 8 bits, codes 0 to 255"):
        multiply(scales)
    with pytest.raises(TypeError, match=r"scale_a: got traced uint(16|32)\[16,.2\].*astype\('uint8'\)"):
        jax.jit(multiply)(jnp.asarray(scales))
    codes = np.zeros((16, 64), dtype)
    codes[0, 5] = 16
    with pytest.raises(ValueError, match=r"a: got the code 16 at \[0, 5\]; e2m1 has 4 bits"):
        tcemu.pack(MXF4_OP, "a", codes)
    with pytest.raises(ValueError, match="e2m1 has 4 bits"):
        tcemu.pack(MXF4_OP, "a", codes.astype(np.uint8))
    scales = np.full((16, 2), 300, dtype)
    with pytest.raises(ValueError, match="300"):
        tcemu.pack(MXF4_OP, "scale_a", scales)
    one = np.ones((16, 8), np.uint8)
    with pytest.raises(ValueError, match="scale_a: got the code 300"):
        tcemu.dot(
            MXF4_OP, codes * 0, codes.T[:, :8] * 0, np.zeros((16, 8), np.uint32), target="sm_120a", scale_a=scales, scale_b=one[:2, :8]
        )


# ---- recipes and quantisers


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"promote": 1.5}, "promote=1.5: expected a number of instructions"),
        ({"promote": np.int64(-2)}, "promote=-2"),
        ({"promote": np.array([1, 0])}, "promote="),
        ({"promote": jnp.float32(2)}, "promote="),
        ({"promote": True}, "promote=True"),
        ({"promote": "4"}, "promote='4'"),
        ({"split_k": 0}, "split_k=0"),
        ({"split_k": True}, "split_k=True"),
        ({"split_k": 2.0}, "split_k=2.0"),
        ({"a": "tensor"}, "a='tensor': expected a tcemu.quantize.Quantizer"),
        ({"b": None}, "b=None: expected a tcemu.quantize.Quantizer"),
        ({"model": {}}, "model={}: expected a tcemu.Model"),
        ({"name": 3}, "name=3: expected a string"),
        ({"source": None}, "source=None"),
        ({"dtype": "e4m3"}, "dtype='e4m3'"),
        ({"dtype": E2M1}, "dtype=e2m1"),
        ({"reduction": 1}, "reduction=1"),
        ({"backward": None}, "backward=None"),
    ],
)
def test_a_recipe_that_cannot_be_is_named(changes, said):
    with pytest.raises((ValueError, TypeError), match=said):
        tcemu.get_recipe("bf16", **changes)


@pytest.mark.parametrize(
    "fields",
    [
        {"scaling": 1}, {"scale": None}, {"rounding": None}, {"rounding": 0}, {"saturate": 2}, {"saturate": "no"}, {"rule": 1},
        {"scaling": ["row"]}, {"scaling": np.zeros(2)}, {"scaling": "block", "block": (True, 128)},
        {"scaling": "block", "block": (1, 128.0)},
        {"scaling": "block", "block": (np.int64(0), 128)}, {"scaling": "block", "block": [1, 128]},
    ],
)  # fmt: skip
def test_a_quantizer_that_cannot_be_is_named(fields):
    with pytest.raises(ValueError, match=r"Quantizer[(:]"):
        tcemu.quantize.Quantizer(**fields)


def test_numpys_integers_are_numbers_and_names_are_free():
    recipe = tcemu.get_recipe("bf16", promote=np.int64(2), split_k=np.int32(3), name="mine")
    assert (recipe.promote, recipe.split_k, recipe.name) == (2, 3, "mine") and type(recipe.promote) is int
    assert recipe == tcemu.get_recipe("bf16", promote=2, split_k=3)
    assert tcemu.quantize.Quantizer("block", (np.int64(1), 128)).block == (1, 128)
    assert tcemu.quantize.Quantizer(saturate=np.True_).saturate is True


@pytest.mark.full
def test_a_traced_interval_out_of_range_gives_nan():
    x = jnp.ones((1, 64))
    run = jax.jit(jax.vmap(lambda n: tcemu.matmul(x, x.T, recipe=tcemu.get_recipe("bf16", promote=n))))
    np.testing.assert_array_equal(np.asarray(run(jnp.array([2, 0, -3, 1])))[:, 0, 0], [64, np.nan, np.nan, 64])


def test_an_array_of_intervals_is_refused():
    x = jnp.ones((1, 64))
    with pytest.raises(ValueError, match=r"promote is an array \[2\].*jax.vmap"):
        tcemu.matmul(x, x.T, recipe=tcemu.get_recipe("bf16", promote=np.array([1, 2])))
