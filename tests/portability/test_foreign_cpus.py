"""A few arithmetics by code for other CPUs. `foreign_cpus.py` computes all of them before a release."""

import shutil
import sys
from pathlib import Path

import pytest

from tcemu.engine.backends.llvm import xla_call

sys.path.append(str(Path(__file__).parent))
import foreign_cpus


@pytest.mark.full
@pytest.mark.parametrize("cpu", foreign_cpus.CPUS)
def test_code_for_another_cpu_has_the_words_of_the_reference(cpu):
    if reason := xla_call.missing():
        pytest.skip(reason)
    if foreign_cpus.CPUS[cpu].machine == "aarch64":
        programs = ("qemu-aarch64-static", "qemu-aarch64"), (foreign_cpus.ARM_COMPILER,)
        if not all(any(map(shutil.which, names)) for names in programs):
            pytest.skip("qemu-user-static, gcc-aarch64-linux-gnu or libc6-dev-arm64-cross is not installed")
    elif foreign_cpus.platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("code for x86 is run by an x86 CPU")
    found = foreign_cpus.compare(cpu, "0/60", ("tight", "small"))
    assert found["all"] > 10_000 and found["differ"] == 0
