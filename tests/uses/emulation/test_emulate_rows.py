"""`emulate(..., rows=)`: bits that do not depend on the number of rows, by a loop over the rows between products that see all of them."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.sampling import sample_cases

import tcemu
from tcemu.operations.products.dot_general import product_axes


def sum_in_order(lhs, rhs, numbers, *, shapes=None, **_):
    """dot_general in f32, one product after the other along K: its bits do not depend on the number of rows."""
    if shapes is not None:
        shapes.append((lhs.shape, rhs.shape))
    axes = product_axes(numbers, lhs.ndim, rhs.ndim)
    batch, k = (int(np.prod([lhs.shape[i] for i in part])) for part in (axes.lhs_batch, axes.lhs_contracting))
    a, b = lhs.transpose(axes.a_order).reshape(batch, -1, k), rhs.transpose(axes.b_order).reshape(batch, k, -1)
    add = lambda total, pair: (total + pair[0][:, :, None] * pair[1][:, None, :], None)
    total, _ = lax.scan(add, jnp.zeros((batch, a.shape[1], b.shape[2])), (jnp.moveaxis(a, 2, 0), jnp.moveaxis(b, 1, 0)))
    return total.reshape(jax.eval_shape(lambda x, y: lax.dot_general(x, y, numbers), lhs, rhs).shape)


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def block(params, x):
    """Attention with one head, and a layer, with a bias that is scaled apart from the rows."""
    y = norm(x)
    q, k, v = (y @ params[name].astype(jnp.float32) for name in ("q", "k", "v"))
    x = x + jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) / 8) @ v
    return norm(x + jax.nn.relu(norm(x) @ params["up"]) @ params["up"].T) + 3 * params["bias"]


RNG = np.random.default_rng(0)
PARAMS = {name: jnp.asarray(RNG.normal(size=(64, 64)) / 8, jnp.float32) for name in ("q", "k", "v", "up")} | {"bias": jnp.ones(64)}
X = jnp.asarray(RNG.normal(size=(16, 7, 64)), jnp.float32)


def words(x):
    return np.asarray(x).view(np.uint32)


def mismatches(a, b):
    return int((words(a) != words(b)).sum())


@pytest.mark.parametrize("numbers", sample_cases([(1, 3), (2, 5)], [(1, 3)], str))
def test_bits_do_not_depend_on_the_number_of_rows_and_without_rows_they_do(numbers):
    shapes = []
    choice = partial(sum_in_order, shapes=shapes)
    by_row = jax.jit(tcemu.emulate(block, lambda product: choice, rows="x"))
    found = by_row(PARAMS, X)
    assert {size for lhs, rhs in shapes for size in (lhs[0], rhs[0])} == {
        16,
        64,
    }  # products of all rows at once, and of weights as they are
    assert [mismatches(by_row(PARAMS, X[:n]), found[:n]) for n in numbers] == [0] * 2
    assert mismatches(by_row(PARAMS, X[::-1])[::-1], found) == 0
    plain = jax.jit(tcemu.emulate(block, lambda product: sum_in_order))
    expected = plain(PARAMS, X)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert any(mismatches(plain(PARAMS, X[:n]), expected[:n]) for n in numbers)


@pytest.mark.full
def test_gradients_go_through_the_loops():
    loss = lambda fn: jax.jit(jax.grad(lambda params, x: (fn(params, x) ** 2 * jnp.arange(64)).mean(), (0, 1)))(PARAMS, X)
    found, expected = (loss(tcemu.emulate(block, lambda product: sum_in_order, rows=rows)) for rows in ("x", None))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.abs(b).max())), found, expected)


@pytest.mark.full
def test_products_inside_programs_and_several_arrays_with_rows():
    """In scan, cond, jit and checkpoint; a mask has no rows, and a result without rows is one for all."""

    def fn(params, x, lengths, mask):
        body = lambda state, w: (jnp.tanh(norm(state) @ w), None)
        x, _ = lax.scan(jax.checkpoint(body), x, params)
        x = jax.jit(lambda x: norm(x) @ params[0])(x)
        x = lax.cond(mask.sum() > 0, lambda x: norm(x) @ params[1], lambda x: x, x)
        return {"x": jnp.where(mask, x, lengths[:, None, None]), "sum": params.sum(), "lengths": lengths}

    params, mask = jnp.stack([PARAMS["q"], PARAMS["k"]]), jnp.arange(64) % 2 == 0
    lengths = jnp.arange(16.0)
    run = jax.jit(tcemu.emulate(fn, lambda product: sum_in_order, rows=("x", 2)))
    found, expected = run(params, X, lengths, mask), fn(params, X, lengths, mask)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), found, expected)
    assert mismatches(run(params, X[:1], lengths[:1], mask)["x"], found["x"][:1]) == 0


def test_the_report_has_all_rows_and_what_is_left_is_said():
    emulated = tcemu.emulate(block, [("*up*", None), ("*", "bf16 on H100")], rows="x")
    report = emulated.report(PARAMS, X)
    assert {size for product in report.replaced for size in (product.lhs_shape[0], product.rhs_shape[0])} == {16, 64}
    with pytest.warns(UserWarning, match="2 products are left to XLA.*number of rows"):
        jax.eval_shape(emulated, PARAMS, X)


def test_what_has_no_rows_is_refused():
    emulate = partial(tcemu.emulate, policy=lambda product: sum_in_order)
    for fn, rows, message in (
        (block, "y", r"rows='y' matches no array.*x"),
        (block, ("x", "params"), r"expected arrays with the same number of rows"),
        (lambda params, x: block(params, x).mean(), "x", r"result 0 is float32\[\] with 16 rows"),
        (lambda params, x: block(params, x).sum(0), "x", r"result 0 is float32\[7, 64\] with 16 rows"),
        (lambda params, x: jnp.float32(3) * x[0, 0, 0], "x", r"result 0"),
    ):
        with pytest.raises(ValueError, match=message):
            emulate(fn, rows=rows).report(PARAMS, X)
    with pytest.raises(ValueError, match="expected arrays with the same number of rows"):
        emulate(lambda params, x: x, rows="x").report(PARAMS, jnp.float32(1))


def test_no_rows_at_all_and_arrays_that_are_closed_over():
    assert jax.jit(tcemu.emulate(block, lambda product: lax.dot_general, rows="x"))(PARAMS, X[:0]).shape == (0, 7, 64)
    closed = jax.jit(tcemu.emulate(lambda x: block(PARAMS, x), lambda product: sum_in_order, rows=0))
    assert mismatches(closed(X[:1]), closed(X[:2])[:1]) == 0


@jax.custom_vjp
def doubled(x, w):
    return norm(2 * x), w.sum()


doubled.defvjp(lambda x, w: (doubled(x, w), ()), lambda _, cotangents: cotangents)


@jax.custom_jvp
def tripled(x, w):
    return norm(3 * x), w.sum()


@tripled.defjvp
def tripled_tangent(primals, tangents):
    return tripled(*primals), tripled(*tangents)


def scan_layers(x, w, product):
    """The carry has the rows, a sum over weights, and a count; the scanned results have the weights' norms."""

    def body(state, one):
        x, total, count = state
        x = norm(x) @ one if product else norm(x) * one[0]
        return (x, total + one.sum(), count + 1), (jnp.abs(one).max(), x)

    (x, total, count), (most, inner) = lax.scan(body, (x, jnp.float32(0), jnp.int32(0)), w)
    return x, (total * 2, count, most), jnp.moveaxis(inner, 0, 1)


