"""tcgen05 against NVIDIA's assembler, statement by statement, and what is said of wrong ones.

tests/assembler/tcgen05_answers.json.xz holds what ptxas 13.0 and, of sm_107, 13.5 said; record_tcgen05.py beside it asked.
"""

import json
import lzma
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.families import BlockScaling, Instruction, spellings
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.legality import check, describe_instruction, instructions, min_version, targets
from tcemu.engine.isa.syntax_table import syntax_rows
from tcemu.formats import F16, F32, S8, S32, UE4M3

# where the assembler takes what the manual does not give: name -> (reason, which statements)
LAXER = {
    "a number behind kind::i8": (
        "the assembler ignores a constant behind enable-input-d; the manual has scale-input-d for kind::f16 and kind::tf32 alone",
        lambda s: re.search(r"kind::i8.*%p, -?\d+$", s),
    ),
    "a copy's format elsewhere": ("the assembler ignores .b8x16 and its source on every instruction but cp", lambda s: "b8x16" in s),
    "a repeated flag": ("the assembler lets .sync and .NaN stand twice", lambda s: s.split(" ")[0].count(".sync") > 1 or "NaN.NaN" in s),
    "ld and st without .aligned": (
        "the syntax blocks of 9.7.16.8 have .aligned; the assembler does not ask for it",
        lambda s: re.match(r"tcgen05\.(ld|st)", s) and ".aligned" not in s,
    ),
    "dealloc of other sizes": (
        "the assembler takes every multiple of 32; nCols is from 32 to 512 (9.7.16.7.1)",
        lambda s: re.match(r"tcgen05\.dealloc.* (0|544|576|1024)$", s),
    ),
}

# where the assembler refuses what is legal here, because a newer one is stricter on every target: name -> (reason, which statements)
STRICTER = {
    "dealloc of no power of 2": (
        "ptxas 13.5 takes powers of 2 alone, 13.0 every multiple of 32",
        lambda s: re.match(r"tcgen05\.dealloc.* 96$", s),
    ),
}


@cache
def answers():
    return json.loads(lzma.decompress((Path(__file__).parents[2] / "assembler" / "tcgen05_answers.json.xz").read_bytes()))


def statements() -> list[tuple[str, int]]:
    """Statement, and a bit for each column that took it."""
    return [(text, int(mask, 16)) for mask, _, text in (line.partition(" ") for line in answers()["statements"])]


def meaning(statement: str) -> Instruction | None:
    try:
        return parse(f"{statement};")
    except Unsupported:
        return None


def test_no_disagreement_on_any_target_and_version():
    """What the assembler takes is legal here or a named exception, and it takes all that is legal here."""
    assert answers()["assembler"] == {"13.0": "13.0.88", "13.5": "13.5.37"}
    laxer, stricter, used, compared = [], [], Counter(), 0
    for statement, mask in statements():
        op = meaning(statement)
        for number, (assembler, isa, target) in enumerate(answers()["columns"]):
            since = None if op is None else min_version(op, target)
            mine, taken = since is not None and since <= tuple(map(int, isa.split("."))), bool(mask >> number & 1)
            compared += 1
            if taken and not mine:
                name = next((name for name, (_, applies) in LAXER.items() if applies(statement)), None)
                used[name] += 1
                laxer += [(statement, target, isa)] if name is None else []
            elif mine and not taken:
                known = assembler == "13.5" and any(applies(statement) for _, applies in STRICTER.values())
                stricter += [] if known else [(statement, target, isa)]
    assert not laxer, laxer[:20]
    assert not stricter, stricter[:20]
    assert set(used) == set(LAXER), "an exception that nothing needs"
    assert compared == 103_362


def test_every_spelling_was_asked():
    asked = {statement.partition(" ")[0] for statement, _ in statements()}
    mine = [op for op in syntax_rows() if op.family.startswith("tcgen05")]
    assert len(mine) == 758
    assert not [spelling for op in mine for spelling in spellings(op) if spelling not in asked]
    taken = {parse(s.partition(" ")[0]) for s, mask in statements() if mask and meaning(s)}
    assert taken == set(mine)


