"""Products of a pruned A: `gemm(sparse="a")` and sparse recipes against single instructions, tile by tile; gradients; roles."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu.engine.layouts.sparsity import PATTERN_NAMES
from tcemu.formats import array_codes, convert
from tcemu.operations.products import sparse_rows
from tcemu.testing import assert_product_close

RNG = np.random.default_rng(62)
M, N, K = 20, 9, 70  # no size is a multiple of an instruction's
CASES = [
    ("f16 sparse", "A100"), ("f16 sparse", "H100"), ("bf16 wgmma sparse", "H100"), ("tf32 sparse", "A100"), ("e4m3 sparse", "RTX 4090"),
    ("f16 sparse f16acc", "A100"), ("bf16 tcgen05 sparse", "B200"), ("s8 sparse", "A100"), ("u4 sparse", "A100"),
]  # fmt: skip


def draw(op):
    if op.a.is_integer:
        low, high = (0, 16) if op.a.bits == 4 else (-128, 128)
        return tuple(RNG.integers(low, high, shape).astype(np.int32) for shape in ((M, K), (K, N), (M, N)))
    a, b, c = (RNG.normal(size=shape).astype(np.float32) for shape in ((M, K), (K, N), (M, N)))
    a[4, :4], a[5, :4] = (1, 0, 0, 0), 0  # zeros are kept too, and 0 x Inf is NaN
    b[3, 2], b[1, 4] = np.inf, np.inf
    return a, b, c


def pad(x, rows, columns):
    return np.pad(x, [(0, -x.shape[0] % rows), (0, -x.shape[1] % columns)])


def by_instructions(op, target, a, b, c):
    """D by `tcemu.dot` on tiles of the instruction's size, whose A `tcemu.sparsify` prunes: codes."""
    codes = lambda x, fmt: np.asarray(convert(array_codes(x)[0], fmt, array_codes(x)[1], "RN", fmt.is_integer))
    a, b, c = pad(a, op.m, op.k), pad(b, op.k, op.n), pad(codes(c, op.d), op.m, op.n)
    for i in range(0, a.shape[0], op.m):
        for j in range(0, b.shape[1], op.n):
            d = c[i : i + op.m, j : j + op.n]
            for k in range(0, a.shape[1], op.k):
                kept = tcemu.sparsify(a[i : i + op.m, k : k + op.k], PATTERN_NAMES[op.chunk_size])
                tiles = codes(kept.values, op.a), codes(b[k : k + op.k, j : j + op.n], op.b)
                d = tcemu.dot(op, *tiles, d, target=target, e=kept.metadata)
            c[i : i + op.m, j : j + op.n] = d
    return c[:M, :N]


@pytest.mark.parametrize("case", sample_cases(CASES, CASES[3:4], ids=lambda case: f"{case[0]}-{case[1]}"))
def test_a_pruned_product_is_that_of_its_instructions(case):
    name, target = case
    op = tcemu.check(name, target)
    a, b, c = draw(op)
    d = np.asarray(tcemu.gemm(a, b, c, op=name, target=target, sparse="a"))
    expected = by_instructions(op, target, a, b, c)
    assert (d.view(expected.dtype) != expected).sum() == 0 and len(np.unique(d)) > 100


def test_rows_in_blocks_give_the_same(monkeypatch):
    """Nine blocks of a batch's rows, the last of them short."""
    a, b = RNG.normal(size=(2, 20, 64)).astype(np.float32), RNG.normal(size=(64, 8)).astype(np.float32)
    whole = tcemu.gemm(a, b, op="f16 sparse", target="A100", sparse="a")
    monkeypatch.setattr(sparse_rows, "MAX_GATHERED", 3 * 2 * 32 * 8)
    jax.clear_caches()
    assert np.array_equal(tcemu.gemm(a, b, op="f16 sparse", target="A100", sparse="a"), whole)
    jax.clear_caches()


