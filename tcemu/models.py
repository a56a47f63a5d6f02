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
    clamped_metadata: bool = False  # a metadata field outside the defined ones: see `sparsity.kept_positions`


class Described(Protocol):
    """What a row is chosen by; `tcemu.instructions.Instruction` has it."""

    @property
    def family(self) -> str: ...
    @property
    def shape(self) -> str: ...
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


H200, H200_SP, H200_WMMA, H200_WGMMA, H200_WGMMA_SP = map(_recorded, ("mma", "mma_sp", "wmma", "wgmma", "wgmma_sp"))
# FP8 is converted to f16 and runs as two chained f16 steps, from zero; C comes in last, by an ordinary addition
FP8_AS_F16 = Model(F32, 16, 25, -133, "RZ", multiplicand=F16, groups=2, chain="k")
FP8_AS_F16_F16 = Model(F16, 16, 25, -21, "RN", multiplicand=F16, groups=2, chain="k")
HOPPER_F32, HOPPER_F16, HOPPER_TF32 = Model(F32, 16, 25, -133, "RZ"), Model(F16, 16, 25, -21, "RN"), Model(F32, 8, 25, -133, "RZ")

ROWS = (
    # m8n8k4 of f16 has no tensor core after sm_70: f32 multiply-adds, one chain of four for an f32 result, two of two for f16
    Row(SM_90, "mma", (F16,), (F32,), Model(F32, 1, None, rounding="RN", chain="k"), H200, ("m8n8k4",)),
    Row(SM_90, "mma", (F16,), (F16,), Model(F32, 1, None, rounding="RN", chain=2), H200, ("m8n8k4",)),
    Row(SM_90, "mma", (F16, BF16), (F32,), HOPPER_F32, H200),
    Row(SM_90, "mma", (F16,), (F16,), HOPPER_F16, H200),
    Row(SM_90, "mma", (TF32,), (F32,), HOPPER_TF32, H200),
    Row(SM_90, "mma", FP8, (F32,), FP8_AS_F16, H200),
    Row(SM_90, "mma", FP8, (F16,), FP8_AS_F16_F16, H200),
    Row(SM_90, "mma", (F64,), (F64,), Model(F64, 1, None, rounding="RN"), H200),
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
    Row(SM_90, "wmma.mma", (F64,), (F64,), Model(F64, 1, None, rounding="RN"), H200_WMMA),
    Row(SM_90, "wmma.mma", INTEGERS, (S32,), Model(S32), H200_WMMA),
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
)


def models(target: str) -> tuple[Row, ...]:
    """The rows of one target, in the order in which they are tried."""
    return tuple(row for row in ROWS if target in row.targets)


def row(op: Described, target: str) -> Row:
    """The row that says how `target` computes `op`. Raises NotModelled if there is none."""
    for candidate in models(target):
        shape_fits = not candidate.shapes or op.shape in candidate.shapes
        types_fit = {op.a, op.b} <= set(candidate.multiplicands) and op.d in candidate.accumulators and candidate.c in (None, op.c)
        if candidate.family == op.family and shape_fits and types_fit:
            return candidate
    modelled = sorted({name for r in ROWS for name in r.targets if r.family == op.family})
    what_works = f"{op.family} is modelled on {', '.join(modelled)}" if modelled else f"no target's {op.family} is modelled yet"
    raise NotModelled(
        f"{op}: legal on {target}, but there is no evidence of what {target} computes for it; {what_works}. "
        "The rows, with their evidence: tcemu.models"
    )
