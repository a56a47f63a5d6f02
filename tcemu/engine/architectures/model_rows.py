"""The table of arithmetic: the model that each target uses for each instruction, with its evidence.

The file has three parts: the models, by the generation of tensor cores that they describe; the evidence; and the rows, which join a model
and its evidence to targets and instructions. The first row of a target that fits an instruction applies, so special rows precede general
ones.

To add a GPU: its target in `tcemu.engine.isa.targets.TARGETS`, then its rows here, with a new model if no existing model describes it.
To add an instruction: its row of syntax in `tcemu.engine.isa.syntax_table`, then the rows of its targets here.
Recordings are in tests/golden; a row's `Evidence` names the file.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

from tcemu.engine.architectures.evidence import Evidence, Spellings, assumed, published
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.formats.number_formats import B1, BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, F64, S4, S8, S32, TF32, U4, U8, Format
from tcemu.engine.isa.targets import TARGETS
from tcemu.engine.isa.tcgen05_kinds import FP4_KINDS


class ModelRow(NamedTuple):
    """One arithmetic: a model with its evidence, and the targets and instructions to which it applies."""

    targets: tuple[str, ...]
    family: str  # family of instructions
    multiplicands: tuple[Format, ...]  # formats that A and B may have
    accumulators: tuple[Format, ...]  # formats that D may have
    model: Model
    evidence: Evidence
    shapes: tuple[str, ...] = ()  # shapes, such as "m8n8k4"; empty: all
    c: Format | None = None  # format of C; None: any
    kinds: tuple[str | None, ...] = ()  # values of .kind; empty: all
    k: int | None = None  # K of the instruction; None: any
    satfinite: bool = False  # True: only instructions with .satfinite
    clamped_metadata: bool = False  # True if undefined metadata fields are clamped: see `sparsity.gather`
    toolkits: tuple[str, ...] = ()  # versions of ptxas whose code computes differently from today's; empty: all others

    @property
    def label(self) -> str:
        """The row's instructions in words, such as "mma f16 to f32 (m8n8k4)"; unique among the rows of a target."""
        types = f"{'/'.join(map(str, self.multiplicands))} to {'/'.join(map(str, self.accumulators))}"
        limits = [*self.shapes, *(f"kind::{kind}" for kind in self.kinds if kind), *([f"C {self.c}"] if self.c else [])]
        limits += [f"K {self.k}"] if self.k else []
        limits += [".satfinite"] if self.satfinite else []
        limits += [f"ptxas {version}" for version in self.toolkits]
        return f"{self.family} {types}" + (f" ({', '.join(limits)})" if limits else "")


# ---- the models: one step of each generation's tensor cores

