"""Claims about blocks that share a scale: how it is rounded, stochastic rounding, and Hadamard transforms."""

from collections.abc import Mapping
from functools import partial

import jax
import numpy as np
from jax import Array

from tcemu.engine.formats.float_arrays import to_float
from tcemu.operations.quantize.block_formats import BLOCK_FORMATS, BlockQuantized, block_dequantize, block_quantize
from tcemu.uses.study.accuracy import normwise
from tcemu.uses.study.claims.claim_types import Claim, Quantity

# ---- the rounding of E8M0 scales

MXFP8 = BLOCK_FORMATS["mxfp8_e4m3"]
LARGEST = 448.0  # of e4m3
RULES = {"floor": "rounded down (OCP)", "rceil": "rounded up"}
SCALE_QUANTITIES = ("blocks that saturate", "elements that saturate", "normwise error", "relative error of a block's largest")


def measure_scale_rounding(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the loss of normal numbers under each rule for scales."""
    x = np.random.default_rng(seed).standard_normal((256 if quick else 2048, 1024), np.float32)
    blocks = np.abs(x.reshape(len(x), -1, MXFP8.block))
    first, results = np.argmax(blocks, axis=-1)[..., None], {}
    for rule, words in RULES.items():
        scales, values = _quantize_mxfp8(rule, x)
        beyond = blocks > LARGEST * np.asarray(scales)[..., None]
        errors = np.abs(np.asarray(values) - x).reshape(blocks.shape)
        largest = np.take_along_axis(errors, first, -1) / np.take_along_axis(blocks, first, -1)
        figures = (beyond.any(-1).mean(), beyond.mean(), normwise(np.asarray(values, np.float64), x.astype(np.float64)), largest.mean())
        results |= {f"{words}: {name}": float(figure) for name, figure in zip(SCALE_QUANTITIES, figures, strict=True)}
    return results


@partial(jax.jit, static_argnums=0)
def _quantize_mxfp8(rule: str, x: Array) -> tuple[Array, Array]:
    """Return the scales and the values of x in mxfp8, float32."""
    q = block_quantize(x, MXFP8, rule=rule)
    return to_float(q.format.scale, q.scales), block_dequantize(q)


# ---- NVFP4

DRAWS = 64  # of stochastic rounding
HADAMARD = 16  # elements that are transformed together
NVFP4_QUANTITIES = (
    "to nearest", "stochastic", f"the mean of {DRAWS} stochastic", "to nearest, after a Hadamard transform",
    "outliers, to nearest", "outliers, to nearest, after a Hadamard transform",
)  # fmt: skip


def measure_nvfp4_rounding(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure normwise errors of NVFP4 roundings, of normal numbers without and with outliers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((64 if quick else 512, 1024)).astype(np.float32)
    outliers = (x + 10 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.01)).astype(np.float32)
    turn = random_hadamard(rng)
    draws = np.stack([np.asarray(_round_to_nvfp4("SR", x, jax.random.key(seed * DRAWS + i))) for i in range(DRAWS)]).astype(np.float64)
    off = lambda values, exact: normwise(np.asarray(values, np.float64), exact.astype(np.float64))
    nearest = lambda values: np.asarray(_round_to_nvfp4("RN", values, None))
    turned = [(y.reshape(len(y), -1, HADAMARD) @ turn).astype(np.float32).reshape(y.shape) for y in (x, outliers)]
    figures = (
        off(nearest(x), x), float(np.mean([off(one, x) for one in draws])), off(draws.mean(0), x), off(nearest(turned[0]), turned[0]),
        off(nearest(outliers), outliers), off(nearest(turned[1]), turned[1]),
    )  # fmt: skip
    return dict(zip(NVFP4_QUANTITIES, figures, strict=True))


def random_hadamard(rng: np.random.Generator) -> np.ndarray:
    """Return the orthogonal Hadamard matrix of HADAMARD rows (Sylvester) with random signs of its rows, float64."""
    matrix = np.ones((1, 1))
    while len(matrix) < HADAMARD:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return rng.choice([-1.0, 1.0], (HADAMARD, 1)) * matrix / np.sqrt(HADAMARD)


@partial(jax.jit, static_argnums=0)
def _round_to_nvfp4(rounding: str, x: Array, key: Array | None) -> Array:
    q: BlockQuantized = block_quantize(x, "nvfp4", rounding=rounding, key=key)
    return block_dequantize(q)


CLAIMS = (
    Claim(
        name="mxfp8-scale-rounding",
        title="the power-of-two scales of MXFP8 should be rounded up, not down as OCP MX does",
        citation="Mishra, Stosic and Layton, Recipes for Pre-training LLMs with MXFP8, 2025",
        link="https://arxiv.org/abs/2506.08027",
        setting="N(0,1) in blocks of 32, e4m3 elements with an E8M0 scale: how many blocks, and elements, lie beyond the largest element "
        "at their scale; the normwise error; the mean relative error of the largest element of each block.",
        reduced="256 x 1,024 numbers instead of 2,048 x 1,024.",
        differs="The paper shows that models train worse with scales rounded down; that needs training. What single numbers show is the "
        "cause: rounding down clamps the largest elements of a sixth of all blocks.",
        quantities=tuple(Quantity(f"{words}: {name}") for words in RULES.values() for name in SCALE_QUANTITIES),
        measure=measure_scale_rounding,
        y_label="share or error",
    ),
    Claim(
        name="nvfp4-rounding",
        title="NVFP4 needs stochastic rounding for gradients alone, Hadamard transforms for weight gradients alone",
        citation="NVIDIA, Pretraining Large Language Models with NVFP4, 2025, section 4",
        link="https://arxiv.org/abs/2509.25149",
        setting="512 x 1,024 numbers of N(0,1) in blocks of 16 (e2m1, ue4m3 scales, one scale for the tensor): the normwise error of "
        "rounding. Outliers: 1% of the numbers have another N(0, 10^2) added. Hadamard: 16 neighbours at a time, random signs; its errors "
        "are of the transformed numbers, which an orthogonal transform leaves as large.",
        reduced="64 x 1,024 numbers.",
        differs="The paper's numbers are losses of a model of 12 billion parameters. What single roundings show: stochastic rounding costs "
        "about 1.4 times the error, and its mean is unbiased, but for elements that a block's scale, itself rounded, leaves out of range. "
        "The Hadamard transform gains nothing in this norm, neither on normal numbers nor on outliers as sparse as these; its use must lie "
        "elsewhere, in training.",
        quantities=tuple(Quantity(name) for name in NVFP4_QUANTITIES),
        measure=measure_nvfp4_rounding,
        y_label="normwise error",
    ),
)
