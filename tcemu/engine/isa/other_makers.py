"""Matrix units of other makers than NVIDIA: machines by name, and their instructions as values.

A unit enters as data: a row here says that a machine has the instruction, and a row of `tcemu.engine.architectures.other_maker_rows` says
what it computes. An instruction has its own name, such as "tdpbf16ps" or "v_mfma_f32_32x32x8_f16", its formats and its K. Registers and
lanes are not modelled, so that only functions on matrices take these instructions.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual; Arm Architecture Reference Manual DDI 0487; AMD Instinct MI100, MI200
and MI300, RDNA3, RDNA3.5 and RDNA4 ISA reference guides. Names of targets: -march and -mcpu of GCC and LLVM.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from re import fullmatch, sub
from typing import NamedTuple

from tcemu.base.errors import Unsupported
from tcemu.engine.formats.number_formats import BF16, E4M3FNUZ, E5M2FNUZ, F16, F32, F64, S8, S32, TF32, U8, Format
from tcemu.engine.isa.families import MatrixMultiply, Slots


class Machine(NamedTuple):
    """A target of another maker."""

    maker: str
    architecture: str
    names: tuple[str, ...]  # product names


OTHER_TARGETS: dict[str, Machine] = {
    "gfx908": Machine("AMD", "CDNA1", ("MI100",)),
    "gfx90a": Machine("AMD", "CDNA2", ("MI250X", "MI250", "MI210")),
    "gfx942": Machine("AMD", "CDNA3", ("MI300X", "MI300A", "MI325X")),
    "gfx950": Machine("AMD", "CDNA4", ("MI350X", "MI355X")),
    "gfx1100": Machine("AMD", "RDNA3", ("Radeon RX 7900 XTX", "Radeon Pro W7900")),
    "gfx1151": Machine("AMD", "RDNA3.5", ("Radeon 8060S", "Strix Halo")),
    "gfx1201": Machine("AMD", "RDNA4", ("Radeon AI Pro R9700", "Radeon RX 9070 XT")),
    "sapphirerapids": Machine("Intel", "Sapphire Rapids", ("Xeon (Sapphire Rapids)", "Xeon (Emerald Rapids)")),
    "znver4": Machine("AMD", "Zen 4", ("Zen 4", "EPYC 9004")),
    "neoverse-v1": Machine("Arm", "Neoverse V1", ("Graviton3",)),
    "neoverse-v2": Machine("Arm", "Neoverse V2", ("Graviton4",)),
    "armv9-a": Machine("Arm", "Armv9-A", ("Armv9-A",)),  # the architecture with its options F32MM and EBF16
}
_MAKER_WORDS = r"\b(amd|intel|aws|arm|instinct|radeon|xeon|epyc|processor|gpu|cpu)\b|[^a-z0-9.]"


@dataclass(frozen=True, kw_only=True, repr=False)
class Unit(MatrixMultiply):
    """An instruction of another maker's matrix unit, which computes D = A·B + C."""

    name: str
    operation: str  # instructions of one operation differ in shape and formats only
    source: str  # manual that defines it

    @property
    def family(self) -> str:
        return self.operation

    @property
    def opcode(self) -> str:
        return self.name

    @property
    def slots(self) -> Slots:
        return {}

    @property
    def operand_forms(self) -> tuple[tuple[str, ...], ...]:
        return (("d", "a", "b", "c"),)

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets that have the instruction."""
        return tuple(target for target, units in _units_by_target().items() if self in units)

    def register_count(self, operand: str) -> int:
        """Raises ValueError: registers of other makers are not modelled."""
        raise ValueError(f"{self}: the registers of other makers' units are not modelled; tcemu.gemm multiplies matrices. {self.source}")


# ---- the instructions

INTEL, ARM = "Intel SDM, volume 2", "Arm ARM DDI 0487"
_AMX = (("tdpbf16ps", BF16, BF16), ("tdpbssd", S8, S8), ("tdpbuud", U8, U8), ("tdpbsud", S8, U8), ("tdpbusd", U8, S8))
_DOTS = (("sdot", S8, S8), ("udot", U8, U8), ("usdot", U8, S8), ("sudot", S8, U8))
_MMLAS = (("smmla", S8, S8), ("ummla", U8, U8), ("usmmla", U8, S8))
_MFMA_TYPES = {
    "f64": F64, "f32": F32, "xf32": TF32, "f16": F16, "bf16": BF16, "bf16_1k": BF16, "i8": S8, "fp8": E4M3FNUZ, "bf8": E5M2FNUZ,
}  # fmt: skip
_CDNA1 = (
    "f32_32x32x8f16 f32_16x16x16f16 f32_32x32x4f16 f32_16x16x4f16 f32_4x4x4f16 f32_32x32x4bf16 f32_16x16x8bf16 f32_32x32x2bf16 "
    "f32_16x16x2bf16 f32_4x4x2bf16 f32_32x32x2f32 f32_16x16x4f32 f32_32x32x1f32 f32_16x16x1f32 f32_4x4x1f32 i32_32x32x8i8 i32_16x16x16i8 "
    "i32_32x32x4i8 i32_16x16x4i8 i32_4x4x4i8"
)
_CDNA2 = "f32_32x32x8bf16_1k f32_16x16x16bf16_1k f32_32x32x4bf16_1k f32_16x16x4bf16_1k f32_4x4x4bf16_1k f64_16x16x4f64 f64_4x4x4f64"
_CDNA3_WIDE = (
    "f32_32x32x8_f16 f32_16x16x16_f16 f32_32x32x4_2b_f16 f32_16x16x4_4b_f16 f32_4x4x4_16b_f16 f32_32x32x8_bf16 f32_16x16x16_bf16 "
    "f32_32x32x4_2b_bf16 f32_16x16x4_4b_bf16 f32_4x4x4_16b_bf16"
)
_CDNA3 = (
    "f32_32x32x4_xf32 f32_16x16x8_xf32 f32_32x32x16_fp8_fp8 f32_16x16x32_fp8_fp8 f32_32x32x16_bf8_bf8 f32_16x16x32_bf8_bf8 "
    "f32_32x32x16_fp8_bf8 f32_16x16x32_fp8_bf8 f32_32x32x16_bf8_fp8 f32_16x16x32_bf8_fp8 f32_32x32x2_f32 f32_16x16x4_f32 "
    "f32_32x32x1_2b_f32 f32_16x16x1_4b_f32 f32_4x4x1_16b_f32 f64_16x16x4_f64 f64_4x4x4_4b_f64 i32_32x32x16_i8 i32_16x16x32_i8 "
    "i32_32x32x4_2b_i8 i32_16x16x4_4b_i8 i32_4x4x4_16b_i8"
)
_CDNA4 = "f32_32x32x16_f16 f32_16x16x32_f16 f32_32x32x16_bf16 f32_16x16x32_bf16"


def _unit(name: str, shape: tuple[int, int, int], a: Format, b: Format, source: str, operation: str = "", satfinite: bool = False) -> Unit:
    d = S32 if a.is_integer else F64 if a == F64 else F32
    m, n, k = shape
    return Unit(name=name, operation=operation or name, source=source, m=m, n=n, k=k, a=a, b=b, d=d, satfinite=satfinite)


def _mfma(suffixes: str, architecture: str) -> Iterator[Unit]:
    """Yields `v_mfma` instructions of which "f32_32x32x4_2b_f16" and so on are the suffixes."""
    for suffix in suffixes.split():
        match = fullmatch(
            r"(?:f32|f64|i32)_(\d+)x(\d+)x(\d+?)(?:_\d+b)?_?((?:xf32|bf16_1k|bf16|f16|f32|f64|i8|fp8|bf8))(?:_(fp8|bf8))?", suffix
        )
        assert match is not None, suffix
        a, b = match[4], match[5] or match[4]
        operation = "v_mfma_1k" if a == "bf16_1k" else "v_mfma"
        shape = int(match[1]), int(match[2]), int(match[3])
        yield _unit(f"v_mfma_{suffix}", shape, _MFMA_TYPES[a], _MFMA_TYPES[b], f"AMD {architecture} ISA", operation)


@cache
def _units_by_target() -> dict[str, tuple[Unit, ...]]:
    """The instructions of each target. The first one with given operands is what a short name means."""
    cdna1, cdna2 = tuple(_mfma(_CDNA1, "CDNA1")), tuple(_mfma(_CDNA2, "CDNA2"))
    cdna3 = tuple(_mfma(f"{_CDNA3_WIDE} {_CDNA3}", "CDNA3"))
    cdna4 = (*_mfma(_CDNA4, "CDNA4"), *_mfma(_CDNA3_WIDE, "CDNA3"))
    rdna = tuple(
        _unit(f"{name}_{fmt}", shape, fmt, fmt, "AMD RDNA3 ISA", name)
        for fmt in (F16, BF16)
        for name, shape in (("v_wmma_f32_16x16x16", (16, 16, 16)), ("v_dot2_f32", (1, 1, 2)))
    )
    wave64 = tuple(  # what the instruction computes in wave64 mode; in wave32 it takes K in another order
        _unit(f"v_wmma_f32_16x16x16_{fmt}_w64", (16, 16, 16), fmt, fmt, "AMD RDNA4 ISA", "v_wmma_f32_16x16x16_w64") for fmt in (F16, BF16)
    )
    amx = tuple(_unit(name, (16, 16, 32 if a == BF16 else 64), a, b, INTEL) for name, a, b in _AMX)
    avx = (
        _unit("vdpbf16ps", (1, 16, 2), BF16, BF16, INTEL),
        _unit("vpdpbusd", (1, 16, 4), U8, S8, INTEL),
        _unit("vpdpbusds", (1, 16, 4), U8, S8, INTEL, satfinite=True),
    )
    neoverse = (_unit("bfmmla", (2, 2, 4), BF16, BF16, ARM), _unit("bfdot", (1, 4, 2), BF16, BF16, ARM))
    neoverse += tuple(_unit(name, (2, 2, 8), a, b, ARM) for name, a, b in _MMLAS)
    neoverse += tuple(_unit(name, (1, 4, 4), a, b, ARM) for name, a, b in _DOTS)
    options = (
        _unit("fmmla", (2, 2, 2), F32, F32, ARM),
        _unit("bfmmla_ebf", (2, 2, 4), BF16, BF16, ARM),
        _unit("bfdot_ebf", (1, 4, 2), BF16, BF16, ARM),
    )
    return {
        "gfx908": cdna1, "gfx90a": (*cdna2, *cdna1), "gfx942": cdna3, "gfx950": cdna4, "gfx1100": rdna, "gfx1151": rdna,
        "gfx1201": (*rdna, *wave64),
        "sapphirerapids": (*amx, *avx), "znver4": avx,
        "neoverse-v1": neoverse, "neoverse-v2": neoverse, "armv9-a": (*neoverse, *options),
    }  # fmt: skip


@cache
def _units_by_name() -> dict[str, Unit]:
    return {unit.name: unit for units in _units_by_target().values() for unit in units}


UNIT_FAMILIES = tuple(dict.fromkeys(unit.family for unit in _units_by_name().values()))


def other_units(target: str, family: str | None = None) -> tuple[Unit, ...]:
    """Return the instructions of another maker's target.

    Args:
        target: One of OTHER_TARGETS.
        family: One of UNIT_FAMILIES; None for all.
    """
    return tuple(unit for unit in _units_by_target()[target] if family in (None, unit.family))


def find_unit(name: str) -> Unit | None:
    """Return the instruction of another maker with this name, in any case; None if there is none."""
    return _units_by_name().get(name.strip().lower()) if len(name) < 60 else None


def short_named_unit(name: str, targets: tuple[str, ...]) -> Unit | None:
    """Return the first instruction of other makers' targets whose A and B have the format of this name; None if there is none.

    Args:
        name: Name of a format, such as "bf16".
        targets: Targets that all have the instruction; each one of OTHER_TARGETS.
    """
    word = name.strip().lower()
    units = _units_by_target()
    fits = (unit for unit in units[targets[0]] if unit.a == unit.b and unit.a.name == word)
    return next((unit for unit in fits if all(unit in units[target] for target in targets)), None)


@cache
def _target_names() -> dict[str, str]:
    names = {name: target for target, machine in OTHER_TARGETS.items() for name in (target, machine.architecture, *machine.names)}
    return {_simplified(name): target for name, target in names.items()}


def _simplified(name: str) -> str:
    return sub(_MAKER_WORDS, "", name.lower())


def find_other_target(name: str) -> str | None:
    """Return the target of another maker that a name means, such as "gfx942" for "AMD Instinct MI300X"; None if there is none."""
    return _target_names().get(_simplified(name[:80]))


def check_unit(op: MatrixMultiply | None, given: str, target: str) -> Unit:
    """Return the instruction if a target of another maker has it, or raise Unsupported.

    Args:
        op: The instruction that `given` means; None if it is none of another maker.
        given: The user's text.
        target: The target, NVIDIA's or another's.
    """
    if isinstance(op, Unit) and target in op.targets:
        return op
    if isinstance(op, Unit):
        where = ", ".join(f"{name} ({OTHER_TARGETS[name].architecture})" for name in op.targets)
        raise Unsupported(f"{op} needs {where}; the target is {target}. {op.source}.")
    machine = OTHER_TARGETS[target]
    formats = dict.fromkeys(unit.a.name for unit in other_units(target) if unit.a == unit.b)
    raise Unsupported(
        f"{given}: {target} is {machine.architecture} by {machine.maker}, which has no such instruction; its units multiply "
        f"{', '.join(formats)}: {other_units(target)[0]} and others (tcemu list --target {target})."
    )
