"""The table of instructions: the syntax blocks of PTX 9.7.14 to 9.7.16 as rows, with the targets and ISA version that each needs.

A row is a product of short lists: every shape with every tuple of types and every choice of the other qualifiers.

To add an instruction of a known family: a row here, and rows with its arithmetic in `tcemu.engine.architectures.model_rows`.
To add a family: a record in `tcemu.engine.isa.families`, with its qualifiers by slot, its name in `FAMILIES` there, and its rows here.
The targets are in `tcemu.isa.targets`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from re import fullmatch
from typing import Any

from tcemu.engine.formats.number_formats import FORMATS, UE4M3, UE8M0, Format
from tcemu.engine.isa.families import (
    DEFAULT_ROUNDING,
    DEFAULT_SCALE_COUNT,
    BlockScaling,
    Instruction,
    Mma,
    Mover,
    Sparsity,
    Wgmma,
    WgmmaControl,
    Wmma,
    WmmaMemory,
)
from tcemu.engine.isa.tcgen05 import (
    A_COLLECTORS,
    B_COLLECTORS,
    COPY_MULTICASTS,
    COPY_SOURCES,
    CTA_GROUPS,
    LOAD_NUMS,
    MAX_LOAD_REGISTERS,
    Tcgen05Allocation,
    Tcgen05Commit,
    Tcgen05Copy,
    Tcgen05Mma,
    Tcgen05Move,
    Tcgen05Order,
    Tcgen05Product,
    Tcgen05Shift,
)
from tcemu.engine.isa.tcgen05_kinds import KINDS, SCALED_KINDS
from tcemu.engine.layouts.tensor_memory import MOVE_REGISTERS

Version = tuple[int, int]
# Requirements of a row: pairs of targets and PTX ISA version, any of which is enough. "sm_90a": that target alone. "sm_80+": that target
# or any later one. "sm_120f+": the f and a targets of sm_120 and of later members of its family
Needs = tuple[tuple[str, Version], ...]
Choices = dict[str, tuple[Any, ...]]  # values of a field of the record, by the field's name


@dataclass(frozen=True)
class SyntaxRow:
    """One line of a syntax block: every shape with every tuple of types and every choice of the other fields."""

    record: type[Instruction]  # record of the family
    section: str  # section of the PTX ISA manual
    shapes: str  # shapes, separated by spaces
    types: tuple[str, ...]  # names of formats, separated by spaces, in the order of `operands`
    needs: Needs
    choices: Choices = field(default_factory=dict)
    operands: tuple[str, ...] = ("d", "a", "b", "c")  # fields of the record that hold the formats

    def instructions(self) -> Iterator[Instruction]:
        for shape, types, *values in product(self.shapes.split() or ("",), self.types, *self.choices.values()):
            formats = zip(self.operands, (FORMATS[name] for name in types.split()), strict=True)
            fields: dict[str, Any] = dict(zip(self.choices, values, strict=True)) | dict(formats)
            yield self.record(**parse_shape(shape), **fields)


def parse_shape(shape: str) -> dict[str, int]:
    """Return the sizes of a shape by name: {"m": 16, "n": 8, "k": 16} for "m16n8k16".

    Args:
        shape: Shape qualifier with or without k, or "", which gives an empty dict.

    Raises:
        ValueError: The text is no shape.
    """
    match = fullmatch(r"(?:m(\d+)n(\d+)(?:k(\d+))?)?", shape)
    if match is None:
        raise ValueError(f"shape {shape!r}: expected m, n and optionally k with a number each, such as m16n8k16")
    return {name: int(value) for name, value in zip("mnk", match.groups(), strict=True) if value is not None}


def pairs(accumulators: str, multiplicands: str) -> tuple[str, ...]:
    """Return the types "d a b c" for all pairs of multiplicands with all accumulators.

    Args:
        accumulators: Formats of D, or of D and C as "d,c", separated by spaces.
        multiplicands: Formats of A and B, separated by spaces.
    """
    results = [(d, c) for d, _, c in (pair.partition(",") for pair in accumulators.split())]
    return tuple(f"{d} {a} {b} {c or d}" for a, b in product(multiplicands.split(), repeat=2) for d, c in results)


def equal_pairs(accumulators: str, multiplicands: str) -> tuple[str, ...]:
    """Return the types "d a b c" for A and B of the same format.

    Args:
        accumulators: As in `pairs`.
        multiplicands: As in `pairs`.
    """
    return tuple(types for types in pairs(accumulators, multiplicands) if types.split()[1] == types.split()[2])


def without_c(types: tuple[str, ...]) -> tuple[str, ...]:
    """Return the types "d a b" for wgmma, which accumulates in D.

    Args:
        types: Types "d a b c".
    """
    return tuple(name.rsplit(" ", 1)[0] for name in types)


ROW_COL: Choices = {"alayout": ("row",), "blayout": ("col",)}
ANY_LAYOUT: Choices = {"alayout": ("row", "col"), "blayout": ("row", "col")}
SATFINITE: Choices = {"satfinite": (False, True)}
ROUNDING: Choices = {"rounding": (DEFAULT_ROUNDING, "rz", "rm", "rp")}
FP8, F8F6F4 = "e4m3 e5m2", "e4m3 e5m2 e3m2 e2m3 e2m1"
WITH_F6F4 = tuple(types for types in pairs("f16 f32", F8F6F4) if types not in pairs("f16 f32", FP8))
WMMA_SHAPES = "m16n16k16 m8n32k16 m32n8k16"

SM_70: Needs = (("sm_70+", (6, 0)),)
SM_120: Needs = (("sm_120a", (8, 7)), ("sm_120f+", (8, 8)))
SPARSE_F4: Needs = (("sm_120a", (8, 7)), ("sm_121a", (8, 8)))  # 9.7.14.6.3: no family target
# ldmatrix with .m16n16, .m8n16, .b8 and the narrow formats; stmatrix with .m16n8 and .b8: 9.7.14.5.15 and .16, Target ISA Notes
NARROW: Needs = (("sm_100a", (8, 6)), ("sm_120a", (8, 7)), *((f"sm_{number}f+", (8, 8)) for number in (100, 110, 120)))
# The manual gives .kind::f8f6f4 to the sm_120 family alone, and only as m16n8k32. With two fp8 types the assembler (12.9 to 13.5) also
# takes m16n8k16, and the sm_100 and sm_110 families, where it means the same as without .kind
KIND_FP8: Needs = (("sm_100a", (8, 7)), ("sm_120a", (8, 7)), *((f"sm_{number}f+", (8, 8)) for number in (100, 110, 120)))
# PTX ISA versions of qualifiers that were introduced later than their instructions: PTX ISA Notes of 9.7.14.4.3 to .5 and 9.7.14.5.15
QUALIFIER_SINCE: dict[str, Version] = {"aligned": (6, 3), "shared::cta": (7, 8)}


def since(target: int, major: int, minor: int) -> Needs:
    """Return the requirement of a target or any later one, and of a PTX ISA version."""
    return ((f"sm_{target}+", (major, minor)),)


def _since_isa(needs: Needs, isa: Version) -> Needs:
    return tuple((target, max(version, isa)) for target, version in needs)


def _scaled(kind: str, count: int, fmt: Format) -> Choices:
    return ROW_COL | {"kind": (kind,), "scaling": (BlockScaling(count, fmt),)}


def _mma() -> Iterator[SyntaxRow]:
    def row(shapes: str, types: tuple[str, ...], needs: Needs, choices: Choices = ROW_COL) -> SyntaxRow:
        return SyntaxRow(Mma, "9.7.14.5.14", shapes, types, needs, choices)

    yield row("m8n8k4", pairs("f16 f32,f16 f32", "f16"), since(70, 6, 4), ANY_LAYOUT)
    yield row("m16n8k8", pairs("f16 f32", "f16"), since(75, 6, 5))
    yield row("m16n8k16", pairs("f16 f32", "f16"), since(80, 7, 0))
    yield row("m16n8k8 m16n8k16", pairs("f32", "bf16"), since(80, 7, 0))
    yield row("m16n8k4 m16n8k8", pairs("f32", "tf32"), since(80, 7, 0))
    yield row("m16n8k32", pairs("f32", FP8), since(89, 8, 4))
    yield row("m16n8k32", pairs("f16", FP8), since(89, 8, 7))
    yield row("m16n8k16", pairs("f16 f32", FP8), since(89, 8, 7))
    yield row("m16n8k16 m16n8k32", pairs("f16 f32", FP8), KIND_FP8, ROW_COL | {"kind": ("f8f6f4",)})
    yield row("m16n8k32", WITH_F6F4, SM_120, ROW_COL | {"kind": ("f8f6f4",)})
    yield row("m16n8k32", pairs("f32", F8F6F4), SM_120, _scaled("mxf8f6f4", DEFAULT_SCALE_COUNT["mxf8f6f4"], UE8M0))
    yield row("m16n8k64", pairs("f32", "e2m1"), SM_120, _scaled("mxf4", DEFAULT_SCALE_COUNT["mxf4"], UE8M0))
    yield row("m16n8k64", pairs("f32", "e2m1"), SM_120, _scaled("mxf4nvf4", 2, UE8M0))
    yield row("m16n8k64", pairs("f32", "e2m1"), SM_120, _scaled("mxf4nvf4", 4, UE4M3))
    yield row("m16n8k64", pairs("f32", "e2m1"), _since_isa(SM_120, (9, 1)), _scaled("mxf4nvf4", 4, UE8M0))
    yield row("m8n8k4", pairs("f64", "f64"), since(80, 7, 0), ROW_COL | ROUNDING)
    yield row("m16n8k4 m16n8k8 m16n8k16", pairs("f64", "f64"), since(90, 7, 8), ROW_COL | ROUNDING)
    yield row("m8n8k16", pairs("s32", "u8 s8"), since(75, 6, 5), ROW_COL | SATFINITE)
    yield row("m16n8k16 m16n8k32", pairs("s32", "u8 s8"), since(80, 7, 0), ROW_COL | SATFINITE)
    yield row("m8n8k32", pairs("s32", "u4 s4"), since(75, 6, 5), ROW_COL | SATFINITE)
    yield row("m16n8k32 m16n8k64", pairs("s32", "u4 s4"), since(80, 7, 0), ROW_COL | SATFINITE)
    yield row("m8n8k128", pairs("s32", "b1"), since(75, 7, 0), ROW_COL | {"bit_op": ("xor",)})
    yield row("m16n8k128 m16n8k256", pairs("s32", "b1"), since(80, 7, 0), ROW_COL | {"bit_op": ("xor",)})
    yield row("m8n8k128 m16n8k128 m16n8k256", pairs("s32", "b1"), since(80, 7, 1), ROW_COL | {"bit_op": ("and",)})


def _mma_sp() -> Iterator[SyntaxRow]:
    def row(shapes: str, types: tuple[str, ...], needs: Needs, choices: Choices = ROW_COL) -> SyntaxRow:
        return SyntaxRow(Mma, "9.7.14.6.3", shapes, types, needs, choices | {"sparsity": (Sparsity(ordered=True),)})

    def both(shapes: str, types: tuple[str, ...], target: int, isa: Version, choices: Choices = ROW_COL) -> Iterator[SyntaxRow]:
        """Yield the rows of .sp and of .sp::ordered_metadata, which exists since PTX ISA 8.5."""
        plain: Choices = {"sparsity": (Sparsity(),)}
        yield SyntaxRow(Mma, "9.7.14.6.3", shapes, types, since(target, *isa), choices | plain)
        yield row(shapes, types, since(target, *max(isa, (8, 5))), choices)

    yield from both("m16n8k16 m16n8k32", pairs("f16 f32", "f16"), 80, (7, 1))
    yield from both("m16n8k16 m16n8k32", pairs("f32", "bf16"), 80, (7, 1))
    yield from both("m16n8k8 m16n8k16", pairs("f32", "tf32"), 80, (7, 1))
    yield from both("m16n8k64", pairs("f32", FP8), 89, (8, 4))
    # not in the syntax block; the notes allow f16 accumulators on sm_120, the assembler only on its a and f targets
    yield row("m16n8k64", pairs("f16", FP8), SM_120)
    yield from both("m16n8k32 m16n8k64", pairs("s32", "u8 s8"), 80, (7, 1), ROW_COL | SATFINITE)
    yield from both("m16n8k64 m16n8k128", pairs("s32", "u4 s4"), 80, (7, 1), ROW_COL | SATFINITE)
    yield row("m16n8k64", pairs("f32", FP8), KIND_FP8, ROW_COL | {"kind": ("f8f6f4",)})
    yield row("m16n8k64", pairs("f16", FP8), SM_120, ROW_COL | {"kind": ("f8f6f4",)})
    yield row("m16n8k64", WITH_F6F4, SM_120, ROW_COL | {"kind": ("f8f6f4",)})
    yield row("m16n8k64", pairs("f32", F8F6F4), SM_120, _scaled("mxf8f6f4", DEFAULT_SCALE_COUNT["mxf8f6f4"], UE8M0))
    yield row("m16n8k128", pairs("f32", "e2m1"), SPARSE_F4, _scaled("mxf4", DEFAULT_SCALE_COUNT["mxf4"], UE8M0))
    yield row("m16n8k128", pairs("f32", "e2m1"), SPARSE_F4, _scaled("mxf4nvf4", 2, UE8M0))
    yield row("m16n8k128", pairs("f32", "e2m1"), SPARSE_F4, _scaled("mxf4nvf4", 4, UE4M3))
    yield row("m16n8k128", pairs("f32", "e2m1"), _since_isa(SPARSE_F4, (9, 1)), _scaled("mxf4nvf4", 4, UE8M0))


def _wmma() -> Iterator[SyntaxRow]:
    def mma(shapes: str, types: tuple[str, ...], needs: Needs, choices: Choices = ANY_LAYOUT) -> SyntaxRow:
        return SyntaxRow(Wmma, "9.7.14.4.5", shapes, types, needs, choices)

    yield mma(WMMA_SHAPES, pairs("f16 f32 f16,f32 f32,f16", "f16"), SM_70)
    yield mma(WMMA_SHAPES, equal_pairs("s32", "u8 s8"), since(72, 6, 3), ANY_LAYOUT | SATFINITE)
    yield mma(WMMA_SHAPES, pairs("f32", "bf16"), since(80, 7, 0))
    yield mma("m16n16k8", pairs("f32", "tf32"), since(80, 7, 0))
    yield mma("m8n8k4", pairs("f64", "f64"), since(80, 7, 0), ANY_LAYOUT | ROUNDING)
    yield mma("m8n8k32", equal_pairs("s32", "u4 s4"), since(75, 6, 3), ROW_COL | SATFINITE)
    yield mma("m8n8k128", pairs("s32", "b1"), since(75, 6, 3), ROW_COL | {"bit_op": ("xor",)})
    yield mma("m8n8k128", pairs("s32", "b1"), since(80, 7, 1), ROW_COL | {"bit_op": ("and",)})


def _wmma_memory() -> Iterator[SyntaxRow]:
    anywhere: Choices = {"layout": ("row", "col"), "space": (None, "global", "shared", "shared::cta")}

    def row(operand: str, shapes: str, types: str, needs: Needs, choices: Choices = anywhere) -> SyntaxRow:
        section = "9.7.14.4.4" if operand == "d" else "9.7.14.4.3"
        return SyntaxRow(WmmaMemory, section, shapes, tuple(types.split()), needs, choices | {"operand": (operand,)}, ("format",))

    for operand in "ab":
        packed: Choices = anywhere | {"layout": ("row",) if operand == "a" else ("col",)}
        yield row(operand, WMMA_SHAPES, "f16", SM_70)
        yield row(operand, WMMA_SHAPES, "u8 s8", since(72, 6, 3))
        yield row(operand, WMMA_SHAPES, "bf16", since(80, 7, 0))
        yield row(operand, "m16n16k8", "tf32", since(80, 7, 0))
        yield row(operand, "m8n8k4", "f64", since(80, 7, 0))
        yield row(operand, "m8n8k32", "u4 s4", since(75, 6, 3), packed)
        yield row(operand, "m8n8k128", "b1", since(75, 6, 3), packed)
    for operand in "cd":
        yield row(operand, WMMA_SHAPES, "f16 f32", SM_70)
        yield row(operand, WMMA_SHAPES, "s32", since(72, 6, 3))
        yield row(operand, "m16n16k8", "f32", since(80, 7, 0))
        yield row(operand, "m8n8k4", "f64", since(80, 7, 0))
        yield row(operand, "m8n8k32 m8n8k128", "s32", since(75, 6, 3))


def _movers() -> Iterator[SyntaxRow]:
    shared: Choices = {"space": (None, "shared", "shared::cta")}

    def row(name: str, section: str, shape: str, needs: Needs, choices: Choices) -> SyntaxRow:
        return SyntaxRow(Mover, section, shape, ("",), needs, {"name": (name,)} | choices, ())

    load, store = ("ldmatrix", "9.7.14.5.15"), ("stmatrix", "9.7.14.5.16")
    b16: Choices = shared | {"num": (1, 2, 4), "trans": (False, True), "element": ("b16",)}
    unpacked: Choices = shared | {"element": ("b8x16",), "src_fmt": ("b6x16_p32", "b4x16_p64")}
    yield row(*load, "m8n8", since(75, 6, 5), b16)
    yield row(*load, "m16n16", NARROW, shared | {"num": (1, 2), "trans": (True,), "element": ("b8",)})
    yield row(*load, "m16n16", NARROW, unpacked | {"num": (1, 2), "trans": (True,)})
    yield row(*load, "m8n16", NARROW, unpacked | {"num": (1, 2, 4)})
    yield row(*store, "m8n8", since(90, 7, 8), b16)
    yield row(*store, "m16n8", NARROW, shared | {"num": (1, 2, 4), "trans": (True,), "element": ("b8",)})
    yield row("movmatrix", "9.7.14.5.17", "m8n8", since(75, 7, 8), {"trans": (True,), "element": ("b16",)})


def _wgmma() -> Iterator[SyntaxRow]:
    def row(
        types: tuple[str, ...], k: int, needs: Needs, choices: Choices | None = None, *, sparse: bool = False, every_n: bool = True
    ) -> SyntaxRow:
        # N of integer and single-bit forms is no odd multiple of 8 above 24: 9.7.15.2
        sizes = [n for n in range(8, 257, 8) if every_n or n <= 24 or n % 16 == 0]
        section, sparsity = ("9.7.15.6.3", Sparsity()) if sparse else ("9.7.15.5.2", None)
        shapes = " ".join(f"m64n{n}k{k}" for n in sizes)
        return SyntaxRow(Wgmma, section, shapes, without_c(types), needs, {"sparsity": (sparsity,)} | (choices or {}), ("d", "a", "b"))

    for sparse in (False, True):
        exact: Needs = (("sm_90a", (8, 2) if sparse else (8, 0)),)
        k = 2 if sparse else 1
        yield row(pairs("f16 f32", "f16"), 16 * k, exact, sparse=sparse)
        yield row(pairs("f32", "bf16"), 16 * k, exact, sparse=sparse)
        yield row(pairs("f32", "tf32"), 8 * k, exact, sparse=sparse)
        yield row(pairs("f16 f32", FP8), 32 * k, exact, sparse=sparse)
        yield row(equal_pairs("s32", "u8 s8"), 32 * k, exact, SATFINITE, sparse=sparse, every_n=False)
        mixed = tuple(types for types in pairs("s32", "u8 s8") if types not in equal_pairs("s32", "u8 s8"))
        yield row(mixed, 32 * k, (("sm_90a", (8, 4)),), SATFINITE, sparse=sparse, every_n=False)
    yield row(pairs("s32", "b1"), 256, (("sm_90a", (8, 0)),), {"bit_op": ("and",)}, every_n=False)
    for name, section in (("fence", "9.7.15.7.1"), ("commit_group", "9.7.15.7.2"), ("wait_group", "9.7.15.7.3")):
        yield SyntaxRow(WgmmaControl, section, "", ("",), (("sm_90a", (8, 0)),), {"name": (f"wgmma.{name}",)}, ())


# targets with tcgen05: the Target ISA Notes of 9.7.16, as ptxas 13.0 and, of sm_107, 13.5 read them (sm_110 was sm_101 before PTX ISA 9.0)
TCGEN05: Needs = (("sm_100a", (8, 6)), ("sm_100f+", (8, 8)), ("sm_110f+", (9, 0)))
TCGEN05_EXACT: Needs = (("sm_100a", (8, 6)), ("sm_103a", (8, 8)), ("sm_107a", (9, 4)), ("sm_110a", (9, 0)))  # no family target
TCGEN05_I8: Needs = (("sm_100a", (8, 6)), ("sm_110a", (9, 0)))
TCGEN05_REDUCTION: Needs = (("sm_103f+", (8, 8)), ("sm_110f+", (9, 0)))
SCALED_INPUT: Needs = (("sm_100a", (8, 6)), ("sm_100f+", (8, 8)))  # scale-input-d: sm_100 and sm_103


def _tcgen05_memory() -> Iterator[SyntaxRow]:
    def row(record: type[Instruction], section: str, needs: Needs, **choices: tuple[Any, ...]) -> SyntaxRow:
        return SyntaxRow(record, section, "", ("",), needs, choices, ())

    yield row(Tcgen05Allocation, "9.7.16.7.1", TCGEN05, name=("tcgen05.alloc",), cta_group=CTA_GROUPS, space=(None, "shared::cta"))
    names = ("tcgen05.dealloc", "tcgen05.relinquish_alloc_permit")
    yield row(Tcgen05Allocation, "9.7.16.7.1", TCGEN05, name=names, cta_group=CTA_GROUPS)
    for tile, registers in MOVE_REGISTERS.items():
        nums = tuple(num for num in LOAD_NUMS if num * registers <= MAX_LOAD_REGISTERS)
        yield row(Tcgen05Move, "9.7.16.8.3", TCGEN05, name=("tcgen05.ld", "tcgen05.st"), tile=(tile,), num=nums, packed=(False, True))
    reduced: dict[str, tuple[Any, ...]] = {"name": ("tcgen05.ld",), "tile": ("32x32b", "16x32bx2"), "num": LOAD_NUMS[1:]}
    reduced["reduction"] = ("min", "max")
    yield row(Tcgen05Move, "9.7.16.8.3", TCGEN05_REDUCTION, **reduced, element=("f32",), absolute=(False, True), nan=(False, True))
    yield row(Tcgen05Move, "9.7.16.8.3", TCGEN05_REDUCTION, **reduced, element=("u32", "s32"))
    yield row(Tcgen05Order, "9.7.16.8.5", TCGEN05, name=("tcgen05.wait::ld", "tcgen05.wait::st"))
    names = ("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
    yield row(Tcgen05Order, "9.7.16.11.1", TCGEN05, name=names)
    for tile, multicasts in COPY_MULTICASTS.items():
        sources = (None, *COPY_SOURCES)
        yield row(Tcgen05Copy, "9.7.16.9.2", TCGEN05, cta_group=CTA_GROUPS, tile=(tile,), multicast=multicasts, source=sources)
    yield row(Tcgen05Shift, "9.7.16.9.3", TCGEN05_EXACT, cta_group=CTA_GROUPS)
    choices = {"cta_group": CTA_GROUPS, "space": (None, "shared::cluster"), "multicast": (False, True)}
    yield row(Tcgen05Commit, "9.7.16.12.1", TCGEN05, **choices)


def _tcgen05_mma() -> Iterator[SyntaxRow]:
    def row(kind: str, needs: Needs, collectors: tuple[str, ...] = A_COLLECTORS, **choices: tuple[Any, ...]) -> SyntaxRow:
        section = f"9.7.16.10.9.{1 + 2 * choices.get('ws', (False,))[0] + choices.get('sparse', (False,))[0]}"
        choices = {"cta_group": CTA_GROUPS, "kind": (kind,), "collector": collectors} | choices
        return SyntaxRow(Tcgen05Mma, section, "", ("",), needs, choices, ())

    for kind, sparse in product(KINDS, (False, True)):
        if kind in SCALED_KINDS:
            continue
        needs = TCGEN05_I8 if kind == "i8" else TCGEN05
        yield row(kind, needs, sparse=(sparse,))
        yield row(kind, needs, A_COLLECTORS[2:], sparse=(sparse,), ashift=(True,))  # not with fill or use
        yield row(kind, needs, B_COLLECTORS, sparse=(sparse,), ws=(True,), cta_group=(1,))
    for kind, sparse in product(SCALED_KINDS, (False, True)):
        first = (8, 7) if kind == "mxf4nvf4" else (8, 6)
        for size in KINDS[kind].sizes:
            exact = (size or "").startswith("scale_vec") or (sparse and kind != "mxf8f6f4")
            needs = TCGEN05_EXACT if exact else TCGEN05
            # .block16, .block32 and leaving the size out came with PTX ISA 8.8
            needs = _since_isa(needs, first if (size or "").startswith("scale_vec") else (8, 8))
            yield row(kind, needs, size=(size,), sparse=(sparse,))


def syntax_row(op: Instruction) -> SyntaxRow:
    """Return the row of an instruction; that of a `Tcgen05Product` is its instruction's.

    Args:
        op: Instruction.

    Raises:
        KeyError: No row has the instruction.
    """
    return syntax_rows()[op.instruction if isinstance(op, Tcgen05Product) else op]


def statement_needs(op: Instruction) -> Needs | None:
    """Return what a statement needs beyond its instruction's row, or None.

    Args:
        op: Instruction, whose arguments count.
    """
    if isinstance(op, Tcgen05Mma) and "scale_input_d" in op.argument_form:
        return SCALED_INPUT
    return None


@cache
def syntax_rows() -> dict[Instruction, SyntaxRow]:
    rows: dict[Instruction, SyntaxRow] = {}
    for row in (*_mma(), *_mma_sp(), *_wmma(), *_wmma_memory(), *_movers(), *_wgmma(), *_tcgen05_memory(), *_tcgen05_mma()):
        for op in row.instructions():
            assert op not in rows, f"{op} is in two rows"
            rows[op] = row
    return rows
