// Atomic operations of every kind, aggregated by warps, and locks: blocks that wait for one another.
#include <cstdint>
#include <cuda_fp16.h>

extern "C" __global__ void atomics(const int* x, int* results, unsigned long long* wide, float* sum, double* sum64) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, value = x[i], slot = i % 4;
    atomicAdd(&results[slot], value);
    atomicSub(&results[4 + slot], value);
    atomicMin(&results[8 + slot], value);
    atomicMax(&results[12 + slot], value);
    atomicAnd(&results[16 + slot], value | 0x0F0F0F0F);
    atomicOr(&results[20 + slot], value & 0x01010101 << slot);
    atomicXor(&results[24 + slot], value);
    atomicInc((unsigned*)&results[28 + slot], 6);
    atomicDec((unsigned*)&results[32 + slot], 9);
    atomicMax((unsigned*)&results[36 + slot], (unsigned)value);
    atomicAdd(&wide[slot], (unsigned long long)(long long)value << 20);
    atomicMin((long long*)&wide[4 + slot], (long long)value * value - 77);
    atomicMax(&wide[8 + slot], (unsigned long long)value * 0x100000001ull);
    atomicAdd(&sum[slot], (float)(value % 1024));          // small integers: every order gives the same bits
    atomicAdd(&sum64[slot], (double)(value % 1024) * 0.5);
}

// A float maximum by compare and swap, in a loop of each thread
extern "C" __global__ void swap_loop(const float* x, unsigned* largest, unsigned short* halves) {
    float value = x[blockIdx.x * blockDim.x + threadIdx.x];
    unsigned old = *largest;
    while (__uint_as_float(old) < value) {
        unsigned seen = atomicCAS(largest, old, __float_as_uint(value));
        if (seen == old) break;
        old = seen;
    }
    atomicCAS(halves, 7, 1234);  // one of all threads finds 7
    if (threadIdx.x == 0) atomicExch(largest + 1, 99u);
}

// A counter that every thread raises while it holds the lock; the lock parts the threads of each warp
extern "C" __global__ void spin_lock(int* lock, int* counter, int* checksum) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    bool done = false;
    while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
            __threadfence();
            int count = *(volatile int*)counter;
            *(volatile int*)counter = count + 1;
            *(volatile int*)checksum = *(volatile int*)checksum ^ i * 2654435761u;
            __threadfence();
            atomicExch(lock, 0);
            done = true;
        }
    }
}

// Blocks in a row: each waits for the one before it and hands on a sum
extern "C" __global__ void chained_scan(const int* x, int* y, int* handed, int* flags) {
    __shared__ int before, total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    int value = x[blockIdx.x * blockDim.x + threadIdx.x];
    atomicAdd(&total, value);
    __syncthreads();
    if (threadIdx.x == 0) {
        before = 0;
        if (blockIdx.x > 0) {
            while (atomicAdd(&flags[blockIdx.x - 1], 0) == 0) __nanosleep(20);
            __threadfence();
            before = ((volatile int*)handed)[blockIdx.x - 1];
        }
        handed[blockIdx.x] = before + total;
        __threadfence();
        atomicExch(&flags[blockIdx.x], 1);
    }
    __syncthreads();
    y[blockIdx.x * blockDim.x + threadIdx.x] = before + value;
}

// One atomic for all threads of a warp that keep their number; then match and vote
extern "C" __global__ void compacted(const int* x, int* kept, int* size, unsigned* groups, int below) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, value = x[i];
    if (value < below) {
        unsigned mask = __activemask();
        int leader = __ffs(mask) - 1, place = 0;
        if (lane == leader) place = atomicAdd(size, __popc(mask));
        place = __shfl_sync(mask, place, leader) + __popc(mask & ((1u << lane) - 1));
        kept[place] = value;  // in whichever order warps come
        atomicAdd(&size[1], value);
    }
    __syncwarp();
    unsigned same = __match_any_sync(~0u, value & 7);
    int all;
    unsigned everyone = __match_all_sync(~0u, blockIdx.x, &all);
    unsigned odd = __ballot_sync(~0u, value & 1);
    groups[4 * i] = same;
    groups[4 * i + 1] = everyone + all;
    groups[4 * i + 2] = odd;
    groups[4 * i + 3] = __any_sync(~0u, value == 3) + 2 * __all_sync(~0u, value < 100);
}
