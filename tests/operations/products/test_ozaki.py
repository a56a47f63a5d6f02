"""Ozaki's scheme against a loop over `tcemu.gemm` written out, exact rational products, and its bounds; complex products."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu.operations.products.ozaki import ozaki_recipe_from_dict
from tcemu.operations.products.ozaki_slices import FP8, INT8, SLICE_ROWS
from tcemu.operations.products.recipe_json import value_to_dict
from tcemu.products import OzakiSliceRecipe, complex_matmul, get_ozaki_recipe, get_wide_recipe, ozaki_matmul, ozaki_matmul_codes

WIDE = {"plain": 0, "some": 12, "many": 300}  # binades of the elements


def draw_matrix(shape, seed, binades=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-binades, binades + 1, shape).astype(np.float64))).astype(dtype)


def exact_product(a, b):
    rows = [
        [sum((Fraction(float(x)) * Fraction(float(y)) for x, y in zip(row, column, strict=True)), Fraction(0)) for column in b.T]
        for row in a
    ]
    return np.array(rows, dtype=object)


# ---- a reference: digits by Fractions, one call of gemm for each pair of slices, sums in NumPy's float64 or in Fractions


def digits_of(row, x):
    """Digits of each row of x by exact rational arithmetic, and the exponents."""
    top = [max((int(np.frexp(v)[1]) for v in r if v), default=None) for r in x]
    exponents = [None if e is None else e + (0 if row.digits == "truncated" else 1) for e in top]
    found = np.zeros((row.slices, *x.shape), np.int64)
    for i, r in enumerate(x):
        for j, value in enumerate(r):
            whole_before = 0
            for t in range(1, row.slices + 1):
                scaled = Fraction(float(value)) * Fraction(2) ** (row.bits * t - (exponents[i] or 0))
                if row.digits == "truncated":
                    whole = int(abs(scaled)) * (-1 if scaled < 0 else 1)
                elif row.digits == "nearest":
                    whole = round(scaled)  # ties to even
                else:
                    whole = scaled.__floor__()
                found[t - 1, i, j] = whole - (whole_before << row.bits)
                whole_before = whole
    return found, [0 if e is None else e for e in exponents]


def loop_over_gemm(recipe, a, b):
    digits_a, exponents_a = digits_of(recipe, a)
    digits_b, exponents_b = digits_of(recipe, b.T)
    total = np.zeros((len(a), b.shape[1]))
    exact = np.full(total.shape, Fraction(0), object)
    groups = {}
    for t, u in recipe.products:
        left, right = digits_a[t - 1], digits_b[u - 1].T
        if recipe.is_fp8:
            product = np.asarray(tcemu.gemm(left.astype(np.float32), right.astype(np.float32), op=FP8, target=recipe.target))
        else:
            kinds = ["u8" if recipe.digits == "unsigned" and n > 1 else "s8" for n in (t, u)]
            arrays = [x.astype(np.uint8 if kind == "u8" else np.int8) for x, kind in zip((left, right), kinds, strict=True)]
            product = np.asarray(tcemu.gemm(*arrays, op=INT8.format(a=kinds[0], b=kinds[1]), target=recipe.target))
        product = product.astype(np.int64)
        assert (product == left @ right).all() or recipe.target == "sm_90a"  # exact in the accumulator
        groups[t + u] = groups.get(t + u, 0) + product
        if recipe.sums == "f64":
            total = total + product * 2.0 ** (-recipe.bits * (t + u))
        exact = exact + np.vectorize(lambda n, w=t + u: Fraction(int(n)) / (1 << recipe.bits * w))(product)
    if recipe.sums == "groups":
        for weight, product in groups.items():
            total = total + product * 2.0 ** (-recipe.bits * weight)
    scale = np.add.outer(exponents_a, exponents_b)
    if recipe.sums == "exact":
        return np.vectorize(lambda x, e: float(x * Fraction(2) ** int(e)))(exact, scale)
    return np.ldexp(total, scale)


def equal_words(x, y):
    return (np.asarray(x).view(np.uint64) == np.asarray(y).view(np.uint64)).all()


CASES = [(name, binades) for name in sorted(SLICE_ROWS) for binades in WIDE]


@pytest.mark.parametrize("case", sample_cases(CASES, [("ozaki_int8", "some")], " ".join))
def test_a_product_is_a_loop_over_gemm(case):
    name, binades = case
    a, b = draw_matrix((3, 33), 1, WIDE[binades]), draw_matrix((33, 4), 2, WIDE[binades])
    a[0, 0], a[2, 5], b[1, 1] = 0, -0.0, 0
    recipe = get_ozaki_recipe(name)
    assert equal_words(ozaki_matmul(a, b, recipe), loop_over_gemm(recipe, a, b) + 0.0)


@pytest.mark.full
@pytest.mark.parametrize("slices", [1, 3, 9])
@pytest.mark.parametrize("name", sorted(SLICE_ROWS))
def test_other_numbers_of_slices(name, slices):
    a, b = draw_matrix((3, 20), 3, 40), draw_matrix((20, 3), 4, 40)
    recipe = get_ozaki_recipe(name, slices=slices)
    assert equal_words(ozaki_matmul(a, b, recipe), loop_over_gemm(recipe, a, b) + 0.0)


@pytest.mark.full
def test_the_error_free_form_is_the_rounded_product():
    """With slices for every bit of the operands, the sum is exact: 20 x 7 bits hold 60 binades and 53 bits."""
    a, b = draw_matrix((4, 40), 5, 40), draw_matrix((40, 4), 6, 40)
    recipe = get_ozaki_recipe("ozaki_int8_exact", slices=20)
    assert equal_words(ozaki_matmul(a, b, recipe), np.vectorize(float)(exact_product(a, b)))


@pytest.mark.full
def test_the_bound_of_the_truncated_form():
    """What a row's slices leave is below 2^(e - bits * slices): the error is within the bound that follows, for every recipe."""
    a, b = draw_matrix((4, 64), 7, 20), draw_matrix((64, 4), 8, 20)
    exact, k = exact_product(a, b), a.shape[1]
    for name in ("ozaki_int8", "ozaki_int8_nearest"):
        for slices in (4, 6, 8):
            recipe = get_ozaki_recipe(name, slices=slices)
            d = ozaki_matmul(a, b, recipe)
            rows, columns = (2.0 ** (np.frexp(np.abs(x).max(axis))[1] + 1) for x, axis in ((a, 1), (b, 0)))
            dropped = (slices + 3) * k * 2.0 ** (-recipe.bits * slices)  # left-over digits of A and of B, and the omitted products
            bound = np.outer(rows, columns) * dropped + np.abs(np.vectorize(float)(exact)) * 2.0**-48
            assert (np.abs(np.vectorize(float)(d - exact)) <= bound).all()


