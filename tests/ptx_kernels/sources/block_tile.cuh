// A block of four warps makes a 32 x 32 tile of A * B by ldmatrix and mma.sync. A is M x K, B is N x K (its columns lie together), both by rows
// of bytes; a step takes 32 bytes of each row, whatever the type. `Mma::run(sum, a, b0, b1)` is the instruction.
#pragma once
#include "common.cuh"

template <typename Mma, typename Sum>
__device__ __forceinline__ void block_tile(const void* a, const void* b, int row_bytes, Sum (&sum)[2][4]) {
    __shared__ __align__(16) uint8_t tiles[2][32][48];  // 32 bytes a row, 16 so that no two rows of eight meet in a bank
    int thread = threadIdx.x, lane = thread % 32, side = thread / 64, row = thread % 64 / 2, half = thread % 2 * 16;
    const char* from = (const char*)(side ? b : a) + ((side ? blockIdx.x : blockIdx.y) * 32 + row) * row_bytes + half;
    uint32_t a_address = shared_address(&tiles[0][thread / 64 * 16 + lane % 16][lane / 16 * 16]);
    uint32_t b_address = shared_address(&tiles[1][thread / 32 % 2 * 16 + lane % 8 + lane / 16 * 8][lane / 8 % 2 * 16]);
    for (int i = 0; i < row_bytes; i += 32) {
        *(uint4*)&tiles[side][row][half] = *(const uint4*)(from + i);
        __syncthreads();
        uint32_t a_tile[4], b_tile[4];
        ldmatrix_x4(a_tile, a_address);
        ldmatrix_x4(b_tile, b_address);
        Mma::run(sum[0], a_tile, b_tile[0], b_tile[1]);
        Mma::run(sum[1], a_tile, b_tile[2], b_tile[3]);
        __syncthreads();
    }
}

// Calls `use(row, column, first, second)` for each two neighbours of the tile that this thread holds.
template <typename Sum, typename Use>
__device__ __forceinline__ void each_pair(const Sum (&sum)[2][4], Use use) {
    int lane = threadIdx.x % 32, row = blockIdx.y * 32 + threadIdx.x / 64 * 16 + lane / 4;
    int column = blockIdx.x * 32 + threadIdx.x / 32 % 2 * 16 + lane % 4 * 2;
    for (int i = 0; i < 2; i++) {
        use(row, column + 8 * i, sum[i][0], sum[i][1]);
        use(row + 8, column + 8 * i, sum[i][2], sum[i][3]);
    }
}

#define MMA(name, Sum, letter, spelling)                                                                                               \
    struct name {                                                                                                                      \
        static __device__ __forceinline__ void run(Sum (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {                    \
            asm volatile("mma.sync.aligned." spelling " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"               \
                         : "+" letter(d[0]), "+" letter(d[1]), "+" letter(d[2]), "+" letter(d[3])                                      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                              \
        }                                                                                                                              \
    };
