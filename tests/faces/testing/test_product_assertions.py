"""`tcemu.testing`: twenty wrong kernels fail, twenty right ones pass, and data that cannot tell them apart is rejected."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu.testing import assert_bits_equal, assert_product_close

ROOT = Path(tcemu.__file__).parents[2]
RNG = np.random.default_rng(43)
M, N, K, TILE = 16, 24, 256, 32
A, B = RNG.normal(size=(M, K)).astype(np.float16), RNG.normal(size=(K, N)).astype(np.float16)
SQUARE = RNG.normal(size=(K, K)).astype(np.float16)[:M, :M]
C = (8 * RNG.normal(size=(M, N))).astype(np.float32)
SCALE = np.float32(0.037)
H100 = {"op": "f16", "target": "H100"}


def product(a=A, b=B, c=None, op="f16", target="H100", **options) -> np.ndarray:
    return np.array(tcemu.gemm(a, b, c, op=op, target=target, **options))


@cache
def good() -> np.ndarray:
    return product()


def split(parts: int, target: str = "H100", order: Callable = list) -> np.ndarray:
    """The product in parts along K, which are added in f32."""
    width = K // parts
    sums = [product(A[:, n * width :][:, :width], B[n * width :][:width], target=target) for n in range(parts)]
    total = np.zeros((M, N), np.float32)
    for each in order(sums):
        total = total + each
    return total


def changed(index, value) -> np.ndarray:
    result = good().copy()
    result[index] = value
    return result


def permuted(order) -> np.ndarray:
    return product(np.ascontiguousarray(A[:, order]), np.ascontiguousarray(B[order]))


def rounded_between_tiles() -> np.ndarray:
    """Accumulates in bf16 from tile to tile."""
    total = np.zeros((M, N), ml_dtypes.bfloat16)
    for start in range(0, K, TILE):
        total = product(A[:, start : start + TILE], B[start : start + TILE], total.astype(np.float32)).astype(ml_dtypes.bfloat16)
    return total.astype(np.float32)


def flipped(bit: int) -> np.ndarray:
    words = good().copy().view(np.uint32)
    words[3, 5] ^= np.uint32(1) << np.uint32(bit)
    return words.view(np.float32)


KEEP = np.arange(K) != K - 1
WRONG = {  # the result and the arguments of the assertion
    "zeros": (lambda: np.zeros_like(good()), H100),
    "another result's transpose": (lambda: np.resize(good().T, good().shape), H100),
    "rows of A in reverse": (lambda: good()[::-1], H100),
    "the last tile of K left out": (lambda: product(A[:, :-TILE], B[:-TILE]), H100),
    "the tiles of B off by one": (lambda: product(A, np.roll(B, TILE, axis=0)), H100),
    "the last product left out by a wrong mask": (lambda: product(A[:, KEEP], B[KEEP]), H100),
    "the last column not written": (lambda: changed((slice(None), -1), 0), H100),
    "a block of rows written twice": (lambda: changed(slice(8, 16), good()[:8]), H100),
    "f16 accumulation": (lambda: product(op="mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16").astype(np.float32), H100),
    "bf16 operands": (lambda: product(op="bf16"), H100),
    "bf16 between tiles": (rounded_between_tiles, H100),
    "the scale forgotten": (lambda: good(), H100 | {"scale": SCALE}),
    "the scale applied twice": (lambda: good() * SCALE * SCALE, H100 | {"scale": SCALE}),
    "C forgotten": (lambda: good(), H100 | {"c": C}),
    "C added twice": (lambda: product(c=2 * C), H100 | {"c": C}),
    "one element of its neighbour": (lambda: changed((3, 4), good()[3, 5]), H100),
    "one element off by a thousandth": (lambda: changed((2, 7), good()[2, 7] * 1.001 + 0.001), H100),
    "one sign": (lambda: changed((1, 1), -good()[1, 1]), H100),
    "one NaN": (lambda: changed((0, 0), np.nan), H100),
    "one bit of a promised result": (lambda: flipped(0), H100 | {"order": "ascending"}),
    "another GPU where bits are promised": (lambda: product(target="A100"), H100 | {"order": "ascending"}),
    "another order where bits are promised": (lambda: split(2), H100 | {"order": "ascending"}),
    "a high bit of the significand": (lambda: flipped(15), H100),
}
RIGHT = {
    "ascending, its bits": (lambda: good(), H100 | {"order": "ascending"}),
    "ascending": (lambda: good(), H100),
    "A100": (lambda: product(target="A100"), {"op": "f16", "target": "A100"}),
    "V100": (lambda: product(op="f16", target="V100"), {"op": "f16", "target": "V100"}),
    "L4": (lambda: product(target="L4"), {"op": "f16", "target": "L4"}),
    "split-K by 2": (lambda: split(2), H100),
    "split-K by 8": (lambda: split(8), H100),
    "split-K by 8 in reverse": (lambda: split(8, order=lambda sums: sums[::-1]), H100),
    "split-K by 4 on A100": (lambda: split(4, "A100"), {"op": "f16", "target": "A100"}),
    "K in reverse": (lambda: permuted(np.arange(K)[::-1]), H100),
    "K shuffled": (lambda: permuted(np.random.default_rng(1).permutation(K)), H100),
    "K interleaved": (lambda: permuted(np.arange(K).reshape(16, -1).T.ravel()), H100),
    "positive products first": (lambda: permuted(np.argsort(-(A[0].astype(float) * B[:, 0]))), H100),
    "f32 by FMA": (lambda: A.astype(np.float32) @ B.astype(np.float32), H100),
    "exact": (lambda: (A.astype(float) @ B.astype(float)).astype(np.float32), H100),
    "a result in f16": (lambda: good().astype(np.float16), H100),
    "a result in bf16": (lambda: good().astype(ml_dtypes.bfloat16), H100),
    "C as the accumulator": (lambda: product(c=C), H100 | {"c": C}),
    "C added at the end": (lambda: good() + C, H100 | {"c": C}),
    "a scale": (lambda: good() * SCALE, H100 | {"scale": SCALE}),
    "a scale of rows, and C": (lambda: good() * C[:, :1] + C, H100 | {"scale": C[:, :1], "c": C}),
    "f16 accumulation where it is asked for": (
        lambda: product(A[:, :64], B[:64], op="mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"), {
            "op": "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", "target": "H100", "a": A[:, :64], "b": B[:64],
        },
    ),
}  # fmt: skip


def check(planted) -> None:
    result, options = planted
    options = {"a": A, "b": B} | options
    assert_product_close(result(), **options)


SLOW = (  # each compiles programs of its own
    "bf16 operands", "bf16 between tiles", "another order where bits are promised", "C added twice", "split-K by 4 on A100", "split-K by 8",
    "f16 accumulation where it is asked for", "V100", "L4", "C as the accumulator",
)  # fmt: skip


def quick(kernels):
    return sample_cases(kernels, [name for name in kernels if name not in SLOW])


@pytest.mark.parametrize("name", quick(WRONG))
def test_wrong_kernels_fail(name):
    with pytest.raises(AssertionError):
        check(WRONG[name])


@pytest.mark.parametrize("name", quick(RIGHT))
def test_right_kernels_pass(name):
    check(RIGHT[name])


def test_there_are_twenty_of_each():
    assert len(WRONG) >= 20 and len(RIGHT) >= 20


@pytest.mark.parametrize("recipe", sample_cases(("fp8 on H100", "mxfp8 on B200", "deepseek on H100"), ("fp8 on H100",)))
def test_recipes(recipe):
    """The quantised product passes in its own order; a plain one of the unquantised operands, or a wrong scale, does not."""
    a, b = A.astype(np.float32), B.astype(np.float32)
    right = np.asarray(tcemu.matmul(a, b, recipe=recipe))
    assert_product_close(right, a, b, recipe=recipe)
    assert_product_close(right, a, b, recipe=recipe, order="ascending")
    assert_product_close(right * np.float32(2), a, b, recipe=recipe, scale=2.0)
    for wrong in (np.zeros_like(right), right * np.float32(1.5), np.roll(right, 1, axis=0), changed((3, 4), good()[3, 4] + 8)):
        with pytest.raises(AssertionError, match="of 384 elements"):
            assert_product_close(wrong, a, b, recipe=recipe)
    if recipe.startswith("mxfp8"):
        with pytest.raises(AssertionError, match="further"):
            assert_product_close(good(), a, b, recipe=recipe)


def test_integers_are_exact_in_any_order():
    a, b = RNG.integers(-99, 99, (8, 64), dtype=np.int8), RNG.integers(-99, 99, (64, 8), dtype=np.int8)
    total = a.astype(np.int32) @ b.astype(np.int32)
    assert_product_close(total, a, b, op="s8", target="A100")
    assert_product_close(total * np.float32(0.25), a, b, op="s8", target="A100", scale=0.25)
    with pytest.raises(AssertionError, match=r"1 of 64 elements.*\n.*\[0, 0\]"):
        assert_product_close(total + np.eye(8, 8, dtype=np.int32) * (np.arange(8) == 0), a, b, op="s8", target="A100")


def test_data_that_cannot_tell_is_rejected():
    zeros = np.zeros_like(A)
    with pytest.raises(ValueError, match="cannot tell"):
        assert_product_close(np.zeros_like(good()), zeros, B, **H100)
    one_sided = np.concatenate([A, A], axis=1), np.concatenate([B, -B])  # all sums cancel
    with pytest.raises(ValueError, match="cannot tell"):
        assert_product_close(np.zeros_like(good()), *one_sided, **H100)
    for options, word in (({}, "one of the two"), ({"op": "f16"}, "target"), (H100 | {"order": "random"}, "ascending")):
        with pytest.raises(ValueError, match=word):
            assert_product_close(good(), A, B, **options)
    with pytest.raises(AssertionError, match="shape"):
        assert_product_close(good()[:3], A, B, **H100)


def test_infinities_and_overflow():
    a = A.copy()
    a[0, 0] = np.inf
    result = product(a)
    assert_product_close(result, a, B, **H100)
    with pytest.raises(AssertionError):
        assert_product_close(np.where(np.isinf(result), 65504, result), a, B, **H100)
    large = np.where(np.arange(M)[:, None] == 0, np.float16(3000) * np.sign(B[:, 0])[None, :], A).astype(np.float16)
    with np.errstate(over="ignore"):
        assert_product_close(product(large).astype(np.float16), large, B, **H100)


def test_the_fixture_needs_a_gpu(tmp_path):
    (tmp_path / "test_kernel.py").write_text("def test_kernel(gpu):\n    raise AssertionError\n")
    command = [sys.executable, "-m", "pytest", "-p", "tcemu.pytest_plugin", "-p", "no:cacheprovider", "-q", str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=False,
    )
    assert done.returncode == 1 and "--tcemu-gpu H100" in done.stdout and "1 error" in done.stdout


def test_bits():
    x = np.array([1, -0.0, np.nan, 3], np.float32)
    assert_bits_equal(x, x.copy())
    assert_bits_equal(np.zeros((0, 3)), np.zeros((0, 3)))
    for wrong, word in (
        (np.abs(x), r"1 of 4 elements have other bits\n  \[1\]: got 0.0 \(0x00000000\), expected -0.0 \(0x80000000\)"),
        (x.astype(np.float16), "float16"), (x[:3], r"\[3\]"), ((x.view(np.uint32) ^ 1).view(np.float32), "4 of 4"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=word):
            assert_bits_equal(wrong, x)
