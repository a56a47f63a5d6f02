"""Kernels of CUDA C++ and Triton, as PTX, against the words of an H200. ptx_kernels/README.md describes them and their origin."""

from fractions import Fraction
from zlib import crc32

import numpy as np
import pytest
from oracles.ptx_references import REFERENCES, expected_buffers, values
from ptx_kernels.manifest import CONTRACTED, KERNELS, LARGE, MORE, Kernel
from ptx_kernels.replay import replay_kernel
from ptx_kernels.words import differing, differing_large, recorded_buffers, recorded_facts, recorded_large, recorded_names, stored_arrays
from support.sampling import sample_cases

WITHOUT_REFERENCE = {"fp8_out", "halves", "bfloats", "conversions", "integers"}  # the GPU alone says what their words are
BY_NAME = {kernel.name: kernel for kernel in KERNELS}
# Where nvcc makes the same text for both targets it is run once
CASES = [f"{kernel.name} {target}" for kernel in KERNELS for target in kernel.texts]
USUAL = {"split_k_semaphore sm_80", "specialised sm_90a", "collatz sm_80"}


def case(name: str) -> tuple[Kernel, str]:
    entry, _, target = name.rpartition(" ")
    return BY_NAME[entry], target


@pytest.mark.parametrize("name", sample_cases(CASES, USUAL, str))
def test_the_words_of_an_h200(name):
    kernel, target = case(name)
    wrong = {}
    for i, (ours, theirs) in enumerate(zip(replay_kernel(kernel, target), recorded_buffers(kernel, target), strict=True)):
        found = differing(kernel, i, ours, theirs)
        if found:
            wrong[i] = found
    assert not wrong, f"{name}: of each buffer, the words that differ: {wrong}"


@pytest.mark.full
def test_the_words_of_a_large_product():
    """512 cubed by tiles of 128 x 128: checksums of all rows and columns, which locate a differing word, and some words."""
    made = replay_kernel(LARGE, "sm_80")
    found = differing_large(made[2], recorded_large(LARGE, 2))
    assert not any(found), found


def test_what_was_recorded_is_what_is_kept():
    """The checksums of the texts that ran and of the operands; where both targets have one text, both gave the same words."""
    rows = recorded_facts()["kernels"]
    assert list(rows) == [kernel.name for kernel in sorted((*KERNELS, *MORE), key=lambda kernel: kernel.file)]
    for kernel in (*KERNELS, *MORE):
        row = rows[kernel.name]
        assert row["texts"] == {target: crc32(kernel.text(target).encode()) for target in kernel.targets}, kernel.name
        assert row["operands"] == [crc32(array.tobytes()) for array in kernel.draw_buffers()], kernel.name
        assert not row["runs differ"] and row["changed"], kernel.name
    apart = {kernel.name for kernel in KERNELS if len(kernel.texts) == 2 or "sorted" in kernel.compared.values()}
    assert {name.split(".")[0] for name in recorded_names() if name.endswith(".sm_90a")} <= apart


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_kernels_compute_what_they_say(kernel):
    if kernel.entry in WITHOUT_REFERENCE:
        assert kernel.entry not in REFERENCES
        return
    for target in kernel.targets:
        gave = recorded_buffers(kernel, target)
        for i, (wanted, error) in expected_buffers(kernel).items():
            got = values(kernel.operands[i].kind, np.sort(gave[i]) if kernel.compared.get(i) == "sorted" else gave[i])
            wanted = np.where(np.ma.getmaskarray(wanted), got, np.ma.getdata(wanted))
            assert got.shape == wanted.shape
            size = np.abs(wanted.astype(float))
            near, beyond = size < 1e30, ~np.isfinite(size)  # what lies between may overflow on the GPU
            assert not np.isfinite(got[beyond].astype(float)).any()
            if error:
                assert np.abs(got[near] - wanted[near]).max(initial=0) <= error * size[near].max(initial=1e-300)
            else:
                assert np.array_equal(got[near], wanted[near])


def test_a_word_that_differs_is_found():
    """Control: one flipped bit is found in an array of words and in one recorded as checksums."""
    kernel = BY_NAME["sgemm"]
    theirs = recorded_buffers(kernel, "sm_80")[2]
    ours = theirs.copy()
    ours[3, 5] ^= 1
    assert differing(kernel, 2, ours, theirs)[:3] == (1, theirs.size, [(3, 5)])
    whole = LARGE.draw_buffers()[0].astype(np.uint32)
    changed = whole.copy()
    changed[100, 200] ^= 1
    assert differing_large(changed, stored_arrays(whole)) == ([100], [200], 0)
    assert not any(differing_large(whole, stored_arrays(whole)))


def test_what_ptx_leaves_to_the_driver():
    """A product and a difference without a rounding in their names: the H200's driver fused them, as ptxas does by default."""
    x, y = (codes.view(np.float64) for codes in CONTRACTED.draw_buffers()[:2])
    theirs = [codes.view(np.float64) for codes in recorded_buffers(CONTRACTED, "sm_80")[2:]]
    ours = [codes.view(np.float64) for codes in replay_kernel(CONTRACTED, "sm_80")[2:]]
    apart = [codes.view(np.float64) for codes in replay_kernel(CONTRACTED, "sm_80", fmad=False)[2:]]
    fused = [float(Fraction(a) - Fraction(a) * Fraction(b)) for a, b in zip(x, y, strict=True)]
    assert np.array_equal(theirs[0], fused) and np.array_equal(theirs[1], x - x * y)
    assert all(map(np.array_equal, ours, theirs))
    assert np.array_equal(apart[0], x - x * y) and (apart[0] != theirs[0]).sum() > 8


@pytest.mark.full
def test_another_gpu_has_other_words():
    """Control: the arithmetic of sm_80 in place of the H200's differs."""
    kernel = BY_NAME["mma_f16"]
    ours = replay_kernel(kernel, "sm_80", target="sm_80")
    assert differing(kernel, 2, ours[2], recorded_buffers(kernel, "sm_80")[2]).count > 100
