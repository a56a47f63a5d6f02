"""CUDA C++ kernels of the corpus, compiled by NVRTC."""

import numpy as np
from kernels.corpus.corpus_table import BF16, CUDA, E4M3, bits, case, launch, small

MMA = r"""
#include <cuda_fp16.h>
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
"""


@case(CUDA)
def sum_of_a_block_by_shuffles(rng):
    source = """extern "C" __global__ void k(const int* x, int* y, int n) {
        __shared__ int parts[8]; int sum = 0;
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += x[i];
        for (int d = 16; d; d /= 2) sum += __shfl_down_sync(~0u, sum, d);
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
        __syncthreads();
        if (threadIdx.x < 8) { sum = parts[threadIdx.x];
            for (int d = 4; d; d /= 2) sum += __shfl_down_sync(0xff, sum, d, 8);
            if (threadIdx.x == 0) atomicAdd(y, sum); } }"""
    x = rng.integers(-(2**30), 2**30, 3001).astype(np.int32)
    found = launch(source, x, np.zeros(1, np.int32), x.size, grid=3, block=256)
    yield found[1], np.array([x.sum(dtype=np.int64)]).astype(np.int32), 0


@case(CUDA)
def inclusive_scan_in_shared_memory(rng):
    source = """extern "C" __global__ void k(unsigned* x) {
        __shared__ unsigned s[2][256]; int t = threadIdx.x, from = 0; s[0][t] = x[blockIdx.x * 256 + t]; __syncthreads();
        for (int d = 1; d < 256; d *= 2, from ^= 1) { s[from ^ 1][t] = s[from][t] + (t >= d ? s[from][t - d] : 0); __syncthreads(); }
        x[blockIdx.x * 256 + t] = s[from][t]; }"""
    x = rng.integers(0, 2**32, (3, 256), dtype=np.uint32)
    yield launch(source, x, grid=3, block=256)[0], np.cumsum(x, 1, dtype=np.uint32), 0


@case(CUDA)
def online_softmax_of_rows(rng):
    source = """extern "C" __global__ void k(const float* x, float* y, int n) { x += blockIdx.x * n; y += blockIdx.x * n;
        float m = -INFINITY, l = 0;
        for (int i = threadIdx.x; i < n; i += 32) { float old = m; m = fmaxf(m, x[i]); l = l * expf(old - m) + expf(x[i] - m); }
        for (int d = 16; d; d /= 2) { float m2 = __shfl_xor_sync(~0u, m, d), l2 = __shfl_xor_sync(~0u, l, d), top = fmaxf(m, m2);
            l = l * expf(m - top) + l2 * expf(m2 - top); m = top; }
        for (int i = threadIdx.x; i < n; i += 32) y[i] = expf(x[i] - m) / l; }"""
    x = (3 * rng.normal(size=(4, 100))).astype(np.float32)
    e = np.exp(x - x.max(1, keepdims=True).astype(np.float64))
    yield launch(source, x, np.zeros_like(x), 100, grid=4)[1], e / e.sum(1, keepdims=True), 2e-6


@case(CUDA)
def bitonic_sort_of_keys_and_values(rng):
    source = """extern "C" __global__ void k(unsigned long long* x) { __shared__ unsigned long long s[256]; int t = threadIdx.x;
        s[t] = x[t]; s[t + 128] = x[t + 128]; __syncthreads();
        for (int k = 2; k <= 256; k *= 2) for (int j = k / 2; j; j /= 2) {
            int i = 2 * t - (t & (j - 1)); bool up = (i & k) == 0; unsigned long long a = s[i], b = s[i + j];
            if ((a > b) == up) { s[i] = b; s[i + j] = a; } __syncthreads(); }
        x[t] = s[t]; x[t + 128] = s[t + 128]; }"""
    x = rng.integers(0, 2**64, 256, dtype=np.uint64)
    yield launch(source, x, block=128)[0], np.sort(x), 0


