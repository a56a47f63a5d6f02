"""Models of flax, equinox and haiku with every product by a recipe, in one line, held against a loop of single instructions.

The other way to reach a model's products: `jax.lax.dot_general` and `jnp.einsum` are replaced while it runs, by `looped`, written here.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tcemu
from tcemu.formats import from_float, to_float

MMA = "mma.sync.aligned.m16n8k{}.row.col.f32.{}.{}.f32"
TENSOR = {"a": tcemu.Quantizer("tensor"), "b": tcemu.Quantizer("tensor")}
E5M2 = tcemu.Recipe(MMA.format(32, "e5m2", "e5m2"), "sm_90a", name="e5m2 by tensor", **TENSOR)
FORWARD = {
    "f16": tcemu.Recipe(MMA.format(16, "f16", "f16"), "sm_90a"),
    "bf16": tcemu.Recipe(MMA.format(16, "bf16", "bf16"), "sm_90a"),
    "tf32": tcemu.Recipe(MMA.format(8, "tf32", "tf32"), "sm_80"),
    "e4m3": tcemu.Recipe(MMA.format(32, "e4m3", "e4m3"), "sm_89"),
    "e4m3 by tensor": tcemu.Recipe(MMA.format(32, "e4m3", "e4m3"), "sm_90a", **TENSOR),
}
RECIPES = {name: recipe.replace(name=name, backward=E5M2) for name, recipe in FORWARD.items()}


# ---- a matrix product as a loop over tcemu.dot


def quantized(fmt, quantizer, x):
    """Codes, and the scale that they stand under, for recipes without scales or with one for a tensor."""
    if quantizer.scaling == "none":
        return from_float(fmt, x, saturate=True), jnp.float32(1)
    largest = to_float(fmt, np.array(fmt.greatest_magnitude << fmt.unused_bits, fmt.dtype))
    amax = jnp.max(jnp.abs(x))
    scale = lax.optimization_barrier(jnp.where(amax == 0, jnp.float32(1), amax / lax.optimization_barrier(largest)))
    return from_float(fmt, x / scale, saturate=True), scale


def tiles(x, rows, columns):
    """[..., R, C] of codes -> [..., R / rows, C / columns, rows, columns], zeros where it is not full."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % rows), (0, -x.shape[-1] % columns)])
    x = x.reshape(*x.shape[:-2], x.shape[-2] // rows, rows, x.shape[-1] // columns, columns)
    return jnp.swapaxes(x, -2, -3)


@partial(jax.jit, static_argnums=0)
def one_product(recipe, a, b):
    """a [..., M, K] · b [..., K, N] in f32, instruction by instruction along K, all its tiles at once."""
    op = recipe.op
    (x, scale_a), (y, scale_b) = quantized(op.a, recipe.a, a), quantized(op.b, recipe.b, b)
    x, y = tiles(x, op.m, op.k), tiles(y, op.k, op.n)
    d = jnp.zeros((*x.shape[:-4], x.shape[-4], y.shape[-3], op.m, op.n), jnp.uint32)
    for k in range(x.shape[-3]):
        d = tcemu.dot(op, x[..., :, k, None, :, :], y[..., None, k, :, :, :], d, target=recipe.target)
    d = jnp.swapaxes(to_float(op.d, d), -2, -3)
    d = d.reshape(*d.shape[:-4], d.shape[-4] * op.m, -1)[..., : a.shape[-2], : b.shape[-1]]
    return d if recipe.a.scaling == "none" else d * lax.optimization_barrier(scale_a * scale_b)


def looped(recipe):
    """`lax.dot_general` by hand, with a backward pass by hand."""

    @jax.custom_vjp
    def product(a, b):
        return one_product(recipe, a, b)

    def backward(operands, g):
        a, b = operands
        inner = recipe.backward
        return one_product(inner, g, jnp.swapaxes(b, -1, -2)), one_product(inner, jnp.swapaxes(a, -1, -2), g)

    product.defvjp(lambda a, b: (one_product(recipe, a, b), (a, b)), backward)

    def dot_general(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None):
        (left, right), (left_batch, right_batch) = dimension_numbers
        rows = [i for i in range(lhs.ndim) if i not in (*left, *left_batch)]
        columns = [i for i in range(rhs.ndim) if i not in (*right, *right_batch)]
        at = lambda x, axes: [x.shape[i] for i in axes]  # noqa: E731
        a = lhs.transpose(*left_batch, *rows, *left).reshape(*at(lhs, left_batch), int(np.prod(at(lhs, rows))), -1)
        b = rhs.transpose(*right_batch, *right, *columns).reshape(*at(rhs, right_batch), a.shape[-1], -1)
        return product(a, b).reshape(*at(lhs, left_batch), *at(lhs, rows), *at(rhs, columns))

    return dot_general


def forget_products():
    """jnp.matmul and jnp.dot keep the programs that they traced, with whatever product there was."""
    for function in (jnp.matmul, jnp.dot):
        function.clear_cache()


@pytest.fixture
def by_hand(monkeypatch):
    """Runs a function with its products by `looped`."""

    def run(recipe, fn, *args):
        dot_general, einsum = looped(recipe), jnp.einsum
        forget_products()
        with monkeypatch.context() as patch:
            patch.setattr(lax, "dot_general", dot_general)
            patch.setattr("jax._src.lax.lax.dot_general", dot_general)
            patch.setattr(jnp, "einsum", lambda *args, **kwargs: einsum(*args, **{**kwargs, "_dot_general": dot_general}))
            found = fn(*args)
        forget_products()
        return found

    return run


# ---- the models: each a function of parameters and an input, and its parameters


def linen_model(kind):
    nn = pytest.importorskip("flax.linen", reason="flax is not installed (pip install 'tcemu[flax]')")

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(y, y)
            return x + nn.Dense(16)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16)(nn.relu(nn.Dense(16)(x)))

    model = {"encoder": Encoder, "mlp": MLP}[kind]()
    return model.apply, model.init(jax.random.key(0), X)


