"""Every ready row against its kernel's PTX, run statement by statement: the same words, NaN and signs of zero included."""

import numpy as np
import pytest
from ptx_kernels.functional_manifest import CASES, DTYPES, GPT, Case, block_norm_texts, compiled_texts
from support.functional_cases import EPS, count_differences, draw_rows, vectors, words

from tcemu import functional, ptx

USUAL = ()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in USUAL else pytest.mark.full) for case in CASES], ids=lambda c: c.name
)
def test_a_ready_row_equals_its_kernel(case):
    different, _ = count_differences(case)
    assert different == 0


def test_every_case_has_a_text():
    assert set(compiled_texts()) == {case.name for case in CASES} | {f"gpt {name}" for name in GPT}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_ready_row_equals_its_kernel_on_many_rows(case):
    """64 ordinary rows of each kernel: a few rows do not tell orders apart."""
    different, count = count_differences(case, 64)
    assert different == 0 and count >= 64


def rms_norm_words(case, x):
    compiled, n = compiled_texts()[case.name], np.int32(case.columns)
    args = [np.zeros_like(x), n, x, n, vectors(case)[0], n, np.float32(EPS), np.float32(0), np.uint64(0), np.uint64(0)]
    launch = {"grid": len(x), "block": 32 * case.warps, "shared_bytes": compiled["shared"], "target": "sm_90a"}
    return words(ptx.run(compiled["text"], args=args, **launch)[0])


# name of a row, columns; the rows of 63 and of 300 elements fill no whole warps, that of 8200 no whole pass
BLOCK_NORMS = [(name, columns) for name in ("vllm", "vllm_256", "torch") for columns in (64, 300, 1024, 4096, 8200)] + [("vllm", 63)]
USUAL_BLOCK_NORMS = {("vllm", 300, "f16")}


@pytest.mark.parametrize(
    ("name", "columns", "kind"),
    [
        pytest.param(name, columns, kind, marks=() if (name, columns, kind) in USUAL_BLOCK_NORMS else pytest.mark.full)
        for name, columns in BLOCK_NORMS
        for kind in DTYPES
    ],
)
def test_norms_of_vllm_and_pytorch_equal_their_kernels(name, columns, kind):
    """5 rows with special values and, at up to 1024 columns, 27 ordinary ones; CUDA C++ compiled by NVRTC, with CUB's sum of a block."""
    case, function = Case(name, kind, columns), "layer_norm" if name == "torch" else "rms_norm"
    x = np.concatenate([draw_rows(case), draw_rows(case, 1, 27 if columns <= 1024 else 3)])
    weight, bias = vectors(case)
    kernel = functional.get_kernel(function, name, columns=columns, dtype=x.dtype)
    threads = 128 if name == "torch" else min(columns // kernel.sums.vector, 256 if name == "vllm_256" else 1024)
    vectors_of_row = [bias] if name == "torch" else []
    args = [np.zeros_like(x), x, weight, *vectors_of_row, np.float32(EPS), np.int32(columns)]
    text = block_norm_texts()[f"{kind} {kernel.sums.vector}"]
    expected = words(ptx.run(text, entry=function, args=args, grid=len(x), block=threads, target="sm_90a")[0])
    computed = getattr(functional, function)(x, weight, *vectors_of_row, eps=EPS, kernel=kernel)
    assert int((words(computed) != expected).sum()) == 0


@pytest.mark.full
def test_the_orders_of_moments_are_seen():
    """Control: another order of lanes or warps, or two passes, gives other words in some of 64 rows."""
    case, own = Case("torch", "f32", 1024), functional.get_kernel("layer_norm", "torch", columns=1024)
    x, (weight, bias) = draw_rows(case, 0, 64), vectors(case)
    result = words(functional.layer_norm(x, weight, bias, eps=EPS, kernel=own))
    sums = own.sums
    others = [sums.replace(lane_order="near"), sums.replace(warp_order="near"), sums.replace(warp_order="chain"), sums.replace(vector=1)]
    for other in [*(own.replace(sums=each) for each in others), own.replace(moments="two_pass")]:
        assert (words(functional.layer_norm(x, weight, bias, eps=EPS, kernel=other)) != result).any(), other


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
