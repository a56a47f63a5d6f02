"""PyTorch's CUDA operators: words of an H200, as the censuses of `torch_census.py` and `torch_rows_census.py` have them."""

import math
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.batch_norms import batch_norm
from tcemu.operations.functional.torch_cuda.device_functions import root_f32
from tcemu.operations.functional.torch_cuda.elementwise import OPERATORS, elementwise
from tcemu.operations.functional.torch_cuda.embeddings import embedding_backward, index_put_accumulate, scatter_add
from tcemu.operations.functional.torch_cuda.foreach import foreach_norm
from tcemu.operations.functional.torch_cuda.losses import cross_entropy, cross_entropy_backward, nll_loss
from tcemu.operations.functional.torch_cuda.norms import group_norm_backward, layer_norm
from tcemu.operations.functional.torch_cuda.numpy_evaluation import call_by_numpy, fma_f32
from tcemu.operations.functional.torch_cuda.optimizers import AdamState, adam_step, sgd_step
from tcemu.operations.functional.torch_cuda.rows import reduce, vector_norm
from tcemu.operations.functional.torch_cuda.scans import cumsum
from tcemu.operations.functional.torch_cuda.softmax import backward_kernel, forward_kernel, kernel_tree, softmax
from tcemu.operations.functional.torch_cuda.sorting import sort, topk

sys.path.insert(0, str(Path(__file__).parent))
import torch_rows_census
from torch_census import F, is_equal, kind, recorded

from tcemu.engine.arithmetic import fma as exact
from tcemu.engine.arithmetic.f32_arithmetic import less_f32
from tcemu.engine.arithmetic.sum_tree import Chain, Join
from tcemu.engine.formats.number_formats import BF16, F16, F32

GROUPS = ("unary", "binary", "reduce", "norm", "loss", "embedding", "optimizer", "matmul")
USUAL = (
    "unary|gelu|f32", "unary|silu|f16", "unary|log1p|bf16", "unary|sqrt|bf16", "binary|silu_backward|f32",
    "binary|tanh_backward|bf16", "matmul|linear|f16|16x256x256", "matmul|linear_dw|f32|33x100x77",
)  # fmt: skip
USUAL_ROWS = (
    "scan|cumsum|bf16|2x7x5;1", "order|topk|bf16|64x8;3", "taken|embedding_bwd|bf16|7x33x3", "batch|batch_norm|bf16|700x33",
    "loss|mse|bf16|37x100", "binary|mse_backward|f16|",
)  # fmt: skip
USUAL_BY_NUMPY = ("batch|native_batch_norm_bwd|f16|8x16x7x7", "batch|native_batch_norm_bwd|f32|700x33")
ONE = np.float32(1)


def marked(names, usual):
    return [name if name in usual else pytest.param(name, marks=pytest.mark.full) for name in names]


@pytest.mark.parametrize("name", marked([n for n in recorded() if kind(n).split("/")[0] in GROUPS], USUAL))
def test_a_case_of_the_census_has_the_words_of_an_h200(name):
    """A product whose kernel no rule knows is refused."""
    try:
        assert is_equal(name)
    except NotModelled:
        assert name.startswith("matmul") and name not in USUAL


@pytest.mark.parametrize("name", marked(torch_rows_census.recorded(), USUAL_ROWS))
def test_a_case_of_the_other_census_has_the_words_of_an_h200(name):
    """A case without a rule is refused."""
    try:
        assert torch_rows_census.is_equal(name)
    except NotModelled:
        assert not set(USUAL_ROWS) & {name}


@pytest.fixture
def by_numpy(monkeypatch):
    """NumPy evaluates the functions of rows, as it does for `tcemu.torch`, and nothing is compiled."""
    for name, fn in list(vars(F).items()):
        monkeypatch.setattr(F, name, partial(call_by_numpy, fn))


