"""Several JAX processes of one job on this machine's CPUs: the bits of one process, and the same program text in each.

`benchmarks/several_gpus.py` computes the items and compares every word. It does the same on GPUs.
"""

import json
import os
import subprocess
import sys

import pytest
from support import pages

SCRIPT = pages.ROOT / "benchmarks/several_gpus.py"
USUAL = ("gemm, N sharded",)
ITEMS = (
    *USUAL, "training step, emulate", "matmul fp8, gradients", "gemm, batch sharded", "matmul nvfp4, N sharded", "attention, batch sharded",
    "ragged_dot, N sharded", "fuzz.find_mismatches", "each process alone",
)  # fmt: skip


def run_script(*words):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pages.ROOT)}
    command = [sys.executable, str(SCRIPT), "--size", "64", "--repeats", "1", "--cases", "4000", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)


@pytest.mark.parametrize(
    ("processes", "items"),
    [(2, USUAL), pytest.param(2, ITEMS, marks=pytest.mark.full), pytest.param(4, ITEMS, marks=pytest.mark.full)],
    ids=["two", "two, every item", "four, every item"],
)
def test_several_processes_have_the_bits_and_the_programs_of_one(processes, items, tmp_path):
    done = run_script("--processes", str(processes), "--limit", "150", "--json", str(tmp_path / "lines.json"), "--items", *items)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    lines = json.loads((tmp_path / "lines.json").read_text())["lines"]
    assert [(line["item"], line["processes"]) for line in lines] == [(name, count) for count in (1, processes) for name in items]
    for line in lines:
        assert line["wrong"] == 0 and line["programs"] == 1 and line["words"] > 1000, line


@pytest.mark.full
def test_a_late_item_is_reported_and_not_waited_for():
    done = run_script("--limit", "0.2", "--items", USUAL[0])
    assert done.returncode == 1
    assert done.stdout.count("FAILED: not ended within 0.2 s") == 2 and "2 faults" in done.stdout
