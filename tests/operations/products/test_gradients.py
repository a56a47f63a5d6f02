"""Gradients of every face from floats: what each is, and that none is a silent zero."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcemu
from tcemu import Recipe, formats
from tcemu.operations.products.differentiable import attach_derivative
from tcemu.quantize import Quantizer

BF16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
E4M3 = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
S8 = "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
MXFP8 = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"
full = pytest.mark.full
RNG = np.random.default_rng(0)
A, B, G = (RNG.standard_normal(shape).astype(np.float32) for shape in ((9, 40), (40, 6), (9, 6)))
CAST = Recipe(BF16, "sm_90a")
OF_A, OF_B = Recipe("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", "sm_90a"), CAST  # the gradients' recipes


def gradients(fn, *operands):
    """Of sum(G * fn(*operands)) with respect to all of them, compiled without the value."""
    return jax.jit(all_gradients(fn, operands))(*operands)


def all_gradients(fn, operands):
    return jax.grad(lambda *x: jnp.sum(G * fn(*x)), tuple(range(len(operands))))


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


def round_operand(x, fmt=formats.BF16):
    return np.asarray(formats.round_float(fmt, x))


def test_an_attached_derivative_leaves_every_bit_of_the_value():
    """(value - x) + x would round values of another binade, lose the sign of zero, and make NaN of infinities."""
    x = jnp.asarray([1.9999999, 3.0, -0.0, np.inf, 1e-3, -7.7], jnp.float32)
    rounded = jnp.asarray([2.0, 1e30, -0.0, np.inf, np.nan, -8.0], jnp.float32)
    value, (gradient,) = jax.jit(
        lambda x: (attach_derivative(rounded, x * 3), jax.vjp(lambda x: attach_derivative(rounded, x * 3), x)[1](x))
    )(x)
    assert np.asarray(value).tobytes() == np.asarray(rounded).tobytes() and np.asarray(gradient).tobytes() == np.asarray(x * 3).tobytes()
    assert jnp.array_equal(jax.jvp(lambda x: attach_derivative(rounded, x * 3), (x,), (jnp.ones(6),))[1], jnp.full(6, 3.0))


def test_exact_is_the_product_of_the_quantised_operands():
    bias = RNG.standard_normal(6).astype(np.float32)
    da, db, dbias = gradients(lambda a, b, c: tcemu.matmul(a, b, c, recipe=CAST), A, B, bias)
    close(da, G @ round_operand(B).T)
    close(db, round_operand(A).T @ G)
    close(dbias, G.sum(0))


def test_straight_through_is_the_product_of_the_operands_as_they_came():
    da, db = gradients(lambda a, b: tcemu.matmul(a, b, recipe=CAST.replace(backward="straight_through")), A, B)
    close(da, G @ B.T)
    close(db, A.T @ G)


def test_emulated_gradients_have_the_bits_of_their_own_recipes():
    recipe = CAST.replace(backward=(OF_A, OF_B))
    da, db = all_gradients(lambda a, b: tcemu.matmul(a, b, recipe=recipe), (A, B))(A, B)  # eagerly: what is compiled serves the lines below
    np.testing.assert_array_equal(da, tcemu.matmul(G, B.T, recipe=OF_A))
    np.testing.assert_array_equal(db, tcemu.matmul(A.T, G, recipe=OF_B))


FORWARD = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jacfwd of a compiled function": lambda f, x: jax.jacfwd(jax.jit(f))(x),
    "compiled jacfwd": lambda f, x: jax.jit(jax.jacfwd(f)).lower(x),
    "hessian": lambda f, x: jax.hessian(lambda x: f(x).sum())(x),
}


@pytest.mark.parametrize("how", FORWARD)
def test_forward_mode_through_recipes_for_the_gradients_says_what_would_work(how):
    recipe = CAST.replace(backward=(OF_A, OF_B))
    call = tcemu.emulate(lambda a: jnp.tanh(a @ B), recipe) if how == "jvp" else lambda a: tcemu.matmul(a, B, recipe=recipe)
    with pytest.raises(TypeError, match=r'forward mode.*jacrev.*backward="exact"'):
        FORWARD[how](call, jnp.asarray(A))


def test_reverse_mode_passes_the_marks_of_reverse_mode_under_every_transformation():
    """Two layers in a loop, a checkpoint and a batch, under jit and not."""
    recipe, w = CAST.replace(backward=(OF_A, OF_B)), B[:, :1] * B.T[:1] / 64  # [K, K]
    layer = lambda x, _: (jnp.tanh(tcemu.matmul(x, w, recipe=recipe)), None)
    looped = jax.vmap(lambda x: jax.lax.scan(jax.checkpoint(layer), x, None, length=2)[0])
    unrolled = lambda x: layer(layer(x, None)[0], None)[0]
    x = jnp.stack([A, 2 * A])
    found = jax.jit(jax.grad(lambda x: looped(x).sum()))(x)
    expected = [jax.grad(lambda x: unrolled(x).sum())(part) for part in x]
    np.testing.assert_array_equal(found, jnp.stack(expected))
    _, pushforward = jax.linearize(unrolled, x[0])
    with pytest.raises(TypeError, match=r"forward mode.*jacrev"):
        pushforward(x[0])


@pytest.mark.parametrize("name", ["fp8", *(pytest.param(name, marks=full) for name in ("deepseek", "mxfp8", "nvfp4"))])
def test_named_recipes_have_their_own_gradients(name):
    recipe = tcemu.get_recipe(name)
    for_a, for_b = recipe.gradients
    if name == "fp8":
        assert [str(fmt) for r in (for_a, for_b) for fmt in (r.op.a, r.op.b)] == ["e5m2", "e4m3", "e4m3", "e5m2"]
        return
    da, db = gradients(lambda a, b: tcemu.matmul(a, b, recipe=recipe), A, B)
    np.testing.assert_array_equal(da, tcemu.matmul(G, B.T, recipe=for_a))
    np.testing.assert_array_equal(db, tcemu.matmul(A.T, G, recipe=for_b))


def test_forward_mode_agrees_with_reverse_mode():
    value, tangent = jax.jvp(lambda a, b: tcemu.matmul(a, b, recipe=CAST), (A, B), (B.T[:1] + 0 * A, A.T[:, :1] + 0 * B))
    np.testing.assert_array_equal(value, tcemu.matmul(A, B, recipe=CAST))
    da, db = gradients(lambda a, b: tcemu.matmul(a, b, recipe=CAST), A, B)
    close(np.sum(G * tangent), np.sum(da * B.T[:1]) + np.sum(db * A.T[:, :1]), 1e-4)


def test_gradients_of_scales_are_those_of_scale_times_rounded():
    """LSQ: element - x / scale inside the range, the largest element outside; x moves inside only."""
    recipe = Recipe(E4M3, "sm_89", Quantizer("row", saturate=True), Quantizer("tensor", saturate=True))
    sa, sb = np.full((9, 1), 2.0**-9, np.float32), np.float32(2.0**-6)  # beyond 0.875 an element of A saturates
    call = lambda a, b, sa, sb: tcemu.matmul(a, b, recipe=recipe, scale_a=sa, scale_b=sb)
    da, db, dsa, dsb = gradients(call, A, B, sa, sb)
    x, y = (np.clip(np.asarray(v), -448, 448) for v in (A / sa, B / sb))
    x, y = round_operand(x, formats.E4M3), round_operand(y, formats.E4M3)
    inside = np.abs(A / sa) <= 448
    assert 0 < inside.sum() < inside.size
    da_hat, db_hat = G @ (y * sb).T, (x * sa).T @ G
    close(da, da_hat * inside)
    close(db, db_hat)
    close(dsa, (da_hat * (x - np.where(inside, A / sa, 0))).sum(1, keepdims=True), 1e-4)
    close(dsb, (db_hat * (y - B / sb)).sum(), 1e-4)
    assert (dsa != 0).all() and dsb != 0


@pytest.mark.full
@full
def test_gradients_of_scales_where_the_products_are_emulated():
    recipe = Recipe(E4M3, "sm_89", Quantizer("row", saturate=True), Quantizer("tensor", saturate=True), backward=CAST)
    sa, sb = np.full((9, 1), 2.0**-9, np.float32), np.float32(2.0**-6)
    call = lambda a, b, sa, sb: tcemu.matmul(a, b, recipe=recipe, scale_a=sa, scale_b=sb)
    _, db, dsa, _ = gradients(call, A, B, sa, sb)
    close(db, A.T @ G, 0.02)
    x = round_operand(np.clip(A / sa, -448, 448), formats.E4M3)
    close(dsa, ((G @ B.T) * (x - np.where(np.abs(A / sa) <= 448, A / sa, 0))).sum(1, keepdims=True), 0.02)


def test_gradients_of_gemm():
    c = RNG.standard_normal((9, 6)).astype(np.float32)
    da, db, dc = gradients(lambda a, b, c: tcemu.gemm(a, b, c, op=BF16, target="sm_90a"), A, B, c)
    close(da, G @ round_operand(B).T)
    close(db, round_operand(A).T @ G)
    close(dc, G)
    tangent = jax.jvp(lambda a, b, c: tcemu.gemm(a, b, c, op=BF16, target="sm_90a"), (A, B, c), (A, 0 * B, 0 * c))[1]
    close(tangent, A @ round_operand(B), 1e-4)


@full
def test_gradients_of_gemm_leave_numpy_arrays_as_they_are():
    (da,) = gradients(lambda a: tcemu.gemm(a, B.astype(np.float64), op=BF16, target="sm_90a"), A)
    close(da, G @ round_operand(B).T)


def test_gradients_of_gemms_block_scales():
    sa, sb = (2.0 ** RNG.integers(-2, 3, shape).astype(np.float32) for shape in ((9, 2), (2, 6)))
    call = lambda a, b, sa, sb: tcemu.gemm(a, b, op=MXFP8, target="sm_120a", scale_a=sa, scale_b=sb)
    da, db, dsa, dsb = gradients(call, A, B, sa, sb)
    x, y = round_operand(A, formats.E4M3), round_operand(B, formats.E4M3)
    wide_a, wide_b = np.repeat(sa, 32, 1)[:, :40], np.repeat(sb, 32, 0)[:40]
    da_hat, db_hat = G @ (y * wide_b).T, (x * wide_a).T @ G
    close(da, da_hat * wide_a)
    close(db, db_hat * wide_b)
    close(dsa, np.stack([(da_hat * x)[:, :32].sum(1), (da_hat * x)[:, 32:].sum(1)], 1))
    close(dsb, np.stack([(db_hat * y)[:32].sum(0), (db_hat * y)[32:].sum(0)]))


@pytest.mark.full
@full
def test_dot_general_in_a_batch_and_second_order():
    dot = tcemu.dot_general(CAST)
    x, y = RNG.standard_normal((2, 3, 8)).astype(np.float32), RNG.standard_normal((2, 8, 4)).astype(np.float32)
    numbers = (((2,), (1,)), ((0,), (0,)))
    loss = lambda product: lambda x, y: jnp.sum(jnp.sin(product(x, y)))
    got = jax.grad(loss(lambda x, y: dot(x, y, numbers)), (0, 1))(x, y)
    want = jax.grad(loss(lambda x, y: jax.lax.dot_general(x, y, numbers)), (0, 1))(round_operand(x), round_operand(y))
    for one, other in zip(got, want, strict=True):
        close(one, other, 1e-2)
    hessian = jax.hessian(lambda s: loss(lambda x, y: dot(s * x, y, numbers))(x, y))(1.0)
    assert np.isfinite(hessian) and hessian != 0


@full
def test_broadcast_operands_get_sums():
    recipe = CAST.replace(backward=CAST)
    x = RNG.standard_normal((3, 9, 40)).astype(np.float32)
    _, db, dbias = gradients(lambda a, b, c: tcemu.matmul(a, b, c, recipe=recipe), x, B, np.zeros((9, 1), np.float32))
    assert db.shape == B.shape and dbias.shape == (9, 1)
    close(db, sum(round_operand(v).T @ round_operand(G) for v in x), 1e-4)
    close(dbias, 3 * G.sum(1, keepdims=True))


REFUSED = {
    "integers of gemm": lambda x: tcemu.gemm(x, x.T, op=S8, target="sm_90a").astype(jnp.float32),
    "codes": lambda x: formats.to_float(formats.E4M3, formats.from_float(formats.E4M3, x)),
    "blocks": lambda x: tcemu.quantize.block_dequantize(tcemu.quantize.block_quantize(x, "mxfp4")),
    "largest magnitude": lambda x: tcemu.quantize.block_dequantize(tcemu.quantize.block_quantize(A, "nvfp4", amax=x[0, 0])),
    "tensor scale": lambda x: tcemu.quantize.block_dequantize(
        dataclasses.replace(tcemu.quantize.block_quantize(A, "nvfp4"), tensor_scale=x[0, 0])
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=full if name == "largest magnitude" else ()) for name in REFUSED])
@pytest.mark.parametrize("wrap", [lambda f: f, pytest.param(jax.jit, marks=full)], ids=["plain", "jit"])
def test_what_has_no_gradient_says_so(name, wrap):
    call = wrap(lambda x: jnp.sum(REFUSED[name](x)))
    with pytest.raises(TypeError, match=r"have no gradient.*stop_gradient"):
        jax.grad(call)(jnp.asarray(A))
    with pytest.raises(TypeError, match=r"have no gradient"):
        jax.jvp(call, (jnp.asarray(A),), (jnp.asarray(A),))
    assert np.isfinite(jax.grad(lambda x: jnp.sum(x) + call(jax.lax.stop_gradient(x)))(jnp.asarray(A))).all()


def test_round_to_passes_gradients_on():
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: formats.round_float(formats.E4M3, x).sum()))(A), np.ones_like(A))


@full
def test_sparsify_passes_gradients_on_to_what_it_keeps():
    op = "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32"
    x = jnp.asarray(RNG.standard_normal((16, 32)), jnp.float16)
    gradient = jax.grad(lambda x: tcemu.sparsify(x, op=op)[0].sum().astype(jnp.float32))(x)
    np.testing.assert_array_equal(gradient != 0, tcemu.densify(*tcemu.sparsify(x, op=op), op=op) != 0)
