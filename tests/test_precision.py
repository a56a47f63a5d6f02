"""What-if through recipes: models swept in one compiled program, the theory of the curve, and the surrogate against measured errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcemu
from tcemu import Recipe, formats
from tcemu.study.precision import expected_error, surrogate

F16 = Recipe("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sm_90a")
BF16 = Recipe("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "sm_90a")


def operands(n, seed=0):
    return np.random.default_rng(seed).standard_normal((2, n, n)).astype(np.float32)


def measured(recipe, a, b, widths):
    """The root mean square error of the sums for each number of fraction bits, and how often the sweep was traced and compiled."""
    traces = []

    @jax.jit
    @jax.vmap
    def sweep(fraction_bits):
        traces.append(None)
        return tcemu.matmul(a, b, recipe=recipe.what_if(fraction_bits=fraction_bits))

    d = np.concatenate([np.asarray(sweep(jnp.array(part)), np.float64) for part in np.reshape(widths, (-1, len(widths) // 2))])
    x, y = (np.asarray(formats.round_to(fmt, v), np.float64) for fmt, v in ((recipe.op.a, a), (recipe.op.b, b)))
    return np.sqrt(((d - x @ y) ** 2).mean((1, 2))), (len(traces), sweep._cache_size())


@pytest.mark.parametrize("n", [48, pytest.param(512, marks=pytest.mark.full)])
def test_a_sweep_compiles_once_and_halves_the_error_per_bit(n):
    a, b = operands(n)
    widths = np.arange(8, 32)  # 8 to 30, and one more, for two halves of one shape
    error, counted = measured(F16, a, b, widths)
    assert counted == (1, 1)
    ratios = error[:-1] / error[1:]
    assert (np.abs(ratios[:12] - 2) < 0.2).all(), ratios  # a cut of 2^-f of the largest exponent in a step
    assert (np.abs(ratios[widths[:-1] >= 26] - 1) < 0.02).all(), ratios  # f32's own 23 bits, rounded toward zero
    if n < 100:
        by_itself = [np.asarray(tcemu.matmul(a, b, recipe=F16.what_if(fraction_bits=int(f)))) for f in (8, 25)]
        for d, f in zip(by_itself, (8, 25), strict=True):
            x, y = (np.asarray(formats.round_to(formats.F16, v), np.float64) for v in (a, b))
            assert np.sqrt(((d - x @ y) ** 2).mean()) == error[f - 8]


FIELDS = {"floor": [-133, 4], "terms": [16, 5], "result_bits": [23, 9], "rounding": [1, 0], "fraction_bits": [25, 11]}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name not in ("terms", "floor") else []) for name in FIELDS]
)
def test_every_numeric_field_is_swept(name):
    a, b = operands(20, seed=1)
    swept = jax.vmap(lambda v: tcemu.matmul(a, b, recipe=BF16.what_if(**{name: v})))(jnp.array(FIELDS[name]))
    for d, value in zip(swept, FIELDS[name], strict=True):
        plain = formats.ROUNDINGS[value] if name == "rounding" else value
        want = tcemu.gemm(a, b, op=BF16.op, target="sm_90a", model=tcemu.model(BF16.op, "sm_90a").replace(**{name: plain}))
        np.testing.assert_array_equal(np.asarray(d).view(np.uint32), np.asarray(want).view(np.uint32))
    assert (np.asarray(swept[0]) != np.asarray(swept[1])).any()


@pytest.mark.parametrize(("recipe", "size", "slope"), [(F16, 0.15, 0.06), pytest.param(BF16, 0.3, 0.15, marks=pytest.mark.full)])
def test_the_surrogate_follows_the_measured_error(recipe, size, slope):
    """log2 of the root mean square error, and its slope over fraction_bits against finite differences of what was measured."""
    a, b = operands(64)
    widths = np.arange(6, 22)
    error = np.log2(measured(recipe, a, b, widths)[0])

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


def test_both_forms_have_gradients_in_the_width_and_the_operands():
    a, b = operands(32, seed=2)
    how = {"op": BF16.op, "target": "sm_90a"}
    mean, variance = expected_error(a, b, 9.0, **how)
    x, y = (np.asarray(formats.round_to(formats.BF16, v), np.float64) for v in (a, b))
    np.testing.assert_allclose(surrogate(a, b, 9.0, **how), x @ y + mean, rtol=1e-4, atol=1e-4)
    draws = jax.vmap(lambda key: surrogate(a, b, 9.0, **how, key=key))(jax.random.split(jax.random.key(0), 400)) - (x @ y)
    np.testing.assert_allclose(np.mean((draws - mean) ** 2 / variance), 1, atol=0.02)
    np.testing.assert_allclose(np.mean((draws - mean) / np.sqrt(variance)), 0, atol=0.01)
    for key in (None, jax.random.key(1)):
        loss = lambda a, f, key=key: jnp.mean((surrogate(a, b, f, **how, key=key) - x @ y) ** 2)  # noqa: E731
        da, df = jax.grad(loss, (0, 1))(a, 9.0)
        assert df < 0 and np.isfinite(df) and (da != 0).any()
        step = 2.0**-6
        np.testing.assert_allclose(df, (loss(a, 9 + step) - loss(a, 9 - step)) / (2 * step), rtol=0.05)


def test_what_the_surrogate_does_not_cover_is_told():
    with pytest.raises(tcemu.Unsupported, match="align all their products"):
        expected_error(*operands(32), 20.0, op="mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", target="sm_90a")
