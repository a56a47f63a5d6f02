"""Words of whole JAX functions on a GPU, with XLA's dump of each: compiled by XLA's defaults, and with nothing chosen by time.

python xla_programs.py OUT --mode untimed [--group more]     on a machine with a GPU: OUT/words.npz, facts.json, dump.tar.xz, profile/
python xla_programs.py OUT2 --mode default    in a process of its own: what XLA has timed it keeps until the process ends
python xla_programs.py --between FOLDER FOLDER2     words and launches of two recordings that differ, by function
python xla_programs.py --compare FOLDER [--gpu H200]     the same functions by tcemu.xla: words that differ from FOLDER's, by function
"""

import argparse
import io
import itertools
import json
import os
import sys
import tarfile
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

KEPT = ("after_optimizations.txt", "buffer-assignment.txt", ".ptx", "thunk_sequence.txt", "thunk_metadata.txt", "gpu_target_config.pbtxt")
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
OVERRIDE = "block_m: 64 block_n: 64 block_k: 64 split_k: 1 num_stages: 3 num_warps: 4 num_ctas: 1 is_tma_allowed: true"
MODES = {
    "default": {}, "untimed": {"xla_gpu_autotune_level": 0}, "libraries": {"xla_gpu_enable_triton_gemm": False},
    "untimed_libraries": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
    "maps": {"xla_gpu_override_gemm_autotuner": OVERRIDE},
}  # fmt: skip
KEPT_WORDS = 1 << 13  # of a result at most


def draw(seed, *shape, scale=1.0, dtype="f32"):
    rng = np.random.Generator(np.random.Philox([11, seed]))
    return (rng.integers(-(1 << 15), 1 << 15, shape, dtype=np.int32).astype(np.float32) * np.float32(scale * 2.0**-15)).astype(
        DTYPES[dtype]
    )


