"""Attention by recipes: every bit is that of a loop over heads and blocks, written out here with `matmul` and `gemm`."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from oracles import special_functions_reference as units
from support.sampling import sample_cases

import tcemu
from tcemu.engine.arithmetic.exponential import exp2, exp2_polynomial
from tcemu.products import Flash

FP8 = "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"
BF16 = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
F32 = np.float32
LOG2_E = 1.4426950408889634


def operands(seed: int, batch: int, queries: int, keys: int, heads: int, key_heads: int, width: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (batch, queries, heads, width), (batch, keys, key_heads, width), (batch, keys, key_heads, width)
    return [(rng.normal(size=shape) * np.exp(rng.normal(size=shape[:-1]))[..., None]).astype(F32) for shape in shapes]


# ---- the loop


def fused(a, b, c) -> np.ndarray:
    """a * b + c in f32, rounded once: the sum in float64, rounded to odd there, so that the last rounding sees what was lost."""
    product, c = np.multiply(a, b, dtype=np.float64), np.float64(c)
    with np.errstate(invalid="ignore"):
        total = product + c
        back = total - product
        lost = (product - (total - back)) + (c - back)
    bits = np.atleast_1d(total).view(np.int64)
    even = (np.atleast_1d(lost) != 0) & np.isfinite(np.atleast_1d(lost)) & (bits & 1 == 0)
    towards = np.where(np.atleast_1d(lost) > 0, np.inf, -np.inf)
    odd = np.where(even, np.nextafter(np.atleast_1d(total), towards), np.atleast_1d(total))
    return odd.reshape(np.shape(total)).astype(F32)


def polynomial(x: np.ndarray) -> np.ndarray:
    """FlashAttention 4's: floor and rest of x, a cubic by fused multiply-adds, and the integer added to the exponent field."""
    x = np.maximum(x, F32(-127))
    floor = np.floor(x.astype(np.float64))
    rest = (x - floor).astype(F32)
    value = np.full_like(rest, np.uint32(0x3D9DF09D).view(F32))
    for coefficient in (0x3E6906A4, 0x3F31F519, 0x3F800000):
        value = fused(value, rest, np.uint32(coefficient).view(F32))
    return (value.view(np.int32) + (floor.astype(np.int32) << 23)).view(F32)


POWERS = {
    "ex2.approx": lambda x: units.unary("ex2", x.view(np.uint32), True).view(F32),
    "polynomial": polynomial,
    "exact": lambda x: np.asarray(exp2(x.view(np.uint32))).view(F32),
}


def inverse_of(weights: np.ndarray, division: str) -> np.ndarray:
    found = np.divide(F32(1), weights, out=np.zeros_like(weights), where=weights != 0)
    return np.where(weights != 0, units.unary("rcp", weights.view(np.uint32), True).view(F32), 0) if division == "rcp.approx" else found


def test_the_polynomial_of_flash_attention_4():
    rng = np.random.default_rng(5)
    x = np.concatenate([-rng.uniform(0, 130, 20000), rng.uniform(0, 9, 2000), -np.exp2(rng.uniform(-30, 6, 2000)), -np.arange(0.0, 130)])
    x = x.astype(F32)
    found = np.asarray(exp2_polynomial(x.view(np.uint32))).view(F32)
    assert np.array_equal(found.view(np.uint32), polynomial(x).view(np.uint32))
    normal = x > -126
    error = np.abs(found[normal].astype(np.float64) / np.exp2(x[normal].astype(np.float64)) - 1)
    assert 8e-5 < error.max() < 9e-5
    special = np.array([0x7FC00000, 0xFF800000, 0x80000001, 0x00000001, 0], np.uint32)
    assert np.asarray(exp2_polynomial(special)).tolist() == [0, 0, 0x3F800000, 0x3F800000, 0x3F800000]


