"""Faults planted in the description of a step, one at a time, by `tests/mutate_step.py`: what is changed, and that each has a name."""

import json
from pathlib import Path

import pytest
from support import mutations
from support.mutations import cuda_mutants, python_mutants

EQUIVALENT = Path(__file__).parents[3] / "tests/mutants_equivalent.json"
SUBJECTS = ("description", "loops", "cuda")
SOURCE = '''"""A docstring with 1 < 2."""
LIMIT = 3
def f(x, signed=True):
    """0 <= 1."""
    assert x >= 0
    y = (x - LIMIT).max(0)
    y = y >> (LIMIT + 1)
    return (y < 0x10) & (x == 0) if signed else cut(y, 2)
'''
CUDA = """// 1 < 2
#define MASK 7
template <int N> int f(int x, int y) {
    return x < N && max(x, 0x10u) - y ? 1.5f : y << 2;  // x < N
}
"""


@pytest.fixture
def planted(monkeypatch, tmp_path):
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "a.cu").write_text(CUDA)


def changed_lines(mutants):
    return {mutant.diff().splitlines()[-1][1:].strip() for mutant in mutants}


def test_python_is_changed_at_one_place_at_a_time(planted):
    found = python_mutants("a.py")
    for mutant in found:
        compile(mutant.source(), "a.py", "exec")
        assert mutant.diff().count("\n+") == mutant.diff().count("\n-") == 1
    assert changed_lines(found) == {
        "LIMIT = (2)", "LIMIT = 4", "def f(x, signed=False):",
        "y = (x + LIMIT).max(0)", "y = (LIMIT - x).max(0)", "y = (x - LIMIT).min(0)", "y = (x - LIMIT)", "y = (x - LIMIT).max(1)",
        "y = (x - LIMIT).max((-1))",
        "y = y << (LIMIT + 1)", "y = y", "y = y >> (((LIMIT + 1) + 1))", "y = y >> (LIMIT - 1)", "y = y >> (LIMIT + 2)",
        "y = y >> (LIMIT + (0))",
        *(
            f"return {text} if signed else cut(y, 2)"
            for text in (
                "(y < 0x10) | (x == 0)", "(y <= 0x10) & (x == 0)", "(y < 17) & (x == 0)", "(y < (15)) & (x == 0)", "(y < 0x0) & (x == 0)",
                "(y < 0x10) & (x != 0)", "(y < 0x10) & (x == 1)", "(y < 0x10) & (x == (-1))", "(y < 0x10)", "(x == 0)",
            )
        ),
        *(f"return (y < 0x10) & (x == 0) if signed else {text}" for text in ("cut(y, 3)", "cut(y, (1))", "y")),
        "return cut(y, 2) if signed else ((y < 0x10) & (x == 0))",
    }  # fmt: skip


def test_cuda_is_changed_at_one_place_at_a_time(planted):
    lines = {line.partition("  //")[0] for line in changed_lines(cuda_mutants("a.cu"))}
    assert lines == {
        f"return {text};"
        for text in (
            "x <= N && max(x, 0x10u) - y ? 1.5f : y << 2", "x < N || max(x, 0x10u) - y ? 1.5f : y << 2",
            "x < N && min(x, 0x10u) - y ? 1.5f : y << 2", "x < N && max(x, 17u) - y ? 1.5f : y << 2",
            "x < N && max(x, 15u) - y ? 1.5f : y << 2", "x < N && max(x, 0x0u) - y ? 1.5f : y << 2",
            "x < N && max(x, 0x10u) + y ? 1.5f : y << 2", "x < N && max(x, 0x10u) - y ? 1.5f : y >> 2",
            "x < N && max(x, 0x10u) - y ? 1.5f : 2 << y", "x < N && max(x, 0x10u) - y ? 1.5f : y << 3",
            "x < N && max(x, 0x10u) - y ? 1.5f : y << 1",
        )
    }  # fmt: skip


def all_names():
    from mutate_step import all_mutants

    return {subject: [mutant.name for mutant in all_mutants(subject)] for subject in SUBJECTS}


def test_every_mutant_has_a_name_and_every_reason_a_mutant():
    names = all_names()
    assert len(names["description"]) >= 300 and len(names["loops"]) >= 60 and len(names["cuda"]) >= 40
    every = [name for of_subject in names.values() for name in of_subject]
    assert len(every) == len(set(every))
    reasons = json.loads(EQUIVALENT.read_text())
    assert set(reasons) <= set(every)
    assert all(reason.endswith(".") and len(reason) > 20 for reason in reasons.values())
