"""Claims about single results: what a register keeps of C, and one dot product on many GPUs."""

from collections.abc import Mapping

import numpy as np

from tcemu.operations.products.gemm import gemm
from tcemu.uses.study.claims.claim_types import Claim, Quantity

WGMMA = "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"
MMA = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
FP8_UNITS = {  # by the name in the table: instruction, target, published bits and the text of it
    "sm_89, mma": (MMA, "sm_89", 13.0, "13 (SageAttention2)"),
    "sm_90a, wgmma": (WGMMA, "sm_90a", 13.0, "13 (both)"),
    "sm_90a, mma": (MMA, "sm_90a", None, ""),
    "sm_100a, mma": (MMA, "sm_100a", None, ""),
    "sm_120a, mma": (MMA, "sm_120a", None, ""),
}
F32_BITS = 23  # fraction bits of an f32


def count_kept_bits(seed: int, quick: bool) -> Mapping[str, float]:
    """Count the fraction bits of random C that the result of 0 · 0 + C keeps."""
    words = np.random.default_rng(seed).integers(0x3F800000, 0x40000000, 1024, np.uint32)  # from 1 to 2, so that all bits are fraction
    c, zero = words.view(np.float32).reshape(32, 32), np.zeros((32, 32), np.float32)
    results = {}
    for name, (op, target, *_) in FP8_UNITS.items():
        if quick and target != "sm_90a":
            continue
        bits_set = int(np.bitwise_or.reduce(np.asarray(gemm(zero, zero, c, op=op, target=target)).view(np.uint32).ravel()))
        results[name] = float(F32_BITS - (bits_set & -bits_set).bit_length() + 1)
    return results


A, B, C = [-(2.0**13), -0.5, -0.25, -0.125], [2.0**10, 1.0, 1.0, 1.0], 2.0**23
EQUATION_10 = {  # by the name in the table: instruction, target, and the result in the paper's table
    "V100, f16": ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32", "sm_70", 0.0),
    "T4, f16": ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", "sm_75", -0.5),
    "A100, f16": ("f16", "sm_80", -0.5),
    "RTX 4090, f16": ("f16", "sm_89", -0.5),
    "RTX 4090, e5m2": ("e5m2", "sm_89", 0.0),
    "H100, f16": ("f16", "sm_90a", -0.75),
    "H100, e5m2 by wgmma": ("e5m2 wgmma", "sm_90a", 0.0),
    "B200, f16": ("f16", "sm_100a", -0.75),
    "B200, e5m2 by tcgen05": ("e5m2 tcgen05", "sm_100a", -0.75),
    "B200, e5m2 by mma.sync": ("e5m2", "sm_100a", None),
    "MI100, f16": ("f16", "gfx908", -0.875),
    "MI250X, f16": ("f16", "gfx90a", 0.0),
    "MI250X, bf16 of K = 4": ("v_mfma_f32_32x32x4bf16", "gfx90a", -0.375),
    "MI300X, f16": ("f16", "gfx942", -0.5),
    "MI300X, e5m2fnuz": ("e5m2fnuz", "gfx942", -1.0),
    "RX 7900 XTX, f16": ("f16", "gfx1100", None),
    "R9700, f16": ("f16", "gfx1201", None),
    "Xeon, bf16 by AMX": ("tdpbf16ps", "sapphirerapids", None),
    "Zen 4, bf16": ("vdpbf16ps", "znver4", None),
    "Graviton3, bf16": ("bfmmla", "neoverse-v1", None),
    "Armv9-A, bf16 with EBF": ("bfmmla_ebf", "armv9-a", None),
}
QUICK_ROWS = ("A100, f16", "H100, f16", "H100, e5m2 by wgmma", "B200, e5m2 by tcgen05")


def equation_10(seed: int, quick: bool) -> Mapping[str, float]:
    """Compute the dot product on every GPU of the table."""
    a, b, c = np.array([A], np.float32), np.array([B], np.float32).T, np.array([[C]], np.float32)
    results = {}
    for name, (op, target, _) in EQUATION_10.items():
        if quick and name not in QUICK_ROWS:
            continue
        results[name] = float(np.asarray(gemm(a, b, c, op=op, target=target))[0, 0])
    return results


CLAIMS = (
    Claim(
        name="fp22-registers",
        title="FP8 tensor cores of Hopper and Ada keep 13 fraction bits of a sum",
        citation="DeepSeek-AI, Insights into DeepSeek-V3, ISCA 2025, section 3.1.1; Zhang et al., SageAttention2, 2024, section 3.4",
        link="https://arxiv.org/abs/2505.09343 https://arxiv.org/abs/2411.10958",
        setting="A = B = 0 and 1,024 random C from 1 to 2 in f32: how many of C's 23 fraction bits are not always zero in D.",
        reduced="Hopper alone.",
        differs="The sources speak of the FP8 tensor core of a GPU; the emulation, which was compared with an H200, has two on Hopper: "
        "wgmma keeps 13 bits, mma.sync with the same types keeps all 23. So a test with mma.sync on Hopper finds D = C "
        "(https://github.com/deepseek-ai/DeepGEMM/issues/37 asks why).",
        quantities=tuple(Quantity(name, published, said, target=target) for name, (_, target, published, said) in FP8_UNITS.items()),
        measure=count_kept_bits,
        seeds=1,
        y_label="fraction bits of C in D",
    ),
    Claim(
        name="same-product",
        title="the same dot product has another result on each generation of GPUs, and of other makers' units",
        citation="Xie et al., MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores, 2025, equation 10 and table 8",
        link="https://arxiv.org/abs/2511.10909",
        setting="-2^13 · 2^10 - 1/2 - 1/4 - 1/8 + 2^23, one instruction, sums in f32; -0.875 is exact.",
        reduced="four of the results.",
        differs="Every published result is the emulation's. The paper's e5m2 on Blackwell is that of tcgen05; by mma.sync the same GPU "
        "gives 0, since there FP8 operands go the way of f16 in three steps. The published results of AMD are those of the paper's code, "
        "mmasim 2.1.1. Nothing is random here: all seeds give the same.",
        quantities=tuple(Quantity(name, published, target=target) for name, (_, target, published) in EQUATION_10.items()),
        measure=equation_10,
        seeds=1,
        y_label="result",
    ),
)
