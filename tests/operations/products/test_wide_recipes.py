"""Wide recipes: a loop over `tcemu.gemm` written out, special values, exactness of the parts, JSON, policies and errors."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu.operations.products.wide import ROWS, split_in_parts, wide_recipe_from_dict, wide_recipe_to_dict
from tcemu.products import WideRecipe, get_wide_recipe
from tcemu.uses.emulation.policies import from_json, to_json

OPS = {name: f"mma.sync.aligned.m16n8k{k}.row.col.f32.{name}.{name}.f32" for name, k in (("f16", 16), ("bf16", 16), ("tf32", 8))}
K_OF = {"bf16": 16, "f16": 16, "tf32": 8}
SPECIAL = np.array([0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x00000001, 0x3F800000, 0xBF800001], np.uint32)


def draw_matrix(shape, seed, special=0.0):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-8, 9, shape))).astype(np.float32)
    return np.where(rng.random(shape) < special, rng.choice(SPECIAL, shape).view(np.float32), x)


# ---- a reference: parts by NumPy, and a loop over gemm


def round_part(narrow, rounding, x):
    codes = x.view(np.uint32)
    if rounding == "RZ":
        return (codes & np.uint32(0xFFFF0000 if narrow == "bf16" else 0xFFFFE000)).view(np.float32)
    if rounding == "RNA":
        finite = (codes & np.uint32(0x7F800000)) != 0x7F800000
        return np.where(finite, (codes + np.uint32(0x1000)) & np.uint32(0xFFFFE000), codes).view(np.float32)
    with np.errstate(over="ignore"):
        return x.astype(np.float16 if narrow == "f16" else ml_dtypes.bfloat16).astype(np.float32)


def split_by_numpy(row, x):
    parts, powers = [], row.exponents or (0,) * len(row.roundings)
    for rounding, power, after in zip(row.roundings, powers, [*powers[1:], 0], strict=True):
        parts.append(round_part(row.narrow, rounding, x))
        with np.errstate(invalid="ignore", over="ignore"):
            x = (x - parts[-1]) * np.float32(2.0 ** max(after - power, 0))
    return parts


def loop_over_gemm(row, a, b, k_tile):
    """The sum of tiles; in each of them one call of gemm for each product of each instruction's K."""
    depth, op = K_OF[row.narrow], OPS[row.narrow]
    parts_a, parts_b = split_by_numpy(row, a), split_by_numpy(row, b)
    k = a.shape[1]
    first = depth if row.short_first_tile else k_tile
    edges = [0, *range(first, k, k_tile), k]
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for low, high in pairwise(edges):
        steps = [(i, min(i + depth, high)) for i in range(low, high, depth)]
        calls = [(*pair, *step) for step in steps for pair in row.products]
        if not row.by_instruction:
            calls = [(*pair, *step) for pair in row.products for step in steps]
        calls = [call for call in calls if not row.apart or call[:2] == (0, 0)]
        c, before = np.zeros_like(total), None
        for i, j, begin, end in calls:
            if row.exponents and not row.apart:  # scale-input-d of the first product of a band
                power = row.exponents[i] + row.exponents[j]
                c = c if before is None else c * np.float32(2.0 ** (power - before))
                before = power
            if (i, j, begin) == (0, 0, low) and row.cleared:
                c = np.where(np.isnan(c) if row.cleared == "NaN" else ~np.isfinite(c), np.float32(0), c)
            c = np.asarray(tcemu.gemm(parts_a[i][:, begin:end], parts_b[j][begin:end], c, op=op, target="sm_80"))
        with np.errstate(invalid="ignore", over="ignore"):
            total = total + c
    if row.apart:
        c = np.zeros_like(total)
        for begin in range(0, k, depth):
            for i, j in row.products[:-1]:
                c = np.asarray(
                    tcemu.gemm(parts_a[i][:, begin : begin + depth], parts_b[j][begin : begin + depth], c, op=op, target="sm_80")
                )
        with np.errstate(invalid="ignore", over="ignore"):
            total = total + c * np.float32(2.0 ** -row.exponents[1])
    return total


