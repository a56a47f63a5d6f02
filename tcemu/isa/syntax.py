"""The table of instructions: the syntax blocks of PTX 9.7.14 and 9.7.15 as rows, with the targets and ISA version that each needs.

A row is a product of short lists: every shape with every tuple of types and every choice of the other qualifiers. To add an instruction
of a known family: a row here, and rows with its arithmetic in `tcemu.architectures.rows`. To add a family: also its order of qualifiers, in
`tcemu.isa.instructions.FAMILIES`. Which targets there are stands in `tcemu.isa.catalog`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from re import fullmatch
from typing import Any

from tcemu.formats import FORMATS
from tcemu.isa.instructions import DEFAULT_ROUNDING, DEFAULT_SCALE_VEC, Instruction

Version = tuple[int, int]
# What a row needs: (targets, ISA version) pairs, any of which is enough. "sm_90a": that target alone. "sm_80+": that target or any later
# one. "sm_120f+": sm_120 and later members of its family, as f and a targets
Needs = tuple[tuple[str, Version], ...]
Choices = dict[str, tuple[Any, ...]]  # field of Instruction -> its values


@dataclass(frozen=True)
class SyntaxRow:
    """One line of a syntax block: every shape with every tuple of types and every choice of the other fields."""

    family: str
    section: str  # of the PTX ISA manual
    shapes: str
    types: tuple[str, ...]  # each a tuple of formats, named in the order of `operands`
    needs: Needs
    choices: Choices = field(default_factory=dict)
    operands: str = "dabc"

    def instructions(self) -> Iterator[Instruction]:
        for shape, types, *values in product(self.shapes.split() or ("",), self.types, *self.choices.values()):
            fields: dict[str, Any] = dict(zip(self.choices, values, strict=True))
            fields |= zip(self.operands, (FORMATS[name] for name in types.split()), strict=True)
            if "stype" in fields:
                fields |= {"stype": FORMATS[fields["stype"]], "block_scale": True}
            yield Instruction(family=self.family, **dimensions(shape), **fields)


def dimensions(shape: str) -> dict[str, int]:
    """m16n8k16 -> the fields m, n, k; "" -> none."""
    match = fullmatch(r"(?:m(\d+)n(\d+)(?:k(\d+))?)?", shape)
    if match is None:
        raise ValueError(f"shape {shape!r}: want m, n and perhaps k with a number each, such as m16n8k16")
    return {name: int(value) for name, value in zip("mnk", match.groups(), strict=True) if value is not None}


def pairs(accumulators: str, multiplicands: str) -> tuple[str, ...]:
    """Types "d a b c" for every a and b of a list, and every accumulator "d" or "d,c"."""
    both = [(d, c) for d, _, c in (pair.partition(",") for pair in accumulators.split())]
    return tuple(f"{d} {a} {b} {c or d}" for a, b in product(multiplicands.split(), repeat=2) for d, c in both)


def equal(accumulators: str, multiplicands: str) -> tuple[str, ...]:
    """As `pairs`, with a and b the same."""
    return tuple(types for types in pairs(accumulators, multiplicands) if types.split()[1] == types.split()[2])


def dab(types: tuple[str, ...]) -> tuple[str, ...]:
    """Types "d a b", for wgmma, whose accumulator is D."""
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
# .m16n16, .m8n16, .b8 and the formats of ldmatrix, .m16n8 and .b8 of stmatrix: 9.7.14.5.15 and .16, Target ISA Notes
NARROW: Needs = (("sm_100a", (8, 6)), ("sm_120a", (8, 7)), *((f"sm_{number}f+", (8, 8)) for number in (100, 110, 120)))
# The manual gives .kind::f8f6f4 to the sm_120 family alone, and only as m16n8k32. With two fp8 types the assembler (12.9 to 13.5) also
# takes m16n8k16, and the sm_100 and sm_110 families, where it means the same as without .kind
KIND_FP8: Needs = (("sm_100a", (8, 7)), ("sm_120a", (8, 7)), *((f"sm_{number}f+", (8, 8)) for number in (100, 110, 120)))
# qualifiers that came later than the instructions that have them: PTX ISA Notes of 9.7.14.4.3 to .5 and 9.7.14.5.15
SINCE: dict[str, Version] = {"aligned": (6, 3), "shared::cta": (7, 8)}


def _from(target: int, major: int, minor: int) -> Needs:
    return ((f"sm_{target}+", (major, minor)),)


def _at(needs: Needs, isa: Version) -> Needs:
    return tuple((target, max(version, isa)) for target, version in needs)


def _scaled(kind: str, scale_vec: int, stype: str) -> Choices:
    return ROW_COL | {"kind": (kind,), "scale_vec": (scale_vec,), "stype": (stype,)}


def _mma() -> Iterator[SyntaxRow]:
    def row(shapes: str, types: tuple[str, ...], needs: Needs, choices: Choices = ROW_COL) -> SyntaxRow:
        return SyntaxRow("mma", "9.7.14.5.14", shapes, types, needs, choices)

    yield row("m8n8k4", pairs("f16 f32,f16 f32", "f16"), _from(70, 6, 4), ANY_LAYOUT)
    yield row("m16n8k8", pairs("f16 f32", "f16"), _from(75, 6, 5))
    yield row("m16n8k16", pairs("f16 f32", "f16"), _from(80, 7, 0))
    yield row("m16n8k8 m16n8k16", pairs("f32", "bf16"), _from(80, 7, 0))
    yield row("m16n8k4 m16n8k8", pairs("f32", "tf32"), _from(80, 7, 0))
    yield row("m16n8k32", pairs("f32", FP8), _from(89, 8, 4))
    yield row("m16n8k32", pairs("f16", FP8), _from(89, 8, 7))
    yield row("m16n8k16", pairs("f16 f32", FP8), _from(89, 8, 7))
    yield row("m16n8k16 m16n8k32", pairs("f16 f32", FP8), KIND_FP8, ROW_COL | {"kind": ("f8f6f4",)})
    yield row("m16n8k32", WITH_F6F4, SM_120, ROW_COL | {"kind": ("f8f6f4",)})
    yield row("m16n8k32", pairs("f32", F8F6F4), SM_120, _scaled("mxf8f6f4", DEFAULT_SCALE_VEC["mxf8f6f4"], "ue8m0"))
    yield row("m16n8k64", pairs("f32", "e2m1"), SM_120, _scaled("mxf4", DEFAULT_SCALE_VEC["mxf4"], "ue8m0"))
    yield row("m16n8k64", pairs("f32", "e2m1"), SM_120, _scaled("mxf4nvf4", 2, "ue8m0"))
    yield row("m16n8k64", pairs("f32", "e2m1"), SM_120, _scaled("mxf4nvf4", 4, "ue4m3"))
    yield row("m16n8k64", pairs("f32", "e2m1"), _at(SM_120, (9, 1)), _scaled("mxf4nvf4", 4, "ue8m0"))
    yield row("m8n8k4", pairs("f64", "f64"), _from(80, 7, 0), ROW_COL | ROUNDING)
    yield row("m16n8k4 m16n8k8 m16n8k16", pairs("f64", "f64"), _from(90, 7, 8), ROW_COL | ROUNDING)
    yield row("m8n8k16", pairs("s32", "u8 s8"), _from(75, 6, 5), ROW_COL | SATFINITE)
    yield row("m16n8k16 m16n8k32", pairs("s32", "u8 s8"), _from(80, 7, 0), ROW_COL | SATFINITE)
    yield row("m8n8k32", pairs("s32", "u4 s4"), _from(75, 6, 5), ROW_COL | SATFINITE)
    yield row("m16n8k32 m16n8k64", pairs("s32", "u4 s4"), _from(80, 7, 0), ROW_COL | SATFINITE)
    yield row("m8n8k128", pairs("s32", "b1"), _from(75, 7, 0), ROW_COL | {"bit_op": ("xor",)})
    yield row("m16n8k128 m16n8k256", pairs("s32", "b1"), _from(80, 7, 0), ROW_COL | {"bit_op": ("xor",)})
    yield row("m8n8k128 m16n8k128 m16n8k256", pairs("s32", "b1"), _from(80, 7, 1), ROW_COL | {"bit_op": ("and",)})


def _mma_sp() -> Iterator[SyntaxRow]:
    def row(shapes: str, types: tuple[str, ...], needs: Needs, choices: Choices = ROW_COL) -> SyntaxRow:
        return SyntaxRow("mma.sp", "9.7.14.6.3", shapes, types, needs, choices | {"ordered": (True,)})

    def both(shapes: str, types: tuple[str, ...], target: int, isa: Version, choices: Choices = ROW_COL) -> Iterator[SyntaxRow]:
        """Plain .sp, and .sp::ordered_metadata since PTX ISA 8.5."""
        plain: Choices = {"ordered": (False,)}
        yield SyntaxRow("mma.sp", "9.7.14.6.3", shapes, types, _from(target, *isa), choices | plain)
        yield row(shapes, types, _from(target, *max(isa, (8, 5))), choices)

    yield from both("m16n8k16 m16n8k32", pairs("f16 f32", "f16"), 80, (7, 1))
    yield from both("m16n8k16 m16n8k32", pairs("f32", "bf16"), 80, (7, 1))
    yield from both("m16n8k8 m16n8k16", pairs("f32", "tf32"), 80, (7, 1))
    yield from both("m16n8k64", pairs("f32", FP8), 89, (8, 4))
    # not in the syntax block; the notes give f16 accumulators to sm_120, the assembler only to its a and f targets
    yield row("m16n8k64", pairs("f16", FP8), SM_120)
    yield from both("m16n8k32 m16n8k64", pairs("s32", "u8 s8"), 80, (7, 1), ROW_COL | SATFINITE)
    yield from both("m16n8k64 m16n8k128", pairs("s32", "u4 s4"), 80, (7, 1), ROW_COL | SATFINITE)
    yield row("m16n8k64", pairs("f32", FP8), KIND_FP8, ROW_COL | {"kind": ("f8f6f4",)})
    yield row("m16n8k64", pairs("f16", FP8), SM_120, ROW_COL | {"kind": ("f8f6f4",)})
    yield row("m16n8k64", WITH_F6F4, SM_120, ROW_COL | {"kind": ("f8f6f4",)})
    yield row("m16n8k64", pairs("f32", F8F6F4), SM_120, _scaled("mxf8f6f4", DEFAULT_SCALE_VEC["mxf8f6f4"], "ue8m0"))
    yield row("m16n8k128", pairs("f32", "e2m1"), SPARSE_F4, _scaled("mxf4", DEFAULT_SCALE_VEC["mxf4"], "ue8m0"))
    yield row("m16n8k128", pairs("f32", "e2m1"), SPARSE_F4, _scaled("mxf4nvf4", 2, "ue8m0"))
    yield row("m16n8k128", pairs("f32", "e2m1"), SPARSE_F4, _scaled("mxf4nvf4", 4, "ue4m3"))
    yield row("m16n8k128", pairs("f32", "e2m1"), _at(SPARSE_F4, (9, 1)), _scaled("mxf4nvf4", 4, "ue8m0"))


def _wmma() -> Iterator[SyntaxRow]:
    def mma(shapes: str, types: tuple[str, ...], needs: Needs, choices: Choices = ANY_LAYOUT) -> SyntaxRow:
        return SyntaxRow("wmma.mma", "9.7.14.4.5", shapes, types, needs, choices)

    yield mma(WMMA_SHAPES, pairs("f16 f32 f16,f32 f32,f16", "f16"), SM_70)
    yield mma(WMMA_SHAPES, equal("s32", "u8 s8"), _from(72, 6, 3), ANY_LAYOUT | SATFINITE)
    yield mma(WMMA_SHAPES, pairs("f32", "bf16"), _from(80, 7, 0))
    yield mma("m16n16k8", pairs("f32", "tf32"), _from(80, 7, 0))
    yield mma("m8n8k4", pairs("f64", "f64"), _from(80, 7, 0), ANY_LAYOUT | ROUNDING)
    yield mma("m8n8k32", equal("s32", "u4 s4"), _from(75, 6, 3), ROW_COL | SATFINITE)
    yield mma("m8n8k128", pairs("s32", "b1"), _from(75, 6, 3), ROW_COL | {"bit_op": ("xor",)})
    yield mma("m8n8k128", pairs("s32", "b1"), _from(80, 7, 1), ROW_COL | {"bit_op": ("and",)})


def _wmma_memory() -> Iterator[SyntaxRow]:
    anywhere: Choices = {"layout": ("row", "col"), "space": (None, "global", "shared", "shared::cta")}

    def moved(operand: str, shapes: str, types: str, needs: Needs, choices: Choices = anywhere) -> SyntaxRow:
        family, section = ("wmma.store", "9.7.14.4.4") if operand == "d" else ("wmma.load", "9.7.14.4.3")
        return SyntaxRow(family, section, shapes, tuple(types.split()), needs, choices | {"operand": (operand,)}, operand)

    for operand in "ab":
        packed: Choices = anywhere | {"layout": ("row",) if operand == "a" else ("col",)}
        yield moved(operand, WMMA_SHAPES, "f16", SM_70)
        yield moved(operand, WMMA_SHAPES, "u8 s8", _from(72, 6, 3))
        yield moved(operand, WMMA_SHAPES, "bf16", _from(80, 7, 0))
        yield moved(operand, "m16n16k8", "tf32", _from(80, 7, 0))
        yield moved(operand, "m8n8k4", "f64", _from(80, 7, 0))
        yield moved(operand, "m8n8k32", "u4 s4", _from(75, 6, 3), packed)
        yield moved(operand, "m8n8k128", "b1", _from(75, 6, 3), packed)
    for operand in "cd":
        yield moved(operand, WMMA_SHAPES, "f16 f32", SM_70)
        yield moved(operand, WMMA_SHAPES, "s32", _from(72, 6, 3))
        yield moved(operand, "m16n16k8", "f32", _from(80, 7, 0))
        yield moved(operand, "m8n8k4", "f64", _from(80, 7, 0))
        yield moved(operand, "m8n8k32 m8n8k128", "s32", _from(75, 6, 3))


def _movers() -> Iterator[SyntaxRow]:
    shared: Choices = {"space": (None, "shared", "shared::cta")}

    def row(family: str, section: str, shape: str, needs: Needs, choices: Choices) -> SyntaxRow:
        return SyntaxRow(family, section, shape, ("",), needs, choices, "")

    load, store = ("ldmatrix", "9.7.14.5.15"), ("stmatrix", "9.7.14.5.16")
    b16: Choices = shared | {"num": (1, 2, 4), "trans": (False, True), "element": ("b16",)}
    unpacked: Choices = shared | {"element": ("b8x16",), "src_fmt": ("b6x16_p32", "b4x16_p64")}
    yield row(*load, "m8n8", _from(75, 6, 5), b16)
    yield row(*load, "m16n16", NARROW, shared | {"num": (1, 2), "trans": (True,), "element": ("b8",)})
    yield row(*load, "m16n16", NARROW, unpacked | {"num": (1, 2), "trans": (True,)})
    yield row(*load, "m8n16", NARROW, unpacked | {"num": (1, 2, 4)})
    yield row(*store, "m8n8", _from(90, 7, 8), b16)
    yield row(*store, "m16n8", NARROW, shared | {"num": (1, 2, 4), "trans": (True,), "element": ("b8",)})
    yield row("movmatrix", "9.7.14.5.17", "m8n8", _from(75, 7, 8), {"trans": (True,), "element": ("b16",)})


def _wgmma() -> Iterator[SyntaxRow]:
    def row(
        types: tuple[str, ...], k: int, needs: Needs, choices: Choices | None = None, *, sparse: bool = False, every_n: bool = True
    ) -> SyntaxRow:
        # integer and single-bit forms have no odd multiples of 8 above 24: 9.7.15.2
        sizes = [n for n in range(8, 257, 8) if every_n or n <= 24 or n % 16 == 0]
        family, section = ("wgmma.sp", "9.7.15.6.3") if sparse else ("wgmma", "9.7.15.5.2")
        return SyntaxRow(family, section, " ".join(f"m64n{n}k{k}" for n in sizes), dab(types), needs, choices or {}, "dab")

    for sparse in (False, True):
        since: Needs = (("sm_90a", (8, 2) if sparse else (8, 0)),)
        k = 2 if sparse else 1
        yield row(pairs("f16 f32", "f16"), 16 * k, since, sparse=sparse)
        yield row(pairs("f32", "bf16"), 16 * k, since, sparse=sparse)
        yield row(pairs("f32", "tf32"), 8 * k, since, sparse=sparse)
        yield row(pairs("f16 f32", FP8), 32 * k, since, sparse=sparse)
        yield row(equal("s32", "u8 s8"), 32 * k, since, SATFINITE, sparse=sparse, every_n=False)
        mixed = tuple(types for types in pairs("s32", "u8 s8") if types not in equal("s32", "u8 s8"))
        yield row(mixed, 32 * k, (("sm_90a", (8, 4)),), SATFINITE, sparse=sparse, every_n=False)
    yield row(pairs("s32", "b1"), 256, (("sm_90a", (8, 0)),), {"bit_op": ("and",)}, every_n=False)
    for name, section in (("fence", "9.7.15.7.1"), ("commit_group", "9.7.15.7.2"), ("wait_group", "9.7.15.7.3")):
        yield SyntaxRow(f"wgmma.{name}", section, "", ("",), (("sm_90a", (8, 0)),), {}, "")


@cache
def syntax_rows() -> dict[Instruction, SyntaxRow]:
    """From every instruction to the row that gives it."""
    rows: dict[Instruction, SyntaxRow] = {}
    for row in (*_mma(), *_mma_sp(), *_wmma(), *_wmma_memory(), *_movers(), *_wgmma()):
        for op in row.instructions():
            assert op not in rows, f"{op} stands in two rows"
            rows[op] = row
    return rows
