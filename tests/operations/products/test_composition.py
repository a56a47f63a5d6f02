"""`gemm`, `mma`, `matmul` and `emulate` under JAX's transformations and settings: the bits of a loop of single instructions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.device_processes import run_on_devices
from support.sampling import sample_cases

import tcemu
from tcemu import formats
from tcemu.formats import F16, F32

OP = tcemu.parse("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
M, N, K = 16, 8, 48
SM = "sm_80"
MXF8_OP = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"


def normal(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.uniform(-4, 4, shape))).astype(np.float32)


def bits(x):
    return np.asarray(x).view(np.uint32)


def loop(a, b, c=None):
    """The bits of D, up to 16 x 8: one `dot` after the other along K, filled with -0 and 0 to whole instructions."""
    (m, k), n = a.shape, b.shape[1]
    c = np.zeros((m, n), np.float32) if c is None else c
    a = np.pad(a, [(0, M - m), (0, -k % 16)], constant_values=-0.0)
    b, c = np.pad(b, [(0, -k % 16), (0, N - n)]), np.pad(c, [(0, M - m), (0, N - n)])
    a, b, d = (np.asarray(formats.from_float(fmt, x)) for fmt, x in ((F16, a), (F16, b), (F32, c)))
    for at in range(0, a.shape[1], 16):
        d = tcemu.dot(OP, a[:, at : at + 16], b[at : at + 16], d, target=SM)
    return np.asarray(d)[:m, :n]


gemm = partial(tcemu.gemm, op=OP, target=SM)
matmul = partial(tcemu.matmul, recipe=tcemu.get_recipe("f16", target=SM, backward="exact"))
emulated = tcemu.emulate(lambda a, b: a @ b, tcemu.get_recipe("f16", target=SM))
WAYS = {"gemm": gemm, "matmul": matmul, "emulate": emulated}
A, B = normal(2, M, K, seed=1), normal(2, K, N, seed=2)
A[0, 0, :5], B[0, :4, 0] = (-0.0, 1e-7, -6e-8, 1e-40, 65504), (0.0, -0.0, 6e-8, 1e-7)  # zeros, subnormals, the end of f16
A[1, 3, 3], A[1, 4, 4], B[1, 7, 2] = np.uint32(0xFFC12345).view(np.float32), np.inf, -np.inf


def in_scan(fn, a, b):
    return lax.scan(lambda at, x: (at + 1, fn(*x)), 0, (a, b))[1]


TRANSFORMED = {
    "jit": lambda fn, a, b: jnp.stack([jax.jit(fn)(x, y) for x, y in zip(a, b, strict=True)]),
    "vmap": lambda fn, a, b: jax.vmap(fn)(a, b),
    "vmap, last axes": lambda fn, a, b: jax.vmap(fn, (2, 1), 1)(jnp.moveaxis(a, 0, 2), jnp.moveaxis(b, 0, 1)).swapaxes(0, 1),
    "vmap, one A": lambda fn, a, b: jnp.stack([jax.vmap(fn, (None, 0))(x, y[None])[0] for x, y in zip(a, b, strict=True)]),
    "vmap, one B": lambda fn, a, b: jnp.stack([jax.vmap(fn, (0, None))(x[None], y)[0] for x, y in zip(a, b, strict=True)]),
    "nested vmap": lambda fn, a, b: jax.vmap(jax.vmap(fn, (0, None)), (None, 0))(a, b)[jnp.arange(2), jnp.arange(2)],
    "checkpoint": lambda fn, a, b: jax.vmap(jax.checkpoint(fn))(a, b),
    "scan": in_scan,
    "cond": lambda fn, a, b: lax.cond(jnp.sum(a * 0) != 1, lambda: jax.vmap(fn)(a, b), lambda: jnp.zeros((2, M, N))),
    "vjp": lambda fn, a, b: jax.vjp(jax.vmap(fn), a, b)[0],
    "vmap of vjp": lambda fn, a, b: jax.vmap(lambda x, y: jax.vjp(fn, x, y)[0])(a, b),
    "donated": lambda fn, a, b: jax.jit(jax.vmap(fn), donate_argnums=(0, 1))(jnp.array(a), jnp.array(b)),
}
USUAL = {("emulate", "vmap of vjp")}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("case", sample_cases([(way, how) for way in WAYS for how in TRANSFORMED], USUAL))
def test_transformed_it_is_the_loop(case):
    way, how = case
    d = TRANSFORMED[how](WAYS[way], jnp.asarray(A), jnp.asarray(B))
    np.testing.assert_array_equal(bits(d), np.stack([loop(a, b) for a, b in zip(A, B, strict=True)]))


SETTINGS = {
    "x64": lambda: jax.enable_x64(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "disable_jit": lambda: jax.disable_jit(True),
    "precision": lambda: jax.default_matmul_precision("bfloat16"),
    "leaks": jax.checking_leaks,
}


@pytest.mark.parametrize("case", sample_cases([(w, s) for w in WAYS for s in SETTINGS], {("gemm", "x64")}))
def test_settings_change_no_bit(case):
    way, setting = case
    a, b = A[0, :, :32], B[0, :32]
    want = loop(a, b)
    with SETTINGS[setting]():
        d = WAYS[way](jnp.asarray(a), jnp.asarray(b)) if setting != "leaks" else jax.jit(WAYS[way])(jnp.asarray(a), jnp.asarray(b))
        np.testing.assert_array_equal(bits(d), want)


ORDERS = {
    "Fortran": np.asfortranarray,
    "strided": lambda x: np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3],
    "backwards": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "big-endian in memory, native in value": lambda x: x.astype(">f4").astype("=f4"),
}


@pytest.mark.parametrize("order", sample_cases(ORDERS, ("Fortran",)))
@pytest.mark.parametrize("dtype", sample_cases([np.float32, np.float64, np.float16], (np.float64,)))
def test_the_order_in_memory_does_not_matter(order, dtype):
    a, b = (ORDERS[order](x.astype(dtype)) for x in (A[0] / 8, B[0] / 8))
    want = loop(np.asarray(a, np.float32), np.asarray(b, np.float32))
    for way in (gemm, matmul) if dtype == np.float32 else (gemm,):
        np.testing.assert_array_equal(bits(way(a, b)), want)


@pytest.mark.parametrize("way", sample_cases(WAYS, ("gemm",)))
@pytest.mark.parametrize("shape", sample_cases([(1, 1, 1), (1, 17, 8), (16, 1, 8), (16, 33, 1), (0, 4, 3), (3, 0, 2), (2, 4, 0)], 5))
def test_axes_of_one_and_of_nothing(way, shape):
    m, k, n = shape
    a, b = normal(m, k, seed=3), normal(k, n, seed=4)
    np.testing.assert_array_equal(bits(WAYS[way](a, b)), loop(a, b) if 0 not in shape else np.zeros((m, n), np.uint32))


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_a_long_k(way):
    a, b = normal(2, 100_001, seed=5), normal(100_001, 3, seed=6)
    np.testing.assert_array_equal(bits(WAYS[way](a, b)), loop(a, b))


@pytest.mark.parametrize("how", sample_cases(["jit", "vmap", "nested vmap", "scan"], ("vmap",)))
def test_mma_in_registers(how):
    pack = lambda name, fmt, x: tcemu.pack(OP, name, formats.from_float(fmt, x))
    a, b, c = normal(2, M, 16, seed=7), normal(2, 16, N, seed=8), normal(2, M, N, seed=9)
    operands = [pack(*each) for each in (("a", F16, a), ("b", F16, b), ("c", F32, c))]
    fn = lambda a, b, c: tcemu.mma(OP, a, b, c, target=SM)
    mapped = {
        "jit": lambda *x: jnp.stack([jax.jit(fn)(*(v[i] for v in x)) for i in range(2)]),
        "vmap": lambda a, b, c: jax.vmap(fn, (2, 0, 1))(jnp.moveaxis(a, 0, 2), b, jnp.moveaxis(c, 0, 1)),
        "nested vmap": lambda *x: jax.vmap(jax.vmap(fn, (0, None, 0)), (None, 0, None))(*x)[jnp.arange(2), jnp.arange(2)],
        "scan": lambda *x: lax.scan(lambda at, v: (at, fn(*v)), 0, x)[1],
    }
    d = tcemu.unpack(OP, "d", mapped[how](*operands))
    np.testing.assert_array_equal(d, np.stack([loop(*each) for each in zip(a, b, c, strict=True)]))


# ---- integers traced beside floats


def with_integers(which):
    """A function of floats and of integers that are traced with them, and its integers."""
    if which == "b":
        return lambda x, n: gemm(x, n).sum(), jnp.asarray(np.arange(K * N).reshape(K, N) % 5, jnp.int8)
    if which == "c":
        return lambda x, n: gemm(x, jnp.ones((K, N)), n).sum(), jnp.ones((M, N), jnp.int32)
    scaled = partial(tcemu.gemm, op=MXF8_OP, target="sm_120a", scale_b=np.full((2, N), 127, np.uint8))
    return lambda x, n: scaled(x, jnp.ones((K, N)), scale_a=n).sum(), jnp.full((M, 2), 128, jnp.uint8)


AROUND = {
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "cond": lambda f: jax.grad(lambda x, n: lax.cond(x.sum() != 1e9, f, lambda x, n: x.sum(), x, n)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "scan": lambda f: jax.grad(lambda x, n: lax.scan(lambda s, n: (s + f(x, n), None), 0.0, n[None])[0]),
    "vmap": lambda f: lambda x, n: jax.vmap(jax.grad(f))(x[None], n[None])[0],
    "jvp": lambda f: lambda x, n: jax.grad(lambda x: jax.jit(lambda x, n: jax.jvp(lambda x: f(x, n), (x,), (x,))[1])(x, n))(x),
}


@pytest.mark.parametrize(
    "case",
    sample_cases([(x, y) for x in AROUND for y in ("b", "c", "scale_a")], {("grad of jit", "b")}),
)
def test_gradients_with_integers_traced_beside_them(case):
    around, which = case
    fn, integers = with_integers(which)
    x = jnp.asarray(np.random.default_rng(10).integers(-4, 5, (M, K)), jnp.float32)
    got = AROUND[around](fn)(x, integers)
    column = {"b": lambda: integers.astype(jnp.float32).sum(1), "c": lambda: jnp.full(K, float(N)), "scale_a": lambda: jnp.full(K, 2.0 * N)}
    np.testing.assert_array_equal(got, jnp.broadcast_to(column[which](), (M, K)))


@pytest.mark.full
def test_no_tracer_of_a_product_leaks():
    with jax.checking_leaks():
        jax.jit(lambda x, n: gemm(x, n))(jnp.ones((M, 16)), jnp.ones((16, N), jnp.int8)).block_until_ready()


def test_no_tracer_of_a_rounding_leaks():
    with jax.checking_leaks():
        jax.jit(lambda x, mode: formats.round_float(F16, x, mode))(jnp.ones(2), jnp.int32(1)).block_until_ready()


# ---- shard_map with its checks

SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np, tcemu
from jax.sharding import PartitionSpec as P
count, names = len(jax.devices()), sys.argv[1].split(",")
mesh = jax.make_mesh((count,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
a, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((8, 128), (128, 8)))
op = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
bits = lambda x: np.asarray(x).view(np.uint32)
loss = lambda fn: lambda x, y: jnp.sum(jnp.sin(fn(x, y)))

def parts(fn, x, y):  # one device after the other
    return [fn(part, y) for part in jnp.split(x, count)]

for name in names:
    recipe = None if name == "gemm" else tcemu.get_recipe(name)
    ways = [lambda x, y: tcemu.gemm(x, y, op=op, target="sm_80")] if recipe is None else [
        lambda x, y: tcemu.matmul(x, y, recipe=recipe), tcemu.emulate(lambda x, y: x @ y, recipe)]
    for fn in ways[-1:] if count == 8 else ways:
        cut = jax.shard_map(fn, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
        np.testing.assert_array_equal(bits(jax.jit(cut)(a, b)), np.concatenate([bits(d) for d in parts(fn, a, b)]))
        inner = jax.shard_map(jax.grad(loss(fn), (0, 1)), mesh=mesh, in_specs=(P("x"), P()), out_specs=(P("x"), P()))
        want = parts(jax.grad(loss(fn), (0, 1)), a, b)
        for da, db in (jax.jit(inner)(a, b), jax.jit(jax.grad(loss(cut), (0, 1)))(a, b)):
            np.testing.assert_allclose(da, np.concatenate([g for g, _ in want]), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(db, sum(g for _, g in want), rtol=1e-5, atol=1e-4)
    print(name)
"""
EVERY = "gemm,bf16,deepseek,fp8,mxfp8"


@pytest.mark.parametrize("case", sample_cases([(4, "bf16"), (4, EVERY), (8, EVERY)], ()))
def test_shard_map_with_its_checks(case):
    devices, names = case
    assert run_on_devices(devices, SHARDED, names).split() == names.split(",")
