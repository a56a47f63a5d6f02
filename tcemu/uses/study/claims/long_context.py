"""Long sums of P·V in FP8 on Hopper: alone, and through attention."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from tcemu.engine.architectures.lookup import require_product
from tcemu.engine.formats.float_arrays import round_float
from tcemu.engine.formats.number_formats import E4M3
from tcemu.engine.isa.grammar import parse
from tcemu.operations.products.attention.dot_product_attention import attention
from tcemu.operations.products.attention.flash_blocks import Flash
from tcemu.operations.products.matmul import matmul
from tcemu.operations.products.recipes import Recipe, get_recipe
from tcemu.uses.study.accuracy import normwise
from tcemu.uses.study.claims.claim_types import Claim, Quantity
from tcemu.uses.study.sweeps import OperandPair, sweep

HOPPER = "sm_90a"
WGMMA = Recipe(require_product(parse("e4m3 wgmma")), HOPPER, name="e4m3 wgmma")
KEYS = (4096, 32768, 131072)
MEANS = {"mean 0.5": 0.5, "mean 0": 0.0}  # of V, whose deviation is 1
PROMOTIONS = {"chained": None, "every 8192 keys": 256, "every 512 keys": 16, "every 128 keys": 4}  # instructions, of 32 keys each
P_SCALE = 256
ATTENTION_RECIPES = {  # the recipe, and when its accumulator is added to an f32 sum
    "bf16": ("bf16", None),
    "FP8, chained": ("fp8", None),
    "FP8, every 8192 keys": ("fp8", 8192),
    "FP8, every 128 keys": ("fp8", 128),
}


def _sizes(quick: bool) -> tuple[int, int]:
    """Return the numbers of queries and of columns of V."""
    return (8, 16) if quick else (32, 64)


def _draw_operands(seed: int, keys: int, quick: bool, mean: float) -> OperandPair:
    """Draw P with maximum 1, times P_SCALE, and V: f32 [queries, keys] and [keys, columns]."""
    (queries, columns), rng = _sizes(quick), np.random.default_rng(seed)
    scores = rng.standard_normal((queries, keys), np.float32)
    p = np.exp(scores - scores.max(-1, keepdims=True)) * np.float32(P_SCALE)
    return p, rng.standard_normal((keys, columns), np.float32) + np.float32(mean)


def measure_product(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the normwise error of P·V."""
    results = {}
    for name in ("mean 0.5",) if quick else MEANS:
        for keys in KEYS[1:2] if quick else KEYS:
            operands = _draw_operands(seed, keys, quick, MEANS[name])
            errors = sweep(matmul, {"promote": tuple(PROMOTIONS.values())}, recipe=WGMMA, operands=operands, measures="normwise")
            results |= {f"V of {name}, {keys} keys, {how}": errors.column("normwise", promote=n)[0] for how, n in PROMOTIONS.items()}
    return results


def measure_attention(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the normwise error of attention's output from the float64 output of the same Q, K and V."""
    (queries, columns), results = _sizes(quick), {}
    for keys in KEYS[:1] if quick else KEYS:
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((queries, 1, 64), (keys, 1, 64), (keys, 1, columns)))
        v += np.float32(MEANS["mean 0.5"])
        scores = q[:, 0].astype(np.float64) @ k[:, 0].T.astype(np.float64) / 8
        p = np.exp(scores - scores.max(-1, keepdims=True))
        exact = p @ v[:, 0].astype(np.float64) / p.sum(-1, keepdims=True)
        for name in ("FP8, chained", "FP8, every 128 keys") if quick else ATTENTION_RECIPES:
            by, promote = ATTENTION_RECIPES[name]
            flash = Flash(p_scale=P_SCALE if by == "fp8" else 1, promote=promote)
            out = attention(q, k, v, recipe=get_recipe(by, HOPPER), flash=flash)
            results[f"{keys} keys, {name}"] = normwise(np.asarray(out)[:, 0].astype(np.float64), exact)
    return results


# ---- P after a sink

HEIGHTS = (4, 5, 6, 7, 8)  # of the sinks' scores over those of other keys, which are N(0,1)
SINKS = 4
P_SCALES = (1, 256)
SCALE_RATIO, ORDER_RATIO = "mean squared error, S = 1 over S = 256", "mean squared error, sinks first over last"
SINK_VALUES = ("V as elsewhere", "V of 0")  # of the sinks


