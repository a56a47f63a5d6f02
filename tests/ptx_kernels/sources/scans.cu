// Prefix sums: of a warp by shuffles; of a block, warp by warp; of an array in work-efficient form (Blelloch), in shared memory.
#include <cstdint>

__device__ int warp_scan(int x) {
    for (int i = 1; i < 32; i *= 2) {
        int other = __shfl_up_sync(~0u, x, i);
        if (threadIdx.x % 32 >= i) x += other;
    }
    return x;
}

extern "C" __global__ void block_scan(const int* x, int* y) {
    __shared__ int totals[32];
    int thread = threadIdx.x, i = blockIdx.x * blockDim.x + thread, value = warp_scan(x[i]);
    if (thread % 32 == 31) totals[thread / 32] = value;
    __syncthreads();
    if (thread < 32) totals[thread] = warp_scan(thread < blockDim.x / 32 ? totals[thread] : 0);
    __syncthreads();
    y[i] = value + (thread >= 32 ? totals[thread / 32 - 1] : 0);
}

extern "C" __global__ void blelloch(const float* x, float* y) {
    __shared__ float held[256];
    int thread = threadIdx.x, start = blockIdx.x * 256, offset = 1;
    held[2 * thread] = x[start + 2 * thread];
    held[2 * thread + 1] = x[start + 2 * thread + 1];
#pragma unroll 1
    for (int i = 128; i > 0; i /= 2, offset *= 2) {
        __syncthreads();
        if (thread < i) held[offset * (2 * thread + 2) - 1] += held[offset * (2 * thread + 1) - 1];
    }
    if (thread == 0) held[255] = 0;
#pragma unroll 1
    for (int i = 1; i < 256; i *= 2) {
        offset /= 2;
        __syncthreads();
        if (thread < i) {
            int low = offset * (2 * thread + 1) - 1, high = offset * (2 * thread + 2) - 1;
            float old = held[low];
            held[low] = held[high];
            held[high] += old;
        }
    }
    __syncthreads();
    y[start + 2 * thread] = held[2 * thread];
    y[start + 2 * thread + 1] = held[2 * thread + 1];
}
