"""Own kernels with what no compiler writes: equal in every word of tensor memory to the manual's formulas, with no fault and no note."""

import shutil
import subprocess

import pytest
from support.sampling import sample_cases
from support.tcgen05_own_kernels import OwnKernel, module_text, own_kernels, run_own_kernel

KERNELS = own_kernels()
USUAL = ("shift",)  # without products, which take longest to compile


@pytest.mark.parametrize("name", sample_cases(KERNELS, USUAL))
def test_a_kernel_leaves_the_words_of_the_formulas(name):
    kernel = KERNELS[name]()
    found, notes = run_own_kernel(name, kernel)
    wrong = int((found != kernel.expected).sum())
    assert wrong == 0, f"{wrong} of {found.size} words"
    assert (kernel.expected != kernel.cells).any()
    assert notes == ()


def test_there_are_many_kernels():
    assert len(KERNELS) >= 40


@pytest.mark.full
@pytest.mark.skipif(shutil.which("ptxas") is None, reason="NVIDIA's assembler is not installed here")
def test_the_assembler_takes_every_kernel(tmp_path):
    by_target: dict[str, dict[str, OwnKernel]] = {}
    for name, make in KERNELS.items():
        kernel = make()
        by_target.setdefault(kernel.target, {})[name] = kernel
    assert set(by_target) == {"sm_100a", "sm_103a"}
    for target, kernels in by_target.items():
        # each kernel has its own labels in braces of its own, and its own shared variables
        path = tmp_path / f"{target}.ptx"
        path.write_text(module_text(kernels))
        done = subprocess.run(
            ["ptxas", f"-arch={target}", str(path), "-o", str(tmp_path / "out")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[:2000]