@pytest.mark.full
def test_wide_exponents_lose_what_f64_keeps():
    """A small element beside a large one falls below the slices of its row: normwise good, elementwise lost."""
    a, b = np.array([[1.0, 2.0**-60]]), np.array([[0.0], [1.0]])
    assert ozaki_matmul(a, b, "ozaki_int8") == 0 and (a @ b)[0, 0] == 2.0**-60
    assert ozaki_matmul(a, b, get_ozaki_recipe("ozaki_int8_exact", slices=10)) == 2.0**-60


def test_subnormal_numbers_zeros_nan_and_infinity():
    a = np.array([[2.0**-1074, 3 * 2.0**-1060], [0, -0.0], [1, np.nan], [np.inf, 1]])
    d = ozaki_matmul(a, np.array([[2.0**1000], [2.0**1000]]), "ozaki_int8")
    assert d[0, 0] == 2.0**-74 + 3 * 2.0**-60 and d[1, 0] == 0 and np.isnan(d[2:]).all()
    assert ozaki_matmul(np.array([[1e300]]), np.array([[1e300]]), "ozaki_int8") == np.inf
    assert ozaki_matmul(np.array([[2.0**-600]]), np.array([[2.0**-470]]), "ozaki_int8") == 2.0**-1070


@pytest.mark.full
def test_fp8_slices_need_wide_accumulators():
    """The 14 bits of Hopper's FP8 wgmma lose what the 25 of Blackwell keep, which is why GEMMul8 refuses FP8 on Hopper."""
    a, b = abs(draw_matrix((2, 2048), 9)), abs(draw_matrix((2048, 2), 10))
    error = lambda recipe: (abs(ozaki_matmul(a, b, recipe) - a @ b) / (a @ b)).max()
    hopper = get_ozaki_recipe("ozaki_fp8", "sm_90a", op="wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3")
    assert error(get_ozaki_recipe("ozaki_fp8")) < 2.0**-49 < 2.0**-20 < error(hopper)


