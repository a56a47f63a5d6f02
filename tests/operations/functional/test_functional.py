"""`tcemu.functional` on its own: the order of sums against loops in NumPy, gradients, transformations, and refusals."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.functional_cases import words

from tcemu import functional
from tcemu.engine.arithmetic.libdevice import erf_f32, log_f32, tanh_f32
from tcemu.functional import RowSum, SoftmaxKernel

RNG = np.random.default_rng(5)
X = RNG.standard_normal((3, 24)).astype(np.float32)
WEIGHT, BIAS = RNG.standard_normal((2, 24)).astype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)


# ---- the order of sums


def fold(values, order):
    """Add a power of two of numbers in pairs."""
    while len(values) > 1:
        half = len(values) // 2
        pairs = zip(values[::2], values[1::2], strict=True) if order == "near" else zip(values[:half], values[half:], strict=True)
        values = [np.float32(x + y) for x, y in pairs]
    return values[0]


def chain(values):
    total = values[0]
    for value in values[1:]:
        total = np.float32(total + value)
    return total


def place(order, index):
    """Register, warp and lane of an element of a tile, by the words of `RowSum`'s docstring."""
    register = index // (order.vector * order.lanes * order.warps) * order.vector + index % order.vector
    return register, index // (order.vector * order.lanes) % order.warps, index // order.vector % order.lanes


def reference_sum(order, row):
    """Add a row element by element; a row fills the lanes and warps."""
    tile = order.tile or 1 << (len(row) - 1).bit_length()
    row = np.pad(row, (0, -len(row) % tile))
    threads: dict = {}
    for start in range(0, len(row), tile):
        for index in range(tile):
            at = place(order, index)
            value = row[start + index]
            before = threads.get(at, np.float32(0)) if order.tile else None
            threads[at] = value if before is None else np.float32(before + value)
    registers, warps, lanes = (max(at[i] for at in threads) + 1 for i in range(3))
    sums = []
    for warp in range(warps):
        by_lane = []
        for lane in range(lanes):
            values = [threads[register, warp, lane] for register in range(registers)]
            by_lane.append(chain(values) if order.thread_order == "chain" else fold(values, "near"))
        sums.append(fold(by_lane, order.lane_order))
    return chain(sums) if order.warp_order == "chain" else fold(sums, order.warp_order)


ORDERS = (
    (RowSum(2, 4), 300),
    (RowSum(2, 2, thread_order="chain", lane_order="near", warp_order="chain"), 300),
    (RowSum(1, 1, tile=64), 200),
    (RowSum(4, 1), 17),
    (RowSum(1, 2, lanes=4), 40),
)


@pytest.mark.parametrize(
    ("order", "columns"), [pytest.param(*case, marks=[pytest.mark.full] * (number % 2)) for number, case in enumerate(ORDERS)]
)
@pytest.mark.parametrize("scale", [1.0, 2.0**-130], ids=["device", "integers"])
def test_the_order_of_a_sum(order, columns, scale):
    """The device adds the first; the second has subnormal numbers, which integers must add."""
    row = (np.random.default_rng(columns).standard_normal(columns) * scale).astype(np.float32)
    assert words(reference_sum(order, row)) == np.asarray(jax.jit(order.sum)(jnp.asarray(words(row))))[0]


def test_a_sum_of_special_values():
    rows = np.array([[1, np.nan], [np.inf, -np.inf], [np.inf, 3], [-0.0, -0.0], [-0.0, 0.0]], np.float32)
    expected = [0x7FFFFFFF, 0x7FFFFFFF, 0x7F800000, 0x80000000, 0]
    assert np.asarray(jax.jit(RowSum().sum)(jnp.asarray(words(rows))))[:, 0].tolist() == expected
    assert np.asarray(jax.jit(RowSum(tile=2).sum)(jnp.asarray(words(rows))))[3, 0] == 0  # tiles are added to +0


# ---- libdevice


