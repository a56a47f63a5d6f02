"""Claims about f32 and f64 products that are made of narrower products."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array, jit, lax
from jax.typing import ArrayLike

from tcemu.engine.arithmetic.fma import fma
from tcemu.engine.formats.float_arrays import round_float
from tcemu.engine.formats.number_formats import F16, F32
from tcemu.operations.products.matmul import matmul
from tcemu.operations.products.ozaki import OzakiRecipe, get_ozaki_recipe, ozaki_matmul
from tcemu.operations.products.recipes import Recipe, get_recipe
from tcemu.operations.products.wide import get_wide_recipe
from tcemu.uses.study.accuracy import normwise
from tcemu.uses.study.claims.claim_types import Claim, Quantity

CHAINED = get_recipe("f16", "sm_80")
PROMOTED = CHAINED.replace(promote=1)
SHIFT = np.float32(2.0**11)  # factor of the lower part, so that it is no subnormal of f16
LENGTHS = (256, 4096, 65536)
SPLIT_SIZE = 16  # rows and columns of the product
SPLIT_WAYS = {
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
        a, b = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((SPLIT_SIZE, k), (k, SPLIT_SIZE)))
        exact = a.astype(np.float64) @ b.astype(np.float64)
        chained, plain = corrected_product(a, b, CHAINED)
        values = {"plain f16": plain, "chained": chained, "outside": corrected_product(a, b, PROMOTED)[0]}
        values["fma"] = np.asarray(fma_product(a, b)).view(np.float32)
        results |= {f"{SPLIT_WAYS[way]}, K = {k}": normwise(value.astype(np.float64), exact) for way, value in values.items()}
    return results


# ---- three narrow formats, and Ozaki's schemes

SIZE, DEPTH = 8, 512  # rows and columns; elements along K
LONG = 4096  # elements along K of the FP8 slices, whose sums then leave 14 bits
WIDE = {
    "BF16x9, scaled parts": "cutlass_bf16x9",
    "BF16x9, plain parts": "xla_bf16x9",
    "3xTF32": "cutlass_3xtf32",
    "FP16x2, corrected": "ootomo_fp16x2",
}
NATIVE = "f32, multiply-add in order"
POWERS = (0, -20, -60, -100, -110, -120)  # of two, by which A is multiplied
SLICES = (4, 5, 6, 7, 8, 9)
BINADES = (0, 10, 20, 40)
HOPPER_FP8 = "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"


def componentwise(product: ArrayLike, a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest error of an element over |A|·|B|. float64 operands are multiplied in NumPy's longest format."""
    wide, d = np.longdouble, np.asarray(product)
    exact, size = a.astype(wide) @ b.astype(wide), abs(a).astype(wide) @ abs(b).astype(wide)
    return float(np.max(abs(d.astype(wide) - exact) / size))