@pytest.mark.full
def test_shapes_batches_jit_vmap_and_gradients():
    a, b = draw_matrix((2, 3, 20), 11, dtype=np.float32), draw_matrix((2, 20, 4), 12, dtype=np.float32)
    multiply = lambda x, y: tcemu.matmul(x, y, recipe="ozaki_int8 on H100")
    each = np.stack([np.asarray(multiply(x, y)) for x, y in zip(a, b, strict=True)])
    for d in (multiply(a, b), jax.jit(multiply)(a, b), jax.vmap(multiply)(a, b)):
        np.testing.assert_array_equal(d, each)
    assert multiply(a[..., :0], b[:, :0]).shape == (2, 3, 4) and not np.asarray(multiply(a[..., :0], b[:, :0])).any()
    assert multiply(a[:, :0], b).shape == (2, 0, 4)
    wide, plain = (jax.grad(lambda x, y, f=f: f(x, y).sum(), (0, 1))(jnp.asarray(a), jnp.asarray(b)) for f in (multiply, jnp.matmul))
    for x, y in zip(wide, plain, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    emulated = tcemu.emulate(lambda x, y: x @ y, "ozaki_int8 on H100")
    np.testing.assert_array_equal(emulated(a, b), each)
    assert "ozaki_int8 on H100" in str(emulated.report(a, b)) and "36 x mma.sync" in emulated.report(a, b).to_json()
    dot = tcemu.dot_general("ozaki_int8 on H100")
    np.testing.assert_array_equal(dot(a[0], b[0], (((1,), (0,)), ((), ()))), each[0])
    codes = lambda x: jnp.asarray(np.ascontiguousarray(x.astype(np.float64)).view(np.uint32).reshape(*x.shape, 2))
    d = np.asarray(jax.jit(lambda x, y: ozaki_matmul_codes(x, y, "ozaki_int8"))(codes(a), codes(b)))
    np.testing.assert_array_equal(np.ascontiguousarray(d).view(np.float64)[..., 0], ozaki_matmul(a.astype(np.float64), b, "ozaki_int8"))


def test_json_returns_the_recipe():
    for name in SLICE_ROWS:
        recipe = get_ozaki_recipe(name, slices=5)
        assert ozaki_recipe_from_dict(value_to_dict(recipe)) == recipe and recipe.source
    for change in ({"bits": 9}, {"digits": 1}, {"more": 1}, {"op": "mma.f16"}):
        with pytest.raises(ValueError):
            ozaki_recipe_from_dict(value_to_dict(get_ozaki_recipe("ozaki_int8")) | change)


def test_mistakes_say_what_would_work():
    with pytest.raises(ValueError, match="expected one of ozaki_int8"):
        get_ozaki_recipe("ozaki_int4")
    with pytest.raises(ValueError, match="give one"):
        get_ozaki_recipe("ozaki_int8 on H100", "A100")
    with pytest.raises(ValueError, match="fewer bits"):
        get_ozaki_recipe("ozaki_int8", bits=8)
    with pytest.raises(ValueError, match="fewer bits"):
        get_ozaki_recipe("ozaki_fp8", bits=6)
    with pytest.raises(ValueError, match="exact up to K = 33025"):
        ozaki_matmul(np.ones((1, 33026)), np.ones((33026, 1)), "cublas_fixed_point")
    with pytest.raises(ValueError, match="s8 operands"):
        OzakiSliceRecipe("f16", "A100", "truncated", 7, 8, "f64")
    with pytest.raises(ValueError, match="leave them out"):
        tcemu.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), np.ones(2, np.float32), recipe="ozaki_int8")
    with pytest.raises(ValueError, match="ozaki_matmul"):
        tcemu.matmul(np.ones((2, 2)), np.ones((2, 2)), recipe="ozaki_int8", dtype=np.float64)
    with pytest.raises(tcemu.Unsupported):
        get_ozaki_recipe("ozaki_fp8", "A100")


