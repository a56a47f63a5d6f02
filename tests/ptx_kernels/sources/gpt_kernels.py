"""The matrix products, the attention and the embedding of a small GPT in Triton; functional_kernels.py has the operations between them.

`python compile.py --functional` compiles them with Triton 3.9.0 for sm_80.
"""

import triton
import triton.language as tl


@triton.jit
def embedding(tokens, table, x, WIDTH: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, WIDTH)
    tl.store(x + row * WIDTH + places, tl.load(table + tl.load(tokens + row) * WIDTH + places))


@triton.jit
def matmul(a, b, d, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows, columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        left = tl.load(a + rows[:, None] * K + (start + inner)[None, :])
        right = tl.load(b + (start + inner)[:, None] * N + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(d + rows[:, None] * N + columns[None, :], total.to(d.dtype.element_ty))


@triton.jit
def add(x, y, SIZE: tl.constexpr):
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.load(x + places).to(tl.float32) + tl.load(y + places).to(tl.float32)
    tl.store(x + places, total.to(tl.bfloat16))


@triton.jit
def attention(q, k, v, out, stride, scale, T: tl.constexpr, D: tl.constexpr):
    """One head a program, all queries and keys at once; causal."""
    rows, inner = tl.arange(0, T), tl.arange(0, D)
    offsets = rows[:, None] * stride + tl.program_id(0) * D + inner[None, :]
    keys = rows[None, :] * stride + tl.program_id(0) * D + inner[:, None]
    scores = tl.dot(tl.load(q + offsets), tl.load(k + keys)) * scale
    scores = tl.where(rows[:, None] >= rows[None, :], scores, -float("inf"))
    powers = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    weights = (powers / tl.sum(powers, axis=1)[:, None]).to(tl.bfloat16)
    tl.store(out + offsets, tl.dot(weights, tl.load(v + offsets)).to(tl.bfloat16))
