"""`emulate` finds what each operand of a product is, an activation, a weight or a gradient, and a recipe's A and B follow that.

The deepseek recipe tells: its activations have tiles of 1 x 128, its weights blocks of 128 x 128, so that operands in the wrong places give
other bits, and one massive token spoils its neighbours.
"""

import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from support.flax_models import linen_encoder
from support.sampling import sample_cases

import tcemu
from tcemu.uses.emulation.policies import Where, linear_only, skip_attention, skip_ends

RNG = np.random.default_rng(0)
DEEPSEEK, FP8, BF16 = tcemu.get_recipe("deepseek"), tcemu.get_recipe("fp8"), tcemu.get_recipe("bf16")
K = 128
X = jnp.asarray(RNG.normal(size=(8, K)), jnp.float32).at[3].multiply(1e6)  # one massive token
W = jnp.asarray(RNG.normal(size=(12, K)), jnp.float32)
ACTIVATION_WEIGHT, WEIGHT_ACTIVATION = ("activation", "weight"), ("weight", "activation")


def same(found, wanted):
    np.testing.assert_array_equal(np.asarray(found).view(np.uint32), np.asarray(wanted).view(np.uint32))


def roles(fn, *args, **options):
    """(roles, parameters) of every product, in the order of the program."""
    return [(p.roles, p.parameters) for p in tcemu.emulate(fn, BF16, **options).report(*args).replaced]


# ---- a recipe's sides follow the roles


def by_vmap(w, x):
    return jax.vmap(lambda v: w @ v)(x)


def by_einsum(w, x):
    return jnp.einsum("td,chd->cth", x, w.reshape(2, 6, K)).transpose(1, 0, 2).reshape(8, 12)


def by_dot(w, x):
    return x @ w.T


def by_equinox(w, x):
    linear = eqx.nn.Linear(K, 12, use_bias=False, key=jax.random.key(0))
    return jax.vmap(eqx.tree_at(lambda m: m.weight, linear, w))(x)


