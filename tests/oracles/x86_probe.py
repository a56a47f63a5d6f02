"""The matrix units of the CPU that runs the tests, through a C program that is compiled when a test asks for it."""

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from shutil import which
from tempfile import mkdtemp

import numpy as np
import pytest

from tcemu.engine.isa.other_makers import Unit

FLAGS = {"vdpbf16ps": "avx512_bf16", "vpdpbusd": "avx512_vnni", "vpdpbusds": "avx512_vnni", "tdpbf16ps": "amx_bf16"}
FLAGS |= dict.fromkeys(("tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud"), "amx_int8")


@cache
def _library() -> ctypes.CDLL:
    compiler = which("cc")
    if compiler is None:
        pytest.skip("no C compiler: cc")
    compiled = Path(mkdtemp(prefix="tcemu-probe-")) / "probe.so"
    source = Path(__file__).with_suffix(".c")
    built = subprocess.run([compiler, "-O1", "-shared", "-fPIC", source, "-o", compiled], capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"{compiler} does not know these instructions: {built.stderr.splitlines()[0]}")
    return ctypes.CDLL(str(compiled))


@cache
def cpu_flags() -> frozenset[str]:
    """Return the instruction sets of this CPU by Linux's names; none on another system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def run_rows(op: Unit, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Run an instruction of AVX512 on lanes: codes a, b [N, K] and c [N] -> codes [N]. N is a multiple of 16.

    Skips the test where the CPU has no such instruction, or the machine no C compiler that knows it.
    """
    return _call(op, a, b, c).reshape(len(c))


def run_tiles(op: Unit, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Run an instruction of AMX on tiles: codes a [N, 16, K], b [N, K, 16] and c [N, 16, 16] -> codes [N, 16, 16]. Skips as `run_rows`."""
    group = 4 // a.itemsize  # elements that lie beside each other in a row of a tile of B
    packed = b.reshape(len(b), op.k // group, group, op.n).swapaxes(2, 3)
    if FLAGS[op.name] in cpu_flags() and _library().request_tiles() != 0:
        pytest.skip("the system gives this process no tiles")
    return _call(op, a, packed, c)


def _call(op: Unit, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    if FLAGS[op.name] not in cpu_flags():
        pytest.skip(f"this CPU has no {FLAGS[op.name]}")
    a, b, c = (np.ascontiguousarray(v) for v in (a, b, c))
    d, size = np.empty_like(c), 1024 if op.name.startswith("t") else 64
    assert a.nbytes == b.nbytes == c.nbytes and c.nbytes % size == 0
    getattr(_library(), op.name)(*(ctypes.c_void_p(v.ctypes.data) for v in (a, b, c, d)), ctypes.c_int64(c.nbytes // size))
    return d
