"""The arithmetic of other makers' matrix units, with its evidence: rows as in `tcemu.engine.architectures.model_rows`.

`UNKNOWN` says of the targets without a row what is known of them. The targets and instructions are in `tcemu.engine.isa.other_makers`.
"""

from tcemu.engine.architectures.evidence import Evidence, published
from tcemu.engine.architectures.model_rows import EXACT, FMA, MMA_SIM, ModelRow
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.formats.number_formats import BF16, E4M3FNUZ, E5M2FNUZ, F16, F32, F64, S8, S32, TF32, U8, Format
from tcemu.engine.isa.other_makers import ARM, INTEL

# ---- the models

_MULTIPLY_ADDS = Model(F32, terms=1, fraction_bits=None, rounding="RN")
# even and odd elements in a chain each, from +0; the chains are added to each other, and their sum to C
TDPBF16PS = _MULTIPLY_ADDS.replace(groups=2, dealing="single", chain=16, together=True, from_zero=True, flush="signed")
VDPBF16PS = _MULTIPLY_ADDS.replace(groups=2, dealing="reversed", flush="signed")  # the odd element first
_PAIRWISE = _MULTIPLY_ADDS.replace(step_kind="pairwise")
ARM_DEFAULT_NAN = 0x7FC00000
ARM_BF16 = _PAIRWISE.replace(terms=2, rounding="RO", flush="signed", nan=ARM_DEFAULT_NAN)
ARM_BF16_EBF = _MULTIPLY_ADDS.replace(terms=2, chain=2, nan=ARM_DEFAULT_NAN)
ARM_F32 = _PAIRWISE.replace(terms=2)
CDNA1_F16, CDNA1_BF16 = (_MULTIPLY_ADDS.replace(terms=terms) for terms in (4, 2))
CDNA2_WIDE, CDNA2_BF16 = (_PAIRWISE.replace(terms=terms, flush="positive") for terms in (4, 2))
CDNA3 = Model(F32, terms=8, fraction_bits=24, floor=-126, rounding="RN", step_kind="joined")
CDNA3_XF32 = CDNA3.replace(terms=4)
RDNA3 = Model(F32, terms=2, fraction_bits=24, rounding="RN", step_kind="complement")
RDNA4 = Model(F32, terms=4, fraction_bits=24, rounding="RN", step_kind="floored")
RDNA4_WAVE32 = RDNA4.replace(groups=2, dealing="fours")  # products 0 to 3, 8 to 11, 4 to 7 and 12 to 15
CDNA3_FP8 = CDNA3.replace(terms=16, groups=2, dealing="single")

# ---- the evidence

_NAN_WORDS = "NaN words are not compared: every NaN is the canonical one here"


def _recorded(machines: tuple[str, ...], family: str, words: int, further: int, note: str) -> Evidence:
    """Return the evidence of words of tests/golden/x86_bf16.npz or zen4_bf16.npz."""
    note = f"{_NAN_WORDS}; 0 of {further:,} words that are not kept differed; {note}"
    return Evidence(level="silicon", gpus=machines, family=family, recorded=words, note=note)


_XEON, _ZEN4 = "Intel Xeon with AMX", "AMD EPYC, family 25, model 17 (Zen 4)"
_EMERALD = "Intel Xeon, family 6, model 207 (Emerald Rapids)"
_TINY = "a result is tiny by its value after rounding with no bound on the exponent"


def _compared(machine: str, outputs: int) -> Evidence:
    """Return the evidence of a comparison that kept its counts, in tests/golden/verified_x86.txt, and no words."""
    note = f"0 of {outputs:,} outputs differ; {INTEL}, defines the result: exact, wrapped or clamped once"
    return Evidence(level="silicon", gpus=(machine,), family="verified_x86.txt", note=note)


ON_XEON, ON_ZEN4 = _compared(_EMERALD, 10_485_760), _compared(_ZEN4, 10_027_008)
BY_ARM = Evidence(level="literature", papers=(f"{ARM}, BFDOT and BFMMLA: each product and sum rounded to odd, subnormals flushed",))
BY_ARM_EBF = Evidence(level="literature", papers=(f"{ARM}, BFDOT and BFMMLA with FPCR.EBF = 1, FZ = 0 and FIZ = 0",))
BY_ARM_F32 = Evidence(level="literature", papers=(f"{ARM}, FMMLA: products and sums rounded; FPCR as after reset",), note=_NAN_WORDS)
BY_ARM_INTEGERS = Evidence(level="literature", papers=(f"{ARM}, which defines the result: exact, wrapped",))
BY_MMA_SIM = Evidence(level="literature", papers=(MMA_SIM,), note=_NAN_WORDS)
ROCJITSU = "rocjitsu (ROCm/rocm-systems, MIT), gfx11_dot2.h and gfx1100_cases.h, by AMD"


def _on_rdna3(fmt: Format, words: int) -> Evidence:
    """Return the evidence of words of tests/golden/rdna3_published.npz."""
    return published(("Radeon Pro W7900 (gfx1100)",), "rdna3_published", f"{fmt} to f32", words, f"{ROCJITSU}; {_NAN_WORDS}")


def _on_rdna4(fmt: Format, words: int) -> Evidence:
    """Return the evidence of words of tests/golden/rdna4_published.npz."""
    source = f"rocjitsu (ROCm/rocm-systems, MIT), gfx12_dot.h and gfx1201_cases.h, by AMD; {_NAN_WORDS}"
    return published(("Radeon AI Pro R9700 (gfx1201)",), "rdna4_published", f"{fmt} to f32", words, source)


