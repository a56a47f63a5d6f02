"""Rules for scales, blocks and element formats of one's own, and weight-only recipes, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcemu
from tcemu.formats import E2M1, S4, S8, U4, Format, to_float
from tcemu.quantize import Quantizer

RNG = np.random.default_rng(7)
X, W = RNG.normal(size=(12, 256)).astype(np.float32), RNG.normal(size=(256, 16)).astype(np.float32)
W[:128, 3] = 0  # a group of zeros
E3M4 = Format("e3m4", 8, 3, 4, 3, specials="none")


def by_integers(x, bits, axis):
    """x as symmetric integers with f16 scales along an axis, dequantised to f16: NumPy's own float32 arithmetic."""
    top = np.float32(2 ** (bits - 1) - 1)
    amax = np.abs(x).max(axis, keepdims=True)
    scale = np.where(amax == 0, np.float32(1), (amax / top).astype(np.float16).astype(np.float32))
    return (np.clip(np.rint(x / scale), -top - 1, top) * scale).astype(np.float16)


@pytest.mark.parametrize("name", ["w4a16", pytest.param("w8a16", marks=pytest.mark.full)])
def test_weight_only_recipes_multiply_dequantised_integers(name):
    recipe = tcemu.get_recipe(name, "A100")
    w = by_integers(W, 8, 0) if name == "w8a16" else by_integers(W.reshape(2, 128, 16), 4, 1).reshape(W.shape)
    d = tcemu.matmul(X, W, recipe=recipe)
    assert np.array_equal(d, tcemu.gemm(X, w, op=recipe.op, target="A100"))
    assert tcemu.Recipe.from_json(recipe.to_json()) == recipe
    _, back = jax.vjp(lambda x, w: tcemu.matmul(x, w, recipe=recipe.replace(backward="exact")), X, W)
    dx, dw = back(jnp.ones((12, 16)))
    np.testing.assert_allclose(dx, np.broadcast_to(w.astype(np.float32).sum(1), X.shape), rtol=1e-5)
    np.testing.assert_allclose(dw, np.broadcast_to(X.astype(np.float16).astype(np.float32).sum(0)[:, None], W.shape), rtol=1e-5, atol=1e-5)
    assert np.array_equal(tcemu.emulate(lambda params, x: x @ params, f"{name} on A100")(W, X), d)


@pytest.mark.parametrize("scaling", ["block", *(pytest.param(name, marks=pytest.mark.full) for name in ("tensor", "row"))])
def test_a_rule_is_a_function_from_magnitudes_to_scales(scaling):
    """0.0625 times the magnitude is exact, so that NumPy has the same scales."""
    block = {"block": (1, 64)} if scaling == "block" else {}
    how = Quantizer(scaling, rule=lambda amax: 0.0625 * amax, saturate=True, **block)
    promoted = {"promote": 2} if block else {}
    x = X.copy()
    x[5] = 0
    recipe = tcemu.Recipe("e4m3 wgmma", "H100", a=how, **promoted)
    groups = x.reshape(12, 4, 64) if block else x
    amax = np.abs(groups).max(None if scaling == "tensor" else -1, keepdims=True)
    scale = np.where(amax == 0, np.float32(1), np.float32(0.0625) * amax).reshape(() if scaling == "tensor" else (12, -1))
    given = tcemu.Recipe("e4m3 wgmma", "H100", a=Quantizer(scaling, saturate=True, **block), **promoted)
    d = tcemu.matmul(x, W, recipe=recipe)
    assert np.array_equal(d, tcemu.matmul(x, W, recipe=given, scale_a=scale))
    assert np.array_equal(jax.jit(lambda x: tcemu.matmul(x, W, recipe=recipe))(x), d) and (np.asarray(d)[5] == 0).all()


def test_a_rule_of_the_instruction_s_blocks():
    """The power of two at or above amax / 448, as "rceil" has it."""
    own = Quantizer("block", rule=lambda amax: jnp.exp2(jnp.ceil(jnp.log2(amax * (1 / 448)))))
    products = [tcemu.matmul(X, W, recipe=tcemu.get_recipe("mxfp8", "RTX 5090", a=how)) for how in (own, Quantizer("block", rule="rceil"))]
    assert np.array_equal(*products)
    nvfp4 = tcemu.get_recipe("nvfp4", "RTX 5090", a=Quantizer("block", rule=lambda amax: amax * 0.25))
    assert np.isfinite(np.asarray(tcemu.matmul(X, W, recipe=nvfp4))).all()