@pytest.mark.parametrize("name", USUAL_BY_NUMPY)
def test_a_case_has_the_words_of_an_h200_by_numpy(by_numpy, name):
    assert torch_rows_census.is_equal(name)


@pytest.mark.parametrize("operator", ["sum", "mean", "sum0", "sum_all"])
def test_some_sums_of_the_census(by_numpy, operator):
    """Lengths at which a vector begins within a row, rows share a block, and blocks share a sum."""
    names = [name for name in recorded() if kind(name) == f"reduce/{operator}" and int(name.split("|")[3]) in (5, 129, 1025, 50257)]
    assert len(names) >= 3 and all(map(is_equal, names))


SPECIAL_WORDS = np.array(
    [0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x33800000, 0x3F800000, 0x3F801000, 0x7F000000, 0x7F7FFFFF, 0x7F800000, 0x7FC00001], np.uint32
)


def hard_operands():
    """Sums on and beside midpoints of f32 by less than f64 has, subnormal sums, overflow, and special words."""
    rng = np.random.default_rng(6)
    near_one = (np.float32(1) + rng.integers(1, 1 << 12, 3000) * np.float32(2.0**-12)).astype(np.float32)
    signs = rng.choice(np.float32([-1, 1]), (3, 3000))
    tiny = np.ldexp(np.float32(1), -rng.integers(40, 150, 3000)).astype(np.float32) * signs[0]
    small = [np.ldexp(rng.standard_normal(3000), -rng.integers(60, 76, 3000)).astype(np.float32) for _ in range(2)]
    least = rng.integers(0, 1 << 24, 3000).astype(np.uint32).view(np.float32) * signs[1]
    large = [np.ldexp(near_one, 63).astype(np.float32), np.ldexp(near_one[::-1], 64).astype(np.float32)]
    end = np.full(3000, 2.0**104, np.float32) * signs[2]
    words = np.concatenate([SPECIAL_WORDS, SPECIAL_WORDS | np.uint32(1 << 31)]).view(np.float32)
    grid = [x.ravel() for x in np.meshgrid(words, words, words)]
    parts = [(near_one, near_one, tiny), (near_one, -near_one, tiny), (*small, least), (*large, end), grid]
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def test_fma_in_f64_is_the_one_in_integers():
    operands = hard_operands()
    expected = np.asarray(jax.jit(partial(exact.fma, fmt=F32))(*(x.view(np.uint32) for x in operands)))
    found = fma_f32(*operands)
    is_nan = np.isnan(expected.view(np.float32))
    assert (np.isnan(found) == is_nan).all() and (found.view(np.uint32) == expected)[~is_nan].all()
    with np.errstate(all="ignore"):
        twice = (np.multiply(*operands[:2], dtype=np.float64) + operands[2]).astype(np.float32)
    assert ((twice.view(np.uint32) != expected) & ~is_nan).sum() > 100  # rounded twice: the operands are hard ones


def test_a_comparison_that_is_traced_by_name_is_the_one_in_integers():
    x, y = (v.ravel().view(np.uint32) for v in np.meshgrid(*[np.concatenate([SPECIAL_WORDS, SPECIAL_WORDS | np.uint32(1 << 31)])] * 2))
    assert (call_by_numpy(less_f32, x, y) == np.asarray(jax.jit(less_f32)(x, y))).all()


def test_a_sum_is_the_same_by_jax_and_by_numpy():
    x = np.random.default_rng(0).standard_normal((3, 129)).astype(np.float32)
    assert (np.asarray(reduce("sum", x)) == call_by_numpy(reduce, "sum", x)).all()


def test_subnormal_terms_are_not_flushed():
    x = np.full((2, 4), 1e-45, np.float32)
    assert np.asarray(reduce("sum", x)).view(np.uint32).tolist() == [4, 4]


