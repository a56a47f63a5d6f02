"""`ragged_dot`: every group has the bits of `matmul` of its members alone, gradients too, whatever axes and sizes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.ragged_cases import case
from support.sampling import sample_cases

import tcemu
from tcemu import Recipe
from tcemu.operations.products.recipes import RECIPES
from tcemu.quantize import SIGNS_16, Quantizer

BF16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
E4M3 = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
CAST = Recipe(BF16, "sm_90a", name="cast")
M, K, N, SIZES = 45, 160, 24, (21, 0, 21)  # three rows are in no group
RNG = np.random.default_rng(0)
LHS = (RNG.normal(size=(M, K)) * np.exp(2 * RNG.normal(size=(M, 1)))).astype(np.float32)
RHS = (RNG.normal(size=(len(SIZES), K, N)) * np.array([1, 8, 100])[:, None, None]).astype(np.float32)
G = RNG.normal(size=(M, N)).astype(np.float32)


def same(got, want):
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), np.asarray(want).view(np.uint32))


def spans(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def loop_product(recipe, lhs, rhs, sizes):
    """[M, K] · [groups, K, N] by a loop over the groups."""
    out, alone = np.zeros((lhs.shape[0], rhs.shape[-1]), np.float32), jax.jit(lambda a, b: tcemu.matmul(a, b, recipe=recipe))
    for rows, b in zip(spans(sizes), rhs, strict=True):
        out[rows] = alone(lhs[rows], b)
    return out


def with_gradients(run):
    """(lhs, rhs, gradient of the product, ...) -> the product and the gradients of both, in one program: eagerly it would be a hundred."""

    def both(lhs, rhs, g, *rest):
        out, pull = jax.vjp(lambda a, b: run(a, b, *rest), lhs, rhs)
        return out, *pull(g)

    return jax.jit(both)


def looped_with_gradients(recipe, lhs, rhs, sizes, g):
    out, da, db = np.zeros_like(g), np.zeros_like(lhs), np.zeros_like(rhs)
    alone = with_gradients(lambda a, b: tcemu.matmul(a, b, recipe=recipe))
    for group, rows in enumerate(spans(sizes)):
        out[rows], da[rows], db[group] = alone(lhs[rows], rhs[group], g[rows])
    return out, da, db


@pytest.mark.parametrize("name", sample_cases([name for name in RECIPES if not tcemu.get_recipe(name).is_stochastic], ()))
def test_every_group_has_the_bits_of_its_own_product(name):
    recipe = tcemu.get_recipe(name)
    found = with_gradients(tcemu.ragged_dot(recipe))(LHS, RHS, G, jnp.asarray(SIZES))
    jax.tree.map(same, found, looped_with_gradients(recipe, LHS, RHS, SIZES, G))


NVFP4 = tcemu.get_recipe("nvfp4", "sm_120a", backward="exact")
TURNED, SQUARES = (Quantizer("block", saturate=True, **how) for how in ({"hadamard": SIGNS_16}, {"rows": 16}))
BLOCKS = {"scaling": "block", "block": (8, 64), "saturate": True}
OTHERS = {
    "parts of K": CAST.replace(split_k=3, promote=2, reduction="tree"),
    "chained parts of K": CAST.replace(split_k=2),
    "blocks of rows": Recipe(E4M3, "sm_89", Quantizer(**BLOCKS), Quantizer(**BLOCKS), promote=1, split_k=2),
    "blocks and a tensor": Recipe(E4M3, "sm_89", Quantizer(**BLOCKS), Quantizer("tensor", scale="power_of_two"), promote=2),
    "rows": Recipe(E4M3, "sm_89", Quantizer("row", saturate=True), Quantizer("column", saturate=True)),
    "transformed": NVFP4.replace(a=TURNED, b=TURNED, backward=NVFP4.replace(a=TURNED, b=TURNED)),
    "squares": NVFP4.replace(a=SQUARES, b=SQUARES, backward=NVFP4.replace(a=SQUARES, b=SQUARES)),
    "f16 sums": Recipe("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", "sm_80", promote=3),
}


@pytest.mark.parametrize("name", sample_cases(OTHERS, ("f16 sums",)))
def test_blocks_and_parts_of_k_begin_anew_with_each_group(name):
    """The parts of K are those of the group's own K, and each block's first row, or element, is the group's."""
    recipe, sizes = OTHERS[name], jnp.asarray(SIZES)
    same(jax.jit(tcemu.ragged_dot(recipe))(LHS, RHS, sizes), loop_product(recipe, LHS, RHS, SIZES))


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_blocks_and_parts_of_k_begin_anew_with_each_group_of_k(name):
    recipe, rhs, depths = OTHERS[name], RHS[0], (70, 0, 70)
    recipe = recipe.replace(backward=recipe)
    gs = RNG.normal(size=(len(depths), M, N)).astype(np.float32)
    found = with_gradients(partial(along_k, recipe))(LHS, rhs, gs, jnp.asarray(depths))
    out, da, db = np.zeros_like(gs), np.zeros_like(LHS), np.zeros_like(rhs)
    alone = with_gradients(lambda a, b: tcemu.matmul(a, b, recipe=recipe))
    for group, k in enumerate(spans(depths)):
        out[group], da[:, k], db[k] = alone(LHS[:, k], rhs[k], gs[group])
    jax.tree.map(same, found, (out, da, db))


