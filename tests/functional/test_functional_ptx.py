"""Every ready row against its kernel's PTX, run statement by statement: the same words, NaN and signs of zero included."""

import numpy as np
import pytest
from ptx_kernels.functional_manifest import CASES, GPT, Case, compiled_texts
from support.functional_cases import EPS, count_differences, vectors, words

from tcemu import functional, ptx

USUAL = (Case("softmax_rows", "f16", 300),)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in USUAL else pytest.mark.full) for case in CASES], ids=lambda c: c.name
)
def test_a_ready_row_equals_its_kernel(case):
    different, _ = count_differences(case)
    assert different == 0


def test_every_case_has_a_text():
    assert set(compiled_texts()) == {case.name for case in CASES} | {f"gpt {name}" for name in GPT}


@pytest.mark.full
@pytest.mark.parametrize("columns", [64, 300, 1024, 4096])
def test_rms_norm_of_many_rows(columns):
    case = Case("rms_norm_rows", "f32", columns)
    x = np.random.default_rng(columns).standard_normal((64, columns)).astype(np.float32)
    computed = functional.rms_norm(x, vectors(case)[0], eps=EPS, kernel="liger")
    assert int((words(computed) != rms_norm_words(case, x)).sum()) == 0


def rms_norm_words(case, x):
    compiled, n = compiled_texts()[case.name], np.int32(case.columns)
    args = [np.zeros_like(x), n, x, n, vectors(case)[0], n, np.float32(EPS), np.float32(0), np.uint64(0), np.uint64(0)]
    launch = {"grid": len(x), "block": 32 * case.warps, "shared_bytes": compiled["shared"], "target": "sm_90a"}
    return words(ptx.run(compiled["text"], args=args, **launch)[0])


@pytest.mark.full
def test_every_field_of_the_order_is_seen():
    """64 ordinary rows: the row's own order has the kernel's words, and each other order has others.

    A few rows do not tell orders apart: the root halves the difference of a sum, so that most rows come out equal.
    """
    case, own = Case("rms_norm_rows", "f32", 4096), functional.get_kernel("rms_norm", "liger", columns=4096)
    x, (weight, _) = np.random.default_rng(8).standard_normal((64, case.columns)).astype(np.float32), vectors(case)
    expected = rms_norm_words(case, x)

    def differences(**change):
        computed = functional.rms_norm(x, weight, eps=EPS, kernel=own.replace(sums=own.sums.replace(**change)))
        return int((words(computed) != expected).sum())

    assert differences() == 0
    changes = (
        {"thread_order": "chain"},
        {"lane_order": "near"},
        {"warp_order": "near"},
        {"warps": 4},
        {"vector": 1},
        {"fused": False},
        {"reversed_pairs": ()},
    )
    counts = [differences(**change) for change in changes]
    assert min(counts) > 0, counts
