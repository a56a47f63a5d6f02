"""Ragged products under `emulate`: a mixture of experts has the bits of a loop over its experts, and any callable may be the choice."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.device_processes import run_on_devices
from support.ragged_cases import case
from support.sampling import sample_cases

import tcemu

TOKENS, WIDTH, HIDDEN, EXPERTS = 24, 32, 32, 3  # few shapes of products, which are compiled each
RNG = np.random.default_rng(0)
X = RNG.normal(size=(TOKENS, WIDTH)).astype(np.float32)
X[:, 0] = 20 * (-1.0) ** np.arange(TOKENS)  # so that the first and the last expert have half of the tokens each
PARAMS = {
    "router": np.concatenate([[[1.0, 0, -1]], RNG.normal(size=(WIDTH - 1, EXPERTS)) / 16]).astype(np.float32),
    "up": (RNG.normal(size=(EXPERTS, WIDTH, HIDDEN)) / 6).astype(np.float32),
    "down": (RNG.normal(size=(EXPERTS, HIDDEN, WIDTH)) / 7).astype(np.float32),
}


def experts(dot, ragged_dot, params, x):
    """A layer that sends each token to one of its experts."""
    probabilities = jax.nn.softmax(dot(x, params["router"]))
    chosen = jnp.argmax(probabilities, axis=-1)
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.bincount(chosen, length=EXPERTS)
    y = ragged_dot(jax.nn.relu(ragged_dot(x[order], params["up"], sizes)), params["down"], sizes)
    return x + jnp.zeros_like(x).at[order].set(y) * probabilities.max(axis=-1, keepdims=True)


def loop_product(recipe):
    """lax.ragged_dot by a loop of `matmul` over the experts, forward and backward."""

    @jax.custom_vjp
    def product(lhs, rhs, sizes):
        ends = np.cumsum(np.asarray(sizes))
        parts = [tcemu.matmul(lhs[end - n : end], b, recipe=recipe) for end, n, b in zip(ends, np.asarray(sizes), rhs, strict=True)]
        return jnp.concatenate(parts)

    def backward(kept, g):
        lhs, rhs, sizes = kept
        (for_a, for_b), ends, da, db = recipe.gradients, np.cumsum(np.asarray(sizes)), [], []
        for end, n, b in zip(ends, np.asarray(sizes), rhs, strict=True):
            rows = slice(end - n, end)
            da.append(tcemu.matmul(g[rows], b.T, recipe=for_a))
            db.append(tcemu.matmul(lhs[rows].T, g[rows], recipe=for_b))
        return jnp.concatenate(da), jnp.stack(db), None

    product.defvjp(lambda *x: (product(*x), x), backward)
    return product


def same(a, b):
    np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))


@pytest.mark.parametrize("name", sample_cases(("fp8", "deepseek"), ()))
def test_a_mixture_of_experts_trains_with_the_bits_of_a_loop_over_its_experts(name):
    recipe = tcemu.get_recipe(name)
    layer = partial(experts, jnp.matmul, lax.ragged_dot)
    emulated = tcemu.emulate(layer, [("ragged*", recipe)])
    by_hand = partial(experts, jnp.matmul, loop_product(recipe))
    report = emulated.report(PARAMS, X)
    assert [p.primitive for p in report.replaced] == ["ragged_dot_general"] * 2 and [e.name for e in report.unchanged] == ["dot_general"]

    def step(apply):
        def loss(params, x):
            y = apply(params, x)
            return (y * y).sum(), y

        (value, y), gradients = jax.value_and_grad(loss, has_aux=True)(PARAMS, X)
        return value, y, gradients, jax.tree.map(lambda p, g: p - 0.01 * g, PARAMS, gradients)

    found, wanted = step(emulated), step(by_hand)
    jax.tree.map(same, found, wanted)
    assert not np.array_equal(found[1], layer(PARAMS, X))
    gradients = found[2]
    assert all((leaf[expert] != 0).any() for leaf in (gradients["up"], gradients["down"]) for expert in (0, 2))
    assert not gradients["up"][1].any()


def tripled(lhs, rhs, dimension_numbers, **kwargs):
    return 3 * lax.dot_general(lhs, rhs, dimension_numbers, **kwargs)


def check_callables(count, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        lhs, rhs, sizes, options = case(rng)
        fn = lambda lhs, rhs, sizes, options=options: lax.ragged_dot_general(lhs, rhs, sizes, **options)
        emulated = tcemu.emulate(fn, lambda product: tripled)  # a function, which may take what sums nothing too
        np.testing.assert_array_equal(emulated(lhs, rhs, sizes), 3 * fn(lhs, rhs, sizes), err_msg=str(options))


def test_another_product_takes_the_groups_one_by_one():
    check_callables(2)


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_another_product_with_many_axes(part):
    check_callables(20, 1 + part)


@pytest.mark.parametrize("order", sample_cases(("gradient of the emulated", "emulated gradient"), ()))
def test_in_loops_and_batches_and_gradients(order):
    """On integers, whose sums are exact in any order; the products of a gradient are ragged products of other kinds."""
    rng = np.random.default_rng(1)
    x, w = rng.integers(-2, 3, (2, 6, 4)).astype(np.float32), rng.integers(-2, 3, (2, 4, 4)).astype(np.float32)
    sizes = jnp.asarray([[2, 3], [0, 6]])

    def loss(x, w, sizes):
        y, _ = lax.scan(lambda y, _: (lax.ragged_dot(y, w, sizes), None), x, length=2)
        return (y * jnp.arange(4)).sum()

    recipe = tcemu.get_recipe("tf32", backward=tcemu.get_recipe("tf32", backward="exact"))
    gradient = jax.jit(jax.grad(loss, (0, 1)))
    wanted = [gradient(one, w, s) for one, s in zip(x, sizes, strict=True)]
    if order == "emulated gradient":
        found = tcemu.emulate(jax.grad(loss, (0, 1)), recipe)
        assert len(found.report(x[0], w, sizes[0]).replaced) == 3
    else:
        found = jax.grad(tcemu.emulate(loss, recipe), (0, 1))
    got = jax.jit(jax.vmap(found, (0, None, 0)))(x, w, sizes)
    for i, want in enumerate(wanted):
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[i], b), got, want)


@pytest.mark.parametrize("name", sample_cases(("deepseek", "fp8_rows", "mxfp8"), ("fp8_rows",)))
def test_a_grouped_product_has_the_bits_of_each_group_alone(name):
    """einsum with a batch axis, where no scale is of the whole tensor."""
    recipe = tcemu.get_recipe(name)
    x = np.stack([X[:12], 30 * X[12:]])
    fn = lambda x, w: jnp.einsum("gtd,gdf->gtf", x, w)
    got = tcemu.emulate(fn, recipe, parameters="w")(x, PARAMS["up"][:2])
    for group in range(2):
        same(got[group], tcemu.matmul(x[group], PARAMS["up"][group], recipe=recipe))


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax import lax
from jax.sharding import PartitionSpec as P
import tcemu
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
x, w = rng.integers(-2, 3, (12, 8)).astype(np.float32), rng.integers(-2, 3, (3, 8, 4)).astype(np.float32)
sizes = jnp.asarray([2, 0, 3, 1, 5, 0])
recipe = tcemu.get_recipe("bf16")
body = tcemu.emulate(lambda x, w, sizes: lax.ragged_dot(x, w, sizes), recipe)
alone = lambda x, w: jnp.concatenate([lax.ragged_dot(x[:6], w, sizes[:3]), lax.ragged_dot(x[6:], w, sizes[3:])])
loss = lambda f: lambda x, w: (f(x, w) * jnp.arange(4)).sum()
wanted = jax.jit(jax.value_and_grad(loss(alone), (0, 1)))(x, w)
for check in (True, False):
    over = jax.shard_map(body, mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=P("d"), check_vma=check)
    both = jax.jit(jax.value_and_grad(loss(lambda x, w: over(x, w, sizes)), (0, 1)))(x, w)
    jax.tree.map(np.testing.assert_array_equal, both, wanted)
print("equal")
"""


