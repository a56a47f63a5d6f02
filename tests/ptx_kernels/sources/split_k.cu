// Split-K: blocks along z take slices of K and bring their sums together: by atomics in any order (exact in integers, and in floats that hold
// small integers), by a semaphore in the order of the slices, by the last block that arrives.
#include "block_tile.cuh"

MMA(F16, float, "f", "m16n8k16.row.col.f32.f16.f16.f32")
MMA(S8, int, "r", "m16n8k32.row.col.s32.s8.s8.s32")

#define SLICE(pointer) ((const char*)(pointer) + blockIdx.z * slice_bytes)

// block_tile with rows of which only a slice is taken: rows are `row_bytes` apart
template <typename Mma, typename Sum>
__device__ __forceinline__ void slice_tile(const void* a, const void* b, int row_bytes, Sum (&sum)[2][4]) {
    int slice_bytes = row_bytes / gridDim.z, lane = threadIdx.x % 32;
    int row = blockIdx.y * 32 + threadIdx.x / 64 * 16 + lane / 4, column = blockIdx.x * 32 + threadIdx.x / 32 % 2 * 16 + lane / 4;
    for (int i = 0; i < slice_bytes; i += 32) {
        const char *x = SLICE(a) + row * row_bytes + i + lane % 4 * 4, *y = SLICE(b) + column * row_bytes + i + lane % 4 * 4;
        uint32_t a_tile[4], b_tile[4];
        for (int j = 0; j < 4; j++) {
            a_tile[j] = *(const uint32_t*)(x + j % 2 * 8 * row_bytes + j / 2 * 16);
            b_tile[j] = *(const uint32_t*)(y + j / 2 * 8 * row_bytes + j % 2 * 16);
        }
        Mma::run(sum[0], a_tile, b_tile[0], b_tile[1]);
        Mma::run(sum[1], a_tile, b_tile[2], b_tile[3]);
    }
}

extern "C" __global__ void split_k_atomics(const void* a, const void* b, float* d, int n, int row_bytes) {
    float sum[2][4] = {};
    slice_tile<F16>(a, b, row_bytes, sum);
    each_pair(sum, [=](int row, int column, float first, float second) {
        atomicAdd(&d[row * n + column], first);
        atomicAdd(&d[row * n + column + 1], second);
    });
}

extern "C" __global__ void split_k_s8(const void* a, const void* b, int* d, int n, int row_bytes) {
    int sum[2][4] = {};
    slice_tile<S8>(a, b, row_bytes, sum);
    each_pair(sum, [=](int row, int column, int first, int second) {
        atomicAdd(&d[row * n + column], first);
        atomicAdd(&d[row * n + column + 1], second);
    });
}

extern "C" __global__ void split_k_semaphore(const void* a, const void* b, float* d, int* semaphores, int n, int row_bytes) {
    float sum[2][4] = {};
    slice_tile<F16>(a, b, row_bytes, sum);
    volatile int* semaphore = semaphores + blockIdx.y * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0)
        while (*semaphore != blockIdx.z) {}
    __syncthreads();
    each_pair(sum, [=](int row, int column, float first, float second) {
        volatile float* to = d + row * n + column;
        if (blockIdx.z > 0) first += to[0], second += to[1];
        to[0] = first;
        to[1] = second;
    });
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *semaphore = blockIdx.z + 1;
}

extern "C" __global__ void split_k_last(const void* a, const void* b, float* parts, unsigned* arrived, __half* d, int n, int row_bytes) {
    __shared__ bool last;
    float sum[2][4] = {};
    slice_tile<F16>(a, b, row_bytes, sum);
    int size = gridDim.y * 32 * n;
    each_pair(sum, [=](int row, int column, float first, float second) {
        *(float2*)&parts[blockIdx.z * size + row * n + column] = make_float2(first, second);
    });
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(&arrived[blockIdx.y * gridDim.x + blockIdx.x], gridDim.z - 1) == gridDim.z - 1;
    __syncthreads();
    if (!last) return;
    each_pair(sum, [=](int row, int column, float, float) {
        float2 total = make_float2(0, 0);
        for (int i = 0; i < gridDim.z; i++) {
            float2 part = __ldcg((const float2*)&parts[i * size + row * n + column]);
            total.x += part.x;
            total.y += part.y;
        }
        *(__half2*)&d[row * n + column] = __float22half2_rn(total);
    });
}
