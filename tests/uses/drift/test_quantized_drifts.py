"""Drifts of quantisers and of scales: another rule, another extent of the largest magnitude, a scale before or after a product."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.drift_records import MATRIX_PRODUCT, recorded
from support.sampling import sample_cases

from tcemu.drift import locate, record

F32, E4M3 = np.float32, ml_dtypes.float8_e4m3fn
LARGEST = F32(448)
RNG = np.random.default_rng(7)
X = jnp.asarray(RNG.standard_normal((6, 64)) * np.exp(RNG.standard_normal((6, 64))), F32)
W = jnp.asarray(RNG.standard_normal((64, 5)), F32)


def model(x, w):
    @jax.jit
    def quantize(x):
        blocks = jnp.abs(x).reshape(6, 2, 32).max(-1)
        scale = jnp.exp2(jnp.floor(jnp.log2(blocks)) - 8)
        return jnp.clip(x / jnp.repeat(scale, 32, 1), -LARGEST, LARGEST).astype(E4M3), scale

    codes, scale = quantize(x * F32(1.5))
    return (codes.astype(F32) * jnp.repeat(scale, 32, 1)) @ w


def planted(rule, extent="block"):
    """Codes and scales by another rule, in plain NumPy."""

    def quantize(x):
        size = np.abs(x).reshape(6, 2, 32)
        amax = {"block": size.max(-1), "row": size.max((1, 2))[:, None].repeat(2, 1), "tensor": np.full((6, 2), size.max())}[extent]
        scale = rule(amax.astype(F32)).astype(F32)
        spread = scale.repeat(32, 1)
        return np.clip(x / spread, -LARGEST, LARGEST).astype(E4M3), scale

    return quantize


floor = lambda amax: np.ldexp(F32(1), np.frexp(amax)[1] - 1 - 8)
ceil = lambda amax: np.ldexp(F32(1), np.ceil(np.log2(amax.astype(np.float64))).astype(int) - 8)
rceil = lambda amax: np.ldexp(F32(1), np.ceil(np.log2((amax / LARGEST).astype(np.float64))).astype(int))


def even(amax):  # the magnitude rounded half up to the element's three bits, then its exponent
    fraction, exponent = np.frexp(amax.astype(np.float64))
    rounded = np.floor(fraction * 16 + 0.5) / 16
    return np.ldexp(F32(1), np.where(rounded >= 1, exponent, exponent - 1) - 8)


PLANTS = {
    "ceil": (planted(ceil), {"quantisation rule"}),
    "even": (planted(even), {"quantisation rule"}),
    "rceil": (planted(rceil), {"quantisation rule"}),
    "f32 scales": (planted(lambda amax: amax / LARGEST), {"quantisation rule"}),
    "amax of a row": (planted(floor, "row"), {"extent of amax"}),
    "amax of the tensor": (planted(floor, "tensor"), {"extent of amax"}),
    "f32 scales of a row": (planted(lambda amax: amax / LARGEST, "row"), {"quantisation rule", "extent of amax"}),
    "f32 scales by a product": (planted(lambda amax: amax * (F32(1) / LARGEST)), {"quantisation rule"}),
}  # fmt: skip


@pytest.mark.parametrize("name", sample_cases(PLANTS, ["amax of a row"]))
def test_another_quantisation_is_found_and_named(name):
    plant, kinds = PLANTS[name]
    left = record(model, whole=("quantize",))(X, W)
    substitute = lambda number, op, operands, results: list(plant(operands[0])) if op == "jit:quantize" else None
    right = record(model, whole=("quantize",), substitute=substitute)(X, W)
    drift = locate(left, right, targets=())
    (source,) = drift.sources
    assert source.name == "jit:quantize" and set(source.cause.kinds) == kinds, str(drift)


def test_a_quantiser_that_no_rule_gives_is_unexplained():
    substitute = lambda number, op, o, r: [r[0], np.nextafter(r[1], F32(9))] if op == "jit:quantize" else None
    drift = locate(*(record(model, whole=("quantize",), substitute=s)(X, W) for s in (None, substitute)), targets=())
    (source,) = drift.sources
    assert "unexplained" in source.cause.right and "scales by floor" in source.cause.left, str(drift)


# ---- scales in another place


def fused_chain(a, b):
    """f32 fma chains of small operands whose products are exact in f64."""
    total = np.zeros((len(a), b.shape[1]), F32)
    for x, y in zip(a.T.astype(np.float64), b.astype(np.float64), strict=True):
        total = (x[:, None] * y + total).astype(F32)
    return total


A, B = (RNG.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((5, 24), (24, 4)))
SCALE, OTHER = np.array(0.3, F32), np.array(1.7, F32)
AFTER = F32(fused_chain(A.astype(F32), B.astype(F32)) * SCALE)
BEFORE = fused_chain(F32(A.astype(F32) * SCALE), B.astype(F32))
ROUNDED = fused_chain((A.astype(F32) * SCALE).astype(ml_dtypes.bfloat16).astype(F32), B.astype(F32))


def scaled_product(result):
    """A recorded product and its scale, whose result is given."""
    total = fused_chain(A.astype(F32), B.astype(F32))
    return recorded([("dot_general", [A, B], [total], MATRIX_PRODUCT), ("mul", [total, SCALE], [result], {})])


def prescaled_product(result):
    """The scale multiplies the operand, operation by operation."""
    scaled = F32(A.astype(F32) * SCALE)
    return recorded([("mul", [A.astype(F32), SCALE], [scaled], {}), ("dot_general", [scaled, B.astype(F32)], [result], MATRIX_PRODUCT)])


def postscaled_product(result):
    total = fused_chain(A.astype(F32), B.astype(F32))
    wide = [A.astype(F32), B.astype(F32)]
    return recorded([("dot_general", wide, [total], MATRIX_PRODUCT), ("mul", [total, SCALE], [result], {})])


@pytest.mark.parametrize(("result", "words"), [(BEFORE, "before the sum"), (ROUNDED, "rounded to bfloat16")])
def test_a_scale_before_a_product_is_named(result, words):
    drift = locate(scaled_product(AFTER), scaled_product(result), targets=())
    (source,) = drift.sources
    assert source.cause.kinds == ("scale before or after",) and words in source.cause.right, str(drift)


@pytest.mark.full
def test_a_scale_that_was_recorded_on_the_other_side_of_a_product_is_named():
    for left, right in ((postscaled_product(AFTER), prescaled_product(BEFORE)), (prescaled_product(BEFORE), postscaled_product(AFTER))):
        drift = locate(left, right, targets=())
        (source,) = drift.sources
        assert source.cause.kinds == ("scale before or after",) and source.cause.explained, str(drift)


def test_the_order_of_two_scales_is_named():
    x = A.astype(F32)
    once, folded = F32(F32(x * SCALE) * OTHER), F32(x * F32(SCALE * OTHER))
    side = lambda result: recorded([("mul", [x, SCALE], [F32(x * SCALE)], {}), ("mul", [F32(x * SCALE), OTHER], [result], {})])
    (source,) = locate(side(once), side(folded), targets=()).sources
    assert source.cause.kinds == ("scale before or after",) and "each other first" in source.cause.right


# ---- NVFP4: scales of blocks below a scale of the tensor

WIDE = (RNG.standard_normal((48, 128)) * np.exp(RNG.uniform(-11, 0, (48, 1)))).astype(F32)


def e4m3(x):
    return np.clip(x, 0, LARGEST).astype(E4M3)


def te_scales(blocks, whole):
    encode = F32(2688) / whole
    scale = e4m3(blocks * (encode * F32(1 / 6)))
    return scale, F32(1) / encode, lambda x: x * (F32(1) / (scale.astype(F32) * (F32(1) / encode)))[..., None]


def modelopt_scales(blocks, whole):
    tensor = whole / F32(2688)
    scale = e4m3(np.maximum(blocks / (F32(6) * tensor), F32(2.0**-9)))
    return scale, tensor, lambda x: x / (scale.astype(F32) * tensor)[..., None]


def torchao_scales(blocks, whole):
    tensor = whole / F32(2688)
    scale = e4m3(np.maximum(blocks / F32(6) / tensor, F32(2.0**-6)))
    return scale, tensor, lambda x: x * (F32(1) / tensor / scale.astype(F32))[..., None]


def block_scales_alone(blocks, whole):
    scale = e4m3(np.maximum(blocks / F32(6), F32(2.0**-6)))
    return scale, F32(1), lambda x: x * (F32(1) / scale.astype(F32))[..., None]


def nvfp4(scales, form="packed", inverse=False):
    blocks = WIDE.reshape(48, 8, 16)
    scale, tensor, apply = scales(np.abs(blocks).max(-1), np.abs(WIDE).max())
    elements = np.clip(apply(blocks), -6, 6).astype(ml_dtypes.float4_e2m1fn)
    if form == "values":
        return [(elements.astype(F32) * scale.astype(F32)[..., None] * tensor).reshape(WIDE.shape)]
    codes = elements.view(np.uint8).reshape(48, 128)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return [packed, scale, np.asarray(F32(1) / tensor if inverse else tensor, F32)]


NVFP4 = {  # both sides, the hypotheses, and words of both
    "levels": (nvfp4(torchao_scales), nvfp4(block_scales_alone), {"levels of scales", "quantisation rule"}, "torchao", "without a scale"),
    "rules": (nvfp4(te_scales), nvfp4(modelopt_scales), {"quantisation rule"}, "Transformer Engine", "Model Optimizer"),
    "rules of values": (nvfp4(te_scales, "values"), nvfp4(torchao_scales, "values"), {"quantisation rule"}, "Transformer", "torchao"),
    "stored scale": (nvfp4(te_scales), nvfp4(te_scales, inverse=True), {"stored scale"}, "Transformer Engine", "the inverse scale"),
}  # fmt: skip


@pytest.mark.parametrize("case", sample_cases(NVFP4, []))
def test_two_levels_of_scales_are_found_and_named(case):
    left, right, kinds, *words = NVFP4[case]
    drift = locate(*(recorded([("nvfp4_quantize", [WIDE], results, {})]) for results in (left, right)), targets=())
    (source,) = drift.sources
    assert kinds <= set(source.cause.kinds), str(drift)
    assert words[0] in source.cause.left and words[1] in source.cause.right, str(drift)


@pytest.mark.full
def test_nvfp4_of_another_rounding_is_unexplained():
    (elements, scales, tensor), up = nvfp4(te_scales), nvfp4(te_scales)[1].copy()
    up.view(np.uint8)[0, 0] += 1
    sides = [recorded([("nvfp4_quantize", [WIDE], [elements, s, tensor], {})]) for s in (scales, up)]
    (source,) = locate(*sides, targets=()).sources
    assert "Transformer Engine" in source.cause.left and "unexplained" in source.cause.right, str(source)
