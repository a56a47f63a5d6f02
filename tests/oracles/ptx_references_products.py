"""What the kernels of products, softmaxes, norms and attention compute, in float64."""

import numpy as np

from .ptx_expected import ExpectedBuffer, reference

# ---- products


@reference("wmma_f16", "wmma_bf16", "wmma_f64")
def _(x, _):
    return {3: ExpectedBuffer(x[0] @ x[1] + x[2], 1e-5)}


@reference("wmma_f16_sums", "wmma_tf32", "wmma_s8")
def _(x, _):
    return {3: ExpectedBuffer(x[0] @ x[1].T + x[2], 0 if x[0].dtype.kind == "i" else 4e-3)}


@reference("mma_f16", "mma_bf16", "mma_tf32", "mma_s8", "mma_f64", "split_k_s8", "wgmma_f16", "wgmma_tf32", "wgmma_s8")
@reference("wgmma_f16_registers")
def _(x, _):
    exact = x[0].dtype.kind == "i"
    return {2: ExpectedBuffer(x[0] @ x[1].T + (x[2] if exact else 0), 0 if exact else 2e-3)}


@reference("mma_e4m3", "mma_e5m2", "mma_e4m3_e5m2", "wgmma_e4m3", "wgmma_e5m2_e4m3", "wgmma_e4m3_registers")
def _(x, _):
    return {2: ExpectedBuffer(x[0] @ x[1].T, 2e-3)}


@reference("mma_u8_s8")
def _(x, _):
    return {2: ExpectedBuffer(x[0] @ x[1].astype(np.int8).astype(np.int64).T)}


@reference("mma_s4")
def _(x, _):
    a, b = (np.stack([y & 15, y >> 4], -1).reshape(len(y), -1) for y in x[:2])
    return {2: ExpectedBuffer((a - 16 * (a > 7)) @ (b - 16 * (b > 7)).T)}


@reference("mma_b1")
def _(x, _):
    a, b = (np.unpackbits(y.astype(np.uint8), axis=-1).astype(np.int64) for y in x[:2])
    return {2: ExpectedBuffer(a @ (1 - b).T + (1 - a) @ b.T)}


@reference("mma_f16_trans", "gemm_128x128", "gemm_edges", "sgemm", "triton_matmul", "triton_matmul_tma", "wgmma_transposed")
def _(x, _):
    return {2: ExpectedBuffer(x[0] @ x[1], 4e-3)}


@reference("wgmma_bf16_negated")
def _(x, _):
    return {2: ExpectedBuffer(-(x[0] @ x[1].T), 1e-4)}


@reference("split_k_atomics")
def _(x, _):
    return {2: ExpectedBuffer(x[0] @ x[1].T + x[2])}


@reference("split_k_semaphore")
def _(x, _):
    return {2: ExpectedBuffer(x[0] @ x[1].T, 1e-5), 3: ExpectedBuffer(np.full(2, 3))}


@reference("split_k_last")
def _(x, _):
    parts = np.stack([x[0][:, i : i + 32] @ x[1][:, i : i + 32].T for i in (0, 32, 64)])
    return {2: ExpectedBuffer(parts, 1e-5), 3: ExpectedBuffer(np.zeros(2, int)), 4: ExpectedBuffer(parts.sum(0), 1e-3)}


@reference("sparse_f16", "sparse_bf16")
def _(x, _):
    dense = _dense(np.where(x[0] == 0, 1e-300, x[0]), x[2], 2)  # what is not stored meets no infinity
    return {3: ExpectedBuffer(np.where(dense[:, None] == 0, 0, dense[:, None] * x[1]).sum(-1), 1e-4)}


@reference("sparse_s8")
def _(x, _):
    return {3: ExpectedBuffer(_dense(x[0], x[2], 1) @ x[1].T)}


