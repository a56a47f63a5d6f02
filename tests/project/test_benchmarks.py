"""Every script of benchmarks/ starts: its options in the usual run, its smallest sizes in the full one."""

import contextlib
import io
import os
import runpy
import subprocess
import sys

import pytest
from support import pages

FOLDER = pages.ROOT / "benchmarks"
MODULES = {"harness", "replay_products"}  # imported by scripts
SMALLEST = {
    "fingerprint": "torch-f16 64 64 8192",
    "exponent_classes": "--size 64 --k 32",
    "first_calls": "--size 32 --ways jit eager --settings warm",
    "fuzz": "--cases 64 --repeats 1",
    "gemm": "--sizes 32 --formats f16 s8 --recipes bf16 --repeats 1",
    "mma": "--warps 4 --formats f16 --repeats 1",
    "model": "--layers 1 --width 32 --heads 2 --words 64 --tokens 16 --recipes bf16 --repeats 1 --again",
    "ptx": "--small",
    "ptx_first_calls": "--kernels softmax_warp",
    "ptx_fuzz": "--cases 4",
    "quantize": "--sizes 32 --recipes fp8 --repeats 1",
    "replay_model": f"--check {pages.ROOT / 'tests/golden/replay_model.json.xz'}",
    "replay_rules": "",
    "scaling": "--size 64 --repeats 1",
    "special_functions": "--repeats 1",
    "torch_model": "--layers 1 --recipes bf16 --repeats 1",
    "training": "--width 32 --tokens 16 --batch 1 --recipes bf16 --repeats 1 --deep 2",
    "wgmma": "--warpgroups 2 --formats f16 -n 8 --repeats 1",
    "wmma": "--warps 2 --repeats 1",
}
# scripts that need a GPU or a survey of one, or that tests of replay, special functions and several processes call
ONLY_HELP = {
    "drift_gpu",
    "float32_product_tables",
    "replay_distil",
    "replay_gpu",
    "replay_proposals",
    "several_gpus",
    "special_function_sweep",
    "torch_convolution_rules",
    "torch_product_proposals",
    "torch_product_rules",
}
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in MODULES)
NEEDED = {"torch_model": "torch"}  # packages of an extra


def test_every_script_is_in_the_table():
    assert set(SCRIPTS) == set(SMALLEST) | ONLY_HELP


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if name in NEEDED else ()) for name in SCRIPTS])
def test_a_script_prints_its_options(name, monkeypatch):
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setattr(os, "environ", os.environ.copy())  # some scripts set variables for JAX
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as end:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert end.value.code == 0 and "usage" in printed.getvalue()


@pytest.mark.full
@pytest.mark.parametrize("name", SMALLEST)
def test_a_script_ends_without_a_wrong_word(name):
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    command = [sys.executable, str(FOLDER / f"{name}.py"), *SMALLEST[name].split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=pages.ROOT, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout
