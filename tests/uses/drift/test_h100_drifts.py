"""Products and exponentials that an NVIDIA H100 computed under two settings: the difference of the settings is named from the words."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.drift_records import MATRIX_PRODUCT, recorded

from tcemu.drift import identify, locate

H100 = np.load(Path(__file__).parents[2] / "golden" / "drift_h100.npz")
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16


def product(name, dtype, setting):
    a, b, d = (H100[f"{name}_{part}"].view(dtype) for part in ("a", "b", setting))
    return recorded([("dot_general", [a, b], [d], MATRIX_PRODUCT)])


def test_exponentials_of_xla_on_an_h100_are_those_of_cudas_library():
    x, y = (H100[f"exp_{part}"].view(np.float32) for part in "xy")
    assert len(x) > 1500
    (line,) = identify(recorded([("exp", [x], [y], {})]), targets=()).operations
    assert line.is_explained and line.arithmetic == "exponentials of CUDA's device library", line
    assert not np.array_equal(np.exp(x.astype(np.float64)).astype(np.float32), y)  # the exact function gives other words


@pytest.mark.full
def test_f16_sums_restart_every_64_products():
    (source,) = locate(product("f16", np.float16, "off"), product("f16", np.float16, "on"), targets=("H100",)).sources
    assert "accumulator" in source.cause.kinds and source.cause.explained
    assert "sums in float16; K = 512 in 8 slices of 64" in source.cause.right and "running sum waits in f16" in source.cause.right
    assert max(source.legitimate) <= 1


@pytest.mark.full
def test_tf32_is_named():
    (source,) = locate(product("tf32", np.float32, "off"), product("tf32", np.float32, "on"), targets=("H100",)).sources
    assert {"tensor core", "operands rounded"} <= set(source.cause.kinds) and "operands rounded to tf32" in source.cause.right
    assert max(source.legitimate) <= 1


@pytest.mark.full
def test_fast_accumulation_of_fp8_has_no_promotion():
    operands = [H100["fp8_a"].view(E4M3), H100["fp8_b"].view(E4M3), *(H100[f"fp8_scale_{part}"].view(np.float32) for part in "ab")]
    attributes = {"args": ["#0", "#1", "#2", "#3", None, None, "torch.bfloat16"], "kwargs": {}}
    sides = [
        recorded([("aten._scaled_mm", operands, [H100[f"fp8_{setting}"].view(BF16)], attributes)], "torch") for setting in ("exact", "fast")
    ]
    (source,) = locate(*sides, targets=("H100",)).sources
    assert "promotion" in source.cause.kinds and "every 128" in source.cause.left and "every" not in source.cause.right, str(source)