@pytest.mark.full
def test_under_shard_map():
    """Each device with groups of its own, in a process with two of them."""
    assert run_on_devices(2, SHARDED) == "equal\n"


def test_what_the_policy_sees_and_what_it_leaves():
    seen = []
    fn = lambda x, w: lax.ragged_dot(x, w, jnp.asarray([20, 4, 0]))
    tcemu.emulate(fn, lambda product: seen.append(product)).report(X, PARAMS["up"])
    (product,) = seen
    assert (product.primitive, product.lhs_shape, product.rhs_shape, product.shape) == (
        "ragged_dot_general", (24, 32), (3, 32, 32), (24, 32),
    )  # fmt: skip
    assert product.is_contraction and product.dimension_numbers.lhs_ragged_dimensions == (0,)
    with pytest.raises(ValueError, match=r"a group of a ragged product its choice returned shape \[3\].*\[24, 32\]"):
        tcemu.emulate(fn, [("*", lambda *args, **kwargs: jnp.zeros(3))])(X, PARAMS["up"])
    x, w = X.astype(np.int32), PARAMS["up"].astype(np.int32)
    assert [e.reason for e in tcemu.emulate(fn, tcemu.get_recipe("bf16")).report(x, w)] == [
        "not of real floats; only a function as policy can take it"
    ]


@pytest.mark.full
def test_compare_takes_each_group_as_a_run():
    fn = lambda x, w: lax.ragged_dot(x, w, jnp.asarray([20, 4, 0]))
    (row,) = tcemu.compare(fn, tcemu.get_recipe("bf16"), (X, PARAMS["up"]), results=False)
    assert row.runs == EXPERTS and 1e-4 < row.relative_error < 1e-2
