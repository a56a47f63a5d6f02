"""cuBLASLt's proposals: what is asked is held against a library in C that answers with the question; what has no answer is told."""

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tcemu import replay

module = sys.modules["tcemu.uses.replay.cublaslt_heuristic"]  # the name is that of the function
SOURCE = Path(__file__).parents[2] / "support" / "fake_cublaslt.c"
compiled_here = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed here")


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """The library, and the one of a machine without a GPU."""
    folder = tmp_path_factory.mktemp("fake")
    paths = [folder / "libcublasLt.so.13", folder / "without.so"]
    for path, options in zip(paths, ([], ["-DWITHOUT_GPU"]), strict=True):
        subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-Wall", "-Werror", *options, str(SOURCE), "-o", str(path)], check=True)
    return paths


@compiled_here
@pytest.mark.parametrize(
    ("options", "compute", "types", "flags"),
    [
        ({}, 68, (2, 2, 2), 0),
        ({"operand_dtype": "f16", "dtype": "f32", "layout": "rc"}, 68, (2, 2, 0), 1),  # contiguous columns of B: cuBLASLt's A is transposed
        ({"operand_dtype": "bf16", "layout": "cr"}, 68, (14, 14, 14), 2),
        ({"operand_dtype": "f32", "layout": "cc"}, 68, (0, 0, 0), 3),
        ({"operand_dtype": "tf32"}, 77, (0, 0, 0), 0),
        ({"operand_dtype": "e4m3", "fast_accumulation": True}, 68, (28, 28, 14), 1 | 4),
        ({"operand_dtype": ("e5m2", "e4m3")}, 68, (28, 29, 14), 1),  # cuBLASLt's A is B
    ],
)
def test_what_is_asked(fake, options, compute, types, flags):
    found = replay.query_heuristic(48, 80, 96, count=3, workspace=1 << 20, alignment=16, library=fake[0], **options)
    one, other = found.configurations
    assert (one.algorithm, other.algorithm) == (compute, compute + 1)
    assert (one.tile, one.split_k) == (80, 48)  # a row-major product is asked with its sides changed
    assert (one.swizzle, one.cluster_shape) == (flags, 96)
    assert (one.custom_option, one.stages, one.inner_shape) == types
    assert (one.workspace, one.waves) == (1 << 20, 0.5)
    assert ctypes.CDLL(str(fake[0])).fake_live() == 0  # all that was made is destroyed


@compiled_here
def test_the_result(fake):
    found = replay.query_heuristic(48, 80, 96, library=fake[0])
    assert found.version == 130100 and found.shape == (48, 80, 96) and len(found.configurations) == 1
    assert "cuBLASLt 130100, f16 -> f16, 48 x 80 x 96" in str(found) and "K in 48 slices, reduction compute type" in str(found)
    (record,) = found.records()
    assert record["algorithm"] == 68 and record["reduction_scheme"] == "compute type" and json.loads(found.to_json())["version"] == 130100
    assert replay.query_heuristic(1, 1, 96, operand_dtype="tf32", library=fake[0]).configurations[0].reduction_scheme == "output type"


@compiled_here
def test_what_has_no_answer_is_told(fake):
    for k, said in ((13, "NOT_SUPPORTED: it proposes nothing"), (17, "gave 0 answers"), (19, "gave 1 answers, none usable")):
        with pytest.raises(RuntimeError, match=said):
            replay.query_heuristic(8, 8, k, library=fake[0])
    assert ctypes.CDLL(str(fake[0])).fake_live() == 0
    with pytest.raises(RuntimeError, match="cublasLtCreate answered 1, CUBLAS_STATUS_NOT_INITIALIZED"):
        replay.query_heuristic(8, 8, 8, library=fake[1])


def test_libraries_that_are_none(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="cannot be loaded as cuBLASLt"):
        replay.query_heuristic(8, 8, 8, library=tmp_path / "nothing.so")
    with pytest.raises(RuntimeError, match="has no cublasLtGetVersion"):
        replay.query_heuristic(8, 8, 8, library="libc.so.6")
    monkeypatch.setattr(module, "LIBRARIES", ("libno_such_library.so",))
    monkeypatch.setattr(module, "PROCESS_MAPS", tmp_path / "none")
    with pytest.raises(RuntimeError, match="no libno_such_library"):
        replay.query_heuristic(8, 8, 8)


@compiled_here
def test_the_library_that_is_loaded_is_taken(fake, monkeypatch, tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 00:00 1    /usr/lib/libm.so.6\n7f02-7f03 r-xp 00000000 00:00 2    {fake[0]}\n")
    monkeypatch.setattr(module, "PROCESS_MAPS", maps)
    assert replay.query_heuristic(48, 80, 96).configurations[0].algorithm == 68


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"operand_dtype": "f64"}, "operand_dtype='f64'"),
        ({"operand_dtype": ("f16", "bf16")}, "FP8"),
        ({"operand_dtype": ("f16",) * 3}, "one or two"),
        ({"dtype": "e4m3"}, "dtype='e4m3'"),
        ({"layout": "rx"}, "layout='rx'"),
        ({"m": 0}, "m=0"),
        ({"k": True}, "k=True"),
        ({"workspace": -1}, "workspace=-1.*from 0"),
        ({"count": 0}, "count=0"),
    ],
)
def test_arguments_that_cannot_be(options, said):
    with pytest.raises(ValueError, match=said):
        replay.query_heuristic(**({"m": 8, "n": 8, "k": 8} | options))
