"""Attention's other sides: the plain form, gradients, transformations, `emulate`, and what it says of misuse."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import special_functions_reference as units

import tcemu
from tcemu.engine.arithmetic.exponential import exp2
from tcemu.operations.products.attention import attention_backward as attention_gradients
from tcemu.products import Flash

F32 = np.float32
SHORT = Flash(block_k=32)
ATTENTION = functools.partial(tcemu.attention, recipe="bf16 on H100", flash=SHORT, is_causal=True)


def operands(*extra: int, keys: int = 41, value_width: int = 16) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = (2, 21, 4, 16), (2, keys, 2, 16), (2, keys, 2, value_width)
    return [rng.normal(size=(*extra, *shape)).astype(F32) for shape in shapes]


def smooth(q, k, v, bias=0.0, causal=True):
    """softmax(Q·Kᵀ / sqrt(H) + bias)·V in float64, the scores, and the weights; heads of the queries in groups."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1]) + bias
    if causal:
        scores = np.where(np.arange(k.shape[1]) <= np.arange(q.shape[1])[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weights, v), scores, weights


# ---- the arithmetic


def test_powers_of_two_are_within_their_bound():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-151, 128, 1 << 18), -np.exp2(rng.uniform(-40, 7, 1 << 18)), rng.uniform(-1, 1, 1 << 18)]).astype(F32)
    found, exact = power(x).astype(np.float64), np.exp2(x.astype(np.float64))
    ulps = np.abs(found - exact) / np.exp2(np.maximum(np.floor(np.log2(exact)), -126) - 23)
    assert 0.5 < ulps[exact < 2.0**128 * (1 - 2.0**-25)].max() <= 0.53
    whole = np.arange(-149, 128)
    assert np.array_equal(power(whole.astype(F32)), np.ldexp(F32(1), whole))
    special = power(np.array([np.inf, -np.inf, np.nan, 128, -151, 1e-40, -0.0], F32))
    assert np.array_equal(special, np.array([np.inf, 0, np.nan, np.inf, 0, 1, 1], F32), equal_nan=True)


def power(x: np.ndarray) -> np.ndarray:
    return np.asarray(exp2(x.view(np.uint32))).view(F32)


# ---- the plain form


WHOLE = {
    "bf16": None,
    "fp8": None,
    "mxfp8": None,
    "deepseek, a block": Flash(),
    "mxfp8, a block": Flash(),
    "mxfp8, a block apart": Flash(promote=128),
}


@pytest.mark.full
@pytest.mark.parametrize("name", WHOLE)
def test_the_plain_form_and_a_single_block_are_two_products_and_a_softmax(name):
    """The plain form divides P by its sum before its cast, a block divides the result."""
    flash, recipe = WHOLE[name], name.partition(",")[0]
    q, k, v = operands()
    out = tcemu.attention(q, k, v, recipe=recipe, flash=flash)
    rows = q.reshape(2, 21, 2, 2, 16).transpose(0, 2, 3, 1, 4).reshape(2, 2, 42, 16)
    scores = np.asarray(tcemu.matmul(rows, k.transpose(0, 2, 3, 1), recipe=recipe))
    m, times = scores.max(-1, keepdims=True), F32(F32(1 / 4) * 1.4426950408889634)
    shift = (m.astype(np.float64) * -np.float64(times)).astype(F32)
    exponents = (scores.astype(np.float64) * times + shift).astype(F32)  # 48 bits and 24 near them: float64 holds the sum
    p = units.unary("ex2", exponents.view(np.uint32), True).view(F32)
    padded = np.pad(p, [(0, 0)] * 3 + [(0, 7)]).reshape(*p.shape[:-1], 6, 4, 2)
    lanes = np.zeros((*p.shape[:-1], 4), F32)
    for tile in range(6):
        for one in range(2):
            lanes = lanes + padded[..., tile, :, one]
    pairs = lanes[..., :2] + lanes[..., 2:]
    total = pairs[..., :1] + pairs[..., 1:]
    inverse = F32(1) / total if flash is None else units.unary("rcp", total.view(np.uint32), True).view(F32)
    expected = np.asarray(tcemu.matmul(p * inverse if flash is None else p, v.transpose(0, 2, 1, 3), recipe=recipe))
    expected = (expected if flash is None else expected * inverse).reshape(2, 2, 2, 21, 16).transpose(0, 3, 1, 2, 4)
    assert np.count_nonzero(np.asarray(out).view(np.uint32) != expected.reshape(out.shape).view(np.uint32)) == 0


