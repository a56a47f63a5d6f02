"""Models of flax, equinox and haiku with every product by a recipe, in one line, held against a loop of single instructions.

By hand, a model is a few lines around `looped`; what is no product, such as a norm, is asked of the framework. Both are evaluated primitive
by primitive, so that XLA gives what lies between the products the same bits.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.flax_models import linen_encoder
from support.sampling import sample_cases

import tcemu
from tcemu.formats import from_float, to_float

MMA = "mma.sync.aligned.m16n8k{}.row.col.f32.{}.{}.f32"
TENSOR = dict.fromkeys("ab", tcemu.quantize.Quantizer("tensor", saturate=True))
E5M2 = tcemu.Recipe(MMA.format(32, "e5m2", "e5m2"), "sm_90a", name="e5m2 by tensor", **TENSOR)
FORWARD = {
    "f16": tcemu.Recipe(MMA.format(16, "f16", "f16"), "sm_90a"),
    "bf16": tcemu.Recipe(MMA.format(16, "bf16", "bf16"), "sm_90a"),
    "tf32": tcemu.Recipe(MMA.format(8, "tf32", "tf32"), "sm_80"),
    "e4m3": tcemu.Recipe(MMA.format(32, "e4m3", "e4m3"), "sm_89"),
    "e4m3 by tensor": tcemu.Recipe(MMA.format(32, "e4m3", "e4m3"), "sm_90a", **TENSOR),
}
RECIPES = {name: recipe.replace(name=name, backward=E5M2) for name, recipe in FORWARD.items()}
USUAL = FORWARD["bf16"].replace(name="bf16, backward too", backward=FORWARD["bf16"])  # few programs, so that every run can have it


# ---- a matrix product as a loop over tcemu.dot


LARGEST = {"e4m3": np.float32(448), "e5m2": np.float32(57344)}


def scale_operand(fmt, quantizer, x):
    """x over its scale, and the scale, for recipes without scales or with one for a tensor. NumPy divides exactly, XLA not always."""
    if quantizer.scaling == "none":
        return x, np.float32(1)
    x = np.asarray(x)
    amax = np.abs(x).max()
    scale = amax / LARGEST[str(fmt)] if amax else np.float32(1)
    return x / scale, scale


def tiles(x, rows, columns):
    """[..., R, C] of codes -> [..., R / rows, C / columns, rows, columns], zeros where it is not full."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % rows), (0, -x.shape[-1] % columns)])
    x = x.reshape(*x.shape[:-2], x.shape[-2] // rows, rows, x.shape[-1] // columns, columns)
    return jnp.swapaxes(x, -2, -3)


def one_product(recipe, a, b):
    """a [..., M, K] · b [..., K, N] in f32, of arrays that are there, no tracers."""
    (x, scale_a), (y, scale_b) = scale_operand(recipe.op.a, recipe.a, a), scale_operand(recipe.op.b, recipe.b, b)
    d = sums(recipe.replace(backward="exact"), x, y)[..., : a.shape[-2], : b.shape[-1]]
    return d if recipe.a.scaling == "none" else d * (scale_a * scale_b)


@partial(jax.jit, static_argnums=0)
def sums(recipe, x, y):
    """Rounded, and summed instruction by instruction along K, all tiles at once."""
    op = recipe.op
    x, y = (from_float(fmt, z, saturate=quantizer.saturate) for fmt, quantizer, z in ((op.a, recipe.a, x), (op.b, recipe.b, y)))
    x, y = tiles(x, op.m, op.k), tiles(y, op.k, op.n)
    d = jnp.zeros((*x.shape[:-4], x.shape[-4], y.shape[-3], op.m, op.n), jnp.uint32)
    for k in range(x.shape[-3]):
        d = tcemu.dot(op, x[..., :, k, None, :, :], y[..., None, k, :, :, :], d, target=recipe.target)
    d = jnp.swapaxes(to_float(op.d, d), -2, -3)
    return d.reshape(*d.shape[:-4], d.shape[-4] * op.m, -1)


def loop_product(recipe):
    """a [..., M, K] · b [..., K, N] by hand, with its backward pass."""

    @jax.custom_vjp
    def product(a, b):
        return one_product(recipe, a, b)

    def backward(operands, g):
        a, b = operands
        return one_product(recipe.backward, g, jnp.swapaxes(b, -1, -2)), one_product(recipe.backward, jnp.swapaxes(a, -1, -2), g)

    product.defvjp(lambda a, b: (one_product(recipe, a, b), (a, b)), backward)
    return product


def dense(dot, x, kernel, bias, axes=1):
    """The last `axes` axes of x times the first of the kernel."""
    lead, size = x.shape[: x.ndim - axes], int(np.prod(kernel.shape[:axes]))
    return dot(x.reshape(-1, size), kernel.reshape(size, -1)).reshape(*lead, *kernel.shape[axes:]) + bias


def attend(dot, q, k, v, before=None, after=None):
    """Softmax attention of [batch, tokens, heads, depth]; the scale divides the queries, or multiplies the logits.

    XLA turns a division by one number into a product with its reciprocal where it sees that it is one, so the division is the primitive
    that the frameworks' programs have: with `/`, which is a program of its own, half of the quotients differ by a bit under grad.
    """
    q = q if before is None else lax.div(q, before)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    logits = dot(q, jnp.swapaxes(k, -1, -2))
    weights = jax.nn.softmax(logits if after is None else logits * after, axis=-1)
    return jnp.swapaxes(dot(weights, v), 1, 2)


# ---- the models: a function of parameters and an input, the same by hand with its product as an argument, and the parameters


def linen_model(kind):
    nn = pytest.importorskip("flax.linen", reason="flax is not installed (pip install 'tcemu[flax]')")

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16, name="down")(nn.relu(nn.Dense(16, name="up")(x)))

    def mlp(dot, params, x, activation=nn.relu):
        p = params["params"]
        return dense(dot, activation(dense(dot, x, **p["up"])), **p["down"])

    def encoder(dot, params, x):
        p = params["params"]
        norm = lambda number, x: nn.LayerNorm().apply({"params": p[f"LayerNorm_{number}"]}, x)
        y, attention = norm(0, x), p["attention"]
        q, k, v = (dense(dot, y, **attention[name]) for name in ("query", "key", "value"))
        x = x + dense(dot, attend(dot, q, k, v, before=jnp.sqrt(8.0)), **attention["out"], axes=2)
        return x + mlp(dot, params, norm(1, x), nn.gelu)

    model, by_hand = {"encoder": (linen_encoder, encoder), "mlp": (MLP, mlp)}[kind]
    model = model()
    return model.apply, by_hand, model.init(jax.random.key(0), X)


