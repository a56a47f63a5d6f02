"""Faults planted in the description of a step, one at a time: `tests/mutate_step.py` finds them, or a file says why they change nothing."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import mutate_step
import pytest
from support import mutations
from support.mutations import cuda_mutants, python_mutants

from tcemu.engine.backends.llvm import xla_call

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests/mutate_step.py"
needs_detectors = pytest.mark.skipif(
    bool(xla_call.missing()) or not (find_spec("bitwuzla") and shutil.which("g++")), reason="needs llvmlite, bitwuzla and g++"
)
SUBJECTS = {"description": 300, "loops": 60, "cuda": 40}  # the fewest mutants that `-m full` has of each
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


def run_script(*words):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    return subprocess.run([sys.executable, str(SCRIPT), *words], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_mutant_has_a_name_and_every_reason_a_mutant():
    every = {subject: mutate_step.all_mutants(subject) for subject in SUBJECTS}
    names = [mutant.name for mutants in every.values() for mutant in mutants]
    assert len(names) == len(set(names))
    reasons = mutate_step.known_equivalents()
    assert set(reasons) <= set(names)
    assert all(reason.endswith(".") and len(reason) > 20 for reason in reasons.values())


def test_the_choice_has_some_of_every_function_and_file():
    for subject, least in SUBJECTS.items():
        every = mutate_step.all_mutants(subject)
        chosen = mutate_step.choose(every, mutate_step.EVERY[subject])
        assert len(chosen) >= least and chosen == mutate_step.choose(reversed(every), mutate_step.EVERY[subject])[::-1]
        assert {mutant.path for mutant in chosen} == set(mutate_step.SUBJECTS[subject])
        assert subject != "description" or {(m.path, m.place) for m in chosen} == {(m.path, m.place) for m in every}


@needs_detectors
def test_a_sample_is_found():
    done = run_script("--sample")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "6 mutants" in done.stdout


@needs_detectors
@pytest.mark.full
def test_all_of_the_description_are_found():
    done = run_script("--subject", "description")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
