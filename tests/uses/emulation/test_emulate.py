"""`emulate` reaches every product of a program, replaces it and nothing else, and derivatives, loops and checkpoints stay what they were.

The choice is mostly a product that is easily told from the plain one, `tripled`; the same function written with it is what must come out.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas
from support.device_processes import run_on_devices
from support.sampling import sample_cases

import tcemu
from tcemu.operations.products.dot_general import DotGeneral
from tcemu.uses.emulation import emulate as emulate_module

PLAIN = (((1,), (0,)), ((), ()))
X, W = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4)), jnp.float32) / 2


def tripled(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None):
    return 3 * lax.dot_general(lhs, rhs, dimension_numbers, preferred_element_type=preferred_element_type)


def left(product):
    return None


# ---- functions whose product is an argument: dot(a, b) for matrices


def in_jit(dot, x, w):
    return jax.jit(lambda x: jnp.tanh(dot(x, w)))(x) + jax.jit(lambda x: dot(dot(x, x), w))(x)


def in_scan(dot, x, w):
    carry, stacked = lax.scan(lambda c, y: (jnp.tanh(dot(c, w)) + y, dot(y[None], w)), x, jnp.stack([x[0], x[1]]), reverse=True)
    return carry + stacked[0]


def in_while(dot, x, w):
    """Both programs of the loop have a product; forward mode alone goes through it."""

    def more(state):
        return (dot(state[0], w) ** 2).sum() * 0 + state[1] < 3

    return lax.while_loop(more, lambda state: (jnp.tanh(dot(state[0], w)), state[1] + 1), (x, 0))[0]


def in_fori_loop(dot, x, w):
    return lax.fori_loop(0, 3, lambda i, y: jnp.tanh(dot(y, w)) + i, x)


def in_cond(dot, x, w):
    return lax.cond(x.sum() > 0, lambda x: dot(x, w), lambda x: dot(w, x) * 2, x) + lax.switch(
        2, [jnp.sin, jnp.cos, lambda x: dot(x, x)], x
    )


def in_checkpoint(dot, x, w):
    return jax.checkpoint(lambda x: jnp.sin(dot(jnp.tanh(dot(x, w)), w)))(x)


def in_custom_jvp(dot, x, w):
    @jax.custom_jvp
    def f(x, w):
        return dot(x, w)

    f.defjvp(lambda primals, tangents: (f(*primals), dot(tangents[0], primals[1]) * 5))  # not the derivative: it shows which rule is used
    return f(x, w) + jax.nn.relu(x)


def in_custom_vjp(dot, x, w):
    @jax.custom_vjp
    def f(x, w):
        return dot(x, w)

    f.defvjp(lambda x, w: (dot(x, w), (x, w, dot(x, x))), lambda r, g: (dot(g, r[1].T) * 7, dot(r[2], g)))
    return jnp.sin(f(x, w))


def in_gradient(dot, x, w):
    """A gradient in the function: its product is a product like others."""
    return jax.vjp(lambda x: plain(x, w), x)[1](jnp.cos(x))[0] if dot is plain else dot(jnp.cos(x), w.T)


def in_vmap(dot, x, w):
    return jax.vmap(lambda row: dot(row[None], w)[0], out_axes=1)(x)


def in_all(dot, x, w):
    def step(c, y):
        inner = jax.checkpoint(lambda c: lax.cond(c.sum() > 0, lambda c: jax.jit(in_custom_vjp, static_argnums=0)(dot, c, w), jnp.cos, c))
        return inner(c) + y, None

    return lax.scan(step, x, jnp.stack([x, w]))[0]


def plain(a, b):
    return lax.dot_general(a, b, PLAIN)


def written(a, b):
    return tripled(a, b, PLAIN)


FORWARD_ONLY = {in_while}
REVERSE_ONLY = {in_custom_vjp, in_all}
CASES = [
    in_jit, in_scan, in_while, in_fori_loop, in_cond, in_checkpoint, in_custom_jvp, in_custom_vjp, in_gradient, in_vmap, in_all,
]  # fmt: skip
COUNTS = {in_jit: 3, in_scan: 2, in_while: 2, in_fori_loop: 1, in_cond: 3, in_checkpoint: 2, in_custom_jvp: 1, in_custom_vjp: 1}
COUNTS |= {in_gradient: 2, in_vmap: 1, in_all: 1}  # in_gradient: the forward one, whose result is not used, is traced too


def everything(f, case, batched):
    """A function's value and its derivatives, and those of a batch, in one program."""

    def run(x, w):
        found = [jax.vmap(f, (0, None))(jnp.stack([x, w, x + 1]), w)] if batched else [f(x, w)]
        if case not in REVERSE_ONLY and (batched or case in FORWARD_ONLY):
            found.append(jax.jvp(f, (x, w), (w, x)))
        if case not in FORWARD_ONLY:
            gradient = jax.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1))
            found.append(jax.vmap(gradient, (None, 0))(x, jnp.stack([w, w + 1])) if batched else gradient(x, w))
        return found

    return jax.jit(run)


