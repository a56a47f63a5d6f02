"""Which arithmetic a target uses for an instruction: one row each, with its evidence. The first row that fits an instruction is its own."""

from typing import NamedTuple, Protocol

from tcemu.arithmetic.program import Model
from tcemu.errors import NotModelled
from tcemu.formats import B1, BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, F64, S4, S8, S32, TF32, U4, U8, Format

LEVELS = {
    "silicon": "0 mismatches against words that we recorded on hardware",
    "published": "0 mismatches against recordings published by others",
    "literature": "stated in the literature, without words to compare",
    "lowering": "read from the machine code that NVIDIA's assembler makes",
    "assumed": "inferred from a neighbouring target",
}


class Evidence(NamedTuple):
    """How a row is known: a level, one of `LEVELS`, and where that can be checked."""

    level: str
    source: str


class Row(NamedTuple):
    """One arithmetic: the instructions it belongs to, on which targets, the model and its evidence."""

    targets: tuple[str, ...]
    family: str
    multiplicands: tuple[Format, ...]  # A and B are each one of them
    accumulators: tuple[Format, ...]  # D is one of them
    model: Model
    evidence: Evidence
    shapes: tuple[str, ...] = ()  # "m8n8k4"; empty: every shape
    c: Format | None = None  # C is it; None: any
    kinds: tuple[str | None, ...] = ()  # .kind; empty: any
    clamped_metadata: bool = False  # a metadata field outside the defined ones: see `sparsity.gather`


class Described(Protocol):
    """What a row is chosen by; `tcemu.instructions.Instruction` has it."""

    @property
    def family(self) -> str: ...
    @property
    def shape(self) -> str: ...
    @property
    def kind(self) -> str | None: ...
    @property
    def a(self) -> Format | None: ...
    @property
    def b(self) -> Format | None: ...
    @property
    def c(self) -> Format | None: ...
    @property
    def d(self) -> Format | None: ...


SM_90 = ("sm_90", "sm_90a")
SM_90A = ("sm_90a",)
SM_120 = tuple(f"sm_{number}{suffix}" for number in (120, 121) for suffix in ("", "f", "a"))
FP8, F8F6F4 = (E4M3, E5M2), (E4M3, E5M2, E3M2, E2M3, E2M1)
INTEGERS = (S8, U8, S4, U4, B1)


def _recorded(family: str) -> Evidence:
    return Evidence("silicon", f"one NVIDIA H200, driver 580.159, ptxas 13.0; tests/golden, family {family}")


MMA_SIM = "MMA-Sim, arXiv 2511.10909 v2 and its code, mmasim 2.1.1"
VERITY = f"{MMA_SIM}; D. Reuter's public notes: 0 mismatches on RTX PRO 6000 and RTX 5090, whose words are not published"
BLACKWELL, BLACKWELL_COUNTED = Evidence("literature", MMA_SIM), Evidence("literature", VERITY)
BLACKWELL_CODE = Evidence("lowering", "the machine code of ptxas 12.9 to 13.5 for sm_120a: the routine that was measured on sm_90")
EXACT = Evidence("literature", "PTX ISA 9.7.14.5.14, which defines the result: exact, or a chain of fused multiply-adds")
EXACT_SP = Evidence("literature", "PTX ISA 9.7.14.6.3, which defines the result: exact")
BY_SM_90 = Evidence("assumed", "as dense, with one step over the products that are kept: so it was measured on sm_90")
BY_F32 = Evidence("assumed", "as with f32 accumulators, rounded as f16 results of the same target are")
H200, H200_SP, H200_WMMA, H200_WGMMA, H200_WGMMA_SP = map(_recorded, ("mma", "mma_sp", "wmma", "wgmma", "wgmma_sp"))
# FP8 is converted to f16 and runs as two chained f16 steps, from zero; C comes in last, by an ordinary addition
FP8_AS_F16 = Model(F32, 16, 25, -133, "RZ", multiplicand=F16, groups=2, chain="k")
FP8_AS_F16_F16 = Model(F16, 16, 25, -21, "RN", multiplicand=F16, groups=2, chain="k")
# f32 multiply-adds, one chain of four for an f32 result, two of two for f16
M8N8K4_F32, M8N8K4_F16 = Model(F32, 1, None, rounding="RN", chain="k"), Model(F32, 1, None, rounding="RN", chain=2)
FMA = Model(F64, 1, None, rounding="RN")
HOPPER_F32, HOPPER_F16, HOPPER_TF32 = Model(F32, 16, 25, -133, "RZ"), Model(F16, 16, 25, -21, "RN"), Model(F32, 8, 25, -133, "RZ")
BLACKWELL_F32, BLACKWELL_F16 = Model(F32, 32, 25, -133, "RZ"), Model(F16, 32, 25, -21, "RN")
GROUPED = Model(F32, 64, 35, -139, "RZ", summed=16)

