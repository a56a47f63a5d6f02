// Reductions: a tree in shared memory, shuffles (sum, largest element with its place), redux.sync, and a vote.
#include <cstdint>

extern "C" __global__ void tree_sum(const float* x, float* sums) {
    __shared__ float held[256];
    int thread = threadIdx.x;
    held[thread] = x[blockIdx.x * 512 + thread] + x[blockIdx.x * 512 + 256 + thread];
    __syncthreads();
    for (int i = blockDim.x / 2; i > 0; i /= 2) {
        if (thread < i) held[thread] += held[thread + i];
        __syncthreads();
    }
    if (thread == 0) sums[blockIdx.x] = held[0];
}

// The largest of each row of any length, and the first place where it stands; NaN is no number
extern "C" __global__ void largest(const float* x, float* values, int* places, int columns) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    float best = -INFINITY;
    int place = columns;
    for (int i = lane; i < columns; i += 32) {
        float value = x[row * columns + i];
        if (value > best) best = value, place = i;
    }
    for (int i = 16; i > 0; i /= 2) {
        float other = __shfl_down_sync(~0u, best, i);
        int elsewhere = __shfl_down_sync(~0u, place, i);
        if (other > best || (other == best && elsewhere < place)) best = other, place = elsewhere;
    }
    if (lane == 0) values[row] = best, places[row] = place;
}

extern "C" __global__ void redux(const int* x, int* out) {
    int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, value = x[blockIdx.x * blockDim.x + threadIdx.x];
    int sum = __reduce_add_sync(~0u, value), smallest = __reduce_min_sync(~0u, value);
    unsigned greatest = __reduce_max_sync(~0u, (unsigned)value), bits = __reduce_xor_sync(~0u, (unsigned)value);
    int odd = 0;
    if (value & 1) odd = __reduce_add_sync(__activemask(), value);
    odd = __reduce_or_sync(~0u, (unsigned)odd);
    if (threadIdx.x % 32 == 0) {
        int* to = out + warp * 5;
        to[0] = sum, to[1] = smallest, to[2] = greatest, to[3] = bits, to[4] = odd;
    }
}