@pytest.mark.parametrize("layer", [by_vmap, by_einsum, by_dot, by_equinox])
def test_weights_are_b_wherever_they_stand(layer):
    wanted = tcemu.matmul(X, W.T, recipe=DEEPSEEK)
    same(tcemu.emulate(lambda x: layer(W, x), DEEPSEEK)(X), wanted)
    same(tcemu.emulate(layer, DEEPSEEK, parameters="w")(W, X), wanted)
    exact = np.asarray(X, np.float64) @ np.asarray(W, np.float64).T
    errors = np.linalg.norm(wanted - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert np.median(errors) < 0.06


@pytest.mark.full
def test_with_operands_in_the_wrong_places_a_massive_token_spoils_its_neighbours():
    """What by position comes of it: the claim that the test above stands on."""
    both = jax.jit(lambda w, x: (tcemu.emulate(by_vmap, DEEPSEEK)(w, x), tcemu.matmul(w, x.T, recipe=DEEPSEEK).T))  # compiled together
    with pytest.warns(UserWarning, match="lhs was taken as A"):
        found, wanted = both(W, X)
    same(found, wanted)
    exact = np.asarray(X, np.float64) @ np.asarray(W, np.float64).T
    errors = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert np.median(errors) > 0.99


@pytest.mark.full
def test_gradients_follow_too():
    def loss(params, x):
        return jnp.sin(by_vmap(params["w"], x)).sum()

    found = jax.grad(tcemu.emulate(loss, DEEPSEEK), (0, 1))({"w": W}, X)
    wanted = jax.grad(lambda w, x: jnp.sin(tcemu.matmul(x, w.T, recipe=DEEPSEEK)).sum(), (0, 1))(W, X)
    same(found[0]["w"], wanted[0])
    same(found[1], wanted[1])


@pytest.mark.parametrize("recipe", sample_cases([FP8, DEEPSEEK], [DEEPSEEK], ids=lambda recipe: recipe.name))
@pytest.mark.parametrize("layer", sample_cases([by_vmap, by_dot], [by_vmap], ids=lambda layer: layer.__name__))
def test_products_of_a_gradient_get_the_recipes_own_for_gradients(recipe, layer):
    """So that `emulate(grad(f))` is `grad(emulate(f))`."""

    def loss(params, x):
        return (layer(params["w"], x) * jnp.cos(x[:, :12])).sum()

    inside = tcemu.emulate(jax.grad(loss, (0, 1)), recipe)({"w": W}, X)
    outside = jax.grad(tcemu.emulate(loss, recipe), (0, 1))({"w": W}, X)
    same(inside[0]["w"], outside[0]["w"])
    same(inside[1], outside[1])


def test_a_symmetric_recipe_is_not_moved():
    """No transposes where they change nothing."""
    (entry,) = tcemu.emulate(lambda x: by_vmap(W, x), FP8).report(X)
    assert entry.product.roles == WEIGHT_ACTIVATION and entry.reason == "fp8"
    (entry,) = tcemu.emulate(lambda x: by_vmap(W, x), DEEPSEEK).report(X)
    assert entry.reason == "deepseek, A is rhs"


@pytest.mark.full
def test_dot_general_takes_the_side_of_a():
    numbers = (((1,), (1,)), ((), ()))
    same(tcemu.dot_general(DEEPSEEK, a="rhs")(W, X, numbers), tcemu.matmul(X, W.T, recipe=DEEPSEEK).T)
    x, w = X.reshape(2, 4, K), W.reshape(2, 6, K)
    batched = tcemu.dot_general(DEEPSEEK, a="rhs")(w, x, (((2,), (2,)), ((0,), (0,))))
    same(batched, jnp.swapaxes(tcemu.matmul(x, jnp.swapaxes(w, 1, 2), recipe=DEEPSEEK), 1, 2))
    with pytest.raises(ValueError, match="a='left': expected 'lhs' or 'rhs'"):
        tcemu.dot_general(DEEPSEEK, a="left")


# ---- roles and parameters in models


def encoder():
    model, x = linen_encoder(), jnp.ones((2, 4, 16))
    return model, jax.eval_shape(model.init, jax.random.key(0), x), x


LINEN = [(ACTIVATION_WEIGHT, (f"params/attention/{name}/kernel",)) for name in ("query", "key", "value")]
LINEN += [(("activation", "activation"), ())] * 2
LINEN += [(ACTIVATION_WEIGHT, (f"params/{name}/kernel",)) for name in ("attention/out", "up", "down")]


def test_flax_linen():
    model, params, x = encoder()
    assert roles(model.apply, params, x) == LINEN
    assert roles(jax.checkpoint(model.apply), params, x) == LINEN
    assert roles(jax.jit(model.apply), params, x) == LINEN
    shown = str(tcemu.emulate(model.apply, BF16).report(params, x))
    assert "params/up/kernel" in shown and "activation · weight" in shown and "weights: the argument 'variables', by its name" in shown


def test_the_gradient_of_flax_linen():
    model, params, x = encoder()
    found = roles(jax.grad(lambda params, x: (model.apply(params, x) ** 2).mean()), params, x)
    assert found[: len(LINEN)] == LINEN
    backward = [pair for pair, _ in found[len(LINEN) :]]
    assert len(backward) == 16 and all(pair[0] == "gradient" for pair in backward)
    weights = sorted(parameters for pair, parameters in found[len(LINEN) :] if pair[1] == "weight")
    assert weights == sorted(parameters for pair, parameters in LINEN if pair == ACTIVATION_WEIGHT)


@pytest.mark.full
def test_equinox_nnx_haiku():
    mlp = eqx.nn.MLP(16, 4, 32, 2, key=jax.random.key(0))
    layers = [(WEIGHT_ACTIVATION, (f"layers/{number}/weight",)) for number in range(3)]
    x = jnp.ones((8, 16))
    assert roles(jax.vmap(mlp), x) == layers  # closed over
    assert roles(lambda model, x: jax.vmap(model)(x), mlp, x) == layers  # an argument
    assert roles(mlp, x[0]) == layers  # the function itself

    class Two(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.head = nnx.Linear(16, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x):
            return self.head(jnp.tanh(self.inner(x)))

    two = [(ACTIVATION_WEIGHT, (f"{name}/kernel",)) for name in ("inner", "head")]
    model = Two(nnx.Rngs(0))
    graph, state = nnx.split(model)
    assert roles(model, x) == roles(lambda m, x: m(x), model, x) == two
    assert roles(lambda state, x: nnx.merge(graph, state)(x), state, x) == two

    hk = pytest.importorskip("haiku", reason="haiku is not installed (pip install 'tcemu[test]')")
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 2])(x)))
    params = net.init(jax.random.key(0), x)
    assert roles(net.apply, params, x) == [(ACTIVATION_WEIGHT, (f"mlp/~/linear_{number}/w",)) for number in range(2)]