@pytest.mark.full
@pytest.mark.parametrize(("function", "exact", "ulps"), [(log_f32, np.log, 1), (erf_f32, None, 2), (tanh_f32, np.tanh, 2)])
def test_libdevice_lies_within_its_documented_error(function, exact, ulps):
    """The bounds of the CUDA programming guide, for a check of the transcription; the bits are held by the kernels' PTX."""
    x = np.concatenate([np.exp2(np.linspace(-30, 6, 800)), -np.exp2(np.linspace(-30, 6, 800)) * (function is not log_f32)])
    x = x[x != 0].astype(np.float32)
    if exact is None:
        from math import erf

        exact = np.vectorize(erf)
    wanted = exact(x.astype(np.float64))
    got = np.asarray(jax.jit(function)(jnp.asarray(words(x)))).view(np.float32)
    assert np.all(np.abs(got - wanted) <= ulps * np.spacing(np.abs(wanted).astype(np.float32)) + 2.0**-149)


def test_libdevice_of_special_values():
    specials = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0], np.float32)
    run = lambda function: np.asarray(jax.jit(function)(jnp.asarray(words(specials)))).tolist()
    one, infinity, nan, sign = 0x3F800000, 0x7F800000, 0x7FFFFFFF, 1 << 31
    assert run(log_f32) == [nan, infinity, nan, sign | infinity, sign | infinity, nan]
    assert run(erf_f32)[:5] == [nan, one, sign | one, 0, sign]
    assert run(tanh_f32)[1:5] == [one, sign | one, 0, sign]


# ---- the functions

CALLS = {
    "softmax": (lambda x: functional.softmax(x, kernel="triton"), lambda x: jax.nn.softmax(x)),
    "log_softmax": (lambda x: functional.log_softmax(x, kernel="triton"), lambda x: jax.nn.log_softmax(x)),
    "silu": (lambda x: functional.silu(x, kernel="liger"), jax.nn.silu),
    "gelu": (lambda x: functional.gelu(x, kernel="liger"), jax.nn.gelu),
    "gelu erf": (lambda x: functional.gelu(x, kernel="triton_erf"), lambda x: jax.nn.gelu(x, approximate=False)),
    "rms_norm": (
        lambda x: functional.rms_norm(x, WEIGHT, eps=1e-6, kernel="liger"),
        lambda x: x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * WEIGHT,
    ),
    "layer_norm": (
        lambda x: functional.layer_norm(x, WEIGHT, BIAS, eps=1e-6, kernel="triton"),
        lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6) * WEIGHT + BIAS,
    ),
    "cross_entropy": (
        lambda x: functional.cross_entropy(x, jnp.arange(x.shape[0]) if x.ndim > 1 else 1, kernel="liger"),
        lambda x: -jax.nn.log_softmax(x)[jnp.arange(3), jnp.arange(3)],
    ),
    "rotary": (
        lambda x: functional.rotary(x, jnp.cos(BIAS[:12]), jnp.sin(BIAS[:12]), kernel="liger"),
        lambda x: jnp.concatenate(
            [x[..., :12] * jnp.cos(BIAS[:12]) - x[..., 12:] * jnp.sin(BIAS[:12]),
             x[..., 12:] * jnp.cos(BIAS[:12]) + x[..., :12] * jnp.sin(BIAS[:12])], axis=-1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "softmax" else pytest.mark.full) for name in CALLS])
def test_the_value_is_near_the_formula_and_the_gradient_is_that_of_the_formula(name):
    function, formula = CALLS[name]
    direction = np.cos(np.arange(np.prod(formula(X).shape))).reshape(formula(X).shape).astype(np.float32)
    value, gradient = jax.jit(lambda x: (function(x), jax.grad(lambda x: jnp.sum(direction * function(x)))(x)))(X)
    np.testing.assert_allclose(value, formula(X), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: jnp.sum(direction * formula(x)))(X), rtol=2e-5, atol=2e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in CALLS if name != "cross_entropy"])
def test_batch_axes_vmap_and_rows_alone_give_the_same_words(name):
    function, _ = CALLS[name]
    together = words(function(X))
    assert (words(function(X[:, None])) == together[:, None]).all()
    assert (words(jax.vmap(function)(X)) == together).all()
    assert (words(function(X[1])) == together[1]).all()


