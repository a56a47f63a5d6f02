"""Ozaki's second scheme against a loop over `tcemu.gemm`, exact rational products on adversarial operands, and its error bound."""

from fractions import Fraction
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import ozaki_moduli_reference as reference
from support.sampling import sample_cases

import tcemu
from tcemu.operations.products.ozaki import ozaki_recipe_from_dict
from tcemu.operations.products.ozaki_moduli import FP8_MODULI, INT8_MODULI, MODULAR_ROWS
from tcemu.operations.products.ozaki_slices import FP8, INT8
from tcemu.operations.products.recipe_json import value_to_dict
from tcemu.products import OzakiModularRecipe, get_ozaki_recipe, ozaki_matmul, ozaki_matmul_codes

U = Fraction(1, 1 << 53)


def draw_matrix(shape, seed, binades=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape) * np.exp2(rng.integers(-binades, binades + 1, shape).astype(np.float64))


def exact_product(a, b):
    fractions = lambda x: [[Fraction(float(v)) for v in row] for row in x]
    return [[sum((x * y for x, y in zip(row, column, strict=True)), Fraction(0)) for column in fractions(b.T)] for row in fractions(a)]


def multiply_by_gemm(recipe):
    """One call of gemm for each product; every sum is checked to be exact."""

    def multiply(x, y):
        dtype, op = (np.float32, FP8) if recipe.is_fp8 else (np.int8, INT8.format(a="s8", b="s8"))
        x, y = x.astype(dtype), y.astype(dtype)  # 128, a residue modulo 256, becomes -128
        found = np.asarray(tcemu.gemm(x, y, op=op, target=recipe.target)).astype(np.int64)
        assert (found == x.astype(np.int64) @ y.astype(np.int64)).all()
        return found

    return multiply


def expected_product(recipe, a, b):
    """The reference with its products by gemm, rounded as f64 is, once more where it is subnormal."""
    found = reference.modular_product(a, b, recipe.moduli, recipe.scaling, recipe.is_fp8, multiply_by_gemm(recipe))
    return np.vectorize(float)(found)


def equal_words(x, y):
    return (np.asarray(x).view(np.uint64) == np.asarray(y).view(np.uint64)).all()


CASES = [(name, binades) for name in sorted(MODULAR_ROWS) for binades in (0, 12, 300)]


@pytest.mark.parametrize("case", sample_cases(CASES, [("ozaki2_int8", 12)], lambda case: f"{case[0]} {case[1]}"))
def test_a_product_is_a_loop_over_gemm(case):
    name, binades = case
    a, b = draw_matrix((3, 33), 1, binades), draw_matrix((33, 4), 2, binades)
    a[0, 0], a[2, 5], b[1, 1] = 0, -0.0, 0
    recipe = get_ozaki_recipe(name)
    assert equal_words(ozaki_matmul(a, b, recipe), expected_product(recipe, a, b) + 0.0)


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2, 9, 20])
@pytest.mark.parametrize("name", sorted(MODULAR_ROWS))
def test_other_numbers_of_moduli(name, count):
    a, b = draw_matrix((3, 20), 3, 40), draw_matrix((20, 3), 4, 40)
    recipe = get_ozaki_recipe(name, moduli=count)
    assert recipe.moduli == (FP8_MODULI if recipe.is_fp8 else INT8_MODULI)[:count]
    assert equal_words(ozaki_matmul(a, b, recipe), expected_product(recipe, a, b) + 0.0)


def adversarial_operands():
    """Cancellation, one large element, exact powers of two at the edge of the scaling, subnormal numbers, rows of zeros, many binades."""
    ones = np.ones((2, 16))
    cancelling = draw_matrix((3, 32), 5)
    cancelling[:, 16:] = -cancelling[:, :16] * (1 + 2.0**-50)
    columns = draw_matrix((16, 2), 6)
    spike = draw_matrix((3, 24), 7)
    spike[:, 3] *= 2.0**60
    zeros = draw_matrix((3, 8), 8)
    zeros[1] = 0
    return {
        "ones": (ones, ones.T),
        "cancellation": (cancelling, np.concatenate([columns, columns])),
        "a spike": (spike, draw_matrix((24, 2), 9)),
        "powers of two": (np.exp2(np.arange(-8.0, 8).reshape(2, 8)), np.exp2(np.arange(16.0).reshape(8, 2))),
        "subnormal": (draw_matrix((2, 9), 10) * 2.0**-1030 * 2.0**-30, draw_matrix((9, 2), 11) * 2.0**900),
        "zeros": (zeros, draw_matrix((8, 2), 12)),
        "binades": (draw_matrix((2, 40), 13, 200), draw_matrix((40, 2), 14, 200)),
        "largest": (np.full((2, 5), np.finfo(np.float64).max), np.full((5, 2), 2.0**-1000)),
    }