FMA = Model(F64, terms=1, fraction_bits=None, rounding="RN")
EXACT = Model(S32)
VOLTA_F32 = Model(F32, terms=4, fraction_bits=23, floor=-131, rounding="RZ")
VOLTA_F16 = Model(F16, terms=4, fraction_bits=23, floor=-19, rounding="RN")
AMPERE_F32 = Model(F32, terms=8, fraction_bits=24, floor=-132, rounding="RZ")
AMPERE_F16 = Model(F16, terms=8, fraction_bits=24, floor=-20, rounding="RN")
AMPERE_TF32 = Model(F32, terms=4, fraction_bits=24, floor=-132, rounding="RZ")
HOPPER_F32 = Model(F32, terms=16, fraction_bits=25, floor=-133, rounding="RZ")
HOPPER_F16 = Model(F16, terms=16, fraction_bits=25, floor=-21, rounding="RN")
HOPPER_TF32 = Model(F32, terms=8, fraction_bits=25, floor=-133, rounding="RZ")
ADA_FP8 = Model(F32, terms=16, fraction_bits=13, floor=-132, rounding="RZ", result_bits=13)
ADA_FP8_F16 = Model(F16, terms=16, fraction_bits=13, floor=-20, rounding="RN")
HOPPER_FP8 = Model(F32, terms=32, fraction_bits=13, floor=-133, rounding="RZ", result_bits=13)
HOPPER_FP8_F16 = Model(F16, terms=32, fraction_bits=13, floor=-21, rounding="RN")
BLACKWELL_F32 = Model(F32, terms=32, fraction_bits=25, floor=-133, rounding="RZ")
BLACKWELL_F16 = Model(F16, terms=32, fraction_bits=25, floor=-21, rounding="RN")
# each group of 16 products is added exactly, and its sum carries the group's scales; an e2m1 block of 32 is two such groups
GROUPED = Model(F32, terms=64, fraction_bits=35, floor=-139, rounding="RZ", summed=16)
GROUPED_96 = GROUPED.replace(terms=96)
# on GPUs without an FP8 mma, ptxas builds it from two f16 steps, chained from zero. C is added last, by an ordinary addition
FP8_AS_F16 = HOPPER_F32.replace(multiplicand=F16, groups=2, chain="k")
FP8_AS_F16_F16 = HOPPER_F16.replace(multiplicand=F16, groups=2, chain="k")
# ptxas before 12.8 computed the two steps separately, added their results, and added the sum to C
FP8_AS_F16_APART = HOPPER_F32.replace(multiplicand=F16, groups=2, chain=16, together=True)
# f16 m8n8k4 after sm_75 is built from f32 multiply-adds: one chain of four from +0 for an f32 result, two chains of two for an f16 result
M8N8K4_F32 = Model(F32, terms=1, fraction_bits=None, rounding="RN", chain="k", from_zero=True)
M8N8K4_F16 = Model(F32, terms=1, fraction_bits=None, rounding="RN", chain=2)

FP8, F8F6F4 = (E4M3, E5M2), (E4M3, E5M2, E3M2, E2M3, E2M1)
INTEGERS = (S8, U8, S4, U4, B1)

# ---- the evidence

MMA_SIM = "MMA-Sim, arXiv 2511.10909 v2 and its code, mmasim 2.1.1"
KHATTAK = "Khattak and Mikaitis, arXiv 2512.07004"
SF_TENSOR = "sf-tensor/tcgen05, commit 6f19f22"
REUTER = "D. Reuter's public notes count 0 mismatches on"
PANTHEON = "digests of pantheongpu/pantheonsim, nvidia/tests, commit 771bb8f"


def _recorded(family: str, recorded: int, compared: int, spellings: Spellings | None = None) -> Evidence:
    """Return the evidence of words that this project recorded; tests/golden/README.md describes the recording."""
    return Evidence(
        level="silicon",
        gpus=("NVIDIA H200",),
        driver="580.159",
        assembler=("13.0",),
        family=family,
        recorded=recorded,
        compared=compared,
        spellings=spellings,
    )


def _published(gpus: tuple[str, ...], operands: str, recorded: int, *, k: int = 0, step: int = 0) -> Evidence:
    """Return the evidence of words that others published; with `k` and `step` of `Evidence`, MMA-Sim states how a larger K is summed."""
    return published(gpus, "published", operands, recorded, *((KHATTAK, MMA_SIM) if k else (KHATTAK,)))._replace(k=k, step=step)


def _published_tcgen05(operands: str, recorded: int) -> Evidence:
    """Return the evidence of the words of tcgen05.mma on a B200 that sf-tensor published."""
    return published(("B200",), "tcgen05_b200.json", operands, recorded, SF_TENSOR, MMA_SIM)


def digested(gpus: tuple[str, ...], operands: str, recorded: int, *papers: str) -> Evidence:
    """Return the evidence of words whose digests pantheongpu/pantheonsim published, with `papers` that agree."""
    return published(gpus, "pantheonsim.json", operands, recorded, PANTHEON, *papers)


