"""`Instruction`: fields, spelling, and the derived facts against the manual's tables."""

import pytest

from tcemu.catalog import instructions, targets
from tcemu.formats import FORMATS
from tcemu.grammar import parse
from tcemu.instructions import spellings

# 32-bit registers of A, B and C as PTX ISA 9.7.14.5.1 to .13 list them in words; an .f64 register is two words
REGISTERS = {
    "mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f16": (2, 2, 4),
    "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32": (2, 2, 8),
    "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64": (2, 2, 4),
    "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32": (1, 1, 2),
    "mma.sync.aligned.m8n8k32.row.col.s32.u4.u4.s32": (1, 1, 2),
    "mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32.xor.popc": (1, 1, 2),
    "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32": (2, 1, 4),
    "mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64": (4, 2, 8),
    "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16": (2, 1, 2),
    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32": (2, 1, 4),
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": (4, 2, 4),
    "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64": (8, 4, 8),
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": (4, 2, 4),
    "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64": (16, 8, 8),
    "mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32": (2, 1, 4),
    "mma.sync.aligned.m16n8k16.row.col.f16.e5m2.e5m2.f16": (2, 1, 2),
    "mma.sync.aligned.m16n8k32.row.col.s32.s4.s4.s32": (2, 1, 4),
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32": (4, 2, 4),
    "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f16.e2m1.e3m2.f16": (4, 2, 2),
    "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e2m1.e2m1.f32.ue8m0": (4, 2, 4),
    "mma.sync.aligned.m16n8k64.row.col.s32.u4.s4.s32": (4, 2, 4),
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0": (4, 2, 4),
    "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc": (2, 1, 4),
    "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc": (4, 2, 4),
}


@pytest.mark.parametrize("spelling", REGISTERS)
def test_registers_equal_the_manuals(spelling):
    op = parse(spelling)
    assert tuple(op.registers(x) for x in "abc") == REGISTERS[spelling]
    assert str(op) == spelling


def test_fields():
    op = parse("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3")
    assert (op.family, op.m, op.n, op.k, op.alayout, op.blayout) == ("mma", 16, 8, 64, "row", "col")
    assert (op.kind, op.block_scale, op.scale_vec, op.stype) == ("mxf4nvf4", True, 4, FORMATS["ue4m3"])
    assert (op.d, op.a, op.b, op.c) == tuple(FORMATS[name] for name in ("f32", "e2m1", "e2m1", "f32"))
    assert (op.satfinite, op.rounding, op.bit_op) == (False, None, None)
    assert (op.byte_ids, op.thread_ids_a, op.thread_ids_b) == ((0,), (0, 1), (0, 1, 2, 3))  # table 37
    assert op.matrix("scale_a") == (16, 4) and op.matrix("scale_b") == (4, 8)  # table 35
    assert op.operands == ("d", "a", "b", "c", "scale_a", "selector_a", "scale_b", "selector_b")
    assert op.registers("scale_a") == 1


def test_defaults_are_the_same_instruction():
    f64 = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64"
    assert parse(f64) == parse(f64 + ".rn") and parse(f64).rounding == "rn" and parse(f64) != parse(f64 + ".rz")
    mxf4 = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale{}.f32.e2m1.e2m1.f32.ue8m0"
    assert parse(mxf4.format("")) == parse(mxf4.format(".scale_vec::2X"))
    assert spellings(parse(mxf4.format(""))) == (mxf4.format(""), mxf4.format(".scale_vec::2X"))


def test_round_trip_and_hash():
    for target in targets():
        for op in instructions(target):
            assert parse(str(op)) == op
            assert all(parse(spelling) is parse(str(op)) for spelling in spellings(op))
            assert parse(op) is op
    everything = {op for target in targets() for op in instructions(target)}
    assert len(everything) == len({str(op) for op in everything})


def test_operand_that_does_not_exist():
    op = parse("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
    for operand in ("e", "scale_a", ""):
        with pytest.raises(ValueError, match="operand"):
            op.registers(operand)
    assert op.byte_ids == op.thread_ids_a == op.thread_ids_b == ()