def row_sums(start: np.ndarray, p: np.ndarray) -> np.ndarray:
    """[rows, 4]: lane t has the columns 8i + 2t and 8i + 2t + 1."""
    for column in range(p.shape[1]):
        start[:, column % 8 // 2] += p[:, column]
    return start


def e4m3_scale(x: np.ndarray) -> np.float32:
    """Of e4m3, whose largest value is 448."""
    return F32(np.abs(x).max()) / F32(448) if x.any() else F32(1)


class Loop:
    """One head's attention, block of queries by block of queries and block of keys by block of keys."""

    def __init__(self, flash: Flash, fp8: bool, scale: float, target: str = "sm_90a"):
        self.flash, self.fp8, self.scale, self.target = flash, fp8, F32(scale), target
        self.dtype = ml_dtypes.float8_e4m3fn if fp8 else ml_dtypes.bfloat16
        self.recipe = tcemu.get_recipe("fp8" if fp8 else "bf16", target)

    def rounded(self, x: np.ndarray, scale: np.float32) -> np.ndarray:
        return (x / scale).astype(self.dtype).astype(F32)

    def scores(self, q, k, scales, bias, seen) -> np.ndarray:
        given = {"scale_a": scales[0], "scale_b": scales[1]} if self.fp8 else {}
        found = np.asarray(tcemu.matmul(q, k.T, recipe=self.recipe, **given))
        found = found if bias is None else fused(found, self.scale, bias)
        return np.where(seen, found, -np.inf).astype(F32)

    def head(self, q, k, v, bias, seen, scales) -> np.ndarray:
        """scales: of (q, k, v), each a number or None, which is for each block by itself."""
        flash, rows, step = self.flash, len(q), self.flash.block_k
        missing = -len(k) % step
        k, v = (np.pad(x, [(0, missing), (0, 0)]) for x in (k, v))
        seen = np.pad(seen, [(0, 0), (0, missing)])
        bias = None if bias is None else np.pad(bias, [(0, 0), (0, missing)])
        parts = [slice(i, i + flash.block_q) for i in range(0, rows, flash.block_q)]
        return np.concatenate([self.queries(q[at], k, v, None if bias is None else bias[at], seen[at], scales) for at in parts])

    def queries(self, q, k, v, bias, seen, scales) -> np.ndarray:
        flash, step = self.flash, self.flash.block_k
        one = lambda given, x: (e4m3_scale(x) if given is None else given) if self.fp8 else F32(1)
        times = F32(float(self.scale if bias is None else F32(1)) * LOG2_E)
        offset = F32(np.log2(flash.p_scale))
        m, lanes = np.full((len(q), 1), -np.inf, F32), np.zeros((len(q), 4), F32)
        total, running, unit = np.zeros((len(q), v.shape[1]), F32), np.zeros((len(q), v.shape[1]), F32), F32(1)
        for number, j in enumerate(range(0, len(k), step)):
            of_bias = None if bias is None else bias[:, j : j + step]
            kj, vj = k[j : j + step], v[j : j + step]
            s = self.scores(q, kj, (one(scales[0], q), one(scales[1], kj)), of_bias, seen[:, j : j + step])
            old, m = m, np.maximum(m, s.max(axis=1, keepdims=True))
            safe = np.where(np.isinf(m), F32(0), m)
            p = POWERS[flash.exp2](fused(s, times, fused(safe, -times, offset)))
            decay = POWERS["exact" if flash.exp2 == "exact" else "ex2.approx"]((old - safe) * times)
            lanes = row_sums(lanes * decay, p)
            p, of_v = p.astype(self.dtype).astype(F32), one(scales[2], vj)
            if number == 0:
                unit = of_v
            change = decay * (unit / of_v)
            unit = of_v
            vj = self.rounded(vj, of_v)
            anew = flash.promote is not None and number % (flash.promote // step) == 0
            start = np.zeros_like(running) if anew else running * change
            running = np.asarray(tcemu.gemm(p, vj, start, op=FP8 if self.fp8 else BF16, target=self.target))
            total = total * decay
            last = number == len(k) // step - 1
            if flash.promote is not None and (last or (number + 1) % (flash.promote // step) == 0):
                total = total + (running * of_v if flash.scales == "block" else running)
        pairs = lanes[:, :2] + lanes[:, 2:]
        weights = pairs[:, :1] + pairs[:, 1:]
        inverse = inverse_of(weights, flash.division)
        if flash.division == "div.full":
            final = (total if flash.promote is not None else running) * (
                F32(1) if flash.promote is not None and flash.scales == "block" else unit
            )
            quotient = units.divide("div.full", final.view(np.uint32), np.broadcast_to(weights, final.shape).view(np.uint32), False)
            return np.where(weights != 0, quotient.view(F32), F32(0))
        if flash.promote is None:
            return running * (inverse * unit)
        return total * (inverse if flash.scales == "block" else inverse * unit)


def loop(q, k, v, bias, seen, flash: Flash, fp8: bool) -> np.ndarray:
    """[B, T, N, H] by `Loop`. bias, seen: [B, N, T, S]."""
    batch, _, heads, width = q.shape
    groups = heads // k.shape[2]
    out, one = np.zeros(q.shape, F32), Loop(flash, fp8, 1 / np.sqrt(width))
    for b in range(batch):
        for n in range(heads):
            key_head = n // groups
            share = {"tensor": (q, k, v), "block": None}.get(
                flash.scales, (q[b, :, key_head * groups : (key_head + 1) * groups], k[b, :, key_head], v[b, :, key_head])
            )
            scales = (None,) * 3 if share is None else tuple(map(e4m3_scale, share))
            of_bias = None if bias is None else bias[b, n]
            out[b, :, n] = one.head(q[b, :, n], k[b, :, key_head], v[b, :, key_head], of_bias, seen[b, n], scales)
    return out


CASES = {  # name -> fp8, the value, what is masked
    "bf16": (False, Flash(block_k=32), "all"),
    "bf16, causal": (False, Flash(16, 64), "causal"),
    "fp8, one scale": (True, Flash(block_k=32), None),
    "fp8, a scale a block": (True, Flash(16, 32, p_scale=256, scales="block"), "mask"),
    "fp8, two levels": (True, Flash(16, 32, scales="head", promote=64), "bias"),
    "fp8, two levels, a scale a block": (True, Flash(16, 32, scales="block", promote=64), "window"),
    "fp8, each block apart": (True, Flash(16, 32, scales="block", promote=32), "window"),
    "fp8, P by 448": (True, Flash(8, 64, p_scale=448, promote=64), "lengths"),
    "bf16, polynomial": (False, Flash(block_k=32, exp2="polynomial"), "causal"),
    "bf16, exact": (False, Flash(block_k=32, exp2="exact", division="rn"), "bias"),
    "bf16, divided": (False, Flash(block_k=32, division="div.full"), "mask"),
    "fp8, divided": (True, Flash(16, 32, division="div.full", promote=64), "all"),
}


def hidden(what: str | None, shape: tuple[int, ...]) -> tuple[dict, np.ndarray | None, np.ndarray]:
    """(arguments, bias, which query sees which key) of a case; shape: [B, N, T, S]."""
    rng = np.random.default_rng(7)
    query, key = np.arange(shape[2])[:, None], np.arange(shape[3])
    bias = rng.normal(size=(shape[1], 1, shape[3])).astype(F32) if what in ("bias", "all") else None
    mask = (rng.random((shape[0], 1, *shape[2:])) < 0.5) & (query != 3)  # query 3 sees nothing
    lengths = np.array([9, 41])[: shape[0]]
    seen = {
        None: True, "bias": True, "causal": key <= query, "mask": mask, "window": (query <= key + 9) & (query >= key - 4),
        "lengths": key < lengths[:, None, None, None], "all": mask & (key <= query),
    }[what]  # fmt: skip
    arguments = {
        None: {}, "bias": {"bias": bias}, "causal": {"is_causal": True}, "mask": {"mask": mask}, "window": {"local_window_size": (9, 4)},
        "lengths": {"key_value_seq_lengths": lengths}, "all": {"bias": bias, "mask": mask, "is_causal": True},
    }[what]  # fmt: skip
    return arguments, None if bias is None else np.broadcast_to(bias, shape), np.broadcast_to(seen, shape)


@pytest.mark.parametrize("name", sample_cases(CASES, ("fp8, a scale a block",)))
def test_every_bit_is_that_of_a_loop_over_blocks(name):
    fp8, flash, what = CASES[name]
    q, k, v = operands(1, 2, 21, 75, 4, 2, 32)
    arguments, bias, seen = hidden(what, (2, 4, 21, 75))
    out = np.asarray(tcemu.attention(q, k, v, recipe="fp8 on H100" if fp8 else "bf16 on H100", flash=flash, **arguments))
    expected = loop(q, k, v, bias, seen, flash, fp8)
    assert np.count_nonzero(out.view(np.uint32) != expected.view(np.uint32)) == 0
    assert np.array_equal(out[:, 3] == 0, np.full(out[:, 3].shape, what in ("mask", "all")))


@pytest.mark.full
def test_it_is_near_that_of_jax():
    """Within what rounding Q, K, P and V to bf16 can do: u = 2^-8 each. A score moves by at most (2u + u²)·sum|q||k| / sqrt(H), and what
    its additions more than 2^-20 of that; a weight by a factor of exp(2·that) and its own rounding; V by 1 + u."""
    q, k, v = operands(1, 2, 21, 75, 4, 2, 32)
    arguments, bias, seen = hidden("all", (2, 4, 21, 75))
    call = functools.partial(tcemu.attention, recipe="bf16 on H100", flash=Flash(block_k=32))
    out, residual = map(np.asarray, jax.jit(functools.partial(call, return_residual=True, **arguments))(q, k, v))
    arguments["bias"] = arguments["bias"][None]
    near, of_jax = jax.jit(functools.partial(jax.nn.dot_product_attention, return_residual=True, **arguments))(q, k, v)
    rows = seen.any(-1).all((0, 1))  # where every head sees a key: JAX has the mean of V elsewhere
    q, k, v = (x.astype(np.float64) for x in (q, np.repeat(k, 2, axis=2), np.repeat(v, 2, axis=2)))
    scores = np.where(seen, np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(32) + bias, -np.inf)[:, :, rows]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    exact = np.einsum("bnts,bsnh->btnh", weights, v)
    u = 2.0**-8
    moved = (2 * u + u * u + 2.0**-20) * np.einsum("btnh,bsnh->bnts", np.abs(q), np.abs(k))[:, :, rows] / np.sqrt(32)
    moved = np.where(weights > 0, moved, 0).max(-1).transpose(0, 2, 1)  # [B, T, N]
    bound = (np.exp(2 * moved) * (1 + u) ** 2 * (1 + 2.0**-18) - 1)[..., None] * np.einsum("bnts,bsnh->btnh", weights, np.abs(v))
    error = np.abs(out[:, rows] - exact)
    assert rows.sum() > 10 and np.allclose(near[:, rows], exact, atol=1e-4)
    assert (error <= bound).all() and error.max() > 2.0**-10
    assert (np.abs(residual - np.asarray(of_jax))[:, rows] <= moved + 1e-5).all() and (residual[:, 3] == -np.inf).all()