BY_MMA_SIM = Evidence(level="literature", papers=(MMA_SIM,))
ON_SM_120 = f"{REUTER} RTX PRO 6000 and RTX 5090, words not public"
BY_REUTER = Evidence(level="literature", papers=(MMA_SIM, ON_SM_120))
BY_DEFINITION = Evidence(
    level="literature",
    papers=("PTX ISA 9.7.14, which defines the result: exact, or a chain of fused multiply-adds; NaN words as on sm_90",),
)
BY_OLD_CODE = Evidence(level="literature", assembler=("12.4", "12.6"), papers=(f"{REUTER} an H100, words not public",))
BY_ASSEMBLER = Evidence(level="lowering", assembler=("12.9", "13.0", "13.5"), note="the routine that was measured on sm_90")
BY_SAME_CODE = Evidence(
    level="lowering", assembler=("12.9", "13.0", "13.5"), note="the same machine instruction as mma's, chained upward in k"
)
BY_STEP = assumed("the target's dense step over the products of the stored elements, as measured on sm_90")
BY_GROUPS = assumed("six groups of 16 in one sum, as four of them are with K = 64; nobody has published how K = 96 adds")
AS_SM_120 = assumed("as sm_120")
CLAMPED_AS_SM_90 = assumed("one clamp an instruction, as on sm_90, whose steps of f16 have as many products")
BY_F32 = assumed("as with f32 accumulators, but rounded like the other f16 results of the same target")

# ---- the targets

SM_90, SM_90A = ("sm_90", "sm_90a"), ("sm_90a",)
SM_100 = ("sm_100", "sm_100f", "sm_100a")
SM_103_110 = tuple(f"sm_{number}{suffix}" for number in (103, 110) for suffix in ("", "f", "a"))
SM_120, SM_121 = (tuple(f"sm_{number}{suffix}" for suffix in ("", "f", "a")) for number in (120, 121))


CLAMPED_WORDS = 384  # of s8 m16n8k32 with .satfinite on each card


class CommonEvidence(NamedTuple):
    """The evidence of the rows that all targets from sm_80 on share."""

    mma: Evidence = BY_DEFINITION  # integers
    sparse: Evidence = BY_DEFINITION
    f64: Evidence = BY_DEFINITION


UNDIGESTED = CommonEvidence()


def _digested_forms(gpu: str) -> CommonEvidence:
    return CommonEvidence(
        mma=digested((gpu,), "integers and bits", 10_752),
        sparse=digested((gpu,), "integers, A and B of one type", 9_216),
        f64=digested((gpu,), "f64 in every rounding", 768),
    )


def _integers(targets: tuple[str, ...], *families: str, known: Evidence = BY_DEFINITION) -> Iterator[ModelRow]:
    for family in families:
        yield ModelRow(targets=targets, family=family, multiplicands=INTEGERS, accumulators=(S32,), model=EXACT, evidence=known)