def while_layers(x, w, product):
    body = lambda state: (norm(state[0]) @ w[0] if product else norm(state[0]), state[1] * w[1, 0, 0], state[2] + 1)
    x, scale, count = lax.while_loop(lambda state: state[2] < 3, body, (x, jnp.float32(1), jnp.int32(0)))
    return x, (scale, count)


def cond_layers(x, w, product):
    taken = lambda x, w: (norm(x) @ w[0] if product else norm(x), w.sum())
    return lax.cond(w[0, 0, 0] > 9, lambda x, w: (x, w[0, 0, 0]), taken, x, w)


def call_layers(x, w, product):
    x, first = jax.jit(lambda x, w: (norm(x) @ w[0] if product else norm(x), w.sum()))(x, w)
    x, second = jax.checkpoint(lambda x, w: (norm(x) @ w[0] if product else norm(x), w.max()))(x, w)
    x, third = doubled(x, w)
    x, fourth = tripled(x, w)
    return x, first, (second, third * 2, fourth)


@pytest.mark.parametrize("product", sample_cases([False, True], [], {False: "plain", True: "with products"}.get))
@pytest.mark.parametrize("layers", sample_cases([scan_layers, while_layers, cond_layers, call_layers], [scan_layers]))
def test_results_beside_the_rows_that_depend_on_no_row(layers, product):
    w = jnp.stack([PARAMS["q"], PARAMS["k"]])
    fn = lambda w, x: layers(norm(x), w, product)
    run = jax.jit(tcemu.emulate(fn, lambda product: sum_in_order, rows="x"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "emulate.*no product is replaced")
        found, few = run(w, X), run(w, X[:1])
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), found, fn(w, X))
    for some, all_rows in zip(jax.tree.leaves(few), jax.tree.leaves(found), strict=True):
        assert mismatches(some, all_rows[:1] if all_rows.shape[:1] == (16,) else all_rows) == 0


