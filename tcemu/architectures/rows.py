"""Which arithmetic a target uses for an instruction: one row each, with its evidence. The first row that fits an instruction is its own."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tcemu.architectures.evidence import Evidence
from tcemu.arithmetic.model import Model
from tcemu.formats import B1, BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, F64, S4, S8, S32, TF32, U4, U8, Format


class ModelRow(NamedTuple):
    """One arithmetic: the instructions it belongs to, on which targets, the model and its evidence."""

    targets: tuple[str, ...]
    family: str  # of instructions; or "tcgen05", the fifth-generation unit, which has no instruction here: for `gemm`
    multiplicands: tuple[Format, ...]  # A and B are each one of them
    accumulators: tuple[Format, ...]  # D is one of them
    model: Model
    evidence: Evidence
    shapes: tuple[str, ...] = ()  # "m8n8k4"; empty: every shape
    c: Format | None = None  # C is it; None: any
    kinds: tuple[str | None, ...] = ()  # .kind; empty: any
    clamped_metadata: bool = False  # a metadata field outside the defined ones: see `sparsity.gather`
    toolkits: tuple[str, ...] = ()  # versions of ptxas whose code computes otherwise than today's; empty: today's, and all others


# ---- the arithmetic. A step of a tensor core: products, fraction bits, floor, rounding

FMA = Model(F64, 1, None, rounding="RN")
EXACT = Model(S32)
VOLTA_F32, VOLTA_F16 = Model(F32, 4, 23, -131, "RZ"), Model(F16, 4, 23, -19, "RN")
AMPERE_F32, AMPERE_F16, AMPERE_TF32 = Model(F32, 8, 24, -132, "RZ"), Model(F16, 8, 24, -20, "RN"), Model(F32, 4, 24, -132, "RZ")
HOPPER_F32, HOPPER_F16, HOPPER_TF32 = Model(F32, 16, 25, -133, "RZ"), Model(F16, 16, 25, -21, "RN"), Model(F32, 8, 25, -133, "RZ")
ADA_FP8, ADA_FP8_F16 = Model(F32, 16, 13, -132, "RZ", result_bits=13), Model(F16, 16, 13, -20, "RN")
HOPPER_FP8, HOPPER_FP8_F16 = Model(F32, 32, 13, -133, "RZ", result_bits=13), Model(F16, 32, 13, -21, "RN")
BLACKWELL_F32, BLACKWELL_F16 = Model(F32, 32, 25, -133, "RZ"), Model(F16, 32, 25, -21, "RN")
# each group of 16 products is added exactly and carries its scales; an e2m1 block of 32 is two such groups
GROUPED = Model(F32, 64, 35, -139, "RZ", summed=16)
# where there is no FP8 mma in silicon: as two chained f16 steps, from zero; C comes in last, by an ordinary addition
FP8_AS_F16 = Model(F32, 16, 25, -133, "RZ", multiplicand=F16, groups=2, chain="k")
FP8_AS_F16_F16 = Model(F16, 16, 25, -21, "RN", multiplicand=F16, groups=2, chain="k")
# ptxas before 12.8: the two steps apart, their results added, and the sum added to C
FP8_AS_F16_APART = Model(F32, 16, 25, -133, "RZ", multiplicand=F16, groups=2, chain=16, together=True)
# f16 m8n8k4 after sm_75: f32 multiply-adds, one chain of four from +0 on for an f32 result, two of two for f16
M8N8K4_F32 = Model(F32, 1, None, rounding="RN", chain="k", from_zero=True)
M8N8K4_F16 = Model(F32, 1, None, rounding="RN", chain=2)

FP8, F8F6F4 = (E4M3, E5M2), (E4M3, E5M2, E3M2, E2M3, E2M1)
INTEGERS = (S8, U8, S4, U4, B1)
FP4_KINDS = ("mxf4", "mxf4nvf4")

# ---- the evidence


def _recorded(family: str, words: int, compared: str, spellings: str = "") -> Evidence:
    """compared: outputs that `tcemu verify` compared there, see tests/golden/verified_h200.txt. spellings: those recorded, if not all."""
    gpu = "one NVIDIA H200, driver 580.159, ptxas 13.0"
    return Evidence("silicon", f"{gpu}{spellings}; {compared} more compared; tests/golden, family {family}", words)


def _published(gpu: str, words: int, beyond: str = "") -> Evidence:
    """beyond: what the words do not show."""
    return Evidence("published", f"{gpu}: Khattak and Mikaitis, arXiv 2512.07004{beyond}; tests/golden/published.npz", words)


def _assumed(reason: str) -> Evidence:
    return Evidence("assumed", reason)


def _literature(reason: str) -> Evidence:
    return Evidence("literature", reason)


MMA_SIM = "MMA-Sim, arXiv 2511.10909 v2 and its code, mmasim 2.1.1"
BY_MMA_SIM = _literature(MMA_SIM)
BY_VERITY = _literature(f"{MMA_SIM}; D. Reuter's public notes count 0 mismatches on RTX PRO 6000 and RTX 5090, words not public")
BY_DEFINITION = _literature("PTX ISA 9.7.14, which defines the result: exact, or a chain of fused multiply-adds; NaN words as on sm_90")
BY_ASSEMBLER = Evidence("lowering", "machine code of ptxas 12.9, 13.0 and 13.5: the routine that was measured on sm_90")
BY_SAME_CODE = Evidence("lowering", "machine code of ptxas 12.9 to 13.5: the same machine instruction as mma's, chained upward in k")
BY_STEP = _assumed("the target's dense step, over the products that are kept: so it was measured on sm_90")
BY_F32 = _assumed("as with f32 accumulators, rounded as f16 results of the same target are")
BY_OLD_CODE = _literature("machine code of ptxas 12.4 and 12.6; D. Reuter's public notes count 0 mismatches on an H100, words not public")

# ---- the targets

SM_90, SM_90A = ("sm_90", "sm_90a"), ("sm_90a",)
SM_100 = ("sm_100", "sm_100f", "sm_100a")
SM_103_110 = tuple(f"sm_{number}{suffix}" for number in (103, 110) for suffix in ("", "f", "a"))
SM_120 = tuple(f"sm_{number}{suffix}" for number in (120, 121) for suffix in ("", "f", "a"))


def _integers(targets: tuple[str, ...], *families: str) -> Iterator[ModelRow]:
    for family in families:
        yield ModelRow(targets, family, INTEGERS, (S32,), EXACT, BY_DEFINITION)


def _common(targets: tuple[str, ...]) -> Iterator[ModelRow]:
    """What is the same from sm_80 on: integers, f64, and f16 m8n8k4."""
    yield from _integers(targets, "mma", "mma.sp", "wmma.mma")
    yield ModelRow(targets, "mma", (F16,), (F32,), M8N8K4_F32, BY_ASSEMBLER, ("m8n8k4",))
    yield ModelRow(targets, "mma", (F16,), (F16,), M8N8K4_F16, BY_ASSEMBLER, ("m8n8k4",))
    yield ModelRow(targets, "mma", (F64,), (F64,), FMA, BY_DEFINITION)
    yield ModelRow(targets, "wmma.mma", (F64,), (F64,), FMA, BY_DEFINITION)


def _half_and_tf32(
    targets: tuple[str, ...], f32: Model, f16: Model, tf32: Model, *, mma: tuple[Evidence, ...], wmma: Evidence, sparse: Evidence = BY_STEP
) -> Iterator[ModelRow]:
    """f16, bf16 and tf32 by steps of one size; mma: the evidence of f16 and f32, bf16, f16 and f16, tf32."""
    tf32_of_wmma = tf32.replace(terms=4)  # wmma m16n16k8 is two steps of four everywhere
    yield ModelRow(targets, "mma", (F16,), (F32,), f32, mma[0])
    yield ModelRow(targets, "mma", (BF16,), (F32,), f32, mma[1])
    yield ModelRow(targets, "mma", (F16,), (F16,), f16, mma[2])
    yield ModelRow(targets, "mma", (TF32,), (F32,), tf32, mma[3])
    yield ModelRow(targets, "mma.sp", (F16, BF16), (F32,), f32, sparse)
    yield ModelRow(targets, "mma.sp", (F16,), (F16,), f16, sparse)
    yield ModelRow(targets, "mma.sp", (TF32,), (F32,), tf32, sparse)
    yield from _wmma(targets, f32, f16, wmma, (F16, BF16))
    yield ModelRow(targets, "wmma.mma", (TF32,), (F32,), tf32_of_wmma, wmma)


def _wmma(
    targets: tuple[str, ...], f32: Model, f16: Model, known: Evidence, types: tuple[Format, ...], mixed: Evidence | None = None
) -> Iterator[ModelRow]:
    """wmma of f16 and bf16; mixed: the evidence where C and D differ. With C f32 and D f16 the f32 result is rounded once more."""
    yield ModelRow(targets, "wmma.mma", (F16,), (F32,), f32, mixed or known, c=F16)
    yield ModelRow(targets, "wmma.mma", types, (F32,), f32, known)
    yield ModelRow(targets, "wmma.mma", (F16,), (F16,), f32, mixed or known, c=F32)
    yield ModelRow(targets, "wmma.mma", (F16,), (F16,), f16, known)


def _volta_and_turing() -> Iterator[ModelRow]:
    v100, as_sm_70 = _published("V100, f16", 1000), _assumed("as sm_70")
    by_wmma = _assumed("C of f16 is converted to f32 first, as from sm_75 on; mmasim 2.1.1 keeps f16's exponent for a subnormal C")
    for targets, f32, f16 in (
        (("sm_70",), v100, _published("V100, f16 to f16", 1000)),
        (("sm_72",), as_sm_70, as_sm_70),
        (("sm_75",), BY_MMA_SIM, BY_MMA_SIM),
    ):
        yield ModelRow(targets, "mma", (F16,), (F32,), VOLTA_F32, by_wmma, ("m8n8k4",), c=F16)
        yield ModelRow(targets, "mma", (F16,), (F32,), VOLTA_F32, f32, ("m8n8k4",))
        yield ModelRow(targets, "mma", (F16,), (F16,), VOLTA_F16, f16, ("m8n8k4",))
    yield from _wmma(("sm_70",), VOLTA_F32, VOLTA_F16, BY_MMA_SIM, (F16,), by_wmma)
    yield from _wmma(("sm_72",), VOLTA_F32, VOLTA_F16, as_sm_70, (F16,), by_wmma)
    yield from _integers(("sm_72",), "wmma.mma")
    yield ModelRow(("sm_75",), "mma", (F16,), (F32,), AMPERE_F32, BY_MMA_SIM)
    yield ModelRow(("sm_75",), "mma", (F16,), (F16,), AMPERE_F16, BY_MMA_SIM)
    yield from _wmma(("sm_75",), AMPERE_F32, AMPERE_F16, BY_SAME_CODE, (F16,))
    yield from _integers(("sm_75",), "mma", "wmma.mma")


def _ampere_and_ada() -> Iterator[ModelRow]:
    others = (_assumed("as sm_80 and sm_86, whose words are the same"),) * 4

    def known_by(gpu: str, words: int) -> tuple[Evidence, ...]:
        steps = ("f16, one step of K = 8", "bf16, one step of K = 8", "f16 to f16, one step of K = 8", "tf32, one step of K = 4")
        return tuple(_published(f"{gpu}, {step}", words, f"; a larger K as a chain of such steps: {MMA_SIM}") for step in steps)

    gpus: tuple[tuple[tuple[str, ...], tuple[Evidence, ...]], ...] = (
        (("sm_80",), known_by("A100", 1000)),
        (("sm_86",), known_by("A2", 1000)),
        (("sm_87", "sm_88"), others),
        (("sm_89",), known_by("RTX 1000 Ada and L40S", 2000)),
    )
    for targets, known in gpus:
        yield from _common(targets)
        yield from _half_and_tf32(targets, AMPERE_F32, AMPERE_F16, AMPERE_TF32, mma=known, wmma=BY_SAME_CODE)
    ada = ("sm_89",)
    yield ModelRow(ada, "mma", FP8, (F32,), ADA_FP8, _published("RTX 1000 Ada and L40S, e4m3 and e5m2", 4000))
    yield ModelRow(ada, "mma", FP8, (F16,), ADA_FP8_F16, _published("RTX 1000 Ada, e4m3 and e5m2 to f16", 2000))
    yield ModelRow(ada, "mma.sp", FP8, (F32,), ADA_FP8, BY_STEP)


def _hopper() -> Iterator[ModelRow]:
    mma, sparse = _recorded("mma", 121_856, "2.5e9"), _recorded("mma_sp", 149_504, "1.2e9")
    wmma = _recorded("wmma", 101_888, "3.1e9", "; 122 of 134 spellings, all but s8 and u8 with .satfinite and A in columns")
    wgmma = _recorded("wgmma", 505_856, "2.6e9", "; 50 of 546 spellings, every type and mode at N of 8, 24 or 64")
    wgmma_sp = _recorded("wgmma_sp", 311_296, "1.1e9", "; 38 of 528 spellings, every type and mode at N of 8, 24 or 64")
    yield ModelRow(SM_90, "mma", (F16,), (F32,), M8N8K4_F32, mma, ("m8n8k4",))
    yield ModelRow(SM_90, "mma", (F16,), (F16,), M8N8K4_F16, mma, ("m8n8k4",))
    yield from _half_and_tf32(SM_90, HOPPER_F32, HOPPER_F16, HOPPER_TF32, mma=(mma,) * 4, wmma=wmma, sparse=sparse)
    yield ModelRow(SM_90, "mma", FP8, (F32,), FP8_AS_F16_APART, BY_OLD_CODE, ("m16n8k32",), toolkits=("12.4", "12.6"))
    yield ModelRow(SM_90, "mma", FP8, (F32,), FP8_AS_F16, mma)
    yield ModelRow(SM_90, "mma", FP8, (F16,), FP8_AS_F16_F16, mma)
    yield ModelRow(SM_90, "mma.sp", FP8, (F32,), FP8_AS_F16, sparse)
    for family, known in (("mma", mma), ("wmma.mma", wmma)):
        yield ModelRow(SM_90, family, (F64,), (F64,), FMA, known)
    for family, known in (("mma", mma), ("mma.sp", sparse), ("wmma.mma", wmma), ("wgmma", wgmma), ("wgmma.sp", wgmma_sp)):
        yield ModelRow(SM_90A if known in (wgmma, wgmma_sp) else SM_90, family, INTEGERS, (S32,), EXACT, known)
    for family, known in (("wgmma", wgmma), ("wgmma.sp", wgmma_sp)):
        yield ModelRow(SM_90A, family, (F16, BF16), (F32,), HOPPER_F32, known)
        yield ModelRow(SM_90A, family, (F16,), (F16,), HOPPER_F16, known)
        yield ModelRow(SM_90A, family, (TF32,), (F32,), HOPPER_TF32, known)
        yield ModelRow(SM_90A, family, FP8, (F32,), HOPPER_FP8, known)
        yield ModelRow(SM_90A, family, FP8, (F16,), HOPPER_FP8_F16, known)


def _blackwell() -> Iterator[ModelRow]:
    tf32 = _published("B200, tf32, K = 4", 1000, f"; K = 8 as one step: {MMA_SIM}")
    b200 = (*(_published(f"B200, {name}", 1000) for name in ("f16", "bf16", "f16 to f16")), tf32)
    fp8 = _published("B200, e4m3 and e5m2", 2000), _published("B200, e4m3 and e5m2 to f16", 2000)
    assumed = _assumed("as sm_100, whose machine code is the same")
    for targets, known, known_fp8 in ((SM_100, b200, fp8), (SM_103_110, (assumed,) * 4, (assumed,) * 2)):
        yield from _common(targets)
        yield from _half_and_tf32(targets, HOPPER_F32, HOPPER_F16, HOPPER_TF32, mma=known, wmma=BY_SAME_CODE)
        yield ModelRow(targets, "mma", FP8, (F32,), FP8_AS_F16, known_fp8[0])
        yield ModelRow(targets, "mma", FP8, (F16,), FP8_AS_F16_F16, known_fp8[1])
        yield ModelRow(targets, "mma.sp", FP8, (F32,), FP8_AS_F16, _assumed("lowered as on sm_90"))
        yield from _fifth_generation(targets, BY_MMA_SIM if targets == SM_100 else _assumed("as sm_100"))
    yield from _common(SM_120)
    yield from _half_and_tf32(
        SM_120, HOPPER_F32, HOPPER_F16, HOPPER_TF32, mma=(BY_MMA_SIM, BY_VERITY, BY_MMA_SIM, BY_MMA_SIM), wmma=BY_SAME_CODE
    )
    yield ModelRow(SM_120, "mma", (E2M1,), (F32,), GROUPED, BY_VERITY, kinds=FP4_KINDS)
    yield ModelRow(SM_120, "mma", (E4M3, E5M2, E2M1), (F32,), BLACKWELL_F32, BY_VERITY)
    yield ModelRow(SM_120, "mma", F8F6F4, (F32,), BLACKWELL_F32, BY_MMA_SIM)
    yield ModelRow(SM_120, "mma", F8F6F4, (F16,), BLACKWELL_F16, BY_F32)
    yield ModelRow(SM_120, "mma.sp", (E2M1,), (F32,), GROUPED, BY_VERITY, kinds=FP4_KINDS, clamped_metadata=True)
    yield ModelRow(SM_120, "mma.sp", (E4M3,), (F32,), BLACKWELL_F32, BY_VERITY, kinds=(None, "f8f6f4"))
    yield ModelRow(SM_120, "mma.sp", F8F6F4, (F32,), BLACKWELL_F32, BY_STEP)
    yield ModelRow(SM_120, "mma.sp", F8F6F4, (F16,), BLACKWELL_F16, BY_F32)


def _fifth_generation(targets: tuple[str, ...], known: Evidence) -> Iterator[ModelRow]:
    """The unit behind tcgen05.mma, PTX ISA 9.7.16."""
    rows: tuple[tuple[Any, ...], ...] = (
        ((E2M1,), F32, GROUPED, FP4_KINDS),
        ((F16, BF16), F32, HOPPER_F32, ()),
        ((F16,), F16, HOPPER_F16, ()),
        ((TF32,), F32, HOPPER_TF32, ()),
        (F8F6F4, F32, BLACKWELL_F32, ()),
        (F8F6F4, F16, BLACKWELL_F16, ()),
    )
    for types, result, model, kinds in rows:
        yield ModelRow(targets, "tcgen05", types, (result,), model, known, kinds=kinds)
    yield ModelRow(targets, "tcgen05", (S8, U8), (S32,), EXACT, BY_DEFINITION)


ROWS = (*_volta_and_turing(), *_ampere_and_ada(), *_hopper(), *_blackwell())
