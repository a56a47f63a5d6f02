// D = A * B in f16 by cp.async, with rings of stages and swizzled shared memory. A is M x K and B is K x N, by rows.
#include "common.cuh"

// A block of 8 warps makes 128 x 128 in steps of 32 along K; each warp 64 x 32. Sixteen bytes at a time are swizzled, so that no two of eight
// rows meet in a bank. Three stages.
constexpr int STAGES = 3, A_BYTES = 128 * 64, B_BYTES = 32 * 256;

extern "C" __global__ void __launch_bounds__(256) gemm_128x128(const __half* a, const __half* b, float* d, int n, int k) {
    extern __shared__ __align__(128) char memory[];
    uint32_t base = shared_address(memory);
    int thread = threadIdx.x, lane = thread % 32, warp_row = thread / 128 * 64, warp_column = thread / 32 % 4 * 32;
    a += (size_t)blockIdx.y * 128 * k;
    b += blockIdx.x * 128;
    auto fetch = [&](int step) {
        uint32_t stage = base + step % STAGES * (A_BYTES + B_BYTES);
        for (int i = thread; i < 512; i += 256) {
            int row = i / 4, chunk = i % 4;
            copy_16(stage + row * 64 + ((chunk ^ (row >> 1 & 3)) << 4), a + (size_t)row * k + step * 32 + chunk * 8);
        }
        for (int i = thread; i < 512; i += 256) {
            int row = i / 16, chunk = i % 16;
            copy_16(stage + A_BYTES + row * 256 + ((chunk ^ (row & 7)) << 4), b + (size_t)(step * 32 + row) * n + chunk * 8);
        }
    };
    float sum[4][4][4] = {};
    int steps = k / 32;
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < steps) fetch(i);
        copies_commit();
    }
    for (int step = 0; step < steps; step++) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) fetch(step + STAGES - 1);
        copies_commit();
        uint32_t stage = base + step % STAGES * (A_BYTES + B_BYTES);
        for (int inner = 0; inner < 2; inner++) {
            uint32_t a_tile[4][4], b_tile[2][4];
            for (int i = 0; i < 4; i++) {
                int row = warp_row + i * 16 + lane % 16, chunk = inner * 2 + lane / 16;
                ldmatrix_x4(a_tile[i], stage + row * 64 + ((chunk ^ (row >> 1 & 3)) << 4));
            }
            for (int i = 0; i < 2; i++) {
                int row = inner * 16 + lane % 16, chunk = warp_column / 8 + i * 2 + lane / 16;
                ldmatrix_x4_trans(b_tile[i], stage + A_BYTES + row * 256 + ((chunk ^ (row & 7)) << 4));
            }
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) mma_f16(sum[i][j], a_tile[i], b_tile[j / 2][j % 2 * 2], b_tile[j / 2][j % 2 * 2 + 1]);
        }
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            for (int half = 0; half < 2; half++) {
                int row = blockIdx.y * 128 + warp_row + i * 16 + lane / 4 + half * 8, column = blockIdx.x * 128 + warp_column + j * 8 + lane % 4 * 2;
                *(float2*)&d[(size_t)row * n + column] = make_float2(sum[i][j][half * 2], sum[i][j][half * 2 + 1]);
            }
}

// 32 x 32 a block of four warps, two buffers; M, N and K of any size: what lies outside comes as zeros and is not stored. K a multiple of 8,
// N of 8.
extern "C" __global__ void gemm_edges(const __half* a, const __half* b, float* d, int m, int n, int k) {
    __shared__ __align__(16) __half a_tiles[2][32][24], b_tiles[2][16][40];
    int thread = threadIdx.x, lane = thread % 32, warp_row = thread / 64 * 16, warp_column = thread / 32 % 2 * 16;
    auto fetch = [&](int step) {
        if (thread < 64) {
            int row = blockIdx.y * 32 + thread / 2, column = step * 16 + thread % 2 * 8;
            bool inside = row < m && column < k;
            copy_16_or_zeros(shared_address(&a_tiles[step % 2][thread / 2][thread % 2 * 8]), inside ? a + row * k + column : a, inside ? 16 : 0);
        } else {
            int row = step * 16 + thread % 64 / 4, column = blockIdx.x * 32 + thread % 4 * 8;
            bool inside = row < k && column < n;
            copy_16_or_zeros(shared_address(&b_tiles[step % 2][thread % 64 / 4][thread % 4 * 8]), inside ? b + row * n + column : b, inside ? 16 : 0);
        }
        copies_commit();
    };
    float sum[2][4] = {};
    int steps = (k + 15) / 16;
    fetch(0);
    for (int step = 0; step < steps; step++) {
        if (step + 1 < steps) {
            fetch(step + 1);
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        __syncthreads();
        uint32_t a_tile[4], b_tile[4];
        ldmatrix_x4(a_tile, shared_address(&a_tiles[step % 2][warp_row + lane % 16][lane / 16 * 8]));
        ldmatrix_x4_trans(b_tile, shared_address(&b_tiles[step % 2][lane % 16][warp_column + lane / 16 * 8]));
        mma_f16(sum[0], a_tile, b_tile[0], b_tile[1]);
        mma_f16(sum[1], a_tile, b_tile[2], b_tile[3]);
        __syncthreads();
    }
    for (int i = 0; i < 8; i++) {
        int row = blockIdx.y * 32 + warp_row + lane / 4 + i / 2 % 2 * 8, column = blockIdx.x * 32 + warp_column + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (row < m && column < n) d[row * n + column] = sum[i / 4][i % 4];
    }
}