def measure_range(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the largest error of each recipe where A is multiplied by a power of two."""
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((SIZE, DEPTH), (DEPTH, SIZE)))
    results = {}
    for power in POWERS[::5] if quick else POWERS:
        scaled = (a.astype(np.float64) * 2.0**power).astype(np.float32)
        for words, name in WIDE.items():
            results[f"{words}, A · 2^{power}"] = componentwise(matmul(scaled, b, recipe=get_wide_recipe(name)), scaled, b)
        results[f"{NATIVE}, A · 2^{power}"] = componentwise(np.asarray(fma_product(scaled, b)).view(np.float32), scaled, b)
    return results


def kept_bits(recipe: OzakiRecipe, a: np.ndarray, b: np.ndarray) -> float:
    """Return how many bits below the largest elements of row and column the product keeps."""
    exact = a.astype(np.longdouble) @ b.astype(np.longdouble)
    unit = np.outer(abs(a).max(1), abs(b).max(0))
    return float(-np.log2(np.max(abs(ozaki_matmul(a, b, recipe=recipe) - exact) / unit)))


def spread_errors(rng: np.random.Generator, a: np.ndarray, b: np.ndarray, ways: Mapping[str, str], quick: bool) -> dict[str, float]:
    """Measure the errors of recipes, by the words for them, and of f64, where the elements spread over many binades."""
    results = {}
    for n in BINADES[2:3] if quick else BINADES:
        x, y = (v * np.exp2(rng.integers(-n, n + 1, v.shape).astype(np.float64)) for v in (a, b))
        for words, name in ways.items():
            results[f"{words}, {n} binades"] = componentwise(ozaki_matmul(x, y, recipe=get_ozaki_recipe(name)), x, y)
        results[f"native f64, {n} binades"] = componentwise(x @ y, x, y)
    return results


def measure_slices(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the bits that slices keep, and the error where the elements spread over many binades."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((SIZE, DEPTH)), rng.standard_normal((DEPTH, SIZE))
    results = {}
    for slices in SLICES[2:3] if quick else SLICES:
        results[f"bits kept by {slices} slices of 7 bits"] = kept_bits(get_ozaki_recipe("ozaki_int8", slices=slices), a, b)
    results |= spread_errors(rng, a, b, {"8 slices": "ozaki_int8"}, quick)
    if not quick:
        p, q = abs(rng.standard_normal((SIZE, LONG))), abs(rng.standard_normal((LONG, SIZE)))
        results["FP8 slices on sm_100"] = componentwise(ozaki_matmul(p, q, recipe=get_ozaki_recipe("ozaki_fp8")), p, q)
        hopper = get_ozaki_recipe("ozaki_fp8", "sm_90a", op=HOPPER_FP8)
        results["FP8 slices on sm_90a"] = componentwise(ozaki_matmul(p, q, recipe=hopper), p, q)
    return results


MODULI = {"int8": ("ozaki2_int8", {8: 32, 10: 40, 12: 47, 14: 55}), "FP8": ("ozaki2_fp8", {6: 33, 8: 43})}  # effective bits by the README
WAYS = {"15 moduli scaled by norms": "ozaki2_int8", "15 moduli scaled by the product": "ozaki2_int8_accurate"}


def measure_moduli(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the bits that moduli keep, and the error where the elements spread over many binades."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((SIZE, DEPTH)), rng.standard_normal((DEPTH, SIZE))
    results = {}
    for kind, (name, counts) in MODULI.items():
        for count in [*counts][:1] if quick else counts:
            results[f"bits kept by {count} moduli, {kind}"] = kept_bits(get_ozaki_recipe(name, moduli=count), a, b)
    return results | spread_errors(rng, a, b, WAYS, quick)


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
            for way, words in SPLIT_WAYS.items()
        ),
        measure=measure_error_correction,
        x_label="K",
        y_label="normwise error",
    ),
    Claim(
        name="bf16x9-range",
        title="BF16x9 keeps the accuracy of f32 near the end of its range only where the parts are multiplied by powers of two",
        citation="Brower, Gunnels and Lopez, Unlocking Tensor Core Performance with Floating Point Emulation in cuBLAS, NVIDIA, 2025; the "
        "splitting is that of CUTLASS, sm100_mma_warpspecialized_emulated.hpp",
        link="https://developer.nvidia.com/blog/unlocking-tensor-core-performance-with-floating-point-emulation-in-cublas/",
        setting="(8 x 512) · (512 x 8), normal, A multiplied by a power of two: the largest error of an element over |A|·|B|. Scaled "
        "parts: the second and third are 2^8 and 2^16 times the rest, on sm_100a. Plain parts: XLA's, FP16x2: Ootomo and Yokota's.",
        reduced="A · 2^0 and A · 2^-120 alone.",
        differs="The source says that the accuracy of f32 is kept, and gives no number for this setting. How the instruction rounds the "
        "accumulator that it scales is unpublished; here the scaling is exact.",
        quantities=tuple(
            Quantity(f"{words}, A · 2^{power}", None, "", words, power, "" if words == NATIVE else get_wide_recipe(WIDE[words]).target)
            for power in POWERS
            for words in (*WIDE, NATIVE)
        ),
        measure=measure_range,
        x_label="power of two of A",
        y_label="largest error over |A|·|B|",
    ),
    Claim(
        name="ozaki-slices",
        title="Ozaki's scheme keeps f64's bits with 8 or 9 slices of int8, fewer where a row spreads, and none with FP8 on Hopper",
        citation="Ootomo, Ozaki and Yokota, DGEMM on integer matrix multiplication unit, IJHPCA 2024; RIKEN-RCCS/GEMMul8, README",
        link="https://arxiv.org/abs/2306.11975",
        setting="(8 x 512) · (512 x 8), normal f64, slices truncated, f64 sums in ozIMMU's order. Bits kept: below the largest element of "
        "the row times that of the column. Other quantities: the largest error over |A|·|B|, with elements spread over n binades up and "
        "down; FP8 slices: K = 4096, absolute values, 11 slices of 5 bits.",
        reduced="6 slices, and 20 binades, without FP8.",
        differs="s slices of 7 bits hold 7 s bits of an element; some are lost to the sum of 512 truncated products and to the products of "
        "slices that are left out. On Hopper FP8 sums have 14 bits: GEMMul8 refuses FP8 there.",
        quantities=(
            *(Quantity(f"bits kept by {n} slices of 7 bits", 7.0 * n, f"{7 * n} bits", "bits", n, "sm_80") for n in SLICES),
            *(
                Quantity(f"{way}, {n} binades", None, "", "", None, "sm_80" if way == "8 slices" else "")
                for n in BINADES
                for way in ("8 slices", "native f64")
            ),
            Quantity("FP8 slices on sm_100", None, "", "", None, "sm_100"),
            Quantity("FP8 slices on sm_90a", None, "", "", None, "sm_90a"),
        ),
        measure=measure_slices,
        x_label="slices",
        y_label="bits kept",
    ),
    Claim(
        name="ozaki-moduli",
        title="Ozaki's second scheme keeps f64's bits with 15 moduli of int8, fewer where a row spreads over binades",
        citation="Ozaki, Uchino and Imamura, Ozaki Scheme II, 2025; RIKEN-RCCS/GEMMul8 08e83eb, README: effective bits",
        link="https://arxiv.org/abs/2504.08009",
        setting="(8 x 512) · (512 x 8), normal f64, scaled by norms. Bits kept: below the largest element of the row times that of the "
        "column. Other quantities: the largest error over |A|·|B|, with elements spread over n binades up and down.",
        reduced="8 and 6 moduli, and 20 binades.",
        differs="The README's bits are about those of the norm of a scaled row, log2 of sqrt(P / 2). Relative to the largest elements of a "
        "row and a column of 512 there are fewer, and the sum of 512 truncated products loses some more.",
        quantities=(
            *(
                Quantity(
                    f"bits kept by {n} moduli, {kind}",
                    float(bits),
                    f"{bits} bits",
                    f"bits, {kind}",
                    n,
                    "sm_100" if kind == "FP8" else "sm_80",
                )
                for kind, (_, counts) in MODULI.items()
                for n, bits in counts.items()
            ),
            *(
                Quantity(name, None, "", "", None, "sm_80" if name.startswith("15") else "")
                for n in BINADES
                for name in (f"{words}, {n} binades" for words in (*WAYS, "native f64"))
            ),
        ),
        measure=measure_moduli,
        x_label="moduli",
        y_label="bits kept",
    ),
)