def chained(w, x):
    """The third carry depends on the rows after two iterations."""
    body = lambda state, one: ((state[0], state[0].sum(), state[1]), None)
    return lax.scan(body, (x, jnp.float32(0), jnp.float32(0)), w)[0][2]


@pytest.mark.parametrize(
    "fn",
    [
        chained,
        lambda w, x: lax.while_loop(lambda s: s[0].sum() < 3, lambda s: (s[0] + 1, s[1] + 1), (x, jnp.int32(0)))[1],
        lambda w, x: lax.while_loop(lambda s: s[1] < w.sum() + x.sum(), lambda s: (s[0] * 2, s[1] + 1), (w, jnp.float32(0)))[0],
        lambda w, x: lax.cond(x[0, 0, 0] > 0, lambda w: w, lambda w: 2 * w, w),
        lambda w, x: lax.cond(w[0, 0, 0] > 0, lambda w, x: w, lambda w, x: w + x[0, 0, 0], w, x),
        lambda w, x: lax.scan(lambda s, one: (s, one + s.sum()), x, w)[1],
        lambda w, x: doubled(w, x)[1],
    ],
    ids=("chained carry", "condition", "constant of a condition", "predicate", "branch", "scanned result", "custom_vjp"),
)
def test_results_that_depend_on_the_rows_through_a_loop_or_a_branch_are_refused(fn):
    with pytest.raises(ValueError, match=r"result 0 is .* Rows must not depend on each other"):
        tcemu.emulate(fn, lambda product: sum_in_order, rows="x").report(jnp.stack([PARAMS["q"], PARAMS["k"]]), X)


@pytest.mark.full
def test_a_model_of_nnx_and_its_random_streams():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed (pip install 'tcemu[flax]')")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.up, self.drop = nnx.LayerNorm(64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.drop(self.up(self.norm(x))))

    net = Net(nnx.Rngs(0))
    before = int(net.drop.rngs.count[...])
    by_row = tcemu.emulate(net, lambda product: sum_in_order, rows="x")
    found = nnx.jit(lambda net, x: tcemu.emulate(net, lambda product: sum_in_order, rows="x")(x))(net, X)
    assert found.shape == X.shape and int(net.drop.rngs.count[...]) == before + 1
    assert by_row.report(X).replaced[0].parameters == ("up/kernel",)

    class Counting(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.up = nnx.BatchNorm(64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)

        def __call__(self, x):
            return self.up(self.norm(x))

    with pytest.raises(ValueError, match="Rows must not depend on each other"):
        tcemu.emulate(Counting(nnx.Rngs(0)), lambda product: sum_in_order, rows="x").report(X)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["f16 on A100", "fp8 on H100"])
def test_logits_of_a_transformer_at_batch_1_and_16(recipe):
    """By a recipe with one scale for a tensor, the scale is still that of all rows, and the bits depend on them through it alone."""
    by_row = jax.jit(tcemu.emulate(block, recipe, rows="x"))
    found, alone = by_row(PARAMS, X), by_row(PARAMS, X[:1])
    if recipe.startswith("fp8"):
        assert mismatches(alone, found[:1]) > 0
        amplified = X.at[0].multiply(1.0).at[1:].set(X[0])  # every row is the first: the scales are those of the first alone
        assert mismatches(by_row(PARAMS, amplified)[:1], alone) == 0
    else:
        assert mismatches(alone, found[:1]) == 0
        plain = jax.jit(tcemu.emulate(block, recipe))
        np.testing.assert_allclose(plain(PARAMS, X), found, atol=1e-2)
