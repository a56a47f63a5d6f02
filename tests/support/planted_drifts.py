"""Drifts planted into runs of small models, by arithmetic that is written here in plain NumPy and fractions.

`PLANTS` has for each kind of operation the ways to compute it otherwise, and the name of the hypothesis that must be found.
"""

from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

F32, BF16 = np.float32, ml_dtypes.bfloat16


class Model(NamedTuple):
    fn: Any
    arguments: tuple


def _normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), F32) / np.sqrt(shape[0]).astype(F32)


def small_gpt() -> Model:
    rng = np.random.default_rng(1)
    d, heads, length = 24, 2, 6
    weights = {name: _normal(rng, *shape) for name, shape in {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 32), "down": (32, d)}.items()}

    def fn(x, w):
        with jax.named_scope("norm"):
            h = x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) / d + F32(1e-6))
        with jax.named_scope("attention"):
            q, k, v = (part.reshape(length, heads, -1).swapaxes(0, 1) for part in jnp.split(h @ w["qkv"], 3, -1))
            scores = jnp.exp(q @ k.swapaxes(1, 2) * F32(0.3))
            x = x + (scores / scores.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(length, d) @ w["out"]
        with jax.named_scope("mlp"):
            return x + jnp.tanh(x @ w["up"]) @ w["down"]

    return Model(fn, (jnp.asarray(rng.standard_normal((length, d)), F32), weights))


def small_moe() -> Model:
    rng = np.random.default_rng(2)
    d, experts = 16, 3
    w = {
        "gate": _normal(rng, d, experts),
        "up": _normal(rng, experts, d, 20).astype(BF16),
        "down": _normal(rng, experts, 20, d).astype(BF16),
    }

    def fn(x, w):
        with jax.named_scope("router"):
            shares = jax.nn.sigmoid(x @ w["gate"])
            shares = shares / shares.sum(-1, keepdims=True)
        with jax.named_scope("experts"):
            y = jnp.einsum("td,edf->etf", x.astype(BF16), w["up"])
            y = y * jnp.bfloat16(1.7) + y * y
            y = jnp.einsum("etf,efd->etd", y, w["down"])
        return (y.astype(F32) * shares.T[:, :, None]).sum(0)

    return Model(fn, (jnp.asarray(rng.standard_normal((8, d)), F32), w))


def small_convnet() -> Model:
    rng = np.random.default_rng(3)
    w = {"conv": _normal(rng, 3, 3, 2, 6), "scale": 1 + _normal(rng, 6), "dense": _normal(rng, 6, 5)}

    def fn(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        with jax.named_scope("conv"):
            y = jax.lax.conv_general_dilated(x, w["conv"], (1, 1), "SAME", dimension_numbers=numbers)
        with jax.named_scope("norm"):
            y = jnp.tanh(y * w["scale"] + F32(0.1))
        with jax.named_scope("head"):
            logits = y.sum((1, 2)) / F32(25) @ w["dense"]
            return jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)

    return Model(fn, (jnp.asarray(rng.standard_normal((3, 5, 5, 2)), F32), w))


MODELS = {"gpt": small_gpt, "moe": small_moe, "convnet": small_convnet}

# ---- sums, one element after the other


def _fma(x, y, z):
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    near = F32(float(exact))  # rounded twice; its neighbours decide
    around = [np.nextafter(near, F32(-np.inf), dtype=F32), near, np.nextafter(near, F32(np.inf), dtype=F32)]
    return min(around, key=lambda v: (abs(Fraction(float(v)) - exact), int(np.asarray(v, F32).view(np.uint32)) & 1))


def sequential(p):
    total = F32(0)
    for x in p:
        total = F32(total + x)
    return total


def pairwise(p):
    while len(p) > 1:
        p = [F32(p[i] + p[i + 1]) if i + 1 < len(p) else p[i] for i in range(0, len(p), 2)]
    return p[0]


def four_lanes(p):
    lanes = [sequential(p[i::4]) for i in range(4)]
    return F32(F32(lanes[0] + lanes[2]) + F32(lanes[1] + lanes[3]))


def in_bf16(p):
    total = F32(0)
    for x in p:
        total = F32(BF16(F32(total + F32(BF16(x)))))
    return total


def by(sum_of_products):
    def multiply(a, b):
        return np.array(
            [sum_of_products([F32(x * y) for x, y in zip(row, column, strict=True)]) for row, column in zip(a, b, strict=True)], F32
        )

    return multiply


def fused_chain(a, b):
    totals = []
    for row, column in zip(a, b, strict=True):
        total = F32(0)
        for x, y in zip(row, column, strict=True):
            total = _fma(x, y, total)
        totals.append(total)
    return np.array(totals, F32)


def two_slices(a, b):
    half = -(-a.shape[1] // 2)
    return F32(fused_chain(a[:, :half], b[:, :half]) + fused_chain(a[:, half:], b[:, half:]))


def rounded_operands(rounding):
    return lambda a, b: fused_chain(rounding(a), rounding(b))


def tf32(x):
    codes = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    return ((codes + 0xFFF + ((codes >> 13) & 1)) & 0xFFFFE000).astype(np.uint32).view(F32)


def tf32_truncated(x):
    return (np.ascontiguousarray(x, F32).view(np.uint32) & np.uint32(0xFFFFE000)).view(F32)


def in_float64(a, b):
    return (a.astype(np.float64) * b.astype(np.float64)).sum(-1).astype(F32)


PRODUCTS = {  # how rows of A and B are multiplied, and the hypothesis
    "pairwise": (by(pairwise), "order of the sum"),
    "four lanes": (by(four_lanes), "order of the sum"),
    "two slices": (two_slices, "order of the sum"),
    "products rounded": (by(sequential), "fma"),
    "tf32": (rounded_operands(tf32), "operands rounded"),
    "tf32 truncated": (rounded_operands(tf32_truncated), "operands rounded"),
    "bf16 operands": (rounded_operands(lambda x: x.astype(BF16).astype(F32)), "operands rounded"),
    "bf16 accumulator": (by(in_bf16), "accumulator"),
    "f64 accumulator": (in_float64, "accumulator"),
}
SUMS = {
    "sequential": (lambda rows: np.array([sequential(row) for row in rows], F32), "order of the sum"),
    "pairwise": (lambda rows: np.array([pairwise(list(row)) for row in rows], F32), "order of the sum"),
    "four lanes": (lambda rows: np.array([four_lanes(row) for row in rows], F32), "order of the sum"),
    "bf16 accumulator": (lambda rows: np.array([in_bf16(row) for row in rows], F32), "accumulator"),
}


def product_rows(operation, a, b):
    """Rows of A and of B for each output, and the shape of the result, for two matrices or two batches of matrices."""
    if operation.name == "conv_general_dilated":
        padded = np.pad(a, [(0, 0), (1, 1), (1, 1), (0, 0)])
        places = [(n, y, x) for n in range(a.shape[0]) for y in range(a.shape[1]) for x in range(a.shape[2])]
        rows = np.array([padded[n, y : y + 3, x : x + 3].reshape(-1) for n, y, x in places])
        columns = b.reshape(-1, b.shape[-1]).T
        return np.repeat(rows, len(columns), 0), np.tile(columns, (len(rows), 1))
    (contracted, batch) = operation.attributes["dimension_numbers"]
    letters = [chr(97 + i) for i in range(a.ndim)]
    other = [chr(110 + i) for i in range(b.ndim)]
    for i, j in zip([*contracted[0], *batch[0]], [*contracted[1], *batch[1]], strict=True):
        other[j] = letters[i]
    shared = [letters[i] for i in batch[0]]
    summed = [letters[i] for i in contracted[0]]
    out = shared + [x for x in letters if x not in shared + summed] + [x for x in other if x not in shared + summed]
    full = out + summed
    sizes = dict(zip(letters, a.shape, strict=True)) | dict(zip(other, b.shape, strict=True))
    spread = lambda x, names: np.broadcast_to(
        np.einsum(f"{''.join(names)}->{''.join(n for n in full if n in names)}", x).reshape([sizes[n] if n in names else 1 for n in full]),
        [sizes[n] for n in full],
    )
    k = int(np.prod([sizes[n] for n in summed]))
    return spread(a, letters).reshape(-1, k), spread(b, other).reshape(-1, k)


def plant_product(operation, operands, result, multiply):
    a, b = (x.astype(F32) for x in operands)
    return multiply(*product_rows(operation, a, b)).reshape(result.shape).astype(result.dtype)


def plant_sum(operation, operands, result, add):
    x, axes = operands[0], operation.attributes["axes"]
    kept = [i for i in range(x.ndim) if i not in axes]
    rows = x.transpose([*kept, *axes]).reshape(result.size, -1)
    return add(rows).reshape(result.shape)


def gpu_function(name, x):
    """The approximate instructions of a GPU, which tests/engine/arithmetic holds to recorded words."""
    from tcemu.engine.arithmetic import special_functions as unit

    codes = lambda v: jnp.asarray(np.ascontiguousarray(v, F32).view(np.uint32))
    floats = lambda v: np.asarray(v).view(F32)
    if name == "rsqrt":
        return floats(unit.rsqrt(codes(x)))
    power = floats(unit.ex2(codes(F32(1.4426950408889634) * (-x if name == "logistic" else x))))
    return power if name == "exp" else floats(unit.rcp(codes(F32(1) + power)))


def rounded(x, dtype):
    return x.astype(dtype).astype(x.dtype)


def plans(operation):
    """Yield (name, hypothesis, function from the operands and the result to its replacement) for one recorded operation."""
    name, dtype = operation.name, operation.results[0].dtype
    if name in ("dot_general", "conv_general_dilated"):
        for how, (multiply, kind) in PRODUCTS.items():
            if dtype == "float32" or kind == "accumulator":
                yield how, kind, lambda operands, result, multiply=multiply: plant_product(operation, operands, result, multiply)
    if name == "reduce_sum":
        for how, (add, kind) in SUMS.items():
            yield how, kind, lambda operands, result, add=add: plant_sum(operation, operands, result, add)
    if name in ("exp", "logistic", "rsqrt"):
        yield "GPU function", "special functions", lambda operands, result: gpu_function(name, operands[0])
    if dtype == "float32" and name in ("exp", "tanh", "mul", "add", "div", "sub", "logistic"):
        for narrow in (BF16, np.float16):
            yield f"rounded to {np.dtype(narrow)}", "a rounding more", lambda operands, result, narrow=narrow: rounded(result, narrow)
    if name == "div":
        yield "reciprocal", "reciprocal", lambda operands, result: operands[0] * (F32(1) / operands[1])
        yield "quotient", "reciprocal", lambda operands, result: operands[0] / operands[1]  # XLA may use a reciprocal
