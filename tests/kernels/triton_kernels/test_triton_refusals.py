"""Programs that `tcemu.triton.emulated` refuses, by name and with the line; and what kernels print and assert."""

import re
from pathlib import Path

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: pip install 'tcemu[triton]'")

import triton.language as tl  # noqa: E402
from triton.language.extra.cuda import globaltimer  # noqa: E402
from triton_kernels import kernels  # noqa: E402

from tcemu.base.errors import Unsupported  # noqa: E402
from tcemu.ptx import OutOfBounds, Trapped  # noqa: E402
from tcemu.triton import as_tensor, emulated  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces another default
PAGE = Path(__file__).parents[3] / "docs/howto/triton.md"


@triton.jit
def assembly_kernel(x_ptr, OPCODE: tl.constexpr):
    offsets = tl.arange(0, 32)
    x = tl.load(x_ptr + offsets)
    tl.store(x_ptr + offsets, tl.inline_asm_elementwise(OPCODE, "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1))


@triton.jit
def print_kernel(x_ptr, LIMIT: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 32))
    tl.device_print("x", x)
    tl.device_assert(x < LIMIT, "x is large")


@triton.jit
def timer_kernel(x_ptr):
    tl.store(x_ptr, (globaltimer() >= 0).to(tl.int32))
    tl.atomic_add(x_ptr.to(tl.pointer_type(tl.float32)) + 1, 1.0)


def words(count=32):
    return as_tensor(np.arange(count, dtype=np.int32))


def use_texture():
    assembly_kernel[(1,)](words(), OPCODE="txq.width.b32 $0, [$1];", num_warps=1)


def take_times():
    triton.testing.do_bench(use_texture)


def follow_an_unknown_address():
    kernels.outside_kernel[(1,)](as_tensor(np.zeros(16, np.float32)), BLOCK=16)


def pass_a_plain_array():
    kernels.outside_kernel[(1,)](np.zeros(16, np.float32), BLOCK=16)


# the first column of the page's table; the words of the page are searched in the error
REFUSED = {
    "texture instructions in inline assembly": (
        use_texture,
        Unsupported,
        r"line \d+, column \d+ \(.*[.]py:\d+\): txq.width.b32: 'txq' is no supported instruction",
    ),
    "`triton.testing.do_bench`, CUDA events": (take_times, Unsupported, "an emulated kernel has no time of a GPU"),
    "addresses of no tensor": (follow_an_unknown_address, OutOfBounds, r"line \d+ \(.*[.]py:\d+\): .* are out of bounds"),
    "NumPy arrays without `as_tensor`": (pass_a_plain_array, TypeError, "ndarray"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_so(name):
    run, error, message = REFUSED[name]
    with emulated("H100"), pytest.raises(error, match=message):
        run()


def test_the_page_lists_what_is_refused():
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", PAGE.read_text(), re.M)
    listed = {name: message for name, message in rows}
    assert {*REFUSED} <= {*listed}
    for name, (_, _, pattern) in REFUSED.items():
        assert re.search(pattern.replace(r"\d+", r"[\dN]+"), listed[name]), name


def test_what_a_kernel_prints_and_asserts(capsys):
    with emulated("A100") as report:
        print_kernel[(1,)](words(), LIMIT=99, num_warps=1, debug=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 32 and lines[7] == "pid (0, 0, 0) idx ( 7) x: 7" and report.launches[0].printed.splitlines() == lines
    with emulated("A100"), pytest.raises(Trapped, match=r"thread \(7, 0, 0\).*x is large"):
        print_kernel[(1,)](words(), LIMIT=7, num_warps=1, debug=True)


def test_launches_say_why_bits_may_differ():
    a, b = np.ones((64, 32), np.float16), np.ones((32, 32), np.float16)
    with emulated("A100") as report:
        timer_kernel[(1,)](words(), num_warps=1)
        kernels.tanh_kernel[(1,)](*(as_tensor(np.ones(64, np.float32)) for _ in range(3)), BLOCK=64)
    (timer, special) = (launch.inexact for launch in report.launches)
    assert "order of the threads" in timer[0] and "%globaltimer" in timer[-1] and any("on sm_80" in each for each in special)
    with emulated("H100") as report:
        kernels.cluster_kernel[(1,)](*map(as_tensor, (a, b, np.zeros((64, 32), np.float32))), M=64, N=32, K=32)
    assert report.launches[0].inexact == () and report.records()[0]["bits"] == "exact"