def nnx_model(kind):
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed (pip install 'tcemu[flax]')")

    class Encoder(nnx.Module):
        def __init__(self, rngs):
            self.norms = nnx.List([nnx.LayerNorm(16, rngs=rngs) for _ in range(2)])
            self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=16, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(self.norms[0](x))
            return x + self.down(nnx.gelu(self.up(self.norms[1](x))))

    class MLP(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    graph, state = nnx.split({"encoder": Encoder, "mlp": MLP}[kind](nnx.Rngs(0)))
    return lambda state, x: nnx.merge(graph, state)(x), state


def equinox_model(kind):
    eqx = pytest.importorskip("equinox", reason="equinox is not installed (pip install 'tcemu[test]')")

    class Encoder(eqx.Module):
        norms: list
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP

        def __init__(self, key):
            one, two = jax.random.split(key)
            self.norms = [eqx.nn.LayerNorm(16), eqx.nn.LayerNorm(16)]
            self.attention = eqx.nn.MultiheadAttention(2, 16, key=one)
            self.mlp = eqx.nn.MLP(16, 16, 16, 1, jax.nn.gelu, key=two)

        def __call__(self, x):
            y = jax.vmap(self.norms[0])(x)
            x = x + self.attention(y, y, y)
            return x + jax.vmap(lambda row: self.mlp(self.norms[1](row)))(x)

    model = Encoder(jax.random.key(0)) if kind == "encoder" else eqx.nn.MLP(16, 16, 16, 1, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_array)
    rows = 1 if kind == "encoder" else 2  # axes that the model does not have
    return lambda arrays, x: _mapped(eqx.combine(arrays, rest), rows)(x), arrays


def _mapped(fn, times):
    return fn if times == 0 else jax.vmap(_mapped(fn, times - 1))


def haiku_model(kind):
    hk = pytest.importorskip("haiku", reason="dm-haiku is not installed")
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 16])(x)))
    return model.apply, model.init(jax.random.key(0), X)


X = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 16)), jnp.float32)
MODELS = {
    "linen encoder": (linen_model, 8), "linen mlp": (linen_model, 2), "nnx encoder": (nnx_model, 8), "nnx mlp": (nnx_model, 2),
    "equinox encoder": (equinox_model, 8), "equinox mlp": (equinox_model, 2), "haiku mlp": (haiku_model, 2),
}  # fmt: skip
SAMPLE = [  # each recipe once
    ("nnx encoder", "tf32"), ("linen mlp", "bf16"), ("nnx mlp", "e4m3"), ("equinox mlp", "e4m3 by tensor"), ("haiku mlp", "f16"),
]  # fmt: skip


def check(model, recipe, by_hand):
    make, count = MODELS[model]
    recipe = RECIPES[recipe]
    apply, params = make(model.split()[1])

    emulated = tcemu.emulate(apply, recipe)  # the one line

    def loss(apply):
        def run(params, x):
            y = apply(params, x)
            return (y * y).sum(), y

        return run

    report = emulated.report(params, X)
    assert len(report.replaced) == len(report) == count
    (found, y), gradients = jax.value_and_grad(loss(emulated), (0, 1), has_aux=True)(params, X)
    (wanted, y_wanted), by_loop = by_hand(recipe, jax.value_and_grad(loss(apply), (0, 1), has_aux=True), params, X)
    same = lambda a, b: np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))  # noqa: E731
    same(y, y_wanted)
    same(found, wanted)
    jax.tree.map(same, gradients, by_loop)
    assert not np.array_equal(y, apply(params, X))
    assert sum(bool((leaf != 0).any()) for leaf in jax.tree.leaves(gradients)) == len(jax.tree.leaves(gradients))


@pytest.mark.parametrize(("model", "recipe"), SAMPLE)
def test_a_model_has_the_bits_of_a_loop_of_instructions(model, recipe, by_hand):
    check(model, recipe, by_hand)


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_with_every_recipe(model, recipe, by_hand):
    check(model, recipe, by_hand)