def _dense(stored: np.ndarray, metadata: np.ndarray, size: int) -> np.ndarray:
    """A of two steps; the lane (group g, k, m) of metadata: two halves of K for each row, or rows g and g + 8 in one word."""
    out = np.zeros((16, 2 * stored.shape[1]), stored.dtype)
    fours = stored.shape[1] // 4  # fours of a step
    for row in range(16):
        for i in range(2 * fours):
            step, four = divmod(i, fours)
            lane, at = row % 8 * 4, four % (fours // 2)
            word = metadata[step, lane + four // (fours // 2) * (1 if size == 2 else 2) + (0 if size == 2 else row // 8)]
            field = int(word) >> 4 * (at + (row // 8 * 4 if size == 2 else 0)) & 15
            for j, place in enumerate((field & 3, field >> 2)):
                out[row, 4 * i + place] = stored[row, 2 * i + j]
    return out


@reference("mma_e4m3_quantised")
def _(x, numbers):
    product = x[0] @ x[1].T
    return {
        2: ExpectedBuffer(np.clip(product * numbers[2], -448, 448), 0.07),
        3: ExpectedBuffer(np.abs(product).max(keepdims=True).reshape(1), 1e-2),
    }


@reference("bias_relu")
def _(x, _):
    return {3: ExpectedBuffer(np.maximum(x[0] @ x[1].T + x[2], 0), 1e-3)}


@reference("gelu")
def _(x, _):
    y = x[0] @ x[1].T + x[2]
    return {3: ExpectedBuffer(0.5 * y * (1 + np.tanh(0.7978845608 * (y + 0.044715 * y**3))), 5e-3)}


@reference("residual")
def _(x, numbers):
    return {3: ExpectedBuffer(numbers[2] * (x[0] @ x[1].T) + numbers[3] * x[2], 1e-3)}


@reference("requantised")
def _(x, numbers):
    return {
        4: ExpectedBuffer(
            np.clip(np.rint((x[0] @ x[1].T + x[2]).astype(np.float32) * x[3].astype(np.float32)) + numbers[2], -128, 127).astype(int)
        )
    }


@reference("specialised")
def _(x, _):
    """Blocks: step, 8 rows, 8 of K, row, element."""
    a = x[0].transpose(1, 3, 0, 2, 4).reshape(64, 192)
    b = x[1].transpose(0, 2, 4, 1, 3, 5).reshape(64, 192)
    return {2: ExpectedBuffer(a @ b.T, 1e-4)}


@reference("bulk_round_trip")
def _(x, _):
    return {1: ExpectedBuffer((x[0] * 3 + np.arange(512) % 256) % 2**32)}


@reference("tma_boxes")
def _(x, _):
    padded = np.pad(x[1], ((4, 8), (8, 24)))
    return {0: ExpectedBuffer(np.stack([padded[8 * i : 8 * i + 8, 16 * j : 16 * j + 16] for i in range(3) for j in range(3)]))}


@reference("tma_gemm")
def _(x, _):
    return {2: ExpectedBuffer(x[0] @ x[1].T, 1e-4)}


@reference("triton_matmul_fp8")
def _(x, _):
    return {3: ExpectedBuffer(x[0] @ x[1].T * x[2][:, None], 5e-3)}


@reference("stored_by_matrices")
def _(x, _):
    return {2: ExpectedBuffer(x[0] @ x[1].T, 1e-3)}


@reference("stored_transposed")
def _(x, _):
    return {2: ExpectedBuffer(np.hstack([(x[0] @ x[1][i : i + 32].T).T for i in (0, 32)]), 1e-3)}


@reference("cutlass_gemm")
def _(x, numbers):
    return {3: ExpectedBuffer(np.maximum(numbers[3] * (x[0] @ x[1].T) + numbers[4] * x[2], 0), 1e-3)}


@reference("cute_wgmma")
def _(x, _):
    return {2: ExpectedBuffer(x[0] @ x[1].T, 1e-4)}


# ---- rows


@reference("softmax_warp", "softmax_online", "triton_softmax")
def _(x, _):
    weights = np.exp(x[0] - x[0].max(-1, keepdims=True))
    return {1: ExpectedBuffer(weights / weights.sum(-1, keepdims=True), 1e-5)}


@reference("layer_norm", "triton_layer_norm")
def _(x, _):
    return {3: ExpectedBuffer((x[0] - x[0].mean(-1, keepdims=True)) / np.sqrt(x[0].var(-1, keepdims=True) + 1e-5) * x[1] + x[2], 1e-3)}


@reference("rms_norm")
def _(x, _):
    return {2: ExpectedBuffer(x[0] / np.sqrt((x[0] ** 2).mean(-1, keepdims=True) + 1e-6) * x[1], 1e-5)}


def _attend(x, numbers, causal):
    scores = x[0] @ x[1].swapaxes(1, 2) * numbers[1]
    scores = np.where(np.tri(scores.shape[1], dtype=bool), scores, -np.inf) if causal else scores
    weights = 2.0 ** (scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    return {
        3: ExpectedBuffer(weights @ x[2] / total, 2e-3),
        4: ExpectedBuffer((scores.max(-1, keepdims=True) + np.log2(total))[..., 0], 1e-5),
    }


@reference("attention")
def _(x, numbers):
    return _attend(x, numbers, False)


@reference("attention_causal", "triton_attention")
def _(x, numbers):
    return {i: y for i, y in _attend(x, numbers, True).items() if i < len(x)}
