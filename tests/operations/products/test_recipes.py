"""Recipes: the bits of `matmul` and `dot_general` against a NumPy loop over `dot`, and what a recipe is as a value."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracles import recipes_reference as by_hand

import tcemu
from tcemu import Recipe, formats
from tcemu.operations.products.recipes import RECIPES, ROWS, UNSCALED
from tcemu.quantize import Quantizer

BF16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
E4M3 = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
MXFP8 = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"
F32 = np.float32
M, N, K = 21, 11, 300
full = pytest.mark.full


def words(x):
    x = np.asarray(x)
    return x.view(f"u{x.itemsize}")


def same(got, want):
    np.testing.assert_array_equal(words(got), words(np.asarray(want)))


def normal(*shape, seed=0, spread=3.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.uniform(-spread, spread, shape))).astype(F32)


A, B, BIAS = normal(M, K, seed=1), normal(K, N, seed=2), normal(N, seed=3)


def pad_codes(codes, axis, multiple):
    pad = [(0, 0), (0, 0)]
    pad[axis] = (0, -codes.shape[axis] % multiple)
    return np.pad(codes, pad)


def bf16_codes(a, b, multiple=16):
    """Codes of A and B, K filled up."""
    x, y = (v.astype(ml_dtypes.bfloat16).view(np.uint16) for v in (a, b))
    return pad_codes(x, 1, multiple), pad_codes(y, 0, multiple)


def test_bias_and_out_are_rounded_once_each():
    plain = by_hand.chain_product(BF16, "sm_80", *bf16_codes(A, B), np.zeros((M, N), F32))
    got = tcemu.matmul(A, B, BIAS, recipe=Recipe(BF16, "sm_80", dtype=formats.BF16))
    same(got, (plain + BIAS).astype(ml_dtypes.bfloat16).astype(F32))


@full
def test_a_cast_is_gemm():
    plain, recipe = np.asarray(tcemu.gemm(A, B, op=BF16, target="sm_90a")), Recipe(BF16, "sm_90a")
    same(tcemu.matmul(A, B, recipe=recipe), plain)
    same(tcemu.matmul(A, B, BIAS, recipe=recipe, dtype=jnp.bfloat16), (plain + BIAS).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("per", "power_of_two"),
    [
        ("row and column", False),
        *(pytest.param(*case, marks=full) for case in (("row and column", True), ("tensor", False), ("tensor", True))),
    ],
)
def test_scales_of_tensors_rows_and_columns(per, power_of_two):
    scale = "power_of_two" if power_of_two else "f32"
    a_per, b_per = ("tensor", "tensor") if per == "tensor" else ("row", "column")
    recipe = Recipe(E4M3, "sm_89", *(Quantizer(shared, scale=scale, saturate=True) for shared in (a_per, b_per)))
    a = A.copy()
    a[3] = 0  # a row of zeros, and, by row, one of subnormals
    a[4] *= F32(1e-38)
    rows, columns = (M, N) if per == "tensor" else (1, 1)
    sa, sb = (by_hand.block_scales(x, "e4m3", size, K, power_of_two) for x, size in ((a, rows), (B.T, columns)))
    x = by_hand.elements(a, "e4m3", by_hand.expand_scales(sa, a.shape, rows, K))
    y = by_hand.elements(B.T, "e4m3", by_hand.expand_scales(sb, B.T.shape, columns, K)).T
    total = by_hand.chain_product(E4M3, "sm_89", pad_codes(x, 1, 32), pad_codes(y, 0, 32), np.zeros((M, N), F32))
    same(tcemu.matmul(a, B, recipe=recipe), total * (sa * sb.T))


@pytest.mark.parametrize(("split", "reduction"), [(1, "ascending"), pytest.param(3, "tree", marks=full)])
def test_deepseek(split, reduction):
    """Tiles of 1 x 128, blocks of 128 x 128, sums promoted by an fma every 128 elements; 3 chunks in parts of one."""
    recipe = tcemu.get_recipe("deepseek", "sm_89", split_k=split, reduction=reduction)
    b = normal(K, 150, seed=4)
    sa, sb = by_hand.block_scales(A, "e4m3", 1, 128), by_hand.block_scales(b.T, "e4m3", 128, 128)
    x = by_hand.elements(A, "e4m3", by_hand.expand_scales(sa, A.shape, 1, 128))
    y = by_hand.elements(b.T, "e4m3", by_hand.expand_scales(sb, b.T.shape, 128, 128)).T
    x, y = pad_codes(x, 1, 128), pad_codes(y, 0, 128)
    sb = np.repeat(sb, 128, 0)[:150].T
    scale = lambda chunk: lambda k: sa[:, [chunk + k // 128]] * sb[[chunk + k // 128]]
    if split == 1:
        want = by_hand.promoted_product(E4M3, "sm_89", x, y, 4, scale(0))
    else:
        parts = [by_hand.promoted_product(E4M3, "sm_89", x[:, k : k + 128], y[k : k + 128], 4, scale(k // 128)) for k in (0, 128, 256)]
        want = by_hand.tree(parts)
    same(tcemu.matmul(A, b, recipe=recipe), want)


@pytest.mark.parametrize(
    ("promote", "split", "reduction"),
    [(2, 3, "tree"), *(pytest.param(*case, marks=full) for case in ((None, 4, "ascending"), (None, 5, "tree"), (3, 1, "ascending")))],
)
def test_promotion_and_parts_of_k(promote, split, reduction):
    """19 instructions: in parts of 5, 4 (the last of 3), chunks of 3 (the last of 1), and parts of 4 chunks of 2, the last of less."""
    recipe = Recipe(BF16, "sm_80", promote=promote, split_k=split, reduction=reduction)
    chunk = 16 * (promote or 1)
    length = chunk * -(-K // (chunk * split))
    x, y = bf16_codes(A, B, length * split)
    parts = []
    for k in range(0, length * split, length):
        part = x[:, k : k + length], y[k : k + length]
        zeros = np.zeros((M, N), F32)
        parts.append(
            by_hand.chain_product(BF16, "sm_80", *part, zeros)
            if promote is None
            else by_hand.promoted_product(BF16, "sm_80", *part, promote)
        )
    assert len(parts) == split
    same(tcemu.matmul(A, B, recipe=recipe), getattr(by_hand, reduction)(parts))
    if split == 1:  # the interval traced, and swept
        d = jax.vmap(lambda n: tcemu.matmul(A, B, recipe=recipe.replace(promote=n)))(jnp.array([promote, 99]))
        same(d[0], getattr(by_hand, reduction)(parts))
        same(d[1], tcemu.gemm(A, B, op=BF16, target="sm_80"))


@full
def test_f16_sums_are_promoted_in_f32():
    op = "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"
    got = tcemu.matmul(A, B, recipe=Recipe(op, "sm_90", promote=1))
    total = np.zeros((M, N), F32)
    for k in range(0, K, 16):
        total = total + np.asarray(tcemu.gemm(A[:, k : k + 16], B[k : k + 16], op=op, target="sm_90")).astype(F32)
    same(got, total)


@pytest.mark.parametrize(("name", "split"), [("mxfp8", 1), pytest.param("mxfp8", 2, marks=full), pytest.param("nvfp4", 2, marks=full)])
def test_blocks_of_the_instruction(name, split):
    """A loop of instructions over what `block_quantize` makes."""
    recipe = tcemu.get_recipe(name, "sm_120a", split_k=split)
    kind, rule = ("mxfp8_e4m3", "rceil") if name == "mxfp8" else ("nvfp4", None)
    q, r = tcemu.quantize.block_quantize(A, kind, rule=rule), tcemu.quantize.block_quantize(B, kind, axis=-2, rule=rule)
    op = recipe.op
    length = op.k * -(-K // (split * op.k))
    one = 127 if name == "mxfp8" else 0x38
    x, y = (pad_codes(np.asarray(v), axis, split * length) for v, axis in ((q.codes, 1), (r.codes, 0)))
    blocks = length // recipe.unit_block
    sa = np.pad(np.asarray(q.scales), [(0, 0), (0, split * blocks - q.scales.shape[1])], constant_values=one)
    sb = np.pad(np.asarray(r.scales), [(0, split * blocks - r.scales.shape[0]), (0, 0)], constant_values=one)
    parts = []
    for k, s in zip(range(0, split * length, length), range(0, split * blocks, blocks), strict=True):
        scales = sa[:, s : s + blocks], sb[s : s + blocks]
        parts.append(by_hand.chain_product(op, "sm_120a", x[:, k : k + length], y[k : k + length], np.zeros((M, N), F32), scales))
    want = by_hand.ascending(parts)
    if name == "nvfp4":
        want = want * (np.asarray(q.tensor_scale) * np.asarray(r.tensor_scale))
    same(tcemu.matmul(A, B, recipe=recipe), want)
    assert tcemu.get_recipe(name, "sm_100a").arithmetic == recipe.arithmetic  # by tcgen05


@full
def test_scales_that_the_user_gives():
    sa, sb = F32(0.25), F32(0.5)
    recipe = Recipe(E4M3, "sm_89", *[Quantizer("tensor", saturate=True)] * 2)
    x, y = (by_hand.elements(v, "e4m3", s) for v, s in ((A, sa), (B, sb)))
    total = by_hand.chain_product(E4M3, "sm_89", pad_codes(x, 1, 32), pad_codes(y, 0, 32), np.zeros((M, N), F32))
    same(tcemu.matmul(A, B, recipe=recipe, scale_a=sa, scale_b=sb), total * F32(0.125))
    q, r = (tcemu.quantize.block_quantize(v, "mxfp8_e4m3", axis=axis) for v, axis in ((A, -1), (B, -2)))
    scales = [formats.to_float(formats.UE8M0, v.scales) for v in (q, r)]
    blocks = Recipe(MXFP8, "sm_120a", Quantizer("block"), Quantizer("block"))
    given = tcemu.matmul(A, B, recipe=blocks, scale_a=scales[0], scale_b=scales[1])
    same(given, tcemu.matmul(A, B, recipe=blocks))


@full
def test_stochastic_rounding():
    recipe = Recipe(BF16, "sm_90", Quantizer(rounding="SR", saturate=True), UNSCALED)
    x, one = np.full((1, 4096), 1 + 2.0**-9, F32), np.ones((4096, 1), F32)
    first, again, other = (tcemu.matmul(x, one, recipe=recipe, key=jax.random.key(seed)) for seed in (0, 0, 1))
    assert float(first[0, 0]) == float(again[0, 0]) != float(other[0, 0])
    spread = 2.0**-7 * np.sqrt(0.25 * 0.75 / 4096)
    assert abs(float(first[0, 0]) / 4096 - 1 - 2.0**-9) < 4 * spread


F32_TO_BF16, BF16_TO_BF16, F32_TO_F32 = (jnp.float32, jnp.bfloat16), (jnp.bfloat16, None), (jnp.float32, None)
TWO_OF_K = (2, 3, 4, 6), (2, 6, 5, 4), (((3, 2), (1, 3)), ((0,), (0,)))
DIMENSIONS = [
    ((4, 6), (6, 5), (((1,), (0,)), ((), ())), F32_TO_F32),
    (*TWO_OF_K, BF16_TO_BF16),
    ((3, 4, 2), (4, 2, 3), (((1,), (0,)), ((2, 0), (1, 2))), F32_TO_F32),
    ((6,), (6,), (((0,), (0,)), ((), ())), F32_TO_F32),
    ((3, 0), (0, 2), (((1,), (0,)), ((), ())), F32_TO_F32),
]


@pytest.mark.parametrize(
    ("left", "right", "numbers", "dtypes"), [(*TWO_OF_K, F32_TO_BF16), *(pytest.param(*case, marks=full) for case in DIMENSIONS)]
)
def test_dot_general_has_the_shapes_and_dtypes_of_lax(left, right, numbers, dtypes):
    dtype, preferred = dtypes  # products and sums are exact in bf16 and f32
    lhs, rhs = (jnp.asarray(np.random.default_rng(0).integers(-4, 5, shape), dtype) for shape in (left, right))
    want = jax.lax.dot_general(lhs, rhs, numbers, preferred_element_type=preferred)
    got = tcemu.dot_general(Recipe(BF16, "sm_90"))(lhs, rhs, numbers, preferred_element_type=preferred)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    same(got, want)


@full
def test_einsum_takes_it():
    x, y = jnp.asarray(A.reshape(3, 7, K)), jnp.asarray(normal(3, 5, K, seed=5))
    dot = tcemu.dot_general(Recipe(BF16, "sm_90"))
    got = jnp.einsum("bqd,bkd->bqk", x, y, _dot_general=dot)
    same(got, tcemu.matmul(x, jnp.swapaxes(y, 1, 2), recipe=Recipe(BF16, "sm_90")))


def test_a_recipe_is_a_value():
    recipe, again = tcemu.get_recipe("fp8", "sm_89"), tcemu.get_recipe("fp8", "sm_89")
    assert recipe == again and hash(recipe) == hash(again) and recipe != recipe.replace(split_k=2)
    assert tcemu.dot_general(recipe) == tcemu.dot_general(again) and len({tcemu.dot_general(recipe), tcemu.dot_general(again)}) == 1
    assert jax.tree.unflatten(jax.tree.structure(recipe), jax.tree.leaves(recipe)) == recipe
    assert str(recipe.replace(split_k=2, reduction="tree", backward="exact", dtype=formats.BF16)) == (
        "fp8: mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 on sm_89\n"
        "  A e4m3 per tensor, scales f32; B e4m3 per tensor, scales f32\n"
        "  sums chained, K in 2 parts added tree; result bf16\n"
        "  backward exact"
    )
    with pytest.raises(TypeError):
        hash(recipe.what_if(fraction_bits=jnp.array(12)))


@pytest.mark.parametrize("name", RECIPES)
def test_every_named_recipe_stands_on_a_row_with_evidence(name):
    recipe, row = tcemu.get_recipe(name), ROWS[name]
    assert row.source and (recipe.op.a, recipe.op.b) == (row.a, row.b) and recipe.gradients is not None
    quantizers = [quantizer for r in (recipe, *recipe.gradients) for quantizer in (r.a, r.b)]
    assert all(quantizer.saturate == (quantizer.scaling != "none") for quantizer in quantizers)
    for target in ("sm_120a", "sm_90a", "sm_100a", "sm_103a"):
        if not (row.block_scale and target == "sm_90a"):
            assert (tcemu.get_recipe(name, target).op.scaling is not None) == bool(row.block_scale)


@pytest.mark.parametrize(
    ("error", "match", "make"),
    [
        (tcemu.Unsupported, "needs sm_89", lambda: tcemu.get_recipe("fp8", "sm_80")),
        (ValueError, "expected one of f16, bf16", lambda: tcemu.get_recipe("fp9")),
        (ValueError, "inside the sum over K", lambda: Recipe(E4M3, "sm_89", Quantizer("column"), UNSCALED)),
        (ValueError, "inside the sum over K", lambda: Recipe(E4M3, "sm_89", UNSCALED, Quantizer("row"))),
        (ValueError, "needs block scales", lambda: Recipe(MXFP8, "sm_120a")),
        (ValueError, "has no block scales", lambda: Recipe(E4M3, "sm_89", Quantizer("block"), UNSCALED)),
        (ValueError, "give promote", lambda: Recipe(E4M3, "sm_89", Quantizer("block", (1, 128)), UNSCALED)),
        (ValueError, "does not divide 128", lambda: Recipe(E4M3, "sm_89", Quantizer("block", (1, 128)), UNSCALED, promote=3)),
        (ValueError, "split_k=0", lambda: Recipe(E4M3, "sm_89", split_k=0)),
        (ValueError, "reduction='ring'", lambda: Recipe(E4M3, "sm_89", reduction="ring")),
        (ValueError, "backward='none'", lambda: Recipe(E4M3, "sm_89", backward="none")),
        (ValueError, "dtype=e4m3", lambda: Recipe(E4M3, "sm_89", dtype=formats.E4M3)),
        (ValueError, "promote=0", lambda: Recipe(E4M3, "sm_89", promote=0)),
        (tcemu.Unsupported, "results f32 or f16", lambda: Recipe("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", "sm_80")),
        (ValueError, "scaling='rows'", lambda: Quantizer("rows")),
        (ValueError, "pair of sizes", lambda: Quantizer("tensor", (1, 128))),
        (ValueError, "a rule is for", lambda: Quantizer("tensor", rule="floor")),
        (ValueError, "does not divide 128", lambda: tcemu.get_recipe("deepseek").replace(promote=jnp.array(3))),
        (ValueError, "key=", lambda: tcemu.matmul(A, B, recipe=Recipe(BF16, "sm_80", Quantizer(rounding="SR")))),
        (ValueError, "key=", lambda: tcemu.dot_general(Recipe(BF16, "sm_80", Quantizer(rounding="SR")))),
        (TypeError, "expected a tcemu.Recipe", lambda: tcemu.dot_general(16)),
        (TypeError, "int32.*expected floats", lambda: tcemu.matmul(jnp.ones((2, 2), int), B[:2], recipe=Recipe(BF16, "sm_80"))),
        (ValueError, "K is 300 in a and 21 in b", lambda: tcemu.matmul(A, A, recipe=Recipe(BF16, "sm_80"))),
        (ValueError, r"bias: got shape \[21\]", lambda: tcemu.matmul(A, B, A[:, 0], recipe=Recipe(BF16, "sm_80"))),
        (ValueError, "does not scale this operand", lambda: tcemu.matmul(A, B, recipe=Recipe(BF16, "sm_80"), scale_a=1.0)),
        (ValueError, r"scale_b: .*expected \[1, 11\]", lambda: tcemu.matmul(A, B, recipe=tcemu.get_recipe("fp8_rows"), scale_b=1.0)),
        (TypeError, "expected a float dtype", lambda: tcemu.matmul(A, B, recipe=Recipe(BF16, "sm_80"), dtype=jnp.int32)),
        (TypeError, "got also colour", lambda: tcemu.dot_general(Recipe(BF16, "sm_80"))(A, B, (((1,), (0,)), ((), ())), colour=1)),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(error, match, make):
    with pytest.raises(error, match=match):
        make()