@case(CUDA)
def histogram_by_shared_atomics(rng):
    source = """extern "C" __global__ void k(const unsigned char* x, unsigned* bins, int n) { __shared__ unsigned own[256];
        own[threadIdx.x] = 0; __syncthreads();
        for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) atomicAdd(&own[x[i]], 1u);
        __syncthreads(); if (own[threadIdx.x]) atomicAdd(&bins[threadIdx.x], own[threadIdx.x]); }"""
    x = (rng.normal(size=2000) * 20 + 99).astype(np.uint8)
    expected = np.bincount(x, minlength=256).astype(np.uint32)
    yield launch(source, x, np.zeros(256, np.uint32), x.size, grid=2, block=256)[1], expected, 0


@case(CUDA)
def stencil_of_five_points_with_a_halo(rng):
    source = """extern "C" __global__ void k(const float* x, float* y, int h, int w) { __shared__ float s[10][34];
        int tx = threadIdx.x, ty = threadIdx.y, c = blockIdx.x * 32 + tx, r = blockIdx.y * 8 + ty;
        auto get = [&](int i, int j) { return i >= 0 && i < h && j >= 0 && j < w ? x[i * w + j] : 0.f; };
        s[ty + 1][tx + 1] = get(r, c);
        if (tx == 0) s[ty + 1][0] = get(r, c - 1); if (tx == 31) s[ty + 1][33] = get(r, c + 1);
        if (ty == 0) s[0][tx + 1] = get(r - 1, c); if (ty == 7) s[9][tx + 1] = get(r + 1, c);
        __syncthreads();
        if (r < h && c < w) y[r * w + c] = s[ty][tx + 1] + s[ty + 2][tx + 1] + s[ty + 1][tx] + s[ty + 1][tx + 2] - 4 * s[ty + 1][tx + 1];
        }"""
    x = small(rng, 13, 50, dtype=np.float32, high=999)
    p = np.pad(x, 1)
    expected = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * x
    yield launch(source, x, np.zeros_like(x), 13, 50, grid=(2, 2), block=(32, 8))[1], expected, 0


@case(CUDA)
def product_of_f16_by_cp_async_and_ldmatrix(rng):
    source = (
        MMA
        + r"""
    extern "C" __global__ void k(const __half* a, const __half* b, float* d, int kk) {
        __shared__ __align__(16) __half sa[2][16][24], sb[2][16][24]; int t = threadIdx.x; float c[2][4] = {};
        auto fetch = [&](int i) { int r = t / 2, q = t % 2 * 8;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at(&sa[i % 2][r][q])), "l"(a + r * kk + i * 16 + q) : "memory");
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at(&sb[i % 2][r][q])), "l"(b + (i * 16 + r) * 16 + q) :
            "memory");
            asm volatile("cp.async.commit_group;" ::: "memory"); };
        fetch(0);
        for (int i = 0; i < kk / 16; ++i) {
            if (i + 1 < kk / 16) { fetch(i + 1); asm volatile("cp.async.wait_group 1;" ::: "memory"); }
            else asm volatile("cp.async.wait_group 0;" ::: "memory");
            __syncthreads(); unsigned x[4], y[4];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at(&sa[i % 2][t % 16][t / 16 * 8])) : "memory");
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3]) : "r"(at(&sb[i % 2][t % 16][t / 16 * 8])) : "memory");
            for (int n = 0; n < 2; ++n)
                asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                    : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
                    : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[2 * n]), "r"(y[2 * n + 1]));
            __syncthreads(); }
        for (int n = 0; n < 2; ++n) for (int e = 0; e < 4; ++e) d[(t / 4 + e / 2 * 8) * 16 + n * 8 + t % 4 * 2 + e % 2] = c[n][e]; }"""
    )
    a, b = small(rng, 16, 96), small(rng, 96, 16)
    yield launch(source, a, b, np.zeros((16, 16), np.float32), 96)[2], a.astype(np.float32) @ b.astype(np.float32), 0


@case(CUDA)
def product_of_bf16_by_wmma(rng):
    source = """#include <mma.h>
    #include <cuda_bf16.h>
    using namespace nvcuda;
    extern "C" __global__ void k(const __nv_bfloat16* a, const __nv_bfloat16* b, float* d) {
        wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> x;
        wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::col_major> y;
        wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
        int w = threadIdx.x / 32; wmma::fill_fragment(c, 0.5f);
        for (int i = 0; i < 64; i += 16) { wmma::load_matrix_sync(x, a + w * 16 * 64 + i, 64); wmma::load_matrix_sync(y, b + i, 64);
            wmma::mma_sync(c, x, y, c); }
        wmma::store_matrix_sync(d + w * 256, c, 16, wmma::mem_row_major); }"""
    a, b = small(rng, 32, 64, dtype=BF16), small(rng, 16, 64, dtype=BF16)
    yield launch(source, a, b, np.zeros((32, 16), np.float32), block=64)[2], a.astype(np.float32) @ b.T.astype(np.float32) + 0.5, 0


