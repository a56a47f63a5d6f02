"""CUDA C++ kernels as people write them, compiled by NVRTC and run by one call each, against NumPy in bits."""

import cuda_programs
import numpy as np
import pytest
from cuda_programs import PROGRAMS
from support.sampling import sample_cases
from support.systems import skip_file

from tcemu import ptx
from tcemu.engine.backends.cuda import nvrtc
from tcemu.testing import assert_bits_equal

skip_file("there is no NVRTC: pip install -e '.[cuda]'" if nvrtc.library() is None else "")
USUAL = ("axpy by a template", "conversions to FP8")
ONE = [np.zeros(32, np.int32)]
REFUSED = {  # what no kernel may use, with words of the error, which names the line
    "textures": ("__global__ void k(int* x, cudaTextureObject_t t) { *x = (int)tex1Dfetch<float>(t, 3); }", "line .*'tex'", [*ONE, 1]),
    "surfaces": ("__global__ void k(int* x, cudaSurfaceObject_t t) { surf1Dwrite(*x, t, 3); }", "line .*'sust'", [*ONE, 1]),
    "recursion with local memory": (
        """__device__ __noinline__ int f(int n, int* sums) { int mine[4]; for (int i = 0; i < 4; ++i) mine[i] = sums[i & n] + i;
        return n < 2 ? mine[n & 3] : f(n - 1, mine) + f(n - 2, mine); } __global__ void k(int* x) { *x = f(*x, x); }""",
        "line .*recursion of .* is not supported, since it has the local variable", ONE,
    ),
    "functions of another file": (
        "extern __device__ int g(int); __global__ void k(int* x) { *x = g(*x); }", "line .*not in the module", ONE,
    ),
    "launches by a kernel": (
        "__global__ void c(int* x) { *x = 1; } __global__ void k(int* x) { c<<<1, 1>>>(x); }", "source.cu.*launch", ONE,
    ),
    "128-bit integers": ("__global__ void k(int* x) { __int128 a = *x; *x = (int)(a * a >> 70); }", "source.cu.*128-bit", ONE),
    "host code": ("int main() { return 0; } __global__ void k(int* x) {}", "device code alone", ONE),
}  # fmt: skip


@pytest.mark.parametrize("name", sample_cases(PROGRAMS, USUAL))
def test_program_is_right(name):
    found, expected = PROGRAMS[name].run(np.random.default_rng(43))
    assert found
    for number, array in expected.items():
        assert_bits_equal(found[number], array)
        wrong = found[number].copy()
        wrong.reshape(-1).view(np.uint8)[-1] ^= 0x40  # a check that cannot fail would pass this
        with pytest.raises(AssertionError):
            assert_bits_equal(wrong, array)


def test_there_are_twenty_programs():
    assert len(PROGRAMS) >= 20 and sum("cub::" in name for name in PROGRAMS) >= 4


@pytest.mark.parametrize("name", sample_cases(REFUSED, ("recursion with local memory", "launches by a kernel")))
def test_what_is_refused_names_the_line(name):
    source, words, args = REFUSED[name]
    with pytest.raises((ptx.PtxError, ValueError), match=rf"(?s){words}"):
        ptx.run(source, entry="k", grid=1, block=32, args=args, target="A100")


def test_sources_are_texts_files_and_modules(tmp_path):
    """A file finds the headers beside it. Options are for CUDA C++ alone."""
    program = PROGRAMS["axpy by a template"]
    args = program.arguments(np.random.default_rng(0))
    (tmp_path / "step.h").write_text("#define SCALE(x) (FACTOR * (x))\n")
    source = '#include "step.h"\n' + program.source.replace("a * x[i]", "SCALE(a * x[i])")
    (tmp_path / "axpy.cu").write_text(source)
    made = ptx.run(tmp_path / "axpy.cu", args=args, options=["-DFACTOR=2"], **program.launch)[1]
    assert np.array_equal(made, 2 * args[0] * args[1] + args[2])
    text = ptx.compile(program.source, target="A100", name_expressions=["axpy<double>"])
    (tmp_path / "axpy.ptx").write_text(text.text)
    for ptx_source in (text.text, tmp_path / "axpy.ptx"):
        made = ptx.run(ptx_source, args=args, **program.launch | {"entry": None})[1]
        assert np.array_equal(made, args[0] * args[1] + args[2])
        with pytest.raises(ValueError, match="options"):
            ptx.run(ptx_source, args=args, options=["-DN=1"], **program.launch | {"entry": None})


def test_compare_takes_a_candidate_and_a_reference():
    """Two orders of a sum; and two launches of one kernel."""
    order = 'extern "C" __global__ void sums(const float* x, float* y) { y[threadIdx.x] = %s; }'
    sources = tuple(order % f"(x[0] {signs[0]} x[1]) {signs[1]} x[threadIdx.x]" for signs in ("++", "+-"))
    x, y = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    found = ptx.compare(sources, targets=("A100", "A100"), grid=1, block=8, args=[x, y])
    assert not found.equal and found.two_kernels and found.differing_elements == (0, 7) and found.divergence is None
    assert found.first_elements[0] == (1, (1,), (np.float32(2), np.float32(0))) and "Array 1 differs first at [1]" in str(found)
    assert ptx.compare((sources[0], sources[0]), targets=("A100", "L4"), grid=1, block=8, args=[x, y]).equal
    short = ptx.compare(sources[0], targets=("A100", "A100"), grid=1, block=8, args=[x, y], right={"block": 4})
    assert short.differing_elements == (0, 4)
    same = ptx.compare(sources[0], targets=("A100", "H100"), grid=1, block=8, args=[x, y])
    assert same.equal and not same.two_kernels and same.steps > 0
    with pytest.raises(ValueError, match="other shapes"):
        ptx.compare(sources[0], targets=("A100", "A100"), grid=1, block=8, args=[x, y], right={"args": [x, y[:4].repeat(4)]})


def test_codes_of_the_table_are_saturated():
    """The reference for conversions to FP8, on a number beyond both formats."""
    assert cuda_programs.fp8(np.float32([1e9]), "float8_e4m3fn") == 0x7E and cuda_programs.fp8(np.float32([-1e9]), "float8_e5m2") == 0xFB
