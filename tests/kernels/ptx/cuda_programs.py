"""The table of CUDA C++ kernels as people write them, each with the one line that runs it and a NumPy reference in bits.

Floats are integers or powers of two where several orders of sums are allowed, so that each order gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tcemu import ptx


class Program(NamedTuple):
    """A kernel with operands and references."""

    source: str
    arguments: Callable[[np.random.Generator], list]
    expected: Callable[..., dict[int, np.ndarray]]  # of the arguments: for the number of an array, what the kernel leaves there
    launch: dict

    def run(self, rng: np.random.Generator) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """Return what the kernel leaves in the arrays that have a reference, and the references."""
        args = self.arguments(rng)
        outputs = ptx.run(self.source, args=args, **self.launch)
        arrays = [number for number, value in enumerate(args) if isinstance(value, np.ndarray) and value.ndim]
        expected = self.expected(*args)
        return {number: outputs[arrays.index(number)] for number in expected}, expected


PROGRAMS: dict[str, Program] = {}


def add(name: str, source: str, arguments: Callable, expected: Callable, *, target: str = "A100", **launch) -> None:
    PROGRAMS[name] = Program(source, arguments, expected, {"target": target, "grid": 1} | launch)


def floats(rng, *shape, dtype=np.float32):
    return rng.normal(size=shape).astype(dtype)


def integers(rng, low, high, *shape, dtype=np.int32):
    return rng.integers(low, high, size=shape).astype(dtype)


# ---- templates and plain kernels

add(
    "axpy by a template", """
    template <typename T> __global__ void axpy(T a, const T* x, T* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = a * x[i] + y[i];
    }""",
    lambda rng: [np.float64(3), *integers(rng, -99, 99, 2, 40, dtype=np.float64), 40],
    lambda a, x, y, n: {2: a * x + y}, entry="axpy<double>", grid=2, block=32,
)  # fmt: skip
add(
    "transposition through shared memory", """
    __global__ void transpose(const float* in, float* out, int rows, int columns) {
        __shared__ float tile[16][17];
        int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
        if (x < columns && y < rows) tile[threadIdx.y][threadIdx.x] = in[y * columns + x];
        __syncthreads();
        x = blockIdx.y * 16 + threadIdx.x; y = blockIdx.x * 16 + threadIdx.y;
        if (x < rows && y < columns) out[y * rows + x] = tile[threadIdx.x][threadIdx.y];
    }""",
    lambda rng: [floats(rng, 24, 40), np.zeros((40, 24), np.float32), 24, 40],
    lambda x, out, rows, columns: {1: x.T}, grid=(3, 2), block=(16, 16),
)  # fmt: skip
add(
    "sum of a block by shuffles", """
    __global__ void sum(const int* x, int* out) {
        int value = x[threadIdx.x];
        for (int step = 16; step; step /= 2) value += __shfl_down_sync(~0u, value, step);
        if (threadIdx.x % 32 == 0) atomicAdd(out, value);
    }""",
    lambda rng: [integers(rng, -1000, 1000, 128), np.zeros(1, np.int32)],
    lambda x, out: {1: x.sum(keepdims=True).astype(np.int32)}, block=128,
)  # fmt: skip
add(
    "histogram with atomics in shared memory", """
    extern "C" __global__ void histogram(const unsigned char* x, unsigned* counts, int n) {
        __shared__ unsigned mine[256];
        mine[threadIdx.x] = 0;
        __syncthreads();
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&mine[x[i]], 1);
        __syncthreads();
        atomicAdd(&counts[threadIdx.x], mine[threadIdx.x]);
    }""",
    lambda rng: [integers(rng, 0, 256, 1000, dtype=np.uint8), np.zeros(256, np.uint32), 1000],
    lambda x, counts, n: {1: np.bincount(x, minlength=256).astype(np.uint32)}, grid=2, block=256,
)  # fmt: skip
add(
    "compaction by ballots", """
    __global__ void positives(const float* x, float* out, int* count) {
        unsigned chosen = __ballot_sync(~0u, x[threadIdx.x] > 0);
        if (x[threadIdx.x] > 0) out[__popc(chosen & ((1u << threadIdx.x) - 1))] = x[threadIdx.x];
        if (threadIdx.x == 0) *count = __popc(chosen);
    }""",
    lambda rng: [floats(rng, 32), np.zeros(32, np.float32), np.zeros(1, np.int32)],
    lambda x, out, count: {
        1: np.concatenate([x[x > 0], np.zeros((x <= 0).sum(), np.float32)]), 2: np.array([(x > 0).sum()], np.int32),
    }, block=32,
)  # fmt: skip
add(
    "product of f16 matrices by wmma", """
    #include <mma.h>
    using namespace nvcuda;
    __global__ void product(const half* a, const half* b, float* c, int k) {
        wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> left;
        wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> right;
        wmma::fragment<wmma::accumulator, 16, 16, 16, float> total;
        wmma::fill_fragment(total, 0.0f);
        for (int i = 0; i < k; i += 16) {
            wmma::load_matrix_sync(left, a + i, k);
            wmma::load_matrix_sync(right, b + i * 16, 16);
            wmma::mma_sync(total, left, right, total);
        }
        wmma::store_matrix_sync(c, total, 16, wmma::mem_row_major);
    }""",
    lambda rng: [
        integers(rng, -4, 5, 16, 48, dtype=np.float16), integers(rng, -4, 5, 48, 16, dtype=np.float16), np.zeros((16, 16), np.float32), 48,
    ], lambda a, b, c, k: {2: a.astype(np.float32) @ b.astype(np.float32)}, block=32,
)  # fmt: skip
add(
    "product by mma.sync in assembly", """
    __global__ void product(const unsigned* a, const unsigned* b, float* d) {
        float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
        int lane = threadIdx.x, row = lane / 4, column = lane % 4;
        unsigned a0 = a[row * 8 + column], a1 = a[(row + 8) * 8 + column], a2 = a[row * 8 + column + 4], a3 = a[(row + 8) * 8 + column + 4];
        unsigned b0 = b[row * 8 + column], b1 = b[row * 8 + column + 4];
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
        d[row * 8 + 2 * column] = d0; d[row * 8 + 2 * column + 1] = d1;
        d[(row + 8) * 8 + 2 * column] = d2; d[(row + 8) * 8 + 2 * column + 1] = d3;
    }""",
    lambda rng: [
        *((integers(rng, -4, 5, rows, 16, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16) for rows in (16, 8)),
        np.zeros((16, 8), np.float32),
    ],
    lambda a, b, d: {2: (a.astype(np.uint32) << 16).view(np.float32) @ (b.astype(np.uint32) << 16).view(np.float32).T}, block=32,
)  # fmt: skip
add(
    "double buffering by memcpy_async", """
    #include <cuda_pipeline.h>
    __global__ void sums(const float4* x, float4* out) {
        __shared__ float4 stage[2][32];
        float4 total = {0, 0, 0, 0};
        __pipeline_memcpy_async(&stage[0][threadIdx.x], &x[threadIdx.x], 16);
        __pipeline_commit();
        for (int i = 0; i < 4; ++i) {
            if (i < 3) __pipeline_memcpy_async(&stage[(i + 1) % 2][threadIdx.x], &x[(i + 1) * 32 + threadIdx.x], 16);
            __pipeline_commit();
            __pipeline_wait_prior(1);
            __syncthreads();
            float4 y = stage[i % 2][31 - threadIdx.x];
            total.x += y.x; total.y += y.y; total.z += y.z; total.w += y.w;
            __syncthreads();
        }
        out[threadIdx.x] = total;
    }""",
    lambda rng: [floats(rng, 4, 32, 4), np.zeros((32, 4), np.float32)],
    lambda x, out: {1: ((x[0] + x[1]) + x[2] + x[3])[::-1]}, block=32,
)  # fmt: skip
add(
    "half2 arithmetic", """
    #include <cuda_fp16.h>
    __global__ void scale(half2* x, half a, half b) { x[threadIdx.x] = __hfma2(x[threadIdx.x], __half2half2(a), __half2half2(b)); }""",
    lambda rng: [floats(rng, 64, dtype=np.float16), np.float16(1.5), np.float16(-0.25)],
    lambda x, a, b: {0: (x.astype(np.float64) * a + b).astype(np.float16)}, block=32,
)  # fmt: skip
add(
    "conversions to FP8", """
    #include <cuda_fp8.h>
    __global__ void quantise(const float* x, __nv_fp8_e4m3* y, __nv_fp8_e5m2* z) {
        y[threadIdx.x] = __nv_fp8_e4m3(x[threadIdx.x]); z[threadIdx.x] = __nv_fp8_e5m2(x[threadIdx.x]);
    }""",
    lambda rng: [100 * floats(rng, 64), np.zeros(64, np.uint8), np.zeros(64, np.uint8)],
    lambda x, y, z: {1: fp8(x, "float8_e4m3fn"), 2: fp8(x, "float8_e5m2")}, target="H100", block=64,
)  # fmt: skip
add(
    "grid-stride loop with printf", """
    #ifndef __CUDACC_RTC__
    #include <cstdio>
    #endif
    __global__ void square(int* x, int n) {
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) {
            x[i] *= x[i];
            if (i == 7) printf("x[%d] = %d\\\\n", i, x[i]);
        }
    }""",
    lambda rng: [integers(rng, -99, 99, 100), 100], lambda x, n: {0: x * x}, grid=2, block=32,
)  # fmt: skip
add(
    "recursion unrolled by templates", """
    template <int N> __device__ int fold(const int* x) { return fold<N / 2>(x) ^ fold<N / 2>(x + N / 2); }
    template <> __device__ int fold<1>(const int* x) { return *x; }
    template <int N> __global__ void parity(const int* x, int* out) { out[threadIdx.x] = fold<N>(x + N * threadIdx.x); }""",
    lambda rng: [integers(rng, 0, 1 << 30, 32, 8), np.zeros(32, np.int32)],
    lambda x, out: {1: np.bitwise_xor.reduce(x, axis=1)}, entry="parity<8>", block=32,
)  # fmt: skip
add(
    "binary search in constant memory", """
    __constant__ int table[8] = {2, 3, 5, 7, 11, 13, 17, 19};
    __global__ void find(const int* x, int* out) {
        int low = 0;
        for (int step = 4; step; step /= 2) if (table[low + step - 1] < x[threadIdx.x]) low += step;
        out[threadIdx.x] = low;
    }""",
    lambda rng: [integers(rng, 0, 18, 32), np.zeros(32, np.int32)],
    lambda x, out: {1: np.minimum(np.searchsorted([2, 3, 5, 7, 11, 13, 17], x), 7).astype(np.int32)}, block=32,
)  # fmt: skip
add(
    "lock by compare and swap", """
    __global__ void locked(int* lock, int* sum, const int* x) {
        if (threadIdx.x == 0) {
            while (atomicCAS(lock, 0, 1)) {}
            __threadfence();
            *(volatile int*)sum += x[blockIdx.x];
            __threadfence();
            atomicExch(lock, 0);
        }
    }""",
    lambda rng: [np.zeros(1, np.int32), np.zeros(1, np.int32), integers(rng, -99, 99, 4)],
    lambda lock, total, x: {0: lock, 1: x.sum(keepdims=True).astype(np.int32)}, grid=4, block=32,
)  # fmt: skip

# ---- CUB

add(
    "cub::BlockReduce", """
    #include <cub/block/block_reduce.cuh>
    template <int THREADS> __global__ void largest(const int* x, int* out) {
        using Reduce = cub::BlockReduce<int, THREADS>;
        __shared__ typename Reduce::TempStorage storage;
        int total = Reduce(storage).Sum(x[blockIdx.x * THREADS + threadIdx.x]);
        if (threadIdx.x == 0) out[blockIdx.x] = total;
    }""",
    lambda rng: [integers(rng, -1000, 1000, 2, 64), np.zeros(2, np.int32)],
    lambda x, out: {1: x.sum(1).astype(np.int32)}, entry="largest<64>", grid=2, block=64,
)  # fmt: skip
add(
    "cub::BlockScan", """
    #include <cub/block/block_scan.cuh>
    template <typename T, int THREADS> __global__ void prefix(const T* x, T* inclusive, T* exclusive) {
        using Scan = cub::BlockScan<T, THREADS>;
        __shared__ typename Scan::TempStorage storage;
        T value = x[threadIdx.x];
        Scan(storage).InclusiveSum(value, inclusive[threadIdx.x]);
        __syncthreads();
        Scan(storage).ExclusiveSum(value, exclusive[threadIdx.x]);
    }""",
    lambda rng: [integers(rng, -1000, 1000, 64), np.zeros(64, np.int32), np.zeros(64, np.int32)],
    lambda x, inclusive, exclusive: {1: x.cumsum().astype(np.int32), 2: (x.cumsum() - x).astype(np.int32)},
    entry="prefix<int, 64>", block=64,
)  # fmt: skip
add(
    "cub::BlockRadixSort of pairs", """
    #include <cub/block/block_radix_sort.cuh>
    template <int THREADS, int ITEMS> __global__ void sort(unsigned* keys, int* values) {
        using Sort = cub::BlockRadixSort<unsigned, THREADS, ITEMS, int>;
        __shared__ typename Sort::TempStorage storage;
        unsigned key[ITEMS];
        int value[ITEMS];
        for (int i = 0; i < ITEMS; ++i) { key[i] = keys[threadIdx.x * ITEMS + i]; value[i] = values[threadIdx.x * ITEMS + i]; }
        Sort(storage).Sort(key, value, 0, 8);
        for (int i = 0; i < ITEMS; ++i) { keys[threadIdx.x * ITEMS + i] = key[i]; values[threadIdx.x * ITEMS + i] = value[i]; }
    }""",
    lambda rng: [integers(rng, 0, 200, 64, dtype=np.uint32), np.arange(64, dtype=np.int32)],
    lambda keys, values: {0: np.sort(keys), 1: values[np.argsort(keys, kind="stable")]}, entry="sort<32, 2>", block=32,
)  # fmt: skip
add(
    "cub::WarpReduce and WarpScan", """
    #include <cub/warp/warp_reduce.cuh>
    #include <cub/warp/warp_scan.cuh>
    __global__ void warps(const int* x, int* sums, int* prefixes) {
        using Reduce = cub::WarpReduce<int>; using Scan = cub::WarpScan<int>;
        __shared__ Reduce::TempStorage first[2];
        __shared__ Scan::TempStorage second[2];
        int warp = threadIdx.x / 32, value = x[threadIdx.x], total = Reduce(first[warp]).Sum(value);
        if (threadIdx.x % 32 == 0) sums[warp] = total;
        Scan(second[warp]).InclusiveSum(value, prefixes[threadIdx.x]);
    }""",
    lambda rng: [integers(rng, -1000, 1000, 2, 32), np.zeros(2, np.int32), np.zeros((2, 32), np.int32)],
    lambda x, sums, prefixes: {1: x.sum(1).astype(np.int32), 2: x.cumsum(1).astype(np.int32)}, block=64,
)  # fmt: skip

# ---- cooperative groups and libcu++

add(
    "cooperative groups: tiles", """
    #include <cooperative_groups.h>
    #include <cooperative_groups/reduce.h>
    namespace cg = cooperative_groups;
    __global__ void tiles(const int* x, int* out) {
        auto tile = cg::tiled_partition<8>(cg::this_thread_block());
        int total = cg::reduce(tile, x[threadIdx.x], cg::plus<int>());
        out[threadIdx.x] = total * 8 + tile.thread_rank();
    }""",
    lambda rng: [integers(rng, -1000, 1000, 8, 8), np.zeros((8, 8), np.int32)],
    lambda x, out: {1: (x.sum(1, keepdims=True) * 8 + np.arange(8)).astype(np.int32)}, block=64,
)  # fmt: skip
add(
    "cooperative groups: the grid", """
    #include <cooperative_groups.h>
    __global__ void neighbours(int* x, int* out) {
        int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
        x[i] = x[i] * 2 + 1;
        cooperative_groups::this_grid().sync();
        out[i] = ((volatile int*)x)[(i + blockDim.x) % n];
    }""",
    lambda rng: [integers(rng, -99, 99, 96), np.zeros(96, np.int32)],
    lambda x, out: {1: np.roll(2 * x + 1, -32)}, grid=3, block=32, cooperative=True,
)  # fmt: skip
add(
    "cooperative groups: a cluster", """
    #include <cooperative_groups.h>
    namespace cg = cooperative_groups;
    __global__ void __cluster_dims__(2) exchange(const int* x, int* out) {
        __shared__ int mine[32];
        auto cluster = cg::this_cluster();
        mine[threadIdx.x] = x[blockIdx.x * 32 + threadIdx.x];
        cluster.sync();
        out[blockIdx.x * 32 + threadIdx.x] = cluster.map_shared_rank(mine, cluster.block_rank() ^ 1)[threadIdx.x];
        cluster.sync();
    }""",
    lambda rng: [integers(rng, -99, 99, 2, 32), np.zeros((2, 32), np.int32)],
    lambda x, out: {1: x[::-1]}, target="H100", grid=2, block=32,
)  # fmt: skip
add(
    "cuda::atomic_ref and cuda::std", """
    #include <cuda/atomic>
    #include <cuda/std/array>
    #include <cuda/std/bit>
    __global__ void counts(const unsigned* x, unsigned* largest, int* bits) {
        cuda::std::array<unsigned, 2> pair = {x[2 * threadIdx.x], x[2 * threadIdx.x + 1]};
        for (unsigned value : pair) cuda::atomic_ref<unsigned, cuda::thread_scope_device>(*largest).fetch_max(value);
        bits[threadIdx.x] = cuda::std::popcount(pair[0]) - cuda::std::countl_zero(pair[1]);
    }""",
    lambda rng: [integers(rng, 1, 1 << 31, 32, 2, dtype=np.uint32), np.zeros(1, np.uint32), np.zeros(32, np.int32)],
    lambda x, largest, bits: {
        1: x.max(keepdims=True).reshape(1), 2: np.array([int(a).bit_count() - 32 + int(b).bit_length() for a, b in x], np.int32),
    }, block=32,
)  # fmt: skip


def fp8(x, name):
    """Codes of f32 numbers, saturated."""
    import ml_dtypes

    dtype = getattr(ml_dtypes, name)
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -limit, limit).astype(dtype).view(np.uint8)
