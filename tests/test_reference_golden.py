"""The reference replays the words that an H200 computed: every spelling of the recording, all eight operand classes, NaN words included."""

import fragments
import golden
import numpy as np
import pytest
import reference


def named(cases: list[dict]) -> list:
    """One parameter a case, called by its spelling."""
    return [pytest.param(case, id=f"{case['i']}-{case['ptx']}") for case in cases]


def chosen(case: dict, shape: tuple[int, ...], count: int) -> np.ndarray:
    """`count` places of D, the same on every run, spread evenly over its first axis."""
    rng = np.random.default_rng(case["i"])
    groups = np.arange(np.prod(shape)).reshape(shape[0], -1)
    picked = rng.permuted(groups, axis=1)[:, : max(1, count // shape[0])]
    return np.stack(np.unravel_index(picked.reshape(-1), shape), axis=-1)


def ints(codes: np.ndarray) -> list[int]:
    return [int(code) for code in codes]


def mismatches_of_mma(case: dict, count: int) -> list[str]:
    op = fragments.spelling(case["ptx"])
    recorded = golden.arrays(case)
    a, b, c, d = fragments.matrices(op, *(recorded[name] for name in "abcd"))
    wrong = []
    for warp, product, row, column in chosen(case, d.shape, count):
        got = reference.dot(
            *(op[name] for name in "dabc"),
            ints(a[warp, product, row]),
            ints(b[warp, product, :, column]),
            int(c[warp, product, row, column]),
            k=op["k"],
            mode=op["mode"],
            satfinite=op["satfinite"],
            bit_op=op["bit_op"],
        )
        want = int(d[warp, product, row, column])
        if got != want:
            wrong.append(f"warp {warp} product {product} row {row} column {column}: {got:#x}, the H200 gave {want:#x}")
    return wrong


@pytest.mark.parametrize("case", named(golden.cases("mma")))
def test_mma(case):
    assert mismatches_of_mma(case, 64) == []


@pytest.mark.full
@pytest.mark.parametrize("case", named(golden.cases("mma")))
def test_mma_whole_recording(case):
    assert mismatches_of_mma(case, 1 << 20) == []