# ---- transformations


def masked() -> dict[str, object]:
    """Arguments of a call in which query 3 sees nothing: JAX then has the mean of V."""
    mask, bias = np.ones((1, 1, 21, 41), bool), np.random.default_rng(4).normal(size=(4, 1, 41)).astype(F32)
    mask[..., 3, :] = False
    return {"bias": bias, "mask": mask, "is_causal": True, "return_residual": True}


@pytest.mark.full
def test_stochastic_rounding_and_a_sweep_of_widths():
    q, k, v = operands()
    exact = smooth(q, k, v)[0]
    stochastic = tcemu.quantize.Quantizer("tensor", rounding="SR", saturate=True)
    recipe = tcemu.get_recipe("fp8", a=stochastic, b=stochastic)
    one, again, other = (ATTENTION(q, k, v, recipe=recipe, random_key=jax.random.key(seed)) for seed in (0, 0, 1))
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    widths = np.array([2, 6, 10, 14])
    narrow = lambda bits: ATTENTION(q, k, v, recipe=tcemu.get_recipe("bf16").what_if(fraction_bits=bits, backward=False))
    swept = jax.vmap(narrow)(widths)
    assert np.array_equal(swept[1], narrow(6))
    errors = [float(np.linalg.norm(one - exact)) for one in np.asarray(swept)]
    assert errors[0] > 2 * errors[1] > 2 * errors[2] and errors == sorted(errors, reverse=True)


@pytest.mark.full
def test_mapped_compiled_and_in_an_outer_batch_it_has_the_same_bits():
    call = functools.partial(ATTENTION, **masked())
    q, k, v = operands()
    plain = call(q, k, v)
    for other in (jax.jit(jax.vmap(call))(q, k, v), jax.tree.map(lambda x: x[0], call(q[None], k[None], v[None]))):
        assert all(np.array_equal(one, two) for one, two in zip(plain, other, strict=True))


MESHES = """
import functools, jax, numpy as np, tcemu
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

rng = np.random.default_rng(0)
operands = [rng.normal(size=(2, size, 2, 32)).astype(np.float32) for size in (16, 40, 40)]
flash = tcemu.products.Flash(16, 32, scales="head", promote=32)
call = functools.partial(tcemu.attention, recipe="fp8", flash=flash, is_causal=True, return_residual=True)
expected, spec = call(*operands), P("b", None, "h")
for kind in AxisType.Auto, AxisType.Explicit:
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        given = [jax.device_put(x, NamedSharding(mesh, spec)) for x in operands]
        ways = {"jit": jax.jit(call), "shard_map": jax.jit(jax.shard_map(call, in_specs=(spec,) * 3, out_specs=(spec, spec)))}
        for name, way in ways.items():
            assert all(np.array_equal(one, other) for one, other in zip(way(*given), expected, strict=True)), (name, kind)
"""


@pytest.mark.full
def test_cut_over_a_mesh_by_batch_and_heads_it_has_the_same_bits():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", MESHES], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# ---- gradients