def assert_same_words(x, y):
    x, y = (np.where(np.isnan(v), np.float32(np.nan), v).view(np.uint32) for v in map(np.asarray, (x, y)))
    np.testing.assert_array_equal(x, y)


CASES = [(name, special) for name in sorted(ROWS) for special in (0.0, 0.03)]
USUAL = [("bf16x3", 0.0), ("cutlass_bf16x9", 0.03)]


@pytest.mark.parametrize("case", sample_cases(CASES, USUAL, lambda c: f"{c[0]}-{c[1]}"))
def test_a_wide_product_is_a_loop_over_gemm(case):
    name, special = case
    a, b = draw_matrix((5, 70), 1, special), draw_matrix((70, 6), 2, special)
    recipe = get_wide_recipe(name, "sm_80")
    assert_same_words(tcemu.matmul(a, b, recipe=recipe), loop_over_gemm(ROWS[name], a, b, recipe.k_tile))


@pytest.mark.full
def test_another_tile_and_a_bias():
    a, b, bias = draw_matrix((3, 48), 3), draw_matrix((48, 4), 4), draw_matrix((4,), 5)
    d = tcemu.matmul(a, b, bias, recipe=get_wide_recipe("bf16x6", "A100", k_tile=16))
    assert_same_words(d, loop_over_gemm(ROWS["bf16x6"], a, b, 16) + bias)


# ---- the parts


@pytest.mark.parametrize("name", ["xla_bf16x9", pytest.param("bf16x6", marks=pytest.mark.full)])
def test_three_bf16_parts_are_exact(name):
    """Where no part is subnormal: 3 x 8 bits hold the 24 of f32."""
    x = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint32).view(np.float32)
    x = x[np.isfinite(x) & (abs(x) > 2.0**-100) & (abs(x) < 2.0**127)]
    parts = split_in_parts(get_wide_recipe(name, "sm_80"), jnp.asarray(x))
    total = sum(np.asarray(part).view(ml_dtypes.bfloat16).astype(np.float64) for part in parts)
    assert len(x) > 15_000 and (total == x.astype(np.float64)).all()


@pytest.mark.full
def test_scaled_parts_keep_what_plain_parts_lose():
    """Near the least normal number of f32 the lower parts of bf16 are subnormal, unless they are multiplied by 2^8 and 2^16."""
    a, b = np.random.default_rng(14).standard_normal((8, 64)).astype(np.float32) * np.float32(2.0**-120), draw_matrix((64, 8), 15)
    exact, size = a.astype(np.float64) @ b.astype(np.float64), abs(a).astype(np.float64) @ abs(b).astype(np.float64)
    error = lambda name: (abs(np.asarray(tcemu.matmul(a, b, recipe=get_wide_recipe(name))) - exact) / size).max()
    assert error("cutlass_bf16x9") < 2.0**-22 < 2.0**-21 < error("xla_bf16x9")
    assert error("ootomo_fp16x2") > 0.01  # f16 has not the range


@pytest.mark.full
def test_more_products_are_more_exact():
    """Errors relative to |A|·|B|: two parts of bf16 leave 2^-16, two of tf32 2^-21, three of bf16 about the rounding of f32."""
    a, b = draw_matrix((16, 256), 6), draw_matrix((256, 16), 7)
    exact, size = a.astype(np.float64) @ b.astype(np.float64), abs(a).astype(np.float64) @ abs(b).astype(np.float64)
    error = {
        name: (abs(np.asarray(tcemu.matmul(a, b, recipe=f"{name} on A100")) - exact) / size).max()
        for name in ("bf16", "bf16x3", "tf32x3", "bf16x6")
    }
    assert 2.0**-13 < error["bf16"] < 2.0**-8 and 2.0**-22 < error["bf16x3"] < 2.0**-15
    assert error["tf32x3"] < 2.0**-19 and error["bf16x6"] < 2.0**-20


# ---- as a recipe


