"""Triton functions of the corpus, by Triton's own compiler and `tcemu.triton.emulated` in checked mode."""

import numpy as np
import triton
import triton.language as tl
from kernels.corpus.corpus_table import BF16, E4M3, TRITON, case, small

from tcemu.triton import as_tensor, emulated


def start(function, *args, grid=1, gpu="H100", **options):
    """Launch a function; arrays are written in place."""
    with emulated(gpu, checked=True):
        function[grid if isinstance(grid, tuple) else (grid,)](*(as_tensor(x) if isinstance(x, np.ndarray) else x for x in args), **options)


@triton.jit
def softmax_gradient_kernel(y, dy, dx, n, B: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, B)
    mask = tl.arange(0, B) < n
    p, g = tl.load(y + at, mask=mask, other=0.0), tl.load(dy + at, mask=mask, other=0.0)
    tl.store(dx + at, p * (g - tl.sum(p * g, 0)), mask=mask)


@case(TRITON)
def gradient_of_softmax(rng):
    y, dy = rng.random((3, 100)).astype(np.float32), rng.normal(size=(3, 100)).astype(np.float32)
    dx = np.zeros_like(y)
    start(softmax_gradient_kernel, y, dy, dx, 100, B=128, grid=3, enable_fp_fusion=False)  # or lanes that store one word differ
    wide = y.astype(np.float64)
    yield dx, wide * (dy - (wide * dy).sum(1, keepdims=True)), 1e-4


@triton.jit
def group_norm_kernel(x, y, w, C: tl.constexpr, S: tl.constexpr):
    rows, columns = tl.arange(0, C)[:, None], tl.arange(0, S)[None, :]
    at = tl.program_id(0) * C * S + rows * S + columns
    v = tl.load(x + at)
    m = tl.sum(v) / (C * S)
    d = v - m
    r = tl.rsqrt(tl.sum(d * d) / (C * S) + 1e-5)
    tl.store(y + at, d * r * tl.load(w + tl.program_id(0) * C + rows))


@case(TRITON)
def normalisation_of_groups(rng):
    x, w = rng.normal(size=(4, 4, 32)).astype(np.float32), rng.normal(size=(4, 4, 1)).astype(np.float32)
    y = np.zeros_like(x)
    start(group_norm_kernel, x, y, w, C=4, S=32, grid=4, enable_fp_fusion=False)
    d = x.astype(np.float64) - x.mean((1, 2), keepdims=True, dtype=np.float64)
    yield y, d / np.sqrt((d * d).mean((1, 2), keepdims=True) + 1e-5) * w, 1e-4


@triton.jit
def norm_kernel(x, residual, w, y, n, B: tl.constexpr):
    c = tl.arange(0, B)
    at = tl.program_id(0) * n + c
    v = tl.load(x + at, mask=c < n, other=0.0).to(tl.float32) + tl.load(residual + at, mask=c < n, other=0.0).to(tl.float32)
    tl.store(residual + at, v.to(tl.bfloat16), mask=c < n)
    r = 1 / tl.sqrt(tl.sum(v * v, 0) / n + 1e-6)
    tl.store(y + at, (v * r * tl.load(w + c, mask=c < n, other=0.0)).to(tl.bfloat16), mask=c < n)


