// D = A * B by mma.sync and ldmatrix, B by columns; one entry a type. Then f16 with f16 sums, and B by rows, which ldmatrix transposes.
#include "block_tile.cuh"

MMA(F16, float, "f", "m16n8k16.row.col.f32.f16.f16.f32")
MMA(BF16, float, "f", "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA(TF32, float, "f", "m16n8k8.row.col.f32.tf32.tf32.f32")
MMA(S8, int, "r", "m16n8k32.row.col.s32.s8.s8.s32")
MMA(U8S8, int, "r", "m16n8k32.row.col.satfinite.s32.u8.s8.s32")
MMA(S4, int, "r", "m16n8k64.row.col.s32.s4.s4.s32")
MMA(B1, int, "r", "m16n8k256.row.col.s32.b1.b1.s32.xor.popc")

#define GEMM(name, Mma, Sum)                                                                              \
    extern "C" __global__ void name(const void* a, const void* b, Sum* d, int n, int row_bytes) {         \
        Sum sum[2][4] = {};                                                                               \
        block_tile<Mma>(a, b, row_bytes, sum);                                                            \
        each_pair(sum, [=](int row, int column, Sum first, Sum second) {                                  \
            d[row * n + column] = first;                                                                  \
            d[row * n + column + 1] = second;                                                             \
        });                                                                                               \
    }

GEMM(mma_f16, F16, float)
GEMM(mma_bf16, BF16, float)
GEMM(mma_tf32, TF32, float)
GEMM(mma_s8, S8, int)
GEMM(mma_u8_s8, U8S8, int)
GEMM(mma_s4, S4, int)
GEMM(mma_b1, B1, int)

// One warp, 16 x 16: A and B from shared memory, B by rows; sums in f16
extern "C" __global__ void mma_f16_trans(const __half* a, const __half* b, __half* d, int k) {
    __shared__ __align__(16) __half tiles[2][16][16];
    int lane = threadIdx.x, row = lane / 2, half = lane % 2 * 8;
    uint32_t sum[2][2] = {};
    for (int i = 0; i < k; i += 16) {
        *(uint4*)&tiles[0][row][half] = *(const uint4*)(a + row * k + i + half);
        *(uint4*)&tiles[1][row][half] = *(const uint4*)(b + (i + row) * 16 + half);
        __syncwarp();
        uint32_t a_tile[4], b_tile[4];
        ldmatrix_x4(a_tile, shared_address(&tiles[0][lane % 16][lane / 16 * 8]));
        ldmatrix_x4_trans(b_tile, shared_address(&tiles[1][lane % 16][lane / 16 * 8]));
        for (int j = 0; j < 2; j++)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
                         : "+r"(sum[j][0]), "+r"(sum[j][1])
                         : "r"(a_tile[0]), "r"(a_tile[1]), "r"(a_tile[2]), "r"(a_tile[3]), "r"(b_tile[2 * j]), "r"(b_tile[2 * j + 1]));
        __syncwarp();
    }
    for (int j = 0; j < 2; j++)
        for (int i = 0; i < 2; i++) *(uint32_t*)&d[(lane / 4 + 8 * i) * 16 + 8 * j + lane % 4 * 2] = sum[j][i];
}

// m8n8k4 of f64: one warp makes 8 x 8, with no shared memory
extern "C" __global__ void mma_f64(const double* a, const double* b, double* d, int k) {
    int row = threadIdx.x / 4, column = threadIdx.x % 4;
    double sum[2] = {0, 0};
    for (int i = 0; i < k; i += 4)
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+d"(sum[0]), "+d"(sum[1]) : "d"(a[row * k + i + column]), "d"(b[row * k + i + column]));
    *(double2*)&d[row * 8 + 2 * column] = make_double2(sum[0], sum[1]);
}
