"""Floating-point instructions of PTX against fractions: every opcode of every row that promises bits."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.ptx_float_reference import reference
from support.ptx_opcodes import opcodes
from support.ptx_scalars import draw, operation, run

from tcemu.errors import Unsupported
from tcemu.ptx.scalar.float_table import FLOAT_ROWS
from tcemu.ptx.scalar.integer_table import INTEGER_ROWS

FLOAT = re.compile(r"\.(f16|bf16|f32|f64)(x2)?$")
ARITHMETIC = sorted(
    opcode for key, row in FLOAT_ROWS.items() if not key.startswith("cvt") for opcode in opcodes(key.partition(".")[0], row)
)
COMPARISONS = sorted(
    opcode for key in ("setp", "set", "testp", "copysign", "slct") for opcode in opcodes(key, INTEGER_ROWS[key]) if FLOAT.search(opcode)
)


def operations(names):
    """The operations of the opcodes that are exact; some combinations are none, and their `Prepare` says so."""
    found = {}
    for name in names:
        try:
            made = operation(name)
        except Unsupported as error:
            assert "three operands" in str(error), name
            continue
        if made.exact:
            found[name] = made
    return found


def differing(found, count, seed):
    """How many of the values of all opcodes differ from the reference, and the first of each opcode that does."""
    rng = np.random.default_rng(seed)
    operands = [[draw(kind, count, rng) for kind in each.sources] for each in found.values()]
    wrong, seen = [], 0
    for name, values, words in zip(found, operands, run(list(found.values()), operands), strict=True):
        wanted = reference(name)
        for row, got in zip(zip(*values, strict=True), zip(*words, strict=True), strict=True):
            seen += 1
            expected = tuple(map(int, wanted(*map(int, row))))
            if tuple(map(int, got)) != expected:
                wrong.append((name, [hex(x) for x in row], [hex(x) for x in got], [hex(x) for x in expected]))
                break
    assert not wrong, f"{len(wrong)} of {len(found)} opcodes: {wrong[:12]}"
    return seen


def test_arithmetic_is_that_of_fractions():
    found = operations(name for name in ARITHMETIC if name.replace(".", ".rn.", 1) not in ARITHMETIC)  # what rounds as .rn if told nothing
    assert differing(found, 60, 2) == 60 * len(found) and len(found) > 150


def test_comparisons_are_those_of_fractions():
    found = operations([name for at, name in enumerate(COMPARISONS) if at % 6 == 0])
    assert differing(found, 60, 3) == 60 * len(found) and len(found) > 100


@pytest.mark.full
def test_many_operands_of_arithmetic_and_comparisons():
    found = operations(ARITHMETIC) | operations(COMPARISONS)
    assert differing(found, 2000, 4) == 2000 * len(found)
