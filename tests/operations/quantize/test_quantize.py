"""tcemu.quantize: MX against exact fractions, NVFP4 against NumPy transcriptions of the authors' code."""

from fractions import Fraction
from functools import partial
from itertools import product

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import block_quantizers_reference as exact
from oracles.reference import FORMATS, decode, encode
from support.sampling import sample_cases
from support.traced_programs import MOVES, equations, float_operations

import tcemu
from tcemu import formats
from tcemu.engine.arithmetic.integer_quotients import divide_on_integers, multiply_on_integers
from tcemu.engine.backends.quotients import correct_quotient, divide, divide_by_machine, multiply
from tcemu.operations.quantize.block_formats import BLOCK_FORMATS, RULES, BlockFormat, BlockQuantized, block_dequantize, block_quantize

MX = sorted(exact.ELEMENTS)
POWERS = ("floor", "ceil", "even", "rceil")
FIELDS = np.arange(255)  # the exponent fields of finite f32
SHAPE = (64, 128)  # of most matrices here, so that they share their programs


def as_float(words) -> np.ndarray:
    return np.asarray(words, np.uint32).view(np.float32)


def agrees(words: np.ndarray, kind: str | BlockFormat, element: str, block: int, rule: str, mode: str = "RN", source: str = "f32") -> int:
    """How many elements were compared: codes, scales, and the f32 words of their values. words: [blocks, block], codes of `source`."""
    x = words.view({"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[source])
    x = np.pad(x, [(0, -len(x) % 1024), (0, 0)])  # few shapes, few programs
    q = block_quantize(x, kind, rule=rule, rounding=mode)
    codes, scales = np.asarray(q.codes)[: len(words)], np.asarray(q.scales)[: len(words), 0]
    values = np.asarray(block_dequantize(q)).view(np.uint32)[: len(words)]
    wrong = []
    for row, got, scale, value in zip(words.tolist(), codes.tolist(), scales.tolist(), values.tolist(), strict=True):
        want, want_scale = exact.mx_block(row, source, element, rule, mode)
        if (got, scale) != (want, want_scale) or value != [exact.value(element, "ue8m0", c, want_scale) for c in want]:
            wrong.append(f"{[hex(w) for w in row]}: {got} scale {scale}, not {want} scale {want_scale}")
    assert wrong == [], f"{len(wrong)} of {len(words)} blocks: {wrong[:2]}"
    return words.size


def boundaries(element: str) -> list[Fraction]:
    """Every magnitude of an element format, and every middle between two, the one beyond the largest included."""
    finite = [decode(element, code) for code in range(FORMATS[element].greatest + 1)]
    beyond = finite[-1] + (finite[-1] - finite[-2])
    return [x for low, high in zip(finite, [*finite[1:], beyond], strict=True) for x in (low, (low + high) / 2)]


def amax_fractions(element: str) -> list[int]:
    """The f32 fractions at which some rule changes its mind, and their neighbours."""
    spec = FORMATS[element]
    top = (spec.greatest & ((1 << spec.fraction) - 1)) << (23 - spec.fraction)
    carries = ((1 << (spec.fraction + 1)) - 1) << (22 - spec.fraction)
    return sorted({0, 1, 2, 0x400000, 0x400001, top - 1, top, top + 1, carries - 1, carries, 0x7FFFFF})


def boundary_blocks(element: str, field: int, fraction: int, points: list[Fraction]) -> np.ndarray:
    """f32 words [n, 32]: the amax, and 31 points, in units of the floor rule's scale, one ulp to either side, where they are below amax."""
    amax = field << 23 | fraction
    exponent = max(exact.scale_exponent("floor", decode("f32", amax), element), -127)
    near = [encode("f32", p * Fraction(2) ** exponent, saturate=True) for p in points]
    words = np.array([w for near_word in near for w in (near_word - 1, near_word, near_word + 1)], np.int64)
    words = np.clip(words, 0, amax)
    words = np.concatenate([words, words | 1 << 31])
    words = np.pad(words, (0, -len(words) % 31)).reshape(-1, 31)
    return np.concatenate([np.full((len(words), 1), amax | (field & 1) << 31), words], axis=1).astype(np.uint32)


# ---- MX


@pytest.mark.parametrize("kind", sample_cases(MX, 5))
def test_every_boundary_of_the_elements_over_the_exponents_of_f32(kind):
    """All 255 exponent fields, and all boundaries, each at some of the fields (`full`: at each)."""
    element = exact.ELEMENTS[kind]
    points, fractions = boundaries(element), amax_fractions(element)
    stride = max(1, len(points) // 5)
    blocks = [boundary_blocks(element, int(f), fractions[f % len(fractions)], points[f % stride :: stride]) for f in FIELDS]
    blocks += [boundary_blocks(element, f, fractions[-1], points) for f in (0, 1, 2, 126, 254)]
    assert agrees(np.concatenate(blocks), kind, element, 32, "floor") > 255 * 32


@pytest.mark.full
@pytest.mark.parametrize("rule", POWERS)
@pytest.mark.parametrize("kind", MX)
def test_every_boundary_at_every_exponent(kind, rule):
    element = exact.ELEMENTS[kind]
    points, fractions = boundaries(element), amax_fractions(element)
    count = 0
    for some in np.array_split(FIELDS, 5):
        blocks = np.concatenate([boundary_blocks(element, int(f), fractions[f % len(fractions)], points) for f in some])
        count += agrees(blocks, kind, element, 32, rule)
    print(f"{kind} {rule}: 0 mismatches of {count:,} elements")


@pytest.mark.parametrize("case", sample_cases(product(MX, POWERS), 12, "-".join))
def test_every_scale(case):
    """All 255 exponents x the fractions where rules change their mind, every power of two below 2^-126, and zero."""
    kind, rule = case
    element = exact.ELEMENTS[kind]
    words = [int(f) << 23 | fraction for f in FIELDS for fraction in amax_fractions(element)]
    words += [w for k in range(23) for w in ((1 << k) - 1, 1 << k, (1 << k) + 1)]
    words = np.unique(np.array(words, np.uint32))
    blocks = np.stack([words, words >> 1 | np.uint32(1 << 31)], axis=1)
    own = BlockFormat("own", formats.FORMATS[element], 2, "floor")
    assert agrees(blocks, own, element, 2, rule) == 2 * len(words) >= 2 * 255 * 8


@pytest.mark.parametrize(("mode", "kind", "rule"), [("RZ", "mxfp8_e4m3", "floor"), ("RM", "mxfp4", "rceil"), ("RP", "mxfp6_e3m2", "ceil")])
def test_other_roundings(mode, kind, rule):
    words = np.random.default_rng(1).normal(size=(100, 32)).astype(np.float32).view(np.uint32)
    agrees(words, kind, exact.ELEMENTS[kind], 32, rule, mode)


@pytest.mark.parametrize("case", sample_cases(product(["f64", "f16", "bf16"], ["floor", "ceil", "even"]), 4, "-".join))
def test_other_dtypes_are_rounded_once(case):
    source, rule = case
    spec = FORMATS[source]
    rng = np.random.default_rng(2)
    dtype = {"f64": np.uint64, "f16": np.uint16, "bf16": np.uint16}[source]
    raw = rng.integers(0, 1 << spec.bits, (30, 4), dtype, endpoint=False)  # f64: most are far outside of what the scales reach
    near = [encode(source, Fraction(float(v))) for v in rng.normal(size=120)]
    traps = [encode(source, x * (1 + sign * Fraction(1, 1 << 40))) for x in boundaries("e4m3")[:120] for sign in (1, -1)]
    words = np.concatenate([raw, np.array(near, dtype).reshape(-1, 4), np.array(traps, dtype).reshape(-1, 4)])
    own = BlockFormat("own", formats.E4M3, 4, "floor")
    assert agrees(words, own, "e4m3", 4, rule, source=source) >= 480


def test_the_largest_float64_is_found_in_both_of_its_words():
    x = np.array([[4.0, 1 / 3], [1.0, 1 + 2.0**-40], [1 + 2.0**-40, 1.0], [2.0, 2 - 2.0**-40]])
    own = BlockFormat("own", formats.E4M3, 2, "ceil")
    assert agrees(x.view(np.uint64), own, "e4m3", 2, "ceil", source="f64") == 8
    assert block_quantize(x, own).scales[:, 0].tolist() == [121, 120, 120, 120]


def test_float64_is_rounded_to_f32_first_where_the_recipe_is_f32():
    x = np.random.default_rng(3).normal(size=SHAPE) * 448
    for kind, rule in (("mxfp8_e4m3", "rceil"), ("nvfp4", None)):
        chex.assert_trees_all_equal(block_quantize(x, kind, rule=rule), block_quantize(x.astype(np.float32), kind, rule=rule))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(["mxfp8_e5m2", "mxfp4"]),
    st.sampled_from(["floor", "rceil"]),
    st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4),
)
def test_any_words(kind, rule, words):
    """Inf and NaN among them: their block's scale is NaN."""
    element = exact.ELEMENTS[kind]
    agrees(np.array([words], np.uint32), BlockFormat("own", formats.FORMATS[element], 4, "floor"), element, 4, rule)


@pytest.mark.parametrize("special", sample_cases([np.inf, -np.inf, np.nan], [-np.inf]))
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_inf_and_nan_spoil_their_block_only(kind, special):
    fmt = BLOCK_FORMATS[kind]
    x = np.random.default_rng(4).normal(size=4 * fmt.block).astype(np.float32)
    spoilt = x.copy()
    spoilt[fmt.block + 3] = special
    own = slice(fmt.block, 2 * fmt.block)
    amax = np.abs(np.delete(x, own)).max() if fmt.two_level else None
    q, without = block_quantize(spoilt, kind), block_quantize(x, kind, amax=amax)
    assert q.scales[1] == fmt.scale.nan and np.isnan(block_dequantize(q)[own]).all()
    assert (np.delete(q.codes, own) == np.delete(without.codes, own)).all() and (
        np.delete(q.scales, 1) == np.delete(without.scales, 1)
    ).all()
    assert q.tensor_scale == without.tensor_scale


@pytest.mark.parametrize("kind", sample_cases(MX, 4))
def test_what_is_representable_comes_back(kind):
    """Quantising twice changes no code (floor), and no value (rceil), for amaxes of all exponents."""
    rng = np.random.default_rng(5)
    x = as_float(rng.integers(0, 255, (400, 1), np.uint32) << 23 | rng.integers(0, 1 << 23, (400, 1), np.uint32))
    x = x * rng.uniform(-1, 1, (400, 32)).astype(np.float32)
    for rule in ("floor", "rceil"):
        q = block_quantize(x, kind, rule=rule)
        y = np.asarray(block_dequantize(q))
        finite = np.isfinite(y).all(axis=1, keepdims=True)  # rceil may round f32's last binade up to 2^128
        y = np.where(finite, y, 0)
        again = block_quantize(y, kind, rule=rule)
        assert finite.mean() > 0.9 and (np.asarray(block_dequantize(again)).view(np.uint32) == y.view(np.uint32)).all()
        if rule == "floor":
            assert finite.all() and (again.codes == q.codes).all() and (again.scales == q.scales).all()


# ---- NVFP4


def tensors() -> dict[str, np.ndarray]:
    """float32 [rows, blocks, 16]: distributions, and edges of the recipe's arithmetic."""
    rng = np.random.default_rng(6)
    normal = rng.normal(size=(64, 8, 16))
    sparse = normal * (rng.random(normal.shape) < 0.05) * (rng.random((64, 8, 1)) < 0.5)
    wide = np.exp(12 * rng.normal(size=normal.shape)) * np.sign(normal)
    bits = rng.integers(0, 1 << 32, normal.shape, np.uint32)
    finite = as_float(np.where(bits >> 23 & 0xFF == 0xFF, bits & 0x807FFFFF, bits))
    grid = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 5.5, 6])
    exact_grid = np.where(rng.random(normal.shape) < 0.5, 1, -1) * grid * 2.0 ** rng.integers(-9, 9, (64, 8, 1))
    exact_grid[0, 0, 0] = 6 * 448
    outlier = normal.copy()
    outlier[3, 2, 1] = 1e6
    blocks_apart = normal * 2.0 ** rng.integers(-40, 40, (64, 8, 1))
    with np.errstate(over="ignore"):
        drawn = {
            "normal": normal, "uniform": rng.uniform(-1, 1, normal.shape), "heavy tails": rng.standard_t(2, normal.shape),
            "wide": wide, "sparse": sparse, "bits": finite, "grid": exact_grid, "outlier": outlier, "blocks apart": blocks_apart,
            "tiny": normal * 1e-36, "subnormal": normal * 1e-40, "a few ulps": np.round(normal) * 2.0**-149,
            "huge": np.clip(normal * 1e38, -3.4e38, 3.4e38), "bf16": normal.astype(ml_dtypes.bfloat16), "negative zeros": -np.abs(sparse),
            "one": np.tile(np.eye(16), (32, 1)).reshape(64, 8, 16), "zeros": np.zeros((64, 8, 16)),
        }  # fmt: skip
    return {name: np.asarray(x).astype(np.float32) for name, x in drawn.items()}