def test_names_and_policies():
    a, b = draw_matrix((4, 40), 8), draw_matrix((40, 4), 9)
    d = np.asarray(tcemu.matmul(a, b, recipe="bf16x6 on A100"))
    for policy in ("bf16x6 on A100", get_wide_recipe("bf16x6", "A100"), lambda product: "bf16x6 on A100"):
        replaced = tcemu.emulate(lambda x, y: x @ y, policy)
        assert_same_words(replaced(a, b), d)
        assert "bf16x6 on" in str(replaced.report(a, b)) and "6 x mma.sync" in replaced.report(a, b).to_json()
    rules = {"*": "bf16x6 on A100"}
    saved = from_json(to_json(rules))
    assert_same_words(tcemu.emulate(lambda x, y: x @ y, saved)(a, b), d)


def test_json_returns_the_recipe():
    for name in ROWS:
        recipe = get_wide_recipe(name, "H100", k_tile=64)
        assert wide_recipe_from_dict(wide_recipe_to_dict(recipe)) == recipe and recipe.source
    damaged = wide_recipe_to_dict(get_wide_recipe("bf16x3"))
    for change in ({"products": [[0, 5]]}, {"roundings": "RN"}, {"k_tile": 7}, {"name": 1}, {"more": 1}):
        with pytest.raises(ValueError):
            wide_recipe_from_dict(damaged | change)


def test_gradients_are_those_of_the_plain_product():
    a, b = jnp.asarray(draw_matrix((3, 33), 10)), jnp.asarray(draw_matrix((33, 2), 11))
    wide = jax.grad(lambda x, y: tcemu.matmul(x, y, recipe="tf32x3 on A100").sum(), (0, 1))(a, b)
    plain = jax.grad(lambda x, y: jnp.matmul(x, y, precision="highest").sum(), (0, 1))(a, b)
    for x, y in zip(wide, plain, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("way", sample_cases([jax.vmap, jax.jit, lambda f: f], ()))
def test_batches_jit_and_vmap(way):
    a, b = draw_matrix((2, 3, 40), 12), draw_matrix((2, 40, 5), 13)
    multiply = lambda x, y: tcemu.matmul(x, y, recipe="bf16x3 on A100")
    assert_same_words(way(multiply)(a, b), np.stack([np.asarray(multiply(x, y)) for x, y in zip(a, b, strict=True)]))


@pytest.mark.full
def test_empty_axes():
    b, multiply = draw_matrix((2, 40, 5), 13), lambda x, y: tcemu.matmul(x, y, recipe="bf16x3 on A100")
    assert multiply(np.zeros((2, 0, 4), np.float32), b[:, :4]).shape == (2, 0, 5)
    assert not np.asarray(multiply(np.zeros((2, 3, 0), np.float32), b[:, :0])).any()


def test_mistakes_say_what_would_work():
    with pytest.raises(ValueError, match="did you mean 'bf16x6'"):
        get_wide_recipe("bf16x5")
    with pytest.raises(ValueError, match="give one"):
        get_wide_recipe("bf16x6 on A100", "H100")
    with pytest.raises(ValueError, match="multiple of 16"):
        get_wide_recipe("bf16x6", "A100", k_tile=24)
    with pytest.raises(ValueError, match="numbers of parts"):
        get_wide_recipe("bf16x3", "A100", products=((0, 2),))
    with pytest.raises(ValueError, match="neither scales nor promotes"):
        WideRecipe(tcemu.get_recipe("bf16", "A100", promote=1), ("RN",), ((0, 0),))
    with pytest.raises(ValueError, match="bf16, tf32 or f16"):
        WideRecipe(tcemu.Recipe("e4m3", "H100"), ("RN",), ((0, 0),))
    with pytest.raises(ValueError, match="for each part"):
        get_wide_recipe("bf16x3", "A100", exponents=(0, 8, 16))
    with pytest.raises(ValueError, match="two bands"):
        get_wide_recipe("cutlass_bf16x9", apart=True)
    with pytest.raises(ValueError, match="without scales"):
        tcemu.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), recipe="bf16x3", scale_a=np.float32(1))
    with pytest.raises(tcemu.Unsupported):
        get_wide_recipe("bf16x3", "T4")