def layer_norm(x, scale):
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(((wide - mean) ** 2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def block(x, weights):
    """A layer of a transformer: causal attention with four heads, and an MLP."""
    rows, width = x.shape
    heads = (layer_norm(x, weights["n1"]) @ weights["qkv"]).reshape(rows, 3, 4, width // 4)
    q, k, v = heads[:, 0], heads[:, 1], heads[:, 2]
    scores = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32) / np.float32((width // 4) ** 0.5)
    scores = jnp.where(jnp.tril(jnp.ones((rows, rows), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, -1).astype(x.dtype), v).reshape(rows, width)
    x = x + mixed @ weights["o"]
    return x + jax.nn.gelu(layer_norm(x, weights["n2"]) @ weights["up"]) @ weights["down"]


def block_weights(width, dtype, seed=20):
    shapes = {"qkv": (width, 3 * width), "o": (width, width), "up": (width, 2 * width), "down": (2 * width, width)}
    found = {name: draw(seed + n, *shape, scale=width**-0.5, dtype=dtype) for n, (name, shape) in enumerate(shapes.items())}
    return found | {"n1": draw(seed + 8, width, dtype=dtype), "n2": draw(seed + 9, width, dtype=dtype)}


def mlp_loss(weights, x, labels):
    hidden = jax.nn.relu(x @ weights["up"] + weights["b"])
    logits = (hidden @ weights["down"]).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits, -1), labels[:, None], -1).mean()


def sgd_step(weights, x, labels):
    loss, gradient = jax.value_and_grad(mlp_loss)(weights, x, labels)
    return loss, jax.tree.map(lambda w, g: w - (0.1 * g).astype(w.dtype), weights, gradient)


def adam_step(state, gradient):
    first = 0.9 * state["m"] + 0.1 * gradient
    second = 0.999 * state["v"] + 0.001 * gradient * gradient
    return {"w": state["w"] - 1e-3 * (first / 0.1) / (jnp.sqrt(second / 0.001) + 1e-8), "m": first, "v": second}


def recurrent(weights, x):
    def step(state, row):
        state = jnp.tanh(state @ weights + row)
        return state, state.sum()

    return jax.lax.scan(step, jnp.zeros(x.shape[1:], x.dtype), x)


def embedded(table, ids):
    rows = table[ids]
    return rows, jnp.zeros_like(table).at[ids].add(rows), jnp.argmax(rows, -1), jnp.sort(rows, -1), jnp.cumsum(rows, -1)


def cases():
    """Name, function and arguments."""
    for dtype in ("f32", "bf16"):
        for rows, width in ((16, 64), (37, 128)):
            yield f"block_{dtype}_{rows}x{width}", block, (draw(1, rows, width, dtype=dtype), block_weights(width, dtype))
        weights = {
            "up": draw(2, 96, 128, scale=0.1, dtype=dtype),
            "b": draw(3, 128, dtype=dtype),
            "down": draw(4, 128, 40, scale=0.1, dtype=dtype),
        }
        labels = np.arange(24, dtype=np.int32) * 7 % 40
        yield f"sgd_step_{dtype}", sgd_step, (weights, draw(5, 24, 96, dtype=dtype), labels)
        yield f"recurrent_{dtype}", recurrent, (draw(6, 32, 32, scale=0.2, dtype=dtype), draw(7, 5, 8, 32, dtype=dtype))
    state = {"w": draw(8, 300, 7), "m": draw(9, 300, 7, scale=0.01), "v": draw(10, 300, 7, scale=0.01) ** 2}
    yield "adam_step", adam_step, (state, draw(11, 300, 7, scale=0.1))
    yield "embedded", embedded, (draw(12, 50, 24), np.array([3, 49, 3, 0, 17, 8], np.int32))
    yield (
        "gated_f16",
        lambda x, a, b: jax.nn.silu(x @ a) * (x @ b),
        (draw(13, 8, 64, dtype="f16"), *(draw(n, 64, 96, scale=0.2, dtype="f16") for n in (14, 15))),
    )
    yield "logsumexp_f32", lambda x: jax.nn.logsumexp(x, 0), (draw(16, 70, 33, scale=9),)
    yield "variance_bf16", lambda x: (x.mean(0), x.var(0), jnp.max(x), x.prod(1)), (draw(17, 60, 90, dtype="bf16"),)


# ---- products


def dot_int8(x, y):
    return jax.lax.dot(x, y, preferred_element_type=jnp.int32)


def dot_fp8(x, y):
    return jax.lax.dot(x, y, preferred_element_type=jnp.bfloat16)


PRODUCTS = {
    "nn": jnp.matmul, "nt": lambda x, y: x @ y.T, "tn": lambda x, y: x.T @ y, "bias": lambda x, y, b: x @ y + b,
    "relu": lambda x, y, b: jax.nn.relu(x @ y + b), "gelu": lambda x, y, b: jax.nn.gelu(x @ y + b),
    "relu0": lambda x, y: jax.nn.relu(x @ y), "gelu0": lambda x, y: jax.nn.gelu(x @ y), "added": lambda x, y, c: x @ y + c,
}  # fmt: skip


SIZES = (37, 256, 96), (128, 768, 768), (256, 512, 1024), (1024, 1024, 1024), (8, 2048, 512), (512, 4096, 256), (200, 320, 120)


def product_cases():
    """Products, named after their form, dtype, M, K and N."""
    for dtype in DTYPES:
        for m, k, n in SIZES:
            yield f"nn_{dtype}_{m}x{k}x{n}", PRODUCTS["nn"], (draw(31, m, k, dtype=dtype), draw(32, k, n, dtype=dtype))
    for dtype in ("bf16", "f32"):
        m, k, n = 128, 256, 320
        x, y = draw(33, m, k, dtype=dtype), draw(34, k, n, dtype=dtype)
        yield f"nt_{dtype}_{m}x{k}x{n}", PRODUCTS["nt"], (x, np.ascontiguousarray(y.T))
        yield f"tn_{dtype}_{m}x{k}x{n}", PRODUCTS["tn"], (np.ascontiguousarray(x.T), y)
        yield f"nn_{dtype}_12x{m}x{k}x{n}", PRODUCTS["nn"], (draw(35, 12, m, k, dtype=dtype), draw(36, 12, k, n, dtype=dtype))
        for form in ("bias", "relu", "gelu"):
            yield f"{form}_{dtype}_{m}x{k}x{n}", PRODUCTS[form], (x, y, draw(37, n, dtype=dtype))
        for form in ("relu0", "gelu0"):
            yield f"{form}_{dtype}_{m}x{k}x{n}", PRODUCTS[form], (x, y)
        yield f"added_{dtype}_{m}x{k}x{n}", PRODUCTS["added"], (x, y, draw(38, m, n, dtype=dtype))
    rng = np.random.Generator(np.random.Philox(39))
    for m, k, n in ((16, 16, 16), (64, 128, 64), (128, 256, 192)):
        yield f"int8_{m}x{k}x{n}", dot_int8, tuple(rng.integers(-128, 128, shape, dtype=np.int8) for shape in ((m, k), (k, n)))
    m, k, n = 128, 256, 320
    yield f"fp8_{m}x{k}x{n}", dot_fp8, tuple(draw(40 + i, *s).astype(ml_dtypes.float8_e4m3fn) for i, s in enumerate(((m, k), (k, n))))


def turned(x, y):
    return (x @ y).T


def dot_f32(x, y):
    return jax.lax.dot(x, y, preferred_element_type=jnp.float32)


def dot_scaled(x, y, a, b):
    wide = x.astype(jnp.bfloat16) * a.astype(jnp.bfloat16), y.astype(jnp.bfloat16) * b.astype(jnp.bfloat16)
    return jax.lax.dot(*wide, preferred_element_type=jnp.bfloat16)


def dot_highest(x, y):
    return jnp.dot(x, y, precision=jax.lax.Precision.HIGHEST)


def attention_gradient(q, k, v):
    attention = lambda *x: jax.nn.dot_product_attention(*x, is_causal=True, implementation="cudnn")
    return jax.grad(lambda *x: (attention(*x).astype(jnp.float32) ** 2).sum(), (0, 1, 2))(q, k, v)


def held_cases():
    """Products whose shapes no rule was chosen on, and attention by cuDNN."""
    for dtype in DTYPES:
        for m, k, n in ((50, 200, 72), (300, 1000, 136), (64, 8192, 64), (1, 512, 256), (512, 256, 1), (130, 77, 65), (96, 100, 40)):
            yield f"nn_{dtype}_{m}x{k}x{n}", PRODUCTS["nn"], (draw(101, m, k, dtype=dtype), draw(102, k, n, dtype=dtype))
        m, k, n = 100, 328, 200
        x, y = draw(103, m, k, scale=0.1, dtype=dtype), draw(104, k, n, dtype=dtype)
        for form in ("bias", "relu", "gelu"):
            yield f"{form}_{dtype}_{m}x{k}x{n}", PRODUCTS[form], (x, y, draw(105, n, dtype=dtype))
        for form in ("relu0", "gelu0"):
            yield f"{form}_{dtype}_{m}x{k}x{n}", PRODUCTS[form], (x, y)
        yield f"added_{dtype}_{m}x{k}x{n}", PRODUCTS["added"], (x, y, draw(106, m, n, dtype=dtype))
        yield f"nt_{dtype}_{m}x{k}x{n}", PRODUCTS["nt"], (x, np.ascontiguousarray(y.T))
        yield f"tn_{dtype}_{m}x{k}x{n}", PRODUCTS["tn"], (np.ascontiguousarray(x.T), y)
        yield f"turned_{dtype}_{m}x{k}x{n}", turned, (x, y)
        yield f"nn_{dtype}_5x33x100x48", PRODUCTS["nn"], (draw(107, 5, 33, 100, dtype=dtype), draw(108, 5, 100, 48, dtype=dtype))
        if dtype != "f32":
            for m, k, n in ((100, 328, 200), (64, 8192, 64)):
                yield f"to_f32_{dtype}_{m}x{k}x{n}", dot_f32, (draw(109, m, k, dtype=dtype), draw(110, k, n, dtype=dtype))
            for batch, rows, keys, heads, of_keys, size in (
                (1, 128, 128, 2, 2, 64), (2, 100, 100, 4, 4, 128), (3, 300, 300, 4, 2, 64), (2, 64, 200, 2, 2, 64), (1, 520, 520, 2, 1, 32),
            ):  # fmt: skip
                q = draw(111, batch, rows, heads, size, dtype=dtype)
                k, v = (draw(n, batch, keys, of_keys, size, dtype=dtype) for n in (112, 113))
                for causal in (False, True)[: 1 + (rows == keys)]:
                    call = lambda *x, c=causal: jax.nn.dot_product_attention(*x, is_causal=c, implementation="cudnn")
                    yield f"attention_{dtype}_{batch}x{rows}x{keys}x{heads}x{of_keys}x{size}_{causal}", call, (q, k, v)
            yield f"attention_gradient_{dtype}", attention_gradient, tuple(draw(n, 1, 128, 2, 64, dtype=dtype) for n in (114, 115, 116))
        else:
            for m, k, n in ((100, 328, 200), (256, 512, 64), (64, 8192, 64)):
                yield f"highest_{m}x{k}x{n}", dot_highest, (draw(117, m, k), draw(118, k, n))
    for m, k, n in ((64, 512, 256), (256, 4096, 64)):
        for x, y in (("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn")):
            yield f"fp8_{x[7:11]}_{m}x{k}x{n}", dot_fp8, (draw(119, m, k).astype(x), draw(120, k, n).astype(y))
    rng = np.random.Generator(np.random.Philox(121))
    yield "int8_96x160x64", dot_int8, tuple(rng.integers(-128, 128, shape, dtype=np.int8) for shape in ((96, 160), (160, 64)))
    for m, k, n in ((64, 512, 256), (128, 4096, 64), (40, 1040, 208)):  # values of which a sum on tensor cores loses bits
        wide = lambda seed, *shape: (draw(seed, *shape) * np.exp2(rng.integers(-5, 6, shape))).astype(ml_dtypes.float8_e4m3fn)
        x, y = wide(122, m, k), wide(123, k, n)
        yield f"fp8_wide_{m}x{k}x{n}", dot_fp8, (x, y)
        yield f"fp8_scaled_{m}x{k}x{n}", dot_scaled, (x, y, np.float32(0.37), np.float32(1.9))
    for m, k, n in ((60, 99, 31), (200, 1001, 77), (33, 4099, 130)):
        yield f"nn_f32_{m}x{k}x{n}", PRODUCTS["nn"], (draw(124, m, k), draw(125, k, n))


# ---- functions that were not looked at before


def rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def rotate(x):
    """Rotary embedding of [..., rows, heads, size]."""
    rows, size = x.shape[-3], x.shape[-1]
    angle = jnp.arange(rows)[:, None, None] / 10_000 ** (jnp.arange(size // 2) * 2 / size)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1).astype(x.dtype)


def decoder(weights, ids):
    """Logits in f32 of a decoder whose layers are stacked: RMS norms, rotary embedding, grouped queries, a gated MLP."""
    x = weights["table"][ids].astype(jnp.bfloat16)
    batch, rows, width = x.shape

    def layer(x, w):
        w = jax.tree.map(lambda each: each.astype(jnp.bfloat16), w)
        normed = rms_norm(x, w["n1"])
        q = rotate((normed @ w["q"]).reshape(batch, rows, 4, width // 4))
        k, v = (each.reshape(batch, rows, 2, width // 4) for each in jnp.split(normed @ w["kv"], 2, -1))
        x = x + jax.nn.dot_product_attention(q, rotate(k), v, is_causal=True).reshape(x.shape) @ w["o"]
        gate, up = jnp.split(rms_norm(x, w["n2"]) @ w["up"], 2, -1)
        return x + (jax.nn.silu(gate) * up) @ w["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, weights["layers"])
    return (rms_norm(x, weights["norm"].astype(x.dtype)) @ weights["table"].T.astype(x.dtype)).astype(jnp.float32)


def decoder_weights(width, vocabulary, layers):
    shapes = {"q": (width, width), "kv": (width, width), "o": (width, width), "up": (width, 4 * width), "down": (2 * width, width)}
    stacked = {name: draw(50 + n, layers, *shape, scale=width**-0.5) for n, (name, shape) in enumerate(shapes.items())}
    norms = {name: 1 + draw(56 + n, layers, width, scale=0.1) for n, name in enumerate(("n1", "n2"))}
    return {"table": draw(58, vocabulary, width, scale=0.1), "norm": 1 + draw(59, width, scale=0.1), "layers": stacked | norms}


def decoder_loss(weights, ids):
    logits = decoder(weights, ids[:, :-1])
    return -jnp.take_along_axis(jax.nn.log_softmax(logits, -1), ids[:, 1:, None], -1).mean()


def decoder_step(weights, moments, ids):
    """A step of AdamW in mixed precision, with the gradient clipped by its norm."""
    loss, gradient = jax.value_and_grad(decoder_loss)(weights, ids)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
    gradient = jax.tree.map(lambda g: g * jnp.minimum(1, 1 / norm), gradient)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradient)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, moments[1], gradient)
    weights = jax.tree.map(lambda w, m, v: w - 1e-3 * ((m / 0.1) / (jnp.sqrt(v / 0.05) + 1e-8) + 0.1 * w), weights, first, second)
    return loss, norm, weights


def greedy(weights, table):
    """Ten greedy tokens of one recurrent layer, in a loop whose end depends on data."""

    def step(state):
        n, token, hidden, out = state
        hidden = jnp.tanh(hidden @ weights + table[token])
        token = jnp.argmax(hidden @ table.T).astype(jnp.int32)
        return n + 1, token, hidden, jax.lax.dynamic_update_slice(out, token[None], (n,))

    start = jnp.int32(0), jnp.int32(3), jnp.zeros(table.shape[1], table.dtype), jnp.full(10, -1, jnp.int32)
    return jax.lax.while_loop(lambda state: (state[0] < 10) & (state[1] != 0), step, start)[1:]


def experts(x, router, up):
    """The two best of eight experts for each row."""
    weight, chosen = jax.lax.top_k(jax.nn.softmax(x @ router, -1), 2)
    order = jnp.argsort(chosen.reshape(-1))
    rows = jnp.repeat(x, 2, 0)[order]
    products = jax.lax.ragged_dot(rows, up, jnp.bincount(chosen.reshape(-1), length=8).astype(jnp.int32))
    return (products[jnp.argsort(order)].reshape(*chosen.shape, -1) * weight[..., None]).sum(1)


def drawn(words):
    keys = jax.random.split(jax.random.wrap_key_data(words), 8)
    x = jax.random.normal(keys[0], (300,)), jax.random.uniform(keys[1], (300,)), jax.random.randint(keys[2], (300,), -5, 1000)
    y = jax.random.permutation(keys[3], 100), jax.random.categorical(keys[4], jnp.zeros((20, 30))), jax.random.gumbel(keys[5], (300,))
    return *x, *y, jax.random.bernoulli(keys[6], 0.3, (300,)), jax.random.truncated_normal(keys[7], -2, 2, (300,), jnp.float32)


def convolution(x, w, **settings):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **settings)


def pooled(x):
    window = (1, 2, 2, 1)
    largest = lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
    sums = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
    return largest(x), jax.grad(lambda x: (largest(x) ** 2).sum())(x), sums


def scans(x):
    product = jax.lax.associative_scan(jnp.multiply, x, axis=0)
    affine = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, x + 1), axis=1)
    return jnp.cumsum(x, 0), jnp.cumsum(x, 1), jnp.cumprod(x, 1), jax.lax.cummax(x, 0), jax.lax.cumlogsumexp(x, 1), product, affine


def special(x):
    y = jnp.abs(x) + 0.01
    found = jax.scipy.special.gammaln(y), jax.scipy.special.digamma(y), jax.scipy.special.erfinv(x), jnp.arctan2(x, y), jnp.sinh(x)
    return *found, jnp.arcsin(x), jnp.arccosh(1 + y), x**2.5, jnp.fmod(x, y), jnp.tan(x), jax.scipy.special.i0e(x), jax.nn.selu(x)


def found_places(x, y):
    places = jnp.searchsorted(jnp.sort(x), y), jnp.argsort(x), jnp.nonzero(x > 0, size=40)[0]
    return places[0], places[1], jnp.median(x), jnp.histogram(x, 10)[0], places[2], jax.lax.top_k(x, 7)


def segments(x, ids):
    integers = (x * 100).astype(jnp.int32)
    return jax.ops.segment_sum(integers, ids, 7), jax.ops.segment_max(x, ids, 7), jax.ops.segment_sum(x, ids, 7)


def more_cases():
    """Name, function and arguments of functions that were added after `cases`."""
    yield "decoder", decoder, (decoder_weights(64, 100, 2), np.arange(2 * 24, dtype=np.int32).reshape(2, 24) * 37 % 100)
    weights = decoder_weights(32, 60, 2)
    moments = jax.tree.map(np.zeros_like, weights), jax.tree.map(np.zeros_like, weights)
    yield "decoder_step", decoder_step, (weights, moments, np.arange(2 * 17, dtype=np.int32).reshape(2, 17) * 23 % 60)
    yield "greedy", greedy, (draw(61, 32, 32, scale=0.3), draw(62, 50, 32))
    yield "experts", experts, (draw(63, 24, 32), draw(64, 32, 8), draw(65, 8, 32, 48, scale=0.2))
    yield "drawn", drawn, (np.array([7, 2_000_000_011], np.uint32),)
    bits = lambda words: jax.random.bits(jax.random.wrap_key_data(words, impl="rbg"), (1000,))
    yield "bits_rbg", bits, (np.arange(3, 7, dtype=np.uint32),)
    yield "scans", scans, (1 + draw(66, 70, 50, scale=0.5),)
    yield "special", special, (draw(67, 2000, scale=0.99),)
    yield "found_places", found_places, (draw(68, 333), draw(69, 60))
    yield "segments", segments, (draw(70, 200, 6), np.arange(200, dtype=np.int32) * 31 % 7)
    yield "pooled", pooled, (draw(71, 2, 8, 8, 6),)
    yield "per_example", jax.vmap(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), (None, 0)), (draw(72, 32, 16), draw(73, 6, 4, 32))
    pair = tuple((draw(n, 99) + 1j * draw(n + 9, 99)).astype(np.complex64) for n in (74, 75))
    yield "complex", lambda x, y: (x * y, x / y, jnp.exp(x), jnp.abs(x), jnp.sqrt(y)), pair
    for dtype in ("f32", "bf16"):
        heads = tuple(draw(n, 2, 64, 4, 64, dtype=dtype) for n in (76, 77, 78))
        attention = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
        yield f"attention_{dtype}", attention, heads
        image, kernel = draw(79, 2, 8, 8, 16, dtype=dtype), draw(80, 3, 3, 16, 32, dtype=dtype)
        yield f"convolution_{dtype}", convolution, (image, kernel)
        yield f"convolution_gradient_{dtype}", jax.grad(lambda w, x: (convolution(x, w).astype(jnp.float32) ** 2).sum()), (kernel, image)
        depthwise = lambda x, w: convolution(x, w, feature_group_count=16)
        yield f"convolution_depthwise_{dtype}", depthwise, (image, draw(81, 3, 3, 1, 16, dtype=dtype))
    yield "attention_cudnn", lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn"), heads
    yield "fft", jnp.fft.fft, (draw(82, 4, 64).astype(np.complex64),)
    positive = draw(83, 16, 16, scale=0.1) + 2 * np.eye(16, dtype=np.float32)
    yield "cholesky", lambda x: jnp.linalg.cholesky(x @ x.T), (positive,)
    yield "solve", jax.scipy.linalg.solve_triangular, (positive, draw(84, 16, 3))


GROUPS = {"functions": cases, "products": product_cases, "more": more_cases, "held": held_cases}


# ---- recording


def words(x):
    """Words of a result: all, or every so many."""
    x = np.ascontiguousarray(x)
    raw = x.reshape(-1).view({1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32))
    return raw[:: -(-raw.size // KEPT_WORDS) | 1] if raw.size > KEPT_WORDS else raw


def record(out: Path, mode: str, group: str, seconds: float, prefix: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    began, found, dump = time.perf_counter(), {}, Path(tempfile.mkdtemp())
    facts = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "seconds": {}}
    compiled = {}
    for name, function, operands in (case for case in GROUPS[group]() if case[0].startswith(prefix)):
        started, folder = time.perf_counter(), dump / f"{mode}.{name}"
        if started - began > seconds:
            facts[f"{mode}.{name}"] = "out of time"
            continue
        try:
            options = {
                **MODES[mode],
                "xla_dump_to": str(folder),
                "xla_dump_hlo_as_text": True,
                "xla_dump_large_constants": True,
                "xla_dump_emitter_re": "ptx",
            }
            named = lambda *operands, function=function: function(*operands)
            named.__name__ = name
            compiled[name] = jax.jit(named, keep_unused=True).lower(*operands).compile(compiler_options=options), jax.device_put(operands)
            for number, leaf in enumerate(jax.tree.leaves(compiled[name][0](*compiled[name][1]))):
                found[f"{mode}.{name}.{number}"] = words(np.asarray(leaf))
        except Exception as error:
            facts[f"{mode}.{name}"] = f"{type(error).__name__}: {error}"[:300]
        facts["seconds"][f"{mode}.{name}"] = round(time.perf_counter() - started, 2)
    np.savez_compressed(out / "words.npz", **found)
    (out / "facts.json").write_text(json.dumps(facts, indent=1))
    with tarfile.open(out / "dump.tar.xz", "w:xz", preset=1) as archive:
        for path in sorted(dump.glob("*/*")):
            if path.name.endswith(KEPT):
                data = path.read_bytes()
                entry = tarfile.TarInfo(f"{path.parent.name}/{path.name}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with jax.profiler.trace(str(out / "profile"), profiler_options=options):  # names and grids of the kernels of libraries
        for program, operands in compiled.values():
            jax.block_until_ready(program(*operands))
    print(facts["jax"], facts["device"], mode, group, len(found), "results", round(time.perf_counter() - began, 1), "s")


def launches(folder: Path) -> dict[str, str]:
    """The steps of the runtime by program."""
    with tarfile.open(folder / "dump.tar.xz") as archive:
        return {
            member.name.partition("/")[0]: archive.extractfile(member).read().decode()
            for member in archive.getmembers()
            if member.name.endswith("thunk_sequence.txt")
        }


def between(one: Path, other: Path) -> int:
    """Print what XLA chose and computed otherwise in a second process."""
    x, y, steps, again = np.load(one / "words.npz"), np.load(other / "words.npz"), launches(one), launches(other)
    for program in sorted(steps.keys() & again.keys()):
        names = [name for name in x.files if name.rpartition(".")[0] == program]
        wrong, count = sum(int((x[name] != y[name]).sum()) for name in names), sum(x[name].size for name in names)
        print(f"{program}: {wrong} of {count} words differ, {'equal' if steps[program] == again[program] else 'other'} launches")
    return 0


def compare(folder: Path, gpu: str, prefix: str) -> int:
    """Count the words that differ, of functions whose name begins so: compiled by tcemu, and by the recorded dump."""
    import tcemu.xla

    recorded, total, wrong = np.load(folder / "words.npz"), 0, 0
    with tempfile.TemporaryDirectory() as dumped:
        with tarfile.open(folder / "dump.tar.xz") as archive:
            archive.extractall(dumped, filter="data")
        every = itertools.chain.from_iterable(group() for group in GROUPS.values())
        for (name, function, operands), mode, way in itertools.product(every, MODES, ("the GPU's dump", "compiled here")):
            if f"{mode}.{name}.0" in recorded and name.startswith(prefix):
                began = time.process_time()
                try:
                    if way == "compiled here":
                        program = tcemu.xla.compile(function, *operands, gpu=gpu, options=MODES[mode])
                    else:
                        profile = folder if any(folder.rglob("*.xplane.pb")) else None
                        program = tcemu.xla.read(Path(dumped) / f"{mode}.{name}", target=gpu, profile=profile)[0]
                    leaves = jax.tree.leaves(program.run(*jax.tree.leaves(operands))[0])
                except Exception as error:
                    print(f"{mode}, {name}, {way}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                    continue
                pairs = [(words(leaf), recorded[f"{mode}.{name}.{number}"]) for number, leaf in enumerate(leaves)]
                differing, count = sum(int((x != y).sum()) for x, y in pairs), sum(y.size for _, y in pairs)
                wrong, total = wrong + differing, total + count
                print(f"{mode}, {name}, {way}: {differing} of {count} words differ, {time.process_time() - began:.1f} CPU s", flush=True)
    print(f"{wrong} of {total:,} words differ")
    return int(wrong > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--mode", choices=MODES, default="default")
    parser.add_argument("--group", choices=GROUPS, default="functions")
    parser.add_argument("--seconds", type=float, default=80.0, help="after which no case begins")
    parser.add_argument("--between", action="store_true")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--only", default="", help="functions whose name begins so")
    given = parser.parse_args()
    if given.between:
        sys.exit(between(*given.folders))
    if given.compare:
        sys.exit(compare(*given.folders, given.gpu, given.only))
    record(*given.folders, given.mode, given.group, given.seconds, given.only)