@pytest.mark.parametrize("batched", sample_cases((False, True), (False,)))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_function_with_another_product_is_the_function_written_with_it(case, batched):
    fn = lambda x, w: case(plain, x, w)
    by_hand = lambda x, w: case(written, x, w)
    emulated = tcemu.emulate(fn, [("*", tripled)])
    found, wanted = everything(emulated, case, batched)(X, W), everything(by_hand, case, batched)(X, W)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    if not batched:
        assert jnp.abs(found[0] - fn(X, W)).max() > 1e-2
        report = emulated.report(X, W)
        assert len(report.replaced) == len(report) == COUNTS[case]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_primitive_by_primitive_it_is_near_the_function_written_with_it(case):
    """XLA fuses, and rounds, otherwise there."""
    emulated = tcemu.emulate(lambda x, w: case(plain, x, w), [("*", tripled)])
    np.testing.assert_allclose(emulated(X, W), case(written, X, W), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", sample_cases(CASES, [in_all], lambda case: case.__name__))
def test_a_policy_that_leaves_everything_changes_no_bit(case):
    fn = lambda x, w: case(plain, x, w)
    emulated = tcemu.emulate(fn, left)
    np.testing.assert_array_equal(jax.jit(emulated)(X, W), jax.jit(fn)(X, W))
    assert len(emulated.report(X, W).unchanged) == COUNTS[case]


def test_a_choice_may_close_over_tracers():
    """As a sweep over a traced parameter does: it reaches the programs in loops and branches."""

    def f(x):
        y, _ = lax.scan(lambda c, _: (jax.jit(lambda c: plain(c, W))(c), None), x, length=2)
        y = lax.while_loop(lambda s: plain(s[0], W).sum() * 0 + s[1] < 2, lambda s: (plain(s[0], W), s[1] + 1), (y, 0))[0]
        y = lax.cond(y.sum() > 0, lambda y: plain(y, W), lambda y: plain(W, y), y)
        return jax.checkpoint(lambda y: plain(y, jax.nn.relu(W)))(y)

    def scaled(scale, x):
        return tcemu.emulate(f, [("*", lambda *args, **kwargs: scale * lax.dot_general(*args, **kwargs))])(x)

    scales = jnp.asarray([1.0, 2.0, 4.0])
    found = jax.jit(jax.vmap(scaled, (0, None)))(scales, X)
    np.testing.assert_allclose(found, scales[:, None, None] ** 6 * f(X), rtol=1e-4)
    slope = jax.jit(jax.jacfwd(scaled))(2.0, X)
    np.testing.assert_allclose(slope, 6 * found[1] / 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("policy", "products"),  # in the backward pass: its own two, and those of the forward pass that are computed again
    [(None, 4), (jax.checkpoint_policies.save_only_these_names("kept"), 3), (jax.checkpoint_policies.dots_saveable, 2)],
)
def test_a_checkpoint_saves_what_its_policy_says(policy, products):
    def layers(x):
        return jnp.sin(plain(jnp.sin(checkpoint_name(plain(x, W), "kept")), W))

    fn = jax.checkpoint(layers, policy=policy)
    for f in (fn, tcemu.emulate(fn, tripled_all)):
        program = jax.make_jaxpr(jax.grad(lambda x, f=f: f(x).sum()))(X)
        (checkpoint,) = [e.params for e in program.eqns if e.primitive.name in ("remat2", "checkpoint")]
        assert checkpoint["differentiated"] and checkpoint["prevent_cse"]  # the barrier that keeps XLA from undoing it
        assert sum(e.primitive.name == "dot_general" for e in checkpoint["jaxpr"].eqns) == products


def kernel(x, w, out):
    out[...] = x[...] @ w[...]


def product_in_pallas(x, w):
    return pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4, 4), jnp.float32), interpret=True)(x, w)


def product_in_custom_vmap(x, w):
    f = jax.custom_batching.custom_vmap(plain)
    f.def_vmap(lambda size, batched, x, w: (jnp.matmul(x, w), True))
    return f(x, w)