TENSORS = tensors()


@pytest.mark.parametrize("recipe", exact.RECIPES)
def test_nvfp4_is_the_recipe(recipe):
    count = 0
    for name, x in TENSORS.items():
        for amax in (None, np.float32(1), np.float32(1e-3) * np.abs(x).max(), np.float32(3e38)):
            if amax is not None and amax == 0:
                continue
            q = block_quantize(x.reshape(len(x), -1), "nvfp4", rule=recipe, amax=amax)
            codes, scales, tensor_scale, scaled = exact.nvfp4(x, recipe, amax)
            number = ~np.isnan(scaled)  # 0/0 has no code; its scale is a NaN of either sign
            where = (name, amax)
            assert (np.asarray(q.scales) == scales & 0x7F).all(), where
            assert (np.asarray(q.codes).reshape(x.shape) == codes)[number].all(), where
            assert np.asarray(q.tensor_scale).view(np.uint32) == tensor_scale, where
            assert number.all() or (recipe != "transformer_engine" and tensor_scale == 0), where
            count += codes.size
    print(f"{recipe}: 0 mismatches of {count:,} elements")
    assert count > 350_000


@pytest.mark.full
@pytest.mark.parametrize("recipe", exact.RECIPES)
def test_nvfp4_is_the_recipe_on_many(recipe):
    rng, count = np.random.default_rng(7), 0
    for _ in range(40):
        exponents = rng.uniform(-38, 30) + rng.uniform(0, 20) * rng.normal(size=(256, 64, 1))  # decimal, a block's own
        x = (rng.normal(size=(256, 64, 16)) * 10.0 ** exponents.clip(-50, 37)).astype(np.float32)
        q = block_quantize(x.reshape(256, -1), "nvfp4", rule=recipe)
        codes, scales, tensor_scale, scaled = exact.nvfp4(x, recipe)
        number = ~np.isnan(scaled)
        assert (np.asarray(q.scales) == scales & 0x7F).all() and (np.asarray(q.codes).reshape(x.shape) == codes)[number].all()
        assert np.asarray(q.tensor_scale).view(np.uint32) == tensor_scale
        count += codes.size
    print(f"{recipe}: 0 mismatches of {count:,} elements")


