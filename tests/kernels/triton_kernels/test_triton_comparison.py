"""`tcemu.triton.compare`: the first launch after which two runs of a program differ."""

import json

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: pip install 'tcemu[triton]'")

from triton_kernels import kernels  # noqa: E402

import tcemu  # noqa: E402
from tcemu.triton import as_tensor, compare, emulated  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces another default
RNG = np.random.default_rng(3)
A, B = RNG.normal(size=(32, 64)).astype(np.float16), RNG.normal(size=(64, 64)).astype(np.float16)
LONG = (1 << RNG.integers(0, 12, size=(16, 64))).astype(np.float16) * (1 + RNG.random(size=(16, 64))).astype(np.float16)


def products(a, b):
    """Two launches: a scaling, exact on every GPU, and a product."""
    m, k, n = *a.shape, b.shape[1]
    c = as_tensor(np.zeros((m, n), np.float32))
    kernels.scale_kernel[(1,)](c, 1.0, 0.0, c.size, BLOCK=1024)
    kernels.cluster_kernel[(1,)](a, b, c, M=m, N=n, K=k)
    return {"c": c}


def test_targets_differ_at_their_first_product():
    found = compare(products, LONG, B[:, :16].copy(), targets=("A100", "H100"))
    assert found.first == 1 and found.launch_counts == (2, 2) and not found.equal and not found.launches[0].differences
    (difference,) = found.launches[1].differences
    expected = [np.asarray(tcemu.gemm(LONG, B[:, :16], op="f16", target=gpu)) for gpu in ("A100", "H100")]
    where = np.argwhere(expected[0].view(np.uint32) != expected[1].view(np.uint32))
    assert difference.argument == "c_ptr" and difference.differing == len(where) and difference.place == tuple(where[0])
    assert difference.values == tuple(float(each[difference.place]) for each in expected)
    assert found.launches[1].equal_inputs and found.results[0].differing == len(where)
    assert found.statement is not None and "mma.sync" in found.statement.divergence.statement
    assert "mma.sync" in str(found) and f"{len(where):,} of 256 elements" in str(found)
    assert found.records()[0]["tensor"] == "c_ptr" and json.loads(found.to_json())["first_launch"] == 1


def test_equal_programs_and_configs_are_equal():
    def tuned(a, b):
        c = as_tensor(np.zeros((32, 64), np.float32))
        kernels.matmul_kernel[lambda meta: (32 // meta["BLOCK_M"], 64 // meta["BLOCK_N"])](a, b, c, 64, 64, 1, 64, 1, 64, 1)

    found = compare(tuned, A, B, targets=("A100", "A100"), configs=(None, lambda config: config.num_warps == 2))
    assert found.equal and found.first is None and found.statement is None and not found.records()
    left, right = found.launches[0].left, found.launches[0].right
    assert left.settings["BLOCK_M"] == 32 and right.settings["BLOCK_M"] == 16


def test_a_candidate_and_a_reference():
    x = np.ones(8, np.float32)

    def reference(x):
        kernels.scale_kernel[(1,)](x, 2.0, 0.0, 8, BLOCK=8)
        kernels.scale_kernel[(1,)](x, 1.0, 1.0, 8, BLOCK=8)

    def candidate(x):
        kernels.scale_kernel[(1,)](x, 2.0, 0.0, 7, BLOCK=8)

    found = compare((candidate, reference), x, targets=("A100", "sm_80"))
    assert x[0] == 1 and found.first == 0 and found.launch_counts == (1, 2) and "same target" in found.statement_reason
    assert found.launches[0].differences[0][:5] == ("x_ptr", 8, 1, (7,), (1.0, 2.0))
    assert "1 launches and 2" in str(found)

    def other(x):
        kernels.add_kernel[(1,)](x, x, as_tensor(np.zeros(8, np.float32)), 8, BLOCK=8)

    found = compare((candidate, other), x, targets=("A100", "A100"))
    assert not found.equal and "other sizes" in str(found)


def test_inputs_that_differ_are_named():
    counter = iter(range(9))

    def unseeded():
        kernels.scale_kernel[(1,)](as_tensor(np.full(8, next(counter), np.float32)), 2.0, 0.0, 8, BLOCK=8)

    found = compare(unseeded, targets=("A100", "L4"))
    assert found.first == 0 and not found.launches[0].equal_inputs and "no launch made the difference" in str(found)
    with pytest.raises(ValueError, match="targets"):
        compare(unseeded, targets="A100")


def test_clusters_of_blocks():
    """Two blocks share a program with num_ctas=2; tanh is the GPU's."""
    c, x = np.zeros((64, 64), np.float32), np.linspace(-3, 3, 64, dtype=np.float32)
    y, z = np.zeros_like(x), np.zeros_like(x)
    a = RNG.normal(size=(64, 64)).astype(np.float16)
    with emulated("H100") as report:
        kernels.cluster_kernel[(1,)](as_tensor(a), as_tensor(B), as_tensor(c), M=64, N=64, K=64, num_ctas=2)
        kernels.tanh_kernel[(1,)](*map(as_tensor, (x, y, z)), BLOCK=64)
    assert np.abs(c - a.astype(float) @ B).max() < 1e-4 and np.abs(y - np.tanh(x)).max() < 1e-3 and np.abs(z / np.exp(x) - 1).max() < 1e-6
    assert not any(launch.inexact for launch in report.launches)
