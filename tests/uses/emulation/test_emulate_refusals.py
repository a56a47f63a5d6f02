"""What `emulate` refuses, and what it warns of: nothing that it cannot see or keep is passed over without a word.

What it refuses of flax nnx is in test_emulate_state.py.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tcemu

RECIPE = tcemu.get_recipe("bf16")
X = jnp.arange(8.0).reshape(2, 4)


class Foreign:
    """An array of another library, as far as it matters here."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __matmul__(self, other):
        return Foreign(self.values @ other.values)


class ForeignArray(Foreign):
    def __array__(self, dtype=None, copy=None):
        return self.values


@pytest.mark.parametrize("kind", [Foreign, ForeignArray, lambda x: np.asarray(x, object)])
def test_arrays_of_others_are_refused(kind):
    multiply = tcemu.emulate(lambda a, b: a @ b, RECIPE)
    with pytest.raises(TypeError, match=r"an argument is .* no JAX program shows.*jax\.numpy\.asarray"):
        multiply(kind(X), kind(X.T))
    with pytest.raises(TypeError, match="no JAX program shows"):
        multiply.report(kind(X), kind(X.T))
    inside = kind(X)
    with pytest.raises(TypeError, match="a result is"):
        tcemu.emulate(lambda: inside, RECIPE)()


def test_what_is_no_array_goes_through():
    run = tcemu.emulate(lambda x, words, act=jnp.tanh: (act(x @ x.T), words, np.float32(2)), RECIPE)
    y, words, two = run(X, {"name": "it", "n": 3, "none": None})
    assert y.shape == (2, 2) and words == {"name": "it", "n": 3, "none": None} and two == 2


def test_values_left_outside_are_refused():
    class Holder:
        __slots__ = ("kept",)

    holder, seen = Holder(), []

    def in_a_slot(x):
        holder.kept = x.sum()
        return x @ x.T

    def in_a_list(x):
        seen.append(x @ x.T)
        return seen[-1] * 2

    def in_a_dict(state, x):
        state["count"] = x.sum()
        return x @ x.T

    for fn, args, place in ((in_a_slot, (X,), r"Holder\.kept"), (in_a_list, (X,), "seen"), (in_a_dict, ({}, X), r"\['count'\]")):
        with pytest.raises(TypeError, match=rf"{place}.*would be lost"):
            tcemu.emulate(fn, RECIPE)(*args)

    def returned(state, x):
        state["count"] = x.sum()
        return x @ x.T, state

    assert float(tcemu.emulate(returned, RECIPE)({}, X)[1]["count"]) == 28


def test_a_policy_that_replaces_nothing_warns():
    with pytest.warns(UserWarning, match="no product is replaced .it has no matrix products"):
        tcemu.emulate(jnp.sin, RECIPE)(X)
    with pytest.warns(UserWarning, match=r"the rule for '\*attn\*' matches no product; the products are dot_general"):
        tcemu.emulate(lambda x: x @ x.T, [("*attn*", RECIPE), ("*", RECIPE)])(X)
    with pytest.warns(UserWarning, match="no product is replaced .dot_general: not of real floats"):
        tcemu.emulate(lambda x: x @ x.T, RECIPE)(X.astype(jnp.int32))


def test_a_product_of_floats_with_an_integer_result_is_left():
    fn = lambda x: (lax.dot_general(x, x.T, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32), x @ x.T)
    x = X.astype(jnp.float16)
    run = tcemu.emulate(fn, RECIPE)
    assert [entry.replaced for entry in run.report(x)] == [False, True]
    np.testing.assert_array_equal(run(x)[0], fn(x)[0])
    with pytest.raises(TypeError, match="preferred_element_type: got int32"):
        tcemu.emulate(fn, lambda product: RECIPE)(x)
