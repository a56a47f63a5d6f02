"""The reference replays the words that an H200 computed: all eight operand classes, NaN words included; every case under `-m full`."""

import numpy as np
import pytest
from support import golden
from support import recorded_cases as recorded
from support.sampling import sample_cases


def parameters(*families: str, every: int = 6) -> list:
    """One parameter a case, called by its number and spelling; the usual run has one of `every` so many."""
    found = [case for family in families for case in golden.cases(family)]
    return sample_cases(found, every, lambda case: f"{case['i']}-{case['ptx']}")


ALL = parameters("mma", "mma_sp", "wmma", "wgmma", "wgmma_sp", every=1)


def mismatches(case: dict, count: int) -> list[str]:
    """Compares about `count` outputs, the same on every run, as many from each group (a group is a warp, so each class has its share)."""
    words = recorded.load(case)
    rng = np.random.default_rng(case["i"])
    places = np.arange(words.d.size).reshape(len(words.d), -1)
    picked = rng.permuted(places, axis=1)[:, : max(1, count // len(places))]
    wrong = []
    for place in zip(*np.unravel_index(picked.reshape(-1), words.d.shape), strict=True):
        got, want = words.reference_word(*place), words.d[place]
        if got != want:
            wrong.append(f"group, row, column {tuple(map(int, place))}: {got:#x}, the H200 gave {want:#x}")
    return wrong


@pytest.mark.parametrize("case", parameters("mma"))
def test_mma(case):
    assert mismatches(case, 64) == []


@pytest.mark.parametrize("case", parameters("mma_sp", "wmma"))
def test_sparse_and_wmma(case):
    assert mismatches(case, 32) == []


@pytest.mark.parametrize("case", parameters("wgmma", "wgmma_sp"))
def test_wgmma(case):
    assert mismatches(case, 16) == []


@pytest.mark.full
@pytest.mark.parametrize("case", ALL)
def test_whole_recording(case):
    assert mismatches(case, 1 << 20) == []
