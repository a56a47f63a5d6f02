"""Batch sizes at which the bits of a row change, by the cut of K of the kernel that each size gets."""

import jax.numpy as jnp
import numpy as np
import pytest

from tcemu.drift import invariance
from tcemu.formats import F32
from tcemu.replay import KernelRecipe, Lanes, Slices

RNG = np.random.default_rng(6)
W = jnp.asarray(RNG.standard_normal((24, 10)), jnp.float32)
X = jnp.asarray(RNG.standard_normal((8, 24)), jnp.float32)


def layer(x):
    return jnp.maximum(x @ W, 0) * 2


def by_batch(m, n, k):
    return KernelRecipe(F32, F32, F32, Lanes(), Slices.even(k, 3, 8) if m < 4 else Slices.single(k))


def test_a_cut_of_k_by_batch_is_found():
    found = invariance(layer, X, batches=(2, 4, 5), recipes=by_batch, targets=())
    assert found.differing == (2,) and not found.is_invariant and found.missing == ()
    assert [(change.batch, change.line.name) for change in found.changes] == [(2, "dot_general")]
    left, right = found.changes[0].kernels
    assert "in 3 slices" in left and "one slice" in right
    assert "batch 4 against 5: same bits" in str(found)
    assert found.records()[0]["batch"] == 2


def test_one_order_is_invariant_and_unknown_shapes_are_named():
    assert invariance(layer, X, batches=(4, 5), recipes=lambda m, n, k: by_batch(8, n, k), targets=()).is_invariant
    found = invariance(layer, X, batches=(4, 8), recipes="torch-f32")
    assert found.missing == ((4, 10, 24), (8, 10, 24)) and "computed by JAX" in str(found)
    with pytest.raises(ValueError, match="batches"):
        invariance(layer, X, batches=(1, 9))


@pytest.mark.full
def test_a_profile_of_an_h200_needs_no_gpu():
    x, w = (jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16) for shape in ((32, 128), (128, 16)))
    found = invariance(lambda x: x @ w, x, batches=(16, 32), recipes="torch-bf16")
    assert found.missing == ()
    assert found.is_invariant == (not found.changes)
    assert all(change.kernels[0] != change.kernels[1] for change in found.changes)