ON_RDNA35 = Evidence(
    level="literature",
    papers=("ROCm/rocm-systems issue 12056: the rule of gfx1151, on which 12 million cases agreed", ROCJITSU),
    note=_NAN_WORDS,
)
BY_MFMA_INTEGERS = Evidence(level="literature", papers=("AMD CDNA ISA: exact sums of 8-bit products in 32 bits",))

# ---- the rows

XEON, NEOVERSE, ARMV9 = ("sapphirerapids",), ("neoverse-v1", "neoverse-v2", "armv9-a"), ("armv9-a",)
CDNA1_ONLY, CDNA2_ONLY, CDNA3_ONLY = ("gfx908",), ("gfx90a",), ("gfx942",)
_RDNA3_NAMES, _WAVE64 = ("v_wmma_f32_16x16x16", "v_dot2_f32"), "v_wmma_f32_16x16x16_w64"
_BYTES, _FNUZ = (S8, U8), (E4M3FNUZ, E5M2FNUZ)

OTHER_ROWS = (
    ModelRow(XEON, "tdpbf16ps", (BF16,), (F32,), TDPBF16PS, _recorded((_XEON, _EMERALD), "x86_bf16", 61_440, 14_581_760, _TINY)),
    ModelRow(XEON, "vdpbf16ps", (BF16,), (F32,), VDPBF16PS, _recorded((_XEON, _EMERALD), "x86_bf16", 96_000, 14_325_760, _TINY)),
    ModelRow(("znver4",), "vdpbf16ps", (BF16,), (F32,), VDPBF16PS, _recorded((_ZEN4,), "zen4_bf16", 5_632, 10_027_008, _TINY)),
    *(ModelRow(XEON, name, _BYTES, (S32,), EXACT, ON_XEON) for name in ("tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud")),
    *(ModelRow(XEON, name, _BYTES, (S32,), EXACT, ON_XEON) for name in ("vpdpbusd", "vpdpbusds")),
    *(ModelRow(("znver4",), name, _BYTES, (S32,), EXACT, ON_ZEN4) for name in ("vpdpbusd", "vpdpbusds")),
    *(ModelRow(NEOVERSE, name, (BF16,), (F32,), ARM_BF16, BY_ARM) for name in ("bfdot", "bfmmla")),
    *(ModelRow(ARMV9, name, (BF16,), (F32,), ARM_BF16_EBF, BY_ARM_EBF) for name in ("bfdot_ebf", "bfmmla_ebf")),
    ModelRow(ARMV9, "fmmla", (F32,), (F32,), ARM_F32, BY_ARM_F32),
    *(
        ModelRow(NEOVERSE, name, _BYTES, (S32,), EXACT, BY_ARM_INTEGERS)
        for name in ("smmla", "ummla", "usmmla", "sdot", "udot", "usdot", "sudot")
    ),
    ModelRow((*CDNA1_ONLY, *CDNA2_ONLY, *CDNA3_ONLY), "v_mfma", (S8,), (S32,), EXACT, BY_MFMA_INTEGERS),
    ModelRow((*CDNA1_ONLY, *CDNA2_ONLY, *CDNA3_ONLY), "v_mfma", (F32,), (F32,), _MULTIPLY_ADDS, BY_MMA_SIM),
    ModelRow((*CDNA2_ONLY, *CDNA3_ONLY), "v_mfma", (F64,), (F64,), FMA, BY_MMA_SIM),
    ModelRow(CDNA1_ONLY, "v_mfma", (F16,), (F32,), CDNA1_F16, BY_MMA_SIM),
    ModelRow(CDNA1_ONLY, "v_mfma", (BF16,), (F32,), CDNA1_BF16, BY_MMA_SIM),
    ModelRow(CDNA2_ONLY, "v_mfma", (F16,), (F32,), CDNA2_WIDE, BY_MMA_SIM),
    ModelRow(CDNA2_ONLY, "v_mfma_1k", (BF16,), (F32,), CDNA2_WIDE, BY_MMA_SIM),
    ModelRow(CDNA2_ONLY, "v_mfma", (BF16,), (F32,), CDNA2_BF16, BY_MMA_SIM),
    ModelRow(CDNA3_ONLY, "v_mfma", (F16,), (F32,), CDNA3, BY_MMA_SIM),
    ModelRow(CDNA3_ONLY, "v_mfma", (BF16,), (F32,), CDNA3, BY_MMA_SIM),
    ModelRow(CDNA3_ONLY, "v_mfma", (TF32,), (F32,), CDNA3_XF32, BY_MMA_SIM),
    *(
        ModelRow(("gfx1100",), name, (fmt,), (F32,), RDNA3, _on_rdna3(fmt, words))
        for name, fmt, words in zip(_RDNA3_NAMES * 2, (F16, F16, BF16, BF16), (256, 50, 256, 53), strict=True)
    ),
    *(ModelRow(("gfx1151",), name, (fmt,), (F32,), RDNA3, ON_RDNA35) for name in _RDNA3_NAMES for fmt in (F16, BF16)),
    *(
        ModelRow(("gfx1201",), name, (fmt,), (F32,), model, _on_rdna4(fmt, words))
        for fmt, dots in ((F16, 50), (BF16, 71))
        for name, model, words in ((_RDNA3_NAMES[0], RDNA4_WAVE32, 12), (_RDNA3_NAMES[1], RDNA4, dots), (_WAVE64, RDNA4, 12))
    ),
    ModelRow(CDNA3_ONLY, "v_mfma", _FNUZ, (F32,), CDNA3_FP8, BY_MMA_SIM),
)

UNKNOWN = {
    "gfx950": "no bit-exact model of CDNA4's MFMA is published; its v_dot2_f32_f16 keeps f16 subnormals (llvm/llvm-project#205101), and "
    "third-party notes say that MFMA keeps them too and that a block scale multiplies the sum of products before C is added"
}
