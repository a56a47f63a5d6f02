"""Twenty wrong and twenty right kernels for the assertions of `tcemu.testing`: one Triton function whose constants plant a defect or choose
another right way of computing scale·(A·B) + C. `test_pytest_plugin.py` runs them by pytest as users do.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

import tcemu
from tcemu.testing import assert_bits_equal, assert_product_close
from tcemu.triton import as_tensor


@triton.jit
def planted_kernel(
    a_ptr, b_ptr, c_ptr, scale_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    DESCENDING: tl.constexpr, TWO_SUMS: tl.constexpr, DEFECT: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tile // tiles_n, tile % tiles_n
    rows, columns = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    integer: tl.constexpr = a_ptr.dtype.element_ty == tl.int8
    total_type: tl.constexpr = tl.int32 if integer else tl.float32
    total, other = tl.zeros((BLOCK_M, BLOCK_N), total_type), tl.zeros((BLOCK_M, BLOCK_N), total_type)
    blocks = tl.cdiv(K, BLOCK_K)
    first = 0
    if DEFECT == "first block skipped":
        first = 1
    if DEFECT == "last block skipped":
        blocks -= 1
    for number in range(first + part, blocks, SPLIT_K):
        block = blocks - 1 - number if DESCENDING else number
        if DEFECT == "one tile loaded again and again":
            block = 0
        if DEFECT == "a block counted twice":
            block = tl.maximum(block, 1)
        steps = block * BLOCK_K + tl.arange(0, BLOCK_K)
        limit = K - 1 if DEFECT == "mask one short" else K
        stride = K + 1 if DEFECT == "stride one long" else K
        inside = (rows < M)[:, None] & (steps < limit)[None, :]
        a = tl.load(
            a_ptr + rows[:, None] * stride + steps[None, :], mask=inside & (rows[:, None] * stride + steps[None, :] < M * K), other=0.0
        )
        b = tl.load(b_ptr + steps[:, None] * N + columns[None, :], mask=(steps < limit)[:, None] & (columns < N)[None, :], other=0.0)
        if DEFECT == "tile of the neighbour":
            b = tl.load(b_ptr + steps[:, None] * N + (columns[None, :] + BLOCK_N) % N)
        if DEFECT == "operand rounded to FP8":
            a = a.to(tl.float8e5).to(tl.float16)
        if DEFECT == "sums in f16":
            total = (tl.dot(a, b, out_dtype=tl.float16) + total.to(tl.float16)).to(tl.float32)
        elif TWO_SUMS:
            if number % 2 == 0:
                total = tl.dot(a, b, total)
            else:
                other = tl.dot(a, b, other)
        else:
            total = tl.dot(a, b, total, out_dtype=total_type)
        if DEFECT == "sums rounded to bf16":
            total = total.to(tl.bfloat16).to(tl.float32)
    total += other
    factor = tl.load(scale_ptr + (rows % (M - 1) if DEFECT == "scale of another row" else rows), mask=rows < M, other=0.0)
    if DEFECT == "scale twice":
        total = total * factor[:, None]
    if not integer and DEFECT != "no scale":
        total = total * factor[:, None]
    place = c_ptr + rows[:, None] * N + columns[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    if DEFECT == "zeros":
        total = tl.zeros_like(total)
    if DEFECT == "negative results lost":
        total = tl.maximum(total, 0.0)
    if DEFECT == "transposed":
        place = c_ptr + columns[None, :] * M + rows[:, None]
    if DEFECT == "last row not written":
        mask = mask & (rows < M - 1)[:, None]
    if DEFECT == "one wrong element":
        total = tl.where((rows == 5)[:, None] & (columns == 3)[None, :], total * 1.5, total)
    if DEFECT == "one NaN":
        total = tl.where((rows == 5)[:, None] & (columns == 3)[None, :], float("nan"), total)
    if DEFECT == "one bit":
        flipped = (total.to(tl.int32, bitcast=True) ^ 1).to(tl.float32, bitcast=True)
        total = tl.where((rows == 5)[:, None] & (columns == 3)[None, :], flipped, total)
    if DEFECT == "old contents added":
        total += tl.load(place, mask=mask)
    if SPLIT_K > 1 and DEFECT != "parts that overwrite each other":
        tl.atomic_add(place, total.to(c_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(place, total.to(c_ptr.dtype.element_ty), mask=mask)


class Planted(NamedTuple):
    """One kernel and its operands."""

    defect: str = ""
    dtype: type = np.float16
    op: str = "f16"  # the instruction that it should have
    out: type = np.float32
    shape: tuple[int, int, int] = (16, 16, 64)  # M, N, K
    block: tuple[int, int, int] = (16, 16, 16)
    split_k: int = 1
    descending: bool = False
    two_sums: bool = False
    scaled: bool = False
    order: str = "unknown"
    rounding: str = "RN"  # of the operands
    warps: int = 1
    stages: int = 2


RIGHT = {
    "plain": Planted(), "bits in ascending order": Planted(order="ascending"), "descending": Planted(descending=True),
    "split in two": Planted(split_k=2), "split in four": Planted(split_k=4), "two sums": Planted(two_sums=True),
    "scaled": Planted(scaled=True), "scaled and split": Planted(scaled=True, split_k=2),
    "bf16": Planted(dtype=ml_dtypes.bfloat16, op="bf16"), "f16 out": Planted(out=np.float16),
    "bf16 out": Planted(dtype=ml_dtypes.bfloat16, op="bf16", out=ml_dtypes.bfloat16),
    "tf32": Planted(dtype=np.float32, op="tf32", rounding="RZ"), "int8": Planted(dtype=np.int8, op="s8", out=np.int32, block=(16, 16, 32)),
    "remainders": Planted(shape=(20, 24, 72)), "large tiles": Planted(shape=(64, 32, 64), block=(64, 32, 32), warps=4),
    "eight warps": Planted(shape=(64, 64, 32), block=(64, 64, 32), warps=8), "four stages": Planted(shape=(16, 16, 128), stages=4),
    "two warps": Planted(shape=(32, 16, 64), block=(32, 16, 32), warps=2),
    "one block of K": Planted(block=(16, 16, 64)), "bits of bf16": Planted(dtype=ml_dtypes.bfloat16, op="bf16", order="ascending"),
}  # fmt: skip
WRONG = {
    **{
        defect: Planted(defect)
        for defect in (
            "zeros", "last block skipped", "first block skipped", "a block counted twice", "mask one short", "stride one long",
            "one tile loaded again and again", "operand rounded to FP8", "sums in f16", "sums rounded to bf16", "negative results lost",
            "transposed", "last row not written", "one wrong element", "one NaN", "old contents added",
        )
    },
    "one bit": Planted("one bit", order="ascending"), "no scale": Planted("no scale", scaled=True),
    "scale twice": Planted("scale twice", scaled=True), "scale of another row": Planted("scale of another row", scaled=True),
    "tile of the neighbour": Planted("tile of the neighbour", shape=(16, 32, 64)),
    "parts that overwrite each other": Planted("parts that overwrite each other", split_k=2),
}  # fmt: skip


def check(case: Planted, target: str) -> None:
    """Run a kernel under the emulation that is active, and assert that its result is right."""
    rng = np.random.default_rng(43)
    m, n, k = case.shape
    if case.dtype is np.int8:
        a, b = (rng.integers(-99, 99, size=size).astype(np.int8) for size in ((m, k), (k, n)))
    else:
        a, b = (rng.normal(size=size).astype(np.float32).astype(case.dtype) for size in ((m, k), (k, n)))
    scale = np.exp2(rng.integers(-3, 4, m)).astype(np.float32) if case.scaled else np.ones(m, np.float32)
    c = np.full((m, n), 0 if case.split_k > 1 else 3, case.out)
    grid = (triton.cdiv(m, case.block[0]) * triton.cdiv(n, case.block[1]), case.split_k)
    planted_kernel[grid](
        *map(as_tensor, (a, b, c, scale)), m, n, k, *case.block, SPLIT_K=case.split_k, DESCENDING=case.descending,
        TWO_SUMS=case.two_sums, DEFECT=case.defect, num_warps=case.warps, num_stages=case.stages,
    )  # fmt: skip
    if case.order == "ascending":
        assert_bits_equal(c, np.asarray(tcemu.gemm(a, b, op=case.op, target=target)))
    assert_product_close(
        c, a, b, op=case.op, target=target, order=case.order, scale=scale[:, None] if case.scaled else None, rounding=case.rounding
    )