@pytest.mark.parametrize("fmt", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("kernel", [forward_kernel, backward_kernel])
def test_a_kernel_of_softmax_takes_every_element_once(kernel, fmt):
    for columns in (1, 31, 1025, 2049, 9216, 9217, 12289, 24577, 50257):
        how = kernel(columns, fmt)
        for shift in range(how.vector if how.is_shifted else 1):
            node = kernel_tree(how, columns, shift)
            while isinstance(node, Join):
                node = node.child
            assert isinstance(node, Chain) and np.sort(node.places[node.places >= 0]).tolist() == list(range(columns))


def test_equal_elements_are_sorted_by_index_beyond_32_elements():
    x = np.tile(np.array([1, 0, 1, 2], np.float32), 10)
    values, indices = sort(x)
    assert (np.asarray(values) == np.sort(x)).all() and (np.asarray(indices) == np.argsort(x, kind="stable")).all()
    assert np.asarray(topk(x, 33)[1]).tolist() == np.argsort(-x, kind="stable")[:33].tolist()


def test_index_put_adds_rows_in_turn():
    base, rows = np.zeros((2, 33), np.float32), np.full((3, 33), 2.0**-24, np.float32)
    rows[0] = 1
    assert np.asarray(index_put_accumulate(base, np.array([1, 1, 1]), rows))[:, 0].tolist() == [0, 1]
    narrow = np.asarray(index_put_accumulate(base[:, :2] + ONE, np.array([1, 1]), rows[1:, :2]))  # the sum of narrow rows is added
    assert narrow[:, 0].tolist() == [1, 1 + 2.0**-23]


def test_a_step_of_sgd_takes_the_gradient():
    param, buffer = sgd_step(np.ones(3, np.float32), np.full(3, 0.5, np.float32), lr=0.5)
    assert buffer is None and np.asarray(param).tolist() == [0.75] * 3


STATE = AdamState(np.zeros(5, np.float32), np.zeros(5, np.float32))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: elementwise("lgamma", np.ones(3, np.float32)), "lgamma: its device function is not known"),
        (lambda: elementwise("exp", np.ones(3, np.int32)), "expected operands of one of bf16, f16 and f32"),
        (lambda: reduce("cumsum", np.ones(3, np.float32)), "cumsum: no order is known"),
        (lambda: reduce("sum", np.ones(3, np.float32), gpu="B200"), "B200"),
        (lambda: reduce("sum", np.ones((3, 0), np.float32)), "a reduction of no elements"),
        (lambda: vector_norm(np.ones(3, np.float32), 0.0), "order 0.0"),
        (lambda: softmax(np.ones((2, 3), np.int32)), "expected bf16, f16 or f32"),
        (lambda: cumsum(np.ones((1, 9), np.float32)), "got one row"),
        (lambda: embedding_backward(np.ones((4000, 1), np.float32), np.zeros(4000, int), 2), "their order is open"),
        (lambda: scatter_add(np.ones((3, 2), np.float32), np.zeros(1, int), np.ones((1, 2), np.float32)), "adds atomically"),
        (lambda: index_put_accumulate(np.ones((3, 1), np.float32), np.zeros(1, int), np.ones((1, 1), np.float32)), "at least 2"),
        (lambda: foreach_norm([np.ones(3, np.float32)], 3.0), "order 3.0"),
        (lambda: group_norm_backward(*[np.ones((2, 4), np.float16)] * 2, *[np.ones((2, 2), np.float16)] * 2, 2), "further axes"),
        (lambda: adam_step(np.ones(5, np.float32), np.ones(5, np.float32), STATE, 1, weight_decay=0.1, form="fused"), "multiples of 4"),
        (lambda: sgd_step(ONE, ONE, form="capturable"), "capturable"),
        (lambda: batch_norm(np.ones((30000, 2), np.float32)), "known are rows that one block adds"),
        (lambda: nll_loss(np.ones((2, 3), np.float32), np.zeros(2, int), reduction="batchmean"), "batchmean"),
        (lambda: cross_entropy(np.ones((2, 1), np.float32), np.zeros(2, int), np.ones(1, np.float32), label_smoothing=0.1), "smoothing"),
    ],
)  # fmt: skip
def test_what_has_no_rule_is_named(call, said):
    with pytest.raises(NotModelled, match=said):
        call()