def measure_underflow(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the share of P that e4m3 rounds to 0, and the errors of attention's output."""
    queries, keys, results = 32 if quick else 128, 1024, {}
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((queries, keys), np.float32)
    v = rng.standard_normal((keys, 64), np.float32)
    is_sink = np.arange(keys) < SINKS
    values = dict(zip(SINK_VALUES, (v, np.where(is_sink[:, None], np.float32(0), v)), strict=True))
    for height in HEIGHTS:
        raised = scores + np.where(is_sink, np.float32(height), np.float32(0))
        p = np.exp(raised - raised.max(-1, keepdims=True))
        for scale in P_SCALES:
            zeros = np.asarray(round_float(E4M3, jnp.asarray(p * np.float32(scale)))) == 0
            results[f"P rounded to 0, S = {scale}, sinks at {height}"] = float(zeros.mean())
        for name, v in () if quick else values.items():
            first = _squared_error(raised, v, 1)
            results[f"{SCALE_RATIO}, {name}, sinks at {height}"] = first / _squared_error(raised, v, 256)
            results[f"{ORDER_RATIO}, {name}, sinks at {height}"] = first / _squared_error(raised[:, ::-1], v[::-1], 1)
    return results


def _squared_error(scores: np.ndarray, v: np.ndarray, p_scale: int) -> float:
    """Return the mean squared error of attention with these scores, given as a bias to products that are 0."""
    p = np.exp(scores.astype(np.float64) - scores.max(-1, keepdims=True))
    exact = p @ v.astype(np.float64) / p.sum(-1, keepdims=True)
    zeros = np.zeros((len(v), 1, 32), np.float32)
    flash = Flash(block_k=64, p_scale=p_scale, promote=64)
    out = attention(zeros[: len(scores)], zeros, v[:, None], scores, recipe=get_recipe("fp8", HOPPER), flash=flash)
    return float(np.mean((np.asarray(out)[:, 0] - exact) ** 2))


VLLM = "vLLM, The State of FP8 KV-Cache and Attention Quantization, April 2026; pull requests 104 and 122 of its flash-attention"
VLLM_LINK = "https://vllm.ai/blog/2026-04-22-fp8-kvcache https://github.com/vllm-project/flash-attention/pull/104"
ACCURACY = (
    "The source measures a task (Llama-3.1-8B, needles in 128k tokens: bf16 0.91, FP8 0.13, two-level sums 0.89), which needs the model. "
)

CLAIMS = (
    Claim(
        name="long-context-pv",
        title="P·V in FP8 breaks down on Hopper over long contexts, and two-level sums mend it",
        citation=VLLM,
        link=VLLM_LINK,
        setting="P·V alone: softmax weights of N(0,1) scores, times 256, and V of deviation 1, both e4m3, 32 queries and 64 "
        "columns, by wgmma on sm_90a: the normwise error from the exact product of what was rounded. The accumulator is "
        "chained over all keys, or added to an f32 sum after so many.",
        reduced="8 queries, 16 columns, 32,768 keys, V of mean 0.5.",
        differs=ACCURACY
        + "Here is what its sums lose: a number, not an accuracy. Where V has a mean, the sum grows with the keys, and what is "
        "cut of each step is lost in one direction; promotion every 128 keys, as its two-level sums have it, leaves what f32 leaves.",
        quantities=tuple(
            Quantity(f"V of {mean}, {keys} keys, {how}", series=f"V of {mean}, {how}", x=keys)
            for mean in MEANS
            for keys in KEYS
            for how in PROMOTIONS
        ),
        measure=measure_product,
        target=HOPPER,
        x_label="keys",
        y_label="normwise error of P·V",
    ),
    Claim(
        name="long-context-attention",
        title="FP8 attention breaks down on Hopper over long contexts, and two-level sums mend it",
        citation=VLLM,
        link=VLLM_LINK,
        setting="One head of 64, 32 queries, Q and K N(0,1), V N(0.5,1), through tcemu.attention on sm_90a: blocks of 128 keys, "
        "online softmax, FP8 with a scale for each tensor and P times 256: the normwise error of the output from "
        "float64's.",
        reduced="8 queries, 16 columns of V, 4,096 keys, FP8 chained and promoted every 128 keys.",
        differs=ACCURACY
        + "Here is the error of one head's output, quantisation of Q, K, P and V included: with two-level sums it is what that "
        "quantisation leaves.",
        quantities=tuple(Quantity(f"{keys} keys, {name}", series=name, x=keys) for keys in KEYS for name in ATTENTION_RECIPES),
        measure=measure_attention,
        target=HOPPER,
        x_label="keys",
        y_label="normwise error of the output",
    ),
    Claim(
        name="attention-sink-underflow",
        title="after an attention sink most of P rounds to 0 in e4m3, unless P is scaled or the sinks come last",
        citation="arXiv 2606.06521, 2026",
        link="https://arxiv.org/abs/2606.06521",
        setting="1,024 keys with N(0,1) scores, the first 4 raised to be sinks, 128 queries, V N(0,1): the share of S·exp(score -"
        " largest) that e4m3 rounds to 0; and the mean squared error of attention by FP8 wgmma on sm_90a in blocks of 64 "
        "keys, S = 1 over S = 256, and over the same keys in the other order.",
        reduced="32 queries, what is rounded to 0 alone.",
        differs="The source reports a mean squared error 3 to 10 times lower with S = 256 or in the other order, on heads of its "
        "models; how high their sinks are, and how large V is there, differs from head to head. Here both are set. Where "
        "the sinks' V is as any other, they make up most of the output, and rounding V hides what is lost of P. Where it "
        "is 0, as sinks are often said to have it, all of the output comes from what e4m3 loses. In the other order only "
        "the last block sees the sinks.",
        quantities=tuple(
            Quantity(f"{what}, sinks at {height}", series=what, x=height, target=target)
            for what, target in (
                *((f"P rounded to 0, S = {scale}", "") for scale in P_SCALES),
                *((f"{what}, {name}", HOPPER) for what in (SCALE_RATIO, ORDER_RATIO) for name in SINK_VALUES),
            )
            for height in HEIGHTS
        ),
        measure=measure_underflow,
        x_label="height of the sinks",
        y_label="share, or ratio",
    ),
)