def _fragment_product(instruction, a_kind, registers, width):
    """A product of one warp whose fragments are loaded word by word; `width` elements of a row fill a word."""
    a, b = registers
    into = ", ".join(f'"r"(x[{i}])' for i in range(a)) + ", " + ", ".join(f'"r"(y[{i}])' for i in range(b))
    kind = "int" if "s32" in instruction else "float"
    letter = "r" if kind == "int" else "f"
    listed = lambda first, count: "{" + ", ".join(f"%{i}" for i in range(first, first + count)) + "}"
    words = 4 * b  # of a row
    return f"""extern "C" __global__ void k(const unsigned* a, const unsigned* b, {kind}* d) {{
        int g = threadIdx.x / 4, q = threadIdx.x % 4; unsigned x[{a}], y[{b}]; {kind} c[4] = {{}};
        for (int i = 0; i < {a}; ++i) x[i] = a[(g + i % 2 * 8) * {words} + q + i / 2 * 4];
        for (int i = 0; i < {b}; ++i) y[i] = b[g * {words} + q + i * 4];
        asm volatile("{instruction} {listed(0, 4)}, {listed(4, a)}, {listed(4 + a, b)}, {listed(0, 4)};"
            : "+{letter}"(c[0]), "+{letter}"(c[1]), "+{letter}"(c[2]), "+{letter}"(c[3]) : {into});
        for (int e = 0; e < 4; ++e) d[(g + e / 2 * 8) * 8 + q * 2 + e % 2] = c[e]; }}"""


