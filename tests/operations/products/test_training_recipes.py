"""Recipes of training, whole: NVFP4 with all its parts, fast and slow accumulation, delayed scaling; their bits, gradients and refusals."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracles import recipes_reference as by_hand
from support.sampling import sample_cases

import tcemu
from tcemu import Recipe, formats
from tcemu.operations.products.recipes import SPLIT_ACCUMULATOR_INTERVAL
from tcemu.products import DelayedScaling
from tcemu.quantize import SIGNS_16, Quantizer

BF16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
F32 = np.float32
TARGET = "sm_120a"


def same(got, want):
    np.testing.assert_array_equal(*(np.asarray(v, F32).view(np.uint32) for v in (got, want)))


def normal(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.uniform(-3, 3, shape))).astype(F32)


def with_gradients(product, a, b, g):
    d, pull = jax.vjp(product, a, b)
    return (d, *pull(jnp.asarray(g)))


# ---- NVFP4: blocks of 16, of 16 x 16, stochastic rounding, the transform. Each operand [rows, K] as (elements, scales, tensor scale)


def quantize_by_sixteen(x, rounding="RN", key=None):
    q = tcemu.quantize.block_quantize(x, "nvfp4", rounding=rounding, key=key)
    return np.asarray(formats.to_float(formats.E2M1, q.codes)), np.asarray(q.scales), np.asarray(q.tensor_scale)


def quantize_by_squares(x):
    """Blocks of 16 x 16 as blocks of 256 in a row."""
    rows, k = x.shape
    filled = np.pad(x, [(0, -rows % 16), (0, -k % 16)])
    squares = filled.reshape(filled.shape[0] // 16, 16, -1, 16).transpose(0, 2, 1, 3)
    flat = tcemu.quantize.BlockFormat("squares", formats.E2M1, 256, "transformer_engine")
    q = tcemu.quantize.block_quantize(squares.reshape(*squares.shape[:2], 256), flat)
    elements = np.asarray(formats.to_float(formats.E2M1, q.codes)).reshape(squares.shape).transpose(0, 2, 1, 3).reshape(filled.shape)
    return elements[:rows, :k], np.repeat(np.asarray(q.scales)[..., 0], 16, 0)[:rows], np.asarray(q.tensor_scale)


def transform_operand(x):
    """x diag(signs) H / 4, in bf16 by the target's own instruction."""
    h = np.ones((1, 1), F32)
    for _ in range(4):
        h = np.block([[h, h], [h, -h]])
    x = np.pad(x, [(0, 0), (0, -x.shape[1] % 16)])
    d = tcemu.gemm(x.reshape(-1, 16), np.diag(F32(SIGNS_16)) @ h / 4, op=BF16, target=TARGET)
    return np.asarray(d).astype(ml_dtypes.bfloat16).reshape(x.shape)


def multiply(op, a, b):
    """A·B of operands with K last."""
    d = tcemu.gemm(a[0], b[0].T, op=op, target=TARGET, scale_a=a[1], scale_b=b[1].T)
    return np.asarray(d) * (a[2] * b[2])


def test_the_forward_product_of_nvfp4_training_is_its_parts():
    a, b = normal(20, 40, seed=1), normal(40, 24, seed=2)
    recipe = tcemu.get_recipe("nvfp4_training", TARGET)
    d = tcemu.matmul(a, b, recipe=recipe, key=jax.random.key(5))
    same(d, multiply(recipe.op, quantize_by_sixteen(a), quantize_by_squares(b.T)))


@pytest.mark.full
@pytest.mark.parametrize("shape", [(40, 40, 40), (20, 72, 33), (50, 16, 17)], ids=str)
def test_nvfp4_training_is_its_parts(shape):
    m, k, n = shape
    a, b, g, key = normal(m, k, seed=1), normal(k, n, seed=2), normal(m, n, seed=3), jax.random.key(5)
    recipe = tcemu.get_recipe("nvfp4_training", TARGET)
    d, da, db = with_gradients(lambda a, b: tcemu.matmul(a, b, recipe=recipe, key=key), a, b, g)
    _, _, for_da, for_db = jax.random.split(key, 4)
    key_da, key_db = jax.random.split(for_da, 4)[0], jax.random.split(for_db, 4)[1]
    same(d, multiply(recipe.op, quantize_by_sixteen(a), quantize_by_squares(b.T)))
    same(da, multiply(recipe.op, quantize_by_sixteen(g, "SR", key_da), quantize_by_squares(b)))
    same(db, multiply(recipe.op, quantize_by_sixteen(transform_operand(a.T)), quantize_by_sixteen(transform_operand(g.T), "SR", key_db)))


