"""The instructions of PTX 9.7.14 and 9.7.15 as products of short lists, with the targets and ISA version that each needs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from re import fullmatch
from typing import Any

from tcemu.formats import FORMATS
from tcemu.instructions import DEFAULT_ROUNDING, DEFAULT_SCALE_VEC, Instruction

Version = tuple[int, int]
# what a row needs: (targets, ISA version) pairs, any of which is enough. "sm_80+": that target or any later one;
# "sm_120f+": the family, from this member on, in its f and a targets; "sm_90a": that target alone
Needs = tuple[tuple[str, Version], ...]


@dataclass(frozen=True)
class Row:
    """One line of a syntax block: every shape with every tuple of types and every choice of the other fields."""

    family: str
    section: str  # of the PTX ISA manual
    shapes: str
    types: tuple[str, ...]  # each "d a b c", as far as the family spells them
    needs: Needs
    choices: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # field of Instruction -> its values

    def instructions(self) -> Iterator[Instruction]:
        for shape, types, *values in product(self.shapes.split(), self.types, *self.choices.values()):
            fields: dict[str, Any] = dict(zip(self.choices, values, strict=True))
            fields |= zip("dabc", (FORMATS[name] for name in types.split()), strict=True)
            if "stype" in fields:
                fields |= {"stype": FORMATS[fields["stype"]], "block_scale": True}
            yield Instruction(family=self.family, **dimensions(shape), **fields)


def dimensions(shape: str) -> dict[str, int]:
    """m16n8k16 -> the fields m, n, k."""
    match = fullmatch(r"m(\d+)n(\d+)(?:k(\d+))?", shape)
    if match is None:
        raise ValueError(f"shape {shape!r}: want m, n and k with a number each, such as m16n8k16")
    return {name: int(value) for name, value in zip("mnk", match.groups(), strict=True) if value is not None}


def pairs(accumulators: str, *multiplicands: str) -> tuple[str, ...]:
    """Types "d a b c" for every a and b of one list, and every accumulator "d" or "d,c"."""
    both = [(d, c) for d, _, c in (pair.partition(",") for pair in accumulators.split())]
    return tuple(f"{d} {a} {b} {c or d}" for names in multiplicands for a, b in product(names.split(), repeat=2) for d, c in both)


ROW_COL = {"alayout": ("row",), "blayout": ("col",)}
ANY_LAYOUT = {"alayout": ("row", "col"), "blayout": ("row", "col")}
SATFINITE = {"satfinite": (False, True)}
ROUNDING = {"rounding": (DEFAULT_ROUNDING, "rz", "rm", "rp")}
FP8, F8F6F4 = "e4m3 e5m2", "e4m3 e5m2 e3m2 e2m3 e2m1"
WITH_F6F4 = tuple(types for types in pairs("f16 f32", F8F6F4) if types not in pairs("f16 f32", FP8))
SM_120: Needs = (("sm_120a", (8, 7)), ("sm_120f+", (8, 8)))
# the manual gives .kind::f8f6f4 to the sm_120 family, as m16n8k32; the assembler (12.9 to 13.5) takes it with two fp8 types
# as m16n8k16 too, and on the sm_100 and sm_110 families, where it means the same as without .kind
KIND_FP8: Needs = (*((f"sm_{family}a", (8, 7)) for family in (100, 120)), *((f"sm_{family}f+", (8, 8)) for family in (100, 110, 120)))


def _scaled(kind: str, scale_vec: int, stype: str) -> dict[str, tuple[Any, ...]]:
    return ROW_COL | {"kind": (kind,), "scale_vec": (scale_vec,), "stype": (stype,)}


_MMA = "9.7.14.5.14"
ROWS = (
    Row("mma", _MMA, "m8n8k4", pairs("f16 f32,f16 f32", "f16"), (("sm_70+", (6, 4)),), ANY_LAYOUT),
    Row("mma", _MMA, "m16n8k8", pairs("f16 f32", "f16"), (("sm_75+", (6, 5)),), ROW_COL),
    Row("mma", _MMA, "m16n8k16", pairs("f16 f32", "f16"), (("sm_80+", (7, 0)),), ROW_COL),
    Row("mma", _MMA, "m16n8k8 m16n8k16", pairs("f32", "bf16"), (("sm_80+", (7, 0)),), ROW_COL),
    Row("mma", _MMA, "m16n8k4 m16n8k8", pairs("f32", "tf32"), (("sm_80+", (7, 0)),), ROW_COL),
    Row("mma", _MMA, "m16n8k32", pairs("f32", FP8), (("sm_89+", (8, 4)),), ROW_COL),
    Row("mma", _MMA, "m16n8k32", pairs("f16", FP8), (("sm_89+", (8, 7)),), ROW_COL),
    Row("mma", _MMA, "m16n8k16", pairs("f16 f32", FP8), (("sm_89+", (8, 7)),), ROW_COL),
    Row("mma", _MMA, "m16n8k16 m16n8k32", pairs("f16 f32", FP8), KIND_FP8, ROW_COL | {"kind": ("f8f6f4",)}),
    Row("mma", _MMA, "m16n8k32", WITH_F6F4, SM_120, ROW_COL | {"kind": ("f8f6f4",)}),
    Row("mma", _MMA, "m16n8k32", pairs("f32", F8F6F4), SM_120, _scaled("mxf8f6f4", DEFAULT_SCALE_VEC["mxf8f6f4"], "ue8m0")),
    Row("mma", _MMA, "m16n8k64", pairs("f32", "e2m1"), SM_120, _scaled("mxf4", DEFAULT_SCALE_VEC["mxf4"], "ue8m0")),
    Row("mma", _MMA, "m16n8k64", pairs("f32", "e2m1"), SM_120, _scaled("mxf4nvf4", 2, "ue8m0")),
    Row("mma", _MMA, "m16n8k64", pairs("f32", "e2m1"), SM_120, _scaled("mxf4nvf4", 4, "ue4m3")),
    Row("mma", _MMA, "m16n8k64", pairs("f32", "e2m1"), (("sm_120a", (9, 1)), ("sm_120f+", (9, 1))), _scaled("mxf4nvf4", 4, "ue8m0")),
    Row("mma", _MMA, "m8n8k4", pairs("f64", "f64"), (("sm_80+", (7, 0)),), ROW_COL | ROUNDING),
    Row("mma", _MMA, "m16n8k4 m16n8k8 m16n8k16", pairs("f64", "f64"), (("sm_90+", (7, 8)),), ROW_COL | ROUNDING),
    Row("mma", _MMA, "m8n8k16", pairs("s32", "u8 s8"), (("sm_75+", (6, 5)),), ROW_COL | SATFINITE),
    Row("mma", _MMA, "m16n8k16 m16n8k32", pairs("s32", "u8 s8"), (("sm_80+", (7, 0)),), ROW_COL | SATFINITE),
    Row("mma", _MMA, "m8n8k32", pairs("s32", "u4 s4"), (("sm_75+", (6, 5)),), ROW_COL | SATFINITE),
    Row("mma", _MMA, "m16n8k32 m16n8k64", pairs("s32", "u4 s4"), (("sm_80+", (7, 0)),), ROW_COL | SATFINITE),
    Row("mma", _MMA, "m8n8k128", pairs("s32", "b1"), (("sm_75+", (7, 0)),), ROW_COL | {"bit_op": ("xor",)}),
    Row("mma", _MMA, "m16n8k128 m16n8k256", pairs("s32", "b1"), (("sm_80+", (7, 0)),), ROW_COL | {"bit_op": ("xor",)}),
    Row("mma", _MMA, "m8n8k128 m16n8k128 m16n8k256", pairs("s32", "b1"), (("sm_80+", (7, 1)),), ROW_COL | {"bit_op": ("and",)}),
)


@cache
def row_of() -> dict[Instruction, Row]:
    """Every instruction with the row that gives it."""
    rows: dict[Instruction, Row] = {}
    for row in ROWS:
        for op in row.instructions():
            assert op not in rows, f"{op} stands in two rows"
            rows[op] = row
    return rows
