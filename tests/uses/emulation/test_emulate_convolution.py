"""Convolutions as one product of patches: exact on integers, whatever strides, dilations, padding, groups and orders of dimensions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.sampling import sample_cases

import tcemu
from tcemu.operations.products import im2col as patches

LAYOUTS = {1: ("NCH", "OIH", "NCH"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("CNDHW", "DOIHW", "NDHCW")}


def case(rng, rank):
    """Arguments of `lax.conv_general_dilated` with small integers, whose sums any order gives exactly."""
    groups, per_group, window = int(rng.integers(1, 4)), int(rng.integers(1, 3)), rng.integers(1, 4, rank)
    by_batch = bool(rng.integers(2))
    batch, outputs = (groups * int(rng.integers(1, 3)), groups * 2) if by_batch else (2, groups * int(rng.integers(1, 3)))
    features = per_group if by_batch else groups * per_group
    space = rng.integers(4, 8, rank)
    specs = lax.conv_dimension_numbers((1,) * (rank + 2), (1,) * (rank + 2), LAYOUTS[rank])
    lhs = rng.integers(-4, 5, (batch, features, *space)).astype(np.float32).transpose(np.argsort(specs.lhs_spec))
    rhs = rng.integers(-4, 5, (outputs, per_group, *window)).astype(np.float32).transpose(np.argsort(specs.rhs_spec))
    options = {
        "window_strides": rng.integers(1, 4, rank).tolist(),
        "padding": [tuple(pair) for pair in rng.integers(-1, 3, (rank, 2)).tolist()],
        "lhs_dilation": rng.integers(1, 3, rank).tolist(),
        "rhs_dilation": rng.integers(1, 3, rank).tolist(),
        "dimension_numbers": LAYOUTS[rank],
        "feature_group_count": 1 if by_batch else groups,
        "batch_group_count": groups if by_batch else 1,
    }
    return lhs, rhs, options


def checks(count, seed=0):
    rng = np.random.default_rng(seed)
    for number in range(count):
        lhs, rhs, options = case(rng, 1 + number % 3)
        fn = lambda x, w, options=options: lax.conv_general_dilated(x, w, **options)
        emulated = tcemu.emulate(fn, [("*", lax.dot_general)], convolutions=True)
        np.testing.assert_array_equal(jax.jit(emulated)(lhs, rhs), fn(lhs, rhs), err_msg=str(options))
        assert len(emulated.report(lhs, rhs).replaced) == 1


def test_a_sample_of_convolutions():
    checks(3)


@pytest.mark.full
@pytest.mark.parametrize("part", range(40))
def test_many_convolutions(part):
    """A thousand convolutions, each a program of its own."""
    checks(25, 1 + part)


IMAGE = ("NHWC", "HWIO", "NHWC")


def network(x, w):
    y = lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=IMAGE)
    return lax.conv_general_dilated(y, w[:, :, :2, :2], (1, 1), "VALID", dimension_numbers=IMAGE)


def test_gradients_go_through_the_patches():
    """Those of `grad(emulate(f))`, whose backward is the products', and of `emulate(grad(f))`, where they are convolutions themselves."""
    x, w = (np.random.default_rng(0).integers(-2, 3, shape).astype(np.float32) for shape in ((2, 9, 9, 3), (3, 3, 3, 2)))
    loss = lambda x, w: (network(x, w) ** 2).sum()
    wanted = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    rules = [("*", lax.dot_general)]
    for found in (
        jax.grad(tcemu.emulate(loss, rules, convolutions=True), (0, 1)),
        tcemu.emulate(jax.grad(loss, (0, 1)), rules, convolutions=True),
    ):
        jax.tree.map(np.testing.assert_array_equal, jax.jit(found)(x, w), wanted)


def test_a_convolution_is_left_unless_it_is_asked_for():
    x, w = np.ones((1, 5, 5, 3), np.float32), np.ones((3, 3, 3, 2), np.float32)
    emulated = tcemu.emulate(network, [("*", lax.dot_general)])
    report = emulated.report(x, w)
    assert [e.reason for e in report] == ["a convolution; convolutions=True takes it as a product of patches"] * 2
    assert [e.name for e in report] == ["conv_general_dilated", "conv_general_dilated.1"]
    with pytest.warns(UserWarning, match="no product is replaced .*convolutions=True"):
        np.testing.assert_array_equal(emulated(x, w), network(x, w))
    by_policy = tcemu.emulate(network, lambda p: lax.dot_general if p.name.endswith(".1") else None, convolutions=True)
    assert [e.replaced for e in by_policy.report(x, w)] == [False, True]


@pytest.mark.full
def test_a_depthwise_convolution_sums_over_its_window():
    """One feature in, one out, and still a product."""
    x, w = np.ones((1, 5, 5, 3), np.float32), np.full((3, 3, 1, 3), 2, np.float32)
    fn = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=IMAGE, feature_group_count=3)
    emulated = tcemu.emulate(fn, [("*", lax.dot_general)], convolutions=True)
    (product,) = emulated.report(x, w).replaced
    assert product.is_contraction
    np.testing.assert_array_equal(emulated(x, w), np.full((1, 3, 3, 3), 18))


