"""`tcemu.triton.interpreted`: the interpreter's dots have the bits of compiled kernels."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: pip install 'tcemu[triton]'")

from triton_kernels import kernels, product_programs  # noqa: E402

import tcemu  # noqa: E402
from tcemu.kernels.triton.triton_versions import VERSIONS, describe_version, installed_version  # noqa: E402
from tcemu.triton import as_tensor, emulated, interpreted  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces another default
RNG = np.random.default_rng(1)
CASES = (  # operands, target, M: mma.sync, and on Hopper from 64 rows on wgmma
    (np.float16, "A100", 32), (np.float16, "H100", 64), (ml_dtypes.bfloat16, "H100", 16), (ml_dtypes.float8_e4m3fn, "H100", 64),
    (ml_dtypes.float8_e5m2, "L4", 16), (np.float32, "H100", 64), (np.int8, "A100", 16),
)  # fmt: skip


@pytest.mark.parametrize(("dtype", "target", "m"), CASES)
def test_dots_have_the_bits_of_the_compiled_kernel(dtype, target, m):
    a, b = ((3 * RNG.normal(size=shape)).astype(dtype) for shape in ((m, 128), (128, 32)))
    start = RNG.integers(-9, 9, size=(m, 32)).astype(np.int32 if dtype is np.int8 else np.float32)
    results = []
    for run in (emulated, interpreted):
        c = start.copy()
        with run(target) as report:
            kernels.accumulated_dot_kernel[(1,)](as_tensor(a), as_tensor(b), as_tensor(c), M=m, N=32, K=128)
        assert report.launches[0].settings["K"] == 128 and report.launches[0].grid == (1, 1, 1)
        results.append(c.view(np.uint32))
    assert (results[0] != results[1]).sum() == 0 and (results[0] != start.view(np.uint32)).any()


def test_helpers_grids_and_views():
    out, memory = np.zeros((2, 3, 4), np.int32), np.arange(20, dtype=np.float32)
    with interpreted("A100"):
        kernels.place_kernel[(4, 3, 2)](as_tensor(out), 4, 3)
        kernels.scale_kernel[(1,)](as_tensor(memory[4:]), 2.0, 1.0, 8, BLOCK=8)
    z, y, x = np.indices((2, 3, 4))
    assert np.array_equal(out, x + 10 * y + 100 * z)
    assert np.array_equal(memory, [*range(4), *(2 * n + 1 for n in range(4, 12)), *range(12, 20)])


def test_a_kernel_compiles_after_an_interpreted_one():
    """The compiler keeps Triton's min and max when it is imported: not within an interpreted launch, where they are the interpreter's."""
    code = "import sys, tcemu.triton; sys.exit('triton.compiler.code_generator' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    values = np.arange(4, dtype=np.int32)
    for way in (interpreted, emulated):
        out = np.zeros(4, np.int32)
        with way("A100"):
            kernels.extrema_kernel[(4,)](as_tensor(values), as_tensor(out), 2)
        assert out.tolist() == [0, 1, 2, 2]


@pytest.mark.parametrize("way", [interpreted, pytest.param(emulated, marks=pytest.mark.full)])
@pytest.mark.parametrize(("form", "target"), [("e4m3", "L4"), ("e2m1", "H100")])
def test_scaled_dots_of_integers_are_exact(form, target, way):
    """Whatever the order: that of the compiled kernel is another one than the interpreter's."""
    with way(target):
        (result,) = product_programs.run_scaled(RNG, form, (32, 16, 128), 32, "ue8m0", num_warps=4)
    assert np.array_equal(*result[:2]) and len(np.unique(result[0])) > 50


def test_a_scaled_dot_is_a_product_in_bf16_in_ascending_order_of_k():
    m, n, k, group = 32, 16, 128, 32
    a, b = (RNG.normal(size=(rows, k)).astype(ml_dtypes.float8_e4m3fn) for rows in (m, n))
    scales, c = [RNG.integers(107, 148, (rows, k // group)).astype(np.uint8) for rows in (m, n)], np.zeros((m, n), np.float32)
    with interpreted("L4"):
        product_programs.scaled_kernel[(1,)](
            *map(as_tensor, (a, scales[0], b, scales[1], c)), M=m, N=n, K=k, GROUP=group, PACKED=1, FORMAT="e4m3"
        )
    left, right = (
        (x.astype(np.float32) * np.exp2(each.astype(np.float32) - 127).repeat(group, axis=1)).astype(ml_dtypes.bfloat16)
        for x, each in zip((a, b), scales, strict=True)
    )
    expected = tcemu.gemm(left, right.T, op="bf16", target="L4")
    assert (np.asarray(expected).view(np.uint32) != c.view(np.uint32)).sum() == 0


def test_the_version_is_part_of_a_report(monkeypatch):
    """Versions before the first row are refused, and those without a row are said not to be tried."""
    x = np.ones(16, np.float32)
    with interpreted("A100") as report:
        kernels.scale_kernel[(1,)](as_tensor(x), 2.0, 1.0, 16, BLOCK=16)
    release = triton.__version__.partition("+")[0]
    assert report.table().facts["triton"].startswith(release) and f"Triton {release}" in str(report)
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    assert "3.99.0 (not tried; tried were 3.6.0" in describe_version() and installed_version() == VERSIONS[-1]
    for number, way, said in (
        ("3.7.1", interpreted, r"3\.7\.1's interpreter.*emulated works"),
        ("3.5.0", emulated, r"needs Triton 3\.6\.0"),
    ):
        monkeypatch.setattr(triton, "__version__", number)
        with pytest.raises(tcemu.Unsupported, match=said), way("A100"):
            pass


def test_what_is_no_single_instruction_is_refused():
    x = np.ones((16, 16), np.float32)
    with interpreted("A100"), pytest.raises(Exception, match=r"ieee.*emulated runs"):
        kernels.precise_dot_kernel[(1,)](as_tensor(x), as_tensor(x), as_tensor(x.copy()), PRECISION="ieee")
    with pytest.raises(tcemu.Unsupported, match=r"no rule for tl\.dot on sm_70"), interpreted("V100"):
        pass
    codes = np.ones((16, 16), ml_dtypes.float8_e4m3fn)
    with interpreted("A100"), pytest.raises(Exception, match="sm_89 and later"):
        kernels.accumulated_dot_kernel[(1,)](as_tensor(codes), as_tensor(codes), as_tensor(x.copy()), M=16, N=16, K=16)
    run = triton.runtime.jit.JITFunction.run
    with interpreted("A100"):
        assert triton.runtime.jit.JITFunction.run is not run
    assert triton.runtime.jit.JITFunction.run is run
