"""`tcemu.ptx.compile`: CUDA C++ to PTX by NVRTC, and pointers into buffers."""

import numpy as np
import pytest

from tcemu import ptx
from tcemu.cli import main
from tcemu.engine.backends.cuda import nvrtc

needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="there is no NVRTC: pip install -e '.[cuda]'")
SOURCE = """
#ifndef STEP
#define STEP 1
#endif
template <typename T> __global__ void axpy(T a, const T* x, T* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
extern "C" __global__ void count(int* out) { out[threadIdx.x] = STEP * threadIdx.x; }
"""
POINTERS = """
.version 7.8 .target sm_80 .address_size 64
.visible .entry copy(.param .u64 from, .param .u64 to) {
    .reg .b32 %r<2>; .reg .b64 %rd<4>;
    ld.param.u64 %rd0, [from]; ld.param.u64 %rd1, [to];
    mov.u32 %r0, %tid.x; mul.wide.u32 %rd2, %r0, 4;
    add.u64 %rd0, %rd0, %rd2; add.u64 %rd1, %rd1, %rd2;
    ld.global.u32 %r1, [%rd0]; st.global.u32 [%rd1], %r1; ret; }
"""


def test_an_architecture_that_nvrtc_has_dropped_names_the_toolkit_that_has_it(monkeypatch):
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    assert "7.5 and later. compute_70 is in CUDA 12" in nvrtc.explain_architecture("compute_70")
    assert nvrtc.explain_architecture("compute_75") == nvrtc.explain_architecture("sm_90a") == ""


@pytest.mark.skipif(nvrtc.library() is None or nvrtc.version()[0] != 13, reason="there is no NVRTC 13: pip install -e '.[cuda]'")
def test_a_source_for_volta_says_which_toolkit_compiles_it():
    with pytest.raises(ptx.PtxError, match=r"sm_70: NVRTC 13\.(.|\n)*CUDA 12, from 12\.0"):
        ptx.compile(SOURCE, target="V100")


@needs_nvrtc
def test_templates_by_name_expression():
    module = ptx.compile(SOURCE, target="A100", name_expressions=("axpy<float>", "axpy<double>"))
    assert module.target == "sm_80" and set(module.name_expressions) == {"axpy<float>", "axpy<double>"}
    rng = np.random.default_rng(0)
    for entry, dtype in (("axpy<float>", np.float32), ("axpy<double>", np.float64)):
        x, y = rng.integers(-99, 99, size=(2, 40)).astype(dtype)  # products and sums are exact
        result = ptx.run(module, entry=entry, grid=2, block=32, args=[dtype(3), x, y, 40], target="A100")[1]
        assert np.array_equal(result, 3 * x + y)
    with pytest.raises(ValueError, match=r"axpy<half>.*count"):
        ptx.run(module, entry="axpy<half>", grid=1, block=1, args=[], target="A100")


@needs_nvrtc
def test_options_headers_and_fusion():
    module = ptx.compile(SOURCE, target="sm_90a", options=["-DSTEP=5"])
    assert list(module.entries) == ["count"] and module.target == "sm_90a"
    assert np.array_equal(ptx.run(module, grid=1, block=8, args=[np.zeros(8, np.int32)], target="H100")[0], 5 * np.arange(8))
    product = '#include "mine.h"\nextern "C" __global__ void k(float* x) { *x = *x * FACTOR + 1.0f; }'
    texts = {
        flag: ptx.compile(product, target="A100", headers={"mine.h": "#define FACTOR 3.0f"}, options=[f"--fmad={flag}"]).text
        for flag in ("true", "false")
    }
    assert "fma.rn.f32" in texts["true"] and "fma.rn.f32" not in texts["false"]


@needs_nvrtc
def test_errors_have_the_log():
    with pytest.raises(ptx.PtxError, match=r"source\.cu\(1\).*undefined"):
        ptx.compile('extern "C" __global__ void k() { missing(); }', target="A100")
    with pytest.raises(ptx.PtxError, match="device code alone"):
        ptx.compile("int main() { return 0; }", target="A100")


def test_without_nvrtc_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    with pytest.raises(ptx.PtxError, match=r"\.\[cuda\]"):
        ptx.compile(SOURCE, target="A100")


def test_pointers_into_one_buffer():
    memory = np.arange(16, dtype=np.int32)
    whole = ptx.BufferPointer(memory, offset=8)
    outputs = ptx.run(POINTERS, grid=1, block=4, args=[whole, ptx.BufferPointer(0, offset=32)], target="A100")
    assert len(outputs) == 1 and outputs[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5, 12, 13, 14, 15]
    with pytest.raises(ptx.OutOfBounds, match="byte 64 of from"):
        ptx.run(POINTERS, grid=1, block=4, args=[whole, ptx.BufferPointer(0, offset=56)], target="A100")
    for wrong in (ptx.BufferPointer(1), ptx.BufferPointer(7), ptx.BufferPointer("x")):
        with pytest.raises((ValueError, TypeError), match="to: its BufferPointer"):
            ptx.run(POINTERS, grid=1, block=4, args=[memory, wrong], target="A100")
    with pytest.raises(ValueError, match="offset"):
        ptx.BufferPointer(memory, offset=-4)


def test_pointers_of_several_cases():
    memory = np.arange(2 * 8, dtype=np.int32).reshape(2, 8)
    args = [ptx.BufferPointer(memory, offset=4), ptx.BufferPointer(0, offset=16)]
    (after,) = ptx.run(POINTERS, grid=1, block=2, args=args, target="A100", cases=2)
    assert after.tolist() == [[0, 1, 2, 3, 1, 2, 6, 7], [8, 9, 10, 11, 9, 10, 14, 15]]


@needs_nvrtc
def test_the_command_runs_cuda_files(tmp_path, capsys):
    """`tcemu run FILE.cu`: a template by its C++ name, an option, and a header beside the file."""
    (tmp_path / "factor.h").write_text("#define FACTOR 3\n")
    source = """
    #include "factor.h"
    template <typename T> __global__ void scale(T* x) { x[threadIdx.x] = FACTOR * x[threadIdx.x] + SHIFT; }
    """
    path, out = tmp_path / "scale.cu", tmp_path / "out"
    path.write_text(source)
    command = ["run", str(path), "--grid", "1", "--block", "8", "--arg", "2f32x8", "--entry", "scale<float>", "--out", str(out)]
    assert main([*command, "--target", "A100", "--option=-DSHIFT=1"]) == 0
    assert "8 of 8 elements changed" in capsys.readouterr().out
    assert (np.load(out / "arg0.npy") == 7).all()
    assert main(command) == 2 and "--target is required" in capsys.readouterr().err
    assert main([*command, "--target", "A100"]) == 2 and "SHIFT" in capsys.readouterr().err


def test_the_command_takes_options_for_cuda_alone(capsys):
    assert main(["run", "axpy.ptx", "--grid", "1", "--block", "1", "--option=-DN=4"]) == 2
    assert "--option is for CUDA C++" in capsys.readouterr().err