def product_in_solver(x, w):
    return lax.custom_linear_solve(lambda y: w @ y, x[0], lambda matvec, y: y)


def on_the_host(x, w):
    return jax.pure_callback(lambda x, w: np.asarray(x) @ np.asarray(w), jax.ShapeDtypeStruct((4, 4), jnp.float32), x, w)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (product_in_pallas, "inside pallas_call, which emulate does not enter"),
        (product_in_custom_vmap, "inside custom_vmap_call, which emulate does not enter"),
        (product_in_solver, "inside custom_linear_solve, which emulate does not enter"),
        (on_the_host, "code of the host"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_not_entered_is_left_and_reported(fn, said):
    emulated = tcemu.emulate(lambda x, w: fn(x, w) + jax.jit(plain)(x, w), [("*", tripled)])
    report = emulated.report(X, W)
    assert [e.reason for e in report.unchanged if e.reason.startswith(said)] and len(report.replaced) == 1
    assert "left: " + said in str(report)
    np.testing.assert_allclose(emulated(X, W), fn(X, W) + 3 * plain(X, W), rtol=1e-5, atol=1e-6)


def test_what_computes_no_product_is_not_mentioned():
    assert str(tcemu.emulate(lambda x: lax.scan(lambda c, y: (c + y, jnp.sin(y)), x[0], x), tripled_all).report(X)) == "no products"


def tripled_all(product):
    return tripled


# ---- names and policies


def scopes(x, w):
    with jax.named_scope("first"):
        x = jax.jit(plain)(x, w)
        x = plain(plain(x, w), w)
    return jax.jit(plain)(jax.jit(plain)(x, w), w)


SEEN = ["first/plain/dot_general", "first/dot_general", "first/dot_general.1", "plain/dot_general", "plain.1/dot_general"]


def test_a_policy_sees_what_the_product_is():
    seen = []

    def policy(product):
        seen.append(product)
        return tripled if product.name == "plain.1/dot_general" else None

    mixed = lambda x, w: scopes(x, w) + jnp.einsum("bij,bjk->ik", jnp.stack([x, x]).astype(jnp.bfloat16), jnp.stack([w, w]))
    report = tcemu.emulate(mixed, policy).report(jax.ShapeDtypeStruct((4, 4), jnp.float32), W)
    assert [product.name for product in seen[:5]] == SEEN and [product.index for product in seen[:5]] == [0, 0, 1, 0, 0]
    last = seen[5]
    assert (last.lhs_shape, last.rhs_shape, last.shape) == ((2, 4, 4), (2, 4, 4), (4, 4))
    assert (last.lhs_dtype, last.rhs_dtype, last.preferred_element_type, last.dtype) == (jnp.bfloat16, *(jnp.float32,) * 3)
    assert sorted(last.dimension_numbers[0][0]) == [0, 2] and last.primitive == "dot_general" and last.repeats == 1
    assert [entry.replaced for entry in report] == [False] * 4 + [True, False]
    assert [entry.reason for entry in report][3:5] == ["the policy leaves it", "tripled"]
    assert "1 of 6 products replaced" in str(report)


@pytest.mark.parametrize(
    ("rules", "replaced"),
    [
        ([("*", tripled)], {0, 1, 2, 3, 4}),
        ([("first/*", None), ("*", tripled)], {3, 4}),
        ([("plain/*", tripled), ("*.1/*", tripled)], {3, 4}),
        ([("First*", tripled)], set()),
        ([("*/dot_general.1", tripled), ("first/plain*", tripled)], {0, 2}),
        (None, set()),
    ],
)
def test_the_first_rule_that_fits_counts(rules, replaced):
    report = tcemu.emulate(scopes, rules).report(X, W)
    assert {number for number, entry in enumerate(report) if entry.replaced} == replaced


def test_short_forms_leave_what_is_not_of_floats():
    product = lambda x: lax.dot_general(x, x, PLAIN)
    for x in (jnp.ones((4, 4), jnp.int32), jnp.ones((4, 4), jnp.complex64)):
        report = tcemu.emulate(product, [("*", tripled)]).report(x)
        assert [e.reason for e in report.unchanged] == ["not of real floats; only a function as policy can take it"]
        assert len(tcemu.emulate(product, tripled_all).report(x).replaced) == 1


@pytest.mark.parametrize(
    ("spec", "sums"),
    [
        ("btd,btd->btd", False), ("i,j->ij", False), ("bt,d->btd", False), ("bi,bj->bij", False),
        ("btd,btd->bt", True), ("id,jd->ij", True), ("i,i->", True), ("gtd,gdf->gtf", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 3])
def test_short_forms_leave_what_sums_nothing(spec, sums, size):
    """A contraction over an axis of size 1 is a product like others; without any the elements are multiplied, not rounded to a format."""
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.normal(size=(size,) * len(axes)), jnp.float32) for axes in spec.split("->")[0].split(",")]
    product = lambda *x: jnp.einsum(spec, *x)
    emulated = tcemu.emulate(lambda *x: (product(*x), plain(X, W)), [("*", tripled)])
    report = emulated.report(*operands)
    assert [entry.replaced for entry in report] == [sums, True]
    assert sums or report[0].reason.startswith("no contraction, nothing is summed")
    factor = 3 if sums else 1
    np.testing.assert_allclose(emulated(*operands)[0], factor * product(*operands), rtol=1e-5)
    chosen = tcemu.emulate(product, tripled_all)  # a function may still choose
    assert len(chosen.report(*operands).replaced) == 1
    np.testing.assert_allclose(chosen(*operands), 3 * product(*operands), rtol=1e-5)