def test_float64_is_pruned_by_all_its_bits():
    """1 + 2^-40 is larger than 1 in float64 alone."""
    a = np.array([[1, 1, 1 + 2.0**-40, 1 + 2.0**-39]])
    d = tcemu.gemm(a, np.diag([1.0, 2, 4, 8])[:, :4], op="f16 sparse", target="A100", sparse="a")
    assert np.asarray(d).tolist() == [[0, 0, 4, 8]]


# ---- pruning and gradients


def test_prune_is_densify_of_sparsify():
    for pattern in ("1:2", "2:4", "4:8"):
        x = RNG.normal(size=(3, 8, 16)).astype(np.float32)
        expected = tcemu.densify(*tcemu.sparsify(x, pattern), pattern)
        found = tcemu.prune(x, pattern)
        assert isinstance(found, np.ndarray) and np.array_equal(found, expected)
        assert np.array_equal(tcemu.prune(jnp.asarray(x), pattern), expected)
        assert np.array_equal(tcemu.prune(x.swapaxes(-1, -2), pattern, axis=-2), expected.swapaxes(-1, -2))
    assert np.array_equal(tcemu.prune(np.array([[1, 2, 3, 4, 5]])), [[0, 0, 3, 4, 5]])  # the last chunk is short
    assert tcemu.prune(np.ones((1, 4), ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16
    for wrong in (lambda: tcemu.prune(np.ones(4)), lambda: tcemu.prune(np.ones((4, 4)), axis=0)):
        with pytest.raises(ValueError, match=r"expected a matrix \[..., M, K\] and axis -1 or -2"):
            wrong()


def test_gradients_pass_straight_through_the_pruning():
    x, w = RNG.normal(size=(8, 32)).astype(np.float32), RNG.normal(size=(32, 8)).astype(np.float32)
    assert (jax.grad(lambda x: (3 * tcemu.prune(x)).sum())(x) == 3).all()
    loss = lambda x, w: tcemu.gemm(x, w, op="f16 sparse", target="A100", sparse="a").sum()
    dx, dw = jax.grad(loss, (0, 1))(x, w)
    half = lambda v: v.astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(dx, np.broadcast_to(half(w).sum(1), x.shape), rtol=1e-6)  # pruned elements too
    np.testing.assert_allclose(dw, np.broadcast_to(half(tcemu.prune(x)).sum(0)[:, None], w.shape), rtol=1e-6)


@pytest.mark.parametrize("name", sample_cases(["f16_sparse", "bf16_sparse", "fp8_sparse"], ["bf16_sparse"]))
@pytest.mark.parametrize("target", sample_cases(["A100", "H100", "RTX 5090", "B200"], ["A100", "B200"]))
def test_a_sparse_recipe_is_gemm_of_its_instruction(name, target):
    if name == "fp8_sparse" and target == "A100":
        with pytest.raises(tcemu.Unsupported, match="works on"):
            tcemu.get_recipe(name, target)
        return
    recipe = tcemu.get_recipe(name, target)
    assert recipe.op.sparse
    a, b = RNG.normal(size=(12, 70)).astype(np.float32), RNG.normal(size=(70, 8)).astype(np.float32)
    d = tcemu.matmul(a, b, recipe=recipe)
    scale = np.float32(1)
    if name == "fp8_sparse":
        scales = [np.float32(np.abs(x).max()) / np.float32(448) for x in (tcemu.prune(a), b)]
        a, b, scale = a / scales[0], b / scales[1], scales[0] * scales[1]
    assert np.array_equal(d, np.asarray(tcemu.gemm(tcemu.prune(a), b, op=recipe.op, target=target, sparse="a")) * scale)
    assert tcemu.Recipe.from_json(recipe.to_json()) == recipe


def test_a_sparse_recipe_has_dense_gradients_of_the_pruned_weight():
    w, x = RNG.normal(size=(8, 32)).astype(np.float32), RNG.normal(size=(32, 8)).astype(np.float32)
    g = RNG.normal(size=(8, 8)).astype(np.float32)
    _, back = jax.vjp(lambda w, x: tcemu.matmul(w, x, recipe="bf16_sparse on A100"), w, x)
    dw, dx = back(g)
    assert np.array_equal(dw, tcemu.matmul(g, x.T, recipe="bf16 on A100"))
    assert np.array_equal(dx, tcemu.matmul(tcemu.prune(w).T, g, recipe="bf16 on A100"))


def test_emulate_prunes_the_weight():
    """A is the weight, whichever side it is on."""
    w, x = RNG.normal(size=(32, 8)).astype(np.float32), RNG.normal(size=(4, 32)).astype(np.float32)
    right = tcemu.emulate(lambda params, x: x @ params["w"], "bf16_sparse on A100")({"w": w}, x)
    left = tcemu.emulate(lambda params, x: params["w"].T @ x.T, "bf16_sparse on A100")({"w": w}, x)
    assert np.array_equal(right, left.T)
    assert np.array_equal(right, tcemu.matmul(w.T, x.T, recipe="bf16_sparse on A100").T)


def test_what_is_sparse_and_what_is_not_is_said():
    a, b = np.ones((16, 64), np.float32), np.ones((64, 8), np.float32)
    with pytest.raises(tcemu.Unsupported, match="is dense; sparse='a' needs a sparse instruction, as op='f16 sparse'"):
        tcemu.gemm(a, b, op="f16", target="A100", sparse="a")
    with pytest.raises(tcemu.Unsupported, match="sparse='a' prunes A for this instruction"):
        tcemu.gemm(a, b, op="f16 sparse", target="A100")
    with pytest.raises(ValueError, match="sparse='b': expected 'a'"):
        tcemu.gemm(a, b, op="f16 sparse", target="A100", sparse="b")
    with pytest.raises(tcemu.Unsupported, match="no sparse products with block scales"):
        tcemu.gemm(a, b, op="mxf4 sparse", target="RTX 5090", sparse="a")
    with pytest.raises(tcemu.Unsupported, match="a sparse recipe scales by tensor"):
        tcemu.get_recipe("bf16_sparse", "A100", a=tcemu.quantize.Quantizer("block", (1, 128)), promote=4)
    q = np.ones((4, 2, 32), np.float32)
    for name in ("bf16_sparse", "w8a16"):
        with pytest.raises(tcemu.Unsupported, match="attention has no sparse operand and dequantises none"):
            tcemu.attention(q, q, q, recipe=f"{name} on A100")
    with pytest.raises(tcemu.Unsupported, match="this product takes recipes with dense instructions"):
        tcemu.ragged_dot("bf16_sparse on A100")(a, np.ones((2, 64, 8), np.float32), np.array([8, 8]))


def test_measures_take_the_pruned_operand():
    """The error of a product by a sparse recipe lies in pruning A, and not in the instruction's sums."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 32)).astype(np.float32), rng.normal(size=(32, 8)).astype(np.float32)
    recipe = tcemu.get_recipe("f16_sparse on A100")
    (row,) = tcemu.compare(lambda x, w: x @ w, [recipe], (x, w)).rows
    pruned = np.asarray(tcemu.prune(x, "2:4"), np.float64)
    whole, kept = x.astype(np.float64) @ w, pruned @ w
    np.testing.assert_allclose(row.operand_error, np.linalg.norm(kept - whole) / np.linalg.norm(whole), rtol=1e-2)
    assert row.sum_error < 1e-5
    d = tcemu.matmul(x, w, recipe=recipe)
    assert_product_close(d, x, w, recipe=recipe)
    swept = tcemu.study.sweep(tcemu.matmul, {"fraction_bits": [24]}, operands=(x, w), recipe=recipe, exact="quantized")
    assert all(record["normwise"] < 1e-5 for record in swept.records())


def test_shards_of_k_have_whole_chunks():
    multiply = lambda a, b: tcemu.matmul(a, b, recipe="f16_sparse on A100", axis_name="k")
    a, b = np.ones((1, 4, 6), np.float32), np.ones((1, 6, 4), np.float32)
    with pytest.raises(ValueError, match=r"K = 6, and .* chunks of 4"):
        jax.vmap(multiply, axis_name="k")(a, b)