ALONG_K = lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), (1,), ())
IN_BATCH = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())


def along_k(recipe, a, b, sizes):
    return tcemu.ragged_dot(recipe)(a, b, sizes, ragged_dot_dimension_numbers=ALONG_K)


@pytest.mark.full
def test_traced_fields_and_a_traced_promotion():
    sizes = jnp.asarray(SIZES)
    for run, operands in ((tcemu.ragged_dot, (LHS, RHS)), (lambda recipe: lambda *x: along_k(recipe, *x), (LHS, RHS[0]))):
        swept = jax.vmap(lambda n, run=run, operands=operands: run(CAST.replace(promote=n))(*operands, sizes))(jnp.array([1, 3, 99]))
        for n, got in zip((1, 3, 99), swept, strict=True):
            same(got, run(CAST.replace(promote=n))(*operands, sizes))


@pytest.mark.parametrize("backward", sample_cases(["exact", "straight_through"], []))
def test_plain_gradients_are_near_those_of_the_loop(backward):
    """Their sums are XLA's, so no bits are promised; forward mode goes through them too."""
    recipe, sizes = tcemu.get_recipe("fp8_e4m3", backward=backward), jnp.asarray(SIZES)
    run = tcemu.ragged_dot(recipe)
    _, *found = with_gradients(run)(LHS, RHS, G, sizes)
    for x, y in zip(found, looped_with_gradients(recipe, LHS, RHS, SIZES, G)[1:], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())
    _, tangent = jax.jit(lambda sizes, *operands: jax.jvp(lambda *x: run(*x, sizes), operands, operands))(sizes, LHS, RHS)
    np.testing.assert_allclose((tangent * G).sum(), sum((x * y).sum() for x, y in zip(found, (LHS, RHS), strict=True)), rtol=1e-3)


def checks(count):
    recipe = CAST.replace(backward=CAST)
    rng = np.random.default_rng(count)
    for _ in range(count):
        lhs, rhs, sizes, options = case(rng)
        exactly = jax.jit(partial(lax.ragged_dot_general, **options))
        want = np.asarray(exactly(lhs, rhs, sizes))
        g = rng.integers(-3, 4, want.shape).astype(np.float32)
        run = with_gradients(partial(tcemu.ragged_dot(recipe), **options))
        got, da, db = map(np.asarray, run(lhs, rhs, g, sizes))
        np.testing.assert_array_equal(got, want, err_msg=str(options))
        # the products are linear: <g, J x> is <Jt g, x>, exact on integers
        for x, y, back in ((rng.integers(-3, 4, lhs.shape), None, da), (None, rng.integers(-3, 4, rhs.shape), db)):
            moved = np.asarray(exactly(*(np.asarray(v if u is None else u, np.float32) for u, v in ((x, lhs), (y, rhs))), sizes))
            assert float((g * moved).sum()) == float((back * (x if y is None else y)).sum()), options


def test_a_sample_of_axes():
    checks(1)


@pytest.mark.full
def test_many_axes():
    checks(150)


FP8 = tcemu.get_recipe("fp8")
by_fp8 = jax.jit(tcemu.ragged_dot(FP8))


def test_what_groups_do_not_have_reaches_nothing():
    """NaN and Inf in a group, and in rows of none, stay there; sizes may be 0, all, or more than there are rows."""
    run = by_fp8
    lhs, rhs = LHS.copy(), RHS.copy()
    lhs[25], lhs[43], rhs[1] = np.nan, np.inf, np.nan
    got = run(lhs, rhs, jnp.asarray(SIZES))
    plain = run(LHS, RHS, jnp.asarray(SIZES))
    same(got[:21], plain[:21])
    same(got[42:], np.zeros((3, N), np.float32))
    assert np.isnan(got[21:42]).all()
    same(run(LHS, RHS, jnp.asarray([0, 0, 0])), np.zeros((M, N), np.float32))
    same(run(LHS, RHS, jnp.asarray([0, M, 0])), tcemu.matmul(LHS, RHS[1], recipe=FP8))
    same(run(LHS, RHS, jnp.asarray([0, 21, 1000])), run(LHS, RHS, jnp.asarray([0, 21, M - 21])))