def test_a_product_in_a_loop_tells_how_often_it_runs():
    inner = lambda c: lax.scan(lambda c, _: (plain(c, W), None), c, length=5)[0]
    fn = lambda x: lax.scan(lambda c, _: (inner(c), plain(c, W)), x, length=3)
    assert [p.repeats for p in tcemu.emulate(fn, tripled_all).report(X).replaced] == [15, 3]
    assert [p.repeats for p in tcemu.emulate(lambda x: lax.while_loop(lambda x: x[0, 0] < 0, inner, x), left).report(X).replaced] == []


def test_the_products_of_a_gradient_have_names_of_their_own():
    fn = lambda x, w: jnp.sin(jax.jit(plain)(x, w)).sum()
    names = [e.name for e in tcemu.emulate(jax.grad(fn, (0, 1)), left).report(X, W)]
    assert len(names) == 3 and sum("transpose" in name for name in names) == 2
    found = tcemu.emulate(jax.grad(fn, (0, 1)), [("*transpose*", tripled)])(X, W)
    wanted = jax.grad(fn, (0, 1))(X, W)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 3 * b, rtol=1e-6), found, wanted)


# ---- what goes in and comes out


def test_arguments_that_are_no_arrays_and_results_that_are_none():
    def fn(x, how, *, times=1, transform=jnp.sin):
        return {"y": transform(plain(x, W)) * times, "how": how, "times": times, "none": None, "fn": transform}

    found = jax.jit(tcemu.emulate(fn, tripled_all), static_argnames=("how", "transform"))
    eager = tcemu.emulate(fn, tripled_all)(X, "word", times=2)
    np.testing.assert_allclose(eager.pop("y"), 2 * jnp.sin(3 * plain(X, W)), rtol=1e-5)
    assert eager == {"how": "word", "times": 2, "none": None, "fn": jnp.sin}
    with pytest.raises(TypeError, match="not a valid JAX type"):
        found(X, how="word")  # as jit of fn does


@pytest.mark.full
def test_random_keys_and_constants_go_through():
    def fn(key, x):
        noise, table = jax.random.normal(key, (4, 4)), np.arange(16, dtype=np.float32).reshape(4, 4)
        return lax.scan(lambda c, k: (plain(c, table) + jax.random.normal(k, (4, 4)), None), x + noise, jax.random.split(key, 3))[0]

    key = jax.random.key(3)
    np.testing.assert_array_equal(tcemu.emulate(fn, left)(key, X), fn(key, X))


def test_a_function_that_changes_is_seen_again():
    """Nothing is kept between calls that fn could have changed."""
    state = {"w": W}
    emulated = tcemu.emulate(lambda x: plain(x, state["w"]), tripled_all)
    first = emulated(X)
    state["w"] = 2 * W
    np.testing.assert_array_equal(emulated(X), 2 * first)


def test_another_dtype_is_converted_and_another_shape_refused():
    wide = lambda *args, **kwargs: tripled(*args, preferred_element_type=jnp.float32)[..., :]
    x = X.astype(jnp.bfloat16)
    found = tcemu.emulate(plain, [("*", lambda lhs, rhs, numbers, **kwargs: wide(lhs, rhs, numbers))])(x, x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, tripled(x, x, PLAIN, preferred_element_type=jnp.float32).astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"dot_general: float32\[4,4\] · .* returned shape \[16\].*\[4, 4\]"):
        tcemu.emulate(plain, [("*", lambda *args, **kwargs: tripled(*args, **kwargs).ravel())])(X, W)