@pytest.mark.full
def test_gradients_are_the_differences_of_the_smooth_model():
    """Operands of few bits make the scores exact; P is rounded to tf32, u = 2^-11, in the result alone, so that gradients are within a few
    u of their size."""
    rng = np.random.default_rng(5)
    q, k, v = (np.round(x * 4) / 4 for x in operands())
    bias, g = (np.round(rng.normal(size=(4, 21, 41)) * 4) / 4).astype(F32), rng.normal(size=q.shape)
    recipe = tcemu.get_recipe("tf32", backward="straight_through")
    loss = lambda *x: (tcemu.attention(*x, recipe=recipe, flash=SHORT, is_causal=True) * g.astype(F32)).sum()
    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, bias)
    values = [x.astype(np.float64) for x in (q, k, v, bias)]
    for at, gradient in enumerate(found):
        for _ in range(3):
            direction = rng.normal(size=values[at].shape)
            moved = [[x + h * direction if i == at else x for i, x in enumerate(values)] for h in (1e-5, -1e-5)]
            up, down = ((smooth(*x)[0] * g).sum() for x in moved)
            expected = (up - down) / 2e-5
            size = np.linalg.norm(np.asarray(gradient)) * np.linalg.norm(direction) / np.sqrt(direction.size)
            assert abs((np.asarray(gradient, np.float64) * direction).sum() - expected) <= 8 * 2.0**-11 * size


def test_the_four_products_of_gradients_go_by_the_recipes_own(monkeypatch):
    used = []
    products = attention_gradients.matmul

    def seen(a, b, *, recipe, key):
        used.append((recipe, a.shape, b.shape))
        return products(a, b, recipe=recipe, key=key)

    monkeypatch.setattr(attention_gradients, "matmul", seen)
    q, k, v = operands(keys=43, value_width=24)  # no shapes of another test, which JAX would have traced
    qk, pv = tcemu.get_recipe("fp8"), tcemu.get_recipe("bf16")
    loss = lambda *x: tcemu.attention(*x, recipe=(qk, pv), flash=SHORT).sum()
    jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), q, k, v)
    (rows, width, of_v) = (42, 16, 24)
    assert used == [
        (pv.gradients[0], (2, 2, rows, of_v), (2, 2, of_v, 32)),
        (pv.gradients[1], (2, 2, 32, rows), (2, 2, rows, of_v)),
        (qk.gradients[0], (2, 2, rows, 32), (2, 2, 32, width)),
        (qk.gradients[1], (2, 2, width, rows), (2, 2, rows, 32)),
    ]


@pytest.mark.full
@pytest.mark.parametrize("backward", ["exact", "straight_through", "bf16"])
@pytest.mark.parametrize("flash", [SHORT, None], ids=["flash", "plain"])
def test_gradients_of_every_kind_are_near_those_of_jax(flash, backward):
    q, k, v = operands()
    g = np.random.default_rng(6).normal(size=q.shape).astype(F32)
    recipe = tcemu.get_recipe("bf16", backward=backward)
    loss = lambda call: lambda *x: (call(*x) * g).sum()
    found = jax.grad(loss(functools.partial(tcemu.attention, recipe=recipe, flash=flash)), argnums=(0, 1, 2))(q, k, v)
    expected = jax.grad(loss(jax.nn.dot_product_attention), argnums=(0, 1, 2))(q, k, v)
    for one, other in zip(found, expected, strict=True):
        assert np.linalg.norm(one - other) <= 4 * 2.0**-8 * np.linalg.norm(other)


def test_second_derivatives_and_forward_mode_are_refused():
    q, k, v = operands()
    loss = lambda q: ATTENTION(q, k, v).sum()
    with pytest.raises(TypeError, match="no derivatives of their own"):
        jax.eval_shape(jax.grad(lambda q: jax.grad(loss)(q).sum()), q)
    with pytest.raises(TypeError, match=r"tcemu.attention: forward mode.*jax.jacrev"):
        jax.jit(lambda q: jax.jvp(loss, (q,), (q,))).lower(q)


# ---- in whole functions


def test_in_emulate_it_is_left_as_it_is():
    q, k, v = operands()

    def model(w, q):
        return ATTENTION(q @ w, k, v)

    lines = str(tcemu.emulate(model, "bf16").report(jax.ShapeDtypeStruct((16, 16), jnp.float32), q))
    assert "it is emulated already" in lines and "dot_general" in lines
    gradient = tcemu.emulate(jax.grad(lambda w, q: model(w, q).sum()), "bf16")
    entries = gradient.report(jax.ShapeDtypeStruct((16, 16), jnp.float32), q).entries
    assert [entry.replaced for entry in entries].count(True) == 2  # q·w, and its gradient: none of attention's own