@case(TRITON)
def root_mean_square_norm_with_a_residual(rng):
    x, residual, w = rng.normal(size=(3, 72)).astype(BF16), rng.normal(size=(3, 72)).astype(BF16), rng.normal(size=72).astype(np.float32)
    y, total = np.zeros_like(x), x.astype(np.float32) + residual.astype(np.float32)
    start(norm_kernel, x, residual, w, y, 72, B=128, grid=3)
    yield residual, total.astype(BF16), 0
    yield y, total / np.sqrt((total.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) * w, 0.06


@triton.jit
def convolution_kernel(x, w, y, n, K: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for i in tl.static_range(K):
        place = at + i - K // 2
        total += tl.load(x + place, mask=(place >= 0) & (place < n), other=0.0) * tl.load(w + i)
    tl.store(y + at, total, mask=at < n)


@case(TRITON)
def convolution_in_one_dimension(rng):
    x, w = small(rng, 150, dtype=np.float32, high=99), small(rng, 5, dtype=np.float32)
    y = np.zeros_like(x)
    start(convolution_kernel, x, w, y, 150, K=5, B=64, grid=3)
    yield y, np.convolve(x, w[::-1], "same").astype(np.float32), 0


@triton.jit
def batched_vector_kernel(a, x, y, M: tl.constexpr, K: tl.constexpr):
    b, m, k = tl.program_id(0), tl.arange(0, M)[:, None], tl.arange(0, K)[None, :]
    tl.store(y + b * M + tl.arange(0, M), tl.sum(tl.load(a + b * M * K + m * K + k) * tl.load(x + b * K + k), 1))


@case(TRITON)
def matrices_times_vectors(rng):
    a, x = small(rng, 3, 16, 64, dtype=np.float32), small(rng, 3, 64, dtype=np.float32)
    y = np.zeros((3, 16), np.float32)
    start(batched_vector_kernel, a, x, y, M=16, K=64, grid=3)
    yield y, np.einsum("bmk,bk->bm", a, x), 0


@triton.jit
def tile_kernel(a, b, c, bias, K: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr, RELU: tl.constexpr, OUT: tl.constexpr):
    m, n = tl.program_id(0) * B + tl.arange(0, B)[:, None], tl.program_id(1) * B + tl.arange(0, B)[None, :]
    total = tl.zeros((B, B), OUT)
    for k in range(0, K, STEP):
        s = k + tl.arange(0, STEP)
        total = tl.dot(tl.load(a + m * K + s[None, :]), tl.load(b + n * K + s[:, None]), total, out_dtype=OUT)
    total += tl.load(bias + n)
    if RELU:
        total = tl.maximum(total, 0)
    tl.store(c + m * 64 + n, total)


def tiled(rng, dtype, out, kind, step=32, **options):
    a, b, bias = small(rng, 64, 64, dtype=dtype), small(rng, 64, 64, dtype=dtype), small(rng, 1, 64, dtype=out)
    c = np.zeros((64, 64), out)
    start(tile_kernel, a, b, c, bias, K=64, B=32, STEP=step, RELU=True, OUT=kind, grid=(2, 2), **options)
    yield c, np.maximum(a.astype(np.float64) @ b.T.astype(np.float64) + bias, 0).astype(out), 0


@case(TRITON)
def product_of_bf16_with_bias(rng):
    return tiled(rng, BF16, np.float32, tl.float32, gpu="A100")


@case(TRITON)
def product_of_e4m3_with_bias(rng):
    return tiled(rng, E4M3, np.float32, tl.float32, gpu="RTX 4090")


@case(TRITON)
def product_of_int8_with_bias(rng):
    return tiled(rng, np.int8, np.int32, tl.int32, gpu="A100")


@case(TRITON)
def product_of_f16_on_sm_120(rng):
    return tiled(rng, np.float16, np.float32, tl.float32, gpu="RTX 5090", num_warps=2)


@triton.jit
def split_kernel(a, b, c, K: tl.constexpr, PART: tl.constexpr):
    m, n, k = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :], tl.program_id(0) * PART + tl.arange(0, PART)
    tl.atomic_add(c + m * 16 + n, tl.dot(tl.load(a + m * K + k[None, :]), tl.load(b + k[:, None] * 16 + n)))


@case(TRITON)
def product_split_along_k_by_atomics(rng):
    a, b, c = small(rng, 16, 128), small(rng, 128, 16), np.zeros((16, 16), np.float32)
    start(split_kernel, a, b, c, K=128, PART=32, grid=4, gpu="A100")
    yield c, a.astype(np.float32) @ b.astype(np.float32), 0


@triton.jit
def block_quantiser_kernel(x, codes, scales, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + at)
    top = tl.max(tl.abs(v), 0)
    word = (top * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    power = (word + 0x007FFFFF) & 0x7F800000
    tl.store(scales + tl.program_id(0), (power >> 23).to(tl.uint8))
    tl.store(codes + at, (v / power.to(tl.float32, bitcast=True)).to(tl.float8e4nv))


@case(TRITON)
def quantiser_of_blocks_with_powers_of_two(rng):
    x = (rng.normal(size=(6, 32)) * 2.0 ** rng.integers(-9, 9, (6, 1))).astype(np.float32)
    codes, scales = np.zeros((6, 32), E4M3), np.zeros(6, np.uint8)
    start(block_quantiser_kernel, x, codes, scales, B=32, grid=6, num_warps=1)
    ratio = abs(x).max(1) * np.float32(1 / 448)
    power = ((ratio.view(np.int32) + 0x7FFFFF) & 0x7F800000).astype(np.int32)
    yield scales, (power >> 23).astype(np.uint8), 0
    yield codes, (x / power.view(np.float32)[:, None]).astype(E4M3), 0


@triton.jit
def greatest_so_far(a, b):
    return tl.maximum(a, b)


@triton.jit
def running_maximum_kernel(x, y, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + at, tl.associative_scan(tl.load(x + at), 0, greatest_so_far))


@case(TRITON)
def running_maximum(rng):
    x = rng.integers(-(2**31), 2**31, (2, 128)).astype(np.int32)
    y = np.zeros_like(x)
    start(running_maximum_kernel, x, y, B=128, grid=2)
    yield y, np.maximum.accumulate(x, 1), 0


@triton.jit
def window_attention_kernel(q, k, v, o, S: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    i, j, d = tl.arange(0, S)[:, None], tl.arange(0, S)[None, :], tl.arange(0, D)
    s = tl.dot(tl.load(q + i * D + d[None, :]), tl.load(k + j * D + d[:, None])) * 0.25
    s = tl.where((j <= i) & (i - j < W), s, float("-inf"))
    p = tl.exp(s - tl.max(s, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    tl.store(o + i * D + d[None, :], tl.dot(p.to(tl.float16), tl.load(v + tl.arange(0, S)[:, None] * D + d[None, :])))


@case(TRITON)
def attention_within_a_window(rng):
    q, k, v = rng.normal(size=(3, 32, 16)).astype(np.float16)
    o = np.zeros((32, 16), np.float32)
    start(window_attention_kernel, q, k, v, o, S=32, D=16, W=5, gpu="A100", num_warps=2)
    i = np.arange(32)
    band = (i[None] <= i[:, None]) & (i[:, None] - i[None] < 5)
    s = np.where(band, q.astype(np.float64) @ k.T.astype(np.float64) / 4, -np.inf)
    p = np.exp(s - s.max(1, keepdims=True))
    yield o, p / p.sum(1, keepdims=True) @ v.astype(np.float64), 5e-3


@triton.jit
def entropy_kernel(x, labels, losses, n, B: tl.constexpr):
    row, c = tl.program_id(0), tl.arange(0, B)
    v = tl.load(x + row * n + c, mask=c < n, other=float("-inf"))
    top = tl.max(v, 0)
    total = tl.log(tl.sum(tl.exp(v - top), 0)) + top
    label = tl.load(labels + row)
    tl.store(losses + row, tl.where(label < 0, 0.0, total - tl.load(x + row * n + tl.maximum(label, 0))))


@case(TRITON)
def cross_entropy_with_ignored_labels(rng):
    x, labels = rng.normal(size=(6, 90)).astype(np.float32), np.array([3, -1, 89, 0, 17, -1], np.int32)
    losses = np.zeros(6, np.float32)
    start(entropy_kernel, x, labels, losses, 90, B=128, grid=6)
    wide = x.astype(np.float64)
    expected = np.log(np.exp(wide).sum(1)) - wide[np.arange(6), labels]
    yield losses, np.where(labels < 0, 0, expected), 1e-5


@triton.jit
def popcount_kernel(x, y, B: tl.constexpr):
    at = tl.arange(0, B)
    v = tl.load(x + at)
    ones = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(y + at, ones + (v >> 31))


@case(TRITON)
def instructions_within_a_function(rng):
    x = rng.integers(-(2**31), 2**31, 128).astype(np.int32)
    y = np.zeros_like(x)
    start(popcount_kernel, x, y, B=128)
    yield y, np.bitwise_count(x.view(np.uint32)).astype(np.int32) + (x >> 31), 0


@triton.jit
def pooling_kernel(x, y, H: tl.constexpr, W: tl.constexpr):
    v = tl.load(x + tl.arange(0, H)[:, None] * W + tl.arange(0, W)[None, :])
    pooled = tl.max(tl.reshape(v, (H // 2, 2, W // 2, 2)), 3)
    pooled = tl.max(pooled, 1)
    tl.store(y + tl.arange(0, H // 2)[:, None] * (W // 2) + tl.arange(0, W // 2)[None, :], pooled)


@case(TRITON)
def pooling_of_pairs(rng):
    x, y = rng.normal(size=(16, 32)).astype(np.float16), np.zeros((8, 16), np.float16)
    start(pooling_kernel, x, y, H=16, W=32)
    yield y, x.reshape(8, 2, 16, 2).max((1, 3)), 0


@triton.jit
def segments_kernel(x, keys, sums, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(sums + tl.load(keys + at, mask=at < n, other=0), tl.load(x + at, mask=at < n, other=0), mask=at < n)


@case(TRITON)
def sums_of_keys_by_atomics(rng):
    x, keys, sums = rng.integers(-99, 99, 200).astype(np.int32), rng.integers(0, 9, 200).astype(np.int32), np.zeros(9, np.int32)
    start(segments_kernel, x, keys, sums, 200, B=128, grid=2)
    expected = np.zeros(9, np.int32)
    np.add.at(expected, keys, x)
    yield sums, expected, 0


@triton.jit
def ranks_kernel(x, order, B: tl.constexpr):
    at = tl.arange(0, B)
    v = tl.load(x + at)
    packed = (v.to(tl.int64) << 32) | at
    tl.store(order + at, (tl.sort(packed) & 0xFFFFFFFF).to(tl.int32))


@case(TRITON)
def stable_order_by_a_packed_sort(rng):
    x, order = rng.integers(-9, 9, 64).astype(np.int32), np.zeros(64, np.int32)
    start(ranks_kernel, x, order, B=64)
    yield order, np.argsort(x, kind="stable").astype(np.int32), 0


@triton.jit
def dequantise_kernel(words, scales, y, N: tl.constexpr, G: tl.constexpr):
    at = tl.arange(0, N)
    w = tl.load(words + at // 8)
    nibble = (w >> (at % 8 * 4)) & 15
    tl.store(y + at, ((nibble - 8).to(tl.float32) * tl.load(scales + at // G)).to(tl.float16))


@case(TRITON)
def dequantiser_of_four_bits(rng):
    words, scales, y = rng.integers(-(2**31), 2**31, 16).astype(np.int32), rng.random(4).astype(np.float32), np.zeros(128, np.float16)
    start(dequantise_kernel, words, scales, y, N=128, G=32)
    nibbles = (words[:, None] >> np.arange(0, 32, 4) & 15).reshape(-1)
    yield y, ((nibbles - 8).astype(np.float32) * np.repeat(scales, 32)).astype(np.float16), 0


@triton.jit
def rotary_kernel(x, y, HALF: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, HALF)
    angle = row.to(tl.float32) * tl.exp2(-13.287712 * i.to(tl.float32) / HALF)
    a, b = tl.load(x + row * 2 * HALF + i), tl.load(x + row * 2 * HALF + HALF + i)
    tl.store(y + row * 2 * HALF + i, a * tl.cos(angle) - b * tl.sin(angle))
    tl.store(y + row * 2 * HALF + HALF + i, b * tl.cos(angle) + a * tl.sin(angle))


@case(TRITON)
def rotary_embedding_by_sines(rng):
    x = rng.normal(size=(4, 32)).astype(np.float32)
    y = np.zeros_like(x)
    start(rotary_kernel, x, y, HALF=16, grid=4)
    angle = np.arange(4)[:, None] * 10000.0 ** -(np.arange(16) / 16)
    a, b = x[:, :16].astype(np.float64), x[:, 16:].astype(np.float64)
    yield y, np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], 1), 1e-5


@triton.jit
def descriptor_kernel(x, y, M, N, B: tl.constexpr):
    source = tl.make_tensor_descriptor(x, shape=[M, N], strides=[N, 1], block_shape=[B, B])
    target = tl.make_tensor_descriptor(y, shape=[N, M], strides=[M, 1], block_shape=[B, B])
    i, j = tl.program_id(0) * B, tl.program_id(1) * B
    target.store([j, i], tl.trans(source.load([i, j])))


@case(TRITON)
def transposition_by_tensor_maps(rng):
    x = rng.normal(size=(48, 80)).astype(np.float16)
    y = np.zeros((80, 48), np.float16)
    import triton as library

    library.set_allocator(lambda size, alignment, stream: as_tensor(np.zeros(size, np.int8)))
    start(descriptor_kernel, x, y, 48, 80, B=32, grid=(2, 3))
    yield y, np.ascontiguousarray(x.T), 0