@pytest.mark.parametrize("policy", [b"bf16", 3, [("*",)], [tripled], ["ab"]])
def test_what_is_no_policy(policy):
    with pytest.raises(TypeError, match=r"policy: got .* a Recipe, a function from a Product"):
        tcemu.emulate(plain, policy)


def test_what_is_no_choice():
    for policy in (lambda product: 3, [("*", 16)]):
        with pytest.raises(TypeError, match=r"policy: for dot_general: .* it gave .* a Recipe, a callable"):
            tcemu.emulate(plain, policy)(X, W)


# ---- several devices


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import tcemu
from tcemu.operations.products.dot_general import DotGeneral
from tcemu.uses.emulation import emulate as emulate_module
from test_emulate import plain, tripled, written
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
x, w = np.random.default_rng(0).integers(-4, 4, (2, 8, 8)).astype(np.float32)
for check in (True, False):
    def fn(dot, x, w):
        body = lambda x, w: jax.lax.psum(jax.lax.scan(lambda c, _: (jnp.sin(dot(c, w)), None), x, length=2)[0], "d") + dot(x, w)
        return jax.shard_map(body, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=check)(x, w)
    emulated = tcemu.emulate(lambda x, w: fn(plain, x, w), [("*", tripled)])
    by_hand = lambda x, w: fn(written, x, w)
    assert [e.name for e in emulated.report(x, w)] == ["shard_map/scan/dot_general", "shard_map/dot_general"]
    for f, g in ((emulated, by_hand), (jax.grad(lambda x, w: emulated(x, w).sum()), jax.grad(lambda x, w: by_hand(x, w).sum()))):
        assert (jax.jit(f)(x, w) == jax.jit(g)(x, w)).all()
placed = jax.device_put(x, NamedSharding(mesh, P("d")))
f = jax.jit(jax.jit(plain, in_shardings=(NamedSharding(mesh, P("d")), None), out_shardings=NamedSharding(mesh, P(None, "d"))))
found = jax.jit(tcemu.emulate(f, [("*", tripled)]))(placed, w)
assert (found == 3 * x @ w).all() and found.sharding.spec == P(None, "d"), found.sharding
print("8 equal")
"""


def test_shard_map_and_shardings():
    """In a process of its own, with two host devices."""
    assert run_on_devices(2, SHARDED) == "8 equal\n"


def test_many_compilations_outside_jit_are_logged_once(caplog, monkeypatch):
    emulate_module.warn_of_compilations.cache_clear()
    monkeypatch.setattr(emulate_module, "EAGER_LIMIT", 2)
    fn = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w.T) @ w
    w, x = jnp.ones((9, 11)), jnp.ones((3, 9))
    policy = lambda product: lambda *args, **kwargs: jnp.sin(jax.lax.dot_general(*args, **kwargs)) * 17
    with caplog.at_level("WARNING", logger="tcemu"):
        jax.jit(tcemu.emulate(fn, policy))(w, x)
        assert caplog.text == ""
        jax.grad(lambda w: tcemu.emulate(fn, policy)(w, x).sum())(w)
        tcemu.emulate(fn, policy)(w, x[:2])
    assert [record.message.count("jax.jit") for record in caplog.records] == [1]


def test_layers_with_equal_products_trace_one(monkeypatch):
    """The product of a recipe is traced once for equal operands, gradients too; that of a choice that is any function is not."""
    traced = []
    multiply = DotGeneral._multiply
    monkeypatch.setattr(DotGeneral, "_multiply", lambda self, *given: (traced.append(self.recipe), multiply(self, *given))[1])

    def layers(dot, x, w):
        for scale in (1.0, 0.5, 0.25):
            x = jnp.tanh(dot(x, w) * scale)
        return x

    recipe = tcemu.get_recipe("bf16", "A100")
    by_hand = layers(lambda a, b: tcemu.matmul(a, b, recipe=recipe), X, W)
    emulated = tcemu.emulate(lambda x, w: layers(jnp.matmul, x, w), recipe)
    assert (jax.jit(emulated)(X, W) == by_hand).all() and len(traced) == 1
    traced.clear()
    loss = lambda x, w: layers(jnp.matmul, x, w).sum()
    gradient = jax.jit(tcemu.emulate(jax.grad(loss, 1), recipe))(X, W)
    assert 2 <= len(traced) <= 3  # of nine products: x @ w, and those of both gradients
    plain = tcemu.emulate(jax.grad(loss, 1), lambda product: tcemu.dot_general(recipe).__call__)
    assert (jax.jit(plain)(X, W) == gradient).all() and len(traced) > 9