def test_it_stands_in_the_place_of_jax_nn():
    q, k, v = operands()
    names = ("query_seq_lengths", "key_value_seq_lengths", "local_window_size", "implementation", "scale", "is_causal", "bias", "mask")
    arguments = dict.fromkeys(names) | {"is_causal": True, "implementation": "xla"}
    one = jax.eval_shape(functools.partial(jax.nn.dot_product_attention, query=q, key=k, value=v, **arguments))
    other = jax.eval_shape(functools.partial(ATTENTION.func, query=q, key=k, value=v, recipe="bf16", **arguments))
    assert (one.shape, one.dtype) == (other.shape, other.dtype)


# ---- what is said


WRONG = {
    "heads": (lambda q, k, v: ATTENTION(q[:, :, :3], k, v), "query has 3 heads and key 2"),
    "width": (lambda q, k, v: ATTENTION(q[..., :8], k, v), "the same H in query and key"),
    "axes": (lambda q, k, v: ATTENTION(q[0, 0], k, v), "positions, heads, features"),
    "integers": (lambda q, k, v: ATTENTION(q.astype(np.int32), k, v), "query: got int32"),
    "mask": (lambda q, k, v: ATTENTION(q, k, v, mask=np.ones((21, 41), F32)), "a bias is added"),
    "shape of a bias": (lambda q, k, v: ATTENTION(q, k, v, bias=np.ones((3, 21, 41), F32)), r"expected one that broadcasts to"),
    "scale": (lambda q, k, v: ATTENTION(q, k, v, scale=-1.0), "scale=-1.0: expected a positive number"),
    "lengths": (lambda q, k, v: ATTENTION(q, k, v, key_value_seq_lengths=np.ones(3, np.int32)), "that of the batch axes"),
    "window": (lambda q, k, v: ATTENTION(q, k, v, local_window_size=-1), "expected a number of keys"),
    "implementation": (lambda q, k, v: ATTENTION(q, k, v, implementation="flash"), "expected one of"),
    "flash": (lambda q, k, v: ATTENTION(q, k, v, flash=128), "expected a tcemu.products.Flash"),
    "recipes": (lambda q, k, v: ATTENTION(q, k, v, recipe=("bf16",)), "expected one, or a pair"),
    "a name": (lambda q, k, v: ATTENTION(q, k, v, recipe="bf17"), "did you mean"),
    "signs": (lambda q, k, v: ATTENTION(q, k, v, flash=Flash(hadamard=True)), "random_key="),
    "no power of two": (
        lambda q, k, v: ATTENTION(q[..., :12], k[..., :12], v, flash=Flash(hadamard=True), random_key=jax.random.key(0)),
        "H is 12; expected a power of two",
    ),
    "stochastic": (
        lambda q, k, v: ATTENTION(q, k, v, recipe=tcemu.get_recipe("bf16", a=tcemu.quantize.Quantizer(rounding="SR"))),
        "needs random bits: give random_key=",
    ),
    "keys of an instruction": (lambda q, k, v: ATTENTION(q, k, v, recipe="fp8", flash=Flash(block_k=24)), "takes 32 keys"),
    "blocks of scales": (lambda q, k, v: ATTENTION(q, k, v, recipe="deepseek", flash=SHORT), "are of 128 keys"),
    "two promotions": (lambda q, k, v: ATTENTION(q, k, v, recipe="deepseek", flash=Flash(promote=256)), "so that nothing is chained"),
    "block": (lambda q, k, v: Flash(block_k=12), "expected a multiple of 8"),
    "no block": (lambda q, k, v: Flash(block_q=0), "expected an integer of 1 or more"),
    "promotion": (lambda q, k, v: Flash(promote=64), "expected a multiple of block_k=128"),
    "p_scale": (lambda q, k, v: Flash(p_scale=0), "expected a positive number"),
    "scales": (lambda q, k, v: Flash(scales="row"), "expected one of tensor, head, block"),
    "hadamard": (lambda q, k, v: Flash(hadamard=1), "expected True or False"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_speak(case):
    call, said = WRONG[case]
    with pytest.raises((TypeError, ValueError), match=said):
        call(*operands())