MESSAGES = {  # statement, target -> what the error says
    ("tcgen05.foo.cta_group::1", "sm_100a"): "unknown instruction 'tcgen05.foo'; expected one of tcgen05.",
    ("tcgen05.mma.cta_group::1.kind::f61 [%r2], %d1, %d2, %r5, %p;", "sm_100a"): "did you mean .kind::f16?",
    ("tcgen05.mma.kind::f16 [%r2], %d1, %d2, %r5, %p;", "sm_100a"): "missing qualifier",
    ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale", "sm_100a"): ".block16",
    ("tcgen05.mma.cta_group::1.kind::f16.ashift [%r2], %d1, %d2, %r5, %p;", "sm_100a"): "a_tmem is %d1, but takes an address in brackets",
    ("tcgen05.mma.cta_group::1.kind::f16 [%r2], %d1, %d2, %r5, %p, 16;", "sm_100a"): "constant from 0 to 15",
    ("tcgen05.mma.cta_group::2.kind::f16 [%r2], %d1, %d2, %r5, {%r1, %r2, %r3, %r4}, %p;", "sm_100a"): "has 4 registers, but takes 8",
    ("tcgen05.mma.cta_group::1.kind::f16 [%r2], %d1, %d2, %r5, %p, 4;", "sm_110a"): "needs sm_100a or sm_100f and its family",
    ("tcgen05.mma.cta_group::1.kind::i8", "sm_103a"): "needs sm_100a or sm_110a; the target is sm_103a",
    ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 48;", "sm_100a"): "nCols is 48, but takes a power of 2",
    ("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r0}, [%r2], %r3;", "sm_100a"): "immHalfSplitoff is %r3",
    ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r0}, [%r2];", "sm_100a"): "operand r has 1 registers, but takes 2",
    ("tcgen05.wait::ld.sync.aligned %r0;", "sm_100a"): "1 operands, but the statement takes no operand",
    ("tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32", "sm_100a"): "needs sm_103f and its family or sm_110f and its family",
    ("tcgen05.shift.cta_group::1.down", "sm_100"): "needs sm_100a or sm_103a or sm_107a or sm_110a",
}  # fmt: skip


@pytest.mark.parametrize("asked", MESSAGES)
def test_messages(asked):
    with pytest.raises(Unsupported) as caught:
        check(*asked)
    assert MESSAGES[asked] in str(caught.value)


def test_parts_of_a_statement():
    op = parse("@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r2], [%r3], %d2, %r5, {%r1, %r2, %r3, %r4}, %p, 3;")
    assert op.argument_form == ("d", "a_tmem", "b_desc", "idesc", "disable_output_lane", "enable_input_d", "scale_input_d")
    assert (op.guard, op.arguments[1]) == ("%p1", "[%r3]")
    assert parse("tcgen05.mma.ws.cta_group::1.kind::f16 [%r2], %d1, %d2, %r5, %p, %d3;").argument_form[-1] == "zero_column_mask"
    assert parse("tcgen05.mma.cta_group::1.kind::f16.collector::a::discard") == parse("tcgen05.mma.cta_group::1.kind::f16")
    assert parse("tcgen05.shift.down.cta_group::1") == parse("tcgen05.shift.cta_group::1.down")
    assert parse("tcgen05.ld.red.sync.aligned.32x32b.x2.u32.max") == parse("tcgen05.ld.red.sync.aligned.32x32b.x2.max.u32")
    assert "operands   d, a_desc, b_desc, idesc, enable_input_d" in describe_instruction("tcgen05.mma.cta_group::1.kind::f16")


F16_PRODUCT = "tcgen05.mma.cta_group::1.kind::f16.m128n256k16.f32.f16.f16"


def test_products():
    """An MMA with what its instruction descriptor says."""
    op = parse(F16_PRODUCT)
    assert (op.m, op.n, op.k, op.d, op.a, op.b, op.kind, op.cta_group, op.family) == (128, 256, 16, F32, F16, F16, "f16", 1, "tcgen05.mma")
    assert str(op) == F16_PRODUCT and op.instruction == parse("tcgen05.mma.cta_group::1.kind::f16") and parse(str(op)) == op
    assert targets(op) == ("sm_100f", "sm_100a", "sm_103f", "sm_103a", "sm_107f", "sm_107a", "sm_110f", "sm_110a")
    assert op.matrix_shape("a") == (128, 16) and op.matrix_shape("d") == (128, 256)
    scaled = parse("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16.m128n256k64.f32.e2m1.e2m1")
    assert scaled.scaling == BlockScaling(4, UE4M3) and scaled.scale_block == 16 and str(scaled).endswith(".f32.e2m1.e2m1.ue4m3")
    ws = parse("tcgen05.mma.ws.sp.cta_group::1.kind::i8.m32n64k64.satfinite.s32.s8.u8")
    assert (ws.ws, ws.sparse, ws.satfinite, ws.d, ws.a, ws.matrix_shape("a")) == (True, True, True, S32, S8, (32, 32))
    assert targets(ws) == ("sm_100a", "sm_110a")
    long_k = parse("tcgen05.mma.cta_group::2.kind::mxf4.block_scale.block32.m256n256k96.f32.e2m1.e2m1.ue8m0")
    assert long_k.scaling.count == 3 and targets(long_k) == ("sm_103a", "sm_107a")
    pairs = "tcgen05.mma.cta_group::2.kind::f8f6f4.m256n{}k32.f16.e4m3.e2m1"
    assert parse(pairs.format(16)).container_bits("b") == 8


