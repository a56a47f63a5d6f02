"""`emulate` of flax nnx models writes back what a call changes: statistics, counters and random streams are those of the model itself.

With a policy of None nothing is emulated, so that every bit must be the plain model's. With a recipe, only products may differ.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu

nnx = pytest.importorskip("flax.nnx", reason="flax is not installed (pip install 'tcemu[flax]')")
optax = pytest.importorskip("optax", reason="optax is not installed (pip install 'tcemu[flax]')")

RECIPE = tcemu.get_recipe("bf16")
X, IMAGES = (jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32) for shape in ((4, 6), (2, 6, 6, 1)))


class Dense(nnx.Module):
    """Everything that a call can change: statistics, a random stream, a variable, an array, a number."""

    def __init__(self, rngs):
        self.linear, self.norm, self.dropout = nnx.Linear(6, 6, rngs=rngs), nnx.BatchNorm(6, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.calls, self.total, self.number = nnx.Variable(jnp.zeros((), jnp.int32)), nnx.data(jnp.zeros(())), 0

    def __call__(self, x):
        self.calls[...] += 1
        self.total = self.total + jnp.abs(x).sum()
        self.number += 1
        return self.dropout(self.norm(self.linear(x)))

    def encode(self, x, *, scale=1):
        return scale * self(x)


class Convolutional(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.norm = nnx.Conv(1, 4, (3, 3), rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.dropout, self.out = nnx.Dropout(0.25, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x))).mean((1, 2))
        return self.out(self.dropout(x))


class Tied(nnx.Module):
    """One embedding in two places, each of which a call changes."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(6, 6, rngs=rngs)
        self.again = self.embed

    def __call__(self, x):
        self.again.embedding[...] = self.again.embedding[...] * 0.5
        return self.embed.attend(x)


def contents(*objects):
    """What objects hold, and how they are made."""
    graph, state = nnx.split(list(objects))
    raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return graph, [np.asarray(raw(x)) for x in jax.tree.leaves(state)]


