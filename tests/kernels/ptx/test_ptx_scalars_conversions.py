"""cvt against fractions and ml_dtypes: every opcode."""

from __future__ import annotations

import numpy as np
import pytest
from oracles.ptx_conversion_reference import INTEGERS, reference
from support.ptx_opcodes import opcodes
from support.ptx_scalars import draw, operation, run_operations

from tcemu import ptx
from tcemu.base.errors import NotModelled, Unsupported
from tcemu.kernels.ptx.scalar.scalar_table import FLOAT_ROWS
from tcemu.kernels.ptx.text.ptx_types import KINDS

OPCODES = sorted({opcode for key in FLOAT_ROWS if key.startswith("cvt") for opcode in opcodes(key)})


def find_differing(names):
    made = {}
    for name in names:
        try:
            made[name] = operation(name)
        except (Unsupported, NotModelled) as error:
            assert "PTX ISA" in str(error), name
    return made


def differing(operations, operands):
    wrong, seen = [], 0
    for name, values, words in zip(operations, operands, run_operations(list(operations.values()), operands), strict=True):
        wanted = reference(name)
        for row, got in zip(zip(*values, strict=True), words[0], strict=True):
            seen += 1
            (expected,) = wanted(*map(int, row))
            if int(got) != expected:
                wrong.append((name, [hex(x) for x in row], hex(got), hex(expected)))
                break
    assert not wrong, f"{len(wrong)} of {len(operations)} opcodes: {wrong[:12]}"
    return seen


def draw_operands(operations, count, seed):
    rng = np.random.default_rng(seed)
    return [[draw(kind, count, rng) for kind in each.sources] for each in operations.values()]


def test_conversions_are_those_of_fractions():
    every = find_differing(OPCODES)
    simple = [name for name in every if name.rsplit(".", 1)[1] in INTEGERS and name.rsplit(".", 2)[1] in INTEGERS]
    wide = [name for name in every if "x2" in name or "pack" in name]
    part = {name: every[name] for name in dict.fromkeys([*list(every)[::48], *wide[::6], *simple[::4]])}
    assert differing(part, draw_operands(part, 60, 6)) == 60 * len(part) and len(part) > 25


@pytest.mark.full
def test_all_conversions():
    every = find_differing(OPCODES)
    assert differing(every, draw_operands(every, 300, 7)) == 300 * len(every)


@pytest.mark.full
def test_every_code_of_up_to_16_bits():
    every = {name: each for name, each in find_differing(OPCODES).items() if len(each.sources) == 1 and KINDS[each.sources[0]].bits <= 16}
    operands = [[np.arange(1 << KINDS[each.sources[0]].bits, dtype=np.uint32)] for each in every.values()]
    assert differing(every, operands) == sum(len(values) for (values,) in operands)


@pytest.mark.parametrize("opcode", ["cvt.rs.f16x2.f32", "cvt.rs.satfinite.e4m3x4.f32"])
def test_stochastic_roundings_say_why_they_are_not_run(opcode):
    with pytest.raises(Unsupported, match="random bits"):
        operation(opcode)
    values = "{%f0, %f1, %f2, %f3}" if "x4" in opcode else "%f0, %f1"
    head = ".version 8.7 .target sm_100a .address_size 64 .entry k()"
    text = f"{head} {{ .reg .b32 %r<2>; .reg .f32 %f<4>; {opcode} %r0, {values}, %r1; ret; }}"
    with pytest.raises(Unsupported, match="random bits"):
        ptx.run(text, grid=1, block=32, target="B200")


@pytest.mark.parametrize("opcode", ["cvt.rn.satfinite.s2f6x2.f32", "cvt.rn.satfinite.relu.scaled::n2::ue8m0.s2f6x2.bf16x2"])
def test_what_nobody_knows_of_fixed_point_numbers_is_not_computed(opcode):
    with pytest.raises(NotModelled, match="nobody has words"):
        operation(opcode)


@pytest.mark.parametrize(
    ("opcode", "values", "expected"),
    [
        ("cvt.rn.bf16x2.e2m1x2", (0x7A,), 0x40C0BF80),  # 6 and -1
        ("cvt.rn.satfinite.bf16x2.e5m2x2", (0x7CFC,), 0x7F7FFF7F),  # Inf and -Inf
        ("cvt.rn.scaled::n2::ue8m0.bf16x2.s2f6x2", (0x7F80, 0x8585), 0x42FEC300),  # 127 and -128, as CUTLASS converts int8
        ("cvt.rn.scaled::n2::ue8m0.bf16x2.e4m3x2", (0x3838, 0xFF7F), 0x7FFF3F80),
        ("cvt.rn.scaled::n2::ue8m0.bf16x2.e4m3x2", (0x3801, 0x00FE), 0x00407A80),  # 1 * 2^-127, a subnormal, and 2^-9 * 2^127
        ("cvt.rn.satfinite.relu.scaled::n2::ue8m0.bf16x2.e4m3x2", (0x7EFE, 0xFEFE), 0x7F7F0000),
        ("cvt.rn.satfinite.e2m1x2.bf16x2", (0x40C0BF80,), 0x7A),
    ],
)
def test_pairs_of_bf16_by_hand(opcode, values, expected):
    made = operation(opcode)
    (found,) = run_operations([made], [[np.array([value], np.uint32) for value in values]])
    assert hex(int(found[0][0])) == hex(expected)


@pytest.mark.parametrize("opcode", ["cvt.s32.f32", "cvt.f32.s32", "cvt.f16.f32", "cvt.rn.f64.f32", "cvt.rz.e4m3x2.f32", "cvt.ftz.s32.f64"])
def test_roundings_are_asked_for(opcode):
    with pytest.raises(Unsupported):
        operation(opcode)
