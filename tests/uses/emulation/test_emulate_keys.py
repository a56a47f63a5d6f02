"""`emulate(..., key=...)`: every execution of a product that rounds stochastically draws bits of its own, the same ones with the same key.

Operands are the same wherever a product runs twice, so that only random bits can make its results differ.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.device_processes import run_on_devices
from support.sampling import sample_cases

import tcemu
from tcemu.uses.emulation.random_keys import fold_in_location

STOCHASTIC = dict.fromkeys("ab", tcemu.quantize.Quantizer(rounding="SR"))
FORWARD = tcemu.get_recipe("bf16").replace(name="stochastic", backward="straight_through", **STOCHASTIC)
RECIPE = FORWARD.replace(backward=FORWARD)
KEY = jax.random.key(3)
X, W = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4)), jnp.float32)
PLAIN = (((1,), (0,)), ((), ()))


def emulate_with_key(fn, key=KEY, recipe=RECIPE):
    return tcemu.emulate(fn, recipe, key=key)


def plain(x, w):
    return x @ w


# ---- one key


def test_the_product_is_that_of_dot_general_with_the_key_of_its_place():
    found, pull = jax.vjp(emulate_with_key(plain), X, W)
    product = tcemu.dot_general(RECIPE, key=fold_in_location(KEY, ("dot_general#0",)))
    wanted, pull_wanted = jax.vjp(lambda x, w: product(x, w, PLAIN), X, W)
    np.testing.assert_array_equal(found, wanted)
    jax.tree.map(np.testing.assert_array_equal, pull(W), pull_wanted(W))
    assert not np.array_equal(found, emulate_with_key(plain, jax.random.key(4))(X, W))


def test_a_key_is_missing_or_is_none():
    for run in (lambda: tcemu.emulate(plain, RECIPE)(X, W), lambda: tcemu.emulate(plain, [("*", RECIPE)]).report(X, W)):
        with pytest.raises(ValueError, match=r"policy: for dot_general: .* it gave stochastic, .* needs random bits: give key="):
            run()
    wrong: list[tuple[Any, str]] = [(3, "int"), (jax.random.split(KEY), r"key<fry>\[2\]"), (jnp.ones(3), r"float32\[3\]")]
    for key, what in wrong:
        with pytest.raises(TypeError, match=rf"key: got {what}; .* one key"):
            emulate_with_key(plain, key)
    assert emulate_with_key(plain).report(X, W).replaced[0].name == "dot_general"
    exact = tcemu.get_recipe("bf16")
    np.testing.assert_array_equal(emulate_with_key(plain, recipe=exact)(X, W), tcemu.emulate(plain, exact)(X, W))


def test_a_raw_key_is_the_key():
    np.testing.assert_array_equal(emulate_with_key(plain, jax.random.key_data(KEY))(X, W), emulate_with_key(plain)(X, W))


# ---- every execution its own bits: functions that give the results of all executions of a product, along a first axis


def twice(x, w):
    with jax.named_scope("a"), jax.named_scope("b"):
        first = x @ w
    again = jax.jit(plain)
    inner = jax.jit(lambda x, w: jax.named_call(plain, name="b")(x, w))
    return jnp.stack([first, x @ w, x @ w, again(x, w), again(x, w), jax.named_call(inner, name="a")(x, w)])


def in_scan(x, w, length=5, reverse=False):
    return lax.scan(lambda c, _: (c, x @ w), x, length=length, reverse=reverse, unroll=2)[1]


def in_while(x, w):
    """The condition's products cannot come out; a product in the body can."""
    more = lambda state: (state[0] < 5) & ((x @ w).sum() * 0 == 0)
    return lax.while_loop(more, lambda state: (state[0] + 1, state[1].at[state[0]].set(x @ w)), (0, jnp.zeros((5, 4, 4))))[1]


def in_fori_loop(x, w):
    return lax.fori_loop(0, 5, lambda i, out: out.at[i].set(x @ w), jnp.zeros((5, 4, 4)))


def in_nested_loops(x, w):
    rows = lax.scan(lambda c, _: (c, jnp.concatenate([in_scan(x, w, 2), in_while(x, w), in_scan(x, w, 2, True)])), x, length=3)[1]
    return rows.reshape(-1, 4, 4)