# ---- complex products


def draw_complex(shape, seed):
    return draw_matrix(shape, seed, 4, np.float32) + np.complex64(1j) * draw_matrix(shape, seed + 1, 4, np.float32)


@pytest.mark.parametrize("recipe", sample_cases(["bf16x3 on A100", "ozaki_int8"], []))
def test_complex_products_are_real_ones(recipe):
    a, b = draw_complex((3, 24), 20), draw_complex((24, 2), 22)
    multiply = lambda x, y: np.asarray(tcemu.matmul(x, y, recipe=recipe))
    p, q, r, s = a.real, a.imag, b.real, b.imag
    four = complex_matmul(a, b, recipe=recipe)
    np.testing.assert_array_equal(np.real(four), multiply(p, r) - multiply(q, s))
    np.testing.assert_array_equal(np.imag(four), multiply(p, s) + multiply(q, r))
    first, second, third = multiply(p, r), multiply(q, s), multiply(p + q, r + s)
    three = complex_matmul(a, b, recipe=recipe, method="3m")
    np.testing.assert_array_equal(np.real(three), first - second)
    np.testing.assert_array_equal(np.imag(three), third - first - second)


@pytest.mark.full
def test_three_products_lose_small_imaginary_parts():
    """3M is as good normwise; an imaginary part far below the real one is lost in the sums, as Higham's bound says."""
    a, b = np.array([[1 + 2.0**-30 * 1j]], np.complex64), np.array([[1]], np.complex64)
    four, three = (complex(complex_matmul(a, b, recipe=get_wide_recipe("tf32x3", "A100"), method=m)[0, 0]) for m in ("4m", "3m"))
    assert four.imag == 2.0**-30 and three.imag == 0 and four.real == three.real == 1


@pytest.mark.full
def test_complex_products_under_jit_and_their_gradients():
    a, b = jnp.asarray(draw_complex((2, 2, 8), 30)), jnp.asarray(draw_complex((2, 8, 3), 32))
    multiply = lambda x, y: complex_matmul(x, y, recipe="tf32x3 on A100", method="3m")
    np.testing.assert_array_equal(multiply(a, b), jax.jit(jax.vmap(multiply))(a, b))
    loss = lambda f: jax.grad(lambda x: jnp.abs(f(x, b)).sum())(a)
    np.testing.assert_allclose(loss(multiply), loss(lambda x, y: jnp.matmul(x, y, precision="highest")), rtol=1e-4, atol=1e-4)
    real = np.asarray(complex_matmul(a.real, b, recipe="tf32x3 on A100"))
    assert real.dtype == np.complex64
    with pytest.raises(ValueError, match="4m, 3m"):
        complex_matmul(a, b, recipe="tf32x3", method="2m")
    with pytest.raises(TypeError, match="complex64"):
        complex_matmul(np.ones((2, 2), np.complex128), b[0], recipe="tf32x3")