def check_same(found, wanted):
    (graph, leaves), (graph_wanted, leaves_wanted) = contents(*found), contents(*wanted)
    assert graph == graph_wanted
    for a, b in zip(leaves, leaves_wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def two(kind):
    return kind(nnx.Rngs(0)), kind(nnx.Rngs(0))


# ---- forms of a call: what is called with an input, given the model and a policy

FORMS = {
    "the model": lambda m, p: lambda x: tcemu.emulate(m, p)(x),
    "the model, once": lambda m, p: tcemu.emulate(m, p),
    "an argument": lambda m, p: partial(tcemu.emulate(lambda m, x: m(x), p), m),
    "by its name": lambda m, p: lambda x: tcemu.emulate(lambda x, *, m: m(x), p)(x, m=m),
    "in containers": lambda m, p: lambda x: tcemu.emulate(lambda d, x: d["models"][0](x), p)({"models": (m,)}, x),
    "a method": lambda m, p: tcemu.emulate(m.encode, p),
    "a partial function": lambda m, p: tcemu.emulate(partial(type(m).encode, m, scale=1), p),
    "a partial method": lambda m, p: tcemu.emulate(partial(partial(m.encode), scale=1), p),
    "as two arguments": lambda m, p: lambda x: tcemu.emulate(lambda a, b, x: b(x) if a is b else None, p)(m, m, x),
    "nnx.jit around": lambda m, p: partial(nnx.jit(tcemu.emulate(lambda m, x: m(x), p)), m),
    "nnx.jit around a call": lambda m, p: partial(nnx.jit(lambda m, x: tcemu.emulate(m, p)(x)), m),
    "nnx.jit within": lambda m, p: partial(tcemu.emulate(nnx.jit(lambda m, x: m(x)), p), m),
}


USUAL_FORMS = ("in containers",)


@pytest.mark.parametrize("form", sample_cases(FORMS, USUAL_FORMS))
def test_three_calls_leave_the_model_as_plain_calls_do(form):
    model, wanted = two(Dense)
    call, plain = FORMS[form](model, None), nnx.jit(lambda m, x: m(x)) if "nnx.jit" in form else lambda m, x: m(x)
    masks = []
    for _ in range(3):
        found = call(X)
        np.testing.assert_array_equal(found, plain(wanted, X))
        masks.append(np.asarray(found == 0).tobytes())
    check_same([model], [wanted])
    assert len(set(masks)) == 3 and int(model.calls[...]) == model.number == 3


@pytest.mark.parametrize("form", sample_cases(["the model", "nnx.jit around"], ["the model"]))
def test_with_a_recipe_the_state_changes_through_the_products_only(form):
    model, by_hand = two(Dense)
    call, linear = FORMS[form](model, RECIPE), tcemu.emulate(lambda m, x: m(x), RECIPE)
    for _ in range(3):
        y = linear(by_hand.linear, X)
        mask = np.asarray(by_hand.dropout(by_hand.norm(y)) == 0)
        np.testing.assert_array_equal(np.asarray(call(X) == 0), mask)
    for name in ("mean", "var"):
        np.testing.assert_allclose(getattr(model.norm, name)[...], getattr(by_hand.norm, name)[...], rtol=3e-7 if "jit" in form else 0)
    plain = Dense(nnx.Rngs(0))
    plain(X)
    assert (np.asarray(model.norm.mean[...]) != np.asarray(plain.norm.mean[...])).any()
    assert int(model.dropout.rngs.count[...]) == int(model.calls[...]) == 3


@pytest.mark.full
def test_a_convolutional_model_keeps_its_statistics():
    model, wanted = two(Convolutional)
    for _ in range(3):
        np.testing.assert_array_equal(tcemu.emulate(model, None, convolutions=True)(IMAGES), wanted(IMAGES))
    check_same([model], [wanted])
    run = tcemu.emulate(model, RECIPE, convolutions=True)
    assert len(run.report(IMAGES).replaced) == 2
    before = contents(model)[1]
    assert run.report(IMAGES) is not None and all((a == b).all() for a, b in zip(before, contents(model)[1], strict=True))  # nothing ran
    run(IMAGES)
    assert int(model.dropout.rngs.count[...]) == 4 and (model.norm.mean[...] != wanted.norm.mean[...]).any()


# ---- what is shared, returned or new


def test_what_is_reached_twice_is_written_once():
    model, wanted = two(Tied)
    for _ in range(2):
        np.testing.assert_array_equal(tcemu.emulate(model, None)(X), wanted(X))
    check_same([model], [wanted])
    assert model.again is model.embed
    first, second = nnx.Variable(jnp.zeros(())), nnx.Variable(jnp.ones(()))

    def swap(a, b, both):
        both["a"][...], both["b"][...] = b[...] + 1, a[...] + 1

    tcemu.emulate(swap, None)(first, second, {"a": first, "b": second})
    assert float(first[...]) == 2 and float(second[...]) == 1


def test_results_are_the_objects_themselves_or_new_ones():
    model = Dense(nnx.Rngs(0))
    same, layer, new, y = tcemu.emulate(lambda m, x: (m, m.linear, nnx.Linear(6, 2, rngs=nnx.Rngs(1)), m(x)), None)(model, X)
    assert same is model and layer is model.linear and new.kernel.shape == (6, 2) and y.shape == (4, 6)
    assert new(X).shape == (4, 2) and int(model.calls[...]) == 1


def test_variables_that_a_call_makes_are_there_afterwards():
    class Making(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(6, 6, rngs=rngs)

        def __call__(self, x):
            y = self.linear(x)
            if hasattr(self, "largest"):
                self.largest[...] = jnp.maximum(self.largest[...], y.max())
            else:
                self.largest = nnx.Variable(y.max())
            return y

    model, wanted = two(Making)
    for number in range(3):
        np.testing.assert_array_equal(tcemu.emulate(model, None)((1 + number) * X), wanted((1 + number) * X))
    check_same([model], [wanted])
    assert float(model.largest[...]) > 0


def test_a_split_model_works_too():
    """The lines that the refusal names."""
    model, wanted = two(Dense)
    graph, state = nnx.split(model)

    def pure(state, x):
        m = nnx.merge(graph, state)
        return m(x), nnx.state(m)

    for _ in range(2):
        y, state = tcemu.emulate(pure, None)(state, X)
        np.testing.assert_array_equal(y, wanted(X))
    nnx.update(model, state)
    assert int(model.calls[...]) == 2
    np.testing.assert_array_equal(model.norm.mean[...], wanted.norm.mean[...])


# ---- transforms around and within


def loss(model, x):
    y = model(x)
    return (y * y).mean(), y


def train(model, optimizer, x, *, loss):
    (value, _), gradients = nnx.value_and_grad(loss, has_aux=True)(model, x)
    optimizer.update(model, gradients)
    return value


STEPS = {
    "the loss": lambda policy: partial(train, loss=tcemu.emulate(loss, policy)),
    "the step": lambda policy: tcemu.emulate(partial(train, loss=loss), policy),
}


TRAINED = [(Dense, "the loss"), (Convolutional, "the step"), (Dense, "the step"), (Convolutional, "the loss")]


@pytest.mark.parametrize("case", sample_cases(TRAINED, TRAINED[1:2], lambda case: f"{case[0].__name__} {case[1]}"))
def test_three_steps_of_training(case):
    kind, what = case
    x, (model, wanted) = {Dense: X, Convolutional: IMAGES}[kind], two(kind)
    adam = optax.adam(1e-2)
    optimizer, optimizer_wanted = (nnx.Optimizer(m, adam, wrt=nnx.Param) for m in (model, wanted))
    step, plain = nnx.jit(STEPS[what](None)), nnx.jit(partial(train, loss=loss))
    for _ in range(3):
        np.testing.assert_array_equal(step(model, optimizer, x), plain(wanted, optimizer_wanted, x))
    check_same([model, optimizer], [wanted, optimizer_wanted])
    before = contents(nnx.state(model, nnx.Param))[1]
    value = nnx.jit(STEPS[what](RECIPE))(model, optimizer, x)
    np.testing.assert_allclose(value, plain(wanted, optimizer_wanted, x), rtol=0.05)
    assert int(optimizer.step[...]) == 4 and int(model.dropout.rngs.count[...]) == 4
    assert all((a != b).any() for a, b in zip(before, contents(nnx.state(model, nnx.Param))[1], strict=True))


def in_remat(model, x):
    return nnx.remat(lambda m, x: m(x))(model, x)


def in_scan(model, x):
    """The model runs three times in a loop, and is carried."""

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def turn(carry, x):
        model, y = carry
        y = model(y) + x
        return (model, y), y

    return turn((model, x), jnp.stack([x, x, x]))[1]


def in_vmap(model, x):
    """Weights and statistics are alike for all members; the random stream is split."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}), 0))
    def run(dropout, x):
        return dropout(x)

    return run(model.dropout, jnp.stack([x, 2 * x, model.linear(x)]))


def in_gradient(model, x):
    return nnx.grad(lambda m: loss(m, x)[0])(model).linear.kernel[...]


def in_jax_gradient(model, x):
    return jax.grad(lambda x: model.linear(x).sum())(model(x))


WITHIN = (in_remat, in_scan, in_vmap, in_gradient, in_jax_gradient)


@pytest.mark.parametrize("fn", sample_cases(WITHIN, (), lambda fn: fn.__name__))
def test_transforms_within(fn):
    model, wanted = two(Dense)
    plain, call = nnx.jit(fn), nnx.jit(tcemu.emulate(fn, None))
    for _ in range(2):
        np.testing.assert_array_equal(call(model, X), plain(wanted, X))
    check_same([model], [wanted])
    emulated = tcemu.emulate(fn, RECIPE)
    assert len(emulated.report(model, X).replaced) >= 1
    found, near = emulated(model, X), plain(wanted, X)
    assert found.shape == near.shape and not np.array_equal(found, near)
    assert int(model.dropout.rngs.count[...]) == int(wanted.dropout.rngs.count[...])


def test_emulate_within_emulate():
    model, wanted = two(Dense)
    inner = tcemu.emulate(lambda m, x: m(x), None)
    np.testing.assert_array_equal(tcemu.emulate(lambda m, x: inner(m, x) + m(x), None)(model, X), wanted(X) + wanted(X))
    check_same([model], [wanted])


# ---- where nothing can be written


def test_what_is_closed_over_is_read_but_not_changed():
    model = Dense(nnx.Rngs(0))
    before = contents(model)
    refused = {
        "closed over": lambda: tcemu.emulate(lambda x: model(x), RECIPE)(X),
        "closed over by jax.jit": lambda: jax.jit(tcemu.emulate(model, RECIPE))(X),
        "closed over by nnx.jit": lambda: nnx.jit(lambda x: tcemu.emulate(lambda m, x: m(x), RECIPE)(model, x))(X),
    }
    for call in refused.values():
        with pytest.raises(TypeError, match=r"would change what it closes over(.|\n)*nnx\.merge(.|\n)*nnx\.update"):
            call()
        assert contents(model)[0] == before[0]
        assert all((a == b).all() for a, b in zip(contents(model)[1], before[1], strict=True))
    linear = model.linear
    read = [jax.jit(tcemu.emulate(linear, RECIPE))(X), tcemu.emulate(lambda x: linear(x), RECIPE)(X), tcemu.emulate(linear, RECIPE)(X)]
    for y in read:
        np.testing.assert_array_equal(y, read[-1])