def error_bound(recipe, a, b):
    """A bound for each element: both operands are truncated below one unit of their powers of two, the sum is rounded once.

    With limit = (P - 1) / 2 the scaling keeps 2^-e below 2 * |row| / sqrt(limit), |.| the norm rounded up; by the estimate of the product
    it is that of its own bound. This is the shape of the bound of arXiv 2602.02549.
    """
    limit = (prod(recipe.moduli) - 1) // 2
    if recipe.scaling == "norm":
        e_a, e_b = reference.norm_exponents(a, limit), reference.norm_exponents(b.T, limit)
        for row, e in (*zip(a, e_a, strict=True), *zip(b.T, e_b, strict=True)):
            norm = sum(Fraction(float(x)) ** 2 for x in row) * (1 + Fraction(1, 1 << 20))
            assert not any(row) or limit < Fraction(4) ** (e + 1) * norm <= 4 * limit * (1 + Fraction(1, 1 << 19))
    else:
        e_a, e_b = reference.product_exponents(a, b, limit, lambda x, y: x @ y)
    size = lambda x: sum((abs(Fraction(float(v))) for v in x), Fraction(0))
    exact, k = exact_product(a, b), a.shape[1]
    bounds = np.empty((len(a), b.shape[1]), object)
    for i, j in np.ndindex(*bounds.shape):
        unit_a, unit_b = Fraction(2) ** -e_a[i], Fraction(2) ** -e_b[j]
        dropped = unit_a * size(b[:, j]) + unit_b * size(a[i]) + k * unit_a * unit_b
        bounds[i, j] = dropped + (abs(exact[i][j]) + dropped) * U + Fraction(2) ** -1074
    return np.array(exact, object), bounds


ADVERSARIAL = [(name, kind) for name in sorted(MODULAR_ROWS) for kind in adversarial_operands()]


@pytest.mark.parametrize("case", sample_cases(ADVERSARIAL, [("ozaki2_int8", "cancellation")], " ".join))
def test_adversarial_operands_keep_the_bound_and_the_words_of_the_reference(case):
    name, kind = case
    a, b = adversarial_operands()[kind]
    recipe = get_ozaki_recipe(name)
    d = ozaki_matmul(a, b, recipe)
    exact, bounds = error_bound(recipe, a, b)
    assert (abs(np.vectorize(Fraction)(d) - exact) <= bounds).all()
    assert equal_words(d, expected_product(recipe, a, b) + 0.0)


@pytest.mark.full
def test_enough_moduli_give_the_rounded_product():
    """Integers of few bits keep all of them: the product is exact, and rounded once."""
    rng = np.random.default_rng(15)
    a, b = (rng.integers(-(2**20), 2**20, shape).astype(np.float64) * 2.0**-7 for shape in ((4, 300), (300, 4)))
    for name in ("ozaki2_int8", "ozaki2_int8_accurate", "ozaki2_fp8"):
        assert equal_words(ozaki_matmul(a, b, name), np.vectorize(float)(np.array(exact_product(a, b), object)))


@pytest.mark.full
def test_long_sums_leave_no_accumulator():
    """K above 2^16 is cut where int8 sums would leave s32; all elements are -128 modulo 256."""
    a, b = np.full((1, 140_000), -128.0), np.full((140_000, 1), 128.0)
    assert ozaki_matmul(a, b, "ozaki2_int8") == -(128.0**2) * 140_000
    assert ozaki_matmul(a, b, "ozaki2_int8_accurate") == -(128.0**2) * 140_000


def test_nan_infinity_and_results_out_of_range():
    a = np.array([[1, np.nan], [np.inf, 1], [0.0, -0.0], [2.0, 1]])
    d = ozaki_matmul(a, np.array([[1.0], [1.0]]), "ozaki2_int8")
    assert np.isnan(d[:2]).all() and d[2] == 0 and d[3] == 3
    d = ozaki_matmul(np.array([[1e300], [2.0**-600]]), np.array([[1e300, 2.0**-470]]), "ozaki2_int8")
    assert d[0, 0] == np.inf and d[1, 1] == 2.0**-1070 and d[1, 0] == 2.0**-600 * 1e300


@pytest.mark.full
def test_fp8_parts_need_wide_accumulators():
    """The 14 bits of Hopper's FP8 wgmma lose residues, and with them everything; GEMMul8 refuses FP8 on Hopper.

    Parts of random residues have both signs, and sums of 2048 mostly fit in 14 bits. Equal elements have equal residues.
    """
    a, b = np.full((1, 2048), 1.2345678901234567), np.full((2048, 1), 1.3456789012345678)
    error = lambda recipe: (abs(ozaki_matmul(a, b, recipe) - a @ b) / (a @ b)).max()
    hopper = get_ozaki_recipe("ozaki2_fp8", "sm_90a", op="wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3")
    assert error(get_ozaki_recipe("ozaki2_fp8")) < 2.0**-48 and error(hopper) > 2.0**-3


