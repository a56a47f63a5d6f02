"""Errors of attention: FlashAttention 3's table, and the bias of a bf16 output."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from tcemu.engine.formats.number_formats import BF16
from tcemu.operations.products.attention.dot_product_attention import attention
from tcemu.operations.products.attention.flash_blocks import Flash
from tcemu.operations.products.matmul import matmul
from tcemu.operations.products.recipes import Recipe, get_recipe
from tcemu.uses.study.accuracy import ulp
from tcemu.uses.study.claims.claim_types import Claim, Quantity

WIDTH = 128


class AttentionSetting(NamedTuple):
    """One column of the table: how attention is computed, and the paper's RMSE."""

    recipe: Recipe
    flash: Flash | None
    published: float


F16, FP8, BF16_RECIPE = (get_recipe(name, "sm_90a") for name in ("f16", "fp8", "bf16"))
BLOCK_SCALES = Flash(scales="block", hadamard=True)
ATTENTION_SETTINGS = {
    "standard f16": AttentionSetting(F16.replace(dtype="f16"), None, 3.2e-4),
    "FlashAttention, f16": AttentionSetting(F16, Flash(), 1.9e-4),
    "FP8 baseline": AttentionSetting(FP8.replace(dtype="f16"), None, 2.4e-2),
    "FlashAttention 3, FP8": AttentionSetting(FP8, BLOCK_SCALES, 9.1e-3),
    "without scales of blocks": AttentionSetting(FP8, BLOCK_SCALES.replace(scales="tensor"), 9.3e-3),
    "without Hadamard": AttentionSetting(FP8, BLOCK_SCALES.replace(hadamard=False), 2.4e-2),
}


def measure_flash_attention_3(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the root mean square error of each column on operands with outliers."""
    queries, keys = (64, 512) if quick else (512, 4096)
    rng = np.random.default_rng(seed)
    q, k, v = (_draw_with_outliers(rng, rows) for rows in (queries, keys, keys))
    scores = (q.astype(np.float64) @ k.astype(np.float64).T) / np.sqrt(WIDTH)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    exact = p @ v.astype(np.float64) / p.sum(-1, keepdims=True)
    results = {}
    for name in ("FlashAttention 3, FP8",) if quick else ATTENTION_SETTINGS:
        column = ATTENTION_SETTINGS[name]
        key = jax.random.key(seed) if column.flash is not None and column.flash.hadamard else None
        out = attention(q[:, None], k[:, None], v[:, None], recipe=column.recipe, flash=column.flash, dtype=np.float16, random_key=key)
        results[name] = float(np.sqrt(np.mean((np.asarray(out)[:, 0].astype(np.float64) - exact) ** 2)))
    return results


def _draw_with_outliers(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Draw N(0,1) + N(0,100) · Bernoulli(0.001), float32 [rows, WIDTH]."""
    shape = rows, WIDTH
    return rng.standard_normal(shape, np.float32) + 10 * rng.standard_normal(shape, np.float32) * (rng.random(shape) < 0.001)


# ---- bias

KEYS, TAIL = 64, 2.0**-18  # the weight of each key of the tail, far below half a last bit of the sum together
TAIL_SIGNS = {"a tail of the same sign": 1, "no tail": 0, "a tail of the other sign": -1}


def measure_repeated_maximum(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the mean signed error, in last bits of bf16, of P·V where P has two ones."""
    columns = 8192 if quick else 65536
    rng = np.random.default_rng(seed)
    v = _round_to_bf16(-np.abs(rng.standard_normal((KEYS, columns), np.float32)))  # V < 0
    by = BF16_RECIPE.replace(dtype="bf16")
    results = {}
    for name, sign in TAIL_SIGNS.items():
        results[name] = _mean_error(np.array([1, 1, *[TAIL] * (KEYS - 2)], np.float32), v, sign, by)
    below = _round_to_bf16(np.exp(np.array([-1, -1, *[np.log(TAIL) - 1] * (KEYS - 2)], np.float32)))  # all of P is less than 1
    results["a tail of the same sign, the maximum moved"] = _mean_error(below, v, 1, by)
    return results


def _mean_error(p: np.ndarray, v: np.ndarray, sign: int, by: Recipe) -> float:
    v = np.concatenate([v[:2], sign * np.abs(v[2:]) * -1])
    out = np.asarray(matmul(p[None], v, recipe=by))[0].astype(np.float64)
    exact = p.astype(np.float64) @ v.astype(np.float64)
    return float(np.mean((out - exact) / ulp(exact, BF16)))


def _round_to_bf16(x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.numpy.asarray(x).astype("bfloat16").astype("float32"))


CLAIMS = (
    Claim(
        name="flash-attention-3",
        title="FP8 attention with scales of blocks and a Hadamard rotation has 2.6 times less error than a scale for each tensor",
        citation="Shah et al., FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision, 2024, section 4.3 "
        "and table 3",
        link="https://arxiv.org/abs/2407.08608",
        setting="Q, K and V of N(0,1) + N(0,100) · Bernoulli(0.001), in f32, one head of 128, 4,096 keys, 512 queries, on sm_90a:"
        " the root mean square error of the output, in f16, from float64's. Each way rounds Q, K and V itself. The "
        "standard form and the FP8 baseline have whole rows of scores and P in f16 (the baseline rounds Q, K, P and V "
        "with a scale for each tensor); the others have blocks of 128 by 128.",
        reduced="512 keys, 64 queries, FlashAttention 3 alone.",
        differs="The paper states neither its lengths nor its head size; 4,096 and 128 lie in the middle of those that it "
        "measures times of, and the errors depend on them. It does not say either whether its reference has the operands "
        "before or after f16 rounds them; here it is before. Where Q and K are not rotated, errors also depend on the few"
        " outliers of both that meet, and spread over seeds. The paper says little of its FP8 baseline; here scores are "
        "rounded to f16, and P is divided by its sum before its cast. The special function unit's 2^x and reciprocal, in the "
        "place of exact ones, move the error of a seed by at most 6e-4 of itself in the standard form, 9e-5 in blocks of f16, and "
        "2e-6 in FP8.",
        quantities=tuple(Quantity(name, column.published, target=column.recipe.target) for name, column in ATTENTION_SETTINGS.items()),
        measure=measure_flash_attention_3,
        x_label="",
        y_label="root mean square error",
    ),
    Claim(
        name="biased-attention",
        title="a bf16 P·V is biased where the row's maximum repeats, so that two weights are 1, and V has one sign",
        citation="Why Low-Precision Transformer Training Fails: An Analysis on Flash Attention, ICLR 2026",
        link="https://arxiv.org/abs/2510.04212",
        setting="P·V by wgmma on sm_90a in bf16 and f32, rounded to bf16: P = 1 twice and 62 weights of 2^-18, V = -|N(0,1)| in "
        "bf16, 65,536 columns: the mean of (result - exact) in last bits of bf16.",
        reduced="8,192 columns.",
        differs="The paper shows the loss of a GPT-2 run explode and gives no mean error of a sum. The sum of two bf16 numbers is"
        " often a tie; the tail decides where it goes. How often, depends on how near in size the two are. Without a tail"
        " ties go to even, without bias; where the maximum is moved, so that no weight is 1, ties are rare.",
        quantities=tuple(Quantity(name) for name in (*TAIL_SIGNS, "a tail of the same sign, the maximum moved")),
        measure=measure_repeated_maximum,
        target=BF16_RECIPE.target,
        y_label="mean error in last bits",
    ),
)
