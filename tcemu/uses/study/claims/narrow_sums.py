"""Claims about sums whose running value has few bits, whatever GPU might do so."""

from collections.abc import Mapping

import numpy as np

from tcemu.operations.products.gemm import gemm
from tcemu.operations.products.matmul import matmul
from tcemu.operations.products.recipes import get_recipe
from tcemu.uses.study.claims.claim_types import Claim, Quantity
from tcemu.uses.study.sweeps import OperandPair, sweep

ONE_BY_ONE = get_recipe("f16", "sm_80").what_if(terms=1, fraction_bits=40, rounding="RN")  # exact, then rounded to what the result keeps
BITS = 9  # fraction bits of (1,6,9)
SUMS = 16  # number of sums for each seed
LENGTHS = (4096, 16384, 65536)
CHUNKS = (32, 64, 256)
SEGMENT = 4096  # terms of one call, so that sums of all lengths are one program


def round_significand(x: np.ndarray, bits: int) -> np.ndarray:
    """Round float64 to nearest even with `bits` fraction bits and any exponent."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(fraction, bits + 1)), exponent - bits - 1)


def sum_rows(x: np.ndarray) -> np.ndarray:
    """Sum the rows of x, float32 [rows, n], with each addition rounded to nearest with BITS fraction bits."""
    model, ones = ONE_BY_ONE.arithmetic.replace(result_bits=BITS), np.ones((min(SEGMENT, x.shape[1]), 1), np.float32)
    total = np.zeros((len(x), 1), np.float32)
    for start in range(0, x.shape[1], SEGMENT):
        total = np.asarray(gemm(x[:, start : start + SEGMENT], ones, total, op=ONE_BY_ONE.op, target=ONE_BY_ONE.target, model=model))
    return total[:, 0]


def measure_chunks(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the sums over their true values by length, and the errors of chunked sums."""
    rng, results, chained = np.random.default_rng(seed), {}, np.zeros(SUMS)
    x = round_significand(rng.uniform(1 - np.sqrt(3), 1 + np.sqrt(3), (SUMS, LENGTHS[-1])), BITS).astype(np.float32)
    for n in LENGTHS[1:2] if quick else LENGTHS:
        part = x[:, :n]
        true = part.sum(axis=1, dtype=np.float64)
        chained = sum_rows(part)
        results[f"one sum of {n}, over the true sum"] = float(np.mean(chained / true))
        for chunk in (64,) if quick else CHUNKS:
            of_chunks = sum_rows(part.reshape(-1, chunk)).reshape(SUMS, -1)
            results[f"chunks of {chunk}, {n}: error"] = float(np.mean(np.abs(sum_rows(of_chunks) / true - 1)))
    results["where a long sum stops growing"] = float(np.mean(chained))
    return results


# ---- variance

VARIANCE_BITS = (5, 6, 7, 8, 9)
ROWS = 32  # rows and columns; their product is the number of sums


def draw_operands(seed: int, n: int, size: int) -> OperandPair:
    """Draw normal operands whose products have significands of 5 bits: each factor has 2 fraction bits."""
    rng = np.random.default_rng(seed)
    a, b = (round_significand(rng.standard_normal(shape), 2).astype(np.float32) for shape in ((size, n), (n, size)))
    return a, b


def measure_variance(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the variance of sums over the variance of exact sums, by length and width."""
    retention = {"kept": lambda value, exact: float(np.mean(value**2) / np.mean(exact**2))}
    results = {}
    for n in LENGTHS[:1] if quick else LENGTHS:
        swept = sweep(
            matmul, {"result_bits": VARIANCE_BITS}, recipe=ONE_BY_ONE, measures=retention, seeds=(seed,),
            operands=lambda seed, n=n: draw_operands(seed, n, ROWS),
        )  # fmt: skip
        results |= {f"{n} products, {bits} bits": swept.column("kept", result_bits=bits)[0] for bits in VARIANCE_BITS}
    return results


CLAIMS = (
    Claim(
        name="chunked-accumulation",
        title="a sum in (1,6,9) stops growing near 4,096 terms, and chunks of 64 rescue it",
        citation="Wang, Choi, Brand, Chen and Gopalakrishnan, Training Deep Neural Networks with 8-bit Floating Point Numbers, "
        "NeurIPS 2018, section 2.3",
        link="https://arxiv.org/abs/1812.08011",
        setting="16 sums for each seed of numbers uniform with mean 1 and deviation 1, rounded to 9 fraction bits; every addition rounded "
        "to nearest with 9 fraction bits. Chunks: so many are summed, then their sums, in the same way.",
        reduced="length 16,384 and chunks of 64 alone.",
        differs="The paper says where the sum stalls, to a power of two, and shows curves for the rest. The sum stops where half its last "
        "bit exceeds every term: at 4,096 that is 4, and the largest term is 2.7.",
        quantities=(
            Quantity("where a long sum stops growing", 4096.0, "near 4096"),
            *(Quantity(f"one sum of {n}, over the true sum", None) for n in LENGTHS),
            *(Quantity(f"chunks of {chunk}, {n}: error", None, "", f"chunks of {chunk}", n) for n in LENGTHS for chunk in CHUNKS),
        ),
        measure=measure_chunks,
        x_label="length of the sum",
        y_label="mean relative error",
    ),
    Claim(
        name="variance-retention",
        title="the variance of a long sum shrinks where its running value has too few bits",
        citation="Sakr, Wang, Chen, Choi, Agrawal, Shanbhag and Gopalakrishnan, Accumulation Bit-Width Scaling For Ultra-Low Precision "
        "Training Of Deep Networks, ICLR 2019",
        link="https://arxiv.org/abs/1901.06588",
        setting="1,024 sums for each seed of products of normal numbers with 2 fraction bits each; every addition rounded to nearest with "
        "so many fraction bits: the mean square of the sums over that of the exact sums.",
        reduced="sums of 4,096 products alone.",
        differs="The paper predicts widths for the layers of three networks, which need their training to be held against. The ratio "
        "itself is what it calls variance retention.",
        quantities=tuple(
            Quantity(f"{n} products, {bits} bits", None, "", f"{n} products", bits) for n in LENGTHS for bits in VARIANCE_BITS
        ),
        measure=measure_variance,
        x_label="fraction bits of the running value",
        y_label="variance kept",
    ),
)
