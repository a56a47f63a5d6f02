"""What-if through recipes: models swept in one compiled program, the theory of the curve, and the surrogate against measured errors."""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcemu
from tcemu import Recipe, formats
from tcemu.study import expected_error, surrogate

F16 = Recipe("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sm_90a")
BF16 = Recipe("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "sm_90a")


def operands(n, seed=0):
    return np.random.default_rng(seed).standard_normal((2, n, n)).astype(np.float32)


def exact(recipe, a, b):
    """The product of the rounded operands."""
    x, y = (np.asarray(formats.round_float(fmt, v), np.float64) for fmt, v in ((recipe.op.a, a), (recipe.op.b, b)))
    return x @ y


def measure_errors(recipe, a, b, widths):
    """The root mean square error of the sums for each number of fraction bits, and how often the sweep was traced and compiled."""
    traces = []

    @jax.jit
    @jax.vmap
    def sweep(fraction_bits):
        traces.append(None)
        return tcemu.matmul(a, b, recipe=recipe.what_if(fraction_bits=fraction_bits))

    d = np.concatenate([np.asarray(sweep(jnp.array(part)), np.float64) for part in np.reshape(widths, (-1, len(widths) // 2))])
    return np.sqrt(((d - exact(recipe, a, b)) ** 2).mean((1, 2))), (len(traces), sweep._cache_size())


WIDTHS = np.arange(6, 32)  # two halves of one shape


@pytest.fixture(scope="module")
def f16_sweep():
    return measure_errors(F16, *operands(64), WIDTHS)


def follows_the_theory(widths, error, counted):
    assert counted == (1, 1)
    ratios = error[:-1] / error[1:]
    cut = (widths[:-1] >= 8) & (widths[:-1] < 20)
    assert (np.abs(ratios[cut] - 2) < 0.2).all(), ratios  # a cut of 2^-f of the largest exponent in a step
    assert (np.abs(ratios[widths[:-1] >= 28] - 1) < 0.02).all(), ratios  # f32's own 23 bits, rounded toward zero


def test_a_sweep_compiles_once_and_halves_the_error_per_bit(f16_sweep):
    follows_the_theory(WIDTHS, *f16_sweep)


@pytest.mark.full
def test_the_same_for_512_cubed():
    widths = np.arange(8, 32)  # 8 to 30, and one more
    follows_the_theory(widths, *measure_errors(F16, *operands(512), widths))


FIELDS = {"floor": [-133, 4], "terms": [16, 5], "result_bits": [23, 9], "rounding": [1, 0], "fraction_bits": [25, 11]}


@pytest.mark.full  # the usual run sweeps fraction_bits above
@pytest.mark.parametrize("name", FIELDS)
def test_every_numeric_field_is_swept(name):
    a, b = operands(20, seed=1)
    swept = jax.vmap(lambda v: tcemu.matmul(a, b, recipe=BF16.what_if(**{name: v})))(jnp.array(FIELDS[name]))
    for d, value in zip(swept, FIELDS[name], strict=True):
        plain = formats.ROUNDINGS[value] if name == "rounding" else value
        want = tcemu.gemm(a, b, op=BF16.op, target="sm_90a", model=tcemu.get_model(BF16.op, "sm_90a").replace(**{name: plain}))
        np.testing.assert_array_equal(np.asarray(d).view(np.uint32), np.asarray(want).view(np.uint32))
    assert (np.asarray(swept[0]) != np.asarray(swept[1])).any()


def follows_the_measured(recipe, error, size, slope):
    """log2 of the root mean square error, and its slope over fraction_bits against finite differences of what was measured."""
    a, b = operands(64)
    widths, error = WIDTHS[WIDTHS < 22], np.log2(error[WIDTHS < 22])

    @jax.jit
    @jax.value_and_grad
    def predicted(fraction_bits):
        mean, variance = expected_error(a, b, fraction_bits, op=recipe.op, target="sm_90a")
        return jnp.log2(jnp.mean(mean**2 + variance)) / 2

    found = np.array([predicted(float(f)) for f in widths])
    np.testing.assert_allclose(found[:, 0], error, atol=size)
    np.testing.assert_allclose(found[1:-1, 1], (error[2:] - error[:-2]) / 2, atol=slope)
    between = [float(predicted(11 + t)[0]) for t in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert (np.diff(between) < 0).all()  # real-valued, and downhill all the way


@pytest.mark.full
def test_the_surrogate_follows_the_measured_error(f16_sweep):
    follows_the_measured(F16, f16_sweep[0], 0.15, 0.06)


@pytest.mark.full
def test_the_surrogate_follows_the_measured_error_of_bf16():
    follows_the_measured(BF16, measure_errors(BF16, *operands(64), WIDTHS)[0], 0.3, 0.15)


def drawn(kind, rng, k):
    a, b = (rng.random(shape) if kind == "uniform" else rng.standard_normal(shape) for shape in ((16, k), (k, 16)))
    if kind == "outliers":
        a[:, ::50] *= 30
    return a.astype(np.float32), b.astype(np.float32)


@pytest.mark.full
@pytest.mark.parametrize("k", [64, 1024])
def test_the_range_of_validity_is_as_documented(k):
    """docs/concepts/surrogate.md: from 2 to 22 bits the root mean square error is 0.75 to 1.34 times the measured one."""
    widths = np.arange(2, 24)
    predicted = jax.jit(lambda a, b: jax.lax.map(lambda w: expected_error(a, b, w, op=F16.op, target="sm_90a"), jnp.float32(widths[:-1])))
    for kind in ("normal", "uniform", "outliers"):
        a, b = drawn(kind, np.random.default_rng(0), k)
        found, _ = measure_errors(F16, a, b, widths)
        mean, variance = (np.asarray(v, np.float64) for v in predicted(a, b))
        ratios = np.sqrt((mean**2 + variance).mean((1, 2))) / found[:-1]
        assert ratios.min() > 0.75 and ratios.max() < 1.34, (kind, ratios)


def has_gradients(key):
    """In the width, by finite differences, and in the operands."""
    a, b = operands(32, seed=2)
    xy = exact(BF16, a, b)
    loss = lambda a, f: jnp.mean((surrogate(a, b, f, op=BF16.op, target="sm_90a", key=key) - xy) ** 2)
    value_and_grad = jax.jit(jax.value_and_grad(loss, (0, 1)))
    step = 2.0**-6
    (low, _), (_, (da, df)), (high, _) = (value_and_grad(a, 9 + d) for d in (-step, 0.0, step))
    assert df < 0 and np.isfinite(df) and (da != 0).any()
    np.testing.assert_allclose(df, (high - low) / (2 * step), rtol=0.05)


@pytest.mark.full
def test_the_expected_form_has_gradients_in_the_width_and_the_operands():
    has_gradients(None)


@pytest.mark.full
def test_the_noise_form_has_gradients_and_the_variance():
    has_gradients(jax.random.key(1))
    a, b = operands(32, seed=2)
    how, xy = {"op": BF16.op, "target": "sm_90a"}, exact(BF16, a, b)
    mean, variance = expected_error(a, b, 9.0, **how)
    np.testing.assert_allclose(surrogate(a, b, 9.0, **how), xy + mean, rtol=1e-4, atol=1e-4)
    draws = jax.vmap(lambda key: surrogate(a, b, 9.0, **how, key=key))(jax.random.split(jax.random.key(0), 400)) - xy
    np.testing.assert_allclose(np.mean((draws - mean) ** 2 / variance), 1, atol=0.02)
    np.testing.assert_allclose(np.mean((draws - mean) / np.sqrt(variance)), 0, atol=0.01)


def test_what_the_surrogate_does_not_cover_is_told():
    with pytest.raises(tcemu.Unsupported, match="align all their products"):
        expected_error(*operands(32), 20.0, op="mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", target="sm_90a")


ZEROS = operands(64, seed=4)[0][:16], operands(64, seed=4)[1][:, :16]
ZEROS[0][3] = 0  # steps of zeros only


@pytest.fixture(scope="module")
def predicted():
    """log2 of the root mean square error that is expected, and its slope, compiled, of operands with a row of zeros."""

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def of_width(fraction_bits):
        error = expected_error(*ZEROS, fraction_bits, op=BF16.op, target="sm_90a")
        return jnp.log2(jnp.mean(error.mean**2 + error.variance)) / 2, error

    return of_width


@pytest.mark.full
def test_the_slope_is_that_of_the_real_thing(predicted):
    """Finite differences of measured errors of 256 outputs, which are known to 4%."""
    found, _ = measure_errors(BF16, *ZEROS, np.arange(5, 15))
    found = np.log2(found)
    for width in range(6, 14, 2):
        (value, _), slope = predicted(float(width))
        assert abs(value - found[width - 5]) < 0.3
        assert abs(slope - (found[width - 4] - found[width - 6]) / 2) < 0.15


@pytest.mark.full
def test_a_traced_width_out_of_range_counts_as_the_nearest(predicted):
    """Its slope is 0; NaN stays."""
    for given, counted in ((-5.0, 1.0), (0.99, 1.0), (40.5, 40.0), (99.0, 40.0), (np.inf, 40.0)):
        (value, error), slope = predicted(given)
        (wanted, _), inside = predicted(counted)
        assert value == wanted and slope == 0 and (inside < 0 or counted == 40.0)
        assert (error.mean[3] == 0).all() and (error.variance[3] == 0).all()
    (value, error), slope = predicted(np.nan)
    assert np.isnan([value, slope]).all() and np.isnan(error.mean).all()


def test_a_width_out_of_range_raises_in_checked_mode_and_where_it_is_known():
    a, b = operands(16)
    of_width = lambda width: surrogate(a, b, width, op=BF16.op, target="sm_90a")
    compiled = jax.jit(of_width)
    checked = tcemu.checked(compiled)
    np.testing.assert_array_equal(checked(7.5), compiled(7.5))
    for width in (-5.0, 99.0, np.nan):
        with pytest.raises(tcemu.UndefinedBehaviour, match=r"traced fraction_bits are not from 1 to 40"):
            checked(width)
        with pytest.raises(ValueError, match=r"fraction_bits=.*: .* real numbers from 1 to 40"):
            of_width(width)
    with pytest.raises(ValueError, match="real numbers from 1 to 40"):
        of_width(np.float32([8, 0.5]))


@pytest.mark.full
def test_the_surrogate_takes_batch_axes():
    """Each matrix as by itself, with one width for all and with a width for each."""
    rng, how = np.random.default_rng(3), {"op": BF16.op, "target": "sm_90a"}
    a, b = rng.standard_normal((2, 1, 3, 40)).astype(np.float32), rng.standard_normal((4, 40, 2)).astype(np.float32)
    widths = np.float32([8, 9.5, 11, 20])
    both, each = (surrogate(a, b, w, **how) for w in (9.5, widths))
    error = expected_error(a, b, widths, **how)
    assert both.shape == each.shape == error.mean.shape == error.variance.shape == (2, 4, 3, 2)
    for i, j in np.ndindex(2, 4):
        np.testing.assert_allclose(each[i, j], surrogate(a[i, 0], b[j], widths[j], **how), rtol=1e-6)
        np.testing.assert_allclose(error.variance[i, j], expected_error(a[i, 0], b[j], widths[j], **how).variance, rtol=1e-5)
    np.testing.assert_array_equal(both[:, 1], each[:, 1])
    slope = jax.grad(lambda w: jnp.sum(expected_error(a, b, w, **how).variance))(widths)
    assert slope.shape == (4,) and (slope < 0).all()
    assert surrogate(a, b, 9.5, **how, key=jax.random.key(0)).shape == (2, 4, 3, 2)
    with pytest.raises(ValueError, match=r"K is 40 in a and 3 in b"):
        surrogate(a, a, 9.5, **how)


@pytest.mark.parametrize("width", [lambda f: f, lambda f: 10.5, lambda f: jnp.float32(10)], ids=["traced", "float", "array"])
@pytest.mark.parametrize("by", ["gemm", "matmul"])
def test_a_real_width_points_to_the_surrogate(by, width):
    """By the name under which it can be imported."""
    a, b = operands(16)
    gemm = lambda f: tcemu.gemm(a, b, op=BF16.op, target="sm_90a", model=tcemu.Model(formats.F32, fraction_bits=width(f)))
    matmul = lambda f: tcemu.matmul(a, b, recipe=BF16.what_if(fraction_bits=width(f)))
    with pytest.raises(ValueError, match=r"fraction_bits must be an integer .*; (\S+) takes a real number of bits") as caught:
        jax.grad(lambda f: jnp.sum((gemm if by == "gemm" else matmul)(f)))(10.0)
    module, _, name = str(caught.value).rpartition("; ")[2].split()[0].rpartition(".")
    assert getattr(importlib.import_module(module), name) is surrogate