def test_what_the_product_of_patches_is_given():
    seen = []

    def product(lhs, rhs, numbers, **kwargs):
        seen.append((lhs.shape, rhs.shape, numbers, kwargs["preferred_element_type"]))
        return lax.dot_general(lhs, rhs, numbers, **kwargs)

    x, w = jnp.ones((2, 8, 8, 6), jnp.bfloat16), jnp.ones((3, 3, 2, 12), jnp.bfloat16)
    fn = lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "VALID", dimension_numbers=IMAGE, feature_group_count=3, preferred_element_type=jnp.float32
    )
    assert tcemu.emulate(fn, [("*", product)], convolutions=True)(x, w).dtype == jnp.float32
    assert seen == [((3, 2 * 36, 9 * 2), (3, 9 * 2, 4), (((2,), (1,)), ((0,), (0,))), jnp.float32)]


# ---- cut patches

CUTS = {  # most elements of a piece: three images in pieces of two, of one, of some lines
    "images": 2 * 5 * 4 * 24,
    "an image": 5 * 4 * 24,
    "lines": 3 * 4 * 24,
    "a line": 1,
}


def whole_and_cut(monkeypatch, fn, operands, most):
    """fn's results and gradients with all patches at once, and in pieces."""
    found = []
    for limit in (1 << 40, most):
        monkeypatch.setattr(patches, "MOST_ELEMENTS", limit)
        y, pull = jax.vjp(jax.jit(lambda *x: fn(*x)), *operands)
        found.append((y, *pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))))
    return found


def cut_case(name):
    """A convolution emulated by a recipe, and its operands: no window stands on some pixels, which are large."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(3, 12, 11, 4)).astype(np.float32), rng.normal(size=(3, 2, 4, 5)).astype(np.float32)
    x[:, 11], x[:, :, 2] = 100, 100
    fn = lambda x, w: lax.conv_general_dilated(x, w, (2, 3), "VALID", dimension_numbers=IMAGE)
    emulated = tcemu.emulate(fn, tcemu.get_recipe(name), convolutions=True, parameters="w")
    assert fn(x, w).shape[1:3] == (5, 4)
    return emulated, (x, w)


@pytest.mark.full
def test_cut_patches_change_no_bit_of_the_result(monkeypatch):
    """The scale of the tensor is that of the patches all the same."""
    emulated, operands = cut_case("fp8")
    found = []
    for limit in (1 << 40, CUTS["lines"]):
        monkeypatch.setattr(patches, "MOST_ELEMENTS", limit)
        found.append(np.asarray(jax.jit(lambda *x: emulated(*x))(*operands)))
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


@pytest.mark.full
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ("fp8", "deepseek", "nvfp4", "mxfp8", "fp8_rows"))
def test_cut_patches_change_no_bit(monkeypatch, name, cut):
    emulated, operands = cut_case(name)
    (y, dx, dw), (cut_y, cut_dx, cut_dw) = whole_and_cut(monkeypatch, emulated, operands, CUTS[cut])
    for whole, in_pieces in ((y, cut_y), (dw, cut_dw)):
        np.testing.assert_array_equal(np.asarray(whole).view(np.uint32), np.asarray(in_pieces).view(np.uint32))
    if "image" in cut:
        np.testing.assert_array_equal(np.asarray(dx).view(np.uint32), np.asarray(cut_dx).view(np.uint32))
    np.testing.assert_allclose(dx, cut_dx, rtol=1e-5, atol=1e-5)  # of lines: the sums over windows in another order
    assert np.abs(dx).max() > 0.1


@pytest.mark.parametrize("backward", sample_cases(("emulated", "exact"), ()))
def test_cut_patches_of_any_convolution(monkeypatch, backward):
    """On integers, whose sums are exact in any order, also over the windows."""
    recipe = tcemu.get_recipe("tf32", backward="exact")
    recipe = recipe if backward == "exact" else recipe.replace(backward=recipe)
    rng = np.random.default_rng(5)
    monkeypatch.setattr(patches, "MOST_ELEMENTS", 40)
    for rank in (1, 2, 3):
        lhs, rhs, options = case(rng, rank)
        fn = lambda x, w, options=options: lax.conv_general_dilated(x, w, **options)
        y, pull = jax.vjp(tcemu.emulate(fn, recipe, convolutions=True), lhs, rhs)
        wanted, plain = jax.vjp(fn, lhs, rhs)
        g = rng.integers(-3, 4, y.shape).astype(np.float32)
        jax.tree.map(np.testing.assert_array_equal, (y, *pull(g)), (wanted, *plain(g)))


def test_what_is_not_cut(monkeypatch):
    """Random bits, and blocks of rows, would be others."""
    monkeypatch.setattr(patches, "MOST_ELEMENTS", 1)
    x, windows = jax.ShapeDtypeStruct((1, 3, 4, 9, 11), jnp.float32), patches.Windows((3, 3), (2, 2), (1, 1), 1)
    tcast = tcemu.get_recipe("bf16")
    assert patches.plan_pieces(tcast, windows, x) == patches.Pieces(images=1, lines=1, batch=3, height=4, inner=5)
    blocks = tcemu.quantize.Quantizer("block", (16, 128), saturate=True)
    for recipe in (
        tcast.replace(a=tcemu.quantize.Quantizer(rounding="SR", saturate=True)),
        tcemu.get_recipe("deepseek", a=blocks),
        tcast.replace(backward=(tcemu.get_recipe("deepseek", a=blocks), tcast)),
    ):
        assert patches.plan_pieces(recipe, windows, x) is None