def test_an_element_format_and_a_block_of_one_s_own():
    """Blocks of 64 of e3m4 and e2m1 in an f16 product, against a search for the nearest number."""
    recipe = tcemu.Recipe("f16", "A100", a=Quantizer("block", (1, 64), element=E3M4), b=Quantizer("block", (1, 64), element=E2M1))

    def dequantised(x, fmt, bits):
        numbers = np.unique(np.asarray(to_float(fmt, np.arange(1 << bits, dtype=np.uint8)), np.float32))
        blocks = x.reshape(-1, 64)
        amax = np.abs(blocks).max(1, keepdims=True)
        scale = np.where(amax == 0, np.float32(1), amax / numbers[-1])
        ratios = (blocks / scale)[..., None].astype(np.float64)
        return (numbers[np.abs(ratios - numbers).argmin(-1)] * scale).reshape(x.shape).astype(np.float16)

    a, b = dequantised(X, E3M4, 8), dequantised(np.ascontiguousarray(W.T), E2M1, 4).T
    assert np.array_equal(tcemu.matmul(X, W, recipe=recipe), tcemu.gemm(a, b, op="f16", target="A100"))
    assert "e3m4 per block of 1 x 64, scales f32, dequantised" in str(recipe)
    exact = Quantizer(element=E3M4, saturate=True)  # without scales
    assert np.array_equal(
        tcemu.matmul(X, W, recipe=tcemu.Recipe("f16", "A100", a=exact)),
        tcemu.gemm(np.asarray(to_float(E3M4, tcemu.formats.from_float(E3M4, X, saturate=True))), W, op="f16", target="A100"),
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scaling": "none", "rule": abs}, "give a scaling, one of tensor"),
        ({"scaling": "tensor", "rule": abs, "scale": "f16"}, "leave scale"),
        ({"scaling": "block", "element": S8}, "give the sizes of a block"), ({"scaling": "tensor", "element": U4}, "a signed format"),
        ({"element": "s4"}, "expected a tcemu.formats.Format"), ({"scaling": "tensor", "rule": "mine"}, "expected one of None, floor"),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other(fields, words):
    with pytest.raises(ValueError, match=words):
        Quantizer(**fields)


def test_what_a_file_cannot_hold():
    with pytest.raises(TypeError, match=r"Quantizer\.rule is a function"):
        tcemu.Recipe("f16", "A100", a=Quantizer("tensor", rule=abs)).to_json()
    with pytest.raises(TypeError, match=r"Quantizer\.element is e3m4, a format of your own"):
        tcemu.Recipe("f16", "A100", a=Quantizer("tensor", element=E3M4)).to_json()
    old = tcemu.Recipe("f16", "A100").to_json().replace(', "element": null', "")
    assert "element" not in old and tcemu.Recipe.from_json(old) == tcemu.Recipe("f16", "A100")
    with pytest.raises(ValueError, match="dequantises it by scales of its own; leave it out"):
        tcemu.matmul(X, W, recipe=tcemu.Recipe("f16", "A100", b=Quantizer("tensor", element=S4)), scale_b=np.float32(1))


def test_a_scale_in_f16_is_infinite_where_an_element_is():
    x = np.array([[np.inf, 1.0], [1.0, 2.0], [2.0, 3.0], [3.0, 4.0]], np.float32)
    d = np.asarray(tcemu.matmul(np.eye(4, dtype=np.float32), x, recipe="w8a16 on A100"))
    assert np.isnan(d[:, 0]).all() and np.isfinite(d[:, 1]).all()


def test_a_scale_of_a_rule_that_is_subnormal_is_the_least_normal_number():
    quantizer = tcemu.quantize.Quantizer("row", rule=lambda magnitude: magnitude / 448, saturate=True)
    recipe = tcemu.get_recipe("fp8_e4m3", "H100", a=quantizer, backward="exact")
    x = np.full((1, 32), 1e-38, np.float32)
    d = np.asarray(tcemu.matmul(x, np.eye(32, dtype=np.float32), recipe=recipe))
    np.testing.assert_allclose(d, x, rtol=0.1)


def test_an_element_has_f32_s_range():
    for bias in (149, -130):  # steps of 2^-150, and up to 2^161
        with pytest.raises(ValueError, match=r"quotients are in f32, which lacks some"):
            Quantizer("row", element=Format("far", 8, 5, 2, bias))