def test_tied_embeddings():
    """The table is looked up, which gives data, and multiplied, which is a weight's product; its gradient comes from both."""

    def gpt(params, tokens):
        x = params["embed"][tokens]
        return jnp.tanh(x @ params["up"]) @ params["down"] @ params["embed"].T

    params = {"embed": jnp.ones((11, 4)), "up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}
    tokens = jnp.zeros((2, 3), jnp.int32)
    assert roles(gpt, params, tokens) == [(ACTIVATION_WEIGHT, (name,)) for name in ("up", "down", "embed")]


def test_a_training_loop_inside():
    """A parameter that a gradient step has changed is a parameter still, in the next turn of a scan and in the next step of a sequence."""

    def step(params, x):
        gradient = jax.grad(lambda p: (jnp.tanh(x @ p["a"]) @ p["b"]).sum())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), None

    params, xs = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}, jnp.ones((3, 2, 4))
    wanted = [(ACTIVATION_WEIGHT, ("a",)), (ACTIVATION_WEIGHT, ("b",)), (("gradient", "activation"), ())]
    wanted += [(("gradient", "weight"), ("b",)), (("gradient", "activation"), ())]
    ordered = lambda found: sorted(map(str, found))
    assert ordered(roles(lambda params, xs: lax.scan(step, params, xs)[0], params, xs)) == ordered(wanted)
    assert ordered(roles(lambda params, x: step(step(params, x)[0], x)[0], params, xs[0])) == ordered(wanted * 2)


def test_loops_and_branches():
    def rnn(params, xs):
        h, _ = lax.scan(lambda h, x: (jnp.tanh(x @ params["wx"] + h @ params["wh"]), None), params["h0"], xs)
        h = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ params["wh"]), h)
        h = lax.while_loop(lambda h: (h @ params["wx"]).sum() < 0, lambda h: h @ params["wh"], h)
        return lax.cond(h.sum() > 0, lambda h: h @ params["wx"], lambda h: params["wh"] @ h.T @ h, h)

    params = {"wx": jnp.ones((4, 4)), "wh": jnp.ones((4, 4)), "h0": jnp.ones((4, 4))}
    wx, wh = (ACTIVATION_WEIGHT, ("wx",)), (ACTIVATION_WEIGHT, ("wh",))
    branches = [(WEIGHT_ACTIVATION, ("wh",)), (("activation", "activation"), ()), wx]
    assert roles(rnn, params, jnp.ones((5, 4, 4))) == [wx, wh, wh, wx, wh, *branches]