@pytest.mark.parametrize("name", ["normal", "bits", "subnormal", "huge", "zeros"])
def test_nvfp4_values(name):
    q = block_quantize(TENSORS[name].reshape(SHAPE), "nvfp4")
    tensor_scale = int(np.asarray(q.tensor_scale).view(np.uint32))
    got, codes, scales = (np.asarray(x)[:8] for x in (block_dequantize(q), q.codes, q.scales))
    for row, of_row, scale in zip(got.view(np.uint32).reshape(64, 16), codes.reshape(64, 16), scales.ravel().tolist(), strict=True):
        assert row.tolist() == [exact.value("e2m1", "ue4m3", code, scale, tensor_scale) for code in of_row.tolist()]


def test_nvfp4_values_that_are_representable_come_back():
    """A tensor of e2m1 values times e4m3 scales whose largest is 6 x 448 x a power of two: no code changes."""
    rng = np.random.default_rng(8)
    codes = rng.integers(0, 16, SHAPE).astype(np.uint8)
    codes[:, 5::16] = 7
    scales = rng.integers(1, 0x7F, (SHAPE[0], SHAPE[1] // 16)).astype(np.uint8)
    scales[0] = 0x7E
    for recipe in ("transformer_engine", "modelopt"):
        q = BlockQuantized(codes, scales, jnp.float32(2.0**-5), BlockFormat("own", formats.E2M1, 16, recipe), -1)
        again = block_quantize(block_dequantize(q), "nvfp4", rule=recipe)
        assert (again.codes == codes).all() and (again.scales == scales).all() and again.tensor_scale == 2.0**-5


def test_a_tensor_for_each_leading_index():
    x = np.random.default_rng(9).normal(size=(5, 3, 32)).astype(np.float32) * np.arange(1, 6)[:, None, None]
    amax = np.abs(x).max(axis=(1, 2))
    batched, mapped = block_quantize(x, "nvfp4", amax=amax), jax.vmap(lambda x: block_quantize(x, "nvfp4"))(x)
    chex.assert_trees_all_equal(batched, mapped)
    chex.assert_trees_all_equal(block_dequantize(batched), jax.vmap(block_dequantize)(mapped))
    for i in range(5):
        chex.assert_trees_all_equal(jax.tree.map(lambda leaf, i=i: leaf[i], batched), block_quantize(x[i], "nvfp4"))


# ---- stochastic rounding


def stochastic(element: str, exact_value: Fraction, draw: int) -> int:
    low, high = encode(element, exact_value, "RZ", True), encode(element, exact_value, "RP" if exact_value > 0 else "RM", True)
    if low == high:
        return low
    part = (exact_value - decode(element, low)) / (decode(element, high) - decode(element, low))
    return high if draw < (part * 2**32).__floor__() else low


@pytest.mark.parametrize("kind", sample_cases(["mxfp8_e4m3", "mxfp4", "nvfp4"], ["mxfp8_e4m3", "mxfp4"]))
def test_stochastic_rounding(kind):
    fmt, key = BLOCK_FORMATS[kind], jax.random.key(3)
    x = np.random.default_rng(10).normal(size=(6, 64)).astype(np.float32)
    q = block_quantize(x, kind, rounding="SR", key=key)
    draws = np.asarray(jax.random.bits(key, x.shape, jnp.uint32))
    nearest = block_quantize(x, kind)
    assert (q.scales == nearest.scales).all() and (q.codes != nearest.codes).any()
    if kind == "nvfp4":
        scaled = exact.nvfp4(x.reshape(6, -1, 16), "transformer_engine")[3].reshape(x.shape)
        ratios = [Fraction(float(v)) for v in scaled.ravel()]
    else:
        exponents = np.repeat(np.asarray(q.scales).astype(int) - 127, 32, axis=1)
        ratios = [Fraction(float(v)) / Fraction(2) ** int(e) for v, e in zip(x.ravel(), exponents.ravel(), strict=True)]
    want = [stochastic(fmt.element.name, r, int(d)) for r, d in zip(ratios, draws.ravel(), strict=True)]
    assert np.asarray(q.codes).ravel().tolist() == want


# ---- shapes, jit, vmap


@pytest.mark.parametrize("kind", sample_cases(["mxfp6_e3m2", "nvfp4"], 2))
def test_any_axis_and_a_short_last_block(kind):
    block = BLOCK_FORMATS[kind].block
    x = np.random.default_rng(11).normal(size=(3, 2 * block + 5, 4)).astype(np.float32)
    filled = np.pad(x.swapaxes(1, 2), [(0, 0), (0, 0), (0, block - 5)])
    short, whole = block_quantize(x, kind, axis=1), block_quantize(filled, kind)
    assert short.codes.shape == x.shape and short.scales.shape == (3, 3, 4) and short.axis == -2
    assert (short.codes.swapaxes(1, 2) == whole.codes[..., : 2 * block + 5]).all() and (whole.codes[..., 2 * block + 5 :] == 0).all()
    assert (short.scales.swapaxes(1, 2) == whole.scales).all()
    assert (block_dequantize(short).swapaxes(1, 2) == block_dequantize(whole)[..., : 2 * block + 5]).all()
    chex.assert_trees_all_equal(short, block_quantize(x, kind, axis=-2))


@pytest.mark.parametrize("case", sample_cases(product(["mxfp4", "nvfp4"], [(0,), (3, 0), (0, 32)]), 4, str))
def test_empty(case):
    kind, shape = case
    q = block_quantize(np.zeros(shape, np.float32), kind)
    assert q.codes.shape == block_dequantize(q).shape == shape


@pytest.mark.parametrize("kind", sample_cases(["mxfp8_e4m3", "nvfp4"], 2))
def test_jit(kind):
    x = np.random.default_rng(12).normal(size=(4, 3, 40)).astype(np.float32)
    q = block_quantize(x, kind)
    jitted = jax.jit(lambda x: block_quantize(x, kind))(x)
    chex.assert_trees_all_equal(q, jitted)
    assert jitted.format == q.format == BLOCK_FORMATS[kind]
    back = jax.jit(block_dequantize)(jitted)
    assert (back == block_dequantize(q)).all() and back.dtype == jnp.float32


def test_vmap_of_an_axis_in_the_middle():
    x = np.random.default_rng(12).normal(size=(4, 3, 40)).astype(np.float32)
    rows = jax.vmap(lambda row: block_quantize(row, "mxfp6_e3m2"), in_axes=1)(x)
    chex.assert_trees_all_equal(rows, block_quantize(x.swapaxes(0, 1), "mxfp6_e3m2"))


@pytest.mark.parametrize("rule", RULES)
def test_no_float_operation_touches_a_value(rule):
    """But for products and quotients of significands, floats in [1, 2), which the machine rounds."""
    kind = "nvfp4" if RULES[rule].two_level else "mxfp8_e4m3"
    x = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda x: block_dequantize(block_quantize(x, kind, rule=rule)))(x).jaxpr
    assert float_operations(jaxpr) <= MOVES | {"mul", "div"}
    assert not {e.primitive.name for e in equations(jaxpr)} & {"gather", "scatter", "sort", "while"}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_dequantize_to_halves_rounds_once(dtype):
    q = block_quantize(np.random.default_rng(13).normal(size=SHAPE).astype(np.float32), "nvfp4")
    name = {"float16": "f16", "bfloat16": "bf16"}[np.dtype(dtype).name]
    got = np.asarray(block_dequantize(q, dtype))[:8].view(np.uint16).ravel().tolist()
    scales, codes = np.repeat(np.asarray(q.scales), 16, axis=1)[:8].ravel().tolist(), np.asarray(q.codes)[:8].ravel().tolist()
    tensor_scale = decode("f32", int(np.asarray(q.tensor_scale).view(np.uint32)))
    values = [decode("e2m1", c) * decode("ue4m3", s) * tensor_scale for c, s in zip(codes, scales, strict=True)]
    signs = [c >> 3 for c in codes]
    assert got == [encode(name, v, zero_sign=sign) for v, sign in zip(values, signs, strict=True)]


def test_codes_are_those_of_the_dtypes_that_others_use():
    """Values by ml_dtypes, whose e8m0 and e4m3 arrays are what other libraries carry."""
    x = np.random.default_rng(14).normal(size=(16, 64)).astype(np.float32)
    for kind, dtype in (
        ("mxfp8_e4m3", ml_dtypes.float8_e4m3fn),
        ("mxfp6_e2m3", ml_dtypes.float6_e2m3fn),
        ("mxfp4", ml_dtypes.float4_e2m1fn),
    ):
        q = block_quantize(x, kind)
        scales = np.asarray(q.scales).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        assert (np.asarray(q.codes).view(dtype).astype(np.float32) * np.repeat(scales, 32, axis=1) == block_dequantize(q)).all()


# ---- the f32 operations


def signed(rng, fields):
    """Codes with these exponents."""
    return rng.integers(0, 1 << 32, fields.shape, np.uint32) & 0x807FFFFF | fields.astype(np.uint32) << 23


def f32_operands(near_the_subnormal):
    """Edges, codes of all kinds, subnormal ones, and ones whose result has an exponent next to the least: by these fields of y."""
    rng = np.random.default_rng(15)
    edge = np.array([0, 1, 2, 0x3FFFFF, 0x7FFFFF, 0x800000, 0x800001, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x40C00000, 0x7F7FFFFF,
                     0x7F800000, 0x7FC00000], np.uint32)  # fmt: skip
    edge = np.concatenate([edge, edge | np.uint32(1 << 31)])
    some, fields = rng.integers(0, 1 << 32, 300_000, np.uint32), rng.integers(0, 255, 300_000)
    y_fields = np.clip(near_the_subnormal(fields) + rng.integers(-26, 4, len(fields)), 0, 254)
    a = np.concatenate([np.repeat(edge, len(edge)), some, some & 0x80FFFFFF, signed(rng, fields)])
    return a, np.concatenate([np.tile(edge, len(edge)), rng.integers(0, 1 << 32, 600_000, np.uint32), signed(rng, y_fields)])


OPERATIONS = {
    "multiply": (multiply, np.multiply, lambda fields: 127 - fields),
    "divide": (divide, np.divide, lambda fields: fields + 127),
    "multiply on integers": (multiply_on_integers, np.multiply, lambda fields: 127 - fields),
    "divide on integers": (divide_on_integers, np.divide, lambda fields: fields + 127),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_f32_products_and_quotients_by_numpy(name):
    operation, ufunc, near_the_subnormal = OPERATIONS[name]
    a, b = f32_operands(near_the_subnormal)
    with np.errstate(all="ignore"):
        want = ufunc(as_float(a), as_float(b))
    want = np.where(np.isnan(want), np.uint32(0x7FFFFFFF), want.view(np.uint32))
    assert (np.asarray(jax.jit(operation, static_argnums=2)(a, b, formats.F32)) == want).all()
    if name == "divide":
        flushed = np.where(want & 0x7F800000 == 0, want & np.uint32(1 << 31), want)
        assert (np.asarray(jax.jit(partial(divide_by_machine, flush=True))(a, b)) == flushed).all()


def test_quotients_by_a_constant_are_rounded_once():
    """XLA may multiply by the rounded reciprocal of a constant."""
    a = signed(np.random.default_rng(16), np.arange(100_003) % 255)
    for constant in (3, 7, 448, 1 / 3, 1e30):
        got = jax.jit(lambda a: divide(a, np.float32(constant).view(np.uint32), formats.F32))(a)  # noqa: B023
        with np.errstate(over="ignore"):
            assert (np.asarray(got) == (as_float(a) / np.float32(constant)).view(np.uint32)).all()


def test_a_guess_of_a_quotient_may_be_two_units_off():
    """Significands next to each other among them, whose quotients are next to powers of two."""
    rng = np.random.default_rng(17)
    n, d = (rng.integers(1 << 23, 1 << 24, 300_000) for _ in "nd")
    n[::3] = np.clip(d[::3] + rng.integers(-2, 3, len(d[::3])), 1 << 23, (1 << 24) - 1)
    n <<= 23 + (n < d)
    want = (2 * n + d) // (2 * d)
    for off in range(-2, 3):
        got, lost = jax.jit(correct_quotient)(*((v & 0xFFFFFFFF).astype(np.uint32) for v in (n, d, want + off)))
        assert (np.asarray(got) == want).all() and (np.asarray(lost) == n - want * d).all()


def test_the_reciprocal_of_transformer_engine_gives_the_same_scales():
    """It multiplies by the rounded 1 / largest where the rule "rceil" divides: no scale differs."""
    for element in ("e4m3", "e2m3", "e2m1"):  # e5m2 and e3m2 have the significand of e4m3's largest, 1.75
        words = np.array([f << 23 | fraction for f in range(255) for fraction in amax_fractions(element)], np.uint32)
        product = as_float(words) * (np.float32(1) / np.float32(exact.largest(element)))
        want = [min(max(-exact.floor_log2(1 / Fraction(float(v))), -127), 127) + 127 if v else 0 for v in product]
        q = block_quantize(as_float(words)[:, None], BlockFormat("own", formats.FORMATS[element], 1, "rceil"))
        assert q.scales[:, 0].tolist() == want


# ---- errors and names

ONES = np.ones((2, 32), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: block_quantize(ONES, "mxfp3"), ValueError, "kind: got 'mxfp3'; expected one of mxfp8_e4m3, mxfp8_e5m2"),
        (lambda: block_quantize(ONES, None), ValueError, "kind: got None; expected one of"),
        (lambda: block_quantize(ONES, "mxfp4", rule="up"), ValueError, "mxfp4: rule 'up' is not one of floor, ceil"),
        (lambda: block_quantize(ONES, "mxfp8_e4m3", rule="modelopt"), ValueError, "for elements of e2m1, not e4m3; use one of floor"),
        (lambda: block_quantize(ONES, "mxfp4", axis=2), ValueError, "axis: got 2; x has 2 axes, so expected an int from -2 to 1"),
        (lambda: block_quantize(ONES, "mxfp4", axis=(0, 1)), ValueError, r"axis: got \(0, 1\); x has 2 axes"),
        (lambda: block_quantize(np.float32(1), "mxfp4"), ValueError, r"x: got a scalar; .* expected an array \[..., K\]"),
        (lambda: block_quantize(np.ones((2, 32), np.uint8), "mxfp4"), TypeError, r"x: got uint8\[2, 32\]; expected floats"),
        (lambda: block_quantize(ONES > 0, "mxfp4"), TypeError, r"x: got bool\[2, 32\]; expected floats"),
        (lambda: block_quantize(ONES * 1j, "mxfp4"), TypeError, "x: an array of dtype complex64 holds no real numbers"),
        (lambda: block_quantize(ONES, "mxfp4", rounding="RNA"), ValueError, "rounding='RNA' is not one of RN, RZ, RM, RP, SR"),
        (lambda: block_quantize(ONES, "mxfp4", rounding="SR"), ValueError, "needs random bits: give key="),
        (lambda: block_quantize(ONES, "mxfp4", amax=1.0), ValueError, "amax: mxfp4 .* has no scale for the whole tensor"),
        (lambda: block_quantize(ONES, "nvfp4", amax=np.ones(3)), ValueError, r"amax: got shape \[3\]; expected a scalar, .* \[2\]"),
        (lambda: block_quantize(ONES, "nvfp4", amax=np.ones(2), axis=0), ValueError, r"amax: got shape \[2\]; expected a scalar, .* \[\]"),
        (lambda: block_quantize(ONES, "nvfp4", amax=1), TypeError, "amax: got int64"),
        (lambda: BlockFormat("own", formats.S8, 32, "floor"), ValueError, "own: an element is a signed float format .* not s8"),
        (lambda: BlockFormat("own", formats.UE4M3, 32, "floor"), ValueError, "not ue4m3"),
        (lambda: BlockFormat("own", formats.E4M3, 0, "floor"), ValueError, "own: block is 0; expected the number of elements"),
        (lambda: block_dequantize(ONES), TypeError, "q: got ndarray; expected a BlockQuantized"),
        (lambda: block_dequantize(block_quantize(ONES, "mxfp4"), np.float64), TypeError, "dtype: got float64; expected float32, float16"),
        (lambda: broken(codes=np.zeros((2, 32), np.int32)), TypeError, r"codes: got int32\[2, 32\]; expected uint8"),
        (lambda: broken(scales=np.zeros((2, 2), np.uint8)), ValueError, r"scales: got uint8\[2, 2\] for codes .* expected \[2, 1\]"),
        (lambda: broken(axis=1), ValueError, "axis: got 1; codes have 2 axes, so expected one from -2 to -1"),
        (lambda: broken(tensor_scale=np.float32(1)), ValueError, "tensor_scale: got 1.0; mxfp4 .* has none"),
        (lambda: broken(format=BlockFormat("own", formats.E2M1, 32, "modelopt")), ValueError, "tensor_scale: got None; own .* needs one"),
    ],
)  # fmt: skip
def test_errors(call, error, said):
    with pytest.raises(error, match=said):
        call()