@pytest.mark.full
@pytest.mark.parametrize("name", ["ozaki2_int8_fp32 on H100", "ozaki2_int8_accurate on H100"])
def test_shapes_batches_jit_vmap_and_gradients(name):
    a, b = (draw_matrix(shape, seed).astype(np.float32) for shape, seed in (((2, 3, 20), 18), ((2, 20, 4), 19)))
    multiply = lambda x, y: tcemu.matmul(x, y, recipe=name)
    each = np.stack([np.asarray(multiply(x, y)) for x, y in zip(a, b, strict=True)])
    for d in (multiply(a, b), jax.jit(multiply)(a, b), jax.vmap(multiply)(a, b)):
        np.testing.assert_array_equal(d, each)
    one = np.stack([np.asarray(multiply(a[0], y)) for y in b])
    np.testing.assert_array_equal(multiply(a[0], b), one)
    assert multiply(a[..., :0], b[:, :0]).shape == (2, 3, 4) and not np.asarray(multiply(a[..., :0], b[:, :0])).any()
    assert multiply(a[:, :0], b).shape == (2, 0, 4)
    wide, plain = (jax.grad(lambda x, y, f=f: f(x, y).sum(), (0, 1))(jnp.asarray(a), jnp.asarray(b)) for f in (multiply, jnp.matmul))
    for x, y in zip(wide, plain, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    emulated = tcemu.emulate(lambda x, y: x @ y, name)
    np.testing.assert_array_equal(emulated(a, b), each)
    recipe = get_ozaki_recipe(name)
    assert f"{recipe.product_count} x mma.sync" in emulated.report(a, b).to_json()
    (errors,) = tcemu.compare(lambda x, y: x @ y, [name], (a, b), results=False)
    assert errors.policy == recipe.name and errors.relative_error < 1e-7
    codes = lambda x: jnp.asarray(np.ascontiguousarray(x.astype(np.float64)).view(np.uint32).reshape(*x.shape, 2))
    d = np.asarray(jax.jit(lambda x, y: ozaki_matmul_codes(x, y, name))(codes(a), codes(b)))
    np.testing.assert_array_equal(np.ascontiguousarray(d).view(np.float64)[..., 0], ozaki_matmul(a.astype(np.float64), b, name))


def test_json_returns_the_recipe():
    for name in MODULAR_ROWS:
        recipe = get_ozaki_recipe(name, moduli=5)
        assert ozaki_recipe_from_dict(value_to_dict(recipe)) == recipe and recipe.source
    for name in ("ozaki2_fp8", "ozaki_fp8"):  # with a model of their own
        recipe = get_ozaki_recipe(name)
        recipe = recipe.replace(model=recipe.arithmetic.replace(fraction_bits=20))
        assert ozaki_recipe_from_dict(value_to_dict(recipe)) == recipe and recipe.arithmetic.fraction_bits == 20
        ((_, saved),) = tcemu.policies.from_json(tcemu.policies.to_json(tcemu.dot_general(recipe)))
        assert saved.recipe == recipe
    for change in ({"moduli": [4, 6]}, {"moduli": 3}, {"moduli": ["3"]}, {"scaling": 1}, {"more": 1}, {"model": 1}):
        with pytest.raises(ValueError):
            ozaki_recipe_from_dict(value_to_dict(get_ozaki_recipe("ozaki2_int8")) | change)


def test_mistakes_say_what_would_work():
    with pytest.raises(ValueError, match="common factor"):
        get_ozaki_recipe("ozaki2_int8", moduli=(256, 254))
    with pytest.raises(ValueError, match="numbers up to 256"):
        get_ozaki_recipe("ozaki2_int8", moduli=(257,))
    with pytest.raises(ValueError, match="squares up to 1089, and numbers up to 511"):
        get_ozaki_recipe("ozaki2_fp8", moduli=(1088,))
    with pytest.raises(ValueError, match="1 to 20 integers"):
        get_ozaki_recipe("ozaki2_int8", moduli=21)
    with pytest.raises(ValueError, match="use 'norm'"):
        get_ozaki_recipe("ozaki2_fp8", scaling="product")
    with pytest.raises(ValueError, match="norm, product"):
        get_ozaki_recipe("ozaki2_int8", scaling="fast")
    with pytest.raises(ValueError, match="s8 operands"):
        OzakiModularRecipe("f16", "A100", (3,), "norm")
    with pytest.raises(tcemu.Unsupported):
        get_ozaki_recipe("ozaki2_fp8", "A100")
