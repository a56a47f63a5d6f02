"""The pytest plugin: a file of tests of Triton kernels, run by pytest as users run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'tcemu[triton]'")

from triton_kernels.planted_products import RIGHT, WRONG

import tcemu

FOLDER = Path(__file__).parent
USER_TESTS = """
import numpy as np
import pytest
from triton_kernels import kernels

import tcemu.triton
from tcemu.testing import assert_product_close

as_tensor = tcemu.triton.as_tensor

A, B = (np.random.default_rng(n).normal(size=shape).astype(np.float16) for n, shape in enumerate(((16, 64), (64, 16))))


def product(a, b):
    c = np.zeros((16, 16), np.float32)
    kernels.cluster_kernel[(1,)](as_tensor(a), as_tensor(b), as_tensor(c), M=16, N=16, K=64)
    return c


def test_product(gpu):
    c = product(A, B)
    assert [launch.kernel for launch in gpu.launches] == ["cluster_kernel"]
    assert_product_close(c, A, B, op="f16", target=gpu.target)


@pytest.mark.parametrize("gpu", ["L4"], indirect=True)
def test_wrong(gpu):
    assert gpu.target == "sm_89"
    assert_product_close(product(A, np.roll(B, 16, axis=0)), A, B, op="f16", target=gpu.target)
"""


PLANTED_TESTS = """
import pytest
from triton_kernels.planted_products import RIGHT, WRONG, check


@pytest.mark.parametrize("name", RIGHT)
def test_right(gpu, name):
    check(RIGHT[name], gpu.target)


@pytest.mark.parametrize("name", WRONG)
def test_wrong(gpu, name):
    check(WRONG[name], gpu.target)
"""


@pytest.mark.full
@pytest.mark.parametrize("gpu_name", ["A100", "L4", "H100"])
def test_planted_kernels(tmp_path, gpu_name):
    """Each wrong kernel fails, by an assertion and no other error, and each right one passes."""
    assert len(RIGHT) == 20 and len(WRONG) >= 20
    (tmp_path / "test_planted.py").write_text(PLANTED_TESTS)
    done = _run_pytest(tmp_path, "--tcemu-gpu", gpu_name, "--tb=line")
    passed = {name for name in RIGHT if f"PASSED test_planted.py::test_right[{gpu_name}-{name}]" in done.stdout}
    failed = {name for name in WRONG if f"FAILED test_planted.py::test_wrong[{gpu_name}-{name}] - AssertionError" in done.stdout}
    assert passed == {*RIGHT} and failed == {*WRONG}, done.stdout


def _run_pytest(folder, *options):
    paths = os.pathsep.join([str(Path(tcemu.__file__).parents[2]), str(FOLDER.parents[1])])
    command = [sys.executable, "-m", "pytest", "-p", "tcemu.pytest_plugin", "-p", "no:cacheprovider", "-rA", "-q", *options, str(folder)]
    environment = os.environ | {"PYTHONPATH": paths, "COLUMNS": "400"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


def test_the_fixture_runs_each_test_on_the_named_gpus(tmp_path):
    (tmp_path / "test_user.py").write_text(USER_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntcemu_gpu = H100 A100\n")
    done = _run_pytest(tmp_path)
    for line in (
        "PASSED test_user.py::test_product[H100]",
        "PASSED test_user.py::test_product[A100]",
        "FAILED test_user.py::test_wrong[L4]",
    ):
        assert line in done.stdout, done.stdout
    assert "2 passed" in done.stdout and "further from the exact product" in done.stdout