def nnx_model(kind):
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed (pip install 'tcemu[flax]')")

    class Encoder(nnx.Module):
        def __init__(self, rngs):
            self.before, self.between = nnx.LayerNorm(16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=16, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(self.before(x))
            return x + self.down(nnx.gelu(self.up(self.between(x))))

    class MLP(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    graph, state = nnx.split({"encoder": Encoder, "mlp": MLP}[kind](nnx.Rngs(0)))
    linear = lambda dot, x, module, axes=1: dense(dot, x, module.kernel[...], module.bias[...], axes)

    def mlp(dot, state, x, activation=nnx.relu):
        model = nnx.merge(graph, state)
        return linear(dot, activation(linear(dot, x, model.up)), model.down)

    def encoder(dot, state, x):
        model = nnx.merge(graph, state)
        y, attention = model.before(x), model.attention
        q, k, v = (linear(dot, y, module) for module in (attention.query, attention.key, attention.value))
        x = x + linear(dot, attend(dot, q, k, v, after=np.float32(1 / np.sqrt(8))), attention.out, 2)
        return x + mlp(dot, state, model.between(x), nnx.gelu)

    return lambda state, x: nnx.merge(graph, state)(x), {"encoder": encoder, "mlp": mlp}[kind], state


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
            return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))

    model = Encoder(jax.random.key(0)) if kind == "encoder" else eqx.nn.MLP(16, 16, 16, 1, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_array)

    def each(fn, times):
        return fn if times == 0 else jax.vmap(each(fn, times - 1))

    def mlp(dot, arrays, x, activation=jax.nn.relu):
        up, down = getattr(arrays, "mlp", arrays).layers
        return dense(dot, activation(dense(dot, x, up.weight.T, up.bias)), down.weight.T, down.bias)

    def encoder(dot, arrays, x):
        model, attention = eqx.combine(arrays, rest), arrays.attention
        y = each(model.norms[0], 2)(x)
        names = ("query_proj", "key_proj", "value_proj")
        q, k, v = (dense(dot, y, getattr(attention, name).weight.T.reshape(16, 2, 8), 0) for name in names)
        x = x + dense(dot, attend(dot, q, k, v, before=np.float32(np.sqrt(8))), attention.output_proj.weight.T.reshape(2, 8, 16), 0, axes=2)
        return x + mlp(dot, arrays, each(model.norms[1], 2)(x), jax.nn.gelu)

    apply = lambda arrays, x: each(eqx.combine(arrays, rest), 1 if kind == "encoder" else 2)(x)
    return apply, {"encoder": encoder, "mlp": mlp}[kind], arrays


