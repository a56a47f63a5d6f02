"""The forward of a GPT of two layers, kernel by kernel: `tcemu.ptx` runs the PTX, `tcemu.gemm` and `tcemu.functional` compute the same.

Each step begins from the words that the kernels left, and the chain of the functions alone is compared as well.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ptx_kernels.functional_manifest import HEAD, HEADS, HIDDEN, TOKENS, VOCABULARY, WIDTH, compiled_texts
from support.functional_cases import words

import tcemu
from tcemu import functional
from tcemu.functional import RowSum, SoftmaxKernel

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
TARGET, EPS, LAYERS = "sm_80", 1e-5, 2
SCALE = 0.25  # 1 / sqrt(HEAD), a power of two: the product with it is exact
IN_TILE = SoftmaxKernel(RowSum(warps=1, vector=2, lanes=4))  # four lanes share a row of an accumulator


def draw_weights():
    """Parameters of the model: the gains near one, every matrix near 1 / sqrt(columns)."""
    rng = np.random.default_rng(42)
    matrix = lambda *shape: (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(BF16)
    gain = lambda: (1 + 0.1 * rng.standard_normal(WIDTH)).astype(BF16)
    layer = lambda: {
        "norm1": gain(), "q": matrix(WIDTH, WIDTH), "k": matrix(WIDTH, WIDTH), "v": matrix(WIDTH, WIDTH), "o": matrix(WIDTH, WIDTH),
        "norm2": gain(), "gate": matrix(WIDTH, HIDDEN), "up": matrix(WIDTH, HIDDEN), "down": matrix(HIDDEN, WIDTH),
    }  # fmt: skip
    return {
        "tokens": rng.integers(0, VOCABULARY, TOKENS).astype(np.int32), "labels": rng.integers(0, VOCABULARY, TOKENS).astype(np.int32),
        "table": rng.standard_normal((VOCABULARY, WIDTH)).astype(BF16), "layers": [layer() for _ in range(LAYERS)],
        "norm": gain(), "logits": matrix(WIDTH, VOCABULARY),
    }  # fmt: skip


ANGLES = np.arange(TOKENS)[:, None] * 100.0 ** (-np.arange(HEAD // 2) / (HEAD // 2))
COS, SIN = np.cos(ANGLES).astype(BF16), np.sin(ANGLES).astype(BF16)


class Kernels:
    """The operations by their PTX."""

    def launch(self, name, grid, args, result):
        compiled = compiled_texts()[f"gpt {name}"]
        outputs = tcemu.ptx.run(
            compiled["text"], grid=grid, block=32 * compiled["warps"], shared_bytes=compiled["shared"], target=TARGET,
            args=[*(np.int32(arg) if isinstance(arg, int) else arg for arg in args), np.uint64(0), np.uint64(0)],
        )  # fmt: skip
        return np.asarray(outputs[result])

    def embedding(self, tokens, table):
        return self.launch("embedding", TOKENS, [tokens, table, np.zeros((TOKENS, WIDTH), BF16)], 2)

    def rms_norm(self, x, gain):
        return self.launch("rms_norm", TOKENS, [np.zeros_like(x), WIDTH, x, WIDTH, gain, WIDTH, np.float32(EPS), np.float32(0)], 0)

    def matmul(self, a, b, dtype=BF16):
        d = np.zeros((TOKENS, b.shape[1]), dtype)
        return self.launch("matmul" if dtype == BF16 else "logits", (1, b.shape[1] // 32), [a, b, d, b.shape[1], b.shape[0]], 2)

    def rotary(self, x):
        return self.launch("rotary", TOKENS, [x, WIDTH, COS, SIN, HEAD // 2], 0)

    def attention(self, q, k, v):
        return self.launch("attention", HEADS, [q, k, v, np.zeros_like(q), WIDTH, np.float32(SCALE)], 3)

    def add(self, x, y):
        return self.launch("add", TOKENS * WIDTH // 256, [x, y], 0)

    def silu_mul(self, gate, up):
        return self.launch("silu_mul", TOKENS, [gate, up, np.zeros_like(gate), HIDDEN], 2)

    def cross_entropy(self, logits, labels):
        return self.launch("cross_entropy", TOKENS, [logits, VOCABULARY, labels, np.zeros(TOKENS, F32), VOCABULARY, TOKENS], 2)


class Functions:
    """The same operations by the package's functions on arrays."""

    norm = "liger"

    def embedding(self, tokens, table):
        return table[tokens]

    def rms_norm(self, x, gain):
        return functional.rms_norm(x, gain, eps=EPS, kernel=self.norm)

    def matmul(self, a, b, dtype=BF16):
        return tcemu.gemm(a, b, op=MMA, target=TARGET).astype(dtype)

    def rotary(self, x):
        heads = x.reshape(TOKENS, HEADS, HEAD)
        return functional.rotary(heads, COS[:, None], SIN[:, None], kernel="liger").reshape(x.shape)

    def attention(self, q, k, v):
        q, k, v = (jnp.asarray(x).reshape(TOKENS, HEADS, HEAD).swapaxes(0, 1) for x in (q, k, v))
        scores = tcemu.gemm(q, k.swapaxes(1, 2), op=MMA, target=TARGET) * np.float32(SCALE)
        scores = jnp.where(np.tri(TOKENS, dtype=bool), scores, -np.inf)
        weights = functional.softmax(scores, kernel=IN_TILE, dtype=BF16)
        return tcemu.gemm(weights, v, op=MMA, target=TARGET).astype(BF16).swapaxes(0, 1).reshape(TOKENS, WIDTH)

    def add(self, x, y):
        return (jnp.asarray(x).astype(F32) + jnp.asarray(y).astype(F32)).astype(BF16)

    def silu_mul(self, gate, up):
        return functional.silu_mul(gate, up, kernel="liger")

    def cross_entropy(self, logits, labels):
        return functional.cross_entropy(logits, labels, kernel="liger", count=TOKENS)