@pytest.mark.full
def test_the_transform_cancels_and_keeps_derivatives():
    """One recipe with and one without, of elements wide enough that only bf16 rounds them."""
    plain = Recipe("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "sm_80")
    turning = plain.replace(a=Quantizer(hadamard=SIGNS_16), b=Quantizer(hadamard=SIGNS_16))
    a, b, g = (np.random.default_rng(seed).standard_normal(shape).astype(F32) for seed, shape in ((1, (9, 40)), (2, (40, 7)), (3, (9, 7))))
    expected, found = (with_gradients(lambda a, b, r=r: tcemu.matmul(a, b, recipe=r), a, b, g) for r in (plain, turning))
    for got, want in zip(found, expected, strict=True):
        assert np.abs(got - want).max() < 2**-6 * np.abs(want).max()
    assert (np.asarray(found[0]) != np.asarray(expected[0])).any()
    raw = with_gradients(lambda a, b: tcemu.matmul(a, b, recipe=turning.replace(backward="straight_through")), a, b, g)
    np.testing.assert_allclose(raw[1], g @ b.T, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_compare_takes_a_transformed_operand():
    """Its parts of the error are those of the numbers that the codes stand for, the transform undone."""
    a, b = normal(24, 40, seed=1), normal(40, 16, seed=2)
    turned = Quantizer("block", hadamard=SIGNS_16, saturate=True)
    recipe = tcemu.get_recipe("nvfp4", TARGET, backward="exact").replace(a=turned, b=turned)
    (errors,) = tcemu.compare(lambda x, y: x @ y, [recipe], (a, b), results=False)
    x, y = (quantize_by_sixteen(transform_operand(v)) for v in (a, b.T))
    values = [v[0].astype(float) * np.repeat(np.asarray(formats.to_float(formats.UE4M3, v[1]), float), 16, 1) * float(v[2]) for v in (x, y)]
    exact, held = a.astype(float) @ b.astype(float), values[0] @ values[1].T
    np.testing.assert_allclose(errors.operand_error, np.linalg.norm(held - exact) / np.linalg.norm(exact), rtol=1e-9)
    assert errors.sum_error < 1e-4 < errors.operand_error


# ---- fast and slow accumulation


def quantize_by_tensor(x, fmt):
    scale = by_hand.find_scale(x, fmt)
    return by_hand.elements(x, fmt, scale).view(by_hand.DTYPES[fmt]).astype(F32), scale


@pytest.mark.parametrize("shape", sample_cases([(136, 5, 3), (140, 150, 160)], ()), ids=str)
def test_gradients_by_the_split_accumulator(shape):
    """On Hopper they begin anew every 128 elements, and f32 adds; the forward product is one chain."""
    m, k, n = shape
    a, b, g = normal(m, k, seed=1), normal(k, n, seed=2), normal(m, n, seed=3)
    recipe = tcemu.get_recipe("fp8_split", "sm_90a")
    (x, sx), (y, sy), (z, sz) = quantize_by_tensor(a, "e4m3"), quantize_by_tensor(b, "e4m3"), quantize_by_tensor(g, "e5m2")

    def promoted(op, left, right):
        left, right = np.pad(left, [(0, 0), (0, -left.shape[1] % 128)]), np.pad(right, [(0, -right.shape[0] % 128), (0, 0)])
        parts = [tcemu.gemm(left[:, at : at + 128], right[at : at + 128], op=op, target="sm_90a") for at in range(0, len(right), 128)]
        return by_hand.ascending([np.asarray(part) for part in parts])

    if shape == (136, 5, 3):
        assert all(
            ours == fp8.replace(promote=4) for ours, fp8 in zip(recipe.gradients, tcemu.get_recipe("fp8", "sm_90a").gradients, strict=True)
        )
        db = tcemu.matmul(a.T, g, recipe=recipe.gradients[1])
        same(db, promoted(recipe.gradients[1].op, x.T, z) * (sx * sz))
        return
    d, da, db = with_gradients(lambda a, b: tcemu.matmul(a, b, recipe=recipe), a, b, g)

    for_a, for_b = recipe.gradients
    same(d, np.asarray(tcemu.gemm(x, y, op=recipe.op, target="sm_90a")) * (sx * sy))
    same(da, promoted(for_a.op, z, y.T) * (sz * sy))
    same(db, promoted(for_b.op, x.T, z) * (sx * sz))


def test_where_the_split_accumulator_is_known():
    assert SPLIT_ACCUMULATOR_INTERVAL == {"sm_90a": 4}
    on_hopper, on_blackwell = (tcemu.get_recipe("fp8_split", target) for target in ("H100", "B200"))
    assert [r.promote for r in (on_hopper, *on_hopper.gradients)] == [None, 4, 4]
    assert [r.promote for r in (on_blackwell, *on_blackwell.gradients)] == [None] * 3
    with pytest.raises(tcemu.Unsupported, match=r"sm_89: cuBLASLt adds differently .* The recipe works on sm_90, sm_90a"):
        tcemu.get_recipe("fp8_split", "L4")


# ---- delayed scaling


def numpy_update(scale, history, amax, largest, margin, how):
    """common/recipe/delayed_scaling.cu, transcribed."""
    history = np.concatenate([[amax], history[1:]]).astype(F32)
    chosen = history.max() if how == "max" else amax
    with np.errstate(over="ignore"):
        new = F32(largest * 2.0**-margin) / chosen if np.isfinite(chosen) and chosen > 0 else scale
    history = np.roll(history, -1)
    history[0] = 0
    return min(new, np.finfo(F32).max), history


def quantize_with_scale(x, fmt, scale):
    values = np.clip(x * scale, -by_hand.LARGEST[fmt], by_hand.LARGEST[fmt]).astype(by_hand.DTYPES[fmt])
    return values.astype(F32), F32(1) / scale


@pytest.mark.parametrize(("how", "margin"), [("max", 1), pytest.param("most_recent", 0, marks=pytest.mark.full)])
def test_delayed_scaling_is_its_update_and_gemm(how, margin):
    """Four steps of growing, shrinking, zero and infinite tensors, with a history of three."""
    recipe, state = tcemu.get_recipe("fp8_split", "sm_90a"), DelayedScaling.start(3)
    call = lambda a, b, state: tcemu.products.delayed_matmul(a, b, state, recipe=recipe, margin=margin, amax=how)

    @jax.jit
    def trained(a, b, state, g):
        d, pull = jax.vjp(call, a, b, state)
        return d, *pull(g)

    kept = {name: (F32(1), np.zeros(3, F32)) for name in DelayedScaling._fields}
    forms = dict(zip(DelayedScaling._fields, ("e4m3", "e4m3", "e5m2"), strict=True))
    for step, size in enumerate((100.0, 3.0, 0.0, np.inf)):
        a, b, g = (normal(*shape, seed=3 * step + i) for i, shape in enumerate(((2, 9, 9), (9, 9), (2, 9, 9))))
        a = a * F32(min(size, 1000))
        a[0, 0, 0] = size
        d, da, db, state = trained(a, b, state, g)
        (x, ix), (y, iy), (z, iz) = (quantize_with_scale(v, forms[name], kept[name][0]) for name, v in zip(kept, (a, b, g), strict=True))
        gemm = lambda op, x, y: np.asarray(tcemu.gemm(x, y, op=op, target="sm_90a"))
        same(d, gemm(recipe.op, x, y) * (ix * iy))
        same(da, gemm(recipe.gradients[0].op, z, y.T) * (iz * iy))
        by_matrix = gemm(recipe.gradients[1].op, x.swapaxes(1, 2), z) * (ix * iz)
        same(db, by_matrix[0] + by_matrix[1])
        for name, v in zip(kept, (a, b, g), strict=True):
            kept[name] = numpy_update(*kept[name], np.abs(v).max(), by_hand.LARGEST[forms[name]], margin, how)
            same(getattr(state, name).scale, kept[name][0])
            same(getattr(state, name).amax_history, kept[name][1])
    assert np.isinf(state.a.amax_history).any() and kept["a"][0] != 1


@pytest.mark.full
def test_delayed_scaling_in_a_compiled_loop():
    """The loss falls, and the state after a scan is that of a loop; NaN counts for no amax, and empty products have zeros."""
    a, w, y = normal(2, 8, 16, seed=1), normal(16, 4, seed=2), normal(2, 8, 4, seed=3)

    @jax.jit
    def step(carry, _):
        w, state = carry
        loss = lambda w, state: jnp.mean((tcemu.products.delayed_matmul(a, w, state) - y) ** 2)
        value, (dw, state) = jax.value_and_grad(loss, (0, 1))(w, state)
        return (w - 0.003 * dw, state), value

    start = (jnp.asarray(w), DelayedScaling.start(4))
    (_, state), losses = jax.lax.scan(step, start, None, length=5)
    assert losses[-1] < losses[0] and state.a.scale == F32(448) / np.abs(a).max()
    looped = start
    for _ in range(5):
        looped, _ = step(looped, None)
    jax.tree.map(same, state, looped[1])
    gradient = jax.grad(lambda a, state: tcemu.products.delayed_matmul(a, w, state).sum(), (0, 1))
    assert gradient(jnp.full((2, 16), jnp.nan), start[1])[1].a.scale == 1
    nothing, after = gradient(jnp.zeros((0, 16)), start[1])
    assert nothing.shape == (0, 16) and after.a.scale == 1


STATE, TURNED = DelayedScaling.start(2), Quantizer("tensor", hadamard=SIGNS_16)
A, B = normal(4, 32), normal(32, 4)


@pytest.mark.parametrize(
    ("error", "match", "make"),
    [
        (ValueError, "rows=16.*own blocks", lambda: Quantizer("tensor", rows=16)),
        (ValueError, "rows=0", lambda: Quantizer("block", rows=0)),
        (ValueError, "hadamard=.*4, 16, 64, 256 signs", lambda: Quantizer(hadamard=(1, -1))),
        (ValueError, "each 1 or -1", lambda: Quantizer(hadamard=(1, 1, 1, 2))),
        (ValueError, "both operands have the same", lambda: Recipe(BF16, "sm_80", Quantizer(hadamard=SIGNS_16))),
        (tcemu.Unsupported, "sm_80", lambda: Recipe(BF16.replace("k16", "k8").replace("bf16", "f16"), "sm_75", TURNED, TURNED)),
        (ValueError, "key=", lambda: tcemu.matmul(A, B, recipe="nvfp4_training")),
        (ValueError, "transforms this operand before", lambda: tcemu.matmul(
            A, B, recipe=Recipe(BF16, "sm_80", TURNED, TURNED), scale_a=1.0)),
        (ValueError, "rows: got 16 with axis=-1 of 1 axes", lambda: tcemu.quantize.block_quantize(A[0], "nvfp4", rows=16)),
        (ValueError, "rows: got 0", lambda: tcemu.quantize.block_quantize(A, "nvfp4", rows=0)),
        (ValueError, "length=0", lambda: DelayedScaling.start(0)),
        (ValueError, "recipe bf16: delayed scaling keeps", lambda: tcemu.products.delayed_matmul(A, B, STATE, recipe="bf16")),
        (ValueError, "delayed scaling keeps", lambda: tcemu.products.delayed_matmul(A, B, STATE, recipe=tcemu.get_recipe("fp8",
            backward="exact"))),
        (TypeError, "state: got tuple", lambda: tcemu.products.delayed_matmul(A, B, ())),  # pyright: ignore
        (ValueError, "margin=0.5", lambda: tcemu.products.delayed_matmul(A, B, STATE, margin=0.5)),  # pyright: ignore
        (ValueError, "amax='mean': expected one of max, most_recent", lambda: tcemu.products.delayed_matmul(A, B, STATE, amax="mean")),
        (ValueError, "K is 32 in a and 4 in b", lambda: tcemu.products.delayed_matmul(A, A.T[:4], STATE)),
        (TypeError, "expected a float dtype", lambda: tcemu.products.delayed_matmul(A, B, STATE, dtype=jnp.int32)),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(error, match, make):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.full
@pytest.mark.parametrize("axis", [-1, -2])
def test_rows_that_share_scales_are_squares(axis):
    """`block_quantize(rows=16)` of float32 and of float64, of MX and NVFP4, against blocks of 256 and a loop."""
    x = normal(50, 50, seed=4)
    q = tcemu.quantize.block_quantize(x if axis == -1 else x.T, "nvfp4", axis=axis, rows=16)
    elements, scales, tensor_scale = quantize_by_squares(x)
    codes, found = (v if axis == -1 else v.T for v in (q.codes, q.scales))
    np.testing.assert_array_equal(formats.to_float(formats.E2M1, codes), elements)
    np.testing.assert_array_equal(found, scales)
    assert q.tensor_scale == tensor_scale
    for v in (x, x.astype(np.float64) * (1 + 2.0**-40)):
        mx = tcemu.quantize.block_quantize(v, "mxfp4", rows=8, rule="ceil")
        one = tcemu.quantize.BlockFormat("one", formats.E2M1, 8 * 32, "ceil")
        for i in range(0, 50, 8):
            for block in range(2):
                part = v[i : i + 8, 32 * block : 32 * block + 32]
                alone = tcemu.quantize.block_quantize(part.reshape(1, -1), one)
                np.testing.assert_array_equal(mx.codes[i : i + 8, 32 * block : 32 * block + 32], alone.codes.reshape(part.shape))
                assert (mx.scales[i : i + 8, block] == alone.scales[0, 0]).all()
