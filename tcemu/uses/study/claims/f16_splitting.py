"""Claims about f32 products that are made of several f16 products."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array, jit, lax

from tcemu.engine.arithmetic.fma import fma
from tcemu.engine.formats.float_arrays import round_float
from tcemu.engine.formats.number_formats import F16, F32
from tcemu.operations.products.matmul import matmul
from tcemu.operations.products.recipes import Recipe, get_recipe
from tcemu.uses.study.accuracy import normwise
from tcemu.uses.study.claims.claim_types import Claim, Quantity

CHAINED = get_recipe("f16", "sm_80")
PROMOTED = CHAINED.replace(promote=1)
SHIFT = np.float32(2.0**11)  # factor of the lower part, so that it is no subnormal of f16
LENGTHS = (256, 4096, 65536)
SIZE = 16  # rows and columns of the product
WAYS = {
    "plain f16": "plain f16, chained",
    "chained": "corrected, sums in the tensor core",
    "outside": "corrected, sums outside",
    "fma": "f32, multiply-add in order",
}


def split_in_two(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split float32 into two f16 values as float32 arrays: the rounded value, and 2^11 times the rest."""
    high = np.asarray(round_float(F16, x))
    return high, np.asarray(round_float(F16, (x - high) * SHIFT))


def corrected_product(a: np.ndarray, b: np.ndarray, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Return A·B by three f16 products, and the first of them alone.

    The two small products are added in f32 and scaled back, rounded to nearest.
    """
    (high_a, low_a), (high_b, low_b) = split_in_two(a), split_in_two(b)
    main, *small = np.asarray(matmul(np.stack([high_a, low_a, high_a]), np.stack([high_b, high_b, low_b]), recipe=recipe))
    return main + (small[0] + small[1]) / SHIFT, main


@jit
def fma_product(a: Array, b: Array) -> Array:
    """Return codes of A·B in f32, one fused multiply-add after the other along K. a: [M, K]; b: [K, N], float32."""
    columns, rows = (lax.bitcast_convert_type(x, jnp.uint32) for x in (a.T, b))

    def add_product(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        x, y = jnp.broadcast_arrays(pair[0][:, None], pair[1][None, :])
        return fma(x, y, total, F32), None

    return lax.scan(add_product, jnp.zeros((a.shape[0], b.shape[1]), jnp.uint32), (columns, rows))[0]


def measure_error_correction(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the normwise error of each way to multiply, by length."""
    results = {}
    for k in LENGTHS[1:2] if quick else LENGTHS:
        rng = np.random.default_rng(seed)
        a, b = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((SIZE, k), (k, SIZE)))
        exact = a.astype(np.float64) @ b.astype(np.float64)
        chained, plain = corrected_product(a, b, CHAINED)
        values = {"plain f16": plain, "chained": chained, "outside": corrected_product(a, b, PROMOTED)[0]}
        values["fma"] = np.asarray(fma_product(a, b)).view(np.float32)
        results |= {f"{WAYS[way]}, K = {k}": normwise(value.astype(np.float64), exact) for way, value in values.items()}
    return results


CLAIMS = (
    Claim(
        name="error-corrected-sgemm",
        title="rounding inside tensor cores, not the split, spoils f32 products that are made of f16 products",
        citation="Ootomo and Yokota, Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak "
        "performance, IJHPCA 2022",
        link="https://arxiv.org/abs/2203.03341",
        setting="(16 x K) · (K x 16), uniform from -1 to 1, f32 = f16 + f16 / 2^11, three f16 products on sm_80: the normwise error from "
        "the exact product of the f32 operands. Sums outside: every instruction starts from zero, and what it gives is added in f32. The "
        "two small products have accumulators of their own.",
        reduced="K = 4,096 alone.",
        differs="The paper shows curves, and no numbers to compare with: chained and corrected, the error grows with K; with sums outside "
        "it is that of f32. So it is here. For long sums it is below plain f32's, since an instruction sums 16 products almost without "
        "loss.",
        quantities=tuple(
            Quantity(f"{words}, K = {k}", None, "", words, k, "" if way == "fma" else CHAINED.target)
            for k in LENGTHS
            for way, words in WAYS.items()
        ),
        measure=measure_error_correction,
        x_label="K",
        y_label="normwise error",
    ),
)
