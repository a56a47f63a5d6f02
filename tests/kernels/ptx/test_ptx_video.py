"""Video instructions against Python's integers, and against the words of an H200."""

import random

import numpy as np
import pytest
from oracles.ptx_video_reference import reference
from support.ptx_scalars import HERE, draw, run_operations
from support.tensor_map_bits import recording

from tcemu.base.errors import Unsupported
from tcemu.kernels.ptx.scalar.video_instructions import PACKED, SCALAR, prepare_video
from tcemu.ptx import PtxError, parse, run

HEAD = """.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 p) { .reg .b32 %r<9>; .reg .b64 %d<4>; .reg .pred %p;
"""
WORDS = 48


def drawn_statement(name, pick):
    """An opcode and its operands, of any form that the manual has."""
    kind = lambda: pick.choice(("u32", "s32"))
    sources = lambda count: [f"%r{i}" for i in range(2, 2 + count)]
    comparison = pick.choice(("eq", "ne", "lt", "le", "gt", "ge"))
    if name in PACKED:
        count, last = int(name[-1]), pick.choice(("", "", ".add"))
        letter = "h" if count == 2 else "b"
        sat = pick.choice(("", ".sat")) if not last and "set" not in name else ""
        types = f".{kind()}.{kind()}.{comparison}" if "set" in name else f".{kind()}.{kind()}.{kind()}"
        mask = "".join(str(i) for i in reversed(range(count)) if pick.random() < 0.7) or "0"
        chosen = lambda: "." + letter + "".join(str(pick.randrange(2 * count)) for _ in range(count))
        d = pick.choice(("%r1", f"%r1.{letter}{mask}"))
        a, b = (each + pick.choice(("", chosen())) for each in sources(2))
        return name + types + sat + last, [d, a, b, "%r4"]
    part = lambda: pick.choice(("", ".b0", ".b1", ".b2", ".b3", ".h0", ".h1"))
    sat, form = pick.choice(("", ".sat")), pick.choice(("two", "second", "merge", "third"))
    a, b = (each + part() for each in sources(2))
    if name == "vmad":
        po, scale = pick.choice(("", "", ".po")), pick.choice(("", ".shr7", ".shr15"))
        signs = ["", "", ""] if po else [pick.choice(("", "", "-")) for _ in range(3)]
        signs[2] = "" if signs[0] != signs[1] else signs[2]  # ptxas rejects a negated product and a negated c
        return f"vmad.{kind()}.{kind()}.{kind()}{po}{sat}{scale}", ["%r1", signs[0] + a, signs[1] + b, signs[2] + "%r4"]
    second = f".{pick.choice(('add', 'min', 'max'))}" if form == "second" else ""
    if name == "vset":
        opcode = f"vset.{kind()}.{kind()}.{comparison}{second}"
    elif name in ("vshl", "vshr"):
        opcode = f"{name}.{kind()}.{kind()}.u32{sat}.{pick.choice(('clamp', 'wrap'))}{second}"
    else:
        opcode = f"{name}.{kind()}.{kind()}.{kind()}{sat}{second}"
    d = "%r1" + (part() or ".b0" if form == "merge" else "")
    return opcode, [d, a, b, *(["%r4"] if form != "two" else [])]


def compare_statements(statements, seed):
    text = HEAD + "\n".join(f"{opcode} {', '.join(operands)};" for opcode, operands in statements) + "\nret; }"
    module = parse(text)
    assert parse(str(module)) == module
    made = [prepare_video(statement, HERE) for statement in module.functions["k"].statements[:-1]]
    rng, wrong = np.random.default_rng(seed), []
    values = [[draw("u32", WORDS, rng) for _ in each.sources] for each in made]
    for (opcode, operands), given, (found,) in zip(statements, values, run_operations(made, values), strict=True):
        for row, got in zip(zip(*given, strict=True), found, strict=True):
            want = reference(opcode, operands, list(map(int, row)))
            if int(got) != want:
                wrong.append((opcode, operands, [hex(x) for x in row], hex(got), hex(want)))
                break
    assert not wrong, f"{len(wrong)} of {len(statements)}: {wrong[:8]}"


def test_video_instructions_compute_what_the_reference_says():
    pick = random.Random(1)
    compare_statements([drawn_statement(name, pick) for name in (*SCALAR, *PACKED) for _ in range(2)], 1)


@pytest.mark.full
@pytest.mark.parametrize("name", (*SCALAR, *PACKED))
def test_all_forms_of_video_instructions(name):
    pick = random.Random(name)
    compare_statements([drawn_statement(name, pick) for _ in range(200)], 2)