def in_branches(x, w):
    branch = lambda flag: lax.cond(flag, lambda x: x @ w, lambda x: x @ w, x)
    return jnp.stack([branch(x.sum() > -100), branch(x.sum() < -100), lax.switch(1, [plain, plain, plain], x, w)])


def in_checkpoint(x, w):
    layer = jax.checkpoint(plain)
    return jnp.stack([layer(x, w), layer(x, w), *lax.scan(lambda c, _: (c, layer(x, w)), x, length=3)[1]])


def in_custom_vjp(x, w, itself=False):
    """The function called in its own forward rule, or written there again."""

    @jax.custom_vjp
    def f(x, w):
        return x @ w

    f.defvjp(lambda x, w: (f(x, w) if itself else x @ w, (x, w, x @ x)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g + kept[2]))
    return jnp.stack([jax.jit(f)(x, w), *lax.scan(lambda c, _: (c, f(c, w)), x, length=3)[1]])


def in_custom_vjp_that_calls_itself(x, w):
    return in_custom_vjp(x, w, itself=True)


LOOPS = [twice, in_scan, in_while, in_fori_loop, in_nested_loops, in_branches, in_checkpoint, in_custom_vjp]


@pytest.mark.parametrize("fn", sample_cases(LOOPS, ()), ids=lambda fn: fn.__name__)
def test_no_two_executions_share_bits_and_jit_changes_none(fn):
    results = np.asarray(emulate_with_key(fn)(X, W))
    assert len({row.tobytes() for row in results}) == len(results)
    np.testing.assert_array_equal(jax.jit(emulate_with_key(fn))(X, W), results)
    assert (np.abs(results - np.asarray(fn(X, W))) < 0.05).all()


DIFFERENTIATED = [in_scan, in_branches, in_checkpoint, in_custom_vjp, in_custom_vjp_that_calls_itself]


@pytest.mark.parametrize("fn", sample_cases(DIFFERENTIATED, ()), ids=lambda fn: fn.__name__)
def test_differentiation_changes_no_bit_of_the_value(fn):
    f = emulate_with_key(fn, recipe=FORWARD if "custom_vjp" in fn.__name__ else RECIPE)
    both = jax.value_and_grad(lambda x, w: (lambda y: (y.sum(), y))(f(x, w)), (0, 1), has_aux=True)
    (_, value), gradients = both(X, W)
    (_, compiled), compiled_gradients = jax.jit(both)(X, W)
    np.testing.assert_array_equal(value, f(X, W))
    np.testing.assert_array_equal(compiled, value)
    jax.tree.map(np.testing.assert_array_equal, compiled_gradients, gradients)
    wanted = jax.grad(lambda x, w: fn(x, w).sum(), (0, 1))(X, W)
    assert all(jnp.linalg.norm(a - b) < 0.03 * jnp.linalg.norm(b) for a, b in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("itself", sample_cases((False, True), ()))
def test_forward_mode_through_a_rule_changes_no_bit_of_the_value(itself):
    @jax.custom_jvp
    def f(x, w):
        return x @ w

    f.defjvp(lambda p, t: (f(*p) if itself else p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]))
    run = emulate_with_key(lambda x, w: lax.scan(lambda c, _: (c, jax.jit(f)(c, w)), x, length=2)[1], recipe=FORWARD)
    value, tangent = jax.jvp(run, (X, W), (X, W))
    np.testing.assert_array_equal(value, run(X, W))
    assert len({np.asarray(row).tobytes() for row in tangent}) == 2 and (jnp.abs(tangent - 2 * X @ W) < 0.05).all()


@pytest.mark.full
def test_what_a_checkpoint_computes_again_has_the_bits_of_the_first_time():
    layer = jax.checkpoint(lambda c, x, w: (c * (x @ w), x @ w))
    for fn in (layer, lambda c, x, w: jax.tree.map(lambda y: y[0], lax.scan(lambda _, c: (0, layer(c, x, w)), 0, c[None])[1])):
        run = emulate_with_key(fn, recipe=FORWARD)
        summed = lambda c, run=run: (lambda found: (found[0].sum(), found))(run(c, X, W))
        (_, (first, value)), again = jax.value_and_grad(summed, has_aux=True)(jnp.ones((4, 4)))
        np.testing.assert_array_equal(again, first)
        assert not np.array_equal(value, first)


# ---- traced keys