def test_roots_of_small_numbers_are_rounded_once_by_jax_too():
    """Below 2^-102 the difference that corrects a guess was subnormal, or zero."""
    codes = np.concatenate([np.arange(0x7FF000, 0x820000), np.arange(0x800000, 0x20000100, 2003), [0, 1, 0x7F7FFFFF]]).astype(np.uint32)
    assert np.array_equal(root_f32(codes), np.sqrt(codes.view(np.float32)).view(np.uint32))


def test_double_precision_has_no_rule():
    with pytest.raises(NotModelled, match="float64"):
        call_by_numpy(softmax, np.ones((2, 6)))


def test_nan_infinities_and_zeros_go_through_every_function():
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40], np.float32)
    for name in ("exp", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "tanh", "erf", "sigmoid"):
        exact = {"sigmoid": lambda v: 1 / (1 + np.exp(-v)), "rsqrt": lambda v: 1 / np.sqrt(v), "erf": np.vectorize(math.erf)}
        with np.errstate(all="ignore"):
            expected = exact.get(name, getattr(np, name, None))(x.astype(np.float64))
            got = np.asarray(call_by_numpy(elementwise, name, x))
        assert np.allclose(got, expected.astype(np.float32), rtol=1e-5, atol=0, equal_nan=True), name
        assert not np.isnan(expected[3:5]).any() and (np.signbit(got) == np.signbit(expected))[3:5].all(), name
    assert set(OPERATORS) > {"exp", "erf"}


def test_sines_of_large_angles_are_right():
    """Above 105615 an angle is reduced by 192 bits of 2/pi."""
    sines = {
        1e5: 0.035748797972,
        2e5: -0.0714518952125,
        -3e7: -0.964130297899,
        1e20: 0.656576677855,
        -3.4e38: 0.244084874408,
        2.0**100: -0.872183605418,
    }
    x = np.array(list(sines), np.float32)  # the sines of these f32 to 12 digits
    got = np.asarray(jax.jit(elementwise, static_argnums=0)("sin", x))
    assert np.allclose(got, list(sines.values()), rtol=2e-7)


def test_powers_angles_and_remainders_of_special_values_are_those_of_c():
    some = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 0.5, 1e-40, 3e38], np.float32)
    x, y = (v.reshape(-1) for v in np.meshgrid(some, some))
    with np.errstate(all="ignore"):
        for name, exact in (("pow", np.power), ("atan2", np.arctan2), ("fmod", np.fmod)):
            expected = exact(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
            got = np.asarray(call_by_numpy(elementwise, name, x, y))
            assert np.allclose(got, expected, rtol=1e-6, atol=1e-45, equal_nan=True), name
            assert (np.signbit(got) == np.signbit(expected))[~np.isnan(expected)].all(), name


def test_layer_norm_has_the_moments_of_each_row():
    x = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    y, mean, scale = call_by_numpy(layer_norm, x, np.ones(64, np.float32), np.zeros(64, np.float32), 1e-5)
    assert y.shape == x.shape and mean.shape == scale.shape == (2, 1)
    assert np.allclose(y, (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5), atol=1e-5)
    assert y.dtype == np.float32


@pytest.mark.full
def test_the_gradient_of_cross_entropy_is_that_of_jax():
    x, target = np.random.default_rng(2).standard_normal((4, 6)).astype(np.float32), np.array([0, 5, 2, 2])

    def loss(x):
        logarithms = jax.nn.log_softmax(x)
        return -(0.9 * logarithms[np.arange(4), target].mean() + 0.1 * logarithms.mean())

    assert np.allclose(cross_entropy_backward(ONE, x, target, label_smoothing=0.1), jax.grad(loss)(x), atol=1e-6)