def broken(**changes):
    q = block_quantize(ONES, "mxfp4")
    fields = {name: getattr(q, name) for name in ("codes", "scales", "tensor_scale", "format", "axis")}
    return block_dequantize(BlockQuantized(**{**fields, **changes}))


def test_what_it_prints():
    x = np.full((2, 32), 3.0, np.float32)
    assert repr(block_quantize(x, "mxfp8_e4m3")) == "mxfp8_e4m3: uint8[2, 32] e4m3 in blocks of 32, scales uint8[2, 1] ue8m0"
    nvfp4 = block_quantize(x.T, "nvfp4", axis=0)
    assert repr(nvfp4).startswith("nvfp4: uint8[32, 2] e2m1 in blocks of 16 along axis -2, scales uint8[2, 2] ue4m3, tensor scale 0.0011")
    assert "tensor scale float32[2]" in repr(jax.eval_shape(jax.vmap(lambda x: block_quantize(x, "nvfp4")), x))
    assert "tensor scale float32[]" in repr(jax.eval_shape(lambda x: block_quantize(x, "nvfp4"), x))
    assert repr(BLOCK_FORMATS["nvfp4"]) == "nvfp4 (blocks of 16 e2m1, scale ue4m3 by 'transformer_engine')"


def test_the_public_names_and_the_table():
    assert tcemu.quantize.block_quantize is block_quantize and tcemu.quantize.BlockFormat is BlockFormat
    assert set(BLOCK_FORMATS) == {*MX, "nvfp4"} and set(RULES) == {*POWERS, *exact.RECIPES}
    assert all(len(rule.source) > 10 for rule in (*RULES.values(), *BLOCK_FORMATS.values()))
    assert all(BLOCK_FORMATS[kind].element.name == element for kind, element in exact.ELEMENTS.items())