ROWS = (
    # m8n8k4 of f16 has no tensor core after sm_75
    Row(SM_90, "mma", (F16,), (F32,), M8N8K4_F32, H200, ("m8n8k4",)),
    Row(SM_90, "mma", (F16,), (F16,), M8N8K4_F16, H200, ("m8n8k4",)),
    Row(SM_90, "mma", (F16, BF16), (F32,), HOPPER_F32, H200),
    Row(SM_90, "mma", (F16,), (F16,), HOPPER_F16, H200),
    Row(SM_90, "mma", (TF32,), (F32,), HOPPER_TF32, H200),
    Row(SM_90, "mma", FP8, (F32,), FP8_AS_F16, H200),
    Row(SM_90, "mma", FP8, (F16,), FP8_AS_F16_F16, H200),
    Row(SM_90, "mma", (F64,), (F64,), FMA, H200),
    Row(SM_90, "mma", INTEGERS, (S32,), Model(S32), H200),
    Row(SM_90, "mma.sp", (F16, BF16), (F32,), HOPPER_F32, H200_SP),
    Row(SM_90, "mma.sp", (F16,), (F16,), HOPPER_F16, H200_SP),
    Row(SM_90, "mma.sp", (TF32,), (F32,), HOPPER_TF32, H200_SP),
    Row(SM_90, "mma.sp", FP8, (F32,), FP8_AS_F16, H200_SP),
    Row(SM_90, "mma.sp", FP8, (F16,), FP8_AS_F16_F16, H200_SP),
    Row(SM_90, "mma.sp", INTEGERS, (S32,), Model(S32), H200_SP),
    # D f16 with C f32: the f32 result is rounded once more
    Row(SM_90, "wmma.mma", (F16, BF16), (F32,), HOPPER_F32, H200_WMMA),
    Row(SM_90, "wmma.mma", (F16,), (F16,), HOPPER_F32, H200_WMMA, c=F32),
    Row(SM_90, "wmma.mma", (F16,), (F16,), HOPPER_F16, H200_WMMA),
    Row(SM_90, "wmma.mma", (TF32,), (F32,), Model(F32, 4, 25, -133, "RZ"), H200_WMMA),
    Row(SM_90, "wmma.mma", (F64,), (F64,), FMA, H200_WMMA),
    Row(SM_90, "wmma.mma", INTEGERS, (S32,), Model(S32), H200_WMMA),
    # FP8 with wgmma: 13 fraction bits, in the step and in its f32 result
    *(
        row
        for family, source in (("wgmma", H200_WGMMA), ("wgmma.sp", H200_WGMMA_SP))
        for row in (
            Row(SM_90A, family, (F16, BF16), (F32,), HOPPER_F32, source),
            Row(SM_90A, family, (F16,), (F16,), HOPPER_F16, source),
            Row(SM_90A, family, (TF32,), (F32,), HOPPER_TF32, source),
            Row(SM_90A, family, FP8, (F32,), Model(F32, 32, 13, -133, "RZ", result_bits=13), source),
            Row(SM_90A, family, FP8, (F16,), Model(F16, 32, 13, -21, "RN"), source),
            Row(SM_90A, family, INTEGERS, (S32,), Model(S32), source),
        )
    ),
    Row(SM_120, "mma", (F16,), (F32,), M8N8K4_F32, BLACKWELL_CODE, ("m8n8k4",)),
    Row(SM_120, "mma", (F16,), (F16,), M8N8K4_F16, BLACKWELL_CODE, ("m8n8k4",)),
    Row(SM_120, "mma", (F16, BF16), (F32,), HOPPER_F32, BLACKWELL_COUNTED),
    Row(SM_120, "mma", (F16,), (F16,), HOPPER_F16, BLACKWELL),
    Row(SM_120, "mma", (TF32,), (F32,), HOPPER_TF32, BLACKWELL),
    Row(SM_120, "mma", (F64,), (F64,), FMA, EXACT),
    Row(SM_120, "mma", INTEGERS, (S32,), Model(S32), EXACT),
    # each group of 16 products is added exactly and carries its scales; an e2m1 block of 32 is two such groups
    Row(SM_120, "mma", (E2M1,), (F32,), GROUPED, BLACKWELL_COUNTED, kinds=("mxf4", "mxf4nvf4")),
    Row(SM_120, "mma", (E4M3, E5M2, E2M1), (F32,), BLACKWELL_F32, BLACKWELL_COUNTED),
    Row(SM_120, "mma", F8F6F4, (F32,), BLACKWELL_F32, BLACKWELL),
    Row(SM_120, "mma", F8F6F4, (F16,), BLACKWELL_F16, BY_F32),
    Row(SM_120, "mma.sp", (F16, BF16), (F32,), HOPPER_F32, BY_SM_90),
    Row(SM_120, "mma.sp", (F16,), (F16,), HOPPER_F16, BY_SM_90),
    Row(SM_120, "mma.sp", (TF32,), (F32,), HOPPER_TF32, BY_SM_90),
    Row(SM_120, "mma.sp", INTEGERS, (S32,), Model(S32), EXACT_SP),
    Row(SM_120, "mma.sp", (E2M1,), (F32,), GROUPED, BLACKWELL_COUNTED, kinds=("mxf4", "mxf4nvf4"), clamped_metadata=True),
    Row(SM_120, "mma.sp", (E4M3,), (F32,), BLACKWELL_F32, BLACKWELL_COUNTED, kinds=(None, "f8f6f4")),
    Row(SM_120, "mma.sp", F8F6F4, (F32,), BLACKWELL_F32, BY_SM_90),
    Row(SM_120, "mma.sp", F8F6F4, (F16,), BLACKWELL_F16, BY_F32),
)


def models(target: str) -> tuple[Row, ...]:
    """The rows of one target, in the order in which they are tried."""
    return tuple(row for row in ROWS if target in row.targets)


def row(op: Described, target: str) -> Row:
    """The row that says how `target` computes `op`. Raises NotModelled if there is none."""
    for candidate in models(target):
        shape_fits = op.shape in (candidate.shapes or (op.shape,)) and op.kind in (candidate.kinds or (op.kind,))
        types_fit = {op.a, op.b} <= set(candidate.multiplicands) and op.d in candidate.accumulators and candidate.c in (None, op.c)
        if candidate.family == op.family and shape_fits and types_fit:
            return candidate
    modelled = sorted({name for r in ROWS for name in r.targets if r.family == op.family})
    what_works = f"{op.family} is modelled on {', '.join(modelled)}" if modelled else f"no target's {op.family} is modelled yet"
    raise NotModelled(
        f"{op}: legal on {target}, but there is no evidence of what {target} computes for it; {what_works}. "
        "The rows, with their evidence: tcemu.models"
    )