def test_derivative_rules():
    @jax.custom_vjp
    def f(x, w):
        return x @ w

    f.defvjp(lambda x, w: (x @ w, (jnp.sin(x), w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    seen = {}

    def policy(product):
        seen[product.name] = product.roles, product.parameters

    emulated = tcemu.emulate(lambda params, x: f(x, params["w"]), policy)
    jax.grad(lambda params, x: emulated(params, x).sum())({"w": jnp.ones((4, 4))}, jnp.ones((2, 4)))
    weight = (ACTIVATION_WEIGHT, ("w",))
    backward = {"f/bwd/dot_general": (("gradient", "weight"), ("w",)), "f/bwd/dot_general.1": (("activation", "gradient"), ())}
    assert seen == {"f/dot_general": weight, "f/fwd/dot_general": weight} | backward


def test_a_mesh_changes_no_role():
    mesh = jax.make_mesh((1,), ("d",))
    spec = jax.sharding.PartitionSpec()
    fn = jax.shard_map(lambda params, x: x @ params["w"], mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    assert roles(fn, {"w": W.T}, X) == [(ACTIVATION_WEIGHT, ("w",))]


# ---- what counts as a parameter


def test_parameters_by_position_name_path_and_function():
    fn = lambda x, w: x @ w["deep"]["kernel"] + x @ w["other"]
    tree = {"deep": {"kernel": W.T}, "other": W.T}
    both = [(ACTIVATION_WEIGHT, ("deep/kernel",)), (ACTIVATION_WEIGHT, ("other",))]
    for given in (None, 1, "w", ["w"], (1,), "w/*", ["*/kernel", "other"], lambda path: path != "x"):
        assert roles(fn, X, tree, parameters=given) == both, given
    one = roles(fn, X, tree, parameters="deep/*")
    assert one == [both[0], (("activation", "activation"), ())]
    assert roles(lambda x, w: x @ w, X, W.T, parameters="w") == [(ACTIVATION_WEIGHT, ("w",))]
    with pytest.raises(ValueError, match=r"parameters='weight' matches no array of this call; its arrays are x, deep/kernel, other"):
        tcemu.emulate(fn, BF16, parameters="weight")(X, tree)


def test_a_closed_over_batch_is_data():
    fn = lambda params: (X @ params["w"]).sum()
    assert roles(fn, {"w": W.T}) == [(ACTIVATION_WEIGHT, ("w",))]
    assert roles(jax.grad(fn), {"w": W.T})[-1] == (("gradient", "activation"), ())
    assert roles(lambda x: x @ W.T, X) == [(ACTIVATION_WEIGHT, ("W",))]


def test_recipes_that_tell_their_operands_apart_warn_where_nothing_else_does():
    with pytest.warns(UserWarning, match=r"of dot_general \(activation · activation\); lhs was taken as A\..*parameters='w'.*a='rhs'"):
        tcemu.emulate(by_dot, DEEPSEEK)(W, X)
    (entry,) = tcemu.emulate(by_dot, DEEPSEEK).report(W, X)
    assert entry.undecided
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tcemu.emulate(by_dot, FP8)(W, X)
        same(
            tcemu.emulate(by_vmap, [("*", tcemu.dot_general(DEEPSEEK, a="rhs"))])(W, X),
            tcemu.emulate(by_vmap, DEEPSEEK, parameters="w")(W, X),
        )


# ---- rules


def two(params, x):
    with jax.named_scope("first"):
        x = jnp.tanh(x @ params["first"]["kernel"])
    with jax.named_scope("second"):
        return x @ params["second"]["kernel"]


PARAMS = {"first": {"kernel": jnp.ones((4, 8))}, "second": {"kernel": jnp.ones((8, 4), jnp.bfloat16)}}
ROWS = jnp.ones((2, 4))


def is_first_of_its_name(product):
    return product.index == 0


@pytest.mark.parametrize(
    "pattern",
    [
        "first/*",
        "*/kernel",
        re.compile("^first"),
        re.compile(r"kernel$"),
        is_first_of_its_name,
        Where(name="first*"),
        Where(parameter="first/*"),
        Where(role="weight", shape=(4, 8)),
        Where(role=("weight", "activation")),
        Where(shape=(2, 4)),
        Where(dtype="bfloat16"),
        Where(primitive="dot_general", name="first/*"),
        Where(),
    ],
    ids=lambda pattern: getattr(pattern, "__name__", str(pattern)),
)
def test_patterns(pattern):
    both = pattern in ("*/kernel", Where(role=("weight", "activation")), Where()) or not isinstance(pattern, str | re.Pattern | Where)
    both = both or (isinstance(pattern, re.Pattern) and pattern.pattern == "kernel$")
    wanted = ["first", "second"] if both else ["second"] if pattern == Where(dtype="bfloat16") else ["first"]
    for rules in ({pattern: BF16}, [(pattern, BF16)]):
        report = tcemu.emulate(two, rules).report(PARAMS, ROWS)
        assert [p.name.split("/")[0] for p in report.replaced] == wanted


def test_a_pattern_that_fits_nothing_is_said():
    for pattern, shown in (
        ("third/*", "'third/\\*'"),
        (re.compile("third"), "third"),
        (Where(role="gradient"), r"Where\(role='gradient'\)"),
    ):
        with pytest.warns(
            UserWarning, match=f"the rule for .*{shown}.* matches no product; the products are first/dot_general, second/dot"
        ):
            tcemu.emulate(two, {"*/kernel": BF16, pattern: None})(PARAMS, ROWS)


def test_rules_without_a_rule_are_said():
    with pytest.warns(UserWarning, match="no product is replaced .*no rule matches"):
        tcemu.emulate(two, {})(PARAMS, ROWS)


def test_the_first_rule_that_fits_counts():
    report = tcemu.emulate(two, {"first/*": None, Where(role="weight"): BF16}).report(PARAMS, ROWS)
    assert [(e.replaced, e.reason) for e in report] == [(False, "the rule for 'first/*' leaves it"), (True, "bf16")]


def test_what_is_no_rule_is_refused():
    for policy in ([(3, BF16)], {"a": BF16, 4: None}, 16, [("a", BF16, 1)]):
        with pytest.raises(TypeError, match=r"a Recipe, .* or rules: a dict, or a list of pairs"):
            tcemu.emulate(two, policy)


def test_products_say_their_line():
    (first, _) = tcemu.emulate(two, BF16).report(PARAMS, ROWS).replaced
    assert re.fullmatch(r"test_emulate_roles\.py:\d+ \(two\)", first.source)


# ---- policies as published


def replaced(policy):
    model, params, x = encoder()
    return [p.name.split("/")[1] for p in tcemu.emulate(model.apply, policy).report(params, x).replaced]


def test_linear_only_and_skip_attention():
    linear = ["attention", "attention", "attention", "attention", "up", "down"]
    for policy in (linear_only(BF16), skip_attention(BF16), linear_only({"*": BF16})):
        assert replaced(policy) == linear
    model, params, x = encoder()
    gradient = jax.grad(lambda params, x: (model.apply(params, x) ** 2).mean())
    for policy in (linear_only(BF16), skip_attention(BF16)):
        report = tcemu.emulate(gradient, policy).report(params, x)
        left = [e.name for e in report.unchanged]
        assert len(left) == 6 and all("...hqk" in name for name in left)
        assert len(report.replaced) == 3 * 6


def test_skip_ends():
    assert replaced(skip_ends(BF16)) == ["attention"] * 5 + ["up"]
    assert replaced(skip_ends(linear_only(BF16))) == ["attention"] * 3 + ["up"]
    assert replaced(skip_ends(BF16, first=0, last=2)) == ["attention"] * 6
    assert replaced(skip_ends(BF16, first=0, last=0)) == ["attention"] * 6 + ["up", "down"]
    assert replaced(skip_ends(BF16, first=9)) == ["attention"] * 2  # the products of two activations are in no layer
    with pytest.raises(ValueError, match=r"first=-1: .* number of layers"):
        skip_ends(BF16, first=-1)
    assert repr(skip_ends(None)) == "skip_ends(None, first=1, last=1)"
    assert repr(skip_ends(linear_only(None), last=2)) == "skip_ends(linear_only(None), first=1, last=2)"


@pytest.mark.full
def test_compare_takes_the_same_sides():
    model = lambda params, x: by_vmap(params["w"], x)
    (row,) = tcemu.compare(model, DEEPSEEK, ({"w": W}, X))
    exact = np.asarray(X, np.float64) @ np.asarray(W, np.float64).T
    wanted = np.linalg.norm(np.asarray(tcemu.matmul(X, W.T, recipe=DEEPSEEK), np.float64) - exact) / np.linalg.norm(exact)
    np.testing.assert_allclose(row.relative_error, wanted, rtol=1e-12)
    assert row.product.roles == WEIGHT_ACTIVATION
    assert row.sum_error < 2**-12 < row.operand_error  # FP8 sums keep 13 bits; quantised by the wrong sides, the row errors are near 1


# ---- names


def encoder_names(policy, scope=None):
    """Names and decisions of the products of a block with weights wq, wk, wv and up, whose attention has no weight."""

    def block(params, x):
        p = params["layers"][0]
        q, k, v = (x @ p[name] for name in ("wq", "wk", "wv"))
        x = x + jax.nn.softmax(jnp.einsum("td,sd->ts", q, k)) @ v
        return jax.nn.relu(x @ p["up"])

    params = {"layers": [{name: jnp.ones((8, 8)) for name in ("wq", "wk", "wv", "up")}]}
    emulated = tcemu.emulate(block, policy)
    return emulated, (params, jnp.ones((4, 8)))


def test_products_have_the_path_of_their_weight_and_attention_that_of_its_projections():
    emulated, call = encoder_names("bf16")
    names = {entry.name: entry.product.scope for entry in emulated.report(*call) if entry.product is not None}
    assert names == {
        "layers/0/wq": "dot_general", "layers/0/wk": "dot_general.1", "layers/0/wv": "dot_general.2",
        "layers/0/td,sd->ts/dot_general": "td,sd->ts/dot_general", "layers/0/dot_general.3": "dot_general.3",
        "layers/0/up": "dot_general.4",
    }  # fmt: skip


def test_a_weight_that_is_used_twice_has_two_names():
    report = tcemu.emulate(lambda params, x: x @ params["a"]["w"] @ params["a"]["w"].T, "bf16").report(
        {"a": {"w": jnp.ones((8, 8))}}, jnp.ones((4, 8))
    )
    assert [(entry.name, product.index) for entry, product in zip(report, report.replaced, strict=True)] == [("a/w", 0), ("a/w.1", 1)]


def test_attention_of_nnx_and_equinox_has_the_name_of_its_module():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=rngs)
            self.up = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return self.up(self.attention(x))

    class Layer(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        up: eqx.nn.Linear

        def __call__(self, x):
            return jax.vmap(self.up)(self.attention(x, x, x))

    one, two = jax.random.split(jax.random.key(0))
    for model, x, weight in (
        (Block(nnx.Rngs(0)), jnp.ones((1, 4, 8)), "up/kernel"),
        (Layer(eqx.nn.MultiheadAttention(2, 8, key=one), eqx.nn.Linear(8, 8, key=two)), jnp.ones((4, 8)), "up/weight"),
    ):
        report = tcemu.emulate(model, {"*att*": "bf16"}).report(x)
        assert [entry.name for entry in report.unchanged] == [weight]
        assert sum(entry.name.startswith("attention/") for entry in report) == 6 == len(report.replaced)


def test_a_rule_that_takes_projections_and_leaves_attention_says_so():
    emulated, call = encoder_names({"*/w[qkv]": None, "*/up": "bf16"})
    jax.eval_shape(emulated, *call)
    emulated, call = encoder_names({"*/w[qkv]": "bf16"})
    with pytest.warns(
        UserWarning, match=r"takes the products with layers/0/wq, layers/0/wk and leaves layers/0/td,sd->ts/dot_general, layers/0/dot"
    ):
        jax.eval_shape(emulated, *call)
    attention = tcemu.policies.Where(role=("activation", "activation"))
    for rules in ([("*/w[qkv]", "bf16"), (attention, None)], [("*/w[qkv]", "bf16"), (attention, "bf16")], {"*/w*": "bf16", "*/up": "bf16"}):
        jax.eval_shape(encoder_names(rules)[0], *call)
