// Softmax of rows: a warp a row, in registers; a block a row, with the running maximum of FlashAttention. ex2.approx: not exact.
// use_fast_math
#include <cstdint>

__device__ float warp_max(float x) {
    for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}

__device__ float warp_sum(float x) {
    for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

extern "C" __global__ void softmax_warp(const float* x, float* y, int columns) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    float held[4], largest = -INFINITY, sum = 0;
    for (int i = 0; i < 4; i++) {
        int column = i * 32 + lane;
        held[i] = column < columns ? x[row * columns + column] : -INFINITY;
        largest = fmaxf(largest, held[i]);
    }
    largest = warp_max(largest);
    for (int i = 0; i < 4; i++) sum += held[i] = __expf(held[i] - largest);
    sum = 1 / warp_sum(sum);
    for (int i = 0; i < 4; i++)
        if (i * 32 + lane < columns) y[row * columns + i * 32 + lane] = held[i] * sum;
}

extern "C" __global__ void softmax_online(const float* x, float* y, int columns) {
    __shared__ float maxima[4], sums[4];
    x += blockIdx.x * columns, y += blockIdx.x * columns;
    float largest = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float larger = fmaxf(largest, x[i]);
        sum = sum * exp2f((largest - larger) * 1.44269504f) + exp2f((x[i] - larger) * 1.44269504f);
        largest = larger;
    }
    float of_warp = warp_max(largest);
    sum = warp_sum(largest == -INFINITY ? 0 : sum * exp2f((largest - of_warp) * 1.44269504f));
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = of_warp, sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float of_block = fmaxf(fmaxf(maxima[0], maxima[1]), fmaxf(maxima[2], maxima[3])), total = 0;
    for (int i = 0; i < 4; i++) total += sums[i] * exp2f((maxima[i] - of_block) * 1.44269504f);
    for (int i = threadIdx.x; i < columns; i += blockDim.x) y[i] = exp2f((x[i] - of_block) * 1.44269504f) / total;
}
