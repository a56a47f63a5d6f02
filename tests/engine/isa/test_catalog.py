"""What is legal where, and the errors that say why not."""

import pytest

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.families import spellings
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.legality import check, instructions, targets

# legal mma spellings at PTX ISA 9.0, optional qualifiers left out and written, counted with ptxas 13.0 (sm_70: 12.9)
COUNTS = {
    "sm_70": 12, "sm_75": 31, "sm_80": 79, "sm_86": 79, "sm_89": 95, "sm_90": 110, "sm_90a": 110, "sm_100": 110, "sm_100a": 126,
    "sm_103f": 126, "sm_110a": 126, "sm_120": 110, "sm_120a": 168 + 54, "sm_121f": 168 + 54,
}  # fmt: skip


def legal_spellings(target, family, isa=None):
    """The spellings of a target's instructions, with optional qualifiers left out and written."""
    return [spelling for op in instructions(target, family, isa) for spelling in spellings(op)]


@pytest.mark.parametrize("target", COUNTS)
def test_mma_counts(target):
    assert len(set(legal_spellings(target, "mma", "9.0"))) == COUNTS[target]


@pytest.mark.parametrize(
    ("target", "count"), [("sm_75", 0), ("sm_80", 80), ("sm_89", 88), ("sm_90", 88), ("sm_100a", 92), ("sm_120a", 142 + 54)]
)
def test_mma_sp_counts(target, count):
    assert len(set(legal_spellings(target, "mma.sp", "9.0"))) == count


def test_wgmma_counts():
    """2,436 statements on sm_90a: A in registers or by descriptor, .satfinite after the shape or at the end."""
    ops = instructions("sm_90a", "wgmma") + instructions("sm_90a", "wgmma.sp")
    assert sum(len(op.operand_forms) * (2 if op.satfinite else 1) for op in ops) == 2436
    assert not any(instructions(target, "wgmma") for target in targets() if target != "sm_90a")


def test_sm_90_is_the_sum_of_its_kinds():
    found = legal_spellings("sm_90", "mma")
    assert len(found) == len(set(found)) == 110
    assert all({"sm_90", "sm_90a"} <= set(targets(s)) for s in found)


F8 = "mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16"
MESSAGES = {  # spelling, target, isa -> what the error says
    ("", "sm_90", None): "an empty string: unknown instruction ''; known are mma",
    ("nma.sync", "sm_90", None): "unknown instruction 'nma', did you mean 'mma'?",
    ("mma.sync.aligned.m16n8k16.row.col.ftz.f32.f16.f16.f32", "sm_90", None): "unknown qualifier '.ftz' for mma",
    ("mma.sync.aligned.m16n8k16.row.col.f32.fp16.f16.f32", "sm_90", None): "did you mean .f16?",
    ("mma.sync.m16n8k16.row.col.f32.f16.f16.f32", "sm_90", None): "missing qualifier .aligned;",
    ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16", "sm_90", None): "missing qualifier: the element types, one of .f32.f16.f16.f32",
    ("mma.sync.aligned.m16n8k32.row.col.f32.e3m2.e4m3.f32", "sm_90", None): "missing qualifier .kind::f8f6f4;",
    ("mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32", "sm_90", None):
        "impossible combination: with the other qualifiers, the shape may be .m16n8k16, .m16n8k8, .m8n8k4, not .m16n8k32",
    ("mma.sync.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sm_90", None): 
        "impossible combination: with the other qualifiers, the sync may be .sync, not .sync.sync;",
    ("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32.satfinite", "sm_90", None): "the other qualifiers do not allow .satfinite",
    ("wgmma.mma_async.sync.aligned.m64n20k16.f32.f16.f16", "sm_90a", None):
        "the shape may be .m64n16k16, .m64n24k16, .m64n32k16, .m64n8k16, .m64n40k16, .m64n48k16 and 26 more, not .m64n20k16",
    ("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16", "sm_100a", None): "the target is sm_100a, which has no wgmma at all",
    (F8, "sm_80", None): "needs sm_89 or later; the target is sm_80",
    (F8.replace("row.col", "row.col.kind::f8f6f4").replace("e4m3", "e2m1"), "sm_90a", None):
        "needs sm_120a or sm_120f and its family; the target is sm_90a, which has no mma of e2m1, only of f16, bf16, tf32, e4m3, e5m2,",
    (F8.replace("m16n8k32", "m16n8k64").replace("mma", "mma.sp::ordered_metadata", 1), "sm_90a", None):
        "whose nearest instruction is mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.f32.e4m3.e4m3.f32",
    (F8, "sm_90", "8.4"): "on sm_90 needs PTX ISA 8.7 or newer; the version is 8.4",
    (F8, "sm_91", None): "unknown target 'sm_91'; tcemu knows GPUs by name",
}  # fmt: skip


@pytest.mark.parametrize("asked", MESSAGES)
def test_messages(asked):
    with pytest.raises(Unsupported) as caught:
        check(*asked)
    assert MESSAGES[asked] in str(caught.value)
    if asked[1] in targets():
        assert asked[1] not in targets(asked[0], asked[2])


def test_slots_come_in_any_order():
    straight = parse("mma.sync.aligned.m16n8k64.row.col.satfinite.s32.u4.s4.s32")
    assert parse("mma.m16n8k64.satfinite.aligned.s32.row.u4.s4.col.s32.sync") == straight
    assert parse("mma.sync.aligned.m16n8k64.row.col.satfinite.s32.s4.u4.s32") != straight
    with pytest.raises(Unsupported, match=r"the layouts may be \.row\.col, not \.col\.row"):
        parse("mma.sync.aligned.m16n8k64.col.row.satfinite.s32.u4.s4.s32")


def test_statements():
    op = parse("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32")
    assert (
        parse("@!%p1 mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32\n  {%f0, %f1,%f2,%f3}, {%r0,%r1},{%r2}, {%f0,%f1, %f2,%f3};\n") == op
    )


def test_wrong_arguments():
    for value in (None, 3, b"mma"):
        with pytest.raises(TypeError, match="PTX spelling"):
            parse(value)
    with pytest.raises(TypeError, match="target"):
        check(F8, 90)
    with pytest.raises(ValueError, match="PTX ISA version"):
        check(F8, "sm_90", "eight")
    with pytest.raises(ValueError, match="family 'nma': expected one of mma"):
        instructions("sm_90", "nma")
    assert targets(F8)[0] == "sm_89" and targets(F8) == targets()[targets().index("sm_89") :]
