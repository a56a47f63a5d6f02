"""The tensor-core instructions of `tcemu.ptx.run`: the manual's examples, and each instruction against the operation called directly."""

import numpy as np
import pytest
from support import ptx_statements
from support.manual_examples import EXAMPLES, SLIPS
from support.sampling import sample_cases

import tcemu
from tcemu import ptx
from tcemu.engine.backends.native.native_statement import has_kernel
from tcemu.engine.isa.syntax_table import syntax_rows

DISTINCT = list(dict.fromkeys(SLIPS.get(statement, ("", statement))[1] for _, statement in EXAMPLES))
USUAL_EXAMPLES = [
    next(statement for statement in DISTINCT if part in statement)
    for part in (
        "bidA",
        "[D]",
    )
]
INSTRUCTIONS = [str(op) for op in syntax_rows() if has_kernel(op)]
USUAL = [
    next(spelling for spelling in INSTRUCTIONS if part in spelling)
    for part in (
        "m16n8k64.row.col.satfinite.s32.s8.u8",
        "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f16", "stmatrix.sync.aligned.m8n8.x4.trans",
    )
]  # fmt: skip


def compare_operation(op, variant, words, source=None):
    got, wanted = ptx_statements.run_statement(op, variant, words, source=source), ptx_statements.call_operation(op, variant, words)
    assert got.shape == wanted.shape and np.count_nonzero(got != wanted) == 0 and got.any()


@pytest.mark.parametrize("spelling", sample_cases(INSTRUCTIONS, USUAL))
def test_every_instruction_is_the_operation(spelling):
    """Every word agrees: random bits, four cases of warps or warpgroups in three blocks, every variant of the immediates."""
    op = tcemu.parse(spelling)
    variant = ptx_statements.choose_variant(op, INSTRUCTIONS.index(spelling) % 4 if op.warps > 1 else 0)
    compare_operation(op, variant, ptx_statements.draw_words(op, variant))


@pytest.mark.parametrize("statement", sample_cases(DISTINCT, USUAL_EXAMPLES))
def test_examples_of_the_manual_run(statement):
    if not tcemu.parse(statement).operands or "wait_group" in statement:
        entry = f".version 8.6\n.target sm_90a\n.address_size 64\n.visible .entry e() {{ {statement.replace(' N;', ' 3;')} }}"
        assert ptx.run(entry, grid=1, block=128, args=[], target="sm_90a") == []
        return
    op, variant, source, given = ptx_statements.example(statement)
    words = ptx_statements.draw_words(op, variant)
    if given.get("scale_d", "") in ("0", "1"):
        words["scale_d"] = np.full_like(words["scale_d"], int(given["scale_d"]))
    compare_operation(op, variant, words, source)
