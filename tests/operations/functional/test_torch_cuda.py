"""PyTorch's CUDA operators: words of an H200, as the census of `torch_census.py` has them."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.elementwise import OPERATORS, elementwise
from tcemu.operations.functional.torch_cuda.rows import layer_norm, reduce, rms_norm, softmax

sys.path.insert(0, str(Path(__file__).parent))
from torch_census import compute, is_equal, kind, recorded

USUAL = (
    "unary|gelu|f32", "unary|silu|f16", "unary|log1p|bf16", "unary|sqrt|bf16", "binary|silu_backward|f32",
    "binary|tanh_backward|bf16",
)  # fmt: skip
KINDS = ("reduce/sum", "reduce/mean", "reduce/sum0", "reduce/sum_all", "reduce/amax")
WARP_KINDS = ("reduce/softmax", "reduce/log_softmax", "reduce/softmax_bwd", "reduce/log_softmax_bwd")  # up to 1,024 elements


def has_rule(name):
    in_warp = kind(name) in WARP_KINDS and int(name.split("|")[3]) <= 1024
    return in_warp or kind(name) in KINDS or name.startswith(("unary", "binary"))


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.full) for n in recorded() if has_rule(n)])
def test_a_case_of_the_census_has_the_words_of_an_h200(name):
    try:
        assert is_equal(name)
    except NotModelled as error:
        assert "is not known" in str(error)


@pytest.mark.parametrize("operator", ["sum", "mean", "sum0", "sum_all"])
def test_some_sums_of_the_census(operator):
    """Lengths at which a vector begins within a row, rows share a block, and blocks share a sum."""
    names = [name for name in recorded() if kind(name) == f"reduce/{operator}" and int(name.split("|")[3]) in (5, 129, 1025, 50257)]
    assert len(names) >= 3 and all(map(is_equal, names))


def test_a_sum_is_the_same_under_jit():
    x = np.random.default_rng(0).standard_normal((3, 129)).astype(np.float32)
    assert (np.asarray(jax.jit(lambda x: reduce("sum", x))(x)) == np.asarray(reduce("sum", x))).all()


def test_subnormal_terms_are_not_flushed():
    x = np.full((2, 4), 1e-45, np.float32)
    assert np.asarray(reduce("sum", x)).view(np.uint32).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: elementwise("sin", np.ones(3, np.float32)), "sin: its device function is not known"),
        (lambda: elementwise("exp", np.ones(3, np.int32)), "expected operands of one of bf16, f16 and f32"),
        (lambda: reduce("cumsum", np.ones(3, np.float32)), "cumsum: no order is known"),
        (lambda: reduce("sum", np.ones(3, np.float32), gpu="B200"), "B200"),
        (lambda: softmax(np.ones(1025, np.float32)), "up to 1024"),
        (lambda: rms_norm(np.ones((2, 6), np.float32), np.ones(6, np.float32), 1e-6), "multiples of 4"),
        (lambda: compute("norm|rms_norm_bwd|f32|3x8"), "no rule"),
    ],
)
def test_what_has_no_rule_is_named(call, said):
    with pytest.raises(NotModelled, match=said):
        call()


def test_nan_infinities_and_zeros_go_through_every_function():
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40], np.float32)
    for name in ("exp", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "tanh", "erf", "sigmoid"):
        exact = {"sigmoid": lambda v: 1 / (1 + np.exp(-v)), "rsqrt": lambda v: 1 / np.sqrt(v), "erf": np.vectorize(__import__("math").erf)}
        with np.errstate(all="ignore"):
            expected = exact.get(name, getattr(np, name, None))(x.astype(np.float64))
        got = np.asarray(elementwise(name, x))
        assert np.allclose(got, expected.astype(np.float32), rtol=1e-5, atol=0, equal_nan=True), name
        assert not np.isnan(expected[3:5]).any() and (np.signbit(got) == np.signbit(expected))[3:5].all(), name
    assert set(OPERATORS) > {"exp", "erf"}


def test_layer_norm_has_the_moments_of_each_row():
    x = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    y, mean, scale = layer_norm(x, np.ones(64, np.float32), np.zeros(64, np.float32), 1e-5)
    assert y.shape == x.shape and mean.shape == scale.shape == (2, 1)
    assert np.allclose(y, (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5), atol=1e-5)
    assert jnp.asarray(y).dtype == jnp.float32
