"""Programs that NumPy executes give XLA's words, for every operation, with the edges of integers and of indices."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.sampling import sample_cases

from tcemu.base.numpy_programs import FUNCTIONS, NumpyProgram, UnknownOperation, trace_elementwise

KINDS = ("uint8", "int8", "uint32", "int32", "uint64", "int64")
LIMITS = {kind: np.iinfo(kind) for kind in KINDS}
EDGES = {
    kind: np.array([0, 1, 2, 3, 7, 31, 63, limits.max, limits.max - 1, limits.min, limits.min + 1], object).astype(kind)
    for kind, limits in LIMITS.items()
}
BINARY = ("add", "sub", "mul", "max", "min", "and", "or", "xor", "div", "rem", "eq", "ne", "lt", "le", "gt", "ge",
          "shift_left", "shift_right_logical", "shift_right_arithmetic")  # fmt: skip
UNARY = ("neg", "abs", "sign", "not", "clz", "population_count")
LAX = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "bitwise_not"}


def check(function, *arrays):
    """Compare with XLA, also after pickling."""
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(function)(*arrays)
        expected = jax.tree.leaves(jax.jit(function)(*arrays))
    program = NumpyProgram(closed.jaxpr, closed.consts)
    for each in (program, pickle.loads(pickle.dumps(program))):
        for found, want in zip(each(*arrays), expected, strict=True):
            want = np.asarray(want)
            same = np.asarray(found).dtype == want.dtype and np.asarray(found).tobytes() == want.tobytes()  # also of NaNs
            assert same and np.shape(found) == want.shape, (found, want)


@pytest.mark.parametrize("kind", sample_cases(KINDS, 3))
def test_operations_of_integers(kind):
    left, right = (each.copy() for each in np.meshgrid(EDGES[kind], EDGES[kind]))
    names = [name for name in (*BINARY, *UNARY) if name in FUNCTIONS and not (kind[0] == "u" and name == "abs")]

    def everything(x, y):
        operands = lambda name: (x, y) if name in BINARY else (x,)
        return [getattr(lax, LAX.get(name, name))(*operands(name)) for name in names] + [lax.clamp(y, x, y + x.dtype.type(1))]

    check(everything, left, right)
    with jax.enable_x64(True):
        expected = jax.jit(everything)(left, right)
    found = trace_elementwise(everything, [jax.ShapeDtypeStruct((), each.dtype) for each in (left, right)])
    assert found is not None and all(np.array_equal(a, b) for a, b in zip(found(left, right), expected, strict=True))


def test_conversions():
    floats = np.array(
        [0.0, -0.0, 0.5, -0.5, 1.5, -1.5, 2.0**31, -(2.0**31), 2.0**63, -(2.0**63), 3e38, np.inf, -np.inf, np.nan, 254.9, 255.1]
    )
    for kind in KINDS:
        check(lambda x, kind=kind: [x.astype(kind), x.astype("f4").astype(kind)], floats)
        check(lambda x: [x.astype(other) for other in ("f4", "f8", "bool", *KINDS)], EDGES[kind])
    check(lambda x: [lax.bitcast_convert_type(x, jnp.uint8), lax.bitcast_convert_type(x, jnp.float32)], EDGES["uint32"])
    check(lambda x: lax.bitcast_convert_type(x.reshape(-1, 2), jnp.uint64), np.arange(8, dtype=np.uint32))


def test_shapes_and_reductions():
    x = np.random.default_rng(0).integers(-9, 9, (3, 4, 5)).astype(np.int32)
    check(
        lambda x: [x.T, x[1:, ::2, :3], jnp.flip(x, 1), jnp.concatenate([x, x + 1], 1), jnp.stack([x, -x], 1), *jnp.split(x, [1, 3], 1)], x
    )
    check(lambda x: [jnp.pad(x, ((1, 0), (0, 2), (0, 0))), lax.pad(x, np.int32(7), ((-1, 0, 0), (0, -1, 0), (2, 1, 0)))], x)
    check(lambda x: [x[:, None], jnp.broadcast_to(x[:, :1], x.shape), lax.iota(jnp.int32, 5)], x)
    check(
        lambda x: [x.sum((0, 2)), x.prod(1), x.max(1), x.min((0, 1, 2)), (x > 0).any(1), (x > -9).all((0, 2)), x.argmax(2), x.argmin(1)], x
    )
    check(
        lambda x: [
            lax.cumsum(x, 1),
            lax.cummax(x, 2, reverse=True),
            lax.cumprod(x, 0),
            lax.cummin(x, 1),
            x.astype(jnp.uint8).sum(dtype=jnp.uint8),
        ],
        x,
    )
    check(
        lambda x, i: [lax.dynamic_slice(x, (i, i, i), (2, 2, 2)), lax.dynamic_update_slice(x, x[:2, :2, :2], (i, i - i, i))], x, np.int32(4)
    )
    check(lambda x: [lax.sort(x, dimension=1), *lax.sort((x, -x, x + 1), dimension=2, num_keys=2)], x)
    check(lambda x: lax.select_n(x % 3 + (x % 3 < 0) * 3, x, x + 100, x + 200), x)


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_gathers_and_scatters(mode):
    rng = np.random.default_rng(1)
    x, low = rng.integers(0, 99, (6, 7)).astype(np.int32), -2 if mode != "promise_in_bounds" else 0
    rows, columns = rng.integers(low, 9 + low if low else 6, (2, 11)).astype(np.int32)
    once, values = rng.permutation(6).astype(np.int32), rng.integers(0, 99, 11).astype(np.int32)
    check(
        lambda x, i, j: [x.at[i].get(mode=mode), x.at[:, i].get(mode=mode), x.at[i, j].get(mode=mode), x.at[i, None, j].get(mode=mode)],
        x,
        rows,
        columns,
    )
    check(
        lambda x, i, j, v: [
            *(getattr(x.at[i, j], how)(v, mode=mode) for how in ("add", "max", "min", "multiply", "set")),
            x.at[i, 2:5].add(v[:, None], mode=mode),
        ],
        x, rows, columns, values,
    )  # fmt: skip
    check(
        lambda x, i: [
            x.at[i].set(x, mode=mode),
            jnp.take_along_axis(x, i[:, None], 1),
            jax.vmap(lambda row, k: row.at[k].get(mode=mode))(x, i),
        ],
        x,
        once,
    )
    assert jax.make_jaxpr(lambda x: x.at[0].set(1))(x).jaxpr.eqns


def test_loops():
    x = np.arange(1, 9, dtype=np.int32)
    check(lambda x: lax.fori_loop(0, 5, lambda i, y: y * 2 + i, x), x)
    check(lambda x: lax.while_loop(lambda s: s[0] < 40, lambda s: (s[0] + 7, s[1] ^ s[0]), (x[0], x)), x)
    check(
        lambda x: [
            *lax.scan(lambda c, v: (c + v, c * v), jnp.int32(3), x),
            lax.scan(lambda c, v: (c - v, c), jnp.int32(3), x, reverse=True)[1],
        ],
        x,
    )
    check(lambda x: [lax.cond(x[0] > n, lambda y: y + 1, lambda y: (y * 2).max() + 0 * y, x) for n in (0, 5)], x)
    check(lambda x: lax.switch(x[2], [lambda y: y, lambda y: -y, lambda y: y * 3], x), x)


def test_floats_are_those_of_ieee():
    """Subnormal numbers are kept, and nothing is fused."""
    x = np.array([1.0, 3.0, 1e-45, 1e-38, 2.0**-149, 3e38, np.inf, -0.0], np.float32)
    closed = jax.make_jaxpr(lambda x, y: [x * y + x, x / y, jnp.sqrt(abs(x)), jnp.floor(x), x < y])(x, x[::-1])
    with np.errstate(all="ignore"):
        expected = [x * x[::-1] + x, x / x[::-1], np.sqrt(abs(x)), np.floor(x), x < x[::-1]]
    for found, want in zip(NumpyProgram(closed.jaxpr, closed.consts)(x, x[::-1].copy()), expected, strict=True):
        assert np.array_equal(found, want, equal_nan=True)


def test_what_numpy_computes_in_another_way_is_refused():
    for function, dtype in (
        (jnp.exp, "f4"),
        (lambda x: lax.sort(x), "f4"),
        (lambda x: x @ x, "f4"),
        (lambda x: x + x, "bfloat16"),
        (jnp.max, "f4"),
    ):
        closed = jax.make_jaxpr(function)(jnp.ones(4, dtype))
        with pytest.raises(UnknownOperation):
            NumpyProgram(closed.jaxpr, closed.consts)
    assert trace_elementwise(lambda x: x.reshape(1)[0] + jnp.arange(3, dtype=x.dtype).sum(), [jax.ShapeDtypeStruct((), np.uint32)]) is None
