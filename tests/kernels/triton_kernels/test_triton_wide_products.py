"""The wide recipes named after Triton's `input_precision`, against the kernels that Triton compiles."""

from itertools import product

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'tcemu[triton]'")

from support.sampling import sample_cases
from triton_kernels import kernels

import tcemu
import tcemu.triton
from tcemu.products import get_wide_recipe
from tcemu.triton import as_tensor, emulated

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces another default


CASES = [*product(("tf32x3", "bf16x3", "bf16x6"), (16, 32))]


@pytest.mark.parametrize("case", sample_cases(CASES, (CASES[1], CASES[2], CASES[5]), str))
def test_a_wide_recipe_has_the_bits_of_the_compiled_kernel(case):
    """NaN and Inf among the operands, too."""
    precision, block_k = case
    rng = np.random.default_rng(block_k)
    a, b = (
        rng.standard_normal(shape).astype(np.float32) * np.exp2(rng.integers(-6, 7, shape)).astype(np.float32)
        for shape in ((16, 64), (64, 16))
    )
    a[3, 5], a[7, 60], b[11, 2], b[40, 9], a[9, 40] = np.inf, np.nan, -np.inf, 0.0, np.inf
    c = np.zeros((16, 16), np.float32)
    with emulated("A100"):
        kernels.wide_product_kernel[(1,)](as_tensor(a), as_tensor(b), as_tensor(c), 64, 16, 16, block_k, precision)
    d = np.asarray(tcemu.matmul(a, b, recipe=get_wide_recipe(precision, "A100", k_tile=block_k)))
    differing = (c.view(np.uint32) != d.view(np.uint32)) & ~(np.isnan(c) & np.isnan(d))
    assert differing.sum() == 0 and np.isnan(c).any() and np.isfinite(c).sum() > 150