@pytest.mark.full
def test_dtypes_axes_and_what_if():
    x = X.astype(BF16)
    assert functional.softmax(x, kernel="triton").dtype == BF16
    assert functional.softmax(x, kernel="triton", dtype="float32").dtype == np.float32
    assert (words(functional.softmax(X.T, axis=0, kernel="triton")) == words(functional.softmax(X, kernel="triton")).T).all()
    exact = SoftmaxKernel(power="exact", division="rn")
    difference = words(functional.softmax(X, kernel=exact)) != words(functional.softmax(X, kernel="triton"))
    assert difference.any()
    assert functional.softmax(np.zeros((2, 0), np.float32), kernel="triton").shape == (2, 0)
    pairs = functional.rotary(X, np.cos(X[:, :12]), np.sin(X[:, :12]), kernel=functional.RotaryKernel("interleaved"))
    halves = functional.rotary(
        np.concatenate([X[:, 0::2], X[:, 1::2]], -1), np.cos(X[:, :12]), np.sin(X[:, :12]), kernel=functional.RotaryKernel()
    )
    assert (words(pairs)[:, 0::2] == words(halves)[:, :12]).all()


# ---- refusals


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: functional.softmax(X, kernel="cudnn"), ValueError, "kernel='cudnn'.*triton"),
        (lambda: functional.softmax(X, kernel=functional.SiluKernel()), TypeError, "kernel.*SiluKernel.*SoftmaxKernel"),
        (lambda: functional.softmax(X, 2, kernel="triton"), ValueError, "axis=2"),
        (lambda: functional.softmax(np.arange(3), kernel="triton"), TypeError, "x: got int"),
        (lambda: functional.softmax(X, kernel="triton", dtype=np.int32), TypeError, "dtype: got int32"),
        (lambda: functional.softmax(X.astype(ml_dtypes.float8_e4m3fn), kernel="triton"), TypeError, "x: got float8_e4m3fn"),
        (lambda: functional.rms_norm(X, WEIGHT[:3], eps=1e-6, kernel="liger"), ValueError, "weight: got shape .3.*24"),
        (lambda: functional.rms_norm(X, WEIGHT, eps="x", kernel="liger"), TypeError, "eps='x'"),
        (
            lambda: functional.rms_norm(X, WEIGHT, eps=0, offset=1, kernel=functional.RmsNormKernel(add_offset=False)),
            ValueError, "offset=1",
        ),
        (lambda: functional.silu_mul(X, X[:1], kernel="liger"), ValueError, "gate is .3, 24. and up .1, 24."),
        (lambda: functional.cross_entropy(X, np.zeros(2, int), kernel="liger"), ValueError, "labels .2."),
        (lambda: functional.cross_entropy(X, np.zeros(3), kernel="liger"), TypeError, "labels: got float"),
        (lambda: functional.cross_entropy(X, np.zeros(3, int), kernel="liger", count=0), ValueError, "count=0"),
        (lambda: functional.rotary(X[:, :3], X[:, :1], X[:, :1], kernel="liger"), ValueError, "x: got shape"),
        (lambda: functional.rotary(X, X, X, kernel="liger"), ValueError, "cos: got shape"),
        (lambda: functional.rotary(X, X[:, :12], X[:, :12].astype(BF16), kernel="liger"), TypeError, "one dtype"),
        (lambda: functional.get_kernel("softmin", "triton", columns=3), ValueError, "function='softmin'.*softmax"),
        (lambda: functional.get_kernel("softmax", "x", columns=3), ValueError, "name='x'.*triton"),
        (lambda: RowSum(warps=3), ValueError, "warps=3.*power of two"),
        (lambda: RowSum(lanes=64), ValueError, "lanes=64.*32 lanes"),
        (lambda: RowSum(lane_order="up"), ValueError, "lane_order='up'.*far, near"),
        (lambda: RowSum(fused=1), ValueError, "fused=1"),
        (lambda: SoftmaxKernel(power="tanh"), ValueError, "power='tanh'.*ex2.approx"),
        (lambda: SoftmaxKernel(block=0), ValueError, "block=0"),
        (lambda: SoftmaxKernel(sums=4), ValueError, "sums=4.*RowSum"),
        (lambda: functional.GeluKernel("tan"), ValueError, "form='tan'.*tanh.approx"),
        (lambda: functional.RotaryKernel(fused=None), ValueError, "fused=None"),
    ],
)  # fmt: skip
def test_refusals_name_the_argument(call, error, said):
    with pytest.raises(error, match=said):
        call()