class Compared:
    """Every operation by both, from the same words. The result is the kernels'; the words that differ are counted."""

    def __init__(self):
        self.kernels, self.functions, self.differences, self.sizes = Kernels(), Functions(), Counter(), Counter()

    def __getattr__(self, name):
        def call(*args):
            expected, computed = getattr(self.kernels, name)(*args), np.asarray(getattr(self.functions, name)(*args))
            assert expected.dtype == computed.dtype and expected.shape == computed.shape
            self.differences[name] += int((words(expected) != words(computed)).sum())
            self.sizes[name] += expected.size
            return expected

        return call


def forward(by, weights):
    """Return the logits and the losses of the tokens."""
    x = by.embedding(weights["tokens"], weights["table"])
    for layer in weights["layers"]:
        normed = by.rms_norm(x, layer["norm1"])
        q, k = (by.rotary(by.matmul(normed, layer[name])) for name in "qk")
        x = by.add(x, by.matmul(by.attention(q, k, by.matmul(normed, layer["v"])), layer["o"]))
        normed = by.rms_norm(x, layer["norm2"])
        x = by.add(x, by.matmul(by.silu_mul(by.matmul(normed, layer["gate"]), by.matmul(normed, layer["up"])), layer["down"]))
    logits = by.matmul(by.rms_norm(x, weights["norm"]), weights["logits"], F32)
    return logits, by.cross_entropy(logits, weights["labels"])


@pytest.mark.full
def test_a_whole_forward_has_the_words_of_its_kernels():
    weights, compared = draw_weights(), Compared()
    logits, losses = forward(compared, weights)
    assert set(compared.differences.values()) == {0}, compared.differences
    assert compared.sizes["matmul"] == TOKENS * (LAYERS * (5 * WIDTH + 2 * HIDDEN) + VOCABULARY)
    by_functions = jax.jit(lambda: forward(Functions(), weights))()
    for expected, computed in zip((logits, losses), by_functions, strict=True):
        assert (words(expected) == words(computed)).all()
    assert 3 < losses.sum() < 7 and np.isfinite(logits).all()  # near log(VOCABULARY), as random weights give it


@pytest.mark.full
def test_one_other_cast_changes_the_logits():
    """The control: norms that do not round before the weight."""

    class Changed(Functions):
        norm = "liger_gemma"

    weights = draw_weights()
    own, changed = (jax.jit(lambda by=by: forward(by, weights)[0])() for by in (Functions(), Changed()))
    assert (words(own) != words(changed)).any()
