"""Which fragment an instruction's operands have, over the whole catalogue, and the tables that `tcemu show --fragments` prints."""

import re

import numpy as np
import pytest

from tcemu.cli import main
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.operand_fragments import register_fragments
from tcemu.engine.isa.syntax_table import syntax_rows
from tcemu.faces.commands.catalog_commands import fragment_table

FIELD = 4  # bits of a field of metadata
F16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
DRAWN = [
    F16,
    "mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64",
    "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32",
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16",
    "ldmatrix.sync.aligned.m8n8.x2.trans.b16",
    "movmatrix.sync.aligned.m8n8.trans.b16",
    "wmma.load.a.sync.aligned.row.m16n16k16.f16",
]


def bits(op, name):
    if name in ("e", "sp_meta"):
        return FIELD
    if name.startswith("scale"):
        return 8
    return op.container_bits(name)


def test_every_fragment_fills_the_operands_registers():
    checked = 0
    for op in syntax_rows():
        for name, fragment in register_fragments(op).items():
            assert fragment.elements * bits(op, name) == 32 * op.register_count(name), f"{op}: {name}"
            checked += 1
    assert checked > 5_000


def test_instructions_without_registers_have_no_fragments():
    assert register_fragments(parse("wgmma.fence.sync.aligned")) == {}


@pytest.mark.parametrize("spelling", DRAWN)
def test_a_table_can_be_read_back(spelling):
    """The cells, expanded, put each element where the fragment's index says it is; copies aside, each place once."""
    for fragment in register_fragments(parse(spelling)).values():
        index = fragment.index().reshape(-1, fragment.elements)
        places = []
        for line in fragment_table(fragment):
            if line.startswith("["):
                continue
            assert "more" not in line
            for lane, first, last in re.findall(r"T(\d+):(\d+)(?:-(\d+))?", line):
                places += [index[int(lane), element] for element in range(int(first), int(last or first) + 1)]
        np.testing.assert_array_equal(places, np.arange(np.prod(fragment.shape)))


def test_wide_rows_end_in_a_count(capsys):
    assert main(["show", "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16", "--fragments"]) == 0
    printed = capsys.readouterr().out
    assert "lanes counted through four warps" in printed
    assert len(re.findall(r"\.\.\. 112 more", printed)) == 64


def test_show_prints_the_tables_when_asked(capsys):
    assert main(["show", F16]) == 0
    assert "T5:" not in capsys.readouterr().out
    assert main(["show", F16, "--fragments"]) == 0
    printed = capsys.readouterr().out
    assert "\na: " in printed and "\nd: " in printed
    assert "  9  T4:2-3  T5:2-3  T6:2-3  T7:2-3  T4:6-7  T5:6-7  T6:6-7  T7:6-7" in printed
