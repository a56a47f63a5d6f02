// Barriers of part of a block: pairs of warps hand buffers on by bar.sync and bar.arrive; barriers that count, and warps that wait for their lanes.
#include <cstdint>

__device__ __forceinline__ void wait_for(int barrier, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory"); }
__device__ __forceinline__ void arrive_at(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory"); }

// Warp 0 makes rounds of numbers in two buffers, warp 1 takes them: barriers 1 and 2 say full, 3 and 4 empty
extern "C" __global__ void handed_on(const int* x, int* y, int rounds) {
    __shared__ int buffers[2][32];
    int lane = threadIdx.x % 32;
    x += blockIdx.x * rounds * 32, y += blockIdx.x * 32;
    if (threadIdx.x < 32) {
#pragma unroll 1
        for (int i = 0; i < rounds; i++) {
            if (i >= 2) wait_for(3 + i % 2, 64);
            buffers[i % 2][lane] = x[i * 32 + lane] + i;
            arrive_at(1 + i % 2, 64);
        }
    } else {
        int sum = 0;
#pragma unroll 1
        for (int i = 0; i < rounds; i++) {
            wait_for(1 + i % 2, 64);
            sum = sum * 3 + buffers[i % 2][31 - lane];
            if (i + 2 < rounds) arrive_at(3 + i % 2, 64);
        }
        y[lane] = sum;
    }
}

extern "C" __global__ void counted(const int* x, int* y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, value = x[i];
    int odd = __syncthreads_count(value & 1), all = __syncthreads_and(value > -90), any = __syncthreads_or(value == 7);
    int rounds = 0;
    while (__syncthreads_or(value > rounds * 16)) rounds++;  // all threads go round as often as the largest number wants
    y[i] = odd * 1000 + all * 100 + any * 200 + rounds;
}
