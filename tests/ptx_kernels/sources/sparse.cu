// mma.sp: a warp multiplies a sparse A (16 x K, half of it stored) by B (8 columns of K), from global memory by way of ldmatrix.
#include "common.cuh"

#define SPARSE(name, Sum, letter, spelling)                                                                                                  \
    extern "C" __global__ void name(const char* a, const char* b, const uint32_t* metadata, Sum* d, int steps) {                             \
        __shared__ __align__(16) char a_tile[16][32], b_tile[8][64];                                                                         \
        int lane = threadIdx.x;                                                                                                              \
        Sum sum[4] = {};                                                                                                                     \
        for (int i = 0; i < steps; i++) {                                                                                                    \
            *(uint4*)&a_tile[lane / 2][lane % 2 * 16] = *(const uint4*)(a + (lane / 2 * steps + i) * 32 + lane % 2 * 16);                    \
            *(uint4*)&b_tile[lane / 4][lane % 4 * 16] = *(const uint4*)(b + (lane / 4 * steps + i) * 64 + lane % 4 * 16);                    \
            __syncwarp();                                                                                                                    \
            uint32_t x[4], y[4];                                                                                                             \
            ldmatrix_x4(x, shared_address(&a_tile[lane % 16][lane / 16 * 16]));                                                              \
            ldmatrix_x4(y, shared_address(&b_tile[lane % 8][lane / 8 * 16]));                                                                \
            asm volatile("mma.sp::ordered_metadata.sync.aligned." spelling                                                                   \
                         " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0x0;"                              \
                         : "+" letter(sum[0]), "+" letter(sum[1]), "+" letter(sum[2]), "+" letter(sum[3])                                    \
                         : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]), "r"(y[2]), "r"(y[3]),                           \
                           "r"(metadata[i * 32 + lane]));                                                                                    \
            __syncwarp();                                                                                                                    \
        }                                                                                                                                    \
        for (int i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sum[i];                                           \
    }

SPARSE(sparse_f16, float, "f", "m16n8k32.row.col.f32.f16.f16.f32")
SPARSE(sparse_bf16, float, "f", "m16n8k32.row.col.f32.bf16.bf16.f32")
SPARSE(sparse_s8, int, "r", "m16n8k64.row.col.s32.s8.s8.s32")