@pytest.mark.full
def test_empty_axes_and_the_dtype_of_sizes():
    same(by_fp8(LHS, RHS, jnp.asarray(SIZES, jnp.uint8)), by_fp8(LHS, RHS, jnp.asarray(SIZES)))
    for lhs, rhs in ((LHS[:0], RHS), (LHS[:, :0], RHS[:, :0]), (LHS, RHS[..., :0])):
        same(by_fp8(lhs, rhs, jnp.asarray(SIZES)), np.zeros((lhs.shape[0], rhs.shape[-1]), np.float32))


@pytest.mark.full
def test_a_scale_is_a_groups_in_all_places_of_the_batch():
    lhs, rhs = np.stack([LHS, 64 * LHS]), np.stack([RHS, RHS], axis=1)
    numbers = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (1,))), (1,), (0,))
    got = jax.jit(lambda *x: tcemu.ragged_dot(FP8)(*x, ragged_dot_dimension_numbers=numbers))(lhs, rhs, jnp.asarray(SIZES))
    matmul = jax.jit(lambda a, b: tcemu.matmul(a, b, recipe=FP8))
    for group, rows in enumerate(spans(SIZES)):
        same(got[:, rows], matmul(lhs[:, rows], rhs[group]))
    alone = jax.jit(jax.vmap(tcemu.ragged_dot(FP8), (0, None, None)))(lhs, RHS, jnp.asarray(SIZES))  # each a product of its own
    same(alone[0], by_fp8(LHS, RHS, jnp.asarray(SIZES)))
    assert (np.asarray(alone[0]) != np.asarray(got[0])).any()


@pytest.mark.full
def test_groups_of_places_in_the_batch():
    recipe = tcemu.get_recipe("fp8", backward="exact")
    lhs, rhs = np.stack([LHS, 4 * LHS, 8 * LHS]), np.stack([RHS[0], RHS[2], RHS[1]])
    run = jax.jit(lambda *x: tcemu.ragged_dot(recipe)(*x, ragged_dot_dimension_numbers=IN_BATCH))
    got, matmul = run(lhs, rhs, jnp.asarray([2, 0])), jax.jit(lambda a, b: tcemu.matmul(a, b, recipe=recipe))
    for places in (slice(0, 2), slice(2, 3)):  # the last is in no group, and JAX multiplies it all the same
        same(got[places], matmul(lhs[places], rhs[places]))


def test_stochastic_rounding_and_dtypes():
    recipe = Recipe(BF16, "sm_90", Quantizer(rounding="SR", saturate=True))
    ones, rhs, sizes = np.full((8, 4096), 1 + 2.0**-9, np.float32), np.ones((2, 4096, 1), np.float32), jnp.asarray([3, 5])
    run = jax.jit(lambda key, *operands: tcemu.ragged_dot(recipe, key=key)(*operands))
    first, again, other = (run(jax.random.key(seed), ones, rhs, sizes) for seed in (0, 0, 1))
    same(first, again)
    assert (np.asarray(first) != np.asarray(other)).any() and len(np.unique(first)) > 4
    assert np.abs(np.asarray(first) / 4096 - 1 - 2.0**-9).max() < 5 * 2.0**-7 * np.sqrt(0.25 * 0.75 / 4096)
    with pytest.raises(ValueError, match="give key="):
        tcemu.ragged_dot(recipe)
    half = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (LHS, RHS)]
    assert jax.eval_shape(tcemu.ragged_dot(CAST), *half, jnp.asarray(SIZES)).dtype == jnp.bfloat16
    wide = jax.eval_shape(partial(tcemu.ragged_dot(CAST), preferred_element_type=jnp.float16), LHS, RHS, jnp.asarray(SIZES))
    assert wide.dtype == jnp.float16


def test_what_is_refused():
    run, sizes = tcemu.ragged_dot(CAST), jnp.asarray(SIZES)
    assert hash(run) == hash(tcemu.ragged_dot(CAST)) and run == tcemu.ragged_dot(CAST)
    with pytest.raises(TypeError, match=r"expected a tcemu\.Recipe"):
        tcemu.ragged_dot(3)
    with pytest.raises(TypeError, match="lhs: got int32"):
        run(LHS.astype(np.int32), RHS, sizes)
    with pytest.raises(TypeError, match="preferred_element_type: got int32"):
        run(LHS, RHS, sizes, preferred_element_type=jnp.int32)
    with pytest.raises(TypeError, match=r"group_sizes\.dtype"):
        run(LHS, RHS, sizes.astype(jnp.float32))
    with pytest.raises(TypeError, match="expected rhs group dimension size to be 3, got 2"):
        run(LHS, RHS[:2], sizes)
    with pytest.raises(NotImplementedError, match="group_offset"):
        run(LHS, RHS, sizes, group_offset=jnp.asarray([1]))
