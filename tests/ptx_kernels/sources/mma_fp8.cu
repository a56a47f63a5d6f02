// FP8 by mma.sync (sm_89 and later): every pair of types, and D quantised to e4m3 under a scale.
// sm_90a only
#include "block_tile.cuh"

MMA(E4M3, float, "f", "m16n8k32.row.col.f32.e4m3.e4m3.f32")
MMA(E5M2, float, "f", "m16n8k32.row.col.f32.e5m2.e5m2.f32")
MMA(E4M3E5M2, float, "f", "m16n8k32.row.col.f32.e4m3.e5m2.f32")

#define GEMM(name, Mma)                                                                                   \
    extern "C" __global__ void name(const void* a, const void* b, float* d, int n, int row_bytes) {       \
        float sum[2][4] = {};                                                                             \
        block_tile<Mma>(a, b, row_bytes, sum);                                                            \
        each_pair(sum, [=](int row, int column, float first, float second) {                              \
            *(float2*)&d[row * n + column] = make_float2(first, second);                                  \
        });                                                                                               \
    }

GEMM(mma_e4m3, E4M3)
GEMM(mma_e5m2, E5M2)
GEMM(mma_e4m3_e5m2, E4M3E5M2)

extern "C" __global__ void mma_e4m3_quantised(const void* a, const void* b, uint8_t* d, float* largest, int n, int row_bytes, float scale) {
    float sum[2][4] = {};
    block_tile<E4M3>(a, b, row_bytes, sum);
    float magnitude = 0;
    each_pair(sum, [&](int row, int column, float first, float second) {
        uint16_t both;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second * scale), "f"(first * scale));
        *(uint16_t*)&d[row * n + column] = both;
        magnitude = fmaxf(magnitude, fmaxf(fabsf(first), fabsf(second)));
    });
    for (int i = 16; i > 0; i /= 2) magnitude = fmaxf(magnitude, __shfl_xor_sync(~0u, magnitude, i));
    if (threadIdx.x % 32 == 0) atomicMax((int*)largest, __float_as_int(magnitude));  // of floats that are not negative: as integers
}
