"""Kernels with tcgen05 by nvcc, CuTe and Triton: equal to `tcemu.gemm` in every bit, and near the product in float64."""

import numpy as np
import pytest
from support.tcgen05_kernels import KERNELS, launch_kernel

USUAL = ("cute_tf32_k",)
TOLERANCES = {np.dtype(np.float16): 2e-3, np.dtype(np.float32): 1e-5, np.dtype(np.int32): 0}  # of the largest result


@pytest.mark.parametrize("name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.full) for name in KERNELS])
def test_a_kernel_gives_the_product_in_every_bit(name):
    launch, found = launch_kernel(name)
    bits = np.dtype(f"u{found.dtype.itemsize}")
    wrong = int((found.view(bits) != launch.expected.view(bits)).sum())
    assert wrong == 0, f"{wrong} of {found.size}"
    largest = np.abs(launch.exact).max()
    assert np.abs(found.astype(np.float64) - launch.exact).max() <= TOLERANCES[found.dtype] * largest
