"""Kernels in Triton: matrix products in f16 and FP8, by pointers and by tensor descriptors (TMA), softmax, layer norm and attention.

`python compile.py --triton` compiles them for sm_80 and sm_90a; no GPU is needed for that.
"""

import triton
import triton.language as tl


@triton.jit
def triton_matmul(a, b, d, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, k, K):
        a_tile = tl.load(a + rows[:, None] * k + (start + inner)[None, :], mask=(rows < m)[:, None], other=0.0)
        b_tile = tl.load(b + (start + inner)[:, None] * n + columns[None, :], mask=(columns < n)[None, :], other=0.0)
        total = tl.dot(a_tile, b_tile, total)
    tl.store(d + rows[:, None] * n + columns[None, :], total.to(tl.float16), mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def triton_matmul_fp8(a, b, scales, d, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """B by columns (N x K); one scale a row of A; the result in bf16."""
    rows, columns = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, k, K):
        a_tile = tl.load(a + rows[:, None] * k + (start + inner)[None, :])
        b_tile = tl.load(b + columns[None, :] * k + (start + inner)[:, None])
        total = tl.dot(a_tile, b_tile, total)
    total *= tl.load(scales + rows)[:, None]
    tl.store(d + rows[:, None] * n + columns[None, :], total.to(tl.bfloat16))


@triton.jit
def triton_matmul_tma(a, b, d, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """a, b, d: tensor descriptors that the host makes."""
    row, column = tl.program_id(0) * M, tl.program_id(1) * N
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, k, K):
        total = tl.dot(a.load([row, start]), b.load([start, column]), total)
    d.store([row, column], total.to(tl.float16))


@triton.jit
def triton_softmax(x, y, columns, SIZE: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, SIZE)
    values = tl.load(x + row * columns + places, mask=places < columns, other=-float("inf"))
    values = tl.exp(values - tl.max(values, axis=0))
    tl.store(y + row * columns + places, values / tl.sum(values, axis=0), mask=places < columns)


@triton.jit
def triton_layer_norm(x, gain, bias, y, columns, epsilon, SIZE: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, SIZE)
    mask = places < columns
    values = tl.load(x + row * columns + places, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(values, axis=0) / columns
    centred = tl.where(mask, values - mean, 0.0)
    scale = 1 / tl.sqrt_rn(tl.sum(centred * centred, axis=0) / columns + epsilon)
    out = centred * scale * tl.load(gain + places, mask=mask, other=0.0) + tl.load(bias + places, mask=mask, other=0.0)
    tl.store(y + row * columns + places, out.to(tl.float16), mask=mask)


@triton.jit
def triton_attention(q, k, v, out, length, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr):
    """One head a program along axis 1; scale holds log2(e) already."""
    head = tl.program_id(1) * length * D
    rows, inner = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    queries = tl.load(q + head + rows[:, None] * D + inner[None, :])
    largest, total = tl.full((M,), -float("inf"), tl.float32), tl.zeros((M,), tl.float32)
    summed = tl.zeros((M, D), tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * M if CAUSAL else length, N):
        keys = start + tl.arange(0, N)
        scores = tl.dot(queries, tl.load(k + head + keys[None, :] * D + inner[:, None])) * scale
        if CAUSAL:
            scores = tl.where(rows[:, None] >= keys[None, :], scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        weights, shrink = tl.exp2(scores - larger[:, None]), tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, axis=1)
        values = tl.load(v + head + keys[:, None] * D + inner[None, :])
        summed = tl.dot(weights.to(tl.float16), values, summed * shrink[:, None])
        largest = larger
    tl.store(out + head + rows[:, None] * D + inner[None, :], (summed / total[:, None]).to(tl.float16))