def compare_recorded(start, step):
    """Compare statements with an H200's words, and count the words."""
    found = recording()["video"]
    operands, rows = np.array(found["operands"], np.uint32), [*zip(found["statements"], found["words"], strict=True)][start::step]
    module = parse(HEAD + "\n".join(statement for statement, _ in rows) + "\nret; }")
    made = [prepare_video(statement, HERE) for statement in module.functions["k"].statements[:-1]]
    words = run_operations(made, [[operands[:, i] for i in range(len(each.sources))] for each in made])
    for (statement, recorded), (result,) in zip(rows, words, strict=True):
        row = [int(x) for x in operands[0]]
        opcode, _, rest = statement.rstrip(";").partition(" ")
        names = [name.strip() for name in rest.split(",")]
        assert np.asarray(result).tolist() == recorded, statement
        assert reference(opcode, names, row[: len(names) - 1]) == recorded[0], statement
    return len(rows) * len(operands)


def test_recorded_words_of_an_h200():
    assert compare_recorded(0, 24) == 960


@pytest.mark.full
def test_all_recorded_words_of_an_h200():
    assert compare_recorded(0, 1) == 22_930


def test_bytes_within_a_kernel():
    """As __vabsdiffu4 and __vsadu4 of CUDA are compiled, and statements that differ in selectors alone."""
    body = """
    ld.param.u64 %d0, [p]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 24; add.u64 %d0, %d0, %d1; mov.u32 %r3, 100; setp.lt.u32 %p, %r0, 5;
    ld.global.v2.u32 {%r1, %r2}, [%d0]; vabsdiff4.u32.u32.u32 %r4, %r1, %r2, %r3; st.global.u32 [%d0+8], %r4;
    vabsdiff4.u32.u32.u32.add %r4, %r1, %r2, %r3; st.global.u32 [%d0+12], %r4;
    vadd.u32.u32.u32 %r4, %r1.b0, %r2.b3; st.global.u32 [%d0+16], %r4;
    @%p vadd.u32.u32.u32 %r4, %r1.b1, %r2.b3; st.global.u32 [%d0+20], %r4;
    ret; }"""
    data = np.random.default_rng(2).integers(0, 2**32, (8, 6), np.uint32)
    found = run(HEAD + body, grid=1, block=8, args=[data], target="H100")[0]
    octets = data[:, :2].copy().view(np.uint8).reshape(8, 2, 4).astype(int)
    distance = abs(octets[:, 0] - octets[:, 1])
    assert np.array_equal(found[:, 2], distance.astype(np.uint8).view(np.uint32)[:, 0])
    assert np.array_equal(found[:, 3], distance.sum(-1) + 100)
    assert np.array_equal(found[:, 4], octets[:, 0, 0] + octets[:, 1, 3])
    assert np.array_equal(found[:, 5], np.where(np.arange(8) < 5, octets[:, 0, 1] + octets[:, 1, 3], found[:, 4]))


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("vadd.s32.s32.u32.add %r1.b0, %r2, %r3, %r4;", "exclude each other"),
        ("vadd.s32.s32.u32 %r1.b0, %r2, %r3;", "it has 3 operands; expected 4"),
        ("vadd.s32.s32.u32 %r1, %r2.h2, %r3;", "its selector is none of vadd's"),
        ("vadd.s32.s32.u32 %r1, -%r2, %r3;", "vmad can be negated"),
        ("vadd.s32.s32.u32 %r1, %r2, %d3;", "%d3, a register of .b64"),
        ("vshl.u32.u32.s32.clamp %r1, %r2, %r3;", "needs u32"),
        ("vshl.u32.u32.u32 %r1, %r2, %r3;", "needs clamp or wrap"),
        ("vmad.s32.s32.s32.po %r1, -%r2, %r3, %r4;", "exclude each other"),
        ("vmad.s32.s32.s32 %r1, %r2, -%r3, -%r4;", "either one of a and b, or c"),
        ("vmad.s32.s32.s32 -%r1, %r2, %r3, %r4;", "vmad can be negated"),
        ("vadd2.u32.u32.s32.sat.add %r1, %r2, %r3, %r4;", "not supported"),
        ("vadd2.u32.u32.u32 %r1, %r2, %r3;", "expected 4"),
        ("vadd4.u32.u32.u32 %r1.b301, %r2, %r3, %r4;", "its selector is none of vadd4's"),
        ("vadd2.u32.u32.u32 %r1, %r2.h45, %r3, %r4;", "its selector is none of vadd2's"),
        ("vadd2.u32.u32.u32 {%r1}, %r2, %r3, %r4;", "a vector"),
        ("vadd2.u32.u32.u32 %r1, %laneid, %r3, %r4;", "special register"),
        ("vmad.s32.s32.s32 %r1, -%r2.x, %r3, %r4;", "%r2.x is no part of a register"),
        ("add.u32 %r1, %r2.h0, %r3;", "%r2 has no element .h0"),
    ],
)
def test_what_ptxas_refuses_is_refused(statement, said):
    with pytest.raises((Unsupported, PtxError), match=said):
        run(HEAD + statement + " ret; }", grid=1, block=32, args=[np.zeros(9, np.uint32)], target="H100")