def haiku_model(kind):
    hk = pytest.importorskip("haiku", reason="dm-haiku is not installed (pip install 'tcemu[test]')")
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 16])(x)))

    def by_hand(dot, params, x):
        up, down = params["mlp/~/linear_0"], params["mlp/~/linear_1"]
        return dense(dot, jax.nn.relu(dense(dot, x, up["w"], up["b"])), down["w"], down["b"])

    return model.apply, by_hand, model.init(jax.random.key(0), X)


X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 16)), jnp.float32)  # few shapes of products, which are compiled each
MODELS = {
    "linen encoder": (linen_model, 8), "linen mlp": (linen_model, 2), "nnx encoder": (nnx_model, 8), "nnx mlp": (nnx_model, 2),
    "equinox encoder": (equinox_model, 8), "equinox mlp": (equinox_model, 2), "haiku mlp": (haiku_model, 2),
}  # fmt: skip


def same(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


def check(model, recipe):
    make, count = MODELS[model]
    apply, by_hand, params = make(model.split()[1])

    emulated = tcemu.emulate(apply, recipe)  # the one line

    def loss(apply):
        def run(params, x):
            y = apply(params, x)
            return (y * y).sum(), y

        return run

    report = emulated.report(params, X)
    assert len(report.replaced) == len(report) == count
    (found, y), gradients = jax.value_and_grad(loss(emulated), (0, 1), has_aux=True)(params, X)
    (wanted, y_wanted), by_loop = jax.value_and_grad(loss(partial(by_hand, loop_product(recipe))), (0, 1), has_aux=True)(params, X)
    same(y, y_wanted)
    same(found, wanted)
    jax.tree.map(same, gradients, by_loop)
    assert not np.array_equal(y, apply(params, X))
    assert sum(bool((leaf != 0).any()) for leaf in jax.tree.leaves(gradients)) == len(jax.tree.leaves(gradients))


@pytest.mark.parametrize("model", sample_cases(MODELS, ("equinox mlp",)))
def test_a_model_has_the_bits_of_a_loop_of_instructions(model):
    check(model, USUAL)


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_with_every_recipe(model, recipe):
    check(model, RECIPES[recipe])


@pytest.mark.full
@pytest.mark.parametrize("model", ["linen mlp", "linen encoder", "nnx encoder", "equinox encoder"])
def test_in_a_compiled_step_each_product_has_the_bits_of_the_loop(model):
    """XLA rounds what lies between the products as it fuses it; the products themselves, and their gradients, on what reaches them, not."""
    make, count = MODELS[model]
    recipe, seen = RECIPES["e4m3 by tensor"], []
    apply, _, params = make(model.split()[1])

    def noted(lhs, rhs, numbers, **kwargs):
        product = partial(tcemu.dot_general(recipe), dimension_numbers=numbers, **kwargs)

        @jax.custom_vjp
        def run(lhs, rhs):
            return product(lhs, rhs)

        def backward(operands, g):
            found = jax.vjp(product, *operands)[1](g)
            jax.debug.callback(lambda *arrays: seen.append((numbers, *map(np.asarray, arrays))), *operands, product(*operands), g, *found)
            return found

        run.defvjp(lambda lhs, rhs: (run(lhs, rhs), (lhs, rhs)), backward)
        return run(lhs, rhs)

    emulated = tcemu.emulate(apply, lambda product: noted)
    jax.block_until_ready(jax.jit(jax.grad(lambda params, x: (emulated(params, x) ** 2).sum(), (0, 1)))(params, X))
    jax.effects_barrier()
    assert len(seen) == count
    for numbers, lhs, rhs, d, g, dlhs, drhs in seen:
        (left, right), (left_batch, right_batch) = numbers
        rows, columns = (
            [i for i in range(x.ndim) if i not in (*one, *two)] for x, one, two in ((lhs, left, left_batch), (rhs, right, right_batch))
        )
        to_a, to_b = (*left_batch, *rows, *left), (*right_batch, *right, *columns)
        batch = [lhs.shape[i] for i in left_batch]
        k = int(np.prod([lhs.shape[i] for i in left]))
        a, b = lhs.transpose(to_a).reshape(*batch, -1, k), rhs.transpose(to_b).reshape(*batch, k, -1)
        same(one_product(recipe, a, b), d.reshape(*a.shape[:-1], -1))
        g = g.reshape(*a.shape[:-1], -1)
        same(one_product(E5M2, g, np.swapaxes(b, -1, -2)), dlhs.transpose(to_a).reshape(a.shape))
        same(one_product(E5M2, np.swapaxes(a, -1, -2), g), drhs.transpose(to_b).reshape(b.shape))


# ---- other ways in


def test_a_layer_takes_the_product_itself():
    """linen's, nnx's and einsum's own places for it give the bits that `emulate` gives."""
    linen = pytest.importorskip("flax.linen", reason="flax is not installed (pip install 'tcemu[flax]')")
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed (pip install 'tcemu[flax]')")
    recipe = USUAL
    product = tcemu.dot_general(recipe)
    plain, given = linen.Dense(16), linen.Dense(16, dot_general=product)
    params = plain.init(jax.random.key(0), X)
    np.testing.assert_array_equal(given.apply(params, X), tcemu.emulate(plain.apply, recipe)(params, X))
    layer, by_product = (nnx.Linear(16, 16, rngs=nnx.Rngs(0), **options) for options in ({}, {"dot_general": product}))
    np.testing.assert_array_equal(by_product(X), tcemu.emulate(layer, recipe)(X))
    w = params["params"]["kernel"]
    found = tcemu.emulate(lambda x, w: jnp.einsum("btk,kn->btn", x, w), recipe)(X, w)
    np.testing.assert_array_equal(found, jnp.einsum("btk,kn->btn", X, w, _dot_general=product))
    assert not np.array_equal(found, jnp.einsum("btk,kn->btn", X, w))


def test_a_model_that_is_a_pytree_is_seen_as_it_is():
    """An nnx or equinox model is given itself; what changes in it is seen by the next call."""
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed (pip install 'tcemu[flax]')")
    layer, recipe = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0)), USUAL
    emulated = tcemu.emulate(layer, recipe)
    first = emulated(X)
    layer.kernel[...] = 2 * layer.kernel[...]
    np.testing.assert_array_equal(emulated(X), 2 * first)
    gradient = nnx.grad(tcemu.emulate(lambda layer, x: layer(x).sum(), recipe))(layer, X)
    assert (gradient.kernel[...] != 0).all()


@pytest.mark.full
@pytest.mark.parametrize("backward", ["exact", "straight_through", FORWARD["bf16"]], ids=["exact", "straight_through", "recipe"])
def test_no_gradient_is_silently_zero(backward):
    """Through the places where a program can hide a product, each gradient is near the plain one's, and none is zero."""
    recipe = RECIPES["bf16"].replace(backward=backward)

    def fn(x, w):
        y = jax.jit(jnp.matmul)(x, w)
        y, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), y, length=2)
        y = jax.checkpoint(lambda y: jnp.tanh(y @ w))(y)
        return lax.cond(y.sum() > 0, lambda y: y @ w, lambda y: y @ -w, y).sum()

    x, w = X[0], jnp.asarray(np.random.default_rng(1).normal(size=(16, 16)), jnp.float32) / 4
    found, wanted = (jax.jit(jax.grad(f, (0, 1)))(x, w) for f in (tcemu.emulate(fn, recipe), fn))
    for a, b in zip(found, wanted, strict=True):
        assert (a != 0).all()
        assert jnp.linalg.norm(a - b) < 0.05 * jnp.linalg.norm(b)