def _clamped(targets: tuple[str, ...], s8: Evidence, others: Evidence, *, by_halves: bool = False) -> Iterator[ModelRow]:
    """Yield the rows of the longest integer instructions with .satfinite, of which PTX does not say when they clamp.

    s8: evidence of the dense instruction of s8; others: of the other types and of the sparse instructions; by_halves: a step takes half of
    the instruction, 128 bits of each row; else it takes all.
    """
    for family, types, shape, known in (
        ("mma", (S8,), "m16n8k32", s8),
        ("mma", (S8, U8), "m16n8k32", others),
        ("mma", (S4, U4), "m16n8k64", others),
        ("mma.sp", (S8, U8), "m16n8k64", others),
        ("mma.sp", (S4, U4), "m16n8k128", others),
    ):
        model = EXACT.replace(clamp_step=128 // types[0].bits) if by_halves else EXACT
        yield ModelRow(targets, family, types, (S32,), model, known, shapes=(shape,), satfinite=True)


def _common(targets: tuple[str, ...], known: CommonEvidence = UNDIGESTED) -> Iterator[ModelRow]:
    """Yield the rows that all targets from sm_80 on share: integers, f64, and f16 m8n8k4."""
    yield from _integers(targets, "mma", known=known.mma)
    yield from _integers(targets, "mma.sp", known=known.sparse)
    yield from _integers(targets, "wmma.mma")
    yield from _m8n8k4(targets, BY_ASSEMBLER)
    yield ModelRow(targets=targets, family="mma", multiplicands=(F64,), accumulators=(F64,), model=FMA, evidence=known.f64)
    yield ModelRow(targets=targets, family="wmma.mma", multiplicands=(F64,), accumulators=(F64,), model=FMA, evidence=BY_DEFINITION)


def _m8n8k4(targets: tuple[str, ...], known: Evidence) -> Iterator[ModelRow]:
    """Yield the rows of f16 m8n8k4 on targets later than sm_75, whose hardware does not have it."""
    row = partial(ModelRow, targets=targets, family="mma", shapes=("m8n8k4",))
    yield row(multiplicands=(F16,), accumulators=(F32,), model=M8N8K4_F32, evidence=known)
    yield row(multiplicands=(F16,), accumulators=(F16,), model=M8N8K4_F16, evidence=known)


def _half_and_tf32(
    targets: tuple[str, ...], f32: Model, f16: Model, tf32: Model, *, mma: tuple[Evidence, ...], wmma: Evidence, sparse: Evidence = BY_STEP
) -> Iterator[ModelRow]:
    """Yield the rows of f16, bf16 and tf32. `mma` is the evidence of f16 to f32, bf16, f16 to f16, and tf32, in this order."""
    wmma_tf32 = tf32.replace(terms=4)  # wmma m16n16k8 is two steps of four everywhere
    row = partial(ModelRow, targets=targets)
    yield row(family="mma", multiplicands=(F16,), accumulators=(F32,), model=f32, evidence=mma[0])
    yield row(family="mma", multiplicands=(BF16,), accumulators=(F32,), model=f32, evidence=mma[1])
    yield row(family="mma", multiplicands=(F16,), accumulators=(F16,), model=f16, evidence=mma[2])
    yield row(family="mma", multiplicands=(TF32,), accumulators=(F32,), model=tf32, evidence=mma[3])
    yield row(family="mma.sp", multiplicands=(F16, BF16), accumulators=(F32,), model=f32, evidence=sparse)
    yield row(family="mma.sp", multiplicands=(F16,), accumulators=(F16,), model=f16, evidence=sparse)
    yield row(family="mma.sp", multiplicands=(TF32,), accumulators=(F32,), model=tf32, evidence=sparse)
    yield from _wmma(targets, f32, f16, wmma, (F16, BF16))
    yield row(family="wmma.mma", multiplicands=(TF32,), accumulators=(F32,), model=wmma_tf32, evidence=wmma)


def _wmma(
    targets: tuple[str, ...], f32: Model, f16: Model, known: Evidence, types: tuple[Format, ...], mixed: Evidence | None = None
) -> Iterator[ModelRow]:
    """Yield the rows of wmma with f16 and bf16; `mixed` is the evidence for C and D of different types.

    With C of f32 and D of f16, the f32 sum is rounded a second time.
    """
    row = partial(ModelRow, targets=targets, family="wmma.mma")
    yield row(multiplicands=(F16,), accumulators=(F32,), model=f32, evidence=mixed or known, c=F16)
    yield row(multiplicands=types, accumulators=(F32,), model=f32, evidence=known)
    yield row(multiplicands=(F16,), accumulators=(F16,), model=f32, evidence=mixed or known, c=F32)
    yield row(multiplicands=(F16,), accumulators=(F16,), model=f16, evidence=known)


def _volta_and_turing() -> Iterator[ModelRow]:
    v100, as_sm_70 = _published(("V100",), "f16", 1000), assumed("as sm_70")
    by_wmma = assumed("C of f16 is converted to f32 first, as on sm_75 and later; mmasim 2.1.1 keeps f16's exponent for a subnormal C")
    for targets, f32, f16 in (
        (("sm_70",), v100, _published(("V100",), "f16 to f16", 1000)),
        (("sm_72",), as_sm_70, as_sm_70),
        (("sm_75",), BY_MMA_SIM, BY_MMA_SIM),
    ):
        row = partial(ModelRow, targets=targets, family="mma", shapes=("m8n8k4",))
        yield row(multiplicands=(F16,), accumulators=(F32,), model=VOLTA_F32, evidence=by_wmma, c=F16)
        yield row(multiplicands=(F16,), accumulators=(F32,), model=VOLTA_F32, evidence=f32)
        yield row(multiplicands=(F16,), accumulators=(F16,), model=VOLTA_F16, evidence=f16)
    yield from _wmma(("sm_70",), VOLTA_F32, VOLTA_F16, BY_MMA_SIM, (F16,), by_wmma)
    yield from _wmma(("sm_72",), VOLTA_F32, VOLTA_F16, as_sm_70, (F16,), by_wmma)
    yield from _integers(("sm_72",), "wmma.mma")
    yield ModelRow(targets=("sm_75",), family="mma", multiplicands=(F16,), accumulators=(F32,), model=AMPERE_F32, evidence=BY_MMA_SIM)
    yield ModelRow(targets=("sm_75",), family="mma", multiplicands=(F16,), accumulators=(F16,), model=AMPERE_F16, evidence=BY_MMA_SIM)
    yield from _wmma(("sm_75",), AMPERE_F32, AMPERE_F16, BY_SAME_CODE, (F16,))
    yield from _integers(("sm_75",), "mma", "wmma.mma")


def _ampere_and_ada() -> Iterator[ModelRow]:
    others = (assumed("as sm_80 and sm_86, whose words are the same"),) * 4

    def published_by_format(gpus: tuple[str, ...], recorded: int) -> tuple[Evidence, ...]:
        steps = {"f16": 8, "bf16": 8, "f16 to f16": 8, "tf32": 4}
        return tuple(_published(gpus, operands, recorded, k=k, step=k) for operands, k in steps.items())

    gpus: tuple[tuple[tuple[str, ...], tuple[Evidence, ...]], ...] = (
        (("sm_80",), published_by_format(("A100",), 1000)),
        (("sm_86",), published_by_format(("A2",), 1000)),
        (("sm_87", "sm_88"), others),
        (("sm_89",), published_by_format(("RTX 1000 Ada", "L40S"), 2000)),
    )
    unknown = assumed("not known: no words of an A100 are public; as sm_86, whose steps of f16 have as many products")
    as_sm_86 = assumed("as sm_86")
    halves = assumed("128 bits of a row in a step, as dense s8, which was recorded; no published word shows it")
    yield from _clamped(("sm_80",), unknown, unknown, by_halves=True)
    yield from _clamped(("sm_87", "sm_88"), as_sm_86, as_sm_86, by_halves=True)
    yield from _clamped(("sm_86",), digested(("RTX 3060",), "s8", CLAMPED_WORDS), halves, by_halves=True)
    yield from _clamped(("sm_89",), digested(("L40S",), "s8", CLAMPED_WORDS), halves, by_halves=True)
    common = {"sm_86": _digested_forms("RTX 3060"), "sm_89": _digested_forms("L40S")}
    for targets, known in gpus:
        yield from _common(targets, common.get(targets[0], UNDIGESTED))
        yield from _half_and_tf32(targets, AMPERE_F32, AMPERE_F16, AMPERE_TF32, mma=known, wmma=BY_SAME_CODE)
    fp8 = _published(("RTX 1000 Ada", "L40S"), "e4m3 and e5m2", 4000)
    fp8_f16 = _published(("RTX 1000 Ada",), "e4m3 and e5m2 to f16", 2000)
    row = partial(ModelRow, targets=("sm_89",), multiplicands=FP8)
    yield row(family="mma", accumulators=(F32,), model=ADA_FP8, evidence=fp8)
    yield row(family="mma", accumulators=(F16,), model=ADA_FP8_F16, evidence=fp8_f16)
    yield row(family="mma.sp", accumulators=(F32,), model=ADA_FP8, evidence=BY_STEP)


def _hopper() -> Iterator[ModelRow]:
    some_n = "every type and mode at N of 8, 24 or 64"
    mma = _recorded("mma", 121_856, 11_454_644_224)
    sparse = _recorded("mma_sp", 149_504, 9_894_670_464)
    but = "all but s8 and u8 with .satfinite and A in columns"
    wmma = _recorded("wmma", 101_888, 16_385_835_008, Spellings(recorded=122, all=134, which=but))
    wgmma = _recorded("wgmma", 505_856, 23_666_393_088, Spellings(recorded=50, all=546, which=some_n))
    wgmma_sp = _recorded("wgmma_sp", 311_296, 10_299_297_792, Spellings(recorded=38, all=528, which=some_n))
    yield from _m8n8k4(SM_90, mma)
    yield from _half_and_tf32(SM_90, HOPPER_F32, HOPPER_F16, HOPPER_TF32, mma=(mma,) * 4, wmma=wmma, sparse=sparse)
    row = partial(ModelRow, targets=SM_90, multiplicands=FP8)
    before_12_8 = {"shapes": ("m16n8k32",), "toolkits": ("12.4", "12.6")}
    yield row(family="mma", accumulators=(F32,), model=FP8_AS_F16_APART, evidence=BY_OLD_CODE, **before_12_8)
    yield row(family="mma", accumulators=(F32,), model=FP8_AS_F16, evidence=mma)
    yield row(family="mma", accumulators=(F16,), model=FP8_AS_F16_F16, evidence=mma)
    yield row(family="mma.sp", accumulators=(F32,), model=FP8_AS_F16, evidence=sparse)
    for family, known in (("mma", mma), ("wmma.mma", wmma)):
        yield ModelRow(targets=SM_90, family=family, multiplicands=(F64,), accumulators=(F64,), model=FMA, evidence=known)
    integers = partial(ModelRow, multiplicands=INTEGERS, accumulators=(S32,), model=EXACT)
    for family, known in (("mma", mma), ("mma.sp", sparse), ("wmma.mma", wmma)):
        yield integers(targets=SM_90, family=family, evidence=known)
    for family, known in (("wgmma", wgmma), ("wgmma.sp", wgmma_sp)):
        yield integers(targets=SM_90A, family=family, evidence=known)
    for family, known in (("wgmma", wgmma), ("wgmma.sp", wgmma_sp)):
        row = partial(ModelRow, targets=SM_90A, family=family, evidence=known)
        yield row(multiplicands=(F16, BF16), accumulators=(F32,), model=HOPPER_F32)
        yield row(multiplicands=(F16,), accumulators=(F16,), model=HOPPER_F16)
        yield row(multiplicands=(TF32,), accumulators=(F32,), model=HOPPER_TF32)
        yield row(multiplicands=FP8, accumulators=(F32,), model=HOPPER_FP8)
        yield row(multiplicands=FP8, accumulators=(F16,), model=HOPPER_FP8_F16)


def _blackwell() -> Iterator[ModelRow]:
    b200 = ("B200",)
    mma = (*(_published(b200, operands, 1000) for operands in ("f16", "bf16", "f16 to f16")), _published(b200, "tf32", 1000, k=4, step=8))
    fp8 = _published(b200, "e4m3 and e5m2", 2000), _published(b200, "e4m3 and e5m2 to f16", 2000)
    as_sm_100 = assumed("as sm_100, whose machine code is the same")
    for targets, known, known_fp8 in ((SM_100, mma, fp8), (SM_103_110, (as_sm_100,) * 4, (as_sm_100,) * 2)):
        yield from _clamped(targets, CLAMPED_AS_SM_90, CLAMPED_AS_SM_90)
        yield from _common(targets)
        yield from _half_and_tf32(targets, HOPPER_F32, HOPPER_F16, HOPPER_TF32, mma=known, wmma=BY_SAME_CODE)
        row = partial(ModelRow, targets=targets, multiplicands=FP8)
        yield row(family="mma", accumulators=(F32,), model=FP8_AS_F16, evidence=known_fp8[0])
        yield row(family="mma", accumulators=(F16,), model=FP8_AS_F16_F16, evidence=known_fp8[1])
        yield row(family="mma.sp", accumulators=(F32,), model=FP8_AS_F16, evidence=assumed("lowered as on sm_90"))
        yield from _fifth_generation(targets)


def _blackwell_120() -> Iterator[ModelRow]:
    """Yield the rows of sm_120 and sm_121, whose mma takes the narrow types and block scales."""
    card = ("RTX PRO 6000",)
    yield from _clamped(SM_120, digested(card, "s8", CLAMPED_WORDS), CLAMPED_AS_SM_90)
    yield from _clamped(SM_121, AS_SM_120, CLAMPED_AS_SM_90)
    yield from _common(SM_120, _digested_forms(*card))
    yield from _common(SM_121)
    half = (BY_MMA_SIM, BY_REUTER, BY_MMA_SIM, BY_MMA_SIM)
    yield from _half_and_tf32((*SM_120, *SM_121), HOPPER_F32, HOPPER_F16, HOPPER_TF32, mma=half, wmma=BY_SAME_CODE)
    fp4 = digested(card, "e2m1 with ue8m0 or ue4m3 scales", 768, ON_SM_120)
    narrow = digested(card, "13 pairs of types, with and without ue8m0 scales", 2432, ON_SM_120)
    sparse = digested(card, "e4m3 with ue8m0 scales", 256)
    for targets, is_published in ((SM_120, True), (SM_121, False)):
        row = partial(ModelRow, targets=targets, family="mma")
        yield row(multiplicands=(E2M1,), accumulators=(F32,), model=GROUPED, evidence=fp4 if is_published else BY_REUTER, kinds=FP4_KINDS)
        if not is_published:
            yield row(multiplicands=(E4M3, E5M2, E2M1), accumulators=(F32,), model=BLACKWELL_F32, evidence=BY_REUTER)
        yield row(multiplicands=F8F6F4, accumulators=(F32,), model=BLACKWELL_F32, evidence=narrow if is_published else BY_MMA_SIM)
        yield row(multiplicands=F8F6F4, accumulators=(F16,), model=BLACKWELL_F16, evidence=BY_F32)
        row = partial(ModelRow, targets=targets, family="mma.sp")
        yield row(multiplicands=(E2M1,), accumulators=(F32,), model=GROUPED, evidence=BY_REUTER, kinds=FP4_KINDS, clamped_metadata=True)
        yield row(multiplicands=(E4M3,), accumulators=(F32,), model=BLACKWELL_F32, evidence=BY_REUTER, kinds=(None, "f8f6f4"))
        if is_published:
            yield row(multiplicands=(E4M3,), accumulators=(F32,), model=BLACKWELL_F32, evidence=sparse, kinds=("mxf8f6f4",))
        yield row(multiplicands=F8F6F4, accumulators=(F32,), model=BLACKWELL_F32, evidence=BY_STEP)
        yield row(multiplicands=F8F6F4, accumulators=(F16,), model=BLACKWELL_F16, evidence=BY_F32)


class TensorMemoryRow(NamedTuple):
    """One arithmetic of tcgen05.mma, with the words of a B200 that others published for the dense instruction."""

    multiplicands: tuple[Format, ...]
    accumulators: tuple[Format, ...]
    model: Model
    kinds: tuple[str | None, ...] = ()
    operands: str = ""  # types of the published words
    recorded: int = 0  # number of published words


TENSOR_MEMORY_ROWS = (  # special rows precede general ones
    TensorMemoryRow((E2M1,), (F32,), GROUPED, ("mxf4",), "e2m1 with ue8m0 scales", 1),
    TensorMemoryRow((E2M1,), (F32,), GROUPED, ("mxf4nvf4",), "e2m1 with ue4m3 or ue8m0 scales", 6),
    TensorMemoryRow((E2M1,), (F32,), BLACKWELL_F32, ("mxf8f6f4",), "e2m1 with ue8m0 scales", 2),
    TensorMemoryRow(F8F6F4, (F32,), BLACKWELL_F32, ("mxf8f6f4",)),
    TensorMemoryRow((BF16,), (F32,), HOPPER_F32, (), "bf16", 8),
    TensorMemoryRow((F16,), (F32,), HOPPER_F32, (), "f16", 7),
    TensorMemoryRow((F16,), (F16,), HOPPER_F16),
    TensorMemoryRow((TF32,), (F32,), HOPPER_TF32, (), "tf32", 8),
    TensorMemoryRow((E5M2,), (F32,), BLACKWELL_F32, ("f8f6f4",), "e5m2", 7),
    TensorMemoryRow((E4M3,), (F32,), BLACKWELL_F32, ("f8f6f4",), "e4m3", 5),
    TensorMemoryRow((E2M3,), (F32,), BLACKWELL_F32, ("f8f6f4",), "e2m3", 2),
    TensorMemoryRow((E3M2,), (F32,), BLACKWELL_F32, ("f8f6f4",), "e3m2", 2),
    TensorMemoryRow((E2M1,), (F32,), BLACKWELL_F32, ("f8f6f4",), "e2m1", 2),
    TensorMemoryRow(F8F6F4, (F32,), BLACKWELL_F32, ("f8f6f4",)),
    TensorMemoryRow(F8F6F4, (F16,), BLACKWELL_F16, ("f8f6f4",)),
    TensorMemoryRow((S8, U8), (S32,), EXACT, (), "s8 and u8, with and without saturation", 8),
)


def _fifth_generation(targets: tuple[str, ...]) -> Iterator[ModelRow]:
    """Yield the rows of tcgen05.mma, which PTX has only on targets that end in f or a.

    Each dense step is one truncated sum of all its products. Nobody has published words of sparse or weight-stationary instructions.

    Source: PTX ISA 9.7.16, Target ISA Notes; ptxas 13.0 rejects the family on sm_100, sm_103 and sm_110, and .kind::i8 on all but sm_100a
    and sm_110a. K = 96 is legal on sm_103a alone.
    """
    if "sm_103a" in targets:
        yield ModelRow(("sm_103a",), "tcgen05.mma", (E2M1,), (F32,), GROUPED_96, BY_GROUPS, kinds=FP4_KINDS, k=96)
    exact = tuple(target for target in targets if TARGETS[target].tensor_columns)
    with_integers = tuple(target for target in exact if target in ("sm_100a", "sm_110a"))
    for family, row in product(("tcgen05.mma", "tcgen05.mma.sp", "tcgen05.mma.ws", "tcgen05.mma.ws.sp"), TENSOR_MEMORY_ROWS):
        integers, scaled = row.accumulators == (S32,), any(kind and kind.startswith("mx") for kind in row.kinds)
        served = with_integers if integers else exact
        if not served or (scaled and ".ws" in family):
            continue
        if targets != SM_100:
            known = assumed("as sm_100")
        elif integers and family != "tcgen05.mma":
            known = BY_DEFINITION
        elif family.endswith(".sp"):
            known = BY_STEP
        elif family.endswith(".ws"):
            known = assumed("the step of the same instruction without .ws")
        else:
            known = _published_tcgen05(row.operands, row.recorded) if row.recorded else BY_MMA_SIM
        yield ModelRow(served, family, row.multiplicands, row.accumulators, row.model, known, kinds=row.kinds)


ROWS = (*_volta_and_turing(), *_ampere_and_ada(), *_hopper(), *_blackwell(), *_blackwell_120())