def _run_fragment_product(rng, instruction, dtype, k, out=np.float32):
    a, b = small(rng, 16, k, dtype=dtype), small(rng, 8, k, dtype=dtype)
    words = k * np.dtype(dtype).itemsize // 4
    source = _fragment_product(instruction, dtype, (words // 2, words // 4), 4)
    given = (np.ascontiguousarray(each).view(np.uint32) for each in (a, b))
    found = launch(source, *given, np.zeros((16, 8), out))[2]
    yield found, (a.astype(np.float64) @ b.T.astype(np.float64)).astype(out), 0


@case(CUDA)
def product_of_int8_words(rng):
    return _run_fragment_product(rng, "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", np.int8, 32, np.int32)


@case(CUDA)
def product_of_tf32_words(rng):
    return _run_fragment_product(rng, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", np.float32, 8)


@case(CUDA)
def product_of_e4m3_words(rng):
    return _run_fragment_product(rng, "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", E4M3, 32)


@case(CUDA)
def product_of_f64(rng):
    source = """extern "C" __global__ void k(const double* a, const double* b, double* d) { int g = threadIdx.x / 4, q = threadIdx.x % 4;
        double c0 = 0, c1 = 0;
        for (int i = 0; i < 16; i += 4) asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
            : "+d"(c0), "+d"(c1) : "d"(a[g * 16 + i + q]), "d"(b[g * 16 + i + q]));
        d[g * 8 + 2 * q] = c0; d[g * 8 + 2 * q + 1] = c1; }"""
    a, b = small(rng, 8, 16, dtype=np.float64, high=2**20), small(rng, 8, 16, dtype=np.float64, high=2**20)
    yield launch(source, a, b, np.zeros((8, 8)), target="A100")[2], a @ b.T, 0


@case(CUDA)
def quantiser_of_rows_to_e4m3(rng):
    source = """#include <cuda_fp8.h>
    extern "C" __global__ void k(const float* x, unsigned char* codes, float* scales) { x += blockIdx.x * 64; float top = 0;
        for (int i = 0; i < 2; ++i) top = fmaxf(top, fabsf(x[threadIdx.x + 32 * i]));
        for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        int e; frexpf(top / 448.f, &e); float s = ldexpf(1.f, e);
        if (threadIdx.x == 0) scales[blockIdx.x] = s;
        for (int i = 0; i < 2; ++i) { int j = threadIdx.x + 32 * i;
            codes[blockIdx.x * 64 + j] = __nv_cvt_float_to_fp8(x[j] / s, __NV_SATFINITE, __NV_E4M3); } }"""
    x = rng.normal(size=(5, 64)).astype(np.float32) * np.float32(2.0) ** np.arange(-20, 30, 10, dtype=np.float32)[:, None]
    found = launch(source, x, np.zeros((5, 64), np.uint8), np.zeros(5, np.float32), grid=5)
    scales = np.ldexp(np.float32(1), np.frexp(abs(x).max(1) / np.float32(448))[1])
    yield found[2], scales.astype(np.float32), 0
    yield found[1], bits((x / scales[:, None]).astype(E4M3)), 0


@case(CUDA)
def attention_of_one_query_a_warp(rng):
    source = """extern "C" __global__ void k(const float* q, const float* key, const float* v, float* o, int n) {
        int t = threadIdx.x; float mine = q[blockIdx.x * 32 + t], m = -INFINITY, l = 0, acc = 0;
        for (int j = 0; j <= blockIdx.x && j < n; ++j) { float s = mine * key[j * 32 + t];
            for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
            s *= 0.17677669f; float top = fmaxf(m, s), shrink = __expf(m - top), p = __expf(s - top);
            l = l * shrink + p; acc = acc * shrink + p * v[j * 32 + t]; m = top; }
        o[blockIdx.x * 32 + t] = acc / l; }"""
    q, key, v = rng.normal(size=(3, 12, 32)).astype(np.float32)
    s = np.where(np.tri(12, dtype=bool), q.astype(np.float64) @ key.T * 32**-0.5, -np.inf)
    p = np.exp(s - s.max(1, keepdims=True))
    yield launch(source, q, key, v, np.zeros_like(q), 12, grid=12)[3], p / p.sum(1, keepdims=True) @ v, 1e-5


@case(CUDA)
def compaction_by_ballots(rng):
    source = """extern "C" __global__ void k(const int* x, int* y, int* total, int n) { __shared__ int counts[4];
        int t = threadIdx.x, w = t / 32; bool keep = t < n && x[t] > 0; unsigned votes = __ballot_sync(~0u, keep);
        if (t % 32 == 0) counts[w] = __popc(votes); __syncthreads();
        int at = __popc(votes & ((1u << t % 32) - 1)); for (int i = 0; i < w; ++i) at += counts[i];
        if (keep) y[at] = x[t]; if (t == 127) *total = at + keep; }"""
    x = rng.integers(-9, 9, 120).astype(np.int32)
    kept = x[x > 0]
    found = launch(source, x, np.zeros(128, np.int32), np.zeros(1, np.int32), 120, block=128)
    yield found[1], np.pad(kept, (0, 128 - kept.size)), 0
    yield found[2], np.array([kept.size], np.int32), 0


@case(CUDA)
def atomics_of_matching_lanes(rng):
    source = """extern "C" __global__ void k(const int* keys, int* counts, int* leaders) { int key = keys[threadIdx.x];
        unsigned same = __match_any_sync(~0u, key), leader = __ffs(same) - 1;
        if (threadIdx.x % 32 == leader) atomicAdd(&counts[key], __popc(same)); leaders[threadIdx.x] = leader; }"""
    keys = rng.integers(0, 7, 64).astype(np.int32)
    leaders = np.array([np.flatnonzero(keys[i // 32 * 32 :][:32] == keys[i])[0] for i in range(64)], np.int32)
    found = launch(source, keys, np.zeros(7, np.int32), np.zeros(64, np.int32), block=64)
    yield found[1], np.bincount(keys, minlength=7).astype(np.int32), 0
    yield found[2], leaders, 0


@case(CUDA)
def least_element_by_packed_atomics(rng):
    source = """extern "C" __global__ void k(const float* x, unsigned long long* best, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= n) return; int word = __float_as_int(x[i]);
        unsigned key = word ^ (word < 0 ? 0xffffffffu : 0x80000000u); atomicMin(best, (unsigned long long)key << 32 | i); }"""
    x = rng.normal(size=300).astype(np.float32)
    found = launch(source, x, np.full(1, 2**64 - 1, np.uint64), 300, grid=3, block=128)[1]
    yield (found & 0xFFFFFFFF).astype(np.int64), np.array([x.argmin()]), 0


@case(CUDA)
def sum_by_the_last_block(rng):
    source = """__device__ unsigned arrived;
    extern "C" __global__ void k(const int* x, int* parts, int* y) { __shared__ bool last;
    int sum = __reduce_add_sync(~0u, x[blockIdx.x * 32 + threadIdx.x]);
        if (threadIdx.x == 0) { parts[blockIdx.x] = sum; __threadfence(); last = atomicAdd(&arrived, 1) == gridDim.x - 1; }
        __syncthreads();
        if (last && threadIdx.x == 0) { __threadfence(); int all = 0; for (int i = 0; i < gridDim.x;
        ++i) all += ((volatile int*)parts)[i]; *y = all; } }"""
    x = rng.integers(-99, 99, 160).astype(np.int32)
    yield launch(source, x, np.zeros(5, np.int32), np.zeros(1, np.int32), grid=5)[2], np.array([x.sum()], np.int32), 0


@case(CUDA)
def tiles_of_cooperative_groups(rng):
    source = """#include <cooperative_groups.h>
    #include <cooperative_groups/reduce.h>
    namespace cg = cooperative_groups;
    extern "C" __global__ void k(const int* x, int* sums, int* tops) { auto tile = cg::tiled_partition<8>(cg::this_thread_block());
        int v = x[threadIdx.x]; sums[threadIdx.x] = cg::reduce(tile, v, cg::plus<int>());
        tops[threadIdx.x] = cg::reduce(tile, v, cg::greater<int>()); }"""
    x = rng.integers(-(2**31), 2**31, 64).astype(np.int32)
    found = launch(source, x, *np.zeros((2, 64), np.int32), block=64)
    groups = x.reshape(8, 8)
    yield found[1], np.repeat(groups.sum(1, dtype=np.int32), 8), 0
    yield found[2], np.repeat(groups.max(1), 8), 0


@case(CUDA)
def layer_norm_in_half_precision(rng):
    source = """#include <cuda_fp16.h>
    extern "C" __global__ void k(const __half2* x, __half2* y) { float2 v = __half22float2(x[blockIdx.x * 32 + threadIdx.x]);
    float s = v.x + v.y, q;
        for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d); float m = s / 64; v.x -= m; v.y -= m; q = v.x * v.x + v.y * v.y;
        for (int d = 16; d; d /= 2) q += __shfl_xor_sync(~0u, q, d); float r = rsqrtf(q / 64 + 1e-5f);
        y[blockIdx.x * 32 + threadIdx.x] = __floats2half2_rn(v.x * r, v.y * r); }"""
    x = rng.normal(size=(3, 64)).astype(np.float16)
    w = x.astype(np.float64)
    expected = (w - w.mean(1, keepdims=True)) / np.sqrt(w.var(1, keepdims=True) + 1e-5)
    yield launch(source, x, np.zeros_like(x), grid=3)[1], expected, 2e-3


@case(CUDA)
def sparse_rows_times_a_vector(rng):
    source = """extern "C" __global__ void k(const int* starts, const int* columns, const float* values, const float* x, float* y, int
    rows) {
        int row = (blockIdx.x * blockDim.x + threadIdx.x) / 8, lane = threadIdx.x % 8; if (row >= rows) return; float sum = 0;
        for (int i = starts[row] + lane; i < starts[row + 1]; i += 8) sum += values[i] * x[columns[i]];
        for (int d = 4; d; d /= 2) sum += __shfl_xor_sync(__activemask(), sum, d, 8); if (lane == 0) y[row] = sum; }"""
    dense = small(rng, 20, 40, dtype=np.float32) * (rng.random((20, 40)) < 0.3)
    rows, columns = np.nonzero(dense)
    starts = np.searchsorted(rows, np.arange(21)).astype(np.int32)
    x = small(rng, 40, dtype=np.float32)
    found = launch(source, starts, columns.astype(np.int32), dense[rows, columns], x, np.zeros(20, np.float32), 20, grid=3, block=64)
    yield found[4], (dense @ x).astype(np.float32) + np.float32(0), 0
