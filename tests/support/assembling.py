"""The kernels' text through NVIDIA's compiler, by NVRTC or by nvcc, whichever is here. It needs no GPU."""

import shutil
import subprocess

import pytest

from tcemu.engine.backends.cuda import nvrtc

missing = shutil.which("nvcc") is None and nvrtc.library() is None
assembled_here = pytest.mark.skipif(missing, reason="neither nvcc nor NVRTC is installed here")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")


def assemble(text, architecture, folder):
    """Raises if the text does not compile, or, by nvcc, not without a warning."""
    if nvrtc.library() is not None:
        assert len(nvrtc.compile_text(text, architecture)) > 1000
        return
    (folder / "kernel.cu").write_text(text)
    command = ["nvcc", "--cubin", f"-arch={architecture}", "-Werror", "all-warnings", "-o", str(folder / "out"), str(folder / "kernel.cu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
