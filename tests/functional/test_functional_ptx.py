"""Every ready row against its kernel's PTX, run statement by statement: the same words, NaN and signs of zero included."""

import pytest
from ptx_kernels.functional_manifest import CASES, GPT, Case, compiled_texts
from support.functional_cases import EPS, by_functional, by_ptx, count_differences, draw_rows, vectors, words

from tcemu import functional

USUAL = (Case("softmax_rows", "f16", 300), Case("rms_norm_rows", "bf16", 300))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in USUAL else pytest.mark.full) for case in CASES], ids=lambda c: c.name
)
def test_a_ready_row_equals_its_kernel(case):
    different, _ = count_differences(case)
    assert different == 0


def test_every_case_has_a_text():
    assert set(compiled_texts()) == {case.name for case in CASES} | {f"gpt {name}" for name in GPT}


@pytest.mark.full
@pytest.mark.parametrize("change", [{"thread_order": "chain"}, {"lane_order": "near"}, {"warps": 4}, {"vector": 1}, {"fused": False}])
def test_another_order_is_another_result(change):
    case = Case("rms_norm_rows", "f32", 4096)
    own = functional.get_kernel("rms_norm", "liger", columns=4096)
    x, (weight, _) = draw_rows(case), vectors(case)
    changed = functional.rms_norm(x, weight, eps=EPS, kernel=own.replace(sums=own.sums.replace(**change)))
    assert (words(by_ptx(case)) != words(changed)).any() and (words(by_ptx(case)) == words(by_functional(case))).all()