def test_a_new_key_in_each_step_compiles_once():
    traces = []

    def gradient(w, key):
        return jax.grad(lambda w: emulate_with_key(plain, key)(X, w).sum())(w)

    @jax.jit
    def step(w, key):
        traces.append(key)
        return gradient(w, key)

    keys = jax.random.split(KEY, 3)
    found = [np.asarray(step(W, key)) for key in keys]
    assert len(traces) == 1 and len({gradient.tobytes() for gradient in found}) == 3
    np.testing.assert_array_equal(jax.jit(jax.vmap(gradient, (None, 0)))(W, keys), found)
    np.testing.assert_array_equal(
        lax.scan(lambda c, key: (c, emulate_with_key(plain, key)(X, W)), 0, keys)[1][1], emulate_with_key(plain, keys[1])(X, W)
    )


@pytest.mark.full
def test_vmap_around_shares_the_bits_and_vmap_within_does_not():
    batch = jnp.stack([X, X])
    around, within = jax.vmap(emulate_with_key(plain), (0, None))(batch, W), emulate_with_key(jax.vmap(plain, (0, None)))(batch, W)
    np.testing.assert_array_equal(around[0], around[1])
    np.testing.assert_array_equal(around[0], emulate_with_key(plain)(X, W))
    assert not np.array_equal(within[0], within[1])


def test_what_a_rule_keeps_of_its_operands_is_found_where_a_choice_brings_in_others():
    """The numbers of the operands that are kept move with them."""

    @jax.custom_vjp
    def f(x, w):
        return x @ w

    f.defvjp(lambda x, w: (x + w, (w, x)), lambda kept, g: (g * kept[0], g * kept[1]))

    def scaled(scale, x, w):
        choice = lambda *args, **kwargs: scale * lax.dot_general(*args, **kwargs)
        return tcemu.emulate(jax.jit(f), [("*", choice)])(x, w)

    found = jax.jit(lambda scale, x, w: jax.grad(lambda x, w: scaled(scale, x, w).sum(), (0, 1))(x, w))(2.0, X, W)
    jax.tree.map(np.testing.assert_array_equal, found, (W, X))


# ---- several devices


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, sys
from jax.sharding import PartitionSpec as P
import tcemu
recipe = tcemu.get_recipe("bf16").replace(**dict.fromkeys("ab", tcemu.quantize.Quantizer(rounding="SR")))
emulated = lambda fn: tcemu.emulate(fn, recipe, key=jax.random.key(3))
W = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
rows = np.random.default_rng(5).normal(size=(4, 4)).astype(np.float32)
other = np.concatenate([rows, -rows])  # -rows are rounded as rows where the bits are the same
def alike(x):
    return all((np.asarray(s.data) == np.asarray(x.addressable_shards[0].data)).all() for s in x.addressable_shards)
for check in (True, False):
    def mapped(body):
        return jax.shard_map(body, mesh=mesh, in_specs=(P("d"), P()), out_specs=(P("d"), P()), check_vma=check)
    both = lambda x, w: (x @ w, w @ w)
    around, within = emulated(mapped(both)), mapped(emulated(both))
    for run in (around, within) if sys.argv[1] == "all" else (around,) if check else (within,):
        summed = lambda w: (lambda found: (sum(y.sum() for y in found), found))(run(other, w))
        (_, (found, same)), gradient = jax.jit(jax.value_and_grad(summed, has_aux=True))(W)
        assert (np.abs(found - other @ W) < 0.05).all() and len(same.addressable_shards) == 2
        assert (np.asarray(found[:4]) != -np.asarray(found[4:])).any(), f"the same bits, check_vma={check}"
        assert alike(same), f"other bits where operands are alike, check_vma={check}"
        wanted = jax.grad(lambda w: sum(y.sum() for y in both(other, w)))(W)
        assert jnp.linalg.norm(gradient - wanted) < 0.03 * jnp.linalg.norm(wanted)
assert "flax" not in sys.modules  # nothing here asked for it
print("apart")
"""


@pytest.mark.parametrize("which", sample_cases(("each way once", "all"), ()))
def test_devices_draw_other_bits_where_their_operands_differ(which):
    """In a process of its own, with two host devices: `emulate` around `jax.shard_map` and within, with its checks and without."""
    assert run_on_devices(2, SHARDED, which) == "apart\n"