WRONG_PRODUCTS = {
    F16_PRODUCT.replace("n256", "n260"): "N is one of 8, 16",
    F16_PRODUCT.replace("m128", "m32"): "M is one of 64, 128, not 32",
    F16_PRODUCT.replace("k16", "k32"): "K of .kind::f16 is 16, not 32",
    F16_PRODUCT.replace("f32.f16.f16", "f32.e4m3.e4m3"): "A of f16, bf16, not e4m3",
    F16_PRODUCT.replace("f32.f16.f16", "f16.bf16.bf16"): "D is f16 only where",
    F16_PRODUCT.replace("f32.f16.f16", "f32.f16.bf16"): "have one type",
    F16_PRODUCT.replace("f32.f16.f16", "f32.f16"): "takes one shape and the types of D, A and B",
    F16_PRODUCT.replace("f32.f16.f16", "satfinite.f32.f16.f16"): "only .kind::i8 saturates",
    F16_PRODUCT.replace("cta_group::1", "cta_group::3"): "unknown qualifier '.cta_group::3'",
    "tcgen05.mma.ws.cta_group::1.kind::f16.m128n96k16.f32.f16.f16": "N is one of 64, 128, 256, not 96",
    "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.m128n128k64.f32.e2m1.e2m1.ue4m3": "the scales are ue8m0, not ue4m3",
    "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.m64n128k32.f32.e4m3.e4m3": "M is one of 128, not 64",
}


@pytest.mark.parametrize("spelling", WRONG_PRODUCTS)
def test_wrong_products(spelling):
    with pytest.raises(Unsupported) as caught:
        parse(spelling)
    assert WRONG_PRODUCTS[spelling] in str(caught.value)


def test_counts_by_target():
    """Spellings, as ptxas_legality of the record counts them: the a and f targets alone have the family."""
    counts = {target: sum(op.family.startswith("tcgen05") for op in instructions(target)) for target in targets()}
    having = {
        "sm_100a": 590,
        "sm_100f": 436,
        "sm_103a": 702,
        "sm_103f": 604,
        "sm_107a": 702,
        "sm_107f": 604,
        "sm_110a": 758,
        "sm_110f": 604,
    }
    assert counts == dict.fromkeys(targets(), 0) | having


NVF4 = "tcgen05.mma{}.cta_group::{}.kind::mxf4nvf4.block_scale.{}.m{}n64k{}.f32.e2m1.e2m1.{}"
FP8 = "tcgen05.mma.cta_group::1.kind::f8f6f4.m128n64k64.f32.e4m3.e5m2"
BOTH, EXACT = ("sm_107f", "sm_107a"), ("sm_107a",)
RUBIN = {  # products that Rubin alone has -> targets; scales per row
    NVF4.format("", 1, "block16", 128, 128, "ue4m3"): (BOTH, 8),
    NVF4.format("", 2, "block32", 256, 128, "ue5m3"): (BOTH, 4),
    NVF4.format(".sp", 1, "block16", 128, 256, "ue5m3"): (EXACT, 8),
    NVF4.format("", 1, "block16", 128, 64, "ue5m3"): (BOTH, 4),
    NVF4.format("", 1, "block32", 128, 64, "ue4m3"): (BOTH, 2),
    "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32.m128n64k64.f32.e4m3.e2m1.ue8m0": (BOTH, 2),
    FP8: (BOTH, None),
}  # fmt: skip


@pytest.mark.parametrize("spelling", RUBIN)
def test_products_of_rubin(spelling):
    """K of 64 and 128, and block scales of ue5m3, of both sizes of blocks: CUTLASS 4.8."""
    op = parse(spelling)
    assert (targets(spelling), op.scaling and op.scaling.count) == RUBIN[spelling]
    assert check(spelling, "Rubin") == op
    with pytest.raises(Unsupported, match=r"needs (sm_107f or )?sm_107a; the target is sm_100a"):
        check(spelling, "B200")
    with pytest.raises(Unsupported, match=r"needs PTX ISA 9\.4 or newer"):
        check(spelling, "sm_107a", isa="9.3")


def test_wrong_products_of_rubin():
    for spelling, said in (
        (FP8.replace("m128n64", "m64n64"), "M is one of 128, not 64"),
        (FP8.replace("m128n64", "m128n8"), "N is one of 16, 32"),
        (FP8.replace("e5m2", "e2m1"), "K = 64 of .kind::f8f6f4 has B of e4m3, e5m2, not e2m1"),
        (FP8.replace("tcgen05.mma", "tcgen05.mma.ws"), "K of .kind::f8f6f4 is 32, not 64"),
        (NVF4.format("", 1, "block32", 128, 64, "ue5m3").replace("mxf4nvf4", "mxf4"), "the scales are ue8m0, not ue5m3"),
    ):
        with pytest.raises(Unsupported) as caught:
            parse(spelling)
        assert said in str(caught.value), spelling
